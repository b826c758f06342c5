"""Cleanba: distributed actor-learner reinforcement learning whose results do not depend on where they were computed."""

__version__ = "0.1.0"
