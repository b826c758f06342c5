"""What a rollout records, which parameters collect it, and what a run leaves on disk."""

import dataclasses
import itertools
import json
import os
import shutil
import struct
import threading
import time

import flax.serialization
import jax
import numpy as np
import pytest
from launch import ROOT, TINY, build, command, finished, read_result, read_rows, train
from scripted import Play, Scripts, mirror, spec, with_fingerprints

import cleanba.runtime.actor
import cleanba.runtime.learner
import cleanba.runtime.train
from cleanba.algorithms.ppo import PPO
from cleanba.environments.envpool import Envs, env_spec
from cleanba.launch import how_to_draw
from cleanba.runtime.channels import Stop
from cleanba.runtime.checkpoint import updates_kept
from cleanba.runtime.collect import SteppedCollector, Times, make_steppers
from cleanba.runtime.digests import params_digest
from cleanba.runtime.schedule import Schedule
from cleanba.seeds import action_numbers, env_seed

THREE_STEPS = (Play((1.0, 2.0, 3.0)),)  # then terminated
TWO_STEPS = (Play((10.0, 20.0), terminated=False, truncated=True),)


def collector(num_steps: int) -> SteppedCollector:
    policy = mirror()
    return SteppedCollector(policy, num_steps, jax.local_devices()[0], Stop(), make_steppers(policy, num_steps, "cpu"))


def collect(collector: SteppedCollector, rollouts: int) -> list:
    return [collector((), action_numbers(0, 0, 0), Times()) for _ in range(rollouts)]


def experiment(**changes) -> PPO:
    """A few updates on scripted environments."""
    values = dict(env_id="Scripted-v0", num_envs=4, num_actors=2, num_shards=1, num_steps=4, hiddens=(8,))
    values |= dict(num_minibatches=2, update_epochs=1, env_epoch=0, collector="stepped") | changes
    updates = values.pop("updates", 5)
    return PPO(**values, total_timesteps=updates * values["num_envs"] * values["num_steps"])


# ----------------------------------------------------------------------------------------------------- what is recorded


def test_a_rollout_says_what_happened_also_across_its_boundaries():
    envs = Scripts(THREE_STEPS, TWO_STEPS, reward_at_reset=99.0)([7, 8], 0)
    subject = collector(num_steps=3)
    subject.restart(envs)
    collected = collect(subject, 3)

    #        env 0: 3 steps, terminated, a step ignored    env 1: 2 steps, truncated, a step ignored
    expected = [
        {
            "reward": [[1, 10], [2, 20], [3, 0]],
            "terminated": [[0, 0], [0, 0], [1, 0]],
            "truncated": [[0, 0], [0, 1], [0, 0]],
            "valid": [[1, 1], [1, 1], [1, 0]],
            "first": [[1, 1], [0, 0], [0, 0], [0, 1]],
            "episode": [[0, 0], [0, 0], [0, 0], [0, 1]],
            "step": [[0, 0], [1, 1], [2, 2], [3, 0]],
        },
        {
            "reward": [[0, 10], [1, 20], [2, 0]],
            "terminated": [[0, 0], [0, 0], [0, 0]],
            "truncated": [[0, 0], [0, 1], [0, 0]],
            "valid": [[0, 1], [1, 1], [1, 0]],
            "first": [[0, 1], [1, 0], [0, 0], [0, 1]],
            "episode": [[0, 1], [1, 1], [1, 1], [1, 2]],
            "step": [[3, 0], [0, 1], [1, 2], [2, 0]],
        },
        {
            "reward": [[3, 10], [0, 20], [1, 0]],
            "terminated": [[1, 0], [0, 0], [0, 0]],
            "truncated": [[0, 0], [0, 1], [0, 0]],
            "valid": [[1, 1], [0, 1], [1, 0]],
            "first": [[0, 1], [0, 0], [1, 0], [0, 1]],
            "episode": [[1, 2], [1, 2], [2, 2], [2, 3]],
            "step": [[2, 0], [3, 1], [0, 2], [1, 0]],
        },
    ]
    for number, (got, want) in enumerate(zip(collected, expected, strict=True), 1):
        rollout = got.rollout
        for field in ("reward", "terminated", "truncated", "valid", "first"):
            np.testing.assert_array_equal(getattr(rollout, field), want[field], f"{field} of rollout {number}")
        np.testing.assert_array_equal(rollout.obs[..., 1], [[0, 1]] * 4)
        np.testing.assert_array_equal(rollout.obs[..., 2], want["episode"])
        np.testing.assert_array_equal(rollout.obs[..., 3], want["step"])

    assert [c.steps for c in collected] == [5, 4, 4]
    assert [[e[:2] for e in c.episodes] for c in collected] == [[(30, 2), (6, 3)], [(30, 2)], [(6, 3), (30, 2)]]


