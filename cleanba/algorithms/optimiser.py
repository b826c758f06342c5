"""What a learner keeps, and the one gradient step that every algorithm takes."""

import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple, TypeVar

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


class Trained(NamedTuple):
    """A part of the state that has an optimiser of its own, as critic and actor have."""

    params: PyTree
    optimiser: PyTree


T = TypeVar("T", State, Trained)


class Optimiser(NamedTuple):
    """A rule by which a gradient becomes a step."""

    rule: optax.GradientTransformation
    """the rule as optax has it, which says what its state is; clips first, if `max_norm` is finite"""
    max_norm: float = math.inf
    """the gradient's largest global norm: longer ones are shortened to it"""
    eps: float | None = None
    """Adam's, if its steps are to be those of `ops/descent.py`"""

    def init(self, params: PyTree) -> PyTree:
        """The state before the first step."""
        return self.rule.init(params)


def clipped(rule: optax.GradientTransformation, max_norm: float) -> optax.GradientTransformation:
    """The rule, for gradients that are shortened to that global norm."""
    return rule if max_norm == math.inf else optax.chain(optax.clip_by_global_norm(max_norm), rule)


def make_adam(platform: str, eps: float = 1e-8, max_norm: float = math.inf) -> Optimiser:
    """Adam, in the form that is fast on devices of kind `platform` ("cpu", "gpu" …)."""
    rule = clipped(optax.scale_by_adam(*BETAS, eps), max_norm)
    return Optimiser(rule, max_norm, eps if conv_kind(platform) == "direct" else None)


def learning_rate(e: Experiment, start: float, updates: jax.Array) -> jax.Array:
    """The learning rate of the next update: constant, or falling linearly from `start` to 0 over the run."""
    # Never a constant that the compiler knows: it would fold it into the step, differently on different placements.
    left = 1.0 - updates / e.num_updates if e.anneal_lr else jnp.where(updates >= 0, 1.0, jnp.nan)
    return start * left


def sgd_step(
    shards: ShardAxis,
    optimiser: Optimiser,
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
    if optimiser.eps is None:
        trained, norm = shards.isolate(partial(descend, optimiser.rule), rate, trained, gradient)
    else:
        trained, norm = descend_by_adam(shards, optimiser, optimiser.eps, rate, trained, gradient)
    return trained, metrics | {"losses/grad_norm": norm}


def descend(rule: optax.GradientTransformation, rate: jax.Array, trained: T, gradient: PyTree) -> tuple[T, jax.Array]:
    """One step along the rule's direction.  Also returns the gradient's global norm, before clipping."""
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
        # Where nothing is clipped, a norm that is not finite changes nothing.
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
    """The root of the sum of all squares.  Leaves [...] -> float32."""
    # Products: what XLA makes of optax's sums of squares goes over memory twice.
    return jnp.sqrt(sum(jnp.vdot(x, x) for x in jax.tree.leaves(tree)))
