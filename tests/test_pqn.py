"""PQN's whole update against numpy with finite differences, its targets against known values, its schedules."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.flatten_util import ravel_pytree
from launch import command, finished, same_arrays
from scripted import CELLS, LEFT_PAYS, RIGHT_PAYS, Corridors, Scripts, spec
from slowly import Data, finite_difference, slow_lambda_returns
from test_recurrent import SCRIPTS, lively

from cleanba.algorithms import pqn
from cleanba.algorithms.pqn import PQN
from cleanba.config import Partition, check_values
from cleanba.errors import UsageError
from cleanba.recipes import RECIPES
from cleanba.resolution import resolve
from cleanba.rollout import Rollout
from cleanba.specs import ActionSpec, EnvSpec, ObsSpec, choice

OBS, ACTIONS, T, B = 3, 3, 6, 4
SPEC = EnvSpec("tiny", ObsSpec("vector", (OBS,), "float32"), choice(ACTIONS), False, False, {})

# One letter per step and environment: `.` goes on, `T` terminates, `U` truncates, `x` is ignored.
LAYOUT = np.array([list(column) for column in ("..Tx..", "xUx...", "......", ".....T")]).T


def tiny(**changes) -> PQN:
    """An experiment of a few parameters, one minibatch and one epoch."""
    sizes = dict(network="mlp", hiddens=(4,), num_envs=B, num_steps=T, num_minibatches=1, update_epochs=1)
    return PQN(**sizes | dict(total_timesteps=10 * B * T, gamma=0.9, q_lambda=0.8, max_grad_norm=1e9) | changes)


def tiny_rollout(seed: int = 0) -> Rollout:
    """Random data [T, B] of that layout, of one shard."""
    rng = np.random.default_rng(seed)
    single = lambda *shape: rng.normal(size=shape).astype(np.float32)
    valid = LAYOUT != "x"
    return Rollout(
        obs=single(T + 1, B, OBS),
        first=np.concatenate([rng.random((1, B)) < 0.5, ~valid]),
        action=rng.integers(ACTIONS, size=(T, B)).astype(np.int32),
        reward=np.where(valid, 2 * single(T, B), 0),
        terminated=LAYOUT == "T",
        truncated=LAYOUT == "U",
        valid=valid,
        extras={},
        carry=(),
    )


@pytest.fixture(scope="module")
def updated(on_devices):
    """updated(rollout, **changes) -> the state before, after, and metrics."""

    def run(rollout, **changes):
        algorithm = RECIPES["pqn"].make(tiny(**changes), SPEC, "cpu")
        state = jax.eval_shape(algorithm.init, jax.random.key(0))
        rng = np.random.default_rng(7)
        zeros = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), state)
        state = zeros._replace(params=jax.tree.map(lambda x: rng.normal(size=x.shape).astype(x.dtype), zeros.params))
        update = lambda shards, state, rollout: algorithm.update(state, (), rollout, shards, jax.random.key(3))[::2]
        return state, *on_devices(update, 1, 1, optimise=False)(state, jax.tree.map(lambda x: x[None], rollout))

    return run


def numpy_values(params, obs) -> np.ndarray:
    """The action values [..., A] of a layer, normalised and rectified, and a head; in float64."""
    p = jax.tree.map(lambda x: np.asarray(x, np.float64), params)["params"]
    layer = lambda x, w: x @ w["kernel"] + w["bias"]
    x = layer(obs, p["MLP_0"]["Dense_0"]["Dense_0"])
    x = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-6)
    x = np.maximum(p["MLP_0"]["LayerNorm_0"]["scale"] * x + p["MLP_0"]["LayerNorm_0"]["bias"], 0)
    return layer(x, p["action_value"]["Dense_0"])


@pytest.mark.parametrize("changes", [{}, {"watkins_cut": True}, {"q_lambda": 0.0}], ids=str)
def test_an_update_is_the_papers_in_numpy(changes, updated):
    r = tiny_rollout()
    before, after, metrics = updated(r, **changes)
    values = numpy_values(before.params, r.obs)
    best = values[:-1].argmax(-1) == r.action
    d = Data(values.max(-1), None, r.reward, r.terminated, r.truncated, r.valid)
    e = tiny(**changes)
    target = slow_lambda_returns(d, e.gamma, e.q_lambda, best if e.watkins_cut else None)
    leaves, structure = jax.tree.flatten(before.params)
    flat = np.asarray(ravel_pytree(before.params)[0], np.float64)

    def chosen(flat) -> np.ndarray:
        parts = np.split(flat, np.cumsum([x.size for x in leaves])[:-1])
        params = jax.tree.unflatten(structure, [part.reshape(x.shape) for part, x in zip(parts, leaves, strict=True)])
        return np.take_along_axis(numpy_values(params, r.obs[:-1]), r.action[..., None], -1)[..., 0][r.valid]

    loss = lambda flat: 0.5 * np.square(chosen(flat) - target[r.valid]).mean()
    gradient = finite_difference(loss, flat)
    # RAdam's first moment is a tenth of the first gradient, and its first step is along that, without a second moment.
    seen = 10 * np.asarray(ravel_pytree(optax.tree_utils.tree_get(after.optimiser, "mu"))[0])
    np.testing.assert_allclose(seen, gradient, rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(ravel_pytree(after.params)[0], flat - e.learning_rate * gradient, rtol=1e-5, atol=1e-6)
    expected = {
        "losses/td_loss": loss(flat),
        "losses/q_values": chosen(flat).mean(),
        "losses/grad_norm": np.linalg.norm(gradient),
        "losses/explained_variance": 1 - np.var(target[r.valid] - chosen(flat)) / np.var(target[r.valid]),
        "stats/greedy_actions": best[r.valid].mean(),
        "charts/epsilon": 1.0,
        "charts/learning_rate": e.learning_rate,
    }
    assert set(metrics) == set(expected) == set(pqn.LOGGED)
    for name, value in expected.items():
        np.testing.assert_allclose(metrics[name], value, rtol=1e-4, err_msg=name)


def test_ignored_steps_and_states_after_an_end_train_nothing(updated):
    """Nor do the values of a terminal state."""
    r = tiny_rollout()
    _, after, _ = updated(r)
    ignored = ~r.valid
    obs = np.where(np.concatenate([ignored, np.zeros((1, B), bool)])[..., None], 1e3, r.obs).astype(np.float32)
    # A truncated episode's last observation, which is what the ignored step shows, has a value that counts.
    obs[2, 1] = r.obs[2, 1]
    other = r._replace(action=np.where(ignored, 2 - r.action, r.action), reward=r.reward + 5 * ignored, obs=obs)
    assert same_arrays(updated(other)[1], after)
    obs = r.obs.copy()
    obs[2, 1] *= -1.0
    assert not same_arrays(updated(r._replace(obs=obs))[1].params, after.params)


@pytest.mark.parametrize(
    "changes, right", [({"watkins_cut": True}, True), ({"q_lambda": 0.0}, True), ({}, False)], ids=str
)
def test_values_of_random_play_are_those_of_the_best_play_only_with_the_cut(changes, right):
    """In a corridor with a reward at both ends.  Most episodes are truncated before an end, which must not matter."""
    known = np.zeros((CELLS, 2))
    for _ in range(100):  # value iteration
        best = known.max(1)
        known[:, 0] = 0.8 * np.concatenate([[LEFT_PAYS / 0.8], best[:-1]])
        known[:, 1] = 0.8 * np.concatenate([best[1:], [RIGHT_PAYS / 0.8]])
    sizes = dict(num_envs=16, num_actors=1, num_shards=1, num_steps=16, hiddens=(32,), gamma=0.8, end_e=1.0)
    e = PQN(**sizes, **changes, num_minibatches=4, learning_rate=1e-2, anneal_lr=True, total_timesteps=16 * 16 * 50)
    record = finished(e, spec=Corridors.spec, make_envs=Corridors, recipe=pqn)
    algorithm = pqn.make(e, Corridors.spec, "cpu")
    acting = algorithm.actor_params(record.state)
    shown = algorithm.inspect(acting, (), jnp.eye(CELLS), jnp.zeros(CELLS, bool))
    off = abs(shown["action value"] - known).max()
    assert off < 0.04 if right else off > 0.1
    np.testing.assert_array_equal(shown["value"], shown["action value"].max(-1))


# --------------------------------------------------------------------------------------------------------- memory

LSTM = dict(
    env_id="Scripted-v0", num_envs=4, num_actors=2, num_shards=1, num_steps=7, hiddens=(8,), core="lstm", lstm_size=8,
    num_minibatches=2, update_epochs=1, collector="stepped", env_epoch=0, learning_rate=0.03, start_e=0.0, end_e=0.0,
    total_timesteps=6 * 4 * 7,
)  # fmt: skip


def played(e: PQN, astray=lambda rollout: rollout) -> list[float]:
    """By update: the share of its rollout's actions that the newest network would have chosen."""

    def lively_start(algorithm):
        init = lambda key: (s := algorithm.init(key))._replace(params=lively(s.params))
        update = lambda state, memory, rollout, *rest: algorithm.update(state, memory, astray(rollout), *rest)
        return algorithm._replace(init=init, update=update)

    record = finished(e, (0,), (0,), spec=spec(), make_envs=Scripts(*SCRIPTS), recipe=pqn, wrap=lively_start)
    return record.column("stats/greedy_actions")


