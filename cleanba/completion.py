"""`cleanba completion SHELL`: a script that completes commands, flags and their values.

The script lists every word that this installation knows, so that a shell completes them without starting Python.
"""

from collections.abc import Sequence
from importlib import import_module
from typing import Any, NamedTuple, get_type_hints

import tyro

from cleanba.cli import COMMANDS
from cleanba.config import Experiment, Placement, Run, offered_fields
from cleanba.environments import envpool
from cleanba.errors import Exit, UsageError
from cleanba.help import HELP, choices_of, first_clause, switches, written_flag
from cleanba.recipes import RECIPES
from cleanba.train_flags import PRESET, SHOW

USAGE = """usage: cleanba completion bash|zsh|fish

Prints a script that completes cleanba's commands, flags and their values:
  bash: cleanba completion bash > ~/.cleanba.bash; echo 'source ~/.cleanba.bash' >> ~/.bashrc
  zsh:  cleanba completion zsh > ~/.cleanba.zsh; echo 'source ~/.cleanba.zsh' >> ~/.zshrc
  fish: cleanba completion fish > ~/.config/fish/completions/cleanba.fish
Run it again after an update."""

SHELLS = ("bash", "zsh", "fish")


class Word(NamedTuple):
    """A flag."""

    name: str
    about: str
    """short description"""
    takes: bool
    """whether it takes a value"""
    values: tuple[str, ...] = ()
    """allowed values, if they are known"""


def completion_command(argv: Sequence[str]) -> Exit:
    """`cleanba completion`."""
    if argv and argv[0] in ("-h", "--help"):
        print(USAGE)
        return Exit()
    if len(argv) != 1 or argv[0] not in SHELLS:
        raise UsageError(f"completion takes one of {', '.join(SHELLS)}, but was given {' '.join(argv) or 'nothing'}")
    print({"bash": bash, "zsh": zsh, "fish": fish}[argv[0]](known_flags()), end="")
    return Exit()


def known_flags() -> dict[str, list[Word]]:
    """The flags of each command."""
    places = flags_of(Placement) + flags_of(Run)
    more = [Word(name, "", False) for name in (*HELP[1:], SHOW)]
    preset = lambda recipe: Word(PRESET, "settings to start from", True, tuple(recipe.named_presets()))
    found = {name: [*flags_of(r.experiment), *places, preset(r), *more] for name, r in RECIPES.items()}
    for name, command in COMMANDS.items():
        found[name] = [Word("--help", "", False)]
        if command.flags:
            found[name] += flags_of(getattr(import_module(command.where.partition(":")[0]), command.flags))
    found["resume"] += [*places, *(word for word in flags_of(Experiment) if word.name == "--total-timesteps")]
    return found


def flags_of(cls: type) -> list[Word]:
    """The flags for the fields of a dataclass."""
    hints = get_type_hints(cls, include_extras=True)
    words = []
    for name, f in offered_fields(cls).items():
        if tyro.conf.Positional in getattr(hints[name], "__metadata__", ()):
            continue
        about = first_clause(f.about)
        if on_off := switches(name, f):
            words += [Word(form, prefix + about, False) for form, prefix in zip(on_off, ("", "not: "), strict=False)]
        else:
            values = tuple(envpool.known()) if name == "env_id" else tuple(choices_of(f.annotation))
            words.append(Word(written_flag(name), about, True, values))
    return words


BASH = """# Completes cleanba's commands, flags and their values.  Made by `cleanba completion`.
_cleanba() {
    local word=${COMP_WORDS[COMP_CWORD]} before=${COMP_WORDS[COMP_CWORD-1]} words= first=1 i
    for ((i = 2; i < COMP_CWORD; i++)); do
        if [[ ${COMP_WORDS[i]} == -- ]]; then first=$((i + 1)); fi  # the command that a sweep repeats
    done
    if ((COMP_CWORD == 1)); then
        words="COMMANDS"
    elif ((COMP_CWORD == first)); then
        words="ALGORITHMS"
    elif [[ $word == -* ]]; then
        case ${COMP_WORDS[first]} in
FLAGS
        esac
    else
        case "${COMP_WORDS[first]} $before" in
VALUES
            "completion completion") words="SHELLS" ;;
        esac
    fi
    COMPREPLY=($(compgen -W "$words" -- "$word"))
}
complete -o default -F _cleanba cleanba
"""


def bash(known: dict[str, list[Word]]) -> str:
    """The script for bash.  Where it offers no words, bash completes file names."""
    flags = [f'            {name}) words="{" ".join(w.name for w in words)}" ;;' for name, words in known.items()]
    followed: dict[tuple[str, ...], list[str]] = {}  # values: the commands and flags that they follow
    for name, words in known.items():
        for word in words:
            if word.values:
                followed.setdefault(word.values, []).append(f'"{name} {word.name}"')
    values = [f'            {"|".join(after)}) words="{" ".join(them)}" ;;' for them, after in followed.items()]
    parts = {
        "COMMANDS": " ".join(known),
        "ALGORITHMS": " ".join(RECIPES),
        "SHELLS": " ".join(SHELLS),
        "FLAGS": "\n".join(flags),
        "VALUES": "\n".join(values),
    }
    text = BASH
    for name, part in parts.items():
        text = text.replace(name, part, 1)
    return text


def zsh(known: dict[str, list[Word]]) -> str:
    """The script for zsh, which can run the one for bash."""
    return f"autoload -U +X compinit && compinit\nautoload -U +X bashcompinit && bashcompinit\n{bash(known)}"


def fish(known: dict[str, list[Word]]) -> str:
    """The script for fish."""
    about: dict[str, Any] = {name: command.about for name, command in (RECIPES | COMMANDS).items()}
    lines = ["# Completes cleanba's commands, flags and their values.  Made by `cleanba completion`."]
    taking: dict[Word, list[str]] = {}  # a flag: the commands that have it
    for name, words in known.items():
        lines.append(f"complete -c cleanba -f -n __fish_use_subcommand -a {name} -d {quoted(about[name])}")
        for word in words:
            taking.setdefault(word, []).append(name)
    for word, names in taking.items():
        values = f" -x -a {quoted(' '.join(word.values))}" if word.values else " -r" if word.takes else ""
        told = f" -d {quoted(word.about)}" if word.about else ""
        seen = f"'__fish_seen_subcommand_from {' '.join(names)}'"
        lines.append(f"complete -c cleanba -n {seen} -l {word.name[2:]}{values}{told}")
    lines.append(f"complete -c cleanba -f -n '__fish_seen_subcommand_from completion' -a {quoted(' '.join(SHELLS))}")
    return "\n".join(lines) + "\n"


def quoted(text: str) -> str:
    """Quote text as one word of fish."""
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"
