"""Which agents remember?  Tasks that need memory, trained with an LSTM, and with the same settings without one.

    pip install --no-deps popgym                 # for RepeatPrevious; the others need nothing
    python benchmarks/memory_tasks.py            # trains what is missing: hours on few cores; can be interrupted
    python benchmarks/memory_tasks.py --studies chain
    python benchmarks/memory_tasks.py --seeds    # trains nothing: tables and figures of what is kept

Curves are kept in benchmarks/results/curves_memory.jsonl and drawn to static/memory_<study>.png (studies.py).
"""

import tyro
from studies import Asked, Studies, Study

LSTM = "--core lstm --lstm-size 64 --forget-bias 2"
# Rollouts long enough to hold both what must be remembered and when it is needed; all else is from the presets.
CHAIN = "--env-options memory_length=30 --total-timesteps 300000"
PREVIOUS = "--total-timesteps 1000000"
LONG = "--num-envs 32 --num-steps 64"
R2D2 = "--num-envs 32 --train-frequency 128 --forget-bias 2"
MINIGRID = (
    "--norm-obs --hiddens 64 --num-envs 64 --num-steps 64 --num-minibatches 4 --update-epochs 4 --clip-coef 0.2 "
    "--gamma 0.995 --share-torso --no-norm-reward"
)
S7, S9, S11, S13 = (f"MiniGrid-MemoryS{size}-v0" for size in (7, 9, 11, 13))
# Agents that start in corridors of 11 or 13 never do better than guess, so each starts from the agent of the next
# shorter corridor.  The entropy bonus makes them explore: the agent of S9 looks back from the end of the corridor, from
# where it sees nothing in S11.
FURTHER = "--total-timesteps 1500000 --learning-rate 5e-4 --ent-coef 0.05"
CORRIDORS = {
    S7: (None, "--total-timesteps 1500000 --learning-rate 1e-3"),
    S9: (S7, "--total-timesteps 1000000 --learning-rate 5e-4"),
    S11: (S9, FURTHER),
    S13: (S11, FURTHER),
}


def variants(task: str, r2d2: str) -> dict[str, str]:
    """Settings by name, for a task with these flags; `r2d2` has R2D2's own."""
    return {
        "PPO, LSTM": f"ppo {task} {LONG} {LSTM}",
        "PPO": f"ppo {task} {LONG}",
        "PQN, LSTM": f"pqn {task} {LONG} {LSTM}",
        "R2D2": f"r2d2 {task} {r2d2}",
    }


STUDIES = Studies(
    "memory",
    {
        # One bit, seen at the beginning, is asked for 30 steps later: 1 if it is right, -1 if not (bsuite).
        "chain": Study(
            ("gymnax:MemoryChain-bsuite",), variants(CHAIN, f"{R2D2} --num-steps 32 --sequence-length 64 --burn-in 32")
        ),
        # Name the suit of the card before the last four: from -1 (all wrong) to 1; -0.5 is a guess (POPGym).
        "previous": Study(("popgym:popgym-RepeatPreviousEasy-v0",), variants(PREVIOUS, R2D2)),
        # Go where the thing lies that was seen first: 1 less a little for each step; 0.5 is a guess (MiniGrid).
        "corridors": Study(
            (S7, S9, S11, S13), {"PPO, LSTM": f"ppo {MINIGRID} {LSTM}", "PPO": f"ppo {MINIGRID}"}, CORRIDORS
        ),
        "minigrid": Study((S7,), {"R2D2": "r2d2"}),
    },
    episodes=100,
)


if __name__ == "__main__":
    STUDIES.go_on(tyro.cli(Asked, description=__doc__))
