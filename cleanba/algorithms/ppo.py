"""Proximal policy optimisation (Schulman et al. 2017), top to bottom: experiment, network, losses, update.

Implementation details are those of the original Cleanba and of CleanRL; `docs/algorithms/details.md` lists where not.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from cleanba.algorithm import Algorithm, Metrics
from cleanba.algorithms.batches import (
    LAG_LOGGED,
    count_pieces,
    count_valid,
    draw_epoch,
    explained_variance,
    in_pieces,
    outputs_over_time,
    version_distance,
)
from cleanba.algorithms.normalisation import ReturnsSoFar, make_normaliser
from cleanba.algorithms.optimiser import State, learning_rate, make_adam, optimiser_step
from cleanba.config import CLEANRL_ATARI, Count, Fraction, Partition, PolicyGradient, Positive, Range, Settings
from cleanba.networks import ActorCritic, make_actor_critic
from cleanba.networks.cores import Carry
from cleanba.ops.losses import clipped_squared_error, kl_estimate, ppo_policy_loss, squared_error
from cleanba.ops.returns import corrected_gae, gae
from cleanba.probes import probe
from cleanba.rollout import NetworkParams, Obs, PyTree, Rollout
from cleanba.shards import ShardAxis
from cleanba.specs import EnvSpec


@dataclass(frozen=True)
class PPO(PolicyGradient):
    """The experiment: these settings determine every bit of the trained parameters."""

    gae_lambda: Fraction = 0.95
    """lambda of generalised advantage estimation"""
    update_epochs: Count = 4
    """passes over each batch"""
    norm_adv: bool = True
    """normalise advantages over each minibatch"""
    clip_coef: Positive = 0.1
    """epsilon of the clipping range [1 - epsilon, 1 + epsilon]"""
    clip_vloss: bool = False
    """clip the change of values in an update to epsilon, too, as Baselines does"""
    lag_correction: Literal["none", "proximal", "decoupled", "vtrace", "both"] = "none"
    """correction for rollouts that are one policy version old; proximal: clip around the newest policy; decoupled: also
    weight by newest / behaviour policy; vtrace: correct advantages by V-trace; both: decoupled and vtrace
    (docs/inside/policy-lag.md)"""
    lag_weight_cap: Annotated[float, Range(1)] = 2.0
    """upper bound on the weight newest / behaviour policy (decoupled, both)"""
    lag_trace_cap: Annotated[float, Range(1)] = 1.0
    """upper bound on that ratio in V-trace: rho-bar and c-bar (vtrace, both)"""


# For vectors and codes with a few actions: small batches, separate networks for policy and value, and normalised
# observations and rewards.
SMALL = Settings(
    num_envs=32,
    num_steps=32,
    learning_rate=1e-3,
    hiddens=(64, 64),
    ent_coef=0.0,
    clip_coef=0.2,
    share_torso=False,
    norm_obs=True,
    norm_reward=True,
)

# By preset name (docs/reference/presets.md): differences from the defaults above, which are Cleanba's on Atari.
PRESETS: dict[str, Settings] = {
    "atari": Settings(num_actors=2, num_shards=6),
    # CleanRL's for continuous actions (`ppo_continuous_action.py`): 2,048 steps per update, here of 16 environments.
    # Acting and learning take turns: here a lag costs the most score, and concurrency saves no time on CPUs.  With
    # --concurrency the correction gives a part of the score back (docs/inside/policy-lag.md).
    "continuous": Settings(
        total_timesteps=1_000_000,
        num_envs=16,
        concurrency=False,
        learning_rate=3e-4,
        hiddens=(64, 64),
        ent_coef=0.0,
        update_epochs=10,
        num_minibatches=32,
        clip_coef=0.2,
        norm_obs=True,
        norm_reward=True,
        lag_correction="decoupled",
    ),
    # PureJaxRL's for MinAtar (Lu et al. 2022), but with the network of Young & Tian and a learning rate for it.
    "minatar": Settings(
        total_timesteps=10_000_000,
        num_envs=64,
        learning_rate=1e-3,
        hiddens=(128,),
        num_minibatches=8,
        clip_coef=0.2,
    ),
    "classic_control": Settings(**SMALL, total_timesteps=250_000),
    "box2d": Settings(
        **SMALL | dict(num_steps=128),
        total_timesteps=600_000,
        num_minibatches=16,
        gamma=0.999,
        gae_lambda=0.98,
    ),
    "minigrid": Settings(**SMALL | dict(ent_coef=0.01), total_timesteps=150_000),
    "toy_text": Settings(**SMALL | dict(num_steps=128), total_timesteps=400_000, num_minibatches=16),
}


# What CleanRL's two scripts for vectors share.  They act with the newest policy.
CLEANRL = Settings(
    num_actors=1,
    num_shards=1,
    concurrency=False,
    network="mlp",
    hiddens=(64, 64),
    core="none",
    share_torso=False,
    layer_norm=False,
    anneal_lr=True,
    gamma=0.99,
    gae_lambda=0.95,
    norm_adv=True,
    clip_coef=0.2,
    clip_vloss=True,
    vf_coef=0.5,
    max_grad_norm=0.5,
)

# By name, for --preset: published settings whole, so that no default is used.
PROTOCOLS: dict[str, Settings] = {
    # `ppo_atari_envpool_xla_jax.py`.  Its batches are small, so one actor and one shard are the fastest.
    "cleanrl-atari": Settings(
        **CLEANRL_ATARI,
        num_envs=8,
        num_actors=1,
        num_shards=1,
        num_steps=128,
        learning_rate=2.5e-4,
        anneal_lr=True,
        gamma=0.99,
        gae_lambda=0.95,
        num_minibatches=4,
        update_epochs=4,
        norm_obs=False,
        norm_reward=False,
        layer_norm=False,
        norm_adv=True,
        clip_coef=0.1,
        clip_vloss=False,
        ent_coef=0.01,
        vf_coef=0.5,
        max_grad_norm=0.5,
    ),
    # `ppo.py`
    "cleanrl-classic-control": Settings(
        **CLEANRL,
        total_timesteps=500_000,
        num_envs=4,
        num_steps=128,
        learning_rate=2.5e-4,
        num_minibatches=4,
        update_epochs=4,
        ent_coef=0.01,
        norm_obs=False,
        norm_reward=False,
    ),
    # `ppo_continuous_action.py`
    "cleanrl-continuous": Settings(
        **CLEANRL,
        total_timesteps=1_000_000,
        num_envs=1,
        num_steps=2048,
        learning_rate=3e-4,
        num_minibatches=32,
        update_epochs=10,
        ent_coef=0.0,
        norm_obs=True,
        norm_reward=True,
    ),
}


def check(e: PPO, partition: Partition) -> None:
    """Raise `UsageError` for hyperparameters that do not fit."""
    e.check_minibatches(partition, of_steps=e.core == "none")


LOGGED = {
    "losses/loss": "what is minimised: policy loss - ent_coef x entropy + vf_coef x value loss; last epoch",
    "losses/policy_loss": "clipped surrogate objective, negative; last epoch",
    "losses/value_loss": "half the squared error of the value function, clipped with --clip-vloss; last epoch",
    "losses/entropy": "entropy of the policy in nats; last epoch",
    "losses/approx_kl": "estimate of the KL divergence between clipping's centre and the new policy; last epoch",
    "losses/clipfrac": "share of the samples whose ratio left the clipping range; last epoch",
    "losses/first_ratio_deviation": "mean |ratio - 1| of the first minibatch, before any step; due to policy lag and "
    "rounding",
    "losses/explained_variance": "share of the value targets' variance that values explain before the update; up to 1",
    "losses/grad_norm": "global norm of the gradient before clipping; last epoch",
    "charts/learning_rate": "the optimiser's step size in this update",
    **LAG_LOGGED,
}


class Targets(NamedTuple):
    """Computed once per update, from a rollout and the learner's parameters before the update."""

    value: jax.Array  # [T, B]
    advantage: jax.Array  # [T, B]
    target: jax.Array  # [T, B]  of the value function
    log_ratio: jax.Array  # [T, B]  log(pi_prox / pi_b): pi_prox has the parameters before the update, pi_b acted
    center: jax.Array  # [T, B]  the log-probabilities around which the ratio is clipped
    weight: PyTree  # [T, B]  of the policy loss; () if all are 1


