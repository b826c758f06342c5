"""The loop: collect, update, publish, log.

Three kinds of threads: actors collect rollouts, the learner thread runs `learn` below, and the main thread supervises:
it shows progress, hears signals, and ends everything soon after anything fails.
"""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, NoReturn

import jax

from cleanba.algorithm import Algorithm, Metrics
from cleanba.config import Experiment, Partition
from cleanba.environments.kinds import Envs, open_envs, threads_per_actor
from cleanba.environments.specs import EnvSpec
from cleanba.errors import Failure, Interrupted
from cleanba.files import Json
from cleanba.rollout import PyTree, Rollout
from cleanba.runtime.actor import Params, Parcel, Schedule, run_actor
from cleanba.runtime.channels import Channel, Closed, Stop
from cleanba.runtime.checkpoint import Checkpoints, Saved
from cleanba.runtime.collect import Collector, Inspection, ScannedCollector, Scans, SteppedCollector, make_steppers
from cleanba.runtime.devices import Devices
from cleanba.runtime.keeper import Keeper
from cleanba.runtime.learner import Learner, abstract_block, memory_shapes
from cleanba.runtime.memory import Holdings
from cleanba.runtime.metrics import Display, Status
from cleanba.runtime.pace import Pace
from cleanba.runtime.peers import Peers
from cleanba.runtime.playback import Playback
from cleanba.runtime.records import Records
from cleanba.runtime.statistics import Book, LogPoint, Progress, Statistics, or_nan
from cleanba.runtime.supervision import GRACE_SECONDS, Watchdog, end_by_signal, hear_signals, leave_process
from cleanba.seeds import env_seed
from cleanba.specs import ActionSpec


@dataclass(frozen=True)
class Training:
    """One run's fixed parts, as the threads share them."""

    algorithm: Algorithm
    experiment: Experiment
    partition: Partition
    devices: Devices
    spec: EnvSpec
    log_frequency: int
    make_envs: Callable[[Sequence[int], int], Envs]
    """seeds, epoch -> environments; tests put scripted ones here"""
    checkpoints: Checkpoints | None = None
    """where checkpoints go; None to keep none"""
    saved: Saved | None = None
    """the checkpoint to go on from"""
    begin_with: Callable[[PyTree], PyTree] | None = None
    """the first state, on the host -> the one to begin with, of another run's parameters; None: as it is"""
    checkpoint_frequency: int | None = None
    """updates between checkpoints; 0: none but the last; None: by time"""
    repeatable: bool = True
    """whether environments with the same seeds and actions do the same; else checkpoints are taken at ends of epochs"""
    stall_timeout: float = float("inf")
    """seconds without an update after which the run ends"""
    grace_period: float = 60.0
    """seconds that signals leave to end an update and to write a checkpoint"""
    stop_on_nonfinite: bool = True
    """whether a loss, a gradient, an observation or a reward that is not finite ends the run"""
    after_update: Callable[[int, int, PyTree], None] | None = None
    """is given each update's number, the steps so far, and the parameters, which it must copy before it returns"""

    @property
    def schedule(self) -> Schedule:
        e = self.experiment
        first = self.saved.update + 1 if self.saved else 1
        return Schedule(first, e.num_updates, e.concurrency, e.env_epoch, self.checkpoint_frequency or 0)

    @property
    def local_actors(self) -> range:
        return self.partition.process_actors(self.devices.process)

    @property
    def takes(self) -> ActionSpec | None:
        """Of whom actions are recorded; None where the environments' own state is kept."""
        return None if self.spec.on_device else self.spec.action

    @property
    def block_shapes(self) -> Rollout:
        """One block of a rollout, as shapes."""
        envs = self.partition.num_envs // self.partition.num_blocks
        return abstract_block(self.algorithm, self.spec, self.experiment.num_steps, envs)

    @property
    def local_shards(self) -> range:
        return self.partition.process_shards(self.devices.process)

    @property
    def memory_shapes(self) -> PyTree:
        """The memory of one shard, as shapes."""
        return memory_shapes(self.algorithm, self.block_shapes, self.partition)

    def envs_of(self, actor: int, device: jax.Device) -> Callable[[int], Envs]:
        """From an epoch: this actor's environments, with the seeds that are theirs wherever the actor runs.

        Those in JAX live on its device.
        """
        e, p = self.experiment, self.partition

        def make(epoch: int) -> Envs:
            seeds = [env_seed(e.seed, i, epoch, p.num_envs) for i in p.actor_envs(actor)]
            with jax.default_device(device):
                return self.make_envs(seeds, epoch)

        return make


