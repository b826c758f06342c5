"""How much worse does PPO learn when it acts one version behind, and how much do the corrections recover?

    python benchmarks/lag.py                                     # every testbed: 20 hours of one core
    python benchmarks/lag.py --env-ids CartPole-v1 Hopper-v4     # only these
    python benchmarks/lag.py --env-ids Breakout-v5 Pong-v5 --seeds 1 --rates 1 --epochs 4
    python benchmarks/lag.py --only-draw                         # trains nothing, draws the results so far

Trains with `cleanba sweep`: synchronously (--no-concurrency), and lagged with every correction, at several learning
rates and numbers of epochs; larger ones move versions farther apart.  All else is equal.  A cell is an environment
with one learning rate and one number of epochs.  A run's score is the mean return of its last 100 episodes, scaled per
environment: 0 is the return at the first log point, and 1 is the mean final return of synchronous runs in the cell in
which they did best.  All cells have the same weight.

Runs are kept in benchmarks/results/policy_lag/, one file per environment (kept.py), and are not repeated, so the study
can be interrupted and continued on another machine.  Processes for different environments may run at the same time.
"""

import itertools
import math
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import kept
import machine
import numpy as np
import tyro

from cleanba.algorithms.ppo import PPO
from cleanba.files import Json
from cleanba.recipes import RECIPES
from cleanba.resolution import resolve
from cleanba.runs import curves, plot
from cleanba.runs.aggregates import Estimate, bootstrap
from cleanba.runs.curves import Curve

ROOT = Path(__file__).parents[1]
SYNCHRONOUS = "synchronous"
VARIANTS: dict[str, dict[str, Any]] = {  # how they differ from PPO's defaults
    SYNCHRONOUS: {"concurrency": False},
    "none": {},
    "proximal": {"lag_correction": "proximal"},
    "decoupled": {"lag_correction": "decoupled"},
    "vtrace": {"lag_correction": "vtrace"},
    "vtrace-2": {"lag_correction": "vtrace", "lag_trace_cap": 2.0},
    "both": {"lag_correction": "both"},
    "both-2": {"lag_correction": "both", "lag_trace_cap": 2.0},
    "synchronous-0.89": {"concurrency": False, "gae_lambda": 0.89},
}
STUDIED = ("none", "proximal", "decoupled", "vtrace", "both", "both-2")
DISTANCES = ("lag_kl", "lag_ratio_max", "lag_effective_samples")
COMPARED = ("iqm", "iqm_minus_synchronous", "improvement_over_synchronous")

# An environment's settings, by the beginning of its name.
COMMON = "--learning-rate 5e-4 --clip-coef 0.2"
VECTORS = (  # as they were before these environments had presets of their own
    f"{COMMON} --hiddens 64 64 --ent-coef 0.01 --gamma 0.99 --gae-lambda 0.95 --num-minibatches 4 --share-torso "
    "--no-norm-obs --no-norm-reward"
)
ATARIS = "--learning-rate 5e-4 --network nature"
EASIER = "--env-options img_height=60 img_width=60 --no-full-action-space --repeat-action-probability 0"
SMALLER_STEPS = "--num-envs 16 --num-steps 128 --num-minibatches 8 --clip-coef 0.2 --no-anneal-lr"
TESTBEDS = {
    "CartPole": f"{VECTORS} --num-envs 8 --num-steps 64 --total-timesteps 50000",
    "LunarLander": f"{VECTORS} --norm-reward --num-envs 16 --num-steps 128 --total-timesteps 300000",
    "Breakout": f"{ATARIS} --num-envs 32 --num-steps 64 --total-timesteps 500000",
    "Pong": f"{ATARIS} {EASIER} {SMALLER_STEPS} --total-timesteps 1200000",
    "gymnax:": "--num-envs 32 --num-steps 64 --total-timesteps 250000",  # else MinAtar's own settings
    "": "--total-timesteps 300000",  # else MuJoCo's own
}
SUITES = {
    "control": ("CartPole-v1", "LunarLander-v3"),
    "MuJoCo": ("HalfCheetah-v4", "Hopper-v4", "Walker2d-v4"),
    "MinAtar": tuple(f"gymnax:{x}-MinAtar" for x in ("Asterix", "Breakout", "Freeway", "Seaquest", "SpaceInvaders")),
}
ENVIRONMENTS = tuple(itertools.chain(*SUITES.values()))
ATARI = ("Breakout-v5", "Pong-v5")  # too slow on a CPU for the whole study, but one seed is informative


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
    variants: tuple[str, ...] = STUDIED
    """what is trained beside synchronous runs"""
    dir: Path = Path("runs/lag")
    """folder of the runs"""
    workers: int = 1
    """runs at a time"""
    only_draw: bool = False
    """train nothing, draw what is there"""