class Minibatch(NamedTuple):
    """Sequences [T', B'] of a batch: single transitions for a feed-forward policy, all steps for a recurrent one."""

    obs: Obs  # [T', B', ...]
    first: jax.Array  # [T', B']
    carry: PyTree  # [B', ...]
    action: jax.Array
    valid: jax.Array
    center: jax.Array
    weight: PyTree
    value: PyTree  # before the update; () without --clip-vloss
    advantage: jax.Array
    target: jax.Array


class Scale(NamedTuple):
    """How the advantages of a minibatch, all shards together, are normalised."""

    valid: jax.Array  # int32: number of valid transitions
    mean: jax.Array
    std: jax.Array


def make(
    e: PPO, spec: EnvSpec, platform: str, network_of: Callable[[EnvSpec, PPO], ActorCritic] = make_actor_critic
) -> Algorithm[State, ReturnsSoFar, PyTree, Carry]:
    """PPO on environments that look like `spec`, on `platform` ("cpu", "gpu" …); `network_of` makes the network."""
    normaliser = make_normaliser(e, spec)
    network = network_of(normaliser.network_spec(spec), e)
    optimiser = make_adam(eps=1e-5, max_norm=e.max_grad_norm)
    correction = e.lag_correction if e.concurrency else "none"  # without concurrency the newest policy acts
    weighted = correction in ("decoupled", "both")

    def init(key: jax.Array) -> State:
        params = network.initial_params(key)
        return State(params, optimiser.init(params), jnp.int32(0), normaliser.init())

    def prepare(params: NetworkParams, rollout: Rollout) -> Targets:
        """Values, advantages and targets of one shard's rollout [T(+1), B, ...], from one set of parameters.

        These parameters are the proximal policy pi_prox; pi_b, one version older, acted.  With the decoupled objective
        (Hilton et al. 2021), the loss is `ppo_policy_loss` around pi_prox, times pi_prox / pi_b:

            -min(pi / pi_b A, clip(pi / pi_prox, 1 - eps, 1 + eps) pi_prox / pi_b A)
        """
        out = outputs_over_time(e, platform, partial(network.outputs, params), rollout)  # [T+1, B]
        value, behaviour = out.value, rollout.extras["log_prob"]
        proximal = jax.tree.map(lambda x: x[:-1], out.policy).log_prob(rollout.action)
        log_ratio = jnp.where(rollout.valid, proximal - behaviour, 0.0)
        reward, terminated, truncated = rollout.reward, rollout.terminated, rollout.truncated
        if correction in ("vtrace", "both"):
            target, advantage = corrected_gae(
                value, log_ratio, reward, terminated, truncated, e.gamma, e.gae_lambda, e.lag_trace_cap
            )
        else:
            advantage = gae(value, reward, terminated, truncated, e.gamma, e.gae_lambda)
            target = advantage + value[:-1]
        center = behaviour if correction in ("none", "vtrace") else proximal
        weight = jnp.minimum(jnp.exp(log_ratio), e.lag_weight_cap) if weighted else ()
        return Targets(value[:-1], advantage, target, log_ratio, center, weight)

    def take(rollout: Rollout, targets: Targets, shard: jax.Array, t: jax.Array, b: jax.Array) -> Minibatch:
        """The steps [T', B'] of this device's shard number `shard`, of [K', T, B, ...]; no others are copied."""
        at = lambda x: x[shard, t, b]
        return Minibatch(
            obs=jax.tree.map(at, rollout.obs),
            first=at(rollout.first),
            carry=jax.tree.map(lambda c: c[shard, b[0]], rollout.carry),
            action=at(rollout.action),
            valid=at(rollout.valid),
            center=at(targets.center),
            weight=jax.tree.map(at, targets.weight),
            value=at(targets.value) if e.clip_vloss else (),
            advantage=at(targets.advantage),
            target=at(targets.target),
        )

    def loss(params: NetworkParams, mb: Minibatch, scale: Scale) -> tuple[jax.Array, Metrics]:
        """This shard's part of the mean over the valid transitions of the minibatch, all shards together."""
        out = network.outputs(params, mb.obs, mb.first, mb.carry)
        log_prob, entropy = out.policy.log_prob_and_entropy(mb.action)
        log_ratio = jnp.where(mb.valid, log_prob - mb.center, 0.0)
        advantage = (mb.advantage - scale.mean) / scale.std if e.norm_adv else mb.advantage
        mean = lambda x: jnp.where(mb.valid, x, 0.0).sum() / scale.valid
        surrogate = ppo_policy_loss(log_ratio, advantage, e.clip_coef)
        policy_loss = mean(mb.weight * surrogate if weighted else surrogate)
        if e.clip_vloss:
            value_loss = mean(clipped_squared_error(out.value, mb.value, mb.target, e.clip_coef))
        else:
            value_loss = mean(squared_error(out.value, mb.target))
        entropy = mean(entropy)
        total = policy_loss - e.ent_coef * entropy + e.vf_coef * value_loss
        return total, {
            "losses/loss": total,
            "losses/policy_loss": policy_loss,
            "losses/value_loss": value_loss,
            "losses/entropy": entropy,
            "losses/first_ratio_deviation": mean(jnp.abs(jnp.expm1(log_ratio))),
            "losses/approx_kl": mean(kl_estimate(log_ratio)),
            "losses/clipfrac": mean((jnp.abs(jnp.expm1(log_ratio)) > e.clip_coef).astype(jnp.float32)),
        }

    def update(
        state: State, memory: ReturnsSoFar, rollout: Rollout, shards: ShardAxis, key: jax.Array
    ) -> tuple[State, ReturnsSoFar, Metrics]:
        statistics, memory, rollout = normaliser.add(shards, state.statistics, memory, rollout)
        state = state._replace(statistics=statistics)
        targets = shards.map(partial(prepare, state.params), rollout)
        probe("targets", targets, per_shard=True)
        rate = learning_rate(e, e.learning_rate, state.updates)

        def epoch(state: State, number: jax.Array) -> tuple[State, Metrics]:
            t, b = draw_epoch(e, shards, key, number, rollout.valid)
            scale = advantage_scale(shards, targets.advantage, rollout.valid, t, b)  # [M]
            pieces = count_pieces(e, spec, platform, t)

            def minibatch(state: State, inputs: tuple[jax.Array, Scale]) -> tuple[State, Metrics]:
                m, scale_m = inputs
                part = lambda i: in_pieces(partial(take, rollout, targets, i), t[i, m], b[i, m], pieces)
                return optimiser_step(shards, optimiser, rate, state, loss, lambda i: (part(i), scale_m), pieces)

            return lax.scan(minibatch, state, (jnp.arange(e.num_minibatches), scale))

        state, metrics = lax.scan(epoch, state, jnp.arange(e.update_epochs))
        first = metrics["losses/first_ratio_deviation"][0, 0]
        metrics = jax.tree.map(lambda x: x[-1].mean(), metrics)  # over the minibatches of the last epoch
        metrics |= {
            "losses/first_ratio_deviation": first,
            "losses/explained_variance": explained_variance(shards, targets.value, targets.target, rollout.valid),
            "charts/learning_rate": rate,
            **version_distance(shards, targets.log_ratio, rollout.valid),
        }
        return state._replace(updates=state.updates + 1), memory, metrics

    act, inspect = normaliser.normalising(network.act), normaliser.normalising(network.inspect)
    return Algorithm(
        init, normaliser.init_memory, network.initial_carry, act, update, normaliser.acting_params, inspect
    )


def advantage_scale(shards: ShardAxis, advantage: jax.Array, valid: jax.Array, t: jax.Array, b: jax.Array) -> Scale:
    """Count, mean and standard deviation of the valid advantages of each minibatch, over all shards.

    advantage, valid [K', T, B]; t, b [K', M, T', B'] -> leaves [M].
    """

    def total(terms: Callable[[jax.Array], jax.Array]) -> jax.Array:
        """Sums of terms(advantages) [..., M, T', B'] over each minibatch's valid transitions of all shards."""

        def of_shard(advantage: jax.Array, valid: jax.Array, t: jax.Array, b: jax.Array) -> jax.Array:
            return jnp.where(valid[t, b], terms(advantage[t, b]), 0.0).sum((-2, -1))

        return shards.sum(shards.map(of_shard, advantage, valid, t, b))

    count = count_valid(shards, valid, t, b)
    # The ones are not used.  Without them XLA would add the advantages in another order on CPUs, so that bits would
    # differ from those of earlier versions.
    mean = total(lambda x: jnp.stack([jnp.ones_like(x), x]))[1] / count
    square = total(lambda x: (x - mean[:, None, None]) ** 2)
    return Scale(count, mean, jnp.sqrt(square / count) + 1e-8)
