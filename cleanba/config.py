"""What is trained (experiment), where it runs (placement), and what is kept of it (run): three frozen dataclasses.

An algorithm's experiment derives from `Experiment` and adds its own hyperparameters.  Each field's annotation states
its allowed values.  An experiment has no unset fields: `resolution.py` fills them from flags, presets and the
environment.
"""

import ast
import dataclasses
import inspect
import json
import math
import re
import sys
import types
from bisect import bisect_right
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import astuple, dataclass, replace
from functools import cache
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, TypeVar, Union, get_args, get_origin, get_type_hints

import tyro

from cleanba.errors import UsageError, closest_names, largest_divisor, nearest, nearest_divisors
from cleanba.files import Json, expanded, read_json

# -------------------------------------------------------------------------------------------------- rules of a value


def require(condition: bool, message: str) -> None:
    """Raise `UsageError(message)` unless `condition`."""
    if not condition:
        raise UsageError(message)


def flag(name: str) -> str:
    """The flag of a field: num_envs -> --num-envs."""
    return "--" + name.replace("_", "-")


INF = math.inf
MOST = 2**31 - 1  # the largest int32, the type of counters on devices


class Range(NamedTuple):
    """The allowed numbers of a field, in the field's annotation.  For a tuple, those of each element."""

    low: float
    high: float = INF
    open_low: bool = False
    """`low` itself is not allowed"""
    open_high: bool = False
    """`high` itself is not allowed"""
    unit: str = ""
    """unit of the number, such as "steps" """

    def holds(self, number: float) -> bool:
        """Whether a number is allowed.  NaN never is."""
        above = number > self.low if self.open_low else number >= self.low
        return above and (number < self.high if self.open_high else number <= self.high)

    @property
    def bounds(self) -> str:
        """The rule in words, such as "at least 1", "above 0" or "[0, 1]"."""
        if self.low == -INF:
            return "a finite number"
        if self.high in (INF, MOST):
            return f"{'above' if self.open_low else 'at least'} {_short(self.low)}"
        brackets = "(" if self.open_low else "[", ")" if self.open_high else "]"
        return f"{brackets[0]}{_short(self.low)}, {_short(self.high)}{brackets[1]}"

    def require(self, name: str, value: Any) -> None:
        """Raise `UsageError` unless the field of that name may have this value."""
        for number in value if isinstance(value, tuple) else (value,):
            if number is not None and not self.holds(number):
                raise UsageError(f"{name}={value} {self._refusal(flag(name), number)}")

    def _refusal(self, flag: str, number: float) -> str:
        low = _short(self.low)
        if self.low == -INF:
            return f"must be {self.bounds}; set {flag} to one"
        largest = self.high - 1 if self.open_high else self.high  # of whole numbers
        if isinstance(number, int) and number > largest:
            return f"is too large; it can be {_short(largest)} at most"
        if not math.isfinite(number):
            remedy = f"set {flag} to a finite number"
        elif number > self.low:
            remedy = f"set {flag} below {_short(self.high)}" if self.open_high else f"try {flag} {_short(self.high)}"
        elif self.open_low:
            remedy = f"set {flag} above {low}"
        else:
            remedy = f"set {flag} to {low} or more" if self.high in (INF, MOST) else f"try {flag} {low}"
        if self.high not in (INF, MOST):
            return f"must lie in {self.bounds}; {remedy}"
        if self.low == 0:
            return f"must {'be positive' if self.open_low else 'not be negative'}; {remedy}"
        return f"must be {self.bounds}; {remedy}"


class Sizes(NamedTuple):
    """One or more positive numbers, in the annotation of a tuple."""

    most: int = 2**16
    unit: str = ""

    @property
    def bounds(self) -> str:
        """The rule in words, such as "each in [1, 65536]"."""
        return f"each in [1, {self.most}]"

    def require(self, name: str, value: Any) -> None:
        """Raise `UsageError` unless the field of that name may have this value."""
        require(
            len(value) > 0 and min(value) >= 1,
            f"{name}={value} must be one or more positive numbers; try {flag(name)} 16 32",
        )
        for number in value:
            require(number <= self.most, f"{name}={number} is too large; it can be {self.most} at most")


NEWEST = 2  # checkpoints that stay, besides those that are kept permanently


