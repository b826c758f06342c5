"""IMPALA's whole update: against numpy, by hand, over shards and devices; every rollout is learnt from once."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.flatten_util import ravel_pytree
from launch import digests, finished
from scripted import Play, Scripts, spec

from cleanba.algorithms import impala
from cleanba.rollout import Rollout
from cleanba.specs import EnvSpec, ObsSpec, choice

T, B, OBS, ACTIONS = 6, 4, 3, 3

# One letter per step and environment: `.` goes on, `T` terminates, `U` truncates, `x` is ignored.
LAYOUT = np.array([list(column) for column in ("..Tx.U", "xUx...", "......", "Tx...T")]).T


def tiny(**changes) -> impala.IMPALA:
    """28 parameters, one minibatch, and a step from which the gradient can be read off (see `gradient_of_step`)."""
    values = dict(num_envs=B, num_steps=T, network="mlp", hiddens=(3,), num_minibatches=1, gamma=0.9, ent_coef=0.05)
    values |= dict(vf_coef=0.7, loss_scale=3.0, vtrace_lambda=0.8, rho_clip=1.2, c_clip=0.9, max_grad_norm=1e9)
    values |= dict(learning_rate=0.5, rmsprop_eps=10.0, anneal_lr=False, total_timesteps=10 * B * T) | changes
    return impala.IMPALA(**values)


def random_rollout(layout: np.ndarray = LAYOUT, seed: int = 0) -> Rollout:
    """Random numbers [T, B] of that layout; the behaviour's probabilities are not the policy's."""
    rng = np.random.default_rng(seed)
    t, b = layout.shape
    normal = lambda *shape: rng.normal(size=shape).astype(np.float32)
    valid = layout != "x"
    return Rollout(
        obs=normal(t + 1, b, OBS),
        first=np.concatenate([np.zeros((1, b), bool), ~valid]),
        action=rng.integers(ACTIONS, size=(t, b)).astype(np.int32),
        reward=np.where(valid, 2 * normal(t, b), 0).astype(np.float32),
        terminated=layout == "T",
        truncated=layout == "U",
        valid=valid,
        extras={"log_prob": np.float32(np.log(1 / ACTIONS)) + 0.3 * normal(t, b)},
        carry=(),
    )


def cut(rollout: Rollout, shards: int) -> Rollout:
    """Leaves [T, B, ...] -> [K, T, B / K, ...]."""
    return jax.tree.map(lambda x: np.stack(np.split(x, shards, 1)), rollout)


class Problem:
    """A compiled update, and parameters to start from that leave no term of the loss small."""

    def __init__(self, on_devices, num_shards: int, num_devices: int, obs: int, actions: int, **changes):
        self.e, self.num_shards = tiny(**changes), num_shards
        env_spec = EnvSpec("tiny", ObsSpec("vector", (obs,), "float32"), choice(actions), False, False, {})
        self.algorithm = impala.make(self.e, env_spec, "cpu")
        state = jax.jit(self.algorithm.init)(jax.random.key(7))
        grow = lambda p: p + 0.5 * jax.random.normal(jax.random.key(p.size), p.shape)
        self.state = state._replace(params=jax.tree.map(grow, state.params))
        run = lambda shards, state, rollout: self.algorithm.update(state, (), rollout, shards, jax.random.key(0))[::2]
        self.on_mesh = on_devices(run, num_shards, num_devices, optimise=num_shards > 1)

    def update(self, rollout: Rollout, state=None):
        """One update -> state, metrics."""
        return self.on_mesh(self.state if state is None else state, cut(rollout, self.num_shards))

    def gradient(self, rollout: Rollout, state=None) -> np.ndarray:
        """The gradient of a first update with one minibatch, all parameters in one row.

        RMSProp's first step is rate * g / (sqrt(1 - decay) |g| + eps); this is g.
        """
        state = self.state if state is None else state
        direction = (flat(state.params) - flat(self.update(rollout, state)[0].params)) / self.e.learning_rate
        return self.e.rmsprop_eps * direction / (1 - np.sqrt(1 - self.e.rmsprop_decay) * abs(direction))


@pytest.fixture(scope="module")
def problem(on_devices):
    """problem(num_shards, num_devices, **changes) -> the `Problem` of that experiment, compiled once."""
    make = cache(lambda changes, *args: Problem(on_devices, *args, **dict(changes)))
    return lambda num_shards=1, num_devices=1, obs=OBS, actions=ACTIONS, **changes: make(
        tuple(changes.items()), num_shards, num_devices, obs, actions
    )


def flat(tree) -> np.ndarray:
    return np.asarray(ravel_pytree(tree)[0], np.float64)


def same_bits(a, b) -> bool:
    pairs = zip(*map(jax.tree.leaves, (a, b)), strict=True)
    return all(np.asarray(x).tobytes() == np.asarray(y).tobytes() for x, y in pairs)


# ---------------------------------------------------------------------------------------- the same update, in numpy


def numpy_policy(like, x, obs):
    """The MLP with parameters x in one row, shaped like `like` -> log-probabilities [..., A], values [...]; float64."""
    leaves, tree = jax.tree.flatten(like)
    parts = np.split(x, np.cumsum([p.size for p in leaves])[:-1])
    p = tree.unflatten([part.reshape(leaf.shape) for part, leaf in zip(parts, leaves, strict=True)])["params"]
    layer = lambda x, weights: x @ weights["kernel"] + weights["bias"]
    hidden = np.tanh(layer(obs, p["MLP_0"]["Dense_0"]["Dense_0"]))
    logits = layer(hidden, p["policy"]["Dense_0"])
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True)), layer(hidden, p["value"]["Dense_0"])[..., 0]


def numpy_chosen(log_pi, action):
    return np.take_along_axis(log_pi, action[..., None], -1)[..., 0]


def numpy_vtrace(e, r, value, ratio):
    """The paper's sum for every environment and step, up to the episode's end -> v_s, advantages."""
    target, advantage = value[:-1].copy(), np.zeros(r.reward.shape)
    ended = r.terminated | r.truncated
    plain = lambda t, b: 0.0 if r.terminated[t, b] else value[t + 1, b]
    for s, b in np.ndindex(r.reward.shape):
        trace = 1.0
        for t in range(s, len(r.reward)):
            rho = min(e.rho_clip, ratio[t, b])
            target[s, b] += trace * rho * (r.reward[t, b] + e.gamma * plain(t, b) - value[t, b])
            if ended[t, b]:
                break
            trace *= e.gamma * e.vtrace_lambda * min(e.c_clip, ratio[t, b])
    for s, b in np.ndindex(r.reward.shape):
        following = plain(s, b) if ended[s, b] or s + 1 == len(r.reward) else target[s + 1, b]
        rho = min(e.rho_clip, ratio[s, b])
        advantage[s, b] = rho * (r.reward[s, b] + e.gamma * following - value[s, b])
    return target, advantage


def numpy_gradient(e, like, x, r, scale=None):
    """The gradient of `scale` times the loss summed over valid steps, by central differences; and the mean terms.

    The scale is by default the one that makes of the sum `loss_scale` times the mean.
    """
    count = r.valid.sum()
    scale = e.loss_scale / count if scale is None else scale
    log_pi, value = numpy_policy(like, x, r.obs)
    ratio = np.exp(numpy_chosen(log_pi[:-1], r.action) - r.extras["log_prob"])
    target, advantage = numpy_vtrace(e, r, value, ratio)

    def terms(x):
        log_pi, value = (y[:-1][r.valid] for y in numpy_policy(like, x, r.obs))
        policy_loss = -(numpy_chosen(log_pi, r.action[r.valid]) * advantage[r.valid]).sum()
        return policy_loss, ((value - target[r.valid]) ** 2).sum() / 2, -(np.exp(log_pi) * log_pi).sum()

    loss = lambda x: scale * np.dot(terms(x), [1, e.vf_coef, -e.ent_coef])
    gradient = np.array([(loss(x + h) - loss(x - h)) / 2e-6 for h in 1e-6 * np.eye(x.size)])
    policy_loss, value_loss, entropy = np.array(terms(x)) / count
    return gradient, {
        "losses/policy_loss": policy_loss,
        "losses/value_loss": value_loss,
        "losses/entropy": entropy,
        "losses/loss": policy_loss + e.vf_coef * value_loss - e.ent_coef * entropy,
        "losses/importance_ratio": ratio[r.valid].mean(),
        "losses/first_ratio_deviation": abs(ratio[r.valid] - 1).mean(),
        "losses/grad_norm": np.sqrt((gradient**2).sum()),
    }


UNCLIPPED = dict(rho_clip=np.inf, c_clip=np.inf, vtrace_lambda=1.0, ent_coef=0.0)
ONE_TERM = dict(vf_coef=0.0, ent_coef=0.0)


@pytest.mark.parametrize("changes", [dict(), UNCLIPPED, ONE_TERM, dict(loss_scale=1.0, gamma=1.0)], ids=str)
@pytest.mark.parametrize("layout", [LAYOUT, np.full((T, B), ".")], ids=["ends", "no ends"])
def test_gradient_equals_numpy_with_finite_differences(problem, changes, layout):
    p, rollout = problem(**changes), random_rollout(layout)
    gradient, metrics = numpy_gradient(p.e, p.state.params, flat(p.state.params), rollout)
    assert metrics["losses/grad_norm"] > 1.0
    np.testing.assert_allclose(p.gradient(rollout), gradient, rtol=1e-3, atol=1e-4)
    got = p.update(rollout)[1]
    for name, value in metrics.items():
        np.testing.assert_allclose(got[name], value, rtol=1e-4, atol=1e-5, err_msg=name)


@pytest.mark.parametrize("by", [1, -1], ids=["late", "early"])
@pytest.mark.parametrize("name", ["obs", "action", "reward", "log_prob", "terminated", "truncated", "valid"])
def test_numpys_gradient_differs_if_any_array_is_one_step_off(problem, name, by):
    p, rollout = problem(), random_rollout()
    wrong, _ = numpy_gradient(p.e, p.state.params, flat(p.state.params), shifted(rollout, name, by))
    assert abs(p.gradient(rollout) - wrong).max() > 1e-2


def shifted(rollout: Rollout, name: str, by: int) -> Rollout:
    off = lambda x: np.roll(x, by, axis=0)
    if name == "log_prob":
        return rollout._replace(extras={name: off(rollout.extras[name])})
    return rollout._replace(**{name: off(getattr(rollout, name))})


# --------------------------------------------------------------------------------------------- optimiser and schedule


class NumpyRMSProp:
    """x - rate * g / (sqrt(E[g^2]) + eps), where E starts at 0; `inside` puts eps into the root, as TensorFlow does."""

    def __init__(self, e, inside=False):
        self.e, self.inside, self.mean_square = e, inside, 0.0

    def __call__(self, x, gradient, rate):
        e = self.e
        self.mean_square = e.rmsprop_decay * self.mean_square + (1 - e.rmsprop_decay) * gradient**2
        root = np.sqrt(self.mean_square + e.rmsprop_eps) if self.inside else np.sqrt(self.mean_square) + e.rmsprop_eps
        return x - rate * gradient / root


class TorchRMSProp:
    """PyTorch's own, without momentum and not centred."""

    def __init__(self, e):
        self.torch, self.e, self.optimiser = pytest.importorskip("torch"), e, None

    def __call__(self, x, gradient, rate):
        torch, e = self.torch, self.e
        if self.optimiser is None:
            self.x = torch.nn.Parameter(torch.tensor(x, dtype=torch.float64))
            self.optimiser = torch.optim.RMSprop([self.x], alpha=e.rmsprop_decay, eps=e.rmsprop_eps)
        self.optimiser.param_groups[0]["lr"] = rate
        self.x.grad = torch.tensor(gradient, dtype=torch.float64)
        self.optimiser.step()
        return self.x.detach().numpy().copy()


