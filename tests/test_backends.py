"""One protocol, three kinds of environments: what holds for each, what workers survive, and one's own environments."""

import errno
import itertools
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import threading
import time
from functools import partial
from hashlib import sha256
from pathlib import Path

import faulty
import gymnasium as farama
import jax
import numpy as np
import pytest
from gymnasium.spaces import Box, Dict, Discrete, MultiDiscrete
from launch import ROOT, TINY, command, digests, finish, python, read_result, read_rows
from odd import Odd

from cleanba.algorithms import ppo
from cleanba.config import Experiment
from cleanba.environments import gymnasium, jax_envs
from cleanba.environments.backends import Envs, end_waits, env_spec, open_envs, repeatable, sources, warnings
from cleanba.environments.common import parse_options
from cleanba.environments.spaces import action_spec, obs_spec
from cleanba.environments.worker import misfit, number_in, rate_in
from cleanba.errors import Failure, UsageError
from cleanba.launch import Ended, exit_of
from cleanba.recipes import RECIPES
from cleanba.resolution import preset_name, resolve
from cleanba.rollout import PyTree
from cleanba.runtime.channels import Closed, Stop
from cleanba.runtime.checkpoint import updates_kept
from cleanba.runtime.collect import ScanCache, ScannedCollector, SteppedCollector, Times, make_steppers
from cleanba.seeds import action_numbers, env_seed
from cleanba.specs import ActionSpec, ObsSpec, choice
from cleanba.waited import compiling, is_compiling

EXAMPLES = ROOT / "docs" / "examples"
sys.path.append(str(EXAMPLES))  # processes that tests start inherit it, as workers do
IN_PYTHON, IN_JAX = "corridor_gymnasium:Corridor-v0", "jax:corridor_jax:Corridor"
ANY = ["CartPole-v1", IN_PYTHON, IN_JAX]
CORRIDORS = [(IN_PYTHON, 0), (IN_PYTHON, 2), (IN_JAX, None)]
LEFT, RIGHT = 0, 1


def opened(env_id: str, seeds: list[int], workers: int | None = None, **fields) -> Envs:
    return open_envs(env_spec(Experiment(env_id=env_id, **fields)), seeds, 1, workers)


# --------------------------------------------------------------------------------- what holds for all of them


@pytest.mark.parametrize("env_id", [*ANY, "faulty:Faulty-v0"])
def test_environments_deliver_what_their_specification_says(env_id):
    spec = env_spec(Experiment(env_id=env_id))
    envs = open_envs(spec, [3, 4, 5], 2)
    assert envs.num_envs == 3 and envs.steps_per_second > 0
    looks = lambda obs: jax.tree.map(lambda s, x: (s.shape, s.dtype) == (x.shape[1:], str(x.dtype)), spec.obs, obs)
    assert all(jax.tree.leaves(looks(envs.reset())))
    steps = [envs.step(np.array([0, 1, 1], np.int32)) for _ in range(12)]
    kept = [jax.tree.map(np.copy, step) for step in steps]
    for step in steps:
        assert all(jax.tree.leaves(looks(step.obs)))
        assert {str(x.dtype) for x in (step.reward, step.raw_reward)} == {"float32"}
        assert {str(x.dtype) for x in (step.terminated, step.truncated, step.over)} == {"bool"}
    envs.step(np.zeros(3, np.int32))
    assert jax.tree.all(jax.tree.map(np.array_equal, kept, steps))  # what was delivered is the caller's
    envs.close()
    envs.close()


@pytest.mark.parametrize("env_id, workers", CORRIDORS)
def test_the_time_index_is_that_of_rollouts(env_id, workers):
    """Computed by hand: 8 cells, the observation 7 / 8 at the right end, at most 20 steps."""
    envs = opened(env_id, [1, 2], workers)
    at = np.round(envs.reset()[:, 0] * 8).astype(int)
    walks = np.array([RIGHT, LEFT], np.int32)  # the first arrives again and again, the second never does
    resets, step_of = [], np.zeros(2, int)
    done = np.zeros(2, bool)
    for _ in range(50):
        step = envs.step(walks)
        now = np.round(step.obs[:, 0] * 8).astype(int)
        for i in range(2):
            if done[i]:  # the action was ignored, and a fresh episode is shown
                assert 0 <= now[i] < 4 and step.reward[i] == 0 and not step.terminated[i] | step.truncated[i]
                at[i], step_of[i], done[i] = now[i], 0, False
                resets.append(i)
                continue
            at[i] = at[i] + 1 if walks[i] == RIGHT else max(0, at[i] - 1)
            step_of[i] += 1
            assert now[i] == at[i]  # of an episode's end, too, the true last observation
            assert step.terminated[i] == (at[i] == 7) and step.truncated[i] == (step_of[i] == 20)
            assert step.raw_reward[i] == np.float32((at[i] == 7) - 0.01)
            done[i] = step.over[i]
            assert done[i] == (step.terminated[i] | step.truncated[i])
    envs.close()
    assert set(resets) == {0, 1}


@pytest.mark.parametrize("env_id, workers", CORRIDORS[1:])
def test_reaching_the_goal_at_the_last_permitted_step_is_termination(env_id, workers):
    envs = opened(env_id, [1], workers)
    far = 7 - int(np.round(envs.reset()[0, 0] * 8))
    envs.close()
    envs = opened(env_id, [1], workers, max_episode_steps=far)
    envs.reset()
    for _ in range(far):
        step = envs.step(np.int32([RIGHT]))
    envs.close()
    assert step.terminated[0] and step.truncated[0]


def stream(env_id: str, seeds: list[int], workers: int | None, env: int) -> list[PyTree]:
    """What one environment of a block delivers; each environment takes actions drawn with its own seed."""
    envs = opened(env_id, seeds, workers)
    chosen = [np.random.default_rng(s).integers(2, size=30) for s in seeds]
    mine = [jax.tree.map(lambda x: x[env], envs.reset())]
    for t in range(30):
        mine.append(jax.tree.map(lambda x: x[env], envs.step(np.array([c[t] for c in chosen], np.int32))))
    envs.close()
    return mine


@pytest.mark.parametrize("env_id, splits", [("faulty:Faulty-v0", (0, 1, 3)), (IN_JAX, (None,))])
def test_a_seed_decides_what_an_environment_delivers_wherever_it_is_stepped(env_id, splits):
    alone = stream(env_id, [7], splits[0], 0)
    same = lambda a, b: jax.tree.all(jax.tree.map(np.array_equal, a, b))
    assert all(same(alone, stream(env_id, [5, 6, 7, 8], workers, 2)) for workers in splits)
    assert not same(alone, stream(env_id, [5, 6, 7, 8], splits[0], 3))


