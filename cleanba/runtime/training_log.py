"""Log points: what a run counts and times, by the names that it is logged under."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import jax
import numpy as np

from cleanba.algorithm import Metrics
from cleanba.errors import NotFinite, warn_once
from cleanba.files import Json
from cleanba.runtime.chain import Chain
from cleanba.runtime.devices import Devices
from cleanba.runtime.metrics import Status
from cleanba.runtime.progress import Progress
from cleanba.runtime.schedule import Schedule
from cleanba.runtime.statistics import Statistics

LOGGED = {
    "update": "number of the update, from 1",
    "global_step": "executed environment steps of all environments; steps whose action was ignored do not count",
    "seconds": "wall time since the run began, earlier parts of an interrupted run included",
    "charts/episodic_return": "mean return of the last 100 training episodes, raw rewards",
    "charts/episodic_length": "mean length of these episodes, in steps",
    "charts/episodes": "episodes finished so far",
    "charts/SPS": "environment steps per second since the first update, whose time was compilation",
    "charts/SPS_recent": "environment steps per second since the previous log point",
    "stats/policy_lag": "versions by which the learner is ahead of the policy that acted: 1, or 0 without concurrency",
    "stats/bottleneck": "the part that limits the speed of the run (a word)",
    "stats/rollout_time": "mean seconds per rollout since the previous log point",
    "stats/emulators_time": "of these: stepping environments",
    "stats/inference_time": "of these: observations to the device, the policy, actions back",
    "stats/scan_time": "of these: environments and policy, where a rollout is one compiled scan",
    "stats/transfer_time": "of these: handing the rollout to the learner devices",
    "stats/params_wait_time": "of these: waiting for parameters",
    "stats/learner_rollout_wait_time": "seconds since the previous log point that the learner waited for rollouts",
    "stats/learner_update_time": "seconds since the previous log point that the learner spent on updates",
    "params_digest": "SHA-256 of the parameters that act: at every checkpoint, and where environments start afresh",
    "learner_digest": "SHA-256 of all that the learner keeps, at the same points",
    "chain": "SHA-256 of these two together with the link before it ([verify](../guides/verify.md))",
    "made_by": "code, packages and processor that computed it; in the first link, and where they change",
}
"""What a log point holds besides what the algorithm logs: name -> meaning."""


class WriteLogPoint(Protocol):
    """Writes one log point: update, global step, seconds since the run began, and values by name."""

    def __call__(self, update: int, global_step: int, seconds: float, values: Json) -> None: ...


class TrainingLog:
    """Counts and times the learner's loop, updates `progress`, and makes the log points."""

    def __init__(
        self,
        schedule: Schedule,
        log_frequency: int,
        devices: Devices,
        progress: Progress[Any],
        write_log_point: WriteLogPoint,
        first_to_learn: int = 0,
        chain: Chain | None = None,
        target_return: float | None = None,
    ):
        """`first_to_learn` is the first update with gradient steps; earlier ones say nothing about the remaining time.

        chain: links the digests that are logged, but for those of the resumed checkpoint, which are linked already.
        target_return: at a log point whose mean return is at least this, `progress.reached` becomes true.
        """
        self._chain, self._linked = chain, progress.saved_update
        self._schedule, self._log_frequency, self._devices = schedule, log_frequency, devices
        self._first_to_learn = first_to_learn
        self._last_update = schedule.first - 1  # of the last log point
        self._progress, self._write_log_point = progress, write_log_point
        self._began = time.perf_counter() - progress.seconds_before
        self._unchecked: tuple[int, Metrics] = (0, {})
        self._target_return = target_return
        # True if the checkpoint was taken right after a log point at which the target return was reached.
        progress.reached = self._is_periodic(progress.update) and progress.statistics.reaches(target_return)
        self.start_clock()

    def start_clock(self, ago: float = 0.0) -> None:
        """Start timing, as if that many seconds ago, once everything is compiled."""
        self._timed_from, self._timed_steps = time.perf_counter() - ago, 0
        self._last_log, self._steps_at_last_log = self._timed_from, self._progress.global_step
        self._new_before = self._progress.statistics.new_steps  # counted by the checkpoint that the run continues from

    @property
    def steps_so_far(self) -> int:
        """Environment steps of all processes; between log points an estimate, from the steps of this one."""
        new = self._progress.statistics.new_steps - self._new_before
        return self._steps_at_last_log + new * self._devices.num_processes

    @contextmanager
    def timing_wait(self) -> Iterator[None]:
        """Time a wait for rollouts."""
        before = time.perf_counter()
        yield
        self._progress.statistics.learner_wait += time.perf_counter() - before

    @contextmanager
    def timing_update(self) -> Iterator[None]:
        """Time the computation of an update."""
        before = time.perf_counter()
        yield
        self._progress.statistics.learner_update += time.perf_counter() - before

    def note_update(self, update: int) -> None:
        """Note that an update is done."""
        progress = self._progress
        progress.update, progress.lag = update, self._schedule.lag(update)
        if self._devices.num_processes == 1:  # the steps of others are known at log points
            progress.global_step = progress.status.global_step = self.steps_so_far
        progress.status.phase, progress.status.update = "training", update
        if update == self._schedule.first:  # its time was mostly compilation, so the clock starts after it
            self._timed_from, self._timed_steps = time.perf_counter(), self.steps_so_far
        else:
            progress.update_seconds = (time.perf_counter() - self._timed_from) / (update - self._schedule.first)

    def check_finite(self, update: int, metrics: Metrics, at_once: bool) -> None:
        """Check that losses and gradients are finite: one update later, when they have arrived on the host, or at once.

        Raises:
            NotFinite: one is not finite.
        """
        jax.tree.map(lambda x: x.copy_to_host_async(), metrics)
        require_finite(*self._unchecked, self._progress.saved_update)
        if at_once:
            require_finite(update, metrics, self._progress.saved_update)
        self._unchecked = update, metrics

    def is_log_point(self, update: int) -> bool:
        """Whether all processes log after this update."""
        return self._is_periodic(update) or self._schedule.logs_digests(update)

    def _is_periodic(self, update: int) -> bool:
        """Whether --log-frequency asks for a log point here.  Only there the return is compared with the target."""
        return update == 1 or update % self._log_frequency == 0

    def write(self, update: int, metrics: Metrics, digests: dict[str, str]) -> None:
        """Make a log point.  All processes must call this after the same updates."""
        progress, statistics, now = self._progress, self._progress.statistics, time.perf_counter()
        statistics.gather()
        self._new_before = 0
        progress.global_step = statistics.global_step
        progress.reached = progress.reached or (self._is_periodic(update) and statistics.reaches(self._target_return))
        interval = now - self._last_log
        recent = (statistics.global_step - self._steps_at_last_log) / interval
        if update > self._schedule.first:
            progress.sps = (statistics.global_step - self._timed_steps) / (now - self._timed_from)
        elif self._schedule.first == self._schedule.last:  # the first update is the only one to estimate from
            progress.sps = recent
        self._last_log, self._steps_at_last_log = now, statistics.global_step
        if update > self._schedule.first and self._last_update >= self._first_to_learn - 1:
            progress.status.seconds_per_update = interval / (update - self._last_update)
        self._last_update = update
        lag = self._schedule.lag(update)
        values = log_values(statistics, metrics, progress.sps, recent if progress.sps is not None else None, lag)
        asked = any(len(e.infos) == len(statistics.infos) for e in statistics.recent)
        if asked and (unknown := [name for name in statistics.infos if f"info/{name}" not in values]):
            warn_once(f"no episode has ended with a number called {' or '.join(unknown)} in its info; see --log-info")
        actor_times, learner_times = statistics.take_times()
        values |= {f"stats/{name}_time": seconds for name, seconds in actor_times.items()}
        values |= {f"stats/learner_{name}_time": seconds for name, seconds in learner_times.items()}
        bottleneck = name_bottleneck(actor_times, learner_times, self._schedule.concurrency)
        values |= {"stats/bottleneck": bottleneck, **self._link(update, digests)}
        self._write_log_point(update, statistics.global_step, now - self._began, values)
        fill_status(progress.status, statistics, values, actor_times, learner_times, interval, bottleneck)

    def write_digests(self, update: int, counters: Json, digests: dict[str, str]) -> None:
        """Log the digests of a checkpoint in a row of their own, unless the log point of this update has them."""
        if self._linked != update:
            step = counters["global_step"]
            self._write_log_point(update, step, time.perf_counter() - self._began, self._link(update, digests))

    def _link(self, update: int, digests: dict[str, str]) -> Json:
        """Digests as a row has them, with their link of the chain."""
        if not digests:
            return {}
        self._linked = update
        return {**digests, **(self._chain.extend(update, digests) if self._chain is not None else {})}

    def counters(self) -> Json:
        """What a checkpoint keeps of the log."""
        return self._progress.statistics.counters(time.perf_counter() - self._began)


