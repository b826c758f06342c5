"""Real-valued actions and running normalisation: losses against numpy, and every promise with statistics."""

import ctypes.util
import json
import shutil
import signal
from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree
from launch import ROOT, command, digests, finish, finished, python, read_result
from scipy import stats
from scripted import Play, Scripts
from scripted import spec as scripted_spec
from slowly import Data, finite_difference, slow_gae, slow_vtrace
from test_ppo import LAYOUT, OBS, B, T, tiny, tiny_rollout

from cleanba.agents.evaluate import play
from cleanba.agents.policy import load_policy
from cleanba.algorithms import dqn, impala, ppo
from cleanba.algorithms.normalisation import LIMIT, Normaliser, make_normaliser
from cleanba.config import Placement
from cleanba.errors import UsageError
from cleanba.launch import bounds_words
from cleanba.ops.moments import Moments
from cleanba.recipes import RECIPES
from cleanba.resolution import fit, resolve
from cleanba.rollout import Rollout
from cleanba.specs import ActionSpec, EnvSpec, ObsSpec, choice

PARTS = 2
ACTION = ActionSpec("quantities", (PARTS,), "float64", (), (-1.0,) * PARTS, (1.0,) * PARTS)
SPEC = EnvSpec("tiny", ObsSpec("vector", (OBS,), "float32"), ACTION, False, False, {})
SMALL = dict(network="mlp", hiddens=(3,), num_envs=B, num_steps=T, num_minibatches=1, total_timesteps=10 * B * T)
SMALL |= dict(share_torso=False)


def gaussian_rollout() -> Rollout:
    """Random data with real-valued actions that were not very likely."""
    rng = np.random.default_rng(3)
    r = tiny_rollout()
    action = rng.normal(size=(*LAYOUT.shape, PARTS)).astype(np.float32)
    log_prob = (stats.norm.logpdf(action).sum(-1) + 0.2 * rng.normal(size=LAYOUT.shape)).astype(np.float32)
    return r._replace(action=action, extras={"log_prob": log_prob})


# ------------------------------------------------------------------------------------------- losses against numpy


def numpy_policy(params, obs):
    """Means [..., D], standard deviations [D] and values [...] of the two networks, in float64."""
    p = jax.tree.map(lambda x: np.asarray(x, np.float64), params)["params"]
    layer = lambda x, w: x @ w["kernel"] + w["bias"]
    through = lambda torso: np.tanh(layer(obs, p[torso]["Dense_0"]["Dense_0"]))
    mean, value = layer(through("MLP_0"), p["policy"]["Dense_0"]), layer(through("MLP_1"), p["value"]["Dense_0"])
    return mean, np.exp(p["log_std"]), value[..., 0]


def numpy_terms(params, r):
    mean, std, value = numpy_policy(params, r.obs)
    log_prob = stats.norm.logpdf(r.action, mean[:-1], std).sum(-1)
    return log_prob - r.extras["log_prob"], log_prob, value, stats.norm.entropy(0, std).sum()


def numpy_ppo(e, params, r, advantage, target):
    mean = lambda x: x[r.valid].mean()
    log_ratio, _, value, entropy = numpy_terms(params, r)
    ratio = np.exp(log_ratio)
    advantage = (advantage - mean(advantage)) / advantage[r.valid].std()
    policy_loss = mean(-np.minimum(ratio * advantage, np.clip(ratio, 1 - e.clip_coef, 1 + e.clip_coef) * advantage))
    value_loss = mean((value[:-1] - target) ** 2) / 2
    return policy_loss - e.ent_coef * entropy + e.vf_coef * value_loss


def numpy_impala(e, params, r, advantage, target):
    mean = lambda x: x[r.valid].mean()
    _, log_prob, value, entropy = numpy_terms(params, r)
    value_loss = mean((value[:-1] - target) ** 2) / 2
    return mean(-log_prob * advantage) - e.ent_coef * entropy + e.vf_coef * value_loss


