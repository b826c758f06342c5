"""What does acting one version behind cost PPO in learning, and what do the corrections give back?

    python benchmarks/lag.py --scale small            # three hours or so on two cores
    python benchmarks/lag.py --scale full             # every testbed, days; where it was interrupted it goes on
    python benchmarks/lag.py --only-draw              # of what is there

Results go to benchmarks/results/, the figure to static/.

Trains with `cleanba sweep`: synchronously (--no-concurrency), and lagged with every --lag-correction, at several
learning rates and numbers of epochs, the larger of which bring versions farther apart.  All else is equal.  A cell is
an environment with one learning rate and one number of epochs; a run's score is the mean return of its last 100
episodes, on a scale where 0 is what the environment's runs had at their first log point, and 1 what the synchronous
runs of all its cells had at their end on average.  Cells weigh the same.
"""

import subprocess
import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import machine
import numpy as np
import tyro

from cleanba.recipes import RECIPES
from cleanba.runs import curves, plot
from cleanba.runs.aggregates import square, stratified
from cleanba.runs.curves import Curve

ROOT = Path(__file__).parents[1]
CORRECTIONS = ("none", "proximal", "decoupled", "vtrace", "both")
SYNCHRONOUS = "synchronous"
VARIANTS = (SYNCHRONOUS, *CORRECTIONS)
DISTANCES = ("lag_kl", "lag_ratio_max", "lag_effective_samples")

# By how an environment's name begins: its settings, and its steps at each scale.
COMMON = "--learning-rate 5e-4 --clip-coef 0.2"
VECTORS = f"{COMMON} --hiddens 64 64"
TESTBEDS: dict[str, tuple[str, dict[str, int]]] = {
    "CartPole": (f"{VECTORS} --num-envs 8 --num-steps 64", {"small": 50_000, "full": 200_000}),
    "LunarLander": (f"{VECTORS} --norm-reward --num-envs 16 --num-steps 128", {"small": 300_000, "full": 1_000_000}),
    "gymnax:": (f"{COMMON} --num-envs 64 --num-steps 64", {"small": 500_000, "full": 5_000_000}),
    "": ("", {"small": 150_000, "full": 1_000_000}),  # the defaults; as for MuJoCo's
}
ENVIRONMENTS = {
    "small": ("CartPole-v1", "LunarLander-v3"),
    "full": (
        *("CartPole-v1", "LunarLander-v3", "HalfCheetah-v4", "Hopper-v4", "Walker2d-v4"),
        *(f"gymnax:{game}-MinAtar" for game in ("Asterix", "Breakout", "Freeway", "Seaquest", "SpaceInvaders")),
    ),
}


@dataclass(frozen=True)
class Args:
    """Flags of the benchmark."""

    scale: Literal["small", "full"] = "small"
    """which environments, and for how many steps"""
    env_ids: tuple[str, ...] | None = None
    """other environments than the scale's"""
    seeds: int = 5
    """seeds of every cell"""
    rates: tuple[float, ...] = (1.0, 3.0)
    """learning rates, as multiples of an environment's own"""
    epochs: tuple[int, ...] = (4, 10)
    """passes over each batch"""
    corrections: tuple[str, ...] = CORRECTIONS
    """lagged variants"""
    dir: Path = Path("runs/lag")
    """folder of the runs; those that are finished are not run again"""
    workers: int = 1
    """runs at a time"""
    only_draw: bool = False
    """train nothing, draw what is there"""


def settings(env_id: str, scale: str) -> list[str]:
    """An environment's flags of `cleanba ppo`."""
    words, steps = next(found for name, found in TESTBEDS.items() if env_id.startswith(name))
    return [*words.split(), "--total-timesteps", str(steps[scale]), "--log-frequency", "5"]


def own_rate(env_id: str) -> float:
    """An environment's own learning rate."""
    words = settings(env_id, "full")
    if "--learning-rate" in words:
        return float(words[words.index("--learning-rate") + 1])
    defaults: Any = RECIPES["ppo"].defaults
    return float(defaults("continuous").learning_rate)


def train(env_id: str, args: Args) -> None:
    """Two sweeps of one environment.  Seed by seed within a cell, cell after cell: an interruption leaves few open."""
    rates = ",".join(f"{rate * own_rate(env_id):.6g}" for rate in args.rates)
    cells = ["--set", f"learning_rate={rates}", f"update_epochs={','.join(map(str, args.epochs))}"]
    folder = args.dir / env_id.replace(":", "-")
    for name, extra, flags in (
        (SYNCHRONOUS, [], ["--no-concurrency"]),
        ("lagged", [f"lag_correction={','.join(args.corrections)}"], []),
    ):
        words = ["sweep", "--env-ids", env_id, "--num-seeds", str(args.seeds), *cells, *extra]
        words += ["--dir", str(folder / name), "--workers", str(args.workers)]
        words += ["--", "ppo", *settings(env_id, args.scale), *flags]
        subprocess.run([sys.executable, "-m", "cleanba", *words], check=False)  # what failed is simply not there


