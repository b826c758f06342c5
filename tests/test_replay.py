"""Replay memory against a slow one: Python lists that keep every step with the observations that were delivered."""

import re
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cleanba.config import Experiment
from cleanba.environments.envpool import Envs, env_spec
from cleanba.errors import UsageError
from cleanba.ops import replay
from cleanba.rollout import Rollout
from cleanba.runtime import memory as stores
from cleanba.shards import compiler_options

# ----------------------------------------------------------------------------------------------------- the slow memory


@dataclass
class Executed:
    """A step that was made, and what became of it."""

    obs: Any
    action: Any
    reward: float
    terminated: bool
    next_obs: Any
    frames: int  # rows before this one that its stack needs
    over: bool = False  # nothing follows: its episode ended, or the environments were started afresh
    after: "Executed | None" = None


class SlowMemory:
    """One shard's rows as Python lists, the last `rows` of which count."""

    def __init__(self, rows: int):
        self.capacity = rows
        self.rows: list[list[Executed | None]] = []

    def add(self, row: list[Executed | None]) -> None:
        for before, now in zip(self.rows[-1] if self.rows else [], row, strict=False):
            if before and now and not before.over:
                before.after = now
        self.rows.append(row)

    def seam(self) -> None:
        if self.rows and any(self.rows[-1]):
            for step in filter(None, self.rows[-1]):
                step.over = True
            self.rows.append([None] * len(self.rows[-1]))

    def transitions(self, n: int) -> dict[tuple[int, int], list[Executed]]:
        """(row from the oldest, environment) -> the steps of each transition that may be sampled."""
        oldest = max(0, len(self.rows) + 1 - self.capacity)  # the tail is stored too
        found = {}
        for r, row in enumerate(self.rows[oldest:]):
            for env, step in enumerate(row):
                if step is None or step.frames > r:
                    continue
                steps = [step]
                while len(steps) < n and steps[-1].after:
                    steps.append(steps[-1].after)
                if len(steps) == n or steps[-1].over:
                    found[r, env] = steps
        return found


# ---------------------------------------------------------------------------------------------------- scripted streams


@dataclass
class Game:
    """An environment whose observations all differ, and whose episodes end at random."""

    number: int
    stack: int
    rng: np.random.Generator
    serial: int = 0
    frames: list[np.ndarray] = field(default_factory=list)
    real: int = 0
    done: str = ""

    def _frame(self) -> np.ndarray:
        """[2, 2, 2] uint8, two channels."""
        self.serial += 1
        frame = np.array([[self.number, self.serial >> 16], [self.serial >> 8 & 255, self.serial & 255]], np.uint8)
        return np.stack([frame, 255 - frame])

    def begin(self) -> None:
        self.frames, self.real, self.done = [self._frame()] * self.stack, 0, ""

    def step(self) -> tuple[float, bool, bool, bool]:
        """-> reward, terminated, truncated, valid."""
        if self.done == "game":
            self.begin()
            return 0.0, False, False, False
        self.frames, self.real = [*self.frames[1:], self._frame()], min(self.real + 1, self.stack - 1)
        if self.done:  # a life was lost; the game goes on
            self.done = ""
            return 0.0, False, False, False
        terminated, truncated, life = self.rng.random(3) < (0.15, 0.1, 0.5)
        self.done = "life" if terminated and life and not truncated else "game" if terminated or truncated else ""
        return float(self.rng.integers(-3, 4)), bool(terminated), bool(truncated), True

    @property
    def obs(self) -> Any:
        if self.stack > 1:
            return np.concatenate(self.frames)
        return {"picture": self.frames[0], "place": np.array([self.number, self.serial], np.int32)}


