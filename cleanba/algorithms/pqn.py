"""Parallelised Q-network (PQN; Gallici et al. 2024), top to bottom: experiment, network, losses, update.

Q-learning from rollouts alone, without replay and without a target network: layer normalisation keeps it stable.  The
sections are those of `ppo.py`; settings are the authors' (`purejaxql`), with a preset for each group of environments.
"""

from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from cleanba.algorithm import Algorithm, Metrics
from cleanba.algorithms.action_bounds import require_choice
from cleanba.algorithms.batches import (
    count_pieces,
    count_steps,
    count_valid,
    draw_epoch,
    explained_variance,
    in_pieces,
    outputs_over_time,
)
from cleanba.algorithms.epsilon_greedy import epsilon_greedy, falling_epsilon, greedy, legal_values
from cleanba.algorithms.normalisation import ReturnsSoFar, make_normaliser
from cleanba.algorithms.optimiser import State, learning_rate, make_adam, optimiser_step
from cleanba.config import CLEANRL_GAMES, Count, Fraction, FromRollouts, Partition, Settings
from cleanba.networks import make_action_values
from cleanba.networks.cores import Carry
from cleanba.ops.losses import by_comparison, squared_error
from cleanba.ops.returns import lambda_returns
from cleanba.probes import probe
from cleanba.rollout import NetworkParams, Obs, PyTree, Rollout
from cleanba.shards import ShardAxis
from cleanba.specs import EnvSpec


@dataclass(frozen=True)
class PQN(FromRollouts):
    """The experiment: these settings determine every bit of the trained parameters."""

    total_timesteps: int = 10_000_000
    num_envs: int = 128
    num_steps: int = 32
    anneal_lr: bool = False
    layer_norm: bool = True
    """layer normalisation after every layer of the torso, which takes the place of a target network"""
    max_grad_norm: float = 10.0
    num_minibatches: int = 32

    update_epochs: Count = 2
    """passes over each batch"""
    q_lambda: Fraction = 0.65
    """lambda of the lambda-returns: 0 bootstraps after one step, 1 only at the rollout's end"""
    watkins_cut: bool = False
    """Watkins' Q(lambda): cut lambda-returns before actions that are not the newest network's best"""
    start_e: Fraction = 1.0
    """probability of a random action at the start"""
    end_e: Fraction = 0.001
    """probability of a random action at the end of the exploration"""
    exploration_fraction: Fraction = 0.1
    """fraction of the run over which that probability falls linearly"""

    @property
    def schedules(self) -> tuple[str, ...]:
        """See `Experiment`."""
        return (*super().schedules, "exploration_fraction")


# For vectors and codes: the authors' settings for CartPole and Acrobot.
SMALL = Settings(
    num_envs=32,
    num_steps=64,
    learning_rate=1e-4,
    anneal_lr=True,
    hiddens=(256, 256),
    num_minibatches=16,
    update_epochs=4,
    q_lambda=0.95,
    end_e=0.2,
    exploration_fraction=0.2,
)

# For environments that the authors have no settings for: a larger learning rate, and fewer random actions at the end.
QUICK = SMALL | Settings(learning_rate=5e-4, end_e=0.05)

# By preset name (docs/reference/presets.md): what differs from the values above, the authors' on Atari.
PRESETS: dict[str, Settings] = {
    "atari": Settings(num_actors=2, network="nature", hiddens=(512,)),
    "minatar": Settings(learning_rate=5e-4, anneal_lr=True, hiddens=(128,), end_e=0.05),
    "classic_control": Settings(**SMALL, total_timesteps=500_000),
    "minigrid": Settings(**QUICK, total_timesteps=150_000),
    "toy_text": Settings(**QUICK, total_timesteps=500_000),
    "box2d": Settings(**QUICK, total_timesteps=1_000_000),
}

