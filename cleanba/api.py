"""The Python interface: `cleanba.train(cleanba.ppo("CartPole-v1"))`.  Its names are the package's (`import cleanba`).

As on the command line, what is trained and where it runs are given separately: the keywords of `ppo` and the others are
an experiment's flags, those of `train` are the flags of placement and run.
"""

import inspect
import multiprocessing
import os
import signal
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import (
    Annotated,
    Any,
    NamedTuple,
    NoReturn,
    ParamSpec,
    Protocol,
    TypedDict,
    Unpack,
    get_args,
    get_origin,
    overload,
)

import gymnasium
import jax
import numpy as np

from cleanba import config
from cleanba.agents.agent import Agent, load
from cleanba.agents.evaluate import Evaluation, evaluate
from cleanba.agents.portable import Export
from cleanba.algorithms.dqn import DQN
from cleanba.algorithms.impala import IMPALA
from cleanba.algorithms.ppo import PPO
from cleanba.algorithms.pqn import PQN
from cleanba.algorithms.r2d2 import R2D2
from cleanba.algorithms.sac import SAC
from cleanba.algorithms.td3 import TD3
from cleanba.config import (
    Experiment,
    Field,
    Group,
    Placement,
    as_typed,
    fields_of,
    offered_fields,
    read_config,
    read_experiment,
    require,
)
from cleanba.environments.common import parse_options
from cleanba.environments.gymnasium import register, register_as
from cleanba.errors import Failure, Interrupted, UsageError, closest_names, warn
from cleanba.files import Json, expanded, read_json
from cleanba.launch import SAME_CALL, Ended, launch
from cleanba.recipes import RECIPES, AnyRecipe, find_recipe
from cleanba.resolution import as_given, configure, fit, named_settings, read_recipe, settle
from cleanba.runs.curves import column, read_rows
from cleanba.runs.directory import is_gone
from cleanba.runtime.devices import default_platform
from cleanba.runtime.process_setup import prepared
from cleanba.train_flags import remedy_for

__all__ = [
    "Agent",
    "Curve",
    "Evaluation",
    "Export",
    "Failure",
    "Interrupted",
    "Run",
    "Spec",
    "UsageError",
    "dqn",
    "evaluate",
    "impala",
    "load",
    "ppo",
    "pqn",
    "r2d2",
    "sac",
    "specify",
    "td3",
    "train",
]

# ------------------------------------------------------------------------------------------------------ what is trained


@dataclass(frozen=True)
class Spec:
    """What to train: an algorithm and its given flags.  `ppo` and the other algorithms' functions make one."""

    algorithm: str
    """its name: "ppo", "impala", "dqn", "pqn", "r2d2", "sac" or "td3"; or "my_ppo:RECIPE", one of your own"""
    flags: Mapping[str, Any] = field(default_factory=dict)
    """the flags that were given; presets and defaults decide the rest"""
    whole: Path | None = None
    """the run whose whole experiment this is, if `Run.spec` made it"""
    maker: Callable[..., gymnasium.Env[Any, Any]] | None = None
    """the class or function that was given instead of an environment's name"""

    def __repr__(self) -> str:
        if self.whole is not None:
            return f"<{self.algorithm}, the whole experiment of {self.whole}>"
        return f"{self.algorithm}({', '.join(f'{name}={value!r}' for name, value in self.flags.items())})"

    def resolve(self) -> Experiment:
        """The whole experiment as it would be trained here, with presets and defaults filled in; nothing is trained.

        Raises:
            UsageError: a value is not allowed, values do not fit together, there is no such environment, or the
                algorithm does not take its actions.
        """
        recipe = self.recipe()
        self.register()
        asked = configure(recipe, self.flags, Placement(), config.Run(), self.whole)
        with prepared(asked.asked):  # JAX reads its flags at the first use of a device, which is here
            platform = default_platform()
            resolved = settle(recipe, asked, platform, None)
            fit(recipe, resolved.experiment, asked.placement)
            recipe.make(resolved.experiment, resolved.spec, platform)  # refuses actions that it does not take
        return resolved.experiment

    def recipe(self, trust_remote_code: bool = False) -> AnyRecipe:
        """The algorithm.

        Raises:
            UsageError: there is none of this name, or a run from elsewhere names one that would have to be imported.
        """
        if self.whole is not None:
            return read_recipe(self.whole, trust_remote_code)[0]
        return find_recipe(self.algorithm)

    def register(self) -> None:
        """In this process, register the given class or function under the name that it had when this was made."""
        if self.maker is not None:
            env_id = self.flags["env_id"]
            if register(self.maker) != env_id:
                if multiprocessing.parent_process() is None:
                    warn(
                        f"the function that makes {env_id}, or what it reads, has changed since the specification was "
                        "made; what it makes now is trained under that name"
                    )
                register_as(self.maker, env_id)


