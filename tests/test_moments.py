"""Running means and variances against numpy over all data at once, however it is split."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cleanba.ops.moments import UNIT, Moments, add_batch, merge, no_moments
from cleanba.ops.returns import returns_so_far

BATCHES, T, B, D = 4, 7, 12, 3
SCALE, CENTER = np.array([1.0, 1e-3, 50.0]), np.array([0.0, 100.0, -3e4])


def data(seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Batches [N, T, B, D] whose mean and scale drift, and which of them are valid [N, T, B]."""
    rng = np.random.default_rng(seed)
    x = CENTER + SCALE * (rng.normal(size=(BATCHES, T, B, D)) * np.arange(1, BATCHES + 1)[:, None, None, None])
    return x.astype(np.float32), rng.random((BATCHES, T, B)) < 0.8


@pytest.fixture(scope="module")
def run(on_devices):
    """run(shards, devices, x, valid): the moments of all batches, added over so many shards [K, T, B / K]."""

    def add_all(axis, start, x, valid):
        moments = start
        for i in range(BATCHES):
            moments = add_batch(axis, moments, x[:, i], valid[:, i])
        return moments

    compiled = cache(lambda shards, devices: on_devices(add_all, shards, devices))

    def moments_of(shards: int, devices: int, x: np.ndarray, valid: np.ndarray) -> Moments:
        cut = lambda a: np.stack(np.split(a, shards, axis=2))  # [K, N, T, B / K, ...]
        return compiled(shards, devices)(no_moments((D,)), cut(x), cut(valid))

    return moments_of


@pytest.mark.parametrize("shards", [1, 2, 3, 6])
def test_every_split_into_shards_and_batches_has_numpys_moments(run, shards):
    x, valid = data()
    found = run(shards, 1, x, valid)
    every = np.float64(x)[valid]
    assert found.counted.tolist() == [0, len(every)]
    np.testing.assert_allclose(found.mean, every.mean(0), rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(found.variance, every.var(0), rtol=2e-4)


@pytest.mark.parametrize("shards, devices", [(2, 2), (6, 2), (6, 3), (6, 6)])
def test_the_bits_do_not_depend_on_the_devices(run, shards, devices):
    one, many = (run(shards, n, *data()) for n in (1, devices))
    assert all((np.asarray(a) == np.asarray(b)).all() for a, b in zip(one, many, strict=True))


def test_a_batch_without_anything_valid_changes_nothing(on_devices):
    x, valid = data()
    add = on_devices(lambda axis, moments, x, valid: add_batch(axis, moments, x, valid), 2, 1)
    cut = lambda a: np.stack(np.split(a, 2, axis=1))
    nothing = add(no_moments((D,)), cut(x[0]), cut(np.zeros_like(valid[0])))
    assert nothing.mean.tolist() == [0, 0, 0] and nothing.variance.tolist() == [1, 1, 1]
    some = add(nothing, cut(x[0]), cut(valid[0]))
    again = add(some, cut(x[0] + np.nan), cut(np.zeros_like(valid[0])))
    assert all((np.asarray(a) == np.asarray(b)).all() for a, b in zip(some, again, strict=True))


def test_counts_stay_exact_beyond_what_float32_can_count():
    step = jax.jit(lambda m, n: merge(m, n, jnp.float32(1.0), jnp.float32(2.0)))
    moments, total = no_moments(()), 0
    for n in (UNIT - 1, 1, 1, 3, 10 * UNIT + 7, *[1] * 9):
        moments, total = step(moments, jnp.int32(n)), total + n
        high, low = moments.counted.tolist()
        assert high * UNIT + low == total and 0 <= low < UNIT
    np.testing.assert_allclose((moments.mean, moments.variance), (1.0, 2.0), rtol=1e-6)


def test_late_batches_still_count_for_what_they_are():
    # After 10^9 numbers, another 10^7 with a different mean move the mean by a hundredth of the way.
    early = Moments(jnp.array([10**9 // UNIT, 10**9 % UNIT], jnp.int32), jnp.float32(0.0), jnp.float32(1.0))
    late = merge(early, jnp.int32(10**7), jnp.float32(5.0), jnp.float32(1.0))
    share = 1e7 / (1e9 + 1e7)
    np.testing.assert_allclose(late.mean, 5 * share, rtol=1e-5)
    np.testing.assert_allclose(late.variance, 1 + 25 * share * (1 - share), rtol=1e-5)


def test_returns_so_far_are_summed_within_episodes():
    rng = np.random.default_rng(0)
    steps, envs, gamma = 30, 6, 0.9
    ended = rng.random((steps, envs)) < 0.15
    valid = np.ones((steps, envs), bool)
    for t in range(1, steps):  # after an end comes a step that is ignored
        ended[t] &= ~ended[t - 1]
        valid[t] = ~ended[t - 1]
    ended &= valid
    first = np.concatenate([rng.random((1, envs)) < 0.5, ~valid[:-1]])
    reward = np.where(valid, rng.normal(size=(steps, envs)), 0).astype(np.float32)
    before = rng.normal(size=envs).astype(np.float32)
    found = jax.jit(returns_so_far, static_argnums=4)(reward, first, valid, before, gamma)
    for b in range(envs):
        for t in range(steps):
            begin = max((s for s in range(t + 1) if first[s, b]), default=-1)
            slow = sum(gamma ** (t - s) * reward[s, b] for s in range(max(begin, 0), t + 1))
            slow += gamma ** (t + 1) * before[b] if begin < 0 else 0.0
            assert abs(found[t, b] - (slow if valid[t, b] else 0.0)) < 1e-5, (t, b)
