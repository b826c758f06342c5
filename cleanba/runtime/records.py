"""Where every actor stands after a rollout, on disk, and the actions that brought its environments there.

An emulator's state cannot be saved, but it is a function of its seed and its actions.  So each actor's actions are
recorded from the beginning of an epoch of environments on, and to go on, fresh environments with the epoch's seeds are
told the same again.  A checkpoint refers, for each actor, to

    actors/00003/2-1f6c02aa.actions   what its environments were told in epoch 2, step by step
    actors/00003/583.standing         where it stood after rollout 583: how much of that file counts, the recurrent
                                      state, whose episode had ended, returns under way; and digests of what was seen

Files of actions only grow, and a run that goes on begins another, so that one which a checkpoint refers to never
changes.  Environments in JAX are saved as they are, in place of their actions.
"""

import json
import os
import secrets
from collections.abc import Iterable, Mapping, Sequence
from hashlib import blake2b, sha256
from pathlib import Path
from typing import BinaryIO, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from cleanba.files import Json, write_whole
from cleanba.rollout import PyTree
from cleanba.specs import ActionSpec

FOLDER = "actors"
CHUNK_BYTES = 4 << 20  # actions that are held back from the disk at most
MAGIC = b"cleanba standing 1\n"


class Ending(NamedTuple):
    """What a rollout left behind: all that the next one begins from, but for the environments themselves."""

    obs: PyTree
    """[B, ...]  on the host or a device"""
    done: np.ndarray | jax.Array
    """[B]  the last step ended an episode, so the next one is ignored"""
    first: np.ndarray | jax.Array
    """[B]  the observation is the first of an episode"""
    carry: PyTree
    """[B, ...]  the recurrent state, on the host"""
    ret: np.ndarray
    """[B]  rewards of the episodes under way"""
    length: np.ndarray
    """[B]  their steps"""
    state: PyTree
    """of environments in JAX; None for others"""


class Told(NamedTuple):
    """What one rollout told its environments, and what they answered; on the host."""

    action: np.ndarray | None
    """[T, B] or [T, B, D]  in the type that `action_dtype` gave; None for environments whose state is saved"""
    raw_reward: np.ndarray
    """[T, B]  float32"""
    done: np.ndarray
    """[T, B]  an episode ended"""


class Standing(NamedTuple):
    """Where an actor stood at a checkpoint, as it was read."""

    epoch: int
    steps: int
    """so many steps of each environment since the epoch began"""
    actions: list[tuple[Path, int]]
    """files, and how many bytes of each: the actions, in order"""
    answers: str
    """the digest of all rewards and ends, see `chain`"""
    seen: list[str]
    """the digest of each environment's last observation, see `digests_of`"""
    arrays: dict[str, list[np.ndarray]]
    """the leaves of an `Ending`'s fields, by the field's name"""
    files: list[list]
    """how it refers to the files"""


def action_dtype(action: ActionSpec) -> np.dtype:
    """The smallest type that holds what a policy draws."""
    if action.kind == "quantities":
        return np.dtype(np.float32)
    return np.dtype(np.min_scalar_type(max(action.counts) - 1))


def chain(before: str, told: Told) -> str:
    """The digest of all answers since the epoch began, from that of those before this rollout ("" for none)."""
    digest = sha256(before.encode())
    digest.update(np.ascontiguousarray(told.raw_reward, np.float32).tobytes())
    digest.update(np.ascontiguousarray(told.done, bool).tobytes())
    return digest.hexdigest()


def digests_of(obs: PyTree) -> list[str]:
    """A digest of what each environment shows.  Leaves [B, ...] -> B of them."""
    leaves = [np.ascontiguousarray(x) for x in jax.tree.leaves(jax.device_get(obs))]
    return [blake2b(b"".join(x[i].tobytes() for x in leaves), digest_size=8).hexdigest() for i in range(len(leaves[0]))]


def saved_leaves(tree: PyTree) -> list[np.ndarray]:
    """The arrays of a tree as they are saved: of random keys, their numbers."""
    is_key = lambda x: jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    return [np.asarray(jax.device_get(jax.random.key_data(x) if is_key(x) else x)) for x in jax.tree.leaves(tree)]


