"""Convolutions and max-pooling: loops that keep a block of results in the vector registers.

XLA's convolution on CPUs copies each pixel's neighbourhood and multiplies what it copied as a matrix.  With 16 or 32
channels the copy costs more than the product.  Here nothing is copied: a row of k pixels of C channels lies in memory
as k C numbers in a row, so with T = k C

    y_{h,p,f} = b_f + sum_{d<k} sum_{t<T} x_{sh+d, spC+t} K_{d,t,f}
    dK_{d,t,f} = sum_{n,h,p} x_{sh+d, spC+t} dy_{h,p,f}

are computed for a block of p (or t) by some vectors of f: one number of x in all lanes is multiplied by a vector and
added to a register, two such products in each cycle (direct convolution: Georganas et al. 2018, "Anatomy of
high-performance deep learning convolutions on SIMD architectures").  Sums are taken in the order above, whatever the
length of the processor's vectors.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from llvmlite import ir

from cleanba.kernels.llvm import (
    BYTE,
    FLOAT,
    HALF,
    WIDEST,
    Code,
    blocks,
    compiled,
    most_across,
    most_rows,
    widen,
    widened,
    word,
)
from cleanba.kernels.plain import Convolution, Pads

PARTS = 32  # units of a batch at most
CACHED = 8192  # floats of x that stay in a first-level cache


class Window(NamedTuple):
    """A convolution's shape."""

    height: int
    width: int
    channels: int
    features: int
    size: int
    stride: int
    pads: Pads
    images: str = ""
    """what x is: "" for float32 [N, H, W, C], "last" for bytes [N, H, W, C], "first" for bytes [N, C, H, W]"""
    rectify: bool = False
    """whether max(x, 0) is what is convolved"""
    skip: bool = False
    """whether something is added to y"""
    mask: bool = False
    """whether y is set to 0 where something is not positive"""
    pool: bool = False
    """whether what comes out is pooled: y in `forward`, dy in `gradient`"""
    unpool: bool = False
    """whether x is the gradient of what was pooled"""

    @property
    def padded(self) -> tuple[int, int]:
        """Rows and columns with their padding."""
        return self.height + sum(self.pads[0]), self.width + sum(self.pads[1])

    @property
    def out(self) -> tuple[int, int]:
        """Rows and columns that come out."""
        rows, columns = ((n - self.size) // self.stride + 1 for n in self.padded)
        return rows, columns

    @property
    def pooling(self) -> "Window":
        """The windows of which maxima are taken, over what comes out."""
        return _maxima(*self.out, self.features)

    @property
    def before(self) -> "Window":
        """The windows of which maxima were taken, where x is their gradient."""
        return _maxima(self.height, self.width, self.channels)

    def __str__(self) -> str:
        """As part of a name."""
        (top, bottom), (left, right) = self.pads
        x = f"{self.height}x{self.width}x{self.channels}{self.images}"
        more = "".join("_" + name for name in ("rectify", "skip", "mask", "pool", "unpool") if getattr(self, name))
        return (
            f"{x}_{self.size}x{self.size}x{self.features}_stride{self.stride}_pads{top}_{bottom}_{left}_{right}{more}"
        )


def _maxima(height: int, width: int, channels: int) -> Window:
    """Windows of 3 x 3 in steps of 2, padded ("SAME")."""
    rows, columns = (((2 * -(-d // 2) + 1 - d) // 2, (2 * -(-d // 2) + 2 - d) // 2) for d in (height, width))
    return Window(height, width, channels, channels, 3, 2, (rows, columns))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def convolve(how: Convolution, x: jax.Array, kernel: jax.Array, bias: jax.Array, skip: jax.Array | None) -> jax.Array:
    """y_hw = b + sum_ij x_{sh+i, sw+j} K_ij + skip_hw.  [N, H, W, C], [k, k, C, F], [F] -> [N, H', W', F], float32.

    x is float32, or bytes, which have no gradient.  Where what comes out is pooled, the first of equal maxima has the
    gradient.
    """
    return _forward(how, x, kernel, bias, skip)[0]


def _forward(
    how: Convolution, x: jax.Array, kernel: jax.Array, bias: jax.Array, skip: jax.Array | None
) -> tuple[jax.Array, tuple[jax.Array, jax.Array, jax.Array | None, bool]]:
    w, few = _window(how, x, kernel, skip is not None), kernel.shape[-1]
    y, where = _call(w._replace(skip=skip is not None), [x], kernel, bias, skip)
    return y[..., :few], (x, kernel, where, skip is not None)


def _call(
    w: Window, xs: list[jax.Array], kernel: jax.Array, bias: jax.Array, other: jax.Array | None
) -> tuple[jax.Array, jax.Array | None]:
    """What `forward` writes: y, and where in its window each maximum was."""
    y = (xs[0].shape[0], *(w.pooling if w.pool else w).out, w.features)
    kinds = (jnp.float32, jnp.uint8) if w.pool else (jnp.float32,)
    results = [jax.ShapeDtypeStruct(y, kind) for kind in kinds]
    given = [*xs, *(widen(p) for p in (kernel, bias, other) if p is not None)]
    name = compiled(forward, w, [*map(_kind, given), *map(_kind, results)], len(results), PARTS)
    first, *more = jax.ffi.ffi_call(name, results, vmap_method="sequential")(*given)
    return first, more[0] if more else None


def _backward(
    how: Convolution, saved: tuple[jax.Array, jax.Array, jax.Array | None, bool], dy: jax.Array
) -> tuple[jax.Array | None, jax.Array, jax.Array, jax.Array | None]:
    """All gradients.  That of x, sum_ij dy_{h-i, w-j} K_ij^T, is dy convolved with the flipped kernel."""
    (x, kernel, where, skipped), (pads, stride) = saved, how[:2]
    w, few = _window(how, x, kernel, skipped), kernel.shape[-1]
    # At least two sums, for two threads; more if each has eight images; not so many that adding them up takes long.
    parts = max(min(x.shape[0], 2), min(x.shape[0] // 8, 16))
    results = [jax.ShapeDtypeStruct((parts, *shape, w.features), jnp.float32) for shape in (kernel.shape[:-1], ())]
    given = [x, widen(dy), *([] if where is None else [where])]
    name = compiled(gradient, w, [*map(_kind, given), *map(_kind, results)], 2)
    dk, db = (p.sum(0)[..., :few] for p in jax.ffi.ffi_call(name, results, vmap_method="sequential")(*given))
    dskip = dy if skipped else None
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return None, dk, db, dskip
    flipped = cells_kernel(kernel, stride)[::-1, ::-1].swapaxes(2, 3)
    last, none = flipped.shape[0] - 1, jnp.zeros(flipped.shape[-1], jnp.float32)
    if stride > 1:
        dcells = convolve(Convolution(((last, last), (last, last))), dy, flipped, none, None)
        (dx,) = jax.linear_transpose(lambda x: cells(x, kernel.shape[0], stride, pads), x)(dcells)
        return jnp.where(x > 0, dx, 0.0) if how.rectify else dx, dk, db, dskip
    (top, bottom), (left, right) = pads
    back = ((last - top, last - bottom), (last - left, last - right))
    (rows, columns), c = w.out, x.shape[-1]
    w = Window(rows, columns, few, widened(c), last + 1, 1, back, mask=how.rectify, unpool=how.pool)
    dx, _ = _call(w, [dy] if where is None else [dy, where], flipped, none, x if how.rectify else None)
    return dx[..., :c], dk, db, dskip


convolve.defvjp(_forward, _backward)


def _window(how: Convolution, x: jax.Array, kernel: jax.Array, skips: bool) -> Window:
    """The shape of a convolution.

    Raises:
        ValueError: the kernels do not support it.
    """
    images = "" if x.dtype == jnp.float32 else "first" if how.planes else "last"
    height, width = x.shape[2:] if how.planes else x.shape[1:3]
    size, across, channels, features = kernel.shape
    w = Window(height, width, channels, widened(features), size, how.stride, how.pads, images, how.rectify)
    if x.dtype not in (jnp.float32, jnp.uint8) or kernel.dtype != jnp.float32:
        raise ValueError(
            f"x is {x.dtype} and the kernel {kernel.dtype}; x must be float32 or uint8, the kernel float32"
        )
    if size != across or min(w.padded) < size or max(max(pad) for pad in how.pads) >= size:
        raise ValueError(f"{w} must have a square kernel, no larger than a padded image, and larger than any padding")
    if how.pool and (how.stride > 1 or size != 3 or how.pads != ((1, 1), (1, 1)) or features % WIDEST or skips):
        raise ValueError(f"the output of {w} cannot be pooled")
    return w._replace(pool=how.pool)


def _kind(x: jax.Array | jax.ShapeDtypeStruct) -> ir.Type:
    return FLOAT if x.dtype == jnp.float32 else BYTE


def cells(x: jax.Array, size: int, stride: int, pads: Pads) -> jax.Array:
    """Space-to-depth: cells of stride x stride pixels become one pixel each, so a strided convolution has stride 1.

    [N, H, W, C] -> [N, H' + k' - 1, W' + k' - 1, stride * stride * C], where k' = ceil(size / stride).
    """
    n, c = x.shape[0], x.shape[3]
    count = [(d + sum(p) - size) // stride + -(-size // stride) for d, p in zip(x.shape[1:3], pads, strict=True)]
    edges = [(p[0], m * stride - d - p[0], 0) for d, p, m in zip(x.shape[1:3], pads, count, strict=True)]
    x = lax.pad(x, jnp.zeros((), x.dtype), ((0, 0, 0), *edges, (0, 0, 0)))
    x = x.reshape(n, count[0], stride, count[1], stride, c).transpose(0, 1, 3, 2, 4, 5)
    return x.reshape(n, *count, stride * stride * c)


def cells_kernel(kernel: jax.Array, stride: int) -> jax.Array:
    """A kernel for `cells`.  [k, k, C, F] -> [k', k', stride * stride * C, F], where k' = ceil(k / stride)."""
    size, _, c, f = kernel.shape
    count = -(-size // stride)
    kernel = jnp.pad(kernel, ((0, count * stride - size), (0, count * stride - size), (0, 0), (0, 0)))
    kernel = kernel.reshape(count, stride, count, stride, c, f).transpose(0, 2, 1, 3, 4, 5)
    return kernel.reshape(count, count, stride * stride * c, f)


def forward(code: Code, w: Window, pointers: list[ir.Value], _: ir.Value, first: ir.Value, last: ir.Value) -> None:
    """Write y from x, kernel and bias, for some of the images."""
    x, kernel, bias = pointers[w.unpool : 3 + w.unpool]
    others, results = pointers[3 + w.unpool : -1 - w.pool], pointers[-1 - w.pool :]
    (rows, columns), row, f = w.out, w.size * w.channels, w.features
    look = _unpooled(code, w.before, w.pads, *pointers[:2]) if w.unpool else _reader(code, w, x)
    room, finish = _pooled(code, w.pooling, *results) if w.pool else (None, None)
    line_of_y = (w.pooling.padded[1] if w.pool else columns) * f
    wide = _vectors_at_once(code, f, most_across())
    vectors = [i * code.lanes for i in range(wide)]

    def image(n: ir.Value) -> None:
        seen = look(n)
        y = room or code.at(results[0], (n, rows * columns * f))
        beside = [code.at(other, (n, rows * columns * f)) for other in others]

        def some_features(v: ir.Value) -> None:
            def line(h: ir.Value) -> None:
                for many, count, start in blocks(columns, most_rows(wide)):

                    def block(q: ir.Value, many: int = many, start: int = start) -> None:
                        step = w.stride * w.channels  # from one result's first number to the next one's
                        corner = code.at(seen, (h, w.stride * w.padded[1] * w.channels), (q, many * step), start * step)

                        def across(d: ir.Value, *sums: ir.Value) -> list[ir.Value]:
                            numbers = code.at(corner, (d, w.padded[1] * w.channels))
                            weights = code.at(kernel, (d, row * f), v)

                            def term(t: ir.Value, *sums: ir.Value) -> list[ir.Value]:
                                new = list(sums)
                                for u in range(unrolled):
                                    k = [
                                        code.get(code.at(weights, (t, f), u * f + i * code.lanes)) for i in range(wide)
                                    ]
                                    for p in range(many):
                                        number = code.spread(code.at(numbers, t, p * step + u))
                                        for i in range(wide):
                                            new[p * wide + i] = code.multiply_add(number, k[i], new[p * wide + i])
                                return new

                            unrolled = next(u for u in (4, 3, 2, 1) if row % u == 0)
                            return code.repeat(0, row, term, sums, unrolled)

                        sums = [code.get(code.at(bias, v, i)) for i in vectors] * many
                        sums = code.repeat(0, w.size, across, sums)
                        here = [code.at(p, (h, line_of_y), (q, many * f), v, start * f) for p in (y, *beside)]
                        for p in range(many):
                            for i, at in enumerate(vectors):
                                value, (to, *of) = sums[p * wide + i], [code.at(place, p * f + at) for place in here]
                                if w.mask:
                                    positive = code.fcmp_ordered(">", code.get(of[-1]), code.zeros)
                                    value = code.select(positive, value, code.zeros)
                                code.put(code.fadd(value, code.get(of[0])) if w.skip else value, to)

                    code.repeat(0, count, block)

            code.repeat(0, rows, line)

        code.repeat(0, f, some_features, step=wide * code.lanes)
        if finish:
            finish(n)

    code.repeat(first, last, image)


def gradient(code: Code, w: Window, pointers: list[ir.Value], part: ir.Value, first: ir.Value, last: ir.Value) -> None:
    """Write a part's sums of dK and db from x and dy: those of some of the images."""
    x, dy, *where, dk, db = pointers
    (rows, columns), row, f = w.out, w.size * w.channels, w.features
    look = _reader(code, w, x)
    wide = _vectors_at_once(code, f, 2)
    vectors = [i * code.lanes for i in range(wide)]
    dk, db = code.at(dk, (part, w.size * row * f)), code.at(db, (part, f))
    code.fill(dk, w.size * row * f, 0.0)
    code.fill(db, f, 0.0)
    after = w.pooling
    look_back = (
        _unpooled(code, after, after.pads, dy, *where) if w.pool else lambda n: code.at(dy, (n, rows * columns * f))
    )
    line_of_dy = (after.padded[1] if w.pool else columns) * f
    first_of_dy = _inside(after.pads, after.padded[1], f) if w.pool else 0
    near = max(1, min(rows, CACHED // (w.padded[1] * w.channels * w.stride)))  # rows of results at once

    def image(n: ir.Value) -> None:
        seen, given = look(n), code.at(look_back(n), first_of_dy)

        def some_rows(start: ir.Value, stop: ir.Value) -> None:
            def some_features(v: ir.Value) -> None:
                def rows_of_kernel(d: ir.Value) -> None:
                    for many, count, t0 in blocks(row, most_rows(wide)):

                        def block(q: ir.Value, many: int = many, t0: int = t0) -> None:
                            here = [
                                code.at(dk, (d, row * f), (q, many * f), v, (t0 + j) * f + i)
                                for j in range(many)
                                for i in vectors
                            ]

                            def line(h: ir.Value, *sums: ir.Value) -> list[ir.Value]:
                                below = code.add(code.mul(h, word(w.stride)), d)
                                numbers = code.at(seen, (below, w.padded[1] * w.channels), (q, many), t0)
                                gradients = code.at(given, (h, line_of_dy), v)

                                def pixel(p: ir.Value, *sums: ir.Value) -> list[ir.Value]:
                                    new = list(sums)
                                    g = [code.get(code.at(gradients, (p, f), i)) for i in vectors]
                                    for j in range(many):
                                        number = code.spread(code.at(numbers, (p, w.stride * w.channels), j))
                                        for i in range(wide):
                                            new[j * wide + i] = code.multiply_add(number, g[i], new[j * wide + i])
                                    return new

                                return code.repeat(0, columns, pixel, sums)

                            sums = code.repeat(start, stop, line, [code.get(place) for place in here])
                            for place, value in zip(here, sums, strict=True):
                                code.put(value, place)

                        code.repeat(0, count, block)

                code.repeat(0, w.size, rows_of_kernel)

            code.repeat(0, f, some_features, step=wide * code.lanes)

        whole = rows // near * near
        code.repeat(0, whole, lambda h: some_rows(h, code.add(h, word(near))), step=near)
        if whole < rows:
            some_rows(word(whole), word(rows))

        def some_biases(v: ir.Value) -> None:
            def line(h: ir.Value, total: ir.Value) -> list[ir.Value]:
                add = lambda p, total: [code.fadd(total, code.get(code.at(given, (h, line_of_dy), (p, f), v)))]
                return code.repeat(0, columns, add, [total])

            (total,) = code.repeat(0, rows, line, [code.get(code.at(db, v))])
            code.put(total, code.at(db, v))

        code.repeat(0, f, some_biases, step=code.lanes)

    code.repeat(first, last, image)


def _pooled(code: Code, w: Window, y: ir.Value, where: ir.Value) -> tuple[ir.Value, Callable[[ir.Value], None]]:
    """Memory for an image to be pooled, and `finish(n)`, which writes the maxima and their places in the windows."""
    (height, width), (rows, columns), c = w.padded, w.out, w.channels
    room = code.room(height * width * c)
    code.fill(room, height * width * c, -math.inf)

    def finish(n: ir.Value) -> None:
        def window(h: ir.Value, p: ir.Value, i: int) -> None:
            first, *others = (code.get(place) for place in _places(code, w, room, w.pads, h, p, i))
            best, number = first, code.zeros
            for k, value in enumerate(others, 1):
                greater = code.or_(code.fcmp_ordered(">", value, best), code.fcmp_unordered("uno", value, value))
                best, number = code.select(greater, value, best), code.select(greater, code.all(k), number)
            index = (n, rows * columns * c), (h, columns * c), (p, c), i
            code.put(best, code.at(y, *index))
            code.put(code.fptoui(number, ir.VectorType(BYTE, code.lanes)), code.at(where, *index))

        _for_windows(code, w, window)

    return code.at(room, _inside(w.pads, width, c)), finish


def _unpooled(code: Code, w: Window, pads: Pads, dy: ir.Value, where: ir.Value) -> Callable[[ir.Value], ir.Value]:
    """Returns `look(n)`, which computes the padded gradient of a pooled image and returns its address."""
    (rows, columns), c = w.out, w.channels
    height, width = w.height + sum(pads[0]), w.width + sum(pads[1])
    room = code.room(height * width * c)

    def look(n: ir.Value) -> ir.Value:
        code.fill(room, height * width * c, 0.0)

        def window(h: ir.Value, p: ir.Value, i: int) -> None:
            index = (n, rows * columns * c), (h, columns * c), (p, c), i
            given, number = code.get(code.at(dy, *index)), code.get(code.at(where, *index))
            for k, place in enumerate(_places(code, w, room, pads, h, p, i)):
                hit = code.fcmp_ordered("==", number, code.all(k))
                code.put(code.fadd(code.get(place), code.select(hit, given, code.zeros)), place)

        _for_windows(code, w, window)
        return room

    return look


def _places(code: Code, w: Window, image: ir.Value, pads: Pads, h: ir.Value, p: ir.Value, i: int) -> list[ir.Value]:
    """The places of a window's pixels, row by row, in an image with at least the window's padding."""
    row = (w.width + sum(pads[1])) * w.channels
    down, right = (mine[0] - its[0] for mine, its in zip(pads, w.pads, strict=True))
    corner = code.at(image, (h, w.stride * row), (p, w.stride * w.channels), down * row + right * w.channels + i)
    return [code.at(corner, d * row + e * w.channels) for d in range(w.size) for e in range(w.size)]


def _for_windows(code: Code, w: Window, body: Callable[[ir.Value, ir.Value, int], None]) -> None:
    """`body(h, p, i)` for each window, and the channels from i on that make up a vector."""

    def window(h: ir.Value, p: ir.Value) -> None:
        for i in range(0, w.channels, code.lanes):
            body(h, p, i)

    code.repeat(0, w.out[0], lambda h: code.repeat(0, w.out[1], lambda p: window(h, p)) and None)


def _inside(pads: Pads, width: int, channels: int) -> int:
    """The index of the first pixel in an image with this padding, whose rows are `width` pixels wide."""
    return (pads[0][0] * width + pads[1][0]) * channels


def _vectors_at_once(code: Code, features: int, most: int) -> int:
    """How many vectors of features a block of sums spans."""
    return next(n for n in range(most, 0, -1) if features // code.lanes % n == 0)


def _reader(code: Code, w: Window, x: ir.Value) -> Callable[[ir.Value], ir.Value]:
    """Returns `look(n)`, which returns the address of an image as floats [H, W, C] with its padding.

    An image in another form is copied.  The copy's padding is written once, before the first image.
    """
    size, (height, width), c = w.height * w.width * w.channels, w.padded, w.channels
    if not w.images and not w.rectify and w.pads == ((0, 0), (0, 0)):
        return lambda n: code.at(x, (n, size))
    copy = code.room(height * width * c)
    code.fill(copy, height * width * c, 0.0)
    inner = code.at(copy, _inside(w.pads, width, c))

    def in_order(n: ir.Value) -> ir.Value:
        def line(h: ir.Value) -> None:
            read, write = code.at(x, (n, size), (h, w.width * c)), code.at(inner, (h, width * c))

            def some(i: ir.Value, lanes: int) -> None:
                value = code.get(code.at(read, i), lanes)
                if w.rectify:
                    zeros = ir.Constant(value.type, [0.0] * lanes)
                    value = code.select(code.fcmp_ordered("<", value, zeros), zeros, value)
                code.put(value, code.at(write, i))

            _for_vectors(code, w.width * c, some)

        code.repeat(0, w.height, line)
        return copy

    def planes(n: ir.Value) -> ir.Value:
        def line(h: ir.Value) -> None:
            def pixels(i: ir.Value, lanes: int) -> None:
                read = code.at(x, (n, size), (h, w.width), i)
                side_by_side = [code.get(code.at(read, plane * w.height * w.width), lanes) for plane in range(c)]
                code.put(_interleaved(code, side_by_side), code.at(inner, (h, width * c), (i, c)))

            _for_vectors(code, w.width, pixels)

        code.repeat(0, w.height, line)
        return copy

    return planes if w.images == "first" else in_order


def _for_vectors(code: Code, count: int, body: Callable[[ir.Value, int], None]) -> None:
    """`body(i, lanes)` for vectors that cover `count` elements; the last may be shorter."""
    whole = count // code.lanes * code.lanes
    code.repeat(0, whole, lambda i: body(i, code.lanes), step=code.lanes)
    if whole < count:
        body(word(whole), count - whole)


def _interleaved(code: Code, parts: list[ir.Value]) -> ir.Value:
    """Vectors a, b, ... as one: a_0, b_0, ..., a_1, b_1, ..."""
    shuffle = lambda x, y, order: code.shuffle_vector(x, y, ir.Constant(ir.VectorType(HALF, len(order)), order))
    count, many = parts[0].type.count, len(parts)
    if many == 1:
        return parts[0]
    if many % 2 == 0:
        even, odd = _interleaved(code, parts[::2]), _interleaved(code, parts[1::2])
        half = count * many // 2
        return shuffle(even, odd, [i + k * half for i in range(half) for k in range(2)])
    joined = parts[0]
    for i, part in enumerate(parts[1:], 1):
        longer = shuffle(part, part, [j % count for j in range(i * count)])
        joined = shuffle(joined, longer, list(range((i + 1) * count)))
    return shuffle(joined, joined, [i + k * count for i in range(count) for k in range(many)])
