"""Whatever flags are given, the command trains, or refuses with exit code 2 and one clear message."""

import re
import shutil
from collections import Counter
from pathlib import Path
from unittest import mock

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from launch import command

from cleanba.cli import COMMANDS

NUMBERS = st.one_of(
    st.sampled_from(
        ["0", "1", "-1", "2", "3", "7", "8", "120", "1e3", "0.5", "nan", "inf", "", "x", "99999999999999999999"]
    ),
    st.integers(-3, 300).map(str),
)
REALS = st.one_of(NUMBERS, st.floats(allow_nan=True, width=32).map(str))
DEVICES = st.lists(st.integers(-1, 9).map(str), max_size=4)
WORDS = {
    **dict.fromkeys(["num-envs", "num-actors", "num-shards", "num-steps", "num-minibatches", "seed"], NUMBERS),
    **dict.fromkeys(["lstm-size", "env-epoch", "checkpoint-frequency", "keep-checkpoints", "log-frequency"], NUMBERS),
    **dict.fromkeys(["learning-rate", "gamma", "ent-coef", "vf-coef", "max-grad-norm"], REALS),
    **dict.fromkeys(["grace-period", "stall-timeout", "peer-timeout"], REALS),
    "env-id": st.sampled_from(["Catch-v0", "CartPole-v1", "Pendulum-v1", "FrozenLake-v1", "catch-v0", "Nope-v1", ""]),
    "network": st.sampled_from(["auto", "mlp", "nature", "impala", "big"]),
    "core": st.sampled_from(["none", "lstm", "gru"]),
    "collector": st.sampled_from(["stepped", "scanned", "None", "both"]),
    "on-nonfinite": st.sampled_from(["stop", "ignore", "go"]),
    "hiddens": st.lists(NUMBERS, max_size=3),
    "channels": st.lists(NUMBERS, max_size=3),
    "actor-device-ids": DEVICES,
    "learner-device-ids": DEVICES,
    "no-concurrency": st.none(),
    "no-anneal-lr": st.none(),
    "coordinator-address": st.just("127.0.0.1:1"),
    "experiment": st.sampled_from(["", "/nowhere", "."]),
    "clip-coef": REALS,  # PPO's
    "update-epochs": NUMBERS,
    "rho-clip": REALS,  # IMPALA's
}


# Flags of the commands that do not train.  DONE, OTHER and DAMAGED stand for directories: `places`.
PLACES = ["DONE", "DONE", "DONE", "OTHER", "DAMAGED", "EMPTY", "/nowhere", ".", "", "hf://nobody", "hf://a/../b"]
PLACE = st.sampled_from(PLACES)
COUNTS = st.sampled_from(["0", "1", "2", "3", "-1", "1e0", "1.5", "nan", "x", ""])
OTHER_WORDS = {
    "eval": {
        "episodes": COUNTS,
        "checkpoint": st.sampled_from(["last", "best", "5", "7", "-1", "", "newest"]),
        "seed": NUMBERS,
        "greedy": st.none(),
        "epsilon": REALS,
        "video": st.none(),
        "max-steps": COUNTS,
    },
    "resume": {
        "actor-device-ids": DEVICES,
        "learner-device-ids": DEVICES,
        "gamma": REALS,
        "total-timesteps": NUMBERS,
        "env-id": st.sampled_from(["Catch-v0", "CartPole-v1"]),
    },
    "plot": {
        "metric": st.sampled_from(["losses/entropy", "charts/nothing", ""]),
        "out": st.sampled_from(["EMPTY/figure", "DAMAGED/config.json/figure", "/proc/figure.png"]),
    },
    "report": {"out": st.sampled_from(["EMPTY/page.html", "/proc/page.html", "EMPTY"])},
    "export": {
        "format": st.sampled_from(["onnx", "stablehlo", "onx", ""]),
        "out": st.sampled_from(["EMPTY/x.onnx", "/proc/x.onnx", "EMPTY"]),
    },
    "pack": {"out": st.sampled_from(["EMPTY/x.tar.gz", "/proc/x.tar.gz", "EMPTY", "x.zip"]), "checkpoints": st.none()},
    "push": {"repo": st.sampled_from(["name", "a/b", "", "-"]), "private": st.none(), "hf-entity": st.just("me")},
    "sweep": {
        "env-ids": st.lists(st.sampled_from(["Catch-v0", "@atari9", "Nope-v1", "CartPole-v1", ""]), max_size=2),
        "num-seeds": COUNTS,
        "set": st.lists(st.sampled_from(["gamma=0.9,0.99", "gamma=2", "seed=1", "gamma", "x=1", "=", ""]), max_size=2),
        "workers": COUNTS,
        "retries": COUNTS,
        "slurm": st.sampled_from(["/nowhere", "."]),
    },
    "verify": {
        "segments": COUNTS,
        "fraction": REALS,
        "from": COUNTS,
        "to": COUNTS,
        "seed": NUMBERS,
        "learner-device-ids": DEVICES,
        "despite": st.sampled_from(["revision", "all"]),
    },
    "ls": {},
    "envs": {},
    "diff": {},
    "bisect": {"from": COUNTS, "to": COUNTS},
    "completion": {},
}


