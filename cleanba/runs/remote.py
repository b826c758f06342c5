"""Runs from elsewhere: downloaded from the Hugging Face Hub, or unpacked from an archive.

What they may choose is decided in `trust.py`.  Here they are brought to this machine: only the files that are needed,
of a size that is known beforehand, under names that are ours.
"""

import hashlib
import os
import re
import stat
import tarfile
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from types import ModuleType
from typing import IO, NamedTuple

from cleanba.config import require
from cleanba.errors import Failure, UsageError, missing
from cleanba.files import METRICS
from cleanba.trust import mark_downloaded

DOWNLOADS = Path("runs/hub")
UNPACKED = Path("runs/unpacked")
NEEDED = ("config.json", "model.msgpack")
MOST_BYTES = {"config.json": 2**20, "model.msgpack": 2**31 + 2**20, "result.json": 2**24, METRICS: 2**30}
"""the files of a run that are taken from elsewhere, and how large each may be"""
MOST_MEMBERS = 100_000  # of an archive
REPO = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)
ARCHIVES = (".zip", ".tar", ".tar.gz", ".tgz", ".tar.xz", ".tar.bz2")


def find_run(run: str | Path) -> Path:
    """The directory of a run that is named as a directory, as hf://user/repository, or as an archive.

    Of a run from elsewhere it holds config.json and model.msgpack, and counts as one (`trust.source_of`).  Whether its
    experiment may be opened is decided by `read_recipe`.

    Raises:
        UsageError: what is named is no run.
        Failure: the Hub could not be reached.
    """
    if str(run).startswith("hf://"):
        return download(str(run))
    path = Path(run)
    return unpack(path) if path.is_file() and path.name.lower().endswith(ARCHIVES) else path


def require_hub() -> ModuleType:
    """The optional library huggingface_hub.

    Raises:
        UsageError: it is not installed.
    """
    try:
        import huggingface_hub.errors
        import huggingface_hub.utils
    except ImportError as error:
        raise missing("the Hugging Face Hub", error, "hub") from None
    return huggingface_hub


def download(reference: str) -> Path:
    """hf://user/repo or hf://user/repo@revision -> a run directory with config.json and model.msgpack.

    It lies under `runs/hub/` and is fetched again only if it has changed.

    Raises:
        UsageError: the reference is none, or what it names is no uploaded run, or too large.
        Failure: the Hub could not be reached.
    """
    repo_id, _, revision = reference.removeprefix("hf://").partition("@")
    require(REPO.fullmatch(repo_id) is not None, f"{reference} names no repository; write hf://user/repo")
    hub = require_hub()
    hub.utils.disable_progress_bars()
    folder = DOWNLOADS / repo_id
    try:
        api = hub.HfApi(library_name="cleanba")
        commit = api.repo_info(repo_id, revision=revision or None).sha
        sizes = {item.path: getattr(item, "size", None) for item in api.list_repo_tree(repo_id, revision=commit)}
        wanted = [name for name in MOST_BYTES if name in sizes]
        for name in wanted:
            require_size(reference, name, sizes[name])
        lacking = [name for name in NEEDED if name not in wanted]
        require(not lacking, f"{reference} is no model of Cleanba: it has no {' and no '.join(lacking)}")
        hub.snapshot_download(repo_id, revision=commit, local_dir=folder, allow_patterns=wanted)
    except UsageError:
        raise
    except (hub.errors.RepositoryNotFoundError, hub.errors.RevisionNotFoundError):
        raise UsageError(f"there is no {reference} on the Hub; check the name, and log in if it is private") from None
    except Exception as error:
        reason = " ".join((str(error) or type(error).__name__).split())[:300]
        raise Failure(f"{reference} could not be downloaded; try again later ({reason})") from error
    mark_downloaded(folder, reference)
    return folder


def require_size(source: str, name: str, size: int | None) -> None:
    """Raise `UsageError` unless one of a foreign run's files has a size that such a file can have."""
    most = MOST_BYTES[name]
    has = "unknown size" if size is None else f"{size / 1e6:,.0f} MB"
    require(
        size is not None and size <= most,
        f"{source} has a {name} of {has}, where {most / 1e6:,.0f} MB is the most; choose another run",
    )


# Archives


class Member(NamedTuple):
    """A file in an archive."""

    path: PurePosixPath
    size: int
    open: Callable[[], IO[bytes] | None]


def unpack(archive: Path) -> Path:
    """A .zip or .tar of a run directory -> a run directory under `runs/unpacked/` with the files that are needed.

    Nothing in the archive decides where anything is written: each file is copied under its own known name.

    Raises:
        UsageError: it cannot be read, or holds no run, or more than one, or files that are too large.
    """
    source = str(archive)
    try:
        with _members(archive) as members:
            files: dict[PurePosixPath, dict[str, Member]] = {}
            for count, member in enumerate(members):
                require(count < MOST_MEMBERS, f"{source} has more than {MOST_MEMBERS:,} files; choose another run")
                if member.path.name in MOST_BYTES:
                    files.setdefault(member.path.parent, {})[member.path.name] = member
            runs = [found for found in files.values() if "config.json" in found]
            require(len(runs) == 1, f"{source} holds {len(runs) or 'no'} runs; name an archive of one run's directory")
            (found,) = runs
            require(
                "model.msgpack" in found,
                f"{source} has no model.msgpack, and checkpoints are not read from an archive; train with "
                "--save-model, or unpack it if it is your own",
            )
            digest = hashlib.sha256(os.fsencode(archive.absolute())).hexdigest()[:8]
            folder = UNPACKED / f"{archive.name.partition('.')[0] or 'run'}-{digest}"
            folder.mkdir(parents=True, exist_ok=True)
            mark_downloaded(folder, source)
            for name, member in found.items():
                require_size(source, name, member.size)
                _copy(source, member, folder / name)
    except (
        OSError,
        EOFError,
        ValueError,
        RuntimeError,
        NotImplementedError,
        tarfile.TarError,
        zipfile.BadZipFile,
    ) as error:
        if isinstance(error, UsageError):
            raise
        raise UsageError(f"{source} cannot be unpacked ({error}); choose another archive") from error
    return folder


def _copy(source: str, member: Member, to: Path) -> None:
    """Write one file, and not more of it than it may have: what an archive says of sizes need not be true."""
    most = MOST_BYTES[to.name]
    with tempfile.NamedTemporaryFile(dir=to.parent, delete=False) as scratch:
        try:
            stream = member.open()
            require(stream is not None, f"{source} has a {to.name} that is no file; choose another run")
            assert stream is not None
            with stream:
                while part := stream.read(2**20):
                    scratch.write(part)
                    if scratch.tell() > most:
                        require_size(source, to.name, scratch.tell())
            os.replace(scratch.name, to)
        except BaseException:
            Path(scratch.name).unlink(missing_ok=True)
            raise


@contextmanager
def _members(archive: Path) -> Iterator[Iterator[Member]]:
    """The plain files in an archive; links, devices and folders are passed over."""
    if archive.name.lower().endswith(".zip"):
        with zipfile.ZipFile(archive) as zipped:
            yield (
                Member(PurePosixPath(info.filename), info.file_size, lambda info=info: zipped.open(info))  # type: ignore[misc]
                for info in zipped.infolist()
                if not info.is_dir() and stat.S_IFMT(info.external_attr >> 16) in (0, stat.S_IFREG)
            )
    else:
        with tarfile.open(archive) as tar:
            yield (
                Member(PurePosixPath(info.name), info.size, lambda info=info: tar.extractfile(info))  # type: ignore[misc]
                for info in tar
                if info.isreg()
            )
