"""Gymnasium's environments: looks them up, and steps a block of them in worker processes."""

import functools
import inspect
import mmap
import multiprocessing
import os
import pickle
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from hashlib import sha256
from itertools import pairwise
from keyword import iskeyword
from types import FunctionType, MethodType
from typing import Any, ClassVar, NamedTuple, NoReturn, cast

import gymnasium
import jax
import numpy as np
from gymnasium.envs.registration import load_env_creator
from gymnasium.spaces import Box, Discrete, MultiBinary, MultiDiscrete

from cleanba.config import Experiment
from cleanba.environments.code_text import RUNNING, argument_text, code_text, is_importable, is_module, name_of
from cleanba.environments.common import (
    Step,
    atari_name,
    imported,
    parse_options,
    stated_limit,
    train_reward,
    undrawable,
    with_these,
)
from cleanba.environments.spaces import action_spec, obs_spec, too_wide
from cleanba.environments.worker import (
    GROUP_SIGNALS,
    USUAL_RATE,
    Arrays,
    Game,
    Layout,
    Noted,
    Part,
    Raised,
    SilentEnvs,
    Task,
    carve,
    close,
    leaves,
    misflagged,
    misreturned,
    named,
    rate_in,
    unregistered,
)
from cleanba.errors import Failure, UsageError, closest_names, missing, raised, said, signal_name
from cleanba.files import staying_here
from cleanba.rollout import Obs, PyTree
from cleanba.specs import ActionSpec, EnvSpec, ObsSpecs
from cleanba.waited import Waited

PREFIX = "gymnasium:"


def known() -> dict[str, str]:
    """Gymnasium's own environments: name -> family."""
    entries = {name: str(spec.entry_point) for name, spec in gymnasium.registry.items()}
    return {PREFIX + name: entry.split(".")[-2] for name, entry in sorted(entries.items()) if "envs." in entry}


def registered_by(package: str) -> list[str]:
    """The environments that a package registers when it is imported, as package:Name.

    Raises:
        UsageError: the package cannot be imported.
    """
    imported(f"package {package!r}", "install it, or change to its directory", package)
    places = {name: made_by(spec.entry_point) for name, spec in gymnasium.registry.items()}
    return [f"{package}:{name}" for name in sorted(places) if f"{places[name]}.".startswith(f"{package}.")]


def game(spec: EnvSpec) -> Game:
    """How the environment of a specification is made, under its name without the prefix gymnasium:."""
    name = spec.env_id.removeprefix(PREFIX)
    entry = gymnasium.registry.get(name)
    own = entry is None or str(entry.entry_point).startswith("gymnasium.")
    return Game(name, spec.options, spec.wrappers, None if own else entry, spec.infos)


MOST_NAME = 80  # characters of the name of an environment that a function makes
LOCAL = "local/"  # the namespace of environments that are defined in the running program only, in no module


def register(maker: Callable[..., gymnasium.Env[Any, Any]]) -> str:
    """Register a class, or a function that makes an environment, in this process, and return its id.

    The id is module:Name if a module holds it; the command knows it, too.  If only the running program holds it, the id
    is local/Name-v0, and replaces an earlier one, such as the class of a notebook's cell that was run again.  A name
    within a function, or that of a function, says too little: the id ends with a digest of the code.
    """
    called = maker.func if isinstance(maker, functools.partial) else maker
    name = name_of(called)
    if called is maker and is_importable(maker):
        return f"{maker.__module__}:{name}"
    exact = is_importable(called) or (isinstance(called, type) and "<locals>" not in called.__qualname__)
    text = lambda: code_text(maker)
    if isinstance(maker, functools.partial):  # one of Corridor with length=10 is local/Corridor-length-10-v0
        is_word = lambda x: isinstance(x, str) and x.isidentifier() and not iskeyword(x)  # no number, None or True
        is_number = lambda x: x is None or isinstance(x, int | float)
        word = lambda x: x if is_word(x) else repr(x) if is_number(x) else type(x).__name__
        words = [*map(word, maker.args), *(f"{key}-{word(value)}" for key, value in maker.keywords.items())]
        name = "-".join([name, *words])
        given = (*maker.args, *maker.keywords.values())
        if exact:
            text = lambda: argument_text((maker.args, maker.keywords))
        exact = exact and len(maker.args) < 2 and all(is_word(x) or is_number(x) for x in given)
    plain = re.sub(r"[^\w.-]+", "", name)[:MOST_NAME]
    if not exact or plain != name:
        plain += f"-{sha256(text().encode()).hexdigest()[:8]}"
    env_id = f"{PREFIX}{LOCAL}{plain}-v0"
    register_as(maker, env_id)
    return env_id


