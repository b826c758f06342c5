"""`cleanba sweep`: environments x seeds x flags, run here or submitted to Slurm, and their status."""

import itertools
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, fields
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import jax

from cleanba.arguments import parse_command
from cleanba.config import Experiment, Placement, Run, require
from cleanba.environments.atari_scores import table
from cleanba.errors import Exit, Failure, NotFinite, UsageError, closest_names, printable, warn
from cleanba.files import Json
from cleanba.help import HELP, written_flag
from cleanba.interrupts import leave_closed_terminal
from cleanba.recipes import RECIPES, AnyRecipe, find_recipe, names_recipe
from cleanba.resolution import Config, continue_experiment, fit, resolve_in
from cleanba.runs.directory import check_name, lock
from cleanba.runs.listing import is_locked
from cleanba.runs.log import is_finished, read_result, seconds_left, tail, together
from cleanba.runtime.hardware import has_cuda
from cleanba.runtime.metrics import duration
from cleanba.runtime.process_setup import memory_share, refuse_64_bits
from cleanba.runtime.supervision import ending_signals, handle_signals
from cleanba.specs import EnvSpec
from cleanba.sweeps.manifest import Planned, done, nothing_is_left, read_manifest, write_manifest
from cleanba.sweeps.slurm import SlurmJob, check_job, job_states, submit, template_job
from cleanba.train_flags import parse, remedy_for

if TYPE_CHECKING:  # rich takes a moment to import
    from rich.table import Table

USAGE = """usage: cleanba sweep --env-ids ENV ... [FLAGS] -- ppo [FLAGS OF EVERY RUN]
       cleanba sweep status DIR

Train every combination of environments, seeds and --set values.  The same command again skips finished runs and
resumes the rest.

examples:
  cleanba sweep --env-ids Breakout-v5 Pong-v5 --num-seeds 3 --set learning_rate=1e-4,2.5e-4 -- ppo --network nature
  cleanba sweep --env-ids @atari5 --dir sweeps/five --slurm slurm/one-gpu.sh --dry-run -- impala
  cleanba sweep status sweeps/five
"""
GRACE_SECONDS = 30.0  # beyond --grace-period, for ending runs to write their last files
POLL_SECONDS = 0.2
LOOK_SECONDS = 1.0  # between looks at the live table, and at runs that other processes train
LINE_SECONDS = 60.0  # between lines about each run, if there is no terminal
OF_SEVERAL_PROCESSES = ("distributed", "coordinator_address", "num_processes", "process_id")
GIVEN_BY_SWEEP = ("env_id", "seed", "run_dir", "experiment")
WRONG_USE = 2  # the exit code of a run whose flags are refused: trying again would not help


@dataclass(frozen=True)
class Flags:
    """Train every combination of environments, seeds and --set values; each run's own flags follow after --."""

    env_ids: tuple[str, ...]
    """environments of any kind, or sets of them: @atari57, @atari5 or @atari3 (Aitchison et al. 2023)"""
    num_seeds: int = 3
    """seeds of every combination: --first-seed and those after it"""
    first_seed: int = 1
    """first of these seeds; do not report results on the seeds that you chose settings on"""
    set: tuple[str, ...] = ()
    """flags with several values, such as learning_rate=1e-4,2.5e-4; every combination of them is one variant"""
    dir: Path | None = None
    """folder of the sweep (default: sweeps/<algorithm>-<hash of the command>, the same for the same command)"""
    workers: int | None = None
    """runs at a time (None: as many as the GPUs here allow, one without GPUs; with --slurm as many as Slurm allows)"""
    retries: int = 1
    """times that a failed run is tried again, from its last checkpoint, unless a number was not finite (not with
    --slurm)"""
    slurm: Path | None = None
    """template to submit job arrays with, such as slurm/one-gpu.sh"""
    dry_run: bool = False
    """only print what would run, or be submitted"""