SEVERAL = dict(num_minibatches=2, learning_rate=0.01, rmsprop_eps=0.01, rmsprop_decay=0.8, anneal_lr=True)
SEVERAL |= dict(max_grad_norm=6.0, total_timesteps=5 * B * T)


def numpy_updates(e, like, rollouts, optimiser):
    """The parameters after one update per rollout, every M-th environment of each in turn."""
    x, clipped = flat(like), 0
    for update, rollout in enumerate(rollouts):
        groups = np.arange(B).reshape(-1, e.num_minibatches).T
        for group in np.tile(groups, (e.update_epochs, 1)):
            gradient, metrics = numpy_gradient(e, like, x, jax.tree.map(lambda leaf, g=group: leaf[:, g], rollout))
            norm = metrics["losses/grad_norm"]
            clipped += norm > e.max_grad_norm
            gradient *= min(1.0, e.max_grad_norm / norm)
            x = optimiser(x, gradient, e.learning_rate * (1 - update / 5))
    assert 0 < clipped < len(rollouts) * e.num_minibatches * e.update_epochs, (
        "the case must have gradients on both sides of the bound"
    )
    return x


@pytest.mark.parametrize("make_optimiser, epochs", [(NumpyRMSProp, 1), (TorchRMSProp, 1), (NumpyRMSProp, 2)])
def test_several_updates_equal_pytorchs_rmsprop_on_numpys_gradients(problem, make_optimiser, epochs):
    p, rollouts = problem(**SEVERAL, update_epochs=epochs), [random_rollout(seed=seed) for seed in range(4)]
    expected = numpy_updates(p.e, p.state.params, rollouts, make_optimiser(p.e))
    state = p.state
    for rollout in rollouts:
        state, _ = p.update(rollout, state)
    assert state.updates == 4
    assert abs(expected - flat(p.state.params)).max() > 0.05
    np.testing.assert_allclose(flat(state.params), expected, atol=2e-4)
    inside = numpy_updates(p.e, p.state.params, rollouts, NumpyRMSProp(p.e, inside=True))
    assert abs(inside - expected).max() > 0.01


