"""Environments of Gymnasium's that misbehave."""

import os
import time
from pathlib import Path

import gymnasium
import numpy as np


class Faulty(gymnasium.Env):
    """Shows dictionaries of random numbers, and does what `fault` says.

    It raises an error or dies at step `at` of an episode, and hangs or spins at step `at` of all its episodes.
    It takes `starts` seconds to start.
    """

    observation_space = gymnasium.spaces.Dict(
        {
            "pair": gymnasium.spaces.Tuple([gymnasium.spaces.Discrete(3), gymnasium.spaces.MultiBinary(2)]),
            "x": gymnasium.spaces.Box(-9, 9, (2,), np.float64),
        }
    )
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, fault="", at=5, starts=0.0):
        time.sleep(starts)
        self.fault, self.at = fault, at
        self.all_steps = 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps = 0
        return self.look(), {}

    def look(self):
        free = self.fault == "chance" or (self.fault == "late" and self.all_steps > 70)
        chance = np.random.default_rng() if free else self.np_random
        return {
            "pair": (int(chance.integers(3)), chance.integers(0, 2, 2).astype(np.int8)),
            "x": chance.uniform(size=2),
        }

    def step(self, action):
        self.steps += 1
        self.all_steps += 1
        if self.steps == self.at and self.fault == "raise":
            raise ValueError("planted")
        if self.steps == self.at and self.fault == "die":
            os._exit(7)
        if self.all_steps == self.at and self.fault == "hang":
            time.sleep(10_000)
        if self.all_steps == self.at and self.fault == "spin" and "CLEANBA_TEST" in os.environ:
            Path(os.environ["CLEANBA_TEST"], f"{os.getpid()}.spins").touch()
        while self.all_steps == self.at and self.fault == "spin":
            sum(range(10**9))  # compiled code, which handles no signal
        return self.look(), 1.0, self.steps == 9, False, {}


class Texts(Faulty):
    observation_space = gymnasium.spaces.Text(5)


class Twice(gymnasium.RewardWrapper):
    """Pays twice as much."""

    def reward(self, reward):
        return 2 * reward


gymnasium.register("Faulty-v0", Faulty)
gymnasium.register("Texts-v0", Texts)
