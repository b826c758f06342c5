"""Nothing is lost: a run that was killed, interrupted or damaged ends in the same bits as an undisturbed one."""

import concurrent.futures
import errno
import json
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from launch import CROWD, ROOT, TINY, command, finish, in_pairs, python, read_result, read_rows
from ports import free_address

import cleanba
from cleanba.agents.initial import find_initial
from cleanba.config import Placement, to_json
from cleanba.errors import Failure, Replaced
from cleanba.files import Json
from cleanba.launch import directory_check, how_to_go_on
from cleanba.recipes import RECIPES
from cleanba.runs.directory import lock
from cleanba.runs.log import rewind
from cleanba.runtime import checkpoint, train
from cleanba.runtime.channels import Stop
from cleanba.runtime.checkpoint import Checkpoints, newest_first, updates_kept
from cleanba.runtime.checkpoint_writer import CheckpointWriter
from cleanba.runtime.collect import SteppedCollector
from cleanba.runtime.learner import Learner
from cleanba.runtime.schedule import Schedule
from cleanba.runtime.supervision import Watchdog, hear_signals

# 40 updates of 64 steps, and a checkpoint after every seventh: where environments start afresh, and in their midst.
FLAGS = [*TINY, "--total-timesteps", "2560", "--env-epoch", "14", "--checkpoint-frequency", "7"]
EPOCHS = FLAGS.index("--update-epochs")  # which IMPALA does not have
KINDS = {
    "ppo": ["ppo", *FLAGS],
    "impala": [
        *("impala", *FLAGS[:EPOCHS], *FLAGS[EPOCHS + 2 :]),
        *("--core", "lstm", "--lstm-size", "8", "--no-concurrency"),
    ],
    "pqn": ["pqn", *FLAGS, "--core", "lstm", "--lstm-size", "8", "--norm-reward"],
    "r2d2": [
        *("r2d2", *FLAGS[: FLAGS.index("--num-minibatches")], *FLAGS[EPOCHS + 2 :], "--lstm-size", "8", "--norm-obs"),
        *("--burn-in", "4", "--sequence-length", "12", "--buffer-size", "480", "--learning-starts", "128"),
        *("--batch-size", "4", "--train-frequency", "32"),
    ],
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Kind -> directory of an undisturbed run."""
    made: dict[str, Path] = {}

    def run(kind: str) -> Path:
        if kind not in made:
            made[kind] = tmp_path_factory.mktemp("whole") / kind
            ended = command(*KINDS[kind], "--run-dir", made[kind])
            assert ended.code == 0, ended.err
        return made[kind]

    return run


def assert_same_run(run: Path, reference: Path) -> None:
    """Both have finished with the same bits, and the logs have each update once, in order, with the same numbers."""
    assert read_result(run)["status"] == "finished"
    for name in ("params_digest", "learner_digest", "update", "global_step", "episodes", "episodic_return"):
        assert read_result(run)[name] == read_result(reference)[name], name
    rows, expected = read_rows(run), read_rows(reference)
    assert [row["update"] for row in rows] == [row["update"] for row in expected]
    assert [row["seconds"] for row in rows] == sorted(row["seconds"] for row in rows)
    for row, other in zip(rows, expected, strict=True):
        for name in row.keys() & other.keys():
            if name.startswith(("losses/", "charts/episod")) or name == "global_step" or name.endswith("_digest"):
                assert row[name] == other[name], (row["update"], name)


# -------------------------------------------------------------------------------------------------- kill -9


KILLS = {
    "ppo": [("start", 1), ("compile", 1), ("collect", 19), ("restore", 1), ("update", 8), ("save", 1), ("save", 2)],
    "impala": [("save", 2)],  # at the other moments the algorithm plays no part
    "pqn": [("save", 2)],
    "r2d2": [("save", 2)],
}


@pytest.mark.parametrize("kind", KINDS)
def test_killed_again_and_again_it_ends_in_the_same_bits(kind, whole, tmp_path):
    """The last kill comes at the second checkpoint, when the first is complete."""
    run = tmp_path / "run"
    for moment, n in KILLS[kind]:
        placement = ["--learner-device-ids", "1"] if moment == "update" else []
        words = [*KINDS[kind], "--run-dir", run, *placement]
        ended = finish(python(ROOT / "tests" / "killed.py", moment, str(n), *words))
        assert ended.code == -signal.SIGKILL, f"{moment}: {ended}"
        assert not (run / "result.json").exists()
    ended = command("resume", run, "--actor-device-ids", "2", "--learner-device-ids", "0")
    assert ended.code == 0, ended.err
    assert "resuming after update" in ended.out
    assert_same_run(run, whole(kind))


# ------------------------------------------------------------------------------------------------ made longer


LONGER = {
    "ppo": [*KINDS["ppo"], "--no-anneal-lr", "--norm-reward"],
    "td3": [
        *("td3", "--env-id", "Pendulum-v1", "--num-envs", "4", "--num-steps", "16", "--num-shards", "2"),
        *("--hiddens", "8", "8", "--buffer-size", "400", "--learning-starts", "128", "--batch-size", "16"),
        *("--env-epoch", "14", "--checkpoint-frequency", "7"),
    ],
}


@pytest.mark.parametrize("kind", LONGER)
def test_a_finished_run_made_longer_ends_in_the_bits_of_a_run_of_that_length(kind, tmp_path, monkeypatch):
    """The shorter run was made by a version that had other settings, which changed nothing."""
    run, reference = tmp_path / "run", tmp_path / "reference"
    flags = [*LONGER[kind], "--keep-checkpoints", "all", "--total-timesteps"]
    words = lambda steps, where: [*flags, str(steps), "--run-dir", where]
    assert command(*words(2560, reference)).code == 0

    def earlier(group) -> Json:
        values = to_json(group)
        gone = {"forget_bias": 1.0} if kind == "td3" and "seed" in values else {}
        return {name: value for name, value in values.items() if name != "layer_norm"} | gone

    with monkeypatch.context() as patch:
        patch.setattr("cleanba.runs.directory.to_json", earlier)
        assert command(*words(640, run)).code == 0
    if kind == "td3":  # an attempt that fails leaves the run finished
        results = [(run / name).read_bytes() for name in ("config.json", "result.json")]
        (run / "memory").rename(tmp_path / "aside")
        ended = command(*words(1280, run))
        assert ended.code == 1 and "can be read" in ended.err, ended
        assert [(run / name).read_bytes() for name in ("config.json", "result.json")] == results
        assert command(*words(640, run)).out.endswith("is finished; nothing to do\n")
        (tmp_path / "aside").rename(run / "memory")
    ended = command(*words(1280, run))
    assert ended.code == 0 and "resuming after update 10" in ended.out, ended
    assert "damaged" not in ended.err and "will not accept" not in ended.out, ended
    assert command(*words(1280, run)).out.endswith("is finished; nothing to do\n")
    ended = command("resume", run, "--total-timesteps", "2560")
    assert ended.code == 0 and "resuming after update 20" in ended.out, ended
    assert_same_run(run, reference)
    config = json.loads((run / "config.json").read_text())
    assert config["experiment"]["total_timesteps"] == 2560 and config["first_total_timesteps"] == 640
    ended = command("verify", run, "--from", "10", "--to", "20")
    assert ended.code == 0 and "the chain holds" in ended.out, ended
    packed = tmp_path / "run.tar.gz"
    assert command("pack", run, "--out", packed).code == 0
    ended = command("verify", packed, "--to", "10")
    assert ended.code == 0 and "the chain holds" in ended.out, ended
    for steps in (2624, 640):
        edited = {**config, "experiment": {**config["experiment"], "total_timesteps": steps}}
        (run / "config.json").write_text(json.dumps(edited))
        ended = command("verify", run)
        assert ended.code == 1 and f"ends at update 40, but the run has finished with {steps // 64}" in ended.out, ended
    edited = {**config, "experiment": {**config["experiment"], "gamma": 0.5}}
    (run / "config.json").write_text(json.dumps(edited))
    ended = command("verify", run)
    assert (
        ended.code == 1 and f"than the run began with (gamma: {config['experiment']['gamma']}, now 0.5)" in ended.out
    ), ended
    (run / "config.json").write_text(json.dumps(config))
    for words_now in (words(1280, run), ["resume", run, "--total-timesteps", "1280"]):
        ended = command(*words_now)
        assert ended.code == 2 and "total_timesteps: 2560" in ended.err, ended
    assert read_result(run)["update"] == 40


def test_an_interrupted_run_can_be_made_longer(whole, tmp_path):
    words = [*KINDS["ppo"], "--no-anneal-lr", "--run-dir", tmp_path / "run"]
    ended = finish(python(ROOT / "tests" / "killed.py", "save", "2", *words))
    assert ended.code == -signal.SIGKILL
    ended = command("resume", tmp_path / "run", "--total-timesteps", "2624")
    assert ended.code == 0 and read_result(tmp_path / "run")["update"] == 41


@pytest.mark.parametrize("kind, settings", [("ppo", "--anneal-lr"), ("r2d2", "--importance-exponent-end")])
def test_a_run_whose_settings_follow_its_length_is_not_made_longer(kind, settings, whole, tmp_path):
    run = whole(kind)
    before = {path.name: path.read_bytes() for path in run.iterdir() if path.is_file()}
    for words in ([*KINDS[kind], "--run-dir", run], ["resume", run]):
        ended = command(*words, "--total-timesteps", "9600")
        assert ended.code == 2 and f"longer than its 2,560 steps, which {settings} depends on" in ended.err, ended
        assert f"--init-from {run}" in ended.err
    assert {path.name: path.read_bytes() for path in run.iterdir() if path.is_file()} == before


def test_settings_that_follow_the_length_of_a_run_by_algorithm():
    explores, importance = "exploration_fraction", "importance_exponent_end"
    found = {name: recipe.experiment().schedules for name, recipe in RECIPES.items()}
    assert found == {
        **{"ppo": ("anneal_lr",), "impala": ("anneal_lr",), "pqn": (explores,), "dqn": (explores,)},
        **{"r2d2": (importance,), "sac": (), "td3": ()},
    }
    assert RECIPES["dqn"].experiment(prioritised=True).schedules == (explores, importance)


def test_a_finished_run_without_a_checkpoint_to_go_on_from_is_left_as_it_is(tmp_path, monkeypatch):
    run = tmp_path / "run"
    words = [*KINDS["ppo"], "--no-anneal-lr", "--checkpoint-frequency", "0", "--run-dir", run, "--total-timesteps"]

    def refused() -> None:
        files = lambda: {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
        before = files()
        ended = command(*words, "1280")
        assert ended.code == 2 and "no checkpoint from which a longer run could go on" in ended.err, ended
        assert files() == before

    with monkeypatch.context() as patch:
        patch.setattr("cleanba.launch.repeatable", lambda spec: False)
        assert command(*words, "640").code == 0
        refused()
    counters = run / "checkpoints" / "10" / "counters" / "metadata"
    assert json.loads(counters.read_text())["goes_on"] is False
    kept = counters.read_text()
    counters.write_text(kept.replace('"goes_on": false', '"unknown": 0'))  # as an earlier version's
    refused()
    shutil.rmtree(run / "checkpoints")
    refused()
    (run / "result.json").unlink()  # killed before its first checkpoint: it begins again
    assert command(*words, "704").code == 0 and read_result(run)["update"] == 11
    assert "first_total_timesteps" not in json.loads((run / "config.json").read_text())
    assert command("verify", run).code == 0


def test_a_run_with_a_preset_or_with_a_setting_that_is_gone_is_made_longer(tmp_path):
    run = tmp_path / "run"
    words = [*KINDS["ppo"], "--no-anneal-lr", "--run-dir", run, "--total-timesteps"]
    assert command(*words, "320").code == 0
    config = json.loads((run / "config.json").read_text())
    config["origin"]["gone"] = "typed"
    (run / "config.json").write_text(json.dumps(config))
    assert command(*words, "384").code == 0 and read_result(run)["update"] == 6
    ended = command("resume", run, "--preset", run, "--total-timesteps", "448")
    assert ended.code == 0 and read_result(run)["update"] == 7, ended
    assert "preset" not in json.loads((run / "config.json").read_text())["origin"]


def test_a_run_goes_on_when_the_run_that_it_took_its_settings_from_is_gone(tmp_path):
    best, run = tmp_path / "best", tmp_path / "run"
    assert command(*KINDS["ppo"], "--gamma", "0.9", "--total-timesteps", "64", "--run-dir", best).code == 0
    words = ["ppo", "--preset", best, "--seed", "2", "--run-dir", run]
    assert command(*words).code == 0
    shutil.rmtree(best)
    (run / "result.json").unlink()
    ended = command(*words)
    assert ended.code == 0 and "resuming after update" in ended.out, ended
    assert json.loads((run / "config.json").read_text())["origin"]["gamma"] == f"--preset {best}"
    assert "is finished; nothing to do" in command(*words).out
    ended = command(*words, "--gamma", "0.8")
    assert ended.code == 2 and "gamma" in ended.err, ended
    ended = command(*words[:-1], tmp_path / "other")
    assert ended.code == 2 and "is not a preset of ppo" in ended.err, ended


def test_a_run_goes_on_when_the_run_of_its_settings_and_parameters_is_gone(tmp_path):
    best, run = tmp_path / "best", tmp_path / "run"
    assert command(*KINDS["ppo"], "--total-timesteps", "64", "--run-dir", best).code == 0
    words = ["ppo", "--preset", best, "--init-from", best, "--total-timesteps", "128", "--run-dir", run]
    assert command(*words).code == 0
    shutil.rmtree(best)
    (run / "result.json").unlink()
    ended = command(*words)
    assert ended.code == 0 and "resuming after update" in ended.out, ended


# ------------------------------------------------------------------------------------------- the same command


def test_a_finished_run_is_left_alone(whole):
    before = {p: p.stat().st_mtime_ns for p in whole("ppo").rglob("*") if p.is_file() and p.name != ".lock"}
    for words in ([*KINDS["ppo"], "--run-dir", whole("ppo")], ["resume", whole("ppo")]):
        ended = command(*words)
        assert ended.code == 0 and "is finished; nothing to do" in ended.out
    assert before == {p: p.stat().st_mtime_ns for p in whole("ppo").rglob("*") if p.is_file() and p.name != ".lock"}


def test_what_a_killed_run_had_half_written_is_removed_when_it_goes_on(whole, tmp_path):
    run = Path(shutil.copytree(whole("ppo"), tmp_path / "run"))
    words = [*KINDS["ppo"], "--run-dir", run]
    half = ["checkpoints/9.orbax-checkpoint-tmp/data", "memory/00003/9.json.tmp", "best/9.msgpack.tmp"]
    for path in (run / name for name in half):
        path.parent.mkdir(parents=True)
        path.write_bytes(b"half of it")
    assert command(*words, "--seed", "9").code == 2 and command(*words).code == 0
    assert all((run / name).exists() for name in half), "nothing is touched where no run goes on"
    (run / "result.json").unlink()
    kept = updates_kept(run)
    assert command(*words).code == 0 and updates_kept(run) == kept
    assert not any((run / name).exists() for name in half)


def test_a_run_of_several_processes_can_be_continued_by_one(whole, tmp_path):
    """Only `--no-distributed` is needed, as the run itself says when it ends early."""
    shutil.copytree(whole("ppo"), tmp_path / "run")
    config = json.loads((tmp_path / "run/config.json").read_text())
    others = dict(distributed=True, coordinator_address="127.0.0.1:1", num_processes=2, process_id=0)
    config["placement"] |= others
    (tmp_path / "run/config.json").write_text(json.dumps(config))
    ended = command("resume", tmp_path / "run", "--no-distributed")
    assert ended.code == 0 and "is finished; nothing to do" in ended.out, ended


def test_what_continues_a_run_of_several_processes(tmp_path):
    job = lambda distributed: SimpleNamespace(
        run_dir=tmp_path,
        experiment=SimpleNamespace(env_id="Catch-v0"),
        config=SimpleNamespace(placement=Placement(distributed=distributed)),
    )
    alone = f"`cleanba resume {tmp_path}"
    said = [how_to_go_on(job(distributed), {"update": 0}) for distributed in (False, True)]
    assert said[0] == f"{alone}` starts again from the beginning"
    assert said[1] == (
        f"starting all processes again with the same command, or {alone} --no-distributed` in one process, starts "
        "again from the beginning"
    )


def test_another_experiment_is_refused_with_what_differs(whole):
    ended = command(*KINDS["ppo"], "--seed", "7", "--gamma", "0.5", "--run-dir", whole("ppo"))
    assert ended.code == 2 and "seed" in ended.err and "gamma" in ended.err and "Traceback" not in ended.err
    ended = command(*KINDS["impala"], "--run-dir", whole("ppo"))
    assert ended.code == 2 and "algorithm" in ended.err


# -------------------------------------------------------------------------------------------------- signals


def signalled(monkeypatch, signum: int, at: int, times: int = 1, saving: bool = False) -> None:
    """Send the process a signal when it reaches this update, or the saving of its checkpoint."""
    owner, name, place = (CheckpointWriter, "save", 0) if saving else (Learner, "update", 3)
    original, hear, wake, taken = getattr(owner, name), train.hear_signals, Stop.wake, threading.Event()

    def hearing(asked, *give_up):
        def also_here(signum: int) -> None:
            asked(signum)
            taken.set()  # at once if the run need not wait, or if this is not the first signal

        return hear(also_here, *give_up)

    def waking(*args):  # the run knows that it must end after its current update, and waits for that
        wake(*args)
        taken.set()

    def signalling(self, *args):
        for _ in range(times if args[place] == at else 0):
            taken.clear()
            os.kill(os.getpid(), signum)
            assert taken.wait(60)  # the main thread may wake late
        return original(self, *args)

    monkeypatch.setattr(owner, name, signalling)
    monkeypatch.setattr(Stop, "wake", waking)
    monkeypatch.setattr(train, "hear_signals", hearing)


@pytest.mark.parametrize(
    "signum, at, times, saving",
    [
        (signal.SIGINT, 10, 1, False),
        (signal.SIGTERM, 14, 1, True),  # a checkpoint is being written: there is no other to write
        (signal.SIGUSR1, 24, 2, False),  # a cluster may warn twice
    ],
)
def test_a_run_that_is_asked_to_end_loses_nothing(signum, at, times, saving, whole, tmp_path, monkeypatch):
    run = tmp_path / "run"
    with monkeypatch.context() as patch:
        signalled(patch, signum, at, times, saving)
        ended = command(*KINDS["ppo"], "--checkpoint-frequency", "14" if saving else "0", "--run-dir", run)
    assert ended.code == 128 + signum
    assert "ending after this update, with a checkpoint" in ended.out + ended.err
    assert read_result(run)["status"] == "interrupted" and read_result(run)["update"] in (at, at + saving)
    at = read_result(run)["update"]  # the next update's rollouts may have been there already
    assert f"goes on after update {at}, nothing to repeat\n" in ended.out
    assert updates_kept(run)[-1] == at
    assert command("eval", run, "--episodes", "1").code == 0
    ended = command(*KINDS["ppo"], "--run-dir", run)
    assert ended.code == 0 and f"resuming after update {at}" in ended.out
    assert read_result(run)["learner_digest"] == read_result(whole("ppo"))["learner_digest"]


def test_without_a_grace_period_the_run_ends_as_it_is(whole, tmp_path, monkeypatch):
    run = tmp_path / "run"
    with monkeypatch.context() as patch:
        signalled(patch, signal.SIGUSR1, at=10)
        ended = command(*KINDS["ppo"], "--grace-period", "0", "--run-dir", run)
    assert ended.code == 128 + signal.SIGUSR1
    assert read_result(run)["update"] < 14
    repeated = read_result(run)["update"] - 7
    assert re.search(rf"goes on after update 7 and repeats {repeated} update", ended.out)
    assert command("resume", run).code == 0
    assert_same_run(run, whole("ppo"))


def test_an_interrupted_run_has_counted_its_steps_up_to_its_last_update(whole, tmp_path, monkeypatch):
    whole("ppo")  # before this process is made to signal itself
    signalled(monkeypatch, signal.SIGTERM, at=10)
    assert command(*KINDS["ppo"], "--log-frequency", "1000", "--run-dir", tmp_path / "run").code == 143
    result = read_result(tmp_path / "run")
    (row,) = [row for row in read_rows(whole("ppo")) if row["update"] == result["update"]]
    assert result["global_step"] == row["global_step"]


def test_the_next_end_of_an_epoch():
    every, never = Schedule(1, 40, True, 7), Schedule(1, 40, True, 0)
    assert [every.next_end(u) for u in (0, 6, 7, 13, 34, 35, 39)] == [7, 7, 14, 14, 35, 40, 40]
    assert never.next_end(3) == 40


def in_a_terminal(*words: object) -> tuple[subprocess.Popen, int]:
    """`python WORDS` in a terminal of its own, and the end of that from which its output can be read."""
    ours, theirs = os.openpty()
    process = subprocess.Popen(
        ["setsid", "--ctty", sys.executable, *map(str, words)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
    )
    os.close(theirs)
    return process, ours


def read_until(done: Callable[[], bool], process: subprocess.Popen, terminal: int) -> None:
    """Read what a process prints, so that its terminal is never full, until it is `done`."""
    deadline = time.monotonic() + 300
    while not done():
        assert time.monotonic() < deadline and process.poll() is None
        if select.select([terminal], [], [], 0.1)[0]:
            os.read(terminal, 65536)


@pytest.mark.slow
def test_a_run_whose_terminal_is_closed_loses_nothing(whole, tmp_path):
    run = tmp_path / "run"
    words = [*KINDS["ppo"], "--checkpoint-frequency", "0", "--collector", "stepped"]
    hears = "import signal; signal.signal(signal.SIGHUP, signal.SIG_DFL)\n"  # the tests may run under nohup
    slowly = UNHURRIED.replace("sleep(0.05)", "sleep(0.5)")  # so that it does not end before it hears the signal
    process, terminal = in_a_terminal("-c", hears + slowly, "0", *words, "--run-dir", run)
    log = run / "metrics.jsonl"
    read_until(lambda: log.exists() and len(read_rows(run)) > 2, process, terminal)
    os.close(terminal)
    assert process.wait(60 * CROWD) == 128 + signal.SIGHUP
    assert read_result(run)["status"] == "interrupted" and updates_kept(run) == [read_result(run)["update"]]
    assert command("resume", run).code == 0
    assert read_result(run)["learner_digest"] == read_result(whole("ppo"))["learner_digest"]


def test_a_message_for_a_closed_terminal_is_dropped(monkeypatch):
    ours, theirs = os.openpty()
    earlier = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests may run under nohup
    try:
        with open(theirs, "w") as terminal:
            monkeypatch.setattr(sys, "stderr", terminal)
            os.close(ours)
            with hear_signals(lambda signum: None):
                signal.raise_signal(signal.SIGHUP)
            print("interrupted", file=sys.stderr, flush=True)  # it raised EIO
    finally:
        signal.signal(signal.SIGHUP, earlier)


def test_nohup_keeps_a_run_going_when_its_terminal_is_closed():
    earlier = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with hear_signals(lambda signum: None):
            assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, earlier)


# --------------------------------------------------------------------------------------------------- damage


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0xFF
    path.write_bytes(bytes(data))


CHANGES = ("config.json", ".lock")  # when a run is started again
DAMAGE = {
    "flipped": flip,
    "truncated": lambda path: path.write_bytes(path.read_bytes()[:10]),
    "removed": lambda path: path.unlink(),
}


def test_time_does_not_run_backwards_after_an_evaluation_that_was_logged_late(tmp_path):
    rows = [
        {"update": 10, "seconds": 10.0, "charts/SPS": 1.0},
        {"update": 20, "seconds": 20.0, "charts/SPS": 1.0},
        {"update": 10, "seconds": 20.0, "eval/episodic_return": 1.0},
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert [row["seconds"] for row in rewind(tmp_path, 10, 12.5)] == [10.0, 12.5]
    assert [row["seconds"] for row in read_rows(tmp_path)] == [10.0, 12.5]


def begun_again(whole, folder: Path) -> tuple[Path, list[str]]:
    """A copy of a run that was killed at its end, and the lines of its log."""
    run = Path(shutil.copytree(whole("ppo"), folder / "run"))
    (run / "result.json").unlink()
    return run, (run / "metrics.jsonl").read_text().splitlines(keepends=True)


def test_a_log_that_is_not_written_again_is_kept(whole, tmp_path):
    run, lines = begun_again(whole, tmp_path)
    shutil.rmtree(run / "checkpoints" / "40")
    damaged = "".join([lines[0], "\xff", *lines[1:], '{"update": 41, "gl']).encode("latin-1")
    (run / "metrics.jsonl").write_bytes(damaged)
    ended = command("resume", run)
    assert ended.code == 0 and "metrics.jsonl has damaged lines, which are removed: 2; the log as it was" in ended.out
    assert (run / "metrics.jsonl.1").read_bytes() == damaged
    (run / "result.json").unlink()
    before = "".join(json.dumps({**row, "seconds": row["seconds"] + 60}) + "\n" for row in read_rows(run))
    (run / "metrics.jsonl").write_text(before)  # as after more than a minute
    shutil.rmtree(run / "checkpoints")
    ended = command("resume", run)
    assert ended.code == 0, ended.err
    assert f"{run} has no checkpoint, so the run begins anew, although it had logged 40 updates; the log" in ended.out
    assert f"is kept in {run / 'metrics.jsonl.2'}" in ended.out and (run / "metrics.jsonl.2").read_text() == before
    assert_same_run(run, whole("ppo"))


@pytest.mark.parametrize(
    "what, words",
    [
        ("nothing", ""),
        ("an incomplete last line", ""),
        ("cut", "the log has no digests of update 40: a part of it is missing"),
        ("gone", "the log has no digests of update 40: a part of it is missing"),
        ("a hole", "the chain does not hold at update 40, after update 28: "),
        ("settings", "the chain does not hold at update 7, its first link: "),
    ],
)
def test_a_run_whose_files_were_changed_says_so_when_it_goes_on(what, words, whole, tmp_path):
    run, lines = begun_again(whole, tmp_path)
    if what == "an incomplete last line":
        lines.append('{"update": 41, "gl')
    elif what in ("cut", "gone"):
        lines = lines[:10] if what == "cut" else []
    elif what == "a hole":
        lines = [line for line in lines if json.loads(line)["update"] != 35]
    elif what == "settings":
        config = json.loads((run / "config.json").read_text())
        config["experiment"]["learning_rate"] *= 2
        (run / "config.json").write_text(json.dumps(config))
    (run / "metrics.jsonl").write_text("".join(lines))
    ended = command("resume", run)
    assert ended.code == 0 and not (run / "metrics.jsonl.1").exists(), ended
    assert ("`cleanba verify` will not accept the run" in ended.out) == bool(words) and words in ended.out, ended.out
    assert (command("verify", run).code != 0) == bool(words)


def test_a_finished_run_needs_no_account(whole):
    for flag in ("--track", "--upload-model"):
        ended = command(*KINDS["ppo"], "--run-dir", whole("ppo"), flag)
        assert "is finished; nothing to do" in ended.out, ended
        assert ended.code == (1 if flag == "--upload-model" else 0)


def test_a_run_that_was_moved_is_looked_for_in_its_new_place(tmp_path):
    job = SimpleNamespace(run_dir=tmp_path / "moved")
    (tmp_path / "moved" / "checkpoints").mkdir(parents=True)  # which TensorStore makes again
    assert how_to_go_on(job, {"update": 3}) == (
        f"{tmp_path / 'moved'} is gone; if it was moved, `cleanba resume` with its new place goes on"
    )


@pytest.mark.parametrize(
    "name, pattern, changed, says",
    [
        ("counters/metadata", r'("global_step": )\d', r"\g<1>9", "the checksum of its counters"),
        # Two arrays with the same name look like another network's.
        ("arrays/_METADATA", "00002", "00003", "its arrays are not those of"),
    ],
    ids=["counter", "list of arrays"],
)
def test_a_text_that_has_changed_is_damage_too(name, pattern, changed, says, whole, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(whole("ppo"), run)
    (run / "result.json").unlink()
    path = run / "checkpoints" / "40" / name
    text = path.read_text()
    path.write_text(re.sub(pattern, changed, text))
    assert path.read_text() != text
    ended = command("resume", run)
    assert ended.code == 0 and f"checkpoint 40 is damaged and left out: {says}" in ended.err, ended
    assert_same_run(run, whole("ppo"))


def test_a_run_that_replaces_its_checkpoints_while_they_are_read_is_looked_at_again(tmp_path):
    kept = tmp_path / "checkpoints"
    for update in (3, 4):
        (kept / str(update)).mkdir(parents=True)
    seen = []
    for update in newest_first(tmp_path, updates_kept(tmp_path)):
        seen.append(update)
        if update in (4, 6):  # meanwhile the run goes on
            (kept / str(update)).rmdir()
            (kept / str(update + 2)).mkdir()
    assert seen == [4, 3, 6, 8]


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_checkpoint_is_left_out_for_the_one_before(damage, whole, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(whole("ppo"), run)
    (run / "result.json").unlink()
    assert updates_kept(run) == [35, 40]
    files = [p for p in (run / "checkpoints" / "40").rglob("*") if p.is_file()]
    DAMAGE[damage](max(files, key=lambda p: p.stat().st_size))
    ended = command("resume", run)
    why = "its checksum|OUT_OF_RANGE|FAILED_PRECONDITION|DATA_LOSS|NOT_FOUND"  # ours, or TensorStore's own
    assert ended.code == 0 and re.search(f"checkpoint 40 is damaged and left out: ({why})", ended.err)
    assert "Traceback" not in ended.err and "resuming after update 35" in ended.out
    assert_same_run(run, whole("ppo"))
    assert (run / "damaged_checkpoints" / "40").is_dir() and updates_kept(run) == [35, 40]


def test_where_no_checkpoint_can_be_read_nothing_is_touched(whole, tmp_path):
    """The cause may be the file system, and gone tomorrow."""
    run = tmp_path / "run"
    shutil.copytree(whole("ppo"), run)
    (run / "result.json").unlink()
    for update in ("35", "40"):
        files = [p for p in (run / "checkpoints" / update).rglob("*") if p.is_file()]
        flip(max(files, key=lambda p: p.stat().st_size))
    contents = lambda: {p: p.read_bytes() for p in run.rglob("*") if p.is_file() and p.name not in CHANGES}
    before = contents()
    ended = command("resume", run)
    assert ended.code == 1 and "Traceback" not in ended.err
    assert re.search("cleanba: no checkpoint in .* can be read .*remove that directory to start over", ended.err)
    assert contents() == before


@pytest.fixture
def small_disk(tmp_path):
    """A disk of its own, of a megabyte."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", disk], capture_output=True)
    if mounted.returncode:
        pytest.skip("only root can mount a small disk")
    yield disk
    subprocess.run(["umount", "--lazy", disk], check=True)


