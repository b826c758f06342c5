"""Checkpoints by Orbax: save without stopping anybody, keep the newest, restore the newest that is sound.

A checkpoint is taken between two updates, and a run that goes on from it makes the same bits as one that was never
interrupted.  It holds the learner's state, the parameters one version older (which the next rollout is collected with),
and what the logs count; and, in files of its own, the memory of each shard (`memory.py`) and where each actor stands
(`records.py`), unless the environments start afresh there.  The learner's state is written last, once every process has
written its own part: a run that is killed before leaves no checkpoint, rather than a part of one.
"""

import contextlib
import json
import logging
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import jax
import numpy as np

from cleanba.errors import Failure
from cleanba.files import Json, write_whole
from cleanba.rollout import PyTree
from cleanba.runtime import memory, records
from cleanba.runtime.digests import tree_digest
from cleanba.runtime.memory import SavedShard, Shard
from cleanba.runtime.peers import all_came_to, come_to
from cleanba.runtime.records import Snapshot, Standing, actor_folder

if TYPE_CHECKING:
    import orbax.checkpoint as ocp

COUNTERS = "counters"
ARRAYS = "arrays"
LATE_SECONDS = 60.0  # after which a file system shows what another process wrote


@cache  # once is enough
def _hush_tensorstore() -> None:
    """After a read that failed, TensorStore goes on reporting to an event loop that Orbax has closed by then.

    It does so in threads of its own, at any time after the loop was closed: so call this before the read.
    """
    before = sys.unraisablehook

    def hook(unraisable: "sys.UnraisableHookArgs") -> None:  # a type in stubs only
        if str(unraisable.exc_value) != "Event loop is closed":
            before(unraisable)

    sys.unraisablehook = hook


class Saved(NamedTuple):
    """What a checkpoint holds."""

    update: int
    """the last update that is in it"""
    state: PyTree
    """the learner's state after that update, on the host"""
    older_params: PyTree
    """what acting needs, from before that update"""
    counters: Json
    """steps, episodes and seconds so far"""
    memory: dict[int, SavedShard] = {}  # noqa: RUF012  never changed
    """the memory of this process's shards, by number; empty where nothing is kept"""
    standing: dict[int, Standing] = {}  # noqa: RUF012  never changed
    """where this process's actors stand, by number; empty where environments start afresh"""


class Restored(NamedTuple):
    """What was found to go on from."""

    saved: Saved | None
    warnings: list[str]  # one for each newer checkpoint that is not sound


