"""Promise 1: the same experiment ends in the same bits wherever it is placed."""

import functools
import json
import re
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from launch import ROOT, Ended, digests, finish, python, typed_digests
from ports import free_address
from test_pages import PLACEMENT, run_commands

from cleanba.algorithms.ppo import PPO
from cleanba.runtime.collect import SteppedCollector
from cleanba.shards import ShardAxis

MLP = dict(num_actors=4, num_shards=8, num_minibatches=2, hiddens=(16,), env_epoch=2, collector="stepped")
MLP |= dict(env_id="Catch-v0", num_envs=48, num_steps=8, update_epochs=2, total_timesteps=4 * 48 * 8)
PLACEMENTS = {  # of one process
    "a0-l0,1": ([0], [0, 1]),
    "a0-l1,2,3": ([0], [1, 2, 3]),  # 3, 3 and 2 shards
    "a0,1-l2,3": ([0, 1], [2, 3]),
    "a0-l1,2,3,4": ([0], [1, 2, 3, 4]),
}
SEVERAL = {  # processes, what each of them has, and whether it acts while it learns
    "2 x a0-l0,1,2": (2, [0], [0, 1, 2], False),  # 2, 1 and 1 shards
    "2 x a0,1-l0,1": (2, [0, 1], [0, 1], True),
    "4 x a0-l0": (4, [0], [0], True),
}


@functools.cache
def reference(concurrency: bool) -> dict[int, str]:
    """The digests on one device that acts and learns: a0-l0."""
    return digests(PPO(**MLP, concurrency=concurrency))


MODES = [pytest.param(True, id="concurrent"), pytest.param(False, id="alternating")]


@pytest.mark.parametrize("concurrency", MODES)
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_one_process_gives_the_same_bits_on_any_devices(placement, concurrency):
    actors, learners = PLACEMENTS[placement]
    assert digests(PPO(**MLP, concurrency=concurrency), actors, learners) == reference(concurrency)


def test_memory_and_actors_of_several_shards_give_the_same_bits_too():
    fields = {**MLP, "num_actors": 2, "num_shards": 6, "core": "lstm", "lstm_size": 8}
    e = PPO(**fields, max_episode_steps=5)
    assert digests(e, [0, 1], [2, 3, 4, 5, 6, 7]) == digests(e)


# ---------------------------------------------------------------------------------------------------- several processes


@pytest.fixture(scope="module")
def run_processes(request, tmp_path_factory):
    """run_processes(n, which) -> what each of n processes found in that run.  Runs of n processes share one start."""
    tests = {item.name for item in request.session.items}  # of which --exhaustive has more

    @functools.cache
    def run(processes: int) -> tuple[list[tuple], list[Path], list[Ended]]:
        asked = lambda placement: f"{test_several_processes_give_the_same_bits.__name__}[{placement}]" in tests
        runs: list[tuple] = [(p,) for p, has in SEVERAL.items() if has[0] == processes and asked(p)]
        words: list[tuple] = [({**MLP, "concurrency": SEVERAL[p][3]}, *SEVERAL[p][1:3]) for (p,) in runs]
        if processes == 2:
            runs.append((TWO_OF_THREE, "impala"))
            words.append(("impala", [*DEFAULTS, *ON_TWO_OF_THREE]))
        script, address = Path(__file__).with_name("placements.py"), free_address()
        results = [tmp_path_factory.mktemp("processes") / "results" for _ in range(processes)]
        started = [
            python(script, address, str(processes), str(i), json.dumps(words), file, JAX_NUM_CPU_DEVICES="4")
            for i, file in enumerate(results)
        ]
        return runs, results, [finish(process, 600) for process in started]

    def digests_of(processes: int, *which: object) -> list[dict[int, str]]:
        """What each process found in a run."""
        runs, results, ended = run(processes)
        assert [e.code for e in ended] == [0] * processes, "\n".join(e.err for e in ended)
        line = runs.index(which)
        return [{int(k): v for k, v in json.loads(file.read_text().splitlines()[line]).items()} for file in results]

    return digests_of


@pytest.mark.slow
@pytest.mark.parametrize("placement", SEVERAL)
def test_several_processes_give_the_same_bits(placement, run_processes):
    processes, *_, concurrency = SEVERAL[placement]
    assert run_processes(processes, placement) == [reference(concurrency)] * processes


# ------------------------------------------------------------------------------------------------ the README's commands

# Neither --num-shards, --num-actors nor --collector: their defaults must not depend on the devices.
ALGORITHMS = ("ppo", "impala")
DEFAULTS = ["--env-id", "Breakout-v5", "--network", "nature", "--hiddens", "16"]
DEFAULTS += ["--num-envs", "24", "--num-steps", "4", "--total-timesteps", "288"]
LINE = re.compile(r"^cleanba ppo \$S (.+?) *# (a0-l[\d,]+)", re.MULTILINE)
TYPED = {name: words.split() for words, name in LINE.findall((ROOT / "README.md").read_text())}
TWO_OF_THREE = "a0-l1,2,3-d2"
ON_TWO_OF_THREE = ["--actor-device-ids", "0", "--learner-device-ids", "1", "2", "3"]


@functools.cache
def typed_reference(algorithm: str) -> dict[int, str]:
    return typed_digests(algorithm, [*DEFAULTS, *TYPED["a0-l0"]])


def test_the_readme_has_six_placements():
    assert list(TYPED) == ["a0-l0", "a0-l0,1", "a0-l1,2", "a0-l1,2,3", "a0-l1,2,3,4", "a0-l1,2,3,4,5,6"]


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("placement", [p for p in TYPED if p != "a0-l0"])
def test_the_readmes_placements_are_one_experiment(placement, algorithm):
    assert typed_digests(algorithm, [*DEFAULTS, *TYPED[placement]]) == typed_reference(algorithm)


@pytest.mark.slow
def test_the_same_command_in_two_processes_is_the_same_experiment(run_processes):
    assert run_processes(2, TWO_OF_THREE, "impala") == [typed_reference("impala")] * 2


@pytest.mark.slow
def test_the_page_on_placement_shows_the_same_bits(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run_commands(ROOT / PLACEMENT, tmp_path, {}, exhaustive=True)


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
    final = digests(PPO(**MLP | change))[4]
    assert final != reference(True)[4]


def test_the_same_experiment_gives_the_same_bits_again():
    again = digests(PPO(**MLP))
    assert again == reference(True)
    assert list(again) == [2, 4] and again[2] != again[4]  # at every checkpoint


# ------------------------------------------------------------------------------------------ broken on purpose, and seen


def broken_digests() -> tuple[str, str]:
    """At the end, on one device and on two."""
    e = PPO(**MLP)
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
