"""What the main thread does while a run goes on: it hears signals, and notices that nothing moves."""

import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

from cleanba.errors import Failure, Interrupted
from cleanba.runtime.channels import Channel, Stop
from cleanba.runtime.progress import Progress

GRACE_SECONDS = 3.0  # for threads to notice that the run ends


@contextmanager
def handle_signals(handler: Callable[[int], None], signals: Iterable[signal.Signals]) -> Iterator[None]:
    """Call `handler` for these signals, as long as this lasts.  Only works in the main thread."""
    previous = {s: signal.signal(s, lambda signum, _: handler(signum)) for s in signals}
    try:
        yield
    finally:
        for s, earlier in previous.items():
            signal.signal(s, earlier)


def leave_process(signum: int) -> None:
    """End the process at once, as by that signal."""
    os._exit(128 + signum)


@contextmanager
def hear_signals(asked: Callable[[int], None], give_up: Callable[[int], None] = leave_process) -> Iterator[None]:
    """Ctrl-C, SIGTERM and SIGUSR1 call `asked`, in another thread; a second Ctrl-C calls `give_up` in this one.

    Only works in the main thread: in others nothing is heard.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    first_ctrl_c = float("inf")

    def hear(signum: int) -> None:
        nonlocal first_ctrl_c
        if signum == signal.SIGINT:
            # `timeout -s INT` and others signal a process and its group: that is one Ctrl-C.
            if time.monotonic() - first_ctrl_c > 0.2:
                return give_up(signum)
            first_ctrl_c = min(first_ctrl_c, time.monotonic())
        # Not here: a handler runs between any two instructions, perhaps inside a lock that stopping needs.
        threading.Thread(target=asked, args=(signum,), daemon=True).start()

    with handle_signals(hear, (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)):
        yield


def end_by_signal(
    signum: int,
    grace_period: float,
    can_save: bool,
    next_end: Callable[[int], int] | None,
    progress: Progress,
    stop: Stop,
    say: Callable[[str], None],
) -> None:
    """End the run after the update that is under way, with a checkpoint; at once where nothing can be saved.

    After the grace period it ends as it is.  Further signals change nothing: a cluster warns every process, and a
    process may hear it from another first.

    `next_end` is given where only the end of an epoch can be saved: from an update, the first such update after it.
    Then SIGUSR1, the warning of a cluster, waits for one that is near enough, and the others wait for none.
    """
    if progress.ending is not None:
        return
    error, words = Interrupted(signum), ""
    if can_save and grace_period > 0 and next_end is None:
        words = f"{error}: ending after this update, with a checkpoint"
    elif can_save and next_end is not None and signum == signal.SIGUSR1:
        end = next_end(progress.saved_update)  # which may be done, and its checkpoint on its way
        seconds = progress.seconds_until(end)
        if seconds < grace_period:
            words = f"{error}: ending after the checkpoint of update {end}, in about {seconds:.0f} s"
    if words:
        progress.ending = error
        say(words)
        stop.wake()
        stop.wait(grace_period)
    stop(error)


def stacks(channels: Sequence[Channel]) -> str:
    """Where every thread stands, and what the queues hold."""
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
    """Notices that something which is counted has not gone on for too long."""

    timeout: float
    counted: str = "update"
    mark: tuple[int, str] | None = None
    since: float = 0.0

    def check(self, count: int, phase: str, channels: Sequence[Channel] = ()) -> None:
        """Look, every now and then, how many there were and what is done now; compiling may take any time.

        Raises:
            Failure: the run stalls; the stacks are on the error output.
        """
        now, mark = time.perf_counter(), (count, phase)
        if mark != self.mark or phase.startswith("compiling"):
            self.mark, self.since = mark, now
        elif now - self.since > self.timeout:
            print(stacks(channels), file=sys.stderr)
            raise Failure(
                f"no {self.counted} for {now - self.since:.0f} s after {self.counted} {count} ({phase}); "
                "the stacks above show where each thread stands. "
                f"If nothing is wrong there, raise --stall-timeout above {self.timeout:g}"
            )


T = TypeVar("T")


def watched(body: Callable[[], T], watchdog: Watchdog, progress: Callable[[], tuple[int, str]]) -> T:
    """`body()`, in a thread of its own; `progress` is what the watchdog looks at meanwhile.

    Raises:
        Failure: nothing goes on any more.  The thread is left behind.
        BaseException: what `body` raised.
    """
    returned: list[T] = []
    raised: list[BaseException] = []

    def run() -> None:
        try:
            returned.append(body())
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run, name="end of the run", daemon=True)
    thread.start()
    while thread.is_alive():
        thread.join(0.1)
        watchdog.check(*progress())
    if raised:
        raise raised[0]
    return returned[0]
