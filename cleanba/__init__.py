"""Cleanba: distributed actor-learner reinforcement learning whose results do not depend on where they were computed.

    run = cleanba.train(cleanba.ppo("CartPole-v1", seed=1), run_dir="runs/a")
    agent = cleanba.load("runs/a")
    action = agent.act(obs)

`docs/start/python.md` has the rest.  Importing this package imports nothing else, not even JAX, until a name is used.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cleanba.api import (
        Agent,
        Curve,
        Evaluation,
        Export,
        Failure,
        Interrupted,
        Run,
        Spec,
        UsageError,
        dqn,
        evaluate,
        impala,
        load,
        ppo,
        pqn,
        r2d2,
        sac,
        specify,
        td3,
        train,
    )

__version__ = "0.1.0"

__all__ = [
    "Agent",
    "Curve",
    "Evaluation",
    "Export",
    "Failure",
    "Interrupted",
    "Run",
    "Spec",
    "UsageError",
    "dqn",
    "evaluate",
    "impala",
    "load",
    "ppo",
    "pqn",
    "r2d2",
    "sac",
    "specify",
    "td3",
    "train",
]


def __getattr__(name: str) -> object:
    """The names above, imported when they are first used."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from cleanba import api

    globals()[name] = found = getattr(api, name)
    return found


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
