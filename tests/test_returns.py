"""Advantages and value targets against their definitions, against rlax, and against sums done by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import rlax
from hypothesis import given, settings
from hypothesis import strategies as st
from slowly import Data, last_step, slow_corrected_gae, slow_gae, slow_lambda_returns, slow_vtrace, value_after

from cleanba.ops.returns import (
    corrected_gae,
    discounted_sum,
    gae,
    lambda_returns,
    n_step_targets,
    rescale,
    td_errors,
    unscale,
    vtrace,
)

INF = float("inf")


def layouts(steps: int) -> list[str]:
    """Every way in which episodes can end within so many steps, one letter each.

    `.` goes on, `T` terminates, `U` truncates, and `x` is the ignored step that follows an end, also an end just before
    the rollout.
    """

    def extend(done: str, open_steps: int) -> list[str]:
        if open_steps == 0:
            return [done]
        kinds = "x" if done[-1:] in ("T", "U") else ".TU"
        return [layout for kind in kinds for layout in extend(done + kind, open_steps - 1)]

    return extend("", steps) + extend("x", steps - 1)


def random_data(columns: list[str], seed: int) -> Data:
    """Random numbers for these layouts, one environment each; ignored steps hold numbers that would be noticed."""
    rng = np.random.default_rng(seed)
    kinds = np.array([list(c) for c in columns]).T
    valid = kinds != "x"
    draw = lambda: rng.normal(size=kinds.shape)
    reward, log_ratio = np.where(valid, draw(), 1e3), np.where(valid, draw(), 3.0)
    value = np.concatenate([draw(), draw()[:1]])
    value[1:] = np.where(kinds == "T", -1e3, value[1:])  # of a state that is worth nothing, whatever the network says
    return Data(value, log_ratio, reward, kinds == "T", kinds == "U", valid)


def single(x: np.ndarray) -> jax.Array:
    return jnp.asarray(x, jnp.float32 if x.dtype == np.float64 else x.dtype)


@jax.jit
def compiled_gae(d: Data, gamma, lam):
    return gae(d.value, d.reward, d.terminated, d.truncated, gamma, lam)


@jax.jit
def compiled_vtrace(d: Data, gamma, options):
    return vtrace(d.value, d.log_ratio, d.reward, d.terminated, d.truncated, gamma, **options)


def our_gae(d: Data, gamma: float, lam: float) -> np.ndarray:
    return np.asarray(compiled_gae(Data(*map(single, d)), gamma, lam))


def our_vtrace(d: Data, gamma: float, **options) -> tuple[np.ndarray, np.ndarray]:
    v = compiled_vtrace(Data(*map(single, d)), gamma, options)
    return np.asarray(v.value), np.asarray(v.advantage)


@jax.jit
def compiled_corrected_gae(d: Data, gamma, lam, rho_bar):
    return corrected_gae(d.value, d.log_ratio, d.reward, d.terminated, d.truncated, gamma, lam, rho_bar)


def our_corrected_gae(d: Data, gamma: float, lam: float, rho_bar: float = 1.0) -> tuple[np.ndarray, np.ndarray]:
    v = compiled_corrected_gae(Data(*map(single, d)), gamma, lam, rho_bar)
    return np.asarray(v.value), np.asarray(v.advantage)


@jax.jit
def compiled_lambda_returns(d: Data, gamma, lam, follow):
    return lambda_returns(d.value, d.reward, d.terminated, d.truncated, gamma, lam, follow)


def our_lambda_returns(d: Data, gamma: float, lam: float, follow: np.ndarray | None = None) -> np.ndarray:
    return np.asarray(compiled_lambda_returns(Data(*map(single, d)), gamma, lam, follow))


def assert_equal_where_valid(d: Data, ours, theirs, rtol=2e-5, atol=2e-5):
    for a, b in zip(ours, theirs, strict=True):
        assert d.valid.any()
        np.testing.assert_allclose(np.asarray(a)[d.valid], np.asarray(b)[d.valid], rtol=rtol, atol=atol)


CLIPPING = [
    dict(),
    dict(lam=0.7),
    dict(rho_bar=INF, c_bar=INF),
    dict(rho_bar=2.0, c_bar=0.8, lam=0.9),
    dict(rho_bar=1.5, pg_rho_bar=0.5),
    dict(rho_bar=0.5, pg_rho_bar=INF),
]


# ------------------------------------------------------------------------------------------------- definition


@pytest.mark.parametrize("gamma, lam", [(0.9, 0.8), (1.0, 1.0), (0.9, 0.0), (0.9, 1.0), (0.0, 0.8)])
def test_gae_follows_its_definition_wherever_episodes_end(gamma, lam):
    d = random_data(layouts(5), seed=0)
    assert_equal_where_valid(d, [our_gae(d, gamma, lam)], [slow_gae(d, gamma, lam)])


@pytest.mark.parametrize("options", CLIPPING, ids=str)
def test_vtrace_follows_its_definition_wherever_episodes_end(options):
    d = random_data(layouts(5), seed=1)
    assert_equal_where_valid(d, our_vtrace(d, 0.9, **options), slow_vtrace(d, 0.9, **options))


@pytest.mark.parametrize("gamma, lam, rho_bar", [(0.9, 0.8, 1.0), (1.0, 1.0, 1.5), (0.9, 0.0, 1.0), (0.9, 0.9, np.inf)])
def test_corrected_gae_follows_its_definition_wherever_episodes_end(gamma, lam, rho_bar):
    d = random_data(layouts(5), seed=12)
    expected = slow_corrected_gae(d, gamma, lam, rho_bar)
    assert_equal_where_valid(d, our_corrected_gae(d, gamma, lam, rho_bar), expected)


@pytest.mark.parametrize("followed", [None, 1.0, 0.6, 0.0])
@pytest.mark.parametrize("gamma, lam", [(0.9, 0.8), (1.0, 1.0), (0.9, 0.0), (0.9, 1.0), (0.0, 0.8)])
def test_lambda_returns_follow_their_definition_wherever_episodes_end(gamma, lam, followed):
    d = random_data(layouts(5), seed=14)
    follow = None if followed is None else np.random.default_rng(0).random(d.reward.shape) < followed
    expected = slow_lambda_returns(d, gamma, lam, follow)
    assert_equal_where_valid(d, [our_lambda_returns(d, gamma, lam, follow)], [expected])


@pytest.mark.parametrize("n", [1, 2, 4, 9, 1_000_000])
def test_n_step_targets_follow_their_definition_wherever_episodes_end(n):
    """r_t + ... + gamma^{m-1} r_{t+m-1} + gamma^m V(s_{t+m}): m is n, or what is left of the episode or sequence."""
    d, gamma = random_data(layouts(5), seed=15), 0.9
    expected = np.zeros_like(d.reward)
    for t, b in np.argwhere(d.valid):
        m = min(n, last_step(d, t, b) - t + 1)
        rewards = sum(gamma**i * d.reward[t + i, b] for i in range(m))
        expected[t, b] = rewards + gamma**m * value_after(d, t + m - 1, b)
    single_d = Data(*map(single, d))
    stops = single_d.terminated | single_d.truncated
    found = n_step_targets(single_d.value, single_d.reward, single_d.terminated, stops, n, gamma)
    assert_equal_where_valid(d, [found], [expected])


@pytest.mark.parametrize("eps", [0.0, 1e-3, 1e-2])
def test_values_are_rescaled_and_back_without_losing_digits(eps):
    """In float32 what the paper's formulas give in float64, from 1e-5 to 1e5."""
    x = np.concatenate([-np.logspace(5, -5, 21), [0.0], np.logspace(-5, 5, 21)])
    y = np.sign(x) * (np.sqrt(abs(x) + 1) - 1) + eps * x
    np.testing.assert_allclose(rescale(single(x), eps), y, rtol=1e-6)
    np.testing.assert_allclose(unscale(single(y), eps), x, rtol=2e-6)
    if eps > 0:
        z = (np.sqrt(1 + 4 * eps * (abs(y) + 1 + eps)) - 1) / (2 * eps)
        np.testing.assert_allclose(unscale(single(y), eps), np.sign(y) * (z**2 - 1), rtol=2e-6)


