"""Slurm: templates of jobs, sweeps as job arrays that are made from a template, and the states of jobs."""

import os
import shlex
import subprocess
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Annotated, NamedTuple

import tyro

from cleanba.arguments import parse_command
from cleanba.config import Experiment, Placement, require
from cleanba.errors import Exit, Failure, UsageError, closest_names, warn, warn_once
from cleanba.recipes import RECIPES, AnyRecipe, find_recipe, names_recipe
from cleanba.resolution import Config, fit, settle
from cleanba.runs.directory import default_run_dir
from cleanba.runs.remote import find_run
from cleanba.sweeps.manifest import Planned, done, read_manifest, write_manifest
from cleanba.train_flags import parse

LARGEST_ARRAY = 1000  # Slurm's MaxArraySize is 1001 unless it was raised
QUEUED = (
    *("PENDING", "RUNNING", "CONFIGURING", "COMPLETING", "SUSPENDED", "REQUEUED", "REQUEUE_HOLD", "STOPPED"),
    *("SIGNALING", "RESIZING", "STAGE_OUT", "SPECIAL_EXIT", "REQUEUE_FED", "RESV_DEL_HOLD"),
)


TEMPLATES = Path(__file__).parent / "slurm_templates"


FIT_USAGE = """usage: cleanba slurm fit N ppo FLAGS

Prints the numbers of processes, up to N, that this experiment can be divided among, and the run's directory.
The templates ask this with ELASTIC=1."""
CHECK_USAGE = "usage: cleanba slurm check NODES TASKS [--elastic] ppo FLAGS, as `slurm/submit --show` prints them"


@dataclass(frozen=True)
class Templates:
    """Write out the templates for Slurm: `DIR/submit DIR/one-gpu.sh ppo …` submits a run with one of them."""

    directory: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="[DIR]")] = Path("slurm")
    """folder to write to; files that exist already are kept"""


def slurm_command(argv: Sequence[str]) -> Exit:
    """`cleanba slurm [DIR]`, and what the templates call: `cleanba slurm fit N ppo …` and `cleanba slurm check …`."""
    if argv[:1] == ["fit"]:
        return fit_command(argv[1:])
    if argv[:1] == ["check"]:
        return check_command(argv[1:])
    folder = parse_command(Templates, argv, "slurm").directory
    require(not folder.exists() or folder.is_dir(), f"{folder} is a file; name a directory, new or not")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for template in sorted(TEMPLATES.iterdir()):
            target = folder / template.name
            if target.exists():
                same = target.is_file() and target.read_bytes() == template.read_bytes()
                print(f"{target} already exists" + ("" if same else " and differs; remove it first to replace it"))
                continue
            target.write_text(template.read_text())
            target.chmod(0o755 if template.name == "submit" else 0o644)
            print(f"wrote {target}")
    except OSError as error:
        raise Failure(f"the templates cannot be written to {folder} ({error}); name another directory") from None
    print(f"Describe your cluster in {folder}/settings.sh, then run: {folder}/submit {folder}/one-gpu.sh ppo …")
    return Exit()


def fit_command(argv: Sequence[str]) -> Exit:
    """`cleanba slurm fit N ppo …`: prints "1 2 4", and on a second line the run's directory.

    No device is touched: how many processes fit depends on the experiment alone.

    Raises:
        UsageError: the flags are refused, or the experiment does not fit its placement.
    """
    if argv[:1] in (["-h"], ["--help"]):
        print(FIT_USAGE)
        return Exit()
    number, name = [*argv[:2], "", ""][:2]
    require(number.isdecimal() and int(number) > 0, f"fit takes a number of processes, not {number!r}\n{FIT_USAGE}")
    require(names_recipe(name), f"fit takes a training command, one of {', '.join(RECIPES)}, not {name!r}\n{FIT_USAGE}")
    recipe, config = asked(name, argv[2:])
    run_dir = config.run.run_dir or default_run_dir(config.asked, config.run)
    e = settle(recipe, config, "cpu", run_dir).experiment
    numbers = fitting_processes(recipe, e, config.placement, int(number))
    if not numbers:
        fit(recipe, e, config.placement)  # says why
    print(*numbers)
    print(run_dir)
    return Exit()


