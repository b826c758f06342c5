"""A part of a block of Gymnasium's environments, and the worker process that steps it.

Nothing here imports JAX, directly or indirectly, so a worker starts quickly, and may be forked or killed.
"""

import fcntl
import math
import mmap
import os
import pickle
import select
import signal
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib import import_module
from multiprocessing.connection import Connection
from typing import Any, NamedTuple, Protocol

import gymnasium
import numpy as np
from gymnasium.envs.registration import EnvSpec
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from cleanba.errors import own_trace, place_of, raised, warn_once

Layout = list[tuple[tuple[int, ...], str]]
"""shapes and types of arrays that lie one after the other in memory"""


class Game(NamedTuple):
    """How one environment is made.  It can be sent to another process."""

    name: str
    """name for `gymnasium.make`; module:Name imports the module first"""
    options: dict[str, Any]
    wrappers: tuple[str, ...] = ()
    """module:function, each called with the environment that the last one returned"""
    registered: EnvSpec | None = None
    """Gymnasium's registration of that name, if only the training program has it"""
    infos: tuple[str, ...] = ()
    """as `EnvSpec.infos`"""

    def make(self, **more: Any) -> gymnasium.Env[Any, Any]:
        """Make one environment.  Raises whatever error its code raises."""
        find_modules_here()
        if self.registered is not None:
            gymnasium.registry.setdefault(self.name, self.registered)
        env = gymnasium.make(unregistered(self.name) or self.name, **self.options, **more)
        for wrapper in self.wrappers:
            module, _, function = wrapper.partition(":")
            env = getattr(import_module(module), function)(env)
            if env is None:
                raise TypeError(f"{wrapper} returned None; it must return an environment")
        return env


def unregistered(name: str) -> EnvSpec | None:
    """A registration for the class or function `Name` of module:Name; None if the module registers that name itself."""
    module, colon, rest = name.rpartition(":")
    if not colon or not callable(getattr(import_module(module), rest, None)):
        return None
    try:
        gymnasium.spec(rest)
    except gymnasium.error.Error:
        return EnvSpec(id=rest, entry_point=name)
    return None


def find_modules_here() -> None:
    """Search the current directory for modules, too, as `python -m` does, but an installed command does not."""
    with suppress(FileNotFoundError):  # it has been removed
        if os.getcwd() not in sys.path and "" not in sys.path:
            sys.path.append(os.getcwd())


def numbered(parts: Iterable[Any]) -> dict[str, Any]:
    """The parts of a tuple by their names: (a, b) -> {"00": a, "01": b}."""
    return {f"{i:02}": part for i, part in enumerate(parts)}


def named(x: object) -> Any:
    """Replace tuples in observations or spaces by dictionaries: (a, b) -> {"00": a, "01": b}."""
    if isinstance(x, gymnasium.spaces.Tuple | tuple):
        x = numbered(x)
    if isinstance(x, gymnasium.spaces.Dict):
        x = x.spaces
    return {name: named(part) for name, part in x.items()} if isinstance(x, dict) else x


def leaves(x: Any) -> Iterator[Any]:
    """The leaves of a result of `named`, in the order of `jax.tree.leaves`."""
    if isinstance(x, dict):
        for name in sorted(x):
            yield from leaves(x[name])
    else:
        yield x


class Arrays(NamedTuple):
    """The arrays that a block's owner shares with the workers that step it.  Leaves [B, ...]."""

    obs: list[np.ndarray]
    action: np.ndarray
    reward: np.ndarray
    terminated: np.ndarray
    truncated: np.ndarray
    infos: np.ndarray  # [B, K]

    def part(self, start: int, end: int) -> "Arrays":
        """The environments from `start` to before `end`."""
        return Arrays([x[start:end] for x in self.obs], *(x[start:end] for x in self[1:]))


ALIGNMENT = 64  # bytes, a cache line: no array begins in the line in which another one ends


