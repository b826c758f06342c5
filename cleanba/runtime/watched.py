"""One update of a training that is watched: all that went into it and came out, for comparison with another run's."""

from collections.abc import Sequence
from functools import partial
from typing import Any, Generic, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from cleanba.algorithm import ActorParams, C, M, P, S
from cleanba.probes import CAPACITY, Finder, Site, Tape, fingerprint, watching
from cleanba.rollout import PyTree, Rollout, named_leaves
from cleanba.runtime.actor import ActorRollout
from cleanba.runtime.digests import params_digest
from cleanba.runtime.learner import CUT, SAME, Learner

Named = dict[str, np.ndarray]
"""The leaves of a tree on the host, by their paths."""


class Fingerprints(NamedTuple):
    """Fingerprints of an update's inputs and results, [..., L, 2] uint32 for L arrays.  Equal ones: equal bits."""

    state_before: np.ndarray  # [D, L, 2]: on each learner device
    memory_before: np.ndarray  # [K, L, 2]: of each shard
    acted_with: np.ndarray  # [A, L, 2]: the parameters that each actor's rollout was collected with
    rollout: np.ndarray  # [blocks, L, 2]
    state: np.ndarray  # [D, L, 2]: after the update
    memory: np.ndarray  # [K, L, 2]
    actor_params: np.ndarray  # [L, 2]: what acting needs of the state after the update
    params_digest: str  # of these, as runs log it


class Event(NamedTuple):
    """What one probe saw at one time."""

    number: int
    """in the update, from 0"""
    site: Site
    fingerprints: np.ndarray
    """[K, 2] uint32 for each shard; or [D, 2] for each learner device, where all should have the same"""


class Events(NamedTuple):
    """Consecutive events of one update, in order."""

    found: list[Event]
    number_after: int | None
    """the number of the event after the last; None if there is none"""


class Watcher(Generic[S, M, P, C]):
    """Watches the updates of one learner."""

    def __init__(self, learner: Learner[S, M, P, C], params_of: ActorParams[S, P]):
        self.learner, self.params_of = learner, params_of
        self._probed: tuple[list[Site], Any] | None = None

    def begin(self, number: int, state: S, memory: M, rollouts: Sequence[ActorRollout]) -> "WatchedUpdate[S, M, P, C]":
        """The update that will get these inputs.  State and memory are copied."""
        before = jax.tree.map(jnp.copy, (state, memory))
        blocks = [block for rollout in rollouts for block in rollout.blocks]
        return WatchedUpdate(self, number, before, blocks, [rollout.params for rollout in rollouts])

    def probed(self, args: tuple[Any, ...]) -> tuple[list[Site], Any]:
        """The sites of the update's probes, and the compiled update that also returns what they write.

        `args` are those of `Learner.update_on_device`.  The function takes an array [2] int32 more: how many events to
        skip, and the one whose values are kept.
        """
        if self._probed is not None:
            return self._probed
        learner, finder = self.learner, Finder()
        with watching(finder):
            learner.jitted(learner.update_on_device, (SAME, CUT, SAME)).trace(*args)
        sites = list(finder.sites)

        def probed(state: S, memory: M, blocks: tuple[Rollout, ...], numbers: jax.Array, which: jax.Array) -> Any:
            tape = Tape(sites, which[0], which[1])
            with watching(tape):
                state, memory, _ = learner.update_on_device(state, memory, blocks, numbers)
            return state, memory, jax.tree.map(lambda x: x[None], tape.written())

        self._probed = sites, learner.jitted(probed, (SAME, CUT, CUT), more=1)
        return self._probed


