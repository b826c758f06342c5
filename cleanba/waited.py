"""Waiting time, without the time in which this process itself was suspended, and whether a thread compiles."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

MOST_SECONDS = 2.0


class Waited:
    """Counts seconds.  Call `look` often: of the time between two looks at most `MOST_SECONDS` count.

    So a job that its cluster suspended (SIGSTOP, SIGCONT) runs into no timeout when it goes on, nor does a laptop that
    slept.
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
    """This thread compiles, which may take any time."""
    _compiling.add(threading.get_ident())
    try:
        yield
    finally:
        _compiling.discard(threading.get_ident())


def is_compiling() -> bool:
    """Whether a thread of this process is within `compiling`."""
    return bool(_compiling)
