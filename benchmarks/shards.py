"""How much does it cost to compute gradients shard by shard?

Times one update on one device with the batch in 1, 2, 4 … shards against the same update on an undivided batch, without
isolation and ordered sums, in turns within one run.  Rollouts are random numbers.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import machine
import numpy as np
import tyro

from cleanba.algorithms import ppo
from cleanba.config import Partition, Placement
from cleanba.runtime.devices import find_devices
from cleanba.runtime.learner import Learner, abstract_block
from cleanba.shards import ShardAxis
from cleanba.specs import EnvSpec, ObsSpec, choice


@dataclass(frozen=True)
class Args:
    """Flags of the benchmark."""

    network: str = "impala"
    """torso"""
    num_envs: int = 120
    """environments"""
    num_steps: int = 128
    """steps per rollout"""
    num_minibatches: int = 4
    """minibatches"""
    update_epochs: int = 4
    """epochs"""
    shards: tuple[int, ...] = (1, 2, 4, 8)
    """numbers of shards"""
    rounds: int = 3
    """rounds; figures are medians over them"""


@contextmanager
def undivided() -> Iterator[None]:
    """Within this context, no isolation and no ordered sums: what one would write for a single device."""
    isolate, total = ShardAxis.isolate, ShardAxis.sum
    ShardAxis.isolate = lambda self, fn, *args: fn(*args)  # type: ignore[method-assign]
    ShardAxis.sum = lambda self, tree: jax.tree.map(lambda x: x.sum(0), tree)  # type: ignore[method-assign]
    try:
        yield
    finally:
        ShardAxis.isolate, ShardAxis.sum = isolate, total  # type: ignore[method-assign]


def main(args: Args) -> None:
    """Measure, print a table, write the results."""
    devices = find_devices(Placement())
    spec = EnvSpec("Breakout-v5", ObsSpec("image", (4, 84, 84), "uint8"), choice(18), True, True, {})
    rng = np.random.default_rng(0)

    def prepare(shards: int) -> Any:
        e = ppo.PPO(
            network=args.network, num_envs=args.num_envs, num_steps=args.num_steps,
            num_minibatches=args.num_minibatches, update_epochs=args.update_epochs,
        )  # fmt: skip
        partition = Partition(args.num_envs, 1, shards)
        ppo.check(e, partition)
        algorithm = ppo.make(e, spec, devices.platform)
        learner = Learner(algorithm, partition, devices, 1)
        state = learner.init()
        block = abstract_block(algorithm, spec, e.num_steps, args.num_envs // shards)
        learner.compile(state, (), block)

        def fill(x: Any) -> jax.Array:
            if x.dtype == jnp.uint8:
                return jnp.asarray(rng.integers(0, 255, x.shape, np.uint8))
            return jnp.ones(x.shape, x.dtype) if x.dtype == bool else jnp.zeros(x.shape, x.dtype)

        blocks = [jax.tree.map(fill, block) for _ in range(shards)]
        holder = [state]

        def run() -> float:
            start = time.perf_counter()
            holder[0], _, _ = learner.update(holder[0], (), blocks, 1)
            jax.block_until_ready(holder[0])
            return time.perf_counter() - start

        run()
        return run

    with undivided():
        runs = {"undivided": prepare(1)}
    runs |= {f"{k} shards": prepare(k) for k in args.shards}
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(args.rounds):
        for name, run in runs.items():
            seconds[name].append(run())
    base = float(np.median(seconds["undivided"]))
    ratios = {name: float(np.median(s)) / base for name, s in seconds.items()}
    for name, s in seconds.items():
        print(f"{name:12} {np.median(s):8.3f} s  ({min(s):.3f} … {max(s):.3f})   {ratios[name]:.2f} x undivided")
    path = machine.save(
        f"shards_{devices.platform}_{args.network}",
        {"seconds_per_update": {n: machine.spread(s) for n, s in seconds.items()}, "over_undivided": ratios},
    )
    print(f"written: benchmarks/results/{path.name}")


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