def test_layouts_put_every_kind_of_end_at_every_step():
    columns = layouts(4)
    # f(n) = f(n-1) + 2 f(n-2), f(0) = 1, f(1) = 3: that many for 4 steps, and for the 3 after an ignored one
    assert len(columns) == len(set(columns)) == 21 + 11
    assert {(t, kind) for c in columns for t, kind in enumerate(c)} == {(t, kind) for t in range(4) for kind in ".TUx"}


shapes = given(steps=st.integers(1, 7), envs=st.integers(1, 2), seed=st.integers(0, 2**32 - 1), draw=st.data())
unit = st.floats(0.0, 1.0)
few = settings(max_examples=25, deadline=None)


def drawn_data(draw, steps, envs, seed) -> Data:
    pick = np.random.default_rng(seed)
    possible = layouts(steps)
    columns = [possible[i] for i in pick.integers(len(possible), size=envs)]
    if columns == ["x"] * envs:
        columns[0] = "."
    return random_data(columns, seed)


@few
@shapes
def test_gae_follows_its_definition_for_any_shape(steps, envs, seed, draw):
    d = drawn_data(draw, steps, envs, seed)
    gamma, lam = draw.draw(unit), draw.draw(unit)
    assert_equal_where_valid(d, [our_gae(d, gamma, lam)], [slow_gae(d, gamma, lam)], 1e-4, 1e-4)