P = ParamSpec("P")


class Specify(Protocol[P]):
    """A function that makes a `Spec` for one algorithm.  Its keywords are the fields of the experiment."""

    @overload
    def __call__(self, *args: P.args, **flags: P.kwargs) -> Spec: ...
    @overload
    def __call__(self, env_id: Callable[..., gymnasium.Env[Any, Any]], /, **flags: Any) -> Spec: ...
    # What Python takes besides the types of the fields.  Checkers know no keywords that are added to a `ParamSpec`.
    @overload
    def __call__(self, env_id: str = ..., /, *, preset: str | os.PathLike[str], **flags: Any) -> Spec: ...
    @overload
    def __call__(self, env_id: str = ..., /, *, env_options: Mapping[str, Any], **flags: Any) -> Spec: ...
    @overload
    def __call__(self, env_id: str = ..., /, *, hiddens: Sequence[int], **flags: Any) -> Spec: ...
    @overload
    def __call__(self, env_id: str = ..., /, *, init_from: os.PathLike[str], **flags: Any) -> Spec: ...


def _specify(algorithm: str, form: Callable[P, Experiment]) -> Specify[P]:
    """Make the function of that name, with a signature and documentation from the experiment's fields."""
    recipe = find_recipe(algorithm)
    known = offered_fields(recipe.experiment)

    def specify(*given: str | Callable[..., gymnasium.Env[Any, Any]], **flags: Any) -> Spec:
        given = (*given, flags.pop("env_id")) if "env_id" in flags else given
        require(len(given) < 2, f"{algorithm} was given {len(given)} environments; name one")
        env_id: Any = given[0] if given else None
        maker = None
        if env_id is not None and not isinstance(env_id, str):
            maker = env_id
            require(callable(maker), f"env_id={maker!r} must be a name, or a class or function that makes environments")
            env_id = register(maker)
        if unknown := [name for name in flags if name not in (*known, "preset")]:
            _refuse(algorithm, unknown[0], known)
        values = _plain(flags)
        if env_id is None and "env_id" not in named_settings(recipe, values.get("preset")):
            env_id = recipe.experiment.env_id
        return Spec(
            algorithm, as_given(recipe, ({"env_id": env_id} if env_id is not None else {}) | values), maker=maker
        )

    specify.__name__ = specify.__qualname__ = algorithm
    parameters = [
        parameter.replace(kind=parameter.POSITIONAL_OR_KEYWORD) if parameter.name == "env_id" else parameter
        for parameter in _keywords(recipe.experiment, known)
    ]
    preset = inspect.Parameter("preset", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=str | None)
    specify.__signature__ = inspect.Signature([*parameters, preset], return_annotation=Spec)  # type: ignore[attr-defined]
    lines = [f"    {name}: {f.about}" for name, f in known.items()]
    lines.append(
        "    preset: name of settings to take as if they were written here; what it leaves open comes from the preset "
        f"for the environment: {', '.join(recipe.named_presets())}; or a run's directory"
    )
    specify.__doc__ = "\n".join(
        [
            f"A specification to {recipe.about}: what `cleanba {algorithm}` trains with the flags of the same names.",
            "",
            "Values that are left out, or None, come from the preset for the environment, then from the environment",
            "itself, such as its network and time limit, or else are the defaults shown here.  Numbers of actors,",
            "shards and minibatches are lowered to what fits.  `Spec.resolve` returns all values.",
            "Instead of a name, `env_id` may be a class or function that makes a Gymnasium environment.",
            "",
            "Args:",
            *lines,
            "",
            "Raises:",
            "    UsageError: there is no such keyword, or its value is of another type.  `train` checks the ranges.",
        ]
    )
    found: Any = specify  # whose signature no checker can follow
    return found


