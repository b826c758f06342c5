"""How fast do dense layers and layer normalisations run on one core, ours and XLA's?  In microseconds.

    python benchmarks/products.py                 # a minute; results in benchmarks/results/

Each layer runs by itself: forward, and forward with all three gradients (XLA's as JAX derives them).  Several dense
layers run in one compiled loop, as a small one takes less time than a call; normalisations are called one by one.  All
take turns; the figure is the shortest processor time of a turn, as other work on the machine lengthens that least.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import machine
import numpy as np
import tyro
from convolutions import shortest
from jax import lax
from rich.console import Console
from rich.table import Table

from cleanba.kernels import plain
from cleanba.kernels.normalisation import layer_norm
from cleanba.kernels.product import affine
from cleanba.shards import network_options

LAYERS = {  # rows, what goes in, what comes out
    "MLP of 64, acting": (32, 64, 64),
    "MLP of 64, learning": (1024, 64, 64),
    "its policy's head": (1024, 64, 2),
    "SAC's first": (256, 23, 256),
    "SAC's second": (256, 256, 256),
    "SAC's policy's head": (256, 256, 6),
    "SAC's critic's head": (256, 256, 1),
    "MinAtar's": (1024, 1024, 128),
    "an LSTM's step": (8, 256, 1024),
    "ResNet's, acting": (32, 3872, 256),
    "ResNet's, learning": (64, 3872, 256),
    "Nature CNN's, acting": (32, 3136, 512),
    "Nature CNN's, learning": (512, 3136, 512),
}
NORMALISATIONS = {  # rows, features
    "after the Nature CNN's first convolution": (102_400, 32),
    "after its second": (20_736, 64),
    "after its dense layer": (256, 512),
}
FORMS: dict[str, Callable[..., jax.Array]] = {"ours": affine, "XLA": lambda x, w, b: x @ w + b}


@dataclass(frozen=True)
class Flags:
    """What is measured."""

    turns: int = 20
    """of each"""
    result: str = "products_cpu"
    """name of the file in benchmarks/results/"""


def measure(name: str, flags: Flags) -> dict[str, object]:
    """Microseconds of one layer."""
    rows, inner, columns = LAYERS[name]
    times = max(1, min(64, 2**25 // (rows * inner * columns)))
    rng = np.random.default_rng(0)
    xs, w, b = (jnp.asarray(rng.normal(size=s), jnp.float32) for s in ((times, rows, inner), (inner, columns), columns))
    runs = {}
    for form, layer in FORMS.items():

        def forward(
            carry: tuple[jax.Array, jax.Array], x: jax.Array, layer: Callable[..., jax.Array] = layer
        ) -> tuple[tuple[jax.Array, jax.Array], None]:
            w, b = carry
            return (w, b + 1e-9 * layer(x, w, b)[0]), None

        def both(
            carry: tuple[jax.Array, jax.Array], x: jax.Array, layer: Callable[..., jax.Array] = layer
        ) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
            y, back = jax.vjp(layer, x, *carry)
            dx, dw, db = back(y)
            w, b = carry
            return (w - 1e-9 * dw, b - 1e-9 * db), dx[0, 0]

        for what, step in (("forward", forward), ("forward and gradients", both)):
            loop = jax.jit(
                lambda w, b, xs, step=step: lax.scan(step, (w, b), xs), compiler_options=network_options("cpu")
            )
            runs[f"{what}, {form}"] = lambda loop=loop: jax.block_until_ready(loop(w, b, xs))
    return {"layer": name} | {run: 1e6 * s / times for run, s in shortest(runs, flags.turns).items()}


def measure_normalisation(name: str, flags: Flags) -> dict[str, object]:
    """Microseconds of one layer normalisation, of 256 images in a minibatch."""
    rows, features = NORMALISATIONS[name]
    rng = np.random.default_rng(0)
    x, scale, bias, dy = (
        jnp.asarray(rng.normal(size=shape), jnp.float32)
        for shape in ((rows, features), features, features, (rows, features))
    )
    runs = {}
    for form, layer in (("ours", layer_norm), ("XLA", plain.layer_norm)):

        def both(*given: jax.Array, layer: Callable[..., jax.Array] = layer) -> tuple[jax.Array, ...]:
            y, back = jax.vjp(layer, *given[:3])
            return y, *back(given[3])

        for what, function in (
            ("forward", lambda *given, layer=layer: layer(*given[:3])),
            ("forward and gradients", both),
        ):
            compiled = jax.jit(function, compiler_options=network_options("cpu"))
            runs[f"{what}, {form}"] = lambda compiled=compiled: jax.block_until_ready(compiled(x, scale, bias, dy))
    return {"layer": name} | {run: 1e6 * s for run, s in shortest(runs, flags.turns).items()}


def main(flags: Flags) -> None:
    os.environ["PJRT_NPROC"] = "1"  # read when a device is first asked for
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    found = [measure(name, flags) for name in LAYERS]
    found += [measure_normalisation(name, flags) for name in NORMALISATIONS]
    columns = [f"{what}, {form}" for what in ("forward", "forward and gradients") for form in FORMS]
    table = Table(
        "layer, or normalisation", "rows x in x out, or rows x features", *columns, title="microseconds of one core"
    )
    for row in found:
        size = " x ".join(f"{n:,}" for n in (LAYERS | NORMALISATIONS)[str(row["layer"])])
        table.add_row(row["layer"], size, *[f"{row[c]:,.1f}" for c in columns])
    Console(width=140).print(table)
    print(machine.save(flags.result, {"rows": found}))


if __name__ == "__main__":
    main(tyro.cli(Flags))
