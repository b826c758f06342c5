"""How long does it take from the command to the first update, on the first start and on the second?

    python benchmarks/startup.py     # a minute; results in benchmarks/results/

Experiments are small, so the time is that of starting: imports, looking up devices and environment, tracing, compiling
or loading, the first rollout.  Besides seconds it gives processor time, which other work on the machine lengthens less.
"""

import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import machine
import tyro

SETTINGS = {
    "MLP": "ppo --env-id CartPole-v1 --hiddens 64 64 --num-envs 64 --num-steps 64",
    "ResNet": "ppo --env-id Breakout-v5 --network impala --num-envs 8 --num-steps 16",
}
BOUNDS = {"MLP": 5.0, "ResNet": 15.0}  # seconds of a second start on two idle cores


@dataclass(frozen=True)
class Args:
    """Flags of the benchmark."""

    rounds: int = 3
    """second starts of each; figures are medians over them"""


def start(words: str, home: str) -> tuple[float, float]:
    """Seconds, and seconds of processor time, from the command to the first update's line in the log."""
    left_out = [name for name in os.environ if "COMPILATION_CACHE" in name or "PERSISTENT_CACHE" in name]
    env = {name: value for name, value in os.environ.items() if name not in left_out} | {"XDG_CACHE_HOME": home}
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "run" / "metrics.jsonl"
        command = [
            sys.executable,
            "-m",
            "cleanba",
            *words.split(),
            "--log-frequency",
            "1",
            "--run-dir",
            str(log.parent),
        ]
        began = time.perf_counter()
        process = subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            while not (log.exists() and log.stat().st_size):
                if process.poll() is not None:
                    sys.exit(f"the run ended without an update: {' '.join(command)}")
                time.sleep(0.02)
            seconds = time.perf_counter() - began
            fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
            used = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
        finally:
            process.kill()
            process.wait()
    return seconds, used


def main(args: Args) -> None:
    """Measure, print, write."""
    found: dict[str, Any] = {"load_average": os.getloadavg()[0]}
    for name, words in SETTINGS.items():
        with tempfile.TemporaryDirectory() as home:
            first = start(words, home)
            later = [start(words, home) for _ in range(args.rounds)]
        seconds, used = (machine.spread(list(samples)) for samples in zip(*later, strict=True))
        found[name] = {
            "command": words, "first": {"seconds": first[0], "processor_seconds": first[1]},
            "second": {"seconds": seconds, "processor_seconds": used},
        }  # fmt: skip
        print(
            f"{name}: first start {first[0]:.1f} s ({first[1]:.1f} s of the processor), second "
            f"{seconds['median']:.1f} s ({used['median']:.1f}); to be reached on two idle cores: {BOUNDS[name]:.0f} s",
            flush=True,
        )
    print(f"written: benchmarks/results/{machine.save('startup_cpu', found).name}")


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
