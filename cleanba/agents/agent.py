"""A trained agent: a policy that plays step by step, loaded by the name of a run, here or on the Hugging Face Hub."""

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from numpy.typing import ArrayLike

from cleanba.agents.policy import Policy, load_policy
from cleanba.agents.portable import Export, export, format_of, remembered, require_seed
from cleanba.config import Experiment, require
from cleanba.environments.backends import as_recorded
from cleanba.environments.gymnasium import outside_of
from cleanba.environments.worker import numbered
from cleanba.errors import UsageError, warn_once
from cleanba.files import expanded
from cleanba.resolution import read_recipe
from cleanba.rollout import PyTree
from cleanba.runs.remote import find_run
from cleanba.runtime.collect import first_carry
from cleanba.runtime.devices import local_devices
from cleanba.runtime.process_setup import prepared, settings_of
from cleanba.seeds import evaluation_key
from cleanba.specs import EnvSpec, ObsSpec, ObsSpecs, describe


class Agent:
    """A policy that plays step by step.  It keeps the recurrent state and the key that actions are drawn with.

    Two threads must not use the same agent at the same time.
    """

    def __init__(self, policy: Policy, device: jax.Device, seed: int = 1):
        """An agent that acts on this device and draws its actions with this seed."""
        self._policy = policy
        self._device = device
        self._params = jax.device_put(policy.params, device)
        self._inspect: Callable[..., dict[str, jax.Array]] | None = None  # compiled once it is needed
        self.reset(seed)

    @property
    def policy(self) -> Policy:
        """The policy alone, which keeps no state between steps."""
        return self._policy

    @property
    def spec(self) -> EnvSpec:
        """The specification of its environment: observations (`spec.obs`) and actions (`spec.action`)."""
        return self._policy.spec

    @property
    def experiment(self) -> Experiment:
        """The experiment that trained it."""
        return self._policy.experiment

    @property
    def update(self) -> int | None:
        """The update that made its parameters; None for a model without its run."""
        return self._policy.update

    @property
    def global_step(self) -> int | None:
        """The environment steps that its parameters were trained on; None for a model without its run."""
        return self._policy.global_step

    @property
    def params(self) -> PyTree:
        """The parameters that act, a tree of arrays."""
        return self._policy.params

    @property
    def device(self) -> jax.Device:
        """The device that acts."""
        return self._device

    def __repr__(self) -> str:
        after = "" if self.update is None else f", after update {self.update}"
        return f"<cleanba agent for {self.spec.env_id}{after}: sees {describe(self.spec.obs)}>"

    def reset(self, seed: int | None = None) -> None:
        """Clear the recurrent state: the next observations are the first of an episode.

        A seed restarts the random numbers that actions are drawn with.  Without one they continue.

        Raises:
            UsageError: the seed is out of range.
        """
        if seed is not None:
            require_seed(seed)
            with jax.default_device(self._device), settings_of(self._policy.experiment.dtype):
                self._key = evaluation_key(seed, 0)
            self._step = 0
        self._carry: PyTree = ()
        self._remembers = 0  # the number of environments in the carry; 0 before the first step

    def act(self, obs: Any, first: ArrayLike | None = None, greedy: bool | None = None) -> np.ndarray:
        """The next action for one observation, or for a batch of them.

        Args:
            obs: one observation, or B of them along a new first axis, in the environment's own form: an array, a
                number, or a dictionary of them.  The shape tells one from a batch: `spec.obs` has the shape of one.
            first: whether this is the first observation of an episode, [] or [B] bool.  None: only at the first call,
                and after `reset`.
            greedy: whether to take the best action, or one drawn from the policy as in training.  None: drawn for PPO
                and IMPALA, greedy for the others, without the random actions that `evaluate` may add.

        Returns:
            The action in the environment's own form: `[*shape]` for one observation, `[B, *shape]` for a batch, with
            `spec.action`'s shape and type, and clipped to its bounds.

        Raises:
            UsageError: the observation does not match `spec.obs` or has a value that is not a number, or a recurrent
                agent is given a different number of observations than at its last step.
        """
        require_greedy(greedy)
        policy = self._policy
        with jax.default_device(self._device), settings_of(policy.experiment.dtype):
            seen, flags, carry, batch = self._prepare(obs, first)
            explore = not (policy.recipe.plays.greedy if greedy is None else greedy)
            chosen, self._carry = policy.act(self._params, carry, seen, flags, self._key, np.int32(self._step), explore)
        self._remembers = len(flags)
        self._step = (self._step + 1) % 2**31
        action = np.asarray(policy.spec.action.for_environment(np.asarray(chosen)))
        return action[0] if batch is None else action

    def inspect(self, obs: Any, first: ArrayLike | None = None) -> dict[str, np.ndarray]:
        """What the networks compute from observations.  No action is taken, and a recurrent agent remembers nothing.

        Args:
            obs, first: as for `act`.

        Returns:
            Name -> array.  For a batch: "value" [B] and, depending on the algorithm, "probability" or "action value" of
            each choice [B, A], "mean" of real-valued actions [B, D], or TD3's "action".  Without B for one observation.
            Values are in units of the rewards that the learner saw: with norm_reward, which presets may set, divided by
            the running standard deviation of their discounted return; with reward_clip clipped.

        Raises:
            UsageError: as `act`.
        """
        algorithm = self._policy.algorithm
        with jax.default_device(self._device), settings_of(self._policy.experiment.dtype):
            seen, flags, carry, batch = self._prepare(obs, first)
            self._inspect = self._inspect or jax.jit(algorithm.inspect)
            found = jax.device_get(self._inspect(self._params, carry, seen, flags))
        return {name: x[0] if batch is None else x for name, x in found.items()}

    def _prepare(self, obs: Any, first: ArrayLike | None) -> tuple[PyTree, np.ndarray, PyTree, int | None]:
        """Observations in the policy's form, whether each is an episode's first, the carry, and B (None: a single one).

        Raises:
            UsageError: as `act`.
        """
        seen, batch = as_batch(self._policy.spec, obs)
        n = 1 if batch is None else batch
        begins = self._remembers == 0
        if first is None:
            flags = np.full(n, begins)
        else:
            flags = np.asarray(first)
            fits = flags.shape == (n,) or (flags.ndim == 0 and n == 1)
            require(fits, f"first has the shape {flags.shape}, but there are {n} observations; give one bool for each")
            flags = flags.astype(bool).reshape(n)
        if n == self._remembers:
            return seen, flags, self._carry, batch
        known = begins or not remembered(self._carry)[0] or bool(flags.all())
        require(
            known,
            f"the agent remembers the past of {self._remembers} environments and was given {n} observations; "
            "call reset() before their number changes",
        )
        return seen, flags, first_carry(self._policy.algorithm, n, self._device), batch

    def export(self, path: str | Path, *, seed: int = 1) -> Export:
        """Write the agent as a file that runs without Cleanba, and compare the two on a thousand observations.

        Args:
            path: the file: .onnx, or .stablehlo for programs in JAX.
            seed: seed of the environments that provide the observations.

        Raises:
            UsageError: the extra `export` is not installed, or there can be no such file at `path`.
            Failure: the file cannot be written, or does not compute what the agent does.
        """
        require(isinstance(path, str | Path), f"path={path!r} must name a file, such as agent.onnx")
        path = expanded(path)
        return export(self._policy, path, format_of(path), seed)