# By name, for --preset: published settings whole, so that no default is used.  CleanRL's squared errors are not
# halved, and so its gradients are twice as large before they are clipped.
CLEANRL = Settings(
    num_actors=1,
    num_shards=1,
    num_steps=128,
    learning_rate=2.5e-4,
    anneal_lr=True,
    gamma=0.99,
    layer_norm=True,
    max_grad_norm=5.0,
    num_minibatches=4,
    update_epochs=4,
    q_lambda=0.65,
    watkins_cut=False,
    start_e=1.0,
    norm_obs=False,
    norm_reward=False,
)
GAMES = CLEANRL_GAMES | Settings(core="none")
PROTOCOLS: dict[str, Settings] = {
    # `pqn_atari_envpool.py`
    "cleanrl-atari": Settings(**CLEANRL, **GAMES, num_envs=8, end_e=0.01, exploration_fraction=0.1),
    # `pqn_atari_envpool_lstm.py`: one frame at a time
    "cleanrl-atari-lstm": Settings(
        **CLEANRL | GAMES | dict(core="lstm", max_grad_norm=0.25, env_options=("noop_max=30", "stack_num=1")),
        num_envs=8,
        lstm_size=128,
        forget_bias=0.0,
        end_e=0.01,
        exploration_fraction=0.1,
    ),
    # `pqn.py`
    "cleanrl-classic-control": Settings(
        **CLEANRL,
        total_timesteps=500_000,
        num_envs=4,
        network="mlp",
        hiddens=(120, 84),
        core="none",
        end_e=0.05,
        exploration_fraction=0.5,
    ),
}


def check(e: PQN, partition: Partition) -> None:
    """Raise `UsageError` for hyperparameters that do not fit."""
    e.check_minibatches(partition, of_steps=e.core == "none")


class ActingParams(NamedTuple):
    """What acting needs of the learner's state."""

    params: PyTree  # of the network; where observations are normalised, with their statistics
    updates: jax.Array  # [] int32, which the exploration rate depends on


LOGGED = {
    "losses/td_loss": "half the squared error between action values and lambda-returns; last epoch",
    "losses/q_values": "mean action value of the actions taken; last epoch",
    "losses/explained_variance": "share of the lambda-returns' variance that action values explain before the update; "
    "up to 1",
    "losses/grad_norm": "global norm of the gradient before clipping; last epoch",
    "charts/learning_rate": "the optimiser's step size in this update",
    "charts/epsilon": "probability of a random action of the policy before this update, which collects the next "
    "rollout (with --no-concurrency: this one)",
    "stats/greedy_actions": "share of the rollout's actions that the newest network would have chosen without "
    "exploration",
}


class Targets(NamedTuple):
    """Computed once per update, from a rollout and the learner's parameters before the update."""

    value: jax.Array  # [T, B]  of the actions taken
    greedy: jax.Array  # [T, B]  bool: whether they are the best ones
    target: jax.Array  # [T, B]  the lambda-returns


class Minibatch(NamedTuple):
    """Sequences [T', B'] of a batch: single transitions for a feed-forward network, all steps for a recurrent one."""

    obs: Obs  # [T', B', ...]
    first: jax.Array  # [T', B']
    carry: PyTree  # [B', ...]
    action: jax.Array
    valid: jax.Array
    target: jax.Array


