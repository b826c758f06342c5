"""Losses of single transitions.  The caller weights them by `valid` and sums them in shard order."""

import chex
import jax
import jax.numpy as jnp
from jax import lax


def log_prob_and_entropy(logits: jax.Array, action: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Categorical policy: logits [..., A], action [...] int -> log pi(action) [...], entropy -E[log pi] [...]."""
    chex.assert_equal_shape_prefix([logits, action], action.ndim)
    log_pi = jax.nn.log_softmax(logits)
    chosen = lax.platform_dependent(log_pi, action.astype(jnp.int32), cpu=by_index, default=by_comparison)
    # A masked action has log pi = -inf; it counts as 0 here, and so does its gradient.
    possible = ~jnp.isneginf(log_pi)
    log_pi = jnp.where(possible, log_pi, 0.0)
    return chosen, -jnp.where(possible, jnp.exp(log_pi) * log_pi, 0.0).sum(-1)


def by_index(x: jax.Array, index: jax.Array) -> jax.Array:
    """x[..., index].  [..., A], [...] -> [...]."""
    return jnp.take_along_axis(x, index[..., None], axis=-1)[..., 0]


def by_comparison(x: jax.Array, index: jax.Array) -> jax.Array:
    """x[..., index], whose gradient needs no scatter: a deterministic scatter on a GPU sorts first.

    [..., A], [...] -> [...].  It sums one number and zeros.  `where` keeps other numbers that are -inf out of the sum
    and the gradient.  `log_prob_and_entropy` uses `by_index` on CPUs, as the compiler's fusion of this sum would
    change the last bit there.
    """
    return jnp.where(jnp.arange(x.shape[-1]) == index[..., None], x, 0.0).sum(-1)


def ppo_policy_loss(log_ratio: jax.Array, advantage: jax.Array, clip_coef: float) -> jax.Array:
    """-min(r A, clip(r, 1 - eps, 1 + eps) A) (Schulman et al. 2017, eq. 7).  [...], [...] -> [...]."""
    chex.assert_equal_shape([log_ratio, advantage])
    ratio = jnp.exp(log_ratio)
    return -jnp.minimum(ratio * advantage, jnp.clip(ratio, 1 - clip_coef, 1 + clip_coef) * advantage)


def squared_error(prediction: jax.Array, target: jax.Array) -> jax.Array:
    """(prediction - target)^2 / 2.  [...], [...] -> [...]."""
    chex.assert_equal_shape([prediction, target])
    return 0.5 * jnp.square(prediction - target)


def clipped_squared_error(prediction: jax.Array, before: jax.Array, target: jax.Array, clip_coef: float) -> jax.Array:
    """max((V - R)^2, (clip(V, V_before - eps, V_before + eps) - R)^2) / 2.  [...], [...], [...] -> [...].

    PPO's value loss in Baselines: no gain from moving a value by more than eps in one update (Huang et al. 2022, "The
    37 Implementation Details of Proximal Policy Optimization", detail 9).
    """
    chex.assert_equal_shape([prediction, before, target])
    near = before + jnp.clip(prediction - before, -clip_coef, clip_coef)
    return jnp.maximum(squared_error(prediction, target), squared_error(near, target))


def kl_estimate(log_ratio: jax.Array) -> jax.Array:
    """The low-variance estimate (r - 1) - log r of KL(old || new) at old samples (Schulman 2020).  [...] -> [...]."""
    return jnp.expm1(log_ratio) - log_ratio
