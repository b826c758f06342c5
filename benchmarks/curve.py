"""Draw the learning curves of runs: mean return of the last 100 episodes over environment steps."""

import json
from dataclasses import dataclass
from pathlib import Path

import matplotlib
import tyro

matplotlib.use("Agg")
import matplotlib.pyplot as plt


@dataclass(frozen=True)
class Args:
    """Flags of the script."""

    runs: tyro.conf.Positional[tuple[Path, ...]]
    """run directories"""
    out: Path = Path("static/curve")
    """where to write, without a suffix; a PNG and an SVG are made"""


def main(args: Args) -> None:
    """Read metrics.jsonl of each run and draw."""
    figure, axes = plt.subplots(figsize=(6, 3.2), constrained_layout=True)
    for run, line in zip(args.runs, ("-", "--", ":", "-.") * len(args.runs), strict=False):
        rows = [json.loads(text) for text in (run / "metrics.jsonl").read_text().splitlines()]
        points = [(r["global_step"] / 1000, r["charts/episodic_return"]) for r in rows if "charts/episodic_return" in r]
        experiment = json.loads((run / "config.json").read_text())["experiment"]
        label = f"{experiment['algorithm']}, {experiment['env_id']}, seed {experiment['seed']}"
        axes.plot(*zip(*points, strict=True), line, color="black", label=label)
    axes.set(xlabel="environment steps, thousands", ylabel="return, mean of 100 episodes")
    axes.legend(frameon=False)
    for suffix in (".png", ".svg"):
        figure.savefig(args.out.with_suffix(suffix), dpi=150)


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
