"""Environments written in JAX: functions that are compiled, alone or with the policy, for the device that acts.

An environment is an object with the methods of gymnax's environments (Lange 2022), which Craftax's have too:

    default_params                                   parameters of the environment, as a dataclass with `replace`
    reset_env(key, params) -> obs, state
    step_env(key, state, action, params) -> obs, state, reward, terminated, info
    is_truncated(state, params) -> whether the time limit is reached; optional, else `step_env` alone ends episodes
    action_space(params), observation_space(params)  gymnax's, or Gymnasium's
    render(state, params) -> picture [H, W, 3]       optional, without it films show what the network sees

Their `step` is not used, as it resets within the step that ends an episode and so loses the last observation.
"""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import fields, is_dataclass, replace
from functools import cache, cached_property
from importlib import import_module
from inspect import signature
from types import ModuleType
from typing import Any, NamedTuple, Protocol, cast

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.interpreters.partial_eval import dce_jaxpr

from cleanba.config import Experiment
from cleanba.environments.boards import draw_board
from cleanba.environments.common import (
    Compilable,
    Identity,
    Step,
    imported,
    parse_options,
    stated_limit,
    undrawable,
    with_these,
)
from cleanba.environments.gymnasium import steps_per_second
from cleanba.environments.spaces import action_spec, obs_spec
from cleanba.environments.worker import named, numbered
from cleanba.errors import UsageError, closest_names, missing, raised
from cleanba.rollout import Obs, PyTree, step_outcome
from cleanba.seeds import environment_key
from cleanba.specs import ActionSpec, EnvSpec, ObsSpec
from cleanba.waited import compiling

SUITES = ("gymnax", "craftax", "jax")
CRAFTAX = ("Craftax-Symbolic-v1", "Craftax-Pixels-v1", "Craftax-Classic-Symbolic-v1", "Craftax-Classic-Pixels-v1")
LIMITS = ("max_steps_in_episode", "max_timesteps", "max_episode_steps")  # names of the time limit


class Environment(Protocol):
    """The methods that every environment has; the others are optional."""

    def reset_env(self, key: jax.Array, params: PyTree) -> tuple[PyTree, PyTree]:
        """Begin an episode of one environment -> obs [...], state."""
        ...

    def step_env(
        self, key: jax.Array, state: PyTree, action: jax.Array, params: PyTree
    ) -> tuple[PyTree, PyTree, jax.Array, jax.Array, PyTree]:
        """One step of one environment -> obs [...], state, reward [], terminated [] bool, info."""
        ...


Maker = Callable[..., Environment]
"""options by name -> the environment"""


class JaxEnvironment(NamedTuple):
    """An environment and its parameters."""

    env: Environment
    params: PyTree


def make(env_id: str, options: dict[str, Any]) -> JaxEnvironment:
    """Make an environment.  Options are fields of its parameters, or arguments of the function that makes it.

    Raises:
        UsageError: there is no such environment, or its library is missing.
        Exception: any error of the function that makes it.
    """
    suite, _, name = env_id.partition(":")
    maker = MAKERS[suite](env_id, name)
    needed = {
        name for name, p in signature(maker).parameters.items() if p.default is p.empty and p.kind is not p.VAR_KEYWORD
    }
    env = maker(**{name: value for name, value in options.items() if name in needed})
    params: PyTree = getattr(env, "default_params", None)
    known = parameter_names(params)
    arguments = {name: value for name, value in options.items() if name not in {*known, "max_episode_steps"} - needed}
    if arguments:
        try:
            env = maker(**arguments)
        except TypeError as error:
            names = f"; its parameters are {', '.join(sorted(known))}" if known else ""
            raise UsageError(
                f"env_id={env_id!r} cannot be made with {', '.join(arguments)}: {raised(error)}{names}"
            ) from error
        params = getattr(env, "default_params", None)
    numbers = {name: value for name, value in options.items() if name in known}
    if "max_episode_steps" in options:
        limit, steps = limit_name(params), options["max_episode_steps"]
        if limit is None:
            raise UsageError(f"{env_id} has no time limit to set; leave --max-episode-steps out")
        if steps != getattr(params, limit) and not heeds_limit(env, params, limit):
            raise UsageError(
                f"max_episode_steps={steps} would change nothing: neither is_truncated nor step_env of {env_id} reads "
                f"its parameter {limit}; leave --max-episode-steps out, or give the environment is_truncated"
            )
        numbers[limit] = steps
    return JaxEnvironment(env, replace(params, **numbers) if numbers else params)


