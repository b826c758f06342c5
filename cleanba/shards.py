"""Map over the shards of a batch and combine their results, so that the bits do not depend on the devices.

A batch is cut into `num_shards` equal parts along the environment axis.  Each part is always computed alone and the
results are always combined in shard order, whichever device holds which part.  An algorithm says *what* to compute
per shard (`map`) and *how* to combine (`sum`); it never asks how many devices there are.

Any number of devices up to `num_shards` will do.  A program has the same shapes on every device, so each has places for
as many shards as the fullest holds.  Where the devices do not divide the shards, the last place of some is empty: loops
over shards end before it, and sums leave it out.

Five things could still make the bits depend on the placement, and each has its answer here:

* the order of a sum: an all-reduce adds in its own order; here devices exchange slices, so that each device has its
  slice of every shard's arrays, adds these in the order of shards 0, 1, 2, ... and sends the sum to all, at the cost of
  an all-reduce
* fusion: with one shard per device XLA would inline the loop over shards and fuse its body with the code around it,
  which rounds differently; a `lax.cond` whose predicate is true, but only known at run time, is compiled by itself
* layouts: on GPUs XLA chooses an array's memory layout by the code around it, even across a conditional, and kernels by
  the layout; arrays that enter or leave the conditional are pinned to row-major
* small loops: on CPUs XLA compiles a short loop and its whole body as one function, and reorders the sums within it;
  `compiler_options` switches that off
* randomness: a key that a shard uses is derived from the shard's number, never from the device's
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar, TypeVarTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint
from jax.stages import CompilerOptions

from cleanba.rollout import PyTree

Ts = TypeVarTuple("Ts")  # a function's arguments
R = TypeVar("R")  # its result

GATHER_BYTES = 2**18  # over all shards; up to this size one gather is faster than an exchange and a gather
UNROLL = 16  # additions in one fused loop


def compiler_options(platform: str) -> CompilerOptions:
    """`jax.jit`'s `compiler_options` for code that maps over shards, on this platform."""
    own: CompilerOptions = {"xla_disable_hlo_passes": "small-while-loop-hoisting"} if platform == "cpu" else {}
    return own | network_options(platform)


def network_options(platform: str) -> CompilerOptions:
    """`jax.jit`'s `compiler_options` for code that calls networks, on this platform.

    On CPUs they switch off YNNPACK, which XLA would call for products and convolutions other than ours.  Eigen is as
    fast for products, and twice as fast for convolutions (docs/inside/performance.md).
    """
    return {"xla_cpu_experimental_ynn_fusion_type": ""} if platform == "cpu" else {}


