"""What does a checkpoint cost?  The same training with frequent checkpoints and with none, in turns.

The difference holds everything: copying, writing, fresh environments, and, for the scanned collector, compiling for
them.  Divided by the number of checkpoints it is scaled to the default frequency.

python benchmarks/checkpoints.py     # five minutes on two cores
"""

import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import machine
import numpy as np
import tyro

from cleanba.recipes import RECIPES
from cleanba.resolution import resolve
from cleanba.train_flags import parse


@dataclass(frozen=True)
class Args:
    """Flags of the benchmark."""

    rounds: int = 3
    """pairs of runs; figures are medians over them"""


SETTINGS = {
    "Breakout, Nature CNN, 32 x 32": (
        "ppo --env-id Breakout-v5 --network nature --num-envs 32 --num-steps 32 --total-timesteps 10240",
        3,
    ),
    "CartPole, MLP, 16 x 64": (
        "ppo --env-id CartPole-v1 --hiddens 64 64 --num-envs 16 --num-steps 64 --total-timesteps 409600",
        50,
    ),
}


def train(words: str, frequency: int, collector: str) -> dict[str, Any]:
    """The result of a run."""
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        flags = ["--env-epoch", str(frequency), "--collector", collector, "--run-dir", str(run)]
        command = [sys.executable, "-m", "cleanba", *words.split(), *flags]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        return json.loads((run / "result.json").read_text())


def default_frequency(words: str, collector: str) -> int:
    """How many updates lie between the checkpoints of such a run by default."""
    algorithm, *flags = words.split()
    recipe = RECIPES[algorithm]
    config = parse(recipe, [*flags, "--collector", collector])
    return resolve(recipe, config.typed, "cpu").experiment.env_epoch


def main(args: Args) -> None:
    """Measure, print a table, write the results."""
    results: dict[str, Any] = {}
    for name, (words, frequency) in SETTINGS.items():
        for collector in ("stepped", "scanned"):
            default = default_frequency(words, collector)
            extra, update = [], []
            for _ in range(args.rounds):
                without, frequent = train(words, 0, collector), train(words, frequency, collector)
                checkpoints = frequent["update"] // frequency
                # By the rate after the first update, so that starting and compiling the first time stay out of it.
                seconds = [r["global_step"] / r["sps"] for r in (without, frequent)]
                extra.append((seconds[1] - seconds[0]) / checkpoints)
                update.append(seconds[0] / without["update"])
            cost, one = float(np.median(extra)), float(np.median(update))
            results[f"{name}, {collector}"] = {
                "seconds_per_checkpoint": machine.spread(extra),
                "seconds_per_update": machine.spread(update),
                "default_frequency": default,
                "overhead_at_default_frequency": cost / (default * one),
            }
            print(
                f"{name}, {collector}: {cost:.2f} s per checkpoint ({min(extra):.2f} … {max(extra):.2f}), "
                f"{one:.3f} s per update: {cost / (default * one):.2%} at one in {default} updates",
                flush=True,
            )
    path = machine.save("checkpoints_cpu", {"results": results})
    print(f"written: benchmarks/results/{path.name}")


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
