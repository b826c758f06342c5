"""Definitions as the papers write them, slow and in float64, for the tests to compare with."""

from typing import NamedTuple

import numpy as np


def finite_difference(fn, x: np.ndarray, h: float = 1e-6) -> np.ndarray:
    """The gradient of a scalar function at x, by central differences in float64."""
    x = np.asarray(x, np.float64)
    basis = np.eye(x.size).reshape(x.size, *x.shape)
    return np.array([(fn(x + h * e) - fn(x - h * e)) / (2 * h) for e in basis]).reshape(x.shape)


def log_softmax(logits: np.ndarray) -> np.ndarray:
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


class Data(NamedTuple):
    """The inputs of the estimators, as float64 and bool, and which of their results count."""

    value: np.ndarray  # [T+1, B]
    log_ratio: np.ndarray  # [T, B]
    reward: np.ndarray
    terminated: np.ndarray
    truncated: np.ndarray
    valid: np.ndarray


def last_step(d: Data, t: int, b: int) -> int:
    """The last step of the episode that step t belongs to, or of the rollout."""
    while t < len(d.reward) - 1 and not (d.terminated[t, b] or d.truncated[t, b]):
        t += 1
    return t


def value_after(d: Data, t: int, b: int) -> float:
    return 0.0 if d.terminated[t, b] else d.value[t + 1, b]


def slow_gae(d: Data, gamma: float, lam: float) -> np.ndarray:
    """(1 - lam) (A^1 + lam A^2 + ...), where A^k = r_t + ... + gamma^{k-1} r_{t+k-1} + gamma^k V(s_{t+k}) - V(s_t).

    If an episode ends after N steps, A^N is the longest estimate, and takes the weight of all longer ones.
    """
    advantage = np.zeros_like(d.reward)
    for t, b in np.argwhere(d.valid):
        n = last_step(d, t, b) - t + 1
        for k in range(1, n + 1):
            rewards = sum(gamma**i * d.reward[t + i, b] for i in range(k))
            estimate = rewards + gamma**k * value_after(d, t + k - 1, b) - d.value[t, b]
            advantage[t, b] += lam ** (k - 1) * (1 - lam if k < n else 1.0) * estimate
    return advantage


def slow_lambda_returns(d: Data, gamma: float, lam: float, follow: np.ndarray | None = None) -> np.ndarray:
    """The sum over n of w_n G^n, where G^n = r_t + ... + gamma^{n-1} r_{t+n-1} + gamma^n V(s_{t+n}).

    w_n = lam_{t+1} ... lam_{t+n-1} (1 - lam_{t+n}); lam is 0 where the episode or the rollout has ended, or not follow.
    """
    returns = np.zeros_like(d.reward)
    for t, b in np.argwhere(d.valid):
        last, weight = last_step(d, t, b), 1.0
        for n in range(1, last - t + 2):
            mixing = lam if t + n <= last and (follow is None or follow[t + n, b]) else 0.0
            rewards = sum(gamma**i * d.reward[t + i, b] for i in range(n))
            returns[t, b] += weight * (1 - mixing) * (rewards + gamma**n * value_after(d, t + n - 1, b))
            weight *= mixing
    return returns


def slow_vtrace(d: Data, gamma, lam=1.0, rho_bar=1.0, c_bar=1.0, pg_rho_bar=None):
    """v_s = V(x_s) + sum_t gamma^{t-s} (prod_{s <= i < t} c_i) delta_t V (Espeholt et al. 2018, eq. 1)."""
    ratio = np.exp(d.log_ratio)
    rho, c = np.minimum(rho_bar, ratio), lam * np.minimum(c_bar, ratio)
    v, advantage = np.zeros_like(d.reward), np.zeros_like(d.reward)
    for s, b in np.argwhere(d.valid):
        v[s, b] = d.value[s, b]
        for t in range(s, last_step(d, s, b) + 1):
            delta = rho[t, b] * (d.reward[t, b] + gamma * value_after(d, t, b) - d.value[t, b])
            v[s, b] += gamma ** (t - s) * np.prod([c[i, b] for i in range(s, t)]) * delta
    for s, b in np.argwhere(d.valid):
        v_next = value_after(d, s, b) if s == last_step(d, s, b) else v[s + 1, b]
        weight = min(rho_bar if pg_rho_bar is None else pg_rho_bar, ratio[s, b])
        advantage[s, b] = weight * (d.reward[s, b] + gamma * v_next - d.value[s, b])
    return v, advantage


def slow_corrected_gae(d: Data, gamma: float, lam: float, rho_bar: float = 1.0) -> tuple[np.ndarray, np.ndarray]:
    """A_s = sum_t (gamma lam)^{t-s} (prod_{s < i <= t} rho_i) delta_t, rho = min(rho_bar, ratio) -> V + rho A, A."""
    rho, advantage = np.minimum(rho_bar, np.exp(d.log_ratio)), np.zeros_like(d.reward)
    for s, b in np.argwhere(d.valid):
        for t in range(s, last_step(d, s, b) + 1):
            delta = d.reward[t, b] + gamma * value_after(d, t, b) - d.value[t, b]
            advantage[s, b] += (gamma * lam) ** (t - s) * np.prod([rho[i, b] for i in range(s + 1, t + 1)]) * delta
    return d.value[:-1] + rho * advantage, advantage
