"""Matrix products: loops whose results have the same bits on any number of threads.

XLA has Eigen multiply, which cuts a long sum by the number of its threads.  Here each number of A B is one sum, in the
order of k,

    c_{m,n} = b_n + sum_k a_{m,k} B_{k,n}

A block of m by some vectors of n is kept in registers while k goes through a part of its range, in which B's rows stay
in a near cache (Goto & van de Geijn 2008, "Anatomy of high-performance matrix multiplication").  A transposed A, as in
a gradient x^T dy, is read as it is: numbers of one of its rows are those of a block.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from llvmlite import ir

from cleanba.kernels.llvm import FLOAT, Code, blocks, compiled, most_across, most_rows, registers, widen, widened, word

NEAR = 256  # rows of B whose blocks of columns stay in a near cache
WORTH = 2**17  # products per unit of work at least: waking a thread for fewer costs more than it saves
OFTEN = 8  # the fewest blocks for which columns are gathered: gathering takes as long as half a block


class Shape(NamedTuple):
    """What is multiplied."""

    rows: int
    inner: int
    columns: int
    transposed: bool = False
    """A is [inner, rows]"""
    bias: bool = False
    """whether something is added to each row"""
    sums: bool = False
    """whether the sums of B's columns are wanted, too"""

    def __str__(self) -> str:
        """As part of a name."""
        more = "".join("_" + name for name in ("transposed", "bias", "sums") if getattr(self, name))
        return f"{self.rows}x{self.inner}x{self.columns}{more}"


@jax.custom_vjp
def affine(x: jax.Array, w: jax.Array, b: jax.Array) -> jax.Array:
    """The sum x W + b.  [N, D], [D, F], [F] -> [N, F], all float32."""
    return multiply(x, w, b)


