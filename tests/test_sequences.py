"""Replay memory of sequences against a slow one: a Python list of all rows, with what was delivered."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_replay import Stream, of_one_shard

from cleanba.ops import replay
from cleanba.ops.replay.priorities import UNIT
from cleanba.rollout import Rollout


class Row(NamedTuple):
    """One step of all environments of a shard, or the observations before the environments were started afresh."""

    obs: Any  # [B, ...]
    first: np.ndarray | None  # [B]; None: the environments were then started afresh
    action: np.ndarray
    reward: np.ndarray
    terminated: np.ndarray
    ended: np.ndarray
    valid: np.ndarray


class SlowSequences:
    """All rows that one shard ever had, and where its rollouts began."""

    def __init__(self, capacity: int, stack: int):
        self.capacity, self.spared = capacity, stack - 1
        self.rows: list[Row] = []
        self.begun: dict[int, np.ndarray] = {}  # row -> recurrent state before it, [B, 3]
        self.last: Any = None  # the observation after the last row

    def seam(self) -> None:
        if self.rows and self.rows[-1].valid.any():
            no = np.zeros_like(self.rows[-1].valid)
            self.rows.append(self.rows[-1]._replace(obs=self.last, first=None, ended=no, valid=no))

    def add(self, r: Rollout, carry: np.ndarray) -> None:
        """A rollout of this shard, leaves [T(+1), B, ...]."""
        self.begun[len(self.rows)] = np.where(np.asarray(r.first[0])[:, None], 0, carry)
        at = lambda tree, t: jax.tree.map(lambda x: np.asarray(x[t]), tree)
        for t in range(len(r.reward)):
            row = (r.obs, r.first, r.action, r.reward, r.terminated, r.terminated | r.truncated, r.valid)
            self.rows.append(Row(*(at(x, t) for x in row)))
        self.last = at(r.obs, len(r.reward))

    def whole(self, length: int) -> list[int]:
        """The rows where sequences begin of which no row is missing, nor a frame."""
        oldest = len(self.rows) + 1 - self.capacity
        oldest += self.spared if oldest >= 0 else 0
        return [s for s in self.begun if s >= oldest and s + length <= len(self.rows)]

    def observation(self, row: int, env: int) -> Any:
        obs = self.rows[row].obs if row < len(self.rows) else self.last
        return jax.tree.map(lambda x: x[env], obs)


write = jax.jit(replay.write_sequences, static_argnums=(3, 4))
take = jax.jit(replay.take_sequences, static_argnums=(3, 4))


def assert_same_sequence(got: replay.Sequences, slow: SlowSequences, start: int, env: int, length: int) -> None:
    """`got` has leaves [L(+1), ...]."""
    rows = slow.rows[start : start + length]
    np.testing.assert_array_equal(got.carry, slow.begun[start][env])
    for t in range(length + 1):
        expected = slow.observation(start + t, env)
        jax.tree.map(np.testing.assert_array_equal, jax.tree.map(lambda x, t=t: x[t], got.obs), expected)
    for name in ("action", "reward", "terminated"):
        for t, row in enumerate(rows):
            if row.valid[env]:
                np.testing.assert_array_equal(getattr(got, name)[t], getattr(row, name)[env])
    assert got.valid.tolist() == [bool(row.valid[env]) for row in rows]
    assert not got.first[0]  # the stored state is cleared already
    for t, row in enumerate(rows):
        if t > 0 and row.first is not None:
            assert got.first[t] == row.first[env]
        if row.valid[env]:
            restarted = t + 1 < length and rows[t + 1].first is None
            assert got.stops[t] == (bool(row.ended[env]) or restarted or t == length - 1)


@pytest.mark.parametrize(
    "steps, rows, shards, envs, length, stack", [(4, 29, 2, 3, 10, 1), (5, 31, 2, 2, 12, 4), (3, 17, 1, 2, 3, 1)]
)
def test_whole_sequences_are_those_of_slow_memory_with_their_priorities(steps, rows, shards, envs, length, stack):
    """New ones have the greatest priority so far, older ones keep theirs, and what has lost a row or frame has none."""
    stream = Stream(shards, envs, rows, stack)
    slow = [SlowSequences(rows, stack) for _ in range(shards)]
    memory: Any = None
    known: list[dict[tuple[int, int], int]] = [{} for _ in range(shards)]
    most, seen, kept, crossed = [UNIT] * shards, 0, 0, 0
    for _ in range(3 * rows // steps + 4):
        if stream.rng.random() < 0.15:
            stream.restart()
            for one in slow:
                one.seam()
        rollout = stream.rollout(steps)
        carry = stream.rng.normal(size=(shards, envs, 3)).astype(np.float32)
        if memory is None:
            one = replay.init_sequences(of_one_shard(rollout), jnp.zeros((envs, 3)), rows * envs, stack)
            memory = jax.tree.map(lambda x: jnp.stack([x] * shards), one)
        memory = write(memory, rollout, carry, length, stack)
        for i, mine in enumerate(slow):
            mine.add(jax.tree.map(lambda x, i=i: x[i], rollout), carry[i])
            p = memory.priorities
            priority = np.asarray(p.values[i]).reshape(-1)
            place = np.flatnonzero(priority)
            begun = np.asarray(memory.starts.rows.begun[i])
            at = [(int(begun[n // envs]), int(n % envs)) for n in place]
            assert sorted(at) == sorted((s, b) for s in mine.whole(length) for b in range(envs))
            assert p.nonzero[i] == len(at) and p.sums[i].tolist() == p.values[i].sum(-1).tolist()
            known[i] = {key: known[i].get(key, most[i]) for key in at}
            assert known[i] == dict(zip(at, priority[place].tolist(), strict=True))
            if not at:
                continue
            n = 2 * envs  # as many in every update, so that `take` is compiled once
            chosen = stream.rng.integers(len(at), size=n)
            there = jnp.ones(n, bool)
            drawn = replay.Drawn(jnp.asarray(place[chosen], jnp.int32), jnp.ones(n, jnp.uint32), there, None, None)  # type: ignore[arg-type]
            got = jax.tree.map(np.asarray, take(memory, jnp.int32(i), drawn, length, stack))
            for j, which in enumerate(chosen):
                one_of = lambda x, j=j: x[:, j]
                sequence = jax.tree.map(one_of, got._replace(carry=()))._replace(carry=got.carry[j])
                assert_same_sequence(sequence, mine, *at[which], length)
                crossed += any(row.first is None for row in mine.rows[at[which][0] : at[which][0] + length])
            seen, kept = seen + n, kept + sum(value != most[i] for value in known[i].values())
            new = jnp.asarray(stream.rng.integers(1, 9_000, n), jnp.uint32)  # as a gradient step does
            memory = memory._replace(priorities=replay.assign(p, jnp.int32(i), drawn, new))
            most[i] = max(most[i], int(new.max()))
            greatest: dict[tuple[int, int], int] = {}
            for which, value in zip(chosen, new.tolist(), strict=True):
                greatest[at[which]] = max(value, greatest.get(at[which], 0))
            known[i] |= greatest
    assert seen > 40 and kept > 10 and (crossed > 0 or length <= steps)


def test_a_sequence_by_hand():
    """Two rollouts of two steps: an episode of 1 2 ends, its next step is ignored, another one begins with 9."""
    numbers = lambda *x: jnp.array(x, jnp.float32)[None, :, None]
    bools = lambda *x: jnp.array(x, bool)[None, :, None]

    def rollout(obs, first, reward, terminated, valid):
        end = bools(*terminated)
        fields = (numbers(*obs), bools(*first), numbers(*reward), numbers(*reward), end, jnp.zeros_like(end))
        return Rollout(*fields, bools(*valid), extras=(), carry=())

    one = rollout((1, 2, 3), (1, 0, 0), (0.5, 1.0), (0, 1), (1, 1))
    two = rollout((3, 9, 8), (0, 1, 0), (0.0, 2.0), (0, 0), (0, 1))
    memory = replay.init_sequences(of_one_shard(one), jnp.zeros((1, 2)), 20)
    memory = jax.tree.map(lambda x: x[None], memory)
    memory = write(memory, one, jnp.ones((1, 1, 2)), 4, 1)
    assert memory.priorities.nonzero.tolist() == [0]
    memory = write(memory, two, 2 * jnp.ones((1, 1, 2)), 4, 1)
    assert memory.priorities.nonzero.tolist() == [1]
    place = int(np.flatnonzero(np.asarray(memory.priorities.values).reshape(-1))[0])
    drawn = replay.Drawn(jnp.array([place]), jnp.ones(1, jnp.uint32), jnp.ones(1, bool), None, None)  # type: ignore[arg-type]
    s = jax.tree.map(lambda x: np.asarray(x).tolist(), take(memory, jnp.int32(0), drawn, 4, 1))
    column = lambda x: [row[0] for row in x]
    assert column(s.obs) == [1, 2, 3, 9, 8] and column(s.first) == [False, False, False, True, False]
    assert column(s.valid) == [True, True, False, True] and column(s.terminated)[:2] == [False, True]
    assert column(s.reward)[:2] == [0.5, 1.0] and column(s.reward)[3] == 2.0
    stops = column(s.stops)
    assert (stops[0], stops[1], stops[3]) == (False, True, True)
    assert s.carry == [[0.0, 0.0]]  # an episode began there
