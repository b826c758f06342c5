"""Whatever breaks, the process ends soon, says why once, and leaves nothing running."""

import itertools
import json
import os
import queue
import random
import re
import signal
import socket
import threading
import time
from types import SimpleNamespace

import pytest
from launch import CROWD, ROOT, TINY, command, finish, in_pairs, python, read_result, read_rows
from ports import free_address, free_port
from scripted import Planted

from cleanba.environments.envpool import Envs
from cleanba.errors import Failure, Interrupted, NotFinite, UsageError
from cleanba.files import write_json
from cleanba.runtime import processes as joining
from cleanba.runtime.channels import Stop
from cleanba.runtime.checkpoint import updates_kept
from cleanba.runtime.learner import Learner
from cleanba.runtime.metrics import Status, Writers
from cleanba.runtime.peers import Peers
from cleanba.runtime.progress import Progress
from cleanba.runtime.supervision import Watchdog, end_by_signal, hear_signals
from cleanba.runtime.train import ended_by
from cleanba.waited import compiling, in_a_thread

SOON = 20.0 * CROWD  # seconds; what takes longer is considered never to end
ENDLESS = [*TINY, "--total-timesteps", "1000000000"]


@pytest.fixture
def pools(monkeypatch):
    """Watches EnvPool: environments that were made -> whether they were closed."""
    made: dict[Envs, bool] = {}
    init, close = Envs.__init__, Envs.close

    def watched_init(self, *args, **kwargs):
        init(self, *args, **kwargs)
        made[self] = False

    def watched_close(self):
        close(self)
        if self in made:
            made[self] = True

    monkeypatch.setattr(Envs, "__init__", watched_init)
    monkeypatch.setattr(Envs, "close", watched_close)
    return made


