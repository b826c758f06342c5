"""PPO's whole update against numpy in float64 with finite differences, what masks must hide, and its schedule."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.flatten_util import ravel_pytree
from slowly import Data, finite_difference, log_softmax, slow_corrected_gae, slow_gae

from cleanba.algorithms import batches, ppo
from cleanba.networks import ActorCritic
from cleanba.networks.cores import LSTMCarry
from cleanba.recipes import RECIPES
from cleanba.rollout import Rollout
from cleanba.specs import EnvSpec, ObsSpec, choice

OBS, ACTIONS, T, B = 3, 3, 6, 4
SPEC = EnvSpec("tiny", ObsSpec("vector", (OBS,), "float32"), choice(ACTIONS), False, False, {})

# One letter per step and environment: `.` goes on, `T` terminates, `U` truncates, `x` is ignored.
LAYOUT = np.array([list(column) for column in ("..Tx..", "xUx...", "......", ".....T")]).T


def tiny(**changes) -> ppo.PPO:
    """An experiment of 28 parameters with a long step, one minibatch and one epoch."""
    defaults = dict(
        network="mlp",
        hiddens=(3,),
        lstm_size=3,
        num_envs=B,
        num_steps=T,
        num_minibatches=1,
        update_epochs=1,
        total_timesteps=10 * B * T,
        learning_rate=0.02,
        gamma=0.9,
        gae_lambda=0.8,
        clip_coef=0.15,
        ent_coef=0.05,
        vf_coef=0.7,
        max_grad_norm=1e9,
    )
    return ppo.PPO(**(defaults | changes))


def tiny_rollout(layout: np.ndarray = LAYOUT, seed: int = 0, recurrent: bool = False) -> Rollout:
    """Random data [T, B] of that layout, as numpy; behaviour probabilities differ from the policy's."""
    rng = np.random.default_rng(seed)
    t, b = layout.shape
    single = lambda *shape: rng.normal(size=shape).astype(np.float32)
    valid = layout != "x"
    first = np.concatenate([rng.random((1, b)) < 0.5, ~valid])
    return Rollout(
        obs=single(t + 1, b, OBS),
        first=first,
        action=rng.integers(ACTIONS, size=(t, b)).astype(np.int32),
        reward=np.where(valid, 2 * single(t, b), 0),
        terminated=layout == "T",
        truncated=layout == "U",
        valid=valid,
        extras={"log_prob": np.float32(np.log(1 / 3)) + 0.2 * single(t, b)},
        carry=LSTMCarry(h=single(b, 3), c=single(b, 3)) if recurrent else (),
    )


def cut(rollout: Rollout, shards: int) -> Rollout:
    """Leaves [T, B, ...] -> [K, T, B / K, ...]; the carry's [B, ...] -> [K, B / K, ...]."""
    along = lambda axis: lambda x: np.stack(np.split(x, shards, axis))
    body = jax.tree.map(along(1), rollout._replace(carry=()))
    return body._replace(carry=jax.tree.map(along(0), rollout.carry))


class Problem:
    """A compiled update and a state to start from."""

    def __init__(self, on_devices, num_shards: int, num_devices: int, platform: str = "cpu", **changes):
        self.e, self.num_shards = tiny(**changes), num_shards
        self.algorithm = RECIPES["ppo"].make(self.e, SPEC, platform)

        # Any parameters will do; the heads at their initial scale would leave some terms of the loss small.
        zeros = jax.tree.map(
            lambda x: np.zeros(x.shape, x.dtype), jax.eval_shape(self.algorithm.init, jax.random.key(0))
        )
        rng = np.random.default_rng(7)
        draw = lambda x: rng.normal(size=x.shape).astype(x.dtype)
        self.state = zeros._replace(params=jax.tree.map(draw, zeros.params))

        update = lambda shards, start, rollout: self.algorithm.update(start[0], (), rollout, shards, start[1])[::2]
        self.on_mesh = on_devices(update, num_shards, num_devices, optimise=num_shards > 1)

    def update(self, rollout: Rollout, key: int = 0, updates: int = 0):
        """One update, after `updates` others -> state, metrics."""
        state = self.state._replace(updates=jnp.int32(updates))
        return self.on_mesh((state, jax.random.key(key)), cut(rollout, self.num_shards))


