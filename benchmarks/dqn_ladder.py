"""How much faster does each feature of the runtime make DQN, and how fast is it compared with a PyTorch loop?

    python benchmarks/dqn_ladder.py     # a quarter of an hour on two cores; the last rung needs PyTorch

All rungs play Pong from Atari's pictures with the Nature CNN, and learn from eight samples for each environment step,
as CleanRL's `dqn_atari` does (batches of 32, one for four steps).  They take turns, round by round, each in a process
of its own.  Figures are environment steps per second once learning has begun, medians over the rounds.  Beside them are
steps per second of processor time, which other work on the machine hardly changes, and which ignore idle cores.

    one at a time      one environment, four steps, one gradient step, and so on
    larger batches     sixteen steps, then one gradient step of four times the batch
    concurrent         playing beside training, with a policy one version behind
    compiled           eight environments scanned on the device, and all gradient steps of a rollout in one call
    compiled, 32       the same with batches of 32: CleanRL's settings
    PyTorch            CleanRL's settings as a plain loop of our own: step, store, and learn at every fourth step
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import machine
import tyro

COMMON = (
    "--env-id Pong-v5 --buffer-size 20000 --learning-starts 1024 --env-epoch 0 --checkpoint-frequency 0 --num-shards 1"
)
ALONE = "--num-envs 1 --num-actors 1 --collector stepped"
MANY = "--num-envs 8 --num-actors 2 --num-steps 16 --collector scanned --log-frequency 1"
LARGE = "--batch-size 128 --train-frequency 16"
PYTORCH = "PyTorch"
RUNGS = {
    "one at a time": f"{ALONE} --num-steps 4 --no-concurrency --log-frequency 32",
    "larger batches": f"{ALONE} --num-steps 16 {LARGE} --no-concurrency --log-frequency 8",
    "concurrent": f"{ALONE} --num-steps 16 {LARGE} --log-frequency 8",
    "compiled": f"{MANY} {LARGE}",
    "compiled, 32": MANY,
    PYTORCH: "",
}


@dataclass(frozen=True)
class Args:
    """Flags of the benchmark."""

    rounds: int = 3
    """turns of each rung"""
    seconds: float = 20.0
    """of each turn, once learning has begun"""
    only_pytorch: bool = False
    """one turn of the PyTorch loop, in this process: prints its steps per second"""


class Speed(NamedTuple):
    """Environment steps by wall time and by processor time of all threads."""

    per_second: float
    per_cpu_second: float


def cpu_seconds(pid: int) -> float:
    """Processor time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def turn(words: str, seconds: float) -> Speed:
    """`cleanba dqn`, from the second log point after learning began."""
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        command = [sys.executable, "-m", "cleanba", "dqn", *COMMON.split(), *words.split(), "--run-dir", str(run)]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        seen: list[tuple[float, int, float]] = []  # seconds, steps and processor time at log points
        try:
            while True:
                time.sleep(0.1)
                if process.poll() is not None:
                    assert process.stderr is not None
                    sys.exit(f"{' '.join(command)} ended by itself: {process.stderr.read()}")
                log = run / "metrics.jsonl"
                lines = log.read_text().rpartition("\n")[0].splitlines()[-1:] if log.exists() else []
                for row in map(json.loads, lines):
                    if row.get("losses/td_loss", 0) > 0 and (not seen or row["global_step"] > seen[-1][1]):
                        seen.append((row["seconds"], row["global_step"], cpu_seconds(process.pid)))
                if len(seen) > 2 and seen[-1][0] - seen[1][0] >= seconds:
                    wall, steps, cpu = (last - first for first, last in zip(seen[1], seen[-1], strict=True))
                    return Speed(steps / wall, steps / cpu)
        finally:
            process.send_signal(signal.SIGKILL)  # nothing of it is kept
            process.wait()


