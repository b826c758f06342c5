"""Acting on action values: the best legal action or, with probability epsilon, a random one."""

from typing import Protocol

import jax
import jax.numpy as jnp

from cleanba.networks.encoder import legal_actions
from cleanba.ops.distributions import Categorical, masked
from cleanba.rollout import Obs
from cleanba.specs import EnvSpec


class Explores(Protocol):
    """The fields of an experiment whose probability of a random action falls linearly."""

    @property
    def start_e(self) -> float: ...
    @property
    def end_e(self) -> float: ...
    @property
    def exploration_fraction(self) -> float: ...
    @property
    def num_updates(self) -> int: ...


def falling_epsilon(e: Explores, updates: jax.Array) -> jax.Array:
    """The probability of a random action after `updates` updates.  [] int32 -> []."""
    done = jnp.minimum(updates / max(1.0, e.exploration_fraction * e.num_updates), 1.0)
    return e.start_e + (e.end_e - e.start_e) * done


def legal_values(spec: EnvSpec, values: jax.Array, obs: Obs) -> jax.Array:
    """Action values [..., A], with -inf for actions that are illegal in obs [..., *shape]."""
    legal = legal_actions(spec.obs, obs)
    return values if legal is None else masked(values, legal.reshape(values.shape))


def epsilon_greedy(spec: EnvSpec, values: jax.Array, obs: Obs, epsilon: jax.Array | float, key: jax.Array) -> jax.Array:
    """The best legal action, or with probability `epsilon` ([] or [B]) any legal one, each as likely as the others.

    values [B, A], obs [B, ...] -> action [B] int32.
    """
    best = greedy(spec, values, obs)
    whether_key, which_key = jax.random.split(key)
    if legal_actions(spec.obs, obs) is None:
        anything = jax.random.randint(which_key, best.shape, 0, spec.num_actions, jnp.int32)
    else:
        even = legal_values(spec, jnp.zeros((*best.shape, spec.num_actions)), obs)
        anything = Categorical(even).sample(which_key)
    return jnp.where(jax.random.uniform(whether_key, best.shape) < epsilon, anything, best)


def greedy(spec: EnvSpec, values: jax.Array, obs: Obs) -> jax.Array:
    """The best legal action.  values [..., A], obs [..., *shape] -> [...] int32."""
    return legal_values(spec, values, obs).argmax(-1).astype(jnp.int32)
