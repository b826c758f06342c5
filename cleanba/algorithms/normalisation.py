"""Scales observations and rewards by running statistics.

    obs -> clip((obs - mean) / sqrt(variance + 1e-8), -10, 10)
    reward -> clip(reward / sqrt(variance of the discounted returns under way + 1e-8), -10, 10)

(Engstrom et al. 2020; Gymnasium's NormalizeObservation and NormalizeReward.)  Categorical observations, such as a
grid's codes or text, are normalised after they have been encoded as zeros and ones.  The statistics are part of the
learner's state: an update first adds its rollout to them, then learns from the rollout normalised by them.  Actors get
them with the parameters, so both are of one version.  The returns under way, one for each environment, are memory.
R2D2's memory holds observations as they were; it normalises those that it draws by the newest statistics.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol, TypeAlias

import jax
import jax.numpy as jnp

from cleanba.algorithm import no_memory
from cleanba.algorithms.optimiser import State
from cleanba.networks.encoder import as_vector
from cleanba.ops.moments import Moments, add_batch, no_moments
from cleanba.ops.returns import returns_so_far
from cleanba.probes import probe
from cleanba.rollout import NetworkParams, Obs, PyTree, Rollout, named_leaves
from cleanba.shards import ShardAxis
from cleanba.specs import EnvSpec, ObsSpec

ReturnsSoFar: TypeAlias = jax.Array | tuple[()]
"""The discounted returns under way in a shard's environments [B], where rewards are scaled; else ()."""

LIMIT = 10.0
EPSILON = 1e-8


class Statistics(NamedTuple):
    """The statistics of all rollouts so far."""

    obs: dict[str, Moments]  # for each part of an observation that is normalised, by its path
    discounted_return: Moments | tuple[()]  # () where rewards are not scaled


class ActingParams(NamedTuple):
    """What acting needs where observations are normalised.  Elsewhere it is the parameters alone."""

    params: NetworkParams
    obs: dict[str, Moments]


