"""Checks of runs that come from elsewhere.  docs/guides/trust.md says why they are needed.

Your own run directories are trusted like your own programs: their config.json names an environment, which may be any
function of any module.  A run that was downloaded, or unpacked from an archive, is not trusted.  It may only name
environments that this installation knows and sizes that fit a computer.  Anything else is refused before it is
imported, called or allocated.
"""

import math
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, NoReturn, Union, get_args, get_origin, get_type_hints

import gymnasium as gym
import jax

from cleanba.config import Experiment, require
from cleanba.environments import envpool, gymnasium, jax_envs
from cleanba.environments.common import parse_options
from cleanba.errors import UsageError
from cleanba.files import Json, read_json, write_json
from cleanba.rollout import PyTree

MARK = "downloaded.json"  # in a run directory that came from elsewhere: {"from": where}
HUBS_OWN = Path(".cache/huggingface/download")  # in a folder that the Hub's library downloads to: its files, by name
REMEDY = "read its config.json, then add --trust-remote-code if you trust whoever made it"
ANOTHER = "choose another run"

MOST = {  # the largest value of a whole number; 10^9 for fields that are not listed
    "num_envs": 10**6,
    "num_steps": 10**6,
    "max_episode_steps": 10**6,
    "lstm_size": 8192,
    "hiddens": 8192,
    "channels": 2048,
    "seed": 2**31 - 1,
    "total_timesteps": 10**15,
}
POSITIVE = (*("num_envs", "num_steps", "num_actors", "num_shards", "num_minibatches"), "lstm_size")
MOST_LAYERS = 16
MOST_NUMBER: float = 1e12  # the largest real number
MOST_BYTES = 2**31  # of all parameters together
MOST_OPTIONS, MOST_OPTION = 32, 100  # number of options, and characters of one
MOST_OPTION_NUMBER = 10**6  # the largest real number in an option, and the largest whole number that is no size
NO_SIZES = ("step", "level", "seed")  # one of these is in the name of an option that is no size
MOST_OPTION_SIZE = 4096  # the largest other whole number, as it may be a length or a width
MOST_OPTION_PRODUCT = 10**7  # the largest product of such numbers
# An option whose name contains one of these may take a file or code, so its value may not be a word.
NAMES_OF_FILES_AND_CODE = (
    *("path", "file", "dir", "url", "host", "rom", "wad", "cfg", "config", "xml", "asset", "model"),
    *("module", "class", "cls", "fn", "func", "call", "import", "entry", "wrapper", "plugin", "backend", "render"),
)


def mark_downloaded(run_dir: Path, source: str) -> None:
    """Mark the run in this directory as one from elsewhere."""
    write_json(run_dir / MARK, {"from": source}, shared=True)  # several commands may unpack one archive


def source_of(run_dir: Path) -> str | None:
    """Where a run, or a folder that it lies in, was downloaded or unpacked from; None for a run of one's own."""
    place = run_dir.resolve()
    for folder in (place, *place.parents):
        if (folder / MARK).exists():
            return str(read_json(folder / MARK).get("from"))
        if (folder / HUBS_OWN / place.relative_to(folder)).is_dir():  # it lists the files that it downloaded
            return str(run_dir)
    return None


def name_of(run_dir: Path) -> str:
    """What messages call a run: where it was downloaded or unpacked from, or its folder."""
    return source_of(run_dir) or str(run_dir)


def require_trusted(run_dir: Path, what: str) -> None:
    """Raise `UsageError` if a run is from elsewhere; `what` is the part of the message that says what is refused."""
    source = source_of(run_dir)
    require(
        source is None,
        f"{source} comes from elsewhere, and {what}; `cleanba ALGORITHM --experiment {run_dir}` trains its experiment "
        "again in a directory of its own",
    )


def require_own(run_dir: Path) -> None:
    """Raise `UsageError` if the directory of a run to train is, or lies in, a run from elsewhere."""
    if (run_dir / "config.json").exists():
        require_trusted(run_dir, "a run can continue only in its original directory")
    source = source_of(run_dir)
    require(source is None, f"run_dir={str(run_dir)!r} lies in {source}, which comes from elsewhere; name another")


