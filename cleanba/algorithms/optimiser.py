"""What a learner keeps, and the one gradient step that every algorithm takes."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import optax
from jax import lax

from cleanba.algorithm import Metrics
from cleanba.config import Experiment
from cleanba.rollout import PyTree
from cleanba.shards import ShardAxis


class State(NamedTuple):
    """The state of a learner with one optimiser: all that an update changes."""

    params: PyTree
    optimiser: PyTree
    updates: jax.Array  # int32: updates done
    statistics: PyTree = ()  # of observations and returns


class Trained(NamedTuple):
    """A part of the state that has an optimiser of its own, as critic and actor have."""

    params: PyTree
    optimiser: PyTree


T = TypeVar("T", State, Trained)


def learning_rate(e: Experiment, start: float, updates: jax.Array) -> jax.Array:
    """The learning rate of the next update: constant, or falling linearly from `start` to 0 over the run."""
    # Never a constant that the compiler knows: it would fold it into the step, differently on different placements.
    left = 1.0 - updates / e.num_updates if e.anneal_lr else jnp.where(updates >= 0, 1.0, jnp.nan)
    return start * left


def sgd_step(
    shards: ShardAxis,
    optimiser: optax.GradientTransformation,
    rate: jax.Array,
    trained: T,
    loss: Callable[..., tuple[jax.Array, Metrics]],
    load: Callable[[jax.Array], tuple],
    pieces: int | None = None,
) -> tuple[T, Metrics]:
    """One step down the gradient of the sum over all shards of `loss(params, *load(i))`.

    `load(i)` moves this device's i-th shard's part of the minibatch to where it is computed with, and `loss` gives
    that part's share of the minibatch's loss and of its metrics: shares add up, they are no means of their own.
    What other parameters a loss needs (targets, another network's) it closes over: they get no gradient.
    With `pieces` the first of what `load` gives has leaves [pieces, ...], and the loss is summed over these, too.
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
    trained, norm = shards.isolate(partial(descend, optimiser), rate, trained, gradient)
    return trained, metrics | {"losses/grad_norm": norm}


def descend(
    optimiser: optax.GradientTransformation, rate: jax.Array, trained: T, gradient: PyTree
) -> tuple[T, jax.Array]:
    """One step along the optimiser's direction.  Also returns the gradient's global norm, before clipping."""
    direction, optimiser_state = optimiser.update(gradient, trained.optimiser, trained.params)
    params = jax.tree.map(lambda p, d: p - rate * d, trained.params, direction)
    # Products: what XLA makes of optax's sums of squares goes over memory twice.
    norm = jnp.sqrt(sum(jnp.vdot(g, g) for g in jax.tree.leaves(gradient)))
    return trained._replace(params=params, optimiser=optimiser_state), norm
