"""Periodic evaluation during training (`--eval-frequency`), and at its end.  It changes nothing that is trained."""

import contextlib
import math
import os
import re
import threading
import time
from collections.abc import Callable, Container, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax

from cleanba.agents.evaluate import film_path, play, play_and_film, summary
from cleanba.agents.film import require_films
from cleanba.agents.policy import BEST, Policy, read_best
from cleanba.config import Run
from cleanba.environments.backends import Envs, end_waits, open_envs, threads_per_actor
from cleanba.environments.worker import close
from cleanba.errors import Failure
from cleanba.files import Json, write_json
from cleanba.rollout import PyTree
from cleanba.runtime.channels import Closed, Stop
from cleanba.runtime.checkpoint import Saved, read_model, save_model
from cleanba.runtime.devices import Devices, pick_devices
from cleanba.runtime.metrics import Writers
from cleanba.specs import EnvSpec
from cleanba.waited import in_a_thread

JOIN_SECONDS = 3.0  # for an evaluation to notice that the run ends
EVALUATING = "evaluating"  # a run's folder with parameters whose evaluation is not in the log yet


class Version(NamedTuple):
    """A version of the parameters to evaluate."""

    update: int
    global_step: int
    params: PyTree


class FinishedEvaluation(NamedTuple):
    """One evaluation, until it is logged."""

    update: int
    global_step: int
    values: Json


