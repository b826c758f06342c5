"""From flags to a running training, and from its end to an exit code."""

import errno
import json
import math
import os
import shlex
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from cleanba import kernels
from cleanba.agents.hub import push, require_login
from cleanba.agents.initial import (
    DIGEST,
    Initial,
    find_again,
    find_initial,
    require_fit,
    started_from,
)
from cleanba.agents.periodic_evaluation import PeriodicEvaluation
from cleanba.agents.policy import new_policy
from cleanba.algorithm import AnyAlgorithm
from cleanba.algorithms.gradient_steps import REPLAY_FILLED
from cleanba.config import (
    Experiment,
    Partition,
    Placement,
    PolicyGradient,
    Retention,
    Run,
    from_json,
    read_config,
    require,
    to_json,
)
from cleanba.environments import worker
from cleanba.environments.backends import check_workers, repeatable, sources, warnings, with_infos
from cleanba.environments.gymnasium import LOCAL, PREFIX, Trace
from cleanba.errors import (
    Exit,
    Failure,
    Interrupted,
    NotFinite,
    Replaced,
    UsageError,
    exit_code,
    own_trace,
    place_of,
    printable,
    warn,
)
from cleanba.files import Json, write_json
from cleanba.interrupts import started
from cleanba.recipes import AnyRecipe
from cleanba.resolution import RECORD, Config, Resolved, fit, read_recipe, recorded, settle
from cleanba.rollout import PyTree
from cleanba.runs.directory import (
    LOCK,
    Finished,
    batch_job,
    check_name,
    default_run_dir,
    differing_machines,
    holds_runs,
    is_gone,
    lock,
    marked,
    open_run,
    record,
    require_ours,
    unwritable,
    was_uploaded,
)
from cleanba.runs.log import is_finished, keep_copy, newest, rewind, unrepeatable
from cleanba.runs.remote import find_run
from cleanba.runtime.chain import Chain, check, first_experiment, made_by
from cleanba.runtime.checkpoint import Checkpoints, Saved, save_model, updates_kept
from cleanba.runtime.devices import Devices, find_devices
from cleanba.runtime.memory import require_room
from cleanba.runtime.metrics import Display, Status, Writers, duration
from cleanba.runtime.peers import Peers
from cleanba.runtime.process_setup import prepared
from cleanba.runtime.processes import gather_over_processes, initialise, processes_here, unlike_process_0
from cleanba.runtime.profile import Profile
from cleanba.runtime.supervision import Watchdog, hear_signals, leave_process, time_limit
from cleanba.runtime.tracking import require_tracking
from cleanba.runtime.train import RunOutcome, ended_by, run_training
from cleanba.runtime.training import Training, make_training
from cleanba.specs import ActionSpec, EnvSpec
from cleanba.train_flags import in_one_form, parse
from cleanba.trust import check_size_of, require_own, require_trusted
from cleanba.waited import in_a_thread


def train_command(recipe: AnyRecipe, argv: Sequence[str], default: Config | None = None) -> Exit:
    """`cleanba ppo …`: parse the flags, train, and return the exit code."""
    return exit_of(launch(recipe, parse(recipe, argv, default, lambda run: find_run(run, model=False))))


def resume_command(argv: Sequence[str]) -> Exit:
    """`cleanba resume RUN_DIR …`: continue a run with its own flags; those of placement and run can be changed."""
    if not argv or argv[0].startswith("-"):
        words = (
            "usage: cleanba resume RUN_DIR [FLAGS]\n\nContinue an unfinished run.  Flags of placement and run can be "
            "changed:\n`cleanba resume RUN_DIR --help` lists them, with the run's values.  --total-timesteps N makes a "
            "run\nlonger, even a finished one, if no setting depends on its length: SAC and TD3, and PPO and\n"
            "IMPALA with --no-anneal-lr."
        )
        require(bool(argv) and argv[0] in ("-h", "--help"), f"resume needs the directory of a run\n{words}")
        print(words)
        return Exit()
    run_dir = Path(argv[0])
    for word in argv[1:]:
        name = word.partition("=")[0].replace("_", "-")
        require(
            name not in ("--run-dir", "--experiment"),
            f"resume continues {run_dir} where it is; leave {name} out, or repeat its experiment elsewhere with "
            f"`cleanba ALGORITHM --experiment {run_dir} --run-dir DIR`",
        )
    require_trusted(run_dir, "a run can continue only in its original directory")
    saved = read_config(run_dir)
    recipe, experiment = read_recipe(run_dir)
    default = Config(
        experiment,
        placement=from_json(Placement, saved.get("placement", {})),
        # Trust holds for the command that was given it.
        run=replace(from_json(Run, saved.get("run", {})), run_dir=run_dir, trust_remote_code=False),
        whole=run_dir,
    )
    if "--no-distributed" in in_one_form(recipe, argv[1:])[0]:
        default = replace(default, placement=default.placement.in_one_process())
    return train_command(recipe, argv[1:], default)


