"""Networks: shapes, sizes counted by hand, two forms of one convolution, and memory that forgets when it must."""

from functools import partial

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.linen import OptimizedLSTMCell

from cleanba import specs
from cleanba.config import FromRollouts, PolicyGradient
from cleanba.errors import UsageError
from cleanba.kernels import compiling_for, max_pool
from cleanba.networks import make_action_values, make_actor_critic, suitable_network
from cleanba.networks.cores import LSTM, LSTMCarry, initial_carry
from cleanba.networks.encoder import as_vector
from cleanba.networks.layers import Conv, LayerNorm
from cleanba.networks.torsos import Dense, ImpalaResNet, NatureCNN
from cleanba.specs import EnvSpec, ObsSpec

ATARI = ObsSpec("image", (4, 84, 84), "uint8")
SMALL_IMAGE = ObsSpec("image", (3, 36, 36), "uint8")
VECTOR = ObsSpec("vector", (5,), "float32")
DISCRETE = ObsSpec("discrete", (), "int32", 16)
MINIGRID = {
    "image": ObsSpec("codes", (7, 7, 3), "uint8", 11),
    "direction": ObsSpec("discrete", (), "int32", 4),
    "mission": ObsSpec("bytes", (96,), "uint8"),
}


def build(obs, num_actions=6, **experiment):
    spec = EnvSpec("test", obs, specs.choice(num_actions), False, False, {})
    return make_actor_critic(spec, PolicyGradient(**experiment))


def observe(obs, *lead: int, seed: int = 0):
    """Random observations [*lead, ...]."""
    rng = np.random.default_rng(seed)

    def one(o: ObsSpec):
        high = o.count or 256
        whole = rng.integers(high, size=(*lead, *o.shape)).astype(o.dtype)
        return rng.normal(size=whole.shape).astype(o.dtype) if o.kind == "vector" else whole

    return jax.tree.map(one, obs)


def some_params(init, bias: float = 0.1):
    """Random parameters of a sensible scale; much faster to make than orthogonal ones."""
    rng = np.random.default_rng(0)

    def draw(p):
        scale = bias if len(p.shape) == 1 else np.prod(p.shape[:-1]) ** -0.5
        return (scale * rng.normal(size=p.shape)).astype(p.dtype)

    return jax.tree.map(draw, jax.eval_shape(init, jax.random.key(0)))


def close(a, b, rtol=1e-4, atol=1e-5):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=rtol, atol=atol), a, b)


# ------------------------------------------------------------------------------------------ shapes and sizes

SMALL = dict(hiddens=(8,), channels=(4, 6), lstm_size=5)


@pytest.mark.parametrize("core", ["none", "lstm"])
@pytest.mark.parametrize(
    "obs, network",
    [(SMALL_IMAGE, "nature"), (SMALL_IMAGE, "impala"), (SMALL_IMAGE, "mlp"), (VECTOR, "mlp"), (DISCRETE, "mlp"),
     ({"camera": SMALL_IMAGE, "pos": VECTOR}, "nature"),
     (MINIGRID, "mlp"), (ATARI, suitable_network(ATARI)), (MINIGRID, suitable_network(MINIGRID))],
)  # fmt: skip
def test_outputs_have_a_logit_per_action_and_a_value_for_every_step_and_environment(obs, network, core):
    net = build(obs, network=network, core=core, **SMALL)

    def run(key):
        shape = lambda o: jnp.zeros((3, 2, *o.shape), o.dtype)
        out = net.outputs(net.initial_params(key), jax.tree.map(shape, obs), jnp.zeros((3, 2), bool), carry)
        return out.policy.logits, out.value, out.carry

    carry = net.initial_carry(2)
    logits, value, last = jax.eval_shape(run, jax.random.key(0))
    assert (logits.shape, value.shape) == ((3, 2, 6), (3, 2))
    assert logits.dtype == value.dtype == jnp.float32
    assert jax.tree.map(jnp.shape, last) == jax.tree.map(jnp.shape, carry)
    assert [x.shape for x in jax.tree.leaves(last)] == ([(2, 5)] * 2 if core == "lstm" else [])


