"""How fast is training, and how fast are its parts alone?

Measures environment steps per second of EnvPool alone (random actions), of inference alone (the policy on fixed
observations), of learning alone (updates on one fixed rollout) and of training, in turns within one run.  The parts
have the same actor threads, batch sizes and devices as in training.
"""

import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import jax
import jax.numpy as jnp
import machine
import numpy as np
import tyro

from cleanba.config import Placement
from cleanba.environments.backends import threads_per_actor
from cleanba.environments.envpool import Envs
from cleanba.recipes import RECIPES, Recipe
from cleanba.resolution import fit, resolve
from cleanba.runtime.channels import Stop
from cleanba.runtime.collect import SteppedCollector, Times, make_steppers
from cleanba.runtime.devices import find_devices
from cleanba.runtime.learner import Learner, abstract_block
from cleanba.runtime.metrics import Display, Status
from cleanba.runtime.process_setup import prepare_process
from cleanba.runtime.train import run_training
from cleanba.runtime.training import make_training
from cleanba.seeds import action_numbers, env_seed
from cleanba.shards import network_options


@dataclass(frozen=True)
class Args:
    """Flags of the benchmark."""

    algorithm: Literal["ppo", "impala"] = "ppo"
    """what learns"""
    env_id: str = "Breakout-v5"
    """EnvPool environment"""
    network: Literal["nature", "impala", "mlp"] = "nature"
    """torso"""
    hiddens: tuple[int, ...] = (256,)
    """units of the dense layers"""
    num_envs: int = 32
    """environments"""
    num_steps: int = 32
    """steps per rollout"""
    num_minibatches: int = 4
    """minibatches"""
    num_actors: int | None = None
    """actors (default: the preset's)"""
    num_shards: int | None = None
    """shards (default: one per learner device)"""
    cpu_threads: int | None = None
    """XLA's threads on CPUs, as PJRT_NPROC (default: one for each core)"""
    collector: Literal["stepped", "scanned"] = "stepped"
    """how the whole training collects rollouts"""
    actor_device_ids: tuple[int, ...] = (0,)
    """devices that act"""
    learner_device_ids: tuple[int, ...] = (0,)
    """devices that learn"""
    seconds: float = 5.0
    """measure each part for about this long in each round"""
    rounds: int = 3
    """rounds; figures are medians over them"""


def steps_per_second(step: Callable[[int], Any], threads: int, steps: int, seconds: float) -> float:
    """`threads` threads call step(thread), `steps` environment steps each time, for `seconds` but once at least."""
    counts = [0] * threads
    step_all = [threading.Thread(target=lambda i=i: work(i)) for i in range(threads)]
    start = time.perf_counter()

    def work(i: int) -> None:
        step(i)
        counts[i] += steps
        while time.perf_counter() - start < seconds:
            step(i)
            counts[i] += steps

    for t in step_all:
        t.start()
    for t in step_all:
        t.join()
    return sum(counts) / (time.perf_counter() - start)