class Ended(NamedTuple):
    """How a training ended."""

    run_dir: Path
    error: BaseException | None = None
    stuck: bool = False
    """whether a thread is still inside a long computation"""
    said: bool = False
    """whether the error has been printed already"""
    unshared: UsageError | Failure | None = None
    """why the upload that was asked for failed; the user has been told"""
    remedy: str = ""
    """how an unfinished run can be continued"""


def launch(
    recipe: AnyRecipe, config: Config, shown: bool = True, give_up: Callable[[int], None] = leave_process
) -> Ended:
    """Train as the configuration says: for the command and for Python.

    shown: whether progress is shown on the console, or in the notebook.
    give_up: called with the signal when Ctrl-C is pressed a second time.

    Raises:
        UsageError: flags that cannot be obeyed.  Nothing was compiled.
        Failure: the disk is full.  Nothing was compiled.
    """
    require(
        TRAINING.acquire(blocking=False),
        "another thread of this process is training, and a process trains one run at a time; wait until it has ended, "
        "or train in a process of its own",
    )
    try:
        with prepared(config.asked):
            initialise(config.placement)
            if not config.placement.distributed:
                return train(recipe, config, None, shown, give_up)
            with Peers(config.run.peer_timeout) as peers:
                return train(recipe, config, peers, shown, give_up)
    finally:
        TRAINING.release()


TRAINING = threading.Lock()  # held while this process trains: precision and threads are settings of the whole process


STUCK_SECONDS = 20.0  # how long the end of a run waits for a checkpoint being written, if a thread does not end
SHARED_SECONDS = 10.0  # how long a file that process 0 writes may take to be seen by the others
START_SECONDS = 60.0  # how long a start may take, even if --stall-timeout is less


def train(recipe: AnyRecipe, config: Config, peers: Peers | None, shown: bool, give_up: Callable[[int], None]) -> Ended:
    """`launch`, after the processes have joined."""
    with time_to_start(config):
        job = prepare(recipe, config)
        check_workers(job.spec, config.placement.env_workers)
        repeatable(job.spec)  # first called here, where a step that hangs is noticed; the result is cached
    started()
    try:
        with time_to_start(config):
            job = in_new_directory(job)
            run_writer = claim(job, shown)
    except Finished as done:
        if shown and job.devices.is_main:
            print(f"cleanba: {done}")
        return Ended(job.run_dir, unshared=share(job.run_dir, config.run, shown) if job.devices.is_main else None)
    except RefusedElsewhere as why:
        return Ended(job.run_dir, why, said=True)
    try:
        with directory_check(job.run_dir, run_writer) as still_ours:
            ended = train_claimed(job, run_writer, still_ours, peers, shown, give_up)
    finally:
        if run_writer is not None:
            run_writer.unlock()
    if run_writer is None or ended.error is not None:
        return ended
    return ended._replace(unshared=share(job.run_dir, config.run, shown))


def time_to_start(config: Config) -> AbstractContextManager[None]:
    """The time that one part of a start may take."""
    return time_limit(max(config.run.stall_timeout, START_SECONDS))


@contextmanager
def directory_check(run_dir: Path, run_writer: "RunWriter | None") -> Iterator[Callable[[], None]]:
    """A function that raises `Replaced` once this directory is another run's.

    The main process has locked it; the others open the lock that lies there now.
    """
    with ExitStack() as opened:
        check: Callable[[], None] = lambda: None
        if run_writer is not None:
            check = run_writer.require_ours
        else:
            with suppress(OSError):  # it has just been removed
                check = partial(require_ours, run_dir.absolute(), opened.enter_context(open(run_dir / LOCK)))
        yield check


def train_claimed(
    job: "Job",
    run_writer: "RunWriter | None",
    still_ours: Callable[[], None],
    peers: Peers | None,
    shown: bool,
    give_up: Callable[[int], None],
) -> Ended:
    """Train a job in the directory that was opened for it, and write how it ended.  Nothing is uploaded."""
    with time_to_start(job.config), usable(job.run_dir):
        checkpoints, saved = open_checkpoints(job, still_ours)
    title = f"{job.recipe.name} on {job.experiment.env_id}, seed {job.experiment.seed}"
    status = Status(title, job.experiment.num_updates, job.config.run.target_return)
    display = Display(status, enabled=job.devices.is_main and shown, warns=job.devices.is_main)
    stuck = left = True  # unless it ends without an error
    try:
        with time_to_start(job.config):
            if run_writer is not None:
                with usable(job.run_dir):
                    run_writer.begin(saved, display)
            announce(job, saved, display)
            training = whole_training(job, checkpoints, saved, run_writer)
        log = run_writer.log if run_writer else lambda update, global_step, seconds, values: None
        outcome = run_training(training, display, status, log, peers, give_up)
        stuck = outcome.stuck
        if run_writer is not None and outcome.error is None:
            outcome = run_writer.finish(outcome, status, give_up)
            if peers and outcome.error is not None:  # the other processes wait for this one to end
                peers.tell(outcome.error)
        left = False
    finally:
        with ExitStack() as ends:  # they run in reverse order, each even if another one fails
            ends.callback(checkpoints.close, STUCK_SECONDS if stuck else None)
            if run_writer is not None:
                if left:
                    ends.callback(run_writer.finish_tracking, failed=True)
                ends.callback(run_writer.close_logs)
            ends.callback(display.close)
    error, stuck = outcome.error, outcome.stuck
    if run_writer is not None:
        error = run_writer.write_result(outcome)
    said = error is not None and peers is not None and error is peers.error
    # Continuing would lead to the same numbers, or into another run's directory.
    in_vain = error is None or isinstance(error, NotFinite | Replaced)
    remedy = "" if in_vain else how_to_go_on(job, outcome.result)
    if remedy and shown and run_writer is not None:
        print(remedy)
    if run_writer is not None:
        stuck |= not run_writer.finish_tracking(failed=error is not None)
    return Ended(job.run_dir, error, stuck, said, remedy=remedy)


