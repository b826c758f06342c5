"""What this machine is: hardware, package versions, the Slurm job.  Recorded in config.json."""

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import jax

from cleanba import kernels


def describe_devices() -> dict[str, object]:
    """The hardware, package versions and Slurm job, for config.json."""
    packages = ("cleanba", "jax", "jaxlib", "flax", "optax", "envpool", "numpy", "orbax-checkpoint")
    return {
        "packages": {name: version(name) for name in packages if _installed(name)},
        "python": platform.python_version(),
        "device_kind": jax.local_devices()[0].device_kind,
        "local_devices": len(jax.local_devices()),
        "num_processes": jax.process_count(),
        "cpu": cpu_model(),
        "cpu_cores": os.cpu_count(),
        "cpu_products": "direct" if kernels.in_use() else "xla",
        "cpu_threads": cpu_threads(os.environ.get("PJRT_NPROC"), len(jax.local_devices())),
        "slurm": slurm_job(),
    }


def cpu_threads(asked: str | None, devices: int) -> str | None:
    """XLA's number of CPU threads: PJRT_NPROC, but at least one per device; None where XLA chooses."""
    return str(max(int(asked), devices)) if asked and asked.isdigit() else asked


def slurm_job() -> dict[str, str | int] | None:
    """The Slurm job that this process belongs to: its id, its nodes, and how often it was restarted."""
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
    """The processor's model name, as Linux reports it."""
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
