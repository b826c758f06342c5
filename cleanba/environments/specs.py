"""What environments look like and what a step of them delivers, whoever makes them."""

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np

from cleanba.rollout import PyTree


@dataclass(frozen=True)
class ObsSpec:
    """One array of an observation.  A leaf, where observations are trees."""

    kind: Literal["image", "grid", "vector", "discrete"]
    """image: uint8 pictures; grid: uint8 codes; vector: numbers; discrete: one integer in [0, count)"""
    shape: tuple[int, ...]
    dtype: str
    count: int = 0


class EnvSpec(NamedTuple):
    """What an environment shows and takes."""

    env_id: str
    obs: PyTree
    """an `ObsSpec`, or a dictionary of them"""
    num_actions: int
    is_atari: bool
    clip_reward: bool
    options: dict[str, Any]
    """what EnvPool is asked for"""


class Step(NamedTuple):
    """What one step of B environments delivered.  `obs` belongs to the caller."""

    obs: PyTree  # [B, ...]
    reward: np.ndarray  # [B]  float32, what is trained on (clipped if asked)
    raw_reward: np.ndarray  # [B]  float32, what the environment paid
    terminated: np.ndarray  # [B]  bool
    truncated: np.ndarray  # [B]  bool
    over: np.ndarray  # [B]  bool: the game is over; differs from the two above under --episodic-life


def train_reward(spec: EnvSpec, raw: Any) -> Any:
    """What is trained on: the raw reward, clipped to [-1, 1] if the experiment clips.  [...] -> [...]."""
    return raw.clip(-1.0, 1.0) if spec.clip_reward else raw