def test_on_a_gpu_an_update_neither_scatters_nor_sorts(problem):
    p = problem(2, num_minibatches=2)
    text = p.on_mesh.trace(p.state, cut(random_rollout(), 2)).lower(lowering_platforms=("cuda",)).as_text()
    assert "scatter" not in text and "stablehlo.sort" not in text


def test_mean_square_gradient_starts_at_zero_and_decays(problem):
    p, (one, two) = problem(learning_rate=1e-30), (random_rollout(seed=seed) for seed in (0, 1))
    g = [numpy_gradient(p.e, p.state.params, flat(p.state.params), r)[0] for r in (one, two)]
    state = p.state
    for rollout, expected in ((one, 0.01 * g[0] ** 2), (two, 0.99 * 0.01 * g[0] ** 2 + 0.01 * g[1] ** 2)):
        state, _ = p.update(rollout, state)
        np.testing.assert_allclose(flat(optax.tree.get(state.optimiser, "nu")), expected, rtol=2e-3, atol=1e-6)


def test_learning_rate_falls_linearly_and_never_to_zero(problem):
    annealed, constant = (problem(anneal_lr=a, total_timesteps=4 * B * T) for a in (True, False))
    for p, rates in ((annealed, [0.5, 0.375, 0.25, 0.125]), (constant, [0.5] * 4)):
        first = flat(p.update(random_rollout())[0].params) - flat(p.state.params)
        for updates, rate in enumerate(rates):
            state, metrics = p.update(random_rollout(), p.state._replace(updates=jnp.int32(updates)))
            assert metrics["charts/learning_rate"] == rate
            np.testing.assert_allclose(flat(state.params) - flat(p.state.params), rate / 0.5 * first, atol=1e-6)


