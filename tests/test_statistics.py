"""What a run prints about its size and its remaining time."""

import itertools
import json
import math
from types import SimpleNamespace

import numpy as np
import pytest

from cleanba.config import Experiment, Placement
from cleanba.launch import size_in_words
from cleanba.rollout import Episode
from cleanba.runtime.devices import find_devices
from cleanba.runtime.metrics import Status
from cleanba.runtime.progress import Progress
from cleanba.runtime.schedule import Schedule
from cleanba.runtime.statistics import Statistics
from cleanba.runtime.training_log import TrainingLog


def test_the_start_says_exactly_what_will_be_done():
    e = Experiment(num_envs=64, num_steps=32, total_timesteps=100_000)
    assert size_in_words(e) == (
        "48 updates of 2,048 steps, 98,304 steps in all (100,000 asked for, but updates are whole); steps that "
        "only reset an environment do not count in global_step"
    )
    exactly = size_in_words(Experiment(num_envs=1, num_steps=5, total_timesteps=5))
    assert exactly.startswith("1 update of 5 steps, 5 steps in all; steps")


def remaining(first_to_learn: int, first: int = 1) -> dict[int, float]:
    """The remaining time that a run of 100 updates shows after each of its first log points."""
    progress, found = Progress(Status("test", 100)), {}
    log = lambda update, global_step, seconds, values: None
    log = TrainingLog(Schedule(first, 100, True, 0), 10, find_devices(Placement()), progress, log, first_to_learn)
    for update in range(first, 41):
        progress.update = progress.status.update = update
        if log.is_log_point(update):
            log.write(update, {}, {})
            found[update] = progress.status.eta
    return found


def test_steps_from_before_a_resume_do_not_count_for_the_speed_after_it():
    progress, rows = Progress(Status("test", 100)), []
    # Since the last log point, from the checkpoint.
    progress.statistics.new_steps = progress.global_step = 1_000_000
    write = lambda update, global_step, seconds, values: rows.append(values)
    log = TrainingLog(Schedule(1, 100, True, 0), 10, find_devices(Placement()), progress, write)
    log.note_update(1)
    log.write(10, {}, {})
    assert rows[0]["charts/SPS_recent"] == rows[0]["charts/SPS"] == 0.0


def test_steps_between_log_points_are_those_of_all_processes_however_many_took_the_checkpoint():
    counters = {"global_step": 19_000, "episodes": 0, "recent": [], "seconds": 1.0, "news": [[9_000, 0, []]]}
    progress = Progress(Status("test", 100), Statistics.from_counters(counters, 0, 4))
    progress.global_step = counters["global_step"]
    devices = find_devices(Placement())._replace(num_processes=4)
    log = TrainingLog(Schedule(20, 100, True, 0), 10, devices, progress, lambda *row: None)
    assert log.steps_so_far == 19_000
    progress.statistics.new_steps += 250  # of each of the four
    log.note_update(20)
    assert log.steps_so_far == 20_000


def test_no_remaining_time_is_shown_before_an_interval_of_learning():
    known = lambda found: [update for update, eta in found.items() if not math.isnan(eta)]
    assert known(remaining(0)) == [10, 20, 30, 40]
    assert known(remaining(21)) == [30, 40], "the interval from 21 to 30 is the first in which all updates learn"
    assert known(remaining(22)) == [40]
    assert known(remaining(22, first=25)) == [30, 40], "a run that goes on has learnt from the start"
    assert all(0 < eta < 60 for eta in list(remaining(0).values())[1:])


# -------------------------------------------------------------------------------------------------- the last episodes


def rollouts(update: int, actors: range):
    """Eight episodes of each actor, whose returns tell update, actor and place."""
    returns = lambda actor: [1000.0 * update + 100 * actor + i for i in range(8)]
    return [
        SimpleNamespace(number=update, steps=64, episodes=[Episode(x, 8) for x in returns(actor)], times=None)
        for actor in actors
    ]


@pytest.fixture
def together(monkeypatch):
    """together(statistics, gather): what each process's `gather` returns; the processes take turns in this one."""

    def gather(processes, name):
        rows = []
        with monkeypatch.context() as patch:
            patch.setattr("cleanba.runtime.statistics.gather_over_processes", lambda row: rows.append(row) or [row])
            for process in processes:
                process.gather_counts()
            patch.setattr("cleanba.runtime.statistics.gather_over_processes", lambda row: np.array(rows))
            return [getattr(process, name)(*[1.0] * (name == "counters")) for process in processes]

    return gather


@pytest.mark.parametrize("updates", [3, 10])
def test_the_last_hundred_episodes_are_the_same_in_any_number_of_processes(together, updates):
    alone, first, second = Statistics(), Statistics(), Statistics()
    for update in range(1, updates + 1):
        alone.add(rollouts(update, range(2)))
        first.add(rollouts(update, range(1)))
        second.add(rollouts(update, range(1, 2)))
    (saved,), both = together([alone], "counters"), together([first, second], "counters")
    assert both[0] == both[1] and {**both[0], "news": 0} == {**saved, "news": 0}
    # A checkpoint between two log points is gone on from by one process, by two and by three.
    once_more = lambda statistics, actors: statistics.add(rollouts(updates + 1, actors)) or statistics
    once_more(alone, range(2))
    together([alone], "gather")
    assert len(alone.recent) == min(100, 16 * (updates + 1)) and alone.recent[-1].ret == 1000 * (updates + 1) + 107
    for counters, count in itertools.product((saved, both[0]), (1, 2, 3)):
        parts = [Statistics.from_counters(counters, process, count) for process in range(count)]
        for process, part in enumerate(parts):
            once_more(part, range(2) if count == 1 else range(process, process + 1) if process < 2 else range(0))
        together(parts, "gather")
        assert all(part.recent == alone.recent for part in parts), count
        assert {part.episodes for part in parts} == {alone.episodes}


def test_counts_of_an_older_version_go_on():
    news = [[64, 2, [[1.0, 8], [2.0, 9]]]]  # without updates
    counters = {"global_step": 640, "episodes": 20, "recent": [[0.5, 7]], "news": news}
    statistics = Statistics.from_counters(counters, 0, 1)
    statistics.gather()
    assert list(statistics.recent) == [Episode(0.5, 7), Episode(1.0, 8), Episode(2.0, 9)]
    assert (statistics.global_step, statistics.episodes) == (640, 20)


def test_numbers_of_infos_travel_between_processes_and_through_a_checkpoint(together):
    nan = math.nan
    names = ("is_success", "distance")
    parts = [Statistics(names), Statistics(names)]
    for process, told in enumerate([[(1.0, nan), (0.0, 3.0)], [(1.0, 5.0), (nan, nan)]]):
        episodes = [Episode(float(process), 8, infos=numbers) for numbers in told]
        parts[process].add([SimpleNamespace(number=1, steps=16, episodes=episodes, times=None)])
    saved = json.loads(json.dumps(together(parts, "counters")[0], allow_nan=False))
    together(parts, "gather")
    means = {"is_success": pytest.approx(2 / 3), "distance": 4.0}
    assert [part.mean_infos for part in parts] == [means, means]
    for infos, expected in ((names, means), (("distance",), {}), (names[::-1], {}), ((), {})):
        again = Statistics.from_counters(saved, 0, 1, infos)
        again.gather()
        assert again.mean_infos == expected and len(again.recent) == 4
