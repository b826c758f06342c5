"""Our layer normalisation for CPUs: JAX's, and the same bits with any vectors and however rows are cut."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_product import draw, near

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


def test_values_are_numpys():
    x, g, b = given(50, 70)
    exact = x.astype(np.float64)
    z = (exact - exact.mean(-1, keepdims=True)) / np.sqrt(exact.var(-1, keepdims=True) + 1e-6)
    near([layer_norm(x, g, b)], [g * z + b])


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
    assert any(name.startswith(f"{registers}__backwards") for name in llvm.KEPT)


def test_the_number_of_units_changes_no_bit(monkeypatch):
    arguments = *given(1025, 32), draw(1025, 32, seed=3)
    here = with_gradients(layer_norm)(*arguments)
    monkeypatch.setattr(normalisation, "WORTH", 100)  # numbers that are worth a thread's waking
    monkeypatch.setattr(llvm, "name_of", lambda unit, shape: f"more_{unit.__name__}_{shape}")
    jax.clear_caches()
    for a, b in zip(here, with_gradients(layer_norm)(*arguments), strict=True):
        np.testing.assert_array_equal(a, b)


def test_rows_have_the_bits_that_they_have_among_all():
    x, g, b = given(100, 30)
    whole = layer_norm(x, g, b)
    for part in (slice(0, 1), slice(3, 10), slice(50, 100)):
        np.testing.assert_array_equal(layer_norm(x[part], g, b), whole[part])


def test_images_and_other_number_formats_keep_shape_and_dtype():
    x, g, b = (jnp.asarray(part) for part in given(2 * 3 * 3, 8))
    images = x.reshape(2, 3, 3, 8).astype(jnp.bfloat16)
    with compiling_for("cpu", "on"):
        ours = kernels.layer_norm(images, g, b)
    theirs = plain.layer_norm(images, g, b)
    assert ours.shape == theirs.shape == (2, 3, 3, 8) and ours.dtype == theirs.dtype == jnp.bfloat16
    np.testing.assert_allclose(ours.astype(jnp.float32), theirs.astype(jnp.float32), rtol=1e-2, atol=1e-2)


def test_what_is_not_a_number_stays_so():
    x, g, b = given(30, 20)
    x[3, 4] = np.nan
    there = np.isnan(layer_norm(x, g, b))
    assert there[3].all() and there.sum() == 20


def test_what_does_not_fit_is_refused():
    x, g, b = given(4, 20)
    for wrong in (
        (x, g[1:], b),
        (x, g, b[1:]),
        (x[:0], g, b),
        (x[:, :0], g[:0], b[:0]),
        (x.astype(jnp.bfloat16), g, b),
    ):
        with pytest.raises(ValueError, match="must be of float32, and fit, and not be empty"):
            layer_norm(*wrong)
