"""Keep the learning curves of runs, so that a study can go on for days and on several machines.

    python benchmarks/keep_curves.py minatar sweeps/minatar      # more of them; then draws all there are
    python benchmarks/keep_curves.py minatar                     # draws what is kept

Curves are kept in benchmarks/results/curves_<study>.jsonl, a run to a line, thinned, with its experiment, processor and
digest.  All that are kept are drawn to static/<study>.png, and their final returns go to results/curves_<study>.md.
"""

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import machine
import matplotlib
import numpy as np
import tyro

from cleanba.errors import UsageError
from cleanba.files import Json, read_json
from cleanba.runs import curves, plot
from cleanba.runs.curves import Curve

ROOT = Path(__file__).parents[1]
POINTS = 160  # of a curve, at most


@dataclass(frozen=True)
class Args:
    """Flags of the benchmark."""

    study: tyro.conf.Positional[str]
    """name of the study"""
    runs: tyro.conf.Positional[tuple[Path, ...]] = ()
    """run directories, or folders that hold runs at any depth"""


def entry(curve: Curve) -> Json:
    """One run as it is kept."""
    chosen = np.unique(np.linspace(0, len(curve.steps) - 1, POINTS).round().astype(int))
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
    }


def merge(kept: list[Json], new: list[Json]) -> list[Json]:
    """All runs, once each: of two of the same experiment the one that got farther, of equals the newer one."""
    merged: list[Json] = []
    for run in [*kept, *new]:
        twin = next((one for one in merged if one["experiment"] == run["experiment"]), None)
        if twin is None:
            merged.append(run)
        elif run["steps"][-1] >= twin["steps"][-1]:
            merged[merged.index(twin)] = run
    of = lambda run: (run["experiment"]["env_id"], run["experiment"]["algorithm"], run["experiment"]["seed"])
    return sorted(merged, key=of)


def as_curve(run: Json) -> Curve:
    """What `entry` made, as far as it is drawn."""
    arrays: Any = (np.array(run[name], np.float64) for name in ("steps", "seconds", "returns"))
    return Curve(Path(), run["experiment"], *arrays)


def main(args: Args) -> None:
    """Keep the runs, write the table, draw."""
    kept = machine.RESULTS / f"curves_{args.study}.jsonl"
    runs = [json.loads(line) for line in kept.read_text().splitlines()] if kept.exists() else []
    runs = merge(runs, [entry(curve) for curve in curves.load(args.runs)] if args.runs else [])
    if not runs:
        sys.exit(f"nothing is kept in {kept.relative_to(ROOT)} yet; name runs")
    kept.write_text("".join(json.dumps(run) + "\n" for run in runs))
    groups = curves.group([as_curve(run) for run in runs])
    text = plot.tables(groups, None)
    kept.with_suffix(".md").write_text(text)
    with matplotlib.rc_context({"text.parse_math": False}):
        drawn = plot.save(plot.draw_curves(groups, "steps"), ROOT / "static" / args.study)
    print(text)
    print("\n".join(f"wrote {path.relative_to(ROOT)}" for path in drawn))


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