def test_environments_in_jax_are_compiled_once_and_both_collectors_record_the_same():
    e = ppo.PPO(env_id=IN_JAX, num_envs=3, num_steps=13, hiddens=(8,))
    spec = env_spec(e)
    algorithm = ppo.make(e, spec, "cpu")
    params, device = algorithm.actor_params(algorithm.init(jax.random.key(0))), jax.local_devices()[3]
    params = jax.device_put(params, device)
    scans, compiled = ScanCache(algorithm, 13), []
    is_key = lambda x: jax.dtypes.issubdtype(getattr(x, "dtype", np.int32), jax.dtypes.prng_key)
    numbers = lambda x: np.asarray(jax.random.key_data(x) if is_key(x) else x)
    listen = lambda event, _, **about: event.endswith("compile_duration") and compiled.append(about.get("fun_name"))
    jax.monitoring.register_event_duration_secs_listener(listen)
    recorded = []
    try:
        for collector in (
            *(ScannedCollector(algorithm, 13, device, Stop(), scans) for _ in range(2)),  # two actors
            SteppedCollector(algorithm, 13, device, Stop(), make_steppers(algorithm, 13, "cpu")),
        ):
            recorded.append([])
            for epoch in range(2):
                with jax.default_device(device):
                    collector.restart(open_envs(spec, [env_seed(1, i, epoch, 3) for i in range(3)], 1))
                for rollout in range(2):
                    got = collector(params, action_numbers(1, 0, 2 * epoch + rollout), Times())
                    assert {d for x in jax.tree.leaves(got.rollout) for d in x.devices()} == {device}
                    recorded[-1].append(jax.tree.map(numbers, got._replace(rollout=got.rollout._replace(extras=()))))
            collector.close()
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    assert sum("scan_envs" in str(name) for name in compiled) == 1, compiled
    assert all(jax.tree.all(jax.tree.map(np.array_equal, recorded[0], other)) for other in recorded[1:])
    assert sum(got.rollout.truncated.sum() + got.rollout.terminated.sum() for got in recorded[0]) > 0


def experiment(env_id: str, **fields) -> ppo.PPO:
    return ppo.PPO(
        env_id=env_id, num_envs=8, num_actors=4, num_shards=2, num_steps=8, hiddens=(8,), num_minibatches=2,
        update_epochs=1, total_timesteps=8 * 8 * 4, env_epoch=2, **fields,
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("env_id, collector", [(IN_PYTHON, "stepped"), (IN_JAX, "scanned")])
def test_placements_train_the_same_bits(env_id, collector):
    e = experiment(env_id, collector=collector)
    assert digests(e, (0,), (0,)) == digests(e, (1, 2), (3, 4))


@pytest.mark.slow
@pytest.mark.parametrize("env_id", [IN_PYTHON, IN_JAX])
def test_a_killed_run_goes_on_to_the_same_bits(env_id, tmp_path):
    flags = ("--env-id", env_id, "--num-envs", 4, "--num-steps", 8, "--hiddens", 8, "--num-minibatches", 2)
    flags += (
        "--total-timesteps",
        256,
        "--env-epoch",
        5,
        "--checkpoint-frequency",
        3,
        "--num-actors",
        2,
        "--num-shards",
        1,
    )
    # It dies while the checkpoint of update 6 is written; that of update 3 is complete by then.
    killed = python(ROOT / "tests/killed.py", "save", 2, "ppo", *flags, "--run-dir", tmp_path / "a", PYTHONPATH=PATH)
    assert finish(killed).code == -signal.SIGKILL
    other = ("--env-workers", 0) if env_id == IN_PYTHON else ()
    for run in ("a", "b"):
        ended = command("ppo", *flags, *other, "--run-dir", tmp_path / run)
        assert ended.code == 0, ended.err
        assert ("resuming after update" in ended.out) == (run == "a")
    a, b = (read_result(tmp_path / run) for run in ("a", "b"))
    assert a["params_digest"] == b["params_digest"] and a["global_step"] == b["global_step"]


PATH = os.pathsep.join(map(str, (ROOT, ROOT / "tests", EXAMPLES)))

# ------------------------------------------------------------------------------------------ Gymnasium's workers


@pytest.mark.parametrize("workers", [0, 2])
def test_an_error_in_an_environment_comes_with_its_traceback(workers, capsys):
    envs = opened("faulty:Faulty-v0", [1, 2], workers, env_options=("fault=raise",))
    envs.reset()
    with pytest.raises((RuntimeError, ValueError), match="planted") as caught:
        for _ in range(5):
            envs.step(np.zeros(2, np.int32))
    envs.close()
    if workers:
        assert "environments 0 to 0 of faulty:Faulty-v0" in str(caught.value)
        assert 'raise ValueError("planted")' in str(caught.value.__cause__)
    # The command shows the environment's own frames, once, and the last line has the place.
    assert exit_of(Ended(Path(), caught.value)).code == 1
    *trace, last = capsys.readouterr().err.splitlines()
    assert [line.split(", ")[0] for line in trace if line.startswith("  File")] == [f'  File "{faulty.__file__}"']
    assert re.search(rf"ValueError: planted, at {faulty.__file__}:\d+$", last)


def test_a_worker_that_dies_or_hangs_is_reported_and_ended():
    for fault, words in (("die", "died with exit code 7"), ("hang", "has not answered for 2.0 s")):
        spec = env_spec(Experiment(env_id="faulty:Faulty-v0", env_options=(f"fault={fault}",)))
        envs = gymnasium.Envs(spec, [1, 2, 3], workers=1, patience=2.0 if fault == "hang" else None)
        envs.reset()
        process = envs._parts[0]._process
        with pytest.raises(Failure, match=f"environments 0 to 2 of faulty:Faulty-v0 {words}"):
            for _ in range(5):
                envs.step(np.zeros(3, np.int32))
        envs.close()
        assert process.poll() is not None


@pytest.mark.parametrize("signum, words", [(40, "died by signal 40;"), (0, "did not end;")])  # a real-time signal; none
def test_a_worker_that_closed_its_connection_is_reported_whatever_it_does_then(signum, words, monkeypatch):
    monkeypatch.setattr(gymnasium, "GRACE_SECONDS", 0.2 if signum == 0 else 60.0)
    worker = object.__new__(gymnasium.Worker)
    worker._who, worker._patience, worker._slow = "environments 0 to 2", None, False
    worker._connection, theirs = multiprocessing.Pipe()
    worker._process = subprocess.Popen(["sleep", "60"], stdin=subprocess.PIPE)
    theirs.close()
    worker._process.send_signal(signum)
    with pytest.raises(Failure, match=words):
        worker.answer(lambda: None)
    worker.end(time.monotonic() + 10)
    assert worker._process.returncode == -(signum or signal.SIGKILL)


def test_the_wait_for_a_worker_that_hangs_ends_with_the_run():
    stop, envs = Stop(), opened("faulty:Faulty-v0", [1, 2], workers=1, env_options=("fault=hang",))
    end_waits(envs, stop.check)
    envs.reset()
    timer = threading.Timer(0.5, stop)
    timer.start()
    with pytest.raises(Closed):
        for _ in range(5):
            envs.step(np.zeros(2, np.int32))
    process = envs._parts[0]._process
    envs.close()
    assert process.poll() is not None


def test_a_process_that_its_environment_started_does_not_hide_the_death_of_a_worker():
    envs = gymnasium.Envs(env_spec(Experiment(env_id="odd:Parent-v0")), [1], workers=1, patience=5.0)
    envs.reset()
    with pytest.raises(Failure, match="died with exit code 7"):
        for _ in range(4):
            envs.step(np.int32([0]))
    envs.close()


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP])
def test_workers_ignore_signals_to_the_whole_process_group(signum):
    envs = opened("faulty:Faulty-v0", [1, 2], workers=1)
    os.kill(envs._parts[0]._process.pid, signum)  # while it starts
    envs.reset()
    os.kill(envs._parts[0]._process.pid, signum)
    time.sleep(0.1)
    assert envs.step(np.zeros(2, np.int32)).reward.tolist() == [1, 1]
    envs.close()


