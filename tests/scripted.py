"""Environments in which every number is known beforehand, stepped as the runtime steps EnvPool's.

They follow EnvPool's convention: the step after an episode's end ignores its action and delivers the first observation
of the next episode.
"""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from cleanba.algorithm import Algorithm
from cleanba.environments.common import Step, train_reward
from cleanba.specs import EnvSpec, ObsSpec, choice


class Play(NamedTuple):
    """One episode as written: the raw reward of each of its steps, and how it ends."""

    rewards: tuple[float, ...]
    terminated: bool = True
    truncated: bool = False
    over: bool = True  # False for the loss of a life, after which the same game goes on


class Planted(Exception):
    """An error that a test planted."""


def spec(clip_reward: bool = False) -> EnvSpec:
    """What scripted environments look like: four numbers to see, two actions to take."""
    return EnvSpec("Scripted-v0", ObsSpec("vector", (4,), "float32"), choice(2), False, clip_reward, {})


@dataclass
class ScriptedEnvs:
    """B environments, each playing its script over and over.

    The observation of environment i of the block is [epoch, i, episode, step], all counted from 0, so that any recorded
    observation says where it comes from.
    """

    seeds: Sequence[int]
    epoch: int
    scripts: Sequence[Sequence[Play]]  # environment i plays scripts[i % len(scripts)]
    clip_reward: bool = False
    seconds_per_step: float = 0.0
    fail_at_step: int | None = None  # raise `Planted` at this step, counted from 1
    reward_at_reset: float = 0.0  # paid by the step that ignores its action; EnvPool pays nothing there
    actions: list[np.ndarray] = field(default_factory=list)
    closed: int = 0  # how often close() was called

    def __post_init__(self) -> None:
        self.num_envs = len(self.seeds)
        self._spec = spec(self.clip_reward)

    def _play(self, i: int) -> Play:
        script = self.scripts[i % len(self.scripts)]
        return script[self._episode[i] % len(script)]

    def _obs(self) -> np.ndarray:
        rows = [(self.epoch, i, self._episode[i], self._step[i]) for i in range(self.num_envs)]
        return np.array(rows, np.float32)

    def reset(self) -> np.ndarray:
        self._episode = [0] * self.num_envs
        self._step = [0] * self.num_envs
        self._done = [False] * self.num_envs
        return self._obs()

    def step(self, action: np.ndarray) -> Step:
        assert action.shape == (self.num_envs,)
        self.actions.append(np.array(action))
        if self.fail_at_step == len(self.actions):
            raise Planted(f"planted at step {self.fail_at_step}")
        time.sleep(self.seconds_per_step)
        raw = np.zeros(self.num_envs, np.float32)
        terminated, truncated, over = (np.zeros(self.num_envs, bool) for _ in range(3))
        for i in range(self.num_envs):
            if self._done[i]:
                self._done[i], self._episode[i], self._step[i] = False, self._episode[i] + 1, 0
                raw[i] = self.reward_at_reset
                continue
            play = self._play(i)
            raw[i] = play.rewards[self._step[i]]
            self._step[i] += 1
            if self._step[i] == len(play.rewards):
                self._done[i] = True
                terminated[i], truncated[i], over[i] = play.terminated, play.truncated, play.over
        return Step(self._obs(), train_reward(self._spec, raw), raw, terminated, truncated, over)

    def close(self) -> None:
        self.closed += 1


CELLS, LEFT_PAYS, RIGHT_PAYS = 6, 0.3, 1.0


