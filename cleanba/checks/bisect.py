"""`cleanba bisect A B`: where two runs diverge, down to the first number that differs, and what made it."""

import json
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, NamedTuple

import tyro

from cleanba.arguments import parse_command
from cleanba.checks.parting import Finding, first_difference, first_differing_field, note_versions
from cleanba.checks.sides import RemoteSide, Request
from cleanba.config import (
    INF,
    Placement,
    Range,
    Run,
    check_values,
    differences,
    fields_of,
    flag,
    from_json,
    offered_fields,
    read_config,
    read_experiment,
    require,
    shortened,
)
from cleanba.errors import Exit, printable
from cleanba.files import Json
from cleanba.help import written_flag
from cleanba.resolution import Config, fit, read_recipe
from cleanba.runs.curves import completed_alike
from cleanba.runs.diff import DIGESTS, rows_by_update
from cleanba.runs.directory import differing_machines
from cleanba.runs.progress_line import ProgressLine
from cleanba.runs.remote import find_run
from cleanba.runtime.checkpoint import counters_file, updates_kept
from cleanba.train_flags import parse, typed_names
from cleanba.trust import name_of

ABOUT = """usage: cleanba bisect RUN_A RUN_B [FLAGS]
       cleanba bisect RUN [FLAGS] -- [NAME=VALUE ...] [PLACEMENT FLAGS]

Compute two runs of one experiment again, or one run on two placements, update by update and side by side, and name the
first number that differs and what made it: an environment, acting, a shard's gradient, the sum, the optimiser …
Flags after `--` set B's placement; flags after a second `--` set A's.  NAME=VALUE sets an environment
variable of that side.  Exit code 0: the same bits throughout.  1: the two sides differ, or one of them differs from
what its run logged."""

MOST_DEVICES = 4096  # that a CPU may simulate


@dataclass(frozen=True)
class Flags:
    """Find where two runs of one experiment diverge, or one run on two placements."""

    runs: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="RUN_A [RUN_B]")]
    """directories of runs, archives, or hf:// addresses"""
    from_update: Annotated[int | None, tyro.conf.arg(name="from", metavar="UPDATE")] = None
    """begin from a checkpoint after this update, or the last one before it (0: from the beginning)"""
    to_update: Annotated[int | None, tyro.conf.arg(name="to", metavar="UPDATE")] = None
    """the last update to compute"""
    stall_timeout: Annotated[float | None, Range(1, INF, unit="seconds")] = None
    """seconds that one update may take (None: as many as the run allowed, but at least 600)"""
    trust_remote_code: bool = False
    """let a run from elsewhere choose what is imported and executed"""


class Place(NamedTuple):
    """Where one of the two sides computes."""

    run_dir: Path
    placement: Placement
    variables: dict[str, str]
    """environment variables"""

    def in_words(self) -> str:
        """Where it computes, in a few words."""
        devices = ", ".join(map(str, self.placement.learner_device_ids))
        words = f"{name_of(self.run_dir)}, actors on {list(self.placement.actor_device_ids)}, learners on [{devices}]"
        return words + "".join(f", {name}={value}" for name, value in self.variables.items() if name not in OWN)


OWN = ("JAX_NUM_CPU_DEVICES",)  # environment variables that this module sets itself


def bisect_command(argv: Sequence[str]) -> Exit:
    """`cleanba bisect`."""
    words, *sides = split(argv)
    flags = parse_command(Flags, words, "bisect", ABOUT)
    check_values(flags)
    require(len(flags.runs) in (1, 2), f"bisect takes one run or two, but was given {len(flags.runs)}\n{ABOUT}")
    require(len(sides) <= 2, f"bisect takes at most two `--`, but was given {len(sides)}\n{ABOUT}")
    with tempfile.TemporaryDirectory(prefix="cleanba-bisect-") as scratch:
        folders = [Path(scratch, name) for name in "AB"]  # to unpack archives into
        for folder in folders:
            folder.mkdir()
        run_dirs = [find_run(run, scratch=folder) for run, folder in zip(flags.runs, folders, strict=False)]
        return bisect(run_dirs[0], run_dirs[-1], sides, flags)


def bisect(a: Path, b: Path, sides: Sequence[Sequence[str]], flags: Flags) -> Exit:
    """Compare two runs, or one run with itself on the placement that `sides` gives; print where they differ."""
    require(
        a != b or bool(sides),
        f"bisect needs a second run, or flags after `--` that place {flags.runs[0]} elsewhere\n{ABOUT}",
    )
    trust = flags.trust_remote_code
    place_a = place_of(a, sides[1] if len(sides) > 1 else [], trust)
    place_b = place_of(b, sides[0] if sides else [], trust)
    require_same_experiment(a, b)
    span = find_span(a, b, flags, elsewhere=bool(sides))
    for line in span.lines:
        print(printable(line))
    if span.same_by_logs:
        return Exit(0)
    for name, place in (("A", place_a), ("B", place_b)):
        print(printable(f"{name}: {place.in_words()}"))
    from_where = f"the checkpoint after update {span.first:,}" if span.first else "the beginning"
    print(f"computing updates {span.first + 1:,} to {span.last:,} again, from {from_where}", flush=True)
    finding, remarks = search(place_a, place_b, span, flags)
    if span.first < span.first_divergence <= span.last and not finding and not remarks:
        remarks = [
            f"note: the logs differ at update {span.first_divergence:,}, although both sides agree here; see "
            "`cleanba diff`, and `cleanba verify` each of them"
        ]
    same = f"the same bits throughout: updates {span.first + 1:,} to {span.last:,}"
    for line in [*(finding.lines() if finding else [same]), *remarks]:
        print(printable(line))
    return Exit(1 if finding or remarks else 0)


