"""Returns that others have published, by algorithm and environment.  Source: data/README.md."""

import csv
import re
from functools import cache
from importlib.resources import files
from typing import NamedTuple

from cleanba.environments import atari_scores


class Peer(NamedTuple):
    """A published return."""

    system: str
    """the system that was published"""
    value: float
    """mean return"""
    steps: int
    """environment steps of its training"""

    def in_words(self) -> str:
        """As "CleanRL, 1M steps"."""
        return f"{self.system}, {self.steps / 1e6:g}M steps"


@cache
def table() -> dict[tuple[str, str], Peer]:
    """By algorithm and environment, without suite and version: ("ppo", "Asterix-MinAtar")."""
    text = files("cleanba.environments").joinpath("data/peers.csv").read_text()
    return {
        (row["algorithm"], row["environment"]): Peer(row["system"], float(row["return_mean"]), int(row["steps"]))
        for row in csv.DictReader(text.splitlines())
    }


# Algorithm -> the most similar system in atari_scores that used one GPU.
ON_ATARI = {
    "ppo": ("CleanRL", "cleanrl_ppo_1xA100_10cpu"),
    "impala": ("the original Cleanba", "cleanba_impala_1xA100_10cpu"),
}


def peer(algorithm: str, env_id: str) -> Peer | None:
    """The published return of an algorithm on an environment, or None."""
    atari = atari_scores.reference(env_id)
    if atari is not None and algorithm in ON_ATARI:
        system, column = ON_ATARI[algorithm]
        return Peer(system, atari[f"{column}_return_mean"], 50_000_000)
    return table().get((algorithm, re.sub(r"-v\d+$", "", env_id.rpartition(":")[2])))
