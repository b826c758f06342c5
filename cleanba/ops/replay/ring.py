"""Replay memory: a ring of rows, to which rollouts are written and from which n-step transitions are drawn uniformly.

A row holds one step of every environment of a shard, with the time index of `rollout.py`.  Rows follow one another
without gaps, so a transition's next observation, n-step return and stack of frames are found in the rows around it,
and nothing is stored twice:

    row        0      1      2      3      4      5
    obs        s_0    s_1    s_2*   s_0'   s_1'   s_2'     row 5 is the tail: the observation after the last step so
    valid      1      1      0      1      1      0        far, which the first row of the next rollout overwrites

If the environments were started afresh between two rollouts (at the end of an epoch), there is a seam: the tail stays,
so the step before it keeps its true next observation.  Sampling treats a seam as a truncation.

Of stacked images only the newest frame is stored.  EnvPool's Atari stacks [B, S c, H, W], oldest frame first, repeat
the first frame S times when a game begins, and continue when a life is lost (--episodic-life), although that begins an
episode as well.  So the stacks themselves must show which of them continue: `history` counts the rows before a stack
that hold its older frames; frames before those repeat the oldest.  A stack that follows neither rule cannot be rebuilt
and is never sampled.  Environments that stack in other ways (with zeros, say) need whole stacks, with `stack=1`.

`write`, `sample_indices` and `take` work on the memory of a device, whose leaves are [K', ...] for its K' shards, and
address the i-th shard in place.  Their cost does not depend on the size of the memory, if it is donated.  They only
move and compare data; the arithmetic is in `n_step`, which the caller isolates (`shards.py`).
"""

from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
from jax import lax

from cleanba.errors import UsageError
from cleanba.rollout import Obs, PyTree, Rollout


class Rows(NamedTuple):
    """C rows of B environments: one step of each, and the observation before it."""

    obs: Obs  # [C, B, ...]  of stacks [S c, ...] only the newest frame [c, ...]
    action: PyTree  # [C, B, ...]
    reward: jax.Array  # [C, B]  float32
    terminated: jax.Array  # [C, B]  bool
    truncated: jax.Array  # [C, B]  bool
    valid: jax.Array  # [C, B]  bool: a step was made here; false at ignored steps, at tails and in unused rows
    history: PyTree  # [C, B]  int8: rows before this one that hold frames of its stack, < 0: unknown; () if unstacked


class Ring(NamedTuple):
    """The memory of one shard.  A device's memory holds those of K' shards: every leaf gains a leading axis [K', ...].

    It starts empty (`init`), and only `write` changes it, so a checkpoint reads only the rows written since the last.
    """

    rows: Rows
    tail: jax.Array  # int32 in [0, C): the newest row, where the next rollout begins
    size: jax.Array  # int32 in [0, C]: how many rows are stored, including the tail
    written: jax.Array  # uint32: rows ever written, modulo 2^32


class Indices(NamedTuple):
    """N transitions of one shard, each given by its first step."""

    row: jax.Array  # [N] int32, counted from the oldest row stored
    env: jax.Array  # [N] int32
    valid: jax.Array  # [N] bool: false where no transition was found; to be masked


class Window(NamedTuple):
    """N transitions of up to n steps, as the memory holds them."""

    obs: Obs  # [N, ...]
    action: PyTree  # [N, ...]
    reward: jax.Array  # [N, n]  undefined beyond `steps`
    steps: jax.Array  # [N] int32 in [1, n]: m, fewer than n if the episode ended or was cut off
    terminated: jax.Array  # [N] bool: by the last of these steps
    next_obs: Obs  # [N, ...]  after the last of these steps; the terminal observation, if the episode ended
    valid: jax.Array  # [N] bool


