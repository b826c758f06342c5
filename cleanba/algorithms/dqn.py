"""Deep Q-learning (Mnih et al. 2015), top to bottom: experiment, network, losses, update.

With double estimators (van Hasselt et al. 2016), dueling heads (Wang et al. 2016), n-step targets and prioritised
replay (Schaul et al. 2016) as flags.  The sections are those of `ppo.py`; settings are those of CleanRL, with a preset
for each group of environments.
"""

from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import optax
from jax import lax

from cleanba.algorithm import Algorithm, Metrics, NoCarry, no_carry
from cleanba.algorithms.action_bounds import require_choice
from cleanba.algorithms.epsilon_greedy import epsilon_greedy, falling_epsilon, greedy, legal_values
from cleanba.algorithms.gradient_steps import (
    PRIORITY_LOGGED,
    REPLAY_FILLED,
    REPLAY_LOGGED,
    Minibatch,
    Prioritised,
    every,
    gradient_steps,
    prioritised_steps,
)
from cleanba.algorithms.off_policy import PrioritisedReplay, check_replay, stacked_frames
from cleanba.algorithms.optimiser import (
    TrainState,
    learning_rate,
    make_adam,
    optimiser_step,
    optimiser_step_with_errors,
)
from cleanba.config import CLEANRL_GAMES, Fraction, Partition, Positive, Settings, Steps, flag, require
from cleanba.kernels import polyak_update
from cleanba.networks import make_action_values
from cleanba.ops import replay
from cleanba.ops.losses import by_comparison, squared_error
from cleanba.rollout import NetworkParams, Obs, PyTree, Rollout
from cleanba.shards import ShardAxis
from cleanba.specs import EnvSpec


@dataclass(frozen=True)
class DQN(PrioritisedReplay):
    """The experiment: these settings determine every bit of the trained parameters."""

    total_timesteps: int = 500_000
    num_envs: int = 8
    num_steps: int = 10
    hiddens: tuple[int, ...] = (120, 84)

    learning_rate: Positive = 2.5e-4
    """optimiser's step size at the start"""
    buffer_size: int = 10_000
    learning_starts: int = 10_000
    batch_size: int = 128
    train_frequency: int = 10
    target_network_frequency: Steps = 500
    """environment steps between updates of the target network"""
    tau: float = 1.0
    start_e: Fraction = 1.0
    """probability of a random action at the start"""
    end_e: Fraction = 0.05
    """probability of a random action at the end of the exploration"""
    exploration_fraction: Fraction = 0.5
    """fraction of the run over which that probability falls linearly"""
    double: bool = False
    """double Q-learning: the online network chooses the next action, the target network evaluates it"""
    dueling: bool = False
    """dueling heads: a state value plus action advantages"""
    n_step: Steps = 1
    """n of the n-step return: rewards that a target adds up before it bootstraps"""
    huber: bool = False
    """Huber's loss in place of the squared error"""
    prioritised: bool = False
    """draw transitions by priority, abs(last temporal-difference error)^priority_exponent, not uniformly"""

    @property
    def schedules(self) -> tuple[str, ...]:
        """See `Experiment`."""
        return (*super().schedules, "exploration_fraction") + ("importance_exponent_end",) * self.prioritised


# For vectors and codes: three-step targets learn several times as fast as one-step targets.  A falling learning rate, a
# softly updated target and a replay memory of the whole run keep what was learnt: with a smaller memory, CartPole was
# forgotten once early failures had been overwritten.
SMALL = Settings(
    num_steps=8,
    hiddens=(128, 128),
    learning_rate=1e-3,
    anneal_lr=True,
    buffer_size=250_000,
    learning_starts=5_000,
    train_frequency=4,
    target_network_frequency=64,
    tau=0.05,
    exploration_fraction=0.2,
    double=True,
    n_step=3,
)

# By preset name (docs/reference/presets.md): what differs from the values above, CleanRL's for classic control.
PRESETS: dict[str, Settings] = {
    "atari": Settings(
        total_timesteps=10_000_000,
        num_steps=16,
        hiddens=(512,),
        network="nature",
        learning_rate=1e-4,
        buffer_size=1_000_000,
        learning_starts=80_000,
        batch_size=32,
        train_frequency=4,
        target_network_frequency=1000,
        end_e=0.01,
        exploration_fraction=0.1,
    ),
    "classic_control": Settings(**SMALL, total_timesteps=250_000),
    "minigrid": Settings(**SMALL, total_timesteps=100_000),
    "toy_text": Settings(**SMALL, total_timesteps=150_000),
    "box2d": Settings(**SMALL | dict(buffer_size=100_000), total_timesteps=400_000),
}


