"""Environments that keep the rules but are odd: Gymnasium's, and in JAX."""

import multiprocessing
import os
import sys
import tempfile
import time
from dataclasses import dataclass, replace

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Tuple


class Odd(gymnasium.Env):
    """Shows two random numbers for `length` steps."""

    observation_space = Box(-1, 1, (2,), np.float32)
    action_space = Discrete(2)
    length = 7

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps = 0
        return self.look(), self.tell()

    def look(self):
        return self.np_random.uniform(-1, 1, 2).astype(np.float32)

    def tell(self):
        return {}

    def step(self, action):
        self.steps += 1
        return self.look(), 1.0, self.steps == self.length, False, self.tell()


class Grid(Odd):
    """Has an option."""

    def __init__(self, size=3, render_mode=None):
        if size == 0:
            super().__init__(goal=1)


class Tells(Odd):
    """Its infos have another form at each step."""

    def tell(self):
        return {"legal": np.arange(self.np_random.integers(1, 5)), "winner": self.np_random.choice([1, None])}


class Succeeds(Odd):
    """Its infos say at the end of an episode whether it succeeded, and in every second episode how far it came."""

    episodes = 0

    def tell(self):
        if self.steps < self.length:
            return {"is_success": "not yet"}
        self.episodes += 1
        told = {"is_success": bool(self.np_random.random() < 0.5)}
        return told | ({"distance": np.float64(self.episodes)} if self.episodes % 2 else {})


class Masked(Odd):
    """One action of four is legal; the others raise an error."""

    observation_space = Dict(x=Odd.observation_space, action_mask=MultiBinary(4))
    action_space = Discrete(4)

    def look(self):
        self.legal = int(self.np_random.integers(4))
        return {"x": super().look(), "action_mask": np.eye(4, dtype=np.int8)[self.legal]}

    def step(self, action):
        if action != self.legal:
            raise ValueError(f"illegal action {action}")
        return super().step(action)


class Pairs(Masked):
    """The same with two choices at once."""

    action_space = MultiDiscrete([2, 2])

    def step(self, action):
        return super().step(self.legal if tuple(action) == divmod(self.legal, 2) else -1)

    def look(self):
        seen = super().look()
        return seen | {"action_mask": seen["action_mask"].reshape(2, 2)}

    observation_space = Dict(x=Odd.observation_space, action_mask=MultiBinary((2, 2)))


class Parts(Pairs):
    """The same with a mask for each choice."""

    observation_space = Dict(x=Odd.observation_space, action_mask=MultiBinary(4))

    def look(self):
        seen = super().look()
        return seen | {"action_mask": np.eye(2, dtype=np.int8)[list(divmod(self.legal, 2))].ravel()}


class Blind(Odd):
    """Shows nothing but a mask."""

    observation_space = Dict(action_mask=MultiBinary(2))

    def look(self):
        return {"action_mask": np.ones(2, np.int8)}


class Misfit(Odd):
    """Its mask does not fit its actions."""

    observation_space = Dict(x=Odd.observation_space, action_mask=MultiBinary(3))

    def look(self):
        return {"x": super().look(), "action_mask": np.ones(3, np.int8)}


class Children(Odd):
    """Each reset starts a child process, and ends that of the episode before."""

    child = None

    def reset(self, **words):
        if self.child is not None:
            self.child.terminate()
            self.child.join()
        self.child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,), daemon=True)
        self.child.start()
        return super().reset(**words)

    def close(self):
        if self.child is not None:
            self.child.terminate()
            self.child.join()


class Moves(Odd):
    """Changes the current directory to another, which it removes at its end."""

    def __init__(self):
        self.folder = tempfile.mkdtemp()
        os.chdir(self.folder)

    def look(self):
        os.chdir("/")
        time.sleep(0.005)  # in which other threads of the process are elsewhere, too
        return super().look()

    def close(self):
        os.chdir(self.folder)
        os.rmdir(self.folder)


