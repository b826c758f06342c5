"""A Gymnasium environment that is slow until a file exists, so that a test decides how long a run takes."""

import os
import time
from pathlib import Path

import gymnasium
import numpy as np


class Gated(gymnasium.Env):
    """Shows two random numbers and pays for guessing the sign of their sum; episodes have seven steps."""

    observation_space = gymnasium.spaces.Box(-1, 1, (2,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps = 0
        self.seen = self.np_random.uniform(-1, 1, 2).astype(np.float32)
        return self.seen, {}

    def step(self, action):
        if not Path(os.environ["CLEANBA_GATE"]).exists():
            time.sleep(0.01)
        self.steps += 1
        reward = float(action == (self.seen.sum() > 0))
        self.seen = self.np_random.uniform(-1, 1, 2).astype(np.float32)
        return self.seen, reward, self.steps == 7, False, {}


class Flipped(Gated):
    """If CLEANBA_FAULT is set, its third step shows a number that differs in the last bit."""

    def step(self, action):
        seen, *rest = super().step(action)
        if self.steps == 3 and os.environ.get("CLEANBA_FAULT"):
            seen.view(np.uint32)[1] ^= 1
        return seen, *rest


gymnasium.register("Gated-v0", Gated)
gymnasium.register("Flipped-v0", Flipped)