def test_defaults_are_cleanbas():
    e = impala.IMPALA()
    assert (e.num_steps, e.learning_rate, e.anneal_lr, e.gamma) == (20, 6e-4, True, 0.99)
    assert (e.ent_coef, e.vf_coef, e.max_grad_norm, e.num_minibatches) == (0.01, 0.5, 40.0, 4)
    assert (e.rmsprop_decay, e.rmsprop_eps) == (0.99, 0.01)
    assert (e.vtrace_lambda, e.rho_clip, e.c_clip) == (1.0, 1.0, 1.0)


def test_with_640_valid_steps_the_gradient_is_that_of_the_sum(problem):
    """Cleanba's default minibatch is 32 environments of 20 steps.  With fewer valid ones the step keeps its size."""
    p = problem(loss_scale=impala.IMPALA.loss_scale, rmsprop_eps=1000.0, num_envs=32, num_steps=20)
    x = flat(p.state.params)
    whole = random_rollout(np.full((20, 32), "."))
    of_sum, _ = numpy_gradient(p.e, p.state.params, x, whole, scale=1.0)
    np.testing.assert_allclose(p.gradient(whole), of_sum, rtol=2e-3, atol=1e-2)

    half = random_rollout(np.tile(np.array([["T"], ["x"]]), (10, 32)))
    assert half.valid.sum() == 320
    of_sum, _ = numpy_gradient(p.e, p.state.params, x, half, scale=1.0)
    np.testing.assert_allclose(p.gradient(half), 2 * of_sum, rtol=2e-3, atol=1e-2)


