"""The Python interface: a run from keywords, its curves, its agent, and how an interrupted run ends."""

import asyncio
import functools
import inspect
import json
import logging
import os
import random
import re
import shutil
import signal
import sys
import textwrap
import threading
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path

import absl.logging
import gymnasium
import jax
import numpy as np
import pytest
from launch import ROOT, TINY, command, finish, python, read_result, read_rows
from test_resume import signalled

import cleanba
from cleanba import launch
from cleanba.agents.agent import Agent, as_batch
from cleanba.algorithms.ppo import PPO
from cleanba.config import Placement, fields_of
from cleanba.config import Run as RunFlags
from cleanba.environments.code_text import argument_text, code_text
from cleanba.environments.common import parse_options
from cleanba.environments.gymnasium import register
from cleanba.errors import UsageError
from cleanba.recipes import RECIPES, find_recipe
from cleanba.runs import progress_line
from cleanba.runtime.collect import first_carry
from cleanba.runtime.process_setup import root_logger_left_alone
from cleanba.specs import ActionSpec, EnvSpec, ObsSpec, choice
from cleanba.trust import mark_downloaded

SMALL = dict(num_envs=8, num_steps=16, num_actors=2, num_shards=2, hiddens=[16], num_minibatches=2, update_epochs=1)
SMALL |= dict(collector="stepped")  # compiled once for all tests


def words_of(flags: dict) -> list[str]:
    """Keywords as the command takes them."""
    several = lambda value: value if isinstance(value, list | tuple) else [value]
    return [str(word) for name, x in flags.items() for word in (f"--{name.replace('_', '-')}", *several(x))]


WORDS = words_of(SMALL)


def small(env_id="CartPole-v1", **more) -> cleanba.Spec:
    return cleanba.ppo(env_id, **SMALL, **{"total_timesteps": 1280, **more})


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> cleanba.Run:
    return cleanba.train(small(), tmp_path_factory.mktemp("api") / "run", progress=False, log_frequency=2)


# ------------------------------------------------------------------------------------------------------------- the run


def test_the_package_alone_imports_nothing():
    code = (
        "import time, sys; began = time.process_time(); import cleanba; seconds = time.process_time() - began\n"
        "assert not {'jax', 'numpy', 'gymnasium', 'cleanba.api'} & set(sys.modules), sorted(sys.modules)\n"
        "assert seconds < 0.2, seconds\n"
        "assert {'ppo', 'train', 'load', 'UsageError'} <= set(dir(cleanba))\n"
        "try: cleanba.nothing\n"
        "except AttributeError as error: assert 'nothing' in str(error)\n"
        "else: raise AssertionError('cleanba.nothing is there')"
    )
    ended = finish(python("-c", code))
    assert ended.code == 0, ended.err


def test_an_experiment_may_be_resolved_before_it_is_trained():
    spec = "cleanba.ppo('CartPole-v1', cpu_kernels='off')"  # XLA's threads are then part of the bits
    code = f"import os, cleanba; {spec}.resolve(); print(os.environ['PJRT_NPROC'])"
    ended = finish(python("-c", code))
    assert (ended.code, ended.out) == (0, "8\n"), ended.err


def test_python_and_the_command_train_the_same_bits_and_know_each_others_runs(run, tmp_path):
    words = ["ppo", "--env-id", "CartPole-v1", *WORDS, "--total-timesteps", "1280", "--log-frequency", "2"]
    ended = command(*words, "--run-dir", tmp_path / "typed")
    assert ended.code == 0, ended.err
    assert read_result(tmp_path / "typed")["params_digest"] == run.result["params_digest"]
    ended = command(*words, "--run-dir", run.run_dir)
    assert ended.code == 0 and "is finished; nothing to do" in ended.out


def test_a_finished_run_is_left_alone_and_its_whole_experiment_can_be_trained_elsewhere(run, tmp_path, capsys):
    before = (run.run_dir / "result.json").stat().st_mtime_ns
    again = cleanba.train(small(), run.run_dir)
    assert "is finished; nothing to do" in capsys.readouterr().out
    assert again.result == run.result and (run.run_dir / "result.json").stat().st_mtime_ns == before
    placed = dict(learner_device_ids=(1, 2), actor_device_ids=[3, 4, 5])
    other = cleanba.train(run.spec, tmp_path / "run", progress=False, **placed)
    said = capsys.readouterr()
    assert said.out == "" and re.search(r"^cleanba: warning: \d actor devices? will be idle", said.err), said
    assert other.result["params_digest"] == run.result["params_digest"]
    assert other.config["experiment"] == run.config["experiment"]


def test_curves_are_arrays_over_steps(run):
    steps, values = run.curve("charts/episodic_return")
    assert steps.dtype == np.int64 and values.dtype == np.float64 and len(steps) == len(values) == 6
    assert steps[-1] == run.result["global_step"] and values[-1] == run.result["episodic_return"]
    assert "losses/loss" in run.metrics and "params_digest" not in run.metrics
    with pytest.raises(
        cleanba.UsageError, match=r"no number named 'charts/episode_return'; the closest are .*episodic_return"
    ):
        run.curve("charts/episode_return")
    assert str(cleanba.Run(run.run_dir).run_dir) in repr(run)
    assert cleanba.load(run).spec == run.agent().spec


def test_a_run_may_stand_for_its_directory(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"experiment": {"algorithm": "ppo"}}))
    assert cleanba.ppo("Catch-v0", init_from=cleanba.Run(tmp_path)).flags["init_from"] == str(tmp_path)
    with pytest.raises(cleanba.UsageError, match="holds another experiment|config.json"):
        cleanba.train(small(), cleanba.Run(tmp_path), progress=False)


def test_a_run_is_found_from_another_directory(run, tmp_path, monkeypatch):
    monkeypatch.chdir(run.run_dir.parent)
    here = cleanba.Run(run.run_dir.name)
    monkeypatch.chdir(tmp_path)
    assert here.result == run.result and here.spec.resolve() == run.spec.resolve()


def test_a_run_that_ended_before_its_first_checkpoint_has_no_agent_yet(run, tmp_path):
    shutil.copy(run.run_dir / "config.json", tmp_path)
    (tmp_path / "result.json").write_text(json.dumps({"status": "interrupted", "update": 0}))
    with pytest.raises(UsageError, match=f"it ended before the first; `cleanba resume {tmp_path}` starts it again"):
        cleanba.load(tmp_path)


def test_places_without_a_run_are_refused(tmp_path):
    with pytest.raises(cleanba.UsageError, match="does not exist"):
        cleanba.Run(tmp_path)
    with pytest.raises(cleanba.UsageError, match="does not exist"):
        cleanba.load(tmp_path)
    with pytest.raises(cleanba.UsageError, match="takes a specification"):
        cleanba.train("CartPole-v1")


