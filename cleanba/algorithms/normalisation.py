"""Observations and rewards brought to one scale by running statistics, for algorithms that learn from rollouts.

    obs -> clip((obs - mean) / sqrt(variance + 1e-8), -10, 10)
    reward -> clip(reward / sqrt(variance of the discounted returns under way + 1e-8), -10, 10)

(Engstrom et al. 2020; Gymnasium's NormalizeObservation and NormalizeReward.)  What only names things, such as a grid's
codes or text, is normalised as the zeros and ones that a network is given of it.  The statistics are a part of the
learner's state: an update first adds its rollout to them, then learns from the rollout as they now see it.  Actors get
them with the parameters, so both are of one version.  The returns under way, one for each environment, are memory.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.tree_util import KeyPath

from cleanba.algorithm import no_memory
from cleanba.algorithms.optimiser import State
from cleanba.config import PolicyGradient
from cleanba.networks.sight import as_vector
from cleanba.ops.moments import Moments, add_batch, no_moments
from cleanba.ops.returns import returns_so_far
from cleanba.rollout import PyTree, Rollout
from cleanba.shards import ShardAxis
from cleanba.specs import EnvSpec, ObsSpec

LIMIT = 10.0
EPSILON = 1e-8


class Statistics(NamedTuple):
    """What was seen so far."""

    obs: dict[str, Moments]  # of each part of an observation that is normalised, by its path
    discounted_return: Moments | tuple[()]  # () where rewards stay as they are


class Acting(NamedTuple):
    """What acting needs, where observations are normalised; else the parameters alone."""

    params: PyTree
    obs: dict[str, Moments]


@dataclass(frozen=True)
class Normaliser:
    """Normalises what an experiment says it should, and leaves the rest as it is."""

    parts: tuple[tuple[str, ObsSpec], ...]
    """the parts of an observation that are normalised, by their paths"""
    scales_rewards: bool
    gamma: float

    def init(self) -> Statistics:
        """Nothing was seen yet: observations stay as they are."""
        moments = {path: no_moments(as_seen(part).shape) for path, part in self.parts}
        return Statistics(moments, no_moments(()) if self.scales_rewards else ())

    def init_memory(self, rollout: Rollout) -> PyTree:
        """The discounted returns under way in one shard's environments [B], or ()."""
        return jnp.zeros(rollout.reward.shape[1]) if self.scales_rewards else no_memory(rollout)

    def shown(self, spec: EnvSpec) -> EnvSpec:
        """What an environment looks like to a network that sees its observations normalised."""
        parts = dict(self.parts)

        def part(path: KeyPath, o: ObsSpec) -> ObsSpec:
            return as_seen(o) if jax.tree_util.keystr(path) in parts else o

        return spec._replace(obs=jax.tree_util.tree_map_with_path(part, spec.obs))

    def observe(self, seen: dict[str, Moments], obs: PyTree) -> PyTree:
        """Observations [..., *shape] as the network sees them."""
        parts = dict(self.parts)

        def normal(path: KeyPath, x: jax.Array) -> jax.Array:
            name = jax.tree_util.keystr(path)
            if name not in parts:
                return x
            return ((numbers(parts[name], x) - seen[name].mean) * inverse_std(seen[name])).clip(-LIMIT, LIMIT)

        return jax.tree_util.tree_map_with_path(normal, obs) if self.parts else obs

    def seen_by(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """fn(params, carry, obs, ...) as a function of what `acting` gives, which sees observations normalised."""

        def seeing(params: Acting, carry: PyTree, obs: PyTree, *rest: Any) -> Any:
            return fn(params.params, carry, self.observe(params.obs, obs), *rest)

        return seeing if self.parts else fn

    def acting(self, state: State) -> PyTree:
        """What acting needs of the learner's state."""
        return Acting(state.params, state.statistics.obs) if self.parts else state.params

    def add(
        self, shards: ShardAxis, statistics: Statistics, memory: PyTree, rollout: Rollout
    ) -> tuple[Statistics, PyTree, Rollout]:
        """A rollout [K', T(+1), B, ...] is added to the statistics: these, memory, and the rollout normalised by them.

        Observations count once each, the terminal ones too; rewards where they were paid for an action.
        """
        by_path = {jax.tree_util.keystr(path): x for path, x in jax.tree_util.tree_leaves_with_path(rollout.obs)}
        # Not a constant, which XLA would take out of the sums that it masks, perhaps not on every placement.
        everywhere = jnp.broadcast_to(shards.always, rollout.valid.shape)
        moments = {
            path: add_batch(shards, statistics.obs[path], numbers(part, by_path[path][:, :-1]), everywhere)
            for path, part in self.parts
        }
        of_return = statistics.discounted_return
        if isinstance(of_return, Moments):
            so_far = lambda before, r: returns_so_far(r.reward, r.first[:-1], r.valid, before, self.gamma)
            returns = shards.map(so_far, memory, rollout._replace(obs=(), extras=(), carry=()))
            memory = returns[:, -1]
            of_return = add_batch(shards, of_return, returns, rollout.valid)
        statistics = Statistics(moments, of_return)

        def normalise(obs: PyTree, reward: jax.Array) -> tuple[PyTree, jax.Array]:
            if isinstance(of_return, Moments):
                reward = (reward * inverse_std(of_return)).clip(-LIMIT, LIMIT)
            return self.observe(moments, obs), reward

        if self.parts or self.scales_rewards:
            obs, reward = shards.map(normalise, rollout.obs, rollout.reward)
            rollout = rollout._replace(obs=obs, reward=reward)
        return statistics, memory, rollout


def inverse_std(moments: Moments) -> jax.Array:
    """What a quantity is multiplied by to have a standard deviation of one.  [...]."""
    return 1.0 / jnp.sqrt(moments.variance + EPSILON)


NAMING = ("codes", "discrete", "bytes")  # kinds of observations whose numbers only name things


def numbers(part: ObsSpec, x: jax.Array) -> jax.Array:
    """What is normalised of a part [..., *shape]: quantities as they are, else zeros and ones [..., D]."""
    if part.kind not in NAMING:
        return x
    lead = x.shape[: x.ndim - len(part.shape)]
    return as_vector(part, x.reshape(-1, *part.shape)).reshape(*lead, -1)


def as_seen(part: ObsSpec) -> ObsSpec:
    """What a part looks like when it is normalised."""
    one = jax.ShapeDtypeStruct((1, *part.shape), part.dtype)
    return ObsSpec("vector", jax.eval_shape(partial(numbers, part), one).shape[1:], "float32")


def make_normaliser(e: PolicyGradient, spec: EnvSpec) -> Normaliser:
    """What an experiment normalises: all that is observed but images, boards, masks and what is true or false."""
    parts = [
        (jax.tree_util.keystr(path), o)
        for path, o in jax.tree_util.tree_leaves_with_path(spec.obs)
        if o.kind in NAMING or (o.kind == "vector" and o.dtype != "bool")
    ]
    return Normaliser(tuple(parts) if e.norm_obs else (), e.norm_reward, e.gamma)
