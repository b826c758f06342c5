"""What one version of lag costs in score, beside PPO: IMPALA, PQN and DQN on MinAtar, SAC and TD3 on MuJoCo.

    python benchmarks/turns.py                     # three hours of one core; can be interrupted
    python benchmarks/turns.py --studies minatar   # some of it
    python benchmarks/turns.py --seeds             # trains nothing: table and figures of what is kept

Each algorithm trains with its preset, once one version behind and once taking turns (--no-concurrency).  Curves are
kept in benchmarks/results/curves_turns.jsonl and drawn to static/turns_<study>.png (studies.py).  How much time lag
saves is measured by concurrency.py; PPO has a study of its own (lag.py).
"""

import tyro
from studies import Asked, Studies, Study

LAGGED = {"one version behind": "--concurrency", "taking turns": "--no-concurrency"}


def variants(steps: dict[str, int]) -> dict[str, str]:
    """Both kinds of run of each algorithm, from the number of its steps."""
    return {
        f"{name.upper()}, {kind}": f"{name} --total-timesteps {total} {flag}"
        for name, total in steps.items()
        for kind, flag in LAGGED.items()
    }


STUDIES = Studies(
    "turns",
    {
        "minatar": Study(
            ("gymnax:Breakout-MinAtar", "gymnax:Asterix-MinAtar"),
            variants({"impala": 2_000_000, "pqn": 2_000_000, "dqn": 300_000}),
        ),
        "mujoco": Study(("HalfCheetah-v5", "Hopper-v5"), variants({"sac": 60_000, "td3": 60_000})),
    },
)


if __name__ == "__main__":
    STUDIES.go_on(tyro.cli(Asked, description=__doc__))
