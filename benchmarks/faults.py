"""Ends runs at random moments, resumes them on the same or another placement, and compares the bits at the end.

Runs end by kill -9, SIGTERM and SIGINT, with checkpoints after every update, every fifth, and by time.  The run to
compare with is never interrupted, and takes its only checkpoint at its end.

python benchmarks/faults.py                        # 100 ends or more, hours on two cores
python benchmarks/faults.py --kills 4              # of each kind, fewer
python benchmarks/faults.py --seed 1               # at other moments; results are added to those of other seeds
python benchmarks/faults.py --only "SAC, Pendulum" # one kind
python benchmarks/faults.py --replay               # DQN alone, with a gigabyte of replay; needs some 4 GB of disk
"""

import fcntl
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import machine
import tyro


@dataclass(frozen=True)
class Args:
    """Flags of the benchmark."""

    kills: int = 9
    """ends of each kind of run"""
    only: str = ""
    """the one kind to run"""
    seed: int = 0
    """of the moments"""
    replay: bool = False
    """DQN with a replay memory of a gigabyte, and nothing else"""


# A thousand steps or so of each environment, in several epochs.
COMMON = "--num-actors 2 --num-shards 2 --hiddens 32 --log-frequency 5 --env-epoch 37"
ACTOR_CRITIC = f"{COMMON} --num-envs 16 --num-steps 32 --num-minibatches 2"
OFF_POLICY = f"{COMMON} --num-envs 8 --num-steps 8 --learning-starts 512 --batch-size 32 --train-frequency 8"
SHORT, LONG = "--total-timesteps 102400", "--total-timesteps 512000"  # 200 and 1,000 updates
KINDS = {
    "PPO, CartPole": f"ppo --env-id CartPole-v1 {ACTOR_CRITIC} {LONG}",
    "PPO, LSTM, no concurrency": f"ppo --env-id CartPole-v1 {ACTOR_CRITIC} {SHORT} --core lstm --lstm-size 32 "
    "--no-concurrency",
    "IMPALA, LSTM, Breakout": "impala --env-id Breakout-v5 --network nature --core lstm --lstm-size 32 --num-envs 8 "
    f"--num-steps 16 --num-minibatches 2 --total-timesteps 12800 {COMMON}",
    "PPO, HalfCheetah": f"ppo --env-id HalfCheetah-v5 {ACTOR_CRITIC} {LONG}",
    "PPO, MiniGrid": f"ppo --env-id MiniGrid-Empty-5x5-v0 {ACTOR_CRITIC} {LONG}",
    "DQN, Catch": f"dqn --env-id Catch-v0 {OFF_POLICY} --buffer-size 2048 --total-timesteps 12800",
    "SAC, Pendulum": f"sac --env-id Pendulum-v1 {OFF_POLICY} --buffer-size 2048 --total-timesteps 12800",
    "PPO, gymnax": f"ppo --env-id gymnax:Breakout-MinAtar {ACTOR_CRITIC} {LONG}",
    "PPO, Gymnasium": f"ppo --env-id gymnasium:CartPole-v1 {ACTOR_CRITIC} {SHORT}",
    "PPO, two processes": f"ppo --env-id CartPole-v1 {ACTOR_CRITIC} {LONG}",
}
FREQUENCIES = (["--checkpoint-frequency", "1"], ["--checkpoint-frequency", "5"], [])  # the last by time
STARTING = 0.2  # of the ends, while a run starts or compiles; the others once it has trained
SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT)
# Large pictures fill a gigabyte in a few thousand steps, which wrap round once.
REPLAY = {
    "DQN, a gigabyte of replay": "dqn --env-id Pong-v5 --env-options img_height=420 img_width=420 --network impala "
    "--channels 4 4 4 --hiddens 16 --num-envs 8 --num-actors 2 --num-shards 2 --num-steps 16 --buffer-size 5760 "
    "--total-timesteps 8192 --learning-starts 1024 --train-frequency 64 --batch-size 8 --env-epoch 8 "
    "--log-frequency 1"
}
PLACEMENTS = ("0 / 0", "0 / 1 2", "0 1 / 2 3", "3 / 0")  # actors / learners


def start(kind: str, run: Path, placement: str, frequency: list[str]) -> list[subprocess.Popen]:
    """The processes of a run."""
    actors, learners = placement.split("/")
    words = [*(KINDS | REPLAY)[kind].split(), "--run-dir", str(run), *frequency]
    words += ["--actor-device-ids", *actors.split(), "--learner-device-ids", *learners.split()]
    count = 2 if "two processes" in kind else 1
    shared: list[str] = []
    if count > 1:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        shared = ["--distributed", "--coordinator-address", f"127.0.0.1:{port}", "--num-processes", str(count)]
    environment = {"JAX_NUM_CPU_DEVICES": "8", **os.environ}
    return [
        subprocess.Popen(
            [sys.executable, "-m", "cleanba", *words, *shared, *(["--process-id", str(i)] if shared else [])],
            env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )
        for i in range(count)
    ]  # fmt: skip


