"""IMPALA (Espeholt et al. 2018), top to bottom: experiment, network, losses, update.

The sections are those of `ppo.py`, so that the files differ where the algorithms do.  PPO also logs statistics of
values and of the policy lag, from a pass over the whole rollout.  IMPALA has no such pass.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Annotated, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from cleanba.algorithm import Algorithm, Metrics
from cleanba.algorithms.batches import count_pieces, count_valid, in_pieces, sequences
from cleanba.algorithms.normalisation import ReturnsSoFar, make_normaliser
from cleanba.algorithms.optimiser import State, by_rule, learning_rate, optimiser_step
from cleanba.config import (
    CLEANRL_ATARI,
    Count,
    Fraction,
    Partition,
    PolicyGradient,
    Positive,
    PositiveOrInf,
    Range,
    Settings,
)
from cleanba.networks import ActorCritic, make_actor_critic
from cleanba.networks.cores import Carry
from cleanba.ops.losses import kl_estimate, squared_error
from cleanba.ops.returns import vtrace
from cleanba.rollout import NetworkParams, Obs, PyTree, Rollout
from cleanba.shards import ShardAxis
from cleanba.specs import EnvSpec


@dataclass(frozen=True)
class IMPALA(PolicyGradient):
    """The experiment: these settings determine every bit of the trained parameters."""

    num_steps: int = 20
    learning_rate: float = 6e-4
    """optimiser's step size at the start"""
    max_grad_norm: float = 40.0
    update_epochs: Count = 1
    """passes over each batch, with V-trace's targets computed anew for every minibatch (IMPACT, Luo et al. 2020)"""
    loss_scale: Positive = 640.0
    """factor on the mean loss; 640 gives the gradient of the original Cleanba, which sums over its default minibatch"""
    vtrace_lambda: Fraction = 1.0
    """lambda of V-trace"""
    rho_clip: PositiveOrInf = 1.0
    """V-trace's bound on importance ratios (rho-bar); decides what the value function converges to"""
    c_clip: PositiveOrInf = 1.0
    """V-trace's bound on trace coefficients (c-bar); decides how fast it converges"""
    rmsprop_decay: Annotated[float, Range(0, 1, open_high=True)] = 0.99
    """RMSProp: decay of the mean squared gradient"""
    rmsprop_eps: Positive = 0.01
    """RMSProp: added to the root of the mean squared gradient, as PyTorch does"""


# For vectors and codes with a few actions: many small updates, separate networks for policy and value, and normalised
# observations and rewards.
SMALL = Settings(
    num_envs=32,
    num_steps=16,
    learning_rate=2e-3,
    hiddens=(64, 64),
    ent_coef=0.001,
    max_grad_norm=0.5,
    num_minibatches=1,
    loss_scale=1.0,
    vtrace_lambda=0.95,
    rmsprop_eps=1e-5,
    share_torso=False,
    norm_obs=True,
    norm_reward=True,
)

# By preset name (docs/reference/presets.md): differences from the defaults above, which are Cleanba's on Atari.
PRESETS: dict[str, Settings] = {
    "atari": Settings(num_actors=2, num_shards=6, env_epoch=3200),
    # Many updates, as small as A2C's in RL Baselines3 Zoo: each sample is used once.
    "continuous": Settings(
        total_timesteps=1_000_000,
        num_envs=8,
        num_steps=8,
        env_epoch=5000,
        learning_rate=2e-3,
        hiddens=(64, 64),
        ent_coef=0.0,
        max_grad_norm=0.5,
        num_minibatches=1,
        loss_scale=1.0,
        vtrace_lambda=0.9,
        rmsprop_eps=1e-5,
        norm_obs=True,
        norm_reward=True,
    ),
    # Many small updates, as above, with enough steps to keep a loop over JAX environments busy.  Each batch is learnt
    # from four times: once is too little on Breakout and Seaquest (docs/algorithms/impala.md).
    "minatar": Settings(
        total_timesteps=10_000_000,
        num_envs=64,
        num_steps=16,
        env_epoch=4000,
        learning_rate=1e-3,
        hiddens=(128,),
        max_grad_norm=0.5,
        num_minibatches=4,
        update_epochs=4,
        loss_scale=1.0,
        rmsprop_eps=1e-5,
    ),
    "classic_control": Settings(**SMALL, total_timesteps=300_000),
    "minigrid": Settings(**SMALL, total_timesteps=150_000),
    "toy_text": Settings(**SMALL, total_timesteps=500_000),
    "box2d": Settings(**SMALL | dict(gamma=0.999), total_timesteps=1_000_000),
}


# By name, for --preset: on CleanRL's games, with the settings of IMPALA's own preset for Atari.
PROTOCOLS: dict[str, Settings] = {"cleanrl-atari": CLEANRL_ATARI | PRESETS["atari"]}


def check(e: IMPALA, partition: Partition) -> None:
    """Raise `UsageError` for hyperparameters that do not fit."""
    e.check_minibatches(partition, of_steps=False)


LOGGED = {
    "losses/loss": "policy loss - ent_coef x entropy + vf_coef x value loss, before it is scaled by loss_scale",
    "losses/policy_loss": "-log pi(a|s) x V-trace's advantage",
    "losses/value_loss": "half the squared error between values and V-trace's targets",
    "losses/entropy": "entropy of the policy in nats",
    "losses/importance_ratio": "mean ratio of the learner's policy to the one that acted, unclipped",
    "losses/first_ratio_deviation": "mean |ratio - 1| of the first minibatch, before any step",
    "losses/grad_norm": "global norm of the gradient of the scaled loss, before clipping",
    "stats/lag_kl": "estimate of KL(policy that acted || newest policy) over the first minibatch, before any step",
    "charts/learning_rate": "the optimiser's step size in this update",
}


