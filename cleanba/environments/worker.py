"""A part of a block of Gymnasium's environments, and the process that steps one.

Nothing here imports JAX, or anything that does: a process of its own starts in a blink, and may be forked or killed.
"""

import fcntl
import mmap
import os
import pickle
import select
import signal
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib import import_module
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import gymnasium
import numpy as np
from gymnasium.envs.registration import EnvSpec
from gymnasium.vector import AutoresetMode, SyncVectorEnv

Layout = list[tuple[tuple[int, ...], str]]
"""shapes and types of arrays that lie in memory one after the other"""


class Game(NamedTuple):
    """How one environment is made.  All of it can be sent to another process."""

    name: str
    """as `gymnasium.make` takes it; with a colon, after the module to import first"""
    options: dict[str, Any]
    wrappers: tuple[str, ...] = ()
    """module:function, each called with the environment so far"""
    registered: EnvSpec | None = None
    """what the program that trains has told Gymnasium of that name, where only that program knows it"""

    def make(self, **more: Any) -> gymnasium.Env[Any, Any]:
        """One environment.  Raises whatever its makers raise."""
        find_modules_here()
        if self.registered is not None:
            gymnasium.registry.setdefault(self.name, self.registered)
        env = gymnasium.make(unregistered(self.name) or self.name, **self.options, **more)
        for wrapper in self.wrappers:
            module, _, function = wrapper.partition(":")
            env = getattr(import_module(module), function)(env)
        return env


def unregistered(name: str) -> EnvSpec | None:
    """How the class or function `Name` of module:Name makes an environment, where the module registers no such name."""
    module, colon, rest = name.rpartition(":")
    if not colon or not callable(getattr(import_module(module), rest, None)):
        return None
    try:
        gymnasium.spec(rest)
    except gymnasium.error.Error:
        return EnvSpec(id=rest, entry_point=name)
    return None


def find_modules_here() -> None:
    """Modules are looked for in the current directory too, as `python -m` does and an installed command does not."""
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.append(os.getcwd())


def named(x: object) -> Any:
    """Observations or spaces with tuples as dictionaries, as parts have names here.  (a, b) -> {"00": a, "01": b}."""
    if isinstance(x, gymnasium.spaces.Tuple | tuple):
        x = {f"{i:02}": part for i, part in enumerate(x)}
    if isinstance(x, gymnasium.spaces.Dict):
        x = x.spaces
    return {name: named(part) for name, part in x.items()} if isinstance(x, dict) else x


def leaves(x: Any) -> Iterator[Any]:
    """The parts of what `named` returned, by name: in the order of `jax.tree.leaves`."""
    if isinstance(x, dict):
        for name in sorted(x):
            yield from leaves(x[name])
    else:
        yield x


class Arrays(NamedTuple):
    """What a block's owner and those who step it share.  Leaves [B, ...]."""

    obs: list[np.ndarray]
    action: np.ndarray
    reward: np.ndarray
    terminated: np.ndarray
    truncated: np.ndarray

    def part(self, start: int, end: int) -> "Arrays":
        """The environments from `start` to before `end`."""
        return Arrays([x[start:end] for x in self.obs], *(x[start:end] for x in self[1:]))


ALIGNMENT = 64  # bytes: two workers then write into no cache line of one array's last and another's first rows


