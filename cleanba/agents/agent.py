"""A trained agent, loaded from a run: a policy with its parameters, and an `Agent` that plays step by step."""

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np
from numpy.typing import ArrayLike

from cleanba.agents.portable import Export, export, format_of, remembered
from cleanba.algorithm import AnyAlgorithm
from cleanba.config import Experiment, require
from cleanba.environments.backends import as_recorded, env_spec
from cleanba.environments.specs import EnvSpec
from cleanba.environments.worker import named
from cleanba.errors import Failure, UsageError
from cleanba.files import Json, read_json
from cleanba.recipes import AnyRecipe
from cleanba.resolution import read_recipe
from cleanba.rollout import Obs, PyTree
from cleanba.runtime import checkpoint as ckpt
from cleanba.runtime.collect import first_carry
from cleanba.runtime.process_setup import settings_of
from cleanba.seeds import evaluation_key
from cleanba.shards import network_options
from cleanba.specs import ObsSpec, ObsSpecs, describe
from cleanba.trust import check_size, source_of

BEST = "best"  # the folder of a run with the parameters that scored best in periodic evaluations


class ActOnce(Protocol):
    """An algorithm's `act`, compiled once for all steps."""

    def __call__(
        self,
        params: PyTree,
        carry: PyTree,
        obs: Obs,
        first: np.ndarray,
        key: jax.Array,
        step: np.int32,
        explore: bool,
    ) -> tuple[jax.Array, PyTree]:
        """Obs [B, ...], first [B] bool, the number of the step -> action [B, ...], carry with leaves [B, ...]."""
        ...


class Policy(NamedTuple):
    """A policy with its parameters, and the environment that it was trained for."""

    experiment: Experiment
    spec: EnvSpec
    recipe: AnyRecipe
    algorithm: AnyAlgorithm
    act: ActOnce
    params: PyTree = None
    update: int | None = None
    """the update that made the parameters; None for a model without its run"""
    global_step: int | None = None
    run: str = ""
    """name of its run's directory"""


