"""From what was typed to an experiment in which every field has a value.

A value comes from the first of these that has one:

1. what was typed, as a flag or as a keyword in Python; --preset NAME counts as typing all flags of that preset that
   were not typed themselves;
2. an earlier run: the one in the run's own directory, or that of --experiment and `resume`, whose whole experiment is
   taken; a typed value that differs from it is refused;
3. the preset for the environment with its options and wrappers (`preset_name`);
4. what the environment implies, and for the collector the platform (`inferred_values`);
5. the algorithm's default.

`num_actors`, `num_shards`, `num_minibatches` and `train_frequency` are lowered to what fits the rest, unless they were
typed.  Nothing depends on the number of devices or processes.
"""

import dataclasses
import itertools
import json
import os
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from cleanba import trust
from cleanba.algorithms.off_policy import OffPolicy
from cleanba.config import (
    MOST,
    Experiment,
    FromRollouts,
    Partition,
    Placement,
    PolicyGradient,
    Run,
    Settings,
    as_typed,
    check_values,
    differences,
    fields_of,
    flag,
    offered_fields,
    read_config,
    read_experiment,
    require,
    require_same,
    to_json,
    values_from_json,
)
from cleanba.environments.backends import check_limit, env_spec, why_unscannable
from cleanba.environments.common import stated_limit
from cleanba.errors import UsageError, largest_divisor
from cleanba.files import Json, expanded, read_json
from cleanba.networks import suitable_network
from cleanba.recipes import RECIPES, AnyRecipe, find_recipe, names_recipe
from cleanba.seeds import SEEDS
from cleanba.specs import EnvSpec

NAMED = "--preset "  # and its name
WHOLE = "run "  # and the run that the whole experiment comes from
TYPED, DEFAULT, ENVIRONMENT, DEVICE, FITTED, EARLIER = (
    "typed",
    "default",
    "environment",
    "kind of device",
    "lowered to fit",
    "earlier run",
)


class Resolved(NamedTuple):
    """An experiment in which every field has a value, and where the values come from."""

    experiment: Experiment
    """what is hashed, saved, compared and trained"""
    spec: EnvSpec
    """the specification of its environment"""
    preset: str
    """the name of its preset, --preset's or the environment's; "" where the algorithm has none for it"""
    origin: Mapping[str, str]
    """field -> where its value comes from: "typed", "--preset NAME", "preset NAME", "default", …"""

    @property
    def whole(self) -> str:
        """The run that the whole experiment was taken from, such as "run runs/a"; "" if from none."""
        return next((where for where in self.origin.values() if where.startswith(WHOLE)), "")

    def in_words(self, recipe: AnyRecipe) -> str:
        """Where the settings come from, in a few words."""
        count = sum(where == TYPED for where in self.origin.values())
        if self.whole and not count:
            return f"those of the {self.whole}"
        if TYPED not in self.origin.values() and DEFAULT not in self.origin.values():
            return f"those of the {min(self.origin.values())}"
        base = f"preset {self.preset}" if self.preset else f"the defaults of {recipe.name}"
        others = {where for where in self.origin.values() if where.startswith("preset ")} - {base}
        return base + "".join(f", then {other}" for other in others) + (f", and {count} typed" if count else "")


def resolve(recipe: AnyRecipe, typed: Mapping[str, Any], platform: str, spec: EnvSpec | None = None) -> Resolved:
    """The experiment that these values of an algorithm's fields ask for, on this platform ("cpu", "gpu" …).

    A value of None or "auto" leaves its field open.  `spec` is the environment's specification, if it is known.

    Raises:
        UsageError: there is no such field, a value is not allowed, or there is no such environment.
    """
    named, own = typed.get("preset"), typed
    typed = typed_values(recipe, typed)
    plain = recipe.experiment(**typed)
    check_values(plain)
    if spec is None:
        spec = env_spec(plain)
        check_limit(plain, spec)
    name = preset_name(spec)
    preset = recipe.presets.get(name)
    origin = dict.fromkeys(fields_of(recipe.experiment), DEFAULT)
    origin |= dict.fromkeys(preset or (), f"preset {name}")
    origin |= {field: TYPED if field in own else f"{NAMED}{named}" for field in typed}

    e = replace(plain, **{field: value for field, value in (preset or {}).items() if field not in typed})
    inferred = inferred_values(e, spec, platform, {field for field, where in origin.items() if where != DEFAULT})
    by_device = {"collector"} & set(inferred) if spec.scannable else set()
    if by_device and isinstance(e, FromRollouts) and not spec.shows_images:
        by_device.add("env_epoch")  # which follows the collector
    origin |= {field: DEVICE if field in by_device else ENVIRONMENT for field in inferred}
    e = replace(e, **inferred)
    require(
        e.collector != "scanned" or spec.scannable,
        f"collector=scanned {why_unscannable(spec)}; use --collector stepped, or leave it out",
    )
    fitted = fit_parts(recipe, e, typed)
    for field in ("num_actors", "num_shards", "num_minibatches", "train_frequency"):
        if getattr(fitted, field, None) != getattr(e, field, None):
            origin[field] = FITTED
    of_environment = name if preset is not None else ""
    return Resolved(fitted, spec._replace(clip_reward=fitted.reward_clip), named or of_environment, origin)


