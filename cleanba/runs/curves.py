"""Learning curves from the logs of runs, grouped for comparison, for `cleanba plot` and `cleanba report`."""

import json
import math
import os
import warnings
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Literal, NamedTuple, TypeGuard

import numpy as np

from cleanba.config import read_experiment, require
from cleanba.errors import UsageError, closest_names, warn
from cleanba.files import METRICS, Json
from cleanba.runs import log
from cleanba.trust import MARK

GRID = 256  # points of a band's axis
RESAMPLES = 2000
NEARLY = 0.97  # a run that made this share of the steps of its group's longest run has not ended early


class Curve(NamedTuple):
    """The returns that one run logged.  Arrays are [N], in the order of the steps, and not empty."""

    run_dir: Path
    experiment: Json
    steps: np.ndarray  # environment steps
    seconds: np.ndarray  # since the run began
    returns: np.ndarray  # mean return of the last 100 episodes, or another metric
    finished: bool = False  # whether the run has finished, even before its last step, as with --target-return


class Band(NamedTuple):
    """Several runs on one axis.  Arrays are [GRID]."""

    x: np.ndarray
    mean: np.ndarray
    low: np.ndarray  # NaN where there is only one run
    high: np.ndarray


class Interval(NamedTuple):
    """A number and its 95% interval."""

    value: float
    low: float
    high: float


# Reading


def find_runs(places: Iterable[Path]) -> list[Path]:
    """All run directories at or under these places, without repetition.

    Runs from elsewhere (hf:// addresses, archives) count only if they are named themselves: a folder's own runs are
    seeds of one study; downloaded runs are not.

    Raises:
        UsageError: a place does not exist, or holds no run.
    """
    found: dict[Path, Path] = {}
    for place in places:
        require(place.is_dir(), f"{place} is not a directory; name run directories, or a folder that holds some")
        here: list[Path] = []
        foreign: list[Path] = []
        seen = {os.path.realpath(place)}  # a link may lead upwards
        for folder, below, files in os.walk(place, followlinks=True):
            if "config.json" in files and METRICS in files:
                elsewhere = MARK in files and Path(folder) != place
                (foreign if elsewhere else here).append(Path(folder))
                below.clear()
            real = {name: os.path.realpath(os.path.join(folder, name)) for name in below}
            below[:] = sorted(name for name in below if real[name] not in seen)
            seen.update(real.values())
        if foreign:
            warn(f"{foreign[0]}{' and others come' if foreign[1:] else ' comes'} from elsewhere; left out unless named")
        require(bool(here), what_is_missing(place))
        found |= {path.resolve(): path for path in here}
    return list(found.values())


def what_is_missing(place: Path) -> str:
    """Why a folder holds no run that can be drawn, and what to do, in one sentence."""
    if log.lacks_config(place):
        return f"{place} has no config.json, so what it trained is unknown; restore that file, or name another run"
    if os.path.isfile(place / "config.json"):
        return f"{place} has no {METRICS}, so it cannot be drawn; `cleanba eval {place}` still plays it"
    return f"{place} holds no run; name a directory with config.json and {METRICS} in it"


def read_rows(run_dir: Path) -> list[Json]:
    """The rows of metrics.jsonl in the order of their updates.  Lines that are damaged are left out with a warning.

    Raises:
        UsageError: the file cannot be read.
    """
    rows: dict[int, Json] = {}
    damaged = []
    try:
        for number, row in log.read(run_dir):
            if row is None or not all(is_number(row.get(name)) for name in ("update", "global_step", "seconds")):
                damaged.append(number)
            else:
                rows[row["update"]] = row | rows.get(row["update"], {})  # an evaluation's row comes later
    except OSError as error:
        raise UsageError(f"{run_dir}/metrics.jsonl cannot be read: {error.strerror}; name a run") from None
    if damaged:
        lines = "line is" if len(damaged) == 1 else "lines are"
        warn(f"{run_dir}/metrics.jsonl: damaged {lines} left out: number {log.some(damaged)}")
    return [rows[update] for update in sorted(rows)]


def is_number(x: object) -> TypeGuard[float]:
    """Whether a value of a log is a number of an ordinary size."""
    return isinstance(x, int | float) and -(2.0**63) < x < 2.0**63


