"""What IMPALA learns on MinAtar with its preset, in ten million steps.

    python benchmarks/minatar.py --seeds 1     # 4 minutes and more for each of five games; can be interrupted
    python benchmarks/minatar.py --seeds       # trains nothing: table and figure of what is kept

Curves are kept in benchmarks/results/curves_minatar_impala.jsonl and drawn to static/minatar_impala_preset.png
(studies.py).  Those of PPO, and of an earlier preset of IMPALA, are in curves_minatar.jsonl (keep_curves.py).
"""

import tyro
from pqn import GAMES
from studies import Asked, Studies, Study

STUDIES = Studies("minatar_impala", {"preset": Study(GAMES, {"four epochs": "impala"})})


if __name__ == "__main__":
    STUDIES.go_on(tyro.cli(Asked, description=__doc__))
