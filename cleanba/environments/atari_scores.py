"""Published scores on Atari: of a random policy, of a human, and of other systems.  Source: data/README.md."""

import csv
from collections.abc import Iterable, Sequence
from functools import cache
from importlib.resources import files
from typing import NamedTuple

from cleanba.files import Json


class Publication(NamedTuple):
    """Final returns of several systems, all by the same rules."""

    file: str
    """under data/"""
    steps: int
    """environment steps of each training"""
    source: str
    rules: dict[str, tuple[object, ...]]
    """field of an experiment -> the values that it may have"""
    systems: dict[str, str]
    """the prefix of a system's columns -> its name in tables"""

    def returned(self, env_id: str, system: str) -> float | None:
        """The mean return of a system on a game, or None if it is not published."""
        return _rows(self.file).get(env_id, {}).get(f"{system}_return_mean")

    def other_rules(self, experiments: Iterable[Json]) -> list[str]:
        """Where some of these experiments differ from the rules, as "episodic_life=True"."""
        return sorted(
            {
                f"{name}={e[name]}"
                for e in experiments
                for name, allowed in self.rules.items()
                if name in e and e[name] not in allowed
            }
        )


@cache
def _rows(file: str) -> dict[str, dict[str, float]]:
    """By environment id; without empty cells."""
    text = files("cleanba.environments").joinpath("data", file).read_text()
    rows = list(csv.DictReader(text.splitlines()))
    return {row.pop("env_id"): {name: float(value) for name, value in row.items() if value} for row in rows}


HALF_AN_HOUR = (None, 0, 27_000)  # steps of 4 frames

LONG = Publication(
    "atari_50M.csv",
    50_000_000,
    "Huang et al. 2023, arXiv:2310.00036",
    {
        "repeat_action_probability": (0.25,),
        "full_action_space": (True,),
        "episodic_life": (False,),
        "max_episode_steps": HALF_AN_HOUR,
        "env_options": ([], ["noop_max=1"]),
    },
    {
        "cleanba_impala_1xA100_10cpu": "Cleanba IMPALA, 1 A100, 10 CPU",
        "cleanba_impala_8xA100_46cpu": "Cleanba IMPALA, 8 A100, 46 CPU",
        "cleanba_ppo_8xA100_46cpu": "Cleanba PPO, 8 A100, 46 CPU",
        "cleanba_ppo_sync_1xA100_10cpu": "Cleanba PPO (sync), 1 A100, 10 CPU",
        "cleanrl_ppo_1xA100_10cpu": "CleanRL PPO, 1 A100, 10 CPU",
        "monobeast_impala_1xA100_10cpu": "monobeast IMPALA, 1 A100, 10 CPU",
        "moolib_impala_1xA100_10cpu": "moolib IMPALA, 1 A100, 10 CPU",
    },
)
"""Sticky actions, all 18 actions, whole games: our presets' rules (Machado et al. 2018)."""

SHORT = Publication(
    "atari_10M.csv",
    10_000_000,
    "CleanRL's documentation, ppo_atari_envpool_xla_jax and pqn",
    {
        "repeat_action_probability": (0.0,),
        "full_action_space": (False,),
        "episodic_life": (True,),
        "max_episode_steps": HALF_AN_HOUR,
        # The LSTM sees one frame.  With noop_max=1, or without it, a game begins without random no-ops: a small change.
        "env_options": tuple(
            [*noops, *frames] for noops in (["noop_max=30"], ["noop_max=1"], []) for frames in ([], ["stack_num=1"])
        ),
    },
    {
        "cleanrl_ppo": "CleanRL PPO",
        "baselines_ppo2": "Baselines PPO2",
        "cleanrl_pqn": "CleanRL PQN",
        "cleanrl_pqn_lstm": "CleanRL PQN, LSTM",
    },
)
"""CleanRL's rules: `--preset cleanrl-atari`."""


def publication(experiments: Sequence[Json]) -> Publication:
    """The publication to compare these experiments with: CleanRL's if all play by its rules."""
    known = all(name in e for e in experiments for name in SHORT.rules)
    return SHORT if experiments and known and not SHORT.other_rules(experiments) else LONG


def table() -> dict[str, dict[str, float]]:
    """By environment id, such as Breakout-v5: "random", "human", and "<system>_{return_mean,return_std,minutes}"."""
    return _rows(LONG.file)


def reference(env_id: str) -> dict[str, float] | None:
    """The published scores of one environment after 50 million steps, or None."""
    return table().get(env_id)


def human_normalised(env_id: str, score: float) -> float | None:
    """(score - random) / (human - random): 0 for random play, 1 for a human's; None if these are not known."""
    row = reference(env_id)
    return None if row is None else (score - row["random"]) / (row["human"] - row["random"])
