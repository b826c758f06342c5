"""What is kept of a learner after an update: digests, by which runs are compared, and checkpoints."""

from collections.abc import Iterable
from typing import Generic

import jax
import numpy as np

from cleanba.algorithm import ActorParams, C, M, P, S
from cleanba.files import Json
from cleanba.runtime.checkpoint import Checkpoints, Saved
from cleanba.runtime.devices import Devices
from cleanba.runtime.digests import params_digest, tree_digest
from cleanba.runtime.learner import Learner
from cleanba.runtime.memory import MemoryStore, ShardSnapshot, learner_digest
from cleanba.runtime.processes import gather_over_processes
from cleanba.runtime.records import ActorState, RecordedRollout, Records, Snapshot


class CheckpointWriter(Generic[S, M, P, C]):
    """Takes digests of the learner and writes checkpoints.  All processes call it after the same updates."""

    def __init__(
        self,
        learner: Learner[S, M, P, C],
        actor_params: ActorParams[S, P],
        devices: Devices,
        memory_store: MemoryStore,
        checkpoints: Checkpoints | None,
        records: Records,
    ):
        self._learner, self._actor_params, self._devices = learner, actor_params, devices
        self._memory_store, self._checkpoints, self._records = memory_store, checkpoints, records
        self._shards: dict[int, ShardSnapshot] = {}
        self._shard_digests: list[str] = []  # of all shards, in order
        self._seen: tuple[int, dict[str, str]] = (-1, {})
        self._unlisted: dict[int, list[str]] = {}  # by shard: packs of snapshots that became no checkpoint

    def snapshot(self, update: int, state: S, memory: M) -> dict[str, str]:
        """Take the digests after an update: of the parameters that act, and of the whole state and memory.

        Chunks of the memory that are new are written to disk, for a checkpoint that may follow.

        Raises:
            Failure: what is new in the memory cannot be written, or the checkpoint before could not.
        """
        if self._seen[0] == update:
            return self._seen[1]
        if self._checkpoints is not None and self._memory_store.shards:
            self._checkpoints.make_ready()  # so that the previous checkpoint is whole once all processes are here
        try:
            self._shards = self._memory_store.snapshot(memory, update)
        except OSError as error:
            assert self._checkpoints is not None
            raise self._checkpoints.unwritten(error) from error
        for number, shard in self._shards.items():
            if shard.new is not None:
                self._unlisted.setdefault(number, []).append(shard.new)
        mine = np.array([list(bytes.fromhex(shard.digest)) for shard in self._shards.values()], np.uint8)
        if self._shards:
            everybodys = gather_over_processes(mine)  # [P, K', 32]
            self._shard_digests = [bytes(row).hex() for row in everybodys.reshape(-1, 32)]
        local = self._learner.local(state)
        digests = {
            "params_digest": params_digest(self._actor_params(local)),
            "learner_digest": learner_digest(tree_digest(local), self._shard_digests),
        }
        self._seen = update, digests
        return digests

    @property
    def seconds(self) -> float:
        """How long the last checkpoint took to be written, in the background."""
        return self._checkpoints.seconds if self._checkpoints is not None else 0.0

    def digests(self, update: int, state: S) -> dict[str, str | None]:
        """The digests of a learner that ended after this update, as far as they are known.

        The main thread calls this, perhaps while the learner thread takes a snapshot, so it does not touch the memory.
        """
        if self._seen[0] == update:
            return {**self._seen[1]}
        local = self._learner.local(state)
        whole = None if self._memory_store.shards else learner_digest(tree_digest(local), [])
        return {"params_digest": params_digest(self._actor_params(local)), "learner_digest": whole}

    def save(
        self,
        update: int,
        state: S,
        older_params: P,
        counters: Json,
        with_actors: bool = False,
    ) -> None:
        """Begin to write a checkpoint of the last `snapshot` and, if `with_actors`, of this process's actors.

        Raises:
            Failure: the previous one could not be written, or the run's directory has gone.
        """
        assert self._checkpoints is not None and self._seen[0] == update
        self._checkpoints.make_ready()  # fails if the run's directory has gone: a record would remake it
        try:
            actors = self._records.snapshots() if with_actors else {}
        except OSError as error:
            raise self._checkpoints.unwritten(error) from error
        saved = None
        if self._devices.is_main:
            saved = Saved(update, jax.device_get(self._learner.local(state)), older_params, counters)
        packs, self._unlisted = self._unlisted, {}
        self._checkpoints.save(update, self._shards, saved, self._shard_digests, actors, packs)
        self._shards = {}

    def record_rollouts(self, epoch: int, rollouts: Iterable[tuple[RecordedRollout, ActorState]]) -> None:
        """Record the actions of one more rollout of each of this process's actors, and the state it ended in.

        Raises:
            Failure: it cannot be written.
        """
        try:
            self._records.add(epoch, rollouts)
        except OSError as error:
            assert self._checkpoints is not None
            raise self._checkpoints.unwritten(error) from error

    def actors(self) -> dict[int, Snapshot]:
        """This process's actors as they are now, by number."""
        return self._records.snapshots()

    def close(self) -> None:
        """Close the files of the actors' actions.  Nothing may be recorded afterwards."""
        self._records.close()

    def discard_snapshot(self) -> None:
        """Make no checkpoint of the last `snapshot`; chunks that neither it nor a checkpoint needs are removed."""
        if self._checkpoints is not None:
            self._checkpoints.prune_memory(self._shards)
