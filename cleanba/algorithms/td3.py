"""Twin delayed deep deterministic policy gradients (Fujimoto et al. 2018), top to bottom: experiment, losses, update.

Equations are the paper's; settings are CleanRL's.
"""

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from cleanba.algorithm import Algorithm, Metrics, NoCarry, no_carry
from cleanba.algorithms.action_bounds import action_bounds
from cleanba.algorithms.gradient_steps import Minibatch, Noise, every, gradient_steps, repeat
from cleanba.algorithms.off_policy import CLEANRL_CONTINUOUS, OffPolicyActorCritic, check_actor_critic
from cleanba.algorithms.optimiser import TrainState, learning_rate, make_adam, optimiser_step
from cleanba.algorithms.twin_critics import CRITICS_LOGGED, ActingParams, policy_metrics, td_loss
from cleanba.config import NotNegative, Partition, Positive, Settings
from cleanba.kernels import polyak_update
from cleanba.networks import make_critics, make_policy
from cleanba.ops import replay
from cleanba.rollout import NetworkParams, Obs, PyTree, Rollout
from cleanba.shards import ShardAxis
from cleanba.specs import EnvSpec


@dataclass(frozen=True)
class TD3(OffPolicyActorCritic):
    """The experiment: these settings determine every bit of the trained parameters."""

    learning_rate: Positive = 3e-4
    """both optimisers' step size at the start"""
    learning_starts: int = 25_000
    exploration_noise: NotNegative = 0.1
    """standard deviation of the exploration noise, for actions scaled to [-1, 1]"""
    policy_noise: NotNegative = 0.2
    """standard deviation of target policy smoothing, for actions scaled to [-1, 1]"""
    noise_clip: NotNegative = 0.5
    """bound at which the smoothing noise is clipped"""


# By preset name: the defaults above are CleanRL's for continuous control.
PRESETS: dict[str, Settings] = {"continuous": Settings()}


# By name, for --preset: published settings whole, so that no default is used.
PROTOCOLS: dict[str, Settings] = {
    # `td3_continuous_action.py`
    "cleanrl-continuous": Settings(
        **CLEANRL_CONTINUOUS,
        learning_starts=25_000,
        learning_rate=3e-4,
        exploration_noise=0.1,
        policy_noise=0.2,
        noise_clip=0.5,
    ),
}


def check(e: TD3, partition: Partition) -> None:
    """Raise `UsageError` for hyperparameters that do not fit."""
    check_actor_critic(e, partition)


class Networks(NamedTuple):
    """The parameters of a policy and of its critics."""

    policy: NetworkParams
    critics: NetworkParams


class State(NamedTuple):
    """The learner's state."""

    policy: TrainState
    critics: TrainState
    targets: Networks
    updates: jax.Array  # int32: updates done
    since_policy: jax.Array  # int32: gradient steps of the critics since the policy last learnt


LOGGED = CRITICS_LOGGED | {"charts/learning_rate": "step size of critics and policy"}