@pytest.mark.parametrize(
    "make, words",
    [
        (lambda: cleanba.ppo("CartPole-v1", learning_rat=1), "no keyword learning_rat; the closest are learning_rate"),
        (lambda: cleanba.sac("Pendulum-v1", learning_rate=1e-3), "sac has no keyword learning_rate; set policy_lr"),
        (lambda: cleanba.ppo("Pendulum-v1", n_epochs=3), "ppo has no keyword n_epochs; set update_epochs"),
        (lambda: cleanba.dqn("CartPole-v1", n_epochs=3), "dqn has no keyword n_epochs; the closest are env_epoch"),
        (lambda: cleanba.ppo(target_network_frequency=1), "PQN have no target network: leave it out"),
        (lambda: cleanba.ppo("CartPole-v1", run_dir="runs/a"), "does not change what is trained; give it to train"),
        (lambda: cleanba.ppo("CartPole-v1", learning_rate="fast"), "learning_rate='fast' must be a number"),
        (lambda: cleanba.ppo("CartPole-v1", num_envs=2.5), "num_envs=2.5 must be a whole number"),
        (lambda: cleanba.ppo("").resolve(), "env_id='' is not an EnvPool environment"),
        (lambda: cleanba.ppo("CartPole-v1", network="big"), "network='big' must be one of"),
        (lambda: cleanba.ppo("CartPole-v1", hiddens=64), "hiddens=64 must be a list; write [64]"),
        (lambda: cleanba.ppo("CartPole-v1", env_wrappers="m:f"), "env_wrappers='m:f' must be a list; write ['m:f']"),
        (lambda: cleanba.dqn("CartPole-v1", buffer_size="1e6"), "must be a whole number; write 1_000_000"),
        (lambda: cleanba.ppo("CartPole-v1", learning_rate="3e-4"), "must be a number; write 0.0003"),
        (lambda: cleanba.sac("Pendulum-v1", norm_reward=True), "norm_reward; only PPO, IMPALA and PQN have it: scale"),
        (
            lambda: cleanba.specify(RECIPES["ppo"], "Catch-v0"),
            "or 'my_module:RECIPE', not an object of the type Recipe",
        ),
        (lambda: cleanba.ppo(3), "must be a name, or a class"),
        (lambda: cleanba.ppo("CartPole-v1", env_id="Catch-v0"), "ppo was given 2 environments; name one"),
        (lambda: small(total_timesteps=10**310), "total_timesteps"),
        (lambda: small(gamma=10**310), "gamma"),
        (lambda: cleanba.Spec("ppoo").resolve(), "there is no algorithm 'ppoo'; there are ppo"),
        (lambda: cleanba.load(5), "a run is named by its directory, not by 5"),
        (lambda: cleanba.Run(5), "Run takes the directory of a run, not 5"),
        (lambda: cleanba.evaluate("runs/a"), "evaluate takes an agent, such as cleanba.load('runs/a'), not 'runs/a'"),
        (lambda: cleanba.dqn("CartPole-v1", core="lstm"), "dqn"),
        (lambda: cleanba.ppo("CartPole-v1", num_envs=0).resolve(), "num_envs=0 must lie in [1, 1e6]; try --num-envs 1"),
        (lambda: cleanba.ppo("CartPole-v1", num_minibatches=3).resolve(), "num_minibatches=3 cannot cut"),
        (lambda: cleanba.ppo("CartPole-v1", num_actors=3).resolve(), "cannot be split over 3 actors"),
        (lambda: small(total_timesteps=1).resolve(), "total_timesteps=1 is less than one update's"),
        (lambda: cleanba.sac("CartPole-v1").resolve(), "but SAC chooses real numbers"),
        (lambda: cleanba.dqn("Pendulum-v1").resolve(), "but DQN values each of a few actions"),
        (lambda: cleanba.train(small(), "/dev/null/x"), "cannot be written: Not a directory; choose another --run-dir"),
        (lambda: cleanba.train(small(), seed=3), "changes what is trained; give it to ppo"),
        (lambda: cleanba.train(small(), verbose=0), "no keyword verbose; set progress=False"),
        (lambda: cleanba.train(small(), callback=print), "no keyword callback; there are no callbacks: metrics.jsonl"),
        (lambda: cleanba.train(small(), log_frequenzy=3), "the closest are log_frequency"),
        (lambda: cleanba.train(small(), total_timestep=3), "if you mean total_timesteps, give it to ppo"),
        (lambda: cleanba.train(small(), progress="no"), "progress='no' must be True or False"),
        (lambda: cleanba.train(small(), log_frequency="often"), "log_frequency='often' must be a whole number"),
    ],
)
def test_invalid_arguments_are_refused_in_one_sentence(make, words):
    with pytest.raises(cleanba.UsageError) as caught:
        make()
    assert words in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "flags, placed",
    [
        (dict(num_envs=7), {}),
        (dict(env_id="CartPole-v9"), {}),
        (dict(gamma=2.0), {}),
        ({}, dict(learner_device_ids=(99,))),
        (dict(seed=2), {}),
    ],
)
def test_errors_are_the_sentences_of_the_command(flags, placed, run):
    words = ["ppo", "--env-id", "CartPole-v1", *WORDS, "--total-timesteps", "1280", "--run-dir", run.run_dir]
    ended = command(*words, *words_of(flags | placed))
    with pytest.raises(cleanba.UsageError) as caught:
        cleanba.train(cleanba.ppo(**{"env_id": "CartPole-v1", "total_timesteps": 1280, **SMALL, **flags}),
                      run.run_dir, progress=False, **placed)  # fmt: skip
    assert ended.code == 2 and ended.err == f"cleanba: {caught.value}\n"


@pytest.mark.parametrize("name", RECIPES)
def test_signatures_and_documentation_have_every_flag(name):
    specify, known = getattr(cleanba, name), fields_of(RECIPES[name].experiment)
    offered = [field for field, f in known.items() if f.offered]
    assert list(inspect.signature(specify).parameters) == [*offered, "preset"]
    assert all(f"    {field}: {known[field].about}" in specify.__doc__ for field in offered)


def test_train_takes_the_flags_of_placement_and_run():
    from cleanba.api import TrainFlags

    known = {**fields_of(Placement), **fields_of(RunFlags)}
    flags = set(known) - {"run_dir", "experiment_from"}
    assert set(TrainFlags.__annotations__) == flags
    parameters = inspect.signature(cleanba.train).parameters
    assert set(parameters) == {"spec", "run_dir", "progress", *flags} and parameters["log_frequency"].default == 10
    assert all(f"    {name}: {known[name].about}" in cleanba.train.__doc__ for name in flags)
    assert cleanba.train.__doc__.count("\n\nRaises:\n    UsageError: ") == 1


def test_values_may_be_numpys_and_options_a_dictionary():
    spec = cleanba.ppo("Breakout-v5", num_envs=np.int64(8), gamma=np.float32(0.5), hiddens=np.array([8, 8]),
                       total_timesteps=1e6, env_options=dict(frame_skip=2))  # fmt: skip
    assert spec.flags == dict(
        env_id="Breakout-v5", num_envs=8, gamma=0.5, hiddens=(8, 8), total_timesteps=10**6,
        env_options=("frame_skip=2",),
    )  # fmt: skip
    scalars = cleanba.ppo("Catch-v0", seed=jax.numpy.int32(2), learning_rate=jax.numpy.float32(0.5)).flags
    assert scalars["seed"] == 2 and scalars["learning_rate"] == 0.5
    assert repr(cleanba.ppo("Catch-v0", seed=2)) == "ppo(env_id='Catch-v0', seed=2)"
    options = {"level": "3", "mode": "None", "name": "true", "flag": True, "sizes": (np.int64(3), 4), "word": "a b"}
    read = parse_options(cleanba.ppo("Catch-v0", env_options=options).flags["env_options"])
    assert read == options and [type(x) for x in read.values()] == [type(x) for x in options.values()]
    assert parse_options(cleanba.ppo("Catch-v0", env_options={"w": np.array([1, 2])}).flags["env_options"]) == {
        "w": [1, 2]
    }
    for name, value in (("reward", abs), ("a=b", 1)):
        with pytest.raises(UsageError, match=rf"env_options\['{name}'\].* cannot be written as name=value"):
            cleanba.ppo("Catch-v0", env_options={name: value})
    with pytest.raises(UsageError, match="is not a preset of ppo"):
        cleanba.ppo("Catch-v0", preset=["cleanrl-atari"])
    with pytest.raises(UsageError, match="gamma=1000+ must be a number"):
        cleanba.ppo("Catch-v0", gamma=10**400)
    with pytest.raises(UsageError, match="File name too long"):
        cleanba.train(cleanba.ppo("Catch-v0"), "x" * 300)
    assert cleanba.ppo("Catch-v0", init_from=Path("runs/a"), hiddens=[np.int64(8)]).flags["init_from"] == "runs/a"
    with pytest.raises(UsageError, match="there is no algorithm 'pp'"):
        cleanba.train(cleanba.Spec("pp"))


