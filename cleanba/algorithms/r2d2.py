"""Recurrent replay distributed DQN (R2D2; Kapturowski et al. 2019), top to bottom: experiment, network, losses, update.

Deep Q-learning with an LSTM, from sequences that replay keeps together with the recurrent state before them, and draws
by priority.  The sections are those of `dqn.py`; settings are the paper's and Acme's, with a preset for each group of
environments.
"""

from dataclasses import dataclass
from functools import partial
from typing import Annotated, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from cleanba.algorithm import Algorithm, Metrics
from cleanba.algorithms.action_bounds import require_choice
from cleanba.algorithms.epsilon_greedy import epsilon_greedy, greedy, legal_values
from cleanba.algorithms.gradient_steps import (
    PRIORITY_LOGGED,
    REPLAY_FILLED,
    REPLAY_LOGGED,
    Prioritised,
    every,
    prioritised_steps,
)
from cleanba.algorithms.normalisation import Statistics, make_normaliser
from cleanba.algorithms.off_policy import PrioritisedReplay, check_replay, stacked_frames
from cleanba.algorithms.optimiser import TrainState, learning_rate, make_adam, optimiser_step_with_errors
from cleanba.config import (
    Count,
    Fraction,
    NotNegative,
    Partition,
    Positive,
    Range,
    Recurrent,
    Settings,
    Steps,
    require,
)
from cleanba.kernels import polyak_update
from cleanba.networks import make_action_values
from cleanba.networks.cores import Carry
from cleanba.ops import replay
from cleanba.ops.losses import by_comparison, squared_error
from cleanba.ops.returns import n_step_targets, rescale, unscale
from cleanba.rollout import NetworkParams, Obs, PyTree, Rollout
from cleanba.shards import ShardAxis
from cleanba.specs import EnvSpec


@dataclass(frozen=True)
class R2D2(PrioritisedReplay, Recurrent):
    """The experiment: these settings determine every bit of the trained parameters."""

    total_timesteps: int = 50_000_000
    num_envs: int = 64
    num_steps: int = 40
    """steps per environment in each rollout; a sequence begins with each rollout"""
    gamma: Fraction = 0.997
    hiddens: tuple[int, ...] = (512,)
    core: Literal["none", "lstm"] = "lstm"
    lstm_size: int = 512
    norm_obs: bool = False
    """normalise observations by their running mean and standard deviation; images, boards of planes, masks and booleans
    stay as they are; codes and text are first encoded as zeros and ones"""

    learning_rate: Positive = 1e-4
    """optimiser's step size at the start"""
    adam_eps: Positive = 1e-3
    """Adam: added to the root of the second moment"""
    max_grad_norm: Positive = 40.0
    """global norm to which gradients are clipped"""
    buffer_size: int = 1_000_000
    learning_starts: int = 80_000
    batch_size: int = 64
    """sequences in one gradient step, over all shards"""
    train_frequency: int = 640
    sequence_length: Count = 80
    """training steps of a sequence, after burn-in"""
    burn_in: Annotated[int, Range(0, 10**6, unit="steps")] = 40
    """steps before them that only warm up the recurrent state"""
    n_step: Steps = 5
    """n of the n-step return: rewards that a target adds up before it bootstraps"""
    rescale: bool = True
    """learn h(Q) in place of Q, which makes large values small (h(x) = sign(x) (sqrt(abs(x) + 1) - 1) + eps x)"""
    rescale_eps: NotNegative = 1e-3
    """eps of h"""
    target_network_frequency: Count = 2500
    """gradient steps between updates of the target network"""
    tau: float = 1.0
    double: bool = True
    """double Q-learning: the online network chooses the next action, the target network evaluates it"""
    dueling: bool = True
    """dueling heads: a state value plus action advantages"""
    priority_exponent: float = 0.9
    importance_exponent: float = 0.6
    importance_exponent_end: float = 0.6
    priority_max_weight: Fraction = 0.9
    """weight of a sequence's largest absolute error in its priority; the mean absolute error has the rest"""
    explore_base: Fraction = 0.4
    """how often environments take random actions (environment i of N with probability
    explore_base^(1 + explore_power i / (N - 1)))"""
    explore_power: NotNegative = 7.0
    """exponent of this formula; the larger, the less later environments explore"""

    @property
    def schedules(self) -> tuple[str, ...]:
        """See `Experiment`."""
        return (*super().schedules, "importance_exponent_end")

    @property
    def norm_reward(self) -> bool:
        """Rewards are not scaled: targets are rescaled instead."""
        return False