def test_what_is_recorded_is_what_the_policy_saw_and_the_environment_was_given():
    envs = Scripts(THREE_STEPS, TWO_STEPS)([7, 8], 0)
    subject = collector(num_steps=5)
    subject.restart(envs)
    collected = collect(subject, 3)

    for number, c in enumerate(collected):
        rollout = c.rollout
        np.testing.assert_array_equal(rollout.obs[:-1], rollout.extras["obs"])
        np.testing.assert_array_equal(rollout.first[:-1], rollout.extras["first"])
        np.testing.assert_array_equal(rollout.action, rollout.obs[:-1, :, 3] % 2)
        np.testing.assert_array_equal(rollout.carry, [5 * number] * 2)  # from before the rollout
    np.testing.assert_array_equal(np.concatenate([c.rollout.action for c in collected]), envs.actions)
    for one, two in itertools.pairwise(collected):  # where one ends, the next begins
        np.testing.assert_array_equal(one.rollout.obs[-1], two.rollout.obs[0])
        np.testing.assert_array_equal(one.rollout.first[-1], two.rollout.first[0])


def test_fresh_environments_start_fresh_episodes():
    subject = collector(num_steps=7)
    old, new = (Scripts(THREE_STEPS, TWO_STEPS)([7, 8], epoch) for epoch in (0, 1))
    subject.restart(old)
    collect(subject, 1)  # env 0 is left at its episode's end, env 1 in the middle
    subject.restart(new)
    rollout, steps, episodes, *_ = collect(subject, 1)[0]

    assert old.closed and not new.closed
    np.testing.assert_array_equal(rollout.obs[..., 0], np.ones((8, 2)))
    np.testing.assert_array_equal(rollout.first.T, [[1, 0, 0, 0, 1, 0, 0, 0], [1, 0, 0, 1, 0, 0, 1, 0]])
    np.testing.assert_array_equal(rollout.valid.T, [[1, 1, 1, 0, 1, 1, 1], [1, 1, 0, 1, 1, 0, 1]])
    np.testing.assert_array_equal(rollout.carry, [0, 0])
    assert (steps, [e[:2] for e in episodes]) == (6 + 5, [(30, 2), (6, 3), (30, 2), (6, 3)])


def test_episode_returns_are_raw_when_rewards_are_clipped():
    subject = collector(num_steps=5)
    subject.restart(Scripts([Play((5.0, -3.0, 0.5)), Play((4.0,))], clip_reward=True)([7], 0))
    rollout, _, episodes, *_ = collect(subject, 1)[0]

    np.testing.assert_array_equal(rollout.reward[:, 0], [1.0, -1.0, 0.5, 0.0, 1.0])
    assert [e[:2] for e in episodes] == [(2.5, 3), (4.0, 1)]


def test_clipping_rewards_changes_what_is_learnt_but_not_what_is_reported():
    """The chain pays 0, 2 and 10; the same first rollout is collected with clipping and without."""
    chain = experiment(env_id="NChain-v0", num_steps=40, max_episode_steps=16, updates=1)
    raw, clipped = (finished(dataclasses.replace(chain, reward_clip=clip)) for clip in (False, True))
    assert raw.result["episodes"] == clipped.result["episodes"] == 8
    assert raw.result["episodic_return"] == clipped.result["episodic_return"] > 0
    assert clipped.column("losses/value_loss")[0] < 0.5 * raw.column("losses/value_loss")[0]


