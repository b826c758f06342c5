"""The fixed parts of a run: what is trained, on which devices, with which checkpoints."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Generic

import jax

from cleanba.algorithm import Algorithm, C, M, P, S
from cleanba.config import Experiment, Partition
from cleanba.environments.backends import Envs, open_envs, threads_per_actor
from cleanba.rollout import Rollout
from cleanba.runtime.chain import Chain
from cleanba.runtime.checkpoint import Checkpoints, Saved
from cleanba.runtime.devices import Devices
from cleanba.runtime.learner import abstract_block, memory_shapes
from cleanba.runtime.records import Snapshot
from cleanba.runtime.schedule import Schedule
from cleanba.runtime.watched import WatchedUpdate
from cleanba.seeds import env_seed
from cleanba.specs import ActionSpec, EnvSpec


@dataclass(frozen=True)
class Training(Generic[S, M, P, C]):
    """The fixed parts of a run, which all its threads share."""

    algorithm: Algorithm[S, M, P, C]
    experiment: Experiment
    partition: Partition
    devices: Devices
    spec: EnvSpec
    log_frequency: int
    make_envs: Callable[[Sequence[int], int], Envs]
    """seeds, epoch -> environments"""
    checkpoints: Checkpoints | None = None
    """where checkpoints go; None: there are none"""
    saved: Saved[S, P] | None = None
    """the checkpoint to continue from"""
    begin_with: Callable[[S], S] | None = None
    """the initial state, on the host -> the same with another run's parameters (--init-from)"""
    checkpoint_frequency: int | None = None
    """updates between checkpoints; 0: none but the last; None: by time"""
    checkpoint_every: int = 0
    """in any case, a checkpoint is taken at each multiple of this many updates; 0: at none"""
    chain: Chain | None = None
    """what links the digests in the log; None: they are not linked"""
    repeatable: bool = True
    """whether environments repeat themselves given the same seeds and actions; if not, checkpoints are taken only at
    ends of epochs"""
    target_return: float | None = None
    """the mean return of the last 100 training episodes that finishes the run; None: there is no such return"""
    stall_timeout: float = float("inf")
    """seconds without an update after which the run ends"""
    grace_period: float = 60.0
    """seconds left after a signal to end the update and write a checkpoint"""
    stop_on_nonfinite: bool = True
    """whether a loss, gradient, observation or reward that is not finite ends the run"""
    after_update: Callable[[int, int, P], None] | None = None
    """called with each update's number, the steps so far, and the parameters, which it must copy before it returns"""
    until: int | None = None
    """the update to end after, where only a part of the experiment is computed; None: its last"""
    digests_after: frozenset[int] = frozenset()
    """updates after which digests are logged, besides those of the schedule"""
    ended: Callable[[P, dict[int, Snapshot]], None] | None = None
    """called after the last update, where no checkpoints are taken (`checks.recompute`), with what a checkpoint holds
    besides the learner: the parameters that a concurrent actor collects the next rollout with, and this process's
    actors by number"""
    actors_in: Path | None = None
    """where actors are recorded if no checkpoints are taken; None: nowhere"""
    watch: Callable[[WatchedUpdate[S, M, P, C]], None] | None = None
    """called after each update with all that went into it and came out, while the next one waits"""

    @property
    def schedule(self) -> Schedule:
        e = self.experiment
        first = self.saved.update + 1 if self.saved else 1
        last = e.num_updates if self.until is None else self.until
        frequency = self.checkpoint_frequency or 0
        return Schedule(first, last, e.concurrency, e.env_epoch, frequency, self.digests_after)

    @property
    def local_actors(self) -> range:
        return self.partition.process_actors(self.devices.process)

    @property
    def recorded_action(self) -> ActionSpec | None:
        """The actions to record, for playing them back after a resume; None where environments' states are saved."""
        return None if self.spec.on_device else self.spec.action

    @property
    def block_shapes(self) -> Rollout:
        """The shapes of one block of a rollout."""
        envs = self.partition.num_envs // self.partition.num_blocks
        return abstract_block(self.algorithm, self.spec, self.experiment.num_steps, envs)

    @property
    def local_shards(self) -> range:
        return self.partition.process_shards(self.devices.process)

    @property
    def memory_shapes(self) -> M:
        """The shapes of one shard's memory."""
        return memory_shapes(self.algorithm, self.block_shapes, self.partition)

    def envs_of(self, actor: int, device: jax.Device) -> Callable[[int], Envs]:
        """Epoch -> this actor's environments, on its device where they are JAX environments.

        Their seeds depend on the experiment, the epoch and the actor's number, never on where it runs.
        """
        e, p = self.experiment, self.partition

        def make(epoch: int) -> Envs:
            seeds = [env_seed(e.seed, i, epoch, p.num_envs) for i in p.actor_envs(actor)]
            with jax.default_device(device):
                return self.make_envs(seeds, epoch)

        return make


def make_training(
    algorithm: Algorithm[S, M, P, C],
    experiment: Experiment,
    partition: Partition,
    devices: Devices,
    spec: EnvSpec,
    log_frequency: int = 10,
    make_envs: Callable[[Sequence[int], int], Envs] | None = None,
    env_workers: int | None = None,
) -> Training[S, M, P, C]:
    """A `Training` on environments that `spec` describes.  `make_envs` makes others in their place, as tests do.

    `env_workers` is the placement's.  The remaining fields keep their defaults; `dataclasses.replace` sets them.
    """
    threads = threads_per_actor(partition.num_actors // partition.num_processes, spec, devices.platform)
    opened = lambda seeds, epoch: open_envs(spec, seeds, threads, env_workers)
    return Training(algorithm, experiment, partition, devices, spec, log_frequency, make_envs or opened)
