"""Evaluation, films and the list of runs."""

import errno
import fcntl
import json
import math
import os
import re
import shutil
import signal
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import imageio.v2 as imageio
import jax
import numpy as np
import pytest
from launch import ROOT, TINY, command, finish, in_pairs, python, read_result, read_rows
from scripted import Play, ScriptedEnvs, mirror, spec

from cleanba import launch
from cleanba.agents import evaluate, periodic_evaluation
from cleanba.agents import film as films
from cleanba.agents.initial import find_initial
from cleanba.agents.policy import Policy, load_policy, read_best
from cleanba.arguments import parse_command
from cleanba.config import Experiment, Placement, Run
from cleanba.environments.action_names import ATARI_ACTIONS, action_names
from cleanba.environments.atari_scores import human_normalised, reference, table
from cleanba.environments.backends import env_spec
from cleanba.errors import Failure, UsageError
from cleanba.recipes import RECIPES
from cleanba.rollout import Episode
from cleanba.runs import listing
from cleanba.runs.log import newest
from cleanba.runtime.checkpoint import Saved, save_model, updates_kept
from cleanba.runtime.devices import find_devices
from cleanba.runtime.supervision import Watchdog
from cleanba.seeds import MAX_EVAL_ENVS, env_seed, eval_seed
from cleanba.specs import ActionSpec, ObsSpec
from cleanba.trust import mark_downloaded

pytestmark = pytest.mark.filterwarnings("ignore:os.fork:RuntimeWarning")  # imageio starts ffmpeg to read a film

SHORT, LONG = Play((1.0,)), Play((0.0,) * 39 + (10.0,))


class DrawnEnvs(ScriptedEnvs):
    """Scripted environments that can be filmed."""

    steps_per_second = 10.0

    def render(self, env: int) -> np.ndarray:
        return np.full((30, 20, 3), 5 * self._step[env], np.uint8)


def agent(algorithm=None, inspect=None) -> Policy:
    algorithm = (algorithm or mirror())._replace(inspect=inspect)
    act = lambda params, carry, obs, first, key, t, explore: algorithm.act(params, carry, obs, first, key, explore)[:2]
    return Policy(Experiment(), spec(), RECIPES["ppo"], algorithm, jax.jit(act, static_argnums=6), {}, 3, 100)


def play_scripts(scripts, episodes, film=None, algorithm=None, inspect=None, max_steps=None, **common):
    """The episodes that were played, and the environments that played the last of them."""
    made = []

    def make(seeds):
        made.append(DrawnEnvs(seeds, 0, scripts, **common))
        return made[-1]

    them = agent(algorithm, inspect)
    played = evaluate.play(them, episodes, 1, jax.devices()[0], make_envs=make, film=film, max_steps=max_steps)
    return played, made[-1]


def test_short_episodes_count_no_more_than_long_ones():
    """Half of the environments play episodes of one step that return 1, the others of 40 steps that return 10."""
    played, envs = play_scripts([[SHORT], [LONG]], 40)
    assert envs.num_envs == MAX_EVAL_ENVS == 16
    # 40 over 16 environments: three each for the first eight, two for the rest; even ones play the short game.
    assert [e.ret for e in played] == [1.0] * 3 + [10.0] * 3 + ([1.0] * 3 + [10.0] * 3) * 3 + (
        [1.0] * 2 + [10.0] * 2
    ) * 4
    assert evaluate.summary("Scripted-v0", False, played) == {
        "episodes": 40,
        "mean": 5.5,
        "std": 4.5,
        "median": 5.5,
        "min": 1.0,
        "max": 10.0,
        "mean_length": 20.5,
        "human_normalised_score": None,
        "truncated": 0,
        "returns": [e.ret for e in played],
        "lengths": [e.length for e in played],
    }
    assert envs.closed == 1


def test_an_evaluation_reports_the_infos_that_the_run_logs():
    told = lambda *infos: Episode(1.0, 5, infos=infos)
    episodes = [told(1.0, np.nan), told(0.0, np.nan), Episode(1.0, 9, cut=True)]
    r = evaluate.summary("odd:Succeeds", False, episodes, ("is_success", "distance"))
    assert r["infos"] == {"is_success": 0.5, "distance": None}
    about = {"algorithm": "ppo", "env_id": "odd:Succeeds", "update": None, "seed": 1, "greedy": True, "epsilon": 0.0}
    words = evaluate.in_words(about | r | {"max_steps": 9})
    assert "\nis_success: mean 0.5\ndistance: no episode ended with it" in words


def test_an_environment_with_episodes_of_both_kinds_plays_them_in_its_order():
    played, _ = play_scripts([[LONG, SHORT, SHORT]], 1)
    assert played == [Episode(10.0, 40)]
    played, _ = play_scripts([[LONG, SHORT, SHORT]], 33)
    first, second = [Episode(10.0, 40)], [Episode(1.0, 1)]
    assert played == first + second * 2 + (first + second) * 15


def test_returns_are_raw_and_whole():
    """No clipping; a reward at a reset belongs to no episode; the loss of a life ends no game."""
    lives = [Play((5.0, -3.0), over=False), Play((7.0,), terminated=False, truncated=True)]
    played, _ = play_scripts([lives], 2, clip_reward=True, reward_at_reset=100.0)
    assert played == [Episode(9.0, 3)] * 2


def test_an_episode_that_does_not_end_is_cut_off_and_the_rest_is_still_played():
    """Every other environment plays for ever.  Each plays three episodes, the odd ones as without a limit."""
    endless = Play((2.0,) * 1000)
    played, last = play_scripts([[endless], [SHORT, LONG]], 6, max_steps=45)
    assert played == [Episode(90.0, 45, cut=True), Episode(1.0, 1)] * 3
    played, last = play_scripts([[endless], [SHORT, LONG]], 48, max_steps=45)
    assert played == ([Episode(90.0, 45, cut=True)] * 3 + [Episode(1.0, 1), Episode(10.0, 40), Episode(1.0, 1)]) * 8
    assert last.closed == 1 and len(last.actions) == 45, "fresh environments play what is left"
    assert evaluate.summary("Scripted-v0", False, played)["truncated"] == 24
    # An episode that ends by itself is not cut off, whatever limit the environment states.
    assert evaluate.step_limit(spec(), None) == evaluate.step_limit(spec()._replace(time_limit=40), None) == 27_000
    assert evaluate.step_limit(spec()._replace(time_limit=10**6), None) == 10**6
    assert not any(episode.cut for episode in play_scripts([[LONG]], 3, max_steps=41)[0])


