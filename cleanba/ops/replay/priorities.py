"""Priorities: places of a memory are drawn in exact proportion to them (Schaul et al. 2016, "proportional").

A place is what has one priority: a step, or a sequence of steps.  A priority is a whole number of units of 1/4096, at
most 2^24 - 1 of them.  Whole numbers add up to the same sum in any order, so every placement draws the same places, and
a place is drawn with probability p_i / sum_j p_j without any rounding.  Places with priority 0 are never drawn.

Their sums over blocks of 256 places are stored, too:

    values    0  4096  4096  0 ...  |  8192  0  0  100 ...  |  ...
    sums                      8192  |                 8292  |  ...

A draw picks a uniform whole number below the total.  Prefix sums say in which place it falls: first over
groups of 64 blocks, then over a group's blocks, then within a block.  So a draw reads one sum for every 256 places,
64 more, and 256 places; a change costs the same in a memory of any size.

A total has up to 48 bits, but JAX computes with 32, so sums of blocks are two words: `high` counts 2^16 units, and
`low`, below 2^16, the rest.

`draw` and `assign` work on the memory of a device, whose leaves are [K', ...] for its K' shards, and address the i-th
shard in place.  They only add and compare whole numbers.  `importance` and `in_units` compute with real numbers, and
the caller isolates them (`shards.py`).
"""

from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from cleanba.errors import UsageError

UNIT = 2**12  # units in a priority of 1
MOST = 2**24 - 1  # the greatest priority, in units: a block's sum stays below 2^32
BLOCK = 256  # places
GROUP = 64  # blocks
PART = 16  # places: prefix sums within a block are taken over its parts, then within one
MOST_BLOCKS = 2**16  # of one shard: prefix sums of words of 16 bits stay below 2^32
TRIES = 24  # numbers tried for each draw; each is below the total with probability 1/2 or more

HALF = np.uint32(16)  # bits of `low`
LOW = np.uint32(2**16 - 1)


class Words(NamedTuple):
    """Whole numbers below 2^48: high * 2^16 + low, with low < 2^16."""

    high: jax.Array  # [...] uint32
    low: jax.Array  # [...] uint32


class Priorities(NamedTuple):
    """The priorities of one shard.  A device's are those of K' shards: every leaf gains a leading axis [K', ...]."""

    values: jax.Array  # [R, 256] uint32: place j is [j // 256, j % 256]
    sums: jax.Array  # [R] uint32: of each row of `values`
    nonzero: jax.Array  # int32: places whose priority is not 0
    most: jax.Array  # uint32: the greatest priority that any place ever had, which new places begin with


class Drawn(NamedTuple):
    """N places drawn from one shard."""

    place: jax.Array  # [N] int32
    priority: jax.Array  # [N] uint32
    found: jax.Array  # [N] bool: false where no place was found; to be masked
    total: Words  # []: the sum of all priorities
    nonzero: jax.Array  # int32: places whose priority is not 0


