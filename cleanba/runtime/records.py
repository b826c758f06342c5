"""Actors on disk: the actions since their environments' epoch began, and the state of each actor after a rollout.

An emulator's state cannot be saved, but it is a function of its seed and its actions.  So each actor's actions are
recorded from the beginning of an epoch of environments.  To continue, fresh environments with the epoch's seeds play
these actions again (`playback.py`).  A checkpoint refers, for each actor, to

    actors/00003/2-1f6c02aa.actions   the actions of epoch 2, step by step
    actors/00003/583.standing         the actor after rollout 583: how much of that file counts, the carry, which
                                      episodes had ended, returns under way; digests of rewards and observations

Files of actions are only appended to, and a resumed run begins a new one, so the part that a checkpoint refers to
never changes.  JAX environments are saved by their state, in place of their actions.
"""

import hashlib
import itertools
import json
import os
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from hashlib import blake2b, sha256
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from cleanba.files import Json, in_a_checkpoint, listed, make_folders, write_whole
from cleanba.rollout import Obs, PyTree
from cleanba.specs import ActionSpec

FOLDER = "actors"
CHUNK_BYTES = 4 << 20  # actions are written to disk once there are this many bytes of them
MAGIC = b"cleanba standing 1\n"


class ActorState(NamedTuple):
    """An actor after a rollout: what the next rollout begins from, apart from the environments themselves."""

    obs: Obs
    """[B, ...]  on the host or a device"""
    done: np.ndarray | jax.Array
    """[B]  the last step ended an episode, so the next one is ignored"""
    first: np.ndarray | jax.Array
    """[B]  the observation is the first of an episode"""
    carry: PyTree
    """[B, ...]  on the host"""
    ret: np.ndarray
    """[B]  rewards of the episodes under way"""
    length: np.ndarray
    """[B]  their steps"""
    state: PyTree
    """of JAX environments; None for others"""


class RecordedRollout(NamedTuple):
    """The actions of one rollout, and what the environments returned; on the host."""

    action: np.ndarray | None
    """[T, B] or [T, B, D], of dtype `action_dtype`; None for environments whose state is saved"""
    raw_reward: np.ndarray
    """[T, B]  float32"""
    done: np.ndarray
    """[T, B]  an episode ended"""


class SavedActor(NamedTuple):
    """An actor as it was at a checkpoint, read from disk."""

    epoch: int
    steps: int
    """steps of each environment since the epoch began"""
    actions: list[tuple[Path, int]]
    """the files that hold the actions, in order, and how many bytes of each count"""
    outcomes_digest: str
    """of all rewards and ends of episodes, see `extend_outcomes_digest`"""
    obs_digests: list[str]
    """of each environment's last observation, see `digests_of`"""
    arrays: dict[str, list[np.ndarray]]
    """the leaves of an `ActorState`'s fields, by the field's name"""
    files: list[list[Any]]
    """names, sizes and SHA-256 of those files"""


def action_dtype(action: ActionSpec) -> np.dtype:
    """The smallest dtype that holds the actions that a policy draws."""
    if action.kind == "quantities":
        return np.dtype(np.float32)
    return np.dtype(np.min_scalar_type(max(action.counts) - 1))


def extend_outcomes_digest(before: str, recorded: RecordedRollout) -> str:
    """Extend the digest of rewards and ends of episodes since the epoch began ("" for none) by this rollout."""
    digest = sha256(before.encode())
    digest.update(np.ascontiguousarray(recorded.raw_reward, np.float32).tobytes())
    digest.update(np.ascontiguousarray(recorded.done, bool).tobytes())
    return digest.hexdigest()


def digests_of(obs: Obs) -> list[str]:
    """A digest of each environment's observation.  Leaves [B, ...] -> B digests."""
    leaves = [np.ascontiguousarray(x) for x in jax.tree.leaves(jax.device_get(obs))]
    return [blake2b(b"".join(x[i].tobytes() for x in leaves), digest_size=8).hexdigest() for i in range(len(leaves[0]))]


