"""JAX's cache of compiled programs: one folder for each kind of machine, so that the next start compiles nothing."""

import errno
import os
import platform
import time
from contextlib import suppress
from hashlib import sha256
from pathlib import Path

import jax

from cleanba.errors import said, warn_once
from cleanba.limits import affine_cores
from cleanba.runtime.hardware import cpu_model

UNUSED_DAYS = 30  # after which a program is removed
OF_ONE_PROCESS = "scan_of_one_process"
"""the name of a compiled function that holds an address of its process's memory: the next start removes it"""


def keep_compiled_programs() -> None:
    """Have JAX keep compiled programs on disk and look for them there.

    The user's own choice of a folder (JAX_COMPILATION_CACHE_DIR) or of none (JAX_ENABLE_COMPILATION_CACHE=false)
    stands.  Where no folder can be written, nothing is cached, and a warning says so once.  Call it after
    `make_deterministic`, whose flags are part of the folder's name, and before anything is compiled.
    """
    chosen = jax.config.values
    if chosen["jax_compilation_cache_dir"] is not None or not chosen["jax_enable_compilation_cache"]:
        return
    try:
        folder = cache_folder()
        folder.mkdir(parents=True, exist_ok=True)
        clean(folder)
        if not os.access(folder, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(folder))
    except (OSError, RuntimeError) as error:  # no home at all, read-only, full
        warn_once(
            f"compiled programs cannot be kept for the next start ({said(error)}), so each start compiles them again; "
            "set XDG_CACHE_HOME or JAX_COMPILATION_CACHE_DIR to another folder"
        )
        return
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)  # a start compiles dozens of small programs
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def cache_folder() -> Path:
    """This user's folder for programs compiled on such a machine.

    JAX's keys distinguish programs, versions, flags and GPU models.  They ignore the processor's instructions, without
    which a program crashes, and the number of threads, which changes bits.  Different machines may share a home
    directory, so each gets a folder of its own.
    """
    root = os.environ.get("XDG_CACHE_HOME", "")
    what = [platform.machine(), cpu_model(), instructions(), str(affine_cores())]
    what += [os.environ.get(name, "") for name in ("PJRT_NPROC", "JAX_NUM_CPU_DEVICES", "XLA_FLAGS")]
    machine = sha256("\n".join(what).encode()).hexdigest()[:16]
    return (Path(root) if os.path.isabs(root) else Path.home() / ".cache") / "cleanba" / "xla" / machine


def instructions() -> str:
    """The processor's instruction sets, as Linux lists them."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.lower().startswith(("flags", "features")):
                return line
    return ""


def clean(folder: Path) -> None:
    """Remove programs that have not been used for `UNUSED_DAYS`, and those that cannot be used again."""
    for path in folder.iterdir():
        with suppress(OSError):  # another process may be removing it, too
            useless = path.name.startswith(f"jit_{OF_ONE_PROCESS}-")
            if useless or time.time() - path.stat().st_atime > UNUSED_DAYS * 86400:
                path.unlink()
