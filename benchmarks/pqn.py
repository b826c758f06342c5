"""What PQN learns: small environments with CleanRL's settings, MinAtar with the authors', with and without a cut.

    python benchmarks/pqn.py                     # what is missing: days on few cores; interrupted, it goes on
    python benchmarks/pqn.py --studies small     # an hour
    python benchmarks/pqn.py --seeds             # nothing: tables and figures of what is kept

Runs lie in --runs until they are finished.  Their curves are kept in benchmarks/results/curves_pqn.jsonl (kept.py) and
drawn to static/pqn_<study>.png; the table is benchmarks/results/curves_pqn.md.
"""

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import kept
import machine
import matplotlib
import numpy as np
import tyro

from cleanba.files import Json, write_whole
from cleanba.runs import curves, plot

ROOT = Path(__file__).parents[1]
FILE = machine.RESULTS / "curves_pqn.jsonl"


class Study(NamedTuple):
    """Environments x variants."""

    env_ids: tuple[str, ...]
    variants: dict[str, str]
    """name -> flags"""


CLEANRL, MILLION, CUT = "--preset cleanrl-classic-control", "--total-timesteps 1000000", "--watkins-cut"
GAMES = tuple(f"gymnax:{name}-MinAtar" for name in ("Breakout", "Asterix", "Freeway", "Seaquest", "SpaceInvaders"))
STUDIES = {
    # Beside CleanRL's 495 and -96 after as many steps (`docs/rl-algorithms/pqn.md` there).
    "small": Study(
        ("CartPole-v1", "Acrobot-v1"),
        {"CleanRL's": CLEANRL, "CleanRL's, cut": f"{CLEANRL} {CUT}", "preset": "", "preset, cut": CUT},
    ),
    "cut": Study(GAMES[:1], {"preset, 1M": MILLION, "preset, 1M, cut": f"{MILLION} {CUT}"}),
    "minatar": Study(GAMES, {"preset": ""}),
}  # fmt: skip


@dataclass(frozen=True)
class Args:
    """Flags of the benchmark."""

    studies: tuple[str, ...] = tuple(STUDIES)
    """of small, cut and minatar"""
    env_ids: tuple[str, ...] = ()
    """these environments of the studies (default: all)"""
    seeds: tuple[int, ...] = (1, 2, 3)
    """seeds of each"""
    runs: Path = Path("runs/pqn")
    """where runs lie"""


class Run(NamedTuple):
    study: str
    variant: str
    env_id: str
    seed: int

    @classmethod
    def of(cls, line: Json) -> "Run":
        """The run that a kept line is of."""
        return cls(line["study"], line["variant"], line["experiment"]["env_id"], line["experiment"]["seed"])

    @property
    def flags(self) -> list[str]:
        """Of `cleanba pqn`."""
        more = STUDIES[self.study].variants[self.variant].split()
        return ["--env-id", self.env_id, "--seed", str(self.seed), *more]


def wanted(args: Args) -> Iterator[Run]:
    """All runs of these studies, one seed of all after the other."""
    for seed in args.seeds:
        for name in args.studies:
            study = STUDIES[name]
            for env_id in study.env_ids:
                if env_id in args.env_ids or not args.env_ids:
                    yield from (Run(name, variant, env_id, seed) for variant in study.variants)


def train(run: Run, folder: Path) -> None:
    """Train it, or go on with it, and keep its curve."""
    words = f"{run.study}-{run.variant}-{run.env_id}-{run.seed}"
    run_dir = folder / "".join(c if c.isalnum() else "_" for c in words)
    print(f"cleanba pqn {' '.join(run.flags)}", flush=True)
    command = [sys.executable, "-m", "cleanba", "pqn", *run.flags, "--run-dir", run_dir]
    ended = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if ended.returncode:
        sys.exit(f"{run_dir} failed:\n{ended.stdout[-2000:]}")
    (curve,) = curves.load([run_dir])
    kept.add(FILE, [kept.entry(curve, study=run.study, variant=run.variant)])


def table(lines: list[Json]) -> str:
    """The last return of each seed, by study, environment and variant."""
    rows = [
        "| study | environment | settings | last 100 episodes, by seed | mean | minutes |",
        "|---|---|---|---|---|---|",
    ]
    for name, study in STUDIES.items():
        for env_id in study.env_ids:
            for variant in study.variants:
                runs = [x for x in lines if Run.of(x)[:3] == (name, variant, env_id)]
                if runs:
                    last = [run["returns"][-1] for run in runs]
                    minutes = np.mean([run["seconds"][-1] for run in runs]) / 60
                    each = ", ".join(f"{x:.4g}" for x in last)
                    rows.append(f"| {name} | {env_id} | {variant} | {each} | {np.mean(last):.4g} | {minutes:.1f} |")
    return "\n".join(rows) + "\n"


def main(args: Args) -> None:
    """Train what is missing, then write the table and draw."""
    for run in wanted(args):
        if run not in map(Run.of, kept.read(FILE)):
            train(run, args.runs)
    lines = kept.read(FILE)
    if not lines:
        sys.exit(f"nothing is kept in {FILE.relative_to(ROOT)} yet; name seeds")
    text = table(lines)
    write_whole(FILE.with_suffix(".md"), text)
    print(text)
    for name in STUDIES:
        groups = curves.group([kept.as_curve(line) for line in lines if line["study"] == name])
        if groups:
            with matplotlib.rc_context({"text.parse_math": False}):
                plot.save(plot.draw_curves(groups, "steps"), ROOT / "static" / f"pqn_{name}")


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
