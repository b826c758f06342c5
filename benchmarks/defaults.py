"""What do an algorithm's default numbers of shards and actors cost on this machine, compared with one of each?

Trains an experiment in turns with `--num-shards` and `--num-actors` left out and with one of each, on one device, and
compares the time of the whole run per environment step.  The first updates, which include compilation, do not count.
Writes results/defaults_<platform>_<algorithm>_<environment>_<network>.json.

    python benchmarks/defaults.py --experiment "ppo --env-id Breakout-v5 --network nature --num-steps 32"
"""

import os
import time
from dataclasses import dataclass, replace

import machine
import tyro

from cleanba.launch import Job, prepare
from cleanba.recipes import RECIPES
from cleanba.runtime.metrics import Display, Status
from cleanba.runtime.process_setup import make_deterministic
from cleanba.runtime.train import run_training
from cleanba.train_flags import parse

ONE = "--num-shards 1 --num-actors 1"
UNCOUNTED = 2  # updates: the first ones compile


@dataclass(frozen=True)
class Args:
    """Flags of the benchmark."""

    experiment: str = "ppo --env-id Breakout-v5 --network nature --num-steps 32"
    """the command's words without shards and actors"""
    updates: int = 4
    """updates that are timed in a run"""
    rounds: int = 5
    """rounds; ratios are medians over them"""


def job(args: Args, split: str) -> Job:
    """The run that the flags ask for, on one device."""
    name, *words = args.experiment.split()
    recipe = RECIPES[name]
    found = prepare(recipe, parse(recipe, [*words, *split.split()]))
    e = found.experiment
    e = replace(e, total_timesteps=(UNCOUNTED + args.updates + 1) * e.transitions_per_update)
    return found._replace(resolved=found.resolved._replace(experiment=e))


def seconds_per_step(job: Job, uncounted: int = UNCOUNTED) -> tuple[float, float]:
    """Wall time and processor time per step of one run, after its first `uncounted` updates.

    The last update does not count either: no rollout is collected during it.
    """
    e = job.experiment
    last_counted = e.num_updates - 1
    marks: dict[int, tuple[float, float]] = {}

    def mark(update: int, steps: int, params: object) -> None:
        if update in (uncounted, last_counted):
            marks[update] = time.perf_counter(), time.process_time()

    status = Status("", 1)
    outcome = run_training(
        replace(job.training, after_update=mark), Display(status, enabled=False), status, lambda *row: None
    )
    if outcome.error is not None:
        raise outcome.error
    steps = (last_counted - uncounted) * e.transitions_per_update
    wall, cpu = ((last - first) / steps for first, last in zip(marks[uncounted], marks[last_counted], strict=True))
    return wall, cpu


def main(args: Args) -> None:
    """Measure, print the ratio, write the results."""
    make_deterministic()
    load = os.getloadavg()[0]
    jobs = {"one shard, one actor": job(args, ONE), "default": job(args, "")}
    base, default = jobs
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in jobs}
    for turn in range(args.rounds):
        for name in (jobs, reversed(jobs))[turn % 2]:
            found[name].append(seconds_per_step(jobs[name]))
    values: dict[str, object] = {"load_before": round(load, 1), "updates": args.updates, "rounds": args.rounds}
    for name, samples in found.items():
        e = jobs[name].experiment
        speeds = machine.spread([1 / wall for wall, _ in samples])
        values[name] = {
            "num_shards": e.num_shards,
            "num_actors": e.num_actors,
            "steps_per_second": speeds,
            "cpu_seconds_per_step": machine.spread([cpu for _, cpu in samples]),
        }
        print(
            f"{name:21} {e.num_shards} shards, {e.num_actors} actors: {speeds['median']:,.0f} steps/s "
            f"({speeds['min']:,.0f} to {speeds['max']:,.0f})"
        )
    for i, what in enumerate(("time", "cpu_time")):
        pairs = zip(found[default], found[base], strict=True)
        values[f"{what}_over_one"] = ratio = machine.spread([d[i] / b[i] for d, b in pairs])
        print(f"{what.replace('_', ' ')} over one: {ratio['median']:.3f} ({ratio['min']:.3f} to {ratio['max']:.3f})")
    last = jobs[default]
    names = (last.devices.platform, last.recipe.name, last.experiment.env_id, last.experiment.network)
    path = machine.save(f"defaults_{'_'.join(names)}", values)
    print(f"written: benchmarks/results/{path.name}; the machine's load was {load:.0f} on {os.cpu_count()} cores")


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