def saved_leaves(tree: PyTree) -> list[np.ndarray]:
    """The leaves of a tree as they are saved; random keys as their numbers."""
    is_key = lambda x: jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    return [np.asarray(jax.device_get(jax.random.key_data(x) if is_key(x) else x)) for x in jax.tree.leaves(tree)]


def restored(like: PyTree, leaves: Sequence[np.ndarray]) -> PyTree:
    """The inverse.  `like` is a tree of arrays of the same shapes and dtypes.

    Raises:
        ValueError: shapes or dtypes differ.
    """
    old, structure = jax.tree.flatten(like)

    def one(x: jax.Array, leaf: np.ndarray) -> jax.Array | np.ndarray:
        key = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
        made = jax.random.wrap_key_data(jnp.asarray(leaf), impl=jax.random.key_impl(x)) if key else leaf
        if made.shape != x.shape or made.dtype != x.dtype:
            raise ValueError(f"{made.dtype}{list(made.shape)} is no {x.dtype}{list(x.shape)}")
        return made

    return jax.tree.unflatten(structure, [one(x, leaf) for x, leaf in zip(old, leaves, strict=True)])


class Snapshot(NamedTuple):
    """An actor as it is to be written."""

    header: Json
    actor_state: ActorState


def actor_folder(run_dir: Path, actor: int) -> Path:
    """The folder of one actor in a run's directory."""
    return run_dir / FOLDER / f"{actor:05d}"


class Record:
    """One actor's actions since its environments' epoch began: on disk, except for the latest."""

    def __init__(self, home: Path, saved_actor: SavedActor | None):
        """`saved_actor` is what the actor continues from; None if it begins an epoch."""
        self._home = home
        self._file: BinaryIO | None = None
        self._held: list[bytes] = []
        self._held_bytes = 0
        self._state: ActorState | None = None
        self._epoch, self._steps, self._outcomes_digest = -1, 0, ""
        self._files: list[list[Any]] = []  # name, bytes that count, their SHA-256
        if saved_actor is not None:
            self._epoch, self._steps = saved_actor.epoch, saved_actor.steps
            self._outcomes_digest = saved_actor.outcomes_digest
            self._files = [list(file) for file in saved_actor.files]

    def add(self, epoch: int, recorded: RecordedRollout, actor_state: ActorState) -> None:
        """Add a rollout.

        Raises:
            OSError: it cannot be written.
        """
        if epoch != self._epoch:
            self.close()
            self._epoch, self._steps, self._outcomes_digest, self._files = epoch, 0, "", []
        self._steps += len(recorded.raw_reward)
        self._outcomes_digest = extend_outcomes_digest(self._outcomes_digest, recorded)
        self._state = actor_state
        if recorded.action is not None:
            self._held.append(recorded.action.tobytes())
            self._held_bytes += recorded.action.nbytes
            if self._held_bytes >= CHUNK_BYTES:
                self._flush()

    def _flush(self) -> None:
        data, self._held, self._held_bytes = b"".join(self._held), [], 0
        if not data:
            return
        if self._file is None:
            name = f"{self._epoch}-{secrets.token_hex(4)}.actions"
            make_folders(self._home)
            self._file = open(self._home / name, "wb", buffering=0)  # noqa: SIM115  closed by close()
            self._sha = sha256()
            self._files.append([name, 0, ""])
        rest = memoryview(data)
        while rest:  # a disk that fills up writes a part, and reports an error only at the next attempt
            rest = rest[self._file.write(rest) :]
        self._sha.update(data)
        self._files[-1][1:] = [self._files[-1][1] + len(data), self._sha.hexdigest()]

    def snapshot(self) -> Snapshot:
        """The actor as it is now.  All actions have been handed to the system, but may not be on disk yet.

        Raises:
            OSError: they cannot be written.
        """
        self._flush()
        assert self._state is not None
        header = {"epoch": self._epoch, "steps": self._steps, "answers": self._outcomes_digest}
        return Snapshot(header | {"files": [list(file) for file in self._files]}, self._state)

    def close(self) -> None:
        """Close the file; the next one gets a new name.  Actions not yet written belong to no checkpoint."""
        if self._file is not None:
            self._file.close()
        self._file, self._held, self._held_bytes = None, [], 0


