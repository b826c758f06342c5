"""What algorithms share that learn from replay: settings and their rules, schedules, the loop, targets."""

from collections.abc import Callable
from dataclasses import dataclass
from math import gcd
from typing import Annotated, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from cleanba.algorithm import Metrics
from cleanba.config import MOST, Count, Experiment, NotOffered, Partition, Range, Steps, require
from cleanba.errors import nearest, nearest_divisors
from cleanba.networks.layers import ConvKind
from cleanba.ops import replay
from cleanba.ops.losses import squared_error
from cleanba.rollout import PyTree, Rollout
from cleanba.shards import ShardAxis
from cleanba.specs import EnvSpec


@dataclass(frozen=True)
class OffPolicy(Experiment):
    """What an algorithm that learns from replay has besides."""

    anneal_lr: bool = False
    """decrease the learning rate linearly to 0 over the run"""

    buffer_size: Steps = 1_000_000
    """steps that the replay memory holds, over all shards"""
    learning_starts: Annotated[int, Range(0, MOST, unit="steps")] = 5_000
    """steps before the first gradient step"""
    batch_size: Count = 256
    """transitions in one gradient step, over all shards"""
    train_frequency: Steps = 1
    """environment steps for each gradient step, over all environments"""
    tau: Annotated[float, Range(0, 1, open_low=True)] = 0.005
    """how far each of its updates moves a target network towards the network (1: all the way)"""

    @property
    def gradient_steps(self) -> int:
        """Gradient steps per update, once learning has started."""
        return self.transitions_per_update // self.train_frequency

    @property
    def first_to_learn(self) -> int:
        """The number of the first update that learns, from 1 (or 0: they all do)."""
        return -(-self.learning_starts // self.transitions_per_update)

    def learns(self, update: jax.Array) -> jax.Array:
        """Whether the update of that number, from 1, learns; later ones do as well.  int32 -> bool."""
        return update >= self.first_to_learn

    def steps_of(self, update: jax.Array) -> jax.Array:
        """Gradient steps that the rollout of that update pays for: none before learning starts.  int32 -> int32."""
        return jnp.where(self.learns(update), self.gradient_steps, 0)


@dataclass(frozen=True)
class OffPolicyActorCritic(OffPolicy):
    """What an algorithm that learns a policy over real-valued actions from replay has besides."""

    # Atari's actions are choices.
    repeat_action_probability: NotOffered[float] = 0.25
    full_action_space: NotOffered[bool] = True
    episodic_life: NotOffered[bool] = False
    env_id: str = "HalfCheetah-v5"
    """EnvPool's environment of that name; gymnasium:Name-v0 or package:Name-v0 for Gymnasium's, gymnax:Name for one
    in JAX (`cleanba envs` lists them)"""
    total_timesteps: int = 1_000_000
    """environment steps in all"""
    learning_starts: int = 5_000
    """steps before the first gradient step; until then actions are drawn uniformly"""
    num_envs: int = 4
    """environments over the whole experiment"""
    num_steps: int = 8
    """steps per environment and rollout"""
    hiddens: tuple[int, ...] = (256, 256)
    """units of the dense layers after the convolutions, or of the MLP"""
    policy_frequency: Count = 2
    """gradient steps of the critics for each one of the policy"""


def check_replay(e: OffPolicy, partition: Partition, name: str, n_step: int = 1) -> None:
    """Raise `UsageError` for hyperparameters of the algorithm of that name that do not fit its memory, or its steps."""
    shards, steps = partition.num_shards, e.transitions_per_update
    for field in ("buffer_size", "batch_size"):
        value = getattr(e, field)
        fits = nearest(value, lambda n: n % shards == 0)
        require(
            value % shards == 0,
            f"{field}={value} cannot be split over {shards} shards; try --{field.replace('_', '-')} {fits}",
        )
    require(
        e.batch_size <= e.buffer_size,
        f"batch_size={e.batch_size} is more than the {e.buffer_size} steps that buffer_size holds; lower --batch-size "
        "or raise --buffer-size",
    )
    rows, needed = e.buffer_size // e.num_envs, max(e.num_steps, n_step) + 2
    require(
        rows >= needed,
        f"buffer_size={e.buffer_size} holds {rows} steps of an environment, but rollouts of {e.num_steps} and targets "
        f"of {n_step} need {needed}; try --buffer-size {needed * e.num_envs} or more",
    )
    fits = nearest_divisors(steps, e.train_frequency)
    longer = e.train_frequency // gcd(e.train_frequency, e.num_envs)
    require(
        steps % e.train_frequency == 0,
        f"train_frequency={e.train_frequency} does not divide an update's {steps} steps (num_envs={e.num_envs} x "
        f"num_steps={e.num_steps}); try --train-frequency {fits}, or --num-steps {longer} or a multiple of that",
    )
    require(
        e.first_to_learn <= e.num_updates,
        f"learning_starts={e.learning_starts} lies beyond the run's {e.num_updates * steps} steps, so nothing would be "
        f"learnt; try --learning-starts {e.num_updates * steps} or less, or --total-timesteps "
        f"{e.first_to_learn * steps} or "
        "more",
    )


def check_actor_critic(e: OffPolicyActorCritic, partition: Partition, name: str) -> None:
    """`check_replay`, and that the policy learns at all."""
    check_replay(e, partition, name)
    most = (e.num_updates - max(e.first_to_learn, 1) + 1) * e.gradient_steps
    require(
        e.policy_frequency <= most,
        f"policy_frequency={e.policy_frequency} is more than the run's {most} gradient steps, so the policy would "
        f"never learn; try --policy-frequency {most} or less",
    )


# -------------------------------------------------------------------------------------------------------------- steps

S = TypeVar("S")
M = TypeVar("M")
C = TypeVar("C")
FILLED = "charts/replay_filled"
DRAWN = 32, 2**20  # at most so many gradient steps' random numbers are drawn at once, and about so many numbers


def repeat(times: jax.Array, step: Callable[[jax.Array, S], tuple[S, M]], carried: S) -> tuple[S, M]:
    """`step(number, carried) -> carried, metrics`, so many times, numbers from 0, as one compiled loop.

    Returns what is carried after that, and the sums of the metrics.
    """
    _, like = jax.eval_shape(step, jnp.int32(0), carried)
    nothing = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), like)

    def once(number: jax.Array, so_far: tuple[S, M]) -> tuple[S, M]:
        carried, total = so_far
        carried, metrics = step(number, carried)
        return carried, jax.tree.map(jnp.add, total, metrics)

    return lax.fori_loop(0, times, once, (carried, nothing))