class Minibatch(NamedTuple):
    """All steps of some environments of one shard."""

    obs: Obs  # [T+1, B', ...]
    first: jax.Array  # [T+1, B']
    carry: PyTree  # [B', ...]
    action: jax.Array  # [T, B']
    reward: jax.Array
    terminated: jax.Array
    truncated: jax.Array
    valid: jax.Array
    log_prob: jax.Array


def make(
    e: IMPALA, spec: EnvSpec, platform: str, network_of: Callable[[EnvSpec, IMPALA], ActorCritic] = make_actor_critic
) -> Algorithm[State, ReturnsSoFar, PyTree, Carry]:
    """IMPALA on environments that look like `spec`, on `platform` ("cpu", "gpu" …); `network_of` makes the network."""
    normaliser = make_normaliser(e, spec)
    network = network_of(normaliser.network_spec(spec), e)
    rule = optax.scale_by_rms(e.rmsprop_decay, e.rmsprop_eps, eps_in_sqrt=False)
    optimiser = by_rule(rule, e.max_grad_norm)

    def init(key: jax.Array) -> State:
        params = network.initial_params(key)
        return State(params, optimiser.init(params), jnp.int32(0), normaliser.init())

    def draw(valid: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Time and environment indices [M, T, B'] of the minibatches over one shard [T, B].

        Every M-th environment, so that a minibatch holds the same ones for every number of shards.
        """
        (t, b), m = valid.shape, e.num_minibatches
        return sequences(t, jnp.arange(b).reshape(b // m, m).T)

    def take(rollout: Rollout, shard: jax.Array, t: jax.Array, b: jax.Array) -> Minibatch:
        """The steps [T, B'] with these indices of one of this device's shards [K', T, B, ...]; only they are copied."""
        at = lambda x: x[shard, t, b]
        and_after = lambda x: x[shard, jnp.concatenate([t, t[-1:] + 1]), jnp.concatenate([b, b[-1:]])]
        return Minibatch(
            obs=jax.tree.map(and_after, rollout.obs),
            first=and_after(rollout.first),
            carry=jax.tree.map(lambda c: c[shard, b[0]], rollout.carry),
            action=at(rollout.action),
            reward=at(rollout.reward),
            terminated=at(rollout.terminated),
            truncated=at(rollout.truncated),
            valid=at(rollout.valid),
            log_prob=at(rollout.extras["log_prob"]),
        )

    def loss(params: NetworkParams, mb: Minibatch, valid: jax.Array) -> tuple[jax.Array, Metrics]:
        """This shard's part of the mean over the valid transitions of the minibatch, all shards together."""
        out = network.outputs(params, mb.obs, mb.first, mb.carry)  # the last value is only for bootstrapping
        acted = jax.tree.map(lambda x: x[:-1], out.policy)
        log_prob, entropy = acted.log_prob_and_entropy(mb.action)
        log_ratio = jnp.where(mb.valid, log_prob - mb.log_prob, 0.0)
        estimate = lax.stop_gradient(
            vtrace(
                out.value, log_ratio, mb.reward, mb.terminated, mb.truncated,
                e.gamma, e.vtrace_lambda, e.rho_clip, e.c_clip,
            )
        )  # fmt: skip
        mean = lambda x: jnp.where(mb.valid, x, 0.0).sum() / valid
        policy_loss = mean(-log_prob * estimate.advantage)
        value_loss = mean(squared_error(out.value[:-1], estimate.value))
        entropy = mean(entropy)
        total = policy_loss - e.ent_coef * entropy + e.vf_coef * value_loss
        return e.loss_scale * total, {
            "losses/loss": total,
            "losses/policy_loss": policy_loss,
            "losses/value_loss": value_loss,
            "losses/entropy": entropy,
            "losses/first_ratio_deviation": mean(jnp.abs(jnp.expm1(log_ratio))),
            "losses/importance_ratio": mean(jnp.exp(log_ratio)),
            "stats/lag_kl": mean(kl_estimate(log_ratio)),
        }

    def update(
        state: State, memory: ReturnsSoFar, rollout: Rollout, shards: ShardAxis, key: jax.Array
    ) -> tuple[State, ReturnsSoFar, Metrics]:
        statistics, memory, rollout = normaliser.add(shards, state.statistics, memory, rollout)
        state = state._replace(statistics=statistics)
        rate = learning_rate(e, e.learning_rate, state.updates)
        t, b = shards.map(draw, rollout.valid)
        valid = count_valid(shards, rollout.valid, t, b)  # [M]
        pieces = count_pieces(e, spec, platform, t)

        def minibatch(state: State, inputs: tuple[jax.Array, jax.Array]) -> tuple[State, Metrics]:
            m, valid_m = inputs
            part = lambda i: in_pieces(partial(take, rollout, i), t[i, m], b[i, m], pieces)
            return optimiser_step(shards, optimiser, rate, state, loss, lambda i: (part(i), valid_m), pieces)

        in_turn = jnp.tile(jnp.arange(e.num_minibatches), e.update_epochs)
        state, metrics = lax.scan(minibatch, state, (in_turn, valid[in_turn]))
        first = {name: metrics[name][0] for name in ("losses/first_ratio_deviation", "stats/lag_kl")}
        metrics = jax.tree.map(lambda x: x.mean(), metrics)  # over the minibatches of all epochs
        metrics |= first | {"charts/learning_rate": rate}
        return state._replace(updates=state.updates + 1), memory, metrics

    act, inspect = normaliser.normalising(network.act), normaliser.normalising(network.inspect)
    return Algorithm(
        init, normaliser.init_memory, network.initial_carry, act, update, normaliser.acting_params, inspect
    )
