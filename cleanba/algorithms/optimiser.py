"""The learner's state, and the gradient step that every algorithm takes."""

import inspect
import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import optax
from jax import lax

from cleanba import kernels
from cleanba.algorithm import Metrics
from cleanba.config import Experiment
from cleanba.ops.descent import clipped, descend
from cleanba.probes import probe
from cleanba.rollout import NetworkParams, PyTree
from cleanba.shards import ShardAxis


class State(NamedTuple):
    """The state of a learner with one optimiser: all that an update changes."""

    params: NetworkParams
    optimiser: PyTree  # the optimiser's state: for Adam its moments and its count of steps
    updates: jax.Array  # int32: updates done
    statistics: PyTree = ()  # of observations and returns


class TrainState(NamedTuple):
    """Parameters and the state of their optimiser.  A learner with several optimisers, such as SAC, has several."""

    params: NetworkParams
    optimiser: PyTree  # as above


T = TypeVar("T", State, TrainState)
Step = Callable[[ShardAxis, jax.Array, Any, PyTree], tuple[Any, jax.Array]]
"""shards, rate [], state of any type, gradient -> the state after one step, and the gradient's global norm []"""


class Optimiser(NamedTuple):
    """How a gradient becomes a step."""

    rule: optax.GradientTransformation
    """the transformation in optax, which says what the optimiser's state is"""
    step: Step
    """one step, to the same bits on every placement"""

    def init(self, params: NetworkParams) -> PyTree:
        """The optimiser's state before the first step: leaves of the parameters' shapes, and counters."""
        return self.rule.init(params)


def make_adam(eps: float = 1e-8, max_norm: float = math.inf, rectified: bool = False) -> Optimiser:
    """Adam, or `rectified` RAdam, with gradients clipped to this global norm."""
    adam = kernels.Adam(eps, max_norm, rectified=rectified)
    return Optimiser(adam.rule, partial(kernels.adam, adam))


def by_rule(rule: optax.GradientTransformation, max_norm: float) -> Optimiser:
    """Any rule of optax, with gradients clipped to this global norm."""
    rule = clipped(rule, max_norm)

    def step(shards: ShardAxis, rate: jax.Array, trained: T, gradient: PyTree) -> tuple[T, jax.Array]:
        return shards.isolate(partial(descend, rule), rate, trained, gradient)

    return Optimiser(rule, step)


def learning_rate(e: Experiment, start: float, updates: jax.Array) -> jax.Array:
    """The learning rate after `updates` updates: constant, or falling linearly from `start` to 0.  [] int32 -> []."""
    # Never a compile-time constant: XLA would fold it into the step, in different ways on different placements.
    left = 1.0 - updates / e.num_updates if e.anneal_lr else jnp.where(updates >= 0, 1.0, jnp.nan)
    return start * left


def optimiser_step(
    shards: ShardAxis,
    optimiser: Optimiser,
    rate: jax.Array,
    trained: T,
    loss: Callable[..., tuple[jax.Array, Metrics]],
    load: Callable[[jax.Array], tuple[Any, ...]],
    pieces: int | None = None,
) -> tuple[T, Metrics]:
    """One step of the optimiser on the sum over all shards of `loss(params, *load(i))`.

    loss: one shard's share of the minibatch's loss [] and metrics.  Shares are added up, so for a mean each divides by
        the size of the whole minibatch.
    load: i -> the loss's other arguments for this device's i-th shard: its part of the minibatch, and other networks'
        parameters, such as targets.  The gradient is with respect to `trained.params` alone.
    pieces: if given, the first value that `load` returns has leaves [pieces, ...], and the loss is summed over these.

    Returns the parameters and optimiser state after the step, and the metrics with the gradient's norm.
    """

    def of_shard(*part: PyTree) -> tuple[PyTree, Metrics]:
        gradient = partial(jax.grad(loss, has_aux=True), trained.params)
        if pieces is None:
            return gradient(*part)
        first, *rest = part
        of_piece = lambda i: gradient(jax.tree.map(lambda x: x[i], first), *rest)
        if pieces == 1:
            return of_piece(0)
        nothing = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(of_piece, 0))
        return lax.fori_loop(0, pieces, lambda i, total: jax.tree.map(jnp.add, total, of_piece(i)), nothing)

    trained, metrics, _ = _step(shards, optimiser, rate, trained, loss, load, lambda *part: (*of_shard(*part), ()))
    return trained, metrics


def optimiser_step_with_errors(
    shards: ShardAxis,
    optimiser: Optimiser,
    rate: jax.Array,
    trained: T,
    loss: Callable[..., tuple[jax.Array, tuple[Metrics, jax.Array]]],
    load: Callable[[jax.Array], tuple[Any, ...]],
) -> tuple[T, Metrics, jax.Array]:
    """`optimiser_step`, where the loss also returns its elements' errors, [N, ...], which are not summed over shards.

    Returns the parameters and optimiser state after the step, the metrics, and the errors of the K' shards of this
    device, [K', N, ...].
    """

    def of_shard(*part: PyTree) -> tuple[PyTree, Metrics, jax.Array]:
        gradient, (metrics, errors) = jax.grad(loss, has_aux=True)(trained.params, *part)
        return gradient, metrics, errors

    return _step(shards, optimiser, rate, trained, loss, load, of_shard)


def _step(
    shards: ShardAxis,
    optimiser: Optimiser,
    rate: jax.Array,
    trained: T,
    loss: Callable[..., Any],
    load: Callable[[jax.Array], tuple[Any, ...]],
    of_shard: Callable[..., tuple[PyTree, Metrics, PyTree]],
) -> tuple[T, Metrics, PyTree]:
    """One step on the sum over all shards of `of_shard(*load(i))`: a shard's gradient, metrics and errors of `loss`.

    Returns what `optimiser_step_with_errors` returns.
    """

    def minibatch() -> PyTree:
        """The loss's arguments after the parameters, by the names that `cleanba bisect` shows."""
        names = [*inspect.signature(loss).parameters][1:]
        return shards.each(lambda i: dict(zip(names, load(i), strict=True)))

    probe("minibatch", minibatch, loss.__name__, per_shard=True)
    of_shards = shards.map_from(load, of_shard)
    probe("gradient", of_shards, loss.__name__, per_shard=True)
    *summands, errors = of_shards
    gradient, metrics = shards.sum(tuple(summands))
    probe("sum", (gradient, metrics), loss.__name__)
    trained, norm = optimiser.step(shards, rate, trained, gradient)
    probe("optimiser", trained, loss.__name__)
    return trained, metrics | {"losses/grad_norm": norm}, errors
