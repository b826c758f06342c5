"""Twin delayed deep deterministic policy gradients (Fujimoto et al. 2018), top to bottom: experiment, losses, update.

Sections are those of `sac.py`; settings are those of CleanRL.
"""

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from cleanba.algorithm import Algorithm, Metrics
from cleanba.algorithms.off_policy import (
    REPLAY_LOGGED,
    Acting,
    Chance,
    Noise,
    OffPolicyActorCritic,
    check_actor_critic,
    critics_error,
    draw,
    drawn_at_once,
    due,
    filled,
    follow,
    found,
    load_batch,
    mean,
    new_memory,
    repeat,
    repeat_by_chance,
    require_bounded,
    uniform_actions,
)
from cleanba.algorithms.optimiser import Trained, learning_rate, make_adam, sgd_step
from cleanba.config import NotNegative, Partition, Positive, Settings
from cleanba.networks import make_critics, make_policy
from cleanba.networks.layers import conv_kind
from cleanba.ops import replay
from cleanba.rollout import PyTree, Rollout
from cleanba.shards import ShardAxis
from cleanba.specs import EnvSpec


@dataclass(frozen=True)
class TD3(OffPolicyActorCritic):
    """What is trained: together these decide every bit of the trained parameters."""

    learning_rate: Positive = 3e-4
    """both optimisers' step size at the start"""
    learning_starts: int = 25_000
    """steps before the first gradient step; until then actions are drawn uniformly"""
    exploration_noise: NotNegative = 0.1
    """standard deviation of the noise on the actions that are taken, where bounds are -1 and 1"""
    policy_noise: NotNegative = 0.2
    """standard deviation of the noise on the actions that targets value, where bounds are -1 and 1"""
    noise_clip: NotNegative = 0.5
    """where that noise is clipped, where bounds are -1 and 1"""


# By kind of environment: the defaults above are CleanRL's for continuous control.
PRESETS: dict[str, Settings] = {"continuous": Settings()}


def check(e: TD3, partition: Partition) -> None:
    """Raise `UsageError` for hyperparameters that do not fit."""
    check_actor_critic(e, partition, "TD3")


class Networks(NamedTuple):
    """The parameters of a policy and of its critics."""

    policy: PyTree
    critics: PyTree


class State(NamedTuple):
    """A learner's state: all that an update changes, but for the replay memory."""

    policy: Trained
    critics: Trained
    targets: Networks
    updates: jax.Array  # int32: updates done
    since_policy: jax.Array  # int32: gradient steps of the critics since the policy learnt


LOGGED = REPLAY_LOGGED | {"charts/learning_rate": "step size of critics and policy"}


