"""Soft actor-critic, top to bottom: experiment, networks, losses, update.

Haarnoja et al. 2018, "Soft Actor-Critic Algorithms and Applications" (arXiv 1812.05905), whose equations are cited
below: two critics, and an entropy coefficient alpha that is fixed or learnt.  Settings are CleanRL's.
"""

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from cleanba.algorithm import Algorithm, Metrics, NoCarry, no_carry
from cleanba.algorithms.action_bounds import action_bounds
from cleanba.algorithms.gradient_steps import Minibatch, Noise, every, gradient_steps, repeat, with_count
from cleanba.algorithms.off_policy import CLEANRL_CONTINUOUS, OffPolicyActorCritic, check_actor_critic
from cleanba.algorithms.optimiser import TrainState, learning_rate, make_adam, optimiser_step
from cleanba.algorithms.twin_critics import CRITICS_LOGGED, ActingParams, policy_metrics, td_loss
from cleanba.config import NotNegative, Partition, Positive, Settings, Steps, require
from cleanba.kernels import polyak_update
from cleanba.networks import make_critics, make_policy
from cleanba.ops import replay
from cleanba.ops.descent import descend
from cleanba.ops.distributions import SquashedGaussian
from cleanba.probes import probe
from cleanba.rollout import NetworkParams, Obs, PyTree, Rollout
from cleanba.shards import ShardAxis
from cleanba.specs import EnvSpec


@dataclass(frozen=True)
class SAC(OffPolicyActorCritic):
    """The experiment: these settings determine every bit of the trained parameters."""

    policy_lr: Positive = 3e-4
    """initial step size of the policy's optimiser"""
    q_lr: Positive = 1e-3
    """initial step size of the optimisers of the critics and of the entropy coefficient"""
    target_network_frequency: Steps = 1
    """environment steps between updates of the target networks"""
    policy_frequency: int = 2
    """critic steps between policy updates; the policy then takes as many steps"""
    alpha: NotNegative = 0.2
    """entropy coefficient with --no-autotune"""
    autotune: bool = True
    """learn the entropy coefficient, starting at 1, so that entropy approaches minus the number of action dimensions"""


# By preset name: the defaults above are CleanRL's for continuous control.
PRESETS: dict[str, Settings] = {"continuous": Settings()}


# By name, for --preset: published settings whole, so that no default is used.
PROTOCOLS: dict[str, Settings] = {
    # `sac_continuous_action.py`
    "cleanrl-continuous": Settings(
        **CLEANRL_CONTINUOUS,
        learning_starts=5_000,
        policy_lr=3e-4,
        q_lr=1e-3,
        target_network_frequency=1,
        alpha=0.2,
        autotune=True,
    ),
}


MOST_POLICY_STEPS = 1000  # in a row


def check(e: SAC, partition: Partition) -> None:
    """Raise `UsageError` for hyperparameters that do not fit."""
    require(
        e.policy_frequency <= MOST_POLICY_STEPS,
        f"policy_frequency={e.policy_frequency} must be at most {MOST_POLICY_STEPS}, because noise is drawn for that "
        "many steps at once; try --policy-frequency 2",
    )
    check_actor_critic(e, partition)
    require(
        e.alpha == SAC.alpha or not e.autotune,
        f"alpha={e.alpha} has no effect while the coefficient is learnt; add --no-autotune, or leave --alpha out",
    )


class State(NamedTuple):
    """The learner's state."""

    policy: TrainState
    critics: TrainState
    targets: NetworkParams
    log_alpha: TrainState  # its params: log of the entropy coefficient, []; its optimiser: () with --no-autotune
    updates: jax.Array  # int32: updates done
    since_target: jax.Array  # int32: environment steps since the target networks were updated
    since_policy: jax.Array  # int32: gradient steps of the critics since the policy last learnt


LOG_STD = (-5.0, 2.0)  # bounds of the policy's log sigma, CleanRL's


LOGGED = CRITICS_LOGGED | {
    "losses/entropy": "differential entropy of the policy in nats, over actions in the environment's units",
    "losses/alpha": "entropy coefficient after the update",
    "charts/q_lr": "step size of the critics and of the entropy coefficient",
    "charts/policy_lr": "step size of the policy",
}


