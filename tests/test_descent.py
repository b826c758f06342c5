"""Our loops over all parameters on CPUs: optax's Adam, targets that follow, sums of squares."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

pytest.importorskip("llvmlite")

from test_product import draw

from cleanba.algorithms.optimiser import TrainState, make_adam
from cleanba.kernels import descent, in_use, llvm
from cleanba.ops.descent import clipped, descend

# Scalars, less than a vector, a vector and a rest, more than a piece.
SIZES = [(), (1,), (15,), (16,), (3, 7), (descent.PIECE,), (3, 3001), (20, 2000)]


def arrays(seed=0):
    return [draw(*size, seed=seed + i).reshape(size) for i, size in enumerate(SIZES)]


@pytest.mark.parametrize("max_norm", [float("inf"), 1e9, 0.5])
def test_three_steps_are_optaxs(max_norm, on_devices):
    assert in_use()
    optimiser = make_adam(eps=1e-5, max_norm=max_norm)
    ours = theirs = TrainState(arrays(), optimiser.init(arrays()))
    step = on_devices(lambda shards, given: optimiser.step(shards, *given), 1, 1)
    for i in range(3):
        gradient, rate = arrays(100 * i), jnp.float32(0.1 / (i + 1))
        ours, norm = step((rate, ours, gradient))
        theirs, same = descend(optimiser.rule, rate, theirs, gradient)
        np.testing.assert_allclose(norm, same, rtol=1e-6)
        assert jax.tree.structure(ours) == jax.tree.structure(theirs)
        for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
            np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("max_norm", [float("inf"), 0.5])
def test_a_gradient_whose_squares_overflow_does_what_it_does_in_optax(max_norm, on_devices):
    """Without clipping it must not become NaN everywhere: Adam's step of each number by itself is finite."""
    optimiser = make_adam(max_norm=max_norm)
    params = [jnp.ones(3), jnp.ones(2)]
    before, gradient = TrainState(params, optimiser.init(params)), [jnp.array([1e20, 1, -2]), jnp.array([0.1, 0.2])]
    run = lambda shards, _: optimiser.step(shards, jnp.float32(0.1), before, gradient)
    (after, norm), (theirs, _) = on_devices(run, 1, 1)(jnp.zeros(1)), descend(optimiser.rule, 0.1, before, gradient)
    assert np.isinf(norm)
    for a, b in zip(after.params, theirs.params, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5)


def test_eight_steps_of_radam_are_the_papers_and_about_optaxs(on_devices):
    """The first five go along the momentum.  optax computes rho in float32, and so loses digits at the first steps."""
    optimiser = make_adam(eps=1e-5, max_norm=3.0, rectified=True)
    ours = plainly = TrainState(arrays(), optimiser.init(arrays()))
    assert jax.tree.structure(ours.optimiser) == jax.tree.structure(make_adam(max_norm=3.0).init(arrays()))
    theirs_rule = clipped(optax.scale_by_radam(eps=1e-5), 3.0)
    theirs = TrainState(arrays(), theirs_rule.init(arrays()))
    rate, b1, b2, most = 0.1, 0.9, 0.999, 2 / (1 - 0.999) - 1
    slow = [np.asarray(x, np.float64) for x in arrays()]
    m, v = ([np.zeros_like(x) for x in slow] for _ in range(2))
    step = on_devices(lambda shards, given: optimiser.step(shards, *given), 1, 1)
    for t in range(1, 9):
        gradient = arrays(100 * t)
        ours, _ = step((jnp.float32(rate), ours, gradient))
        plainly, _ = descend(optimiser.rule, jnp.float32(rate), plainly, gradient)
        theirs, norm = descend(theirs_rule, jnp.float32(rate), theirs, gradient)
        rho = most - 2 * t * b2**t / (1 - b2**t)
        assert (rho > 5) == (t > 5)
        for i, x in enumerate(gradient):
            g = np.asarray(x, np.float64) * min(1.0, 3.0 / float(norm))
            m[i], v[i] = b1 * m[i] + (1 - b1) * g, b2 * v[i] + (1 - b2) * g**2
            direction = m[i] / (1 - b1**t)
            if rho > 5:
                r = np.sqrt((rho - 4) * (rho - 2) * most / ((most - 4) * (most - 2) * rho))
                direction = r * direction / (np.sqrt(v[i] / (1 - b2**t)) + 1e-5)
            slow[i] = slow[i] - rate * direction
        for found, atol in ((ours, 1e-5), (plainly, 1e-5), (theirs, 5e-3)):
            for a, b in zip(found.params, slow, strict=True):
                np.testing.assert_allclose(a, b, rtol=1e-4, atol=atol, err_msg=f"step {t}")


def test_targets_follow_by_tau_and_stay_unchanged_for_tau_zero():
    params, targets = arrays(), arrays(50)
    for tau in (0.25, 1.0):
        for p, q, moved in zip(params, targets, descent.follow(jnp.float32(tau), params, targets), strict=True):
            np.testing.assert_allclose(moved, tau * p + (1 - tau) * q, rtol=1e-6, atol=1e-7)
    # With tau 0 no bit changes, not even of a negative zero or a denormal number, or where a parameter is not finite.
    params, targets = [jnp.array([1, 1, jnp.nan, jnp.inf])], [jnp.array([-0.0, 1e-40, 1, 2], jnp.float32)]
    (same,) = jax.jit(descent.follow)(jnp.float32(0), params, targets)
    np.testing.assert_array_equal(*(np.asarray(x).view(np.int32) for x in (same, targets[0])))


@pytest.mark.parametrize("registers", [(16, 32), (8, 16), (4, 32)], ids=["avx512", "avx", "neon"])
def test_squares_are_numpys_and_the_same_bits_with_any_vectors(registers, monkeypatch):
    some = arrays()
    here = descent.squares(some)
    np.testing.assert_allclose(here.sum(), sum((x.astype(np.float64) ** 2).sum() for x in some), rtol=1e-6)
    monkeypatch.setattr(llvm, "registers", lambda: registers)
    monkeypatch.setattr(llvm, "name_of", lambda unit, shape: f"{registers}_{unit.__name__}_{shape}")
    jax.clear_caches()
    np.testing.assert_array_equal(descent.squares(some), here)
    assert any(name.startswith(f"{registers}__squares") for name in llvm.KEPT)


@pytest.mark.parametrize("other", [np.zeros((2, 3), np.float16), np.zeros((3, 2), np.float32)], ids=["halves", "shape"])
def test_arrays_that_do_not_match_are_refused(other):
    with pytest.raises(ValueError, match="must be float32, and have the same shapes"):
        descent.follow(jnp.float32(0.5), [np.zeros((2, 3), np.float32)], [other])
