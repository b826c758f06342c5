"""Starting from another run's parameters."""

import json
import shutil

import jax
import numpy as np
import pytest
from launch import TINY, command

from cleanba.agents import initial
from cleanba.agents.initial import (
    FRESH,
    OPTIONAL,
    Initial,
    find_initial,
    named_leaves,
    of_acting,
    require_fit,
    started_from,
)
from cleanba.agents.policy import read_best, read_uploaded
from cleanba.algorithms.sac import SAC
from cleanba.config import fields_of, read_experiment
from cleanba.errors import UsageError
from cleanba.recipes import RECIPES
from cleanba.resolution import continue_experiment, resolve
from cleanba.specs import ActionSpec, EnvSpec, ObsSpec, choice
from cleanba.train_flags import parse

STILL = ("--learning-rate", "1e-60", "--no-anneal-lr")  # 0 in float32


def assert_started_from(run, source) -> str:
    """A run whose updates move no parameter has the source's parameters, and its statistics have counted on."""
    before, after = (find_initial(str(place), "cpu") for place in (source, run))
    names = [name for name in before.arrays if name.startswith(".params")]
    assert names
    for name in names:
        assert np.array_equal(before.arrays[name], after.arrays[name]), name
    counted = ".statistics.obs[''].counted"
    assert np.array_equal(after.arrays[counted], 2 * before.arrays[counted])
    return before.digest


@pytest.mark.slow
def test_a_run_starts_from_anothers_parameters(tmp_path):
    first, copied, second = (tmp_path / name for name in ("first", "copied", "second"))
    assert command("ppo", *TINY, "--run-dir", first).code == 0
    config = json.loads((first / "config.json").read_text())
    del config["experiment"]["init_from"]  # as an older version wrote it
    (first / "config.json").write_text(json.dumps(config))
    shutil.copytree(first, copied)

    kept = ("--checkpoint-frequency", "2", "--keep-checkpoints", "all")
    words = lambda source: ("ppo", *TINY, *STILL, *kept, "--init-from", source, "--run-dir", second)
    ended = command(*words(first))
    assert ended.code == 0, ended.err
    digest = assert_started_from(second, first)
    recorded = read_experiment(second)["init_from"]
    assert recorded == digest and recorded.startswith("sha256:")
    # The same parameters at another place are the same experiment; so is a place that is gone, once the run has begun.
    assert "is finished; nothing to do" in command(*words(copied)).out
    shutil.rmtree(first)
    assert "is finished; nothing to do" in command(*words(first)).out
    assert "is finished; nothing to do" in command("resume", second).out
    # So is a place that has others now: the run goes on from its own checkpoints.
    changed = tmp_path / "changed"
    assert command("ppo", *TINY, "--seed", "2", "--run-dir", changed).code == 0
    shutil.copytree(changed, first)
    assert "is finished; nothing to do" in command(*words(first)).out
    ended = command("ppo", "--experiment", second, "--init-from", first, "--run-dir", tmp_path / "again")
    assert ended.code == 2 and f"{first} has other parameters now than when {second} began from it" in ended.err, ended
    # Other commands also find the place.
    assert command(*words(first), "--show-config").code == 0
    assert command("slurm", "fit", "1", *words(first)).out.splitlines()[0] == "1"
    resolved = resolve(RECIPES["ppo"], parse(RECIPES["ppo"], [str(w) for w in words(first)[1:]]).typed, "cpu")
    assert continue_experiment(RECIPES["ppo"], resolved, second, "--dir").experiment.init_from == digest
    shutil.rmtree(first)
    # Without a checkpoint the run needs the parameters, and so does verifying its beginning.
    ended = command("verify", second, "--segments", "9")
    assert ended.code == 0 and "2 of 3 segments recomputed" in ended.out, ended
    assert f"the first segment is left out: {second} starts from the parameters {recorded[:19]}" in ended.out
    ended = command("verify", second, "--from", "0")
    assert ended.code == 3 and f"{second} starts from the parameters {recorded[:19]}" in ended.err, ended
    shutil.rmtree(second / "checkpoints")
    ended = command("verify", second)
    assert ended.code == 3 and f"{second} starts from the parameters {recorded[:19]}" in ended.err, ended
    (second / "result.json").unlink()
    shutil.copytree(changed, first)
    ended = command(*words(first))
    assert ended.code == 2 and f"{first} has other parameters now than when {second} began from it" in ended.err
    shutil.rmtree(first)
    ended = command("resume", second)
    assert ended.code == 2 and f"{second} starts from the parameters {recorded[:19]}" in ended.err
    assert "--init-from" in ended.err and "Traceback" not in ended.err
    ended = command(*words(copied))
    assert ended.code == 0 and assert_started_from(second, copied) == recorded

    ended = command("ppo", *TINY, "--hiddens", "16", "--init-from", copied, "--run-dir", tmp_path / "third")
    assert ended.code == 2 and "has the shape (8,) there, and has the shape (16,) here" in ended.err, ended.err
    ended = command("resume", copied, "--total-timesteps", "640")
    assert ended.code == 2 and f"--init-from {copied}" in ended.err
    ended = command("ppo", *TINY, "--init-from", tmp_path / "nowhere", "--run-dir", tmp_path / "fourth")
    assert ended.code == 2 and "nowhere" in ended.err and not (tmp_path / "fourth").exists()


