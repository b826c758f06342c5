"""Runs from elsewhere: downloaded from the Hugging Face Hub, or unpacked from an archive.

`trust.py` decides what they may choose.  This module brings them to this machine: only the files that are needed, whose
size is known beforehand, under fixed names.
"""

import errno
import hashlib
import io
import itertools
import lzma
import os
import re
import secrets
import stat
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from types import ModuleType
from typing import IO, NamedTuple

from cleanba.config import require
from cleanba.errors import Failure, UsageError, missing, said
from cleanba.files import METRICS, expanded
from cleanba.runs.directory import unwritable
from cleanba.trust import mark_downloaded

DOWNLOADS = Path("runs/hub")
UNPACKED = Path("runs/unpacked")
NEEDED = ("config.json", "model.msgpack")
NEEDED_WHOLE = ("config.json", METRICS)
MOST_BYTES = {"config.json": 2**20, "model.msgpack": 2**31 + 2**20, "result.json": 2**24, METRICS: 2**30}
"""the files that are taken from a run from elsewhere, and the largest size of each"""
PARTS = ("checkpoints", "memory", "actors")
"""the folders that `cleanba verify` and `cleanba bisect` also need"""
MOST_PARTS_BYTES = 2**36  # of all files in these folders together
PART_OF_NAME = re.compile(r"(?!\.\.?$)[\w.-]{1,200}", re.ASCII)
MOST_DEPTH = 8
MOST_MEMBERS = 100_000  # of an archive
REPO = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)
ARCHIVES = (".zip", ".tar", ".tar.gz", ".tgz", ".tar.xz", ".tar.bz2")


def find_run(run: str | os.PathLike[str], model: bool = True, scratch: Path | None = None) -> Path:
    """The directory of a run that is given as a directory, as hf://user/repository, or as an archive.

    For a run from elsewhere it holds config.json and model.msgpack, and is marked as such (`trust.source_of`).
    `read_recipe` decides whether its experiment may be opened.

    model: whether an archive must have model.msgpack.
    scratch: if given, a run from elsewhere comes with its checkpoints and all that they need, an archive's in there.
        It holds config.json and metrics.jsonl, and need hold no model.

    Raises:
        UsageError: there is no such run.
        Failure: the Hub could not be reached.
    """
    require(isinstance(run, str | os.PathLike), f"a run is named by its directory, not by {run!r}")
    run = os.fspath(run)
    if run.startswith("hf://"):
        return download(run, whole=scratch is not None)
    path = expanded(run)
    return unpack(path, scratch, model) if path.is_file() and path.name.lower().endswith(ARCHIVES) else path


def require_hub() -> ModuleType:
    """Import the optional library huggingface_hub.

    Raises:
        UsageError: it is not installed.
    """
    try:
        import huggingface_hub.errors
        import huggingface_hub.utils
    except ImportError as error:
        raise missing("the Hugging Face Hub", error, "hub") from None
    return huggingface_hub


def download(reference: str, whole: bool = False) -> Path:
    """Download hf://user/repo or hf://user/repo@revision to a run directory with config.json and model.msgpack.

    The directory lies under `runs/hub/`.  Files are downloaded again only if they have changed.

    whole: with the run's checkpoints and all that they need; its model is not necessary then.

    Raises:
        UsageError: the reference is malformed, names no uploaded run, or names one that is too large.
        Failure: the Hub could not be reached.
    """
    repo_id, _, revision = reference.removeprefix("hf://").partition("@")
    require(REPO.fullmatch(repo_id) is not None, f"{reference} names no repository; write hf://user/repo")
    hub = require_hub()
    hub.utils.disable_progress_bars()
    folder = DOWNLOADS / (f"{repo_id}@{re.sub(r'[^A-Za-z0-9_.-]', '-', revision)}" if revision else repo_id)
    try:
        api = hub.HfApi(library_name="cleanba")
        commit = api.repo_info(repo_id, revision=revision or None).sha
        tree = api.list_repo_tree(repo_id, revision=commit, recursive=whole)
        sizes = {item.path: getattr(item, "size", None) for item in tree}
        wanted = [name for name in MOST_BYTES if name in sizes]
        for name in wanted:
            require_size(reference, name, sizes[name])
        if whole:
            parts = [name for name, size in sizes.items() if size is not None and is_part(PurePosixPath(name))]
            require_room_for_parts(reference, sum(sizes[name] or 0 for name in parts))
            wanted += parts
        lacking = [name for name in (NEEDED_WHOLE if whole else NEEDED) if name not in wanted]
        require(not lacking, f"{reference} is not a model of Cleanba: it has no {' and no '.join(lacking)}")
        hub.snapshot_download(repo_id, revision=commit, local_dir=folder, allow_patterns=wanted)
        for path in [*map(folder.joinpath, MOST_BYTES), *(p for part in PARTS for p in (folder / part).rglob("*"))]:
            name = path.relative_to(folder).as_posix()
            if path.is_file() and name not in wanted and (whole or name in MOST_BYTES):
                path.unlink()  # of an earlier commit
    except UsageError:
        raise
    except (hub.errors.RepositoryNotFoundError, hub.errors.RevisionNotFoundError):
        raise UsageError(f"there is no {reference} on the Hub; check the name, and log in if it is private") from None
    except Exception as error:
        raise Failure(f"{reference} could not be downloaded; try again later ({said(error)[:300]})") from error
    mark_downloaded(folder, reference)
    return folder