def parameter_names(params: PyTree) -> set[str]:
    """The names of an environment's parameters."""
    return {field.name for field in fields(params)} if is_dataclass(params) else set()


def limit_name(params: PyTree) -> str | None:
    """The name of the time limit among an environment's parameters; None if there is none."""
    known = parameter_names(params)
    return next((name for name in LIMITS if name in known), None)


def heeds_limit(env: Environment, params: PyTree, limit: str) -> bool:
    """Whether the code of an environment reads the parameter that is its time limit."""
    if hasattr(env, "is_truncated") or counts_timesteps(env, params):
        return True

    def once(steps: jax.Array) -> PyTree:
        key, limited = jax.random.key(0), replace(params, **{limit: steps})
        action = space_of(JaxEnvironment(env, params), "action_space").sample()
        return env.step_env(key, env.reset_env(key, limited)[1], action, limited)

    try:
        code = jax.make_jaxpr(once)(jnp.int32(0)).jaxpr
    except Exception:  # Python code reads it, so tracing fails; `env_spec` reports any other error
        return True
    code, _ = dce_jaxpr(code, [True] * len(code.outvars), instantiate=True)  # without what no result depends on
    return any(x is code.invars[0] for equation in code.eqns for x in equation.invars)


def counts_timesteps(env: Environment, params: PyTree) -> bool:
    """Whether an environment ends by `max_timesteps` in its `step_env`, as Craftax's and those derived from one do."""
    of_craftax = any(kind.__module__.startswith("craftax.") for kind in type(env).__mro__)
    return of_craftax and hasattr(params, "max_timesteps")


def _gymnax(env_id: str, name: str) -> Maker:
    gymnax = require_library("gymnax")
    if name not in gymnax.registered_envs:
        raise unknown(env_id, [f"gymnax:{known}" for known in gymnax.registered_envs])
    return lambda **options: gymnax.make(name, **options)[0]


def _craftax(env_id: str, name: str) -> Maker:
    if name not in CRAFTAX:
        raise unknown(env_id, [f"craftax:{known}" for known in CRAFTAX])
    craftax = require_library("craftax.craftax_env")
    return lambda: craftax.make_craftax_env_from_name(name, auto_reset=False)


def _own(env_id: str, name: str) -> Maker:
    module, _, factory = name.partition(":")
    remedy = "write jax:module:Class, and change to its directory"
    maker = imported(f"env_id={env_id!r}", remedy, module, factory, env_id)
    if isinstance(maker, type) and issubclass(maker, gymnasium.Env):
        raise UsageError(f"env_id={env_id!r} is Gymnasium's kind of environment, in Python; write {name}")
    return cast(Maker, maker)


MAKERS = {"gymnax": _gymnax, "craftax": _craftax, "jax": _own}


def known() -> dict[str, str]:
    """All environments of the installed suites: name -> family."""
    found: dict[str, str] = {}
    for suite in ("gymnax", "craftax"):
        try:
            library = require_library(suite)
        except UsageError:
            continue
        for name in library.registered_envs if suite == "gymnax" else CRAFTAX:
            found[f"{suite}:{name}"] = suite + (f" {name.rpartition('-')[2]}" if name[-1].isalpha() else "")
    return found


def require_library(name: str) -> ModuleType:
    """Import an optional library.  Raises `UsageError` if it is not installed."""
    try:
        return import_module(name)
    except ImportError as error:
        raise missing(f"{name.partition('.')[0]}", error, "jax-envs") from None


def unknown(env_id: str, known: Sequence[str]) -> UsageError:
    """The error for a name that a suite does not have."""
    close = closest_names(env_id, known)
    return UsageError(f"env_id={env_id!r} does not exist; {f'the closest names are {close}' if close else known}")