@pytest.mark.parametrize("name", ["ppo", "impala"])
def test_the_gradient_equals_numpys_with_finite_differences(name, on_devices):
    if name == "ppo":
        e = tiny(share_torso=False)
        algorithm, slow = ppo.make(e, SPEC, "cpu"), numpy_ppo
    else:
        e = impala.IMPALA(**SMALL, max_grad_norm=1e9, ent_coef=0.1)
        algorithm, slow = impala.make(e, SPEC, "cpu"), numpy_impala
    rng = np.random.default_rng(7)
    draw = lambda x: 0.7 * rng.normal(size=x.shape).astype(x.dtype)
    state = algorithm.init(jax.random.key(0))
    state = state._replace(params=jax.tree.map(draw, state.params))
    r = gaussian_rollout()

    update = on_devices(
        lambda shards, s, r: algorithm.update(s, (), r, shards, jax.random.key(0))[0], 1, 1, optimise=False
    )
    after = update(state, jax.tree.map(lambda x: x[None], r))
    if name == "ppo":  # Adam's first moment after one step is a tenth of the gradient
        found = 10 * ravel_pytree(after.optimiser[1].mu)[0]
    else:  # RMSProp's first mean square is a hundredth of the square
        found = ravel_pytree(jax.tree.map(lambda nu: jnp.sqrt(nu / 0.01), after.optimiser[1].nu))[0] / e.loss_scale

    log_ratio, _, value, _ = numpy_terms(state.params, r)
    data = Data(value, log_ratio, np.float64(r.reward), r.terminated, r.truncated, r.valid)
    if name == "ppo":
        advantage = slow_gae(data._replace(log_ratio=0 * log_ratio), e.gamma, e.gae_lambda)
        target = advantage + value[:-1]
    else:
        target, advantage = slow_vtrace(data, e.gamma)
    flat = ravel_pytree(state.params)[0]
    shapes = jax.tree.map(np.shape, state.params)
    cuts = np.cumsum([x.size for x in jax.tree.leaves(state.params)])[:-1]
    tree = jax.tree.structure(state.params)

    def unflatten(x):  # in float64, which JAX's own would round
        leaves = zip(np.split(x, cuts), jax.tree.leaves(shapes, is_leaf=lambda s: isinstance(s, tuple)), strict=True)
        return tree.unflatten([part.reshape(shape) for part, shape in leaves])

    expected = finite_difference(lambda x: slow(e, unflatten(x), r, advantage, target), np.float64(flat))
    if name == "impala":  # of RMSProp's mean square the sign is lost
        expected = abs(expected)
    assert abs(expected).max() > 0.05
    np.testing.assert_allclose(found, expected, rtol=2e-3, atol=2e-4)


def test_policy_and_value_share_nothing_or_all():
    own = {"share_torso": False}
    made = lambda changes: ppo.make(tiny(**own | changes), SPEC, "cpu").init(jax.random.key(0)).params["params"]
    modules = lambda **changes: set(made(changes))
    assert modules() == {"MLP_0", "MLP_1", "policy", "value", "log_std"}
    assert modules(share_torso=True) == {"MLP_0", "policy", "value", "log_std"}
    assert modules(core="lstm") == {"MLP_0", "MLP_1", "LSTM_0", "LSTM_1", "policy", "value", "log_std"}


def test_standard_deviations_begin_where_the_flag_says():
    first = lambda **changes: ppo.make(tiny(**changes), SPEC, "cpu").init(jax.random.key(0)).params["params"]["log_std"]
    np.testing.assert_array_equal(first(), np.zeros(PARTS))
    np.testing.assert_array_equal(first(log_std_init=-1.5), np.full(PARTS, -1.5))


def test_memories_of_two_torsos_share_no_buffer_as_they_are_donated():
    carry = jax.tree.leaves(ppo.make(tiny(core="lstm", share_torso=False), SPEC, "cpu").initial_carry(2))
    assert len({x.unsafe_buffer_pointer() for x in carry}) == len(carry) == 4


