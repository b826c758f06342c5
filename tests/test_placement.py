"""Promise 1: the same experiment ends in the same bits wherever it is placed."""

import functools
import json
import socket
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from launch import TINY, command, digest, finish, python, read_result, read_rows

import cleanba.runtime.learner
from cleanba.ppo import PPO
from cleanba.runtime.collect import SteppedCollector
from cleanba.shards import ShardAxis

COMMON = dict(num_actors=4, num_shards=4, num_minibatches=2, hiddens=(16,), checkpoint_frequency=2, collector="stepped")
EXPERIMENTS = {
    "mlp": dict(COMMON, env_id="Catch-v0", num_envs=48, num_steps=8, update_epochs=2, total_timesteps=4 * 48 * 8),
    "nature": dict(
        COMMON, env_id="Breakout-v5", network="nature", num_envs=16, num_steps=4, update_epochs=1, total_timesteps=3 * 64
    ),
}
PLACEMENTS = {  # of one process
    "a0-l0,1": ([0], [0, 1]),
    "a0-l1,2": ([0], [1, 2]),
    "a0,1-l2,3": ([0, 1], [2, 3]),
    "a0-l1,2,3,4": ([0], [1, 2, 3, 4]),
}
SEVERAL = {  # processes, and what each of them has
    "2 x a0-l1": (2, [0], [1]),
    "2 x a0-l1,2": (2, [0], [1, 2]),
    "2 x a0,1-l0,1": (2, [0, 1], [0, 1]),
    "4 x a0-l0": (4, [0], [0]),
}


@functools.cache
def reference(network: str, concurrency: bool) -> str:
    """The digest on one device that acts and learns: a0-l0."""
    return digest(PPO(**EXPERIMENTS[network], concurrency=concurrency))


@pytest.mark.parametrize("network", EXPERIMENTS)
@pytest.mark.parametrize("concurrency", [True, False], ids=["concurrent", "alternating"])
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_one_process_gives_the_same_bits_on_any_devices(placement, concurrency, network):
    actors, learners = PLACEMENTS[placement]
    e = PPO(**EXPERIMENTS[network], concurrency=concurrency)
    assert digest(e, actors, learners) == reference(network, concurrency)


@pytest.mark.parametrize("devices", [([0, 1], [2, 3, 4]), ([0], [1, 2, 3, 4, 5, 6])], ids=["a0,1-l2,3,4", "a0-l1,...,6"])
def test_memory_and_actors_of_several_shards_give_the_same_bits_too(devices):
    fields = {**EXPERIMENTS["mlp"], "num_actors": 2, "num_shards": 6, "core": "lstm", "lstm_size": 8}
    one = PPO(**fields, max_episode_steps=5)
    assert digest(one, *devices) == digest(one)


# ------------------------------------------------------------------------------------------------------ several processes


def free_address() -> str:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{s.getsockname()[1]}"


@functools.cache
def digests_of_processes(processes: int) -> dict[tuple[str, bool, str], list[str]]:
    """(network, concurrency, placement) -> what each process ended with.  All runs share one start of the processes."""
    names = [
        (network, concurrency, placement)
        for network in EXPERIMENTS
        for concurrency in (True, False)
        for placement, (count, *_) in SEVERAL.items()
        if count == processes
    ]
    runs = [[{**EXPERIMENTS[n], "concurrency": c}, *SEVERAL[p][1:]] for n, c, p in names]
    script, address = Path(__file__).with_name("placements.py"), free_address()
    started = [
        python(script, address, str(processes), str(i), json.dumps(runs), JAX_NUM_CPU_DEVICES="3")
        for i in range(processes)
    ]
    try:
        ended = [finish(process, 240) for process in started]
    finally:
        for process in started:
            process.kill()
    assert all(e.code == 0 for e in ended), "\n".join(e.err for e in ended)
    lines = [e.out.split() for e in ended]
    return {name: list(digests) for name, *digests in zip(names, *lines, strict=True)}


@pytest.mark.parametrize("network", EXPERIMENTS)
@pytest.mark.parametrize("concurrency", [True, False], ids=["concurrent", "alternating"])
@pytest.mark.parametrize("placement", SEVERAL)
def test_several_processes_give_the_same_bits(placement, concurrency, network):
    processes = SEVERAL[placement][0]
    digests = digests_of_processes(processes)[network, concurrency, placement]
    assert digests == [reference(network, concurrency)] * processes


# ----------------------------------------------------------------------------------------------- what the digest can tell


@pytest.mark.parametrize(
    "change",
    [
        {"seed": 2},
        {"num_shards": 2},
        {"num_actors": 2},
        {"num_envs": 24, "total_timesteps": 2 * 48 * 8},  # as many updates
        {"checkpoint_frequency": 0},
        {"concurrency": False},
    ],
    ids=lambda change: "-".join(change),
)
def test_another_experiment_gives_other_bits(change):
    assert digest(PPO(**EXPERIMENTS["mlp"] | change)) != reference("mlp", True)


def test_the_same_experiment_gives_the_same_bits_again():
    assert digest(PPO(**EXPERIMENTS["mlp"])) == reference("mlp", True)


def test_metrics_have_the_digest_at_every_checkpoint_on_every_placement(tmp_path):
    flags = [*TINY, "--num-shards", "2", "--checkpoint-frequency", "2"]
    here, there = tmp_path / "here", tmp_path / "there"
    assert command("ppo", *flags, "--run-dir", here).code == 0
    assert command("ppo", *flags, "--run-dir", there, "--actor-device-ids", "2", "--learner-device-ids", "0", "1").code == 0
    one, two = (
        {row["update"]: row["params_digest"] for row in read_rows(run) if "params_digest" in row} for run in (here, there)
    )
    assert list(one) == [2, 4, 5] and len(set(one.values())) == 3
    assert one == two
    assert read_result(here)["params_digest"] == read_result(there)["params_digest"] == one[5]


# -------------------------------------------------------------------------------------------- broken on purpose, and seen


def broken_digests() -> tuple[str, str]:
    """On one device and on two."""
    e = PPO(**EXPERIMENTS["mlp"])
    return digest(e, [0], [0]), digest(e, [1], [2, 3])


def test_a_sum_in_an_order_of_its_own_is_seen(monkeypatch):
    def unordered(self, tree):
        return jax.tree.map(lambda x: jax.lax.psum(x.sum(0), self.mesh_axis), tree)

    monkeypatch.setattr(ShardAxis, "sum", unordered)
    one, two = broken_digests()
    assert one != two


def test_minibatches_drawn_by_the_number_of_the_device_are_seen(monkeypatch):
    def by_device(num_shards, index, always, mesh_axis):
        return ShardAxis(num_shards, jnp.full_like(index, jax.lax.axis_index(mesh_axis)), always, mesh_axis)

    monkeypatch.setattr(cleanba.runtime.learner, "ShardAxis", by_device)
    one, two = broken_digests()
    assert one != two


def test_actions_drawn_by_the_number_of_the_device_are_seen(monkeypatch):
    collect = SteppedCollector.__call__

    def by_device(self, params, key, times):
        return collect(self, params, jax.random.fold_in(key, self.device.id), times)

    monkeypatch.setattr(SteppedCollector, "__call__", by_device)
    one, two = broken_digests()
    assert one != two
