"""The learner's memory on disk, in chunks, of which a checkpoint writes only those that are new.

Every array of a shard's memory is cut into chunks of rows.  A snapshot of the memory takes the SHA-256 of each chunk.
A replay ring counts the rows written to it, so only chunks written since the last snapshot are hashed.  Priorities may
change anywhere; they are a few bytes a row, so all are hashed, in smaller chunks.  A checkpoint is, for each shard,

    memory/00003/500-1f6c02aa.pack    the chunks that were new at update 500, one after the other
    memory/00003/500.json             which chunks make up the memory after update 500, in this pack and earlier ones

and the second is written last, so the memory after an update is on disk whole or not at all.  A snapshot writes each
new chunk as soon as it is hashed, as there may be no room for a copy of a memory of gigabytes.  Single numbers are
always written.  Chunks of zeros, which memory begins with, are not.  Files that nothing refers to are removed.
"""

import contextlib
import itertools
import json
import os
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache, partial
from hashlib import sha256
from pathlib import Path
from typing import BinaryIO, NamedTuple

import jax
import numpy as np
from jax import lax

from cleanba.config import require
from cleanba.files import in_a_checkpoint, listed, make_folders, write_whole
from cleanba.limits import memory_limit
from cleanba.ops import replay
from cleanba.rollout import PyTree

CHUNK_BYTES = 4 << 20
PRIORITY_CHUNK_BYTES = 4 << 10  # of priorities: a gradient step changes a few anywhere
TINY_BYTES = 64  # chunks up to this size are written at every snapshot, new or not
RINGS = (replay.Ring, replay.StartsRing)  # with the same fields
FOLDER = "memory"
DAMAGED = "damaged-"  # prefix of the names of listings that were put aside


class Chunk(NamedTuple):
    """Some rows of one array: their hash, and where they are written."""

    sha: str
    pack: str | None  # None: all zeros, written nowhere
    offset: int
    size: int  # in bytes


class Leaf(NamedTuple):
    """One array of a shard's memory, and how it is cut into chunks."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype
    rows: int  # in a chunk; the last may have fewer
    at_once: bool = False  # whether all of it is fetched from the device before it is cut

    @property
    def row_bytes(self) -> int:
        return int(np.prod(self.shape[1:], dtype=np.int64)) * self.dtype.itemsize

    def chunks(self) -> Iterator[tuple[int, int]]:
        """For each chunk its first row, and the row after its last."""
        length = self.shape[0] if self.shape else 1
        for start in range(0, length, self.rows):
            yield start, min(start + self.rows, length)


class WrittenRows(NamedTuple):
    """The rows of a ring of `capacity` rows written since the last snapshot: `rows` of them, from `low` to `high`."""

    rows: int
    low: int
    high: int
    capacity: int

    def touches(self, start: int, stop: int) -> bool:
        """Whether one of the rows [start, stop) may have changed."""
        if self.rows >= self.capacity:
            return True
        before, behind = start <= self.high, stop > self.low
        return before and behind if self.low <= self.high else before or behind


class ShardSnapshot(NamedTuple):
    """The memory of one shard at one snapshot."""

    digest: str
    """SHA-256 over the names, shapes and chunks of all its arrays"""
    chunks: list[list[Chunk]]
    """of every array, in order"""
    new: str | None
    """the pack that new chunks were written to, if there were any; not yet synced to disk"""


class SavedShard(NamedTuple):
    """The memory of one shard as a checkpoint has it."""

    arrays: list[np.ndarray]
    """in order; taken out one by one as they are copied to a device, as there may be no room for both"""
    chunks: list[list[Chunk]]


def leaves_of(like: PyTree) -> list[Leaf]:
    """The arrays of one shard's memory, from their shapes."""
    of_priorities: list[bool] = []
    for node in jax.tree.leaves(like, is_leaf=lambda x: isinstance(x, replay.Priorities)):
        of_priorities += [isinstance(node, replay.Priorities)] * len(jax.tree.leaves(node))
    leaves = []
    for (path, x), small in zip(jax.tree_util.tree_flatten_with_path(like)[0], of_priorities, strict=True):
        row = max(1, int(np.prod(x.shape[1:], dtype=np.int64)) * x.dtype.itemsize)
        rows = max(1, (PRIORITY_CHUNK_BYTES if small else CHUNK_BYTES) // row)
        leaves.append(Leaf(jax.tree_util.keystr(path), x.shape, np.dtype(x.dtype), rows, small))
    return leaves


def nbytes(like: PyTree) -> int:
    """How many bytes one shard's memory takes."""
    return sum(int(np.prod(x.shape, dtype=np.int64)) * x.dtype.itemsize for x in jax.tree.leaves(like))


def device_room(devices: Sequence[jax.Device]) -> int | None:
    """The bytes that each of these devices can hold; None where they have no memory of their own."""
    limits = [(device.memory_stats() or {}).get("bytes_limit") for device in devices]
    known = [limit for limit in limits if limit]
    return min(known) if len(known) == len(devices) else None


def host_room() -> int:
    """The bytes of memory of this host, or of the container that this process is in."""
    return int(min(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), memory_limit()))


