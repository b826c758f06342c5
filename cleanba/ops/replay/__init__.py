"""Replay memory: stores rollouts and draws minibatches from them.

`ring.py` keeps steps and draws n-step transitions uniformly.  `priorities.py` draws places of a memory in proportion to
their priorities; `transitions.py` keeps priorities for a ring's transitions, `sequences.py` for sequences of its steps.
"""

from cleanba.ops.replay.priorities import (
    TRIES,
    Drawn,
    Priorities,
    assign,
    draw,
    importance,
    in_units,
    no_priorities,
    random_words,
    replace,
)
from cleanba.ops.replay.ring import (
    Indices,
    Ring,
    Rows,
    Transition,
    Window,
    acceptable,
    init,
    n_step,
    sample_indices,
    take,
    uniform,
    write,
)
from cleanba.ops.replay.sequences import (
    SequenceMemory,
    Sequences,
    StartsRing,
    init_sequences,
    take_sequences,
    write_sequences,
)
from cleanba.ops.replay.transitions import PrioritisedRing, init_prioritised, transitions_at, write_prioritised

__all__ = [
    "TRIES",
    "Drawn",
    "Indices",
    "Priorities",
    "PrioritisedRing",
    "Ring",
    "Rows",
    "SequenceMemory",
    "Sequences",
    "StartsRing",
    "Transition",
    "Window",
    "acceptable",
    "assign",
    "draw",
    "importance",
    "in_units",
    "init",
    "init_prioritised",
    "init_sequences",
    "n_step",
    "no_priorities",
    "random_words",
    "replace",
    "sample_indices",
    "take",
    "take_sequences",
    "transitions_at",
    "uniform",
    "write",
    "write_prioritised",
    "write_sequences",
]
