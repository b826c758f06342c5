"""The losses against float64 numpy, finite differences and numbers by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from slowly import finite_difference, log_softmax

from cleanba.ops.losses import (
    by_comparison,
    by_index,
    clipped_squared_error,
    kl_estimate,
    log_prob_and_entropy,
    ppo_policy_loss,
    squared_error,
)

# ------------------------------------------------------------------------------------------------ clipped loss

# ratio, advantage -> -min(r A, clip(r, 0.8, 1.2) A): the worse of the two, so that clipping never makes a step bolder
CLIPPED = [
    (1.0, 2.0, -2.0),
    (1.1, 2.0, -2.2),
    (1.5, 2.0, -2.4),  # clipped: no reason to make a good action likelier still
    (0.5, 2.0, -1.0),
    (0.9, -2.0, 1.8),
    (0.5, -2.0, 1.6),  # clipped: no reason to make a bad action rarer still
    (1.5, -2.0, 3.0),
    (1.5, 0.0, 0.0),
]


@pytest.mark.parametrize("ratio, advantage, expected", CLIPPED)
def test_clipped_loss_by_hand(ratio, advantage, expected):
    loss = ppo_policy_loss(jnp.log(jnp.float32(ratio)), jnp.float32(advantage), 0.2)
    np.testing.assert_allclose(loss, expected, rtol=1e-6)


@pytest.mark.parametrize("ratio, advantage, expected", CLIPPED)
def test_clipped_loss_pulls_only_towards_the_old_policy_once_the_ratio_has_left_its_range(ratio, advantage, expected):
    gradient = jax.grad(lambda x: ppo_policy_loss(x, jnp.float32(advantage), 0.2))(jnp.log(jnp.float32(ratio)))
    clipped = (ratio > 1.2 and advantage > 0) or (ratio < 0.8 and advantage < 0)
    np.testing.assert_allclose(gradient, 0.0 if clipped else -ratio * advantage, rtol=1e-6, atol=1e-7)


def test_clipped_loss_and_its_gradient_equal_numpy():
    rng = np.random.default_rng(0)
    log_ratio, advantage, eps = 0.3 * rng.normal(size=(7, 9)), rng.normal(size=(7, 9)), 0.15

    def slow(x):
        ratio = np.exp(x)
        return -np.minimum(ratio * advantage, np.minimum(np.maximum(ratio, 1 - eps), 1 + eps) * advantage)

    ours = lambda x: ppo_policy_loss(x, jnp.float32(advantage), eps)
    np.testing.assert_allclose(ours(jnp.float32(log_ratio)), slow(log_ratio), rtol=1e-5, atol=1e-6)
    gradient = jax.grad(lambda x: ours(x).sum())(jnp.float32(log_ratio))
    np.testing.assert_allclose(gradient, finite_difference(lambda x: slow(x).sum(), log_ratio), rtol=1e-4, atol=1e-5)


# ---------------------------------------------------------------------------------------- the small functions


@pytest.mark.parametrize("shape", [(4,), (3, 4), (2, 3, 4)])
def test_log_prob_and_entropy_equal_numpy(shape):
    rng = np.random.default_rng(1)
    logits, action = 3 * rng.normal(size=shape), rng.integers(shape[-1], size=shape[:-1])
    log_pi = log_softmax(logits)
    log_prob, entropy = log_prob_and_entropy(jnp.float32(logits), jnp.asarray(action))
    np.testing.assert_allclose(log_prob, np.take_along_axis(log_pi, action[..., None], -1)[..., 0], rtol=1e-5)
    np.testing.assert_allclose(entropy, -(np.exp(log_pi) * log_pi).sum(-1), rtol=1e-5)


def test_gradients_of_log_prob_and_entropy_equal_finite_differences():
    logits, action = np.random.default_rng(2).normal(size=5), 3
    slow_log_prob = lambda x: log_softmax(x)[action]
    slow_entropy = lambda x: -(np.exp(log_softmax(x)) * log_softmax(x)).sum()
    for i, slow in enumerate([slow_log_prob, slow_entropy]):
        gradient = jax.grad(lambda x, i=i: log_prob_and_entropy(x, jnp.int32(action))[i])(jnp.float32(logits))
        np.testing.assert_allclose(gradient, finite_difference(slow, logits), rtol=1e-4, atol=1e-6)


def test_a_policy_is_most_uncertain_when_uniform_and_certain_when_one_logit_towers():
    assert log_prob_and_entropy(jnp.zeros(18), jnp.int32(0))[1] == pytest.approx(np.log(18))
    log_prob, entropy = log_prob_and_entropy(jnp.float32([1000.0, 0.0, -1000.0]), jnp.int32(0))
    assert (log_prob, entropy) == (0.0, 0.0)


def test_a_masked_action_is_impossible_and_counts_for_nothing_else():
    logits, without = jnp.float32([0.5, -jnp.inf, -1.0]), jnp.float32([0.5, -1.0])
    assert log_prob_and_entropy(logits, jnp.int32(1))[0] == -jnp.inf
    for ours, theirs in zip(
        log_prob_and_entropy(logits, jnp.int32(2)), log_prob_and_entropy(without, jnp.int32(1)), strict=True
    ):
        np.testing.assert_allclose(ours, theirs, rtol=1e-6)


@pytest.mark.parametrize("which", [0, 1], ids=["log_prob", "entropy"])
def test_a_masked_action_leaves_the_gradient_of_the_others_as_it_is(which):
    gradient = jax.grad(lambda x: log_prob_and_entropy(x, jnp.int32(2))[which])(jnp.float32([0.5, -jnp.inf, -1.0]))
    without = jax.grad(lambda x: log_prob_and_entropy(x, jnp.int32(1))[which])(jnp.float32([0.5, -1.0]))
    np.testing.assert_allclose(gradient, [without[0], 0.0, without[1]], rtol=1e-5)


@pytest.mark.parametrize("actions", [1, 2, 3, 6, 18])
def test_by_comparison_has_the_bits_of_an_index_and_so_has_its_gradient(actions):
    rng = np.random.default_rng(actions)
    logits = jnp.float32(5 * rng.normal(size=(60, 9, actions)))
    action = jnp.asarray(rng.integers(actions, size=(60, 9)))
    masked = (rng.random(logits.shape) < 0.2) & (np.arange(actions) != np.asarray(action)[..., None])
    logits = jnp.where(masked, -jnp.inf, logits)
    weight = jnp.float32(rng.normal(size=action.shape))
    of = lambda f: jax.jit(jax.value_and_grad(lambda x: (weight * f(jax.nn.log_softmax(x), action)).sum()))(logits)
    (value, gradient), (expected, expected_gradient) = of(by_comparison), of(by_index)
    assert value == expected and jnp.isfinite(value)
    assert (gradient == expected_gradient).all() and jnp.isfinite(gradient).all()


def cuda_text(fn, *args) -> str:
    """The program that a GPU would be given, before it is compiled for one; there need be none."""
    return jax.jit(fn).trace(*args).lower(lowering_platforms=("cuda",)).as_text()


def test_no_gradient_of_a_loss_scatters_on_a_gpu():
    def total(logits, action, old, advantage):
        log_prob, entropy = log_prob_and_entropy(logits, action)
        log_ratio = log_prob - old
        return (ppo_policy_loss(log_ratio, advantage, 0.1) + squared_error(log_prob, old) - entropy).sum()

    args = jnp.zeros((5, 4, 6)), jnp.zeros((5, 4), jnp.int32), jnp.zeros((5, 4)), jnp.zeros((5, 4))
    assert "scatter" not in cuda_text(jax.grad(total), *args)
    assert "scatter" in cuda_text(jax.grad(lambda x: by_index(x, args[1]).sum()), args[0])  # what the test looks for


def test_kl_estimate_has_the_kl_divergence_from_old_to_new_as_its_mean_over_old_samples():
    rng = np.random.default_rng(3)
    old, new = log_softmax(rng.normal(size=6)), log_softmax(rng.normal(size=6))
    estimate = np.asarray(kl_estimate(jnp.float32(new - old)))
    np.testing.assert_allclose((np.exp(old) * estimate).sum(), (np.exp(old) * (old - new)).sum(), rtol=1e-5)
    assert abs((np.exp(new) * (new - old)).sum() - (np.exp(old) * (old - new)).sum()) > 1e-2  # the other direction


def test_kl_estimate_is_never_negative_and_exact_for_tiny_steps():
    log_ratio = np.concatenate([np.linspace(-3, 3, 61), [1e-3, -1e-3]])
    estimate = np.asarray(kl_estimate(jnp.float32(log_ratio)))
    assert (estimate >= 0).all() and kl_estimate(jnp.float32(0.0)) == 0
    np.testing.assert_allclose(estimate, np.expm1(log_ratio) - log_ratio, rtol=2e-4, atol=1e-9)


def test_squared_error_is_halved():
    assert squared_error(jnp.float32([3.0, -1.0]), jnp.float32([1.0, 1.0])).tolist() == [2.0, 2.0]


@pytest.mark.parametrize(
    "value, before, target, expected, gradient",
    [
        (1.1, 1.0, 2.0, 0.5 * 0.9**2, -0.9),  # within the bound: the squared error
        (1.5, 1.0, 2.0, 0.5 * 0.8**2, 0.0),  # moved towards the target by more than 0.2: that is no gain
        (0.5, 1.0, 2.0, 0.5 * 1.5**2, -1.5),  # moved away: the whole error counts
        (2.9, 1.0, 2.0, 0.5 * 0.9**2, 0.9),  # beyond the target, and farther from it than the bound
    ],
)
def test_clipped_value_loss_by_hand(value, before, target, expected, gradient):
    loss = lambda v: clipped_squared_error(v, jnp.float32(before), jnp.float32(target), 0.2)
    found = jax.value_and_grad(loss)(jnp.float32(value))
    np.testing.assert_allclose(found, (expected, gradient), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "call",
    [
        lambda: ppo_policy_loss(jnp.zeros((3, 1)), jnp.zeros(3), 0.1),
        lambda: squared_error(jnp.zeros((3, 1)), jnp.zeros(3)),
        lambda: clipped_squared_error(jnp.zeros(3), jnp.zeros((3, 1)), jnp.zeros(3), 0.1),
        lambda: log_prob_and_entropy(jnp.zeros((3, 4)), jnp.zeros(2, int)),
    ],
)
def test_shapes_that_would_broadcast_are_refused(call):
    with pytest.raises(AssertionError):
        call()
