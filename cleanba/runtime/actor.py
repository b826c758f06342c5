"""The body of an actor thread: take parameters, collect a rollout, hand it to the learner."""

import time
from collections.abc import Callable
from typing import NamedTuple

from cleanba.environments.kinds import Envs
from cleanba.rollout import Episode, PyTree, Rollout
from cleanba.runtime.channels import Channel, Stop
from cleanba.runtime.collect import Collector, Times
from cleanba.runtime.records import Ending, Standing, Told
from cleanba.runtime.schedule import Schedule
from cleanba.seeds import action_numbers


class Params(NamedTuple):
    """What actors act with; version k+1 is what update k made."""

    version: int
    params: PyTree


class Parcel(NamedTuple):
    """One actor's rollout, as it reaches the learner."""

    rollout: int  # its number, from 1
    policy_version: int
    blocks: list[Rollout]  # on the devices that learn from them
    steps: int
    episodes: list[Episode]
    times: Times
    told: Told
    ending: Ending


def run_actor(
    actor: int,
    seed: int,
    schedule: Schedule,
    collector: Collector,
    make_envs: Callable[[int], Envs],
    params_channel: Channel[Params],
    rollout_channel: Channel[Parcel],
    send: Callable[[Rollout, int], list[Rollout]],
    stop: Stop,
    standing: Standing | None = None,
    played: Callable[[int], None] = lambda steps: None,
) -> None:
    """Collect every rollout of the schedule.  Ends when done, or by `Closed` when the run ends.

    `make_envs` takes an epoch; `send` takes a rollout and the actor's number and returns its blocks.  `standing` is
    where the first rollout goes on from, if not with fresh environments; `played` hears how many recorded steps were
    played to bring them there.
    """
    params: Params | None = None
    try:
        for rollout in range(schedule.first, schedule.last + 1):
            times = Times()
            start = time.perf_counter()
            if schedule.starts_epoch(rollout):
                collector.close()  # before others are made: `ScannedCollector` says why
                envs = make_envs(schedule.epoch(rollout))
                if rollout == schedule.first and standing is not None:
                    collector.resume(envs, standing, f"the environments of actor {actor}", played)
                else:
                    collector.restart(envs)
                del envs  # the collector's: nobody else may hold them
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
            parcel = Parcel(rollout, params.version, blocks, collected.steps, collected.episodes, times, *collected[3:])
            del blocks, collected  # the learner's now: their memory goes back as soon as it has learnt from them
            rollout_channel.put(parcel)
            del parcel
    finally:
        collector.close()
