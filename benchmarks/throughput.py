"""How fast is the whole, and how fast are its parts alone?

Environment steps per second of EnvPool alone (random actions), of inference alone (the policy on fixed observations),
of learning alone (updates on one fixed rollout) and of the whole, in turns within one run, with the parts placed as in
the whole: the same actor threads, batch sizes and devices.
"""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
import machine
import numpy as np
import tyro

from cleanba.config import Partition, Placement, resolve
from cleanba.environments.envpool import Envs, env_spec, threads_per_actor
from cleanba.recipes import RECIPES
from cleanba.runtime.channels import Stop
from cleanba.runtime.collect import SteppedCollector, Times, make_steppers
from cleanba.runtime.learner import Learner
from cleanba.runtime.metrics import Display, Status
from cleanba.runtime.placement import find_devices
from cleanba.runtime.train import abstract_block, make_training, run_training
from cleanba.seeds import action_numbers, env_seed


@dataclass(frozen=True)
class Args:
    """Flags of the benchmark."""

    algorithm: Literal["ppo", "impala"] = "ppo"
    """what learns"""
    env_id: str = "Breakout-v5"
    """EnvPool environment"""
    network: Literal["auto", "nature", "impala", "mlp"] = "nature"
    """torso"""
    hiddens: tuple[int, ...] = (256,)
    """units of the dense layers"""
    num_envs: int = 32
    """environments"""
    num_steps: int = 32
    """steps per rollout"""
    num_minibatches: int = 4
    """minibatches"""
    num_shards: int | None = None
    """shards (default: one per learner device)"""
    collector: Literal["stepped", "scanned"] = "stepped"
    """how the whole collects"""
    actor_device_ids: tuple[int, ...] = (0,)
    """devices that act"""
    learner_device_ids: tuple[int, ...] = (0,)
    """devices that learn"""
    seconds: float = 5.0
    """measure each part for about so long in each round"""
    rounds: int = 3
    """rounds; figures are medians over them"""


def steps_per_second(step: Callable[[int], Any], threads: int, steps: int, seconds: float) -> float:
    """`threads` threads call step(thread), each time `steps` environment steps, until `seconds` have passed."""
    counts = [0] * threads
    step_all = [threading.Thread(target=lambda i=i: work(i)) for i in range(threads)]
    start = time.perf_counter()

    def work(i: int) -> None:
        while time.perf_counter() - start < seconds:
            step(i)
            counts[i] += steps

    for t in step_all:
        t.start()
    for t in step_all:
        t.join()
    return sum(counts) / (time.perf_counter() - start)