class Parts:
    """The parts of a training, placed and sized as in the whole, each of which can be run alone."""

    def __init__(self, recipe: Recipe, fields: dict[str, Any], placement: Placement):
        """Parts of an experiment with these fields; by default it has one shard for each learner device."""
        self.recipe = recipe
        self.devices = find_devices(placement)
        platform = self.devices.platform
        fields = {"num_shards": len(self.devices.learners), **fields}
        self.experiment, self.spec, *_ = resolve(recipe, fields, platform)
        e = self.experiment
        self.partition = fit(recipe, e, placement)
        self.algorithm = recipe.make(e, self.spec, self.devices.platform)
        self.actors = range(self.partition.num_actors)
        self.learner = Learner(self.algorithm, self.partition, self.devices, e.seed)
        self._pools: list[Envs] = []
        self._turn = [0] * len(self.actors)
        self._threads = threads_per_actor(len(self.actors), self.spec, platform)
        self.open_pools(self._threads)
        rng, per_actor = np.random.default_rng(0), self.partition.envs_per_actor
        if self.spec.action.kind == "quantities":
            self._random_actions = rng.uniform(-1, 1, (997, per_actor, *self.spec.action.shape))
        else:
            self._random_actions = rng.integers(0, self.spec.num_actions, (997, per_actor)).astype(np.int32)

        state = self.learner.init()
        self.params = self.learner.publish(self.learner.local(self.algorithm.actor_params(state)))
        options = network_options(self.devices.platform)
        self._act = jax.jit(self.algorithm.act, static_argnums=5, compiler_options=options)
        self._acting = {
            device: jax.device_put(
                (self.algorithm.initial_carry(per_actor), jnp.zeros(per_actor, bool), jax.random.key(0)), device
            )
            for device in self.devices.actors
        }
        block = abstract_block(self.algorithm, self.spec, e.num_steps, e.num_envs // self.partition.num_blocks)
        self._state, self._memory = state, self.learner.init_memory(block)
        self.learner.compile(state, self._memory, block)
        steppers = make_steppers(self.algorithm, e.num_steps, self.devices.platform)
        self.rollouts = []
        """one of each actor, on its device"""
        self.times = Times()
        """what collecting the last of them took"""
        self.blocks: list[Any] = []
        for a in self.actors:
            collector = SteppedCollector(self.algorithm, e.num_steps, self.device_of(a), Stop(), steppers)
            collector.restart(self.make_envs(a, self._threads))
            self.times = Times()
            self.rollouts.append(
                collector(self.params[self.device_of(a)], action_numbers(e.seed, a, 1), self.times).rollout
            )
            collector.close()

    def device_of(self, actor: int) -> jax.Device:
        """The device that an actor acts on."""
        return self.devices.actors[actor * len(self.devices.actors) // len(self.actors)]

    def make_envs(self, actor: int, threads: int) -> Envs:
        """An actor's environments."""
        e, envs = self.experiment, self.partition.actor_envs(actor)
        return Envs(self.spec, [env_seed(e.seed, i, 0, e.num_envs) for i in envs], threads)

    def open_pools(self, threads: int) -> None:
        """Environments for `env_step`, with so many threads for each actor."""
        self.close()
        self._pools = [self.make_envs(a, threads) for a in self.actors]
        self._observed = [pool.reset() for pool in self._pools]

    def close(self) -> None:
        """End the environments."""
        for pool in self._pools:
            pool.close()
        self._pools = []

    def env_step(self, actor: int) -> None:
        """One step of an actor's environments, with random actions."""
        self._turn[actor] += 1
        self._pools[actor].step(self._random_actions[self._turn[actor] % len(self._random_actions)])

    def infer(self, actor: int) -> None:
        """One step of an actor's policy: observations from the host, actions back to it."""
        device = self.device_of(actor)
        carry, first, key = self._acting[device]
        obs = jax.device_put(self._observed[actor], device)
        np.asarray(self._act(self.params[device], carry, obs, first, key, True)[0])

    def learn(self, _: int = 0) -> Any:
        """One update on one rollout of each actor, always the same.  Returns its metrics."""
        if not self.blocks:
            sent = [self.learner.send(jax.tree.map(jnp.copy, r), a) for a, r in enumerate(self.rollouts)]
            self.blocks = [block for blocks in sent for block in blocks]
        self._state, self._memory, metrics = self.learner.update(self._state, self._memory, self.blocks, 1)
        jax.block_until_ready(self._state)
        return metrics

    def whole(self, seconds: float, seconds_per_update: float) -> dict[str, Any]:
        """A training of about so many seconds: its last log point and its result in one dictionary.

        Its `sps` leaves out the first update, which compiles, and the last, during which no rollout is collected.
        """
        updates = max(2, round(seconds / seconds_per_update)) + 2
        e = replace(self.experiment, total_timesteps=updates * self.experiment.transitions_per_update)
        training = make_training(self.algorithm, e, self.partition, self.devices, self.spec, log_frequency=updates)
        marks: dict[int, tuple[float, int]] = {}

        def mark(update: int, steps: int, params: object) -> None:
            marks[update] = time.perf_counter(), steps

        status = Status("", updates)
        logged: dict[str, Any] = {}
        outcome = run_training(
            replace(training, after_update=mark),
            Display(status, enabled=False),
            status,
            lambda update, step, seconds, values: logged.update(values),
        )
        if outcome.error is not None:
            raise outcome.error
        (start, before), (end, after) = marks[1], marks[updates - 1]
        return {**logged, **outcome.result, "sps": (after - before) / (end - start)}


def main(args: Args) -> None:
    """Measure, print a table, write the results."""
    recipe = RECIPES[args.algorithm]
    fields: dict[str, Any] = dict(
        env_id=args.env_id, network=args.network, hiddens=args.hiddens, num_envs=args.num_envs,
        num_steps=args.num_steps, num_minibatches=args.num_minibatches, collector=args.collector,
    )  # fmt: skip
    split = {"num_actors": args.num_actors, "num_shards": args.num_shards}
    fields |= {name: number for name, number in split.items() if number is not None}
    if args.cpu_threads is not None:
        os.environ["PJRT_NPROC"] = str(args.cpu_threads)
    prepare_process(recipe.experiment())
    parts = Parts(recipe, fields, Placement(args.actor_device_ids, args.learner_device_ids))
    e, per_actor = parts.experiment, parts.partition.envs_per_actor
    parts.learn()
    start = time.perf_counter()
    parts.learn()
    seconds_per_update = time.perf_counter() - start
    for a in parts.actors:
        parts.infer(a)

    figures: dict[str, list[float]] = {"EnvPool alone": [], "inference alone": [], "learning alone": [], "whole": []}
    n = len(parts.actors)
    for _ in range(args.rounds):
        figures["EnvPool alone"].append(steps_per_second(parts.env_step, n, per_actor, args.seconds))
        figures["inference alone"].append(steps_per_second(parts.infer, n, per_actor, args.seconds))
        figures["learning alone"].append(steps_per_second(parts.learn, 1, e.transitions_per_update, args.seconds))
        figures["whole"].append(float(parts.whole(args.seconds * 2, seconds_per_update)["sps"]))
    parts.close()

    whole_sps = float(np.median(figures["whole"]))
    print(f"{args.algorithm} on {args.env_id}, {spec_words(e)}")
    for name, samples in figures.items():
        ratio = f"   whole / {name}: {whole_sps / np.median(samples):.2f}" if name != "whole" else ""
        print(f"{name:16} {np.median(samples):10,.0f} steps/s  ({min(samples):,.0f} … {max(samples):,.0f}){ratio}")
    chosen = f"_{e.num_actors}_actors" if args.num_actors else ""
    path = machine.save(
        f"throughput_{parts.devices.platform}_{args.algorithm}_{args.env_id}_{args.network}_{args.collector}{chosen}",
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