def typed_values(recipe: AnyRecipe, values: Mapping[str, Any]) -> dict[str, Any]:
    """The values that were typed, in the fields' own types, without None and "auto", which leave a field open.

    A value named "preset" stands for the settings of that preset, which the other values override.

    Raises:
        UsageError: there is no such field or preset, or a value has the wrong type.
    """
    values = {**named_settings(recipe, values.get("preset")), **{k: x for k, x in values.items() if k != "preset"}}
    known = fields_of(recipe.experiment)
    for name in values:
        require(name not in known or known[name].offered, f"{recipe.name} has no use for {name}; leave it out")
    try:
        return as_typed(recipe.experiment, without_open(values))
    except UsageError as error:
        raise UsageError(f"{recipe.name}: {error}") from None


def as_given(recipe: AnyRecipe, values: Mapping[str, Any]) -> dict[str, Any]:
    """`typed_values`, in which a preset is still a name.

    Raises:
        UsageError: there is no such field or preset, or a value has the wrong type.
    """
    typed, named = typed_values(recipe, values), values.get("preset")
    if named is None:
        return typed
    settings = named_settings(recipe, named)  # an explicit None for one of these stays, and leaves its field open
    return {name: typed.get(name) for name in values if name in typed or name in settings} | {"preset": named}


def named_settings(recipe: AnyRecipe, name: str | None) -> Settings:
    """The settings of the preset, or of the run, that --preset names; none for None.

    Raises:
        UsageError: the algorithm has no preset of that name, or the run is another algorithm's.
    """
    if name is None:
        return Settings()
    known = recipe.named_presets()
    run_dir = expanded(name) if isinstance(name, str) and name not in known else None
    if run_dir is not None and os.path.isfile(run_dir / "config.json"):
        try:
            earlier, e = read_recipe(run_dir)
        except UsageError as refused:  # --trust-remote-code does not hold for presets
            text = str(refused).removesuffix(trust.REMEDY)
            raise UsageError(text if text == str(refused) else f"{text}repeat its flags instead") from None
        require(earlier.name == recipe.name, f"preset={name} is a run of {earlier.name}; name a run of {recipe.name}")
        origin = read_config(run_dir).get("origin", {})
        left = {field for field in fields_of(type(e)) if field in OF_ONE_RUN or origin.get(field) in IMPLIED}
        return Settings({field: value for field, value in offered(e).items() if field not in left})
    require(
        isinstance(name, str) and name in known,
        f"preset={str(name)[:40]!r} is not a preset of {recipe.name}; use {', '.join(known)}, or the "
        "directory of a run, for its settings",
    )
    return known[name]


OF_ONE_RUN = ("seed", "init_from")  # fields that --preset RUN does not take from that run
IMPLIED = (ENVIRONMENT, DEVICE, FITTED)  # nor those that follow from others, which flags may change