class PeriodicEvaluation:
    """Evaluates copies of the parameters while the run trains, keeps the best, and films an episode at the end.

    Evaluations run one at a time, in a thread of their own; versions that come due meanwhile are skipped.  Each
    evaluated update plays games of its own.  `cleanba eval` plays none of these, so it scores the best parameters on
    games that were not used to select them.  The best parameters lie in the run's best/.

    From the start of an evaluation until its row is in the log, its parameters lie in the run's evaluating/.  So an
    evaluation that was killed is repeated when the run continues, even from a later checkpoint.
    """

    def __init__(self, run_dir: Path, run: Run, policy: Policy, devices: Devices):
        """Raises `UsageError` for flags that cannot be obeyed."""
        given = run.eval_device_id
        self._device = devices.actors[-1] if given is None else pick_devices((given,), "--eval-device-id")[0]
        if run.capture_video:
            require_films()
            check_can_be_filmed(policy.spec)
        self._run_dir, self._run, self._policy = run_dir.absolute(), run, policy
        self._named = run_dir  # as messages name it
        self._require_ours: Callable[[], None] = lambda: None
        self._best: Json | None = None
        self.moves = 0
        """steps of all evaluations and films so far"""
        self.doing = "opening environments"
        """what the current one is doing"""
        self._stop = Stop()
        self._lock = threading.Lock()
        self._done: list[FinishedEvaluation] = []
        self._latest = 0  # the last update whose evaluation has begun
        self._thread: threading.Thread | None = None

    @property
    def after_update(self) -> Callable[[int, int, PyTree], None] | None:
        """Called after every update with its number, the steps so far and the parameters; None without evaluations."""
        return self._consider if self._run.eval_frequency else None

    def begin(
        self, saved: Saved[Any, Any] | None, history: Sequence[Json], require_ours: Callable[[], None] = lambda: None
    ) -> list[str]:
        """Begin, in a new run or in one that continues from a checkpoint.  Returns warnings.

        Evaluations that were cut short are started again.

        saved: the checkpoint that the run continues from.
        history: the rows of the run's log.
        require_ours: raises `Replaced` if the directory has become another run's.

        Raises:
            Failure: the run's directory cannot be written.
        """
        self._require_ours = require_ours
        if (self._run_dir / BEST / "best.json").exists():
            self._best = read_best(self._run_dir)
        if not self._run.eval_frequency:
            return []
        known = {row["update"] for row in history if "eval/episodic_return" in row}
        self._latest = max(known, default=0)
        versions, warnings = self._cut_short(saved.update if saved else 0, known)
        found = known | {version.update for version in versions}
        if saved is not None and saved.update % self._run.eval_frequency == 0 and saved.update not in found:
            params = self._policy.algorithm.actor_params(saved.state)
            versions.append(Version(saved.update, saved.counters["global_step"], params))
        if versions:
            self._start(versions)
        return warnings

    def log(self, writers: Writers, seconds: float) -> None:
        """Write a row for each evaluation since the last call, at the update whose parameters played."""
        with self._lock:
            done, self._done = self._done, []
        for one in done:
            writers.write(one.update, one.global_step, seconds, one.values)
            self._forget(self._path(one.update, one.global_step))

    def finish(self, result: Json, state: PyTree) -> Path | None:
        """Wait for the current evaluation, then evaluate and film the last version.  Returns the film's path."""
        params = jax.device_get(self._policy.algorithm.actor_params(state))
        update, global_step = result["update"], result["global_step"]
        if self._run.eval_frequency:
            if self._thread is not None:
                self._thread.join()
            self._check()
            if self._latest != update:
                self._start([Version(update, global_step, params)]).join()
                self._check()
        if not self._run.capture_video:
            return None
        policy = self._policy._replace(params=params, update=update, global_step=global_step)
        seed, limit = policy.experiment.seed, self._run.eval_max_steps
        self._require_ours()
        path = film_path(self._run_dir, policy, seed, policy.recipe.plays)
        play_and_film(path, policy, 1, seed, self._device, max_steps=limit, check=self._move)
        return self._named / path.relative_to(self._run_dir)

    def close(self) -> None:
        """Stop the current evaluation.  May be called twice."""
        self._stop()
        if self._thread is not None:
            self._thread.join(JOIN_SECONDS)

    def _consider(self, update: int, global_step: int, params: PyTree) -> None:
        """Evaluate this update if it is due and no evaluation is running.  Raises the error of an earlier one."""
        self._check()
        if update % self._run.eval_frequency == 0 and not (self._thread and self._thread.is_alive()):
            self._start([Version(update, global_step, params)])

    def _move(self, doing: str) -> None:
        self._stop.check()
        self.moves, self.doing = self.moves + 1, doing

    def _check(self) -> None:
        if self._stop.error is not None:
            raise self._stop.error
        self._stop.check()

    def _start(self, versions: Sequence[Version]) -> threading.Thread:
        """Start to evaluate these, one after the other.  Their parameters are on disk before any newer checkpoint."""
        for version in versions:
            self._remember(version)
        copies = [v._replace(params=jax.device_put(v.params, self._device, may_alias=False)) for v in versions]
        self._latest = versions[-1].update
        self._thread = threading.Thread(target=self._evaluate, args=(copies,), name="evaluation", daemon=True)
        self._thread.start()
        return self._thread

    def _path(self, update: int, global_step: int) -> Path:
        return self._run_dir / EVALUATING / f"{update}-{global_step}.msgpack"

    def _remember(self, version: Version) -> None:
        self._require_ours()
        path = self._path(version.update, version.global_step)
        try:
            path.parent.mkdir(exist_ok=True)
            save_model(path, version.params)
        except OSError as error:
            raise unwritable(path.parent, error) from None

    def _forget(self, path: Path) -> None:
        path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # not empty
            path.parent.rmdir()

    def _cut_short(self, update: int, known: Container[int]) -> tuple[list[Version], list[str]]:
        """Versions up to this update whose evaluation was cut short, in order; and warnings.

        Later ones are removed: their updates will be repeated, and evaluated then.
        """
        _, like = self._policy.algorithm.shapes()
        versions, warnings = [], []
        for path in list((self._run_dir / EVALUATING).glob("*")):
            named = re.fullmatch(r"(\d+)-(\d+)\.msgpack", path.name)
            if named is None or int(named[1]) > update or int(named[1]) in known:
                self._forget(path)
                continue
            try:
                versions.append(Version(int(named[1]), int(named[2]), read_model(path, like)))
            except Failure as damage:
                warnings.append(f"update {named[1]} will not be evaluated: {damage}")
        return sorted(versions, key=lambda version: version.update), warnings

    def _evaluate(self, versions: Sequence[Version]) -> None:
        try:
            for version in versions:
                self._evaluate_one(*version)
        except Closed:
            pass
        except BaseException as error:  # the learner thread raises it
            self._stop(error)

    def _evaluate_one(self, update: int, global_step: int, params: PyTree) -> None:
        started = time.perf_counter()
        policy = self._policy._replace(params=params)
        e = policy.experiment
        episodes = play(
            policy, self._run.eval_episodes, e.seed, self._device,
            epoch=update, max_steps=self._run.eval_max_steps, make_envs=self._quiet_envs, check=self._move,
        )  # fmt: skip
        r = summary(e.env_id, policy.spec.is_atari, episodes, policy.spec.infos)
        values = {
            **{f"eval/{name}": mean for name, mean in r.get("infos", {}).items()},
            "eval/episodic_return": r["mean"],
            "eval/episodic_return_std": r["std"],
            "eval/episodic_length": r["mean_length"],
            "eval/human_normalised_score": r["human_normalised_score"],
            "eval/truncated": r["truncated"] or None,
            "eval/seconds": time.perf_counter() - started,
        }
        best = self._best["episodic_return"] if self._best is not None else None
        if math.isfinite(r["mean"]) and (best is None or r["mean"] > best):
            self._keep(update, global_step, r["mean"], params)
        with self._lock:
            self._done.append(
                FinishedEvaluation(update, global_step, {k: v for k, v in values.items() if v is not None})
            )

    def _quiet_envs(self, seeds: Sequence[int]) -> Envs:
        """Environments whose threads run only where training leaves a core idle.

        They inherit niceness and the scheduling policy SCHED_IDLE from the thread that makes them.  The evaluation's
        own thread keeps its policy: it sometimes holds Python's global lock, and if it then had to wait for an idle
        core, the actors would wait too.
        """

        def make() -> Envs:
            with contextlib.suppress(OSError, AttributeError):
                # Only Linux has the first call.  Elsewhere it raises, so the second is skipped: a thread's number may
                # be that of another process there.
                os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
            with jax.default_device(self._device):
                return open_envs(self._policy.spec, seeds, threads_per_actor(1))

        envs = in_a_thread(make, "environments of an evaluation")
        end_waits(envs, self._stop.check)
        return envs

    def _keep(self, update: int, global_step: int, mean: float, params: PyTree) -> None:
        """Replace the best parameters.  best.json names a complete file at all times."""
        self._require_ours()
        folder = self._run_dir / BEST
        best = {
            "update": update,
            "global_step": global_step,
            "episodic_return": mean,
            "episodes": self._run.eval_episodes,
        }
        try:
            folder.mkdir(exist_ok=True)
            save_model(folder / f"{update}.msgpack", params)
            write_json(folder / "best.json", best)
            for old in folder.glob("*.msgpack"):
                if old.stem != str(update):
                    old.unlink()
        except OSError as error:
            raise unwritable(folder, error) from None
        self._best = best


def unwritable(folder: Path, error: OSError) -> Failure:
    """The error for a folder of the run that cannot be written."""
    why = f"{folder} cannot be written ({error.strerror})"
    return Failure(f"{why}; free disk space, then run the same command again to resume")


def check_can_be_filmed(spec: EnvSpec) -> None:
    """Raise `UsageError` if the environment cannot be rendered."""
    envs = open_envs(spec, [0], 1, render=True)
    try:
        envs.reset()
        envs.render(0)
    finally:
        close(envs, spec.env_id)