def column(rows: Sequence[Json], name: str) -> np.ndarray:
    """One metric as floats [N], NaN where a row has no such number, or one that is too large to be drawn."""
    values = (row.get(name) for row in rows)
    found = np.array([v if isinstance(v, float) or is_number(v) else math.nan for v in values], np.float64)
    return np.where(np.abs(found) < LARGEST, found, math.nan)


LARGEST = 1e300  # a stranger's log may have any numbers


RETURN = "charts/episodic_return"


def load(places: Iterable[Path], metric: str = RETURN) -> list[Curve]:
    """The curves of all runs in `places`.  Runs without an episode, and repeated runs, are left out with a warning.

    metric: what to read from their logs in place of returns.

    Raises:
        UsageError: there is nothing to draw.
    """
    places = list(places)
    found: list[Curve] = []
    unread = 0
    logged = False
    for run_dir in find_runs(places):
        try:
            experiment, rows = read_experiment(run_dir), read_rows(run_dir)
            for name in ("algorithm", "env_id", "seed"):
                require(name in experiment, f"{run_dir}/config.json has no {name}")
        except UsageError as error:
            warn(f"{error}; left out")
            unread += 1
            continue
        logged = logged or bool(rows)
        returns = column(rows, metric)
        there = np.isfinite(returns)
        if not there.any():
            names = sorted({name for row in rows for name in row if "/" in name})
            close = closest_names(metric, names) if metric not in names else ""
            words = f"has logged no number as {metric}" if metric in names else f"has logged no {metric}"
            why = "has logged nothing yet" if not rows else "has finished no episode yet" if metric == RETURN else words
            warn(f"{run_dir} {why}; " + (f"did you mean {close}?" if close else "left out"))
            continue
        steps, seconds = column(rows, "global_step")[there], column(rows, "seconds")[there]
        finished = log.is_finished(run_dir)
        found.append(Curve(run_dir, experiment, steps, np.maximum.accumulate(seconds), returns[there], finished))
    curves: dict[str, Curve] = {}
    for curve, experiment in zip(found, completed_alike([c.experiment for c in found]), strict=True):
        key = json.dumps(experiment, sort_keys=True)
        other = curves.get(key)
        if other is not None:  # the same bits again would not be another sample
            curve, shorter = sorted((other, curve), key=lambda c: -c.steps[-1])
            warn(f"{shorter.run_dir} is the same experiment and seed as {curve.run_dir}; left out")
        curves[key] = curve
    require(bool(curves) or not unread, "there is nothing to draw; the warnings above say why")
    everywhere = ", ".join(map(str, places))
    require(
        logged, f"no run of {everywhere} has logged anything yet; train longer, or log more often (--log-frequency)"
    )
    require(
        bool(curves) or metric == RETURN,
        f"no run of {everywhere} has logged {metric}; docs/reference/metrics.md lists what is logged",
    )
    require(
        bool(curves),
        f"no run of {everywhere} has finished an episode yet; train them longer, or with a larger "
        "--env-epoch, as no episode outlives an epoch of environments",
    )
    return list(curves.values())


def completed_alike(experiments: Sequence[Json]) -> list[Json]:
    """The experiments; fields that an older version did not record get the algorithm's defaults."""
    fields: dict[str, set[frozenset[str]]] = defaultdict(set)
    for e in experiments:
        fields[e["algorithm"]].add(frozenset(e))
    if all(len(different) == 1 for different in fields.values()):
        return list(experiments)
    from cleanba.resolution import completed  # seconds to import, and mostly not needed

    return [completed(e) for e in experiments]


# Groups

Groups = dict[str, dict[str, list[Curve]]]
"""environment -> variant -> one curve per seed, all in the same order everywhere"""


