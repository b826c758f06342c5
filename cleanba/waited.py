"""Waits for threads; time in which this process was suspended does not count.  Knows whether a thread is compiling."""

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import TypeVar

T = TypeVar("T")
MOST_SECONDS = 2.0


def in_a_thread(body: Callable[[], T], name: str, meanwhile: Callable[[], None] = lambda: None) -> T:
    """Call `body()` in a thread of its own, and return or raise what it does.

    meanwhile: called every 0.1 s until it ends.  If it raises an error, that is raised, and the thread is left behind.
    """
    returned: list[T] = []
    raised: list[BaseException] = []

    def run() -> None:
        try:
            returned.append(body())
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run, name=name, daemon=True)
    thread.start()
    while thread.is_alive():
        thread.join(0.1)
        if thread.is_alive():  # nothing may interrupt what has just ended
            meanwhile()
    if raised:
        raise raised[0]
    return returned[0]


def in_background(body: Callable[[], T], name: str) -> Future[T]:
    """Begin `body()` in a thread of its own, which does not keep the process from ending."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(body())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future


class Waited:
    """Counts seconds.  Call `look` often: at most `MOST_SECONDS` are counted between two calls.

    So neither a job that its cluster suspended (SIGSTOP, SIGCONT) nor a laptop that slept runs into a timeout when it
    continues.
    """

    def __init__(self) -> None:
        self._seconds, self._looked = 0.0, time.monotonic()

    def look(self) -> float:
        """The seconds so far."""
        now = time.monotonic()
        self._seconds += min(now - self._looked, MOST_SECONDS)
        self._looked = now
        return self._seconds


_compiling: set[int] = set()  # threads, by their identifiers


@contextmanager
def compiling() -> Iterator[None]:
    """Within the context this thread compiles, which may take any time."""
    thread = threading.get_ident()
    already = thread in _compiling
    _compiling.add(thread)
    try:
        yield
    finally:
        if not already:
            _compiling.discard(thread)


def is_compiling() -> bool:
    """Whether a thread of this process is within `compiling`."""
    return bool(_compiling)
