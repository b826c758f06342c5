"""Both collectors record the same, and what they record is what the environments did."""

import contextlib
import gc
import re
import threading
import time
import weakref
from collections import Counter
from collections.abc import Iterator
from functools import cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from launch import CROWD, TINY, command, read_result

from cleanba import kernels
from cleanba.algorithm import Algorithm
from cleanba.algorithms import ppo
from cleanba.environments.envpool import Envs, env_spec
from cleanba.errors import NotFinite
from cleanba.rollout import EpisodeTracker
from cleanba.runtime.channels import Closed, Stop
from cleanba.runtime.collect import (
    Collected,
    Collector,
    FiniteCheck,
    ScanCache,
    ScannedCollector,
    SteppedCollector,
    Times,
    make_steppers,
)
from cleanba.runtime.compilation_cache import OF_ONE_PROCESS
from cleanba.seeds import action_key, action_numbers, env_seed
from cleanba.specs import EnvSpec

COLLECTORS = ["stepped", "scanned"]
SCAN = "scan_envs" if kernels.expected() else OF_ONE_PROCESS


class Case(NamedTuple):
    """A policy, its environments, and how much is collected."""

    env_id: str
    core: str
    envs: int
    steps: int
    rollouts: int = 3
    network: str = "mlp"
    max_episode_steps: int | None = None


CASES = {
    "cartpole": Case("CartPole-v1", "none", envs=5, steps=40, max_episode_steps=18),  # 40 = 2 calls of 20 steps
    "cartpole-lstm": Case("CartPole-v1", "lstm", envs=5, steps=40, max_episode_steps=18),
    "catch": Case("Catch-v0", "none", envs=3, steps=13),
    "catch-lstm": Case("Catch-v0", "lstm", envs=3, steps=13),
    "atari": Case("Breakout-v5", "none", envs=2, steps=5, rollouts=2, network="nature", max_episode_steps=3),
    "atari-lstm": Case("Breakout-v5", "lstm", envs=2, steps=5, rollouts=2, network="nature", max_episode_steps=3),
}


@cache
def prepare(case: Case) -> tuple[EnvSpec, Algorithm, Any]:
    e = ppo.PPO(
        env_id=case.env_id,
        network=case.network,  # type: ignore[arg-type]
        core=case.core,  # type: ignore[arg-type]
        hiddens=(16,),
        lstm_size=12,
        num_envs=case.envs,
        num_steps=case.steps,
        max_episode_steps=case.max_episode_steps,
    )
    spec = env_spec(e)
    algorithm = ppo.make(e, spec, "cpu")
    # Far from the start, so that log-probabilities differ from one observation and one memory to the next.
    far = 0.03 if case.network == "nature" else 0.3
    lively = lambda p: p + far * jax.random.normal(jax.random.key(p.size), p.shape)
    return spec, algorithm, jax.tree.map(lively, jax.jit(algorithm.init)(jax.random.key(0)).params)


def environments(case: Case, epoch: int, actor: int = 0) -> Envs:
    return Envs(prepare(case)[0], [env_seed(1, actor * 100 + i, epoch, 1000) for i in range(case.envs)], 1)


def make(name: str, case: Case, stop: Stop | None = None, device: int = 0) -> Collector:
    algorithm, to = prepare(case)[1], jax.local_devices()[device]
    if name == "scanned":
        return ScannedCollector(algorithm, case.steps, to, stop or Stop(), ScanCache(algorithm, case.steps))
    return SteppedCollector(algorithm, case.steps, to, stop or Stop(), make_steppers(algorithm, case.steps, "cpu"))


