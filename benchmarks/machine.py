"""What every benchmark records beside its figures: the machine and the command."""

import json
import os
import shlex
import statistics
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"


def describe() -> dict[str, Any]:
    """Processor, cores, devices and versions; no names of hosts, users or folders."""
    import jax

    from cleanba.runtime.hardware import describe_devices

    return {"device": jax.devices()[0].device_kind, **describe_devices()}


def command() -> str:
    """The command as a reader can repeat it."""
    return shlex.join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *sys.argv[1:]])


def save(name: str, values: dict[str, Any]) -> Path:
    """Write benchmarks/results/<name>.json."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps({"command": command(), "machine": describe(), **values}, indent=2) + "\n")
    return path


def saved(name: str) -> dict[str, Any]:
    """The contents of benchmarks/results/<name>.json; empty if there is no such file."""
    path = RESULTS / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else {}


def commit() -> str:
    """The commit that was measured, with a "+" if files differ from it; "unknown" outside of Git."""
    git = ["git", "-C", str(RESULTS.parent), "describe", "--always", "--dirty=+", "--match="]
    try:
        ended = subprocess.run(git, capture_output=True, text=True)
    except OSError:  # Git is not installed
        return "unknown"
    return ended.stdout.strip() or "unknown"


def spread(samples: list[float]) -> dict[str, float]:
    """Median, minimum and maximum."""
    return {"median": statistics.median(samples), "min": min(samples), "max": max(samples)}


def start_pytorch() -> None:
    """Have PyTorch, if it is installed, start its threads now, before Cleanba changes how threads are scheduled."""
    try:
        import torch
    except ImportError:
        return
    torch.ones(1024, 1024) @ torch.ones(1024, 1024)


@contextmanager
def as_a_script() -> Iterator[None]:
    """Within this context, this thread has the default scheduling policy, as PyTorch's own have by `start_pytorch`."""
    if not hasattr(os, "sched_setscheduler"):  # Cleanba cannot change the policy here either
        yield
        return
    before = os.sched_getscheduler(0)
    os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
    try:
        yield
    finally:
        os.sched_setscheduler(0, before, os.sched_param(0))
