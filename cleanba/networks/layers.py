"""Parameters of convolutions, dense layers and layer normalisation.  `kernels` decides how they are computed."""

from typing import Literal

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import lax
from jax.nn.initializers import Initializer
from jax.typing import DTypeLike

from cleanba import kernels


class Weights(nn.Module):
    """The parameters of a dense layer: W [D, features] and b [features]."""

    features: int
    kernel_init: Initializer
    dtype: DTypeLike = jnp.float32

    @nn.compact
    def __call__(self, inputs: int) -> tuple[jax.Array, jax.Array]:
        kernel = self.param("kernel", self.kernel_init, (inputs, self.features))
        bias = self.param("bias", nn.initializers.zeros_init(), (self.features,))
        return kernel.astype(self.dtype), bias.astype(self.dtype)


class Conv(nn.Module):
    """2-D convolution, [N, H, W, C], or planes [N, C, H, W], -> [N, H', W', features]."""

    features: int
    size: int
    stride: int = 1
    padding: Literal["VALID", "SAME"] = "VALID"
    dtype: DTypeLike = jnp.float32
    kernel_init: Initializer = nn.initializers.lecun_normal()
    input_scale: float = 1.0  # applied to the kernel, so that images stay bytes until they are multiplied
    planes: bool = False  # whether x is [N, C, H, W]
    rectify: bool = False  # whether max(x, 0) is convolved in place of x
    pool: bool = False  # whether `max_pool` comes after it; only for 3 x 3 kernels with "SAME" padding and no skip

    @nn.compact
    def __call__(self, x: jax.Array, skip: jax.Array | None = None) -> jax.Array:
        (height, width), channels = (x.shape[2:], x.shape[1]) if self.planes else (x.shape[1:3], x.shape[3])
        kernel = self.param("kernel", self.kernel_init, (self.size, self.size, channels, self.features))
        bias = self.param("bias", nn.initializers.zeros_init(), (self.features,))
        kernel, bias = (kernel * self.input_scale).astype(self.dtype), bias.astype(self.dtype)
        rows, columns = lax.padtype_to_pads((height, width), kernel.shape[:2], (self.stride,) * 2, self.padding)
        how = kernels.Convolution((rows, columns), self.stride, self.planes, self.rectify, self.pool)
        return kernels.convolve(how, x, kernel, bias, skip)


class LayerNorm(nn.Module):
    """y = g (x - mean) / sqrt(variance + 1e-6) + b, over the last axis (Ba et al. 2016, eq. 4).  [..., F] -> [..., F].

    After a convolution the last axis is its channels, so each place of an image is normalised by itself.  g is 1 and b
    is 0 at the start.  Computed in float32; the result has the number format of x.
    """

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        scale = self.param("scale", nn.initializers.ones_init(), x.shape[-1:])
        bias = self.param("bias", nn.initializers.zeros_init(), x.shape[-1:])
        return kernels.layer_norm(x, scale, bias)
