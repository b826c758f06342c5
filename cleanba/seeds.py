"""Randomness from identity: every seed and key is derived from what it is for, never from where or when it is used.

No key is carried from step to step, so none needs to be saved.
"""

import jax
import numpy as np

from cleanba.errors import UsageError

USES = {
    "init": 0,
    "act": 1,
    "update": 2,
    "evaluate": 3,
    "environment": 4,
}  # what a key is for -> the number to fold in


SEEDS = 2**30  # of environments in training
MAX_EVAL_ENVS = 16  # in an evaluation; more would mostly wait for those with the longest episodes


def env_seed(seed: int, env: int, epoch: int, num_envs: int) -> int:
    """The seed of environment `env` in its `epoch`: unique over all environments and epochs of an experiment.

    A Feistel permutation of the 30-bit integers, keyed by `np.random.SeedSequence((seed, 0xE9))`, applied to
    epoch * num_envs + env.  A hash could collide, and two environments would then play the same games.
    """
    n = epoch * num_envs + env
    if n >= SEEDS:
        raise UsageError(f"environment {env} of epoch {epoch} is beyond the 2^30 seeds; raise --env-epoch")
    left, right = n >> 15, n & 0x7FFF
    for key in np.random.SeedSequence((seed, 0xE9)).generate_state(6, np.uint32).tolist():
        mixed = ((right ^ key) * 0x9E3779B1 + (key >> 7)) & 0xFFFFFFFF
        left, right = right, left ^ (mixed >> 13 & 0x7FFF)
    return left << 15 | right


def eval_seed(seed: int, env: int, epoch: int, num_envs: int, again: int = 0) -> int:
    """The seed of an environment in an evaluation.  Training's seeds lie below 2^30, these do not.

    `epoch` is the number of the update, or 0 for `cleanba eval`.  If so many updates are evaluated that seeds are used
    up (2^26, with 16 environments), those of the first updates come again.

    again: how often the environments were made anew in this evaluation.
    """
    used_up = SEEDS // num_envs - 1
    return SEEDS + env_seed(seed + again * 2**31, env, epoch and 1 + (epoch - 1) % used_up, num_envs)


def init_key(seed: int) -> jax.Array:
    """The key of the learner's state before the first update."""
    return _key(seed, "init")


def action_numbers(seed: int, actor: int, rollout: int) -> np.ndarray:
    """The arguments of `action_key`, [3] int32, so that compiled code can derive the key.

    They stay on the host.  A key would be made on JAX's first device, where it would queue behind the learner's update.
    """
    return np.array([seed, actor, rollout], np.int32)


def action_key(seed: int | jax.Array, actor: int | jax.Array, rollout: int | jax.Array) -> jax.Array:
    """The key of an actor's rollout.  Each step folds in its number."""
    return jax.random.fold_in(jax.random.fold_in(_key(seed, "act"), actor), rollout)


def update_numbers(seed: int, update: int) -> np.ndarray:
    """The arguments of `update_key`, [2] int32.  The compiled update takes them, so it serves every seed."""
    return np.array([seed, update], np.int32)


def update_key(seed: int | jax.Array, update: int | jax.Array) -> jax.Array:
    """The key of an update.  Each use folds in numbers of its own."""
    return jax.random.fold_in(_key(seed, "update"), update)


def evaluation_key(seed: int, epoch: int) -> jax.Array:
    """The key of an evaluation.  Each step folds in its number."""
    return jax.random.fold_in(_key(seed, "evaluate"), epoch)


def environment_key(seed: int | jax.Array) -> jax.Array:
    """The key of a JAX environment, from its `env_seed`.  Each step folds in its number."""
    return _key(seed, "environment")


def _key(seed: int | jax.Array, use: str) -> jax.Array:
    return jax.random.fold_in(jax.random.key(seed, impl="threefry2x32"), USES[use])
