"""Checkpoints by Orbax: save without stopping anybody, keep the newest, restore the newest that is sound.

A checkpoint is taken between two updates, where the environments start afresh; so it needs no emulator's state, and
a run that goes on from it makes the same bits as one that was never interrupted.  It holds the learner's state, the
parameters one version older (which the next rollout is collected with), and what the logs count; and, in files of its
own (`memory.py`), the memory of each shard.  A checkpoint is whole once all of this is there.
"""

import contextlib
import json
import logging
import os
import shutil
import sys
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
from cleanba.runtime import memory
from cleanba.runtime.digests import tree_digest
from cleanba.runtime.memory import SavedShard, Shard

if TYPE_CHECKING:
    import orbax.checkpoint as ocp

COUNTERS = "counters"
ARRAYS = "arrays"


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


class Restored(NamedTuple):
    """What was found to go on from."""

    saved: Saved | None
    warnings: list[str]  # one for each newer checkpoint that is not sound


class Checkpoints:
    """The folders `checkpoints/` and `memory/` of a run.

    Every process may read them.  The main process writes the learner's state, which is the same everywhere; each
    process the memory of its shards.
    """

    def __init__(self, run_dir: Path, keep: int, like_memory: PyTree = (), shards: range = range(0)):
        """`like_memory` has the shapes of one shard's memory, `shards` are those that this process holds."""
        import orbax.checkpoint as ocp

        for name in ("absl", "asyncio"):  # Orbax tells of every step; we tell of damage
            logging.getLogger(name).setLevel(logging.CRITICAL)
        self._ocp = ocp
        self._run_dir = run_dir
        self._folder = (run_dir / "checkpoints").absolute()
        self._like_memory = like_memory
        self._shards = shards if jax.tree.leaves(like_memory) else range(0)
        self._writer = ThreadPoolExecutor(1, "memory")
        self._writing: Future[None] | None = None
        self._known: list[int] = []  # updates whose memory this process has read or written, in order
        self._found: list[int] = []  # the updates there were checkpoints of when `restore` looked
        self._folder.mkdir(parents=True, exist_ok=True)
        self._manager = ocp.CheckpointManager(
            self._folder,
            item_names=(ARRAYS, COUNTERS),
            options=ocp.CheckpointManagerOptions(
                # The newest may still lack the memory of another process: then the one before must be there.
                max_to_keep=keep + bool(self._shards),
                create=False,
                multiprocessing_options=_alone("save"),
            ),
        )

    @property
    def keeps_memory(self) -> bool:
        """Whether there is memory to write."""
        return bool(self._shards)

    def save_memory(self, update: int, shards: Mapping[int, Shard]) -> None:
        """Begin to write the memory of this process's shards, and remove what no checkpoint refers to any more.

        All processes have called `wait` since the last checkpoint, which therefore is whole.

        Raises:
            Failure: the memory could not be written.
        """
        if not self._shards:
            return

        # A file system may show what another process wrote a minute late, so this one keeps what it knows of, too.
        keep = [*updates_kept(self._run_dir), *self._known[-1:], update]

        def write() -> None:
            memory.prune(self._run_dir, self._shards, keep, shards)
            memory.write(self._run_dir, update, shards)

        self._guarded(self._wait_for_memory)
        self._known.append(update)
        self._writing = self._writer.submit(write)

    def save(self, saved: Saved, digests: Sequence[str] = ()) -> None:
        """Begin to write the learner's state; returns as soon as the arrays may change again.

        `digests` are those of the memory of all shards, in their order.

        Raises:
            Failure: this one or the one before could not be written.
        """
        if not self._folder.is_dir():
            raise Failure(f"{self._folder.parent} has gone; bring it back, then give the same command again to go on")
        arrays = {"state": saved.state, "older_params": saved.older_params}
        counters = {**saved.counters, "digest": tree_digest(arrays), "memory": [*digests]}
        leaves = {f"{i:05d}": np.asarray(x) for i, x in enumerate(jax.tree.leaves(arrays))}
        self._guarded(
            lambda: self._manager.save(
                saved.update,
                args=self._ocp.args.Composite(
                    **{ARRAYS: self._ocp.args.StandardSave(leaves), COUNTERS: self._ocp.args.JsonSave(counters)}
                ),
            )
        )

    def wait(self) -> None:
        """Wait until everything that this process writes is on disk.

        Raises:
            Failure: a checkpoint could not be written.
        """
        self._guarded(self._manager.wait_until_finished)
        self._guarded(self._wait_for_memory)

    def wait_for_all(self, update: int, num_shards: int, seconds: float) -> None:
        """Wait as `wait` does, and so many seconds at most until the other processes have written their shards."""
        self.wait()
        deadline = time.monotonic() + seconds
        listings = [memory.listing(self._run_dir, shard, update) for shard in range(num_shards * bool(self._shards))]
        while time.monotonic() < deadline and not all(path.exists() for path in listings):
            time.sleep(0.1)

    def finish(self) -> None:
        """Wait as `wait` does, then remove what no checkpoint refers to any more."""
        self.wait()
        keep = [*updates_kept(self._run_dir), *self._known[-1:]]
        self._guarded(lambda: memory.prune(self._run_dir, self._shards, keep))

    def _wait_for_memory(self) -> None:
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    def _guarded(self, do: Callable[[], object]) -> None:
        try:
            do()
        except Exception as error:
            full = "No space left on device"
            why = full if full in str(error) else _reason(error, 300)
            raise Failure(
                f"a checkpoint could not be written to {self._folder} ({why}); "
                "make room or repair the disk, then give the same command again to go on"
            ) from error

    def close(self) -> None:
        """Let go of the folder.  What `wait` has not reported yet is not reported any more."""
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
        self._found = updates_kept(self._run_dir)
        for update in reversed(self._found):
            if at_most is not None and update > at_most:
                continue
            try:
                saved = _read(self._run_dir, update, like_state, like_params)
                digests = saved.counters.pop("memory")
                if self._shards:
                    saved = saved._replace(
                        memory=memory.read(self._run_dir, update, self._shards, self._like_memory, digests)
                    )
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
        memory.put_aside(self._run_dir, self._shards, damaged)
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
        params = flax.serialization.from_bytes(zeros, path.read_bytes())
        if jax.tree.map(np.shape, params) != jax.tree.map(np.shape, zeros):
            raise ValueError("its arrays have other shapes")
    except Exception as error:  # msgpack and Flax raise many kinds
        raise Failure(f"{path} does not hold the parameters of this network: {error}") from error
    return params
