"""Prioritised draws against slow ones, which add up Python's integers of any size, place by place."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from launch import same_arrays

from cleanba.errors import UsageError
from cleanba.ops import replay
from cleanba.ops.replay import priorities

draw = jax.jit(replay.draw)
assign = jax.jit(replay.assign)
replace = jax.jit(replay.replace)


def of_values(*shards: np.ndarray) -> replay.Priorities:
    """Priorities in units, for each shard of a device.  [K] arrays of [places] -> leaves [K, ...]."""
    empty = replay.no_priorities(len(shards[0]))
    p = jax.tree.map(lambda x: jnp.stack([x] * len(shards)), empty)
    for i, values in enumerate(shards):
        place, new = jnp.arange(len(values)), jnp.asarray(values, jnp.uint32)
        p = replace(p, i, place, jnp.zeros_like(new), new, jnp.ones(len(values), bool))
    return p


def values_of(p: replay.Priorities, i: int, places: int) -> np.ndarray:
    """[places] int64."""
    return np.asarray(p.values[i]).reshape(-1)[:places].astype(np.int64)


def slow_place(values: np.ndarray, tries: np.ndarray) -> int | None:
    """The place that random words [TRIES, 2] draw: of those below the total, the first decides."""
    total = sum(map(int, values))
    for high, low in tries.tolist():
        bits = total.bit_length()
        number = high % 2 ** (bits - 16) << 16 | low % 2**16 if bits > 16 else low % 2**bits
        if number < total:
            for place, value in enumerate(values.tolist()):
                if number < value:
                    return place
                number -= value
    return None


# Of one group of blocks and of several, with totals below 2^16, below 2^32 and above.
SIZES = {"tiny": (300, 3), "middle": (5_000, 2**18), "large": (40_000, priorities.MOST)}


@pytest.mark.parametrize("size", SIZES)
def test_a_draw_falls_where_a_slow_sum_says(size):
    places, most = SIZES[size]
    rng = np.random.default_rng(places)
    values = rng.integers(0, most + 1, (2, places)) * (rng.random((2, places)) < 0.6)
    values[:, :7], values[:, 256:512] = 0, 0  # a beginning and a block that are never drawn
    p = of_values(*values)
    words = replay.random_words(jax.random.key(1), 60)
    for i in range(2):
        found = draw(p, i, words)
        expected = [slow_place(values[i], np.asarray(words)[:, :, n]) for n in range(60)]
        assert found.place.tolist() == expected and bool(found.found.all())
        assert found.priority.tolist() == values[i][expected].tolist()
        assert int(found.total.high) * 2**16 + int(found.total.low) == values[i].sum()
        assert int(found.nonzero) == (values[i] > 0).sum()


def chi_square(place: np.ndarray, values: np.ndarray) -> float:
    """How far the frequencies of places are from these priorities, in standard deviations of the chi-square."""
    expected = len(place) * values / values.sum()
    counts = np.bincount(place, minlength=len(values))
    assert not counts[values == 0].any()
    there = values > 0
    distance, freedom = ((counts - expected)[there] ** 2 / expected[there]).sum(), there.sum() - 1
    return float((distance - freedom) / np.sqrt(2 * freedom))


def test_places_are_drawn_in_proportion_to_their_priorities():
    rng = np.random.default_rng(0)
    values = rng.integers(0, 5_000, 700) * (rng.random(700) < 0.8)
    values[300] = 400_000
    p = of_values(values)
    place = np.concatenate([draw(p, 0, replay.random_words(jax.random.key(k), 20_000)).place for k in range(5)])
    assert abs(chi_square(place, values)) < 5
    # The test notices a single priority, large or middling, that differs from what was used for drawing.
    for tampered in (300, int(np.argsort(values)[400])):
        wrong = values.copy()
        wrong[tampered] = 2 * wrong[tampered] + 4_000
        assert chi_square(place, wrong) > 8


def test_where_all_priorities_are_zero_nothing_is_drawn():
    found = draw(of_values(np.zeros(600, int)), 0, replay.random_words(jax.random.key(0), 16))
    assert not found.found.any() and (found.place < 2**15).all()
    assert not np.asarray(replay.importance(found, 0.5)).any()


def test_new_priorities_update_the_sums_and_for_repeated_places_the_greatest_counts():
    rng = np.random.default_rng(2)
    values = rng.integers(0, 300, (3, 20_000))
    p = of_values(*values)
    for step in range(5):
        drawn = draw(p, 1, replay.random_words(jax.random.key(step), 64))
        # Some are drawn twice, some were not found.
        drawn = drawn._replace(place=drawn.place.at[:20].set(drawn.place[30:50]), found=jnp.arange(64) % 7 != 0)
        new = rng.integers(1, 10_000, 64)
        p = assign(p, 1, drawn, jnp.asarray(new, jnp.uint32))
        for place in set(np.asarray(drawn.place)[np.asarray(drawn.found)].tolist()):
            values[1, place] = max(new[(np.asarray(drawn.place) == place) & np.asarray(drawn.found)])
        for i in range(3):
            assert (values_of(p, i, 20_000) == values[i]).all()
        assert same_arrays(p.sums, p.values.sum(-1, dtype=jnp.uint32))
        assert p.nonzero.tolist() == (values > 0).sum(1).tolist()
        assert int(p.most[1]) >= values[1].max() and int(p.most[0]) == max(values[0].max(), 4096)


def test_priorities_and_importance_weights_are_the_papers():
    size = np.float32([0, 1e-9, 0.25, 1, 3, 100, 1e9, np.inf])
    units = replay.in_units(jnp.asarray(size), 0.6)
    expected = [1, 1, *(round(4096 * float(x) ** 0.6) for x in size[2:6]), 2**24 - 1, 2**24 - 1]
    np.testing.assert_allclose(units, expected, rtol=1e-6)
    values = np.array([4096, 100, 0, 65_000, 4096 * 7, 12_345_678, 1])
    drawn = draw(of_values(values), 0, replay.random_words(jax.random.key(0), 500))
    probability = values / values.sum()
    for exponent in (0.0, 0.4, 1.0):
        weight = (6 * probability[np.asarray(drawn.place)]) ** -exponent  # six of the seven can be drawn
        np.testing.assert_allclose(replay.importance(drawn, exponent), weight, rtol=1e-5)


def test_more_places_than_sums_can_count_are_refused():
    replay.no_priorities(2**24)
    with pytest.raises(UsageError, match="16777217 priorities, but it can have 16777216; raise --num-shards"):
        replay.no_priorities(2**24 + 1)
