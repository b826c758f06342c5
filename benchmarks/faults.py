"""Kills runs at random moments, resumes them on the same or another placement, and compares the bits at the end.

python benchmarks/faults.py                # 32 kills or more, about a quarter of an hour on two cores
python benchmarks/faults.py --kills 4      # of each kind, fewer
python benchmarks/faults.py --replay       # DQN alone, with a replay memory of a gigabyte; needs some 4 GB of disk
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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import machine
import tyro


@dataclass(frozen=True)
class Args:
    """Flags of the benchmark."""

    kills: int = 7
    """of each kind of run"""
    seed: int = 0
    """of the moments"""
    replay: bool = False
    """DQN with a replay memory of a gigabyte, and nothing else"""


COMMON = (
    "--env-id CartPole-v1 --num-envs 16 --num-actors 2 --num-shards 2 --num-steps 32 --hiddens 32 --num-minibatches 2 "
    "--total-timesteps 409600 --env-epoch 25 --log-frequency 5"
)
KINDS = {
    "PPO": f"ppo {COMMON}",
    "PPO, LSTM, no concurrency": f"ppo {COMMON} --core lstm --lstm-size 32 --no-concurrency",
    "IMPALA": f"impala {COMMON}",
    "IMPALA, LSTM": f"impala {COMMON} --core lstm --lstm-size 32",
    "PPO, two processes": f"ppo {COMMON}",
}
# Large pictures fill a gigabyte in a few thousand steps, which wrap round once.
REPLAY = {
    "DQN, a gigabyte of replay": "dqn --env-id Pong-v5 --env-options img_height=420 img_width=420 --network impala "
    "--channels 4 4 4 --hiddens 16 --num-envs 8 --num-actors 2 --num-shards 2 --num-steps 16 --buffer-size 5760 "
    "--total-timesteps 8192 --learning-starts 1024 --train-frequency 64 --batch-size 8 --env-epoch 8 "
    "--log-frequency 1"
}
PLACEMENTS = ("0 / 0", "0 / 1 2", "0 1 / 2 3", "3 / 0")  # actors / learners


def start(kind: str, run: Path, placement: str) -> list[subprocess.Popen]:
    """The processes of a run."""
    actors, learners = placement.split("/")
    words = [*(KINDS | REPLAY)[kind].split(), "--run-dir", str(run)]
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


def update_of(run: Path) -> int:
    """The last update that was logged."""
    try:
        lines = (run / "metrics.jsonl").read_text().splitlines()
        return int(json.loads(lines[-1])["update"]) if lines else 0
    except (OSError, ValueError):
        return 0


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


def torment(kind: str, kills: int, reference: dict[str, Any], run: Path, rng: random.Random) -> dict[str, Any]:
    """Kill a run `kills` times, let it finish, compare."""
    seconds, done, repeated, slowest = reference["seconds"], 0, 0, 0.0
    while done < kills:
        placement = "0 / 0" if "two processes" in kind else rng.choice(PLACEMENTS)
        processes = start(kind, run, placement)
        if len(processes) > 1:  # one that has never joined cannot be missed by the others
            while not held(run):
                time.sleep(0.05)
        # From start-up, before anything is compiled, to well into the run; short enough that it does not finish.
        time.sleep(rng.uniform(0.5, 6.0 + seconds / kills))
        victim = rng.choice(processes)
        if victim.poll() is not None:
            raise SystemExit(f"{kind}: a process ended by itself with code {victim.returncode}")
        logged = update_of(run)
        victim.send_signal(signal.SIGKILL)
        killed_at = time.monotonic()
        for process in processes:
            process.wait(60)  # the others must notice
        slowest = max(slowest, time.monotonic() - killed_at)
        kept = [int(p.name) for p in (run / "checkpoints").glob("*") if p.name.isdecimal()]
        repeated += max(0, logged - max(kept, default=0))
        done += 1
    for process in start(kind, run, "0 / 0" if "two processes" in kind else rng.choice(PLACEMENTS)):
        if process.wait() != 0:
            raise SystemExit(f"{kind}: the last resume failed")
    result = json.loads((run / "result.json").read_text())
    updates = [json.loads(line)["update"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {
        "kills": done,
        "updates": result["update"],
        "updates_repeated": repeated,
        "seconds_until_all_ended": round(slowest, 2),
        "digest_equal": all(result[name] == reference[name] for name in ("params_digest", "learner_digest")),
        "log_without_gaps": updates == reference["updates"],
    }


def main(args: Args) -> None:
    """Measure, print a table, write the results."""
    rng, kinds = random.Random(args.seed), REPLAY if args.replay else KINDS
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for i, kind in enumerate(kinds):
            whole = Path(folder) / f"whole{i}"
            for process in start(kind, whole, "0 / 0"):
                if process.wait() != 0:
                    raise SystemExit(f"{kind}: the run without kills failed")
            reference = json.loads((whole / "result.json").read_text())
            lines = (whole / "metrics.jsonl").read_text().splitlines()
            reference["updates"] = [json.loads(line)["update"] for line in lines]
            results[kind] = r = torment(kind, args.kills, reference, Path(folder) / f"run{i}", rng)
            verdict = "same bits" if r["digest_equal"] and r["log_without_gaps"] else "DIFFERS"
            print(
                f"{kind:28} {r['kills']} kills, {r['updates_repeated']} of {r['updates']} updates repeated: {verdict}",
                flush=True,
            )
    survived = all(r["digest_equal"] and r["log_without_gaps"] for r in results.values())
    name = "faults_replay" if args.replay else "faults"
    path = machine.save(name, {"kinds": kinds, "results": results, "all_equal": survived})
    print(f"{sum(r['kills'] for r in results.values())} kills; written: benchmarks/results/{path.name}")
    sys.exit(not survived)


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
