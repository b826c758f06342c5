"""One process of several that train the same experiments, one after the other, on placements of their own.

    python placements.py COORDINATOR PROCESSES THIS RUNS RESULTS

RUNS is JSON: [experiment's fields, actor devices, learner devices] for each run.  Writes the digests of each run's
parameters into the file RESULTS, one run a line.
"""

import json
import sys

import remembering
from launch import digests

from cleanba.algorithms import ppo
from cleanba.algorithms.ppo import PPO
from cleanba.config import Placement
from cleanba.runtime.placement import initialise, make_deterministic


def main(coordinator: str, processes: str, this: str, runs: str, results: str) -> None:
    make_deterministic()
    initialise(Placement((), (), True, coordinator, int(processes), int(this)))
    with open(results, "w") as file:  # standard output is Gloo's
        for fields, actors, learners in json.loads(runs):
            fields = {name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()}
            remember = "buffer_size" in fields
            e = remembering.Remembering(**fields) if remember else PPO(**fields)
            found = digests(e, actors, learners, recipe=remembering if remember else ppo)
            print(json.dumps(found), file=file, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
