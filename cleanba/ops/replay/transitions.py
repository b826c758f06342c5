"""A ring with a priority for each of its n-step transitions (Schaul et al. 2016).

Only what can be drawn has a priority above 0: executed steps whose window is complete and whose stack can be rebuilt.
So `write_prioritised` looks again at the rows where that may have changed: the new ones, the n before them, whose
windows have ended or gone on, and the oldest, whose stacks may have lost a frame.  New transitions begin with the
greatest priority so far, so that each is soon drawn.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from cleanba.ops.replay import ring as rings
from cleanba.ops.replay.priorities import Drawn, Priorities, no_priorities, replace
from cleanba.ops.replay.ring import Indices, Ring, acceptable
from cleanba.rollout import Rollout


class PrioritisedRing(NamedTuple):
    """The memory of one shard.  A device's holds those of K' shards: every leaf gains a leading axis [K', ...]."""

    ring: Ring
    priorities: Priorities
    """of the transition that begins in row r, counted as it lies, at environment b: place r B + b"""


def init_prioritised(rollout: Rollout, capacity: int, stack: int = 1) -> PrioritisedRing:
    """Empty memory, as `ring.init` makes it, with priorities."""
    ring = rings.init(rollout, capacity, stack)
    return PrioritisedRing(ring, no_priorities(ring.rows.valid.size))


def write_prioritised(
    memory: PrioritisedRing, rollout: Rollout, n: int, stack: int = 1, shards: int | jax.Array | None = None
) -> PrioritisedRing:
    """Append a rollout of every shard of this device, as `ring.write` does, and set priorities of n-step transitions.

    Frames are written in place, if the memory is donated; XLA may copy the priorities once.
    """
    before = memory.ring.written
    ring = rings.write(memory.ring, rollout, shards)
    steps = rollout.valid.shape[1]
    revise = lambda i, p: _revise(ring, p, i, ring.written[i] - before[i], steps, n, stack)
    count = before.shape[0] if shards is None else shards
    return PrioritisedRing(ring, lax.fori_loop(0, count, revise, memory.priorities))


def _revise(ring: Ring, p: Priorities, i: jax.Array, written: jax.Array, steps: int, n: int, stack: int) -> Priorities:
    """The priorities of a shard to which `written` rows, a rollout of `steps` and perhaps a tail, were just written."""
    capacity, size = ring.rows.valid.shape[1], ring.size[i]

    def look(row: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
        """Rows counted from the oldest [W] -> place, priority, whether stored, whether it can be drawn; [W B] each."""
        envs = ring.rows.valid.shape[2]
        row, env = (x.reshape(-1) for x in jnp.meshgrid(row, jnp.arange(envs), indexing="ij"))
        stored = (row >= 0) & (row < size)
        can_be_drawn = stored & acceptable(ring, i, jnp.clip(row, 0, capacity - 1), env, n)
        place = (ring.tail[i] - (size - 1) + row) % capacity * envs + env
        return place, p.values[i, place // p.values.shape[2], place % p.values.shape[2]], stored, can_be_drawn

    newest = size - 1 - jnp.arange(min(steps + n + 2, capacity))
    place, priority, stored, can_be_drawn = look(newest)
    fresh = jnp.repeat(newest >= size - 1 - written.astype(jnp.int32), ring.rows.valid.shape[2]) | (priority == 0)
    begun = jnp.where(fresh, p.most[i], priority)
    p = replace(p, i, place, priority, jnp.where(can_be_drawn, begun, 0), stored)
    if stack > 1:
        place, priority, stored, can_be_drawn = look(jnp.arange(min(stack - 1, capacity)))
        p = replace(p, i, place, priority, jnp.where(can_be_drawn, priority, 0), stored)
    return p


def transitions_at(memory: PrioritisedRing, i: jax.Array, drawn: Drawn) -> Indices:
    """Where the places drawn from this device's i-th shard lie, for `ring.take`.  Leaves [N]."""
    rows, envs = memory.ring.rows.valid.shape[1:]
    oldest = memory.ring.tail[i] - (memory.ring.size[i] - 1)
    return Indices((drawn.place // envs - oldest) % rows, drawn.place % envs, drawn.found)