def test_environments_state_their_time_limits():
    limits = {"CartPole-v1": 500, "gymnasium:CartPole-v1": 500, "Catch-v0": None, "odd:Endless-v0": None}
    assert {name: env_spec(Experiment(env_id=name)).time_limit for name in limits} == limits
    assert env_spec(Experiment(env_id="odd:Endless-v0", max_episode_steps=7)).time_limit == 7


def test_first_marks_the_first_observation_of_each_episode():
    seen = []

    def act(params, carry, obs, first, key, explore):
        jax.debug.callback(lambda o, f: seen.append((o[0, 2:].tolist(), bool(f[0]))), obs, first, ordered=True)
        return obs[:, 3].astype("int32") * 0, carry, {}

    play_scripts([[Play((1.0, 1.0)), SHORT, SHORT]], 17, algorithm=mirror()._replace(act=act))
    jax.effects_barrier()
    # [episode, step], first: what answers the terminal observation [0, 2] is ignored, and [1, 0] comes after it.
    assert seen == [([0, 0], True), ([0, 1], False), ([0, 2], False), ([1, 0], True)]


def test_evaluation_and_training_have_no_seed_in_common():
    training = {env_seed(1, i, epoch, 120) for i in range(120) for epoch in range(50)}
    evaluation = [eval_seed(1, i, epoch, 16) for i in range(16) for epoch in range(50)]
    assert max(training) < 2**30 <= min(evaluation)
    assert max(evaluation) < 2**31  # EnvPool takes no more
    assert len(set(evaluation)) == len(evaluation)
    assert eval_seed(1, 3, 2**26, 16) == eval_seed(1, 3, 1, 16)  # update 67,108,864 of a very long run


def test_no_two_evaluations_play_the_same_games_however_many_episodes_they_have():
    """Evaluations during training choose the best parameters, which `cleanba eval` (epoch 0) then measures."""
    opened = []

    def make(seeds):
        opened.extend(seeds)
        return DrawnEnvs(seeds, 0, [[SHORT]])

    for epoch, episodes in ((0, 30), (1, 10), (2, 10), (3, 1)):
        evaluate.play(agent(), episodes, 1, jax.devices()[0], epoch=epoch, make_envs=make)
    assert len(set(opened)) == len(opened) == 16 + 10 + 10 + 1


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> dict[str, Path]:
    """A feed-forward agent that has learnt Catch, and a recurrent one that was only begun."""
    folder = tmp_path_factory.mktemp("runs")
    learn = (
        *("--env-id", "Catch-v0", "--total-timesteps", "80000", "--num-envs", "64", "--num-steps", "16"),
        *("--num-actors", "1", "--hiddens", "64", "--learning-rate", "5e-3", "--env-epoch", "0"),
    )
    ended = command("ppo", *learn, "--run-dir", folder / "ff")
    assert ended.code == 0, ended.err
    recurrent = ("--core", "lstm", "--lstm-size", "8", "--env-epoch", "2", "--checkpoint-frequency", "2")
    ended = command("impala", *TINY, *recurrent, "--run-dir", folder / "lstm")
    assert ended.code == 0, ended.err
    return {"ff": folder / "ff", "lstm": folder / "lstm"}


def read_eval(run_dir: Path) -> dict:
    return json.loads((run_dir / "eval.json").read_text())


def test_a_trained_agent_plays_as_well_as_it_trained(runs):
    ended = command("eval", runs["ff"], "--episodes", "200")
    assert ended.code == 0, ended.err
    evaluation, training = read_eval(runs["ff"]), read_result(runs["ff"])
    assert training["episodic_return"] > 0.8
    assert evaluation["mean"] == pytest.approx(training["episodic_return"], abs=0.12)
    assert evaluation["mean_length"] == training["episodic_length"] == 9
    assert evaluation["params_digest"] == training["params_digest"]
    assert evaluation["update"] == training["update"] and evaluation["global_step"] == training["global_step"]
    assert f"mean {evaluation['mean']:g}" in ended.out


def test_the_same_seed_plays_the_same_games(runs):
    def played(*words):
        assert command("eval", runs["lstm"], *words).code == 0
        evaluation = read_eval(runs["lstm"])
        return evaluation["returns"], evaluation["lengths"]

    flags = ("--episodes", "40", "--epsilon", "0.5")  # it loses often enough for other games to show
    first = played(*flags, "--seed", "5")
    assert played(*flags, "--seed", "5") == first
    assert played(*flags, "--seed", "6") != first
    assert played(*flags, "--seed", "5", "--greedy") == played(*flags, "--seed", "5", "--greedy")


def test_a_flag_that_would_change_nothing_is_refused():
    with pytest.raises(UsageError, match="--no-greedy"):
        parse_command(evaluate.Eval, ["runs/a", "--no-greedy"], "eval")
    assert parse_command(evaluate.Eval, ["runs/a", "--greedy"], "eval").greedy


def test_greedy_takes_no_random_action_unless_epsilon_is_given():
    dqn, ppo = RECIPES["dqn"].plays, RECIPES["ppo"].plays
    assert dqn.changed(None, None) == dqn and dqn.epsilon == 0.05
    assert dqn.changed(True, None) == (True, 0.0) and dqn.changed(True, 0.1) == (True, 0.1)
    assert dqn.changed(None, 0.1) == (True, 0.1) and ppo.changed(True, None) == (True, 0.0)


def test_an_evaluation_does_not_overwrite_one_of_another_mode(runs):
    kept = {}
    for flags in ([], ["--greedy"], ["--epsilon", "0.5"], ["--greedy", "--seed", "2"]):
        assert command("eval", runs["ff"], "--episodes", "2", *flags).code == 0
        kept[" ".join(flags)] = read_eval(runs["ff"])
    files = [json.loads(path.read_text()) for path in (runs["ff"] / "evaluations").glob("*.json")]
    for flags, evaluation in kept.items():
        assert evaluation in files, flags


def test_checkpoints_are_found_or_named(runs):
    assert updates_kept(runs["lstm"])[-1] == read_result(runs["lstm"])["update"]
    first = updates_kept(runs["lstm"])[0]
    assert command("eval", runs["lstm"], "--episodes", "2", "--checkpoint", first).code == 0
    assert read_eval(runs["lstm"])["update"] == first
    missing = command("eval", runs["lstm"], "--checkpoint", "7777")
    assert missing.code == 2
    assert f"it has {', '.join(map(str, updates_kept(runs['lstm'])))}" in missing.err
    assert command("eval", runs["lstm"], "--checkpoint", "newest").code == 2
    assert command("eval", runs["lstm"], "--episodes", "0").code == 2