def test_a_full_disk_ends_the_run_and_keeps_the_checkpoint_before(small_disk, whole, monkeypatch):
    run, filler = small_disk / "run", small_disk / "filler"
    update = Learner.update

    def filling(self, state, memory, blocks, number):
        if number == 18:  # the checkpoint of update 7 is written, that of 14 perhaps
            with pytest.raises(OSError), open(filler, "wb", buffering=0) as file:
                while True:
                    file.write(bytes(4096))
        return update(self, state, memory, blocks, number)

    with monkeypatch.context() as patch:
        patch.setattr(Learner, "update", filling)
        ended = command(*KINDS["ppo"], "--log-frequency", "1000", "--run-dir", run)
    assert ended.code == 1 and "Traceback" not in ended.err
    assert ended.err.count("cleanba:") == 1 and re.search("No space left on device.*free disk space", ended.err)
    kept = updates_kept(run)
    assert kept in ([7], [7, 14])
    ended = command("resume", run)
    # The start removes half-written files, so the run may get as far as its next checkpoint.
    assert ended.code == 1 and re.search(r"No space left on device\)?; free disk space", ended.err), ended
    assert "Traceback" not in ended.err
    kept = updates_kept(run)
    filler.unlink()
    ended = command("resume", run)
    assert ended.code == 0 and f"resuming after update {kept[-1]}" in ended.out
    assert read_result(run)["params_digest"] == read_result(whole("ppo"))["params_digest"]


