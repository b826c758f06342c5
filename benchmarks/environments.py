"""Times training on JAX's environments beside a plain loop in one `jit`, and on Gymnasium's beside `AsyncVectorEnv`.

python benchmarks/environments.py            # results in benchmarks/results/
python benchmarks/environments.py --quick    # under a minute, writes nothing

The plain loop is what PureJaxRL does (Lu et al. 2022): environments, policy, advantages and minibatches in one compiled
program, with nothing around it.  It has the same network, optimiser and sizes as our run.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro
from jax import lax
from machine import save

from cleanba.algorithms import ppo
from cleanba.config import Experiment, Placement
from cleanba.environments import jax_envs
from cleanba.environments.backends import env_spec, open_envs, threads_per_actor
from cleanba.networks import make_actor_critic
from cleanba.ops.returns import gae
from cleanba.recipes import RECIPES
from cleanba.resolution import fit, resolve
from cleanba.runtime.channels import Stop
from cleanba.runtime.collect import SteppedCollector, Times, make_steppers
from cleanba.runtime.devices import find_devices
from cleanba.runtime.metrics import Display, Status
from cleanba.runtime.process_setup import prepare_process
from cleanba.runtime.train import run_training
from cleanba.runtime.training import make_training
from cleanba.seeds import action_numbers, env_seed


@dataclass(frozen=True)
class Flags:
    """How much is measured."""

    native: tuple[str, ...] = ("gymnax:CartPole-v1", "gymnax:Breakout-MinAtar")
    """environments in JAX"""
    gymnasium: tuple[str, ...] = ("CartPole-v1", "Acrobot-v1")
    """Gymnasium's"""
    updates: int = 40
    """updates of each turn"""
    rounds: int = 5
    """turns of each"""
    envs: int = 64
    """environments"""
    quick: bool = False
    """a small part of it, in less than a minute"""


def plain_loop(e: ppo.PPO, updates: int) -> Callable[[jax.Array], Any]:
    """Train for so many updates, as one compiled function of a key."""
    spec = env_spec(e)
    network, functions = make_actor_critic(spec, e), jax_envs.functions(spec)
    optimiser = optax.chain(optax.clip_by_global_norm(e.max_grad_norm), optax.adam(e.learning_rate, eps=1e-5))

    def loss(params: Any, batch: Any) -> jax.Array:
        obs, first, action, log_prob, advantage, target = batch
        out = network.outputs(params, jax.tree.map(lambda o: o[None], obs), first[None], ())
        new, entropy = out.policy.log_prob_and_entropy(action[None])
        ratio, advantage = jnp.exp(new[0] - log_prob), (advantage - advantage.mean()) / (advantage.std() + 1e-8)
        clipped = ratio.clip(1 - e.clip_coef, 1 + e.clip_coef)
        policy = -jnp.minimum(ratio * advantage, clipped * advantage).mean()
        return policy + e.vf_coef * 0.5 * ((out.value[0] - target) ** 2).mean() - e.ent_coef * entropy.mean()

    def update(carried: Any, key: jax.Array) -> Any:
        params, opt, block, obs, first = carried

        def act(state: Any, key: jax.Array) -> Any:
            block, obs, first = state
            action, _, extras = network.act(params, (), obs, first, key, True)
            block, out = functions.step(block, action)
            done = out.terminated | out.truncated
            seen = (obs, first, action, extras["log_prob"], out.reward, out.terminated, out.truncated)
            return (block, out.obs, done), seen

        act_key, *epoch_keys = jax.random.split(key, 1 + e.update_epochs)
        (block, obs, first), seen = lax.scan(act, (block, obs, first), jax.random.split(act_key, e.num_steps))
        seen_obs, firsts, action, log_prob, reward, terminated, truncated = seen
        value = network.outputs(params, seen_obs, firsts, ()).value
        last = network.outputs(params, jax.tree.map(lambda o: o[None], obs), first[None], ()).value
        advantage = gae(jnp.concatenate([value, last]), reward, terminated, truncated, e.gamma, e.gae_lambda)
        batch = (seen_obs, firsts, action, log_prob, advantage, advantage + value)
        flat = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), batch)

        def epoch(carried: Any, key: jax.Array) -> Any:
            order = jax.random.permutation(key, e.num_envs * e.num_steps).reshape(e.num_minibatches, -1)

            def minibatch(carried: Any, index: jax.Array) -> Any:
                params, opt = carried
                gradient = jax.grad(loss)(params, jax.tree.map(lambda x: x[index], flat))
                step, opt = optimiser.update(gradient, opt)
                return (optax.apply_updates(params, step), opt), None

            return lax.scan(minibatch, carried, order)

        (params, opt), _ = lax.scan(epoch, (params, opt), jnp.stack(epoch_keys))
        return (params, opt, block, obs, first), reward.sum()

    def train(key: jax.Array) -> Any:
        params = network.initial_params(key)
        block, obs = functions.reset(jnp.arange(e.num_envs, dtype=jnp.int32))
        start = (params, optimiser.init(params), block, obs, jnp.ones(e.num_envs, bool))
        return lax.scan(update, start, jax.random.split(key, updates))[1]

    return jax.jit(train)