def test_tuples_within_an_observation_may_be_vectors():
    spec = EnvSpec(
        "Two-v0",
        {"00": ObsSpec("vector", (2,), "float32"), "01": ObsSpec("vector", (1,), "float32")},
        choice(2),
        False,
        False,
        {},
    )
    batch, size = as_batch(spec, ((0.0, 1.0), [2.0]))
    assert size is None and {name: x.tolist() for name, x in batch.items()} == {"00": [[0.0, 1.0]], "01": [[2.0]]}


def test_an_environment_that_leaves_the_program_fails_its_run(tmp_path):
    class Leaving(Line):
        taken = 0

        def step(self, action):
            self.taken += 1
            return super().step(action) if self.taken < 60 else sys.exit(0)

    with pytest.raises(RuntimeError, match=r"the environment called sys.exit\(0\)"):
        cleanba.train(small(Leaving, total_timesteps=1024), tmp_path / "run", progress=False)
    assert read_result(tmp_path / "run")["status"] == "failed"


def test_an_environment_of_none_is_the_default_one():
    assert cleanba.ppo(None) == cleanba.ppo(env_id=None) == cleanba.ppo()
    with pytest.raises(UsageError, match="env_id=3 must be a name"):
        cleanba.ppo(3)


def test_one_process_of_several_may_load_an_agent_alone(run, monkeypatch):
    def waiting(*_):
        raise AssertionError("it waits for the other processes")

    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr("cleanba.runtime.devices.gather_over_processes", waiting)
    assert run.agent().update == run.result["update"]


def test_seeds_may_be_numbers_of_numpy(run):
    """Episodes that are cut off are followed by others with further seeds."""
    cut = [
        cleanba.evaluate(run.agent(), episodes, seed=seed, max_steps=3).returns
        for episodes, seed in ((40, 1), (np.int32(40), np.int32(1)))
    ]
    assert np.array_equal(*cut) and len(cut[0]) == 40


def test_presets_are_those_of_the_command():
    e = cleanba.ppo("Pendulum-v1").resolve()
    assert e.norm_obs and e.network == "mlp" and not e.share_torso


# ------------------------------------------------------------------------------------------------------------ the agent


def test_one_observation_or_a_batch(run):
    agent = run.agent()
    assert isinstance(agent, cleanba.Agent) and agent.update == run.result["update"]
    assert agent.spec.obs == ObsSpec("vector", (4,), "float32") and "CartPole-v1" in repr(agent)
    batch = np.random.default_rng(0).normal(size=(5, 4))
    together = agent.act(batch, greedy=True)
    assert together.shape == (5,) and together.dtype == np.int32
    alone = [agent.act(kind(obs.tolist()), greedy=True) for obs, kind in zip(batch, [list, tuple] * 3, strict=False)]
    assert all(a.shape == () and int(a) in (0, 1) for a in alone) and np.array_equal(alone, together)


def test_actions_are_drawn_with_a_seed_and_never_with_the_same_numbers_twice(run):
    batch = np.zeros((200, 4), np.float32)  # where both actions are about as likely
    first, second = cleanba.load(run.run_dir, seed=3), cleanba.load(run.run_dir, seed=3)
    drawn = [first.act(batch) for _ in range(3)]
    assert all(0 < x.mean() < 1 for x in drawn) and not np.array_equal(drawn[0], drawn[1])
    assert all(np.array_equal(x, second.act(batch)) for x in drawn)
    first.reset()
    assert not np.array_equal(first.act(batch), drawn[0])
    first.reset(seed=3)
    assert np.array_equal(first.act(batch), drawn[0])
    first.reset(seed=4)
    assert not np.array_equal(first.act(batch), drawn[0])


@pytest.mark.parametrize(
    "obs, words",
    [
        (np.zeros(3), "has the shape (3,); expected (4,)"),
        (np.zeros((2, 2, 4)), "has the shape (2, 2, 4)"),
        (np.zeros((0, 4)), "has the shape (0, 4)"),
        ("left", "has the shape ()"),
        ([[1.0], [1.0, 2.0]], "is not an array"),
        (["a"] * 4, "expected float32"),
        ({"obs": np.zeros(4)}, "has the shape ()"),
        ((0.0, 1.0, 2.0), "has the shape (3,); expected (4,)"),
    ],
)
def test_an_observation_of_another_form_is_refused(run, obs, words):
    with pytest.raises(cleanba.UsageError) as caught:
        run.agent().act(obs)
    assert words in str(caught.value) and "CartPole-v1 shows vector 4 float32" in str(caught.value)
    with pytest.raises(cleanba.UsageError, match="first has the shape"):
        run.agent().act(np.zeros((3, 4)), first=[True])


def test_a_recurrent_agent_remembers_until_an_episode_begins(tmp_path):
    spec = small("Catch-v0", core="lstm", lstm_size=8, total_timesteps=256)
    agent = cleanba.train(spec, tmp_path / "run", progress=False).agent()
    policy, rng = agent.policy, np.random.default_rng(1)
    shape = policy.spec.obs.shape
    carry, key = first_carry(policy.algorithm, 2, jax.devices()[0]), agent._key
    begins = [(True, True), (False, False), (False, True), (False, False)]
    for t, first in enumerate(begins):
        obs = rng.integers(0, 2, (2, *shape)).astype(np.float32)
        expected, carry = policy.act(policy.params, carry, obs, np.array(first), key, np.int32(t), True)
        # None says that episodes begin at the first call only.
        got = agent.act(obs, first=None if t in (0, 1, 3) else first)
        assert np.array_equal(got, np.asarray(expected)), t
    assert all(np.array_equal(a, b) for a, b in zip(jax.tree.leaves(carry), jax.tree.leaves(agent._carry), strict=True))
    assert any(np.abs(x).max() > 0 for x in jax.tree.leaves(carry))
    with pytest.raises(cleanba.UsageError, match="remembers the past of 2 environments and was given 1 observation"):
        agent.act(np.zeros(shape))
    agent.act(np.zeros(shape), first=True)  # nothing that was before matters now
    agent.reset()
    agent.act(np.zeros((3, *shape)))


def test_an_agent_without_memory_takes_any_number_of_observations(tmp_path):
    sizes = dict(num_envs=8, num_steps=8, buffer_size=1000, batch_size=8, learning_starts=384, hiddens=(8,))
    spec = cleanba.r2d2("Catch-v0", core="none", network="mlp", total_timesteps=512, **sizes)
    agent = cleanba.train(spec, tmp_path / "run", progress=False).agent()
    shape = agent.policy.spec.obs.shape
    assert [agent.act(np.zeros((n, *shape))).shape for n in (3, 2, 3)] == [(3,), (2,), (3,)]


def test_settings_of_random_numbers_do_not_change_what_an_agent_draws(run):
    keys, agent = [], run.agent()
    for offset in (0, 7):
        jax.config.update("jax_random_seed_offset", offset)
        try:
            agent.reset(3)
            keys.append(jax.random.key_data(agent._key).tolist())
            assert jax.config.values["jax_random_seed_offset"] == offset
        finally:
            jax.config.update("jax_random_seed_offset", 0)
    assert keys[0] == keys[1]


