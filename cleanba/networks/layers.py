"""Convolution in the form that is fast on the device at hand, and pooling.  Parameters are the same for both forms.

On GPUs the form is XLA's own, as cuDNN is hard to beat.  On CPUs XLA has a fast convolution (Eigen's), but outside
of a program's top level, and all training is inside of a loop, takes it only for what is written as a plain one:
[N, H, W, C] by [k, k, C, F], no dilated input, no reversed kernel.  The gradients that JAX derives are not, and fall
back to scalar loops, a hundred times slower.  So "patches" writes each gradient as a plain convolution
(`benchmarks/networks.py` measures it).
"""

from functools import partial
from typing import Literal

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import lax
from jax.nn.initializers import Initializer
from jax.typing import DTypeLike

ConvKind = Literal["xla", "patches"]
Pads = tuple[tuple[int, int], tuple[int, int]]  # rows and columns of zeros: before and after

FEW = 16  # channels: below that many a plain convolution is done in pairs of columns


def convolve(x: jax.Array, kernel: jax.Array, pads: Pads, stride: int = 1) -> jax.Array:
    """y_hw = sum_ij x_{sh+i, sw+j} K_ij, as XLA does it.  [N, H, W, C], [k, k, C, F] -> [N, H', W', F]."""
    return lax.conv_general_dilated(x, kernel, (stride, stride), pads, dimension_numbers=("NHWC", "HWIO", "NHWC"))


