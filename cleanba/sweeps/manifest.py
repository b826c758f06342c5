"""A sweep on disk: `sweep.json` lists the planned runs and their Slurm jobs."""

import json
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from cleanba.config import read_experiment
from cleanba.errors import UsageError
from cleanba.files import Json, write_json
from cleanba.recipes import find_recipe
from cleanba.runs.directory import was_uploaded
from cleanba.runs.log import is_finished
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
    """The names of the runs that have finished, and have been uploaded if their flags ask for that."""
    name, *words = runs[0].words
    upload = parse(find_recipe(name), words).run.upload_model  # the same for all runs of a sweep
    finished = {run.name for run in runs if is_finished(folder / run.name) and not is_longer(run, folder / run.name)}
    return {name for name in finished if was_uploaded(folder / name)} if upload else finished


def is_longer(run: Planned, run_dir: Path) -> bool:
    """Whether a run is planned with more updates than the one in its directory was."""
    e = read_experiment(run_dir)
    return run.updates > e["total_timesteps"] // (e["num_envs"] * e["num_steps"])


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