def log_values(statistics: Statistics, metrics: Json, sps: float | None, recent: float | None, lag: int) -> Json:
    """The values of one log point, by CleanRL's names.  Unknown ones are left out."""
    values: Json = {
        "charts/SPS": sps,
        "charts/SPS_recent": recent,
        "charts/episodic_return": statistics.mean_return,
        "charts/episodic_length": statistics.mean_length,
        "charts/episodes": statistics.episodes,
        "stats/policy_lag": lag,
        **{f"info/{name}": mean for name, mean in statistics.mean_infos.items()},
    }
    there = {
        name: x for name, x in metrics.items() if not name.startswith("count/") and metrics.get(f"count/{name}", 1)
    }
    values |= {name: float(np.asarray(jax.device_get(value))) for name, value in there.items()}
    return {name: value for name, value in values.items() if value is not None}


def fill_status(
    status: Status,
    statistics: Statistics,
    values: Json,
    actor_times: dict[str, float],
    learner_times: dict[str, float],
    interval: float,
    bottleneck: str,
) -> None:
    """Fill in what the console shows of a log point."""
    nan = float("nan")
    status.global_step, status.episodes = statistics.global_step, statistics.episodes
    status.sps, status.sps_recent = values.get("charts/SPS", nan), values.get("charts/SPS_recent", nan)
    status.episodic_return = values.get("charts/episodic_return", nan)
    status.episodic_length = values.get("charts/episodic_length", nan)
    status.losses = {name.removeprefix("losses/"): v for name, v in values.items() if name.startswith("losses/")}
    whole = max(actor_times["rollout"], 1e-9)
    words = {"params_wait": "waiting for parameters"}
    status.actor_times = {words.get(k, k): s / whole for k, s in actor_times.items() if k != "rollout" and s > 0}
    words = {"rollout_wait": "waiting for rollouts"}
    status.learner_times = {words.get(k, k): s / max(interval, 1e-9) for k, s in learner_times.items()}
    status.bottleneck = bottleneck