@pytest.mark.parametrize(
    "env_id, kind, dtype, most",
    [("gymnax:Breakout-MinAtar", "planes", "bool", True), ("craftax:Craftax-Pixels-v1", "pixels", "uint8", 255)],
)
def test_observations_in_jax_are_taken_as_their_environments_show_them(env_id, kind, dtype, most):
    spec = EnvSpec(env_id, ObsSpec(kind, (2, 2), dtype), choice(2), False, False, {})
    obs, count = as_batch(spec, np.float32([[0, 1], [1, 0]]))
    assert count is None and obs.dtype == dtype and obs.tolist() == [[[0, most], [most, 0]]]


@pytest.mark.parametrize("value, bounds", [(300, "uint8 has 0 to 255"), (-1, "uint8 has 0 to 255"), (255, "")])
def test_a_number_that_the_observations_type_cannot_hold_is_refused_not_wrapped(value, bounds):
    spec = EnvSpec("Any-v0", ObsSpec("bytes", (2,), "uint8"), choice(2), False, False, {})
    if bounds:
        with pytest.raises(UsageError, match=rf"the observation has the value {value}, but {bounds}; Any-v0 shows"):
            as_batch(spec, np.array([0, value]))
    else:
        assert as_batch(spec, np.array([0, value]))[0].tolist() == [[0, value]]


def test_a_number_outside_its_space_is_reported(capsys):
    spec = EnvSpec("Any-v0", {"k": ObsSpec("discrete", (), "int32", 4, -1)}, choice(2), False, False, {})
    as_batch(spec, {"k": 2})
    assert capsys.readouterr().err == ""
    as_batch(spec, {"k": 9})
    assert "the agent was given the observation ['k'] = 9, but its space has -1 to 2" in capsys.readouterr().err


@pytest.mark.parametrize("dtype", ["bool", "int64", "float32"])
def test_a_mask_marks_legal_actions_by_values_other_than_0_of_any_type(dtype):
    spec = EnvSpec("Any-v0", ObsSpec("mask", (3,), "int8"), choice(3), False, False, {})
    obs, count = as_batch(spec, np.array([0, 1, 2]).astype(dtype))
    assert count is None and obs.dtype == np.int8 and obs.tolist() == [[0, 1, 1]]


def test_actions_are_the_environments_own_and_within_its_bounds(tmp_path):
    spec = cleanba.sac("Pendulum-v1", num_envs=4, num_steps=4, num_actors=1, num_shards=1, hiddens=[8],
                       total_timesteps=64, learning_starts=16, batch_size=8, buffer_size=64)  # fmt: skip
    agent = cleanba.train(spec, tmp_path / "run", progress=False).agent()
    env = gymnasium.make("Pendulum-v1")
    obs, _ = env.reset(seed=1)
    for greedy in (None, True, False):
        action = agent.act(obs, greedy=greedy)
        assert action in env.action_space and action.shape == (1,)
    wide = ActionSpec("quantities", (2,), "float64", (), (-1.0, -2.0), (1.0, 2.0))
    loud = agent.policy._replace(
        act=lambda params, carry, obs, *_: (np.full((len(obs), 2), 9.0, np.float32), carry),
        spec=agent.spec._replace(action=wide),
    )
    action = Agent(loud, jax.devices()[0]).act(np.zeros((3, 3)))
    assert action.dtype == np.float64 and np.array_equal(action, [[1.0, 2.0]] * 3)


def test_dictionaries_tuples_and_masks_are_taken_as_environments_show_them():
    parts = {"action_mask": ObsSpec("mask", (2,), "int8"), "inner": {"00": ObsSpec("discrete", (), "int32", 3)}}
    spec = EnvSpec("Some-v0", parts, choice(2), False, False, {})
    one, count = as_batch(spec, {"action_mask": [0, 1], "inner": (2,), "more": "text"})
    assert count is None and one["action_mask"].shape == (1, 2) and one["action_mask"].dtype == np.int8
    assert one["inner"]["00"].tolist() == [2] and one["inner"]["00"].dtype == np.int32
    many, count = as_batch(spec, {"action_mask": np.ones((3, 2), bool), "inner": {"00": np.arange(3)}})
    assert count == 3 and many["inner"]["00"].shape == (3,)
    with pytest.raises(cleanba.UsageError, match="parts of the observation are batches of different sizes"):
        as_batch(spec, {"action_mask": np.ones((3, 2)) > 0, "inner": {"00": 1}})
    with pytest.raises(cleanba.UsageError, match="must have the parts action_mask, inner, but has inner"):
        as_batch(spec, {"inner": {"00": 1}})
    with pytest.raises(cleanba.UsageError, match=r"observation\['inner.00'\] is of type float64; expected int32"):
        as_batch(spec, {"action_mask": [0, 1], "inner": {"00": 1.5}})


def test_a_seed_is_needed_and_warnings_of_gymnasium_stay(run, monkeypatch):
    with pytest.raises(cleanba.UsageError, match="seed=None must be a whole number"):
        cleanba.load(run.run_dir, seed=None)
    monkeypatch.setattr("gymnasium.logger.min_level", 30)
    cleanba.evaluate(run.agent(), 1)
    assert gymnasium.logger.min_level == 30


def test_an_evaluation_leaves_the_current_directory_where_the_program_put_it(tmp_path, monkeypatch):
    made = small(Line)
    run = cleanba.train(made, tmp_path / "run", progress=False)
    agent = run.agent()
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    cleanba.evaluate(agent, 2)
    assert Path.cwd() == tmp_path / "elsewhere"
    with pytest.raises(cleanba.UsageError, match="is a folder; name a file"):
        (tmp_path / "film.mp4").mkdir()
        cleanba.evaluate(agent, 2, film=tmp_path / "film.mp4")
    monkeypatch.chdir("/")
    with pytest.raises(cleanba.UsageError, match="holds other runs; name a folder in it"):
        cleanba.train(made, tmp_path)
    (run.run_dir / "config.json").write_text('{"model_type": "bert"}')  # another program's
    assert not launch.holds_runs(tmp_path)


def test_a_function_that_changes_before_training_is_named(tmp_path, capfd):
    length = [3]
    spec = small(lambda: Line(length[0]))
    spec.register()
    assert "has changed since" not in capfd.readouterr().err
    length[0] = 4
    spec.register()
    assert "or what it reads, has changed since the specification was made" in capfd.readouterr().err
    name = spec.flags["env_id"].removeprefix("gymnasium:")
    del gymnasium.registry[name]  # as in a process that was spawned
    spec.register()
    assert gymnasium.registry[name].entry_point is spec.maker


@pytest.mark.parametrize("obs", [np.float32([0, np.nan]), [[0, 1], [np.nan, 1]], [0, -np.inf]])
def test_an_observation_that_is_not_finite_is_refused_and_named(obs):
    spec = EnvSpec("Some-v0", {"inner": {"speed": ObsSpec("vector", (2,), "float32")}}, choice(2), False, False, {})
    words = r"observation\['inner.speed'\] has a value that is not finite \((nan|-inf)\)"
    with pytest.raises(cleanba.UsageError, match=words):
        as_batch(spec, {"inner": {"speed": obs}})
    with pytest.raises(cleanba.UsageError, match=r"not finite \(1e\+39 as float32\)"):
        as_batch(spec, {"inner": {"speed": [0, 1e39]}})


