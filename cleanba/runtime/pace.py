"""After which updates checkpoints are taken: all processes come to the same answer, and few updates ask for it."""

import time
from typing import NamedTuple

import numpy as np

from cleanba.errors import Interrupted
from cleanba.runtime.devices import Devices
from cleanba.runtime.processes import gather_over_processes
from cleanba.runtime.progress import Progress
from cleanba.runtime.schedule import Schedule

FIRST_SECONDS = 10.0  # until the first checkpoint of a start of the run, where they go by time
SECONDS = 60.0  # between checkpoints
MOST_SECONDS = 3600.0
SHARE = 0.01  # of the run's time, which checkpoints may take
MEET_SECONDS = 2.0  # between meetings of several processes
MEET_UPDATES = 1024  # after which they meet at the latest: updates may become slower


class Verdict(NamedTuple):
    """What follows an update."""

    save: bool
    """a checkpoint"""
    ending: Interrupted | None
    """and then the end of the run"""


class Pace:
    """Says after every update whether it is followed by a checkpoint.

    One process looks at its clock and at the signals it has heard.  Several must agree, so they meet, every two seconds
    or so: the main process's clock counts, and whoever has heard a signal tells the others.
    """

    def __init__(
        self, schedule: Schedule, frequency: int | None, whole_epochs: bool, devices: Devices, progress: Progress
    ):
        """`frequency` in updates, 0 for never, None by time; `whole_epochs` where only the end of an epoch will do."""
        self._schedule, self._frequency, self._whole_epochs = schedule, frequency, whole_epochs
        self._devices, self._progress = devices, progress
        self._next = time.perf_counter() + FIRST_SECONDS
        self._meeting, self._gap, self._met = schedule.first, 1, time.perf_counter()
        self._agreed: Interrupted | None = None  # among several processes

    def can_save(self, update: int) -> bool:
        """Whether a run can go on from a checkpoint taken after that update."""
        return not self._whole_epochs or self._schedule.ends_epoch(update)

    def _saveable_before(self, update: int) -> int:
        """The last update before that one after which `can_save`; 0 for none."""
        e = self._schedule.env_epoch
        return update - 1 if not self._whole_epochs else (update - 1) // e * e if e else 0

    def ends_now(self, update: int) -> bool:
        """Whether this process need not wait for what comes after that update, but shall end."""
        return self._devices.num_processes == 1 and self._progress.ending is not None and self.can_save(update)

    def after(self, update: int) -> Verdict:
        """All processes must ask this after every update."""
        f = self._frequency
        due = update == self._schedule.last
        if f is not None:
            due |= f > 0 and update // f > self._saveable_before(update) // f
        elif self._whole_epochs:
            due |= self._schedule.ends_epoch(update)
        now = time.perf_counter()
        timed = f is None and now >= self._next
        if self._devices.num_processes > 1:
            timed = update == self._meeting and self._meet(update, timed, now)
        ending = self._agreed if self._devices.num_processes > 1 else self._progress.ending
        save = self.can_save(update) and (due or timed or ending is not None)
        return Verdict(save, ending if save else None)

    def _meet(self, update: int, timed: bool, now: float) -> bool:
        """Whether the main process's clock says that a checkpoint is due.  Afterwards all know of signals."""
        seconds, self._met = (now - self._met) / self._gap, now
        gap = min(max(1, int(MEET_SECONDS / max(seconds, 1e-9))), 2 * self._gap, MEET_UPDATES)
        heard = self._progress.ending
        rows = gather_over_processes(np.array([heard.signum if heard else 0, timed, gap], np.int64))
        self._gap = int(rows[0, 2])
        self._meeting = update + self._gap
        signalled = [process for process, row in enumerate(rows) if row[0]]
        if signalled:
            self._agreed = heard or Interrupted(int(rows[signalled[0], 0]), f" in process {signalled[0]}")
        return bool(rows[0, 1])

    def saved(self, seconds: float) -> None:
        """A checkpoint has been taken, and so many seconds went to it and to writing the one before."""
        self._next = time.perf_counter() + min(max(SECONDS, seconds / SHARE), MOST_SECONDS)
