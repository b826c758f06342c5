"""The update over the learner mesh (jit and shard_map), and how rollouts reach it and parameters leave it."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Generic, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

from cleanba.algorithm import Algorithm, C, M, Metrics, P, S
from cleanba.config import Partition
from cleanba.rollout import Obs, PyTree, Rollout
from cleanba.runtime.devices import MESH_AXIS, Devices
from cleanba.runtime.memory import SavedShard, leaves_of, put_rows
from cleanba.seeds import init_key, update_key, update_numbers
from cleanba.shards import ShardAxis, compiler_options
from cleanba.specs import EnvSpec

T = TypeVar("T")

SAME, CUT = PartitionSpec(), PartitionSpec(MESH_AXIS)  # the same on every learner device; cut along them


def split_rollout(rollout: Rollout, blocks: int) -> list[Rollout]:
    """Cut a rollout along its environments.  Leaves [T, B, ...] -> `blocks` rollouts of leaves [1, T, B / blocks, ...].

    The leading axis is the one that is sharded over the learner devices.
    """

    def part(x: jax.Array, axis: int, i: int) -> jax.Array:
        n = x.shape[axis] // blocks
        return jax.lax.slice_in_dim(x, i * n, (i + 1) * n, axis=axis)[None]

    def block(i: int) -> Rollout:
        steps = jax.tree.map(lambda x: part(x, 1, i), rollout._replace(carry=()))
        return steps._replace(carry=jax.tree.map(lambda x: part(x, 0, i), rollout.carry))  # which has no time axis

    return [block(i) for i in range(blocks)]


def join_blocks(blocks: Sequence[Rollout], per_shard: int) -> Rollout:
    """The inverse, on a learner device: consecutive blocks [1, T, B', ...] -> its K' shards, leaves [K', T, B, ...]."""

    def join(axis: int, *parts: jax.Array) -> jax.Array:
        shards = [jnp.concatenate(parts[i : i + per_shard], axis) for i in range(0, len(parts), per_shard)]
        return jnp.concatenate(shards, 0)

    steps = jax.tree.map(partial(join, 2), *[b._replace(carry=()) for b in blocks])
    return steps._replace(carry=jax.tree.map(partial(join, 1), *[b.carry for b in blocks]))  # which has no time axis


def shard_shapes(block: Rollout, blocks_per_shard: int) -> Rollout:
    """The shapes of one block of a rollout, [1, T(+1), B', ...] -> those of a shard's rollout, [T(+1), B, ...]."""
    joined = lambda *blocks: jax.tree.map(lambda x: x[0], join_blocks(blocks, blocks_per_shard))
    return jax.eval_shape(joined, *[block] * blocks_per_shard)


def memory_shapes(algorithm: Algorithm[S, M, P, C], block: Rollout, partition: Partition) -> M:
    """The shapes of one shard's memory."""
    shape = shard_shapes(block, partition.blocks_per_shard)
    return jax.eval_shape(lambda: algorithm.init_memory(shape))


def abstract_block(algorithm: Algorithm[S, M, P, C], spec: EnvSpec, num_steps: int, envs: int) -> Rollout:
    """The shapes of one block of a rollout, [1, T(+1), B, ...], without collecting one."""
    rollout_of: Any = Rollout  # its fields have the types of arrays; here they are shapes
    shape = lambda o, lead: jax.ShapeDtypeStruct((*lead, *o.shape), jax.dtypes.canonicalize_dtype(o.dtype))
    obs = jax.tree.map(lambda o: shape(o, (envs,)), spec.obs)
    first = jax.ShapeDtypeStruct((envs,), jnp.bool)

    def one_step(key: jax.Array, obs: Obs, first: jax.Array) -> PyTree:
        carry = algorithm.initial_carry(envs)
        action, _, extras = algorithm.act(algorithm.actor_params(algorithm.init(key)), carry, obs, first, key, True)
        return action, extras, carry

    action, extras, carry = jax.eval_shape(one_step, jax.random.key(0), obs, first)
    over_time = lambda n: lambda x: jax.ShapeDtypeStruct((1, n, *x.shape), x.dtype)
    flag = jax.ShapeDtypeStruct((1, num_steps, envs), jnp.bool)
    return rollout_of(
        obs=jax.tree.map(over_time(num_steps + 1), obs),
        first=over_time(num_steps + 1)(first),
        action=over_time(num_steps)(action),
        reward=jax.ShapeDtypeStruct((1, num_steps, envs), jnp.float32),
        terminated=flag,
        truncated=flag,
        valid=flag,
        extras=jax.tree.map(over_time(num_steps), extras),
        carry=jax.tree.map(lambda x: jax.ShapeDtypeStruct((1, *x.shape), x.dtype), carry),
    )


class Learner(Generic[S, M, P, C]):
    """The compiled update, and the arrays on the learner devices.  All processes call `update` equally often."""

    def __init__(self, algorithm: Algorithm[S, M, P, C], partition: Partition, devices: Devices, seed: int):
        self._algorithm = algorithm
        self._partition = partition
        self._devices = devices
        self._seed = seed
        self._replicated = NamedSharding(devices.mesh, SAME)
        self._sharded = NamedSharding(devices.mesh, CUT)
        self._compiled: jax.stages.Compiled | None = None
        self.blocks_per_device = partition.places_per_learner * partition.blocks_per_shard
        self._blank: dict[jax.Device, Rollout] = {}
        # Splitting a rollout that is a single block only adds an axis; if it is donated, nothing is copied.
        donated = 0 if partition.blocks_per_actor == 1 else ()
        self._split = jax.jit(split_rollout, static_argnums=1, donate_argnums=donated)

    def init(self) -> S:
        """The learner's state before the first update, on every learner device."""
        key = init_key(self._seed)
        return self.replicate(jax.jit(self._algorithm.init)(jax.device_put(key, self._devices.learners[0])))

    def init_memory(self, block: Rollout) -> M:
        """The memory before the first update, each shard's on the device that holds the shard.

        Leaves [D K', ...]: K' places on each of all D learner devices, whether or not each place holds a shard.
        """
        shape, places = shard_shapes(block, self._partition.blocks_per_shard), self._partition.places_per_learner

        def of_device() -> PyTree:
            one = self._algorithm.init_memory(shape)
            return jax.tree.map(lambda x: jnp.broadcast_to(x, (places, *jnp.shape(x))), one)

        return jax.jit(jax.shard_map(of_device, mesh=self._devices.mesh, in_specs=(), out_specs=CUT))()

    def restore_memory(self, block: Rollout, saved: Mapping[int, SavedShard]) -> M:
        """A checkpoint's memory, laid out as by `init_memory`.  `saved` has this process's shards by number.

        Arrays are taken out of `saved` one by one and copied chunk by chunk, as there may be no room for a second copy
        of a memory of gigabytes.
        """
        shards = [(self._place(number), saved[number].arrays) for number in sorted(saved)]
        cuts = leaves_of(memory_shapes(self._algorithm, block, self._partition))
        leaves, structure = jax.tree.flatten(self.init_memory(block))

        def fill(number: int) -> jax.Array:
            x, leaves[number] = leaves[number], None
            parts = {part.device: part.data for part in x.addressable_shards}
            shape = x.shape
            del x
            for (device, place), arrays in shards:
                one, arrays[number] = arrays[number], np.empty(0)
                for start, stop in cuts[number].chunks():
                    rows = jax.device_put(one[start:stop] if one.shape else one, device)
                    parts[device] = put_rows(parts[device], rows, np.int32(place), np.int32(start))
                    parts[device].block_until_ready()  # so that only one chunk at a time takes room
            copies = [parts[device] for device in self._devices.learners]
            return jax.make_array_from_single_device_arrays(shape, self._sharded, copies)

        return jax.tree.unflatten(structure, [fill(number) for number in range(len(leaves))])

    def replicate(self, tree: T) -> T:
        """Arrays of this process -> the same arrays on all learner devices (of all processes)."""

        def put(x: np.ndarray | jax.Array) -> jax.Array:
            copies = [jax.device_put(x, d, may_alias=False) for d in self._devices.learners]
            return jax.make_array_from_single_device_arrays(np.shape(x), self._replicated, copies)

        return jax.tree.map(put, tree)

    def _place(self, shard: int) -> tuple[jax.Device, int]:
        """The device of this process that holds a shard, and the shard's place on it."""
        device, place = divmod(self._partition.place(shard), self._partition.places_per_learner)
        return self._devices.learners[device - self._devices.process * len(self._devices.learners)], place

    def send(self, rollout: Rollout, actor: int) -> list[Rollout]:
        """Cut an actor's rollout into blocks, and send each to the device that will learn from it."""
        per_actor, per_shard = self._partition.blocks_per_actor, self._partition.blocks_per_shard
        sent = []
        for i, block in enumerate(self._split(rollout, per_actor)):
            device, _ = self._place((actor * per_actor + i) // per_shard)
            sent.append(jax.device_put(block, device))
        return sent

    def _blank_block(self, device: jax.Device, like: Rollout) -> Rollout:
        """Zeros for the blocks of a place that holds no shard; made once."""
        if device not in self._blank:
            zeros = lambda x: jax.device_put(np.zeros(x.shape, x.dtype), device)
            self._blank[device] = jax.tree.map(zeros, like)
        return self._blank[device]

    def _global_blocks(self, blocks: Sequence[Rollout]) -> tuple[Rollout, ...]:
        """This process's blocks, in order -> global arrays over the mesh, one for each block on a device."""
        total, rest = self._devices.mesh.size, iter(blocks)
        of_devices: list[list[Rollout]] = []
        for device, shards in zip(self._devices.learners, self._partition.shards_of_learners, strict=True):
            filled = [next(rest) for _ in range(shards * self._partition.blocks_per_shard)]
            missing = self.blocks_per_device - len(filled)
            of_devices.append(filled + [self._blank_block(device, blocks[0])] * missing)

        def over_mesh(*parts: jax.Array) -> jax.Array:
            shape = (total, *parts[0].shape[1:])
            return jax.make_array_from_single_device_arrays(shape, self._sharded, list(parts))

        return tuple(jax.tree.map(over_mesh, *parts) for parts in zip(*of_devices, strict=True))

    def compile(self, state: S, memory: M, block: Rollout) -> None:
        """Compile the update for rollouts whose blocks have these shapes."""
        self._compiled = self.trace(state, memory, block).lower().compile()

    def trace(self, state: S, memory: M, block: Rollout) -> jax.stages.Traced:
        """The traced update for arrays of these shapes, ready to be lowered."""
        place = lambda s: lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s)
        total = self._devices.mesh.size
        widen = lambda x: jax.ShapeDtypeStruct((total, *x.shape[1:]), x.dtype, sharding=self._sharded)
        args = (
            jax.tree.map(place(self._replicated), state),
            jax.tree.map(place(self._sharded), memory),
            tuple(jax.tree.map(widen, block) for _ in range(self.blocks_per_device)),
            jax.ShapeDtypeStruct((2,), jnp.int32, sharding=self._replicated),
        )

        def update(*args: Any) -> tuple[S, M, Metrics]:
            return self.update_on_device(*args)

        return self.jitted(update, (SAME, CUT, SAME), donate=(0, 1)).trace(*args)

    def update_on_device(
        self, state: S, memory: M, blocks: tuple[Rollout, ...], numbers: jax.Array
    ) -> tuple[S, M, Metrics]:
        """The update as each device computes it, from its blocks and `seeds.update_numbers`."""
        p = self._partition
        always = numbers[1] > 0  # updates are counted from 1
        shards = ShardAxis.over(p.shards_of_learners * p.num_processes, always, MESH_AXIS)
        blocks_of_shards = join_blocks(blocks, p.blocks_per_shard)
        return self._algorithm.update(state, memory, blocks_of_shards, shards, update_key(*numbers))

    def jitted(
        self, body: Callable[..., Any], out_specs: PyTree, more: int = 0, donate: tuple[int, ...] = ()
    ) -> jax.stages.Wrapped:
        """`jax.jit` of `body`, called on every device of the learner mesh.

        It takes what `update_on_device` takes, then `more` arguments that are the same everywhere.
        """
        in_specs = (SAME, CUT, CUT, SAME, *[SAME] * more)
        mapped = jax.shard_map(body, mesh=self._devices.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)
        options = compiler_options(self._devices.learners[0].platform)
        return jax.jit(mapped, donate_argnums=donate, compiler_options=options)

    def inputs(self, blocks: Sequence[Rollout], number: int) -> tuple[Any, ...]:
        """What update `number` takes besides state and memory: this process's blocks, in order, and its numbers."""
        return self._global_blocks(blocks), self.replicate(update_numbers(self._seed, number))

    def update(self, state: S, memory: M, blocks: Sequence[Rollout], number: int) -> tuple[S, M, Metrics]:
        """Start update `number` with this process's blocks, in order.  The results may not be computed yet."""
        assert self._compiled is not None, "compile first"
        return self._compiled(state, memory, *self.inputs(blocks, number))

    def local(self, tree: T) -> T:
        """Replicated arrays -> their copies on this process's first learner device."""
        return self.copy(tree, 0)

    def copy(self, tree: T, device: int) -> T:
        """Replicated arrays -> their copies on one of this process's learner devices."""
        return jax.tree.map(lambda x: x.addressable_data(device), tree)

    @property
    def num_copies(self) -> int:
        """How many learner devices this process has."""
        return len(self._devices.learners)

    @property
    def places(self) -> list[int]:
        """The index of each shard along the leading axis of memory."""
        return [self._partition.place(shard) for shard in range(self._partition.num_shards)]

    def publish(self, params: P) -> dict[jax.Device, P]:
        """Copy what acting needs to every actor device of this process, as the state will be donated."""
        return {d: jax.device_put(params, SingleDeviceSharding(d), may_alias=False) for d in self._devices.actors}
