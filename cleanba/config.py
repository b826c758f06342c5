"""What is trained (experiment), where it runs (placement), and what is kept of it (run): three frozen dataclasses.

An algorithm's experiment derives from `Experiment` and adds its own hyperparameters.
"""

import dataclasses
import json
import math
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Annotated, Literal, TypeVar

import tyro

from cleanba.errors import UsageError, nearest, nearest_divisors
from cleanba.files import Json, read_json


@dataclass(frozen=True)
class Experiment:
    """What is trained: together these decide every bit of the trained parameters."""

    env_id: str = "Breakout-v5"
    """EnvPool's environment of that name; gymnasium:Name-v0 or package:Name-v0 for Gymnasium's, gymnax:Name for one
    in JAX (`cleanba envs` lists them)"""
    seed: int = 1
    """seed of environments, parameters, actions and minibatches"""
    total_timesteps: int = 50_000_000
    """environment steps in all (an Atari step is 4 frames)"""
    num_envs: int = 120
    """environments over the whole experiment"""
    num_actors: int | None = None
    """actor threads over the whole experiment (None: two per actor device, one per CPU device, or the nearest number
    that fits)"""
    num_shards: int | None = None
    """parts of the batch whose gradients are computed alone (None: one per learner device)"""
    num_steps: int = 128
    """steps per environment and rollout"""
    concurrency: bool = True
    """collect rollout k+1 while update k runs, with a policy exactly one version behind; off: take turns"""
    collector: Literal["stepped", "scanned"] | None = None
    """rollouts stepped from Python, or scanned inside one jit (None: scanned on CPUs where
    EnvPool can be, else stepped)"""
    env_epoch: int | None = None
    """updates after which the environments start afresh (0: never; None: 500, or more where two of the longest episodes
    need more, or where updates are short: if an actor-critic's rollouts are scanned and nothing is an image, as many as
    make 4 million steps)"""

    repeat_action_probability: float = 0.25
    """Atari: probability that the emulator repeats the last action (sticky actions)"""
    full_action_space: bool = True
    """Atari: all 18 actions rather than the game's minimal set"""
    episodic_life: bool = False
    """Atari: end the training episode at the loss of a life"""
    max_episode_steps: int | None = None
    """steps after which an episode is truncated (None: 27,000 for Atari, elsewhere the environment's own)"""
    reward_clip: bool | None = None
    """clip training rewards to [-1, 1]; reported returns stay raw (None: for Atari only)"""
    env_options: tuple[str, ...] = ()
    """what the environment is made with, as name=value (EnvPool: frame_skip=2 noop_max=1)"""
    env_wrappers: tuple[str, ...] = ()
    """Gymnasium: functions from environment to environment, as module:function, called in this order"""

    anneal_lr: bool = True
    """decrease the learning rate linearly to 0 over the run"""
    gamma: float = 0.99
    """discount per step"""

    network: Literal["auto", "nature", "impala", "minatar", "mlp"] = "auto"
    """torso: Nature CNN, IMPALA ResNet, MinAtar CNN, MLP; auto takes IMPALA for images, MinAtar's for boards of planes,
    and MLP otherwise"""
    channels: tuple[int, ...] = (16, 32, 32)
    """channels of the IMPALA ResNet's sections"""
    hiddens: tuple[int, ...] = (256,)
    """units of the dense layers after the convolutions, or of the MLP"""
    core: Literal["none", "lstm"] = "none"
    """memory between torso and heads"""
    lstm_size: int = 256
    """units of the LSTM"""
    forget_bias: float = 0.0
    """what the LSTM's forget gates begin with: 0 halves what is remembered in every step, 2 keeps 7/8 of it"""
    deterministic: bool = True
    """the same bits every time: GPU kernels that add in order, a fixed number of CPU threads (docs/determinism.md)"""
    dtype: Literal["float32", "tensorfloat32", "bfloat16"] = "float32"
    """number format that the network computes in (parameters stay float32); tensorfloat32 rounds on GPUs what is
    multiplied to 10 bits, elsewhere it is float32"""

    @property
    def transitions_per_update(self) -> int:
        """Transitions per update."""
        return self.num_envs * self.num_steps

    @property
    def updates_per_epoch(self) -> int:
        """Updates after which environments start afresh; 0: never.  500 where `recipes.suit` was not asked."""
        return 500 if self.env_epoch is None else self.env_epoch

    @property
    def num_updates(self) -> int:
        """Updates in the run."""
        return self.total_timesteps // self.transitions_per_update