def test_a_process_that_was_stopped_for_a_while_has_not_stalled(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr("cleanba.waited.time", SimpleNamespace(monotonic=lambda: clock[0]))
    watchdog = Watchdog(60.0)

    def look_after(*seconds: float) -> None:
        for more in seconds:
            clock[0] += more
            watchdog.check(3, "training")

    look_after(0, 1000, *[1] * 50)  # a job that its cluster suspended
    with pytest.raises(Failure, match="no update for 61 s after update 3"):
        look_after(*[1] * 10)


def test_a_signal_does_not_interrupt_what_has_just_ended(monkeypatch):
    def progress() -> tuple[int, str]:
        raise Interrupted(signal.SIGTERM)

    going_on, over = threading.Event(), threading.Event()
    with pytest.raises(Interrupted):
        in_a_thread(lambda: going_on.wait(20), "end", progress)
    going_on.set()

    def join_until_it_ends(thread, timeout=None):  # it ends while the main thread waits for it
        over.set()
        join(thread)

    join = threading.Thread.join
    monkeypatch.setattr(threading.Thread, "join", join_until_it_ends)
    assert in_a_thread(lambda: over.wait(20) and "film", "end", progress) == "film"


@pytest.mark.parametrize("alone, end", [(True, 20), (False, 40)])
def test_several_processes_wait_for_an_end_of_an_epoch_that_is_still_to_come(alone, end):
    """They do not save at an end that is past: another process may have begun the next update."""
    progress = Progress(Status("", 100, None), state=object(), update=20, update_seconds=0.1)
    next_end = lambda update: (update // 20 + 1) * 20
    stop, said = Stop(), []
    ended = threading.Thread(
        target=end_by_signal, args=(signal.SIGUSR1, 30.0, True, next_end, alone, progress, stop, said.append)
    )
    ended.start()
    while not said:
        time.sleep(0.01)
    stop(Interrupted(signal.SIGUSR1))
    ended.join()
    assert f"ending after the checkpoint of update {end}," in said[0]


def test_a_thread_that_compiles_has_not_stalled(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr("cleanba.waited.time", SimpleNamespace(monotonic=lambda: clock[0]))
    watchdog = Watchdog(60.0)

    def look(times: int) -> None:
        for _ in range(times):
            clock[0] += 1
            watchdog.check(3, "collecting the first rollout")

    with compiling():
        look(200)
    look(60)
    with pytest.raises(Failure, match="no update for 61 s after update 3"):
        look(1)


def test_a_process_waiting_for_others_that_never_join_says_so_and_ends():
    words = ["ppo", *TINY, "--distributed", "--coordinator-address", free_address(), "--num-processes", "2"]
    code = "from cleanba.runtime import processes\nprocesses.REACH_SECONDS, processes.TELL_SECONDS = 2.0, 1.0\n"
    ended = finish(python("-c", f"{code}from cleanba.cli import main; main()", *words, "--process-id", "0"))
    assert ended.code == 1, ended
    assert "process 0: waiting until all 2 processes have joined\n" in ended.err
    assert "all 2 processes should have joined within 2 s, but some have not; start all of them" in ended.err


def test_what_a_scheduler_starts_is_told_to_look_at_the_network():
    code = """if True:
        import time
        from cleanba.config import Placement
        from cleanba.runtime import processes
        processes.REACH_SECONDS, processes.TELL_SECONDS = 0.4, 0.2
        with processes.watching_for_others(Placement(distributed=True)):
            time.sleep(60)
    """
    ended = finish(python("-c", code))
    assert ended.code == 1 and "that no firewall blocks any port between them" in ended.err, ended
    assert "--process-id" not in ended.err


def test_ctrl_c_ends_a_process_that_waits_for_others():
    words = ["ppo", *TINY, "--distributed", "--coordinator-address", free_address(), "--num-processes", "2"]
    code = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
    code += "from cleanba.runtime import processes\nprocesses.TELL_SECONDS = 0.5\n"
    waits = python("-c", f"{code}from cleanba.cli import main; main()", *words, "--process-id", "0")
    assert "waiting until all 2 processes have joined" in waits.stderr.readline()
    waits.send_signal(signal.SIGINT)
    ended = finish(waits, 20 * CROWD)
    assert (ended.code, ended.err) == (130, "cleanba: interrupted\n")


def test_a_taken_port_and_a_missing_process_0_are_reported_in_a_sentence(monkeypatch, capsys):
    port = free_port()  # the kernel gives it to nobody else once it is free again
    with socket.create_server(("", port)):
        with pytest.raises(Failure, match=f"process 0 cannot open port {port} .*choose another"):
            joining.require_free(port)
        joining.wait_for_process_0(f"localhost:{port}", 1)
    monkeypatch.setattr(joining, "REACH_SECONDS", 2.0)
    monkeypatch.setattr(joining, "TELL_SECONDS", 0.0)
    with pytest.raises(Failure, match=f"process 1 cannot reach process 0 at localhost:{port} .*refused"):
        joining.wait_for_process_0(f"localhost:{port}", 1)
    assert capsys.readouterr().err.count(f"process 1 waits for process 0 at localhost:{port}") == 1


def test_messages_of_a_process_may_come_in_pieces_and_silence_ends_them(monkeypatch):
    monkeypatch.setattr("cleanba.runtime.peers.PING_SECONDS", 0.01)
    monkeypatch.setattr("cleanba.runtime.peers._state", lambda: SimpleNamespace(process_id=0, num_processes=1))
    here, there = socket.socketpair()
    with here, there, Peers(0.2) as peers:
        peers._links[1] = here
        for piece in (b'{"ping": true}\n{"lo', b'st": 3}', b'\n{"bye": true}\n{"pi'):
            there.sendall(piece)
        messages = peers._messages(1)
        assert list(itertools.islice(messages, 3)) == [{"ping": True}, {"lost": 3}, {"bye": True}]
        with pytest.raises(TimeoutError):
            next(messages)
        there.close()
        assert list(peers._messages(1)) == []


@pytest.mark.parametrize("error_type", [Failure, NotFinite, UsageError])
def test_what_another_process_ended_with_is_known_as_what_it_is(error_type, monkeypatch):
    """After a number that is not finite, nobody is told to go on from the checkpoint."""
    monkeypatch.setattr("cleanba.runtime.peers._state", lambda: SimpleNamespace(process_id=0, num_processes=1))
    here, there = socket.socketpair()
    with here, there:
        ending, other = Peers(5.0), Peers(5.0)
        ending._links[1] = there
        ending.tell(error_type("the reward is nan"))
        (sent,) = here.recv(10_000).splitlines()
    other.on_lost = lambda error: None
    other._lose(json.loads(sent), 0)
    assert type(other.error) is error_type and str(other.error) == "process 0 of 1 failed: the reward is nan"


@pytest.mark.parametrize("how", ["died", "said nothing"])
def test_elastic_slurm_jobs_recognise_the_loss_of_a_process(how, monkeypatch, tmp_path):
    monkeypatch.setattr("cleanba.runtime.peers.PING_SECONDS", 0.01)
    monkeypatch.setattr("cleanba.runtime.peers._state", lambda: SimpleNamespace(process_id=0, num_processes=1))
    here, there = socket.socketpair()
    peers = Peers(0.05)
    peers.on_lost = lambda error: None
    peers._links[1] = here
    with here, there:
        if how == "died":
            there.close()
        peers._listen(1)
    write_json(tmp_path / "result.json", ended_by(peers.error))
    template = (ROOT / "cleanba" / "sweeps" / "slurm_templates" / "elastic.sh").read_text()
    (pattern,) = re.findall(r"grep -Eq '(.+)' \"\$run/result\.json\"", template)
    assert re.search(pattern, (tmp_path / "result.json").read_text()) and how in str(peers.error)


class Bomb:
    """Calls through until the n-th call, which raises."""

    def __init__(self, target, n: int):
        self.target, self.n, self.calls, self.lock = target, n, 0, threading.Lock()
        self.exploded_at = 0.0

    def plant(self, monkeypatch, owner, name: str) -> "Bomb":
        monkeypatch.setattr(owner, name, lambda *args, **kwargs: self.explode(*args, **kwargs))
        return self

    def explode(self, *args, **kwargs):
        with self.lock:
            self.calls += 1
            mine = self.calls == self.n
        if mine:
            self.exploded_at = time.perf_counter()
            raise Planted("the bomb went off")
        return self.target(*args, **kwargs)


def assert_nothing_is_left(pools) -> None:
    left = [thread for thread in threading.enumerate() if thread.name.startswith(("actor", "learner"))]
    for thread in left:  # one that compiles ends once it has: a process of its own would not wait for it
        thread.join(60.0 * CROWD)
    assert not [thread.name for thread in left if thread.is_alive()]
    assert all(pools.values()), "EnvPool was not closed"


SOME_STEP = random.Random(2).randint(20, 200)


@pytest.mark.parametrize(
    "owner, name, call",
    [
        pytest.param(Envs, "step", 1, id="first step of an environment"),
        pytest.param(Envs, "step", SOME_STEP, id="some step of an environment"),
        pytest.param(Envs, "__init__", 2, id="making the second actor's environments"),
        pytest.param(Envs, "__init__", 4, id="making environments after a checkpoint"),
        pytest.param(Learner, "compile", 1, id="compiling the update"),
        pytest.param(Learner, "update", 1, id="first update"),
        pytest.param(Learner, "update", 5, id="later update"),
        pytest.param(Learner, "publish", 3, id="publishing parameters"),
        pytest.param(Learner, "send", 5, id="sending a rollout"),  # the third of an actor, after update 1
        pytest.param(Writers, "write", 2, id="writing metrics"),
    ],
)
def test_an_error_anywhere_ends_the_run_soon_and_is_reported_once(owner, name, call, tmp_path, monkeypatch, pools):
    bomb = Bomb(getattr(owner, name), call).plant(monkeypatch, owner, name)
    ended = command("ppo", *ENDLESS, "--run-dir", tmp_path / "run", "--checkpoint-frequency", "3", "--env-epoch", "3")
    assert time.perf_counter() - bomb.exploded_at < SOON

    assert ended.code == 1 and ended.err.endswith("cleanba: the run failed: Planted: the bomb went off\n")
    assert ended.err.count("Traceback (most recent call last)") == 1
    assert ended.err.count('raise Planted("the bomb went off")') == 1, "the traceback must lead to the culprit"
    assert ended.err.count("in explode") == 1
    result = read_result(tmp_path / "run")
    assert result["status"] == "failed"
    assert result["error"] == "Planted: the bomb went off"
    in_an_actor = owner is Envs or name == "send"
    if in_an_actor and result["update"] > 0:  # the current update ended, and was saved
        assert updates_kept(tmp_path / "run")[-1] == result["update"]
        assert f"goes on after update {result['update']}, nothing to repeat" in ended.out
    assert result["update"] > 0 or (name, call) not in [("__init__", 4), ("send", 5)]
    assert_nothing_is_left(pools)


@pytest.mark.parametrize("signum, code", [(signal.SIGINT, 130), (signal.SIGTERM, 143)], ids=["Ctrl-C", "SIGTERM"])
@pytest.mark.parametrize("moment", ["compiling", "first update", "third update"])
def test_a_signal_ends_the_run_soon_and_cleanly(signum, code, moment, tmp_path, monkeypatch, pools):
    sent = []
    method = "compile" if moment == "compiling" else "update"
    original, wake = getattr(Learner, method), Stop.wake
    heard = threading.Event()

    def waking(*args):  # the run knows that it must end after its current update
        wake(*args)
        heard.set()

    def signalling(*args):
        if method == "compile" or args[4] == (1 if moment == "first update" else 3):
            sent.append(time.perf_counter())
            os.kill(os.getpid(), signum)
            if method == "update":  # further updates take less time than the main thread may take to wake
                heard.wait(SOON)
        return original(*args)

    monkeypatch.setattr(Learner, method, signalling)
    monkeypatch.setattr(Stop, "wake", waking)
    handlers = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    ended = command("ppo", *ENDLESS, "--run-dir", tmp_path / "run")
    if method == "update":  # a compilation may finish first
        assert time.perf_counter() - sent[0] < SOON

    assert len(sent) == 1
    assert ended.code == code
    assert "Traceback" not in ended.err
    assert ended.err.strip() == f"cleanba: interrupted by {signum.name}"
    result = read_result(tmp_path / "run")
    assert result["status"] == "interrupted"
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == handlers
    if moment == "compiling":  # which nothing can end but the end of the process
        for thread in threading.enumerate():
            if thread.name == "learner":
                thread.join(10 * SOON)
    assert_nothing_is_left(pools)
    if method == "update":
        assert result["update"] in ((1,) if moment == "first update" else (2, 3))
        assert len(pools) == 2


def test_a_signal_while_environments_are_made_anew_ends_the_run_with_a_checkpoint(tmp_path, monkeypatch, pools):
    """The actors have not yet taken the newest parameters, so the learner waits to send the next ones."""
    make, update, learnt = Envs.__init__, Learner.update, threading.Event()
    sent, release = [], threading.Event()

    def slow(self, *args, **kwargs):
        if len(pools) == 2:  # those of the first epoch
            learnt.wait(SOON)
            time.sleep(1)  # the learner comes to the next parameters
            if not sent:
                sent.append(time.perf_counter())
                os.kill(os.getpid(), signal.SIGINT)
            release.wait(60)
        make(self, *args, **kwargs)

    def last_of_the_epoch(self, state, memory, blocks, number):
        try:
            return update(self, state, memory, blocks, number)
        finally:
            if number == 3:
                learnt.set()

    monkeypatch.setattr(Envs, "__init__", slow)
    monkeypatch.setattr(Learner, "update", last_of_the_epoch)
    words = ("--checkpoint-frequency", "100", "--env-epoch", "3", "--grace-period", "20")
    try:
        ended = command("ppo", *ENDLESS, *words, "--run-dir", tmp_path / "run")
    finally:
        release.set()
    assert ended.code == 130 and "Traceback" not in ended.err, ended
    assert updates_kept(tmp_path / "run") == [3] and read_result(tmp_path / "run")["update"] == 3
    assert_nothing_is_left(pools)


def test_processes_that_do_not_share_the_runs_directory_are_refused(tmp_path):
    words = in_pairs(["ppo", *TINY, "--num-shards", "2"])
    both = [python("-m", "cleanba", *one, "--run-dir", tmp_path / str(i)) for i, one in enumerate(words)]
    ended = [finish(process) for process in both]
    said = "process 1 has another run directory than process 0"
    assert [one.code for one in ended] == [2, 2] and all(said in one.err for one in ended), ended
    assert all("on a file system that they share" in one.err.splitlines()[-1] for one in ended), ended


def test_ctrl_c_before_training_ends_without_a_traceback(tmp_path, monkeypatch):
    def press(_):
        raise KeyboardInterrupt

    monkeypatch.setattr("cleanba.resolution.env_spec", press)
    ended = command("ppo", *ENDLESS, "--run-dir", tmp_path / "run")
    assert (ended.code, ended.err) == (130, "cleanba: interrupted\n")


def test_only_a_second_ctrl_c_ends_the_process_at_once(monkeypatch):
    clock, asked, given_up = [0.0], queue.Queue(), []
    monkeypatch.setattr("cleanba.runtime.supervision.time", SimpleNamespace(monotonic=lambda: clock[0]))
    with hear_signals(asked.put, given_up.append):
        for seconds, signum in (
            (0.0, signal.SIGINT),
            (0.1, signal.SIGINT),  # as when a process and its group are told
            (5.0, signal.SIGTERM),
            (5.1, signal.SIGUSR1),
        ):
            clock[0] = seconds
            signal.raise_signal(signum)
            assert asked.get(timeout=SOON) == signum and given_up == []
        clock[0] = 5.2
        signal.raise_signal(signal.SIGINT)
        assert given_up == [signal.SIGINT] and asked.empty()


# -------------------------------------------------------------------------------------------- as processes of their own

HANGS = """
import sys, time
from pathlib import Path
from cleanba import cli
from cleanba.environments.envpool import Envs

marker, step, count = Path(sys.argv[1]), Envs.step, 0

def hang(self, action):
    global count
    count += 1
    if count > 100:
        marker.touch()
        time.sleep(600)
    return step(self, action)

Envs.step = hang
cli.main(sys.argv[2:])
"""

PATIENT = "from cleanba.runtime import train\ntrain.GRACE_SECONDS = 600.0\n"  # its threads are waited for that long


@pytest.fixture(scope="module")
def processes(tmp_path_factory):
    """Runs as processes, started together as starting takes longest: name -> process, directory, file that it makes."""
    root = tmp_path_factory.mktemp("processes")
    started = {}
    for name, script in {"plain": None, "hangs 1": HANGS, "hangs 2": PATIENT + HANGS}.items():
        run_dir, marker = root / name, root / f"{name} marker"
        words = ["ppo", *ENDLESS, "--run-dir", run_dir]
        process = python("-m", "cleanba", *words) if script is None else python("-c", script, marker, *words)
        started[name] = process, run_dir, (run_dir / "metrics.jsonl" if script is None else marker)
    yield started
    for process, _, _ in started.values():
        process.kill()
        process.communicate()


def once_running(processes, name: str):
    """The process and its directory, once it trains or has come as far as its script allows."""
    process, run_dir, sign = processes[name]
    alive = lambda: sign.exists() and (sign.suffix != ".jsonl" or sign.stat().st_size > 0)
    wait_for(lambda: alive() or process.poll() is not None, 900)
    assert alive(), finish(process)
    return process, run_dir


def wait_for(condition, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds} s"
        time.sleep(0.02)


def test_a_signal_ends_the_process(processes):
    process, run_dir = once_running(processes, "plain")
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    ended = finish(process)
    assert ended.code == 130 and ended.err == "cleanba: interrupted by SIGINT\n"
    assert read_result(run_dir)["status"] == "interrupted"
    assert read_rows(run_dir), "lines of metrics.jsonl are whole"


def test_a_signal_ends_a_process_whose_environment_hangs(processes):
    process, run_dir = once_running(processes, "hangs 1")
    process.send_signal(signal.SIGTERM)
    ended = finish(process, 300)
    assert ended.code == 143 and ended.err == "cleanba: interrupted by SIGTERM\n"
    assert read_result(run_dir)["status"] == "interrupted"


def test_a_second_ctrl_c_ends_the_process_at_once(processes):
    process, run_dir = once_running(processes, "hangs 2")
    process.send_signal(signal.SIGINT)
    time.sleep(0.5)
    assert process.poll() is None, "the first one waits for threads"

    def pressed() -> bool:  # again and again: the first may have been heard a moment ago
        process.send_signal(signal.SIGINT)
        return process.poll() is not None

    wait_for(pressed, 300)
    ended = finish(process)
    assert ended.code == 130
    assert "Traceback" not in ended.err
    assert not (run_dir / "result.json").exists()
