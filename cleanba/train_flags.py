"""Parses the flags of a training command, and prints --help and --show-config."""

import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import field, fields, make_dataclass
from io import StringIO
from pathlib import Path
from typing import Any

import tyro

from cleanba.arguments import read_words
from cleanba.config import (
    Experiment,
    Group,
    Placement,
    Run,
    fields_of,
    offered_fields,
    require,
)
from cleanba.errors import Failure, UsageError
from cleanba.help import HELP, entry, flag_lines, help_width, paragraphs
from cleanba.recipes import AnyRecipe
from cleanba.resolution import DEFAULT, EARLIER, TYPED, Config, Resolved, configure, fit, settle
from cleanba.runtime.devices import default_platform
from cleanba.runtime.training_log import LOGGED

SHOW = "--show-config"
PRESET = "--preset"


def parse(
    recipe: AnyRecipe, argv: Sequence[str], default: Config | None = None, locate: Callable[[str], Path] = Path
) -> Config:
    """Parse a command's arguments.

    --help, --help-all and --show-config print and exit with 0.  `default` is the configuration of a run to resume, and
    `locate` finds the directory of the run that --experiment names.

    Raises:
        UsageError: a flag is unknown, a value is not allowed, --experiment names no run of this algorithm, or flags
            would change an experiment that is repeated or resumed.
    """
    words = [word for word in argv if word not in (*HELP, SHOW)]
    asked_for = [word for word in argv if word in (*HELP, SHOW)]
    if asked_for and asked_for[0] in HELP:
        print(help_text(recipe, words, default, asked_for[0] == "--help-all", locate))
        raise SystemExit(0)
    config = read_flags(recipe, words, default, locate)
    if asked_for:
        print(config_text(recipe, config, typed_names(recipe, words)))
        raise SystemExit(0)
    return config


def read_flags(
    recipe: AnyRecipe, words: Sequence[str], default: Config | None, locate: Callable[[str], Path]
) -> Config:
    """`parse`, without --help and --show-config."""
    words, left_open = in_one_form(recipe, words)
    named, words = preset_of(recipe, words)
    form = make_dataclass(
        "Form",
        [
            ("experiment", recipe.experiment, field(default_factory=recipe.experiment)),
            ("placement", Placement, field(default_factory=Placement)),
            ("run", Run, field(default_factory=Run)),
        ],
        frozen=True,
    )
    before = form(default.asked, default.placement, default.run) if default else form()
    own = {name for group in (recipe.experiment, Placement, Run) for name in offered_fields(group)}
    if words and not words[0].startswith("-") and "=" not in words[0]:
        remedy = "leave it out" if default else f"write --env-id {words[0]}"  # a run's experiment stays as it is
        raise UsageError(f"{words[0]} has no flag before it; {remedy}")
    parsed: Any = read_words(
        form,
        words,
        recipe.name,
        own,
        lambda unknown: remedy_for(unknown, own),
        default=before,
        config=(tyro.conf.OmitArgPrefixes,),
    )
    typed = {
        name: getattr(parsed.experiment, name)
        for name in typed_names(recipe, words) & set(offered_fields(recipe.experiment))
    }
    given = {"preset": named} | dict.fromkeys(left_open if named else ()) | typed
    return configure(recipe, given, parsed.placement, parsed.run, default.whole if default else None, locate)


def preset_of(recipe: AnyRecipe, words: Sequence[str]) -> tuple[str | None, list[str]]:
    """The name that --preset gives, and the other arguments.

    Raises:
        UsageError: the flag has no value.
    """
    name, others, rest = None, [], list(words)
    while rest:
        word = rest.pop(0)
        before, eq, value = word.partition("=")
        if before != PRESET:
            others.append(word)
            continue
        require(bool(eq or rest), f"{PRESET} needs a name; {recipe.name} has {', '.join(recipe.named_presets())}")
        name = value if eq else rest.pop(0)
    return name, others


def typed_names(recipe: AnyRecipe, words: Sequence[str]) -> set[str]:
    """The fields of all three groups that these arguments set."""
    known = {name for group in (recipe.experiment, Placement, Run) for name in fields_of(group)}
    names = {word[2:].partition("=")[0].replace("-", "_") for word in words if word.startswith("--")}
    names |= {"experiment_from"} if "experiment" in names else set()
    return known & (names | {name.removeprefix("no_") for name in names})