class Stream:
    """Rollouts of `shards` times `envs` games, and what slow memory keeps of them."""

    def __init__(self, shards: int, envs: int, rows: int, stack: int = 1, seed: int = 0):
        rng = np.random.default_rng(seed)
        self.games = [[Game(10 * k + b, stack, rng) for b in range(envs)] for k in range(shards)]
        self.slow = [SlowMemory(rows) for _ in range(shards)]
        self.rng = rng
        self.restart()

    def restart(self) -> None:
        for slow, games in zip(self.slow, self.games, strict=True):
            slow.seam()
            for game in games:
                game.begin()
        self.first = np.ones((len(self.games), len(self.games[0])), bool)

    def rollout(self, steps: int) -> Rollout:
        """Leaves [K, T(+1), B, ...]."""
        columns: dict[str, list] = {k: [] for k in ("obs", "first", "action", "outcome")}
        for _ in range(steps):
            obs = [[g.obs for g in games] for games in self.games]
            frames = [[g.real for g in games] for games in self.games]
            action = self.rng.normal(size=(*self.first.shape, 2)).astype(np.float32)
            outcome = [[g.step() for g in games] for games in self.games]
            for name, x in (("obs", obs), ("first", self.first), ("action", action), ("outcome", outcome)):
                columns[name].append(x)
            for k, games in enumerate(self.games):
                row: list[Executed | None] = []
                for b, game in enumerate(games):
                    reward, terminated, truncated, valid = outcome[k][b]
                    what = (obs[k][b], action[k, b], reward, terminated, game.obs, frames[k][b])
                    row.append(Executed(*what, over=terminated or truncated) if valid else None)
                self.slow[k].add(row)
            self.first = np.array([[not o[3] for o in row] for row in outcome])
        columns["obs"].append([[g.obs for g in games] for games in self.games])
        columns["first"].append(self.first)
        obs = jax.tree.map(lambda *xs: np.stack(xs), *[self._block(x) for x in columns["obs"]])
        first, action, outcome = (np.array(columns[k]) for k in ("first", "action", "outcome"))
        reward, terminated, truncated, valid = np.moveaxis(outcome, -1, 0)
        fields = (
            obs,
            first,
            action,
            reward.astype(np.float32),
            *(x.astype(bool) for x in (terminated, truncated, valid)),
        )
        return Rollout(*jax.tree.map(lambda x: jnp.asarray(np.swapaxes(x, 0, 1)), fields), extras=(), carry=())

    @staticmethod
    def _block(obs: list[list[Any]]) -> Any:
        rows = [jax.tree.map(lambda *xs: np.stack(xs), *row) for row in obs]
        return jax.tree.map(lambda *xs: np.stack(xs), *rows)