def make(e: SAC, spec: EnvSpec, platform: str) -> Algorithm[State, replay.Ring, ActingParams, NoCarry]:
    """SAC on environments that look like `spec`, on `platform` ("cpu", "gpu" …)."""
    bounds = action_bounds(spec, "SAC")
    policy_network, critic_network = make_policy(spec, e, heads=2), make_critics(spec, e)  # heads: mu, log sigma
    optimiser = make_adam()
    target_entropy = -float(spec.action.size)
    # Use 0 draws the critics' next action a', use k + 1 the action of the policy's k-th step on the same minibatch.
    noise = Noise(1 + e.policy_frequency, spec.action.size)

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
        """pi(.|s), with log sigma kept within `LOG_STD` by tanh.  Leaves of obs [N, ...] -> actions [N, D]."""
        mean, raw_log_std = policy_network.outputs(params, obs)
        low, high = LOG_STD
        log_std = low + 0.5 * (high - low) * (jnp.tanh(raw_log_std) + 1)
        return SquashedGaussian(mean, log_std, bounds.centre, bounds.scale)

    def act(
        params: ActingParams, carry: NoCarry, obs: Obs, first: jax.Array, key: jax.Array, explore: bool
    ) -> tuple[jax.Array, NoCarry, PyTree]:
        policy = policy_of(params.policy, obs)
        if not explore:
            return policy.mode(), carry, {}
        policy_key, uniform_key = jax.random.split(key)
        sampled = policy.sample(policy_key)
        return jnp.where(e.policy_acts(params.updates), sampled, bounds.uniform(uniform_key, sampled)), carry, {}

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
        mean = lambda x: jnp.where(window.valid, x, 0.0).sum() / e.batch_size
        loss = mean(jnp.exp(log_alpha) * log_prob - value)
        return loss, {"losses/policy_loss": loss, "losses/entropy": -mean(log_prob)}

    def tune(rate: jax.Array, log_alpha: TrainState, entropy: jax.Array) -> TrainState:
        """One step on alpha (entropy - target entropy) (eq. 18), differentiated with respect to log alpha.

        rate, entropy [].  That gradient is the same product, as d alpha / d log alpha = alpha.
        """
        return descend(optimiser.rule, rate, log_alpha, jnp.exp(log_alpha.params) * (entropy - target_entropy))[0]

    def update(
        state: State, memory: replay.Ring, rollout: Rollout, shards: ShardAxis, key: jax.Array
    ) -> tuple[State, replay.Ring, Metrics]:
        memory = replay.write(memory, rollout, shards.num_held)
        q_rate = learning_rate(e, e.q_lr, state.updates)
        policy_rate = learning_rate(e, e.policy_lr, state.updates)

        def gradient_step(batch: Minibatch, state: State) -> tuple[State, Metrics]:
            networks = state.policy.params, state.targets, state.log_alpha.params
            critic_inputs = lambda i: (batch.window(i), batch.noise(i, 0), *networks)
            critics, critic_metrics = optimiser_step(
                shards, optimiser, q_rate, state.critics, critic_loss, critic_inputs
            )

            def policy_step(
                k: jax.Array, trained: tuple[TrainState, TrainState]
            ) -> tuple[tuple[TrainState, TrainState], Metrics]:
                policy, log_alpha = trained
                policy_inputs = lambda i: (batch.window(i), batch.noise(i, k + 1), critics.params, log_alpha.params)
                policy, metrics = optimiser_step(shards, optimiser, policy_rate, policy, policy_loss, policy_inputs)
                if e.autotune:
                    log_alpha = shards.isolate(tune, q_rate, log_alpha, metrics["losses/entropy"])
                    probe("optimiser", log_alpha, "the entropy coefficient")
                return (policy, log_alpha), metrics

            # The policy learns at every `policy_frequency`-th step of the critics, and then takes as many steps itself.
            policy_learns, since_policy = every(e.policy_frequency, state.since_policy + 1)
            policy_steps = jnp.where(policy_learns, e.policy_frequency, 0)
            (policy, log_alpha), policy_sums = repeat(policy_steps, policy_step, (state.policy, state.log_alpha))

            # Each gradient step stands for `train_frequency` environment steps, the unit of `target_network_frequency`.
            targets_move, since_target = every(e.target_network_frequency, state.since_target + e.train_frequency)
            targets = polyak_update(shards, e.tau, targets_move, critics.params, state.targets)
            state = State(policy, critics, targets, log_alpha, state.updates, since_target, since_policy)
            return state, critic_metrics | policy_metrics(policy_sums, policy_steps)

        steps = e.steps_of(state.updates + 1)
        state, metrics = gradient_steps(e, shards, memory, key, steps, gradient_step, state, noise=noise, reused=True)
        metrics |= with_count({"losses/alpha": jnp.exp(state.log_alpha.params)}, steps)  # logged once it learns
        metrics |= {
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