def test_in_a_run_the_learner_computes_the_action_values_of_the_actors():
    """Without a lag and without exploration each action is the best of the network that learns."""
    together = PQN(**LSTM, concurrency=False)
    assert played(together) == [1.0] * 6
    assert min(played(PQN(**LSTM))) < 1.0  # one version behind
    neighbours = lambda r: r._replace(carry=jax.tree.map(lambda c: jnp.roll(c, 1, axis=1), r.carry))
    assert min(played(together, neighbours)) < 1.0


# ------------------------------------------------------------------------------------------------------- schedules


def test_exploration_falls_linearly_with_the_policys_version():
    e = tiny(start_e=0.9, end_e=0.1, exploration_fraction=0.5)
    algorithm = pqn.make(e, SPEC, "cpu")
    params = algorithm.init(jax.random.key(0)).params
    obs, first = np.random.default_rng(0).normal(size=(4000, OBS)).astype(np.float32), np.zeros(4000, bool)
    acting = lambda updates: pqn.ActingParams(params, jnp.int32(updates))
    act = lambda updates, explore: algorithm.act(acting(updates), (), obs, first, jax.random.key(2), explore)[0]
    best = act(0, False)
    assert same_arrays(best, algorithm.inspect(acting(0), (), obs, first)["action value"].argmax(-1))
    for updates, epsilon in ((0, 0.9), (3, 0.42), (5, 0.1), (100, 0.1)):
        differ = float((act(updates, True) != best).mean())
        assert abs(differ - epsilon * (ACTIONS - 1) / ACTIONS) < 0.03


