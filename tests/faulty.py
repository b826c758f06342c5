"""A Gymnasium environment with a fault: where CLEANBA_FAULT is set, one number that it shows is another."""

import os

import gymnasium
import numpy as np


class Faulty(gymnasium.Env):
    """Shows two random numbers and pays for guessing the sign of their sum; episodes have five steps."""

    observation_space = gymnasium.spaces.Box(-1, 1, (2,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps = 0
        return self.look(), {}

    def look(self):
        self.seen = self.np_random.uniform(-1, 1, 2).astype(np.float32)
        return self.seen

    def step(self, action):
        self.steps += 1
        reward = float(action == (self.seen.sum() > 0))
        self.look()
        if os.environ.get("CLEANBA_FAULT") and self.steps == 3:
            self.seen.view(np.uint32)[1] ^= 1
        return self.seen, reward, self.steps == 5, False, {}


gymnasium.register("Faulty-v0", Faulty)