def collect(name: str, case: Case, actor: int = 0, device: int = 0, later: int = 1) -> list[Collected]:
    """Rollouts of one epoch, then one of each `later` one, as numpy."""
    collector = make(name, case, device=device)
    params = jax.device_put(prepare(case)[2], jax.local_devices()[device])
    collected = []
    for epoch, rollouts in enumerate((case.rollouts, *[1] * later)):
        collector.close()  # first, as actors do
        collector.restart(environments(case, epoch, actor))
        for _ in range(rollouts):
            times = Times()
            c = collector(params, action_numbers(1, actor, len(collected) + 1), times)
            assert {d.id for x in jax.tree.leaves(c.rollout) for d in x.devices()} == {jax.local_devices()[device].id}
            assert (times.scan > 0) == (name == "scanned") and (times.emulators > 0) == (name == "stepped")
            collected.append(jax.tree.map(np.asarray, c))
    collector.close()
    return collected


once = cache(collect)


@contextlib.contextmanager
def compilations() -> Iterator[Counter]:
    """Counts what is compiled, by name."""
    compiled: Counter = Counter()

    def listen(event: str, duration: float, **about: str) -> None:
        if event.endswith("backend_compile_duration"):
            compiled[about.get("fun_name", "")] += 1

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield compiled
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


@pytest.mark.parametrize("device", [0, 3])
@pytest.mark.parametrize("name", COLLECTORS)
def test_nothing_is_compiled_twice(name, device):
    """In two rollouts, of one epoch and of the next.  A buffer that begins on another device is compiled for again."""
    with compilations() as compiled:
        collect(name, CASES["cartpole"], device=device)  # two calls a rollout, two pools of environments
    expected = dict.fromkeys(["step", "start"] if name == "stepped" else [SCAN, "new_buffers"], 1)
    assert {what: compiled[f"jit({what})"] for what in expected} == expected


@pytest.mark.skipif(not kernels.expected(), reason="where no kernel runs, each pool may have a scan of its own")
def test_pools_share_compiled_code_and_nothing_else():
    case = CASES["catch"]
    with compilations() as compiled:
        scanned = collect("scanned", case, later=9)  # ten pools
    assert compiled["jit(scan_envs)"] == 1
    assert_same(collect("stepped", case, later=9), scanned)


@pytest.mark.parametrize("name", COLLECTORS)
def test_collecting_asks_nothing_of_another_device(name):
    """A device that learns would not answer until its update is done."""
    case, device = CASES["cartpole-lstm"], jax.local_devices()[3]
    params = jax.device_put(prepare(case)[2], device)
    collector = make(name, case, device=3)
    with jax.transfer_guard_device_to_device("disallow_explicit"):
        collector.restart(environments(case, 0))
        for rollout in (1, 2):
            collector(params, action_numbers(1, 0, rollout), Times())
    collector.close()


@pytest.fixture(params=CASES)
def case(request) -> Case:
    return CASES[request.param]


def assert_same(a: list[Collected], b: list[Collected]) -> None:
    """Equal in every bit, but for what is computed in floating point by the network."""
    for one, two in zip(a, b, strict=True):
        assert np.ptp(one.rollout.extras["log_prob"]) > 0.01
        assert (one.steps, one.episodes) == (two.steps, two.episodes)
        for name, x in one.rollout._asdict().items():
            y = getattr(two.rollout, name)
            if name in ("extras", "carry"):
                close = lambda p, q: np.testing.assert_allclose(p, q, rtol=1e-4, atol=1e-5)
                jax.tree.map(close, x, y)
            else:
                assert jax.tree.map(lambda p: (p.shape, p.dtype), x) == jax.tree.map(lambda q: (q.shape, q.dtype), y)
                jax.tree.map(lambda p, q, name=name: np.testing.assert_array_equal(p, q, name), x, y)


def test_same_seeds_give_the_same_rollouts(case):
    assert_same(once("stepped", case), once("scanned", case))


