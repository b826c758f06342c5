"""`cleanba sweep` on one machine: what is planned, refused, run, retried, interrupted, continued and reported."""

import json
import os
import signal
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import jax
import pytest
from launch import TINY, command, finish, python, read_result, read_rows
from rich.console import Console

from cleanba.errors import Failure
from cleanba.recipes import RECIPES
from cleanba.runs.directory import lock
from cleanba.runs.log import seconds_left
from cleanba.sweeps.manifest import done, write_manifest
from cleanba.sweeps.slurm import QUEUED, job_states
from cleanba.sweeps.sweep import (
    ELSEWHERE,
    Board,
    Flags,
    Planned,
    SweepRun,
    devices_of,
    expand_sets,
    plan,
    settle,
    share_devices,
    start,
    take_back,
    visible_gpus,
)
from cleanba.train_flags import parse

SHORT = [w for flag, w in zip(TINY[::2], TINY[1::2], strict=True) if flag != "--env-id" for w in (flag, w)]
ENVS = ("--env-ids", "Catch-v0", "CartPole-v1")


def names(*words: str) -> list[str]:
    """The run folders that a sweep of these words plans."""
    ended = command("sweep", *words, "--dry-run", "--", "ppo", *SHORT)
    assert ended.code == 0, ended.err
    return [line.rpartition("/")[2] for line in ended.out.splitlines()]


def test_every_combination_has_a_folder_of_its_own():
    planned = names(*ENVS, "--num-seeds", "2", "--set", "learning-rate=1e-4,2.5e-4", "hiddens=8 8,16")
    assert len(planned) == len(set(planned)) == 2 * 2 * 2 * 2
    assert planned[0] == "Catch-v0__learning_rate=1e-4+hiddens=8-8__s1"
    assert planned[-1] == "CartPole-v1__learning_rate=2.5e-4+hiddens=16__s2"
    fresh = names(*ENVS, "--num-seeds", "2", "--first-seed", "6")
    assert [name[-4:] for name in fresh] == ["__s6", "__s7"] * 2


def test_a_set_value_reaches_the_run_as_its_flag_and_switches_as_theirs():
    ended = command("sweep", "--env-ids", "Catch-v0", "--num-seeds", "1", "--dry-run",
                    "--set", "anneal_lr=true,false", "hiddens=8 8", "--", "ppo", *SHORT)  # fmt: skip
    on, off = ended.out.splitlines()
    assert " --anneal-lr --hiddens 8 8 " in on and " --no-anneal-lr " in off


def test_sets_of_atari_games_are_environments_that_exist():
    import envpool

    known = set(envpool.list_all_envs())
    assert expand_sets(["@atari5"]) == ["BattleZone-v5", "DoubleDunk-v5", "NameThisGame-v5", "Phoenix-v5", "Qbert-v5"]
    assert expand_sets(["@atari3"]) == ["BattleZone-v5", "NameThisGame-v5", "Phoenix-v5"]
    assert len(set(expand_sets(["@atari57"]))) == 57 and set(expand_sets(["@atari57"])) <= known
    assert set(expand_sets(["@atari5"])) < set(expand_sets(["@atari57"]))
    assert expand_sets(["Phoenix-v5", "@atari3"]) == ["Phoenix-v5", "BattleZone-v5", "NameThisGame-v5"]