def sweep_command(argv: Sequence[str]) -> Exit:
    """`cleanba sweep …`; its exit code is 1 if a run failed."""
    if not argv:
        print(USAGE)
        return Exit(2)
    if argv[0] == "status":
        return status_command(argv[1:])
    named = next((word for word in argv if word in RECIPES), None)
    require(
        "--" in argv or named is None or not {"-h", "--help"}.isdisjoint(argv),
        f"a sweep's own flags come first, then what it runs: write -- before {named}",
    )
    cut = argv.index("--") if "--" in argv else len(argv)
    own, rest = argv[:cut], list(argv[cut + 1 :])
    flags = parse_command(Flags, own, "sweep", USAGE)
    require(
        bool(rest) and names_recipe(rest[0]),
        f"a sweep needs to know what to run: end the command with -- {' or -- '.join(RECIPES)}, and its flags",
    )
    require(flags.workers is None or flags.workers >= 1, f"workers={flags.workers} must be at least 1; set --workers")
    require(flags.retries >= 0, f"retries={flags.retries} must not be negative; 0 means never")
    refuse_64_bits()  # as each run would
    jax.config.update("jax_platforms", "cpu")  # checking makes JAX environments; the memory of GPUs is for the runs
    recipe, common = find_recipe(rest[0]), rest[1:]
    require("--show-config" not in common, "a sweep has several configurations; leave out --show-config")
    if not set(HELP).isdisjoint(common):
        parse(recipe, common)  # prints the help, and ends the command
    folder = flags.dir or Path("sweeps") / default_folder(flags, rest)
    job = template_job(flags.slurm, rest[0]) if flags.slurm is not None else None
    runs = plan(recipe, common, flags, folder, job)
    if flags.slurm is not None:
        with nullcontext() if flags.dry_run else lock(folder, "--dir"):
            return submit(runs, folder, flags.slurm, argv, flags.workers, flags.dry_run)
    if flags.dry_run:
        for run in runs:
            print(shlex.join(["cleanba", *run.words]))
        return Exit()
    return run_here(recipe, runs, folder, argv, flags)


def default_folder(flags: Flags, rest: Sequence[str]) -> str:
    """The name of a sweep's folder, from a hash of its command.  More seeds go to the same folder."""
    parts = json.dumps([flags.env_ids, flags.set, list(rest)])
    return f"{safe(rest[0])}-{sha256(parts.encode()).hexdigest()[:6]}"


# ---------------------------------------------------------------- what to run

ATARI5 = ("BattleZone-v5", "DoubleDunk-v5", "NameThisGame-v5", "Phoenix-v5", "Qbert-v5")
ATARI3 = ("BattleZone-v5", "NameThisGame-v5", "Phoenix-v5")


def expand_sets(names: Sequence[str]) -> list[str]:
    """Replace the @sets among the names of environments by their environments, each once.

    Raises:
        UsageError: there is no such set.
    """
    sets = {"@atari57": tuple(table()), "@atari5": ATARI5, "@atari3": ATARI3}
    envs: list[str] = []
    for name in names:
        require(name in sets or not name.startswith("@"), f"there is no set {name}; the sets are {', '.join(sets)}")
        envs += sets.get(name, (name,))
    return list(dict.fromkeys(envs))


