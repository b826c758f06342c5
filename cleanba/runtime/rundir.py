"""A run on disk: `runs/<name>/` with config.json, metrics.jsonl, result.json …"""

import contextlib
import errno
import json
import os
import time
from pathlib import Path
from typing import Any

from cleanba.config import Experiment, Placement, Run, differences, to_json
from cleanba.errors import UsageError
from cleanba.runtime.metrics import write_json
from cleanba.runtime.placement import describe_devices


class Finished(Exception):
    """The run that was asked for is already done."""


def default_name(e: Experiment, run: Run) -> str:
    """A directory name as CleanRL's users know it."""
    return f"{e.env_id.replace('/', '-')}__{run.exp_name}__{e.seed}__{int(time.time())}"


def read_json(path: Path) -> dict[str, Any]:
    """A JSON file of a run.

    Raises:
        UsageError: it is not there, or no JSON.
    """
    try:
        values = json.loads(path.read_text())
    except FileNotFoundError:
        raise UsageError(f"{path} does not exist; name the directory of an earlier run") from None
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} cannot be read ({error}); restore it, or choose another run") from None
    if not isinstance(values, dict):
        raise UsageError(f"{path} does not hold a JSON object; restore it, or choose another run")
    return values


def read_experiment(run_dir: Path) -> dict[str, Any]:
    """The experiment of an earlier run, with "algorithm", as its config.json has it.

    Raises:
        UsageError: there is no such run.
    """
    experiment = read_json(run_dir / "config.json").get("experiment")
    if not isinstance(experiment, dict) or "algorithm" not in experiment:
        raise UsageError(f"{run_dir}/config.json holds no experiment; name the directory of a run")
    return experiment


def open_run(run_dir: Path, algorithm: str, e: Experiment, placement: Placement, run: Run) -> dict[str, Any]:
    """Make the directory and write config.json, or look at what is there already.  Returns the configuration.

    Raises:
        Finished: the same experiment has finished there.
        UsageError: another experiment lives there, or the directory cannot be written.
    """
    config: dict[str, Any] = {
        "experiment": {"algorithm": algorithm, **to_json(e)},
        "placement": to_json(placement),
        "run": to_json(run),
        **describe_devices(),
    }
    path = run_dir / "config.json"
    if path.exists():
        changed = differences(read_experiment(run_dir), config["experiment"])
        if changed:
            raise UsageError(
                f"{run_dir} holds another experiment ({'; '.join(changed)}); "
                "choose another --run-dir, or repeat the flags of that run"
            )
        result = run_dir / "result.json"
        if result.exists() and read_json(result).get("status") == "finished":
            raise Finished(f"{run_dir} is finished; nothing to do")
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        for leftover in ("result.json", "metrics.jsonl"):
            with contextlib.suppress(FileNotFoundError):
                os.remove(run_dir / leftover)
        for events in run_dir.glob("events.out.tfevents.*"):
            events.unlink()
        write_json(path, config)
    except OSError as error:
        raise UsageError(
            f"run directory {run_dir} cannot be written: {os.strerror(error.errno or errno.EIO)}; "
            "choose another --run-dir"
        ) from None
    return config
