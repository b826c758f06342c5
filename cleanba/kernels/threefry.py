"""JAX's random numbers: a loop that draws the same bits in a fraction of the time.

JAX draws all of them by Threefry-2x32 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3").  On CPUs it
writes that as a loop of five times four rounds, each of a dozen small programs, whose overhead exceeds the arithmetic:
with small networks it took half the time of acting.
"""

import jax
import jax.numpy as jnp
from llvmlite import ir

from cleanba.kernels import plain
from cleanba.kernels.llvm import HALF, Code, compiled

FEW = 16  # numbers up to which XLA's code is no slower: keys are made one by one


def threefry(k1: jax.Array, k2: jax.Array, x1: jax.Array, x2: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Both words of the hash of the words x by the keys k; uint32, of shapes that broadcast together."""
    words = jnp.broadcast_arrays(k1, k2, x1, x2)
    shape, size = words[0].shape, words[0].size
    if size <= FEW:
        return plain.threefry(*words)
    kinds = [jax.ShapeDtypeStruct((size,), jnp.uint32)] * 2
    name = compiled(_threefry, "", [HALF] * 6, results=2, units=1)
    a, b = jax.ffi.ffi_call(name, kinds)(*(x.reshape(size) for x in words))
    return a.reshape(shape), b.reshape(shape)


def _threefry(code: Code, _: str, pointers: list[ir.Value], __: ir.Value, first: ir.Value, last: ir.Value) -> None:
    """Write the hashes of some words: whole vectors of them, then the rest one by one."""

    def some(at: ir.Value, lanes: int) -> None:
        vector = ir.VectorType(HALF, lanes)
        number = lambda x: ir.Constant(vector, [x] * lanes)
        turn = lambda x, left: code.or_(code.shl(x, number(left)), code.lshr(x, number(32 - left)))
        place = lambda pointer: code.bitcast(code.at(pointer, at), ir.PointerType(vector))
        k1, k2, a, b = (code.load(place(pointer), align=4) for pointer in pointers[:4])
        results = plain.rounds(k1, k2, a, b, code.add, code.xor, turn, number)
        for value, pointer in zip(results, pointers[4:], strict=True):
            code.store(value, place(pointer), align=4)

    whole = code.sub(last, code.srem(code.sub(last, first), ir.Constant(last.type, code.lanes)))
    for lanes, begin, end in ((code.lanes, first, whole), (1, whole, last)):
        code.repeat(begin, end, lambda at, lanes=lanes: some(at, lanes), step=lanes)
