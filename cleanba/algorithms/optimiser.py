"""What an actor-critic's learner keeps, and one step of gradient descent."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from cleanba.config import Experiment
from cleanba.rollout import PyTree


class State(NamedTuple):
    """A learner's state: all that an update changes."""

    params: PyTree
    optimiser: PyTree
    updates: jax.Array  # int32: updates done


def learning_rate(e: Experiment, updates: jax.Array) -> jax.Array:
    """The learning rate of the next update: constant, or falling linearly to 0 over the run."""
    # Never a constant that the compiler knows: it would fold it into the step, differently on different placements.
    left = 1.0 - updates / e.num_updates if e.anneal_lr else jnp.where(updates >= 0, 1.0, jnp.nan)
    return e.learning_rate * left


def descend(
    optimiser: optax.GradientTransformation, rate: jax.Array, state: State, gradient: PyTree
) -> tuple[State, jax.Array]:
    """One step along the optimiser's direction.  Also returns the gradient's global norm, before clipping."""
    direction, optimiser_state = optimiser.update(gradient, state.optimiser, state.params)
    params = jax.tree.map(lambda p, d: p - rate * d, state.params, direction)
    return state._replace(params=params, optimiser=optimiser_state), optax.global_norm(gradient)
