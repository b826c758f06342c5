"""The command `cleanba`: its subcommands and exit codes."""

import errno
import os
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from io import TextIOWrapper
from pathlib import Path
from traceback import extract_tb
from types import ModuleType
from typing import NamedTuple

from cleanba import __version__
from cleanba.errors import Exit, Failure, UsageError, closest_names, exit_code, printable, said
from cleanba.interrupts import handle_by, leave_at_once, raise_interrupt, started


class Command(NamedTuple):
    """A subcommand other than an algorithm.  Its module is only imported when the command is called."""

    about: str
    where: str
    """module:function, which takes the arguments after the command and returns an `Exit`"""
    flags: str = "Flags"
    """name of the dataclass of its flags in that module; empty if there is none"""


COMMANDS = {
    "eval": Command("play complete episodes with a trained agent", "cleanba.agents.evaluate:eval_command", "Eval"),
    "envs": Command("list the environments that can be trained here", "cleanba.environments.listing:envs_command"),
    "ls": Command("list runs", "cleanba.runs.listing:ls_command", "Ls"),
    "resume": Command("continue a run, on the same placement or another", "cleanba.launch:resume_command", ""),
    "diff": Command("tell whether two runs trained the same bits", "cleanba.runs.diff:diff_command", ""),
    "verify": Command(
        "compute parts of a run again, and compare them with what it recorded",
        "cleanba.checks.verify:verify_command",
        "Verify",
    ),
    "bisect": Command(
        "find where two runs diverge, or one run on two placements", "cleanba.checks.bisect:bisect_command"
    ),
    "plot": Command("draw learning curves, and Atari scores beside published ones", "cleanba.runs.plot:plot_command"),
    "report": Command("write one HTML page about a run, to be read offline", "cleanba.runs.report:report_command"),
    "export": Command("write a trained agent as ONNX or StableHLO", "cleanba.agents.export:export_command"),
    "pack": Command("write a run as one archive, for others", "cleanba.agents.pack:pack_command"),
    "push": Command("upload a trained agent to the Hugging Face Hub", "cleanba.agents.hub:push_command"),
    "sweep": Command("train environments x seeds x flags, here or under Slurm", "cleanba.sweeps.sweep:sweep_command"),
    "slurm": Command("write out the templates for Slurm", "cleanba.sweeps.slurm:slurm_command", "Templates"),
    "completion": Command(
        "print a script with which a shell completes commands and flags", "cleanba.completion:completion_command", ""
    ),
}

ALIKE = {"a2c": "ppo", "a3c": "ppo", "trpo": "ppo", "ddpg": "td3", "rainbow": "dqn"}
"""algorithms that are not here -> the nearest one that is"""

