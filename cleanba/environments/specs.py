"""What a step of an environment delivers, whoever makes it; and what it looks like (`cleanba/specs.py`)."""

import ast
from collections.abc import Callable, Hashable, Sequence
from importlib import import_module
from typing import Any, Generic, NamedTuple

import jax

from cleanba.environments.worker import find_modules_here
from cleanba.errors import UsageError, raised
from cleanba.rollout import Array, PyTree
from cleanba.specs import ActionSpec, EnvSpec, ObsSpec, choice

__all__ = [
    "ActionSpec",
    "Compilable",
    "EnvSpec",
    "EnvStep",
    "ObsSpec",
    "Step",
    "choice",
    "imported",
    "parse_options",
    "train_reward",
]


class Step(NamedTuple, Generic[Array]):
    """What one step of B environments delivered, to the host or to a device.  `obs` belongs to the caller."""

    obs: PyTree  # [B, ...]
    reward: Array  # [B]  float32, what is trained on (clipped if asked)
    raw_reward: Array  # [B]  float32, what the environment paid
    terminated: Array  # [B]  bool
    truncated: Array  # [B]  bool
    over: Array  # [B]  bool: the game is over; differs from the two above under --episodic-life


EnvStep = Callable[[PyTree, jax.Array], tuple[PyTree, Step[jax.Array]]]
"""`step(handle, action) -> handle, Step`"""


class Compilable(NamedTuple):
    """A block of environments that can be stepped from within XLA."""

    handle: PyTree
    """their state, or what stands for it; threaded through steps, so that these keep their order"""
    step: EnvStep
    """for use under `jit`"""
    key: Hashable
    """code that was compiled for as many environments with this key serves these, too"""


def train_reward(spec: EnvSpec, raw: Array) -> Array:
    """What is trained on: the raw reward, clipped to [-1, 1] if the experiment clips.  [...] -> [...]."""
    return raw.clip(-1.0, 1.0) if spec.clip_reward else raw


def imported(what: str, remedy: str, module: str, name: str | None = None) -> Any:
    """A module of the user's, or what it calls by that name; looked for in the current directory, too.

    Raises:
        UsageError: `what` cannot be imported, whatever the module raised; with the remedy.
    """
    find_modules_here()
    try:
        found = import_module(module)
        return found if name is None else getattr(found, name)
    except Exception as error:  # a module may raise anything
        raise UsageError(f"{what} cannot be imported ({raised(error)}); {remedy}") from error


WORDS = {"true": True, "false": False}  # as they are written outside of Python, too


def parse_options(options: Sequence[str]) -> dict[str, Any]:
    """The words of --env-options -> names and values.  Raises `UsageError` for one of another form."""
    parsed = {}
    for option in options:
        name, eq, value = option.partition("=")
        if not eq or not name.isidentifier():
            raise UsageError(f"env_options={option!r} must have the form name=value; try --env-options frame_skip=2")
        try:
            parsed[name] = WORDS[value] if value in WORDS else ast.literal_eval(value)
        except (ValueError, SyntaxError, TypeError):
            parsed[name] = value
    return parsed
