"""The learner's state, and the gradient step that every algorithm takes."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import optax
from jax import lax

from cleanba.algorithm import Metrics
from cleanba.config import Experiment
from cleanba.networks.layers import conv_kind
from cleanba.rollout import PyTree
from cleanba.shards import ShardAxis

BETAS = 0.9, 0.999  # Adam's, of both moments


class State(NamedTuple):
    """The state of a learner with one optimiser: all that an update changes."""

    params: PyTree
    optimiser: PyTree
    updates: jax.Array  # int32: updates done
    statistics: PyTree = ()  # of observations and returns


class TrainState(NamedTuple):
    """Parameters and the state of their optimiser.  A learner with several optimisers, such as SAC, has several."""

    params: PyTree
    optimiser: PyTree


T = TypeVar("T", State, TrainState)


class Optimiser(NamedTuple):
    """How a gradient becomes a step."""

    rule: optax.GradientTransformation
    """the transformation in optax, which clips first if `max_norm` is finite"""
    max_norm: float = math.inf
    """the global norm that gradients are clipped to"""
    eps: float | None = None
    """Adam's, if its steps are to be those of `ops/descent.py`"""

    def init(self, params: PyTree) -> PyTree:
        """The optimiser's state before the first step: leaves of the parameters' shapes, and counters."""
        return self.rule.init(params)


def clipped(rule: optax.GradientTransformation, max_norm: float) -> optax.GradientTransformation:
    """The rule, preceded by clipping to this global norm."""
    return rule if max_norm == math.inf else optax.chain(optax.clip_by_global_norm(max_norm), rule)


def make_adam(platform: str, eps: float = 1e-8, max_norm: float = math.inf) -> Optimiser:
    """Adam, in the form that is fast on devices of kind `platform` ("cpu", "gpu" …)."""
    rule = clipped(optax.scale_by_adam(*BETAS, eps), max_norm)
    return Optimiser(rule, max_norm, eps if conv_kind(platform) == "direct" else None)


def learning_rate(e: Experiment, start: float, updates: jax.Array) -> jax.Array:
    """The learning rate after so many updates: constant, or falling linearly from `start` to 0.  [] int32 -> []."""
    # Never a compile-time constant: XLA would fold it into the step, in different ways on different placements.
    left = 1.0 - updates / e.num_updates if e.anneal_lr else jnp.where(updates >= 0, 1.0, jnp.nan)
    return start * left


def sgd_step(
    shards: ShardAxis,
    optimiser: Optimiser,
    rate: jax.Array,
    trained: T,
    loss: Callable[..., tuple[jax.Array, Metrics]],
    load: Callable[[jax.Array], tuple[Any, ...]],
    pieces: int | None = None,
) -> tuple[T, Metrics]:
    """One step down the gradient of the sum over all shards of `loss(params, *load(i))`.

    load: gathers shard i's part of the minibatch.  Parameters of other networks that the loss needs, such as targets,
        come with it: the gradient is only by `trained.params`.
    loss: this part's share of the minibatch's loss and metrics.  Shares are added up, so a mean over the minibatch is
        divided by the size of the whole minibatch.
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

    gradient, metrics = shards.sum(shards.map_from(load, of_shard))
    if optimiser.eps is None:
        trained, norm = shards.isolate(partial(descend, optimiser.rule), rate, trained, gradient)
    else:
        trained, norm = descend_by_adam(shards, optimiser, optimiser.eps, rate, trained, gradient)
    return trained, metrics | {"losses/grad_norm": norm}


def descend(rule: optax.GradientTransformation, rate: jax.Array, trained: T, gradient: PyTree) -> tuple[T, jax.Array]:
    """One step of the optimiser.  Also returns the gradient's global norm [], before clipping."""
    direction, optimiser_state = rule.update(gradient, trained.optimiser, trained.params)
    params = jax.tree.map(lambda p, d: p - rate * d, trained.params, direction)
    return trained._replace(params=params, optimiser=optimiser_state), global_norm(gradient)


def descend_by_adam(
    shards: ShardAxis, optimiser: Optimiser, eps: float, rate: jax.Array, trained: T, gradient: PyTree
) -> tuple[T, jax.Array]:
    """`descend` by Adam's own loop, which nothing around it can change."""
    from cleanba.ops import descent

    leaves, structure = jax.tree.flatten(gradient)
    state = trained.optimiser if optimiser.max_norm == math.inf else trained.optimiser[1]

    def weigh(rate: jax.Array, count: jax.Array, squares: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        norm, count = jnp.sqrt(squares.sum()), optax.safe_increment(count)
        # Where nothing is clipped, a norm that is not finite has no effect.
        unclipped = (norm < optimiser.max_norm) | (optimiser.max_norm == math.inf)
        clip = jnp.where(unclipped, 1.0, optimiser.max_norm / norm)
        first, second = (1 - beta**count for beta in BETAS)
        return jnp.stack([clip, rate / first, 1 / second]), count, norm

    factors, count, norm = shards.isolate(weigh, rate, state.count, descent.squares(leaves))
    params, mu, nu = map(jax.tree.leaves, (trained.params, state.mu, state.nu))
    found = descent.adam(leaves, params, mu, nu, factors, *BETAS, eps)
    params, mu, nu = (jax.tree.unflatten(structure, x) for x in found)
    state = state._replace(count=count, mu=mu, nu=nu)
    state = state if optimiser.max_norm == math.inf else (trained.optimiser[0], state)
    return trained._replace(params=params, optimiser=state), norm


def global_norm(tree: PyTree) -> jax.Array:
    """The square root of the sum of all squares.  Leaves [...] -> [] float32."""
    # By dot products: XLA's code for optax's sums of squares goes over memory twice.
    return jnp.sqrt(sum(jnp.vdot(x, x) for x in jax.tree.leaves(tree)))