@pytest.fixture(scope="module")
def problem(on_devices):
    """problem(num_shards, num_devices, **changes) -> the `Problem` of that experiment, compiled once."""
    make = cache(lambda changes, *split: Problem(on_devices, *split, **dict(changes)))
    return lambda num_shards=1, num_devices=1, **changes: make(tuple(changes.items()), num_shards, num_devices)


def same_bits(a, b) -> bool:
    pairs = zip(*map(jax.tree.leaves, (a, b)), strict=True)
    return all(np.asarray(x).tobytes() == np.asarray(y).tobytes() for x, y in pairs)


def flat(params) -> np.ndarray:
    return np.asarray(ravel_pytree(params)[0], np.float64)


def seen_gradient(state) -> np.ndarray:
    """The clipped gradient of a first step: Adam's first moment is then a tenth of it."""
    return 10 * flat(optax.tree_utils.tree_get(state.optimiser, "mu"))


# -------------------------------------------------------------------------------- the same update, in numpy


def numpy_policy(params, obs):
    """The MLP's log-probabilities [..., A] and values [...], in float64."""
    p = jax.tree.map(lambda x: np.asarray(x, np.float64), params)["params"]
    layer = lambda x, w: x @ w["kernel"] + w["bias"]
    hidden = np.tanh(layer(obs, p["MLP_0"]["Dense_0"]["Dense_0"]))
    return log_softmax(layer(hidden, p["policy"]["Dense_0"])), layer(hidden, p["value"]["Dense_0"])[..., 0]


def numpy_log_prob(params, r):
    """Of the actions that were taken, and the values, [T, B]."""
    log_pi, value = numpy_policy(params, r.obs[:-1])
    return np.take_along_axis(log_pi, r.action[..., None], -1)[..., 0], value, log_pi


def numpy_losses(e, params, r, raw_advantage, target, proximal):
    """All terms of the loss as means over the valid steps of the batch; `proximal` are the parameters before it."""
    mean = lambda x: x[r.valid].mean()
    log_prob, value, log_pi = numpy_log_prob(params, r)
    before, acted = numpy_log_prob(proximal, r)[0], r.extras["log_prob"]
    to_acting, to_proximal = np.exp(log_prob - acted), np.exp(log_prob - before)
    log_ratio = log_prob - (acted if e.lag_correction in ("none", "vtrace") else before)
    ratio = np.exp(log_ratio)
    center, scale = (mean(raw_advantage), raw_advantage[r.valid].std()) if e.norm_adv else (0, 1)
    advantage = (raw_advantage - center) / scale
    clip = lambda x: np.clip(x, 1 - e.clip_coef, 1 + e.clip_coef)
    if e.lag_correction in ("decoupled", "both"):  # Hilton et al. 2021
        capped = np.minimum(1, e.lag_weight_cap / np.exp(before - acted))
        clipped = clip(to_proximal) * np.exp(before - acted) * advantage
        surrogate = capped * np.minimum(to_acting * advantage, clipped)
    else:
        surrogate = np.minimum(ratio * advantage, clip(ratio) * advantage)
    error = (value - target) ** 2
    if e.clip_vloss:
        old = numpy_log_prob(proximal, r)[1]
        error = np.maximum(error, (np.clip(value, old - e.clip_coef, old + e.clip_coef) - target) ** 2)
    policy_loss, value_loss = mean(-surrogate), mean(error) / 2
    entropy = mean(-(np.exp(log_pi) * log_pi).sum(-1))
    return {
        "loss": policy_loss - e.ent_coef * entropy + e.vf_coef * value_loss,
        "policy_loss": policy_loss,
        "value_loss": value_loss,
        "entropy": entropy,
        "approx_kl": mean(ratio - 1 - log_ratio),
        "first_ratio_deviation": mean(abs(ratio - 1)),
        "clipfrac": mean(abs(ratio - 1) > e.clip_coef),
    }


