"""The command `cleanba`: flags, errors and exit codes."""

import errno
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from hashlib import sha256
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import tyro

from cleanba import impala, ppo
from cleanba.config import Experiment, Partition, Placement, Run, differences, from_json, require, resolve, to_json
from cleanba.errors import Failure, Interrupted, UsageError, closest_names


class Recipe(NamedTuple):
    """An algorithm as the command knows it."""

    name: str
    about: str
    experiment: type[Experiment]
    check: Callable[..., None]
    make: Callable[..., Any]


RECIPES = {
    "ppo": Recipe("ppo", "train with proximal policy optimisation", ppo.PPO, ppo.check, ppo.make),
    "impala": Recipe("impala", "train with IMPALA and V-trace", impala.IMPALA, impala.check, impala.make),
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command and leave by its exit code: 0 done, 1 failed, 2 wrong use, 128 + n ended by signal n."""
    argv = list(sys.argv[1:] if arguments is None else arguments)
    try:
        code, stuck = dispatch(argv)
    except UsageError as error:
        print(f"cleanba: {error}", file=sys.stderr)
        code, stuck = 2, False
    except Failure as error:
        print(f"cleanba: {error}", file=sys.stderr)
        code, stuck = 1, False
    except KeyboardInterrupt:
        print("cleanba: interrupted", file=sys.stderr)
        code, stuck = 130, False
    except SystemExit as end:  # tyro after --help or wrong words; rich when nobody reads, as in `cleanba ppo | head`
        code, stuck = int(end.code or 0), False
    except BrokenPipeError:
        os._exit(128 + signal.SIGPIPE)
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        print(f"cleanba: what this prints, or writes, has no room ({error}); make room", file=sys.stderr)
        os._exit(1)
    sys.stdout.flush()
    sys.stderr.flush()
    if stuck or code:
        os._exit(code)  # a thread may sit in a long computation, or the runtime wait for peers that are gone
    sys.exit(code)


class Command(NamedTuple):
    """A word after `cleanba` that is no algorithm.  Where it lives is only imported when it is asked for."""

    about: str
    where: str
    """module and function, which takes the words after the command -> exit code, and whether a thread is stuck"""


COMMANDS = {
    "eval": Command("play complete episodes with a trained agent", "cleanba.evaluate:eval_command"),
    "ls": Command("list runs", "cleanba.listing:ls_command"),
    "resume": Command("go on with a run, on the same placement or another", "cleanba.cli:resume_command"),
    "diff": Command("tell whether two runs trained the same bits", "cleanba.diff:diff_command"),
    "plot": Command("draw learning curves, and Atari scores beside published ones", "cleanba.plot:plot_command"),
    "report": Command("write one HTML page about a run, to be read offline", "cleanba.report:report_command"),
    "push": Command("upload a trained agent to the Hugging Face Hub", "cleanba.hub:push_command"),
    "sweep": Command("train environments x seeds x flags, here or under Slurm", "cleanba.sweep:sweep_command"),
}


def dispatch(argv: list[str]) -> tuple[int, bool]:
    """The command's words -> exit code, and whether a thread is stuck."""
    names = {name: known.about for name, known in (RECIPES | COMMANDS).items()}
    commands = "\n".join(f"  {name:10} {about}" for name, about in names.items())
    usage = f"usage: cleanba COMMAND [FLAGS]\n\ncommands:\n{commands}\n\n`cleanba COMMAND --help` explains its flags."
    if argv and argv[0] in ("--version", "-V"):
        from cleanba import __version__

        print(f"cleanba {__version__}")
        return 0, False
    if not argv or argv[0] in ("-h", "--help"):
        print(usage)
        return (0 if argv else 2), False
    name, *flags = argv
    if name in RECIPES:
        return train_command(RECIPES[name], flags)
    if name in COMMANDS:
        module, function = COMMANDS[name].where.split(":")
        return getattr(import_module(module), function)(flags)
    close = closest_names(name, names)
    raise UsageError(
        f"there is no command {name!r}; " + (f"did you mean {close}?" if close else f"try {', '.join(names)}")
    )


def train_command(recipe: Recipe, argv: list[str], default: Any = None) -> tuple[int, bool]:
    """`cleanba ppo …`: parse, refuse what does not fit, train."""
    config = parse(recipe, argv, default)
    from cleanba.runtime.placement import initialise, make_deterministic

    if config.experiment.deterministic:
        make_deterministic()
    initialise(config.placement)
    if not config.placement.distributed:
        return train(recipe, config)
    from cleanba.runtime.peers import Peers

    with Peers() as peers:
        return train(recipe, config, peers)


def resume_command(argv: list[str]) -> tuple[int, bool]:
    """`cleanba resume RUN_DIR …`: a run's own flags as the defaults, other placement flags on top."""
    if not argv or argv[0].startswith("-"):
        words = "usage: cleanba resume RUN_DIR [FLAGS]\n\nGoes on with a run; flags may place it elsewhere."
        require(bool(argv) and argv[0] in ("-h", "--help"), f"resume needs the directory of a run\n{words}")
        print(words)
        return 0, False
    from cleanba.runtime.rundir import read_json

    run_dir = Path(argv[0])
    saved = read_json(run_dir / "config.json")
    recipe, experiment = read_recipe(run_dir)
    default = config_type(recipe)(
        experiment=experiment,
        placement=from_json(Placement, saved["placement"]),
        run=replace(from_json(Run, saved["run"]), run_dir=run_dir),
    )
    return train_command(recipe, argv[1:], default)


@dataclass(frozen=True)
class Config:
    """All flags of a training command."""

    experiment: Experiment
    placement: Placement = field(default_factory=Placement)
    run: Run = field(default_factory=Run)


def config_type(recipe: Recipe) -> type:
    """`Config` with the experiment of one algorithm."""
    from dataclasses import make_dataclass

    return make_dataclass(
        "Config",
        [
            ("experiment", recipe.experiment, field(default_factory=recipe.experiment)),
            ("placement", Placement, field(default_factory=Placement)),
            ("run", Run, field(default_factory=Run)),
        ],
        frozen=True,
        namespace={"__doc__": f"{recipe.about[0].upper()}{recipe.about[1:]}."},
    )


def parse(recipe: Recipe, argv: list[str], default: Any = None) -> Config:
    """Flags -> configuration.  tyro prints its own message and exits with 2 for flags it cannot read.

    `default` holds the configuration of a run to go on with.

    Raises:
        UsageError: --experiment names no run of this algorithm, or flags change an experiment that was given whole.
    """
    kind = config_type(recipe)
    source = word_after("--experiment", argv)
    if default is None and source is not None:
        earlier_recipe, experiment = read_recipe(Path(source))
        name = earlier_recipe.name
        require(name == recipe.name, f"--experiment {source} is a run of {name}; use `cleanba {name}`")
        default = kind(experiment=experiment)
    parsed: Any = tyro.cli(
        kind,
        args=argv,
        prog=f"cleanba {recipe.name}",
        default=default or kind(),
        config=(tyro.conf.OmitArgPrefixes,),
    )
    if default is not None:
        changed = differences(to_json(default.experiment), to_json(parsed.experiment))
        require(
            not changed,
            f"the whole experiment is taken from {source or default.run.run_dir}, but flags change it "
            f"({'; '.join(changed)}); leave these flags out, or start an experiment of its own",
        )
    run = replace(parsed.run, exp_name=parsed.run.exp_name or recipe.name)
    return Config(parsed.experiment, parsed.placement, run)


def word_after(flag: str, argv: list[str]) -> str | None:
    """The value of a flag, read before tyro reads them all."""
    for i, word in enumerate(argv):
        name, eq, value = word.partition("=")
        if name == flag:
            require(bool(eq) or i + 1 < len(argv), f"{flag} needs a value")
            return value if eq else argv[i + 1]
    return None


def read_recipe(run_dir: Path) -> tuple[Recipe, Experiment]:
    """An earlier run's algorithm and experiment.

    Raises:
        UsageError: there is no such run, or it was written by another version.
    """
    from cleanba.runtime.rundir import read_experiment

    values = read_experiment(run_dir)
    algorithm = values.pop("algorithm")
    require(algorithm in RECIPES, f"{run_dir} is a run of {algorithm!r}; this version knows {', '.join(RECIPES)}")
    recipe = RECIPES[algorithm]
    return recipe, from_json(recipe.experiment, values)


def fit(recipe: Recipe, config: Config, processes: int, platform: str = "") -> tuple[Experiment, Partition]:
    """The experiment with its defaults filled in for devices of that kind, and who owns which environments.

    Raises:
        UsageError: the flags do not fit each other.
    """
    actors, learners = len(config.placement.actor_device_ids), len(config.placement.learner_device_ids)
    e = resolve(config.experiment, actors * processes, learners * processes, processes, platform)
    assert e.num_actors is not None and e.num_shards is not None
    partition = Partition(e.num_envs, e.num_actors, e.num_shards, processes, learners)
    require(
        e.num_updates >= 1,
        f"total_timesteps={e.total_timesteps} is less than one update's {e.batch_size} "
        f"({e.num_envs} environments x {e.num_steps} steps); try --total-timesteps {e.batch_size}",
    )
    require(
        e.num_updates < 2**31,
        f"total_timesteps={e.total_timesteps} makes {e.num_updates} updates, more than can be counted; "
        f"try --total-timesteps {(2**31 - 1) * e.batch_size}",
    )
    run = config.run
    require(run.log_frequency >= 1, f"log_frequency={run.log_frequency} must be at least 1")
    require(run.keep_checkpoints >= 1, f"keep_checkpoints={run.keep_checkpoints} must be at least 1")
    require(run.stall_timeout >= 1, f"stall_timeout={run.stall_timeout} must be at least 1 (seconds); inf means never")
    require(0 <= run.grace_period <= 1e6, f"grace_period={run.grace_period} must lie in [0, 1e6]; 0 means at once")
    recipe.check(e, partition)
    return e, partition


def train(recipe: Recipe, config: Config, peers: Any = None) -> tuple[int, bool]:
    """Everything between flags and exit code.  Raises `UsageError` before anything is compiled."""
    import jax
    import numpy as np

    from cleanba.background import Evaluations
    from cleanba.envs import env_spec
    from cleanba.evaluate import new_agent
    from cleanba.hub import require_login
    from cleanba.runtime.checkpoint import save_model, steps
    from cleanba.runtime.metrics import Display, Status, Writers, write_json
    from cleanba.runtime.placement import find_devices, gather_over_processes
    from cleanba.runtime.rundir import (
        Finished,
        default_name,
        differing_machines,
        lock,
        open_run,
        read_json,
        rewind_logs,
    )
    from cleanba.runtime.train import make_training, run_training

    devices = find_devices(config.placement)
    processes = devices.num_processes
    e, partition = fit(recipe, config, processes, devices.platform)
    require_same_flags({"algorithm": recipe.name, **to_json(e), "log_frequency": config.run.log_frequency})
    spec = env_spec(e)
    algorithm = recipe.make(e, spec, devices.platform)

    now = int(gather_over_processes(np.array([int(time.time())]))[0, 0])  # process 0's clock names the run
    run_dir = config.run.run_dir or Path("runs") / default_name(e, config.run, now)
    status = Status(f"{recipe.name} on {e.env_id}, seed {e.seed}", e.num_updates, e.num_updates * e.batch_size)
    require(
        run_dir != Path() or (run_dir / "config.json").exists() or not any(run_dir.iterdir()),
        f"run_dir={str(config.run.run_dir)!r} is the current directory, which holds other files; name one for the run",
    )
    writers: Writers | None = None
    held: Any = None
    opened: Any = None
    evaluations: Any = None
    refusal: Exception | None = None
    if devices.is_main:
        try:
            evaluations = Evaluations(run_dir, config.run, new_agent(e, spec, algorithm, devices.platform), devices)
            if config.run.upload_model:
                require_login()
            held = lock(run_dir)
            opened = open_run(run_dir, recipe.name, e, config.placement, config.run)
        except (UsageError, Finished) as why:
            refusal = why
    said = 0 if refusal is None else 1 if isinstance(refusal, Finished) else 2
    refused = int(gather_over_processes(np.array([said])).max())
    if isinstance(refusal, Finished):
        print(f"cleanba: {refusal}")
    elif refusal is not None:
        raise refusal
    if refused:
        return (0 if refused == 1 else 2), False
    checkpoints, saved = open_checkpoints(run_dir, algorithm, config.run.keep_checkpoints)
    display = Display(status, enabled=devices.is_main)
    if devices.is_main:
        r = config.run
        history = rewind_logs(run_dir, saved.update if saved else 0)
        writers = Writers(run_dir, r.track, r.wandb_project_name, r.wandb_entity, opened.config, history)
        earlier = opened.earlier
        if earlier is None and r.experiment_from:
            earlier = read_json(Path(r.experiment_from) / "config.json")
        for warning in differing_machines(earlier, opened.config):
            display.say(f"warning: {warning}")
    kinds = jax.local_devices()[0].device_kind
    display.say(
        f"{recipe.name} on {e.env_id}: {e.num_envs} environments, {e.num_actors} actors, {e.num_shards} shards, "
        f"{e.num_updates} updates of {e.batch_size} steps\n"
        f"actors on {kinds} {list(config.placement.actor_device_ids)}, learners on "
        f"{list(config.placement.learner_device_ids)}, {processes} process{'es' if processes > 1 else ''}\n"
        f"run: {run_dir}"
    )

    if saved is not None:
        display.say(f"going on after update {saved.update}, step {saved.counters['global_step']:,}")

    def log(update: int, global_step: int, seconds: float, values: dict[str, Any]) -> None:
        if writers is not None:
            evaluations.log(writers, seconds)
            writers.write(update, global_step, seconds, values)

    training = make_training(
        algorithm, e, partition, devices, spec, config.run.log_frequency, checkpoints=checkpoints, saved=saved,
        stall_timeout=config.run.stall_timeout, grace_period=config.run.grace_period,
        stop_on_nonfinite=config.run.on_nonfinite == "stop", after_update=evaluations and evaluations.after_update,
    )  # fmt: skip
    try:
        if writers is not None:
            evaluations.begin(saved, history)
        outcome = run_training(training, display, status, log, peers)
        if writers is not None and outcome.error is None:
            if config.run.eval_frequency:
                status.phase = "evaluating the last version"
                display.refresh()
            evaluations.finish(outcome.result, outcome.state)
            evaluations.log(writers, outcome.result["seconds"])
            status.phase = "training"
    finally:
        display.close()
        if evaluations is not None:
            evaluations.close()
        if writers is not None:
            writers.close()
        checkpoints.close()

    error = outcome.error
    if devices.is_main:
        if (config.run.save_model or config.run.upload_model) and outcome.result["status"] == "finished":
            save_model(run_dir / "model.msgpack", algorithm.actor_params(outcome.state))
        try:
            write_json(run_dir / "result.json", outcome.result)
        except OSError as why:
            error = error or Failure(f"{run_dir}/result.json cannot be written: {why.strerror}")
        print(closing_words(run_dir, outcome.result))
        if error is not None:
            saved_update = max(steps(run_dir), default=0)
            repeated = outcome.result["update"] - saved_update
            print(
                f"`cleanba resume {run_dir}` goes on after update {saved_update}"
                + (f" and repeats {repeated} update{'s' * (repeated != 1)}" if repeated else "")
            )
        held.close()
    if error is None:
        uploaded = upload(run_dir, config.run) if config.run.upload_model and devices.is_main else True
        return (0 if uploaded else 1), outcome.stuck
    if isinstance(error, Interrupted | Failure | UsageError) and (peers is None or error is not peers.error):
        print(f"cleanba: {error}", file=sys.stderr)
    if isinstance(error, Interrupted):
        return 128 + error.signum, outcome.stuck
    if isinstance(error, UsageError | Failure):
        return (2 if isinstance(error, UsageError) else 1), outcome.stuck
    traceback.print_exception(error)
    print(f"cleanba: the run failed: {type(error).__name__}: {error}", file=sys.stderr)
    return 1, outcome.stuck


def require_same_flags(flags: dict[str, Any]) -> None:
    """All processes must call this: raise `UsageError` unless they were given the same."""
    import numpy as np

    from cleanba.runtime.placement import gather_over_processes

    digest = sha256(json.dumps(flags, sort_keys=True).encode()).digest()
    digests = gather_over_processes(np.frombuffer(digest, np.uint8).astype(np.int32))
    others = [str(i) for i, row in enumerate(digests) if (row != digests[0]).any()]
    require(
        not others,
        f"process {', '.join(others)} has another experiment than process 0; give all processes the same flags, and "
        "equally many --actor-device-ids",
    )


def upload(run_dir: Path, run: Run) -> bool:
    """Upload a finished run, which lies safely on disk; whether that succeeded."""
    from cleanba.hub import push

    try:
        print(f"uploaded: {push(run_dir, run.hf_entity)}")
    except (UsageError, Failure) as why:
        print(f"cleanba: warning: {why}", file=sys.stderr)
        return False
    return True


def open_checkpoints(run_dir: Path, algorithm: Any, keep: int) -> tuple[Any, Any]:
    """The run's checkpoints, and the newest sound one if there is one.  All processes must call this."""
    import jax
    import numpy as np

    from cleanba.runtime.checkpoint import Checkpoints
    from cleanba.runtime.placement import gather_over_processes

    checkpoints = Checkpoints(run_dir, keep)
    like_state = jax.eval_shape(algorithm.init, jax.random.key(0))
    like_params = jax.eval_shape(algorithm.actor_params, like_state)
    saved, warnings = checkpoints.restore(like_state, like_params)
    for warning in warnings:
        print(f"cleanba: {warning}", file=sys.stderr)
    updates = gather_over_processes(np.array([saved.update if saved else 0]))[:, 0]
    require(
        bool((updates == updates[0]).all()),
        f"the processes see different checkpoints in {run_dir} ({', '.join(map(str, updates))}); "
        "give all of them the same --run-dir on a shared file system",
    )
    if jax.process_index() == 0:
        checkpoints.forget_after(saved.update if saved else 0)
    return checkpoints, saved


def closing_words(run_dir: Path, result: dict[str, Any]) -> str:
    """Where the run is and how to look at it."""
    from cleanba.runtime.metrics import duration

    figures = [f"{result['global_step']:,} steps", f"{duration(result['seconds'])} h"]
    if result["sps"]:
        figures.insert(1, f"{result['sps']:,.0f} steps/s")
    if result["episodic_return"] is not None:
        figures.append(f"mean return of the last episodes {result['episodic_return']:.4g}")
    return (
        f"{result['status']}: {', '.join(figures)}\n"
        f"run:     {run_dir}  (result.json, metrics.jsonl, config.json)\n"
        f"curves:  tensorboard --logdir {run_dir}"
    )