def register_as(maker: Callable[..., gymnasium.Env[Any, Any]], env_id: str) -> None:
    """Register a class or function under an id that `register` gave it earlier, or in another process."""
    name = env_id.removeprefix(PREFIX)
    if name.startswith(LOCAL):
        gymnasium.registry.pop(name, None)
        gymnasium.register(name, entry_point=maker)


def code_of(spec: EnvSpec) -> dict[str, str]:
    """The name of an environment whose code only the running program has -> SHA-256 of this code."""
    name = game(spec).name
    entry = gymnasium.registry[name].entry_point if name.startswith(LOCAL) and name in gymnasium.registry else None
    code = entry.func if isinstance(entry, functools.partial) else entry
    if not isinstance(code, FunctionType | MethodType | type) or is_importable(code):
        return {}
    return {name: f"sha256:{sha256(code_text(code).encode()).hexdigest()}"}


def named_modules(made: Game) -> list[str]:
    """The modules that the names of an environment and of its wrappers begin with; "" for a name without one."""
    return [made.name.rpartition(":")[0], *(wrapper.partition(":")[0] for wrapper in made.wrappers)]


def folders_of(made: Game) -> list[str]:
    """The folders that the modules of an environment and of its wrappers were loaded from.

    Python finds them there even if `sys.path` has "", the current directory, and the program has left that.
    """
    entry = None if made.registered is None else made.registered.entry_point
    loaded = [sys.modules.get(name.partition(".")[0]) for name in (*named_modules(made), made_by(entry)) if name]
    places = [place for x in loaded for place in getattr(x, "__path__", [getattr(x, "__file__", None) or ""])]
    return sorted({os.path.dirname(place) for place in places if os.path.isabs(place)})


def can_be_sent(spec: EnvSpec) -> bool:
    """Whether a worker process can make these environments.  It cannot import what the main program defines."""
    made = game(spec)
    named_by = named_modules(made)
    entry = None if made.registered is None else made.registered.entry_point
    if callable(entry):
        named_by.append(getattr(entry, "__module__", ""))
    try:
        data = pickle.dumps(made)
        return all(is_module(name) for name in named_by if name) and not any(x.encode() in data for x in RUNNING)
    except Exception:  # a function without a name, or options that are bound to this process
        return False


def modules_of(spec: EnvSpec) -> list[str]:
    """The modules that define an environment and its wrappers; none of Gymnasium's own."""
    made = game(spec)
    named_by = named_modules(made)
    registered = gymnasium.registry.get(made.name.rpartition(":")[2])
    if registered is not None:
        named_by.append(made_by(registered.entry_point))
    return sorted({name for name in named_by if name and name.partition(".")[0] != "gymnasium"})