def numpy_update(e, params, r):
    """Every epoch one step of Adam along the clipped gradient of the whole batch -> parameters, gradient, metrics."""
    shapes, tree = jax.tree.flatten(jax.tree.map(np.shape, params), is_leaf=lambda x: isinstance(x, tuple))
    ends = np.cumsum([int(np.prod(s)) for s in shapes])[:-1]
    unflat = lambda x: tree.unflatten([p.reshape(s) for p, s in zip(np.split(x, ends), shapes, strict=True)])

    _, value = numpy_policy(params, r.obs)
    lag = numpy_log_prob(params, r)[0] - r.extras["log_prob"]
    data = Data(value, lag, r.reward, r.terminated, r.truncated, r.valid)
    if e.lag_correction in ("vtrace", "both"):
        target, advantage = slow_corrected_gae(data, e.gamma, e.gae_lambda, e.lag_trace_cap)
    else:
        advantage = slow_gae(data, e.gamma, e.gae_lambda)
        target = advantage + value[:-1]
    losses = lambda x: numpy_losses(e, unflat(x), r, advantage, target, params)

    x = flat(params)
    m, v = np.zeros_like(x), np.zeros_like(x)
    first = {"first_ratio_deviation": losses(x)["first_ratio_deviation"]}
    for step in range(1, e.update_epochs + 1):
        metrics = losses(x) | first
        gradient = finite_difference(lambda x: losses(x)["loss"], x)
        norm = np.sqrt((gradient**2).sum())
        gradient *= min(1.0, e.max_grad_norm / norm)
        m, v = 0.9 * m + 0.1 * gradient, 0.999 * v + 0.001 * gradient**2
        x = x - e.learning_rate * (m / (1 - 0.9**step)) / (np.sqrt(v / (1 - 0.999**step)) + 1e-5)
    variance = lambda x: x[r.valid].var()
    metrics |= {"grad_norm": norm, "explained_variance": 1 - variance(target - value[:-1]) / variance(target)}
    return x, gradient, metrics


OTHERWISE = dict(update_epochs=3, norm_adv=False, max_grad_norm=0.1, ent_coef=0.0, anneal_lr=False)
CLIPPED = dict(update_epochs=3, clip_vloss=True, clip_coef=0.05, learning_rate=0.05)
CORRECTED = [dict(update_epochs=3, lag_correction=name) for name in ("proximal", "decoupled", "vtrace")]
CORRECTED += [dict(update_epochs=2, lag_correction="both", lag_weight_cap=1.1, learning_rate=0.05)]
CORRECTED += [dict(update_epochs=3, lag_correction="vtrace", lag_trace_cap=1.5)]


@pytest.mark.parametrize("changes", [dict(), OTHERWISE, CLIPPED, *CORRECTED], ids=str)
def test_update_equals_numpy_with_finite_differences(problem, changes):
    p, rollout = problem(**changes), tiny_rollout()
    state, metrics = p.update(rollout)
    params, gradient, expected = numpy_update(p.e, p.state.params, rollout)
    assert 0 < expected["clipfrac"] < 1 and expected["grad_norm"] > 0.05
    for name, value in expected.items():
        np.testing.assert_allclose(metrics[f"losses/{name}"], value, rtol=1e-4, atol=1e-6, err_msg=name)
    if p.e.update_epochs == 1:
        np.testing.assert_allclose(seen_gradient(state), gradient, rtol=1e-3, atol=1e-5)
    np.testing.assert_allclose(flat(state.params), params, atol=0.02 * p.e.learning_rate)


def slow_distance(params, r):
    """What is logged of the distance between the policy that learns and the one that acted."""
    log_ratio = (numpy_log_prob(params, r)[0] - r.extras["log_prob"])[r.valid]
    w = np.exp(log_ratio)
    return {
        "lag_kl": np.mean(w - 1 - log_ratio),
        "lag_ratio_mean": w.mean(),
        "lag_ratio_max": w.max(),
        "lag_effective_samples": w.sum() ** 2 / (len(w) * (w**2).sum()),
    }


@pytest.mark.parametrize("shards", [1, 2])
def test_the_distance_between_versions_is_logged(problem, shards):
    p, rollout = problem(shards, shards), tiny_rollout()
    metrics = p.update(rollout)[1]
    expected = slow_distance(p.state.params, rollout)
    assert expected["lag_effective_samples"] < 0.95 and expected["lag_ratio_max"] > 1.5
    for name, value in expected.items():
        np.testing.assert_allclose(metrics[f"stats/{name}"], value, rtol=1e-4, err_msg=name)


