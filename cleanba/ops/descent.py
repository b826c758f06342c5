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
    # Products: what XLA makes of optax's sums of squares goes over memory twice.
    return jnp.sqrt(sum(jnp.vdot(x, x) for x in jax.tree.leaves(tree)))
