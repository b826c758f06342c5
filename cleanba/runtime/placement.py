"""Devices by role.  Nothing else in the project asks JAX for devices."""

import os
import platform
import signal
import socket
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from hashlib import sha256
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
from jax._src import xla_bridge
from jax.sharding import Mesh

from cleanba.config import Placement, require
from cleanba.errors import UsageError, said

MESH_AXIS = "learner"


class Devices(NamedTuple):
    """This process's devices, and the mesh of everybody's learner devices."""

    actors: tuple[jax.Device, ...]
    learners: tuple[jax.Device, ...]
    mesh: Mesh
    process: int
    num_processes: int

    @property
    def platform(self) -> str:
        """What kind of device learns: "cpu", "gpu" …"""
        return self.learners[0].platform

    @property
    def kind(self) -> str:
        """The name of the hardware."""
        return self.learners[0].device_kind

    @property
    def is_main(self) -> bool:
        """Whether this is the process that writes logs and results."""
        return self.process == 0


# No kernels that add in an order of their own, and none chosen by a race at compile time: with the first flag XLA takes
# the first kernel on the libraries' lists, the one they expect to be fastest.  (An autotune level of 0 would keep it
# from asking cuDNN at all.)  The first on its own list, for matrix products in Triton, is a tiny tile; without Triton
# they go to cuBLAS.
DETERMINISTIC_XLA_FLAGS = "--xla_gpu_deterministic_ops=true --xla_gpu_enable_triton_gemm=false"
# XLA cuts large sums on a CPU into as many parts as it has threads, by default one per core or simulated device.  Our
# products do not.
DETERMINISTIC_CPU_THREADS = "8"


def make_deterministic() -> None:
    """Have XLA make the same bits every time.  Comes before anything that touches a device.

    Flags that the user gave in XLA_FLAGS come last, and so win; a number of threads in PJRT_NPROC stays.  One is set
    only where networks on CPUs are left to XLA.  Once JAX has used a device it hears of no flag: what is missing then,
    and matters on such devices, is said.
    """
    from cleanba.networks.layers import (
        conv_kind,
    )  # Flax takes a quarter of a second, which not every command has need of

    given = os.environ.get("XLA_FLAGS", "")
    by_xla = conv_kind("cpu") == "xla"
    if xla_bridge.backends_are_initialized():
        missing = []
        if jax.default_backend() != "cpu" and DETERMINISTIC_XLA_FLAGS not in given:
            missing.append(f'XLA_FLAGS="{DETERMINISTIC_XLA_FLAGS}"')
        if jax.default_backend() == "cpu" and by_xla and "PJRT_NPROC" not in os.environ:
            missing.append(f"PJRT_NPROC={DETERMINISTIC_CPU_THREADS}")
        if missing:
            print(
                "cleanba: warning: JAX has used a device of this process before Cleanba was asked for anything, so "
                f"{' '.join(missing)} cannot be set any more, and the bits may differ from other runs'; train first, "
                "or set it in the environment",
                file=sys.stderr,
            )
        return
    if DETERMINISTIC_XLA_FLAGS not in given:
        os.environ["XLA_FLAGS"] = f"{DETERMINISTIC_XLA_FLAGS} {given}".strip()
    if by_xla:
        os.environ.setdefault("PJRT_NPROC", DETERMINISTIC_CPU_THREADS)


def let_threads_finish() -> None:
    """Have this thread, and all that it starts later, not interrupt what runs when they wake (Linux's SCHED_BATCH).

    XLA's threads look for work for some microseconds before they sleep, and wake each other at every operation; with
    more of them than cores those that work would be interrupted by those that only look.  Moves no bit.  Where the
    system has no such policy, or forbids it, or the user chose another one, all stays as it is.
    """
    with suppress(OSError, AttributeError):
        if os.sched_getscheduler(0) == os.SCHED_OTHER:
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def set_precision(dtype: str) -> None:
    """Have float32 mean float32 in matrix products and convolutions, unless the experiment's `dtype` says otherwise.

    JAX would round their inputs to 10 bits on GPUs that multiply such numbers faster (TensorFloat-32).  Comes before
    anything is compiled.
    """
    jax.config.update("jax_default_matmul_precision", precision(dtype))


