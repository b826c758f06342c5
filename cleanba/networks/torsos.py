"""What is seen, as a vector: [N, ...] observations -> [N, D] features."""

from collections.abc import Callable, Sequence
from typing import TypeVar

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.nn.initializers import Initializer
from jax.typing import DTypeLike

from cleanba.networks.layers import Affine, Conv, ConvKind, max_pool


def orthogonal(scale: float) -> Initializer:
    """Orthogonal initialisation (Saxe et al. 2014), scaled."""
    return nn.initializers.orthogonal(scale)


CHUNK = 16  # images

T = TypeVar("T", "NatureCNN", "ImpalaResNet")


def in_chunks(convolutions: Callable[[T, jax.Array], jax.Array], torso: T, x: jax.Array) -> jax.Array:
    """`convolutions(torso, x)`, for a kind other than "xla" at most `CHUNK` images at a time.  [N, ...] -> [N, D].

    What all layers hold of a few images stays in a CPU's caches; of a large batch it goes to memory and back, and
    page-faults.  Batches that a policy acts on, and those that no such chunks make up, are left whole.
    """
    n = x.shape[0]
    size = max(d for d in range(1, CHUNK + 1) if n % d == 0)
    if torso.kind == "xla" or n <= 2 * CHUNK or 2 * size < CHUNK:
        return convolutions(torso, x)
    chunked = nn.scan(
        lambda torso, _, chunk: (None, convolutions(torso, chunk)),
        variable_broadcast="params",
        split_rngs={"params": False},
    )
    return chunked(torso, None, x.reshape(n // size, size, *x.shape[1:]))[1].reshape(n, -1)


def channels_first(x: jax.Array) -> bool:
    """Whether images, which EnvPool delivers as [N, C, H, W] or [N, H, W, C], are the first; told by the short side."""
    return x.shape[1] < x.shape[3]


def channels_last(x: jax.Array) -> jax.Array:
    """Images of either kind -> [N, H, W, C]."""
    return x.transpose(0, 2, 3, 1) if channels_first(x) else x


class Dense(nn.Module):
    """x W + b."""

    features: int
    scale: float
    dtype: DTypeLike = jnp.float32
    kind: ConvKind = "xla"

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        layer = nn.Dense if self.kind == "xla" else Affine
        init = orthogonal(self.scale)
        return layer(self.features, kernel_init=init, dtype=self.dtype, name="Dense_0")(x)


class NatureCNN(nn.Module):
    """Three convolutions and dense layers (Mnih et al. 2015); initialised as CleanRL's.  uint8 images -> features."""

    hiddens: Sequence[int] = (512,)
    dtype: DTypeLike = jnp.float32
    kind: ConvKind = "xla"

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = in_chunks(NatureCNN._convolutions, self, x)
        for units in self.hiddens:
            x = nn.relu(Dense(units, 2**0.5, self.dtype, self.kind)(x))
        return x

    def _convolutions(self, x: jax.Array) -> jax.Array:
        planes = channels_first(x)
        x = channels_last(x)
        for features, size, stride, scale in ((32, 8, 4, 1 / 255), (64, 4, 2, 1.0), (64, 3, 1, 1.0)):
            init = orthogonal(2**0.5)
            x = nn.relu(Conv(features, size, stride, "VALID", self.dtype, self.kind, init, scale, planes)(x))
        return x.reshape(x.shape[0], -1)


class Residual(nn.Module):
    """x + conv(relu(conv(relu(x)))) (Espeholt et al. 2018, figure 3)."""

    channels: int
    dtype: DTypeLike
    kind: ConvKind

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        y = x
        for _ in range(2):
            y = Conv(self.channels, 3, padding="SAME", dtype=self.dtype, kind=self.kind)(nn.relu(y))
        return x + y


class ImpalaResNet(nn.Module):
    """The deep residual network of IMPALA (Espeholt et al. 2018, figure 3, right).  uint8 images -> features."""

    channels: Sequence[int] = (16, 32, 32)
    hiddens: Sequence[int] = (256,)
    dtype: DTypeLike = jnp.float32
    kind: ConvKind = "xla"

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = in_chunks(ImpalaResNet._convolutions, self, x)
        for units in self.hiddens:
            x = nn.relu(Dense(units, 2**0.5, self.dtype, self.kind)(x))
        return x

    def _convolutions(self, x: jax.Array) -> jax.Array:
        x = channels_last(x)
        for i, channels in enumerate(self.channels):
            scale = 1 / 255 if i == 0 else 1.0
            x = Conv(channels, 3, padding="SAME", dtype=self.dtype, kind=self.kind, input_scale=scale)(x)
            x = max_pool(x)
            for _ in range(2):
                x = Residual(channels, self.dtype, self.kind)(x)
        return nn.relu(x).reshape(x.shape[0], -1)


class MinAtarCNN(nn.Module):
    """One convolution and dense layers (Young & Tian 2019).  Boards of planes [N, H, W, C] -> features."""

    hiddens: Sequence[int] = (128,)
    dtype: DTypeLike = jnp.float32
    kind: ConvKind = "xla"

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = nn.relu(Conv(16, 3, 1, "VALID", self.dtype, self.kind, orthogonal(2**0.5))(x)).reshape(x.shape[0], -1)
        for units in self.hiddens:
            x = nn.relu(Dense(units, 2**0.5, self.dtype, self.kind)(x))
        return x


class MLP(nn.Module):
    """Dense layers, initialised as CleanRL's.  Numbers [N, ...] -> features."""

    hiddens: Sequence[int] = (64, 64)
    dtype: DTypeLike = jnp.float32
    activation: str = "tanh"  # or "relu"
    kind: ConvKind = "xla"

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = x.reshape(x.shape[0], -1).astype(self.dtype)
        for units in self.hiddens:
            x = getattr(nn, self.activation)(Dense(units, 2**0.5, self.dtype, self.kind)(x))
        return x
