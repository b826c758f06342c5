"""One process of several that train the same experiments, one after the other, on placements of their own.

    python placements.py COORDINATOR PROCESSES THIS RUNS RESULTS

RUNS is JSON: for each run [experiment's fields, actor devices, learner devices], or [algorithm, words of the command].
Writes the digests of each run's parameters into the file RESULTS, one run a line.
"""

import json
import sys
from typing import Any

import remembering
from launch import digests, typed_digests

from cleanba.algorithms import ppo
from cleanba.algorithms.ppo import PPO
from cleanba.config import Placement
from cleanba.runtime.process_setup import make_deterministic
from cleanba.runtime.processes import initialise


def main(coordinator: str, processes: str, this: str, runs: str, results: str) -> None:
    make_deterministic()
    initialise(Placement((), (), True, coordinator, int(processes), int(this)))
    with open(results, "w") as file:  # standard output is Gloo's
        for what, *where in json.loads(runs):
            found = typed_digests(what, *where) if isinstance(what, str) else constructed_digests(what, *where)
            print(json.dumps(found), file=file, flush=True)


def constructed_digests(fields: dict[str, Any], actors: list[int], learners: list[int]) -> dict[int, str]:
    fields = {name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()}
    remember = "buffer_size" in fields
    e = remembering.Remembering(**fields) if remember else PPO(**fields)
    return digests(e, actors, learners, recipe=remembering if remember else ppo)


if __name__ == "__main__":
    main(*sys.argv[1:])