# ------------------------------------------------------------------------------------------- an episode of three steps

# t             0        1        2        3 (ignored)  4        (after)
# hidden     (-, -)   (-, +)   (+, -)   (+, +)       (-, -)   (+, +)        one unit per observed number
# V            -3        1       -1        3           -3        3          of weights 1 and 2
# action        0        1        1        0            0
# reward        1        2        4       16            8              the 16 must not count
#
# gamma 1/2, on-policy: v_2 = 4 (terminated) or 4 + 3/2 (truncated), v_1 = 2 + v_2/2, v_0 = 1 + v_1/2, v_4 = 8 + 3/2,
# and each advantage is v_s - V(s).  The policy is uniform: -log pi's gradient is -1/2 at the action, 1/2 elsewhere.
SIGNS = np.array([(-1, -1), (-1, 1), (1, -1), (1, 1), (-1, -1), (1, 1)], np.float32)


def three_steps(ends: str) -> Rollout:
    column = lambda *xs: np.array(xs)[:, None]
    at_2 = column(False, False, True, False, False)
    return Rollout(
        obs=30 * SIGNS[:, None],  # beyond where tanh has a slope: the hidden units are exactly -1 or 1
        first=column(True, False, False, False, True, False),
        action=column(0, 1, 1, 0, 0).astype(np.int32),
        reward=column(1, 2, 4, 16, 8).astype(np.float32),
        terminated=at_2 & (ends == "terminated"),
        truncated=at_2 & (ends == "truncated"),
        valid=column(True, True, True, False, True),
        extras={"log_prob": np.full((5, 1), np.log(0.5), np.float32)},
        carry=(),
    )


def by_hand(problem):
    """gradient(rollout) -> the gradient of the sum over the four executed steps, with weights as above."""
    p = problem(
        obs=2, actions=2, hiddens=(2,), num_envs=1, num_steps=5, gamma=0.5, vtrace_lambda=1.0, rho_clip=1.0,
        c_clip=1.0, vf_coef=1.0, ent_coef=0.0, loss_scale=4.0, rmsprop_eps=100.0,
    )  # fmt: skip
    params = jax.tree.map(jnp.zeros_like, p.state.params)["params"]
    params["MLP_0"]["Dense_0"]["Dense_0"]["kernel"] = jnp.eye(2)
    params["value"]["Dense_0"]["kernel"] = jnp.float32([[1], [2]])
    state = p.state._replace(params={"params": params})
    _, unflatten = ravel_pytree(state.params)

    def gradient(rollout):
        g = jax.tree.map(np.asarray, unflatten(jnp.float32(p.gradient(rollout, state)))["params"])
        assert not any(x.any() for x in jax.tree.leaves(g["MLP_0"]))
        return g["value"]["Dense_0"], g["policy"]["Dense_0"]

    return gradient


@pytest.mark.parametrize(
    "ends, v, advantage", [("terminated", (3, 4, 4), (6, 3, 5)), ("truncated", (3.375, 4.75, 5.5), (6.375, 3.75, 6.5))]
)
def test_three_steps_by_hand(problem, ends, v, advantage):
    value, policy = by_hand(problem)(three_steps(ends))
    executed = np.array([0, 1, 2, 4])
    error = np.array([-3 - v[0], 1 - v[1], -1 - v[2], -3 - 9.5])
    np.testing.assert_allclose(value["bias"], [error.sum()], rtol=1e-4)
    np.testing.assert_allclose(value["kernel"][:, 0], error @ SIGNS[executed], rtol=1e-4)
    for_action_1 = np.array([0.5, -0.5, -0.5, 0.5]) * [*advantage, 12.5]
    np.testing.assert_allclose(policy["bias"], [-for_action_1.sum(), for_action_1.sum()], rtol=1e-4)
    np.testing.assert_allclose(policy["kernel"][:, 1], for_action_1 @ SIGNS[executed], rtol=1e-4)
    if ends == "terminated":  # the same, worked out
        np.testing.assert_allclose([*value["bias"], *value["kernel"][:, 0]], [-26.5, 16.5, 20.5], rtol=1e-4)
        np.testing.assert_allclose([*policy["bias"], *policy["kernel"][:, 0]], [-5.25, 5.25, 10.25, 8.25], rtol=1e-4)