def env_spec(e: Experiment) -> EnvSpec:
    """The specification of an environment, which is made once to see its spaces.

    Raises:
        UsageError: Gymnasium knows no such environment, it cannot be made, or no policy here can play it.
    """
    gymnasium.logger.min_level = gymnasium.logger.ERROR
    options = parse_options(e.env_options)
    for name in ("render_mode", "disable_env_checker"):
        if name in options:
            raise UsageError(f"env_options: {name} is set by Cleanba; leave it out (films are asked for with --video)")
    if e.max_episode_steps:
        options["max_episode_steps"] = e.max_episode_steps
    made = Game(e.env_id.removeprefix(PREFIX), options, e.env_wrappers)
    check_known(e.env_id, made.name)
    check_wrappers(e.env_wrappers)
    doing = "made"
    probe: Any = None
    taken: Any = [None]  # the first action of one environment
    try:
        env = made.make()
        action, observation = action_spec(env.action_space), env.observation_space
        limit = env.spec.max_episode_steps if env.spec is not None else None
        close(env, e.env_id)
        unseen = [
            space
            for space in leaves(named(observation))
            if not isinstance(space, Box | Discrete | MultiBinary | MultiDiscrete)
        ]
        if isinstance(action, str) or unseen:
            why = action if isinstance(action, str) else f"it shows {unseen[0]}, which no network here takes as input"
            raise UsageError(
                f"env_id={e.env_id!r} cannot be trained on: {why}; --env-wrappers module:function may change it"
            )
        probe = SilentEnvs([lambda: cast(gymnasium.Env[Any, Any], Noted(made.make()))], copy=False)
        doing = "reset"
        sample, _ = probe.reset(seed=[0])
        fits = lambda space, x: x.astype(np.float32) if too_wide(space) else x
        sample = jax.tree.map(fits, named(observation), named(sample))
        obs = obs_spec(named(observation), sample, action)
        first = random_action(action, np.random.default_rng(0), mask_of(obs, sample))
        doing = "stepped"
        # Gymnasium's checker, which is on here, checks the first step too.
        taken = action.for_environment(first)
        _, reward, *_ = probe.step(taken)
        if np.isnan(reward).any():
            raise ValueError("its first reward is not a number")
        if why := misflagged(probe.envs[0].returned):
            raise ValueError(why)
        close(probe, e.env_id)
    except UsageError:
        raise
    except gymnasium.error.DependencyNotInstalled as error:
        if "box2d" in str(error).lower():
            raise missing(e.env_id, ImportError(name="Box2D"), "box2d") from None
        raise UsageError(f"env_id={e.env_id!r} cannot be made: {said(error)}") from error
    except (Exception, SystemExit) as error:  # an environment may raise anything
        if probe is None and isinstance(error, TypeError) and (words := unknown_option(made)):
            raise UsageError(f"{e.env_id} {words}") from error
        why = (probe is not None and misreturned(probe.envs[0].env, taken[0])) or raised(error)
        raise UsageError(
            f"env_id={e.env_id!r} cannot be {doing}{with_these(options, e.env_wrappers)}: {why}"
        ) from error
    module, _, name = made.name.rpartition(":")
    registered = gymnasium.registry.get(name)  # None for a class
    own = options.get("max_episode_steps") or (registered and registered.max_episode_steps)  # without wrappers
    options |= {"max_episode_steps": int(own)} if own else {}
    return EnvSpec(
        env_id=e.env_id,
        obs=obs,
        action=action,
        is_atari=False,
        clip_reward=e.reward_clip,
        options=options,
        scannable=False,
        wrappers=e.env_wrappers,
        family=made_by(registered.entry_point) if registered else module,
        time_limit=stated_limit(limit),
    )


def unknown_option(made: Game) -> str:
    """That an environment's constructor does not take one of its options, in words; "" if it takes them all."""
    registered = unregistered(made.name) or gymnasium.spec(made.name.rpartition(":")[2])
    entry: Any = registered.entry_point
    try:
        taken = inspect.signature(load_env_creator(entry) if isinstance(entry, str) else entry).parameters
    except (TypeError, ValueError):  # it has no signature
        return ""
    unknown = [name for name in made.options if name not in (*taken, "max_episode_steps")]
    if not unknown or any(parameter.kind is parameter.VAR_KEYWORD for parameter in taken.values()):
        return ""
    others = ", ".join(name for name in taken if name != "render_mode")  # which Cleanba sets
    return f"takes no option {unknown[0]!r}; its constructor takes {others or 'none'}"