def check_values(cls: type[Experiment], values: Json, source: str) -> None:
    """Raise `UsageError` unless the settings in a foreign config.json have valid types and sizes.

    Names that `cls` does not have are skipped here: `resolution.known_of` refuses them.
    """
    hints = get_type_hints(cls)
    require(
        all(name.isidentifier() and len(name) <= 40 for name in values) and len(values) <= 200,
        f"{source} comes from elsewhere, and its config.json is not one of Cleanba's; choose another run",
    )
    for name, value in values.items():
        hint = hints.get(name)
        if hint is not None and not _fits(hint, value):
            refuse(
                source,
                f"sets {name} to {_shown(value)}, which is not a value of its type ({_type_name(hint)})",
                ANOTHER,
            )
        for number in value if isinstance(value, list) else (value,):
            if isinstance(number, bool) or not isinstance(number, int | float):
                continue
            least, most = -MOST_NUMBER, MOST_NUMBER
            if isinstance(number, int):
                least, most = int(name in POSITIVE or isinstance(value, list)), MOST.get(name, 10**9)
            if not least <= number <= most:
                refuse(source, f"sets {name} to {_shown(number)}, outside [{least:g}, {most:g}]", ANOTHER)
        if isinstance(value, list):
            limit = MOST_OPTIONS if name.startswith("env_") else MOST_LAYERS
            least = int(name in ("hiddens", "channels"))
            if not least <= len(value) <= limit:
                refuse(source, f"gives {name} {len(value)} entries, but it can have {least} to {limit}", ANOTHER)


def _fits(hint: Any, value: object) -> bool:
    """Whether a JSON value has a field's type, in the form that `config.to_json` writes."""
    origin = get_origin(hint)
    if origin in (Union, types.UnionType):
        return any(_fits(part, value) for part in get_args(hint))
    if origin is Literal:
        return isinstance(value, str | int | bool) and value in get_args(hint)
    if origin is tuple:
        return isinstance(value, list) and all(_fits(get_args(hint)[0], part) for part in value)
    if hint is type(None):
        return value is None
    if hint is float:
        if isinstance(value, float):
            return math.isfinite(value)
        return (isinstance(value, int) and not isinstance(value, bool)) or value in ("inf", "-inf")
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    if hint is str:
        return isinstance(value, str) and len(value) <= 200
    return isinstance(hint, type) and isinstance(value, hint)


def _type_name(hint: Any) -> str:
    return hint.__name__ if isinstance(hint, type) and get_origin(hint) is None else str(hint).replace("typing.", "")


def check_algorithm(name: str, known: bool, source: str) -> None:
    """Raise `UsageError` if a foreign run's algorithm is not Cleanba's own: another one would have to be imported."""
    if not known:
        module, _, attribute = name.partition(":")
        refuse(
            source,
            f"names the algorithm {_shown(name)}: loading it would import the module {_shown(module)} and call its "
            f"{_shown(attribute)}",
        )


def check_environment(e: Experiment, source: str) -> None:
    """Raise `UsageError` unless a foreign experiment's environment is one that this installation knows.

    The message shows what would be imported and called.  The check itself imports and calls none of it.
    """
    options = _with(e.env_options)
    if e.env_wrappers:
        calls = " and ".join(_called(wrapper, "the environment") for wrapper in e.env_wrappers)
        refuse(source, f"names env_wrappers: playing it would {calls}")
    suite, colon, name = e.env_id.partition(":")
    if colon and suite == "jax":
        refuse(source, f"names env_id={_shown(e.env_id)}: playing it would {_called(name, options)}")
    elsewhere = bool(colon) and suite not in jax_envs.SUITES and suite != gymnasium.PREFIX.rstrip(":")
    if elsewhere or ":" in name:
        module, _, rest = (e.env_id if elsewhere else name).rpartition(":")
        refuse(
            source,
            f"names env_id={_shown(e.env_id)}: playing it would import the module {_shown(module)}, and make its "
            f"environment {_shown(rest)} with {options}",
        )
    if not _known(suite if colon else "", name or e.env_id, e.env_id):
        refuse(source, f"names env_id={_shown(e.env_id)}, an environment that this installation does not know", ANOTHER)
    _check_options(e, source, ours=not colon or suite != gymnasium.PREFIX.rstrip(":") or _gymnasiums_own(name))