def make_training(
    algorithm: Algorithm,
    experiment: Experiment,
    partition: Partition,
    devices: Devices,
    spec: EnvSpec,
    log_frequency: int = 10,
    make_envs: Callable[[Sequence[int], int], Envs] | None = None,
    env_workers: int | None = None,
) -> Training:
    """The fixed parts of a run over environments that look like `spec`, or over those that `make_envs` makes.

    `env_workers` is the placement's.  What else a `Training` has is for whoever needs it to replace.
    """
    threads = threads_per_actor(partition.num_actors // partition.num_processes)
    opened = lambda seeds, epoch: open_envs(spec, seeds, threads, env_workers)
    return Training(algorithm, experiment, partition, devices, spec, log_frequency, make_envs or opened)


def learn(
    training: Training,
    learner: Learner,
    params_channels: Sequence[tuple[jax.Device, Channel[Params]]],
    rollout_channels: Sequence[Channel[Parcel]],
    keeper: Keeper,
    progress: Progress,
    log: LogPoint,
    stop: Stop,
) -> None:
    """The learner thread: the updates, in order.  Actors follow through their channels."""
    schedule, saved, status = training.schedule, training.saved, progress.status
    params_of = training.algorithm.actor_params
    pace = Pace(schedule, training.checkpoint_frequency, not training.repeatable, training.devices, progress)
    acting: list[Params] = []  # the latest two versions, as an actor has them: the state itself is donated

    def publish(version: int, params: PyTree) -> None:
        published = learner.publish(params)
        for device, params_channel in params_channels:
            params_channel.put(Params(version, published[device]))
        acting[:] = [*acting[-1:], Params(version, published[params_channels[0][0]])]

    def save(update: int) -> None:
        before = time.perf_counter()
        keeper.look(update, state, memory)
        older = next((params for version, params in acting if version == update), acting[-1].params)
        keeper.save(update, state, older, book.counters(), not schedule.ends_epoch(update))
        progress.saved_update = update
        pace.saved(keeper.seconds + time.perf_counter() - before)

    def end(update: int, ending: Interrupted) -> NoReturn:
        assert training.checkpoints is not None
        training.checkpoints.wait_for_all(update, training.grace_period)
        stop(ending)
        raise Closed

    first_to_learn = getattr(training.experiment, "first_to_learn", 0)
    book = Book(schedule, training.log_frequency, training.devices, progress, log, first_to_learn)
    status.phase = "compiling the update"
    block = training.block_shapes
    state = learner.replicate(saved.state) if saved else learner.init()
    if saved is None and training.begin_with is not None:
        state = learner.replicate(training.begin_with(jax.device_get(learner.local(state))))
    progress.state = state
    memory = learner.restore_memory(block, saved.memory) if saved else learner.init_memory(block)
    learner.compile(state, memory, block)
    stop.check()
    status.phase = "collecting the first rollout"
    book.begin()

    if saved and schedule.first > schedule.last:
        keeper.look(saved.update, state, memory)  # it ended with this checkpoint, and only its result is missing
    elif saved and schedule.policy_version(schedule.first) == saved.update:
        publish(saved.update, saved.older_params)  # the rollout that was under way while update `saved.update` ran
    metrics: Metrics = {}
    for update in range(schedule.first, schedule.last + 1):
        # Version `update` is what update-1 made.  With concurrency it serves the next rollout, without it this one.
        if schedule.policy_version(update) == update or schedule.policy_version(update + 1) == update < schedule.last:
            publish(update, learner.local(params_of(state)))

        parcels = book.receive(rollout_channels, update, lambda: pace.ends_now(progress.update))
        if parcels is None:  # the rollouts are still under way, and the update before them is done
            if training.stop_on_nonfinite:
                book.check_finite(update - 1, metrics, True)
            if progress.saved_update != update - 1:
                save(update - 1)
            assert progress.ending is not None
            end(update - 1, progress.ending)
        keeper.record(schedule.epoch(update), [(parcel.told, parcel.ending) for parcel in parcels])
        blocks = [block for parcel in parcels for block in parcel.blocks]
        del parcels
        progress.state = None
        with book.updating():
            state, memory, metrics = learner.update(state, memory, blocks, update)
            del blocks
            jax.block_until_ready((state, memory))
        stop.check()
        verdict = pace.after(update)
        saving = training.checkpoints is not None and verdict.save
        if training.stop_on_nonfinite:
            book.check_finite(update, metrics, saving or schedule.is_marked(update))
        progress.state = state
        book.updated(update)

        if training.after_update is not None:
            training.after_update(update, book.steps_so_far, learner.local(params_of(state)))
        if book.is_log_point(update):
            book.log(update, metrics, keeper.look(update, state, memory) if schedule.is_marked(update) else {})
        if saving:
            save(update)
            if verdict.ending is not None:
                end(update, verdict.ending)
        elif schedule.is_marked(update):
            keeper.leave()
    if training.checkpoints is not None:
        status.phase = "writing the last checkpoint"
        training.checkpoints.finish()
        status.phase = "training"


class Outcome(NamedTuple):
    """How a run ended."""

    result: Json  # what result.json says
    state: PyTree  # the learner's last state, or None if it was lost
    error: BaseException | None
    stuck: bool  # a thread is still inside a long computation; leave by os._exit


def run_training(
    training: Training,
    display: Display,
    status: Status,
    log: LogPoint,
    peers: Peers | None = None,
    give_up: Callable[[int], None] = leave_process,
) -> Outcome:
    """Run all threads to the end of the experiment, or to the first error or signal, here or in another process.

    `give_up` is called, in this thread, when Ctrl-C is pressed a second time.
    """
    e, devices = training.experiment, training.devices
    stop = Stop()
    progress = Progress(status)
    started = time.perf_counter()
    if (saved := training.saved) is not None:
        progress.statistics = Statistics.from_counters(saved.counters, devices.process, devices.num_processes)
        progress.update = progress.saved_update = status.update = saved.update
        progress.lag = training.schedule.lag(saved.update)
        progress.seconds_before = saved.counters["seconds"]
        started -= progress.seconds_before
        progress.global_step = status.global_step = saved.counters["global_step"]
        status.episodes = saved.counters["episodes"]
        status.episodic_return = or_nan(progress.statistics.mean_return)
        status.episodic_length = or_nan(progress.statistics.mean_length)
    learner = Learner(training.algorithm, training.partition, devices, e.seed)
    folder = training.checkpoints.run_dir if training.checkpoints is not None else None
    held, place = saved.memory if saved else None, training.partition.place
    holdings = Holdings(training.memory_shapes, training.local_shards, held, folder, place)
    actors, standing = training.local_actors, saved.standing if saved else {}
    records = Records(folder, actors, standing)
    keeper = Keeper(learner, training.algorithm.actor_params, devices, holdings, training.checkpoints, records)
    recorded = sum(where.steps for where in standing.values() if where.actions) * training.partition.envs_per_actor
    playback = Playback(recorded, status, display.say)
    steppers = make_steppers(training.algorithm, e.num_steps, devices.platform)
    scans = Scans(training.algorithm, e.num_steps)

    def guarded(body: Callable[..., None], *args: object) -> None:
        try:
            body(*args)
        except Closed:
            pass
        except BaseException as error:  # whatever it was, the others must hear of it
            stop(peers.explain(error) if peers else error)

    def asked(signum: int) -> None:
        can_save = training.checkpoints is not None and progress.update >= training.schedule.first
        next_end = None if training.repeatable else training.schedule.next_end
        end_by_signal(signum, training.grace_period, can_save, next_end, progress, stop, display.say)

    threads: list[threading.Thread] = []
    params_channels: list[tuple[jax.Device, Channel[Params]]] = []
    rollout_channels: list[Channel[Parcel]] = []
    for i, actor in enumerate(actors):
        device = devices.actors[i * len(devices.actors) // len(actors)]
        kept = training.takes, training.spec.on_device
        collector: Collector
        inspection = Inspection(training.spec.env_id, training.partition.actor_envs(actor).start)
        looks = inspection if training.stop_on_nonfinite else None
        if e.collector == "scanned":
            collector = ScannedCollector(training.algorithm, e.num_steps, device, stop, scans, looks, *kept)
        else:
            collector = SteppedCollector(training.algorithm, steppers, e.num_steps, device, stop, looks, *kept)
        to_actor: Channel[Params] = Channel(f"parameters for actor {actor}", stop)
        to_learner: Channel[Parcel] = Channel(f"rollouts of actor {actor}", stop)
        make_envs = training.envs_of(actor, device)
        args = (
            *(actor, e.seed, training.schedule, collector, make_envs, to_actor, to_learner, learner.send, stop),
            *(standing.get(actor), playback.add),
        )
        threads.append(threading.Thread(target=guarded, args=(run_actor, *args), name=f"actor {actor}", daemon=True))
        params_channels.append((device, to_actor))
        rollout_channels.append(to_learner)
    learn_args = (training, learner, params_channels, rollout_channels, keeper, progress, log, stop)
    threads.append(threading.Thread(target=guarded, args=(learn, *learn_args), name="learner", daemon=True))

    if peers:
        peers.on_lost = stop
        if peers.error is not None:
            stop(peers.error)
    watchdog = Watchdog(training.stall_timeout)
    with hear_signals(asked, give_up):
        for thread in threads:
            thread.start()
        while any(t.is_alive() for t in threads) and not stop.is_set:
            threads[-1].join(0.1) if threads[-1].is_alive() else stop.wait(0.02)
            display.refresh()
            try:
                channels: list[Channel] = [*rollout_channels, *(channel for _, channel in params_channels)]
                watchdog.check(progress.update, status.phase, channels)
            except Failure as stalled:
                stop(stalled)
        if peers and stop.error is not None:
            peers.tell(stop.error)
        deadline = time.perf_counter() + GRACE_SECONDS
        for thread in threads:
            thread.join(max(0.0, deadline - time.perf_counter()) if stop.is_set else None)

    stuck = any(t.is_alive() for t in threads)
    error = stop.error
    if error is None:
        word = "finished"
    else:
        word = "interrupted" if isinstance(error, Interrupted) else "failed"
    statistics = progress.statistics
    result: Json = {
        "status": word,
        "update": progress.update,
        "global_step": progress.global_step,
        "sps": progress.sps,
        "episodic_return": statistics.mean_return,
        "episodic_length": statistics.mean_length,
        "episodes": statistics.episodes,
        "policy_lag": progress.lag,
        "params_digest": None,
        "learner_digest": None,
        "seconds": round(time.perf_counter() - started, 3),
    }
    state = progress.state
    if state is not None:
        result |= keeper.digests(progress.update, state)
    if error is not None:
        result["error"] = f"{type(error).__name__}: {error}" if not isinstance(error, Interrupted) else str(error)
    return Outcome(result, state, error, stuck)