def test_a_checkpoint_that_cannot_be_written_ends_the_run_after_the_update_under_way(tmp_path, monkeypatch):
    update, commit = Learner.update, Checkpoints._commit
    writing: list[Checkpoints] = []
    begun, reached = threading.Event(), threading.Event()

    def failing(self, saved, digests):
        if saved.update == 7:
            writing.append(self)
            begun.set()
            assert reached.wait(600)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        commit(self, saved, digests)

    def later(self, state, memory, blocks, number):
        if number == 9:
            assert begun.wait(600)
            reached.set()
            concurrent.futures.wait([writing[0]._writing], 600)
        return update(self, state, memory, blocks, number)

    monkeypatch.setattr(Checkpoints, "_commit", failing)
    monkeypatch.setattr(Learner, "update", later)
    ended = command(*KINDS["ppo"], "--checkpoint-frequency", "7", "--run-dir", tmp_path / "run")
    assert ended.code == 1 and "No space left on device" in ended.err and "Traceback" not in ended.err, ended
    result = read_result(tmp_path / "run")
    assert result["update"] == 9 and result["params_digest"] is not None, "it waited for the next checkpoint"


def test_checkpoints_that_are_replaced_while_they_are_read_are_looked_for_again(whole, tmp_path, monkeypatch):
    """As by a run that takes one after each update."""
    read, asked = checkpoint.read, []

    def replaced(run_dir, update, *like):
        asked.append(update)
        if update == 50:
            return read(whole("ppo"), 40, *like)
        shutil.rmtree(run_dir / "checkpoints" / str(update))
        (run_dir / "checkpoints" / "50").mkdir(exist_ok=True)
        raise Failure(f"checkpoint {update} is gone; try another --checkpoint")

    monkeypatch.setattr(checkpoint, "read", replaced)
    for name, use in {"load": cleanba.load, "init": lambda run: find_initial(str(run), "cpu")}.items():
        run = tmp_path / name
        shutil.copytree(whole("ppo"), run)
        (run / "result.json").unlink()
        use(run)
    assert asked == [40, 35, 50] * 2


