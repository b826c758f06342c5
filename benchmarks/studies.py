"""What the benchmarks of learning share: a study trains each variant on each environment with each seed.

Runs stay in a folder, so that an interrupted study can go on.  Their curves are kept in
benchmarks/results/curves_<name>.jsonl (kept.py), where the next call finds them, and drawn to
static/<name>_<study>.png; the table is benchmarks/results/curves_<name>.md.  Where exploration
hides what is learnt, each run is also evaluated.
"""

import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import kept
import machine
import matplotlib
import numpy as np

from cleanba.environments.published import published_return
from cleanba.files import Json, read_json, write_whole
from cleanba.runs import curves, plot
from cleanba.runs.log import is_finished

ROOT = Path(__file__).parents[1]


def cleanba(*words: object) -> None:
    """Run a command; if it fails, the benchmark ends."""
    ended = subprocess.run([sys.executable, "-m", "cleanba", *map(str, words)], stdout=subprocess.PIPE, text=True)
    if ended.returncode:
        sys.exit(f"cleanba {' '.join(map(str, words))} failed:\n{ended.stdout[-2000:]}")


class Study(NamedTuple):
    """Environments x variants."""

    env_ids: tuple[str, ...]
    variants: dict[str, str]
    """name -> algorithm and flags, as they are typed after `cleanba`; with other flags it needs another name, since
    runs are known by it"""
    stages: dict[str, tuple[str | None, str]] = {}  # noqa: RUF012 - nobody writes to it
    """environment -> the environment from whose run of the same variant and seed its own runs start (None: from
    nothing), and flags of this stage"""


@dataclass(frozen=True)
class Asked:
    """Flags of a benchmark of learning."""

    studies: tuple[str, ...] = ()
    """names of studies (default: all)"""
    env_ids: tuple[str, ...] = ()
    """these environments of the studies (default: all)"""
    variants: tuple[str, ...] = ()
    """these variants of the studies (default: all)"""
    seeds: tuple[int, ...] = (1, 2, 3)
    """seeds of each"""
    runs: Path | None = None
    """where runs lie (default: runs/, in a folder of the benchmark's name)"""


class Run(NamedTuple):
    """One training run of a study."""

    study: str
    variant: str
    env_id: str
    seed: int

    @classmethod
    def of(cls, line: Json) -> "Run":
        """The run that a kept line belongs to."""
        return cls(line["study"], line["variant"], line["experiment"]["env_id"], line["experiment"]["seed"])

    @property
    def folder(self) -> str:
        """The name of its directory."""
        words = f"{self.study}-{self.variant}-{self.env_id}-{self.seed}"
        return "".join(c if c.isalnum() else "_" for c in words)


def of_row(lines: Sequence[Json], study: str, variant: str, env_id: str) -> list[Json]:
    """The kept lines of a row of the table."""
    return [line for line in lines if Run.of(line)[:3] == (study, variant, env_id)]