# What CleanRL's scripts share.  They act with the newest policy.
CLEANRL = Settings(
    num_envs=1,
    num_actors=1,
    num_shards=1,
    concurrency=False,
    layer_norm=False,
    anneal_lr=False,
    gamma=0.99,
    tau=1.0,
    start_e=1.0,
    double=False,
    dueling=False,
    n_step=1,
    huber=False,
    prioritised=False,
)

# By name, for --preset: settings whole, so that no default is used.
PROTOCOLS: dict[str, Settings] = {
    # `dqn_atari.py`
    "cleanrl-atari": Settings(
        **CLEANRL,
        **CLEANRL_GAMES,
        num_steps=4,
        learning_rate=1e-4,
        buffer_size=1_000_000,
        learning_starts=80_000,
        batch_size=32,
        train_frequency=4,
        target_network_frequency=1_000,
        end_e=0.01,
        exploration_fraction=0.1,
    ),
    # `dqn.py`
    "cleanrl-classic-control": Settings(
        **CLEANRL,
        total_timesteps=500_000,
        num_steps=10,
        network="mlp",
        hiddens=(120, 84),
        learning_rate=2.5e-4,
        buffer_size=10_000,
        learning_starts=10_000,
        batch_size=128,
        train_frequency=10,
        target_network_frequency=500,
        end_e=0.05,
        exploration_fraction=0.5,
    ),
    # `make pong`: what wins Pong soonest on a CPU.  A gradient step costs four times less than with the Nature CNN, and
    # three-step targets carry the rare points back sooner.
    "pong": Settings(
        total_timesteps=1_000_000,
        num_envs=8,
        num_actors=1,
        num_shards=1,
        num_steps=16,
        env_epoch=500,
        repeat_action_probability=0.0,
        full_action_space=False,
        episodic_life=False,
        max_episode_steps=27_000,
        reward_clip=True,
        anneal_lr=False,
        gamma=0.99,
        network="nips",
        hiddens=(256,),
        learning_rate=3e-4,
        buffer_size=100_000,
        learning_starts=8_000,
        batch_size=32,
        train_frequency=4,
        target_network_frequency=2_000,
        tau=1.0,
        start_e=1.0,
        end_e=0.01,
        exploration_fraction=0.05,
        double=True,
        dueling=True,
        n_step=3,
        huber=True,
        prioritised=False,
    ),
}


def check(e: DQN, partition: Partition) -> None:
    """Raise `UsageError` for hyperparameters that do not fit."""
    check_replay(e, partition, e.n_step)
    for name in ("priority_exponent", "importance_exponent", "importance_exponent_end"):
        value, default = getattr(e, name), getattr(DQN, name)
        require(
            e.prioritised or value == default,
            f"{name}={value} applies only to prioritised replay; add --prioritised, or leave {flag(name)} out",
        )


class State(NamedTuple):
    """The learner's state."""

    online: TrainState
    target: NetworkParams
    updates: jax.Array  # int32: updates done
    since_target: jax.Array  # int32: environment steps since the target network was updated


class ActingParams(NamedTuple):
    """What acting needs of the learner's state."""

    params: NetworkParams
    updates: jax.Array  # [] int32, which the exploration rate depends on


LOGGED = {
    "losses/td_loss": "mean loss: half the squared temporal-difference error, or its Huber loss; weighted by "
    "importance with --prioritised",
    "losses/q_values": "mean action value of the replayed actions",
    "losses/grad_norm": "global norm of the gradient",
    REPLAY_FILLED: REPLAY_LOGGED[REPLAY_FILLED],
    **{name: f"{meaning} (--prioritised)" for name, meaning in PRIORITY_LOGGED.items()},
    "charts/learning_rate": "the optimiser's step size in this update",
    "charts/epsilon": "probability of a random action while acting",
}


Memory: TypeAlias = replay.Ring | replay.PrioritisedRing


