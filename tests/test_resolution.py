"""From typed flags to a complete experiment: precedence, presets, earlier runs."""

import dataclasses
import json
import re
import shutil
from functools import cache
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from launch import TINY, command

import cleanba
from cleanba.algorithms.ppo import PPO
from cleanba.config import Experiment, Partition, Placement, Run, fields_of, to_json
from cleanba.environments.backends import env_spec
from cleanba.errors import UsageError
from cleanba.files import finite, read_json, write_json
from cleanba.recipes import RECIPES, _recipe
from cleanba.resolution import (
    DEFAULT,
    EARLIER,
    ENVIRONMENT,
    TYPED,
    configure,
    continue_experiment,
    fit,
    offered,
    preset_name,
    read_recipe,
    resolve,
    settle,
)
from cleanba.specs import ActionSpec, EnvSpec, ObsSpec, choice
from cleanba.train_flags import parse
from cleanba.trust import mark_downloaded

ENVS = {
    "atari": "Breakout-v5",
    "continuous": "HalfCheetah-v5",
    "classic_control": "CartPole-v1",
    "box2d": "LunarLander-v3",
    "minigrid": "MiniGrid-Empty-5x5-v0",
    "toy_text": "FrozenLake-v1",
}
BOARD = ObsSpec("planes", (10, 10, 4), "bool")
MINATAR = EnvSpec(
    "gymnax:Breakout-MinAtar", BOARD, choice(3), False, False, {}, on_device=True
)  # as `env_spec` finds it


@cache
def looks(preset: str) -> EnvSpec:
    return MINATAR if preset == "minatar" else env_spec(Experiment(env_id=ENVS[preset]))


def on(preset: str, name: str = "ppo", platform: str = "cpu", **typed):
    """What is resolved for the environment that stands for a preset."""
    spec = looks(preset)
    return resolve(RECIPES[name], {"env_id": spec.env_id, **typed}, platform, spec)


def written(e: Experiment) -> dict:
    """As config.json has it."""
    return json.loads(json.dumps(finite(to_json(e)), allow_nan=False))


def test_an_epoch_has_room_for_two_of_the_longest_episodes_wherever_their_limit_comes_from():
    spec = looks("classic_control")
    epoch = lambda spec: resolve(RECIPES["dqn"], {"env_id": spec.env_id, "num_steps": 32}, "cpu", spec)
    assert epoch(spec).experiment.env_epoch == 500
    longer = epoch(spec._replace(options={}, time_limit=20_000)).experiment  # as a wrapper sets it
    assert longer.env_epoch == 1250 and longer.max_episode_steps == 0


# ------------------------------------------------------------------------------------------------------- every preset

PRESETS = [(name, preset) for name, recipe in RECIPES.items() for preset in recipe.presets]


@pytest.mark.parametrize("name, preset", PRESETS)
@settings(max_examples=12)
@given(
    core=st.sampled_from(["none", "lstm"]),
    platform=st.sampled_from(["cpu", "gpu"]),
    changes=st.fixed_dictionaries(
        {}, optional={"seed": st.integers(0, 99), "num_envs": st.sampled_from([1, 3, 8, 24]), "gamma": st.just(0.5)}
    ),
)
def test_every_preset_resolves_is_a_fixed_point_and_survives_its_file(name, preset, core, platform, changes):
    recipe, spec = RECIPES[name], looks(preset)
    recurrent = {"core": core} if core != "none" and "core" in fields_of(recipe.experiment) else {}
    typed = {"env_id": spec.env_id, **recurrent, **changes}
    found = resolve(recipe, typed, platform, spec)
    e = found.experiment
    assert found.preset == preset
    assert all(getattr(e, field) == value for field, value in typed.items())
    assert not any(value is None or value == "auto" for value in dataclasses.asdict(e).values())
    assert set(found.origin) == {f.name for f in dataclasses.fields(e)}
    recipe.check(e, Partition(e.num_envs, e.num_actors, e.num_shards))  # all of it fits
    assert (found.spec.clip_reward, found.spec.options.get("max_episode_steps", 0)) == (
        e.reward_clip,
        e.max_episode_steps,
    )
    whole = {field: value for field, value in dataclasses.asdict(e).items() if fields_of(type(e))[field].offered}
    again = resolve(recipe, whole, "gpu" if platform == "cpu" else "cpu", spec)
    assert again.experiment == e and again.spec == found.spec
    assert recipe.experiment(**{k: tuple(v) if isinstance(v, list) else v for k, v in written(e).items()}) == e


