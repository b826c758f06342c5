"""Convolutions, pooling and dense layers in the form that is fast on the device at hand.  Parameters are the same.

On GPUs the form is XLA's own, as cuDNN is hard to beat.  On CPUs convolutions and pooling are ours ("direct",
`ops/convolution.py`), and gradients of dense layers are taken in the form that Eigen, which XLA calls, is fast at
(`benchmarks/networks.py` measures it).
"""

from contextlib import suppress
from typing import Literal

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import lax
from jax.nn.initializers import Initializer
from jax.typing import DTypeLike

ConvKind = Literal["xla", "direct"]


def conv_kind(platform: str) -> ConvKind:
    """The form for a kind of device.  A CPU has XLA's, too, without llvmlite or where the processor does not suit."""
    with suppress(ImportError):
        from cleanba.ops import llvm

        return "direct" if platform == "cpu" and llvm.suits() else "xla"
    return "xla"


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


class Conv(nn.Module):
    """2-D convolution, [N, H, W, C], or planes [N, C, H, W], -> [N, H', W', features]."""

    features: int
    size: int
    stride: int = 1
    padding: Literal["VALID", "SAME"] = "VALID"
    dtype: DTypeLike = jnp.float32
    kind: ConvKind = "xla"
    kernel_init: Initializer = nn.initializers.lecun_normal()
    input_scale: float = 1.0  # applied to the kernel, so that images can stay bytes until they are multiplied
    planes: bool = False  # whether x is [N, C, H, W]
    rectify: bool = False  # whether max(x, 0) is what is convolved
    pool: bool = False  # whether `max_pool` comes after it; a kernel of 3 x 3 with "SAME" padding, and nothing skips

    @nn.compact
    def __call__(self, x: jax.Array, skip: jax.Array | None = None) -> jax.Array:
        (height, width), channels = (x.shape[2:], x.shape[1]) if self.planes else (x.shape[1:3], x.shape[3])
        kernel = self.param("kernel", self.kernel_init, (self.size, self.size, channels, self.features))
        bias = self.param("bias", nn.initializers.zeros_init(), (self.features,))
        kernel, bias = (kernel * self.input_scale).astype(self.dtype), bias.astype(self.dtype)
        rows, columns = lax.padtype_to_pads((height, width), kernel.shape[:2], (self.stride,) * 2, self.padding)
        pads = (rows, columns)
        if self.kind == "direct":
            from cleanba.ops import convolution

            planes, pool = self.planes and x.dtype == jnp.uint8, self.pool and self.features % convolution.WIDEST == 0
            if x.dtype != jnp.uint8:
                x = (x.transpose(0, 2, 3, 1) if self.planes else x).astype(jnp.float32)
            how = convolution.How(pads, self.stride, planes, self.rectify, pool)
            floats = jax.tree.map(lambda p: p.astype(jnp.float32), (kernel, bias, skip))
            y = convolution.convolve(how, x, *floats).astype(self.dtype)
            return max_pool(y) if self.pool and not pool else y
        x = (x.transpose(0, 2, 3, 1) if self.planes else x).astype(self.dtype)
        x = nn.relu(x) if self.rectify else x
        numbers = ("NHWC", "HWIO", "NHWC")
        y = lax.conv_general_dilated(x, kernel, (self.stride, self.stride), pads, dimension_numbers=numbers) + bias
        y = max_pool(y) if self.pool else y
        return y if skip is None else skip + y


def max_pool(x: jax.Array) -> jax.Array:
    """Maxima of 3 x 3 pixels in steps of 2, padded ("SAME").  [N, H, W, C] -> [N, ceil(H/2), ceil(W/2), C].

    Values and gradients are those of `nn.max_pool`, also where maxima are equal: the first has the gradient; only what
    is not a number may be lost beside one.  But what
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
