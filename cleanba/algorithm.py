"""The interface between algorithms and the runtime: seven pure functions, gathered in `Algorithm` below.

The runtime never sees a loss; an algorithm never sees a thread, a queue or a device.  Four types cross the interface,
and each algorithm has its own:

    S   the learner's state, the same on every learner device: parameters, optimiser state, counters
    M   the memory of one shard, on the device that holds the shard; () if nothing is kept
    P   the actor parameters: what acting needs of the state
    C   the carry, which is the state of a recurrent policy; () for a feed-forward one

Shapes, here and in algorithms/: T steps of B environments; T(+1) is T + 1 for a rollout's `obs` and `first`, else T;
K shards in all, K' of them on this device; N transitions of one shard in a minibatch.
"""

from typing import Any, Generic, NamedTuple, Protocol, TypeAlias, TypeVar

import jax

from cleanba.rollout import Obs, PyTree, Rollout
from cleanba.shards import ShardAxis

S = TypeVar("S")
M = TypeVar("M")
P = TypeVar("P")
C = TypeVar("C")
S_co = TypeVar("S_co", covariant=True)  # where a function only returns it
M_co = TypeVar("M_co", covariant=True)
P_co = TypeVar("P_co", covariant=True)
C_co = TypeVar("C_co", covariant=True)
S_contra = TypeVar("S_contra", contravariant=True)  # where a function only takes it
P_contra = TypeVar("P_contra", contravariant=True)
C_contra = TypeVar("C_contra", contravariant=True)

Metrics = dict[str, jax.Array]
"""Scalars by name.  A run ends when one under "losses/" is not finite.

A metric that some updates lack, such as a loss before learning starts, comes with "count/<name>": how many values it is
the mean of.  It is not logged where that is 0.
"""


class Init(Protocol[S_co]):
    def __call__(self, key: jax.Array) -> S_co:
        """The learner's state before the first update: parameters, optimiser state, counters."""
        ...


class InitMemory(Protocol[M_co]):
    def __call__(self, rollout: Rollout) -> M_co:
        """One shard's memory before the first update, from the shapes of its rollout, [T(+1), B, ...].

        Memory is for what a shard collects over many rollouts, such as a replay memory, and for what belongs to single
        environments, such as a running discounted return.
        """
        ...


class InitialCarry(Protocol[C_co]):
    def __call__(self, batch: int, first_env: int = 0) -> C_co:
        """The carry before the first observation, for B = `batch` environments.  Leaves [B, ...].

        first_env: the number, over the whole experiment, of the first of these environments.
        """
        ...


class Act(Protocol[P_contra, C]):
    def __call__(
        self, params: P_contra, carry: C, obs: Obs, first: jax.Array, key: jax.Array, explore: bool
    ) -> tuple[jax.Array, C, PyTree]:
        """One step of B environments: obs [B, ...], first [B] bool -> action [B, ...], carry, extras [B, ...].

        `extras` is what `update` needs from acting, such as log-probabilities.  Without `explore` the action is greedy.
        """
        ...


class Update(Protocol[S, M]):
    def __call__(
        self, state: S, memory: M, rollout: Rollout, shards: ShardAxis, key: jax.Array
    ) -> tuple[S, M, Metrics]:
        """All optimisation done with one rollout of all environments: the state and memory after it, and metrics.

        The leaves of `memory` are [K', ...] and those of `rollout` [K', T(+1), B, ...], for the K' shards of this
        device.  State and metrics come out the same on every device.  State and memory are donated, so memory that is
        written in place is not copied.
        """
        ...


class ActorParams(Protocol[S_contra, P_co]):
    def __call__(self, state: S_contra) -> P_co:
        """What `act` needs of the learner's state."""
        ...


class Inspect(Protocol[P_contra, C_contra]):
    def __call__(self, params: P_contra, carry: C_contra, obs: Obs, first: jax.Array) -> dict[str, jax.Array]:
        """Values to show in a film, by name: [B], or one per action, [B, A].  The arguments are those of `act`."""
        ...


def no_memory(rollout: Rollout) -> tuple[()]:
    """`init_memory` of an algorithm that learns from each rollout once and keeps nothing of it."""
    return ()


NoCarry: TypeAlias = tuple[()]


def no_carry(batch: int, first_env: int = 0) -> NoCarry:
    """`initial_carry` of a feed-forward policy."""
    return ()


class Algorithm(NamedTuple, Generic[S, M, P, C]):
    """All that the runtime knows of an algorithm.  To add one, write these functions, and a line in `recipes.py`."""

    init: Init[S]
    init_memory: InitMemory[M]
    initial_carry: InitialCarry[C]
    act: Act[P, C]
    update: Update[S, M]
    actor_params: ActorParams[S, P]
    inspect: Inspect[P, C]

    def shapes(self) -> tuple[S, P]:
        """The shapes and dtypes of the learner's state and of the actor parameters.  Nothing is computed."""
        state = jax.eval_shape(self.init, jax.random.key(0))
        return state, jax.eval_shape(self.actor_params, state)


AnyAlgorithm: TypeAlias = Algorithm[Any, Any, Any, Any]
"""An algorithm whose types are only known at run time, such as one looked up by name."""