def require_room(
    like: PyTree, shards_per_device: int, devices: Sequence[jax.Device], processes: int, buffer_size: int | None
) -> None:
    """Raise `UsageError` unless the memory of this process's shards fits.  All processes must call this.

    like: the shapes of one shard's memory.
    processes: how many share this host, each with these `devices`.
    buffer_size: the flag's value, if the algorithm has it.
    """
    needed = shards_per_device * nbytes(like)
    each, there = host_room() // (len(devices) * processes), device_room(devices)
    # Parameters, rollouts and environments need room too.  While a checkpoint is read, the host holds all of the
    # memory; where devices are simulated, it holds it twice.
    limits = [
        (0.4 if there is None else 0.8, each, f"whose share of the host's memory is {each / 1e9:.1f} GB", "hosts")
    ]
    if there is not None:
        limits.append((0.9, there, f"which has {there / 1e9:.1f} GB", "learner devices"))
    share, there, words, more = min(limits, key=lambda limit: limit[0] * limit[1])
    fits = int((buffer_size or 0) * share * there / max(1, needed))
    most = "" if buffer_size is None else f" --buffer-size {fits} or less, or"
    size = "the memory" if buffer_size is None else f"buffer_size={buffer_size}"
    require(
        needed <= share * there,
        f"{size} takes {needed / 1e9:.1f} GB on each learner device, {words}, of which it may take {share:.0%}; "
        f"try{most} more {more}",
    )


@partial(jax.jit, static_argnums=3)
def _rows(x: jax.Array, shard: np.int32, start: np.int32, count: int) -> jax.Array:
    """`count` rows of one of a device's shards, [K', C, ...] -> [count, ...], without a copy of the others."""
    zeros = (0,) * (x.ndim - 2)
    return lax.dynamic_slice(x, (shard, start, *zeros), (1, count, *x.shape[2:]))[0]


@partial(jax.jit, donate_argnums=0)
def put_rows(x: jax.Array, rows: jax.Array, shard: np.int32, start: np.int32) -> jax.Array:
    """The inverse, in place: [K', C, ...], [count, ...] -> [K', C, ...]; of numbers, [K'], [] -> [K']."""
    at = (shard, start, *(np.int32(0),) * (x.ndim - 2))[: x.ndim]
    return lax.dynamic_update_slice(x, rows[None], at)


@cache
def _zeros(size: int) -> str:
    return sha256(bytes(size)).hexdigest()


def _digest(leaves: Iterable[Leaf], chunks: Iterable[Iterable[Chunk]]) -> str:
    digest = sha256()
    for leaf, cut in zip(leaves, chunks, strict=True):
        digest.update(f"{leaf.name} {leaf.dtype} {leaf.shape}".encode())
        for chunk in cut:
            digest.update(bytes.fromhex(chunk.sha))
    return digest.hexdigest()