def carve(layout: Layout, memory: mmap.mmap | None = None) -> tuple[Arrays, int]:
    """Arrays in `memory`, or in memory of their own, and the number of bytes that they take."""
    arrays, offset = [], 0
    for shape, dtype in layout:
        made = np.zeros(shape, dtype) if memory is None else np.ndarray(shape, dtype, memory, offset)
        arrays.append(made)
        offset += -(-made.nbytes // ALIGNMENT) * ALIGNMENT
    return Arrays(arrays[:-5], *arrays[-5:]), max(offset, 1)


def misfit(space: gymnasium.Space[Any], obs: object, name: str = "") -> str:
    """How the parts, shapes and types of an observation differ from its space, in words; "" if they do not."""
    parts, shown = named(space), named(obs)
    what = f"observation{name and f' {name[1:]!r}'}"
    if isinstance(parts, dict):
        if not isinstance(shown, dict) or set(shown) != set(parts):
            has = f"has the entries {sorted(shown)}" if isinstance(shown, dict) else f"is {type(obs).__name__}"
            return f"the {what} {has}, but its space has {sorted(parts)}"
        return next(filter(None, (misfit(parts[part], shown[part], f"{name}.{part}") for part in parts)), "")
    shape, dtype = np.shape(shown), np.asarray(shown).dtype
    if shape != space.shape:
        return f"the {what} has the shape {shape}, but its space has {space.shape}: {space}"
    if space.dtype is not None and not np.can_cast(dtype, space.dtype, "same_kind"):
        return f"the {what} has the type {dtype}, but its space has {space.dtype}: {space}"
    return ""


ROUNDING = 1e-3  # how far a real number may exceed its bound, relative to that bound or to 1


def outside(space: gymnasium.Space[Any], obs: object, name: str = "") -> str:
    """The first number of an observation that lies clearly outside its space, in words; "" if there is none."""
    parts, shown = named(space), named(obs)
    if isinstance(parts, dict):
        return next(filter(None, (outside(parts[part], shown[part], f"{name}.{part}") for part in parts)), "")
    x = np.asarray(shown)
    low, high = bounds_of(space)
    if x.dtype.kind not in "biuf":
        return ""
    real = np.issubdtype(space.dtype, np.floating)
    slack = [ROUNDING * np.maximum(1.0, np.abs(bound, dtype=float)) if real else 0 for bound in (low, high)]
    wrong = np.isfinite(x) & ((x < low - slack[0]) | (x > high + slack[1]))
    if not wrong.any():
        return ""
    first = lambda values: f"{float(np.broadcast_to(values, x.shape)[wrong][0]):.6g}"
    return f"{name and f'{name[1:]!r} = '}{first(x)}, but its space has {first(low)} to {first(high)}"


def bounds_of(space: Any) -> tuple[Any, Any]:
    """The lowest and the highest numbers of a space, [...] or one for all."""
    if isinstance(space, gymnasium.spaces.Box):
        return space.low, space.high
    if isinstance(space, gymnasium.spaces.MultiBinary):
        return 0, 1
    count = space.n if isinstance(space, gymnasium.spaces.Discrete) else space.nvec
    return space.start, space.start + count - 1


def misreturned(env: gymnasium.Env[Any, Any], action: object) -> str:
    """What `reset` or `step` of an environment, or of a wrapper around it, returns against Gymnasium's rules, in words.

    "" if they return what they should, or raise an error.
    """
    inner = misreturned(env.env, action) if isinstance(env, gymnasium.Wrapper) else ""
    if inner:
        return inner
    name = type(env).__name__
    with suppress(Exception, SystemExit):
        begun: Any = env.reset(seed=0)
        if not isinstance(begun, tuple) or len(begun) != 2 or not isinstance(begun[1], dict):
            return f"{name}.reset returned {kind_of(begun)}, but must return 2 values: (observation, info)"
        step: Any = env.step(action)
        if not isinstance(step, tuple) or len(step) != 5:
            must = "5 values: (observation, reward, terminated, truncated, info)"
            return f"{name}.step returned {kind_of(step)}, but must return {must}"
        if np.ndim(step[1]) or np.asarray(step[1]).dtype.kind not in "biuf":
            return f"{name}.step returned the reward {' '.join(repr(step[1]).split())}, which is not one number"
    return ""


class Noted:
    """An environment, and what its last step returned.  It need not be one of Gymnasium's classes."""

    def __init__(self, env: Any):
        self.env = env
        self.returned: Any = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.env, name)

    def step(self, action: Any) -> Any:
        """As the environment's."""
        self.returned = self.env.step(action)
        return self.returned