def cleanba_rate(e: ppo.PPO) -> np.ndarray:
    """Steps per second of one of our runs, by wall time and by processor time.  [2].

    The first updates do not count, nor does the last, during which no rollout is collected.
    """
    devices = find_devices(Placement())
    spec, recipe = env_spec(e), RECIPES["ppo"]
    partition = fit(recipe, e, Placement())
    rows: list[tuple[int, np.ndarray]] = []
    log = lambda update, global_step, seconds, values: rows.append((update, clocks()))
    training = make_training(recipe.make(e, spec, devices.platform), e, partition, devices, spec, log_frequency=4)
    status = Status("benchmark", 1)
    outcome = run_training(training, Display(status, enabled=False), status, log)
    if outcome.error is not None:
        raise outcome.error
    (first, start), (last, end) = rows[len(rows) // 4], rows[-2]
    return (last - first) * e.transitions_per_update / (end - start)


def clocks() -> np.ndarray:
    """Wall time and processor time of this process, in seconds: other work lengthens mainly the first.  [2]."""
    return np.array([time.perf_counter(), time.process_time()])


def training(env_id: str, flags: Flags) -> dict[str, Any]:
    """Our run and the plain loop, in turns."""
    fields: dict[str, Any] = {"env_id": env_id, "num_envs": flags.envs, "env_epoch": 0, "anneal_lr": False}
    fields |= {"collector": "scanned"}
    if "MinAtar" not in env_id:
        fields |= dict(num_steps=128, num_minibatches=4, hiddens=(64, 64), learning_rate=2.5e-4, clip_coef=0.1)
    e = resolve(RECIPES["ppo"], fields, "cpu").experiment
    e = replace(e, total_timesteps=flags.updates * e.transitions_per_update)
    loop = plain_loop(e, flags.updates)
    jax.block_until_ready(loop(jax.random.key(0)))
    ours, plain = [], []
    for turn in range(flags.rounds):
        start = clocks()
        jax.block_until_ready(loop(jax.random.key(turn)))
        plain.append(e.total_timesteps / (clocks() - start))
        ours.append(cleanba_rate(e))
    row: dict[str, Any] = {"env_id": env_id}
    for i, what in enumerate(("steps_per_second", "steps_per_processor_second")):
        a, b = np.array(ours)[:, i], np.array(plain)[:, i]
        row[what] = {"cleanba": round(np.median(a)), "plain_loop": round(np.median(b))}
        row[what] |= {"ratio": round(float(np.median(a / b)), 2), "ratios": (a / b).round(2).tolist()}
    return row


def collecting(name: str, theirs: gymnasium.vector.VectorEnv, flags: Flags, steps: int = 64) -> dict[str, Any]:
    """Rollouts with a policy, beside `AsyncVectorEnv` stepped with random actions, in turns."""
    e = ppo.PPO(env_id=f"gymnasium:{name}", num_envs=flags.envs, num_steps=steps, hiddens=(64, 64))
    spec, device = env_spec(e), jax.local_devices()[0]
    algorithm = ppo.make(e, spec, device.platform)
    params = jax.device_put(algorithm.actor_params(algorithm.init(jax.random.key(0))), device)
    collector = SteppedCollector(algorithm, steps, device, Stop(), make_steppers(algorithm, steps, device.platform))
    collector.restart(open_envs(spec, [env_seed(1, i, 0, e.num_envs) for i in range(e.num_envs)], threads_per_actor(1)))
    collector(params, action_numbers(1, 0, 0), Times())
    theirs.reset(seed=1)
    actions = [theirs.action_space.sample() for _ in range(steps)]
    rates: dict[str, list[float]] = {"cleanba": [], "async_vector_env": []}
    for turn in range(flags.rounds):
        start = time.perf_counter()
        collector(params, action_numbers(1, 0, 1 + turn), Times())
        between = time.perf_counter()
        for action in actions:
            theirs.step(action)
        rates["cleanba"].append(steps * e.num_envs / (between - start))
        rates["async_vector_env"].append(steps * e.num_envs / (time.perf_counter() - between))
    collector.close()
    theirs.close()
    ratios = np.divide(rates["cleanba"], rates["async_vector_env"])
    medians = {label: round(np.median(values)) for label, values in rates.items()}
    return {"env_id": name, **medians, "ratio": round(float(np.median(ratios)), 2), "ratios": ratios.round(2).tolist()}


def main(flags: Flags) -> None:
    prepare_process(Experiment())
    if flags.quick:
        flags = Flags(flags.native[:1], flags.gymnasium[:1], updates=12, rounds=2, envs=16)
    rows: dict[str, list[Any]] = {"collecting": [], "training": []}
    # These fork, which is only safe before JAX has threads.
    vectors = {name: gymnasium.make_vec(name, flags.envs, vectorization_mode="async") for name in flags.gymnasium}
    for name, theirs in vectors.items():
        rows["collecting"].append(collecting(name, theirs, flags))
        print("collecting", rows["collecting"][-1], flush=True)
    for name in flags.native:
        rows["training"].append(training(name, flags))
        print("training", rows["training"][-1], flush=True)
    if not flags.quick:
        sizes = {"updates": flags.updates, "rounds": flags.rounds, "envs": flags.envs}
        save(f"environments_{jax.default_backend()}", {**sizes, **rows})


if __name__ == "__main__":
    main(tyro.cli(Flags, description=__doc__))
