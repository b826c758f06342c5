"""Return and advantage estimators over the time index of `rollout.py`.

All of them bootstrap with the value of the next observation unless the step *terminated* its episode, and stop the
recursion where an episode ended, terminated or truncated.
"""

from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
from jax import lax


def discounted_sum(x: jax.Array, discount: jax.Array) -> jax.Array:
    """y_t = x_t + d_t y_{t+1}, with y_T = 0 (Sutton & Barto 2018, eq. 3.9).  [T, B], [T, B] -> [T, B]."""
    chex.assert_equal_shape([x, discount])

    def step(y: jax.Array, inputs: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        x_t, d_t = inputs
        y = x_t + d_t * y
        return y, y

    _, y = lax.scan(step, jnp.zeros_like(x[0]), (x, discount), reverse=True)
    return y


def returns_so_far(reward: jax.Array, first: jax.Array, valid: jax.Array, before: jax.Array, gamma: float) -> jax.Array:
    """G_t = r_t + gamma G_{t-1}, the discounted sum of an episode's rewards so far; 0 where the action was ignored.

    reward, first, valid [T, B]; before [B] is G before the first of these steps -> [T, B].  Where `first`, an episode
    begins from 0.
    """
    chex.assert_equal_shape([reward, first, valid])

    def step(g: jax.Array, inputs: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        reward_t, first_t, valid_t = inputs
        g = jnp.where(valid_t, reward_t + gamma * jnp.where(first_t, 0.0, g), 0.0)
        return g, g

    return lax.scan(step, before, (reward, first, valid))[1]


def td_errors(value: jax.Array, reward: jax.Array, terminated: jax.Array, gamma: float) -> tuple[jax.Array, jax.Array]:
    """Bootstrapped targets r_t + gamma (1 - terminated_t) V(s_{t+1}) and their difference to V(s_t).

    value [T+1, B], reward [T, B], terminated [T, B] bool -> target [T, B], error [T, B].
    """
    chex.assert_equal_shape([value[1:], reward, terminated])
    target = reward + gamma * jnp.where(terminated, 0.0, value[1:])
    return target, target - value[:-1]


def gae(
    value: jax.Array, reward: jax.Array, terminated: jax.Array, truncated: jax.Array, gamma: float, lam: float
) -> jax.Array:
    """Generalised advantage estimation (Schulman et al. 2016, eq. 16), over episodes that end inside the rollout.

        A_t = delta_t + gamma lam (1 - ended_t) A_{t+1},   delta_t = r_t + gamma (1 - terminated_t) V_{t+1} - V_t

    value [T+1, B]; reward, terminated, truncated [T, B] -> advantage [T, B].  At a step whose action was ignored the
    result is meaningless; it reaches no other step, and the caller masks it.
    """
    chex.assert_equal_shape([value[1:], reward, terminated, truncated])
    _, delta = td_errors(value, reward, terminated, gamma)
    return discounted_sum(delta, jnp.where(terminated | truncated, 0.0, gamma * lam))


def n_step_targets(
    value: jax.Array, reward: jax.Array, terminated: jax.Array, stops: jax.Array, n: int, gamma: float
) -> jax.Array:
    """Targets of n rewards and a bootstrap, inside a sequence (Sutton & Barto 2018, eq. 7.1).

        G_t = sum_{k<m} gamma^k r_{t+k} + gamma^m (1 - terminated_{t+m-1}) V(s_{t+m})

    m is n, or fewer: the sum ends with the first step that `stops`, or with the sequence.  value [T+1, B] is
    V(s_0) ... V(s_T); reward, terminated, stops [T, B] -> [T, B].  A step that terminates an episode is one that stops.
    """
    chex.assert_equal_shape([value[1:], reward, terminated, stops])
    after = value[1:]
    target = after
    for _ in range(min(n, len(reward))):  # more rewards than the sequence has change nothing
        target = reward + gamma * jnp.where(terminated, 0.0, after)
        after = jnp.where(stops, value[1:], jnp.concatenate([target[1:], value[-1:]]))
    return target


def rescale(x: jax.Array, eps: float) -> jax.Array:
    """h(x) = sign(x) (sqrt(|x| + 1) - 1) + eps x (Pohlen et al. 2018, section 3.2).  [...] -> [...]."""
    # sqrt(y + 1) - 1 = y / (sqrt(y + 1) + 1), which loses no digits where y is small.
    return x / (jnp.sqrt(jnp.abs(x) + 1.0) + 1.0) + eps * x


def unscale(y: jax.Array, eps: float) -> jax.Array:
    """The inverse of `rescale` (Pohlen et al. 2018, proposition A.2).  [...] -> [...].

    h^-1(y) = sign(y) (z^2 - 1),   z = (sqrt(1 + 4 eps (|y| + 1 + eps)) - 1) / (2 eps)
    """
    # w = z - 1 solves eps w^2 + (1 + 2 eps) w = |y|.  In this form no digits are lost, and eps may be 0.
    a, b = jnp.abs(y), 1.0 + 2.0 * eps
    w = 2.0 * a / (b + jnp.sqrt(b * b + 4.0 * eps * a))
    return jnp.sign(y) * w * (w + 2.0)


def lambda_returns(
    value: jax.Array,
    reward: jax.Array,
    terminated: jax.Array,
    truncated: jax.Array,
    gamma: float,
    lam: float,
    follow: jax.Array | None = None,
) -> jax.Array:
    """Lambda-returns of Q-learning (Gallici et al. 2024, section 3.3; without `follow`, Peng & Williams 1996, eq. 9).

        G_t = r_t + gamma (1 - terminated_t) [lam_{t+1} G_{t+1} + (1 - lam_{t+1}) V_{t+1}],   V_t = max_a Q(s_t, a)

    value V [T+1, B]; reward, terminated, truncated [T, B] -> G [T, B].  lam_{t+1} is `lam` while the episode goes on
    within the rollout, else 0, so that a truncated episode and the rollout's end bootstrap from V_{t+1} alone.

    follow [T, B] bool, if given: lam_t is 0 too where it is false.  With "a_t is the best action" this is Watkins' cut
    (Watkins 1989; Sutton & Barto 2018, section 12.10): rewards after another action say nothing of the greedy policy.

    At a step whose action was ignored the result is meaningless; it reaches no other step, and the caller masks it.
    """
    chex.assert_equal_shape([value[1:], reward, terminated, truncated])
    _, delta = td_errors(value, reward, terminated, gamma)
    traced = ~(terminated | truncated)
    if follow is not None:
        chex.assert_equal_shape([follow, reward])
        traced &= jnp.concatenate([follow[1:], jnp.ones_like(follow[:1])])
    return value[:-1] + discounted_sum(delta, jnp.where(traced, gamma * lam, 0.0))


class VTrace(NamedTuple):
    """What V-trace computes from rollouts of another policy."""

    value: jax.Array  # [T, B]  v_s, the target of the value function
    advantage: jax.Array  # [T, B]  rho_s (r_s + gamma v_{s+1} - V(x_s)), the policy gradient's weight


def vtrace(
    value: jax.Array,
    log_ratio: jax.Array,
    reward: jax.Array,
    terminated: jax.Array,
    truncated: jax.Array,
    gamma: float,
    lam: float = 1.0,
    rho_bar: float = 1.0,
    c_bar: float = 1.0,
    pg_rho_bar: float | None = None,
) -> VTrace:
    """V-trace targets and advantages (Espeholt et al. 2018, eq. 1 and section 4.2).

        v_s = V(x_s) + sum_{t >= s} gamma^{t-s} (prod_{i=s}^{t-1} c_i) delta_t V
        delta_t V = rho_t (r_t + gamma V(x_{t+1}) - V(x_t))
        rho_t = min(rho_bar, ratio_t),  c_i = lam min(c_bar, ratio_i)

    value [T+1, B]; log_ratio [T, B] is log pi(a_t|x_t) - log mu(a_t|x_t); reward, terminated, truncated [T, B].
    `rho_bar`, `c_bar` may be infinite for no clipping; `pg_rho_bar` clips the policy gradient's ratio and defaults to
    `rho_bar`.  After an episode's end, or beyond the rollout, v_{s+1} is the plain V(x_{s+1}), or 0 if terminated.
    """
    chex.assert_equal_shape([value[1:], log_ratio, reward, terminated, truncated])
    ratio = jnp.exp(log_ratio)
    rho, c = jnp.minimum(rho_bar, ratio), lam * jnp.minimum(c_bar, ratio)
    pg_rho = rho if pg_rho_bar is None else jnp.minimum(pg_rho_bar, ratio)
    ended = terminated | truncated

    _, delta = td_errors(value, reward, terminated, gamma)
    correction = discounted_sum(rho * delta, jnp.where(ended, 0.0, gamma * c))  # v_s - V(x_s)
    target = value[:-1] + correction

    next_correction = jnp.concatenate([correction[1:], jnp.zeros_like(correction[:1])])
    v_next = value[1:] + jnp.where(ended, 0.0, next_correction)
    advantage = pg_rho * (reward + gamma * jnp.where(terminated, 0.0, v_next) - value[:-1])
    return VTrace(target, advantage)


def corrected_gae(
    value: jax.Array,
    log_ratio: jax.Array,
    reward: jax.Array,
    terminated: jax.Array,
    truncated: jax.Array,
    gamma: float,
    lam: float,
    rho_bar: float = 1.0,
) -> VTrace:
    """`gae` corrected for rollouts of another policy: V-trace whose advantages are mixed by lambda, too.

        A_t = delta_t + gamma lam (1 - ended_t) rho_{t+1} A_{t+1},   v_t = V_t + rho_t A_t
        rho_t = min(rho_bar, ratio_t)

    v is V-trace's target with both bounds equal to `rho_bar` (Espeholt et al. 2018, eq. 1).  A_t has no
    factor rho_t, because the policy's loss multiplies by that ratio (as `rlax.vtrace_td_error_and_advantage` does).  If
    all ratios are 1, A has the bits of `gae`.  With `rho_bar` 1, each step multiplies a trace by 1 - TV on average, as
    E min(1, ratio) = 1 - TV, the total variation between the two policies.

    Arguments and shapes are those of `vtrace`: value [T+1, B], the others [T, B] -> [T, B] each.  Ignored steps need a
    finite `log_ratio`.
    """
    chex.assert_equal_shape([value[1:], log_ratio, reward, terminated, truncated])
    rho = jnp.minimum(rho_bar, jnp.exp(log_ratio))
    rho_next = jnp.concatenate([rho[1:], jnp.ones_like(rho[:1])])
    _, delta = td_errors(value, reward, terminated, gamma)
    advantage = discounted_sum(delta, jnp.where(terminated | truncated, 0.0, gamma * lam) * rho_next)
    return VTrace(value[:-1] + rho * advantage, advantage)