@few
@shapes
def test_vtrace_follows_its_definition_for_any_shape(steps, envs, seed, draw):
    d = drawn_data(draw, steps, envs, seed)
    gamma = draw.draw(unit)
    options = dict(lam=draw.draw(unit), rho_bar=draw.draw(st.floats(0.1, 4.0)), c_bar=draw.draw(st.floats(0.1, 2.0)))
    assert_equal_where_valid(d, our_vtrace(d, gamma, **options), slow_vtrace(d, gamma, **options), 1e-3, 1e-2)


# ------------------------------------------------------------------------------------------------------- rlax


def per_env(estimator, *arrays):
    """One of rlax's estimators, which take one sequence [T] at a time, on [T, B]."""
    return jax.vmap(estimator, in_axes=1, out_axes=1)(*(single(x) for x in arrays))


@pytest.mark.parametrize("columns", [["....."] * 3, layouts(5)], ids=["one episode", "with ends"])
def test_gae_equals_rlax(columns):
    d, gamma, lam = random_data(columns, seed=2), 0.97, 0.9
    # rlax's discount is 0 where an episode terminates; it has no truncation, but a lambda of 0 cuts the sum alike.
    discount, mixing = gamma * ~d.terminated, lam * ~d.truncated
    theirs = per_env(rlax.truncated_generalized_advantage_estimation, d.reward, discount, mixing, d.value)
    assert_equal_where_valid(d, [our_gae(d, gamma, lam)], [theirs])


@pytest.mark.parametrize("columns", [["....."] * 3, layouts(5)], ids=["one episode", "with ends"])
def test_lambda_returns_equal_rlax(columns):
    d, gamma, lam = random_data(columns, seed=15), 0.97, 0.9
    follow = np.random.default_rng(1).random(d.reward.shape) < 0.7
    mixing = lam * ~d.truncated * np.concatenate([follow[1:], np.ones_like(follow[:1])])
    theirs = per_env(rlax.lambda_returns, d.reward, gamma * ~d.terminated, d.value[1:], mixing)
    assert_equal_where_valid(d, [our_lambda_returns(d, gamma, lam, follow)], [theirs])


