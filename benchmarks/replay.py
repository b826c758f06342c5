"""Are writing and sampling slower in a larger replay memory?

Fills memories of different capacities with Atari's stacks of frames, rollout by rollout, until they have wrapped; then
times writing a rollout and drawing a minibatch of n-step transitions, in turns within one run: uniformly, and by
priorities, which the draw then changes.  Pictures are random numbers, which cannot be compressed.

python benchmarks/replay.py     # some 8 GB of memory
"""

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import machine
import numpy as np
import tyro

from cleanba.ops import replay
from cleanba.rollout import Rollout
from cleanba.shards import compiler_options


@dataclass(frozen=True)
class Args:
    """Flags of the benchmark."""

    capacities: tuple[int, ...] = (10_000, 100_000, 1_000_000)
    """transitions that the memories hold"""
    num_envs: int = 8
    """environments of the shard"""
    num_steps: int = 16
    """steps per rollout"""
    batch_size: int = 32
    """transitions per minibatch"""
    n_step: int = 3
    """steps per transition"""
    calls: int = 20
    """calls that are timed together"""
    rounds: int = 41
    """rounds; figures are medians over them"""


STACK = 4


def random_rollout(args: Args) -> Rollout:
    """One shard's rollout whose stacks follow on one another, all one episode.  Leaves [1, T(+1), B, ...]."""
    steps, envs = args.num_steps, args.num_envs
    frames = np.random.default_rng(0).integers(0, 256, (steps + STACK, envs, 84, 84), np.uint8)
    obs = np.stack([frames[j : j + steps + 1] for j in range(STACK)], axis=2)
    never = np.zeros((steps, envs), bool)
    first = np.zeros((steps + 1, envs), bool)
    fields = (obs, first, never.astype(np.int32), never.astype(np.float32), never, never, ~never)
    return Rollout(*(jnp.asarray(x)[None] for x in fields), extras=(), carry=())


def new_memory(shapes: Rollout, capacity: int) -> replay.PrioritisedRing:
    """Empty memory of a device with one shard."""
    return jax.jit(lambda: jax.tree.map(lambda x: x[None], replay.init_prioritised(shapes, capacity, STACK)))()


def resident() -> int:
    """Bytes of this process's memory that are in use, as the operating system counts them; 0 where it does not say."""
    try:
        with open("/proc/self/status") as status:
            return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmRSS"))
    except OSError:
        return 0


def main(args: Args) -> None:
    """Measure, print a table, write the results."""
    rollout = random_rollout(args)
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), rollout)
    options = compiler_options(jax.default_backend())
    zero = jnp.int32(0)
    write = jax.jit(replay.write, donate_argnums=0, compiler_options=options)
    write_prioritised = jax.jit(
        lambda memory, rollout: replay.write_prioritised(memory, rollout, args.n_step, STACK),
        donate_argnums=0,
        compiler_options=options,
    )

    def take(ring: replay.Ring, indices: replay.Indices) -> replay.Transition:
        return replay.n_step(replay.take(ring, zero, indices, args.n_step, STACK), 0.99)

    def draw(ring: replay.Ring, key: jax.Array) -> replay.Transition:
        return take(ring, replay.sample_indices(ring, zero, key, args.batch_size, args.n_step))

    def draw_prioritised(ring: replay.Ring, p: replay.Priorities, key: jax.Array) -> Any:
        """A minibatch, its importance weights, and the priorities after its errors, which are random numbers."""
        drawn = replay.draw(p, zero, replay.random_words(key, args.batch_size))
        transition = take(ring, replay.transitions_at(replay.PrioritisedRing(ring, p), zero, drawn))
        errors = replay.in_units(jax.random.uniform(key, (args.batch_size,)), 0.6)
        return transition, replay.importance(drawn, 0.4), replay.assign(p, zero, drawn, errors)

    sample = jax.jit(draw, compiler_options=options)
    sample_prioritised = jax.jit(draw_prioritised, donate_argnums=1, compiler_options=options)
    rings: dict[int, Any] = {}
    sizes: dict[int, dict[str, int]] = {}
    for capacity in args.capacities:
        before = resident()
        ring = new_memory(shapes, capacity)
        for _ in range(capacity // (args.num_envs * args.num_steps) + 1):
            ring = write_prioritised(ring, rollout)
        rings[capacity] = jax.block_until_ready(ring)
        taken = sum(x.nbytes for x in jax.tree.leaves(ring))
        of_priorities = sum(x.nbytes for x in jax.tree.leaves(ring.priorities))
        assert int(ring.ring.size[0]) == capacity // args.num_envs
        sizes[capacity] = {"arrays": taken, "priorities": of_priorities, "resident": resident() - before}
        del ring

    def written(capacity: int, _: int) -> Any:
        rings[capacity] = rings[capacity]._replace(ring=write(rings[capacity].ring, rollout))
        return rings[capacity]

    def written_prioritised(capacity: int, _: int) -> Any:
        rings[capacity] = write_prioritised(rings[capacity], rollout)
        return rings[capacity]

    def sampled(capacity: int, k: int) -> Any:
        return sample(rings[capacity].ring, jax.random.key(k))

    def sampled_prioritised(capacity: int, k: int) -> Any:
        *batch, priorities = sample_prioritised(*rings[capacity], jax.random.key(k))
        rings[capacity] = rings[capacity]._replace(priorities=priorities)
        return batch, priorities

    calls = {
        "write": written,
        "sample": sampled,
        "write, prioritised": written_prioritised,
        "sample, prioritised": sampled_prioritised,
    }

    def timed(call: Callable[[int, int], Any], capacity: int) -> float:
        start = time.perf_counter()
        for k in range(args.calls):
            jax.block_until_ready(call(capacity, k))
        return (time.perf_counter() - start) / args.calls

    seconds: dict[str, dict[int, list[float]]] = {}
    for round_ in range(args.rounds + 1):
        for name, call in calls.items():
            for capacity in args.capacities:
                spent = timed(call, capacity)
                if round_ > 0:  # the first compiles
                    seconds.setdefault(name, {}).setdefault(capacity, []).append(spent)
    for capacity in args.capacities:
        assert bool(sample(rings[capacity].ring, jax.random.key(0)).weight.all())
        assert bool(sampled_prioritised(capacity, 0)[0][0].weight.all())

    medians = {name: {c: float(np.median(s)) for c, s in of.items()} for name, of in seconds.items()}
    smallest, largest = min(args.capacities), max(args.capacities)
    ratios = {name: of[largest] / of[smallest] for name, of in medians.items()}
    print(f"{'':20}" + "".join(f"{c:>16,}" for c in args.capacities) + f"{'ratio':>8}")
    for name, of in medians.items():
        print(f"{name:20}" + "".join(f"{1e3 * of[c]:13.3f} ms" for c in args.capacities) + f"{ratios[name]:8.2f}")
    for name in ("arrays", "priorities", "resident"):
        print(f"{name:20}" + "".join(f"{sizes[c][name] / 1e9:13.4f} GB" for c in args.capacities))
    path = machine.save(
        f"replay_{jax.default_backend()}",
        {
            "seconds_per_call": {n: {c: machine.spread(s) for c, s in of.items()} for n, of in seconds.items()},
            "largest_over_smallest": ratios,
            "bytes": sizes,
            "load_average": os.getloadavg()[0],  # of what else the machine was doing, too
        },
    )
    print(f"written: benchmarks/results/{path.name}")


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
