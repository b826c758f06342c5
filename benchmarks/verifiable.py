"""Runs behind published figures, kept whole, so that anybody can compute a part of them again.

python benchmarks/verifiable.py                     # verifies two of them at random: a minute; `make verify`
python benchmarks/verifiable.py --sample 99         # verifies all
python benchmarks/verifiable.py --train             # trains the missing ones, plays 100 episodes each, packs them
python benchmarks/verifiable.py --train --only pqn  # trains those whose names contain this word anew

The runs are in results/runs/, the table is in docs/guides/verify.md.  If a change of the code changes a run's bits,
this script says so and ends with exit code 1, and the run must be trained anew.  If the packages or the processor are
not the run's, bits need not agree; the comparison is still made and reported.
"""

import random
import re
import subprocess
import sys
import tarfile
import tempfile
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import machine
import tyro

from cleanba.config import Experiment
from cleanba.files import read_json
from cleanba.launch import prepare
from cleanba.recipes import RECIPES
from cleanba.train_flags import parse

ROOT = Path(__file__).parents[1]
RUNS = machine.RESULTS / "runs"
PAGE = ROOT / "docs/guides/verify.md"
MARKS = "<!-- verifiable -->", "<!-- /verifiable -->"
# By algorithm: the environments in docs/reference/presets.md whose runs take about a minute and a megabyte.
ENVIRONMENTS = {
    "ppo": ("CartPole-v1", "Acrobot-v1", "MountainCar-v0", "Catch-v0", "LunarLander-v3"),
    "impala": ("CartPole-v1", "Acrobot-v1", "Catch-v0"),
    "pqn": ("CartPole-v1",),
}
COMMANDS = {
    f"{algorithm}-{env_id}": f"cleanba {algorithm} --env-id {env_id} --seed 1"
    for algorithm, there in ENVIRONMENTS.items()
    for env_id in there
}
COMMANDS["dqn-Pong-v5"] = "cleanba dqn --preset pong --env-id Pong-v5 --target-return 18 --seed 1"
# Runs whose checkpoints or memory are too large to keep.  Only their beginning can be computed again, which needs
# neither: up to the last digest within this share of the updates.
BEGINNING = {"dqn-Pong-v5": 0.05}
CHECKPOINTS = 2  # that a run keeps, roughly; the older runs here have 4
EPISODES = 100
LEFT_OUT = ("events.out.tfevents", ".lock")
LARGE = ("checkpoints", "memory", "actors", "videos")


@dataclass(frozen=True)
class Args:
    """Flags of the script."""

    train: bool = False
    """train the runs that are missing"""
    only: str = ""
    """part of their names"""
    sample: int = 2
    """how many to verify"""
    write: bool = False
    """note in the table when a run was verified"""


def cleanba(*words: object) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-m", "cleanba", *map(str, words)], capture_output=True, text=True)


def resolve(words: list[str]) -> Experiment:
    """The experiment that a command trains."""
    recipe = RECIPES[words[0]]
    return prepare(recipe, parse(recipe, words[1:])).experiment


def train(name: str) -> dict[str, Any]:
    """Train the run, play it, pack it -> its row of the table."""
    words = COMMANDS[name].split()[1:]
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / name
        updates = resolve(words).num_updates
        ended = cleanba(*words, "--keep-checkpoints", f"every:{updates // CHECKPOINTS}", "--run-dir", run)
        assert ended.returncode == 0, ended.stderr
        played = cleanba("eval", run, "--episodes", EPISODES)
        mean = re.search(r"return: mean (-?[\d.,]+)", played.stdout)
        assert mean is not None, played
        pack(name, run)
        result = read_json(run / "result.json")
    return {
        "command": COMMANDS[name],
        "mean_return": float(mean[1].replace(",", "")),
        "steps": result["global_step"],
        "params_digest": result["params_digest"],
        "trained_on": machine.describe()["cpu"],
    }


def pack(name: str, run: Path) -> None:
    """Keep the run's directory as an archive, as far as it is needed to verify it."""
    left_out = LEFT_OUT + LARGE * (name in BEGINNING)
    RUNS.mkdir(parents=True, exist_ok=True)
    with tarfile.open(RUNS / f"{name}.tar.gz", "w:gz") as archive:
        archive.add(run, name, filter=lambda info: None if Path(info.name).name.startswith(left_out) else info)


def verify(name: str) -> tuple[bool, str]:
    """Verify one segment -> whether its bits are the same, or may differ on this machine; and what was found."""
    words = ("verify", RUNS / f"{name}.tar.gz", "--segments", 1)
    words += ("--fraction", BEGINNING[name]) if name in BEGINNING else ()
    ended = cleanba(*words)
    if ended.returncode != 3:
        return ended.returncode == 0, (ended.stdout + ended.stderr).splitlines()[-1]
    why = ended.stderr.partition("with other ")[2].partition(". Its bits may differ")[0]
    again = cleanba(*words, "--despite", "processor", "packages", "revision")
    last = (again.stdout + again.stderr).splitlines()[-1]
    same, others = again.returncode == 0, "packages (" in why or "processor (" in why
    return same or others, f"{last}, with other {why}"


def table(rows: dict[str, dict[str, Any]]) -> str:
    """The table of the page."""
    lines = ["| command | mean of 100 episodes | digest of the parameters | last verified |", "|---|---|---|---|"]
    for name in COMMANDS:
        if name in rows:
            row = rows[name]
            digest = row["params_digest"].removeprefix("sha256:")[:12]
            archive = f"[{digest}…](../../benchmarks/results/runs/{name}.tar.gz)"
            lines.append(
                f"| `{row['command']}` | {row['mean_return']:,.2f} | {archive} | {row.get('verified', 'never')} |"
            )
    return "\n".join(lines)


def write(rows: dict[str, dict[str, Any]]) -> None:
    """Keep the rows, and write the table into the page."""
    machine.save("verifiable", {"runs": {name: rows[name] for name in COMMANDS if name in rows}})
    text = PAGE.read_text()
    before, rest = text.split(MARKS[0])
    PAGE.write_text(f"{before}{MARKS[0]}\n{table(rows)}\n{MARKS[1]}{rest.split(MARKS[1])[1]}")


def main(args: Args) -> None:
    """Train or verify."""
    rows: dict[str, dict[str, Any]] = machine.saved("verifiable").get("runs", {})
    names = [name for name in COMMANDS if args.only in name]
    if args.train:
        for name in names:
            if name not in rows or args.only:
                rows[name] = train(name)
                print(f"{name}: {rows[name]['mean_return']:.2f} after {rows[name]['steps']:,} steps", flush=True)
                write(rows)
        return
    there = [name for name in names if name in rows]
    good = True
    for name in sorted(random.sample(there, min(args.sample, len(there)))):
        passed, words = verify(name)
        good &= passed
        print(f"{name}: {words}", flush=True)
        if not passed:
            print("  If a change of the code was to move bits, train it anew: --train --only", name)
        elif "the same bits" in words:
            rows[name]["verified"] = datetime.now(UTC).date().isoformat()
    if args.write:
        write(rows)
    sys.exit(not good)


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
