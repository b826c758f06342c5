"""Numbers about batches over shards, against numpy in float64; counts beyond float32; parts of a rollout for a GPU."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cleanba.algorithms import batches
from cleanba.algorithms.ppo import PPO
from cleanba.specs import EnvSpec, ObsSpec, choice

T, B = 25, 8


def split(x: np.ndarray, shards: int) -> np.ndarray:
    """[T, B] -> [K, T, B / K]."""
    return np.stack(np.split(x, shards, 1))


@pytest.fixture(scope="module")
def explained(on_devices):
    """explained(value, target, valid, shards=1, devices=1): the explained variance of arrays [T, B]."""

    @cache
    def compiled(shards, devices):
        return on_devices(lambda axis, _, *arrays: batches.explained_variance(axis, *arrays), shards, devices)

    def run(value, target, valid, shards=1, devices=1):
        args = (np.asarray(x, np.float32) for x in (value, target))
        return float(compiled(shards, devices)((), *(split(x, shards) for x in (*args, valid))))

    return run


def data(mean: float, t: int = T, b: int = B) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Values in float32 that explain three quarters of their targets' variance of 1; some steps are invalid."""
    rng = np.random.default_rng(1)
    target = mean + rng.normal(size=(t, b))
    value = target + 0.5 * rng.normal(size=(t, b)) + 0.1
    valid = rng.random((t, b)) < 0.8
    single = lambda x: np.where(valid, x, 1e6).astype(np.float32)  # what is not valid must not count
    return single(value), single(target), valid


def slow(value, target, valid) -> float:
    value, target = (x[valid].astype(np.float64) for x in (value, target))
    return 1 - (target - value).var() / target.var()


@pytest.mark.parametrize("shards, devices", [(1, 1), (2, 1), (4, 2)])
@pytest.mark.parametrize("mean", [0.0, -3.0, 1e3, 1e4, -1e5])
def test_explained_variance_equals_numpy_whatever_the_mean(explained, mean, shards, devices):
    value, target, valid = data(mean)
    assert 0.6 < slow(value, target, valid) < 0.9
    assert explained(value, target, valid, shards, devices) == pytest.approx(slow(value, target, valid), abs=2e-5)


def test_explained_variance_of_many_numbers_far_from_zero(explained):
    value, target, valid = data(1e4, 129, 120)
    assert explained(value, target, valid) == pytest.approx(slow(value, target, valid), abs=2e-5)


@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize("target", [0.0, 0.1, 0.7, -1234.567, 3e4 / 7])
def test_where_targets_do_not_vary_perfect_values_score_one_and_others_zero(explained, target, shards):
    shape = (129, 120)  # so many that rounding leaves something of a variance of zero
    constant, noise = np.full(shape, target), np.random.default_rng(0).normal(size=shape)
    valid = np.ones(shape, bool)
    assert explained(constant, constant, valid, shards) == 1.0
    assert (
        explained(constant + 0.5, constant, valid, shards) == 1.0
    )  # an error that does not vary, as scikit-learn has it
    assert explained(constant + noise, constant, valid, shards) == 0.0


def test_explained_variance_is_finite_where_nothing_is_valid_and_nan_where_a_value_is_nan(explained):
    value, target, valid = data(0.0)
    assert np.isfinite(explained(value, target, np.zeros_like(valid)))
    assert np.isnan(explained(np.where(value < 0, np.nan, value), target, np.ones_like(valid)))


def test_counts_are_exact_beyond_what_float32_can_count(on_devices):
    half = 2**23 + 1
    valid = np.ones((2, 1, half), bool)
    valid[0, 0, 0] = False
    count = on_devices(lambda shards, _, *args: batches.count_valid(shards, *args), 2, 1)
    t, b = np.zeros((2, 1, 1, half), np.int32), np.broadcast_to(np.arange(half, dtype=np.int32), (2, 1, 1, half))
    (got,) = count((), valid, t, b)
    assert int(got) == 2**24 + 1 != int(np.float32(2**24 + 1))
    assert count((), valid & False, t, b) == 1
    count = on_devices(lambda shards, _, valid: batches.count_steps(shards, valid), 2, 1)
    assert int(count((), valid)) == 2**24 + 1
    assert count((), valid & False) == 1


def test_sequences_are_all_steps_of_some_environments():
    env = jnp.array([[4, 1], [0, 3], [2, 5]])
    t, b = batches.sequences(5, env)
    assert t.shape == b.shape == (3, 5, 2)
    assert (t == np.arange(5)[None, :, None]).all() and (b == np.asarray(env)[:, None]).all()


@pytest.mark.parametrize("steps, envs", [(129, 120), (129, 15), (21, 64), (2, 1000), (129, 1), (1, 1)])
def test_as_many_steps_are_taken_at_once_as_fit_into_the_budget(steps, envs):
    image = 4 * 84 * 84
    n = batches.steps_at_once(jax.ShapeDtypeStruct((steps, envs, 4, 84, 84), jnp.uint8))
    assert 1 <= n <= steps
    assert (n - 1) * envs * image <= batches.AT_ONCE  # even parts: rounded up, by less than a step
    assert n == steps or 2 * n * envs * image > batches.AT_ONCE


@pytest.mark.parametrize("size", [1, 2, 5, 64, 1000, 4096, 15_360, 2**20 + 1])
def test_shuffled_holds_every_number_once_in_an_order_of_its_key(size):
    one, same, other = (np.asarray(batches.shuffled(jax.random.key(seed), size)) for seed in (1, 1, 2))
    np.testing.assert_array_equal(np.sort(one), np.arange(size))
    np.testing.assert_array_equal(one, same)
    assert size < 64 or (one != other).mean() > 0.9


def test_every_order_is_equally_likely():
    orders = np.asarray(jax.vmap(lambda key: batches.shuffled(key, 4))(jax.random.split(jax.random.key(0), 24_000)))
    counts = np.unique(orders @ 5 ** np.arange(4), return_counts=True)[1]
    assert (
        len(counts) == 24 and ((counts - 1000) ** 2 / 1000).sum() < 49.7
    )  # chi-squared, 23 degrees: one in a thousand


@pytest.mark.parametrize(
    "steps, envs, pieces",
    [(1, 512, 8), (1, 64, 1), (21, 3, 1), (21, 12, 3), (129, 7, 7), (1, 149, 1), (1, 158, 2)],
)
def test_as_many_images_are_computed_at_a_time_as_caches_hold_or_nearly(steps, envs, pieces):
    spec = EnvSpec("game", {"image": ObsSpec("image", (4, 84, 84), "uint8")}, choice(4), False, False, {})
    index = jax.ShapeDtypeStruct((2, 4, steps, envs), jnp.int32)
    assert batches.count_pieces(PPO(), spec, "cpu", index) == pieces
    assert batches.count_pieces(PPO(), spec, "gpu", index) == 1
    assert batches.count_pieces(PPO(core="lstm"), spec, "cpu", index) == 1


def test_pieces_hold_every_index_of_the_minibatch_and_whole_sequences():
    t, b = batches.sequences(5, jnp.array([[4, 1, 0, 3, 2, 5]]))
    taken = batches.in_pieces(lambda t, b: (t, b), t[0], b[0], 3)
    assert taken[0].shape == (3, 5, 2) and (taken[0] == np.arange(5)[None, :, None]).all()
    assert taken[1][:, 0].tolist() == [[4, 1], [0, 3], [2, 5]]
