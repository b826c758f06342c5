"""Where two computations of the same update diverge: the first value that differs, and what made it.

The parts of an update are compared in the order in which they are computed: the learner's state before it, the
parameters that acted, the rollout step by step, the stages of the update as its probes saw them, the learner's state
after it.  Values are compared by their bits, so NaN equals NaN, and 0.0 differs from -0.0.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from cleanba.runtime.watched import Event, Events, Fingerprints, Named

SOURCES = {
    "start": "the state that the learner began with",
    "publishing": "parameters on their way from the learner to the actors",
    "environment": "an environment",
    "acting": "acting",
    "statistics": "the running statistics of observations and rewards",
    "normalised": "the normalisation of observations and rewards",
    "targets": "values, advantages and targets",
    "memory": "the replay memory",
    "priorities": "the priorities of what the replay memory holds",
    "draw": "the sampling of minibatches",
    "minibatch": "the assembly of minibatches",
    "gradient": "a shard's gradient",
    "sum": "the sum over shards",
    "optimiser": "the optimiser",
    "target network": "a target network",
    "update": "the update, outside of the stages that are recorded",
    "chance": "a nondeterministic computation",
}
"""What a difference can come from: its name -> in words."""


class Side(Protocol):
    """One of two computations of an update: `runtime.watched.WatchedUpdate`, here or in another process."""

    def fingerprints(self) -> Fingerprints: ...
    def rollout(self) -> Named: ...
    def acted_with(self) -> list[Named]: ...
    def state(self, after: bool) -> Named: ...
    def memory_rows(self, path: str, shard: int, after: bool) -> np.ndarray: ...
    def memory_row(self, path: str, shard: int, after: bool, row: int) -> np.ndarray: ...
    def memory_paths(self) -> list[str]: ...
    def events(self, skip: int = 0) -> Events: ...
    def event_values(self, event: Event, device: int = 0) -> Named: ...
    def recomputed_fingerprints(self) -> tuple[np.ndarray, np.ndarray]: ...


class Difference(NamedTuple):
    """How two arrays differ."""

    path: str
    at: tuple[int, ...]
    """index of the first number that differs"""
    values: tuple[str, str]
    """these two numbers"""
    differing: int
    """how many numbers differ"""
    size: int
    """numbers in all"""
    kind: str
    """of numbers: "bytes", "float32" …"""

    @property
    def place(self) -> str:
        """The first number, as "obs[12, 41, 3]"."""
        return self.path.lstrip(".") + (f"[{', '.join(map(str, self.at))}]" if self.at else "")

    @property
    def amount(self) -> str:
        """How much differs, as "(bytes), 3 of 28,224"."""
        return f"({self.kind}), {self.differing:,} of {self.size:,}"


class Finding(NamedTuple):
    """The first difference between two computations of an update."""

    update: int
    source: str
    """a name in `SOURCES`"""
    what: str
    """a clause: "observations of environments 40 to 47 at step 12 differ" """
    difference: Difference | None = None
    note: str = ""
    """a further sentence"""

    def lines(self) -> list[str]:
        """The finding as `cleanba bisect` prints it."""
        d = self.difference
        lines = [f"update {self.update:,}: {self.what}" + (f" {d.amount}" if d else "")]
        if d is not None:
            lines += [f"  A  {d.place} = {d.values[0]}", f"  B  {d.place} = {d.values[1]}"]
        lines.append(f"the difference comes from {SOURCES[self.source]}" + (f": {self.note}" if self.note else ""))
        return lines


def first_differing_field(a: Fingerprints, b: Fingerprints) -> str | None:
    """The first field in which the two sides, or the devices of one side, differ; None if there is none."""
    for name in Fingerprints._fields[:-1]:
        x, y = getattr(a, name), getattr(b, name)
        on_devices = name in ("state_before", "state")
        if not (_all_equal_to(x[0], x, y) if on_devices else np.array_equal(x, y)):
            return name
    return None


def note_versions(versions: dict[bytes, int], update: int, fingerprints: Fingerprints) -> None:
    """Remember the actors' parameters before and after an update on which both sides agree."""
    if update == 1:
        versions[fingerprints.acted_with[0].tobytes()] = 1
    versions[fingerprints.actor_params.tobytes()] = update + 1


def _all_equal_to(first: np.ndarray, *copies: np.ndarray) -> bool:
    return all(bool((copy == first).all()) for copy in copies)


