"""DQN against slow versions of its equations, its schedules against arithmetic, its bits against its placement."""

import dataclasses
import itertools
import signal
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from launch import ROOT, command, digests, finish, finished, in_pairs, python, read_result, same_arrays
from scripted import CELLS, LEFT_PAYS, RIGHT_PAYS, Corridors

from cleanba import launch
from cleanba.algorithms import dqn
from cleanba.algorithms.dqn import DQN
from cleanba.algorithms.gradient_steps import REPLAY_FILLED
from cleanba.config import Partition, check_values
from cleanba.errors import UsageError
from cleanba.ops import replay
from cleanba.recipes import RECIPES
from cleanba.resolution import resolve
from cleanba.rollout import Rollout
from cleanba.specs import EnvSpec, ObsSpec, choice

T, B, FEATURES, ACTIONS = 12, 3, 4, 3
SPEC = EnvSpec("Test-v0", ObsSpec("vector", (FEATURES,), "float32"), choice(ACTIONS), False, False, {})


def experiment(**changes) -> DQN:
    sizes = dict(num_envs=B, num_actors=1, num_shards=1, num_steps=T, hiddens=(8,), total_timesteps=100 * B * T)
    learning = dict(buffer_size=120, learning_starts=0, batch_size=16, train_frequency=B * T, gamma=0.9)
    return DQN(**sizes | learning | changes)


def random_rollout(seed: int = 0) -> Rollout:
    """One shard's steps, with terminations, truncations and the ignored steps after them.  Leaves [T(+1), B, ...]."""
    rng = np.random.default_rng(seed)
    terminated, truncated, valid = (np.zeros((T, B), bool) for _ in range(3))
    first = np.zeros((T + 1, B), bool)
    first[0] = True
    done = np.zeros(B, bool)
    for t in range(T):
        valid[t] = ~done
        first[t + 1] = done
        kind = rng.random(B)
        terminated[t], truncated[t] = (kind < 0.15) & ~done, (kind > 0.85) & ~done
        done = terminated[t] | truncated[t]
    obs = rng.normal(size=(T + 1, B, FEATURES)).astype(np.float32)
    action = rng.integers(0, ACTIONS, (T, B)).astype(np.int32)
    reward = np.where(valid, rng.normal(size=(T, B)), 0).astype(np.float32)
    return Rollout(obs, first, action, reward, terminated, truncated, valid, {}, ())


def slow_losses(e: DQN, values, target_values, rollout: Rollout, starts) -> np.ndarray:
    """Loss, value and error of the transitions that begin at these (t, b), one by one.  [N, 3]."""
    found = []
    for t, b in starts:
        ret, m = 0.0, 0
        while True:
            ret += e.gamma**m * float(rollout.reward[t + m, b])
            m += 1
            if rollout.terminated[t + m - 1, b] or rollout.truncated[t + m - 1, b] or m == e.n_step:
                break
        after = rollout.obs[t + m, b]
        best = int(np.argmax((values if e.double else target_values)(after)))
        future = 0.0 if rollout.terminated[t + m - 1, b] else float(target_values(after)[best])
        value = float(values(rollout.obs[t, b])[rollout.action[t, b]])
        error = value - (ret + e.gamma**m * future)
        huber = 0.5 * error**2 if abs(error) <= 1 else abs(error) - 0.5
        found.append((huber if e.huber else 0.5 * error**2, value, error))
    return np.array(found)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"double": True},
        {"n_step": 3},
        {"huber": True},
        {"double": True, "n_step": 5, "huber": True, "dueling": True},
        {"prioritised": True, "double": True, "n_step": 3},
    ],
    ids=str,
)
def test_the_loss_is_the_papers(changes, on_devices):
    e = experiment(**changes)
    algorithm, rollout = dqn.make(e, SPEC, "cpu"), random_rollout()
    state = algorithm.init(jax.random.key(0))
    other = algorithm.init(jax.random.key(1))
    # Values of some size, and a target network of its own.
    louder = lambda params: jax.tree.map(lambda x: 2 * x, params)
    state = state._replace(online=state.online._replace(params=louder(state.online.params)), target=other.online.params)
    memory = jax.tree.map(lambda x: x[None], algorithm.init_memory(rollout))
    one = jax.tree.map(lambda x: x[None], rollout)
    key, zero = jax.random.key(7), jnp.int32(0)
    if e.prioritised:  # priorities of an update before this one
        written = replay.write_prioritised(memory, one, e.n_step)
        old = written.priorities.values[0].reshape(-1)
        new = jnp.where(old > 0, 500 * (1 + jnp.arange(old.size, dtype=jnp.uint32)), 0)
        changed = replay.replace(written.priorities, zero, jnp.arange(old.size), old, new, old > 0)
        written = memory = written._replace(priorities=changed)
    run = lambda shards, state, memory, rollout: algorithm.update(state, memory, rollout, shards, key)
    with pytest.MonkeyPatch.context() as patch:
        if e.prioritised:
            patch.setattr(replay, "write_prioritised", lambda memory, *_: memory)
        after, learnt_from, metrics = on_devices(run, 1, 1, optimise=False)(state, memory, one)

    shard_key = jax.random.fold_in(jax.random.fold_in(key, 0), 0)
    weight = 1.0
    if e.prioritised:
        found = replay.draw(written.priorities, zero, replay.random_words(shard_key, e.batch_size))
        drawn = replay.transitions_at(written, zero, found)
        share = np.asarray(new)[np.asarray(found.place)] / np.asarray(new).sum() * (np.asarray(new) > 0).sum()
        weight = share**-0.4 / (share**-0.4).max()
    else:
        drawn = replay.sample_indices(replay.write(memory, one), zero, shard_key, e.batch_size, e.n_step)
    assert bool(drawn.valid.all())
    starts = list(zip(np.asarray(drawn.row).tolist(), np.asarray(drawn.env).tolist(), strict=True))
    assert all(rollout.valid[t, b] for t, b in starts) and len(set(starts)) > 5
    values = lambda params: (
        lambda obs: np.asarray(algorithm.inspect(dqn.ActingParams(params, 0), (), obs[None], None)["action value"][0])
    )
    losses = slow_losses(e, values(state.online.params), values(state.target), rollout, starts)
    expected = (losses[:, 0] * weight).mean(), losses[:, 1].mean()  # the mean action value is not weighted
    got = float(metrics["losses/td_loss"]), float(metrics["losses/q_values"])
    np.testing.assert_allclose(got, expected, rtol=2e-5)
    assert int(after.online.optimiser.count) == 1
    assert not same_arrays(after.online.params, state.online.params)
    if e.prioritised:
        np.testing.assert_allclose(metrics["losses/importance_weight"], weight.mean(), rtol=1e-5)
        priority = np.asarray(learnt_from.priorities.values[0]).reshape(-1)[np.asarray(found.place)]
        np.testing.assert_allclose(priority, 4096 * np.abs(losses[:, 2]) ** 0.6, rtol=1e-4, atol=1)
        others = np.setdiff1d(np.arange(old.size), np.asarray(found.place))
        assert same_arrays(learnt_from.priorities.values[0].reshape(-1)[others], new[others])


