"""Torsos: [N, ...] observations -> [N, D] features.

With `layer_norm` each convolution and dense layer is followed by a layer normalisation, before the activation; in the
IMPALA ResNet the max-pooling of a section comes between the two.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.nn.initializers import Initializer
from jax.typing import DTypeLike

from cleanba import kernels
from cleanba.networks.layers import Conv, LayerNorm, Weights


def orthogonal(scale: float) -> Initializer:
    """Orthogonal initialisation (Saxe et al. 2014), scaled."""
    return nn.initializers.orthogonal(scale)


def channels_first(x: jax.Array | np.ndarray) -> bool:
    """Whether images are [N, C, H, W] rather than [N, H, W, C].  EnvPool returns both.

    Two equal sides are height and width; else the shorter of the first and the last is the channels.
    """
    first, middle, last = x.shape[1:]
    return first != middle and (middle == last or first < last)


class Dense(nn.Module):
    """x W + b."""

    features: int
    scale: float
    dtype: DTypeLike = jnp.float32

    @nn.compact
    def weights(self, inputs: int) -> tuple[jax.Array, jax.Array]:
        """W [inputs, features] and b [features]."""
        # The name is part of the parameters' path, from which Flax derives their keys, and checkpoints their names.
        return Weights(self.features, orthogonal(self.scale), self.dtype, name="Dense_0")(inputs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """[..., D] -> [..., features]."""
        return kernels.affine(x.astype(self.dtype), *self.weights(x.shape[-1]))


def normalised(layer_norm: bool, x: jax.Array) -> jax.Array:
    """A new layer normalisation of x [..., F], if wanted.  Call it in a module's compact method."""
    return LayerNorm()(x) if layer_norm else x


class StridedCNN(nn.Module):
    """Strided convolutions, then dense layers, initialised as in CleanRL.  [N, H, W, C] or [N, C, H, W] -> [N, D]."""

    hiddens: Sequence[int] = (512,)
    dtype: DTypeLike = jnp.float32
    layer_norm: bool = False

    LAYERS: ClassVar[tuple[tuple[int, int, int], ...]] = ()
    """Of each convolution: features, size, stride."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        scale, planes = 1 / 255, channels_first(x)
        for features, size, stride in self.LAYERS:
            init, rectify = orthogonal(2**0.5), scale == 1.0
            x = Conv(features, size, stride, "VALID", self.dtype, init, scale, planes, rectify)(x)
            x = normalised(self.layer_norm, x)
            scale, planes = 1.0, False
        x = nn.relu(x).reshape(x.shape[0], -1)
        for units in self.hiddens:
            x = nn.relu(normalised(self.layer_norm, Dense(units, 2**0.5, self.dtype)(x)))
        return x


class NatureCNN(StridedCNN):
    """Three convolutions (Mnih et al. 2015, *Nature*)."""

    LAYERS = ((32, 8, 4), (64, 4, 2), (64, 3, 1))


class NipsCNN(StridedCNN):
    """Two convolutions (Mnih et al. 2013, at NIPS, and 2016, "Asynchronous methods"): a third of `NatureCNN`'s work."""

    LAYERS = ((16, 8, 4), (32, 4, 2))


class Residual(nn.Module):
    """x + conv(relu(conv(relu(x)))) (Espeholt et al. 2018, figure 3)."""

    channels: int
    dtype: DTypeLike
    layer_norm: bool = False

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        first, second = (Conv(self.channels, 3, 1, "SAME", self.dtype, rectify=True) for _ in range(2))
        if self.layer_norm:
            return x + LayerNorm()(second(LayerNorm()(first(x))))
        return second(first(x), skip=x)


class ImpalaResNet(nn.Module):
    """The deep residual network of IMPALA (Espeholt et al. 2018, figure 3, right).  uint8 images -> features."""

    channels: Sequence[int] = (16, 32, 32)
    hiddens: Sequence[int] = (256,)
    dtype: DTypeLike = jnp.float32
    layer_norm: bool = False

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        scale, planes = 1 / 255, channels_first(x)
        for channels in self.channels:
            x = Conv(channels, 3, 1, "SAME", self.dtype, input_scale=scale, planes=planes, pool=True)(x)
            x = normalised(self.layer_norm, x)
            scale, planes = 1.0, False
            for _ in range(2):
                x = Residual(channels, self.dtype, self.layer_norm)(x)
        x = nn.relu(x).reshape(x.shape[0], -1)
        for units in self.hiddens:
            x = nn.relu(normalised(self.layer_norm, Dense(units, 2**0.5, self.dtype)(x)))
        return x


class MinAtarCNN(nn.Module):
    """One convolution and dense layers (Young & Tian 2019).  Boards of planes [N, H, W, C] -> features."""

    hiddens: Sequence[int] = (128,)
    dtype: DTypeLike = jnp.float32
    layer_norm: bool = False

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = normalised(self.layer_norm, Conv(16, 3, 1, "VALID", self.dtype, orthogonal(2**0.5))(x))
        x = nn.relu(x).reshape(x.shape[0], -1)
        for units in self.hiddens:
            x = nn.relu(normalised(self.layer_norm, Dense(units, 2**0.5, self.dtype)(x)))
        return x


class MLP(nn.Module):
    """Dense layers, initialised as CleanRL's."""

    hiddens: Sequence[int] = (64, 64)
    dtype: DTypeLike = jnp.float32
    activation: kernels.Activation = "tanh"
    layer_norm: bool = False

    @nn.compact
    def __call__(self, x: jax.Array, heads: Sequence[Dense] = ()) -> list[jax.Array]:
        """[N, ...] -> the output of each head, [N, features] float32, or the features alone if there are no heads."""
        x = x.reshape(x.shape[0], -1).astype(self.dtype)
        widths = (x.shape[1], *self.hiddens)
        layers = [Dense(units, 2**0.5, self.dtype).weights(width) for width, units in pairwise(widths)]
        if not self.layer_norm:
            return kernels.mlp(self.activation, x, layers, [head.weights(widths[-1]) for head in heads])
        f = jnp.tanh if self.activation == "tanh" else nn.relu
        for w, b in layers:
            x = f(LayerNorm()(kernels.affine(x, w, b)))
        return [head(x.astype(jnp.float32)) for head in heads] or [x]
