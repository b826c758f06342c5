"""What PQN learns: small environments with CleanRL's settings, MinAtar with the authors', with and without a cut.

    python benchmarks/pqn.py                     # trains what is missing: days on few cores; can be interrupted
    python benchmarks/pqn.py --studies small     # an hour
    python benchmarks/pqn.py --seeds             # trains nothing: tables and figures of what is kept

Curves are kept in benchmarks/results/curves_pqn.jsonl and drawn to static/pqn_<study>.png (studies.py).
"""

import tyro
from studies import Asked, Studies, Study

CLEANRL, MILLION, CUT = "pqn --preset cleanrl-classic-control", "pqn --total-timesteps 1000000", "--watkins-cut"
GAMES = tuple(f"gymnax:{name}-MinAtar" for name in ("Breakout", "Asterix", "Freeway", "Seaquest", "SpaceInvaders"))
STUDIES = Studies(
    "pqn",
    {
        # CleanRL has 495 and -96 after as many steps (`docs/rl-algorithms/pqn.md` there).
        "small": Study(
            ("CartPole-v1", "Acrobot-v1"),
            {"CleanRL's": CLEANRL, "CleanRL's, cut": f"{CLEANRL} {CUT}", "preset": "pqn", "preset, cut": f"pqn {CUT}"},
        ),
        "cut": Study(GAMES[:1], {"preset, 1M": MILLION, "preset, 1M, cut": f"{MILLION} {CUT}"}),
        "minatar": Study(GAMES, {"preset": "pqn"}),
    },
)


if __name__ == "__main__":
    STUDIES.go_on(tyro.cli(Asked, description=__doc__))
