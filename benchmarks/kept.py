"""Learning curves as they are kept in results/: one line per run, thinned, with experiment, processor and digest.

A study of many runs may take days and several machines.  These lines are kept; run directories are not.
"""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from cleanba.errors import UsageError
from cleanba.files import Json, read_json, write_whole
from cleanba.runs.curves import Curve

POINTS = 160  # of a curve, at most


def entry(curve: Curve, points: int = POINTS, **more: Any) -> Json:
    """One run as it is kept, with the fields `more`."""
    chosen = np.unique(np.linspace(0, len(curve.steps) - 1, points).round().astype(int))
    config = read_json(curve.run_dir / "config.json")
    try:
        result = read_json(curve.run_dir / "result.json")
    except UsageError:  # it was killed
        result = {}
    return {
        "experiment": curve.experiment,
        "cpu": config.get("cpu"),
        "status": result.get("status", "unfinished"),
        "params_digest": result.get("params_digest"),
        "steps": curve.steps[chosen].astype(int).tolist(),
        "seconds": curve.seconds[chosen].round(1).tolist(),
        "returns": [float(f"{x:.5g}") for x in curve.returns[chosen]],
        **more,
    }


def as_curve(run: Json) -> Curve:
    """A kept run as a curve to draw."""
    arrays: Any = (np.array(run[name], np.float64) for name in ("steps", "seconds", "returns"))
    return Curve(Path(), run["experiment"], *arrays, finished=run["status"] == "finished")


def merge(kept: Sequence[Json], new: Sequence[Json]) -> list[Json]:
    """All runs, one per experiment: the one with more steps, or the newer one of equals."""
    merged: list[Json] = []
    for run in [*kept, *new]:
        twin = next((one for one in merged if one["experiment"] == run["experiment"]), None)
        if twin is None:
            merged.append(run)
        elif run["steps"][-1] >= twin["steps"][-1]:
            merged[merged.index(twin)] = run
    of = lambda run: (run["experiment"]["env_id"], run["experiment"]["algorithm"], run["experiment"]["seed"])
    return sorted(merged, key=of)


def read(path: Path) -> list[Json]:
    """What is kept there; an empty list if there is no such file."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def add(path: Path, new: Sequence[Json], replaced: Callable[[Json], bool] = lambda _: False) -> list[Json]:
    """Keep these, too, and drop the kept lines that are `replaced`.  Returns all that is kept there."""
    runs = merge([line for line in read(path) if not replaced(line)], new)
    if runs:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, "".join(json.dumps(run) + "\n" for run in runs))
    return runs