def test_evaluations_are_those_of_the_command_and_disturb_nothing(run, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(progress_line, "PLAIN_SECONDS", 0.001)
    agent = run.agent()
    obs = np.zeros((50, 4), np.float32)
    undisturbed = cleanba.load(run.run_dir)
    undisturbed.act(obs), agent.act(obs)
    played = cleanba.evaluate(agent, episodes=4, film=tmp_path / "film.mp4", progress=True)
    assert re.search(
        r"^playing: [0-3] of 4 episodes have ended, step \d+, \d+ s$", capsys.readouterr().err, re.MULTILINE
    )
    assert np.array_equal(agent.act(obs), undisturbed.act(obs))
    assert command("eval", run.run_dir, "--episodes", "4").code == 0
    expected = json.loads((run.run_dir / "eval.json").read_text())
    assert played.returns.tolist() == expected["returns"] and played.lengths.tolist() == expected["lengths"]
    assert (played.mean, played.std) == (expected["mean"], expected["std"])
    assert played.film == tmp_path / "film.mp4" and played.film.stat().st_size > 1000
    with pytest.raises(cleanba.UsageError, match="episodes=0 must be at least 1"):
        cleanba.evaluate(agent, episodes=0)
    with pytest.raises(cleanba.UsageError, match="must be an .mp4 file"):
        cleanba.evaluate(agent, episodes=1, film="film.gif")
    with pytest.raises(cleanba.UsageError, match="greedy='no' must be True, False or None"):
        cleanba.evaluate(agent, greedy="no")
    with pytest.raises(cleanba.UsageError, match="episodes=True must be a whole number"):
        cleanba.evaluate(agent, True)
    with pytest.raises(cleanba.UsageError, match="max_steps=True must be a whole number"):
        cleanba.evaluate(agent, max_steps=True)


@pytest.mark.parametrize(
    "flags, shapes",
    [
        (dict(core="lstm", lstm_size=8), {"value": (), "probability": (2,)}),
        (dict(env_id="Pendulum-v1", total_timesteps=128), {"value": (), "mean": (1,)}),
    ],
)
def test_inspecting_observations_changes_nothing_that_an_agent_does(flags, shapes, tmp_path):
    env_id = flags.pop("env_id", "CartPole-v1")
    agent = cleanba.train(small(env_id, **flags), tmp_path / "run", progress=False).agent()
    size = agent.spec.obs.shape[0]
    walk = np.random.default_rng(0).normal(size=(5, 3, size)).astype(np.float32)
    before = [agent.act(obs) for obs in walk]
    agent.reset(1)
    seen = []
    for obs, action in zip(walk, before, strict=True):
        seen.append(agent.inspect(obs))
        assert (agent.act(obs) == action).all()
    assert {name: x.shape for name, x in seen[0].items()} == {name: (3, *shape) for name, shape in shapes.items()}
    if "probability" in shapes:
        np.testing.assert_allclose(seen[0]["probability"].sum(1), 1, rtol=1e-5)
    # After four steps, a recurrent agent's memory changes what its networks compute for the last observation.
    agent.reset(1)
    fresh = agent.inspect(walk[-1])
    assert (fresh["value"] != seen[-1]["value"]).any() == ("core" in flags)
    agent.reset(1)
    alone = agent.inspect(walk[-1][0])
    assert {name: x.shape for name, x in alone.items()} == shapes
    np.testing.assert_allclose(alone["value"], fresh["value"][0], rtol=1e-4, atol=1e-5)


def test_training_leaves_the_precision_of_other_computations_unchanged(run, tmp_path):
    jax.config.update("jax_default_matmul_precision", "bfloat16")
    try:
        cleanba.train(small(total_timesteps=128), tmp_path / "run", progress=False).agent().act(np.zeros(4))
        assert jax.config.jax_default_matmul_precision == "bfloat16"
    finally:
        jax.config.update("jax_default_matmul_precision", None)


def test_a_program_keeps_its_event_loop_its_logs_and_its_scheduling(run, tmp_path):
    loop, logger, policy = asyncio.new_event_loop(), logging.getLogger("asyncio"), os.sched_getscheduler(0)
    os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
    asyncio.set_event_loop(loop)
    try:
        cleanba.train(small(total_timesteps=128), tmp_path / "run", progress=False).agent()
        assert asyncio.get_event_loop() is loop and logger.isEnabledFor(logging.ERROR)
        assert os.sched_getscheduler(0) == os.SCHED_OTHER
        record = lambda words: logger.makeRecord("asyncio", logging.ERROR, "", 0, words, (), None)
        assert logger.filter(record("Task exception was never retrieved"))
        assert not logger.filter(record("Event loop is closed"))
    finally:
        asyncio.set_event_loop(None)
        loop.close()
        os.sched_setscheduler(0, policy, os.sched_param(0))


def test_a_program_can_configure_its_own_log_later(monkeypatch):
    monkeypatch.setattr(logging.root, "handlers", [])
    with root_logger_left_alone():
        absl.logging.vlog(1, "as Orbax does")
        assert logging.root.handlers
    assert logging.root.handlers == []
    logging.basicConfig(format="the program's: %(message)s")
    with root_logger_left_alone():
        absl.logging.vlog(1, "as Orbax does")
    assert len(logging.root.handlers) == 1


def test_a_process_that_was_forked_after_jax_began_is_refused(run):
    agent = run.agent()
    for use in (lambda: small().resolve(), lambda: agent.act(np.zeros(4))):
        child = os.fork()
        if not child:
            try:
                use()
            except UsageError as error:
                os._exit(3 if "multiprocessing.get_context('spawn')" in str(error) else 4)
            except BaseException:
                os._exit(5)
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3


def test_a_program_that_ends_during_a_compilation_waits_for_it(tmp_path):
    """Otherwise C++ code would find that Python has ended, and abort."""
    program = f"""
    import os, signal, sys, time
    import cleanba
    from cleanba.runtime.learner import Learner

    def compile(*given):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(8)
        print("compiled", flush=True)

    Learner.compile = compile
    cleanba.train(cleanba.ppo("Catch-v0", **{SMALL}), sys.argv[1], progress=False)
    """
    ended = finish(python("-c", textwrap.dedent(program), tmp_path / "run"))
    assert ended.code == -signal.SIGINT and "KeyboardInterrupt: the run ended early" in ended.err, ended
    assert "compiled" in ended.out


def test_training_is_not_affected_by_promotions_that_a_program_forbids(run, tmp_path):
    names = {"jax_numpy_rank_promotion": "raise", "jax_numpy_dtype_promotion": "strict"}
    before = {name: jax.config.values[name] for name in names}
    try:
        for name, value in names.items():
            jax.config.update(name, value)
        again = cleanba.train(small(), tmp_path / "run", progress=False)
        again.agent().act(np.zeros((3, 4)))
        assert {name: jax.config.values[name] for name in names} == names
        assert again.result["params_digest"] == run.result["params_digest"]
    finally:
        for name, value in before.items():
            jax.config.update(name, value)


def test_a_process_trains_one_run_at_a_time(tmp_path):
    with launch.TRAINING, pytest.raises(UsageError, match="another thread of this process is training"):
        cleanba.train(small(), tmp_path / "run", progress=False)
    assert not (tmp_path / "run").exists() and not launch.TRAINING.locked()


# ------------------------------------------------------------------------------------------------- how a run is ended

LONG = dict(total_timesteps=128 * 4000, env_epoch=20)


@pytest.mark.parametrize("signum, raised", [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, cleanba.Interrupted)])
def test_a_signal_ends_a_run_and_the_same_call_goes_on(signum, raised, tmp_path, monkeypatch):
    spec, handlers = small(**LONG), [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)]
    with monkeypatch.context() as patch, pytest.raises(raised) as caught:
        signalled(patch, signum, at=30)
        cleanba.train(spec, tmp_path / "run", progress=False, log_frequency=10)
    words = " ".join([str(caught.value), *getattr(caught.value, "__notes__", [])])
    assert f"the same call, or `cleanba resume {tmp_path / 'run'}` goes on after update" in words
    assert [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)] == handlers
    run = cleanba.Run(tmp_path / "run")
    assert run.result["status"] == "interrupted" and run.result["update"] == 30
    with pytest.raises(cleanba.UsageError, match="holds another experiment"):  # and no other process is in it
        cleanba.train(small(seed=5, **LONG), tmp_path / "run", progress=False)
    # The process is usable: a shorter run in it is what it always is.
    again = cleanba.train(small(total_timesteps=256), tmp_path / "again", progress=False)
    assert again.result["status"] == "finished"


