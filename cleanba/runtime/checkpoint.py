"""Checkpoints by Orbax: save in the background, keep the newest, restore the newest that is undamaged.

A checkpoint is taken between two updates, and a run that continues from it ends in the same bits as one that was never
interrupted.  It holds the learner's state, the parameters one version older (with concurrency the next rollout is
collected with them) and the logs' counters.  In files of their own it holds the memory of each shard (`memory.py`) and
each actor (`records.py`), unless environments start afresh after this update.  The learner's state is written last,
once every process has written its part, so a run that is killed earlier leaves no checkpoint rather than a part of one.
"""

import contextlib
import json
import logging
import os
import shutil
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from functools import cache
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

import jax
import numpy as np

from cleanba.algorithm import P, S
from cleanba.config import Retention
from cleanba.errors import Failure
from cleanba.files import METRICS, Json, files_below, may_pass, optional_json, sync_folder, write_whole
from cleanba.interrupts import after_this
from cleanba.rollout import PyTree
from cleanba.runtime import memory, records
from cleanba.runtime.digests import json_digest, tree_digest
from cleanba.runtime.memory import SavedShard, ShardSnapshot
from cleanba.runtime.peers import all_reached_milestone, reach_milestone
from cleanba.runtime.records import SavedActor, Snapshot, actor_folder
from cleanba.waited import in_a_thread, in_background

if TYPE_CHECKING:
    import orbax.checkpoint as ocp

FOLDER = "checkpoints"
COUNTERS = "counters"
GOES_ON = "goes_on"  # in the counters: whether a longer run could continue from here; earlier versions wrote none
ARRAYS = "arrays"
LATE_SECONDS = 60.0  # how long a shared file system may take to show what another process wrote

T = TypeVar("T")


@contextlib.contextmanager
def _quiet(*names: str) -> Iterator[None]:
    """Within the context these loggers log nothing but critical errors."""
    before = {name: logging.getLogger(name).level for name in names}
    for name in names:
        logging.getLogger(name).setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for name, level in before.items():
            logging.getLogger(name).setLevel(level)


