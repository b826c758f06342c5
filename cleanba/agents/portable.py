"""A trained agent as a file that others can run, in ONNX or StableHLO.

    obs, first, carry.* -> action, value, probability | mean | action_value, carry_out.*

The file holds all that lies between an observation and an action in the environment's own form: the normalisation of
observations, masks of illegal actions, the network, the greedy choice, and the bounds of actions.  Right after it is
written, it is run on observations from the environment and compared with the agent's network and its actions.
"""

import io
import json
import logging
import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple, Protocol
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jax import export as jax_export
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun
from jax.interpreters.partial_eval import dce_jaxpr

from cleanba.agents.policy import Policy
from cleanba.algorithm import AnyAlgorithm
from cleanba.algorithms.normalisation import CATEGORICAL
from cleanba.config import require
from cleanba.environments.backends import open_envs, stay_here
from cleanba.environments.worker import close
from cleanba.errors import Failure, UsageError, closest_names, missing, said
from cleanba.files import Json, write_whole
from cleanba.rollout import PyTree, step_outcome
from cleanba.runtime.digests import params_digest
from cleanba.runtime.process_setup import settings_of, warnings_of_gymnasium_kept
from cleanba.seeds import MAX_EVAL_ENVS, eval_seed, evaluation_key

FORMATS = {"onnx": ".onnx", "stablehlo": ".stablehlo"}
"""name -> the suffix of its files"""
TOLERANCE = 1e-5  # of probabilities and values; relative where a number is larger than 1
SAME_SHARE = 0.99  # of the actions of an agent in float32, whose kernels round differently
CHECKED = 1000  # observations
AT_ONCE = 20  # environments that provide them
SEEDS = 30  # in the metadata
KEY = "cleanba"  # the metadata entry that holds all of it as one JSON object


class Port(NamedTuple):
    """An input or output of the file: [batch, *shape] of this dtype."""

    name: str
    shape: tuple[int, ...]
    dtype: str


class Exported(NamedTuple):
    """What an agent computes, as a function of flat arrays."""

    function: Callable[..., tuple[jax.Array, ...]]
    """arrays as `inputs` says -> arrays as `outputs` says"""
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]
    metadata: Json


class Runs(Protocol):
    """The written file, read back and run: arrays by name -> arrays by name, for any batch size."""

    def __call__(self, inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]: ...


@dataclass(frozen=True)
class Export:
    """A file that was written, and how it compares with the agent."""

    path: Path
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]
    metadata: Json
    observations: int
    """how many observations the two were compared on"""
    same_actions: int
    """at how many of them the agent as it plays here (with its own precision and kernels) takes the file's action"""
    differences: dict[str, float]
    """by output: the largest difference, relative where a number is larger than 1"""

    def __repr__(self) -> str:
        return (
            f"<export {self.path}: the agent's actions at {self.same_actions:,} of {self.observations:,} observations>"
        )


def plain_algorithm(policy: Policy) -> AnyAlgorithm:
    """The policy's algorithm in plain JAX and float32: no other program knows the calls of the CPU kernels."""
    return policy.recipe.make(replace(policy.experiment, cpu_kernels="off", dtype="float32"), policy.spec, "cpu")


def names_of(prefix: str, tree: PyTree) -> list[str]:
    """A name for each leaf of a tree: the prefix, and the keys on the way to it, separated by dots."""
    word = lambda key: str(getattr(key, "key", getattr(key, "name", getattr(key, "idx", key))))
    return [".".join([prefix, *map(word, path)]) for path, _ in jax.tree_util.tree_leaves_with_path(tree)]


def remembered(carry: PyTree) -> tuple[dict[str, Any], Callable[[dict[str, Any], Any], PyTree]]:
    """The recurrent state in a carry, by name, and a function that rebuilds the carry from it and a batch size.

    The rest of a carry is integers that only exploration uses, such as the environment's number.  In a file it is 0.
    """
    leaves, structure = jax.tree_util.tree_flatten_with_path(carry)
    names = [name.removeprefix("carry.") for name in names_of("carry", carry)]
    real = [jnp.issubdtype(x.dtype, jnp.floating) for _, x in leaves]

    def whole(part: dict[str, Any], batch: Any) -> PyTree:
        blank = lambda x: jnp.zeros((batch, *x.shape[1:]), x.dtype)
        found = [part[name] if keep else blank(x) for name, keep, (_, x) in zip(names, real, leaves, strict=True)]
        return jax.tree.unflatten(structure, found)

    return {name: x for name, keep, (_, x) in zip(names, real, leaves, strict=True) if keep}, whole


