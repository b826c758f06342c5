"""`cleanba bisect`: planted faults are found and named; recording changes no bit; the command and what it refuses."""

import json
import multiprocessing
import os
import re
import shutil
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import pytest
from launch import ROOT, command
from planted import FAULTS, look_for, sound, train, verdict

from cleanba.checks import recompute
from cleanba.checks.bisect import place_of
from cleanba.checks.sides import GO_ON, RemoteSide, Request, serve
from cleanba.config import Placement
from cleanba.errors import Failure
from cleanba.waited import is_compiling


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """runs(algorithm) -> the directory of a run and its sound computation, watched; made once."""
    made = {}

    def get(name: str):
        if name not in made:
            run_dir = train(name, tmp_path_factory.mktemp("runs"))
            made[name] = run_dir, sound(name, run_dir)
        return made[name]

    return get


@dataclass(frozen=True)
class Limited:
    """What a side changes of its training."""

    watch: Callable[[object], None] | None = None
    stall_timeout: float = 600.0


class Opened(NamedTuple):
    training: Limited


def test_a_side_has_a_time_limit_which_does_not_run_while_it_waits_for_a_question(monkeypatch):
    seen = []

    def computing(rerun, first, last, display):
        seen.append(rerun.training.stall_timeout)
        rerun.training.watch(SimpleNamespace(number=1, fingerprints=lambda: "fingerprints"))
        seen.append(is_compiling())

    monkeypatch.setattr(recompute, "open_rerun", lambda *_: nullcontext(Opened(Limited())))
    monkeypatch.setattr(recompute, "recompute", computing)
    ours, theirs = multiprocessing.Pipe()
    side = threading.Thread(target=serve, args=(theirs,), daemon=True)
    side.start()
    ours.send(Request(Path("run"), Placement(), 0, 1))
    assert ours.poll(60) and ours.recv() == ("update", (1, "fingerprints"))
    assert is_compiling()
    ours.send(GO_ON)
    side.join(60)
    assert seen == [600.0, False]


def test_a_side_that_fails_at_a_question_says_why(monkeypatch):
    def raising(*args):
        raise MemoryError("no room for the update with probes")

    update = SimpleNamespace(number=1, fingerprints=lambda: "fingerprints", event_values=raising)
    monkeypatch.setattr(recompute, "open_rerun", lambda *_: nullcontext(Opened(Limited())))
    monkeypatch.setattr(recompute, "recompute", lambda rerun, *_, **__: rerun.training.watch(update))
    side = RemoteSide.__new__(RemoteSide)
    side.name, (side._connection, theirs) = "A", multiprocessing.Pipe()
    with ThreadPoolExecutor(1) as pool:
        served = pool.submit(serve, theirs)
        side._send(Request(Path("run"), Placement(), 0, 1))
        assert side.next() == (1, "fingerprints")
        with pytest.raises(Failure, match="A failed: MemoryError: no room for the update with probes"):
            side.event_values("path")
        assert isinstance(served.exception(60), MemoryError)


