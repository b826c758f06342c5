"""Specifications of environments: observations, actions, and the environment itself."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeAlias

import jax
import numpy as np

from cleanba.rollout import Array


@dataclass(frozen=True)
class ObsSpec:
    """One array of an observation; a leaf of the tree if observations are trees."""

    kind: Literal["image", "planes", "codes", "bytes", "vector", "discrete", "mask"]
    """image: uint8 pictures; planes: a board [H, W, C] with one plane per kind of object; codes: categorical integers
    in [low, low + count); bytes: uint8 data other than pictures, such as text; vector: real numbers; discrete: a single
    integer in [low, low + count); mask: which actions are legal, not an input of the network"""
    shape: tuple[int, ...]
    dtype: str
    count: int = 0
    low: int = 0


ObsSpecs: TypeAlias = "ObsSpec | Mapping[str, ObsSpecs]"
"""What is observed: one array, or a dictionary of them, of any depth."""


def describe(obs: ObsSpecs) -> str:
    """A short description of observations, such as "image 4x84x84 uint8"."""
    if isinstance(obs, Mapping):
        return "{" + ", ".join(f"{name}: {describe(part)}" for name, part in obs.items()) + "}"
    if obs.kind == "discrete":
        return f"one of {obs.count}"
    if obs.kind == "mask":
        return "mask"
    if not obs.shape:
        return f"number {obs.dtype}"
    return f"{obs.kind} {'x'.join(map(str, obs.shape))} {obs.dtype}"


@dataclass(frozen=True)
class ActionSpec:
    """One action, in the policy's form and in the environment's.

    A policy draws an int32 in [0, count) for each discrete part and a float32 for each continuous part: [B] for a
    single choice, else [B, D] for D parts in C order.
    """

    kind: Literal["choice", "choices", "quantities"]
    """choice: one discrete action; choices: several at once; quantities: real numbers within bounds"""
    shape: tuple[int, ...] = ()
    """shape of the environment's action"""
    dtype: str = "int32"
    """type of the environment's action"""
    counts: tuple[int, ...] = ()
    """number of options of each part; () for quantities"""
    low: tuple[float, ...] = (0,)
    """lowest value of each part; choices count from here"""
    high: tuple[float, ...] = (0,)
    """highest value of each part, inclusive"""

    @property
    def size(self) -> int:
        """D, the number of parts."""
        return len(self.low)

    @property
    def drawn_shape(self) -> tuple[int, ...]:
        """Shape of one action as a policy draws it: () for a single choice, else (D,)."""
        return () if self.kind == "choice" else (self.size,)

    @property
    def drawn_dtype(self) -> np.dtype:
        """Its type: float32 for quantities, else int32."""
        return np.dtype(np.float32 if self.kind == "quantities" else np.int32)

    def masked_by(self, shape: tuple[int, ...]) -> bool:
        """Whether an array of this shape can be a mask of legal choices.

        A mask has one entry per choice, part after part, in any shape; or one per combination of choices,
        [counts[0], counts[1], ...].
        """
        return self.kind != "quantities" and (shape == self.counts or math.prod(shape) == sum(self.counts))

    def for_environment(self, action: Array) -> Array:
        """Convert the policy's action, [B] or [B, D], to the environment's, [B, *shape].

        Quantities are clipped to their bounds only here: learning uses the action as it was drawn.
        """
        # Without x64, JAX has 32-bit numbers only and warns when asked for wider ones.
        dtype = jax.dtypes.canonicalize_dtype(self.dtype) if isinstance(action, jax.Array) else np.dtype(self.dtype)
        if self.kind == "quantities":  # cast first: a bound rounded to float32 may lie outside the bounds
            with np.errstate(over="ignore"):  # some environments write "no bound" as the largest float64
                low, high = (np.asarray(bound, np.float64).astype(dtype) for bound in (self.low, self.high))
            action = action.astype(dtype).clip(low, high)
        else:
            action = (action + np.asarray(self.low, np.int32).reshape(action.shape[1:])).astype(dtype)
        return action.reshape(-1, *self.shape)


def choice(count: int, start: int = 0) -> ActionSpec:
    """One of the actions start, start + 1, ..., start + count - 1."""
    return ActionSpec("choice", counts=(count,), low=(start,), high=(start + count - 1,))


class EnvSpec(NamedTuple):
    """Specification of an environment: its observations, its actions, and how it is made and run."""

    env_id: str
    obs: ObsSpecs
    action: ActionSpec
    is_atari: bool
    clip_reward: bool
    options: dict[str, Any]
    """options passed to the function that makes the environment"""
    scannable: bool = True
    """whether compiled code can step it"""
    wrappers: tuple[str, ...] = ()
    """Gymnasium's wrappers, as module:function"""
    on_device: bool = False
    """whether it is itself compiled, for the device that acts"""
    family: str = ""
    """part of its library that it comes from, such as envpool.classic_control"""
    time_limit: int | None = None
    """steps after which the environment itself truncates an episode; None if it states no limit"""
    infos: tuple[str, ...] = ()
    """names of the numbers in Gymnasium's `info` that are logged"""

    @property
    def num_actions(self) -> int:
        """The number of discrete actions; 0 if an action is not a single choice."""
        return self.action.counts[0] if self.action.kind == "choice" else 0

    @property
    def shows_images(self) -> bool:
        """Whether any part of an observation is an image."""
        return any(part.kind == "image" for part in jax.tree.leaves(self.obs))
