"""Bring environments back to where they were: fresh ones play the recorded actions, and the outcome is compared."""

import threading
import time
from collections.abc import Callable, Iterator

import numpy as np

from cleanba.environments.backends import Envs
from cleanba.errors import Failure
from cleanba.rollout import PyTree
from cleanba.runtime.channels import Stop
from cleanba.runtime.metrics import Status
from cleanba.runtime.records import RecordedRollout, SavedActor, action_dtype, digests_of, extend_outcomes_digest
from cleanba.specs import ActionSpec

STEPS_READ = 256  # steps read from disk at once, in whole rollouts
STEPS_AT_ONCE = 32  # steps played between two checks whether the run ends
MOST_NAMED = 8  # environments in one sentence


class Playback:
    """How many of the recorded steps this process's actors have played, for the console."""

    def __init__(self, steps: int, status: Status, say: Callable[[str], None]):
        """`steps` is the number of environment steps that all of them will play."""
        self._steps, self._status, self._say = steps, status, say
        self._lock = threading.Lock()
        self._done = 0
        self._began = time.perf_counter()

    def add(self, steps: int) -> None:
        """Another `steps` environment steps were played."""
        with self._lock:
            self._done += steps
            seconds = time.perf_counter() - self._began
            if self._done == self._steps:
                rate = self._done / max(seconds, 1e-9)
                self._say(f"played {self._done:,} recorded steps in {seconds:.1f} s, {rate:,.0f} steps/s")
            if not self._status.phase.startswith("compiling"):
                self._status.phase = (
                    f"playing recorded actions: {self._done:,} of {self._steps:,} steps"
                    if self._done < self._steps
                    else "collecting the first rollout"
                )


def read_actions(
    saved_actor: SavedActor, recorded_action: ActionSpec, num_envs: int, most: int
) -> Iterator[np.ndarray]:
    """The recorded actions, as the policy drew them, at most `most` steps at once.  Yields [N, B] or [N, B, D].

    Raises:
        ValueError: there are fewer or more than the checkpoint says.
    """
    shape = (num_envs, *recorded_action.drawn_shape)
    dtype = action_dtype(recorded_action)
    size = dtype.itemsize * int(np.prod(shape))
    steps, left = saved_actor.steps, b""
    for path, length in saved_actor.actions:
        with open(path, "rb") as file:
            while data := file.read(min(length, most * size - len(left))):
                length -= len(data)
                left += data
                if len(left) == most * size:
                    steps -= most
                    yield np.frombuffer(left, dtype).reshape(-1, *shape)
                    left = b""
    if len(left) != steps * size:
        raise ValueError(f"{saved_actor.steps} steps of {num_envs} environments are not what was recorded")
    if left:
        yield np.frombuffer(left, dtype).reshape(-1, *shape)


def play_back(
    envs: Envs,
    saved_actor: SavedActor,
    recorded_action: ActionSpec,
    num_steps: int,
    who: str,
    stop: Stop,
    played: Callable[[int], None],
) -> PyTree:
    """Play the recorded actions in fresh environments -> their last observations, [B, ...].

    num_steps: the length of a rollout.
    who: the environments, as messages name them.
    played: called with the number of steps, each time that some were played.

    Raises:
        Failure: rewards, ends of episodes or the last observations differ from those recorded.
    """
    obs = envs.reset()
    outcomes_digest, done = "", np.zeros(envs.num_envs, bool)
    for actions in read_actions(
        saved_actor, recorded_action, envs.num_envs, num_steps * max(1, STEPS_READ // num_steps)
    ):
        raw_reward, ended = np.empty(actions.shape[:2], np.float32), np.empty(actions.shape[:2], bool)
        for start in range(0, len(actions), STEPS_AT_ONCE):
            stop.check()
            part = slice(start, start + STEPS_AT_ONCE)
            obs, raw_reward[part], ended[part] = envs.play(actions[part].astype(recorded_action.drawn_dtype))
            played(ended[part].size)
        for now in ended:  # as in `rollout.step_outcome`: a step whose action was ignored ends no episode
            done = np.greater(now, done, out=now)
        done = done.copy()
        for t in range(0, len(actions), num_steps):
            outcomes_digest = extend_outcomes_digest(
                outcomes_digest, RecordedRollout(None, raw_reward[t : t + num_steps], ended[t : t + num_steps])
            )
    others = [i for i, (a, b) in enumerate(zip(digests_of(obs), saved_actor.obs_digests, strict=True)) if a != b]
    if others or outcomes_digest != saved_actor.outcomes_digest:
        named = ", ".join(map(str, others[:MOST_NAMED])) + (" and others" if len(others) > MOST_NAMED else "")
        what = (
            f"last observations differ (of {envs.num_envs} environments: {named})"
            if others
            else "rewards or episode ends differ"
        )
        raise Failure(
            f"{who} did not repeat themselves: after the same {saved_actor.steps} actions in each, {what}. Resuming "
            "would train on other data, so nothing was trained; use the versions of the emulators and their files that "
            "the run began with (the newest `made_by` in metrics.jsonl lists the packages), or start over in another "
            "--run-dir"
        )
    return obs