def space_of(environment: JaxEnvironment, name: str) -> gymnasium.Space[Any]:
    """A space of an environment, as one of Gymnasium's."""
    method = getattr(environment.env, name)
    if not callable(method):
        raise TypeError(f"{name} must be a method that takes the parameters and returns a space")
    return as_gymnasium(method(environment.params))


def as_gymnasium(space: Any) -> gymnasium.Space[Any]:
    """Convert a space of gymnax, Craftax or Gymnasium to Gymnasium's.

    Raises:
        TypeError: the space is of another kind.
    """
    if isinstance(space, gymnasium.Space):
        return space
    if hasattr(space, "n"):
        return gymnasium.spaces.Discrete(int(space.n))
    if hasattr(space, "low"):
        dtype = np.dtype(space.dtype)
        low, high = (np.broadcast_to(np.asarray(x, dtype), space.shape) for x in (space.low, space.high))
        return gymnasium.spaces.Box(low, high, space.shape, dtype.type)
    if hasattr(space, "spaces"):
        parts = space.spaces if isinstance(space.spaces, Mapping) else numbered(space.spaces)
        return gymnasium.spaces.Dict({name: as_gymnasium(part) for name, part in parts.items()})
    raise TypeError(f"{space} is a space of unknown kind")


def env_spec(e: Experiment) -> EnvSpec:
    """The specification of an environment, which is made once to see its spaces.  Nothing is compiled.

    Raises:
        UsageError: there is no such environment, its library is missing, or no policy here can play it.
    """
    options = parse_options(e.env_options)
    if e.max_episode_steps:
        options["max_episode_steps"] = e.max_episode_steps
    doing = "made"
    try:
        environment = make(e.env_id, options)
        action = action_spec(space_of(environment, "action_space"))
        if isinstance(action, str):
            raise UsageError(f"env_id={e.env_id!r} cannot be trained on: {action}; try gymnax:CartPole-v1")
        limit = limit_name(environment.params)
        heeded = getattr(environment.params, limit) if limit and heeds_limit(*environment, limit) else None
        most = stated_limit(heeded)
        options |= {"max_episode_steps": most} if most else {}
        functions = functions_of(e.env_id, options, action, e.reward_clip)
        doing = "reset and stepped"
        sample, space = first_step(functions, action), named(space_of(environment, "observation_space"))
        if why := without_space(space, sample):
            raise TypeError(why)
        obs = as_planes(e.env_id, obs_spec(space, sample, action))
    except UsageError:
        raise
    except Exception as error:  # an environment may raise anything
        raise UsageError(f"env_id={e.env_id!r} cannot be {doing}{with_these(options)}: {raised(error)}") from error
    return EnvSpec(
        env_id=e.env_id,
        obs=obs,
        action=action,
        is_atari=False,
        clip_reward=e.reward_clip,
        options=options,
        on_device=True,
        family=type(environment.env).__module__,
        time_limit=most,
    )


def as_planes(env_id: str, obs: Obs) -> PyTree:
    """Specify MinAtar's observations as planes of a board; return other specifications unchanged."""
    return ObsSpec("planes", obs.shape, "bool") if env_id.endswith("-MinAtar") else obs


def shown(env_id: str, obs: Obs) -> PyTree:
    """Observations [...] as they are recorded: MinAtar's as bool, Craftax's pictures as uint8, tuples by name."""
    if env_id.endswith("-MinAtar"):
        return obs.astype(bool)
    if env_id.startswith("craftax:") and "Pixels" in env_id:
        return jnp.round(obs * 255).astype(jnp.uint8)
    return named(obs)


class Block(NamedTuple):
    """The state of B environments.  Leaves [B, ...]."""

    state: PyTree
    """the environment's own"""
    key: jax.Array
    """from the environment's seed; each step folds in its number"""
    t: jax.Array
    """steps so far, including ignored ones"""
    done: jax.Array
    """the last step ended an episode, so the next one resets"""


