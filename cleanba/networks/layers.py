"""Convolution and pooling in the form that is fast on the device at hand.

On CPUs, XLA's own convolutions and their gradients are several times slower than gathering patches and multiplying
matrices (`benchmarks/throughput.py` measures it); on GPUs cuDNN is hard to beat.  Parameters are the same for both.
"""

from typing import Any, Literal

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import lax

Initializer = Any
ConvKind = Literal["xla", "patches"]


def patches(x: jax.Array, size: int, stride: int) -> jax.Array:
    """The size x size neighbourhoods of an image, without padding.  [N, H, W, C] -> [N, H', W', size * size * C].

    The order within a patch is unspecified but agrees with `patch_kernel`.
    """
    n, h, w, c = x.shape
    rows, cols = (h - size) // stride + 1, (w - size) // stride + 1
    if stride > 1 and size % stride == 0:  # cells of stride x stride, of which a patch takes (size / stride)^2
        cells = size // stride
        x = x[:, : (rows + cells - 1) * stride, : (cols + cells - 1) * stride]
        x = x.reshape(n, rows + cells - 1, stride, cols + cells - 1, stride, c)
        x = x.transpose(0, 1, 3, 2, 4, 5).reshape(n, rows + cells - 1, cols + cells - 1, stride * stride * c)
        parts = [x[:, i : i + rows, j : j + cols] for i in range(cells) for j in range(cells)]
    else:
        parts = [
            x[:, i : i + stride * (rows - 1) + 1 : stride, j : j + stride * (cols - 1) + 1 : stride]
            for i in range(size)
            for j in range(size)
        ]
    return jnp.concatenate(parts, axis=-1)


def patch_kernel(kernel: jax.Array, stride: int) -> jax.Array:
    """A convolution's kernel as the matrix that `patches` are multiplied by.  [k, k, C, F] -> [k * k * C, F]."""
    size, _, c, f = kernel.shape
    if stride > 1 and size % stride == 0:
        cells = size // stride
        kernel = kernel.reshape(cells, stride, cells, stride, c, f).transpose(0, 2, 1, 3, 4, 5)
    return kernel.reshape(size * size * c, f)


class Conv(nn.Module):
    """2-D convolution, [N, H, W, C] -> [N, H', W', features]."""

    features: int
    size: int
    stride: int = 1
    padding: Literal["VALID", "SAME"] = "VALID"
    dtype: Any = jnp.float32
    kind: ConvKind = "xla"
    kernel_init: Initializer = nn.initializers.lecun_normal()
    input_scale: float = 1.0  # applied to the kernel, so that images can stay bytes until they are multiplied

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        kernel = self.param("kernel", self.kernel_init, (self.size, self.size, x.shape[-1], self.features))
        bias = self.param("bias", nn.initializers.zeros_init(), (self.features,))
        kernel, bias = (kernel * self.input_scale).astype(self.dtype), bias.astype(self.dtype)
        if self.kind == "xla":
            x = x.astype(self.dtype)
            y = lax.conv_general_dilated(
                x, kernel, (self.stride,) * 2, self.padding, dimension_numbers=("NHWC", "HWIO", "NHWC")
            )
            return y + bias
        if self.padding == "SAME":
            pad = (self.size - 1) // 2
            x = jnp.pad(x, ((0, 0), (pad, self.size - 1 - pad), (pad, self.size - 1 - pad), (0, 0)))
        # The barrier keeps patches of bytes being bytes; XLA would convert before it copies, and copy four times more.
        cut = lax.optimization_barrier(patches(x, self.size, self.stride)).astype(self.dtype)
        return cut @ patch_kernel(kernel, self.stride) + bias


def max_pool(x: jax.Array, kind: ConvKind) -> jax.Array:
    """Maximum over 3 x 3 neighbourhoods in steps of 2, padded ("SAME").  [N, H, W, C] -> [N, ceil(H/2), ceil(W/2), C]."""
    if kind == "xla":
        return nn.max_pool(x, (3, 3), strides=(2, 2), padding="SAME")
    n, h, w, c = x.shape
    rows, cols = -(-h // 2), -(-w // 2)
    low = jnp.finfo(x.dtype).min
    pad_h, pad_w = max((rows - 1) * 2 + 3 - h, 0), max((cols - 1) * 2 + 3 - w, 0)
    x = jnp.pad(
        x,
        ((0, 0), (pad_h // 2, pad_h - pad_h // 2), (pad_w // 2, pad_w - pad_w // 2), (0, 0)),
        constant_values=low,
    )

    def pool(x: jax.Array, axis: int, count: int) -> jax.Array:
        taps = [lax.slice_in_dim(x, i, i + 2 * count - 1, 2, axis) for i in range(3)]
        return jnp.maximum(jnp.maximum(taps[0], taps[1]), taps[2])

    return pool(pool(x, 1, rows), 2, cols)  # the maximum over rows, then over columns: 4 maxima instead of 8