def misflagged(returned: Sequence[object]) -> str:
    """Which flag among the results of `step` is no boolean, in words; "" if both are.  NumPy takes [False] for True."""
    for name, flag in zip(("terminated", "truncated"), returned[2:4], strict=True):
        if isinstance(flag, list | tuple | dict | set | str):
            return f"step returned {name} = {flag!r}, which is not one boolean"
    return ""


def kind_of(returned: object) -> str:
    """What a function returned, in a few words."""
    if isinstance(returned, tuple):
        return f"{len(returned)} value{'s' * (len(returned) != 1)}"
    return f"one value of the type {type(returned).__name__}"


class SilentEnvs(SyncVectorEnv):
    """Gymnasium's `SyncVectorEnv` with only the infos that are logged, and with clearer errors.

    Gymnasium would gather all infos into arrays, and fail if their form changes from one step to the next.  For an
    observation that does not fit its space, only NumPy would raise an error.
    """

    infos: tuple[str, ...] = ()
    noted: np.ndarray  # [B, K]

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
            if place_of(error):  # raised by the environment, not by NumPy for what it returned
                raise
            for obs in self._env_obs:
                if obs is not None and (why := misfit(self.single_observation_space, obs)):
                    raise ValueError(why) from error
            raise

    def close_extras(self, **words: Any) -> None:
        """Close each environment, even if another one cannot be closed; then raise the first error."""
        errors: list[Exception] = []
        for env in self.envs:
            try:
                env.close()
            except Exception as error:
                errors.append(error)
        if errors:
            raise errors[0]

    def _add_info(self, vector_infos: dict[str, Any], env_info: dict[str, Any], env_num: int) -> dict[str, Any]:
        if self.infos:
            self.noted[env_num] = [number_in(env_info, name) for name in self.infos]
        return vector_infos


LARGEST = float(np.finfo(np.float32).max)  # that a run's statistics can hold


def number_in(info: dict[str, Any], name: str) -> float:
    """A number or boolean among an environment's infos, perhaps as an array of one; NaN if there is none."""
    told = info.get(name)
    try:
        one = told.item() if isinstance(told, np.ndarray) else told
        number = math.nan if one is None or isinstance(one, str | bytes) else float(one)
    except (TypeError, ValueError, OverflowError):
        return math.nan
    return number if abs(number) <= LARGEST else math.nan


USUAL_RATE = 30.0  # steps per second, of environments that state none


def rate_in(metadata: Any) -> float:
    """The steps per second that an environment's metadata state; 30 if they state none."""
    try:
        rate = float(metadata["render_fps"])
    except (KeyError, TypeError, ValueError):
        return USUAL_RATE
    return rate if 0 < rate < math.inf else USUAL_RATE


class Part:
    """Some environments of a block, stepped one after the other."""

    def __init__(self, game: Game, arrays: Arrays, **more: Any):
        self._arrays = arrays
        make = lambda: game.make(disable_env_checker=True, **more)
        count = len(arrays.reward)
        self._envs: Any = SilentEnvs([make] * count, copy=False, autoreset_mode=AutoresetMode.NEXT_STEP)
        self._envs.infos, self._envs.noted = game.infos, arrays.infos
        for space, mine in zip(leaves(named(self._envs.single_observation_space)), arrays.obs, strict=True):
            if space.shape != mine.shape[1:]:
                raise ValueError(
                    f"its observations have the shape {space.shape} in one environment and {mine.shape[1:]} in another"
                )

    def reset(self, seeds: Sequence[int | None]) -> None:
        """Restart all of them, each with its seed; None continues an environment's own random numbers."""
        obs, _ = self._envs.reset(seed=list(seeds))
        self._show(obs)

    def step(self) -> None:
        """Take the actions.  An environment whose episode has ended ignores its action and resets."""
        a = self._arrays
        action = a.action.copy()  # an environment may keep it
        with np.errstate(over="ignore"):  # a reward too large for 32 bits becomes infinite, which ends the run
            obs, a.reward[:], a.terminated[:], a.truncated[:], _ = self._envs.step(action)
        self._show(obs)

    def _show(self, obs: object) -> None:
        for mine, delivered in zip(self._arrays.obs, leaves(named(obs)), strict=True):
            mine[:] = delivered

    def render(self, env: int) -> object:
        """A picture of one of them, as a person would see it."""
        return self._envs.envs[env].render()

    def steps_per_second(self) -> float:
        """The steps per second at which people play the first of them."""
        return rate_in(self._envs.envs[0].metadata)

    def running_statistics(self) -> str:
        """The wrappers that normalise by statistics of their own, in words; "" if there are none."""
        env: Any = self._envs.envs[0]
        found: list[str] = []
        while isinstance(env, gymnasium.Wrapper):
            own = [c.__name__ for c in type(env).__mro__ if c.__module__.startswith("gymnasium.wrappers")]
            found += [name for name in own if name in ("NormalizeObservation", "NormalizeReward")]
            env = env.env
        return " and ".join(found)

    def outside(self) -> str:
        """The first number of the last observations that lies outside its space, in words; "" if there is none."""
        space = self._envs.single_observation_space
        return next(filter(None, (outside(space, obs) for obs in self._envs._env_obs)), "")

    def close(self) -> None:
        """Close the environments.  May be called twice."""
        self._envs.close()