def require_size(source: str, name: str, size: int | None) -> None:
    """Raise `UsageError` if a foreign run's file is too large, or its size unknown."""
    most = MOST_BYTES[name]
    has = "unknown size" if size is None else f"{size / 1e6:,.0f} MB"
    require(
        size is not None and size <= most,
        f"{source} has a {name} of {has}, but the limit is {most / 1e6:,.0f} MB; choose another run",
    )


def is_part(path: PurePosixPath) -> bool:
    """Whether a path within a run is that of a file in one of `PARTS`, with plain names all the way."""
    known = 1 < len(path.parts) <= MOST_DEPTH and path.parts[0] in PARTS
    return known and all(PART_OF_NAME.fullmatch(part) for part in path.parts)


def require_room_for_parts(source: str, size: int) -> None:
    """Raise `UsageError` if a foreign run's checkpoints are too large."""
    require(
        size <= MOST_PARTS_BYTES,
        f"{source} has checkpoints of {size / 1e9:,.1f} GB, but the limit is {MOST_PARTS_BYTES / 1e9:,.0f} GB; "
        "choose another run",
    )


# Archives


class Member(NamedTuple):
    """A file in an archive."""

    path: PurePosixPath
    size: int
    open: Callable[[], IO[bytes] | None]


def unpack(archive: Path, whole: Path | None = None, model: bool = True) -> Path:
    """Unpack the files that are needed from a .zip or .tar of a run directory, to a directory in `runs/unpacked/`.

    The archive does not decide where files are written: each is copied under its own known name.

    whole: a directory to unpack to in place of that one, with checkpoints and all that they need.  The model is not
        necessary then.
    model: whether the model is necessary.

    Raises:
        UsageError: the archive cannot be read, holds no run or more than one, or holds files that are too large.
    """
    source = str(archive)
    try:
        with _members(archive) as members:
            files: dict[PurePosixPath, dict[str, Member]] = {}
            others: list[Member] = []
            for count, member in enumerate(members):
                require(count < MOST_MEMBERS, f"{source} has more than {MOST_MEMBERS:,} files; choose another run")
                if member.path.name in MOST_BYTES:
                    files.setdefault(member.path.parent, {})[member.path.name] = member
                else:
                    others.append(member)
            runs = [parent for parent, found in files.items() if "config.json" in found]
            require(len(runs) == 1, f"{source} holds {len(runs) or 'no'} runs; name an archive of one run's directory")
            (home,) = runs
            found = files[home]
            if whole is not None:
                require(METRICS in found, f"{source} has no {METRICS}; choose another run")
            else:
                require(
                    "model.msgpack" in found or not model,
                    f"{source} has no model.msgpack, and checkpoints are not read from an archive; write the archive "
                    "with `cleanba pack RUN_DIR`, or unpack it if it is your own",
                )
            folder = whole or _unpacked_folder(archive)
            mark_downloaded(folder, source)
            for name, member in found.items():
                require_size(source, name, member.size)
                _copy(source, member, folder / name)
            if whole is not None:
                _copy_parts(source, home, others, whole)
            else:
                for name in MOST_BYTES.keys() - found.keys():  # of what the archive held before
                    (folder / name).unlink(missing_ok=True)
    except (
        OSError,
        EOFError,
        ValueError,
        RuntimeError,
        NotImplementedError,
        tarfile.TarError,
        zipfile.BadZipFile,
        zlib.error,
        lzma.LZMAError,
    ) as error:
        if isinstance(error, UsageError | Failure):
            raise
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise Failure(f"{source} cannot be unpacked: {error.strerror}; free disk space") from error
        if isinstance(error, OSError) and error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            place = Path(os.fsdecode(error.filename)) if error.filename else archive
            if place == archive:
                raise UsageError(f"{source} cannot be read: {error.strerror}; make it readable") from error
            raise unwritable(place.parent, error, "current directory") from error
        why = "it is no such archive, or damaged" if isinstance(error, tarfile.ReadError) else error
        raise UsageError(f"{source} cannot be unpacked ({why}); choose another archive") from error
    return folder


