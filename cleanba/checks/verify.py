"""`cleanba verify RUN`: whether a run's results are what its code computes, checked on parts of the run.

A run's log has digests of the learner, each linked to the one before it (`runtime/chain.py`).  The updates between two
kept checkpoints are a segment.  Some segments are computed again here, each from the checkpoint at its start, and the
results must have the digests in the log.  docs/guides/verify.md says what this proves and what it does not.
"""

import random
import secrets
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import tyro

from cleanba.arguments import parse_command
from cleanba.checks.recompute import Rerun, digests_of, open_rerun, read_checkpoint, recompute
from cleanba.config import (
    INF,
    Experiment,
    Placement,
    Range,
    check_values,
    differences,
    read_config,
    read_experiment,
    require,
    shortened,
    to_json,
)
from cleanba.environments import jax_envs
from cleanba.environments.backends import repeatable, sources
from cleanba.errors import Exit, Failure, Interrupted, UsageError, exit_code, printable
from cleanba.files import Json
from cleanba.resolution import earlier_experiment
from cleanba.runs.log import is_finished, read_result, read_rows
from cleanba.runs.remote import find_run
from cleanba.runtime import chain, records
from cleanba.runtime.chain import DIGESTS, Linked
from cleanba.runtime.checkpoint import Saved, read_model, updates_kept
from cleanba.runtime.digests import params_digest
from cleanba.runtime.hardware import describe_devices, for_gpus
from cleanba.runtime.records import Snapshot
from cleanba.trust import source_of

SEGMENTS = 3  # drawn if no flag says how many
STATUSES = ("finished", "interrupted", "failed")  # with which a run ends
Reason = Literal["processor", "packages", "revision"]


@dataclass(frozen=True)
class Verify:
    """Compute parts of a run again, on this machine's devices, and compare them with the digests that it recorded.

    Exit code 0: the same bits.  1: they differ, or the run's records contradict each other.  3: nothing was computed,
    because the bits need not agree here (another processor, package or revision, --no-deterministic, an environment
    that ignores its seed), or because the log has no digests.
    """

    run: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """directory of the run, hf://user/repository for an uploaded one, or an archive of its directory"""
    segments: Annotated[int | None, Range(1, 10**9)] = None
    """segments between kept checkpoints to draw (None: 3, or as many as --fraction takes)"""
    fraction: Annotated[float | None, Range(0, 1, open_low=True)] = None
    """share of the run's updates to compute; with --segments, each segment is cut short so that together they make up
    at most this share, but each is computed at least up to its first digest"""
    from_update: Annotated[int | None, tyro.conf.arg(name="from")] = None
    """start from the checkpoint after this update (0: from the beginning)"""
    to_update: Annotated[int | None, tyro.conf.arg(name="to")] = None
    """compute up to this update"""
    seed: Annotated[int | None, Range(0, 2**63)] = None
    """seed of the draw (None: a new one each time, which is printed)"""
    actor_device_ids: tuple[int, ...] = (0,)
    """devices that act, by local index"""
    learner_device_ids: tuple[int, ...] = (0,)
    """devices that learn, by local index"""
    stall_timeout: Annotated[float | None, Range(1, INF, unit="seconds")] = None
    """seconds that one update may take (None: as many as the run allowed, but at least 600)"""
    despite: tuple[Reason, ...] = ()
    """compute even if the processor, the packages or the revision of the code are not those of the run"""
    trust_remote_code: bool = False
    """for a downloaded or unpacked run: import and call what its config.json names (docs/guides/trust.md)"""

    @property
    def names_updates(self) -> bool:
        """Whether the flags name the updates to compute; otherwise segments are drawn."""
        return self.from_update is not None or self.to_update is not None


class CannotCompare(Exception):
    """The bits need not agree, so nothing is computed.  Exit code 3."""


def verify_command(argv: Sequence[str]) -> Exit:
    """`cleanba verify`."""
    flags = parse_command(Verify, argv, "verify")
    check_values(flags)
    require(
        not flags.names_updates or flags.segments is flags.fraction is flags.seed is None,
        "--from and --to name the updates to compute, and --segments, --fraction and --seed draw them; use either "
        "--from/--to or --segments/--fraction/--seed",
    )
    with tempfile.TemporaryDirectory(prefix="cleanba-verify-") as scratch:
        try:
            same = verify(find_run(flags.run, scratch=Path(scratch)), flags)
        except CannotCompare as why:
            print(f"cleanba: {printable(str(why))}", file=sys.stderr)
            return Exit(3)
        except Interrupted as error:
            print(f"cleanba: {error}", file=sys.stderr)
            return Exit(exit_code(error))
    return Exit(0 if same else 1)