class Functions(NamedTuple):
    """Reset and step of B environments.  Blocks of the same environment share these objects, and so compiled code."""

    reset: Callable[[jax.Array], tuple[Block, PyTree]]
    """compiled: seeds [B] -> block, obs [B, ...]"""
    step: Callable[[Block, jax.Array], tuple[Block, Step[jax.Array]]]
    """to be compiled within other code: block, the policy's action [B] or [B, D] -> block, step"""
    step_alone: Callable[[Block, np.ndarray], tuple[Block, Step[jax.Array]]]
    """`step`, compiled by itself"""
    begin: Callable[[jax.Array], tuple[PyTree, PyTree]]
    """of one environment: key -> state, obs [...]"""
    advance: Callable[[jax.Array, PyTree, jax.Array], tuple[PyTree, ...]]
    """of one environment: key, state, action -> state, obs [...], reward, terminated, truncated"""


def functions(spec: EnvSpec) -> Functions:
    """The functions of the environments with this specification."""
    return functions_of(spec.env_id, spec.options, spec.action, spec.clip_reward)


def functions_of(env_id: str, options: dict[str, Any], takes: ActionSpec, clip_reward: bool) -> Functions:
    """The functions of an environment that takes these actions, made anew if its class has been redefined."""
    suite, _, name = env_id.partition(":")
    own = _own(env_id, name) if suite == "jax" else None
    return _functions(env_id, Identity(own), Options(options), takes, clip_reward)


def modules_of(spec: EnvSpec) -> list[str]:
    """The module that defines an environment of the user's own."""
    suite, _, name = spec.env_id.partition(":")
    return [name.partition(":")[0]] if suite == "jax" else []


class Options(dict[str, Any]):
    """A dictionary that is hashable by its contents."""

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(repr(sorted(self.items())))


@cache
def _functions(env_id: str, own: Identity, options: Options, takes: ActionSpec, clip_reward: bool) -> Functions:
    environment = make(env_id, options)
    env, params = environment
    truncates, endless = getattr(env, "is_truncated", None), params
    if truncates is None and counts_timesteps(env, params):
        endless = params.replace(max_timesteps=2**31 - 1)
        truncates = lambda state, params: state.timestep >= params.max_timesteps

    def begin(key: jax.Array) -> tuple[PyTree, PyTree]:
        obs, state = env.reset_env(key, params)
        return strong(state), strong(shown(env_id, obs))

    def advance(key: jax.Array, state: PyTree, action: jax.Array) -> tuple[PyTree, ...]:
        result = env.step_env(key, state, action, endless)
        if len(result) != 5:
            raise TypeError(
                f"step_env returned {len(result)} values, but must return 5: obs, state, reward, terminated, info"
            )
        obs, state, reward, terminated, _ = result
        truncated = truncates(state, params) if truncates else False
        flags = (jnp.asarray(flag).astype(bool) for flag in (terminated, truncated))
        return strong(state), strong(shown(env_id, obs)), jnp.asarray(reward, jnp.float32), *flags

    def reset(seeds: jax.Array) -> tuple[Block, PyTree]:
        key = jax.vmap(environment_key)(seeds)
        t = jnp.zeros_like(seeds)
        state, obs = jax.vmap(begin)(jax.vmap(jax.random.fold_in)(key, t))
        return Block(state, key, t, jnp.zeros(seeds.shape, bool)), obs

    def step(block: Block, action: jax.Array) -> tuple[Block, Step[jax.Array]]:
        t = block.t + 1
        key = jax.vmap(jax.random.fold_in)(block.key, t)
        taken = takes.for_environment(action)
        state, obs, raw, terminated, truncated = jax.vmap(advance)(key, block.state, taken)

        def with_fresh() -> tuple[PyTree, PyTree]:
            """Reset the environments whose episode has ended."""
            choose = jax.vmap(lambda done, fresh, old: jax.tree.map(lambda x, y: jnp.where(done, x, y), fresh, old))
            return choose(block.done, jax.vmap(begin)(key), (state, obs))

        state, obs = lax.cond(block.done.any(), with_fresh, lambda: (state, obs))
        answer = step_outcome(block.done, raw, terminated, truncated)
        reward = answer.reward.clip(-1.0, 1.0) if clip_reward else answer.reward
        block = Block(state, block.key, t, answer.done)
        return block, Step(obs, reward, answer.reward, answer.terminated, answer.truncated, answer.done)

    return Functions(jax.jit(reset), step, jax.jit(step), begin, advance)


