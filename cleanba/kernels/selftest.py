"""A self-test: each kernel against plain JAX on a small, odd shape.  Once per machine and version, kept on disk."""

import platform
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from typing import NamedTuple

import jax
import jax.numpy as jnp
import llvmlite.binding as llvm
import numpy as np
import optax

from cleanba.errors import CannotCompile
from cleanba.kernels import convolution, dense, descent, normalisation, plain, product, threefry
from cleanba.kernels.llvm import SOURCES, keep, kept_at, read_kept
from cleanba.limits import usable_cores
from cleanba.rollout import PyTree
from cleanba.shards import R, ShardAxis, Ts, compiler_options

PASSED = "passed"
PACKAGES = tuple(version(name) for name in ("jax", "jaxlib", "llvmlite"))
OPTIONS = compiler_options("cpu") | {"xla_backend_optimization_level": 0}  # fast to compile, not fast to run
CLOSE = 1e-4  # how far results may lie apart, of the largest in an array


class Case(NamedTuple):
    """One function in two forms, whose results must agree within `CLOSE`."""

    name: str
    kernel: Callable[[PyTree], PyTree]
    plain: Callable[[PyTree], PyTree]


class Alone(ShardAxis):
    """A single shard, without isolation, so that it compiles faster."""

    def __init__(self) -> None:
        super().__init__(1, jnp.zeros(1, jnp.int32), jnp.bool_(True), "")

    def isolate(self, fn: Callable[[*Ts], R], *args: *Ts) -> R:
        return fn(*args)


class Trained(NamedTuple):
    params: PyTree
    optimiser: PyTree


def verdict() -> str:
    """Why kernels must not be used, as the second half of a sentence; "" if they passed, today or earlier."""
    path = kept_at("\n".join(versions()), ".selftest")
    told = read_kept(path).decode()
    if not told:
        try:
            told = run() or PASSED
        except CannotCompile as error:  # perhaps out of memory, so the verdict is not stored
            return str(error)
        keep(path, told.encode())
    return "" if told == PASSED else told


def versions() -> list[str]:
    """All that a verdict holds for."""
    features = llvm.get_host_cpu_features().flatten()
    return [platform.machine(), llvm.get_host_cpu_name(), features, str(usable_cores()), *PACKAGES, SOURCES]


def run() -> str:
    """Compare all kernels with plain JAX; what differs, as the second half of a sentence, or ""."""
    given, all_cases = numbers(), cases()

    def results(form: Callable[[Case], Callable[[PyTree], PyTree]]) -> list[PyTree]:
        together = lambda given: [form(case)(given) for case in all_cases]
        with jax.default_device("cpu"):
            found: list[PyTree] = jax.device_get(jax.jit(together, compiler_options=OPTIONS)(given))
        return found

    with ThreadPoolExecutor(1) as pool:  # LLVM compiles kernels while XLA compiles the rest
        plainly = pool.submit(results, lambda case: case.plain)
        found = zip(results(lambda case: case.kernel), plainly.result(), strict=True)
    wrong = [case.name for case, (ours, theirs) in zip(all_cases, found, strict=True) if not same(ours, theirs)]
    return f"{' and '.join(wrong)} differed from plain JAX in a self-test (please report it)" if wrong else ""


def same(ours: PyTree, theirs: PyTree) -> bool:
    """Whether two results are equal, but for rounding."""

    def close(a: np.ndarray, b: np.ndarray) -> bool:
        if a.shape != b.shape or a.dtype != b.dtype:
            return False
        if a.dtype != np.float32:
            return bool((a == b).all())
        return bool(np.isfinite(a).all()) and float(abs(a - b).max()) <= CLOSE * float(abs(b).max())

    return all(map(close, jax.tree.leaves(ours), jax.tree.leaves(theirs)))


def numbers() -> PyTree:
    """Small arrays of odd shapes, drawn from a fixed seed."""
    rng = np.random.default_rng(0)
    normal = lambda *shape: np.asarray(rng.normal(size=shape), np.float32)
    layers = [(normal(5, 18) / 2, normal(18)), (normal(18, 3) / 4, normal(3))]
    return {
        "due": np.array(True),
        "planes": rng.integers(0, 256, (3, 3, 9, 7), np.uint8),
        "convolutions": [
            (normal(3, 3, 3, 16) / 500, normal(16)),
            (normal(3, 3, 16, 16) / 12, normal(16)),
        ],
        "pixels": rng.integers(0, 256, (3, 9, 7, 3), np.uint8),
        "rows": normal(15, 5),
        "many": normal(70, 300),
        "wide": (normal(300, 130) / 17, normal(130)),
        "layers": layers,
        "normalised": [(normal(19, n) / np.float32(500), normal(n), normal(n)) for n in (18, 90)],
        "gradient": jax.tree.map(lambda x: normal(*x.shape), layers),
        "moments": jax.tree.map(lambda x: normal(*x.shape) ** 2, (layers, layers)),
        "words": [rng.integers(0, 2**32, 37, np.uint32) for _ in range(4)],
        "strided": [
            (normal(4, 4, 3, 16) / 500, normal(16)),
            (normal(3, 3, 16, 16) / 12, normal(16)),
        ],
    }


