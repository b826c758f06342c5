"""Map over the shards of a batch and combine their results, so that the bits do not depend on the devices.

A batch is cut into `num_shards` equal parts along the environment axis.  Each part is always computed alone and the
results are always combined in shard order, whichever device holds which part.  An algorithm says *what* to compute
per shard (`map`) and *how* to combine (`sum`); it never asks how many devices there are.

Five things could still let the placement into the bits, and each has its answer here:

* the order of a sum: an all-reduce adds in an order of its own; we exchange slices, so that each device has its part
  of every shard's arrays, adds these as shard 0, 1, 2, ... and gives the sum to all, at an all-reduce's cost
* fusion: with one shard per device XLA would inline the loop over shards and fuse its body with the code around it,
  which rounds differently; a `lax.cond` whose predicate is true, but only known at run time, is compiled by itself
* layouts: how arrays lie in a GPU's memory is chosen by what surrounds them, through a conditional too, and kernels are
  chosen by layouts; all that enters and leaves the conditional is pinned to rows
* small loops: on CPUs XLA compiles a short loop and all in its body as one function, within which sums are reordered;
  `compiler_options` switches that off
* randomness: a key that a shard uses is derived from the shard's number, never from the device's
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar, TypeVarTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint
from jax.stages import CompilerOptions

from cleanba.rollout import PyTree

Ts = TypeVarTuple("Ts")  # what a function is given
R = TypeVar("R")  # what it returns

GATHER_BYTES = 2**18  # of all shards together; up to here one gather is quicker than two steps
UNROLL = 16  # additions in one fused loop


def compiler_options(platform: str) -> CompilerOptions:
    """What to give `jax.jit` as `compiler_options` for code that maps over shards, on devices of this kind."""
    own: CompilerOptions = {"xla_disable_hlo_passes": "small-while-loop-hoisting"} if platform == "cpu" else {}
    return own | network_options(platform)


def network_options(platform: str) -> CompilerOptions:
    """What to give `jax.jit` as `compiler_options` for code that calls networks, on devices of this kind.

    On CPUs: no YNNPACK, which XLA would call for products and convolutions that are not ours; Eigen is as fast for
    products, and twice as fast for convolutions (docs/performance.md).
    """
    return {"xla_cpu_experimental_ynn_fusion_type": ""} if platform == "cpu" else {}


def usable_cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@dataclass(frozen=True)
class ShardAxis:
    """The axis along which a batch is cut; the leading axis of what an algorithm's `update` is given."""

    num_shards: int
    """K, over all devices of all processes"""
    index: jax.Array
    """[K'] int32: the numbers of the shards that this device holds"""
    always: jax.Array
    """bool scalar: true, but the compiler cannot know"""
    mesh_axis: str
    """name of the mesh axis that the learner devices lie along"""

    @property
    def num_devices(self) -> int:
        """D, over all processes"""
        return self.num_shards // self.index.shape[0]

    def isolate(self, fn: Callable[[*Ts], R], *args: *Ts) -> R:
        """Call fn(*args), compiled by itself: its bits depend on its arguments and on nothing around it."""
        pure, closed_over = jax.closure_convert(fn, *args)  # else parameters in fn's closure would escape `row_major`
        out = jax.eval_shape(pure, *args, *closed_over)
        zeros = lambda *_: jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), out)  # never taken
        pinned = lambda *args: row_major(pure(*row_major(args)))
        return lax.cond(self.always, pinned, zeros, *args, *closed_over)

    def map(self, fn: Callable[[*Ts], R], *trees: *Ts) -> R:
        """Call fn on each of this device's shards, one after the other.  Leaves [K', ...] -> leaves [K', ...]."""
        return self.map_from(lambda i: jax.tree.map(lambda x: x[i], trees), fn)

    def map_from(self, load: Callable[[jax.Array], tuple[*Ts]], fn: Callable[[*Ts], R]) -> R:
        """As `map`, but fn's arguments for this device's i-th shard are what `load(i)` gives.

        For taking parts out of large arrays, such as a minibatch, without a copy of the whole shard.  `load` only
        moves data; what it computes is not isolated.
        """
        return lax.map(lambda i: self.isolate(fn, *load(i)), jnp.arange(self.index.shape[0]))

    def sum(self, tree: PyTree) -> PyTree:
        """The sum over all shards of all devices, in shard order.  Leaves [K', ...] -> leaves [...], replicated."""
        if self.num_devices == 1:
            return self.isolate(lambda tree: jax.tree.map(ordered_sum, tree), tree)
        leaves, structure = jax.tree.flatten(tree)
        total = list(leaves)
        for dtype in dict.fromkeys(x.dtype for x in leaves):  # all of one kind together: few, large messages
            which = [i for i, x in enumerate(leaves) if x.dtype == dtype]
            vectors = jnp.concatenate([leaves[i].reshape(self.index.shape[0], -1) for i in which], axis=1)
            ends = np.cumsum([leaves[i][0].size for i in which])
            for i, part in zip(which, jnp.split(self._sum_vectors(vectors), ends[:-1]), strict=True):
                total[i] = part.reshape(leaves[i].shape[1:])
        return jax.tree.unflatten(structure, total)

    def max(self, x: jax.Array) -> jax.Array:
        """The greatest over all shards of all devices, for which no order matters.  [K', ...] -> [...], replicated."""
        return lax.pmax(x.max(0), self.mesh_axis)

    def _sum_vectors(self, x: jax.Array) -> jax.Array:
        """Each device adds up its slice of all shards' vectors.  [K', N] -> [N], replicated."""
        local, n = x.shape
        if self.num_shards * n * x.dtype.itemsize <= GATHER_BYTES:
            gathered = lax.all_gather(x, self.mesh_axis, axis=0, tiled=True)
            return self.isolate(ordered_sum, gathered)
        slices = jnp.pad(x, ((0, 0), (0, -n % self.num_devices))).reshape(local, self.num_devices, -1)
        mine = lax.all_to_all(slices, self.mesh_axis, split_axis=1, concat_axis=0, tiled=True)[:, 0]  # [K, N / devices]
        return lax.all_gather(self.isolate(ordered_sum, mine), self.mesh_axis, axis=0, tiled=True)[:n]


def ordered_sum(x: jax.Array) -> jax.Array:
    """x[0] + x[1] + x[2] + ..., from left to right.  [K, ...] -> [...]."""
    # Unrolled, the additions are one fused loop over the elements; a scan would be one kernel launch for each.
    return lax.fori_loop(1, x.shape[0], lambda i, total: total + x[i], x[0], unroll=UNROLL)


def row_major(tree: PyTree) -> PyTree:
    """The same arrays with their memory laid out as in C, whatever the compiler would like around here."""

    def pin(x: jax.Array) -> jax.Array:
        if jnp.ndim(x) == 0 or jax.dtypes.issubdtype(x.dtype, jax.dtypes.extended):
            return x  # there is but one way to lay out a scalar, and none to say it of random keys
        return with_layout_constraint(x, Layout(tuple(range(x.ndim))))

    return jax.tree.map(pin, tree)
