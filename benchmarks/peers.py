"""How fast is training, compared with the same training as a plain PyTorch loop with CleanRL's settings?

    python benchmarks/peers.py            # needs PyTorch in the same Python; results in benchmarks/results/

Both take turns, a few updates each, in one process, so other work on the machine slows both; the result is the median
of the ratios of neighbouring turns.  Beside seconds it gives the processor time of a step, as on a shared machine the
time that a thread waits for a core says little about the program.
"""

import os
import resource
import time
from dataclasses import dataclass
from typing import Any

import machine
import torch_ppo
import tyro
from throughput import Parts

from cleanba.config import Placement
from cleanba.recipes import RECIPES
from cleanba.runtime.process_setup import prepare_process


@dataclass(frozen=True)
class Args:
    """Flags of the benchmark."""

    parts: tuple[str, ...] = ("breakout", "halfcheetah")
    """of breakout (PPO, Nature CNN, 32 x 64) and halfcheetah (PPO, our defaults beside one environment x 2,048)"""
    rounds: int = 5
    """turns of each"""
    updates: int = 3
    """of ours in a turn, beside one to start; PyTorch makes one less"""


OURS: dict[str, dict[str, Any]] = {
    "breakout": dict(
        env_id="Breakout-v5", network="nature", hiddens=(512,), num_envs=32, num_steps=64, collector="scanned"
    ),
    "halfcheetah": dict(env_id="HalfCheetah-v5", collector="stepped"),
}
THEIRS = {"breakout": torch_ppo.BREAKOUT, "halfcheetah": torch_ppo.HALFCHEETAH}


def processor_seconds() -> float:
    """What all threads of this process have used so far."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def ours(parts: Parts, updates: int) -> dict[str, float]:
    """A whole run of so many updates after the first, and steps per second as it reports them."""
    result = parts.whole(updates, 1.0)
    return {"steps_per_second": result["sps"], "first_ratio_deviation": result["losses/first_ratio_deviation"]}


def theirs(training: torch_ppo.TorchPPO, updates: int) -> float:
    """Steps per second over so many updates."""
    with machine.as_a_script():
        return updates * training.s.num_envs * training.s.num_steps / training.updates(updates)


def measure(name: str, args: Args) -> dict[str, Any]:
    """Both, in turns."""
    e = OURS[name]
    parts = Parts(RECIPES["ppo"], e, Placement())
    parts.learn()
    with machine.as_a_script():
        training = torch_ppo.TorchPPO(THEIRS[name])
        training.updates(1)
    steps: dict[str, list[float]] = {"ours": [], "PyTorch": []}
    for _ in range(args.rounds):
        steps["ours"].append(ours(parts, args.updates)["steps_per_second"])
        steps["PyTorch"].append(theirs(training, args.updates - 1))
    learning = {"ours": learning_cost(parts), "PyTorch": learning_cost_of_peer(training)}
    parts.close()
    ratios = [a / b for a, b in zip(steps["ours"], steps["PyTorch"], strict=True)]
    return {
        "steps_per_second": {who: machine.spread(samples) for who, samples in steps.items()},
        "ratio": machine.spread(ratios),
        "learning_processor_seconds_per_step": learning,
        "ratio_of_learning_processor_seconds": learning["PyTorch"] / learning["ours"],
    }


def learning_cost(parts: Parts) -> float:
    """Processor seconds per step that one update takes, the least of three."""
    e, costs = parts.experiment, []
    for _ in range(3):
        before = processor_seconds()
        parts.learn()
        costs.append(processor_seconds() - before)
    return min(costs) / e.transitions_per_update


def learning_cost_of_peer(training: torch_ppo.TorchPPO) -> float:
    """The same of PyTorch's."""
    rollout, costs = training.rollout(), []
    for _ in range(3):
        before = processor_seconds()
        with machine.as_a_script():
            training.learn(dict(rollout))
        costs.append(processor_seconds() - before)
    return min(costs) / (training.s.num_envs * training.s.num_steps)


def main(args: Args) -> None:
    """Measure, print, write."""
    machine.start_pytorch()
    prepare_process(OURS["breakout"])
    found: dict[str, Any] = {}
    load, start = [os.getloadavg()[0]], time.perf_counter()
    for name in args.parts:
        found[name] = measure(name, args)
        speed, ratio = found[name]["steps_per_second"], found[name]["ratio"]
        print(
            f"{name}: {speed['ours']['median']:,.0f} steps/s, PyTorch {speed['PyTorch']['median']:,.0f}: "
            f"{ratio['median']:.2f} ({ratio['min']:.2f} … {ratio['max']:.2f}) times as many; learning takes PyTorch "
            f"{found[name]['ratio_of_learning_processor_seconds']:.2f} times the processor's time",
            flush=True,
        )
    load.append(os.getloadavg()[0])
    path = machine.save("peers_cpu", {"load_average": load, "seconds": time.perf_counter() - start, "parts": found})
    print(f"written: benchmarks/results/{path.name}")


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
