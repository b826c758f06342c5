"""The programs that GPUs would compile, checked without one: no scatter, no needless sort, float32 throughout."""

import functools
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from cleanba import kernels
from cleanba.errors import UsageError
from cleanba.kernels import max_pool
from cleanba.recipes import RECIPES
from cleanba.runtime import process_setup
from cleanba.runtime.devices import MESH_AXIS, Devices
from cleanba.runtime.hardware import cpu_threads
from cleanba.runtime.process_setup import DETERMINISTIC_XLA_FLAGS, make_deterministic, set_precision

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))
import programs

SMALL = {"num_envs": 8, "num_steps": 8, "num_minibatches": 2}
# What an update may sort, and its length: PPO and PQN shuffle the transitions of a shard, or its environments.
SORTED = {(r, name): [8 if name == "lstm" else 64] for r in ("ppo", "pqn") for name in programs.VARIANTS}
# R2D2 sorts and scatters the new priorities of the sequences that a gradient step drew: no more than that.
SORTED |= {("r2d2", name): [32 if name == "mlp" else 64] for name in programs.VARIANTS}

REFUSED = [(name, "lstm") for name in ("dqn", "sac", "td3")]  # they replay single transitions, and have no core


def lowered(traced) -> str:
    """The program as a GPU's compiler is given it."""
    return traced.lower(lowering_platforms=("cuda",)).as_text()


def scatters(text: str) -> list[int]:
    """How many places each scatter writes, of both kinds; deterministic ones sort what they scatter first.

    One place is a slice that is put where an index says, without any sorting.
    """
    found = re.findall(r'"stablehlo\.(?:select_and_)?scatter"(?:.*\n)*? +}\) : \(tensor<\S+, tensor<(\d+)x', text)
    assert len(found) == len(re.findall(r'"stablehlo\.(?:select_and_)?scatter"', text))
    return [int(n) for n in found if n != "1"]


def sorts(text: str) -> list[int]:
    """How many elements each sort has."""
    return [int(n) for n in re.findall(r'"stablehlo\.sort"(?:.*\n)*? +}\) : \(tensor<(\d+)x', text)]


def products(text: str) -> list[str]:
    """The precision that each matrix product and convolution asks for."""
    lines = [line for line in text.splitlines() if re.search(r"stablehlo\.(dot_general|convolution)\b[^<]", line)]
    return ["/".join(sorted(set(re.findall(r"\b(DEFAULT|HIGHEST|HIGH)\b", line)))) or "DEFAULT" for line in lines]


@pytest.fixture(autouse=True)
def precision() -> Iterator[None]:
    """As the command sets it, for these tests only."""
    before = jax.config.jax_default_matmul_precision
    set_precision("float32")
    yield
    jax.config.update("jax_default_matmul_precision", before)


@pytest.fixture(scope="module")
def devices() -> Devices:
    one = tuple(jax.local_devices()[:1])
    return Devices(one, one, Mesh(np.array(one), (MESH_AXIS,)), 0, 1)


def small(recipe: str, variant: str, **fields) -> programs.Program:
    sizes = SMALL if hasattr(RECIPES[recipe].experiment, "num_minibatches") else {}  # the others are small enough
    return programs.make(RECIPES[recipe], programs.VARIANTS[variant] | sizes | fields, 1, "gpu")


@pytest.fixture(scope="module")
def update_for(devices):
    """(recipe, variant) -> the program of an update for a GPU, as text; traced once for all tests."""

    @functools.cache
    def text(recipe: str, variant: str) -> str:
        return lowered(programs.trace_update(small(recipe, variant), devices))

    return text


def test_what_does_not_fit_is_refused():
    for recipe, variant in REFUSED:
        with pytest.raises(UsageError, match="there is no 'core'"):
            small(recipe, variant)


@pytest.mark.parametrize(
    "recipe, variant", [(r, v) for r in RECIPES for v in programs.VARIANTS if (r, v) not in REFUSED]
)
def test_an_update_scatters_nothing_and_sorts_only_what_is_listed(recipe, variant, update_for):
    text = update_for(recipe, variant)
    sorted_here = SORTED.get((recipe, variant), [])
    assert max(scatters(text), default=0) == (sorted_here[0] if recipe == "r2d2" else 0)
    assert sorts(text) == sorted_here


