"""The loop: publish parameters, receive rollouts, update, log, save.

A run has three kinds of threads.  Actors collect rollouts, the learner thread runs `learn`, and the main thread runs
`run_training`: it starts the others, shows progress, handles signals, and ends the run soon after anything fails.
"""

import atexit
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, NamedTuple, NoReturn

import jax

from cleanba.algorithm import C, M, Metrics, P, S
from cleanba.errors import Failure, Interrupted, warn_once
from cleanba.files import Json
from cleanba.rollout import PyTree
from cleanba.runtime.actor import ActorRollout, Params, run_actor
from cleanba.runtime.channels import Channel, Closed, Stop
from cleanba.runtime.checkpoint import GOES_ON
from cleanba.runtime.checkpoint_schedule import CheckpointSchedule
from cleanba.runtime.checkpoint_writer import CheckpointWriter
from cleanba.runtime.collect import Collector, FiniteCheck, ScanCache, ScannedCollector, SteppedCollector, make_steppers
from cleanba.runtime.digests import tree_digest
from cleanba.runtime.learner import Learner
from cleanba.runtime.memory import MemoryStore
from cleanba.runtime.metrics import Display, Status
from cleanba.runtime.peers import Peers, wait_for_milestone
from cleanba.runtime.playback import Playback
from cleanba.runtime.processes import unlike_process_0
from cleanba.runtime.progress import Progress
from cleanba.runtime.records import Records
from cleanba.runtime.schedule import Schedule
from cleanba.runtime.statistics import Statistics
from cleanba.runtime.supervision import (
    GRACE_SECONDS,
    Watchdog,
    end_by_failure,
    end_by_signal,
    hear_signals,
    leave_process,
)
from cleanba.runtime.training import Training
from cleanba.runtime.training_log import TrainingLog, WriteLogPoint
from cleanba.runtime.watched import Watcher
from cleanba.waited import compiling


def receive(
    channels: Sequence[Channel[ActorRollout]], update: int, schedule: Schedule, give_up: Callable[[], bool]
) -> list[ActorRollout] | None:
    """Wait for the rollouts of this update, one from each actor.  None once `give_up()` is true before all are there.

    Raises:
        AssertionError: a rollout has another number or another policy lag than the schedule promises.
    """
    rollouts = []
    for channel in channels:
        rollout = channel.get_unless(give_up)
        if rollout is None:
            return None
        rollouts.append(rollout)
    for rollout in rollouts:
        assert rollout.number == update, f"update {update} was given rollout {rollout.number}"
        lag, promised = update - rollout.policy_version, schedule.lag(update)
        assert lag == promised, f"update {update}: policy lag {lag}, promised {promised}"
    return rollouts


def first_state(training: Training[S, M, P, C], learner: Learner[S, M, P, C]) -> S:
    """The learner's state before its first update: a checkpoint's, another run's (--init-from), or a random one."""
    if training.saved is not None:
        return learner.replicate(training.saved.state)
    state = learner.init()
    require_same_beginning(learner.local(state))
    if training.begin_with is not None:
        state = learner.replicate(training.begin_with(jax.device_get(learner.local(state))))
    return state


def require_same_beginning(state: PyTree) -> None:
    """All processes must call this: raise `Failure` unless all have made the same initial state."""
    if jax.process_count() > 1:
        others = unlike_process_0(tree_digest(state).encode())
        if others:
            raise Failure(
                f"process {', '.join(others)} has different initial parameters from process 0, because processors or "
                "libraries differ; use the same ones for all processes"
            )