def made_by(entry: object) -> str:
    """The module that an entry point lies in."""
    if isinstance(entry, functools.partial):
        return made_by(entry.func)
    return entry.partition(":")[0] if isinstance(entry, str) else getattr(entry, "__module__", "")


def check_known(env_id: str, name: str) -> None:
    """Raise `UsageError` unless Gymnasium knows the name, once the module before its colon is imported."""
    module, colon, rest = name.rpartition(":")
    found: object = None
    if name.startswith(LOCAL) and name not in gymnasium.registry:
        raise UsageError(
            f"env_id={env_id!r} was defined by the program that trained on it, and is not known here: continue in "
            f"Python, after gymnasium.register({name!r}, entry_point=…), or put it into a module of its own for the "
            "command"
        )
    if colon:
        what, remedy = f"env_id={env_id!r}: module {module!r}", "install it, or change to its directory"
        found = imported(what, remedy, module, asked=env_id)
        if hasattr(getattr(found, rest, None), "step_env"):
            raise UsageError(f"env_id={env_id!r} is an environment in JAX; write jax:{env_id}")
        if unregistered(name) is not None:
            return
    try:
        gymnasium.spec(rest)
    except gymnasium.error.Error as error:
        is_env = lambda x: isinstance(x, type) and issubclass(x, gymnasium.Env)
        classes = [n for n, x in getattr(found, "__dict__", {}).items() if is_env(x)]
        close = closest_names(rest, [*classes, *gymnasium.registry], alike=0.65)
        why = f"; the closest names are {close}" if close else "; `cleanba envs` lists what there is"
        if re.search("ALE/|NoFrameskip|Deterministic", rest) and (atari := atari_name(rest)):
            why = f"; it is {atari} here"  # EnvPool has Atari's games
        raise UsageError(f"env_id={env_id!r} is not a registered Gymnasium environment{why}") from error


def check_wrappers(wrappers: Sequence[str]) -> None:
    """Raise `UsageError` unless each names a function that can be imported."""
    for wrapper in wrappers:
        module, colon, function = wrapper.partition(":")
        if not colon:
            raise UsageError(f"env_wrappers={wrapper!r} must have the form module:function; try my_package:wrap")
        if not callable(imported(f"env_wrappers={wrapper!r}", "check the name", module, function, wrapper)):
            raise UsageError(f"env_wrappers={wrapper!r} is not a function; name one that takes an environment")


TRIED_STEPS = 32  # of each episode of the short test below
PATIENCE_SECONDS = 10.0  # for each of them


class Trial(NamedTuple):
    """What a short test of an environment showed."""

    repeatable: bool = True
    """two of them with the same seed returned the same for the same actions"""
    outside: str = ""
    """an observation that lies outside its space, in words, and what follows; "" if there was none"""
    running_statistics: str = ""
    """its wrappers that normalise by statistics of their own, in words"""


def try_out(spec: EnvSpec) -> Trial:
    """Step two environments with the same seed by the same random actions, and compare what they return.

    They step in turns, so an environment that draws from a shared generator, such as `numpy.random`, is detected too.
    They then begin another episode without a new seed.  An environment that raises an error, dies or hangs counts as
    repeatable, as the run itself will report that.
    """
    actions, outside, normalising = np.random.default_rng(0), "", ""
    alike = lambda x: np.array_equal(x[0], x[1], equal_nan=x.dtype.kind == "f")
    try:
        envs = Envs(spec, (1, 1), workers=1, patience=PATIENCE_SECONDS)
        try:
            normalising = envs.running_statistics()
            for seeds in ((1, 1), (None, None)):
                seen: PyTree = (obs := envs.reset(seeds))
                for _ in range(TRIED_STEPS):
                    outside = outside or outside_of(spec.obs, obs) or envs.outside()
                    if not all(alike(x) for x in jax.tree.leaves(seen)):
                        return Trial(False, outside, normalising)
                    one = random_action(spec.action, actions, mask_of(spec.obs, obs))
                    seen = envs.step(np.repeat(one, 2, axis=0))
                    obs = seen.obs
        finally:
            close(envs, spec.env_id)
    except (Exception, SystemExit):  # environments stepped in this thread may raise anything
        pass
    return Trial(True, outside, normalising)