class Closable(Protocol):
    """Environments, or what steps them."""

    def close(self) -> None: ...


def close(them: Closable, whose: str) -> None:
    """Close environments.  One that cannot be closed ends no run, and hides no other error."""
    try:
        them.close()
    except Exception as error:
        warn_once(f"an environment of {whose} could not be closed ({raised(error)})")


class Task(NamedTuple):
    """The first message to a worker: the environments that it steps, and the memory that it writes to."""

    game: Game
    layout: Layout
    start: int
    end: int
    memory: int
    """file descriptor of the shared memory"""


class Raised(NamedTuple):
    """The answer of a worker in which an environment raised an error."""

    error: str
    trace: str


# Ctrl-C, a closing terminal and Slurm signal whole process groups.
GROUP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)


def main() -> None:
    """Step a part of a block, as commanded by the process at the other end of a connection, until that ends."""
    for signum in GROUP_SIGNALS:
        if signal.getsignal(signum) != signal.SIG_IGN:  # what nohup ignores, environments' own programs ignore, too
            signal.signal(signum, lambda *_: None)  # the parent ends this process
    # Processes that an environment forks end by SIGTERM, so that it can end them.  They ignore the other signals,
    # which are sent to whole groups.  SIGTERM is blocked during a fork: the child would lose one that comes before its
    # handler is set.
    os.register_at_fork(
        before=lambda: signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTERM,)),
        after_in_parent=lambda: signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGTERM,)),
        after_in_child=end_by_sigterm,
    )
    signal.pthread_sigmask(signal.SIG_UNBLOCK, GROUP_SIGNALS)  # the parent has blocked them
    end_with_parent()
    gymnasium.logger.min_level = gymnasium.logger.ERROR  # the parent has shown the warnings
    connection = Connection(int(sys.argv[1]))
    part: Part | None = None
    while True:
        try:
            command, *arguments = connection.recv()
        except (EOFError, ConnectionError):  # nothing more will be asked
            if part is not None:
                close(part, "a worker process")
            return
        try:
            if part is None:
                part = open_part(Task(command, *arguments))
                continue
            answer = pickle.dumps(getattr(part, command)(*arguments))
        except BaseException as error:  # an environment may raise anything, `sys.exit` included
            words = f"{type(error).__name__}: {error}{place_of(error)}"
            answer = pickle.dumps(Raised(words, own_trace(error)))
        with suppress(ConnectionError):
            connection.send_bytes(answer)


def end_by_sigterm() -> None:
    """Let SIGTERM end this process, which an environment forked, as it would without Cleanba."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGTERM,))


def open_part(task: Task) -> Part:
    """The environments of a task, which write their results to its shared memory."""
    size = carve(task.layout)[1]
    arrays, _ = carve(task.layout, mmap.mmap(task.memory, size))
    return Part(task.game, arrays.part(task.start, task.end))


def end_with_parent() -> None:
    """Have the kernel end this process when the other end of its standard input is closed, as when the parent ends.

    This works even while the process is in compiled code that never returns.
    """
    fcntl.fcntl(0, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(0, fcntl.F_SETFL, fcntl.fcntl(0, fcntl.F_GETFL) | os.O_ASYNC)  # SIGIO, which ends a process
    if select.select([0], [], [], 0)[0]:  # it was closed before
        os._exit(1)
