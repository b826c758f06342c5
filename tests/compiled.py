"""How tests compile: with one cache for all test processes and their children, and half of them without optimising.

With `--dist loadfile`, every other process, and what it starts, compiles without optimising, in a quarter of the time.
The files in `OPTIMISED` run only in processes that optimise: they test what optimising may change (whether XLA's
programs for different devices, shards or processors give the same bits), or they train for long.  Most tests of our own
kernels, which XLA does not compile, are not among them.  With another `--dist`, any process may get any test, so all
optimise.

Imported before JAX, which reads these variables once.
"""

import atexit
import os
import shutil
import sys
import tempfile

FOLDER = "JAX_COMPILATION_CACHE_DIR"
if FOLDER not in os.environ:
    os.environ[FOLDER] = tempfile.mkdtemp(prefix="cleanba-tests-")
    atexit.register(shutil.rmtree, os.environ[FOLDER], ignore_errors=True)
ENVIRONMENT = {
    FOLDER: os.environ[FOLDER],
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.2",
    "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    # While another process is writing an entry, it is incomplete: JAX warns, and compiles the program itself.
    "PYTHONWARNINGS": "ignore:Error reading persistent compilation cache",
}
ABOUT = "backends batches bisect continuous convolution dqn impala learning moments off_policy placement ppo"
ABOUT += " pqn product r2d2 recurrent shards uneven verify"
OPTIMISED = {f"test_{name}.py" for name in ABOUT.split()}
UNOPTIMISED = {"xla_cpu_use_fusion_emitters": False, "xla_backend_optimization_level": 0}

EVERY = "CLEANBA_TESTS_EVERY_PROCESS_OPTIMISES"  # set by conftest.py, before it starts the others


def optimises(worker: str) -> bool:
    """Whether a process that shares the tests, "gw0", "gw1" …, compiles as users' processes do."""
    return EVERY in os.environ or not worker.startswith("gw") or int(worker[2:]) % 2 == 0


flags, unoptimised = os.environ.get("XLA_FLAGS", ""), " ".join(f"--{n}={v}".lower() for n, v in UNOPTIMISED.items())
if not optimises(os.environ.get("PYTEST_XDIST_WORKER", "")) and unoptimised not in flags:
    ENVIRONMENT["XLA_FLAGS"] = f"{flags} {unoptimised}".strip()
os.environ.update(ENVIRONMENT)
# Python keeps the modules that it has compiled, for the hundreds of processes that tests start.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