def restored(like: PyTree, leaves: Sequence[np.ndarray]) -> PyTree:
    """The inverse; `like` is a tree of arrays of the same shapes.

    Raises:
        ValueError: they have other shapes.
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
    """Where an actor stands, to be written."""

    header: Json
    ending: Ending


def actor_folder(run_dir: Path, actor: int) -> Path:
    """Where a run keeps what one actor stands by."""
    return run_dir / FOLDER / f"{actor:05d}"


class Record:
    """What one actor's environments were told since their epoch began: on disk, but for the latest."""

    def __init__(self, home: Path, standing: Standing | None):
        """`standing` is where the actor goes on from; None if it begins an epoch."""
        self._home = home
        self._file: BinaryIO | None = None
        self._held: list[bytes] = []
        self._held_bytes = 0
        self._ending: Ending | None = None
        self._epoch, self._steps, self._answers = -1, 0, ""
        self._files: list[list] = []  # name, bytes that count, their SHA-256
        if standing is not None:
            self._epoch, self._steps, self._answers = standing.epoch, standing.steps, standing.answers
            self._files = [list(file) for file in standing.files]

    def add(self, epoch: int, told: Told, ending: Ending) -> None:
        """One more rollout.

        Raises:
            OSError: it cannot be written.
        """
        if epoch != self._epoch:
            self.close()
            self._epoch, self._steps, self._answers, self._files = epoch, 0, "", []
        self._steps += len(told.raw_reward)
        self._answers = chain(self._answers, told)
        self._ending = ending
        if told.action is not None:
            self._held.append(told.action.tobytes())
            self._held_bytes += told.action.nbytes
            if self._held_bytes >= CHUNK_BYTES:
                self._flush()

    def _flush(self) -> None:
        data, self._held, self._held_bytes = b"".join(self._held), [], 0
        if not data:
            return
        if self._file is None:
            name = f"{self._epoch}-{secrets.token_hex(4)}.actions"
            self._home.mkdir(parents=True, exist_ok=True)
            self._file = open(self._home / name, "wb", buffering=0)  # noqa: SIM115  closed by close()
            self._sha = sha256()
            self._files.append([name, 0, ""])
        rest = memoryview(data)
        while rest:  # a disk that becomes full takes a part, and says so at the next attempt only
            rest = rest[self._file.write(rest) :]
        self._sha.update(data)
        self._files[-1][1:] = [self._files[-1][1] + len(data), self._sha.hexdigest()]

    def snapshot(self) -> Snapshot:
        """Where the actor stands.  All actions are in the system's hands then, but maybe not on disk yet.

        Raises:
            OSError: they cannot be written.
        """
        self._flush()
        assert self._ending is not None
        header = {"epoch": self._epoch, "steps": self._steps, "answers": self._answers}
        return Snapshot(header | {"files": [list(file) for file in self._files]}, self._ending)

    def close(self) -> None:
        """Begin another file next time; what is held back belongs to no checkpoint."""
        if self._file is not None:
            self._file.close()
        self._file, self._held, self._held_bytes = None, [], 0


def write(home: Path, update: int, snapshot: Snapshot) -> None:
    """See that the actions are on disk, then write where the actor stands."""
    home.mkdir(parents=True, exist_ok=True)
    header, ending = snapshot
    if header["files"]:
        with open(home / header["files"][-1][0], "rb+") as file:
            os.fsync(file.fileno())
    fields = ending._asdict()
    header = {**header, "seen": digests_of(ending.obs)}
    if ending.state is None:
        del fields["obs"]  # the environments will show it again
    blobs: list[bytes] = []
    header["arrays"] = {name: [] for name in fields}
    for name, tree in fields.items():
        for leaf in saved_leaves(tree):
            header["arrays"][name].append([leaf.dtype.name, list(leaf.shape)])
            blobs.append(np.ascontiguousarray(leaf).tobytes())
    body = b"".join([json.dumps(header).encode(), b"\n", *blobs])
    write_whole(home / f"{update}.standing", b"".join([MAGIC, sha256(body).hexdigest().encode(), b"\n", body]))


