"""Recorded actions restore emulators: a collector goes on as if it had never stopped, or says what is wrong."""

import io
import re
import threading
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest
from launch import command, read_result, read_rows

from cleanba.algorithms import ppo
from cleanba.environments.backends import env_spec, open_envs
from cleanba.errors import Failure
from cleanba.runtime import playback, records
from cleanba.runtime.channels import Closed, Stop
from cleanba.runtime.checkpoint import Checkpoints, Saved, updates_kept
from cleanba.runtime.collect import (
    Collected,
    Collector,
    ScanCache,
    ScannedCollector,
    SteppedCollector,
    Times,
    make_steppers,
)
from cleanba.runtime.learner import Learner
from cleanba.runtime.records import ActorState, Record, RecordedRollout, SavedActor, action_dtype, actor_folder
from cleanba.seeds import action_numbers
from cleanba.specs import ActionSpec, EnvSpec, choice

STEPS, ENVS = 20, 3


class Case(NamedTuple):
    """Environments, and how they are stepped."""

    env_id: str
    collector: str
    core: str = "none"
    options: dict[str, Any] = {}  # noqa: RUF012  never changed


CASES = {
    "scanned": Case("CartPole-v1", "scanned", options=dict(max_episode_steps=18)),
    "scanned-lstm": Case("CartPole-v1", "scanned", "lstm", dict(max_episode_steps=18)),
    "stepped-lstm": Case("CartPole-v1", "stepped", "lstm", dict(max_episode_steps=18)),
    "quantities": Case("InvertedDoublePendulum-v5", "stepped"),
    "quantities-scanned": Case("Pendulum-v1", "scanned", options=dict(max_episode_steps=18)),
    "python": Case("gymnasium:CartPole-v1", "stepped"),
    "jax-scanned": Case("gymnax:CartPole-v1", "scanned", "lstm"),
    "jax-stepped": Case("gymnax:Breakout-MinAtar", "stepped"),
}


class Actor:
    """An actor that collects rollouts, and can resume where another stopped."""

    def __init__(self, case: Case):
        e = ppo.PPO(
            env_id=case.env_id, core=case.core, hiddens=(16,), lstm_size=12, num_envs=ENVS, num_steps=STEPS,  # type: ignore[arg-type]
            num_minibatches=1, **case.options,
        )  # fmt: skip
        self.spec: EnvSpec = env_spec(e)
        self.algorithm, self.device = ppo.make(e, self.spec, "cpu"), jax.local_devices()[2]
        params = self.algorithm.actor_params(jax.jit(self.algorithm.init)(jax.random.key(0)))
        lively = lambda p: p + 0.3 * jax.random.normal(jax.random.key(p.size), p.shape, p.dtype)
        self.params = jax.device_put(jax.tree.map(lively, params), self.device)
        self.case = case

    def collector(self) -> Collector:
        kept = {"recorded_action": None if self.spec.on_device else self.spec.action}
        if self.case.collector == "scanned":
            return ScannedCollector(
                self.algorithm, STEPS, self.device, Stop(), ScanCache(self.algorithm, STEPS), **kept
            )
        steppers = make_steppers(self.algorithm, STEPS, "cpu")
        return SteppedCollector(self.algorithm, STEPS, self.device, Stop(), steppers, **kept)

    def envs(self, seeds=(7, 8, 9)):
        with jax.default_device(self.device):
            return open_envs(self.spec, seeds, 1, workers=1)

    def collect(self, collector: Collector, rollout: int) -> Collected:
        return collector(self.params, action_numbers(1, 0, rollout), Times())

    def recorded(self, home: Path, rollouts: int) -> tuple[list[Any], SavedActor]:
        """Rollouts without interruption, and where the actor stood after that many of them; three more follow."""
        collector, record, collected = self.collector(), Record(home, None), []
        collector.restart(self.envs())
        for rollout in range(rollouts + 3):
            got = self.collect(collector, rollout)
            record.add(2, got.recorded, got.actor_state)
            if rollout + 1 == rollouts:
                snapshot = record.snapshot()
            collected.append(plain(got))
        collector.close()
        records.write(home, rollouts, snapshot)
        return collected, records.read(home, rollouts)


def plain(got: Collected) -> Any:
    """The parts of a rollout that are compared."""
    return jax.tree.map(np.array, (got.rollout, got.steps, got.episodes, got.recorded))