@pytest.mark.parametrize("name, preset", PRESETS)
def test_a_preset_sets_only_what_it_may(name, preset):
    """The settings that an environment is made with decide which preset is used, so no preset may set them."""
    makes = {"env_id", "env_options", "env_wrappers", "max_episode_steps", "repeat_action_probability"}
    makes |= {"full_action_space", "episodic_life", "seed", "deterministic", "dtype", "collector"}
    assert not makes & set(RECIPES[name].presets[preset])


@pytest.mark.parametrize("preset", ENVS)
def test_the_network_follows_what_is_seen(preset):
    assert on(preset).experiment.network == {"atari": "impala"}.get(preset, "mlp")  # of several parts, one MLP
    assert on("minatar").experiment.network == "minatar"


def test_atari_is_clipped_and_nothing_else():
    assert {preset: on(preset).experiment.reward_clip for preset in (*ENVS, "minatar")} == {
        preset: preset == "atari" for preset in (*ENVS, "minatar")
    }
    assert not on("atari", reward_clip=False).spec.clip_reward and on("box2d", reward_clip=True).spec.clip_reward


def test_policy_and_value_share_a_torso_unless_actions_are_real_numbers():
    assert on("atari").experiment.share_torso and on("minatar").experiment.share_torso
    assert not on("continuous").experiment.share_torso and on("continuous", share_torso=True).experiment.share_torso


def test_an_algorithm_needs_no_presets():
    module = SimpleNamespace(check=None, make=None, LOGGED={})
    assert _recipe("mine", module, PPO, "train").presets == {}


def test_a_limit_of_zero_asks_for_the_environments_own():
    assert on("classic_control").experiment.max_episode_steps == 500
    assert resolve(RECIPES["ppo"], {"env_id": "Catch-v0"}, "cpu").experiment.max_episode_steps == 0  # it has none
    for steps, limit in ((0, 500), (9, 9)):
        found = resolve(RECIPES["ppo"], {"env_id": "CartPole-v1", "max_episode_steps": steps}, "cpu")
        assert found.experiment.max_episode_steps == found.spec.options["max_episode_steps"] == limit


@pytest.mark.parametrize(
    "typed, limit",
    [
        (dict(env_id="gymnasium:CartPole-v1", env_options=("max_episode_steps=-1",)), 0),  # Gymnasium's word for none
        (dict(env_id="odd:Distant-v0"), 0),
        (dict(env_id="CartPole-v1", max_episode_steps=2**31 - 1, num_steps=1), 2**31 - 1),
    ],
)
def test_what_follows_from_an_environment_is_what_may_be_typed(typed, limit):
    e, spec, *_ = resolve(RECIPES["ppo"], typed, "cpu")
    assert e.max_episode_steps == limit and (spec.time_limit or 0) in (0, limit)
    assert resolve(RECIPES["ppo"], offered(e), "cpu").experiment == e


def test_the_collector_is_the_faster_one_on_that_kind_of_device():
    assert [on("atari", platform=kind).experiment.collector for kind in ("cpu", "gpu")] == ["scanned", "stepped"]
    assert [on("continuous", platform=kind).experiment.collector for kind in ("cpu", "gpu")] == ["stepped"] * 2
    assert on("minatar", platform="gpu").experiment.collector == "scanned"  # on the device, as its environments are
    assert on("atari", collector="stepped").experiment.collector == "stepped"
    with pytest.raises(UsageError, match="collector=scanned would corrupt memory"):
        on("continuous", collector="scanned")


# ------------------------------------------------------------------------------------------------------- precedence


def test_typed_values_come_before_the_preset_and_the_preset_before_the_default():
    found = on("box2d", gamma=0.9)
    assert (found.experiment.gamma, found.origin["gamma"]) == (0.9, "typed")
    own = RECIPES["ppo"].presets["box2d"]
    assert (found.experiment.gae_lambda, found.origin["gae_lambda"]) == (own["gae_lambda"], "preset box2d")
    assert (found.experiment.vf_coef, found.origin["vf_coef"]) == (PPO.vf_coef, "default")
    assert found.origin["network"] == found.origin["max_episode_steps"] == "environment"
    assert found.origin["env_id"] == TYPED and found.origin["seed"] == "default"
    assert on("atari").origin["collector"] == "kind of device" and on("box2d", network="mlp").origin["network"] == TYPED
    assert on("atari", network="auto", collector=None).experiment == on("atari").experiment  # as good as left out


