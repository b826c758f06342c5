"""The limits that control groups set for this process: those of a container, or of a job step of Slurm."""

import contextlib
import math
import os
from functools import cache
from pathlib import Path

OWN, ROOT = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")


def limit_files(controller: str, name: str, older: str, own: Path = OWN, root: Path = ROOT) -> list[Path]:
    """The files that may limit what this process gets: of its control group, those above it, and the container's.

    `own` has a line of number:controllers:path for each hierarchy; Slurm gives each job step a group of its own.

    name: the file's name in cgroup v2.
    older: its name in v1, which has a hierarchy for each controller.
    """
    found = [root / name, root / controller / older]
    with contextlib.suppress(OSError):
        for line in own.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            home, file = (root, name) if not controllers else (root / controller, older)
            if not controllers or controller in controllers.split(","):
                group = Path(path.lstrip("/"))
                found += [home / part / file for part in (group, *group.parents)]
    return found


def memory_limit(own: Path = OWN, root: Path = ROOT) -> float:
    """The bytes of memory that this process may use; infinity where nothing limits them."""
    limit = math.inf
    for file in limit_files("memory", "memory.max", "memory.limit_in_bytes", own, root):
        with contextlib.suppress(OSError, ValueError):
            limit = min(limit, int(file.read_text()))
    return limit


def core_limit(own: Path = OWN, root: Path = ROOT) -> float:
    """The cores' worth of time that this process may use, such as 1.5; infinity where nothing limits it."""
    limit = math.inf
    for file in limit_files("cpu", "cpu.max", "cpu.cfs_quota_us", own, root):
        with contextlib.suppress(OSError, ValueError, ZeroDivisionError):
            text = file.read_text()
            if file.name != "cpu.max":
                text += file.with_name("cpu.cfs_period_us").read_text()
            quota, period = map(int, text.split())  # "max" is no number
            if quota > 0:
                limit = min(limit, quota / period)
    return limit


@cache
def _core_limit() -> float:
    return core_limit()


def affine_cores() -> int:
    """The cores that this process may run on, by which XLA counts its threads."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def usable_cores() -> int:
    """The cores that this process may run on, or fewer if its control group gets less time."""
    return max(1, math.ceil(min(affine_cores(), _core_limit())))
