"""Exports: files that compute what the agent does, at any batch size and without JAX; and what is refused."""

import ast
import json
import runpy
import shutil
import sys
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from launch import ROOT, command, finish, python

import cleanba
from cleanba.agents import portable
from cleanba.agents.agent import Agent
from cleanba.agents.policy import new_policy
from cleanba.environments import worker
from cleanba.environments.backends import env_spec
from cleanba.errors import Failure
from cleanba.recipes import RECIPES
from cleanba.seeds import eval_seed

onnxruntime = pytest.importorskip("onnxruntime")


def agent_of(algorithm: str, env_id: str, **flags) -> Agent:
    """An agent with a run's initial parameters, and noise on each, so that no two actions are equal."""
    e = getattr(cleanba, algorithm)(env_id, **flags).resolve()
    recipe, spec = RECIPES[algorithm], env_spec(e)
    made = recipe.make(e, spec, "cpu")
    params = jax.jit(lambda key: made.actor_params(made.init(key)))(jax.random.key(1))
    noise = np.random.default_rng(0)
    stir = lambda x: x + 0.1 * np.abs(noise.standard_normal(x.shape)).astype(x.dtype) if x.dtype == np.float32 else x
    params = jax.tree.map(lambda x: stir(np.asarray(x)), params)
    policy = new_policy(recipe, e, spec, made, "cpu")._replace(params=params, run="made")
    return Agent(policy, jax.devices()[0])


CASES = {
    "ppo, MLP": ("ppo", "CartPole-v1", dict(hiddens=[16], norm_obs=True)),
    "ppo, Nature CNN": ("ppo", "Breakout-v5", dict(network="nature", hiddens=[16])),
    "ppo, the smaller CNN": ("ppo", "Breakout-v5", dict(network="nips", hiddens=[16])),
    "impala, ResNet": ("impala", "Breakout-v5", dict(network="impala", channels=[4, 4], hiddens=[16])),
    "ppo, two LSTMs": ("ppo", "CartPole-v1", dict(hiddens=[8], core="lstm", lstm_size=8, share_torso=False)),
    "ppo, real numbers": ("ppo", "Pendulum-v1", dict(hiddens=[8], norm_obs=True)),
    "ppo, dictionaries and masks": ("ppo", "odd:Parts-v0", dict(hiddens=[8])),
    "ppo, several choices": ("ppo", "odd:Pairs-v0", dict(hiddens=[8])),
    "dqn, MinAtar": ("dqn", "gymnax:Breakout-MinAtar", dict(hiddens=[16], dueling=True)),
    "dqn, masks": ("dqn", "odd:Masked-v0", dict(hiddens=[8])),
    "pqn, layer norm and LSTM": ("pqn", "Catch-v0", dict(hiddens=[8], core="lstm", lstm_size=8)),
    "r2d2, codes": ("r2d2", "MiniGrid-Empty-5x5-v0", dict(hiddens=[8], lstm_size=8)),
    "sac": ("sac", "Pendulum-v1", dict(hiddens=[8, 8])),
    "td3": ("td3", "Pendulum-v1", dict(hiddens=[8, 8])),
}


@pytest.mark.parametrize("format", ["onnx", "stablehlo"])
@pytest.mark.parametrize("case", CASES)
def test_every_algorithm_and_network_is_exported(case, format, tmp_path):
    algorithm, env_id, flags = CASES[case]
    agent = agent_of(algorithm, env_id, **flags)
    written = agent.export(tmp_path / f"agent.{format}")
    assert written.observations == 1000 and set(written.differences) == {port.name for port in written.outputs}
    assert max(written.differences.values()) <= 1e-5 and written.differences["action"] <= 1e-5
    assert written.same_actions == 1000


def test_a_file_that_computes_something_else_is_reported(tmp_path, monkeypatch):
    write = portable.write_onnx

    def write_another(path, agent):
        runs = write(path, agent)
        return lambda inputs: (out := runs(inputs)) | {"value": out["value"] + np.float32(1e-3)}

    monkeypatch.setitem(portable.WRITERS, "onnx", write_another)
    path, number = tmp_path / "agent.onnx", r"-?\d\.\d+"
    there = rf"value at 1000 of 1000, first at step 0 of environment 0: {number} in the file, {number} here$"
    with pytest.raises(Failure, match=f"^{path} was written, but the file .*; they differ in {there}"):
        agent_of("ppo", "CartPole-v1", hiddens=[16], norm_obs=True).export(path)


WITHOUT_US = """
import runpy, sys
sys.modules.update(dict.fromkeys(("jax", "jaxlib", "flax", "cleanba"), None))  # an import of them fails
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0])
"""


