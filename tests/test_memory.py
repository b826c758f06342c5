"""A memory is a part of the learner: same bits on any placement and through any interruption; cheap checkpoints."""

import errno
import json
import math
import os
import random
import re
import shutil
import signal
import socket
import threading
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import remembering
from launch import ROOT, Ended, build, digests, finish, in_pairs, python, read_result, read_rows
from ports import free_address
from remembering import Memory, Remembering

from cleanba import limits
from cleanba.errors import Failure, UsageError
from cleanba.files import files_below, in_a_checkpoint, listed, write_whole
from cleanba.ops import replay
from cleanba.rollout import Rollout
from cleanba.runtime import learner, memory, peers, processes, records
from cleanba.runtime.checkpoint import Checkpoints, Saved, counters_file, updates_kept
from cleanba.runtime.checkpoint_writer import CheckpointWriter

# Ten rollouts of eight steps into rings of 25 rows, which wrap three times; episodes end both ways.
FIELDS = dict(
    env_id="CartPole-v1",
    max_episode_steps=14,
    num_envs=12,
    num_actors=6,
    num_shards=6,
    num_steps=8,
    total_timesteps=960,
    env_epoch=3,
    buffer_size=300,
    batch_size=30,
)

# -------------------------------------------------------------------------------------------------------- placements


@pytest.fixture(scope="module")
def reference():
    """Collector -> the digests on one device that acts and learns."""
    made: dict[str, dict[int, str]] = {}

    def run(collector: str) -> dict[int, str]:
        if collector not in made:
            made[collector] = digests(Remembering(**FIELDS, collector=collector), recipe=remembering)
        return made[collector]

    return run


@pytest.mark.parametrize(
    "actors, learners, collector",
    [
        ([0], [0, 1], "stepped"),
        ([0, 1], [1, 2, 3, 4], "stepped"),  # 2, 2, 1 and 1 shards
        ([0], [1, 2, 3, 4, 5, 6], "stepped"),
        pytest.param([0, 1, 2], [0, 1, 2], "scanned", marks=pytest.mark.slow),
    ],
)
def test_one_process_remembers_the_same_on_any_devices(actors, learners, collector, reference):
    found = digests(Remembering(**FIELDS, collector=collector), actors, learners, recipe=remembering)
    assert found == reference(collector)


@pytest.mark.slow
@pytest.mark.parametrize("processes, learners", [(2, [1, 2]), (3, [0, 1])])
def test_several_processes_remember_the_same(processes, learners, reference, tmp_path):
    address = free_address()
    runs = [[FIELDS | {"collector": "stepped"}, [0], learners]]
    words = lambda i: [address, str(processes), str(i), json.dumps(runs), tmp_path / f"{i}"]
    them = [python(ROOT / "tests" / "placements.py", *words(i)) for i in range(processes)]
    for ended in [finish(process, 240) for process in them]:
        assert ended.code == 0, ended.err
    for i in range(processes):
        found = [json.loads(line) for line in (tmp_path / f"{i}").read_text().splitlines()]
        assert [{int(k): v for k, v in d.items()} for d in found] == [reference("stepped")]


# ----------------------------------------------------------------------------------------------------------- kill -9

