"""How much faster is a run that acts while it learns than one that takes turns, on one device of this machine?

With concurrency the policy that acts is one version behind, which costs score at equal steps (docs/inside/policy-
lag.md).  What counts is the score after a given time, so a study needs both numbers: the steps that lag costs, and the
time that it saves, which is measured here.

    python benchmarks/concurrency.py                       # all tasks: 30 minutes on two cores
    python benchmarks/concurrency.py --tasks ppo_atari     # one of them; the others keep their results

Trains each experiment with and without `--concurrency`, in turns, on one device, and compares the time per environment
step.  Updates before the first gradient step, and those that compile, do not count.  Adds to
results/concurrency_<platform>.json.
"""

import os
from dataclasses import dataclass, replace

import jax
import machine
import tyro
from defaults import UNCOUNTED, seconds_per_step

from cleanba.launch import Job, prepare
from cleanba.recipes import RECIPES
from cleanba.runtime.process_setup import make_deterministic
from cleanba.train_flags import parse

REPLAY = "--learning-starts 1024 --buffer-size 20000"
TASKS = {  # name -> the command's words, and the environment steps that are timed in a run
    "ppo_atari": ("ppo --env-id Breakout-v5 --preset cleanrl-atari", 8_192),
    "ppo_minatar": ("ppo --env-id gymnax:Breakout-MinAtar", 131_072),
    "ppo_mujoco": ("ppo --env-id HalfCheetah-v5", 65_536),
    "ppo_classic": ("ppo --env-id CartPole-v1", 131_072),
    "impala_minatar": ("impala --env-id gymnax:Breakout-MinAtar", 131_072),
    "pqn_minatar": ("pqn --env-id gymnax:Breakout-MinAtar", 131_072),
    "dqn_atari": (f"dqn --env-id Pong-v5 {REPLAY}", 2_048),
    "dqn_minatar": (f"dqn --env-id gymnax:Breakout-MinAtar {REPLAY}", 8_192),
    "sac_mujoco": (f"sac --env-id HalfCheetah-v5 {REPLAY}", 4_096),
    "td3_mujoco": (f"td3 --env-id HalfCheetah-v5 {REPLAY}", 4_096),
}


@dataclass(frozen=True)
class Args:
    """Flags of the benchmark."""

    tasks: tuple[str, ...] = tuple(TASKS)
    """which tasks"""
    rounds: int = 5
    """pairs of runs of each; the ratio is the median over them"""
    share: float = 1.0
    """share of the steps to time; less than 1 for a quick look"""


def job(task: str, flag: str, share: float) -> tuple[Job, int]:
    """A run of this task on one device, and the update after which it is timed."""
    words, steps = TASKS[task]
    name, *flags = words.split()
    recipe = RECIPES[name]
    found = prepare(recipe, parse(recipe, [*flags, flag]))
    e = found.experiment
    uncounted = max(UNCOUNTED, e.first_to_learn + 1)
    updates = uncounted + max(2, int(share * steps / e.transitions_per_update)) + 1
    e = replace(e, total_timesteps=updates * e.transitions_per_update)
    return found._replace(resolved=found.resolved._replace(experiment=e)), uncounted


def measure(task: str, rounds: int, share: float) -> dict[str, object]:
    """Steps per second of both kinds of run, and how many times as fast the concurrent one is."""
    kinds = {"concurrent": "--concurrency", "in turns": "--no-concurrency"}
    jobs = {kind: job(task, flag, share) for kind, flag in kinds.items()}
    found: dict[str, list[float]] = {kind: [] for kind in kinds}
    for turn in range(rounds):
        for kind in (kinds, reversed(kinds))[turn % 2]:
            found[kind].append(seconds_per_step(*jobs[kind])[0])
    pairs = zip(found["in turns"], found["concurrent"], strict=True)
    return {
        "words": TASKS[task][0],
        **{kind: machine.spread([1 / seconds for seconds in samples]) for kind, samples in found.items()},
        "times_as_fast": machine.spread([apart / together for apart, together in pairs]),
    }


def main(args: Args) -> None:
    """Measure, print a line for each task, and add it to the results."""
    make_deterministic()
    name = f"concurrency_{jax.default_backend()}"
    for task in args.tasks:
        load = round(os.getloadavg()[0], 1)
        row = {**measure(task, args.rounds, args.share), "rounds": args.rounds, "load_before": load}
        row["processor"] = machine.describe().get("cpu", "")
        ratio = row["times_as_fast"]
        assert isinstance(ratio, dict)
        print(f"{task:15} {ratio['median']:.2f} times as fast ({ratio['min']:.2f} to {ratio['max']:.2f}), load {load}")
        path = machine.save(name, {"tasks": {**machine.saved(name).get("tasks", {}), task: row}})
    print(f"written: benchmarks/results/{path.name}, on {os.cpu_count()} cores")


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