def test_without_lag_every_correction_gives_the_same_step(problem):
    none, rollout = problem(), tiny_rollout()
    acted = np.float32(numpy_log_prob(none.state.params, rollout)[0])
    metrics = none.update(rollout._replace(extras={"log_prob": acted}))[1]
    assert metrics["stats/lag_kl"] < 1e-9 and abs(metrics["stats/lag_effective_samples"] - 1) < 1e-6
    expected, _ = problem(update_epochs=3).update(rollout._replace(extras={"log_prob": acted}))
    for name in ("proximal", "decoupled", "vtrace"):
        p = problem(update_epochs=3, lag_correction=name)
        corrected, _ = p.update(rollout._replace(extras={"log_prob": acted}))
        np.testing.assert_allclose(flat(corrected.params), flat(expected.params), atol=1e-5)
        if name != "proximal":  # which never asks who acted
            other, _ = p.update(rollout)
            assert abs(flat(other.params) - flat(expected.params)).max() > 1e-3


def test_without_concurrency_there_is_no_lag_and_nothing_is_corrected(problem):
    rollout = tiny_rollout()
    expected = problem().update(rollout)
    for name in ("decoupled", "both"):
        assert same_bits(problem(concurrency=False, lag_correction=name).update(rollout), expected)


@pytest.mark.parametrize("by", [1, -1], ids=["late", "early"])
@pytest.mark.parametrize("name", ["obs", "action", "reward", "log_prob", "terminated", "truncated", "valid"])
def test_numpys_gradient_differs_if_any_array_is_one_step_off(problem, name, by):
    off, rollout = lambda x: np.roll(x, by, axis=0), tiny_rollout()
    if name == "log_prob":
        wrong = rollout._replace(extras={"log_prob": off(rollout.extras["log_prob"])})
    else:
        wrong = rollout._replace(**{name: off(getattr(rollout, name))})
    p = problem()
    _, gradient, _ = numpy_update(p.e, p.state.params, wrong)
    assert abs(seen_gradient(p.update(rollout)[0]) - gradient).max() > 5e-3


# -------------------------------------------------------------------------------------------------- the mask


@pytest.fixture(params=["none", "lstm"])
def shuffled(request, problem):
    """Two epochs of two minibatches, with and without memory."""
    return problem(core=request.param, num_minibatches=2, update_epochs=2)


def rollout_for(p: Problem, **options) -> Rollout:
    return tiny_rollout(recurrent=p.e.core == "lstm", **options)


def changed(rollout: Rollout, name: str, where: np.ndarray) -> Rollout:
    """The rollout with other numbers in one field, at those steps."""
    if name == "log_prob":
        return rollout._replace(extras={"log_prob": np.where(where, np.float32(-0.1), rollout.extras["log_prob"])})
    x = getattr(rollout, name).copy()
    if name == "obs":
        x[:-1][where] = 50.0
    else:
        x[where] = {"action": (x[where] + 1) % ACTIONS, "reward": 100.0}[name]
    return rollout._replace(**{name: x})


def after(ended: np.ndarray) -> np.ndarray:
    return np.concatenate([np.zeros((1, B), bool), ended[:-1]])


@pytest.mark.parametrize("name", ["obs", "action", "reward", "log_prob"])
def test_the_contents_of_an_ignored_step_do_not_change_a_bit(shuffled, name):
    rollout = rollout_for(shuffled)
    # The last observation of a truncated episode still has a value, so it does count.
    where = after(rollout.terminated) if name == "obs" else ~rollout.valid
    other = changed(rollout, name, where)
    assert not same_bits(rollout, other)
    assert same_bits(shuffled.update(rollout), shuffled.update(other))


def test_the_contents_of_an_ignored_step_do_not_change_a_bit_with_lag_corrections(problem):
    p = problem(update_epochs=2, lag_correction="both", lag_weight_cap=1.1, learning_rate=0.05)
    rollout = rollout_for(p)
    expected = p.update(rollout)
    for name in ("obs", "action", "reward", "log_prob"):
        other = changed(rollout, name, after(rollout.terminated) if name == "obs" else ~rollout.valid)
        assert same_bits(expected, p.update(other)), name


@pytest.mark.parametrize("name", ["obs", "action", "reward", "log_prob"])
@pytest.mark.parametrize("t, b", [(0, 0), (2, 0), (5, 3), (4, 1)])
def test_the_contents_of_an_executed_step_are_learnt_from(shuffled, name, t, b):
    rollout = rollout_for(shuffled)
    where = np.zeros((T, B), bool)
    where[t, b] = True
    assert not same_bits(shuffled.update(rollout), shuffled.update(changed(rollout, name, where)))


def test_a_truncated_episode_bootstraps_with_its_last_observation(shuffled):
    rollout = rollout_for(shuffled)
    other = changed(rollout, "obs", after(rollout.truncated))
    assert not same_bits(shuffled.update(rollout)[0].params, shuffled.update(other)[0].params)


