"""The waist between what is learned and how it runs: pure functions.

The runtime never sees a loss; an algorithm never sees a thread, a queue or a device.
"""

from typing import NamedTuple, Protocol

import jax

from cleanba.rollout import PyTree, Rollout
from cleanba.shards import ShardAxis

Metrics = dict[str, jax.Array]
"""Scalars by name.  Those under "losses/" must be finite numbers: the run ends where one is not.

What there may be nothing of in an update has a "count/" beside it, by its own name: where that is 0 it is not logged.
"""


class Init(Protocol):
    def __call__(self, key: jax.Array) -> PyTree:
        """The learner's first state: parameters, optimiser state, counters, whatever the algorithm needs."""
        ...


class InitMemory(Protocol):
    def __call__(self, rollout: Rollout) -> PyTree:
        """One shard's first memory, from the shapes of its rollout, [T(+1), B, ...]; () if nothing is kept.

        What grows (a replay buffer) or belongs to single environments (a discounted return under way) is memory.
        """
        ...


class InitialCarry(Protocol):
    def __call__(self, batch: int) -> PyTree:
        """What a recurrent policy remembers before it has seen anything, [B, ...]; () for a feed-forward one."""
        ...


class Act(Protocol):
    def __call__(
        self, params: PyTree, carry: PyTree, obs: PyTree, first: jax.Array, key: jax.Array, explore: bool
    ) -> tuple[jax.Array, PyTree, PyTree]:
        """One step of B environments: obs [B, ...], first [B] -> action [B], carry, extras [B, ...].

        `extras` is what learning wants to know of acting.  Without `explore` the action is the best one known.
        """
        ...


class Update(Protocol):
    def __call__(
        self, state: PyTree, memory: PyTree, rollout: Rollout, shards: ShardAxis, key: jax.Array
    ) -> tuple[PyTree, PyTree, Metrics]:
        """All optimisation done with one rollout of all environments: state, memory and metrics after it.

        The leaves of `memory` are [K', ...], those of `rollout` [K', T(+1), B, ...]: this device's shards.  State and
        metrics come out the same everywhere.  State and memory are donated: memory that is written in place costs no
        copy of it.
        """
        ...


class ActorParams(Protocol):
    def __call__(self, state: PyTree) -> PyTree:
        """What `act` needs of the learner's state."""
        ...


class Inspect(Protocol):
    def __call__(self, params: PyTree, carry: PyTree, obs: PyTree, first: jax.Array) -> dict[str, jax.Array]:
        """What to show of a policy in a film: numbers [B], and one for each action [B, A], by name.

        The arguments are those of `act`.
        """
        ...


def no_memory(rollout: Rollout) -> PyTree:
    """`init_memory` of an algorithm that learns from each rollout once and keeps nothing of it."""
    return ()


class Algorithm(NamedTuple):
    """No base class, registry or callback: to add an algorithm, write these, and a line in `recipes.py`."""

    init: Init
    init_memory: InitMemory
    initial_carry: InitialCarry
    act: Act
    update: Update
    actor_params: ActorParams
    inspect: Inspect
