"""A game of memory: the first observation names a symbol, blanks follow, and the last action must repeat the symbol.

A policy that sees only the present observation must answer a blank, and all blanks are the same.  Whatever it does, it
is right once in `symbols` times.
"""

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from cleanba.environments.common import Step
from cleanba.specs import EnvSpec, ObsSpec, choice

SYMBOLS = 4


def spec() -> EnvSpec:
    """What the game looks like: one number per symbol to see, one action per symbol to take."""
    return EnvSpec("Memory-v0", ObsSpec("vector", (SYMBOLS,), "float32"), choice(SYMBOLS), False, False, {})


@dataclass
class MemoryEnvs:
    """B games, of `blanks` + 1 actions each; the last one is paid 1 if it is the symbol.

    As EnvPool's, the step after an episode's end ignores its action and shows the next episode's symbol.  The terminal
    observation is a blank too.
    """

    seeds: Sequence[int]
    blanks: int = 3
    won: list[np.ndarray] = field(default_factory=list)  # of each step: the rewards of the games that it ended

    def __post_init__(self) -> None:
        self.num_envs = len(self.seeds)
        self._rng = np.random.default_rng(list(self.seeds))

    def _deal(self, which: np.ndarray) -> None:
        self.symbol = np.where(which, self._rng.integers(SYMBOLS, size=self.num_envs), self.symbol)
        self._age = np.where(which, 0, self._age)

    def _obs(self) -> np.ndarray:
        shown = np.arange(SYMBOLS) == self.symbol[:, None]
        return np.where((self._age == 0)[:, None], shown, 0).astype(np.float32)

    def reset(self) -> np.ndarray:
        self.symbol, self._age = np.zeros((2, self.num_envs), int)
        self._deal(np.ones(self.num_envs, bool))
        return self._obs()

    def step(self, action: np.ndarray) -> Step:
        over = self._age == self.blanks  # this action is the answer
        ignored = self._age > self.blanks
        reward = (over & (action == self.symbol)).astype(np.float32)
        self._age = self._age + 1
        self._deal(ignored)
        self.won.append(reward[over])
        return Step(self._obs(), reward, reward, over, np.zeros(self.num_envs, bool), over)

    def close(self) -> None:
        pass


class Games:
    """Makes games for a run, and remembers how they ended."""

    def __init__(self) -> None:
        self.made: list[MemoryEnvs] = []
        self._lock = threading.Lock()

    def __call__(self, seeds: Sequence[int], epoch: int) -> MemoryEnvs:
        envs = MemoryEnvs(seeds)
        with self._lock:
            self.made.append(envs)
        return envs

    def last_half(self) -> np.ndarray:
        """The returns of all games that ended in the second half of the run."""
        return np.concatenate([rewards for envs in self.made for rewards in envs.won[len(envs.won) // 2 :]])
