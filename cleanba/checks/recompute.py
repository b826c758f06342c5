"""Computes a part of a run again: updates U + 1 to V, from its checkpoint after update U, on any placement.

The run's directory is only read.  What is computed leaves nothing on disk.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from cleanba.agents.initial import find_again, started_from
from cleanba.algorithm import AnyAlgorithm
from cleanba.config import Experiment, Placement, read_config, require
from cleanba.environments.backends import check_workers
from cleanba.errors import Failure, said
from cleanba.files import Json
from cleanba.recipes import AnyRecipe
from cleanba.resolution import fit, read_recipe, taken_whole
from cleanba.runtime import checkpoint
from cleanba.runtime.checkpoint import Saved
from cleanba.runtime.devices import Devices, find_devices
from cleanba.runtime.digests import params_digest, tree_digest
from cleanba.runtime.memory import digest_of, learner_digest, require_room
from cleanba.runtime.metrics import Display, Status
from cleanba.runtime.process_setup import prepared
from cleanba.runtime.records import Snapshot
from cleanba.runtime.train import run_training
from cleanba.runtime.training import Training, make_training
from cleanba.trust import check_size_of, name_of

Digests = dict[str, str]
"""params_digest and learner_digest."""


class Rerun(NamedTuple):
    """A run, ready to be computed again in part on this machine.  Nothing is compiled yet."""

    run_dir: Path
    recipe: AnyRecipe
    experiment: Experiment
    devices: Devices
    algorithm: AnyAlgorithm
    training: Training[Any, Any, Any, Any]
    """without checkpoints and from the beginning; `recompute` sets what it begins from"""
    trust_remote_code: bool = False

    def beginning(self) -> Mapping[str, np.ndarray]:
        """Another run's parameters that the run began from, by their names in the learner's state; {} if from none.

        Raises:
            UsageError: they are no longer where they were.
        """
        digest = self.experiment.init_from
        if not digest:
            return {}
        return find_again(digest, self.run_dir, self.devices.platform, self.trust_remote_code).arrays


@contextmanager
def open_rerun(
    run_dir: Path, placement: Placement, trust_remote_code: bool = False, stall_timeout: float | None = None
) -> Iterator[Rerun]:
    """Open a run to compute parts of it again where `placement` says.  Within the context JAX is set up for the run.

    stall_timeout: seconds that an update may take; None: as many as the run allowed, but at least 600.

    Raises:
        UsageError: there is no such run, it is from elsewhere and may not be opened (`trust.py`), or it does not fit
            the placement.
    """
    recipe, e = read_recipe(run_dir, trust_remote_code)
    with prepared(e):
        devices = find_devices(placement)
        spec = taken_whole(recipe, e, run_dir, devices.platform).spec
        check_workers(spec, placement.env_workers)
        partition = fit(recipe, e, placement)
        algorithm = recipe.make(e, spec, devices.platform)
        check_size_of(run_dir, algorithm.shapes, trust_remote_code)
        never = e.num_updates + 1
        training = make_training(algorithm, e, partition, devices, spec, never, env_workers=placement.env_workers)
        buffer_size = getattr(e, "buffer_size", None)
        require_room(training.memory_shapes, partition.places_per_learner, devices.learners, 1, buffer_size)
        # A number that is not finite is compared like any other.
        training = replace(training, stop_on_nonfinite=False, stall_timeout=stall_timeout or own_timeout(run_dir))
        yield Rerun(run_dir, recipe, e, devices, algorithm, training, trust_remote_code)


def own_timeout(run_dir: Path) -> float:
    """The run's --stall-timeout, but at least 600 s."""
    given = read_config(run_dir).get("run", {}).get("stall_timeout")
    return max(600.0, float(given)) if isinstance(given, int | float) or given == "inf" else 600.0


def read_checkpoint(rerun: Rerun, update: int, with_memory: bool = True) -> Saved[Any, Any]:
    """A run's checkpoint after this update, with its actors and, if `with_memory`, its memory.

    Raises:
        Failure: it is damaged, or a part of it is missing.
    """
    training = rerun.training
    like_state, like_params = rerun.algorithm.shapes()
    actors = range(0) if training.schedule.ends_epoch(update) else training.local_actors
    parts = training.memory_shapes, training.local_shards if with_memory else range(0), actors
    try:
        return checkpoint.read_whole(rerun.run_dir, update, like_state, like_params, *parts)
    except Exception as error:  # Orbax raises many kinds
        raise Failure(f"checkpoint {update} of {name_of(rerun.run_dir)} cannot be read: {said(error)[:200]}") from error


def digests_of(rerun: Rerun, saved: Saved[Any, Any]) -> Digests:
    """The digests of a checkpoint, taken from what it holds; its memory must not have been used yet."""
    shapes = rerun.training.memory_shapes
    shards = [digest_of(shapes, saved.memory[shard]) for shard in sorted(saved.memory)]
    return {
        "params_digest": params_digest(rerun.algorithm.actor_params(saved.state)),
        "learner_digest": learner_digest(tree_digest(saved.state), shards),
    }


def recompute(
    rerun: Rerun,
    first: int,
    last: int,
    digests_after: Collection[int] = (),
    saved: Saved[Any, Any] | None = None,
    title: str = "",
    display: bool = True,
    ended: Callable[[Any, dict[int, Snapshot]], None] | None = None,
    actors_in: Path | None = None,
) -> dict[int, Digests]:
    """Compute updates `first` + 1 to `last` of a run again, from its checkpoint after update `first`.

    To watch or change the computation, give a rerun whose `training` was made by `dataclasses.replace`.

    Args:
        rerun: the run, from `open_rerun`.
        first: an update whose checkpoint the run keeps; 0: from the beginning.
        last: the update to end after.
        digests_after: updates after which digests are taken, besides `last` and the ends of environment epochs.
        saved: the checkpoint after update `first`, if it has been read already.
        title: the title of the progress display.
        display: whether progress is shown on the console.
        ended: called after the last update with what a checkpoint would hold besides the learner (`Training.ended`).
        actors_in: the folder where actors are recorded for `ended`.

    Returns:
        update -> the digests of the learner after it.

    Raises:
        UsageError: there is no such update.
        Failure: the checkpoint is damaged, or something outside the code failed.
        Interrupted: a signal asked the computation to end.
    """
    e = rerun.experiment
    require(
        0 <= first < last <= e.num_updates,
        f"updates {first} to {last} are not part of a run of {e.num_updates} updates; choose 0 <= first < last",
    )
    if first and saved is None:
        saved = read_checkpoint(rerun, first)
    begin_with = partial(started_from, arrays=rerun.beginning()) if saved is None and e.init_from else None
    training = replace(
        rerun.training,
        saved=saved,
        begin_with=begin_with,
        until=last,
        digests_after=frozenset(digests_after),
        ended=ended,
        actors_in=actors_in,
    )
    found: dict[int, Digests] = {}

    def log(update: int, global_step: int, seconds: float, values: Json) -> None:
        if "params_digest" in values:
            found[update] = {name: values[name] for name in ("params_digest", "learner_digest")}

    status = Status(title or f"updates {first} to {last} of {rerun.run_dir}", last, recomputes=True)
    shown = Display(status, enabled=display)
    try:
        outcome = run_training(training, shown, status, log)
    finally:
        shown.close()
    if outcome.error is not None:
        raise outcome.error
    return found
