"""How XLA compiles for an experiment, and what it compiled, kept on disk for the next start in JAX's cache."""

import os
import platform
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from hashlib import sha256
from pathlib import Path

import jax

from cleanba.config import Experiment
from cleanba.runtime.placement import (
    RANDOM_NUMBERS,
    cpu_model,
    let_threads_finish,
    make_deterministic,
    pin_random_numbers,
    refuse_64_bits,
    set_precision,
)
from cleanba.shards import usable_cores

UNUSED_DAYS = 30  # after which a program is removed


def prepare_process(e: Experiment) -> None:
    """All that an experiment asks of this process and of XLA.  Comes before anything that touches a device.

    Raises:
        UsageError: JAX was told to compute with 64-bit numbers.
    """
    refuse_64_bits()
    let_threads_finish()
    if e.deterministic:
        make_deterministic()
    keep_compiled()
    set_precision(e.dtype)
    pin_random_numbers()
    with suppress(ImportError):  # of llvmlite, without which JAX draws by itself, the same numbers
        from cleanba.ops import threefry

        threefry.install()


@contextmanager
def prepared(e: Experiment) -> Iterator[None]:
    """`prepare_process`, for as long as this lasts as far as it would change what else the process computes."""
    before = {name: jax.config.values[name] for name in ("jax_default_matmul_precision", *RANDOM_NUMBERS)}
    prepare_process(e)
    try:
        yield
    finally:
        for name, value in before.items():
            jax.config.update(name, value)


def keep_compiled() -> None:
    """Have JAX look for compiled programs on disk, and keep there what it compiles.

    Where the user chose a folder (JAX_COMPILATION_CACHE_DIR) or none (JAX_ENABLE_COMPILATION_CACHE=false), that stands.
    Without a folder that can be written all goes on as without a cache.  Comes after `make_deterministic`, which sets
    what programs are compiled for, and before anything is compiled.
    """
    chosen = jax.config.values
    if chosen["jax_compilation_cache_dir"] is not None or not chosen["jax_enable_compilation_cache"]:
        return
    try:
        folder = cache_folder()
        folder.mkdir(parents=True, exist_ok=True)
        clean(folder)
    except (OSError, RuntimeError):  # no home at all, read-only, full
        return
    if not os.access(folder, os.W_OK):
        return
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)  # a start compiles dozens of small programs
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def cache_folder() -> Path:
    """The folder of this user, for programs that fit this machine.

    JAX's keys tell programs, versions, flags and kinds of GPU apart, but neither processors, whose instructions differ,
    nor numbers of threads, by which XLA cuts its work: wrong ones would crash, or change bits.  A home may be shared by
    machines of many kinds, so there is a folder for each.
    """
    root = os.environ.get("XDG_CACHE_HOME", "")
    what = [platform.machine(), cpu_model(), instructions(), str(usable_cores())]
    what += [os.environ.get(name, "") for name in ("PJRT_NPROC", "JAX_NUM_CPU_DEVICES", "XLA_FLAGS")]
    machine = sha256("\n".join(what).encode()).hexdigest()[:16]
    return (Path(root) if os.path.isabs(root) else Path.home() / ".cache") / "cleanba" / "xla" / machine


def instructions() -> str:
    """The instruction sets that Linux says this processor has."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.lower().startswith(("flags", "features")):
                return line
    return ""


def clean(folder: Path) -> None:
    """Remove programs that no start has used for long, and those that none can use again."""
    for path in folder.iterdir():
        with suppress(OSError):  # another process may be removing it, too
            of_one_pool = path.name.startswith("jit_scan_pool-")  # compiled for one place in the memory of one process
            if of_one_pool or time.time() - path.stat().st_atime > UNUSED_DAYS * 86400:
                path.unlink()