def whole_training(
    job: "Job",
    checkpoints: Checkpoints,
    saved: Saved[Any, Any] | None,
    run_writer: "RunWriter | None",
) -> Training[Any, Any, Any, Any]:
    """`Job.training` with all that is known once the run's directory is open.  All processes must call this."""
    run = job.config.run
    return replace(
        job.training,
        checkpoints=checkpoints,
        saved=saved,
        begin_with=partial(started_from, arrays=job.initial.arrays) if job.initial else None,
        checkpoint_frequency=run.checkpoint_frequency,
        checkpoint_every=Retention.parse(run.keep_checkpoints).every,
        chain=run_writer.chain(saved) if run_writer else None,
        repeatable=bool(of_all_processes(repeatable(job.spec)).all()),
        target_return=run.target_return,
        until=saved.update if saved and has_reached(saved, run.target_return) else None,
        stall_timeout=run.stall_timeout,
        grace_period=run.grace_period,
        stop_on_nonfinite=run.on_nonfinite == "stop",
        after_update=run_writer.after_update if run_writer else None,
    )


class Job(NamedTuple):
    """A training whose flags fit its devices and its environment.  Nothing is compiled or written yet."""

    recipe: AnyRecipe
    config: Config
    resolved: Resolved
    partition: Partition
    devices: Devices
    algorithm: AnyAlgorithm
    run_dir: Path
    initial: Initial | None = None
    """another run's parameters to start from"""
    now: int = 0
    """process 0's clock, which names the run's directory if nothing else does"""

    @property
    def experiment(self) -> Experiment:
        """What is trained."""
        return self.resolved.experiment

    @property
    def spec(self) -> EnvSpec:
        """The specification of its environment."""
        return self.resolved.spec

    @property
    def training(self) -> Training[Any, Any, Any, Any]:
        """The fixed parts of the run that are known before anything is opened."""
        return make_training(
            self.algorithm,
            self.experiment,
            self.partition,
            self.devices,
            self.spec,
            self.config.run.log_frequency,
            env_workers=self.config.placement.env_workers,
        )


def prepare(recipe: AnyRecipe, config: Config) -> Job:
    """Find the devices and the environment, and check the flags against them.  All processes must call this.

    Raises:
        UsageError: the flags do not fit each other, the devices or the environment, or differ between processes.
    """
    devices = find_devices(config.placement)
    now = int(time.time())
    while named_by_clock(config.run) and os.path.exists(default_run_dir(config.asked, config.run, now)):
        now += 1
    now = int(of_all_processes(now)[0])  # process 0's clock names the run
    run_dir = config.run.run_dir or default_run_dir(config.asked, config.run, now)
    check_name(run_dir)
    try:
        run_dir.resolve().exists()
    except OSError as error:  # its name is too long, or a folder above it cannot be read
        raise unwritable(run_dir, error) from None
    except RuntimeError:  # before Python 3.13
        raise unwritable(run_dir, OSError(errno.ELOOP, os.strerror(errno.ELOOP))) from None
    require_own(run_dir)
    config, initial = with_digest(config, run_dir, devices.platform)
    resolved = settle(recipe, config, devices.platform, run_dir)
    resolved = resolved._replace(spec=with_infos(resolved.spec, config.run.log_info))
    e = resolved.experiment
    if e.init_from and initial is None and not updates_kept(run_dir):
        initial = find_again(e.init_from, run_dir, devices.platform, config.run.trust_remote_code, whole=config.whole)
    partition = fit(recipe, e, config.placement, devices.num_processes)
    together: Json = {
        name: getattr(config.run, name)
        for name in ("log_frequency", "checkpoint_frequency", "target_return", "log_info")
    }
    together["keep_checkpoints"] = Retention.parse(config.run.keep_checkpoints)._asdict()
    require_same_flags({"algorithm": recipe.name, **to_json(e), **together})
    require_same_kernels(e, devices.platform)
    algorithm = recipe.make(e, resolved.spec, devices.platform)
    if config.whole is not None:
        check_size_of(config.whole, algorithm.shapes, config.run.trust_remote_code)
    if initial is not None:
        require_fit(initial, algorithm.shapes()[0], recipe.name)
    job = Job(recipe, config, resolved, partition, devices, algorithm, run_dir, initial, now)
    shapes, buffer_size = job.training.memory_shapes, getattr(e, "buffer_size", None)
    require_room(shapes, partition.places_per_learner, devices.learners, processes_here(), buffer_size)
    require(
        (run_dir / "config.json").exists() or not holds_us(run_dir) or not any(run_dir.iterdir()),
        f"run_dir={str(config.run.run_dir)!r} is the current directory or one above it, which holds other files; name "
        "one for the run",
    )
    require(not holds_runs(run_dir), f"run_dir={str(run_dir)!r} holds other runs; name a folder in it for this one")
    return job