def drawn_flags(draw, known: dict) -> list[str]:
    """A few of the flags with values, sometimes with one that does not exist."""
    words = []
    for name in draw(st.lists(st.sampled_from([*sorted(known), "bogus"]), max_size=4, unique=True)):
        value = draw(known.get(name, st.just("1")))
        words += [f"--{name}", *(value if isinstance(value, list) else [] if value is None else [value])]
    return words


@st.composite
def command_lines(draw) -> list[str]:
    """A command with a few flags: mostly of the right kind, often out of range, never meant to take long."""
    return [draw(st.sampled_from(["ppo", "impala", "dqn", "pqn", "r2d2", "sac", "td3"])), *drawn_flags(draw, WORDS)]


@st.composite
def other_lines(draw) -> list[str]:
    """A command that does not train, with places that hold a run, a damaged one or none."""
    name = draw(st.sampled_from([*sorted({*COMMANDS, *OTHER_WORDS}), "", "pppo", "--version", "--help"]))
    if name == "envs":
        places = draw(st.lists(st.sampled_from(["catch", "nope", "gymnasium", "a:b", ""]), max_size=2))
    elif name == "sweep":
        places = draw(st.sampled_from([[], [], [], ["status"], ["status", "EMPTY"], ["status", "DONE"]]))
    else:
        places = draw(st.lists(PLACE, max_size=1 if name in ("push", "pack") else 2))
    flags = drawn_flags(draw, OTHER_WORDS.get(name, {}))
    if name == "sweep" and not places:
        flags += ["--dry-run", *draw(st.sampled_from([[], ["--"], ["--", "ppo"], ["--", "nope"]]))]
    return [name, *places, *flags, *draw(st.sampled_from([[], [], [], ["--help"]]))]


SMALL = ["--env-id", "Catch-v0", "--num-envs", "8", "--num-steps", "8", "--hiddens", "8", "--total-timesteps", "64"]
SMALL += ["--collector", "stepped"]
REPLAYED = [*SMALL, "--learning-starts", "16", "--batch-size", "16"]
REAL_ACTIONS = [*REPLAYED, "--env-id", "Pendulum-v1"]
SEQUENCES = [*SMALL, "--total-timesteps", "192", "--learning-starts", "128", "--batch-size", "16", "--lstm-size", "8"]
SEQUENCES += ["--burn-in", "2", "--sequence-length", "6"]


def small(words: list[str]) -> list[str]:
    """The words of a training command, with settings that fit before its flags."""
    defaults = {"dqn": REPLAYED, "sac": REAL_ACTIONS, "td3": REAL_ACTIONS, "r2d2": SEQUENCES}
    return [words[0], *defaults.get(words[0], SMALL), *words[1:]]