def make(e: TD3, spec: EnvSpec, platform: str) -> Algorithm[State, replay.Ring, ActingParams, NoCarry]:
    """TD3 on environments that look like `spec`, on `platform` ("cpu", "gpu" …)."""
    bounds = action_bounds(spec, "TD3")
    policy_network, critic_network = make_policy(spec, e, 1), make_critics(spec, e)
    optimiser = make_adam()
    noise = Noise(1, spec.action.size)  # for the next action

    def init(key: jax.Array) -> State:
        policy_key, critic_key = jax.random.split(key)
        policy, critics = policy_network.initial_params(policy_key), critic_network.initial_params(critic_key)
        trained = lambda params: TrainState(params, optimiser.init(params))
        # Copies: all are donated, so they must not share a buffer.
        targets = jax.tree.map(jnp.copy, Networks(policy, critics))
        return State(trained(policy), trained(critics), targets, jnp.int32(0), jnp.int32(0))

    def best(policy: NetworkParams, obs: Obs) -> jax.Array:
        """The policy's actions [N, D] at these observations [N, ...], without noise."""
        return bounds.centre + bounds.scale * jnp.tanh(policy_network.outputs(policy, obs)[0])

    def act(
        params: ActingParams, carry: NoCarry, obs: Obs, first: jax.Array, key: jax.Array, explore: bool
    ) -> tuple[jax.Array, NoCarry, PyTree]:
        action = best(params.policy, obs)
        if not explore:
            return action, carry, {}
        noise_key, uniform_key = jax.random.split(key)
        noise = e.exploration_noise * bounds.scale * jax.random.normal(noise_key, action.shape)
        noisy, uniform = bounds.clip(action + noise), bounds.uniform(uniform_key, action)
        return jnp.where(e.policy_acts(params.updates), noisy, uniform), carry, {}

    def critic_loss(
        params: NetworkParams, window: replay.Window, noise: jax.Array, targets: Networks
    ) -> tuple[jax.Array, Metrics]:
        """This shard's part of the mean loss over the batch of all shards.

        y = r + gamma min_i Q'_i(s', a'), where a' is the target policy's action with clipped noise (eqs. 10 and 14).
        """
        t = replay.n_step(window, e.gamma)
        noise = (e.policy_noise * noise).clip(-e.noise_clip, e.noise_clip)
        action = bounds.clip(best(targets.policy, t.next_obs) + bounds.scale * noise)
        future = critic_network.values(targets.critics, t.next_obs, action).min(0)
        y = lax.stop_gradient(t.reward + t.discount * future)
        values = critic_network.values(params, t.obs, t.action)
        return td_loss(e, t, values, y)

    def policy_loss(params: NetworkParams, window: replay.Window, critics: NetworkParams) -> tuple[jax.Array, Metrics]:
        """This shard's part of the mean of -Q_1(s, pi(s)) (algorithm 1)."""
        value = critic_network.values(critics, window.obs, best(params, window.obs), first=1)[0]
        loss = -jnp.where(window.valid, value, 0.0).sum() / e.batch_size
        return loss, {"losses/policy_loss": loss}

    def update(
        state: State, memory: replay.Ring, rollout: Rollout, shards: ShardAxis, key: jax.Array
    ) -> tuple[State, replay.Ring, Metrics]:
        memory = replay.write(memory, rollout, shards.num_held)
        rate = learning_rate(e, e.learning_rate, state.updates)

        def gradient_step(batch: Minibatch, state: State) -> tuple[State, Metrics]:
            critic_inputs = lambda i: (batch.window(i), batch.noise(i, 0), state.targets)
            critics, critic_metrics = optimiser_step(shards, optimiser, rate, state.critics, critic_loss, critic_inputs)

            def policy_step(_: jax.Array, policy: TrainState) -> tuple[TrainState, Metrics]:
                policy_inputs = lambda i: (batch.window(i), critics.params)
                return optimiser_step(shards, optimiser, rate, policy, policy_loss, policy_inputs)

            # Delayed: policy and targets change at every `policy_frequency`-th step of the critics.
            policy_learns, since_policy = every(e.policy_frequency, state.since_policy + 1)
            policy_steps = policy_learns.astype(jnp.int32)
            policy, policy_sums = repeat(policy_steps, policy_step, state.policy)
            networks = Networks(policy.params, critics.params)
            targets = polyak_update(shards, e.tau, policy_learns, networks, state.targets)
            state = State(policy, critics, targets, state.updates, since_policy)
            return state, critic_metrics | policy_metrics(policy_sums, policy_steps)

        steps = e.steps_of(state.updates + 1)
        state, metrics = gradient_steps(e, shards, memory, key, steps, gradient_step, state, noise=noise, reused=True)
        metrics["charts/learning_rate"] = rate
        return state._replace(updates=state.updates + 1), memory, metrics

    def inspect(params: ActingParams, carry: NoCarry, obs: Obs, first: jax.Array) -> dict[str, jax.Array]:
        action = best(params.policy, obs)
        return {"value": critic_network.values(params.critics, obs, action, first=1)[0], "action": action}

    def acting_params(state: State) -> ActingParams:
        return ActingParams(state.policy.params, state.critics.params, state.updates)

    def init_memory(rollout: Rollout) -> replay.Ring:
        return replay.init(rollout, e.buffer_size // e.num_shards)

    return Algorithm(init, init_memory, no_carry, act, update, acting_params, inspect)
