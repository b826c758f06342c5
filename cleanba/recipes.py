"""The table of algorithms, and the way from flags, or from an earlier run, to a configuration that fits."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, make_dataclass, replace
from pathlib import Path
from typing import Any, Generic, NamedTuple

import tyro

from cleanba.algorithm import Algorithm
from cleanba.algorithms import dqn, impala, ppo, sac, td3
from cleanba.config import (
    E,
    Experiment,
    Partition,
    Placement,
    PolicyGradient,
    Run,
    differences,
    from_json,
    read_experiment,
    require,
    resolve,
    to_json,
)
from cleanba.environments.kinds import kind, why_unscannable
from cleanba.environments.specs import EnvSpec
from cleanba.errors import UsageError
from cleanba.flags import FLAGS
from cleanba.trust import check_environment, check_values, source_of


class Play(NamedTuple):
    """How an agent acts when it is evaluated."""

    greedy: bool = False
    """by the best action it knows, not as it explores"""
    epsilon: float = 0.0
    """probability of a uniformly random action in place of its own"""

    def in_words(self) -> str:
        """How actions are chosen, as evaluations and reports say it."""
        words = "likeliest actions" if self.greedy else "actions drawn from the policy"
        return words + (f", but for {self.epsilon:.3g} of chance" if self.epsilon else "")


class Recipe(NamedTuple, Generic[E]):
    """An algorithm as the command knows it."""

    name: str
    about: str
    experiment: type[E]
    check: Callable[[E, Partition], None]
    """experiment, partition; raises `UsageError` for hyperparameters that do not fit"""
    make: Callable[[E, EnvSpec, str], Algorithm]
    """experiment, what the environment looks like, kind of device -> the algorithm"""
    plays: Play = Play()
    """how it is evaluated where no flag says otherwise"""
    defaults: Callable[[str], E] | None = None
    """kind of environment -> the settings where no flag says otherwise; None if one kind is as another"""

    def settings(self, env_id: str, core: str = "none") -> Experiment:
        """The settings for an environment, with a core or none, where no flag says otherwise."""
        e = self.defaults(kind(env_id)) if self.defaults else self.experiment()
        if core != "none" and isinstance(e, PolicyGradient) and e.num_minibatches > e.num_envs:
            e = replace(e, num_minibatches=PolicyGradient.num_minibatches)  # they hold whole environments
        return e


# Each of them fits together, for its own kind of experiment; whoever takes one from the table cannot know which.
RECIPES: dict[str, Recipe[Any]] = {
    "ppo": Recipe(
        "ppo",
        "train with proximal policy optimisation",
        ppo.PPO,
        ppo.check,
        ppo.make,
        defaults=ppo.defaults,
    ),
    "impala": Recipe(
        "impala",
        "train with IMPALA and V-trace",
        impala.IMPALA,
        impala.check,
        impala.make,
        defaults=impala.defaults,
    ),
    "dqn": Recipe(
        "dqn",
        "train with deep Q-learning and replay",
        dqn.DQN,
        dqn.check,
        dqn.make,
        Play(greedy=True, epsilon=0.05),  # as CleanRL evaluates it; a policy without chance may run in circles
        dqn.defaults,
    ),
    "sac": Recipe(
        "sac",
        "train with soft actor-critic and replay",
        sac.SAC,
        sac.check,
        sac.make,
        Play(greedy=True),
    ),
    "td3": Recipe(
        "td3",
        "train with twin delayed deep deterministic policy gradients and replay",
        td3.TD3,
        td3.check,
        td3.make,
        Play(greedy=True),
    ),
}


@dataclass(frozen=True)
class Config:
    """All flags of a training command."""

    experiment: Experiment
    placement: Placement = field(default_factory=Placement)
    run: Run = field(default_factory=Run)


def config_type(recipe: Recipe) -> type:
    """`Config` with the experiment of one algorithm."""
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


def parse(recipe: Recipe, argv: Sequence[str], default: Config | None = None) -> Config:
    """Flags -> configuration.  tyro prints its own message and exits with 2 for flags it cannot read.

    `default` holds the configuration of a run to go on with.

    Raises:
        UsageError: --experiment names no run of this algorithm, or flags change an experiment that was given whole.
    """
    refuse_foreign_flags(recipe, argv)
    form = config_type(recipe)
    source = word_after("--experiment", argv)
    if default is None and source is not None:
        earlier_recipe, experiment = read_recipe(Path(source), "--trust-remote-code" in argv)
        name = earlier_recipe.name
        require(name == recipe.name, f"--experiment {source} is a run of {name}; use `cleanba {name}`")
        default = form(experiment=experiment)
    chosen = word_after("--env-id", argv) or recipe.experiment.env_id, word_after("--core", argv) or "none"
    parsed: Any = tyro.cli(
        form,
        args=argv,
        prog=f"cleanba {recipe.name}",
        registry=FLAGS,
        default=default or form(experiment=recipe.settings(*chosen)),
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


# What those who come from elsewhere may type, and what to do in its place; looked up only where there is no such flag.
FOREIGN_FLAGS = {
    "--learning-rate": "set --policy-lr and --q-lr",
    "--policy-lr": "set --learning-rate",
    "--q-lr": "set --learning-rate",
    "--local-num-envs": "set --num-envs, which counts over the whole experiment",
    "--num-actor-threads": "set --num-actors, which counts over the whole experiment",
    "--gradient-accumulation-steps": "set --num-shards: shards on one device are computed one after the other",
    "--cuda": "set JAX_PLATFORMS=cpu or JAX_PLATFORMS=cuda in the environment",
    "--torch-deterministic": "set --deterministic, which is on by default",
    "--target-kl": "leave it out",
    "--clip-vloss": "leave it out: values are not clipped",
    "--target-network-frequency": "targets move each time the policy learns; set --tau, or --policy-frequency",
    "--lr": "set --learning-rate, or for SAC --policy-lr and --q-lr",
    "--env": "set --env-id",
    "--timesteps": "set --total-timesteps",
}


def refuse_foreign_flags(recipe: Recipe, argv: Sequence[str]) -> None:
    """Raise `UsageError` for a flag of other systems that is called otherwise here, or is not there."""
    own = {f.name for part in (recipe.experiment, Placement, Run) for f in fields(part)}
    for word in argv:
        flag = word.partition("=")[0].replace("_", "-").replace("--no-", "--")
        remedy = FOREIGN_FLAGS.get(flag)
        if remedy and flag[2:].replace("-", "_") not in own:
            raise UsageError(f"{recipe.name} has no {flag}; {remedy}")


def word_after(flag: str, argv: Sequence[str]) -> str | None:
    """The value of a flag, read before tyro reads them all; as there, the last one counts, and _ is as good as -."""
    found = None
    for i, word in enumerate(argv):
        name, eq, value = word.partition("=")
        if name.replace("_", "-") == flag:
            require(bool(eq) or i + 1 < len(argv), f"{flag} needs a value")
            found = value if eq else argv[i + 1]
    return found


def read_recipe(run_dir: Path, trust_remote_code: bool = False) -> tuple[Recipe, Experiment]:
    """An earlier run's algorithm and experiment.

    Of a run from elsewhere they are checked first, unless `trust_remote_code`: see `trust.py`.

    Raises:
        UsageError: there is no such run, it was written by another version, or it is from elsewhere and chooses what
            such a run may not choose.
    """
    values = read_experiment(run_dir)
    algorithm = values.pop("algorithm")
    known = isinstance(algorithm, str) and algorithm in RECIPES
    require(known, f"{run_dir} is a run of {str(algorithm)[:40]!r}; this version knows {', '.join(RECIPES)}")
    recipe = RECIPES[algorithm]
    source = None if trust_remote_code else source_of(run_dir)
    if source is not None:
        check_values(recipe.experiment, values, source)
    e = from_json(recipe.experiment, values)
    if source is not None:
        check_environment(e, source)
    return recipe, e


def suit(e: Experiment, asked: str | None, spec: EnvSpec) -> Experiment:
    """The experiment with what is left to its environment filled in: epochs, and a collector if none was `asked`.

    Raises:
        UsageError: the collector that was asked for does not fit.
    """
    require(
        asked != "scanned" or spec.scannable,
        f"collector=scanned {why_unscannable(spec)}; use --collector stepped, or leave it out",
    )
    if not spec.scannable:
        e = replace(e, collector="stepped")
    elif spec.on_device and asked is None:
        e = replace(e, collector="scanned")
    if e.env_epoch is not None:
        return e
    # An episode that is longer than an epoch of environments would never end.
    longest = e.max_episode_steps or (27_000 if spec.is_atari else 8_000)
    epoch = max(e.updates_per_epoch, -(-2 * longest // e.num_steps))
    if e.collector == "scanned" and not spec.shows_images and isinstance(e, PolicyGradient):
        # Updates are short.
        epoch = max(epoch, 4_000_000 // e.transitions_per_update)
    return replace(e, env_epoch=epoch)


# What `config.resolve` and `suit` fill in, from the devices and the environment.
RESOLVED = ("num_actors", "num_shards", "collector", "env_epoch")


def stand_by(algorithm: str, e: Experiment, run_dir: Path) -> tuple[Experiment, list[str]]:
    """What the first run in a directory resolved stands, so that it goes on wherever it is placed next.

    Returns the experiment with that filled in where nothing was typed, and in what that which was typed differs.
    """
    if not (run_dir / "config.json").exists():
        return e, []
    earlier = read_experiment(run_dir)
    left_out = {name: earlier[name] for name in RESOLVED if getattr(e, name) is None and earlier.get(name) is not None}
    typed = {name: value for name, value in to_json(e).items() if name not in left_out}
    changed = differences({k: v for k, v in earlier.items() if k not in left_out}, {"algorithm": algorithm, **typed})
    return (e if changed else replace(e, **left_out)), changed


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
        f"total_timesteps={e.total_timesteps} is less than one update's {e.transitions_per_update} "
        f"({e.num_envs} environments x {e.num_steps} steps); try --total-timesteps {e.transitions_per_update}",
    )
    require(
        e.num_updates < 2**31,
        f"total_timesteps={e.total_timesteps} makes {e.num_updates} updates, more than can be counted; "
        f"try --total-timesteps {(2**31 - 1) * e.transitions_per_update}",
    )
    run = config.run
    workers = config.placement.env_workers
    require(workers is None or workers >= 0, f"env_workers={workers} must not be negative; 0 means no processes")
    require(run.log_frequency >= 1, f"log_frequency={run.log_frequency} must be at least 1")
    f = run.checkpoint_frequency
    require(f is None or f >= 0, f"checkpoint_frequency={f} must not be negative; 0 means never")
    require(run.keep_checkpoints >= 1, f"keep_checkpoints={run.keep_checkpoints} must be at least 1")
    require(run.profile >= 0, f"profile={run.profile} must not be negative; 0 records nothing")
    require(run.stall_timeout >= 1, f"stall_timeout={run.stall_timeout} must be at least 1 (seconds); inf means never")
    require(0 <= run.grace_period <= 1e6, f"grace_period={run.grace_period} must lie in [0, 1e6]; 0 means at once")
    recipe.check(e, partition)
    return e, partition
