"""What is refused, what is filled in, who owns what, and what a file of it says."""

import dataclasses
import json
import re
import time

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from cleanba.algorithms.impala import IMPALA
from cleanba.algorithms.impala import check as check_impala
from cleanba.algorithms.ppo import PPO
from cleanba.algorithms.ppo import check as check_ppo
from cleanba.config import (
    Experiment,
    Partition,
    Placement,
    Run,
    differences,
    from_json,
    read_config,
    read_experiment,
    require,
    resolve,
    to_json,
)
from cleanba.environments.kinds import env_spec
from cleanba.errors import UsageError, closest_names, nearest
from cleanba.files import finite, write_json
from cleanba.recipes import RECIPES, stand_by, suit

# ---------------------------------------------------------------------------------------------- who owns what

splits = st.builds(
    dict,
    num_envs=st.integers(1, 130),
    num_actors=st.integers(1, 13),
    num_shards=st.integers(1, 13),
    num_processes=st.integers(1, 4),
    learners_per_process=st.integers(1, 4),
)


def fits(num_envs, num_actors, num_shards, num_processes, learners_per_process) -> bool:
    """The rules of the split, written once more."""
    return (
        num_envs % num_actors == 0
        and num_envs % num_shards == 0
        and num_actors % num_processes == 0
        and num_shards % (num_processes * learners_per_process) == 0
        and (num_actors % num_shards == 0 or num_shards % num_actors == 0)
    )


def refusal(**split) -> str | None:
    try:
        Partition(**split)
    except UsageError as error:
        return str(error)
    return None