class Transition(NamedTuple):
    """A minibatch to learn from: the target of Q(obs, action) is reward + discount * (value of next_obs)."""

    obs: Obs  # [N, ...]
    action: PyTree  # [N, ...]
    reward: jax.Array  # [N] float32: the n-step return
    discount: jax.Array  # [N] float32: gamma^m, or 0 if the episode terminated
    next_obs: Obs  # [N, ...]
    weight: jax.Array  # [N] float32: 1, or 0 where there was nothing to sample


def init(rollout: Rollout, capacity: int, stack: int = 1) -> Ring:
    """Empty memory for `capacity` steps of one shard, whose rollouts have these shapes and dtypes.

    `stack` is the number of frames in an image, if they are to be stored once.

    Raises:
        UsageError: capacity is below a rollout and two tails, or too large, or obs is no stack of that size.
    """
    steps, envs = rollout.reward.shape
    rows = capacity // envs
    if rows < steps + 2:
        raise UsageError(
            f"buffer_size gives a shard {capacity} steps of {envs} environments, {rows} rows, but a rollout of "
            f"{steps} steps needs {steps + 2}; try at least {(steps + 2) * envs} per shard"
        )
    if rows * envs >= 2**31:
        raise UsageError(
            f"buffer_size gives a shard {rows * envs} steps, but it can count only to 2^31 - 1; raise --num-shards"
        )

    def frame(x: jax.Array) -> jax.Array:
        if stack > 1 and (x.ndim < 3 or x.shape[2] % stack):
            raise UsageError(
                f"obs of shape {x.shape[2:]} is not a stack of {stack} frames; set stack=1 to store it whole"
            )
        shape = x.shape[2:] if stack == 1 else (x.shape[2] // stack, *x.shape[3:])
        return jnp.zeros((rows, envs, *shape), x.dtype)

    blank = lambda x: jnp.zeros((rows, *x.shape[1:]), x.dtype)
    empty = Rows(
        obs=jax.tree.map(frame, rollout.obs),
        action=jax.tree.map(blank, rollout.action),
        reward=blank(rollout.reward),
        terminated=blank(rollout.terminated),
        truncated=blank(rollout.truncated),
        valid=blank(rollout.valid),
        history=() if stack == 1 else jnp.zeros((rows, envs), jnp.int8),
    )
    return Ring(empty, tail=jnp.int32(0), size=jnp.int32(0), written=jnp.uint32(0))


# ------------------------------------------------------------------------------------------------------------- writing


def write(ring: Ring, rollout: Rollout, shards: int | jax.Array | None = None) -> Ring:
    """Append a rollout of every shard of this device.  Leaves [K', C, ...], [K', T(+1), ...] -> [K', C, ...].

    If only the first `shards` places hold a shard, the others stay as they are.  The cost is O(T B) if `ring` is
    donated.
    """
    chex.assert_equal_shape([rollout.reward, rollout.terminated, rollout.truncated, rollout.valid])
    chex.assert_equal(ring.size.shape[0], rollout.reward.shape[0])
    count = ring.size.shape[0] if shards is None else shards
    return lax.fori_loop(0, count, lambda i, ring: _write_shard(ring, i, rollout), ring)


def _write_shard(ring: Ring, i: jax.Array, rollout: Rollout) -> Ring:
    part = rollout._replace(extras=(), carry=())
    part = jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, i, keepdims=False), part)
    steps, capacity = part.valid.shape[0], ring.rows.valid.shape[1]
    tail, size = ring.tail[i], ring.size[i]
    # An episode begins after an ignored step.  If one begins after any other step, the environments were restarted.
    # If every environment's last step was an ignored one, no seam is found, and none is needed: that tail is not used.
    seam = (part.first[0] & ring.rows.valid[i, (tail - 1) % capacity]).any()
    start = (tail + seam) % capacity

    frames: PyTree = part.obs
    history: PyTree = ()
    if is_stacked(ring.rows):
        stack = _stack(part.obs, ring.rows.obs)
        before = jnp.where(seam | (size == 0), jnp.int8(1 - stack), ring.rows.history[i, tail])
        frames, history = _newest(part.obs, stack), _history(part.obs, before, stack)

    def with_tail(x: jax.Array) -> jax.Array:
        """Append the tail's row, which has only an observation, so that zeros overwrite what the row held before."""
        return jnp.concatenate([x, jnp.zeros_like(x[:1])])

    action, reward, terminated, truncated, valid = jax.tree.map(
        with_tail, (part.action, part.reward, part.terminated, part.truncated, part.valid)
    )
    put = lambda x, new: lax.dynamic_update_index_in_dim(x, new.astype(x.dtype), i, 0)
    return Ring(
        rows=_put(ring.rows, i, start, Rows(frames, action, reward, terminated, truncated, valid, history)),
        tail=put(ring.tail, (start + steps) % capacity),
        size=put(ring.size, jnp.minimum(jnp.maximum(size, 1) + seam + steps, capacity)),
        written=put(ring.written, ring.written[i] + (steps + seam).astype(jnp.uint32)),
    )