def test_python_and_the_command_line_agree():
    words = "--env-id CartPole-v1 --gamma 0.9 --hiddens 8 8 --no-anneal-lr --num_envs=4 --reward-clip True"
    typed = dict(env_id="CartPole-v1", gamma=0.9, hiddens=[8, 8], anneal_lr=False, num_envs=4, reward_clip=True)
    recipe = RECIPES["ppo"]
    one = settle(recipe, parse(recipe, words.split()), "cpu", None)
    other = settle(recipe, configure(recipe, typed, Placement(), Run()), "cpu", None)
    assert one == other and {f for f, where in one.origin.items() if where == TYPED} == set(typed)


@pytest.mark.parametrize(
    "words, field, value",
    [
        ("--anneal-lr False", "anneal_lr", False),
        ("--anneal-lr=true", "anneal_lr", True),
        ("--no-norm-adv", "norm_adv", False),
        ("--network auto --seed 3", "seed", 3),
        ("--collector None --seed=3", "seed", 3),
    ],
)
def test_values_of_other_systems_and_of_earlier_versions_are_understood(words, field, value):
    assert parse(RECIPES["ppo"], words.split()).typed == {field: value}


@pytest.mark.parametrize(
    "name, typed, words",
    [
        ("ppo", {"learning_rat": 1.0}, ["ppo: there is no 'learning_rat'", "learning_rate"]),
        ("dqn", {"core": "lstm"}, ["there is no 'core'"]),
        ("sac", {"episodic_life": True}, ["sac has no use for episodic_life"]),
        ("ppo", {"gamma": 2.0}, ["gamma=2.0", "[0, 1]"]),
        ("ppo", {"env_id": "Nope-v0"}, ["Nope-v0"]),
        ("ppo", {"env_id": "CartPole-v1", "network": "nature"}, []),
    ],
)
def test_impossible_settings_are_refused(name, typed, words):
    with pytest.raises(UsageError) as caught:
        found = resolve(RECIPES[name], typed, "cpu")
        RECIPES[name].make(found.experiment, found.spec, "cpu")
    assert all(word in str(caught.value) for word in words), caught.value


# ---------------------------------------------------------------------------------------- no device has a say in it


def test_shards_and_actors_are_lowered_to_what_fits_what_was_typed():
    found = on("atari")
    assert (found.experiment.num_shards, found.experiment.num_actors) == (6, 2)
    few = on("atari", num_envs=8)
    assert (few.experiment.num_shards, few.experiment.num_actors) == (4, 2)
    assert few.origin["num_shards"] == "lowered to fit" and few.origin["num_actors"] == "preset atari"
    assert on("atari", num_envs=7).experiment.num_shards == 1 and on("atari", num_envs=7).experiment.num_actors == 1
    typed = on("atari", num_envs=12, num_shards=4, num_actors=4)
    assert (typed.experiment.num_shards, typed.experiment.num_actors) == (4, 4)
    recurrent = on("atari", core="lstm").experiment  # minibatches of whole environments
    assert recurrent.num_envs // recurrent.num_shards % recurrent.num_minibatches == 0


def test_steps_between_gradient_steps_are_lowered_to_what_fits_what_was_typed():
    found = on("classic_control", "dqn", num_envs=3, num_steps=1)
    assert found.experiment.train_frequency < on("classic_control", "dqn").experiment.train_frequency
    assert found.origin["train_frequency"] == "lowered to fit"
    assert on("classic_control", "dqn", num_envs=9, num_steps=1).experiment.train_frequency == 3  # of 4


def test_where_nothing_fits_the_message_is_about_what_was_typed():
    found = on("atari", num_envs=8, num_steps=8, num_minibatches=5)
    with pytest.raises(UsageError, match="num_minibatches=5 .* 8 environments x 8 steps"):
        fit(RECIPES["ppo"], found.experiment, Placement())


def test_seeds_that_run_out_are_noticed_before_the_run():
    typed = dict(num_envs=1024, num_steps=1, num_minibatches=1, total_timesteps=1024 * (2**20 + 1))
    found = on("classic_control", env_epoch=1, **typed).experiment
    with pytest.raises(UsageError, match=r"env_epoch=1 .*only 2\^30 seeds; try --env-epoch 2"):
        fit(RECIPES["ppo"], found, Placement())
    fit(RECIPES["ppo"], on("classic_control", env_epoch=2, **typed).experiment, Placement())
    fewer = typed | {"total_timesteps": 1024 * 2**20}
    fit(RECIPES["ppo"], on("classic_control", env_epoch=1, **fewer).experiment, Placement())


