"""Deep Q-learning (Mnih et al. 2015), top to bottom: experiment, network, losses, update.

With double estimators (van Hasselt et al. 2016), dueling heads (Wang et al. 2016) and n-step targets as flags.  The
sections are those of `ppo.py`; settings are those of CleanRL, by the kind of environment.
"""

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from cleanba.algorithm import Algorithm, Metrics
from cleanba.algorithms.off_policy import (
    FILLED,
    NONE,
    REPLAY_LOGGED,
    TAKEN,
    Chance,
    OffPolicy,
    check_replay,
    draw,
    drawn_at_once,
    due,
    filled,
    follow,
    found,
    mean,
    new_memory,
    repeat_by_chance,
)
from cleanba.algorithms.optimiser import Trained, learning_rate, make_adam, sgd_step
from cleanba.config import Fraction, Partition, Positive, Settings, Steps, require
from cleanba.networks import make_action_values
from cleanba.networks.layers import conv_kind
from cleanba.networks.sight import legal_actions
from cleanba.ops import replay
from cleanba.ops.distributions import Categorical, masked
from cleanba.ops.losses import by_comparison, squared_error
from cleanba.rollout import PyTree, Rollout
from cleanba.shards import ShardAxis
from cleanba.specs import EnvSpec


@dataclass(frozen=True)
class DQN(OffPolicy):
    """What is trained: together these decide every bit of the trained parameters."""

    total_timesteps: int = 500_000
    """environment steps in all (an Atari step is 4 frames)"""
    num_envs: int = 8
    """environments over the whole experiment"""
    num_steps: int = 10
    """steps per environment and rollout"""
    hiddens: tuple[int, ...] = (120, 84)
    """units of the dense layers after the convolutions, or of the MLP"""

    learning_rate: Positive = 2.5e-4
    """optimiser's step size at the start"""
    buffer_size: int = 10_000
    """steps that the replay memory holds, over all shards"""
    learning_starts: int = 10_000
    """steps before the first gradient step"""
    batch_size: int = 128
    """transitions in one gradient step, over all shards"""
    train_frequency: int = 10
    """environment steps for each gradient step, over all environments"""
    target_network_frequency: Steps = 500
    """environment steps between updates of the target network"""
    tau: float = 1.0
    """how far each of its updates moves a target network towards the network (1: all the way)"""
    start_e: Fraction = 1.0
    """probability of a random action at the start"""
    end_e: Fraction = 0.05
    """probability of a random action at the end of the exploration"""
    exploration_fraction: Fraction = 0.5
    """part of the run over which that probability falls, linearly"""
    double: bool = False
    """let the network choose the next action, and the target network value it"""
    dueling: bool = False
    """estimate action values as a state's value and the actions' advantages"""
    n_step: Steps = 1
    """rewards that a target adds up before it bootstraps"""
    huber: bool = False
    """Huber's loss in place of the squared error"""


# Vectors and codes: targets of three rewards learn several times as fast as those of one. A falling learning rate, a
# target that moves softly, and a memory that holds the whole run keep what was learnt: once the early failures had left
# a smaller memory, CartPole was unlearnt.
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

# By kind of environment (docs/reference/presets.md): what differs from the values above, CleanRL's for classic control.
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


def check(e: DQN, partition: Partition) -> None:
    """Raise `UsageError` for hyperparameters that do not fit."""
    check_replay(e, partition, "DQN", e.n_step)


class State(NamedTuple):
    """A learner's state: all that an update changes, but for the replay memory."""

    online: Trained
    target: PyTree
    updates: jax.Array  # int32: updates done
    since_target: jax.Array  # int32: environment steps since the target network moved


class Acting(NamedTuple):
    """What acting needs."""

    params: PyTree
    updates: jax.Array  # int32: where the exploration's schedule stands


LOGGED = {
    "losses/td_loss": "mean temporal-difference error: half the squared one, or Huber's",
    "losses/q_values": "mean action value of the replayed actions",
    "losses/grad_norm": "global norm of the gradient",
    FILLED: REPLAY_LOGGED[FILLED],
    "charts/learning_rate": "the optimiser's step size in this update",
    "charts/epsilon": "probability of a random action while acting",
}


