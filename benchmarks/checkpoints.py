"""How much does a checkpoint cost, how much does a resume cost, and how fast are recorded actions played back?

python benchmarks/checkpoints.py                  # all three parts, half an hour on two cores
python benchmarks/checkpoints.py --parts playing  # one of them

1. checkpoints: the same training with many checkpoints and with only the last one, in turns.  The extra time, divided
   by the number of checkpoints, is the cost of one, also given as a percentage at one checkpoint a minute.
2. going_on: a run is ended by SIGTERM at several places in its epoch of environments and resumed each time.  Measures
   the time from the resume to the first new update, beside the time that training took to get there, which is what a
   resume would repeat if checkpoints were taken only at the end of an epoch.
3. playing: `play_back` beside a plain loop that steps EnvPool with the same actions, in turns.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import machine
import numpy as np
import tyro

from cleanba.environments.backends import env_spec
from cleanba.environments.envpool import Envs
from cleanba.recipes import RECIPES
from cleanba.resolution import resolve
from cleanba.runtime.channels import Stop
from cleanba.runtime.playback import play_back
from cleanba.runtime.records import RecordedRollout, SavedActor, action_dtype, digests_of, extend_outcomes_digest

PARTS = ("checkpoints", "going_on", "playing")


@dataclass(frozen=True)
class Args:
    """Flags of the benchmark."""

    parts: tuple[str, ...] = PARTS
    """what is measured"""
    only: str = ""
    """the one setting to measure of each part"""
    rounds: int = 3
    """turns of each; figures are medians over them"""


class Setting(NamedTuple):
    """Training whose checkpoints are timed."""

    words: str
    frequency: int
    """updates between checkpoints, where there are many"""
    begin_at: int = 0
    """the update from which it is timed; the updates before are trained once for all rounds"""


SETTINGS = {
    "PPO, CartPole, scanned": Setting("ppo --env-id CartPole-v1 --total-timesteps 3000000 --log-frequency 20", 200),
    "PPO, Breakout, Nature CNN, 120 environments": Setting(
        "ppo --env-id Breakout-v5 --network nature --num-steps 32 --total-timesteps 57600 --log-frequency 1", 1
    ),
    "SAC, HalfCheetah, a million transitions": Setting(
        "sac --env-id HalfCheetah-v5 --num-steps 25 --learning-starts 1000000 --total-timesteps 1010000",
        10,
        10_010,
    ),
}
PLACES = {  # after so many updates of an epoch
    "PPO, CartPole, scanned": ("ppo --env-id CartPole-v1 --total-timesteps 100000000", (200, 1000, 4000)),
    "PPO, Breakout, Nature CNN, 120 environments": (
        "ppo --env-id Breakout-v5 --network nature --num-steps 32 --total-timesteps 10000000",
        (5, 15, 30),
    ),
    "SAC, HalfCheetah": ("sac --env-id HalfCheetah-v5", (200, 500, 1000)),
}
PLAYED = {  # environments, steps of each
    "Breakout-v5": (60, 200),
    "Pong-v5": (60, 200),
    "HalfCheetah-v5": (16, 2000),
    "CartPole-v1": (16, 8000),
    "LunarLander-v3": (16, 2000),
    "MiniGrid-Empty-5x5-v0": (16, 4000),
}


def command(*words: str) -> list[str]:
    """A command of Cleanba, as a user types it."""
    return [sys.executable, "-m", "cleanba", *words]


def rows(run: Path) -> list[dict[str, Any]]:
    """What was logged so far, in whole lines."""
    try:
        return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines(True) if line[-1] == "\n"]
    except OSError:
        return []


def last_update(run: Path) -> int:
    """The last update that was logged, read from the end of the growing file; 0 if there is none."""
    try:
        with open(run / "metrics.jsonl", "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - 8192))
            whole = file.read().rpartition(b"\n")[0].rpartition(b"\n")[2]
            return json.loads(whole)["update"] if whole else 0
    except OSError:
        return 0


def size(path: Path) -> int:
    """Bytes of a file, or of all files below a folder."""
    return path.stat().st_size if path.is_file() else sum(p.stat().st_size for p in path.rglob("*") if p.is_file())


class Timed(NamedTuple):
    """Part of a training: from the second row that this start logged to its last."""

    seconds: float
    cpu_seconds: float
    """of the whole process"""
    first: int
    last: int
    """updates"""

    def checkpoints(self, frequency: int) -> int:
        """How many were taken in between: a row is logged before the checkpoint of its update."""
        return (self.last - 1) // frequency - (self.first - 1) // frequency


def train(words: list[str], run: Path) -> Timed:
    """A run to its end."""
    before = len(rows(run))
    process = subprocess.Popen(command(*words), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    assert status == 0, f"{' '.join(words)} ended with status {status}"
    new = rows(run)[before:]
    seconds = new[-1]["seconds"] - new[1]["seconds"]
    return Timed(seconds, usage.ru_utime + usage.ru_stime, new[1]["update"], new[-1]["update"])


def train_until(words: list[str], run: Path, update: int) -> tuple[float, str]:
    """Start a run, or go on with one, and end it by SIGTERM once it has logged that update.

    Returns the seconds from the start to the first new row, and what it printed.
    """
    before, started, first = last_update(run), time.perf_counter(), 0.0
    with tempfile.TemporaryFile("w+") as printed:
        process = subprocess.Popen(command(*words), stdout=printed, stderr=subprocess.STDOUT)
        while True:
            now = last_update(run)
            if now > before and not first:
                first = time.perf_counter() - started
            if now >= update:
                break
            assert process.poll() is None, "the run ended by itself"
            time.sleep(0.02)
        process.send_signal(signal.SIGTERM)
        process.wait()
        printed.seek(0)
        return first, printed.read()


def parts_of(run: Path) -> dict[str, int]:
    """Bytes of the newest checkpoint, and of the newest records of actors: the last checkpoint of a run needs none."""
    newest = max(int(path.name) for path in (run / "checkpoints").glob("*") if path.name.isdecimal())
    stood = max((int(path.stem) for path in run.glob("actors/*/*.standing")), default=0)
    return {
        "state": size(run / "checkpoints" / str(newest)),
        "memory, shared by all checkpoints": size(run / "memory") if (run / "memory").exists() else 0,
        "actors": sum(size(path) for path in run.glob(f"actors/*/{stood}.standing")),
        "recorded actions, shared by all checkpoints": sum(size(path) for path in run.glob("actors/*/*.actions")),
    }


def checkpoints(setting: Setting, rounds: int, folder: Path) -> dict[str, Any]:
    """Wall time, processor time and bytes of a checkpoint."""
    words = setting.words.split()
    base, samples = folder / "base", []
    if setting.begin_at:
        train_until([*words, "--checkpoint-frequency", "0", "--run-dir", str(base)], base, setting.begin_at)
    for i in range(rounds):
        took = {}
        for frequency in ((0, setting.frequency), (setting.frequency, 0))[i % 2]:
            run = folder / f"{i}-{frequency}"
            if base.exists():
                shutil.copytree(base, run)
            took[frequency] = train([*words, "--checkpoint-frequency", str(frequency), "--run-dir", str(run)], run)
            if frequency:
                kept = parts_of(run)
            shutil.rmtree(run)
        number = took[0].checkpoints(setting.frequency)
        extra = [(took[setting.frequency][k] - took[0][k]) / number for k in range(2)]
        samples.append((*extra, took[0].seconds))
    seconds, cpu_seconds, whole = (list(column) for column in zip(*samples, strict=True))
    return {
        "command": setting.words,
        "checkpoints_in_a_run": number,
        "seconds_without": machine.spread(whole),
        "seconds_per_checkpoint": machine.spread(seconds),
        "cpu_seconds_per_checkpoint": machine.spread(cpu_seconds),
        "share_at_one_a_minute": machine.spread(seconds)["median"] / 60,
        "bytes": kept,
    }


def going_on(words: str, places: tuple[int, ...], folder: Path) -> dict[str, Any]:
    """How long a resume takes, by how far into the epoch the run was ended."""
    run, found = folder / "run", {}
    typed = [*words.split(), "--log-frequency", "1", "--checkpoint-frequency", "0", "--run-dir", str(run)]
    start_seconds, _ = train_until(typed, run, places[0])
    trained = rows(run)
    at = trained[-1]["update"]
    per_update = (trained[-1]["seconds"] - trained[1]["seconds"]) / (trained[-1]["update"] - trained[1]["update"])
    per_step = trained[-1]["global_step"] / trained[-1]["update"]
    for place, following in zip(places, (*places[1:], places[-1] + 1), strict=True):
        seconds, printed = train_until(typed, run, max(following, at + 1))
        match = re.search(r"played ([\d,]+) recorded steps in ([\d.]+) s", printed)
        played = int(match[1].replace(",", "")) if match else 0
        found[f"{place}"] = {
            "steps_into_the_epoch": played,
            "seconds_of_training_to_get_there": at * per_update,
            "seconds_to_go_on": seconds,
            "of_which_playing": float(match[2]) if match else 0.0,
        }
        at = rows(run)[-1]["update"]
    return {
        "command": words,
        "steps_per_update": per_step,
        "seconds_until_the_first_update_of_a_new_run": start_seconds,
        "places": found,
    }


def playing(env_id: str, envs: int, steps: int, rounds: int, folder: Path) -> dict[str, Any]:
    """Steps per second of `play_back` and of EnvPool in a plain loop."""
    import envpool

    spec = env_spec(resolve(RECIPES["ppo"], {"env_id": env_id}, "cpu").experiment)
    threads, seeds = os.cpu_count() or 1, range(envs)
    shape = (steps, envs) if spec.action.kind == "choice" else (steps, envs, spec.action.size)
    rng = np.random.default_rng(0)
    if spec.action.kind == "quantities":
        drawn = rng.uniform(-1, 1, shape).astype(np.float32)
    else:
        drawn = rng.integers(0, spec.action.counts[0], shape).astype(np.int32)
    path, dtype = folder / env_id, action_dtype(spec.action)
    path.write_bytes(drawn.astype(dtype).tobytes())

    # The environments' answers, which `play_back` compares with.
    pool = Envs(spec, seeds, threads)
    pool.reset()
    obs, reward, ended = pool.play(drawn)
    pool.close()
    answers, done, length = "", np.zeros(envs, bool), 40
    for now in ended:
        done[:] = np.greater(now, done, out=now)
    for t in range(0, steps, length):
        answers = extend_outcomes_digest(answers, RecordedRollout(None, reward[t : t + length], ended[t : t + length]))
    standing = SavedActor(0, steps, [(path, path.stat().st_size)], answers, digests_of(obs), {}, [])

    def alone() -> float:
        bare = envpool.make(
            env_id, env_type="gymnasium", num_envs=envs, seed=[*seeds], num_threads=min(threads, envs), **spec.options
        )
        taken = spec.action.for_environment(drawn.reshape(-1, *shape[2:]))
        taken = taken.reshape(steps, envs, *taken.shape[1:])
        started = time.perf_counter()
        bare.reset()
        for action in taken:
            bare.step(action)
        seconds = time.perf_counter() - started
        bare.close()
        return steps * envs / seconds

    def played() -> float:
        pool = Envs(spec, seeds, threads)
        started = time.perf_counter()  # it resets them first
        play_back(pool, standing, spec.action, length, env_id, Stop(), lambda steps: None)
        seconds = time.perf_counter() - started
        pool.close()
        return steps * envs / seconds

    speeds: dict[str, list[float]] = {"alone": [], "played": []}
    for i in range(2 * rounds):
        for name in (("alone", "played"), ("played", "alone"))[i % 2]:
            speeds[name].append({"alone": alone, "played": played}[name]())
    ratios = [p / a for p, a in zip(speeds["played"], speeds["alone"], strict=True)]
    return {
        "environments": envs,
        "steps": steps,
        "envpool_alone": machine.spread(speeds["alone"]),
        "play_back": machine.spread(speeds["played"]),
        "play_back_over_envpool": machine.spread(ratios),
    }


def main(args: Args) -> None:
    """Measure, print, write the results after each setting."""
    results = machine.saved("checkpoints_cpu")
    wanted = lambda names: [name for name in names if args.only in ("", name)]
    if not wanted([*SETTINGS, *PLACES, *PLAYED]):
        sys.exit(f"benchmarks/checkpoints.py: --only {args.only}: there is no such setting")
    with tempfile.TemporaryDirectory() as temporary:
        for part in args.parts:
            names: dict[str, Any] = {"checkpoints": SETTINGS, "going_on": PLACES, "playing": PLAYED}[part]
            for i, name in enumerate(wanted(names)):
                folder = Path(temporary) / f"{part}{i}"
                folder.mkdir()
                load = round(os.getloadavg()[0], 1)
                if part == "checkpoints":
                    found = checkpoints(SETTINGS[name], args.rounds, folder)
                    line = (
                        f"{found['seconds_per_checkpoint']['median']:.3f} s per checkpoint, "
                        f"{found['share_at_one_a_minute']:.2%} at one a minute"
                    )
                elif part == "going_on":
                    found = going_on(*PLACES[name], folder)
                    line = ", ".join(
                        f"{p['seconds_to_go_on']:.1f} s after {p['seconds_of_training_to_get_there']:.0f} s of training"
                        for p in found["places"].values()
                    )
                else:
                    found = playing(name, *PLAYED[name], args.rounds, folder)
                    ratio = found["play_back_over_envpool"]
                    line = f"{ratio['median']:.2f} ({ratio['min']:.2f} to {ratio['max']:.2f}) of EnvPool alone"
                results.setdefault("results", {}).setdefault(part, {})[name] = {"load_before": load, **found}
                print(f"{part}: {name}: {line}", flush=True)
                shutil.rmtree(folder)
    path = machine.save("checkpoints_cpu", {"results": results.get("results", {})})
    print(f"written: benchmarks/results/{path.name}")


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