def group(curves: Sequence[Curve]) -> Groups:
    """Group curves by environment and by variant, such as "learning_rate=0.001".

    A variant is named after the settings, other than environment and seed, that differ between runs of one algorithm on
    one environment.
    """
    values: dict[tuple[str, str], dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    experiments = completed_alike([c.experiment for c in curves])
    for e in experiments:
        for name, value in e.items():
            if name not in ("env_id", "seed"):
                values[e["env_id"], e["algorithm"]][name].add(json.dumps(value))
    differ = sorted({name for fields in values.values() for name, seen in fields.items() if len(seen) > 1})
    several = len({e["algorithm"] for e in experiments}) > 1 or not differ

    def shown(value: object) -> str:
        if isinstance(value, list):
            return "x".join(map(shown, value))
        return f"{value:.10g}" if isinstance(value, float) else str(value)

    def label(e: Json) -> str:
        parts = [f"{name}={shown(e[name])}" for name in differ if name in e]
        return ", ".join([e["algorithm"]] * (several or not parts) + parts)

    groups: Groups = defaultdict(lambda: defaultdict(list))
    both = zip(curves, experiments, strict=True)
    for c, e in sorted(both, key=lambda pair: (pair[1]["env_id"], pair[1]["seed"])):
        groups[e["env_id"]][label(e)].append(c)
    return {
        env_id: {name: by_name[name] for name in sorted(by_name, key=natural)} for env_id, by_name in groups.items()
    }


def variants_of(groups: Groups) -> list[str]:
    """All variants, sorted."""
    return sorted({name: None for variants in groups.values() for name in variants}, key=natural)


def natural(text: str) -> list[tuple[int, float, str]]:
    """A sort key by which numbers within a text compare by value."""
    parts: list[tuple[int, float, str]] = []
    for word in text.replace("=", " = ").replace(",", " , ").split():
        try:
            parts.append((0, float(word), ""))
        except ValueError:
            parts.append((1, 0.0, word))
    return parts


# Statistics


def resample_means(values: np.ndarray) -> np.ndarray:
    """Means over bootstrap resamples of the rows, ignoring NaN.  [R, ...] -> [RESAMPLES, ...]."""
    runs = len(values)
    flat = values.reshape(runs, -1)
    drawn = np.random.default_rng(0).multinomial(runs, np.full(runs, 1 / runs), RESAMPLES).astype(np.float64)
    there = np.isfinite(flat)
    count = drawn @ there
    with np.errstate(invalid="ignore"):
        means = np.where(count > 0, drawn @ np.where(there, flat, 0.0) / count, np.nan)
    return means.reshape(RESAMPLES, *values.shape[1:])


def interval(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """2.5th and 97.5th percentile of the mean of the rows under resampling.  [R, ...] -> [...], NaN for one row."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # a column that is NaN throughout
        low, high = np.nanpercentile(resample_means(values), (2.5, 97.5), axis=0)
    several = np.isfinite(values).sum(0) > 1
    return np.where(several, low, np.nan), np.where(several, high, np.nan)


def ends_early(curve: Curve, others: Sequence[Curve]) -> bool:
    """Whether a run has made clearly fewer steps than the longest of its group."""
    return curve.steps[-1] < NEARLY * max(c.steps[-1] for c in others)


def stopped_early(curve: Curve, others: Sequence[Curve]) -> bool:
    """Whether a run `ends_early` and is unfinished, so its last return is not final."""
    return ends_early(curve, others) and not curve.finished


def band(curves: Sequence[Curve], axis: Literal["steps", "seconds"]) -> Band:
    """Mean and 95% interval over runs, interpolated linearly onto one axis.

    The axis begins at the latest first point of all runs, and ends at the earliest last point of those that did not end
    early.  A run that ended early counts up to its end; if it had finished, as with --target-return, its last return
    counts from there on.
    """
    xs: list[np.ndarray] = [getattr(c, axis) for c in curves]
    end = min(x[-1] for x, c in zip(xs, curves, strict=True) if not ends_early(c, curves))
    start = max(x[0] for x in xs)
    if start >= end:
        start = min(x[0] for x in xs)
    x = np.linspace(start, end, GRID)
    after = lambda c: c.returns[-1] if c.finished else np.nan
    lines = [np.interp(x, xs[i], c.returns, left=np.nan, right=after(c)) for i, c in enumerate(curves)]
    y = np.stack(lines)  # [R, GRID]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # a gap between the ends of two runs
        mean = np.nanmean(y, axis=0)
    return Band(x, mean, *interval(y))


def mean_interval(values: Sequence[float]) -> Interval:
    """The mean of one number per seed, with its 95% interval."""
    array = np.asarray(values, np.float64)
    low, high = interval(array)
    return Interval(float(array.mean()), float(low), float(high))
