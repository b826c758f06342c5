"""What the learner thread reports to the main thread, which supervises it."""

from dataclasses import dataclass, field
from typing import Generic

from cleanba.algorithm import S
from cleanba.errors import Interrupted
from cleanba.runtime.metrics import Status
from cleanba.runtime.statistics import Statistics


@dataclass
class Progress(Generic[S]):
    """What the learner thread has done so far.  It also describes a run that ends early."""

    status: Status
    statistics: Statistics = field(default_factory=Statistics)
    state: S | None = None  # None while it is donated to an update
    begun: bool = False  # the rollouts of this start's first update have arrived
    update: int = 0
    global_step: int = 0
    lag: int | None = None
    sps: float | None = None
    saved_update: int = 0  # the update of the last checkpoint, even if that is still being written
    seconds_before: float = 0.0  # how long earlier starts of the run took
    update_seconds: float | None = None  # mean time of an update; None before the second
    interrupt: Interrupted | None = None  # the signal after which the run ends with a checkpoint
    failure: BaseException | None = None  # the error of an actor after which the run ends with a checkpoint
    reached: bool = False  # whether the target return was reached, at a log point
    complete: bool = False  # all updates are made; at most the last checkpoint is still being written
    learner_ended: bool = False

    def seconds_until(self, update: int) -> float:
        """The estimated time until this update is done; infinite if it cannot be estimated yet."""
        ahead = max(0, update - self.update)
        return ahead * self.update_seconds if self.update_seconds is not None else float("inf") if ahead else 0.0