@pytest.mark.parametrize("changes", [{}, {"double": True, "dueling": True}, {"prioritised": True}], ids=str)
def test_values_converge_to_the_known_ones(changes):
    """In a corridor with a reward at both ends.  Most episodes are truncated before an end, which must not matter."""
    known = np.zeros((CELLS, 2))
    for _ in range(100):  # value iteration
        best = known.max(1)
        known[:, 0] = 0.8 * np.concatenate([[LEFT_PAYS / 0.8], best[:-1]])
        known[:, 1] = 0.8 * np.concatenate([best[1:], [RIGHT_PAYS / 0.8]])
    assert known[0, 0] < known[0, 1] and known[0, 0] == LEFT_PAYS  # it is worth while to walk to the other end
    sizes = dict(num_envs=16, num_actors=1, num_shards=1, num_steps=8, hiddens=(32,), gamma=0.8, end_e=1.0)
    learning = dict(buffer_size=2000, batch_size=64, train_frequency=4, learning_starts=500, learning_rate=3e-3)
    e = DQN(**sizes, **learning, **changes, anneal_lr=True, target_network_frequency=100, total_timesteps=6400)
    record = finished(e, spec=Corridors.spec, make_envs=Corridors, recipe=dqn)
    algorithm = dqn.make(e, Corridors.spec, "cpu")
    acting = algorithm.actor_params(record.state)
    found = algorithm.inspect(acting, (), jnp.eye(CELLS), jnp.zeros(CELLS, bool))["action value"]
    np.testing.assert_allclose(found, known, atol=0.02)


# --------------------------------------------------------------------------------------------------------- schedules

CATCH = dict(env_id="Catch-v0", num_envs=4, num_actors=2, num_shards=1, num_steps=8, hiddens=(16,), seed=3)
LEARN = dict(buffer_size=512, batch_size=16, train_frequency=4, total_timesteps=320, learning_starts=96)
LEARN |= dict(start_e=0.9, end_e=0.1, exploration_fraction=0.5)


@cache
def run(**changes):
    return finished(DQN(**CATCH | LEARN | changes), recipe=dqn)


def test_gradient_steps_are_those_that_the_steps_paid_for():
    """Ten updates of 32 steps: the first two only fill the memory, the others take eight gradient steps each."""
    record = run()
    assert int(record.state.online.optimiser.count) == 8 * 8
    assert ["losses/td_loss" in row for row in record.rows] == [False, False] + [True] * 8
    assert all(row["losses/td_loss"] > 0 for row in record.rows[2:])
    assert record.result["policy_lag"] == 1
    assert [row.get(REPLAY_FILLED) for row in record.rows] == [None, None] + [1.0] * 8


