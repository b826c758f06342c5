"""The loop: collect, update, publish, log.

Three kinds of threads: actors collect rollouts, the learner thread runs `learn` below, and the main thread supervises:
it shows progress, hears signals, and ends everything soon after anything fails.
"""

import hashlib
import os
import signal
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from cleanba.algorithm import Algorithm
from cleanba.config import Experiment, Partition
from cleanba.envs import Envs, EnvSpec, env_seed, threads_per_actor
from cleanba.errors import Failure, Interrupted
from cleanba.rollout import Episode, PyTree, Rollout
from cleanba.runtime.actor import Params, Parcel, Schedule, run_actor
from cleanba.runtime.channels import Channel, Closed, Stop
from cleanba.runtime.checkpoint import Checkpoints, Saved
from cleanba.runtime.collect import Collector, ScannedCollector, SteppedCollector, Times, make_steppers
from cleanba.runtime.learner import Learner
from cleanba.runtime.metrics import Display, Status
from cleanba.runtime.peers import Peers
from cleanba.runtime.placement import Devices, gather_over_processes

GRACE_SECONDS = 3.0  # for threads to notice that the run ends
EPISODES_SHOWN = 100  # returns and lengths are means over the last so many episodes


class Outcome(NamedTuple):
    """How a run ended."""

    result: dict[str, Any]  # what result.json says
    state: PyTree  # the learner's last state, or None if it was lost
    error: BaseException | None
    stuck: bool  # a thread is still inside a long computation; leave by os._exit


def params_digest(params: PyTree) -> str:
    """SHA-256 over the bytes of all parameter arrays, in the order of their paths."""
    leaves = jax.tree_util.tree_flatten_with_path(params)[0]
    digest = hashlib.sha256()
    for _, leaf in sorted((jax.tree_util.keystr(path), np.asarray(leaf)) for path, leaf in leaves):
        digest.update(np.ascontiguousarray(leaf).tobytes())
    return f"sha256:{digest.hexdigest()}"


def abstract_block(algorithm: Algorithm, spec: EnvSpec, num_steps: int, envs: int) -> Any:
    """The shapes of one block of a rollout, [1, T(+1), B, ...], without collecting one."""
    step: Any = Rollout  # filled with shapes in place of arrays
    shape = lambda o, lead: jax.ShapeDtypeStruct((*lead, *o.shape), jax.dtypes.canonicalize_dtype(o.dtype))
    obs = jax.tree.map(lambda o: shape(o, (envs,)), spec.obs)
    first = jax.ShapeDtypeStruct((envs,), jnp.bool)

    def one_step(key: jax.Array, obs: PyTree, first: jax.Array) -> PyTree:
        carry = algorithm.initial_carry(envs)
        action, _, extras = algorithm.act(algorithm.actor_params(algorithm.init(key)), carry, obs, first, key, True)
        return action, extras, carry

    action, extras, carry = jax.eval_shape(one_step, jax.random.key(0), obs, first)
    over_time = lambda n: lambda x: jax.ShapeDtypeStruct((1, n, *x.shape), x.dtype)
    flag = jax.ShapeDtypeStruct((1, num_steps, envs), jnp.bool)
    return step(
        obs=jax.tree.map(over_time(num_steps + 1), obs),
        first=over_time(num_steps + 1)(first),
        action=over_time(num_steps)(action),
        reward=jax.ShapeDtypeStruct((1, num_steps, envs), jnp.float32),
        terminated=flag,
        truncated=flag,
        valid=flag,
        extras=jax.tree.map(over_time(num_steps), extras),
        carry=jax.tree.map(lambda x: jax.ShapeDtypeStruct((1, *x.shape), x.dtype), carry),
    )


