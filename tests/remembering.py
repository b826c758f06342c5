"""An algorithm that does nothing but use a memory, and a process that trains with it.

    python remembering.py WORDS

is `cleanba ppo WORDS`, with this algorithm in PPO's place.
"""

import sys
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from cleanba import cli, recipes
from cleanba.algorithm import Algorithm
from cleanba.algorithms import ppo
from cleanba.ops import replay

GAMMA, N_STEP = 0.9, 3


@dataclass(frozen=True)
class Remembering(ppo.PPO):
    """PPO's experiment, and a memory."""

    buffer_size: int = 2048
    """steps that the memory holds"""
    batch_size: int = 64
    """transitions drawn at each update, over all shards"""


class Memory(NamedTuple):
    """One shard's memory."""

    ring: replay.Ring
    returns: jax.Array  # [B]  the discounted return under way
    rollouts: jax.Array  # int32: rollouts that were seen


def make(e: Remembering, spec: Any, platform: str) -> Algorithm:
    """A policy with one parameter vector: what is sampled from memory changes it, and it decides the actions' odds."""

    def init(key):
        return {"sum": jax.random.normal(key, (7,)), "updates": jnp.int32(0)}

    def init_memory(rollout):
        envs = rollout.reward.shape[1]
        return Memory(replay.init(rollout, e.buffer_size // e.num_shards), jnp.zeros(envs), jnp.int32(0))

    def act(params, carry, obs, first, key, explore):
        flat = obs.reshape(len(first), -1).astype(jnp.float32)
        logits = jnp.stack([jnp.sin(flat.sum(1) * (i + 1) + params.sum()) for i in range(spec.num_actions)], -1)
        return jax.random.categorical(key, logits).astype(jnp.int32), carry, {}

    def remember(memory: Memory, rollout) -> Memory:
        def step(total, inputs):
            reward, over = inputs
            total = reward + GAMMA * total
            return jnp.where(over, 0.0, total), None

        over = rollout.terminated | rollout.truncated
        returns = jax.vmap(lambda total, r, o: jax.lax.scan(step, total, (r, o))[0])(
            memory.returns, rollout.reward, over
        )
        return Memory(replay.write(memory.ring, rollout), returns, memory.rollouts + 1)

    def update(state, memory, rollout, shards, key):
        memory = remember(memory, rollout)
        keys = jax.vmap(lambda shard: jax.random.fold_in(key, shard))(shards.index)

        def load(i):
            drawn = replay.sample_indices(memory.ring, i, keys[i], e.batch_size // e.num_shards, N_STEP)
            return replay.take(memory.ring, i, drawn, N_STEP), memory.returns[i]

        def of_shard(window, returns):
            t = replay.n_step(window, GAMMA)
            flat = lambda x: x.reshape(len(x), -1).astype(jnp.float32)
            seen = jnp.concatenate(
                [
                    jnp.stack([t.weight.sum(), t.reward.sum(), t.discount.sum(), (t.weight * t.action).sum()]),
                    jnp.stack([(t.weight[:, None] * flat(x)).mean() for x in (t.obs, t.next_obs)]),
                    returns.mean()[None],
                ]
            )
            return seen

        seen = shards.sum(shards.map_from(load, of_shard))
        new = {"sum": 0.9 * state["sum"] + jnp.sin(seen), "updates": state["updates"] + 1}
        return new, memory, {"losses/seen": seen.sum(), "losses/sampled": seen[0]}

    inspect = lambda params, carry, obs, first: {"value": jnp.zeros(first.shape)}
    return Algorithm(init, init_memory, lambda batch, first_env=0: (), act, update, lambda state: state["sum"], inspect)


def check(e: Remembering, partition: Any) -> None:
    """Everything fits."""


def install() -> None:
    """Put this algorithm in PPO's place."""
    recipes.RECIPES["ppo"] = recipes.Recipe("ppo", "remember", Remembering, check, make)


if __name__ == "__main__":
    install()
    cli.main(sys.argv[1:])
