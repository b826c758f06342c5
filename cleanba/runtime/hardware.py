"""What this machine and this code are: hardware, versions, the Slurm job.  Recorded in config.json."""

import json
import os
import platform
import subprocess
from contextlib import suppress
from functools import cache
from hashlib import sha256
from importlib.metadata import PackageNotFoundError, distribution, version
from pathlib import Path

import jax

from cleanba import kernels

ROOT = Path(__file__).parents[1]
PACKAGES = (
    *("cleanba", "jax", "jaxlib", "flax", "optax", "envpool", "numpy", "scipy", "orbax-checkpoint"),
    *("llvmlite", "gymnasium", "gymnax", "craftax"),
    *("jax-cuda12-plugin", "jax-cuda13-plugin", "nvidia-cudnn-cu12", "nvidia-cudnn-cu13"),
    *("nvidia-cublas-cu12", "nvidia-cublas"),
)
"""whose versions are recorded, where they are installed"""
# Folders and modules of the package that decide nothing about what is trained.
NOT_TRAINING = ("agents", "checks", "runs", "sweeps", "api.py", "cli.py", "completion.py", "trust.py")
ALSO_TRAINING = ("agents/initial.py",)  # --init-from
# What a processor's instruction sets begin with in /proc/cpuinfo: on x86-64, and on ARM.
INSTRUCTIONS = (
    *("sse", "ssse", "pni", "avx", "fma", "f16c", "bmi", "abm", "popcnt", "amx", "vaes", "vpclmul", "gfni"),
    *("movbe", "adx", "asimd", "sve", "bf16", "i8mm"),
)
GIT_SECONDS = 5.0


def describe_devices() -> dict[str, object]:
    """The hardware, package versions and Slurm job, for config.json."""
    return {
        "packages": {name: version(name) for name in PACKAGES if _installed(name)},
        "revision": revision(),
        "code": code_digest(),
        "python": platform.python_version(),
        "device_kind": jax.local_devices()[0].device_kind,
        "local_devices": len(jax.local_devices()),
        "num_processes": jax.process_count(),
        "cpu": cpu_model(),
        "processor": processor(),
        "cpu_cores": os.cpu_count(),
        "cpu_products": "direct" if kernels.in_use() else "xla",
        "cpu_threads": cpu_threads(os.environ.get("PJRT_NPROC"), len(jax.local_devices())),
        "slurm": slurm_job(),
    }


def for_gpus(package: str) -> bool:
    """Whether CPUs compute the same bits without this package."""
    return package.startswith(("jax-cuda", "nvidia-"))


def has_cuda() -> bool:
    """Whether JAX is installed for GPUs.  Asking JAX for its devices would take the GPUs' memory."""
    return any(_installed(name) for name in PACKAGES if name.startswith("jax-cuda"))


def cpu_threads(asked: str | None, devices: int) -> str | None:
    """XLA's number of CPU threads: PJRT_NPROC, but at least one per device; None where XLA chooses."""
    return str(max(int(asked), devices)) if asked and asked.isdigit() else asked


@cache
def revision() -> str:
    """The code's revision: git's commit, with "+changes" where files differ from it; else the package's version.

    The commit is that of the checkout that holds the package, or the one that pip installed it from.
    """
    try:
        installed = json.loads(distribution("cleanba").read_text("direct_url.json") or "{}")
        commit = installed.get("vcs_info", {}).get("commit_id")
    except (PackageNotFoundError, ValueError, OSError):
        commit = None
    if not commit and (ROOT.parent / ".git").exists():
        commit = _git("rev-parse", "HEAD")
        if commit and _git("status", "--porcelain", "--", ROOT.name):
            commit += "+changes"
    return str(commit or (version("cleanba") if _installed("cleanba") else "unknown"))


def _git(*words: str) -> str:
    """What git says of the checkout that holds the package; "" where it says nothing, or there is no git."""
    with suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(
            ["git", "-C", str(ROOT.parent), *words], capture_output=True, text=True, timeout=GIT_SECONDS, check=True
        )
        return done.stdout.strip()
    return ""


@cache
def code_digest() -> str:
    """SHA-256 of the source files that take part in training: equal digests are equal code, whatever git says."""
    digest = sha256()
    trains = lambda path: path.parts[0] not in NOT_TRAINING or path.as_posix() in ALSO_TRAINING
    files = [path for path in ROOT.rglob("*.py") if trains(path.relative_to(ROOT))]
    for path in sorted(files, key=lambda path: path.relative_to(ROOT).as_posix()):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(ROOT).as_posix()} {len(content)}\n".encode() + content)
    return f"sha256:{digest.hexdigest()}"


def cpuinfo() -> dict[str, str]:
    """What Linux says of the first core, by its names; {} elsewhere."""
    known: dict[str, str] = {}
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            name, colon, value = line.partition(":")
            if colon:
                known.setdefault(name.strip(), value.strip())
    return known


def processor() -> dict[str, str]:
    """The processor as far as compiled code depends on it: its architecture, family and instruction sets."""
    known = cpuinfo()
    named = ("vendor_id", "cpu family", "model", "CPU implementer", "CPU part")
    flags = known.get("flags", known.get("Features", "")).split()
    return {
        "machine": platform.machine(),
        "family": " ".join(known[name] for name in named if name in known),
        "instructions": " ".join(sorted(flag for flag in flags if flag.startswith(INSTRUCTIONS))),
    }


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
    return cpuinfo().get("model name", platform.machine())


def _installed(name: str) -> bool:
    try:
        version(name)
    except PackageNotFoundError:
        return False
    return True
