"""Results that do not depend on how many devices the shards lie on, and what happens to those that do."""

import hashlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cleanba.networks.cores import LSTM, initial_carry
from cleanba.shards import ShardAxis

SHARDS = 6
DEVICES = [1, 2, 3, 6]
STEPS, ENVS, FEATURES, UNITS = 5, 4, 3, 8


def digest(tree) -> str:
    return hashlib.sha256(b"".join(np.asarray(x).tobytes() for x in jax.tree.leaves(tree))).hexdigest()


def assert_same_bits(results) -> None:
    assert len({digest(result) for result in results}) == 1


@pytest.fixture(scope="module")
def problem():
    """Parameters of an LSTM with a head, and six shards of sequences that it is to follow."""
    core = LSTM(UNITS)
    rng = np.random.default_rng(0)
    x = rng.normal(size=(SHARDS, STEPS, ENVS, FEATURES)).astype(np.float32)
    y = rng.normal(size=(SHARDS, STEPS, ENVS)).astype(np.float32)
    first = np.zeros((STEPS, ENVS), bool)
    init = lambda key: core.init(key, x[0], first, initial_carry("lstm", UNITS, ENVS))
    params = {"core": jax.jit(init)(jax.random.key(0)), "head": rng.normal(size=UNITS).astype(np.float32)}
    return params, x, y


def loss_of_shard(params, x, y):
    first, carry = jnp.zeros((STEPS, ENVS), bool), initial_carry("lstm", UNITS, ENVS)
    h, _ = LSTM(UNITS).apply(params["core"], x, first, carry)
    return ((h @ params["head"] - y) ** 2).sum()


def ordered_sum(shards: ShardAxis, per_shard):
    return shards.sum(per_shard)


def unordered_sum(shards: ShardAxis, per_shard):
    """As data parallelism usually does it: each device adds up its own, then an all-reduce."""
    return jax.tree.map(lambda x: jax.lax.psum(x.sum(0), shards.mesh_axis), per_shard)


def number_of_the_shard(shards: ShardAxis):
    return shards.index


def number_of_the_device(shards: ShardAxis):
    return jnp.full_like(shards.index, jax.lax.axis_index(shards.mesh_axis))


def training(total, number):
    """Three steps of gradient descent; `total` adds up over the shards, `number` is what a shard draws its key from."""

    def train(shards: ShardAxis, params, x, y):
        def gradient(params, x, y, key_number):
            noise = 0.1 * jax.random.normal(jax.random.fold_in(jax.random.key(1), key_number), x.shape)
            return jax.grad(loss_of_shard)(params, x + noise, y)

        def step(params, _):
            of_shard = lambda *shard: gradient(params, *shard)
            descend = lambda params, gradient: jax.tree.map(lambda p, g: p - 1e-3 * g, params, gradient)
            summed = total(shards, shards.map(of_shard, x, y, number(shards)))
            return shards.isolate(descend, params, summed), None

        return jax.lax.scan(step, params, None, length=3)[0]

    return train


# --------------------------------------------------------------------------------------- the promise, and its breaking


def test_training_ends_in_the_same_bits_on_any_number_of_devices(on_devices, problem):
    params, *data = problem
    train = training(ordered_sum, number_of_the_shard)
    results = [on_devices(train, SHARDS, n)(params, *data) for n in DEVICES]
    assert_same_bits(results)
    loss = jax.jit(lambda params: jax.vmap(loss_of_shard, (None, 0, 0))(params, *data).sum())
    assert loss(results[0]) < loss(params)


@pytest.mark.parametrize(
    "total, number", [(unordered_sum, number_of_the_shard), (ordered_sum, number_of_the_device)], ids=["sum", "key"]
)
def test_what_depends_on_the_device_is_noticed(on_devices, problem, total, number):
    results = [on_devices(training(total, number), SHARDS, n)(*problem) for n in (1, 2)]
    with pytest.raises(AssertionError):
        assert_same_bits(results)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=0.1), *results)  # though nothing looks wrong


# ------------------------------------------------------------------------------------------------- what each part does


def hard_to_add(seed: int = 0) -> np.ndarray:
    """One number per shard, of so different sizes that every order of adding them rounds differently."""
    rng = np.random.default_rng(seed)
    return (rng.normal(size=(SHARDS, 50)) * 10.0 ** rng.integers(-4, 5, size=(SHARDS, 50))).astype(np.float32)


@pytest.mark.parametrize("devices", DEVICES)
def test_sum_adds_in_the_order_of_the_shards(on_devices, devices):
    x = hard_to_add()
    expected = x[0]
    for part in x[1:]:
        expected = expected + part
    assert (expected != x[::-1].sum(0)).any()
    total = on_devices(lambda shards, _, x: shards.sum({"a": x, "b": -x}), SHARDS, devices)((), x)
    assert (np.asarray(total["a"]) == expected).all() and (np.asarray(total["b"]) == -expected).all()


@pytest.mark.parametrize("devices", DEVICES)
def test_map_gives_every_shard_its_own_part_and_number(on_devices, devices):
    x = np.arange(SHARDS * 2, dtype=np.float32).reshape(SHARDS, 2)

    def fn(shards, offset, x):
        assert shards.index.shape == (SHARDS // devices,)
        seen = shards.map(lambda part, number: (part + offset, number), x, shards.index)
        return jax.lax.all_gather(seen, shards.mesh_axis, tiled=True)

    part, number = on_devices(fn, SHARDS, devices)(jnp.float32(100), x)
    assert (part == x + 100).all() and number.tolist() == list(range(SHARDS))


@pytest.mark.parametrize("devices", [1, 3])
def test_map_from_loads_what_map_would_have_been_given(on_devices, devices):
    x = np.random.default_rng(0).normal(size=(SHARDS, 4, 2)).astype(np.float32)
    square = lambda part: {"square": part**2, "sum": part.sum()}

    def fn(shards, _, x):
        both = shards.map(square, x[:, 1:3]), shards.map_from(lambda i: (x[i, 1:3],), square)
        return jax.lax.all_gather(both, shards.mesh_axis, tiled=True)

    mapped, loaded = on_devices(fn, SHARDS, devices)((), x)
    assert digest(mapped) == digest(loaded)
    np.testing.assert_allclose(mapped["square"], x[:, 1:3] ** 2)


def test_isolate_calls_the_function_and_shows_that_it_would_not_if_never_asked():
    fn = lambda x, y: {"sum": x + y, "count": jnp.int32(x.size)}
    axis = lambda always: ShardAxis(num_shards=1, index=jnp.zeros(1, jnp.int32), always=always, mesh_axis="learner")
    call = jax.jit(lambda always, x: axis(always).isolate(fn, x, 2 * x))
    out = call(True, jnp.ones(3))
    assert out["sum"].tolist() == [3.0, 3.0, 3.0] and out["count"] == 3
    assert not call(False, jnp.ones(3))[
        "sum"
    ].any()  # so the compiler has to keep the branch, and compiles it by itself


def test_one_shard_is_its_own_sum(on_devices):
    x = np.random.default_rng(0).normal(size=(1, 5)).astype(np.float32)
    assert (on_devices(lambda shards, _, x: shards.sum(x), 1, 1)((), x) == x[0]).all()
