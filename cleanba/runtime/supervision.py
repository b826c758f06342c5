"""What the main thread does during a run: it handles signals, and notices when the run stalls."""

import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from cleanba.errors import Failure, Interrupted
from cleanba.interrupts import leave_closed_terminal, would_be_lost
from cleanba.runtime.channels import Channel, Stop
from cleanba.runtime.progress import Progress
from cleanba.waited import Waited, is_compiling

GRACE_SECONDS = 3.0  # for threads to notice that the run ends
AGAIN_SECONDS = 30.0  # between errors of a start that takes too long, the earlier of which were dropped


@contextmanager
def handle_signals(handler: Callable[[int], None], signals: Iterable[signal.Signals]) -> Iterator[None]:
    """Call `handler` for these signals within the context.  Only works in the main thread."""
    previous = {s: signal.signal(s, lambda signum, _: handler(signum)) for s in signals}
    try:
        yield
    finally:
        for s, earlier in previous.items():
            if earlier is not None:  # as for a handler that C code installed
                signal.signal(s, earlier)


def leave_process(signum: int) -> None:
    """End the process at once, with the exit code of this signal."""
    if sys.stdout.isatty():
        os.write(1, b"\x1b[?25h")  # the display that shows progress hides the cursor
    os._exit(128 + signum)


def ending_signals() -> list[signal.Signals]:
    """The signals that ask a run to end.  A closing terminal sends SIGHUP, which `nohup` has programs ignore."""
    ending = [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1]
    return ending if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN else [*ending, signal.SIGHUP]