def precision(dtype: str) -> str:
    """JAX's name for how products are taken in an experiment of that `dtype`."""
    return "tensorfloat32" if dtype == "tensorfloat32" else "highest"


# Settings of JAX that change what is drawn, by names of `jax.config`; each has a variable in the environment, too.
RANDOM_NUMBERS = {
    "jax_default_prng_impl": "threefry2x32",
    "jax_threefry_partitionable": True,
    "jax_random_seed_offset": 0,
}


def pin_random_numbers() -> None:
    """Have the same numbers drawn whatever JAX_DEFAULT_PRNG_IMPL and its like say, in environments' own code too.

    Comes before anything is compiled.
    """
    for name, value in RANDOM_NUMBERS.items():
        jax.config.update(name, value)


def refuse_64_bits() -> None:
    """Raise `UsageError` where JAX would make 64-bit numbers of what must be 32 bits wide."""
    require(
        not jax.config.jax_enable_x64,  # type: ignore[attr-defined]
        "JAX_ENABLE_X64 is set, but networks, optimisers and replay here compute with 32-bit numbers; "
        "set JAX_ENABLE_X64=0",
    )


def initialise(p: Placement) -> None:
    """Join the other processes, if the placement is distributed.  Comes before anything that touches a device.

    Raises:
        UsageError: the flags contradict each other, or no cluster was found and no address given.
        RuntimeError: the coordinator could not be reached.
    """
    manual = {
        "--coordinator-address": p.coordinator_address,
        "--num-processes": p.num_processes,
        "--process-id": p.process_id,
    }
    given = [flag for flag, value in manual.items() if value is not None]
    require(
        not (p.distributed and jax.distributed.is_initialized()),
        "--distributed joins other processes once, and this process has done so already; start a new one",
    )
    if not p.distributed:
        require(not given, f"{', '.join(given)} need --distributed; add it, or leave them out")
        return
    if given:
        missing = [flag for flag, value in manual.items() if value is None]
        require(not missing, f"{', '.join(given)} were given without {', '.join(missing)}; give all three or none")
        n, i = p.num_processes or 0, p.process_id or 0
        require(n >= 1, f"num_processes={n} must be at least 1; set --num-processes")
        require(0 <= i < n, f"process_id={i} must lie in [0, {n}); set --process-id")
    try:
        # Each process sees all its local devices; which of them act and learn is for the two id flags to say.
        jax.distributed.initialize(p.coordinator_address, p.num_processes, p.process_id)
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, signal.SIG_DFL)  # JAX would note it and go on
        if "JAX_LOCAL_DEVICE_IDS" not in os.environ:  # under Slurm JAX would leave each process a single GPU
            jax.config.update("jax_cuda_visible_devices", "all")
            jax.config.update("jax_rocm_visible_devices", "all")
    except ValueError as error:
        require(
            False,
            "--distributed found no cluster (Slurm, Open MPI or Kubernetes) to join; "
            f"add --coordinator-address, --num-processes and --process-id ({error})",
        )


def local_devices() -> list[jax.Device]:
    """This process's devices, of the kind that JAX_PLATFORMS names or JAX prefers.

    Raises:
        UsageError: JAX finds none.
    """
    try:
        return jax.local_devices()
    except (RuntimeError, AssertionError) as error:  # the second where a plugin is installed for no such hardware
        asked = os.environ.get("JAX_PLATFORMS", "")
        if not asked:
            raise
        reason = f" ({said(error)})" if str(error) else ""
        raise UsageError(
            f"JAX_PLATFORMS={asked}: JAX finds no such device here{reason}; set JAX_PLATFORMS=cpu, or for a GPU "
            "see that `nvidia-smi` lists it and install Cleanba with its extra cuda12 or cuda13"
        ) from None


def pick_devices(ids: Sequence[int], name: str) -> tuple[jax.Device, ...]:
    """This process's devices by local index; `name` is the flag that named them.

    Raises:
        UsageError: one does not exist or is named twice, or none is named.
    """
    local = local_devices()
    there = ", ".join(f"{i} ({d.device_kind})" for i, d in enumerate(local))
    hint = "; JAX_NUM_CPU_DEVICES=8 in the environment makes eight CPU devices" if local[0].platform == "cpu" else ""
    require(len(ids) > 0, f"{name} names no device; this process has {there}")
    for i in ids:
        require(0 <= i < len(local), f"{name}: there is no device {i}; this process has {there}{hint}")
    require(len(set(ids)) == len(ids), f"{name}={' '.join(map(str, ids))} names a device twice; name each once")
    return tuple(local[i] for i in ids)