@pytest.mark.parametrize("name", ["ppo", "impala"])
def test_a_placement_that_needs_more_shards_than_there_are_is_refused(name):
    e = on("classic_control", name).experiment
    with pytest.raises(UsageError, match="num_shards=1 .* 2 learner devices"):
        fit(RECIPES[name], e, Placement(learner_device_ids=(0, 1)))


PROTOCOLS = [(n, p) for n, recipe in RECIPES.items() for p in recipe.protocols if n != "impala" and p != "pong"]
# How it is computed, what the environment is, and what has no effect with the preset's other values.
LEFT = {"seed", "init_from", "deterministic", "dtype", "cpu_kernels", "collector", "concurrency", "env_options"}
LEFT |= {"env_epoch", "env_wrappers", "episodic_life", "full_action_space", "repeat_action_probability", "channels"}
LEFT |= {"forget_bias", "lstm_size", "log_std_init", "lag_correction", "lag_trace_cap", "lag_weight_cap"}
LEFT |= {"priority_exponent", "importance_exponent", "importance_exponent_end"}
PLAYED = {"cleanrl-classic-control": "CartPole-v1", "cleanrl-continuous": "HalfCheetah-v5"}


@pytest.mark.parametrize("name, preset", PROTOCOLS)
def test_a_published_preset_fits_and_leaves_no_hyperparameter_to_other_presets_or_defaults(name, preset):
    recipe, env_id = RECIPES[name], PLAYED.get(preset, "Pong-v5")
    found = settle(recipe, parse(recipe, ["--env-id", env_id, "--preset", preset]), "cpu", None)
    e = found.experiment
    assert {field: getattr(e, field) for field in recipe.protocols[preset]} == recipe.protocols[preset]
    recipe.check(e, Partition(e.num_envs, e.num_actors, e.num_shards))
    assert {field for field, where in found.origin.items() if where.startswith(("preset ", DEFAULT))} <= LEFT


@pytest.mark.parametrize("words", ["--preset cleanrl-atari --num-envs 16", "--num-envs 16 --preset=cleanrl-atari"])
def test_a_preset_is_asked_for_by_name_and_what_is_typed_overrides_it(words):
    recipe = RECIPES["ppo"]
    e = settle(recipe, parse(recipe, [*words.split(), "--env-id", "Pong-v5"]), "cpu", None).experiment
    protocol = recipe.protocols["cleanrl-atari"]
    assert {name: getattr(e, name) for name in protocol} == {**protocol, "num_envs": 16}
    assert e == cleanba.ppo("Pong-v5", preset="cleanrl-atari", num_envs=16).resolve()


def test_presets_for_kinds_of_environments_can_be_named_too():
    recipe = RECIPES["dqn"]
    found = settle(recipe, parse(recipe, ["--env-id", "Catch-v0", "--preset", "box2d"]), "cpu", None)
    own = recipe.presets["box2d"]
    assert {name: getattr(found.experiment, name) for name in own} == own != recipe.presets[preset_name(found.spec)]


def test_the_shown_config_names_the_preset_that_was_asked_for(tmp_path):
    recipe, words = RECIPES["ppo"], ["--preset", "cleanrl-atari", "--num-envs", "16", "--env-id", "Pong-v5"]
    found = settle(recipe, parse(recipe, words), "cpu", None)
    assert found.in_words(recipe) == "preset cleanrl-atari, and 2 typed"
    own, further = recipe.protocols["cleanrl-atari"], recipe.presets["atari"]
    named = {name for name, where in found.origin.items() if where == "--preset cleanrl-atari"}
    assert named == set(own) - {"num_envs"} and found.origin["num_envs"] == TYPED
    assert all(found.origin[name] == "preset atari" for name in set(further) - set(own))
    write_json(
        tmp_path / "config.json",
        {"experiment": {"algorithm": "ppo", **to_json(found.experiment)}, "origin": found.origin},
    )
    again = settle(recipe, configure(recipe, {}, Placement(), Run(), tmp_path), "cpu", tmp_path)  # as resume does
    assert again.in_words(recipe) == "preset cleanrl-atari, and 2 typed" and again.experiment == found.experiment
    left = ["--num-steps", "64", "--num-steps", "None", "--network=auto", "--gamma", "None", "--gamma", "0.5"]
    words = ["--env-id", "Pong-v5", "--preset", "cleanrl-atari", "--num-envs", "16", *left]
    opened = settle(recipe, parse(recipe, words), "cpu", None)  # None and auto leave a field open
    assert (opened.experiment.num_steps, opened.experiment.gamma) == (PPO.num_steps, 0.5)
    assert opened.origin["network"] == ENVIRONMENT
    spec = cleanba.ppo("Pong-v5", preset="cleanrl-atari", num_envs=16, num_steps=None)  # as in Python
    assert spec.resolve().num_steps == PPO.num_steps and "preset='cleanrl-atari'" in repr(spec)