def test_a_disk_that_cannot_be_written_is_refused(small_disk):
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    ended = command(*KINDS["ppo"], "--run-dir", small_disk / "run")
    assert ended.code == 2 and "Traceback" not in ended.err
    assert "cannot be written: Read-only file system; make it writable, or choose another --run-dir" in ended.err


def test_a_model_that_cannot_be_written_fails_the_run_in_one_sentence(tmp_path, monkeypatch):
    def full(path, params):
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    run = tmp_path / "run"
    with monkeypatch.context() as patch:
        patch.setattr("cleanba.launch.save_model", full)
        ended = command("ppo", *TINY, "--save-model", "--run-dir", run)
    assert ended.code == 1 and f"{run}/model.msgpack cannot be written: Disk quota exceeded" in ended.err
    assert ended.err.count("\n") == 1 and not (run / "result.json").exists()
    assert command("resume", run).code == 0 and (run / "model.msgpack").exists()


@pytest.mark.parametrize(
    "at, more, made_again, words",  # made again by TensorStore, which was writing a checkpoint there
    [
        (10, [], False, "restore the directory"),
        (10, [], True, "restore the directory"),
        # Before anything is recorded in it.
        (3, ["--log-frequency", "1000"], True, "no longer exists; restore the directory"),
    ],
)
def test_a_directory_that_goes_away_ends_the_run(at, more, made_again, words, tmp_path, monkeypatch):
    run, update = tmp_path / "run", Learner.update

    def removing(self, state, memory, blocks, number):
        if number == at:
            while made_again and at == 10 and updates_kept(run) != [7]:  # else the rest of 7 would be made anew, too
                time.sleep(0.01)
            run.rename(tmp_path / "elsewhere")  # in one step: a checkpoint is being written in it
            if made_again:
                (run / "checkpoints" / "10.orbax-checkpoint-tmp").mkdir(parents=True)
        return update(self, state, memory, blocks, number)

    monkeypatch.setattr(Learner, "update", removing)
    ended = command(*KINDS["ppo"], *more, "--run-dir", run)
    assert ended.code == 1 and "Traceback" not in ended.err
    assert words in ended.err and not run.exists()


