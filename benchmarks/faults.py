"""Ends runs at random moments, resumes them on the same or another placement, and compares the bits at the end.

Runs end by kill -9, SIGTERM and SIGINT, with checkpoints after every update, every fifth, and by time.  The run to
compare with is never interrupted, and takes its only checkpoint at its end.

python benchmarks/faults.py                        # 100 ends or more, hours on two cores
python benchmarks/faults.py --kills 4              # of each kind, fewer
python benchmarks/faults.py --seed 1               # at other moments; results are added to those of other seeds
python benchmarks/faults.py --only "SAC, Pendulum" # one kind
python benchmarks/faults.py --replay               # DQN alone, with a gigabyte of replay; needs some 4 GB of disk
python benchmarks/faults.py --soak 100             # 100 more faults of all sorts, over all algorithms: soak.py
"""

import json
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import machine
import soak
import tyro
from victims import KINDS, REPLAY, kept, logged_updates, start_somewhere, trains, update_of, wait_for_moment, whole_run

SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT)


@dataclass(frozen=True)
class Args:
    """Flags of the benchmark."""

    kills: int = 9
    """ends of each kind of run"""
    only: str = ""
    """the one kind to run"""
    seed: int = 0
    """seed of the moments"""
    replay: bool = False
    """run only DQN with a replay memory of a gigabyte"""
    soak: int = 0
    """only inject this many more faults of all sorts; each takes some ten seconds on two cores"""


@dataclass
class Tally:
    """What was seen of one kind of run."""

    ends: Counter[str] = field(default_factory=Counter)
    """by signal"""
    runs: int = 0
    while_training: int = 0
    """ends after the start's first logged update"""
    updates_repeated: int = 0
    """at least: only every fifth update is logged before the signal"""
    updates_repeated_after_sigterm_or_sigint: int = 0
    seconds_until_all_ended: float = 0.0
    """the slowest"""
    digest_equal: bool = True
    log_without_gaps: bool = True


def end_once(kind: str, run: Path, part: float, updates: int, rng: random.Random, tally: Tally) -> bool:
    """Start or resume a run, and end it after about so many updates; False if it had finished by then."""
    processes = start_somewhere(kind, run, rng)
    before = kept(run)
    started = wait_for_moment(run, processes, part * updates, rng)
    victim, signum = rng.choice(processes), rng.choice(SIGNALS)
    by_themselves = [process.returncode for process in processes if process.poll() is not None]
    if by_themselves:
        if any(by_themselves):
            raise SystemExit(f"{kind}: a process ended by itself with code {max(by_themselves, key=abs)}")
        for process in processes:
            process.wait(120)
        return False
    trained = trains(run, before, started)
    logged = update_of(run) if trained else before
    victim.send_signal(signum)
    killed_at = time.monotonic()
    for process in processes:
        process.wait(120)  # the others must notice
    if victim.returncode not in (0, -signum, 128 + signum):  # 0: it has finished meanwhile
        raise SystemExit(f"{kind}: {signum.name} ended a process with code {victim.returncode}")
    lost = max(0, logged - kept(run))
    tally.ends[signum.name] += 1
    tally.while_training += trained
    tally.seconds_until_all_ended = max(tally.seconds_until_all_ended, round(time.monotonic() - killed_at, 2))
    tally.updates_repeated += lost
    tally.updates_repeated_after_sigterm_or_sigint += lost if signum != signal.SIGKILL else 0
    return True


def torment(kind: str, kills: int, reference: dict[str, Any], folder: Path, rng: random.Random) -> Tally:
    """End runs `kills` times in all, let each finish, compare."""
    tally = Tally()
    while tally.ends.total() < kills:
        run = folder / str(tally.runs)
        while tally.ends.total() < kills and end_once(kind, run, 2 / kills, reference["update"], rng, tally):
            pass
        tally.runs += 1
        for process in start_somewhere(kind, run, rng):
            if process.wait() != 0:
                raise SystemExit(f"{kind}: the last resume failed")
        result = json.loads((run / "result.json").read_text())
        tally.digest_equal &= all(result[name] == reference[name] for name in ("params_digest", "learner_digest"))
        tally.log_without_gaps &= logged_updates(run) == reference["updates"]
    return tally


def main(args: Args) -> None:
    """Measure, print a table, write the results."""
    if args.soak:
        sys.exit(not soak.add(args.soak, args.only))
    rng, kinds = random.Random(args.seed), REPLAY if args.replay else KINDS
    if args.only and args.only not in kinds:
        sys.exit(f"benchmarks/faults.py: --only {args.only}: there is no such kind; there are {', '.join(kinds)}")
    kinds = {args.only: kinds[args.only]} if args.only else kinds
    name, survived = "faults_replay" if args.replay else "faults", True
    results: dict[str, Any] = machine.saved(name).get("results", {})
    with tempfile.TemporaryDirectory() as folder:
        for i, kind in enumerate(kinds):
            whole = Path(folder) / f"whole{i}"
            reference = whole_run(kind, whole)
            tally = torment(kind, args.kills, reference, Path(folder) / f"runs{i}", rng)
            survived &= (same := tally.digest_equal and tally.log_without_gaps)
            kills = tally.ends.total()
            results[f"{kind}; seed {args.seed}"] = {
                "kills": kills,
                "updates": reference["update"],
                **vars(tally),
                "ends": dict(tally.ends),
            }
            print(
                f"{kind:28} {kills} ends of {tally.runs} runs, {tally.while_training} while they trained, "
                f"{tally.updates_repeated} of {tally.runs * reference['update']} updates repeated: "
                f"{'same bits' if same else 'DIFFERS'}",
                flush=True,
            )
            equal = all(r["digest_equal"] and r["log_without_gaps"] for r in results.values())
            path = machine.save(name, {"kinds": kinds, "results": results, "all_equal": equal})
    print(f"{sum(r['kills'] for r in results.values())} ends; written: benchmarks/results/{path.name}")
    sys.exit(not survived)


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
