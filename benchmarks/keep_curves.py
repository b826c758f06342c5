"""Collects the learning curves of a study, which may take days and several machines.

    python benchmarks/keep_curves.py minatar sweeps/minatar      # adds these runs, then draws all curves
    python benchmarks/keep_curves.py minatar                     # draws all curves

Curves are kept in benchmarks/results/curves_<study>.jsonl (kept.py), drawn to static/<study>.png, and their final
returns are written to results/curves_<study>.md.
"""

import sys
from dataclasses import dataclass
from pathlib import Path

import kept
import machine
import matplotlib
import tyro

from cleanba.runs import curves, plot

ROOT = Path(__file__).parents[1]


@dataclass(frozen=True)
class Args:
    """Flags of the benchmark."""

    study: tyro.conf.Positional[str]
    """name of the study"""
    runs: tyro.conf.Positional[tuple[Path, ...]] = ()
    """run directories, or folders that hold runs at any depth"""


def main(args: Args) -> None:
    """Keep the runs, write the table, draw."""
    path = machine.RESULTS / f"curves_{args.study}.jsonl"
    runs = kept.add(path, [kept.entry(curve) for curve in curves.load(args.runs)] if args.runs else [])
    if not runs:
        sys.exit(f"nothing is kept in {path.relative_to(ROOT)} yet; name runs")
    groups = curves.group([kept.as_curve(run) for run in runs])
    text = plot.tables(groups, None)
    path.with_suffix(".md").write_text(text)
    with matplotlib.rc_context({"text.parse_math": False}):
        drawn = plot.save(plot.draw_curves(groups, "steps"), ROOT / "static" / args.study)
    print(text)
    print("\n".join(f"wrote {picture.relative_to(ROOT)}" for picture in drawn))


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
