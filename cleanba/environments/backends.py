"""The three backends of environments behind one protocol.  Training code does not know which one it uses.

Breakout-v5                                 EnvPool's, in C++
gymnasium:LunarLander-v3, package:Name-v0   Gymnasium's, in Python; the second form imports the package, to register it
gymnax:Breakout-MinAtar, craftax:…, jax:…   JAX's, compiled for the device that acts
"""

import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from types import ModuleType
from typing import Protocol

import jax
import numpy as np

from cleanba.config import Experiment, require
from cleanba.environments import envpool, gymnasium, jax_envs
from cleanba.environments.common import Compilable, Identity, Step
from cleanba.files import current_directory, staying_here
from cleanba.limits import usable_cores
from cleanba.rollout import Obs, PyTree
from cleanba.specs import EnvSpec, ObsSpec


class Envs(Protocol):
    """B environments, each with its own seed, that are stepped together."""

    num_envs: int

    def reset(self) -> PyTree:
        """Restart all environments with their seeds -> obs [B, ...]."""
        ...

    def step(self, action: np.ndarray) -> Step[np.ndarray]:
        """Actions [B] or [B, D] -> `Step`.  An environment whose episode has ended ignores its action and resets."""
        ...

    def play(self, actions: np.ndarray) -> tuple[PyTree, np.ndarray, np.ndarray]:
        """Take N steps, after `reset`, and return only the last observations.

        Actions [N, B] or [N, B, D] -> obs [B, ...], raw rewards [N, B], whether a step ended an episode [N, B].
        """
        ...

    def xla(self) -> Compilable:
        """What is needed to step them under `jit`, after `reset`."""
        ...

    def render(self, env: int) -> np.ndarray:
        """A picture of one environment as a person would see it, after `reset`.  [H, W, 3] uint8."""
        ...

    @property
    def steps_per_second(self) -> float:
        """The steps per second of a game at the speed at which people play it."""
        ...

    def close(self) -> None:
        """Stop the environments and whatever steps them.  May be called twice."""
        ...


def module_of(env_id: str) -> ModuleType:
    """The module of the backend that makes this environment."""
    suite, colon, _ = env_id.partition(":")
    return envpool if not colon else jax_envs if suite in jax_envs.SUITES else gymnasium


def env_spec(e: Experiment) -> EnvSpec:
    """The specification of an environment, which is made once to see its spaces.

    Raises:
        UsageError: there is no such environment, it lacks a library, an option is unknown, or no policy here can
            play it.
    """
    same = gymnasium.PREFIX + e.env_id.rpartition(":")[2]
    require(
        not e.env_wrappers or module_of(e.env_id) is gymnasium,
        f"env_wrappers={' '.join(e.env_wrappers)} needs an environment in Python, which {e.env_id} is not; leave it "
        "out" + (f", or try --env-id {same}" if same in gymnasium.known() else ""),
    )
    stay_here()
    with staying_here():
        spec = module_of(e.env_id).env_spec(e)
    require(
        any(part.kind != "mask" for part in jax.tree.leaves(spec.obs)),
        f"env_id={e.env_id!r} shows only an action mask, which no network can use as input; add an entry to "
        "its observations",
    )
    return spec


def check_limit(e: Experiment, spec: EnvSpec) -> None:
    """Raise `UsageError` if a limit to the length of episodes that was asked for would change nothing."""
    if module_of(e.env_id) is envpool:  # the other modules' `env_spec` refuses it
        envpool.check_limit(e, spec)


def with_infos(spec: EnvSpec, names: Sequence[str]) -> EnvSpec:
    """The specification with the numbers in `info` that --log-info names.

    Raises:
        UsageError: the environment is not in Python, or a name cannot be that of a metric.
    """
    require(
        not names or module_of(spec.env_id) is gymnasium,
        f"log_info={' '.join(names)} needs an environment in Python, which {spec.env_id} is not; leave it out",
    )
    for name in names:
        require(
            name.isprintable() and bool(name.strip()) and "/" not in name and names.count(name) == 1,
            f"log_info names {name!r}; name each number of `info` once, without /",
        )
    return spec._replace(infos=tuple(names))


def sources(spec: EnvSpec, *others: str) -> dict[str, str]:
    """The modules that define an environment of the user's own and its wrappers -> SHA-256 of their files.

    For one that is defined in a script or notebook, its name -> SHA-256 of its code.  What modules import is not looked
    at.

    others: names of modules to look at, too, unless they are Cleanba's: that of the algorithm.
    """
    backend = module_of(spec.env_id)
    found = gymnasium.code_of(spec) if backend is gymnasium else {}
    names = [*([] if backend is envpool else backend.modules_of(spec)), *others]
    for name in sorted({name for name in names if not name.startswith("cleanba.")}):
        if file := getattr(sys.modules.get(name), "__file__", None):
            with suppress(OSError):
                found[name] = f"sha256:{sha256(Path(file).read_bytes()).hexdigest()}"
    return found


def why_unscannable(spec: EnvSpec) -> str:
    """Why the scanned collector cannot run an environment, as the end of a sentence."""
    if module_of(spec.env_id) is gymnasium:
        return f"compiles acting and environments into one loop, but {spec.env_id} runs in Python"
    return (
        f"would corrupt memory: {spec.env_id} has numbers of 8 bytes, which EnvPool's XLA interface writes into "
        "buffers for 4"
    )