@cache  # once is enough
def _hush_asyncio() -> None:
    """Ignore asyncio's reports of what Orbax left behind.  They come after `Checkpoints.close`, too."""

    def is_of_others(record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        frames = traceback.extract_tb(error.__traceback__) if error is not None else []
        text = f"{record.getMessage()} {error}"
        theirs = ("Event loop is closed", "orbax", "tensorstore")
        return not any(word in place for word in theirs for place in (text, *(frame.filename for frame in frames)))

    logging.getLogger("asyncio").addFilter(is_of_others)


@cache  # once is enough
def _hush_tensorstore() -> None:
    """Ignore TensorStore's reports to an event loop that Orbax has closed after a failed read.

    They come from threads of its own, at any time, so call this before the read.
    """
    before = sys.unraisablehook

    def hook(unraisable: "sys.UnraisableHookArgs") -> None:  # a type in stubs only
        if str(unraisable.exc_value) != "Event loop is closed":
            before(unraisable)

    sys.unraisablehook = hook


class Saved(NamedTuple, Generic[S, P]):
    """What a checkpoint holds."""

    update: int
    """the update it was taken after"""
    state: S
    """the learner's state after that update, on the host"""
    older_params: P
    """the parameters that act, one version older than `state`"""
    counters: Json
    """steps, episodes and seconds so far"""
    memory: dict[int, SavedShard] = {}  # noqa: RUF012  never changed
    """the memory of this process's shards, by number; empty where nothing is kept"""
    actors: dict[int, SavedActor] = {}  # noqa: RUF012  never changed
    """this process's actors, by number; empty where environments start afresh after this update"""


class Restored(NamedTuple, Generic[S, P]):
    """The checkpoint to continue from, if there is one."""

    saved: Saved[S, P] | None
    warnings: list[str]  # one for each newer checkpoint that is damaged


class Checkpoints:
    """The folders `checkpoints/`, `memory/` and `actors/` of a run.

    Every process may read them.  The main process writes the learner's state, which is the same everywhere; each
    process writes the memory of its shards, and its actors.
    """

    def __init__(
        self,
        run_dir: Path,
        keep: int | str,
        like_memory: PyTree = (),
        shards: range = range(0),
        actors: range = range(0),
        ends_epoch: Callable[[int], bool] = lambda update: True,
        require_ours: Callable[[], None] = lambda: None,
    ):
        """`like_memory` has the shapes of one shard's memory; `shards` and `actors` are this process's.

        keep: which checkpoints stay, as --keep-checkpoints says.

        ends_epoch: update -> whether an epoch of environments, or the run, ends with it: no actor goes on from there,
            so none is read.

        require_ours: raises `Replaced` if the directory has become another run's.
        """
        self._opened = contextlib.ExitStack()
        self._opened.enter_context(_quiet("absl"))  # Orbax logs every step; damage is reported here
        _hush_asyncio()
        self._ocp = ocp = orbax()
        # Environments that are stepped in this process may change the current directory.
        self.run_dir, self._retention = run_dir.absolute(), Retention.parse(keep)
        self._folder = self.run_dir / FOLDER
        self._like_memory = like_memory
        self._shards = shards if jax.tree.leaves(like_memory) else range(0)
        self._actors, self._ends_epoch, self._require_ours = actors, ends_epoch, require_ours
        self._writing: Future[None] | None = None
        self._newest: Future[None] | None = None  # the same, but still set after `wait`
        self._closing = threading.Event()
        self._known: list[int] = []  # updates whose memory this process has read or written, in order
        self.seconds = 0.0  # how long the last checkpoint took to be written
        self._found: list[int] = []  # the updates that had checkpoints when `restore` was called
        self._folder.mkdir(parents=True, exist_ok=True)
        self._opened_folder = os.open(self._folder, os.O_RDONLY)  # so that no other folder gets its inode number
        self._opened.callback(os.close, self._opened_folder)
        self._manager = ocp.CheckpointManager(
            self._folder,
            item_names=(ARRAYS, COUNTERS),
            options=ocp.CheckpointManagerOptions(
                create=False,
                enable_async_checkpointing=False,  # `save` has a thread for it
                multiprocessing_options=_alone("save"),
            ),
        )

    @property
    def keeps_parts(self) -> bool:
        """Whether each process has a part of its own to write."""
        return bool(self._shards or self._actors)

    def save(
        self,
        update: int,
        shards: Mapping[int, ShardSnapshot],
        saved: Saved[Any, Any] | None,
        digests: Sequence[str] = (),
        actors: Mapping[int, Snapshot] = {},
        packs: Mapping[int, Sequence[str]] = {},
    ) -> None:
        """Begin to write this process's shards and actors and, in the main process, the learner's state.

        Where processes have parts of their own, all have called this or `make_ready` since the previous checkpoint,
        which is therefore whole.

        saved: the learner's state, in the main process; its arrays must not change any more.
        digests: of the memory of all shards, in order.
        actors: empty where environments start afresh.
        packs: for each shard, packs that may not be synced to disk yet.

        Raises:
            Failure: the previous checkpoint could not be written, or the run's directory has gone.
        """
        self.make_ready()
        keep = [*self._kept(), update]
        self._known.append(update)
        homes = {actor: actor_folder(self.run_dir, actor) for actor in self._actors}
        old = self._guarded(lambda: {actor: records.action_files(home) for actor, home in homes.items()})

        def write() -> None:
            began = time.perf_counter()
            self._require_ours()
            self._require_newest(update)
            for actor, home in homes.items():
                records.prune(home, keep, old[actor], actors.get(actor), self._is_whole)
            if self._shards:
                memory.prune(self.run_dir, self._shards, keep, shards, self._is_whole)
            self._require_newest(update)  # again: the process may have been suspended meanwhile
            for actor, snapshot in actors.items():
                records.write(homes[actor], update, snapshot)
            if self._shards:
                memory.write(self.run_dir, update, shards, packs)
            reach_milestone(f"checkpoint/{update}")
            if saved is not None and self._parts_are_written(update):
                self._commit(saved, digests)
            self.seconds = time.perf_counter() - began

        self._writing = self._newest = in_background(write, "checkpoint")

    def _is_whole(self, update: int) -> bool:
        """Whether there is a checkpoint of this update."""
        return (self._folder / str(update)).is_dir()

    def _require_newest(self, update: int) -> None:
        """Raise `Failure` if this or a later update has a checkpoint.

        Then this process was suspended for so long that the run has gone on without it.
        """
        later = [kept for kept in updates_kept(self.run_dir) if kept >= update and kept not in self._found]
        if later:
            raise Failure(
                f"{self._folder} has a checkpoint of update {later[-1]} already: the run has gone on without this "
                "process, which therefore ends and writes nothing more"
            )

    def _kept(self) -> list[int]:
        # The main process's newest checkpoint may not be visible here yet, so also keep the newest that is known.
        return [*updates_kept(self.run_dir), *self._known[-1:]]

    def prune_memory(self, shards: Mapping[int, ShardSnapshot]) -> None:
        """Remove chunks that no checkpoint needs, except those of `shards`, which the next one will need."""
        if shards:
            self.make_ready()
            self._guarded(lambda: memory.prune(self.run_dir, self._shards, self._kept(), shards, self._is_whole))

    def make_ready(self) -> None:
        """Wait until everything that this process writes is on disk.  Call it before writing more.

        Raises:
            Failure: the previous checkpoint could not be written, or the run's directory has gone, or is another run's.
        """
        self._require_ours()
        if self._is_gone():
            raise Failure(
                f"{self._folder.parent} no longer exists; restore the directory, then repeat the command to resume"
            )
        self.wait()

    def _parts_are_written(self, update: int) -> bool:
        """Wait until every process has written its part, or this one closes."""
        while not all_reached_milestone(f"checkpoint/{update}"):
            if self._closing.wait(0.05):
                return False
        return True

    def _commit(self, saved: Saved[Any, Any], digests: Sequence[str]) -> None:
        """Write the learner's state, the last part: once it is there, the checkpoint is whole."""
        self._require_ours()
        with contextlib.suppress(FileNotFoundError), open(self.run_dir / METRICS, "rb+") as log:
            os.fsync(log.fileno())  # else a power failure may leave a checkpoint without its digests in the log
        arrays = {"state": saved.state, "older_params": saved.older_params}
        counters = {**saved.counters, "digest": tree_digest(arrays), "memory": [*digests]}
        counters["counters_digest"] = json_digest(counters)
        leaves = {f"{i:05d}": np.asarray(x) for i, x in enumerate(jax.tree.leaves(arrays))}
        self._manager.save(
            saved.update,
            args=self._ocp.args.Composite(
                **{ARRAYS: self._ocp.args.StandardSave(leaves), COUNTERS: self._ocp.args.JsonSave(counters)}
            ),
        )
        sync_folder(self._folder / str(saved.update))  # Orbax syncs only the arrays
        there = updates_kept(self.run_dir)  # the new one is on disk before those that it replaces are removed
        for update in sorted({*there} - {*self._retention.kept(there)}):
            self._manager.delete(update)

    def wait(self) -> None:
        """Wait until everything that this process writes is on disk.

        Raises:
            Failure: a checkpoint could not be written.
        """
        writing, self._writing = self._writing, None
        if writing is not None:
            self._guarded(writing.result)

    def check(self) -> None:
        """`make_ready`, if the checkpoint that was being written is done: so that an error is told soon."""
        if self._writing is not None and self._writing.done():
            self.make_ready()

    def wait_for_all(self, update: int, seconds: float) -> None:
        """`wait`; then wait for the main process to write the last part, for at most this many seconds."""
        self.wait()
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and update not in updates_kept(self.run_dir):
            time.sleep(0.1)

    def finish(self) -> None:
        """Wait until the last checkpoint is whole, then remove parts of checkpoints that are no longer kept."""
        self.wait()
        if self.keeps_parts and self._known:
            last = self._known[-1]
            self.wait_for_all(last, LATE_SECONDS)
            keep = [*self._retention.kept(updates_kept(self.run_dir)), last]  # the main process may not be done
            self._guarded(lambda: self._prune(keep))

    def _prune(self, keep: Sequence[int]) -> None:
        self._require_ours()
        memory.prune(self.run_dir, self._shards, keep, whole=self._is_whole)
        for home in (actor_folder(self.run_dir, actor) for actor in self._actors):
            records.prune(home, keep, records.action_files(home), whole=self._is_whole)

    def _guarded(self, do: Callable[[], T]) -> T:
        try:
            return do()
        except Failure:  # a sentence already
            raise
        except Exception as error:
            raise self.unwritten(error) from error

    def unwritten(self, error: Exception) -> Failure:
        """The error for a part of a checkpoint that could not be written."""
        full = "No space left on device"
        why = full if full in str(error) else _reason(error, 300)
        return Failure(
            f"a checkpoint could not be written to {self._folder} ({why}); "
            "free disk space or repair the disk, then run the same command again to resume"
        )

    def close(self, seconds: float | None = None) -> None:
        """Close the folder.  Errors that `wait` has not raised are dropped.

        seconds: how long to wait for a checkpoint that is being written, as a disk may hang; None: as long as it takes.
        """
        self._closing.set()
        if self._newest is None or wait_for([self._newest], seconds).done:
            with contextlib.suppress(Exception):
                self._manager.close()
            self._remove_if_made_anew()
        self._opened.close()
        self._opened_folder = -1  # its number may be another file's from now on

    def _is_gone(self) -> bool:
        """Whether the folder was removed.  TensorStore may have made another one in its place."""
        try:
            return not os.path.samestat(os.fstat(self._opened_folder), os.stat(self._folder))
        except OSError:
            return True

    def _remove_if_made_anew(self) -> None:
        """Remove folders that were made again if the run's directory is deleted while a checkpoint is written."""
        with contextlib.suppress(OSError):
            if self._is_gone() and not (self.run_dir / "config.json").exists():
                shutil.rmtree(self._folder, ignore_errors=True)
                for folder in sorted(self.run_dir.rglob("*"), reverse=True):
                    folder.rmdir()  # which fails for files
                self.run_dir.rmdir()

    def restore(self, like_state: S, like_params: P, at_most: int | None = None) -> Restored[S, P]:
        """The newest checkpoint of which all parts that this process needs are undamaged, or none.

        `like_state` and `like_params` have the structure, shapes and dtypes to expect.  Checkpoints of updates after
        `at_most` are left out.

        Raises:
            Failure: there are checkpoints, but all are damaged, or one that may be sound cannot be read now.
        """
        warnings: list[str] = []
        other: Failure | None = None
        self._found = updates_kept(self.run_dir)
        for update in reversed(self._found):
            if at_most is not None and update > at_most:
                continue
            try:
                actors = range(0) if self._ends_epoch(update) else self._actors
                saved = read_whole(
                    self.run_dir, update, like_state, like_params, self._like_memory, self._shards, actors
                )
                self._known = [update]
                return Restored(saved, warnings)
            except OtherNetwork as error:  # or its list of arrays is damaged: then an older one may be undamaged
                warnings.append(f"checkpoint {update} is damaged and left out: {error}")
                other = other or Failure(
                    f"checkpoint {update} in {self._folder} is of another network: {error}; undo the change of the "
                    "network's code, go on with the version of Cleanba that began the run, or choose another --run-dir"
                )
            except Exception as error:  # whatever is wrong with it, an older one may be undamaged
                system = error if may_pass(error) else unreadable(self._folder / str(update))
                if system is not None:
                    denied = isinstance(system, PermissionError)
                    raise Failure(
                        f"checkpoint {update} in {self._folder} cannot be read now ({_reason(system, 200)}), but may "
                        f"be undamaged; {'make it readable' if denied else 'free memory or repair the disk'}, then run "
                        "the same command again to resume"
                    ) from error
                warnings.append(f"checkpoint {update} is damaged and left out: {_reason(error, 200)}")
        if other is not None:
            raise other
        if warnings:  # starting over would overwrite files that may be readable again later
            raise Failure(
                f"no checkpoint in {self._folder} can be read ({'; '.join(warnings)}); restore undamaged ones, or "
                "remove that directory to start over"
            )
        return Restored(None, warnings)

    def forget_after(self, update: int) -> None:
        """Move the damaged checkpoints after `update` to damaged_checkpoints/; the run will write them again."""
        damaged = [newer for newer in self._found if newer > update]
        memory.put_aside(self.run_dir, self._shards, damaged)
        records.put_aside(self.run_dir, self._actors, damaged)
        if jax.process_index() != 0:
            return
        aside = self._folder.with_name("damaged_checkpoints")
        for newer in damaged:
            aside.mkdir(exist_ok=True)
            shutil.rmtree(aside / str(newer), ignore_errors=True)
            shutil.move(self._folder / str(newer), aside / str(newer))  # checkpoints/ may be a link to another disk
        self._manager.reload()


def orbax() -> ModuleType:
    """Orbax, which takes a second to import, and has compiled modules that Ctrl-C may not interrupt meanwhile."""
    with after_this():
        return import_module("orbax.checkpoint")


def updates_to_read(run_dir: Path) -> list[int]:
    """`updates_kept`, for reading at once.  Orbax is imported first: in these seconds a run may replace checkpoints."""
    orbax()
    return updates_kept(run_dir)


def newest_first(run_dir: Path, there: Sequence[int]) -> Iterator[int]:
    """The updates of these checkpoints, the newest first; then those that the run has written meanwhile, as long as
    there are any.

    A run that trains keeps few checkpoints, and may replace all that were found before the first of them is read.
    """
    tried: set[int] = set()
    deadline = time.monotonic() + LOOK_SECONDS
    while (left := sorted({*there} - tried, reverse=True)) and (not tried or time.monotonic() < deadline):
        for update in left:
            tried.add(update)
            yield update
        there = updates_kept(run_dir)


LOOK_SECONDS = 60.0


def updates_kept(run_dir: Path) -> list[int]:
    """The updates that a run has checkpoints of, in order."""
    folder = run_dir / FOLDER
    return sorted(int(p.name) for p in folder.iterdir() if p.name.isdecimal()) if folder.is_dir() else []


def counters_file(run_dir: Path, update: int) -> Path:
    """The file of a checkpoint's counters and digests, as Orbax names it: JSON."""
    return run_dir / FOLDER / str(update) / COUNTERS / "metadata"


def can_be_made_longer(run_dir: Path, update: int) -> bool:
    """Whether a run that was to end with this checkpoint can go on from it.

    Earlier versions left out the last version of the parameters and the actors there.  Actors are also left out where
    environments do not repeat themselves.
    """
    return optional_json(counters_file(run_dir, update)).get(GOES_ON) is True


def _alone(use: str) -> "ocp.options.MultiprocessingOptions":
    """Options for Orbax not to wait for other processes: each reads, and one writes, by itself."""
    me = jax.process_index()
    return orbax().options.MultiprocessingOptions(
        primary_host=me, active_processes={me}, barrier_sync_key_prefix=f"cleanba-{use}-{me}"
    )


class OtherNetwork(ValueError):
    """A checkpoint's arrays have other shapes than those of the network that would read them."""


def unreadable(folder: Path) -> Exception | None:
    """The system's error where a file of a checkpoint may be sound, but cannot be read now; None if all can be read.

    TensorStore's own errors do not tell this from damage.
    """
    try:
        for path in files_below(folder):
            path.read_bytes()
    except Exception as error:
        return error if may_pass(error) else None
    return None


def read_arrays(run_dir: Path, update: int, shapes: Sequence[tuple[int, ...]] | None = None) -> list[np.ndarray]:
    """All arrays of one checkpoint, in order, without their structure.

    Raises:
        OtherNetwork: they have other shapes than these, if any are given.  They are not read then.
    """
    _hush_tensorstore()
    # In a thread of its own: Orbax leaves a thread that calls it without its event loop.
    return in_a_thread(lambda: _read_arrays(run_dir, update, shapes), "reading a checkpoint")


def _read_arrays(run_dir: Path, update: int, shapes: Sequence[tuple[int, ...]] | None) -> list[np.ndarray]:
    """`read_arrays`, in this thread."""
    ocp, folder = orbax(), (run_dir / FOLDER / str(update) / ARRAYS).absolute()
    with _quiet("absl"), ocp.StandardCheckpointer(multiprocessing_options=_alone("read")) as checkpointer:
        metadata = checkpointer.metadata(folder)
        tree = getattr(metadata, "item_metadata", metadata)
        if tree is None:
            raise ValueError("its list of arrays is damaged")
        known = dict(tree)
        if shapes is not None and [tuple(known[k].shape) for k in sorted(known)] != [*shapes]:
            raise OtherNetwork("its arrays are not those of this network")
        like = {k: np.zeros(v.shape, v.dtype) for k, v in known.items()}
        restored = checkpointer.restore(folder, like)
    return [np.asarray(restored[k]) for k in sorted(restored)]


def read(run_dir: Path, update: int, like_state: S, like_params: P) -> Saved[S, P]:
    """One checkpoint without its memory.  The run may still be training: its folder is neither locked nor changed.

    Raises:
        Failure: it is damaged, or being removed.
    """
    try:
        return _read(run_dir, update, like_state, like_params)
    except Exception as error:  # Orbax raises many kinds
        reason = _reason(error, 200)
        raise Failure(f"checkpoint {update} of {run_dir} cannot be read: {reason}; try another --checkpoint") from error


def _read(run_dir: Path, update: int, like_state: S, like_params: P) -> Saved[S, P]:
    """One checkpoint without its memory.  Raises whatever Orbax raises, and `ValueError`, if it is damaged."""
    leaves_like, structure = jax.tree.flatten({"state": like_state, "older_params": like_params})
    counters = json.loads(counters_file(run_dir, update).read_text())
    digest = counters.pop("counters_digest", None)  # earlier versions wrote none
    if digest not in (None, json_digest(counters)):
        raise ValueError("the checksum of its counters does not match")
    leaves = read_arrays(run_dir, update, [x.shape for x in leaves_like])
    arrays = jax.tree.unflatten(structure, leaves)
    if counters.pop("digest") != tree_digest(arrays):
        raise ValueError("its checksum does not match")
    return Saved(update, arrays["state"], arrays["older_params"], counters)


def read_whole(
    run_dir: Path, update: int, like_state: S, like_params: P, like_memory: PyTree, shards: range, actors: range
) -> Saved[S, P]:
    """One checkpoint, with the memory of these shards and with these actors.  Nothing is locked or changed.

    like_memory: the shapes of one shard's memory; without leaves there is none to read.
    actors: empty if environments start afresh after this update.

    Raises:
        Exception: whatever Orbax raises, and `ValueError`, if a part is damaged or missing.
    """
    saved = _read(run_dir, update, like_state, like_params)
    digests = saved.counters.pop("memory")
    kept = shards if jax.tree.leaves(like_memory) else range(0)
    return saved._replace(
        memory=memory.read(run_dir, update, kept, like_memory, digests),
        actors={actor: records.read(actor_folder(run_dir, actor), update) for actor in actors},
    )


def _reason(error: Exception, most: int) -> str:
    """The first line of what an error says."""
    return (str(error).splitlines() or [type(error).__name__])[0][:most]


def save_model(path: Path, params: PyTree) -> None:
    """Write the parameters that act in Flax's msgpack format.  The file is written whole or not at all."""
    import flax.serialization

    write_whole(path, flax.serialization.to_bytes(jax.device_get(params)))


def read_model(path: Path, like_params: P) -> P:
    """The inverse.  `like_params` has the structure, shapes and dtypes to expect.

    Raises:
        Failure: these are not the parameters of this network.
    """
    import flax.serialization

    try:
        zeros = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), like_params)
        size, most = path.stat().st_size, sum(x.nbytes + 1000 for x in jax.tree.leaves(zeros)) + 10_000
        if size > most:
            raise ValueError(f"it has {size:,} bytes, but they take {most:,} at most")
        params = flax.serialization.from_bytes(zeros, path.read_bytes())
        if jax.tree.map(np.shape, params) != jax.tree.map(np.shape, zeros):
            raise ValueError("its arrays have other shapes")
        if jax.tree.map(lambda x: np.asarray(x).dtype, params) != jax.tree.map(lambda x: x.dtype, zeros):
            raise ValueError("its arrays are of other types")
    except Exception as error:  # msgpack and Flax raise many kinds
        raise Failure(f"{path} does not hold the parameters of this network: {error}") from error
    return params
