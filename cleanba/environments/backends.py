"""The three backends of environments behind one protocol.  No other module knows which backend it has.

Breakout-v5                                 EnvPool's, in C++
gymnasium:LunarLander-v3, package:Name-v0   Gymnasium's, in Python; the second imports the package, which registers
gymnax:Breakout-MinAtar, craftax:…, jax:…   compiled, on the device that acts
"""

from collections.abc import Sequence
from types import ModuleType
from typing import Protocol

import jax
import numpy as np

from cleanba.config import Experiment, require
from cleanba.environments import envpool, gymnasium, jax_envs
from cleanba.environments.specs import Compilable, EnvSpec, Step
from cleanba.rollout import PyTree
from cleanba.shards import usable_cores


class Envs(Protocol):
    """A block of environments, each with a seed of its own; steps all of them at once."""

    num_envs: int

    def reset(self) -> PyTree:
        """Start all environments afresh -> obs [B, ...]."""
        ...

    def step(self, action: np.ndarray) -> Step[np.ndarray]:
        """[B], or [B, D] -> what they delivered.  An environment whose episode ended ignores its action and resets."""
        ...

    def play(self, actions: np.ndarray) -> tuple[PyTree, np.ndarray, np.ndarray]:
        """Many steps of which only the last shows anything, after `reset`.

        [N, B] or [N, B, D] -> obs [B, ...], raw rewards [N, B], and whether each step reports an episode's end [N, B].
        """
        ...

    def xla(self) -> Compilable:
        """After `reset`, what is needed to step them under `jit`."""
        ...

    def render(self, env: int) -> np.ndarray:
        """What a person would see of one environment, after `reset`.  [H, W, 3] uint8."""
        ...

    @property
    def steps_per_second(self) -> float:
        """How many steps are a second of a game played by a person."""
        ...

    def close(self) -> None:
        """Stop whatever steps them.  May be called twice."""
        ...


def module_of(env_id: str) -> ModuleType:
    """The module of the backend that makes this environment."""
    suite, colon, _ = env_id.partition(":")
    return envpool if not colon else jax_envs if suite in jax_envs.SUITES else gymnasium


def env_spec(e: Experiment) -> EnvSpec:
    """Look an environment up and make one to see its spaces.

    Raises:
        UsageError: there is no such environment, it lacks a library, an option is unknown, or no policy here can
            play it.
    """
    require(
        not e.env_wrappers or module_of(e.env_id) is gymnasium,
        f"env_wrappers={' '.join(e.env_wrappers)} needs an environment in Python, which {e.env_id} is not; leave it "
        f"out, or try --env-id gymnasium:{e.env_id.rpartition(':')[2]}",
    )
    spec = module_of(e.env_id).env_spec(e)
    require(
        any(part.kind != "mask" for part in jax.tree.leaves(spec.obs)),
        f"env_id={e.env_id!r} shows nothing but which actions are legal, and a network must see something more; add an "
        "entry to its observations",
    )
    return spec


def why_unscannable(spec: EnvSpec) -> str:
    """Where a specification is not `scannable`: what the scanned collector would do."""
    if module_of(spec.env_id) is gymnasium:
        return f"compiles acting and environments into one loop, but {spec.env_id} runs in Python"
    return (
        f"would corrupt memory: {spec.env_id} has numbers of 8 bytes, which EnvPool's XLA interface writes into room "
        "for 4"
    )


def open_envs(
    spec: EnvSpec, seeds: Sequence[int], threads: int, workers: int | None = None, render: bool = False
) -> Envs:
    """A block of environments with these seeds, stepped by so many threads or, those in Python, worker processes.

    `workers` None is as many as `threads`, 0 the thread that asks.
    """
    if module_of(spec.env_id) is gymnasium:
        return gymnasium.Envs(spec, seeds, threads if workers is None else workers, render)
    if spec.on_device:
        return jax_envs.Envs(spec, seeds)
    return envpool.Envs(spec, seeds, threads, render)


def threads_per_actor(local_actors: int) -> int:
    """Threads, or processes, for the environments of each of this process's actors: its cores, shared out."""
    return max(1, usable_cores() // local_actors)


def check_workers(spec: EnvSpec, workers: int | None) -> None:
    """Raise `UsageError` where so many processes are asked for and none can make such an environment."""
    require(
        not workers or module_of(spec.env_id) is not gymnasium or gymnasium.can_be_sent(spec),
        f"env_workers={workers}: {spec.env_id} {UNSENDABLE}; leave env_workers out, or put it into a module",
    )


UNSENDABLE = "is defined in the program that runs, where no other process can import it"


def repeatable(spec: EnvSpec) -> bool:
    """Whether environments with the same seed and actions do the same, as far as a short look tells."""
    key = repr(spec)
    if key not in _REPEATABLE:
        _REPEATABLE[key] = module_of(spec.env_id) is not gymnasium or gymnasium.follows_its_seed(spec)
    return _REPEATABLE[key]


_REPEATABLE: dict[str, bool] = {}


def warnings(spec: EnvSpec) -> list[str]:
    """What is wrong with an environment that can be played nevertheless."""
    if module_of(spec.env_id) is not gymnasium:
        return []
    found = []
    if not gymnasium.can_be_sent(spec):
        found.append(
            f"{spec.env_id} {UNSENDABLE}, so its actors' threads step it, on one core together; in a module of its own "
            "it has processes"
        )
    if not repeatable(spec):
        found.append(
            f"{spec.env_id} does not follow its seed: two of them, reset with the same one, delivered different "
            "numbers for the same actions; nothing trained on it will come out the same twice, and checkpoints are "
            "taken only where the environments start afresh (--env-epoch)"
        )
    return found
