"""Running means and variances of what streams by, updated by one batch after the other."""

from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp

from cleanba.shards import ShardAxis

UNIT = 2**24  # up to here a float32 counts exactly


class Moments(NamedTuple):
    """Mean and variance of everything so far, each element [...] apart; 0 and 1 before there was anything."""

    counted: jax.Array  # [2] int32: how many, as counted[0] * 2^24 + counted[1]; exact at any size
    mean: jax.Array  # [...]
    variance: jax.Array  # [...]  of the population: divided by the count


def no_moments(shape: tuple[int, ...]) -> Moments:
    """Moments of nothing yet."""
    return Moments(jnp.zeros(2, jnp.int32), jnp.zeros(shape), jnp.ones(shape))


def add_batch(shards: ShardAxis, moments: Moments, x: jax.Array, valid: jax.Array) -> Moments:
    """Moments with a batch added: x [K', N1, N2, ...] where `valid` [K', N1, N2], all shards together in their order.

    In two passes: sums of x, then of (x - mean)^2; as sums of x^2 less squared sums, small variances of large numbers
    would cancel.  What rounding left in the mean, the second pass sees and takes out.
    """
    chex.assert_equal_shape_prefix([x, valid], 3)

    def total(about: jax.Array, power: int) -> jax.Array:
        def of_shard(x: jax.Array, valid: jax.Array) -> jax.Array:
            mask = valid.reshape(*valid.shape, *(1,) * (x.ndim - valid.ndim))
            return jnp.where(mask, (x.astype(jnp.float32) - about) ** power, 0.0).sum((0, 1))

        return shards.sum(shards.map(of_shard, x, valid))

    count = shards.sum(shards.map(lambda valid: valid.sum(dtype=jnp.int32), valid))
    first = total(moments.mean, 1)
    shifted = lambda about, first, n: about + first / jnp.maximum(n, 1)
    mean = shards.isolate(shifted, moments.mean, first, count)
    rest, squares = total(mean, 1), total(mean, 2)

    def merged(moments: Moments, count: jax.Array, mean: jax.Array, rest: jax.Array, squares: jax.Array) -> Moments:
        # Not two quotients: of those with one divisor XLA makes all but one, whichever it comes to last, products with
        # its inverse; and that hangs on the order of this function's arguments, which the number of devices changes.
        inverse = 1.0 / jnp.maximum(count, 1)
        return merge(moments, count, mean + rest * inverse, squares * inverse)

    return shards.isolate(merged, moments, count, mean, rest, squares)


def merge(a: Moments, count: jax.Array, mean: jax.Array, variance: jax.Array) -> Moments:
    """Moments of `a` and of `count` more with these moments, together (Chan et al. 1983, eq. 2.1)."""
    chex.assert_equal_shape([a.mean, a.variance, mean, variance])
    before = a.counted[0].astype(jnp.float32) * UNIT + a.counted[1]
    share = count / jnp.maximum(before + count, 1.0)
    apart = mean - a.mean
    low = a.counted[1] + count
    both = Moments(
        jnp.stack([a.counted[0] + low // UNIT, low % UNIT]),
        a.mean + share * apart,
        a.variance + share * (variance - a.variance + (1 - share) * jnp.square(apart)),
    )
    begins = (before == 0) & (count > 0)
    return Moments(both.counted, jnp.where(begins, mean, both.mean), jnp.where(begins, variance, both.variance))