def exported(policy: Policy) -> Exported:
    """What the policy computes at one step of B environments, greedily."""
    algorithm, spec = plain_algorithm(policy), policy.spec
    params = jax.tree.map(np.asarray, policy.params)
    one = lambda x: jax.ShapeDtypeStruct((1, *x.shape), jax.dtypes.canonicalize_dtype(x.dtype))
    obs = jax.tree.map(one, spec.obs)
    carry, whole_carry = remembered(jax.eval_shape(lambda: algorithm.initial_carry(1)))
    remembers = bool(carry)
    first = [jax.ShapeDtypeStruct((1,), bool)] if remembers else []
    given, structure = jax.tree.flatten((obs, first, carry))
    in_names = [*names_of("obs", obs), *["first"] * remembers, *names_of("carry", carry)]
    out_names: list[str] = []  # in the order of `step`; eval_shape returns dictionaries by name

    def step(*arrays: jax.Array) -> dict[str, jax.Array]:
        """Flat inputs -> outputs by name, in their order."""
        obs, first, part = jax.tree.unflatten(structure, arrays)
        # One-hot encoding counts up in the categories' type, and ONNX cannot count in bytes; int32 gives equal values.
        wider = lambda o, x: x.astype(jnp.int32) if o.kind in CATEGORICAL else x
        obs = jax.tree.map(wider, spec.obs, obs)
        carry = whole_carry(part, arrays[0].shape[0])
        begins = first[0] if remembers else jnp.zeros(arrays[0].shape[:1], bool)
        action, after, _ = algorithm.act(params, carry, obs, begins, jax.random.key(0), False)
        shown = {name.replace(" ", "_"): x for name, x in algorithm.inspect(params, carry, obs, begins).items()}
        shown.pop("action", None)  # of TD3: the action itself
        after, _ = remembered(after)
        out = {"action": in_environment(action), **shown}
        out |= dict(zip(names_of("carry_out", after), jax.tree.leaves(after), strict=True))
        out_names[:] = out
        return out

    def in_environment(action: jax.Array) -> jax.Array:
        """`ActionSpec.for_environment`, [B, ...] -> [B, *shape], for a batch size that is not yet known."""
        return spec.action.for_environment(action).reshape(action.shape[0], *spec.action.shape)

    like = jax.eval_shape(step, *given)
    ports = lambda names, arrays: tuple(
        Port(name, tuple(x.shape[1:]), str(x.dtype)) for name, x in zip(names, arrays, strict=True)
    )
    metadata = {
        "cleanba": version("cleanba"),
        "run": policy.run,
        "algorithm": policy.recipe.name,
        "env_id": spec.env_id,
        "env_options": spec.options,
        "env_wrappers": list(spec.wrappers),
        "action_dtype": spec.action.dtype,
        "observation_dtypes": {
            name: part.dtype for name, part in zip(in_names, jax.tree.leaves(spec.obs), strict=False)
        },
        "update": policy.update,
        "global_step": policy.global_step,
        "params_digest": params_digest(policy.params),
        # First those of `cleanba eval`, then those that it takes where the first do not suffice.
        "eval_seeds": [
            eval_seed(1, i % MAX_EVAL_ENVS, 0, MAX_EVAL_ENVS, again=i // MAX_EVAL_ENVS) for i in range(SEEDS)
        ],
    }
    outputs = ports(out_names, [like[name] for name in out_names])

    def function(*arrays: jax.Array) -> tuple[jax.Array, ...]:
        out = step(*arrays)
        return tuple(out[name] for name in out_names)

    return Exported(function, ports(in_names, given), outputs, metadata)


def needed(function: Callable[..., tuple[jax.Array, ...]]) -> Callable[..., Sequence[jax.Array]]:
    """The same function without what its results do not need, such as the log-probability that acting records.

    XLA drops unused computations by itself, but a converter would convert them.
    """

    def traced(*arrays: jax.Array) -> Sequence[jax.Array]:
        closed = jax.make_jaxpr(function)(*arrays)
        jaxpr, _ = dce_jaxpr(closed.jaxpr, [True] * len(closed.jaxpr.outvars), instantiate=True)
        return tuple(jaxpr_as_fun(ClosedJaxpr(jaxpr, closed.consts))(*arrays))

    return traced


# ---------------------------------------------------------------------------------------------------------- formats


def require_onnx() -> tuple[Any, Any]:
    """Import the optional packages that write and run ONNX: jax2onnx and onnxruntime.

    Raises:
        UsageError: one is not installed.
    """
    try:
        import jax2onnx
        import onnxruntime
    except ImportError as error:
        raise missing("an export to ONNX (--format onnx)", error, "export") from None
    return jax2onnx, onnxruntime


def require_stablehlo() -> None:
    """Import the optional package that `jax.export` writes files with.

    Raises:
        UsageError: it is not installed.
    """
    try:
        import flatbuffers  # noqa: F401
    except ImportError as error:
        raise missing("an export to StableHLO (--format stablehlo)", error, "export") from None


@contextmanager
def named_dimensions() -> Iterator[None]:
    """Within this context onnx_ir's shapes take JAX's symbolic dimensions, such as "batch", by their names.

    Some rules of jax2onnx 0.13 pass them on unconverted, and onnx_ir mistakes them for numbers.
    """
    import onnx_ir

    init = onnx_ir.Shape.__init__
    named = lambda d: str(d) if type(d).__module__.startswith("jax") else d
    takes_names = lambda self, dims, *rest, **more: init(self, [named(d) for d in dims], *rest, **more)
    with mock.patch.object(onnx_ir.Shape, "__init__", takes_names):
        yield


@contextmanager
def quietly() -> Iterator[None]:
    """Within this context the converter's log is off, and what it prints is dropped."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with redirect_stdout(io.StringIO()):
            yield
    finally:
        logging.disable(before)


def write_onnx(path: Path, agent: Exported) -> Runs:
    """Write an agent as ONNX by jax2onnx, and open it in onnxruntime."""
    jax2onnx, onnxruntime = require_onnx()
    specs = [jax.ShapeDtypeStruct(("batch", *port.shape), port.dtype) for port in agent.inputs]
    try:
        with quietly(), named_dimensions():
            model = jax2onnx.to_onnx(
                needed(agent.function),
                specs,
                model_name="cleanba_agent",
                input_names=[port.name for port in agent.inputs],
                output_names=[port.name for port in agent.outputs],
            )
    except Exception as error:  # the converter raises errors of every kind for what it does not know
        raise Failure(
            f"the converter jax2onnx does not support an operation of this agent ({said(error)[:300]})"
        ) from error
    for name, value in {**agent.metadata, KEY: agent.metadata}.items():
        entry = model.metadata_props.add()
        entry.key, entry.value = name, value if isinstance(value, str) else json.dumps(value)
    content = model.SerializeToString()
    write_whole(path, content)
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3  # errors: it warns of shapes that it cannot infer, where nothing is wrong
    session = onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])

    def run(inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        return dict(zip([o.name for o in session.get_outputs()], session.run(None, inputs), strict=True))

    return run


def write_stablehlo(path: Path, agent: Exported) -> Runs:
    """Write an agent by `jax.export`, for CPUs, CUDA and TPUs; `jax.export.deserialize` reads it."""
    (batch,) = jax_export.symbolic_shape("batch")
    specs = [jax.ShapeDtypeStruct((batch, *port.shape), port.dtype) for port in agent.inputs]
    names = [port.name for port in agent.inputs]

    def step(inputs: dict[str, jax.Array]) -> dict[str, jax.Array]:
        out = agent.function(*(inputs[name] for name in names))
        return dict(zip([port.name for port in agent.outputs], out, strict=True))

    program = jax_export.export(jax.jit(step), platforms=["cpu", "cuda", "tpu"])(dict(zip(names, specs, strict=True)))
    content = bytes(program.serialize())
    write_whole(path, content)
    write_whole(path.with_suffix(path.suffix + ".json"), json.dumps(described(agent), indent=2) + "\n")
    again = jax.jit(jax_export.deserialize(bytearray(content)).call)
    return lambda inputs: {name: np.asarray(x) for name, x in again(inputs).items()}


def described(agent: Exported) -> Json:
    """Metadata, inputs and outputs of an agent, as a JSON object."""
    ports = lambda them: {port.name: {"shape": ["batch", *port.shape], "dtype": port.dtype} for port in them}
    return {**agent.metadata, "inputs": ports(agent.inputs), "outputs": ports(agent.outputs)}


WRITERS: dict[str, Callable[[Path, Exported], Runs]] = {"onnx": write_onnx, "stablehlo": write_stablehlo}
NEEDS: dict[str, Callable[[], object]] = {"onnx": require_onnx, "stablehlo": require_stablehlo}


# ------------------------------------------------------------------------------------------------------- comparison


def compare(policy: Policy, agent: Exported, runs: Runs, seed: int) -> tuple[dict[str, float], int]:
    """Play with actions drawn from the policy, and compare the file with the agent at each observation.

    The file's outputs must be those of the agent's network in plain JAX and float32.  The agent as it plays here has
    its own precision and kernels, which round differently, so a few of its actions may differ.

    Returns the largest difference of each output, relative where the agent's number is larger than 1, and the number
    of observations at which the agent as it plays here takes the file's action.

    Raises:
        Failure: an action differs, or another number by more than `TOLERANCE`; the message says where first, and how
            often.  Or a float32 agent takes a different action from the file at more than 1 observation in 100.
    """
    algorithm, n = plain_algorithm(policy), AT_ONCE
    steps = CHECKED // n
    explore = jax.jit(lambda p, c, obs, first, key: algorithm.act(p, c, obs, first, key, True)[0])
    reference = jax.jit(lambda arrays: agent.function(*arrays))
    names_in, names_out = [p.name for p in agent.inputs], [p.name for p in agent.outputs]
    as_given = lambda arrays: [np.asarray(x).astype(port.dtype) for x, port in zip(arrays, agent.inputs, strict=True)]
    with jax.default_device(jax.devices()[0]):
        carry, key = algorithm.initial_carry(n), evaluation_key(seed, 1)
        params = jax.device_put(policy.params)
    part, whole_carry = remembered(carry)
    carries = [np.asarray(x) for x in jax.tree.leaves(part)]
    mine = theirs = carries
    playing, same = policy.algorithm.initial_carry(n), 0
    worst, wrong, where = dict.fromkeys(names_out, 0.0), dict.fromkeys(names_out, 0), dict.fromkeys(names_out, "")
    stay_here()
    envs = open_envs(policy.spec, [eval_seed(seed, i, 1, n) for i in range(n)], 1, workers=0)
    try:
        obs, done, first = envs.reset(), np.zeros(n, bool), np.ones(n, bool)
        for t in range(steps):
            seen = [*jax.tree.leaves(obs), *[first] * bool(carries)]
            expected = [np.asarray(x) for x in reference(as_given([*seen, *mine]))]
            found_by_name = runs(dict(zip(names_in, as_given([*seen, *theirs]), strict=True)))
            found = [found_by_name[name] for name in names_out]
            for name, a, b in zip(names_out, found, expected, strict=True):
                off = differences(a, b)
                worst[name] = max(worst[name], float(off.max()))
                bad = off > (TOLERANCE if b.dtype.kind == "f" else 0)
                if bad.any() and not wrong[name]:
                    i = int(np.flatnonzero(bad)[0])
                    where[name] = f"step {t} of environment {i}: {a[i].tolist()} in the file, {b[i].tolist()} here"
                wrong[name] += int(bad.sum())
            with settings_of(policy.experiment.dtype):
                played, playing = policy.act(params, playing, obs, first, key, np.int32(t), False)
            action = found_by_name["action"]
            best = np.asarray(policy.spec.action.for_environment(np.asarray(played))).astype(action.dtype)
            same += int((differences(best.reshape(action.shape), action) <= TOLERANCE).sum())
            carry = whole_carry(jax.tree.unflatten(jax.tree.structure(part), mine), n)
            chosen = explore(params, carry, obs, first, jax.random.fold_in(key, t))
            mine, theirs = expected[len(expected) - len(carries) :], found[len(found) - len(carries) :]
            step = envs.step(np.asarray(chosen))
            answer = step_outcome(done, step.reward, step.terminated, step.truncated)
            obs, first, done = step.obs, done, answer.done
    finally:
        close(envs, "the comparison")
    faults = [f"{name} at {wrong[name]} of {n * steps}, first at {where[name]}" for name in names_out if wrong[name]]
    if faults:
        raise Failure(f"the file does not compute what the agent does; they differ in {'; '.join(faults)}")
    if policy.experiment.dtype == "float32" and same < SAME_SHARE * n * steps:
        raise Failure(f"the file takes the agent's action at only {same} of {n * steps} observations")
    return worst, same


def differences(found: np.ndarray, expected: np.ndarray) -> np.ndarray:
    """The largest difference of each row, relative where the expected number is larger than 1.  [B, ...] -> [B].

    Equal infinities, as illegal actions have them, do not differ; any other NaN or infinity differs infinitely.
    """
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return np.full(len(expected), math.inf)
    a, b = (x.reshape(len(expected), -1).astype(np.float64) for x in (found, expected))
    with np.errstate(invalid="ignore"):
        off = np.where(a == b, 0.0, np.abs(a - b) / np.maximum(1.0, np.abs(b)))
    return np.where(np.isfinite(off), off, math.inf).max(-1, initial=0.0)


# ---------------------------------------------------------------------------------------------------------- the whole


def format_of(path: Path) -> str:
    """The format of a file with this suffix.

    Raises:
        UsageError: it is the suffix of no format.
    """
    for name, ending in FORMATS.items():
        if path.suffix == ending:
            return name
    raise UsageError(f"{str(path)!r} must end in {' or '.join(FORMATS.values())}; try agent.onnx")


def check_target(path: Path, format: str, seed: int) -> None:
    """Raise `UsageError` for an unknown format, a path where there can be no file, or a seed out of range."""
    close = closest_names(format, FORMATS, 1) or "onnx"
    require(format in FORMATS, f"format={format!r} must be {' or '.join(FORMATS)}; try --format {close}")
    ending = FORMATS[format]
    require(path.suffix == ending, f"{str(path)!r} must end in {ending} for {format}; try agent{ending}")
    require(path.parent.is_dir(), f"{str(path)!r}: there is no folder {path.parent}; create it, or name another")
    require(not path.is_dir(), f"{str(path)!r} is a folder; name a file in it")
    require_seed(seed)


def require_seed(seed: object) -> None:
    """Raise `UsageError` unless this can be a seed."""
    require(isinstance(seed, int | np.integer), f"seed={seed!r} must be a whole number; try 1")
    require(0 <= seed < 2**31, f"seed={seed} must lie in [0, 2^31); try 1")  # type: ignore[operator]


def export(policy: Policy, path: Path, format: str, seed: int) -> Export:
    """Write a policy as a file of this format, and compare the two on observations from the environment.

    Raises:
        UsageError: a package is missing, there is no such format, or there can be no such file at `path`.
        Failure: the file cannot be written, or does not compute what the policy does.
    """
    check_target(path, format, seed)
    NEEDS[format]()
    with settings_of("float32"), warnings_of_gymnasium_kept():
        agent = exported(policy)
        try:
            runs = WRITERS[format](path, agent)
        except OSError as error:
            raise Failure(f"{path} cannot be written: {os.strerror(error.errno or 0)}") from None
        try:
            worst, same = compare(policy, agent, runs, seed)
        except Failure as error:
            raise Failure(f"{path} was written, but {error}") from None
    return Export(path, agent.inputs, agent.outputs, agent.metadata, CHECKED, same, worst)
