"""The gradient steps of an update, each on a minibatch drawn from the replay memory, as one compiled loop.

The number of steps is only known at run time: there are none before learning starts.  Random numbers are drawn for a
block of steps at a time, since many small draws take much longer than a few large ones.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from cleanba.algorithm import Metrics
from cleanba.algorithms.off_policy import OffPolicy, PrioritisedReplay
from cleanba.ops import replay
from cleanba.probes import probe
from cleanba.shards import ShardAxis

# Type variables of the loops, not those of `algorithm.py`.
S = TypeVar("S")  # what the steps change
M = TypeVar("M")  # metrics, which the loops add up
D = TypeVar("D")  # the random numbers of one step

REPLAY_FILLED = "charts/replay_filled"
REPLAY_LOGGED = {REPLAY_FILLED: "share of a batch that replay fills, on average; below 0.9 a warning says so"}
"""What `gradient_steps` logs: name -> meaning."""

# A block of gradient steps: those whose random numbers are drawn together.
BLOCK_STEPS = 32  # at most this many steps
BLOCK_NUMBERS = 2**20  # and at most about this many random numbers: 4 MiB


class Noise(NamedTuple):
    """How many standard normal numbers a gradient step needs for each transition."""

    uses: int
    """U, how often it needs some"""
    size: int
    """D, how many each time"""


NO_NOISE = Noise(0, 0)


class Draws(NamedTuple):
    """The random numbers of one gradient step, for the K' shards of this device."""

    indices: replay.Indices  # leaves [K', N]
    noise: jax.Array  # [K', U, N D] float32; random keys, which nothing uses, where U is 0


class Minibatch(NamedTuple):
    """The transitions of one gradient step, and noise for them: N for each of the K' shards of this device."""

    window: Callable[[jax.Array], replay.Window]
    """i -> the transitions of this device's i-th shard.  Leaves [N, ...]"""
    noises: jax.Array
    """[K', U, N, D] standard normal numbers, which a loss reads by `noise`; where U is 0, random keys [K'], which
    nothing uses"""

    def noise(self, i: jax.Array, use: jax.Array | int) -> jax.Array:
        """Standard normal numbers for the transitions of this device's i-th shard.  [N, D]."""
        return self.noises[i, use]


def gradient_steps(
    e: OffPolicy,
    shards: ShardAxis,
    memory: replay.Ring,
    key: jax.Array,
    steps: jax.Array,
    step: Callable[[Minibatch, S], tuple[S, Metrics]],
    state: S,
    n_step: int = 1,
    stack: int = 1,
    noise: Noise = NO_NOISE,
    reused: bool = False,
) -> tuple[S, Metrics]:
    """Take `steps` ([] int32) gradient steps: `step(minibatch, state) -> state, metrics`.

    memory: of this device's shards, leaves [K', ...].
    n_step: the number of rewards in a transition's return.
    stack: the number of frames in an image, if the memory stores each frame once.
    noise: how many normal numbers `step` needs.
    reused: whether a step reads its transitions more than once, as where a policy learns from the critics' minibatch.
        They are then gathered once, before the step, and not by each loss.

    Returns the state after the last step, and the means of the metrics over the steps.  A metric that some steps lack
    comes from `step` as a sum with `count/<name>` (`with_count`), by which it is divided.
    """

    def draw_block(numbers: jax.Array) -> Draws:
        return draw(e, memory, shards, key, numbers, n_step, noise)

    def one_step(draws: Draws, state: S) -> tuple[S, tuple[Metrics, jax.Array]]:
        window = lambda i: replay.take(memory, i, jax.tree.map(lambda x: x[i], draws.indices), n_step, stack)
        if reused:
            windows = shards.each(window)
            window = lambda i: jax.tree.map(lambda x: x[i], windows)
        noises = draws.noise.reshape(*draws.noise.shape[:2], -1, noise.size) if noise.uses else draws.noise
        probe("draw", (draws.indices, noises), per_shard=True)
        state, metrics = step(Minibatch(window, noises), state)
        probe("gradient step", state)
        return state, (metrics, draws.indices.valid.sum(-1, dtype=jnp.int32))

    state, (sums, found) = repeat_in_blocks(steps, block_length(e, noise), draw_block, one_step, state)
    return state, mean_metrics(sums, steps) | replay_filled(e, shards, found, steps)