def cases() -> list[Case]:
    """One case for each kind of kernel, with its gradients where it has any."""
    return [
        Case("convolutions", images(convolution.convolve), images(plain.convolve)),
        Case("strided convolutions", strides(convolution.convolve), strides(plain.convolve)),
        Case("convolutions of pixels", pixels(convolution.convolve), pixels(plain.convolve)),
        Case("matrix products", products(product.affine), products(plain.affine)),
        Case(
            "dense layers",
            chains(lambda activation, x, layers: dense.mlp(activation, True, x, layers)),
            chains(lambda activation, x, layers: plain.mlp(activation, x, layers[:-1], layers[-1:])[0]),
        ),
        Case("layer normalisation", norms(normalisation.layer_norm), norms(plain.layer_norm)),
        Case("steps of Adam", steps(descent.step), steps(plain.adam)),
        Case(
            "target networks",
            lambda given: descent.polyak_update(0.25, given["due"], given["layers"], given["gradient"]),
            lambda given: plain.polyak_update(Alone(), 0.25, given["due"], given["layers"], given["gradient"]),
        ),
        Case(
            "random numbers",
            lambda given: threefry.threefry(*given["words"]),
            lambda given: plain.threefry(*given["words"]),
        ),
    ]


def images(convolve: Callable[..., jax.Array]) -> Callable[[PyTree], PyTree]:
    """A layer on planes of bytes, then one on its output, rectified; both pooled.  Values, and all gradients."""
    first, second = (plain.Convolution(((1, 1), (1, 1)), planes=i == 0, rectify=i == 1, pool=True) for i in range(2))

    def network(layers: list[tuple[jax.Array, jax.Array]], planes: jax.Array) -> jax.Array:
        x = convolve(first, planes, *layers[0], None)
        return jnp.sin(convolve(second, x, *layers[1], None)).sum()

    of = jax.value_and_grad(network)
    return lambda given: of(given["convolutions"], given["planes"])


def strides(convolve: Callable[..., jax.Array]) -> Callable[[PyTree], PyTree]:
    """4 x 4 pixels in steps of 2, as in the Nature CNN, then a residual.  Values, and all gradients."""
    first = plain.Convolution(((0, 0), (0, 0)), stride=2, planes=True)
    second = plain.Convolution(((1, 1), (1, 1)), rectify=True)

    def network(layers: list[tuple[jax.Array, jax.Array]], planes: jax.Array) -> jax.Array:
        x = convolve(first, planes, *layers[0], None)
        return jnp.sin(convolve(second, x, *layers[1], x)).sum()

    of = jax.value_and_grad(network)
    return lambda given: of(given["strided"], given["planes"])


def pixels(convolve: Callable[..., jax.Array]) -> Callable[[PyTree], PyTree]:
    """Bytes with the channels last.  Values, and the gradients of the layer."""
    how = plain.Convolution(((1, 1), (1, 1)))
    of = jax.value_and_grad(lambda layer, x: jnp.sin(convolve(how, x, *layer, None)).sum())
    return lambda given: of(given["convolutions"][0], given["pixels"])


def products(affine: Callable[..., jax.Array]) -> Callable[[PyTree], PyTree]:
    """Two products and their gradients, one with sums of many terms, which threads share."""
    of = jax.value_and_grad(lambda x, layer: jnp.sin(affine(x, *layer)).sum(), argnums=(0, 1))
    return lambda given: [of(given["rows"], given["layers"][0]), of(given["many"], given["wide"])]


def chains(mlp: Callable[..., jax.Array]) -> Callable[[PyTree], PyTree]:
    """A layer and a head, with either activation, and all gradients."""
    total = lambda activation, x, layers: jnp.sin(mlp(activation, x, layers)).sum()
    of = jax.value_and_grad(total, argnums=(1, 2))
    return lambda given: [of(name, given["rows"], given["layers"]) for name in ("tanh", "relu")]


def norms(layer_norm: Callable[..., jax.Array]) -> Callable[[PyTree], PyTree]:
    """Two layer normalisations, one of many features, and their gradients."""
    total = lambda x, scale, bias: jnp.sin(layer_norm(x, scale, bias)).sum()
    of = jax.value_and_grad(total, argnums=(0, 1, 2))
    return lambda given: [of(*arrays) for arrays in given["normalised"]]


def steps(adam: Callable[..., tuple[Trained, jax.Array]]) -> Callable[[PyTree], PyTree]:
    """A step of Adam, after two others, whose gradient is clipped."""
    settings = plain.Adam(eps=1e-5, max_norm=0.5)

    def run(given: PyTree) -> PyTree:
        clipping, _ = settings.rule.init(given["layers"])
        moments = optax.ScaleByAdamState(jnp.int32(2), *given["moments"])
        trained = Trained(given["layers"], (clipping, moments))
        return adam(settings, Alone(), jnp.float32(0.01), trained, given["gradient"])

    return run
