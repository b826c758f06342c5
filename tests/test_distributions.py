"""Distributions over actions against SciPy's, and what they have in common."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from cleanba.errors import UsageError
from cleanba.ops.distributions import (
    Categorical,
    Categoricals,
    Combination,
    DiagonalGaussian,
    SquashedGaussian,
    distribution,
    size,
)
from cleanba.specs import ActionSpec, choice

T, B, D = 3, 4, 5
COUNTS = (2, 7, 3)
RNG = np.random.default_rng(0)
LOGITS = RNG.normal(size=(T, B, sum(COUNTS))).astype(np.float32)
MEAN, LOG_STD = (RNG.normal(size=shape).astype(np.float32) for shape in ((T, B, D), (D,)))


def softmax(logits: np.ndarray) -> np.ndarray:
    e = np.exp(np.float64(logits))
    return e / e.sum(-1, keepdims=True)


def of_scipy(policy, action: np.ndarray, t: int, b: int) -> tuple[float, float]:
    """Log-probability of the action and entropy at one step of one environment."""
    if isinstance(policy, DiagonalGaussian):
        normal = stats.multivariate_normal(np.float64(MEAN[t, b]), np.diag(np.exp(2 * np.float64(LOG_STD))))
        return normal.logpdf(np.float64(action[t, b])), normal.entropy()
    logits = policy.logits[t, b]
    if isinstance(policy, Combination):
        whole = stats.rv_discrete(values=(range(len(logits)), softmax(logits)))
        return whole.logpmf(np.ravel_multi_index(action[t, b], policy.counts)), whole.entropy()
    parts = np.split(logits, np.cumsum(getattr(policy, "counts", (len(logits),)))[:-1])
    chosen = np.atleast_1d(action[t, b])
    found = [stats.rv_discrete(values=(range(len(p)), softmax(p))) for p in parts]
    return (
        sum(p.logpmf(a) for p, a in zip(found, chosen, strict=True)),
        sum(stats.entropy(softmax(p)) for p in parts),
    )


POLICIES = {
    "categorical": Categorical(LOGITS),
    "categoricals": Categoricals(LOGITS, COUNTS),
    "combination": Combination(LOGITS, (2, 6)),
    "gaussian": DiagonalGaussian(MEAN, np.broadcast_to(LOG_STD, MEAN.shape)),
}


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("compile", [jax.jit, lambda f: f], ids=["jit", "eager"])
def test_log_probabilities_and_entropies_are_scipys(name, compile):
    policy = POLICIES[name]
    for action in (policy.mode(), *(policy.sample(jax.random.key(i)) for i in range(3))):
        log_prob, entropy = compile(lambda policy, action: policy.log_prob_and_entropy(action))(policy, action)
        expected = np.array([[of_scipy(policy, np.asarray(action), t, b) for b in range(B)] for t in range(T)])
        np.testing.assert_allclose(log_prob, expected[..., 0], rtol=2e-5, atol=2e-5)
        np.testing.assert_allclose(entropy, expected[..., 1], rtol=2e-5, atol=2e-5)
        np.testing.assert_array_equal(policy.log_prob(action), policy.log_prob_and_entropy(action)[0])
        np.testing.assert_allclose(compile(lambda policy: policy.entropy())(policy), entropy, rtol=1e-6)


@pytest.mark.parametrize("name", POLICIES)
def test_samples_have_the_stated_entropy(name):
    # -E[log pi(a)] over samples, within five of its standard errors.
    policy = POLICIES[name]
    keys = jax.random.split(jax.random.key(0), 4000)
    log_prob = np.asarray(jax.vmap(lambda key: policy.log_prob(policy.sample(key)))(keys))
    error = 5 * log_prob.std(0) / np.sqrt(len(keys))
    assert (abs(-log_prob.mean(0) - policy.entropy()) < error + 1e-3).all()


@pytest.mark.parametrize("name", POLICIES)
def test_nothing_is_likelier_than_the_mode(name):
    policy = POLICIES[name]
    best = policy.log_prob(policy.mode())
    assert all((policy.log_prob(policy.sample(jax.random.key(i))) <= best).all() for i in range(50))


@pytest.mark.parametrize("name", POLICIES)
def test_a_distribution_can_be_sliced_by_steps_like_an_array(name):
    policy = POLICIES[name]
    action = policy.sample(jax.random.key(0))
    part = jax.tree.map(lambda x: x[1:], policy)
    np.testing.assert_array_equal(part.log_prob(action[1:]), policy.log_prob(action)[1:])


def test_parts_of_an_action_do_not_move_together():
    # Each is 0 or 1 with equal probability: with one key for all they would always agree.
    policy = Categoricals(jnp.zeros((1, 4)), (2, 2))
    drawn = jax.vmap(lambda key: policy.sample(key))(jax.random.split(jax.random.key(0), 1000))[:, 0]
    assert 0.4 < (drawn[:, 0] == drawn[:, 1]).mean() < 0.6
    gaussian = DiagonalGaussian(jnp.zeros((2000, 2)), jnp.zeros((2000, 2)))
    assert abs(np.corrcoef(gaussian.sample(jax.random.key(0)).T)[0, 1]) < 0.1


def test_the_action_space_chooses_the_distribution():
    several = ActionSpec("choices", (3,), "int32", COUNTS, (0, 0, 0), (1, 6, 2))
    real = ActionSpec("quantities", (5,), "float32", (), (-1.0,) * 5, (1.0,) * 5)
    assert [size(a) for a in (choice(12), several, real)] == [12, 12, 5]
    assert isinstance(distribution(choice(12), LOGITS), Categorical)
    assert distribution(several, LOGITS).counts == COUNTS
    with pytest.raises(UsageError, match=r"no log_std for actions of 5 real numbers.*pass log_std=self\.param\("):
        distribution(real, MEAN)
    gaussian = distribution(real, MEAN, LOG_STD)
    assert gaussian.log_std.shape == gaussian.mean.shape
    for policy, shape, dtype in [
        (distribution(choice(12), LOGITS), (T, B), np.int32),
        (distribution(several, LOGITS), (T, B, 3), np.int32),
        (gaussian, (T, B, D), np.float32),
    ]:
        for action in (policy.sample(jax.random.key(0)), policy.mode()):
            assert (action.shape, action.dtype) == (shape, dtype)


# ------------------------------------------------------------------------------------------------- squashed Gaussians

CENTRE, SCALE = np.array([0.0, 1.0, -2.0, 0.5, 0.0]), np.array([1.0, 0.4, 3.0, 0.5, 10.0])


def squashed(mean, log_std=LOG_STD) -> SquashedGaussian:
    as_floats = lambda x: np.asarray(x, np.float32)
    return SquashedGaussian(as_floats(mean), np.broadcast_to(as_floats(log_std), mean.shape), CENTRE, SCALE)


def squashed_by_scipy(u: np.ndarray, mean: np.ndarray) -> np.ndarray:
    """Log-density of the actions that u squashes to: the normal's, and log d tanh(u) / du = -2 log cosh(u)."""
    u, mean, std = np.float64(u), np.float64(mean), np.exp(np.float64(LOG_STD))
    log_cosh = np.logaddexp(u, -u) - np.log(2)
    return (stats.norm.logpdf(u, mean, std) + 2 * log_cosh - np.log(SCALE)).sum(-1)