@pytest.mark.parametrize("by", [1, -1], ids=["late", "early"])
@pytest.mark.parametrize("name", ["obs", "action", "reward", "terminated", "truncated", "valid"])
def test_three_steps_shifted_by_one_step_give_another_gradient(problem, name, by):
    gradient, rollout = by_hand(problem), three_steps("truncated" if name == "truncated" else "terminated")
    differences = jax.tree.map(lambda a, b: abs(a - b).max(), gradient(rollout), gradient(shifted(rollout, name, by)))
    assert max(jax.tree.leaves(differences)) > 0.5


# ------------------------------------------------------------------------------------------------ what is learnt from


def changed(rollout: Rollout, name: str, where: np.ndarray) -> Rollout:
    """The rollout with other numbers in one field, at those steps."""
    if name == "log_prob":
        return rollout._replace(extras={name: np.where(where, np.float32(-0.1), rollout.extras[name])})
    x = getattr(rollout, name).copy()
    x[: len(where)][where] = {"obs": 5.0, "action": (x[: len(where)][where] + 1) % ACTIONS, "reward": 9.0}[name]
    return rollout._replace(**{name: x})


def after(ended: np.ndarray) -> np.ndarray:
    """The steps that are ignored because the one before ended an episode."""
    return np.concatenate([np.zeros((1, B), bool), ended[:-1]])


@pytest.fixture
def halves(problem):
    """Two minibatches."""
    return problem(num_minibatches=2)


@pytest.mark.parametrize("name", ["obs", "action", "reward", "log_prob"])
def test_the_contents_of_an_ignored_step_do_not_change_a_bit(halves, name):
    rollout = random_rollout()
    # The last observation of a truncated episode is bootstrapped with; that of a terminated one is not.
    where = after(rollout.terminated) if name == "obs" else ~rollout.valid
    other = changed(rollout, name, where)
    assert where.sum() >= 2 and not same_bits(rollout, other)
    assert same_bits(halves.update(rollout), halves.update(other))


@pytest.mark.parametrize("name", ["obs", "action", "reward", "log_prob"])
def test_the_contents_of_every_executed_step_are_learnt_from(halves, name):
    rollout = random_rollout()
    params = flat(halves.update(rollout)[0].params)
    for t, b in np.argwhere(rollout.valid):
        where = np.zeros((T, B), bool)
        where[t, b] = True
        assert abs(flat(halves.update(changed(rollout, name, where))[0].params) - params).max() > 1e-3, (t, b)


def test_a_truncated_episode_bootstraps_with_its_last_observation(halves):
    rollout = random_rollout()
    params = halves.update(rollout)[0].params
    for t, b in np.argwhere(rollout.truncated):
        obs = rollout.obs.copy()
        obs[t + 1, b] += 1.0
        assert not same_bits(params, halves.update(rollout._replace(obs=obs))[0].params), (t, b)


def test_the_observation_after_the_rollout_is_bootstrapped_with_unless_terminated(halves):
    rollout = random_rollout()
    for b in range(B):
        obs = rollout.obs.copy()
        obs[-1, b] += 1.0
        same = same_bits(halves.update(rollout), halves.update(rollout._replace(obs=obs)))
        assert same == rollout.terminated[-1, b], b


def test_rewards_of_the_next_episode_reach_no_step_before_it(halves):
    """Rewards of the next episode reach no step before it: only its own steps' part of the gradient changes."""
    rollout = random_rollout(np.array([list("..T x..".replace(" ", ""))] * B).T)
    other = changed(rollout, "reward", np.arange(T)[:, None] * np.ones((1, B), int) > 3)
    before = rollout._replace(valid=rollout.valid & (np.arange(T) < 3)[:, None])
    assert not same_bits(halves.update(rollout)[0], halves.update(other)[0])
    assert same_bits(halves.update(before), halves.update(before._replace(reward=other.reward)))