class Corridors:
    """B corridors of CELLS cells, entered anywhere.  0 steps left, 1 right; each end pays a reward of its own.

    An observation is the cell, one-hot.  An episode is cut off after `limit` steps.
    """

    spec = EnvSpec("Corridor-v0", ObsSpec("vector", (CELLS,), "float32"), choice(2), False, False, {})

    def __init__(self, seeds: Sequence[int], epoch: int, limit: int = 3):
        self.num_envs, self.limit = len(seeds), limit
        self._rng = np.random.default_rng([*seeds, epoch])

    def _obs(self) -> np.ndarray:
        return np.eye(CELLS, dtype=np.float32)[self._cell.clip(0, CELLS - 1)]

    def reset(self) -> np.ndarray:
        self._cell = self._rng.integers(CELLS, size=self.num_envs)
        self._steps = np.zeros(self.num_envs, int)
        self._done = np.zeros(self.num_envs, bool)
        return self._obs()

    def step(self, action: np.ndarray) -> Step:
        ignored = self._done
        self._cell = np.where(ignored, self._rng.integers(CELLS, size=self.num_envs), self._cell + 2 * action - 1)
        self._steps = np.where(ignored, 0, self._steps + 1)
        reward = np.float32(np.select([self._cell < 0, self._cell == CELLS], [LEFT_PAYS, RIGHT_PAYS], 0.0))
        terminated = (self._cell < 0) | (self._cell == CELLS)
        truncated = ~terminated & (self._steps == self.limit)
        self._done = terminated | truncated
        return Step(self._obs(), reward, reward, terminated, truncated, self._done)

    def close(self) -> None:
        pass


class Scripts:
    """Makes scripted environments for a run, and remembers which it made."""

    def __init__(self, *scripts: Sequence[Play], options: Callable[[int], dict] = lambda _: {}, **common):
        """`options` takes the number of blocks made before, and returns further arguments of `ScriptedEnvs`."""
        self.scripts = scripts
        self.options = options
        self.common = common
        self.made: list[ScriptedEnvs] = []
        self._lock = threading.Lock()

    def __call__(self, seeds: Sequence[int], epoch: int) -> ScriptedEnvs:
        with self._lock:
            envs = ScriptedEnvs(seeds, epoch, self.scripts, **(self.common | self.options(len(self.made))))
            self.made.append(envs)
        return envs


def mirror() -> Algorithm:
    """A policy that learns nothing: its action is the episode's step modulo 2, its carry counts how often it acted."""

    def act(params, carry, obs, first, key, explore):
        action = obs[:, 3].astype(jnp.int32) % 2
        return action, carry + 1, {"obs": obs, "first": first}

    def unused(*_):
        raise AssertionError("the mirror does not learn")

    return Algorithm(
        unused, unused, lambda batch, first_env=0: jnp.zeros(batch, jnp.int32), act, unused, unused, unused
    )


def fingerprint(params) -> jax.Array:
    """A number below 2^23 that any change of any parameter almost surely changes."""
    bits = [jax.lax.bitcast_convert_type(x.astype(jnp.float32), jnp.uint32) for x in jax.tree.leaves(params)]
    mixed = [((b ^ (b >> 15)) * jnp.uint32(2654435761 + 2 * i)).sum() for i, b in enumerate(bits)]
    return (sum(mixed) >> 9).astype(jnp.int32)


def with_fingerprints(algorithm: Algorithm) -> Algorithm:
    """The same algorithm, which also reports which parameters acted and which learnt.

    Metrics "acted_min" and "acted_max" are the fingerprints of the parameters that chose the actions of the rollouts
    that an update learns from (equal, if all actors used the same ones), "learning" of those that it starts from.
    """

    def act(params, carry, obs, first, key, explore):
        action, carry, extras = algorithm.act(params, carry, obs, first, key, explore)
        return action, carry, {**extras, "fingerprint": jnp.full(first.shape, fingerprint(params))}

    def update(state, memory, rollout, shards, key):
        seen = rollout.extras["fingerprint"]
        report = {
            "acted_min": jax.lax.pmin(seen.min(), shards.mesh_axis),
            "acted_max": jax.lax.pmax(seen.max(), shards.mesh_axis),
            "learning": fingerprint(algorithm.actor_params(state)),
        }
        state, memory, metrics = algorithm.update(state, memory, rollout, shards, key)
        return state, memory, metrics | report

    return algorithm._replace(act=act, update=update)
