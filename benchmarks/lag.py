"""What does acting one version behind cost PPO in learning, and what do the corrections give back?

    python benchmarks/lag.py                                     # every testbed: 20 hours of one core
    python benchmarks/lag.py --env-ids CartPole-v1 Hopper-v4     # these, now
    python benchmarks/lag.py --only-draw                         # what is there

Trains with `cleanba sweep`: synchronously (--no-concurrency), and lagged with every --lag-correction, at several
learning rates and numbers of epochs, the larger of which bring versions farther apart.  All else is equal.  A cell is
an environment with one learning rate and one number of epochs; a run's score is the mean return of its last 100
episodes, on a scale where 0 is what the environment's runs had at their first log point, and 1 what the synchronous
runs of all its cells had at their end on average.  Cells weigh the same.

Runs are kept in benchmarks/results/policy_lag/, a file to an environment (kept.py), and are not made again, so the
study can be interrupted, and go on on another machine.  Several processes may run at a time, of different environments.
"""

import itertools
import subprocess
import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import kept
import machine
import numpy as np
import tyro

from cleanba.files import Json
from cleanba.recipes import RECIPES
from cleanba.runs import curves, plot
from cleanba.runs.aggregates import square, stratified
from cleanba.runs.curves import Curve

ROOT = Path(__file__).parents[1]
CORRECTIONS = ("none", "decoupled", "vtrace", "both", "proximal")
SYNCHRONOUS = "synchronous"
VARIANTS = (SYNCHRONOUS, *CORRECTIONS)
DISTANCES = ("lag_kl", "lag_ratio_max", "lag_effective_samples")

# By how an environment's name begins: its settings.
COMMON = "--learning-rate 5e-4 --clip-coef 0.2"
VECTORS = f"{COMMON} --hiddens 64 64"
TESTBEDS = {
    "CartPole": f"{VECTORS} --num-envs 8 --num-steps 64 --total-timesteps 50000",
    "LunarLander": f"{VECTORS} --norm-reward --num-envs 16 --num-steps 128 --total-timesteps 300000",
    "gymnax:": f"{COMMON} --num-envs 64 --num-steps 64 --total-timesteps 500000",
    "": "--total-timesteps 300000",  # the defaults; as for MuJoCo's
}
ENVIRONMENTS = (
    *("CartPole-v1", "LunarLander-v3", "HalfCheetah-v4", "Hopper-v4", "Walker2d-v4"),
    *(f"gymnax:{game}-MinAtar" for game in ("Asterix", "Breakout", "Freeway", "Seaquest", "SpaceInvaders")),
)


@dataclass(frozen=True)
class Args:
    """Flags of the benchmark."""

    env_ids: tuple[str, ...] = ENVIRONMENTS
    """environments to train"""
    seeds: int = 5
    """seeds of every cell"""
    rates: tuple[float, ...] = (1.0, 3.0)
    """learning rates, as multiples of an environment's own"""
    epochs: tuple[int, ...] = (4, 10)
    """passes over each batch"""
    corrections: tuple[str, ...] = CORRECTIONS
    """lagged variants"""
    dir: Path = Path("runs/lag")
    """folder of the runs"""
    workers: int = 1
    """runs at a time"""
    only_draw: bool = False
    """train nothing, draw what is there"""


class Run(NamedTuple):
    """What counts of a run.  Arrays are [N], as a Curve's."""

    experiment: Json
    steps: np.ndarray
    returns: np.ndarray
    distance: dict[str, float]  # mean over the run, by DISTANCES


def settings(env_id: str) -> list[str]:
    """An environment's flags of `cleanba ppo`."""
    words = next(found for name, found in TESTBEDS.items() if env_id.startswith(name))
    return [*words.split(), "--log-frequency", "5"]


def given(env_id: str, flag: str) -> str | None:
    """What an environment's settings give a flag; None, if they leave it to the defaults."""
    words = settings(env_id)
    return words[words.index(flag) + 1] if flag in words else None


def own_rate(env_id: str) -> float:
    """An environment's own learning rate."""
    rate = given(env_id, "--learning-rate")
    if rate is not None:
        return float(rate)
    defaults: Any = RECIPES["ppo"].defaults
    return float(defaults("continuous").learning_rate)


