"""A sweep on disk: `sweep.json` lists the planned runs and their Slurm jobs."""

import json
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from cleanba.config import read_config
from cleanba.errors import UsageError
from cleanba.files import Json, write_json
from cleanba.recipes import find_recipe
from cleanba.runs.directory import is_over, was_uploaded
from cleanba.runs.log import read_result
from cleanba.train_flags import parse


class Planned(NamedTuple):
    """One run of a sweep."""

    name: str  # the name of its folder
    env_id: str
    variant: str
    seed: int
    words: tuple[str, ...]  # the arguments of `cleanba`
    updates: int


def done(runs: Sequence[Planned], folder: Path) -> set[str]:
    """The names of the runs that have finished as their flags ask, and have been uploaded if these ask for that."""
    return {run.name for run in runs if nothing_is_left(run, folder / run.name)}


def nothing_is_left(run: Planned, run_dir: Path) -> bool:
    """Whether a run has finished, and would do nothing with its present flags, such as more steps."""
    result = read_result(run_dir)
    if result.get("status") != "finished":
        return False
    name, *words = run.words
    asked = parse(find_recipe(name), words).run
    over = is_over(result, run.updates, read_config(run_dir), asked.target_return)
    return over and (not asked.upload_model or was_uploaded(run_dir))


def read_manifest(folder: Path) -> Json:
    """Read `sweep.json`.

    Raises:
        UsageError: the folder holds no sweep.
    """
    path = folder / "sweep.json"
    try:
        manifest = json.loads(path.read_text())
    except FileNotFoundError:
        raise UsageError(f"{folder} holds no sweep.json; name the folder of a sweep") from None
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} cannot be read ({error}); remove it, and run the sweep's command again") from None
    runs = manifest.get("runs") if isinstance(manifest, dict) else None
    if not isinstance(runs, dict) or not all(isinstance(run, dict) for run in runs.values()):
        raise UsageError(f"{path} was not written by a sweep; remove it, and run the sweep's command again")
    return manifest


def write_manifest(folder: Path, runs: Sequence[Planned], argv: Sequence[str], jobs: dict[str, str]) -> None:
    """Add these runs to `sweep.json`.  `jobs`: name of the run -> its Slurm job."""
    path = folder / "sweep.json"
    earlier = read_manifest(folder)["runs"] if path.exists() else {}
    for run in runs:
        entry = run._asdict() | {"words": list(run.words)}
        earlier[run.name] = earlier.get(run.name, {}) | entry | ({"job": jobs[run.name]} if run.name in jobs else {})
    write_json(path, {"command": shlex.join(["cleanba", "sweep", *argv]), "runs": earlier})
