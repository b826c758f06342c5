"""A run on disk: `runs/<name>/` with config.json, metrics.jsonl, result.json …"""

import contextlib
import errno
import fcntl
import os
import re
import secrets
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, TextIO

from cleanba.config import (
    Experiment,
    Placement,
    Run,
    differences,
    read_config,
    require,
    require_same,
    to_json,
    updates_of,
)
from cleanba.environments.code_text import RUNNING
from cleanba.errors import Failure, Replaced, UsageError, warn
from cleanba.files import Json, current_directory, optional_json, read_json, sync, write_json
from cleanba.recipes import AnyRecipe
from cleanba.resolution import Resolved, longer, read_recipe
from cleanba.runtime import memory, records
from cleanba.runtime.chain import FIRST_STEPS, kept_of_first
from cleanba.runtime.checkpoint import FOLDER, can_be_made_longer, updates_kept
from cleanba.runtime.hardware import describe_devices, for_gpus


class Finished(Exception):
    """The requested run has already finished."""


def default_run_dir(e: Experiment, run: Run, now: int | None = None) -> Path:
    """A directory named as in CleanRL.  In a Slurm batch job the name is the same after a requeue."""
    name = f"{re.sub('[/:]', '-', e.env_id)}__{run.exp_name}__{e.seed}__{batch_job() or now or int(time.time())}"
    return Path("runs") / name


def batch_job() -> str | None:
    """The Slurm batch job of this process: "job12", "job12_3" in an array, or "job12.1" in a later step of a job.

    None in an interactive job, where typing a command twice means two runs.
    """
    env = os.environ.get
    if env("ENVIRONMENT") != "BATCH" or not env("SLURM_JOB_ID"):
        return None
    job, step = env("SLURM_JOB_ID"), env("SLURM_STEP_ID", "0")
    if env("SLURM_ARRAY_JOB_ID"):
        job = f"{env('SLURM_ARRAY_JOB_ID')}_{env('SLURM_ARRAY_TASK_ID')}"
    return f"job{job}" + (f".{step}" if step != "0" else "")


def check_name(run_dir: Path, flag: str = "--run-dir") -> None:
    """Raise `UsageError` for a path that cannot be shown, or below which Orbax writes no whole checkpoint.

    flag: the flag that names the path.
    """
    require(str(run_dir).isprintable(), f"{str(run_dir)!r} has characters that cannot be shown; choose another {flag}")
    path = os.path.join(current_directory() or "", run_dir)
    bracket = next((x for x in "[]" if x in path), "")
    require(
        not bracket,
        f"{path} has a {bracket}, and Orbax writes no whole checkpoints below such a name; choose another {flag}",
    )


class Opened(NamedTuple):
    config: Json
    """what config.json says now"""
    earlier: Json | None
    """what it said before, if the run is resumed"""


def differing_machines(earlier: Json | None, now: Json) -> list[str]:
    """What differs between the code and machines of two runs and may change bits: code, packages, devices, CPU."""
    if earlier is None:
        return []
    a, b = ({**c.get("packages", {}), "device kind": c.get("device_kind")} for c in (earlier, now))
    for name in set(b) - set(a):  # an earlier version did not record it
        del b[name]
    if b["device kind"] == "cpu":
        for side in (a, b):
            for name in [name for name in side if for_gpus(name)]:
                del side[name]
        a["CPU"], b["CPU"] = earlier.get("cpu"), now.get("cpu")
        a["matrix products"], b["matrix products"] = earlier.get("cpu_products"), now.get("cpu_products")
        if now.get("cpu_products") == "xla":
            name = "XLA threads (PJRT_NPROC, or one for each device)"
            a[name], b[name] = earlier.get("cpu_threads"), now.get("cpu_threads")
    if "code" in earlier and "code" in now and earlier["code"] != now["code"]:
        a["Cleanba's code"], b["Cleanba's code"] = (
            f"{c.get('revision')} ({short(c.get('code'))})" for c in (earlier, now)
        )
    for name in {*earlier.get("sources", {})} & {*now.get("sources", {})}:
        a[f"code of {name}"], b[f"code of {name}"] = (short(c["sources"][name]) for c in (earlier, now))
    changed = differences(a, b)
    words = f"the bits may differ from the earlier run's, because these differ: {'; '.join(changed)}"
    return [words] if changed else []


