"""Reads and rewinds the log of a run: metrics.jsonl and result.json.

The last line of a run that is training, or was killed, may be incomplete, so damaged lines are never errors.  A
periodic evaluation has a row of its own, at the update whose parameters it played, and may follow later updates' rows.
"""

import itertools
import json
import math
import os
from collections.abc import Iterable, Iterator
from itertools import pairwise
from pathlib import Path
from statistics import median

from cleanba.errors import UsageError
from cleanba.files import METRICS, Json, optional_json, write_whole

TAIL = 1 << 16  # bytes at the end of `METRICS` that certainly hold a whole row
LONG_SECONDS = 60.0  # of training, by when a run has usually taken a checkpoint
TIMED_ROWS = 20  # the last rows, from which the remaining time is estimated

Row = Json


def is_evaluation(row: Row) -> bool:
    """Whether a row is that of a periodic evaluation."""
    return "eval/episodic_return" in row


def parse(lines: bytes) -> Iterator[tuple[int, Row | None]]:
    """The number of each line, from 1, and its row; None for a damaged line."""
    for number, line in enumerate(lines.splitlines(), 1):
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            row = None
        yield number, row if isinstance(row, dict) and is_whole(row) else None


def is_whole(row: Json) -> bool:
    """Whether a row has its update, and any global step and seconds in it are numbers."""
    numbers = (row.get("global_step", 0), row.get("seconds", 0.0))
    return type(row.get("update")) is int and all(type(x) in (int, float) for x in numbers)


def read(run_dir: Path) -> Iterator[tuple[int, Row | None]]:
    """`parse` of a run's whole metrics.jsonl.

    Raises:
        OSError: the file cannot be read.
    """
    return parse((run_dir / METRICS).read_bytes())


def read_rows(run_dir: Path) -> list[Row]:
    """The rows of a run's log, for a command that compares its digests.

    Raises:
        UsageError: the log cannot be read.
    """
    try:
        return [row for _, row in read(run_dir) if row is not None]
    except FileNotFoundError:
        raise UsageError(f"{run_dir} has no {METRICS}, so there are no digests to compare") from None
    except OSError as error:
        raise UsageError(
            f"{run_dir}/{METRICS} cannot be read ({error.strerror}); restore it, or name another run"
        ) from None


def tail(run_dir: Path) -> list[Row]:
    """The last rows, read from the end of the file; none if there is no file yet."""
    try:
        with (run_dir / METRICS).open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL))
            lines = file.read()
    except OSError:  # there is none yet, or the file system is away for a moment
        return []
    return [row for _, row in parse(lines) if row is not None]


def together(rows: Iterable[Row]) -> Row:
    """The newest value of every metric in these rows; empty if there are no rows."""
    values: Row = {}
    for row in rows:
        values |= {**row, "update": max(values.get("update", 0), row["update"])}
    return values


def newest(run_dir: Path) -> Row:
    """The newest value of every metric in the last rows of a run."""
    return together(tail(run_dir))


def seconds_left(rows: list[Row], updates: int) -> float | None:
    """Estimate the seconds until a run of `updates` updates ends, at the speed of its last rows; None if unknown.

    Only updates that learn count, as those that only fill a replay memory are much faster.  The first update does not
    count, as it includes compilation.  The speed is a median, so that a resume, which compiles and plays the
    environments back, does not count either.
    """
    timed = [
        (row["update"], row["seconds"])
        for row in rows
        if row["update"] > 1 and "seconds" in row and any(name.startswith("losses/") for name in row)
    ][-TIMED_ROWS:]
    paces = [(now - before) / (update - last) for (last, before), (update, now) in pairwise(timed) if update > last]
    return max(0.0, median(paces)) * max(0, updates - timed[-1][0]) if paces else None


def rewind(run_dir: Path, update: int, seconds: float = math.inf) -> list[Row]:
    """Remove the rows after `update`, which will be logged again, and return those that stay.

    An evaluation may be logged after later updates.  Its row then gets the time at which the run resumes, so that time
    does not run backwards.  TensorBoard's files are removed too, as they are rebuilt from the rows.

    seconds: the run's time when it resumes.
    """
    rows: list[Row] = []
    logged: dict[int, Row] = {}  # by update
    if (run_dir / METRICS).exists():
        for row in (row for _, row in read(run_dir) if row is not None and row["update"] <= update):
            if row["update"] in logged and "chain" in row:  # a signal came after its log point
                logged[row["update"]].update({**row, **logged[row["update"]]})
                continue
            if row.get("seconds", 0.0) > seconds:
                row = {**row, "seconds": seconds}
            rows.append(row)
            if not is_evaluation(row):
                logged[row["update"]] = row
    write_whole(run_dir / METRICS, "".join(json.dumps(row) + "\n" for row in rows))
    for events in run_dir.glob("events.out.tfevents.*"):
        events.unlink()
    return rows


def unrepeatable(run_dir: Path, resumes: bool) -> str:
    """What `rewind` would remove although it may not be logged again, or took long, in words; "" if there is nothing.

    resumes: whether the run goes on from a checkpoint; if not, it begins anew.
    """
    path = run_dir / METRICS
    lines = path.read_bytes() if path.exists() else b""
    rows = list(parse(lines))
    if rows and not lines.endswith(b"\n"):  # the run was killed while it wrote the last one
        rows.pop()
    if damaged := [number for number, row in rows if row is None]:
        return f"{path} has damaged lines, which are removed: {some(damaged)}"
    last = rows[-1][1] if rows else None
    if not resumes and last is not None and last.get("seconds", 0.0) >= LONG_SECONDS:
        return f"{run_dir} has no checkpoint, so the run begins anew, although it had logged {last['update']} updates"
    return ""


def some(numbers: list[int]) -> str:
    """The first five of these numbers, as a list in words."""
    return ", ".join(map(str, numbers[:5])) + (" …" if len(numbers) > 5 else "")


def keep_copy(run_dir: Path) -> Path:
    """Copy metrics.jsonl to metrics.jsonl.1, or to the first number that is free.  Returns the copy."""
    path = run_dir / METRICS
    copies = (path.with_name(f"{METRICS}.{number}") for number in itertools.count(1))
    copy = next(path for path in copies if not path.exists())
    write_whole(copy, path.read_bytes())
    return copy


def read_result(run_dir: Path) -> Row:
    """result.json; empty if there is none yet, or it is damaged."""
    return optional_json(run_dir / "result.json")


def is_finished(run_dir: Path) -> bool:
    """Whether a run has finished."""
    return read_result(run_dir).get("status") == "finished"


def has_trained(folder: Path) -> bool:
    """Whether a folder holds a result or checkpoints, which a run writes only after it began to log."""
    return os.path.isfile(folder / "result.json") or any(map(str.isdecimal, _names(folder / "checkpoints")))


def lacks_config(folder: Path) -> bool:
    """Whether a folder holds what a run writes, but not its config.json."""
    written = os.path.isfile(folder / METRICS) or has_trained(folder)
    return written and not os.path.isfile(folder / "config.json")


def _names(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:  # there is none, or it is not readable
        return []