NOT_USABLE = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENAMETOOLONG, errno.ENOTDIR, errno.ELOOP)
LINES = "\n\t"  # messages may have several lines


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command and exit: 0 done, 1 failed, 2 wrong use, 3 cannot be compared, 128 + n ended by signal n."""
    argv = list(sys.argv[1:] if arguments is None else arguments)
    sys.stdout, sys.stderr = (stream or open(os.devnull, "w") for stream in (sys.stdout, sys.stderr))  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # for a terminal that cannot show ü
    handle_by(leave_at_once, signal.default_int_handler)
    try:
        end = attempt(argv)
        sys.stdout.flush()  # here, where a pipe without a reader and a full disk are handled
        sys.stderr.flush()
    except KeyboardInterrupt:  # while nobody reads what is flushed
        os._exit(130)
    except BrokenPipeError:
        os._exit(128 + signal.SIGPIPE)
    except OSError as error:
        if error.errno in NOT_USABLE and error.filename is not None:
            name = printable(os.fsdecode(error.filename))
            print(f"cleanba: {name} cannot be used: {error.strerror}; choose another", file=sys.stderr)
            os._exit(2)
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        with suppress(OSError):  # it may go to the same disk
            print(f"cleanba: output cannot be written ({error}); free disk space", file=sys.stderr, flush=True)
        os._exit(1)
    finally:
        started()
        handle_by(signal.default_int_handler, raise_interrupt)
    if end.stuck or end.code:
        os._exit(end.code)  # a thread may be in a long computation, or JAX's runtime may wait for peers that are gone
    sys.exit(end.code)


def attempt(argv: Sequence[str]) -> Exit:
    """Run the command; its errors, Ctrl-C and exits become one sentence and an exit code."""
    try:
        return dispatch(argv)
    except (UsageError, Failure) as error:
        print(f"cleanba: {printable(str(error), keep=LINES)}", file=sys.stderr)
        return Exit(exit_code(error))
    except KeyboardInterrupt:
        print("cleanba: interrupted", file=sys.stderr)
        return Exit(130)
    except SystemExit as left:  # --help; rich: the pipe has no reader (`cleanba ppo | head`)
        if isinstance(left.code, str):
            print(f"cleanba: {left.code}", file=sys.stderr)
        return Exit(1 if isinstance(left.code, str) else int(left.code or 0))


def check_environment() -> None:
    """Raise `UsageError` for environment variables with which the import of JAX would fail."""
    devices = os.environ.get("JAX_NUM_CPU_DEVICES", "1")
    if not devices.isdecimal() or int(devices) < 1:
        raise UsageError(f"JAX_NUM_CPU_DEVICES={devices!r} must be a whole number from 1; unset it for one device")


def load(module: str) -> ModuleType:
    """Import a module, and perhaps JAX with it, which then reads its environment variables.

    Raises:
        UsageError: JAX refuses one of them.
        Failure: packages do not fit together.
    """
    try:
        return import_module(module)
    except ValueError as error:
        if any(Path(frame.filename).match("jax/_src/config.py") for frame in extract_tb(error.__traceback__)):
            raise UsageError(f"JAX refuses an environment variable: {said(error)}; correct or unset it") from error
        raise Failure(f"{module} cannot be imported ({said(error)}); install Cleanba's packages anew") from error
    except (ImportError, AttributeError, RuntimeError) as error:  # one lacks what another one uses
        raise Failure(
            f"{module} cannot be imported ({said(error)}): packages are missing, or do not fit together; install "
            "Cleanba's packages anew, such as those in requirements/run.txt"
        ) from error


def dispatch(argv: Sequence[str]) -> Exit:
    """Run the command that the arguments name.  Slow imports wait until they are needed."""
    if argv and argv[0] in ("--version", "-V"):
        print(f"cleanba {__version__}")
        return Exit()
    check_environment()
    if argv and argv[0] in COMMANDS:
        module, function = COMMANDS[argv[0]].where.split(":")
        command = getattr(load(module), function)
        if argv[0] != "resume":  # training itself calls `started` later
            started()
        return command(argv[1:])
    recipes = load("cleanba.recipes")
    names = {name: known.about for name, known in (recipes.RECIPES | COMMANDS).items()}
    if not argv or argv[0] in ("-h", "--help"):
        commands = "\n".join(f"  {name:10} {about}" for name, about in names.items())
        print(
            f"usage: cleanba COMMAND [FLAGS]\n\ncommands:\n{commands}\n\n`cleanba COMMAND --help` explains its flags."
        )
        return Exit(0 if argv else 2)
    name, *flags = argv
    if recipes.names_recipe(name):
        return load("cleanba.launch").train_command(recipes.find_recipe(name), flags)
    if name.lower() in ALIKE:
        raise UsageError(f"there is no {name} here; the nearest algorithm is {ALIKE[name.lower()]}")
    close = "cleanba eval RUN --video" if name == "film" else closest_names(name, names)
    raise UsageError(
        f"there is no command {name!r}; " + (f"did you mean {close}?" if close else f"try {', '.join(names)}")
    )