def short(digest: object) -> str:
    """The first digits of a SHA-256."""
    return str(digest).removeprefix("sha256:")[:8]


def open_run(
    run_dir: Path,
    recipe: AnyRecipe,
    resolved: Resolved,
    placement: Placement,
    run: Run,
    sources: Json,
    check: Callable[[], None] | None = None,
) -> Opened:
    """Make the directory and write config.json; if a run is there already, check that it is the same experiment.

    sources: the environment's own modules -> SHA-256 of their files.
    check: called before anything is written, unless the run has finished.

    Raises:
        Finished: the same experiment has finished there.
        UsageError: another experiment is there, or the directory cannot be written.
        Failure: the disk is full.
    """
    config: Json = {
        "experiment": {"algorithm": recipe.name, **to_json(resolved.experiment)},
        "origin": dict(resolved.origin),
        "placement": to_json(placement),
        "run": to_json(run),
        **describe_devices(),
        "sources": sources,
    }
    path = run_dir / "config.json"
    earlier = read_config(run_dir) if path.exists() else None
    if earlier is not None:
        there, began = read_recipe(run_dir)  # again: until the lock was taken, another run could begin here
        e = longer(recipe, began, resolved.experiment, run_dir)
        require_same(run_dir, differences({"algorithm": there.name, **to_json(e)}, config["experiment"]))
        newest = max(updates_kept(run_dir), default=0)
        config |= kept_of_first(earlier, config["experiment"]) if newest else {}
        if FIRST_STEPS in earlier:
            config[FIRST_STEPS] = earlier[FIRST_STEPS]
        elif e != began and newest:
            config[FIRST_STEPS] = began.total_timesteps
        ended = run_dir / "result.json"
        result = read_json(ended) if ended.exists() else {}
        if is_over(result, e.num_updates, earlier, run.target_return):
            before = earlier.get("sources", {})
            changed = [name for name, digest in sources.items() if before.get(name, digest) != digest]
            if any(name.startswith("local/") for name in sources):  # of a script, only the environment counts here
                changed = [name for name in changed if name not in RUNNING]
            if changed:
                warn(
                    f"{run_dir} was trained before the code of {' and '.join(changed)} was changed; to train with the "
                    "new code, choose another --run-dir"
                )
            raise Finished(f"{run_dir} is finished; nothing to do")
        at_end = newest == began.num_updates or (not newest and result.get("status") == "finished")
        require(
            e == began or not at_end or can_be_made_longer(run_dir, newest),
            f"{run_dir} has no checkpoint from which a longer run could go on (earlier versions kept none at the end; "
            "nor does an environment that ignores its seed); start a new run from its parameters with --init-from "
            f"{run_dir}",
        )
    require(
        earlier is not None or not updates_kept(run_dir),
        f"{run_dir} holds checkpoints, but no config.json, so their experiment is unknown; restore that file, or "
        "choose another --run-dir",
    )
    if check is not None:
        check()
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        remove_half_written(run_dir)
        if earlier is None:
            record(run_dir, config)
    except OSError as error:
        raise unwritable(run_dir, error) from None
    return Opened(config, earlier)


def record(run_dir: Path, config: Json) -> None:
    """Write config.json, and remove what is no longer true once the run goes on.

    A run that is resumed does so after its checkpoint has been read: if none can be read, its result is still there.
    """
    new = run_dir / "config.json.new"
    write_json(new, config)  # first, as the disk may be full
    for name in ("result.json", "model.msgpack", UPLOADED):
        with contextlib.suppress(FileNotFoundError):
            os.remove(run_dir / name)
    os.replace(new, run_dir / "config.json")
    sync(run_dir)


HALF_WRITTEN = ("config.json.new*", "checkpoints/*.orbax-checkpoint-tmp*", "memory/*/*.json.tmp", "best/*.tmp")


def remove_half_written(run_dir: Path) -> None:
    """Remove what a killed run was writing when it ended.  The directory must be locked, so that nobody writes now."""
    for path in [path for pattern in HALF_WRITTEN for path in run_dir.glob(pattern)]:
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def is_over(result: Json, updates: int, config: Json, target: float | None) -> bool:
    """Whether a run has finished with this many updates and this --target-return.

    config: its config.json so far.  The run may have been shorter, or have ended at a lower return with steps left.
    """
    if result.get("status") != "finished":
        return False
    planned = updates_of(config["experiment"])
    if result.get("update", planned) == planned:
        return updates <= planned
    earlier = config.get("run", {}).get("target_return")
    return earlier is None or (target is not None and target <= earlier)