def assert_same(a: Any, b: Any) -> None:
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("name", CASES)
def test_a_collector_goes_on_from_where_another_stood(name, tmp_path, monkeypatch):
    """In the middle of episodes; then once more from there, by the recorded actions of both."""
    monkeypatch.setattr(records, "CHUNK_BYTES", 300)  # some of it is written on the way
    actor = Actor(CASES[name])
    whole, standing = actor.recorded(tmp_path, 2)
    assert sum(len(rollout[2]) for rollout in whole) > 0 or "Double" in CASES[name].env_id
    record, played = Record(tmp_path, standing), []
    for first in (2, 4):
        collector = actor.collector()
        collector.resume(actor.envs(), standing, "they", played.append)
        for rollout in range(first, min(first + 2, 5)):
            got = actor.collect(collector, rollout)
            assert_same(plain(got), whole[rollout])
            record.add(2, got.recorded, got.actor_state)
        collector.close()
        records.write(tmp_path, first + 2, record.snapshot())
        standing = records.read(tmp_path, first + 2) if first == 2 else standing
    assert sum(played) == (0 if actor.spec.on_device else (2 + 4) * STEPS * ENVS)
    assert len(standing.files) == (0 if actor.spec.on_device else 2)


@pytest.fixture
def cartpole(tmp_path) -> tuple[Actor, SavedActor]:
    actor = Actor(CASES["scanned"])
    return actor, actor.recorded(tmp_path, 2)[1]


def resume(actor: Actor, standing: SavedActor, **seeds: Any) -> None:
    collector = actor.collector()
    try:
        collector.resume(actor.envs(**seeds), standing, "the environments of actor 0", lambda steps: None)
    finally:
        collector.close()


def test_environments_that_do_something_else_are_named(cartpole, tmp_path):
    actor, standing = cartpole
    with pytest.raises(
        Failure, match=r"environments of actor 0 did not repeat .* 40 actions .*\(of 3 environments: 1\)"
    ):
        resume(actor, standing, seeds=(7, 5, 9))  # as of one that ignores its seed


def test_one_different_action_is_noticed(cartpole, tmp_path):
    """In the record, with a matching checksum."""
    actor, standing = cartpole
    path = standing.actions[0][0]
    told = bytearray(path.read_bytes())
    (first,) = standing.arrays["first"]
    env = int(np.flatnonzero(~first)[0])  # whose last action was not ignored
    told[-ENVS + env] ^= 1
    path.write_bytes(told)
    with pytest.raises(Failure, match=rf"did not repeat themselves.*\(of 3 environments: {env}\)"):
        resume(actor, standing)
    with pytest.raises(ValueError, match=rf"{path.name} is damaged: its checksum does not match"):
        records.read(tmp_path, 2)


def test_a_run_that_ends_does_not_wait_for_all_that_is_recorded(cartpole, monkeypatch):
    actor, standing = cartpole
    monkeypatch.setattr(playback, "STEPS_AT_ONCE", 3)
    collector, played = actor.collector(), []
    with pytest.raises(Closed):
        collector.resume(actor.envs(), standing, "they", lambda steps: [played.append(steps), collector.stop()])
    collector.close()
    assert played == [3 * ENVS]


def test_different_rewards_or_ends_during_playback_are_noticed(cartpole):
    actor, standing = cartpole
    with pytest.raises(Failure, match="rewards or episode ends differ"):
        resume(actor, standing._replace(outcomes_digest="0" * 64))


def test_a_record_cut_short_is_damage(cartpole, tmp_path):
    _, standing = cartpole
    (path, size) = standing.actions[0]
    path.write_bytes(path.read_bytes()[:-7])
    missing = path.stat().st_size
    with pytest.raises(ValueError, match=rf"{path.name} is cut short: {size - missing} of {size} bytes are missing"):
        records.read(tmp_path, 2)
    path.unlink()
    with pytest.raises(ValueError, match=rf"{path.name} is missing"):
        records.read(tmp_path, 2)


def test_where_an_actor_stood_is_there_whole_or_damaged(cartpole, tmp_path):
    path = tmp_path / "2.standing"
    whole = path.read_bytes()
    for damaged in (whole[:-1], whole[:30], b"", whole[:-1] + bytes([whole[-1] ^ 1]), whole + b"x"):
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match=r"2\.standing is damaged"):
            records.read(tmp_path, 2)
    path.unlink()
    with pytest.raises(ValueError, match=r"2\.standing is missing"):
        records.read(tmp_path, 2)


