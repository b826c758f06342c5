"""Runs generated command lines of all commands: none may end in a traceback, and errors must be one message.

A training command must train, or exit with code 2.

python benchmarks/fuzz.py                # about ten minutes on two cores
python benchmarks/fuzz.py --examples 50  # fewer
"""

import os
import re
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import machine
import tyro
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from launch import command
from test_fuzz import command_lines, make_places, no_traceback, one_clear_message, other_lines, small

from cleanba.recipes import RECIPES


@dataclass(frozen=True)
class Args:
    """Flags of the benchmark."""

    examples: int = 300
    """command lines"""


def main(args: Args) -> None:
    """Run them, print how they ended, write the results."""
    outcomes: Counter[str] = Counter()
    slowest = 0.0

    @settings(max_examples=args.examples, deadline=None, suppress_health_check=list(HealthCheck), database=None)
    @given(st.booleans().flatmap(lambda trains: command_lines() if trains else other_lines()))
    def look(words: list[str]) -> None:
        nonlocal slowest
        if words[0] not in RECIPES:
            outcomes[f"{words[0]}: exit code {no_traceback(words, places)}"] += 1
            return
        with tempfile.TemporaryDirectory() as folder:
            start = time.perf_counter()
            ended = command(*small(words), "--run-dir", str(Path(folder) / "run"))
            slowest = max(slowest, time.perf_counter() - start)
        # A wild learning rate may end in non-finite numbers, and a short stall timeout in a stall; the error says so.
        diverged = ended.code == 1 and re.search(
            "not a finite number|not finite numbers|raise --stall-timeout", ended.err
        )
        refused = ended.code == 2 and one_clear_message(ended.err)
        assert ended.code == 0 or diverged or refused, (words, ended)
        outcomes["trained" if ended.code == 0 else "numbers not finite, or a stall" if diverged else "refused"] += 1

    with tempfile.TemporaryDirectory() as folder:
        os.environ |= {"HF_HUB_OFFLINE": "1", "HF_HOME": folder}
        os.chdir(folder)
        places = make_places(Path(folder) / "runs")
        look()
        os.chdir("/")
    for outcome, count in outcomes.items():
        print(f"{outcome}: {count}")
    print(f"slowest: {slowest:.1f} s")
    path = machine.save("fuzz", {"examples": args.examples, "outcomes": dict(outcomes), "slowest_seconds": slowest})
    print(f"written: benchmarks/results/{path.name}")


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
