"""Minibatches of a batch that is split into shards, and statistics over all shards."""

import math
from collections.abc import Callable
from typing import Any, Protocol, Self, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from cleanba.algorithm import Metrics
from cleanba.config import FromRollouts, Recurrent
from cleanba.ops.losses import kl_estimate
from cleanba.rollout import Obs, PyTree, Rollout
from cleanba.shards import ShardAxis
from cleanba.specs import EnvSpec

AT_ONCE = 2**25  # bytes of observations: 1,188 Atari images, for which the ResNet's layers take 1.6 GB
CACHED = 2**21  # bytes of observations: 74 Atari images, whose layers' outputs stay in a processor's caches


def steps_at_once(obs: Obs) -> int:
    """How many steps of a shard's observations [T, B, ...] a GPU processes at once: enough to be busy, and to fit.

    Parts are as even as possible.  They depend on the shapes of one shard alone, which all placements share.
    """
    leaves = jax.tree.leaves(obs)
    steps, size = leaves[0].shape[0], sum(x.size * x.dtype.itemsize for x in leaves)
    parts = min(steps, -(-size // AT_ONCE))
    return -(-steps // parts)


class HasCarry(Protocol):
    """What a network computes from a sequence: any NamedTuple of arrays [T, B, ...] and the carry after them."""

    @property
    def carry(self) -> PyTree: ...
    def _replace(self, *, carry: Any) -> Self: ...


Out = TypeVar("Out", bound=HasCarry)


def outputs_over_time(
    e: Recurrent, platform: str, outputs: Callable[[Obs, jax.Array, PyTree], Out], rollout: Rollout
) -> Out:
    """`outputs(obs, first, carry)` of one shard's rollout [T+1, B, ...], some steps at a time.

    All at once, the activations would take gigabytes.  The carry is only returned where all steps fit in one part.
    """
    count = len(rollout.first)
    if platform != "cpu":
        at_once = steps_at_once(rollout.obs)
    else:
        at_once = 1 if e.core == "none" else count  # more at a time is not faster, even for few environments

    def some(carry: PyTree, start: jax.Array, steps: int) -> tuple[PyTree, Out]:
        part = lambda x: lax.dynamic_slice_in_dim(x, start, steps)
        out = outputs(jax.tree.map(part, rollout.obs), part(rollout.first), carry)
        return out.carry, out._replace(carry=())

    if at_once == count:
        return outputs(rollout.obs, rollout.first, rollout.carry)
    whole, rest = divmod(count, at_once)
    carry, out = lax.scan(lambda carry, i: some(carry, i * at_once, at_once), rollout.carry, jnp.arange(whole))
    out = jax.tree.map(lambda x: x.reshape(whole * at_once, *x.shape[2:]), out)
    last = [some(carry, jnp.int32(count - rest), rest)[1]] if rest else []
    return jax.tree.map(lambda *x: jnp.concatenate(x), out, *last)


def count_pieces(e: Recurrent, spec: EnvSpec, platform: str, index: jax.Array) -> int:
    """The number of equal pieces that a shard's minibatch is computed in, one after the other.  index [..., T', B'].

    For images on CPUs, pieces are as close as possible to `CACHED` bytes, so that the layers' outputs stay in caches.
    Otherwise there is one: small pieces would leave a GPU idle, and make an LSTM's matrix products small.
    """
    if platform != "cpu" or not spec.shows_images or e.core != "none":
        return 1
    steps, many = index.shape[-2:]
    size = sum(math.prod(x.shape) * np.dtype(x.dtype).itemsize for x in jax.tree.leaves(spec.obs))
    distance = lambda n: abs(math.log(many // n * steps * size / CACHED))
    return min((n for n in range(1, many + 1) if many % n == 0), key=distance)


M = TypeVar("M")


def in_pieces(take: Callable[[jax.Array, jax.Array], M], t: jax.Array, b: jax.Array, pieces: int) -> M:
    """`take(t, b)` for each piece of a minibatch's indices [T', B'].  Returns leaves [pieces, ...]."""
    cut = lambda x: jnp.moveaxis(x.reshape(x.shape[0], pieces, -1), 1, 0)
    return jax.vmap(take)(cut(t), cut(b))


def shuffled(key: jax.Array, size: int) -> jax.Array:
    """The numbers 0, 1, ... `size` - 1 in a random order.  [size] int32.

    Each number becomes a word with random high bits and the number in the low bits, and the words are sorted: on CPUs
    nine times as fast as `jax.random.permutation`, which sorts pairs twice.  Numbers with equal random bits keep their
    order: of 15,360 numbers 18 random bits remain, so two given numbers are equal with a probability of 2^-18.
    """
    below = (size - 1).bit_length()
    if below > 20:  # too few random bits would be left
        return jax.random.permutation(key, size)
    number = jnp.arange(size, dtype=jnp.uint32)
    words = (jax.random.bits(key, (size,), jnp.uint32) << below) | number
    return (jax.lax.sort(words) & ((1 << below) - 1)).astype(jnp.int32)


def draw_minibatches(e: FromRollouts, key: jax.Array, steps: int, envs: int) -> tuple[jax.Array, jax.Array]:
    """Time and environment indices [M, T', B'] of the minibatches of one epoch over one shard [T, B].

    Single transitions, T' = 1; with a core all steps of some environments, T' = T.
    """
    m = e.num_minibatches
    if e.core != "none":
        return sequences(steps, shuffled(key, envs).reshape(m, envs // m))
    index = shuffled(key, steps * envs).reshape(m, 1, steps * envs // m)
    return index // envs, index % envs


def draw_epoch(
    e: FromRollouts, shards: ShardAxis, key: jax.Array, number: jax.Array, valid: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Time and environment indices [K', M, T', B'] of the minibatches of epoch `number`, drawn for each shard.

    valid [K', T, B] has the shape.  The key depends on the numbers of epoch and shard, never on the device.
    """

    def of_shard(valid: jax.Array, shard: jax.Array) -> tuple[jax.Array, jax.Array]:
        shard_key = jax.random.fold_in(jax.random.fold_in(key, number), shard)
        return draw_minibatches(e, shard_key, *valid.shape)

    return shards.map(of_shard, valid, shards.index)


def sequences(steps: int, env: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Minibatches of all T steps of some environments.  env [M, B'] -> time and environment indices [M, T, B']."""
    m, b = env.shape
    time = jnp.arange(steps)[None, :, None]
    return jnp.broadcast_to(time, (m, steps, b)), jnp.broadcast_to(env[:, None], (m, steps, b))


def count_valid(shards: ShardAxis, valid: jax.Array, t: jax.Array, b: jax.Array) -> jax.Array:
    """The number of valid transitions of each minibatch over all shards; 1 where there are none, as means divide by it.

    valid [K', T, B]; t, b [K', M, T', B'] -> [M] int32, which is exact, while float32 is not above 2^24.
    """
    of_shard = lambda valid, t, b: valid[t, b].sum((-2, -1), dtype=jnp.int32)
    return jnp.maximum(shards.sum(shards.map(of_shard, valid, t, b)), 1)


def count_steps(shards: ShardAxis, valid: jax.Array) -> jax.Array:
    """The number of valid steps of all shards, or 1 where there are none.  [K', T, B] -> [] int32."""
    return jnp.maximum(shards.sum(shards.map(lambda valid: valid.sum(dtype=jnp.int32), valid)), 1)


def explained_variance(shards: ShardAxis, value: jax.Array, target: jax.Array, valid: jax.Array) -> jax.Array:
    """1 - Var[target - value] / Var[target] over valid transitions: how well values predict targets.

    If targets do not vary it is 1 where errors do not either, else 0, as in scikit-learn.  [K', T, B] each -> [].
    It takes two passes, as the mean square minus the squared mean loses all digits where means are large.
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
        rest, square = moments  # rest: the rounding error of a mean of zero (Chan et al. 1983, eq. 1.7)
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
    "stats/lag_effective_samples": "effective sample size of the ratios, divided by the number of steps; 1: no lag",
}
"""What `version_distance` logs."""


def version_distance(shards: ShardAxis, log_ratio: jax.Array, valid: jax.Array) -> Metrics:
    """How far the policy that learns is from the one that acted, over the valid steps of all shards.

    With w = pi_prox / pi_b of the actions taken: an estimate of KL(pi_b || pi_prox), the mean and maximum of w, and the
    share of effective samples, (sum w)^2 / (N sum w^2) (Kong 1992).  log_ratio = log w, valid [K', T, B] -> scalars.
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