def test_an_interrupted_run_goes_on_to_the_same_bits(tmp_path, monkeypatch):
    spec = small(total_timesteps=128 * 100, env_epoch=20)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        signalled(patch, signal.SIGINT, at=30)
        cleanba.train(spec, tmp_path / "run", progress=False, log_frequency=1)
    before = read_rows(tmp_path / "run")
    gone_on = cleanba.train(spec, tmp_path / "run", progress=False, log_frequency=1)
    whole = cleanba.train(spec, tmp_path / "whole", progress=False)
    assert gone_on.result["status"] == "finished"
    assert gone_on.result["params_digest"] == whole.result["params_digest"]
    after = read_rows(tmp_path / "run")
    assert [row["update"] for row in after] == [*range(1, 101)] and len(before) >= 30
    for row in before:  # the digests of the last update may have had a row of their own
        timeless = {name: value for name, value in row.items() if name != "seconds"}
        assert {**after[row["update"] - 1], **timeless} == after[row["update"] - 1], "it began anew"


def test_a_run_needs_no_main_thread(run, tmp_path):
    made = []
    thread = threading.Thread(target=lambda: made.append(cleanba.train(run.spec, tmp_path / "run", progress=False)))
    thread.start()
    thread.join()
    assert made[0].result["params_digest"] == run.result["params_digest"]


def test_a_failure_is_raised_with_its_cause_and_lets_go_of_the_directory(run, tmp_path, monkeypatch):
    def broken(*_, **__):
        raise RuntimeError("planted")

    monkeypatch.setattr("cleanba.runtime.actor.action_numbers", broken)
    with pytest.raises(RuntimeError, match="planted") as caught:
        cleanba.train(run.spec, tmp_path / "run", progress=False)
    assert (
        any("broken" in frame.name for frame in caught.traceback)
        and "starts again from the beginning" in caught.value.__notes__[0]
    )
    monkeypatch.undo()
    assert cleanba.train(run.spec, tmp_path / "run", progress=False).result["status"] == "finished"


# --------------------------------------------------------------------------------------- environments of the program's