def test_a_damaged_checkpoint_of_an_unfinished_run_is_skipped(runs, tmp_path):
    run_dir = tmp_path / "damaged"
    shutil.copytree(runs["lstm"], run_dir)
    older, newest = updates_kept(run_dir)
    save_model(run_dir / "kept.msgpack", load_policy(run_dir, "last", "cpu").params)
    for path in (run_dir / "checkpoints" / str(newest) / "arrays").rglob("*"):
        if path.is_file() and path.parent.name == "d":
            path.write_bytes(path.read_bytes()[:-20])
    ended = command("eval", run_dir, "--episodes", "2")  # an earlier policy is not what a finished run ended with
    assert ended.code == 1 and f"checkpoint {newest}" in ended.err and "cannot be read" in ended.err, ended
    moved = (run_dir / "checkpoints" / str(newest)).rename(tmp_path / "moved")
    ended = command("eval", run_dir, "--episodes", "2")
    assert ended.code == 1 and f"finished with update {newest}, but its last parameters cannot be read" in ended.err
    moved.rename(run_dir / "checkpoints" / str(newest))
    with pytest.raises(Failure, match=f"checkpoint {newest}.*cannot be read.*; name another run, or"):  # as in eval
        find_initial(str(run_dir), "cpu")

    (run_dir / "kept.msgpack").rename(run_dir / "model.msgpack")
    ended = command("eval", run_dir, "--episodes", "2")
    assert ended.code == 0 and read_eval(run_dir)["update"] == newest and not ended.err, ended
    assert read_eval(run_dir)["params_digest"] == read_result(run_dir)["params_digest"]
    save_model(run_dir / "model.msgpack", load_policy(run_dir, str(older), "cpu").params)
    assert command("eval", run_dir, "--episodes", "2").code == 1

    (run_dir / "result.json").unlink()
    ended = command("eval", run_dir, "--episodes", "2")
    assert ended.code == 0 and read_eval(run_dir)["update"] == older
    assert f"warning: checkpoint {newest}" in ended.err and ended.err.count("\n") == 1
    assert "try another" not in ended.err and f"taking the checkpoint of update {older} instead" in ended.err
    ended = command("eval", run_dir, "--episodes", "2", "--checkpoint", newest)
    assert ended.code == 1 and "cannot be read" in ended.err


def test_places_without_a_run_are_refused(tmp_path):
    ended = command("eval", tmp_path / "nowhere")
    assert ended.code == 2 and "nowhere/config.json does not exist" in ended.err


def test_a_run_without_checkpoints_is_played_from_its_model(runs, tmp_path):
    run_dir = tmp_path / "model"
    run_dir.mkdir()
    shutil.copy(runs["ff"] / "config.json", run_dir)
    ended = command("eval", run_dir)
    assert ended.code == 2 and "has no checkpoint yet" in ended.err
    from cleanba.runtime.checkpoint import save_model

    platform = jax.devices()[0].platform
    save_model(run_dir / "model.msgpack", load_policy(runs["ff"], "last", platform).params)
    assert command("eval", run_dir, "--episodes", "20").code == 0
    from_model = read_eval(run_dir)
    assert command("eval", runs["ff"], "--episodes", "20").code == 0
    assert from_model["returns"] == read_eval(runs["ff"])["returns"]
    assert from_model["params_digest"] == read_eval(runs["ff"])["params_digest"]
    (run_dir / "model.msgpack").write_bytes(b"no model")
    assert command("eval", run_dir).code == 1


def test_human_normalised_scores():
    assert len(table()) == 57
    breakout = reference("Breakout-v5")
    assert (breakout["random"], breakout["human"]) == (1.7, 30.5)
    assert human_normalised("Breakout-v5", 30.5) == 1 and human_normalised("Breakout-v5", 1.7) == 0
    assert reference("CartPole-v1") is None and human_normalised("CartPole-v1", 1.0) is None
    atari = evaluate.summary("Breakout-v5", True, [Episode(1.7, 5), Episode(59.3, 5)])
    assert atari["human_normalised_score"] == pytest.approx(1)


def uniform(params, carry, obs, first):
    """What a film shows of a policy with two equally likely actions."""
    return {"value": jax.numpy.zeros(first.shape), "probability": jax.numpy.full((*first.shape, 2), 0.5)}