def split(argv: Sequence[str]) -> list[list[str]]:
    """Arguments, cut at each "--"."""
    parts: list[list[str]] = [[]]
    for word in argv:
        if word == "--":
            parts.append([])
        else:
            parts[-1].append(word)
    return parts


def place_of(run_dir: Path, words: Sequence[str], trust_remote_code: bool) -> Place:
    """One side: a run on its own placement, changed by these arguments.

    What several processes computed, a single process computes here, on as many devices.

    Raises:
        UsageError: there is no such run, or a word would change what it trains.
    """
    recipe, experiment = read_recipe(run_dir, trust_remote_code)
    placement = from_json(Placement, read_config(run_dir).get("placement", {}))
    variables = dict(word.split("=", 1) for word in words if not word.startswith("-") and "=" in word)
    flags = [word for word in words if word.startswith("-") or "=" not in word]
    require(
        not {"-h", "--help", "--help-all", "--show-config"} & set(flags),
        f"after `--`, give only environment variables and placement flags\n{ABOUT}",
    )
    named = typed_names(recipe, flags)
    trained, of_run = (sorted(named & set(names)) for names in (offered_fields(recipe.experiment), fields_of(Run)))
    require(
        not of_run,
        f"{', '.join(map(written_flag, of_run))} would change nothing here; after `--`, give only placement flags and "
        "NAME=VALUE",
    )
    require(
        not trained,
        f"{', '.join(map(flag, trained))} would change what is trained; after `--`, give only placement flags and "
        "NAME=VALUE",
    )
    n = processes_of(run_dir, placement)
    require(
        n <= experiment.num_actors and n * len(placement.learner_device_ids) <= experiment.num_shards,
        f"{run_dir}/config.json places the run on {n} processes with {len(placement.learner_device_ids)} learner "
        "devices each, more than it has actors or shards; name the run's own directory",
    )
    if n > 1:
        many = n * len(placement.learner_device_ids), n * len(placement.actor_device_ids)
        placement = replace(
            placement,
            learner_device_ids=tuple(range(many[0])),
            actor_device_ids=tuple(range(min(many[1], experiment.num_actors))),
        )
    default = Config(
        experiment, placement=placement.in_one_process(), run=Run(trust_remote_code=trust_remote_code), whole=run_dir
    )
    placement = parse(recipe, flags, default).placement
    fit(recipe, experiment, placement)
    require(not placement.distributed, "bisect computes each side in one process; leave out --distributed")
    devices = 1 + max((*placement.learner_device_ids, *placement.actor_device_ids, 0))
    require(devices <= MOST_DEVICES, f"{run_dir}: there is no device {devices - 1}; choose some below {MOST_DEVICES}")
    if devices > 1:
        variables = {"JAX_NUM_CPU_DEVICES": str(devices), **variables}
    return Place(run_dir, placement, variables)


def processes_of(run_dir: Path, placement: Placement) -> int:
    """How many processes trained a run, which it has recorded if no flag gave their number, as under Slurm."""
    if placement.num_processes is not None or not placement.distributed:
        return placement.num_processes or 1
    recorded = read_config(run_dir).get("num_processes")
    return recorded if isinstance(recorded, int) and recorded >= 1 else 1


def require_same_experiment(a: Path, b: Path) -> None:
    """Raise `UsageError` unless two runs train the same."""
    changed = differences(*completed_alike([read_experiment(a), read_experiment(b)]), between=" and ")
    require(
        not changed,
        f"{name_of(a)} and {name_of(b)} are different experiments ({shortened(changed)}), which need not end in the "
        "same bits; compare two runs of one experiment",
    )


class Span(NamedTuple):
    """Which updates to compute."""

    first: int
    """the update whose checkpoint both begin from; 0: the beginning"""
    last: int
    digests: tuple[dict[int, str], dict[int, str]]
    """what each run has logged: update -> digest of the parameters"""
    lines: list[str]
    """what the logs show"""
    same_by_logs: bool = False
    """whether the logs alone show that both are the same"""
    first_divergence: int = 0
    """the first update at which the two logs differ; 0: they do not"""