@dataclass(frozen=True)
class PolicyGradient(Experiment):
    """What an actor-critic that learns from each rollout once has besides."""

    learning_rate: float = 2.5e-4
    """optimiser's step size at the start"""
    ent_coef: float = 0.01
    """weight of the entropy bonus"""
    vf_coef: float = 0.5
    """weight of the value loss"""
    max_grad_norm: float = 0.5
    """global norm to which gradients are clipped"""
    num_minibatches: int = 4
    """minibatches that each epoch cuts the batch into"""
    log_std_init: float = 0.0
    """real-valued actions: logarithm of the policy's standard deviation at the start"""
    share_torso: bool | None = None
    """one torso, and core, for both policy and value (None: unless actions are real numbers and nothing is an image)"""
    norm_obs: bool = False
    """shift and scale what is observed, but images, by its running mean and standard deviation; of codes and text, the
    zeros and ones that stand for them"""
    norm_reward: bool = False
    """scale training rewards by the running standard deviation of their discounted return"""

    def check_minibatches(self, size: int, what: str) -> None:
        """Raise `UsageError` unless the minibatches cut the `size` parts of a shard evenly."""
        m = self.num_minibatches
        require(
            size % m == 0,
            f"num_minibatches={m} cannot cut a shard's {what} evenly; "
            f"try --num-minibatches {nearest_divisors(size, m)}",
        )


@dataclass(frozen=True)
class Placement:
    """Where it runs: no flag here changes the trained parameters."""

    actor_device_ids: tuple[int, ...] = (0,)
    """this process's devices that act, by local index"""
    learner_device_ids: tuple[int, ...] = (0,)
    """this process's devices that learn, by local index"""
    distributed: bool = False
    """one of several processes; peers are found through Slurm, Open MPI or Kubernetes, or by the next three flags"""
    coordinator_address: str | None = None
    """host:port of process 0, where no cluster tells"""
    num_processes: int | None = None
    """number of processes, where no cluster tells"""
    process_id: int | None = None
    """this process's number, from 0, where no cluster tells"""
    env_workers: int | None = None
    """Gymnasium: processes that step each actor's environments (None: this process's cores, shared out among its
    actors; 0: the actor's own thread)"""


@dataclass(frozen=True)
class Run:
    """What is kept and shown of it."""

    exp_name: str = ""
    """name of the experiment, part of the run directory's default name (default: the algorithm)"""
    run_dir: Path | None = None
    """directory of the run (default: runs/<env>__<exp-name>__<seed>__<time, or job of Slurm>)"""
    experiment_from: Annotated[str | None, tyro.conf.arg(name="experiment", metavar="RUN_DIR")] = None
    """take the whole experiment from this earlier run's config.json; only other flags may be added"""
    trust_remote_code: bool = False
    """with --experiment of a downloaded run: import and call what its config.json names (docs/trust.md)"""
    checkpoint_frequency: int | None = None
    """updates between checkpoints (0: only one, at the end; None: one wherever the environments start afresh)"""
    keep_checkpoints: int = 2
    """newest checkpoints to keep"""
    grace_period: float = 60.0
    """seconds that SIGUSR1 leaves to reach the next checkpoint; where it is farther, the run ends at once"""
    stall_timeout: float = 600.0
    """seconds without an update, or at the end without a step of an evaluation or a film, compilation aside, after
    which the run ends and shows where each thread stands"""
    on_nonfinite: Literal["stop", "ignore"] = "stop"
    """what to do when a loss, a gradient, an observation or a reward is not a finite number"""
    log_frequency: int = 10
    """updates between entries in the logs"""
    eval_frequency: int = 0
    """updates between evaluations beside the training, which also keep the best parameters (0: never)"""
    eval_episodes: int = 10
    """complete episodes in each of these evaluations"""
    eval_max_steps: int | None = None
    """steps after which an episode of an evaluation or a film is cut off and reported as truncated (None: 27,000, or
    the environment's own limit where that is longer)"""
    eval_device_id: int | None = None
    """device that acts in them, by local index (None: the last one that acts in training)"""
    profile: int = 0
    """updates to record with JAX's profiler, from the third on, in the run's profile/ (docs/performance.md)"""
    capture_video: bool = False
    """film an episode when the run is finished (an MP4 in the run's videos/)"""
    track: bool = False
    """log to Weights & Biases too"""
    wandb_project_name: str = "cleanba"
    """Weights & Biases project"""
    wandb_entity: str | None = None
    """Weights & Biases entity (team)"""
    save_model: bool = False
    """keep the final parameters in model.msgpack"""
    upload_model: bool = False
    """upload the finished run to the Hugging Face Hub, as `cleanba push` does"""
    hf_entity: str | None = None
    """user or organisation on the Hugging Face Hub (None: who is logged in)"""


