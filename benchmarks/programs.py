"""Lowers an algorithm's programs without running them: the update, a step of acting, a scanned rollout."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import SingleDeviceSharding

from cleanba.algorithm import Algorithm
from cleanba.algorithms.off_policy import OffPolicyActorCritic
from cleanba.config import Experiment, Partition
from cleanba.environments.common import Compilable, Step
from cleanba.recipes import Recipe
from cleanba.resolution import resolve
from cleanba.rollout import PyTree
from cleanba.runtime.collect import Recording, ScanState, blank, make_scan, make_steppers
from cleanba.runtime.devices import Devices
from cleanba.runtime.learner import Learner, abstract_block, memory_shapes
from cleanba.seeds import action_numbers
from cleanba.specs import ActionSpec, EnvSpec

# The settings that every algorithm is compiled with, besides its defaults on Atari.
VARIANTS: dict[str, dict[str, Any]] = {
    "resnet": {"network": "impala"},
    "nature": {"network": "nature", "hiddens": (512,)},
    "lstm": {"network": "impala", "core": "lstm"},
    "bfloat16": {"network": "impala", "dtype": "bfloat16"},
    "mlp": {"env_id": "CartPole-v1", "network": "mlp", "hiddens": (64, 64)},
}


class Program(NamedTuple):
    """An algorithm on devices of kind `platform`, which this machine need not have."""

    experiment: Experiment
    partition: Partition
    spec: EnvSpec
    algorithm: Algorithm

    @property
    def block(self) -> PyTree:
        """The shapes of one block of a rollout."""
        p = self.partition
        return abstract_block(self.algorithm, self.spec, self.experiment.num_steps, p.num_envs // p.num_blocks)

    @property
    def state(self) -> PyTree:
        """The shapes of the learner's state."""
        return jax.eval_shape(self.algorithm.init, jax.random.key(0))


def make(recipe: Recipe, fields: dict[str, Any], learners: int, platform: str) -> Program:
    """An algorithm with these fields of its experiment, on one device that acts and `learners` that learn.

    Raises:
        UsageError: the fields do not fit together, or do not fit the algorithm.
    """
    fields = {"env_id": Experiment.env_id, "num_actors": 2, "num_shards": learners, **fields}
    e, spec, *_ = resolve(recipe, fields, platform)
    partition = Partition(e.num_envs, e.num_actors, e.num_shards, 1, learners)
    recipe.check(e, partition)
    if isinstance(e, OffPolicyActorCritic):  # these games do not take its actions
        spec = spec._replace(action=ActionSpec("quantities", (6,), "float32", (), (-1.0,) * 6, (1.0,) * 6))
    return Program(e, partition, spec, recipe.make(e, spec, platform))


def trace_update(program: Program, devices: Devices) -> Any:
    """The update of all shards on these devices, ready to be lowered."""
    p, algorithm = program.partition, program.algorithm
    memory = memory_shapes(algorithm, program.block, p)
    places = devices.mesh.size * p.places_per_learner
    memory = jax.tree.map(lambda x: jax.ShapeDtypeStruct((places, *x.shape), x.dtype), memory)
    return Learner(algorithm, p, devices, program.experiment.seed).trace(program.state, memory, program.block)


def trace_act(program: Program, device: jax.Device) -> Any:
    """One step of the stepped collector, ready to be lowered."""
    params, carry, obs, first, numbers = acting(program)
    steppers = make_steppers(program.algorithm, program.experiment.num_steps, device.platform)
    stepping = jax.eval_shape(steppers.start, params, carry, obs, first, numbers)
    return steppers.step.trace(*place((params, stepping, carry, obs, first), device))


def trace_scan(program: Program, device: jax.Device) -> Any:
    """A part of a scanned rollout, ready to be lowered: of a trivial game, since EnvPool's call needs its host."""
    params, carry, obs, first, numbers = acting(program)
    flag = jnp.zeros(first.shape, bool)

    def env_step(handle: jax.Array, action: jax.Array) -> tuple[jax.Array, Step]:
        reward = action.reshape(len(action), -1).astype(jnp.float32).sum(-1)
        shown = jax.tree.map(lambda o: jnp.broadcast_to(handle.sum(), o.shape).astype(o.dtype), obs)
        return handle + 1, Step(shown, reward, reward, reward > 1, flag, flag)

    handle = jax.ShapeDtypeStruct((8,), jnp.uint8)
    scan = make_scan(program.algorithm, program.experiment.num_steps, Compilable(handle, env_step, b""))
    state = ScanState(handle, obs, first, first, carry)
    _, (r, outcome) = jax.eval_shape(scan.step, params, jax.random.key(0), state, 0)
    n = program.experiment.num_steps

    def new_buffers() -> PyTree:
        zeros = lambda tree: jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), tree)
        observed = blank(n + 1, zeros((r.obs, r.first)))
        return Recording(*observed, *blank(n, zeros((r.action, r.extras)))), blank(n, zeros(outcome))

    arguments = (params, numbers, jax.eval_shape(new_buffers), state, jax.ShapeDtypeStruct((), jnp.int32))
    return scan.steps.trace(*place(arguments, device))


def acting(program: Program) -> tuple[PyTree, PyTree, PyTree, Any, Any]:
    """The shapes of parameters, carry, observation, first and action numbers of one actor."""
    n = program.partition.envs_per_actor
    params = jax.eval_shape(program.algorithm.actor_params, program.state)
    shape = lambda o: jax.ShapeDtypeStruct((n, *o.shape), jax.dtypes.canonicalize_dtype(o.dtype))
    carry = jax.eval_shape(lambda: program.algorithm.initial_carry(n))
    numbers = jax.ShapeDtypeStruct((3,), action_numbers(1, 0, 1).dtype)
    return params, carry, jax.tree.map(shape, program.spec.obs), jax.ShapeDtypeStruct((n,), bool), numbers


def place(tree: PyTree, device: jax.Device) -> PyTree:
    """Shapes -> shapes on that device."""
    sharding = SingleDeviceSharding(device)
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree)