def make(e: TD3, spec: EnvSpec, platform: str) -> Algorithm:
    """TD3 on environments that look like `spec`, on devices of kind `platform` ("cpu", "gpu" …)."""
    bounds = require_bounded(spec, "TD3")
    policy_network, critic_network = make_policy(spec, e, 1, platform), make_critics(spec, e, platform)
    optimiser, kind = make_adam(platform), conv_kind(platform)
    needs = Noise(1, spec.action.size)  # for the next actions

    def init(key: jax.Array) -> State:
        policy_key, critic_key = jax.random.split(key)
        policy, critics = policy_network.initial_params(policy_key), critic_network.initial_params(critic_key)
        trained = lambda params: Trained(params, optimiser.init(params))
        # All is donated, so nothing must share its memory.
        targets = jax.tree.map(jnp.copy, Networks(policy, critics))
        return State(trained(policy), trained(critics), targets, jnp.int32(0), jnp.int32(0))

    def best(policy: PyTree, obs: PyTree) -> jax.Array:
        """The policy's action [N, D] where these are observed.  Leaves [N, ...]."""
        return bounds.centre + bounds.scale * jnp.tanh(policy_network.outputs(policy, obs)[0])

    def act(
        params: Acting, carry: PyTree, obs: PyTree, first: jax.Array, key: jax.Array, explore: bool
    ) -> tuple[jax.Array, PyTree, PyTree]:
        action = best(params.policy, obs)
        if not explore:
            return action, carry, {}
        noise_key, uniform_key = jax.random.split(key)
        noise = e.exploration_noise * bounds.scale * jax.random.normal(noise_key, action.shape)
        noisy = (action + noise).clip(bounds.low, bounds.high)
        return jnp.where(e.learns(params.updates), noisy, uniform_actions(bounds, uniform_key, action)), carry, {}

    def critic_loss(
        params: PyTree, window: replay.Window, noise: jax.Array, targets: Networks
    ) -> tuple[jax.Array, Metrics]:
        """This shard's part of the mean over the batch, all shards together.

        y = r + gamma min_i Q'_i(s', a'), where a' is the target policy's action with clipped noise (eqs. 10 and 14).
        """
        t = replay.n_step(window, e.gamma)
        noise = (e.policy_noise * noise).clip(-e.noise_clip, e.noise_clip)
        action = (best(targets.policy, t.next_obs) + bounds.scale * noise).clip(bounds.low, bounds.high)
        future = critic_network.values(targets.critics, t.next_obs, action).min(0)
        y = lax.stop_gradient(t.reward + t.discount * future)
        values = critic_network.values(params, t.obs, t.action)
        return critics_error(e, t, values, y)

    def policy_loss(params: PyTree, window: replay.Window, critics: PyTree) -> tuple[jax.Array, Metrics]:
        """This shard's part of the mean of -Q_1(s, pi(s)) (algorithm 1)."""
        value = critic_network.values(critics, window.obs, best(params, window.obs), first=1)[0]
        loss = -jnp.where(window.valid, value, 0.0).sum() / e.batch_size
        return loss, {"losses/policy_loss": loss}

    def update(
        state: State, memory: replay.Ring, rollout: Rollout, shards: ShardAxis, key: jax.Array
    ) -> tuple[State, replay.Ring, Metrics]:
        memory = replay.write(memory, rollout, shards.num_held)
        rate = learning_rate(e, e.learning_rate, state.updates)

        def gradient_step(chance: Chance, state: State) -> tuple[State, tuple[Metrics, Metrics, jax.Array, jax.Array]]:
            batch = load_batch(memory, shards, chance)
            load = lambda i: (*batch.of_shard(i, 0), state.targets)
            critics, of_critics = sgd_step(shards, optimiser, rate, state.critics, critic_loss, load)

            def policy_step(_: jax.Array, policy: Trained) -> tuple[Trained, Metrics]:
                load = lambda i: (batch.of_shard(i, 0)[0], critics.params)
                return sgd_step(shards, optimiser, rate, policy, policy_loss, load)

            learns, since_policy = due(state.since_policy, 1, e.policy_frequency)
            times = learns.astype(jnp.int32)
            policy, of_policy = repeat(times, policy_step, state.policy)
            targets = follow(shards, kind, e.tau, learns, Networks(policy.params, critics.params), state.targets)
            return State(policy, critics, targets, state.updates, since_policy), (
                of_critics,
                of_policy,
                times,
                found(chance),
            )

        steps = e.steps_of(state.updates + 1)
        chance = lambda numbers: draw(e, memory, shards, key, numbers, noise=needs)
        learnt = repeat_by_chance(steps, drawn_at_once(e, needs), chance, gradient_step, state)
        state, (of_critics, of_policy, policy_steps, drawn) = learnt
        of_policy["losses/policy_grad_norm"] = of_policy.pop("losses/grad_norm")
        metrics = mean(of_critics, steps) | mean(of_policy, policy_steps) | filled(e, shards, drawn, steps)
        metrics["charts/learning_rate"] = rate
        return state._replace(updates=state.updates + 1), memory, metrics

    def inspect(params: Acting, carry: PyTree, obs: PyTree, first: jax.Array) -> dict[str, jax.Array]:
        action = best(params.policy, obs)
        return {"value": critic_network.values(params.critics, obs, action, first=1)[0], "action": action}

    acting = lambda state: Acting(state.policy.params, state.critics.params, state.updates)
    return Algorithm(init, lambda rollout: new_memory(e, rollout), lambda batch: (), act, update, acting, inspect)