def draw(
    e: OffPolicy,
    memory: replay.Ring,
    shards: ShardAxis,
    key: jax.Array,
    numbers: jax.Array,
    n_step: int = 1,
    noise: Noise = NO_NOISE,
) -> Draws:
    """The random draws of J gradient steps of an update, numbered `numbers` [J] int32.  Leaves [J, K', ...].

    Transitions are drawn uniformly.  A key depends on the numbers of its step and its shard, never on the device.
    """
    batch = e.batch_size // shards.num_shards

    def of_shard(i: jax.Array) -> Draws:
        def of_step(number: jax.Array) -> tuple[replay.Indices, jax.Array]:
            shard_key = jax.random.fold_in(jax.random.fold_in(key, number), shards.index[i])
            sample_key, noise_key = jax.random.split(shard_key) if noise.uses else (shard_key, shard_key)
            return replay.sample_indices(memory, i, sample_key, batch, n_step), noise_key

        def noise_of(key: jax.Array) -> jax.Array:
            # As one long row, which XLA draws by vectors.
            of_use = lambda use: jax.random.normal(jax.random.fold_in(key, use), (batch * noise.size,))
            return jax.vmap(of_use)(jnp.arange(noise.uses))

        indices, keys = jax.vmap(of_step)(numbers)
        return Draws(indices, shards.isolate(jax.vmap(noise_of), keys) if noise.uses else keys)

    return jax.tree.map(lambda x: jnp.swapaxes(x, 0, 1), shards.each(of_shard))


# ---------------------------------------------------------------------------------------------------------- priorities

PRIORITY_LOGGED = {
    "charts/importance_exponent": "how far importance weights make up for priorities; 1: fully",
    "losses/importance_weight": "mean importance weight of what was drawn; the greatest in a minibatch is 1",
}
"""What `prioritised_steps` logs, besides `REPLAY_LOGGED`: name -> meaning."""


class Prioritised(NamedTuple):
    """What one gradient step learns from: N places for each of the K' shards of this device."""

    drawn: replay.Drawn  # leaves [K', N]
    weight: jax.Array  # [K', N] float32: importance weights; the greatest over all shards is 1, 0 where none was found


def prioritised_steps(
    e: PrioritisedReplay,
    shards: ShardAxis,
    priorities: replay.Priorities,
    key: jax.Array,
    update: jax.Array,
    step: Callable[[Prioritised, S], tuple[S, Metrics, jax.Array]],
    state: S,
) -> tuple[S, replay.Priorities, Metrics]:
    """Take this update's gradient steps: `step(minibatch, state) -> state, metrics, errors [K', N]`.

    update: the number of the update, counted from 1, [] int32.

    Each step draws places in proportion to their priorities, as the step before left them.  Its errors, which are not
    negative, set the new priorities of these places.  Every shard contributes equally many, by its own priorities.

    Returns the state and the priorities after the last step, and the means of the metrics over the steps.
    """
    batch = e.batch_size // shards.num_shards
    steps, exponent = e.steps_of(update), shards.isolate(e.importance, update)

    def draw_block(numbers: jax.Array) -> jax.Array:
        """Random words for J steps.  [J] int32 -> [J, K', TRIES, 2, N]."""

        def of_shard(i: jax.Array) -> jax.Array:
            shard_key = lambda number: jax.random.fold_in(jax.random.fold_in(key, number), shards.index[i])
            return jax.vmap(lambda number: replay.random_words(shard_key(number), batch))(numbers)

        return jnp.swapaxes(shards.each(of_shard), 0, 1)

    def one_step(
        words: jax.Array, carried: tuple[S, replay.Priorities]
    ) -> tuple[tuple[S, replay.Priorities], tuple[Metrics, jax.Array]]:
        state, priorities = carried
        probe("priorities", priorities, per_shard=True)
        drawn = shards.each(lambda i: replay.draw(priorities, i, words[i]))
        weight = shards.map(lambda drawn: replay.importance(drawn, exponent), drawn)
        most = jnp.maximum(shards.max(weight.max(-1)), 1e-30)
        weight = shards.map(lambda weight: weight / most, weight)
        probe("draw", (drawn, weight), per_shard=True)
        state, metrics, errors = step(Prioritised(drawn, weight), state)
        probe("gradient step", state)
        value = shards.map(partial(replay.in_units, exponent=e.priority_exponent), errors)

        def assign(i: jax.Array, priorities: replay.Priorities) -> replay.Priorities:
            return replay.assign(priorities, i, jax.tree.map(lambda x: x[i], drawn), value[i])

        priorities = lax.fori_loop(0, shards.num_held, assign, priorities)
        mean = shards.sum(shards.map(lambda weight: weight.sum() / e.batch_size, weight))
        found = drawn.found.sum(-1, dtype=jnp.int32)
        return (state, priorities), ({**metrics, "losses/importance_weight": mean}, found)

    block = block_length(e, Noise(1, replay.TRIES * 2))  # words in place of normal numbers
    (state, priorities), (sums, found) = repeat_in_blocks(steps, block, draw_block, one_step, (state, priorities))
    metrics = mean_metrics(sums, steps) | replay_filled(e, shards, found, steps)
    return state, priorities, metrics | {"charts/importance_exponent": exponent}