def find_span(a: Path, b: Path, flags: Flags, elsewhere: bool) -> Span:
    """Choose the updates to compute: from the last common checkpoint to the first digest that differs.

    Raises:
        UsageError: there are no such updates.
    """
    rows_a, rows_b = rows_by_update(a), rows_by_update(b)
    reached = min(max(rows_a, default=0), max(rows_b, default=0))
    require(reached > 0, f"{name_of(a if not rows_a else b)} has logged no update yet; wait, or name another run")
    digests: dict[int, list[tuple[str, str]]] = {}  # by the updates after which both runs took them
    for update in sorted(rows_a.keys() & rows_b.keys()):
        row_a, row_b = rows_a[update], rows_b[update]
        if "params_digest" in row_a and "params_digest" in row_b:
            digests[update] = [(row_a[name], row_b[name]) for name in DIGESTS if name in row_a and name in row_b]
    diverged = [update for update, pairs in digests.items() if any(x != y for x, y in pairs)]
    two_runs = a != b
    lines: list[str] = []
    last = reached
    if two_runs and diverged:
        same = max((update for update in digests if update < diverged[0]), default=0)
        lines.append(f"the logs diverge between update {same:,} and update {diverged[0]:,}")
        lines += differing_machines(read_config(a), read_config(b))
        last = diverged[0]
    elif two_runs and digests:
        newest = max(digests)
        words = f"the same bits throughout: all {len(digests)} digests in both logs, the last after update {newest:,}"
        if flags.from_update is None and flags.to_update is None and not elsewhere:
            return Span(0, newest, ({}, {}), [words], same_by_logs=True)
        lines.append(words)
    last = last if flags.to_update is None else flags.to_update
    which = "both runs" if two_runs else "the run"
    require(0 < last <= reached, f"--to {last} was not reached by {which}; choose an update from 1 to {reached}")
    require(
        flags.from_update is None or 0 <= flags.from_update < last,
        f"--from {flags.from_update} is not before update {last}, the last to compute; choose a smaller one",
    )
    most = last - 1 if flags.from_update is None else flags.from_update
    first = 0
    if two_runs or flags.from_update is not None:
        first = max((update for update in common_checkpoints(a, b) if update <= most), default=0)
    logged = lambda rows: {u: row["params_digest"] for u, row in rows.items() if "params_digest" in row}
    first_divergence = diverged[0] if two_runs and diverged else 0
    return Span(first, last, (logged(rows_a), logged(rows_b)), lines, first_divergence=first_divergence)


def common_checkpoints(a: Path, b: Path) -> list[int]:
    """The updates after which both runs keep a checkpoint, with the same state and memory."""
    both = sorted(set(updates_kept(a)) & set(updates_kept(b)))
    return [update for update in both if _checksums(a, update) == _checksums(b, update) is not None]


def _checksums(run_dir: Path, update: int) -> tuple[str, list[str]] | None:
    try:
        counters: Json = json.loads(counters_file(run_dir, update).read_text())
        return counters["digest"], counters["memory"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


def search(a: Place, b: Place, span: Span, flags: Flags) -> tuple[Finding | None, list[str]]:
    """Compute both sides until they diverge.  Returns the finding, and remarks on the runs' logs.

    Raises:
        UsageError: a side does not fit this machine.
        Failure: a side failed.
    """
    sides: list[RemoteSide] = []
    remarks: dict[str, str] = {}  # by side
    versions: dict[bytes, int] = {}
    finding: Finding | None = None
    with ProgressLine() as progress, tempfile.TemporaryDirectory(prefix="cleanba-bisect-") as folder:
        try:
            for name, place in (("A", a), ("B", b)):
                request = Request(
                    *(place.run_dir.absolute(), place.placement, span.first, span.last),
                    trust_remote_code=flags.trust_remote_code,
                    stall_timeout=flags.stall_timeout,
                )
                sides.append(RemoteSide(name, request, place.variables, Path(folder) / name))
            for update in range(span.first + 1, span.last + 1):
                (_, fingerprints_a), (_, fingerprints_b) = [side.next() for side in sides]
                for place, name, logged, fingerprints in zip(
                    (a, b), "AB", span.digests, (fingerprints_a, fingerprints_b), strict=True
                ):
                    if (
                        logged.get(update, fingerprints.params_digest) != fingerprints.params_digest
                        and name not in remarks
                    ):
                        remarks[name] = (
                            f"note: {name_of(place.run_dir)} has logged another digest of the parameters after update "
                            f"{update:,} than {name} has here: what was computed then cannot be reproduced here, "
                            "because hardware, packages or flags differ, because the computation is not "
                            "deterministic, or because the log was changed, which `cleanba verify` would find"
                        )
                if first_differing_field(fingerprints_a, fingerprints_b) is not None:
                    progress.say(f"update {update:,} differs; locating the difference")
                    progress.show("locating the difference")
                    finding = first_difference(sides[0], sides[1], update, versions)
                    break
                note_versions(versions, update, fingerprints_a)
                done, whole = update - span.first, span.last - span.first
                progress.show(f"{done:,} of {whole:,} updates computed: the same so far")
                for side in sides:
                    side.go_on()
        finally:
            for side in sides:
                side.close()
    return finding, [*remarks.values()]