def _gradients(saved: tuple[jax.Array, jax.Array], dy: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Dx = dy W^T = (W dy^T)^T, in the form that transposes less; dW = x^T dy; db, the sums of dy's columns."""
    (x, w), (n, f) = saved, dy.shape
    d = w.shape[0]
    dw, db = multiply_transposed(x, dy)
    return multiply(dy, w.T) if d * f <= n * (d + f) else multiply(w, dy.T).T, dw, db


affine.defvjp(lambda x, w, b: (affine(x, w, b), (x, w)), _gradients)


def multiply(a: jax.Array, b: jax.Array, bias: jax.Array | None = None) -> jax.Array:
    """A B, or A B + bias.  [M, K], [K, N], [N] -> [M, N], all float32.  Has no gradient; see `affine`."""
    (rows, inner), columns = a.shape, b.shape[1]
    shape = Shape(rows, inner, columns, bias=bias is not None)
    return _call(shape, [a, b] if bias is None else [a, b, bias])[0]


def multiply_transposed(a: jax.Array, b: jax.Array) -> tuple[jax.Array, jax.Array]:
    """A^T B, and the sums of B's columns.  [K, M], [K, N] -> [M, N], [N], all float32.  Has no gradient."""
    (inner, rows), columns = a.shape, b.shape[1]
    c, sums = _call(Shape(rows, inner, columns, transposed=True, sums=True), [a, b])
    return c, sums


def _call(p: Shape, given: list[jax.Array]) -> list[jax.Array]:
    """What `product` writes, without the columns that pad vectors.

    Raises:
        ValueError: shapes or dtypes do not fit.
    """
    first = (p.inner, p.rows) if p.transposed else (p.rows, p.inner)
    shapes = [first, (p.inner, p.columns), (p.columns,)][: len(given)]
    if [x.shape for x in given] != shapes or any(x.dtype != jnp.float32 for x in given) or 0 in p[:3]:
        what = ", ".join(f"{x.dtype}{list(x.shape)}" for x in given)
        raise ValueError(f"{what} must be float32 matrices with matching shapes, none of them empty")
    few, p = p.columns, p._replace(columns=widened(p.columns))
    results = [(p.rows, p.columns), *([(p.columns,)] if p.sums else [])]
    products = p.rows * p.inner * p.columns
    name = compiled(
        product, p, [FLOAT] * (len(given) + len(results)), len(results), units=min(max(products // WORTH, 1), 16),
        count=tasks_of(p)[0],
    )  # fmt: skip
    kinds = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in results]
    found = jax.ffi.ffi_call(name, kinds, vmap_method="sequential")(given[0], *map(widen, given[1:]))
    return [x[..., :few] for x in found]


def tasks_of(p: Shape) -> tuple[int, int]:
    """The number of tasks, each a block of columns and a group of rows; and the number of groups."""
    across = sum(count for _, count, _ in blocks(p.columns // registers()[0], most_across()))
    groups = max(1, min(16 // across, row_blocks(p, most_across())))
    return across * groups, groups


def product(code: Code, p: Shape, pointers: list[ir.Value], _: ir.Value, first: ir.Value, last: ir.Value) -> None:
    """Write some of A B's blocks, and the sums of B's columns."""
    tasks, groups = tasks_of(p)
    across = word(tasks // groups)
    a, b, *others = pointers
    often = row_blocks(p, most_across()) >= OFTEN
    several = p.columns > most_across() * code.lanes  # else they lie side by side as they are
    room = code.room(NEAR * most_across() * code.lanes) if p.transposed and often and several else None

    def part(k: ir.Value, count: int, begins: bool) -> None:
        """Add the products with `count` rows of B, from row k on."""

        def task(t: ir.Value) -> None:
            column, group = code.srem(t, across), code.sdiv(t, across)

            def columns(place: ir.Value, wide: int) -> None:
                in_all = word(row_blocks(p, wide))
                first, last = (code.sdiv(code.mul(in_all, g), word(groups)) for g in (group, code.add(group, word(1))))
                here = code.at(b, (k, p.columns), place)
                bias, c = (code.at(x, place) for x in (others[0], others[p.bias]))
                if p.sums:
                    with code.if_then(code.icmp_signed("==", group, word(0))):
                        _add_rows(code, p, here, code.at(others[-1], place), wide, count, begins)
                line = p.columns
                if room is not None:
                    here, line = _gathered(code, here, line, wide * code.lanes, count, room), wide * code.lanes
                matrices = a, here, c, bias if p.bias else None
                write_columns(code, p, matrices, line, wide, (first, last), k, count, begins)

            each_columns(code, p.columns, column, code.add(column, word(1)), columns)

        code.repeat(first, last, task)

    for_parts(code, p.inner, lambda k, count, begins, ends: part(k, count, begins))


def row_blocks(p: Shape, wide: int) -> int:
    """How many blocks of rows there are, where a block has `wide` vectors of columns."""
    return sum(number for _, number, _ in blocks(p.rows, most_rows(wide)))


def for_parts(code: Code, inner: int, part: Callable[[ir.Value, int, bool, bool], None]) -> None:
    """`part(k, count, begins, ends)` for the parts of a sum over k: from where, how many, whether first or last."""
    begin = inner - (inner - 1) // NEAR * NEAR
    part(word(0), begin, True, begin == inner)
    if begin < inner:
        code.repeat(begin, inner - NEAR, lambda k: part(k, NEAR, False, False), step=NEAR)
        part(word(inner - NEAR), NEAR, False, True)


def each_columns(
    code: Code, columns: int, first: int | ir.Value, last: int | ir.Value, body: Callable[[ir.Value, int], None]
) -> None:
    """`body(place, wide)` for blocks of columns from `first` to before `last`: where each begins, and its vectors."""
    first, last = (word(x) if isinstance(x, int) else x for x in (first, last))
    before = 0
    for wide, number, start in blocks(columns // code.lanes, most_across()):

        def block(i: ir.Value, wide: int = wide, more: int = start - before * wide) -> None:
            body(code.add(code.mul(i, word(wide * code.lanes)), word(more * code.lanes)), wide)

        code.within(before, number, first, last, block)
        before += number


def write_columns(
    code: Code, p: Shape, matrices: tuple[ir.Value, ir.Value, ir.Value, ir.Value | None], line: int, wide: int,
    some: tuple[ir.Value, ir.Value], k: ir.Value, count: int, begins: bool,
    finish: Callable[[ir.Value, tuple[ir.Value, int], int], ir.Value] | None = None,
) -> None:  # fmt: skip
    """Write some blocks of rows, of `wide` vectors of columns.

    matrices: A, B at row k and at the first of the columns, C there, and what is added to each row there.
    line: the distance from a row of B to the next.
    finish: turns a vector of sums into what is written; its other arguments are the place in C.
    """
    a, b, c, bias = matrices
    vectors = [v * code.lanes for v in range(wide)]
    down, along = (1, p.rows) if p.transposed else (p.inner, 1)
    unrolled = next(u for u in (4, 3, 2, 1) if count % u == 0)
    blocks_before = 0
    for many, number, start in blocks(p.rows, most_rows(wide)):

        def block(i: ir.Value, many: int = many, more: int = start - many * blocks_before) -> None:
            row = code.add(code.mul(i, word(many)), word(more))
            places = [((row, p.columns), m * p.columns + v) for m in range(many) for v in vectors]
            here = [code.at(c, *place) for place in places]
            numbers = code.at(a, (row, down), (k, along))

            def term(k: ir.Value, *sums: ir.Value) -> list[ir.Value]:
                new = list(sums)
                for u in range(unrolled):
                    row_of_b = [code.get(code.at(b, (k, line), u * line + v)) for v in vectors]
                    for m in range(many):
                        number = code.spread(code.at(numbers, (k, along), u * along + m * down))
                        for v in range(wide):
                            new[m * wide + v] = code.multiply_add(number, row_of_b[v], new[m * wide + v])
                return new

            if begins and bias is not None:
                sums = [code.get(code.at(bias, v)) for v in vectors] * many
            else:
                sums = [code.zeros if begins else code.get(at) for at in here]
            for at, value, place in zip(here, code.repeat(0, count, term, sums, unrolled), places, strict=True):
                code.put(finish(value, *place) if finish else value, at)

        code.within(blocks_before, number, *some, block)
        blocks_before += number


def _gathered(code: Code, b: ir.Value, line: int, wide: int, count: int, room: ir.Value) -> ir.Value:
    """Copy `count` rows of some columns of B, so that they lie side by side.

    Addresses a power of two apart map to the same few cache sets, so A's numbers would evict B's.
    """

    def row(k: ir.Value) -> None:
        for v in range(0, wide, code.lanes):
            code.put(code.get(code.at(b, (k, line), v)), code.at(room, (k, wide), v))

    code.repeat(0, count, row)
    return room


def _add_rows(code: Code, p: Shape, b: ir.Value, sums: ir.Value, wide: int, count: int, begins: bool) -> None:
    """Add `count` rows of B, in some columns."""
    vectors = [v * code.lanes for v in range(wide)]

    def add(k: ir.Value, *totals: ir.Value) -> list[ir.Value]:
        rows = [code.get(code.at(b, (k, p.columns), v)) for v in vectors]
        return [code.fadd(total, row) for total, row in zip(totals, rows, strict=True)]

    before = [code.zeros if begins else code.get(code.at(sums, v)) for v in vectors]
    for v, total in zip(vectors, code.repeat(0, count, add, before), strict=True):
        code.put(total, code.at(sums, v))
