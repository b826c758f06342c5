"""`cleanba pack RUN_DIR`: one archive of a run, with what others need to evaluate, draw, compare and verify it."""

import os
import shlex
import shutil
import tarfile
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from cleanba.agents.hub import fill_run, kept_parts, needs_trust
from cleanba.arguments import parse_command
from cleanba.config import read_experiment, require
from cleanba.errors import Exit, Failure
from cleanba.runs.directory import EVALUATIONS, films_of, unwritable
from cleanba.runtime.checkpoint import updates_kept
from cleanba.trust import require_trusted


@dataclass(frozen=True)
class Flags:
    """Write a run as one archive, which others can evaluate, draw, compare, or start training from, by its file name.

    It holds the configuration, the log, the result, the parameters, evaluations and the newest film.
    Names of folders, hosts, jobs and accounts are left out; --exp-name and --env-options stay as you typed them.
    """

    run_dir: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN_DIR")]
    """directory of the run; if it is unfinished, the parameters are those of its newest checkpoint"""
    out: Path | None = None
    """file to write, ending in .tar.gz (default: RUN_DIR.tar.gz)"""
    checkpoints: bool = False
    """include the checkpoints that the run keeps, and their replay memory and actors, so that others can `cleanba
    verify` it from any of them; without them, only from its beginning, and not at all if it began with --init-from"""


def pack_command(argv: Sequence[str]) -> Exit:
    """`cleanba pack`."""
    flags = parse_command(Flags, argv, "pack")
    run_dir = flags.run_dir
    read_experiment(run_dir)
    require_trusted(run_dir, "only the original directory of a run can be packed")
    out = flags.out or run_dir.absolute().with_name(f"{run_dir.absolute().name}.tar.gz")
    require(out.name.endswith(".tar.gz") and not out.is_dir(), f"--out {out} must be a file that ends in .tar.gz")
    trust = " --trust-remote-code" if needs_trust(run_dir) else ""
    pack(run_dir, out, flags.checkpoints)
    print(f"wrote {out} ({out.stat().st_size / 1e6:,.2f} MB)")
    name = shlex.quote(out.name)
    print(f"others can run: cleanba eval {name}{trust}, cleanba verify {name}{trust}, cleanba diff {name} RUN")
    if trust:
        print("they need the modules of its environment and algorithm, which are not in the file")
    return Exit()


def pack(run_dir: Path, out: Path, checkpoints: bool = False) -> None:
    """Write a run as a .tar.gz, whole or not at all.

    Raises:
        UsageError: there is no such run, it has no parameters yet, or the file cannot be written.
        Failure: the disk is full, or the run is still training and has removed a checkpoint meanwhile.
    """
    name = out.name.removesuffix(".tar.gz")
    parts = kept_parts(run_dir) if checkpoints else []  # listed before the log is copied, which then has their digests
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        model = fill_run(folder, run_dir)
        for kept in sorted((run_dir / EVALUATIONS).glob("*.json")):
            (folder / EVALUATIONS).mkdir(exist_ok=True)
            shutil.copyfile(kept, folder / EVALUATIONS / kept.name)
        for film in films_of(run_dir, model.update)[-1:]:
            (folder / "videos").mkdir(exist_ok=True)
            shutil.copyfile(film, folder / "videos" / film.name)
        files = [(path, path.relative_to(folder)) for path in sorted(folder.rglob("*")) if path.is_file()]
        there = {str(update) for update in updates_kept(run_dir)}  # a run that is still training may have removed some
        places = [path.relative_to(run_dir) for path in parts if path.exists()]
        files += [
            (run_dir / place, place) for place in places if place.parts[0] != "checkpoints" or place.parts[1] in there
        ]
        unfinished = out.with_name(f".{out.name}.{os.getpid()}.tmp")
        try:
            out.parent.mkdir(parents=True, exist_ok=True)
            unfinished.touch()
        except OSError as error:
            raise unwritable(out, error, "--out") from None
        try:
            with tarfile.open(unfinished, "w:gz", dereference=True) as archive:
                for path, place in files:
                    archive.add(path, f"{name}/{place.as_posix()}", filter=without_owner)
            os.replace(unfinished, out)
        except FileNotFoundError:
            raise Failure(f"{run_dir} removed a checkpoint meanwhile; try again, or after the run has ended") from None
        except OSError as error:
            raise unwritable(out, error, "--out") from None
        finally:
            with suppress(OSError):
                unfinished.unlink(missing_ok=True)


def without_owner(member: tarfile.TarInfo) -> tarfile.TarInfo:
    """A member of an archive, without its owner."""
    member.uid = member.gid = 0
    member.uname = member.gname = ""
    return member