@dataclass(frozen=True)
class Studies:
    """Several studies whose runs are kept in one file."""

    name: str
    """name in the file's and the pictures' names"""
    all: dict[str, Study]
    """name -> study"""
    episodes: int = 0
    """episodes of each run's evaluation (0: none)"""
    film: bool = False
    """whether the first of them is filmed"""
    beside: bool = False
    """whether the table has published returns"""

    @property
    def file(self) -> Path:
        """Where the curves are kept."""
        return machine.RESULTS / f"curves_{self.name}.jsonl"

    def rows(self) -> Iterator[tuple[str, str, str]]:
        """Study, variant and environment of each row of the table."""
        for name, study in self.all.items():
            for env_id in study.env_ids:
                yield from ((name, variant, env_id) for variant in study.variants)

    def wanted(self, asked: Asked) -> Iterator[Run]:
        """The runs that are asked for: the first seed of all of them, then the next."""
        if unknown := set(asked.studies) - set(self.all):
            sys.exit(f"there is no study {', '.join(sorted(unknown))}; there are {', '.join(self.all)}")
        fits = lambda name, names: name in names or not names
        for seed in asked.seeds:
            for study, variant, env_id in self.rows():
                if fits(study, asked.studies) and fits(env_id, asked.env_ids) and fits(variant, asked.variants):
                    yield Run(study, variant, env_id, seed)

    def command(self, run: Run, folder: Path) -> list[str]:
        """What is typed after `cleanba`; `folder` has the runs."""
        study = self.all[run.study]
        algorithm, *flags = study.variants[run.variant].split()
        before, more = study.stages.get(run.env_id, (None, ""))
        start = ["--init-from", str(folder / run._replace(env_id=before).folder)] if before else []
        return [algorithm, "--env-id", run.env_id, "--seed", str(run.seed), *flags, *more.split(), *start]

    def train(self, run: Run, folder: Path) -> None:
        """Train or resume it, and keep its curve."""
        before = self.all[run.study].stages.get(run.env_id, (None, ""))[0]
        if before and not is_finished(folder / (earlier := run._replace(env_id=before)).folder):
            self.train(earlier, folder)  # even if its curve is kept, as this run starts from its parameters
        command, run_dir = self.command(run, folder), folder / run.folder
        print(f"cleanba {' '.join(command)}", flush=True)
        cleanba(*command, "--run-dir", run_dir)
        self.keep(run, run_dir)

    def keep(self, run: Run, run_dir: Path) -> None:
        """Keep the curve of a finished run, and the mean return of its evaluation."""
        more: Json = {}
        if self.episodes:
            cleanba("eval", run_dir, "--episodes", self.episodes, *(["--video"] if self.film else []))
            more = {"evaluated": read_json(run_dir / "eval.json")["mean"]}
        (curve,) = curves.load([run_dir])
        entry = kept.entry(curve, study=run.study, variant=run.variant, **more)
        # A run's line replaces its earlier one, even if the experiments differ: in a later stage, an experiment has the
        # digest of the parameters that it starts from, which training on another processor changes.
        kept.add(self.file, [entry], lambda line: Run.of(line) == run)
        write_whole(self.file.with_suffix(".md"), self.table(kept.read(self.file)))

    def table(self, lines: Sequence[Json]) -> str:
        """The last return of each seed, by study, environment and variant."""
        rows = ["| study | environment | settings | last 100 episodes, by seed | mean | minutes |", "|---" * 6 + "|"]
        more = [f"{self.episodes} episodes of evaluation, by seed"] if self.episodes else []
        more += ["published"] if self.beside else []
        rows = [rows[0] + "".join(f" {name} |" for name in more), rows[1] + "---|" * len(more)]
        in_turn = lambda values: ", ".join(f"{x:.4g}" for x in values)
        for study, variant, env_id in self.rows():
            if not (runs := of_row(lines, study, variant, env_id)):
                continue
            last = [run["returns"][-1] for run in runs]
            minutes = np.mean([run["seconds"][-1] for run in runs]) / 60
            row = [study, env_id, variant, in_turn(last), f"{np.mean(last):.4g}", f"{minutes:.1f}"]
            if self.episodes:
                row.append(in_turn(run.get("evaluated", np.nan) for run in runs))
            if self.beside:
                found = published_return(runs[0]["experiment"])
                row.append(f"{found.value:.4g} ({found.in_words()})" if found else "–")
            rows.append(f"| {' | '.join(row)} |")
        return "\n".join(rows) + "\n"

    def groups(self, lines: Sequence[Json], name: str) -> curves.Groups:
        """The curves of a study by environment and variant, in its order and with its names."""
        found: curves.Groups = {}
        for study, variant, env_id in self.rows():
            if study == name and (runs := of_row(lines, study, variant, env_id)):
                found.setdefault(env_id, {})[variant] = [kept.as_curve(run) for run in runs]
        return found

    def go_on(self, asked: Asked) -> None:
        """Train what is missing, then write the table and draw."""
        folder = asked.runs or Path("runs") / self.name
        there = {Run.of(line): line for line in kept.read(self.file)}
        for run in self.wanted(asked):
            if run not in there:
                self.train(run, folder)
            elif self.episodes and "evaluated" not in there[run] and is_finished(folder / run.folder):
                self.keep(run, folder / run.folder)
        lines = kept.read(self.file)
        if not lines:
            sys.exit(f"nothing is kept in {self.file.relative_to(ROOT)} yet; name seeds")
        text = self.table(lines)
        write_whole(self.file.with_suffix(".md"), text)
        print(text)
        for name in self.all:
            if groups := self.groups(lines, name):
                with matplotlib.rc_context({"text.parse_math": False}):
                    plot.save(plot.draw_curves(groups, "steps"), ROOT / "static" / f"{self.name}_{name}")