def first_step(functions: Functions, takes: ActionSpec) -> PyTree:
    """The shapes and types of observations [1, ...] after a reset, which those after a step must match.

    Raises:
        TypeError: a reward or a flag is not a single number, or a state or an observation differs from that of a reset.
    """
    action = np.zeros((1, *takes.drawn_shape), takes.drawn_dtype)

    def once(seeds: jax.Array, action: jax.Array) -> tuple[PyTree, PyTree]:
        keys = jax.vmap(environment_key)(seeds)
        fresh = jax.vmap(functions.begin)(keys)
        return fresh, jax.vmap(functions.advance)(keys, fresh[0], takes.for_environment(action))

    fresh, (state, obs, *numbers) = jax.eval_shape(once, np.zeros(1, np.int32), action)
    for name, x in zip(("reward", "flag `terminated`", "result of is_truncated"), numbers, strict=True):
        if x.shape != (1,):
            raise TypeError(f"its {name} has the shape {x.shape[1:]}, but a single number is needed")
    for name, before, after in zip(("state", "observation"), fresh, (state, obs), strict=True):
        if difference := differs(before, after):
            raise TypeError(f"its {name} must have the same form after a reset and after a step, but {difference}")
    return fresh[1]


def without_space(space: Any, sample: PyTree, name: str = "") -> str:
    """Which part of an observation has no space, or is not an array, in words; "" if there is none.

    space, sample: as `named` returns them.
    """
    what = f"observation{name and f' {name[1:]!r}'}"
    if isinstance(sample, dict):
        if not isinstance(space, dict) or not set(sample) <= set(space):
            has = sorted(space) if isinstance(space, dict) else space
            return f"its {what} has the entries {sorted(sample)}, but its space has {has}"
        parts = (without_space(space[part], shown, f"{name}.{part}") for part, shown in sample.items())
        return next(filter(None, parts), "")
    if not hasattr(sample, "shape"):
        return f"its {what} is {type(sample).__name__}, but must be an array, or a dictionary or tuple of arrays"
    return ""


def differs(before: PyTree, after: PyTree) -> str:
    """How the parts, shapes [1, ...] or types of two trees differ, in words; "" if they do not."""
    forms: list[Any] = [jax.tree.structure(tree) for tree in (before, after)]
    if forms[0] != forms[1]:
        return f"it changes from {forms[0]} to {forms[1]}"
    for (path, x), y in zip(jax.tree_util.tree_leaves_with_path(before), jax.tree.leaves(after), strict=True):
        if (x.shape, x.dtype) != (y.shape, y.dtype):
            words = [f"{z.dtype} {list(z.shape[1:])}" for z in (x, y)]
            return f"{jax.tree_util.keystr(path) or 'it'} changes from {words[0]} to {words[1]}"
    return ""


def strong(tree: PyTree) -> PyTree:
    """Give leaves [...] strong types, so that code that is compiled for one step fits the next."""
    return jax.tree.map(lambda x: lax.convert_element_type(x, jnp.result_type(x)), tree)