def pytorch_loop(seconds: float) -> Speed:
    """CleanRL's settings in PyTorch, once learning has begun."""
    import envpool
    import numpy as np
    import torch
    from torch import nn

    stored, batch, gamma = 20_000, 32, 0.99
    env = envpool.make_gymnasium("Pong-v5", num_envs=1, full_action_space=True)

    def network() -> Any:
        layer = lambda *args: (nn.Conv2d(*args), nn.ReLU())
        convolutions = (*layer(4, 32, 8, 4), *layer(32, 64, 4, 2), *layer(64, 64, 3, 1))
        return nn.Sequential(*convolutions, nn.Flatten(), nn.Linear(3136, 512), nn.ReLU(), nn.Linear(512, 18))

    online, target = network(), network()
    target.load_state_dict(online.state_dict())
    optimiser = torch.optim.Adam(online.parameters(), lr=1e-4)
    obs_of, next_of = (np.zeros((stored, 4, 84, 84), np.uint8) for _ in range(2))
    action_of, reward_of, done_of = (
        np.zeros(stored, np.int64),
        np.zeros(stored, np.float32),
        np.zeros(stored, np.float32),
    )
    rng = np.random.default_rng(1)
    picture = lambda x: torch.from_numpy(x).float() / 255.0
    obs, _ = env.reset()
    began, cpu, counted, step = 0.0, 0.0, 0, 0
    while True:
        if rng.random() < 0.01:
            action = rng.integers(18, size=1)
        else:
            with torch.no_grad():
                action = online(picture(obs)).argmax(1).numpy()
        after, reward, terminated, truncated, _ = env.step(action.astype(np.int32))
        i = step % stored
        obs_of[i], next_of[i] = obs[0], after[0]
        action_of[i], reward_of[i], done_of[i] = action[0], np.sign(reward[0]), terminated[0]
        obs = after if not (terminated | truncated)[0] else env.step(action.astype(np.int32))[0]  # which resets
        step += 1
        if step > 1024 and step % 4 == 0:
            at = rng.integers(min(step, stored), size=batch)
            with torch.no_grad():
                best = target(picture(next_of[at])).max(1).values
                y = torch.from_numpy(reward_of[at]) + gamma * best * (1 - torch.from_numpy(done_of[at]))
            value = online(picture(obs_of[at])).gather(1, torch.from_numpy(action_of[at])[:, None])[:, 0]
            loss = nn.functional.mse_loss(value, y)
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            if step % 1000 == 0:
                target.load_state_dict(online.state_dict())
            if not began and step > 1280:
                began, cpu, counted = time.perf_counter(), time.process_time(), step
            if began and time.perf_counter() - began > seconds:
                steps = step - counted
                return Speed(steps / (time.perf_counter() - began), steps / (time.process_time() - cpu))


def pytorch_turn(seconds: float) -> Speed:
    """`pytorch_loop` in a process of its own."""
    command = [sys.executable, __file__, "--only-pytorch", "--seconds", str(seconds)]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return Speed(*map(float, printed.split()))


def main(args: Args) -> None:
    """Measure, print a table, write the results."""
    if args.only_pytorch:
        print(*pytorch_loop(args.seconds))
        return
    try:
        import torch

        rungs, version = RUNGS, torch.__version__
    except ImportError:
        rungs, version = {name: words for name, words in RUNGS.items() if name != PYTORCH}, None
        print("PyTorch is not installed; its rung is left out")
    found: dict[str, list[Speed]] = {name: [] for name in rungs}
    loads = []
    for number in range(args.rounds):
        for name, words in rungs.items():
            speed = pytorch_turn(args.seconds) if name == PYTORCH else turn(words, args.seconds)
            found[name].append(speed)
            loads.append(os.getloadavg()[0])
            wall, cpu = speed
            print(f"round {number + 1}: {name:15} {wall:7.1f} steps/s, {cpu:7.1f} per CPU second", flush=True)
    values: dict[str, Any] = {"common": COMMON, "rungs": RUNGS, "pytorch": version, "load_average": loads}
    for field in Speed._fields:
        speeds = {name: machine.spread([getattr(s, field) for s in samples]) for name, samples in found.items()}
        values[f"steps_{field}"] = speeds
        first = speeds["one at a time"]["median"]
        of_pytorch = " over PyTorch |" if version else ""
        print(f"\n| rung | steps {field.replace('_', ' ')} | over the first |{of_pytorch}")
        print(f"|---|---:|---:|{'---:|' * (version is not None)}")
        for name, speed in speeds.items():
            beside = f" {speed['median'] / speeds[PYTORCH]['median']:.2f} |" if version else ""
            figures = f"{speed['median']:.0f} ({speed['min']:.0f} to {speed['max']:.0f})"
            print(f"| {name} | {figures} | {speed['median'] / first:.2f} |{beside}")
    path = machine.save("dqn_ladder_cpu", values)
    print(f"written: benchmarks/results/{path.name}")


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
