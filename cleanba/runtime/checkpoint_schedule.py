"""Which updates are followed by a checkpoint, or by the end of the run.  All processes decide alike."""

import time
from typing import Any, NamedTuple

import numpy as np

from cleanba.errors import Interrupted
from cleanba.runtime.devices import Devices
from cleanba.runtime.processes import gather_over_processes
from cleanba.runtime.progress import Progress
from cleanba.runtime.schedule import Schedule

FIRST_SECONDS = 10.0  # from the start to the first checkpoint, where checkpoints are taken by time
SECONDS = 60.0  # between checkpoints, at least
MOST_SECONDS = 3600.0  # and at most
SHARE = 0.01  # of the run's time that checkpoints may take
MEET_SECONDS = 2.0  # between the meetings of several processes
MEET_UPDATES = 1024  # updates between meetings, at most, as updates may become slower


class Decision(NamedTuple):
    """What follows an update."""

    save: bool
    """whether a checkpoint is taken"""
    ending: BaseException | None
    """the signal or the error of an actor that ends the run after it; None if the run continues"""
    finished: bool = False
    """whether the run is finished after it, as the target return was reached"""


class CheckpointSchedule:
    """Decides after every update whether a checkpoint is taken.

    A single process goes by its clock and the signals it has received.  Several must agree, so they meet every two
    seconds or so: the main process's clock counts, and a signal that one received holds for all.
    """

    def __init__(
        self,
        schedule: Schedule,
        frequency: int | None,
        whole_epochs: bool,
        devices: Devices,
        progress: Progress[Any],
        every: int = 0,
        first_to_learn: int = 0,
    ):
        """`frequency` is in updates; 0 means never, None by time.  With `whole_epochs`, only at ends of epochs.

        every: whatever `frequency` says, a checkpoint is taken at each multiple of this many updates; 0: at none.
        first_to_learn: the first update with gradient steps, from which on updates are slower.
        """
        self._every = every
        # They also meet after these: the second one's time shows how slow updates are from then on.
        self._slower = first_to_learn, first_to_learn + 1
        self._schedule, self._frequency, self._whole_epochs = schedule, frequency, whole_epochs
        self._devices, self._progress = devices, progress
        self._next = time.perf_counter() + FIRST_SECONDS
        self._meeting, self._gap, self._met = schedule.first, 1, time.perf_counter()
        self._met_after = schedule.first - 1  # the update after which they last met
        self._agreed: Interrupted | None = None  # among several processes

    def can_save(self, update: int) -> bool:
        """Whether a run can continue from a checkpoint taken after this update."""
        return not self._whole_epochs or self._schedule.ends_epoch(update)

    def _saveable_before(self, update: int) -> int:
        """The last update before this one after which a checkpoint can be taken; 0 if there is none."""
        e = self._schedule.env_epoch
        return update - 1 if not self._whole_epochs else (update - 1) // e * e if e else 0

    @property
    def _ending(self) -> BaseException | None:
        """Why the run ends after the current update, if it does: what several processes agreed on, or one knows."""
        if self._devices.num_processes > 1:
            return self._agreed
        return self._progress.interrupt or self._progress.failure

    def ends_now(self, update: int) -> BaseException | None:
        """Why the run ends after this update, without waiting for the next rollouts; None if it does not."""
        return self._ending if self._devices.num_processes == 1 and self.can_save(update) else None

    def decide(self, update: int) -> Decision:
        """What follows this update.  All processes must call this after every update."""
        f, before = self._frequency, self._saveable_before(update)
        passed = lambda n: n > 0 and update // n > before // n  # a multiple of n since the last that could be saved
        due = update == self._schedule.last or passed(f or 0) or passed(self._every)
        if f is None and self._whole_epochs:
            due |= self._schedule.ends_epoch(update)
        now = time.perf_counter()
        timed = f is None and now >= self._next
        if self._devices.num_processes > 1:
            timed = update == self._meeting and self._meet(update, timed, now)
        ending, reached = self._ending, self._progress.reached
        save = self.can_save(update) and (due or timed or ending is not None or reached)
        return Decision(save, ending if save else None, save and reached)

    def _meet(self, update: int, timed: bool, now: float) -> bool:
        """Whether a checkpoint is due by the main process's clock.  Afterwards all processes know of a signal."""
        seconds = (now - self._met) / (update - self._met_after)
        self._met, self._met_after = now, update
        gap = min(max(1, int(MEET_SECONDS / max(seconds, 1e-9))), 2 * self._gap, MEET_UPDATES)
        heard = self._progress.interrupt
        rows = gather_over_processes(np.array([heard.signum if heard else 0, timed, gap], np.int64))
        self._gap = int(rows[0, 2])
        self._meeting = min([update + self._gap, *(n for n in self._slower if n > update)])
        signalled = [process for process, row in enumerate(rows) if row[0]]
        if signalled:
            self._agreed = heard or Interrupted(int(rows[signalled[0], 0]), f" in process {signalled[0]}")
        return bool(rows[0, 1])

    def note_saved(self, seconds: float) -> None:
        """A checkpoint was taken.  `seconds` were spent on it and on writing the one before."""
        self._next = time.perf_counter() + min(max(SECONDS, seconds / SHARE), MOST_SECONDS)
