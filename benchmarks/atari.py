"""Atari by CleanRL's rules for ten million steps, compared with the returns that CleanRL and Baselines publish.

    python benchmarks/atari.py --studies ppo --env-ids Breakout-v5 --seeds 1   # 2.3 hours on two cores of Zen 5
    python benchmarks/atari.py --studies pqn-gpu --seeds 1                     # two hours a game on two cores of Zen 5
    python benchmarks/atari.py --seeds                                         # no training: table and figures so far

After an interruption, the same command goes on: runs and their checkpoints lie in runs/atari_10m (--runs).  At its end
each run is evaluated over 30 complete games, and the first of them is filmed.  Curves are kept in
benchmarks/results/curves_atari_10m.jsonl and drawn to static/atari_10m_<study>.png (studies.py).
"""

import tyro
from studies import Asked, Studies, Study

# Some checkpoints stay, so that a part of a run can be computed again (docs/guides/verify.md).
RULES = "--preset cleanrl-atari --keep-checkpoints every:500"
GAMES = ("Breakout-v5", "Pong-v5", "SpaceInvaders-v5", "Qbert-v5", "BeamRider-v5")
# Batches that a GPU can fill: CleanRL's have eight environments.
GPU = "--num-actors 2 --dtype tensorfloat32"
AUTHORS = "--num-envs 128 --num-steps 32 --num-minibatches 32 --update-epochs 2 --max-grad-norm 10 --end-e 0.001"
STUDIES = Studies(
    "atari_10m",
    {
        "ppo": Study(GAMES, {"CleanRL's": f"ppo {RULES}"}),
        "ppo-sync": Study(GAMES, {"CleanRL's, without lag": f"ppo {RULES} --no-concurrency"}),
        "ppo-gpu": Study(GAMES[:3], {"32 x 32": f"ppo {RULES} --num-envs 32 --num-steps 32 {GPU}"}),
        "impala": Study(
            GAMES[:2],
            {
                "preset": f"impala {RULES}",
                "entropy coefficient 0.001": f"impala {RULES} --ent-coef 0.001",
                "10 minibatches": f"impala {RULES} --num-minibatches 10",
                "20 minibatches": f"impala {RULES} --num-minibatches 20",
            },
        ),
        "pqn": Study(GAMES[:3], {"CleanRL's": f"pqn {RULES}"}),
        "pqn-gpu": Study(GAMES[:3], {"the authors'": f"pqn {RULES} {AUTHORS} {GPU}"}),
    },
    episodes=30,
    film=True,
    beside=True,
)


if __name__ == "__main__":
    STUDIES.go_on(tyro.cli(Asked, description=__doc__))