def test_batches_with_few_valid_transitions_are_reported(on_devices):
    """Of ten rows of memory nine were ignored: each of an element's eight draws finds one with probability 1/10."""
    e = experiment(num_steps=20, batch_size=512, train_frequency=20 * B, buffer_size=1200)
    algorithm, never = dqn.make(e, SPEC, "cpu"), np.zeros((20, B), bool)
    rollout = Rollout(
        np.zeros((21, B, FEATURES), np.float32), np.zeros((21, B), bool), np.zeros((20, B), np.int32),
        np.zeros((20, B), np.float32), never, never, never | (np.arange(20)[:, None] % 10 == 0), {}, (),
    )  # fmt: skip
    memory, one = jax.tree.map(lambda x: x[None], (algorithm.init_memory(rollout), rollout))
    learn = lambda shards, *args: algorithm.update(*args, shards, jax.random.key(7))[2]
    metrics = on_devices(learn, 1, 1)(algorithm.init(jax.random.key(0)), memory, one)
    assert metrics[REPLAY_FILLED] == pytest.approx(1 - 0.9**8, abs=0.08)


@pytest.mark.parametrize("tau", [1.0, 0.25])
def test_the_target_network_moves_when_it_is_due(tau):
    still = run(target_network_frequency=10_000).state
    assert same_arrays(still.target, run(learning_starts=320, target_network_frequency=10_000).state.target)
    assert not same_arrays(still.target, still.online.params)
    # 64 gradient steps of four environment steps make 256: due once, at the last of them.
    once = run(target_network_frequency=256, tau=tau).state
    blend = jax.tree.map(lambda p, q: tau * p + (1 - tau) * q, once.online.params, still.target)
    for x, y in zip(jax.tree.leaves(once.target), jax.tree.leaves(blend), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-6, atol=1e-7)
    assert int(once.since_target) == 0


def test_exploration_falls_linearly_with_the_policys_version():
    expected = [max(0.1, 0.9 - 0.8 * updates / 5) for updates in range(10)]
    np.testing.assert_allclose(run().column("charts/epsilon"), expected, rtol=1e-6)
    algorithm = dqn.make(DQN(**CATCH | LEARN), SPEC, "cpu")
    params = algorithm.init(jax.random.key(0)).online.params
    obs = np.random.default_rng(0).normal(size=(4000, FEATURES)).astype(np.float32)
    act = lambda updates, explore: algorithm.act(
        dqn.ActingParams(params, updates), (), obs, None, jax.random.key(2), explore
    )[0]
    best = act(jnp.int32(0), False)
    assert same_arrays(best, algorithm.inspect(dqn.ActingParams(params, 0), (), obs, None)["action value"].argmax(-1))
    for updates, epsilon in ((0, 0.9), (5, 0.1), (100, 0.1)):
        differ = float((act(updates, True) != best).mean())
        assert abs(differ - epsilon * (ACTIONS - 1) / ACTIONS) < 0.03


# --------------------------------------------------------------------------------------------------------- placements


@pytest.mark.parametrize("prioritised", [False, True])
def test_the_same_bits_on_any_devices(prioritised):
    sizes = dict(
        prioritised=prioritised, num_envs=12, num_actors=6, num_shards=6, batch_size=24, buffer_size=600, env_epoch=4
    )
    e = DQN(**CATCH | LEARN | sizes | {"total_timesteps": 960})
    reference = digests(e, recipe=dqn)
    assert len(reference) > 1
    for actors, learners in (([0, 1], [2, 3, 4, 5]), ([7], [0, 1, 2, 3, 4, 5])):
        assert digests(e, actors, learners, recipe=dqn) == reference


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["dqn --prioritised", "r2d2 --lstm-size 16 --burn-in 4 --sequence-length 8"])
def test_of_two_processes_one_is_killed_and_one_alone_goes_on_to_the_same_bits(algorithm, tmp_path):
    words = f"{algorithm} --env-id Catch-v0 --num-envs 8 --num-actors 2 --num-shards 2 --num-steps 8 --hiddens 16"
    words += " --total-timesteps 1280 --learning-starts 128 --buffer-size 512 --batch-size 16 --train-frequency 4"
    words += " --env-epoch 8 --checkpoint-frequency 5 --log-frequency 1 --run-dir"
    whole, run = tmp_path / "whole", tmp_path / "run"
    assert command(*words.split(), whole).code == 0
    first, second = in_pairs([*words.split(), run])
    # It dies while the checkpoint of update 15 is written; that of update 10 is complete by then on any disk.
    both = [python("-m", "cleanba", *first), python(ROOT / "tests" / "killed.py", "memory", "3", *second)]
    assert finish(both[1]).code == -signal.SIGKILL
    ended = finish(both[0])
    assert ended.code == 1 and "process 1 of 2 died" in ended.err, ended
    ended = command(*words.split(), run)
    assert ended.code == 0 and "resuming after update 10" in ended.out, ended
    for key in ("params_digest", "learner_digest"):
        assert read_result(run)[key] == read_result(whole)[key]