class Retention(NamedTuple):
    """Which checkpoints stay, as --keep-checkpoints says: `all`, a number, or `every:K`."""

    newest: int | None
    """how many of the newest stay; None: all"""
    every: int = 0
    """those after multiples of this many updates stay permanently; 0: none do"""

    @classmethod
    def parse(cls, word: int | str) -> "Retention":
        """Read the flag's value.

        Raises:
            UsageError: it is neither `all`, nor a number, nor `every:K`.
        """
        period = re.fullmatch(r"every:([1-9]\d{0,9})", word) if isinstance(word, str) else None
        if period is not None and int(period[1]) <= MOST:
            return cls(NEWEST, int(period[1]))
        if word == "all":
            return cls(None)
        require(
            isinstance(word, int) and not isinstance(word, bool) and 1 <= word <= MOST,
            f"keep_checkpoints={word!r} must be {KeptCheckpoints().bounds}; try --keep-checkpoints 2",
        )
        return cls(int(word))

    def kept(self, updates: Iterable[int]) -> list[int]:
        """Which of these updates keep their checkpoints, in order."""
        known = sorted(updates)
        newest = set(known if self.newest is None else known[-self.newest :])
        return [update for update in known if update in newest or (self.every and update % self.every == 0)]


class KeptCheckpoints(NamedTuple):
    """The allowed values of --keep-checkpoints, in the annotation of its field."""

    unit: str = ""
    metavar: str = "all|N|every:K"
    bounds: str = "all, every:K, or at least 1"

    def require(self, name: str, value: Any) -> None:
        """Raise `UsageError` unless the field may have this value."""
        Retention.parse(value)


Settings = dict[str, Any]
"""Values for some fields of an experiment, by name."""

# CleanRL's games (`ppo_atari_envpool.py`): EnvPool's defaults with episodes that end when a life is lost, 10 million
# steps, and the Nature CNN.  Its results on 57 games are published.
CLEANRL_GAMES = Settings(
    total_timesteps=10_000_000,
    repeat_action_probability=0.0,
    full_action_space=False,
    episodic_life=True,
    max_episode_steps=27_000,
    reward_clip=True,
    env_options=("noop_max=30",),
    network="nature",
    hiddens=(512,),
)
CLEANRL_ATARI = CLEANRL_GAMES | Settings(core="none", share_torso=True)  # of policy gradients


class _NotOffered(NamedTuple):
    pass


X = TypeVar("X")
NotOffered = Annotated[tyro.conf.Fixed[X], _NotOffered()]
"""A field that an algorithm inherits but cannot use: there is no flag for it."""


def _short(x: float) -> str:
    return f"{x:.0e}".replace("e+0", "e") if x >= 1e6 and x < INF and x % 1e6 == 0 else f"{x:.10g}"


Count = Annotated[int, Range(1, MOST)]
Steps = Annotated[int, Range(1, MOST, unit="steps")]
Updates = Annotated[int, Range(0, MOST, unit="updates")]
Fraction = Annotated[float, Range(0, 1)]
Positive = Annotated[float, Range(0, INF, open_low=True, open_high=True)]
NotNegative = Annotated[float, Range(0, INF, open_high=True)]
PositiveOrInf = Annotated[float, Range(0, INF, open_low=True)]
Finite = Annotated[float, Range(-INF, INF, open_low=True, open_high=True)]

# ------------------------------------------------------------------------------------------- the three groups of flags


