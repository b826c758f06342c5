"""Networks: torso (observations -> features) -> optional recurrent core -> heads (policy, value, action values)."""

from cleanba.networks.action_values import make_action_values
from cleanba.networks.actor_critic import ActorCritic, make_actor_critic
from cleanba.networks.continuous import make_critics, make_policy
from cleanba.networks.encoder import suitable_network

__all__ = [
    "ActorCritic",
    "make_action_values",
    "make_actor_critic",
    "make_critics",
    "make_policy",
    "suitable_network",
]
