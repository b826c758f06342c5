"""Tries every environment of EnvPool: makes it, plays it, and trains on one environment of each kind of spaces.

python benchmarks/coverage.py                    # all of them: half an hour or more on two cores
python benchmarks/coverage.py --only Jumanji     # those whose names contain this
python benchmarks/coverage.py --notes found.jsonl      # the same command after an interruption continues
"""

import contextlib
import json
import os
import queue
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro

ROOT = Path(__file__).parents[1]


@dataclass(frozen=True)
class Args:
    """Flags of the benchmark."""

    only: str = ""
    """part of the names of the environments that are tried"""
    seconds: float = 120.0
    """time limit for making and playing one environment"""
    training_seconds: float = 900.0
    """time limit for one update, compilation included"""
    notes: Path | None = None
    """a file with the results so far: environments in it are not tried again"""
    worker: bool = False
    """used by the benchmark itself: read names, and report for each how it went"""


# ------------------------------------------------------------------------------------- in a process of its own


def look(env_id: str) -> dict[str, Any]:
    """Make an environment as a run would and play a few steps: what its spaces are like, or why it is refused."""
    import jax
    import numpy as np

    from cleanba.config import Experiment
    from cleanba.environments.envpool import Envs, env_spec
    from cleanba.errors import UsageError

    try:
        spec = env_spec(Experiment(env_id=env_id))
        envs = Envs(spec, [0, 1], num_threads=1)
    except UsageError as error:
        return {"refused": str(error)}
    rng, action = np.random.default_rng(0), spec.action
    try:
        seen = [envs.reset()]
        for _ in range(4):
            if action.kind == "quantities":
                drawn = rng.normal(size=(2, action.size)).astype(np.float32)
            else:
                drawn = rng.integers(action.counts, size=(2, action.size)).astype(np.int32)
            step = envs.step(drawn[:, 0] if action.kind == "choice" else drawn)
            seen.append(step.obs)
            assert step.reward.shape == step.terminated.shape == (2,), step
        for obs in seen:
            jax.tree.map(lambda o, x: assert_fits(o, x), spec.obs, obs)
    finally:
        envs.close()
    parts = sorted({(o.kind, o.dtype) for o in jax.tree.leaves(spec.obs)})
    masks = [o.shape == action.counts for o in jax.tree.leaves(spec.obs) if o.kind == "mask"]
    return {"spaces": json.dumps([parts, action.kind, action.dtype, masks, spec.scannable])}


def assert_fits(spec: Any, x: Any) -> None:
    assert (x.shape[1:], str(x.dtype)) == (spec.shape, spec.dtype), (spec, x.shape, x.dtype)


def work() -> None:
    """Names on standard input, JSON on standard output."""
    from cleanba.runtime.process_setup import make_deterministic

    make_deterministic()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # so that what emulators print is not taken for an answer
    for line in sys.stdin:
        env_id = line.strip()
        try:
            answer = look(env_id)
        except Exception as error:
            answer = {"failed": f"{type(error).__name__}: {error}"[:500]}
        print(json.dumps({"env_id": env_id, **answer}), file=answers, flush=True)


# ------------------------------------------------------------------------------------------------- in this one


