"""Convolutions, pooling and dense layers in the form that is fast on the device at hand.  Parameters are the same.

On GPUs the form is XLA's own, as cuDNN is hard to beat.  On CPUs they are ours ("direct": `ops/convolution.py` and
`ops/product.py`; `benchmarks/networks.py` compares).
"""

from collections.abc import Sequence
from contextlib import suppress
from typing import Literal

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.nn.initializers import Initializer
from jax.typing import DTypeLike

ConvKind = Literal["xla", "direct"]
Activation = Literal["relu", "tanh"]
Layers = Sequence[tuple[jax.Array, jax.Array]]  # of each W [D, F] and b [F]


def conv_kind(platform: str) -> ConvKind:
    """The form for a kind of device.  A CPU has XLA's, too, without llvmlite or where the processor does not suit."""
    with suppress(ImportError):
        from cleanba.ops import llvm

        return "direct" if platform == "cpu" and llvm.suits() else "xla"
    return "xla"


class Weights(nn.Module):
    """What a dense layer learns: W [D, features] and b [features]."""

    features: int
    kernel_init: Initializer
    dtype: DTypeLike = jnp.float32

    @nn.compact
    def __call__(self, inputs: int) -> tuple[jax.Array, jax.Array]:
        kernel = self.param("kernel", self.kernel_init, (inputs, self.features))
        bias = self.param("bias", nn.initializers.zeros_init(), (self.features,))
        return kernel.astype(self.dtype), bias.astype(self.dtype)


def mlp(kind: ConvKind, activation: Activation, x: jax.Array, layers: Layers, heads: Layers = ()) -> list[jax.Array]:
    """Dense layers (W, b), each followed by its activation, then heads, which all see what comes out, in float32.

    [N, D] -> [N, features] of each head, or of the last layer if there are none.
    """
    if kind == "direct" and x.dtype == jnp.float32 and layers:
        from cleanba.ops import mlp

        if not heads:
            return [mlp.mlp(activation, False, x, layers)]
        beside = tuple(jnp.concatenate(parts, -1) for parts in zip(*heads, strict=True))
        out = mlp.mlp(activation, True, x, [*layers, beside])
        return jnp.split(out, np.cumsum([b.size for _, b in heads])[:-1], axis=-1)
    for w, b in layers:
        x = getattr(nn, activation)(affine(kind, x, w, b))
    return [affine(kind, x.astype(jnp.float32), w, b) for w, b in heads] or [x]


def affine(kind: ConvKind, x: jax.Array, w: jax.Array, b: jax.Array) -> jax.Array:
    """The sum x W + b.  [..., D], [D, F], [F] -> [..., F]."""
    if kind == "xla":
        return x @ w + b
    from cleanba.ops import product

    rows, *others = (p.astype(jnp.float32) for p in (x.reshape(-1, x.shape[-1]), w, b))
    return product.affine(rows, *others).reshape(*x.shape[:-1], w.shape[1]).astype(x.dtype)


def multiply(kind: ConvKind, a: jax.Array, b: jax.Array, turned: bool = False) -> jax.Array:
    """The product A B, or A^T B.  [M, K] or [K, M], [K, N] -> [M, N].  Has no gradient where `kind` is "direct"."""
    if kind == "xla":
        return (a.T if turned else a) @ b
    from cleanba.ops import product

    floats = a.astype(jnp.float32), b.astype(jnp.float32)
    return (product.multiply_turned(*floats)[0] if turned else product.multiply(*floats)).astype(a.dtype)


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
            from cleanba.ops import convolution, llvm

            planes, pool = self.planes and x.dtype == jnp.uint8, self.pool and self.features % llvm.WIDEST == 0
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