def require_finite(update: int, metrics: Json, saved_update: int) -> None:
    """Check that losses and gradients are finite.

    Raises:
        NotFinite: one is not finite.
    """
    losses = {name: float(value) for name, value in metrics.items() if name.startswith("losses/")}
    wrong = [f"{name} is {value}" for name, value in losses.items() if not np.isfinite(value)]
    if wrong:
        where = (
            f"the checkpoint of update {saved_update} is the last good one, but resuming from it leads to the same "
            "number"
            if saved_update
            else "there is no checkpoint yet"
        )
        numbers = "which is not a finite number" if len(wrong) == 1 else "which are not finite numbers"
        raise NotFinite(
            f"update {update}: {', '.join(wrong)}, {numbers}; {where}. Try smaller learning rates or rewards in a "
            "new run, or continue regardless with --on-nonfinite ignore"
        )


def name_bottleneck(actor: dict[str, float], learner: dict[str, float], concurrency: bool) -> str:
    """The part that limits the speed of the run.  `actor` and `learner` hold seconds by activity."""
    acting = max(("emulators", "inference", "scan", "transfer"), key=lambda name: actor[name])
    acting = {"scan": "acting (emulators and inference in one scan)"}.get(acting, acting)
    if not concurrency:  # nothing overlaps, so the largest part is the one to shorten
        return "learner" if learner["update"] > learner["rollout_wait"] else acting
    return acting if learner["rollout_wait"] > 0.1 * learner["update"] else "learner"
