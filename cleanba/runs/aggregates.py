"""Human-normalised scores over several Atari games, as Agarwal et al. (2021) aggregate them, and published ones."""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np

from cleanba.environments.atari_scores import Publication, human_normalised, publication, reference
from cleanba.errors import warn
from cleanba.files import Json
from cleanba.runs.curves import RESAMPLES, Groups, ends_early, variants_of

STATISTICS = ("median", "IQM", "mean", "optimality gap")


class Estimate(NamedTuple):
    """Statistics of one variant, [S] each, with 95% intervals."""

    value: np.ndarray
    low: np.ndarray  # NaN where no game has a second seed
    high: np.ndarray


class Summary(NamedTuple):
    """One variant over all games."""

    seeds: list[int]  # by game
    aggregates: Estimate  # as STATISTICS
    profile: Estimate  # share of the runs that score above each of `Aggregates.taus`, [N]


class Aggregates(NamedTuple):
    """All variants over the games that all of them have played."""

    games: list[str]
    taus: np.ndarray
    variants: dict[str, Summary]
    publication: Publication  # the source of `systems`
    systems: dict[str, np.ndarray]  # of published systems, from their mean returns on the same games, as STATISTICS


def aggregates(groups: Groups) -> Aggregates | None:
    """Aggregate final returns over Atari games; None if fewer than two games were played by every variant."""
    played = {env_id: variants for env_id, variants in groups.items() if reference(env_id) is not None}
    names = variants_of(played)
    games = [env_id for env_id, variants in played.items() if set(names) <= set(variants)]
    if len(played) > 1 and len(games) < len(played):
        missing = ", ".join(sorted(set(played) - set(games)))
        consequence = "aggregates leave these games out" if len(games) > 1 else "so nothing is aggregated"
        warn(f"not every variant has played {missing}; {consequence}")
    if len(games) < 2:
        return None
    runs = {env_id: [c for them in played[env_id].values() for c in them] for env_id in games}
    early = [c for them in runs.values() for c in them if ends_early(c, them)]
    if early:
        warn(
            f"{early[0].run_dir}{' and others have' if early[1:] else ' has'} made fewer steps than others on the same "
            "game; aggregates take their last returns"
        )
    final = lambda env_id, name: np.array([human_normalised(env_id, c.returns[-1]) for c in played[env_id][name]])
    scores = {name: [final(env_id, name) for env_id in games] for name in names}
    best = max(float(s.max()) for by_game in scores.values() for s in by_game)
    taus = np.linspace(0, min(8.0, max(2.0, best)), 101)
    beside = publication(experiments(played, games))
    systems = {}
    for prefix, system in beside.systems.items():
        returned = {env_id: beside.returned(env_id, prefix) for env_id in games}
        by_game = [human_normalised(env_id, value) for env_id, value in returned.items() if value is not None]
        if len(by_game) == len(games):
            systems[system] = by_games([np.array([score]) for score in by_game])
    return Aggregates(games, taus, {name: summarise(scores[name], taus) for name in names}, beside, systems)


def experiments(groups: Groups, games: Iterable[str]) -> list[Json]:
    """The experiments of all runs on these games."""
    return [c.experiment for env_id in games for runs in groups[env_id].values() for c in runs]


def summarise(scores: Sequence[np.ndarray], taus: np.ndarray) -> Summary:
    """Summarise one variant's scores, [seeds] for each game, with its performance profile at taus [N]."""
    profile = lambda by_game: np.mean([(s[:, None] > taus).mean(0) for s in by_game], axis=0)
    value, low, high = bootstrap(scores, lambda by_game: np.concatenate([by_games(by_game), profile(by_game)]))
    s = len(STATISTICS)
    parts = (Estimate(value[i], low[i], high[i]) for i in (slice(None, s), slice(s, None)))
    return Summary([len(seeds) for seeds in scores], *parts)


def by_games(scores: Sequence[np.ndarray]) -> np.ndarray:
    """The numbers that STATISTICS names, of scores [seeds] for each game.  Every game weighs the same.  -> [4]."""
    rows = math.lcm(*(len(s) for s in scores))
    order = np.argsort(every := np.concatenate(scores))
    weight = np.concatenate([np.full(len(s), rows // len(s)) for s in scores])[order]
    until = np.cumsum(weight)  # each score as often as if all games were repeated to equally many seeds
    cut = until[-1] // 4
    kept = np.clip(np.minimum(until, until[-1] - cut) - np.maximum(until - weight, cut), 0, None)
    per_game = np.array([s.mean() for s in scores])
    gap = 1.0 - np.mean([np.minimum(s, 1.0).mean() for s in scores])
    return np.array([np.median(per_game), (every[order] * kept).sum() / kept.sum(), per_game.mean(), gap])


def bootstrap(scores: Sequence[np.ndarray], statistic: Callable[[Sequence[np.ndarray]], np.ndarray]) -> Estimate:
    """A statistic of scores, [seeds] for each game, -> [S], with its 95% stratified bootstrap interval.

    Each resample draws every game's seeds anew.  rliable's own bootstrap cannot be seeded, and needs the same number of
    seeds for every game.
    """
    value = statistic(scores)
    if max(len(s) for s in scores) == 1:
        return Estimate(value, np.full_like(value, np.nan), np.full_like(value, np.nan))
    rng = np.random.default_rng(0)
    draws = [s[rng.integers(len(s), size=(RESAMPLES, len(s)))] for s in scores]  # [RESAMPLES, seeds] for each game
    drawn = np.stack([statistic([d[i] for d in draws]) for i in range(RESAMPLES)])
    return Estimate(value, *np.percentile(drawn, (2.5, 97.5), axis=0))