@contextmanager
def hear_signals(asked: Callable[[int], None], give_up: Callable[[int], None] = leave_process) -> Iterator[None]:
    """Signals that end a run call `asked` in another thread; a second Ctrl-C calls `give_up` in this one.

    In threads other than the main one, signals are not handled.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    first_ctrl_c = float("inf")

    def hear(signum: int) -> None:
        nonlocal first_ctrl_c
        if signum == signal.SIGHUP:
            leave_closed_terminal()
        if signum == signal.SIGINT:
            # `timeout -s INT` and others signal both a process and its group: that counts as one Ctrl-C.
            if time.monotonic() - first_ctrl_c > 0.2:
                return give_up(signum)
            first_ctrl_c = min(first_ctrl_c, time.monotonic())
        # In another thread, as a handler may interrupt code that holds a lock which stopping needs.
        threading.Thread(target=asked, args=(signum,), daemon=True).start()

    with handle_signals(hear, ending_signals()):
        yield


def end_by_signal(
    signum: int,
    grace_period: float,
    can_save: bool,
    next_end: Callable[[int], int] | None,
    alone: bool,
    progress: Progress[Any],
    stop: Stop,
    say: Callable[[str], None],
) -> None:
    """End the run after the current update, with a checkpoint; at once if no checkpoint can be taken.

    After the grace period the run ends without one.  Further signals are ignored: a cluster signals every process, and
    a process may first learn of the signal from another process.

    next_end: given where checkpoints are possible only at ends of epochs: update -> the next update that ends one.
        SIGUSR1, a cluster's warning, then waits for such an update within the grace period; other signals do not.
    alone: whether the run has one process.  Several do not save an update that is over: others may be in the next one.
    """
    if progress.interrupt is not None or progress.failure is not None:  # an earlier error is what is reported
        return
    error, words = Interrupted(signum), ""
    if can_save and grace_period > 0 and next_end is None:
        words = f"{error}: ending after this update, with a checkpoint"
    elif can_save and next_end is not None and signum == signal.SIGUSR1:
        # If the last update ended an epoch, its checkpoint can still be taken, until the next update begins.
        can_be_saved = alone and progress.state is not None
        end = next_end(max(progress.saved_update, progress.update - can_be_saved))
        seconds = progress.seconds_until(end)
        if seconds < grace_period:
            words = f"{error}: ending after the checkpoint of update {end}, in about {seconds:.0f} s"
    if words:
        progress.interrupt = error
        say(words)
        stop.wake()
        stop.wait(grace_period)
    stop(error)


def end_by_failure(
    error: BaseException,
    grace_period: float,
    can_save: bool,
    params: Channel[Any],
    progress: Progress[Any],
    stop: Stop,
    say: Callable[[str], None],
) -> None:
    """Let the learner end the run after the current update, with a checkpoint, as the calling actor has failed.

    Returns once the run or the learner has ended, after the grace period at the latest; at once if no checkpoint can be
    taken.

    params: the actor's channel for parameters; it is still emptied, so that the learner does not block.
    """
    if not can_save or grace_period <= 0:
        return
    if progress.failure is None:
        progress.failure = error
        say(f"an actor failed ({type(error).__name__}: {error}): ending after this update, with a checkpoint")
        stop.wake()
    deadline = time.perf_counter() + grace_period
    while not (stop.wait(0.05) or progress.learner_ended) and time.perf_counter() < deadline:
        params.get_unless(lambda: True)


def stacks(channels: Sequence[Channel[Any]]) -> str:
    """The stack of every thread, and what the queues hold, as text."""
    frames = sys._current_frames()
    parts = []
    for thread in threading.enumerate():
        if thread.ident in frames and not thread.name.startswith(("ThreadPool", "Thread-")):
            lines = traceback.format_stack(frames[thread.ident])[-6:]
            parts.append(f"thread {thread.name!r}:\n{''.join(lines)}")
    parts += [f"queue {channel.name!r}: {len(channel)} of 1" for channel in channels]
    return "\n".join(parts)


@dataclass
class Watchdog:
    """Notices that a count has not changed for too long."""

    timeout: float
    counted: str = "update"
    mark: tuple[int, str] | None = None
    waited: Waited = field(default_factory=Waited)

    def check(self, count: int, phase: str, channels: Sequence[Channel[Any]] = ()) -> None:
        """Call this every now and then with the count and the phase of the run.  Time spent compiling does not count.

        Raises:
            Failure: the run stalls.  The threads' stacks have been printed to stderr.
        """
        mark = (count, phase)
        if mark != self.mark or phase.startswith("compiling") or is_compiling():
            self.mark, self.waited = mark, Waited()
        elif (seconds := self.waited.look()) > self.timeout:
            print(stacks(channels), file=sys.stderr)
            raise Failure(
                f"no {self.counted} for {seconds:.0f} s after {self.counted} {count} ({phase}); "
                "the stacks above show what each thread was doing. "
                f"If nothing is wrong there, raise --stall-timeout above {self.timeout:g}"
            )


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise `Failure` in the main thread if it takes longer than this, after its stack has been printed to stderr.

    Code that never returns to Python cannot be ended like this.  In threads other than the main one, there is no limit.
    Python drops an error that is raised in a destructor, so it is raised again every `AGAIN_SECONDS`; what closes
    because of the first error must not take longer.
    """
    main = threading.current_thread()
    if main is not threading.main_thread():
        yield
        return
    over, too_late, other = threading.Event(), threading.Event(), signal.getsignal(signal.SIGALRM)
    raised = threading.Event()  # less than `AGAIN_SECONDS` ago: what closes because of the error is not interrupted

    def hear(signum: int) -> None:
        if too_late.is_set():
            if not raised.is_set() and not would_be_lost(sys._getframe()):
                raised.set()
                print(stacks([]), file=sys.stderr)
                raise _TooLate
            return
        if callable(other):  # another handler's alarm
            other(signum, None)

    def watch() -> None:
        waited = Waited()
        while not over.wait(0.1):
            if waited.look() > seconds:
                too_late.set()
                signal.pthread_kill(main.ident or 0, signal.SIGALRM)
            if raised.is_set() and not over.wait(AGAIN_SECONDS):
                raised.clear()

    watcher = threading.Thread(target=watch, daemon=True)
    try:
        with handle_signals(hear, [signal.SIGALRM]):
            watcher.start()
            try:
                yield
            finally:
                over.set()
                watcher.join()
    except _TooLate:
        raise Failure(
            f"the run has not started after {seconds:g} s; the stack above shows what it was doing. "
            "If nothing is wrong there, raise --stall-timeout"
        ) from None


class _TooLate(BaseException):
    """Raised in the main thread; no code that handles an `Exception` takes it for an error of its own."""