def head(features: int, actions: int) -> int:
    return features * actions + actions + features + 1


def lstm(features: int, units: int) -> int:
    return (features + units + 1) * 4 * units


# 84 -> 20 -> 9 -> 7: strides 4, 2, 1 of kernels 8, 4, 3
NATURE = (8 * 8 * 4 * 32 + 32) + (4 * 4 * 32 * 64 + 64) + (3 * 3 * 64 * 64 + 64) + (7 * 7 * 64 * 512 + 512)
NIPS = (8 * 8 * 4 * 16 + 16) + (4 * 4 * 16 * 32 + 32) + (9 * 9 * 32 * 256 + 256)
# A section: one convolution to its channels, four among them.  84 -> 42 -> 21 -> 11: pooled in steps of 2.
SECTION = lambda before, c: (9 * before * c + c) + 4 * (9 * c * c + c)
IMPALA = SECTION(4, 16) + SECTION(16, 32) + SECTION(32, 32) + (11 * 11 * 32 * 256 + 256)
MLP = (5 * 64 + 64) + (64 * 32 + 32)

COUNTS = [
    (ATARI, dict(network="nature", hiddens=(512,)), NATURE + head(512, 6)),
    (ATARI, dict(network="nips", hiddens=(256,)), NIPS + head(256, 6)),
    (ATARI, dict(network="impala", hiddens=(256,)), IMPALA + head(256, 6)),
    (ATARI, dict(network=suitable_network(ATARI), hiddens=(256,)), IMPALA + head(256, 6)),
    (VECTOR, dict(network="mlp", hiddens=(64, 32)), MLP + head(32, 6)),
    (VECTOR, dict(network=suitable_network(VECTOR), hiddens=(64, 32)), MLP + head(32, 6)),
    (ATARI, dict(network="nature", hiddens=(512,), core="lstm"), NATURE + lstm(512, 256) + head(256, 6)),
    (ATARI, dict(network="impala", hiddens=(256,), core="lstm"), IMPALA + lstm(256, 256) + head(256, 6)),
    (VECTOR, dict(network="mlp", hiddens=(64, 32), core="lstm", lstm_size=7), MLP + lstm(32, 7) + head(7, 6)),
    (
        {"a": ATARI, "b": ATARI, "pos": VECTOR},
        dict(network="nature", hiddens=(512,)),
        2 * NATURE + ((2 * 512 + 5) * 512 + 512) + head(512, 6),
    ),
    (
        {"a": ATARI, "action_mask": ObsSpec("mask", (6,), "int8")},
        dict(network="nature", hiddens=(512,)),
        NATURE + head(512, 6),
    ),
    (DISCRETE, dict(hiddens=(10,)), (16 * 10 + 10) + head(10, 6)),
    (MINIGRID, dict(hiddens=(10,)), ((147 * 11 + 4 + 96 * 8) * 10 + 10) + head(10, 6)),
]


@pytest.mark.parametrize("obs, options, expected", COUNTS)
@pytest.mark.parametrize("platform", ["cpu", "gpu"])
def test_networks_have_as_many_parameters_as_counted_by_hand(obs, options, expected, platform):
    with compiling_for(platform):
        shapes = jax.eval_shape(build(obs, **options).initial_params, jax.random.key(0))
    assert sum(x.size for x in jax.tree.leaves(shapes)) == expected
    assert {x.dtype for x in jax.tree.leaves(shapes)} == {jnp.dtype("float32")}


def test_the_counts_are_those_of_the_papers_networks():
    assert NATURE + head(512, 6) == 1_687_719
    assert IMPALA + head(256, 6) == 9_872 + 41_632 + 46_240 + 991_488 + 1_542 + 257


