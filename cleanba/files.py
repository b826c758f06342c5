"""Atomic file writes, and JSON."""

import contextlib
import errno
import json
import math
import os
import secrets
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from cleanba.errors import UsageError

Json = dict[str, Any]
"""A JSON object."""

METRICS = "metrics.jsonl"
"""A run's log: one JSON object per line."""


def expanded(path: str | Path) -> Path:
    """A path whose ~ is replaced by a home directory.

    Raises:
        UsageError: there is no such user, or this one has no home directory.
    """
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise UsageError(f"{path}: there is no such home directory; write the whole path") from None


def make_folders(folder: Path) -> None:
    """Make a folder inside a run's directory, such as `RUN/actors/00003`, but do not remake `RUN` if it has gone.

    Raises:
        OSError: it cannot be made, or the run's directory is not there.
    """
    for path in (folder.parent, folder):
        if not path.is_dir():
            path.mkdir(exist_ok=True)
            sync(path.parent)


def current_directory() -> str | None:
    """The current directory; None if it has been removed."""
    try:
        return os.getcwd()
    except OSError:
        return None


@contextlib.contextmanager
def staying_here(here: str | None = None) -> Iterator[None]:
    """On leaving the context, return to a directory: code of an environment, say, may have changed to another one.

    here: None means the current one.
    """
    here = here or current_directory()
    try:
        yield
    finally:
        if here is not None and current_directory() != here:
            with contextlib.suppress(OSError):  # there is no permission to enter it, or it has been removed
                os.chdir(here)


def write_whole(path: Path, content: str | bytes, shared: bool = False) -> None:
    """Write a file atomically: under another name first, then renamed.

    shared: whether other processes may write it at the same time.
    """
    scratch = path.with_name(path.name + (f".{secrets.token_hex(4)}.tmp" if shared else ".tmp"))
    try:
        with open(scratch, "wb") as file:
            file.write(content.encode(errors="backslashreplace") if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())  # else a power failure may leave an empty file
        os.replace(scratch, path)
    except OSError:
        with contextlib.suppress(OSError):
            scratch.unlink(missing_ok=True)
        raise
    sync(path.parent)  # else the file may still have its old name after a power failure


def sync(path: Path) -> None:
    """Have the disk keep what a file holds, or which files a folder has, even if the power fails."""
    with contextlib.suppress(OSError) if path.is_dir() else contextlib.nullcontext():  # some systems sync no folders
        opened = os.open(path, os.O_RDONLY)
        try:
            os.fsync(opened)
        finally:
            os.close(opened)


def listed(folder: Path, pattern: str) -> list[Path]:
    """The entries of a folder whose names match the pattern, by name; none if there is no such folder.

    Any other error of the system is raised.  `Path.glob` hides them, from Python 3.12 on all.
    """
    try:
        names = os.listdir(folder)
    except FileNotFoundError:
        return []
    return [folder / name for name in sorted(names) if fnmatchcase(name, pattern)]


def files_below(folder: Path) -> list[Path]:
    """All files below a folder, by name; none if there is no such folder.  Errors are raised, as by `listed`."""

    def fail(error: OSError) -> None:
        if not isinstance(error, FileNotFoundError):
            raise error

    return sorted(Path(root, name) for root, _, names in os.walk(folder, onerror=fail) for name in names)


def sync_folder(folder: Path) -> None:
    """`sync` a folder and all that it holds."""
    for path in [*folder.rglob("*"), folder, folder.parent]:
        sync(path)


def require_name(out: Path, example: str) -> None:
    """Raise `UsageError` unless --out ends with the name of a file."""
    if out.name in ("", ".."):
        raise UsageError(f"--out {out} names no file; give a name, such as {example}")


def write_json(path: Path, values: Mapping[str, object], shared: bool = False) -> None:
    """Write a JSON file atomically (`write_whole`)."""
    write_whole(path, json.dumps(finite(values), indent=2) + "\n", shared)


def read_json(path: Path) -> Json:
    """Read a JSON file of a run.

    Raises:
        UsageError: the file does not exist, or holds no JSON object.
    """
    try:
        values = json.loads(path.read_text())
    except FileNotFoundError:
        raise UsageError(f"{path} does not exist; name the directory of an earlier run") from None
    except NotADirectoryError:
        raise UsageError(f"{path.parent} is a file; name the directory of a run") from None
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"{path} cannot be read ({error}); restore it, or choose another run") from None
    if not isinstance(values, dict):
        raise UsageError(f"{path} does not hold a JSON object; restore it, or choose another run")
    return values


# What the system says of a file that is missing or damaged.  Libraries give errors of their own without a number.
OF_THE_FILE = (None, errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EINVAL)


def may_pass(error: Exception) -> bool:
    """Whether a file that could not be read may be sound: memory ran out, say, or the disk did not answer."""
    return isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno not in OF_THE_FILE)


@contextlib.contextmanager
def in_a_checkpoint(where: str) -> Iterator[None]:
    """Raise `ValueError` for a checkpoint's file that is missing or damaged; `where` names it in messages."""
    try:
        yield
    except FileNotFoundError:
        raise ValueError(f"{where} is missing") from None
    except OSError as error:
        if may_pass(error):
            raise
        raise ValueError(f"{where} cannot be read ({error.strerror})") from None


def optional_json(path: Path) -> Json:
    """Read a JSON file of a run that may be missing or damaged; {} then."""
    try:
        return read_json(path)
    except UsageError:
        return {}


def finite(values: object) -> object:
    """Replace NaN and infinity, which JSON lacks, by None in a tree of dictionaries, lists and numbers."""
    if isinstance(values, Mapping):
        return {k: finite(v) for k, v in values.items()}
    if isinstance(values, list | tuple):
        return [finite(v) for v in values]
    if isinstance(values, float) and not math.isfinite(values):
        return None
    return values