@dataclass
class Statistics:
    """Steps, episodes and times of this process since the last log point, and of everybody before it."""

    global_step: int = 0
    episodes: int = 0
    recent: deque[Episode] = field(default_factory=lambda: deque(maxlen=EPISODES_SHOWN))
    new_steps: int = 0
    new_episodes: list[Episode] = field(default_factory=list)
    times: list[Times] = field(default_factory=list)
    learner_wait: float = 0.0
    learner_update: float = 0.0

    def add(self, parcels: Sequence[Parcel]) -> None:
        for parcel in parcels:
            self.new_steps += parcel.steps
            self.new_episodes += parcel.episodes
            self.times.append(parcel.times)

    def gather(self) -> int:
        """Combine with the other processes, which must all call this after the same update.  Returns the new steps."""
        row = np.zeros(2 + 2 * EPISODES_SHOWN, np.float64)
        last = self.new_episodes[-EPISODES_SHOWN:]
        row[0], row[1] = self.new_steps, len(self.new_episodes)
        row[2 : 2 + 2 * len(last)] = np.asarray(last, np.float64).ravel()
        rows = gather_over_processes(row)
        for r in rows:
            count = min(int(r[1]), EPISODES_SHOWN)
            self.recent.extend(Episode(float(a), int(b)) for a, b in r[2 : 2 + 2 * count].reshape(-1, 2))
        new_steps = int(rows[:, 0].sum())
        self.global_step += new_steps
        self.episodes += int(rows[:, 1].sum())
        self.new_steps, self.new_episodes = 0, []
        return new_steps

    def take_times(self) -> tuple[dict[str, float], dict[str, float]]:
        """Mean seconds per rollout of the actors' activities, and of the learner's, since the last call."""
        n = max(1, len(self.times))
        names = [f.name for f in fields(Times)]
        actor = {name: sum(getattr(t, name) for t in self.times) / n for name in names}
        learner = {"rollout_wait": self.learner_wait, "update": self.learner_update}
        self.times, self.learner_wait, self.learner_update = [], 0.0, 0.0
        return actor, learner

    def counters(self, seconds: float) -> dict[str, Any]:
        """What a checkpoint keeps of this."""
        recent = [list(episode) for episode in self.recent]
        return {"global_step": self.global_step, "episodes": self.episodes, "recent": recent, "seconds": seconds}

    @classmethod
    def from_counters(cls, counters: dict[str, Any]) -> "Statistics":
        """The inverse."""
        recent = deque((Episode(r, length) for r, length in counters["recent"]), maxlen=EPISODES_SHOWN)
        return cls(counters["global_step"], counters["episodes"], recent)

    @property
    def mean_return(self) -> float | None:
        return float(np.mean([e.ret for e in self.recent])) if self.recent else None

    @property
    def mean_length(self) -> float | None:
        return float(np.mean([e.length for e in self.recent])) if self.recent else None


def name_bottleneck(actor: dict[str, float], learner: dict[str, float], concurrency: bool) -> str:
    """Which part, made faster, would make the whole faster.  Seconds per rollout and per log interval, by activity."""
    acting = max(("emulators", "inference", "scan", "transfer"), key=lambda name: actor[name])
    acting = {"scan": "acting (emulators and inference in one scan)"}.get(acting, acting)
    if not concurrency:  # nothing overlaps, so the largest part is the one to shorten
        return "learner" if learner["update"] > learner["rollout_wait"] else acting
    return acting if learner["rollout_wait"] > 0.1 * learner["update"] else "learner"


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
    saved_update: int = 0  # the last update that a checkpoint holds
    update_seconds: float | None = None  # mean time of an update; None before the second
    ending: Interrupted | None = None  # end after the next checkpoint


