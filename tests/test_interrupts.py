"""Ctrl-C while a command starts, and signals that arrive where Python ignores every error."""

import gc
import pickle
import signal
import time

import pytest
from launch import TINY, command, finish, python

from cleanba.errors import Failure, Interrupted
from cleanba.interrupts import after_this, leave_at_once, raise_interrupt, started
from cleanba.runtime import supervision
from cleanba.runtime.supervision import time_limit

pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # dropped errors

START = """
import gc, signal
signal.signal(signal.SIGINT, signal.default_int_handler)  # where tests run in the background, it is ignored
from cleanba import cli

def _xla_gc_callback(*_):  # as JAX's
    gc.callbacks.remove(_xla_gc_callback)
    signal.raise_signal(signal.SIGINT)

real = cli.import_module
def load(name):
    gc.callbacks.append(_xla_gc_callback)
    gc.collect()
    return real(name)

cli.import_module = load
cli.main()
"""


IMPORTING = """
import signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)

class Interrupts:
    calls = 0

    def find_spec(self, name, path=None, target=None):
        if name == "tensorstore._tensorstore":
            sys.meta_path.remove(self)
            sys.setprofile(self.count)

    def count(self, frame, event, argument):
        self.calls += event == "call"
        if self.calls == 64:  # of Python functions that C++ calls while the module is made
            sys.setprofile(None)
            signal.raise_signal(signal.SIGINT)

sys.meta_path.insert(0, Interrupts())
from cleanba.cli import main
main()
"""


@pytest.mark.parametrize("words", [("ppo", *TINY), ("eval", "runs/a")])
def test_ctrl_c_while_a_command_starts_ends_it(words):
    ended = finish(python("-c", START, *words))
    assert (ended.code, ended.out, ended.err) == (130, "", "cleanba: interrupted\n")


def within_garbage_collection(then) -> None:
    """Call `then` in a callback, as JAX has one, in which errors are dropped."""

    def callback(phase, info):
        then()
        gc.callbacks.remove(callback)

    gc.callbacks.append(callback)
    gc.collect()


def test_an_interrupt_that_would_be_lost_is_repeated_a_moment_later():
    gc.collect()  # so that no finaliser runs afterwards, in which errors are dropped, too
    before = signal.signal(signal.SIGINT, leave_at_once)
    try:
        started()
        assert signal.getsignal(signal.SIGINT) is raise_interrupt
        with pytest.raises(KeyboardInterrupt):
            within_garbage_collection(lambda: signal.raise_signal(signal.SIGINT))
            time.sleep(30)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, before)


class Slow:
    """Takes a second to be destroyed."""

    def __del__(self):
        time.sleep(1)


def test_ctrl_c_waits_for_the_end_of_an_import():
    done = []
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt), after_this():
            signal.raise_signal(signal.SIGINT)
            done.append(True)
        assert done and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)


def test_ctrl_c_while_orbax_is_imported_ends_the_command_in_a_sentence(tmp_path):
    """Its compiled modules would turn the interrupt into an ImportError with a stack trace."""
    run = tmp_path / "run"
    ended = finish(python("-c", IMPORTING, "ppo", *TINY, "--run-dir", run))
    assert ended.code == 130 and "Traceback" not in ended.err, ended.err
    assert "interrupted" in ended.err and not (run / "result.json").exists()


def test_the_time_limit_of_a_start_holds_where_python_drops_its_error(monkeypatch):
    monkeypatch.setattr(supervision, "AGAIN_SECONDS", 1.0)
    gc.collect()
    with pytest.raises(Failure, match=r"has not started after 0\.2 s"), time_limit(0.2):
        Slow()
        time.sleep(30)


def test_the_time_limit_of_a_start_holds_even_if_its_error_is_lost_once():
    gc.collect()  # else what is left by other tests may take longer than the limit
    with pytest.raises(Failure, match=r"has not started after 0\.2 s"), time_limit(0.2):
        within_garbage_collection(lambda: time.sleep(1))  # the limit ends in here
        time.sleep(30)


def test_the_time_limit_does_not_interrupt_the_cleanup_of_a_start_again(capsys):
    cleaned = []
    with pytest.raises(Failure, match="has not started"), time_limit(2.0):
        try:
            time.sleep(30)
        finally:
            time.sleep(1)
            cleaned.append(True)
    assert cleaned and capsys.readouterr().err.count("time.sleep(30)") == 1


def test_an_interruption_can_be_sent_between_processes():
    error = pickle.loads(pickle.dumps(Interrupted(signal.SIGTERM, ", in process 1")))
    assert (error.signum, str(error)) == (signal.SIGTERM, "interrupted by SIGTERM, in process 1")


def test_reading_checkpoints_has_the_time_limit_of_a_start(tmp_path, monkeypatch):
    def a_disk_that_hangs(*_):
        time.sleep(300)

    monkeypatch.setattr("cleanba.launch.START_SECONDS", 0.0)
    monkeypatch.setattr("cleanba.launch.newest_of_all", a_disk_that_hangs)
    start = time.monotonic()
    ended = command("ppo", *TINY, "--stall-timeout", "8", "--run-dir", tmp_path / "run")
    assert ended.code == 1 and time.monotonic() - start < 100
    assert "the run has not started after 8 s" in ended.err and "in a_disk_that_hangs" in ended.err, ended.err


def test_a_process_ends_although_the_disk_hangs_that_a_checkpoint_is_written_to():
    waits = (
        "import time; from cleanba.waited import in_background; in_background(lambda: time.sleep(300), 'checkpoint')"
    )
    assert finish(python("-c", waits), 100) == (0, "", "")