FLAGS = [f"--{name.replace('_', '-')}={value}" for name, value in FIELDS.items() if name not in ("buffer_size",)]
COMMAND = ["ppo", *FLAGS, "--collector", "stepped", "--log-frequency", "1", "--buffer-size", "300"]
COMMAND += ["--checkpoint-frequency", "3"]
REMEMBERING = ROOT / "tests" / "remembering.py"


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The directory of an undisturbed run."""
    run = tmp_path_factory.mktemp("memory") / "whole"
    ended = finish(python(REMEMBERING, *COMMAND, "--run-dir", run))
    assert ended.code == 0, ended.err
    return run


def assert_same_run(run: Path, whole: Path) -> None:
    result, expected = read_result(run), read_result(whole)
    assert result["status"] == "finished"
    assert [result[k] for k in ("params_digest", "learner_digest")] == [
        expected[k] for k in ("params_digest", "learner_digest")
    ]
    both = [{row["update"]: row.get("learner_digest") for row in read_rows(r)} for r in (run, whole)]
    assert both[0] == both[1]


def assert_only_what_is_needed(run: Path) -> None:
    """Every file of the memory belongs to a checkpoint that is kept, and nothing was put aside."""
    kept = {f"{update}.json" for update in updates_kept(run)}
    for home in (run / "memory").iterdir():
        listings = [json.loads((home / name).read_text())["chunks"] for name in kept]
        used = {c[1] for chunks in listings for cut in chunks for c in cut}
        assert {path.name for path in home.iterdir()} == kept | used - {None}
    assert not (run / "damaged_checkpoints").exists()


KILLS = [
    ("pack", 5, ["0"]),  # a part of the first checkpoint's memory is written
    ("memory", 1, ["0"]),  # all of it is, and nothing says so
    ("listing", 8, ["0", "1"]),  # one shard of the second checkpoint is written, the others are not
    ("prune", 1, ["1", "2", "3"]),
    ("save", 2, ["0"]),
]


@pytest.mark.slow
def test_killed_at_the_worst_moments_it_ends_in_the_same_bits(whole, tmp_path):
    run = tmp_path / "run"
    for moment, n, learners in KILLS:
        words = [*COMMAND, "--run-dir", run, "--learner-device-ids", *learners]
        ended = finish(python(ROOT / "tests" / "killed.py", moment, str(n), *words))
        assert ended.code == -signal.SIGKILL, f"{moment}: {ended}"
    ended = finish(python(REMEMBERING, *COMMAND, "--run-dir", run, "--learner-device-ids", "1", "2"))
    assert ended.code == 0 and "resuming after update" in ended.out, ended.err
    assert "damaged" not in ended.err
    assert_same_run(run, whole)
    assert_only_what_is_needed(run)
    assert_only_what_is_needed(whole)


@pytest.mark.slow
@pytest.mark.parametrize("dies", [0, 1])
def test_a_kill_while_memory_is_written_leaves_the_checkpoint_before_and_no_more(dies, whole, tmp_path):
    """One of two processes dies while the memory of the second checkpoint is written; this does not count as damage."""
    run = tmp_path / "run"
    first = [*COMMAND, "--run-dir", run]
    deadly = [ROOT / "tests" / "killed.py", "listing", 3 + 2]  # each has three shards
    both = in_pairs(first)
    both[dies] = [*deadly, *both[dies]]
    both[1 - dies] = [REMEMBERING, *both[1 - dies]]
    ended = [finish(p, 200) for p in [python(*words) for words in both]]
    assert ended[dies].code == -signal.SIGKILL, ended
    assert updates_kept(run) == [3]
    ended = [finish(p, 200) for p in [python(REMEMBERING, *words) for words in in_pairs(["resume", run])]]
    assert [e.code for e in ended] == [0, 0], ended[0].err + ended[1].err
    assert "resuming after update 3" in ended[0].out and "damaged" not in ended[0].err + ended[1].err
    assert_same_run(run, whole)
    assert_only_what_is_needed(run)


@pytest.mark.slow
def test_killed_at_random_instants_it_ends_in_the_same_bits(whole, tmp_path):
    run, rng = tmp_path / "run", random.Random(0)
    placements = [["0"], ["1", "2"], ["0", "1", "2", "3", "4", "5"]]
    for learners in placements:
        process = python(REMEMBERING, *COMMAND, "--run-dir", run, "--learner-device-ids", *learners)
        before = {path: path.stat().st_mtime_ns for path in run.rglob("*.json")}
        deadline = time.monotonic() + 300
        while time.monotonic() < deadline and process.poll() is None:
            if any(before.get(p) != p.stat().st_mtime_ns for p in run.glob("memory/*/*.json")):
                break  # a checkpoint is being written
            time.sleep(0.002)
        time.sleep(rng.random() * 0.2)
        process.kill()
        finish(process)
    ended = finish(python(REMEMBERING, *COMMAND, "--run-dir", run))
    assert ended.code == 0 and "damaged" not in ended.err, ended.err
    assert_same_run(run, whole)
    assert_only_what_is_needed(run)


def test_a_run_killed_after_its_last_checkpoint_still_gives_its_result(whole, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(whole, run)
    last = max(updates_kept(run))
    assert last == read_result(run)["update"]
    (run / "result.json").unlink()
    ended = finish(python(REMEMBERING, "resume", run))
    assert ended.code == 0 and f"resuming after update {last}" in ended.out, ended
    assert_same_run(run, whole)
    assert_only_what_is_needed(run)


# ------------------------------------------------------------------------------------------------------------ damage


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory):
    """The directory of a run that was killed after two checkpoints."""
    run = tmp_path_factory.mktemp("memory") / "interrupted"
    # While update 9's checkpoint is written: that of 6 is whole by then, however slow the disk is.
    ended = finish(python(ROOT / "tests" / "killed.py", "memory", "3", *COMMAND, "--run-dir", run))
    assert ended.code == -signal.SIGKILL and updates_kept(run)[-2:] == [3, 6], ended
    return run


def resumed(run: Path, *words: str) -> Ended:
    return finish(python(REMEMBERING, "resume", run, *words))


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.slow
@pytest.mark.parametrize("harm", ["a flipped bit", "a missing pack", "a missing listing", "a cut listing"])
def test_damaged_memory_falls_back_to_the_checkpoint_before(harm, interrupted, whole, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(interrupted, run)
    home = run / "memory" / "00004"
    pack, listing = next(home.glob("6-*.pack")), home / "6.json"
    if harm == "a flipped bit":
        flip(pack)
    elif harm == "a cut listing":
        listing.write_text(listing.read_text()[:200])
    else:
        (pack if harm == "a missing pack" else listing).unlink()
    whole_ones = lambda: {path.name for path in run.glob("memory/*/[36]-*.pack")}  # not of one that was being written
    before = whole_ones()
    ended = resumed(run)
    assert ended.code == 0, ended.err
    said = [line for line in ended.err.splitlines() if line.startswith("cleanba:")]
    assert len(said) == 1 and re.search(
        r"checkpoint 6 is damaged and left out: memory/00004/\S+ is (damaged|missing)", said[0]
    )
    assert "resuming after update 3" in ended.out
    assert before <= whole_ones(), "nothing is deleted"
    assert_same_run(run, whole)


@pytest.mark.slow
def test_processes_fall_back_together(interrupted, whole, tmp_path):
    """Only the second process reads the shard that is damaged, but both begin at the checkpoint before."""
    run = tmp_path / "run"
    shutil.copytree(interrupted, run)
    flip(next((run / "memory" / "00005").glob("6-*.pack")))
    ended = [finish(p, 200) for p in [python(REMEMBERING, *words) for words in in_pairs(["resume", run])]]
    assert [e.code for e in ended] == [0, 0], ended[0].err + ended[1].err
    assert "resuming after update 3" in ended[0].out
    assert_same_run(run, whole)


# ------------------------------------------------------------------------------------------------------- what is new

ROWS, ENVS, STEPS = 64, 3, 5


def rollout_of(start: int, shards: int = 2) -> Rollout:
    """A rollout whose every number says when it was made.  Leaves [K', T(+1), B, ...]."""
    time_of = lambda n: np.broadcast_to(start + np.arange(n)[None, :, None], (shards, n, ENVS))
    flag = np.ones((shards, STEPS, ENVS), bool)
    obs = time_of(STEPS + 1)[..., None] * np.ones(40, np.float32) + np.arange(shards)[:, None, None, None]
    first = np.zeros((shards, STEPS + 1, ENVS), bool)
    return Rollout(
        obs.astype(np.float32), first, time_of(STEPS).astype(np.int32), time_of(STEPS).astype(np.float32),
        ~flag, ~flag, flag, {}, (),
    )  # fmt: skip


def empty() -> Memory:
    """The memory of one shard."""
    one = jax.tree.map(lambda x: x[0], rollout_of(0))
    return Memory(replay.init(one, ROWS * ENVS), jnp.zeros(ENVS), jnp.int32(0))


write = jax.jit(replay.write)


def step(m: Memory, number: int) -> Memory:
    """The memory of a device after one more rollout."""
    ring = write(m.ring, rollout_of(number * STEPS))
    return Memory(ring, m.returns + number, m.rollouts + 1)


def plain_digest(m: Memory, shard: int, like: Memory) -> str:
    """The digest that `MemoryStore` gives a shard, computed from all of its memory."""
    leaves, chunks = memory.leaves_of(like), []
    for leaf, x in zip(leaves, jax.tree.leaves(m), strict=True):
        data = np.asarray(x)[shard]
        parts = [data[a:b] if leaf.shape else data for a, b in leaf.chunks()]
        chunks.append([memory.Chunk(memory.sha256(p.tobytes()).hexdigest(), None, 0, 0) for p in parts])
    return memory._digest(leaves, chunks)


@pytest.fixture
def small_chunks(monkeypatch):
    monkeypatch.setattr(memory, "CHUNK_BYTES", 4 * 480)  # four rows of observations


@pytest.mark.parametrize("every", [1, 3, 13])
def test_a_look_finds_all_that_changed(every, small_chunks):
    """However many rollouts lie between two looks: more than the ring holds, too."""
    like = jax.eval_shape(empty)
    m = jax.tree.map(lambda x: jnp.stack([x, x]), empty())
    memory_store = memory.MemoryStore(like, range(2))
    for number in range(1, 40):
        m = step(m, number)
        if number % every == 0:
            found = memory_store.snapshot(m, number)
            assert [s.digest for s in found.values()] == [plain_digest(m, i, like) for i in range(2)], number


def test_the_digest_of_the_learner_covers_every_shard():
    m = step(jax.tree.map(lambda x: jnp.stack([x, x]), empty()), 1)
    look = lambda m: [s.digest for s in memory.MemoryStore(jax.eval_shape(empty), range(2)).snapshot(m, 1).values()]
    other = m._replace(returns=m.returns.at[1, 2].add(1e-6))
    assert look(m)[0] == look(other)[0] and look(m)[1] != look(other)[1]
    digests = [memory.learner_digest("state", look(x)) for x in (m, other)]
    digests += [memory.learner_digest("another", look(m)), memory.learner_digest("state", look(other)[::-1])]
    assert len(set(digests)) == 4


def test_an_array_that_no_longer_changes_keeps_no_old_pack(tmp_path):
    """The ring is full after 13 rollouts, from when on its size stays; 20 rollouts write all of its rows anew."""
    m = jax.tree.map(lambda x: jnp.stack([x, x]), empty())
    memory_store = memory.MemoryStore(jax.eval_shape(empty), range(2), folder=tmp_path)
    for update in range(1, 5):
        for number in range(20):
            m = step(m, 20 * update + number)
        found = memory_store.snapshot(m, update)
        assert m.ring.size.tolist() == [ROWS] * 2
        for shard in found.values():
            assert {chunk.pack for cut in shard.chunks for chunk in cut} - {None} == {shard.new}, update


def test_a_checkpoint_costs_what_is_new_in_it(small_chunks, tmp_path):
    like = jax.eval_shape(empty)
    m = jax.tree.map(lambda x: jnp.stack([x, x]), empty())
    memory_store = memory.MemoryStore(like, range(2), folder=tmp_path)
    of_rollout = 2 * sum(x[:, :STEPS].nbytes for x in (rollout_of(0).obs,)) // 2
    everything = 2 * memory.nbytes(like)
    for number in range(1, 40):
        m = step(m, number)
        found = memory_store.snapshot(m, number)
        cost = sum(path.stat().st_size for path in tmp_path.rglob(f"{number}-*.pack"))
        # Besides the new rows: the rest of the first and the last chunk, and arrays smaller than a chunk.
        assert cost <= of_rollout + 2 * (2 * 4 * 480 + 5 * ROWS * ENVS * 4) < everything / 3, number
        memory.write(tmp_path, number, found)
        kept = range(max(1, number - 1), number + 1)
        memory.prune(tmp_path, range(2), kept)
        for update in kept:
            digests = [
                json.loads((memory.shard_folder(tmp_path, i) / f"{update}.json").read_text())["digest"]
                for i in range(2)
            ]
            memory.read(tmp_path, update, range(2), like, digests)
    back = memory.read(tmp_path, 39, range(2), like, digests)
    for i in range(2):
        for x, y in zip(jax.tree.leaves(m), back[i].arrays, strict=True):
            assert np.array_equal(np.asarray(x)[i], y)
    on_disk = sum(path.stat().st_size for path in tmp_path.rglob("*.pack"))
    assert on_disk < 2.5 * everything, "old packs go"


def test_of_priorities_only_what_changed_is_written(tmp_path):
    """Anywhere in the memory: a gradient step changes a few of 262,144 places."""
    one = jax.eval_shape(lambda: replay.no_priorities(2**18))
    p = jax.tree.map(lambda x: jnp.zeros((2, *x.shape), x.dtype), one)
    place, old, new = jnp.arange(2**18), jnp.zeros(2**18, jnp.uint32), jnp.arange(2**18, dtype=jnp.uint32)
    for i in range(2):
        p = replay.replace(p, i, place, old, new, new > 0)
    memory_store = memory.MemoryStore(one, range(2), folder=tmp_path)
    memory_store.snapshot(p, 1)
    size = lambda update: sum(path.stat().st_size for path in tmp_path.glob(f"memory/*/{update}-*.pack"))
    assert size(1) > 2 * 2**20
    for update in (2, 3):
        drawn = replay.draw(p, 1, replay.random_words(jax.random.key(update), 10))
        p = replay.assign(p, 1, drawn, jnp.full(10, 7, jnp.uint32))
        found = memory_store.snapshot(p, update)
        assert 4096 <= size(update) <= 20 * 4096 + 64
        assert [s.digest for s in found.values()] == [plain_digest(p, i, one) for i in range(2)]
    memory.write(tmp_path, 3, found)
    back = memory.read(tmp_path, 3, range(2), one, [s.digest for s in found.values()])
    for i in range(2):
        for x, y in zip(jax.tree.leaves(p), back[i].arrays, strict=True):
            assert np.array_equal(np.asarray(x)[i], y)


def test_after_a_resume_only_what_is_new_is_written(small_chunks, tmp_path):
    like = jax.eval_shape(empty)
    m = jax.tree.map(lambda x: jnp.stack([x, x]), empty())
    memory_store = memory.MemoryStore(like, range(2), folder=tmp_path)
    for number in range(1, 20):
        m = step(m, number)
    found = memory_store.snapshot(m, 19)
    memory.write(tmp_path, 19, found)
    saved = memory.read(tmp_path, 19, range(2), like, [s.digest for s in found.values()])
    (tmp_path / "resumed").mkdir()  # as a run's directory is there before its memory
    resumed = memory.MemoryStore(like, range(2), saved, tmp_path / "resumed")
    m = step(m, 20)
    one, other = resumed.snapshot(m, 20), memory_store.snapshot(m, 20)
    assert [s.digest for s in one.values()] == [s.digest for s in other.values()]
    size = lambda folder: sum(path.stat().st_size for path in folder.glob("memory/*/20-*.pack"))
    assert 0 < size(tmp_path / "resumed") == size(tmp_path) < memory.nbytes(like)


def test_a_disk_that_hangs_is_not_waited_for_at_the_end(tmp_path, monkeypatch):
    release = threading.Event()
    checkpoints = Checkpoints(tmp_path, 2, jax.eval_shape(empty), range(2))
    monkeypatch.setattr(memory, "prune", lambda *_: release.wait(60))
    checkpoints.save(1, {}, None)
    began = time.monotonic()
    checkpoints.close(0.1)
    assert time.monotonic() - began < 10
    release.set()


def test_a_full_disk_is_reported(tmp_path, monkeypatch):
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    like = jax.eval_shape(empty)
    checkpoints = Checkpoints(tmp_path, 2, like, range(2))
    memory_store = memory.MemoryStore(like, range(2), folder=tmp_path)
    # What it has of the learner and of actors it does not come to use.
    checkpoint_writer = CheckpointWriter(None, None, None, memory_store, checkpoints, None)
    monkeypatch.setattr(memory.Pack, "add", full)
    with pytest.raises(Failure, match="could not be written to .*No space left on device"):
        checkpoint_writer.snapshot(1, (), step(jax.tree.map(lambda x: jnp.stack([x, x]), empty()), 1))
    checkpoints.close()


EIO = OSError(errno.EIO, os.strerror(errno.EIO))


@pytest.mark.parametrize("error", [EIO, MemoryError("no room for 8 GB")], ids=["disk", "memory"])
def test_a_checkpoint_that_cannot_be_read_just_now_is_not_taken_for_a_damaged_one(error, tmp_path, monkeypatch):
    checkpoints = Checkpoints(tmp_path, 2)
    for update in ("5", "9"):
        (tmp_path / "checkpoints" / update).mkdir()
    read = []

    def failing(run_dir, update, *_):
        read.append(update)
        raise error

    monkeypatch.setattr("cleanba.runtime.checkpoint.read_whole", failing)
    with pytest.raises(Failure, match=rf"checkpoint 9 .* cannot be read now \({re.escape(str(error))}\), but may be"):
        checkpoints.restore((), ())
    assert read == [9]
    checkpoints.close()


@pytest.mark.parametrize(
    "code, remedy", [(errno.EIO, "free memory or repair the disk"), (errno.EACCES, "make it readable")]
)
def test_an_error_of_the_disk_is_known_even_if_the_reader_hides_it(code, remedy, tmp_path, monkeypatch):
    """TensorStore's errors have no number."""
    checkpoints = Checkpoints(tmp_path, 2)
    (tmp_path / "checkpoints/5").mkdir()
    (tmp_path / "checkpoints/5/d").write_text("")

    def hiding(*_):
        raise ValueError("Error reading: something")

    def failing(path):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr("cleanba.runtime.checkpoint.read_whole", hiding)
    with pytest.raises(Failure, match="checkpoint 5 is damaged and left out"):
        checkpoints.restore((), ())
    monkeypatch.setattr(type(tmp_path), "read_bytes", failing)
    with pytest.raises(Failure, match=f"checkpoint 5 .* cannot be read now .*{os.strerror(code)}.*; {remedy}, then"):
        checkpoints.restore((), ())
    checkpoints.close()


def test_a_checkpoint_of_another_network_is_not_taken_for_a_damaged_one(tmp_path):
    """As after a change of a network of one's own."""
    checkpoints = Checkpoints(tmp_path, 2)
    params = {"w": jnp.ones((2, 3))}
    for update in (5, 9):
        checkpoints.save(update, {}, Saved(update, params, params, {"global_step": 1}))
    checkpoints.close()
    checkpoints = Checkpoints(tmp_path, 2)
    assert checkpoints.restore(params, params).saved.update == 9
    other = {"w": jnp.ones((2, 4))}
    with pytest.raises(Failure, match="checkpoint 9 in .* is of another network: .*; undo the change of the network's"):
        checkpoints.restore(other, other)
    checkpoints.close()


def test_nothing_is_removed_while_the_disk_does_not_say_what_is_needed(tmp_path, monkeypatch):
    home = memory.shard_folder(tmp_path, 0)
    home.mkdir(parents=True)
    (home / "5.json").write_text('{"chunks": [[[0, "5-a.pack", 0]]]}')
    (home / "5-a.pack").touch()
    actions, standing = tmp_path / "0-b.actions", tmp_path / "5.standing"
    actions.touch()
    standing.write_text('\n\n{"files": [["0-b.actions", 0, ""]]}\n')

    def fails(*_args, **_more):
        raise EIO

    with monkeypatch.context() as broken:
        broken.setattr("pathlib.Path.read_text", fails)
        broken.setattr("cleanba.runtime.records.open", fails, raising=False)
        with pytest.raises(OSError, match="Input/output"):
            memory.prune(tmp_path, range(1), [5])
        with pytest.raises(OSError, match="Input/output"):
            records.prune(tmp_path, [5], [actions])
    with monkeypatch.context() as broken:
        broken.setattr("os.listdir", fails)
        broken.setattr("os.scandir", fails)
        for look in (
            lambda: memory.prune(tmp_path, range(1), [5]),
            lambda: records.prune(tmp_path, [5], [actions]),
            lambda: files_below(tmp_path),
        ):
            with pytest.raises(OSError, match="Input/output"):
                look()
    assert files_below(tmp_path / "nowhere") == listed(tmp_path / "nowhere", "*") == []
    memory.prune(tmp_path, range(1), [5])
    records.prune(tmp_path, [5], [actions])
    assert (home / "5-a.pack").exists() and actions.exists()


def test_a_file_of_a_checkpoint_is_damaged_or_missing_but_not_where_the_disk_fails():
    for number, kind, words in (
        (errno.EIO, OSError, "Input/output error"),
        (errno.ENOENT, ValueError, "the file is missing"),
        (errno.EISDIR, ValueError, r"the file cannot be read \(Is a directory\)"),
    ):
        with pytest.raises(kind, match=words), in_a_checkpoint("the file"):
            raise OSError(number, os.strerror(number))


def test_rows_that_are_listed_as_zero_but_are_not_count_as_damage(tmp_path):
    like = jax.eval_shape(empty)
    m = step(jax.tree.map(lambda x: jnp.stack([x, x]), empty()), 1)
    found = memory.MemoryStore(like, range(2), folder=tmp_path).snapshot(m, 1)
    memory.write(tmp_path, 1, found)
    path = memory.shard_folder(tmp_path, 1) / "1.json"
    listing = json.loads(path.read_text())
    written = next(chunk for cut in listing["chunks"] for chunk in cut if chunk[1] is not None)
    written[1] = None
    path.write_text(json.dumps(listing))
    with pytest.raises(ValueError, match=r"memory/00001/1\.json is damaged"):
        memory.read(tmp_path, 1, range(2), like, [s.digest for s in found.values()])


def test_a_file_and_its_name_outlast_a_power_failure(tmp_path, monkeypatch):
    synced = []
    monkeypatch.setattr(os, "fsync", lambda fd: synced.append((os.fstat(fd).st_ino, (tmp_path / "file").exists())))
    write_whole(tmp_path / "file", "content")
    assert synced == [((tmp_path / "file").stat().st_ino, False), (tmp_path.stat().st_ino, True)]


def test_a_checkpoint_is_on_disk_before_the_one_that_it_replaces_is_removed(tmp_path, monkeypatch):
    synced, checkpoints = {}, Checkpoints(tmp_path, 1)
    path_of = lambda fd: Path(os.readlink(f"/proc/self/fd/{fd}"))
    monkeypatch.setattr(os, "fsync", lambda fd: synced.setdefault(path_of(fd), updates_kept(tmp_path)))
    arrays = {"w": np.zeros(3000, np.float32)}
    for update in (1, 2):
        synced.clear()
        checkpoints.save(update, {}, Saved(update, arrays, arrays, {"global_step": 1}))
        checkpoints.wait()
        here = tmp_path / "checkpoints" / str(update)
        files = [path for path in here.rglob("*") if path.is_file()]
        assert {*files, here, here.parent} <= {*synced} and counters_file(tmp_path, update) in files
        assert synced[here.parent] == [1, 2][:update] and updates_kept(tmp_path) == [update]
    checkpoints.close()


def test_a_listing_of_a_later_checkpoint_stays_with_all_that_it_names(tmp_path):
    """As when a process wakes up that was suspended while the run went on."""
    home = memory.shard_folder(tmp_path, 0)
    home.mkdir(parents=True)
    for update, pack in ((10, "10-a.pack"), (30, "30-a.pack"), (40, "40-a.pack")):
        (home / pack).write_bytes(b"data")
        (home / f"{update}.json").write_text(json.dumps({"digest": "", "chunks": [[["sha", pack, 0, 4]]]}))
    memory.prune(tmp_path, range(1), [20], whole=lambda update: update == 40)
    assert sorted(path.name for path in home.iterdir()) == ["40-a.pack", "40.json"]


# ---------------------------------------------------------------------------------------------------------- capacity


GPUS = [SimpleNamespace(platform="gpu", memory_stats=lambda: {"bytes_limit": 10_000_000})] * 2
FOUR_MB = {"x": jax.ShapeDtypeStruct((1000, 1000), np.float32)}


def test_memory_that_no_device_can_hold_is_refused_with_the_numbers():
    memory.require_room(FOUR_MB, 2, GPUS, 1, 100)  # 8 of 10 MB
    with pytest.raises(
        UsageError, match=r"buffer_size=100 takes 0\.0 GB .*has 0\.0 GB, .*try --buffer-size 75 or less"
    ):
        memory.require_room(FOUR_MB, 3, GPUS, 1, 100)


def test_memory_that_the_host_cannot_hold_for_its_checkpoints_is_refused_too(monkeypatch):
    """All processes of a host share its memory, and all devices of a process."""
    monkeypatch.setattr(memory, "host_room", lambda: 20_000_000)
    memory.require_room(FOUR_MB, 2, GPUS, 1, 100)  # 16 MB, of the process's 20
    words = "share of the host's memory .*of which it may take 80%; try --buffer-size {} or less, or more hosts"
    with pytest.raises(UsageError, match=words.format(100)):
        memory.require_room(FOUR_MB, 2, GPUS, 2, 200)  # of its 10
    memory.require_room(FOUR_MB, 1, GPUS, 2, 100)

    simulated = jax.local_devices()[:1]
    memory.require_room(FOUR_MB, 2, simulated, 1, 100)
    with pytest.raises(UsageError, match="of which it may take 40%; try --buffer-size 100 or less, or more hosts"):
        memory.require_room(FOUR_MB, 2, simulated, 2, 200)
    with pytest.raises(UsageError, match="of which it may take 40%"):
        memory.require_room(FOUR_MB, 2, jax.local_devices()[:2], 1, 200)


def test_the_hosts_memory_is_known(tmp_path):
    assert 2**28 < memory.host_room() < 2**50
    # A job's own group has the limit, not the root of all.
    (tmp_path / "own").write_text("4:memory:/slurm/job_1\n0::/system.slice/job_1/step_0\n")
    for place, limit in (
        ("memory.max", "max"),
        ("system.slice/job_1/memory.max", "9000"),
        ("memory/slurm/job_1/memory.limit_in_bytes", "8000"),
        ("memory/slurm/job_2/memory.limit_in_bytes", "1"),  # another's
        ("system.slice/job_1/step_0/memory.max", "7000"),
    ):
        (tmp_path / place).parent.mkdir(parents=True, exist_ok=True)
        before = limits.memory_limit(tmp_path / "own", tmp_path)
        (tmp_path / place).write_text(limit)
        found = limits.memory_limit(tmp_path / "own", tmp_path)
        assert found == (before if limit in ("max", "1") else int(limit)), place
    assert memory.device_room(jax.local_devices()) is None, "simulated ones have none of their own"


def test_the_cores_that_a_container_may_use_are_known(tmp_path, monkeypatch):
    """Affinity does not show a limit such as that of `docker run --cpus 1.5`."""
    (tmp_path / "own").write_text("3:cpu,cpuacct:/job\n0::/pod/step\n")
    limit = lambda: limits.core_limit(tmp_path / "own", tmp_path)
    assert limit() == math.inf
    for place, text, cores in (
        ("cpu.max", "max 100000", math.inf),
        ("pod/cpu.max", "400000 100000", 4.0),
        ("pod/step/cpu.max", "150000 100000", 1.5),
        ("cpu/job/cpu.cfs_quota_us", "-1\n", 1.5),
        ("cpu/job/cpu.cfs_period_us", "100000\n", 1.5),
        ("cpu/job/cpu.cfs_quota_us", "50000\n", 0.5),
    ):
        (tmp_path / place).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / place).write_text(text)
        assert limit() == cores, place
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(64)))
    for told, cores in ((math.inf, 64), (1.5, 2), (0.5, 1), (100.0, 64)):
        monkeypatch.setattr(limits, "_core_limit", lambda told=told: told)
        assert limits.usable_cores() == cores