@pytest.mark.parametrize("columns", [["....."] * 3, layouts(5)], ids=["one episode", "with ends"])
@pytest.mark.parametrize("lam, rho_bar", [(1.0, 1.0), (0.8, 1.0), (1.0, 3.0)])
def test_vtrace_values_equal_rlax(columns, lam, rho_bar):
    d, gamma = random_data(columns, seed=3), 0.97
    discount, mixing, ratio = gamma * ~d.terminated, lam * ~d.truncated, np.exp(d.log_ratio)
    estimator = lambda *xs: rlax.vtrace(*xs, clip_rho_threshold=rho_bar)
    errors = per_env(estimator, d.value[:-1], d.value[1:], d.reward, discount, ratio, mixing)
    value, _ = our_vtrace(d, gamma, lam=lam, rho_bar=rho_bar)
    assert_equal_where_valid(d, [value], [np.asarray(errors) + d.value[:-1]])


@pytest.mark.parametrize("columns", [["....."] * 3, layouts(5)], ids=["one episode", "with ends"])
@pytest.mark.parametrize("rho_bar, pg_rho_bar", [(1.0, 1.0), (2.0, 0.7)])
def test_vtrace_advantages_equal_rlax(columns, rho_bar, pg_rho_bar):
    # With lambda < 1 rlax mixes V into the policy gradient's bootstrap; the paper and we take v_{s+1} as it is.
    d, gamma = random_data(columns, seed=4), 0.97
    discount, mixing, ratio = gamma * ~d.terminated, 1.0 * ~d.truncated, np.exp(d.log_ratio)
    estimator = lambda *xs: rlax.vtrace_td_error_and_advantage(
        *xs, clip_rho_threshold=rho_bar, clip_pg_rho_threshold=pg_rho_bar
    )
    theirs = per_env(estimator, d.value[:-1], d.value[1:], d.reward, discount, ratio, mixing)
    ours = our_vtrace(d, gamma, rho_bar=rho_bar, pg_rho_bar=pg_rho_bar)
    assert_equal_where_valid(d, ours, [np.asarray(theirs.errors) + d.value[:-1], theirs.pg_advantage])


@pytest.mark.parametrize("lam", [1.0, 0.8])
def test_corrected_gae_equals_rlax(lam):
    # rlax weights the policy gradient by the ratio of the first action, bounded by 1; ours leaves that to the loss.
    d, gamma = random_data(layouts(5), seed=13), 0.97
    ratio, mixing = np.exp(d.log_ratio), lam * ~d.truncated
    theirs = per_env(rlax.vtrace_td_error_and_advantage, d.value[:-1], d.value[1:], d.reward, gamma * ~d.terminated,
                     ratio, mixing)  # fmt: skip
    value, advantage = our_corrected_gae(d, gamma, lam)
    first = np.minimum(1, ratio)
    assert_equal_where_valid(
        d, [value, first * advantage], [np.asarray(theirs.errors) + d.value[:-1], theirs.pg_advantage]
    )


# ------------------------------------------------------------------------------------------ what must follow


@pytest.mark.parametrize("lam, bound", [(0.0, 1.0), (0.6, 1.0), (1.0, 1.0), (0.8, 1.5)])
def test_the_target_of_the_corrected_gae_is_that_of_vtrace(lam, bound):
    d = random_data(layouts(5), seed=14)
    expected = our_vtrace(d, 0.9, lam=lam, rho_bar=bound, c_bar=bound)
    assert_equal_where_valid(d, our_corrected_gae(d, 0.9, lam, bound)[:1], expected[:1])


def test_on_policy_the_corrected_gae_has_the_bits_of_the_gae():
    d = random_data(layouts(5), seed=15)
    d = d._replace(log_ratio=np.zeros_like(d.log_ratio))
    advantage = our_gae(d, 0.9, 0.8)
    value, corrected = our_corrected_gae(d, 0.9, 0.8)
    assert (corrected[d.valid] == advantage[d.valid]).all()
    assert_equal_where_valid(d, [value], [np.float32(d.value[:-1]) + advantage], 1e-6, 1e-6)