# For vectors and codes: short sequences, a small network, and a target network that follows sooner.  Adam's epsilon is
# 0.001 x sequence_length: the settings were measured with the mean over a sequence's steps; the loss is now their sum.
SMALL = Settings(
    num_envs=16,
    num_steps=16,
    hiddens=(128,),
    lstm_size=128,
    learning_rate=5e-4,
    adam_eps=0.032,
    buffer_size=100_000,
    learning_starts=4_096,
    batch_size=32,
    train_frequency=16,
    sequence_length=32,
    burn_in=16,
    gamma=0.99,
    target_network_frequency=200,
    explore_power=3.0,
)

# For tasks that are decided within a few steps but need much experience: shorter sequences, fewer gradient steps.
SHORT = Settings(
    num_steps=10,
    hiddens=(64,),
    lstm_size=64,
    adam_eps=0.02,
    batch_size=16,
    train_frequency=32,
    sequence_length=20,
    burn_in=10,
)

# By preset name (docs/reference/presets.md): what differs from the values above, those for Atari.
PRESETS: dict[str, Settings] = {
    # Rescaled values need no clipped rewards (section 2.3).
    "atari": Settings(network="nature", reward_clip=False),
    "classic_control": Settings(**SMALL, total_timesteps=250_000),
    "minigrid": Settings(
        **SMALL | SHORT | dict(num_envs=32, norm_obs=True, forget_bias=2.0, explore_power=2.0),
        total_timesteps=1_000_000,
    ),
    "toy_text": Settings(**SMALL, total_timesteps=250_000),
    "box2d": Settings(**SMALL, total_timesteps=1_000_000),
    "minatar": Settings(**SMALL | dict(num_envs=64, train_frequency=64), total_timesteps=10_000_000),
}