@pytest.mark.parametrize("words", ["--preset", "--preset nothing", "--preset="])
def test_an_unknown_preset_is_refused_with_the_existing_ones(words):
    with pytest.raises(UsageError, match=r"(td3 has|is not a preset of td3; use) \S+"):
        parse(RECIPES["td3"], words.split())


def test_a_runs_settings_can_be_taken_and_changed(tmp_path):
    recipe = RECIPES["ppo"]
    words = ["--env-id", "Catch-v0", "--num-envs", "16", "--gamma", "0.9", "--seed", "7"]
    found = settle(recipe, parse(recipe, words), "cpu", None)
    config = {"experiment": {"algorithm": "ppo", **to_json(found.experiment)}, "origin": found.origin}
    write_json(tmp_path / "config.json", config)
    new = settle(recipe, parse(recipe, ["--preset", str(tmp_path), "--learning-rate", "1e-4"]), "cpu", None)
    assert new.experiment == dataclasses.replace(found.experiment, learning_rate=1e-4, seed=1)
    assert new.origin["gamma"] == f"--preset {tmp_path}" and new.in_words(recipe).endswith(", and 1 typed")
    assert cleanba.ppo(preset=tmp_path, learning_rate=1e-4).resolve() == new.experiment
    spec = cleanba.ppo(preset=str(tmp_path), env_id="CartPole-v1")
    assert spec.resolve().gamma == 0.9 and spec.resolve().env_id == "CartPole-v1"
    with pytest.raises(UsageError, match="is a run of ppo; name a run of impala"):
        parse(RECIPES["impala"], ["--preset", str(tmp_path)])


def test_what_a_runs_environment_implied_is_implied_anew(tmp_path):
    recipe = RECIPES["ppo"]
    words = ["--env-id", "CartPole-v1", "--env-options", "max_episode_steps=300"]
    found = settle(recipe, parse(recipe, words), "cpu", None)
    assert found.experiment.max_episode_steps == 300
    config = {"experiment": {"algorithm": "ppo", **to_json(found.experiment)}, "origin": found.origin}
    write_json(tmp_path / "config.json", config)
    taken = ["--preset", str(tmp_path)]
    assert settle(recipe, parse(recipe, taken), "cpu", None).experiment == found.experiment
    for words, limit, collector in (
        (["--env-id", "MountainCar-v0", "--env-options"], 200, "scanned"),
        (["--env-id", "gymnasium:MountainCar-v0", "--env-options"], 200, "stepped"),
    ):
        other = settle(recipe, parse(recipe, [*taken, *words]), "cpu", None).experiment
        assert (other.max_episode_steps, other.collector) == (limit, collector)
    mark_downloaded(tmp_path, "x.tar.gz")
    config["experiment"]["env_id"] = "os:getcwd"
    write_json(tmp_path / "config.json", config)
    with pytest.raises(UsageError, match="comes from elsewhere.*; repeat its flags instead"):
        parse(recipe, taken)


# ------------------------------------------------------------------------------------------------ which preset it is


@pytest.mark.parametrize("preset", [*ENVS, "minatar"])
def test_the_preset_is_chosen_by_what_the_environment_is(preset):
    assert preset_name(looks(preset)) == preset


@pytest.mark.parametrize(
    "fields, preset",
    [
        (dict(env_id="gymnasium:CartPole-v1"), "classic_control"),
        (dict(env_id="gymnasium:FrozenLake-v1"), "toy_text"),
        (dict(env_id="gymnasium:Pendulum-v1"), "continuous"),
        (dict(env_id="Pendulum-v1"), "continuous"),
        (dict(env_id="Catch-v0"), "classic_control"),  # a board of numbers
        (dict(env_id="Taxi-v3"), "toy_text"),
        (dict(env_id="LunarLanderContinuous-v3"), "continuous"),
        (dict(env_id="odd:Parent-v0"), "classic_control"),
        (dict(env_id="gymnasium:CartPole-v1", env_wrappers=("odd:as_pictures",)), "images"),
        (dict(env_id="gymnasium:CartPole-v1", env_wrappers=("odd:as_code",)), "toy_text"),
        (dict(env_id="gymnasium:MountainCar-v0", env_wrappers=("odd:continuous",)), "continuous"),
    ],
)
def test_the_preset_is_chosen_after_wrappers_and_options_are_applied(fields, preset):
    assert preset_name(env_spec(Experiment(**fields))) == preset


