"""Walk to the right end of a corridor, in Python.  From the folder of this file:

cleanba ppo --env-id corridor_gymnasium:Corridor-v0 --total-timesteps 50000 --capture-video
"""

import gymnasium
import numpy as np


class Corridor(gymnasium.Env):
    metadata = {"render_modes": ["rgb_array"], "render_fps": 4}
    observation_space = gymnasium.spaces.Box(0, 1, (2,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)  # left, right

    def __init__(self, length=8, render_mode=None):
        self.length, self.render_mode = length, render_mode

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)  # makes self.np_random: draw from nothing else
        self.at = int(self.np_random.integers(self.length // 2))
        return self.look(), {}

    def step(self, action):
        self.at = max(0, self.at + (1 if action else -1))
        arrived = self.at == self.length - 1
        return self.look(), float(arrived) - 0.01, arrived, False, {}

    def look(self):
        return np.array([self.at / self.length, 1 - self.at / self.length], np.float32)

    def render(self):
        picture = np.full((40, 40 * self.length, 3), 60, np.uint8)
        picture[:, 40 * self.at : 40 * self.at + 40] = (224, 160, 48)
        return picture


gymnasium.register("Corridor-v0", Corridor, max_episode_steps=20)
