"""Trains one experiment on several placements, and compares learning curves, digests and times.

Every placement runs in a process of its own, with eight CPU devices (or the accelerators of the machine).  Draws
static/placements.png and .svg, and fails if any digest differs.
"""

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import machine
import matplotlib
import tyro

matplotlib.use("Agg")
import matplotlib.pyplot as plt

STATIC = Path(__file__).parents[1] / "static"
EXPERIMENT = (
    "ppo --env-id CartPole-v1 --total-timesteps 200000 --num-envs 24 --num-actors 2 --num-shards 6 --num-steps 32 "
    "--hiddens 64 64 --learning-rate 1e-3 --num-minibatches 4 --clip-coef 0.2 --log-frequency 4"
)


@dataclass(frozen=True)
class Args:
    """Flags of the benchmark."""

    experiment: str = EXPERIMENT
    """the command's words without the placement"""
    placements: tuple[str, ...] = ("a0-l0", "a0-l1,2,3", "a0,1-l2,3,4,5,6,7")
    """placements, written as Cleanba writes them"""


def flags(placement: str) -> list[str]:
    """The flags of "a0-l1,2"."""
    actors, learners = placement.split("-")
    return ["--actor-device-ids", *actors[1:].split(","), "--learner-device-ids", *learners[1:].split(",")]


def main(args: Args) -> None:
    """Train, compare, draw."""
    rows, results = {}, {}
    environment = {"JAX_NUM_CPU_DEVICES": "8", **os.environ}
    with tempfile.TemporaryDirectory() as folder:
        for placement in args.placements:
            run = Path(folder) / placement
            command = [sys.executable, "-m", "cleanba", *args.experiment.split(), "--run-dir", str(run)]
            subprocess.run([*command, *flags(placement)], env=environment, check=True, stdout=subprocess.DEVNULL)
            rows[placement] = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
            results[placement] = json.loads((run / "result.json").read_text())
            r = results[placement]
            print(f"{placement:20} {r['seconds']:6.1f} s  return {r['episodic_return']:.4g}  {r['params_digest']}")

    figure, (curves, times) = plt.subplots(1, 2, figsize=(9, 3.2), width_ratios=(2, 1), constrained_layout=True)
    styles = (("0.75", "-", 7.0), ("0.35", "-", 3.5), ("black", ":", 1.4))
    for (placement, log), (color, line, width) in zip(rows.items(), styles * 9, strict=False):
        points = [(r["global_step"] / 1000, r["charts/episodic_return"]) for r in log if "charts/episodic_return" in r]
        curves.plot(*zip(*points, strict=True), color=color, linestyle=line, linewidth=width, label=placement)
    curves.set(
        xlabel="environment steps, thousands",
        ylabel="return, mean of 100 episodes",
        title="the same bits on each placement",
    )
    curves.legend(frameon=False)
    names = list(results)
    times.barh(names, [results[n]["seconds"] for n in names], color=[s[0] for s in (styles * 9)[: len(names)]])
    times.invert_yaxis()
    cores = f"{os.cpu_count()} CPU cores"
    times.set(xlabel="seconds, with compilation", title=f"on {cores}")
    STATIC.mkdir(exist_ok=True)
    for suffix in ("png", "svg"):
        figure.savefig(STATIC / f"placements.{suffix}", dpi=150)

    digests = {r["params_digest"] for r in results.values()}
    path = machine.save("placements", {"experiment": args.experiment, "results": results, "equal": len(digests) == 1})
    print(f"{'all digests are equal' if len(digests) == 1 else 'DIGESTS DIFFER'}; benchmarks/results/{path.name}")
    sys.exit(len(digests) != 1)


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