def verify(run_dir: Path, flags: Verify) -> bool:
    """Verify a run, and print what was found.  Returns whether all that was compared is the same.

    Raises:
        UsageError: there is no such run, or it has no such update.
        CannotCompare: its bits need not agree with those that would be computed here.
        Failure: a checkpoint is damaged, or something outside the code failed.
    """
    read_experiment(run_dir)  # which refuses what is no run
    said = Said.of(run_dir)  # before the log is read: a run that still trains logs first, then writes the rest
    rows = read_rows(run_dir)
    checked = chain.check(rows, chain.first_experiment(read_config(run_dir)))
    linked = {row.update: row for row in checked.rows}
    if checked.broken:
        print(printable(f"{flags.run}: {checked.broken}"))
        return False
    if not linked:
        raise CannotCompare(
            f"{flags.run} has no chain of digests: it was trained by an earlier version, or took no checkpoint"
        )
    placement = Placement(flags.actor_device_ids, flags.learner_device_ids)
    with open_rerun(run_dir, placement, flags.trust_remote_code, flags.stall_timeout) as rerun:
        wrong = contradictions(rerun, linked, checked.unlinked, said)
        if wrong:
            print("\n".join(printable(f"{flags.run}: {what}") for what in wrong))
            return False
        print(introduction(flags.run, rerun, checked))
        require_repeatable(flags.run, rerun)
        there = segments_of(rerun, linked)
        chosen = with_beginning(rerun, choose(there, linked, flags))
        require_comparable(flags, rerun, chosen, linked)
        return compute(rerun, chosen, len(there), linked, flags)


def introduction(name: str, rerun: Rerun, checked: chain.Checked) -> str:
    """What the run is, and that its chain holds."""
    last, e = checked.rows[-1], rerun.experiment
    words = (
        f"{name}: {rerun.recipe.name} on {printable(e.env_id)}, {e.num_updates:,} updates; checkpoints kept: "
        f"{len(updates_kept(rerun.run_dir))}\n"
        f"the chain holds: {len(checked.rows)} digests, up to update {last.update:,}, last link {last.link}"
    )
    if checked.unlinked:
        words += (
            f"\nit begins at update {checked.rows[0].update:,}; an earlier version logged the digests of "
            f"{len(checked.unlinked)} updates before it, which no chain protects"
        )
    return words


# ------------------------------------------------------------------------------------- what the run says of itself


class Said(NamedTuple):
    """What a run's files besides its log say of it.  A run that still trains may write more of them at any moment."""

    kept: list[int]
    """the updates that have checkpoints"""
    result: Json | None
    """result.json, {} if it is damaged; None if there is none"""
    has_model: bool
    """whether there is a model.msgpack"""

    @classmethod
    def of(cls, run_dir: Path) -> "Said":
        result = read_result(run_dir) if (run_dir / "result.json").exists() else None
        return cls(updates_kept(run_dir), result, (run_dir / "model.msgpack").exists())


def contradictions(rerun: Rerun, linked: Mapping[int, Linked], unlinked: Sequence[int], said: Said) -> list[str]:
    """How a run's files contradict its log, one sentence each: its result, its model, its newest checkpoint.

    unlinked: updates whose digests the log has without a link (`chain.Checked`).
    said: what these files said before the log was read.
    """
    last = linked[max(linked)]
    found = experiment_contradicts(rerun) + result_contradicts(rerun, linked, said.result)
    if said.has_model:
        model = rerun.run_dir / "model.msgpack"
        _, like = rerun.algorithm.shapes()
        digest = params_digest(read_model(model, like))
        logged = [row.update for row in linked.values() if row.params_digest == digest]
        if not logged:
            found.append(f"model.msgpack holds parameters with the digest {digest}, which is not in the log")
        elif (said.result or {}).get("status") == "finished" and logged[-1] != last.update:
            found.append(
                f"model.msgpack holds the parameters after update {logged[-1]}, but the run has finished with "
                f"{last.update}"
            )
    logged_anyhow = {*linked, *unlinked}
    found += [f"checkpoint {update} has no digests in the log" for update in said.kept if update not in logged_anyhow]
    for update in reversed([update for update in said.kept if update in linked]):
        try:
            newest = read_checkpoint(rerun, update)
        except Failure:
            if update in updates_kept(rerun.run_dir):
                raise
            continue  # a run that still trains has removed it meanwhile
        found += checkpoint_differs(linked[update], digests_of(rerun, newest))
        break
    return found