def without_open(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values without None and "auto", which leave a field open."""
    return {name: x for name, x in values.items() if x is not None and x != "auto"}


def preset_name(spec: EnvSpec) -> str:
    """The preset for an environment, chosen by its observations and actions, not by its name.

    The library's family of environments decides only between those that look alike: LunarLander and CartPole both show
    vectors and take a few actions.
    """
    shown = {part.kind for part in jax.tree.leaves(spec.obs)} - {"mask"}
    if spec.action.kind == "quantities":
        return "continuous"
    if spec.is_atari:
        return "atari"
    if "image" in shown:
        return "images"
    if "planes" in shown:
        return "minatar"
    family = re.split("[.:]", spec.family)
    if "codes" in shown or "minigrid" in family:
        return "minigrid"
    if "box2d" in family:
        return "box2d"
    whole = all(np.issubdtype(part.dtype, np.integer) for part in jax.tree.leaves(spec.obs))
    if shown <= {"discrete"} or ("toy_text" in family and whole):  # not Catch, which shows a board of real numbers
        return "toy_text"
    return "classic_control"


def inferred_values(e: Experiment, spec: EnvSpec, platform: str, given: Collection[str]) -> dict[str, Any]:
    """Values for the fields that follow from the environment, or from the platform, and were not `given`."""
    found = dict(inferred_from_env(e, spec, given))
    if "collector" not in given:  # the faster one, as measured
        found["collector"] = "scanned" if spec.scannable and (spec.on_device or platform == "cpu") else "stepped"
    if "env_epoch" not in given:
        collector = found.get("collector", e.collector)
        # An episode longer than an epoch of environments would never end.
        longest = max(found.get("max_episode_steps", e.max_episode_steps), spec.time_limit or 0, 8_000)
        epoch = max(type(e).env_epoch, -(-2 * longest // e.num_steps))
        if collector == "scanned" and not spec.shows_images and isinstance(e, FromRollouts):
            epoch = max(epoch, 4_000_000 // e.transitions_per_update)  # updates are short
        found["env_epoch"] = min(epoch, MOST)
    return found


def inferred_from_env(e: Experiment, spec: EnvSpec, given: Collection[str]) -> dict[str, Any]:
    """Values for the fields that follow from the environment alone and were not `given`."""
    found: dict[str, Any] = {}
    limit = stated_limit(spec.options.get("max_episode_steps")) or 0
    if limit != e.max_episode_steps:  # 0 means the environment's own limit, which is now known
        found["max_episode_steps"] = limit
    if "network" not in given:
        found["network"] = suitable_network(spec.obs)
    if "reward_clip" not in given:
        found["reward_clip"] = spec.is_atari
    if "share_torso" not in given and isinstance(e, PolicyGradient):
        found["share_torso"] = spec.action.kind != "quantities" or spec.shows_images
    return found


def fit_parts(recipe: AnyRecipe, e: Any, typed: Collection[str]) -> Experiment:
    """The experiment with actors, shards and minibatches lowered to what fits, except those that were `typed`.

    `train_frequency` is lowered, too: to the largest divisor of the number of environment steps in an update.

    A recurrent network's minibatches hold whole environments.  Where nothing fits, there is one actor and one shard, so
    that the error is about what was typed.
    """
    recurrent = isinstance(e, FromRollouts) and e.core != "none"
    if recurrent and "num_minibatches" not in typed and e.num_minibatches > e.num_envs:
        most = min(e.num_envs, FromRollouts.num_minibatches)
        e = replace(e, num_minibatches=largest_divisor(e.num_envs, most))
    if isinstance(e, OffPolicy) and "train_frequency" not in typed:
        e = replace(e, train_frequency=largest_divisor(e.transitions_per_update, e.train_frequency))
    names = [name for name in ("num_minibatches", "num_shards", "num_actors") if hasattr(e, name)]
    numbers = [[getattr(e, name)] if name in typed else range(getattr(e, name), 0, -1) for name in names]
    for chosen in itertools.product(*numbers):
        candidate = replace(e, **dict(zip(names, chosen, strict=True)))
        if candidate.transitions_per_update % getattr(candidate, "num_minibatches", 1):
            continue
        try:
            recipe.check(candidate, Partition(e.num_envs, candidate.num_actors, candidate.num_shards))
        except UsageError:
            continue
        return candidate
    return replace(e, **{name: 1 for name in ("num_shards", "num_actors") if name not in typed})


# ------------------------------------------------------------------------------------------------- what was run before

# Fields that some algorithm no longer has -> the value with which the field had no effect (None: any).
GONE: dict[str, Any] = {"core": "none", "lstm_size": None, "forget_bias": None}


def known_of(recipe: AnyRecipe, values: Json) -> dict[str, Any]:
    """The fields that an experiment in config.json has a value for, whichever version of Cleanba wrote it.

    Raises:
        UsageError: it has a field that this version does not know.
    """
    fields = fields_of(recipe.experiment)
    gone = {name for name in values if name not in fields and name in GONE and GONE[name] in (None, values[name])}
    unknown = sorted(set(values) - set(fields) - gone)
    require(
        not unknown,
        "the experiment was written by another version of Cleanba, with settings that this one does not know "
        f"({', '.join(unknown)}); repeat the flags instead",
    )
    return values_from_json(recipe.experiment, without_open(values))


def earlier_experiment(recipe: AnyRecipe, values: Json, source: str | None = None) -> Experiment:
    """The experiment of an earlier run, from config.json, with every field as the run had it.

    A field that the file lacks did not exist when it was written, and gets the algorithm's default, which changes
    nothing.  Fields that the file left open are inferred from the environment again.  A run from elsewhere, `source`,
    is checked first (`trust.py`).

    Raises:
        UsageError: it has a field that this version does not know, or is from elsewhere and chooses something that such
            a run may not choose.
    """
    if source is not None:
        trust.check_values(recipe.experiment, without_open(values), source)
    known = known_of(recipe, values)
    e = recipe.experiment(**known)
    if source is not None:
        check_values(e)
        trust.check_environment(e, source)
    left_open = {"network", "reward_clip", "share_torso", "max_episode_steps"} & set(fields_of(type(e)))
    return e if left_open <= set(known) else replace(e, **inferred_from_env(e, env_spec(e), known))


def read_recipe(run_dir: Path, trust_remote_code: bool = False) -> tuple[AnyRecipe, Experiment]:
    """An earlier run's algorithm and experiment.

    Those of a run from elsewhere are checked first, unless `trust_remote_code` (`trust.py`).

    Raises:
        UsageError: there is no such run, it has a field that this version does not know, or it is from elsewhere and
            chooses something that such a run may not choose.
    """
    values = read_experiment(run_dir)
    algorithm = values.pop("algorithm")
    require(
        names_recipe(algorithm), f"{run_dir} is a run of {algorithm[:40]!r}; this version has only {', '.join(RECIPES)}"
    )
    source = None if trust_remote_code else trust.source_of(run_dir)
    if source is not None:
        trust.check_algorithm(algorithm, algorithm in RECIPES, source)
    recipe = find_recipe(algorithm)
    return recipe, earlier_experiment(recipe, values, source)


def taken_whole(recipe: AnyRecipe, e: Experiment, source: Path, platform: str) -> Resolved:
    """The whole experiment of an earlier run, as `read_whole` has read it from `source`."""
    resolved = resolve(recipe, offered(e), platform, env_spec(e))
    earlier = read_config(source).get("origin", {})
    whence = {name: earlier[name] if earlier.get(name) in IMPLIED else f"{WHOLE}{source}" for name in resolved.origin}
    return resolved._replace(experiment=e, origin=whence)


def read_whole(recipe: AnyRecipe, source: Path, trust_remote_code: bool = False) -> Experiment:
    """`read_recipe` for a run that must be of this algorithm."""
    earlier, e = read_recipe(source, trust_remote_code)
    require(
        earlier.name == recipe.name, f"--experiment {source} is a run of {earlier.name}; use `cleanba {earlier.name}`"
    )
    return e


def offered(e: Experiment) -> dict[str, Any]:
    """The fields of an experiment that could be typed."""
    return {name: getattr(e, name) for name in offered_fields(type(e))}


RECORD = "init_from.json"  # in a run's directory: where the parameters that it started from were found


def completed(experiment: Json) -> Json:
    """A recorded experiment, with the algorithm's defaults for fields that its version did not have."""
    recipe = RECIPES.get(experiment["algorithm"])
    defaults = {} if recipe is None else json.loads(json.dumps(to_json(recipe.experiment())))
    return {**defaults, **experiment}


def recorded(run_dir: Path | None) -> dict[str, str]:
    """The digest and place of the parameters that a run started from, as its directory records them; {} if none."""
    path = run_dir / RECORD if run_dir is not None else None
    return read_json(path) if path is not None and path.exists() else {}


def longer(recipe: AnyRecipe, e: Experiment, wanted: Experiment, run_dir: Path) -> Experiment:
    """The experiment that is `wanted` if it only makes the run in `run_dir` longer; else that run's own, `e`.

    Raises:
        UsageError: a setting follows the length of the run, so a longer one has other bits from the beginning; or a
            user's algorithm does not say so of its settings.
    """
    steps = e.total_timesteps
    if wanted.total_timesteps <= steps or replace(wanted, total_timesteps=steps) != e:
        return e
    own = type(e) not in [known.experiment for known in RECIPES.values()]
    require(
        recipe.name in RECIPES or (own and "schedules" in vars(type(e))),
        f"{run_dir} cannot be made longer, because {recipe.name} does not say which settings depend on a run's length; "
        f"define `schedules` in {'its' if own else 'a subclass of'} {type(e).__name__} (docs/guides/own-loss.md), or "
        f"start a new run with --init-from {run_dir}",
    )
    depends = "depends" if len(e.schedules) == 1 else "depend"
    require(
        not e.schedules,
        f"{run_dir} cannot be made longer than its {steps:,} steps, which {' and '.join(map(flag, e.schedules))} "
        f"{depends} on; to train it further, start a new run with --init-from {run_dir}",
    )
    return wanted


def continue_experiment(recipe: AnyRecipe, now: Resolved, run_dir: Path, flag: str = "--run-dir") -> Resolved:
    """The experiment in a run's directory, if the one resolved `now` continues it; `now` if it holds no run.

    It continues the run if no typed value, old or new, differs.  All other values are those of config.json,
    whatever this version of Cleanba would choose.

    Raises:
        UsageError: the directory holds another experiment.  `flag` is the flag that chooses another directory.
    """
    if not (run_dir / "config.json").exists():
        return now
    values = read_experiment(run_dir)
    if values["algorithm"] != recipe.name:
        require_same(run_dir, differences(values, {"algorithm": recipe.name, **to_json(now.experiment)}), flag)
    del values["algorithm"]
    began = recorded(run_dir)
    if began and began["from"] == now.experiment.init_from:  # config.json has their digest
        now = now._replace(experiment=replace(now.experiment, init_from=began["digest"]))
    e = earlier_experiment(recipe, values, trust.source_of(run_dir))
    origin = read_config(run_dir).get("origin", {})
    # Values that came from --preset count as typed, and so do all of an experiment that was taken whole.
    wheres = [(name, str(where)) for name, where in (*now.origin.items(), *origin.items())]
    whole = any(where.startswith(WHOLE) for _, where in wheres)
    was_typed = {name for name, where in wheres if whole or where == TYPED or where.startswith(NAMED)}
    only = lambda values: {name: value for name, value in values.items() if name in was_typed}
    if now.origin["total_timesteps"] == TYPED:
        typed = {name: getattr(now.experiment, name) for name in was_typed & now.origin.keys()}
        e = longer(recipe, e, replace(e, **typed), run_dir)
    require_same(run_dir, differences(only(to_json(e)), only(to_json(now.experiment))), flag)
    same = e == now.experiment
    spec = now.spec if same else env_spec(e)
    named = [where.removeprefix(NAMED) for where in origin.values() if where.startswith(NAMED)]
    preset = named[0] if named else now.preset if same else ""
    return Resolved(e, spec, preset, {name: origin.get(name, EARLIER) for name in now.origin})


# ------------------------------------------------------------------------------------------------------ what was asked


@dataclass(frozen=True)
class Config:
    """Everything that a training command, or `train` in Python, was given."""

    asked: Experiment
    """the algorithm's defaults with the typed values in their place, or an earlier run's experiment: enough for what
    must be known before a device is touched"""
    typed: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """the experiment's fields that were typed, and under "preset" the name that --preset gives"""
    placement: Placement = dataclasses.field(default_factory=Placement)
    run: Run = dataclasses.field(default_factory=Run)
    whole: Path | None = None
    """the run whose whole experiment is taken"""


def configure(
    recipe: AnyRecipe,
    typed: Mapping[str, Any],
    placement: Placement,
    run: Run,
    whole: Path | None = None,
    locate: Callable[[str], Path] = Path,
) -> Config:
    """The configuration, with each value checked by itself.  `whole` names a run to take the whole experiment from.

    `locate` finds the directory of the run that --experiment names.

    Raises:
        UsageError: a value is not allowed, there is no such field or run, or what was typed contradicts that run.
    """
    if whole is None and run.experiment_from is not None:
        whole = locate(run.experiment_from)
    if whole is None and began_with(run.run_dir, typed.get("preset")) and lost_preset(recipe, typed["preset"]):
        whole, typed = run.run_dir, {name: x for name, x in typed.items() if name != "preset"}
    given, typed = as_given(recipe, typed), typed_values(recipe, typed)
    asked = recipe.experiment(**typed)
    for group in (asked, placement, run):
        check_values(group)
    options = [option.partition("=")[0] for option in typed.get("env_options", ())]
    for name in options:
        require(options.count(name) == 1, f"env_options names {name} twice; give one value for it")
        require(name not in typed, f"env_options names {name}, which {flag(name)} gives, too; leave one of them out")
        own = ":" not in asked.env_id and name in ("repeat_action_probability", "full_action_space", "episodic_life")
        require(not own, f"env_options names {name}, which has a flag of its own; give {flag(name)} instead")
    if whole is not None:
        asked = read_whole(recipe, whole, run.trust_remote_code)
        if typed.get("init_from") and recorded(whole).get("from") == typed["init_from"]:
            typed = {**typed, "init_from": asked.init_from}  # the digest of the parameters at that place
        wanted = replace(asked, **typed)
        if whole == run.run_dir:
            asked = longer(recipe, asked, wanted, whole)
        changed = differences(to_json(asked), to_json(wanted))
        require(
            not changed,
            f"the whole experiment is taken from {whole}, but flags change it ({'; '.join(changed)}); leave these "
            f"flags out, or take that run's settings with --preset {whole}, which flags may change",
        )
    return Config(asked, given, placement, replace(run, exp_name=run.exp_name or recipe.name.replace(":", "-")), whole)


def began_with(run_dir: Path | None, preset: str | None) -> bool:
    """Whether a run has begun in that directory with settings of this preset, or of this run."""
    if run_dir is None or preset is None or not (run_dir / "config.json").exists():
        return False
    return f"{NAMED}{preset}" in read_config(run_dir).get("origin", {}).values()


def lost_preset(recipe: AnyRecipe, name: str) -> bool:
    """Whether --preset names a run that is no longer there."""
    return name not in recipe.named_presets() and not os.path.isfile(expanded(name) / "config.json")


def resolve_in(
    recipe: AnyRecipe, config: Config, platform: str, run_dir: Path | None, spec: EnvSpec | None = None
) -> Resolved:
    """`resolve` what was typed.  A run that has begun in `run_dir` keeps a limit that would be refused today."""
    if spec is None and run_dir is not None and (run_dir / "config.json").exists():
        spec = env_spec(config.asked)
    return resolve(recipe, config.typed, platform, spec)


def settle(recipe: AnyRecipe, config: Config, platform: str, run_dir: Path | None) -> Resolved:
    """The experiment that a command asks for, on this platform, in a directory that may hold a run already.

    Raises:
        UsageError: the experiment cannot be resolved, or the directory holds another one.
    """
    if config.whole is not None:
        resolved = taken_whole(recipe, config.asked, config.whole, platform)
        typed = dict.fromkeys(config.typed.keys() & resolved.origin.keys(), TYPED)  # without "preset"
        resolved = resolved._replace(origin={**resolved.origin, **typed})
    else:
        resolved = resolve_in(recipe, config, platform, run_dir)
    return resolved if run_dir is None else continue_experiment(recipe, resolved, run_dir)


def fit(recipe: AnyRecipe, e: Experiment, placement: Placement, processes: int = 1) -> Partition:
    """The partition of an experiment's environments under a placement.

    Raises:
        UsageError: it does not fit.
    """
    for name, ids in (("actor", placement.actor_device_ids), ("learner", placement.learner_device_ids)):
        require(bool(ids), f"--{name}-device-ids names no device; name one, such as 0")
        given = " ".join(map(str, ids))
        require(len(set(ids)) == len(ids), f"--{name}-device-ids={given} names a device twice; name each once")
    partition = Partition(e.num_envs, e.num_actors, e.num_shards, processes, len(placement.learner_device_ids))
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
    require_seeds(e)
    recipe.check(e, partition)
    return partition


def require_seeds(e: Experiment) -> None:
    """Raise `UsageError` unless there is a seed for each environment of each epoch."""
    epochs = -(-e.num_updates // e.env_epoch) if e.env_epoch else 1
    least = -(-e.num_updates // (SEEDS // e.num_envs))
    require(
        epochs * e.num_envs <= SEEDS,
        f"env_epoch={e.env_epoch} gives {e.num_envs} environments new seeds {epochs} times in {e.num_updates} updates, "
        f"but there are only 2^30 seeds; try --env-epoch {least}",
    )