def _put(stored: Rows, i: jax.Array, start: jax.Array, new: Rows) -> Rows:
    """stored[i, (start + t) % C] = new[t].  Leaves [K', C, ...], [L, ...] -> [K', C, ...], with L <= C.

    Rows are written one by one, which XLA does in place.  A deterministic scatter is slow, and for a window of rows
    that may wrap around the end of the ring XLA copies the whole memory.
    """
    capacity, length = stored.valid.shape[1], new.valid.shape[0]

    def put_row(t: jax.Array, stored: Rows) -> Rows:
        def put(stored: jax.Array, new: jax.Array) -> jax.Array:
            row = lax.dynamic_index_in_dim(new, t)[None]
            return lax.dynamic_update_slice(stored, row, (i, (start + t) % capacity, *[0] * (new.ndim - 1)))

        return jax.tree.map(put, stored, new)

    return lax.fori_loop(0, length, put_row, stored)


def is_stacked(rows: Rows) -> bool:
    """Whether only the newest frame of each stack is stored."""
    return bool(jax.tree.leaves(rows.history))


def _stack(stacks: PyTree, frames: PyTree) -> int:
    """How many frames a stack has.  Leaves [T+1, B, S c, ...], [K', C, B, c, ...] -> S."""
    return jax.tree.leaves(stacks)[0].shape[2] // jax.tree.leaves(frames)[0].shape[3]


