"""Episode returns and lengths, as they are added up from steps."""

import jax.numpy as jnp
import numpy as np
import pytest

from cleanba.rollout import Episode, EpisodeTracker, step_outcome


def play(tracker: EpisodeTracker, *steps: str) -> list[list[Episode]]:
    """One string per step: a reward digit per environment, then `!` if its game is over, or `x` if it only resets."""
    ended = []
    for step in steps:
        words = step.split()
        valid = np.array([w != "x" for w in words])
        reward = np.array([7.0 if w == "x" else float(w.rstrip("!")) for w in words], np.float32)  # 7 must not count
        ended.append(tracker.add(reward, valid, np.array([w.endswith("!") for w in words])))
    return ended


def test_an_episode_is_the_sum_of_its_rewards_and_the_number_of_its_steps():
    assert play(EpisodeTracker(1), "1", "0", "3!") == [[], [], [Episode(4.0, 3)]]


def test_the_next_episode_starts_from_nothing():
    assert play(EpisodeTracker(1), "5!", "x", "2", "2!") == [[Episode(5.0, 1)], [], [], [Episode(4.0, 2)]]


def test_ignored_steps_count_for_nothing():
    tracker = EpisodeTracker(2)
    assert play(tracker, "1 1!", "1 x", "1! 2", "x 2!")[-2:] == [[Episode(3.0, 3)], [Episode(4.0, 2)]]


def test_a_reset_cannot_end_an_episode_again():
    tracker = EpisodeTracker(1)
    tracker.add(np.float32([1]), np.array([True]), np.array([True]))
    assert tracker.add(np.float32([1]), np.array([False]), np.array([True])) == []


def test_environments_that_end_together_are_reported_in_their_order():
    assert play(EpisodeTracker(3), "1! 2 3!", "x 4! x") == [[Episode(1.0, 1), Episode(3.0, 1)], [Episode(6.0, 2)]]


def test_a_lost_life_does_not_end_the_game():
    # After a lost life the environment resets, ignoring an action, but the score goes on.
    assert play(EpisodeTracker(1), "1", "x", "2", "x", "3!") == [[], [], [], [], [Episode(6.0, 3)]]


def test_long_episodes_add_up_exactly():
    tracker, one = EpisodeTracker(1), np.ones(1, bool)
    for _ in range(1000):
        assert tracker.add(np.float32([2**24 + 2]), one, ~one) == []  # float32 could not add these up
    assert tracker.add(np.float32([1]), one, one) == [Episode(1000 * (2**24 + 2) + 1.0, 1001)]


@pytest.mark.parametrize("xp", [np, jnp])
def test_what_environments_report_while_they_reset_is_of_no_episode(xp):
    done = xp.array([False, False, False, True])
    answer = step_outcome(
        done, xp.float32([1, 2, 3, 4]), xp.array([False, True, False, True]), xp.array([False, False, True, True])
    )
    assert answer.valid.tolist() == [True, True, True, False]
    assert answer.reward.tolist() == [1, 2, 3, 0] and answer.reward.dtype == xp.float32
    assert answer.terminated.tolist() == [False, True, False, False]
    assert answer.truncated.tolist() == [False, False, True, False]
    assert answer.done.tolist() == [False, True, True, False], "the step after the reset counts again"