def test_workers_ignore_closing_terminals_as_nohup_does():
    """Then so do programs that an environment starts; a handler would not reach these."""
    earlier = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        envs = opened("faulty:Faulty-v0", [1, 2], workers=1)
        envs.reset()
        (ignored,) = re.findall("SigIgn:\t(.*)", Path(f"/proc/{envs._parts[0]._process.pid}/status").read_text())
        envs.close()
    finally:
        signal.signal(signal.SIGHUP, earlier)
    assert int(ignored, 16) & 1 << signal.SIGHUP - 1


def test_each_environment_is_closed_even_if_another_one_cannot_be(monkeypatch):
    closed = []

    def close(self):
        closed.append(self)
        raise OSError("cannot be closed")

    monkeypatch.setattr(sys.modules["odd"].Odd, "close", close, raising=False)
    envs = opened("odd:Odd", [1, 2, 3], workers=0)
    envs.reset()
    closed.clear()  # of those that were tried out
    with pytest.raises(OSError, match="cannot be closed"):
        envs.close()
    assert len(closed) == 3


def test_sets_of_strings_have_one_order_in_all_workers(monkeypatch):
    def orders() -> np.ndarray:
        envs = opened("odd:Unordered-v0", [1, 1], workers=2)
        seen = envs.reset()
        envs.close()
        return seen

    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    first, second = orders()
    assert first.tolist() == second.tolist()
    monkeypatch.setenv("PYTHONHASHSEED", "5")  # the user's own value counts
    monkeypatch.setattr(sys, "path", [*sys.path, Path("a_folder")])  # which Python ignores
    assert orders()[0].tolist() != first.tolist()


def test_an_environments_error_is_not_mistaken_for_a_lost_connection():
    envs = opened("odd:Offline-v0", [1], workers=1)
    envs.reset()
    with pytest.raises(RuntimeError, match="ConnectionRefusedError: the simulator is gone"):
        for _ in range(4):
            envs.step(np.int32([0]))
    envs.close()


def test_missing_shared_memory_is_reported_before_it_is_used(monkeypatch):
    def full(file, start, size):
        raise OSError(errno.ENOSPC, "")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(Failure, match=r"memory takes .* MB.*/dev/shm.*No space left.*--num-envs"):
        opened("faulty:Faulty-v0", [1, 2], workers=1)


def test_processes_that_cannot_be_started_are_reported(monkeypatch):
    def full(*_, **__):
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(subprocess, "Popen", full)
    with pytest.raises(Failure, match=r"1 processes cannot be started .* \(Too many open files\); lower --env-workers"):
        opened("faulty:Faulty-v0", [1, 2], workers=1)