class Run(NamedTuple):
    """What the study uses of a run.  Arrays are [N], as a Curve's."""

    experiment: Json
    steps: np.ndarray
    returns: np.ndarray
    distance: dict[str, float]  # mean over the run, by DISTANCES


def settings(env_id: str) -> list[str]:
    """An environment's flags of `cleanba ppo`."""
    words = next(found for name, found in TESTBEDS.items() if env_id.startswith(name))
    return [*words.split(), "--log-frequency", "5"]


def given(env_id: str, flag: str) -> str | None:
    """The value of a flag in an environment's settings; None if they leave it to the defaults."""
    words = settings(env_id)
    return words[words.index(flag) + 1] if flag in words else None


def own_rate(env_id: str) -> float:
    """An environment's own learning rate."""
    rate = given(env_id, "--learning-rate")
    own: Any = None if rate else resolve(RECIPES["ppo"], {"env_id": env_id}, "cpu").experiment
    return float(rate or own.learning_rate)


def train(env_id: str, args: Args) -> None:
    """Train the runs that are not kept yet, cell after cell, and keep them."""
    path = place(env_id)
    there = sort(finished(path))
    for rate, epochs in itertools.product(args.rates, args.epochs):
        cell = env_id, float(f"{rate * own_rate(env_id):.6g}"), epochs
        for name in (SYNCHRONOUS, *args.variants):
            if set(there[cell][name]) >= set(range(1, args.seeds + 1)):
                continue
            folder = args.dir / path.stem / f"{cell[1]:g}-{epochs}-{name}"
            words = ["sweep", "--env-ids", env_id, "--num-seeds", str(args.seeds), "--workers", str(args.workers)]
            words += ["--dir", str(folder), "--", "ppo", *settings(env_id), *flags(name)]
            words += ["--learning-rate", f"{cell[1]:g}", "--update-epochs", str(epochs)]
            subprocess.run([sys.executable, "-m", "cleanba", *words], check=False)  # failed runs are not kept
            if folder.exists():
                keep(env_id, folder)


def fields(name: str) -> dict[str, Any]:
    """A variant's values of all fields in which variants differ."""
    names = dict.fromkeys(field for changed in VARIANTS.values() for field in changed)
    return {field: VARIANTS[name].get(field, getattr(PPO, field)) for field in names}


def flags(name: str) -> list[str]:
    """All of a variant's flags of `cleanba ppo`, even defaults: they depend on the environment."""
    words = []
    for field, value in fields(name).items():
        flag = field.replace("_", "-")
        words += [f"--{'' if value else 'no-'}{flag}"] if isinstance(value, bool) else [f"--{flag}", f"{value}"]
    return words


def place(env_id: str) -> Path:
    """Where an environment's runs are kept."""
    return machine.RESULTS / "policy_lag" / f"{env_id.replace(':', '-')}.jsonl"


def keep(env_id: str, folder: Path) -> None:
    """Keep the finished runs in a folder."""
    runs = [kept.entry(curve, points=51, distance=distance(curve)) for curve in curves.load([folder])]
    kept.add(place(env_id), [run for run in runs if run["status"] == "finished"])


