"""Environments brought back to where they stood: made afresh, told the recorded actions, and looked at."""

import threading
import time
from collections.abc import Callable, Iterator

import numpy as np

from cleanba.environments.kinds import Envs
from cleanba.errors import Failure
from cleanba.rollout import PyTree
from cleanba.runtime.channels import Stop
from cleanba.runtime.metrics import Status
from cleanba.runtime.records import Standing, Told, action_dtype, chain, digests_of
from cleanba.specs import ActionSpec

STEPS_READ = 256  # at once, in whole rollouts
STEPS_AT_ONCE = 32  # at most, played between two looks at whether the run ends
MOST_NAMED = 8  # environments in one sentence


class Playback:
    """How far this process's actors are with playing."""

    def __init__(self, steps: int, status: Status, say: Callable[[str], None]):
        """`steps` is the number of environment steps of all of them."""
        self._steps, self._status, self._say = steps, status, say
        self._lock = threading.Lock()
        self._done = 0
        self._began = time.perf_counter()

    def add(self, steps: int) -> None:
        """So many steps more have been played."""
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


def recorded(standing: Standing, takes: ActionSpec, num_envs: int, most: int) -> Iterator[np.ndarray]:
    """The actions that led there, as a policy drew them: at most so many steps at once, [N, B] or [N, B, D].

    Raises:
        ValueError: there are fewer than there should be, or more.
    """
    shape = (num_envs,) if takes.kind == "choice" else (num_envs, takes.size)
    dtype = action_dtype(takes)
    size = dtype.itemsize * int(np.prod(shape))
    steps, left = standing.steps, b""
    for path, length in standing.actions:
        with open(path, "rb") as file:
            while data := file.read(min(length, most * size - len(left))):
                length -= len(data)
                left += data
                if len(left) == most * size:
                    steps -= most
                    yield np.frombuffer(left, dtype).reshape(-1, *shape)
                    left = b""
    if len(left) != steps * size:
        raise ValueError(f"{standing.steps} steps of {num_envs} environments are not what was recorded")
    if left:
        yield np.frombuffer(left, dtype).reshape(-1, *shape)


def play_back(
    envs: Envs,
    standing: Standing,
    takes: ActionSpec,
    num_steps: int,
    who: str,
    stop: Stop,
    played: Callable[[int], None],
) -> PyTree:
    """Tell fresh environments the recorded actions -> what they show then, [B, ...].

    `num_steps` is the length of a rollout, `who` they are for messages; `played` hears how many steps were played.

    Raises:
        Failure: they do not show, pay or end what they did before.
    """
    obs = envs.reset()
    drawn = np.int32 if takes.kind != "quantities" else np.float32
    answers, done = "", np.zeros(envs.num_envs, bool)
    for actions in recorded(standing, takes, envs.num_envs, num_steps * max(1, STEPS_READ // num_steps)):
        raw_reward, ended = np.empty(actions.shape[:2], np.float32), np.empty(actions.shape[:2], bool)
        for start in range(0, len(actions), STEPS_AT_ONCE):
            stop.check()
            part = slice(start, start + STEPS_AT_ONCE)
            obs, raw_reward[part], ended[part] = envs.play(actions[part].astype(drawn))
            played(ended[part].size)
        for now in ended:  # what ends in a step that was ignored ends no episode: see `rollout.heed`
            done = np.greater(now, done, out=now)
        done = done.copy()
        for t in range(0, len(actions), num_steps):
            answers = chain(answers, Told(None, raw_reward[t : t + num_steps], ended[t : t + num_steps]))
    others = [i for i, (a, b) in enumerate(zip(digests_of(obs), standing.seen, strict=True)) if a != b]
    if others or answers != standing.answers:
        named = ", ".join(map(str, others[:MOST_NAMED])) + (" and others" if len(others) > MOST_NAMED else "")
        what = f"now show something else (of {envs.num_envs}: {named})" if others else "paid or ended otherwise"
        raise Failure(
            f"{who} did not repeat themselves: told again the {standing.steps} actions that each had since it began, "
            f"they {what}. To go on would train on something else, so nothing was done; go on with the same version of "
            "the emulators and their files as before (config.json lists the packages), or begin again in another "
            "--run-dir"
        )
    return obs