class Publisher(Generic[P]):
    """Sends parameters to the actors, by version, and keeps the two latest versions for checkpoints.

    These are the first actor's copies, because the state itself is donated to the next update.
    """

    def __init__(
        self, learner: Learner[Any, Any, P, Any], channels: Sequence[tuple[jax.Device, Channel[Params[P]]]]
    ) -> None:
        self._learner, self._channels = learner, channels
        self._last_two: list[Params[P]] = []

    def __call__(self, version: int, params: P, send: bool = True, give_up: Callable[[], bool] = lambda: False) -> bool:
        """Send this version to every actor, on its device, or only keep it for a checkpoint.

        Returns False once `give_up()` is true while an actor has not taken the version before.
        """
        published = self._learner.publish(params)
        self._last_two = [*self._last_two[-1:], Params(version, published[self._channels[0][0]])]
        to = self._channels if send else ()
        return all(channel.put_unless(Params(version, published[device]), give_up) for device, channel in to)

    def params_of(self, version: int) -> P:
        """The parameters of this version, or of the last version sent if this one was not."""
        return next((params for sent, params in self._last_two if sent == version), self._last_two[-1].params)


def make_checkpoint_schedule(training: Training[S, M, P, C], progress: Progress[S]) -> CheckpointSchedule:
    """When this run takes checkpoints."""
    return CheckpointSchedule(
        training.schedule,
        training.checkpoint_frequency,
        whole_epochs=not training.repeatable,
        devices=training.devices,
        progress=progress,
        every=training.checkpoint_every,
        first_to_learn=training.experiment.first_to_learn,
    )


def make_log(training: Training[S, M, P, C], progress: Progress[S], write_log_point: WriteLogPoint) -> TrainingLog:
    """What this run logs, and when."""
    return TrainingLog(
        training.schedule,
        training.log_frequency,
        training.devices,
        progress,
        write_log_point,
        first_to_learn=training.experiment.first_to_learn,
        chain=training.chain,
        target_return=training.target_return,
    )


def end(training: Training[S, M, P, C], update: int, reason: BaseException, stop: Stop) -> NoReturn:
    """Wait for this update's checkpoint, then end the run for this reason by raising `Closed`."""
    assert training.checkpoints is not None
    training.checkpoints.wait_for_all(update, training.grace_period)
    stop(reason)
    raise Closed


@dataclass(frozen=True)
class Saver(Generic[S, M, P, C]):
    """Takes the checkpoints of a run."""

    training: Training[S, M, P, C]
    writer: CheckpointWriter[S, M, P, C]
    publish: Publisher[P]
    checkpoint_schedule: CheckpointSchedule
    log: TrainingLog
    progress: Progress[S]

    def save(self, update: int, state: S, memory: M, finished: bool = False) -> None:
        """Save the state after this update, and the parameters before it, with which concurrent actors continue.

        finished: whether the run ends here, as the target return was reached.
        """
        training, before = self.training, time.perf_counter()
        counters = self.log.counters()
        self.progress.global_step = self.progress.status.global_step = counters["global_step"]  # of all processes
        self.log.write_digests(update, counters, self.writer.snapshot(update, state, memory))
        counters |= {"chain": training.chain.state} if training.chain is not None else {}
        counters |= {"reached": training.target_return} if finished else {}
        # Not `ends_epoch`: actors are saved at the end of the run, too, as it may be made longer.
        fresh = training.schedule.starts_afresh(update)
        counters |= {GOES_ON: fresh or training.repeatable}
        older = self.publish.params_of(update)
        self.writer.save(update, state, older, counters, training.repeatable and not fresh)
        self.progress.saved_update = update
        self.checkpoint_schedule.note_saved(self.writer.seconds + time.perf_counter() - before)

    def end_now(self, update: int, state: S, memory: M, metrics: Metrics, stop: Stop) -> NoReturn:
        """End a run that was told to end, with a checkpoint of its last update.  `metrics` are that update's."""
        if self.training.stop_on_nonfinite:
            self.log.check_finite(update, metrics, at_once=True)
        if self.progress.saved_update != update:
            self.save(update, state, memory)
        reason = self.checkpoint_schedule.ends_now(update)
        assert reason is not None
        end(self.training, update, reason, stop)


