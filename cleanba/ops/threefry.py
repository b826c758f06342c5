"""JAX's random numbers on CPUs by a loop of our own: the same bits, in a fraction of the time.

JAX draws all of them by Threefry-2x32 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3").  On CPUs it
writes that as a loop of five times four rounds, each of a dozen small programs, which take longer than the arithmetic:
with small networks half the time of acting went there.
"""

import operator
from collections.abc import Callable
from functools import cache
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax.extend.core.primitives import threefry2x32_p
from jax.interpreters import mlir
from llvmlite import ir

from cleanba.ops.llvm import HALF, Code, compiled

T = TypeVar("T")
ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))  # left, of each round; in turns, five times in all
PARITY = 0x1BD11BDA
FEW = 16  # numbers up to which XLA's code is no slower: keys are made one by one


@cache
def install() -> None:
    """Have JAX draw random numbers on CPUs by this, in all that is compiled from now on in this process."""
    mlir.register_lowering(threefry2x32_p, mlir.lower_fun(threefry, multiple_results=True), platform="cpu")


def threefry(k1: jax.Array, k2: jax.Array, x1: jax.Array, x2: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Both words of the hash of the words x by the keys k; uint32, of shapes that broadcast together."""
    k1, k2, x1, x2 = words = jnp.broadcast_arrays(k1, k2, x1, x2)
    shape, size = x1.shape, x1.size
    if size <= FEW:
        turn = lambda x, left: x << left | x >> 32 - left
        return _rounds(k1, k2, x1, x2, operator.add, operator.xor, turn, jnp.uint32)
    kinds = [jax.ShapeDtypeStruct((size,), jnp.uint32)] * 2
    name = compiled(_threefry, "", [HALF] * 6, results=2, units=1)
    a, b = jax.ffi.ffi_call(name, kinds)(*(x.reshape(size) for x in words))
    return a.reshape(shape), b.reshape(shape)


def _rounds(
    k1: T, k2: T, a: T, b: T, add: Callable[[T, T], T], xor: Callable[[T, T], T], turn: Callable[[T, int], T],
    number: Callable[[int], T],
) -> tuple[T, T]:  # fmt: skip
    """The hash, by the operations given: sums, exclusive or, bits turned to the left, a constant."""
    keys = k1, k2, xor(xor(k1, k2), number(PARITY))
    a, b = add(a, keys[0]), add(b, keys[1])
    for i in range(5):
        for left in ROTATIONS[i % 2]:
            a = add(a, b)
            b = xor(a, turn(b, left))
        a, b = add(a, keys[(i + 1) % 3]), add(add(b, keys[(i + 2) % 3]), number(i + 1))
    return a, b


def _threefry(code: Code, _: str, pointers: list[ir.Value], __: ir.Value, first: ir.Value, last: ir.Value) -> None:
    """Write the hashes of some words: whole vectors of them, then the rest one by one."""

    def some(at: ir.Value, lanes: int) -> None:
        vector = ir.VectorType(HALF, lanes)
        number = lambda x: ir.Constant(vector, [x] * lanes)
        turn = lambda x, left: code.or_(code.shl(x, number(left)), code.lshr(x, number(32 - left)))
        place = lambda pointer: code.bitcast(code.at(pointer, at), ir.PointerType(vector))
        k1, k2, a, b = (code.load(place(pointer), align=4) for pointer in pointers[:4])
        results = _rounds(k1, k2, a, b, code.add, code.xor, turn, number)
        for value, pointer in zip(results, pointers[4:], strict=True):
            code.store(value, place(pointer), align=4)

    whole = code.sub(last, code.srem(code.sub(last, first), ir.Constant(last.type, code.lanes)))
    for lanes, begin, end in ((code.lanes, first, whole), (1, whole, last)):
        code.repeat(begin, end, lambda at, lanes=lanes: some(at, lanes), step=lanes)