def test_a_picture_among_numbers_reaches_the_policy_through_its_convolutions():
    obs = {"camera": SMALL_IMAGE, "pos": VECTOR}
    net = build(obs, network="nature", **SMALL)
    params = net.initial_params(jax.random.key(0))
    assert {"NatureCNN_0", "MLP_0"} <= set(params["params"])
    seen = observe(obs, 1, 2)
    logits = lambda seen: net.outputs(params, seen, jnp.zeros((1, 2), bool), net.initial_carry(2)).policy.logits
    for name in obs:
        other = seen | {name: seen[name] // 2 if name == "camera" else -seen[name]}
        assert np.abs(logits(seen) - logits(other)).max() > 0, name


def test_heads_are_orthogonal_of_scale_one_hundredth_and_one_and_biases_are_zero():
    p = jax.jit(build(VECTOR, hiddens=(32,)).initial_params)(jax.random.key(0))["params"]
    policy, value = p["policy"]["Dense_0"], p["value"]["Dense_0"]
    close(policy["kernel"].T @ policy["kernel"], 1e-4 * np.eye(6), atol=1e-8)
    close(value["kernel"].T @ value["kernel"], np.eye(1))
    assert not np.any(policy["bias"]) and not np.any(value["bias"])


@pytest.mark.parametrize("network", ["nature", "nips", "impala"])
@pytest.mark.parametrize("obs", [VECTOR, DISCRETE, MINIGRID])
def test_convolutions_over_other_observations_than_images_are_refused(network, obs):
    with pytest.raises(UsageError, match=f"network={network} needs images.*--network mlp"):
        build(obs, network=network)


@pytest.mark.parametrize(
    "network, side, kind", [("nature", 35, "image"), ("nips", 19, "image"), ("minatar", 2, "planes")]
)
def test_pictures_smaller_than_the_convolutions_are_refused(network, side, kind):
    with pytest.raises(UsageError, match=rf"network={network} needs .* {side + 1} x {side + 1} "):
        build(ObsSpec(kind, (side, side, 3), "uint8"), network=network)
    build(ObsSpec(kind, (side + 1, side + 1, 3), "uint8"), network=network)


# -------------------------------------------------------------------- one convolution, computed in two ways


@pytest.fixture(params=["off", "auto"])
def choice(request):
    """In plain JAX, and by kernels."""
    with compiling_for("cpu", request.param):
        yield


def by_both(function, *args):
    """The results of a function in plain JAX and with kernels."""
    results = []
    for choice in ("off", "auto"):
        with compiling_for("cpu", choice):
            results.append(function(*args))
    return results


def conv_both(x, **options):
    """Outputs and gradients of one convolution, computed both ways with the same parameters."""
    params = some_params(lambda key: Conv(**options).init(key, x))

    def run(params, x):
        y = Conv(**options).apply(params, x)
        return (y * jnp.sin(jnp.arange(y.size).reshape(y.shape))).sum(), y

    wrt = (0, 1) if x.dtype == np.float32 else 0
    return by_both(jax.jit(jax.grad(run, wrt, has_aux=True)), params, x)


@pytest.mark.parametrize(
    "size, stride, hw, padding",
    [(8, 4, (20, 30), "VALID"), (4, 2, (9, 11), "VALID"), (3, 1, (5, 7), "VALID"), (3, 2, (8, 7), "VALID"),
     (3, 1, (5, 6), "SAME"), (3, 2, (8, 7), "SAME")],
)  # fmt: skip
def test_direct_convolutions_compute_the_same_convolution_and_gradients_as_xla(size, stride, hw, padding):
    x = np.random.default_rng(0).normal(size=(2, *hw, 3)).astype(np.float32)
    xla, cut = conv_both(x, features=4, size=size, stride=stride, padding=padding)
    close(cut, xla, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("size, stride, padding", [(4, 2, "VALID"), (3, 1, "SAME")])
def test_direct_convolutions_take_bytes_and_scale_them_as_xla_does(size, stride, padding):
    x = observe(ObsSpec("image", (12, 12, 3), "uint8"), 2)
    options = dict(features=4, size=size, stride=stride, padding=padding)
    xla, cut = conv_both(x, **options, input_scale=1 / 255)
    close(cut, xla, rtol=1e-3, atol=1e-4)
    params = some_params(lambda key: Conv(**options).init(key, x))
    scaled = Conv(**options).apply(params, x.astype(np.float32) / 255)
    close(Conv(**options, input_scale=1 / 255).apply(params, x), scaled)


@pytest.mark.parametrize("dtype", ["uint8", "float32"])
def test_convolutions_take_planes_as_the_images_that_they_make_up(choice, dtype):
    x = observe(ObsSpec("image", (3, 20, 30), "uint8"), 2).astype(dtype)
    options = dict(features=4, size=8, stride=4)
    params = some_params(lambda key: Conv(**options, planes=True).init(key, x))
    planes = Conv(**options, planes=True).apply(params, x)
    close(planes, Conv(**options).apply(params, x.transpose(0, 2, 3, 1)), rtol=1e-5)


def test_convolutions_rectify_their_input_and_add_skip_connections(choice):
    x, skip = np.random.default_rng(0).normal(size=(2, 2, 5, 6, 3)).astype(np.float32)
    options = dict(features=3, size=3, padding="SAME")
    params = some_params(lambda key: Conv(**options).init(key, x))
    close(Conv(**options, rectify=True).apply(params, x, skip), Conv(**options).apply(params, np.maximum(x, 0)) + skip)


def test_bfloat16_is_multiplied_in_float32_and_returned_as_bfloat16():
    x = np.random.default_rng(0).normal(size=(2, 5, 6, 3)).astype(jnp.bfloat16)
    options = dict(features=3, size=3, dtype=jnp.bfloat16)
    params = some_params(lambda key: Conv(**options).init(key, x))
    xla, ours = by_both(Conv(**options).apply, params, x)
    assert ours.dtype == jnp.bfloat16
    close(ours.astype(np.float32), xla.astype(np.float32), rtol=0.02, atol=0.02)


@pytest.mark.parametrize("lead", [(5,), (2, 3)], ids=str)
def test_dense_layers_have_the_same_parameters_and_outputs_in_both_forms(lead):
    x = np.random.default_rng(0).normal(size=(*lead, 7)).astype(np.float32)
    (out, xla), (same, cut) = by_both(Dense(3, 2.0).init_with_output, jax.random.key(1), x)
    chex.assert_trees_all_equal(xla, cut)
    close(same, out, rtol=1e-6)


@pytest.mark.parametrize("hw", [(84, 84), (21, 11), (4, 5), (3, 3), (2, 1), (1, 1)], ids=str)
def test_max_pool_equals_xlas_in_values_and_gradients(hw):
    x = jnp.asarray(np.random.default_rng(0).normal(size=(2, *hw, 3)) - 5, jnp.float32)  # padding must not win
    assert_pools_alike(x)


def test_max_pool_sends_the_gradient_of_equal_maxima_where_xla_sends_it():
    x = np.random.default_rng(0).integers(3, size=(2, 11, 12, 3)).astype(np.float32)
    x[:, 3:9, 3:9] = 2.0  # as in a picture's black corner
    assert_pools_alike(jnp.asarray(x))


def assert_pools_alike(x):
    n, h, w, c = x.shape

    def run(x, pool):
        y = pool(x)
        return (y * jnp.cos(jnp.arange(y.size).reshape(y.shape))).sum(), y

    grad = jax.jit(jax.grad(run, has_aux=True), static_argnums=1)
    xlas = partial(nn.max_pool, window_shape=(3, 3), strides=(2, 2), padding="SAME")
    assert grad(x, max_pool)[1].shape == (n, -(-h // 2), -(-w // 2), c)
    close(grad(x, max_pool), grad(x, xlas))


@pytest.mark.parametrize(
    "network, steps, envs",
    [("nature", 2, 2), ("nature", 3, 32), ("nips", 3, 32), ("impala", 3, 32)],
)
def test_whole_networks_learn_the_same_from_direct_convolutions_as_from_xla(network, steps, envs):
    options = dict(network=network, hiddens=(16,), channels=(4,))
    obs, first = observe(SMALL_IMAGE, steps, envs), np.zeros((steps, envs), bool)
    network = build(SMALL_IMAGE, **options)

    def loss(params):
        out = network.outputs(params, obs, first, ())
        weight = jnp.sin(jnp.arange(first.size)).reshape(first.shape)
        return (out.policy.logits**2).mean() + (out.value * weight).mean(), (out.policy.logits, out.value)

    xla, ours = by_both(jax.jit(jax.grad(loss, has_aux=True)), some_params(network.initial_params))
    close(ours, xla, rtol=2e-3, atol=1e-4)


@pytest.mark.parametrize("torso", [NatureCNN((8,)), ImpalaResNet((4,), (8,))], ids=["nature", "impala"])
def test_networks_see_the_same_whether_channels_come_first_or_last(torso):
    x = observe(ObsSpec("image", (3, 36, 40), "uint8"), 2)
    params = some_params(lambda key: torso.init(key, x))
    first, last = (jax.jit(torso.apply)(params, images) for images in (x, x.transpose(0, 2, 3, 1)))
    assert first.shape == (2, 8) and np.ptp(first) > 0
    close(first, last)


@pytest.mark.parametrize("network", ["nature", "impala", "mlp"])
def test_images_are_scaled_to_at_most_one(network):
    net = build(SMALL_IMAGE, network=network, hiddens=(16,), channels=(4,))
    params = some_params(net.initial_params, bias=0.0)
    apply = jax.jit(net.outputs)
    first = np.zeros((1, 1), bool)
    value = lambda level: float(
        apply(params, np.full((1, 1, *SMALL_IMAGE.shape), level, np.uint8), first, ()).value[0, 0]
    )
    # Without biases networks of relus are linear along a ray, and that of tanhs nearly, for small inputs.
    assert value(0) == 0
    rtol = 0.02 if network == "mlp" else 1e-4
    np.testing.assert_allclose(value(4), 2 * value(2), rtol=rtol)
    assert 1e-4 < abs(value(255)) < 10


# ----------------------------------------------------------------------------------------- layer normalisation


def test_layer_normalisation_is_flaxs_in_values_and_gradients():
    rng = np.random.default_rng(0)
    x = 3 + 2 * rng.normal(size=(2, 4, 5)).astype(np.float32)
    params = {"params": {name: rng.normal(size=5).astype(np.float32) for name in ("scale", "bias")}}

    def gradients(module):
        weighted = lambda params, x: (module.apply(params, x) * jnp.sin(jnp.arange(40.0)).reshape(x.shape)).sum()
        return module.apply(params, x), jax.grad(weighted, (0, 1))(params, jnp.asarray(x))

    close(gradients(LayerNorm()), gradients(nn.LayerNorm(use_fast_variance=False)))


@pytest.mark.parametrize(
    "obs, network",
    [(SMALL_IMAGE, "nature"), (SMALL_IMAGE, "impala"), (ObsSpec("planes", (10, 10, 4), "bool", 2), "minatar"),
     (VECTOR, "mlp")],
)  # fmt: skip
def test_with_layer_normalisation_every_layer_of_a_torso_is_normalised(obs, network):
    options = dict(network=network, hiddens=(16, 8), channels=(4, 6))
    net = build(obs, **options, layer_norm=True)
    plain, params = (some_params(n.initial_params, bias=0.0) for n in (build(obs, **options), net))
    names = lambda params: [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(params)]
    layers = sum("kernel" in name for name in names(plain)) - 2  # but the heads
    added = [name for name in names(params) if name not in names(plain)]
    assert len(added) == 2 * layers and all("LayerNorm" in name for name in added)
    # Without biases a layer's output grows with its input, so its normalised output does not.
    params = jax.tree_util.tree_map_with_path(lambda path, p: p * 0 + 1 if "scale" in str(path) else p, params)
    x, first = observe(obs, 1, 3), np.zeros((1, 3), bool)
    x = x // 2 if obs.dtype == "uint8" else x.astype(np.float32)
    out = [jax.jit(net.outputs)(params, x * factor, first, ()).value for factor in (1, 2)]
    close(*out, rtol=2e-2, atol=2e-3)
    assert np.ptp(out[0]) > 1e-2


# -------------------------------------------------------------------------------------------------- action values


@pytest.mark.parametrize("core", ["none", "lstm"])
@pytest.mark.parametrize("dueling", [False, True])
def test_action_values_of_a_sequence_are_those_of_its_steps(core, dueling):
    e = FromRollouts(core=core, hiddens=(8,), lstm_size=5)
    net = make_action_values(EnvSpec("test", VECTOR, specs.choice(6), False, False, {}), e, dueling)
    params = some_params(net.initial_params)
    obs, first = observe(VECTOR, 6, 3), np.zeros((6, 3), bool)
    first[0], first[4, 1] = True, True
    whole = jax.jit(net.outputs)(params, obs, first, net.initial_carry(3))
    assert whole.values.shape == (6, 3, 6)
    carry = net.initial_carry(3)
    for t in range(6):
        values, carry = net.one_step(params, carry, obs[t], first[t])
        close(values, whole.values[t])
        if core == "none":
            close(net.values(params, obs[t]), whole.values[t])
    close(carry, whole.carry)
    forgets = net.one_step(params, carry, obs[4], np.ones(3, bool)).values  # as environment 1 did at step 4
    close(forgets[1], whole.values[4, 1])
    assert core == "none" or abs(forgets[0] - whole.values[4, 0]).max() > 1e-3


# ------------------------------------------------------------------------------------------- other observations


def test_as_vector_of_each_kind_of_observation():
    rows = lambda x: np.asarray(x).tolist()
    assert rows(as_vector(ObsSpec("discrete", (), "int32", 3), jnp.array([2, 0]))) == [[0, 0, 1], [1, 0, 0]]
    codes = ObsSpec("codes", (2, 1), "int8", 3, -1)
    assert rows(as_vector(codes, jnp.int8([[[-1], [1]], [[0], [5]]]))) == [[1, 0, 0, 0, 0, 1], [0, 1, 0, 0, 0, 0]]
    bits = [1, 0, 0, 0, 0, 0, 1, 0] + [0] * 8 + [1] * 8  # "A", nothing, 255
    assert rows(as_vector(ObsSpec("bytes", (3,), "uint8"), jnp.uint8([[65, 0, 255]]))) == [bits]
    assert rows(as_vector(ObsSpec("vector", (2,), "int32"), jnp.array([[3, -4]]))) == [[3.0, -4.0]]
    np.testing.assert_allclose(as_vector(ObsSpec("image", (1, 2), "uint8"), jnp.uint8([[[51, 255]]])), [[0.2, 1.0]])


@pytest.mark.parametrize("name", list(MINIGRID))
def test_every_part_of_a_dictionary_is_seen(name):
    net = build(MINIGRID, hiddens=(8,))
    params = some_params(net.initial_params)
    apply = jax.jit(net.outputs)
    obs, first = observe(MINIGRID, 1, 2), np.zeros((1, 2), bool)
    other = obs | {name: (obs[name] + 1) % 4}
    before, after = apply(params, obs, first, ()).value, apply(params, other, first, ()).value
    assert (abs(before - after) > 1e-5).all()


def test_a_discrete_state_picks_its_row_of_the_first_layer():
    net = build(DISCRETE, hiddens=(8,))
    params = some_params(net.initial_params, bias=0.0)
    out = net.outputs(params, jnp.arange(16)[None], np.zeros((1, 16), bool), ())
    p = params["params"]
    hidden = np.tanh(p["MLP_0"]["Dense_0"]["Dense_0"]["kernel"])
    close(out.value[0], (hidden @ p["value"]["Dense_0"]["kernel"])[:, 0])


# -------------------------------------------------------------------------------------------------------- memory

UNITS, FEATURES, STEPS, ENVS = 6, 4, 7, 3


@pytest.fixture(scope="module")
def sequence():
    """Parameters, inputs, carry and first steps; some episodes begin in the middle, one at the very start."""
    rng = np.random.default_rng(0)
    draw = lambda *shape: rng.normal(size=shape).astype(np.float32)
    params = {"w_x": draw(FEATURES, 4 * UNITS), "w_h": draw(UNITS, 4 * UNITS), "b": draw(4 * UNITS)}
    first = np.zeros((STEPS, ENVS), bool)
    first[[0, 3, 4, 6], [0, 1, 1, 2]] = True
    return {"params": params}, draw(STEPS, ENVS, FEATURES), LSTMCarry(draw(ENVS, UNITS), draw(ENVS, UNITS)), first


def stepped(cell, x, carry, first):
    """(c, h), x -> (c, h), y one step at a time, from zeros where an episode begins."""
    c, h = carry.c, carry.h
    outputs = []
    for x_t, first_t in zip(x, first, strict=True):
        c, h = (np.where(first_t[:, None], 0.0, y) for y in (c, h))
        (c, h), y = cell((c, h), x_t)
        outputs.append(y)
    return np.stack(outputs), LSTMCarry(h=h, c=c)


def test_lstm_equals_flaxs_with_resets_in_the_middle(sequence, choice):
    params, x, carry, first = sequence
    p = params["params"]
    gates = zip("ifgo", *(np.split(p[name], 4, axis=-1) for name in ("w_x", "w_h", "b")), strict=True)
    theirs = {}
    for gate, w_x, w_h, b in gates:
        theirs |= {f"i{gate}": {"kernel": w_x}, f"h{gate}": {"kernel": w_h, "bias": b}}
    cell = lambda carry, x: OptimizedLSTMCell(UNITS).apply({"params": theirs}, carry, x)
    close(LSTM(UNITS).apply(params, x, first, carry), stepped(cell, x, carry, first))


def test_lstm_equals_pytorchs_with_resets_in_the_middle(sequence):
    torch = pytest.importorskip("torch")
    params, x, carry, first = sequence
    theirs = torch.nn.LSTM(FEATURES, UNITS)
    p = {name: torch.tensor(value) for name, value in params["params"].items()}
    weights = {"weight_ih_l0": p["w_x"].T, "weight_hh_l0": p["w_h"].T, "bias_ih_l0": p["b"], "bias_hh_l0": 0 * p["b"]}
    theirs.load_state_dict(weights)

    def cell(carry, x):
        c, h = (torch.tensor(np.float32(y))[None] for y in carry)
        with torch.no_grad():
            y, (h, c) = theirs(torch.tensor(x)[None], (h, c))
        return (c[0].numpy(), h[0].numpy()), y[0].numpy()

    close(LSTM(UNITS).apply(params, x, first, carry), stepped(cell, x, carry, first))


def test_lstm_gradients_are_those_of_its_steps_differentiated_one_by_one(sequence, choice):
    params, x, carry, first = sequence
    rng = np.random.default_rng(1)
    weights = [
        rng.normal(size=shape).astype(np.float32) for shape in ((STEPS, ENVS, UNITS), (ENVS, UNITS), (ENVS, UNITS))
    ]

    def slow(params, x, carry):
        p, (h, c), out = params["params"], carry, []
        for x_t, first_t in zip(x, first, strict=True):
            h, c = (jnp.where(first_t[:, None], 0.0, y) for y in (h, c))
            i, f, g, o = jnp.split(x_t @ p["w_x"] + h @ p["w_h"] + p["b"], 4, axis=-1)
            c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
            h = jax.nn.sigmoid(o) * jnp.tanh(c)
            out.append(h)
        return jnp.stack(out), LSTMCarry(h, c)

    def gradients(lstm):
        total = lambda *args: sum((y * w).sum() for y, w in zip(jax.tree.leaves(lstm(*args)), weights, strict=True))
        return jax.grad(total, argnums=(0, 1, 2))(params, jnp.asarray(x), carry)

    close(gradients(lambda params, x, carry: LSTM(UNITS).apply(params, x, first, carry)), gradients(slow))


def test_lstm_forgets_all_that_came_before_the_first_step_of_an_episode(sequence):
    params, x, carry, first = sequence
    before = LSTM(UNITS).apply(params, x, first, carry)
    other = x.copy()
    other[:3, 1] += 1.0  # the episode of environment 1 that ends before step 3
    after = LSTM(UNITS).apply(params, other, first, jax.tree.map(lambda y: y - 1, carry))
    assert (before[0][3:, 1] == after[0][3:, 1]).all() and (before[0][:, 0] == after[0][:, 0]).all()
    assert (before[0][:3, 1] != after[0][:3, 1]).any() and (before[0][:6, 2] != after[0][:6, 2]).any()


def test_no_gradient_crosses_the_start_of_an_episode(sequence):
    params, x, carry, first = sequence
    last_output = lambda x: LSTM(UNITS).apply(params, x, first, carry)[0][5].sum()
    gradient = np.abs(jax.grad(last_output)(jnp.asarray(x))).sum(-1)  # [T, B]
    assert (gradient > 0).tolist() == [[t <= 5 and (b != 1 or t >= 4) for b in range(ENVS)] for t in range(STEPS)]


@pytest.mark.parametrize("core", ["none", "lstm"])
def test_a_sequence_gives_what_acting_step_by_step_gave(core):
    net = build(VECTOR, core=core, hiddens=(8,), lstm_size=5)
    params = some_params(net.initial_params)
    obs, first = observe(VECTOR, 6, 3), np.zeros((6, 3), bool)
    first[0], first[4, 1] = True, True
    apply = jax.jit(net.outputs)
    whole = apply(params, obs, first, net.initial_carry(3))
    carry = net.initial_carry(3)
    for t in range(6):
        step = apply(params, obs[t : t + 1], first[t : t + 1], carry)
        close((step.policy.logits[0], step.value[0]), (whole.policy.logits[t], whole.value[t]))
        carry = step.carry
    close(carry, whole.carry)


def test_carries_begin_at_zero():
    assert initial_carry("none", 5, 2) == ()
    assert all(x.shape == (2, 5) and not x.any() for x in initial_carry("lstm", 5, 2))


# -------------------------------------------------------------------------------------------------------- bfloat16


@pytest.mark.parametrize("network", ["nature", "impala", "mlp"])
def test_bfloat16_keeps_parameters_gradients_outputs_and_memory_in_float32(network):
    net = build(SMALL_IMAGE, network=network, core="lstm", dtype="bfloat16", **SMALL)
    obs, first = observe(SMALL_IMAGE, 3, 2), np.zeros((3, 2), bool)

    def run(key):
        params, carry = net.initial_params(key), net.initial_carry(2)
        loss = lambda params: net.outputs(params, obs, first, carry).value.sum()
        return params, jax.grad(loss)(params), net.outputs(params, obs, first, carry)

    assert {x.dtype for x in jax.tree.leaves(jax.eval_shape(run, jax.random.key(0)))} == {jnp.dtype("float32")}


@pytest.mark.parametrize("obs, network, core", [(SMALL_IMAGE, "nature", "none"), (VECTOR, "mlp", "lstm")])
def test_bfloat16_computes_with_less_precision(obs, network, core):
    options = dict(network=network, core=core, hiddens=(16,), lstm_size=8)
    fine, coarse = build(obs, **options), build(obs, dtype="bfloat16", **options)
    params, x, first, carry = (
        some_params(fine.initial_params),
        observe(obs, 3, 2),
        np.zeros((3, 2), bool),
        fine.initial_carry(2),
    )
    exact, out = (jax.jit(net.outputs)(params, x, first, carry) for net in (fine, coarse))
    for leaf, theirs in zip(jax.tree.leaves(out), jax.tree.leaves(exact), strict=True):
        assert 1e-5 < abs(leaf - theirs).max() < 0.05 * max(abs(theirs).max(), 0.1)