def test_actions_that_the_disk_takes_piece_by_piece_are_all_there(tmp_path, monkeypatch):
    """As a disk that becomes full does: only the next attempt raises an error."""

    class Piecemeal(io.FileIO):
        def write(self, data):
            return super().write(data[:7])

    monkeypatch.setattr(records, "open", lambda path, mode, **_: Piecemeal(path, mode), raising=False)
    record = Record(tmp_path, None)
    action = np.arange(60, dtype=np.uint8).reshape(20, 3)
    actor_state = ActorState(*[np.zeros(3)] * 6, None)
    record.add(0, RecordedRollout(action, np.zeros((20, 3)), np.zeros((20, 3), bool)), actor_state)
    snapshot = record.snapshot()
    monkeypatch.undo()
    records.write(tmp_path, 1, snapshot)
    ((path, size),) = records.read(tmp_path, 1).actions
    assert size == 60 and path.read_bytes() == action.tobytes()


def test_files_that_nothing_refers_to_are_removed_and_others_stay(cartpole, tmp_path):
    _, standing = cartpole
    (tmp_path / "5.standing.tmp").write_bytes(b"by a run that was killed")
    kept = standing.actions[0][0].name
    (tmp_path / "1-00000000.actions").write_bytes(b"of an epoch that is over")
    old = records.action_files(tmp_path)
    (tmp_path / "3-00000000.actions").write_bytes(b"being written")
    records.prune(tmp_path, [2], old)
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(["2.standing", kept, "3-00000000.actions"])
    records.prune(tmp_path, [3], records.action_files(tmp_path))
    assert list(tmp_path.iterdir()) == []


def standing_still() -> ActorState:
    return ActorState(np.zeros(2), np.zeros(2, bool), np.ones(2, bool), (), np.zeros(2), np.zeros(2, int), None)


@pytest.mark.parametrize("stalls", ["before it begins", "before it removes files", "before it writes files"])
def test_a_process_that_wakes_up_late_harms_no_checkpoint_of_the_start_that_went_on(stalls, tmp_path, monkeypatch):
    rollout = RecordedRollout(np.zeros((4, 2), np.uint8), np.zeros((4, 2), np.float32), np.zeros((4, 2), bool))
    arrays, home = {"w": np.zeros(3, np.float32)}, actor_folder(tmp_path, 0)
    opened = lambda: Checkpoints(
        tmp_path, 2, actors=range(1), ends_epoch=lambda update: False, require_ours=lambda: at("before it begins")
    )
    armed, reached, go_on, prune = threading.Event(), threading.Event(), threading.Event(), records.prune

    def at(point: str) -> None:
        """Stall there once, in the thread that writes a checkpoint."""
        writes = threading.current_thread() is not threading.main_thread()
        if point == stalls and writes and armed.is_set() and not reached.is_set():
            reached.set()
            go_on.wait(600)

    def pruning(*args) -> None:
        at("before it removes files")
        prune(*args)
        at("before it writes files")

    def collect(record: Record) -> dict[int, records.Snapshot]:
        record.add(0, rollout, standing_still())
        return {0: record.snapshot()}

    def save(checkpoints: Checkpoints, record: Record, *updates: int) -> None:
        for update in updates:
            saved = Saved(update, arrays, arrays, {"global_step": 8 * update})
            checkpoints.save(update, {}, saved, actors=collect(record))
            checkpoints.wait()

    monkeypatch.setattr(records, "prune", pruning)
    old, record = opened(), Record(home, None)
    save(old, record, 10, 20)
    armed.set()
    old.save(30, {}, None, actors=collect(record))  # not the main process
    assert reached.wait(60)
    new = opened()
    again = new.restore(arrays, arrays).saved
    assert again.update == 20
    save(new, Record(home, again.actors[0]), 30, 45, 60)
    if stalls == "before it begins":
        (home / "75.standing").write_bytes(b"a part of the next checkpoint, which is not whole yet")
    there = {path.name: path.read_bytes() for path in home.glob("*.standing")}
    go_on.set()
    with pytest.raises(Failure, match="has a checkpoint of update 60 already: the run has gone on without"):
        old.wait()
    assert {path.name: path.read_bytes() for path in home.glob("*.standing")} == there
    assert opened().restore(arrays, arrays).saved.update == 60