def test_vtrace_on_policy_without_clipping_is_the_n_step_return():
    d, gamma = random_data(layouts(5), seed=5), 0.9
    d = d._replace(log_ratio=np.zeros_like(d.log_ratio))
    n_step = np.zeros_like(d.reward)
    for t, b in np.argwhere(d.valid):
        end = last_step(d, t, b)
        rewards = sum(gamma ** (i - t) * d.reward[i, b] for i in range(t, end + 1))
        n_step[t, b] = rewards + gamma ** (end - t + 1) * value_after(d, end, b)
    value, advantage = our_vtrace(d, gamma, rho_bar=INF, c_bar=INF)
    assert_equal_where_valid(d, [value, advantage], [n_step, n_step - d.value[:-1]])


@pytest.mark.parametrize("lam", [0.0, 0.6, 1.0])
def test_vtrace_on_policy_corrects_values_by_the_gae(lam):
    d = random_data(layouts(5), seed=6)
    d = d._replace(log_ratio=np.zeros_like(d.log_ratio))
    value, _ = our_vtrace(d, 0.9, lam=lam)
    assert_equal_where_valid(d, [value - d.value[:-1]], [our_gae(d, 0.9, lam)])


def test_actions_that_the_policy_would_never_take_leave_the_value_as_it_is():
    d = random_data(layouts(4), seed=7)
    d = d._replace(log_ratio=np.full_like(d.log_ratio, -200.0))
    value, advantage = our_vtrace(d, 0.9)
    assert_equal_where_valid(d, [value, advantage], [d.value[:-1], np.zeros_like(advantage)])


def test_ignored_steps_reach_no_other_step():
    d = random_data(layouts(5), seed=8)
    other = random_data(layouts(5), seed=9)
    pick = lambda a, b: np.where(d.valid, a, b)
    value = d.value.copy()
    value[1:] = np.where(d.terminated, other.value[1:], value[1:])
    e = d._replace(value=value, reward=pick(d.reward, other.reward), log_ratio=pick(d.log_ratio, -d.log_ratio))
    assert (our_gae(d, 0.9, 0.8)[d.valid] == our_gae(e, 0.9, 0.8)[d.valid]).all()
    for ours, theirs in zip(our_vtrace(d, 0.9), our_vtrace(e, 0.9), strict=True):
        assert (ours[d.valid] == theirs[d.valid]).all()


def test_environments_do_not_mix():
    d, others = random_data(["..T", ".U.", "..."], seed=10), random_data(["Tx.", "...", "Ux."], seed=11)
    for b in range(3):
        e = Data(*(np.where(np.arange(3) == b, mine, theirs) for mine, theirs in zip(d, others, strict=True)))
        assert (our_gae(d, 0.9, 0.8)[:, b] == our_gae(e, 0.9, 0.8)[:, b]).all()
        for ours, theirs in zip(our_vtrace(d, 0.9), our_vtrace(e, 0.9), strict=True):
            assert (ours[:, b] == theirs[:, b]).all()


# -------------------------------------------------------------------------------------------------- by hand

# Three steps of an episode; gamma and lambda are 1/2, and every number is exact in binary.
VALUE = [1.0, 2.0, 4.0, 8.0]
REWARD = [10.0, 100.0, 1000.0]
RATIO = [2.0, 0.25, 0.5]  # pi / mu of the three actions; only the first is clipped

# delta  = 10 + 2/2 - 1 = 10,   100 + 4/2 - 2 = 100,   1000 + 8/2 - 4 = 1000, or 1000 - 4 = 996 if it terminates
# GAE    : A_2 = delta_2,  A_1 = 100 + A_2 / 4,  A_0 = 10 + A_1 / 4
GAE = {"T": [97.25, 349.0, 996.0], "U": [97.5, 350.0, 1000.0], ".": [97.5, 350.0, 1000.0]}
# V-trace: rho = c = 1, 1/4, 1/2;  v_2 = 4 + delta_2 / 2,  v_1 = 2 + 100/4 + (1/2)(1/4)(v_2 - 4),
#          v_0 = 1 + 10 + (1/2)(v_1 - 2)
VTRACE = {"T": [54.625, 89.25, 502.0], "U": [54.75, 89.5, 504.0], ".": [54.75, 89.5, 504.0]}
# advantage = rho (r + v_next / 2 - V):  10 + v_1/2 - 1,  (100 + v_2/2 - 2)/4,  (1000 + 8/2 - 4)/2 or (1000 - 4)/2
ADVANTAGE = {"T": [53.625, 87.25, 498.0], "U": [53.75, 87.5, 500.0], ".": [53.75, 87.5, 500.0]}