def outside_of(spec: ObsSpecs, obs: Obs) -> str:
    """The first integer among observations [B, ...] that lies outside its space, in words; "" if there is none."""
    for (path, part), x in zip(jax.tree_util.tree_leaves_with_path(spec), jax.tree.leaves(obs), strict=True):
        if part.kind in ("discrete", "codes"):
            wrong = x[(x < part.low) | (x >= part.low + part.count)]
            if wrong.size:
                where = jax.tree_util.keystr(path)
                bounds = f"{part.low} to {part.low + part.count - 1}"
                return (
                    f"{where and f'{where} = '}{wrong[0]}, but its space has {bounds}; the network sees zeros instead"
                )
    return ""


def mask_of(spec: ObsSpecs, obs: Obs) -> np.ndarray | None:
    """The legal actions of the first environment, [...] bool, or None if the observations [B, ...] have no mask."""
    parts = zip(leaves(spec), leaves(obs), strict=True)
    return next((np.asarray(x[0]) != 0 for part, x in parts if part.kind == "mask"), None)


def random_action(action: ActionSpec, chance: np.random.Generator, mask: np.ndarray | None) -> np.ndarray:
    """An action in the policy's form, [1] or [1, D]: a legal one by `mask` [...], if there is any."""
    if action.kind == "quantities":
        return chance.normal(size=(1, action.size)).astype(np.float32)
    drawn = chance.integers(0, action.counts, dtype=np.int32)
    if mask is not None and mask.shape == action.counts and mask.any():  # a mask of combinations, or of one choice
        drawn = chance.choice(np.argwhere(mask)).astype(np.int32)
    elif mask is not None and mask.shape != action.counts:
        parts = np.split(mask.ravel(), np.cumsum(action.counts)[:-1])
        legal = [chance.choice(np.flatnonzero(part)) if part.any() else n for part, n in zip(parts, drawn, strict=True)]
        drawn = np.array(legal, np.int32)
    return drawn if action.kind == "choice" else drawn[None]