@pytest.mark.parametrize("flags", [{}, {"norm_obs": True, "norm_reward": True}], ids=["plain", "normalised"])
@pytest.mark.parametrize("name", ["ppo", "dqn", "pqn", "r2d2", "sac", "td3"])
def test_parameters_that_act_suffice_and_targets_become_copies_of_them(name, flags):
    """A fresh state's targets are copies of its networks: what acts of it gives back all its networks."""
    box = ActionSpec("quantities", (2,), "float32", (), (-1.0, -1.0), (1.0, 1.0))
    choices = name in ("ppo", "dqn", "pqn", "r2d2")
    spec = EnvSpec("Test-v0", ObsSpec("vector", (4,), "float32"), choice(3) if choices else box, False, False, {})
    recipe = RECIPES[name]
    own = {field: value for field, value in flags.items() if field in fields_of(recipe.experiment)}
    algorithm = recipe.make(recipe.experiment(network="mlp", hiddens=(8,), **own), spec, "cpu")
    state = algorithm.init(jax.random.key(0))
    arrays = of_acting(algorithm, algorithm.actor_params(state))
    leaves = named_leaves(state)
    expected = {n: x for n, x in leaves.items() if not FRESH.search(n) and not n.startswith(OPTIONAL)}
    assert set(arrays) == set(expected)
    assert all(np.array_equal(arrays[n], x) for n, x in expected.items())
    assert not any(".updates" in n or "optimiser" in n for n in arrays)
    fits = lambda arrays: require_fit(Initial("", "there", arrays, "ppo"), state, name)
    fits(arrays)  # statistics of returns start anew
    scaled = {n: x for n, x in leaves.items() if n.startswith(".statistics.discounted_return")}
    assert bool(scaled) == ("norm_reward" in own)
    fits(arrays | scaled | {".statistics.discounted_return.x": np.zeros(2)})
    with pytest.raises(UsageError) as caught:
        fits({})
    said = f"init_from=there: {f'that run is of ppo, this one is of {name}: ' * (name != 'ppo')}its networks differ"
    assert str(caught.value).startswith(said)


@pytest.mark.parametrize("learnt", [True, False])
def test_a_fixed_temperature_is_not_replaced(learnt):
    box = ActionSpec("quantities", (2,), "float32", (), (-1.0, -1.0), (1.0, 1.0))
    spec = EnvSpec("Test-v0", ObsSpec("vector", (4,), "float32"), box, False, False, {})
    make = lambda **flags: RECIPES["sac"].make(SAC(network="mlp", hiddens=(8,), **flags), spec, "cpu")
    before, after = (make(autotune=on, alpha=x).init(jax.random.key(0)) for on, x in ((True, 0.5), (learnt, 0.05)))
    (name,) = [n for n in named_leaves(before) if n.startswith(".log_alpha") and "optimiser" not in n]
    taken = started_from(after, {name: np.float32(-3.0)})
    own = named_leaves(after)[name]
    assert named_leaves(taken)[name] == (np.float32(-3.0) if learnt else own) and own != np.float32(-3.0)


def test_a_run_may_be_called_best(tmp_path, monkeypatch):
    (tmp_path / "best").mkdir()
    (tmp_path / "best/config.json").write_text("{}")
    with pytest.raises(UsageError, match="best/config.json holds no experiment"):  # it is this one that is read
        find_initial(str(tmp_path / "best"), "cpu")
    asked = []
    monkeypatch.setattr(initial, "find_run", lambda place: asked.append(place) or tmp_path)
    uploaded = initial.naming_a_run()
    with pytest.raises(UsageError, match="has one model; name the run alone$"), uploaded:
        read_uploaded(tmp_path, "best", "hf://alice/pong", ())
    with pytest.raises(UsageError, match="--eval-frequency, or name the run alone$"), initial.naming_a_run():
        read_best(tmp_path)
    for place in ("hf://alice/best", "hf://alice/pong/best", "hf://alice/pong/checkpoints/100"):
        with pytest.raises(UsageError):
            find_initial(place, "cpu")
    assert asked == ["hf://alice/best", "hf://alice/pong", "hf://alice/pong"]
