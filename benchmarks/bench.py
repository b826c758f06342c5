"""`make bench`: what can be measured on CPUs in less than 15 minutes, as one table and as JSON.

Each part is a separate benchmark, which also writes its own results; this table has the main ratios.  A part that
does not end in time is listed as missing.  If PyTorch is installed, comparisons with it are included.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import machine
import tyro

HERE = Path(__file__).parent


class Row(NamedTuple):
    what: str
    here: str
    beside: str
    ratio: str


class Part(NamedTuple):
    words: str
    """the benchmark, with its flags"""
    result: str
    """the file that it writes"""
    rows: Callable[[dict[str, Any]], list[Row]]


def of_startup(found: dict[str, Any]) -> list[Row]:
    """Second starts compared with first ones."""
    rows = []
    for name in ("MLP", "ResNet"):
        first, second = found[name]["first"]["seconds"], found[name]["second"]["seconds"]["median"]
        rows.append(
            Row(f"{name}, command to first update, second start", f"{second:.1f} s", f"first start {first:.1f} s",
                f"{second / first:.2f}")
        )  # fmt: skip
    return rows


def of_throughput(what: str) -> Callable[[dict[str, Any]], list[Row]]:
    """A whole training compared with EnvPool alone."""

    def rows(found: dict[str, Any]) -> list[Row]:
        speed = {name: samples["median"] for name, samples in found["steps_per_second"].items()}
        whole, alone = speed["whole"], speed["EnvPool alone"]
        return [Row(what, f"{whole:,.0f} steps/s", f"EnvPool alone {alone:,.0f}", f"{whole / alone:.2f}")]

    return rows


PEERS = {"pytorch": "PyTorch", "pytorch-last": "PyTorch, channels last", "xla": "as JAX derives it"}


def of_networks(found: dict[str, Any]) -> list[Row]:
    """Forward and backward passes compared with the other forms that took part."""
    rows = []
    for row in found["rows"]:
        speed = {form: samples["median"] for form, samples in row["images_per_second"].items()}
        here = speed.pop("direct")
        what = f"{row['network']}, {row['pass']}, {row['images']} images"
        rows += [
            Row(what, f"{here:,.0f} images/s", f"{PEERS[peer]} {there:,.0f}", f"{here / there:.2f}")
            for peer, there in speed.items()
        ]
    return rows


def of_peers(found: dict[str, Any]) -> list[Row]:
    """Whole trainings compared with PyTorch loops."""
    words = {"breakout": "PPO on Breakout, Nature CNN, 32 x 64", "halfcheetah": "PPO on HalfCheetah"}
    words["breakout-last"] = f"{words['breakout']}, beside channels last"
    rows = []
    for name, part in found["parts"].items():
        ours, peer = (part["steps_per_second"][who]["median"] for who in ("ours", "PyTorch"))
        rows.append(Row(words[name], f"{ours:,.0f} steps/s", f"PyTorch {peer:,.0f}", f"{part['ratio']['median']:.2f}"))
    return rows


SMALL = "--network mlp --hiddens 64 64 --num-envs 64 --num-steps 64 --collector scanned --seconds 2"
TORCH = find_spec("torch")
BESIDE = "pytorch pytorch-last" if TORCH else "xla"  # XLA's turn takes 20 seconds, each other's one
PARTS = [
    Part("startup.py", "startup_cpu", of_startup),
    *(
        Part(f"throughput.py --env-id {name}-{version} {SMALL} --num-actors {actors}",
             f"throughput_cpu_ppo_{name}-{version}_mlp_scanned_{actors}_actors",
             of_throughput(f"PPO on {name}, 64 x 64, {actors} actor{'s' * (actors > 1)}"))
        for actors in (1, 2) for name, version in (("CartPole", "v1"), ("Catch", "v0"))
    ),
    Part(f"networks.py --act 32 --seconds 12 --forms direct {BESIDE}", "networks_cpu", of_networks),
    *([Part("peers.py --rounds 3", "peers_cpu", of_peers)] if TORCH else []),
]  # fmt: skip


@dataclass(frozen=True)
class Args:
    """Flags of the benchmark."""

    minutes: float = 15.0
    """time limit; parts that have not ended by then are listed as missing"""


def main(args: Args) -> None:
    """Run the parts one after the other, and write the table after each."""
    began, rows, missing, load = time.monotonic(), [], [], [os.getloadavg()[0]]
    for part in PARTS:
        print(f"\n$ python benchmarks/{part.words}", flush=True)
        left = args.minutes * 60 - (time.monotonic() - began)
        environment = {**os.environ, "PYTHONPATH": f"{HERE.parent}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
        try:
            script, *flags = part.words.split()
            subprocess.run([sys.executable, HERE / script, *flags], check=True, timeout=max(left, 1), env=environment)
            rows += part.rows(json.loads((machine.RESULTS / f"{part.result}.json").read_text()))
        except (subprocess.TimeoutExpired, subprocess.CalledProcessError) as why:
            missing.append(f"{part.words}: {'no time left' if isinstance(why, subprocess.TimeoutExpired) else why}")
        load.append(os.getloadavg()[0])
        machine.save("bench", {"load_average": load, "rows": [row._asdict() for row in rows], "missing": missing})
    lines = ["| what | here | beside | ratio |", "|---|---|---|---|", *[f"| {' | '.join(row)} |" for row in rows]]
    lines += [f"\nmissing: {what}" for what in missing]
    lines += [f"\nLoad of the machine (jobs at a time, of all users): {min(load):.1f} to {max(load):.1f}"]
    text = "\n".join(lines) + "\n"
    (machine.RESULTS / "bench.md").write_text(text)
    print(f"\n{text}\nwritten: benchmarks/results/bench.md, bench.json")


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