class Pack:
    """A file of chunks, created when the first is added.  Without a folder, chunks are only counted."""

    def __init__(self, name: str, home: Path | None):
        self.name, self.size = name, 0
        self._home = home
        self._file: BinaryIO | None = None

    def add(self, data: bytes, sha: str) -> Chunk:
        """Append a chunk."""
        if self._home is not None:
            if self._file is None:
                make_folders(self._home)
                self._file = open(self._home / self.name, "wb")  # noqa: SIM115  closed by close()
            self._file.write(data)
        chunk = Chunk(sha, self.name, self.size, len(data))
        self.size += len(data)
        return chunk

    def close(self) -> None:
        """Close the file; it may not be synced to disk."""
        if self._file is not None:
            self._file.close()


class MemoryStore:
    """The chunks of this process's shards, kept from one snapshot to the next, and written as they change."""

    def __init__(
        self,
        like: PyTree,
        shards: range,
        saved: Mapping[int, SavedShard] | None = None,
        folder: Path | None = None,
        place: Callable[[int], int] = lambda shard: shard,
    ):
        """`like` has the shapes of one shard's memory, `saved` the shards of the checkpoint to continue from.

        folder: where new chunks are written; without it, only digests are taken.
        place: shard -> its place among those of all devices, some of which may be empty.
        """
        self._folder, self._place = folder, place
        self._leaves = leaves_of(like)
        self.shards = shards if self._leaves else range(0)
        nodes, _ = jax.tree.flatten(like, is_leaf=lambda x: isinstance(x, RINGS))
        # For each ring in the memory: the leaves of its rows, and its capacity.
        self._rings: list[tuple[range, int]] = []
        at = 0
        for node in nodes:
            count = len(jax.tree.leaves(node))
            if isinstance(node, RINGS):
                rows = jax.tree.leaves(node.rows)
                self._rings.append((range(at, at + len(rows)), rows[0].shape[0]))
            at += count
        self._known: dict[int, list[list[Chunk]]] = {}
        self._written: dict[int, list[tuple[int, int]]] = {}  # for each ring: rows ever written, and its newest row
        for shard in self.shards:
            if saved:
                self._known[shard] = saved[shard].chunks
                self._written[shard] = self._marks(saved[shard].arrays.__getitem__)
            else:  # rings begin empty, so their chunks are known
                self._known[shard] = [self._blank(leaf) for leaf in self._leaves]
                self._written[shard] = [(0, 0) for _ in self._rings]

    def _blank(self, leaf: Leaf) -> list[Chunk]:
        sizes = [(stop - start) * leaf.row_bytes for start, stop in leaf.chunks()]
        return [Chunk(_zeros(size), None, 0, size) for size in sizes]

    def _marks(self, number: Callable[[int], jax.Array | np.ndarray]) -> list[tuple[int, int]]:
        """For each ring of a shard, rows ever written and the newest; `number(i)` is the value of the i-th array."""
        tail, written = (replay.Ring._fields.index(name) - 1 for name in ("tail", "written"))  # they follow the rows
        return [(int(number(rows.stop + written)), int(number(rows.stop + tail))) for rows, _ in self._rings]

    def snapshot(self, memory: PyTree, update: int) -> dict[int, ShardSnapshot]:
        """Every shard of this process as it is after this update.  Chunks that changed are written to disk.

        Raises:
            OSError: new chunks cannot be written.
        """
        name = f"{update}-{secrets.token_hex(4)}.pack"
        arrays = jax.tree.leaves(memory)
        found = {}
        for shard in self.shards:
            home = shard_folder(self._folder, shard) if self._folder is not None else None
            with contextlib.closing(Pack(name, home)) as pack:
                self._snapshot_shard(shard, [self._on_device(x, self._place(shard)) for x in arrays], pack)
            chunks = self._known[shard]
            found[shard] = ShardSnapshot(
                _digest(self._leaves, chunks), [list(c) for c in chunks], name if pack.size else None
            )
        return found

    def _snapshot_shard(self, shard: int, here: list[tuple[jax.Array, int]], pack: Pack) -> None:
        """Update the chunks of one shard.  `here` has its arrays on their device, and the shard's place in each."""
        known, before = self._known[shard], self._written[shard]
        now = self._marks(lambda i: here[i][0][here[i][1]])
        written: dict[int, WrittenRows] = {}  # by array
        for (rows, capacity), (old, low), (total, high) in zip(self._rings, before, now, strict=True):
            # The row that was newest at the last snapshot may have been overwritten since.
            written |= dict.fromkeys(rows, WrittenRows((total - old) % 2**32 + 1, low, high, capacity))
        for i, (leaf, (x, index)) in enumerate(zip(self._leaves, here, strict=True)):
            whole = np.asarray(x[index]) if leaf.at_once and leaf.shape else None
            for j, (start, stop) in enumerate(leaf.chunks()):
                if i in written and not written[i].touches(start, stop):
                    continue
                data = self._bytes(x, index, start, stop) if whole is None else whole[start:stop].tobytes()
                sha = sha256(data).hexdigest()
                unchanged = sha == known[i][j].sha
                # Tiny chunks are always rewritten: unchanged, they would keep alive an old pack of gigabytes.
                if unchanged and (len(data) > TINY_BYTES or known[i][j].pack is None):
                    continue
                zero = sha == _zeros(len(data))
                known[i][j] = Chunk(sha, None, 0, len(data)) if zero else pack.add(data, sha)
        self._written[shard] = now

    @staticmethod
    def _on_device(x: jax.Array, place: int) -> tuple[jax.Array, int]:
        """A global array [D K', ...] -> the array on the device that has this place, and the place's index there."""
        for part in x.addressable_shards:
            first = part.index[0].start or 0
            if first <= place < first + part.data.shape[0]:
                return part.data, place - first
        raise AssertionError(f"place {place} is on no device of this process")

    @staticmethod
    def _bytes(x: jax.Array, index: int, start: int, stop: int) -> bytes:
        part = x[index] if x.ndim == 1 else _rows(x, np.int32(index), np.int32(start), stop - start)
        return np.ascontiguousarray(part).tobytes()