def _known(suite: str, name: str, env_id: str) -> bool:
    """Whether an environment is in an installed list, and cannot itself name other environments to make."""
    if not suite:
        return env_id in envpool.known()
    if suite in jax_envs.SUITES:
        jax_envs.require_library(suite)
        return env_id in jax_envs.known()
    spec = gym.registry.get(name)
    return spec is not None and isinstance(spec.entry_point, str) and not name.startswith("GymV")


def _gymnasiums_own(name: str) -> bool:
    return str(gym.registry[name].entry_point).startswith("gymnasium.envs.")


def _check_options(e: Experiment, source: str, ours: bool) -> None:
    """Options may be numbers, booleans and, for environments of the libraries themselves (`ours`), plain words."""
    product: float = 1
    for option in e.env_options:
        if len(option) > MOST_OPTION:
            refuse(source, f"has an env_options entry of {len(option)} characters ({_shown(option)})")
        try:
            ((name, value),) = parse_options([option]).items()
        except (MemoryError, RecursionError):
            refuse(source, f"has the env_options entry {_shown(option)}, which cannot be read")
        for number in value if isinstance(value, tuple | list) else (value,):
            if isinstance(number, str):
                plain = number.replace("_", "").replace("-", "").isalnum() and number.isascii()
                files = any(part in name.lower() for part in NAMES_OF_FILES_AND_CODE)
                if not ours or not plain or files:
                    refuse(
                        source,
                        f"gives its environment the option {name}={_shown(number)}, which may name a file, a module or "
                        f"a function: playing it would make {_shown(e.env_id)} with {_with(e.env_options)}",
                    )
            elif number is None or isinstance(number, bool):
                continue
            elif isinstance(number, int | float):
                size = isinstance(number, int) and not any(word in name for word in NO_SIZES)
                most = MOST_OPTION_SIZE if size else MOST_OPTION_NUMBER
                if not abs(number) <= most:  # so for NaN, too
                    refuse(source, f"gives its environment the option {_shown(option)}, beyond {most:,}")
                product *= max(1, abs(number)) if size else 1
            else:
                refuse(source, f"gives its environment the option {_shown(option)}, which is no number")
    if product > MOST_OPTION_PRODUCT:
        refuse(source, f"gives its environment options that multiply to {product:.1e}: {_with(e.env_options)}")


def check_size_of(run_dir: Path, shapes: Callable[[], tuple[PyTree, PyTree]], trust_remote_code: bool) -> None:
    """`check_size` of the networks of a run, if it is from elsewhere and not trusted.

    shapes: the algorithm's, of the learner's state and of the parameters that act.
    """
    source = None if trust_remote_code else source_of(run_dir)
    if source is not None:
        check_size(shapes()[1], source)


def check_size(like_params: PyTree, source: str) -> None:
    """Raise `UsageError` where a foreign experiment's parameters would take more than 2 GiB.  Nothing is allocated."""
    size = sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(like_params))
    if size > MOST_BYTES:
        refuse(
            source, f"asks for a network of {size / 1e9:.1f} GB, but the limit is {MOST_BYTES / 1e9:.1f} GB", ANOTHER
        )


def refuse(source: str, what: str, remedy: str = REMEDY) -> NoReturn:
    """Raise `UsageError`: a run from elsewhere does `what`."""
    raise UsageError(f"{source} comes from elsewhere and {what}; {remedy}")


def _called(function: str, arguments: str) -> str:
    module, _, name = function.partition(":")
    return f"import the module {_shown(module)} and call its {_shown(name)} with {arguments}"


def _with(options: tuple[str, ...]) -> str:
    return ", ".join(map(_shown, options)) or "no options"


def _shown(value: object) -> str:
    """A foreign value, with control characters escaped, and cut off after 160 characters."""
    text = ascii(value)
    return text if len(text) <= 160 else f"{text[:160]}… ({len(text)} characters)"