@dataclass(frozen=True)
class Experiment:
    """What is trained: together these decide every bit of the trained parameters.

    The defaults apply to environments that the algorithm has no preset for.
    """

    env_id: str = "Breakout-v5"
    """environment to train on: EnvPool's by its name, gymnasium:Name-v0 or package:Name-v0 for Gymnasium's, gymnax:Name
    for one in JAX (`cleanba envs` lists them)"""
    seed: Annotated[int, Range(0, 2**31, open_high=True)] = 1
    """seed of environments, parameters, actions and minibatches"""
    total_timesteps: Annotated[int, Range(1, unit="steps")] = 50_000_000
    """environment steps in all (an Atari step is 4 frames)"""
    num_envs: Annotated[int, Range(1, 10**6)] = 120
    """environments in total, over all actors and processes"""
    num_actors: Annotated[int, Range(1, 10**4)] = 1
    """actor threads in total, over all processes"""
    num_shards: Annotated[int, Range(1, 10**4)] = 1
    """parts of the batch whose gradients are computed separately; at most this many devices can learn"""
    num_steps: Annotated[int, Range(1, 10**6, unit="steps")] = 128
    """steps per environment in each rollout"""
    concurrency: bool = True
    """collect rollout k+1 while update k runs, with a policy exactly one version behind; off: take turns"""
    collector: Literal["stepped", "scanned"] = "stepped"
    """how rollouts are collected: stepped from Python, or scanned inside one jit"""
    env_epoch: Updates = 500
    """updates after which the environments start afresh (0: never)"""

    repeat_action_probability: Fraction = 0.25
    """Atari: probability that the emulator repeats the last action (sticky actions)"""
    full_action_space: bool = True
    """Atari: all 18 actions rather than the game's minimal set"""
    episodic_life: bool = False
    """Atari: end the training episode at the loss of a life"""
    max_episode_steps: Annotated[int, Range(0, MOST, unit="steps")] = 0
    """steps after which an episode is truncated (0: the environment's own limit if it has one; Atari: 27,000)"""
    reward_clip: bool = False
    """clip training rewards to [-1, 1]; reported returns stay raw"""
    env_options: tuple[str, ...] = ()
    """options of the environment, as name=value (EnvPool: frame_skip=2 noop_max=1)"""
    env_wrappers: tuple[str, ...] = ()
    """Gymnasium: wrappers as module:function, applied in this order"""

    init_from: str = ""
    """another run's parameters to start from: RUN_DIR, RUN_DIR:best, RUN_DIR:UPDATE or hf://user/repository; the run
    records their digest (left out: random parameters)"""
    anneal_lr: bool = True
    """decrease the learning rate linearly to 0 over the run"""
    gamma: Fraction = 0.99
    """discount per step"""

    network: Literal["nature", "nips", "impala", "minatar", "mlp"] = "mlp"
    """torso: for images the Nature CNN, the smaller CNN of 2013 or IMPALA's ResNet, for boards of planes MinAtar's CNN,
    for everything else an MLP (nips, the CNN of 2013, takes a third of the computation of nature)"""
    channels: Annotated[tuple[int, ...], Sizes()] = (16, 32, 32)
    """channels of the IMPALA ResNet's sections"""
    hiddens: Annotated[tuple[int, ...], Sizes(unit="units")] = (256,)
    """units of the dense layers after the convolutions, or of the MLP (with tanh in PPO and IMPALA, else ReLU)"""
    layer_norm: bool = False
    """layer normalisation after every layer of the torso"""
    deterministic: bool = True
    """the same bits every time: GPU kernels that add in order, a fixed number of CPU threads
    (docs/inside/determinism.md)"""
    dtype: Literal["float32", "tensorfloat32", "bfloat16"] = "float32"
    """number format that the network computes in (parameters stay float32); with tensorfloat32 GPUs round the factors
    of products to 10 bits of mantissa, and other devices use float32"""
    cpu_kernels: Literal["auto", "on", "off"] = "on"
    """on CPUs, compute networks and optimisers with Cleanba's own, faster kernels if they pass a self-test; off: with
    plain JAX, which gives other bits; auto means on (docs/inside/performance.md)"""

    @property
    def transitions_per_update(self) -> int:
        """Transitions per update."""
        return self.num_envs * self.num_steps

    @property
    def num_updates(self) -> int:
        """Updates in the run."""
        return self.total_timesteps // self.transitions_per_update

    @property
    def first_to_learn(self) -> int:
        """The number of the first update that takes gradient steps, counted from 1; 0: all do."""
        return 0

    @property
    def schedules(self) -> tuple[str, ...]:
        """The settings whose schedules span the run.  Without any, a longer run begins with the same bits."""
        return ("anneal_lr",) if self.anneal_lr else ()


@dataclass(frozen=True)
class Recurrent(Experiment):
    """Additional settings of algorithms whose network may have an LSTM."""

    core: Literal["none", "lstm"] = "none"
    """recurrent core between torso and heads"""
    lstm_size: Annotated[int, Range(1, 2**16, unit="units")] = 256
    """units of the LSTM"""
    forget_bias: Finite = 0.0
    """initial bias of the LSTM's forget gates: 0 halves the cell's state in every step, 2 keeps 7/8 of it"""