def require_greedy(greedy: object) -> None:
    """Raise `UsageError` unless it says whether to take the best action, or leaves that to the algorithm."""
    require(greedy is None or isinstance(greedy, bool | np.bool_), f"greedy={greedy!r} must be True, False or None")


def as_batch(spec: EnvSpec, obs: object) -> tuple[PyTree, int | None]:
    """Observations in the policy's form, [B, ...], and B; None for a single one without a batch axis.

    Raises:
        UsageError: they do not match `spec.obs`, or a value is not finite.
    """
    sizes: set[int | None] = set()
    wanted = f"{spec.env_id} shows {describe(spec.obs)}"

    def fit(part: ObsSpecs, x: object, name: str) -> PyTree:
        what = f"observation[{name!r}]" if name else "the observation"
        if isinstance(part, Mapping):
            x = numbered(x) if isinstance(x, tuple) else x
            if not isinstance(x, Mapping) or not set(part) <= set(x):
                given = f"has {', '.join(map(str, x))}" if isinstance(x, Mapping) else f"is a {type(x).__name__}"
                raise UsageError(f"{what} must have the parts {', '.join(part)}, but {given}; {wanted}")
            return {key: fit(below, x[key], f"{name}.{key}" if name else key) for key, below in part.items()}
        assert isinstance(part, ObsSpec)
        try:
            array = np.asarray(x)
            if array.dtype.kind == "f":
                with np.errstate(over="ignore"):
                    seen = array.astype(part.dtype) if np.issubdtype(part.dtype, np.floating) else array
                if (bad := array[~np.isfinite(seen)]).size:
                    number = f"{bad[0]} as {part.dtype}" if np.isfinite(bad[0]) else bad[0]
                    raise UsageError(
                        f"{what} has a value that is not finite ({number}); replace it before the agent sees it"
                    )
            if part.kind == "mask" and array.dtype.kind in "biuf":
                array = array != 0
            if array.dtype.kind == "f" and not np.issubdtype(part.dtype, np.floating):
                array = np.asarray(as_recorded(spec.env_id, array))
            single = array.shape == part.shape
            require(
                single or (array.ndim == len(part.shape) + 1 and array.shape[1:] == part.shape and len(array) > 0),
                f"{what} has the shape {array.shape}; expected {part.shape}, or a batch with one more axis in front; "
                f"{wanted}",
            )
            kinds = "biuf" if np.issubdtype(part.dtype, np.floating) else "biu"
            require(array.dtype.kind in kinds, f"{what} is of type {array.dtype}; expected {part.dtype}; {wanted}")
            if array.dtype.kind in "iu" and np.issubdtype(part.dtype, np.integer):
                least, most = np.iinfo(part.dtype).min, np.iinfo(part.dtype).max
                outside = array[(array < least) | (array > most)]
                if outside.size:
                    raise UsageError(
                        f"{what} has the value {outside[0]}, but {part.dtype} has {least} to {most}; {wanted}"
                    )
        except ValueError as error:
            if isinstance(error, UsageError):
                raise
            raise UsageError(f"{what} is not an array ({error}); {wanted}") from None
        sizes.add(None if single else len(array))
        array = array.astype(part.dtype)
        return array[None] if single else array

    batch = fit(spec.obs, obs, "")
    require(len(sizes) == 1, f"parts of the observation are batches of different sizes; {wanted}")
    if outside := outside_of(spec.obs, batch):
        warn_once(f"the agent was given the observation {outside}")
    return batch, sizes.pop()


def load(
    run: str | os.PathLike[str], checkpoint: str | int = "last", *, seed: int = 1, trust_remote_code: bool = False
) -> Agent:
    """The trained agent of a run, which may still be training, or one from the Hugging Face Hub.

    Args:
        run: directory of the run, the `Run` itself, hf://user/repository, or an archive of a run (.zip, .tar.gz …).
        checkpoint: which parameters: "last"; "best", in the run's periodic evaluations; or the number of an update.
        seed: seed that its actions are drawn with.
        trust_remote_code: for a run that is downloaded or unpacked, import and call what its config.json names, which
            may be any code (docs/guides/trust.md).

    Raises:
        UsageError: there is no such run or checkpoint, its environment is not installed, or a run from elsewhere
            asks for something that is not allowed.
        Failure: the checkpoint is damaged, or cannot be downloaded.
    """
    require_seed(seed)  # before the checkpoint is read
    run_dir = find_run(run)
    _, e = read_recipe(run_dir, trust_remote_code)
    with prepared(e):
        device = local_devices()[0]  # so that one process of several may load it alone
        return Agent(load_policy(run_dir, str(checkpoint), device.platform, trust_remote_code), device, seed)
