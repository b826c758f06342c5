"""Places in an update whose values can be watched, to find where two runs diverge (`cleanba bisect`).

    probe("gradient", gradient, per_shard=True)

In training, a probe does nothing and leaves nothing in the program.  Within `watching`, where an update is traced to be
watched, each probe writes a fingerprint of its values to a `Tape`: a set of buffers on the device, which the program
returns when it ends.  No host is called from inside the program, and loops need not know of it.  The values of one
event, chosen when the program is called, are kept whole.

Probes stand outside of isolated code (`shards.py`), so that they do not change what XLA makes of it.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from cleanba.rollout import PyTree

CAPACITY = 512  # events of one site that a tape holds
SMALL = 2**20  # numbers in an array that is copied to have its fingerprint taken
SALTS = np.uint32(0x9E3779B9), np.uint32(0x7F4A7C15)


class Site(NamedTuple):
    """A probe in a traced program: what it is called, and the arrays that it sees."""

    stage: str
    """what is computed there, such as "gradient" """
    detail: str
    """which of several, such as the name of the loss; "" if there is one"""
    per_shard: bool
    """whether leaves are [K', ...], for this device's shards; else they are the same on every device"""
    paths: tuple[str, ...]
    """of the leaves, in order"""
    shapes: tuple[tuple[tuple[int, ...], str], ...]
    """of the leaves as the probe sees them: shape and dtype"""


class Written(NamedTuple):
    """What the probes of one site have written.  On return from the program all leaves gain an axis of devices."""

    seen: jax.Array  # [] int32: events since `skip`, of which the first `CAPACITY` are kept
    events: jax.Array  # [CAPACITY + 1] int32: their numbers, counted over all sites; the last row is not used
    fingerprints: jax.Array  # [CAPACITY + 1, K' or 1, 2] uint32: fingerprints of all leaves together
    values: list[jax.Array]  # the leaves at the event that was chosen; zeros if that was another site's


class Finder:
    """Collects the sites of a program while it is traced."""

    def __init__(self) -> None:
        self.sites: dict[Site, None] = {}

    def see(self, site: Site, leaves: Sequence[jax.Array]) -> None:
        """A probe was traced.  Loops may be traced more than once."""
        self.sites[site] = None


class Tape:
    """The buffers that probes write to while the program runs."""

    def __init__(self, sites: Sequence[Site], skip: jax.Array, chosen: jax.Array):
        """Make room.  Events before number `skip` are only counted; the values of event `chosen` are kept."""
        self._skip, self._chosen = skip, chosen
        self._number = jax.new_ref(jnp.int32(0))
        self._refs = {site: jax.tree.map(jax.new_ref, _blank(site)) for site in sites}

    def see(self, site: Site, leaves: Sequence[jax.Array]) -> None:
        """Write down one event."""
        refs = self._refs[site]
        number = self._number[...]
        self._number[...] = number + 1
        count, counts = refs.seen[...], number >= self._skip
        row = jnp.where(counts, jnp.minimum(count, CAPACITY), CAPACITY)
        refs.seen[...] = count + counts
        refs.events[row] = number
        refs.fingerprints[row] = fingerprint(leaves, 1 if site.per_shard else 0).reshape(-1, 2)
        for ref, x in zip(refs.values, leaves, strict=True):
            ref[...] = jnp.where(number == self._chosen, x, ref[...])

    def written(self) -> tuple[jax.Array, list[Written]]:
        """The number of events, and what was written at each site."""
        return self._number[...], [jax.tree.map(lambda ref: ref[...], refs) for refs in self._refs.values()]


def _blank(site: Site) -> Written:
    rows, shards = CAPACITY + 1, site.shapes[0][0][0] if site.per_shard else 1
    fingerprints = jnp.zeros((rows, shards, 2), jnp.uint32)
    values = [jnp.zeros(shape, dtype) for shape, dtype in site.shapes]
    return Written(jnp.int32(0), jnp.full(rows, -1, jnp.int32), fingerprints, values)


# A context of JAX's: each thread has its own value, which is part of the key of JAX's caches of traces and programs.
WATCHER = jax.make_user_context(None)


@contextmanager
def watching(watcher: Finder | Tape) -> Iterator[None]:
    """Within this context, probes that this thread traces write to the watcher."""
    with WATCHER(watcher):
        yield


def probe(stage: str, values: PyTree | Callable[[], PyTree], detail: str = "", per_shard: bool = False) -> None:
    """Let these values be watched, if the program being traced is watched at all.

    values: arrays [...], or with `per_shard` [K', ...]; or a function that makes them, called only if watched.
    """
    watcher: Any = WATCHER.value
    if watcher is None:
        return
    tree = values() if callable(values) else values
    named = [(jax.tree_util.keystr(path), _plain(x)) for path, x in jax.tree_util.tree_leaves_with_path(tree)]
    if named:
        paths, leaves = zip(*named, strict=True)
        shapes = tuple((x.shape, str(x.dtype)) for x in leaves)
        watcher.see(Site(stage, detail, per_shard, paths, shapes), leaves)


def _plain(x: Any) -> jax.Array:
    """An array of numbers; of random keys, their data."""
    is_key = jnp.issubdtype(jnp.result_type(x), jax.dtypes.prng_key)
    return jax.random.key_data(x) if is_key else jnp.asarray(x)


def fingerprint(leaves: Sequence[jax.Array], lead: int = 0) -> jax.Array:
    """Two words that depend on every bit of some arrays, for each index of their first `lead` axes.  -> [*lead, 2].

    Each number is mixed with its place by a function that can be inverted, and the results are added up as integers, in
    any order.  So a single number that differs is always detected; several go unnoticed with probability 2^-64.
    """
    cut = lambda x: _bits(x).reshape(*x.shape[:lead], -1)
    small = [cut(x) for x in leaves if x.size <= SMALL]  # as one, which is quicker to compile
    rows = [cut(x) for x in leaves if x.size > SMALL] + ([jnp.concatenate(small, axis=-1)] if small else [])
    total, before = jnp.zeros((*rows[0].shape[:-1], 2), jnp.uint32), 0
    for bits in rows:
        place = np.uint32(before % 2**32) + jnp.arange(bits.shape[-1], dtype=jnp.uint32)
        words = [_mixed(bits ^ _mixed(place + salt)).sum(-1, dtype=jnp.uint32) for salt in SALTS]
        total, before = total + jnp.stack(words, -1), before + bits.shape[-1]
    return total


def _bits(x: jax.Array) -> jax.Array:
    """The bits of each number.  [...] -> [...] uint32."""
    if jnp.issubdtype(x.dtype, jnp.bool_):
        return x.astype(jnp.uint32)
    return lax.bitcast_convert_type(x, f"uint{8 * x.dtype.itemsize}").astype(jnp.uint32)


def _mixed(x: jax.Array) -> jax.Array:
    """A permutation of the 32-bit words (the finaliser of MurmurHash3).  [...] uint32 -> [...]."""
    x = (x ^ x >> 16) * jnp.uint32(0x85EBCA6B)
    x = (x ^ x >> 13) * jnp.uint32(0xC2B2AE35)
    return x ^ x >> 16