@dataclass(frozen=True)
class FromRollouts(Recurrent):
    """Additional settings of algorithms that learn from each rollout and then drop it: PPO, IMPALA and PQN."""

    learning_rate: Positive = 2.5e-4
    """initial step size of the optimiser"""
    max_grad_norm: Positive = 0.5
    """global norm to which gradients are clipped"""
    num_minibatches: Count = 4
    """minibatches per pass over the batch"""
    norm_obs: bool = False
    """normalise observations by their running mean and standard deviation; images, boards of planes, masks and booleans
    stay as they are; codes and text are first encoded as zeros and ones"""
    norm_reward: bool = False
    """scale training rewards by the running standard deviation of their discounted return"""

    def check_minibatches(self, partition: "Partition", of_steps: bool) -> None:
        """Raise `UsageError` unless minibatches cut a shard's environments evenly, or its transitions if `of_steps`."""
        size, m = partition.envs_per_shard, self.num_minibatches
        what = f"{size} environments"
        if of_steps:
            size, what = size * self.num_steps, f"{what} x {self.num_steps} steps"
        require(
            size % m == 0,
            f"num_minibatches={m} cannot cut a shard's {what} evenly; "
            f"try --num-minibatches {nearest_divisors(size, m)}",
        )


@dataclass(frozen=True)
class PolicyGradient(FromRollouts):
    """Additional settings of actor-critics: PPO and IMPALA."""

    ent_coef: NotNegative = 0.01
    """weight of the entropy bonus"""
    vf_coef: NotNegative = 0.5
    """weight of the value loss"""
    log_std_init: Annotated[float, Range(-20, 20)] = 0.0
    """real-valued actions: logarithm of the policy's initial standard deviation"""
    share_torso: bool = True
    """one torso and core for policy and value"""


@dataclass(frozen=True)
class Placement:
    """Where it runs: no flag here changes the trained parameters."""

    actor_device_ids: tuple[int, ...] = (0,)
    """this process's devices that act, by local index"""
    learner_device_ids: tuple[int, ...] = (0,)
    """this process's devices that learn, by local index"""
    distributed: bool = False
    """join other processes in one run, found through Slurm or Open MPI, or by the next three flags"""
    coordinator_address: str | None = None
    """host:port of process 0, unless the cluster provides it"""
    num_processes: Annotated[int | None, Range(1, MOST)] = None
    """number of processes, unless the cluster provides it"""
    process_id: Annotated[int | None, Range(0, MOST)] = None
    """this process's number, from 0, unless the cluster provides it"""
    env_workers: Annotated[int | None, Range(0, MOST)] = None
    """Gymnasium: processes that step each actor's environments (None: this process's cores, divided among its actors;
    0: the actor's own thread)"""

    def in_one_process(self) -> "Placement":
        """The same devices, in a single process."""
        return replace(self, distributed=False, coordinator_address=None, num_processes=None, process_id=None)