class Leaves(Odd):
    """Ends the process."""

    def look(self):
        sys.exit(0)


class Forgets(Odd):
    """Follows its seed until its first episode ends, which is late."""

    length = 1000

    def reset(self, *, seed=None, options=None):
        self.chance, self.steps = np.random.default_rng(seed), 0
        return self.look(), {}

    def look(self):
        return self.chance.uniform(-1, 1, 2).astype(np.float32)


class Wide(Odd):
    """Counts beyond what four bytes can hold."""

    observation_space = Box(0, 2**40, (2,), np.int64)

    def look(self):
        return np.array([2**33, 5])


class WideChoices(Wide):
    """The same, as choices."""

    observation_space = MultiDiscrete([2**40, 9])


class Offline(Odd):
    """Raises the same error as a closed connection."""

    def step(self, action):
        if self.steps == 3:
            raise ConnectionRefusedError("the simulator is gone")
        return super().step(action)


class Parent(Odd):
    """Starts a child process, as simulators do, and dies."""

    def step(self, action):
        if self.steps == 3 and os.fork() != 0:
            os._exit(7)
        if self.steps == 3:
            time.sleep(20)
            os._exit(0)
        return super().step(action)


class Undrawable(Odd):
    """Says that it can be rendered, but cannot be made for rendering."""

    metadata = {"render_modes": ["rgb_array"]}  # noqa: RUF012


class Unordered(Odd):
    """Shows letters in the order of a set."""

    observation_space = Box(0, 1, (12,), np.float32)

    def look(self):
        return np.array([ord(letter) / 128 for letter in set("abcdefghijkl")], np.float32)


class Small(Odd):
    """Accepts only actions of the type that it declares."""

    action_space = MultiDiscrete([2, 3], dtype=np.int8)

    def step(self, action):
        assert self.action_space.contains(action), action.dtype
        return super().step(action)


class Rotten(Odd):
    """Shows NaN at its third step."""

    observation_space = Dict(x=Odd.observation_space)

    def look(self):
        seen = super().look()
        return {"x": np.where([False, self.steps == 3], np.float32(np.nan), seen)}


class Grows(Odd):
    """Shows more than its space says, from its third step on."""

    def look(self):
        seen = super().look()
        return seen if self.steps < 3 else np.append(seen, seen)


class Endless(Odd):
    """Its episodes never end, and it states no limit."""

    metadata = {"render_modes": ["rgb_array"]}  # noqa: RUF012
    length = 10**9

    def __init__(self, render_mode=None):
        self.render_mode = render_mode

    def render(self):
        return np.zeros((32, 32, 3), np.uint8)


def as_pictures(env):
    """A wrapper that turns observations into pictures."""
    space = Box(0, 255, (64, 64, 3), np.uint8)
    return gymnasium.wrappers.TransformObservation(env, lambda obs: np.zeros((64, 64, 3), np.uint8), space)


def as_code(env):
    """A wrapper that turns observations into numbers."""
    return gymnasium.wrappers.TransformObservation(env, lambda obs: int(obs[0] > 0), Discrete(2))


def continuous(env):
    """A wrapper with a real number as action."""
    return gymnasium.wrappers.TransformAction(env, lambda x: int(x[0] > 0), Box(-1, 1, (1,), np.float32))


for made in (
    Endless,
    Rotten,
    Grows,
    Misfit,
    Leaves,
    Tells,
    Masked,
    Pairs,
    Parts,
    Blind,
    Forgets,
    Wide,
    WideChoices,
    Offline,
    Parent,
    Undrawable,
    Unordered,
    Small,
):
    gymnasium.register(f"{made.__name__}-v0", made)
gymnasium.register("Distant-v0", Odd, max_episode_steps=10**10)  # more steps than an experiment can be given


@dataclass(frozen=True)
class Params:
    max_episode_steps: int = 9

    replace = replace


@dataclass(frozen=True)
class Timed:
    max_timesteps: int = 7

    replace = replace