@pytest.mark.parametrize("more", [[], ["--log-frequency", "1000"]], ids=["log", "checkpoint"])  # what it writes next
def test_nothing_is_written_into_a_directory_that_another_run_has_made_again(more, tmp_path, monkeypatch):
    run, update, there = tmp_path / "run", Learner.update, {}

    def replacing(self, state, memory, blocks, number):
        if number == 3:
            run.rename(tmp_path / "elsewhere")
            (run / "checkpoints" / "50").mkdir(parents=True)
            for name in (".lock", "config.json", "metrics.jsonl"):
                (run / name).write_text("another run's")
            there.update({path: path.stat().st_mtime_ns for path in run.rglob("*")})
        return update(self, state, memory, blocks, number)

    monkeypatch.setattr(Learner, "update", replacing)
    ended = command(*KINDS["ppo"], *more, "--save-model", "--run-dir", run)
    assert ended.code == 1 and ended.err.startswith(f"cleanba: {run} was removed, or made again by another run")
    assert ended.err.count("\n") == 1 and "goes on after" not in ended.out
    assert there and there == {path: path.stat().st_mtime_ns for path in run.rglob("*")}


def test_other_processes_notice_too_that_the_directory_is_another_runs(tmp_path):
    run = tmp_path / "run"
    with lock(run), directory_check(run, None) as check:
        check()
        run.rename(tmp_path / "elsewhere")
        check()  # what only went away is noticed by what is written next
        run.mkdir()
        with pytest.raises(Replaced, match="made again by another run"):
            check()
        (run / ".lock").touch()
        with pytest.raises(Replaced):
            check()
    with directory_check(tmp_path, None) as check:
        check()  # on a file system of its own there is no lock


