"""What `--help` prints: each flag in two columns, with its default."""

import re
import shutil
import textwrap
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import tyro

from cleanba.config import Field, fields_of, flag

HELP = ("-h", "--help", "--help-all")


def command_help(form: Any, command: str, about: str = "") -> str:
    """What the --help of a command prints."""
    width = help_width()
    hints = get_type_hints(form, include_extras=True)
    marks = {name: getattr(hint, "__metadata__", ()) for name, hint in hints.items()}
    first, rest = [], []
    for f in fields(form):
        known = fields_of(form)[f.name]
        told, meaning = without_default(known.about)
        default = "" if f.default in (MISSING, None, (), "") else in_words(f.default)
        if meaning or default:
            told += f" [default {meaning}]" if meaning else f" {whole_line(f'[default {default}]')}"
        if tyro.conf.Positional in marks[f.name]:
            first.append((metavar(known), told))
        else:
            told += " (required)" if f.default is MISSING else ""
            rest.append((typed_form(f.name, known), told))
    usage = " ".join(["usage: cleanba", command, *(name for name, _ in first), "[FLAGS]"])
    lines = [about.strip() or f"{usage}\n\n{paragraphs(form.__doc__ or '', width)}", ""]
    for name, told in first:
        lines += entry(name, told, width)
    lines += ["", "flags:"] if first else ["flags:"]
    for name, told in [*rest, ("-h, --help", "show this help")]:
        lines += entry(name, told, width)
    return "\n".join(lines)


def help_width() -> int:
    """Columns of the help: those of the terminal, within reason."""
    return min(max(shutil.get_terminal_size((100, 24)).columns, 72), 120)


def paragraphs(text: str, width: int) -> str:
    """Wrap each paragraph of a text to this width."""
    return "\n\n".join(
        textwrap.fill(" ".join(part.split()), width, break_on_hyphens=False) for part in text.split("\n\n")
    )


def without_default(about: str) -> tuple[str, str]:
    """A description without the part that says what its default means, and that part: "x (None: y)" -> "x", "y"."""
    found = re.search(r" \((?:None|default): ([^()]*)\)", about)
    return (about.replace(found[0], "", 1), found[1]) if found else (about, "")


def flag_lines(name: str, f: Field, value: Any, width: int, whole: bool) -> list[str]:
    """The lines of a training command's flag in --help."""
    about = f.about if whole else first_clause(f.about)
    rule = f"; {whole_line(f.rule.bounds)}" if whole and f.rule else ""
    unit = f" {f.rule.unit}" if rule and f.rule and f.rule.unit else ""
    default = whole_line(f"default {in_words(value)}")
    meaning = "" if whole else meaning_of(value, f.about)
    return entry(typed_form(name, f), f"{about}{rule}{unit} [{default}{meaning and f': {meaning}'}]", width)


def meaning_of(value: Any, about: str) -> str:
    """What a flag's description says of a value such as None or 0: "(0: never; None: one a minute)" -> "never"."""
    names = "None|default" if value is None else re.escape(str(value))
    found = re.search(rf"[(;] ?(?:{names}): ([^;)]*)", about)
    return found[1] if found else ""


def typed_form(name: str, f: Field) -> str:
    """A flag with what it takes: "--seed N"."""
    return ", ".join(switches(name, f)) or f"{written_flag(name)} {'|'.join(choices_of(f.annotation)) or metavar(f)}"


def switches(name: str, f: Field) -> list[str]:
    """The forms of a flag that takes no value: "--video" and "--no-video"; none for a flag that takes one."""
    marks = getattr(f.annotation, "__metadata__", ())
    if (get_args(f.annotation)[0] if marks else f.annotation) is not bool:
        return []
    on = written_flag(name)
    return [on] if tyro.conf.FlagCreatePairsOff in marks else [on, f"--no-{on[2:]}"]


WRITTEN = {"experiment_from": "experiment", "from_update": "from", "to_update": "to"}
"""field -> the name of its flag, where that name is a Python keyword or would be ambiguous as a field's"""


def written_flag(name: str) -> str:
    """A field's flag, as it is typed."""
    return flag(WRITTEN.get(name, name))


def first_clause(about: str) -> str:
    """The first clause of a field's description."""
    return min((about.partition(end)[0] for end in ("; ", " (")), key=len)


def entry(written: str, about: str, width: int) -> list[str]:
    """A flag and its description, in two columns; a long flag has a line of its own."""
    column = 32
    lines = textwrap.wrap(about, width - column, break_on_hyphens=False, break_long_words=False)
    lines = [line.replace(HARD_SPACE, " ") for line in lines]
    head = f"  {written}"
    first = [f"{head:{column}}{lines.pop(0)}"] if len(head) <= column - 2 else [head]
    return [*first, *(" " * column + line for line in lines)]


HARD_SPACE = "\0"


def whole_line(text: str) -> str:
    """Text that `entry` does not break."""
    return text.replace(" ", HARD_SPACE)


def choices_of(annotation: Any) -> list[str]:
    """The values that a flag may have, if it has a fixed list of them."""
    return [str(x) for x in get_args(annotation)] if get_origin(annotation) is Literal else []


def metavar(f: Field) -> str:
    """The placeholder for a flag's value, such as N."""
    for mark in (f.rule, *getattr(f.annotation, "__metadata__", ())):
        if given := getattr(mark, "metavar", None):
            return str(given)
    inner = f.annotation
    while get_origin(inner) is not None and get_args(inner):
        several, inner = get_origin(inner) is tuple, get_args(inner)[0]
        if several:
            return f"{'|'.join(choices_of(inner)) or METAVARS.get(inner, 'WORD')} ..."
    return METAVARS.get(inner, "WORD")


METAVARS = {int: "N", float: "X", Path: "PATH"}


def in_words(value: Any) -> str:
    """A value as its flag takes it; an empty one as "none"."""
    if value is None or value in ((), ""):
        return "none"
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, tuple):
        return " ".join(map(str, value))
    return str(value)