class Envs:
    """A block of B environments, each with its own seed, on the device that is JAX's default when it is made."""

    def __init__(self, spec: EnvSpec, seeds: Sequence[int]):
        self.num_envs = len(seeds)
        self._spec, self._functions = spec, functions(spec)
        device = jax.config.jax_default_device or jax.local_devices()[0]  # type: ignore[attr-defined]
        self._seeds = jax.device_put(np.array(seeds, np.int32), device)
        self._block: Block  # after `reset`
        self._obs: Obs = None
        self._done: set[str] = set()  # what has been done once, and so is compiled

    def reset(self) -> PyTree:
        """Restart all environments with their seeds -> obs [B, ...]."""
        with self._perhaps_compiling("reset"):
            self._block, obs = self._functions.reset(self._seeds)
            self._obs = jax.device_get(obs)
        return self._obs

    def step(self, action: np.ndarray) -> Step[np.ndarray]:
        """Actions [B] or [B, D] -> `Step`.  An environment whose episode has ended ignores its action and resets."""
        with self._perhaps_compiling("step"):
            self._block, out = self._functions.step_alone(self._block, action)
            out = jax.device_get(out)
        self._obs = out.obs
        return out

    def play(self, actions: np.ndarray) -> tuple[PyTree, np.ndarray, np.ndarray]:
        """Take N steps, after `reset`, and return only the last observations.

        Actions [N, B] or [N, B, D] -> obs [B, ...], raw rewards [N, B], whether a step ended an episode [N, B].
        """
        steps = [self.step(action) for action in actions]
        ended = [step.terminated | step.truncated for step in steps]
        return self._obs, np.stack([step.raw_reward for step in steps]), np.stack(ended)

    @property
    def state(self) -> PyTree:
        """The whole state of the environments, after `reset`.  Leaves [B, ...]."""
        return self._block

    def restore(self, state: PyTree, obs: Obs) -> None:
        """Continue from the `state` of other environments and their last observations, leaves [B, ...]."""
        self._block = jax.device_put(state, self._seeds.sharding)
        self._obs = obs

    def xla(self) -> Compilable:
        """The state of the environments, after `reset`, and their step, which all blocks share."""
        return Compilable(self._block, self._functions.step, self._functions.step)

    def render(self, env: int) -> np.ndarray:
        """A picture of one environment as a person would see it, after `reset`.  [H, W, 3] uint8."""
        with self._perhaps_compiling("render"):
            state, obs = jax.tree.map(lambda x: x[env], (self._block.state, self._obs))
            return picture(self._drawn, self._spec, state, obs)

    @cached_property
    def _drawn(self) -> JaxEnvironment:
        return make(self._spec.env_id, self._spec.options)

    def _perhaps_compiling(self, doing: str) -> AbstractContextManager[None]:
        """Time limits do not count the first time, which compiles."""
        if doing in self._done:
            return nullcontext()
        self._done.add(doing)
        return compiling()

    @property
    def steps_per_second(self) -> float:
        """The steps per second of a game at the speed at which people play it."""
        name = self._spec.env_id.partition(":")[2]
        return 10.0 if self._spec.env_id.startswith("craftax:") or "MinAtar" in name else steps_per_second(name)

    def close(self) -> None:
        """There is nothing to stop."""


def picture(environment: JaxEnvironment, spec: EnvSpec, state: PyTree, obs: Obs) -> np.ndarray:
    """A picture [H, W, 3] uint8: the environment's own rendering or, without one, a drawing of its observation.

    Raises:
        UsageError: the environment cannot be drawn.
    """
    if hasattr(environment.env, "render"):
        try:
            with figures_closed():
                shown = environment.env.render(state, environment.params)
        except Exception as error:
            raise undrawable(spec.env_id, error) from None
        if getattr(shown, "shape", ())[2:] == (3,):  # some of gymnax's return a figure of Matplotlib
            drawn = np.asarray(shown)
            bright = 255 if drawn.dtype.kind == "f" and drawn.max() <= 1 else 1
            return (drawn * bright).clip(0, 255).astype(np.uint8)
    if spec.env_id.startswith("craftax:"):
        return np.asarray(craftax_renderer("Classic" in spec.env_id)(state)).clip(0, 255).astype(np.uint8)
    boards = [np.asarray(x) for x in jax.tree.leaves(obs)]
    board = boards[0] if boards[0].ndim == 3 else np.concatenate([x.ravel() for x in boards])[None, :, None]
    return draw_board(board)


@contextmanager
def figures_closed() -> Iterator[None]:
    """On leaving the context, close the figures opened within it, which Matplotlib would keep for ever."""
    numbers = lambda: (
        set(sys.modules["matplotlib.pyplot"].get_fignums()) if "matplotlib.pyplot" in sys.modules else set()
    )
    before = numbers()
    try:
        yield
    finally:
        for number in numbers() - before:
            sys.modules["matplotlib.pyplot"].close(number)


@cache
def craftax_renderer(classic: bool) -> Callable[[PyTree], jax.Array]:
    """Craftax's own renderer: state -> picture [H, W, 3], numbers in [0, 255]."""
    where = "craftax_classic" if classic else "craftax"
    size = require_library(f"craftax.{where}.constants").BLOCK_PIXEL_SIZE_HUMAN
    return jax.jit(require_library(f"craftax.{where}.renderer").make_craftax_pixel_renderer(size))
