"""The waist between what is learned and how it runs: pure functions.

The runtime never sees a loss; an algorithm never sees a thread, a queue or a device.
"""

from typing import NamedTuple, Protocol

import jax

from cleanba.rollout import PyTree, Rollout
from cleanba.shards import ShardAxis

Metrics = dict[str, jax.Array]
"""Scalars by name.  Those under "losses/" must be finite numbers: the run ends where one is not."""


class Init(Protocol):
    def __call__(self, key: jax.Array) -> PyTree:
        """The learner's first state: parameters, optimiser state, counters, whatever the algorithm needs."""
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
    def __call__(self, state: PyTree, rollout: Rollout, shards: ShardAxis, key: jax.Array) -> tuple[PyTree, Metrics]:
        """All optimisation done with one rollout of all environments.

        The leaves of `rollout` are [K', T(+1), B, ...], this device's shards.  What it returns is the same everywhere.
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


class Algorithm(NamedTuple):
    """No base class, registry or callback: to add an algorithm, write these, and a line in `recipes.py`."""

    init: Init
    initial_carry: InitialCarry
    act: Act
    update: Update
    actor_params: ActorParams
    inspect: Inspect