# ------------------------------------------------------------------------------------------- numbers and stalls


def test_numbers_that_are_not_finite_end_the_run(tmp_path):
    wild = [*KINDS["ppo"], "--learning-rate", "1e30", "--max-grad-norm", "1e30"]
    ended = command(*wild, "--run-dir", tmp_path / "stop")
    assert ended.code == 1 and "Traceback" not in ended.err
    several = r"update \d+: (losses/\w+ is -?(nan|inf), ){2,}which are not finite numbers; there is no checkpoint yet"
    assert re.search(several, ended.err), ended.err
    assert updates_kept(tmp_path / "stop") == []
    ended = command(*wild, "--on-nonfinite", "ignore", "--run-dir", tmp_path / "go")
    assert ended.code == 0, ended.err


def test_a_stall_shows_where_each_thread_stands_and_ends_the_run(tmp_path, monkeypatch, capfd):
    collect, calls, release = SteppedCollector.__call__, [], threading.Event()

    def hanging(self, *args):
        calls.append(time.monotonic())
        if len(calls) == 9:
            release.wait(60)
        return collect(self, *args)

    check = Watchdog.check  # it looks once the actor hangs: before, a slow start may take as long
    monkeypatch.setattr(Watchdog, "check", lambda self, *now: len(calls) >= 9 and check(self, *now))
    monkeypatch.setattr(SteppedCollector, "__call__", hanging)
    ended = command(*KINDS["ppo"], "--stall-timeout", str(2 * CROWD), "--run-dir", tmp_path / "run")
    release.set()
    assert len(calls) >= 9, "it stalled before it was to"
    assert ended.code == 1 and time.monotonic() - calls[8] < 20 * CROWD
    assert re.search(r"no update for \d+ s after update", ended.err)
    assert "thread 'actor 0'" in ended.err and "thread 'learner'" in ended.err and "release.wait(60)" in ended.err
    assert re.search(r"queue 'rollouts of actor \d': [01] of 1", ended.err)