@dataclass(frozen=True)
class Normaliser:
    """Normalises what the experiment asks for, and leaves the rest as it is."""

    parts: tuple[tuple[str, ObsSpec], ...]
    """the parts of an observation that are normalised, by their paths"""
    scales_rewards: bool
    gamma: float

    def init(self) -> Statistics:
        """The statistics before the first rollout, by which observations are only clipped."""
        moments = {path: no_moments(normalised_spec(part).shape) for path, part in self.parts}
        return Statistics(moments, no_moments(()) if self.scales_rewards else ())

    def init_memory(self, rollout: Rollout) -> ReturnsSoFar:
        """The discounted returns under way in one shard's environments [B], or ()."""
        return jnp.zeros(rollout.reward.shape[1]) if self.scales_rewards else no_memory(rollout)

    def network_spec(self, spec: EnvSpec) -> EnvSpec:
        """The specification of an environment whose observations are as the network gets them: normalised."""
        parts = dict(self.parts)

        def part(path: tuple[Any, ...], o: ObsSpec) -> ObsSpec:
            return normalised_spec(o) if jax.tree_util.keystr(path) in parts else o

        return spec._replace(obs=jax.tree_util.tree_map_with_path(part, spec.obs))

    def normalise(self, seen: dict[str, Moments], obs: Obs) -> PyTree:
        """Observations [..., *shape] -> the same, normalised by these statistics."""
        parts = dict(self.parts)

        def normal(path: tuple[Any, ...], x: jax.Array) -> jax.Array:
            name = jax.tree_util.keystr(path)
            if name not in parts:
                return x
            return ((numbers(parts[name], x) - seen[name].mean) * inverse_std(seen[name])).clip(-LIMIT, LIMIT)

        return jax.tree_util.tree_map_with_path(normal, obs) if self.parts else obs

    def normalising(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """fn(params, carry, obs, ...) -> the same function of `acting_params`, which normalises observations first."""

        def normalised(params: ActingParams, carry: PyTree, obs: Obs, *rest: Any) -> Any:
            return fn(params.params, carry, self.normalise(params.obs, obs), *rest)

        return normalised if self.parts else fn

    def acting_params(self, state: State) -> PyTree:
        """What acting needs of the learner's state."""
        return self.with_statistics(state.params, state.statistics)

    def with_statistics(self, params: NetworkParams, statistics: Statistics) -> PyTree:
        """Parameters with the statistics by which acting normalises observations, where it does."""
        return ActingParams(params, statistics.obs) if self.parts else params

    def add(
        self, shards: ShardAxis, statistics: Statistics, memory: ReturnsSoFar, rollout: Rollout
    ) -> tuple[Statistics, ReturnsSoFar, Rollout]:
        """Add a rollout [K', T(+1), B, ...]: statistics and memory after it, and the rollout normalised by them.

        Each observation counts once, terminal ones too; rewards count where their action was executed.
        """
        by_path = named_leaves(rollout.obs)
        # All true, but not a constant: XLA could remove a constant mask on some placements only, and round differently.
        all_valid = jnp.broadcast_to(shards.always, rollout.valid.shape)
        moments = {
            path: add_batch(shards, statistics.obs[path], numbers(part, by_path[path][:, :-1]), all_valid)
            for path, part in self.parts
        }
        of_return = statistics.discounted_return
        if isinstance(of_return, Moments):
            so_far = lambda before, r: returns_so_far(r.reward, r.first[:-1], r.valid, before, self.gamma)
            returns = shards.map(so_far, memory, rollout._replace(obs=(), extras=(), carry=()))
            memory = returns[:, -1]
            of_return = add_batch(shards, of_return, returns, rollout.valid)
        statistics = Statistics(moments, of_return)
        probe("statistics", statistics)

        def normalise_both(obs: Obs, reward: jax.Array) -> tuple[PyTree, jax.Array]:
            if isinstance(of_return, Moments):
                reward = (reward * inverse_std(of_return)).clip(-LIMIT, LIMIT)
            return self.normalise(moments, obs), reward

        if self.parts or self.scales_rewards:
            obs, reward = shards.map(normalise_both, rollout.obs, rollout.reward)
            rollout = rollout._replace(obs=obs, reward=reward)
            probe("normalised", {"obs": obs, "reward": reward}, per_shard=True)
        return statistics, memory, rollout


def inverse_std(moments: Moments) -> jax.Array:
    """1 / standard deviation.  [...]."""
    return 1.0 / jnp.sqrt(moments.variance + EPSILON)


CATEGORICAL = ("codes", "discrete", "bytes")  # kinds of observations whose numbers name categories


def numbers(part: ObsSpec, x: jax.Array) -> jax.Array:
    """The numbers of one part of an observation: [..., *shape] as it is, or zeros and ones [..., D] if categorical."""
    if part.kind not in CATEGORICAL:
        return x
    lead = x.shape[: x.ndim - len(part.shape)]
    return as_vector(part, x.reshape(-1, *part.shape)).reshape(*lead, -1)


def normalised_spec(part: ObsSpec) -> ObsSpec:
    """The specification of one part of an observation after normalisation."""
    one = jax.ShapeDtypeStruct((1, *part.shape), part.dtype)
    return ObsSpec("vector", jax.eval_shape(partial(numbers, part), one).shape[1:], "float32")


class Normalises(Protocol):
    """The fields of an experiment that decide what is normalised."""

    @property
    def norm_obs(self) -> bool: ...
    @property
    def norm_reward(self) -> bool: ...
    @property
    def gamma(self) -> float: ...


def make_normaliser(e: Normalises, spec: EnvSpec) -> Normaliser:
    """The normaliser of an experiment: of all observations except images, boards, masks and booleans."""
    parts = [
        (path, o)
        for path, o in named_leaves(spec.obs).items()
        if o.kind in CATEGORICAL or (o.kind == "vector" and o.dtype != "bool")
    ]
    return Normaliser(tuple(parts) if e.norm_obs else (), e.norm_reward, e.gamma)