def _keywords(group: type[Group], known: Mapping[str, Field]) -> list[inspect.Parameter]:
    """These fields of a group of flags as keywords of a function, with their defaults."""
    defaults = {f.name: f.default for f in fields(group)}
    return [
        inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            default=defaults[name],
            annotation=get_args(f.annotation)[0] if get_origin(f.annotation) is Annotated else f.annotation,
        )
        for name, f in known.items()
    ]


def specify(algorithm: str, /, *env_id: str | Callable[..., gymnasium.Env[Any, Any]], **flags: Any) -> Spec:
    """A specification for an algorithm by its name, such as one of your own: `specify("my_ppo:RECIPE", "CartPole-v1")`.

    Args:
        algorithm: "ppo" or another of Cleanba's, or module:NAME of a `cleanba.recipes.Recipe`
            (docs/guides/own-loss.md).
        env_id: the name of an environment, or a class or function that makes one.
        **flags: fields of the algorithm's experiment, as for `ppo`.

    Raises:
        UsageError: there is no such algorithm or keyword, or a value has the wrong type.
    """
    require(
        isinstance(algorithm, str),
        "specify takes the name of an algorithm, such as 'ppo' or 'my_module:RECIPE', not an object of the type "
        f"{type(algorithm).__name__}",
    )
    made: Any = _specify(algorithm, find_recipe(algorithm).experiment)
    return made(*env_id, **flags)


def _plain(flags: Mapping[str, Any]) -> dict[str, Any]:
    """Convert keywords to the values of flags: NumPy's numbers to Python's, runs to directories, options to text."""
    plain = {name: _without_numpy(value) for name, value in flags.items()}
    for name in ("init_from", "preset", "run_dir"):
        place = plain.get(name)
        if isinstance(place, Path | Run):
            plain[name] = str(place.run_dir if isinstance(place, Run) else place)
    options = flags.get("env_options")
    if isinstance(options, Mapping):
        plain["env_options"] = tuple(_option(name, value) for name, value in options.items())
    return plain


def _without_numpy(value: Any) -> Any:
    """A value with Python's numbers and lists in place of NumPy's and JAX's, and a list in place of a range."""
    if isinstance(value, np.ndarray | np.generic | jax.Array):
        return value.tolist()
    if isinstance(value, list | range):
        return [_without_numpy(x) for x in value]
    return tuple(map(_without_numpy, value)) if isinstance(value, tuple) else value


def _option(name: str, value: Any) -> str:
    """Write an option of an environment as name=value, in a form that is read back as the same value.

    Raises:
        UsageError: the value has no such form.
    """
    plain = _without_numpy(value)
    for text in (str(plain), repr(plain)):
        with suppress(KeyError, UsageError, ValueError, SyntaxError, TypeError):
            read = parse_options([f"{name}={text}"])[name]
            if type(read) is type(plain) and read == plain:
                return f"{name}={text}"
    raise UsageError(
        f"env_options[{name!r}]={value!r} cannot be written as name=value; register an environment that has it, or "
        "give a number, a word or a list"
    )


def _refuse(what: str, name: str, known: Collection[str]) -> NoReturn:
    """Raise `UsageError` for an unknown keyword, and say what to do instead."""
    here = {*fields_of(Placement), *fields_of(config.Run)} - {"experiment_from"}
    remedy = remedy_for(config.flag(name), known).replace("--", "").replace("-", "_")
    if name == "verbose":
        to = "" if what == "train" else " in train(…)"
        raise UsageError(f"{what} has no keyword verbose; set progress=False{to} to show no progress")
    if name == "tensorboard_log" and what != "train":
        raise UsageError(f"{what} has no keyword {name}; give run_dir to train, which holds TensorBoard's files, too")
    if what != "train" and name in here:
        raise UsageError(f"{what} has no keyword {name}, which does not change what is trained; give it to train")
    if what == "train" and any(name in fields_of(recipe.experiment) for recipe in RECIPES.values()):
        raise UsageError(f"train has no keyword {name}, which changes what is trained; give it to ppo(…) or another")
    if remedy:
        raise UsageError(f"{what} has no keyword {name}; {remedy}")
    close = closest_names(name, known)
    trained: set[str] = set()
    if what == "train":
        trained = {n for recipe in RECIPES.values() for n in offered_fields(recipe.experiment)}
    if close and (meant := closest_names(name, {*known, *trained}, 1)) in trained:
        raise UsageError(f"train has no keyword {name}; if you mean {meant}, give it to ppo(…) or another")
    raise UsageError(f"{what} has no keyword {name}" + (f"; the closest are {close}" if close else ""))