def test_the_loss_of_a_life_ends_the_training_episode_but_not_the_return():
    life, last = Play((1.0, 1.0), over=False), Play((5.0,))
    subject = collector(num_steps=8)
    subject.restart(Scripts([life, life, last])([7], 0))
    rollout, _, episodes, *_ = collect(subject, 1)[0]

    np.testing.assert_array_equal(rollout.terminated[:, 0], [0, 1, 0, 0, 1, 0, 1, 0])
    assert [e[:2] for e in episodes] == [(9.0, 5)]


@pytest.mark.parametrize("env_id", ["Breakout-v5", "Catch-v0", "CartPole-v1"])
def test_recorded_observations_are_not_overwritten_later(env_id):
    e = PPO(env_id=env_id)
    envs, delivered = Envs(env_spec(e), [1, 2, 3, 4], 1), []

    class Copying:
        num_envs = envs.num_envs
        close = envs.close

        def reset(self):
            obs = envs.reset()
            delivered.append(np.array(obs))
            return obs

        def step(self, action):
            step = envs.step(action)
            delivered.append(np.array(step.obs))
            return step

    policy = mirror()
    policy = policy._replace(act=lambda p, carry, obs, *_: (carry % 2, carry + 1, {}))
    subject = SteppedCollector(policy, 6, jax.local_devices()[0], Stop(), make_steppers(policy, 6, "cpu"))
    subject.restart(Copying())
    collected = collect(subject, 5)
    subject.close()
    for k, c in enumerate(collected):
        np.testing.assert_array_equal(c.rollout.obs, np.stack(delivered[6 * k : 6 * k + 7]), f"rollout {k + 1}")


# ------------------------------------------------------------------------------------------- exactly one version behind


def promised_versions(concurrency: bool, updates: int) -> list[int]:
    return [1, *range(1, updates)] if concurrency else list(range(1, updates + 1))


def assert_lag(record, concurrency: bool) -> None:
    """Every rollout was collected with exactly the parameters of the promised version, and the run says so."""
    updates = len(record.rows)
    versions = promised_versions(concurrency, updates)
    assert record.column("stats/policy_lag") == [update - v for update, v in enumerate(versions, 1)]
    assert record.result["policy_lag"] == int(concurrency)
    published = record.column("learning")  # [k - 1]: version k
    assert len(set(published)) == updates, "every update must change the parameters, or this test shows nothing"
    want = [published[v - 1] for v in versions]
    assert record.column("acted_min") == want
    assert record.column("acted_max") == want


@pytest.mark.parametrize("concurrency", [True, False])
@pytest.mark.parametrize("slow", ["actors", "one actor", "learner"])
def test_rollouts_are_collected_with_the_promised_version(slow, concurrency, monkeypatch):
    delay = {"actors": lambda n: 0.02, "one actor": lambda n: 0.02 * (n == 0), "learner": lambda n: 0.0}[slow]
    scripts = Scripts(THREE_STEPS, TWO_STEPS, options=lambda n: {"seconds_per_step": delay(n)})
    if slow == "learner":
        update = cleanba.runtime.learner.Learner.update

        def slowly(*args):
            time.sleep(0.1)
            return update(*args)

        monkeypatch.setattr(cleanba.runtime.learner.Learner, "update", slowly)
    e = experiment(concurrency=concurrency, updates=6)
    record = finished(e, spec=spec(), make_envs=scripts, wrap=with_fingerprints)
    assert_lag(record, concurrency)


def test_rollouts_are_collected_with_the_promised_version_on_several_devices():
    e = experiment(num_envs=8, num_actors=4, num_shards=2)
    scripts = Scripts(THREE_STEPS, TWO_STEPS)
    record = finished(e, (0, 1), (1, 2), spec=spec(), make_envs=scripts, wrap=with_fingerprints)
    assert_lag(record, concurrency=True)


class TooStale(Schedule):
    """Actors lag two versions behind."""

    def policy_version(self, rollout):
        return max(1, rollout - 2)


class TooFresh(Schedule):
    """Actors wait for the newest version."""

    def policy_version(self, rollout):
        return rollout