def distance(curve: Curve) -> dict[str, float]:
    """How far versions were apart: the mean over a run's log points, except the first, which has no lag."""
    rows = curves.read_rows(curve.run_dir)[1:]
    return {name: float(np.nanmean(curves.column(rows, f"stats/{name}"))) for name in DISTANCES}


def finished(path: Path) -> list[Run]:
    """The runs kept there that had finished."""
    return [as_run(run) for run in kept.read(path) if run["status"] == "finished"]


def as_run(run: Json) -> Run:
    """A run that `keep` kept."""
    curve = kept.as_curve(run)
    return Run(curve.experiment, curve.steps, curve.returns, run["distance"])


# ---------------------------------------------------------------------------------------------------- what came out

Cell = tuple[str, float, int]  # environment, learning rate, epochs
Cells = dict[Cell, dict[str, list[Run]]]  # by variant
Paths = dict[Cell, dict[str, np.ndarray]]  # scores [seeds, SHARES] by variant

SHARES = np.linspace(0, 1, 51)  # of a run's steps
LEVELS = (0.25, 0.5, 0.75)  # scores for which steps are compared
KL_EDGES = (0.003, 0.01, 0.03)  # between groups of cells, by the distance between versions


def variant(e: Json) -> str | None:
    """The name of an experiment's variant; None if it is none of them."""
    own = {field: e.get(field, usual) for field, usual in fields("none").items()}  # a field may be newer than the run
    return next((name for name in VARIANTS if own == fields(name)), None)


def sort(runs: Sequence[Run]) -> dict[Cell, dict[str, dict[int, Run]]]:
    """Runs by cell, variant and seed.  Runs of lengths or variants that are not the study's are left out."""
    found: dict[Cell, dict[str, dict[int, Run]]] = defaultdict(lambda: defaultdict(dict))
    for run in runs:
        e = run.experiment
        name = variant(e)
        if name is not None and str(e["total_timesteps"]) == given(e["env_id"], "--total-timesteps"):
            found[e["env_id"], e["learning_rate"], e["update_epochs"]][name][e["seed"]] = run
    return found


def by_cell(runs: Sequence[Run]) -> Cells:
    """Runs by cell and variant, in the order of their seeds.

    Only variants with at least two seeds in a cell, and only cells that then have synchronous runs and another variant.
    """
    cells = {}
    for cell, variants in sorted(sort(runs).items()):
        seeds = {name: variants[name] for name in VARIANTS if len(variants.get(name, ())) > 1}
        if SYNCHRONOUS in seeds and len(seeds) > 1:
            cells[cell] = {name: [runs[seed] for seed in sorted(runs)] for name, runs in seeds.items()}
    return cells


def scales(cells: Cells) -> dict[str, tuple[float, float]]:
    """By environment: the returns that have scores 0 and 1."""
    first, last = defaultdict(list), defaultdict(list)
    for (env_id, _, _), variants in cells.items():
        first[env_id] += [c.returns[0] for runs in variants.values() for c in runs]
        last[env_id].append(float(np.mean([c.returns[-1] for c in variants[SYNCHRONOUS]])))
    return {env_id: (float(np.mean(first[env_id])), max(last[env_id])) for env_id in first}


def learnable(cells: Cells) -> Cells:
    """The cells of environments in which synchronous runs improved: without that there is no scale for scores."""
    better = {env_id: last > first for env_id, (first, last) in scales(cells).items()}
    for env_id in (env_id for env_id, fine in better.items() if not fine):
        print(f"{env_id} is left out: synchronous runs did not end better than runs began; train it for longer")
    return {cell: variants for cell, variants in cells.items() if better[cell[0]]}


def iqm(matrix: np.ndarray) -> np.ndarray:
    """The mean of the middle half of all scores (Agarwal et al. 2021).  [seeds, cells] -> [1]."""
    ordered = np.sort(matrix, axis=None)
    cut = ordered.size // 4  # rounded down, at either end
    return np.array([ordered[cut : ordered.size - cut].mean()])