def make(e: DQN, spec: EnvSpec, platform: str) -> Algorithm:
    """DQN on environments that look like `spec`, on devices of kind `platform` ("cpu", "gpu" …)."""
    require(
        spec.action.kind == "choice",
        f"env_id={e.env_id!r} takes {TAKEN[spec.action.kind]}, but DQN values each of a few actions; try "
        f"{'`cleanba sac`, `cleanba td3` or ' * (spec.action.kind == 'quantities')}`cleanba ppo`, or CartPole-v1",
    )
    network = make_action_values(spec, e, e.dueling, platform)
    optimiser, kind = make_adam(platform), conv_kind(platform)
    # EnvPool stacks the newest frames of an Atari game: of each image only the newest is stored.
    stack = int(spec.options.get("stack_num", 4)) if spec.is_atari else 1

    def init(key: jax.Array) -> State:
        params = network.initial_params(key)
        # Both are donated, so they must not share their memory.
        target = jax.tree.map(jnp.copy, params)
        return State(Trained(params, optimiser.init(params)), target, jnp.int32(0), jnp.int32(0))

    def legal_values(values: jax.Array, obs: PyTree) -> jax.Array:
        """Action values [N, A], of illegal ones -inf."""
        legal = legal_actions(spec.obs, obs)
        return values if legal is None else masked(values, legal.reshape(values.shape))

    def epsilon(updates: jax.Array) -> jax.Array:
        """The probability of a random action of the policy that so many updates made."""
        done = jnp.minimum(updates / max(1.0, e.exploration_fraction * e.num_updates), 1.0)
        return e.start_e + (e.end_e - e.start_e) * done

    def act(
        params: Acting, carry: PyTree, obs: PyTree, first: jax.Array, key: jax.Array, explore: bool
    ) -> tuple[jax.Array, PyTree, PyTree]:
        best = legal_values(network.values(params.params, obs), obs).argmax(-1).astype(jnp.int32)
        if not explore:
            return best, carry, {}
        whether_key, which_key = jax.random.split(key)
        if legal_actions(spec.obs, obs) is None:
            anything = jax.random.randint(which_key, best.shape, 0, spec.num_actions, jnp.int32)
        else:
            even = legal_values(jnp.zeros((*best.shape, spec.num_actions)), obs)
            anything = Categorical(even).sample(which_key)
        explores = jax.random.uniform(whether_key, best.shape) < epsilon(params.updates)
        return jnp.where(explores, anything, best), carry, {}

    def loss(params: PyTree, window: replay.Window, target: PyTree) -> tuple[jax.Array, Metrics]:
        """This shard's part of the mean over the batch, all shards together.

        y = r + gamma max_a Q'(s', a) (Mnih et al. 2015); double: r + gamma Q'(s', argmax_a Q(s', a)); a legal in s'.
        """
        t = replay.n_step(window, e.gamma)
        value = by_comparison(network.values(params, t.obs), t.action)
        next_values = network.values(target, t.next_obs)
        chooser = network.values(params, t.next_obs) if e.double else next_values
        bootstrap = by_comparison(next_values, legal_values(chooser, t.next_obs).argmax(-1))
        y = lax.stop_gradient(t.reward + t.discount * bootstrap)
        error = optax.losses.huber_loss(value, y) if e.huber else squared_error(value, y)
        of_batch = lambda x: (t.weight * x).sum() / e.batch_size
        return of_batch(error), {"losses/td_loss": of_batch(error), "losses/q_values": of_batch(value)}

    def update(
        state: State, memory: replay.Ring, rollout: Rollout, shards: ShardAxis, key: jax.Array
    ) -> tuple[State, replay.Ring, Metrics]:
        memory = replay.write(memory, rollout, shards.num_held)
        rate = learning_rate(e, e.learning_rate, state.updates)

        def gradient_step(chance: Chance, state: State) -> tuple[State, tuple[Metrics, jax.Array]]:
            def load(i: jax.Array) -> tuple[replay.Window, PyTree]:
                drawn = jax.tree.map(lambda x: x[i], chance.indices)
                return replay.take(memory, i, drawn, e.n_step, stack), state.target

            online, metrics = sgd_step(shards, optimiser, rate, state.online, loss, load)
            moves, since = due(state.since_target, e.train_frequency, e.target_network_frequency)
            target = follow(shards, kind, e.tau, moves, online.params, state.target)
            return State(online, target, state.updates, since), (metrics, found(chance))

        steps = e.steps_of(state.updates + 1)
        chance = lambda numbers: draw(e, memory, shards, key, numbers, e.n_step)
        state, (total, drawn) = repeat_by_chance(steps, drawn_at_once(e, NONE), chance, gradient_step, state)
        metrics = mean(total, steps) | filled(e, shards, drawn, steps)
        metrics |= {"charts/learning_rate": rate, "charts/epsilon": epsilon(state.updates)}
        return state._replace(updates=state.updates + 1), memory, metrics

    def inspect(params: Acting, carry: PyTree, obs: PyTree, first: jax.Array) -> dict[str, jax.Array]:
        values = network.values(params.params, obs)
        return {"value": legal_values(values, obs).max(-1), "action value": values}

    acting = lambda state: Acting(state.online.params, state.updates)
    return Algorithm(
        init, lambda rollout: new_memory(e, rollout, stack), lambda batch: (), act, update, acting, inspect
    )