def test_a_film_has_every_step_of_the_first_episode(tmp_path):
    (tmp_path / "videos").mkdir()
    for name in ("old", "new"):  # of another process, which was killed, and of one that may be at work
        (tmp_path / "videos" / f".film.{name}.tmp.mp4").write_bytes(b"x")
    os.utime(tmp_path / "videos" / ".film.old.tmp.mp4", (0, 0))
    film = films.Film(tmp_path / "videos" / "film.mp4", agent(inspect=uniform))
    assert [path.name for path in (tmp_path / "videos").iterdir()] == [".film.new.tmp.mp4"]
    (tmp_path / "videos" / ".film.new.tmp.mp4").unlink()
    played, _ = play_scripts([[LONG], [SHORT]], 40, film=film)
    film.close()
    assert played == play_scripts([[LONG], [SHORT]], 40)[0]
    with imageio.get_reader(film.path) as reader:
        meta = reader.get_meta_data()
        assert reader.count_frames() == film.frames == 41  # before each of 40 actions, and the end
    assert meta["codec"] == "h264" and meta["pix_fmt"].startswith("yuv420p")
    assert meta["fps"] == 10
    assert [path.name for path in film.path.parent.iterdir()] == ["film.mp4"]
    whole = film.path.read_bytes()
    assert films.is_whole(film.path)
    for cut in (0, 5, len(whole) // 2, len(whole) - 1):  # what a full disk leaves
        film.path.write_bytes(whole[:cut])
        assert not films.is_whole(film.path), cut


def test_the_frames_of_a_film_have_one_size_whatever_the_environment_draws(tmp_path, monkeypatch):
    drawn = [(30, 20), (33, 21), (1, 2000), (2000, 1), (600, 600)]
    render = lambda envs, env: np.full((*drawn[envs._step[env] % len(drawn)], 3), 200, np.uint8)
    monkeypatch.setattr(DrawnEnvs, "render", render)
    film = films.Film(tmp_path / "film.mp4", agent(inspect=uniform))
    play_scripts([[LONG]], 1, film=film)
    film.close()
    assert film.frames == 41 and films.is_whole(film.path)
    assert films.fit(np.zeros((1, 2000, 3), np.uint8), *films.PICTURE).size == (480, 1)


def test_a_film_that_cannot_be_written_is_refused_in_one_sentence(tmp_path):
    film = films.Film(tmp_path / f"{'x' * 245}.mp4", agent(inspect=uniform))  # too long with the scratch file's ending
    with pytest.raises(Failure) as caught:
        play_scripts([[LONG], [SHORT]], 40, film=film)
    assert str(caught.value).endswith(
        "xx.mp4 cannot be written: File name too long; choose another place, or make room"
    )


def test_a_result_that_cannot_be_written_is_still_printed(runs, tmp_path, monkeypatch):
    shutil.copytree(runs["ff"], tmp_path / "run")

    def full(path, values, shared=False):
        raise OSError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(evaluate, "write_json", full)
    ended = command("eval", tmp_path / "run", "--episodes", "2")
    assert ended.code == 1 and "return: mean" in ended.out and "written:" not in ended.out
    assert "eval.json cannot be written (Permission denied), so only the lines above" in ended.err


def test_an_episode_that_did_not_end_leaves_no_film(tmp_path):
    film = films.Film(tmp_path / "film.mp4", agent(inspect=uniform))

    steps_left = iter(range(5))

    def interrupt(doing):
        if not doing.startswith("playing"):
            return
        if next(steps_left, None) is None:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        evaluate.play(
            agent(inspect=uniform),
            1,
            1,
            jax.devices()[0],
            film=film,
            make_envs=lambda seeds: DrawnEnvs(seeds, 0, [[LONG]]),
            check=interrupt,
        )
    film.close()
    assert film.frames == 6 and list(tmp_path.iterdir()) == []


def test_frames_show_stacks_numbers_and_all_actions():
    stack = np.arange(4, dtype=np.uint8)[None, :, None, None] * np.ones((1, 1, 84, 84), np.uint8) * 60
    draw = lambda x, grey=False: np.asarray(films.see({"": x[0]}, grey))
    sheet = draw(stack)
    assert [sheet[y, x, 0] for y in (80, 250) for x in (80, 250)] == [0, 60, 120, 180]  # oldest first
    colours = np.zeros((2, 6, 84, 84), np.uint8)
    colours[0, 3] = 200  # red of the second picture
    assert draw(colours)[80, 250].tolist() == [200, 0, 0]
    assert draw(colours, grey=True).shape[0] > draw(colours).shape[0]  # six tiles
    # Gymnasium's pictures have their colours last.
    assert np.array_equal(draw(colours.transpose(0, 2, 3, 1)), draw(colours))
    assert len(draw(np.zeros((2, 4), np.float32))) == 4 * films.LINE
    assert films.see({"a": np.zeros(100), "b": np.zeros(1)}).height == (8 + 1 + 1) * films.LINE
    policy = np.asarray(films.draw_policy(ATARI_ACTIONS, np.eye(18)[17], [17]))
    assert policy.shape[0] <= films.PICTURE[1]
    for values in ([np.nan, 0.5], [np.inf, 0.5], [np.nan, np.nan]):  # of a network that has diverged
        assert np.asarray(films.draw_policy(("a", "b"), np.array(values), [0])).any()
    assert (policy[17 * films.LINE + 10, 200] > 100).any() and (policy[10, 200] < 50).all()


def test_frames_show_the_pictures_and_numbers_of_a_dictionary_but_no_mask():
    specs = {"action_mask": ObsSpec("mask", (4,), "int8"), "at": ObsSpec("vector", (2,), "float32")}
    specs |= {"look": {"front": ObsSpec("image", (40, 40, 3), "uint8")}}
    front = np.full((1, 40, 40, 3), (200, 0, 0), np.uint8)
    obs = {"action_mask": np.ones((1, 4), np.int8), "at": np.zeros((1, 2), np.float32), "look": {"front": front}}
    parts = films.seen(specs, obs)
    assert list(parts) == ["at", "look.front"] and parts["look.front"].shape == (40, 40, 3)
    sheet = np.asarray(films.see(parts))
    assert sheet[80, 80].tolist() == [200, 0, 0]
    assert len(sheet) == films.LINE + 4 + films.TILE + 4 + 2 * films.LINE  # a name, the picture, two numbers
    assert sheet[-2 * films.LINE :].max() > 200
    assert films.see(films.seen(specs["at"], obs["at"])).height == 2 * films.LINE


def test_no_bar_is_drawn_over_a_number():
    def text(values):  # what is grey in the first row; bars are blue
        row = np.asarray(films.draw_policy(("left", "right"), np.array(values), []))[: films.LINE].astype(int)
        return (np.ptp(row, axis=-1) < 12) & (row.min(-1) > 60)

    for value in (123.45, 1e5, 1.5e20):
        assert text([value, 0.0]).sum() > text([value, 0.0])[:, :40].sum() > 0
        assert np.array_equal(text([value, 0.0]), text([value, 1e3 * value]))  # a long bar, and a short one


@pytest.mark.parametrize(
    "env_id, names",
    [
        ("HalfCheetah-v5", ("back thigh", "back shin")),
        ("gymnasium:CartPole-v1", ("left", "right")),
        ("Pong-v5", ("noop", "fire")),
        ("odd:Odd", ("action 0", "action 1")),
    ],
)
def test_actions_are_called_by_their_names(env_id, names):
    spec = env_spec(Experiment(env_id=env_id))
    assert action_names(spec)[:2] == names
    assert len(action_names(spec)) == (spec.num_actions or spec.action.size)


def test_actions_without_names_are_called_as_the_environment_counts_them():
    spec = env_spec(Experiment(env_id="odd:Odd"))
    five = ActionSpec("choice", counts=(3,), low=(5,), high=(7,))
    assert action_names(spec._replace(action=five)) == ("action 5", "action 6", "action 7")
    both = ActionSpec("choices", (2,), "int8", (2, 3), (-1, 0), (0, 2))
    assert action_names(spec._replace(action=both))[:3] == ("action[0] = -1", "action[0] = 0", "action[1] = 0")
    unbounded = ActionSpec("quantities", (2,), "float32", (), (-math.inf, -math.inf), (math.inf, math.inf))
    assert action_names(spec._replace(action=unbounded)) == ("action[0]", "action[1]")


def test_environments_that_cannot_be_drawn_are_named(runs):
    ended = command("eval", runs["ff"], "--episodes", "2", "--video")
    assert ended.code == 2 and "EnvPool cannot draw Catch-v0" in ended.err
    assert not (runs["ff"] / "videos").exists() or not list((runs["ff"] / "videos").iterdir())


def test_ls_shows_every_run_whatever_its_files_hold(runs, tmp_path):
    for name, text in {"list": "[]", "cut": "{", "[bold]": '{"experiment": {}}'}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(text)
    (tmp_path / "file").write_text("")
    (tmp_path / "empty" / "deep").mkdir(parents=True)
    shutil.copytree(runs["ff"], tmp_path / "sweep" / "done")
    shutil.copytree(runs["lstm"], tmp_path / "killed")
    (tmp_path / "killed" / "result.json").unlink()
    rows = (tmp_path / "killed" / "metrics.jsonl").read_text().splitlines()
    (tmp_path / "killed" / "metrics.jsonl").write_text("\n".join(rows[:2]) + '\n{"update": 3, "gl')

    for name, seed in (("infinite", "1e999"), ("deep", "[" * 100_000)):
        shutil.copytree(tmp_path / "killed", tmp_path / name)
        text = (tmp_path / name / "config.json").read_text()
        (tmp_path / name / "config.json").write_text(re.sub(r'"seed": \d+', f'"seed": {seed}', text))
    for name, to in (("a link", "killed"), ("z link", "killed"), ("folder", "sweep")):
        (tmp_path / name).symlink_to(tmp_path / to)  # each run is listed once

    ended = command("ls", tmp_path)
    assert ended.code == 0, ended.err
    lines = {line.split()[0]: line.split()[1:] for line in ended.out.splitlines()}
    assert {name: rest[0] for name, rest in lines.items()} == {
        "run": "status", "list": "damaged", "cut": "damaged", "[bold]": "damaged",
        "sweep/done": "finished", "killed": "unfinished", "infinite": "damaged", "deep": "damaged",
    }  # fmt: skip
    result = read_result(runs["ff"])
    assert lines["sweep/done"][:5] == ["finished", "Catch-v0", "ppo", "1", "100%"]
    assert f"{result['episodic_return']:.5g}" in lines["sweep/done"]
    killed, updates = listing.read_run(tmp_path / "killed"), read_result(runs["lstm"])["update"]
    assert killed.progress == pytest.approx(read_rows(runs["lstm"])[1]["update"] / updates)

    listed = [json.loads(line) for line in command("ls", tmp_path, "--json").out.splitlines()]
    assert {row["path"]: row["status"] for row in listed} == {
        str(tmp_path / name): rest[0] for name, rest in lines.items() if name != "run"
    }
    (row,) = [row for row in listed if row["path"].endswith("done")]
    assert (row["mean_return"], row["progress"], row["seed"]) == (result["episodic_return"], 1.0, 1)

    with (tmp_path / "killed" / ".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert listing.read_run(tmp_path / "killed").status == "running"
    assert listing.read_run(tmp_path / "killed").status == "unfinished"


def test_ls_shows_runs_that_lost_a_file(tmp_path):
    config = {"env_id": "X", "algorithm": "ppo", "seed": 1, "total_timesteps": 8, "num_envs": 1, "num_steps": 1}
    given = {"config.json": json.dumps({"experiment": config}), "result.json": "{}", "metrics.jsonl": ""}
    holds = {
        "unknown": "metrics.jsonl", "ended": "result.json", "unlogged": "config.json result.json",
        "theirs": "config.json result.json", "begun": "config.json", "unknown/inside": "config.json", "none": "",
    }  # fmt: skip
    for name, files in holds.items():
        (tmp_path / name).mkdir()
        for file in files.split():
            (tmp_path / name / file).write_text(given[file])
    mark_downloaded(tmp_path / "theirs", "hf://somebody/run")
    for name in ("saved", "someone's"):
        (tmp_path / name / "checkpoints" / ("4" if name == "saved" else "best")).mkdir(parents=True)
    assert {str(path.relative_to(tmp_path)): listing.read_run(path).status for path in listing.find_runs(tmp_path)} == {
        "unknown": "damaged", "ended": "damaged", "unlogged": "damaged", "saved": "damaged",
        "theirs": "unfinished", "begun": "unfinished", "unknown/inside": "unfinished",
    }  # fmt: skip


def test_all_runs_of_a_folder_are_evaluated(runs, tmp_path):
    for seed in (1, 2):
        config = json.loads((shutil.copytree(runs["ff"], tmp_path / f"s{seed}") / "config.json").read_text())
        config["experiment"] |= {"seed": seed}
        (tmp_path / f"s{seed}" / "config.json").write_text(json.dumps(config))
        (tmp_path / f"s{seed}" / "eval.json").unlink(missing_ok=True)
    shutil.copytree(runs["ff"], tmp_path / "cut")
    (tmp_path / "cut" / "result.json").unlink()
    shutil.copytree(tmp_path / "s1", tmp_path / "twice")
    ended = command("eval", tmp_path, "--episodes", "3")
    assert ended.code == 0 and f"left out, as they have not finished: {tmp_path / 'cut'} (unfinished)" in ended.err, (
        ended.err
    )
    assert f"{tmp_path / 'twice'} is the same experiment and seed as {tmp_path / 's1'}; left out" in ended.err
    means = [json.loads((tmp_path / f"s{seed}" / "eval.json").read_text())["mean"] for seed in (1, 2)]
    (line,) = [line for line in ended.out.splitlines() if line.startswith("| Catch-v0")]
    assert [cell.strip() for cell in line.split("|")][2:4] == ["ppo", "2"]
    assert f" {np.mean(means):.4g} [" in line
    ended = command("eval", tmp_path, "--episodes", "3", "--checkpoint", "best")  # they have none
    assert ended.code == 1 and ended.err.count("; left out") == 3 and "| environment" not in ended.out, ended.err
    (tmp_path / "s1" / "checkpoints").rename(tmp_path / "s1" / "away")  # its twin is played in its place
    ended = command("eval", tmp_path, "--episodes", "3")
    assert ended.code == 1 and f"{tmp_path / 's1'}: " in ended.err and "is the same experiment" not in ended.err
    assert command("eval", "").code == 2
    (tmp_path / "empty").mkdir()
    assert "holds no run" in command("eval", tmp_path / "empty").err
    assert (
        "holds no finished run" in command("eval", shutil.move(tmp_path / "cut", tmp_path / "empty" / "cut").parent).err
    )


def test_ls_and_diff_show_no_control_characters_of_a_strangers_files(runs, tmp_path):
    config = json.loads((runs["ff"] / "config.json").read_text())
    shutil.copytree(runs["ff"], tmp_path / "a\x1b[2Jb")
    config["experiment"]["env_id"] = "Catch\x1b]0;title\x07-v0\r\n"
    (tmp_path / "a\x1b[2Jb" / "config.json").write_text(json.dumps(config))
    for ended in (command("ls", tmp_path), command("diff", runs["ff"], tmp_path / "a\x1b[2Jb")):
        assert "Catch\\x1b]0;title\\x07-v0\\r\\n" in ended.out
        assert all(c.isprintable() or c == "\n" for c in ended.out)
    refused = command("eval", tmp_path / "a\x1b[2Jb")
    assert refused.code == 2 and "\\x1b" in refused.err and all(c.isprintable() or c == "\n" for c in refused.err)


def test_ls_of_nothing(tmp_path):
    assert "no runs" in command("ls", tmp_path).out
    assert command("ls", tmp_path / "nowhere").code == 2


def test_ls_reads_only_the_end_of_a_log(tmp_path):
    rows = ['{"update": 0, "first": 1}', *['{"update": 1, "old": 1}'] * 100_000]
    rows += ['{"update": 2, "charts/episodic_return": 3}', '{"update": 4}\n']
    (tmp_path / "metrics.jsonl").write_text("\n".join(rows))
    assert newest(tmp_path) == {"update": 4, "old": 1, "charts/episodic_return": 3}
    assert newest(tmp_path / "none") == {}


# Beside the training.  TINY makes five updates.


FORTY = (*TINY, "--total-timesteps", "2560", "--checkpoint-frequency", "10", "--keep-checkpoints", "9")


@pytest.fixture(scope="module")
def watched_run(tmp_path_factory) -> Path:
    """A run of forty updates that is evaluated after every tenth."""
    run_dir = tmp_path_factory.mktemp("watched") / "run"
    ended = command("ppo", *FORTY, "--eval-frequency", "10", "--eval-episodes", "7", "--run-dir", run_dir)
    assert ended.code == 0, ended.err
    return run_dir


def test_init_from_takes_the_version_that_it_names(watched_run, tmp_path):
    digests = {row["update"]: row["params_digest"] for row in read_rows(watched_run) if "params_digest" in row}
    best = json.loads((watched_run / "best/best.json").read_text())["update"]
    assert command("pack", watched_run, "--out", tmp_path / "run.tar.gz").code == 0
    named = {f"{watched_run}:10": 10, f"{watched_run}/checkpoints/20": 20, f"{watched_run}:best": best}
    named |= {f"{watched_run}/best": best, str(watched_run): 40, str(tmp_path / "run.tar.gz"): 40}
    policy = load_policy(watched_run, "last", "cpu")
    for place, update in named.items():
        found = find_initial(place, "cpu")
        params = {name: x for name, x in found.arrays.items() if name.startswith(".params")}
        expected = load_policy(watched_run, "best" if place.endswith("best") else str(update), "cpu").params
        expected = getattr(expected, "params", expected)  # without the statistics of observations
        assert all(np.array_equal(a, b) for a, b in zip(params.values(), jax.tree.leaves(expected), strict=True)), place
    assert len({digests[update] for update in (10, 20, 40)}) == 3 and policy.update == 40


def test_keep_checkpoints_every_takes_and_keeps_them(tmp_path):
    words = ("--keep-checkpoints", "every:2", "--checkpoint-frequency", "0", "--run-dir", tmp_path / "run")
    assert command("ppo", *TINY, *words).code == 0
    assert updates_kept(tmp_path / "run") == [2, 4, 5]


def test_evaluation_beside_the_training_changes_no_bit_and_keeps_the_best(watched_run, tmp_path):
    assert command("ppo", *FORTY, "--run-dir", tmp_path / "b").code == 0
    compared = command("diff", watched_run, tmp_path / "b")
    assert compared.code == 0 and "identical at all" in compared.out, compared.out

    rows = read_rows(watched_run)
    digests = {row["update"]: row["params_digest"] for row in rows if "params_digest" in row}
    found = {row["update"]: row for row in rows if "eval/episodic_return" in row}
    assert set(found) <= {10, 20, 30, 40} and 40 in found and len(found) >= 2
    assert all(row["eval/episodic_length"] == 9 for row in found.values())
    best = max(found, key=lambda update: found[update]["eval/episodic_return"])
    assert command("eval", watched_run, "--checkpoint", "best", "--episodes", "2").code == 0
    evaluation = read_eval(watched_run)
    assert evaluation["update"] == best and evaluation["global_step"] == found[best]["global_step"]
    assert evaluation["params_digest"] == digests[best]
    assert sorted(p.name for p in (watched_run / "best").iterdir()) == [f"{best}.msgpack", "best.json"]
    never = command("eval", tmp_path / "b", "--checkpoint", "best")
    assert never.code == 2 and "--eval-frequency" in never.err
    assert listing.read_run(watched_run).progress == 1


@pytest.fixture
def evaluations(runs, tmp_path):
    """Of a run whose agent never plays: tests replace `play`."""
    watched = load_policy(runs["ff"], "last", "cpu")
    made = periodic_evaluation.PeriodicEvaluation(tmp_path, Run(eval_frequency=2), watched, find_devices(Placement()))
    yield made, watched
    made.close()


def state_that_acts_by(acting):
    """A learner's state with these actor parameters and nothing else."""
    return SimpleNamespace(params=acting.params, statistics=SimpleNamespace(obs=acting.obs))


def test_training_does_not_wait_for_evaluation(evaluations, monkeypatch):
    made, watched = evaluations
    played, begun, release = [], threading.Event(), threading.Event()

    def slow(agent, episodes, seed, device, *, epoch, **_):
        played.append(epoch)
        begun.set()
        assert release.wait(20)
        return [Episode(float(epoch), 1)]

    monkeypatch.setattr(periodic_evaluation, "play", slow)
    for update in range(1, 8):  # 2 starts an evaluation; 4 and 6 come while it is still playing
        made.after_update(update, 10 * update, watched.params)
    assert begun.wait(20) and played == [2]
    release.set()
    state = state_that_acts_by(watched.params)
    made.finish({"update": 8, "global_step": 80}, state)
    assert played == [2, 8]
    logged = []
    writers = type("Writers", (), {"write": lambda self, *row: logged.append(row)})()
    made.log(writers, 1.5)
    made.log(writers, 2.5)
    assert [(row[:3], row[3]["eval/episodic_return"]) for row in logged] == [((2, 20, 1.5), 2.0), ((8, 80, 1.5), 8.0)]


def test_the_best_stays_the_best_when_a_run_goes_on(evaluations, monkeypatch):
    made, watched = evaluations
    returns = iter([5.0, 3.0, 9.0])
    monkeypatch.setattr(periodic_evaluation, "play", lambda *_, **__: [Episode(next(returns), 1)])
    best = lambda: read_best(made._run_dir)["update"]
    state = state_that_acts_by(watched.params)
    made.finish({"update": 2, "global_step": 0}, state)
    assert log_of(made) == [(2, 0, 5.0)]
    again = periodic_evaluation.PeriodicEvaluation(
        made._run_dir, Run(eval_frequency=2), watched, find_devices(Placement())
    )
    saved = Saved(4, state, watched.params, {"global_step": 0})
    again.begin(saved, [{"update": 4, "eval/episodic_return": 1.0}])  # that one is known
    assert again._thread is None
    again.begin(saved, [{"update": 4}])
    again._thread.join()
    assert best() == 2
    again.finish({"update": 6, "global_step": 0}, state)
    assert best() == 6


def log_of(made: periodic_evaluation.PeriodicEvaluation) -> list[tuple]:
    """What it would log now: update, global step and return."""
    logged = []
    writers = type("Writers", (), {"write": lambda self, *row: logged.append(row)})()
    made.log(writers, 1.0)
    return [(update, global_step, values["eval/episodic_return"]) for update, global_step, _, values in logged]


def waiting(made: periodic_evaluation.PeriodicEvaluation) -> list[str]:
    """The evaluations whose parameters are kept until they are in the log."""
    return sorted(p.name for p in (made._run_dir / periodic_evaluation.EVALUATING).glob("*"))


def test_an_evaluation_that_was_cut_short_is_played_again(evaluations, monkeypatch):
    """Those of updates 2 and 4.  That of update 6 comes after the checkpoint, and that of 8 is in the log already."""
    made, watched = evaluations
    playing = threading.Event()

    def endless(*_, check, **__):
        playing.set()
        while True:
            check("playing")

    monkeypatch.setattr(periodic_evaluation, "play", endless)
    marked = lambda update: jax.tree.map(lambda x: x + update, watched.params)
    made.after_update(2, 20, marked(2))
    assert playing.wait(20) and waiting(made) == ["2-20.msgpack"]
    made.close()
    assert log_of(made) == [] and waiting(made) == ["2-20.msgpack"]
    for update in (4, 6, 8):
        made._remember(periodic_evaluation.Version(update, 10 * update, marked(update)))
    (made._run_dir / periodic_evaluation.EVALUATING / "5-50.msgpack.tmp").write_bytes(b"half a file")

    played = []

    def play(agent, *_, epoch, **__):
        (difference,) = {round(float((a - b).max())) for a, b in
                         zip(jax.tree.leaves(agent.params), jax.tree.leaves(watched.params), strict=True)}  # fmt: skip
        played.append((epoch, difference))
        return [Episode(float(epoch), 1)]

    monkeypatch.setattr(periodic_evaluation, "play", play)
    again = periodic_evaluation.PeriodicEvaluation(
        made._run_dir, Run(eval_frequency=2), watched, find_devices(Placement())
    )
    state = state_that_acts_by(watched.params)
    saved = Saved(5, state, watched.params, {"global_step": 50})
    assert again.begin(saved, [{"update": 3, "eval/episodic_return": 1.0}]) == []
    again._thread.join()
    assert played == [(2, 2), (4, 4)], "each with its own parameters and its own games"
    assert waiting(again) == ["2-20.msgpack", "4-40.msgpack"], "kept until they are in the log"
    assert log_of(again) == [(2, 20, 2.0), (4, 40, 4.0)]
    assert not (made._run_dir / periodic_evaluation.EVALUATING).exists()


def test_evaluations_in_the_log_are_not_repeated(evaluations, monkeypatch):
    made, watched = evaluations
    monkeypatch.setattr(periodic_evaluation, "play", lambda *_, **__: pytest.fail("played"))
    made._remember(periodic_evaluation.Version(4, 40, watched.params))
    state = state_that_acts_by(watched.params)
    made.begin(Saved(4, state, watched.params, {"global_step": 40}), [{"update": 4, "eval/episodic_return": 1.0}])
    made.finish({"update": 4, "global_step": 40}, state)
    assert made._thread is None and not (made._run_dir / periodic_evaluation.EVALUATING).exists()


def test_a_damaged_copy_is_named_and_left(evaluations):
    made, watched = evaluations
    made._remember(periodic_evaluation.Version(2, 20, watched.params))
    path = made._run_dir / periodic_evaluation.EVALUATING / "2-20.msgpack"
    path.write_bytes(path.read_bytes()[:20])
    state = state_that_acts_by(watched.params)
    (warning,) = made.begin(Saved(3, state, watched.params, {"global_step": 30}), [])
    assert "update 2 will not be evaluated" in warning and str(path) in warning
    assert made._thread is None and path.exists()


def test_a_run_killed_during_an_evaluation_has_its_row_after_going_on(watched_run, tmp_path):
    """It dies while it writes the checkpoint of update 30, and the evaluation of update 10 is still playing."""
    flags, run = [*FORTY, "--eval-frequency", "10"], tmp_path / "run"
    words = ["ppo", *flags, "--eval-episodes", "1000000", "--run-dir", run]
    ended = finish(python(ROOT / "tests" / "killed.py", "save", "3", *words))
    assert ended.code == -signal.SIGKILL, ended
    assert [p.name.partition("-")[0] for p in (run / "evaluating").iterdir()] == ["10"]
    assert updates_kept(run)[-1] >= 20

    ended = command("ppo", *flags, "--eval-episodes", "7", "--run-dir", run)
    assert ended.code == 0 and "resuming after update" in ended.out, ended
    (row,) = [row for row in read_rows(run) if row["update"] == 10 and "eval/episodic_return" in row]
    (expected,) = [row for row in read_rows(watched_run) if row["update"] == 10 and "eval/episodic_return" in row]
    for name in ("global_step", "eval/episodic_return", "eval/episodic_return_std", "eval/episodic_length"):
        assert row[name] == expected[name], name
    assert not (run / "evaluating").exists()
    assert command("diff", watched_run, run).code == 0


def test_a_disk_that_is_full_when_an_evaluation_starts_ends_the_run(tmp_path, monkeypatch):
    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(periodic_evaluation, "save_model", full)
    ended = command("ppo", *TINY, "--eval-frequency", "1", "--run-dir", tmp_path / "run")
    assert ended.code == 1 and "Traceback" not in ended.err and ended.err.count("cleanba:") == 1, ended.err
    assert "evaluating cannot be written (No space left on device); free disk space" in ended.err


def test_an_evaluation_that_fails_ends_the_run(tmp_path, monkeypatch):
    def broken(*_, **__):
        raise RuntimeError("planted in the evaluation")

    monkeypatch.setattr(periodic_evaluation, "play", broken)
    ended = command("ppo", *TINY, "--eval-frequency", "1", "--run-dir", tmp_path / "run")
    assert ended.code == 1 and "planted in the evaluation" in ended.err


def test_an_evaluation_ends_with_the_run(evaluations):
    made, watched = evaluations
    made._run = Run(eval_frequency=1, eval_episodes=10_000_000)
    made.after_update(1, 0, watched.params)
    assert made._thread.is_alive()
    made.close()
    made._thread.join(300)  # it may be compiling, with what other threads leave of the cores
    assert not made._thread.is_alive()


def test_a_run_with_endless_episodes_ends(tmp_path):
    flags = (*TINY, "--env-id", "odd:Endless-v0", "--env-workers", "0", "--capture-video")
    run = tmp_path / "run"
    limits = ("--eval-frequency", "5", "--eval-episodes", "2", "--eval-max-steps", "30")
    ended = command("ppo", *flags, *limits, "--run-dir", run)
    assert ended.code == 0, ended.err
    (row,) = [row for row in read_rows(run) if "eval/episodic_return" in row]
    assert (row["eval/truncated"], row["eval/episodic_return"], row["eval/episodic_length"]) == (2, 30, 30)
    (film,) = (run / "videos").iterdir()
    with imageio.get_reader(film) as reader:
        assert reader.count_frames() == 31
    ended = command("eval", run, "--episodes", "3", "--max-steps", "25")
    assert ended.code == 0 and "3 of 3 episodes did not end within 25 steps" in ended.out, ended
    evaluation = read_eval(run)
    assert (evaluation["truncated"], evaluation["max_steps"], evaluation["lengths"]) == (3, 25, [25] * 3)
    ended = command("eval", run, "--max-steps", "0")
    assert ended.code == 2 and "max_steps=0 must be at least 1" in ended.err


def test_an_evaluation_at_the_end_that_hangs_ends_the_run(tmp_path, monkeypatch):
    release = threading.Event()

    def hangs(*_, check, **__):
        check("playing")
        release.wait(60)
        check("playing")

    monkeypatch.setattr(periodic_evaluation, "play", hangs)

    class Soon(Watchdog):  # a minute before it plays, as the disk may be busy; then five seconds
        def check(self, count, phase, *more):
            self.timeout = 5.0 if phase == "playing" else 60.0
            super().check(count, phase, *more)

    monkeypatch.setattr(launch, "Watchdog", Soon)
    run = tmp_path / "run"
    flags = (*TINY, "--eval-frequency", "100", "--eval-episodes", "2", "--run-dir", run)
    ended = command("ppo", *flags, "--stall-timeout", "60")
    assert ended.code == 1 and "thread 'evaluation'" in ended.err and "release.wait(60)" in ended.err, ended
    words = r"cleanba: no step of evaluations for \d+ s after step of evaluations 1 \(playing\)"
    assert len(re.findall(words, ended.err)) == 1
    result = read_result(run)
    assert result["status"] == "failed" and "no step of evaluations" in result["error"] and result["update"] == 5
    release.set()
    monkeypatch.undo()
    ended = command("ppo", *flags)
    assert ended.code == 0 and "goes on after update 5" not in ended.out, ended
    assert [row["update"] for row in read_rows(run) if "eval/episodic_return" in row] == [5]
    assert read_result(run)["status"] == "finished"


def test_a_signal_ends_the_evaluation_at_the_end_and_says_how_the_run_goes_on(tmp_path, monkeypatch):
    def never_ends(*_, check, **__):
        check("playing")
        os.kill(os.getpid(), signal.SIGTERM)
        while True:
            time.sleep(0.01)
            check("playing")

    monkeypatch.setattr(periodic_evaluation, "play", never_ends)
    run = tmp_path / "run"
    flags = (*TINY, "--eval-frequency", "100", "--eval-episodes", "2", "--run-dir", run)
    ended = command("ppo", *flags)
    assert ended.code == 128 + signal.SIGTERM and "cleanba: interrupted by SIGTERM" in ended.err, ended
    assert "goes on after update 5, nothing to repeat" in ended.out
    assert read_result(run)["status"] == "interrupted"
    monkeypatch.undo()
    assert command("ppo", *flags).code == 0
    assert [row["update"] for row in read_rows(run) if "eval/episodic_return" in row] == [5]


HANGS_AT_ITS_END = """
import sys, time
from cleanba import cli, launch
from cleanba.agents import periodic_evaluation
from cleanba.runtime.supervision import Watchdog
launch.Watchdog = lambda timeout, counted: Watchdog(timeout / 60, counted)
periodic_evaluation.play = lambda *_, **__: time.sleep(600)
cli.main(sys.argv[1:])
"""


@pytest.mark.slow
def test_no_process_waits_for_one_whose_last_evaluation_hangs(tmp_path):
    flags = ("ppo", *TINY, "--num-shards", "2", "--eval-frequency", "100", "--run-dir", tmp_path / "run")
    both = [python("-c", HANGS_AT_ITS_END, *words) for words in in_pairs([*flags, "--stall-timeout", "120"])]
    first, second = [finish(process) for process in both]
    assert first.code == 1 and "no step of evaluations for " in first.err, first
    assert second.code == 1 and "process 0 of 2 failed: no step of evaluations for " in second.err, second


def test_a_run_films_itself_at_its_end(tmp_path):
    flags = (*TINY, "--env-id", "CartPole-v1", "--run-dir", tmp_path / "run", "--capture-video")
    ended = command("ppo", *flags)
    assert ended.code == 0, ended.err
    update = read_result(tmp_path / "run")["update"]
    [path] = (tmp_path / "run" / "videos").iterdir()
    assert path.name == f"update-{update}-seed-1.mp4" and f"film:    {path}" in ended.out
    with imageio.get_reader(path) as reader:
        frames, meta = reader.count_frames(), reader.get_meta_data()
    assert meta["fps"] == 50
    # The same games as `cleanba eval` plays with that seed, whether it films or not.
    assert command("eval", tmp_path / "run", "--episodes", "1").code == 0
    assert read_eval(tmp_path / "run")["lengths"] == [frames - 1]
    assert command("eval", tmp_path / "run", "--episodes", "1", "--video").code == 0
    evaluation = read_eval(tmp_path / "run")
    assert evaluation["lengths"] == [frames - 1] and evaluation["video"] == f"videos/{path.name}"
    # Other games have another name.
    assert command("eval", tmp_path / "run", "--episodes", "1", "--video", "--greedy", "--epsilon", "0.5").code == 0
    names = {video.name for video in path.parent.iterdir()}
    assert names == {path.name, f"update-{update}-seed-1-greedy-epsilon-0.5.mp4"}


@pytest.mark.parametrize(
    "flags, words",
    [
        (("--eval-frequency", "-1"), "eval_frequency=-1 must not be negative"),
        (("--eval-episodes", "0"), "eval_episodes=0 must be at least 1"),
        (("--eval-max-steps", "0"), "eval_max_steps=0 must be at least 1"),
        (("--eval-device-id", "99"), "--eval-device-id: there is no device 99"),
        (("--capture-video",), "EnvPool cannot draw Catch-v0"),
    ],
)
def test_flags_of_evaluation_that_cannot_be_met_are_refused_before_anything_starts(flags, words, tmp_path):
    ended = command("ppo", *TINY, *flags, "--run-dir", tmp_path / "run")
    assert ended.code == 2 and words in ended.err and not (tmp_path / "run").exists()