def first_difference(a: Side, b: Side, update: int, versions: Mapping[bytes, int]) -> Finding | None:
    """The first difference between two computations of an update; None if there is none.

    versions: the fingerprints of earlier versions' actor parameters, which were the same on both sides -> version.
    """
    fingerprints_a, fingerprints_b = a.fingerprints(), b.fingerprints()
    field = first_differing_field(fingerprints_a, fingerprints_b)
    if field is None:
        return None
    if field == "state_before":
        return _in_state(a, b, update, fingerprints_a.state_before, fingerprints_b.state_before, after=False)
    if field == "memory_before":
        return _in_memory(a, b, update, fingerprints_a.memory_before, fingerprints_b.memory_before, after=False)
    if field == "acted_with":
        return _in_acting_params(a, b, update, fingerprints_a.acted_with, fingerprints_b.acted_with, versions)
    if field == "rollout":
        return _in_rollout(a.rollout(), b.rollout(), update)
    return _in_update(a, b, update, fingerprints_a, fingerprints_b)


# ---------------------------------------------------------------------------------------------------- before the update


def _in_state(a: Side, b: Side, update: int, x: np.ndarray, y: np.ndarray, after: bool) -> Finding:
    when, source = ("after the update", "update") if after else ("before the update", "start")
    for side, copies in (("A", x), ("B", y)):
        if not _all_equal_to(copies[0], copies):
            device = int(np.argmax((copies != copies[0]).any((1, 2))))
            what = f"the learner's state {when} differs between learner devices 0 and {device} of {side}"
            return Finding(update, source, what, note="all learner devices should hold the same")
    d = first_difference_in(a.state(after), b.state(after))
    source = "target network" if after and d is not None and "target" in d.path else source
    return Finding(update, source, f"the learner's state {when} differs", d)


def _in_memory(a: Side, b: Side, update: int, x: np.ndarray, y: np.ndarray, after: bool) -> Finding:
    paths = a.memory_paths()
    leaf, shard = min(np.argwhere((x != y).any(-1).T).tolist(), key=lambda at: (_of_priorities(paths[at[0]]), *at))
    path = paths[leaf]
    rows = (a.memory_rows(path, shard, after) != b.memory_rows(path, shard, after)).any(-1)
    row = int(np.argmax(rows))
    d = first_difference_in(
        {path: a.memory_row(path, shard, after, row)}, {path: b.memory_row(path, shard, after, row)}
    )
    if d is not None:
        d = d._replace(at=(row, *d.at))
    when = "after" if after else "before"
    what = f"the memory of shard {shard} {when} the update differs in {rows.sum():,} of {len(rows):,} rows of {path}"
    source = "priorities" if _of_priorities(path) else "memory"
    return Finding(update, source if after else "start", f"{what}, in row {row}", d)


def _of_priorities(path: str) -> bool:
    """Whether this array of a memory holds priorities, which gradient steps change; they only read the others."""
    return ".priorities" in path


def _in_acting_params(
    a: Side, b: Side, update: int, x: np.ndarray, y: np.ndarray, versions: Mapping[bytes, int]
) -> Finding:
    actor = int(np.argmax((x != y).any((1, 2))))
    d = first_difference_in(a.acted_with()[actor], b.acted_with()[actor])
    note = "the learner's own parameters were the same on both sides"
    for side, fingerprints in (("A", x), ("B", y)):
        others = {version for version in (versions.get(row.tobytes()) for row in fingerprints) if version is not None}
        if others and versions.get(fingerprints[actor].tobytes()) is None:
            note += f"; those of actor {actor} of {side} match no version that the learner made"
    known = [versions.get(p[actor].tobytes()) for p in (x, y)]
    if None not in known:
        note = f"A acted with version {known[0]}, B with version {known[1]}"
    return Finding(update, "publishing", f"the parameters that actor {actor} acted with differ", d, note)


WORDS = {
    "obs": ("observation", "environment"),
    "first": ("first-of-episode flag", "environment"),
    "action": ("action", "acting"),
    "extras": ("policy output", "acting"),
    "reward": ("reward", "environment"),
    "terminated": ("termination", "environment"),
    "truncated": ("truncation", "environment"),
    "valid": ("valid-step flag", "environment"),
}
"""The fields of a rollout, in the order in which a step produces them: field -> in words, and what produces it."""


def _in_rollout(a: Named, b: Named, update: int) -> Finding:
    """The first difference between two rollouts of all environments, leaves [T(+1), E, ...]; of the carry [E, ...]."""
    order = list(WORDS)
    field = lambda path: path[1:].partition("[")[0].partition(".")[0]
    carries = {path: x for path, x in a.items() if field(path) == "carry"}
    if d := first_difference_in(carries, b):
        envs = np.flatnonzero(differs(a[d.path], b[d.path]).reshape(len(a[d.path]), -1).any(1))
        return Finding(update, "acting", f"the recurrent state before step 0 of {listed(envs)} differs", d)
    found: list[tuple[int, int, str]] = []
    for path in a:
        if field(path) in WORDS:
            mask = differs(a[path], b[path])
            steps = mask.reshape(len(mask), -1).any(1)
            if steps.any():
                found.append((int(np.argmax(steps)), order.index(field(path)), path))
    step, _, path = min(found)
    noun, source = WORDS[field(path)]
    mask = differs(a[path], b[path])[step]
    envs = np.flatnonzero(mask.reshape(len(mask), -1).any(1))
    chosen = {path: a[path][step][envs]}, {path: b[path][step][envs]}
    d = first_difference_in(*chosen)
    assert d is not None
    env = int(envs[d.at[0]])
    d = d._replace(at=(step, env, *d.at[1:]))
    named = path[1:].removeprefix(field(path))
    several = len(envs) > 1
    noun = noun + "s" * several + (f" {named}" if named else "")
    what = f"{noun} of {listed(envs)} at step {step} {'differ' if several else 'differs'}"
    before = "everything before was the same"
    if source == "acting":
        before = "parameters and observations were the same"
    return Finding(update, source, what, d, before)


