"""How fast do the networks for images run with XLA's own convolutions, ours for CPUs, and PyTorch's?

    python benchmarks/networks.py             # two minutes; results in benchmarks/results/

Acting is one forward pass by itself.  Learning is forward and backward, one minibatch after another inside of a loop,
as in training; that matters, as XLA's gradients on CPUs are only fast outside of loops.  All forms take turns, so other
work on the machine slows all of them.  PyTorch takes part if it is installed, with either order of an image's
dimensions.
"""

import os
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import machine
import numpy as np
import tyro
from jax import lax
from rich.console import Console
from rich.table import Table

from cleanba.config import Experiment
from cleanba.kernels import compiled_for
from cleanba.networks.torsos import ImpalaResNet, NatureCNN
from cleanba.runtime.process_setup import prepare_process
from cleanba.shards import compiler_options, network_options

NETWORKS = {
    "nature": NatureCNN((512,)),
    "impala": ImpalaResNet((16, 32, 32), (256,)),
}


@dataclass(frozen=True)
class Flags:
    """What is measured."""

    networks: tuple[str, ...] = ("nature", "impala")
    """of nature, impala"""
    act: tuple[int, ...] = (16, 60)
    """images in a forward pass"""
    learn: tuple[int, ...] = (64,)
    """images in a minibatch"""
    minibatches: int = 2
    """in a loop"""
    forms: tuple[str, ...] = ("direct", "xla", "pytorch", "pytorch-last")
    """the implementations that take turns; ratios are to the first"""
    rounds: int = 20
    """how often each takes its turn, at most"""
    seconds: float = 6.0
    """no further round begins after this time"""


def ours(name: str, form: str, images: np.ndarray) -> tuple[Callable, Callable]:
    """Acting and learning.  images: [M, B, 4, 84, 84] uint8, M minibatches."""
    network, x = NETWORKS[name], jnp.asarray(images)
    params = jax.jit(network.init)(jax.random.key(0), x[0, :1])
    loss = lambda params, x: jnp.square(network.apply(params, x)).mean()

    @partial(jax.jit, compiler_options=compiler_options(jax.default_backend()))  # as updates are
    def learn(params: Any, x: jax.Array) -> Any:
        step = lambda params, x: (jax.tree.map(lambda p, g: p - 1e-6 * g, params, jax.grad(loss)(params, x)), None)
        return lax.scan(step, params, x)[0]

    act = jax.jit(network.apply, compiler_options=network_options(jax.default_backend()))
    formed = lambda run: compiled_for(jax.default_backend(), "auto" if form == "direct" else "off", run)
    return (
        formed(lambda: jax.block_until_ready(act(params, x[0]))),
        formed(lambda: jax.block_until_ready(learn(params, x))),
    )


def pytorch(name: str, images: np.ndarray, channels_last: bool) -> tuple[Callable, Callable] | None:
    """The same for PyTorch, with as many threads as there are cores; None without PyTorch."""
    try:
        import torch
    except ImportError:
        return None
    nn = torch.nn
    order = torch.channels_last if channels_last else torch.contiguous_format

    class Residual(nn.Module):
        def __init__(self, channels: int):
            super().__init__()
            self.first, self.second = (nn.Conv2d(channels, channels, 3, padding=1) for _ in range(2))

        def forward(self, x: Any) -> Any:
            return x + self.second(torch.relu(self.first(torch.relu(x))))

    if name == "nature":
        layers = [nn.Conv2d(4, 32, 8, 4), nn.ReLU(), nn.Conv2d(32, 64, 4, 2), nn.ReLU(), nn.Conv2d(64, 64, 3)]
        units = (3136, 512)
    else:
        layers, units = [], (11 * 11 * 32, 256)
        for before, channels in ((4, 16), (16, 32), (32, 32)):
            layers += [nn.Conv2d(before, channels, 3, padding=1), nn.MaxPool2d(3, 2, 1)]
            layers += [Residual(channels), Residual(channels)]
    network = nn.Sequential(*layers, nn.ReLU(), nn.Flatten(), nn.Linear(*units), nn.ReLU()).to(memory_format=order)
    optimiser = torch.optim.SGD(network.parameters(), 1e-6)
    x = [torch.from_numpy(batch).to(memory_format=order) for batch in images]

    def act() -> None:
        with torch.no_grad():
            network(x[0] / 255.0)

    def learn() -> None:
        for images in x:
            optimiser.zero_grad()
            network(images / 255.0).square().mean().backward()
            optimiser.step()

    return act, learn


def interleaved(runs: dict[str, Callable], flags: Flags) -> dict[str, list[float]]:
    """Seconds of each run of each form, in turns; each has run once before."""
    for run in runs.values():
        run()
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    start = time.perf_counter()
    while len(seconds[next(iter(runs))]) < flags.rounds and time.perf_counter() - start < flags.seconds:
        for name, run in runs.items():
            with machine.as_a_script() if name.startswith("pytorch") else nullcontext():
                before = time.perf_counter()
                run()
            seconds[name].append(time.perf_counter() - before)
    return seconds


def measure(name: str, learning: bool, batch: int, flags: Flags) -> dict[str, Any]:
    """Images per second of each form, and ratios to the first."""
    minibatches = flags.minibatches if learning else 1
    images = np.random.default_rng(0).integers(256, size=(minibatches, batch, 4, 84, 84), dtype=np.uint8)
    runs = {}
    for form in flags.forms:
        if not form.startswith("pytorch"):
            runs[form] = ours(name, form, images)[learning]
        elif both := pytorch(name, images, form == "pytorch-last"):
            runs[form] = both[learning]
    seconds = interleaved(runs, flags)
    speed = {form: machine.spread([minibatches * batch / s for s in samples]) for form, samples in seconds.items()}
    first = speed[next(iter(speed))]["median"]
    ratio = {form: values["median"] / first for form, values in speed.items()}
    return {
        "network": name,
        "pass": "forward and backward" if learning else "forward",
        "images": batch,
        "images_per_second": speed,
        "ratio_of_medians": ratio,
    }


def main(flags: Flags) -> None:
    machine.start_pytorch()
    prepare_process(Experiment())  # as trainings are
    cases = [(name, learning, batch) for name in flags.networks for learning in (False, True)
             for batch in (flags.learn if learning else flags.act)]  # fmt: skip
    load = [os.getloadavg()[0]]  # before and at the end: if it exceeds the number of cores, figures mean little
    rows = [measure(*case, flags) for case in cases]
    load.append(os.getloadavg()[0])
    table = Table("network", "pass", "images", *[f"{form} images/s" for form in flags.forms], title="median (ratio)")
    for row in rows:
        speed, ratio = row["images_per_second"], row["ratio_of_medians"]
        cells = [f"{speed[f]['median']:,.0f} ({ratio[f]:.2f})" if f in speed else "" for f in flags.forms]
        table.add_row(row["network"], row["pass"], str(row["images"]), *cells)
    Console().print(table)
    print(machine.save(f"networks_{jax.default_backend()}", {"load_average": load, "rows": rows}))


if __name__ == "__main__":
    main(tyro.cli(Flags))