@st.composite
def fitting_splits(draw):
    processes, learners = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    shards = processes * learners * draw(st.integers(1, 3))
    actors = shards * draw(st.integers(1, 3))
    if draw(st.booleans()):
        actors = processes * draw(st.sampled_from([d for d in range(1, 28) if (shards // processes) % d == 0]))
    envs = max(actors, shards) * draw(st.integers(1, 4))
    return Partition(envs, actors, shards, processes, learners)


def shard_envs(p: Partition, shard: int) -> range:
    """The environments whose steps a shard holds: `[sE/K, (s+1)E/K)`."""
    return range(shard * p.num_envs // p.num_shards, (shard + 1) * p.num_envs // p.num_shards)


@settings(max_examples=60, deadline=None)
@given(fitting_splits())
def test_every_environment_belongs_to_one_actor_one_shard_one_block_and_one_process(p):
    everything = list(range(p.num_envs))
    owned = lambda ranges: [env for r in ranges for env in r]
    assert owned(p.actor_envs(a) for a in range(p.num_actors)) == everything
    assert owned(shard_envs(p, s) for s in range(p.num_shards)) == everything
    assert owned(p.process_actors(i) for i in range(p.num_processes)) == list(range(p.num_actors))
    assert owned(p.process_shards(i) for i in range(p.num_processes)) == list(range(p.num_shards))
    for i in range(p.num_processes):  # no rollout crosses processes
        acted = owned(p.actor_envs(a) for a in p.process_actors(i))
        learnt = owned(shard_envs(p, s) for s in p.process_shards(i))
        assert acted == learnt == everything[i * len(acted) : (i + 1) * len(acted)]


@settings(max_examples=60, deadline=None)
@given(fitting_splits())
def test_a_block_lies_in_one_actor_and_one_shard(p):
    assert p.num_envs % p.num_blocks == 0
    size = p.num_envs // p.num_blocks
    for block in range(p.num_blocks):
        envs = set(range(block * size, (block + 1) * size))
        assert envs <= set(p.actor_envs(block // p.blocks_per_actor))
        assert envs <= set(shard_envs(p, block // p.blocks_per_shard))
    assert p.envs_per_actor * p.num_actors == p.envs_per_shard * p.num_shards == p.num_envs
    assert p.shards_per_learner * p.learners_per_process * p.num_processes == p.num_shards


@settings(max_examples=150, deadline=None)
@given(splits)
def test_splits_are_accepted_exactly_if_they_fit(split):
    assert (refusal(**split) is None) == fits(**split)


@st.composite
def refused_splits(draw):
    """Fitting splits with one number changed, or any that do not fit."""
    split = dataclasses.asdict(draw(fitting_splits()))
    wrong = (
        split | {draw(st.sampled_from(sorted(split))): draw(st.integers(1, 40))}
        if draw(st.booleans())
        else draw(splits)
    )
    assume(not fits(**wrong))
    return wrong


def suggestions(message: str) -> dict[str, list[int]]:
    """The flags that a message proposes, with the values for each."""
    found = re.findall(r"--(num-[a-z]+) (\d+(?: or \d+)*)", message)
    return {flag.replace("-", "_"): [int(v) for v in values.split(" or ")] for flag, values in found}


@settings(max_examples=150, deadline=None)
@given(refused_splits())
def test_every_value_that_a_refusal_suggests_is_accepted(split):
    message = refusal(**split)
    proposed = suggestions(message)
    fewer = re.search(r"use (\d+(?: or \d+)*) of them", message)
    assert proposed or fewer, message
    alone = [split | {flag: value} for flag, values in proposed.items() for value in values]
    if fewer:
        alone += [split | {"learners_per_process": int(n)} for n in fewer[1].split(" or ")]
    together = split | {flag: values[0] for flag, values in proposed.items()}
    assert all(fits(**s) for s in alone) or fits(**together), message


@settings(max_examples=100, deadline=None)
@given(refused_splits())
def test_no_value_nearer_than_the_suggested_ones_would_fit(split):
    proposed = suggestions(refusal(**split))
    if len(proposed) > 1:  # no value of one number would do, so some that fit together are proposed
        return
    [(flag, values)] = proposed.items()
    between = range(min([*values, split[flag]]) + 1, max([*values, split[flag]]))
    assert not any(fits(**split | {flag: value}) for value in between if value not in values)


@pytest.mark.parametrize(
    "split, words",
    [
        (dict(num_envs=120, num_actors=1, num_shards=7), ["num_envs=120", "7 shards", "--num-envs 119 or 126"]),
        (dict(num_envs=120, num_actors=7, num_shards=1), ["num_envs=120", "7 actors", "--num-envs 119 or 126"]),
        (dict(num_envs=120, num_actors=2, num_shards=3), ["num_actors=2", "num_shards=3", "--num-actors 1 or 3"]),
        (dict(num_envs=120, num_actors=4, num_shards=3, num_processes=2), ["num_shards=3", "2 processes"]),
        (dict(num_envs=120, num_actors=3, num_shards=2, num_processes=2), ["num_actors=3", "2 processes"]),
        (
            dict(num_envs=120, num_actors=4, num_shards=4, learners_per_process=3),
            ["num_shards=4", "3 learner devices", "use 1 or 2 or 4 of them", "--num-shards 12"],
        ),
    ],
)
def test_refusals_say_the_value_the_rule_and_the_remedy(split, words):
    message = refusal(**split)
    assert all(word in message for word in words), message


# ---------------------------------------------------------------------------------------- what is filled in

placements = given(
    actor_devices=st.integers(1, 8),
    learner_devices=st.integers(1, 8),
    num_processes=st.integers(1, 3),
    envs_per_shard=st.integers(1, 30),
)


@settings(max_examples=80, deadline=None)
@placements
def test_defaults_fit_every_placement_whose_devices_divide_the_environments(
    actor_devices, learner_devices, num_processes, envs_per_shard
):
    actor_devices, learner_devices = actor_devices * num_processes, learner_devices * num_processes
    e = resolve(Experiment(num_envs=learner_devices * envs_per_shard), actor_devices, learner_devices, num_processes)
    assert e.num_shards == learner_devices
    Partition(e.num_envs, e.num_actors, e.num_shards, num_processes, learner_devices // num_processes)


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
@settings(max_examples=80, deadline=None)
@placements
def test_default_actors_are_the_fitting_number_nearest_to_two_per_device_or_one_per_cpu(
    actor_devices, learner_devices, num_processes, envs_per_shard, platform
):
    actor_devices, learner_devices = actor_devices * num_processes, learner_devices * num_processes
    n = learner_devices * envs_per_shard
    wanted = {"cpu": 1, "gpu": 2}[platform] * actor_devices
    chosen = resolve(Experiment(num_envs=n), actor_devices, learner_devices, num_processes, platform).num_actors
    reach = wanted + max(wanted, learner_devices)  # a thread per environment helps nobody
    split = (num_processes, learner_devices // num_processes)
    fitting = [a for a in range(1, reach + 1) if fits(n, a, learner_devices, *split)]
    if any(a >= actor_devices for a in fitting):
        fitting = [a for a in fitting if a >= actor_devices]
    assert chosen in fitting
    assert abs(chosen - wanted) == min(abs(a - wanted) for a in fitting)


@pytest.mark.parametrize("devices", [1, 2, 3, 4, 5, 6, 8])
def test_the_default_number_of_environments_splits_over_usual_numbers_of_devices(devices):
    e = resolve(PPO(), devices, devices)
    p = Partition(e.num_envs, e.num_actors, e.num_shards, 1, devices)
    assert (e.num_actors, e.num_shards, p.shards_per_learner) == (2 * devices, devices, 1) or devices == 8
    check_ppo(e, p)


def test_what_was_asked_for_is_kept():
    e = resolve(PPO(num_actors=6, num_shards=3), 4, 1)
    assert (e.num_actors, e.num_shards) == (6, 3)
    assert resolve(PPO(num_shards=6), 1, 1).num_shards == 6
    assert resolve(PPO(num_actors=6), 1, 3).num_actors == 6
    assert resolve(e, 1, 1) == e  # resolved once, the placement does not matter any more


@pytest.mark.parametrize("name", ["num_envs", "num_actors", "num_shards", "num_steps", "update_epochs", "lstm_size"])
def test_absurd_numbers_are_refused_at_once(name):
    start = time.monotonic()
    with pytest.raises(UsageError, match=f"{name}=.* is too large"):
        resolve(PPO(**{name: 10**20}), 1, 1)
    with pytest.raises(UsageError, match="hiddens=.* is too large"):
        resolve(PPO(hiddens=(8, 10**20)), 1, 1)
    with pytest.raises(UsageError):  # as large as can be: still refused for not fitting, and soon
        e = resolve(PPO(num_envs=8, num_shards=10**4), 1, 1)
        Partition(e.num_envs, e.num_actors, e.num_shards, 1, 1)
    assert time.monotonic() - start < 5


def test_the_collector_is_the_faster_one_on_that_kind_of_device():
    assert [resolve(PPO(), 1, 1, 1, kind).collector for kind in ("cpu", "gpu")] == ["scanned", "stepped"]
    assert resolve(PPO(collector="stepped"), 1, 1, 1, "cpu").collector == "stepped"


@pytest.mark.parametrize(
    ("fields", "frequency"),
    [
        (dict(env_id="Catch-v0", num_envs=16, num_steps=64), 3906),  # 4 million steps
        (dict(env_id="Catch-v0"), 500),  # which are 7.7 million steps
        (dict(env_id="Catch-v0", num_envs=16, num_steps=64, collector="stepped"), 500),
        (dict(env_id="Catch-v0", num_envs=16, num_steps=8, collector="stepped"), 2000),  # two episodes of 8,000 steps
        (dict(env_id="Catch-v0", num_steps=64, max_episode_steps=50_001, collector="stepped"), 1563),
        (dict(env_id="HalfCheetah-v5", num_envs=16), 500),  # cannot be scanned
        (dict(env_id="Breakout-v5", num_envs=8, num_steps=16), 3375),  # images; two episodes of 27,000 steps
        (dict(env_id="Catch-v0", num_envs=16, env_epoch=7), 7),
        (dict(env_id="Catch-v0", num_envs=16, env_epoch=0), 0),
    ],
)
def test_epochs_are_longer_where_updates_are_short(fields, frequency):
    e = resolve(PPO(**fields), 1, 1, platform="cpu")
    assert suit(e, fields.get("collector"), env_spec(e)).env_epoch == frequency


@pytest.mark.parametrize(
    "name, env_id, steps, frequency",
    [("dqn", "Pong-v5", 16, 3375), ("dqn", "CartPole-v1", 10, 1600), ("sac", "HalfCheetah-v5", 1, 16_000)],
)
def test_no_algorithm_cuts_every_long_episode(name, env_id, steps, frequency):
    e = resolve(
        dataclasses.replace(RECIPES[name].settings(env_id), env_id=env_id, num_steps=steps), 1, 1, platform="cpu"
    )
    assert suit(e, None, env_spec(e)).env_epoch == frequency


def test_nothing_else_is_left_to_be_decided_by_the_placement():
    a, b = resolve(PPO(), 1, 2), resolve(PPO(), 4, 4)
    assert {line.split(":")[0] for line in differences(to_json(a), to_json(b))} == {"num_actors", "num_shards"}


# ------------------------------------------------------------------------------------------------ what is refused

INF, NAN = float("inf"), float("nan")

OUT_OF_RANGE = [
    *((name, value) for name in ("num_envs", "num_actors", "num_shards", "num_steps") for value in (0, -3)),
    *((name, value) for name in ("total_timesteps", "num_minibatches", "lstm_size") for value in (0, -3)),
    *((name, value) for name in ("learning_rate", "max_grad_norm") for value in (0.0, -1.0, INF, NAN)),
    *(("log_std_init", value) for value in (-21.0, 21.0, INF, NAN)),
    *((name, value) for name in ("gamma", "repeat_action_probability") for value in (-0.1, 1.1, NAN)),
    *((name, value) for name in ("ent_coef", "vf_coef") for value in (-0.1, INF, NAN)),
    *(("seed", value) for value in (-1, 2**31)),
    ("env_epoch", -1),
    ("max_episode_steps", 0),
    *((name, value) for name in ("channels", "hiddens") for value in ((), (16, 0))),
]


@pytest.mark.parametrize("name, value", OUT_OF_RANGE)
def test_numbers_out_of_range_are_refused_by_name(name, value):
    with pytest.raises(UsageError) as caught:
        resolve(PPO(**{name: value}), 1, 1)
    assert f"{name}={value}" in str(caught.value)


@pytest.mark.parametrize(
    "name, value",
    [("gamma", 0.0), ("gamma", 1.0), ("ent_coef", 0.0), ("env_epoch", 0), ("seed", 2**31 - 1), ("seed", 0)],
)
def test_numbers_at_the_edge_of_their_range_are_accepted(name, value):
    assert getattr(resolve(PPO(**{name: value}), 1, 1), name) == value


@pytest.mark.parametrize(
    "check, e, name",
    [
        (check_ppo, PPO(gae_lambda=1.5), "gae_lambda"),
        (check_ppo, PPO(update_epochs=0), "update_epochs"),
        (check_ppo, PPO(clip_coef=0.0), "clip_coef"),
        (check_impala, IMPALA(vtrace_lambda=-0.1), "vtrace_lambda"),
        (check_impala, IMPALA(rho_clip=0.0), "rho_clip"),
        (check_impala, IMPALA(c_clip=NAN), "c_clip"),
        (check_impala, IMPALA(rmsprop_decay=1.0), "rmsprop_decay"),
    ],
)
def test_hyperparameters_out_of_range_are_refused_by_name(check, e, name):
    with pytest.raises(UsageError, match=f"{name}=.*--{name.replace('_', '-')}"):
        check(e, Partition(120, 2, 1))


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 12), st.integers(1, 6), st.integers(1, 40), st.sampled_from(["none", "lstm"]))
def test_minibatches_that_cut_no_shard_evenly_are_refused_with_numbers_that_do(envs, steps, minibatches, core):
    e = PPO(num_envs=2 * envs, num_steps=steps, num_minibatches=minibatches, core=core)
    partition = Partition(2 * envs, 2, 2)
    size = envs * (steps if core == "none" else 1)
    if size % minibatches == 0:
        check_ppo(e, partition)
        return
    with pytest.raises(UsageError) as caught:
        check_ppo(e, partition)
    assert f"num_minibatches={minibatches}" in str(caught.value)
    values = suggestions(str(caught.value))["num_minibatches"]
    for value in values:
        check_ppo(dataclasses.replace(e, num_minibatches=value), partition)
    divisors = [d for d in range(1, size + 1) if size % d == 0]
    assert min(abs(v - minibatches) for v in values) == min(abs(d - minibatches) for d in divisors)


def test_require_raises_its_message_only_if_the_condition_fails():
    require(True, "fine")
    with pytest.raises(UsageError, match="not fine"):
        require(False, "not fine")


def test_derived_numbers():
    e = Experiment(total_timesteps=1000, num_envs=6, num_steps=7)
    assert (e.transitions_per_update, e.num_updates) == (42, 23)


# --------------------------------------------------------------------------------------------------- as a file


@pytest.mark.parametrize(
    "config",
    [Experiment(), PPO(), IMPALA(), IMPALA(rho_clip=float("inf")), Placement(), Run(), Run(stall_timeout=float("inf"))],
    ids=lambda c: type(c).__name__,
)
def test_a_configuration_survives_being_written_and_read(config):
    written = json.dumps(finite(to_json(config)), allow_nan=False)
    assert from_json(type(config), json.loads(written)) == config


@settings(max_examples=50, deadline=None)
@given(
    st.builds(
        PPO,
        seed=st.integers(0, 2**31 - 1),
        learning_rate=st.floats(1e-9, 1.0),
        num_actors=st.none() | st.integers(1, 99),
        reward_clip=st.none() | st.booleans(),
        hiddens=st.lists(st.integers(1, 999), min_size=1, max_size=4).map(tuple),
        env_options=st.lists(st.text(max_size=9), max_size=3).map(tuple),
        env_id=st.text(max_size=20),
    )
)
def test_an_experiment_survives_being_written_and_read(e):
    read = from_json(PPO, json.loads(json.dumps(to_json(e))))
    assert read == e and hash(read) == hash(e)
    assert differences(to_json(e), json.loads(json.dumps(to_json(read)))) == []


def test_fields_of_another_version_are_named():
    values = to_json(PPO())
    values["temperature"] = values.pop("gamma")
    with pytest.raises(UsageError, match="gamma, temperature"):
        from_json(PPO, values)


def test_differences_name_the_field_and_both_values():
    a, b = to_json(PPO()), to_json(PPO(gamma=0.5, hiddens=(64, 64)))
    assert differences(a, a) == []
    assert differences(a, b) == ["gamma: 0.99, now 0.5", "hiddens: [256], now [64, 64]"]
    assert differences({"old": 1}, {"new": 2}) == ["new: None, now 2", "old: 1, now None"]


# ------------------------------------------------------------------------------------------------------ remedies


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 300), st.integers(1, 40))
def test_nearest_gives_the_closest_on_each_side(value, divisor):
    assume(value % divisor)
    below, above = value - value % divisor, value - value % divisor + divisor
    assert nearest(value, lambda n: n % divisor == 0) == (f"{below} or {above}" if below else f"{above}")


def test_nearest_gives_nothing_where_nothing_fits():
    assert nearest(5, lambda n: False, limit=50) == ""
    assert nearest(5, lambda n: n == 3, limit=50) == "3"
    assert nearest(5, lambda n: n in (0, 9), limit=50) == "9"


@pytest.mark.parametrize(
    "name, best",
    [
        ("Breakot-v5", "Breakout-v5"),
        ("breakout-v5", "Breakout-v5"),
        ("BREAKOUT", "Breakout-v5"),
        ("cart", "CartPole-v1"),
    ],
)
def test_closest_names_forgive_case_and_typing_errors(name, best):
    known = ["Pong-v5", "CartPole-v1", "Breakout-v5", "Acrobot-v1"]
    assert closest_names(name, known).split(", ")[0] == best


def test_closest_names_are_few_and_none_if_nothing_is_alike():
    assert len(closest_names("Env-v1", [f"Env{i}-v1" for i in range(9)]).split(", ")) == 3
    assert closest_names("zzz", ["Pong-v5", "CartPole-v1"]) == ""


# --------------------------------------------------------------------------------------------------- runs that go on


def run_with(tmp_path, **changes):
    """The directory of a run whose first start resolved what its flags left out."""
    e = resolve(PPO(env_id="Catch-v0", num_envs=24, **changes), 2, 3, platform="cpu")
    write_json(tmp_path / "config.json", {"experiment": {"algorithm": "ppo", **to_json(e)}})
    return e


def test_what_the_first_run_resolved_stands(tmp_path):
    """On two actor and three learner devices; it goes on with one of each, and the same command."""
    e = run_with(tmp_path)
    assert (e.num_actors, e.num_shards, e.collector) == (3, 3, "scanned")
    again = PPO(env_id="Catch-v0", num_envs=24)
    standing, changed = stand_by("ppo", again, tmp_path)
    assert resolve(standing, 1, 1, platform="gpu") == e and not changed
    assert stand_by("ppo", again, tmp_path / "elsewhere") == (again, [])


def test_only_what_was_typed_can_contradict_it(tmp_path):
    run_with(tmp_path)
    for typed, words in (
        (PPO(env_id="Catch-v0", num_envs=24, num_shards=6), ["num_shards: 3, now 6"]),
        (PPO(env_id="Catch-v0", num_envs=7), ["num_envs: 24, now 7"]),
        (PPO(env_id="Catch-v0", num_envs=24, num_actors=3, seed=2), ["seed: 1, now 2"]),
    ):
        assert stand_by("ppo", typed, tmp_path) == (typed, words)
    assert "algorithm: ppo, now impala" in stand_by("impala", IMPALA(env_id="Catch-v0", num_envs=24), tmp_path)[1]


def test_what_once_said_both_is_read_as_both(tmp_path):
    """config.json of a run from before epochs of environments and checkpoints were told apart."""
    e, run = to_json(PPO(env_epoch=7)), to_json(Run())
    e["checkpoint_frequency"] = e.pop("env_epoch")
    del run["checkpoint_frequency"]
    write_json(tmp_path / "config.json", {"experiment": {"algorithm": "ppo", **e}, "run": run})
    assert differences(read_experiment(tmp_path), {"algorithm": "ppo", **to_json(PPO(env_epoch=7))}) == []
    assert from_json(Run, read_config(tmp_path)["run"]) == Run(checkpoint_frequency=7)
