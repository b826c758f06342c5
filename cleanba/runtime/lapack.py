"""One thread for OpenBLAS, so that initial weights and environments do not depend on the number of cores.

Orthogonal initial weights come from a QR factorisation.  On CPUs JAX calls LAPACK's, from the OpenBLAS that SciPy
brings.  For 200 rows and columns or more, its rounding differs between one thread and several.  The same holds for
NumPy's OpenBLAS, which environments in Python may use; their worker processes have one thread, too.
"""

import ctypes
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from cleanba.limits import usable_cores

THREADS = "OPENBLAS_NUM_THREADS"  # OpenBLAS reads it once, when it is loaded
NAMES = ("scipy_openblas_{}_num_threads", "scipy_openblas_{}_num_threads64_", "openblas_{}_num_threads")


class Library(NamedTuple):
    """An OpenBLAS that this process has loaded."""

    get: Callable[[], int]
    set: Callable[[int], None]


def loaded(maps: Path = Path("/proc/self/maps")) -> list[Library]:
    """Every OpenBLAS of this process: NumPy's and SciPy's."""
    found = []
    with suppress(OSError):
        lines = [line.split(maxsplit=5)[-1].strip() for line in maps.read_text().splitlines() if "openblas" in line]
        for path in sorted(set(lines)):
            with suppress(OSError):
                library = ctypes.CDLL(path)
                for name in NAMES:
                    if hasattr(library, name.format("set")):
                        found.append(Library(library[name.format("get")], library[name.format("set")]))
                        break
    return found


@contextmanager
def one_thread() -> Iterator[None]:
    """Within the context OpenBLAS has one thread, whether SciPy's is loaded before or in it."""
    given, libraries = os.environ.get(THREADS), loaded()
    before = [library.get() for library in libraries]
    os.environ[THREADS] = "1"
    for library in libraries:
        library.set(1)
    try:
        yield
    finally:
        if given is None:
            del os.environ[THREADS]
        else:
            os.environ[THREADS] = given
        for library in loaded():  # one that was loaded meanwhile began with one thread
            library.set(max(before, default=int(given) if given and given.isdigit() else usable_cores()))
        for library, number in zip(libraries, before, strict=True):
            library.set(number)