def holds_us(folder: Path) -> bool:
    """Whether a folder is the current directory or one above it."""
    try:
        here = Path.cwd()
    except FileNotFoundError:  # it has been removed
        return False
    return folder.resolve() in (here, *here.parents)


def with_digest(config: Config, run_dir: Path, platform: str) -> tuple[Config, Initial | None]:
    """The configuration with --init-from replaced by the digest of the parameters that it names; and the parameters.

    Raises:
        UsageError: they cannot be found, and the run has not recorded their digest.
    """
    place, record = config.typed.get("init_from"), recorded(run_dir)
    if not place or DIGEST.fullmatch(place):
        return config, None
    digest = record["digest"] if record.get("from") == place else ""  # of a run that began from these parameters
    initial: Initial | None = None
    if not (digest and (updates_kept(run_dir) or is_finished(run_dir))):  # else it needs them no more; they may change
        try:
            initial = find_initial(place, platform, config.run.trust_remote_code)
        except (UsageError, Failure):
            if not digest:
                raise
        else:
            require(
                digest in ("", initial.digest),
                f"{place} has other parameters now than when {run_dir} began from it, and {run_dir} has no checkpoint "
                "yet; choose another --run-dir",
            )
            digest = initial.digest
            require(
                config.whole is None or digest == config.asked.init_from,
                f"{place} has other parameters now than when {config.whole} began from it; leave --init-from out, or "
                f"leave --experiment out and take that run's settings with --preset {config.whole}",
            )
    typed = {**config.typed, "init_from": digest}
    return replace(config, asked=replace(config.asked, init_from=digest), typed=typed), initial


@contextmanager
def usable(run_dir: Path) -> Iterator[None]:
    """Raise `Failure` for a run's directory that fails after the run has been opened there."""
    try:
        yield
    except OSError as error:
        raise Failure(f"{run_dir} cannot be used ({error}); fix that, then repeat the command to resume") from None


SENDING_SECONDS = 600.0  # for the last rows to come to Weights & Biases
SENDING_SECONDS_OF_FAILED = 10.0  # the same, of a run that failed or was interrupted: its job may soon be killed
SPARSE = 0.9  # the user is warned if replay fills less than this share of a batch on average


