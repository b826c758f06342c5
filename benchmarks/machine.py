"""What every benchmark records beside its figures: the machine and the command."""

import json
import statistics
import sys
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"


def describe() -> dict[str, Any]:
    """Processor, cores, devices and versions; no names of hosts, users or folders."""
    import jax

    from cleanba.runtime.placement import describe_devices

    return {"device": jax.devices()[0].device_kind, **describe_devices()}


def command() -> str:
    """The command as a reader can repeat it."""
    return " ".join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *sys.argv[1:]])


def save(name: str, values: dict[str, Any]) -> Path:
    """Write benchmarks/results/<name>.json."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps({"command": command(), "machine": describe(), **values}, indent=2) + "\n")
    return path


def spread(samples: list[float]) -> dict[str, float]:
    """Median, least and greatest."""
    return {"median": statistics.median(samples), "min": min(samples), "max": max(samples)}