def new_policy(recipe: AnyRecipe, e: Experiment, spec: EnvSpec, algorithm: AnyAlgorithm, platform: str) -> Policy:
    """A policy without parameters.  `algorithm` is what the recipe made."""

    def act(
        params: PyTree, carry: PyTree, obs: Obs, first: jax.Array, key: jax.Array, t: jax.Array, explore: bool
    ) -> tuple[jax.Array, PyTree]:
        return algorithm.act(params, carry, obs, first, jax.random.fold_in(key, t), explore)[:2]

    compiled = jax.jit(act, static_argnums=6, compiler_options=network_options(platform))
    return Policy(e, spec, recipe, algorithm, compiled)


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
            require(isinstance(seed, int | np.integer), f"seed={seed!r} must be a whole number")
            require(0 <= seed < 2**31, f"seed={seed} must lie in [0, 2^31); try 1")
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
            UsageError: the observation does not match `spec.obs`, or a recurrent agent is given a different number of
                observations than at its last step.
        """
        require(greedy is None or isinstance(greedy, bool | np.bool_), f"greedy={greedy!r} must be True, False or None")
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
        path = Path(path)
        return export(self._policy, path, format_of(path), seed)


def as_batch(spec: EnvSpec, obs: object) -> tuple[PyTree, int | None]:
    """Observations in the policy's form, [B, ...], and B; None for a single one without a batch axis.

    Raises:
        UsageError: they do not match `spec.obs`.
    """
    sizes: set[int | None] = set()
    wanted = f"{spec.env_id} shows {describe(spec.obs)}"

    def fit(part: ObsSpecs, x: object, name: str) -> PyTree:
        what = f"observation[{name!r}]" if name else "the observation"
        if isinstance(part, Mapping):
            if not isinstance(x, Mapping) or not set(part) <= set(x):
                given = f"has {', '.join(map(str, x))}" if isinstance(x, Mapping) else f"is a {type(x).__name__}"
                raise UsageError(f"{what} must have the parts {', '.join(part)}, but {given}; {wanted}")
            return {key: fit(below, x[key], f"{name}.{key}" if name else key) for key, below in part.items()}
        assert isinstance(part, ObsSpec)
        try:
            array = np.asarray(x)
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
        except ValueError as error:
            if isinstance(error, UsageError):
                raise
            raise UsageError(f"{what} is not an array ({error}); {wanted}") from None
        sizes.add(None if single else len(array))
        array = array.astype(part.dtype)
        return array[None] if single else array

    batch = fit(spec.obs, named(obs), "")
    require(len(sizes) == 1, f"parts of the observation are batches of different sizes; {wanted}")
    return batch, sizes.pop()


def load_policy(run_dir: Path, checkpoint: str, platform: str, trust_remote_code: bool = False) -> Policy:
    """The policy of a run: network, environment and parameters, from its config.json and checkpoints.

    Of a run from elsewhere (`trust.py`), only the model in Flax's msgpack format is read, unless `trust_remote_code`.

    Raises:
        UsageError: there is no such run or checkpoint, or a run from elsewhere asks for something that is not allowed.
        Failure: the checkpoint is damaged.
    """
    recipe, e = read_recipe(run_dir, trust_remote_code)
    source = None if trust_remote_code else source_of(run_dir)
    spec = env_spec(e)
    algorithm = recipe.make(e, spec, platform)
    like_state, like_params = algorithm.shapes()
    if source is not None:
        check_size(like_params, source)
        params, update, global_step = read_uploaded(run_dir, checkpoint, source, like_params)
    else:
        params, update, global_step = read_params(run_dir, checkpoint, algorithm.actor_params, like_state, like_params)
    policy = new_policy(recipe, e, spec, algorithm, platform)
    return policy._replace(params=params, update=update, global_step=global_step, run=run_dir.resolve().name)


def read_params(
    run_dir: Path,
    checkpoint: str,
    actor_params: Callable[[PyTree], PyTree],
    like_state: PyTree,
    like_params: PyTree,
) -> tuple[PyTree, int | None, int | None]:
    """The parameters that `--checkpoint` names, their update and their global step.

    "last" is the newest sound checkpoint or, if there is none, the model that --save-model kept.
    """
    there = ckpt.updates_to_read(run_dir)
    listed = f"it has {', '.join(map(str, there))}" if there else "it has none yet"
    if checkpoint.isdecimal():
        require(
            int(checkpoint) in there,
            f"{run_dir} keeps no checkpoint of update {checkpoint}; {listed} (--keep-checkpoints keeps more of them)",
        )
        saved = ckpt.read(run_dir, int(checkpoint), like_state, like_params)
        return actor_params(saved.state), saved.update, saved.counters["global_step"]
    if checkpoint == "best":
        best = read_best(run_dir)
        model = run_dir / BEST / f"{best['update']}.msgpack"
        return ckpt.read_model(model, like_params), best["update"], best["global_step"]
    require(checkpoint == "last", f"checkpoint={checkpoint!r} must be the number of an update, best, or last; {listed}")
    damage: Failure | None = None
    for update in reversed(there):
        try:
            saved = ckpt.read(run_dir, update, like_state, like_params)
        except Failure as error:  # damaged, or removed by the run since we looked
            damage = damage or error
            continue
        if damage is not None and there[-1] in ckpt.updates_kept(run_dir):
            print(f"cleanba: warning: {damage}; taking the checkpoint of update {update} instead", file=sys.stderr)
        return actor_params(saved.state), saved.update, saved.counters["global_step"]
    if damage is not None:
        raise damage
    model = run_dir / "model.msgpack"
    require(
        model.exists(),
        f"{run_dir} has no checkpoint"
        + (
            "; its checkpoints have been removed, so choose another run"
            if (run_dir / "result.json").exists()
            else " yet: a run without --checkpoint-frequency writes its first after ten seconds, or after the first "
            "epoch of environments that do not follow their seed"
        ),
    )
    return ckpt.read_model(model, like_params), None, None


def read_uploaded(
    run_dir: Path, checkpoint: str, source: str, like_params: PyTree
) -> tuple[PyTree, int | None, int | None]:
    """The parameters of a run from elsewhere: its only model, whose update and step cannot be verified (None, None)."""
    require(checkpoint == "last", f"checkpoint={checkpoint!r}: {source} has one model; leave --checkpoint out")
    model = run_dir / "model.msgpack"
    require(model.exists(), f"{source} has no model.msgpack; choose another run")
    return ckpt.read_model(model, like_params), None, None


def read_best(run_dir: Path) -> Json:
    """best/best.json: update, global_step and episodic_return of the best periodic evaluation.

    Raises:
        UsageError: there was no such evaluation.
    """
    path = run_dir / BEST / "best.json"
    require(
        path.exists(),
        f"{run_dir} has no best checkpoint, because nothing was evaluated while it trained; "
        "train with --eval-frequency, or try --checkpoint last",
    )
    return read_json(path)
