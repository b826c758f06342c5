"""Kernels for CPUs: loops of our own where XLA's code is slow, each beside the same function in plain JAX.

**What they are for.**  On CPUs XLA copies pixels to convolve them, cuts sums by the number of its threads, passes over
an optimiser's state several times, and draws random numbers in hundreds of tiny programs.  Here these things are loops
with explicit vector instructions, written in LLVM IR (`llvm.py`), compiled in this process, and called from XLA's
programs through its foreign function interface.  Their results have the same bits on any number of threads.

**What they gained.**  In whole runs on two cores, PPO on Breakout took 1.7 times as many steps per second with these
convolutions, SAC and TD3 2.3 times as many with whole MLPs and Adam's steps; with these random numbers a small policy
acts twice as fast (docs/inside/performance.md; benchmarks/convolutions.py, products.py and networks.py measure again).

**The interface** is this module and `choice.py`'s functions, which it re-exports.  Outside, only tests and
benchmarks import the rest.

| function | by kernels | in plain JAX |
|---|---|---|
| `convolve` | `convolution.py` | `plain.convolve` |
| `affine`, `multiply` | `product.py` | `plain.affine`, `plain.multiply` |
| `mlp` | `dense.py` | `plain.mlp` |
| `layer_norm` | `normalisation.py` | `plain.layer_norm` |
| `adam`, `polyak_update` | `descent.py` | `plain.adam`, `plain.polyak_update` |
| `install_random_numbers` | `threefry.py` | JAX's own |
| `forwarded` | `forwarding.py` | EnvPool's own handlers, for one pool each |

**Which of the two** a program gets is decided where it is traced (`choice.py`): kernels, if it is for a CPU, if
`--cpu-kernels` is not off, if `machine.py` knows of no obstacle (another system or processor, no llvmlite, a jaxlib
that calls foreign functions differently), and if each kind agrees with plain JAX on small arrays in a self-test
(`selftest.py`), which each machine and version runs once.  Otherwise a warning says so once, and plain JAX computes.

**How to leave them out.**  In a run: `--cpu-kernels off`.  In an installation: remove llvmlite.  For good: move
`plain.py` to `cleanba/kernels.py`, remove this folder, and remove the calls of `install_random_numbers`, of
`forwarded` and of `choice.py`'s six functions, which stand in `recipes.py`, `launch.py`, `environments/envpool.py` and
`runtime/`.
"""

from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core.primitives import threefry2x32_p
from jax.interpreters import mlir

from cleanba.kernels import plain
from cleanba.kernels.choice import choose, chosen, compiled_for, compiling_for, expected, in_use
from cleanba.kernels.plain import Activation, Adam, Convolution, Layers, max_pool
from cleanba.ops.descent import T
from cleanba.rollout import PyTree
from cleanba.shards import ShardAxis

__all__ = [
    "Activation",
    "Adam",
    "Convolution",
    "adam",
    "affine",
    "choose",
    "chosen",
    "compiled_for",
    "compiling_for",
    "convolve",
    "expected",
    "forwarded",
    "in_use",
    "install_random_numbers",
    "layer_norm",
    "max_pool",
    "mlp",
    "multiply",
    "polyak_update",
]


def convolve(
    how: Convolution, x: jax.Array, kernel: jax.Array, bias: jax.Array, skip: jax.Array | None = None
) -> jax.Array:
    """y_hw = b + sum_ij x_{sh+i, sw+j} K_ij + skip_hw.  [N, H, W, C], [k, k, C, F], [F] -> [N, H', W', F].

    `how` has the stride s and the padding, whether x is rectified or [N, C, H, W], and whether y is max-pooled.
    x holds floats or bytes; y has the dtype of K, the convolution's kernel.  The kernel for CPUs computes in float32.
    """
    if not in_use():
        return plain.convolve(how, x, kernel, bias, skip)
    from cleanba.kernels import convolution, llvm

    # The CPU's kernel reads planes of bytes only, and pools only if the output channels F fill its widest vectors.
    of_bytes, fits = x.dtype == jnp.uint8, kernel.shape[-1] % llvm.WIDEST == 0
    if not of_bytes:
        x = (x.transpose(0, 2, 3, 1) if how.planes else x).astype(jnp.float32)
    floats = jax.tree.map(lambda p: p.astype(jnp.float32), (kernel, bias, skip))
    in_kernel = how._replace(planes=how.planes and of_bytes, pool=how.pool and fits)
    y = convolution.convolve(in_kernel, x, *floats).astype(kernel.dtype)
    return max_pool(y) if how.pool and not fits else y


def affine(x: jax.Array, w: jax.Array, b: jax.Array) -> jax.Array:
    """The sum x W + b.  [..., D], [D, F], [F] -> [..., F]."""
    if not in_use():
        return plain.affine(x, w, b)
    from cleanba.kernels import product

    rows, *others = (p.astype(jnp.float32) for p in (x.reshape(-1, x.shape[-1]), w, b))
    return product.affine(rows, *others).reshape(*x.shape[:-1], w.shape[1]).astype(x.dtype)