def test_dqn_refuses_other_actions_than_a_single_choice_in_one_sentence():
    with pytest.raises(
        UsageError, match="takes real numbers, but DQN .*; try `cleanba sac`, `cleanba td3` or `cleanba ppo`"
    ):
        dqn.make(dqn.DQN(), SPEC, "cpu")


# ------------------------------------------------------------------------------------------------- normalisation


def slow_normalisation(rollouts, gamma):
    """Observations and rewards of each rollout [T(+1), B, ...], by numpy's moments of all until then."""
    seen, returns, g = [], [], np.zeros(B)
    for r in rollouts:
        seen.append(np.float64(r.obs[:-1]).reshape(-1, OBS))
        for t in range(T):
            g = np.where(r.valid[t], r.reward[t] + gamma * np.where(r.first[t], 0, g), 0)
            returns.extend(g[r.valid[t]])
        mean, std = np.concatenate(seen).mean(0), np.concatenate(seen).std(0)
        scaled = np.clip(r.reward / np.std(returns), -10, 10)
        yield np.clip((r.obs - mean) / std, -10, 10), scaled, (mean, std, np.var(returns), len(returns))


def three_rollouts():
    rollouts = [tiny_rollout(seed=seed) for seed in range(3)]
    return [r._replace(obs=5 + 3 * r.obs) for r in rollouts]


