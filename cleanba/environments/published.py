"""Returns that others have published, by algorithm and environment.  Source: data/README.md."""

import csv
import re
from functools import cache
from importlib.resources import files
from typing import NamedTuple

from cleanba.environments.atari_scores import LONG, SHORT, publication, reference
from cleanba.files import Json


class PublishedReturn(NamedTuple):
    """A published return."""

    system: str
    """the system that was published"""
    value: float
    """mean return"""
    steps: int
    """environment steps of its training"""
    time_limit: int = 0
    """steps of its longest episodes (0: not stated)"""

    def in_words(self) -> str:
        """As "CleanRL, 1M steps"."""
        return f"{self.system}, {self.steps / 1e6:g}M steps"


@cache
def table() -> dict[tuple[str, str], PublishedReturn]:
    """By algorithm and environment, without suite and version: ("ppo", "Asterix-MinAtar")."""
    text = files("cleanba.environments").joinpath("data/published.csv").read_text()
    return {
        (row["algorithm"], row["environment"]): PublishedReturn(
            row["system"], float(row["return_mean"]), int(row["steps"]), int(row["time_limit"] or 0)
        )
        for row in csv.DictReader(text.splitlines())
    }


# Publication -> algorithm and core -> the most similar system there that used one GPU, its name and its prefix.
ON_ATARI = {
    LONG.file: {
        ("ppo", "none"): ("CleanRL", "cleanrl_ppo_1xA100_10cpu"),
        ("impala", "none"): ("the original Cleanba", "cleanba_impala_1xA100_10cpu"),
    },
    SHORT.file: {
        ("ppo", "none"): ("CleanRL", "cleanrl_ppo"),
        ("pqn", "none"): ("CleanRL", "cleanrl_pqn"),
        ("pqn", "lstm"): ("CleanRL", "cleanrl_pqn_lstm"),
    },
}


OURS = ("gymnasium", "gymnax", "craftax")  # before the colon in an environment's name


def published_return(experiment: Json) -> PublishedReturn | None:
    """The published return of an experiment's algorithm on its environment, by its rules on Atari; or None.

    `experiment` needs "algorithm" and "env_id".
    """
    algorithm, env_id = str(experiment["algorithm"]), str(experiment.get("env_id"))
    rules = publication([experiment])
    name, prefix = ON_ATARI[rules.file].get((algorithm, experiment.get("core", "none")), ("", ""))
    value = None if rules.other_rules([experiment]) else rules.returned(env_id, prefix)
    if value is not None:
        return PublishedReturn(name, value, rules.steps)
    if reference(env_id) is not None and SHORT.other_rules([experiment]):  # the table has CleanRL's returns
        return None
    package, colon, _ = env_id.rpartition(":")
    changed = experiment.get("env_wrappers") or (experiment.get("env_options") and reference(env_id) is None)
    if (colon and package not in OURS) or changed or experiment.get("core", "none") != "none":
        return None  # somebody's own environment, another form of a known one, or with an LSTM
    found = table().get((algorithm, re.sub(r"-v\d+$", "", env_id.rpartition(":")[2])))
    limit = experiment.get("max_episode_steps") or 0  # 0: the environment's own
    return None if found and limit and found.time_limit and limit != found.time_limit else found
