"""Times scanned against stepped collection, with the same policy, environments and seeds, rollout by rollout in turns.

python benchmarks/collectors.py            # results in benchmarks/results/
python benchmarks/collectors.py --quick    # under a minute, writes nothing
"""

import time
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import numpy as np
import tyro
from machine import save

from cleanba.algorithms import ppo
from cleanba.environments.backends import threads_per_actor
from cleanba.environments.envpool import Envs, env_spec
from cleanba.runtime.channels import Stop
from cleanba.runtime.collect import Collector, ScanCache, ScannedCollector, SteppedCollector, Times, make_steppers
from cleanba.seeds import action_numbers, env_seed


class Setting(NamedTuple):
    """One pair of collectors."""

    env_id: str
    network: str
    core: str
    hiddens: tuple[int, ...]
    lstm_size: int
    envs: int  # of one actor
    steps: int


@dataclass(frozen=True)
class Flags:
    """How much is measured."""

    rounds: int = 7
    """turns of each collector"""
    envs: tuple[int, ...] = (8, 64)
    """environments of the actor, for the small games"""
    steps: int = 128
    """steps of a rollout, for the small games"""
    atari_envs: int = 16
    """environments of the actor, for Atari"""
    atari_steps: int = 32
    """steps of a rollout, for Atari"""
    quick: bool = False
    """a small part of it, in less than a minute"""


def settings(flags: Flags) -> list[Setting]:
    small = [
        Setting(env_id, "mlp", core, (64, 64), 64, envs, flags.steps)
        for env_id in ("CartPole-v1", "Catch-v0")
        for core in ("none", "lstm")
        for envs in flags.envs
    ]
    atari = [
        Setting("Breakout-v5", "nature", core, (512,), 256, flags.atari_envs, flags.atari_steps)
        for core in ("none", "lstm")
    ]
    return small[:1] + small[-1:] if flags.quick else small + atari


def measure(s: Setting, rounds: int) -> dict[str, Any]:
    """Steps per second of both collectors, whose rollouts take turns."""
    e = ppo.PPO(
        env_id=s.env_id, network=s.network, core=s.core, hiddens=s.hiddens, lstm_size=s.lstm_size,  # type: ignore[arg-type]
        num_envs=s.envs, num_steps=s.steps,
    )  # fmt: skip
    spec, device = env_spec(e), jax.local_devices()[0]
    algorithm = ppo.make(e, spec, device.platform)
    params = jax.device_put(algorithm.actor_params(algorithm.init(jax.random.key(0))), device)
    collectors: dict[str, Collector] = {
        "stepped": SteppedCollector(
            algorithm, s.steps, device, Stop(), make_steppers(algorithm, s.steps, device.platform)
        ),
        "scanned": ScannedCollector(algorithm, s.steps, device, Stop(), ScanCache(algorithm, s.steps)),
    }
    seconds: dict[str, list[float]] = {name: [] for name in collectors}
    compile_seconds, executed = {}, {name: 0 for name in collectors}

    def collect(name: str, rollout: int) -> float:
        start = time.perf_counter()
        collected = collectors[name](params, action_numbers(1, 0, rollout), Times())
        jax.block_until_ready(collected.rollout)
        executed[name] += collected.steps
        return time.perf_counter() - start

    for name, collector in collectors.items():
        collector.restart(Envs(spec, [env_seed(1, i, 0, s.envs) for i in range(s.envs)], threads_per_actor(1)))
        compile_seconds[name] = collect(name, 0)
    for rollout in range(1, rounds + 1):
        for name in collectors:
            seconds[name].append(collect(name, rollout))
    for collector in collectors.values():
        collector.close()
    assert executed["stepped"] == executed["scanned"], f"the collectors executed {executed} steps"
    rate = {name: s.envs * s.steps / float(np.median(x)) for name, x in seconds.items()}
    return {
        **s._asdict(),
        "stepped_per_second": round(rate["stepped"]),
        "scanned_per_second": round(rate["scanned"]),
        # Median over rounds of the stepped rollout's time over that of the scanned one beside it.
        "speedup": round(float(np.median(np.divide(seconds["stepped"], seconds["scanned"]))), 2),
        "first_stepped_seconds": round(compile_seconds["stepped"], 1),  # compiling included
        "first_scanned_seconds": round(compile_seconds["scanned"], 1),
    }


def main(flags: Flags) -> None:
    rounds = 3 if flags.quick else flags.rounds
    print(f"{'environment':12} {'network':7} {'core':4} {'envs':>4} {'stepped/s':>10} {'scanned/s':>10} {'speedup':>7}")
    rows = []
    for setting in settings(flags):
        row = measure(setting, rounds)
        rows.append(row)
        print(
            f"{row['env_id']:12} {row['network']:7} {row['core']:4} {row['envs']:4} {row['stepped_per_second']:10,} "
            f"{row['scanned_per_second']:10,} {row['speedup']:7.2f}",
            flush=True,
        )
    if flags.quick:
        return
    save(f"collectors_{jax.default_backend()}", {"rounds": flags.rounds, "rows": rows})


if __name__ == "__main__":
    main(tyro.cli(Flags, description=__doc__))