E = TypeVar("E", bound=Experiment)


def require(condition: bool, message: str) -> None:
    """Raise `UsageError(message)` unless `condition`."""
    if not condition:
        raise UsageError(message)


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


MOST = dict(num_envs=10**6, num_actors=10**4, num_shards=10**4, num_steps=10**6) | dict.fromkeys(
    ("hiddens", "channels", "lstm_size"), 2**16
)


def _check_numbers(e: Experiment) -> None:
    for name in (
        "total_timesteps",
        "num_envs",
        "num_steps",
        "num_minibatches",
        "num_actors",
        "num_shards",
        "lstm_size",
    ):
        count = getattr(e, name, None)
        require(count is None or count >= 1, f"{name}={count} must be at least 1; set {_flag(name)} to 1 or more")
    for f in dataclasses.fields(e):  # numbers that arrays and loops can have
        value, most = getattr(e, f.name), MOST.get(f.name, 2**31 - 1)
        if f.name not in ("seed", "total_timesteps"):
            for n in value if isinstance(value, tuple) else (value,):
                require(not isinstance(n, int) or n <= most, f"{f.name}={n} is too large; it can be {most} at most")
    for name in ("learning_rate", "policy_lr", "q_lr", "max_grad_norm"):
        value = getattr(e, name, 1.0)
        require(0 < value < float("inf"), f"{name}={value} must be positive; set {_flag(name)} above 0")
    for name in ("gamma", "repeat_action_probability"):
        value = getattr(e, name)
        require(0 <= value <= 1, f"{name}={value} must lie in [0, 1]; set {_flag(name)} accordingly")
    for name in ("ent_coef", "vf_coef"):
        value = getattr(e, name, 0.0)
        require(0 <= value < float("inf"), f"{name}={value} must not be negative; set {_flag(name)} to 0 or more")
    log_std = getattr(e, "log_std_init", 0.0)
    require(-20 <= log_std <= 20, f"log_std_init={log_std} must lie in [-20, 20]; try --log-std-init -1")
    require(0 <= e.seed < 2**31, f"seed={e.seed} must lie in [0, 2^31); try --seed {abs(e.seed) % 2**31}")
    require(
        e.env_epoch is None or e.env_epoch >= 0,
        f"env_epoch={e.env_epoch} must not be negative; 0 means never",
    )
    require(
        e.max_episode_steps is None or e.max_episode_steps >= 1,
        f"max_episode_steps={e.max_episode_steps} must be at least 1; leave it out for the environment's own limit",
    )
    for name in ("channels", "hiddens"):
        value = getattr(e, name)
        require(
            len(value) > 0 and min(value) >= 1,
            f"{name}={value} must be one or more positive numbers; try {_flag(name)} 16 32",
        )


