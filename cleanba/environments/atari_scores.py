"""Published scores on Atari: of a random policy, of a human, and of other systems.  Source: data/README.md."""

import csv
from functools import cache
from importlib.resources import files


@cache
def table() -> dict[str, dict[str, float]]:
    """By environment id, such as Breakout-v5: "random", "human", and "<system>_{return_mean,return_std,minutes}"."""
    text = files("cleanba.environments").joinpath("data/atari_50M.csv").read_text()
    rows = list(csv.DictReader(text.splitlines()))
    return {row.pop("env_id"): {name: float(value) for name, value in row.items()} for row in rows}


def reference(env_id: str) -> dict[str, float] | None:
    """The published scores of one environment, or None."""
    return table().get(env_id)


def human_normalised(env_id: str, score: float) -> float | None:
    """(score - random) / (human - random): 0 for random play, 1 for a human's; None if these are not known."""
    row = reference(env_id)
    return None if row is None else (score - row["random"]) / (row["human"] - row["random"])