# ------------------------------------------------------------------------------------------- another process


SILENCE = 8
PEER_FLAGS = [
    *TINY,
    "--num-shards",
    "2",
    "--total-timesteps",
    "1000000000",
    "--distributed",
]
# The command, slowed down, as several pairs wait for their turn.  The first word is the number of a call that fails.
UNHURRIED = """
import sys, time
from cleanba import cli
from cleanba.runtime.collect import SteppedCollector
collect, calls = SteppedCollector.__call__, []
def unhurried(self, *args):
    time.sleep(0.05)
    calls.append(self)
    if len(calls) == int(sys.argv[1]):
        raise OSError("the emulator is on fire")
    return collect(self, *args)
SteppedCollector.__call__ = unhurried
cli.main(sys.argv[2:])
"""
# What happens to process 1 -> what process 0 says of it, and its exit code.
FATES = {
    "killed": (signal.SIGKILL, "process 1 of 2 died", 1),
    "stopped": (signal.SIGSTOP, f"process 1 of 2 said nothing for {SILENCE} s", 1),
    "terminated": (signal.SIGTERM, "interrupted by SIGTERM", 128 + signal.SIGTERM),
    "raises": (None, "process 1 of 2 failed: OSError: the emulator is on fire", 1),
}


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    """Name -> two processes of one run; all started together, because starting takes longest."""
    started = {}
    for name in (*FATES, "warned"):
        run = tmp_path_factory.mktemp(name) / "run"
        address = free_address()
        both = []
        for i in ("0", "1"):
            words = ["ppo", *PEER_FLAGS, "--coordinator-address", address, "--num-processes", "2", "--process-id", i]
            words += ["--collector", "stepped", "--run-dir", str(run)]
            words += ["--checkpoint-frequency", "0"] if name == "warned" else ["--grace-period", "0"]
            words += ["--peer-timeout", str(SILENCE if name in ("stopped", "warned") else 120)]
            both.append(python("-c", UNHURRIED, "20" if name == "raises" and i == "1" else "0", *words))
        started[name] = both, run
    yield started
    for both, _ in started.values():
        for process in both:
            process.kill()
            process.communicate()


