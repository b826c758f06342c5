"""Settings of algorithms that learn from replay, and which of them fit together."""

from dataclasses import dataclass
from math import gcd
from typing import Annotated

import jax
import jax.numpy as jnp

from cleanba.config import MOST, Count, Experiment, Fraction, NotOffered, Partition, Range, Settings, Steps, require
from cleanba.errors import nearest, nearest_divisors
from cleanba.specs import EnvSpec


@dataclass(frozen=True)
class OffPolicy(Experiment):
    """Settings of an algorithm that learns from replay."""

    anneal_lr: bool = False

    buffer_size: Steps = 1_000_000
    """steps that the replay memory holds, over all shards"""
    learning_starts: Annotated[int, Range(0, MOST, unit="steps")] = 5_000
    """steps before the first gradient step"""
    batch_size: Count = 256
    """transitions in one gradient step, over all shards"""
    train_frequency: Steps = 1
    """environment steps per gradient step, counted over all environments"""
    tau: Annotated[float, Range(0, 1, open_low=True)] = 0.005
    """step of the target network towards the online one; 1 copies it (Polyak: tau online + (1 - tau) target)"""

    @property
    def gradient_steps(self) -> int:
        """Gradient steps per update, once learning has started."""
        return self.transitions_per_update // self.train_frequency

    @property
    def first_to_learn(self) -> int:
        """The number of the first update that takes gradient steps, counted from 1; 0 if learning_starts is 0."""
        return -(-self.learning_starts // self.transitions_per_update)

    def learns(self, update: jax.Array) -> jax.Array:
        """Whether this update, counted from 1, takes gradient steps.  [] int32 -> [] bool."""
        return update >= self.first_to_learn

    def steps_of(self, update: jax.Array) -> jax.Array:
        """Gradient steps of this update: none before learning starts.  [] int32 -> [] int32."""
        return jnp.where(self.learns(update), self.gradient_steps, 0)


@dataclass(frozen=True)
class PrioritisedReplay(OffPolicy):
    """Settings of an algorithm that can draw from replay by priorities (Schaul et al. 2016)."""

    priority_exponent: Fraction = 0.6
    """priorities are errors to this power (0: all are drawn equally often)"""
    importance_exponent: Fraction = 0.4
    """how far importance weights correct for sampling by priority at the start (1: fully)"""
    importance_exponent_end: Fraction = 1.0
    """the same at the end of the run; linear in between"""

    def importance(self, update: jax.Array) -> jax.Array:
        """The importance exponent in this update, counted from 1.  [] int32 -> []."""
        done = (update - 1) / max(1, self.num_updates - 1)
        return self.importance_exponent * (1 - done) + self.importance_exponent_end * done


@dataclass(frozen=True)
class OffPolicyActorCritic(OffPolicy):
    """Settings of an algorithm that learns a policy over real-valued actions from replay."""

    # Atari has discrete actions.
    repeat_action_probability: NotOffered[float] = 0.25
    full_action_space: NotOffered[bool] = True
    episodic_life: NotOffered[bool] = False
    env_id: str = "HalfCheetah-v5"
    total_timesteps: int = 1_000_000
    """environment steps in all"""
    learning_starts: int = 5_000
    """steps before the first gradient step; until then actions are drawn uniformly, or with --init-from by the policy
    that was loaded"""
    num_envs: int = 4
    num_steps: int = 8
    hiddens: tuple[int, ...] = (256, 256)
    policy_frequency: Count = 2
    """gradient steps of the critics per gradient step of the policy"""

    def policy_acts(self, updates: jax.Array) -> jax.Array:
        """Whether the policy acts after this many updates; else actions are uniform.  [] int32 -> [] bool.

        It acts once an update took gradient steps, and always with learning_starts 0 or another run's parameters.
        """
        return jnp.bool_(True) if self.init_from else self.learns(updates)


# What CleanRL's scripts for continuous actions share.  They act with the newest policy, one step at a time.
CLEANRL_CONTINUOUS = Settings(
    total_timesteps=1_000_000,
    num_envs=1,
    num_actors=1,
    num_shards=1,
    num_steps=1,
    concurrency=False,
    network="mlp",
    hiddens=(256, 256),
    layer_norm=False,
    anneal_lr=False,
    gamma=0.99,
    buffer_size=1_000_000,
    batch_size=256,
    train_frequency=1,
    tau=0.005,
    policy_frequency=2,
)


def stacked_frames(spec: EnvSpec) -> int:
    """How many frames EnvPool stacks in an observation of an Atari game, each of which replay stores once; else 1."""
    return int(spec.options.get("stack_num", 4)) if spec.is_atari else 1


def check_replay(e: OffPolicy, partition: Partition, n_step: int = 1, earliest: int = 0) -> None:
    """Raise `UsageError` unless the settings fit the replay memory, the rollouts and the length of the run.

    `n_step` is the number of rewards in a target, and `earliest` the least that learning_starts can be.
    """
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
        f"learnt; try --learning-starts {max(e.num_updates * steps // 5, earliest)}, or --total-timesteps "
        f"{5 * e.first_to_learn * steps}",
    )


def check_actor_critic(e: OffPolicyActorCritic, partition: Partition) -> None:
    """`check_replay`; and raise `UsageError` unless the policy learns at all."""
    check_replay(e, partition)
    most = (e.num_updates - max(e.first_to_learn, 1) + 1) * e.gradient_steps
    require(
        e.policy_frequency <= most,
        f"policy_frequency={e.policy_frequency} is more than the run's {most} gradient steps, so the policy would "
        f"never learn; try --policy-frequency {most} or less",
    )
