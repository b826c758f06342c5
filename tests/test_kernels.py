"""Which programs get kernels for CPUs, and that a run goes on without them, whatever is missing."""

import inspect
import json
import shutil
import sys
import threading
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from launch import TINY, command, read_result

pytest.importorskip("llvmlite")

from cleanba import errors, kernels, launch
from cleanba.config import Experiment, Placement
from cleanba.errors import CannotCompile, UsageError
from cleanba.kernels import (
    choice,
    compiled_for,
    compiling_for,
    convolution,
    dense,
    descent,
    llvm,
    machine,
    normalisation,
    plain,
    product,
    selftest,
    threefry,
)
from cleanba.recipes import RECIPES
from cleanba.resolution import read_recipe
from cleanba.runtime.devices import find_devices
from cleanba.runtime.process_setup import prepared

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))
import programs

OURS = "cleanba_"  # how the names of kernels begin, in the text of a program
WEIGHTS = np.linspace(-1, 1, 15, dtype=np.float32).reshape(3, 5), np.ones(5, np.float32)


def dense_layer(x):
    """A function in two forms."""
    return kernels.affine(x, *WEIGHTS)


def calls_kernels(function, *args) -> bool:
    """Whether a program of the function, as it is traced now, calls kernels."""
    return OURS in jax.jit(function).lower(*args).as_text()


@pytest.fixture
def fresh(monkeypatch, tmp_path):
    """As in a process that has used no kernel yet, with an empty folder for kept kernels."""
    monkeypatch.setattr(choice.Trouble, "_why", None)
    monkeypatch.setattr(errors, "SAID", set())
    before = jax.config.values["jax_compilation_cache_dir"]
    jax.config.update("jax_compilation_cache_dir", str(tmp_path))
    yield tmp_path
    jax.config.update("jax_compilation_cache_dir", before)


# ------------------------------------------------------------------------------------------------- where they are used


@pytest.mark.parametrize(
    "platform, asked, used",
    [("cpu", "auto", True), ("cpu", "off", False), ("gpu", "auto", False), ("gpu", "off", False)],
)
def test_programs_for_cpus_call_them_unless_they_are_off(platform, asked, used):
    x = np.ones((2, 3), np.float32)
    traced = jax.jit(lambda x: dense_layer(x).sum())
    with compiling_for(platform, asked):
        assert (OURS in traced.trace(x).lower(lowering_platforms=("cpu" if used else "cuda",)).as_text()) == used
    assert OURS in traced.lower(x).as_text(), "what was traced for others must not be taken here"
    assert calls_kernels(compiled_for(platform, asked, dense_layer), x) == used