def asked(algorithm: str, flags: Sequence[str]) -> tuple[AnyRecipe, Config]:
    """The algorithm and the configuration of a training command.

    Raises:
        UsageError: there is no such algorithm, or the flags are refused.
    """
    recipe = find_recipe(algorithm)
    return recipe, parse(recipe, flags, locate=lambda run: find_run(run, model=False))


def fitting_processes(recipe: AnyRecipe, e: Experiment, placement: Placement, most: int) -> list[int]:
    """The numbers of processes, 1 to `most`, that an experiment with this placement in each can be divided among."""
    found = []
    for number in range(1, min(most, e.num_actors, e.num_shards) + 1):  # each has an actor and a shard
        with suppress(UsageError):
            fit(recipe, e, placement, number)
            found.append(number)
    return found


class SlurmJob(NamedTuple):
    """The processes of a job, as `slurm/submit --show` prints them."""

    nodes: int
    tasks: int
    """tasks on each node"""
    elastic: bool
    """whether it may run on fewer nodes"""
    command: Sequence[str]
    """the command of a task, without "cleanba": an algorithm and its flags"""


def read_job(words: Sequence[str]) -> SlurmJob:
    """The job that these words of `slurm/submit --show` describe.

    Raises:
        UsageError: they have another form.
    """
    nodes, tasks = [*words[:2], "", ""][:2]
    elastic = words[2:3] == ["--elastic"]
    command = words[2 + elastic :]
    numbers = nodes.isdecimal() and tasks.isdecimal() and int(nodes) > 0 and int(tasks) > 0
    require(numbers and bool(command), CHECK_USAGE)
    return SlurmJob(int(nodes), int(tasks), elastic, command)


def check_command(argv: Sequence[str]) -> Exit:
    """`cleanba slurm check …`, which `slurm/submit` calls before it submits a job.  No device is touched.

    Raises:
        UsageError: the flags are refused, or the job's processes cannot share the experiment.
    """
    job = read_job(argv)
    name, *flags = job.command
    require(
        name != "resume" or not "".join(flags[:1]).startswith("-"),
        "a job cannot call `cleanba resume`, because the template adds flags of its own; submit the run's own command "
        "with --run-dir and the run's directory, which goes on with it",
    )
    if not names_recipe(name):
        close = closest_names(name, RECIPES, alike=0.65)
        require(not close, f"there is no command {name!r}; did you mean {close}?")
        warn(f"{name} is no training command ({', '.join(RECIPES)}), so its flags are not checked")
        return Exit()
    try:
        recipe, config = asked(name, flags)
        e = settle(recipe, config, "cpu", config.run.run_dir).experiment
    except UsageError as error:
        if not import_failed(error):
            raise
        warn(f"the job cannot be checked here, where something is not installed ({error})")
        return Exit()
    check_job(job, recipe, e, config.placement)
    return Exit()


def import_failed(error: BaseException | None) -> bool:
    """Whether an error was raised because something could not be imported."""
    while error is not None and not isinstance(error, ImportError):
        error = error.__cause__ or error.__context__
    return error is not None