class RunWriter:
    """Writes the run's directory, in the main process: the lock, logs, evaluations, and the files at the end."""

    def __init__(self, job: Job, shown: bool):
        """Lock the run's directory and open it.

        Raises:
            Finished: the same experiment has finished there.
            UsageError: flags that cannot be obeyed, another experiment or process in the directory.
            Failure: the disk is full.
        """
        self._job, self._run, self._shown = job, job.config.run, shown
        policy = new_policy(job.recipe, job.experiment, job.spec, job.algorithm, job.devices.platform)
        self.evaluations = PeriodicEvaluation(job.run_dir, self._run, policy, job.devices)
        finished = is_finished(job.run_dir)  # if it has, and is not made longer, it needs no account
        if not finished:
            self._require()
        placement, code = job.config.placement, sources(job.spec, *job.recipe.modules)
        check = self._require if finished else None
        opened = partial(open_run, job.run_dir, job.recipe, job.resolved, placement, self._run, code, check)
        if finished and not os.access(job.run_dir, os.W_OK):
            opened()  # which raises `Finished` before it writes anything, if nothing is left to do
        self._lock = lock(job.run_dir, mark=job.devices.num_processes > 1)
        self._home = job.run_dir.absolute()
        try:
            self._opened = opened()
            if job.initial is not None:
                write_json(job.run_dir / RECORD, {"digest": job.initial.digest, "from": job.initial.place})
        except OSError as error:
            self.unlock()
            raise unwritable(job.run_dir, error) from None
        except BaseException:
            self.unlock()
            raise
        self._writers: Writers | None = None
        self._film: Path | None = None
        self._display: Display  # after `begin`
        self._sparse = False  # whether the user has been warned of sparse replay batches
        self._profile = Profile(self._home / "profile", self._run.profile)

    def _require(self) -> None:
        """Raise `UsageError` if an account is needed and there is none."""
        if self._run.upload_model:
            require_login()
        if self._run.track:
            require_tracking(self._run.wandb_project_name)

    def begin(self, saved: Saved[Any, Any] | None, display: Display) -> None:
        """Open the logs of a run that begins, or that continues from a checkpoint."""
        run, config, earlier = self._run, self._opened.config, self._opened.earlier
        self._display = display
        self.require_ours()
        if earlier is not None:
            try:
                record(self._job.run_dir, config)
            except OSError as error:
                raise unwritable(self._job.run_dir, error) from None
        if why := unrepeatable(self._job.run_dir, saved is not None):
            kept = keep_copy(self._job.run_dir)
            display.say(printable(f"warning: {why}; the log as it was is kept in {kept}"))
        history = rewind(self._job.run_dir, *((saved.update, saved.counters["seconds"]) if saved else (0,)))
        if saved is not None and (why := self._changed_since(saved, history)):
            display.say(printable(f"warning: {why}"))
        names = (run.wandb_project_name, run.wandb_entity)
        self._writers = Writers(self._job.run_dir, run.track, *names, config, history, self.require_ours)
        if earlier is None and self._job.config.whole is not None:
            earlier = read_config(self._job.config.whole)
        repeated = self.evaluations.begin(saved, history, self.require_ours)
        for warning in [*differing_machines(earlier, config), *repeated]:
            display.say(printable(f"warning: {warning}"))

    def log(self, update: int, global_step: int, seconds: float, values: Json) -> None:
        """Write a log point, and the evaluations that have ended since the last one."""
        assert self._writers is not None
        self.evaluations.log(self._writers, seconds)
        self._writers.write(update, global_step, seconds, values)
        e, share = self._job.experiment, values.get(REPLAY_FILLED, 1.0)
        if share < SPARSE and not self._sparse:
            self._sparse = True
            self._display.say(
                f"warning: replay fills {share:.0%} of a batch on average, because few of the stored steps may be "
                "drawn: the others were ignored after an episode's end, or belong to incomplete windows. Gradients "
                "come from smaller batches; raise --batch-size, or make episodes last longer"
            )
        if update == e.env_epoch and not values.get("charts/episodes", 1):
            self._display.say(
                f"warning: no episode has ended in the {e.num_steps * update} steps of the first epoch of "
                "environments. These restart after each epoch, so longer episodes never end and no return is known; "
                "raise --env-epoch, or set --max-episode-steps"
            )

    def chain(self, saved: Saved[Any, Any] | None) -> Chain:
        """What links the digests of this run, from the checkpoint that it continues from."""
        config = self._opened.config
        chain = Chain(first_experiment(config), made_by(config))
        if saved is not None:
            chain.go_on(saved.counters.get("chain", {}))
        return chain

    def _changed_since(self, saved: Saved[Any, Any], history: Sequence[Json]) -> str:
        """Whether config.json or the log are not what the run wrote before this checkpoint, as a sentence."""
        state = saved.counters.get("chain", {})
        checked = check(history, first_experiment(self._opened.config))
        linked = checked.rows[-1].update if checked.rows else 0
        why = checked.broken
        if not why and state and linked != state["update"]:
            why = f"the log has no digests of update {state['update']}: a part of it is missing"
        remedy = "restore config.json and metrics.jsonl as the run wrote them, and resume again, or `cleanba verify` "
        return why and f"{why}; {remedy}will not accept the run"

    @property
    def after_update(self) -> Callable[[int, int, PyTree], None] | None:
        """The function to call after every update; None if there is none."""
        consider = self.evaluations.after_update
        if not self._run.profile:
            return consider

        def both(update: int, global_step: int, params: PyTree) -> None:
            if consider is not None:
                consider(update, global_step, params)
            if where := self._profile.after_update():
                self._display.say(where)

        return both

    def finish(self, outcome: RunOutcome[Any], status: Status, give_up: Callable[[int], None]) -> RunOutcome[Any]:
        """Evaluate and film the last version, as the flags say.

        Returns the outcome, with status "failed" if this raised an error, and "interrupted" if a signal ended it.
        """
        assert self._writers is not None
        evaluations, result = self.evaluations, outcome.result
        plays = self._run.eval_frequency or self._run.capture_video
        asked = [outcome.interrupt] if outcome.interrupt is not None and plays else []

        def progress() -> tuple[int, str]:
            if asked:
                raise asked[0]
            return evaluations.moves, evaluations.doing

        if self._run.eval_frequency:
            status.phase = "evaluating the last version"
            self._display.refresh()
        watchdog = Watchdog(self._run.stall_timeout, "step of evaluations")
        try:
            with hear_signals(lambda signum: asked.append(Interrupted(signum)), give_up):
                self._film = in_a_thread(
                    lambda: evaluations.finish(result, outcome.state),
                    "end of the run",
                    lambda: watchdog.check(*progress()),
                )
            evaluations.log(self._writers, result["seconds"])
        except (Exception, SystemExit) as error:  # an environment may raise anything
            return outcome._replace(result=result | ended_by(error), error=error)
        finally:
            status.phase = "training"
        return outcome

    def close_logs(self) -> None:
        """Stop evaluations and profiling, and close the files of the log."""
        self.evaluations.close()
        self._profile.close()
        if self._writers is not None:
            self._writers.close()

    def finish_tracking(self, failed: bool) -> bool:
        """Wait until Weights & Biases has all rows.  Returns False if that takes too long."""
        seconds = SENDING_SECONDS_OF_FAILED if failed else SENDING_SECONDS
        return self._writers is None or self._writers.finish_tracking(failed, seconds)

    def write_result(self, outcome: RunOutcome[Any]) -> BaseException | None:
        """Write the last files, and print how the run ended.  Returns the error that it failed with.

        If the directory has become another run's, nothing is written.
        """
        run_dir, result, error = self._job.run_dir, outcome.result, outcome.error
        try:
            self.require_ours()
        except Replaced as replaced:
            return replaced if error is None or isinstance(error, Failure | Interrupted) else error
        last = run_dir / "result.json"
        try:
            if (self._run.save_model or self._run.upload_model) and result["status"] == "finished":
                last = run_dir / "model.msgpack"
                save_model(last, self._job.algorithm.actor_params(outcome.state))
                last = run_dir / "result.json"
            write_json(last, result)
        except OSError as why:
            error = error or Failure(f"{last} cannot be written: {why.strerror}")
        if self._shown:
            print(closing_words(run_dir, result, self._film))
        return error

    def require_ours(self) -> None:
        """Raise `Replaced` if the run's directory has become another run's."""
        require_ours(self._home, self._lock)

    def unlock(self) -> None:
        """Unlock the run's directory.  May be called twice."""
        self._lock.close()


