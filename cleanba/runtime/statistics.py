"""What a run counts and times, over all actors and processes."""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import NamedTuple

import numpy as np

from cleanba.files import Json
from cleanba.rollout import Episode
from cleanba.runtime.actor import ActorRollout
from cleanba.runtime.collect import Times
from cleanba.runtime.processes import gather_over_processes

EPISODES_SHOWN = 100  # how many of the last episodes the mean returns and lengths are taken over


class NewCounts(NamedTuple):
    """What a process counted since the last log point."""

    steps: int
    episodes: int
    newest: list[tuple[int, Episode]]
    """the last episodes, each with the update whose rollout it ended in"""


@dataclass
class Statistics:
    """Totals of all processes up to the last log point; counts and times of this process since then."""

    infos: tuple[str, ...] = ()  # as `EnvSpec.infos`
    global_step: int = 0
    episodes: int = 0
    recent: deque[Episode] = field(default_factory=lambda: deque(maxlen=EPISODES_SHOWN))
    new_steps: int = 0
    new_episodes: int = 0
    # The last new episodes, each with its update.
    newest: deque[tuple[int, Episode]] = field(default_factory=lambda: deque(maxlen=EPISODES_SHOWN))
    times: list[Times] = field(default_factory=list)
    learner_wait: float = 0.0
    learner_update: float = 0.0

    def add(self, rollouts: Sequence[ActorRollout]) -> None:
        for rollout in rollouts:
            self.new_steps += rollout.steps
            self.new_episodes += len(rollout.episodes)
            self.newest.extend((rollout.number, episode) for episode in rollout.episodes)
            self.times.append(rollout.times)

    def gather(self) -> None:
        """Add up all processes' counts.  All must call this after the same update."""
        counts = self.gather_counts()
        self.recent.extend(episode for _, episode in in_order(counts))
        self.global_step += sum(process.steps for process in counts)
        self.episodes += sum(process.episodes for process in counts)
        self.new_steps, self.new_episodes = 0, 0
        self.newest.clear()

    def gather_counts(self) -> list[NewCounts]:
        """What every process counted since the last log point.  All must call this after the same update."""
        each = 3 + len(self.infos)  # numbers of an episode
        row = np.zeros(2 + each * EPISODES_SHOWN, np.float64)
        row[0], row[1] = self.new_steps, self.new_episodes
        newest = [(update, e.ret, e.length, *self.infos_of(e)) for update, e in self.newest]
        row[2 : 2 + each * len(newest)] = np.array(newest, np.float64).ravel()

        def read(r: np.ndarray) -> NewCounts:
            count = min(int(r[1]), EPISODES_SHOWN)
            numbers = r[2 : 2 + each * count].reshape(-1, each).tolist()
            newest = [(int(k), Episode(ret, int(length), infos=tuple(told))) for k, ret, length, *told in numbers]
            return NewCounts(int(r[0]), int(r[1]), newest)

        return [read(r) for r in gather_over_processes(row)]

    def take_times(self) -> tuple[dict[str, float], dict[str, float]]:
        """Seconds since the last call: of the actors, per rollout, and of the learner, by activity."""
        n = max(1, len(self.times))
        names = [f.name for f in fields(Times)]
        actor = {name: sum(getattr(t, name) for t in self.times) / n for name in names}
        learner = {"rollout_wait": self.learner_wait, "update": self.learner_update}
        self.times, self.learner_wait, self.learner_update = [], 0.0, 0.0
        return actor, learner

    def counters(self, seconds: float) -> Json:
        """What a checkpoint keeps of the statistics.  All processes must call this after the same update.

        "news" has each process's counts since the last log point; the totals include them.
        """
        news = self.gather_counts()
        return {
            "global_step": self.global_step + sum(n.steps for n in news),
            "episodes": self.episodes + sum(n.episodes for n in news),
            "recent": [[e.ret, e.length, *infos_as_json(e)] for e in self.recent],
            "seconds": seconds,
            "news": [
                [n.steps, n.episodes, [[e.ret, e.length, update, *infos_as_json(e)] for update, e in n.newest]]
                for n in news
            ],
            **({"infos": list(self.infos)} if self.infos else {}),
        }

    def infos_of(self, e: Episode) -> tuple[float, ...]:
        """The episode's numbers of `infos`; all NaN if it ended in an earlier start of the run, with other `infos`."""
        return e.infos if len(e.infos) == len(self.infos) else (math.nan,) * len(self.infos)

    @classmethod
    def from_counters(cls, counters: Json, process: int, processes: int, infos: tuple[str, ...] = ()) -> "Statistics":
        """The inverse, for one of `processes`.  If their number has changed, the first process gets all new counts."""
        kept = counters.get("infos", []) == list(infos)

        def episode(ret: float, length: int, told: list[float | None]) -> Episode:
            return Episode(ret, length, infos=tuple(math.nan if x is None else x for x in told) if kept else ())

        news = [  # older versions wrote no updates
            NewCounts(steps, count, [(e[2] if len(e) > 2 else 0, episode(e[0], e[1], e[3:])) for e in newest])
            for steps, count, newest in counters.get("news", [])
        ]
        mine = [news[process]] if len(news) == processes else news if process == 0 else []
        recent = deque((episode(r, length, told) for r, length, *told in counters["recent"]), maxlen=EPISODES_SHOWN)
        made = cls(
            infos,
            counters["global_step"] - sum(n.steps for n in news),
            counters["episodes"] - sum(n.episodes for n in news),
            recent,
        )
        for n in mine:
            made.new_steps += n.steps
            made.new_episodes += n.episodes
        made.newest.extend(in_order(mine))
        return made

    def reaches(self, target: float | None) -> bool:
        """Whether the mean return of the last `EPISODES_SHOWN` episodes is at least `target`; False with fewer."""
        mean = self.mean_return
        return target is not None and mean is not None and len(self.recent) == EPISODES_SHOWN and mean >= target

    @property
    def mean_return(self) -> float | None:
        return float(np.mean([e.ret for e in self.recent])) if self.recent else None

    @property
    def mean_infos(self) -> dict[str, float]:
        """For each of `infos` that any of the last episodes has: its mean over those that have it."""
        columns = zip(self.infos, np.array([self.infos_of(e) for e in self.recent]).T, strict=False)
        return {name: float(np.nanmean(told)) for name, told in columns if not np.isnan(told).all()}

    @property
    def mean_length(self) -> float | None:
        return float(np.mean([e.length for e in self.recent])) if self.recent else None


def infos_as_json(e: Episode) -> list[float | None]:
    """An episode's numbers of `EnvSpec.infos` for JSON, which has no NaN."""
    return [None if math.isnan(x) else x for x in e.infos]


def in_order(counts: Sequence[NewCounts]) -> list[tuple[int, Episode]]:
    """The newest episodes of several processes as one process would have them: by update, then by actor."""
    return sorted((episode for process in counts for episode in process.newest), key=lambda episode: episode[0])
