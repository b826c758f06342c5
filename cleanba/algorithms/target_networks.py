"""Target networks, which follow the networks that are trained."""

import jax
import jax.numpy as jnp

from cleanba.networks.layers import ConvKind
from cleanba.rollout import PyTree
from cleanba.shards import ShardAxis


def polyak_update(
    shards: ShardAxis, kind: ConvKind, tau: float, now: jax.Array, params: PyTree, targets: PyTree
) -> PyTree:
    """Target = tau params + (1 - tau) target, if `now` ([] bool); else the targets as they are.

    Leaves of `params`, of `targets` and of the result have the same shapes (Lillicrap et al. 2015, algorithm 1).
    """
    if kind == "direct":
        from cleanba.ops import descent

        moved = descent.follow(jnp.where(now, tau, 0.0), *map(jax.tree.leaves, (params, targets)))
        return jax.tree.unflatten(jax.tree.structure(targets), moved)

    def move(now: jax.Array, params: PyTree, targets: PyTree) -> PyTree:
        return jax.tree.map(lambda p, q: jnp.where(now, tau * p + (1 - tau) * q, q), params, targets)

    return shards.isolate(move, now, params, targets)