def experiment_contradicts(rerun: Rerun) -> list[str]:
    """How the experiment in config.json contradicts the one that the run began with, which its first link covers.

    The run may have been made longer.  Versions of Cleanba that resumed it may have added settings, which then have the
    algorithm's defaults, or removed some that had no effect.
    """
    first = chain.first_experiment(read_config(rerun.run_dir))
    source = None if rerun.trust_remote_code else source_of(rerun.run_dir)
    try:
        began = earlier_experiment(rerun.recipe, {k: x for k, x in first.items() if k != "algorithm"}, source)
    except UsageError as error:
        return [f"the experiment that the run began with, first_experiment in config.json, is invalid: {error}"]
    began = replace(began, total_timesteps=rerun.experiment.total_timesteps)
    changed = differences(
        {"algorithm": first.get("algorithm"), **to_json(began)},
        {"algorithm": rerun.recipe.name, **to_json(rerun.experiment)},
    )
    return [f"config.json has another experiment than the run began with ({shortened(changed)})"] if changed else []


def result_contradicts(rerun: Rerun, linked: Mapping[int, Linked], result: Json | None) -> list[str]:
    """How a run's result.json contradicts its log, in one sentence; none if it does not, or there is no such file."""
    if result is None:  # the run goes on
        return []
    last = linked[max(linked)]
    status, update = result.get("status"), result.get("update", last.update)
    if status not in STATUSES:
        return [f"result.json is damaged: its status is not one of {', '.join(STATUSES)}"]
    if status == "finished":
        early = result.get("target_return_reached", True) is not None  # of earlier versions' runs it is unknown
        planned = rerun.experiment.num_updates
        whole = result.get("update", planned) if early else planned
        if last.update != whole:
            return [f"the chain ends at update {last.update}, but the run has finished with {whole}"]
        if update != last.update:
            return [f"result.json names update {update} as the last, but the log ends with {last.update}"]
    digests = {name: result.get(name) for name in DIGESTS}
    row = linked.get(update) if isinstance(update, int) else None
    if row is None:
        if any(digests.values()):  # a failed run may end between two rows that have digests
            print(f"result.json has digests of update {update}, which the log does not have, so nothing confirms them")
        return []
    recorded = [name for name in DIGESTS if status == "finished" or digests[name] is not None]
    if all(digests[name] == getattr(row, name) for name in recorded):
        return []
    which = "its last update, " if row is last else "update "
    return [f"result.json has other digests than the log has after {which}{row.update}"]


def checkpoint_differs(row: Linked, digests: Mapping[str, str]) -> list[str]:
    """One sentence if the digests of a checkpoint differ from those in the log; none if they agree."""
    names = [name for name in DIGESTS if digests[name] != getattr(row, name)]
    return [
        f"checkpoint {row.update} is not the one that was logged: its {name} is {digests[name]}, and in the log "
        f"{getattr(row, name)}"
        for name in names[:1]
    ]


# --------------------------------------------------------------------------------------------- what can be compared


def require_repeatable(name: str, rerun: Rerun) -> None:
    """Raise `CannotCompare` for experiments that never repeat their bits."""
    e = rerun.experiment
    if not e.deterministic:
        raise CannotCompare(f"{name} was trained with --no-deterministic, so two computations of it may differ")
    if not repeatable(rerun.training.spec):
        raise CannotCompare(f"{name}: {printable(e.env_id)} does not follow its seed, so two computations may differ")