def test_squashed_log_probabilities_are_scipys():
    policy, key = squashed(MEAN), jax.random.key(3)
    u = MEAN + np.exp(LOG_STD) * np.asarray(jax.random.normal(key, MEAN.shape))
    action, log_prob = jax.jit(SquashedGaussian.act)(policy, jax.random.normal(key, MEAN.shape))
    np.testing.assert_allclose(action, CENTRE + SCALE * np.tanh(u), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(log_prob, squashed_by_scipy(u, MEAN), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(action, policy.sample(key), rtol=1e-5, atol=1e-6)
    inside = np.abs(np.tanh(u)).max(-1) < 0.99  # there tanh can be turned round in float32
    assert inside.sum() > 4
    np.testing.assert_allclose(policy.log_prob(action)[inside], log_prob[inside], rtol=1e-3, atol=1e-3)
    np.testing.assert_allclose(policy.mode(), CENTRE + SCALE * np.tanh(MEAN), rtol=1e-5, atol=1e-6)


def test_a_squashed_density_adds_up_to_one():
    x = np.linspace(-1, 1, 20_001)[1:-1, None].astype(np.float32)
    policy = SquashedGaussian(np.full_like(x, 0.4), np.full_like(x, -0.2), np.float32(0.5), np.float32(2.0))
    density = np.exp(np.float64(policy.log_prob(0.5 + 2 * x)))
    assert abs(np.trapezoid(density, 2 * np.float64(x[:, 0])) - 1) < 1e-3


@pytest.mark.parametrize("mean", [-80.0, -12.0, 12.0, 80.0])
def test_squashed_log_probabilities_are_finite_where_tanh_is_one(mean):
    means = np.full((4, D), mean, np.float32)
    noise = jax.random.normal(jax.random.key(0), means.shape)
    loss = lambda mean: squashed(MEAN[0]).replace(mean=mean).act(noise)[1].sum()
    value, slope = jax.value_and_grad(loss)(means)
    u = means + np.exp(LOG_STD) * np.asarray(noise)
    np.testing.assert_allclose(value, squashed_by_scipy(u, means).sum(), rtol=1e-5)
    np.testing.assert_allclose(slope, np.full((4, D), 2 * np.sign(mean)), rtol=1e-4)  # d (2 log cosh u) / du
    for bound in (CENTRE - SCALE, CENTRE + SCALE):
        at = squashed(MEAN[0]).log_prob(np.broadcast_to(np.float32(bound), (B, D)))
        assert np.isfinite(at).all()