def learn(
    training: Training[S, M, P, C],
    learner: Learner[S, M, P, C],
    params_channels: Sequence[tuple[jax.Device, Channel[Params[P]]]],
    rollout_channels: Sequence[Channel[ActorRollout]],
    writer: CheckpointWriter[S, M, P, C],
    progress: Progress[S],
    write_log_point: WriteLogPoint,
    stop: Stop,
) -> None:
    """The learner thread: the updates, in order.

    Actors follow through their channels: parameters go out by `params_channels`, one for each actor with its device,
    and rollouts come in by `rollout_channels`, in the same order.
    """
    schedule, saved, status = training.schedule, training.saved, progress.status
    params_of = training.algorithm.actor_params
    publish, watcher = Publisher(learner, params_channels), Watcher(learner, params_of)
    log = make_log(training, progress, write_log_point)
    checkpoint_schedule = make_checkpoint_schedule(training, progress)
    saver = Saver(training, writer, publish, checkpoint_schedule, log, progress)
    ends_now = lambda: checkpoint_schedule.ends_now(progress.update) is not None
    status.phase = "compiling the update"
    block_shapes = training.block_shapes
    progress.state = state = first_state(training, learner)
    memory = learner.restore_memory(block_shapes, saved.memory) if saved else learner.init_memory(block_shapes)
    learner.compile(state, memory, block_shapes)
    status.phase = "collecting the first rollout"
    log.start_clock()

    if saved and schedule.first > schedule.last:  # the run ended with this checkpoint; only its result is missing
        writer.snapshot(saved.update, state, memory)  # its digests are in result.json
    elif saved and schedule.policy_version(schedule.first) == saved.update:
        publish(saved.update, saved.older_params)  # for the rollout that was under way while update `saved.update` ran
    metrics: Metrics = {}
    for update in range(schedule.first, schedule.last + 1):
        # `state` is version `update`: the state before this update.  Without concurrency it collects this rollout; with
        # concurrency it collects the next one, and version 1 also this one.  The last version then collects none.
        collects = schedule.policy_version(update) == update or update < schedule.last
        published = publish(update, learner.local(params_of(state)), collects, ends_now)

        with log.timing_wait():
            rollouts = receive(rollout_channels, update, schedule, ends_now) if published else None
        if rollouts is None:  # the run ends now: no rollouts are waited for
            saver.end_now(update - 1, state, memory, metrics, stop)
        if saved and update == schedule.first:
            with compiling():  # others may play their environments back for much longer, which is no stall
                wait_for_milestone("first rollouts", stop.check)
            # Bringing environments back to where they were is no training.
            progress.statistics.learner_wait = since = max(r.times.rollout for r in rollouts)
            log.start_clock(since)
        progress.begun = True
        progress.statistics.add(rollouts)
        writer.record_rollouts(schedule.epoch(update), [(r.recorded, r.actor_state) for r in rollouts])
        blocks = [block for rollout in rollouts for block in rollout.blocks]
        watched = watcher.begin(update, state, memory, rollouts) if training.watch else None
        del rollouts  # `blocks` alone has them, so that they are freed after the update
        if training.ended is not None and update == schedule.last:
            newest = jax.device_get(learner.local(params_of(state)))
        stop.check()  # the end of the run may look at the state until here
        progress.state = None  # donated to the update
        with log.timing_update():
            state, memory, metrics = learner.update(state, memory, blocks, update)
            del blocks
            jax.block_until_ready((state, memory))
        if training.watch is not None and watched is not None:
            training.watch(watched.ended_in(state, memory))
            del watched
        stop.check()  # the run may have ended meanwhile, by an error elsewhere
        decision = checkpoint_schedule.decide(update)
        saving = training.checkpoints is not None and decision.save
        digested = saving or schedule.logs_digests(update)
        if training.stop_on_nonfinite:
            log.check_finite(update, metrics, digested)
        progress.state = state
        log.note_update(update)
        if training.checkpoints is not None:
            training.checkpoints.check()

        if training.after_update is not None:
            training.after_update(update, log.steps_so_far, learner.local(params_of(state)))
        if log.is_log_point(update):
            log.write(update, metrics, writer.snapshot(update, state, memory) if digested else {})
        if saving:
            saver.save(update, state, memory, decision.finished)
            if decision.ending is not None:
                end(training, update, decision.ending, stop)
            if decision.finished:
                break
        elif digested:
            writer.discard_snapshot()
    progress.complete = True
    if training.checkpoints is not None:
        status.phase = "writing the last checkpoint"
        training.checkpoints.finish()
        status.phase = "training"
    if training.ended is not None:
        training.ended(newest, writer.actors())
    stop()  # for actors still collecting a rollout, which is not learned from: the target return was reached