ppo = _specify("ppo", PPO)
impala = _specify("impala", IMPALA)
dqn = _specify("dqn", DQN)
pqn = _specify("pqn", PQN)
r2d2 = _specify("r2d2", R2D2)
sac = _specify("sac", SAC)
td3 = _specify("td3", TD3)

# --------------------------------------------------------------------------------------------------------------- a run


class Curve(NamedTuple):
    """A metric over the steps of a run."""

    steps: np.ndarray
    """[N] int64: environment steps"""
    values: np.ndarray
    """[N] float64"""


class Run:
    """A run on disk, as `train` returns it.  `Run("runs/a")` opens one that has ended, or is still training."""

    def __init__(self, run_dir: str | Path):
        """Raises `UsageError` if there is no run."""
        require(isinstance(run_dir, str | Path), f"Run takes the directory of a run, not {run_dir!r}")
        self.run_dir = expanded(run_dir).absolute()
        read_experiment(self.run_dir)

    def __repr__(self) -> str:
        return f"<cleanba run {self.run_dir}>"

    def __fspath__(self) -> str:
        """The directory, so that `load` and whatever else takes a path takes the run."""
        return str(self.run_dir)

    @property
    def config(self) -> Json:
        """config.json as a dictionary, with every value of the experiment, the placement, the machine."""
        return read_config(self.run_dir)

    @property
    def result(self) -> Json:
        """result.json as a dictionary, with status, update, global_step, episodic_return, params_digest …

        Raises:
            UsageError: the run is still training, or was killed.
        """
        path = self.run_dir / "result.json"
        require(path.exists(), f"{self.run_dir} has no result yet: it is still training, or was killed")
        return read_json(path)

    @property
    def metrics(self) -> list[str]:
        """The names of the curves."""
        rows = read_rows(self.run_dir)
        return sorted({name for row in rows for name, value in row.items() if "/" in name and _is_number(value)})

    def curve(self, name: str) -> Curve:
        """The finite values of a logged metric, such as charts/episodic_return or losses/loss, over the steps.

        Raises:
            UsageError: no number of that name was logged.
        """
        require(isinstance(name, str), f"curve takes the name of a metric, such as 'charts/SPS', not {name!r}")
        rows = read_rows(self.run_dir)
        values = column(rows, name)
        there = np.isfinite(values)
        if not there.any():
            known = self.metrics
            close = closest_names(name, known)
            others = f"the closest are {close}" if close else f"it has {', '.join(known) or 'none yet'}"
            raise UsageError(f"{self.run_dir} has logged no number named {name!r}; {others}")
        return Curve(column(rows, "global_step")[there].astype(np.int64), values[there])

    def agent(self, checkpoint: str | int = "last", *, seed: int = 1) -> Agent:
        """The trained agent, as `load` returns it.

        Raises:
            UsageError: there is no such checkpoint.
            Failure: it is damaged.
        """
        return load(self.run_dir, checkpoint, seed=seed)

    @cached_property
    def spec(self) -> Spec:
        """The whole experiment, to train again in another directory or to resume in this one."""
        return Spec(read_experiment(self.run_dir)["algorithm"], whole=self.run_dir)


def _is_number(x: object) -> bool:
    return isinstance(x, int | float) and not isinstance(x, bool)


class TrainFlags(TypedDict, total=False):
    """The flags of placement and run, as keywords of `train`."""

    actor_device_ids: Sequence[int]
    learner_device_ids: Sequence[int]
    distributed: bool
    coordinator_address: str | None
    num_processes: int | None
    process_id: int | None
    env_workers: int | None
    exp_name: str
    checkpoint_frequency: int | None
    keep_checkpoints: int | str
    grace_period: float
    stall_timeout: float
    peer_timeout: float
    on_nonfinite: str
    target_return: float | None
    log_frequency: int
    log_info: Sequence[str]
    eval_frequency: int
    eval_episodes: int
    eval_device_id: int | None
    eval_max_steps: int | None
    profile: int
    capture_video: bool
    track: bool
    wandb_project_name: str
    wandb_entity: str | None
    save_model: bool
    upload_model: bool
    hf_entity: str | None
    trust_remote_code: bool


