"""A rollout: `num_steps` steps of one actor's environments, recorded on the actor's device."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from cleanba.algorithm import Algorithm
from cleanba.envs import Envs
from cleanba.rollout import Episode, EpisodeTracker, PyTree, Rollout
from cleanba.runtime.channels import Stop


@dataclass
class Times:
    """Seconds that one rollout spent on what."""

    emulators: float = 0.0
    inference: float = 0.0  # copying observations to the device, the policy, and copying actions back
    transfer: float = 0.0  # handing the rollout to the learner devices
    params_wait: float = 0.0  # waiting for parameters
    rollout: float = 0.0  # all of it


class Collected(NamedTuple):
    rollout: Rollout  # on the actor's device
    steps: int  # executed: ignored actions do not count
    episodes: list[Episode]


class Collector(Protocol):
    """Both collectors look like this: construct, then call once per rollout."""

    def __call__(self, params: PyTree, key: jax.Array, times: Times) -> Collected: ...

    def restart(self, envs: Envs) -> None:
        """Go on with fresh environments, all at the first step of an episode."""
        ...

    def close(self) -> None: ...


class Recording(NamedTuple):
    """What the device remembers while a rollout is being collected; written in place, step by step."""

    obs: PyTree  # [T+1, B, ...]
    first: jax.Array  # [T+1, B]
    action: jax.Array  # [T, B]
    extras: PyTree  # [T, B, ...]


class Steppers(NamedTuple):
    """The compiled functions of the stepped collector, shared by all actors of a process."""

    start: Callable[..., Recording]
    step: Callable[..., Any]
    finish: Callable[..., Recording]


def make_steppers(algorithm: Algorithm, num_steps: int) -> Steppers:
    """Compile acting and recording into one call per step."""

    def write(buffer: PyTree, t: jax.Array, value: PyTree) -> PyTree:
        return jax.tree.map(lambda b, v: lax.dynamic_update_index_in_dim(b, v.astype(b.dtype), t, 0), buffer, value)

    def start(params: PyTree, carry: PyTree, obs: PyTree, first: jax.Array) -> Recording:
        out = jax.eval_shape(lambda: algorithm.act(params, carry, obs, first, jax.random.key(0), True))
        empty = lambda n, tree: jax.tree.map(lambda x: jnp.empty((n, *x.shape), x.dtype), tree)
        return Recording(empty(num_steps + 1, obs), empty(num_steps + 1, first), *empty(num_steps, (out[0], out[2])))

    def step(params, recording, carry, obs, first, key, t):
        action, carry, extras = algorithm.act(params, carry, obs, first, jax.random.fold_in(key, t), True)
        return action, carry, write(recording, t, Recording(obs, first, action, extras))

    def write_all(recording: Recording, obs: PyTree, first: jax.Array) -> Recording:
        t = jnp.int32(num_steps)
        return recording._replace(obs=write(recording.obs, t, obs), first=write(recording.first, t, first))

    return Steppers(jax.jit(start), jax.jit(step, donate_argnums=1), jax.jit(write_all, donate_argnums=0))


@dataclass
class SteppedCollector:
    """Steps the environments from Python; the policy and the recording are one compiled call per step."""

    algorithm: Algorithm
    steppers: Steppers
    num_steps: int
    device: jax.Device
    stop: Stop
    _envs: Envs | None = None
    _obs: PyTree = None
    _done: np.ndarray = field(default_factory=lambda: np.zeros(0, bool))
    _first: np.ndarray = field(default_factory=lambda: np.zeros(0, bool))
    _carry: PyTree = None
    _tracker: EpisodeTracker = field(default_factory=lambda: EpisodeTracker(0))

    def restart(self, envs: Envs) -> None:
        self.close()
        self._envs = envs
        n = envs.num_envs
        self._obs = envs.reset()
        self._done, self._first = np.zeros(n, bool), np.ones(n, bool)
        self._carry = jax.device_put(self.algorithm.initial_carry(n), self.device)
        self._tracker = EpisodeTracker(n)

    def close(self) -> None:
        if self._envs is not None:
            self._envs.close()

    def __call__(self, params: PyTree, key: jax.Array, times: Times) -> Collected:
        assert self._envs is not None, "restart() comes first"
        clock = time.perf_counter
        n = self._envs.num_envs
        reward = np.zeros((self.num_steps, n), np.float32)
        terminated, truncated, valid = (np.zeros((self.num_steps, n), bool) for _ in range(3))
        episodes: list[Episode] = []
        start_carry = self._carry
        now = clock()
        recording = None
        for t in range(self.num_steps):
            self.stop.check()
            obs = jax.device_put(self._obs, self.device)  # the one copy of an observation to a device
            if recording is None:
                recording = self.steppers.start(params, self._carry, obs, self._first)
            action, self._carry, recording = self.steppers.step(
                params, recording, self._carry, obs, self._first, key, np.int32(t)
            )
            host_action = np.asarray(action)
            then, now = now, clock()
            times.inference += now - then

            step = self._envs.step(host_action)
            ignored = self._done  # the episode had ended, so this step reset the environment and did nothing else
            reward[t] = np.where(ignored, 0.0, step.reward)
            terminated[t] = step.terminated & ~ignored
            truncated[t] = step.truncated & ~ignored
            valid[t] = ~ignored
            episodes += self._tracker.add(step.raw_reward, ~ignored, step.over)
            self._obs, self._first = step.obs, ignored
            self._done = terminated[t] | truncated[t]
            then, now = now, clock()
            times.emulators += now - then
        assert recording is not None
        executed = int(valid.sum())
        last = jax.device_put(self._obs, self.device)
        recording = self.steppers.finish(recording, last, self._first)
        reward, terminated, truncated, valid = jax.device_put((reward, terminated, truncated, valid), self.device)
        r = recording
        rollout = Rollout(
            r.obs, r.first, r.action, reward, terminated, truncated, valid, extras=r.extras, carry=start_carry
        )
        times.inference += clock() - now
        return Collected(rollout, executed, episodes)
