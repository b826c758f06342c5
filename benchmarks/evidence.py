"""Draws the figures of README and documentation from committed results, for light and dark pages.

    python benchmarks/evidence.py             # draws; seconds
    python benchmarks/evidence.py --train     # first trains what placement.svg and resume.svg show: five minutes

The results on speed and learning come from peers.py, dqn_ladder.py, sac_td3.py and keep_curves.py.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import kept
import machine
import matplotlib
import numpy as np
import tyro

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from cleanba.environments.published import published_return
from cleanba.runs import curves

ROOT = Path(__file__).parents[1]
FIGURES = ROOT / "static" / "figures"
WIDTH = 8.2  # inches: with 11 points, readable at the width of a README

EXPERIMENT = (
    "ppo --env-id CartPole-v1 --total-timesteps 150000 --num-envs 24 --num-actors 2 --num-shards 6 --num-steps 32 "
    "--hiddens 64 64 --learning-rate 1e-3 --num-minibatches 4 --clip-coef 0.2 --log-frequency 2"
)
PLACEMENTS = {
    "one device acts and learns": "--actor-device-ids 0 --learner-device-ids 0",
    "one acts, three learn": "--actor-device-ids 0 --learner-device-ids 1 2 3",
    "two act, six learn": "--actor-device-ids 0 1 --learner-device-ids 2 3 4 5 6 7",
}
KILLS = (0.17, 0.42, 0.71)  # shares of the updates after which the run is killed; it goes on elsewhere each time
NEXT = ("one acts, three learn", "two act, six learn", "one device acts and learns")


@dataclass(frozen=True)
class Args:
    """Flags of the script."""

    train: bool = False
    """train the runs of placement.svg and resume.svg anew, and keep them in results/evidence.json"""


class Colours(NamedTuple):
    """Of a light or a dark page."""

    ink: str
    quiet: str
    faint: str
    first: str
    second: str


LIGHT = Colours("#1f2328", "#59636e", "#d1d9e0", "#0969da", "#bc4c00")
DARK = Colours("#f0f6fc", "#9198a1", "#3d444d", "#4493f8", "#f0883e")

# --------------------------------------------------------------------------------------------------------- training


def start(run_dir: Path, placement: str) -> subprocess.Popen[bytes]:
    """The experiment on a placement, as a process of its own."""
    words = ["-m", "cleanba", *EXPERIMENT.split(), *PLACEMENTS[placement].split(), "--run-dir", str(run_dir)]
    environment = {**os.environ, "JAX_NUM_CPU_DEVICES": "8"}
    return subprocess.Popen([sys.executable, *words, "--checkpoint-frequency", "10"], env=environment,
                            stdout=subprocess.DEVNULL)  # fmt: skip


def finished(process: subprocess.Popen[bytes]) -> None:
    if process.wait():
        sys.exit(f"the run ended with {process.returncode}")


def logged(run_dir: Path) -> list[dict[str, Any]]:
    path = run_dir / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def entry(run_dir: Path) -> dict[str, Any]:
    """A run's curve and digest."""
    rows = [row for row in logged(run_dir) if "charts/episodic_return" in row]
    result = json.loads((run_dir / "result.json").read_text())
    return {
        "steps": [row["global_step"] for row in rows],
        "returns": [round(row["charts/episodic_return"], 2) for row in rows],
        "params_digest": result["params_digest"],
    }


def train() -> None:
    """Train on each placement, and once more with several kills; the digests must agree."""
    with tempfile.TemporaryDirectory() as folder:
        runs = {}
        for i, placement in enumerate(PLACEMENTS):
            run_dir = Path(folder) / str(i)
            finished(start(run_dir, placement))
            runs[placement] = entry(run_dir)
        updates = json.loads((Path(folder) / "0" / "result.json").read_text())["update"]
        run_dir, kills = Path(folder) / "killed", []
        process = start(run_dir, "one device acts and learns")
        for share, placement in zip(KILLS, NEXT, strict=True):
            while not (rows := logged(run_dir)) or rows[-1]["update"] < share * updates:
                if process.poll() is not None:
                    sys.exit("the run ended before it was killed")
                time.sleep(0.02)
            process.send_signal(signal.SIGKILL)
            process.wait()
            kills.append({"step": logged(run_dir)[-1]["global_step"], "went_on": placement})
            process = start(run_dir, placement)
        finished(process)
        killed = entry(run_dir) | {"kills": kills}
    digests = {run["params_digest"] for run in [*runs.values(), killed]}
    machine.save("evidence", {"experiment": EXPERIMENT, "placements": runs, "killed": killed})
    if len(digests) != 1:
        sys.exit(f"DIGESTS DIFFER: {digests}")