def test_threads_do_not_see_each_others_choice():
    met, found = threading.Barrier(2), {}

    def trace(asked):
        def layer(x):
            met.wait(60)  # both are in the midst of it
            y = dense_layer(x)
            met.wait(60)
            return y

        found[asked] = calls_kernels(compiled_for("cpu", asked, layer), np.ones((2, 3), np.float32))

    threads = [threading.Thread(target=trace, args=(asked,)) for asked in ("auto", "off")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {"auto": True, "off": False}


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("asked", ["auto", "off"])
def test_updates_and_acting_of_every_algorithm_have_them_or_not_as_the_experiment_says(name, asked):
    sizes = {"num_envs": 8, "num_actors": 1, "hiddens": (8,), "total_timesteps": 100_000, "cpu_kernels": asked}
    program = programs.make(RECIPES[name], programs.VARIANTS["mlp"] | sizes, 1, "cpu")
    devices = find_devices(Placement())
    with prepared(program.experiment):
        for traced in (programs.trace_update(program, devices), programs.trace_act(program, devices.actors[0])):
            assert (OURS in traced.lower().as_text()) == (asked == "auto")


def test_random_numbers_are_the_same_with_and_without_kernels():
    kernels.install_random_numbers()
    draw = jax.jit(lambda key: jax.random.bits(key, (67,)))
    with prepared(Experiment(cpu_kernels="off")):
        assert OURS not in draw.lower(jax.random.key(3)).as_text()
        plainly = draw(jax.random.key(3))
    assert OURS in draw.lower(jax.random.key(3)).as_text()
    np.testing.assert_array_equal(draw(jax.random.key(3)), plainly)


# -------------------------------------------------------------------------------------------------- what may be missing


def said_once(capsys, *words: str) -> None:
    """One sentence on the console says that kernels are off, with these words, however often they are asked for."""
    for _ in range(3):
        assert not calls_kernels(compiled_for("cpu", "auto", dense_layer), np.ones((2, 3), np.float32))
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and said.startswith("cleanba: warning: the CPU kernels are off because "), said
    assert "; plain JAX is used instead" in said and all(word in said for word in words), said
    assert ("--cpu-kernels off" in said) == (not choice.obstacle())


@pytest.mark.parametrize("system, processor", [("Darwin", "arm64"), ("Linux", "aarch64"), ("Windows", "AMD64")])
def test_other_systems_and_processors_compute_in_plain_jax(fresh, monkeypatch, capsys, system, processor):
    monkeypatch.setattr(machine.platform, "system", lambda: system)
    monkeypatch.setattr(machine.platform, "machine", lambda: processor)
    monkeypatch.setattr(choice, "obstacle", machine.obstacle.__wrapped__)
    assert not kernels.expected()
    said_once(capsys, f"this is {system} on {processor}")


def test_a_processor_without_the_instructions_computes_in_plain_jax(fresh, monkeypatch, capsys):
    monkeypatch.setattr(machine, "host_features", lambda: {"avx2": True, "fma": False})
    monkeypatch.setattr(choice, "obstacle", machine.obstacle.__wrapped__)
    said_once(capsys, "this processor has no FMA")


@pytest.mark.parametrize(
    "content, words",
    [
        (None, "the package llvmlite does not load"),
        ("raise OSError('libstdc++.so.6: version not found')", "llvmlite is broken (OSError: libstdc++.so.6"),
        ("", "the package llvmlite does not load (No module named 'llvmlite.binding')"),
    ],
    ids=["missing", "damaged", "empty"],
)
def test_without_llvmlite_or_with_a_broken_one_plain_jax_computes(fresh, monkeypatch, capsys, tmp_path, content, words):
    for name in [name for name in sys.modules if name.partition(".")[0] == "llvmlite"]:
        monkeypatch.delitem(sys.modules, name)
    if content is None:
        monkeypatch.setitem(sys.modules, "llvmlite", None)
    else:
        (tmp_path / "llvmlite").mkdir()
        (tmp_path / "llvmlite/__init__.py").write_text(content)
        monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(choice, "obstacle", machine.obstacle.__wrapped__)
    said_once(capsys, words)


HEADER = Path(jax.ffi.include_dir(), "xla/ffi/api/c_api.h").read_text()
MINOR = "#define XLA_FFI_API_MINOR "
HEADERS_MINOR = int(HEADER.split(MINOR)[1].split()[0])


@pytest.mark.parametrize(
    "old, new",
    [
        (
            "  XLA_FFI_ExecutionStage stage;\n  XLA_FFI_Args args;",
            "  XLA_FFI_Args args;\n  XLA_FFI_ExecutionStage stage;",
        ),
        ("  XLA_FFI_Attrs attrs;\n", "  XLA_FFI_Attrs attrs;\n  int64_t number;\n"),
        ("  int64_t size;\n  XLA_FFI_RetType* types;", "  XLA_FFI_RetType* types;"),
        ("  XLA_FFI_DataType dtype;\n  void* data;", "  void* data;\n  XLA_FFI_DataType dtype;"),
        ("  _XLA_FFI_API_STRUCT_FIELD(XLA_FFI_Stream_Get);\n", ""),
        ("#define XLA_FFI_API_MAJOR 0", "#define XLA_FFI_API_MAJOR 1"),
        (f"{MINOR}{HEADERS_MINOR}", f"{MINOR}{machine.VERSION[1] - 1}"),
        ("  XLA_FFI_Task* task;\n  void* data;", "  void* data;\n  XLA_FFI_Task* task;"),
        ("XLA_FFI_Future* future;  // out\n};", "XLA_FFI_Promise promise;\n  XLA_FFI_Future* future;\n};"),
        (HEADER, "// moved elsewhere"),
    ],
    ids=["order", "a field more", "a field less", "buffer", "function", "major", "minor", "task", "unknown", "empty"],
)
def test_a_jax_whose_call_frame_is_another_has_no_kernels(fresh, monkeypatch, capsys, tmp_path, old, new):
    assert machine.declares(HEADER) and old in HEADER
    assert machine.declares(HEADER.replace(f"{MINOR}{HEADERS_MINOR}", f"{MINOR}{HEADERS_MINOR + 1}"))
    (tmp_path / "xla/ffi/api").mkdir(parents=True)
    (tmp_path / "xla/ffi/api/c_api.h").write_text(HEADER.replace(old, new))
    monkeypatch.setattr(jax.ffi, "include_dir", lambda: str(tmp_path))
    monkeypatch.setattr(choice, "obstacle", machine.obstacle.__wrapped__)
    said_once(capsys, "calls foreign functions in a way that they do not support yet")
    shutil.rmtree(tmp_path / "xla")
    assert "does not say how it calls foreign functions" in machine.interface_obstacle()


# ------------------------------------------------------------------------------------------------------- the self-test


def wrong(function):
    """The same function, whose real numbers are off by a thousandth, or whose words by a bit."""

    def run(*args):
        result = function(*args)
        real = any(x.dtype == jnp.float32 for x in jax.tree.leaves(result))
        return jax.tree.map(lambda x: x * 1.001 if x.dtype == jnp.float32 else x if real else x ^ 1, result)

    return run


def test_kernels_pass_the_self_test_once_for_each_machine_and_version(fresh, monkeypatch):
    assert choice.Trouble.found() == ""
    (kept,) = fresh.glob("*.selftest")
    monkeypatch.setattr(selftest, "run", lambda: pytest.fail("it was run again"))
    assert selftest.verdict() == ""
    kept.write_bytes(b"damaged")
    monkeypatch.setattr(selftest, "run", lambda: "")
    assert selftest.verdict() == "" and kept.read_bytes() != b"damaged"
    for name in ("SOURCES", "PACKAGES"):
        before = len(list(fresh.glob("*.selftest")))
        monkeypatch.setattr(selftest, name, "others" if name == "SOURCES" else ("others",))
        assert selftest.verdict() == "" and len(list(fresh.glob("*.selftest"))) == before + 1


@pytest.mark.parametrize(
    "broken",
    [
        {
            "convolutions and strided convolutions and convolutions of pixels": (convolution, "convolve"),
            "dense layers": (dense, "mlp"),
            "steps of Adam": (descent, "step"),
            "random numbers": (threefry, "threefry"),
        },
        {
            "matrix products": (product, "affine"),
            "layer normalisation": (normalisation, "layer_norm"),
            "target networks": (descent, "polyak_update"),
        },
    ],
    ids=["one half", "the other"],
)
def test_kernels_that_differ_from_plain_jax_switch_all_off_and_are_remembered(fresh, monkeypatch, capsys, broken):
    for module, name in broken.values():
        monkeypatch.setattr(module, name, wrong(getattr(module, name)))
    said_once(capsys, f"because {' and '.join(broken)} differed from plain JAX in a self-test")
    monkeypatch.setattr(selftest, "run", lambda: pytest.fail("it was run again"))
    assert selftest.verdict().startswith(f"{' and '.join(broken)} differed")


def test_the_cases_of_the_self_test_cover_the_variants_of_kernels(monkeypatch):
    some = {
        "convolutions of pixels": (convolution, "convolve", lambda how, x, *_: x.dtype == jnp.uint8 and not how.planes),
        "matrix products": (product, "affine", lambda x, *_: x.shape[1] > 256),  # sums of several parts
        "dense layers": (dense, "mlp", lambda activation, *_: activation == "relu"),
        "layer normalisation": (normalisation, "layer_norm", lambda x, *_: x.shape[1] > 80),
    }
    for module, name, breaks in some.values():
        right = getattr(module, name)
        either = lambda *args, right=right, breaks=breaks: (wrong(right) if breaks(*args) else right)(*args)
        monkeypatch.setattr(module, name, either)
    assert selftest.run().startswith(f"{' and '.join(some)} differed")


def test_random_numbers_can_be_exported_for_other_machines():
    kernels.install_random_numbers()
    draw = jax.jit(lambda key, x: x + jax.random.normal(key, x.shape))
    key = jax.random.key(0)
    for size in (1000, *jax.export.symbolic_shape("n")):
        given = jax.ShapeDtypeStruct((size,), jnp.float32)
        played = jax.export.deserialize(jax.export.export(draw)(key, given).serialize()).call(key, jnp.zeros(1000))
        assert np.array_equal(played, draw(key, jnp.zeros(1000)))


def test_where_no_kernel_compiles_plain_jax_computes_and_the_next_start_tries_again(fresh, monkeypatch, capsys):
    def refuse(*_):
        raise MemoryError("no memory that may be executed")

    monkeypatch.setattr(llvm, "name_of", lambda unit, shape: f"{OURS}{fresh.name}_{unit.__name__}_{shape}")
    monkeypatch.setattr(llvm, "_compile", refuse)
    said_once(capsys, "cannot be compiled (MemoryError: no memory that may be executed)")
    assert not list(fresh.glob("*.selftest"))


def test_a_program_is_traced_again_if_a_kernel_fails_while_it_is_traced(fresh, monkeypatch, capsys):
    def loss(x):  # its gradient's kernel fails, when the one forwards is in the program already
        return jnp.sin(dense_layer(x)).sum()

    x, compile_ = np.ones((41, 3), np.float32), llvm._compile
    expected = jax.grad(loss)(x)

    def refuse(unit, shape, *rest):
        if getattr(shape, "transposed", False):
            raise OSError("full")
        return compile_(unit, shape, *rest)

    assert choice.Trouble.found() == ""
    monkeypatch.setattr(llvm, "name_of", lambda unit, shape: f"{OURS}{fresh.name}_{unit.__name__}_{shape}")
    monkeypatch.setattr(llvm, "_compile", refuse)
    jax.clear_caches()
    gradient = jax.jit(compiled_for("cpu", "auto", jax.grad(loss)))
    np.testing.assert_allclose(gradient(x), expected, rtol=1e-6)
    assert OURS not in gradient.lower(x).as_text()
    said_once(capsys, "cannot be compiled (OSError: full)")
    with pytest.raises(CannotCompile), compiling_for("cpu", "auto"):
        product.multiply_transposed(x, x)


def test_kernels_that_cannot_be_kept_work_and_are_reported_once(fresh, monkeypatch, capsys):
    (fresh / "nowhere").write_text("a file, where no folder can be made")
    jax.config.update("jax_compilation_cache_dir", str(fresh / "nowhere" / "cache"))
    monkeypatch.setattr(llvm, "name_of", lambda unit, shape: f"{OURS}{fresh.name}_{unit.__name__}_{shape}")
    assert calls_kernels(compiled_for("cpu", "auto", dense_layer), np.ones((2, 3), np.float32))
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "compiled kernels cannot be kept in" in said and "nowhere" in said


def test_the_folder_for_what_is_compiled_is_made(fresh):
    path = fresh / "not" / "there" / "yet"
    llvm.keep(path, b"code")
    assert llvm.read_kept(path) == b"code"


# --------------------------------------------------------------------------------------------------------- experiments


def test_all_processes_of_a_run_have_them_or_none(monkeypatch):
    for able in ([True, True, True], [False, False, False]):
        monkeypatch.setattr(launch, "gather_over_processes", lambda here, able=able: np.array(able)[:, None])
        launch.require_same_kernels(Experiment(), "cpu")
    monkeypatch.setattr(launch, "gather_over_processes", lambda here: np.array([[True], [False], [True]]))
    with pytest.raises(UsageError, match="process 1 cannot use the CPU kernels.*add --cpu-kernels off"):
        launch.require_same_kernels(Experiment(), "cpu")


OFF_POLICY = (
    *("--num-envs", "4", "--num-actors", "1", "--num-shards", "1", "--num-steps", "4", "--hiddens", "8"),
    *("--buffer-size", "64", "--learning-starts", "16", "--batch-size", "4", "--total-timesteps", "48"),
    *("--collector", "stepped"),
)
RUNS = {  # PPO's is in the test after these
    "impala": TINY,
    "dqn": ("--env-id", "Catch-v0", *OFF_POLICY, "--train-frequency", "4"),
    "pqn": TINY,
    "r2d2": (
        *("--env-id", "Catch-v0", *OFF_POLICY, "--buffer-size", "128", "--train-frequency", "4"),
        *("--burn-in", "2", "--sequence-length", "6", "--lstm-size", "8", "--total-timesteps", "80"),
        *("--learning-starts", "32"),
    ),
    "sac": ("--env-id", "Pendulum-v1", *OFF_POLICY),
    "td3": ("--env-id", "Pendulum-v1", *OFF_POLICY),
}


def train_plainly(name, words, run_dir):
    ended = command(name, *words, "--cpu-kernels", "off", "--run-dir", run_dir)
    assert ended.code == 0, ended.err
    assert read_result(run_dir)["status"] == "finished"
    config = json.loads((run_dir / "config.json").read_text())
    assert config["experiment"]["cpu_kernels"] == "off" and config["origin"]["cpu_kernels"] == "typed"
    assert config["cpu_products"] == "xla"


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_every_algorithm_trains_without_them(name, tmp_path):
    train_plainly(name, RUNS[name], tmp_path)


@pytest.mark.slow
def test_the_choice_is_part_of_an_experiment_and_runs_from_before_had_the_default(tmp_path):
    ours, old, plainly = tmp_path / "ours", tmp_path / "old", tmp_path / "plain"
    assert command("ppo", *TINY, "--run-dir", ours).code == 0
    train_plainly("ppo", TINY, plainly)
    found = command("diff", ours, plainly)
    assert found.code == 1 and "different experiments: cpu_kernels: on and off" in found.out
    refused = command("ppo", *TINY, "--run-dir", plainly)
    assert refused.code == 2 and "cpu_kernels: off, now on" in refused.err

    shutil.copytree(ours, old)
    config = json.loads((old / "config.json").read_text())
    for part in ("experiment", "origin"):
        del config[part]["cpu_kernels"]
    (old / "config.json").write_text(json.dumps(config))
    assert command("diff", old, ours).code == 0
    assert read_recipe(old)[1].cpu_kernels == "on"
    assert "return: mean" in command("eval", old, "--episodes", "1").out
    assert command("eval", plainly, "--episodes", "1").code == 0
    result = read_result(old)
    (old / "result.json").unlink()  # as if it had been interrupted when only this was missing
    assert command("resume", old).code == 0 and read_result(old)["params_digest"] == result["params_digest"]
    assert plain.ROTATIONS  # the module that stays when all others are removed


@pytest.mark.parametrize("name", ["convolve", "affine", "multiply", "mlp", "layer_norm", "adam", "polyak_update"])
def test_plain_jax_can_stand_in_for_the_whole_folder(name):
    ours, plainly = (inspect.signature(getattr(module, name)).parameters for module in (kernels, plain))
    assert [*ours.values()] == [*plainly.values()][: len(ours)]
    assert all(more.default is not more.empty for more in [*plainly.values()][len(ours) :])
    assert {"Activation", "Adam", "Convolution", "Layers", "max_pool"} <= set(vars(plain))
