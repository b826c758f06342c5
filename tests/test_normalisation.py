"""Our layer normalisation for CPUs against JAX's, with the same bits for any vectors and divisions of rows."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("llvmlite")

from test_product import draw

from cleanba import kernels
from cleanba.kernels import compiling_for, llvm, normalisation, plain, product
from cleanba.kernels.normalisation import layer_norm

# Rows, features: one piece and many, whole vectors and not, and loops that are written out and that are not.
SHAPES = [(1, 1), (3, 5), (7, 16), (100, 33), (1025, 32), (70, 64), (40, 84), (300, 512), (5, 1000)]


def given(rows, features):
    return 3 * draw(rows, features) + 2, draw(features, seed=1), draw(features, seed=2)


def with_gradients(function):
    """x, g, b, dy -> y, dx, dg, db."""

    def run(x, g, b, dy):
        y, back = jax.vjp(function, x, g, b)
        return [y, *back(dy)]

    return jax.jit(run)


@pytest.mark.parametrize("rows, features", SHAPES, ids=str)
def test_values_and_gradients_are_those_of_plain_jax(rows, features):
    arguments = *given(rows, features), draw(rows, features, seed=3)
    ours, theirs = (with_gradients(f)(*arguments) for f in (layer_norm, plain.layer_norm))
    for a, b in zip(ours, theirs, strict=True):  # of one feature dx is rounding alone
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-5 * max(1.0, np.abs(b).max()))


@pytest.mark.parametrize("scale, offset", [(3, 2), (1e-3, 0), (1, 1000), (0, 5)])
def test_values_and_gradients_are_numpys(scale, offset):
    """Also for rows with a variance as small as the number that is added to it, and tiny compared with their mean."""
    _, g, b = given(50, 70)
    x, dy = np.float32(scale) * draw(50, 70) + np.float32(offset), draw(50, 70, seed=3)
    exact = x.astype(np.float64)
    mean = lambda x: x.mean(-1, keepdims=True)
    r = 1 / np.sqrt(exact.var(-1, keepdims=True) + 1e-6)
    z, h = (exact - mean(exact)) * r, np.float64(g) * dy
    expected = [g * z + b, r * (h - mean(h) - z * mean(h * z)), (dy * z).sum(0), dy.sum(0)]
    for ours, theirs in zip(with_gradients(layer_norm)(x, g, b, dy), expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-4 * np.abs(theirs).max())


@pytest.mark.parametrize("registers", [(16, 32), (8, 16), (4, 32)], ids=["avx512", "avx", "neon"])
@pytest.mark.parametrize("rows, features", [(1025, 32), (40, 84), (300, 513)], ids=str)
def test_other_processors_end_in_the_same_bits(rows, features, registers, monkeypatch):
    arguments = *given(rows, features), draw(rows, features, seed=3)
    here = with_gradients(layer_norm)(*arguments)
    for module in (llvm, product):
        monkeypatch.setattr(module, "registers", lambda: registers)
    monkeypatch.setattr(llvm, "name_of", lambda unit, shape: f"{registers}_{unit.__name__}_{shape}")
    jax.clear_caches()
    for a, b in zip(here, with_gradients(layer_norm)(*arguments), strict=True):
        np.testing.assert_array_equal(a, b)
    assert f"{registers}__backwards_{rows}x{features}" in llvm.KEPT


@pytest.mark.parametrize("rows, features", [(1025, 32), (20, 40)])  # of few rows there are fewer pieces than units
def test_the_number_of_units_changes_no_bit(rows, features, monkeypatch):
    arguments = *given(rows, features), draw(rows, features, seed=3)
    here = with_gradients(layer_norm)(*arguments)
    monkeypatch.setattr(normalisation, "WORTH", 100)  # numbers that are worth a thread's waking
    monkeypatch.setattr(llvm, "name_of", lambda unit, shape: f"more_{unit.__name__}_{shape}")
    jax.clear_caches()
    for a, b in zip(here, with_gradients(layer_norm)(*arguments), strict=True):
        np.testing.assert_array_equal(a, b)
    assert f"more__backwards_{rows}x{features}" in llvm.KEPT


def test_rows_have_the_bits_that_they_have_among_all():
    (x, g, b), dy = given(100, 30), draw(100, 30, seed=3)
    whole = with_gradients(layer_norm)(x, g, b, dy)
    for part in (slice(0, 1), slice(3, 10), slice(50, 100)):
        for among_all, alone in zip(whole[:2], with_gradients(layer_norm)(x[part], g, b, dy[part])[:2], strict=True):
            np.testing.assert_array_equal(alone, among_all[part])


def test_several_at_once_are_those_one_by_one():
    (x, g, b), dy = given(120, 20), draw(120, 20, seed=3)
    x, dy = x.reshape(3, 40, 20), dy.reshape(3, 40, 20)
    together = jax.vmap(with_gradients(layer_norm), (0, None, None, 0))(x, g, b, dy)
    for i in range(3):
        for all_of_them, one in zip(together, with_gradients(layer_norm)(x[i], g, b, dy[i]), strict=True):
            np.testing.assert_array_equal(all_of_them[i], one)


def test_images_and_other_number_formats_keep_shape_and_dtype():
    x, g, b = (jnp.asarray(part) for part in given(2 * 3 * 3, 8))
    images = x.reshape(2, 3, 3, 8).astype(jnp.bfloat16)
    with compiling_for("cpu", "on"):
        ours = kernels.layer_norm(images, g.astype(jnp.bfloat16), b)
    theirs = plain.layer_norm(images, g.astype(jnp.bfloat16), b)
    assert ours.shape == theirs.shape == (2, 3, 3, 8) and ours.dtype == theirs.dtype == jnp.bfloat16
    np.testing.assert_allclose(ours.astype(jnp.float32), theirs.astype(jnp.float32), rtol=1e-2, atol=1e-2)


def test_nan_stays_nan():
    (x, g, b), dy = given(30, 20), draw(30, 20, seed=3)
    with_nan = lambda x: np.where(np.arange(600).reshape(30, 20) == 3 * 20 + 4, np.float32(np.nan), x)
    y, dx, dg, db = map(np.isnan, with_gradients(layer_norm)(with_nan(x), g, b, dy))
    assert y[3].all() and dx[3].all() and y.sum() == dx.sum() == 20 and dg.all() and not db.any()
    y, dx, dg, db = map(np.isnan, with_gradients(layer_norm)(x, g, b, with_nan(dy)))
    assert not y.any() and dx[3].all() and dx.sum() == 20 and dg[4] and db[4] and dg.sum() == db.sum() == 1


def test_what_does_not_fit_is_refused():
    x, g, b = given(4, 20)
    for wrong in (
        (x, g[1:], b),
        (x, g, b[1:]),
        (x[:0], g, b),
        (x[:, :0], g[:0], b[:0]),
        (x.astype(jnp.bfloat16), g, b),
    ):
        with pytest.raises(ValueError, match="must have the type float32 and matching shapes"):
            layer_norm(*wrong)