def test_a_process_waits_for_the_others_as_long_as_they_take(monkeypatch):
    reached, looks = Counter(), []

    def check():
        looks.append(dict(reached))
        if len(looks) == 3:
            reached["cleanba/here"] += 1  # by the other process

    client = SimpleNamespace(
        key_value_increment=lambda key, by: reached.update({key: by}), key_value_try_get=lambda key: str(reached[key])
    )
    monkeypatch.setattr(peers, "_state", lambda: SimpleNamespace(client=client, num_processes=2))
    monkeypatch.setattr(peers, "LOOK_SECONDS", 0.01)
    peers.wait_for_milestone("here", check)
    assert looks == [{"cleanba/here": 1}] * 3
    with pytest.raises(ZeroDivisionError):  # the end of the run
        peers.wait_for_milestone("there", lambda: 1 / 0)
    monkeypatch.setattr(peers, "_state", lambda: SimpleNamespace(client=None, num_processes=1))
    peers.wait_for_milestone("there", lambda: 1 / 0)  # a single process


def test_processes_of_one_host_are_counted(monkeypatch):
    """By their hosts' names, whatever the order."""
    name = np.frombuffer(memory.sha256(socket.gethostname().encode()).digest(), np.uint8)
    monkeypatch.setattr(processes, "gather_over_processes", lambda mine: np.stack([mine, mine[::-1], name]))
    assert processes.processes_here() == 2