class RunOutcome(NamedTuple, Generic[S]):
    """How a run ended."""

    result: Json
    """the contents of result.json"""
    state: S | None
    """the learner's last state, or None if it was lost"""
    error: BaseException | None
    stuck: bool
    """a thread is still inside a long computation, so the process must end by os._exit"""
    interrupt: Interrupted | None = None
    """a signal that came when all updates were made, so that only evaluating and filming the last version is left"""


def run_training(
    training: Training[S, M, P, C],
    display: Display,
    status: Status,
    write_log_point: WriteLogPoint,
    peers: Peers | None = None,
    give_up: Callable[[int], None] = leave_process,
) -> RunOutcome[S]:
    """Run all threads to the end of the experiment, or to the first error or signal, here or in another process.

    `give_up` is called, in this thread, when Ctrl-C is pressed a second time.
    """
    stop, started = Stop(), time.perf_counter()
    progress = begin_progress(training, status)
    learner = Learner(training.algorithm, training.partition, training.devices, training.experiment.seed)
    checkpoint_writer = make_checkpoint_writer(training, learner)

    def handle_signal(signum: int) -> None:
        can_save = training.checkpoints is not None and progress.begun
        next_end = None if training.repeatable else training.schedule.next_end
        alone = training.devices.num_processes == 1
        end_by_signal(signum, training.grace_period, can_save, next_end, alone, progress, stop, display.say)

    def actor_body(actor: ActorThread[P]) -> None:
        try:
            actor.body()
        except Closed:
            raise
        except BaseException as error:
            if progress.complete:  # the rollout that it collected is not learned from
                return
            # Among several processes the others may be in the next update already, whose state this process lacks.
            can_save = training.checkpoints is not None and training.repeatable and training.devices.num_processes == 1
            can_save = can_save and progress.begun
            end_by_failure(error, training.grace_period, can_save, actor.params, progress, stop, display.say)
            raise

    def learner_body() -> None:
        try:
            learn(
                training, learner, params_channels, rollout_channels, checkpoint_writer, progress, write_log_point, stop
            )
        except Closed:
            raise
        except BaseException as error:
            if progress.failure is None:
                raise
            display.say(f"no checkpoint was taken after that ({type(error).__name__}: {error})")
            stop(progress.failure)
        finally:
            progress.learner_ended = True

    if peers:
        peers.on_lost = stop
        if peers.error is not None:
            stop(peers.error)
    actors = make_actors(training, learner, stop, status, display)
    params_channels = [(actor.device, actor.params) for actor in actors]
    rollout_channels = [actor.rollouts for actor in actors]
    bodies = [(actor.name, partial(actor_body, actor)) for actor in actors] + [("learner", learner_body)]
    channels: list[Channel[Any]] = [*rollout_channels, *(channel for _, channel in params_channels)]
    with hear_signals(handle_signal, give_up):
        threads = start(bodies, stop, peers)
        try:
            supervise(threads, channels, training.stall_timeout, progress, display, stop, peers)
        except BaseException as error:  # Ctrl-C was pressed a second time: no thread goes on without this one
            stop(error)
            raise
    seconds = progress.seconds_before + time.perf_counter() - started
    result = describe_result(training, progress, checkpoint_writer, stop.error, seconds)
    stuck = [t for t in threads if t.is_alive()]
    if stuck:
        atexit.register(wait_for, stuck)
    else:
        checkpoint_writer.close()
    return RunOutcome(result, progress.state, stop.error, bool(stuck), progress.interrupt)