@dataclass(frozen=True)
class Run:
    """What a run keeps and shows."""

    exp_name: str = ""
    """name of the experiment, part of the run directory's default name (default: the algorithm)"""
    run_dir: Path | None = None
    """directory of the run (default: runs/<env>__<exp-name>__<seed>__<time, or Slurm job>)"""
    experiment_from: Annotated[str | None, tyro.conf.arg(name="experiment", metavar="RUN_DIR")] = None
    """repeat the whole experiment of this earlier run, a directory, an archive or hf://USER/REPOSITORY; only flags of
    placement and of the run itself may be added"""
    trust_remote_code: bool = False
    """with --experiment of a downloaded run: import and call what its config.json names (docs/guides/trust.md)"""
    checkpoint_frequency: Annotated[int | None, Range(0, MOST, unit="updates")] = None
    """updates between checkpoints (0: only one, at the end or when a signal ends the run; None: one a minute, or fewer
    if they would take more than 1% of the time)"""
    keep_checkpoints: Annotated[int | str, KeptCheckpoints()] = NEWEST
    """which checkpoints to keep; all; N: the N newest; every:K: the two newest, and permanently those after multiples
    of K updates, which are taken whatever --checkpoint-frequency says"""
    grace_period: Annotated[float, Range(0, 1e6, unit="seconds")] = 60.0
    """seconds after Ctrl-C, SIGTERM, SIGUSR1 or SIGHUP to finish the current update and write a checkpoint; after
    them, or with 0, the run ends without a checkpoint"""
    stall_timeout: Annotated[float, Range(1, INF, unit="seconds")] = 600.0
    """seconds without progress after which the run ends and prints the stack of each thread; time spent compiling does
    not count; progress is the end of the start, an update or, after the last update, a step of an evaluation or film"""
    peer_timeout: Annotated[float, Range(3, 1e6, unit="seconds")] = 20.0
    """seconds of silence after which another process of the run is presumed dead: it was stopped, or its host is gone;
    a process that exits is noticed at once"""
    on_nonfinite: Literal["stop", "ignore"] = "stop"
    """what to do when a loss, a gradient, an observation or a reward is not a finite number"""
    target_return: Annotated[float | None, Range(-INF, INF, open_low=True, open_high=True)] = None
    """finish the run once the mean return of the last 100 training episodes has reached this: one update after the log
    point that shows it (None: train for all of --total-timesteps)"""
    log_frequency: Annotated[int, Range(1, MOST, unit="updates")] = 10
    """updates between entries in the logs"""
    log_info: tuple[str, ...] = ()
    """Python environments: names of numbers in `info` at the end of episodes, such as is_success, to log as
    info/NAME (mean of the last 100 episodes that have it)"""
    eval_frequency: Updates = 0
    """updates between evaluations during training, which also keep the best parameters (0: never)"""
    eval_episodes: Count = 10
    """complete episodes in each of these evaluations"""
    eval_max_steps: Annotated[int | None, Range(1, MOST, unit="steps")] = None
    """steps after which an episode of an evaluation or a film is cut off and reported as truncated (None: 27,000, or
    the environment's own limit where that is longer)"""
    eval_device_id: int | None = None
    """device that acts in these evaluations, by local index (None: the last one that acts in training)"""
    profile: Updates = 0
    """updates to record with JAX's profiler, from the third on, in the run's profile/ (docs/guides/speed.md)"""
    capture_video: bool = False
    """film an episode when the run is finished (an MP4 in the run's videos/)"""
    track: bool = False
    """log to Weights & Biases too"""
    wandb_project_name: str = "cleanba"
    """Weights & Biases project"""
    wandb_entity: str | None = None
    """Weights & Biases entity: a user or team"""
    save_model: bool = False
    """keep the final parameters in model.msgpack"""
    upload_model: bool = False
    """upload the finished run to the Hugging Face Hub, as `cleanba push` does"""
    hf_entity: str | None = None
    """user or organisation on the Hugging Face Hub (None: the user who is logged in)"""


# ------------------------------------------------------------------------------------------------- values of fields

Group = Experiment | Placement | Run
T = TypeVar("T", bound=Group)
E = TypeVar("E", bound=Experiment)


class Field(NamedTuple):
    """A field of a dataclass of flags."""

    annotation: Any
    """its type, with rules"""
    about: str
    """its description: the string below it"""
    rule: Range | Sizes | KeptCheckpoints | None
    offered: bool
    """whether there is a flag for it"""


def fields_of(cls: type) -> dict[str, Field]:
    """The fields of a dataclass, in order.  A field whose default a subclass changes keeps the rule of its base."""
    return _fields_of(cls)


@cache  # in a function of its own, as type checkers do not accept a class as a hashable argument
def _fields_of(cls: Any) -> dict[str, Field]:
    abouts = _abouts(cls)
    hints = [get_type_hints(base, include_extras=True) for base in cls.__mro__ if dataclasses.is_dataclass(base)]
    found = {}
    for f in dataclasses.fields(cls):
        marks = [mark for own in hints for mark in getattr(own.get(f.name), "__metadata__", ())]
        rule = next((mark for mark in marks if isinstance(mark, Range | Sizes | KeptCheckpoints)), None)
        offered = not any(isinstance(mark, _NotOffered) for mark in marks)
        found[f.name] = Field(hints[0][f.name], abouts.get(f.name, ""), rule, offered)
    return found


def offered_fields(cls: type) -> dict[str, Field]:
    """The fields of a dataclass that have flags."""
    return {name: f for name, f in fields_of(cls).items() if f.offered}