def variants(recipe: AnyRecipe, settings: Sequence[str]) -> list[tuple[str, list[str]]]:
    """Every combination of --set's values: ["gamma=0.9,1"] -> [("gamma=0.9", ["--gamma", "0.9"]), ("gamma=1", …)].

    Raises:
        UsageError: a setting does not have the form name=value,value, or there is no such flag.
    """
    field_types = {f.name: f.type for cls in (recipe.experiment, Placement, Run) for f in fields(cls)}
    field_types.pop("experiment_from")
    choices = []
    for setting in settings:
        written, eq, values = setting.partition("=")
        name = written.lstrip("-").replace("-", "_")
        require(bool(eq) and bool(values), f"--set {setting!r} must be name=value,value; as learning_rate=1e-4,2.5e-4")
        require(
            name not in GIVEN_BY_SWEEP,
            f"--set {name}: each run of a sweep has its own environment, seed and directory; use --env-ids, "
            "--num-seeds, --first-seed or --dir",
        )
        require(name != "preset", f"--set {setting}: one preset serves all runs; give --preset after --")
        close = closest_names(name, field_types)
        remedy = remedy_for(written_flag(name), field_types) or (close and f"did you mean {close}?")
        require(name in field_types, f"--set {name}: {recipe.name} has no such flag" + (remedy and f"; {remedy}"))
        require(all(map(str.strip, values.split(","))), f"--set {setting!r} has an empty value; take the comma out")
        choices.append([(name, value.strip()) for value in values.split(",")])
        seen: dict[str | tuple[float, ...], str] = {}
        for _, value in choices[-1]:
            first = seen.setdefault(meaning(value), value)
            require(first == value, f"--set {setting!r} names {value} twice, as {first}; take one of them out")
    names = [pairs[0][0] for pairs in choices]
    require(
        len(set(names)) == len(names),
        f"--set names {', '.join(names)}: give each flag once, as name=value,value",
    )
    combinations = []
    for pairs in itertools.product(*choices):
        words: list[str] = []
        for name, value in pairs:
            flag = name.replace("_", "-")
            if field_types[name] is bool:
                require(value.lower() in ("true", "false"), f"--set {name}={value} must be true or false")
                words.append(f"--{flag}" if value.lower() == "true" else f"--no-{flag}")
            else:
                words += [f"--{flag}", *value.split()]
        combinations.append(("+".join(f"{name}={value}" for name, value in pairs) or recipe.name, words))
    return combinations


def meaning(value: str) -> str | tuple[float, ...]:
    """A value of --set as its numbers, so that 1e-3 and 0.001 are equal; as it is if it is not made of numbers."""
    try:
        return tuple(map(float, value.split()))
    except ValueError:
        return value


def plan(
    recipe: AnyRecipe, common: list[str], flags: Flags, folder: Path, job: SlurmJob | None = None
) -> list[Planned]:
    """All runs of a sweep, each checked.  `job` is the Slurm job that each will be.

    Raises:
        UsageError: a run could not start; the message says which and why.
    """
    require(bool(flags.env_ids), "--env-ids names no environment; give one or more, such as --env-ids CartPole-v1")
    require(not (folder / "config.json").exists(), f"--dir {folder} is a run of its own; choose another folder")
    require(1 <= flags.num_seeds <= 10_000, f"num_seeds={flags.num_seeds} must lie in [1, 10000]; set --num-seeds")
    require(not folder.exists() or folder.is_dir(), f"--dir {folder} is a file; name a folder")
    check_name(folder, "--dir")
    for word in common:
        name = word.partition("=")[0].lstrip("-").replace("-", "_")
        require(
            job is not None or not word.startswith("--") or name not in OF_SEVERAL_PROCESSES,
            f"{word} is given after --, but here a sweep gives each run one process; leave it out, or add --slurm",
        )
        require(
            not word.startswith("--") or name not in GIVEN_BY_SWEEP,
            f"{word} is given after --, but each run of a sweep has its own environment, seed and directory; use "
            "--env-ids, --num-seeds, --first-seed or --dir",
        )
    seeds = range(flags.first_seed, flags.first_seed + flags.num_seeds)
    require(
        seeds[0] >= 0 and seeds[-1] < 2**31,
        f"first_seed={flags.first_seed}: seeds must lie in [0, 2^31), including the last of {flags.num_seeds}; set "
        "--first-seed",
    )
    run = parse(recipe, common).run  # an error in all runs is reported without the name of one
    runs = []
    for env_id, (variant, words) in itertools.product(expand_sets(flags.env_ids), variants(recipe, flags.set)):
        if run.upload_model and flags.set:  # a repository is named after it
            words = [*words, "--exp-name", safe(f"{run.exp_name}-{variant}")]
        spec: EnvSpec | None = None  # the environment is only made for the first seed
        for seed in seeds:
            name = safe(f"{env_id}__{variant}__s{seed}")
            require(len(os.fsencode(name)) <= 250, f"{name} is too long for a folder's name; use fewer --set")
            run_dir = folder / name
            all_words = [*common, "--env-id", env_id, *words, "--seed", str(seed), "--run-dir", str(run_dir)]
            try:
                e, spec = check(recipe, all_words, run_dir, spec, job)
            except UsageError as error:
                raise UsageError(f"{env_id}, {variant}: {error}") from None
            runs.append(Planned(name, env_id, variant, seed, (recipe.name, *all_words), e.num_updates))
    twice = [name for name, group in itertools.groupby(sorted(r.name for r in runs)) if len(list(group)) > 1]
    require(not twice, f"two runs would share the folder {', '.join(twice)}; write --set's values differently")
    return runs