def in_one_form(recipe: AnyRecipe, argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Rewrite arguments to tyro's form: CleanRL's "--anneal-lr False" becomes --no-anneal-lr.

    A flag of the experiment whose value is auto or None, as in "--network auto", leaves its field open: it is dropped,
    and so are earlier values of the same flag.  Returns the arguments, and the fields that were left open.
    """
    of_experiment = fields_of(recipe.experiment)
    known = of_experiment | fields_of(Placement) | fields_of(Run)
    words: list[str] = []
    left_open: list[str] = []
    rest = list(argv)
    while rest:
        word = rest.pop(0)
        name, eq, value = word.partition("=")
        field_name = name[2:].replace("-", "_")
        about = known.get(field_name) if name.startswith("--") else None
        value = value if eq else rest[0] if rest else ""
        if about is not None and field_name in of_experiment and value in ("auto", "None"):
            rest = rest if eq else rest[1:]
            words = without_flag(words, field_name)
            if about.offered and field_name not in left_open:
                left_open.append(field_name)
            continue
        if field_name in left_open:  # given again
            left_open.remove(field_name)
        if about is not None and about.annotation is bool and value.lower() in ("true", "false"):
            rest = rest if eq else rest[1:]
            words.append(name if value.lower() == "true" else f"--no-{name[2:]}")
        elif about is not None and about.annotation is bool and value and (eq or not value.startswith("-")):
            raise UsageError(f"{name} {value}: a value of {name} must be true or false; give {name} or --no-{name[2:]}")
        else:
            words.append(word)
    return words, left_open


def without_flag(words: Sequence[str], name: str) -> list[str]:
    """Arguments without this field's flag and its values."""
    kept: list[str] = []
    dropping = False
    for word in words:
        if word.startswith("--"):
            dropping = word[2:].partition("=")[0].removeprefix("no-").replace("-", "_") == name
        if not dropping:
            kept.append(word)
    return kept


# Flags of other systems -> what to do instead.  Consulted only if the algorithm has no such flag.
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
    "--target-network-frequency": "TD3's targets move each time its policy learns: set --tau or --policy-frequency; "
    "PPO, IMPALA and PQN have no target network: leave it out",
    "--lr": "set --learning-rate, or for SAC --policy-lr and --q-lr",
    "--core": "its replay draws single transitions, so recurrence cannot be trained: leave it out",
    "--lstm-size": "its replay draws single transitions, so recurrence cannot be trained: leave it out",
    "--forget-bias": "its replay draws single transitions, so recurrence cannot be trained: leave it out",
    "--repeat-action-probability": "Atari's actions are discrete: leave it out",
    "--full-action-space": "Atari's actions are discrete: leave it out",
    "--episodic-life": "Atari's actions are discrete: leave it out",
    "--env": "set --env-id",
    "--env-name": "set --env-id",
    "--policy": "set --network and --core",
    "--tensorboard-log": "set --run-dir, which holds TensorBoard's files, too",
    "--verbose": "progress is always shown: leave it out",
    "--batch-size": "a batch has num_envs x num_steps steps: set these, or --num-minibatches",
    "--minibatch-size": "set --num-minibatches",
    "--n-steps": "set --num-steps",
    "--n-envs": "set --num-envs",
    "--n-epochs": "set --update-epochs",
    "--clip-range": "set --clip-coef",
    "--timesteps": "set --total-timesteps",
    "--norm-reward": "only PPO, IMPALA and PQN have it: scale rewards in the environment, or in a wrapper "
    "(--env-wrappers)",
    "--algo": "the algorithm is the command, as in `cleanba ppo`",
    "--algorithm": "the algorithm is the command, as in `cleanba ppo`",
    "--wandb": "set --track",
    "--use-wandb": "set --track",
    "--with-wandb": "set --track",
    "--train-for-env-steps": "set --total-timesteps",
    "--rollout": "set --num-steps",
    "--rollout-length": "set --num-steps",
    "--num-workers": "set --num-actors, and --num-envs, which counts over all of them",
    "--num-envs-per-worker": "set --num-envs, which counts over all actors",
    "--callback": "there are no callbacks: metrics.jsonl grows while a run trains, and --eval-frequency evaluates the "
    "policy from time to time",
}


def remedy_for(flag: str, own: Collection[str]) -> str:
    """What to do instead of giving a flag of another system; "" if nothing, or only flags that are not among `own`."""
    remedy = FOREIGN_FLAGS.get(flag, "")
    named = {name[2:].replace("-", "_") for name in re.findall(r"--[a-z][a-z-]*", remedy)}
    return remedy if not named or not named.isdisjoint(own) or "leave it out" in remedy else ""


# ------------------------------------------------------------------------------------------------------ what is shown

ESSENTIAL = ("env_id", "total_timesteps", "seed", "learning_rate", "policy_lr", "q_lr", "num_envs")
HEADINGS = {
    "environment": "repeat_action_probability full_action_space episodic_life max_episode_steps reward_clip "
    "env_options env_wrappers env_epoch",
    "collecting": "num_actors num_shards num_steps concurrency collector",
    "network": "network channels hiddens layer_norm core lstm_size forget_bias share_torso log_std_init norm_obs dtype "
    "deterministic",
}