# ---------------------------------------------------------------------------------------------------------- drawing


def figure(height: float, columns: int = 1, c: Colours = LIGHT) -> tuple[Figure, list[Axes]]:
    """A figure with a row of panels in these colours."""
    made, axes = plt.subplots(1, columns, figsize=(WIDTH, height), squeeze=False, layout="constrained")
    for ax in axes[0]:
        ax.set_facecolor("none")
        ax.spines[["top", "right"]].set_visible(False)
        ax.spines[["left", "bottom"]].set_color(c.faint)
        ax.tick_params(colors=c.quiet, labelsize=10, length=3)
        ax.xaxis.label.set_color(c.quiet)
        ax.yaxis.label.set_color(c.quiet)
        ax.title.set_color(c.ink)
    return made, list(axes[0])


def thousands(x: float, _: object = None) -> str:
    """As 2M, 150k and 40."""
    return f"{x / 1e6:g}M" if abs(x) >= 1e6 else f"{x / 1e3:g}k" if abs(x) >= 1e3 else f"{x:g}"


def speeds() -> list[tuple[str, float, float, float]]:
    """Training: steps per second of Cleanba, of a plain PyTorch loop, and how many times as fast Cleanba is."""
    peers, replay = machine.saved("peers_cpu_zen3")["parts"], machine.saved("sac_td3_cpu_zen3")["figures"]
    ladder = machine.saved("dqn_ladder_cpu")["steps_per_second"]

    def on_policy(name: str) -> tuple[float, float, float]:
        speed = peers[name]["steps_per_second"]
        return speed["ours"]["median"], speed["PyTorch"]["median"], peers[name]["ratio"]["median"]

    def off_policy(name: str) -> tuple[float, float, float]:
        speed = replay[name]["steps_per_second"]
        return speed["ours"]["median"], speed["plain PyTorch"]["median"], speed["ratio"]

    dqn, pytorch = ladder["compiled, 32"]["median"], ladder["PyTorch"]["median"]
    return [
        ("PPO, HalfCheetah", *on_policy("halfcheetah")),
        ("SAC, HalfCheetah", *off_policy("sac")),
        ("TD3, HalfCheetah", *off_policy("td3")),
        ("PPO, Breakout (Nature CNN)", *on_policy("breakout")),
        ("DQN, Pong (Nature CNN)", dqn, pytorch, dqn / pytorch),
    ]


def draw_speed(c: Colours) -> Figure:
    made, (ax,) = figure(2.6, 1, c)
    beside = {"textcoords": "offset points", "va": "center"}
    for i, (_, ours, theirs, ratio) in enumerate(speeds()):
        ax.barh(i, ratio, color=c.first, height=0.62)
        ax.annotate(f"{ratio:.2g}×" if ratio >= 9.95 else f"{ratio:.1f}×", (ratio, i), (6, 0), color=c.ink,
                    fontsize=12, weight="bold", **beside)  # fmt: skip
        ax.annotate(f"{ours:,.0f} : {theirs:,.0f} steps/s", (ratio, i), (44, 0), color=c.quiet, fontsize=10, **beside)
    ax.set_yticks(range(5), [name for name, *_ in speeds()], color=c.ink, fontsize=11)
    ax.invert_yaxis()
    ax.set_xscale("log")
    ax.set_xlim(1, 90)
    ax.minorticks_off()
    ax.set_xticks([1, 2, 5, 10, 20], ["PyTorch = 1", "2", "5", "10", "20"])
    ax.axvline(1, color=c.quiet, linewidth=1)
    ax.set_title("Training speed over a plain PyTorch loop, two cores (Zen 3)", loc="left", fontsize=12, color=c.ink)
    return made


def of_variant(study: str, algorithm: str, env: str) -> list[curves.Curve]:
    """The kept curves of an algorithm on an environment, with concurrency, its default."""
    known = kept.read(machine.RESULTS / f"curves_{study}.jsonl")
    fits = lambda e: e["algorithm"] == algorithm and env in e["env_id"] and e["concurrency"]
    return [kept.as_curve(run) for run in known if fits(run["experiment"])]


def published(algorithm: str, env: str) -> float:
    """The published return of an algorithm on an environment; 0 where none is known."""
    found = published_return({"algorithm": algorithm, "env_id": env})
    return found.value if found else 0.0


