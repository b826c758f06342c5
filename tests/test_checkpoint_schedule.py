"""After which updates checkpoints are taken: whichever process gets a signal, all processes reach the same answer."""

import random
import signal
import threading
from types import SimpleNamespace

import numpy as np
import pytest

from cleanba.config import Retention
from cleanba.errors import Interrupted
from cleanba.runtime import checkpoint_schedule
from cleanba.runtime.checkpoint_schedule import CheckpointSchedule
from cleanba.runtime.metrics import Status
from cleanba.runtime.progress import Progress
from cleanba.runtime.schedule import Schedule


def make(schedule, frequency, whole_epochs=False, processes=1, every=0):
    devices = SimpleNamespace(num_processes=processes)
    return CheckpointSchedule(schedule, frequency, whole_epochs, devices, Progress(Status("", 1)), every)


def saved(frequency, env_epoch, whole_epochs=False, last=40, every=0):
    made = make(Schedule(1, last, True, env_epoch), frequency, whole_epochs, every=every)
    return [update for update in range(1, last + 1) if made.decide(update).save]


def test_by_number_of_updates():
    assert saved(7, 14) == [7, 14, 21, 28, 35, 40]
    assert saved(0, 14) == [40]


def test_every_k_takes_one_at_each_multiple_and_keeps_these_and_the_two_newest():
    assert saved(0, 14, every=10) == [10, 20, 30, 40]
    assert saved(7, 14, every=10) == [7, 10, 14, 20, 21, 28, 30, 35, 40]
    assert saved(0, 7, whole_epochs=True, every=10) == [14, 21, 35, 40]  # the first that is not before its time
    assert Retention.parse("every:10").kept(range(1, 26)) == [10, 20, 24, 25]


def test_where_checkpoints_need_the_end_of_an_epoch_the_first_end_after_the_due_time_is_taken():
    assert saved(7, 5, whole_epochs=True) == [10, 15, 25, 30, 35, 40]
    assert saved(1, 14, whole_epochs=True) == saved(None, 14, whole_epochs=True) == [14, 28, 40]
    assert saved(7, 0, whole_epochs=True) == saved(0, 5, whole_epochs=True) == [40]


def test_processes_meet_soon_after_updates_have_become_slow(monkeypatch):
    """As when DQN's gradient steps begin: before them a meeting every two seconds is one in hundreds of updates."""
    now, met = 0.0, []
    monkeypatch.setattr(checkpoint_schedule.time, "perf_counter", lambda: now)
    monkeypatch.setattr(checkpoint_schedule, "gather_over_processes", lambda row: (met.append(now), np.stack([row]))[1])
    devices = SimpleNamespace(num_processes=2)
    made = CheckpointSchedule(
        Schedule(1, 600, True, 0), None, False, devices, Progress(Status("", 1)), first_to_learn=400
    )
    for update in range(1, 501):
        now += 0.01 if update < 400 else 1.0
        made.decide(update)
    assert max(np.diff([0.0, *met, now])) < 3.5 and len(met) < 80


@pytest.mark.parametrize("seed", range(5))
def test_processes_agree_on_checkpoints_and_on_the_end(seed, monkeypatch):
    """One of three receives a signal, between any two of its updates; clocks differ, and checkpoints are due often."""
    count, rows, met = 3, [None] * 3, threading.Barrier(3)
    me = threading.local()

    def gather(row):
        rows[me.number] = row
        met.wait(20)
        everybodys = np.stack(rows)
        met.wait(20)
        return everybodys

    monkeypatch.setattr(checkpoint_schedule, "gather_over_processes", gather)
    monkeypatch.setattr(checkpoint_schedule, "MEET_SECONDS", 1e-4)
    decisions: list[list] = [[] for _ in range(count)]
    chance = random.Random(seed)
    warned, at = chance.randrange(count), chance.randrange(1, 30)

    def run(number):
        me.number = number
        made = make(Schedule(1, 10_000, True, 0), None, processes=count)
        made._next = 0.0
        for update in range(1, 10_001):
            if number == warned and update == at:
                made._progress.interrupt = Interrupted(signal.SIGTERM)
            decision = made.decide(update)
            decisions[number].append((decision.save, decision.ending and decision.ending.signum))
            if decision.save:
                made._next = 0.0 if number == 0 else float("inf")
            if decision.ending:
                return

    threads = [threading.Thread(target=run, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert decisions[0] == decisions[1] == decisions[2]
    assert decisions[0][-1] == (True, signal.SIGTERM) and at <= len(decisions[0]) < 3000