def check_job(job: SlurmJob, recipe: AnyRecipe, e: Experiment, placement: Placement) -> None:
    """Check that a job's processes can share an experiment, and warn of nodes that an elastic job can never use.

    Raises:
        UsageError: they cannot.
    """
    processes = job.nodes * job.tasks
    require(
        placement.distributed or processes == 1,
        f"{processes} tasks without --distributed would each train the same run; add --distributed, or ask for "
        "--nodes=1 --ntasks-per-node=1 before the template",
    )
    numbers = fitting_processes(recipe, e, placement, processes)
    nodes = max((number // job.tasks for number in numbers if number % job.tasks == 0), default=0)
    if processes in numbers:
        return
    if job.elastic and nodes:
        return warn_once(
            f"num_actors={e.num_actors} and num_shards={e.num_shards} can use at most {nodes} of {job.nodes} nodes; "
            f"ask for --nodes={nodes}, or for another experiment choose numbers that {processes} divides"
        )
    try:
        fit(recipe, e, placement, processes)
    except UsageError as error:
        if not numbers:
            raise
        fewer = f"--nodes={nodes} before the template, or NODES={nodes} in settings.sh"
        if not nodes:
            fewer = f"--nodes=1 --ntasks-per-node={numbers[-1]} before the template, or in MORE of settings.sh"
        raise UsageError(f"{error} (for fewer processes under Slurm: {fewer})") from None


def template_job(template: Path, algorithm: str) -> SlurmJob | None:
    """The job that a template makes of an algorithm; None, with a warning, if the template does not say.

    Raises:
        UsageError: there is no such template.
    """
    read_template(template)
    own = submitter(template)
    command = [own] if own else ["bash", str(TEMPLATES / "submit")]
    try:
        return read_job(shlex.split(said([*command, "--show", str(template), algorithm]) or ""))
    except ValueError:
        warn(f"{template} does not show how many processes it starts, so they are not checked before the job starts")
        return None


def read_template(template: Path) -> str:
    """The text of the template that --slurm names.

    Raises:
        UsageError: there is none.
    """
    require(template.exists(), f"--slurm {template} does not exist; `cleanba slurm` writes templates to slurm/")
    require(template.is_file(), f"--slurm {template} is not a file; name a template in it, such as slurm/cpu.sh")
    try:
        return template.read_text()
    except ValueError as error:
        raise UsageError(f"--slurm {template} is not text ({error}); name a template, such as slurm/cpu.sh") from None


def submitter(template: Path) -> str | None:
    """The executable `submit` beside a template; None if there is none."""
    found = template.parent / "submit"
    if not os.access(found, os.X_OK):
        return None
    return str(found) if found.parent != Path() else f"./{found}"  # else it is looked for in PATH


def job_script(template: str, words_file: Path, name: str, size: int, at_a_time: int | None, log: Path) -> str:
    """A template as the script of a job array.  Element i takes line i + 1 of `words_file` as its arguments."""
    require("\n" not in f"{words_file}{log}", f"{words_file.parent} has a line break in its name; choose another --dir")
    options = [
        f"#SBATCH --job-name={shlex.quote(name)}",
        f"#SBATCH --array=0-{size - 1}" + (f"%{at_a_time}" if at_a_time else ""),
        f"#SBATCH --output={shlex.quote(str(log))}",
    ]
    take_words = f'eval "set -- $(sed -n "$((SLURM_ARRAY_TASK_ID + 1))p" {shlex.quote(str(words_file))})"'
    replaced = ("--job-name", "--array", "--output")
    lines = [line for line in template.splitlines() if not line.startswith(tuple(f"#SBATCH {o}" for o in replaced))]
    require(bool(lines) and lines[0].startswith("#!") and "bash" in lines[0], "a template must begin with #!/bin/bash")
    is_code = lambda line: bool(line.strip()) and not line.startswith("#")
    body = next((i for i, line in enumerate(lines) if is_code(line)), len(lines))
    comment = ["# The arguments of this element of the array: those of one run of the sweep."]
    return "\n".join([lines[0], *options, *lines[1:body], *comment, take_words, *lines[body:]]) + "\n"


def from_anywhere(words: Sequence[str]) -> list[str]:
    """A run's arguments with an absolute --run-dir: a template may change the directory."""
    return [os.path.abspath(word) if before == "--run-dir" else word for before, word in pairwise(["", *words])]


def bash_word(word: str) -> str:
    """Quote a word for bash, on one line whatever it holds."""
    if word.isprintable():
        return shlex.quote(word)
    plain = lambda byte: chr(byte) if 32 <= byte < 127 and chr(byte) not in "'\\" else f"\\{byte:03o}"
    return "$'" + "".join(map(plain, os.fsencode(word))) + "'"


def submit(
    runs: Sequence[Planned], folder: Path, template: Path, argv: Sequence[str], at_a_time: int | None, dry_run: bool
) -> Exit:
    """Submit the runs that are neither finished nor in the queue.

    If there is an executable `submit` beside the template, it is called instead of sbatch, with the job's script as its
    argument.  The one that comes with the templates adds the options in slurm/settings.sh.
    """
    template_text = read_template(template)
    earlier = read_manifest(folder)["runs"] if (folder / "sweep.json").exists() else {}
    jobs = {name: run["job"] for name, run in earlier.items() if "job" in run}
    states = {} if dry_run and not jobs else job_states(jobs.values())
    busy = {name for name, job in jobs.items() if states.get(job, "").startswith(QUEUED)}
    over = done(runs, folder)
    to_do = [run for run in runs if run.name not in over | busy]
    print(
        f"{folder}: {len(to_do)} of {len(runs)} runs to submit, {len([r for r in runs if r.name in busy])} in the "
        f"queue, {len(over)} finished"
    )
    sbatch = [submitter(template) or "sbatch"]
    scripts = folder / "slurm"
    numbers = [p.stem.removeprefix("array-") for p in scripts.glob("array-*.sh")]
    first = 1 + max((int(number) for number in numbers if number.isdecimal()), default=0)
    logs = (folder / "logs").absolute()
    submitted: dict[str, str] = {}
    for number, start in enumerate(range(0, len(to_do), LARGEST_ARRAY), first):
        chunk = to_do[start : start + LARGEST_ARRAY]
        script, words = scripts / f"array-{number}.sh", scripts / f"array-{number}.words"
        log = Path(str(logs).replace("%", "%%")) / "%A_%a.log"  # Slurm expands a single %
        text = job_script(template_text, words.absolute(), folder.name or "sweep", len(chunk), at_a_time, log)
        lines = "".join(" ".join(map(bash_word, from_anywhere(run.words))) + "\n" for run in chunk)
        if dry_run:
            print(f"$ {shlex.join([*sbatch, str(script)])}\n\n{script}:\n{text}\n{words}:\n{lines}", end="")
            continue
        scripts.mkdir(parents=True, exist_ok=True)
        logs.mkdir(parents=True, exist_ok=True)
        script.write_text(text)
        words.write_text(lines)
        job = sbatch_job([*sbatch, "--parsable", str(script)])
        submitted |= {run.name: f"{job}_{i}" for i, run in enumerate(chunk)}
        write_manifest(folder, chunk, argv, submitted)  # at once: the next sbatch may fail
        print(f"submitted {len(chunk)} runs as job array {job}; `cleanba sweep status {folder}` shows them")
    return Exit()


def sbatch_job(command: Sequence[str]) -> str:
    """Run sbatch and return the job's number.

    Raises:
        UsageError: there is no Slurm here, or it refuses the job.
    """
    try:
        done = subprocess.run([*command], capture_output=True, text=True)
    except FileNotFoundError:
        raise UsageError("sbatch was not found; run this where Slurm is installed, or add --dry-run") from None
    except OSError as error:
        raise UsageError(
            f"{command[0]} cannot be executed: {error.strerror}; remove it and write it anew with `cleanba slurm`"
        ) from None
    words = done.stdout.split()
    number = words[-1].partition(";")[0] if words else ""
    require(done.returncode == 0 and number.isdigit(), f"sbatch refused: {(done.stderr or done.stdout).strip()}")
    return number


def job_states(jobs: Iterable[str]) -> dict[str, str]:
    """Slurm's state of each job: {"12_3": "PENDING (Resources)", "12_4": "COMPLETED", "9_0": "no longer known"}.

    The queue lists jobs that wait, run, or ended minutes ago.  Older ones are looked up in the accounting database,
    which a cluster may not keep.

    Raises:
        Failure: Slurm does not answer.
    """
    wanted = list(jobs)
    if not wanted:
        return {}
    states: dict[str, str] = {}
    answered = False
    for whose in (["--me"], []):  # all users' jobs only where some are missing: another user may have submitted them
        if states.keys() >= set(wanted):
            break
        queue = said(["squeue", "--noheader", *whose, "--array", "--states=all", "--format=%F_%K|%T|%r"])
        if queue is None:
            continue
        answered = True
        for line in (line for line in queue.splitlines() if line.count("|") >= 2):  # not "CLUSTER: …"
            job, state, reason = line.strip().split("|", 2)
            states[job] = state if reason in ("None", "") or state != "PENDING" else f"{state} ({reason})"
    if not answered:  # if its jobs were taken for gone, they would be submitted twice
        raise Failure("squeue did not answer, so the state of the jobs is unknown; try again where Slurm is installed")
    missing = sorted({job.partition("_")[0] for job in wanted if job not in states})
    if missing:
        listed = said(["sacct", "-n", "-P", "-X", f"--jobs={','.join(missing)}", "--format=JobID,State"]) or ""
        rows = (line.split("|") for line in listed.splitlines() if line.count("|") == 1)
        states = {job: state for job, state in rows} | states
    return {job: states.get(job, "no longer known") for job in wanted}


def said(command: Sequence[str]) -> str | None:
    """The output of a Slurm command; None if it failed or does not exist."""
    try:
        # The SQUEUE_ variables may hide jobs.
        plain = {name: value for name, value in os.environ.items() if not name.startswith("SQUEUE_")}
        done = subprocess.run([*command], capture_output=True, text=True, timeout=60, env=plain)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None