@pytest.mark.parametrize("name", COLLECTORS)
def test_what_is_recorded_is_what_the_environments_did(case, name):
    """Play the recorded actions again, step by step, on environments with the same seeds."""
    _, algorithm, params = prepare(case)
    act = jax.jit(algorithm.act, static_argnums=5)
    collected = once(name, case)
    ended = {"terminated": 0, "truncated": 0}
    for epoch, rollouts in enumerate((collected[: case.rollouts], collected[case.rollouts :])):
        envs = environments(case, epoch)
        obs, done, first = envs.reset(), np.zeros(case.envs, bool), np.ones(case.envs, bool)
        carry, tracker = algorithm.initial_carry(case.envs), EpisodeTracker(case.envs)
        for number, (r, steps, episodes, *_) in enumerate(rollouts):
            key = action_key(1, 0, number + 1 + epoch * case.rollouts)
            assert steps == r.valid.sum()
            played = []
            jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5), r.carry, carry)
            for t in range(case.steps):
                np.testing.assert_array_equal(r.obs[t], obs)
                np.testing.assert_array_equal(r.first[t], first)
                action, carry, extras = act(params, carry, obs, first, jax.random.fold_in(key, t), True)
                np.testing.assert_array_equal(r.action[t], action)
                np.testing.assert_allclose(r.extras["log_prob"][t], extras["log_prob"], rtol=1e-4, atol=1e-5)
                step = envs.step(r.action[t])
                np.testing.assert_array_equal(r.valid[t], ~done)
                np.testing.assert_array_equal(r.reward[t], np.where(done, 0, step.reward))
                np.testing.assert_array_equal(r.terminated[t], step.terminated & ~done)
                np.testing.assert_array_equal(r.truncated[t], step.truncated & ~done)
                played += tracker.add(step.raw_reward, ~done, step.over)
                obs, first = step.obs, done
                done = (step.terminated | step.truncated) & ~done
            assert episodes == played
            np.testing.assert_array_equal(r.obs[-1], obs)
            np.testing.assert_array_equal(r.first[-1], first)
            for how in ended:
                ended[how] += int(getattr(r, how).sum())
        envs.close()
    if case.env_id == "CartPole-v1":
        assert min(ended.values()) > 0, ended  # both ways to end were seen
    else:
        assert ended["truncated" if case.max_episode_steps else "terminated"] > 0, ended


@pytest.mark.parametrize("name", COLLECTORS)
def test_fresh_environments_start_fresh_episodes_with_an_empty_memory(case, name):
    *_, before, after = (c.rollout for c in once(name, case))
    assert after.first[0].all()
    assert not any(x.any() for x in jax.tree.leaves(after.carry))
    assert case.core == "none" or before.carry.h.any()
    assert not np.array_equal(after.action, before.action)  # another key


