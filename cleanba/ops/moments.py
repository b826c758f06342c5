"""Running means and variances, updated batch by batch."""

from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp

from cleanba.shards import ShardAxis

UNIT = 2**24  # up to here a float32 counts exactly


class Moments(NamedTuple):
    """Mean and variance of everything so far, for each element [...]; 0 and 1 before the first batch."""

    counted: jax.Array  # [2] int32: the count counted[0] * 2^24 + counted[1], exact at any size
    mean: jax.Array  # [...]
    variance: jax.Array  # [...]  of the population, divided by the count


def no_moments(shape: tuple[int, ...]) -> Moments:
    """The moments before the first batch, for elements of this shape."""
    return Moments(jnp.zeros(2, jnp.int32), jnp.zeros(shape), jnp.ones(shape))


def add_batch(shards: ShardAxis, moments: Moments, x: jax.Array, valid: jax.Array) -> Moments:
    """Add a batch: the elements of x [K', N1, N2, ...] where `valid` [K', N1, N2], over all shards, in their order.

    It takes two passes, over x and over (x - mean)^2, as E[x^2] - E[x]^2 loses all digits if the mean is large and the
    variance small.  The second pass also removes the rounding error of the mean.
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
        # Not two divisions by count: XLA turns all but the last of them into products with its inverse, and which one
        # is last depends on the order of this function's arguments, which changes with the devices.
        inverse = 1.0 / jnp.maximum(count, 1)
        return merge(moments, count, mean + rest * inverse, squares * inverse)

    return shards.isolate(merged, moments, count, mean, rest, squares)


def merge(a: Moments, count: jax.Array, mean: jax.Array, variance: jax.Array) -> Moments:
    """The moments of `a` together with `count` ([] int32) more elements of this mean and variance, [...] each.

    (Chan et al. 1983, eq. 2.1.)
    """
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