EXIT_SECONDS = 60.0


def wait_for(threads: Sequence[threading.Thread]) -> None:
    """At the end of a Python program, wait for threads in a long compilation, within which Python would abort."""
    deadline = time.monotonic() + EXIT_SECONDS
    for thread in threads:
        thread.join(1.0)
        if thread.is_alive():
            warn_once(f"waiting up to {EXIT_SECONDS:.0f} s for a computation that began before the run ended")
            thread.join(max(0.0, deadline - time.monotonic()))


def begin_progress(training: Training[S, M, P, C], status: Status) -> Progress[S]:
    """The progress of a run that begins, or that continues from `training.saved`."""
    saved, devices, infos = training.saved, training.devices, training.spec.infos
    if saved is None:
        return Progress(status, Statistics(infos))
    statistics = Statistics.from_counters(saved.counters, devices.process, devices.num_processes, infos)
    progress: Progress[S] = Progress(status, statistics)
    progress.update = progress.saved_update = status.update = saved.update
    progress.lag = training.schedule.lag(saved.update)
    progress.seconds_before = saved.counters["seconds"]
    progress.global_step = status.global_step = saved.counters["global_step"]
    status.episodes = saved.counters["episodes"]
    if statistics.mean_return is not None and statistics.mean_length is not None:
        status.episodic_return, status.episodic_length = statistics.mean_return, statistics.mean_length
    return progress


def make_checkpoint_writer(
    training: Training[S, M, P, C], learner: Learner[S, M, P, C]
) -> CheckpointWriter[S, M, P, C]:
    """Makes the checkpoints of this process, and what they need to know of the one the run continues from."""
    saved, checkpoints = training.saved, training.checkpoints
    folder = checkpoints.run_dir if checkpoints is not None else None
    memory_store = MemoryStore(
        training.memory_shapes,
        training.local_shards,
        saved.memory if saved else None,
        folder,
        training.partition.place,
    )
    records = Records(folder or training.actors_in, training.local_actors, saved.actors if saved else {})
    return CheckpointWriter(
        learner, training.algorithm.actor_params, training.devices, memory_store, checkpoints, records
    )


class ActorThread(NamedTuple, Generic[P]):
    """One of this process's actors, ready to start."""

    name: str
    device: jax.Device
    params: Channel[Params[P]]
    rollouts: Channel[ActorRollout]
    body: Callable[[], None]


