"""Reads the arguments of a command.  Whatever is wrong with them is told in one sentence."""

import itertools
import os
import re
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr
from io import StringIO
from typing import Any, TypeVar, get_type_hints

import tyro

from cleanba.errors import UsageError, closest_names
from cleanba.flags import FLAGS
from cleanba.help import HELP, command_help, written_flag

T = TypeVar("T")


def parse_command(form: type[T], argv: Sequence[str], command: str, about: str = "") -> T:
    """Parse the arguments of a command other than training.  --help prints, and exits with 0.

    form: the dataclass of its flags.
    about: what --help says first; empty: a usage line and the form's docstring.

    Raises:
        UsageError: the arguments are not those of the command.
    """
    if any(word in HELP[:2] for word in argv):
        print(command_help(form, command, about))
        raise SystemExit(0)
    hints = get_type_hints(form, include_extras=True)
    own = [name for name, hint in hints.items() if tyro.conf.Positional not in getattr(hint, "__metadata__", ())]
    remedy_for = lambda unknown: f"set {OTHERS[unknown]}" if OTHERS.get(unknown, "")[2:] in own else ""
    return read_words(form, argv, command, own, remedy_for)


OTHERS = {"--deterministic": "--greedy", "--n-eval-episodes": "--episodes", "--num-episodes": "--episodes"}
"""flags of other systems' evaluations -> ours"""


def read_words(
    form: type[T],
    words: Sequence[str],
    command: str,
    own: Collection[str],
    remedy_for: Callable[[str], str],
    **more: Any,
) -> T:
    """`tyro.cli`, which reads words into a form, and whose errors are told in one sentence.

    own: the fields that are flags.
    remedy_for: a flag that is unknown -> what to do instead, or "".
    more: for `tyro.cli`.

    Raises:
        UsageError: a flag is unknown, or a value is missing or cannot be read.
    """
    refuse_unknown_flags(words, command, own, remedy_for)
    printed = StringIO()
    try:
        with redirect_stderr(printed), one_line_each():
            parsed = tyro.cli(form, args=list(words), prog=f"cleanba {command}", registry=FLAGS, **more)
    except SystemExit:
        what = in_one_sentence(printed.getvalue()) or "these words cannot be read"
        raise UsageError(f"{what}; `cleanba {command} --help` explains the flags") from None
    if printed.getvalue():
        sys.stderr.write(printed.getvalue())
    return parsed


@contextmanager
def one_line_each() -> Iterator[None]:
    """Within the context tyro takes the terminal for a wide one, and breaks no line."""
    width = os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = "10000"
    try:
        yield
    finally:
        if width is None:
            del os.environ["COLUMNS"]
        else:
            os.environ["COLUMNS"] = width


def refuse_unknown_flags(
    words: Sequence[str], command: str, own: Collection[str], remedy_for: Callable[[str], str]
) -> None:
    """Raise `UsageError` for a flag that is none of these fields', and say what to do instead."""
    known = [written_flag(name) for name in own]
    for word in words:
        unknown = word.partition("=")[0].replace("_", "-")
        positive = unknown.replace("--no-", "--")
        if not unknown.startswith("--") or unknown == "--" or {unknown, positive} & {*known}:
            continue
        if remedy := remedy_for(positive):
            raise UsageError(f"{command} has no {positive}; {remedy}")
        close = closest_names(unknown, known, 1, 0.7)
        raise UsageError(
            f"{command} has no {unknown}; {f'did you mean {close}? ' if close else ''}`cleanba {command} --help` lists "
            "its flags"
        )


TYRO = (  # what tyro says, and how it is said here
    (r"Error parsing (\S+): Could not find valid parse for arguments: \[(.*)\]", r"\1: \2 cannot be read"),
    (r"Error parsing (\S+): no type matching .* could be instantiated from \[(.*)\]", r"\1: \2 cannot be read"),
    (r"Error parsing (\S+): (.*)", r"\1: \2"),
    (r"invalid choice '(.*)' for argument '(\S+)'. Expected one of \((.*?),?\)", r"\2 \1 must be one of \3"),
    (r"Missing value for argument '(--\S+)'.*", r"\1 needs a value"),
    (r"Missing value for argument '(\S+)'.*", r"\1 is missing"),
    (r"Missing from cleanba .*?: (\S+) .*", r"\1 is missing"),
    (r"Unrecognized options: ([\w.+]+=[^\s,]*).*", r"\1: flags are written --name value, such as --num-steps 64"),
    (r"Unrecognized options: (.*)", r"\1: no argument and no flag before it takes this; leave it out"),
)


def in_one_sentence(box: str) -> str:
    """What a message of tyro says, without its frame, its title, and everything after the first rule."""
    lines = [line.strip("│ ") for line in box.splitlines() if not line.startswith(("╭", "╰"))]
    blocks = [
        " ".join(block).strip() for rule, block in itertools.groupby(lines, lambda s: not s.strip("─-")) if not rule
    ]
    framed = box.startswith("╭")  # otherwise, as in a plain terminal, the title is a block of its own
    text = "".join(blocks[not framed :][:1]).rstrip(".")
    for theirs, ours in TYRO:
        if (found := re.fullmatch(theirs, text)) is not None:
            text = found.expand(ours)
            break
    return text + "; put spaces between several values" * bool(re.search(r"'\S*,\S*' cannot be read", text))
