"""Walk to the right end of a corridor, in JAX.  From the folder of this file:

cleanba ppo --env-id jax:corridor_jax:Corridor --total-timesteps 50000 --capture-video
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from gymnasium.spaces import Box, Discrete


@struct.dataclass
class Params:  # --env-options length=12
    length: int = 8
    max_steps_in_episode: int = 20


class State(NamedTuple):
    at: jax.Array
    time: jax.Array


class Corridor:
    default_params = Params()
    observation_space = lambda self, params: Box(0, 1, (2,), np.float32)
    action_space = lambda self, params: Discrete(2)  # left, right
    look = lambda self, at, params: jnp.stack([at / params.length, 1 - at / params.length])
    is_truncated = lambda self, state, params: state.time >= params.max_steps_in_episode

    def reset_env(self, key, params):
        at = jax.random.randint(key, (), 0, params.length // 2)
        return self.look(at, params), State(at, jnp.int32(0))

    def step_env(self, key, state, action, params):
        at = jnp.maximum(0, state.at + 2 * action - 1)
        arrived = at == params.length - 1
        return self.look(at, params), State(at, state.time + 1), arrived - 0.01, arrived, {}