# ---------------------------------------------------------------------------------------------------- within the update


def _in_update(a: Side, b: Side, update: int, fingerprints_a: Fingerprints, fingerprints_b: Fingerprints) -> Finding:
    skip: int | None = 0
    seen: Counter[tuple[str, str]] = Counter()
    while skip is not None:
        events_a, events_b = a.events(skip), b.events(skip)
        for x, y in zip(events_a.found, events_b.found, strict=False):
            if _without_shapes(x) != _without_shapes(y):
                return _in_order(update, x, y)
            seen[x.site.stage, x.site.detail] += 1
            if _event_differs(x, y):
                stored = [not _of_priorities(path) for path in a.memory_paths()]
                c, d = fingerprints_a.memory[:, stored], fingerprints_b.memory[:, stored]
                if x.site.stage in ("priorities", "draw", "minibatch") and not np.array_equal(c, d):
                    return _in_memory(a, b, update, fingerprints_a.memory, fingerprints_b.memory, after=True)
                return _in_event(a, b, update, x, y, seen[x.site.stage, x.site.detail])
        if (events_a.number_after, len(events_a.found)) != (events_b.number_after, len(events_b.found)):
            what = "the two sides take different numbers of gradient steps"
            return Finding(update, "update", what)
        skip = events_a.number_after
    return _after_update(a, b, update, fingerprints_a, fingerprints_b)


def _without_shapes(event: Event) -> tuple[object, ...]:
    """What identifies an event on any placement: shapes depend on how many shards a device holds."""
    return event.number, event.site.stage, event.site.detail, event.site.per_shard, event.site.paths


def _event_differs(x: Event, y: Event) -> bool:
    if x.site.per_shard:
        return not np.array_equal(x.fingerprints, y.fingerprints)
    return not _all_equal_to(x.fingerprints[0], x.fingerprints, y.fingerprints)


def _in_order(update: int, x: Event, y: Event) -> Finding:
    what = f"A reaches stage {x.site.stage!r} where B reaches {y.site.stage!r}, or their arrays differ"
    return Finding(update, "update", what, note="the two are not the same algorithm or experiment")


STAGES = {
    "statistics": "the running statistics of observations and rewards differ",
    "normalised": "normalised observations and rewards{of} differ",
    "targets": "values, advantages and targets{of} differ",
    "priorities": "the stored priorities{of} differ",
    "draw": "the drawn transitions{of} differ",
    "minibatch": "the minibatch{of} differs",
    "gradient": "the gradient{of} differs",
    "sum": "the sum of the gradients over shards differs",
    "optimiser": "parameters and the optimiser's state after the step differ",
    "gradient step": "the learner's state after the step differs",
}
"""What probes watch, in words."""

ONCE = ("statistics", "normalised", "targets")  # stages that an update has once; others belong to a gradient step


def _in_event(a: Side, b: Side, update: int, x: Event, y: Event, number: int) -> Finding:
    """The first difference in what one probe saw, in the update's `number`-th gradient step of that kind, from 1."""
    site, stage = x.site, x.site.stage
    of = note = ""
    if site.per_shard:
        shards = np.flatnonzero((x.fingerprints != y.fingerprints).any(-1))
        of = f" of {listed(shards, 'shard')}"
        cut = lambda named: {path: leaf[shards[0]] for path, leaf in named.items()}
        d = first_difference_in(cut(a.event_values(x)), cut(b.event_values(y)))
    else:
        device = next((i for i, row in enumerate(y.fingerprints) if (row != x.fingerprints[0]).any()), 0)
        d = first_difference_in(a.event_values(x), b.event_values(y, device))
        for side, fingerprints in (("A", x.fingerprints), ("B", y.fingerprints)):
            if not _all_equal_to(fingerprints[0], fingerprints):
                other = int(np.argmax((fingerprints != fingerprints[0]).any(-1)))
                note = f"; learner device {other} of {side} differs from device 0"
    what = STAGES[stage].format(of=of)
    if stage not in ONCE:
        what += f" in gradient step {number}" + (f" of {site.detail}" if site.detail not in ("", "loss") else "")
    source = stage
    if stage == "gradient step":
        source = "target network" if d is not None and "target" in d.path else "update"
    if d is not None:
        d = d._replace(path=readable(d.path) if stage == "minibatch" else d.path)
    return Finding(update, source, what, d, BEFORE.get((stage, site.detail), BEFORE[stage, ""]) + note)