def digest_of(like: PyTree, shard: SavedShard) -> str:
    """The digest of one shard's memory as a checkpoint has it; `like` has the shapes of its arrays."""
    return _digest(leaves_of(like), shard.chunks)


def learner_digest(state_digest: str, shards: Iterable[str]) -> str:
    """SHA-256 over the digests of the learner's state and of every shard's memory, in their order."""
    return f"sha256:{sha256(' '.join([state_digest, *shards]).encode()).hexdigest()}"


# ------------------------------------------------------------------------------------------------------------ the disk


def shard_folder(folder: Path, shard: int) -> Path:
    """The folder of one shard in a run's directory."""
    return folder / FOLDER / f"{shard:05d}"


def write(
    folder: Path,
    update: int,
    shards: Mapping[int, ShardSnapshot],
    packs: Mapping[int, Sequence[str]] = {},
) -> None:
    """Sync these shards' packs to disk, then write which chunks they are made of.

    packs: for each shard, packs of earlier snapshots that became no checkpoint.
    """
    for number, shard in shards.items():
        home = shard_folder(folder, number)
        make_folders(home)
        for pack in {*packs.get(number, ()), shard.new} - {None}:
            with contextlib.suppress(FileNotFoundError), open(home / str(pack), "rb+") as file:  # no longer needed
                os.fsync(file.fileno())
        listing = {"digest": shard.digest, "chunks": shard.chunks}
        write_whole(home / f"{update}.json", json.dumps(listing))


def read(folder: Path, update: int, shards: range, like: PyTree, digests: list[str]) -> dict[int, SavedShard]:
    """The memory of these shards after an update.

    Raises:
        ValueError: a file is missing or damaged.
    """
    leaves = leaves_of(like)
    one = lambda shard: _read_shard(shard_folder(folder, shard), update, leaves, digests[shard])
    return {shard: one(shard) for shard in shards}