def write(home: Path, update: int, snapshot: Snapshot) -> None:
    """Sync the actions to disk, then write the actor."""
    make_folders(home)
    header, actor_state = snapshot
    if header["files"]:
        with open(home / header["files"][-1][0], "rb+") as file:
            os.fsync(file.fileno())
    fields = actor_state._asdict()
    header = {**header, "seen": digests_of(actor_state.obs)}
    if actor_state.state is None:
        del fields["obs"]  # playback will return it
    blobs: list[bytes] = []
    header["arrays"] = {name: [] for name in fields}
    for name, tree in fields.items():
        for leaf in saved_leaves(tree):
            header["arrays"][name].append([leaf.dtype.name, list(leaf.shape)])
            blobs.append(np.ascontiguousarray(leaf).tobytes())
    body = b"".join([json.dumps(header).encode(), b"\n", *blobs])
    write_whole(home / f"{update}.standing", b"".join([MAGIC, sha256(body).hexdigest().encode(), b"\n", body]))


def read(home: Path, update: int) -> SavedActor:
    """An actor as it was after an update.

    Raises:
        ValueError: a file is missing, cut short or damaged.
    """
    where = lambda name: f"{FOLDER}/{home.name}/{name}"
    name = f"{update}.standing"
    with in_a_checkpoint(where(name)):
        data = (home / name).read_bytes()
    sha, body = data[len(MAGIC) : len(MAGIC) + 64], data[len(MAGIC) + 65 :]
    if not data.startswith(MAGIC) or sha256(body).hexdigest().encode() != sha:
        raise ValueError(f"{where(name)} is damaged: its checksum does not match")
    end = body.index(b"\n")
    header, at = json.loads(body[:end]), end + 1
    arrays: dict[str, list[np.ndarray]] = {}
    for field, leaves in header["arrays"].items():
        arrays[field] = []
        for dtype, shape in leaves:
            leaf = np.frombuffer(body, jnp.dtype(dtype), int(np.prod(shape, dtype=np.int64)), at).reshape(shape).copy()
            arrays[field].append(leaf)
            at += leaf.nbytes
    for file, size, expected in header["files"]:
        if Path(file).name != file:
            raise ValueError(f"{where(file)} lies outside of its folder")
        _check(home / file, where(file), size, expected)
    actions = [(home / file, size) for file, size, _ in header["files"]]
    return SavedActor(
        header["epoch"], header["steps"], actions, header["answers"], header["seen"], arrays, header["files"]
    )


def _check(path: Path, where: str, size: int, expected: str) -> None:
    """Raise `ValueError` unless the first `size` bytes of a file have this SHA-256."""
    digest = sha256()
    with in_a_checkpoint(where):
        left = _feed(digest, path, size)
    if left:
        raise ValueError(f"{where} is cut short: {left} of {size} bytes are missing")
    if digest.hexdigest() != expected:
        raise ValueError(f"{where} is damaged: its checksum does not match")


def _feed(digest: "hashlib._Hash", path: Path, size: int) -> int:
    """Feed the first `size` bytes of a file to a digest -> how many of them are missing."""
    with open(path, "rb") as file:
        while size and (data := file.read(min(size, CHUNK_BYTES))):
            digest.update(data)
            size -= len(data)
    return size