BEFORE = {
    ("statistics", ""): "the rollout was the same",
    ("normalised", ""): "rollout and statistics were the same",
    ("targets", ""): "rollout and parameters were the same",
    ("priorities", ""): "the rollout and earlier gradient steps were the same",
    ("draw", ""): "the memory was the same",
    ("minibatch", ""): "everything that it is drawn from was the same",
    ("gradient", ""): "its minibatch and the parameters were the same",
    ("sum", ""): "the gradients of all shards were the same",
    ("optimiser", ""): "the gradient was the same",
    ("gradient step", ""): "everything before it was the same",
    ("optimiser", "the entropy coefficient"): "the policy's entropy was the same",
}


def _after_update(a: Side, b: Side, update: int, fingerprints_a: Fingerprints, fingerprints_b: Fingerprints) -> Finding:
    """What differs after an update whose recorded stages were all the same."""
    for side, part, fingerprints in (("A", a, fingerprints_a), ("B", b, fingerprints_b)):
        state, memory = part.recomputed_fingerprints()
        if not (np.array_equal(state, fingerprints.state) and np.array_equal(memory, fingerprints.memory)):
            what = f"{side}'s update gave other bits when it was computed again, from the same rollouts and state"
            return Finding(update, "chance", what)
    if not np.array_equal(fingerprints_a.memory, fingerprints_b.memory):
        return _in_memory(a, b, update, fingerprints_a.memory, fingerprints_b.memory, after=True)
    if _all_equal_to(fingerprints_a.state[0], fingerprints_a.state, fingerprints_b.state):
        what = "the parameters that acting needs differ, though the learner's state does not"
        return Finding(update, "publishing", what)
    return _in_state(a, b, update, fingerprints_a.state, fingerprints_b.state, after=True)


# --------------------------------------------------------------------------------------------------------------- arrays


def bits(x: np.ndarray) -> np.ndarray:
    """The bits of each number, as unsigned integers.  [...] -> [...]."""
    return np.ascontiguousarray(x).reshape(x.shape).view(f"u{x.dtype.itemsize}")


def differs(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Where the bits of two arrays differ.  [...], [...] -> [...] bool."""
    return bits(x) != bits(y)


def first_difference_in(a: Named, b: Named) -> Difference | None:
    """The first difference among arrays of the same names and shapes, and how many numbers of that array differ."""
    for path, x in a.items():
        y = b[path]
        if x.shape != y.shape or x.dtype != y.dtype:
            return Difference(path, (), (f"{x.dtype} {x.shape}", f"{y.dtype} {y.shape}"), 1, 1, "shapes")
        mask = differs(x, y)
        if mask.any():
            index = tuple(int(i) for i in np.argwhere(mask)[0]) if mask.ndim else ()
            values = number_in_words(x[index]), number_in_words(y[index])
            return Difference(path, index, values, int(mask.sum()), x.size, kind_of(x.dtype))
    return None


def kind_of(dtype: np.dtype) -> str:
    """What sort of numbers these are."""
    return {"uint8": "bytes", "bool": "flags"}.get(str(dtype), str(dtype))


def number_in_words(x: np.generic) -> str:
    """A number in words; a floating-point number with its bits: "0.1 (0x3dcccccd)"."""
    if x.dtype.kind == "f" or x.dtype.name == "bfloat16":
        return f"{float(x):.9g} (0x{int(bits(np.asarray(x))):0{2 * x.dtype.itemsize}x})"
    return str(x)


def readable(path: str) -> str:
    """A minibatch's path, as "mb.obs" for "['mb'].obs"."""
    head, _, rest = path[2:].partition("']")
    return head + rest


def listed(numbers: Sequence[int] | np.ndarray, noun: str = "environment") -> str:
    """Numbers with their noun: "environment 3", "environments 40 to 47", "environments 1, 4 and 6"."""
    n = [int(i) for i in numbers]
    if len(n) == 1:
        return f"{noun} {n[0]}"
    if n == list(range(n[0], n[-1] + 1)):
        return f"{noun}s {n[0]} to {n[-1]}" if len(n) > 2 else f"{noun}s {n[0]} and {n[1]}"
    if len(n) > 8:
        return f"{len(n)} {noun}s, the first {n[0]},"
    return f"{noun}s {', '.join(map(str, n[:-1]))} and {n[-1]}"