def _read_shard(home: Path, update: int, leaves: list[Leaf], digest: str) -> SavedShard:
    path = home / f"{update}.json"
    where = f"{FOLDER}/{home.name}/{path.name}"
    with in_a_checkpoint(where):
        text = path.read_bytes()
    try:
        listing = json.loads(text)
        chunks = [[Chunk(*chunk) for chunk in cut] for cut in listing["chunks"]]
        fits = [len(cut) for cut in chunks] == [len(list(leaf.chunks())) for leaf in leaves]
        if not fits or _digest(leaves, chunks) != digest:
            raise ValueError("its checksum does not match")
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{where} is damaged ({error})") from None
    arrays = []
    for leaf, cut in zip(leaves, chunks, strict=True):
        array = np.zeros(leaf.shape, leaf.dtype)
        for (start, stop), chunk in zip(leaf.chunks(), cut, strict=True):
            if chunk.pack is None:
                if chunk.sha != _zeros((stop - start) * leaf.row_bytes):
                    raise ValueError(f"{where} is damaged: its list of all-zero chunks is wrong")
            else:
                if chunk.size != (stop - start) * leaf.row_bytes:
                    raise ValueError(f"{where} is damaged: a chunk has another size than its rows")
                data = np.frombuffer(_read_chunk(home, chunk), leaf.dtype)
                if leaf.shape:
                    array[start:stop] = data.reshape(stop - start, *leaf.shape[1:])
                else:
                    array[...] = data[0]
        arrays.append(array)
    return SavedShard(arrays, chunks)


def _read_chunk(home: Path, chunk: Chunk) -> bytes:
    assert chunk.pack is not None
    where = f"{FOLDER}/{home.name}/{chunk.pack}"
    if Path(chunk.pack).name != chunk.pack:
        raise ValueError(f"{where} lies outside of its folder")
    with in_a_checkpoint(where), open(home / chunk.pack, "rb") as file:
        file.seek(chunk.offset)
        data = file.read(chunk.size)
    if sha256(data).hexdigest() != chunk.sha:
        raise ValueError(f"{where} is damaged: its checksum does not match")
    return data


def prune(
    folder: Path,
    shards: range,
    keep: Iterable[int],
    soon: Mapping[int, ShardSnapshot] | None = None,
    whole: Callable[[int], bool] = lambda update: False,
) -> None:
    """Remove these shards' listings of updates not in `keep`, and the packs that nothing refers to.

    soon: snapshots that will be listed next, whose packs are needed.
    whole: whether an update after those in `keep` has a checkpoint: the run went on while this process was suspended.
    Where a checkpoint was found damaged, packs up to that one stay, so that it can be examined.
    """
    kept = set(keep)
    for shard in shards:
        home = shard_folder(folder, shard)
        if not home.is_dir():
            continue
        referred = {chunk.pack for cut in soon[shard].chunks for chunk in cut} if soon else set()
        damaged = max((int(path.stem.removeprefix(DAMAGED)) for path in listed(home, f"{DAMAGED}*.json")), default=0)
        for path in listed(home, "[0-9]*.json"):
            update = int(path.stem)
            if update in kept or (update > max(kept, default=0) and whole(update)):
                referred |= _packs(path)
            else:
                path.unlink(missing_ok=True)
        for path in listed(home, "*.pack"):
            if path.name not in referred and int(path.name.partition("-")[0]) > damaged:
                path.unlink(missing_ok=True)


def _packs(path: Path) -> set[str]:
    try:
        with in_a_checkpoint(path.name):  # an error of the disk is raised: what is needed would be removed
            listing = path.read_text()
        return {chunk[1] for cut in json.loads(listing)["chunks"] for chunk in cut if chunk[1] is not None}
    except (ValueError, KeyError, TypeError, IndexError):
        return set()


def put_aside(folder: Path, shards: range, updates: Iterable[int]) -> None:
    """Rename the listings of updates whose checkpoints are damaged; their packs stay."""
    for shard, update in itertools.product(shards, updates):
        path = shard_folder(folder, shard) / f"{update}.json"
        aside = path.with_name(f"{DAMAGED}{path.name}")
        try:
            os.replace(path, aside)
        except FileNotFoundError:
            aside.touch()
