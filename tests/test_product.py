"""Our matrix products for CPUs against NumPy's, with the same bits on any number of threads and with any vectors."""

import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from launch import finish, python

pytest.importorskip("llvmlite")

from cleanba.kernels import llvm, product
from cleanba.kernels.product import affine, multiply, multiply_transposed


def draw(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def near(ours, expected):
    for x, y in zip(ours, expected, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=3e-6 * np.abs(y).max())


# Rows, sums' length, columns: of one block and of many, with and without a rest, of a near cache and beyond.
SHAPES = [
    (1, 1, 1), (1, 17, 256), (2, 3, 16), (5, 40, 2), (7, 64, 64), (28, 256, 16), (29, 257, 17), (33, 50, 48),
    (64, 700, 80), (100, 23, 64), (3, 513, 112), (600, 31, 1), (257, 300, 128),
]  # fmt: skip


@pytest.mark.parametrize("rows, inner, columns", SHAPES, ids=str)
def test_products_and_sums_of_columns_are_numpys(rows, inner, columns):
    a, b, bias = draw(rows, inner), draw(inner, columns, seed=1), draw(columns, seed=2)
    exact = a.astype(np.float64) @ b
    near([multiply(a, b), multiply(a, b, bias)], [exact, exact + bias])
    near(multiply_transposed(np.ascontiguousarray(a.T), b), [exact, b.sum(0, dtype=np.float64)])


@pytest.mark.parametrize("rows, inner, columns", [(2, 40, 3), (60, 40, 3), (5, 2, 3), (300, 20, 70), (9, 300, 257)])
def test_the_gradients_are_those_of_a_product_and_a_sum(rows, inner, columns):  # each matrix is the one to turn in some
    arguments = draw(rows, inner), draw(inner, columns, seed=1), draw(columns, seed=2)
    weight = draw(rows, columns, seed=3)
    gradients = lambda f: jax.jit(jax.grad(lambda x, w, b: (weight * f(x, w, b) ** 2).sum(), (0, 1, 2)))(*arguments)
    near(gradients(affine), gradients(lambda x, w, b: x @ w + b))


@pytest.mark.parametrize("registers", [(16, 32), (8, 16), (4, 32)], ids=["avx512", "avx", "neon"])
@pytest.mark.parametrize("shape", [(29, 257, 17), (33, 50, 48), (600, 31, 1)], ids=str)
def test_a_processor_with_other_vectors_ends_in_the_same_bits(shape, registers, monkeypatch):
    rows, inner, columns = shape
    a, b = draw(rows, inner), draw(inner, columns, seed=1)
    both = lambda: [multiply(a, b, b[0]), *multiply_transposed(a, draw(rows, columns, seed=2))]
    here = both()
    for module in (llvm, product):
        monkeypatch.setattr(module, "registers", lambda: registers)
    monkeypatch.setattr(llvm, "name_of", lambda unit, shape: f"{registers}_{unit.__name__}_{shape}")
    jax.clear_caches()
    before = set(llvm.KEPT)
    for x, y in zip(here, both(), strict=True):
        np.testing.assert_array_equal(x, y)
    assert any(name.startswith(str(registers)) for name in set(llvm.KEPT) - before)


THREADS = """
import hashlib, os, sys
os.sched_setaffinity(0, map(int, sys.argv[1:]))
import jax, numpy as np
from cleanba.kernels.normalisation import layer_norm
from test_product import affine, draw
for rows, inner, columns in ((64, 3136, 512), (1024, 64, 64), (300, 257, 17)):
    f = jax.jit(lambda x, w, b: jax.value_and_grad(lambda *a: (affine(*a) ** 2).sum(), (0, 1, 2))(x, w, b))
    for x in jax.tree.leaves(f(draw(rows, inner), draw(inner, columns, seed=1), draw(columns, seed=2))):
        print(hashlib.sha256(np.asarray(x).tobytes()).hexdigest())
for rows, features in ((1025, 32), (300, 513)):
    f = jax.jit(lambda x, g, b: jax.value_and_grad(lambda *a: (layer_norm(*a) ** 3).sum(), (0, 1, 2))(x, g, b))
    for x in jax.tree.leaves(f(draw(rows, features), draw(features, seed=1), draw(features, seed=2))):
        print(hashlib.sha256(np.asarray(x).tobytes()).hexdigest())
"""


def test_the_number_of_threads_changes_no_bit():
    cores = sorted(os.sched_getaffinity(0))
    outputs = []
    for allowed, threads in ((cores[:1], 1), (cores[:2], 2), (cores, 8)):
        ended = subprocess.run(
            [sys.executable, "-c", THREADS, *map(str, allowed)], env=os.environ | {"PJRT_NPROC": str(threads)},
            cwd=Path(__file__).parent, capture_output=True, text=True, timeout=300,
        )  # fmt: skip
        assert ended.returncode == 0, ended.stderr
        outputs.append(ended.stdout)
    assert outputs[0].count("\n") == 12 + 8 and len(set(outputs)) == 1


def test_a_part_of_the_rows_gives_the_bits_that_it_gives_among_all():
    a, b, bias = draw(100, 300), draw(300, 65, seed=1), draw(65, seed=2)
    whole = multiply(a, b, bias)
    for part in (slice(0, 1), slice(3, 10), slice(50, 100)):
        np.testing.assert_array_equal(multiply(a[part], b, bias), whole[part])


def test_many_products_at_once_do_not_disturb_one_another():
    xs, w = np.stack([draw(300, 70, seed=i) for i in range(6)]), draw(70, 90)
    separate = [np.asarray(multiply(x, w)) for x in xs]
    together = jax.jit(lambda xs: [multiply(x, w) for x in xs])
    for _ in range(100):
        np.testing.assert_array_equal(together(xs), separate)
    np.testing.assert_array_equal(jax.vmap(lambda x: multiply(x, w))(xs), separate)


def test_nan_stays_nan():
    a, b = draw(30, 20), draw(20, 40)
    a[3, 4] = np.nan
    there = np.isnan(multiply(a, b))
    assert there[3].all() and there.sum() == 40


@pytest.mark.parametrize(
    "a, b",
    [
        (draw(2, 3), draw(4, 5)), (draw(2, 3).astype(jnp.bfloat16), draw(3, 5)),
        (draw(2, 0), draw(0, 5)), (draw(0, 3), draw(3, 5)), (draw(2, 3), draw(3, 0)),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused(a, b):
    for form in (multiply, lambda a, b: multiply_transposed(a.T, b)):
        with pytest.raises(ValueError, match="must be float32 matrices with matching shapes"):
            form(a, b)


@pytest.mark.parametrize("length", [1, 64, 79, 96])
def test_a_bias_of_another_length_is_refused(length):
    with pytest.raises(ValueError, match=rf"float32\[{length}\] must be float32 matrices with matching shapes"):
        multiply(draw(2, 3), draw(3, 80), draw(length))


WHOLE = """
import os, sys
os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:int(sys.argv.pop(1))])
from cleanba.cli import main
from cleanba.kernels import selftest
selftest.verdict = lambda: ""  # compiling the self-test on one core takes longer than the run; test_kernels.py has it
sys.exit(main(sys.argv[1:]))
"""
TWO_ACTORS = "--num-envs 8 --num-actors 2 --num-steps 8 --network mlp --hiddens 256 256 --collector scanned"
TWO_ACTORS += " --total-timesteps 512"


@pytest.mark.slow
def test_a_whole_run_ends_in_the_same_bits_on_one_core_and_on_many_threads(tmp_path):
    """On one core XLA has one thread, which two actors' scans and the learner share in turns.

    The layers are so large that LAPACK would divide their initial weights among threads, if it had several.
    """
    found = set()
    for cores, devices in (("1", "1"), ("99", "8")):
        folder = tmp_path / cores
        run = ["ppo", "--env-id", "CartPole-v1", *TWO_ACTORS.split(), "--run-dir", folder]
        ended = finish(python("-c", WHOLE, cores, *run, PJRT_NPROC="", JAX_NUM_CPU_DEVICES=devices))
        assert ended.code == 0, ended.err
        found.add(json.loads((folder / "result.json").read_text())["params_digest"])
    assert len(found) == 1


AFTER_SCIPY = """
import os, sys
for name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "GOTO_NUM_THREADS"):
    os.environ.pop(name, None)
import numpy as np, scipy.linalg
if len(os.sched_getaffinity(0)) == 1:
    sys.exit("one core")
from cleanba.runtime import lapack
libraries = lapack.loaded()
assert len(libraries) == 2, "NumPy's and SciPy's"
threads = lambda: {library.get() for library in libraries}
before = threads()
import jax
from flax import linen as nn
weights = lambda: jax.device_get(jax.jit(lambda key: nn.initializers.orthogonal()(key, (256, 256)))(jax.random.key(1)))
of_numpy = lambda: np.linalg.qr(np.random.default_rng(1).normal(size=(300, 300)))[0]  # as an environment may compute
with lapack.one_thread():
    assert threads() == {1} and os.environ["OPENBLAS_NUM_THREADS"] == "1"
    alone = weights()
    np.savez(sys.argv[1], alone, of_numpy())
assert threads() == before and min(before) > 1 and "OPENBLAS_NUM_THREADS" not in os.environ
if (alone == weights()).all():
    sys.exit("one result with any number of threads")  # of OpenBLAS on some processors
"""


@pytest.mark.slow
def test_initial_weights_and_environments_have_one_thread_also_where_scipy_was_loaded_before(tmp_path):
    ended = finish(python("-c", AFTER_SCIPY, tmp_path / "after.npz"))
    if "one core" in ended.err or "one result" in ended.err:
        pytest.skip(f"needs two cores that change LAPACK's bits, not {ended.err.strip()}")
    assert ended.code == 0, ended.err
    code = AFTER_SCIPY.replace("os.sched_getaffinity(0)) == 1", "[]) == 1").replace("import os, sys", ONE_CORE)
    code = code.partition("assert threads() == before")[0].replace("threads() == {1} and", "")
    ended = finish(python("-c", code, tmp_path / "one.npz"))
    assert ended.code == 0, ended.err
    assert (tmp_path / "after.npz").read_bytes() == (tmp_path / "one.npz").read_bytes()


ONE_CORE = "import os, sys; os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:1])"
