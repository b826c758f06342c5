"""How fast do single convolutions run on one core, ours and XLA's?  In billions of floating-point operations a second.

    python benchmarks/convolutions.py             # a minute; results in benchmarks/results/

Each convolution runs by itself on 32 images, with its bias, and with pooling where the network pools.  It times the
forward pass, the gradients of kernel and bias, and the gradient of x unless x is bytes.  All take turns; the figure is
the shortest processor time of a turn, as other work on the machine lengthens that least.  XLA's convolution is Eigen's;
its gradients are scalar code inside of loops, and are not compared.
"""

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import machine
import numpy as np
import tyro
from jax import lax
from rich.console import Console
from rich.table import Table

from cleanba.kernels.convolution import Convolution, convolve
from cleanba.shards import network_options

SAME, VALID = ((1, 1), (1, 1)), ((0, 0), (0, 0))
LAYERS = {  # how, image, size of the kernel, features
    "Nature CNN, 8 x 8 in steps of 4, bytes": (Convolution(VALID, 4, planes=True), (4, 84, 84), 8, 32),
    "Nature CNN, 4 x 4 in steps of 2": (Convolution(VALID, 2, rectify=True), (20, 20, 32), 4, 64),
    "Nature CNN, 3 x 3": (Convolution(VALID, rectify=True), (9, 9, 64), 3, 64),
    "ResNet, 84 x 84, 4 to 16, bytes, pooled": (Convolution(SAME, planes=True, pool=True), (4, 84, 84), 3, 16),
    "ResNet, 42 x 42, 16 to 16": (Convolution(SAME, rectify=True), (42, 42, 16), 3, 16),
    "ResNet, 42 x 42, 16 to 32, pooled": (Convolution(SAME, pool=True), (42, 42, 16), 3, 32),
    "ResNet, 21 x 21, 32 to 32": (Convolution(SAME, rectify=True), (21, 21, 32), 3, 32),
    "ResNet, 11 x 11, 32 to 32": (Convolution(SAME, rectify=True), (11, 11, 32), 3, 32),
    "MinAtar, 10 x 10, 4 to 16": (Convolution(VALID), (10, 10, 4), 3, 16),
}


@dataclass(frozen=True)
class Flags:
    """What is measured."""

    images: int = 32
    """in a batch"""
    turns: int = 30
    """of each"""


def shortest(runs: dict[str, Callable[[], object]], turns: int) -> dict[str, float]:
    """The processor's seconds of each run, in turns; each has run once before."""
    for run in runs.values():
        run()
    seconds: dict[str, float] = dict.fromkeys(runs, float("inf"))
    for _ in range(turns):
        for name, run in runs.items():
            before = time.process_time()
            run()
            seconds[name] = min(seconds[name], time.process_time() - before)
    return seconds


def measure(name: str, flags: Flags) -> dict[str, object]:
    """Operations per second of one layer: a product and a sum are two."""
    how, image, size, features = LAYERS[name]
    rng = np.random.default_rng(0)
    draw = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)
    x = (
        jnp.asarray(rng.integers(256, size=(flags.images, *image)), jnp.uint8)
        if how.planes
        else draw(flags.images, *image)
    )
    channels = image[0] if how.planes else image[2]
    kernel, bias = draw(size, size, channels, features), draw(features)
    last = x.transpose(0, 2, 3, 1).astype(jnp.float32) if how.planes else x
    numbers = ("NHWC", "HWIO", "NHWC")
    strides = (how.stride, how.stride)
    plain = lambda x, kernel: lax.conv_general_dilated(x, kernel, strides, how.pads, dimension_numbers=numbers)
    operations = 2 * np.prod(jax.eval_shape(plain, last, kernel).shape) * size * size * channels

    y, back = jax.vjp(lambda kernel, bias, x=x: convolve(how, x, kernel, bias, None), kernel, bias)
    kernels = jax.jit(lambda back, dy: back(dy))
    jitted = partial(jax.jit, compiler_options=network_options("cpu"))
    forward, xla = jitted(partial(convolve, how)), jitted(plain)
    runs = {
        "forward": lambda: jax.block_until_ready(forward(x, kernel, bias, None)),
        "forward, XLA": lambda: jax.block_until_ready(xla(last, kernel)),
        "gradient of the kernel": lambda: jax.block_until_ready(kernels(back, y)),
    }
    if not how.planes:
        _, of_x = jax.vjp(lambda x: convolve(how, x, kernel, bias, None), x)
        both = jax.jit(lambda of_x, dy: of_x(dy))  # XLA drops the kernel's gradient, which is not used
        runs["gradient of x"] = lambda: jax.block_until_ready(both(of_x, y))
    return {"layer": name} | {run: operations / s / 1e9 for run, s in shortest(runs, flags.turns).items()}


def main(flags: Flags) -> None:
    os.environ["PJRT_NPROC"] = "1"  # read when a device is first asked for
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    rows = [measure(name, flags) for name in LAYERS]
    columns = ("forward", "forward, XLA", "gradient of the kernel", "gradient of x")
    table = Table("layer", *columns, title="billions of operations per second, one core")
    for row in rows:
        table.add_row(row["layer"], *[f"{row[c]:.0f}" if c in row else "" for c in columns])
    Console().print(table)
    print(machine.save("convolutions_cpu", {"rows": rows}))


if __name__ == "__main__":
    main(tyro.cli(Flags))