def of_one_shard(rollout: Rollout) -> Rollout:
    """The shapes that `init` is given."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), rollout)


def empty(rollout: Rollout, capacity: int, stack: int = 1) -> replay.Ring:
    """Memory for all shards of this rollout, leaves [K, ...]."""
    one = replay.init(of_one_shard(rollout), capacity, stack)
    return jax.tree.map(lambda x: jnp.stack([x] * rollout.reward.shape[0]), one)


write = jax.jit(replay.write, donate_argnums=0)
sample_indices = jax.jit(replay.sample_indices, static_argnums=(3, 4, 5))
acceptable = jax.jit(replay.acceptable, static_argnums=4)
take = jax.jit(replay.take, static_argnums=(3, 4))
n_step = jax.jit(replay.n_step)


def everything(ring: replay.Ring, i: int, n: int) -> replay.Indices:
    """All rows and environments of a shard, and which of them may be sampled."""
    size, envs = int(ring.size[i]), ring.rows.valid.shape[2]
    row, env = (x.reshape(-1).astype(np.int32) for x in np.indices((ring.rows.valid.shape[1], envs)))
    found = np.asarray(acceptable(ring, i, row, env, n)) & (row < size)
    return replay.Indices(jnp.asarray(row), jnp.asarray(env), jnp.asarray(found))


def assert_same_transitions(ring, i, indices, slow: dict[tuple[int, int], list[Executed]], n, stack, gamma=0.5):
    """Every valid one of these transitions is what slow memory says, bit for bit: gamma is a power of two."""
    batch = jax.tree.map(np.asarray, n_step(take(ring, i, indices, n, stack), gamma))
    valid = np.asarray(indices.valid)
    assert (batch.weight == valid).all()
    for j in np.flatnonzero(valid):
        steps = slow[int(indices.row[j]), int(indices.env[j])]
        got = jax.tree.map(lambda x, j=j: x[j], batch)
        jax.tree.map(np.testing.assert_array_equal, got.obs, steps[0].obs)
        jax.tree.map(np.testing.assert_array_equal, got.next_obs, steps[-1].next_obs)
        np.testing.assert_array_equal(got.action, steps[0].action)
        assert got.reward == sum(gamma**k * step.reward for k, step in enumerate(steps))
        assert got.discount == (0.0 if steps[-1].terminated else gamma ** len(steps))


def assert_same_memory(ring, slow: list[SlowMemory], n: int, stack: int) -> int:
    """What may be sampled is what slow memory has, no more, no less, and looks the same.  -> how many there are."""
    count = 0
    for i, memory in enumerate(slow):
        indices, expected = everything(ring, i, n), memory.transitions(n)
        found = {
            (int(r), int(e)) for r, e, ok in zip(indices.row, indices.env, np.asarray(indices.valid), strict=True) if ok
        }
        assert found == expected.keys()
        assert_same_transitions(ring, i, indices, expected, n, stack)
        count += len(found)
    return count


# ------------------------------------------------------------------------------------------------------- what it keeps


@pytest.mark.parametrize("stack", [1, 4])
@pytest.mark.parametrize("steps, rows, shards, envs", [(4, 23, 2, 3), (1, 11, 1, 2), (7, 9, 1, 3), (3, 13, 2, 1)])
def test_memory_holds_what_slow_memory_holds(steps, rows, shards, envs, stack):
    stream = Stream(shards, envs, rows, stack)
    ring, count = None, 0
    for k in range(3 * rows // steps + 4):
        if stream.rng.random() < (0.15 if steps > 1 else 0.05):
            stream.restart()
        rollout = stream.rollout(steps)
        ring = write(empty(rollout, rows * envs + envs - 1, stack) if ring is None else ring, rollout)
        if k % 3 == 0 or steps > 1:
            count += sum(assert_same_memory(ring, stream.slow, n, stack) for n in (1, 3, 5))
    assert count > 200 and all(len(slow.rows) > 2.5 * rows for slow in stream.slow)


def filled(steps=4, rows=23, shards=2, envs=3, stack=1, rollouts=13, seed=1):
    """Memory that has wrapped, with a seam in it, and the slow one."""
    stream = Stream(shards, envs, rows, stack, seed)
    ring = None
    for k in range(rollouts):
        if k == rollouts - 2:
            stream.restart()
        rollout = stream.rollout(steps)
        ring = write(empty(rollout, rows * envs, stack) if ring is None else ring, rollout)
    return ring, stream.slow


@pytest.mark.parametrize("stack", [1, 4])
@pytest.mark.parametrize("steps, rows, shards, envs, n", [(4, 23, 2, 3, 3), (7, 9, 1, 3, 1), (3, 30, 2, 1, 5)])
def test_what_may_be_sampled_has_a_priority_and_nothing_else(steps, rows, shards, envs, n, stack):
    """New transitions have the greatest so far, older ones keep theirs, and what is gone or cut off has none."""
    stream = Stream(shards, envs, rows, stack)
    write = jax.jit(replay.write_prioritised, static_argnums=(2, 3))
    memory, known, most = None, [{} for _ in range(shards)], [4096] * shards
    count = kept = 0
    for _ in range(4 * rows // steps + 4):
        if stream.rng.random() < 0.15:
            stream.restart()
        rollout = stream.rollout(steps)
        if memory is None:
            one = replay.init_prioritised(of_one_shard(rollout), rows * envs, stack)
            memory = jax.tree.map(lambda x, shards=shards: jnp.stack([x] * shards), one)
        memory = write(memory, rollout, n, stack)
        for i, slow in enumerate(stream.slow):
            possible = slow.transitions(n)
            priority = np.asarray(memory.priorities.values[i]).reshape(-1)
            place, there = np.flatnonzero(priority), jnp.ones((priority > 0).sum(), bool)
            drawn = replay.Drawn(jnp.asarray(place), there, there, (), ())
            where = replay.transitions_at(memory, i, drawn)
            at = list(zip(where.row.tolist(), where.env.tolist(), strict=True))
            assert set(at) == possible.keys() and len(at) == len(possible) == memory.priorities.nonzero[i]
            step_at = dict(zip(at, priority[priority > 0].tolist(), strict=True))
            known[i] = {id(possible[key][0]): known[i].get(id(possible[key][0]), most[i]) for key in at}
            assert all(known[i][id(possible[key][0])] == value for key, value in step_at.items())
            assert memory.priorities.sums[i].tolist() == memory.priorities.values[i].sum(-1).tolist()
            count, kept = count + len(at), kept + sum(value != most[i] for value in step_at.values())
            if at:  # as a gradient step does
                some = jax.tree.map(lambda x: x[:3], drawn)
                new = jnp.asarray(stream.rng.integers(1, 9_000, len(some.place)), jnp.uint32)
                priorities = replay.assign(memory.priorities, i, some, new)
                memory, most[i] = memory._replace(priorities=priorities), max(most[i], int(new.max()))
                known[i] |= {id(possible[key][0]): int(v) for key, v in zip(at[:3], new, strict=False)}
    assert count > 140 and (kept > 20 or rows < 2 * steps)  # a small ring overwrites what it knew


def test_an_episode_by_hand():
    # Two rollouts of T = 2 of one environment: three steps, 1 2 4, then a truncation; the next step is ignored.
    bools = lambda *x: jnp.array(x, bool)[None, :, None]

    def rollout(obs, first, reward, truncated, valid):
        numbers = lambda x: jnp.array(x, jnp.float32)[None, :, None]
        end = bools(*truncated)
        fields = (numbers(obs), bools(*first), numbers(reward), numbers(reward), jnp.zeros_like(end), end)
        return Rollout(*fields, bools(*valid), extras=(), carry=())

    ring = None
    for part in (
        rollout([10, 11, 12], [1, 0, 0], [1, 2], [0, 0], [1, 1]),
        rollout([12, 13, 20], [0, 0, 1], [4, 0], [1, 0], [1, 0]),
    ):
        ring = write(empty(part, 8) if ring is None else ring, part)
    assert (int(ring.tail[0]), int(ring.size[0])) == (4, 5)
    indices = replay.Indices(jnp.arange(3), jnp.zeros(3, int), jnp.ones(3, bool))
    assert acceptable(ring, 0, jnp.arange(5), jnp.zeros(5, int), 2).tolist() == [True, True, True, False, False]
    batch = n_step(take(ring, 0, indices, 2, 1), 0.5)
    assert batch.obs.tolist() == [10, 11, 12] and batch.next_obs.tolist() == [12, 13, 13]
    assert batch.reward.tolist() == [1 + 0.5 * 2, 2 + 0.5 * 4, 4]
    assert batch.discount.tolist() == [0.25, 0.25, 0.5]  # a truncated episode's last state still has a value


def test_the_step_before_a_seam_keeps_the_observation_that_followed():
    ring, slow = filled(rollouts=3)  # the environments start afresh before the second
    for i in range(2):
        after = [step for step in slow[i].rows[3] if step]
        assert after and all(step.over for step in after) and not any(slow[i].rows[4])
        for env, step in enumerate(slow[i].rows[3]):
            if step:
                one = replay.Indices(jnp.array([3]), jnp.array([env]), jnp.array([True]))
                batch = n_step(take(ring, i, one, 5, 1), 0.5)
                assert batch.next_obs["place"][0].tolist() == step.next_obs["place"].tolist()
                assert batch.discount.tolist() == [0.0 if step.terminated else 0.5]


def test_a_stack_that_cannot_be_rebuilt_is_never_sampled():
    stream = Stream(1, 2, 30, 4, seed=3)
    whole = stream.rollout(12)
    obs = np.array(whole.obs)
    obs[0, 3, 0, :2] ^= 1  # the oldest frame of one stack is none that was ever seen
    ring = write(empty(whole, 60, 4), whole._replace(obs=jnp.asarray(obs)))
    expected = stream.slow[0].transitions(1)
    # The stacks of rows 3, 4 and 5 may hold frames from before row 3 that were never seen again, unless a game begins.
    begins = [r for r in (4, 5) if (obs[0, r, 0].reshape(4, -1) == obs[0, r, 0, -2:].reshape(-1)).all()]
    unknown = set(range(3, min([6, *begins])))
    lost = {(r, 0) for r in range(12) if r in unknown or r + 1 in unknown}
    indices = everything(ring, 0, 1)
    found = {(int(r), int(e)) for r, e in zip(indices.row, indices.env, strict=True) if acceptable(ring, 0, r, e, 1)}
    assert found == expected.keys() - lost and lost & expected.keys()
    assert_same_transitions(ring, 0, indices, expected, 1, 4)


# ------------------------------------------------------------------------------------------------------ what it gives


@pytest.mark.parametrize("n, stack", [(1, 1), (3, 4), (5, 1)])
def test_sampled_transitions_are_those_of_slow_memory(n, stack):
    ring, slow = filled(stack=stack)
    for i in range(2):
        indices = sample_indices(ring, i, jax.random.key(i), 256, n, 8)
        assert indices.valid.mean() > 0.95
        assert_same_transitions(ring, i, indices, slow[i].transitions(n), n, stack)


@pytest.mark.parametrize("n, stack, draws", [(1, 1, 8), (3, 4, 8), (5, 1, 1)])
def test_all_that_may_be_sampled_is_equally_likely(n, stack, draws):
    ring, slow = filled(stack=stack, rows=11)
    possible = slow[1].transitions(n)
    indices = jax.tree.map(np.asarray, sample_indices(ring, 1, jax.random.key(0), 40_000, n, draws))
    drawn = list(zip(indices.row[indices.valid].tolist(), indices.env[indices.valid].tolist(), strict=True))
    counts = np.array([drawn.count(p) for p in possible])
    assert counts.sum() == len(drawn) > 10_000  # nothing else was drawn
    expected = len(drawn) / len(possible)
    chi_square, freedom = ((counts - expected) ** 2 / expected).sum(), len(possible) - 1
    assert abs(chi_square - freedom) < 5 * np.sqrt(2 * freedom)


def test_numbers_below_a_large_count_are_uniform():
    count = 3 * 2**29  # 2^32 is 2 2/3 times as much: taken modulo, the lower two thirds would come up more often
    number, fair = replay.uniform(jax.random.key(0), (100_000,), jnp.uint32(count))
    assert fair.mean() == pytest.approx(0.75, abs=0.01)
    kept = np.asarray(number)[np.asarray(fair)]
    assert kept.min() >= 0 and kept.max() < count
    assert (kept < count / 2).mean() == pytest.approx(0.5, abs=0.01)
    for small in (1, 3, 2**20):
        assert replay.uniform(jax.random.key(1), (1000,), jnp.uint32(small))[1].all()


def test_where_nothing_may_be_sampled_the_weight_is_zero():
    rollout = Stream(2, 3, 23).rollout(4)
    ring = empty(rollout, 23 * 3)
    nothing = sample_indices(ring, 0, jax.random.key(0), 16, 1, 8)
    assert not nothing.valid.any()
    batch = n_step(take(ring, 0, nothing, 1, 1), 0.5)
    assert not batch.weight.any() and np.isfinite(batch.reward).all()
    ring = write(ring, rollout)
    unfinished = sample_indices(ring._replace(rows=_endless(ring.rows)), 1, jax.random.key(0), 16, 9, 8)
    assert not unfinished.valid.any()  # of windows of nine steps none is complete after four


def _endless(rows: replay.Rows) -> replay.Rows:
    """As if every step stored had been made, in an episode that goes on."""
    never = jnp.zeros_like(rows.valid)
    return rows._replace(valid=~never, terminated=never, truncated=never)


def test_another_key_draws_others_and_the_same_key_the_same():
    ring, _ = filled()
    draw = lambda seed: np.asarray(sample_indices(ring, 0, jax.random.key(seed), 64, 1, 8).row)
    assert (draw(0) == draw(0)).all() and (draw(0) != draw(1)).any()


def test_it_is_the_same_without_jit():
    ring, _ = filled(stack=4)
    rollout = Stream(2, 3, 23, 4, seed=9).rollout(4)
    slow = replay.write(ring, rollout)
    index = replay.sample_indices(slow, 1, jax.random.key(0), 8, 3)
    window = replay.take(slow, 1, index, 3, 4)
    transition = replay.n_step(window, 0.5)
    fast = write(ring, rollout)
    index_fast = sample_indices(fast, 1, jax.random.key(0), 8, 3, 8)
    window_fast = take(fast, 1, index_fast, 3, 4)
    for a, b in ((slow, fast), (index, index_fast), (window, window_fast), (transition, n_step(window_fast, 0.5))):
        jax.tree.map(np.testing.assert_array_equal, a, b)


# -------------------------------------------------------------------------------------------------------------- Atari


def play(options: dict, steps: int, rollouts: int, seed: int = 0) -> tuple[list[Rollout], SlowMemory]:
    """Random actions in two games of Breakout, afresh before the last rollout; slow memory keeps whole stacks."""
    spec = env_spec(Experiment(env_id="Breakout-v5", **options))
    rng, slow, recorded = np.random.default_rng(seed), SlowMemory(rows=40), []
    for k in range(rollouts):
        if k in (0, rollouts - 1):
            slow.seam()
            envs = Envs(spec, [k, k + 1], num_threads=1)
            obs, done, first = envs.reset(), np.zeros(2, bool), np.ones(2, bool)
            frames = [0, 0]
        rows: list[tuple] = []
        for _ in range(steps):
            action = rng.integers(4, size=2).astype(np.int32)
            step = envs.step(action)
            terminated, truncated, valid = step.terminated & ~done, step.truncated & ~done, ~done
            rows.append((obs, first, action, step.reward * valid, terminated, truncated, valid))
            made: list[Executed | None] = [None, None]
            for b in np.flatnonzero(valid):
                made[b] = Executed(
                    obs[b],
                    action[b],
                    step.reward[b],
                    terminated[b],
                    step.obs[b],
                    frames[b],
                    terminated[b] | truncated[b],
                )
            slow.add(made)
            still = [(x.reshape(4, -1) == x[3].reshape(-1)).all() for x in step.obs]  # then no earlier frame is needed
            frames = [0 if s else min(f + 1, 3) for s, f in zip(still, frames, strict=True)]
            obs, first, done = step.obs, done, terminated | truncated
        columns = [np.stack(x) for x in zip(*rows, strict=True)]
        columns[0], columns[1] = np.concatenate([columns[0], obs[None]]), np.concatenate([columns[1], first[None]])
        recorded.append(Rollout(*(jnp.asarray(x[None]) for x in columns), extras=(), carry=()))
    return recorded, slow


@pytest.mark.parametrize(
    "options, lives, limits",
    [
        (dict(episodic_life=False), False, False),
        (dict(episodic_life=True), True, False),
        (dict(episodic_life=False, max_episode_steps=13), False, True),
        (dict(episodic_life=True, max_episode_steps=37), True, True),
    ],
    ids=["games", "lives", "limit", "lives and limit"],
)
def test_atari_stacks_are_rebuilt_as_they_were_delivered(options, lives, limits):
    rollouts, slow = play(options, steps=11, rollouts=9 if limits or lives else 24)
    ring = None
    for k, rollout in enumerate(rollouts):
        ring = write(empty(rollout, 40 * 2, 4) if ring is None else ring, rollout)
        if k % 3 == 2 or k + 1 == len(rollouts):
            so_far = SlowMemory(40)
            so_far.rows = slow.rows[: 11 * (k + 1) + (k + 1 == len(rollouts))]
            for n in (1, 3):
                indices = everything(ring, 0, n)
                assert indices.valid.sum() > 20
                assert_same_transitions(ring, 0, indices, so_far.transitions(n), n, 4)
    ends = np.concatenate([np.stack([r.terminated[0], r.truncated[0]]) for r in rollouts], axis=1)
    assert ends[0].any() == (lives or not limits) and ends[1].any() == limits


# ------------------------------------------------------------------------------------------------------ what it costs


@pytest.mark.parametrize("shards, steps", [(1, 1), (1, 8), (2, 1), (2, 8)])
def test_an_update_that_writes_and_samples_keeps_memory_where_it_is(shards, steps):
    shape = lambda t, *rest, dtype=jnp.float32: jax.ShapeDtypeStruct((shards, t, 2, *rest), dtype)
    ends = [shape(steps, dtype=bool)] * 3
    obs, first = shape(steps + 1, 4, 84, 84, dtype=jnp.uint8), shape(steps + 1, dtype=bool)
    rollout = Rollout(obs, first, shape(steps, dtype=jnp.int32), shape(steps), *ends, extras=(), carry=())
    ring = jax.eval_shape(lambda: empty(rollout, 10_000, 4))

    def update(ring, rollout, key):
        ring = replay.write(ring, rollout)

        def gradient_step(_, key):
            def load(i):
                indices = replay.sample_indices(ring, i, jax.random.fold_in(key, i), 8, 3)
                return replay.n_step(replay.take(ring, i, indices, 3, 4), 0.99).obs.sum()

            return jax.lax.map(load, jnp.arange(shards)).sum(), None

        return ring, jax.lax.scan(gradient_step, jnp.uint32(0), jax.random.split(key, 3))[0]

    options = compiler_options("cpu")
    compiled = (
        jax.jit(update, donate_argnums=0, compiler_options=options).lower(ring, rollout, jax.random.key(0)).compile()
    )
    memory = compiled.memory_analysis()
    whole = sum(np.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(ring))
    assert whole == shards * nbytes(of_one_shard(rollout), 10_000, 4) > shards * 70_000_000
    assert memory.alias_size_in_bytes == whole
    assert memory.temp_size_in_bytes < 4_000_000
    large = re.compile(rf"= \w+\[{shards},5000,[^ ]* copy\(")
    assert not [line for line in compiled.as_text().splitlines() if large.search(line)]


def nbytes(rollout, capacity, stack):
    return stores.nbytes(jax.eval_shape(lambda: replay.init(rollout, capacity, stack)))


def test_the_bytes_are_said_beforehand():
    rollout = of_one_shard(Stream(1, 3, 23, 4).rollout(4))
    ring = replay.init(rollout, 100, 4)
    assert ring.rows.obs.shape == (33, 3, 2, 2, 2)
    assert nbytes(rollout, 100, 4) == sum(x.nbytes for x in jax.tree.leaves(ring))


@pytest.mark.slow
def test_places_beyond_two_to_the_31_bytes():
    rows, envs = 160_000, 1
    fill = lambda value: Rollout(
        jnp.full((2, 3, envs, 84, 84), value, jnp.uint8),
        *[jnp.zeros((2, t, envs), bool).at[:, 0].set(t == 3) for t in (3,)],
        jnp.zeros((2, 2, envs), jnp.int32),
        jnp.full((2, 2, envs), value, jnp.float32),
        *[jnp.zeros((2, 2, envs), bool)] * 2,
        jnp.ones((2, 2, envs), bool),
        extras=(),
        carry=(),
    )
    ring = empty(fill(0), rows * envs)
    assert ring.rows.obs.size > 2**31
    ring = ring._replace(tail=ring.tail.at[1].set(rows - 2))
    ring = write(ring, fill(7)._replace(first=jnp.zeros((2, 3, envs), bool)))  # rows -2, -1 and, as tail, 0
    assert ring.tail.tolist() == [2, 0]
    assert (
        np.asarray(ring.rows.obs[:, [0, 1, 2, 3, -3, -2, -1], 0, 5, 5])
        == [[7, 7, 7, 0, 0, 0, 0], [7, 0, 0, 0, 0, 7, 7]]
    ).all()
    for i in range(2):
        indices = sample_indices(ring, i, jax.random.key(0), 16, 1, 8)
        batch = n_step(take(ring, i, indices, 1, 1), 0.5)
        assert batch.weight.all() and (batch.obs == 7).all() and (batch.next_obs == 7).all()


# ------------------------------------------------------------------------------------------------------ what it refuses


def test_refusals_say_what_would_do():
    rollout = of_one_shard(Stream(1, 3, 23).rollout(4))
    replay.init(rollout, 18)
    with pytest.raises(UsageError, match="17 steps of 3 environments, 5 rows, .* needs 6; try at least 18 per shard"):
        replay.init(rollout, 17)
    with pytest.raises(UsageError, match="not a stack of 3 frames"):
        replay.init(rollout, 18, stack=3)
    with pytest.raises(UsageError, match="2\\^31"):
        replay.init(rollout, 2**32)
    ring = empty(Stream(1, 3, 23).rollout(4), 18)
    with pytest.raises(UsageError, match="n_step=6 needs 7 rows of memory, but a shard has 6"):
        replay.sample_indices(ring, 0, jax.random.key(0), 1, 6)