def test_the_observation_after_the_rollout_is_bootstrapped_with(shuffled):
    rollout = rollout_for(shuffled)
    for b in range(B):
        obs = rollout.obs.copy()
        obs[-1, b] += 1.0
        terminated = rollout.terminated[-1, b]  # nothing comes after
        assert same_bits(shuffled.update(rollout), shuffled.update(rollout._replace(obs=obs))) == terminated


def test_memory_starts_from_the_rollouts_carry_unless_the_first_step_is_the_first_of_an_episode(problem):
    p = problem(core="lstm")
    rollout = rollout_for(p)
    for forgets in (True, False):
        first = rollout.first.copy()
        first[0] = forgets
        before = rollout._replace(first=first)
        other = before._replace(carry=jax.tree.map(lambda x: x + 1, before.carry))
        assert same_bits(p.update(before), p.update(other)) == forgets


def test_a_rollout_without_a_valid_step_leaves_no_nan(shuffled):
    rollout = rollout_for(shuffled)
    state, metrics = shuffled.update(rollout._replace(valid=np.zeros_like(rollout.valid)))
    assert all(np.isfinite(x).all() for x in jax.tree.leaves((state.params, metrics)))


# ------------------------------------------------------------------------------- shards, minibatches, schedule


def test_two_shards_learn_what_one_shard_learns(problem):
    # Advantages are normalised, and means taken, over the valid steps of both, here 12 and 6, of different scale.
    layout = np.array([list(column) for column in ("......", "......", "xTxTxT", "TxUxTx")]).T
    rollout = tiny_rollout(layout)
    other_scale = 3 * rollout.reward + 5 * rollout.valid
    rollout = rollout._replace(reward=np.where(np.arange(B) < 2, rollout.reward, other_scale))
    one, two = (problem(*split).update(rollout) for split in [(1, 1), (2, 2)])
    for name, value in one[1].items():
        np.testing.assert_allclose(two[1][name], value, rtol=1e-4, atol=1e-6, err_msg=name)
    np.testing.assert_allclose(seen_gradient(two[0]), seen_gradient(one[0]), rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("core, shards, steps, per_shard, changes", [
    # A single minibatch is the hard case: XLA then unrolls a loop, and may use constants that it otherwise cannot.
    ("none", 6, 8, 4, dict(hiddens=(16,))),
    ("lstm", 6, 8, 4, dict(hiddens=(16,))),
    ("lstm", 4, 9, 5, dict(hiddens=(32, 16), norm_adv=False)),
    ("none", 3, 4, 4, dict(hiddens=(), num_minibatches=2, update_epochs=2, lag_correction="both")),
    # So few numbers that XLA would compile the loop over the shards as one function, and reorder its sums.
    ("none", 2, 4, 2, dict(hiddens=())),
    ("lstm", 2, 4, 2, dict(hiddens=())),
])  # fmt: skip
def test_shards_learn_the_same_bits_on_one_device_and_on_one_each(problem, core, shards, steps, per_shard, changes):
    layout = np.random.default_rng(2).choice(list("....TUx"), size=(steps, shards * per_shard))
    rollout = tiny_rollout(layout, recurrent=core == "lstm")
    sizes = dict(num_envs=shards * per_shard, num_steps=steps, max_grad_norm=0.5, core=core)
    one, each = (problem(shards, n, **sizes, **changes).update(rollout) for n in (1, shards))
    assert same_bits(one, each)


def test_gradients_of_pieces_add_up_and_to_the_same_bits_on_all_devices(on_devices, monkeypatch):
    monkeypatch.setattr(EnvSpec, "shows_images", True)  # which alone are cut
    steps, sizes = 8, dict(num_envs=8, num_minibatches=2, update_epochs=2)
    rollout = tiny_rollout(np.random.default_rng(3).choice(list("....TUx"), size=(steps, 8)))
    update = lambda devices: Problem(on_devices, 2, devices, num_steps=steps, **sizes).update(rollout)
    whole = update(1)
    monkeypatch.setattr(batches, "CACHED", OBS * 4 * 4)  # 4 of a minibatch's 16 transitions
    one, each = update(1), update(2)
    assert same_bits(one, each)
    assert not same_bits(one, whole)  # added in another order
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-5), one, whole)