def open_envs(
    spec: EnvSpec, seeds: Sequence[int], threads: int, workers: int | None = None, render: bool = False
) -> Envs:
    """A block of environments with these seeds, stepped by `threads` threads or, if in Python, `workers` processes.

    `workers=None` means as many as `threads`; 0 means the calling thread.
    """
    if module_of(spec.env_id) is gymnasium:
        return gymnasium.Envs(spec, seeds, threads if workers is None else workers, render)
    if spec.on_device:
        return jax_envs.Envs(spec, seeds)
    return envpool.Envs(spec, seeds, threads, render)


def end_waits(envs: Envs, check: Callable[[], None]) -> None:
    """Have waits for worker processes end when `check()`, which is called now and then, raises an error."""
    if isinstance(envs, gymnasium.Envs):
        envs.check = check


def as_recorded(env_id: str, obs: Obs) -> PyTree:
    """Observations [...] as the environment shows them, in the form in which the policy sees them."""
    return jax_envs.shown(env_id, obs) if module_of(env_id) is jax_envs else obs


def threads_per_actor(local_actors: int, spec: EnvSpec | None = None, platform: str = "cpu") -> int:
    """Threads, or processes, for the environments of each actor: this process's cores, divided among its actors.

    Where a GPU acts, each actor gets as many of EnvPool's threads as there are cores: one actor's emulators use all
    cores while another actor waits for its policy.
    """
    shared = platform == "cpu" or spec is None or module_of(spec.env_id) is not envpool
    return max(1, usable_cores() // local_actors) if shared else usable_cores()


def check_workers(spec: EnvSpec, workers: int | None) -> None:
    """Raise `UsageError` if worker processes are asked for, but cannot make this environment."""
    require(
        not workers or module_of(spec.env_id) is not gymnasium or gymnasium.can_be_sent(spec),
        f"env_workers={workers}: {spec.env_id} {UNSENDABLE}; leave env_workers out, or put it into a module",
    )


UNSENDABLE = "is defined in the running program, from which no other process can import it"


def stay_here() -> None:
    """Have threads that step environments, whose code may change the current directory, return to the one of now."""
    gymnasium.Here.directory = current_directory()


def repeatable(spec: EnvSpec) -> bool:
    """Whether environments with the same seed and actions behave the same in a short test."""
    return tried_out(spec).repeatable


def tried_out(spec: EnvSpec) -> gymnasium.Trial:
    """What a short test of an environment in Python shows.  The result is cached."""
    if module_of(spec.env_id) is not gymnasium:
        return gymnasium.Trial()
    spec = spec._replace(infos=())  # no training reads them
    registered = gymnasium.game(spec).registered  # a notebook's cell that is run again registers a new class
    key = (repr(spec), Identity(registered and registered.entry_point))
    if key not in _TRIED:
        with staying_here():
            _TRIED[key] = gymnasium.try_out(spec)
    return _TRIED[key]


_TRIED: dict[tuple[str, Identity], gymnasium.Trial] = {}


def warnings(spec: EnvSpec, network: str = "mlp") -> list[str]:
    """Warnings about an environment that can still be played, by policies with this torso."""
    found = []
    if network == "mlp" and not isinstance(spec.obs, ObsSpec) and spec.shows_images:
        found.append(
            f"{spec.env_id} shows pictures, which an MLP reads as plain numbers; to use convolutions, add --network "
            "impala, or nature for 36 x 36 pixels or more"
        )
    if module_of(spec.env_id) is not gymnasium:
        return found
    for part in jax.tree.leaves(spec.obs):
        sides = sorted((1, 1, *part.shape))
        if part.kind in ("bytes", "vector") and sides[-2] >= (8 if len(part.shape) == 3 else 32):  # two long sides
            found.append(
                f"{spec.env_id} shows {part.kind} of the shape {part.shape}, so an MLP reads them. If they are "
                "pictures, give them the type uint8 and three dimensions, one of them the channels "
                "(GrayscaleObservation(keep_dim=True)), and 32 x 32 pixels or more (ResizeObservation)"
            )
    if not gymnasium.can_be_sent(spec):
        found.append(
            f"{spec.env_id} {UNSENDABLE}, so its actors' threads step it, all on one core; put it into a module to "
            "step it in processes"
        )
    if normalising := tried_out(spec).running_statistics:
        summed = ", and returns are sums of normalised rewards" if "Reward" in normalising else ""
        found.append(
            f"{spec.env_id} is normalised by {normalising}, whose statistics are not saved with the agent: evaluations "
            f"begin without them{summed}; use --norm-obs and --norm-reward where the algorithm has them, or a wrapper "
            "with fixed numbers (RescaleObservation, TransformReward)"
        )
    if outside := tried_out(spec).outside:
        found.append(f"{spec.env_id} showed the observation {outside}. Correct the space or the observation")
    if not repeatable(spec):
        found.append(
            f"{spec.env_id} does not follow its seed: two copies, reset with the same seed, returned different "
            "numbers for the same actions; training on it is not reproducible, and checkpoints are "
            "taken only where the environments start afresh (--env-epoch)"
        )
    return found
