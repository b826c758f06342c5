"""Does the model of many GPUs in docs/inside/gpu-programs.md describe the compiled update, on 1 to 64 devices?

    python benchmarks/scaling.py     # five minutes on two cores; results in benchmarks/results/

Each device has one shard of the same size, so in an ideal program the work and memory of a device do not depend on the
number of devices.  Devices are simulated on the CPU and nothing is run: what each device sends and holds is read from
the compiled program.
"""

import math
import os
import re
from dataclasses import dataclass
from typing import Any

import tyro

WIDTH = {"f32": 4, "s32": 4, "u32": 4, "pred": 1, "u8": 1, "s8": 1, "bf16": 2}  # bytes of a number


@dataclass(frozen=True)
class Args:
    """Flags of the benchmark."""

    devices: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64)
    """how many learn"""
    envs: int = 4
    """environments of each"""


def size(shape: str) -> int:
    """Bytes of an array, or of all that are in a tuple, as a compiled program writes its shape."""
    arrays = re.findall(r"([a-z]+\d*)\[([\d,]*)\]", shape)
    return sum(WIDTH[kind] * math.prod(int(n) for n in sides.split(",") if n) for kind, sides in arrays)


def main(args: Args) -> None:
    """Compile for each number of devices, print a table, write the results."""
    most = max(args.devices)
    os.environ["JAX_NUM_CPU_DEVICES"] = str(most)
    os.environ["JAX_PLATFORMS"] = "cpu"
    import jax
    import machine
    from aot import COLLECTIVES, computations, executed
    from programs import make, trace_update

    from cleanba.config import Placement
    from cleanba.recipes import RECIPES
    from cleanba.runtime.devices import find_devices
    from cleanba.runtime.process_setup import make_deterministic

    make_deterministic()
    rows: list[dict[str, Any]] = []
    fields = dict(network="nature", hiddens=(512,), num_steps=16, update_epochs=1, num_minibatches=2)
    for d in args.devices:
        devices = find_devices(Placement((0,), tuple(range(d))))
        sizes = dict(num_envs=args.envs * d, num_actors=d)
        program = make(RECIPES["ppo"], {**fields, **sizes}, d, "cpu")
        compiled = trace_update(program, devices).lower().compile()
        parameters = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(program.state.params))
        received = 0.0
        for instruction, times in executed(computations(compiled.as_text())):
            if instruction.opcode.removesuffix("-start") in COLLECTIVES:
                received += times * size(instruction.shape) * (d - 1) / d
        memory = compiled.memory_analysis()
        row = {
            "devices": d,
            "received_mb": received / 1e6,
            "model_mb": 2 * 2 * parameters * (d - 1) / d / 1e6,
            "arguments_mb": memory.argument_size_in_bytes / 1e6,
            "temporary_mb": memory.temp_size_in_bytes / 1e6,
        }
        rows.append(row)
        print(
            f"{d:3d} devices: each receives {row['received_mb']:.1f} MB in two minibatches, by the model "
            f"{row['model_mb']:.1f}; holds {row['arguments_mb']:.1f} + {row['temporary_mb']:.1f} MB",
            flush=True,
        )
    path = machine.save("scaling", {"parameters_mb": parameters / 1e6, "rows": rows})
    print(f"written: benchmarks/results/{path.name}")


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