def make_actors(
    training: Training[S, M, P, C], learner: Learner[S, M, P, C], stop: Stop, status: Status, display: Display
) -> list[ActorThread[P]]:
    """This process's actors, in order: each with its collector and its channels to and from the learner."""
    e, algorithm, devices = training.experiment, training.algorithm, training.devices
    actors, saved_actors = training.local_actors, training.saved.actors if training.saved else {}
    steps = sum(saved.steps for saved in saved_actors.values() if saved.actions)
    playback = Playback(steps * training.partition.envs_per_actor, status, display.say)  # in environment steps
    steppers = make_steppers(algorithm, e.num_steps, devices.platform)
    scans = ScanCache(algorithm, e.num_steps)

    def make_collector(actor: int, device: jax.Device) -> Collector[P, C]:
        first_env = training.partition.actor_envs(actor).start
        check = FiniteCheck(training.spec.env_id, first_env) if training.stop_on_nonfinite else None
        how: dict[str, Any] = {
            "finite_check": check,
            "recorded_action": training.recorded_action,
            "first_env": first_env,
        }
        if e.collector == "scanned":
            return ScannedCollector(algorithm, e.num_steps, device, stop, scans, **how)
        return SteppedCollector(algorithm, e.num_steps, device, stop, steppers, **how)

    def make_actor(actor: int, device: jax.Device) -> ActorThread[P]:
        params: Channel[Params[P]] = Channel(f"parameters for actor {actor}", stop)
        rollouts: Channel[ActorRollout] = Channel(f"rollouts of actor {actor}", stop)
        collector, make_envs = make_collector(actor, device), training.envs_of(actor, device)
        body = partial(
            run_actor,
            *(actor, e.seed, training.schedule, collector, make_envs, params, rollouts, learner.send, stop),
            saved_actor=saved_actors.get(actor),
            played=playback.add,
            watched=training.watch is not None,
        )
        return ActorThread(f"actor {actor}", device, params, rollouts, body)

    device_of = lambda i: devices.actors[i * len(devices.actors) // len(actors)]
    return [make_actor(actor, device_of(i)) for i, actor in enumerate(actors)]


def start(bodies: Iterable[tuple[str, Callable[[], None]]], stop: Stop, peers: Peers | None) -> list[threading.Thread]:
    """Start a thread for each of these names and bodies.  An error in one of them sets `stop`."""

    def guarded(body: Callable[[], None]) -> None:
        try:
            body()
        except Closed:
            pass
        except BaseException as error:  # whatever it was, the other threads and processes must end, too
            stop(peers.explain(error) if peers else error)

    threads = [threading.Thread(target=guarded, args=(body,), name=name, daemon=True) for name, body in bodies]
    for thread in threads:
        thread.start()
    return threads


def supervise(
    threads: Sequence[threading.Thread],
    channels: Sequence[Channel[Any]],
    stall_timeout: float,
    progress: Progress[Any],
    display: Display,
    stop: Stop,
    peers: Peers | None,
) -> None:
    """Show progress until all threads have ended, or the run stops; then give threads a moment to notice that.

    The last thread is the learner's.
    """
    watchdog, learner_thread = Watchdog(stall_timeout), threads[-1]
    while any(t.is_alive() for t in threads) and not stop.is_set:
        learner_thread.join(0.1) if learner_thread.is_alive() else stop.wait(0.02)
        display.refresh()
        try:
            watchdog.check(progress.update, progress.status.phase, channels)
        except Failure as stalled:
            stop(progress.failure or stalled)
    if peers and stop.error is not None:
        peers.tell(stop.error)
    deadline = time.perf_counter() + GRACE_SECONDS
    for thread in threads:
        thread.join(max(0.0, deadline - time.perf_counter()) if stop.is_set else None)


def describe_result(
    training: Training[S, M, P, C],
    progress: Progress[S],
    checkpoint_writer: CheckpointWriter[S, M, P, C],
    error: BaseException | None,
    seconds: float,
) -> Json:
    """The contents of result.json for a run that has ended: with this error, or None if it is finished."""
    reached = progress.reached or training.until is not None
    result: Json = {
        "status": "finished",
        "update": progress.update,
        "global_step": progress.global_step,
        "sps": progress.sps,
        "episodic_return": progress.statistics.mean_return,
        "episodic_length": progress.statistics.mean_length,
        "episodes": progress.statistics.episodes,
        "target_return_reached": training.target_return if reached else None,
        "policy_lag": progress.lag,
        "params_digest": None,
        "learner_digest": None,
        "seconds": round(seconds, 3),
    }
    if (state := progress.state) is not None:
        try:
            result |= checkpoint_writer.digests(progress.update, state)
        except RuntimeError as lost:  # the learner hung, so the end did not wait for it, but it has gone on since
            if "deleted" not in str(lost):
                raise
    return result if error is None else result | ended_by(error)


def ended_by(error: BaseException) -> Json:
    """What result.json says of a run that this error ended."""
    if isinstance(error, Interrupted):
        return {"status": "interrupted", "error": str(error)}
    return {"status": "failed", "error": f"{type(error).__name__}: {error}"}