def _newest(stacks: PyTree, stack: int) -> PyTree:
    """The newest frame of each.  Leaves [T+1, B, S c, ...] -> [T+1, B, c, ...]."""
    return jax.tree.map(lambda x: x[:, :, -(x.shape[2] // stack) :], stacks)


def _history(obs: Obs, before: jax.Array, stack: int) -> jax.Array:
    """For each row: h >= 0 if the h rows before it hold the older frames of its stack, so that it can be rebuilt.

    h < 0 if that is not so after a break: a row can be rebuilt again -h rows later.
    Stacks, leaves [T+1, B, S c, ...]; before [B], the first row's number if its stack continues -> [T+1, B] int8 in
    (-S, S).
    """

    def everywhere(same: jax.Array) -> jax.Array:
        return same.all(axis=tuple(range(2, same.ndim)))

    def repeats(x: jax.Array) -> jax.Array:
        """[T+1, B]: all frames of the stack are the same."""
        frames = x.reshape(*x.shape[:2], stack, -1)
        return everywhere(frames == frames[:, :, -1:])

    def shifts(x: jax.Array) -> jax.Array:
        """[T, B]: the stack is the one before, without its oldest frame and with a new one."""
        c = x.shape[2] // stack
        return everywhere(x[1:, :, :-c] == x[:-1, :, c:])

    both = lambda checks: jnp.stack(jax.tree.leaves(checks)).all(0)
    begins = both(jax.tree.map(repeats, obs))
    breaks = jnp.pad(~both(jax.tree.map(shifts, obs)), ((1, 0), (0, 0)))
    # Rows of the latest beginning and of the latest break; at most 0 if before this rollout.
    t = jnp.arange(begins.shape[0], dtype=jnp.int32)[:, None]
    never, oldest = jnp.int32(-(2**30)), stack - 1
    h = before.astype(jnp.int32)
    begun = lax.cummax(jnp.where(begins, t, jnp.where(h >= 0, -h, never)))
    broken = lax.cummax(jnp.where(breaks & ~begins, t, jnp.where(h < 0, -oldest - h, never)))
    since_break = t - broken - oldest  # after `oldest` consecutive rows all frames are stored
    known = jnp.where(begun >= broken, t - begun, jnp.where(since_break >= 0, oldest, since_break))
    return jnp.minimum(known, oldest).astype(jnp.int8)


# ------------------------------------------------------------------------------------------------------------ sampling


def sample_indices(ring: Ring, i: jax.Array, key: jax.Array, batch: int, n: int, draws: int = 8) -> Indices:
    """Draw N = `batch` transitions of n steps uniformly, with replacement, from this device's i-th shard.  Leaves [N].

    A step can be drawn if it was executed, its stack can be rebuilt from the stored frames, and its window is complete:
    n steps, or fewer if the episode ended or the environments were started afresh.  Each element is the first
    acceptable one of `draws` draws over all stored rows, so all acceptable steps are equally likely.  If a share q of
    the stored steps is not acceptable, an element finds none with probability q^draws (below 10^-10 for q = 5%), and is
    then not `valid`.
    """
    rows, envs = ring.rows.valid.shape[1:]
    if n >= rows:
        raise UsageError(f"n_step={n} needs {n + 1} rows of memory, but a shard has {rows}; raise --buffer-size")
    steps = (jnp.maximum(ring.size[i], 1) - 1).astype(jnp.uint32) * jnp.uint32(envs)  # without the tail
    place, fair = uniform(key, (draws, batch), jnp.maximum(steps, 1))
    row, env = place // envs, place % envs
    found = fair & (steps > 0) & acceptable(ring, i, row, env, n)
    chosen = jnp.argmax(found, axis=0)[None]  # the first
    pick = lambda x: jnp.take_along_axis(x, chosen, axis=0)[0]
    return Indices(pick(row), pick(env), pick(found))


def uniform(key: jax.Array, shape: tuple[int, ...], count: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Random numbers below `count`, and which of them to keep, so that these are exactly uniform.  -> [*shape] each.

    x mod count favours small numbers, unless the last 2^32 mod count values of x, an incomplete run, are rejected.
    """
    x, last = jax.random.bits(key, shape, jnp.uint32), jnp.uint32(2**32 - 1)
    return (x % count).astype(jnp.int32), x <= last - (last % count + 1) % count


def acceptable(ring: Ring, i: jax.Array, row: jax.Array, env: jax.Array, n: int) -> jax.Array:
    """Whether the step in this row, counted from the oldest, can be drawn.  [...], [...] int32 -> [...] bool."""
    steps, complete = horizon(ring, i, row, env, n)
    accepted = complete & lookup(ring, ring.rows.valid, i, row, env)
    if is_stacked(ring.rows):
        for r in (row, row + steps):
            history = lookup(ring, ring.rows.history, i, r, env).astype(jnp.int32)
            accepted &= (history >= 0) & (r >= history)
    return accepted


def horizon(ring: Ring, i: jax.Array, row: jax.Array, env: jax.Array, n: int) -> tuple[jax.Array, jax.Array]:
    """The number of steps of the window that begins here, and whether it is complete.  -> [...] int32, [...] bool.

    The window ends after n steps, after a step that ended its episode, or before a seam.
    """
    tail = ring.size[i] - 1
    window = row[..., None] + jnp.arange(n + 1)
    look = lambda x: lookup(ring, x, i, jnp.minimum(window, tail), env[..., None])
    valid, ended = look(ring.rows.valid), look(ring.rows.terminated) | look(ring.rows.truncated)
    stops = ended[..., :-1] | (~valid[..., 1:] & (window[..., 1:] < tail))
    stopped = stops.any(-1)
    steps = jnp.where(stopped, jnp.argmax(stops, -1) + 1, n).astype(jnp.int32)
    return steps, stopped | (row + n <= tail)


def lookup(ring: Ring, x: jax.Array, i: jax.Array, row: jax.Array, env: jax.Array) -> jax.Array:
    """x[i, row, env], with rows counted from the oldest stored.  [K', C, B, ...], [...], [...] -> [..., ...]."""
    oldest = ring.tail[i] - (ring.size[i] - 1)
    at = (oldest + row) % x.shape[1]
    return x.at[i, at, env].get(mode="promise_in_bounds", wrap_negative_indices=False)


def take(ring: Ring, i: jax.Array, indices: Indices, n: int, stack: int = 1) -> Window:
    """The transitions at these indices [N] of this device's i-th shard.  Leaves [N, ...].

    `n` is that of `sample_indices`, `stack` that of `init`.
    """
    chex.assert_equal(stack > 1, is_stacked(ring.rows))
    row, env = indices.row, indices.env
    steps, _ = horizon(ring, i, row, env, n)
    tail = ring.size[i] - 1
    look = lambda x, r: lookup(ring, x, i, r, env)
    window = jnp.minimum(row[:, None] + jnp.arange(n), tail)
    return Window(
        obs=observations(ring, i, row, env, stack),
        action=jax.tree.map(lambda x: look(x, row), ring.rows.action),
        reward=lookup(ring, ring.rows.reward, i, window, env[:, None]),
        steps=steps,
        terminated=look(ring.rows.terminated, row + steps - 1),
        next_obs=observations(ring, i, jnp.minimum(row + steps, tail), env, stack),
        valid=indices.valid,
    )


def observations(ring: Ring, i: jax.Array, row: jax.Array, env: jax.Array, stack: int) -> PyTree:
    """The observations in these rows, as the environments delivered them.  [N], [N] -> leaves [N, ...]."""
    if not is_stacked(ring.rows):
        return jax.tree.map(lambda x: lookup(ring, x, i, row, env), ring.rows.obs)
    history = lookup(ring, ring.rows.history, i, row, env).astype(jnp.int32)
    age = jnp.minimum(jnp.arange(stack - 1, -1, -1), history[:, None])  # [N, S], oldest frame first
    frames = jax.tree.map(lambda x: lookup(ring, x, i, row[:, None] - age, env[:, None]), ring.rows.obs)
    return jax.tree.map(lambda x: x.reshape(x.shape[0], -1, *x.shape[3:]), frames)


def n_step(window: Window, gamma: float) -> Transition:
    """The n-step return sum_{j<m} gamma^j r_{t+j}, and the discount gamma^m (1 - terminated) of the value after it.

    (Sutton & Barto 2018, eq. 7.1; m = n unless the episode ended or was cut off before.)  Leaves [N, ...] -> [N, ...].
    """
    chex.assert_equal_shape([window.steps, window.terminated, window.valid, window.reward[:, 0]])
    reward = jnp.zeros_like(window.reward[:, 0])
    discount = jnp.where(window.terminated, 0.0, 1.0)
    for j in reversed(range(window.reward.shape[1])):
        inside = j < window.steps
        reward = jnp.where(inside, window.reward[:, j] + gamma * reward, reward)
        discount = jnp.where(inside, gamma * discount, discount)
    weight = jnp.where(window.valid, 1.0, 0.0)
    return Transition(window.obs, window.action, reward, discount, window.next_obs, weight)
