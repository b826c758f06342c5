"""How much does a checkpoint of a large replay memory cost, and how much does it cost to resume from one?

Fills a ring of Atari frames, as DQN does, then takes checkpoints with few new rows.  Bytes are those of the files.  The
learner waits only for the scan that finds the new chunks; they are written in the background.

python benchmarks/memory.py --gigabytes 4     # two minutes on two cores, twice that memory, and as much disk
"""

import json
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import machine
import numpy as np
import tyro

from cleanba.ops import replay
from cleanba.rollout import Rollout
from cleanba.runtime import memory

ENVS, STEPS = 8, 128


@dataclass(frozen=True)
class Args:
    """Flags of the benchmark."""

    gigabytes: float = 4.0
    """size of the memory"""
    new_megabytes: float = 100.0
    """new data between two checkpoints"""
    checkpoints: int = 3
    """checkpoints to take; each has its own figures"""


def rollout_of(number: int) -> Rollout:
    """A rollout of noise, which nothing compresses.  Leaves [1, T(+1), B, ...]."""
    rng = np.random.default_rng(number)
    frames = rng.integers(0, 256, (STEPS + 4, ENVS, 84, 84), np.uint8)
    obs = np.stack([frames[i : i + STEPS + 1] for i in range(4)], axis=2)
    flag = np.zeros((STEPS, ENVS), bool)
    first = np.zeros((STEPS + 1, ENVS), bool)
    one = Rollout(
        obs, first, rng.integers(0, 18, (STEPS, ENVS), np.int32), rng.normal(size=(STEPS, ENVS)).astype(np.float32),
        flag, flag, ~flag, {}, (),
    )  # fmt: skip
    return jax.tree.map(lambda x: jnp.asarray(x)[None], one)


def main(args: Args) -> None:
    """Measure, print a table, write the results."""
    shape = jax.eval_shape(lambda: jax.tree.map(lambda x: x[0], rollout_of_shape()))
    capacity = int(args.gigabytes * 1e9 / 7066)
    like = jax.eval_shape(lambda: replay.init(shape, capacity, stack=4))
    write = jax.jit(replay.write, donate_argnums=0)
    ring = jax.jit(lambda: jax.tree.map(lambda x: x[None], replay.init(shape, capacity, stack=4)))()
    rollouts = [rollout_of(i) for i in range(4)]
    whole = capacity // (ENVS * STEPS) + 1
    for i in range(whole):
        ring = write(ring, rollouts[i % 4])
    jax.block_until_ready(ring)
    rows: list[dict[str, Any]] = []
    each = max(1, round(args.new_megabytes * 1e6 / (ENVS * STEPS * 7066)))
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder)
        memory_store = memory.MemoryStore(like, range(1), folder=run)
        for number in range(1, args.checkpoints + 2):
            before = {path: path.stat().st_size for path in run.rglob("*") if path.is_file()}
            start = time.perf_counter()
            found = memory_store.snapshot(ring, number)
            looked = time.perf_counter()
            memory.prune(run, range(1), [number - 1, number], found)
            memory.write(run, number, found)
            wrote = time.perf_counter()
            new = sum(p.stat().st_size for p in run.rglob("*") if p.is_file() and p not in before)
            rows.append({"look_seconds": looked - start, "write_seconds": wrote - looked, "megabytes": new / 1e6})
            for i in range(each):
                ring = write(ring, rollouts[i % 4])
            jax.block_until_ready(ring)
        on_disk = sum(path.stat().st_size for path in run.rglob("*") if path.is_file())
        listing = json.loads((memory.shard_folder(run, 0) / f"{number}.json").read_text())
        start = time.perf_counter()
        memory.read(run, number, range(1), like, [listing["digest"]])
        read = time.perf_counter() - start
    new = each * ENVS * STEPS * 7066 / 1e6
    print(f"{memory.nbytes(like) / 1e9:.2f} GB, {new:.0f} MB new between two checkpoints")
    for i, row in enumerate(rows):
        words = "all of it" if i == 0 else "what is new"
        print(
            f"checkpoint {i + 1}, {words:11}: {row['megabytes']:7.0f} MB written, "
            f"looked at in {row['look_seconds']:.2f} s, written in {row['write_seconds']:.2f} s"
        )
    print(f"on disk {on_disk / 1e9:.2f} GB; read back and checked in {read:.1f} s")
    figures = {"bytes": memory.nbytes(like), "new_megabytes": new, "checkpoints": rows, "on_disk": on_disk}
    path = machine.save("memory_cpu", figures | {"read_seconds": read})
    print(f"written: benchmarks/results/{path.name}")


def rollout_of_shape() -> Rollout:
    """As `rollout_of`, without the noise."""
    obs = jnp.zeros((1, STEPS + 1, ENVS, 4, 84, 84), jnp.uint8)
    number, flag = jnp.zeros((1, STEPS, ENVS), jnp.int32), jnp.zeros((1, STEPS, ENVS), bool)
    return Rollout(obs, obs[..., 0, 0, 0] > 0, number, number.astype(jnp.float32), flag, flag, flag, {}, ())


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