def make(e: DQN, spec: EnvSpec, platform: str) -> Algorithm[State, Memory, ActingParams, NoCarry]:
    """DQN on environments that look like `spec`, on `platform` ("cpu", "gpu" …)."""
    require_choice(spec, "DQN")
    network = make_action_values(spec, e, e.dueling)
    optimiser = make_adam()
    stack = stacked_frames(spec)

    def init(key: jax.Array) -> State:
        params = network.initial_params(key)
        # A copy: both are donated, so they must not share a buffer.
        target = jax.tree.map(jnp.copy, params)
        return State(TrainState(params, optimiser.init(params)), target, jnp.int32(0), jnp.int32(0))

    def act(
        params: ActingParams, carry: NoCarry, obs: Obs, first: jax.Array, key: jax.Array, explore: bool
    ) -> tuple[jax.Array, NoCarry, PyTree]:
        values = network.values(params.params, obs)
        if not explore:
            return greedy(spec, values, obs), carry, {}
        return epsilon_greedy(spec, values, obs, falling_epsilon(e, params.updates), key), carry, {}

    def loss(params: NetworkParams, window: replay.Window, target: NetworkParams) -> tuple[jax.Array, Metrics]:
        """This shard's part of the mean loss over the batch of all shards."""
        t = replay.n_step(window, e.gamma)
        value, y = value_and_target(params, t, target)
        return mean_loss(t.weight, value, y)

    def weighted_loss(
        params: NetworkParams, window: replay.Window, importance: jax.Array, target: NetworkParams
    ) -> tuple[jax.Array, tuple[Metrics, jax.Array]]:
        """The same for transitions drawn by priorities, with importance weights [N]; and |y - Q(s, a)|, [N]."""
        t = replay.n_step(window, e.gamma)
        value, y = value_and_target(params, t, target)
        total, metrics = mean_loss(t.weight, value, y, importance)
        return total, (metrics, jnp.abs(y - value))

    def value_and_target(
        params: NetworkParams, t: replay.Transition, target: NetworkParams
    ) -> tuple[jax.Array, jax.Array]:
        """Q(s, a) [N] and its target [N].

        y = r + gamma max_a Q'(s', a) (Mnih et al. 2015); double: r + gamma Q'(s', argmax_a Q(s', a)); a legal in s'.
        """
        value = by_comparison(network.values(params, t.obs), t.action)
        next_values = network.values(target, t.next_obs)
        chooser = network.values(params, t.next_obs) if e.double else next_values
        bootstrap = by_comparison(next_values, legal_values(spec, chooser, t.next_obs).argmax(-1))
        return value, lax.stop_gradient(t.reward + t.discount * bootstrap)

    def mean_loss(
        weight: jax.Array, value: jax.Array, y: jax.Array, importance: jax.Array | None = None
    ) -> tuple[jax.Array, Metrics]:
        error = optax.losses.huber_loss(value, y) if e.huber else squared_error(value, y)
        of_batch = lambda x, weight: (weight * x).sum() / e.batch_size
        total = of_batch(error, weight if importance is None else weight * importance)
        return total, {"losses/td_loss": total, "losses/q_values": of_batch(value, weight)}

    def update(
        state: State, memory: Memory, rollout: Rollout, shards: ShardAxis, key: jax.Array
    ) -> tuple[State, Memory, Metrics]:
        rate = learning_rate(e, e.learning_rate, state.updates)
        number = state.updates + 1

        def after(online: TrainState, state: State) -> State:
            target_moves, since = every(e.target_network_frequency, state.since_target + e.train_frequency)
            target = polyak_update(shards, e.tau, target_moves, online.params, state.target)
            return State(online, target, state.updates, since)

        def gradient_step(batch: Minibatch, state: State) -> tuple[State, Metrics]:
            inputs = lambda i: (batch.window(i), state.target)
            online, metrics = optimiser_step(shards, optimiser, rate, state.online, loss, inputs)
            return after(online, state), metrics

        if isinstance(memory, replay.PrioritisedRing):
            memory = replay.write_prioritised(memory, rollout, e.n_step, stack, shards.num_held)
            written = memory

            def prioritised_step(batch: Prioritised, state: State) -> tuple[State, Metrics, jax.Array]:
                def inputs(i: jax.Array) -> tuple[replay.Window, jax.Array, NetworkParams]:
                    drawn = jax.tree.map(lambda x: x[i], batch.drawn)
                    indices = replay.transitions_at(written, i, drawn)
                    return replay.take(written.ring, i, indices, e.n_step, stack), batch.weight[i], state.target

                online, metrics, errors = optimiser_step_with_errors(
                    shards, optimiser, rate, state.online, weighted_loss, inputs
                )
                return after(online, state), metrics, errors

            state, priorities, metrics = prioritised_steps(
                e, shards, memory.priorities, key, number, prioritised_step, state
            )
            memory = memory._replace(priorities=priorities)
        else:
            memory = replay.write(memory, rollout, shards.num_held)
            steps = e.steps_of(number)
            state, metrics = gradient_steps(e, shards, memory, key, steps, gradient_step, state, e.n_step, stack)
        metrics |= {"charts/learning_rate": rate, "charts/epsilon": falling_epsilon(e, state.updates)}
        return state._replace(updates=state.updates + 1), memory, metrics

    def inspect(params: ActingParams, carry: NoCarry, obs: Obs, first: jax.Array) -> dict[str, jax.Array]:
        values = network.values(params.params, obs)
        return {"value": legal_values(spec, values, obs).max(-1), "action value": values}

    def acting_params(state: State) -> ActingParams:
        return ActingParams(state.online.params, state.updates)

    def init_memory(rollout: Rollout) -> Memory:
        empty = replay.init_prioritised if e.prioritised else replay.init
        return empty(rollout, e.buffer_size // e.num_shards, stack)

    return Algorithm(init, init_memory, no_carry, act, update, acting_params, inspect)
