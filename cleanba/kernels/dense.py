"""Dense layers one after the other: loops that compute the whole chain for some rows of the batch at a time.

    y_0 = x,  y_l = f(y_{l-1} W_l + b_l),  the last one without f, if it is linear

Between layers nothing waits, and what one layer writes the next reads from the cache of the same core.  Gradients go
back the same way, dz_l being the loss's derivatives with respect to the arguments of f:

    dz_L = dy f'_L,  dz_{l-1} = (dz_l W_l^T) f'_{l-1},  dW_l = y_{l-1}^T dz_l

Each number is one sum in the order of k, as in `product.py`.
"""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import NamedTuple

import jax
import jax.numpy as jnp
from llvmlite import ir

from cleanba.kernels.llvm import FLOAT, Code, blocks, compiled, widen, widened, word
from cleanba.kernels.plain import Activation
from cleanba.kernels.product import (
    WORTH,
    Shape,
    each_columns,
    for_parts,
    multiply,
    product,
    row_blocks,
    tasks_of,
    write_columns,
)
from cleanba.limits import usable_cores

Layer = tuple[jax.Array, jax.Array]  # weights [D, F] and bias [F]
FEWEST = 16  # rows in a group
# tanh(x) = x P(x^2) / Q(x^2), with the least relative error for |x| up to FAR, beyond which it is 1 or -1 in float32.
P = 1.0, 0.1337973177433014, 0.0034940496552735567, 2.058369864244014e-05, 1.3319316316540153e-08
Q = 1.0, 0.4671304523944855, 0.02587113343179226, 0.00032831160933710635, 7.762131417621276e-07
FAR = 9.02


class Chain(NamedTuple):
    """What the loops depend on."""

    rows: int
    widths: tuple[int, ...]
    """of the input, and of each layer's output"""
    activation: Activation
    linear: bool
    backward: bool = False

    def __str__(self) -> str:
        """As part of a name."""
        more = "".join("_" + name for name in ("linear", "backward") if getattr(self, name))
        return f"{self.rows}x{'x'.join(map(str, self.widths))}_{self.activation}{more}"


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def mlp(activation: Activation, linear: bool, x: jax.Array, layers: Sequence[Layer]) -> jax.Array:
    """All layers, each followed by the activation, but for the last if `linear`.  [N, D] -> [N, F_L], float32.

    An infinity in x or in a layer's output may make a row NaN: weights are padded with zeros, and 0 x inf is NaN.

    Raises:
        ValueError: what is given does not fit.
    """
    return _forward(activation, linear, x, layers)[0]


def _forward(
    activation: Activation, linear: bool, x: jax.Array, layers: Sequence[Layer]
) -> tuple[jax.Array, tuple[list[jax.Array], Sequence[Layer]]]:
    """The output, and what gradients need: the inputs of all layers and the output, widened, and the layers."""
    given = [x, *(p for layer in layers for p in layer)]
    sizes = (x.shape[1], *(b.size for _, b in layers))
    fit = all(
        w.shape == between and b.shape == between[1:] for (w, b), between in zip(layers, pairwise(sizes), strict=True)
    )
    if not fit or 0 in (*x.shape, *sizes) or any(p.dtype != jnp.float32 for p in given):
        what = ", ".join(f"{p.dtype}{list(p.shape)}" for p in given)
        raise ValueError(f"{what} must have the type float32 and matching shapes, and not be empty")
    widths = (x.shape[1], *(widened(w.shape[1]) for w, _ in layers))
    wide = [(_rows(widen(w), d), widen(b)) for (w, b), d in zip(layers, widths[:-1], strict=True)]
    ys = _call(Chain(x.shape[0], widths, activation, linear), [x, *(p for layer in wide for p in layer)])
    return ys[-1][:, : layers[-1][1].size], ([x, *ys], layers)


def _gradients(
    activation: Activation, linear: bool, saved: tuple[list[jax.Array], Sequence[Layer]], dy: jax.Array
) -> tuple[jax.Array, Sequence[Layer]]:
    ys, layers = saved
    widths = tuple(y.shape[1] for y in ys)
    transposed = [_rows(widen(w), d).T for (w, _), d in zip(layers[1:], widths[1:-1], strict=True)]
    chain = Chain(dy.shape[0], widths[1:], activation, linear, backward=True)
    dzs = _call(chain, [widen(dy), *transposed, *ys[1:]])
    found = multiply_all_transposed(ys[:-1], dzs)
    cut = [(dw[: w.shape[0], : b.size], db[: b.size]) for (w, b), (dw, db) in zip(layers, found, strict=True)]
    first = layers[0][0]
    dx = multiply(dzs[0][:, : first.shape[1]], first.T)
    return dx, jax.tree.unflatten(jax.tree.structure(layers), jax.tree.leaves(cut))


