"""The data that crosses from acting to learning, and its time index.

          t          t+1         t+2        t+3
    obs       s_t        s_t+1       s_t+2*     s_0'        s_t+2* is the terminal observation of its episode
    action    a_t        a_t+1       (ignored)  a_0'        EnvPool resets on the step after an episode's end,
    reward    r_t        r_t+1       0          r_0'        and ignores that action; r_t is the reward of a_t
    ended     0          1           0          0           terminated or truncated, by the step that took a_t+1
    valid     1          1           0          1           0 where the action was ignored
    first     0          0           0          1           1 where obs is the first of an episode

So `first[t + 1]` is exactly `not valid[t]`: the step that ignores its action is the one that resets.
"""

from typing import Any, Generic, NamedTuple, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

PyTree: TypeAlias = Any
"""A tree of arrays, of any structure."""
Obs: TypeAlias = PyTree
"""An observation: one array, or a dictionary of them of any depth, as `specs.ObsSpecs` says."""
NetworkParams: TypeAlias = PyTree
"""The parameters of a Flax module: dictionaries of arrays, by the names of its parts."""

Array = TypeVar("Array", np.ndarray, jax.Array)  # on the host, or on a device


class Rollout(NamedTuple):
    """`T` consecutive steps of `B` environments (an actor's, a block's or a shard's), and the observation after them.

    Each algorithm cuts its own minibatches from it.
    """

    obs: Obs  # [T+1, B, ...]  uint8 for images; what the environment delivered
    first: jax.Array  # [T+1, B]  bool
    action: jax.Array  # [T, B] int32 for a single choice; [T, B, D] int32 or float32 for D parts (`ActionSpec`)
    reward: jax.Array  # [T, B]  float32, clipped if the experiment clips
    terminated: jax.Array  # [T, B]  bool: the episode ended, nothing comes after
    truncated: jax.Array  # [T, B]  bool: the episode was cut off, its last state still has a value
    valid: jax.Array  # [T, B]  bool: the action was executed
    extras: PyTree  # [T, B, ...]  what the update needs from acting (log-probabilities)
    carry: PyTree  # [B, ...]  what acting carries from step to step, such as an LSTM's state, before obs[0]; or ()


class StepOutcome(NamedTuple, Generic[Array]):
    """The outcome of one step of B environments, by the time index above.  Leaves [B]."""

    reward: Array
    terminated: Array
    truncated: Array
    valid: Array
    done: Array  # the episode ended here, so the next action will be ignored


def step_outcome(done: Array, reward: Array, terminated: Array, truncated: Array) -> StepOutcome[Array]:
    """The outcome of a step, from what the environments returned.  [B] each -> leaves [B].

    `done` marks the environments whose episode ended in the step before.  They ignored their action and reset, so for
    them this step is not valid and belongs to no episode.
    """
    valid = ~done
    xp = np if isinstance(done, np.ndarray) else jnp
    terminated, truncated = terminated & valid, truncated & valid
    return StepOutcome(xp.where(valid, reward, 0.0), terminated, truncated, valid, terminated | truncated)


class Episode(NamedTuple):
    """An episode: the sum of its raw, unclipped rewards and its length in steps."""

    ret: float
    length: int
    cut: bool = False
    """whether an evaluation cut the episode off at its step limit, before the game ended"""
    infos: tuple[float, ...] = ()
    """the numbers of `EnvSpec.infos` at its end; NaN for one that the environment did not give"""


class EpisodeTracker:
    """Sums rewards and steps per environment until its episode ends.  Lives on the host, one per actor."""

    def __init__(self, num_envs: int):
        self.ret = np.zeros(num_envs, np.float64)
        """[B], the sum of raw rewards of each environment's episode so far"""
        self.length = np.zeros(num_envs, np.int64)
        """[B], its steps so far"""
        self.ended = np.zeros(0, np.intp)
        """the environments whose episodes ended with the last step"""

    def add(
        self, raw_reward: np.ndarray, valid: np.ndarray, over: np.ndarray, infos: np.ndarray | None = None
    ) -> list[Episode]:
        """Add a step: raw rewards [B], valid [B], `Step.over` [B], `Step.infos` [B, K] -> the episodes that ended."""
        self.ret += np.where(valid, raw_reward, 0.0)
        self.length += valid
        self.ended = ended = np.flatnonzero(over & (self.length > 0))
        if not ended.size:
            return []
        told = [()] * len(ended) if infos is None else map(tuple, infos[ended].tolist())
        episodes = [
            Episode(ret, length, infos=numbers)
            for ret, length, numbers in zip(self.ret[ended].tolist(), self.length[ended].tolist(), told, strict=True)
        ]
        self.ret[ended] = 0.0
        self.length[ended] = 0
        return episodes


def named_leaves(tree: PyTree) -> dict[str, Any]:
    """The leaves of a tree by their paths, such as .params['params']['Dense_0']['bias'], in the tree's order."""
    return {jax.tree_util.keystr(path): x for path, x in jax.tree_util.tree_leaves_with_path(tree)}