def require_comparable(flags: Verify, rerun: Rerun, chosen: Sequence["Segment"], linked: Mapping[int, Linked]) -> None:
    """Raise `CannotCompare` unless code, packages and processor are those of the run, or --despite names what differs.

    Either way, what differs is said.
    """
    sources_here = sources(rerun.training.spec, *rerun.recipe.modules)
    here = chain.made_by(describe_devices() | {"sources": sources_here})
    found: dict[Reason, str] = {}
    for segment in chosen:
        for update in segment.digests:
            found |= reasons_to_differ(linked[update].made_by, here, rerun.experiment)
    words = "; ".join(found.values())
    missing = [reason for reason in found if reason not in flags.despite]
    if missing:
        raise CannotCompare(
            f"{flags.run} was computed with other {words}. Its bits may differ here, so nothing was computed; "
            f"add --despite {' '.join(found)} to compute anyway"
        )
    if found:
        print(printable(f"warning: {flags.run} was computed with other {words}; its bits may differ here"))


def reasons_to_differ(there: Json, here: Json, e: Experiment) -> dict[Reason, str]:
    """What differs between two records of code and machine, and may change bits: reason -> words."""
    found: dict[Reason, str] = {}
    if there.get("code") != here["code"]:
        found["revision"] = f"code (revision {_short(there.get('revision'))} there, {_short(here['revision'])} here)"
    mine, theirs = here.get("sources", {}), there.get("sources")
    if isinstance(theirs, dict) and (others := [name for name in mine if theirs.get(name, mine[name]) != mine[name]]):
        words = f"code of {', '.join(others)}"
        found["revision"] = f"{found['revision']} and {words}" if "revision" in found else words
    a, b = (_packages(side.get("packages"), e, here["device_kind"]) for side in (there, here))
    for name in ("scipy", "nvidia-cublas"):
        if name not in a:  # earlier versions did not record it
            b.pop(name, None)
    others = [
        f"{name} {a.get(name)} there, {b.get(name)} here" for name in sorted({*a, *b}) if a.get(name) != b.get(name)
    ]
    if others:
        found["packages"] = f"packages ({', '.join(others)})"
    names = ["device_kind", "processor"]
    if here["device_kind"] == "cpu":
        names.append("cpu_products")
        if here["cpu_products"] == "xla":  # its products also depend on the CPU's model (caches) and on the threads
            names += ["cpu", "cpu_threads"]
    if any(there.get(name) != here[name] for name in names):
        found["processor"] = f"processor ({_machine(there)} there, {_machine(here)} here)"
    return found


def _packages(versions: Any, e: Experiment, device_kind: str) -> dict[str, str]:
    """The versions of the packages that the bits of this experiment depend on, computed on such a device."""
    suite, colon, _ = e.env_id.partition(":")
    unused = {"cleanba", "orbax-checkpoint"}  # the code has a digest of its own; Orbax only writes files
    unused |= set(jax_envs.SUITES) - {suite, "jax"}
    unused |= {"envpool"} if colon else set()
    unused |= {"gymnasium"} if not colon or suite in jax_envs.SUITES or suite == "jax" else set()
    known = versions if isinstance(versions, dict) else {}
    if device_kind == "cpu":
        unused |= {name for name in known if for_gpus(name)}
    return {name: str(version) for name, version in known.items() if name not in unused}


def _machine(side: Json) -> str:
    """A machine in a few words."""
    processor = side.get("processor") if isinstance(side.get("processor"), dict) else {}
    assert isinstance(processor, dict)
    words = [str(side.get("cpu"))] if side.get("device_kind") == "cpu" else [str(side.get("device_kind"))]
    words += [f"family {processor.get('family')}", f"products by {side.get('cpu_products')}"]
    return ", ".join(words)


def _short(revision: object) -> str:
    commit, plus, changes = str(revision).partition("+")
    return commit[:12] + plus + changes


# ------------------------------------------------------------------------------------------------ what is computed


class Segment(NamedTuple):
    """A part of a run: from one kept checkpoint to the next, or a part of that."""

    first: int
    """the update whose checkpoint it begins with; 0: the beginning of the run"""
    last: int
    digests: tuple[int, ...]
    """the updates after `first`, up to `last`, that have digests in the log; `last` is one of them"""

    @property
    def updates(self) -> int:
        return self.last - self.first

    def __str__(self) -> str:
        return f"updates {self.first:,} to {self.last:,}"


def checkpoints_of(rerun: Rerun, linked: Mapping[int, Linked]) -> list[int]:
    """The updates of kept checkpoints from which the run can be computed again, in order."""
    return [update for update in updates_kept(rerun.run_dir) if update in linked and update < max(linked)]


