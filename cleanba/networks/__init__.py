"""Networks by composition: torso (what is seen) -> core (what is remembered) -> heads (what is done and expected)."""

from cleanba.networks.actor_critic import ActorCritic, make_actor_critic

__all__ = ["ActorCritic", "make_actor_critic"]