def no_priorities(places: int) -> Priorities:
    """Priorities of 0 for one shard's places.

    Raises:
        UsageError: there are more places than can be counted.
    """
    blocks = -(-places // (GROUP * BLOCK)) * GROUP
    if blocks > MOST_BLOCKS:
        raise UsageError(
            f"buffer_size gives a shard {places} priorities, but it can have {MOST_BLOCKS * BLOCK}; raise --num-shards "
            "or lower --buffer-size"
        )
    values = jnp.zeros((blocks, BLOCK), jnp.uint32)
    return Priorities(values, jnp.zeros(blocks, jnp.uint32), jnp.int32(0), jnp.uint32(UNIT))


def random_words(key: jax.Array, batch: int) -> jax.Array:
    """The random words that `batch` draws need, whatever the priorities.  [TRIES, 2, N] uint32."""
    return jax.random.bits(key, (TRIES, 2, batch), jnp.uint32)


def draw(p: Priorities, i: jax.Array, words: jax.Array) -> Drawn:
    """Draw N places of this device's i-th shard with replacement, each with probability p_i / sum_j p_j.

    words [TRIES, 2, N] are `random_words`.  An element finds no place with probability 2^-24 at most, or if all
    priorities are 0.
    """
    sums = Words(p.sums[i] >> HALF, p.sums[i] & LOW)
    groups = jax.tree.map(lambda x: x.reshape(-1, GROUP), sums)
    of_groups = jax.tree.map(lambda x: x.sum(1, dtype=jnp.uint32)[None], groups)
    total = jax.tree.map(lambda x: x[0, -1], _prefix_sums(of_groups))
    number, found = _below(words, total)
    group, rest = _find(of_groups, number)
    block, rest = _find(jax.tree.map(lambda x: x[group], groups), rest)
    block = group * GROUP + block
    values = p.values[i, block]
    within = _place_within(values, (rest.high << HALF) + rest.low)
    return Drawn(block * BLOCK + within, _pick(values, within), found, total, p.nonzero[i])


def _below(words: jax.Array, total: Words) -> tuple[Words, jax.Array]:
    """Whole numbers below a total, each equally likely, [N]; and whether one was found, [N] bool.

    A number is made of as many random bits as the total has, so all are equally likely.  The first one below the total
    is taken, of those in words [TRIES, 2, N].
    """
    ones_of_low = jnp.where(total.high > 0, LOW, _all_ones(total.low))
    tried = Words(words[:, 0] & _all_ones(total.high), words[:, 1] & ones_of_low)
    fits = _less(tried, total)
    first = jnp.argmax(fits, axis=0)[None]
    pick = lambda x: jnp.take_along_axis(x, first, axis=0)[0]
    return jax.tree.map(pick, tried), pick(fits)


def _all_ones(x: jax.Array) -> jax.Array:
    """The smallest number 2^k - 1 that is not below x.  [] uint32 -> [] uint32."""
    for shift in (1, 2, 4, 8, 16):
        x = x | (x >> np.uint32(shift))
    return x


def _less(a: Words, b: Words) -> jax.Array:
    """Whether a < b.  [...] bool."""
    return (a.high < b.high) | ((a.high == b.high) & (a.low < b.low))


def _prefix_sums(x: Words) -> Words:
    """Sums of the first 1, 2, ... numbers, whose low words may be above 2^16.  [..., G] -> [..., G]."""
    low = jnp.cumsum(x.low, axis=-1, dtype=jnp.uint32)
    high = jnp.cumsum(x.high, axis=-1, dtype=jnp.uint32) + (low >> HALF)
    return Words(high, low & LOW)


def _find(sums: Words, number: Words) -> tuple[jax.Array, Words]:
    """Which of some sums [N or 1, G] each number [N] falls into, and the number without the sums before that one."""
    ends = _prefix_sums(sums)
    column = jax.tree.map(lambda x: x[:, None], number)
    passed = (~_less(column, ends)).sum(1, dtype=jnp.int32)
    before = passed - 1
    low, high = (jnp.where(before >= 0, _pick(x, before), 0) for x in (ends.low, ends.high))
    borrow = (number.low < low).astype(jnp.uint32)
    rest = Words(number.high - high - borrow, (number.low - low) & LOW)
    return jnp.minimum(passed, ends.low.shape[1] - 1), rest  # where nothing was found, all are passed


def _place_within(values: jax.Array, rest: jax.Array) -> jax.Array:
    """The place in a block that the number `rest` falls into.  [N, 256], [N] uint32 -> [N] int32."""
    parts = values.reshape(-1, BLOCK // PART, PART)
    part, rest = _find_word(parts.sum(-1, dtype=jnp.uint32), rest)
    place, _ = _find_word(jnp.take_along_axis(parts, part[:, None, None], axis=1)[:, 0], rest)
    return part * PART + place


def _find_word(values: jax.Array, rest: jax.Array) -> tuple[jax.Array, jax.Array]:
    """`_find` where no sum is above 2^32.  [N, G], [N] uint32 -> [N] int32, [N] uint32."""
    ends = jnp.cumsum(values, axis=1, dtype=jnp.uint32)
    passed = (ends <= rest[:, None]).sum(1, dtype=jnp.int32)
    found = jnp.minimum(passed, values.shape[1] - 1)
    return found, rest - (_pick(ends, found) - _pick(values, found))


def _pick(x: jax.Array, index: jax.Array) -> jax.Array:
    """x[n, index[n]], or x[0, index[n]] where x has one row.  [N or 1, G], [N] -> [N]."""
    return x[0, index] if len(x) == 1 else jnp.take_along_axis(x, index[:, None], axis=1)[:, 0]


def replace(
    p: Priorities, i: jax.Array, place: jax.Array, old: jax.Array, new: jax.Array, changes: jax.Array
) -> Priorities:
    """Change priorities, in units, of places of this device's i-th shard from `old` to `new`, where `changes`.

    place [M] int32, old, new [M] uint32, changes [M] bool.  Places that change must all be different.
    """
    chex.assert_equal_shape([place, old, new, changes])
    block = jnp.where(changes, place // BLOCK, p.sums.shape[1])  # beyond the last: dropped
    grown = jnp.where(changes, (new > 0).astype(jnp.int32) - (old > 0), 0).sum(dtype=jnp.int32)
    return Priorities(
        values=p.values.at[i, block, place % BLOCK].set(new, mode="drop"),
        sums=p.sums.at[i, block].add(new - old, mode="drop"),
        nonzero=p.nonzero.at[i].add(grown),
        most=p.most.at[i].max(jnp.where(changes, new, 0).max()),
    )


def assign(p: Priorities, i: jax.Array, drawn: Drawn, value: jax.Array) -> Priorities:
    """Give what was drawn from this device's i-th shard new priorities, [N] uint32, in units, none of them 0.

    A place that was drawn more than once gets the greatest of its values.
    """
    chex.assert_equal_shape([drawn.place, value])
    nowhere = jnp.iinfo(jnp.int32).max
    place, value = lax.sort((jnp.where(drawn.found, drawn.place, nowhere), value), num_keys=2)
    last = jnp.append(place[1:] != place[:-1], True) & (place < nowhere)  # of equal places, the greatest value
    block = jnp.where(last, place // BLOCK, p.sums.shape[1])  # beyond the last: dropped
    # The old priorities are not read here: XLA would copy them all before it writes.
    values = p.values.at[i, block, place % BLOCK].set(value, mode="drop")
    sums = values.at[i, block].get(mode="clip").sum(-1, dtype=jnp.uint32)
    return p._replace(
        values=values,
        sums=p.sums.at[i, block].set(sums, mode="drop"),
        most=p.most.at[i].max(jnp.where(last, value, 0).max()),
    )


def in_units(size: jax.Array, exponent: float) -> jax.Array:
    """The priority size^exponent in units: at least 1, which stands for the paper's eps, at most 2^24 - 1.

    (Schaul et al. 2016, section 3.3, with |delta| as `size`.)  [N] float32, not negative -> [N] uint32.
    NaN, which --on-nonfinite ignore lets through, counts as 0.
    """
    units = jnp.clip(jnp.round(UNIT * size**exponent), 1.0, float(MOST))
    return jnp.where(jnp.isnan(units), 1.0, units).astype(jnp.uint32)


def importance(drawn: Drawn, exponent: jax.Array | float) -> jax.Array:
    """The importance weights (M P_i)^-exponent of N drawn places; 0 where none was found.  -> [N] float32.

    (Schaul et al. 2016, section 3.4.)  M is the number of places whose priority is not 0; M and P_i = p_i / sum_j p_j
    are of this shard alone.  The caller divides by the greatest weight of the minibatch.
    """
    total = drawn.total.high.astype(jnp.float32) * 2.0**16 + drawn.total.low.astype(jnp.float32)
    share = drawn.priority.astype(jnp.float32) * (drawn.nonzero / jnp.maximum(total, 1.0))
    return jnp.where(drawn.found, jnp.where(drawn.found, share, 1.0) ** -exponent, 0.0)