def in_pairs(x: jax.Array, kernel: jax.Array, pads: Pads) -> jax.Array:
    """`convolve` in steps of one, two columns at a time, which lie side by side in memory: two pixels of C channels are
    one of 2 C, and so is what comes out.  A third more products, but Eigen, which copies each neighbourhood, uses each
    copy for twice as many.
    """
    (n, h, w, c), (size, _, _, f) = x.shape, kernel.shape
    columns = w + sum(pads[1]) - size + 1
    pairs, across = -(-columns // 2), size // 2 + 1  # pairs of columns that come out, and that a kernel sees
    left, width = pads[1][0], 2 * (pairs + across - 1)
    x = jnp.pad(x, ((0, 0), (0, 0), (left, width - w - left), (0, 0))).reshape(n, h, width // 2, 2 * c)
    first, second = (jnp.pad(kernel, ((0, 0), (i, 2 * across - size - i), (0, 0), (0, 0))) for i in range(2))
    kernel = jnp.stack([first, second], 3).reshape(size, across, 2 * c, 2 * f)
    y = convolve(x, kernel, (pads[0], (0, 0)))
    return y.reshape(n, -1, 2 * pairs, f)[:, :, :columns]


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def plain_convolve(x: jax.Array, kernel: jax.Array, pads: Pads) -> jax.Array:
    """`convolve` in steps of one, whose gradients are plain convolutions too.  x may be integers."""
    return (in_pairs if x.shape[-1] < FEW else convolve)(x.astype(kernel.dtype), kernel, pads)


def _forward(x: jax.Array, kernel: jax.Array, pads: Pads) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return plain_convolve(x, kernel, pads), (x, kernel)


def _backward(pads: Pads, saved: tuple[jax.Array, jax.Array], dy: jax.Array) -> tuple[jax.Array | None, jax.Array]:
    """dx_hw = sum_ij dy_{h-i, w-j} K_ij^T: dy by the kernel turned round.  dK_ij = sum_nhw x_{h+i, w+j} dy_hw: x by dy,
    with the images of the batch for channels.
    """
    x, kernel = saved
    dk = convolve(x.astype(dy.dtype).transpose(3, 1, 2, 0), dy.transpose(1, 2, 0, 3), pads).transpose(1, 2, 0, 3)
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return None, dk
    # Without the barrier XLA would put the reversal back into the convolution.
    turned = lax.optimization_barrier(kernel[::-1, ::-1].swapaxes(2, 3))
    (top, bottom), (left, right) = pads
    last = kernel.shape[0] - 1
    return convolve(dy, turned, ((last - top, last - bottom), (last - left, last - right))), dk


plain_convolve.defvjp(_forward, _backward)


@jax.custom_vjp
def add_bias(x: jax.Array, bias: jax.Array) -> jax.Array:
    """The sum x + b.  [..., F], [F] -> [..., F].

    b's gradient is a product, as XLA may fuse the sum of it with whatever moves dy, in scalar loops: a tenth of a
    Nature CNN's gradient.
    """
    return x + bias


def _sum_of_rows(_: None, dy: jax.Array) -> tuple[jax.Array, jax.Array]:
    rows = dy.reshape(-1, dy.shape[-1])
    return dy, jnp.ones(rows.shape[0], rows.dtype) @ rows


add_bias.defvjp(lambda x, bias: (x + bias, None), _sum_of_rows)


@jax.custom_vjp
def product(x: jax.Array, w: jax.Array) -> jax.Array:
    """The product x W.  [N, D], [D, F] -> [N, F]."""
    return x @ w


def _gradients(saved: tuple[jax.Array, jax.Array], dy: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Dx = dy W^T = (W dy^T)^T and dW = x^T dy = (dy^T x)^T, each in the form that turns less, counting what it gives.

    Left to itself XLA has Eigen turn matrices while it multiplies: it takes a third longer, and of few columns, as
    heads have, five to twenty times as long.  The barriers say that a matrix is to be turned before, and which one.
    """
    (x, w), turned = saved, lambda m: lax.optimization_barrier(m.T)
    (n, d), f = x.shape, w.shape[1]
    dx = dy @ turned(w) if d * f <= n * (d + f) else turned(w @ turned(dy))
    return dx, turned(x) @ dy if n * d <= f * (n + d) else turned(turned(dy) @ x)


product.defvjp(lambda x, w: (x @ w, (x, w)), _gradients)


class Affine(nn.Module):
    """x W + b, as `nn.Dense`, but for how its gradients are taken.  [..., D] -> [..., features]."""

    features: int
    kernel_init: Initializer
    dtype: DTypeLike = jnp.float32

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        kernel = self.param("kernel", self.kernel_init, (x.shape[-1], self.features))
        bias = self.param("bias", nn.initializers.zeros_init(), (self.features,))
        x, kernel, bias = (p.astype(self.dtype) for p in (x, kernel, bias))
        return add_bias(product(x.reshape(-1, x.shape[-1]), kernel).reshape(*x.shape[:-1], self.features), bias)


def cells(x: jax.Array, size: int, stride: int, pads: Pads, planes: bool = False) -> jax.Array:
    """Cells of stride x stride pixels as one pixel each: what a kernel in such steps sees, for one in steps of one.

    [N, H, W, C] -> [N, H' + k' - 1, W' + k' - 1, stride * stride * C], where k' = ceil(size / stride).  With `planes`
    x lies in memory as [N, C, H, W], and a cell's channels as [C, stride, stride]: four bytes of a row, side by side in
    both, are moved as one word.
    """
    n, c = x.shape[0], x.shape[3]
    count = [(d + sum(p) - size) // stride + -(-size // stride) for d, p in zip(x.shape[1:3], pads, strict=True)]
    edges = [(p[0], m * stride - d - p[0], 0) for d, p, m in zip(x.shape[1:3], pads, count, strict=True)]
    x = lax.pad(x, jnp.zeros((), x.dtype), ((0, 0, 0), *edges, (0, 0, 0)))
    if planes:
        rows = x.transpose(0, 3, 1, 2).reshape(n, c, count[0], stride, count[1], stride // 4, 4)
        words = lax.bitcast_convert_type(rows, jnp.uint32).transpose(0, 2, 4, 1, 3, 5)
        # Without the barrier XLA would move bytes again.
        x = lax.bitcast_convert_type(lax.optimization_barrier(words), jnp.uint8)
    else:
        x = x.reshape(n, count[0], stride, count[1], stride, c).transpose(0, 1, 3, 2, 4, 5)
    return x.reshape(n, *count, stride * stride * c)


def cells_kernel(kernel: jax.Array, stride: int, planes: bool = False) -> jax.Array:
    """A kernel for `cells`.  [k, k, C, F] -> [k', k', stride * stride * C, F], where k' = ceil(k / stride)."""
    size, _, c, f = kernel.shape
    count = -(-size // stride)
    kernel = jnp.pad(kernel, ((0, count * stride - size), (0, count * stride - size), (0, 0), (0, 0)))
    kernel = kernel.reshape(count, stride, count, stride, c, f)
    kernel = kernel.transpose((0, 2, 4, 1, 3, 5) if planes else (0, 2, 1, 3, 4, 5))
    return kernel.reshape(count, count, stride * stride * c, f)


class Conv(nn.Module):
    """2-D convolution, [N, H, W, C] -> [N, H', W', features]."""

    features: int
    size: int
    stride: int = 1
    padding: Literal["VALID", "SAME"] = "VALID"
    dtype: DTypeLike = jnp.float32
    kind: ConvKind = "xla"
    kernel_init: Initializer = nn.initializers.lecun_normal()
    input_scale: float = 1.0  # applied to the kernel, so that images can stay bytes until they are multiplied
    planes: bool = False  # whether x lies in memory as [N, C, H, W]

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        kernel = self.param("kernel", self.kernel_init, (self.size, self.size, x.shape[-1], self.features))
        bias = self.param("bias", nn.initializers.zeros_init(), (self.features,))
        kernel, bias = (kernel * self.input_scale).astype(self.dtype), bias.astype(self.dtype)
        rows, columns = lax.padtype_to_pads(x.shape[1:3], kernel.shape[:2], (self.stride,) * 2, self.padding)
        pads = (rows, columns)
        if self.kind == "xla":
            return convolve(x.astype(self.dtype), kernel, pads, self.stride) + bias
        if self.stride > 1:
            words = self.planes and x.dtype == jnp.uint8 and self.stride % 4 == 0
            # The barrier keeps bytes being bytes; XLA would convert before it copies, and copy four times more.
            x = lax.optimization_barrier(cells(x, self.size, self.stride, pads, words))
            kernel, pads = cells_kernel(kernel, self.stride, words), ((0, 0), (0, 0))
        return add_bias(plain_convolve(x, kernel, pads), bias)


def max_pool(x: jax.Array) -> jax.Array:
    """Maxima of 3 x 3 pixels in steps of 2, padded ("SAME").  [N, H, W, C] -> [N, ceil(H/2), ceil(W/2), C].

    Values and gradients are those of `nn.max_pool`, also where maxima are equal: the first has the gradient.  But what
    JAX derives from that is a loop over scalars on CPUs and a scatter on GPUs, which XLA, to have the same bits every
    time, puts behind a sort of all pixels.  From this it derives selects and pads, which fuse.
    """
    later_if_greater = lambda a, b: jnp.where(b > a, b, a)  # `jnp.maximum` would split a gradient, and be slower

    def pool(x: jax.Array, axis: int) -> jax.Array:
        count = -(-x.shape[axis] // 2)
        extra = 2 * count + 1 - x.shape[axis]
        edges = [(0, 0, 0)] * x.ndim
        edges[axis] = (extra // 2, extra - extra // 2, 0)
        x = lax.pad(x, jnp.array(-jnp.inf, x.dtype), edges)
        a, b, c = (lax.slice_in_dim(x, i, i + 2 * count - 1, 2, axis) for i in range(3))
        return later_if_greater(later_if_greater(a, b), c)

    return pool(pool(x, 2), 1)  # the maximum over columns, then over rows: 4 comparisons instead of 8