@pytest.mark.parametrize(
    "own, runs, said",
    [
        ([], ["ppo", "--bogus", "3"], "ppo has no --bogus; `cleanba ppo --help` lists its flags"),
        ([], ["ppo", "--network", "foo"], "--network foo must be one of 'nature', 'nips'"),
        ([], ["ppo", *SHORT, "--num-minibatches", "3"], "num_minibatches=3 cannot cut"),
        ([], ["ppo", *SHORT, "--network", "nature"], "network=nature needs images"),
        ([], ["ppo", *SHORT, "--seed", "7"], "--seed is given after --"),
        ([], ["ppo", *SHORT, "--run_dir=x"], "--run_dir=x is given after --"),
        (
            [],
            ["ppo", *SHORT, "--num-processes", "2"],
            "a sweep gives each run one process; leave it out, or add --slurm",
        ),
        (["--dir", "x[1]"], ["ppo", *SHORT], "x[1] has a [, and Orbax writes no whole checkpoints below such a name"),
        (["--dir", "/dev/null", "--dry-run"], ["ppo", *SHORT], "--dir /dev/null is a file; name a folder"),
        ([], ["pop"], "a sweep needs to know what to run"),
        ([], [], "a sweep needs to know what to run"),
        (["--set", "learning_rat=1"], ["ppo", *SHORT], "did you mean learning_rate"),
        (["--set", "preset=mujoco"], ["ppo", *SHORT], "--set preset=mujoco: one preset serves all runs; give --preset"),
        (["--set", "lr=1"], ["ppo", *SHORT], "--set lr: ppo has no such flag; set --learning-rate"),
        (["--set", "learning_rate"], ["ppo", *SHORT], "must be name=value,value"),
        (["--set", "learning_rate=1e-4,x"], ["ppo", *SHORT], "learning_rate=x: --learning-rate: 'x' is not a number"),
        (["--set", "gamma=0.9,1.1"], ["ppo", *SHORT], "gamma=1.1 must lie in [0, 1]"),
        (["--set", "gamma=0.9", "gamma=0.8"], ["ppo", *SHORT], "each flag once"),
        (["--set", "gamma=0.9,0.9"], ["ppo", *SHORT], "would share the folder"),
        (["--set", "learning_rate=1e-3,0.001"], ["ppo", *SHORT], "names 0.001 twice, as 1e-3"),
        (["--set", "hiddens=8 16,8  16.0"], ["ppo", *SHORT], "names 8  16.0 twice, as 8 16"),
        (["--set", "anneal_lr=maybe"], ["ppo", *SHORT], "anneal_lr=maybe must be true or false"),
        (["--set", "seed=1,2"], ["ppo", *SHORT], "use --env-ids, --num-seeds, --first-seed or --dir"),
        (["--env-ids", "Catch-v0", "Brekout-v5"], ["ppo", *SHORT], "the closest names are Breakout-v5"),
        (["--env-ids", "@atari9"], ["ppo", *SHORT], "there is no set @atari9"),
        (["--num-seeds", "0"], ["ppo", *SHORT], "num_seeds=0 must lie in [1, 10000]"),
        (["--first-seed", "2147483646"], ["ppo", *SHORT], "first_seed=2147483646: seeds must lie in [0, 2^31)"),
        (["--workers", "0"], ["ppo", *SHORT], "workers=0 must be at least 1"),
        ([], ["ppo", *SHORT, "--show-config"], "a sweep has several configurations; leave out --show-config"),
    ],
)
def test_what_would_not_run_is_refused_before_anything_starts(own, runs, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    envs = [] if "--env-ids" in own else ["--env-ids", "Catch-v0"]
    ended = command("sweep", *envs, *own, *(["--", *runs] if runs else []))
    assert ended.code == 2
    assert said in ended.err and len(ended.err.splitlines()) == 1
    assert not list(tmp_path.iterdir())


def test_a_sweep_whose_command_is_not_set_apart_is_told_where(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    ended = command("sweep", "--env-ids", "Catch-v0", "ppo", *SHORT)
    assert ended.code == 2 and ended.err.endswith("then what it runs: write -- before ppo\n"), ended
    assert command("sweep", "--help").code == 0


@pytest.mark.parametrize("error, state", [("NotFinite: losses/loss", "failed"), ("OSError: lost", "waiting")])
def test_a_number_that_is_not_finite_is_not_tried_again(error, state, tmp_path):
    (tmp_path / "result.json").write_text(json.dumps({"status": "failed", "error": error}))
    planned = SimpleNamespace(name="a")
    run = SimpleNamespace(run_dir=tmp_path, seconds=0.0, started=0.0, attempts=1, planned=planned, log="a.log")
    settle(run, 1, 1, waiting := [], SimpleNamespace(say=print))
    assert run.state == state and waiting == [run] * (state == "waiting")


def test_the_help_of_status_is_no_wrong_use():
    ended = command("sweep", "status", "--help")
    assert ended.code == 0 and ended.out.startswith("usage: cleanba sweep status DIR\n\nShow each run")


def test_the_help_of_the_runs_flags_is_no_wrong_use_either():
    ended = command("sweep", "--env-ids", "Catch-v0", "--", "ppo", "--help")
    assert ended.code == 0 and "--learning-rate" in ended.out and not ended.err, ended


def test_a_folder_with_other_experiments_is_refused(tmp_path):
    words = ["sweep", "--env-ids", "Catch-v0", "--num-seeds", "1", "--dir", tmp_path, "--", "ppo", *SHORT]
    run = tmp_path / "Catch-v0__ppo__s1"
    assert command("ppo", *TINY, "--run-dir", run).code == 0
    assert command(*words).code == 0, "the same experiment, wherever it was started"
    ended = command(*words, "--gamma", "0.5")
    assert ended.code == 2 and "gamma: 0.99, now 0.5" in ended.err


def test_a_sweep_with_more_steps_makes_its_finished_runs_longer(tmp_path):
    sweep = ["sweep", "--env-ids", "Catch-v0", "--num-seeds", "1", "--dir", tmp_path, "--", "ppo", *SHORT]
    for steps, said in (("128", "finished in"), ("128", "1 of 1 runs are finished already"), ("192", "finished in")):
        ended = command(*sweep, "--no-anneal-lr", "--total-timesteps", steps)
        assert ended.code == 0 and said in ended.out, ended
    assert read_result(tmp_path / "Catch-v0__ppo__s1")["update"] == 3


def test_workers_take_different_gpus_as_long_as_there_are_enough(monkeypatch):
    devices = lambda *args: [e["CUDA_VISIBLE_DEVICES"] for e in share_devices(*args)]
    assert share_devices([], 1, 3) == [{}, {}, {}]
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    monkeypatch.setattr("cleanba.sweeps.sweep.has_cuda", lambda: False)
    assert visible_gpus() == [], "this JAX cannot use them"
    monkeypatch.setattr("cleanba.sweeps.sweep.has_cuda", lambda: True)
    assert visible_gpus() == ["2", "3"]
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    assert visible_gpus() == [], "JAX uses none of them"
    assert devices(["0", "1", "2", "3"], 1, None) == ["0", "1", "2", "3"]
    assert devices(["4", "5", "6", "7"], 2, None) == ["4,5", "6,7"]
    assert devices(["0", "1", "2"], 2, None) == ["0,1"]
    assert devices(["0", "1"], 1, 3) == ["0", "1", "0"]
    assert {e["XLA_PYTHON_CLIENT_MEM_FRACTION"] for e in share_devices(["0", "1"], 1, 3)} == {"0.45"}
    with pytest.raises(ValueError, match="each run names 4 devices, but there are 2 GPUs here"):
        share_devices(["0", "1"], 4, None)
    monkeypatch.setenv("XLA_CLIENT_MEM_FRACTION", "0.3")  # JAX refuses both variables together
    assert all("XLA_PYTHON_CLIENT_MEM_FRACTION" not in e for e in share_devices(["0", "1"], 1, 3))


def test_a_run_sees_the_device_of_its_evaluations():
    of = lambda *words: devices_of(parse(RECIPES["ppo"], [*SHORT, *words]))
    assert of() == 1 and of("--eval-frequency", "10", "--eval-device-id", "2") == 3
    assert of("--actor-device-ids", "0", "1", "--learner-device-ids", "0") == 2


def test_a_sweep_itself_takes_no_memory_of_a_gpu():
    before = jax.config.jax_platforms
    jax.config.update("jax_platforms", "cuda")
    try:
        names(*ENVS)
        assert jax.config.jax_platforms == "cpu"
    finally:
        jax.config.update("jax_platforms", before)


def test_the_live_table_shows_every_run_that_there_is_room_for(tmp_path):
    runs = [
        SweepRun(Planned(f"run{i}", "Catch-v0", "ppo", i, (), 7), tmp_path / f"run{i}", tmp_path) for i in range(30)
    ]
    runs[20].state = "running"
    (tmp_path / "run20").mkdir()
    (tmp_path / "run20" / "metrics.jsonl").write_text('{"update": 3, "charts/SPS": 1234.5}\n{"update": 4, "ch')
    board = Board(tmp_path, runs, 1)
    console = board._console = Console(width=100, height=20, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    console.print(board._table())
    shown = console.export_text()
    assert "1 running, 29 waiting" in shown and "and 16 more" in shown
    (row,) = [line for line in shown.splitlines() if "run20" in line]
    assert "running" in row and "3/7" in row and "1,234" in row


def test_without_a_terminal_each_run_says_once_a_minute_how_far_it_is(tmp_path, capsys, monkeypatch):
    runs = [
        SweepRun(Planned(f"run{i}", "Catch-v0", "ppo", i, (), 100), tmp_path / f"run{i}", tmp_path) for i in range(2)
    ]
    runs[0].state = "running"
    (tmp_path / "run0").mkdir()
    row = lambda update, seconds: {"update": update, "seconds": seconds, "losses/entropy": 1.0}
    filling = [{"update": 5, "seconds": 0.1}]  # of a replay buffer, which is much faster
    rows = [row(1, 30.0), *filling, row(10, 40.0), row(20, 60.0) | {"charts/episodic_return": 0.25}]
    (tmp_path / "run0" / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    clock = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    board = Board(tmp_path, runs, 1)
    for clock[0] in range(125):  # type: ignore[misc]
        board.refresh()
    # Ten updates took 20 s, and 80 are left.
    assert capsys.readouterr().out == "run0: update 20/100, return 0.25, ETA 0:02:40\n" * 2


def test_what_a_resume_takes_does_not_count_as_training():
    rows = [{"update": update, "seconds": 2.0 * update + 1800 * (update > 60), "losses/x": 0.1} for update in range(99)]
    assert seconds_left(rows[:72], 171) == pytest.approx(200)


PACT = """if True:
    import os, subprocess, sys, time
    from cleanba.sweeps import child
    if sys.argv[1] == "parent":
        subprocess.Popen([sys.executable, "-c", sys.argv[2], "child", str(os.getpid()), *sys.argv[3:]])
        time.sleep(600)
    if "portable" in sys.argv:  # as where there is no prctl
        child.ctypes = type("none", (), {"CDLL": lambda *_, **__: object()})
    child.end_with(int(sys.argv[2]))
    print("begun", flush=True)
    time.sleep(600)
"""


@pytest.mark.parametrize("how", ["linux", "portable"])
def test_what_a_killed_sweep_started_ends_too(how):
    sweep = python("-c", PACT, "parent", PACT, how)
    assert sweep.stdout is not None and sweep.stdout.readline() == "begun\n"
    (child,) = children(sweep.pid)
    sweep.kill()
    sweep.wait()
    deadline = time.monotonic() + 60
    while lives(child):
        assert time.monotonic() < deadline, "it lives on"
        time.sleep(0.02)


def test_what_was_started_by_a_sweep_that_is_gone_already_ends_at_once():
    ended = finish(python("-m", "cleanba.sweeps.child", "1", "envs"), 60)
    assert ended.code == -signal.SIGKILL and ended.out == ""


def test_jobs_whose_state_slurm_does_not_tell_are_not_taken_for_gone(tmp_path, monkeypatch):
    """Otherwise everything would be submitted twice when the controller is busy for a minute."""
    monkeypatch.setenv("PATH", str(tmp_path))
    (tmp_path / "squeue").write_text("#!/bin/sh\nexit 1\n")
    (tmp_path / "squeue").chmod(0o755)
    with pytest.raises(Failure, match="squeue did not answer"):
        job_states(["12_0"])


def test_other_lines_of_squeue_are_no_jobs_and_a_job_that_hears_a_signal_is_one(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("SQUEUE_PARTITION", "none")
    lines = r"CLUSTER: x\n\n12_0|SIGNALING|None"
    (tmp_path / "squeue").write_text(f'#!/bin/bash\n[ -z "${{SQUEUE_PARTITION-}}" ] && printf "{lines}\\n"\n')
    (tmp_path / "squeue").chmod(0o755)
    assert job_states(["12_0"]) == {"12_0": "SIGNALING"} and "SIGNALING" in QUEUED


def lives(pid: int) -> bool:
    """Whether a process has not ended; one that its parent has not asked about, a zombie, has."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def children(parent: int) -> set[int]:
    """Processes that `parent` started and that have not ended."""
    found = set()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, ppid = stat.read_text().rpartition(")")[2].split()[:2]
        except OSError:
            continue
        if int(ppid) == parent and state != "Z":
            found.add(int(stat.parent.name))
    return found


def trains(pid: int, runs: Iterable[Path]) -> bool:
    """Whether a process holds the lock of one of the runs.

    A run that has not begun may hold the lock of its sweep's folder, for a moment: that of the sweep that forked it.
    """
    locks = {str(run.resolve() / ".lock") for run in runs}
    try:
        held = [os.readlink(link) for link in Path(f"/proc/{pid}/fd").iterdir()]
    except OSError:
        return False
    return not locks.isdisjoint(held)


def test_a_run_that_ended_at_a_lower_target_is_not_done(tmp_path):
    (run := tmp_path / "a").mkdir()
    planned = lambda *target: [Planned("a", "Catch-v0", "ppo", 1, ("ppo", *SHORT, *target), updates=10)]
    over = lambda *target: done(planned(*target), tmp_path) == {"a"}
    experiment = {"total_timesteps": 100, "num_envs": 2, "num_steps": 5}  # 10 updates
    (run / "config.json").write_text(json.dumps({"experiment": experiment, "run": {"target_return": 20.0}}))
    (run / "result.json").write_text(json.dumps({"status": "finished", "update": 3}))
    assert over("--target-return", "20") and over("--target-return", "10")
    assert not over("--target-return", "30") and not over()
    (run / "result.json").write_text(json.dumps({"status": "finished", "update": 10}))
    assert over("--target-return", "30") and over()
    (run / "result.json").write_text(json.dumps({"status": "interrupted", "update": 3}))
    assert not over("--target-return", "20")


def test_a_run_that_ended_elsewhere_with_fewer_steps_is_resumed(tmp_path):
    planned = Planned("a", "Catch-v0", "ppo", 1, ("ppo", *SHORT), updates=10)
    write_manifest(tmp_path, [planned], [], {})
    (tmp_path / "a").mkdir()
    run = SweepRun(planned, tmp_path / "a", tmp_path / "log", state=ELSEWHERE)
    for updates, state, shown in [(4, "waiting", "1 unfinished"), (10, "finished", "1 finished")]:
        experiment = {"total_timesteps": 10 * updates, "num_envs": 2, "num_steps": 5}
        (tmp_path / "a" / "config.json").write_text(json.dumps({"experiment": experiment, "run": {}}))
        (tmp_path / "a" / "result.json").write_text(json.dumps({"status": "finished", "update": updates}))
        take_back(run, waiting := [], mock.Mock())
        assert run.state == state and waiting == [run] * (state == "waiting")
        assert command("sweep", "status", tmp_path).out.endswith(f"\n{shown}\n")


def test_a_run_that_another_process_trains_is_waited_for(tmp_path, monkeypatch):
    """Otherwise it would be refused, with exit code 2, and left undone."""
    monkeypatch.setattr("cleanba.sweeps.sweep.POLL_SECONDS", 0.02)
    monkeypatch.setattr("cleanba.sweeps.sweep.LOOK_SECONDS", 0.02)
    words = ["sweep", "--env-ids", "Catch-v0", "--num-seeds", "1", "--dir", tmp_path, "--", "ppo", *SHORT]
    run = tmp_path / "Catch-v0__ppo__s1"
    run.mkdir()
    held = lock(run)

    other = threading.Timer(0.5, held.close)  # from when the sweep has looked

    def start_both(*args) -> None:
        start(*args)
        if other.ident is None:
            other.start()

    with mock.patch("cleanba.sweeps.sweep.start", start_both):
        ended = command(*words)
    other.join()
    assert ended.code == 0, ended
    assert "another process is training it" in ended.out and "1 of 1 runs finished" in ended.out


def test_variants_that_are_uploaded_have_repositories_of_their_own(tmp_path):
    common, flags = [*SHORT, "--upload-model"], Flags(env_ids=("Catch-v0",), set=("gamma=0.9,0.99",), num_seeds=1)
    runs = plan(RECIPES["ppo"], common, flags, tmp_path)
    names = [parse(RECIPES["ppo"], list(run.words[1:])).run.exp_name for run in runs]
    assert names == ["ppo-gamma=0.9", "ppo-gamma=0.99"]
    assert "--exp-name" not in plan(RECIPES["ppo"], SHORT, flags, tmp_path)[0].words


@pytest.mark.slow
def test_a_sweep_is_interrupted_continued_and_reports_its_failure(tmp_path):
    """Three seeds, two at a time: Ctrl-C in the middle, then one run fails, then its fault is removed."""
    longer = [*SHORT, "--total-timesteps", "24000", "--checkpoint-frequency", "25", "--log-frequency", "25"]
    seeds = {f"Catch-v0__ppo__s{seed}": seed for seed in (1, 2, 3)}
    words = ["sweep", *ENVS[:2], "--num-seeds", "3", "--workers", "2", "--dir", tmp_path / "s", "--", "ppo", *longer]
    folder = {name: tmp_path / "s" / name for name in seeds}
    broken = folder["Catch-v0__ppo__s3"]
    broken.mkdir(parents=True)
    (broken / "actors").write_text("no folder: this run fails, and would when it is tried again")

    sweep = python("-m", "cleanba", *words)
    saved = lambda d: (d / "metrics.jsonl").exists() and any("params_digest" in r for r in read_rows(d))
    deadline = time.monotonic() + 300
    while not any(saved(d) for d in folder.values()):
        assert sweep.poll() is None and time.monotonic() < deadline, finish(sweep, 5)
        time.sleep(0.02)
    started = children(sweep.pid)
    assert 1 <= len(started) <= 2, "--workers 2"
    sweep.send_signal(signal.SIGINT)
    ended = finish(sweep)
    assert ended.code == 130 and "the same command resumes it" in ended.err
    assert not [pid for pid in started if Path(f"/proc/{pid}").exists()], "a run outlived its sweep"
    cut = [d for d in folder.values() if (d / "result.json").exists() and read_result(d)["status"] == "interrupted"]
    assert cut

    killed = python("-m", "cleanba", *words)
    deadline = time.monotonic() + 300
    while not (started := [pid for pid in children(killed.pid) if trains(pid, folder.values())]):
        assert killed.poll() is None and time.monotonic() < deadline, finish(killed, 5)
        time.sleep(0.02)
    for pid in started:
        os.kill(pid, signal.SIGSTOP)  # it cannot end by itself meanwhile
    killed.kill()
    finish(killed)
    gone = time.monotonic() + 60
    while any(lives(pid) for pid in started):
        assert time.monotonic() < gone, "a run outlived its sweep, which was killed"
        time.sleep(0.02)

    ended = command(*words)
    assert ended.code == 1, ended
    assert "2 of 3 runs finished, 1 failed" in ended.out
    assert f"failed: {broken.name}, exit code 1 after 2 tries" in ended.out
    status = command("sweep", "status", tmp_path / "s")
    error = read_result(broken)["error"]
    assert status.code == 0 and status.out.endswith(f"2 finished, 1 failed\n{broken.name}: {error}\n"), status.out
    log = (tmp_path / "s" / "logs" / f"{broken.name}.log").read_text()
    assert log.count("$ cleanba ppo") == 2
    resumed = [d for d in cut if "resuming after update" in (tmp_path / "s" / "logs" / f"{d.name}.log").read_text()]
    assert resumed

    (broken / "actors").unlink()
    ended = command(*words)
    assert ended.code == 0 and "2 of 3 runs are finished already" in ended.out, ended
    assert "3 of 3 runs finished" in ended.out
    manifest = json.loads((tmp_path / "s" / "sweep.json").read_text())
    assert set(manifest["runs"]) == set(seeds)

    seed = str(seeds[resumed[0].name])
    alone = command("ppo", *longer, "--env-id", "Catch-v0", "--seed", seed, "--run-dir", tmp_path / "alone")
    assert alone.code == 0
    assert read_result(tmp_path / "alone")["params_digest"] == read_result(resumed[0])["params_digest"]