@pytest.mark.parametrize(
    "planted, concurrency, message",
    [
        (TooStale, True, "update 3: policy lag 2, promised 1"),
        (TooFresh, True, "update 2: policy lag 0, promised 1"),
        (TooStale, False, "update 2: policy lag 1, promised 0"),
    ],
)
def test_a_rollout_of_another_version_ends_the_run(planted, concurrency, message, monkeypatch):
    run_actor = cleanba.runtime.train.run_actor

    def wrong(*args, **kwargs):
        run_actor(*[planted(*a) if isinstance(a, Schedule) else a for a in args], **kwargs)

    monkeypatch.setattr(cleanba.runtime.train, "run_actor", wrong)
    e = experiment(concurrency=concurrency)
    record = train(e, spec=spec(), make_envs=Scripts(THREE_STEPS))
    assert isinstance(record.error, AssertionError)
    assert message in str(record.error)
    assert record.result["status"] == "failed"


def test_an_actor_given_the_wrong_version_ends_the_run(monkeypatch):
    params = cleanba.runtime.train.Params
    monkeypatch.setattr(cleanba.runtime.train, "Params", lambda version, tree: params(max(version, 2), tree))
    record = train(experiment(), spec=spec(), make_envs=Scripts(THREE_STEPS))
    assert "rollout 1 needs version 1, was given 2" in str(record.error)


# ---------------------------------------------------------------------------------------------------- what a run counts


def test_global_step_counts_executed_steps_only():
    # An environment with episodes of 3 steps ignores every 4th action, one with episodes of 2 every 3rd.
    scripts = Scripts(THREE_STEPS, TWO_STEPS)
    record = finished(experiment(num_steps=8, updates=3), spec=spec(), make_envs=scripts)
    three, two = [6, 12, 18], [6, 11, 16]
    assert record.column("global_step") == [2 * (a + b) for a, b in zip(three, two, strict=True)]
    assert record.result["global_step"] == 68
    assert record.result["episodes"] == 2 * (6 + 8)
    assert record.result["episodic_length"] == pytest.approx((6 * 3 + 8 * 2) / 14)
    assert record.result["episodic_return"] == pytest.approx((6 * 6 + 8 * 30) / 14)


def test_environments_start_afresh_after_every_checkpoint_with_other_seeds():
    scripts = Scripts(THREE_STEPS)
    e = experiment(updates=5, env_epoch=2, seed=3)
    finished(e, spec=spec(), make_envs=scripts)

    # num_envs=4, two actors: rollouts 1 and 2 are epoch 0, 3 and 4 epoch 1, 5 epoch 2
    assert sorted(made.epoch for made in scripts.made) == [0, 0, 1, 1, 2, 2]
    for epoch in range(3):
        seeds = sorted((made.seeds for made in scripts.made if made.epoch == epoch), key=lambda s: s[0])
        want = [[env_seed(3, env, epoch, 4) for env in block] for block in ((0, 1), (2, 3))]
        assert seeds == sorted(want)
        steps = [len(made.actions) for made in scripts.made if made.epoch == epoch]
        assert steps == [[8, 8], [8, 8], [4, 4]][epoch]
    everyone = [seed for made in scripts.made for seed in made.seeds]
    assert len(set(everyone)) == len(everyone) == 12
    assert all(made.closed for made in scripts.made)


def test_one_environment_epoch_without_checkpoints():
    scripts = Scripts(THREE_STEPS)
    finished(experiment(updates=5, env_epoch=0), spec=spec(), make_envs=scripts)
    assert [made.epoch for made in scripts.made] == [0, 0]


def test_threads_end_with_the_run():
    before = set(threading.enumerate())
    scripts = Scripts(THREE_STEPS)
    finished(experiment(updates=2), spec=spec(), make_envs=scripts)
    assert not set(threading.enumerate()) - before
    assert all(made.closed for made in scripts.made)