class Envs:
    """A block of B environments, each with its own seed, that are stepped together.

    Worker processes hold equal parts of them, and write their results to shared memory.
    """

    def __init__(
        self,
        spec: EnvSpec,
        seeds: Sequence[int],
        workers: int,
        render: bool = False,
        patience: float | None = None,
    ):
        """Make the environments, in `workers` processes, or in this thread if `workers` is 0.

        Environments that are rendered, or that no other process can make, are always stepped in this thread.

        `patience` is the number of seconds to wait for a step of a worker; None: as long as it takes.
        """
        self.num_envs = len(seeds)
        self.check: Callable[[], None] = lambda: None
        """called while a worker is waited for, every `LOOK_SECONDS`; an error that it raises ends the wait"""
        self._spec, self._seeds = spec, seeds
        self._parts: list[Here | Worker] = []
        made, layout = game(spec), layout_of(spec, self.num_envs)
        count = 0 if render or not can_be_sent(spec) else min(workers, self.num_envs)
        if count == 0:
            self._arrays, _ = carve(layout)
            more = {"render_mode": "rgb_array"} if render else {}
            if render:
                check_drawable(spec)
            self._parts.append(Here(made, self._arrays, **more))
            return
        shared = "/dev/shm" if os.path.isdir("/dev/shm") and os.access("/dev/shm", os.W_OK) else None
        with tempfile.TemporaryFile(dir=shared) as file:  # without a name, so no file can be left behind
            make_room(file.fileno(), carve(layout)[1], shared or tempfile.gettempdir())
            self._arrays, _ = carve(layout, mmap.mmap(file.fileno(), 0))
            bounds = [i * self.num_envs // count for i in range(count + 1)]
            try:
                for start, end in pairwise(bounds):
                    self._parts.append(Worker(spec.env_id, Task(made, layout, start, end, file.fileno()), patience))
            except OSError as error:
                self.close()
                raise Failure(
                    f"{count} processes cannot be started to step {spec.env_id} ({os.strerror(error.errno or 0)}); "
                    "lower --env-workers (0: none), or raise the limits of open files and processes (ulimit -n, ulimit "
                    "-u)"
                ) from error

    def reset(self, seeds: Sequence[int | None] | None = None) -> PyTree:
        """Restart all environments, with their own seeds or with other ones -> obs [B, ...]."""
        for part in self._parts:
            part.ask("reset", (seeds or self._seeds)[part.mine])
        self._wait()
        return self._shown()

    def step(self, action: np.ndarray) -> Step[np.ndarray]:
        """Actions [B] or [B, D] -> `Step`.  An environment whose episode has ended ignores its action and resets."""
        self._take(action)
        a, obs = self._arrays, self._shown()
        terminated, truncated, raw = a.terminated.copy(), a.truncated.copy(), a.reward.copy()
        infos = a.infos.copy() if self._spec.infos else None
        return Step(obs, train_reward(self._spec, raw), raw, terminated, truncated, terminated | truncated, infos)

    def play(self, actions: np.ndarray) -> tuple[PyTree, np.ndarray, np.ndarray]:
        """Take N steps, after `reset`, and return only the last observations.

        Actions [N, B] or [N, B, D] -> obs [B, ...], raw rewards [N, B], whether a step ended an episode [N, B].
        """
        rewards = np.empty(actions.shape[:2], np.float32)
        ended = np.empty(actions.shape[:2], bool)
        a = self._arrays
        for n, action in enumerate(actions):
            self._take(action)
            rewards[n] = a.reward
            np.logical_or(a.terminated, a.truncated, out=ended[n])
        return self._shown(), rewards, ended

    def _take(self, action: np.ndarray) -> None:
        """Step all environments; the results are in the arrays."""
        self._arrays.action[:] = self._spec.action.for_environment(action)
        for part in self._parts:
            part.ask("step")
        self._wait()

    def _wait(self) -> None:
        for part in self._parts:
            part.answer(self.check)

    def _shown(self) -> PyTree:
        """A copy of the last observations."""
        return jax.tree.unflatten(jax.tree.structure(self._spec.obs), [x.copy() for x in self._arrays.obs])

    def outside(self) -> str:
        """The first number of the last observations that lies outside its space, in words; "" if there is none."""
        for part in self._parts:
            part.ask("outside")
        return next(filter(None, [str(part.answer(self.check)) for part in self._parts]), "")

    def running_statistics(self) -> str:
        """The wrappers that normalise by statistics of their own, in words; "" if there are none."""
        self._parts[0].ask("running_statistics")
        return str(self._parts[0].answer(self.check))

    def xla(self) -> NoReturn:
        """Not implemented: XLA cannot step Python code, so `EnvSpec.scannable` is false."""
        raise NotImplementedError

    def render(self, env: int) -> np.ndarray:
        """A picture of one environment as a person would see it, after `reset`.  [H, W, 3] uint8.

        Raises:
            UsageError: it cannot be drawn.
        """
        part = self._parts[0]
        try:
            part.ask("render", env)
            picture = np.asarray(part.answer(self.check), np.uint8)
            fits = picture.ndim == 3 and picture.shape[-1] in (3, 4) and picture.size
            assert fits, f"it returned {picture.shape}, not [H, W, 3]"
        except Exception as error:
            raise undrawable(self._spec.env_id, error) from None
        return picture[..., :3]  # without transparency

    @functools.cached_property
    def steps_per_second(self) -> float:
        """The steps per second of a game at the speed at which people play it."""
        part = self._parts[0]
        part.ask("steps_per_second")
        return cast(float, part.answer(self.check))

    def close(self) -> None:
        """Close the environments and end their worker processes.  May be called twice."""
        parts, self._parts = self._parts, []
        for part in parts:
            part.hang_up()
        deadline = time.monotonic() + GRACE_SECONDS
        for part in parts:
            part.end(deadline)


def make_room(file: int, size: int, folder: str) -> None:
    """Allocate `size` bytes for a file in this folder, rather than crash at first use.

    Raises:
        Failure: they are not available.
    """
    try:
        os.truncate(file, size)
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(file, 0, size)
    except OSError as error:
        enlarge = "enlarge it (docker run --shm-size 1g)" if folder == "/dev/shm" else "free space there"
        raise Failure(
            f"the environments' shared memory takes {size / 1e6:.0f} MB, but {folder} has no room for it "
            f"({os.strerror(error.errno or 0)}); {enlarge}, lower --num-envs, or add --env-workers 0"
        ) from error


GRACE_SECONDS = 2.0  # for environments to release their resources


def steps_per_second(env_id: str) -> float:
    """The steps per second that Gymnasium's environment of this name states, such as 50 for CartPole; or 30."""
    try:
        entry = gymnasium.spec(env_id).entry_point
        made: Any = load_env_creator(entry) if isinstance(entry, str) else entry
        return rate_in(made.metadata)
    except (gymnasium.error.Error, ImportError, AttributeError):
        return USUAL_RATE


def layout_of(spec: EnvSpec, num_envs: int) -> Layout:
    """The layout of the arrays that a block of environments shares with its workers."""
    rows = lambda shape, dtype: ((num_envs, *shape), dtype)
    flags = [rows((), "bool")] * 2
    obs = [rows(part.shape, part.dtype) for part in leaves(spec.obs)]
    infos = rows((len(spec.infos),), "float32")
    return [*obs, rows(spec.action.shape, spec.action.dtype), rows((), "float32"), *flags, infos]


def check_drawable(spec: EnvSpec) -> None:
    """Raise `UsageError` unless an environment has the render mode rgb_array and can be made with it."""
    with staying_here():
        env = game(spec).make()
        modes = env.metadata.get("render_modes", [])
        close(env, spec.env_id)
    why = "has no render mode rgb_array"
    if "rgb_array" in modes:
        try:
            with staying_here():
                close(game(spec).make(render_mode="rgb_array"), spec.env_id)
            return
        except Exception as error:  # an environment may raise anything
            why = f"cannot be made with render_mode='rgb_array' ({said(error)})"
    raise UsageError(
        f"{spec.env_id} {why}, so there can be no video of it; leave --video and --capture-video out, or add that mode"
    )


class Here:
    """A part that is stepped in the calling thread."""

    directory: ClassVar[str | None] = None
    """the current directory before threads step environments, whose code may change it; `backends.env_spec` sets it"""

    def __init__(self, made: Game, arrays: Arrays, **more: Any):
        self.mine = slice(0, len(arrays.reward))
        with staying_here(Here.directory):
            self._part = Part(made, arrays, **more)
        self._answer: object = None

    def ask(self, command: str, *arguments: object) -> None:
        """Call a method of `Part`."""
        with staying_here(Here.directory):
            self._answer = getattr(self._part, command)(*arguments)

    def answer(self, check: Callable[[], None]) -> object:
        """The result of the method.  There is nothing to wait for."""
        return self._answer

    def hang_up(self) -> None:
        """Announce that there will be no more commands: nothing to do."""

    def end(self, deadline: float) -> None:
        """Close the environments."""
        with staying_here(Here.directory):
            self._part.close()


SLOW_SECONDS = 300.0  # the shortest limit on a wait for environments to start or reset
LOOK_SECONDS = 0.5  # between checks whether a process that does not answer is alive, and whether the run ends


class Trace(Exception):
    """A traceback of another process, to be shown as the cause of an error here."""

    def __str__(self) -> str:
        return f"\n\n{self.args[0]}"


# Environment variables that change the numerical results of some environments; the user's own values take precedence.
# The last one gives a set of strings the same order in all workers.
SAME_IN_ALL = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
SAME_IN_ALL |= {"PYTHONHASHSEED": "0"}


@contextmanager
def signals_blocked() -> Iterator[None]:
    """Within the context, processes are started with `GROUP_SIGNALS` blocked: `worker.main` lets them through."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, GROUP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class Worker:
    """A part that a worker process steps.

    It is not a `multiprocessing.Process`, which would import this program's main module again, and JAX with it.
    """

    def __init__(self, env_id: str, task: Task, patience: float | None):
        self.mine = slice(task.start, task.end)
        self._who = f"environments {task.start} to {task.end - 1} of {env_id}"
        self._patience = patience
        self._connection, theirs = multiprocessing.Pipe()
        places = [place for place in sys.path if isinstance(place, str)]  # Python ignores others
        places += folders_of(task.game)
        start = f"import sys; sys.path[:] = {places!r}; from cleanba.environments.worker import main; main()"
        with signals_blocked():
            self._process = subprocess.Popen(
                [sys.executable, "-c", start, str(theirs.fileno())],
                stdin=subprocess.PIPE,  # never written to: it closes when this process ends, and so ends the worker
                pass_fds=(theirs.fileno(), task.memory),
                env=SAME_IN_ALL | os.environ,
            )
        theirs.close()
        self.ask(*task)

    def ask(self, *command: object) -> None:
        """Have the worker call a method of `Part`.  Several workers can do so at the same time."""
        self._slow = command[0] != "step"
        with suppress(ConnectionError):  # the worker is dead, or has reported an error: `answer` raises it
            self._connection.send(command)

    def answer(self, check: Callable[[], None]) -> object:
        """Wait for the result of the method.  `check()` is called every `LOOK_SECONDS`, and its errors end the wait.

        Raises:
            RuntimeError: an environment raised an error, which is the cause of this one.
            Failure: the process died, or does not answer.
        """
        patience = self._patience
        if patience is not None and self._slow:
            patience = max(patience, SLOW_SECONDS)
        try:
            waited = Waited()
            while not self._connection.poll(LOOK_SECONDS):
                if self._process.poll() is not None and not self._connection.poll():
                    raise EOFError  # it died, but a child of it still holds its end of the connection
                check()
                if patience is not None and waited.look() > patience:
                    raise Failure(f"the process that steps {self._who} has not answered for {patience} s")
            answer = self._connection.recv()
        except (EOFError, ConnectionError):
            try:
                code = self._process.wait(GRACE_SECONDS)
            except subprocess.TimeoutExpired:
                self._process.kill()
                raise Failure(
                    f"the process that steps {self._who} closed its connection, but did not end; see its output above"
                ) from None
            how = f"by {signal_name(-code)}" if code < 0 else f"with exit code {code}"
            raise Failure(f"the process that steps {self._who} died {how}; see its output above") from None
        if isinstance(answer, Raised):
            raise RuntimeError(f"in the process that steps {self._who}: {answer.error}") from Trace(answer.trace)
        return answer

    def hang_up(self) -> None:
        """Announce that there will be no more commands, so that the worker ends."""
        self._connection.close()

    def end(self, deadline: float) -> None:
        """Wait until the worker has ended; at the deadline, kill it."""
        try:
            self._process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdin.close()  # type: ignore[union-attr]