def make(e: PQN, spec: EnvSpec, platform: str) -> Algorithm[State, ReturnsSoFar, ActingParams, Carry]:
    """PQN on environments that look like `spec`, on `platform` ("cpu", "gpu" …)."""
    require_choice(spec, "PQN")
    normaliser = make_normaliser(e, spec)
    network = make_action_values(normaliser.network_spec(spec), e)
    one_step = normaliser.normalising(network.one_step)
    optimiser = make_adam(max_norm=e.max_grad_norm, rectified=True)

    def init(key: jax.Array) -> State:
        params = network.initial_params(key)
        return State(params, optimiser.init(params), jnp.int32(0), normaliser.init())

    def act(
        params: ActingParams, carry: Carry, obs: Obs, first: jax.Array, key: jax.Array, explore: bool
    ) -> tuple[jax.Array, Carry, PyTree]:
        values, carry = one_step(params.params, carry, obs, first)
        if not explore:
            return greedy(spec, values, obs), carry, {}
        return epsilon_greedy(spec, values, obs, falling_epsilon(e, params.updates), key), carry, {}

    def prepare(params: NetworkParams, rollout: Rollout) -> Targets:
        """Lambda-returns of one shard's rollout [T(+1), B, ...], from one set of parameters: the newest.

        The policy that acted is one version older and took some random actions.  Without Watkins' cut the rewards are
        those of that policy, as in the paper and in Peng & Williams (1996), while bootstraps are the greedy policy's.
        """
        values = outputs_over_time(e, platform, partial(network.outputs, params), rollout).values  # [T+1, B, A]
        legal = legal_values(spec, values, rollout.obs)
        best = legal[:-1].argmax(-1) == rollout.action
        target = lambda_returns(
            *(legal.max(-1), rollout.reward, rollout.terminated, rollout.truncated, e.gamma, e.q_lambda),
            follow=best if e.watkins_cut else None,
        )
        return Targets(by_comparison(values[:-1], rollout.action), best, target)

    def take(rollout: Rollout, targets: Targets, shard: jax.Array, t: jax.Array, b: jax.Array) -> Minibatch:
        """The steps [T', B'] of this device's shard number `shard`, of [K', T, B, ...]; no others are copied."""
        at = lambda x: x[shard, t, b]
        return Minibatch(
            obs=jax.tree.map(at, rollout.obs),
            first=at(rollout.first),
            carry=jax.tree.map(lambda c: c[shard, b[0]], rollout.carry),
            action=at(rollout.action),
            valid=at(rollout.valid),
            target=at(targets.target),
        )

    def loss(params: NetworkParams, mb: Minibatch, count: jax.Array) -> tuple[jax.Array, Metrics]:
        """This shard's part of the mean over the `count` valid transitions of the minibatch, all shards together.

        (Q(s, a) - G)^2 / 2 (Gallici et al. 2024, algorithm 1).
        """
        value = by_comparison(network.outputs(params, mb.obs, mb.first, mb.carry).values, mb.action)
        mean = lambda x: jnp.where(mb.valid, x, 0.0).sum() / count
        error = mean(squared_error(value, mb.target))
        return error, {"losses/td_loss": error, "losses/q_values": mean(value)}

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
            count = count_valid(shards, rollout.valid, t, b)  # [M]
            pieces = count_pieces(e, spec, platform, t)

            def minibatch(state: State, inputs: tuple[jax.Array, jax.Array]) -> tuple[State, Metrics]:
                m, count_m = inputs
                part = lambda i: in_pieces(partial(take, rollout, targets, i), t[i, m], b[i, m], pieces)
                return optimiser_step(shards, optimiser, rate, state, loss, lambda i: (part(i), count_m), pieces)

            return lax.scan(minibatch, state, (jnp.arange(e.num_minibatches), count))

        state, metrics = lax.scan(epoch, state, jnp.arange(e.update_epochs))
        best = shards.map(lambda best, valid: (best & valid).sum(dtype=jnp.int32), targets.greedy, rollout.valid)
        metrics = jax.tree.map(lambda x: x[-1].mean(), metrics)  # over the minibatches of the last epoch
        metrics |= {
            "losses/explained_variance": explained_variance(shards, targets.value, targets.target, rollout.valid),
            "charts/learning_rate": rate,
            "charts/epsilon": falling_epsilon(e, state.updates),
            "stats/greedy_actions": shards.sum(best) / count_steps(shards, rollout.valid),
        }
        return state._replace(updates=state.updates + 1), memory, metrics

    def acting_params(state: State) -> ActingParams:
        return ActingParams(normaliser.acting_params(state), state.updates)

    def inspect(params: ActingParams, carry: Carry, obs: Obs, first: jax.Array) -> dict[str, jax.Array]:
        values = one_step(params.params, carry, obs, first).values
        return {"value": legal_values(spec, values, obs).max(-1), "action value": values}

    return Algorithm(init, normaliser.init_memory, network.initial_carry, act, update, acting_params, inspect)
