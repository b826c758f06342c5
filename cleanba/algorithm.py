"""The waist between what is learned and how it runs: five pure functions.

The runtime never sees a loss; an algorithm never sees a thread, a queue or a device.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from cleanba.rollout import PyTree

Metrics = dict[str, Any]


class Algorithm(NamedTuple):
    """No base class, registry or callback: to add an algorithm, write these five and call `train`."""

    init: Callable[..., PyTree]
    """key -> state: parameters, optimiser state, counters, whatever the algorithm needs"""
    initial_carry: Callable[[int], PyTree]
    """batch size -> recurrent carry; () for a feed-forward policy"""
    act: Callable[..., tuple[Any, PyTree, PyTree]]
    """actor params, carry, obs [B, ...], first [B], key, explore -> action [B], carry, extras [B, ...]"""
    update: Callable[..., tuple[PyTree, Metrics]]
    """state, this device's shards of the rollout [K', T(+1), B, ...], shard axis, key -> state, metrics (scalars)"""
    actor_params: Callable[[PyTree], PyTree]
    """state -> what `act` needs"""
