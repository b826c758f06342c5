"""What environments look like: what is observed, what is done, and whose it is."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeAlias

import jax
import numpy as np

from cleanba.rollout import Array


@dataclass(frozen=True)
class ObsSpec:
    """One array of an observation.  A leaf, where observations are trees."""

    kind: Literal["image", "planes", "codes", "bytes", "vector", "discrete", "mask"]
    """image: uint8 pictures; planes: a board [H, W, C], one plane for each thing that may be there; codes: integers in
    [low, low + count) that name things; bytes: uint8 that are no picture, such as text; vector: numbers; discrete: one
    integer in [low, low + count); mask: which actions are legal, no input"""
    shape: tuple[int, ...]
    dtype: str
    count: int = 0
    low: int = 0


ObsSpecs: TypeAlias = "ObsSpec | Mapping[str, ObsSpecs]"
"""What is observed: one array, or a dictionary of them, of any depth."""


def describe(obs: ObsSpecs) -> str:
    """What is seen, in a few words."""
    if isinstance(obs, Mapping):
        return "{" + ", ".join(f"{name}: {describe(part)}" for name, part in obs.items()) + "}"
    if obs.kind == "discrete":
        return f"one of {obs.count}"
    if obs.kind == "mask":
        return "mask"
    return f"{obs.kind} {'x'.join(map(str, obs.shape)) or '1'} {obs.dtype}"


@dataclass(frozen=True)
class ActionSpec:
    """One action, as a policy draws it and as the environment takes it.

    A policy draws a number in [0, count) for each part that is a choice, int32, and any number for each part that is a
    quantity, float32: [B] where there is but one choice, else [B, D] for D parts in C order.
    """

    kind: Literal["choice", "choices", "quantities"]
    """choice: one of a number of actions; choices: several at once; quantities: numbers within bounds"""
    shape: tuple[int, ...] = ()
    """as the environment takes it"""
    dtype: str = "int32"
    counts: tuple[int, ...] = ()
    """how many there are to choose from, for each part; () for quantities"""
    low: tuple[float, ...] = (0,)
    """of each part; choices count from here"""
    high: tuple[float, ...] = (0,)
    """of each part, itself included"""

    @property
    def size(self) -> int:
        """D, the number of parts."""
        return len(self.low)

    def masked_by(self, shape: tuple[int, ...]) -> bool:
        """Whether an array of that shape can say which choices are legal.

        One for each choice, those of several parts one after the other, in any shape; or one for each combination of
        them, [counts[0], counts[1], ...].
        """
        return self.kind != "quantities" and (shape == self.counts or math.prod(shape) == sum(self.counts))

    def for_environment(self, action: Array) -> Array:
        """What a policy drew, [B] or [B, D] -> what the environment takes, [B, *shape].

        Quantities are clipped to their bounds only here: what is learnt from is the action as it was drawn.
        """
        # JAX has numbers of 4 bytes only, and warns where it is asked for more.
        dtype = jax.dtypes.canonicalize_dtype(self.dtype) if isinstance(action, jax.Array) else np.dtype(self.dtype)
        if self.kind == "quantities":  # cast first: a bound rounded to float32 may lie outside the bounds
            with np.errstate(over="ignore"):  # "no bound" is in some environments the largest number there is
                low, high = (np.asarray(bound, np.float64).astype(dtype) for bound in (self.low, self.high))
            action = action.astype(dtype).clip(low, high)
        else:
            action = (action + np.asarray(self.low, np.int32).reshape(action.shape[1:])).astype(dtype)
        return action.reshape(-1, *self.shape)


def choice(count: int, start: int = 0) -> ActionSpec:
    """One of the actions start, start + 1, ..., start + count - 1."""
    return ActionSpec("choice", counts=(count,), low=(start,), high=(start + count - 1,))


class EnvSpec(NamedTuple):
    """What an environment shows and takes."""

    env_id: str
    obs: ObsSpecs
    num_actions: int
    """how many there are to choose from; 0 where an action is more than one choice"""
    is_atari: bool
    clip_reward: bool
    options: dict[str, Any]
    """what EnvPool is asked for"""
    given_action: ActionSpec | None = None
    """None: one of `num_actions`, counted from 0"""
    scannable: bool = True
    """whether it can be stepped from within XLA"""
    wrappers: tuple[str, ...] = ()
    """module:function, each of which Gymnasium's environments are given to"""
    on_device: bool = False
    """whether it is itself a compiled function, on whatever device acts"""
    family: str = ""
    """where its library keeps it, such as envpool.classic_control"""
    time_limit: int | None = None
    """steps after which it truncates an episode by itself; None where it states no limit"""

    @property
    def action(self) -> ActionSpec:
        """What it takes."""
        return self.given_action or choice(self.num_actions)

    @property
    def shows_images(self) -> bool:
        """Whether any part of an observation is a picture."""
        return any(part.kind == "image" for part in jax.tree.leaves(self.obs))