def mean_and_range(runs: Sequence[curves.Curve]) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Steps, and over the seeds mean, least and greatest return."""
    end = min(run.steps[-1] for run in runs)
    begin = max(run.steps[np.isfinite(run.returns)][0] for run in runs)
    steps = np.linspace(begin, end, 200)
    there = [np.isfinite(run.returns) for run in runs]
    all_of = np.array([np.interp(steps, r.steps[t], r.returns[t]) for r, t in zip(runs, there, strict=True)])
    return steps, all_of.mean(0), all_of.min(0), all_of.max(0)


def learning_panel(
    ax: Axes, c: Colours, title: str, lines: Sequence[tuple[str, str, Sequence[curves.Curve]]], peers: dict[str, float]
) -> None:
    """Curves [(label, colour, runs)], and what others publish as dashed lines {label: return}."""
    for label, colour, runs in lines:
        steps, mean, low, high = mean_and_range(runs)
        ax.plot(steps, mean, color=colour, linewidth=2.2, label=label)
        if len(runs) > 1:
            ax.fill_between(steps, low, high, color=colour, alpha=0.18, linewidth=0)
    for label, value in peers.items():
        ax.axhline(value, color=c.quiet, linewidth=1.4, linestyle=(0, (4, 3)), label=label)
    ax.set_title(title, fontsize=12, color=c.ink)
    ax.set_ylim(bottom=min(0, ax.get_ylim()[0]))
    ax.xaxis.set_major_formatter(thousands)
    ax.yaxis.set_major_formatter(thousands)
    ax.locator_params(axis="x", nbins=4)
    ax.locator_params(axis="y", nbins=5)


def legend(made: Figure, ax: Axes, c: Colours, columns: int = 4) -> None:
    """One legend below all panels, in space of its own."""
    handles, labels = ax.get_legend_handles_labels()
    made.legend(
        handles, labels, loc="outside lower center", ncols=columns, frameon=False, labelcolor=c.ink, fontsize=11
    )


def draw_learning(c: Colours) -> Figure:
    made, axes = figure(2.8, 3, c)
    for ax, game in zip(axes, ("Asterix", "Breakout", "SpaceInvaders"), strict=True):
        runs = of_variant("minatar", "ppo", f"{game}-MinAtar")
        learning_panel(ax, c, f"MinAtar {game}", [(f"Cleanba's PPO, {len(runs)} seeds", c.first, runs)],
                       {"gymnax's PPO, published": published("ppo", f"{game}-MinAtar")})  # fmt: skip
    axes[0].set_ylabel("return", fontsize=11)
    axes[1].set_xlabel("environment steps", fontsize=11)
    legend(made, axes[0], c)
    return made


def draw_minatar(c: Colours) -> Figure:
    made, axes = figure(2.8, 5, c)
    for ax, game in zip(axes, ("Asterix", "Breakout", "Freeway", "Seaquest", "SpaceInvaders"), strict=True):
        lines = [(name.upper(), colour, of_variant("minatar", name, f"{game}-MinAtar"))
                 for name, colour in (("ppo", c.first), ("impala", c.second))]  # fmt: skip
        learning_panel(
            ax, c, game, lines, {"gymnax's PPO": level} if (level := published("ppo", f"{game}-MinAtar")) else {}
        )
        ax.locator_params(axis="x", nbins=3)
    axes[2].set_xlabel("environment steps", fontsize=11)
    legend(made, axes[0], c)
    return made


def draw_mujoco(c: Colours) -> Figure:
    made, axes = figure(3.0, 3, c)
    for ax, env in zip(axes, ("HalfCheetah", "Hopper", "Walker2d"), strict=True):
        lines = [(name.upper(), colour, of_variant("sac_td3", name, f"{env}-v5"))
                 for name, colour in (("sac", c.first), ("td3", c.second))]  # fmt: skip
        learning_panel(ax, c, env, lines, {})
        for name, colour, dash in (("sac", c.first, (4, 3)), ("td3", c.second, (1, 2))):
            ax.axhline(published(name, f"{env}-v5"), color=colour, linewidth=1.4, linestyle=(0, dash),
                       label=f"CleanRL's {name.upper()}")  # fmt: skip
    axes[0].set_ylabel("return in training", fontsize=11)
    axes[1].set_xlabel("environment steps", fontsize=11)
    legend(made, axes[0], c)
    return made


def short(digest: str) -> str:
    return digest.removeprefix("sha256:")[:8]


def label_curves(ax: Axes, title: str, c: Colours) -> None:
    """Title, axes and legend of returns over environment steps."""
    ax.xaxis.set_major_formatter(thousands)
    ax.set_ylabel("return", fontsize=11)
    ax.set_xlabel("environment steps", fontsize=11)
    ax.set_title(title, loc="left", fontsize=12, color=c.ink)
    ax.legend(loc="lower right", frameon=False, labelcolor=c.ink, fontsize=11)


def draw_placement(c: Colours) -> Figure:
    """Three curves on top of one another, the bottom one widest; beside them the digests."""
    runs = machine.saved("evidence")["placements"]
    made, (ax,) = figure(2.7, 1, c)
    styles = ((c.faint, 11.0), (c.second, 5.0), (c.first, 1.6))
    for (name, run), (colour, width) in zip(runs.items(), styles, strict=True):
        label = f"{name}: {short(run['params_digest'])}"
        ax.plot(run["steps"], run["returns"], color=colour, linewidth=width, label=label, solid_capstyle="round")
    label_curves(ax, "Three placements, one curve, one digest", c)
    return made


def draw_resume(c: Colours) -> Figure:
    """An uninterrupted run, and one that was killed several times, on top of one another."""
    found = machine.saved("evidence")
    whole, killed = next(iter(found["placements"].values())), found["killed"]
    made, (ax,) = figure(2.7, 1, c)
    ax.plot(whole["steps"], whole["returns"], color=c.faint, linewidth=9, solid_capstyle="round",
            label=f"never interrupted: {short(whole['params_digest'])}")  # fmt: skip
    ax.plot(killed["steps"], killed["returns"], color=c.first, linewidth=1.8,
            label=f"killed three times: {short(killed['params_digest'])}")  # fmt: skip
    for kill in killed["kills"]:
        at = int(np.searchsorted(killed["steps"], kill["step"]))
        ax.plot(kill["step"], killed["returns"][at], "X", color=c.second, markersize=11, clip_on=False, zorder=4)
        ax.annotate("kill -9", (kill["step"], killed["returns"][at]), (6, -16), textcoords="offset points",
                    color=c.second, fontsize=10)  # fmt: skip
    label_curves(ax, "Killed, and resumed on other devices: the same bits", c)
    return made


DRAWN: dict[str, Callable[[Colours], Figure]] = {
    "speed": draw_speed,
    "learning": draw_learning,
    "placement": draw_placement,
    "resume": draw_resume,
    "minatar": draw_minatar,
    "mujoco": draw_mujoco,
}


BADGE = """<svg xmlns="http://www.w3.org/2000/svg" width="{whole}" height="20" role="img" aria-label="{name}: {value}">
<rect width="{whole}" height="20" rx="3" fill="#555"/>
<path d="M{left} 0h{right}a3 3 0 0 1 3 3v14a3 3 0 0 1-3 3h-{right}z" fill="{colour}"/>
<g fill="#fff" font-family="Verdana,DejaVu Sans,sans-serif" font-size="11" text-anchor="middle">
<text x="{middle}" y="14">{name}</text><text x="{centre}" y="14">{value}</text></g></svg>
"""


def badge(name: str, value: str, colour: str = "#0969da") -> str:
    """A name and its value as an SVG 20 pixels high."""
    left, right = 7 * len(name) + 10, 7 * len(value) + 10
    return BADGE.format(
        name=name, value=value, colour=colour, whole=left + right, left=left, right=right - 3, middle=left / 2,
        centre=left + right / 2,
    )  # fmt: skip


def badges() -> dict[str, str]:
    """What pyproject.toml says of the project, and nothing else."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    kinds = [kind.split(" :: ") for kind in project["classifiers"]]
    minors = [kind[2] for kind in kinds if kind[:2] == ["Programming Language", "Python"] and len(kind) == 3]
    versions = [minor for minor in minors if "." in minor]
    return {
        "python": badge("python", f"{versions[0]} to {versions[-1]}"),
        "licence": badge("licence", project["license"], "#1a7f37"),
        "platform": badge("platform", next(kind[-1] for kind in kinds if kind[0] == "Operating System"), "#57606a"),
    }


def draw() -> Iterator[Path]:
    """The badges, and every figure in light and dark."""
    FIGURES.mkdir(parents=True, exist_ok=True)
    for name, svg in badges().items():
        path = FIGURES / f"badge_{name}.svg"
        path.write_text(svg)
        yield path
    with matplotlib.rc_context({"svg.fonttype": "path", "svg.hashsalt": "cleanba", "font.size": 11}):
        for name, drawn in DRAWN.items():
            for mode, colours in (("light", LIGHT), ("dark", DARK)):
                made, path = drawn(colours), FIGURES / f"{name}_{mode}.svg"
                made.savefig(path, transparent=True, metadata={"Date": None})
                plt.close(made)
                yield path


def main(args: Args) -> None:
    """Train if asked to, and draw."""
    if args.train:
        train()
    for path in draw():
        print(f"wrote {path.relative_to(ROOT)}")


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
