"""Queues with room for one item: in order, one at a time, and no wait that outlasts the run."""

import threading
import time

import pytest
from launch import CROWD

from cleanba.runtime.channels import Channel, Closed, Stop

SOON = 5.0 * CROWD  # seconds; what must happen does so in milliseconds, unless the machine is busy
LONG_ENOUGH = 0.05  # seconds, for a thread to reach its wait


class Waiter:
    """A call in a thread of its own, and how it ended."""

    def __init__(self, call):
        self.result = self.error = None
        self._call = call
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self):
        try:
            self.result = self._call()
        except BaseException as error:
            self.error = error

    @property
    def waits(self) -> bool:
        self._thread.join(LONG_ENOUGH)
        return self._thread.is_alive()

    def join(self):
        self._thread.join(SOON)
        assert not self._thread.is_alive(), "still waiting"
        return self


@pytest.fixture
def stop():
    stop = Stop()
    yield stop
    stop()  # whatever a failed test left waiting


def test_items_arrive_once_and_in_order(stop):
    channel, received = Channel("numbers", stop), []
    consumer = Waiter(lambda: received.extend(channel.get()[0] for _ in range(300)))
    for i in range(300):
        channel.put(i)
    consumer.join()
    assert received == list(range(300)) and len(channel) == 0


def test_none_and_false_are_ordinary_items(stop):
    channel = Channel("anything", stop)
    for item in (None, False, [], 0):
        channel.put(item)
        assert len(channel) == 1
        assert channel.get()[0] is item


def test_several_producers_and_consumers_neither_lose_nor_duplicate_items(stop):
    channel, received = Channel("shared", stop), [[], [], []]
    producers = [Waiter(lambda i=i: [channel.put((i, n)) for n in range(60)]) for i in range(3)]
    consumers = [Waiter(lambda out=out: out.extend(channel.get()[0] for _ in range(60))) for out in received]
    for waiter in producers + consumers:
        assert waiter.join().error is None
    assert sorted(item for out in received for item in out) == [(i, n) for i in range(3) for n in range(60)]
    for out in received:
        for producer in range(3):
            numbers = [n for i, n in out if i == producer]
            assert numbers == sorted(numbers)


def test_there_is_room_for_one(stop):
    channel = Channel("small", stop)
    channel.put("first")
    second = Waiter(lambda: channel.put("second"))
    assert second.waits and len(channel) == 1
    assert channel.get()[0] == "first"
    second.join()
    assert channel.get()[0] == "second"


def test_get_waits_for_an_item(stop):
    channel = Channel("empty", stop)
    getter = Waiter(channel.get)
    assert getter.waits
    channel.put("item")
    assert getter.join().result[0] == "item"


def test_what_waits_for_room_can_be_given_up(stop):
    channel, over = Channel("full", stop), threading.Event()
    assert channel.put_unless("first", lambda: True)  # there is room
    putter = Waiter(lambda: channel.put_unless("second", over.is_set))
    assert putter.waits
    stop.wake()
    assert putter.waits
    over.set()
    stop.wake()
    assert putter.join().result is False and channel.get()[0] == "first"
    over.clear()
    channel.put("third")
    putter = Waiter(lambda: channel.put_unless("fourth", over.is_set))
    assert putter.waits and channel.get()[0] == "third"
    assert putter.join().result is True and channel.get()[0] == "fourth"


def test_waiting_is_measured(stop):
    channel, started = Channel("timed", stop), threading.Event()
    assert 0 <= channel.put("item") < SOON
    putter = Waiter(lambda: (started.set(), time.perf_counter(), channel.put("more")))
    started.wait(SOON)
    time.sleep(0.5)
    taken = time.perf_counter()
    item, waited = channel.get()
    assert item == "item" and 0 <= waited < SOON
    _, put, waited = putter.join().result
    assert taken - put - 0.25 < waited < SOON


@pytest.mark.parametrize("blocked", ["put", "get"])
def test_stopping_wakes_whoever_waits(stop, blocked):
    channel = Channel("closing", stop)
    if blocked == "put":
        channel.put("in the way")
    waiters = [Waiter((lambda: channel.put("more")) if blocked == "put" else channel.get) for _ in range(3)]
    assert all(w.waits for w in waiters)
    stop()
    assert [type(w.join().error) for w in waiters] == [Closed] * 3


@pytest.mark.parametrize("full", [False, True])
def test_nothing_passes_once_stopped(stop, full):
    channel = Channel("closed", stop)
    if full:
        channel.put("left over")
    stop()
    for call in (channel.get, lambda: channel.put("late")):
        assert isinstance(Waiter(call).join().error, Closed)
    assert len(channel) == full


def test_a_channel_made_after_the_stop_is_closed_from_the_start(stop):
    stop()
    late = Channel("late", stop)
    assert isinstance(Waiter(late.get).join().error, Closed)


def test_stopping_closes_every_channel_of_the_run_and_of_no_other(stop):
    mine, other_run = [Channel(str(i), stop) for i in range(3)], Stop()
    other = Channel("other", other_run)
    waiters, stranger = [Waiter(c.get) for c in mine], Waiter(other.get)
    stop()
    assert all(isinstance(w.join().error, Closed) for w in waiters)
    assert stranger.waits
    other.put("still open")
    assert stranger.join().result[0] == "still open"


def test_the_first_error_is_kept(stop):
    first, second = ValueError("first"), KeyError("second")
    assert stop.error is None and not stop.is_set
    stop(first)
    stop(second)
    stop()
    assert stop.error is first and stop.is_set


def test_an_error_after_a_stop_without_one_is_not_the_runs(stop):
    stop()
    stop(ValueError("late"))
    assert stop.error is None and stop.is_set


def test_of_many_threads_that_fail_at_once_one_error_is_kept(stop):
    errors, start = [ValueError(i) for i in range(8)], threading.Barrier(8)
    waiters = [Waiter(lambda e=e: (start.wait(SOON), stop(e))) for e in errors]
    kept = {id(w.join() and stop.error) for w in waiters}
    assert len(kept) == 1 and stop.error in errors


def test_stopping_from_inside_a_waiting_thread_does_not_lock_up(stop):
    channel = Channel("own", stop)
    others = [Waiter(channel.get) for _ in range(2)]

    def fail():
        channel.put("item")
        stop(RuntimeError("mine"))

    Waiter(fail).join()
    for waiter in others:
        waiter.join()
    assert str(stop.error) == "mine"


def test_check_raises_only_after_the_stop(stop):
    stop.check()
    stop()
    with pytest.raises(Closed):
        stop.check()


def test_sleeping_ends_with_the_run(stop):
    assert stop.wait(0.001) is False
    sleeper = Waiter(lambda: stop.wait(60))
    assert sleeper.waits
    start = time.perf_counter()
    stop()
    assert sleeper.join().result is True and time.perf_counter() - start < SOON
