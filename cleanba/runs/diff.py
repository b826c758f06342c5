"""`cleanba diff RUN_A RUN_B`: whether two runs trained the same bits, and if not, from which update on they differ."""

import math
import re
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from cleanba.config import differences, read_config, read_experiment, shortened
from cleanba.errors import Exit, UsageError, printable
from cleanba.files import Json
from cleanba.runs import log
from cleanba.runs.curves import completed_alike
from cleanba.runs.directory import differing_machines
from cleanba.runs.remote import find_run
from cleanba.trust import source_of

USAGE = """usage: cleanba diff RUN_A RUN_B

Compares two runs, each a directory, an archive or hf://USER/REPOSITORY: their experiments, parameters, all else that
the learner keeps (state and memory), and metrics.
Says from which update on they differ, and by how much.  Exit code 0 when identical, 1 when not."""

# Name of a digest in metrics.jsonl -> what it covers.  Runs of earlier versions have only the first.
DIGESTS = {"params_digest": "parameters", "learner_digest": "state and memory"}

# Metrics that depend on where and when a run was made, not on what it trained.
NOT_TRAINED = re.compile(r"stats/\w+_time|stats/bottleneck|charts/SPS.*|seconds.*|chain|made_by")


def rows_by_update(run_dir: Path) -> dict[int, Json]:
    """The rows of metrics.jsonl by update, without evaluations and without metrics that depend on the placement.

    Raises:
        UsageError: the file cannot be read.
    """
    rows: dict[int, Json] = {}
    for row in log.read_rows(run_dir):
        if not log.is_evaluation(row):
            kept = {k: v for k, v in row.items() if not NOT_TRAINED.fullmatch(k)}
            rows[row["update"]] = kept | rows.get(row["update"], {})  # digests may have a row of their own
    return rows


def compare_metrics(a: dict[int, Json], b: dict[int, Json]) -> list[str]:
    """One line per metric that differs: the first update that both runs logged, and the largest difference."""
    first: dict[str, int] = {}
    largest: dict[str, float] = {}
    for update in sorted(set(a) & set(b)):
        for name in sorted(set(a[update]) & set(b[update]) - set(DIGESTS)):
            x, y = a[update][name], b[update][name]
            if x == y:
                continue
            first.setdefault(name, update)
            numeric = isinstance(x, int | float) and isinstance(y, int | float)
            apart = math.inf
            with suppress(OverflowError):  # of a number with hundreds of digits
                apart = abs(float(x) - float(y)) if numeric else math.inf
            largest[name] = max(largest.get(name, 0.0), apart)
    by_how_much = lambda d: f", by up to {d:.3g}" if math.isfinite(d) else ""
    return [f"{name}: from update {update} on{by_how_much(largest[name])}" for name, update in first.items()]


class Compared(NamedTuple):
    """The comparison of two runs by one of the digests."""

    same: bool | None  # None: there is no update at which both runs took this digest
    words: str


def compare_digests(name: str, a: dict[int, Json], b: dict[int, Json]) -> Compared:
    """Compare the digests of that name, at the updates at which both runs took one."""
    both = [update for update in sorted(set(a) & set(b)) if name in a[update] and name in b[update]]
    if not both:
        return Compared(None, "cannot be compared: there is no update at which both runs took a digest")
    wrong = [update for update in both if a[update][name] != b[update][name]]
    if not wrong:
        return Compared(True, f"are identical at all {len(both)} digests, the last at update {both[-1]}")
    fine = [update for update in both if update < wrong[0]]
    before = f"the same at update {fine[-1]}" if fine else "the first at which both runs took a digest"
    return Compared(False, f"differ from update {wrong[0]} on, {before}")


def compare_states(a: Path, b: Path) -> str:
    """The largest difference between two runs' states at the newest checkpoint that both keep, as a sentence."""
    from cleanba.runtime.checkpoint import read_arrays, updates_to_read

    if source_of(a) is not None or source_of(b) is not None:  # their sizes are not checked here
        return "checkpoints of a run from elsewhere are not read, so states are not compared number by number"
    common = sorted(set(updates_to_read(a)) & set(updates_to_read(b)))
    if not common:
        return "no checkpoint of the same update is kept by both runs, so states cannot be compared number by number"
    for update in reversed(common):
        try:
            x, y = read_arrays(a, update), read_arrays(b, update)
            break
        except Exception:  # damaged, or removed by a run that is still training: Orbax raises many errors
            continue
    else:
        return "no checkpoint that both runs keep can be read, so states cannot be compared number by number"
    if [v.shape for v in x] != [v.shape for v in y]:
        return f"the arrays in the checkpoints of update {update} have different shapes"
    apart = max((float(abs(p.astype("float64") - q).max()) for p, q in zip(x, y, strict=True) if p.size), default=0.0)
    return f"largest difference in the learner's state after update {update}: {apart:.3g}"


def diff_command(argv: Sequence[str]) -> Exit:
    """`cleanba diff`."""
    if argv and argv[0] in ("-h", "--help"):
        print(USAGE)
        return Exit()
    if len(argv) != 2:
        raise UsageError(f"diff takes two run directories, but was given {len(argv)}\n{USAGE}")
    a, b = (find_run(run, model=False) for run in argv)
    changed = differences(*completed_alike([read_experiment(a), read_experiment(b)]), between=" and ")
    rows_a, rows_b = rows_by_update(a), rows_by_update(b)
    print("same experiment" if not changed else f"different experiments: {printable(shortened(changed))}")
    for line in differing_machines(read_config(a), read_config(b)):
        print(printable(line))

    compared = {name: compare_digests(name, rows_a, rows_b) for name in DIGESTS}
    for name, what in DIGESTS.items():
        print(printable(f"{what} {compared[name].words}"))
    differ = any(found.same is False for found in compared.values())
    if differ:
        print(compare_states(a, b))
    lines = compare_metrics(rows_a, rows_b)
    shared = len(set(rows_a) & set(rows_b))
    print("\n".join(["metrics differ:", *("  " + printable(line) for line in lines)]) if lines else
          f"metrics are identical at all {shared} common log points")  # fmt: skip

    last_a, last_b = max(rows_a, default=0), max(rows_b, default=0)
    if last_a != last_b:
        print(f"the runs reach different updates: {last_a} and {last_b}")
    taken = compared["params_digest"].same is not None
    identical = taken and not differ and not changed and not lines and last_a == last_b
    print("identical" if identical else "not identical")
    return Exit(0 if identical else 1)
