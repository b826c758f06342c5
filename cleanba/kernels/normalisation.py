"""Layer normalisation: loops that read each row once from memory, forwards and backwards.

    y = g (x - mean) r + b,  r = 1 / sqrt(variance + eps)    (Ba et al. 2016, eq. 4)

and backwards, with z = (x - mean) r and h = g dy, where means are over a row:

    dx = r (h - mean(h) - z mean(h z)),  dg = sum over rows of dy z,  db = sum over rows of dy

XLA adds up a row number by number, in several passes over the whole array.  Here a row's sum is sixteen sums, each of
every sixteenth number, which are then added by halves; so it has the same bits on processors with longer and shorter
vectors.  A sum over rows is taken within pieces first, whose size depends on the number of rows alone, then over the
pieces in order.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from llvmlite import ir

from cleanba.kernels.llvm import FLOAT, HALF, WIDEST, Code, compiled, widen, widened, word
from cleanba.kernels.plain import NORM_EPS
from cleanba.kernels.product import multiply

WORTH = 2**14  # numbers per unit of work at least: waking a thread for fewer costs more than it saves
FEWEST, MOST = 16, 64  # rows in a piece at least; pieces at most
UNROLLED = 64  # features, in whole sixteens, up to which a row's loop is written out


class Shape(NamedTuple):
    """What the loops depend on."""

    rows: int
    features: int

    def __str__(self) -> str:
        """As part of a name."""
        return f"{self.rows}x{self.features}"

    @property
    def width(self) -> int:
        """The distance from one row to the next."""
        return widened(self.features)

    @property
    def piece(self) -> int:
        """Rows in a piece."""
        return max(FEWEST, -(-self.rows // MOST))

    @property
    def pieces(self) -> int:
        return -(-self.rows // self.piece)


@jax.custom_vjp
def layer_norm(x: jax.Array, scale: jax.Array, bias: jax.Array) -> jax.Array:
    """The above, g being `scale` and b `bias`.  [N, F], [F], [F] -> [N, F], all float32.

    Raises:
        ValueError: what is given does not fit.
    """
    p = Shape(*x.shape)
    fit = scale.shape == bias.shape == (p.features,) and 0 not in x.shape
    if not fit or any(part.dtype != jnp.float32 for part in (x, scale, bias)):
        what = ", ".join(f"{part.dtype}{list(part.shape)}" for part in (x, scale, bias))
        raise ValueError(f"{what} must have the type float32 and matching shapes, and not be empty")
    (y,) = _call(_forwards, p, [x, scale, bias], [(p.rows, p.width)])
    return y[:, : p.features]


def _gradients(saved: tuple[jax.Array, jax.Array], dy: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    x, scale = saved
    p = Shape(*x.shape)
    dx, sums = _call(_backwards, p, [x, scale, dy], [(p.rows, p.width), (p.pieces, 2 * p.width)])
    dg, db = multiply(jnp.ones((1, p.pieces), jnp.float32), sums).reshape(2, p.width)[:, : p.features]
    return dx[:, : p.features], dg, db


layer_norm.defvjp(lambda x, scale, bias: (layer_norm(x, scale, bias), (x, scale)), _gradients)


def _call(
    unit: Callable[..., None], p: Shape, given: list[jax.Array], results: list[tuple[int, int]]
) -> list[jax.Array]:
    """What `unit` writes."""
    units = min(max(p.rows * p.width // WORTH, 1), 16)
    name = compiled(unit, p, [FLOAT] * (len(given) + len(results)), len(results), units, p.pieces)
    kinds = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in results]
    return list(jax.ffi.ffi_call(name, kinds, vmap_method="sequential")(*map(widen, given)))


def _forwards(code: Code, p: Shape, pointers: list[ir.Value], _: ir.Value, first: ir.Value, last: ir.Value) -> None:
    """Write y of some pieces."""
    x, g, b, y = pointers

    def row(i: ir.Value) -> None:
        x_row, y_row = (code.at(pointer, (i, p.width)) for pointer in (x, y))
        mean, r = _moments(code, p, x_row)

        def write(at: ir.Value) -> list[ir.Value]:
            here = lambda pointer: code.get(code.at(pointer, at))
            z = code.fmul(code.fsub(here(x_row), mean), r)
            code.put(code.multiply_add(z, here(g), here(b)), code.at(y_row, at))
            return []

        _along(code, p, write)

    _each_piece(code, p, first, last, lambda _, begin, end: code.repeat(begin, end, row))


def _backwards(code: Code, p: Shape, pointers: list[ir.Value], _: ir.Value, first: ir.Value, last: ir.Value) -> None:
    """Write dx of some pieces, and what each of them adds to dg and db."""
    x, g, dy, dx, sums = pointers

    def piece(number: ir.Value, begin: ir.Value, end: ir.Value) -> None:
        dg = code.at(sums, (number, 2 * p.width))
        db = code.at(dg, p.width)
        code.fill(dg, 2 * p.width, 0.0)

        def row(i: ir.Value) -> None:
            x_row, dy_row, dx_row = (code.at(pointer, (i, p.width)) for pointer in (x, dy, dx))
            mean, r = _moments(code, p, x_row)
            here = lambda pointer, at: code.get(code.at(pointer, at))
            z = lambda at: code.fmul(code.fsub(here(x_row, at), mean), r)
            h = lambda at: code.fmul(here(g, at), here(dy_row, at))

            def add(at: ir.Value, h_so_far: ir.Value, hz_so_far: ir.Value) -> list[ir.Value]:
                there = h(at)
                return [code.fadd(h_so_far, there), code.multiply_add(there, z(at), hz_so_far)]

            of_h, of_hz = (code.fmul(total, code.all(1 / p.features)) for total in _along(code, p, add, 2))

            def write(at: ir.Value) -> list[ir.Value]:
                rest = code.fsub(code.fsub(h(at), of_h), code.fmul(z(at), of_hz))
                code.put(code.fmul(r, rest), code.at(dx_row, at))
                more = here(dy_row, at)
                code.put(code.multiply_add(more, z(at), here(dg, at)), code.at(dg, at))
                code.put(code.fadd(more, here(db, at)), code.at(db, at))
                return []

            _along(code, p, write)

        code.repeat(begin, end, row)

    _each_piece(code, p, first, last, piece)


def _each_piece(
    code: Code, p: Shape, first: ir.Value, last: ir.Value, body: Callable[[ir.Value, ir.Value, ir.Value], object]
) -> None:
    """`body(piece, begin, end)` for the pieces from `first` to before `last`: its number, and which rows it has."""

    def piece(number: ir.Value) -> None:
        begin = code.mul(number, word(p.piece))
        body(number, begin, code.smaller(code.add(begin, word(p.piece)), word(p.rows)))

    code.repeat(first, last, piece)


def _moments(code: Code, p: Shape, x: ir.Value) -> tuple[ir.Value, ir.Value]:
    """The mean and r of one row, in all lanes."""
    here = lambda at: code.get(code.at(x, at))
    share = code.all(1 / p.features)
    (total,) = _along(code, p, lambda at, so_far: [code.fadd(so_far, here(at))], 1)
    mean = code.fmul(total, share)

    def add(at: ir.Value, so_far: ir.Value) -> list[ir.Value]:
        d = code.fsub(here(at), mean)
        return [code.multiply_add(d, d, so_far)]

    (squares,) = _along(code, p, add, 1)
    root = code.of_c(f"llvm.sqrt.v{code.lanes}f32", code.vector, code.vector)
    below = code.call(root, [code.fadd(code.fmul(squares, share), code.all(NORM_EPS))])
    return mean, code.fdiv(code.all(1.0), below)


def _along(code: Code, p: Shape, body: Callable[..., list[ir.Value]], totals: int = 0) -> list[ir.Value]:
    """`so_far = body(at, *so_far)` for each vector of a row.  Returns the sums of `totals` totals, in all lanes.

    The padding of the last vectors does not count.
    """
    places = range(0, WIDEST, code.lanes)

    def sixteen(start: ir.Value, *so_far: ir.Value, count: int = WIDEST) -> list[ir.Value]:
        new: list[ir.Value] = []
        for i, place in enumerate(places):
            before = so_far[i * totals : (i + 1) * totals]
            after = body(code.add(start, word(place)), *before)
            if place + code.lanes > count:
                counts = ir.Constant(
                    ir.VectorType(ir.IntType(1), code.lanes), [place + k < count for k in range(code.lanes)]
                )
                after = [code.select(counts, b, a) for a, b in zip(before, after, strict=True)]
            new += after
        return new

    so_far = [code.zeros] * (totals * len(places))
    whole = p.features // WIDEST * WIDEST
    if whole <= UNROLLED:
        for start in range(0, whole, WIDEST):
            so_far = sixteen(word(start), *so_far)
    else:
        so_far = code.repeat(0, whole, sixteen, so_far, step=WIDEST)
    if whole < p.features:
        so_far = sixteen(word(whole), *so_far, count=p.features - whole)
    return [_sum(code, so_far[k::totals]) for k in range(totals)]


def _sum(code: Code, vectors: list[ir.Value]) -> ir.Value:
    """The sum of all numbers in `WIDEST` lanes, by halves; in all lanes."""
    while len(vectors) > 1:
        half = len(vectors) // 2
        vectors = [code.fadd(a, b) for a, b in zip(vectors[:half], vectors[half:], strict=True)]
    (total,), half = vectors, code.lanes // 2
    while half:
        others = ir.Constant(ir.VectorType(HALF, code.lanes), [k ^ half for k in range(code.lanes)])
        total, half = code.fadd(total, code.shuffle_vector(total, total, others)), half // 2
    return total
