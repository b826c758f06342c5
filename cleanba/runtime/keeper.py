"""What is kept of a learner after an update: digests to compare runs by, and a checkpoint to go on from."""

from collections.abc import Iterable

import jax
import numpy as np

from cleanba.algorithm import ActorParams
from cleanba.files import Json
from cleanba.rollout import PyTree
from cleanba.runtime.checkpoint import Checkpoints, Saved
from cleanba.runtime.devices import Devices
from cleanba.runtime.digests import params_digest, tree_digest
from cleanba.runtime.learner import Learner
from cleanba.runtime.memory import Holdings, Shard, learner_digest
from cleanba.runtime.processes import gather_over_processes
from cleanba.runtime.records import Ending, Records, Told


class Keeper:
    """Looks at a learner and saves what it saw.  All processes have one and call it after the same updates."""

    def __init__(
        self,
        learner: Learner,
        actor_params: ActorParams,
        devices: Devices,
        holdings: Holdings,
        checkpoints: Checkpoints | None,
        records: Records | None = None,
    ):
        self._learner, self._actor_params, self._devices = learner, actor_params, devices
        self._holdings, self._checkpoints = holdings, checkpoints
        self._records = records or Records(None, range(0), {})
        self._shards: dict[int, Shard] = {}
        self._shard_digests: list[str] = []  # of all shards, in order
        self._seen: tuple[int, dict[str, str]] = (-1, {})
        self._unlisted: dict[int, list[str]] = {}  # of every shard: packs of looks that no checkpoint was made of

    def look(self, update: int, state: PyTree, memory: PyTree) -> dict[str, str]:
        """The digests after an update: of the parameters that act, and of the whole state and memory.

        Raises:
            Failure: what is new in the memory cannot be written, or the checkpoint before could not.
        """
        if self._seen[0] == update:
            return self._seen[1]
        if self._checkpoints is not None and self._holdings.shards:
            self._checkpoints.make_ready()  # so that once all processes have looked, the checkpoint before is whole
        try:
            self._shards = self._holdings.look(memory, update)
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
        """How long the last checkpoint took to be written, beside the training."""
        return self._checkpoints.seconds if self._checkpoints is not None else 0.0

    def digests(self, update: int, state: PyTree) -> dict[str, str | None]:
        """What is known of a learner that ended after this update.

        Whoever supervises calls this, perhaps while the learner's thread still looks: so it looks at no memory.
        """
        if self._seen[0] == update:
            return {**self._seen[1]}
        local = self._learner.local(state)
        whole = None if self._holdings.shards else learner_digest(tree_digest(local), [])
        return {"params_digest": params_digest(self._actor_params(local)), "learner_digest": whole}

    def save(
        self,
        update: int,
        state: PyTree,
        older_params: PyTree,
        counters: Json,
        standing: bool = False,
    ) -> None:
        """Begin to write a checkpoint of what `look` has just seen; and of where this process's actors are `standing`.

        Raises:
            Failure: the one before could not be written, or there is no place for this one.
        """
        assert self._checkpoints is not None and self._seen[0] == update
        self._checkpoints.make_ready()  # before a record makes its folder, where the run's directory has gone
        try:
            actors = self._records.snapshots() if standing else {}
        except OSError as error:
            raise self._checkpoints.unwritten(error) from error
        saved = None
        if self._devices.is_main:
            saved = Saved(update, jax.device_get(self._learner.local(state)), older_params, counters)
        packs, self._unlisted = self._unlisted, {}
        self._checkpoints.save(update, self._shards, saved, self._shard_digests, actors, packs)
        self._shards = {}

    def record(self, epoch: int, rollouts: Iterable[tuple[Told, Ending]]) -> None:
        """Note what one more rollout of each of this process's actors told its environments, and where it ended.

        Raises:
            Failure: it cannot be written.
        """
        try:
            self._records.add(epoch, rollouts)
        except OSError as error:
            assert self._checkpoints is not None
            raise self._checkpoints.unwritten(error) from error

    def leave(self) -> None:
        """Make no checkpoint of what `look` has just seen: what it wrote stays only as far as it is still needed."""
        if self._checkpoints is not None:
            self._checkpoints.prune_memory(self._shards)