# ---------------------------------------------------------------------------------------------------- what came out

Cell = tuple[str, float, int]  # environment, learning rate, epochs


def variant(curve: Curve) -> str:
    return str(curve.experiment["lag_correction"]) if curve.experiment["concurrency"] else SYNCHRONOUS


def by_cell(runs: Sequence[Curve]) -> dict[Cell, dict[str, list[Curve]]]:
    """Runs by cell and variant, in the order of their seeds: cells that every variant has two seeds of, and those."""
    found: dict[Cell, dict[str, dict[int, Curve]]] = defaultdict(lambda: defaultdict(dict))
    for c in runs:
        e = c.experiment
        found[e["env_id"], e["learning_rate"], e["update_epochs"]][variant(c)][e["seed"]] = c
    names = {name for cell in found.values() for name in cell}
    cells = {}
    for cell, variants in sorted(found.items()):
        common = sorted(set.intersection(*(set(variants[name]) for name in names)))
        if len(common) > 1:
            cells[cell] = {name: [variants[name][seed] for seed in common] for name in VARIANTS if name in names}
    return cells


def scales(cells: dict[Cell, dict[str, list[Curve]]]) -> dict[str, tuple[float, float]]:
    """By environment: the returns that have scores 0 and 1."""
    first, last = defaultdict(list), defaultdict(list)
    for (env_id, _, _), variants in cells.items():
        first[env_id] += [c.returns[0] for runs in variants.values() for c in runs]
        last[env_id] += [c.returns[-1] for c in variants[SYNCHRONOUS]]
    return {env_id: (float(np.mean(first[env_id])), float(np.mean(last[env_id]))) for env_id in first}


def learnable(cells: dict[Cell, dict[str, list[Curve]]]) -> dict[Cell, dict[str, list[Curve]]]:
    """The cells of environments where synchronous runs ended better than runs began: without that there is no scale."""
    better = {env_id: last > first for env_id, (first, last) in scales(cells).items()}
    for env_id in (env_id for env_id, fine in better.items() if not fine):
        print(f"{env_id} is left out: synchronous runs did not end better than runs began; train it for longer")
    return {cell: variants for cell, variants in cells.items() if better[cell[0]]}


def iqm(matrix: np.ndarray) -> np.ndarray:
    """The mean of the middle half of all scores (Agarwal et al. 2021).  [seeds, cells] -> [1]."""
    from rliable import metrics  # type: ignore[import-untyped]

    return np.array([metrics.aggregate_iqm(matrix)])


def improvement(x: np.ndarray, y: np.ndarray) -> float:
    """P(X > Y) + P(X = Y) / 2 of one run each, averaged over cells (Agarwal et al. 2021).  [seeds, cells] each."""
    pairs = x[:, None] - y[None]
    return float(((pairs > 0) + 0.5 * (pairs == 0)).mean())


def study(cells: dict[Cell, dict[str, list[Curve]]]) -> dict[str, Any]:
    """Scores, aggregates and distances of every variant."""
    bounds = scales(cells)
    names = [name for name in VARIANTS if name in next(iter(cells.values()))]
    score = lambda env_id, x: (x - bounds[env_id][0]) / (bounds[env_id][1] - bounds[env_id][0])
    final = {
        name: [np.array([score(cell[0], c.returns[-1]) for c in variants[name]]) for cell, variants in cells.items()]
        for name in names
    }
    share = np.linspace(0, 1, 51)  # of the steps
    along = lambda env_id, c: score(env_id, np.interp(share * c.steps[-1], c.steps, c.returns))
    rows: dict[str, Any] = {}
    n = len(cells)
    for name in names:
        estimate = stratified(final[name], iqm)
        against = stratified([*final[name], *final[SYNCHRONOUS]], lambda m: np.array([improvement(m[:, :n], m[:, n:])]))
        path = [np.stack([along(cell[0], c) for c in variants[name]]) for cell, variants in cells.items()]
        curve = [float(iqm(square([p[:, i] for p in path]))[0]) for i in range(len(share))]
        interval = lambda x: [float(x.value[0]), float(x.low[0]), float(x.high[0])]
        rows[name] = {
            "iqm": interval(estimate),
            "improvement_over_synchronous": None if name == SYNCHRONOUS else interval(against),
            "iqm_along_the_run": curve,
        }
    table = []
    for i, (cell, variants) in enumerate(cells.items()):
        row: dict[str, Any] = dict(zip(("env_id", "learning_rate", "update_epochs"), cell, strict=True))
        row["seeds"] = len(variants[SYNCHRONOUS])
        row["scores"] = {name: [round(float(x), 4) for x in final[name][i]] for name in names}
        row["returns"] = {name: float(np.mean([c.returns[-1] for c in variants[name]])) for name in names}
        row["distance"] = {name: distance(variants[name]) for name in names}
        table.append(row)
    return {"scores_0_and_1_are_returns": bounds, "variants": rows, "cells": table}