def share(run_dir: Path, run: Run, shown: bool) -> UsageError | Failure | None:
    """Upload a finished run if the flags say so and it has not been.  Returns why that failed, after a warning."""
    if not run.upload_model or was_uploaded(run_dir):
        return None
    try:
        address = push(run_dir, run.hf_entity)
    except (UsageError, Failure) as why:
        warn(str(why))
        return why
    if shown:
        print(f"uploaded: {address}")
    return None


class RefusedElsewhere(UsageError):
    """Another process of this run refuses it, and prints the reason."""


def named_by_clock(run: Run) -> bool:
    """Whether the time names the run's directory, so that it is a new run."""
    return run.run_dir is None and batch_job() is None


def in_new_directory(job: Job) -> Job:
    """The job in a directory that no other run has, if the clock names it.  All processes must call this.

    The main process makes the directory, so runs that start in the same second get different ones.
    """
    if not named_by_clock(job.config.run):
        return job
    named = lambda number: default_run_dir(job.config.asked, job.config.run, number)
    number = job.now
    if job.devices.is_main:
        for number in range(job.now, job.now + 1000):
            try:
                named(number).mkdir(parents=True)
                break
            except FileExistsError:
                continue
            except OSError:  # `claim` finds out why, and says so
                break
    return job._replace(run_dir=named(int(of_all_processes(number)[0])))


def claim(job: Job, shown: bool) -> RunWriter | None:
    """Open the run's directory in the main process; the others learn whether that failed.  All must call this.

    Raises:
        Finished: there is nothing to do.
        UsageError: this process, or another one, refuses.
        Failure: the disk is full.
    """
    run_writer: RunWriter | None = None
    refusal: Exception | None = None
    if job.devices.is_main:
        try:
            run_writer = RunWriter(job, shown)
        except (UsageError, Failure, Finished) as why:
            refusal = why
            if named_by_clock(job.config.run):
                with suppress(OSError):  # something lies in it
                    job.run_dir.rmdir()
    answer = ACCEPTED if refusal is None else FINISHED if isinstance(refusal, Finished) else REFUSED
    with ExitStack() as otherwise:
        if run_writer is not None:
            otherwise.callback(run_writer.unlock)
        answer = int(of_all_processes(answer).max())  # fails if the time for the start is up, or a process has died
        if refusal is not None:
            raise refusal
        if answer == FINISHED:
            raise Finished(f"{job.run_dir} is finished; nothing to do")
        if answer == REFUSED:
            raise RefusedElsewhere("process 0 refused this run; see its message")
        if job.devices.num_processes > 1:
            require_shared(job.run_dir, run_writer)
        otherwise.pop_all()  # it stays locked
    return run_writer


ACCEPTED, FINISHED, REFUSED = range(3)  # what the main process tells the others


def of_all_processes(value: int | bool) -> np.ndarray:
    """The number or flag that each process has, [P].  All processes must call this."""
    return gather_over_processes(np.array([value]))[:, 0]


def require_shared(run_dir: Path, run_writer: RunWriter | None) -> None:
    """Raise `UsageError` unless all processes see the main process's directory.  All processes must call this.

    Each writes its own actors and memory there; a checkpoint needs them all.
    """
    drawn = (marked(run_dir) or 0) if run_writer is not None else 0
    drawn = int(of_all_processes(drawn).max())
    deadline, ours = time.monotonic() + SHARED_SECONDS, not run_dir.exists()
    while not (sees := marked(run_dir) == drawn) and time.monotonic() < deadline:
        with suppress(OSError):  # a network file system remembers for a while that a folder is missing, but not now
            run_dir.mkdir(parents=True, exist_ok=True)
        time.sleep(0.2)
    if not sees and ours:
        with suppress(OSError):
            run_dir.rmdir()
    others = [str(i) for i in np.flatnonzero(~of_all_processes(sees))]
    require(
        not others,
        f"process {', '.join(others)} has another run directory than process 0 (this process's is {run_dir}), but each "
        "keeps its part of a checkpoint there; give all the same --run-dir, on a file system that they share",
    )


