"""Soft actor-critic, top to bottom: experiment, networks, losses, update.

Haarnoja et al. 2018, "Soft Actor-Critic Algorithms and Applications" (arXiv 1812.05905), whose equations are cited
below: two critics, and an entropy coefficient that is fixed or learnt.  Sections are those of `dqn.py`; settings are
CleanRL's.
"""

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from cleanba.algorithm import Algorithm, Metrics, NoCarry, no_carry
from cleanba.algorithms.action_bounds import action_bounds
from cleanba.algorithms.gradient_steps import Minibatch, Noise, every, gradient_steps, repeat
from cleanba.algorithms.off_policy import OffPolicyActorCritic, check_actor_critic
from cleanba.algorithms.optimiser import TrainState, learning_rate, make_adam, sgd_step
from cleanba.algorithms.twin_critics import CRITICS_LOGGED, ActingParams, policy_metrics, td_loss
from cleanba.config import NotNegative, Partition, Positive, Settings, Steps, require
from cleanba.kernels import polyak_update
from cleanba.networks import make_critics, make_policy
from cleanba.ops import replay
from cleanba.ops.descent import descend
from cleanba.ops.distributions import SquashedGaussian
from cleanba.rollout import NetworkParams, Obs, PyTree, Rollout
from cleanba.shards import ShardAxis
from cleanba.specs import EnvSpec


@dataclass(frozen=True)
class SAC(OffPolicyActorCritic):
    """What is trained: together these decide every bit of the trained parameters."""

    policy_lr: Positive = 3e-4
    """step size of the policy's optimiser at the start"""
    q_lr: Positive = 1e-3
    """step size of the critics' optimiser at the start, and of the entropy coefficient's"""
    target_network_frequency: Steps = 1
    """environment steps between updates of the target networks"""
    policy_frequency: int = 2
    """gradient steps of the critics for each time that the policy learns, which then takes as many"""
    alpha: NotNegative = 0.2
    """entropy coefficient with --no-autotune"""
    autotune: bool = True
    """learn the entropy coefficient, from 1 on: so that the entropy is minus the number of parts of an action"""


# By preset name: the defaults above are CleanRL's for continuous control.
PRESETS: dict[str, Settings] = {"continuous": Settings()}


def check(e: SAC, partition: Partition) -> None:
    """Raise `UsageError` for hyperparameters that do not fit."""
    check_actor_critic(e, partition)
    require(
        e.alpha == SAC.alpha or not e.autotune,
        f"alpha={e.alpha} is the entropy coefficient where none is learnt; add --no-autotune, or leave --alpha out",
    )


class State(NamedTuple):
    """The learner's state."""

    policy: TrainState
    critics: TrainState
    targets: NetworkParams
    log_alpha: TrainState  # of the entropy coefficient
    updates: jax.Array  # int32: updates done
    since_target: jax.Array  # int32: environment steps since the target networks were updated
    since_policy: jax.Array  # int32: gradient steps of the critics since the policy learnt


LOG_STD = (-5.0, 2.0)  # bounds of the policy's log sigma


LOGGED = CRITICS_LOGGED | {
    "losses/entropy": "entropy of the policy in nats, in units of the environment's actions",
    "losses/alpha": "entropy coefficient after the update",
    "charts/q_lr": "step size of the critics and of the entropy coefficient",
    "charts/policy_lr": "step size of the policy",
}