def train(env_id: str, args: Args) -> None:
    """Make what is not kept yet, cell after cell, and keep it."""
    path = place(env_id)
    there = sort([as_run(run) for run in kept.read(path)])
    for rate, epochs in itertools.product(args.rates, args.epochs):
        cell = env_id, float(f"{rate * own_rate(env_id):.6g}"), epochs
        for name in (SYNCHRONOUS, *args.corrections):
            if set(there[cell][name]) >= set(range(1, args.seeds + 1)):
                continue
            folder = args.dir / path.stem / f"{cell[1]:g}-{epochs}-{name}"
            flags = ["--no-concurrency"] if name == SYNCHRONOUS else ["--lag-correction", name]
            words = ["sweep", "--env-ids", env_id, "--num-seeds", str(args.seeds), "--workers", str(args.workers)]
            words += ["--dir", str(folder), "--", "ppo", *settings(env_id), *flags]
            words += ["--learning-rate", f"{cell[1]:g}", "--update-epochs", str(epochs)]
            subprocess.run([sys.executable, "-m", "cleanba", *words], check=False)  # what failed is simply not there
            if folder.exists():
                keep(env_id, folder)


def place(env_id: str) -> Path:
    """Where an environment's runs are kept."""
    return machine.RESULTS / "policy_lag" / f"{env_id.replace(':', '-')}.jsonl"


def keep(env_id: str, folder: Path) -> None:
    """Keep the runs there that are finished."""
    runs = [kept.entry(curve, points=51, distance=distance(curve)) for curve in curves.load([folder])]
    kept.add(place(env_id), [run for run in runs if run["status"] == "finished"])


def distance(curve: Curve) -> dict[str, float]:
    """How far versions were apart: the mean over a run's log points, the first aside, which has no lag."""
    rows = curves.read_rows(curve.run_dir)[1:]
    return {name: float(np.nanmean(curves.column(rows, f"stats/{name}"))) for name in DISTANCES}


def as_run(run: Json) -> Run:
    """What `keep` kept."""
    curve = kept.as_curve(run)
    return Run(curve.experiment, curve.steps, curve.returns, run["distance"])


# ---------------------------------------------------------------------------------------------------- what came out

Cell = tuple[str, float, int]  # environment, learning rate, epochs


def variant(run: Run) -> str:
    return str(run.experiment["lag_correction"]) if run.experiment["concurrency"] else SYNCHRONOUS


def sort(runs: Sequence[Run]) -> dict[Cell, dict[str, dict[int, Run]]]:
    """Runs by cell, variant and seed.  Those of other lengths than the study's are left out."""
    found: dict[Cell, dict[str, dict[int, Run]]] = defaultdict(lambda: defaultdict(dict))
    for run in runs:
        e = run.experiment
        if str(e["total_timesteps"]) == given(e["env_id"], "--total-timesteps"):
            found[e["env_id"], e["learning_rate"], e["update_epochs"]][variant(run)][e["seed"]] = run
    return found


def by_cell(runs: Sequence[Run]) -> dict[Cell, dict[str, list[Run]]]:
    """Runs by cell and variant, in the order of their seeds: cells that every variant has two seeds of, and those."""
    found = sort(runs)
    names = {name for cell in found.values() for name in cell}
    cells = {}
    for cell, variants in sorted(found.items()):
        common = sorted(set.intersection(*(set(variants[name]) for name in names)))
        if len(common) > 1:
            cells[cell] = {name: [variants[name][seed] for seed in common] for name in VARIANTS if name in names}
    return cells


def scales(cells: dict[Cell, dict[str, list[Run]]]) -> dict[str, tuple[float, float]]:
    """By environment: the returns that have scores 0 and 1."""
    first, last = defaultdict(list), defaultdict(list)
    for (env_id, _, _), variants in cells.items():
        first[env_id] += [c.returns[0] for runs in variants.values() for c in runs]
        last[env_id] += [c.returns[-1] for c in variants[SYNCHRONOUS]]
    return {env_id: (float(np.mean(first[env_id])), float(np.mean(last[env_id]))) for env_id in first}


def learnable(cells: dict[Cell, dict[str, list[Run]]]) -> dict[Cell, dict[str, list[Run]]]:
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


def study(cells: dict[Cell, dict[str, list[Run]]]) -> dict[str, Any]:
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
        mean = lambda runs, what: float(np.mean([run.distance[what] for run in runs]))
        row["distance"] = {name: {what: mean(variants[name], what) for what in DISTANCES} for name in names}
        table.append(row)
    return {"scores_0_and_1_are_returns": bounds, "variants": rows, "cells": table}


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
        for env_id in args.env_ids:
            train(env_id, args)
    runs = [as_run(run) for path in sorted((machine.RESULTS / "policy_lag").glob("*.jsonl")) for run in kept.read(path)]
    cells = learnable(by_cell(runs))
    if not cells:
        sys.exit("no cell yet that shows learning, and of which every variant has two seeds, is kept; train on")
    found = study(cells)
    print(tables(found))
    path = machine.save("policy_lag", found)
    drawn = plot.save(draw(found), ROOT / "static" / "policy_lag")
    print(f"written: benchmarks/results/{path.name}, {', '.join(f'static/{p.name}' for p in drawn)}")


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
