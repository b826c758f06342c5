"""The chain of a run's digests: each is hashed together with the one before it, so none can be changed alone.

A row of metrics.jsonl that has digests also has `chain`, its link: the SHA-256 of a JSON object, with sorted keys and
without spaces, of

    before                          the link before it; "" for the first
    update                          the row's
    params_digest, learner_digest   the row's
    experiment                      in the first link: the experiment of config.json as it was when the run began
                                    (`first_experiment`)
    made_by                         if the row has it: what computed its digest and those after it

`made_by` stands in the first row, and in the first one after a resume on another machine or by another version.
"""

import json
from collections.abc import Iterable, Mapping
from hashlib import sha256
from typing import Any, NamedTuple

from cleanba.files import Json

MADE_BY = ("revision", "code", "packages", "device_kind", "processor", "cpu", "cpu_products", "cpu_threads")
"""What is recorded of code and machine, by its names in config.json; `sources`, too, where there are any."""
DIGESTS = ("params_digest", "learner_digest")
FIRST_STEPS = "first_total_timesteps"  # in config.json, if the run was made longer
FIRST = "first_experiment"  # in config.json, if a version with other settings has resumed the run


def link(
    before: str, update: int, digests: Mapping[str, Any], experiment: Json | None = None, made_by: Json | None = None
) -> str:
    """The link of a row, from the link before it."""
    parts: Json = {"before": before, "update": update, **{name: digests.get(name) for name in DIGESTS}}
    parts |= {"experiment": experiment} if not before else {}
    parts |= {"made_by": made_by} if made_by is not None else {}
    text = json.dumps(parts, sort_keys=True, separators=(",", ":"))
    return f"sha256:{sha256(text.encode()).hexdigest()}"


def first_experiment(config: Json) -> Json:
    """The experiment that the first link holds, from config.json: as it was when the run began."""
    first = {"total_timesteps": config[FIRST_STEPS]} if FIRST_STEPS in config else {}
    return {**config[FIRST if FIRST in config else "experiment"], **first}


def kept_of_first(earlier: Json, experiment: Json) -> Json:
    """What config.json must keep of the experiment as it was when the run began, if it will have `experiment`.

    earlier: config.json so far.
    """
    first = first_experiment(earlier)
    text = lambda e: json.dumps({**e, "total_timesteps": 0}, sort_keys=True)
    return {FIRST: first} if text(first) != text(experiment) else {}


def made_by(config: Json) -> Json:
    """What computes a run, from its config.json."""
    sources = config.get("sources")
    return {name: config.get(name) for name in MADE_BY} | ({"sources": sources} if sources else {})


class Chain:
    """Makes the links of a run, in order."""

    def __init__(self, experiment: Json, made_by: Json):
        self._experiment, self._made_by = _plain(experiment), _plain(made_by)
        self._update, self._link = 0, ""
        self._said: Json | None = None  # the last row's `made_by`, or an earlier one's

    def go_on(self, state: Json) -> None:
        """Continue from the `state` that a checkpoint kept; {} if an older version without chains wrote it."""
        if state:
            self._update, self._link, self._said = state["update"], state["link"], state["made_by"]

    @property
    def state(self) -> Json:
        """What a checkpoint keeps of the chain."""
        return {"update": self._update, "link": self._link, "made_by": self._said}

    def extend(self, update: int, digests: Mapping[str, Any]) -> Json:
        """Make the link of this update.  Returns what its row has of the chain: `chain`, and `made_by` if it is new."""
        new = self._made_by if self._made_by != self._said else None
        self._link = link(self._link, update, digests, self._experiment, new)
        self._update, self._said = update, self._made_by
        return {"chain": self._link} | ({"made_by": new} if new is not None else {})


class Linked(NamedTuple):
    """A row of the log that has digests, confirmed by the chain."""

    update: int
    params_digest: str
    learner_digest: str
    link: str
    made_by: Json
    """what computed it"""


class Checked(NamedTuple):
    """A run's chain, checked."""

    rows: list[Linked]
    """those before the first whose link is wrong"""
    unlinked: list[int]
    """updates before the first link whose digests have no link: an earlier version logged them"""
    broken: str
    """why the chain does not hold, as a sentence; "" if it does"""


def check(rows: Iterable[Json], experiment: Json) -> Checked:
    """Check the chain in the rows of a log, given its `first_experiment`."""
    found: list[Linked] = []
    unlinked: list[int] = []
    before, last = "", 0
    maker: Json = {}
    for row in rows:
        if not any(name in row for name in (*DIGESTS, "chain")):
            continue
        update = row["update"]
        where = f"at update {update}" + (f", after update {last}" if last else ", its first link")
        if "chain" not in row and not found:
            unlinked.append(update)
            continue
        whole = isinstance(update, int) and all(isinstance(row.get(name), str) for name in (*DIGESTS, "chain"))
        made = row.get("made_by")
        if not whole or not isinstance(made, dict | None) or (not found and made is None):
            return Checked(found, unlinked, f"the chain does not hold {where}: a part of it is missing")
        if update <= last:
            return Checked(found, unlinked, f"the chain does not hold {where}: updates are not in order")
        if row["chain"] != link(before, update, row, _plain(experiment), made):
            parts = "its digests, the link before it" + ("" if found else ", the experiment") + " or the link itself"
            return Checked(found, unlinked, f"the chain does not hold {where}: {parts} was changed")
        maker = made if made is not None else maker
        before, last = row["chain"], update
        found.append(Linked(update, row["params_digest"], row["learner_digest"], before, maker))
    return Checked(found, unlinked, "")


def _plain(values: Json) -> Json:
    """The values as they are read back from a JSON file."""
    plain: Json = json.loads(json.dumps(values))
    return plain