def safe(name: str) -> str:
    """A name of a single folder that needs no quotes in a shell."""
    return "".join(c if c.isalnum() or c in "._=+-" else "-" for c in name)


def check(
    recipe: AnyRecipe, words: list[str], run_dir: Path, spec: EnvSpec | None, job: SlurmJob | None = None
) -> tuple[Experiment, EnvSpec]:
    """Check the experiment of these flags -> the experiment, and its environment's specification, made if not given.

    `job` is the Slurm job that the run will be.
    """
    config = parse(recipe, [*(job.command[1:] if job else ()), *words])
    resolved = continue_experiment(recipe, resolve_in(recipe, config, "cpu", run_dir, spec), run_dir, "--dir")
    fit(recipe, resolved.experiment, config.placement)
    if job is not None:
        check_job(job, recipe, resolved.experiment, config.placement)
    if spec is None:
        recipe.make(resolved.experiment, resolved.spec, "cpu")
    return resolved.experiment, resolved.spec


# ---------------------------------------------------------------- running it here


ELSEWHERE = "running elsewhere"  # the state of a run that another process trains


@dataclass
class SweepRun:
    """A run of the sweep and its state."""

    planned: Planned
    run_dir: Path
    log: Path
    state: str = "waiting"
    attempts: int = 0
    code: int | None = None
    worker: int | None = None
    process: subprocess.Popen[bytes] | None = None
    started: float = 0.0
    seconds: float = 0.0


