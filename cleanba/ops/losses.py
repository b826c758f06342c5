"""Per-transition losses.  None of them takes a mean: the caller weights by `valid` and sums in shard order."""

import chex
import jax
import jax.numpy as jnp
from jax import lax


def log_prob_and_entropy(logits: jax.Array, action: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Of a categorical policy.  logits [..., A], action [...] int -> log pi(action) [...], entropy [...]."""
    chex.assert_equal_shape_prefix([logits, action], action.ndim)
    log_pi = jax.nn.log_softmax(logits)
    chosen = lax.platform_dependent(log_pi, action.astype(jnp.int32), cpu=by_index, default=by_comparison)
    # A masked action has log pi = -inf; it must count as 0 here, and its gradient too.
    possible = ~jnp.isneginf(log_pi)
    log_pi = jnp.where(possible, log_pi, 0.0)
    return chosen, -jnp.where(possible, jnp.exp(log_pi) * log_pi, 0.0).sum(-1)


def by_index(x: jax.Array, index: jax.Array) -> jax.Array:
    """x[..., index].  [..., A], [...] -> [...]."""
    return jnp.take_along_axis(x, index[..., None], axis=-1)[..., 0]


def by_comparison(x: jax.Array, index: jax.Array) -> jax.Array:
    """The same numbers, without the scatter that is the gradient of an index: a deterministic GPU sorts for it.

    The sum is of one number and zeros.  Where the others are -inf, `where` keeps them out, and out of the gradient.
    CPUs keep the index: compiled with what is around it, this would round the last bit otherwise.
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


def kl_estimate(log_ratio: jax.Array) -> jax.Array:
    """The low-variance estimate (r - 1) - log r of KL(old || new) at old samples (Schulman 2020).  [...] -> [...]."""
    return jnp.expm1(log_ratio) - log_ratio