def multiply(a: jax.Array, b: jax.Array, transposed: bool = False) -> jax.Array:
    """The matrix product A B, or A^T B if `transposed`.  A [M, K], or [K, M] if `transposed`; B [K, N] -> [M, N].

    The kernel for CPUs has no gradient of its own: use it in functions whose gradient is written by hand.
    """
    if not in_use():
        return plain.multiply(a, b, transposed)
    from cleanba.kernels import product

    floats = a.astype(jnp.float32), b.astype(jnp.float32)
    return (product.multiply_transposed(*floats)[0] if transposed else product.multiply(*floats)).astype(a.dtype)


def mlp(activation: Activation, x: jax.Array, layers: Layers, heads: Layers = ()) -> list[jax.Array]:
    """Dense layers, each followed by the activation, then linear heads, which all see the last output in float32.

    x [N, D] -> a list: [N, F] of each head, or of the last layer alone if there are no heads.
    """
    if not (in_use() and x.dtype == jnp.float32 and layers):
        return plain.mlp(activation, x, layers, heads, affine)
    from cleanba.kernels import dense

    if not heads:
        return [dense.mlp(activation, False, x, layers)]
    all_heads = tuple(jnp.concatenate(parts, -1) for parts in zip(*heads, strict=True))  # as one layer
    out = dense.mlp(activation, True, x, [*layers, all_heads])
    return jnp.split(out, np.cumsum([b.size for _, b in heads])[:-1], axis=-1)


def layer_norm(x: jax.Array, scale: jax.Array, bias: jax.Array) -> jax.Array:
    """The sum g (x - mean) / sqrt(variance + 1e-6) + b, over the last axis (Ba et al. 2016, eq. 4).

    x [..., F], g being `scale` [F] and b `bias` [F] -> [..., F].  Computed in float32; y has the dtype of x.
    """
    if not in_use():
        return plain.layer_norm(x, scale, bias)
    from cleanba.kernels import normalisation

    rows, *others = (p.astype(jnp.float32) for p in (x.reshape(-1, x.shape[-1]), scale, bias))
    return normalisation.layer_norm(rows, *others).reshape(x.shape).astype(x.dtype)


def adam(settings: Adam, shards: ShardAxis, rate: jax.Array, trained: T, gradient: PyTree) -> tuple[T, jax.Array]:
    """One step of Adam, of length `rate` []; also the gradient's global norm [], before clipping.

    `trained.optimiser` is the state of `settings.rule`; leaves of the gradient are those of the parameters.
    """
    if not in_use():
        return plain.adam(settings, shards, rate, trained, gradient)
    from cleanba.kernels import descent

    return descent.step(settings, shards, rate, trained, gradient)


def polyak_update(shards: ShardAxis, tau: float, now: jax.Array, params: PyTree, targets: PyTree) -> PyTree:
    """Target = tau params + (1 - tau) target, if `now` ([] bool); else the targets as they are.

    Leaves of `params`, of `targets` and of what is returned have the same shapes (Lillicrap et al. 2015, algorithm 1).
    """
    if not in_use():
        return plain.polyak_update(shards, tau, now, params, targets)
    from cleanba.kernels import descent

    return descent.polyak_update(tau, now, params, targets)


def forwarded(name: str, capsule: object) -> str | None:
    """Register another library's handler so that its attribute, an address, is its first argument (`forwarding.py`).

    Returns the name by which `jax.ffi.ffi_call` finds it; None where kernels are not in use.

    Raises:
        CannotCompile: LLVM or XLA refuses it on this machine.
    """
    if not expected() or jax.default_backend() != "cpu":
        return None
    from cleanba.kernels import forwarding

    return forwarding.forwarded(name, capsule)


def install_random_numbers() -> None:
    """Have JAX draw random numbers on CPUs by a kernel, where kernels are in use: the same numbers, faster.

    This affects everything that this process compiles from now on, environments in JAX included.
    """
    if expected():
        _install()


@cache
def _install() -> None:
    def draw(*words: jax.Array) -> tuple[jax.Array, jax.Array]:
        if not in_use():
            return plain.threefry(*words)
        from cleanba.kernels import threefry

        return threefry.threefry(*words)

    ours = mlir.lower_fun(compiled_for("cpu", None, draw), multiple_results=True)
    exported = mlir.lower_fun(plain.threefry, multiple_results=True)

    def rule(context: mlir.LoweringRuleContext, *words: Any) -> Any:
        for_export = context.module_context.lowering_parameters.for_export  # by `jax.export`, for other machines
        return (exported if for_export else ours)(context, *words)

    mlir.register_lowering(threefry2x32_p, rule, platform="cpu")