def test_a_worker_finds_a_module_after_the_program_has_changed_its_directory(tmp_path, monkeypatch):
    """A notebook's `sys.path` has "", the current directory."""
    (tmp_path / "left_behind.py").write_text("from corridor_gymnasium import Corridor\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    monkeypatch.setitem(sys.modules, "left_behind", __import__("left_behind"))
    monkeypatch.chdir("/")
    envs = opened("left_behind:Corridor", [1], workers=1)
    assert envs.reset().shape == (1, 2)
    envs.close()


def test_compiling_an_environment_counts_for_no_time_limit():
    envs = opened(IN_JAX, [1])
    functions, seen = envs._functions, []
    watched = lambda f: lambda *args: (seen.append(is_compiling()), f(*args))[1]
    envs._functions = functions._replace(reset=watched(functions.reset), step_alone=watched(functions.step_alone))
    envs.reset()
    for _ in range(3):
        envs.step(np.int32([0]))
    assert seen == [True, True, False, False] and not is_compiling()
    with compiling():
        with compiling():
            pass
        assert is_compiling()


@pytest.mark.parametrize("env_id, rate", [(IN_PYTHON, 4), (f"{IN_PYTHON[:-3]}", 4), ("gymnasium:CartPole-v1", 50)])
def test_films_have_the_speed_that_the_environment_states(env_id, rate):
    for workers in (0, 1):
        envs = opened(env_id, [1], workers)
        assert envs.steps_per_second == rate
        envs.close()


def test_a_speed_that_is_no_speed_is_not_used():
    assert [rate_in({"render_fps": x}) for x in (4, "fast", None, 0, -1, np.inf)] == [4, *[30] * 5]


@pytest.mark.parametrize("workers", [0, 1])
def test_infos_of_environments_may_have_any_form(workers):
    envs = opened("odd:Tells-v0", [1, 2, 3], workers)
    envs.reset()
    assert all(envs.step(np.zeros(3, np.int32)).reward.sum() in (0, 3) for _ in range(20))
    envs.close()


@pytest.mark.parametrize("name", ["Masked", "Pairs", "Parts"])
def test_environments_that_reject_illegal_actions_are_tried_with_legal_ones(name):
    spec = env_spec(Experiment(env_id=f"odd:{name}-v0"))
    assert warnings(spec) == []
    envs, chance = open_envs(spec, [1], 1, 0), np.random.default_rng(0)
    obs = envs.reset()
    for _ in range(20):  # an illegal one raises
        action = gymnasium.random_action(spec.action, chance, gymnasium.mask_of(spec.obs, obs))
        obs = envs.step(action).obs
    envs.close()


def test_a_class_need_not_be_registered():
    """It is stepped here and in a process of its own; its steps can be limited, although it states no limit."""
    spec = env_spec(Experiment(env_id="odd:Odd", max_episode_steps=3))
    assert spec.time_limit == 3 and gymnasium.can_be_sent(spec)
    for workers in (0, 2):
        envs = opened("odd:Odd", [1, 2], workers, max_episode_steps=3)
        assert np.array_equal(envs.reset(), [Odd().reset(seed=seed)[0] for seed in (1, 2)])
        steps = [envs.step(np.array([0, 1])) for _ in range(3)]
        assert [bool(step.truncated.all()) for step in steps] == [False, False, True]
        envs.close()
    with pytest.raises(UsageError, match="not a registered Gymnasium environment.*the closest names are Odd"):
        env_spec(Experiment(env_id="odd:Od"))
    with pytest.raises(UsageError, match="NoSuch-v0' is not a registered Gymnasium environment; `cleanba envs`"):
        env_spec(Experiment(env_id="gymnasium:NoSuch-v0"))


def test_integers_of_eight_bytes_are_not_cut_off():
    for name in ("Wide", "WideChoices"):
        envs = opened(f"odd:{name}-v0", [1], 0)
        assert envs.reset().tolist() == [[2**33, 5]]
        envs.close()


def test_actions_have_the_type_that_the_environment_says():
    envs = opened("odd:Small-v0", [1], 0)
    envs.reset()
    assert envs.step(np.int32([[1, 2]])).reward.tolist() == [1]
    envs.close()


@pytest.mark.filterwarnings("error:Explicitly requested dtype")  # JAX warns where it is asked for 8 bytes
def test_environments_in_jax_may_show_nested_tuples_and_need_arguments():
    envs = opened("jax:odd:Nested", [1, 2], env_options=("size=2", "max_episode_steps=3"))
    assert {name: x.shape for name, x in envs.reset()["pair"].items()} == {"00": (2,), "01": (2, 2)}
    steps = [envs.step(np.int32([[1, 2], [0, 0]])) for _ in range(3)]
    assert [step.reward.tolist() for step in steps] == [[3, 0]] * 3
    assert [step.truncated.tolist() for step in steps] == [[False] * 2, [False] * 2, [True] * 2]


def test_a_class_in_jax_that_is_defined_anew_is_compiled_anew(monkeypatch):
    import corridor_jax

    class Generous(corridor_jax.Corridor):
        def step_env(self, *args):
            obs, state, reward, *more = super().step_env(*args)
            return obs, state, reward + 1, *more

    def reward():
        envs = opened(IN_JAX, [1])
        envs.reset()
        return envs.step(np.int32([RIGHT])).raw_reward[0]

    before = reward()
    monkeypatch.setattr(corridor_jax, "Corridor", Generous)
    assert reward() == before + 1


def test_an_argument_may_have_the_name_of_a_parameter():
    made = jax_envs.make("jax:odd:SizedTwice", {"size": 2, "shown": 3, "pay": 0.5})
    assert (made.env.size, made.params.size, made.params.pay) == (6, 2, 0.5)


def test_a_time_limit_that_the_environment_does_not_read_cannot_be_set():
    named = lambda name, **limit: Experiment(env_id=f"jax:odd:{name}", env_options=("size=2",), **limit)
    assert env_spec(named("Tireless")).time_limit is None
    assert env_spec(named("Tireless", max_episode_steps=9)).time_limit is None  # as earlier versions have recorded it
    for name in ("Tireless", "Idle"):
        with pytest.raises(
            UsageError, match=f"max_episode_steps=3 would change nothing.*step_env of jax:odd:{name} reads"
        ):
            env_spec(named(name, max_episode_steps=3))
    for name in ("Nested", "Tired", "Roomy", "Clocked"):
        assert env_spec(named(name, max_episode_steps=3)).time_limit == 3


def test_a_limit_with_craftaxs_name_is_left_to_the_environment():
    envs = opened("jax:odd:Clocked", [1], env_options=("size=1",), max_episode_steps=2)
    assert envs.reset()["pair"]["01"].tolist() == [[2.0]]
    steps = [envs.step(np.int32([[0, 0]])) for _ in range(2)]
    assert [(step.obs["pair"]["01"][0, 0], bool(step.terminated[0])) for step in steps] == [(1, False), (0, True)]


@pytest.mark.parametrize(
    "fault, words",
    [
        ("reward", r"its reward has the shape \(1,\), but a single number is needed"),
        ("flag", r"its flag `terminated` has the shape \(2,\)"),
        ("state", r"its state must .* after a step, but it changes from int32 \[\] to float32 \[\]"),
        ("parts", "its observation must .*'more'"),
        ("shape", r"its observation must .*\['pair'\]\['01'\] changes from float32 \[2\] to float32 \[1\]"),
        ("few", "step_env returned 4 values, but must return 5: obs, state, reward, terminated, info"),
    ],
)
def test_a_step_in_jax_that_does_not_fit_the_reset_is_refused_before_the_run(fault, words):
    with pytest.raises(UsageError, match=rf"'jax:odd:Boxed' cannot be reset and stepped.*: {words}") as caught:
        env_spec(Experiment(env_id="jax:odd:Boxed", env_options=(f"fault={fault}",)))
    assert "\n" not in str(caught.value)


def processes_with(mark: str) -> list[int]:
    """The processes that were started with this in their environment and still live."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            alive = (folder / "stat").read_text().rpartition(")")[2].split()[0] != "Z"
            if alive and mark.encode() in (folder / "environ").read_bytes():
                found.append(int(folder.name))
        except OSError:  # it has just ended, or is another user's
            continue
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    "fault, ended_by, code",
    [("spin", signal.SIGKILL, -9), ("", signal.SIGINT, 130), ("hang", None, 1)],
)
def test_nothing_is_left_behind_however_a_run_ends(fault, ended_by, code, tmp_path):
    flags = ("--env-id", "faulty:Faulty-v0", "--num-envs", 4, "--num-steps", 8, "--hiddens", 8, "--num-minibatches", 1)
    flags += ("--num-actors", 2, "--env-workers", 2, "--total-timesteps", 10**7)
    flags += ("--stall-timeout", 3) if fault == "hang" else ()  # else a busy machine may end it first
    # After the 64 steps that look whether seeds are followed.
    options = ("--env-options", f"fault={fault}", "at=70") if fault else ()
    mark = f"CLEANBA_TEST={tmp_path}"
    patient = "import sys; from cleanba import cli, launch; launch.START_SECONDS = 600; cli.main(sys.argv[1:])"
    words = ("ppo", *flags, *options, "--run-dir", tmp_path / "run")
    run = python("-c", patient, *words, CLEANBA_TEST=str(tmp_path))
    deadline = time.monotonic() + 300
    while len(processes_with(mark)) < 5 and time.monotonic() < deadline:  # it, and two workers of each actor
        time.sleep(0.2)
    assert fault == "hang" or len(processes_with(mark)) >= 5
    spinning = lambda: len(list(tmp_path.glob("*.spins"))) > 1
    while fault == "spin" and not spinning() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert fault != "spin" or spinning()
    if ended_by is not None:
        time.sleep(1)
        os.kill(run.pid, ended_by)
    ended = finish(run)
    assert ended.code == code, ended.err
    assert fault != "hang" or ("thread 'actor 0'" in ended.err and "no update" in ended.err)
    deadline = time.monotonic() + 60  # what is left behind would stay for hours
    while processes_with(mark) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert processes_with(mark) == []


def test_an_environment_that_does_not_follow_its_seed_is_named():
    spec = lambda *options: env_spec(Experiment(env_id="faulty:Faulty-v0", env_options=options))
    assert warnings(spec()) == []
    [warning] = warnings(spec("fault=chance"))
    assert "faulty:Faulty-v0 does not follow its seed" in warning
    assert warnings(env_spec(Experiment(env_id="odd:Forgets-v0"))) != []  # after its first episode
    assert warnings(spec("fault=die")) == warnings(spec("fault=raise")) == []  # that is for the run to say


def test_a_wrapper_that_normalises_by_its_own_statistics_comes_with_a_warning():
    def told(*names):
        wrappers = tuple(f"gymnasium.wrappers:{name}" for name in names)
        return warnings(env_spec(Experiment(env_id="gymnasium:CartPole-v1", env_wrappers=wrappers)))

    assert told() == told("FlattenObservation") == []
    (warning,) = told("FlattenObservation", "NormalizeReward", "NormalizeObservation")
    assert "is normalised by NormalizeObservation and NormalizeReward, whose" in warning and "returns are" in warning


def test_an_environment_that_was_corrected_is_tried_again():
    for follows in (False, True):

        class Again(Odd):
            def look(self, follows=follows):
                return super().look() if follows else np.random.uniform(-1, 1, 2).astype(np.float32)

        assert repeatable(env_spec(Experiment(env_id=gymnasium.register(Again)))) is follows


def test_infos_that_differ_each_time_do_not_count():
    calls = itertools.count()

    class Counted(Odd):
        def step(self, action):
            return (*super().step(action)[:-1], {"calls": next(calls)})

    assert repeatable(env_spec(Experiment(env_id=gymnasium.register(Counted)))._replace(infos=("calls",)))
    assert next(calls) > 0


def test_an_environment_can_end_its_own_processes():
    envs = opened("odd:Children", [1, 2], 1)
    envs.reset()
    began = time.monotonic()
    for _ in range(3 * Odd.length):
        envs.step(np.zeros(2, np.int32))
    envs.close()
    assert time.monotonic() - began < 50, "a signal that is lost costs a minute"


def test_an_environment_that_changes_the_directory_does_not_move_the_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    spec = env_spec(Experiment(env_id="odd:Moves"))
    assert Path.cwd() == tmp_path and repeatable(spec) and Path.cwd() == tmp_path
    envs = open_envs(spec, (1, 2), 1, workers=0)  # in this process
    for do in (envs.reset, lambda: envs.step(np.zeros(2, np.int32)), envs.close):
        do()
        assert Path.cwd() == tmp_path
    words = ["--env-id", "odd:Moves", "--env-workers", "0", *TINY[2:], "--checkpoint-frequency", "1"]
    ended = command("ppo", *words, "--keep-checkpoints", "all", "--run-dir", "run")
    assert ended.code == 0, ended
    assert updates_kept(tmp_path / "run") == [1, 2, 3, 4, 5]
    assert [row["update"] for row in read_rows(tmp_path / "run") if "params_digest" in row] == [1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    "flags, names",
    [
        ({"env_id": "odd:Odd", "env_wrappers": ("faulty:Twice",)}, ["faulty", "odd"]),
        ({"env_id": IN_PYTHON}, ["corridor_gymnasium"]),
        ({"env_id": IN_JAX}, ["corridor_jax"]),
        ({"env_id": "gymnasium:CartPole-v1"}, []),
        ({"env_id": "CartPole-v1"}, []),
        ({"env_id": "gymnax:CartPole-v1"}, []),
    ],
)
def test_the_code_of_ones_own_environment_is_recorded(flags, names):
    found = sources(env_spec(Experiment(**flags)))
    files = {name: Path(sys.modules[name].__file__) for name in names}
    assert found == {name: f"sha256:{sha256(file.read_bytes()).hexdigest()}" for name, file in files.items()}


def test_the_code_of_an_environment_that_a_package_registers_is_recorded(tmp_path, monkeypatch):
    package = tmp_path / "registers"
    package.mkdir()
    words = "gymnasium.register('Within-v0', entry_point='registers.inside:Within')"
    (package / "__init__.py").write_text(f"import gymnasium\n{words}\n")
    (package / "inside.py").write_text("from odd import Odd\n\n\nclass Within(Odd):\n    pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert list(sources(env_spec(Experiment(env_id="registers:Within-v0")))) == ["registers", "registers.inside"]


def test_the_code_of_a_class_of_the_program_is_recorded():
    assert list(sources(env_spec(Experiment(env_id=gymnasium.register(partial(Odd)))))) == ["odd"]


def test_pictures_that_reach_an_mlp_come_with_a_warning():
    of = lambda part: warnings(env_spec(Experiment(env_id="odd:Odd"))._replace(obs=part))
    (warning,) = of(ObsSpec("bytes", (84, 84), "uint8"))
    assert "shows bytes of the shape (84, 84)" in warning and "keep_dim=True" in warning
    among = env_spec(Experiment(env_id="odd:Odd"))._replace(obs={"a": ObsSpec("image", (40, 40, 3), "uint8")})
    (warning,) = warnings(among, "mlp")
    assert "shows pictures, which an MLP reads" in warning and warnings(among, "nature") == []
    for small in (
        ObsSpec("vector", (100,), "float32"),
        ObsSpec("bytes", (31, 84), "uint8"),
        ObsSpec("vector", (), "float32"),
    ):
        assert of(small) == []


@pytest.mark.parametrize(
    "space, sample, words",
    [
        (Discrete(2**21), np.int64([3]), "too many states, or too large numbers"),
        (Discrete(3, start=2**33), np.int64([2**33]), "too many states, or too large numbers"),
        (Box(0, 1, (0,)), np.zeros((1, 0), np.float32), "has the shape .0,., which is empty"),
    ],
)
def test_observations_that_no_network_can_take_are_refused(space, sample, words):
    with pytest.raises(UsageError, match=words):
        obs_spec(space, sample, choice(2))


@pytest.mark.parametrize("space", [Discrete(2**17), Discrete(3, start=2**33), Box(0, 1, (0,))])
def test_actions_that_no_policy_can_choose_are_refused(space):
    assert isinstance(action_spec(space), str)


def test_an_environment_that_exits_the_program_is_still_tried_out():
    class Leaves(Odd):  # no other process can import it
        looks = 0

        def look(self):
            Leaves.looks += 1
            return super().look() if Leaves.looks < 20 else sys.exit(0)

    assert gymnasium.try_out(env_spec(Experiment(env_id=gymnasium.register(Leaves)))).repeatable
    assert Leaves.looks == 20


def test_an_environment_that_starts_slowly_is_still_tried_out(monkeypatch):
    monkeypatch.setattr(gymnasium, "PATIENCE_SECONDS", 1.0)  # two of them take longer to start
    spec = env_spec(Experiment(env_id="faulty:Faulty-v0", env_options=("fault=chance", "starts=0.7")))
    assert not gymnasium.try_out(spec).repeatable


@pytest.mark.parametrize(
    "space, shown, words",
    [
        (Discrete(5), lambda n: np.int64(n), "the observation 5, but its space has 0 to 4;"),
        (
            Dict({"a": Box(-1, 1, (2, 2), np.int8)}),
            lambda n: {"a": np.full((2, 2), n, np.int8)},
            "['a'] = 2, but its space has -1 to 1;",
        ),
        (Discrete(99), lambda n: np.int64(n), ""),
        (Box(0, 1, (2,)), lambda n: np.full(2, n, np.float32), "the observation 2, but its space has 0 to 1."),
        (Box(np.float32([-9, -np.inf]), np.float32([9, 1])), lambda n: np.array([n, -n]), ""),
        (Box(-1, 1, (2,)), lambda n: np.array([1.0001, np.nan]), ""),  # rounding; the run itself reports NaN
        (
            Dict({"a": Dict({"b": Box(0, 255, (2,), np.int16)}), "c": Discrete(99)}),
            lambda n: {"a": {"b": np.array([0, 251 + n])}, "c": 5},
            "the observation 'a.b' = 256, but its space has 0 to 255.",
        ),
    ],
)
def test_a_number_outside_its_space_is_reported(space, shown, words):
    class Counts(Odd):
        observation_space, looks = space, 0

        def look(self):
            self.looks += 1
            return shown(self.looks % 8)

    told = warnings(env_spec(Experiment(env_id=gymnasium.register(Counts))))
    assert any(words in warning for warning in told) if words else all("its space" not in warning for warning in told)


def test_a_start_that_takes_too_long_shows_where_it_hangs_and_ends(tmp_path, monkeypatch):
    monkeypatch.setattr("cleanba.launch.START_SECONDS", 0.0)
    slow = ("--env-id", "faulty:Faulty-v0", "--env-options", "starts=300", "--stall-timeout", "5")
    start = time.monotonic()
    ended = command("ppo", *slow, "--run-dir", tmp_path / "run")
    assert ended.code == 1 and time.monotonic() - start < 100 and not (tmp_path / "run").exists()
    assert "the run has not started after 5 s" in ended.err and "time.sleep(starts)" in ended.err, ended.err


def test_checking_the_seed_does_not_wait_for_an_environment_that_hangs(monkeypatch):
    monkeypatch.setattr(gymnasium, "PATIENCE_SECONDS", 1.0)
    assert warnings(env_spec(Experiment(env_id="faulty:Faulty-v0", env_options=("fault=hang",)))) == []


def test_wrappers_and_options_reach_the_environment():
    env = dict(env_id=IN_PYTHON, env_options=("length=3",))
    rewards = []
    for wrappers in ((), ("faulty:Twice", "faulty:Twice")):
        envs = opened(**env, seeds=[1], workers=1, env_wrappers=wrappers)
        envs.reset()
        rewards.append([envs.step(np.int32([RIGHT])).raw_reward[0] for _ in range(2)])
        envs.close()
    assert rewards[0] == np.float32([-0.01, 0.99]).tolist() and rewards[1] == np.float32([-0.04, 3.96]).tolist()


def test_several_choices_of_gymnasiums_are_choices_here():
    several = action_spec(MultiDiscrete([2, 3], start=[1, 0]))
    assert isinstance(several, ActionSpec) and several.kind == "choices" and several.counts == (2, 3)
    assert several.for_environment(np.int32([[0, 2], [1, 0]])).tolist() == [[1, 2], [2, 0]]


# ------------------------------------------------------------------------------------------- names and refusals


@pytest.mark.parametrize(
    "changes, words",
    [
        (dict(env_id="gymnasium:CartPol-v1"), ["gymnasium:CartPol-v1", "CartPole-v1"]),
        (dict(env_id="no_such_package:X-v0"), ["'no_such_package' cannot be imported"]),
        (dict(env_id=":CartPole-v1"), ["'' cannot be imported", "Empty module name"]),
        (dict(env_id=".x:CartPole-v1"), ["'.x' cannot be imported"]),
        (dict(env_id="broken:X-v0"), ["'broken' cannot be imported", "ZeroDivisionError", "broken.py:2"]),
        (dict(env_id="leaving:X-v0"), ["'leaving' cannot be imported", "SystemExit", "leaving.py:1"]),
        (dict(env_id="jax:broken:X"), ["ZeroDivisionError", "broken.py:2", "jax:module:Class"]),
        (dict(env_id="gymnasium:CartPole-v1", env_wrappers=("broken:x",)), ["ZeroDivisionError", "broken.py:2"]),
        (dict(env_id="odd:Misfit-v0"), ["action_mask has the shape (3,)", "2 choices"]),
        (dict(env_id="faulty:Faulty-v0", env_options=("fault=raise", "at=1")), ["be stepped", "planted", "faulty.py:"]),
        (dict(env_id="odd:Leaves-v0"), ["cannot be reset", "SystemExit", "odd.py:"]),
        (dict(env_id=IN_JAX, env_options=("lenght=3",)), ["cannot be made with lenght", "parameters are", "length"]),
        (dict(env_id="odd:Blind-v0"), ["odd:Blind-v0", "only an action mask"]),
        (dict(env_id="faulty:Faulty-v0", env_options=("disable_env_checker=True",)), ["is set by Cleanba"]),
        (dict(env_id="faulty:Faulti-v0"), ["faulty:Faulti-v0", "Faulty-v0"]),
        (dict(env_id="faulty:Texts-v0"), ["Text(", "--env-wrappers"]),
        (dict(env_id="faulty:Faulty-v0", env_options=("falt=1",)), ["faulty:Faulty-v0 takes no option 'falt'; its"]),
        (dict(env_id="odd:Odd", env_options=("goal=1",)), ["odd:Odd takes no option 'goal'", "takes none"]),
        (dict(env_id="odd:Grid", env_options=("goal=1", "size=2")), ["option 'goal'; its constructor takes size"]),
        (dict(env_id="odd:Grid", env_options=("size=0",)), ["exactly one argument"]),  # an error within it
        (dict(env_id="faulty:Faulty-v0", env_options=("render_mode=human",)), ["render_mode is set by Cleanba"]),
        (dict(env_id="faulty:Faulty-v0", env_wrappers=("Twice",)), ["env_wrappers='Twice'", "module:function"]),
        (dict(env_id="faulty:Faulty-v0", env_wrappers=("faulty:Thrice",)), ["faulty:Thrice", "cannot be imported"]),
        (dict(env_id="CartPole-v1", env_wrappers=("faulty:Twice",)), ["gymnasium:CartPole-v1"]),
        (dict(env_id="jax:corridor_jax:Corridr"), ["Corridr", "jax:module:Class"]),
        (dict(env_id="craftax:Craftax-v1"), ["craftax:Craftax-Symbolic-v1"]),
        (dict(env_id="./odd:Odd"), ["is a path", "write odd:Odd,"]),
        (dict(env_id="odd.py:Odd"), ["is a path", "write odd:Odd,"]),
        (dict(env_id="jax:./odd.py:Boxed"), ["is a path", "write jax:odd:Boxed,"]),
        (dict(env_id="odd:Odd", env_wrappers=("./faulty:Twice",)), ["is a path", "write faulty:Twice,"]),
        (dict(env_id="odd.Odd"), ["write odd:Odd for a class"]),
        (dict(env_id="odd:Boxed"), ["write jax:odd:Boxed"]),
        (
            dict(env_id="jax:odd:Held", env_options=("size=1",)),
            ["action_space must be a method that takes the parameters"],
        ),
        (dict(env_id="odd:Odd", env_wrappers=("builtins:print",)), ["builtins:print returned None; it must return"]),
        (dict(env_id="jax:odd:Odd"), ["write odd:Odd"]),
    ],
)
def test_invalid_environments_are_refused_with_a_remedy(changes, words, tmp_path, monkeypatch):
    folder = tmp_path / "cleanba"  # as a user may call one
    folder.mkdir()
    (folder / "broken.py").write_text("# broken\nx = 1 / 0\n")
    (folder / "leaving.py").write_text("raise SystemExit(0)\n")  # a script without a guard
    monkeypatch.syspath_prepend(folder)
    with pytest.raises(UsageError) as caught:
        env_spec(Experiment(**changes))
    message = str(caught.value)
    assert all(word in message for word in words) and "\n" not in message, message


@pytest.mark.parametrize(
    "reset, step, words",
    [
        (lambda o: o, None, "cannot be reset: Wrong.reset returned one value of the type ndarray, but must return 2"),
        (None, lambda o, r, *x: (o, r, *x[1:]), "cannot be stepped: Wrong.step returned 4 values, but must return 5"),
        (None, lambda o, r, *x: (o, np.ones(2), *x), "stepped: Wrong.step returned the reward array([1., 1.]), which"),
        (None, lambda o, r, *x: (o, None, *x), "stepped: Wrong.step returned the reward None, which is not one number"),
        (None, lambda o, r, t, u, i: (o, r, t, [u], i), "step returned truncated = [False], which is not one boolean"),
        (None, lambda o, r, t, u, i: (o, r, (t,), u, i), "returned terminated = (False,), which is not one boolean"),
        (
            lambda o: ({"a": 0.5 * o}, {}),
            None,
            "the observation 'a' has the type float32, but its space has uint8",
        ),
    ],
)
def test_what_an_environment_returns_against_the_rules_is_named(reset, step, words):
    class Wrong(Odd):
        observation_space = Dict({"a": Box(0, 255, (2,), np.uint8)}) if "uint8" in words else Odd.observation_space

        def reset(self, **how):
            obs, told = super().reset(**how)
            return (obs, told) if reset is None else reset(obs)

        def step(self, action):
            return super().step(action) if step is None else step(*super().step(action))

    with pytest.raises(UsageError) as caught:
        env_spec(Experiment(env_id=gymnasium.register(Wrong)))
    assert words in str(caught.value) and "numpy" not in str(caught.value)


def test_an_id_that_gymnasium_knows_is_named_with_its_prefix():
    farama.register("MyRobot-v0", Odd)
    with pytest.raises(UsageError, match="registered with Gymnasium, not EnvPool; write gymnasium:MyRobot-v0"):
        env_spec(Experiment(env_id="MyRobot-v0"))
    assert env_spec(Experiment(env_id="gymnasium:MyRobot-v0")).num_actions == 2


def test_a_suite_that_is_not_installed_is_named_with_what_installs_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "gymnax", None)
    with pytest.raises(UsageError, match=r"needs the module gymnax, .*pip install -e '.\[jax-envs\]'"):
        env_spec(Experiment(env_id="gymnax:CartPole-v1"))


def test_figures_that_an_environment_draws_are_closed():
    pyplot = pytest.importorskip("matplotlib.pyplot")
    pytest.importorskip("gymnax")
    envs = opened("gymnax:Catch-bsuite", [1])
    envs.reset()
    before, mine = pyplot.get_fignums(), pyplot.figure()
    for _ in range(3):
        assert envs.render(0).shape[2] == 3
    assert pyplot.get_fignums() == [*before, mine.number]
    pyplot.close(mine)


def test_environments_that_cannot_be_made_for_rendering_are_not_filmed():
    with pytest.raises(UsageError, match="cannot be made with render_mode='rgb_array'.*--capture-video"):
        gymnasium.check_drawable(env_spec(Experiment(env_id="odd:Undrawable-v0")))


def test_options_are_read_as_python_values_or_as_strings():
    read = parse_options(["a=1", "b=false", "c=True", "d=x", "e={[]:1}", "f='false'"])
    assert read == {"a": 1, "b": False, "c": True, "d": "x", "e": "{[]:1}", "f": "false"}


def test_environments_in_python_cannot_be_scanned():
    ended = command("ppo", "--env-id", IN_PYTHON, "--collector", "scanned")
    assert ended.code == 2 and "runs in Python" in ended.err and "--collector stepped" in ended.err


def test_minatars_boards_are_seen_by_its_network_and_kept_as_bits():
    pytest.importorskip("gymnax")
    assert preset_name(env_spec(Experiment(env_id="gymnax:Pendulum-v1"))) == "continuous"
    typed = dict(env_id="gymnax:Breakout-MinAtar", max_episode_steps=4, num_envs=2, num_steps=4)
    e, spec, preset, _ = resolve(RECIPES["ppo"], typed, "cpu")
    assert preset == "minatar"
    assert (spec.obs.kind, spec.obs.shape, spec.obs.dtype, spec.num_actions) == ("planes", (10, 10, 4), "bool", 3)
    params = ppo.make(e, spec, "cpu").init(jax.random.key(0)).params
    assert "MinAtarCNN_0" in params["params"]
    envs = open_envs(spec, [1, 2], 1)
    first = envs.reset()
    assert first.sum((1, 2)).tolist() == [[1, 1, 1, 30]] * 2  # paddle, ball, trail, three rows of bricks
    ends = [envs.step(np.zeros(2, np.int32)) for _ in range(5)]
    assert [step.truncated.tolist() for step in ends] == [[False] * 2] * 3 + [[True] * 2, [False] * 2]
    assert not any(step.terminated.any() for step in ends)
    picture = envs.render(0)
    assert picture.shape == (10, 10, 3) and picture.dtype == np.uint8 and picture.any()


def test_the_seeds_of_environments_in_jax_are_no_keys_of_the_runs():
    spec = env_spec(Experiment(env_id=IN_JAX))
    block, _ = jax_envs.functions(spec).reset(np.int32([1]))
    assert not (jax.random.key_data(block.key[0]) == jax.random.key_data(jax.random.key(1))).all()


# ------------------------------------------------------------------------------------------- one's own, and the list


@pytest.mark.slow
@pytest.mark.parametrize("file, env_id", [("corridor_gymnasium.py", IN_PYTHON), ("corridor_jax.py", IN_JAX)])
def test_the_examples_are_short_and_can_be_trained_evaluated_and_filmed(file, env_id, tmp_path):
    assert len((EXAMPLES / file).read_text().splitlines()) <= 40
    flags = ("--num-envs", 8, "--num-steps", 16, "--hiddens", 16, "--total-timesteps", 6000, "--learning-rate", 0.01)
    ended = command("ppo", "--env-id", env_id, *flags, "--capture-video", "--run-dir", tmp_path)
    assert ended.code == 0, ended.err
    assert read_result(tmp_path)["episodic_return"] > 0.85  # a random walk arrives half of the time
    ended = command("eval", tmp_path, "--episodes", 3, "--seed", 2, "--video")
    assert ended.code == 0, ended.err
    assert len(list((tmp_path / "videos").glob("*.mp4"))) == 2


def test_environments_are_listed_with_what_they_show_and_take(tmp_path, monkeypatch):
    ended = command("envs", "corridor_gymnasium:")
    assert ended.code == 0 and f"{IN_PYTHON}" in ended.out and "vector 2 float32 -> one of 2 actions" in ended.out
    ended = command("envs", "CartPole-v?")
    assert all(name in ended.out for name in ("EnvPool: classic_control", "gymnasium:CartPole-v1"))
    ended = command("envs")
    assert "EnvPool    atari" in ended.out and "Gymnasium  classic_control" in ended.out
    assert f"{IN_JAX}  vector 2 float32" in command("envs", IN_JAX).out
    (tmp_path / "unregistered.py").write_text("from corridor_gymnasium import Corridor as Mine\n")
    monkeypatch.syspath_prepend(tmp_path)
    for name, entry in (("Known-v0", "'corridor_gymnasium:Corridor'"), ("Partial-v0", "functools.partial(Mine)")):
        register = f"import functools, gymnasium\ngymnasium.register('{name}', entry_point={entry})\n"
        with open(tmp_path / "unregistered.py", "a") as file:
            file.write(register)
        sys.modules.pop("unregistered", None)
        said = command("envs", f"unregistered:{name}")
        assert said.out == f"unregistered:{name}  vector 2 float32 -> one of 2 actions\n", said
    assert command("envs", "unregistered:Mine").out == "unregistered:Mine  vector 2 float32 -> one of 2 actions\n"
    ended = command("envs", "unregistered:Mein")
    assert ended.code == 2 and "Mein" in ended.err
    ended = command("envs", ".x:")
    assert ended.code == 2 and "package '.x' cannot be imported" in ended.err
    ended = command("envs", "no-such-thing")
    assert ended.code == 2 and "no environment matches" in ended.err
    assert command("envs", "Breakout-v5", "--limit", 0).out.splitlines()[:2] == ["EnvPool: atari", "  Breakout-v5"]


def test_an_observation_that_does_not_fit_its_space_is_reported_with_both_shapes():
    spec = env_spec(Experiment(env_id="odd:Grows-v0"))
    words = r"the observation has the shape \(4,\), but its space has \(2,\): Box"
    for workers in (0, 1):
        envs = open_envs(spec, [1, 2], 1, workers)
        envs.reset()
        envs.step(np.zeros(2, np.int32))
        envs.step(np.zeros(2, np.int32))
        with pytest.raises((ValueError, RuntimeError), match=words):
            envs.step(np.zeros(2, np.int32))
        envs.close()
    box = Box(0, 1, (2,))
    nested = Dict(a=Dict(b=box))
    assert misfit(box, np.zeros(2)) == misfit(nested, {"a": {"b": np.zeros(2)}}) == ""
    assert "observation 'a.b' has the shape (3,), but its space has (2,)" in misfit(nested, {"a": {"b": np.zeros(3)}})
    assert "has the entries ['c'], but its space has ['b']" in misfit(nested, {"a": {"c": 0}})
    assert "is float, but its space has ['a']" in misfit(nested, 0.5)


def test_an_environments_own_error_is_not_taken_for_a_misfit():
    class Adds(Odd):
        observation_space = Dict({"a": Odd.observation_space})

        def look(self):
            seen = {"a": super().look()}
            return seen if self.steps < 2 else seen | {"b": 0}  # an entry too many, which nobody reads

        def step(self, action):
            if self.steps == 4:
                raise LookupError("its own")
            return super().step(action)

    envs = opened(gymnasium.register(Adds), [1, 2])
    envs.reset()
    with pytest.raises(LookupError, match="its own"):
        for _ in range(5):
            envs.step(np.zeros(2, np.int32))
    envs.close()


def test_an_environment_with_another_shape_than_the_first_is_refused():
    class Differs(Odd):
        sizes = iter((3, 3, 1))  # twice for the specification

        def __init__(self):
            self.observation_space = Box(-1, 1, (next(self.sizes),), np.float32)

        def look(self):
            return np.ones(self.observation_space.shape, np.float32)

    spec = env_spec(Experiment(env_id=gymnasium.register(Differs)))
    with pytest.raises(ValueError, match=r"the shape \(1,\) in one environment and \(3,\) in another"):
        open_envs(spec, [1], 1)  # NumPy would repeat the one number three times


@pytest.mark.parametrize(
    "fault, words",
    [
        ("list", "its observation 'pair' is list, but must be an array, or a dictionary or tuple"),
        ("entry", "its observation has the entries ['more', 'pair'], but its space has ['pair']"),
        ("dictionary", "its observation has the entries ['more', 'pair'], but its space has Discrete(3)"),
    ],
)
def test_an_observation_in_jax_without_a_space_is_named(fault, words):
    with pytest.raises(UsageError) as caught:
        env_spec(Experiment(env_id="jax:odd:Unspaced", env_options=(f"fault={fault}",)))
    assert words in str(caught.value)


def test_single_numbers_and_booleans_are_read_from_infos():
    info = {
        "yes": True,
        "no": np.bool_(False),
        "half": np.float32(0.5),
        "one": np.array(1),
        "alone": np.array([2.0]),
        "word": "1.5",
        "none": None,
    }
    info |= {"several": np.ones(2), "huge": 10**400, "large": 1e300, "infinite": np.inf, "list": [1], "bytes": b"3"}
    told = {name: number_in(info, name) for name in (*info, "absent")}
    numbers = {name: x for name, x in told.items() if not np.isnan(x)}
    assert numbers == {"yes": 1, "no": 0, "half": 0.5, "one": 1, "alone": 2}
