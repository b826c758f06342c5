"""The body of an actor thread: take parameters, collect a rollout, hand it to the learner."""

import time
from collections.abc import Callable
from typing import Any, Generic, NamedTuple

from cleanba.algorithm import P
from cleanba.environments.backends import Envs, end_waits
from cleanba.environments.worker import close
from cleanba.rollout import Episode, PyTree, Rollout
from cleanba.runtime.channels import Channel, Stop
from cleanba.runtime.collect import Collector, Times
from cleanba.runtime.records import ActorState, RecordedRollout, SavedActor
from cleanba.runtime.schedule import Schedule
from cleanba.seeds import action_numbers


class Params(NamedTuple, Generic[P]):
    """The parameters that actors act with.  Update k makes version k+1."""

    version: int
    params: P


class ActorRollout(NamedTuple):
    """One actor's rollout on its way to the learner."""

    number: int
    """counted from 1"""
    policy_version: int
    """the version it was collected with"""
    blocks: list[Rollout]
    """on the devices that learn from them"""
    steps: int
    """executed environment steps"""
    episodes: list[Episode]
    """those that ended in it"""
    times: Times
    recorded: RecordedRollout
    actor_state: ActorState
    params: PyTree = ()
    """what it was collected with, if the training is watched; else ()"""


def run_actor(
    actor: int,
    seed: int,
    schedule: Schedule,
    collector: Collector[P, Any],
    make_envs: Callable[[int], Envs],
    params_channel: Channel[Params[P]],
    rollout_channel: Channel[ActorRollout],
    send: Callable[[Rollout, int], list[Rollout]],
    stop: Stop,
    saved_actor: SavedActor | None = None,
    played: Callable[[int], None] = lambda steps: None,
    watched: bool = False,
) -> None:
    """Collect every rollout of the schedule.

    make_envs: epoch -> environments.
    send: rollout, the actor's number -> its blocks, on their way to the learner devices.
    saved_actor: what the first rollout continues from; None: fresh environments.
    played: called with the number of recorded steps, each time that some were played to bring environments back.
    watched: whether rollouts come with the parameters that they were collected with.

    Raises:
        Closed: the run ends.
    """
    params: Params[P] | None = None
    try:
        for rollout in range(schedule.first, schedule.last + 1):
            times = Times()
            start = time.perf_counter()
            if schedule.starts_epoch(rollout):
                close(collector, f"actor {actor}")  # before new ones are made, see `ScannedCollector`
                envs = make_envs(schedule.epoch(rollout))
                end_waits(envs, stop.check)
                if rollout == schedule.first and saved_actor is not None:
                    collector.resume(envs, saved_actor, f"the environments of actor {actor}", played)
                    start = time.perf_counter()
                else:
                    collector.restart(envs)
                del envs  # only the collector may hold them, so that it can free them
            needed = schedule.policy_version(rollout)
            while params is None or params.version < needed:
                params, waited = params_channel.get()
                times.params_wait += waited
            assert params.version == needed, f"rollout {rollout} needs version {needed}, was given {params.version}"
            collected = collector(params.params, action_numbers(seed, actor, rollout), times)
            before_send = time.perf_counter()
            blocks = send(collected.rollout, actor)
            times.transfer = time.perf_counter() - before_send
            times.rollout = time.perf_counter() - start
            stop.check()
            sent = ActorRollout(
                *(rollout, params.version, blocks, collected.steps, collected.episodes, times),
                *(collected.recorded, collected.actor_state),
                params=params.params if watched else (),
            )
            del blocks, collected  # the learner holds them alone, and frees them once it has learnt from them
            rollout_channel.put(sent)
            del sent
    finally:
        close(collector, f"actor {actor}")