mlp.defvjp(_forward, _gradients)


class Products(NamedTuple):
    """Several products at once."""

    each: tuple[Shape, ...]

    def __str__(self) -> str:
        """As part of a name."""
        return "_".join(map(str, self.each))


def multiply_all_transposed(ys: list[jax.Array], dzs: list[jax.Array]) -> list[Layer]:
    """The products y^T dz, and the sums of dz's columns; dz are widened.  [K, M], [K, N] -> [M, N], [N] of each."""
    p = Products(
        tuple(
            Shape(y.shape[1], dz.shape[0], dz.shape[1], transposed=True, sums=True)
            for y, dz in zip(ys, dzs, strict=True)
        )
    )
    shapes = [shape for one in p.each for shape in ((one.rows, one.columns), (one.columns,))]
    sizes, tasks = sum(one.rows * one.inner * one.columns for one in p.each), sum(tasks_of(one)[0] for one in p.each)
    units = min(max(sizes // WORTH, 1), tasks, 16)
    name = compiled(products, p, [FLOAT] * 4 * len(p.each), len(shapes), units, tasks)
    kinds = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    given = [x for pair in zip(ys, dzs, strict=True) for x in pair]
    found = jax.ffi.ffi_call(name, kinds, vmap_method="sequential")(*given)
    return list(zip(found[::2], found[1::2], strict=True))


def products(
    code: Code, p: Products, pointers: list[ir.Value], number: ir.Value, first: ir.Value, last: ir.Value
) -> None:
    """Write some blocks of several products."""
    before, results = 0, 2 * len(p.each)
    for i, one in enumerate(p.each):
        tasks = tasks_of(one)[0]
        its = [pointers[2 * i + k + start] for start in (0, results) for k in range(2)]
        start, stop = (code.sub(x, word(before)) for x in (first, last))
        product(code, one, its, number, code.larger(start, word(0)), code.smaller(stop, word(tasks)))
        before += tasks


def _rows(x: jax.Array, count: int) -> jax.Array:
    """Append rows of zeros to x, up to `count` rows."""
    return x if x.shape[0] == count else jnp.pad(x, ((0, count - x.shape[0]), (0, 0)))


def _call(p: Chain, given: list[jax.Array]) -> list[jax.Array]:
    """What `chain` writes."""
    results = [(p.rows, width) for width in (p.widths if p.backward else p.widths[1:])]
    products = p.rows * sum(d * f for d, f in pairwise(p.widths))
    kinds, groups = [FLOAT] * (len(given) + len(results)), sum(number for _, number, _ in _groups(p))
    units = min(max(products // WORTH, 1), groups)
    name = compiled(chain, p, kinds, len(results), units, groups)
    shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in results]
    return list(jax.ffi.ffi_call(name, shapes, vmap_method="sequential")(*given))


def _groups(p: Chain) -> list[tuple[int, int, int]]:
    """Near-equal groups of rows: (rows, number of such groups, first row) of each kind.

    Two for each core, so that a core has its own; but not of too few rows, as each group reads all weights.
    """
    return blocks(p.rows, max(-(-p.rows // (2 * usable_cores())), min(p.rows, FEWEST)))


def chain(code: Code, p: Chain, pointers: list[ir.Value], _: ir.Value, first: ir.Value, last: ir.Value) -> None:
    """Write all layers for some groups of rows."""
    groups_before = 0
    for size, number, start in _groups(p):

        def group(i: ir.Value, size: int = size, more: int = start - size * groups_before) -> None:
            row = code.add(code.mul(i, word(size)), word(more))
            (_backward if p.backward else _layers)(code, p, pointers, row, size)

        code.within(groups_before, number, first, last, group)
        groups_before += number


def _layers(code: Code, p: Chain, pointers: list[ir.Value], row: ir.Value, size: int) -> None:
    """Forward: pointers to x, weights and bias of each layer, then what each layer gives."""
    depth = len(p.widths) - 1
    ys = [pointers[0], *pointers[1 + 2 * depth :]]
    for i, (d, f) in enumerate(pairwise(p.widths)):
        w, b = pointers[1 + 2 * i : 3 + 2 * i]
        here, there = (code.at(y, (row, width)) for y, width in ((ys[i], d), (ys[i + 1], f)))
        as_it_is = p.linear and i == depth - 1
        finish = (lambda x, *_: x) if as_it_is else lambda x, *_: _activate(code, p.activation, x)
        _layer(code, Shape(size, d, f, bias=True), here, w, there, b, finish)


def _backward(code: Code, p: Chain, pointers: list[ir.Value], row: ir.Value, size: int) -> None:
    """Backward: pointers to dy, W_2^T to W_L^T, what each layer gave, then dz_1 to dz_L."""
    depth = len(p.widths)
    dy, transposed, ys, dzs = pointers[0], pointers[1:depth], pointers[depth : 2 * depth], pointers[2 * depth :]
    at_row = lambda x, i: code.at(x, (row, p.widths[i]))
    y, dz, dy = (at_row(x, depth - 1) for x in (ys[-1], dzs[-1], dy))
    end = size * p.widths[-1]

    def last(i: ir.Value) -> None:
        value = code.get(code.at(dy, i))
        code.put(value if p.linear else _slope(code, p.activation, value, code.get(code.at(y, i))), code.at(dz, i))

    code.repeat(0, end, last, step=code.lanes)
    for i in reversed(range(depth - 1)):
        y = at_row(ys[i], i)
        shape = Shape(size, p.widths[i + 1], p.widths[i])
        finish = lambda value, *place, y=y: _slope(code, p.activation, value, code.get(code.at(y, *place)))
        _layer(code, shape, at_row(dzs[i + 1], i + 1), transposed[i], at_row(dzs[i], i), None, finish)


def _layer(
    code: Code, p: Shape, a: ir.Value, b: ir.Value, c: ir.Value, bias: ir.Value | None, finish: Callable[..., ir.Value]
) -> None:
    """One product, for as many rows as `p` says; `finish(sums, *place)` is written to that place in C."""

    def part(k: ir.Value, count: int, begins: bool, ends: bool) -> None:
        def columns(place: ir.Value, wide: int) -> None:
            here = None if bias is None else code.at(bias, place)
            done = (lambda value, row, more: finish(value, row, place, more)) if ends else None
            matrices = a, code.at(b, (k, p.columns), place), code.at(c, place), here
            write_columns(
                code, p, matrices, p.columns, wide, (word(0), word(row_blocks(p, wide))), k, count, begins, done
            )

        each_columns(code, p.columns, 0, p.columns, columns)

    for_parts(code, p.inner, part)


def _activate(code: Code, activation: Activation, x: ir.Value) -> ir.Value:
    """f(x); NaN stays NaN."""
    if activation == "relu":
        return code.select(code.fcmp_unordered(">", x, code.zeros), x, code.zeros)
    x = _between(code, x, FAR)
    square = code.fmul(x, x)
    above, below = (_polynomial(code, numbers, square) for numbers in (P, Q))
    return _between(code, code.fdiv(code.fmul(x, above), below), 1.0)


def _slope(code: Code, activation: Activation, d: ir.Value, y: ir.Value) -> ir.Value:
    """The derivative with respect to x, from the derivative with respect to f(x) and from f(x) itself."""
    if activation == "relu":
        return code.select(code.fcmp_ordered(">", y, code.zeros), d, code.zeros)
    return code.fmul(d, code.fsub(code.all(1.0), code.fmul(y, y)))


def _between(code: Code, x: ir.Value, most: float) -> ir.Value:
    """Clamp x to [-most, most]; NaN stays NaN."""
    for sign, beyond in ((-1.0, "<"), (1.0, ">")):
        bound = code.all(sign * most)
        x = code.select(code.fcmp_ordered(beyond, x, bound), bound, x)
    return x


def _polynomial(code: Code, numbers: Sequence[float], x: ir.Value) -> ir.Value:
    """The sum of numbers[i] x^i."""
    total = code.all(numbers[-1])
    for number in reversed(numbers[:-1]):
        total = code.multiply_add(total, x, code.all(number))
    return total