# --------------------------------------------------------------------------------------------- what a run leaves behind


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    """A finished run of the command with everything that can be kept."""
    directory = tmp_path_factory.mktemp("runs") / "kept"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WANDB_MODE", "offline")
        patch.setenv("WANDB_SILENT", "true")
        patch.setenv("WANDB__SERVICE_WAIT", "300")  # seconds that its own process may take to start
        words = ("--env-epoch", "2", "--checkpoint-frequency", "2", "--track", "--save-model")
        plain = ("--no-norm-obs", "--no-norm-reward", "--share-torso")  # without these, lag 0 is a distance of 0
        ended = command("ppo", *TINY, *plain, "--run-dir", directory, *words)
    assert ended.code == 0, ended.err
    assert str(directory) in ended.out
    return directory


def test_config_json_says_what_was_run_and_with_what(run_dir):
    config = json.loads((run_dir / "config.json").read_text())
    e = config["experiment"]
    assert (e["algorithm"], e["env_id"], e["num_envs"], e["seed"]) == ("ppo", "Catch-v0", 8, 1)
    assert (e["num_actors"], e["num_shards"], e["hiddens"]) == (2, 1, [8])
    assert config["placement"]["learner_device_ids"] == [0]
    assert config["device_kind"] == "cpu"
    assert config["packages"]["jax"] == jax.__version__


def test_result_json_describes_the_run(run_dir):
    result = read_result(run_dir)
    assert {"status": "finished", "update": 5, "policy_lag": 1}.items() <= result.items()
    # Catch ends after 9 steps and ignores the 10th; 5 rollouts of 8 steps, started afresh after the 2nd and the 4th.
    assert result["global_step"] == 8 * (15 + 15 + 8)
    assert (result["episodes"], result["episodic_length"]) == (8 * 2, 9.0)
    assert -1 <= result["episodic_return"] <= 1
    assert result["sps"] > 0 and result["seconds"] > 0
    assert result["params_digest"].startswith("sha256:") and len(result["params_digest"]) == 7 + 64
    assert "error" not in result


def test_metrics_jsonl_has_a_line_per_log_point(run_dir):
    rows = read_rows(run_dir)
    assert [row["update"] for row in rows] == [1, 2, 3, 4, 5]
    assert [row["stats/policy_lag"] for row in rows] == [0, 1, 1, 1, 1]
    distances = [row["stats/lag_kl"] for row in rows]
    assert abs(distances[0]) < 1e-9 < min(distances[1:]) and rows[1]["stats/lag_effective_samples"] < 1
    steps = [row["global_step"] for row in rows]
    assert steps == sorted(steps) and steps[-1] == read_result(run_dir)["global_step"]
    for name in (
        "charts/SPS",
        "charts/episodic_return",
        "losses/policy_loss",
        "losses/value_loss",
        "stats/rollout_time",
    ):
        assert isinstance(rows[-1][name], float), name
    rates = [row["charts/learning_rate"] for row in rows]
    np.testing.assert_allclose(rates, 1e-3 * (1 - np.arange(5) / 5), rtol=1e-6)
    # the digest stands at every checkpoint and at the end
    assert [row["update"] for row in rows if "params_digest" in row] == [2, 4, 5]
    assert rows[-1]["params_digest"] == read_result(run_dir)["params_digest"]


def tfrecords(path):
    """The records of a TensorBoard event file: length, checksum, bytes, checksum."""
    data = path.read_bytes()
    at = 0
    while at < len(data):
        (length,) = struct.unpack_from("<Q", data, at)
        yield data[at + 12 : at + 12 + length]
        at += 12 + length + 4


@pytest.mark.parametrize("installed", [True, False])
def test_the_end_advises_only_what_is_installed(installed, monkeypatch, tmp_path):
    monkeypatch.setattr("cleanba.launch.find_spec", lambda name: object() if installed else None)
    assert ("tensorboard --logdir" in how_to_draw(tmp_path)) == installed
    assert f"cleanba report {tmp_path}" in how_to_draw(tmp_path)


def test_tensorboard_shows_the_same_numbers_as_metrics_jsonl(run_dir):
    from tensorboardX.proto.event_pb2 import Event

    (path,) = run_dir.glob("events.out.tfevents.*")
    shown: dict[str, dict[int, float]] = {}
    for record in tfrecords(path):
        event = Event.FromString(record)
        for value in event.summary.value:
            if value.HasField("simple_value"):
                shown.setdefault(value.tag, {})[event.step] = value.simple_value
    for name in ("charts/episodic_return", "losses/entropy", "stats/policy_lag"):
        written = {row["global_step"]: row[name] for row in read_rows(run_dir) if row.get(name) is not None}
        assert shown[name] == pytest.approx(written), name