def differs(saved: SavedActor, home: Path, snapshot: Snapshot) -> str:
    """How a recomputed actor differs from a saved one, in a few words; "" if it does not.

    home: where actions were recorded meanwhile; those from before lie beside the saved actor's.
    """
    header, state = snapshot
    if (saved.epoch, saved.steps) != (header["epoch"], header["steps"]):
        return "its place in the epoch"
    before = {path.name: path for path, _ in saved.actions}
    files = [(home / name if (home / name).exists() else before.get(name), size) for name, size, _ in header["files"]]
    if any(path is None for path, _ in files) or _sha256(saved.actions) != _sha256(files):
        return "its actions"
    if saved.outcomes_digest != header["answers"]:
        return "its rewards"
    if saved.obs_digests != digests_of(state.obs):
        return "its last observations"
    for name, tree in state._asdict().items():
        if name in saved.arrays:
            pairs = itertools.zip_longest(saved.arrays[name], saved_leaves(tree))
            if not all(a is not None and b is not None and _same(a, b) for a, b in pairs):
                return f"its {name}"
    return ""


def _same(a: np.ndarray, b: np.ndarray) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


def _sha256(files: Iterable[tuple[Any, int]]) -> str:
    """SHA-256 of the first `size` bytes of each file, one file after the other."""
    digest = sha256()
    for path, size in files:
        _feed(digest, path, size)
    return digest.hexdigest()


def action_files(home: Path) -> list[Path]:
    """An actor's files of actions."""
    return listed(home, "*.actions")


def prune(
    home: Path,
    keep: Iterable[int],
    old: Iterable[Path],
    soon: Snapshot | None = None,
    whole: Callable[[int], bool] = lambda update: False,
) -> None:
    """Remove an actor's files of updates not in `keep`, and those of its `old` files of actions that are not needed.

    `soon` is written next, in this thread, and needs its files.  Files that are not in `old` may still be written to.
    whole: as for `memory.prune`.
    """
    kept = set(keep)
    referred = {file[0] for file in soon.header["files"]} if soon else set()
    for path in listed(home, "*.standing"):
        update = int(path.stem) if path.stem.isdecimal() else None
        later = update is not None and update > max(kept, default=0) and whole(update)
        if update is not None and update not in kept and not later:
            path.unlink(missing_ok=True)
        else:
            referred |= _referred(path)
    for path in [*(path for path in old if path.name not in referred), *listed(home, "*.standing.tmp")]:
        path.unlink(missing_ok=True)  # .tmp: left by a run that was killed while writing


def _referred(path: Path) -> set[str]:
    try:
        with in_a_checkpoint(path.name), open(path, "rb") as file:  # an error of the disk is raised, as in memory.py
            file.readline(), file.readline()
            return {name for name, _, _ in json.loads(file.readline())["files"]}
    except (ValueError, KeyError, TypeError):
        return set()


def put_aside(run_dir: Path, actors: Iterable[int], updates: Iterable[int]) -> None:
    """Rename the actors' files of updates whose checkpoints are damaged; the actions they refer to stay."""
    for home in (actor_folder(run_dir, actor) for actor in actors):
        for update in updates:
            path = home / f"{update}.standing"
            if path.exists():
                os.replace(path, path.with_name(f"damaged-{path.name}"))


class Records:
    """The records of this process's actors.  Without a directory nothing is kept."""

    def __init__(self, run_dir: Path | None, actors: range, saved: Mapping[int, SavedActor]):
        self._records: dict[int, Record] = {}
        if run_dir is not None:
            self._records = {a: Record(actor_folder(run_dir, a), saved.get(a)) for a in actors}

    def add(self, epoch: int, rollouts: Iterable[tuple[RecordedRollout, ActorState]]) -> None:
        """Add a rollout of every actor, in order.

        Raises:
            OSError: it cannot be written.
        """
        for record, (recorded, actor_state) in zip(self._records.values(), rollouts, strict=False):
            record.add(epoch, recorded, actor_state)

    def snapshots(self) -> dict[int, Snapshot]:
        """Every actor as it is now.

        Raises:
            OSError: actions cannot be written.
        """
        return {actor: record.snapshot() for actor, record in self._records.items()}

    def close(self) -> None:
        """Close the files."""
        for record in self._records.values():
            record.close()
