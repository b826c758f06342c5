"""What a run says of its size and of its remaining time."""

import math

from cleanba.config import Experiment, Placement
from cleanba.launch import size_in_words
from cleanba.runtime.devices import find_devices
from cleanba.runtime.metrics import Status
from cleanba.runtime.progress import Progress
from cleanba.runtime.schedule import Schedule
from cleanba.runtime.training_log import TrainingLog


def test_the_start_says_exactly_what_will_be_done():
    e = Experiment(num_envs=64, num_steps=32, total_timesteps=100_000)
    assert size_in_words(e) == (
        "48 updates of 2,048 steps, 98,304 steps in all of the 100,000 asked for, as updates are whole; those that "
        "only reset an environment do not count as executed steps (global_step)"
    )
    exactly = size_in_words(Experiment(num_envs=1, num_steps=5, total_timesteps=5))
    assert exactly.startswith("1 update of 5 steps, 5 steps in all; those")


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


def test_no_remaining_time_is_shown_before_an_interval_of_learning():
    known = lambda found: [update for update, eta in found.items() if not math.isnan(eta)]
    assert known(remaining(0)) == [10, 20, 30, 40]
    assert known(remaining(21)) == [30, 40], "the interval from 21 to 30 is the first in which all updates learn"
    assert known(remaining(22)) == [40]
    assert known(remaining(22, first=25)) == [30, 40], "a run that goes on has learnt from the start"
    assert all(0 < eta < 60 for eta in list(remaining(0).values())[1:])
