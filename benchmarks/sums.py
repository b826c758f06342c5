"""How much does the sum of the gradients over all shards cost each device?

Compiles `ShardAxis.sum`, and a sum that gathers all gradients on every device, for 8, 64 and 256 simulated devices with
one shard each.  Reads from the compiled programs how much a device receives, and how much temporary memory it needs.
On up to `--run` devices, both are also run, in turns within one process.
"""

import json
import math
import os
import re
import subprocess
import sys
import time
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import machine
import numpy as np
import tyro
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from cleanba.algorithms.ppo import PPO
from cleanba.networks import make_actor_critic
from cleanba.rollout import PyTree
from cleanba.shards import ShardAxis, compiler_options
from cleanba.specs import EnvSpec, ObsSpec, choice

BYTES = {"f32": 4, "s32": 4, "pred": 1}
COLLECTIVE = re.compile(r" = ([^=]*) (all-gather|all-to-all|all-reduce|reduce-scatter|collective-permute)\(")


@dataclass(frozen=True)
class Args:
    """Flags of the benchmark."""

    devices: tuple[int, ...] = (8, 64, 256)
    """numbers of devices, and of shards"""
    networks: tuple[str, ...] = ("impala", "nature")
    """torsos"""
    run: int = 8
    """also run the sums on up to this many devices"""
    rounds: int = 20
    """timed rounds"""
    here: bool = False
    """used by the benchmark itself: measure one number of devices in this process, and print it"""


def gathered_sum(shards: ShardAxis, tree: PyTree) -> PyTree:
    """The same sum in the same order, with every shard's gradient on every device."""

    def ordered_sum(x: jax.Array) -> jax.Array:
        return lax.scan(lambda total, part: (total + part, None), x[0], x[1:])[0]

    gathered = jax.tree.map(lambda x: lax.all_gather(x, shards.mesh_axis, axis=0, tiled=True), tree)
    return shards.isolate(lambda g: jax.tree.map(ordered_sum, g), gathered)


WAYS = {"gathered": gathered_sum, "exchanged": ShardAxis.sum}


def parameters(network: str) -> PyTree:
    """Shapes of the parameters of a network for Atari."""
    spec = EnvSpec("Breakout-v5", ObsSpec("image", (4, 84, 84), "uint8"), choice(18), True, True, {})
    return jax.eval_shape(make_actor_critic(spec, PPO(network=network)).initial_params, jax.random.key(0))


def received(hlo: str, devices: int) -> int:
    """Bytes that one device gets from the others in all collectives of a program's text."""
    total = 0
    for result, _ in COLLECTIVE.findall(re.sub(r"/\*.*?\*/", "", hlo)):  # long tuples hold /*index=5*/
        arrays = re.findall(r"(\w+)\[([\d,]*)\]", result)
        total += sum(BYTES[kind] * math.prod(map(int, filter(None, shape.split(",")))) for kind, shape in arrays)
    return total * (devices - 1) // devices  # it had one part of the result already


def measure(network: str, run: bool, rounds: int) -> dict[str, Any]:
    """Both ways over all devices of this process, one shard each."""
    devices = jax.devices()
    mesh = Mesh(np.array(devices), ("learner",))
    cut, everywhere = PartitionSpec("learner"), PartitionSpec()
    params = parameters(network)
    shape = lambda x: jax.ShapeDtypeStruct((len(devices), *x.shape), x.dtype, sharding=NamedSharding(mesh, cut))
    found: dict[str, Any] = {"parameter_bytes": sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(params))}
    compiled = {}
    for name, total in WAYS.items():

        def body(number: jax.Array, tree: PyTree, total: Any = total) -> PyTree:
            index = lax.axis_index("learner")[None]
            return total(ShardAxis(len(devices), index, number > 0, "learner"), tree)

        mapped = jax.jit(
            jax.shard_map(body, mesh=mesh, in_specs=(everywhere, cut), out_specs=everywhere, check_vma=False),
            compiler_options=compiler_options("cpu"),
        )
        number = jax.ShapeDtypeStruct((), jnp.int32, sharding=NamedSharding(mesh, everywhere))
        compiled[name] = mapped.lower(number, jax.tree.map(shape, params)).compile()
        found[name] = {
            "received_bytes": received(compiled[name].as_text(), len(devices)),
            "temporary_bytes": compiled[name].memory_analysis().temp_size_in_bytes,
        }
    if run:
        rng = np.random.default_rng(0)
        fill = lambda x: jax.device_put(rng.normal(size=x.shape).astype(x.dtype), NamedSharding(mesh, cut))
        args = (
            jax.device_put(jnp.int32(1), NamedSharding(mesh, everywhere)),
            jax.tree.map(fill, jax.tree.map(shape, params)),
        )
        seconds: dict[str, list[float]] = {name: [] for name in compiled}
        for _ in range(1 + rounds):
            for name, call in compiled.items():
                start = time.perf_counter()
                jax.block_until_ready(call(*args))
                seconds[name].append(time.perf_counter() - start)
        for name, s in seconds.items():
            found[name]["seconds"] = machine.spread(s[1:])
        same = jax.tree.map(lambda a, b: bool((a == b).all()), *(call(*args) for call in compiled.values()))
        found["equal"] = all(jax.tree.leaves(same))
    return found


def main(args: Args) -> None:
    """One process for each number of devices; print a table, write the results."""
    if args.here:
        (n,) = args.devices
        print(json.dumps({name: measure(name, n <= args.run, args.rounds) for name in args.networks}))
        return
    results: dict[str, Any] = {}
    for n in args.devices:
        words = [__file__, "--here", "--devices", str(n), "--networks", *args.networks, "--run", str(args.run)]
        environment = {**os.environ, "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(n)}
        command = [sys.executable, *words, "--rounds", str(args.rounds)]
        ended = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True)
        for name, found in json.loads(ended.stdout.splitlines()[-1]).items():
            results[f"{name}, {n} devices"] = found
            for way in WAYS:
                f = found[way]
                median = f" {1000 * f['seconds']['median']:7.1f} ms" if "seconds" in f else ""
                mb = [f"{f[what] / 1e6:9.1f} MB {what.split('_')[0]}" for what in ("received_bytes", "temporary_bytes")]
                print(f"{name:7} {n:4} devices  {way:9} {'  '.join(mb)}{median}", flush=True)
    path = machine.save("sums_cpu", {"sums": results})
    print(f"written: benchmarks/results/{path.name}")


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
