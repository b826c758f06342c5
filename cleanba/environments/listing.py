"""`cleanba envs`: the environments that can be trained here, by backend and family, with observations and actions."""

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from typing import Annotated

import tyro
from gymnasium import registry

from cleanba.arguments import parse_command
from cleanba.config import Experiment, require
from cleanba.environments import envpool, gymnasium, jax_envs
from cleanba.environments.backends import env_spec
from cleanba.errors import Exit, UsageError, closest_names
from cleanba.specs import ActionSpec, EnvSpec, describe

EXAMPLES = 3  # names of each family, in the list of all families


@dataclass(frozen=True)
class Flags:
    """List what can be trained here: families, or the environments that match, with observations and actions."""

    pattern: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="[PATTERN]")] = ""
    """part of a name, in lower or upper case, or with * and ?; or package: for what that package registers, or
    package:Class"""
    limit: int = 40
    """how many environments to show with observations and actions; each must be made"""


def envs_command(argv: Sequence[str]) -> Exit:
    """`cleanba envs [PATTERN]`"""
    flags = parse_command(Flags, argv, "envs")
    require(flags.limit >= 0, f"limit={flags.limit} must not be negative; 0 shows names alone")
    package, colon, rest = flags.pattern.partition(":")
    own = bool(colon) and package not in (*jax_envs.SUITES, gymnasium.PREFIX.rstrip(":"))
    if colon and package == "jax":
        print(f"{flags.pattern}  {in_words(env_spec(Experiment(env_id=flags.pattern)))}")
        return Exit()
    if colon and package in jax_envs.SUITES:
        jax_envs.require_library(package)
    families = {("Gymnasium", package): gymnasium.registered_by(package)} if own else all_families()
    wanted = rest if own else flags.pattern
    if not flags.pattern:
        for (backend, family), ids in families.items():
            examples = ", ".join(ids[:EXAMPLES]) + (" …" if len(ids) > EXAMPLES else "")
            print(f"{backend:10} {family:22} {len(ids):5}  {examples}")
        for family, packages in envpool.left_out().items():
            name = family.removeprefix("envpool.")
            print(f"{'EnvPool':10} {name:22}     -  needs assets: pip install {' '.join(packages)}")
        print("\n`cleanba envs PATTERN` lists matching ones; docs/guides/environments.md says how to add your own")
        return Exit()
    found = {family: [name for name in ids if matches(name, wanted)] for family, ids in families.items()}
    count = sum(map(len, found.values()))
    # A class need not be registered, and what a package registers may be made by another one.
    if not count and own and (rest.isidentifier() or rest in registry):
        print(f"{flags.pattern}  {in_words(env_spec(Experiment(env_id=flags.pattern)))}")
        return Exit()
    if not count:
        close = closest_names(flags.pattern, [name for ids in families.values() for name in ids])
        raise UsageError(
            f"no environment matches {flags.pattern!r}; "
            + (f"try {close}" if close else "try `cleanba envs`")
            + ("" if colon else f", or `cleanba envs {flags.pattern}:` for what a package of that name registers")
            + ("" if colon else envpool.left_out_words())
        )
    shown = 0
    for (backend, family), ids in found.items():
        if ids:
            print(f"{backend}: {family}")
        for name in ids:
            print(f"  {name:36} {spaces_of(name)}" if shown < flags.limit else f"  {name}", flush=True)
            shown += 1
    if count > flags.limit:
        print(f"\n--limit {count} shows the observations and actions of all of them")
    return Exit()


def matches(name: str, pattern: str) -> bool:
    """Whether a name contains the pattern, or ends with a match of its * and ?."""
    name, pattern = name.lower(), pattern.lower()
    return pattern in name or fnmatch(name, f"*{pattern}")


def all_families() -> dict[tuple[str, str], list[str]]:
    """The values of `--env-id`, by backend and family."""
    families: dict[tuple[str, str], list[str]] = {}
    for backend, known in (("EnvPool", envpool.known()), ("Gymnasium", gymnasium.known()), ("JAX", jax_envs.known())):
        for name, family in known.items():
            families.setdefault((backend, family), []).append(name)
    return families


def spaces_of(env_id: str) -> str:
    """The observations and actions of an environment, or why it cannot be trained here, in one line."""
    try:
        spec = env_spec(Experiment(env_id=env_id))
    except UsageError as error:
        return f"- {error}"
    return in_words(spec)


def in_words(spec: EnvSpec) -> str:
    """Its observations and actions, in one line."""
    return f"{describe(spec.obs)} -> {describe_action(spec.action)}"


def describe_action(action: ActionSpec) -> str:
    """A short description of actions, such as "one of 4 actions"."""
    if action.kind == "choice":
        return f"one of {action.counts[0]} actions"
    return f"{action.size} {'real numbers' if action.kind == 'quantities' else 'choices'}"
