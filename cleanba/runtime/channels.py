"""Queues with room for one item, whose waits all end when the run does."""

import threading
import time
from collections.abc import Callable
from typing import Any, Generic, TypeVar

T = TypeVar("T")
R = TypeVar("R")


class Closed(Exception):
    """The run is ending.  Raised in every thread that waits at a channel."""


class Stop:
    """The signal that the run ends, and the first error that caused it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._event = threading.Event()
        self._channels: list[Channel[Any]] = []
        self.error: BaseException | None = None

    def __call__(self, error: BaseException | None = None) -> None:
        """End the run: every wait at a channel raises `Closed`.

        Only the first error is kept.  After a call without one no error is kept, as the run has ended well by then.
        """
        with self._lock:
            if not self._event.is_set():
                self.error = error
            self._event.set()
            channels = list(self._channels)
        for channel in channels:
            channel.wake()

    def wake(self) -> None:
        """Have every thread that waits at a channel check its condition."""
        with self._lock:
            channels = list(self._channels)
        for channel in channels:
            channel.wake()

    def add(self, channel: "Channel[Any]") -> None:
        with self._lock:
            self._channels.append(channel)

    @property
    def is_set(self) -> bool:
        return self._event.is_set()

    def wait(self, seconds: float) -> bool:
        """Sleep until the signal is set, or for so long.  Returns whether it is set."""
        return self._event.wait(seconds)

    def check(self) -> None:
        """Raise `Closed` once the signal is set."""
        if self._event.is_set():
            raise Closed


class Channel(Generic[T]):
    """A queue with room for one item."""

    def __init__(self, name: str, stop: Stop):
        self.name = name
        self._stop = stop
        self._changed = threading.Condition()
        self._items: list[T] = []
        stop.add(self)

    def put(self, item: T) -> float:
        """Wait for room, then put the item.  Returns the seconds waited.

        Raises:
            Closed: the run is ending.
        """
        return self._exchange(lambda: not self._items, lambda: self._items.append(item))[1]

    def put_unless(self, item: T, given_up: Callable[[], bool]) -> bool:
        """Wait for room and put the item; False once `given_up()` is true, which is checked again at each `Stop.wake`.

        Raises:
            Closed: the run is ending.
        """

        def put_if_there_is_room() -> bool:
            room = not self._items
            if room:
                self._items.append(item)
            return room

        return self._exchange(lambda: not self._items or given_up(), put_if_there_is_room)[0]

    def get(self) -> tuple[T, float]:
        """Wait for an item, then take it.  Returns it and the seconds waited.

        Raises:
            Closed: the run is ending.
        """
        return self._exchange(lambda: bool(self._items), self._items.pop)

    def get_unless(self, given_up: Callable[[], bool]) -> T | None:
        """Wait for an item and take it; None once `given_up()` is true, which is checked again at each `Stop.wake`.

        Raises:
            Closed: the run is ending.
        """
        take = lambda: self._items.pop() if self._items else None
        return self._exchange(lambda: bool(self._items) or given_up(), take)[0]

    def _exchange(self, ready: Callable[[], bool], do: Callable[[], R]) -> tuple[R, float]:
        start = time.perf_counter()
        with self._changed:
            self._changed.wait_for(lambda: ready() or self._stop.is_set)
            self._stop.check()
            result = do()
            self._changed.notify_all()
        return result, time.perf_counter() - start

    def wake(self) -> None:
        """Have every thread that waits here check its condition and the stop signal."""
        with self._changed:
            self._changed.notify_all()

    def __len__(self) -> int:
        return len(self._items)