LogPoint = Callable[[int, int, float, dict[str, Any]], None]


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
    stall_timeout: float = float("inf")
    """seconds without an update after which the run ends"""
    grace_period: float = 0.0
    """seconds that SIGUSR1 leaves to reach the next checkpoint"""
    stop_on_nonfinite: bool = True
    """whether a loss or gradient that is not finite ends the run"""
    after_update: Callable[[int, int, PyTree], None] | None = None
    """is given each update's number, the steps so far, and the parameters, which it must copy before it returns"""

    @property
    def schedule(self) -> Schedule:
        e = self.experiment
        first = self.saved.update + 1 if self.saved else 1
        return Schedule(first, e.num_updates, e.concurrency, e.checkpoint_frequency)

    @property
    def local_actors(self) -> range:
        return self.partition.process_actors(self.devices.process)

    def envs_of(self, actor: int) -> Callable[[int], Envs]:
        """From an epoch: this actor's environments, with the seeds that are theirs wherever the actor runs."""
        e, p = self.experiment, self.partition

        def make(epoch: int) -> Envs:
            seeds = [env_seed(e.seed, i, epoch, p.num_envs) for i in p.actor_envs(actor)]
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
    checkpoints: Checkpoints | None = None,
    saved: Saved | None = None,
    **limits: Any,
) -> Training:
    """The fixed parts of a run over EnvPool's environments, or over those that `make_envs` makes.

    `limits` are the last fields of `Training`.
    """
    threads = threads_per_actor(partition.num_actors // partition.num_processes)
    pools = lambda seeds, epoch: Envs(spec, seeds, threads)
    return Training(
        algorithm, experiment, partition, devices, spec, log_frequency, make_envs or pools, checkpoints, saved, **limits
    )


def learn(
    training: Training,
    learner: Learner,
    params_channels: Sequence[tuple[jax.Device, Channel[Params]]],
    rollout_channels: Sequence[Channel[Parcel]],
    progress: Progress,
    log: LogPoint,
    stop: Stop,
) -> None:
    """The learner thread: the updates, in order.  Actors follow through their channels."""
    e, schedule = training.experiment, training.schedule
    clock = time.perf_counter
    statistics, status, saved = progress.statistics, progress.status, training.saved
    params_of = training.algorithm.actor_params
    start = clock() - (saved.counters["seconds"] if saved else 0.0)

    status.phase = "compiling the update"
    state = progress.state = learner.replicate(saved.state) if saved else learner.init()
    envs = training.partition.num_envs // training.partition.num_blocks
    learner.compile(state, abstract_block(training.algorithm, training.spec, e.num_steps, envs))
    stop.check()
    status.phase = "collecting the first rollout"

    def publish(version: int, params: PyTree) -> None:
        published = learner.publish(params)
        for device, params_channel in params_channels:
            params_channel.put(Params(version, published[device]))

    if saved and schedule.first <= schedule.last and schedule.policy_version(schedule.first) == saved.update:
        publish(saved.update, saved.older_params)  # the rollout that was under way while update `saved.update` ran
    unchecked: tuple[int, dict[str, Any]] = (0, {})
    timed_from, timed_steps = clock(), 0
    last_log, steps_at_last_log = clock(), statistics.global_step
    for update in range(schedule.first, schedule.last + 1):
        # Version `update` is what update-1 made.  With concurrency it serves the next rollout, without it this one.
        if schedule.policy_version(update) == update or schedule.policy_version(update + 1) == update < schedule.last:
            publish(update, learner.local(params_of(state)))

        before = clock()
        parcels = [rollout_channel.get()[0] for rollout_channel in rollout_channels]
        statistics.learner_wait += clock() - before
        for parcel in parcels:
            assert parcel.rollout == update, f"update {update} was given rollout {parcel.rollout}"
            lag = update - parcel.policy_version
            assert lag == schedule.lag(update), f"update {update}: policy lag {lag}, promised {schedule.lag(update)}"
        statistics.add(parcels)

        before = clock()
        blocks = [block for parcel in parcels for block in parcel.blocks]
        lag = update - parcels[0].policy_version
        del parcels
        at_checkpoint = e.checkpoint_frequency > 0 and update % e.checkpoint_frequency == 0
        saving = (at_checkpoint or update == schedule.last) and training.checkpoints is not None
        older_params = jax.device_get(learner.local(params_of(state))) if saving else None
        progress.state = None
        state, metrics = learner.update(state, blocks, update)
        del blocks
        jax.block_until_ready(state)
        stop.check()
        statistics.learner_update += clock() - before
        if training.stop_on_nonfinite:  # an update late, when its numbers have arrived; before saving, at once
            jax.tree.map(lambda x: x.copy_to_host_async(), metrics)
            for number, numbers in [unchecked, (update, metrics)] if saving or update == schedule.last else [unchecked]:
                check_finite(number, numbers, progress.saved_update)
            unchecked = update, metrics
        progress.state, progress.update, progress.lag = state, update, lag
        if training.devices.num_processes == 1:  # the steps of others are known at log points
            progress.global_step = status.global_step = statistics.global_step + statistics.new_steps
        if training.after_update is not None:
            steps_so_far = statistics.global_step + statistics.new_steps * training.devices.num_processes
            training.after_update(update, steps_so_far, learner.local(params_of(state)))

        status.phase, status.update = "training", update
        if update == schedule.first:  # its time was mostly compilation, so the clock starts after it
            new = statistics.new_steps * training.devices.num_processes
            timed_from, timed_steps = clock(), statistics.global_step + new
        else:
            progress.update_seconds = (clock() - timed_from) / (update - schedule.first)
        if update == 1 or at_checkpoint or update % training.log_frequency == 0 or update == schedule.last:
            new_steps = statistics.gather()
            progress.global_step = statistics.global_step
            now = clock()
            sps = (statistics.global_step - timed_steps) / (now - timed_from) if update > schedule.first else None
            if schedule.first == schedule.last:  # nothing but the first update to go by
                sps = new_steps / (now - last_log)
            recent = (statistics.global_step - steps_at_last_log) / (now - last_log)
            interval = now - last_log
            last_log, steps_at_last_log = now, statistics.global_step
            progress.sps = sps
            values = log_values(statistics, metrics, sps, recent if sps is not None else None, lag)
            actor_times, learner_times = statistics.take_times()
            values |= {f"stats/{name}_time": seconds for name, seconds in actor_times.items()}
            values |= {f"stats/learner_{name}_time": seconds for name, seconds in learner_times.items()}
            bottleneck = name_bottleneck(actor_times, learner_times, e.concurrency)
            values["stats/bottleneck"] = bottleneck
            if at_checkpoint or update == schedule.last:
                values["params_digest"] = params_digest(learner.local(params_of(state)))
            log(update, statistics.global_step, now - start, values)
            fill_status(status, statistics, values, actor_times, learner_times, interval, bottleneck)
        if saving and training.checkpoints is not None and training.devices.is_main:
            host_state = jax.device_get(learner.local(state))
            training.checkpoints.save(Saved(update, host_state, older_params, statistics.counters(clock() - start)))
            progress.saved_update = update
            if progress.ending is not None:
                training.checkpoints.wait()
                stop(progress.ending)
                stop.check()
    if training.checkpoints is not None:
        status.phase = "writing the last checkpoint"
        training.checkpoints.wait()
        status.phase = "training"


def log_values(
    statistics: Statistics, metrics: dict[str, Any], sps: float | None, recent: float | None, lag: int
) -> dict[str, Any]:
    """The numbers of one log point, by CleanRL's names; what is not known yet is left out."""
    values: dict[str, Any] = {
        "charts/SPS": sps,
        "charts/SPS_recent": recent,
        "charts/episodic_return": statistics.mean_return,
        "charts/episodic_length": statistics.mean_length,
        "charts/episodes": statistics.episodes,
        "stats/policy_lag": lag,
    }
    values |= {name: float(np.asarray(jax.device_get(value))) for name, value in metrics.items()}
    return {name: value for name, value in values.items() if value is not None}


def fill_status(
    status: Status,
    statistics: Statistics,
    values: dict[str, Any],
    actor_times: dict[str, float],
    learner_times: dict[str, float],
    interval: float,
    bottleneck: str,
) -> None:
    """Show a log point on the console."""
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


MAY_BE_NAN = {"losses/explained_variance"}  # where all returns are equal


def check_finite(update: int, metrics: dict[str, Any], saved_update: int) -> None:
    """Losses and gradients must be numbers.

    Raises:
        Failure: one is not.
    """
    for name, value in metrics.items():
        if name.startswith("losses/") and name not in MAY_BE_NAN and not np.isfinite(np.asarray(value)).all():
            where = (
                f"the checkpoint of update {saved_update} is the last good one"
                if saved_update
                else "there is no checkpoint yet"
            )
            raise Failure(
                f"update {update}: {name} is {float(value)}, which is not a finite number; {where}. Try a smaller "
                "--learning-rate or --max-grad-norm, or go on regardless with --on-nonfinite ignore"
            )


@contextmanager
def hear_signals(asked: Callable[[int], None]) -> Iterator[None]:
    """Ctrl-C, SIGTERM and SIGUSR1 call `asked`, in another thread; a second Ctrl-C ends the process at once.

    Only works in the main thread.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    first_ctrl_c = float("inf")

    def hear(signum: int, frame: Any) -> None:
        nonlocal first_ctrl_c
        if signum == signal.SIGINT:
            # `timeout -s INT` and others signal a process and its group: that is one Ctrl-C.
            if time.monotonic() - first_ctrl_c > 0.2:
                os._exit(128 + signum)
            first_ctrl_c = min(first_ctrl_c, time.monotonic())
        # Not here: a handler runs between any two instructions, perhaps inside a lock that stopping needs.
        threading.Thread(target=asked, args=(signum,), daemon=True).start()

    previous = {s: signal.signal(s, hear) for s in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)}
    try:
        yield
    finally:
        for s, handler in previous.items():
            signal.signal(s, handler)


def end_by_signal(signum: int, training: Training, progress: Progress, stop: Stop, say: Callable[[str], None]) -> None:
    """End the run: at once, or on SIGUSR1, the warning of a cluster, after the next checkpoint if that is near enough.

    Emulators cannot be saved, so only a checkpoint's boundary resumes exactly: what was done since is repeated.  A
    cluster warns every process, and a process may hear it from another first: further SIGUSR1 change nothing.
    """
    error = Interrupted(signum)
    if signum == signal.SIGUSR1 and progress.ending is not None:
        return
    grace = training.grace_period if signum == signal.SIGUSR1 else 0.0
    ahead = training.schedule.next_checkpoint(progress.update) - progress.update
    seconds = ahead * progress.update_seconds if progress.update_seconds is not None else float("inf")
    if training.checkpoints is not None and seconds < grace:
        progress.ending = error
        say(f"{error}: ending after the checkpoint of update {progress.update + ahead}, in about {seconds:.0f} s")
        stop.wait(grace)
    stop(error)


def stacks(channels: Sequence[Channel]) -> str:
    """Where every thread stands, and what the queues hold."""
    frames = sys._current_frames()
    parts = []
    for thread in threading.enumerate():
        if thread.ident in frames and not thread.name.startswith(("ThreadPool", "Thread-")):
            lines = traceback.format_stack(frames[thread.ident])[-6:]
            parts.append(f"thread {thread.name!r}:\n{''.join(lines)}")
    parts += [f"queue {channel.name!r}: {len(channel)} of 1" for channel in channels]
    return "\n".join(parts)


@dataclass
class Watchdog:
    """Notices that no update has come for too long."""

    timeout: float
    mark: Any = None
    since: float = 0.0

    def check(self, progress: Progress, channels: Sequence[Channel]) -> None:
        """Look, every now and then.

        Raises:
            Failure: the run stalls; the stacks are on the error output.
        """
        now, mark = time.perf_counter(), (progress.update, progress.status.phase)
        if mark != self.mark or progress.status.phase.startswith("compiling"):
            self.mark, self.since = mark, now
        elif now - self.since > self.timeout:
            print(stacks(channels), file=sys.stderr)
            raise Failure(
                f"no update for {now - self.since:.0f} s after update {progress.update} ({progress.status.phase}); "
                "the stacks above show where each thread stands. "
                f"If nothing is wrong there, raise --stall-timeout above {self.timeout:g}"
            )


def _or_nan(x: float | None) -> float:
    return float("nan") if x is None else x


def run_training(
    training: Training, display: Display, status: Status, log: LogPoint, peers: Peers | None = None
) -> Outcome:
    """Run all threads to the end of the experiment, or to the first error or signal, here or in another process."""
    e, devices = training.experiment, training.devices
    stop = Stop()
    progress = Progress(status)
    started = time.perf_counter()
    if (saved := training.saved) is not None:
        progress.statistics = Statistics.from_counters(saved.counters)
        progress.update = progress.saved_update = status.update = saved.update
        progress.lag = training.schedule.lag(saved.update)
        status.global_step = progress.statistics.global_step
        started -= saved.counters["seconds"]
        progress.global_step, status.episodes = progress.statistics.global_step, progress.statistics.episodes
        status.episodic_return = _or_nan(progress.statistics.mean_return)
        status.episodic_length = _or_nan(progress.statistics.mean_length)
    learner = Learner(training.algorithm, training.partition, devices, e.seed)
    steppers = make_steppers(training.algorithm, e.num_steps)

    def guarded(body: Callable[..., None], *args: Any) -> None:
        try:
            body(*args)
        except Closed:
            pass
        except BaseException as error:  # whatever it was, the others must hear of it
            stop(peers.explain(error) if peers else error)

    def asked(signum: int) -> None:
        if peers and not peers.is_first and signum == signal.SIGUSR1:
            peers.ask(signum)  # one must decide for all
            stop.wait(training.grace_period + GRACE_SECONDS)
            return stop(Interrupted(signum))  # should it not answer, this process ends by itself
        end_by_signal(signum, training, progress, stop, display.say)

    threads: list[threading.Thread] = []
    params_channels: list[tuple[jax.Device, Channel[Params]]] = []
    rollout_channels: list[Channel[Parcel]] = []
    actors = training.local_actors
    for i, actor in enumerate(actors):
        device = devices.actors[i * len(devices.actors) // len(actors)]
        collector: Collector
        if e.collector == "scanned":
            collector = ScannedCollector(training.algorithm, e.num_steps, device, stop)
        else:
            collector = SteppedCollector(training.algorithm, steppers, e.num_steps, device, stop)
        to_actor: Channel[Params] = Channel(f"parameters for actor {actor}", stop)
        to_learner: Channel[Parcel] = Channel(f"rollouts of actor {actor}", stop)
        make_envs = training.envs_of(actor)
        args = (actor, e.seed, training.schedule, collector, make_envs, to_actor, to_learner, learner.send, stop)
        threads.append(threading.Thread(target=guarded, args=(run_actor, *args), name=f"actor {actor}", daemon=True))
        params_channels.append((device, to_actor))
        rollout_channels.append(to_learner)
    learn_args = (training, learner, params_channels, rollout_channels, progress, log, stop)
    threads.append(threading.Thread(target=guarded, args=(learn, *learn_args), name="learner", daemon=True))

    if peers:
        peers.on_lost, peers.on_asked = stop, asked
        if peers.error is not None:
            stop(peers.error)
    watchdog = Watchdog(training.stall_timeout)
    with hear_signals(asked):
        for thread in threads:
            thread.start()
        while any(t.is_alive() for t in threads) and not stop.is_set:
            threads[-1].join(0.1) if threads[-1].is_alive() else stop.wait(0.02)
            display.refresh()
            try:
                watchdog.check(progress, [*rollout_channels, *(channel for _, channel in params_channels)])
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
    result: dict[str, Any] = {
        "status": word,
        "update": progress.update,
        "global_step": progress.global_step,
        "sps": progress.sps,
        "episodic_return": statistics.mean_return,
        "episodic_length": statistics.mean_length,
        "episodes": statistics.episodes,
        "policy_lag": progress.lag,
        "params_digest": None,
        "seconds": round(time.perf_counter() - started, 3),
    }
    state = progress.state
    if state is not None:
        result["params_digest"] = params_digest(learner.local(training.algorithm.actor_params(state)))
    if error is not None:
        result["error"] = f"{type(error).__name__}: {error}" if not isinstance(error, Interrupted) else str(error)
    return Outcome(result, state, error, stuck)