def counted(number: int, what: str) -> str:
    """A number with its noun, as "1 shard" or "2 shards"."""
    return f"{number} {what}{'s' * (number != 1)}"


def announce(job: Job, saved: Saved[Any, Any] | None, display: Display) -> None:
    """Print what is trained, and where."""
    e, place, processes = job.experiment, job.config.placement, job.devices.num_processes
    display.say(
        f"{job.recipe.name} on {e.env_id}: {counted(e.num_envs, 'environment')}, {counted(e.num_actors, 'actor')}, "
        f"{counted(e.num_shards, 'shard')}\n"
        f"{size_in_words(e)}\n"
        f"actors on {job.devices.hardware} {list(place.actor_device_ids)}, learners on "
        f"{list(place.learner_device_ids)}, {processes} process{'es' * (processes > 1)}\n"
        f"settings: {job.resolved.in_words(job.recipe)}\n"
        f"run: {job.run_dir}"
    )
    for warning in warnings(job.spec, job.experiment.network) if job.devices.is_main else ():
        display.say(f"warning: {warning}")
    begins = saved is None and job.initial is None
    for words in filter(None, (gap_words(e), bounds_words(e, job.spec.action) if begins else "")):
        display.say(f"warning: {words}")
    if (idle := len(place.actor_device_ids) - e.num_actors // processes) > 0:
        display.say(
            f"warning: {counted(idle, 'actor device')}{' of each process' * (processes > 1)} will be idle, because an "
            f"actor uses one device and num_actors={e.num_actors}; raise --num-actors (another experiment), or name "
            "fewer --actor-device-ids"
        )
    if saved is not None:
        display.say(f"resuming after update {saved.update}, step {saved.counters['global_step']:,}")


def gap_words(e: Experiment) -> str:
    """A warning if sequences (R2D2) leave out a part of each rollout; "" if they do not."""
    learnt = getattr(e, "sequence_length", e.num_steps)
    if learnt >= e.num_steps:
        return ""
    return (
        f"each rollout has {e.num_steps} steps, but its sequence learns from only {learnt}, so "
        f"{1 - learnt / e.num_steps:.0%} of all steps are never learnt from; use --num-steps {learnt} or less"
    )


def bounds_words(e: Experiment, action: ActionSpec) -> str:
    """A warning if few actions of a new Gaussian policy lie within the bounds, or fill little of them; else ""."""
    if not isinstance(e, PolicyGradient) or action.kind != "quantities":
        return ""
    scale = math.exp(e.log_std_init)
    below = lambda x: (1 + math.erf(x / scale / math.sqrt(2))) / 2
    for low, high in zip(action.low, action.high, strict=True):
        # Some environments write "no bound" as the largest float32.
        filled = 1.0 if high - low > 1e30 else 2 * scale / (high - low) if high > low else 1.0
        if low < high and (below(high) - below(low) < 0.2 or filled < 0.02):
            return (
                f"an action has the bounds {low:g} to {high:g}, but a new policy draws actions around 0 with the "
                f"standard deviation {scale:g}, and most are clipped or fill little of this range; rescale actions in "
                "the environment (RescaleAction), or set --log-std-init"
            )
    return ""


def size_in_words(e: Experiment) -> str:
    """The exact number of updates and steps, as a sentence."""
    steps = e.num_updates * e.transitions_per_update
    rest = f" ({e.total_timesteps:,} asked for, but updates are whole)" if steps < e.total_timesteps else ""
    return (
        f"{counted(e.num_updates, 'update')} of {e.transitions_per_update:,} steps, {steps:,} steps in all{rest}; "
        "steps that only reset an environment do not count in global_step"
    )


def require_same_flags(flags: Json) -> None:
    """Raise `UsageError` unless all processes have the same flags.  All processes must call this.

    The flags are those of the experiment, and those that decide after which updates the processes meet.
    """
    others = unlike_process_0(json.dumps(flags, sort_keys=True).encode())
    require(
        not others,
        f"process {', '.join(others)} was given a different experiment from process 0, or a different --log-frequency, "
        "--checkpoint-frequency, --keep-checkpoints, --target-return or --log-info; give all processes the same flags",
    )


def require_same_kernels(e: Experiment, platform: str) -> None:
    """Raise `UsageError` unless all processes use the kernels for CPUs, or none does.  All processes must call this."""
    with kernels.compiling_for(platform, e.cpu_kernels):
        able = of_all_processes(kernels.in_use())
    unable = [str(i) for i in np.flatnonzero(~able)]
    require(
        len(unable) in (0, len(able)),
        f"process {', '.join(unable)} cannot use the CPU kernels (see its message), but others can, and plain JAX "
        "computes other bits; add --cpu-kernels off to the flags of all, or install what is missing there",
    )


def open_checkpoints(job: Job, still_ours: Callable[[], None]) -> tuple[Checkpoints, Saved[Any, Any] | None]:
    """The run's checkpoints, and the newest undamaged one, if there is one.  All processes must call this.

    still_ours: raises `Replaced` if the directory has become another run's.
    """
    training = job.training
    keep = job.config.run.keep_checkpoints
    checkpoints = Checkpoints(
        job.run_dir,
        keep,
        training.memory_shapes,
        training.local_shards,
        training.local_actors,
        training.schedule.ends_epoch,
        still_ours,
    )
    try:
        return checkpoints, newest_of_all(job, checkpoints)
    except BaseException:
        checkpoints.close()
        raise


def newest_of_all(job: Job, checkpoints: Checkpoints) -> Saved[Any, Any] | None:
    """The newest checkpoint that every process can read; newer ones are forgotten."""
    like_state, like_params = job.algorithm.shapes()
    at_most: int | None = None
    while True:  # until all agree: where one process finds a whole checkpoint, another may lack a part
        saved, warnings = checkpoints.restore(like_state, like_params, at_most)
        for warning in warnings:
            print(f"cleanba: {warning}", file=sys.stderr)
        updates = of_all_processes(saved.update if saved else 0)
        at_most = int(updates.min())
        if at_most == updates.max():
            break
        saved = None  # frees it, as there may be no room for two
        require(
            at_most > 0 and checkpoints.keeps_parts,
            f"the processes see different checkpoints in {job.run_dir} ({', '.join(map(str, updates))}); "
            "give all of them the same --run-dir on a shared file system",
        )
    checkpoints.forget_after(at_most)
    return saved


def has_reached(saved: Saved[Any, Any], target: float | None) -> bool:
    """Whether the run ended with this checkpoint, as its mean return had reached the target."""
    reached = saved.counters.get("reached")
    return target is not None and reached is not None and target <= reached


def how_to_draw(run_dir: Path) -> str:
    """The commands that show a run's curves, among what is installed."""
    named = shlex.quote(str(run_dir))
    ours = f"cleanba report {named}"
    return f"{ours}, or tensorboard --logdir {named}" if find_spec("tensorboard") else ours


def closing_words(run_dir: Path, result: Json, film: Path | None) -> str:
    """The closing message: how the run ended, where it is, and how to look at it."""
    figures = [f"{result['global_step']:,} executed steps", duration(result["seconds"])]
    if result["sps"]:
        figures.insert(1, f"{result['sps']:,.0f} steps/s after compilation")
    if result["episodic_return"] is not None:
        figures.append(f"mean return of the last episodes {result['episodic_return']:.4g}")
    if result["target_return_reached"] is not None:
        figures.append(f"--target-return {result['target_return_reached']:.4g} reached")
    drawable = any("/" in name for name in newest(run_dir))  # not if it ended before its first log point
    return (
        f"{result['status']}: {', '.join(figures)}\n"
        f"run:     {run_dir}  (result.json, metrics.jsonl, config.json)"
        + (f"\ncurves:  {how_to_draw(run_dir)}" if drawable else "")
        + (f"\nfilm:    {film}" if film else "")
    )


SAME_CALL = "the same call"  # of `train`


def how_to_go_on(job: Job, result: Json) -> str:
    """How an unfinished run continues, and what it repeats."""
    if is_gone(job.run_dir):
        return f"{job.run_dir} is gone; if it was moved, `cleanba resume` with its new place goes on"
    saved_update = max(updates_kept(job.run_dir), default=0)
    repeated = result["update"] - saved_update
    again = f" and repeats {counted(repeated, 'update')}" if repeated else ", nothing to repeat"
    goes_on = f"goes on after update {saved_update}{again}" if saved_update else "starts again from the beginning"
    if job.experiment.env_id.startswith(f"{PREFIX}{LOCAL}"):  # no other process knows its environment
        place = "" if job.config.run.run_dir is not None else f" with run_dir={str(job.run_dir)!r}"
        return f"{SAME_CALL}{place} {goes_on}"
    command = f"cleanba resume {shlex.quote(str(job.run_dir))}"
    # `cleanba resume` starts one process, and config.json has the process id of only one of several.
    said = f"`{command}`"
    if job.config.placement.distributed:
        said = f"starting all processes again with the same command, or `{command} --no-distributed` in one process,"
    return f"{said} {goes_on}"


def exit_of(ended: Ended) -> Exit:
    """The exit code of a training.  Its error is printed unless it has been already."""
    error = ended.error
    if error is None:
        return Exit(1 if ended.unshared else 0, ended.stuck)
    if isinstance(error, Interrupted | Failure | UsageError):
        if not ended.said:
            print(f"cleanba: {error}", file=sys.stderr)
        return Exit(exit_code(error), ended.stuck)
    trace, place = trace_of(error)
    print(f"{trace}cleanba: the run failed: {type(error).__name__}: {error}{place}", file=sys.stderr)
    return Exit(1, ended.stuck)


def trace_of(error: BaseException) -> tuple[str, str]:
    """The traceback of an error, and ", at file:line" if an environment raised it in this process.

    Where an environment raised it, the traceback has only the environment's own frames.
    """
    if isinstance(error.__cause__, Trace):
        return error.__cause__.args[0], ""  # the message has the place
    if any(frame.filename == worker.__file__ for frame in traceback.extract_tb(error.__traceback__)):
        return own_trace(error), place_of(error)
    return "".join(traceback.format_exception(error)), ""