@pytest.mark.parametrize("name", COLLECTORS)
@pytest.mark.parametrize("label", ["cartpole-lstm", "catch"])
def test_several_threads_on_several_devices_record_what_one_thread_does(label, name):
    case, placed = CASES[label], [0, 0, 1, 2]  # actor -> device
    together: dict[int, list[Collected]] = {}
    errors = []

    def run(actor: int) -> None:
        try:
            together[actor] = collect(name, case, actor, placed[actor])
        except BaseException as error:
            errors.append(error)

    prepare(case)
    threads = [threading.Thread(target=run, args=(actor,)) for actor in range(len(placed))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(900)
    assert not errors and len(together) == len(placed), errors
    for actor, collected in together.items():
        assert_same(collected, once("stepped", case, actor))
    assert not np.array_equal(together[0][0].rollout.action, together[1][0].rollout.action)


@pytest.mark.parametrize("steps", [37, 64, 96])  # a prime, whole calls, and calls that are not the longest ones
def test_any_number_of_steps_is_scanned_whole(steps):
    case = CASES["catch"]._replace(steps=steps, rollouts=1)
    assert_same(collect("stepped", case), collect("scanned", case))


class CountingStop(Stop):
    """Counts how often the collector looked."""

    looks = 0

    def check(self) -> None:
        self.looks += 1
        super().check()


@pytest.mark.parametrize("name", COLLECTORS)
def test_a_long_rollout_ends_soon_after_the_run_does(name):
    case = CASES["cartpole"]._replace(steps=1_000_000, envs=2)
    stop = CountingStop()
    collector = make(name, case, stop)
    collector.restart(environments(case, 0))
    ended: list[BaseException] = []

    def run() -> None:
        try:
            collector(prepare(case)[2], action_numbers(1, 0, 1), Times())
        except BaseException as error:
            ended.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    deadline = time.monotonic() + 300
    while stop.looks < 10 and thread.is_alive() and time.monotonic() < deadline:  # compiled, and under way
        time.sleep(0.01)
    assert stop.looks >= 10 and thread.is_alive()
    asked = time.monotonic()
    stop()
    thread.join(30 * CROWD)
    assert not thread.is_alive()
    assert time.monotonic() - asked < 5 * CROWD
    assert isinstance(ended[0], Closed)
    collector.close()


@pytest.mark.parametrize("name", COLLECTORS)
def test_a_closed_collector_holds_no_environments(name):
    """Those of the next epoch may need their memory."""
    collector = make(name, CASES["catch"])
    envs = environments(CASES["catch"], 0)
    collector.restart(envs)
    held = weakref.ref(envs)
    del envs
    collector.close()
    gc.collect()
    assert held() is None


def test_a_collector_that_was_told_to_stop_does_not_begin():
    for name in COLLECTORS:
        stop = Stop()
        collector = make(name, CASES["catch"], stop)
        collector.restart(environments(CASES["catch"], 0))
        stop()
        with pytest.raises(Closed):
            collector(prepare(CASES["catch"])[2], action_numbers(1, 0, 1), Times())
        collector.close()


def test_numbers_that_are_not_finite_are_named_by_environment_step_and_field():
    finite_check = FiniteCheck("Odd-v0", first_env=8)
    obs = {"image": jnp.zeros((4, 3, 2), jnp.uint8), "x": jnp.zeros((4, 3, 2))}
    reward, valid = np.zeros((3, 3), np.float32), np.ones((3, 3), bool)
    finite_check.check(1, obs, reward, valid)
    holed = obs | {"x": obs["x"].at[2, 1, 1].set(jnp.nan).at[3, 0, 0].set(jnp.inf)}
    with pytest.raises(NotFinite, match=r"environment 9 of Odd-v0: .*\['x'\]\[1\] after step 2 of rollout 7 is nan"):
        finite_check.check(7, holed, reward, valid)
    holed = obs | {"x": obs["x"].astype(jnp.bfloat16).at[0, 2, 0].set(-jnp.inf)}
    with pytest.raises(NotFinite, match=r"environment 10 .* before the first step of rollout 7 is -inf"):
        finite_check.check(7, holed, reward, valid)
    reward[2, 0] = np.inf
    with pytest.raises(NotFinite, match="environment 8 of Odd-v0: the reward of step 3 of rollout 7 is inf"):
        finite_check.check(7, obs, reward, valid)
    valid[2, 0] = False  # what is paid where an action is ignored is of no episode
    finite_check.check(7, obs, reward, valid)


@pytest.mark.parametrize(
    "env_id, options, where",
    [
        ("odd:Rotten-v0", ("--env-workers", "0"), r"the observation\['x'\]\[1\] after step 3 of rollout 1 is nan"),
        ("jax:odd:Bankrupt", ("--env-options", "size=2"), "the reward of step 5 of rollout 1 is inf"),
    ],
    ids=COLLECTORS,
)
def test_an_environment_whose_numbers_are_not_finite_ends_the_run(env_id, options, where, tmp_path):
    flags = (*TINY, "--env-id", env_id, *options)
    ended = command("ppo", *flags, "--run-dir", tmp_path / "run")
    assert ended.code == 1 and "Traceback" not in ended.err, ended
    assert re.search(rf"cleanba: environment [04] of {env_id}: {where}, which is not a finite number", ended.err)
    assert "goes on after" not in ended.out and "starts again" not in ended.out, "it would come to the same number"
    assert read_result(tmp_path / "run")["status"] == "failed"