@pytest.mark.parametrize(
    "recipe, variant", [("ppo", v) for v in programs.VARIANTS] + [(r, "nature") for r in RECIPES if r != "ppo"]
)
@pytest.mark.parametrize("trace", [programs.trace_act, programs.trace_scan], ids=["stepped", "scanned"])
def test_acting_neither_scatters_nor_sorts(trace, recipe, variant, devices):
    text = lowered(trace(small(recipe, variant), devices.actors[0]))
    assert (scatters(text), sorts(text)) == ([], [])
    assert set(products(text)) == {"HIGHEST"}


@pytest.mark.parametrize("recipe", RECIPES)
def test_float32_is_float32_in_every_product_unless_asked_otherwise(recipe, devices, update_for):
    variant = "resnet" if (recipe, "lstm") in REFUSED else "lstm"
    found = products(update_for(recipe, variant))
    assert len(found) > 30 and set(found) == {"HIGHEST"}
    set_precision("tensorfloat32")
    coarse = products(lowered(programs.trace_update(small(recipe, variant, dtype="tensorfloat32"), devices)))
    assert len(coarse) == len(found) and set(coarse) == {"HIGH"}


def test_the_gradient_of_max_pooling_scatters_nothing():
    def gradient(pool) -> str:
        x = jax.ShapeDtypeStruct((2, 84, 84, 3), jnp.float32)
        return lowered(jax.jit(jax.grad(lambda x: pool(x).sum())).trace(x))

    assert scatters(gradient(max_pool)) == []
    assert scatters(gradient(lambda x: nn.max_pool(x, (3, 3), (2, 2), "SAME")))  # so this test would see it


def test_a_sort_and_a_scatter_are_seen():
    text = lowered(jax.jit(lambda x, i: (jnp.sort(x), x.at[i].add(1.0))).trace(jnp.zeros(12), jnp.zeros(3, int)))
    assert (sorts(text), len(scatters(text))) == ([12], 1)


def test_flags_of_the_user_win_over_those_for_determinism(monkeypatch):
    monkeypatch.setattr(process_setup.xla_bridge, "backends_are_initialized", lambda: False)
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_enable_triton_gemm=true")
    monkeypatch.setenv("PJRT_NPROC", "3")
    make_deterministic()
    assert os.environ["XLA_FLAGS"] == f"{DETERMINISTIC_XLA_FLAGS} --xla_gpu_enable_triton_gemm=true"
    assert os.environ["PJRT_NPROC"] == "3"


@pytest.mark.parametrize("by_kernels, threads", [(False, "8"), (True, None)])
def test_the_number_of_threads_is_fixed_only_where_bits_depend_on_it(by_kernels, threads, monkeypatch):
    monkeypatch.setattr(kernels, "expected", lambda: by_kernels)
    monkeypatch.setenv("XLA_FLAGS", "")
    monkeypatch.setenv("PJRT_NPROC", "1")  # so that it is as it was afterwards
    monkeypatch.delenv("PJRT_NPROC")
    monkeypatch.setattr(process_setup.xla_bridge, "backends_are_initialized", lambda: False)
    make_deterministic()
    assert os.environ.get("PJRT_NPROC") == threads


@pytest.mark.parametrize(
    "platform, by_kernels, missing",
    [("cpu", True, ""), ("cpu", False, "PJRT_NPROC=8"), ("gpu", True, "--xla_gpu_deterministic_ops=true")],
)
def test_settings_too_late_for_jax_are_reported_where_they_matter(platform, by_kernels, missing, monkeypatch, capsys):
    monkeypatch.setattr(kernels, "expected", lambda: by_kernels)
    monkeypatch.setattr(process_setup.xla_bridge, "backends_are_initialized", lambda: True)
    monkeypatch.setattr(jax, "default_backend", lambda: platform)
    monkeypatch.setenv("XLA_FLAGS", "")
    monkeypatch.delenv("PJRT_NPROC", raising=False)
    make_deterministic()
    assert os.environ["XLA_FLAGS"] == "" and "PJRT_NPROC" not in os.environ
    said = capsys.readouterr().err
    assert (missing in said and "can no longer be set" in said) if missing else said == ""


@pytest.mark.parametrize("asked, devices, threads", [("8", 1, "8"), ("8", 16, "16"), ("2", 2, "2"), (None, 4, None)])
def test_xla_has_a_thread_for_each_device_at_least(asked, devices, threads):
    assert cpu_threads(asked, devices) == threads