def help_text(
    recipe: AnyRecipe, words: Sequence[str], default: Config | None, whole: bool, locate: Callable[[str], Path]
) -> str:
    """What --help prints, with the values that these arguments lead to.  `whole`: with rules and full descriptions."""
    resolved, config, why = None, Config(recipe.experiment()), ""
    with redirect_stderr(StringIO()), redirect_stdout(StringIO()):
        try:
            config = read_flags(recipe, words, default, locate)
            resolved = settle(recipe, config, default_platform(), None)
        except (UsageError, Failure) as error:
            why = f"\nDefaults are the algorithm's own: {error}.\n"
    e = resolved.experiment if resolved else config.asked
    width = help_width()
    about = f"{recipe.about[0].upper()}{recipe.about[1:]}.  Defaults are those of "
    settings = preset_words(recipe, resolved, e)
    lines = [f"usage: cleanba {recipe.name} [FLAGS]", "", paragraphs(f"{about}{settings}.", width), why]
    for title, group, names in sections(recipe, e, config):
        lines.append(f"{title}:")
        for name in names:
            f, value = fields_of(type(group))[name], getattr(group, name)
            lines += flag_lines(name, f, value, width, whole or title == "essentials")
        lines.append("")
    lines += ["more:"]
    presets = ", ".join(recipe.named_presets())
    for name, about in (
        (f"{PRESET} NAME", f"start from these settings, not from the environment's: {presets}, or a run's directory"),
        ("--help-all", "show each flag with its allowed values and full description, and what is logged"),
        (SHOW, "print every value of the configuration and where it comes from, without training"),
    ):
        lines += entry(name, about, width)
    if whole:
        lines += ["", "what its log has (metrics.jsonl):"]
        for name, about in {**LOGGED, **recipe.logs}.items():
            lines += entry(name, LINK.sub("", about), width)
    return "\n".join(lines)


LINK = re.compile(r" ?\(\[[^]]*\]\([^)]*\)\)")  # to a page, in brackets


def preset_words(recipe: AnyRecipe, resolved: Resolved | None, e: Experiment) -> str:
    """Where the settings come from, such as "ppo's preset atari, for Pong-v5"."""
    if resolved is not None and resolved.whole:
        return f"the experiment of {resolved.whole}"
    if resolved is None or not resolved.preset:
        return f"the defaults of {recipe.name}"
    return f"{recipe.name}'s preset {resolved.preset}, for {e.env_id}"


def sections(recipe: AnyRecipe, e: Experiment, config: Config) -> Iterator[tuple[str, Group, list[str]]]:
    """The sections of --help: each heading with its group of fields and their names."""
    own = list(offered_fields(recipe.experiment))
    yield "essentials", e, [name for name in ESSENTIAL if name in own]
    left = [name for name in own if name not in ESSENTIAL]
    under = {title: [name for name in names.split() if name in left] for title, names in HEADINGS.items()}
    placed = {name for names in under.values() for name in names}
    yield "learning", e, [name for name in left if name not in placed]
    for title, names in under.items():
        yield title, e, names
    yield "placement: does not change the result", config.placement, list(fields_of(Placement))
    yield "run: what is kept and shown", config.run, list(fields_of(Run))


def config_text(recipe: AnyRecipe, config: Config, typed: set[str]) -> str:
    """What --show-config prints.

    Raises:
        UsageError: the experiment cannot be resolved, or does not fit its placement.
    """
    resolved = settle(recipe, config, default_platform(), config.run.run_dir)
    e = resolved.experiment
    fit(recipe, e, config.placement, config.placement.num_processes or 1)
    lines = [f"{recipe.name} on {e.env_id}: {preset_words(recipe, resolved, e)}"]

    def other(group: Group) -> dict[str, str]:
        """Where the values of placement or run come from."""
        default, resumed = type(group)(), config.whole is not None and config.whole == config.run.run_dir
        of = lambda name: EARLIER if resumed and getattr(group, name) != getattr(default, name) else DEFAULT
        return {name: TYPED if name in typed else of(name) for name in fields_of(type(group))}

    groups: tuple[tuple[str, Group, Mapping[str, str]], ...] = (
        ("experiment", e, resolved.origin),
        ("placement", config.placement, other(config.placement)),
        ("run", config.run, other(config.run)),
    )
    for title, group, origin in groups:
        values = {f.name: json.dumps(getattr(group, f.name), default=str) for f in fields(group)}
        width = min(max(map(len, values.values())), 30)
        lines += [
            "",
            title,
            *(f"  {name:28}{value:{width}}  {origin[name]}" for name, value in values.items()),
        ]
    return "\n".join(lines)