class Checkpoints:
    """The folders `checkpoints/`, `memory/` and `actors/` of a run.

    Every process may read them.  The main process writes the learner's state, which is the same everywhere; each
    process the memory of its shards, and where its actors stand.
    """

    def __init__(
        self,
        run_dir: Path,
        keep: int,
        like_memory: PyTree = (),
        shards: range = range(0),
        actors: range = range(0),
        fresh_after: Callable[[int], bool] = lambda update: True,
    ):
        """`like_memory` has the shapes of one shard's memory, `shards` and `actors` are those that this process has.

        `fresh_after` says of an update whether environments start afresh after it, so that actors stand nowhere.
        """
        import orbax.checkpoint as ocp

        for name in ("absl", "asyncio"):  # Orbax tells of every step; we tell of damage
            logging.getLogger(name).setLevel(logging.CRITICAL)
        self._ocp = ocp
        self.run_dir, self._keep = run_dir, keep
        self._folder = (run_dir / "checkpoints").absolute()
        self._like_memory = like_memory
        self._shards = shards if jax.tree.leaves(like_memory) else range(0)
        self._actors, self._fresh_after = actors, fresh_after
        self._writer = ThreadPoolExecutor(1, "checkpoint")
        self._writing: Future[None] | None = None
        self._closing = threading.Event()
        self._known: list[int] = []  # updates whose memory this process has read or written, in order
        self.seconds = 0.0  # that the last checkpoint took to be written
        self._found: list[int] = []  # the updates there were checkpoints of when `restore` looked
        self._folder.mkdir(parents=True, exist_ok=True)
        self._manager = ocp.CheckpointManager(
            self._folder,
            item_names=(ARRAYS, COUNTERS),
            options=ocp.CheckpointManagerOptions(
                max_to_keep=keep,
                create=False,
                enable_async_checkpointing=False,  # `save` has a thread for it
                multiprocessing_options=_alone("save"),
            ),
        )

    @property
    def keeps_parts(self) -> bool:
        """Whether each process has something to write."""
        return bool(self._shards or self._actors)

    def save(
        self,
        update: int,
        shards: Mapping[int, Shard],
        saved: Saved | None,
        digests: Sequence[str] = (),
        actors: Mapping[int, Snapshot] = {},
        packs: Mapping[int, Sequence[str]] = {},
    ) -> None:
        """Begin to write this process's shards and actors and, in the main process, what else there is to save.

        All processes have called this or `make_ready` since the last checkpoint, which therefore is whole.  `digests`
        are those of the memory of all shards, in their order; `packs` are, of each shard, those that may not be on disk
        yet; `actors` is empty where environments start afresh.  The arrays of `saved` must not change any more.

        Raises:
            Failure: the checkpoint before could not be written, or there is no place for this one.
        """
        self.make_ready()
        keep = [*self._kept(), update]
        self._known.append(update)
        homes = {actor: actor_folder(self.run_dir, actor) for actor in self._actors}
        old = {actor: records.action_files(home) for actor, home in homes.items()}

        def write() -> None:
            began = time.perf_counter()
            for actor, home in homes.items():
                records.prune(home, keep, old[actor], actors.get(actor))
            for actor, snapshot in actors.items():
                records.write(homes[actor], update, snapshot)
            if self._shards:
                memory.prune(self.run_dir, self._shards, keep, shards)
                memory.write(self.run_dir, update, shards, packs)
            come_to(f"checkpoint/{update}")
            if saved is not None and self._parts_are_written(update):
                self._commit(saved, digests)
            self.seconds = time.perf_counter() - began

        self._writing = self._writer.submit(write)

    def _kept(self) -> list[int]:
        # The main process's checkpoints may show late here, so this process keeps what it knows of, too.
        return [*updates_kept(self.run_dir), *self._known[-1:]]

    def prune_memory(self, shards: Mapping[int, Shard]) -> None:
        """Remove what neither a checkpoint needs nor the next one will, which begins from these shards."""
        if shards:
            self.make_ready()
            self._guarded(lambda: memory.prune(self.run_dir, self._shards, self._kept(), shards))

    def make_ready(self) -> None:
        """Wait until everything that this process writes is on disk, before more of it is written.

        Raises:
            Failure: the checkpoint before could not be written, or there is no place for another.
        """
        if not self._folder.is_dir():
            raise Failure(f"{self._folder.parent} has gone; bring it back, then give the same command again to go on")
        self.wait()

    def _parts_are_written(self, update: int) -> bool:
        """Wait until every process has written its part, or this one closes."""
        while not all_came_to(f"checkpoint/{update}"):
            if self._closing.wait(0.05):
                return False
        return True

    def _commit(self, saved: Saved, digests: Sequence[str]) -> None:
        """Write the learner's state.  It comes last: where it is, the whole checkpoint is."""
        arrays = {"state": saved.state, "older_params": saved.older_params}
        counters = {**saved.counters, "digest": tree_digest(arrays), "memory": [*digests]}
        leaves = {f"{i:05d}": np.asarray(x) for i, x in enumerate(jax.tree.leaves(arrays))}
        self._manager.save(
            saved.update,
            args=self._ocp.args.Composite(
                **{ARRAYS: self._ocp.args.StandardSave(leaves), COUNTERS: self._ocp.args.JsonSave(counters)}
            ),
        )

    def wait(self) -> None:
        """Wait until everything that this process writes is on disk.

        Raises:
            Failure: a checkpoint could not be written.
        """
        writing, self._writing = self._writing, None
        if writing is not None:
            self._guarded(writing.result)

    def wait_for_all(self, update: int, seconds: float) -> None:
        """Wait as `wait` does, and so many seconds at most until the main process has written its part, the last."""
        self.wait()
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and update not in updates_kept(self.run_dir):
            time.sleep(0.1)

    def finish(self) -> None:
        """Wait until the last checkpoint is whole, then remove all parts that belong to none that is kept."""
        self.wait()
        if self.keeps_parts and self._known:
            last = self._known[-1]
            self.wait_for_all(last, LATE_SECONDS)
            keep = sorted({*updates_kept(self.run_dir), last})[-self._keep :]  # the main process may not be done
            self._guarded(lambda: self._prune(keep))

    def _prune(self, keep: Sequence[int]) -> None:
        memory.prune(self.run_dir, self._shards, keep)
        for home in (actor_folder(self.run_dir, actor) for actor in self._actors):
            records.prune(home, keep, records.action_files(home))

    def _guarded(self, do: Callable[[], object]) -> None:
        try:
            do()
        except Exception as error:
            raise self.unwritten(error) from error

    def unwritten(self, error: Exception) -> Failure:
        """What to tell where a part of a checkpoint could not be written."""
        full = "No space left on device"
        why = full if full in str(error) else _reason(error, 300)
        return Failure(
            f"a checkpoint could not be written to {self._folder} ({why}); "
            "make room or repair the disk, then give the same command again to go on"
        )

    def close(self) -> None:
        """Let go of the folder.  What `wait` has not reported yet is not reported any more."""
        self._closing.set()
        self._writer.shutdown()
        with contextlib.suppress(Exception):
            self._manager.close()

    def restore(self, like_state: PyTree, like_params: PyTree, at_most: int | None = None) -> Restored:
        """The newest checkpoint that is sound in all parts that this process needs, or none.

        `like_state` and `like_params` give the structure, shapes and types to expect; `at_most` is the last update to
        look at.

        Raises:
            Failure: there are checkpoints, but none is sound.
        """
        warnings: list[str] = []
        self._found = updates_kept(self.run_dir)
        for update in reversed(self._found):
            if at_most is not None and update > at_most:
                continue
            try:
                saved = _read(self.run_dir, update, like_state, like_params)
                digests = saved.counters.pop("memory")
                if self._shards:
                    saved = saved._replace(
                        memory=memory.read(self.run_dir, update, self._shards, self._like_memory, digests)
                    )
                if not self._fresh_after(update):
                    standing = {
                        actor: records.read(actor_folder(self.run_dir, actor), update) for actor in self._actors
                    }
                    saved = saved._replace(standing=standing)
                self._known = [update]
                return Restored(saved, warnings)
            except Exception as error:  # whatever is wrong with it, an older one may be sound
                warnings.append(f"checkpoint {update} is damaged and left out: {_reason(error, 200)}")
        if warnings:  # to begin again would overwrite what may be readable tomorrow
            raise Failure(
                f"no checkpoint in {self._folder} can be read ({'; '.join(warnings)}); bring sound ones back, or "
                "remove that directory to start over"
            )
        return Restored(None, warnings)

    def forget_after(self, update: int) -> None:
        """Put checkpoints newer than `update` aside: damaged ones, which the run is about to write again."""
        damaged = [newer for newer in self._found if newer > update]
        memory.put_aside(self.run_dir, self._shards, damaged)
        records.put_aside(self.run_dir, self._actors, damaged)
        if jax.process_index() != 0:
            return
        aside = self._folder.with_name("damaged_checkpoints")
        for newer in damaged:
            aside.mkdir(exist_ok=True)
            shutil.rmtree(aside / str(newer), ignore_errors=True)
            os.replace(self._folder / str(newer), aside / str(newer))
        self._manager.reload()


