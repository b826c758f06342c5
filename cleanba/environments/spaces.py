"""Converts Gymnasium's spaces, which EnvPool and others use too, to Cleanba's specifications."""

from typing import Any

import gymnasium
import numpy as np

from cleanba.errors import UsageError
from cleanba.rollout import PyTree
from cleanba.specs import ActionSpec, ObsSpec, ObsSpecs, choice


def obs_spec(
    space: gymnasium.Space[Any] | dict[str, gymnasium.Space[Any]],
    sample: PyTree,
    action: ActionSpec,
    name: str = "",
    is_minigrid: bool = False,
) -> ObsSpecs:
    """The `ObsSpec` of observations, or a tree of them, from their space and a batch of samples [B, ...].

    Raises:
        UsageError: an action mask does not fit the actions.
    """
    if isinstance(sample, dict):
        parts = space.spaces if isinstance(space, gymnasium.spaces.Dict) else space
        assert isinstance(parts, dict)
        return {name: obs_spec(parts[name], part, action, name, is_minigrid) for name, part in sample.items()}
    shape, dtype = sample.shape[1:], str(narrowed(sample).dtype)
    if name in MASKS and action.kind != "quantities":
        if not action.masked_by(shape):
            raise UsageError(
                f"the observation's {name} has the shape {shape}, which does not fit {sum(action.counts)} choices; "
                "give it one number for each choice, 0 where the choice is not legal, or rename it"
            )
        return ObsSpec("mask", shape, dtype)
    if 0 in shape and not name:  # one part of several may be empty
        raise UsageError(f"an observation has the shape {shape}, which is empty; --env-wrappers may change it")
    if isinstance(space, gymnasium.spaces.Discrete):
        if not is_small(space, MOST_STATES):
            raise UsageError(
                f"the observation {space} has too many states, or too large numbers, for one-hot inputs "
                f"(at most {MOST_STATES:,}, below 2^31); show MultiDiscrete or a Box instead"
            )
        return ObsSpec("discrete", shape, dtype, int(space.n), int(space.start))
    if is_minigrid and name == "image":
        return ObsSpec("codes", shape, dtype, MINIGRID_CODES)
    if len(shape) > 1 and isinstance(space, gymnasium.spaces.Box) and np.issubdtype(space.dtype, np.integer):
        low, high = int(space.low.min()), int(space.high.max())
        if 2 < high - low + 1 <= MOST_CODES:
            return ObsSpec("codes", shape, dtype, high - low + 1, low)
    if dtype == "uint8":  # pictures have two long sides
        return ObsSpec("image" if len(shape) == 3 and sorted(shape)[1] >= 32 else "bytes", shape, dtype)
    return ObsSpec("vector", shape, dtype)


MASKS = ("action_mask", "legal_action_mask")  # names of an entry that says which actions are legal
MOST_STATES = 2**20  # of Discrete, each of which is an input of the network
MOST_CODES = 32  # integers in a grid that can have more values than this are numbers, not codes
MINIGRID_CODES = 11  # objects; there are fewer colours and states.  The space says 256, as for the bytes of a picture.


def action_spec(space: gymnasium.Space[Any]) -> ActionSpec | str:
    """The `ActionSpec` of an action space, or the reason why no policy can choose such actions."""
    if isinstance(space, gymnasium.spaces.Discrete):
        if not is_small(space, MOST_CHOICES):
            return f"its actions are {space}, but policies here support {MOST_CHOICES} choices at most, below 2^31"
        return choice(int(space.n), int(space.start))
    if 0 in (space.shape or ()):
        return f"its actions have the shape {space.shape}, which is empty"
    if isinstance(space, gymnasium.spaces.MultiBinary):
        space = gymnasium.spaces.Box(0, 1, space.shape, np.int8)
    if isinstance(space, gymnasium.spaces.MultiDiscrete):
        space = as_box(space)
    if not isinstance(space, gymnasium.spaces.Box):
        name = " ".join(str(space).split())
        return f"its actions are {name}, but policies here choose one or several options, or real numbers"
    low, high = (tuple(bound.ravel().tolist()) for bound in (space.low, space.high))
    if np.issubdtype(space.dtype, np.floating):
        return ActionSpec("quantities", space.shape, str(space.dtype), (), low, high)
    counts = tuple(int(b) - int(a) + 1 for a, b in zip(low, high, strict=True))
    if max(counts) > MOST_CHOICES:
        return f"one of its actions has {max(counts)} choices, but policies here support {MOST_CHOICES} at most"
    return ActionSpec("choices", space.shape, str(space.dtype), counts, low, high)


MOST_CHOICES = 2**16


def is_small(space: gymnasium.spaces.Discrete[Any], most: int) -> bool:
    """Whether a space has at most `most` numbers, each of 32 bits."""
    n, start = int(space.n), int(space.start)
    return n <= most and -(2**31) <= start <= 2**31 - 1 - n


def as_box(space: gymnasium.spaces.MultiDiscrete) -> gymnasium.spaces.Box:
    """The box with the same integers."""
    bounds = space.start, space.start + space.nvec - 1
    return gymnasium.spaces.Box(*bounds, space.shape, np.dtype(space.dtype).type)  # type: ignore[arg-type]


def too_wide(space: gymnasium.Space[Any]) -> bool:
    """Whether a space has integers that do not fit into 32 bits."""
    if isinstance(space, gymnasium.spaces.MultiDiscrete):
        space = as_box(space)
    if not isinstance(space, gymnasium.spaces.Box) or not np.issubdtype(space.dtype, np.integer):
        return False
    most = np.iinfo(f"{np.dtype(space.dtype).kind}4")
    return bool((space.low < most.min).any() or (space.high > most.max).any())


def narrowed(x: np.ndarray) -> np.ndarray:
    """Convert 64-bit numbers [...] to the 32-bit ones that JAX uses; return others unchanged."""
    narrow = {"float64": "float32", "int64": "int32", "uint64": "uint32"}.get(str(x.dtype))
    return x if narrow is None else x.astype(narrow)