def test_an_environment_without_a_preset_has_the_defaults():
    picture = ObsSpec("image", (64, 64, 3), "uint8")
    spec = EnvSpec("x", picture, choice(4), False, False, {})
    found = resolve(RECIPES["ppo"], {"env_id": "x"}, "cpu", spec)
    assert found.preset == "" and "preset" not in " ".join(found.origin.values())
    assert found.experiment.num_envs == PPO.num_envs and found.experiment.network == "impala"
    two = EnvSpec("x", {"eye": picture, "mask": ObsSpec("mask", (3,), "bool")}, choice(3), False, False, {})
    assert preset_name(two) == "images"
    real = two._replace(action=ActionSpec("quantities", (2,), "float32", (), (-1.0,) * 2, (1.0,) * 2))
    assert preset_name(real) == "continuous"
    vector = EnvSpec("x", ObsSpec("vector", (3,), "float32"), choice(2), False, False, {})
    for family, preset in (("my_minigrid.toy_box2d:Maze", "classic_control"), ("minigrid.envs.empty:A", "minigrid")):
        assert preset_name(vector._replace(family=family)) == preset


# ------------------------------------------------------------------------------------------------- what was run before

# As the previous version wrote it: null where the environment decided, and fields that DQN did not use.
BEFORE = {
    "algorithm": "ppo", "env_id": "Catch-v0", "seed": 1, "total_timesteps": 320, "num_envs": 8, "num_actors": 2,
    "num_shards": 1, "num_steps": 8, "concurrency": True, "collector": "scanned", "checkpoint_frequency": 3,
    "repeat_action_probability": 0.25, "full_action_space": True, "episodic_life": False, "max_episode_steps": None,
    "reward_clip": None, "env_options": [], "env_wrappers": [], "anneal_lr": True, "gamma": 0.99, "network": "auto",
    "channels": [16, 32, 32], "hiddens": [8], "core": "none", "lstm_size": 256, "forget_bias": 0.0,
    "deterministic": True, "dtype": "float32", "learning_rate": 0.00025, "ent_coef": 0.01, "vf_coef": 0.5,
    "max_grad_norm": 0.5, "num_minibatches": 2, "log_std_init": 0.0, "share_torso": None, "norm_obs": False,
    "norm_reward": False, "gae_lambda": 0.95, "update_epochs": 1, "norm_adv": True, "clip_coef": 0.1,
    "lag_correction": "none", "lag_weight_cap": 2.0, "lag_trace_cap": 1.0,
}  # fmt: skip


def left(tmp_path, values: dict, **more):
    """The directory of a run of an earlier version."""
    write_json(tmp_path / "config.json", {"experiment": values, "placement": {}, "run": {}, **more})
    return tmp_path


def test_fields_that_an_earlier_version_left_open_have_the_values_that_it_used(tmp_path):
    recipe, e = read_recipe(left(tmp_path, BEFORE))
    assert recipe.name == "ppo" and isinstance(e, PPO)
    assert (e.network, e.reward_clip, e.share_torso, e.max_episode_steps) == ("mlp", False, True, 0)
    assert (e.env_epoch, e.learning_rate, e.num_envs) == (3, 0.00025, 8)  # and no preset has a say
    atari = BEFORE | {"env_id": "Breakout-v5", "network": "nature", "max_episode_steps": 9}
    (tmp_path / "atari").mkdir()
    e = read_recipe(left(tmp_path / "atari", atari))[1]
    assert (e.network, e.reward_clip, e.share_torso, e.max_episode_steps) == ("nature", True, True, 9)
    real = BEFORE | {"env_id": "HalfCheetah-v5", "collector": "stepped"}
    e = read_recipe(left(tmp_path / "atari", real))[1]
    assert (e.network, e.reward_clip, e.share_torso, e.max_episode_steps) == ("mlp", False, False, 1000)