class Worker:
    """A process that looks at environments, in a folder where emulators may leave their files."""

    def __init__(self, folder: str):
        self.process = subprocess.Popen(
            [sys.executable, __file__, "--worker"], cwd=folder, env=surroundings(), text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        self.answers: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        for line in self.process.stdout or ():
            self.answers.put(line)
        self.answers.put("")  # the end

    def ask(self, env_id: str, seconds: float) -> dict[str, Any]:
        """The result of one environment.  If the process is not `alive` afterwards, it has ended."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            print(env_id, file=self.process.stdin, flush=True)
        try:
            line = self.answers.get(timeout=seconds)
        except queue.Empty:
            self.end()
            return {"env_id": env_id, "failed": f"took longer than {seconds:.0f} s"}
        if line:
            return json.loads(line)
        return {"env_id": env_id, "failed": f"its process ended with code {self.process.wait()}"}

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def end(self) -> None:
        self.process.kill()
        self.process.wait()


def surroundings() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}


def train(env_id: str, seconds: float, folder: str) -> str:
    """A run of two updates by the command, with all defaults but its size: "" or how it failed."""
    words = "--num-envs 2 --num-actors 1 --num-shards 1 --num-steps 4 --num-minibatches 2 --update-epochs 1"
    words += " --total-timesteps 16 --env-epoch 0 --log-frequency 1"
    run_dir = Path(folder) / f"run-{abs(hash(env_id))}"
    command = [sys.executable, "-m", "cleanba", "ppo", "--env-id", env_id, *words.split(), "--run-dir", str(run_dir)]
    try:
        done = subprocess.run(
            command, cwd=folder, env=surroundings(), timeout=seconds, capture_output=True, text=True, check=False
        )
    except subprocess.TimeoutExpired:
        return f"training took longer than {seconds:.0f} s"
    if done.returncode == 0:
        return ""
    return f"training ended with code {done.returncode}: {' '.join(done.stderr.split())[-400:]}"


REASONS = {
    "players": "several players or agents",
    "Qt 5": "the library Qt 5 is not installed",
    "does not exist": "needs a file of the user's own",
    "Sudoku database": "a file that EnvPool's wheel does not have",
}


def reason(refusal: str) -> str:
    """A refusal in a few words, for the table."""
    return next((words for part, words in REASONS.items() if part in refusal), refusal)


def family(env_id: str) -> str:
    from cleanba.environments.envpool import family

    return family(env_id).removeprefix("envpool.")


def table(found: list[dict[str, Any]], families: dict[str, str]) -> str:
    """Markdown: by family, how many environments there are, how many train, and why the others do not."""
    by_family: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in found:
        by_family[families[row["env_id"]]].append(row)
    lines = ["| family | environments | train | the others |", "|---|---|---|---|"]
    for name, rows in sorted(by_family.items()):
        others = Counter(reason(row["refused"]) for row in rows if "refused" in row)
        others |= Counter(row["failed"] for row in rows if "failed" in row)
        why = "; ".join(f"{n}: {words}" for words, n in others.most_common())
        lines.append(f"| {name} | {len(rows)} | {sum('spaces' in row for row in rows)} | {why} |")
    total = sum("spaces" in row for row in found)
    return "\n".join([*lines, f"| **all** | **{len(found)}** | **{total}** | |"])


class Notes:
    """What was found so far, a line of JSON each, in a file if there is one."""

    def __init__(self, path: Path | None):
        self.path = path
        lines = path.read_text().splitlines() if path is not None and path.exists() else []
        self.found: dict[str, dict[str, Any]] = {row["about"]: row for row in map(json.loads, lines)}

    def __contains__(self, about: str) -> bool:
        return about in self.found

    def add(self, about: str, row: dict[str, Any]) -> None:
        self.found[about] = {"about": about, **row}
        if self.path is not None:
            with self.path.open("a") as file:
                print(json.dumps(self.found[about]), file=file)


def main(args: Args) -> None:
    if args.worker:
        work()
        return
    import machine

    from cleanba.environments.envpool import _known

    ids = sorted(name for name in _known() if args.only in name)
    families = {name: family(name) for name in ids}
    ids.sort(key=lambda name: families[name])  # a family's code is loaded once
    notes = Notes(args.notes)
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        worker = Worker(folder)
        for i, env_id in enumerate(ids):
            if env_id in notes:
                continue
            if not worker.alive:
                worker = Worker(folder)
            row = worker.ask(env_id, args.seconds)
            notes.add(env_id, row)
            if i % 50 == 0 or "failed" in row:
                print(f"{i + 1}/{len(ids)} {time.monotonic() - started:.0f} s: {row}", flush=True)
        worker.end()

        found = [notes.found[env_id] for env_id in ids]
        first: dict[str, str] = {}
        for row in found:
            first.setdefault(row.get("spaces", ""), row["env_id"])
        first.pop("", None)
        wrong: dict[str, str] = {}
        for i, (spaces, env_id) in enumerate(first.items()):
            about = f"training of {env_id}"
            if about not in notes:
                notes.add(about, {"wrong": train(env_id, args.training_seconds, folder)})
            wrong[spaces] = notes.found[about]["wrong"]
            print(f"training {i + 1}/{len(first)} on {env_id}: {wrong[spaces] or 'fine'}", flush=True)
    for row in found:
        spaces = row.get("spaces", "")
        if wrong.get(spaces):
            del row["spaces"]
            row["failed"] = f"like {first[spaces]}: {wrong[spaces]}"
    without_paths = lambda words: re.sub(r"/\S*/site-packages/", "", words)
    refused = {row["env_id"]: without_paths(row["refused"]) for row in found if "refused" in row}
    values = {
        "environments": len(found),
        "train": sum("spaces" in row for row in found),
        "refused": refused,
        "failed": {row["env_id"]: row["failed"] for row in found if "failed" in row},
        "updates": {env_id: json.loads(spaces) for spaces, env_id in first.items()},
    }
    text = table(found, families)
    print(text)
    if not args.only:
        path = machine.save("coverage", values)
        path.with_suffix(".md").write_text(text + "\n")


if __name__ == "__main__":
    main(tyro.cli(Args))