def resolve(e: E, actor_devices: int, learner_devices: int, num_processes: int = 1, platform: str = "") -> E:
    """The experiment with `num_actors`, `num_shards` and `collector` filled in for that many devices of all processes.

    Defaults are one shard per learner device and two actors per actor device, of which one acts while the other's
    emulators run; on CPUs, where the same cores do both, one.  One of the two numbers must divide the other; where so
    many actors per device do not fit the shards, the nearest number that fits is taken, at least one per actor device
    if there is such a number.  The collector is the one that was measured to be faster on devices of that kind ("cpu",
    "gpu" …).

    Raises:
        UsageError: a number is out of its range.
    """
    _check_numbers(e)
    shards = e.num_shards or learner_devices
    e = dataclasses.replace(e, collector=e.collector or ("scanned" if platform == "cpu" else "stepped"))
    if e.num_actors is not None:
        return dataclasses.replace(e, num_shards=shards)

    def fits(a: int) -> bool:
        return (a % shards == 0 or shards % a == 0) and e.num_envs % a == 0 and a % num_processes == 0

    wanted = (1 if platform == "cpu" else 2) * actor_devices
    reach = min(max(wanted, shards) + wanted, e.num_envs, 10_000)  # a slip of the finger must not take for ever
    candidates = [a for a in range(1, reach + 1) if fits(a)] or [wanted]
    enough = [a for a in candidates if a >= actor_devices] or candidates
    actors = min(enough, key=lambda a: (abs(a - wanted), -a))
    return dataclasses.replace(e, num_actors=actors, num_shards=shards)


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
            require(count % p == 0, f"{name}={count} cannot be split over {p} processes; {self._remedy(name)}")
        require(
            a % k == 0 or k % a == 0,
            f"num_actors={a} and num_shards={k} do not fit: one must divide the other; {self._remedy('num_actors')}",
        )
        fewer = [str(d) for d in range(1, k // p + 1) if self._fits(n, a, k, p, d)]
        require(
            k // p % learners == 0,
            f"num_shards={k} gives each process {k // p}, which cannot be split over its {learners} learner devices; "
            + (f"use {' or '.join(fewer)} of them, or for another experiment " if fewer else "")
            + self._remedy("num_shards"),
        )

    @staticmethod
    def _fits(n: int, a: int, k: int, p: int, learners: int) -> bool:
        divides = n % a == 0 and n % k == 0 and a % p == 0 and k % p == 0 and (a % k == 0 or k % a == 0)
        return divides and k // p % learners == 0

    def _remedy(self, name: str) -> str:
        """Values that fit: of that one number if there are such, else of all three."""
        n, a, k, p, learners = astuple(self)
        numbers = {"num_envs": n, "num_actors": a, "num_shards": k}
        limit = 2 * (n + a + k) + p * learners

        def fits(m: int) -> bool:
            changed = numbers | {name: m}
            return self._fits(changed["num_envs"], changed["num_actors"], changed["num_shards"], p, learners)

        one = nearest(numbers[name], fits, limit)
        if one:
            return f"try {_flag(name)} {one}"
        shards = p * learners * max(1, round(k / (p * learners)))
        actors = p * max(d for d in range(1, shards // p + 1) if shards // p % d == 0 and p * d <= max(a, p))
        envs = shards * max(1, round(n / shards))
        return f"try --num-envs {envs} --num-actors {actors} --num-shards {shards}"

    @property
    def num_blocks(self) -> int:
        """The largest groups of environments that share both actor and shard; the unit in which rollouts travel."""
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
    def shards_per_learner(self) -> int:
        return self.num_shards // (self.num_processes * self.learners_per_process)

    def actor_envs(self, actor: int) -> range:
        return range(actor * self.envs_per_actor, (actor + 1) * self.envs_per_actor)

    def process_actors(self, process: int) -> range:
        n = self.num_actors // self.num_processes
        return range(process * n, (process + 1) * n)

    def process_shards(self, process: int) -> range:
        n = self.num_shards // self.num_processes
        return range(process * n, (process + 1) * n)


T = TypeVar("T", bound=Experiment | Placement | Run)


def to_json(config: Experiment | Placement | Run) -> Json:
    """A frozen dataclass as JSON values."""
    known_to_json = lambda v: not isinstance(v, Path) and not (isinstance(v, float) and not math.isfinite(v))
    return {k: v if known_to_json(v) else str(v) for k, v in dataclasses.asdict(config).items()}


def from_json(cls: type[T], values: Json) -> T:
    """The dataclass that `to_json` wrote; fields of another version are named.

    Raises:
        UsageError: a field is missing from `values`, or unknown.
    """
    fields = {f.name: f for f in dataclasses.fields(cls)}
    require(
        set(values) == set(fields),
        f"the experiment was written by another version of Cleanba: "
        f"its fields differ in {', '.join(sorted(set(values) ^ set(fields)))}; repeat the flags instead",
    )
    arguments: Json = {k: tuple(v) if isinstance(v, list) else v for k, v in values.items()}
    arguments |= {k: float(v) for k, v in values.items() if fields[k].type is float and isinstance(v, str)}  # "inf"
    return cls(**arguments)


def read_config(run_dir: Path) -> Json:
    """The config.json of an earlier run.

    Once, checkpoint_frequency also said when environments start afresh; what such a run has is read as both.

    Raises:
        UsageError: there is no such run.
    """
    config = read_json(run_dir / "config.json")
    e, run = config.get("experiment"), config.get("run")
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
    return experiment


def differences(a: Json, b: Json) -> list[str]:
    """The fields in which two experiments differ, as "name: value in a, value in b"."""
    a, b = (json.loads(json.dumps(x)) for x in (a, b))
    return [f"{k}: {a.get(k)}, now {b.get(k)}" for k in sorted(set(a) | set(b)) if a.get(k) != b.get(k)]


MOST_NAMED = 8  # differing settings in one sentence


def require_same(run_dir: Path, changed: list[str], flag: str = "--run-dir") -> None:
    """Raise `UsageError` if there are `differences` to the experiment that lives in a run's directory.

    `flag` is what chooses another directory.
    """
    # Another algorithm has other settings: to list them all would hide that.
    named = [field for field in changed if field.startswith("algorithm: ")] or changed[:MOST_NAMED]
    named += [f"{len(changed) - len(named)} more"] * (len(changed) > len(named))
    require(
        not changed,
        f"{run_dir} holds another experiment ({'; '.join(named)}); choose another {flag}, or repeat the flags of "
        "that run",
    )
