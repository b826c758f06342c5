"""What a step of an environment delivers, in any backend, and what the backends share."""

import ast
import re
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import PurePath
from typing import Any, Generic, NamedTuple

import jax
import numpy as np

from cleanba.config import MOST
from cleanba.environments.worker import find_modules_here
from cleanba.errors import UsageError, raised, said
from cleanba.rollout import Array, Obs, PyTree
from cleanba.specs import EnvSpec


class Step(NamedTuple, Generic[Array]):
    """What one step of B environments delivered, to the host or to a device.  `obs` belongs to the caller."""

    obs: Obs  # [B, ...]
    reward: Array  # [B]  float32, for training (clipped if the experiment clips)
    raw_reward: Array  # [B]  float32, as the environment gave it
    terminated: Array  # [B]  bool
    truncated: Array  # [B]  bool
    over: Array  # [B]  bool: the game is over; differs from the two above under --episodic-life, where a game may also
    # end in a step that ignores its action: among the random no-ops after a life
    infos: np.ndarray | None = None  # [B, K]  float32: the numbers of `EnvSpec.infos`, NaN where there is none


EnvStep = Callable[[PyTree, jax.Array], tuple[PyTree, Step[jax.Array]]]
"""`step(handle, action) -> handle, Step`"""


class Compilable(NamedTuple):
    """A block of environments that compiled code can step."""

    handle: PyTree
    """their state, or a reference to it; passed from step to step, which keeps the steps in order"""
    step: EnvStep
    """for use under `jit`"""
    key: Hashable
    """blocks of equal size with equal keys can share compiled code"""
    of_one_process: bool = False
    """whether compiled code holds an address of this process's memory, so that no other process can use it"""


def stated_limit(steps: float | None) -> int | None:
    """An environment's time limit, in the form that an experiment has; None for -1 and others that mean no limit."""
    return int(steps) if steps is not None and 1 <= steps <= MOST else None


def train_reward(spec: EnvSpec, raw: Array) -> Array:
    """The reward for training: the raw reward, clipped to [-1, 1] if the experiment clips.  [...] -> [...]."""
    return raw.clip(-1.0, 1.0) if spec.clip_reward else raw


def atari_name(env_id: str) -> str:
    """The name that EnvPool has for a game of this form: "PongNoFrameskip-v4", "ALE/Pong-v5" -> "Pong-v5"; or ""."""
    game = re.fullmatch(r"(?:ALE/)?([A-Za-z]+?)(?:NoFrameskip|Deterministic|-ram)*-v\d", env_id)
    return f"{game[1]}-v5" if game else ""


def undrawable(env_id: str, error: Exception) -> UsageError:
    """The error for an environment whose rendering raised `error`."""
    return UsageError(
        f"{env_id} cannot be drawn ({said(error)}), so there can be no video of it; leave --video and "
        "--capture-video out"
    )


def imported(what: str, remedy: str, module: str, name: str | None = None, asked: str = "") -> Any:
    """Import a user's module, or the object `name` in it.  The current directory is searched, too.

    asked: the text in which the user named the module.

    Raises:
        UsageError: `what` cannot be imported, whatever error the module raised; the message ends with `remedy`.
    """
    find_modules_here()
    try:
        found = import_module(module)
        return found if name is None else getattr(found, name)
    except (Exception, SystemExit) as error:  # a module may raise anything
        if "/" in module or module.endswith(".py"):
            right = (asked or module).replace(module, PurePath(module).name.removesuffix(".py"))
            why = f"{module} is a path, not a module"
            raise UsageError(f"{what} cannot be imported ({why}); write {right}, in the folder of that file") from error
        raise UsageError(f"{what} cannot be imported ({raised(error)}); {remedy}") from error


@dataclass(frozen=True, eq=False)
class Identity:
    """A key that is equal to another one only if both hold the same object, which need not be hashable."""

    held: object

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Identity) and self.held is other.held

    def __hash__(self) -> int:
        return id(self.held)


WORDS = {"true": True, "false": False}  # accepted beside Python's own True and False


def with_these(options: Mapping[str, Any], wrappers: Sequence[str] = ()) -> str:
    """What an environment was made with, as " with length=3"; "" for nothing."""
    given = ", ".join([*(f"{name}={value}" for name, value in options.items()), *wrappers])
    return given and f" with {given}"


def parse_options(options: Sequence[str]) -> dict[str, Any]:
    """Parse --env-options: ["frame_skip=2"] -> {"frame_skip": 2}.  Raises `UsageError` for one of another form."""
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