def segment(first: int, last: int, linked: Iterable[int]) -> Segment:
    """The segment with these ends."""
    return Segment(first, last, tuple(sorted(update for update in linked if first < update <= last)))


def segments_of(rerun: Rerun, linked: Mapping[int, Linked]) -> list[Segment]:
    """All segments of a run, in order."""
    starts = [0, *checkpoints_of(rerun, linked)]
    return [segment(a, b, linked) for a, b in zip(starts, [*starts[1:], max(linked)], strict=True)]


def choose(segments: Sequence[Segment], linked: Mapping[int, Linked], flags: Verify) -> list[Segment]:
    """The segments to compute: those that the flags name, or some that are drawn.

    Raises:
        UsageError: there is no such update.
    """
    if flags.names_updates:
        return [named_segment(segments, linked, flags.from_update, flags.to_update)]
    seed = secrets.randbelow(2**31) if flags.seed is None else flags.seed
    order = random.Random(seed).sample(segments, len(segments))
    total = (flags.fraction or 1.0) * max(linked)
    if flags.segments is None and flags.fraction is not None:
        count = next((n for n in range(1, len(order)) if sum(s.updates for s in order[:n]) >= total), len(order))
    else:
        count = min(flags.segments or SEGMENTS, len(order))
    drawn = sorted(order[:count])
    if flags.segments is not None and flags.fraction is not None:
        drawn = [cut_short(one, total / count) for one in drawn]
    if count < len(segments):
        print(f"drawn: {count} of {len(segments)} segments (--seed {seed} draws them again)")
    return drawn


def with_beginning(rerun: Rerun, chosen: list[Segment]) -> list[Segment]:
    """The chosen segments, without the first one if the parameters that it begins from are gone.

    Raises:
        CannotCompare: that leaves none.
    """
    try:
        if chosen[0].first == 0:
            rerun.beginning()
    except UsageError as gone:
        if len(chosen) == 1:
            raise CannotCompare(str(gone)) from gone
        print(printable(f"the first segment is left out: {gone}"))
        return chosen[1:]
    return chosen


def cut_short(whole: Segment, most: float) -> Segment:
    """A segment cut after its last digest within `most` updates, or after its first digest if there is none within."""
    within = [update for update in whole.digests if update - whole.first <= most] or whole.digests[:1]
    return Segment(whole.first, within[-1], tuple(within))


def named_segment(
    segments: Sequence[Segment], linked: Mapping[int, Linked], first: int | None, last: int | None
) -> Segment:
    """The part of a run that --from and --to name.

    Raises:
        UsageError: there is no checkpoint, or no digest, of such an update.
    """
    starts = [one.first for one in segments]
    if first is None:
        first = max((start for start in starts if last is not None and start < last), default=starts[0])
    close = ", ".join(map(str, sorted(starts, key=lambda start: abs(start - first))[:3]))
    require(first != max(linked), f"--from {first}: that is the run's last update, and nothing was computed after it")
    require(first in starts, f"--from {first}: no checkpoint of that update is kept; the closest are {close}")
    if last is None:
        last = next(one.last for one in segments if one.first == first)
    close = ", ".join(map(str, sorted((u for u in linked if u > first), key=lambda update: abs(update - last))[:3]))
    require(
        last in linked and last > first,
        f"--to {last}: the log has no digests after that update, or it is not after update {first}; the closest are "
        f"{close}",
    )
    return segment(first, last, linked)


