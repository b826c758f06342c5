"""Starts runs for tests: through the library, through the command in this process, and as processes of their own."""

import contextlib
import io
import json
import math
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import compiled  # noqa: F401  before JAX
import jax
import numpy as np
from ports import free_address

from cleanba import cli
from cleanba.algorithm import Algorithm
from cleanba.algorithms import ppo
from cleanba.config import Experiment, Partition, Placement
from cleanba.environments.backends import env_spec
from cleanba.launch import prepare
from cleanba.limits import usable_cores
from cleanba.recipes import RECIPES
from cleanba.runtime.devices import find_devices
from cleanba.runtime.metrics import Display, Status
from cleanba.runtime.process_setup import make_deterministic
from cleanba.runtime.train import run_training
from cleanba.runtime.training import Training, make_training
from cleanba.specs import EnvSpec
from cleanba.train_flags import parse

ROOT = Path(__file__).parents[1]

make_deterministic()  # as the command does; here before JAX has looked for devices

# A factor for time limits: with other tests or programs on the same cores, everything takes this much longer.
CROWD = max(int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")), math.ceil(os.getloadavg()[0] / usable_cores()))

# The flags of an experiment that takes a moment.
TINY = (
    *("--env-id", "Catch-v0", "--num-envs", "8", "--num-actors", "2", "--num-shards", "1", "--num-steps", "8"),
    *("--hiddens", "8", "--num-minibatches", "2", "--update-epochs", "1", "--total-timesteps", "320"),
    *("--log-frequency", "1", "--collector", "stepped"),  # whose programs are compiled once for all tests
)


class Record(NamedTuple):
    """A run that has ended."""

    result: dict[str, Any]  # as result.json
    rows: list[dict[str, Any]]  # as the lines of metrics.jsonl
    error: BaseException | None
    state: Any

    def column(self, name: str) -> list[Any]:
        return [row[name] for row in self.rows]


def build(
    experiment: Experiment,
    actors: Sequence[int] = (0,),
    learners: Sequence[int] = (0,),
    *,
    spec: EnvSpec | None = None,
    make_envs: Callable | None = None,
    wrap: Callable[[Algorithm], Algorithm] = lambda algorithm: algorithm,
    log_frequency: int = 1,
    recipe: Any = ppo,
) -> Training:
    """A run on these devices of this process, ready to start.  `spec` and `make_envs` replace EnvPool's."""
    devices = find_devices(Placement(tuple(actors), tuple(learners)))
    processes = devices.num_processes
    e = experiment
    partition = Partition(e.num_envs, e.num_actors, e.num_shards, processes, len(learners))
    recipe.check(e, partition)
    spec = spec or env_spec(e)
    algorithm = wrap(recipe.make(e, spec, devices.platform))
    return make_training(algorithm, e, partition, devices, spec, log_frequency, make_envs)


def train(*args: Any, **kwargs: Any) -> Record:
    """Run what `build` makes of these arguments, to its end."""
    return run(build(*args, **kwargs))


def run(training: Training) -> Record:
    """Run it to its end."""
    rows: list[dict[str, Any]] = []

    def log(update: int, global_step: int, seconds: float, values: dict[str, Any]) -> None:
        rows.append({"update": update, "global_step": global_step, **values})

    status = Status("test", 1)
    outcome = run_training(training, Display(status, enabled=False), status, log)
    return Record(outcome.result, rows, outcome.error, outcome.state)


def finished(*args: Any, **kwargs: Any) -> Record:
    """As `train`, for runs that must not fail."""
    return without_error(train(*args, **kwargs))


def without_error(record: Record) -> Record:
    """The record of a run that must not fail.

    Raises:
        BaseException: what the run failed with.
    """
    if record.error is not None:
        raise record.error
    return record


def digests(*args: Any, **kwargs: Any) -> dict[int, str]:
    """By update, at every checkpoint and at its end: the digests of a run's parameters, and of its state and memory."""
    return digests_of(finished(*args, **kwargs))


def typed_digests(name: str, words: Sequence[str]) -> dict[int, str]:
    """As `digests`, for `cleanba NAME WORDS` on devices of this process, which JAX has initialised already."""
    recipe = RECIPES[name]
    return digests_of(without_error(run(prepare(recipe, parse(recipe, words)).training)))


def digests_of(record: Record) -> dict[int, str]:
    """The digests that a run has left, by update."""
    both = lambda row: f"{row['params_digest']} {row['learner_digest']}"
    found = {row["update"]: both(row) for row in record.rows if "params_digest" in row}
    assert found[record.result["update"]] == both(record.result)
    return found


class Ended(NamedTuple):
    """A command that has ended."""

    code: int | None
    out: str
    err: str


@dataclass
class _Exit(BaseException):
    code: int


def command(*words: str | Path) -> Ended:
    """`cleanba WORDS`, in this process: what it printed, and the exit code that it would have had."""
    out, err = io.StringIO(), io.StringIO()

    def leave(code: int) -> None:
        raise _Exit(code)

    with (
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        mock.patch("os._exit", leave),
        mock.patch.dict(os.environ),
    ):
        try:
            cli.main([str(word) for word in words])
            code = 0
        except SystemExit as end:
            code = end.code or 0
        except _Exit as end:
            code = end.code
    return Ended(code, out.getvalue(), err.getvalue())


def python(*words: str | Path, **env: str) -> subprocess.Popen:
    """`python WORDS` as a process of its own, with its output on pipes."""
    return subprocess.Popen(
        [sys.executable, *map(str, words)],
        env={**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}", **env},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process: subprocess.Popen, seconds: float = 900) -> Ended:
    """Wait for a process, and say how it ended; if it is still running then, it is killed, and its code is None."""
    try:
        out, err = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        out, err = process.communicate()
        return Ended(None, out, f"{err}\nstill running after {seconds} s")
    return Ended(process.returncode, out, err)


def read_result(run_dir: Path) -> dict[str, Any]:
    return json.loads((run_dir / "result.json").read_text())


def in_pairs(words: Sequence[object]) -> list[list[str]]:
    """The command lines of two processes of one run."""
    address = free_address()
    where = ["--distributed", "--coordinator-address", address, "--num-processes", "2", "--process-id"]
    return [[*map(str, words), *where, str(i)] for i in range(2)]


def read_rows(run_dir: Path) -> list[dict[str, Any]]:
    whole = (
        (run_dir / "metrics.jsonl").read_text().rpartition("\n")[0]
    )  # of a run that is going on, the last may be cut
    return [json.loads(line) for line in whole.splitlines()]


def same_arrays(a: Any, b: Any) -> bool:
    """Whether two trees of arrays are equal, element by element."""
    return all(jax.tree.leaves(jax.tree.map(lambda x, y: np.array_equal(np.asarray(x), np.asarray(y)), a, b)))
