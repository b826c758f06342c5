"""What the learner thread leaves for the main thread, which supervises it."""

from dataclasses import dataclass, field

from cleanba.errors import Interrupted
from cleanba.rollout import PyTree
from cleanba.runtime.metrics import Status
from cleanba.runtime.statistics import Statistics


@dataclass
class Progress:
    """What the learner thread leaves for the supervisor, so that a run that ends early can still be described."""

    status: Status
    statistics: Statistics = field(default_factory=Statistics)
    state: PyTree = None  # None while an update has it
    update: int = 0
    global_step: int = 0
    lag: int | None = None
    sps: float | None = None
    saved_update: int = 0  # the last update that a checkpoint holds, even if that is still being written
    seconds_before: float = 0.0  # that the run took before it was interrupted
    update_seconds: float | None = None  # mean time of an update; None before the second
    ending: Interrupted | None = None  # end after the next checkpoint, which comes soon

    def seconds_until(self, update: int) -> float:
        """How long it will take to be done with that update; infinite as long as nobody knows."""
        ahead = max(0, update - self.update)
        return ahead * self.update_seconds if self.update_seconds is not None else float("inf") if ahead else 0.0