def updates_kept(run_dir: Path) -> list[int]:
    """The updates that a run keeps checkpoints of."""
    folder = run_dir / "checkpoints"
    return sorted(int(p.name) for p in folder.iterdir() if p.name.isdecimal()) if folder.is_dir() else []


def _alone(use: str) -> "ocp.options.MultiprocessingOptions":
    """No process waits for another: the state is the same everywhere, so each reads, and one writes, by itself."""
    import orbax.checkpoint as ocp

    me = jax.process_index()
    return ocp.options.MultiprocessingOptions(
        primary_host=me, active_processes={me}, barrier_sync_key_prefix=f"cleanba-{use}-{me}"
    )


def read_arrays(run_dir: Path, update: int) -> list[np.ndarray]:
    """All arrays of one checkpoint, in their order, without knowing what they mean."""
    import orbax.checkpoint as ocp

    logging.getLogger("absl").setLevel(logging.CRITICAL)
    _hush_tensorstore()
    with ocp.StandardCheckpointer(multiprocessing_options=_alone("read")) as checkpointer:
        metadata = checkpointer.metadata((run_dir / "checkpoints" / str(update) / ARRAYS).absolute())
        tree = getattr(metadata, "item_metadata", metadata)
        if tree is None:
            raise ValueError("its list of arrays is damaged")
        like = {k: np.zeros(v.shape, v.dtype) for k, v in dict(tree).items()}
        restored = checkpointer.restore((run_dir / "checkpoints" / str(update) / ARRAYS).absolute(), like)
    return [np.asarray(restored[k]) for k in sorted(restored)]