@pytest.fixture(scope="module")
def trained_part(tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("part") / "run"
    assert command(*PART[:-4], "--log-frequency", "8", "--env-id", "Catch-v0", "--run-dir", run_dir).code == 0
    return run_dir


@pytest.fixture
def part(trained_part, tmp_path):
    """A copy of a short run, to be changed."""
    return shutil.copytree(trained_part, tmp_path / "run")


@pytest.mark.parametrize("typed", [2, None])
def test_processes_that_no_flag_counted_are_placed_on_as_many_devices(typed, part):
    """Under Slurm only --distributed is typed."""
    config = json.loads((part / "config.json").read_text())
    config["experiment"] |= {"num_actors": 2, "num_shards": 2}
    config |= {"num_processes": 2, "placement": config["placement"] | {"distributed": True, "num_processes": typed}}
    (part / "config.json").write_text(json.dumps(config))
    assert place_of(part, [], False).in_words().endswith(", actors on [0, 1], learners on [0, 1]")


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_planted_fault_is_found_and_named(runs, fault):
    finding = look_for(fault, *runs(fault.run))
    print("\n".join(finding.lines()) if finding else "nothing")
    assert not verdict(fault, finding)


# --------------------------------------------------------------------------------------------------------- the command

PART = ("ppo", "--env-id", "gated:Flipped-v0", "--env-workers", "0", "--num-envs", "4", "--num-actors", "1")
PART += ("--num-shards", "1", "--num-steps", "4", "--hiddens", "8", "--num-minibatches", "1", "--update-epochs", "1")
PART += ("--total-timesteps", "64", "--log-frequency", "1", "--checkpoint-frequency", "1")


@pytest.mark.slow
def test_two_runs_diverge_where_one_was_computed_differently(tmp_path, monkeypatch):
    """A's environments are sound and B's had a fault, which shows in B's log even if it does not happen again."""
    monkeypatch.syspath_prepend(ROOT / "tests")
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}{os.pathsep}{ROOT / 'tests'}")
    monkeypatch.setenv("CLEANBA_GATE", str(tmp_path))  # exists, so nothing is slow
    a, b = tmp_path / "a", tmp_path / "b"
    assert command(*PART, "--run-dir", a).code == 0
    with monkeypatch.context() as patch:
        patch.setenv("CLEANBA_FAULT", "1")
        assert command(*PART, "--run-dir", b).code == 0
    refused = command("bisect", a, a, "--", "--learner-device-ids", "1", "--gamma", "0.5")
    assert refused.code == 2 and "--gamma would change what is trained; after `--`, give only placement" in refused.err

    refused = command("bisect", a, a, "--", "--experiment", b)
    assert refused.code == 2 and "--experiment would change nothing here; after `--`, give only" in refused.err, refused

    parted = command("bisect", a, b, "--", "CLEANBA_FAULT=1")
    assert parted.code == 1, parted.err
    assert re.search(r"update 1: observations? of environments? .* at step 3 differs? \(float32\)", parted.out), parted
    assert "the difference comes from an environment" in parted.out

    whole = command("bisect", a, b)
    assert whole.code == 1 and "the same bits throughout: updates 1 to" in whole.out
    assert f"note: {b} has logged another digest of the parameters after update 1 than B has here" in whole.out

    # Equal logs tell that both are the same, but not what another placement would come to.
    c = shutil.copytree(a, tmp_path / "c")
    assert "all 4 digests in both logs" in command("bisect", a, c).out
    elsewhere = command("bisect", a, c, "--", "--learner-device-ids", "1")
    assert elsewhere.code == 0 and "B: " in elsewhere.out and "learners on [1]" in elsewhere.out, elsewhere

    # Logs that differ in the state alone, and logs that both cannot be computed again.
    for run_dir, name, update in ((c, "learner_digest", 2), (shutil.copytree(a, tmp_path / "d"), "params_digest", 2)):
        rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
        lines = [json.dumps(row | ({name: run_dir.name} if row["update"] == update else {})) for row in rows]
        (run_dir / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    apart = command("bisect", a, c)
    assert apart.code == 1 and "note: the logs differ at update 2, although both sides agree here" in apart.out, apart
    both = command("bisect", tmp_path / "d", tmp_path / "d", "--", "--learner-device-ids", "1")
    assert both.code == 1 and re.search("update 2 than A has .*update 2 than B has", both.out, re.DOTALL), both


def test_a_placement_that_does_not_fit_and_a_stray_word_are_refused_before_anything_is_computed(part):
    shards = json.loads((part / "config.json").read_text())["experiment"]["num_shards"]
    for words, says in (
        (["--learner-device-ids", *map(str, range(shards + 1))], f"num_shards={shards} cannot"),
        (["nonsense"], "nonsense has no flag before it; leave it out"),
    ):
        ended = command("bisect", part, "--to", "2", "--", *words)
        assert ended.code == 2 and says in ended.err and "computing" not in ended.out, ended
    ended = command("bisect", part, "--to", "99", "--", "--learner-device-ids", "0")
    assert ended.code == 2 and "--to 99 was not reached by the run; choose" in ended.err, ended


def test_a_strangers_config_cannot_ask_for_a_million_devices(part):
    config = json.loads((part / "config.json").read_text())
    for placement in (
        {"num_processes": 10**6, "learner_device_ids": [0, 1]},
        {"learner_device_ids": [10**6]},
    ):
        (part / "config.json").write_text(json.dumps({**config, "placement": {**config["placement"], **placement}}))
        ended = command("bisect", part, "--", "--actor-device-ids", "0")
        assert ended.code == 2 and "Traceback" not in ended.err, ended
        assert "more than it has actors or shards" in ended.err or "there is no device 1000000" in ended.err
