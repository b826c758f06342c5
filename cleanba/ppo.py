"""Proximal policy optimisation (Schulman et al. 2017), top to bottom: experiment, act, losses, update, main.

Its implementation details are those of the original Cleanba and of CleanRL, except where `docs/details.md` says so.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from cleanba.algorithm import Algorithm, Metrics
from cleanba.config import Experiment, Partition, require
from cleanba.envs import EnvSpec
from cleanba.networks import make_actor_critic
from cleanba.networks.cores import initial_carry
from cleanba.ops.losses import kl_estimate, log_prob_and_entropy, ppo_policy_loss, squared_error
from cleanba.ops.returns import gae
from cleanba.rollout import PyTree, Rollout
from cleanba.shards import ShardAxis


@dataclass(frozen=True)
class PPO(Experiment):
    """What is trained: together these decide every bit of the trained parameters."""

    gae_lambda: float = 0.95
    """lambda of generalised advantage estimation"""
    update_epochs: int = 4
    """passes over each batch"""
    norm_adv: bool = True
    """normalise advantages over each minibatch"""
    clip_coef: float = 0.1
    """how far the probability ratio may leave 1 before it is clipped"""


def check(e: PPO, partition: Partition) -> None:
    """Raise `UsageError` for hyperparameters that do not fit."""
    require(0 <= e.gae_lambda <= 1, f"gae_lambda={e.gae_lambda} must lie in [0, 1]; set --gae-lambda accordingly")
    require(e.update_epochs >= 1, f"update_epochs={e.update_epochs} must be at least 1; set --update-epochs")
    require(0 < e.clip_coef, f"clip_coef={e.clip_coef} must be positive; set --clip-coef, say to 0.1")
    recurrent = e.core != "none"
    size = partition.envs_per_shard * (1 if recurrent else e.num_steps)
    fits = [m for m in range(1, size + 1) if size % m == 0]
    nearest = sorted(sorted(fits, key=lambda m: abs(m - e.num_minibatches))[:2])
    require(
        size % e.num_minibatches == 0,
        f"num_minibatches={e.num_minibatches} cannot cut a shard's {size} "
        + ("environments" if recurrent else f"transitions ({partition.envs_per_shard} environments x {e.num_steps} steps)")
        + f" evenly; try --num-minibatches {' or '.join(map(str, nearest))}",
    )


class State(NamedTuple):
    params: PyTree
    optimiser: PyTree
    updates: jax.Array  # int32: updates done


class Batch(NamedTuple):
    """One shard's rollout with what is computed from it once per update."""

    rollout: Rollout
    value: jax.Array  # [T, B]  of the learner's parameters before the update
    advantage: jax.Array  # [T, B]
    target: jax.Array  # [T, B]  of the value function


class Minibatch(NamedTuple):
    """Sequences [T', B'] of a batch: single transitions for a feed-forward policy, all steps for a recurrent one."""

    obs: PyTree  # [T', B', ...]
    first: jax.Array  # [T', B']
    carry: PyTree  # [B', ...]
    action: jax.Array
    valid: jax.Array
    log_prob: jax.Array
    advantage: jax.Array
    target: jax.Array


