"""Our loop over dense layers on CPUs against JAX's layers, with the same bits however rows are divided."""

from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("llvmlite")

from test_networks import by_both
from test_product import draw, near

from cleanba import kernels
from cleanba.kernels import dense, llvm, product


def weights(*widths):
    scaled = lambda d, f, seed: draw(d, f, seed=seed) / np.float32(d) ** 0.5
    return [(scaled(d, f, i), draw(f, seed=i + 50)) for i, (d, f) in enumerate(pairwise(widths))]


def one_by_one(activation, linear, x, layers):
    f = {"relu": jax.nn.relu, "tanh": jnp.tanh}[activation]
    for i, (w, b) in enumerate(layers):
        x = x @ w + b
        x = x if linear and i == len(layers) - 1 else f(x)
    return x


# Rows, widths: of one group and of many, whole vectors and not, one layer, and sums longer than a near cache.
SHAPES = [
    (1, (3, 1)), (4, (17, 64, 64)), (33, (5, 20, 7, 40)), (100, (1, 16)), (256, (23, 256, 256, 6)),
    (1000, (4, 64, 64, 3)), (70, (700, 520, 300)),
]  # fmt: skip


KINDS = [("tanh", False), ("relu", True)]  # the activation, and whether the last layer is linear
OTHERS = [("tanh", True), ("relu", False)]


@pytest.mark.parametrize(
    "rows, widths, activation, linear",
    [(*shape, *kind) for i, shape in enumerate(SHAPES) for kind in KINDS + OTHERS * (i == 2)],
    ids=str,
)
def test_outputs_and_gradients_are_those_of_jaxs_layers(rows, widths, activation, linear):
    x, layers, weight = draw(rows, widths[0], seed=9), weights(*widths), draw(rows, widths[-1], seed=8)

    def run(f):
        loss = lambda x, layers: ((weight * f(activation, linear, x, layers)).sum(), f(activation, linear, x, layers))
        (_, y), gradients = jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))(x, layers)
        return [y, *jax.tree.leaves(gradients)]

    near(run(dense.mlp), run(one_by_one))


@pytest.mark.parametrize("cores", [1, 3, 40])
@pytest.mark.parametrize("registers", [(16, 32), (8, 16), (4, 32)], ids=["avx512", "avx", "neon"])
def test_other_processors_end_in_the_same_bits(registers, cores, monkeypatch):
    x, layers = draw(100, 300), weights(300, 50, 33, 5)
    loss = lambda x, layers: (dense.mlp("tanh", True, x, layers) ** 2).sum()
    run = lambda: jax.tree.leaves(jax.jit(jax.value_and_grad(loss, (0, 1)))(x, layers))
    here = run()
    for module in (llvm, product):
        monkeypatch.setattr(module, "registers", lambda: registers)
    monkeypatch.setattr(dense, "usable_cores", lambda: cores)  # by which rows are cut into groups
    monkeypatch.setattr(llvm, "name_of", lambda unit, shape: f"{registers}_{cores}_{unit.__name__}_{shape}")
    jax.clear_caches()
    for a, b in zip(here, run(), strict=True):
        np.testing.assert_array_equal(a, b)
    assert any(name.startswith(f"{registers}_{cores}") for name in llvm.KEPT)


def test_rows_have_the_bits_that_they_have_among_all():
    x, layers = draw(100, 30), weights(30, 40, 50)
    whole = dense.mlp("tanh", False, x, layers)
    for part in (slice(0, 1), slice(3, 10), slice(50, 100)):
        np.testing.assert_array_equal(dense.mlp("tanh", False, x[part], layers), whole[part])


def test_tanh_is_accurate():
    x = np.concatenate([np.linspace(-12, 12, 16_000), np.geomspace(1e-30, 9, 15_999), [1e30]]).astype(np.float32)
    layer = [(np.ones((1, 1), np.float32), np.zeros(1, np.float32))]
    y = np.asarray(dense.mlp("tanh", False, x[:, None], layer))[:, 0]
    exact = np.tanh(x.astype(np.float64))
    assert np.abs(y).max() == 1 and (y[np.abs(x) > 9.1] == np.sign(x[np.abs(x) > 9.1])).all()
    assert (np.abs(y - exact) <= 3 * 2.0**-23 * np.abs(exact)).all()


@pytest.mark.parametrize("activation", ["relu", "tanh"])
def test_nan_stays_nan(activation):
    x = draw(30, 20)
    x[3, 4] = np.nan
    there = np.isnan(dense.mlp(activation, False, x, weights(20, 8, 40)))
    assert there[3].all() and there.sum() == 40


def test_what_does_not_fit_is_refused():
    for x, widths in ((draw(2, 3).astype(jnp.bfloat16), (3, 4)), (draw(0, 3), (3, 4)), (draw(2, 3), (3, 0))):
        with pytest.raises(ValueError, match="must have the type float32 and matching shapes"):
            dense.mlp("relu", False, x, weights(*widths))
    with pytest.raises(ValueError, match="must have the type float32 and matching shapes"):
        dense.mlp("relu", False, draw(2, 3), weights(4, 5))
    with pytest.raises(ValueError, match="must have the type float32 and matching shapes"):
        dense.mlp("relu", False, draw(2, 3), [*weights(3, 5), *weights(6, 7)])
    with pytest.raises(ValueError, match="must have the type float32 and matching shapes"):
        dense.mlp("relu", False, draw(2, 3), [(draw(3, 16), draw(1))])


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_heads_see_what_the_layers_make(dtype):
    x, (one, two), heads = draw(40, 6), weights(6, 32, 20), (weights(20, 3)[0], weights(20, 1)[0])
    halved = [jax.tree.map(lambda p: jnp.asarray(p, dtype), layer) for layer in (one, two)]
    xla, ours = by_both(lambda x: kernels.mlp("tanh", x, halved, heads), jnp.asarray(x, dtype))
    assert [y.shape for y in ours] == [(40, 3), (40, 1)] and all(y.dtype == jnp.float32 for y in ours)
    for a, b in zip(ours, xla, strict=True):
        np.testing.assert_allclose(
            a, b, rtol=1e-5 if dtype == jnp.float32 else 0.02, atol=1e-6 if dtype == jnp.float32 else 0.02
        )