def test_weights_and_biases_gets_the_run_too(run_dir):
    (path,) = run_dir.glob("wandb/offline-run-*/run-*.wandb")
    names = [b"charts/episodic_return", b"losses/policy_loss", b"num_envs"]
    deadline = time.monotonic() + 60  # its own process writes, on a busy machine a moment later
    while (missing := [name for name in names if name not in path.read_bytes()]) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not missing


def test_save_model_keeps_the_final_parameters(run_dir):
    params = flax.serialization.msgpack_restore((run_dir / "model.msgpack").read_bytes())
    assert params_digest(params) == read_result(run_dir)["params_digest"]
    template = build(PPO(env_id="Catch-v0", hiddens=(8,), num_envs=8)).algorithm.init(jax.random.key(0)).params
    restored = flax.serialization.from_bytes(template, (run_dir / "model.msgpack").read_bytes())
    assert params_digest(restored) == read_result(run_dir)["params_digest"]


def test_a_run_keeps_no_model_unless_asked(tmp_path):
    assert command("ppo", *TINY, "--run-dir", tmp_path / "run").code == 0
    assert not (tmp_path / "run" / "model.msgpack").exists()
    assert not (tmp_path / "run" / "wandb").exists()
    assert sorted(os.listdir(tmp_path)) == ["run"]


# ----------------------------------------------------------------------------------------------------- what infos tell

TOLD = ("--log-info", "is_success", "distance", "nothing")


@pytest.mark.slow
def test_numbers_of_infos_are_logged_the_same_wherever_environments_are_stepped(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "tests")
    monkeypatch.setattr("cleanba.errors.SAID", set())
    words = ("ppo", "--env-id", "odd:Succeeds", *TINY[2:], "--total-timesteps", "1920", "--checkpoint-frequency", "12")
    evaluating = ("--eval-frequency", "30", "--eval-episodes", "4")
    runs = {name: tmp_path / name for name in ("threads", "processes", "resumed", "silent")}
    threads = command(*words, *TOLD, "--env-workers", "0", "--keep-checkpoints", "all", "--run-dir", runs["threads"])
    assert threads.code == 0 and "ended with a number called nothing in its info" in threads.err
    assert "distance" not in threads.err and "is_success" not in threads.err
    assert command(*words, *TOLD, *evaluating, "--env-workers", "2", "--run-dir", runs["processes"]).code == 0
    shutil.copytree(runs["threads"], runs["resumed"])
    (runs["resumed"] / "result.json").unlink()
    for update in updates_kept(runs["resumed"]):
        if update > 12:
            shutil.rmtree(runs["resumed"] / "checkpoints" / str(update))
    assert "resuming after update 12" in command("resume", runs["resumed"]).out
    assert command(*words, "--run-dir", runs["silent"]).code == 0

    learnt = {name: [row for row in read_rows(run) if "eval/seconds" not in row] for name, run in runs.items()}
    told = {name: [[row.get(f"info/{x}") for x in TOLD[1:]] for row in rows] for name, rows in learnt.items()}
    assert told["threads"] == told["processes"] == told["resumed"] and len(told["threads"]) == 30
    success, distance, nothing = zip(*told["threads"], strict=True)
    assert 0.2 < success[-1] < 0.8 and set(nothing) == {None}
    # Odd episodes alone tell their number.
    episodes = learnt["threads"][-1]["charts/episodes"]
    assert distance[-1] == pytest.approx(episodes / 8 - 100 / 16, abs=1.5) and episodes > 200
    assert {x for row in told["silent"] for x in row} == {None}
    assert len({read_result(run)["params_digest"] for run in runs.values()}) == 1

    # Evaluations report them, too.
    (evaluated,) = [row for row in read_rows(runs["processes"]) if "eval/seconds" in row]
    assert 0 <= evaluated["eval/is_success"] <= 1 and evaluated["eval/distance"] >= 1
    assert "eval/nothing" not in evaluated
    ended = command("eval", runs["threads"], "--episodes", "4")
    means = json.loads((runs["threads"] / "eval.json").read_text())["infos"]
    assert f"is_success: mean {means['is_success']:.6g}\n" in ended.out and means["nothing"] is None