def compute(
    rerun: Rerun, chosen: Sequence[Segment], all_segments: int, linked: Mapping[int, Linked], flags: Verify
) -> bool:
    """Compute these segments again, and print what came out.  Returns whether all digests are the same.

    Raises:
        CannotCompare: none could be computed, since the run, which goes on, has removed their checkpoints meanwhile.
    """
    computed: list[Segment] = []
    wrong: list[str] = []
    damaged: dict[int, str] = {}  # by the checkpoint's update
    for number, one in enumerate(chosen, 1):
        title = f"{one}" + (f" ({number} of {len(chosen)})" if len(chosen) > 1 else "")
        try:
            saved = read_checkpoint(rerun, one.first) if one.first else None
        except Failure as damage:
            if one.first not in updates_kept(rerun.run_dir):
                print(f"{title}: left out, as the run has removed checkpoint {one.first:,} meanwhile", flush=True)
                continue
            damaged[one.first] = printable(str(damage))
            print(f"{title}: {damaged[one.first]}", flush=True)
            continue
        print(f"computing {title}: {len(one.digests)} digest{'s' * (len(one.digests) > 1)} to compare", flush=True)
        difference, unreadable = map(printable, recompute_segment(rerun, one, linked, title, saved))
        if unreadable:
            damaged[one.last] = unreadable
        if difference:
            wrong.append(f"{one}: {difference}")
        computed.append(one)
        print(f"{one}: {difference or 'the same bits'}", flush=True)
    if not computed and not damaged:
        raise CannotCompare(f"{flags.run} has removed the checkpoints meanwhile; try again")
    if flags.names_updates:
        what = f"{chosen[0]} recomputed" if computed else "nothing recomputed"
    else:
        what = f"{len(computed)} of {all_segments} segments recomputed"
    share = sum(one.updates for one in computed) / max(linked)  # a run may end early, by --target-return
    whole = "the run" if is_finished(rerun.run_dir) else f"the {max(linked):,} updates logged so far"
    results = []
    if wrong:
        results.append(f"{len(wrong)} of {len(computed)} differ")
    elif computed:
        results.append("the same bits")
    if damaged:
        results.append(f"checkpoints that cannot be read: {len(damaged)}")
    print(f"{what}, {share:.1%} of {whole}: {'; '.join(results)}")
    if wrong or damaged:
        print("\n".join(f"  {line}" for line in [*wrong, *damaged.values()]))
    return not wrong and not damaged


class Outcome(NamedTuple):
    """What computing a segment again has shown; "" for nothing."""

    difference: str = ""
    """what differs from the log"""
    unreadable: str = ""
    """why the checkpoint at its end cannot be read"""


def recompute_segment(
    rerun: Rerun, one: Segment, linked: Mapping[int, Linked], title: str, saved: Saved[Any, Any] | None
) -> Outcome:
    """Compute a segment again, from `saved`, the checkpoint at its start, and compare it with the log."""
    if saved is not None and (found := checkpoint_differs(linked[one.first], digests_of(rerun, saved))):
        return Outcome(found[0])
    starts_another = one.last in checkpoints_of(rerun, linked)
    ends: list[tuple[Any, dict[int, Snapshot]]] = []
    note_end = lambda params, actors: ends.append((params, actors))
    with tempfile.TemporaryDirectory(prefix="cleanba-verify-") as scratch:
        folder = Path(scratch) if starts_another else None
        digests = recompute(
            *(rerun, one.first, one.last, one.digests, saved, title),
            ended=note_end if starts_another else None,
            actors_in=folder,
        )
        next_differs = unreadable = ""
        try:
            next_differs = next_segment_differs(rerun, one.last, *ends[0], Path(scratch)) if ends else ""
        except Failure as damage:
            unreadable = str(damage) if one.last in updates_kept(rerun.run_dir) else ""  # the run may have removed it
    same_until = one.first
    for update in one.digests:
        row = linked[update]
        for name in DIGESTS:
            if digests[update][name] != getattr(row, name):
                return Outcome(
                    f"the bits differ after update {update:,}, and are the same up to update {same_until:,}: {name} is "
                    f"{digests[update][name]} here, and {getattr(row, name)} in the log",
                    unreadable,
                )
        same_until = update
    return Outcome(next_differs, unreadable)


def next_segment_differs(rerun: Rerun, update: int, params: Any, actors: Mapping[int, Snapshot], folder: Path) -> str:
    """How a kept checkpoint differs in the parts that no digest covers but the next segment begins with; "" if not.

    params, actors: what was computed for it here.
    folder: where the actors' actions were recorded.

    Raises:
        Failure: the checkpoint cannot be read.
    """
    saved = read_checkpoint(rerun, update, with_memory=False)
    where = f"checkpoint {update} is not what was computed here"
    if rerun.experiment.concurrency and params_digest(saved.older_params) != params_digest(params):
        return f"{where}: the next rollout would be collected with other parameters"
    for actor, there in saved.actors.items():
        if what := records.differs(there, records.actor_folder(folder, actor), actors[actor]):
            return f"{where}: actor {actor} would continue differently ({what})"
    return ""