def drawn_at_once(e: OffPolicy, noise: "Noise") -> int:
    """How many of an update's gradient steps make a block of `repeat_by_chance`: blocks are as even as can be."""
    steps, numbers = DRAWN
    at_once = max(1, min(steps, numbers // (e.batch_size * (1 + noise.uses * noise.size))))
    return -(-e.gradient_steps // -(-e.gradient_steps // at_once))


def repeat_by_chance(
    times: jax.Array, block: int, chance: Callable[[jax.Array], C], step: Callable[[C, S], tuple[S, M]], carried: S
) -> tuple[S, M]:
    """As `repeat`, for steps in which something is random: `step(drawn, carried) -> carried, metrics`.

    `chance(numbers)` [block] draws for the steps of these numbers at once, leaves [block, ...]: many small random
    numbers are much quicker drawn together.
    """
    like = jax.eval_shape(lambda: jax.tree.map(lambda x: x[0], chance(jnp.zeros(block, jnp.int32))))
    blank = lambda like: jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), like)
    nothing = blank(jax.eval_shape(step, like, carried)[1])

    def some(number: jax.Array, so_far: tuple[S, M]) -> tuple[S, M]:
        before = number * block
        drawn = chance(before + jnp.arange(block))

        def once(i: jax.Array, so_far: tuple[S, M]) -> tuple[S, M]:
            carried, metrics = step(jax.tree.map(lambda x: x[i], drawn), so_far[0])
            return carried, jax.tree.map(jnp.add, so_far[1], metrics)

        return lax.fori_loop(0, jnp.minimum(times - before, block), once, so_far)

    return lax.fori_loop(0, -(-times // block), some, (carried, nothing))


class Due(NamedTuple):
    """Whether something is due that happens every so many steps, and how many there were since."""

    now: jax.Array  # bool
    since: jax.Array  # int32


def due(since: jax.Array, more: int, every: int) -> Due:
    """After `more` steps beside those `since` [] it was due: every so many it is."""
    since = since + more
    now = since >= every
    return Due(now, jnp.where(now, since % every, since))


def follow(shards: ShardAxis, kind: ConvKind, tau: float, now: jax.Array, params: PyTree, targets: PyTree) -> PyTree:
    """The target networks q, moved towards the networks p if that is due `now` []: q = tau p + (1 - tau) q.

    Leaves of `params`, of `targets` and of what is returned have the same shapes (Lillicrap et al. 2015, algorithm 1).
    """
    if kind == "direct":
        from cleanba.ops import descent

        moved = descent.follow(jnp.where(now, tau, 0.0), *map(jax.tree.leaves, (params, targets)))
        return jax.tree.unflatten(jax.tree.structure(targets), moved)

    def move(now: jax.Array, params: PyTree, targets: PyTree) -> PyTree:
        return jax.tree.map(lambda p, q: jnp.where(now, tau * p + (1 - tau) * q, q), params, targets)

    return shards.isolate(move, now, params, targets)


def mean(sums: Metrics, count: jax.Array) -> Metrics:
    """The means of what `repeat` added up, and of how many; zeros where that was nothing."""
    return {name: x / jnp.maximum(count, 1) for name, x in sums.items()} | {f"count/{name}": count for name in sums}


# ------------------------------------------------------------------------------------------------------------ batches


class Noise(NamedTuple):
    """The normal numbers that a gradient step needs for each of its transitions."""

    uses: int
    size: int


NONE = Noise(0, 0)


class Chance(NamedTuple):
    """What is random in one gradient step, for this device's shards.  Leaves [K', ...]."""

    indices: replay.Indices
    noise: jax.Array  # [K', U, N D] normal numbers, for U uses


class Batch(NamedTuple):
    """One gradient step's transitions, of this device's shards.  Leaves [K', N, ...]."""

    windows: replay.Window
    noise: jax.Array  # [K', U, N, D]

    def of_shard(self, i: jax.Array, use: jax.Array | int) -> tuple[replay.Window, jax.Array]:
        """Transitions [N] of this device's i-th shard, and noise [N, D] for a certain use of them."""
        return jax.tree.map(lambda x: x[i], self.windows), self.noise[i, use]


def new_memory(e: OffPolicy, rollout: Rollout, stack: int = 1) -> replay.Ring:
    """One shard's memory; of images that are stacks of so many frames it stores each frame once."""
    return replay.init(rollout, e.buffer_size // e.num_shards, stack)


def draw(
    e: OffPolicy,
    memory: replay.Ring,
    shards: ShardAxis,
    key: jax.Array,
    numbers: jax.Array,
    n: int = 1,
    noise: Noise = NONE,
) -> Chance:
    """What is random in the gradient steps of these numbers [B], by keys of the shards' own.  Leaves [B, K', ...].

    Transitions of n steps are drawn uniformly; `noise` is how many numbers of how many parts each of them needs.
    """
    batch = e.batch_size // shards.num_shards

    def of_shard(i: jax.Array) -> Chance:
        def of_step(number: jax.Array) -> tuple[replay.Indices, jax.Array]:
            shard_key = jax.random.fold_in(jax.random.fold_in(key, number), shards.index[i])
            sample_key, noise_key = jax.random.split(shard_key) if noise.uses else (shard_key, shard_key)
            return replay.sample_indices(memory, i, sample_key, batch, n), noise_key

        def noise_of(key: jax.Array) -> jax.Array:
            # In one long row, along which XLA has vectors.
            of_use = lambda use: jax.random.normal(jax.random.fold_in(key, use), (batch * noise.size,))
            return jax.vmap(of_use)(jnp.arange(noise.uses))

        indices, keys = jax.vmap(of_step)(numbers)
        return Chance(indices, shards.isolate(jax.vmap(noise_of), keys) if noise.uses else keys)

    return jax.tree.map(lambda x: jnp.swapaxes(x, 0, 1), shards.each(of_shard))


def found(chance: Chance) -> jax.Array:
    """How many transitions of a gradient step's batch were found in each of this device's shards.  -> [K'] int32."""
    return chance.indices.valid.sum(-1, dtype=jnp.int32)


REPLAY_LOGGED = {
    "losses/q_loss": "half the squared error between action values and their targets, added up over the critics",
    "losses/q_values": "mean action value of the replayed actions",
    "losses/grad_norm": "global norm of the critics' gradient",
    "losses/policy_loss": "what the policy minimises",
    "losses/policy_grad_norm": "global norm of the policy's gradient",
    FILLED: "share of the batches that replay could fill; below 0.9 a warning says so",
}
"""What SAC and TD3 log of the gradient steps of an update, once they learn."""


def filled(e: OffPolicy, shards: ShardAxis, found: jax.Array, steps: jax.Array) -> Metrics:
    """The share of all batches that was filled, from what `found` said of so many gradient steps, added up, [K'].

    The rest had weight 0: where few of the steps stored may be drawn, batches are smaller than they were asked to be.
    """
    share = shards.sum(found) / jnp.maximum(steps * e.batch_size, 1)
    return {FILLED: share, f"count/{FILLED}": steps}


def load_batch(memory: replay.Ring, shards: ShardAxis, chance: Chance) -> Batch:
    """The transitions of one step that were drawn for one gradient step."""
    of_shard = lambda i: replay.take(memory, i, jax.tree.map(lambda x: x[i], chance.indices), 1)
    windows = shards.each(of_shard)
    return Batch(windows, chance.noise.reshape(*chance.noise.shape[:2], *windows.valid.shape[1:], -1))


# ------------------------------------------------------------------------------------------- policies and their critics


class Acting(NamedTuple):
    """What a policy over real-valued actions needs to act, and the critics, which films show."""

    policy: PyTree
    critics: PyTree
    updates: jax.Array  # int32: at first, actions are uniform


def critics_error(e: OffPolicy, t: replay.Transition, values: jax.Array, y: jax.Array) -> tuple[jax.Array, Metrics]:
    """Of all critics' values [C, N] for the targets y [N]: this shard's part of the mean over the batch."""
    mean = lambda x: (t.weight * x).sum() / e.batch_size
    loss = mean(squared_error(values, jnp.broadcast_to(y, values.shape)).sum(0))
    return loss, {"losses/q_loss": loss, "losses/q_values": mean(values.mean(0))}


# What an environment is given as an action, by the kind that its specification names.
TAKEN = {"choice": "one of a few actions", "choices": "several choices at once", "quantities": "real numbers"}


class Bounds(NamedTuple):
    """Between which the parts of an action lie.  [D] float32 each."""

    low: np.ndarray
    high: np.ndarray
    centre: np.ndarray
    scale: np.ndarray  # half the distance


def require_bounded(spec: EnvSpec, name: str) -> Bounds:
    """The bounds of an environment's actions, for the algorithm of that name.

    Raises:
        UsageError: actions are choices, or have no bounds.
    """
    action = spec.action
    instead = {"choice": "`cleanba dqn` or `cleanba ppo`"}.get(action.kind, "`cleanba ppo`")
    require(
        action.kind == "quantities",
        f"env_id={spec.env_id!r} takes {TAKEN[action.kind]}, but {name} chooses real numbers; try {instead}, or "
        "Pendulum-v1",
    )
    low, high = np.asarray(action.low, np.float64), np.asarray(action.high, np.float64)
    most = np.finfo(np.float32).max  # "no bound" is in some environments the largest number there is
    flat = np.flatnonzero(low == high)
    require(
        flat.size == 0,
        f"env_id={spec.env_id!r}: both bounds of number {flat[:1]} of an action are {low[flat[:1]]}, but {name} scales "
        f"actions to what lies between; leave that one out by a wrapper, or try {instead}",
    )
    require(
        bool(np.all((-most < low) & (low < high) & (high < most))),
        f"env_id={spec.env_id!r} takes numbers from {low.min():g} to {high.max():g}, but {name} scales its actions to "
        f"finite bounds; try {instead}, whose actions have none",
    )
    return Bounds(*(x.astype(np.float32) for x in (low, high, (high + low) / 2, (high - low) / 2)))


def uniform_actions(bounds: Bounds, key: jax.Array, like: jax.Array) -> jax.Array:
    """Actions anywhere between the bounds, as many as `like`.  [..., D]."""
    return bounds.centre + bounds.scale * jax.random.uniform(key, like.shape, like.dtype, -1.0, 1.0)