def find_devices(p: Placement) -> Devices:
    """The devices that the placement names.

    Raises:
        UsageError: a device does not exist or is named twice, or the processes name different numbers of learners.
    """
    actors = pick_devices(p.actor_device_ids, "--actor-device-ids")
    learners = pick_devices(p.learner_device_ids, "--learner-device-ids")
    if jax.process_count() == 1:
        return Devices(actors, learners, Mesh(np.array(learners), (MESH_AXIS,)), 0, 1)

    from jax.experimental import multihost_utils

    slots = 64  # ids travel as a fixed-size row, padded by -1
    row = np.full(slots, -1, np.int32)
    row[: len(learners)] = [d.id for d in learners]
    rows = np.asarray(multihost_utils.process_allgather(row)).reshape(jax.process_count(), slots)
    counts = (rows >= 0).sum(1)
    require(
        bool((counts == counts[0]).all()),
        f"the processes name {', '.join(map(str, counts))} learner devices, but all must name equally many",
    )
    by_id = {d.id: d for d in jax.devices()}
    everyone = [by_id[i] for i in rows[rows >= 0].tolist()]  # process by process: shards lie in this order
    return Devices(actors, learners, Mesh(np.array(everyone), (MESH_AXIS,)), jax.process_index(), jax.process_count())


def processes_here() -> int:
    """How many processes of the run share this host.  All processes must call this."""
    names = gather_over_processes(np.frombuffer(sha256(socket.gethostname().encode()).digest(), np.uint8))
    return int((names == names[jax.process_index()]).all(1).sum())


def describe_devices() -> dict[str, object]:
    """What a later reader needs to know of the hardware and the packages' versions."""
    from cleanba.networks.layers import conv_kind

    packages = ("cleanba", "jax", "jaxlib", "flax", "optax", "envpool", "numpy", "orbax-checkpoint")
    return {
        "packages": {name: version(name) for name in packages if _installed(name)},
        "python": platform.python_version(),
        "device_kind": jax.local_devices()[0].device_kind,
        "local_devices": len(jax.local_devices()),
        "num_processes": jax.process_count(),
        "cpu": cpu_model(),
        "cpu_cores": os.cpu_count(),
        "cpu_products": conv_kind("cpu"),
        "cpu_threads": cpu_threads(os.environ.get("PJRT_NPROC"), len(jax.local_devices())),
        "slurm": slurm_job(),
    }


def cpu_threads(asked: str | None, devices: int) -> str | None:
    """How many threads XLA has for so many CPU devices: PJRT_NPROC, but one for each device; None: it chose itself."""
    return str(max(int(asked), devices)) if asked and asked.isdigit() else asked


def slurm_job() -> dict[str, str | int] | None:
    """The job of Slurm that this process is a part of: its id, nodes, and how often it was restarted."""
    if "SLURM_JOB_ID" not in os.environ:
        return None
    names = {
        "array_job_id": "SLURM_ARRAY_JOB_ID",
        "array_task_id": "SLURM_ARRAY_TASK_ID",
        "nodes": "SLURM_JOB_NODELIST",
    }
    found: dict[str, str | int] = {"job_id": os.environ["SLURM_JOB_ID"]}
    found |= {name: os.environ[variable] for name, variable in names.items() if variable in os.environ}
    return found | {"restarts": int(os.environ.get("SLURM_RESTART_COUNT", 0))}


def cpu_model() -> str:
    """The name that Linux gives the processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


def _installed(name: str) -> bool:
    try:
        version(name)
    except PackageNotFoundError:
        return False
    return True


def gather_over_processes(x: np.ndarray) -> np.ndarray:
    """Everybody's array, [P, ...]; all processes must call this in the same order."""
    if jax.process_count() == 1:
        return x[None]
    from jax.experimental import multihost_utils

    # As bytes: JAX would round float64 to float32.
    gathered = np.asarray(multihost_utils.process_allgather(np.ascontiguousarray(x).view(np.uint8)))
    return gathered.reshape(jax.process_count(), -1).view(x.dtype).reshape(jax.process_count(), *x.shape)