UPLOADED = "uploaded.json"  # in a run's directory, once it is on the Hub
EVALUATIONS = "evaluations"  # the folder of a run that keeps each evaluation; the newest is also in eval.json


def was_uploaded(run_dir: Path) -> bool:
    """Whether the finished run has been uploaded."""
    path = run_dir / UPLOADED
    return path.exists() and read_json(path).get("finished", True) is not False  # earlier versions did not say


def films_of(run_dir: Path, update: int | None = None) -> list[Path]:
    """The films of a run, or of its policy after that update, the newest last."""
    found: list[tuple[float, Path]] = []
    for path in (run_dir / "videos").glob("*.mp4"):
        of_update = update is None or path.name.startswith((f"update-{update}-", "model-"))
        if of_update and not path.name.startswith("."):  # one that is being made
            with contextlib.suppress(OSError):  # removed meanwhile
                found.append((path.stat().st_mtime, path))
    return [path for _, path in sorted(found)]


def unwritable(run_dir: Path, error: OSError, flag: str = "--run-dir") -> UsageError | Failure:
    """The error for a place that cannot be written; a `Failure` if the disk is full.

    flag: the flag that names the place.
    """
    reason = os.strerror(error.errno or errno.EIO)
    what = f"{'run directory ' * (flag == '--run-dir')}{run_dir} cannot be written: {reason}"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return Failure(f"{what}; free disk space, then run the same command again")
    allow = "make it writable, or " * (error.errno in (errno.EACCES, errno.EPERM, errno.EROFS))
    return UsageError(f"{what}; {allow}choose another {flag}")


LOCK = ".lock"  # in a run's directory


def holds_runs(folder: Path) -> bool:
    """Whether a folder that is no run has runs in it."""
    if (folder / "config.json").exists() or not folder.is_dir():
        return False
    return any("experiment" in optional_json(path) for path in folder.glob("*/config.json"))  # not lost+found


def is_gone(run_dir: Path) -> bool:
    """Whether a run's directory is missing, or has only folders that were made again while a checkpoint is written."""
    try:
        there = os.listdir(run_dir)
        return bool(there) and {*there} <= {FOLDER, memory.FOLDER, records.FOLDER}
    except OSError:
        return not run_dir.exists()


def require_ours(run_dir: Path, held: TextIO) -> None:
    """Raise `Replaced` unless a file that was opened as this directory's lock is the one that lies there now.

    A directory that is only missing is not reported: what would be written there fails, and says so.
    """
    try:
        ours = os.path.samestat(os.fstat(held.fileno()), os.stat(run_dir / LOCK))
    except OSError:
        ours = is_gone(run_dir)
    if not ours:
        raise Replaced(
            f"{run_dir} was removed, or made again by another run, while this run was in it, so nothing more is "
            "written there; choose another --run-dir"
        )


def marked(run_dir: Path) -> int | None:
    """The number that the last process to lock a directory has drawn; None if there is none."""
    try:
        return int((run_dir / LOCK).read_text())
    except (OSError, ValueError):
        return None


def lock(run_dir: Path, flag: str = "--run-dir", mark: bool = False) -> TextIO:
    """Keep other processes out of a directory that a flag names, for as long as the returned file is open.

    mark: draw a number and write it there, so that a run's other processes recognise the directory (`marked`).

    Raises:
        UsageError: another process is in it, or the directory cannot be written.
        Failure: the disk is full.
    """
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        file = open(run_dir / LOCK, "a")  # noqa: SIM115  open until the process ends
    except OSError as error:
        raise unwritable(run_dir, error, flag) from None
    for _ in range(3):  # `cleanba ls` may be trying the lock at just this moment
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            time.sleep(0.02)
        except OSError as error:
            file.close()
            why = os.strerror(error.errno or errno.EIO)
            raise UsageError(
                f"{run_dir} lies on a file system that cannot lock files ({why}), so two runs there would not notice "
                f"each other; choose a {flag} elsewhere"
            ) from None
    else:
        file.close()
        raise UsageError(f"another process is running in {run_dir}; wait for it to end, or choose another {flag}")
    try:
        if mark:
            file.truncate(0)
            file.write(str(secrets.randbits(62)))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        file.close()
        raise unwritable(run_dir, error, flag) from None
    return file
