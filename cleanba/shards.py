"""Map over the shards of a batch and combine their results, so that the bits do not depend on the devices.

A batch is cut into `num_shards` equal parts along the environment axis.  Each part is always computed alone and the
results are always combined in shard order, whichever device holds which part.  An algorithm says *what* to compute
per shard (`map`) and *how* to combine (`sum`); it never asks how many devices there are.

Four things could still let the placement into the bits, and each has its answer here:

* the order of a sum: an all-reduce adds in an order of its own; we gather and add shard 0, 1, 2, ...
* fusion: with one shard per device XLA would inline the loop over shards and fuse its body with the code around it,
  which rounds differently; a `lax.cond` whose predicate is true, but only known at run time, is compiled by itself
* small loops: on CPUs XLA compiles a short loop and all in its body as one function, within which sums are reordered;
  `compiler_options` switches that off
* randomness: a key that a shard uses is derived from the shard's number, never from the device's
"""

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax

from cleanba.rollout import PyTree


def compiler_options(platform: str) -> dict[str, str]:
    """What to give `jax.jit` as `compiler_options` for code that maps over shards, on devices of this kind."""
    return {"xla_disable_hlo_passes": "small-while-loop-hoisting"} if platform == "cpu" else {}


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

    def isolate(self, fn: Callable, *args: PyTree) -> PyTree:
        """Call fn(*args), compiled by itself: its bits depend on its arguments and on nothing around it."""
        out = jax.eval_shape(fn, *args)
        zeros = lambda *_: jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), out)  # never taken
        return lax.cond(self.always, fn, zeros, *args)

    def map(self, fn: Callable, *trees: PyTree) -> PyTree:
        """Call fn on each of this device's shards, one after the other.  Leaves [K', ...] -> leaves [K', ...]."""
        return self.map_from(lambda i: jax.tree.map(lambda x: x[i], trees), fn)

    def map_from(self, load: Callable[[jax.Array], tuple], fn: Callable) -> PyTree:
        """As `map`, but fn's arguments for this device's i-th shard are what `load(i)` gives.

        For taking parts out of large arrays, such as a minibatch, without a copy of the whole shard.  `load` only
        moves data; what it computes is not isolated.
        """
        return lax.map(lambda i: self.isolate(fn, *load(i)), jnp.arange(self.index.shape[0]))

    def sum(self, tree: PyTree) -> PyTree:
        """The sum over all shards of all devices, in shard order.  Leaves [K', ...] -> leaves [...], replicated."""
        gathered = jax.tree.map(lambda x: lax.all_gather(x, self.mesh_axis, axis=0, tiled=True), tree)
        return self.isolate(lambda g: jax.tree.map(self._ordered_sum, g), gathered)

    def _ordered_sum(self, x: jax.Array) -> jax.Array:
        if self.num_shards == 1:
            return x[0]
        total, _ = lax.scan(lambda total, part: (total + part, None), x[0], x[1:])
        return total
