"""PPO on MuJoCo for a million steps with its preset, one version behind and taking turns.

    python benchmarks/mujoco.py                                      # an hour and a half; can be interrupted
    python benchmarks/mujoco.py --variants "taking turns" --seeds 1  # some of it
    python benchmarks/mujoco.py --seeds                              # trains nothing: table and figure of what is kept

Curves are kept in benchmarks/results/curves_mujoco.jsonl and drawn to static/mujoco_lag.png (studies.py).
"""

import tyro
from studies import Asked, Studies, Study

STUDIES = Studies(
    "mujoco",
    {
        "lag": Study(
            ("HalfCheetah-v5", "Hopper-v5", "Walker2d-v5"),
            {
                "one version behind": "ppo --concurrency --lag-correction decoupled",
                "taking turns": "ppo --no-concurrency --lag-correction none",
            },
        )
    },
)


if __name__ == "__main__":
    STUDIES.go_on(tyro.cli(Asked, description=__doc__))