@cache
def _classes(source: str) -> dict[str, ast.ClassDef]:
    """The classes of a module, by their `__qualname__`.  (`inspect.getsource` would parse it anew for each class.)"""
    found: dict[str, ast.ClassDef] = {}

    def walk(node: ast.AST, prefix: str) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.ClassDef):
                found.setdefault(prefix + child.name, child)
                walk(child, f"{prefix}{child.name}.")
            elif isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                walk(child, f"{prefix}{child.name}.<locals>.")
            elif not isinstance(child, ast.expr):
                walk(child, prefix)

    walk(ast.parse(source), "")
    return found


def _abouts(cls: type) -> dict[str, str]:
    """The strings below the fields of a dataclass and of its bases, each on one line."""
    found: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        try:
            body = _classes(inspect.getsource(sys.modules[base.__module__]))[base.__qualname__].body
        except (OSError, TypeError, KeyError):  # built in, or defined interactively, without a source file
            continue
        for node, after in pairwise(body):
            name = node.target.id if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) else None
            about = after.value.value if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant) else None
            if name is not None and isinstance(about, str):
                found[name] = " ".join(about.split())
    return found


def check_values(config: object) -> None:
    """Raise `UsageError` for a value that its field does not allow; `config` is an instance of a dataclass of flags."""
    for name, f in fields_of(type(config)).items():
        if f.rule is not None:
            f.rule.require(name, getattr(config, name))


def as_typed(cls: type, values: Mapping[str, Any]) -> dict[str, Any]:
    """Convert values from JSON or from Python to the types of a dataclass's fields.

    Lists become tuples; whole numbers and "inf" become floats where the field is a float.

    Raises:
        UsageError: there is no such field, or its value has the wrong type.
    """
    known = fields_of(cls)
    found = {}
    for name, value in values.items():
        if name not in known:
            close = closest_names(name, known)
            raise UsageError(f"there is no {name!r}" + (f"; did you mean {close}?" if close else ""))
        try:
            found[name] = _converted(known[name].annotation, value)
        except TypeError as error:
            raise UsageError(f"{name}={value!r} must be {error}{_meant(known[name].annotation, value)}") from None
    return found


def _meant(annotation: Any, value: Any) -> str:
    """How to write a value of the wrong type, such as "1e6" or a number in place of a list; "" if that is unclear."""
    with suppress(TypeError):
        return f"; write {list(_converted(annotation, [value]))}"
    with suppress(TypeError, ValueError):
        number = _converted(annotation, float(value)) if isinstance(value, str) else None
        return f"; write {number:_}" if number is not None else ""
    return ""


