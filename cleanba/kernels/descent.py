"""Adam's step, target networks and sums of squares: loops over all arrays of a network at once.

XLA makes several passes over each array, on one core, and copies the results of an isolated step (`shards.py`) to their
place.  Here everything is read once, by all cores, and written in place.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from llvmlite import ir

from cleanba.kernels.llvm import FLOAT, WIDEST, Code, Unit, compiled, word
from cleanba.kernels.plain import Adam
from cleanba.ops.descent import T, rectification
from cleanba.rollout import PyTree
from cleanba.shards import ShardAxis

PIECE = 2**13  # numbers that one thread does at once
WORTH = 2**14  # numbers per unit of work at least: waking a thread for fewer costs more than it saves

Arrays = list[jax.Array]


class Shape(NamedTuple):
    """What the loops depend on."""

    sizes: tuple[int, ...]
    """of the arrays"""
    constants: tuple[float, ...] = ()

    def __str__(self) -> str:
        """As part of a name."""
        return "_".join(map(str, (*self.sizes, *self.constants)))


def step(settings: Adam, shards: ShardAxis, rate: jax.Array, trained: T, gradient: PyTree) -> tuple[T, jax.Array]:
    """`plain.adam` by the loop below, which nothing around it can change."""
    leaves, structure = jax.tree.flatten(gradient)
    is_moments = lambda part: isinstance(part, optax.ScaleByAdamState)
    (state,) = filter(is_moments, jax.tree.leaves(trained.optimiser, is_leaf=is_moments))

    def weigh(rate: jax.Array, count: jax.Array, squares: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        norm, count = jnp.sqrt(squares.sum()), optax.safe_increment(count)
        # Where nothing is clipped, a norm that is not finite changes nothing.
        unclipped = (norm < settings.max_norm) | (settings.max_norm == math.inf)
        clip = jnp.where(unclipped, 1.0, settings.max_norm / norm)
        first, second = (1 - beta**count for beta in (settings.b1, settings.b2))
        a, k = rate / first, 1 / second
        if settings.rectified:
            factor = rectification(count, settings.b2)
            # Momentum alone, p - a m, where k = 0 leaves eps alone below the fraction bar.
            a, k = a * jnp.where(factor > 0, factor, settings.eps), jnp.where(factor > 0, k, 0.0)
        return jnp.stack([clip, a, k]), count, norm

    factors, count, norm = shards.isolate(weigh, rate, state.count, squares(leaves))
    params, mu, nu = map(jax.tree.leaves, (trained.params, state.mu, state.nu))
    found = adam(leaves, params, mu, nu, factors, settings.b1, settings.b2, settings.eps)
    params, mu, nu = (jax.tree.unflatten(structure, x) for x in found)
    after = state._replace(count=count, mu=mu, nu=nu)
    optimiser = jax.tree.map(lambda part: after if is_moments(part) else part, trained.optimiser, is_leaf=is_moments)
    return trained._replace(params=params, optimiser=optimiser), norm


def adam(
    gradient: Arrays, params: Arrays, m: Arrays, v: Arrays, factors: jax.Array, b1: float, b2: float, eps: float
) -> tuple[Arrays, Arrays, Arrays]:
    """One step of Adam (Kingma & Ba 2015, algorithm 1): new parameters, first and second moments.

        g' = c g,  m' = b1 m + (1 - b1) g',  v' = b2 v + (1 - b2) g'^2,  p' = p - a m' / (sqrt(k v') + eps)

    Arrays of float32, of the same shapes in each list.  `factors` are c, by which a gradient is clipped, a = rate /
    (1 - b1^t) and k = 1 / (1 - b2^t), [3].
    """
    n = len(gradient)
    found = _call(_adam, [gradient, params, m, v], factors, n, (b1, b2, eps))
    return found[:n], found[n : 2 * n], found[2 * n :]


def follow(tau: jax.Array, params: Arrays, targets: Arrays) -> Arrays:
    """The sum tau p + (1 - tau) q of parameters p and targets q; tau is a float32.  With 0 it is q, untouched."""
    return _call(_follow, [params, targets], jnp.stack([tau, 1 - tau]), len(params))


def polyak_update(tau: float, now: jax.Array, params: PyTree, targets: PyTree) -> PyTree:
    """`plain.polyak_update` by the loop below."""
    moved = follow(jnp.where(now, tau, 0.0), *map(jax.tree.leaves, (params, targets)))
    return jax.tree.unflatten(jax.tree.structure(targets), moved)


def squares(arrays: Arrays) -> jax.Array:
    """Partial sums of the squares of all numbers, which add up to the whole sum; float32 [parts, WIDEST]."""
    return _call(_squares, [arrays])[0]


def _call(
    unit: Unit[Shape], each: list[Arrays], factors: jax.Array | None = None, aliased: int | None = None,
    constants: tuple[float, ...] = (),
) -> Arrays:  # fmt: skip
    """Run `unit`.  It overwrites the arrays from number `aliased` on; without that, it returns [WIDEST] sums per piece.

    Raises:
        ValueError: arrays are not alike.
    """
    shapes, flat = [x.shape for x in each[0]], [x for arrays in each for x in arrays]
    if any(x.dtype != jnp.float32 for x in flat) or any([x.shape for x in arrays] != shapes for arrays in each):
        raise ValueError("gradient, parameters, moments and targets must be float32, and have the same shapes")
    p = Shape(tuple(x.size for x in each[0]), constants)
    count = sum(map(_pieces, p.sizes))
    written, alias = [jax.ShapeDtypeStruct((count, WIDEST), jnp.float32)], {}
    if aliased is not None:
        written = [jax.ShapeDtypeStruct(x.shape, jnp.float32) for x in flat[aliased:]]
        alias = {aliased + i: i for i in range(len(written))}
    given = flat if factors is None else [*flat, factors]
    units = min(max(sum(p.sizes) // WORTH, 1), 16)
    name = compiled(unit, p, [FLOAT] * (len(given) + len(written)), len(written), units, count)
    return list(jax.ffi.ffi_call(name, written, input_output_aliases=alias)(*given))


def _pieces(size: int) -> int:
    return -(-size // PIECE)


def _each_piece(
    code: Code, p: Shape, first: ir.Value, last: ir.Value, body: Callable[[int, ir.Value, ir.Value, ir.Value], None]
) -> None:
    """`body(array, number, start, stop)` for the pieces from `first` to before `last`."""
    before = 0
    for array, size in enumerate(p.sizes):

        def piece(number: ir.Value, array: int = array, size: int = size, before: int = before) -> None:
            start = code.mul(code.sub(number, word(before)), word(PIECE))
            body(array, number, start, code.smaller(code.add(start, word(PIECE)), word(size)))

        code.within(before, _pieces(size), first, last, piece)
        before += _pieces(size)


def _each_number(
    code: Code, p: Shape, first: ir.Value, last: ir.Value, body: Callable[[int, ir.Value, int], None]
) -> None:
    """`body(array, at, lanes)` for the numbers of these pieces, `lanes` at a time: those of an array from `at` on."""

    def piece(array: int, _: ir.Value, start: ir.Value, stop: ir.Value) -> None:
        # Whole vectors, then the rest one by one, by the same arithmetic.
        whole = code.sub(stop, code.srem(code.sub(stop, start), word(code.lanes)))
        for lanes, begin, end in ((code.lanes, start, whole), (1, whole, stop)):
            code.repeat(begin, end, lambda at, lanes=lanes: body(array, at, lanes), step=lanes)

    _each_piece(code, p, first, last, piece)


def _adam(code: Code, p: Shape, pointers: list[ir.Value], _: ir.Value, first: ir.Value, last: ir.Value) -> None:
    """Write new parameters and moments."""
    n = len(p.sizes)
    b1, b2, eps = p.constants
    factors = pointers[4 * n]

    def some(array: int, at: ir.Value, lanes: int) -> None:
        number = lambda x: ir.Constant(ir.VectorType(FLOAT, lanes), [x] * lanes)
        g, param, m, v = (code.get(code.at(pointers[array + k * n], at), lanes) for k in range(4))
        clip, rate, correction = (code.spread(code.at(factors, k), lanes) for k in range(3))
        g = code.fmul(clip, g)
        m = code.fadd(code.fmul(number(b1), m), code.fmul(number(1 - b1), g))
        v = code.fadd(code.fmul(number(b2), v), code.fmul(number(1 - b2), code.fmul(g, g)))
        root = code.of_c(f"llvm.sqrt.v{lanes}f32", v.type, v.type)
        below = code.fadd(code.call(root, [code.fmul(correction, v)]), number(eps))
        param = code.fsub(param, code.fdiv(code.fmul(rate, m), below))
        for k, value in enumerate((param, m, v)):
            code.put(value, code.at(pointers[4 * n + 1 + array + k * n], at))

    _each_number(code, p, first, last, some)


def _follow(code: Code, p: Shape, pointers: list[ir.Value], _: ir.Value, first: ir.Value, last: ir.Value) -> None:
    """Write new targets."""
    n = len(p.sizes)
    tau = code.load(pointers[2 * n])

    def some(array: int, at: ir.Value, lanes: int) -> None:
        param, target = (code.get(code.at(pointers[array + k * n], at), lanes) for k in range(2))
        some, rest = (code.spread(code.at(pointers[2 * n], k), lanes) for k in range(2))
        value = code.fadd(code.fmul(some, param), code.fmul(rest, target))
        code.put(value, code.at(pointers[2 * n + 1 + array], at))

    with code.if_then(code.fcmp_unordered("!=", tau, ir.Constant(FLOAT, 0.0))):  # else they stay where they are
        _each_number(code, p, first, last, some)


def _squares(code: Code, p: Shape, pointers: list[ir.Value], _: ir.Value, first: ir.Value, last: ir.Value) -> None:
    """Write each piece's sums of squares, of every `WIDEST`-th number."""

    def piece(array: int, number: ir.Value, start: ir.Value, stop: ir.Value) -> None:
        vectors = range(0, WIDEST, code.lanes)
        here = [code.at(pointers[-1], (number, WIDEST), v) for v in vectors]
        whole = code.sub(stop, code.srem(code.sub(stop, start), word(WIDEST)))

        def add(at: ir.Value, *sums: ir.Value) -> list[ir.Value]:
            x = [code.get(code.at(pointers[array], at, v)) for v in vectors]
            return [code.multiply_add(value, value, total) for value, total in zip(x, sums, strict=True)]

        for total, place in zip(code.repeat(start, whole, add, [code.zeros] * len(here), WIDEST), here, strict=True):
            code.put(total, place)

        def rest(at: ir.Value) -> None:
            value, place = code.load(code.at(pointers[array], at)), code.at(here[0], code.sub(at, whole))
            code.store(code.fadd(code.load(place), code.fmul(value, value)), place)

        code.repeat(whole, stop, rest)

    _each_piece(code, p, first, last, piece)
