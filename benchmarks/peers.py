"""How fast is training, compared with the same training as a plain PyTorch loop with CleanRL's settings?

    python benchmarks/peers.py            # needs PyTorch in the same Python; results in benchmarks/results/
    python benchmarks/peers.py --parts pqn pqn-lstm --result peers_pqn_cpu

Both take turns, a few updates each, in one process, so other work on the machine slows both; the result is the median
of the ratios of neighbouring turns.  Besides seconds it gives the processor time of a step: on a shared machine, the
time that a thread waits for a core says little about the program.
"""

import os
import resource
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import machine
import torch_ppo
import torch_pqn
import tyro
from throughput import Parts
from torch_ppo import TorchPPO
from torch_pqn import TorchPQN

from cleanba.algorithms import pqn
from cleanba.config import Placement
from cleanba.recipes import RECIPES
from cleanba.runtime.process_setup import prepare_process


@dataclass(frozen=True)
class Args:
    """Flags of the benchmark."""

    parts: tuple[str, ...] = ("breakout", "halfcheetah")
    """of breakout (PPO, Nature CNN, 32 x 64), breakout-last (the same, PyTorch with channels last), halfcheetah (PPO,
    our defaults with 16 environments beside one environment x 2,048), pqn and pqn-lstm (PQN on Breakout, Nature CNN
    with layer normalisation, 8 x 128)"""
    rounds: int = 5
    """turns of each"""
    updates: int = 3
    """our timed updates in a turn, besides one before and one after them; PyTorch makes one fewer"""
    result: str = "peers_cpu"
    """name of the file in benchmarks/results/"""


BREAKOUT = dict(env_id="Breakout-v5", network="nature", hiddens=(512,), num_envs=32, num_steps=64, collector="scanned")
PQN = {"algorithm": "pqn", "env_id": "Breakout-v5", "collector": "scanned"}
OURS: dict[str, dict[str, Any]] = {
    "breakout": BREAKOUT,
    "breakout-last": BREAKOUT,
    "halfcheetah": dict(env_id="HalfCheetah-v5", collector="stepped"),
    "pqn": pqn.PROTOCOLS["cleanrl-atari"] | PQN,
    "pqn-lstm": pqn.PROTOCOLS["cleanrl-atari-lstm"] | PQN,
}
THEIRS: dict[str, Callable[[], TorchPPO | TorchPQN]] = {
    "breakout": lambda: TorchPPO(torch_ppo.BREAKOUT),
    "breakout-last": lambda: TorchPPO(replace(torch_ppo.BREAKOUT, channels_last=True)),
    "halfcheetah": lambda: TorchPPO(torch_ppo.HALFCHEETAH),
    "pqn": lambda: TorchPQN(torch_pqn.BREAKOUT),
    "pqn-lstm": lambda: TorchPQN(torch_pqn.BREAKOUT_LSTM),
}


def processor_seconds() -> float:
    """Processor time of all threads of this process so far."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def ours(parts: Parts, updates: int) -> float:
    """Steps per second over `updates` updates of a whole run."""
    return parts.whole(updates, 1.0)["sps"]


def theirs(training: TorchPPO | TorchPQN, updates: int) -> float:
    """Steps per second over `updates` updates."""
    with machine.as_a_script():
        return updates * training.s.num_envs * training.s.num_steps / training.updates(updates)


def measure(name: str, args: Args) -> dict[str, Any]:
    """Both, in turns."""
    fields = dict(OURS[name])
    parts = Parts(RECIPES[fields.pop("algorithm", "ppo")], fields, Placement())
    parts.learn()
    with machine.as_a_script():
        training = THEIRS[name]()
        training.updates(1)
    steps: dict[str, list[float]] = {"ours": [], "PyTorch": []}
    for _ in range(args.rounds):
        steps["ours"].append(ours(parts, args.updates))
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


def learning_cost_of_peer(training: TorchPPO | TorchPQN) -> float:
    """The same for PyTorch."""
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
    prepare_process(RECIPES["ppo"].experiment())
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
    path = machine.save(args.result, {"load_average": load, "seconds": time.perf_counter() - start, "parts": found})
    print(f"written: benchmarks/results/{path.name}")


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
