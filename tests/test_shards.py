"""Results do not depend on how many devices hold the shards; results that do depend on it are noticed."""

import hashlib
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cleanba.networks.cores import LSTM, initial_carry
from cleanba.shards import ShardAxis

SHARDS = 6
DEVICES = [1, 2, 4, 5, 6]  # 4 and 5 of them have empty places
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
    results = [on_devices(train, SHARDS, n)(params, *data) for n in (1, 4, 6)]
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


def hard_to_add(*shape: int, seed: int = 0, shards: int = SHARDS) -> np.ndarray:
    """Numbers of such different sizes that every order of adding them over the shards rounds differently."""
    rng = np.random.default_rng(seed)
    shape = (shards, *shape)
    return (rng.normal(size=shape) * 10.0 ** rng.integers(-4, 5, size=shape)).astype(np.float32)


def slow_sum(x: np.ndarray) -> np.ndarray:
    """Shard 0, plus shard 1, plus shard 2, ..."""
    total = x[0].copy()
    for part in x[1:]:
        total = (total + part).astype(x.dtype)
    return total


def mixed(elements: int, shards: int = SHARDS) -> dict:
    """Leaves of many shapes and kinds; of each kind about `elements` numbers, which no number of devices divides."""
    rng = np.random.default_rng(1)
    whole = lambda *shape: rng.integers(-(2**28), 2**28, size=(shards, *shape), dtype=np.int32)
    real = lambda *shape, seed: hard_to_add(*shape, seed=seed, shards=shards)
    return {
        "vector": real(elements, seed=2),
        "tensor": real(3, 5, 7, seed=3),
        "scalar": real(seed=4),
        "empty": real(0, seed=5),
        "half": real(elements + 2, 1, seed=6).astype(jnp.bfloat16),
        "whole": (whole(elements), [whole(), whole(0, 2)]),
    }


SMALL, LARGE = 49, 100_003  # elements: what is gathered, and what is exchanged in slices


@pytest.mark.parametrize("elements", [SMALL, LARGE], ids=["small", "large"])
@pytest.mark.parametrize("devices", DEVICES)
def test_sum_adds_in_the_order_of_the_shards(on_devices, devices, elements):
    tree = mixed(elements)
    assert any((slow_sum(x) != slow_sum(x[::-1])).any() for x in jax.tree.leaves(tree))
    total = on_devices(lambda shards, _, tree: shards.sum(tree), SHARDS, devices)((), tree)
    for expected, found in zip(jax.tree.leaves(tree), jax.tree.leaves(total), strict=True):
        assert found.dtype == expected.dtype and found.shape == expected.shape[1:]
        assert digest(found) == digest(slow_sum(expected))


@pytest.mark.parametrize("shards, devices", [(40, 1), (40, 8), (24, 2), (17, 1), (17, 7)])
def test_many_shards_are_added_in_the_same_order(on_devices, shards, devices):
    """More than one unrolled part of the loop, with and without a remainder."""
    x = hard_to_add(3001, shards=shards)
    total = on_devices(lambda axis, _, x: axis.sum(x), shards, devices)((), x)
    assert digest(total) == digest(slow_sum(x))


def test_no_device_holds_all_shards_of_a_large_sum(on_devices):
    """What is sent and held does not grow with the number of shards, only with the part of them that a device has."""
    n = 60_000
    leaves = {"a": (n // 2,), "b": (100, n // 400), "c": (n // 4 - 1,), "d": ()}
    for devices in (2, 3, 4, 6):
        local = -(-SHARDS // devices)
        tree = {name: jax.ShapeDtypeStruct((local * devices, *shape), np.float32) for name, shape in leaves.items()}
        lowered = on_devices(lambda shards, _, tree: shards.sum(tree), SHARDS, devices).lower((), tree)
        assert lowered.as_text().count('"stablehlo.all_to_all"') == 1  # all leaves travel together
        assert lowered.as_text().count('"stablehlo.all_gather"') == 1
        compiled = lowered.compile()
        arrays = re.findall(r"(?:f32|bf16|s32)\[([\d,]+)\]", compiled.as_text())
        assert n <= max(math.prod(map(int, shape.split(","))) for shape in arrays) <= local * n < SHARDS * n
        assert compiled.memory_analysis().temp_size_in_bytes <= 3 * local * n * 4  # with empty places, too


def test_leaves_of_a_small_sum_are_gathered_together(on_devices):
    lowered = on_devices(lambda shards, _, x: shards.sum([x, 2 * x, x[:, 0]]), SHARDS, 3).lower((), hard_to_add(50))
    assert lowered.as_text().count('"stablehlo.all_gather"') == 1
    assert lowered.as_text().count('"stablehlo.all_to_all"') == 0


@pytest.mark.parametrize("devices", DEVICES)
def test_map_gives_every_shard_its_own_part_and_number(on_devices, devices):
    x = np.arange(SHARDS * 2, dtype=np.float32).reshape(SHARDS, 2)

    def fn(shards, offset, x):
        assert shards.index.shape == (-(-SHARDS // devices),) and shards.num_devices == devices
        seen = shards.map(lambda part, number: (part + offset, number), x, shards.index)
        held = jnp.asarray(shards.num_held)[None]
        return jax.lax.all_gather((*seen, held), shards.mesh_axis)

    part, number, held = on_devices(fn, SHARDS, devices)(jnp.float32(100), x)  # [D, K', ...]
    filled = np.arange(part.shape[1]) < held
    assert (part[filled] == x + 100).all() and number[filled].tolist() == list(range(SHARDS))
    assert not part[~filled].any(), "what is in an empty place is not computed with"


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


def test_all_that_enters_and_leaves_an_isolated_branch_is_laid_out_by_rows():
    closed_over = np.ones((4, 5), np.float32)

    def call(always, x, y):
        axis = ShardAxis(num_shards=1, index=jnp.zeros(1, jnp.int32), always=always, mesh_axis="learner")
        key = jax.random.split(jax.random.key(0), 3)  # has no layout that one could name
        noise = lambda key: jax.vmap(lambda k: jax.random.normal(k, (5,)))(key)
        return axis.isolate(lambda x, key: (x @ y + noise(key), x.sum()), x, key)

    text = jax.jit(call).lower(True, jnp.ones((3, 4)), closed_over).as_text()
    branch = text[text.index('"stablehlo.case"') :]
    pinned = re.findall(r"@LayoutConstraint.*result_layouts = \[dense<\[1, 0\]>.*-> tensor<(\w+)xf32>", branch)
    assert sorted(pinned) == ["3x4", "3x5", "4x5"]


@pytest.mark.parametrize("devices", DEVICES)
def test_the_greatest_is_that_of_the_shards(on_devices, devices):
    """Not the zeros of an empty place, where all shards are below."""
    x = -1 - np.random.default_rng(0).random((SHARDS, 4)).astype(np.float32)
    fn = lambda shards, _, x: shards.max(shards.map(lambda part: part, x))
    assert (on_devices(fn, SHARDS, devices)((), x) == x.max(0)).all()


def test_one_shard_is_its_own_sum(on_devices):
    x = np.random.default_rng(0).normal(size=(1, 5)).astype(np.float32)
    assert (on_devices(lambda shards, _, x: shards.sum(x), 1, 1)((), x) == x[0]).all()
