"""How a process is set up for an experiment: determinism, precision, random numbers, scheduling, compiled programs."""

import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import gymnasium
import jax
from jax._src import xla_bridge

from cleanba import kernels
from cleanba.config import Experiment, require
from cleanba.errors import warn
from cleanba.runtime import lapack
from cleanba.runtime.compilation_cache import keep_compiled_programs

# The first flag excludes kernels that add in a varying order, and stops XLA from choosing kernels by timing them: it
# then takes the first kernel of each library's list, which the library expects to be fastest.  (An autotune level of 0
# would keep XLA from asking cuDNN at all.)  For matrix products XLA's own first choice is a tiny Triton tile, so the
# second flag sends them to cuBLAS.
DETERMINISTIC_XLA_FLAGS = "--xla_gpu_deterministic_ops=true --xla_gpu_enable_triton_gemm=false"
# On CPUs XLA cuts large sums into one part per thread, by default one per core or simulated device.  Our own matrix
# products do not depend on the number of threads.
DETERMINISTIC_CPU_THREADS = "8"

# The JAX settings that random numbers and types depend on, by their names in `jax.config`.  Users can set each of them
# in the environment too.
PINNED: dict[str, Any] = {
    "jax_default_prng_impl": "threefry2x32",
    "jax_threefry_partitionable": True,
    "jax_random_seed_offset": 0,
    "jax_numpy_rank_promotion": "allow",
    "jax_numpy_dtype_promotion": "standard",
}


# JAX's variables for the share of a GPU's memory that a process takes.  It refuses both together.
MEMORY_SHARES = ("XLA_PYTHON_CLIENT_MEM_FRACTION", "XLA_CLIENT_MEM_FRACTION")