class Nested:
    """In JAX: shows a tuple in a dictionary, takes two choices of 8 bytes at once, and needs an argument."""

    default_params = Params()

    def __init__(self, size):
        self.size = size

    def observation_space(self, params):
        return Dict(pair=Tuple([Discrete(3), Box(0, 9, (self.size,), np.float32)]))

    def action_space(self, params):
        return MultiDiscrete([2, 3])

    def look(self, t):
        return {"pair": (t % 3, jnp.full(self.size, t, jnp.float32))}

    def reset_env(self, key, params):
        return self.look(jnp.int32(0)), jnp.int32(0)

    def step_env(self, key, state, action, params):
        return self.look(state + 1), state + 1, action.sum(), jnp.bool_(False), {}

    def is_truncated(self, state, params):
        return state >= params.max_episode_steps


@dataclass(frozen=True)
class Sized(Params):
    size: int = 1
    pay: float = 1.0


class SizedTwice(Nested):
    """Its argument is also the name of a parameter."""

    default_params = Sized()

    def __init__(self, size, *, shown=1):
        self.size = size * shown


class Tireless(Nested):
    """Has a parameter for its time limit that it never reads."""

    is_truncated = property()  # as if it had none


class Idle(Tireless):
    """Passes the limit to compiled code, which does not read it."""

    def step_env(self, key, state, action, params):
        state = jax.jit(lambda limit, x: x)(params.max_episode_steps, state)
        return super().step_env(key, state, action, params)


class Tired(Tireless):
    """Its step reads the time limit, as gymnax's environments used to."""

    def step_env(self, key, state, action, params):
        obs, state, reward, _, told = super().step_env(key, state, action, params)
        return obs, state, reward, state >= params.max_episode_steps, told


class Roomy(Tireless):
    """Its reset makes an array with an entry for each step."""

    def reset_env(self, key, params):
        jnp.zeros(int(params.max_episode_steps))
        return super().reset_env(key, params)


class Clocked(Tired):
    """Has Craftax's name for its limit, and shows how much of it is left."""

    default_params = Timed()

    def reset_env(self, key, params):
        return self.look(jnp.int32(params.max_timesteps)), jnp.int32(0)

    def step_env(self, key, state, action, params):
        return self.look(params.max_timesteps - state - 1), state + 1, 1.0, state + 1 >= params.max_timesteps, {}


class Boxed(Nested):
    """Its step returns something that does not match its reset: `fault` says where."""

    def __init__(self, fault):
        super().__init__(2)
        self.fault = fault

    def step_env(self, key, state, action, params):
        obs, state, reward, ended, told = super().step_env(key, state, action, params)
        if self.fault == "reward":
            reward = reward[None]
        if self.fault == "flag":
            ended = action > 0
        if self.fault == "state":
            state = state / 1
        if self.fault == "parts":
            obs = {"pair": obs["pair"], "more": state}
        if self.fault == "shape":
            obs = {"pair": (obs["pair"][0], obs["pair"][1][:1])}
        return (obs, state, reward, ended, told)[: 4 if self.fault == "few" else 5]


class Held(Nested):
    """Holds a space where a method should be, as Gymnasium's environments do."""

    action_space = Discrete(2)


class Bankrupt(Nested):
    """In JAX: pays a reward that is not finite at its fifth step."""

    def step_env(self, key, state, action, params):
        obs, state, _, *rest = super().step_env(key, state, action, params)
        return obs, state, jnp.where(state == 5, jnp.inf, 1.0), *rest


class Unspaced(Nested):
    """What it shows does not fit its space: `fault` says where."""

    def __init__(self, fault):
        super().__init__(2)
        self.fault = fault

    def observation_space(self, params):
        return Discrete(3) if self.fault == "dictionary" else super().observation_space(params)

    def look(self, t):
        seen = super().look(t)
        return {"pair": list(seen["pair"])} if self.fault == "list" else seen | {"more": t}