def train(spec: Spec, run_dir: str | Path | None = None, *, progress: bool = True, **flags: Unpack[TrainFlags]) -> Run:
    """Train to the end of the experiment, and return the run.

    The same call with the same `run_dir` resumes an unfinished run, and leaves a finished one alone.

    Args:
        spec: what is trained, such as `ppo("CartPole-v1", seed=1)`.
        run_dir: directory of the run; None: runs/<env>__<exp-name>__<seed>__<time, or Slurm job>.
        progress: whether progress is shown, on the console or below a notebook's cell.  Without it, warnings go to
            standard error.
        **flags: where it runs and what is kept, by the names of the command's flags: `learner_device_ids=[0, 1]`,
            `eval_frequency=100`.

    Raises:
        UsageError: what was asked for cannot be done as written, or `run_dir` holds another experiment.
        Failure: something outside the code failed: a full disk, a dead process, numbers that are not finite; or the run
            has finished, but its upload failed.
        KeyboardInterrupt: Ctrl-C, or a notebook's "interrupt kernel".  The same call resumes the run.
        Interrupted: another signal asked the run to end.  The same call resumes it.
    """
    require(isinstance(spec, Spec), f"train takes a specification, such as cleanba.ppo('CartPole-v1'), not {spec!r}")
    require(isinstance(progress, bool | np.bool_), f"progress={progress!r} must be True or False")
    given = _plain({"run_dir": run_dir, **flags})
    place, keep = set(fields_of(Placement)), set(fields_of(config.Run)) - {"experiment_from"}
    if unknown := [name for name in given if name not in place | keep]:
        _refuse("train", unknown[0], place | keep)
    placement = Placement(**as_typed(Placement, {name: x for name, x in given.items() if name in place}))
    run = config.Run(**as_typed(config.Run, {name: x for name, x in given.items() if name in keep}))
    recipe = spec.recipe(run.trust_remote_code)
    spec.register()
    ended = launch(recipe, configure(recipe, spec.flags, placement, run, spec.whole), progress, _give_up)
    _raise(ended, SAME_CALL if run_dir is not None else f"{SAME_CALL} with run_dir={str(ended.run_dir)!r}")
    return Run(ended.run_dir)


def _list_keywords_of_train() -> None:
    """Put the fields of placement and run into the signature and the documentation of `train`."""
    known = {
        group: {name: f for name, f in offered_fields(group).items() if name in TrainFlags.__annotations__}
        for group in (Placement, config.Run)
    }
    own = inspect.signature(train)
    given = [x for x in own.parameters.values() if x.kind is not inspect.Parameter.VAR_KEYWORD]
    keywords = [keyword for group, its in known.items() for keyword in _keywords(group, its)]
    train.__signature__ = own.replace(parameters=[*given, *keywords])  # type: ignore[attr-defined]
    lines = [f"    {name}: {f.about}" for its in known.values() for name, f in its.items()]
    args, raises, rest = inspect.cleandoc(train.__doc__ or "").partition("\n\nRaises:")
    train.__doc__ = "\n".join([args, *lines]) + raises + rest


_list_keywords_of_train()


def _give_up(signum: int) -> None:
    """Ctrl-C was pressed a second time: leave the run at once, with its threads."""
    raise KeyboardInterrupt(signal.Signals(signum).name)


def _raise(ended: Ended, call: str) -> None:
    """Raise the error that ended a run, if there is one, with a note that says how to resume.

    call: the call that resumes the run, in words.
    """
    error = ended.error
    whole = ended.remedy.startswith(SAME_CALL) or is_gone(ended.run_dir)
    remedy = ended.remedy if whole else f"{call}, or {ended.remedy}"
    if isinstance(error, Interrupted) and error.signum == signal.SIGINT:
        raise KeyboardInterrupt(f"the run ended early; {remedy}") from None
    if isinstance(error, SystemExit):  # it would end the program, perhaps with exit code 0
        error = RuntimeError(f"the environment called sys.exit({error.code!r})").with_traceback(error.__traceback__)
    if error is not None:
        if ended.remedy:
            error.add_note(remedy)
        raise error
    if ended.unshared is not None:
        raise ended.unshared