def check(e: R2D2, partition: Partition) -> None:
    """Raise `UsageError` for hyperparameters that do not fit."""
    length, steps = e.burn_in + e.sequence_length, e.num_steps
    update = steps * e.num_envs
    whole, run = -(-length // steps) * update, e.num_updates * update
    longer = 5 * max(whole, e.first_to_learn * update)
    require(
        whole <= run,
        f"total_timesteps={e.total_timesteps} ends before the first whole sequence (burn_in={e.burn_in} + "
        f"sequence_length={e.sequence_length}), which takes {whole} steps; try --total-timesteps {longer}, or "
        "shorter sequences",
    )
    rows, needed = e.buffer_size // e.num_envs, length + 2 * steps + 8
    require(
        rows >= needed,
        f"buffer_size={e.buffer_size} holds {rows} steps of an environment, but sequences of {length} steps (burn_in="
        f"{e.burn_in} + sequence_length={e.sequence_length}) and rollouts of {steps} need {needed}; try --buffer-size "
        f"{needed * e.num_envs} or more, or shorter sequences",
    )
    check_replay(e, partition, earliest=whole)
    require(
        e.learning_starts >= whole,
        f"learning_starts={e.learning_starts} comes before the first whole sequence, which ends after {whole} steps; "
        f"try --learning-starts {whole} or more",
    )


class State(NamedTuple):
    """The learner's state."""

    online: TrainState
    target: NetworkParams
    updates: jax.Array  # int32: updates done
    since_target: jax.Array  # int32: gradient steps since the target network was updated
    statistics: Statistics  # of observations


class ActingCarry(NamedTuple):
    """What acting carries from step to step in B environments."""

    core: Carry  # the network's, which is stored with sequences
    env: jax.Array  # [B] int32: the environments' numbers, which their exploration depends on


LOGGED = {
    "losses/td_loss": "half the squared temporal-difference error of rescaled values, importance-weighted; mean over "
    "the steps of all sequences, where ignored steps count as 0",
    "losses/q_values": "mean (rescaled) action value of the replayed actions; ignored steps count as 0",
    "losses/grad_norm": "global norm of the gradient before clipping",
    REPLAY_FILLED: REPLAY_LOGGED[REPLAY_FILLED],
    **PRIORITY_LOGGED,
    "charts/learning_rate": "the optimiser's step size in this update",
}


def exploration(e: R2D2) -> np.ndarray:
    """The probability of a random action in each environment, eps^(1 + alpha i / (N - 1)).  [N] float32.

    (Horgan et al. 2018, section 4.1.)  Computed on the host: compiled, the power could round differently by how many
    environments an actor has, and on which device.
    """
    exponent = 1.0 + e.explore_power * np.arange(e.num_envs) / max(1, e.num_envs - 1)
    return np.power(e.explore_base, exponent).astype(np.float32)


def make(e: R2D2, spec: EnvSpec, platform: str) -> Algorithm[State, replay.SequenceMemory, PyTree, ActingCarry]:
    """R2D2 on environments that look like `spec`, on `platform` ("cpu", "gpu" …)."""
    require_choice(spec, "R2D2")
    normaliser = make_normaliser(e, spec)
    network = make_action_values(normaliser.network_spec(spec), e, e.dueling)
    one_step = normaliser.normalising(network.one_step)
    optimiser = make_adam(e.adam_eps, e.max_grad_norm)
    length, epsilons = e.burn_in + e.sequence_length, exploration(e)
    stack = stacked_frames(spec)
    h = partial(rescale, eps=e.rescale_eps) if e.rescale else lambda x: x
    h_inverse = partial(unscale, eps=e.rescale_eps) if e.rescale else lambda x: x

    def init(key: jax.Array) -> State:
        params = network.initial_params(key)
        # A copy: both are donated, so they must not share a buffer.
        target = jax.tree.map(jnp.copy, params)
        online = TrainState(params, optimiser.init(params))
        return State(online, target, jnp.int32(0), jnp.int32(0), normaliser.init())

    def initial_carry(batch: int, first_env: int = 0) -> ActingCarry:
        return ActingCarry(network.initial_carry(batch), first_env + jnp.arange(batch, dtype=jnp.int32))

    def act(
        params: PyTree, carry: ActingCarry, obs: Obs, first: jax.Array, key: jax.Array, explore: bool
    ) -> tuple[jax.Array, ActingCarry, PyTree]:
        values, core = one_step(params, carry.core, obs, first)
        carry = carry._replace(core=core)
        if not explore:
            return greedy(spec, values, obs), carry, {}
        epsilon = jnp.take(jnp.asarray(epsilons), carry.env, mode="clip")
        return epsilon_greedy(spec, values, obs, epsilon, key), carry, {}

    def values_of(params: NetworkParams, sequences: replay.Sequences, obs: PyTree) -> jax.Array:
        """Action values of the steps that are learnt from, and of the one after them.  [T+1, N, A].

        obs: the sequences' observations, normalised.  The steps before them bring the stored state up to date, and get
        no gradient (Kapturowski et al. 2019, section 3).
        """
        part = lambda x, s: jax.tree.map(lambda x: x[s], x)
        before, after = slice(0, e.burn_in), slice(e.burn_in, None)
        core = sequences.carry
        if e.burn_in and e.core != "none":
            core = network.outputs(params, part(obs, before), sequences.first[before], core).carry
        return network.outputs(params, part(obs, after), sequences.first[after], lax.stop_gradient(core)).values

    def loss(
        params: NetworkParams,
        sequences: replay.Sequences,
        importance: jax.Array,
        target: NetworkParams,
        statistics: Statistics,
    ) -> tuple[jax.Array, tuple[Metrics, jax.Array]]:
        """This shard's part of the mean loss over the sequences [L, N] of all shards; and their errors [N].

        A sequence's loss is the sum over its steps of (y_t - Q_t)^2 / 2, as in Acme: the values of
        Adam's epsilon and of the gradient norm's bound are meant for a sum.

        y_t = h(sum_{j<n} gamma^j r_{t+j} + gamma^n h^-1(Q'(s_{t+n}, argmax_a Q(s_{t+n}, a)))), a legal in s_{t+n}
        (section 2.3).  A sequence's error is 0.9 max_t |y_t - Q_t| + 0.1 mean_t |y_t - Q_t|.
        """
        obs = normaliser.normalise(statistics.obs, sequences.obs)
        values, targets = values_of(params, sequences, obs), values_of(target, sequences, obs)
        s = jax.tree.map(lambda x: x[e.burn_in :], sequences._replace(carry=()))
        chooser = values if e.double else targets
        best = legal_values(spec, chooser, s.obs).argmax(-1)
        bootstrap = h_inverse(by_comparison(targets, best))
        y = h(n_step_targets(bootstrap, s.reward, s.terminated, s.stops, e.n_step, e.gamma))
        value = by_comparison(values[:-1], s.action)
        error = jnp.where(s.valid, lax.stop_gradient(y) - value, 0.0)
        mean = lambda x: (importance * jnp.where(s.valid, x, 0.0).sum(0)).sum() / e.batch_size
        total = mean(squared_error(value, lax.stop_gradient(y)))
        size = jnp.abs(lax.stop_gradient(error))
        share = e.priority_max_weight
        of_sequence = share * size.max(0) + (1.0 - share) * size.sum(0) / jnp.maximum(s.valid.sum(0), 1)
        per_step = lambda x: x / e.sequence_length
        there = s.valid & (importance > 0)  # of the sequences that were found
        q_values = jnp.where(there, value, 0.0).sum() / e.batch_size
        return total, ({"losses/td_loss": per_step(total), "losses/q_values": per_step(q_values)}, of_sequence)

    def update(
        state: State, memory: replay.SequenceMemory, rollout: Rollout, shards: ShardAxis, key: jax.Array
    ) -> tuple[State, replay.SequenceMemory, Metrics]:
        statistics, _, _ = normaliser.add(shards, state.statistics, (), rollout)
        state = state._replace(statistics=statistics)
        rate = learning_rate(e, e.learning_rate, state.updates)
        memory = replay.write_sequences(memory, rollout, rollout.carry.core, length, stack, shards.num_held)
        written = memory

        def step(batch: Prioritised, state: State) -> tuple[State, Metrics, jax.Array]:
            def inputs(i: jax.Array) -> tuple[replay.Sequences, jax.Array, NetworkParams, Statistics]:
                drawn = jax.tree.map(lambda x: x[i], batch.drawn)
                sequences = replay.take_sequences(written, i, drawn, length, stack)
                return sequences, batch.weight[i], state.target, state.statistics

            online, metrics, errors = optimiser_step_with_errors(shards, optimiser, rate, state.online, loss, inputs)
            moves, since = every(e.target_network_frequency, state.since_target + 1)
            target = polyak_update(shards, e.tau, moves, online.params, state.target)
            return state._replace(online=online, target=target, since_target=since), metrics, errors

        state, priorities, metrics = prioritised_steps(
            e, shards, memory.priorities, key, state.updates + 1, step, state
        )
        metrics |= {"charts/learning_rate": rate}
        return state._replace(updates=state.updates + 1), memory._replace(priorities=priorities), metrics

    def acting_params(state: State) -> PyTree:
        return normaliser.with_statistics(state.online.params, state.statistics)

    def inspect(params: PyTree, carry: ActingCarry, obs: Obs, first: jax.Array) -> dict[str, jax.Array]:
        values = h_inverse(one_step(params, carry.core, obs, first).values)
        return {"value": legal_values(spec, values, obs).max(-1), "action value": values}

    def init_memory(rollout: Rollout) -> replay.SequenceMemory:
        return replay.init_sequences(rollout, rollout.carry.core, e.buffer_size // e.num_shards, stack)

    return Algorithm(init, init_memory, initial_carry, act, update, acting_params, inspect)