class Fits(Exception):
    """The flags went through all checks."""


def one_clear_message(err: str) -> bool:
    """One sentence, or the command's usage; no stack trace and no box."""
    ours = re.findall(r"^cleanba: (?!warning).+", err, re.M)
    boxed = bool(re.search("─{9}|-{9}", err))
    return "Traceback" not in err and not boxed and (len(ours) == 1 or (not ours and "usage" in err.lower()))


def check(words: list[str]) -> str:
    """Run the command: "fits", or "refused"."""
    ended = command(*small(words))
    if ended.code == 0:
        return "fits"
    assert ended.code == 2, (words, ended)
    assert one_clear_message(ended.err), (words, ended.err)
    return "refused"


def no_traceback(words: list[str], places: dict[str, Path]) -> int:
    """Run a command that does not train -> its exit code."""
    here = lambda word: next((word.replace(name, str(path)) for name, path in places.items() if name in word), word)
    ended = command(*map(here, words))
    assert ended.code in (0, 1, 2, 3), (words, ended)
    assert "Traceback" not in ended.err + ended.out, (words, ended)
    assert ended.code != 2 or one_clear_message(ended.err + ended.out), (words, ended)
    return ended.code


def make_places(folder: Path) -> dict[str, Path]:
    """Directories with a finished run, one of another algorithm, a damaged one, and nothing."""
    places = {name: folder / name.lower() for name in ("DONE", "OTHER", "DAMAGED", "EMPTY")}
    assert command("ppo", *SMALL, "--total-timesteps", "320", "--run-dir", places["DONE"]).code == 0
    assert command("impala", *SMALL, "--run-dir", places["OTHER"]).code == 0
    shutil.copytree(places["DONE"], places["DAMAGED"])
    (places["DAMAGED"] / "config.json").write_text('{"experiment": {"algorithm": "ppo"}, "run": []}')
    (places["DAMAGED"] / "result.json").write_text("[")
    (places["DAMAGED"] / "metrics.jsonl").write_text('{"update": 1}\n{"upd')
    places["EMPTY"].mkdir()
    return places


def test_no_other_command_ends_in_a_traceback(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    places = make_places(tmp_path / "runs")
    codes = Counter()

    @settings(max_examples=100)
    @given(other_lines())
    def look(words):
        codes[words[0], no_traceback(words, places)] += 1

    for name in COMMANDS:  # each at least once
        look = example([name, "DONE"])(look)
    look()
    assert min(sum(n for (_, code), n in codes.items() if code == wanted) for wanted in (0, 2)) > 10, codes


def is_valid(words: list[str], run_dir) -> bool:
    """Whether the command passes all checks before a run starts or compiles anything."""
    with mock.patch("cleanba.launch.run_training", side_effect=Fits):
        try:
            return check([*words, "--run-dir", str(run_dir)]) == "fits"
        except Fits:
            return True


def test_flags_fit_or_are_refused(tmp_path_factory):
    seen = []

    @settings(max_examples=150)
    @given(command_lines())
    def look(words):
        seen.append(is_valid(words, tmp_path_factory.mktemp("run") / "run"))

    look()
    assert 15 < sum(seen) < len(seen) - 15  # neither kind is rare


@pytest.mark.slow
def test_flags_that_fit_train(tmp_path_factory):
    ran = []

    @settings(max_examples=60)
    @given(command_lines())
    def look(words):
        if len(ran) >= 5:
            return
        if is_valid(words, tmp_path_factory.mktemp("run") / "run"):
            run_dir = tmp_path_factory.mktemp("run") / "run"
            ended = command(*small(words), "--run-dir", run_dir)
            # A wild learning rate may end in non-finite numbers, a short stall timeout in a stall; the error says so.
            said = re.search("not a finite number|not finite numbers|raise --stall-timeout", ended.err)
            assert ended.code == 0 or (ended.code == 1 and said), (words, ended)
            ran.append(words)

    look()
    assert len(ran) >= 5
