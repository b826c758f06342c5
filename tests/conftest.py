"""What the tests share: no account, eight CPU devices, a mesh of some of them; and how processes share the tests."""

import atexit
import os
import shutil
import tempfile
from collections import Counter
from datetime import date
from pathlib import Path

# No test uses the Hub or W&B account of the person who runs it, or mistakes the cluster job it runs in for its own.
# This comes before any import, as huggingface_hub reads its variables once.  xdist's workers inherit the environment.
if "PYTEST_XDIST_WORKER" not in os.environ:
    for name in [name for name in os.environ if name.startswith(("HF_", "HUGGING_FACE", "SLURM_", "OMPI_", "WANDB_"))]:
        del os.environ[name]
    for name in ("KUBERNETES_SERVICE_HOST", "FORCE_COLOR"):  # JAX warns in a pod, and Rich would write escape codes
        os.environ.pop(name, None)
    os.environ["HF_HOME"] = tempfile.mkdtemp(prefix="cleanba-tests-hub-")
    atexit.register(shutil.rmtree, os.environ["HF_HOME"], ignore_errors=True)
    os.environ["CLEANBA_TESTS_DAY"] = str(date.today().toordinal())  # the same for all processes, also at midnight

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_NUM_CPU_DEVICES", "8")  # both are read when JAX is first imported

import compiled  # here, so that all processes share what this one sets
import grids
import pytest


@pytest.hookimpl(optionalhook=True)  # without pytest-xdist, `pytest` works, too
def pytest_xdist_auto_num_workers(config):
    """One process per core, up to four: each takes gigabytes.  No file is divided, so one file needs one process."""
    if len(config.args) == 1 and not Path(config.args[0].partition("::")[0]).is_dir():
        return 0
    cores = min(4, len(os.sched_getaffinity(0)))
    return cores if cores > 1 else 0


def pytest_configure(config):
    if not hasattr(config, "workerinput") and config.getoption("dist", "no") != "loadfile":
        os.environ[compiled.EVERY] = "1"


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Gives each process whole files; those in `compiled.OPTIMISED` go only to a process that optimises, and first."""
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _assign_work_unit(self, node):
            able = compiled.optimises(node.gateway.id)
            needs = lambda file: Path(file).name in compiled.OPTIMISED
            files = [file for file in self.workqueue if able or not needs(file)]
            if not files:
                node.shutdown()
                return
            self.workqueue.move_to_end(max(files, key=needs), last=False)
            super()._assign_work_unit(node)

    return Scheduling(config, log) if config.getoption("dist") == "loadfile" else None


def pytest_addoption(parser):
    parser.addoption("--exhaustive", action="store_true", help="every point of every grid (tests/grids.py)")


def pytest_collection_modifyitems(config, items):
    """Some points of a grid are left out (grids.py).

    If several processes share the files, those with most slow tests come first, so that short ones fill the end.
    """
    if not any("::" in arg for arg in config.args):
        if wrong := grids.unknown(items):
            raise pytest.UsageError(f"tests/grids.py names what is not there: {', '.join(wrong)}")
        if not config.getoption("--exhaustive"):
            kept = {item for item in items if grids.is_kept(item)}
            config.hook.pytest_deselected(items=[item for item in items if item not in kept])
            items[:] = [item for item in items if item in kept]
    if hasattr(config, "workerinput"):
        slow = Counter(item.path for item in items if item.get_closest_marker("slow"))
        items.sort(key=lambda item: -slow[item.path])


@pytest.fixture(scope="session")
def on_devices():
    """on_devices(fn, num_shards, num_devices) -> jitted (replicated, *sharded) -> fn(shards, replicated, *sharded).

    With `optimise=False` it is compiled sooner, for tests that compare numbers with NumPy's and not bits.

    Leaves of `sharded` are [num_shards, ...]; `fn` sees those of its device, and returns what is equal everywhere.
    Where the devices do not divide the shards, empty places hold NaN or the greatest number, which no result may show.
    Its `trace` and `lower` are `jax.jit`'s.
    """
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import Mesh, PartitionSpec

    from cleanba.config import Partition
    from cleanba.shards import ShardAxis, compiler_options

    def spread(fn, num_shards, num_devices, optimise=True):
        partition = Partition(num_shards, 1, num_shards, 1, num_devices)
        everywhere, cut = PartitionSpec(), PartitionSpec("learner")

        def body(number, replicated, sharded):
            shards = ShardAxis.over(partition.shards_of_learners, number > 0, "learner")
            return fn(shards, replicated, *sharded)

        def place(x):
            """[K, ...] -> [D K', ...]."""
            places = num_devices * partition.places_per_learner
            if places == num_shards or isinstance(x, jax.ShapeDtypeStruct):
                return x
            whole = jnp.issubdtype(x.dtype, jnp.integer)
            poison = jnp.iinfo(x.dtype).max if whole else True if x.dtype == bool else np.nan
            laid = np.full((places, *x.shape[1:]), poison, x.dtype)
            laid[[partition.place(shard) for shard in range(num_shards)]] = x
            return laid

        mesh = Mesh(np.array(jax.devices()[:num_devices]), ("learner",))
        mapped = jax.jit(
            jax.shard_map(
                body, mesh=mesh, in_specs=(everywhere, everywhere, cut), out_specs=everywhere, check_vma=False
            ),
            compiler_options=compiler_options("cpu") | ({} if optimise else compiled.UNOPTIMISED),
        )

        def call(replicated, *sharded):
            return mapped(jnp.int32(1), replicated, jax.tree.map(place, sharded))

        call.trace = lambda replicated, *sharded: mapped.trace(jnp.int32(1), replicated, sharded)
        call.lower = lambda replicated, *sharded: mapped.lower(jnp.int32(1), replicated, sharded)
        return call

    return spread


from hypothesis import HealthCheck, settings  # noqa: E402

# The same examples every time: a test that fails does so for everybody.
settings.register_profile(
    "cleanba",
    derandomize=True,
    deadline=None,
    suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow],
)
settings.load_profile("cleanba")