def test_frames_of_images_are_stored_once():
    e = DQN(
        env_id="Breakout-v5", num_envs=2, num_actors=1, num_shards=1, num_steps=4, network="nature", hiddens=(16,),
        buffer_size=200, batch_size=4, train_frequency=4, total_timesteps=40, learning_starts=8, episodic_life=True,
    )  # fmt: skip
    record = finished(e, recipe=dqn)
    assert record.result["update"] == 5
    algorithm = dqn.make(e, dataclasses_spec(), "cpu")
    like = jax.eval_shape(lambda: algorithm.init_memory(image_rollout(e)))
    assert like.rows.obs.shape == (100, 2, 1, 84, 84)


def dataclasses_spec() -> EnvSpec:
    return EnvSpec("Breakout-v5", ObsSpec("image", (4, 84, 84), "uint8"), choice(4), True, True, {})


def image_rollout(e: DQN) -> Rollout:
    flag = np.zeros((e.num_steps, e.num_envs), bool)
    obs = np.zeros((e.num_steps + 1, e.num_envs, 4, 84, 84), np.uint8)
    number = np.zeros((e.num_steps, e.num_envs), np.int32)
    return Rollout(obs, obs[..., 0, 0, 0] > 0, number, number.astype(np.float32), flag, flag, flag, {}, ())


# -------------------------------------------------------------------------------------------------------------- flags


def test_defaults_are_those_of_the_kind_of_environment():
    atari, other = (resolve(RECIPES["dqn"], {"env_id": name}, "cpu").experiment for name in ("Pong-v5", "CartPole-v1"))
    assert (atari.buffer_size, atari.batch_size, atari.train_frequency, atari.end_e) == (1_000_000, 32, 4, 0.01)
    assert (other.buffer_size, other.batch_size, other.train_frequency, other.end_e) == (250_000, 128, 4, 0.05)
    assert resolve(RECIPES["dqn"], {"env_id": "Pong-v5", "batch_size": 64}, "cpu").experiment.batch_size == 64


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"train_frequency": 7}, "try --train-frequency 6 or 9"),
        ({"batch_size": 15, "num_shards": 2, "num_envs": 4}, "try --batch-size 14 or 16"),
        ({"tau": 0.0}, "set --tau above 0"),
        ({"buffer_size": 39}, "try --buffer-size 42 or more"),
        ({"end_e": 1.5}, "--end-e"),
        ({"train_frequency": 50}, "try --train-frequency 18 or 36, or --num-steps 50 or"),
        ({"learning_starts": 10**6}, "try --learning-starts 720, or --total-timesteps 5000040"),
        ({"learning_starts": 361, "total_timesteps": 380}, "beyond the run's 360 steps"),
        ({"batch_size": 121}, "batch_size=121 is more than the 120 steps that buffer_size holds"),
        ({"n_step": 0}, "--n-step"),
        ({"priority_exponent": 1.5}, "--priority-exponent"),
        ({"importance_exponent": 0.5}, "add --prioritised, or leave --importance-exponent out"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_what_does_not_fit_is_refused(changes, words):
    e = experiment(**changes)
    with pytest.raises(UsageError, match=words):
        check_values(e)
        dqn.check(e, Partition(e.num_envs, 1, e.num_shards))


def test_the_command_trains_plays_and_goes_on(tmp_path, monkeypatch):
    monkeypatch.setattr(launch, "SPARSE", 1.1)  # full batches are too few, then
    flags = [f"--{f.name.replace('_', '-')}" for f in dataclasses.fields(DQN)]
    values = CATCH | LEARN | {"env_id": "CartPole-v1"}
    words = list(itertools.chain(*[[flag, str(*v) if isinstance(v, tuple) else str(v)] for flag in flags
                                   if (v := values.get(flag[2:].replace("-", "_"))) is not None]))  # fmt: skip
    ended = command("dqn", *words, "--run-dir", tmp_path / "run", "--log-frequency", "1")
    assert ended.code == 0, ended.err
    assert ended.out.count("warning: replay fills 100% of a batch on average") == 1
    played = command("eval", tmp_path / "run", "--episodes", "3", "--video")
    assert played.code == 0 and "dqn on CartPole-v1" in played.out and "random with probability 0.05" in played.out, (
        played.err
    )
    assert "is finished; nothing to do" in command("resume", tmp_path / "run").out
