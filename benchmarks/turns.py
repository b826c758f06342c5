"""What one version of lag costs IMPALA, PQN and DQN in score, on MinAtar; and DQN in time to win Atari's Pong.

    python benchmarks/turns.py --studies minatar    # an hour of one core; can be interrupted
    python benchmarks/turns.py --studies pong       # 20 to 40 minutes of two cores for each run
    python benchmarks/turns.py --seeds     # trains nothing: table and figure of what is kept

Each algorithm trains with its preset, once one version behind and once taking turns (--no-concurrency).  Curves are
kept in benchmarks/results/curves_turns.jsonl and drawn to static/turns_<study>.png (studies.py).  How much time lag
saves is measured by concurrency.py; PPO has a study of its own (lag.py), and curves_sac_td3.jsonl has SAC and TD3 on
Pendulum.
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
        "pong": Study(
            ("Pong-v5",),
            {f"DQN, {kind}": f"dqn --preset pong --target-return 18 {flag}" for kind, flag in LAGGED.items()},
        ),
    },
)


if __name__ == "__main__":
    STUDIES.go_on(tyro.cli(Asked, description=__doc__))