def square(scores: Sequence[np.ndarray]) -> np.ndarray:
    """Cells with different numbers of seeds as one matrix [seeds, cells] in which every cell weighs the same."""
    rows = math.lcm(*(len(s) for s in scores))
    return np.stack([np.tile(s, rows // len(s)) for s in scores], axis=1)


def stratified(scores: Sequence[np.ndarray], statistic: Callable[[np.ndarray], np.ndarray]) -> Estimate:
    """`bootstrap` of a statistic of a matrix [seeds, cells] -> [S]."""
    return bootstrap(scores, lambda by_cell: statistic(square(by_cell)))


def improvement(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """P(X > Y) + P(X = Y) / 2 of one run each, averaged over cells (Agarwal et al. 2021).  [seeds, cells], both."""
    pairs = x[:, None] - y[None]
    return np.array([((pairs > 0) + 0.5 * (pairs == 0)).mean()])


def study(cells: Cells) -> dict[str, Any]:
    """Scores, aggregates and distances of every variant, each over the cells that it has."""
    bounds = scales(cells)
    score = lambda env_id, x: (x - bounds[env_id][0]) / (bounds[env_id][1] - bounds[env_id][0])
    paths = {  # scores along a run: [seeds, shares]
        cell: {
            name: np.stack([score(cell[0], np.interp(SHARES * c.steps[-1], c.steps, c.returns)) for c in runs])
            for name, runs in variants.items()
        }
        for cell, variants in cells.items()
    }
    interval = lambda x: [float(x.value[0]), float(x.low[0]), float(x.high[0])]
    along = lambda paths: [float(iqm(square([p[:, i] for p in paths]))[0]) for i in range(len(SHARES))]
    rows: dict[str, Any] = {}
    for name in (name for name in VARIANTS if any(name in variants for variants in cells.values())):
        own, beside = both_of(paths, name)
        ends = [p[:, -1] for p in own + beside]
        compared = lambda statistic, ends=ends: interval(stratified(ends, lambda m: statistic(*np.hsplit(m, 2))))
        rows[name] = {
            "cells": len(own),
            "iqm": interval(stratified([p[:, -1] for p in own], iqm)),
            "iqm_minus_synchronous": None if name == SYNCHRONOUS else compared(lambda x, y: iqm(x) - iqm(y)),
            "improvement_over_synchronous": None if name == SYNCHRONOUS else compared(improvement),
            "iqm_along_the_run": along(own),
            "iqm_of_synchronous_there": along(beside),
        }
        rows[name]["times_the_steps"] = times_the_steps(
            rows[name]["iqm_along_the_run"], rows[name]["iqm_of_synchronous_there"]
        )
    return {
        "scores_0_and_1_are_returns": bounds,
        "variants": rows,
        "suites": by_suite(paths),
        "steps": by_step(cells, paths),
        "environments": by_environment(paths),
        "distance": by_distance(cells, paths),
        "cells": [describe(cell, variants, paths[cell]) for cell, variants in cells.items()],
    }


def times_the_steps(curve: Sequence[float], synchronous: Sequence[float]) -> dict[str, float | None]:
    """Score -> how many times as many steps it takes as in synchronous runs; None if either never reaches it."""

    def share(curve: Sequence[float], level: float) -> float | None:
        """Where a curve first passes a level."""
        crossings = (i for i in range(len(curve) - 1) if curve[i] < level <= curve[i + 1])
        return next((float(np.interp(level, curve[i : i + 2], SHARES[i : i + 2])) for i in crossings), None)

    times = {}
    for level in LEVELS:
        ours, theirs = share(curve, level), share(synchronous, level)
        times[f"{level:g}"] = None if ours is None or theirs is None else round(ours / theirs, 3)
    return times


def both_of(paths: Paths, name: str) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """A variant's scores in the cells that it has, and the synchronous runs' scores in the same cells."""
    there = [variants for variants in paths.values() if name in variants]
    return [variants[name] for variants in there], [variants[SYNCHRONOUS] for variants in there]


def describe(cell: Cell, variants: dict[str, list[Run]], paths: dict[str, np.ndarray]) -> dict[str, Any]:
    """One cell, as it is written to the results."""
    mean = lambda runs, what: float(np.mean([run.distance[what] for run in runs]))
    return dict(zip(("env_id", "learning_rate", "update_epochs"), cell, strict=True)) | {
        "scores": {name: [round(float(x), 4) for x in path[:, -1]] for name, path in paths.items()},
        "returns": {name: float(np.mean([c.returns[-1] for c in runs])) for name, runs in variants.items()},
        "distance": {name: {what: mean(runs, what) for what in DISTANCES} for name, runs in variants.items()},
    }


def by_environment(paths: Paths) -> dict[str, dict[str, list[float]]]:
    """Mean scores along the run over all of an environment's cells, of the variants that all of them have."""
    found = {}
    for env_id in dict.fromkeys(env_id for env_id, _, _ in paths):
        cells = [variants for (name, _, _), variants in paths.items() if name == env_id]
        names = [name for name in VARIANTS if all(name in variants for variants in cells)]
        found[env_id] = {name: np.mean([v[name].mean(0) for v in cells], axis=0).round(4).tolist() for name in names}
    return found


def cost(paths: Paths, cells: Sequence[Cell], name: str) -> list[float]:
    """A variant's mean score at the end minus synchronous runs', over these cells; and a 95% interval."""
    ends = [paths[cell][which][:, -1] for which in (name, SYNCHRONOUS) for cell in cells]
    found = stratified(ends, lambda m: np.array([np.subtract(*np.hsplit(m, 2)).mean()]))
    return [float(x[0]) for x in (found.value, found.low, found.high)]


def by_suite(paths: Paths) -> dict[str, dict[str, Any]]:
    """What each variant costs in the cells of a suite's environments."""
    rows: dict[str, dict[str, Any]] = {}
    for suite, envs in SUITES.items():
        for name in VARIANTS:
            there = [cell for cell, variants in paths.items() if cell[0] in envs and name in variants]
            if there and name != SYNCHRONOUS:
                row = {"cells": len(there), "score_minus_synchronous": cost(paths, there, name)}
                rows.setdefault(suite, {})[name] = row
    return rows


def by_step(cells: Cells, paths: Paths) -> list[dict[str, Any]]:
    """By suite, learning rate and epochs: the cost of variants that all cells have, and how far apart versions are."""
    rows = []
    multiple = lambda cell: round(cell[1] / own_rate(cell[0]), 2)
    for suite, envs in SUITES.items():
        steps = sorted({(multiple(cell), cell[2]) for cell in paths if cell[0] in envs})
        for step in steps:
            there = [cell for cell in paths if cell[0] in envs and (multiple(cell), cell[2]) == step]
            names = [name for name in VARIANTS if name != SYNCHRONOUS and all(name in paths[cell] for cell in there)]
            kl = lambda name, there=there: float(np.mean([r.distance["lag_kl"] for c in there for r in cells[c][name]]))
            costs = {n: {"score_minus_synchronous": cost(paths, there, n), "lag_kl": kl(n)} for n in names}
            row = {"suite": suite, "times_its_own_rate": step[0], "update_epochs": step[1], "cells": len(there)}
            rows.append(row | {"variants": costs})
    return rows


def by_distance(cells: Cells, paths: Paths) -> list[dict[str, Any]]:
    """What lag without a correction costs, by KL: for groups of cells with a similar distance between versions."""
    rows = []
    kl = {cell: np.mean([run.distance["lag_kl"] for run in v["none"]]) for cell, v in cells.items() if "none" in v}
    for low, high in itertools.pairwise((0.0, *KL_EDGES, np.inf)):
        there = [cell for cell, x in kl.items() if low <= x < high]
        if there:
            runs = [run for cell in there for run in cells[cell]["none"]]
            rows.append(
                {"kl_from": low, "kl_below": None if high == np.inf else high, "cells": len(there)}
                | {what: float(np.mean([run.distance[what] for run in runs])) for what in DISTANCES}
                | {"score_minus_synchronous": cost(paths, there, "none")}
            )
    return rows


def one_seed(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Cells of which every variant has one seed: their returns, from which nothing is aggregated."""
    rows = []
    for cell, variants in sorted(sort(runs).items()):
        if SYNCHRONOUS in variants and len(variants) > 1 and all(len(seeds) == 1 for seeds in variants.values()):
            alone = {name: next(iter(variants[name].values())) for name in VARIANTS if name in variants}
            rows.append(
                dict(zip(("env_id", "learning_rate", "update_epochs"), cell, strict=True))
                | {"steps": int(alone[SYNCHRONOUS].steps[-1])}
                | {"returns": {name: float(run.returns[-1]) for name, run in alone.items()}}
                | {"lag_kl": {name: run.distance["lag_kl"] for name, run in alone.items()}}
            )
    return rows


# ------------------------------------------------------------------------------------------------------ showing it


def draw(found: dict[str, Any]) -> Any:
    """Five panels: scores, improvement, what each suite costs, curves, and what distance between versions does."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12.0, 6.8), layout="constrained")
    scores, better, suites, along, apart = figure.subplot_mosaic("abc;dee").values()
    names = list(found["variants"])
    lagged = [name for name in names if name != SYNCHRONOUS]
    for i, name in enumerate(lagged):
        row, style = found["variants"][name], looks(names)[name]
        for panel, what in ((scores, "iqm_minus_synchronous"), (better, "improvement_over_synchronous")):
            value, low, high = row[what]
            panel.plot([low, high], [i, i], color=style["color"], linewidth=6, alpha=0.35, solid_capstyle="butt")
            panel.plot(value, i, style["marker"], color=style["color"], markersize=6)
    labels = [f"{name}\n{found['variants'][name]['cells']} cells" for name in lagged]
    for panel, title, equal in (
        (scores, "score at the end (IQM) minus synchronous", 0.0),
        (better, "probability to beat synchronous", 0.5),
    ):
        panel.set_title(title, fontsize=9)
        panel.axvline(equal, color="0.5", linewidth=0.8)
        panel.set_yticks(range(len(lagged)), labels)
        panel.set_ylim(len(lagged) - 0.5, -0.5)
    most = max(row["cells"] for row in found["variants"].values())
    for i, name in enumerate(names):
        row = found["variants"][name]
        if row["cells"] == most:  # over fewer cells it would not be comparable
            marks = dict(linewidth=1.4, markersize=4.5, markevery=(4 + i, 12))
            along.plot(SHARES, row["iqm_along_the_run"], **marks, **looks(names)[name])
    along.set_xlabel("share of the steps", fontsize=8.5)
    along.set_ylabel(f"score (IQM of {most} cells)", fontsize=8.5)
    draw_suites(suites, found, names)
    draw_distance(apart, found)
    for panel in (scores, better, suites, along, apart):
        plot.dress(panel, 8.5)
    caption = (
        f"{most} cells (environment, learning rate, epochs), {seeds_of(found)} seeds each. Bars: 95% stratified "
        "bootstrap intervals (2,000 resamples of every cell's seeds)."
    )
    plot.legend_below(figure, handles(names), caption)
    return figure


def looks(names: Sequence[str]) -> dict[str, Any]:
    """How each variant is drawn."""
    return {name: plot.look(i) for i, name in enumerate(names)}


def handles(names: Sequence[str]) -> list[Any]:
    """A legend's entries."""
    from matplotlib.lines import Line2D

    return [Line2D([], [], label=name, markersize=4.5, **look) for name, look in looks(names).items()]


def seeds_of(found: dict[str, Any]) -> str:
    """How many seeds a cell has."""
    return plot.span(len(scores) for row in found["cells"] for scores in row["scores"].values())


def draw_suites(panel: Any, found: dict[str, Any], names: Sequence[str]) -> None:
    """What each variant costs in each suite."""
    for i, (_, rows) in enumerate(found["suites"].items()):
        for j, (name, row) in enumerate(rows.items()):
            (value, low, high), style = row["score_minus_synchronous"], looks(names)[name]
            y = i + 0.8 * ((j + 0.5) / len(rows) - 0.5)
            panel.plot([low, high], [y, y], color=style["color"], linewidth=3, alpha=0.35, solid_capstyle="butt")
            panel.plot(value, y, style["marker"], color=style["color"], markersize=4)
    panel.axvline(0, color="0.5", linewidth=0.8)
    panel.set_yticks(range(len(found["suites"])), found["suites"])
    panel.set_ylim(len(found["suites"]) - 0.5, -0.5)
    panel.set_title("mean score minus synchronous, by suite", fontsize=9)


def draw_distance(panel: Any, found: dict[str, Any]) -> None:
    """What `none` costs in every cell, by the distance between its versions; and the mean of cells of like distance."""
    from matplotlib.lines import Line2D

    envs = dict.fromkeys(row["env_id"] for row in found["cells"])
    shapes = dict(zip(envs, itertools.cycle(plot.MARKERS), strict=False))
    for row in found["cells"]:
        if "none" in row["scores"]:
            cost = np.mean(row["scores"]["none"]) - np.mean(row["scores"][SYNCHRONOUS])
            kl = row["distance"]["none"]["lag_kl"]
            panel.plot(kl, cost, shapes[row["env_id"]], color=colours(envs)[row["env_id"]], markersize=4.5, alpha=0.8)
    for row in found["distance"]:
        value, low, high = row["score_minus_synchronous"]
        panel.errorbar(row["lag_kl"], value, [[value - low], [high - value]], fmt="_k", markersize=14, capsize=3)
    panel.axhline(0, color="0.5", linewidth=0.8)
    panel.set_xscale("log")
    panel.tick_params(axis="x", which="minor", labelbottom=False)
    panel.set_xlabel("KL between versions (stats/lag_kl), mean of a cell", fontsize=8.5)
    panel.set_ylabel("none: score minus synchronous", fontsize=8.5)
    marks = [
        Line2D([], [], color=colours(envs)[e], linestyle="", marker=m, markersize=4, label=short(e))
        for e, m in shapes.items()
    ]
    panel.legend(handles=marks, fontsize=6, ncols=2)


def colours(envs: Sequence[str] | dict[str, None]) -> dict[str, str]:
    """A colour for each environment."""
    return dict(zip(envs, itertools.cycle(plot.COLOURS), strict=False))


def short(env_id: str) -> str:
    """An environment's name without its suite and version."""
    return env_id.partition(":")[2].removesuffix("-MinAtar") or env_id


def draw_environments(found: dict[str, Any]) -> Any:
    """Mean scores along the run, one panel per environment."""
    from matplotlib.figure import Figure

    curves = found["environments"]
    rows, columns = plot.grid_of(len(curves))
    figure = Figure(figsize=(2.7 * columns + 0.6, 2.0 * rows + 0.9), layout="constrained")
    panels = figure.subplots(rows, columns, squeeze=False).ravel()
    names = list(found["variants"])
    for panel, (env_id, by_name) in zip(panels, curves.items(), strict=False):
        for name, curve in by_name.items():
            panel.plot(SHARES, curve, **{**looks(names)[name], "marker": ""}, linewidth=1.3)
        panel.set_title(short(env_id), fontsize=8.5)
        plot.dress(panel, 7.5)
    for panel in panels[len(curves) :]:
        panel.set_visible(False)
    caption = (
        "Mean scores of all cells over the share of the steps, of the variants that all of an environment's cells have."
    )
    drawn = set(itertools.chain(*curves.values()))
    plot.legend_below(figure, [handle for handle in handles(names) if handle.get_label() in drawn], caption)
    return figure


def tables(found: dict[str, Any]) -> str:
    """Markdown: variants over all cells, by distance, by cell; and cells with one seed."""
    names = list(found["variants"])
    of = lambda numbers: "" if numbers is None else "{:.2f} ({:.2f} to {:.2f})".format(*numbers)
    overall = [
        [name, str(row["cells"]), *(of(row[what]) for what in COMPARED)]
        + ["" if x is None or name == SYNCHRONOUS else f"{x:.2f}" for x in row["times_the_steps"].values()]
        for name, row in found["variants"].items()
    ]
    steps = [f"steps to {level:g}, times synchronous" for level in LEVELS]
    distance = [
        [f"{row['kl_from']:g} to {row['kl_below'] or 'more'}", str(row["cells"])]
        + [f"{row[name]:.3g}" for name in DISTANCES]
        + ["{:+.3f} ({:+.3f} to {:+.3f})".format(*row["score_minus_synchronous"])]
        for row in found["distance"]
    ]
    suites = []
    for name in names[1:]:
        rows = [by_name.get(name) for by_name in found["suites"].values()]
        cost_of = lambda row: "{:+.2f} ({:+.2f} to {:+.2f})".format(*row["score_minus_synchronous"])
        suites.append([name, *("" if row is None else f"{cost_of(row)}, {row['cells']}" for row in rows)])
    by_size = []
    there = [name for name in names[1:] if any(name in row["variants"] for row in found["steps"])]
    for row in found["steps"]:
        own = [row["variants"].get(name) for name in there]
        by_size.append(
            [row["suite"], f"{row['times_its_own_rate']:g}", f"{row['update_epochs']}", f"{row['cells']}"]
            + ["" if x is None else f"{x['score_minus_synchronous'][0]:+.2f} ({x['lag_kl']:.3f})" for x in own]
        )
    head = lambda row: [row["env_id"], f"{row['learning_rate']:.3g}", str(row["update_epochs"])]
    cells = []
    for row in found["cells"]:
        scores = [f"{np.mean(row['scores'][name]):.2f}" if name in row["scores"] else "" for name in names]
        lagged = row["distance"].get("none", {})
        cells.append([*head(row), *scores, *(f"{lagged.get(name, float('nan')):.3g}" for name in DISTANCES)])
    apart = ["KL", "greatest ratio", "effective samples"]
    cell = ["environment", "learning rate", "epochs"]
    made = [
        plot.markdown(
            ["variant", "cells", "IQM of scores", "minus synchronous", "probability to beat it", *steps], overall
        ),
        plot.markdown(["minus synchronous, cells", *found["suites"]], suites),
        plot.markdown(["minus synchronous (lag_kl)", "times its own rate", "epochs", "cells", *there], by_size),
        plot.markdown(["KL between versions", "cells", *apart, "`none` minus synchronous"], distance),
        plot.markdown([*cell, *names, *apart], cells),
    ]
    if found["one_seed"]:
        single = [
            [
                *head(row),
                f"{row['steps']:,}",
                *(plot.number(row["returns"][n]) if n in row["returns"] else "" for n in VARIANTS),
            ]
            for row in found["one_seed"]
        ]
        made.append(plot.markdown([*cell, "steps", *VARIANTS], single))
    return "\n\n".join(made)


def main(args: Args) -> None:
    """Train, print tables, write results and figure."""
    if not args.only_draw:
        for env_id in args.env_ids:
            train(env_id, args)
    runs = [run for path in sorted((machine.RESULTS / "policy_lag").glob("*.jsonl")) for run in finished(path)]
    cells = learnable(by_cell(runs))
    if not cells:
        sys.exit("no cell yet that shows learning, and of which every variant has two seeds, is kept; train on")
    found = study(cells) | {"one_seed": one_seed(runs)}
    print(tables(found))
    path = machine.save("policy_lag", found)
    drawn = plot.save(draw(found), ROOT / "static" / "policy_lag")
    drawn += plot.save(draw_environments(found), ROOT / "static" / "policy_lag_environments")
    print(f"written: benchmarks/results/{path.name}, {', '.join(f'static/{p.name}' for p in drawn)}")


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