def _converted(annotation: Any, value: Any) -> Any:
    """Convert a value to the type of an annotation.  Raises a `TypeError` that says what the value must be."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _converted(arguments[0], value)
    if origin in (Union, types.UnionType):
        whys = []
        for argument in arguments:
            try:
                return _converted(argument, value)
            except TypeError as why:
                whys.append(str(why))
        raise TypeError(" or ".join(whys))
    if origin is Literal:
        if value in arguments:
            return value
        raise TypeError("one of " + ", ".join(map(str, arguments)))
    if origin is tuple:
        if isinstance(value, list | tuple):
            return tuple(_converted(arguments[0], x) for x in value)
        raise TypeError("a list")
    if annotation is type(None):
        if value is None:
            return value
        raise TypeError("None")
    if annotation is Path:
        if isinstance(value, str | Path):
            return expanded(value)
        raise TypeError("a path")
    if annotation is float and isinstance(value, str) and value in ("inf", "-inf", "nan"):
        return float(value)
    if annotation in (int, float) and isinstance(value, int | float) and not isinstance(value, bool):
        with suppress(OverflowError):  # of a whole number with hundreds of digits
            if annotation is float or (math.isfinite(value) and int(value) == value):
                return annotation(value)
    elif annotation in (bool, str) and isinstance(value, annotation):
        return value
    raise TypeError({int: "a whole number", float: "a number", bool: "true or false", str: "a string"}[annotation])


@dataclass(frozen=True)
class Partition:
    """Which actor, shard and process owns which environments: equal, contiguous index ranges."""

    num_envs: int
    num_actors: int
    num_shards: int
    num_processes: int = 1
    learners_per_process: int = 1

    def __post_init__(self) -> None:
        n, a, k, p, learners = astuple(self)
        for count, what in ((a, "actors"), (k, "shards")):
            require(n % count == 0, f"num_envs={n} cannot be split over {count} {what}; {self._remedy('num_envs')}")
        for count, name in ((a, "num_actors"), (k, "num_shards")):
            fewer = nearest(p, lambda m: self._fits(n, a, k, m, learners), k + p)
            require(
                count % p == 0,
                f"{name}={count} cannot be split over {p} processes; "
                + (f"start {fewer} process{'es' * (fewer != '1')}, or for another experiment " if fewer else "")
                + self._remedy(name),
            )
        require(
            a % k == 0 or k % a == 0,
            f"num_actors={a} and num_shards={k} do not fit: one must divide the other; {self._remedy('num_actors')}",
        )
        each = "" if p == 1 else f", {k // p} for each of {p} processes,"
        require(
            learners <= k // p,
            f"num_shards={k}{each} cannot occupy {learners} learner devices, each of which needs one; "
            f"name {k // p} of them at most, or for another experiment {self._remedy('num_shards')}",
        )

    @staticmethod
    def _fits(n: int, a: int, k: int, p: int, learners: int) -> bool:
        divides = n % a == 0 and n % k == 0 and a % p == 0 and k % p == 0 and (a % k == 0 or k % a == 0)
        return divides and learners <= k // p

    def _remedy(self, name: str) -> str:
        """Suggest values that fit: of the named number alone if there are any, else of all three."""
        n, a, k, p, learners = astuple(self)
        numbers = {"num_envs": n, "num_actors": a, "num_shards": k}
        limit = 2 * (n + a + k) + p * learners

        def fits(m: int) -> bool:
            changed = numbers | {name: m}
            return self._fits(changed["num_envs"], changed["num_actors"], changed["num_shards"], p, learners)

        one = nearest(numbers[name], fits, limit)
        if one:
            return f"try {flag(name)} {one}"
        shards = p * max(learners, round(k / p))
        actors = p * largest_divisor(shards // p, max(a, p) // p)
        envs = shards * max(1, round(n / shards))
        return f"try --num-envs {envs} --num-actors {actors} --num-shards {shards}"

    @property
    def num_blocks(self) -> int:
        """The number of blocks.  Rollouts travel in blocks: the environments with the same actor and shard."""
        return max(self.num_actors, self.num_shards)

    @property
    def envs_per_actor(self) -> int:
        return self.num_envs // self.num_actors

    @property
    def envs_per_shard(self) -> int:
        return self.num_envs // self.num_shards

    @property
    def blocks_per_actor(self) -> int:
        return self.num_blocks // self.num_actors

    @property
    def blocks_per_shard(self) -> int:
        return self.num_blocks // self.num_shards

    @property
    def shards_of_learners(self) -> tuple[int, ...]:
        """How many shards each learner device of a process holds.  If uneven, the first ones hold one more."""
        each, more = divmod(self.num_shards // self.num_processes, self.learners_per_process)
        return tuple(each + (device < more) for device in range(self.learners_per_process))

    @property
    def places_per_learner(self) -> int:
        """How many shards the fullest learner device holds; every device has this many places."""
        return max(self.shards_of_learners)

    def place(self, shard: int) -> int:
        """The index of a shard's place among the places of all learner devices, in device order."""
        process, local = divmod(shard, self.num_shards // self.num_processes)
        ends = list(accumulate(self.shards_of_learners))
        device = bisect_right(ends, local)
        before = ends[device] - self.shards_of_learners[device]
        return (process * self.learners_per_process + device) * self.places_per_learner + local - before

    def actor_envs(self, actor: int) -> range:
        return range(actor * self.envs_per_actor, (actor + 1) * self.envs_per_actor)

    def process_actors(self, process: int) -> range:
        n = self.num_actors // self.num_processes
        return range(process * n, (process + 1) * n)

    def process_shards(self, process: int) -> range:
        n = self.num_shards // self.num_processes
        return range(process * n, (process + 1) * n)


# ------------------------------------------------------------------------------------------------------ on disk


def to_json(config: Group) -> Json:
    """A frozen dataclass as JSON values."""
    known_to_json = lambda v: not isinstance(v, Path) and not (isinstance(v, float) and not math.isfinite(v))
    return {k: v if known_to_json(v) else str(v) for k, v in dataclasses.asdict(config).items()}


def from_json(cls: type[T], values: Json) -> T:
    """The dataclass that `to_json` wrote, perhaps by another version.  Unknown names are ignored; missing ones default.

    Experiments must be complete, so `resolution.known_of` reads them.

    Raises:
        UsageError: a value does not have its field's type.
    """
    return cls(**values_from_json(cls, values))


def values_from_json(cls: type, values: Mapping[str, Any]) -> dict[str, Any]:
    """The values from a config.json for fields that `cls` has, in the fields' own types.

    Raises:
        UsageError: a value does not have its field's type.
    """
    known = fields_of(cls)
    try:
        return as_typed(cls, {name: value for name, value in values.items() if name in known})
    except UsageError as error:
        raise UsageError(f"config.json is invalid: {error}; restore it, or choose another run") from None


def read_config(run_dir: Path) -> Json:
    """The config.json of an earlier run.

    In old versions checkpoint_frequency also set the epoch of environments, so there it is read as both.  A file
    without cpu_kernels gets the default.

    Raises:
        UsageError: there is no such run, or Cleanba did not write the file.
    """
    config = read_json(run_dir / "config.json")
    for part in ("origin", "placement", "run", "packages", "sources", "first_experiment"):
        require(
            isinstance(config.get(part, {}), dict),
            f"{part!r} in {run_dir}/config.json is not a JSON object; restore the file, or choose another run",
        )
    e, run = config.get("experiment"), config.get("run")
    if isinstance(e, dict):
        e.setdefault("cpu_kernels", Experiment.cpu_kernels)
    if isinstance(e, dict) and "checkpoint_frequency" in e and "env_epoch" not in e:
        frequency = e["checkpoint_frequency"]
        both = {"env_epoch" if name == "checkpoint_frequency" else name: value for name, value in e.items()}
        config["experiment"] = both
        if isinstance(run, dict):
            config["run"] = {"checkpoint_frequency": frequency, **run}
    return config


def read_experiment(run_dir: Path) -> Json:
    """The experiment of an earlier run, with "algorithm", as its config.json has it.

    Raises:
        UsageError: there is no such run.
    """
    experiment = read_config(run_dir).get("experiment")
    if not isinstance(experiment, dict) or "algorithm" not in experiment:
        raise UsageError(f"{run_dir}/config.json holds no experiment; name the directory of a run")
    for name, kind in {"algorithm": str, "env_id": str, "seed": int, "core": str}.items():
        require(
            isinstance(experiment.get(name, kind()), kind),
            f"{name}={str(experiment.get(name))[:40]!r} in {run_dir}/config.json is not of the type "
            f"{kind.__name__}; restore the file, or choose another run",
        )
    return experiment


def updates_of(experiment: Json) -> int:
    """The number of updates of a recorded experiment."""
    return int(experiment["total_timesteps"] // (experiment["num_envs"] * experiment["num_steps"]))


def differences(a: Json, b: Json, *, between: str = ", now ") -> list[str]:
    """The fields in which two experiments differ, as "name: value in a, now value in b"; `between` joins the values."""
    a, b = (json.loads(json.dumps(x)) for x in (a, b))
    return [f"{k}: {a.get(k)}{between}{b.get(k)}" for k in sorted(set(a) | set(b)) if a.get(k) != b.get(k)]


MOST_NAMED = 8  # differing settings in one sentence


def shortened(changed: list[str]) -> str:
    """`differences` as one sentence: the first few, and how many more there are."""
    # Another algorithm has other settings.  A list of all of them would bury its name.
    named = [field for field in changed if field.startswith("algorithm: ")] or changed[:MOST_NAMED]
    return "; ".join(named + [f"{len(changed) - len(named)} more"] * (len(changed) > len(named)))


def require_same(run_dir: Path, changed: list[str], flag: str = "--run-dir") -> None:
    """Raise `UsageError` if there are `differences` to the experiment in a run's directory.

    `flag` is the flag that chooses the directory.
    """
    local = r"env_id: (gymnasium:local/.*)-[0-9a-f]{8}-v0, now \1-[0-9a-f]{8}-v0"
    why = (
        "the function that makes its environments has other code now: " if re.fullmatch(local, "".join(changed)) else ""
    )
    require(
        not changed,
        f"{run_dir} holds another experiment ({why}{shortened(changed)}); choose another {flag}, or repeat the flags "
        "of that run",
    )
