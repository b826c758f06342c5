"""`cleanba ls`: the runs of a directory at a glance."""

import fcntl
import json
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, NamedTuple

import tyro

from cleanba.arguments import parse_command
from cleanba.config import require, updates_of
from cleanba.errors import Exit, printable
from cleanba.files import METRICS, finite
from cleanba.runs import log
from cleanba.runs.directory import LOCK
from cleanba.runs.log import newest

DEPTH = 3  # runs may lie in folders of folders
COLOURS = {"running": "cyan", "finished": "green", "interrupted": "yellow", "failed": "red"}


@dataclass(frozen=True)
class Ls:
    """List the runs in a directory, the most recently changed last."""

    directory: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="[DIR]")] = Path("runs")
    """folder to search, with its subfolders"""
    json: bool = False
    """print JSON, one object per line: path, status, env_id, algorithm, seed, progress (0 to 1), mean_return, sps, when
    (seconds since 1970)"""


class Row(NamedTuple):
    """One run."""

    path: Path
    status: str
    """running, finished, interrupted, failed; unfinished: it ended without a result; damaged: its files are invalid or
    missing"""
    env_id: str = ""
    algorithm: str = ""
    seed: int | None = None
    progress: float | None = None
    """fraction of the updates that are done"""
    mean_return: float | None = None
    sps: float | None = None
    """environment steps per second"""
    when: float = 0.0
    """time of its last change, in seconds since the Unix epoch"""


def find_runs(folder: Path, depth: int = DEPTH) -> Iterator[Path]:
    """Directories with a config.json, or other files of a run, at most `depth` levels down.

    Runs inside other runs are left out, unless these have no config.json: another program may have written their files.
    """
    known = os.path.isfile(folder / "config.json")  # which raises no error where access is denied
    if known or log.lacks_config(folder):
        yield folder
    if depth > 0 and not known:
        try:
            inside = sorted(entry.path for entry in os.scandir(folder) if os.path.isdir(entry.path))
        except OSError:  # not readable
            return
        for path in inside:
            yield from find_runs(Path(path), depth - 1)


def read_run(run_dir: Path) -> Row:
    """Read a run's row from a few small files.  If they are invalid, its status is "damaged"; no error is raised."""
    try:
        e = json.loads((run_dir / "config.json").read_text())["experiment"]
        path = run_dir / "result.json"
        result = json.loads(path.read_text()) if path.exists() else {}
        logged = newest(run_dir)
        running = is_locked(run_dir)
        if not running and not (run_dir / METRICS).exists() and log.has_trained(run_dir):
            from cleanba.trust import source_of  # seconds to import, and seldom needed

            if source_of(run_dir) is None:  # a run from elsewhere may come without its log
                return Row(run_dir, "damaged")
        update = (logged if running else result or logged).get("update") or 0
        done = [run_dir / name for name in ("config.json", METRICS, "result.json")]
        return Row(
            run_dir,
            "running" if running else str(result.get("status", "unfinished")),
            str(e["env_id"]),
            str(e["algorithm"]),
            int(e["seed"]),
            update / max(1, updates_of(e)),
            _number(result.get("episodic_return", logged.get("charts/episodic_return"))),
            _number(result.get("sps", logged.get("charts/SPS_recent"))),
            max(path.stat().st_mtime for path in done if path.exists()),
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError, ArithmeticError, RecursionError):
        return Row(run_dir, "damaged")


def _number(x: float | None) -> float | None:
    return None if x is None else float(x)


def is_locked(run_dir: Path) -> bool:
    """Whether a process is training there, and so holds the lock (`runs/directory.py`)."""
    try:
        with (run_dir / LOCK).open() as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def ls_command(argv: Sequence[str]) -> Exit:
    """`cleanba ls`."""
    flags = parse_command(Ls, argv, "ls")
    folder = flags.directory
    require(folder.is_dir(), f"{folder} is not a directory; name one that holds runs (`cleanba ppo` makes runs/)")
    places = sorted(find_runs(folder), key=lambda path: path.resolve() == path.absolute())
    runs = {path.resolve(): path for path in places}.values()  # links to a run that is there, too, are left out
    rows = sorted((read_run(path) for path in runs), key=lambda row: (row.when, str(row.path)))
    if flags.json:
        for row in rows:
            print(json.dumps(finite(row._asdict() | {"path": str(row.path)})))
    elif rows:
        show(rows, folder)
    else:
        print(f"no runs in {folder}")
    return Exit()


def show(rows: list[Row], folder: Path) -> None:
    """Print the table, fitted to the terminal, or at full width if there is none."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(markup=False, emoji=False)
    if not console.is_terminal:
        console.width = max(len(str(row.path)) for row in rows) + 140
    narrow = console.width < 110
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("run", overflow="fold", min_width=16)
    table.add_column("status", no_wrap=True)
    for name in () if narrow else ("environment", "algorithm"):  # the default name of a run has both
        table.add_column(name, no_wrap=True)
    for name in ("seed", "done", "return", "steps/s", "changed"):
        table.add_column(name, justify="right", no_wrap=True)
    text = lambda words, style="": Text(printable(words), style=style)
    written = lambda form, x: "" if x is None else format(x, form)
    for row in rows:
        table.add_row(
            text(row.path.name if row.path == folder else str(row.path.relative_to(folder))),
            text(row.status, style=COLOURS.get(row.status, "magenta")),
            *(() if narrow else (text(row.env_id), text(row.algorithm))),
            written("d", row.seed),
            written(".0%", row.progress),
            written(".5g", row.mean_return),
            written(",.0f", row.sps),
            time.strftime("%b %d %H:%M", time.localtime(row.when)) if row.when else "",
        )
    console.print(table)