def main(args: Args) -> None:
    """Measure, print a table, write the results."""
    recipe = RECIPES[args.algorithm]
    devices = find_devices(Placement(args.actor_device_ids, args.learner_device_ids))
    wanted = recipe.experiment(
        env_id=args.env_id, network=args.network, hiddens=args.hiddens, num_envs=args.num_envs,
        num_steps=args.num_steps, num_minibatches=args.num_minibatches, num_shards=args.num_shards,
        collector=args.collector,
    )  # fmt: skip
    e = resolve(wanted, len(devices.actors), len(devices.learners))
    partition = Partition(e.num_envs, e.num_actors, e.num_shards, 1, len(devices.learners))
    recipe.check(e, partition)
    spec = env_spec(e)
    algorithm = recipe.make(e, spec, devices.platform)
    actors, per_actor = range(e.num_actors), partition.envs_per_actor
    device_of = lambda a: devices.actors[a * len(devices.actors) // e.num_actors]
    seeds_of = lambda a: [env_seed(e.seed, i, 0, e.num_envs) for i in partition.actor_envs(a)]
    make_envs = lambda a: Envs(spec, seeds_of(a), threads_per_actor(e.num_actors))

    # EnvPool alone
    pools = [make_envs(a) for a in actors]
    observed = [pool.reset() for pool in pools]
    rng = np.random.default_rng(0)
    random_actions = rng.integers(0, spec.num_actions, (997, per_actor)).astype(np.int32)
    turn = [0] * len(pools)

    def env_step(a: int) -> None:
        turn[a] += 1
        pools[a].step(random_actions[turn[a] % len(random_actions)])

    # Inference alone: observations from the host, actions back to it
    learner = Learner(algorithm, partition, devices, e.seed)
    state = learner.init()
    params = learner.publish(learner.local(algorithm.actor_params(state)))
    act = jax.jit(algorithm.act, static_argnums=5)
    carry, first, key = algorithm.initial_carry(per_actor), jnp.zeros(per_actor, bool), jax.random.key(0)

    def infer(a: int) -> None:
        obs = jax.device_put(observed[a], device_of(a))
        np.asarray(act(params[device_of(a)], carry, obs, first, key, True)[0])

    # Learning alone, on one rollout of each actor
    learner.compile(state, (), abstract_block(algorithm, spec, e.num_steps, e.num_envs // partition.num_blocks))
    steppers = make_steppers(algorithm, e.num_steps)
    blocks: list[Any] = []
    for a in actors:
        collector = SteppedCollector(algorithm, steppers, e.num_steps, device_of(a), Stop())
        collector.restart(make_envs(a))
        blocks += learner.send(collector(params[device_of(a)], action_numbers(e.seed, a, 1), Times()).rollout, a)
        collector.close()
    holder = {"state": state}

    def learn(_: int) -> None:
        holder["state"], _, _ = learner.update(holder["state"], (), blocks, 1)
        jax.block_until_ready(holder["state"])

    def whole() -> float:
        updates = max(3, round(args.seconds * 2 / seconds_per_update) + 1)
        limited = recipe.experiment(**{**vars(e), "total_timesteps": updates * e.transitions_per_update})
        training = make_training(algorithm, limited, partition, devices, spec, log_frequency=updates)
        status = Status("", updates, updates * e.transitions_per_update)
        outcome = run_training(training, Display(status, enabled=False), status, lambda *_: None)
        if outcome.error is not None:
            raise outcome.error
        return float(outcome.result["sps"])

    learn(0)
    start = time.perf_counter()
    learn(0)
    seconds_per_update = time.perf_counter() - start
    for a in actors:
        infer(a)

    figures: dict[str, list[float]] = {"EnvPool alone": [], "inference alone": [], "learning alone": [], "whole": []}
    for _ in range(args.rounds):
        figures["EnvPool alone"].append(steps_per_second(env_step, len(pools), per_actor, args.seconds))
        figures["inference alone"].append(steps_per_second(infer, len(pools), per_actor, args.seconds))
        figures["learning alone"].append(steps_per_second(learn, 1, e.transitions_per_update, args.seconds))
        figures["whole"].append(whole())
    for pool in pools:
        pool.close()

    whole_sps = float(np.median(figures["whole"]))
    print(f"{args.algorithm} on {args.env_id}, {spec_words(e)}")
    for name, samples in figures.items():
        ratio = f"   whole / {name}: {whole_sps / np.median(samples):.2f}" if name != "whole" else ""
        print(f"{name:16} {np.median(samples):10,.0f} steps/s  ({min(samples):,.0f} … {max(samples):,.0f}){ratio}")
    path = machine.save(
        f"throughput_{devices.platform}_{args.algorithm}_{args.env_id}_{args.network}_{args.collector}",
        {
            "experiment": spec_words(e),
            "steps_per_second": {name: machine.spread(samples) for name, samples in figures.items()},
            "whole_over_part": {n: whole_sps / float(np.median(s)) for n, s in figures.items() if n != "whole"},
        },
    )
    print(f"written: benchmarks/results/{path.name}")


def spec_words(e: Any) -> str:
    """The experiment in a few words."""
    return (
        f"{e.network} network, {e.num_envs} environments x {e.num_steps} steps, {e.num_actors} actors, "
        f"{e.num_shards} shards, {e.num_minibatches} minibatches, {e.collector}"
    )


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
