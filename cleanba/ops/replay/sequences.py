"""Replay memory of sequences for recurrent networks (Kapturowski et al. 2019), with priorities.

A sequence begins where a rollout does, and covers L steps of one environment and the observation after them.  With
rollouts of 40 steps and sequences of 120, each step lies in three sequences:

    rows      0 ........ 40 ........ 80 ....... 120 ....... 160 ...
              |-- rollout --|-- rollout --|-- rollout --|
    sequence  |------------------ L ------------------|
                           |------------------ L ------------------|

The steps lie in a ring (`ring.py`), so frames are stored once however many sequences they are part of.  Of each
sequence only its priority is stored, and the recurrent state before its first observation, which came with the rollout.

A sequence may hold the ends of episodes and the beginnings of others.  `first` says where the recurrent state is to be
cleared, `valid` which steps were executed, and `stops` after which steps the episode does not go on.
"""

from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
from jax import lax

from cleanba.ops.replay import ring as rings
from cleanba.ops.replay.priorities import Drawn, Priorities, no_priorities
from cleanba.ops.replay.ring import Ring, is_stacked, lookup, observations
from cleanba.rollout import Obs, PyTree, Rollout


class Starts(NamedTuple):
    """Where sequences begin: S of them for each of B environments."""

    begun: jax.Array  # [S] uint32: rows written to the ring before the sequence's first, modulo 2^32
    carry: PyTree  # [S, B, ...]  recurrent state before the sequence's first observation; () without a core


class StartsRing(NamedTuple):
    """A ring of beginnings.  Its fields are those of `Ring`, so a checkpoint reads only what is new in it."""

    rows: Starts
    tail: jax.Array  # int32 in [0, S): the newest beginning
    size: jax.Array  # int32 in [0, S]: how many beginnings are stored
    written: jax.Array  # uint32: beginnings ever written, modulo 2^32


class SequenceMemory(NamedTuple):
    """The memory of one shard.  A device's holds those of K' shards: every leaf gains a leading axis [K', ...]."""

    ring: Ring
    starts: StartsRing
    priorities: Priorities  # of the sequence that begins at start s in environment b: place s B + b


class Sequences(NamedTuple):
    """N sequences of L steps, with the time index of `rollout.py`."""

    obs: Obs  # [L+1, N, ...]
    first: jax.Array  # [L+1, N] bool: the recurrent state is cleared before this observation
    action: PyTree  # [L, N, ...]
    reward: jax.Array  # [L, N] float32
    terminated: jax.Array  # [L, N] bool
    stops: jax.Array  # [L, N] bool: the episode ended or was cut off by this step, so it bootstraps from what follows
    valid: jax.Array  # [L, N] bool: the action was executed
    carry: PyTree  # [N, ...]  recurrent state before obs[0]


def init_sequences(rollout: Rollout, carry: PyTree, capacity: int, stack: int = 1) -> SequenceMemory:
    """Empty memory for `capacity` steps of one shard, whose rollouts have these shapes.

    carry: the part of the rollout's carry that is stored, [B, ...].
    stack: as for `ring.init`.
    """
    steps, envs = rollout.reward.shape
    ring = rings.init(rollout, capacity, stack)
    count = (ring.rows.valid.shape[0] - 1) // steps  # beginnings are at least `steps` rows apart
    blank = lambda x: jnp.zeros((count, *x.shape), x.dtype)
    starts = Starts(jnp.zeros(count, jnp.uint32), jax.tree.map(blank, carry))
    empty = StartsRing(starts, tail=jnp.int32(0), size=jnp.int32(0), written=jnp.uint32(0))
    return SequenceMemory(ring, empty, no_priorities(count * envs))


def write_sequences(
    memory: SequenceMemory,
    rollout: Rollout,
    carry: PyTree,
    length: int,
    stack: int = 1,
    shards: int | jax.Array | None = None,
) -> SequenceMemory:
    """Append a rollout of every shard of this device, and the beginnings of its sequences of L = `length` steps.

    carry: the stored part of the recurrent state before the rollout, [K', B, ...].

    Newly complete sequences get the greatest priority so far; those that lost a row get 0.
    Frames are written in place, if the memory is donated.
    """
    before = memory.ring.written
    ring = rings.write(memory.ring, rollout, shards)
    steps = rollout.valid.shape[1]

    def begin(i: jax.Array, so_far: tuple[StartsRing, Priorities]) -> tuple[StartsRing, Priorities]:
        starts, p = so_far
        start = (starts.tail[i] + 1) % starts.rows.begun.shape[1]
        # An episode that begins here has a new recurrent state.
        cleared = lambda x: jnp.where(rollout.first[i, 0].reshape(-1, *(1,) * (x.ndim - 2)), 0, x[i])
        new = Starts(ring.written[i] - jnp.uint32(steps), jax.tree.map(cleared, carry))
        put = lambda x, new: lax.dynamic_update_slice(
            x, new[None, None].astype(x.dtype), (i, start, *(0,) * (x.ndim - 2))
        )
        size = jnp.minimum(starts.size[i] + 1, starts.rows.begun.shape[1])
        starts = StartsRing(
            rows=jax.tree.map(put, starts.rows, new),
            tail=starts.tail.at[i].set(start),
            size=starts.size.at[i].set(size),
            written=starts.written.at[i].add(1),
        )
        written = (ring.written[i] - before[i]).astype(jnp.int32)
        return starts, _revise(ring, starts, p, i, written, steps, length, stack)

    count = before.shape[0] if shards is None else shards
    starts, priorities = lax.fori_loop(0, count, begin, (memory.starts, memory.priorities))
    return SequenceMemory(ring, starts, priorities)