@pytest.mark.parametrize(
    "action, name",
    [
        (choice(18), "uint8"),
        (choice(256), "uint8"),
        (choice(257), "uint16"),
        (ActionSpec("choices", counts=(3, 70_000), low=(0, 0), high=(2, 69_999)), "uint32"),
        (ActionSpec("quantities", low=(-1.0,), high=(1.0,)), "float32"),
    ],
)
def test_actions_are_recorded_in_as_few_bytes_as_hold_them(action, name):
    assert action_dtype(action) == name


# ------------------------------------------------------------------------------------------------------- by command

FLAKY = "--num-envs 4 --num-actors 2 --num-shards 1 --num-steps 8 --hiddens 8 --num-minibatches 2 --update-epochs 1"
FLAKY += " --total-timesteps 384 --log-frequency 1 --env-epoch 5"


def test_environments_that_do_not_follow_their_seed_are_saved_between_epochs_only(tmp_path, monkeypatch):
    words = ["ppo", "--env-id", "faulty:Faulty-v0", "--env-options", "fault=chance", *FLAKY.split()]
    monkeypatch.chdir(Path(__file__).parent)
    ended = command(*words, "--checkpoint-frequency", "1", "--keep-checkpoints", "9", "--run-dir", tmp_path / "run")
    assert ended.code == 0 and "checkpoints are taken only where the environments start afresh" in ended.out, ended
    assert updates_kept(tmp_path / "run") == [5, 10, 12]


def broken_off(monkeypatch, words: list[str], at: int) -> None:
    """Run this command up to an update that fails."""
    update = Learner.update

    def failing(self, state, memory, blocks, number):
        if number == at:
            raise Failure("planted")
        return update(self, state, memory, blocks, number)

    with monkeypatch.context() as patch:
        patch.setattr(Learner, "update", failing)
        ended = command(*words)
    assert ended.code == 1 and "planted" in ended.err, ended


def test_an_environment_that_ignores_its_seed_later_is_named_and_nothing_is_trained(tmp_path, monkeypatch):
    """The check at the start is too short to notice it."""
    run = tmp_path / "run"
    words = ["ppo", "--env-id", "faulty:Faulty-v0", "--env-options", "fault=late", *FLAKY.split(), "--env-epoch", "0"]
    words += ["--run-dir", str(run)]
    monkeypatch.chdir(Path(__file__).parent)
    broken_off(monkeypatch, [*words, "--checkpoint-frequency", "10"], 12)
    assert updates_kept(run) == [10]
    ended = command(*words)
    said = [line for line in ended.err.splitlines() if not line.startswith("cleanba: warning")]
    assert ended.code == 1 and "Traceback" not in ended.err and len(said) == 1, ended
    assert "did not repeat themselves: after the same 80 actions" in ended.err and "metrics.jsonl" in ended.err
    assert updates_kept(run) == [10] and read_result(run)["update"] == 10


def test_of_two_checkpoints_with_a_damaged_record_the_one_before_is_taken(tmp_path, monkeypatch):
    whole, run = tmp_path / "whole", tmp_path / "run"
    words = ["ppo", "--env-id", "Catch-v0", *FLAKY.split(), "--env-epoch", "0"]
    assert command(*words, "--run-dir", whole).code == 0
    broken_off(monkeypatch, [*words, "--checkpoint-frequency", "4", "--run-dir", str(run)], 10)
    assert updates_kept(run) == [4, 8]
    (path,) = actor_folder(run, 1).glob("*.actions")
    path.write_bytes(path.read_bytes()[: 5 * 8 * 2])  # five updates of eight steps of two environments
    ended = command(*words, "--checkpoint-frequency", "4", "--run-dir", run)
    assert re.search(r"checkpoint 8 is damaged and left out: actors/00001/\S+ is cut short: 48 of 128", ended.err)
    assert ended.code == 0 and "resuming after update 4" in ended.out
    assert "played 128 recorded steps" in ended.out
    for key in ("params_digest", "learner_digest", "global_step", "episodes", "episodic_return"):
        assert read_result(run)[key] == read_result(whole)[key]
    assert [row["update"] for row in read_rows(run)] == [row["update"] for row in read_rows(whole)]
