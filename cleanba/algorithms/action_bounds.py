"""The actions that an algorithm can take: one of a few, or real numbers between bounds."""

from typing import NamedTuple

import jax
import numpy as np

from cleanba.config import require
from cleanba.specs import EnvSpec

# What an environment takes as an action, by the kind of its `ActionSpec`.
ACTION_WORDS = {"choice": "one of a few actions", "choices": "several choices at once", "quantities": "real numbers"}


def require_choice(spec: EnvSpec, name: str) -> None:
    """Raise `UsageError` unless an action is one of a few, for the algorithm of this name."""
    kind = spec.action.kind
    require(
        kind == "choice",
        f"env_id={spec.env_id!r} takes {ACTION_WORDS[kind]}, but {name} values each of a few actions; try "
        f"{'`cleanba sac`, `cleanba td3` or ' * (kind == 'quantities')}`cleanba ppo`, or CartPole-v1",
    )


class ActionBounds(NamedTuple):
    """The bounds of the D parts of an action.  Each field is [D] float32."""

    low: np.ndarray
    high: np.ndarray
    centre: np.ndarray
    scale: np.ndarray
    """half the distance between the bounds"""

    def uniform(self, key: jax.Array, like: jax.Array) -> jax.Array:
        """Actions drawn uniformly between the bounds, of the shape and dtype of `like`.  [..., D]."""
        return self.centre + self.scale * jax.random.uniform(key, like.shape, like.dtype, -1.0, 1.0)

    def clip(self, action: jax.Array) -> jax.Array:
        """Actions clipped to the bounds.  [..., D] -> [..., D]."""
        return action.clip(self.low, self.high)


def action_bounds(spec: EnvSpec, name: str) -> ActionBounds:
    """The bounds of an environment's actions, for the algorithm of this name.

    Raises:
        UsageError: actions are discrete, or have no finite bounds.
    """
    action = spec.action
    instead = {"choice": "`cleanba dqn` or `cleanba ppo`"}.get(action.kind, "`cleanba ppo`")
    require(
        action.kind == "quantities",
        f"env_id={spec.env_id!r} takes {ACTION_WORDS[action.kind]}, but {name} chooses real numbers; try {instead}, or "
        "Pendulum-v1",
    )
    low, high = np.asarray(action.low, np.float64), np.asarray(action.high, np.float64)
    most = np.finfo(np.float32).max  # some environments write "no bound" as the largest number
    flat = np.flatnonzero(low == high)
    require(
        flat.size == 0,
        f"env_id={spec.env_id!r}: both bounds of number {flat[:1]} of an action are {low[flat[:1]]}, but {name} scales "
        f"actions to the range between; remove that number with a wrapper, or try {instead}",
    )
    require(
        bool(np.all((-most < low) & (low < high) & (high < most))),
        f"env_id={spec.env_id!r} takes numbers from {low.min():g} to {high.max():g}, but {name} scales its actions to "
        f"finite bounds; try {instead}, whose actions have none",
    )
    return ActionBounds(*(x.astype(np.float32) for x in (low, high, (high + low) / 2, (high - low) / 2)))
