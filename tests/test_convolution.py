"""Our convolutions for CPUs against the definition as loops and XLA's gradients; the same bits however computed."""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

pytest.importorskip("llvmlite")

from cleanba.kernels import convolution, llvm
from cleanba.kernels.convolution import Convolution, convolve

SAME, VALID = ((1, 1), (1, 1)), ((0, 0), (0, 0))


def draw(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def by_definition(how, x, kernel, bias, skip=None):
    """One number after the other, in float64."""
    x = x.transpose(0, 2, 3, 1) if how.planes else x
    x = np.pad(np.maximum(x, 0) if how.rectify else x, ((0, 0), *how.pads, (0, 0))).astype(np.float64)
    n, (size, _, _, features) = x.shape[0], kernel.shape
    rows, columns = ((d - size) // how.stride + 1 for d in x.shape[1:3])
    y = np.zeros((n, rows, columns, features))
    for i in range(n):
        for h in range(rows):
            for p in range(columns):
                seen = x[i, h * how.stride : h * how.stride + size, p * how.stride : p * how.stride + size]
                for f in range(features):
                    y[i, h, p, f] = bias[f] + (seen * kernel[..., f]).sum()
    y = maxima(y) if how.pool else y
    return y if skip is None else y + skip


def maxima(x):
    """Of 3 x 3 pixels in steps of 2, where as many are beyond the image before it as after it, or one fewer."""
    before = [(2 * -(-d // 2) + 1 - d) // 2 for d in x.shape[1:3]]
    rows, columns = (-(-d // 2) for d in x.shape[1:3])
    y = np.zeros((x.shape[0], rows, columns, x.shape[3]))
    for h in range(rows):
        for p in range(columns):
            top, left = 2 * h - before[0], 2 * p - before[1]
            y[:, h, p] = x[:, max(top, 0) : top + 3, max(left, 0) : left + 3].max((1, 2))
    return y


def as_xla_has_it(how, x, kernel, bias, skip):
    x = (x.transpose(0, 2, 3, 1) if how.planes else x).astype(jnp.float32)
    x = nn.relu(x) if how.rectify else x
    numbers = ("NHWC", "HWIO", "NHWC")
    strides = (how.stride, how.stride)
    y = lax.conv_general_dilated(x, kernel, strides, how.pads, dimension_numbers=numbers, precision="highest") + bias
    y = nn.max_pool(y, (3, 3), strides=(2, 2), padding="SAME") if how.pool else y
    return y if skip is None else y + skip


CASES = {  # how, shape of x, size and features, whether something is added
    "the ResNet's first": (Convolution(SAME, planes=True), (3, 4, 21, 37), 3, 16, False),
    "its blocks' first": (Convolution(SAME, rectify=True), (5, 11, 12, 16), 3, 16, False),
    "its blocks' second": (Convolution(SAME, rectify=True), (17, 5, 6, 32), 3, 32, True),
    "the Nature CNN's first": (Convolution(VALID, 4, planes=True), (2, 4, 36, 40), 8, 32, False),
    "its second": (Convolution(VALID, 2, rectify=True), (2, 8, 10, 32), 4, 64, False),
    "its third": (Convolution(VALID, 1, rectify=True), (9, 7, 6, 64), 3, 64, False),
    "a stage's first": (Convolution(SAME, pool=True), (5, 7, 10, 16), 3, 32, False),
    "a stage's first of bytes": (Convolution(SAME, planes=True, pool=True), (3, 4, 12, 21), 3, 16, False),
    "a stage's first, rectified": (Convolution(SAME, rectify=True, pool=True), (3, 1, 2, 3), 3, 16, False),
    "MinAtar's": (Convolution(VALID), (40, 10, 10, 7), 3, 16, False),
    "more columns than registers": (Convolution(SAME), (1, 3, 61, 2), 3, 16, False),
    "steps that leave a rest": (Convolution(((1, 0), (0, 1)), 2), (2, 8, 7, 5), 3, 4, False),
    "steps longer than the kernel": (Convolution(VALID, 3), (2, 8, 7, 5), 2, 16, False),
    "few features": (Convolution(SAME, rectify=True), (2, 4, 5, 3), 3, 5, True),
    "three vectors of features": (Convolution(SAME), (2, 4, 5, 3), 3, 48, False),
    "many features": (Convolution(SAME), (2, 4, 5, 3), 3, 80, False),
    "three planes": (Convolution(VALID, 2, planes=True), (2, 3, 9, 11), 3, 16, False),
    "six planes": (Convolution(VALID, planes=True), (2, 6, 9, 21), 3, 16, False),
    "bytes, channels last": (Convolution(SAME), (2, 9, 11, 3), 3, 16, False),
    "one pixel": (Convolution(VALID), (1, 1, 1, 1), 1, 1, False),
    "more padding than image": (Convolution(((2, 2), (2, 2))), (2, 1, 1, 16), 3, 16, False),
}


def given(case):
    how, shape, size, features, skips = CASES[case]
    bytes_ = how.planes or "bytes" in case
    x = np.random.default_rng(1).integers(256, size=shape).astype(np.uint8) if bytes_ else draw(*shape)
    channels = shape[1] if how.planes else shape[3]
    kernel, bias = draw(size, size, channels, features, seed=2), draw(features, seed=3)
    y = jax.eval_shape(partial(as_xla_has_it, how), x, kernel, bias, None).shape
    return how, (x, kernel, bias, draw(*y, seed=4) if skips else None), draw(*y, seed=5)


def gradients(convolution, how, arguments, weight):
    """The result and all gradients there are."""
    of = tuple(i for i, x in enumerate(arguments) if x is not None and x.dtype == np.float32)
    loss = lambda *arguments: (convolution(how, *arguments) * weight).sum()
    return [jax.jit(partial(convolution, how))(*arguments), *jax.jit(jax.grad(loss, of))(*arguments)]


def near(ours, expected):
    assert len(ours) == len(expected)
    for x, y in zip(ours, expected, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=2e-6 * np.abs(y).max())


@pytest.mark.parametrize("case", CASES)
def test_results_are_the_definitions_and_gradients_xlas(case):
    how, arguments, weight = given(case)
    ours = gradients(convolve, how, arguments, weight)
    near(ours[:1], [by_definition(how, *arguments)])
    near(ours, gradients(as_xla_has_it, how, arguments, weight))


@pytest.mark.parametrize("registers", [(16, 32), (8, 16), (4, 32)], ids=["avx512", "avx", "neon"])
@pytest.mark.parametrize(
    "case", ["its blocks' second", "its second", "three planes", "few features", "a stage's first"]
)
def test_a_processor_with_other_vectors_ends_in_the_same_bits(case, registers, monkeypatch):
    how, arguments, weight = given(case)
    here = gradients(convolve, how, arguments, weight)
    monkeypatch.setattr(llvm, "registers", lambda: registers)
    monkeypatch.setattr(llvm, "name_of", lambda unit, shape: f"{registers}_{unit.__name__}_{shape}")
    jax.clear_caches()
    before = set(llvm.KEPT)
    there = gradients(convolve, how, arguments, weight)
    assert any(name.startswith(str(registers)) for name in set(llvm.KEPT) - before)
    for x, y in zip(here, there, strict=True):
        np.testing.assert_array_equal(x, y)


THREADS = """
import hashlib, os, sys
os.sched_setaffinity(0, map(int, sys.argv[1:]))
import numpy as np
from test_convolution import CASES, given, gradients
from cleanba.kernels.convolution import convolve
for case in ("its blocks' second", "MinAtar's"):
    for x in gradients(convolve, *given(case)):
        print(case, hashlib.sha256(np.asarray(x).tobytes()).hexdigest())
"""


def test_the_number_of_threads_changes_no_bit():
    """One thread on one core and on all cores, two threads on two cores, eight on all cores."""
    cores = sorted(os.sched_getaffinity(0))
    outputs = []
    for allowed, threads in ((cores[:1], 1), (cores, 1), (cores[:2], 2), (cores, 8)):
        out = subprocess.run(
            [sys.executable, "-c", THREADS, *map(str, allowed)], env=os.environ | {"PJRT_NPROC": str(threads)},
            cwd=os.path.dirname(__file__), capture_output=True, text=True, timeout=300,
        )  # fmt: skip
        assert out.returncode == 0, out.stderr
        outputs.append(out.stdout)
    assert outputs[0].count("\n") == 9 and len(set(outputs)) == 1


def test_a_part_of_a_batch_gives_the_bits_that_it_gives_within_the_batch():
    how, (x, kernel, bias, skip), _ = given("its blocks' second")
    whole = convolve(how, x, kernel, bias, skip)
    for part in (slice(0, 1), slice(3, 10), slice(16, 17)):
        np.testing.assert_array_equal(convolve(how, x[part], kernel, bias, skip[part]), whole[part])


def test_many_calls_at_once_do_not_disturb_one_another():
    """Independent convolutions, whose units lie in one pool of threads, a hundred times."""
    how, (x, kernel, bias, _), _ = given("MinAtar's")
    xs = np.stack([np.roll(x, i, 0) for i in range(6)])
    separate = [np.asarray(convolve(how, x, kernel, bias, None)) for x in xs]
    together = jax.jit(lambda xs: [convolve(how, x, kernel, bias, None) for x in xs])
    mapped = jax.jit(jax.vmap(lambda x: convolve(how, x, kernel, bias, None)))
    for _ in range(100):
        np.testing.assert_array_equal(together(xs), separate)
    np.testing.assert_array_equal(mapped(xs), separate)


@pytest.mark.parametrize("pool", [False, True])
def test_nan_stays_nan(pool):
    x, kernel, bias = draw(1, 9, 9, 16), draw(3, 3, 16, 16, seed=1), np.zeros(16, np.float32)
    x[0, 4, 5, 0] = np.nan
    how = Convolution(SAME, pool=pool)
    ours, xlas = (np.isnan(f(how, x, kernel, bias, None)) for f in (convolve, as_xla_has_it))
    np.testing.assert_array_equal(ours, xlas)
    assert np.isnan(convolve(Convolution(SAME, rectify=True), x[:, 3:6, 4:7], kernel, bias, None)).all()


def test_threads_may_ask_for_the_same_function_at_once():
    x, bias = draw(2, 5, 6, 16), np.zeros(16, np.float32)
    run = lambda k: jax.jit(partial(convolve, Convolution(SAME)))(x[:, :, : 3 + k % 2], draw(3, 3, 16, 16), bias, None)
    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(run, range(8)))
    for k, y in enumerate(results):
        np.testing.assert_array_equal(y, results[k % 2])


@pytest.mark.parametrize("hw", [(84, 20), (21, 11), (4, 5), (1, 2), (1, 1)], ids=str)
def test_the_first_of_equal_maxima_has_the_gradient_as_xlas(hw):
    """The convolution passes whole numbers on unchanged; all are below zero, as padding must not be the maximum."""
    x = np.round(draw(2, *hw, 16)) - 5
    kernel = np.zeros((3, 3, 16, 16), np.float32)
    kernel[1, 1] = np.eye(16)
    arguments = x, kernel, np.zeros(16, np.float32), None
    how = Convolution(SAME, pool=True)
    weight = draw(*jax.eval_shape(partial(as_xla_has_it, how), *arguments).shape, seed=1)
    ours, xlas = (gradients(f, how, arguments, weight) for f in (convolve, as_xla_has_it))
    np.testing.assert_array_equal(ours[0], xlas[0])
    near(ours, xlas)


F32, BF16 = np.float32, jnp.bfloat16


@pytest.mark.parametrize(
    "how, size, features, skips, kind, why",
    [
        (Convolution(VALID, pool=True), 3, 16, False, F32, "pooled"),
        (Convolution(SAME, pool=True), 3, 8, False, F32, "pooled"),
        (Convolution(SAME, pool=True), 3, 16, True, F32, "pooled"),
        (Convolution(((3, 3), (1, 1))), 3, 16, False, F32, "padding"),
        (Convolution(VALID), 6, 16, False, F32, "no larger than a padded image"),
        (Convolution(SAME), 3, 16, False, BF16, "must be float32 or uint8"),
    ],
)
def test_unsupported_convolutions_are_refused(how, size, features, skips, kind, why):
    skip = draw(1, 5, 5, features) if skips else None
    with pytest.raises(ValueError, match=why):
        convolve(how, draw(1, 5, 5, 16).astype(kind), draw(size, size, 16, features), draw(features), skip)


@pytest.fixture
def cache(tmp_path):
    before = jax.config.values["jax_compilation_cache_dir"]
    jax.config.update("jax_compilation_cache_dir", str(tmp_path))
    yield tmp_path
    jax.config.update("jax_compilation_cache_dir", before)


@pytest.mark.parametrize("damage", [lambda code: b"", lambda code: code[:100], lambda code: code[:-1] + b"x"])
def test_compiled_kernels_are_kept_on_disk_and_loaded_if_they_are_whole(cache, damage, monkeypatch):
    shape = convolution.Window(6, 6, 16, 16, 3, 1, SAME)
    compile_ = partial(llvm._compile, convolution.forward, shape, [llvm.FLOAT] * 4, 1, 4)
    compile_()
    (kept,) = cache.iterdir()
    whole = kept.read_bytes()
    monkeypatch.setattr(llvm, "keep", lambda *_: pytest.fail("it was compiled again"))
    assert compile_().get_function_address("handler")
    monkeypatch.undo()
    kept.write_bytes(damage(whole))
    assert compile_().get_function_address("handler")
    assert kept.read_bytes() == whole


def test_kept_kernels_are_only_used_by_the_modules_that_wrote_them(cache, monkeypatch):
    shape = convolution.Window(6, 6, 16, 16, 3, 1, SAME)
    compile_ = partial(llvm._compile, convolution.forward, shape, [llvm.FLOAT] * 4, 1, 4)
    compile_()
    for name in ("product.py", "dense.py", "llvm.py"):  # units are written with the help of others' functions
        text = (Path(llvm.__file__).parent / name).read_text()
        assert text in llvm.SOURCES
        monkeypatch.setattr(llvm, "SOURCES", llvm.SOURCES.replace(text, text + "#"))
        before = set(cache.iterdir())
        compile_()
        assert len(set(cache.iterdir()) - before) == 1