def wait_for_rows(run, count, is_well) -> None:
    deadline = time.monotonic() + 900
    while not (run / "metrics.jsonl").exists() or len(read_rows(run)) < count:
        assert time.monotonic() < deadline and is_well()
        time.sleep(0.1)


@pytest.mark.slow
def test_processes_that_are_all_suspended_go_on_and_all_warned_end_after_one_update(pairs):
    both, run = pairs["warned"]
    wait_for_rows(run, 4, lambda: both[0].poll() is None)  # by then it knows how long an update takes
    signal_both = lambda signum: [process.send_signal(signum) for process in both]
    signal_both(signal.SIGSTOP)
    time.sleep(SILENCE + 2)
    signal_both(signal.SIGCONT)
    wait_for_rows(run, len(read_rows(run)) + 2, lambda: both[0].poll() is None)
    signal_both(signal.SIGUSR1)
    ended = [finish(process) for process in both]
    assert [e.code for e in ended] == [128 + signal.SIGUSR1] * 2, ended
    assert "ending after this update, with a checkpoint" in ended[0].out
    assert updates_kept(run) == [read_result(run)["update"]] and "nothing to repeat" in ended[0].out


@pytest.mark.slow
def test_processes_with_different_flags_are_refused(tmp_path):
    words = in_pairs(["ppo", *TINY, "--num-shards", "2", "--run-dir", tmp_path / "run"])
    both = [python("-m", "cleanba", *one, "--keep-checkpoints", keep) for one, keep in zip(words, "23", strict=True)]
    ended = [finish(process) for process in both]
    assert [one.code for one in ended] == [2, 2], ended
    assert "process 1 was given a different experiment from process 0" in ended[0].err
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
@pytest.mark.parametrize("fate", FATES)
def test_the_others_notice_when_a_process_is(fate, pairs):
    (first, second), run = pairs[fate]
    signum, words, code = FATES[fate]
    wait_for_rows(run, 1, lambda: first.poll() is None or signum is None)
    if signum is not None:
        second.send_signal(signum)
    # Unnoticed, it would wait for ten minutes.  Its end alone may wait 20 s for a checkpoint that is being written.
    ended = finish(first, 300)
    assert ended.code == code, ended.err
    assert words in ended.err and ended.err.count(words) == 1
    assert read_result(run)["status"] in ("failed", "interrupted")
