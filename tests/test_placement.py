"""Promise 1: the same experiment ends in the same bits wherever it is placed."""

import functools
import json
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from launch import Ended, digests, finish, python
from ports import free_address

from cleanba.algorithms.ppo import PPO
from cleanba.runtime.collect import SteppedCollector
from cleanba.shards import ShardAxis

COMMON = dict(num_actors=4, num_shards=8, num_minibatches=2, hiddens=(16,), env_epoch=2, collector="stepped")
EXPERIMENTS = {
    "mlp": dict(COMMON, env_id="Catch-v0", num_envs=48, num_steps=8, update_epochs=2, total_timesteps=4 * 48 * 8),
    "nature": dict(
        COMMON,
        env_id="Breakout-v5",
        network="nature",
        num_envs=16,
        num_steps=4,
        update_epochs=1,
        total_timesteps=3 * 64,
    ),
}
PLACEMENTS = {  # of one process
    "a0-l0,1": ([0], [0, 1]),
    "a0-l1,2,3": ([0], [1, 2, 3]),  # 3, 3 and 2 shards
    "a0,1-l2,3": ([0, 1], [2, 3]),
    "a0-l1,2,3,4": ([0], [1, 2, 3, 4]),
}
SEVERAL = {  # processes, and what each of them has
    "2 x a0-l1": (2, [0], [1]),
    "2 x a0-l0,1,2": (2, [0], [0, 1, 2]),  # 2, 1 and 1 shards
    "2 x a0,1-l0,1": (2, [0, 1], [0, 1]),
    "4 x a0-l0": (4, [0], [0]),
}


@functools.cache
def reference(network: str, concurrency: bool) -> dict[int, str]:
    """The digests on one device that acts and learns: a0-l0."""
    return digests(PPO(**EXPERIMENTS[network], concurrency=concurrency))


# The modes differ in the schedule, not in what is compiled: for the larger network, one of them has to do.
MODES = [
    pytest.param("mlp", True, id="concurrent-mlp"),
    pytest.param("mlp", False, id="alternating-mlp"),
    pytest.param("nature", True, id="concurrent-nature", marks=pytest.mark.slow),
]


# The larger network takes long to compile, and what placements change does not depend on it: a few have to do.
RUNS = [
    pytest.param(*mode.values, placement, id=f"{placement}-{mode.id}", marks=mode.marks)
    for mode in MODES
    for placement in PLACEMENTS
    if mode.values[0] == "mlp" or placement in ("a0,1-l2,3", "a0-l1,2,3")
]


@pytest.mark.parametrize("network, concurrency, placement", RUNS)
def test_one_process_gives_the_same_bits_on_any_devices(network, concurrency, placement):
    actors, learners = PLACEMENTS[placement]
    e = PPO(**EXPERIMENTS[network], concurrency=concurrency)
    assert digests(e, actors, learners) == reference(network, concurrency)


def test_memory_and_actors_of_several_shards_give_the_same_bits_too():
    fields = {**EXPERIMENTS["mlp"], "num_actors": 2, "num_shards": 6, "core": "lstm", "lstm_size": 8}
    e = PPO(**fields, max_episode_steps=5)
    assert digests(e, [0, 1], [2, 3, 4, 5, 6, 7]) == digests(e)


# ---------------------------------------------------------------------------------------------------- several processes


RUNS_OF_PROCESSES = [
    pytest.param(*mode.values, placement, id=f"{placement}-{mode.id}")
    for mode in MODES
    for placement in SEVERAL
    if mode.values[0] == "mlp" or placement == "2 x a0,1-l0,1"
]


@pytest.fixture(scope="module")
def run_processes(tmp_path_factory):
    """run_processes(n) -> every run with n processes, their results, and how they ended.  All share one start."""

    @functools.cache
    def run(processes: int) -> tuple[list[tuple], list[Path], list[Ended]]:
        runs = [run.values for run in RUNS_OF_PROCESSES if SEVERAL[run.values[2]][0] == processes]
        words = json.dumps([({**EXPERIMENTS[n], "concurrency": c}, *SEVERAL[p][1:]) for n, c, p in runs])
        script, address = Path(__file__).with_name("placements.py"), free_address()
        results = [tmp_path_factory.mktemp("processes") / "results" for _ in range(processes)]
        started = [
            python(script, address, str(processes), str(i), words, file, JAX_NUM_CPU_DEVICES="3")
            for i, file in enumerate(results)
        ]
        return runs, results, [finish(process, 400) for process in started]

    return run


@pytest.mark.slow
@pytest.mark.parametrize("network, concurrency, placement", RUNS_OF_PROCESSES)
def test_several_processes_give_the_same_bits(network, concurrency, placement, run_processes):
    processes = SEVERAL[placement][0]
    runs, results, ended = run_processes(processes)
    assert [e.code for e in ended] == [0] * processes, "\n".join(e.err for e in ended)
    line = runs.index((network, concurrency, placement))
    found = [{int(k): v for k, v in json.loads(file.read_text().splitlines()[line]).items()} for file in results]
    assert found == [reference(network, concurrency)] * processes


# --------------------------------------------------------------------------------------------- what the digest can tell


@pytest.mark.parametrize(
    "change",
    [
        {"seed": 2},
        {"num_shards": 2},
        {"num_actors": 2},
        {"num_envs": 24, "total_timesteps": 2 * 48 * 8},  # as many updates
        {"env_epoch": 0},
        {"concurrency": False},
    ],
    ids=lambda change: next(iter(change)),
)
def test_another_experiment_gives_other_bits(change):
    final = digests(PPO(**EXPERIMENTS["mlp"] | change))[4]
    assert final != reference("mlp", True)[4]


def test_the_same_experiment_gives_the_same_bits_again():
    again = digests(PPO(**EXPERIMENTS["mlp"]))
    assert again == reference("mlp", True)
    assert list(again) == [2, 4] and again[2] != again[4]  # at every checkpoint


# ------------------------------------------------------------------------------------------ broken on purpose, and seen


def broken_digests() -> tuple[str, str]:
    """At the end, on one device and on two."""
    e = PPO(**EXPERIMENTS["mlp"])
    return digests(e, [0], [0])[4], digests(e, [1], [2, 3])[4]


def test_a_sum_in_an_order_of_its_own_is_seen(monkeypatch):
    def unordered(self, tree):
        return jax.tree.map(lambda x: jax.lax.psum(x.sum(0), self.mesh_axis), tree)

    monkeypatch.setattr(ShardAxis, "sum", unordered)
    one, two = broken_digests()
    assert one != two


def test_minibatches_drawn_by_the_number_of_the_device_are_seen(monkeypatch):
    over = ShardAxis.over

    def by_device(*args):
        axis = over(*args)
        return replace(axis, index=jnp.full_like(axis.index, jax.lax.axis_index(axis.mesh_axis)))

    monkeypatch.setattr(ShardAxis, "over", by_device)
    one, two = broken_digests()
    assert one != two


def test_actions_drawn_by_the_number_of_the_device_are_seen(monkeypatch):
    collect = SteppedCollector.__call__

    def by_device(self, params, numbers, times):
        return collect(self, params, numbers + np.int32([0, self.device.id, 0]), times)

    monkeypatch.setattr(SteppedCollector, "__call__", by_device)
    one, two = broken_digests()
    assert one != two