def test_a_rollout_without_a_valid_step_changes_nothing(problem):
    p, rollout = problem(), random_rollout()
    state, metrics = p.update(rollout._replace(valid=np.zeros((T, B), bool)))
    assert same_bits(state.params, p.state.params)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves((state, metrics)))


def with_steps_seen(algorithm):
    """The same algorithm, which also reports the steps of the episode that an update learns from, and how many."""

    def update(state, memory, rollout, shards, key):
        step = rollout.obs[:, :-1, :, 3]
        report = {"from": step.min(), "to": step.max(), "learnt": jnp.float32(step.size)}
        state, memory, metrics = algorithm.update(state, memory, rollout, shards, key)
        return state, memory, metrics | report

    return algorithm._replace(update=update)


@pytest.mark.parametrize("concurrency", [True, False])
def test_every_collected_rollout_is_learnt_from_once_and_in_order(concurrency):
    updates, steps = 7, 5
    e = impala.IMPALA(
        env_id="Scripted-v0", num_envs=4, num_actors=2, num_shards=1, num_steps=steps, hiddens=(8,), num_minibatches=2,
        total_timesteps=updates * steps * 4 + 3, env_epoch=0, collector="stepped", concurrency=concurrency,
    )  # fmt: skip
    envs = Scripts([Play((1.0,) * 1000)])
    record = finished(e, spec=spec(), make_envs=envs, wrap=with_steps_seen, recipe=impala)
    assert record.column("learnt") == [4 * steps] * updates
    assert record.column("from") == [k * steps for k in range(updates)]
    assert record.column("to") == [(k + 1) * steps - 1 for k in range(updates)]
    assert [len(block.actions) for block in envs.made] == [updates * steps] * 2  # nothing was collected in vain
    assert record.result["global_step"] == updates * steps * 4
    assert record.result["policy_lag"] == int(concurrency)


# ---------------------------------------------------------------------------------------------- shards and placements


def test_any_number_of_shards_learns_the_same(problem):
    rollout = random_rollout()
    one = problem().gradient(rollout)
    for shards in (2, 4):
        np.testing.assert_allclose(problem(shards).gradient(rollout), one, rtol=1e-3, atol=1e-4)


def test_minibatches_hold_the_same_environments_for_any_number_of_shards(problem):
    rollout = random_rollout()
    one, two = (flat(problem(shards, num_minibatches=2).update(rollout)[0].params) for shards in (1, 2))
    np.testing.assert_allclose(one, two, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("shards, devices", [(2, 2), (4, 2), (4, 4)])
@pytest.mark.parametrize("learning_rate", [0.5, 1.0])  # a rate of 1 tempts the compiler to leave the product out
def test_any_number_of_devices_learns_the_same_bits(problem, shards, devices, learning_rate):
    rollout = random_rollout()
    on = lambda count: problem(shards, count, learning_rate=learning_rate).update(rollout)
    assert same_bits(on(1), on(devices))


PLACEMENTS = {  # actor devices, learner devices
    "a0-l0": ((0,), (0,)),
    "a0-l0,1": ((0,), (0, 1)),
    "a0-l1,2,3": ((0,), (1, 2, 3)),  # 2, 1 and 1 shards
    "a0,1-l2,3": ((0, 1), (2, 3)),
    "a0-l1,2,3,4": ((0,), (1, 2, 3, 4)),
}


@cache
def digest_on(placement: str, concurrency: bool, seed: int = 1) -> str:
    e = impala.IMPALA(
        env_id="Catch-v0", seed=seed, num_envs=16, num_actors=4, num_shards=4, num_steps=12, num_minibatches=2,
        hiddens=(16,), core="lstm", lstm_size=8, total_timesteps=6 * 16 * 12, env_epoch=4,
        collector="stepped", concurrency=concurrency,
    )  # fmt: skip
    return str(digests(e, *PLACEMENTS[placement], recipe=impala))


@pytest.mark.parametrize("concurrency", [True, False], ids=["concurrent", "in turns"])
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_every_placement_ends_in_the_same_bits(placement, concurrency):
    assert digest_on(placement, concurrency) == digest_on("a0-l0", concurrency)


def test_other_experiments_end_in_other_bits():
    assert len({digest_on("a0-l0", True), digest_on("a0-l0", False), digest_on("a0-l0", True, seed=2)}) == 3
