"""Batches that lie over shards: what minibatches are made of, and numbers about all shards together."""

import math
from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from cleanba.algorithm import Metrics
from cleanba.config import PolicyGradient
from cleanba.ops.losses import kl_estimate
from cleanba.rollout import PyTree
from cleanba.shards import ShardAxis
from cleanba.specs import EnvSpec

AT_ONCE = 2**25  # bytes of observations: 1,188 Atari images, of which the ResNet's layers take 1.6 GB
CACHED = 2**21  # bytes of observations: 74 Atari images, whose layers' outputs stay in a processor's caches


def steps_at_once(obs: PyTree) -> int:
    """Steps of a shard's observations [T, B, ...] that a GPU may see at once, so that it is busy and does not run over.

    As even parts as possible.  Decided by the shapes of one shard alone, which every placement has in common.
    """
    leaves = jax.tree.leaves(obs)
    steps, size = leaves[0].shape[0], sum(x.size * x.dtype.itemsize for x in leaves)
    parts = min(steps, -(-size // AT_ONCE))
    return -(-steps // parts)


def count_pieces(e: PolicyGradient, spec: EnvSpec, platform: str, index: jax.Array) -> int:
    """Into how many equal pieces a shard's minibatch of sequences is cut, one of them computed at a time.

    Images on CPUs: as many as bring those of a piece closest to `CACHED`, so that what the layers make of them stays in
    caches.  Else one: small pieces would leave a GPU idle, and an LSTM's products small.  index [..., T', B'].
    """
    if platform != "cpu" or not spec.shows_images or e.core != "none":
        return 1
    steps, many = index.shape[-2:]
    size = sum(math.prod(x.shape) * np.dtype(x.dtype).itemsize for x in jax.tree.leaves(spec.obs))
    distance = lambda n: abs(math.log(many // n * steps * size / CACHED))
    return min((n for n in range(1, many + 1) if many % n == 0), key=distance)


M = TypeVar("M")


def in_pieces(take: Callable[[jax.Array, jax.Array], M], t: jax.Array, b: jax.Array, pieces: int) -> M:
    """What `take(t, b)` gives for each of so many pieces of a minibatch's indices [T', B'].  Leaves [pieces, ...]."""
    cut = lambda x: jnp.moveaxis(x.reshape(x.shape[0], pieces, -1), 1, 0)
    return jax.vmap(take)(cut(t), cut(b))


def shuffled(key: jax.Array, size: int) -> jax.Array:
    """The numbers 0, 1, ... `size` - 1 in a random order.  [size] int32.

    Random bits above, the number below, and one sort of single words, which CPUs do nine times as fast as
    `jax.random.permutation`'s two sorts of pairs.  Two numbers whose random bits are the same stay in their order: of
    15,360, which leave 18 bits, one pair in 262,144.
    """
    below = (size - 1).bit_length()
    if below > 20:  # too few bits would be left
        return jax.random.permutation(key, size)
    number = jnp.arange(size, dtype=jnp.uint32)
    words = (jax.random.bits(key, (size,), jnp.uint32) << below) | number
    return (jax.lax.sort(words) & ((1 << below) - 1)).astype(jnp.int32)


def sequences(steps: int, env: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Minibatches of all steps of some environments.  [M, B'] -> time and environment indices [M, T, B']."""
    m, b = env.shape
    time = jnp.arange(steps)[None, :, None]
    return jnp.broadcast_to(time, (m, steps, b)), jnp.broadcast_to(env[:, None], (m, steps, b))


def count_valid(shards: ShardAxis, valid: jax.Array, t: jax.Array, b: jax.Array) -> jax.Array:
    """Valid transitions of each minibatch, all shards together, or 1 where there are none: means divide by it.

    valid [K', T, B]; t, b [K', M, T', B'] -> [M] int32, which counts exactly where float32 would stop at 2^24.
    """
    of_shard = lambda valid, t, b: valid[t, b].sum((-2, -1), dtype=jnp.int32)
    return jnp.maximum(shards.sum(shards.map(of_shard, valid, t, b)), 1)


def count_steps(shards: ShardAxis, valid: jax.Array) -> jax.Array:
    """Valid steps of all shards together, or 1 where there are none, as `count_valid`.  [K', T, B] -> [] int32."""
    return jnp.maximum(shards.sum(shards.map(lambda valid: valid.sum(dtype=jnp.int32), valid)), 1)


def explained_variance(shards: ShardAxis, value: jax.Array, target: jax.Array, valid: jax.Array) -> jax.Array:
    """1 - Var[target - value] / Var[target] over valid transitions; how well values predicted their targets.

    Where targets do not vary it is 1 if the errors do not either, else 0, as scikit-learn's.  [K', T, B] each -> [].
    Two passes: the difference of mean square and squared mean has no digits left where means are large.
    """
    count = count_steps(shards, valid)

    def mean(value: jax.Array, target: jax.Array, valid: jax.Array) -> jax.Array:
        x = jnp.stack([target - value, target])
        return jnp.where(valid, x, 0.0).sum((1, 2)) / count

    means = shards.sum(shards.map(mean, value, target, valid))

    def moments(value: jax.Array, target: jax.Array, valid: jax.Array) -> jax.Array:
        x = jnp.where(valid, jnp.stack([target - value, target]) - means[:, None, None], 0.0)
        return jnp.stack([x.sum((1, 2)), (x**2).sum((1, 2))]) / count

    def combine(means: jax.Array, moments: jax.Array) -> jax.Array:
        rest, square = moments  # the rest is what rounding left of a mean of zero (Chan et al. 1983, eq. 1.7)
        variance = square - rest**2
        rounding = (jnp.finfo(variance.dtype).eps * means) ** 2
        error, of_target = jnp.where(variance <= rounding, 0.0, variance)  # NaN stays NaN
        constant = of_target == 0
        ratio = error / jnp.where(constant, 1.0, of_target)
        return jnp.where(constant, jnp.where(error == 0, 1.0, 0.0), 1.0 - ratio)

    return shards.isolate(combine, means, shards.sum(shards.map(moments, value, target, valid)))


LAG_LOGGED = {
    "stats/lag_kl": "estimate of KL(policy that acted || newest policy) over the rollout, before the update",
    "stats/lag_ratio_mean": "mean of the importance ratio newest / acted; near 1",
    "stats/lag_ratio_max": "the largest of these ratios",
    "stats/lag_effective_samples": "share of the rollout that counts once weighted by the ratio; 1 where both agree",
}
"""What `version_distance` logs."""


def version_distance(shards: ShardAxis, log_ratio: jax.Array, valid: jax.Array) -> Metrics:
    """How far the policy that learns is from the one that acted, over the valid steps of all shards.

    With w = pi_prox / pi_b of the actions taken: an estimate of KL(pi_b || pi_prox), mean and maximum of w, and the
    share of the samples that counts, (sum w)^2 / (N sum w^2) (Kong 1992).  log_ratio = log w, valid [K', T, B].
    """
    log_ratio = jnp.clip(log_ratio, -20.0, 20.0)  # squares stay finite

    def of_shard(log_ratio: jax.Array, valid: jax.Array) -> tuple[jax.Array, jax.Array]:
        ratio = jnp.where(valid, jnp.exp(log_ratio), 0.0)
        kl = jnp.where(valid, kl_estimate(log_ratio), 0.0)
        return jnp.stack([ratio.sum(), (ratio**2).sum(), kl.sum()]), ratio.max()

    sums, most = shards.map(of_shard, log_ratio, valid)

    def combine(sums: jax.Array, count: jax.Array) -> Metrics:
        ratio, square, kl = sums
        inverse = 1.0 / count  # not two quotients: see `moments.add_batch`
        return {
            "stats/lag_kl": kl * inverse,
            "stats/lag_ratio_mean": ratio * inverse,
            "stats/lag_effective_samples": ratio**2 / jnp.maximum(count * square, 1e-30),
        }

    return shards.isolate(combine, shards.sum(sums), count_steps(shards, valid)) | {
        "stats/lag_ratio_max": shards.max(most)
    }