def _distance(ring: Ring, starts: StartsRing, i: jax.Array) -> jax.Array:
    """Rows from each beginning of the i-th shard to the tail.  [S] int32; negative where there is no beginning."""
    slots = starts.rows.begun.shape[1]
    age = (starts.tail[i] - jnp.arange(slots)) % slots
    return jnp.where(age < starts.size[i], (ring.written[i] - starts.rows.begun[i]).astype(jnp.int32), -1)


def _revise(
    ring: Ring, starts: StartsRing, p: Priorities, i: jax.Array, written: jax.Array, steps: int, length: int, stack: int
) -> Priorities:
    """The priorities of a shard's sequences, after a beginning and `written` rows: `steps`, and perhaps a tail."""
    rows, envs = ring.rows.valid.shape[1:]
    slots = starts.rows.begun.shape[1]
    distance = _distance(ring, starts, i)
    # Once rows are overwritten, the oldest may have lost the frames before them.
    lost = jnp.where(ring.size[i] == rows, stack - 1, 0)
    whole = (distance >= length) & (distance < ring.size[i] - lost)
    new = whole & (distance - written < length)
    known = jnp.ones((slots, envs), bool)
    if stack > 1:  # of the few that may be new, which stacks can be rebuilt
        ages = range(max(0, length // (steps + 1) - 1), min(slots, (length + steps + 1) // steps))
        slot = (starts.tail[i] - jnp.array(ages)) % slots
        row = (ring.size[i] - 1 - distance[slot])[:, None, None] + jnp.arange(length + 1)[:, None]
        history = lookup(ring, ring.rows.history, i, row, jnp.arange(envs))
        known = known.at[slot].set((history >= 0).all(1))
    old = p.values[i].reshape(-1)[: slots * envs].reshape(slots, envs)
    value = jnp.where(new[:, None], jnp.where(known, p.most[i], 0), jnp.where(whole[:, None], old, 0))
    values = jnp.zeros(p.values[0].size, jnp.uint32).at[: slots * envs].set(value.reshape(-1))
    values = values.reshape(p.values.shape[1:])
    put = lambda x, new: lax.dynamic_update_index_in_dim(x, new, i, 0)
    return Priorities(
        values=put(p.values, values),
        sums=put(p.sums, values.sum(-1, dtype=jnp.uint32)),
        nonzero=put(p.nonzero, (values > 0).sum(dtype=jnp.int32)),
        most=p.most,
    )


def take_sequences(memory: SequenceMemory, i: jax.Array, drawn: Drawn, length: int, stack: int = 1) -> Sequences:
    """The sequences drawn from this device's i-th shard."""
    ring, starts = memory.ring, memory.starts
    chex.assert_equal(stack > 1, is_stacked(ring.rows))
    envs = ring.rows.valid.shape[2]
    start, env = jnp.minimum(drawn.place // envs, starts.rows.begun.shape[1] - 1), drawn.place % envs
    tail = ring.size[i] - 1
    row = jnp.clip(tail - _distance(ring, starts, i)[start], 0) + jnp.arange(length + 1)[:, None]  # [L+1, N]
    row = jnp.minimum(row, tail)
    env = jnp.broadcast_to(env, row.shape)
    look = lambda x: lookup(ring, x, i, row[:-1], env[:-1])
    flat = observations(ring, i, row.reshape(-1), env.reshape(-1), stack)
    valid = look(ring.rows.valid)
    first = jnp.concatenate([jnp.zeros_like(valid[:1]), ~valid])  # the stored state is cleared already
    return Sequences(
        obs=jax.tree.map(lambda x: x.reshape(*row.shape, *x.shape[1:]), flat),
        first=first,
        action=jax.tree.map(look, ring.rows.action),
        reward=look(ring.rows.reward),
        terminated=look(ring.rows.terminated),
        stops=jnp.concatenate([~valid[1:], jnp.ones_like(valid[:1])]),
        valid=valid,
        carry=jax.tree.map(lambda x: x[i, start, env[0]], starts.rows.carry),
    )