def test_a_field_that_an_earlier_version_lacked_is_neutral(tmp_path):
    lacked = ("forget_bias", "lag_correction", "norm_obs", "collector", "share_torso", "env_wrappers", "log_std_init")
    e = read_recipe(left(tmp_path, {name: x for name, x in BEFORE.items() if name not in lacked}))[1]
    assert (e.forget_bias, e.lag_correction, e.norm_obs, e.collector) == (0.0, "none", False, "stepped")
    assert e.share_torso and e.env_wrappers == () and e.log_std_init == 0.0


def test_fields_that_an_algorithm_no_longer_has_are_accepted_where_they_changed_nothing(tmp_path):
    values = {"algorithm": "dqn", **written(on("classic_control", "dqn").experiment)}
    gone = {"core": "none", "lstm_size": 256, "forget_bias": 0.0}
    assert read_recipe(left(tmp_path, values | gone))[1] == on("classic_control", "dqn").experiment
    for wrong, words in (({"core": "lstm"}, "core"), ({"temperature": 1}, "temperature")):
        with pytest.raises(UsageError, match=f"with settings that this one does not know .{words}"):
            read_recipe(left(tmp_path, values | wrong))


def test_an_experiment_that_has_begun_in_a_directory_is_continued(tmp_path):
    """Whatever this version would choose, on any kind of device, the same command goes on."""
    typed = {"env_id": "Catch-v0", "num_envs": 8}
    recipe, run_dir = RECIPES["ppo"], left(tmp_path, BEFORE)
    now = resolve(recipe, typed, "gpu")
    standing = continue_experiment(recipe, now, run_dir)
    assert standing.experiment == read_recipe(run_dir)[1] != now.experiment
    assert set(standing.origin.values()) == {EARLIER}
    assert continue_experiment(recipe, now, tmp_path / "elsewhere") == now


@pytest.mark.parametrize(
    "typed, words",
    [
        ({"num_envs": 7}, "num_envs: 8, now 7"),
        ({"seed": 2}, "seed: 1, now 2"),
        ({"num_shards": 2}, "num_shards: 1, now 2"),
        ({"network": "mlp", "reward_clip": True}, "reward_clip: False, now True"),
        ({"env_id": "CartPole-v1"}, "env_id: Catch-v0, now CartPole-v1"),
    ],
)
def test_flags_typed_now_can_contradict_the_experiment_in_a_directory(tmp_path, typed, words):
    now = resolve(RECIPES["ppo"], {"env_id": "Catch-v0"} | typed, "cpu")
    with pytest.raises(UsageError) as caught:
        continue_experiment(RECIPES["ppo"], now, left(tmp_path, BEFORE))
    assert f"holds another experiment ({words})" in str(caught.value)


def test_flags_typed_then_but_not_now_contradict_it_too(tmp_path):
    origin = {"learning_rate": TYPED, "gamma": TYPED, "hiddens": "preset toy_text"}
    run_dir = left(tmp_path, BEFORE | {"learning_rate": 0.5, "hiddens": [3]}, origin=origin)
    now = resolve(RECIPES["ppo"], {"env_id": "Catch-v0"}, "cpu")
    with pytest.raises(UsageError) as caught:
        continue_experiment(RECIPES["ppo"], now, run_dir)
    assert "(learning_rate: 0.5, now 0.001)" in str(caught.value)  # gamma is the same, hiddens were a preset's
    again = resolve(RECIPES["ppo"], {"env_id": "Catch-v0", "learning_rate": 0.5}, "cpu")
    assert continue_experiment(RECIPES["ppo"], again, run_dir).experiment.hiddens == (3,)


def test_a_whole_experiment_is_compared_with_another_in_every_field(tmp_path):
    (tmp_path / "source").mkdir(), (tmp_path / "other").mkdir()
    source, other = left(tmp_path / "source", BEFORE), left(tmp_path / "other", BEFORE | {"gamma": 0.5})
    config = configure(RECIPES["ppo"], {}, Placement(), Run(experiment_from=str(source)))
    assert settle(RECIPES["ppo"], config, "cpu", None).experiment == read_recipe(source)[1]
    with pytest.raises(UsageError, match="holds another experiment .gamma: 0.5, now 0.99."):
        settle(RECIPES["ppo"], config, "cpu", other)
    assert settle(RECIPES["ppo"], config, "cpu", source).experiment == read_recipe(source)[1]