# ----------------------------------------------------------------------------------------------------------- flags


def test_the_preset_has_the_authors_settings():
    atari, minatar, other = (
        resolve(RECIPES["pqn"], {"env_id": name}, "cpu").experiment
        for name in ("Pong-v5", "gymnax:Breakout-MinAtar", "CartPole-v1")
    )
    of = lambda e: (e.num_envs, e.num_steps, e.q_lambda, e.update_epochs, e.num_minibatches, e.learning_rate)
    assert of(atari) == of(PQN()) == (128, 32, 0.65, 2, 32, 2.5e-4)
    assert (atari.end_e, atari.exploration_fraction, atari.anneal_lr, atari.network) == (0.001, 0.1, False, "nature")
    assert of(minatar) == (128, 32, 0.65, 2, 32, 5e-4) and (minatar.end_e, minatar.anneal_lr) == (0.05, True)
    assert atari.layer_norm and minatar.layer_norm and other.layer_norm and atari.max_grad_norm == 10


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"num_minibatches": 5}, "4 environments x 6 steps evenly; try --num-minibatches 4 or 6"),
        ({"num_minibatches": 3, "core": "lstm"}, "4 environments evenly; try --num-minibatches 2 or 4"),
        ({"q_lambda": 1.5}, "--q-lambda"),
        ({"end_e": -0.1}, "--end-e"),
    ],
    ids=str,
)
def test_what_does_not_fit_is_refused(changes, words):
    e = tiny(**changes)
    with pytest.raises(UsageError, match=words):
        check_values(e)
        pqn.check(e, Partition(e.num_envs, 1, e.num_shards))


def test_other_actions_than_one_of_a_few_are_refused():
    box = ActionSpec("quantities", (2,), "float32", (), (-1.0, -1.0), (1.0, 1.0))
    with pytest.raises(UsageError, match="PQN values each of a few actions; try `cleanba sac`"):
        pqn.make(tiny(), SPEC._replace(action=box), "cpu")


def test_the_command_trains_plays_and_goes_on(tmp_path):
    words = "--env-id CartPole-v1 --num-envs 4 --num-steps 8 --num-minibatches 2 --hiddens 8 --core lstm --lstm-size 8"
    ended = command("pqn", *words.split(), "--total-timesteps", "320", "--run-dir", tmp_path / "run")
    assert ended.code == 0, ended.err
    played = command("eval", tmp_path / "run", "--episodes", "3", "--video")
    assert played.code == 0 and "pqn on CartPole-v1" in played.out, played.err
    assert "random with probability 0.05" in played.out
    assert "is finished; nothing to do" in command("resume", tmp_path / "run").out
