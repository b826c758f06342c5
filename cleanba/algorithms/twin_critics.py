"""What SAC and TD3 share: two critics of a policy over real-valued actions (Fujimoto et al. 2018)."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from cleanba.algorithm import Metrics
from cleanba.algorithms.gradient_steps import REPLAY_LOGGED, with_count
from cleanba.algorithms.off_policy import OffPolicy
from cleanba.ops import replay
from cleanba.ops.losses import squared_error
from cleanba.rollout import NetworkParams

CRITICS_LOGGED = REPLAY_LOGGED | {
    "losses/q_loss": "half the squared error between action values and their targets, added up over the critics",
    "losses/q_values": "mean action value of the replayed actions",
    "losses/grad_norm": "global norm of the critics' gradient",
    "losses/policy_loss": "what the policy minimises",
    "losses/policy_grad_norm": "global norm of the policy's gradient",
}
"""What SAC and TD3 log of the gradient steps of an update, once they learn: name -> meaning."""


class ActingParams(NamedTuple):
    """What acting needs of the learner's state: the policy, and the critics, whose values films show."""

    policy: NetworkParams
    critics: NetworkParams
    updates: jax.Array  # [] int32: before learning starts, actions may be uniform


def td_loss(e: OffPolicy, t: replay.Transition, values: jax.Array, y: jax.Array) -> tuple[jax.Array, Metrics]:
    """sum_i (Q_i(s, a) - y)^2 / 2 over the critics: this shard's part of the mean over the batch of all shards.

    t [N, ...], values [C, N] of the C critics, y [N] -> [], metrics.
    """
    mean = lambda x: (t.weight * x).sum() / e.batch_size
    loss = mean(squared_error(values, jnp.broadcast_to(y, values.shape)).sum(0))
    return loss, {"losses/q_loss": loss, "losses/q_values": mean(values.mean(0))}


def policy_metrics(sums: Metrics, steps: jax.Array) -> Metrics:
    """The policy's metrics, summed over its gradient steps ([] int32), by names that differ from the critics'."""
    named = {name.replace("losses/grad_norm", "losses/policy_grad_norm"): x for name, x in sums.items()}
    return with_count(named, steps)