def read(run_dir: Path, update: int, like_state: PyTree, like_params: PyTree) -> Saved:
    """One checkpoint without its memory, and without holding or changing the folder: its run may be going on.

    Raises:
        Failure: it is damaged, or just being removed.
    """
    try:
        return _read(run_dir, update, like_state, like_params)
    except Exception as error:  # Orbax raises many kinds
        reason = _reason(error, 200)
        raise Failure(f"checkpoint {update} of {run_dir} cannot be read: {reason}; try another --checkpoint") from error


def _read(run_dir: Path, update: int, like_state: PyTree, like_params: PyTree) -> Saved:
    """One checkpoint without its memory.  Raises whatever Orbax raises, and `ValueError`, if it is damaged."""
    leaves_like, structure = jax.tree.flatten({"state": like_state, "older_params": like_params})
    counters = json.loads((run_dir / "checkpoints" / str(update) / COUNTERS / "metadata").read_text())
    leaves = read_arrays(run_dir, update)
    if [x.shape for x in leaves] != [x.shape for x in leaves_like]:
        raise ValueError("its arrays are not those of this network")
    arrays = jax.tree.unflatten(structure, leaves)
    if counters.pop("digest") != tree_digest(arrays):
        raise ValueError("its checksum does not match")
    return Saved(update, arrays["state"], arrays["older_params"], counters)


def _reason(error: Exception, most: int) -> str:
    """The first line of what an error says."""
    return (str(error).splitlines() or [type(error).__name__])[0][:most]


def save_model(path: Path, params: PyTree) -> None:
    """What acting needs, in Flax's msgpack form, there whole or not at all."""
    import flax.serialization

    write_whole(path, flax.serialization.to_bytes(jax.device_get(params)))


def read_model(path: Path, like_params: PyTree) -> PyTree:
    """The inverse; `like_params` gives the structure and shapes to expect.

    Raises:
        Failure: these are not the parameters of this network.
    """
    import flax.serialization

    try:
        zeros = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), like_params)
        size, most = path.stat().st_size, sum(x.nbytes + 1000 for x in jax.tree.leaves(zeros)) + 10_000
        if size > most:
            raise ValueError(f"it has {size:,} bytes, and they take {most:,} at most")
        params = flax.serialization.from_bytes(zeros, path.read_bytes())
        if jax.tree.map(np.shape, params) != jax.tree.map(np.shape, zeros):
            raise ValueError("its arrays have other shapes")
        if jax.tree.map(lambda x: np.asarray(x).dtype, params) != jax.tree.map(lambda x: x.dtype, zeros):
            raise ValueError("its arrays are of other types")
    except Exception as error:  # msgpack and Flax raise many kinds
        raise Failure(f"{path} does not hold the parameters of this network: {error}") from error
    return params