def test_infos_that_cannot_be_logged_are_refused(tmp_path):
    for words, why in (
        (("Catch-v0", "lives"), "log_info=lives needs an environment in Python, which Catch-v0 is not"),
        (("gymnasium:CartPole-v1", "a/b"), "log_info names 'a/b'"),
        (("gymnasium:CartPole-v1", "a", "a"), "log_info names 'a'; name each number"),
    ):
        ended = command("ppo", "--env-id", words[0], "--log-info", *words[1:], "--run-dir", tmp_path / "run")
        assert ended.code == 2 and why in ended.err, ended


# -------------------------------------------------------------------------------------------------- the target return


@pytest.mark.slow
def test_a_run_is_finished_after_the_update_that_follows_the_log_point_where_it_reaches_the_target(tmp_path):
    """Catch returns -1 at least, so 100 episodes are all it takes; the numbers are those of a run without a target."""
    words = (*TINY, "--total-timesteps", "1920", "--checkpoint-frequency", "1")
    target, whole, resumed = (tmp_path / name for name in ("target", "whole", "resumed"))
    ended = command("ppo", *words, "--target-return", "-1", "--save-model", "--run-dir", target)
    assert ended.code == 0 and " of -1 | length " in ended.out and "finished:" in ended.out
    assert ", --target-return -1 reached" in ended.out
    assert command("ppo", *words, "--keep-checkpoints", "all", "--run-dir", whole).code == 0
    assert read_result(whole)["target_return_reached"] is None
    digests = {row["update"]: (row["params_digest"], row["learner_digest"]) for row in read_rows(whole)}
    reached = next(row["update"] for row in read_rows(target) if row.get("charts/episodes", 0) >= 100)
    assert reached + 1 < max(digests)

    def ends_after_the_next(run_dir):
        result = read_result(run_dir)
        assert result["status"] == "finished" and result["update"] == reached + 1
        assert result["target_return_reached"] == -1
        assert (result["params_digest"], result["learner_digest"]) == digests[reached + 1]

    ends_after_the_next(target)
    assert "nothing to do" in command("resume", target).out
    # Killed after its last checkpoint, before its result: it has ended, and nothing more is learnt.
    (target / "result.json").unlink()
    ended = command("resume", target)
    assert ended.code == 0 and "finished:" in ended.out
    ends_after_the_next(target)
    shutil.copytree(whole, resumed)
    (resumed / "result.json").unlink()
    for update in updates_kept(resumed):
        if update > reached:
            shutil.rmtree(resumed / "checkpoints" / str(update))
    assert command("ppo", *words, "--target-return", "-1", "--run-dir", resumed).code == 0
    ends_after_the_next(resumed)
    # A log point that exists only because of a checkpoint does not count.
    for name, frequency in (("few", "0"), ("many", "1")):
        flags = ("--log-frequency", "7", "--checkpoint-frequency", frequency, "--run-dir", tmp_path / name)
        assert command("ppo", *TINY, "--total-timesteps", "1920", "--target-return", "-1", *flags).code == 0
    assert read_result(tmp_path / "few")["params_digest"] == read_result(tmp_path / "many")["params_digest"]
    # A lower target, or the same, is reached already.  A higher one, or none, is not.
    assert "nothing to do" in command("ppo", *words, "--target-return", "-2", "--run-dir", resumed).out
    (resumed / "uploaded.json").write_text("{}")  # what is on the Hub is no longer all of it
    shutil.copy(target / "model.msgpack", resumed)  # nor are these the last parameters
    ended = command("ppo", *words, "--run-dir", resumed)
    assert ended.code == 0 and f"resuming after update {reached + 1}" in ended.out
    assert not (resumed / "uploaded.json").exists() and not (resumed / "model.msgpack").exists()
    assert read_result(resumed)["params_digest"] == read_result(whole)["params_digest"]
    assert "nothing to do" in command("ppo", *words, "--run-dir", resumed).out
