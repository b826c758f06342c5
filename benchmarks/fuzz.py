"""Generated command lines, run for real: each one trains, or is refused with exit code 2 and one clear message.

python benchmarks/fuzz.py                # about ten minutes on two cores
python benchmarks/fuzz.py --examples 50  # fewer
"""

import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import machine
import tyro
from hypothesis import HealthCheck, given, settings

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from launch import command
from test_fuzz import SMALL, command_lines, one_clear_message


@dataclass(frozen=True)
class Args:
    """Flags of the benchmark."""

    examples: int = 300
    """command lines"""


def main(args: Args) -> None:
    """Run them, print what became of them, write the results."""
    outcomes: Counter[str] = Counter()
    slowest = 0.0

    @settings(max_examples=args.examples, deadline=None, suppress_health_check=list(HealthCheck), database=None)
    @given(command_lines())
    def look(words: list[str]) -> None:
        nonlocal slowest
        with tempfile.TemporaryDirectory() as folder:
            start = time.perf_counter()
            ended = command(words[0], *SMALL, *words[1:], "--run-dir", str(Path(folder) / "run"))
            slowest = max(slowest, time.perf_counter() - start)
        diverged = ended.code == 1 and "not a finite number" in ended.err
        refused = ended.code == 2 and one_clear_message(ended.err)
        assert ended.code == 0 or diverged or refused, (words, ended)
        outcomes["trained" if ended.code == 0 else "numbers not finite" if diverged else "refused"] += 1

    look()
    for outcome, count in outcomes.items():
        print(f"{outcome}: {count}")
    print(f"slowest: {slowest:.1f} s")
    path = machine.save("fuzz", {"examples": args.examples, "outcomes": dict(outcomes), "slowest_seconds": slowest})
    print(f"written: benchmarks/results/{path.name}")


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