def test_without_cleanba_it_gets_the_returns_of_an_evaluation(tmp_path):
    run = tmp_path / "run"
    small = "--total-timesteps 4096 --num-envs 8 --num-steps 32 --num-shards 1 --num-actors 1 --hiddens 16 --core lstm"
    words = f"--env-id gymnasium:CartPole-v1 {small} --lstm-size 8 --env-workers 0 --max-episode-steps 190"
    assert command("ppo", *words.split(), "--run-dir", run).code == 0
    played = command("eval", run, "--greedy", "--episodes", "5", "--seed", "1")
    assert played.code == 0, played.err
    ended = command("export", run)
    assert ended.code == 0 and "1,000 observations: the same greedy actions" in ended.out, ended.err
    assert "as it plays here: the same action at 1,000 of them" in ended.out
    script = ROOT / "docs" / "examples" / "play_onnx.py"
    elsewhere = finish(python("-c", WITHOUT_US, script, run / "agent.onnx", "5"))
    assert elsewhere.code == 0, elsewhere.err
    returns = [float(line) for line in elsewhere.out.split()]
    played = json.loads((run / "eval.json").read_text())["returns"]
    assert returns == played and len(set(returns)) > 1 and max(returns) == 190  # the run's own limit

    session = onnxruntime.InferenceSession(run / "agent.onnx")
    seeds = set(json.loads(session.get_modelmeta().custom_metadata_map["cleanba"])["eval_seeds"])
    while_training = {eval_seed(1, env, update, 16) for env in range(16) for update in range(1, 17)}
    assert len(seeds) == 30 and not seeds & while_training  # no game was used to select the best parameters


def test_the_script_names_the_parts_of_an_observation_as_the_network_does():
    source = ast.parse((ROOT / "docs/examples/play_onnx.py").read_text())
    (definition,) = [node for node in source.body if isinstance(node, ast.FunctionDef)]
    script: dict = {}
    exec(ast.unparse(definition), script)
    for seen in ({"look": {"front": 1}, "both": (2, {"a": 3})}, (4, 5), 6):
        obs = worker.named(seen)
        expected = dict(zip(portable.names_of("obs", obs), jax.tree.leaves(obs), strict=True))
        assert script["parts"](seen) == expected


def test_the_script_finds_an_environment_in_the_current_folder(tmp_path, monkeypatch, capsys):
    examples = ROOT / "docs" / "examples"
    shutil.copy(examples / "corridor_gymnasium.py", tmp_path)
    env_id = "gymnasium:corridor_gymnasium:Corridor-v0"
    about = dict(env_id=env_id, env_options={}, env_wrappers=[], eval_seeds=[1], observation_dtypes={"obs": "float32"})
    to_the_right = SimpleNamespace(  # a session of ONNX Runtime
        get_modelmeta=lambda: SimpleNamespace(custom_metadata_map={"cleanba": json.dumps(about)}),
        get_inputs=lambda: [SimpleNamespace(name="obs")],
        get_outputs=lambda: [SimpleNamespace(name="action")],
        run=lambda _, inputs: [np.array([1])],
    )
    monkeypatch.setattr(onnxruntime, "InferenceSession", lambda path: to_the_right)
    monkeypatch.setattr(sys, "path", sys.path[:])
    monkeypatch.setattr(sys, "argv", ["play_onnx.py", "agent.onnx", "1"])
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(examples / "play_onnx.py"))
    assert 0 < float(capsys.readouterr().out) < 1


@pytest.mark.parametrize(
    "words, said",
    [
        (["--format", "onx"], "format='onx' must be onnx or stablehlo; try --format onnx"),
        (["--out", "agent.txt"], "must end in .onnx for onnx; try agent.onnx"),
        (["--out", "nowhere/agent.onnx"], "there is no folder nowhere"),
        (["--seed", "-1"], "seed=-1 must lie in [0, 2^31)"),
    ],
)
def test_exports_that_cannot_be_written_are_refused(words, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.json").write_text("{}")
    ended = command("export", "run", *words)
    assert ended.code == 2 and said in ended.err and "Traceback" not in ended.err


@pytest.mark.parametrize("format, absent", [("onnx", "jax2onnx"), ("stablehlo", "flatbuffers")])
def test_without_the_extra_it_says_how_to_install_it(format, absent, tmp_path, monkeypatch):
    (tmp_path / "config.json").write_text("{}")
    monkeypatch.setitem(sys.modules, absent, None)
    ended = command("export", tmp_path, "--format", format)
    assert ended.code == 2 and "cleanba[export]" in ended.err and absent in ended.err


def test_a_run_that_is_not_there_is_named(tmp_path):
    ended = command("export", tmp_path / "nowhere")
    assert ended.code == 2 and "nowhere/config.json does not exist" in ended.err