@dataclass(frozen=True)
class ShardAxis:
    """The axis along which a batch is cut; the leading axis of what an algorithm's `update` is given."""

    num_shards: int
    """K, over all devices of all processes"""
    index: jax.Array
    """[K'] int32: the numbers of the shards in this device's places; undefined for an empty place"""
    always: jax.Array
    """[] bool: true, but the compiler cannot know it"""
    mesh_axis: str
    """name of the mesh axis that the learner devices lie along"""
    uneven: tuple[int, ...] = ()
    """how many shards each device along that axis holds, if not all hold K'; places after those are empty"""

    @classmethod
    def over(cls, held: Sequence[int], always: jax.Array, mesh_axis: str) -> "ShardAxis":
        """The axis as seen by one device inside `shard_map`.  `held` is the number of shards of each device."""
        places = max(held)
        device, place = lax.axis_index(mesh_axis), jnp.arange(places, dtype=jnp.int32)
        if min(held) == places:
            return cls(sum(held), device * places + place, always, mesh_axis)
        before = np.cumsum([0, *held[:-1]], dtype=np.int32)
        return cls(sum(held), jnp.asarray(before)[device] + place, always, mesh_axis, tuple(held))

    @property
    def num_devices(self) -> int:
        """D, over all processes"""
        return len(self.uneven) or self.num_shards // self.index.shape[0]

    @property
    def num_held(self) -> int | jax.Array:
        """The number of shards that this device holds: its places without the empty ones.  A number, or [] int32."""
        return jnp.asarray(self.uneven, jnp.int32)[lax.axis_index(self.mesh_axis)] if self.uneven else len(self.index)

    def isolate(self, fn: Callable[[*Ts], R], *args: *Ts) -> R:
        """fn(*args) in a branch that XLA cannot fuse with the code around it: only its arguments decide its bits."""
        # Real arrays in fn's closure become arguments, so that `row_major` pins them too.
        pure, closed_over = jax.closure_convert(fn, *args)
        out = jax.eval_shape(pure, *args, *closed_over)
        zeros = lambda *_: jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), out)  # never taken
        pinned = lambda *args: row_major(pure(*row_major(args)))
        return lax.cond(self.always, pinned, zeros, *args, *closed_over)

    def map(self, fn: Callable[[*Ts], R], *trees: *Ts) -> R:
        """Call fn on each of this device's shards, one after the other.  Leaves [K', ...] -> leaves [K', ...].

        The result of an empty place is zeros; `sum` and `max` leave it out.
        """
        return self.map_from(lambda i: jax.tree.map(lambda x: x[i], trees), fn)

    def map_from(self, load: Callable[[jax.Array], tuple[*Ts]], fn: Callable[[*Ts], R]) -> R:
        """Like `map`, with `load(i)` as fn's arguments for this device's i-th shard.  Returns leaves [K', ...].

        `load` can gather a part of large arrays, such as a minibatch, without copying the whole shard.  It may only
        move data, as it is not isolated.
        """
        return self.each(lambda i: self.isolate(fn, *load(i)))

    def each(self, fn: Callable[[jax.Array], R]) -> R:
        """fn(i) for each place i of this device, not isolated.  Leaves [K', ...], which are 0 at empty places."""
        if not self.uneven:
            return lax.map(fn, jnp.arange(self.index.shape[0]))
        blank = lambda like: jnp.zeros((self.index.shape[0], *like.shape), like.dtype)
        put = lambda i: lambda out, x: lax.dynamic_update_index_in_dim(out, x, i, 0)
        nothing = jax.tree.map(blank, jax.eval_shape(fn, self.index[0]))
        return lax.fori_loop(0, self.num_held, lambda i, out: jax.tree.map(put(i), out, fn(i)), nothing)

    def sum(self, tree: PyTree) -> PyTree:
        """The sum over all shards of all devices, in shard order.  Leaves [K', ...] -> leaves [...], replicated."""
        if self.num_devices == 1:
            return self.isolate(lambda tree: jax.tree.map(ordered_sum, tree), tree)
        leaves, structure = jax.tree.flatten(tree)
        total = list(leaves)
        for dtype in dict.fromkeys(x.dtype for x in leaves):  # all of one dtype together, for few large messages
            which = [i for i, x in enumerate(leaves) if x.dtype == dtype]
            vectors = jnp.concatenate([leaves[i].reshape(self.index.shape[0], -1) for i in which], axis=1)
            ends = np.cumsum([leaves[i][0].size for i in which])
            for i, part in zip(which, jnp.split(self._sum_vectors(vectors), ends[:-1]), strict=True):
                total[i] = part.reshape(leaves[i].shape[1:])
        return jax.tree.unflatten(structure, total)

    def max(self, x: jax.Array) -> jax.Array:
        """The maximum over all shards of all devices, in any order.  [K', ...] -> [...], replicated."""
        if self.uneven:  # an empty place repeats the device's first shard
            held = jnp.arange(len(x)) < self.num_held
            x = jnp.where(held.reshape(-1, *(1,) * (x.ndim - 1)), x, x[:1])
        return lax.pmax(x.max(0), self.mesh_axis)

    def _sum_vectors(self, x: jax.Array) -> jax.Array:
        """Each device adds up its slice of all shards' vectors.  [K', N] -> [N], replicated."""
        local, n = x.shape
        if self.num_shards * n * x.dtype.itemsize <= GATHER_BYTES:
            gathered = lax.all_gather(x, self.mesh_axis, axis=0, tiled=True)
            return self.isolate(ordered_sum, self._filled(gathered))
        slices = jnp.pad(x, ((0, 0), (0, -n % self.num_devices))).reshape(local, self.num_devices, -1)
        mine = lax.all_to_all(slices, self.mesh_axis, split_axis=1, concat_axis=0, tiled=True)[:, 0]  # [D K', N / D]
        return lax.all_gather(self.isolate(ordered_sum, self._filled(mine)), self.mesh_axis, axis=0, tiled=True)[:n]

    def _filled(self, x: jax.Array) -> jax.Array:
        """Drop the rows of empty places.  [D K', ...] -> [K, ...]."""
        if not self.uneven:
            return x
        places = self.index.shape[0]
        parts = [x[device * places : device * places + held] for device, held in enumerate(self.uneven)]
        return jnp.concatenate(parts)


def ordered_sum(x: jax.Array) -> jax.Array:
    """x[0] + x[1] + x[2] + ..., from left to right.  [K, ...] -> [...]."""
    # Unrolled, the additions are one fused loop over the elements; a scan would be one kernel launch for each.
    return lax.fori_loop(1, x.shape[0], lambda i, total: total + x[i], x[0], unroll=UNROLL)


def row_major(tree: PyTree) -> PyTree:
    """The same arrays [...], with their layout in memory pinned to row-major."""

    def pin(x: jax.Array) -> jax.Array:
        if jnp.ndim(x) == 0 or jnp.issubdtype(x.dtype, jax.dtypes.extended):
            return x  # scalars have one layout; random keys accept none
        return with_layout_constraint(x, Layout(tuple(range(x.ndim))))

    return jax.tree.map(pin, tree)
