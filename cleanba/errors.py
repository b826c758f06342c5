"""How a command ends.  All errors but bugs are one sentence, shown without a stack trace."""

import signal
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterable
from difflib import get_close_matches
from math import isqrt
from pathlib import Path
from typing import NamedTuple


class Exit(NamedTuple):
    """How a command ended."""

    code: int = 0
    """0 done, 1 failed, 2 wrong use, 3 cannot be compared (`verify`), 128 + n ended by signal n"""
    stuck: bool = False
    """a thread is still inside a long computation, so the process must exit without joining it"""


class UsageError(ValueError):
    """A request that cannot be carried out as written.  The message gives value, rule and remedy.  Exit code 2."""


class Failure(RuntimeError):
    """Something outside the code failed: a full disk, a dead process, numbers that are not finite.  Exit code 1."""


class CannotCompile(Failure):
    """A kernel for CPUs cannot be compiled on this machine.  Plain JAX is used instead."""


class NotFinite(Failure):
    """A number is not finite.  Resuming the run from its checkpoint would lead to the same number again."""


class Interrupted(Exception):
    """A signal asked the run to end; the command exits with 128 + its number."""

    def __init__(self, signum: int, where: str = ""):
        super().__init__(f"interrupted by {signal.Signals(signum).name}{where}")
        self.signum, self._where = signum, where

    def __reduce__(self) -> tuple[type["Interrupted"], tuple[int, str]]:
        """For pickle, which pools of processes use to send errors."""
        return type(self), (self.signum, self._where)


def exit_code(error: BaseException) -> int:
    """The exit code of a command that ended with this error."""
    return 128 + error.signum if isinstance(error, Interrupted) else 2 if isinstance(error, UsageError) else 1


def said(error: BaseException) -> str:
    """An error's message, in one line."""
    return " ".join(str(error).split()) or type(error).__name__


SAID: set[str] = set()  # what `warn_once` has printed


def warn(sentence: str) -> None:
    """A warning on the console."""
    print(f"cleanba: warning: {sentence}", file=sys.stderr)


def warn_once(sentence: str) -> None:
    """Print a warning, unless this process has printed the same one before."""
    if sentence not in SAID:
        SAID.add(sentence)
        warn(sentence)


def printable(text: str, keep: str = "") -> str:
    """Text with its control characters escaped, except those in `keep`.  It may come from a stranger's file."""
    return "".join(c if c.isprintable() or c in keep else ascii(c)[1:-1] for c in text)


# Paths of library code.  All other code is the user's, even in a folder that is called cleanba, too.
CLEANBA = f"{Path(__file__).parent}/"
LIBRARIES = ("importlib", CLEANBA, *(f"/site-packages/{name}/" for name in ("flax", "gymnasium", "jax", "numpy")))
STANDARD = sysconfig.get_path("stdlib")


def is_own(filename: str) -> bool:
    """Whether a file holds the user's code, rather than that of Cleanba, Python or a library that Cleanba uses."""
    standard = filename.startswith(STANDARD) and "site-packages" not in filename
    return not standard and not any(name in filename for name in LIBRARIES)


def place_of(error: BaseException) -> str:
    """Where the user's code raised an error, as ", at file:line"; "" if libraries raised it."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if is_own(f.filename)]
    return f", at {frames[-1].filename}:{frames[-1].lineno}" if frames else ""


def raised(error: BaseException) -> str:
    """An error of the user's code, in one line, with its file and line number if it was raised outside libraries."""
    place = "" if isinstance(error, ImportError | SyntaxError) else place_of(error)
    return f"{type(error).__name__}: {said(error)}{place}" if place else said(error)


def own_trace(error: BaseException) -> str:
    """The traceback of an error of the user's code, without the frames that led there; all of it for other errors."""
    trace, start = error.__traceback__, None
    while trace is not None:
        filename = trace.tb_frame.f_code.co_filename
        if filename.startswith(CLEANBA):
            start = None
        elif start is None and is_own(filename):
            start = trace
        trace = trace.tb_next
    return "".join(traceback.format_exception(type(error), error, start or error.__traceback__))


def nearest(value: int, fits: Callable[[int], bool], limit: int = 100_000) -> str:
    """The closest positive integers below and above `value` for which `fits` holds, as "119 or 126"."""
    below = next((n for n in range(value - 1, max(0, value - limit), -1) if fits(n)), None)
    above = next((n for n in range(value + 1, value + limit) if fits(n)), None)
    return " or ".join(str(n) for n in (below, above) if n is not None)


def nearest_divisors(of: int, to: int) -> str:
    """The two divisors of `of` that are nearest to `to`, as "18 or 36"; or the only one."""
    divisors = {d for i in range(1, isqrt(of) + 1) if of % i == 0 for d in (i, of // i)}
    return " or ".join(map(str, sorted(sorted(divisors, key=lambda d: (abs(d - to), d))[:2])))


def largest_divisor(of: int, most: int) -> int:
    """The largest divisor of `of` that is at most `most`."""
    return max(d for d in range(1, min(of, most) + 1) if of % d == 0)


def closest_names(name: str, known: Iterable[str], count: int = 3, alike: float = 0.4) -> str:
    """The `count` known names most like `name`, compared without regard to case, separated by commas.

    alike: how much like it they must be, from 0 to 1.
    """
    by_lower: dict[str, str] = {}
    for k in known:
        by_lower.setdefault(k.lower(), k)
    return ", ".join(by_lower[m] for m in get_close_matches(name.lower(), by_lower, count, alike))


def missing(what: str, error: ImportError, extra: str) -> UsageError:
    """The error for an optional package that is not installed.

    It names the module that could not be imported, which may be a dependency of the package rather than the package.
    """
    module = (error.name or "").partition(".")[0]
    lack = f"the module {module}, which is not installed" if module else f"a package that does not load ({said(error)})"
    return UsageError(
        f"{what} needs {lack}; install Cleanba's extra `{extra}`: `pip install -e '.[{extra}]'` in a clone, or "
        f"`pip install 'cleanba[{extra}] @ git+<repository>'`"
    )