# --------------------------------------------------------------------------------------------------------------- loops


def repeat(times: jax.Array, step: Callable[[jax.Array, S], tuple[S, M]], carried: S) -> tuple[S, M]:
    """Call `step(number, carried) -> carried, metrics` for the numbers 0 ... times - 1, as one compiled loop.

    times [] int32.  Returns what is carried after the last step, and the sums of the metrics.
    """
    like = jax.eval_shape(step, jnp.int32(0), carried)[1]

    def body(number: jax.Array, so_far: tuple[S, M]) -> tuple[S, M]:
        carried, total = so_far
        carried, metrics = step(number, carried)
        return carried, jax.tree.map(jnp.add, total, metrics)

    return lax.fori_loop(0, times, body, (carried, zeros_like(like)))


def repeat_in_blocks(
    times: jax.Array,
    block: int,
    draw: Callable[[jax.Array], D],
    step: Callable[[D, S], tuple[S, M]],
    carried: S,
) -> tuple[S, M]:
    """As `repeat`, for `step(drawn, carried) -> carried, metrics`, which gets its random numbers.

    `draw(numbers)` draws them for `block` steps at a time: step numbers [block] int32 -> leaves [block, ...].  The last
    block is drawn whole, and the steps beyond `times` are not taken.
    """
    first = lambda: jax.tree.map(lambda x: x[0], draw(jnp.zeros(block, jnp.int32)))
    like = jax.eval_shape(step, jax.eval_shape(first), carried)[1]

    def of_block(number: jax.Array, so_far: tuple[S, M]) -> tuple[S, M]:
        before = number * block
        drawn = draw(before + jnp.arange(block))

        def body(i: jax.Array, so_far: tuple[S, M]) -> tuple[S, M]:
            carried, metrics = step(jax.tree.map(lambda x: x[i], drawn), so_far[0])
            return carried, jax.tree.map(jnp.add, so_far[1], metrics)

        return lax.fori_loop(0, jnp.minimum(times - before, block), body, so_far)

    return lax.fori_loop(0, -(-times // block), of_block, (carried, zeros_like(like)))


def block_length(e: OffPolicy, noise: Noise) -> int:
    """The number of steps in a block, chosen so that an update's blocks are as even as possible."""
    most = max(1, min(BLOCK_STEPS, BLOCK_NUMBERS // (e.batch_size * (1 + noise.uses * noise.size))))
    return -(-e.gradient_steps // -(-e.gradient_steps // most))


def zeros_like(like: M) -> M:
    """Arrays of zeros of these shapes and dtypes."""
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), like)


def every(period: int, elapsed: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Whether something that happens every `period` steps is due, and the new count of elapsed steps.

    Elapsed 3, 4, 5 of period 4 -> (no, 3), (yes, 0), (yes, 1).  [] int32 -> [] bool, [] int32.
    """
    happens = (elapsed >= period) | (elapsed < 0)  # below 0, int32 has overflowed, as the period is huge
    return happens, jnp.where(happens, elapsed % period, elapsed)


# ------------------------------------------------------------------------------------------------------------- metrics


def with_count(sums: Metrics, count: jax.Array) -> Metrics:
    """Metrics that were summed over `count` ([] int32) values, with that count beside each."""
    return sums | {f"count/{name}": count for name in sums}


def mean_metrics(sums: Metrics, steps: jax.Array) -> Metrics:
    """The means of metrics that were summed over `steps` ([] int32), or over their own count; 0 where that is 0."""
    names = [name for name in sums if not name.startswith("count/")]
    means: dict[str, jax.Array] = {}
    for name in names:
        count = sums.get(f"count/{name}", steps)
        means |= with_count({name: sums[name] / jnp.maximum(count, 1)}, count)
    return means


def replay_filled(e: OffPolicy, shards: ShardAxis, found: jax.Array, steps: jax.Array) -> Metrics:
    """The share of the batches that was filled.

    found [K'] int32: valid transitions drawn from each of this device's shards, over all `steps` ([] int32).  The rest
    of a batch has weight 0: where few of the stored steps can be drawn, batches are smaller than `batch_size`.
    """
    share = shards.sum(found) / jnp.maximum(steps * e.batch_size, 1)
    return with_count({REPLAY_FILLED: share}, steps)