@pytest.mark.parametrize("shards", [1, 2, 4])
def test_rollouts_are_normalised_as_numpy_does_for_every_split_into_shards(on_devices, shards):
    n = Normaliser((("", ObsSpec("vector", (OBS,), "float32")),), True, 0.9)
    cut = lambda x: np.stack(np.split(x, shards, 1))
    join = lambda x: np.concatenate(list(np.asarray(x)), 1)

    def add(axis, statistics, memory, rollout):
        statistics, memory, r = n.add(axis, statistics, memory, rollout)
        everywhere = lambda x: jax.lax.all_gather(x, "learner", tiled=True)
        return statistics, *jax.tree.map(everywhere, (memory, r.obs, r.reward))

    added = on_devices(add, shards, shards)
    statistics, memory = n.init(), np.zeros((shards, B // shards), np.float32)
    rollouts = three_rollouts()
    for r, (obs, reward, (mean, std, variance, count)) in zip(rollouts, slow_normalisation(rollouts, 0.9), strict=True):
        statistics, memory, found_obs, found_reward = added(statistics, memory, jax.tree.map(cut, r))
        np.testing.assert_allclose(join(found_obs), obs, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(join(found_reward), reward, rtol=1e-4, atol=1e-6)
        np.testing.assert_allclose(statistics.obs[""].mean, mean, rtol=1e-5)
        np.testing.assert_allclose(statistics.obs[""].variance, std**2, rtol=1e-4)
        np.testing.assert_allclose(statistics.discounted_return.variance, variance, rtol=1e-4)
        assert statistics.discounted_return.counted.tolist() == [0, count]


def test_normalised_outliers_are_clipped():
    n = Normaliser((("", ObsSpec("vector", (OBS,), "float32")),), True, 0.9)
    seen = {"": Moments(jnp.array([0, 9]), jnp.full(OBS, 5.0), jnp.full(OBS, 4.0))}
    found = n.normalise(seen, np.float32([[5.0, 9.0, 1e9], [-1e9, 24.0, 26.0]]))
    np.testing.assert_allclose(found, [[0, 2, LIMIT], [-LIMIT, 9.5, LIMIT]], rtol=1e-6)


def test_categories_are_normalised_as_zeros_and_ones():
    """A grid of codes, a number that is a code, and text, against numpy: constant parts vanish, rare ones stand out."""
    parts = {
        "grid": ObsSpec("codes", (2, 2), "uint8", 3, 4), "number": ObsSpec("discrete", (), "int32", 3),
        "text": ObsSpec("bytes", (2,), "uint8"),
    }  # fmt: skip
    rng = np.random.default_rng(0)
    obs = {
        "grid": rng.integers(4, 7, (50, 2, 2)).astype(np.uint8), "number": rng.integers(2, size=50).astype(np.int32),
        "text": rng.integers(97, 100, (50, 2)).astype(np.uint8),
    }  # fmt: skip
    expected = {
        "grid": np.eye(3)[obs["grid"] - 4].reshape(50, -1), "number": np.eye(3)[obs["number"]],
        "text": np.unpackbits(obs["text"], axis=1, bitorder="little").astype(float),
    }  # fmt: skip
    n = make_normaliser(ppo.PPO(norm_obs=True), EnvSpec("x", parts, choice(2), False, False, {}))
    seen = {
        f"['{k}']": Moments(jnp.array([0, 50]), jnp.float32(x.mean(0)), jnp.float32(x.var(0)))
        for k, x in expected.items()
    }
    assert jax.tree.map(jnp.shape, n.init().obs) == jax.tree.map(jnp.shape, seen)
    found = n.normalise(seen, jax.tree.map(lambda x: x.reshape(5, 10, *x.shape[1:]), obs))
    for name, x in expected.items():
        x = (x - x.mean(0)) / np.sqrt(x.var(0) + 1e-8)
        np.testing.assert_allclose(found[name].reshape(50, -1), x.clip(-LIMIT, LIMIT), atol=1e-3)
        assert found[name].shape[2:] == n.network_spec(EnvSpec("x", parts, choice(2), False, False, {})).obs[name].shape


def test_images_and_masks_are_not_normalised_and_the_rest_only_if_asked():
    vector, code = ObsSpec("vector", (3,), "float32"), ObsSpec("discrete", (), "int32", 5)
    mask, image = ObsSpec("vector", (3,), "bool"), ObsSpec("image", (4, 84, 84), "uint8")
    obs = {"a": vector, "deep": {"b": vector, "code": code}, "image": image, "mask": mask}
    n = make_normaliser(ppo.PPO(norm_obs=True), EnvSpec("x", obs, choice(2), False, False, {}))
    assert n.parts == (("['a']", vector), ("['deep']['b']", vector), ("['deep']['code']", code))
    assert n.network_spec(EnvSpec("x", obs, choice(2), False, False, {})).obs == {
        "a": vector, "deep": {"b": vector, "code": ObsSpec("vector", (5,), "float32")}, "image": image, "mask": mask,
    }  # fmt: skip
    for changes, leaves in [(dict(norm_obs=True), 3), (dict(norm_reward=True), 3), (dict(), 0)]:
        e = tiny(**changes)
        assert len(jax.tree.leaves(make_normaliser(e, SPEC).init())) == leaves
        state = ppo.make(e, SPEC, "cpu").init(jax.random.key(0))
        acting = ppo.make(e, SPEC, "cpu").actor_params(state)
        assert (acting is state.params) == ("norm_obs" not in changes)  # acting needs no statistics of rewards


def test_normalisation_and_taking_turns_are_the_defaults_for_real_valued_actions_alone():
    for algorithm in (ppo, impala):
        assert algorithm.PRESETS["continuous"]["norm_obs"] and algorithm.PRESETS["continuous"]["norm_reward"]
        assert "norm_obs" not in algorithm.PRESETS["atari"] and not algorithm.PRESETS["minatar"].get("norm_obs")
    assert ppo.PRESETS["continuous"]["lag_correction"] == "decoupled" and ppo.PPO().lag_correction == "none"
    presets = {(recipe.name, kind): preset for recipe in RECIPES.values() for kind, preset in recipe.presets.items()}
    assert [which for which, preset in presets.items() if not preset.get("concurrency", True)] == [
        ("ppo", "continuous")
    ]
    assert all(recipe.experiment().concurrency for recipe in RECIPES.values())


# -------------------------------------------------------------- placement, checkpoints, agents; with statistics

# EnvPool's numbers of eight bytes; episodes end, and are cut off, within a few steps.
REAL = dict(env_id="InvertedDoublePendulum-v5", max_episode_steps=9, num_envs=6, num_actors=6, num_shards=3)
REAL |= dict(num_steps=8, hiddens=(8,), num_minibatches=2, total_timesteps=6 * 48, env_epoch=2)
REAL |= dict(norm_obs=True, norm_reward=True, collector="stepped", share_torso=False)
PLACEMENTS = {"two": ((0, 1), (2, 3)), "three": ((1,), (0, 1, 2))}


@cache
def on_one(name: str) -> dict[int, str]:
    return real(name, (0,), (0,))


def real(name: str, actors, learners) -> dict[int, str]:
    both = dict(update_epochs=2, lag_correction="both", lag_trace_cap=2.0)
    e = impala.IMPALA(**REAL) if name == "impala" else ppo.PPO(**REAL, **both)
    if name == "codes":
        e = replace(e, env_id="MiniGrid-Empty-Random-5x5-v0", core="lstm", lstm_size=8, num_minibatches=1)
    return digests(e, actors, learners, recipe=impala if name == "impala" else ppo)


@pytest.mark.parametrize("name", ["ppo", "impala", "codes"])
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_every_placement_ends_in_the_same_bits(name, placement):
    assert real(name, *PLACEMENTS[placement]) == on_one(name)


def test_other_statistics_end_in_other_bits():
    e = ppo.PPO(**(REAL | dict(norm_reward=False)), update_epochs=2)
    assert digests(e, (0,), (0,), recipe=ppo) != on_one("ppo")


WORDS = "--env-id InvertedDoublePendulum-v5 --num-envs 4 --num-actors 2 --num-shards 2 --num-steps 16 --hiddens 8"
WORDS += " --num-minibatches 2 --update-epochs 1 --total-timesteps 640 --log-frequency 1"
WORDS += " --env-epoch 3 --checkpoint-frequency 3"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A small run of the command, otherwise with all defaults for real-valued actions."""
    run_dir = tmp_path_factory.mktemp("runs") / "whole"
    ended = command("ppo", *WORDS.split(), "--keep-checkpoints", "9", "--save-model", "--run-dir", run_dir)
    assert ended.code == 0, ended.err
    return run_dir


def test_environments_that_cannot_be_scanned_are_stepped_and_normalised_by_default(run):
    e = json.loads((run / "config.json").read_text())["experiment"]
    assert e["collector"] == "stepped" and e["norm_obs"] and e["norm_reward"] and e["ent_coef"] == 0


def test_a_policy_restored_from_disk_acts_as_it_did(run, tmp_path):
    e, restored = (
        resolve(RECIPES["ppo"], {"env_id": "HalfCheetah-v5"}, "cpu").experiment,
        load_policy(run, "last", "cpu"),
    )
    assert e.norm_obs and restored.params.obs[""].counted.tolist() == [0, 640]
    (tmp_path / "alone").mkdir()
    for name in ("config.json", "model.msgpack"):
        shutil.copy(run / name, tmp_path / "alone")
    model = load_policy(tmp_path / "alone", "last", "cpu")
    device = jax.devices()[0]
    returns = [[episode.ret for episode in play(agent, 4, 1, device)] for agent in (restored, model)]
    assert returns[0] == returns[1]
    forgetful = restored._replace(params=restored.params._replace(obs=make_normaliser(e, restored.spec).init().obs))
    assert [episode.ret for episode in play(forgetful, 4, 1, device)] != returns[0]


def test_evaluation_leaves_the_statistics_as_they_are(run):
    agent = load_policy(run, "last", "cpu")
    before = jax.tree.map(np.array, agent.params)
    play(agent, 2, 5, jax.devices()[0])
    assert all(jax.tree.leaves(jax.tree.map(np.array_equal, before, agent.params)))


def test_mujoco_is_filmed_without_a_display(run):
    if ctypes.util.find_library("EGL") is None:
        pytest.skip("libEGL is not installed")
    ended = command("eval", run, "--episodes", "1", "--video")
    assert ended.code == 0, ended.err
    assert [film.stat().st_size > 1000 for film in (run / "videos").iterdir()] == [True]


def test_without_the_library_that_draws_it_films_are_refused_in_a_sentence(run, monkeypatch):
    monkeypatch.setattr("cleanba.environments.envpool.opengl", lambda: False)
    ended = command("eval", run, "--episodes", "1", "--video")
    assert ended.code == 2 and "libEGL.so.1; install it" in ended.err and "Traceback" not in ended.err


def test_killed_and_resumed_elsewhere_it_ends_in_the_bits_of_one_that_never_stopped(run, tmp_path):
    again = tmp_path / "again"
    words = [*WORDS.split(), "--run-dir", again]
    ended = finish(python(ROOT / "tests" / "killed.py", "save", "2", "ppo", *words))
    assert ended.code == -signal.SIGKILL and not (again / "result.json").exists(), ended
    ended = command("resume", again, "--learner-device-ids", "0", "1")
    assert ended.code == 0 and "resuming after update" in ended.out, ended
    for name in ("params_digest", "learner_digest", "episodes", "episodic_return"):
        assert read_result(again)[name] == read_result(run)[name], name


def test_with_an_lstm_the_defaults_fit_too():
    choose = lambda **typed: resolve(RECIPES["ppo"], {"env_id": "HalfCheetah-v5", **typed}, "cpu").experiment
    assert choose().num_minibatches == 32
    recurrent = choose(core="lstm")
    fit(RECIPES["ppo"], recurrent, Placement())
    assert recurrent.num_minibatches == 4 and recurrent.update_epochs == 10
    assert choose(core="lstm", num_minibatches=8).num_minibatches == 8


def test_evaluation_with_epsilon_needs_discrete_actions(run):
    ended = command("eval", run, "--episodes", "1", "--epsilon", "0.5")
    assert ended.code == 2 and "epsilon=0.5 needs a single discrete action" in ended.err


def test_actors_normalise_with_the_statistics_of_their_version():
    # Without concurrency nothing has moved when the first minibatch is learnt from but the statistics themselves.
    scripts = Scripts((Play((1.0,) * 5),))
    words = dict(num_envs=2, num_actors=1, num_shards=1, num_steps=8, hiddens=(4,), num_minibatches=1, update_epochs=1)
    words |= dict(total_timesteps=10 * 16, concurrency=False, env_epoch=0, learning_rate=1e-9)
    deviation = {}
    for norm_obs in (False, True):
        e = ppo.PPO(**words, norm_obs=norm_obs)
        record = finished(e, spec=scripted_spec(), make_envs=scripts)
        deviation[norm_obs] = record.column("losses/first_ratio_deviation")
    assert max(deviation[False]) < 1e-6
    assert deviation[True][0] > deviation[True][-1] > 1e-7  # they settle


def test_a_choice_is_still_one_number():
    assert choice(3).size == 1 and EnvSpec("x", None, choice(3), False, False, {}).action == choice(3)


@pytest.mark.parametrize(
    "low, high, log_std, warned",
    [
        (-1, 1, 0.0, False),
        (-0.4, 0.4, 0.0, False),  # Humanoid
        (-50, 50, 0.0, False),
        (-100, 400, 0.0, True),
        (-100, 400, 4.0, False),
        (2, 3, 0.0, True),
        (-float("inf"), float("inf"), 0.0, False),
        (-3.4e38, 3.4e38, 0.0, False),
        (2, 2, 0.0, False),
        (-float("inf"), -1, 0.0, True),
    ],
)
def test_bounds_that_do_not_suit_a_new_policy_come_with_a_warning(low, high, log_std, warned):
    infinite = float("inf")
    action = ActionSpec("quantities", (2,), "float32", low=(-infinite, low), high=(infinite, high))
    words = bounds_words(ppo.PPO(log_std_init=log_std), action)
    assert (f"has the bounds {low:g} to {high:g}, but a new policy" in words) == warned == bool(words)
    assert bounds_words(RECIPES["sac"].experiment(), action) == bounds_words(ppo.PPO(), choice(2)) == ""