@pytest.mark.parametrize("core", ["none", "lstm"])
def test_minibatches_of_an_epoch_hold_every_step_once(problem, core):
    whole, halves = problem(core=core), problem(core=core, num_minibatches=2, update_epochs=2)
    rollout = rollout_for(whole, layout=np.full((T, B), "."))
    # At the end of its schedule the learning rate is 0, so that all minibatches see the same policy.
    expected, metrics = (p.update(rollout, updates=p.e.num_updates)[1] for p in (whole, halves))
    assert abs(metrics["charts/learning_rate"]) < 1e-8
    for name in ("value_loss", "entropy", "approx_kl", "clipfrac"):
        np.testing.assert_allclose(metrics[f"losses/{name}"], expected[f"losses/{name}"], rtol=1e-4, err_msg=name)


@pytest.mark.parametrize("core", ["none", "lstm"])
@pytest.mark.parametrize("steps", [1, 3, T + 1])
def test_a_gpu_learns_the_same_from_values_of_some_steps_at_a_time(problem, on_devices, monkeypatch, core, steps):
    seen, outputs = [], ActorCritic.outputs

    def noted(self, params, obs, first, carry):
        seen.append(first.shape[0])
        return outputs(self, params, obs, first, carry)

    monkeypatch.setattr(batches, "AT_ONCE", steps * B * OBS * 4)
    on_cpu, on_gpu = problem(core=core), Problem(on_devices, 1, 1, "gpu", core=core)
    rollout = rollout_for(on_cpu)
    expected = on_cpu.update(rollout)
    monkeypatch.setattr(ActorCritic, "outputs", noted)
    state, metrics = on_gpu.update(rollout)
    assert steps in seen and max(seen[:-1]) <= steps  # the last are a minibatch's
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), metrics, expected[1])
    np.testing.assert_allclose(flat(state.params), flat(expected[0].params), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("core", ["none", "lstm"])
def test_on_a_gpu_no_update_scatters_and_only_permutations_sort(on_devices, core):
    p = Problem(on_devices, 2, 1, "gpu", core=core, num_minibatches=2, update_epochs=2)
    rollout = cut(tiny_rollout(recurrent=core == "lstm"), 2)
    text = p.on_mesh.trace((p.state, jax.random.key(0)), rollout).lower(lowering_platforms=("cuda",)).as_text()
    assert "scatter" not in text
    assert text.count("stablehlo.sort") == 1


def test_minibatches_are_drawn_by_the_key_alone(shuffled):
    rollout = rollout_for(shuffled)
    assert same_bits(shuffled.update(rollout, key=1), shuffled.update(rollout, key=1))
    assert len({flat(shuffled.update(rollout, key=k)[0].params).tobytes() for k in range(8)}) > 1


def test_learning_rate_falls_linearly_to_zero_and_scales_the_step(problem):
    annealed, constant, rollout = problem(), problem(**OTHERWISE), tiny_rollout()
    assert annealed.e.num_updates == 10

    def rate_and_step(p, updates):
        state, metrics = p.update(rollout, updates=updates)
        assert state.updates == updates + 1
        return metrics["charts/learning_rate"], flat(state.params) - flat(p.state.params)

    for updates in (0, 1, 5, 9):
        for p, left in ((annealed, 1 - updates / 10), (constant, 1.0)):
            rate, step = rate_and_step(p, updates)
            np.testing.assert_allclose(rate, 0.02 * left, rtol=1e-6)
            np.testing.assert_allclose(step, rate_and_step(p, 0)[1] * left, atol=1e-6)


def test_acting_samples_from_the_policy_and_remembers_its_log_probability(problem):
    p = problem()
    act = jax.jit(p.algorithm.act, static_argnums=5)
    obs, first = np.tile(np.float32([[0.3, -1.0, 0.5]]), (4000, 1)), np.zeros(4000, bool)
    action, carry, extras = act(p.state.params, (), obs, first, jax.random.key(0), True)
    log_pi, _ = numpy_policy(p.state.params, obs[0])
    assert action.dtype == jnp.int32 and carry == ()
    np.testing.assert_allclose(extras["log_prob"], log_pi[np.asarray(action)], rtol=1e-4)
    np.testing.assert_allclose(np.bincount(action, minlength=ACTIONS) / len(obs), np.exp(log_pi), atol=0.04)
    greedy, _, _ = act(p.state.params, (), obs, first, jax.random.key(0), False)
    assert (greedy == log_pi.argmax()).all()