def _unpacked_folder(archive: Path) -> Path:
    """Make the folder in `runs/unpacked/` that an archive is unpacked to, the same each time."""
    digest = hashlib.sha256(os.fsencode(archive.absolute())).hexdigest()[:8]
    folder = UNPACKED / f"{archive.name.partition('.')[0] or 'run'}-{digest}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise unwritable(folder, error, "current directory") from None
    return folder


def _copy_parts(source: str, home: PurePosixPath, members: Iterable[Member], folder: Path) -> None:
    """Copy the files of `PARTS`, in the archive's order."""
    room = MOST_PARTS_BYTES
    for member in members:
        if not member.path.is_relative_to(home) or not is_part(member.path.relative_to(home)):
            continue
        to = folder / member.path.relative_to(home)
        to.parent.mkdir(parents=True, exist_ok=True)
        with member.open() or io.BytesIO() as stream, open(to, "wb") as file:
            while part := stream.read(2**20):
                room -= len(part)
                require_room_for_parts(source, MOST_PARTS_BYTES - room)
                file.write(part)


def _copy(source: str, member: Member, to: Path) -> None:
    """Copy one file, up to its largest allowed size, as the sizes that an archive states may be false."""
    most = MOST_BYTES[to.name]
    path = to.with_name(f"{to.name}.{secrets.token_hex(4)}.tmp")  # several commands may unpack one archive
    with open(path, "xb") as scratch:
        try:
            stream = member.open()
            require(stream is not None, f"{source} has a {to.name} that is not a regular file; choose another run")
            assert stream is not None
            with stream:
                while part := stream.read(2**20):
                    scratch.write(part)
                    if scratch.tell() > most:
                        require_size(source, to.name, scratch.tell())
            os.replace(path, to)
        except BaseException:
            path.unlink(missing_ok=True)
            raise


class ShortHeader(tarfile.TarInfo):
    """A member of an archive, refused if its name is too long: `tarfile` would read any length into memory."""

    def _proc_member(self, tar: tarfile.TarFile) -> tarfile.TarInfo:  # `tarfile` documents it for subclasses
        if self.type in NAMES_IN_BODY and self.size > MOST_NAME_BYTES:
            raise tarfile.HeaderError(f"a name in it has {self.size:,} characters")
        return super()._proc_member(tar)  # type: ignore[misc]


MOST_NAME_BYTES = 2**20  # macOS keeps attributes of files there, too
NAMES_IN_BODY = (
    *(tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK),
    *(tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.SOLARIS_XHDTYPE),
)


@contextmanager
def _members(archive: Path) -> Iterator[Iterator[Member]]:
    """The regular files in an archive, without links, devices and folders."""
    if archive.name.lower().endswith(".zip"):
        with zipfile.ZipFile(archive) as zipped:
            yield (
                Member(PurePosixPath(info.filename), info.file_size, lambda info=info: zipped.open(info))  # type: ignore[misc]
                for info in zipped.infolist()
                if not info.is_dir() and stat.S_IFMT(info.external_attr >> 16) in (0, stat.S_IFREG)
            )
    else:
        with tarfile.open(archive, tarinfo=ShortHeader) as tar:
            infos = list(itertools.islice(tar, MOST_MEMBERS + 1))
            while tar.fileobj is not None and tar.fileobj.read(2**20):
                pass  # to its end, where gzip compares checksums
            yield (
                Member(PurePosixPath(info.name), info.size, lambda info=info: tar.extractfile(info))  # type: ignore[misc]
                for info in infos
                if info.isreg()
            )
