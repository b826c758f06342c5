"""Whatever flags are given, the command trains, or refuses with exit code 2 and one clear message."""

import re
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from launch import command

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
    **dict.fromkeys(["grace-period", "stall-timeout"], REALS),
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


@st.composite
def command_lines(draw) -> list[str]:
    """A command with a few flags: mostly of the right kind, often out of range, never meant to take long."""
    words = [draw(st.sampled_from(["ppo", "impala"]))]
    for name in draw(st.lists(st.sampled_from(sorted(WORDS)), max_size=4, unique=True)):
        value = draw(WORDS[name])
        words += [f"--{name}", *(value if isinstance(value, list) else [] if value is None else [value])]
    return words


SMALL = ["--env-id", "Catch-v0", "--num-envs", "8", "--num-steps", "8", "--hiddens", "8", "--total-timesteps", "64"]


class Fits(Exception):
    """The flags went through all checks."""


def one_clear_message(err: str) -> bool:
    """Ours in one sentence, or tyro's box; no stack trace."""
    ours = re.findall(r"^cleanba: .+", err, re.M)
    boxed = bool(re.search("─{9}|-{9}", err)) or "usage" in err.lower()
    return "Traceback" not in err and (len(ours) == 1 or (not ours and boxed))


def check(words: list[str]) -> str:
    """Run the command: "fits", or "refused"."""
    ended = command(words[0], *SMALL, *words[1:])
    if ended.code == 0:
        return "fits"
    assert ended.code == 2, (words, ended)
    assert one_clear_message(ended.err), (words, ended.err)
    return "refused"


def is_valid(words: list[str], run_dir) -> bool:
    """Everything up to the first thing that a run starts or compiles."""
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
        if len(ran) >= 8:
            return
        if is_valid(words, tmp_path_factory.mktemp("run") / "run"):
            run_dir = tmp_path_factory.mktemp("run") / "run"
            ended = command(words[0], *SMALL, *words[1:], "--run-dir", run_dir)
            # A wild learning rate may end in numbers that are not finite, an impatient watchdog in a stall: it is said.
            said = re.search("not a finite number|raise --stall-timeout", ended.err)
            assert ended.code == 0 or (ended.code == 1 and said), (words, ended)
            ran.append(words)

    look()
    assert len(ran) >= 5