def read(home: Path, update: int) -> Standing:
    """Where an actor stood after an update.

    Raises:
        ValueError: a file is missing, cut short or damaged.
    """
    where = lambda name: f"{FOLDER}/{home.name}/{name}"
    name = f"{update}.standing"
    try:
        data = (home / name).read_bytes()
    except FileNotFoundError:
        raise ValueError(f"{where(name)} is missing") from None
    except OSError as error:
        raise ValueError(f"{where(name)} cannot be read ({error.strerror})") from None
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
        _check(home / file, where(file), size, expected)
    actions = [(home / file, size) for file, size, _ in header["files"]]
    return Standing(
        header["epoch"], header["steps"], actions, header["answers"], header["seen"], arrays, header["files"]
    )


def _check(path: Path, where: str, size: int, expected: str) -> None:
    """Raise `ValueError` unless a file of actions begins with these."""
    digest, left = sha256(), size
    try:
        with open(path, "rb") as file:
            while left and (data := file.read(min(left, CHUNK_BYTES))):
                digest.update(data)
                left -= len(data)
    except FileNotFoundError:
        raise ValueError(f"{where} is missing") from None
    except OSError as error:
        raise ValueError(f"{where} cannot be read ({error.strerror})") from None
    if left:
        raise ValueError(f"{where} is cut short: {left} of {size} bytes are missing")
    if digest.hexdigest() != expected:
        raise ValueError(f"{where} is damaged: its checksum does not match")


def action_files(home: Path) -> list[Path]:
    """The files of actions that an actor has."""
    return [*home.glob("*.actions")]


def prune(home: Path, keep: Iterable[int], old: Iterable[Path], soon: Snapshot | None = None) -> None:
    """Remove what belongs to no update of `keep`, and of the `old` files of actions those that nothing refers to.

    `soon` is what will be written next, in this thread.  Files that are not old may be being written.
    """
    kept = set(keep)
    referred = {file[0] for file in soon.header["files"]} if soon else set()
    for path in home.glob("*.standing"):
        if path.stem.isdecimal() and int(path.stem) not in kept:
            path.unlink(missing_ok=True)
        else:
            referred |= _referred(path)
    for path in [*(path for path in old if path.name not in referred), *home.glob("*.standing.tmp")]:
        path.unlink(missing_ok=True)  # the latter by a run that was killed while it wrote one


def _referred(path: Path) -> set[str]:
    try:
        with open(path, "rb") as file:
            file.readline(), file.readline()
            return {name for name, _, _ in json.loads(file.readline())["files"]}
    except (OSError, ValueError, KeyError, TypeError):
        return set()


def put_aside(run_dir: Path, actors: Iterable[int], updates: Iterable[int]) -> None:
    """Rename where actors stood after updates whose checkpoints are damaged; what that refers to stays."""
    for home in (actor_folder(run_dir, actor) for actor in actors):
        for update in updates:
            path = home / f"{update}.standing"
            if path.exists():
                os.replace(path, path.with_name(f"damaged-{path.name}"))


class Records:
    """The records of this process's actors.  Without a folder nothing is kept."""

    def __init__(self, run_dir: Path | None, actors: range, standing: Mapping[int, Standing]):
        self._records: dict[int, Record] = {}
        if run_dir is not None:
            self._records = {a: Record(actor_folder(run_dir, a), standing.get(a)) for a in actors}

    def add(self, epoch: int, rollouts: Iterable[tuple[Told, Ending]]) -> None:
        """One rollout more, of every actor in order.

        Raises:
            OSError: it cannot be written.
        """
        for record, (told, ending) in zip(self._records.values(), rollouts, strict=False):
            record.add(epoch, told, ending)

    def snapshots(self) -> dict[int, Snapshot]:
        """Where every actor stands.

        Raises:
            OSError: what is not written yet cannot be.
        """
        return {actor: record.snapshot() for actor, record in self._records.items()}

    def close(self) -> None:
        """Let go of the files."""
        for record in self._records.values():
            record.close()