def make(e: SAC, spec: EnvSpec, platform: str) -> Algorithm[State, replay.Ring, ActingParams, NoCarry]:
    """SAC on environments that look like `spec`, on `platform` ("cpu", "gpu" …)."""
    bounds = action_bounds(spec, "SAC")
    policy_network, critic_network = make_policy(spec, e, 2), make_critics(spec, e)
    optimiser = make_adam()
    target_entropy = -float(spec.action.size)
    noise = Noise(1 + e.policy_frequency, spec.action.size)  # for the next action, and for each step of the policy

    def init(key: jax.Array) -> State:
        policy_key, critic_key = jax.random.split(key)
        policy, critics = policy_network.initial_params(policy_key), critic_network.initial_params(critic_key)
        trained = lambda params: TrainState(params, optimiser.init(params))
        # A copy: both are donated, so they must not share a buffer.
        targets = jax.tree.map(jnp.copy, critics)
        log_alpha = trained(jnp.float32(0.0)) if e.autotune else TrainState(jnp.log(jnp.float32(e.alpha)), ())
        zero = jnp.int32(0)
        return State(trained(policy), trained(critics), targets, log_alpha, zero, zero.copy(), zero.copy())

    def policy_of(params: NetworkParams, obs: Obs) -> SquashedGaussian:
        """The policy at these observations.  Leaves [N, ...]."""
        mean, x = policy_network.outputs(params, obs)
        low, high = LOG_STD
        return SquashedGaussian(mean, low + 0.5 * (high - low) * (jnp.tanh(x) + 1), bounds.centre, bounds.scale)

    def act(
        params: ActingParams, carry: NoCarry, obs: Obs, first: jax.Array, key: jax.Array, explore: bool
    ) -> tuple[jax.Array, NoCarry, PyTree]:
        policy = policy_of(params.policy, obs)
        if not explore:
            return policy.mode(), carry, {}
        own_key, uniform_key = jax.random.split(key)
        own = policy.sample(own_key)
        return jnp.where(e.learns(params.updates), own, bounds.uniform(uniform_key, own)), carry, {}

    def critic_loss(
        params: NetworkParams,
        window: replay.Window,
        noise: jax.Array,
        policy: NetworkParams,
        targets: NetworkParams,
        log_alpha: jax.Array,
    ) -> tuple[jax.Array, Metrics]:
        """This shard's part of the mean loss over the batch of all shards.

        y = r + gamma (min_i Q'_i(s', a') - alpha log pi(a'|s')), a' drawn from pi(.|s') (eqs. 5 and 6).
        """
        t = replay.n_step(window, e.gamma)
        action, log_prob = policy_of(policy, t.next_obs).act(noise)
        future = critic_network.values(targets, t.next_obs, action).min(0) - jnp.exp(log_alpha) * log_prob
        y = lax.stop_gradient(t.reward + t.discount * future)
        values = critic_network.values(params, t.obs, t.action)
        return td_loss(e, t, values, y)

    def policy_loss(
        params: NetworkParams, window: replay.Window, noise: jax.Array, critics: NetworkParams, log_alpha: jax.Array
    ) -> tuple[jax.Array, Metrics]:
        """This shard's part of the mean of alpha log pi(a|s) - min_i Q_i(s, a), a drawn from pi(.|s) (eq. 9)."""
        action, log_prob = policy_of(params, window.obs).act(noise)
        value = critic_network.values(critics, window.obs, action).min(0)
        of_batch = lambda x: jnp.where(window.valid, x, 0.0).sum() / e.batch_size
        loss = of_batch(jnp.exp(log_alpha) * log_prob - value)
        return loss, {"losses/policy_loss": loss, "losses/entropy": -of_batch(log_prob)}

    def tune(rate: jax.Array, log_alpha: TrainState, entropy: jax.Array) -> TrainState:
        """One step down the gradient of alpha (entropy - its target) (eq. 18), by log alpha."""
        return descend(optimiser.rule, rate, log_alpha, jnp.exp(log_alpha.params) * (entropy - target_entropy))[0]

    def update(
        state: State, memory: replay.Ring, rollout: Rollout, shards: ShardAxis, key: jax.Array
    ) -> tuple[State, replay.Ring, Metrics]:
        memory = replay.write(memory, rollout, shards.num_held)
        q_rate = learning_rate(e, e.q_lr, state.updates)
        policy_rate = learning_rate(e, e.policy_lr, state.updates)

        def gradient_step(batch: Minibatch, state: State) -> tuple[State, Metrics]:
            target_inputs = state.policy.params, state.targets, state.log_alpha.params
            inputs = lambda i: (batch.window(i), batch.noise(i, 0), *target_inputs)
            critics, of_critics = sgd_step(shards, optimiser, q_rate, state.critics, critic_loss, inputs)

            def policy_step(
                number: jax.Array, learnt: tuple[TrainState, TrainState]
            ) -> tuple[tuple[TrainState, TrainState], Metrics]:
                policy, log_alpha = learnt
                inputs = lambda i: (batch.window(i), batch.noise(i, number + 1), critics.params, log_alpha.params)
                policy, metrics = sgd_step(shards, optimiser, policy_rate, policy, policy_loss, inputs)
                if e.autotune:
                    log_alpha = shards.isolate(tune, q_rate, log_alpha, metrics["losses/entropy"])
                return (policy, log_alpha), metrics

            # The policy learns at every `policy_frequency`-th step of the critics, and then takes as many steps itself.
            policy_learns, since_policy = every(e.policy_frequency, state.since_policy + 1)
            policy_steps = jnp.where(policy_learns, e.policy_frequency, 0)
            (policy, log_alpha), of_policy = repeat(policy_steps, policy_step, (state.policy, state.log_alpha))

            targets_move, since_target = every(e.target_network_frequency, state.since_target + e.train_frequency)
            targets = polyak_update(shards, e.tau, targets_move, critics.params, state.targets)
            state = State(policy, critics, targets, log_alpha, state.updates, since_target, since_policy)
            return state, of_critics | policy_metrics(of_policy, policy_steps)

        steps = e.steps_of(state.updates + 1)
        state, metrics = gradient_steps(e, shards, memory, key, steps, gradient_step, state, noise=noise, reused=True)
        metrics |= {
            "losses/alpha": jnp.exp(state.log_alpha.params),
            "charts/q_lr": q_rate,
            "charts/policy_lr": policy_rate,
        }
        return state._replace(updates=state.updates + 1), memory, metrics

    def inspect(params: ActingParams, carry: NoCarry, obs: Obs, first: jax.Array) -> dict[str, jax.Array]:
        policy = policy_of(params.policy, obs)
        value = critic_network.values(params.critics, obs, policy.mode()).min(0)
        return {"value": value, **policy.describe()}

    def acting_params(state: State) -> ActingParams:
        return ActingParams(state.policy.params, state.critics.params, state.updates)

    def init_memory(rollout: Rollout) -> replay.Ring:
        return replay.init(rollout, e.buffer_size // e.num_shards)

    return Algorithm(init, init_memory, no_carry, act, update, acting_params, inspect)