class WatchedUpdate(Generic[S, M, P, C]):
    """One update: what went into it, what came out, and, computed a second time, what its probes see."""

    def __init__(
        self,
        watcher: Watcher[S, M, P, C],
        number: int,
        before: tuple[S, M],
        blocks: list[Rollout],
        acted_with: list[P],
    ):
        self.number = number
        self._watcher, self._learner = watcher, watcher.learner
        self._before, self._after = before, before
        self._blocks, self._acted_with = blocks, acted_with

    def ended_in(self, state: S, memory: M) -> "WatchedUpdate[S, M, P, C]":
        """This update with its results, which are donated to the next update and valid until then."""
        self._after = state, memory
        return self

    def fingerprints(self) -> Fingerprints:
        """Fingerprints of all of it."""
        (before, memory_before), (after, memory_after) = self._before, self._after
        params = self._watcher.params_of(self._learner.local(after))
        return Fingerprints(
            self._of_state(before),
            self._of_memory(memory_before),
            np.stack([_fingerprints(tree) for tree in self._acted_with]),
            np.stack([_fingerprints(block) for block in self._blocks]),
            self._of_state(after),
            self._of_memory(memory_after),
            _fingerprints(params),
            params_digest(params),
        )

    def _of_state(self, state: PyTree) -> np.ndarray:
        return np.stack(
            [_fingerprints(self._learner.copy(state, device)) for device in range(self._learner.num_copies)]
        )

    def _of_memory(self, memory: PyTree) -> np.ndarray:
        return (
            _fingerprints(memory, 1)[self._learner.places]
            if jax.tree.leaves(memory)
            else np.zeros((0, 0, 2), np.uint32)
        )

    def rollout(self) -> Named:
        """The rollout of all environments, in order: leaves [T(+1), E, ...]; of the carry [E, ...]."""
        blocks = jax.device_get(self._blocks)
        axis = lambda path: 0 if path.startswith(".carry") else 1
        named = [_named(jax.tree.map(lambda x: x[0], block)) for block in blocks]
        return {path: np.concatenate([block[path] for block in named], axis(path)) for path in named[0]}

    def acted_with(self) -> list[Named]:
        """The parameters that each actor's rollout was collected with."""
        return [_named(tree) for tree in self._acted_with]

    def state(self, after: bool) -> Named:
        """The learner's state before or after the update, on the first device."""
        return _named(self._learner.local((self._after if after else self._before)[0]))

    def memory_paths(self) -> list[str]:
        """The arrays of the memory, in the order of their fingerprints."""
        return list(named_leaves(self._after[1]))

    def memory_rows(self, path: str, shard: int, after: bool) -> np.ndarray:
        """Fingerprints of the rows of one array of a shard's memory.  [C, 2]."""
        return _fingerprints(self._memory_leaf(path, shard, after), 1)[:, 0]

    def memory_row(self, path: str, shard: int, after: bool, row: int) -> np.ndarray:
        """One row of an array of a shard's memory, [...]."""
        return np.asarray(self._memory_leaf(path, shard, after)[row])

    def _memory_leaf(self, path: str, shard: int, after: bool) -> jax.Array:
        x = named_leaves((self._after if after else self._before)[1])[path][self._learner.places[shard]]
        return x if x.ndim else x[None]

    # ------------------------------------------------------------------------------------------- computed a second time

    def events(self, skip: int = 0) -> Events:
        """What the probes see, from event number `skip` on: as many events as the tape holds."""
        sites, (_, (total, written)) = self._run(skip, -1)
        found, known = [], int(total[0])
        for site, w in zip(sites, written, strict=True):
            count = int(w.seen[0])
            for occurrence in range(min(count, CAPACITY)):
                fingerprints = w.fingerprints[:, occurrence].reshape(-1, 2)  # of [D, K' or 1, 2]
                fingerprints = fingerprints[self._learner.places] if site.per_shard else fingerprints
                found.append(Event(int(w.events[0, occurrence]), site, fingerprints))
            if count > CAPACITY:
                known = min(known, int(w.events[0, CAPACITY - 1]) + 1)
        found = sorted((event for event in found if event.number < known), key=lambda event: event.number)
        return Events(found, known if known < total[0] else None)

    def event_values(self, event: Event, device: int = 0) -> Named:
        """The arrays that a probe saw: leaves [K, ...] for each shard, or [...] on one learner device."""
        sites, (_, (_, written)) = self._run(0, event.number)
        w = written[sites.index(event.site)]
        leaf = lambda x: x.reshape(-1, *x.shape[2:])[self._learner.places] if event.site.per_shard else x[device]
        return {path: leaf(x) for path, x in zip(event.site.paths, w.values, strict=True)}

    def recomputed_fingerprints(self) -> tuple[np.ndarray, np.ndarray]:
        """Fingerprints of state and memory after the update, computed a second time with probes."""
        _, ((state, memory), _) = self._run(0, -1)
        return self._of_state(state), self._of_memory(memory)

    def _run(self, skip: int, chosen: int) -> tuple[list[Site], Any]:
        """Compute the update again, with probes: their sites, and ((state, memory), what was written on the host)."""
        args = (*self._before, *self._learner.inputs(self._blocks, self.number))
        sites, run = self._watcher.probed(args)
        state, memory, written = run(*args, self._learner.replicate(np.array([skip, chosen], np.int32)))
        return sites, ((state, memory), jax.device_get(written))


def _named(tree: PyTree) -> Named:
    return {path: np.asarray(x) for path, x in named_leaves(tree).items()}


@partial(jax.jit, static_argnums=1)
def _fingerprints_on_device(tree: PyTree, lead: int) -> jax.Array:
    return jnp.stack([fingerprint([x], lead) for x in jax.tree.leaves(tree)], lead)


def _fingerprints(tree: PyTree, lead: int = 0) -> np.ndarray:
    """Fingerprints of all L arrays of a tree.  Leaves [*lead, ...] -> [*lead, L, 2]."""
    return np.asarray(_fingerprints_on_device(tree, lead))
