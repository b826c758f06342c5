"""What is kept of a learner at the end of an epoch: digests to compare runs by, and a checkpoint to go on from."""

import jax
import numpy as np

from cleanba.algorithm import ActorParams
from cleanba.files import Json
from cleanba.rollout import PyTree
from cleanba.runtime.checkpoint import Checkpoints, Saved
from cleanba.runtime.digests import params_digest, tree_digest
from cleanba.runtime.learner import Learner
from cleanba.runtime.memory import Holdings, Shard, learner_digest
from cleanba.runtime.placement import Devices, gather_over_processes


class Keeper:
    """Looks at a learner and saves what it saw.  All processes have one and call it after the same updates."""

    def __init__(
        self,
        learner: Learner,
        actor_params: ActorParams,
        devices: Devices,
        holdings: Holdings,
        checkpoints: Checkpoints | None,
    ):
        self._learner, self._actor_params, self._devices = learner, actor_params, devices
        self._holdings, self._checkpoints = holdings, checkpoints
        self._shards: dict[int, Shard] = {}
        self._shard_digests: list[str] = []  # of all shards, in order
        self._seen: tuple[int, dict[str, str]] = (-1, {})

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

    def digests(self, update: int, state: PyTree) -> dict[str, str | None]:
        """What is known of a learner that ended after this update.

        Whoever supervises calls this, perhaps while the learner's thread still looks: so it looks at no memory.
        """
        if self._seen[0] == update:
            return {**self._seen[1]}
        local = self._learner.local(state)
        whole = None if self._holdings.shards else learner_digest(tree_digest(local), [])
        return {"params_digest": params_digest(self._actor_params(local)), "learner_digest": whole}

    def save(self, update: int, state: PyTree, older_params: PyTree, counters: Json) -> None:
        """Begin to write a checkpoint of what `look` has just seen.

        Raises:
            Failure: the one before could not be written, or there is no place for this one.
        """
        assert self._checkpoints is not None and self._seen[0] == update
        saved = None
        if self._devices.is_main:
            saved = Saved(update, jax.device_get(self._learner.local(state)), older_params, counters)
        self._checkpoints.save(update, self._shards, saved, self._shard_digests)
        self._shards = {}
