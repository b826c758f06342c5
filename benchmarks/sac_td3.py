"""How fast are SAC and TD3 compared with a plain PyTorch loop with the same settings?

Measures environment steps per second of the whole, with one gradient step per environment step.  Ours and
`plain_sac_td3.py` take turns, each time as a process of its own.  On a busy machine, steps per second of processor time
say more than those of wall time: both are given, with the load average.
"""

import json
import os
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import machine
import tyro

HERE = Path(__file__).parent


@dataclass(frozen=True)
class Args:
    """Flags of the benchmark."""

    env_id: str = "HalfCheetah-v5"
    """EnvPool environment"""
    algorithms: tuple[str, ...] = ("sac", "td3")
    """what learns"""
    steps: int = 2048
    """steps that are timed in each round"""
    warmup: int = 640
    """steps before them; the first 256 are random"""
    rounds: int = 3
    """rounds, in each of which everything has its turn"""
    torch_python: str = sys.executable
    """an interpreter that has PyTorch and EnvPool"""
    threads: int = len(os.sched_getaffinity(0))
    """PyTorch's threads"""
    result: str = "sac_td3_cpu"
    """name of the file in benchmarks/results/"""
    ours: str | None = None
    """time a training of this algorithm, print it, and end"""


def processor_seconds() -> float:
    """Processor time of all threads of this process."""
    used = os.times()
    return used.user + used.system


def time_ours(name: str, args: Args) -> dict[str, float]:
    """One training: its steps per second once it learns."""
    from cleanba.config import Placement
    from cleanba.recipes import RECIPES
    from cleanba.resolution import fit, resolve
    from cleanba.runtime.devices import find_devices
    from cleanba.runtime.metrics import Display, Status
    from cleanba.runtime.process_setup import prepare_process
    from cleanba.runtime.train import run_training
    from cleanba.runtime.training import make_training

    recipe = RECIPES[name]
    fields = dict(env_id=args.env_id, total_timesteps=args.warmup + args.steps, learning_starts=256, env_epoch=0)
    prepare_process(recipe.experiment(**fields))
    devices = find_devices(Placement())
    e, spec, *_ = resolve(recipe, fields, devices.platform)
    partition = fit(recipe, e, Placement())
    marks: list[tuple[int, float, float]] = []

    def log(update: int, step: int, seconds: float, values: dict[str, Any]) -> None:
        marks.append((update * e.transitions_per_update, time.perf_counter(), processor_seconds()))

    training = make_training(recipe.make(e, spec, devices.platform), e, partition, devices, spec, log_frequency=4)
    status = Status("", e.num_updates)
    outcome = run_training(training, Display(status, enabled=False), status, log)
    if outcome.error is not None:
        raise outcome.error
    # The time before the last mark includes compiling and computing the run's digests.
    first, last = next(mark for mark in marks if mark[0] >= args.warmup), marks[-2]
    steps, wall, cpu = (b - a for a, b in zip(first, last, strict=True))
    return {"steps_per_second": steps / wall, "steps_per_processor_second": steps / cpu}


def answer(words: list[str]) -> dict[str, float]:
    """The last line that a command prints, as JSON."""
    path = os.pathsep.join([str(HERE.parent), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(words, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": path})
    if done.returncode:
        sys.exit(done.stderr)
    return json.loads(done.stdout.splitlines()[-1])


def main(args: Args) -> None:
    """Measure, print a table, write the results."""
    if args.ours is not None:
        print(json.dumps(time_ours(args.ours, args)))
        return
    common = ["--steps", str(args.steps), "--warmup", str(args.warmup)]
    samples: dict[str, dict[str, list[dict[str, float]]]] = {
        name: {"ours": [], "plain PyTorch": []} for name in args.algorithms
    }
    loads = []
    for _ in range(args.rounds):
        for name in args.algorithms:
            loads.append(os.getloadavg()[0])
            ours = [sys.executable, __file__, "--ours", name, "--env-id", args.env_id, *common]
            samples[name]["ours"].append(answer(ours))
            plain = [args.torch_python, str(HERE / "plain_sac_td3.py"), name, args.env_id, *common]
            samples[name]["plain PyTorch"].append(answer([*plain, "--threads", str(args.threads)]))

    lines = ["| | ours | plain PyTorch | ratio |", "|---|---|---|---|"]
    found: dict[str, Any] = {}
    for name, sides in samples.items():
        for figure in ("steps_per_second", "steps_per_processor_second"):
            mine, plain = ([x[figure] for x in side] for side in sides.values())
            ratio = statistics.median(mine) / statistics.median(plain)
            found.setdefault(name, {})[figure] = {
                "ours": machine.spread(mine), "plain PyTorch": machine.spread(plain), "ratio": ratio
            }  # fmt: skip
            cells = [f"{statistics.median(x):.0f} ({min(x):.0f} … {max(x):.0f})" for x in (mine, plain)]
            lines.append(f"| {name}, {figure.replace('_', ' ')} | {' | '.join(cells)} | {ratio:.2f} |")
    print("\n".join(lines))
    path = machine.save(args.result, {"figures": found, "load_average": machine.spread(loads)})
    path.with_suffix(".md").write_text("\n".join(lines) + "\n")
    print(f"written: benchmarks/results/{path.name}")


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