def by_hand(kind: str, after: list[str] | None = None) -> Data:
    """The three steps with that ending; then, if anything comes `after`, an ignored step and a new episode."""
    column = lambda x: np.array(x)[:, None]
    kinds = ["..", kind, *(after or [])]
    letters = np.array(list("".join(kinds)))
    more = len(letters) - 3
    return Data(
        column(VALUE + [-64.0] * more),
        np.log(column(RATIO + [16.0] * more)),
        column(REWARD + [-9000.0] * more),
        column(letters == "T"),
        column(letters == "U"),
        column(letters != "x"),
    )


@pytest.mark.parametrize("kind, after", [("T", []), ("T", ["x.."]), ("U", []), ("U", ["x.."]), (".", [])])
def test_three_steps_by_hand(kind, after):
    d = by_hand(kind, after)
    assert our_gae(d, 0.5, 0.5)[:3, 0].tolist() == GAE[kind]
    value, advantage = our_vtrace(d, 0.5)
    np.testing.assert_allclose(value[:3, 0], VTRACE[kind], rtol=1e-6)
    np.testing.assert_allclose(advantage[:3, 0], ADVANTAGE[kind], rtol=1e-6)


def shift(x: np.ndarray, by: int) -> np.ndarray:
    """The array one step late (1) or early (-1), the number at the edge staying."""
    return np.concatenate([x[:1], x[:-1]] if by == 1 else [x[1:], x[-1:]])


@pytest.mark.parametrize("by", [1, -1], ids=["late", "early"])
@pytest.mark.parametrize("kind", ["T", "U"])
@pytest.mark.parametrize("name", ["value", "log_ratio", "reward", "end"])
def test_three_steps_by_hand_tell_every_array_from_itself_one_step_off(name, kind, by):
    d = by_hand(kind, ["x."])
    names = ["terminated", "truncated"] if name == "end" else [name]
    wrong = d._replace(**{n: shift(getattr(d, n), by) for n in names})
    if name != "log_ratio":  # the advantage estimation knows no actions
        assert our_gae(wrong, 0.5, 0.5)[:3, 0].tolist() != GAE[kind]
    value, advantage = our_vtrace(wrong, 0.5)
    assert not np.allclose(value[:3, 0], VTRACE[kind], rtol=1e-3)
    assert not np.allclose(advantage[:3, 0], ADVANTAGE[kind], rtol=1e-3)


def test_only_termination_makes_the_next_state_worthless():
    target, error = td_errors(jnp.float32([[1.0], [2.0], [4.0]]), jnp.ones((2, 1)), jnp.array([[False], [True]]), 0.5)
    assert target[:, 0].tolist() == [2.0, 1.0]
    assert error[:, 0].tolist() == [1.0, -1.0]


def test_discounted_sum_by_hand():
    x, discount = jnp.float32([[1.0], [10.0], [100.0]]), jnp.float32([[0.5], [0.25], [0.125]])
    assert discounted_sum(x, discount)[:, 0].tolist() == [1 + 0.5 * 35, 10 + 0.25 * 100, 100.0]


@pytest.mark.parametrize("wrong", ["value", "reward", "terminated", "truncated"])
def test_shapes_that_do_not_fit_are_refused(wrong):
    d = by_hand("T")
    d = d._replace(**{wrong: getattr(d, wrong)[:-1]})
    with pytest.raises(AssertionError):
        our_gae(d, 0.5, 0.5)
    with pytest.raises(AssertionError):
        our_vtrace(d, 0.5)