def memory_share(processes: int, variables: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Environment variables with which so many processes fit on one GPU, of which XLA gives most to the first.

    None for a single process, or if `variables` already set the share.
    """
    if processes == 1 or not variables.keys().isdisjoint(MEMORY_SHARES):
        return {}
    return {MEMORY_SHARES[0]: f"{0.9 / processes:.2f}"}


class Forked:
    """Whether this process was forked from one in which JAX had started: its threads are missing here."""

    too_late = False

    @classmethod
    def look(cls) -> None:
        """In a process that was just forked, look at what it has taken over."""
        cls.too_late = cls.too_late or xla_bridge.backends_are_initialized()


os.register_at_fork(after_in_child=Forked.look)


def prepare_process(e: Experiment) -> None:
    """Set this process and XLA up for an experiment.  Call it before anything touches a device.

    Raises:
        UsageError: JAX_ENABLE_X64 is set, or the process cannot use JAX.
    """
    refuse_64_bits()
    refuse_forked()
    require(
        not jax.config.jax_disable_jit,  # type: ignore[attr-defined]
        "JAX_DISABLE_JIT is set, but training needs compiled programs; unset it",
    )
    use_batch_scheduling()
    kernels.choose(e.cpu_kernels)
    if e.deterministic:
        make_deterministic()
    keep_compiled_programs()
    set_precision(e.dtype)
    pin_settings()
    kernels.install_random_numbers()


@contextmanager
def prepared(e: Experiment) -> Iterator[None]:
    """Call `prepare_process`; on leaving, restore the settings that other code in this process would notice."""
    before = {name: jax.config.values[name] for name in ("jax_default_matmul_precision", *PINNED)}
    scheduled = scheduling()
    choice = kernels.chosen()
    prepare_process(e)
    try:
        with lapack.one_thread(), root_logger_left_alone(), warnings_of_gymnasium_kept():
            yield
    finally:
        kernels.choose(choice)
        for name, value in before.items():
            jax.config.update(name, value)
        if scheduled != scheduling():
            with suppress(OSError, AttributeError):
                os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))


@contextmanager
def root_logger_left_alone() -> Iterator[None]:
    """On leaving, remove the handler that absl, by which Orbax logs, gives to Python's root logger if it has none.

    With it, a later `logging.basicConfig` of the user's program would do nothing.
    """
    had = bool(logging.root.handlers)
    try:
        yield
    finally:
        for handler in [] if had else logging.root.handlers[:]:
            plain = handler.formatter is not None and handler.formatter._fmt == logging.BASIC_FORMAT
            if type(handler) is logging.StreamHandler and plain:
                logging.root.removeHandler(handler)


def make_deterministic() -> None:
    """Set the flags that make XLA compute the same bits every time.  Call it before anything touches a device.

    The user's own XLA_FLAGS are put last, so they take precedence, and PJRT_NPROC is kept if it is set.  It is set here
    only where XLA computes the networks on CPUs.  JAX reads these variables once, when it first uses a device: after
    that, a warning names those that are missing and matter for the device.
    """
    given = os.environ.get("XLA_FLAGS", "")
    by_xla = not kernels.expected()
    if xla_bridge.backends_are_initialized():
        missing = []
        if jax.default_backend() != "cpu" and DETERMINISTIC_XLA_FLAGS not in given:
            missing.append(f'XLA_FLAGS="{DETERMINISTIC_XLA_FLAGS}"')
        if jax.default_backend() == "cpu" and by_xla and "PJRT_NPROC" not in os.environ:
            missing.append(f"PJRT_NPROC={DETERMINISTIC_CPU_THREADS}")
        if missing:
            warn(
                "JAX used a device of this process before Cleanba could set its flags. "
                f"{' '.join(missing)} can no longer be set, so bits may differ from other runs; call Cleanba first, or "
                "set it in the environment"
            )
        return
    if DETERMINISTIC_XLA_FLAGS not in given:
        os.environ["XLA_FLAGS"] = f"{DETERMINISTIC_XLA_FLAGS} {given}".strip()
    if by_xla:
        os.environ.setdefault("PJRT_NPROC", DETERMINISTIC_CPU_THREADS)


def use_batch_scheduling() -> None:
    """Schedule this thread, and those it starts later, under Linux's SCHED_BATCH.

    XLA's threads spin for some microseconds before they sleep, and wake each other at every operation.  With more
    threads than cores, spinning threads would pre-empt working ones; under SCHED_BATCH a thread that wakes up does not
    pre-empt.  This changes no results.  Nothing happens where the system lacks or forbids the policy, or where the user
    has chosen another one.
    """
    with suppress(OSError, AttributeError):
        if scheduling() == os.SCHED_OTHER:
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def scheduling() -> int | None:
    """The policy that schedules this thread; None where the system has none."""
    try:
        return os.sched_getscheduler(0)
    except (OSError, AttributeError):
        return None


def set_precision(dtype: str) -> None:
    """Compute float32 products and convolutions in full precision, unless the experiment's `dtype` says otherwise.

    By default JAX rounds their inputs to 10 bits on GPUs with TensorFloat-32 units.  Call it before anything is
    compiled.
    """
    jax.config.update("jax_default_matmul_precision", precision(dtype))


def precision(dtype: str) -> str:
    """JAX's name for the precision of matrix products in an experiment with this `dtype`."""
    return "tensorfloat32" if dtype == "tensorfloat32" else "highest"


def pin_settings() -> None:
    """Use Threefry and JAX's defaults for random numbers and types, whatever JAX_DEFAULT_PRNG_IMPL and its like say.

    This holds for the code of environments too.  Call it before anything is compiled.
    """
    for name, value in PINNED.items():
        jax.config.update(name, value)


@contextmanager
def warnings_of_gymnasium_kept() -> Iterator[None]:
    """On leaving, Gymnasium warns again of what it warned of before: making environments makes it silent."""
    before = gymnasium.logger.min_level
    try:
        yield
    finally:
        gymnasium.logger.min_level = before


@contextmanager
def settings_of(dtype: str) -> Iterator[None]:
    """Within the context JAX multiplies with the precision of --dtype, and draws random numbers as in training.

    This holds in this thread alone, except for JAX_RANDOM_SEED_OFFSET, which JAX has once per process.

    Raises:
        UsageError: the process cannot use JAX.
    """
    refuse_forked()
    offset = jax.config.values["jax_random_seed_offset"]
    if offset:
        jax.config.update("jax_random_seed_offset", 0)
    try:
        with (
            jax.default_matmul_precision(precision(dtype)),
            jax.default_prng_impl(PINNED["jax_default_prng_impl"]),
            jax.threefry_partitionable(PINNED["jax_threefry_partitionable"]),
            jax.numpy_rank_promotion(PINNED["jax_numpy_rank_promotion"]),
            jax.numpy_dtype_promotion(PINNED["jax_numpy_dtype_promotion"]),
        ):
            yield
    finally:
        if offset:
            jax.config.update("jax_random_seed_offset", offset)


def refuse_forked() -> None:
    """Raise `UsageError` in a process that cannot use JAX."""
    require(
        not Forked.too_late,
        "this process was forked from one in which JAX was in use, and would hang; start processes afresh, for example "
        "with ProcessPoolExecutor(mp_context=multiprocessing.get_context('spawn'))",
    )


def refuse_64_bits() -> None:
    """Raise `UsageError` where JAX would use 64-bit numbers: dtypes here are 32 bits wide."""
    require(
        not jax.config.jax_enable_x64,  # type: ignore[attr-defined]
        "JAX_ENABLE_X64 is set, but networks, optimisers and replay here compute with 32-bit numbers; "
        "set JAX_ENABLE_X64=0, or in Python call jax.config.update('jax_enable_x64', False)",
    )
