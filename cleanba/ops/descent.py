"""Gradient descent by optax's rules, written so that XLA makes few passes over memory."""

import math
from typing import Any, Protocol, Self, TypeVar

import jax
import jax.numpy as jnp
import optax

from cleanba.rollout import PyTree


class Trained(Protocol):
    """What an optimiser trains: parameters, and the state of their optimiser.  Any NamedTuple with these fields."""

    @property
    def params(self) -> PyTree: ...
    @property
    def optimiser(self) -> PyTree: ...
    def _replace(self, *, params: Any = ..., optimiser: Any = ...) -> Self: ...


T = TypeVar("T", bound=Trained)


def clipped(rule: optax.GradientTransformation, max_norm: float) -> optax.GradientTransformation:
    """The rule, for gradients that are shortened to that global norm first."""
    return rule if max_norm == math.inf else optax.chain(optax.clip_by_global_norm(max_norm), rule)


def descend(rule: optax.GradientTransformation, rate: jax.Array, trained: T, gradient: PyTree) -> tuple[T, jax.Array]:
    """One step of length `rate` [] along the rule's direction; also the gradient's global norm [], before clipping."""
    direction, optimiser_state = rule.update(gradient, trained.optimiser, trained.params)
    params = jax.tree.map(lambda p, d: p - rate * d, trained.params, direction)
    return trained._replace(params=params, optimiser=optimiser_state), global_norm(gradient)


def global_norm(tree: PyTree) -> jax.Array:
    """The root of the sum of all squares.  Leaves [...] -> float32 []."""
    # Dot products: XLA compiles optax's sums of squares to two passes over memory.
    return jnp.sqrt(sum(jnp.vdot(x, x) for x in jax.tree.leaves(tree)))


def scale_by_radam(b1: float, b2: float, eps: float) -> optax.GradientTransformation:
    """Rectified Adam (Liu et al. 2020, algorithm 2): Adam's step times `rectification`, or at first momentum alone.

    Its state is that of `optax.scale_by_adam`.
    """
    adam = optax.scale_by_adam(b1, b2, eps)

    def update(gradient: PyTree, state: optax.OptState, params: PyTree = None) -> tuple[PyTree, optax.OptState]:
        direction, state = adam.update(gradient, state, params)
        factor = rectification(state.count, b2)
        momentum = jax.tree.map(lambda m: m / (1 - b1**state.count), state.mu)
        step = lambda d, m: jnp.where(factor > 0, factor * d, m)
        return jax.tree.map(step, direction, momentum), state

    return optax.GradientTransformation(adam.init, update)


def rectification(count: jax.Array, b2: float) -> jax.Array:
    """The factor r_t of rectified Adam's step number `count`, 1, 2, ...; 0 while rho_t, below, is 5 or less.

    (Liu et al. 2020, algorithm 2, with the threshold 5 of PyTorch and optax; the paper's is 4.)

        r_t = sqrt((rho_t - 4) (rho_t - 2) rho_inf / ((rho_inf - 4) (rho_inf - 2) rho_t))
        rho_t = rho_inf - 2 t b2^t / (1 - b2^t),   rho_inf = 2 / (1 - b2) - 1

    [] int32 -> [].
    """
    most = 2 / (1 - b2) - 1
    # b2^t / (1 - b2^t), in a form that keeps the digits that 1 - b2^t would lose for small t
    rho = most - 2 * count / jnp.expm1(-count * math.log(b2))
    # The first t whose rho_t is above 5 is known.  In float32, rho_5 might come out on either side.
    rho_of = lambda t: most - 2 * t / math.expm1(-t * math.log(b2))
    late = next((t for t in range(1, 100) if rho_of(t) > 5), 100)
    above = jnp.maximum(rho, 5.0)
    factor = jnp.sqrt((above - 4) * (above - 2) * most / ((most - 4) * (most - 2) * above))
    return jnp.where(count >= late, factor, 0.0)