def visible_gpus() -> list[str]:
    """The GPUs that a run of ours may use, as CUDA_VISIBLE_DEVICES names them."""
    if os.environ.get("JAX_PLATFORMS", "").startswith("cpu") or not has_cuda():
        return []
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    if given is not None:
        return [name for name in given.split(",") if name and name != "-1"]
    try:
        listed = subprocess.run(["nvidia-smi", "--list-gpus"], capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return []
    count = sum(line.startswith("GPU ") for line in listed.stdout.splitlines()) if listed.returncode == 0 else 0
    return [str(i) for i in range(count)]


def share_devices(gpus: Sequence[str], per_run: int, workers: int | None) -> list[dict[str, str]]:
    """Environment variables for each worker, so that workers use different GPUs as long as there are enough.

    Raises:
        UsageError: one run needs more GPUs than there are.
    """
    if not gpus:
        return [{} for _ in range(workers or 1)]
    require(
        per_run <= len(gpus),
        f"each run names {per_run} devices, but there are {len(gpus)} GPUs here; use fewer device ids",
    )
    groups = [",".join(gpus[i : i + per_run]) for i in range(0, len(gpus) - per_run + 1, per_run)]
    workers = workers or len(groups)
    shared_by = -(-workers // len(groups))
    share = memory_share(shared_by)
    return [{"CUDA_VISIBLE_DEVICES": groups[worker % len(groups)], **share} for worker in range(workers)]


def start(run: SweepRun, worker: int, environment: dict[str, str]) -> None:
    """Start a run on a worker.  If another process is training it already, the worker waits for that process."""
    run.log.parent.mkdir(parents=True, exist_ok=True)
    run.worker, run.state, run.started = worker, "running", time.monotonic()
    if is_locked(run.run_dir):
        run.state = ELSEWHERE
        return
    run.attempts += 1
    with open(run.log, "a") as log:
        log.write(f"$ {shlex.join(['cleanba', *run.planned.words])}\n")
        log.flush()
        run.process = subprocess.Popen(
            [sys.executable, "-m", "cleanba.sweeps.child", str(os.getpid()), *run.planned.words],
            env={**os.environ, **environment},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # the sweep passes Ctrl-C on, so that a run receives it once
        )


def end_all(runs: Sequence[SweepRun], heard: Sequence[int], seconds: float) -> None:
    """Ask all runs to end.  Kill those that have not ended after so many seconds, or at a second signal."""
    running = [(run, run.process) for run in runs if run.process is not None]
    for _, process in running:
        process.send_signal(heard[0] if heard else signal.SIGTERM)
    deadline = time.monotonic() + seconds
    while any(process.poll() is None for _, process in running):
        if time.monotonic() > deadline or len(heard) > 1:
            for _, process in running:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
        time.sleep(0.05)
    for run, process in running:
        code = process.wait()
        failed = 0 < code <= 128  # neither asked to end (128 + the signal) nor killed (negative)
        run.state = "finished" if nothing_is_left(run.planned, run.run_dir) else "failed" if failed else "interrupted"
        run.code, run.process = code, None


def devices_of(config: Config) -> int:
    """How many devices a run must see for those that its flags name."""
    placed = config.placement
    return 1 + max(*placed.actor_device_ids, *placed.learner_device_ids, config.run.eval_device_id or 0)


def run_here(recipe: AnyRecipe, planned: Sequence[Planned], folder: Path, argv: Sequence[str], flags: Flags) -> Exit:
    """Run the unfinished runs, several at a time."""
    configs = [parse(recipe, list(one.words[1:])) for one in planned]
    per_run = max(map(devices_of, configs))
    grace = max(c.run.grace_period for c in configs) + GRACE_SECONDS
    environments = share_devices(visible_gpus(), per_run, flags.workers)
    held = lock(folder, "--dir")  # two sweeps in one folder would start each run twice
    write_manifest(folder, planned, argv, {})
    runs = [SweepRun(one, folder / one.name, folder / "logs" / f"{one.name}.log") for one in planned]
    over = done(planned, folder)
    for run in runs:
        if run.planned.name in over:
            run.state = "finished"
    free = list(range(len(environments)))
    waiting = [run for run in runs if run.state == "waiting"]
    next_look = 0.0
    heard: list[int] = []  # the signals that asked this process to end
    last = 0.0

    def hear(signum: int) -> None:
        """Note a signal.  A closing terminal may send SIGHUP twice, and `timeout` signals a group and its leader."""
        nonlocal last
        if signum == signal.SIGHUP:
            leave_closed_terminal()
        if not heard or (signum != signal.SIGHUP and time.monotonic() - last > 0.2):
            heard.append(signum)
            last = time.monotonic()

    with handle_signals(hear, ending_signals()), Board(folder, runs, len(environments)) as board:
        if over:
            board.say(f"{len(over)} of {len(runs)} runs are finished already")
        try:
            while (waiting or len(free) < len(environments)) and not heard:
                while waiting and free:
                    run = waiting.pop(0)
                    start(run, worker := free.pop(0), environments[worker])
                    board.say(f"{run.planned.name}: {begun(run)}")
                for run in runs:
                    if run.process is not None and (code := run.process.poll()) is not None:
                        assert run.worker is not None
                        free.append(run.worker)
                        settle(run, code, flags.retries, waiting, board)
                if time.monotonic() >= next_look:
                    next_look = time.monotonic() + LOOK_SECONDS
                    for run in runs:
                        if run.state == ELSEWHERE and not is_locked(run.run_dir):
                            assert run.worker is not None
                            free.append(run.worker)
                            take_back(run, waiting, board)
                board.refresh()
                time.sleep(POLL_SECONDS)
        finally:
            end_all(runs, heard, grace)
            board.refresh()
    held.close()
    return report(folder, runs, heard)


def begun(run: SweepRun) -> str:
    """What a worker did with a run that it took, in words."""
    if run.state == ELSEWHERE:
        return "another process is training it; waiting for that to end"
    return "started" if run.attempts == 1 else "started again"


def take_back(run: SweepRun, waiting: list[SweepRun], board: "Board") -> None:
    """Handle the end of another process that trained a run: the run is finished, or is resumed here."""
    run.worker = None
    if nothing_is_left(run.planned, run.run_dir):
        run.state = "finished"
        board.say(f"{run.planned.name}: finished by another process")
    else:
        run.state = "waiting"
        waiting.insert(0, run)


def settle(run: SweepRun, code: int, retries: int, waiting: list[SweepRun], board: "Board") -> None:
    """Handle the end of a run's process: the run is finished, tried again, or failed."""
    run.process, run.worker, run.code = None, None, code
    run.seconds += time.monotonic() - run.started
    if code == 0 and is_finished(run.run_dir):
        run.state = "finished"
        board.say(f"{run.planned.name}: finished in {run.seconds:.0f} s")
    elif code == WRONG_USE and is_locked(run.run_dir):  # another process began it at the same moment
        run.state, run.attempts = "waiting", run.attempts - 1
        waiting.insert(0, run)
    elif code != WRONG_USE and run.attempts <= retries and not ended_in_vain(run.run_dir):
        run.state = "waiting"
        waiting.append(run)
        board.say(f"{run.planned.name}: ended with exit code {code}; retry {run.attempts} of {retries} follows")
    else:
        run.state = "failed"
        board.say(f"{run.planned.name}: failed with exit code {code}; see {run.log}")


def ended_in_vain(run_dir: Path) -> bool:
    """Whether a run failed because of a number that is not finite, which it would reach again."""
    return str(read_result(run_dir).get("error", "")).startswith(f"{NotFinite.__name__}:")


def report(folder: Path, runs: Sequence[SweepRun], heard: Sequence[int]) -> Exit:
    """Say how the sweep ended."""
    count = lambda state: sum(run.state == state for run in runs)
    failed = [run for run in runs if run.state == "failed"]
    left = len(runs) - count("finished") - len(failed)
    words = [f"{count('finished')} of {len(runs)} runs finished"]
    words += [f"{len(failed)} failed"] * bool(failed) + [f"{left} left to do"] * bool(left)
    print(f"{folder}: {', '.join(words)}")
    for run in failed:
        tries = f" after {run.attempts} tries" if run.attempts > 1 else ""
        print(f"failed: {run.planned.name}, exit code {run.code}{tries}: {last_words(run.log)}\n        {run.log}")
    if heard:
        name = signal.Signals(heard[0]).name
        print(f"cleanba: sweep interrupted by {name}; the same command resumes it", file=sys.stderr)
        return Exit(128 + heard[0])
    return Exit(1 if failed else 0)


def last_words(log: Path) -> str:
    """The last line of a log that is not empty."""
    try:
        lines = [line.strip() for line in log.read_text(errors="replace").splitlines()]
    except OSError:
        return "no log"
    return next((line for line in reversed(lines) if line), "an empty log")


# ---------------------------------------------------------------- showing it

STYLES = {"running": "cyan", ELSEWHERE: "cyan", "failed": "bold red", "finished": "green", "interrupted": "yellow"}


class Figures(NamedTuple):
    """The progress of a run, as words for a table; empty if unknown."""

    update: str
    """as 30/300"""
    speed: str
    """environment steps per second"""
    mean_return: str
    eta: str
    """remaining time in hours, minutes and seconds; empty for a run that has ended"""

    def in_words(self) -> str:
        """As one line."""
        words = [f"update {self.update}"] + [f"{self.speed} steps/s"] * bool(self.speed)
        words += [f"return {self.mean_return}"] * bool(self.mean_return) + [f"ETA {self.eta}"] * bool(self.eta)
        return ", ".join(words)


def progress(run_dir: Path, updates: int) -> Figures:
    """The progress of a run of `updates` updates, from its logs."""
    result, rows = read_result(run_dir), tail(run_dir)
    row = result or together(rows)
    number = lambda *names: next((row[n] for n in names if row.get(n) is not None), None)
    update, sps = number("update"), number("sps", "charts/SPS_recent", "charts/SPS")
    value = number("episodic_return", "charts/episodic_return")
    left = None if result else seconds_left(rows, updates)
    return Figures(
        f"{update or 0}/{updates}",
        "" if sps is None else f"{sps:,.0f}",
        "" if value is None else f"{value:.4g}",
        "" if left is None else duration(left),
    )


class Board:
    """A live table of all runs in a terminal; without one, a line for every change, and one a minute for each run."""

    def __init__(self, folder: Path, runs: Sequence[SweepRun], workers: int):
        from rich.console import Console
        from rich.live import Live

        self._folder, self._runs, self._workers = folder, runs, workers
        self._console = Console(file=sys.stdout, markup=False, emoji=False)
        drawn = self._console.is_interactive and sys.stdout.isatty()  # not in a file, nor on a dumb terminal
        self._live = Live(console=self._console, auto_refresh=False) if drawn else None
        self._next = time.monotonic() + (0.0 if self._live is not None else LINE_SECONDS)

    def __enter__(self) -> "Board":
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    def say(self, text: str) -> None:
        """Print a line, unless the live table shows it."""
        if self._live is None:
            self._console.print(text, highlight=False, soft_wrap=True)

    def refresh(self) -> None:
        """Show the current state, if it is time to."""
        if time.monotonic() < self._next:
            return
        if self._live is not None:
            self._next = time.monotonic() + LOOK_SECONDS
            self._live.update(self._table(), refresh=True)
        else:
            self._next = time.monotonic() + LINE_SECONDS
            for run in self._runs:
                if run.state in ("running", ELSEWHERE):
                    self.say(f"{run.planned.name}: {progress(run.run_dir, run.planned.updates).in_words()}")

    def _table(self) -> "Table":
        from rich.table import Table

        order = ("running", ELSEWHERE, "interrupted", "failed", "waiting", "finished")
        runs = sorted(self._runs, key=lambda run: order.index(run.state))
        room = max(3, self._console.height - 6)
        counts = ", ".join(f"{n} {s}" for s in order if (n := sum(run.state == s for run in runs)))
        title = f"{self._folder}: {counts}; {self._workers} at a time"
        table = Table("run", "state", "update", "steps/s", "return", "ETA", "tries", title=title, title_justify="left")
        for run in runs[:room]:
            figures = ("", "", "", "") if run.state == "waiting" else progress(run.run_dir, run.planned.updates)
            table.add_row(run.planned.name, run.state, *figures, str(run.attempts or ""), style=STYLES.get(run.state))
        if len(runs) > room:
            table.caption = f"and {len(runs) - room} more"
        return table


def is_shorter(result: Json, run: Json) -> bool:
    """Whether a run finished with fewer updates than its sweep has asked for since.  `run` is the sweep's entry."""
    has_target = any(word.replace("_", "-").startswith("--target-return") for word in run["words"])
    return not has_target and result.get("update", run["updates"]) < run["updates"]


STATES = ("finished", "running", "interrupted", "failed", "unfinished", "not begun")


def status_command(argv: Sequence[str]) -> Exit:
    """`cleanba sweep status DIR`: every run's state, from Slurm and from its folder."""
    usage = "usage: cleanba sweep status DIR"
    if argv and argv[0] in HELP:
        print(f"{usage}\n\nShow each run of a sweep: its state, how far it is, its return, and why it failed.")
        return Exit()
    require(len(argv) == 1 and not argv[0].startswith("-"), usage)
    from rich.console import Console
    from rich.table import Table

    folder = Path(argv[0])
    runs = read_manifest(folder)["runs"]
    try:
        states = job_states([run["job"] for run in runs.values() if "job" in run])
    except Failure as why:
        warn(str(why))
        states = {}
    table = Table("run", "state", "update", "steps/s", "return", "ETA", *(("job", "Slurm") if states else ()))
    found, errors = [], []
    for name, run in runs.items():
        run_dir = folder / name
        result = read_result(run_dir)
        begun = "unfinished" if (run_dir / "config.json").exists() else "not begun"
        state = "running" if is_locked(run_dir) else result.get("status") or begun
        if state == "finished" and is_shorter(result, run):
            state = "unfinished"
        found.append(state)
        if state == "failed" and "error" in result:
            errors.append(f"{name}: {result['error']}")
        job = run.get("job", "")
        slurm = (job, states.get(job, "")) if states else ()
        figures = progress(run_dir, run["updates"])
        figures = figures if state == "running" else figures._replace(eta="")
        table.add_row(name, state, *figures, *slurm, style=STYLES.get(state))
    console = Console(file=sys.stdout, markup=False, emoji=False)
    if not console.is_terminal:
        console.width = 200  # so that names are not cut in a pipe
    console.print(table)
    print(", ".join(f"{n} {state}" for state in STATES if (n := found.count(state))))
    for error in errors:
        print(printable(error))
    return Exit()