def distance(runs: Sequence[Curve]) -> dict[str, float]:
    """How far versions were apart: the mean over the log points of all runs, the first aside, which has no lag."""
    rows = [row for c in runs for row in curves.read_rows(c.run_dir)[1:]]
    return {name: float(np.nanmean(curves.column(rows, f"stats/{name}"))) for name in DISTANCES}


# ------------------------------------------------------------------------------------------------------ showing it


def draw(found: dict[str, Any]) -> Any:
    """Four panels: scores, improvement, curves, and what distance between versions does."""
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    figure = Figure(figsize=(9.5, 6.4), layout="constrained")
    (scores, better), (along, apart) = figure.subplots(2, 2)
    names = list(found["variants"])
    looks = {name: plot.look(i) for i, name in enumerate(names)}
    for i, name in enumerate(names):
        row, style = found["variants"][name], looks[name]
        for panel, numbers in ((scores, row["iqm"]), (better, row["improvement_over_synchronous"])):
            if numbers is not None:
                value, low, high = numbers
                panel.plot([low, high], [i, i], color=style["color"], linewidth=6, alpha=0.35, solid_capstyle="butt")
                panel.plot(value, i, style["marker"], color=style["color"], markersize=6)
        curve = row["iqm_along_the_run"]
        along.plot(np.linspace(0, 1, len(curve)), curve, linewidth=1.4, markersize=4.5, markevery=(4 + i, 12), **style)
    for panel, title in ((scores, "normalised score at the end (IQM)"), (better, "probability to beat synchronous")):
        panel.set_title(title, fontsize=9)
        panel.set_yticks(range(len(names)), names)
        panel.set_ylim(len(names) - 0.5, -0.5)
    better.axvline(0.5, color="0.5", linewidth=0.8)
    along.set_xlabel("share of the steps", fontsize=8.5)
    along.set_ylabel("normalised score (IQM)", fontsize=8.5)
    markers = dict(zip(sorted({row["env_id"] for row in found["cells"]}), plot.MARKERS[1:], strict=False))
    for row in found["cells"]:
        mean = {name: float(np.mean(row["scores"][name])) for name in names}
        for name in ("none", "decoupled"):
            if name in mean:
                x = row["distance"][name]["lag_kl"]
                apart.plot(x, mean[name] - mean[SYNCHRONOUS], markers[row["env_id"]], color=looks[name]["color"])
    apart.axhline(0, color="0.5", linewidth=0.8)
    apart.set_xscale("log")
    apart.tick_params(axis="x", which="minor", labelbottom=False)
    apart.set_xlabel("KL between versions (stats/lag_kl), mean of a cell", fontsize=8.5)
    apart.set_ylabel("score minus synchronous", fontsize=8.5)
    apart.legend(
        handles=[Line2D([], [], color="0.4", linestyle="", marker=m, label=env_id) for env_id, m in markers.items()],
        fontsize=7,
    )
    for panel in (scores, better, along, apart):
        plot.dress(panel, 8.5)
    seeds = plot.span(row["seeds"] for row in found["cells"])
    caption = (
        f"{len(found['cells'])} cells (environment, learning rate, epochs), {seeds} seeds each. Bars: 95% stratified "
        "bootstrap intervals (2,000 resamples of every cell's seeds)."
    )
    plot.legend_below(figure, [Line2D([], [], label=name, markersize=4.5, **looks[name]) for name in names], caption)
    return figure


def tables(found: dict[str, Any]) -> str:
    """Markdown: every variant over all cells, then mean scores of every cell with the distance between versions."""
    names = list(found["variants"])
    of = lambda numbers: "" if numbers is None else "{:.2f} ({:.2f} to {:.2f})".format(*numbers)
    overall = [
        [name, of(row["iqm"]), of(row["improvement_over_synchronous"])] for name, row in found["variants"].items()
    ]
    cells = []
    for row in found["cells"]:
        lagged = row["distance"].get("none", {})
        apart = [f"{lagged.get(name, float('nan')):.3g}" for name in DISTANCES]
        head = [row["env_id"], f"{row['learning_rate']:.3g}", str(row["update_epochs"])]
        cells.append([*head, *(f"{np.mean(row['scores'][name]):.2f}" for name in names), *apart])
    distances = ["KL", "greatest ratio", "effective samples"]
    return "\n\n".join(
        [
            plot.markdown(["variant", "IQM of scores", "probability to beat synchronous"], overall),
            plot.markdown(["environment", "learning rate", "epochs", *names, *distances], cells),
        ]
    )


def main(args: Args) -> None:
    """Train, print tables, write results and figure."""
    if not args.only_draw:
        for env_id in args.env_ids or ENVIRONMENTS[args.scale]:
            train(env_id, args)
    cells = learnable(by_cell(curves.load([args.dir])))
    if not cells:
        sys.exit(f"{args.dir} has no cell yet that shows learning, and of which every variant has two seeds; train on")
    found = study(cells)
    print(tables(found))
    path = machine.save("policy_lag", found)
    drawn = plot.save(draw(found), ROOT / "static" / "policy_lag")
    print(f"written: benchmarks/results/{path.name}, {', '.join(f'static/{p.name}' for p in drawn)}")


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
