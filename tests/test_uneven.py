"""Eight shards on one to eight learner devices, and a run that goes on from each number of devices to another."""

import json
import signal
from dataclasses import replace
from functools import cache

import jax
import pytest
from launch import build, command, digests
from test_resume import FLAGS, assert_same_run, signalled

from cleanba.algorithms import dqn, ppo, pqn, r2d2, sac
from cleanba.runtime.checkpoint import Checkpoints
from cleanba.runtime.metrics import Display, Status
from cleanba.runtime.train import run_training

ALL = (8, 3, 5, 1, 7, 2, 6, 4)  # devices, one after the other: from even to uneven, from many to few, and back
FEW = (8, 1, 3)  # the shards are laid out by what all algorithms share, so one of them is tried on all
EPOCH = 2  # updates on each number of devices

SIZES = dict(
    num_envs=16, num_actors=2, num_shards=8, num_steps=4, hiddens=(8,), env_epoch=2 * EPOCH, collector="stepped"
)
SIZES |= dict(total_timesteps=len(FEW) * EPOCH * 16 * 4)
REPLAY = dict(buffer_size=16 * 14, learning_starts=64, batch_size=32, train_frequency=16)  # rings that wrap
EXPERIMENTS = {
    # With statistics of observations and returns, of which the latter need a memory.
    "ppo": (
        ppo,
        ppo.PPO(
            **SIZES | dict(total_timesteps=len(ALL) * EPOCH * 16 * 4),
            env_id="Pendulum-v1",
            num_minibatches=2,
            norm_obs=True,
            norm_reward=True,
        ),
    ),
    "pqn": (pqn, pqn.PQN(**SIZES, env_id="Catch-v0", num_minibatches=2, core="lstm", lstm_size=8, norm_reward=True)),
    "dqn": (dqn, dqn.DQN(**SIZES, **REPLAY, env_id="Catch-v0", n_step=2, prioritised=True)),
    "r2d2": (
        r2d2,
        r2d2.R2D2(
            **SIZES | REPLAY | dict(buffer_size=16 * 22, learning_starts=128),
            env_id="Catch-v0",
            burn_in=2,
            sequence_length=4,
            lstm_size=8,
            norm_obs=True,
        ),
    ),
    "sac": (sac, sac.SAC(**SIZES, **REPLAY, env_id="Pendulum-v1")),
}


class Enough(Exception):
    """A run has come as far as it should."""


@cache
def on_one(name: str) -> dict[int, str]:
    recipe, e = EXPERIMENTS[name]
    return digests(e, recipe=recipe)


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_a_run_goes_on_from_any_number_of_devices_to_any_other(name, tmp_path):
    recipe, e = EXPERIMENTS[name]
    found: dict[int, str] = {}
    order = ALL if name == "ppo" else FEW

    def log(update, global_step, seconds, values):
        if "params_digest" in values:
            found[update] = f"{values['params_digest']} {values['learner_digest']}"

    for epoch, devices in enumerate(order, 1):

        def leave(update, global_step, params, last=epoch * EPOCH):
            if update > last:  # its checkpoint is being written
                raise Enough

        training = build(e, (0,), range(devices), recipe=recipe)
        mine = training.memory_shapes, training.local_shards, training.local_actors
        checkpoints = Checkpoints(tmp_path, 2, *mine, training.schedule.ends_epoch)
        state = jax.eval_shape(training.algorithm.init, jax.random.key(0))
        saved, warnings = checkpoints.restore(state, jax.eval_shape(training.algorithm.actor_params, state))
        assert (saved.update if saved else 0) == (epoch - 1) * EPOCH and not warnings
        training = replace(
            training, checkpoints=checkpoints, saved=saved, after_update=leave, checkpoint_frequency=EPOCH
        )
        status = Status("test", 1)
        outcome = run_training(training, Display(status, enabled=False), status, log)
        if outcome.error is not None and not isinstance(outcome.error, Enough):
            raise outcome.error
        checkpoints.wait()
        checkpoints.close()
    assert found.items() >= on_one(name).items() and len(found) == len(order)


# The settings that the first run derived from its devices.  20 updates.
LEFT_OUT = ["--num-actors", "--num-shards", "--collector"]
BARE = ["ppo", *(w for i, w in enumerate(FLAGS) if w not in LEFT_OUT and FLAGS[i - 1] not in LEFT_OUT)]
BARE += ["--total-timesteps", "1280"]


def test_a_run_goes_on_with_its_own_shards_on_other_devices(tmp_path, monkeypatch):
    """A run of two shards, where the preset has one, goes on by `resume` and by the command that began it."""
    two, one = ["--learner-device-ids", "0", "1"], ["--learner-device-ids", "2", "--actor-device-ids", "0", "1"]
    shards = ["--num-shards", "2"]
    whole, run = tmp_path / "whole", tmp_path / "run"
    assert command(*BARE, *shards, *two, "--run-dir", whole).code == 0
    with monkeypatch.context() as patch:
        signalled(patch, signal.SIGTERM, at=10)
        assert command(*BARE, *shards, *two, "--run-dir", run).code == 128 + signal.SIGTERM
    experiment = json.loads((run / "config.json").read_text())["experiment"]
    assert (experiment["num_actors"], experiment["num_shards"], experiment["collector"]) == (1, 2, "scanned")

    typed = command(*BARE, *one, "--num-shards", "1", "--run-dir", run)
    assert typed.code == 2 and "num_shards: 2, now 1" in typed.err
    with monkeypatch.context() as patch:
        signalled(patch, signal.SIGTERM, at=17)
        assert command("resume", run, *one).code == 128 + signal.SIGTERM
    ended = command(*BARE, *shards, *one, "--run-dir", run)
    assert ended.code == 0 and "1 actor, 2 shards" in ended.out
    assert json.loads((run / "config.json").read_text())["experiment"] == experiment
    assert_same_run(run, whole)
