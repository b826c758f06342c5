"""Recurrent policies: learning repeats what acting did, nothing leaks between episodes, and memory is put to use."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from launch import digests, finished
from memory import SYMBOLS, Games, MemoryEnvs
from memory import spec as memory_spec
from scripted import Play, ScriptedEnvs, Scripts, spec

from cleanba.algorithms import impala, ppo, pqn
from cleanba.networks import ActorCritic, make_actor_critic
from cleanba.networks.cores import LSTMCarry
from cleanba.rollout import Rollout
from cleanba.runtime.channels import Stop
from cleanba.runtime.collect import SteppedCollector, Times, make_steppers
from cleanba.seeds import action_numbers

RECIPES = {"ppo": (ppo, ppo.PPO), "impala": (impala, impala.IMPALA)}
ALL = RECIPES | {"pqn": (pqn, pqn.PQN)}
LENGTHS = (3, 2, 1, 5)  # environment i plays episodes of LENGTHS[i] steps, and one more is ignored after each
SCRIPTS = [(Play((1.0,) * n, terminated=n % 2 == 1, truncated=n % 2 == 0),) for n in LENGTHS]
B, T, ROLLOUTS = len(LENGTHS), 7, 4


def experiment(name: str, **changes):
    """A few updates of a small LSTM."""
    values = dict(env_id="Scripted-v0", num_envs=B, num_actors=2, num_shards=1, num_steps=T, hiddens=(8,), lstm_size=8)
    values |= dict(core="lstm", num_minibatches=1, env_epoch=0, collector="stepped")
    values |= dict(update_epochs=1) if name != "impala" else {}
    values |= changes
    updates = values.pop("updates", ROLLOUTS)
    return ALL[name][1](**values, total_timesteps=updates * values["num_envs"] * values["num_steps"])


def lively(params):
    """Parameters far from their start, so that the outputs tell one memory from another."""
    return jax.tree.map(lambda p: p + 0.4 * jax.random.normal(jax.random.key(p.size), p.shape), params)


# ---------------------------------------------------------------------------------------------- learning repeats acting


@pytest.fixture(scope="module")
def network() -> ActorCritic:
    return make_actor_critic(spec(), experiment("ppo"))


@pytest.fixture(scope="module")
def params(network):
    return lively(network.initial_params(jax.random.key(3)))


def right(obs, first):
    """When memory is emptied: before the first observation of an episode."""
    return first


def on_done(obs, first):
    """A leak: memory is emptied before the terminal observation, which the next episode then remembers."""
    number, step = obs[..., 1].astype(jnp.int32), obs[..., 3]
    return step == jnp.asarray(LENGTHS)[number]


def never(obs, first):
    """A leak: memory is never emptied."""
    return jnp.zeros_like(first)


def collect(network, params, resets) -> list[Rollout]:
    """Rollouts of the scripted environments, which also say what the network gave while acting."""
    algorithm = ppo.make(experiment("ppo"), spec(), "cpu")

    def act(params, carry, obs, first, key, explore):
        first = resets(obs, first)
        action, after, extras = algorithm.act(params, carry, obs, first, key, explore)
        out = network.outputs(params, obs[None], first[None], carry)
        return action, after, {**extras, "value": out.value[0], "after": after}

    acting = algorithm._replace(act=act)
    collector = SteppedCollector(acting, T, jax.local_devices()[0], Stop(), make_steppers(acting, T, "cpu"))
    collector.restart(ScriptedEnvs(range(B), 0, SCRIPTS))
    return [collector(params, action_numbers(0, 0, i), Times()).rollout for i in range(ROLLOUTS)]


@pytest.fixture(scope="module")
def rollouts(network, params) -> list[Rollout]:
    return collect(network, params, right)


def learnt(network, params, obs, first, carry, action) -> dict:
    """One learning pass over [T, B]: log-probabilities of the recorded actions, values, and the memory at the end."""
    out = jax.jit(network.outputs)(params, obs, first, carry)
    chosen = np.take_along_axis(np.asarray(jax.nn.log_softmax(out.policy.logits)), np.asarray(action)[..., None], -1)
    return {"log_prob": chosen[..., 0], "value": out.value, "carry": out.carry}


def close(a, b, what: str) -> None:
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6, err_msg=what), a, b)


def check_learning_repeats_acting(network, params, rollouts, resets) -> None:
    """The scanned pass over each rollout, from the carry that came with it, against acting, step by step."""
    for number, (r, following) in enumerate(itertools.zip_longest(rollouts, rollouts[1:])):
        first = resets(r.obs, r.first)
        got = learnt(network, params, r.obs[:-1], first[:-1], r.carry, r.action)
        close(got["log_prob"], r.extras["log_prob"], f"log-probabilities of rollout {number}")
        close(got["value"], r.extras["value"], f"values of rollout {number}")
        close(got["carry"], jax.tree.map(lambda x: x[-1], r.extras["after"]), f"memory after rollout {number}")
        if following is not None:
            close(got["carry"], following.carry, f"the carry that travels with rollout {number + 1}")


def check_episodes_are_alone(network, params, rollouts) -> None:
    """The definition: every episode, run by itself from an empty memory, gives what acting gave."""
    over_time = lambda pick: np.concatenate([np.asarray(pick(r)) for r in rollouts])
    obs, first = over_time(lambda r: r.obs[:-1]), over_time(lambda r: r.first[:-1])
    action, log_prob, value = (
        over_time(pick) for pick in (lambda r: r.action, lambda r: r.extras["log_prob"], lambda r: r.extras["value"])
    )
    for b in range(B):
        starts = np.flatnonzero(first[:, b])
        assert starts[0] == 0
        for start, end in itertools.pairwise([*starts, len(first)]):
            part = np.s_[start:end, b : b + 1]
            blank = np.zeros((end - start, 1), bool)  # nothing to empty: the memory is new
            got = learnt(network, params, obs[part], blank, network.initial_carry(1), action[part])
            close(got["log_prob"], log_prob[part], f"environment {b}, steps {start} to {end}")
            close(got["value"], value[part], f"environment {b}, steps {start} to {end}")


def test_learning_gives_step_by_step_what_acting_gave(network, params, rollouts):
    ends = lambda r: np.asarray(r.terminated | r.truncated)
    # Several episodes in a rollout; boundaries at its first step, its last, and just after it.
    assert max(np.asarray(r.first).sum(0).max() for r in rollouts) >= 3
    assert any(np.asarray(r.first[0]).any() for r in rollouts[1:])
    assert any(ends(r)[-1].any() for r in rollouts)
    assert any(np.asarray(r.first[-1]).any() for r in rollouts)
    assert not np.asarray(rollouts[0].carry.h).any()  # memory starts empty
    assert all(np.asarray(r.carry.h).any() for r in rollouts[1:])

    check_learning_repeats_acting(network, params, rollouts, right)
    check_episodes_are_alone(network, params, rollouts)


@pytest.mark.parametrize("leak", [on_done, never])
def test_a_leak_in_learning_is_noticed(network, params, rollouts, leak):
    with pytest.raises(AssertionError):
        check_learning_repeats_acting(network, params, rollouts, leak)


@pytest.mark.parametrize("leak", [on_done, never])
def test_a_leak_in_acting_and_learning_alike_is_noticed(network, params, leak):
    rollouts = collect(network, params, leak)
    check_learning_repeats_acting(network, params, rollouts, leak)  # consistently wrong
    with pytest.raises(AssertionError):
        check_episodes_are_alone(network, params, rollouts)


@pytest.mark.parametrize("stale", ["zeros", "the last rollout's"])
def test_a_carry_that_does_not_travel_is_noticed(network, params, rollouts, stale):
    for number in range(1, ROLLOUTS):
        other = network.initial_carry(B) if stale == "zeros" else rollouts[number - 1].carry
        wrong = [*rollouts[:number], rollouts[number]._replace(carry=other)]
        with pytest.raises(AssertionError):
            check_learning_repeats_acting(network, params, wrong, right)


# How a run's own metrics show it: with no lag and one minibatch, the learner evaluates the very policy that acted.
OFF_POLICY = {
    "ppo": lambda row: (2 * abs(row["losses/approx_kl"])) ** 0.5,  # the KL divergence is half the square of a log-ratio
    "impala": lambda row: abs(row["losses/importance_ratio"] - 1),
}
FIRST = "losses/first_ratio_deviation"


@pytest.mark.parametrize("actors, shards, learners", [(1, 1, (0,)), (4, 2, (0, 1))])
@pytest.mark.parametrize("name", RECIPES)
def test_in_a_run_the_learner_evaluates_what_the_actors_did(name, actors, shards, learners):
    e = experiment(name, num_actors=actors, num_shards=shards, concurrency=False, learning_rate=0.03, updates=6)
    lively_start = lambda algorithm: algorithm._replace(
        init=lambda key: (s := algorithm.init(key))._replace(params=lively(s.params))
    )
    run = finished(
        e, (0,), learners, spec=spec(), make_envs=Scripts(*SCRIPTS), recipe=RECIPES[name][0], wrap=lively_start
    )
    assert max(map(OFF_POLICY[name], run.rows)) < 5e-5, list(map(OFF_POLICY[name], run.rows))
    assert max(row[FIRST] for row in run.rows) < 5e-6


@pytest.mark.parametrize("name", RECIPES)
def test_the_runs_metrics_notice_a_carry_that_went_astray(name):
    def astray(algorithm):
        def update(state, memory, rollout, *rest):  # each environment learns with its neighbour's carry
            carry = jax.tree.map(lambda c: jnp.roll(c, 1, axis=1), rollout.carry)
            return algorithm.update(state, memory, rollout._replace(carry=carry), *rest)

        init = lambda key: (s := algorithm.init(key))._replace(params=lively(s.params))
        return algorithm._replace(init=init, update=update)

    e = experiment(name, concurrency=False, learning_rate=0.03, updates=6)
    run = finished(e, spec=spec(), make_envs=Scripts(*SCRIPTS), recipe=RECIPES[name][0], wrap=astray)
    assert max(map(OFF_POLICY[name], run.rows[1:])) > 1e-3
    assert max(row[FIRST] for row in run.rows[1:]) > 1e-3


# ------------------------------------------------------------------------------ minibatches go over environments only


@pytest.mark.parametrize(  # a feed-forward PPO draws single transitions
    "name, core", [(name, core) for name in RECIPES for core in ("lstm", "none") if (name, core) != ("ppo", "none")]
)
def test_minibatches_go_over_environments_never_over_time(on_devices, monkeypatch, name, core):
    """Every pass of the network that a minibatch makes is over all steps, in order, of some environments."""
    t, envs, shards, m, epochs = 5, 12, 2, 3, 2
    passes, original = [], ActorCritic.outputs

    def outputs(self, params, obs, first, carry):
        jax.debug.callback(lambda *seen: passes.append(jax.tree.map(np.asarray, seen)), obs, first, carry)
        return original(self, params, obs, first, carry)

    e = experiment(name, num_envs=envs, num_shards=shards, num_steps=t, num_minibatches=m, core=core)
    if name == "ppo":
        e = ppo.PPO(**{**vars(e), "update_epochs": epochs})
    algorithm = RECIPES[name][0].make(e, spec(), "cpu")
    state = jax.jit(algorithm.init)(jax.random.key(0))
    monkeypatch.setattr(ActorCritic, "outputs", outputs)

    per = envs // shards
    number = jnp.arange(envs, dtype=jnp.float32).reshape(shards, per)
    step = jnp.arange(t + 1, dtype=jnp.float32)[None, :, None]
    over_time = jnp.broadcast_to(number[:, None], (shards, t + 1, per))
    obs = jnp.stack([0 * over_time, over_time, 0 * over_time, jnp.broadcast_to(step, over_time.shape)], -1)
    flags, zeros = jnp.zeros((shards, t, per), bool), jnp.zeros((shards, t, per))
    memory = jnp.broadcast_to(number[..., None], (shards, per, e.lstm_size))
    carry = LSTMCarry(memory, -memory) if core == "lstm" else ()
    first = (over_time + step) % 3 == 0
    rollout = Rollout(
        obs, first, zeros.astype(jnp.int32), zeros, flags, flags, ~flags, {"log_prob": zeros - 0.7}, carry
    )
    update = lambda shards, s, rollout: algorithm.update(s, (), rollout, shards, jax.random.key(1))[::2]
    jax.block_until_ready(on_devices(update, shards, 1, optimise=False)(state, rollout))
    jax.effects_barrier()

    steps = t if name == "ppo" else t + 1
    minibatches = [p for p in passes if p[1].shape[1] == per // m]
    assert len(minibatches) == shards * m * (epochs if name == "ppo" else 1)
    learnt_from = []
    for seen, seen_first, seen_carry in minibatches:
        assert seen.shape == (steps, per // m, 4)
        who = seen[0, :, 1]
        np.testing.assert_array_equal(seen[..., 1], np.tile(who, (steps, 1)))
        np.testing.assert_array_equal(seen[..., 3], np.tile(np.arange(steps)[:, None], (1, per // m)))
        np.testing.assert_array_equal(seen_first, (who + np.arange(steps)[:, None]) % 3 == 0)
        if core == "lstm":
            np.testing.assert_array_equal(seen_carry[0], np.tile(who[:, None], (1, e.lstm_size)))
            np.testing.assert_array_equal(seen_carry[1], -seen_carry[0])
        assert len(set((who // per).tolist())) == 1  # of one shard
        learnt_from += who.tolist()
    once = sorted(learnt_from)
    assert once == sorted(list(range(envs)) * (epochs if name == "ppo" else 1))
    if name == "ppo":  # drawn anew for each epoch
        half = len(minibatches) // 2
        groups = lambda some: {frozenset(p[0][0, :, 1].tolist()) for p in some}
        assert groups(minibatches[:half]) != groups(minibatches[half:])


# ----------------------------------------------------------------------------------------------------- a task of memory


def test_whatever_a_policy_without_memory_does_it_is_right_by_chance_only():
    """All 4^5 maps from observation to action, each playing every symbol.

    Random policies mix these, and only the answer to the blank is ever paid, so none is better (or worse) either.
    """
    envs = MemoryEnvs(range(64))
    first = envs.reset()
    symbol = first.argmax(-1)
    assert set(symbol) == set(range(SYMBOLS))
    played = []
    for _ in range(envs.blanks + 1):
        step = envs.step(np.zeros(64, int))
        played.append(step.obs)
    assert all((obs == 0).all() for obs in played)  # blanks are all the same, the terminal observation too

    blank = SYMBOLS
    best = 0.0
    for answers in itertools.product(range(SYMBOLS), repeat=SYMBOLS + 1):
        envs = MemoryEnvs(range(64))
        obs, total = envs.reset(), np.zeros(64)
        for _ in range(envs.blanks + 1):
            step = envs.step(np.array(answers)[np.where(obs.any(-1), obs.argmax(-1), blank)])
            obs, total = step.obs, total + step.raw_reward
        assert step.terminated.all()
        by_symbol = [total[symbol == s] for s in range(SYMBOLS)]
        assert all((returns == returns[0]).all() for returns in by_symbol)
        mean = np.mean([returns[0] for returns in by_symbol])
        assert mean == 1 / SYMBOLS
        best = max(best, mean)
    assert best == 1 / SYMBOLS


def remember(name: str, core: str, updates: int) -> tuple[float, np.ndarray]:
    """The mean return of the last 100 games of a run, and the returns of the second half of all games."""
    own = dict(update_epochs=4, clip_coef=0.2, num_minibatches=2) if name == "ppo" else {}
    common = dict(env_id="Memory-v0", num_envs=64, num_steps=16, hiddens=(32,), lstm_size=32, learning_rate=5e-3)
    games = Games()
    e = experiment(name, **common, **own, core=core, updates=updates)
    run = finished(e, spec=memory_spec(), make_envs=games, recipe=RECIPES[name][0])
    return run.result["episodic_return"], games.last_half()


@pytest.mark.parametrize("name, updates", [pytest.param("ppo", 50, marks=pytest.mark.slow), ("impala", 130)])
def test_an_lstm_remembers_the_symbol(name, updates):
    last, half = remember(name, "lstm", updates)
    assert last >= 0.95
    assert half.mean() >= 0.9


@pytest.mark.parametrize("name, updates", [("ppo", 50), ("impala", 130)])
def test_a_feed_forward_policy_stays_at_chance(name, updates):
    _, half = remember(name, "none", updates)
    assert half.size > 4000
    chance = 1 / SYMBOLS
    sigma = (chance * (1 - chance) / half.size) ** 0.5
    assert abs(half.mean() - chance) < 4 * sigma


# ------------------------------------------------------------------------------------------------- placement invariance


@pytest.mark.parametrize(
    "name, collector",
    [("ppo", "stepped"), ("ppo", "scanned"), ("impala", "scanned"), ("pqn", "stepped")],
)
def test_every_placement_ends_in_the_same_bits(name, collector):
    e = experiment(
        name,
        env_id="Catch-v0",
        collector=collector,
        num_envs=8,
        num_actors=2,
        num_shards=2,
        num_steps=12,  # episodes of 9 steps: boundaries wander through the rollouts
        num_minibatches=2,
        updates=4,
        learning_rate=0.01,
        env_epoch=3,  # with fresh environments on the way
    )
    one, four = (digests(e, *places, recipe=ALL[name][0]) for places in (((0,), (0,)), ((0, 1), (2, 3))))
    assert sorted(one) == [3, 4]  # the checkpoint, and the end
    assert one == four