def start_somewhere(kind: str, run: Path, rng: random.Random) -> list[subprocess.Popen]:
    """The processes of a run on a random placement, with checkpoints at a random frequency."""
    placement = "0 / 0" if "two processes" in kind else rng.choice(PLACEMENTS)
    return start(kind, run, placement, rng.choice(FREQUENCIES))


def update_of(run: Path) -> int:
    """The last update that was logged."""
    try:
        lines = (run / "metrics.jsonl").read_text().splitlines()
        return int(json.loads(lines[-1])["update"]) if lines else 0
    except (OSError, ValueError):
        return 0


def trains(run: Path, before: float, started: float) -> bool:
    """Whether a start of the run has logged an update after `before`; what an earlier start logged does not count."""
    path = run / "metrics.jsonl"
    return path.exists() and path.stat().st_mtime > started and update_of(run) > before


def held(run: Path) -> bool:
    """Whether a process has the run's lock, which process 0 takes once all have found each other."""
    try:
        with open(run / ".lock") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return False
    except FileNotFoundError:
        return False
    except OSError:
        return True


@dataclass
class Tally:
    """What was seen of one kind of run."""

    ends: Counter[str] = field(default_factory=Counter)
    """by signal"""
    runs: int = 0
    while_training: int = 0
    """ends after the start's first logged update"""
    updates_repeated: int = 0
    """at least: by what was logged, every fifth update, before the signal"""
    updates_repeated_after_sigterm_or_sigint: int = 0
    seconds_until_all_ended: float = 0.0
    """the slowest"""
    digest_equal: bool = True
    log_without_gaps: bool = True


def alive(processes: list[subprocess.Popen]) -> bool:
    """Whether none of them has ended."""
    return all(process.poll() is None for process in processes)


def end_once(kind: str, run: Path, part: float, updates: int, rng: random.Random, tally: Tally) -> bool:
    """Start a run or go on with it, and end it after about so many of its updates; False where it came to its end."""
    processes = start_somewhere(kind, run, rng)
    if len(processes) > 1:  # one that has never joined cannot be missed by the others
        while not held(run) and alive(processes):
            time.sleep(0.05)
    before, started = kept(run), time.time()
    if rng.random() < STARTING:
        time.sleep(rng.uniform(0.5, 6.0))
    else:
        until = before + rng.uniform(0, part * updates)
        while not trains(run, until, started) and alive(processes):
            time.sleep(rng.uniform(0.0, 0.1))
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
    if victim.returncode not in (0, -signum, 128 + signum):  # 0: it came to its end meanwhile
        raise SystemExit(f"{kind}: {signum.name} ended a process with code {victim.returncode}")
    lost = max(0, logged - kept(run))
    tally.ends[signum.name] += 1
    tally.while_training += trained
    tally.seconds_until_all_ended = max(tally.seconds_until_all_ended, round(time.monotonic() - killed_at, 2))
    tally.updates_repeated += lost
    tally.updates_repeated_after_sigterm_or_sigint += lost if signum != signal.SIGKILL else 0
    return True


def torment(kind: str, kills: int, reference: dict[str, Any], folder: Path, rng: random.Random) -> Tally:
    """End runs `kills` times in all, let each come to its end, compare."""
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


def kept(run: Path) -> int:
    """The update of the newest checkpoint."""
    return max((int(p.name) for p in (run / "checkpoints").glob("*") if p.name.isdecimal()), default=0)


def logged_updates(run: Path) -> list[int]:
    """Those that every run logs, however often it takes checkpoints."""
    updates = [json.loads(line)["update"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [update for update in updates if update % 5 == 0]


def main(args: Args) -> None:
    """Measure, print a table, write the results."""
    rng, kinds = random.Random(args.seed), REPLAY if args.replay else KINDS
    kinds = {args.only: kinds[args.only]} if args.only else kinds
    name, survived = "faults_replay" if args.replay else "faults", True
    results: dict[str, Any] = machine.saved(name).get("results", {}) if args.seed or args.only else {}
    with tempfile.TemporaryDirectory() as folder:
        for i, kind in enumerate(kinds):
            whole = Path(folder) / f"whole{i}"
            for process in start(kind, whole, "0 / 0", ["--checkpoint-frequency", "0"]):
                if process.wait() != 0:
                    raise SystemExit(f"{kind}: the run without kills failed")
            reference = json.loads((whole / "result.json").read_text())
            reference["updates"] = logged_updates(whole)
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