def make(e: PPO, spec: EnvSpec, platform: str) -> Algorithm:
    """PPO on environments that look like `spec`, on devices of kind `platform` ("cpu", "gpu" …)."""
    network = make_actor_critic(spec, e, platform)
    optimiser = optax.chain(optax.clip_by_global_norm(e.max_grad_norm), optax.scale_by_adam(eps=1e-5))
    recurrent = e.core != "none"

    # ---------------------------------------------------------------------------------------------- acting

    def init(key: jax.Array) -> State:
        obs = jax.tree.map(lambda o: jnp.zeros((1, 1, *o.shape), o.dtype), spec.obs)
        params = network.init(key, obs, jnp.zeros((1, 1), bool), initial(1))
        return State(params, optimiser.init(params), jnp.int32(0))

    def initial(batch: int) -> PyTree:
        return initial_carry(e.core, e.lstm_size, batch)

    def act(
        params: PyTree, carry: PyTree, obs: PyTree, first: jax.Array, key: jax.Array, explore: bool
    ) -> tuple[jax.Array, PyTree, PyTree]:
        out = network.apply(params, jax.tree.map(lambda o: o[None], obs), first[None], carry)
        logits = out.logits[0]
        action = jax.random.categorical(key, logits) if explore else logits.argmax(-1)
        log_prob, _ = log_prob_and_entropy(logits, action)
        return action.astype(jnp.int32), out.carry, {"log_prob": log_prob}

    # -------------------------------------------------------------------------------------------- learning

    def prepare(params: PyTree, rollout: Rollout) -> Batch:
        """Values, advantages and targets of one shard, all from the learner's parameters before the update."""
        value = values_of(params, rollout)  # [T+1, B]
        advantage = gae(value, rollout.reward, rollout.terminated, rollout.truncated, e.gamma, e.gae_lambda)
        return Batch(rollout, value[:-1], advantage, advantage + value[:-1])

    def values_of(params: PyTree, rollout: Rollout) -> jax.Array:
        if recurrent:
            return network.apply(params, rollout.obs, rollout.first, rollout.carry).value
        # Step by step: all of them at once would take T times the memory and not be faster.
        one = lambda x: network.apply(params, jax.tree.map(lambda o: o[None], x[0]), x[1][None], ()).value[0]
        return lax.map(one, (rollout.obs, rollout.first))

    def draw(key: jax.Array, batch: Batch) -> tuple[jax.Array, jax.Array]:
        """Time and environment indices [M, T', B'] of the minibatches of one epoch over one shard."""
        t, b = batch.rollout.action.shape
        m = e.num_minibatches
        if recurrent:
            env = jax.random.permutation(key, b).reshape(m, 1, b // m)
            return jnp.broadcast_to(jnp.arange(t)[None, :, None], (m, t, b // m)), jnp.broadcast_to(env, (m, t, b // m))
        index = jax.random.permutation(key, t * b).reshape(m, 1, t * b // m)
        return index // b, index % b

    def take(batch: Batch, index: tuple[jax.Array, jax.Array]) -> Minibatch:
        r = batch.rollout
        at = lambda x: x[index]
        carry = jax.tree.map(lambda c: c[index[1][0]], r.carry)
        return Minibatch(
            jax.tree.map(at, r.obs), at(r.first), carry, at(r.action), at(r.valid), at(r.extras["log_prob"]),
            at(batch.advantage), at(batch.target),
        )  # fmt: skip

    def loss(params: PyTree, mb: Minibatch, scale: "Scale") -> tuple[jax.Array, Metrics]:
        """This shard's part of the mean over the valid transitions of the minibatch, all shards together."""
        out = network.apply(params, mb.obs, mb.first, mb.carry)
        log_prob, entropy = log_prob_and_entropy(out.logits, mb.action)
        log_ratio = jnp.where(mb.valid, log_prob - mb.log_prob, 0.0)
        advantage = (mb.advantage - scale.mean) / scale.std
        mean = lambda x: jnp.where(mb.valid, x, 0.0).sum() / scale.count
        policy_loss = mean(ppo_policy_loss(log_ratio, advantage, e.clip_coef))
        value_loss = mean(squared_error(out.value, mb.target))
        entropy = mean(entropy)
        total = policy_loss - e.ent_coef * entropy + e.vf_coef * value_loss
        return total, {
            "losses/loss": total,
            "losses/policy_loss": policy_loss,
            "losses/value_loss": value_loss,
            "losses/entropy": entropy,
            "losses/approx_kl": mean(kl_estimate(log_ratio)),
            "losses/clipfrac": mean((jnp.abs(jnp.expm1(log_ratio)) > e.clip_coef).astype(jnp.float32)),
        }

    def apply_gradient(state: State, gradient: PyTree) -> tuple[State, jax.Array]:
        direction, optimiser_state = optimiser.update(gradient, state.optimiser, state.params)
        step = learning_rate(state)
        params = jax.tree.map(lambda p, d: p - step * d, state.params, direction)
        return State(params, optimiser_state, state.updates), optax.global_norm(gradient)

    def learning_rate(state: State) -> jax.Array:
        return e.learning_rate * (1.0 - state.updates / e.num_updates if e.anneal_lr else jnp.float32(1.0))

    def update(state: State, rollout: Rollout, shards: ShardAxis, key: jax.Array) -> tuple[State, Metrics]:
        batch = shards.map(lambda r: prepare(state.params, r), rollout)

        def epoch(state: State, number: jax.Array) -> tuple[State, Metrics]:
            shard_key = lambda shard: jax.random.fold_in(jax.random.fold_in(key, number), shard)
            index = shards.map(lambda b, shard: draw(shard_key(shard), b), batch, shards.index)  # [K', M, T', B']
            scale = advantage_scale(shards, batch, index, e.norm_adv)  # [M]

            def minibatch(state: State, inputs: tuple[jax.Array, Scale]) -> tuple[State, Metrics]:
                m, scale_m = inputs
                of_shard = lambda b, i: jax.grad(loss, has_aux=True)(
                    state.params, take(b, jax.tree.map(lambda x: x[m], i)), scale_m
                )
                gradient, metrics = shards.sum(shards.map(of_shard, batch, index))
                state, norm = shards.isolate(apply_gradient, state, gradient)
                return state, metrics | {"losses/grad_norm": norm}

            return lax.scan(minibatch, state, (jnp.arange(e.num_minibatches), scale))

        rate = learning_rate(state)
        state, metrics = lax.scan(epoch, state, jnp.arange(e.update_epochs))
        metrics = jax.tree.map(lambda x: x[-1].mean(), metrics)  # over the minibatches of the last epoch
        metrics |= {"losses/explained_variance": explained_variance(shards, batch), "charts/learning_rate": rate}
        return state._replace(updates=state.updates + 1), metrics

    return Algorithm(init, initial, act, update, actor_params=lambda state: state.params)


class Scale(NamedTuple):
    """How the advantages of a minibatch, all shards together, are normalised."""

    count: jax.Array  # valid transitions
    mean: jax.Array
    std: jax.Array


def advantage_scale(shards: ShardAxis, batch: Batch, index: Any, normalise: bool) -> Scale:
    """Count, mean and standard deviation of the valid advantages, per minibatch of an epoch.  Leaves [M]."""

    def moments(center: jax.Array) -> Any:
        def of_shard(b: Batch, i: Any) -> tuple[jax.Array, jax.Array]:
            valid = b.rollout.valid[i]
            x = b.advantage[i] - center[:, None, None]
            return valid.sum((1, 2)), jnp.where(valid, jnp.stack([x, x * x]), 0.0).sum((2, 3))

        return shards.sum(shards.map(of_shard, batch, index))

    zero = jnp.zeros(jax.tree.leaves(index)[0].shape[1])
    count, first = moments(zero)
    count = jnp.maximum(count, 1).astype(jnp.float32)
    if not normalise:
        return Scale(count, zero, zero + 1.0)
    mean = first[0] / count
    _, second = moments(mean)
    return Scale(count, mean, jnp.sqrt(second[1] / count) + 1e-8)


def explained_variance(shards: ShardAxis, batch: Batch) -> jax.Array:
    """1 - Var[target - value] / Var[target] over valid transitions; how well values predicted their targets."""

    def of_shard(b: Batch) -> jax.Array:
        error = b.target - b.value
        terms = jnp.stack([jnp.ones_like(error), error, error**2, b.target, b.target**2])
        return jnp.where(b.rollout.valid, terms, 0.0).sum((1, 2))

    n, e1, e2, t1, t2 = shards.sum(shards.map(of_shard, batch))
    n = jnp.maximum(n, 1.0)
    variance = t2 / n - (t1 / n) ** 2
    return jnp.where(variance > 0, 1.0 - (e2 / n - (e1 / n) ** 2) / variance, jnp.nan)