def test_a_run_of_an_earlier_version_goes_on_to_the_same_bits(tmp_path):
    """A run as the previous version wrote it is continued by this one: by `resume` and by the original command."""
    flags = [*TINY, "--env-epoch", "2", "--checkpoint-frequency", "2", "--collector", "scanned", "--no-norm-obs"]
    flags += [
        "--learning-rate",
        "2.5e-4",
        "--no-norm-reward",
        "--ent-coef",
        "0.01",
        "--clip-coef",
        "0.1",
        "--share-torso",
    ]
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    assert command("ppo", *flags, "--run-dir", whole).code == 0
    shutil.copytree(whole, cut)
    config = read_json(cut / "config.json")
    experiment = config["experiment"] | {"network": "auto", "reward_clip": None, "share_torso": None}
    experiment |= {"max_episode_steps": None, "checkpoint_frequency": experiment.pop("env_epoch")}
    shutil.rmtree(cut / "checkpoints" / "5")
    (cut / "result.json").unlink()
    del config["origin"], config["run"]["checkpoint_frequency"]
    write_json(cut / "config.json", config | {"experiment": experiment})
    ended = command("resume", cut)
    assert ended.code == 0 and "resuming after update 4" in ended.out, ended
    for name in ("params_digest", "learner_digest"):
        assert read_json(cut / "result.json")[name] == read_json(whole / "result.json")[name]
    assert "finished" in command("ppo", *flags, "--run-dir", cut).out
    assert command("diff", cut, whole).out.startswith("same experiment")


# ------------------------------------------------------------------------------------------------------- what is shown


def test_show_config_says_where_each_value_comes_from_and_trains_nothing(tmp_path):
    run_dir = tmp_path / "run"
    ended = command("ppo", "--env-id", "CartPole-v1", "--gamma", "0.9", "--run-dir", run_dir, "--show-config")
    assert ended.code == 0 and ended.err == "" and not run_dir.exists()
    rows = [line.split() for line in ended.out.splitlines() if line.startswith("  ")]
    shown = {name: (value, " ".join(origin)) for name, value, *origin in rows if name != "channels"}
    assert shown["gamma"] == ("0.9", "typed") and shown["run_dir"] == (f'"{run_dir}"', "typed")
    assert shown["vf_coef"] == ("0.5", "default") and shown["network"] == ('"mlp"', "environment")
    preset = RECIPES["ppo"].presets["classic_control"]
    assert shown["num_envs"] == (str(preset["num_envs"]), "preset classic_control")
    every = {f.name for group in (PPO, Placement, Run) for f in dataclasses.fields(group)}
    assert {name for name, *_ in rows} == every
    refused = command("ppo", "--env-id", "Nope-v0", "--show-config")
    assert refused.code == 2 and "Nope-v0" in refused.err


def test_a_runs_config_has_every_value_and_where_it_came_from(tmp_path):
    ended = command("ppo", *TINY, "--run-dir", tmp_path)
    assert ended.code == 0 and "settings: preset classic_control, and 10 typed" in ended.out, ended.out
    config = read_json(tmp_path / "config.json")
    assert not any(x is None or x == "auto" for x in config["experiment"].values())
    assert config["origin"]["num_envs"] == "typed" and config["origin"]["gamma"] == "default"
    shown = command("ppo", "--experiment", tmp_path, "--show-config").out
    assert f"run {tmp_path}" in shown and "typed" in shown.split("placement")[1]
    assert f"the experiment of run {tmp_path}" in shown.splitlines()[0]
    again = command("resume", tmp_path, "--show-config").out
    assert re.search(r"log_frequency +\d+ +earlier run", again) and re.search(r"grace_period .* default", again)


def test_help_has_the_values_of_the_environment_that_is_asked_for():
    pole, cheetah = (command("ppo", "--env-id", name, "--help").out for name in ("CartPole-v1", "HalfCheetah-v5"))
    words = lambda text: " ".join(text.split())
    assert "preset classic_control" in words(pole) and "preset continuous" in words(cheetah)
    entry = lambda text, flag: re.split(r"\n +--|\n\n", text.partition(f"  {flag} ")[2])[0]
    value = lambda text, flag: re.findall(r"\[default (.*?)\]", entry(text, flag))[0]
    assert value(pole, "--gae-lambda") == "0.95" and value(cheetah, "--update-epochs") == "10"
    assert value(pole, "--seed") == "1" and value(command("ppo", "--seed", "4", "--help").out, "--seed") == "4"
    lost = command("ppo", "--env-id", "Nope-v0", "--help")
    assert lost.code == 0 and "'Nope-v0' is not an EnvPool environment" in " ".join(lost.out.split())
