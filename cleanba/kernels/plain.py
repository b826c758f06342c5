"""What the kernels compute, in plain JAX: on GPUs the form that is fast, elsewhere the one that always works."""

import math
import operator
from collections.abc import Callable, Sequence
from functools import partial
from typing import Literal, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import optax
from jax import lax

from cleanba.ops.descent import T, clipped, descend, scale_by_radam
from cleanba.rollout import PyTree
from cleanba.shards import ShardAxis

Pads = tuple[tuple[int, int], tuple[int, int]]  # rows and columns of zeros: before and after
Activation = Literal["relu", "tanh"]
Layers = Sequence[tuple[jax.Array, jax.Array]]  # of each its weights W [D, F] and bias b [F]
Word = TypeVar("Word")  # one or more unsigned numbers of 32 bits

NORM_EPS = 1e-6  # added to the variance in layer normalisation
ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))  # Threefry's, by turns
PARITY = 0x1BD11BDA


class Convolution(NamedTuple):
    """How a kernel goes over its images, and what happens before and after."""

    pads: Pads
    stride: int = 1
    planes: bool = False
    """x is [N, C, H, W], not [N, H, W, C]"""
    rectify: bool = False
    """max(x, 0) is what is convolved"""
    pool: bool = False
    """`max_pool` comes after it; only for 3 x 3 kernels with "SAME" padding, where nothing is added"""


def convolve(
    how: Convolution, x: jax.Array, kernel: jax.Array, bias: jax.Array, skip: jax.Array | None = None
) -> jax.Array:
    """y_hw = b + sum_ij x_{sh+i, sw+j} K_ij + skip_hw.  [N, H, W, C], [k, k, C, F], [F] -> [N, H', W', F].

    x holds floats or bytes; what comes out has the kernel's number format.
    """
    x = (x.transpose(0, 2, 3, 1) if how.planes else x).astype(kernel.dtype)
    x = jax.nn.relu(x) if how.rectify else x
    numbers = ("NHWC", "HWIO", "NHWC")
    y = lax.conv_general_dilated(x, kernel, (how.stride, how.stride), how.pads, dimension_numbers=numbers) + bias
    y = max_pool(y) if how.pool else y
    return y if skip is None else skip + y


def max_pool(x: jax.Array) -> jax.Array:
    """Maxima of 3 x 3 pixels in steps of 2, padded ("SAME").  [N, H, W, C] -> [N, ceil(H/2), ceil(W/2), C].

    Values and gradients are those of `flax.linen.max_pool`: the first of equal maxima has the gradient.  (Only a NaN
    may be lost beside another number.)  But JAX's derivative of that function is a loop over scalars on CPUs, and on
    GPUs a scatter, which XLA makes deterministic by sorting all pixels.  The derivative of this one is selects and
    pads, which fuse.
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


def affine(x: jax.Array, w: jax.Array, b: jax.Array) -> jax.Array:
    """The sum x W + b.  [..., D], [D, F], [F] -> [..., F]."""
    return x @ w + b


def multiply(a: jax.Array, b: jax.Array, transposed: bool = False) -> jax.Array:
    """The product A B, or A^T B if A is `transposed`.  [M, K] or [K, M], [K, N] -> [M, N]."""
    return (a.T if transposed else a) @ b


def mlp(
    activation: Activation,
    x: jax.Array,
    layers: Layers,
    heads: Layers = (),
    affine: Callable[[jax.Array, jax.Array, jax.Array], jax.Array] = affine,
) -> list[jax.Array]:
    """Dense layers, each followed by its activation, then heads, which all see the last layer's output as float32.

    [N, D] -> [N, F] of each head, or of the last layer if there are no heads.
    """
    f = jnp.tanh if activation == "tanh" else jax.nn.relu
    for w, b in layers:
        x = f(affine(x, w, b))
    return [affine(x.astype(jnp.float32), w, b) for w, b in heads] or [x]


def layer_norm(x: jax.Array, scale: jax.Array, bias: jax.Array) -> jax.Array:
    """The sum g (x - mean) / sqrt(variance + 1e-6) + b, over the last axis (Ba et al. 2016, eq. 4).

    x [..., F], g being `scale` [F] and b `bias` [F] -> [..., F].  Computed in float32; y has the dtype of x.
    """
    y = x.astype(jnp.float32)
    y = y - y.mean(-1, keepdims=True)
    y = y * lax.rsqrt(jnp.square(y).mean(-1, keepdims=True) + NORM_EPS)
    return (scale * y + bias).astype(x.dtype)


class Adam(NamedTuple):
    """Adam's settings (Kingma & Ba 2015, algorithm 1), for gradients that are clipped by their global norm first.

    `rectified` makes it RAdam (`ops/descent.py: scale_by_radam`).
    """

    eps: float = 1e-8
    max_norm: float = math.inf
    b1: float = 0.9
    b2: float = 0.999
    rectified: bool = False

    @property
    def rule(self) -> optax.GradientTransformation:
        """The same as a rule of optax."""
        rule = scale_by_radam if self.rectified else optax.scale_by_adam
        return clipped(rule(self.b1, self.b2, self.eps), self.max_norm)


def adam(settings: Adam, shards: ShardAxis, rate: jax.Array, trained: T, gradient: PyTree) -> tuple[T, jax.Array]:
    """One step of Adam, of length `rate` []; also the gradient's global norm [], before clipping.

    `trained.optimiser` is the state of `settings.rule`; leaves of the gradient are those of the parameters.
    """
    return shards.isolate(partial(descend, settings.rule), rate, trained, gradient)


def polyak_update(shards: ShardAxis, tau: float, now: jax.Array, params: PyTree, targets: PyTree) -> PyTree:
    """Target = tau params + (1 - tau) target, if `now` ([] bool); else the targets as they are.

    Leaves of `params`, of `targets` and of what is returned have the same shapes (Lillicrap et al. 2015, algorithm 1).
    """

    def move(now: jax.Array, params: PyTree, targets: PyTree) -> PyTree:
        return jax.tree.map(lambda p, q: jnp.where(now, tau * p + (1 - tau) * q, q), params, targets)

    return shards.isolate(move, now, params, targets)


def threefry(k1: jax.Array, k2: jax.Array, x1: jax.Array, x2: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Both words of the hash of the words x by the keys k; uint32, of shapes that broadcast together.

    Threefry-2x32 with 20 rounds (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3").
    """
    turn = lambda x, left: x << left | x >> 32 - left
    k1, k2, x1, x2 = jnp.broadcast_arrays(k1, k2, x1, x2)
    return rounds(k1, k2, x1, x2, operator.add, operator.xor, turn, jnp.uint32)


def rounds(
    k1: Word, k2: Word, a: Word, b: Word, add: Callable[[Word, Word], Word], xor: Callable[[Word, Word], Word],
    turn: Callable[[Word, int], Word], number: Callable[[int], Word],
) -> tuple[Word, Word]:  # fmt: skip
    """The hash, by the operations given: sums, exclusive or, bits rotated to the left, a constant."""
    keys = k1, k2, xor(xor(k1, k2), number(PARITY))
    a, b = add(a, keys[0]), add(b, keys[1])
    for i in range(5):
        for left in ROTATIONS[i % 2]:
            a = add(a, b)
            b = xor(a, turn(b, left))
        a, b = add(a, keys[(i + 1) % 3]), add(add(b, keys[(i + 2) % 3]), number(i + 1))
    return a, b
