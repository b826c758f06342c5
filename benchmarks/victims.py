"""Runs that are ended on purpose: their commands, and what can be seen of them from outside."""

import fcntl
import json
import os
import random
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from subprocess import DEVNULL
from typing import IO, Any

from cleanba.runtime.checkpoint import updates_kept

# About a thousand steps of each environment, in several epochs.
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
MORE = {  # for --soak
    "PQN, LSTM": f"pqn --env-id CartPole-v1 {ACTOR_CRITIC} {SHORT} --core lstm --lstm-size 16",
    "R2D2, Catch": f"r2d2 --env-id Catch-v0 {OFF_POLICY} --lstm-size 16 --burn-in 2 --sequence-length 6 "
    "--buffer-size 2048 --total-timesteps 12800",
    "DQN, prioritised": f"dqn --env-id CartPole-v1 {OFF_POLICY} --prioritised --buffer-size 2048 "
    "--total-timesteps 12800",
    "TD3, Pendulum": f"td3 --env-id Pendulum-v1 {OFF_POLICY} --buffer-size 2048 --total-timesteps 12800",
    "PPO, Gymnasium, workers": f"ppo --env-id gymnasium:CartPole-v1 --env-workers 2 {ACTOR_CRITIC} {SHORT}",
    "DQN, two processes": f"dqn --env-id Catch-v0 {OFF_POLICY} --buffer-size 2048 --total-timesteps 12800",
}
FREQUENCIES = (["--checkpoint-frequency", "1"], ["--checkpoint-frequency", "5"], [])  # the last by time
# Large pictures fill a gigabyte in a few thousand steps, which wrap round once.
REPLAY = {
    "DQN, a gigabyte of replay": "dqn --env-id Pong-v5 --env-options img_height=420 img_width=420 --network impala "
    "--channels 4 4 4 --hiddens 16 --num-envs 8 --num-actors 2 --num-shards 2 --num-steps 16 --buffer-size 5760 "
    "--total-timesteps 8192 --learning-starts 1024 --train-frequency 64 --batch-size 8 --env-epoch 8 "
    "--log-frequency 1"
}
STARTING = 0.2  # share of the ends that come while a run starts or compiles; the others come once it trains
COMMANDS = KINDS | MORE | REPLAY
PLACEMENTS = ("0 / 0", "0 / 1 2", "0 1 / 2 3", "3 / 0")  # actors / learners


def start(
    kind: str, run: Path, placement: str, frequency: list[str], more: Sequence[str] = (), output: int | IO = DEVNULL
) -> list[subprocess.Popen]:
    """The processes of a run, with `more` flags; what they print goes to `output`."""
    actors, learners = placement.split("/")
    words = [*COMMANDS[kind].split(), "--run-dir", str(run), *frequency, *more]
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
            env=environment, stdout=output, stderr=output,
        )
        for i in range(count)
    ]  # fmt: skip


def start_somewhere(
    kind: str, run: Path, rng: random.Random, more: Sequence[str] = (), output: int | IO = DEVNULL
) -> list[subprocess.Popen]:
    """The processes of a run on a random placement, with checkpoints at a random frequency."""
    placement = "0 / 0" if "two processes" in kind else rng.choice(PLACEMENTS)
    return start(kind, run, placement, rng.choice(FREQUENCIES), more, output)


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


def alive(processes: list[subprocess.Popen]) -> bool:
    """Whether none of them has ended."""
    return all(process.poll() is None for process in processes)


def kept(run: Path) -> int:
    """The update of the newest checkpoint."""
    return max(updates_kept(run), default=0)


def whole_run(kind: str, run: Path, more: Sequence[str] = ()) -> dict[str, Any]:
    """Train a run without ending it early, with its only checkpoint at its end -> its result and its logged updates."""
    for process in start(kind, run, "0 / 0", ["--checkpoint-frequency", "0"], more):
        if process.wait() != 0:
            raise SystemExit(f"{kind}: the run that nothing ends failed")
    return json.loads((run / "result.json").read_text()) | {"updates": logged_updates(run)}


def wait_for_moment(run: Path, processes: list[subprocess.Popen], updates: float, rng: random.Random) -> float:
    """Wait for a random moment, while the run starts or within so many updates -> the time when waiting began."""
    if len(processes) > 1:  # the others would not notice the loss of a process that has never joined
        while not held(run) and alive(processes):
            time.sleep(0.05)
    before, started = kept(run), time.time()
    if rng.random() < STARTING:
        time.sleep(rng.uniform(0.5, 6.0))
    else:
        until = before + rng.uniform(0, updates)
        while not trains(run, until, started) and alive(processes):
            time.sleep(rng.uniform(0.0, 0.1))
    return started


def logged_updates(run: Path) -> list[int]:
    """The updates that every run logs, however often it takes checkpoints."""
    updates = [json.loads(line)["update"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [update for update in updates if update % 5 == 0]