class Line(gymnasium.Env):
    """Walk to the end of a line."""

    observation_space = gymnasium.spaces.Box(0, 1, (1,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.at = int(self.np_random.integers(3))
        return np.array([self.at / 5], np.float32), {}

    def step(self, action):
        self.at = max(0, self.at + (1 if action else -1))
        return np.array([min(self.at, 5) / 5], np.float32), -1.0, self.at >= 5, False, {}


def test_an_environment_that_can_never_be_closed_is_made_tried_and_trained_on(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("cleanba.errors.SAID", set())

    class Open(Line):
        def reset(self, *, seed=None, options=None):
            obs, info = super().reset(seed=seed)
            return obs + np.float32(random.random() / 10), info  # it does not follow its seed

        def close(self):
            raise OSError("and cannot be closed")

    few = dict(num_envs=4, num_steps=8, num_actors=1, num_shards=1, hiddens=[8], num_minibatches=1, update_epochs=1)
    run = cleanba.train(cleanba.ppo(Open, **few, total_timesteps=320), tmp_path / "a", progress=False)
    told = capsys.readouterr().err
    assert run.result["status"] == "finished"
    assert "could not be closed" in told and "does not follow its seed" in told


def test_an_environment_that_cannot_be_closed_ends_no_run(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("cleanba.errors.SAID", set())

    class Broken(Line):
        steps = 0

        def step(self, action):
            Broken.steps += 1
            if Broken.steps > 1000:
                raise ValueError("the simulator crashed")
            return super().step(action)

        def close(self):
            if Broken.steps > 100:  # not when it is tried out
                raise OSError("and cannot be closed")

    few = dict(num_envs=4, num_steps=8, num_actors=1, num_shards=1, hiddens=[8], num_minibatches=1, update_epochs=1)
    run = cleanba.train(cleanba.ppo(Broken, **few, total_timesteps=320), tmp_path / "a", progress=False)
    assert run.result["status"] == "finished" and "could not be closed" in capsys.readouterr().err
    Broken.steps = 0
    with pytest.raises(ValueError, match="the simulator crashed"):
        cleanba.train(cleanba.ppo(Broken, **few, total_timesteps=32000), tmp_path / "b", progress=False)
    assert "the simulator crashed" in read_result(tmp_path / "b")["error"]


def test_a_class_of_a_module_is_stepped_by_processes_too(tmp_path):
    spec = small(Line, total_timesteps=256)
    assert spec.flags["env_id"] == "test_api:Line" and spec.maker is Line
    digests = {
        cleanba.train(spec, tmp_path / str(workers), progress=False, env_workers=workers).result["params_digest"]
        for workers in (0, 2)
    }
    assert len(digests) == 1
    agent = cleanba.load(tmp_path / "0")
    assert agent.act(np.array([0.2], np.float32)) in (0, 1)
    assert "is finished; nothing to do" in command("resume", tmp_path / "0").out


def as_a_cell(source: str, **values) -> dict:
    """What a notebook's cell of this source defines."""
    values |= {"__name__": "__main__", "Line": Line, "gymnasium": gymnasium}
    exec(textwrap.dedent(source), values)
    return values


def test_functions_and_local_classes_have_the_names_of_their_code():
    id_of = lambda maker: cleanba.ppo(maker).flags["env_id"]

    def limited(steps):
        def once():
            return gymnasium.wrappers.TimeLimit(Line(), steps)

        return once

    def paid(reward):
        class Paid(Line):
            def step(self, action):
                obs, _, *rest = super().step(action)
                return obs, reward, *rest

        return Paid

    makers = [limited(5), limited(7), lambda: Line(), lambda: paid(1)(), paid(1), paid(2)]
    makers += [functools.partial(limited, steps=n) for n in (5, 7, [1, 2], [12], "x" * 200)]
    makers += [functools.partial(paid(n), 1) for n in (1, 2)]
    reads = "def make(): return gymnasium.wrappers.TimeLimit(Line(), size)"
    calls = "def size(): return {}\ndef make(): return gymnasium.wrappers.TimeLimit(Line(), size())"
    makers += [as_a_cell(reads, size=n)["make"] for n in (5, 7)] + [as_a_cell(calls.format(n))["make"] for n in (5, 7)]
    inner = "def make(): return (lambda: gymnasium.wrappers.TimeLimit(Line(), sizes[0]))()"
    makers += [as_a_cell(inner, sizes=[n])["make"] for n in (5, 7)]
    names = [id_of(maker) for maker in makers]
    assert len(set(names)) == len(names) and all(len(name) < 130 for name in names), names
    assert all(re.fullmatch(r"gymnasium:local/.*-[0-9a-f]{8}-v0", name) for name in names)
    alike = [limited(5), lambda: Line(), paid(2), as_a_cell(reads, size=7)["make"]]
    assert [id_of(maker) for maker in alike] == [names[i] for i in (0, 2, 5, 14)]
    ordinary = """
    class Counted(Line):
        made, rng = 0, np.random.default_rng(0)
        def __init__(self):
            super().__init__()
            Counted.made += 1
            self.at = self.rng.integers(3)
    made, kept = 0, []
    kept.append(kept)
    def maker():
        count, grid = 0, [Shaping(n) for n in range(30)]
        for one in grid:
            one.near = grid
        def make(rng=np.random.default_rng(0)):
            global made
            nonlocal count
            made, count = made + 1, count + 1
            return Counted() if kept and grid else None
        return make
    """
    cell = as_a_cell(ordinary, np=np, Shaping=Shaping)
    make = cell["maker"]()
    before = id_of(make)
    make()
    assert id_of(make) == before == id_of(cell["maker"]()), "what it changes itself is not its code"
    cell["at"] = cell["integers"] = 3  # also names of attributes
    assert id_of(make) == before
    again = as_a_cell("\n\n" + ordinary, np=np, Shaping=Shaping)
    assert id_of(again["maker"]()) == before
    # Since Python 3.13 the body of a class sets the number of its line.
    body = lambda line: compile("__firstlineno__ = 70000; size = 3", "", "exec").replace(co_firstlineno=line)
    assert code_text(body(70000)) == code_text(body(70000).replace(co_consts=(80000, 3, None), co_firstlineno=80000))
    assert code_text(body(70000)) != code_text(body(70000).replace(co_consts=(70000, 4, None)))


def test_an_agent_plays_its_own_function_whatever_is_defined_later(tmp_path):
    def paid(reward):
        return lambda: gymnasium.wrappers.TransformReward(gymnasium.wrappers.TimeLimit(Line(), 3), lambda r: reward)

    agent = cleanba.train(small(paid(1.0), total_timesteps=128), tmp_path / "a", progress=False).agent()
    before = cleanba.evaluate(agent, 2, seed=3)
    with pytest.raises(
        UsageError, match="holds another experiment .the function that makes its environments has other"
    ):
        cleanba.train(small(paid(9.0), total_timesteps=128), tmp_path / "a", progress=False)
    assert cleanba.evaluate(agent, 2, seed=3).returns.tolist() == before.returns.tolist()


def test_what_cannot_be_described_has_a_fingerprint_too():
    class Silent:
        def __repr__(self):
            raise RuntimeError

    nodes = [Shaping(n) for n in range(30)]
    for node in nodes:
        node.near = nodes
    for x in (Silent(), nodes, len, functools.lru_cache(len), type(nodes), jax.random.key(0), np.random.default_rng(0)):
        assert argument_text(x) == argument_text(x) and code_text(x) == code_text(x)
        assert len(argument_text(x)) < 10_000 and "at 0x7" not in argument_text(x).lower()


def test_a_finished_run_of_a_class_that_was_changed_says_so(tmp_path, capsys):
    cell = """
    class Cell(Line):
        bonus = {bonus}
        def step(self, action):
            obs, reward, *rest = super().step(action)
            return obs, reward + self.bonus, *rest
    """
    runs = lambda bonus: cleanba.train(
        small(as_a_cell(cell.format(bonus=bonus))["Cell"], total_timesteps=128), tmp_path / "run", progress=False
    )
    assert runs(1).config["experiment"]["env_id"] == "gymnasium:local/Cell-v0"
    assert "was changed" not in capsys.readouterr().err
    runs(1)
    assert "was changed" not in capsys.readouterr().err
    assert runs(2).result["status"] == "finished"
    assert f"{tmp_path / 'run'} was trained before the code of local/Cell-v0 was changed; to train with the new" in (
        capsys.readouterr().err
    )


class Shaping:
    def __init__(self, scale):
        self.scale = scale


def test_functions_with_other_arguments_make_other_environments():
    name = lambda *arguments: register(functools.partial(Line, *arguments))
    adds = lambda n: lambda x: x + n
    others = [1, "1", (1, 2), "1-2", None, "None", Shaping(1), Shaping(2), lambda x: x, lambda x: -x, lambda x: x + 2]
    others += [lambda x, n=n: x + n for n in (3, 4)] + [adds(3), adds(4)]
    middle = np.arange(2000.0)
    middle[1000] = 0
    others += [np.arange(2000.0), middle, *(functools.partial(adds(n)) for n in (5, 6)), adds(adds(3)), adds(adds(4))]
    others += [Shaping(n).__init__ for n in (3, 4)] + [Shaping(Shaping(n)) for n in (5, 6)]
    others += [jax.numpy.asarray(x) for x in (np.arange(2000.0), middle)]
    assert name("a", 1) != register(functools.partial(Line, a=1))
    names = [name(x) for x in others] + [name(1, 2)]
    assert len(set(names)) == len(names)
    again = [lambda x: x, Shaping(1), adds(3)]  # a notebook's cell that runs again
    assert [name(x) for x in again] == [names[8], names[6], names[13]]
    loop = []
    loop.append(loop)
    assert name(loop) != name([])


def test_the_name_of_a_function_that_makes_environments_is_the_same_at_each_start(tmp_path):
    script = tmp_path / "makers.py"
    lines = ["import functools, numpy as np", "from cleanba.environments.gymnasium import register"]
    lines += ["def make(*given): pass", 'says = lambda x: x in {"left", "right", "up", "down"} and (lambda y: y)']
    lines += ['print(register(functools.partial(make, says, {"a", "b", "c"}, np.arange(9.0))))']
    names = []
    for seed, above in ((1, ""), (2, "\n\n")):
        script.write_text(above + "\n".join(lines))
        names.append(finish(python(script, PYTHONHASHSEED=str(seed))).out)
    assert names[0] == names[1] and names[0]


OWN_LOSS = "total = policy_loss - e.ent_coef * entropy + e.vf_coef * value_loss\n"
OWN = (  # the changes for a custom loss: what is replaced, and by what
    (OWN_LOSS, OWN_LOSS.strip() + " + e.square_coef * policy_loss**2\n"),
    ("class PPO(PolicyGradient):\n", 'class PPO(PolicyGradient):\n    square_coef: float = 0.1\n    """weight"""\n'),
)


@pytest.fixture
def own_loss(tmp_path, monkeypatch) -> Iterator[Path]:
    """my_ppo.py, as the page on it says, in the current directory."""
    page = (ROOT / "docs" / "guides" / "own-loss.md").read_text()
    end, network = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    (tmp_path / "my_network.py").write_text(network)
    text = (ROOT / "cleanba" / "algorithms" / "ppo.py").read_text()
    for before, after in OWN:
        assert text.count(before) == 1, before
        text = text.replace(before, after)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path[:])
    module = tmp_path / "my_ppo.py"
    module.write_text(f"{text}\n\n{end}")
    yield module
    for name in ("my_ppo", "my_network"):
        sys.modules.pop(name, None)


def test_a_custom_loss_trains_in_sweeps_and_in_python(own_loss):
    flags = {"num_envs": 8, "num_steps": 8, "num_actors": 2, "num_shards": 1, "hiddens": [8], "num_minibatches": 2}
    flags |= {"update_epochs": 1, "total_timesteps": 320, "collector": "stepped"}
    words = words_of(flags)
    assert command("ppo", "--env-id", "Catch-v0", *words, "--run-dir", "ppo").code == 0
    sets = ("--set", "square_coef=0.2,0.3", "--num-seeds", "1", "--dir", "s")
    ended = command("sweep", "--env-ids", "Catch-v0", *sets, "--", "my_ppo:RECIPE", *words)
    assert ended.code == 0 and "2 of 2 runs finished" in ended.out, ended
    first, mine = (Path(f"s/Catch-v0__square_coef={x}__s1") for x in (0.2, 0.3))
    spec = cleanba.specify("my_ppo:RECIPE", "Catch-v0", **flags, square_coef=0.3)
    trained = cleanba.train(spec, "python", progress=False)
    digests = [read_result(run)["params_digest"] for run in (first, mine, Path("ppo"))]
    assert digests[1] == trained.result["params_digest"] and len(set(digests)) == 3
    assert trained.config["sources"] == {"my_ppo": f"sha256:{sha256(own_loss.read_bytes()).hexdigest()}"}
    assert len(cleanba.evaluate(cleanba.load(mine), episodes=1).returns) == 1
    assert command("verify", mine).code == 0
    ended = command("pack", mine, "--out", "mine.tar.gz")
    assert "cleanba eval mine.tar.gz --trust-remote-code, " in ended.out and "need the modules" in ended.out
    assert command("eval", "mine.tar.gz", "--episodes", "1", "--trust-remote-code").code == 0
    ended = command("diff", mine, "ppo")
    assert ended.code == 1 and "algorithm: my_ppo:RECIPE and ppo" in ended.out, ended.out


def test_a_run_of_a_custom_loss_is_made_longer_only_if_it_says_that_it_can_be(own_loss):
    words = ["my_ppo:RECIPE", "--env-id", "Catch-v0", *words_of({**SMALL, "anneal_lr": False}), "--run-dir", "run"]
    assert command(*words, "--total-timesteps", "256").code == 0
    ended = command(*words, "--total-timesteps", "384")
    assert ended.code == 2 and "my_ppo:RECIPE does not say which settings depend on a run's length" in ended.err, ended
    flag = '    square_coef: float = 0.1\n    """weight"""\n'
    says = "    schedules = ()\n"
    own_loss.write_text(own_loss.read_text().replace(flag, flag + says))
    sys.modules.pop("my_ppo")
    assert command(*words, "--total-timesteps", "384").code == 0 and read_result(Path("run"))["update"] == 3


def test_a_custom_network_is_a_class_of_its_own(own_loss):
    words = words_of({**SMALL, "total_timesteps": 1280})
    for recipe in ("my_network:RECIPE", "ppo"):
        run = Path(recipe.partition(":")[0])
        assert command(recipe, "--env-id", "CartPole-v1", *words, "--run-dir", run).code == 0
    agent = cleanba.load("my_network")
    params = {name: x["Dense_0"]["kernel"].shape for name, x in agent.params.params["params"].items()}
    assert params == {"Dense_0": (4, 64), "Dense_1": (64, 64), "Dense_2": (64, 2), "Dense_3": (64, 1)}
    assert agent.inspect(np.zeros(4))["probability"].shape == (2,)
    config = cleanba.Run("my_network").config
    assert list(config["sources"]) == ["my_network"] and config["experiment"]["algorithm"] == "my_network:RECIPE"
    assert command("verify", "my_network").code == 0
    ended = command("diff", "my_network", "ppo")
    assert "largest difference" in ended.out or "different shapes" in ended.out


def test_a_custom_network_also_takes_real_valued_actions(own_loss):
    real = ActionSpec("quantities", (2,), "float32", (), (-1.0, -1.0), (1.0, 1.0))
    spec = EnvSpec("", ObsSpec("vector", (3,), "float32"), real, is_atari=False, clip_reward=False, options={})
    algorithm = find_recipe("my_network:RECIPE").make(PPO(), spec, "cpu")
    state, _ = algorithm.shapes()
    assert state.params["params"]["log_std"].shape == (2,)


def test_a_custom_network_that_does_not_fit_the_observations_is_refused_with_its_line(own_loss, monkeypatch):
    parts = {"x": ObsSpec("vector", (3,), "float32"), "y": ObsSpec("discrete", (), "int32", 4)}
    spec = EnvSpec("", parts, choice(2), is_atari=False, clip_reward=False, options={})
    with pytest.raises(UsageError) as caught:
        find_recipe("my_network:RECIPE").make(PPO(), spec, "cpu")
    said, shown = str(caught.value), "{x: vector 3 float32, y: one of 4}"
    assert said.startswith(f"my_network:RECIPE: the network failed on this environment's observations ({shown}): ")
    lines = Path("my_network.py").read_text().splitlines()
    (line,) = (number for number, text in enumerate(lines, 1) if "Dense(64, 1.4)(obs)" in text)
    assert said.endswith(f", at {Path('my_network.py').resolve()}:{line}"), said
    # An error of Cleanba's own network remains a traceback.
    monkeypatch.setattr("cleanba.networks.actor_critic.apply_heads", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        find_recipe("ppo").make(PPO(), spec, "cpu").shapes()


def test_names_that_are_no_algorithm_are_refused(own_loss):
    for name, why in (
        ("my_ppo:PPO", "my_ppo:PPO is not a recipe but type"),
        ("my_ppo:RECIPEE", "cannot be imported"),
        ("mine:RECIPE", "cannot be imported (No module named 'mine'); run the command in the module's"),
        ("my_ppo:", "must have the form module:RECIPE"),
        ("os.path/x:RECIPE", "must have the form module:RECIPE"),
    ):
        ended = command(name, "--env-id", "Catch-v0")
        assert ended.code == 2 and why in ended.err, ended
        with pytest.raises(UsageError, match=re.escape(why)):
            cleanba.specify(name, "Catch-v0")


def test_a_custom_algorithm_of_a_run_from_elsewhere_is_not_imported(own_loss):
    run = Path("runs/a")
    assert command("my_ppo:RECIPE", *TINY, "--run-dir", run).code == 0
    mark_downloaded(run, "hf://somebody/run")
    own_loss.write_text("raise SystemExit('it was imported')")
    sys.modules.pop("my_ppo")
    ended = command("eval", run, "--episodes", "1")
    assert ended.code == 2 and "names the algorithm 'my_ppo:RECIPE': loading it would import" in ended.err, ended
    spec = cleanba.Run(run).spec
    for use in (spec.resolve, lambda: cleanba.train(spec, "runs/b", progress=False)):
        with pytest.raises(UsageError, match="names the algorithm 'my_ppo:RECIPE': loading it would import"):
            use()
    ended = command("eval", run, "--episodes", "1", "--trust-remote-code")
    assert ended.code == 2 and "it was imported" in ended.err, ended


SCRIPT = f"""
import multiprocessing, sys
from concurrent.futures import ProcessPoolExecutor
import gymnasium, numpy as np
import cleanba

{inspect.getsource(Line)}

class Main(Line):
    pass

def train(spec, run_dir):
    return cleanba.train(spec, run_dir, progress=False).result["status"]

if __name__ == "__main__":
    gymnasium.register("Registered-v0", entry_point="test_api:Line")
    small = dict(num_envs=4, num_steps=8, num_actors=1, num_shards=1, hiddens=[8], num_minibatches=1,
                 update_epochs=1, total_timesteps=64)
    for env, name in ((Main, "main"), ("gymnasium:Registered-v0", "registered"), ("gymnasium:CartPole-v1", "known")):
        run = cleanba.train(cleanba.ppo(env, **small), sys.argv[1] + "/" + name, env_workers=None)
        assert run.result["status"] == "finished"
    try:
        cleanba.train(cleanba.ppo(Main, **small), sys.argv[1] + "/workers", env_workers=2)
    except cleanba.UsageError as error:
        print("refused:", error)
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        print("spawned:", pool.submit(train, cleanba.ppo(Main, **small), sys.argv[1] + "/spawned").result())
"""


@pytest.mark.slow
def test_a_script_may_define_its_environment_and_use_workers(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    ended = finish(python(tmp_path / "script.py", tmp_path))
    assert ended.code == 0, ended.err
    warnings = [line for line in ended.out.splitlines() if line.startswith("warning: ")]
    assert len(warnings) == 1 and "local/Main-v0 is defined in the running program" in warnings[0]
    assert "refused: env_workers=2: gymnasium:local/Main-v0 is defined in the running program" in ended.out
    assert (
        json.loads((tmp_path / "main" / "config.json").read_text())["experiment"]["env_id"] == "gymnasium:local/Main-v0"
    )
    assert "spawned: finished" in ended.out
    for word in ("resume", "eval"):
        ended = command(word, tmp_path / "main")
        assert ended.code == 2 and ended.err.count("\n") == 1, ended
        assert "local/Main-v0' was defined by the program that trained on it, and is not known here" in ended.err