def test_memory_is_put_back_in_place_chunk_by_chunk(monkeypatch):
    """Besides the memory itself, room for one chunk is enough."""
    training = build(Remembering(**FIELDS), [0], [0, 1], recipe=remembering)
    like, block = training.memory_shapes, training.block_shapes
    rng = np.random.default_rng(0)
    random_one = lambda: [np.array(rng.integers(0, 2, x.shape), x.dtype) for x in jax.tree.leaves(like)]
    arrays = {shard: random_one() for shard in training.local_shards}
    puts, put = [], memory.put_rows

    def noting(x, rows, *where):
        puts.append((x, rows))
        needs = put.lower(x, rows, *where).compile().memory_analysis()
        beside = needs.argument_size_in_bytes + needs.temp_size_in_bytes - x.nbytes
        assert needs.alias_size_in_bytes >= x.nbytes and beside <= memory.CHUNK_BYTES + 64
        return put(x, rows, *where)

    monkeypatch.setattr(learner, "put_rows", noting)
    monkeypatch.setattr(memory, "CHUNK_BYTES", 256)
    saved = {shard: memory.SavedShard([*arrays[shard]], []) for shard in arrays}
    back = learner.Learner(training.algorithm, training.partition, training.devices, 1).restore_memory(block, saved)
    for number, x in enumerate(jax.tree.leaves(back)):
        assert np.array_equal(x, [arrays[shard][number] for shard in sorted(arrays)])
    assert all(x.is_deleted() for x, _ in puts) and len(puts) > len(arrays) * len(arrays[0])