def carve(layout: Layout, memory: mmap.mmap | None = None) -> tuple[Arrays, int]:
    """Arrays that lie in `memory`, or in memory of their own; and how many bytes they take."""
    arrays, offset = [], 0
    for shape, dtype in layout:
        made = np.zeros(shape, dtype) if memory is None else np.ndarray(shape, dtype, memory, offset)
        arrays.append(made)
        offset += -(-made.nbytes // ALIGNMENT) * ALIGNMENT
    return Arrays(arrays[:-4], *arrays[-4:]), max(offset, 1)


def misfit(space: gymnasium.Space[Any], obs: object, name: str = "") -> str:
    """In what an observation's parts and their shapes are not those of its space; "" where they are."""
    parts, shown = named(space), named(obs)
    what = f"observation{name and f' {name[1:]!r}'}"
    if isinstance(parts, dict):
        if not isinstance(shown, dict) or set(shown) != set(parts):
            has = f"has the entries {sorted(shown)}" if isinstance(shown, dict) else f"is {type(obs).__name__}"
            return f"the {what} {has}, but its space has {sorted(parts)}"
        return next(filter(None, (misfit(parts[part], shown[part], f"{name}.{part}") for part in parts)), "")
    shape = np.shape(shown)
    return "" if shape == space.shape else f"the {what} has the shape {shape}, but its space has {space.shape}: {space}"


class SilentEnvs(SyncVectorEnv):
    """Environments without what they tell beside their observations, which nobody here reads.

    Gymnasium would gather it into arrays, and fail where it differs in form from one step to the next.  Where an
    observation does not fit its space, NumPy would say so in words of its own.
    """

    def reset(self, **how: Any) -> Any:
        """As Gymnasium's; raises `ValueError` for an observation that does not fit its space."""
        with self._shapes_named():
            return super().reset(**how)

    def step(self, actions: Any) -> Any:
        """As Gymnasium's; raises `ValueError` for an observation that does not fit its space."""
        with self._shapes_named():
            return super().step(actions)

    @contextmanager
    def _shapes_named(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            for obs in self._env_obs:
                if obs is not None and (why := misfit(self.single_observation_space, obs)):
                    raise ValueError(why) from error
            raise

    def _add_info(self, vector_infos: dict[str, Any], env_info: dict[str, Any], env_num: int) -> dict[str, Any]:
        return vector_infos


class Part:
    """Some environments of a block, stepped one after the other."""

    def __init__(self, game: Game, arrays: Arrays, **more: Any):
        self._arrays = arrays
        make = lambda: game.make(disable_env_checker=True, **more)
        count = len(arrays.reward)
        self._envs: Any = SilentEnvs([make] * count, copy=False, autoreset_mode=AutoresetMode.NEXT_STEP)

    def reset(self, seeds: Sequence[int | None]) -> None:
        """Start all of them afresh, each with its seed; with None its chance goes on as it stands."""
        obs, _ = self._envs.reset(seed=list(seeds))
        self._show(obs)

    def step(self) -> None:
        """Take the actions.  An environment whose episode ended before ignores its own and resets."""
        a = self._arrays
        action = a.action.copy()  # an environment may keep it
        obs, a.reward[:], a.terminated[:], a.truncated[:], _ = self._envs.step(action)
        self._show(obs)

    def _show(self, obs: object) -> None:
        for mine, delivered in zip(self._arrays.obs, leaves(named(obs)), strict=True):
            mine[:] = delivered

    def render(self, env: int) -> object:
        """What a person would see of one of them."""
        return self._envs.envs[env].render()

    def close(self) -> None:
        """End the environments.  May be called twice."""
        self._envs.close()


class Task(NamedTuple):
    """What a worker is told first."""

    game: Game
    layout: Layout
    start: int
    end: int
    memory: int
    """file descriptor of the memory that it shares"""


class Raised(NamedTuple):
    """An answer that is none: an environment raised an error."""

    error: str
    trace: str


def main() -> None:
    """Step a part of a block, as the process at the other end of a connection says, for as long as that lives."""
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):  # these may reach a whole group: Ctrl-C, Slurm's
        signal.signal(signum, lambda *_: None)  # who started this process ends it; what it starts does not inherit it
    end_with_parent()
    gymnasium.logger.min_level = gymnasium.logger.ERROR  # the one that looked first has said it
    connection = Connection(int(sys.argv[1]))
    part: Part | None = None
    while True:
        try:
            command, *arguments = connection.recv()
        except (EOFError, ConnectionError):  # nothing more will be asked
            if part is not None:
                part.close()
            return
        try:
            if part is None:
                part = open_part(Task(command, *arguments))
                continue
            answer = pickle.dumps(getattr(part, command)(*arguments))
        except BaseException as error:  # an environment may raise anything, `sys.exit` included
            answer = pickle.dumps(Raised(f"{type(error).__name__}: {error}", traceback.format_exc()))
        with suppress(ConnectionError):
            connection.send_bytes(answer)


def open_part(task: Task) -> Part:
    """The environments of a task, which answer in the memory that it names."""
    size = carve(task.layout)[1]
    arrays, _ = carve(task.layout, mmap.mmap(task.memory, size))
    return Part(task.game, arrays.part(task.start, task.end))


def end_with_parent() -> None:
    """The kernel ends this process when the other end of its standard input is closed, as by its owner's end.

    It does so in whatever this process sits, compiled code that never returns included.
    """
    fcntl.fcntl(0, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(0, fcntl.F_SETFL, fcntl.fcntl(0, fcntl.F_GETFL) | os.O_ASYNC)  # SIGIO, which ends a process
    if select.select([0], [], [], 0)[0]:  # it was closed before
        os._exit(1)
