"""Exports: files that compute what the agent does, at any batch size and without JAX; and what is refused."""

import jax
import numpy as np
import pytest
from launch import ROOT  # noqa: F401  sets JAX up

import cleanba
from cleanba.agents.agent import Agent, new_policy
from cleanba.environments.backends import env_spec
from cleanba.recipes import RECIPES

onnxruntime = pytest.importorskip("onnxruntime")


def agent_of(algorithm: str, env_id: str, **flags) -> Agent:
    """An agent with the parameters that a run begins with, and noise on each, so that no two actions are equal."""
    e = getattr(cleanba, algorithm)(env_id, **flags).resolve()
    recipe, spec = RECIPES[algorithm], env_spec(e)
    made = recipe.make(e, spec, "cpu")
    params = jax.jit(lambda key: made.actor_params(made.init(key)))(jax.random.key(1))
    noise = np.random.default_rng(0)
    stir = lambda x: x + 0.1 * np.abs(noise.standard_normal(x.shape)).astype(x.dtype) if x.dtype == np.float32 else x
    params = jax.tree.map(lambda x: stir(np.asarray(x)), params)
    policy = new_policy(e, spec, made, "cpu", recipe.plays)._replace(params=params, run="made")
    return Agent(policy, jax.devices()[0])


CASES = {
    "ppo, MLP": ("ppo", "CartPole-v1", dict(hiddens=[16], norm_obs=True)),
    "ppo, Nature CNN": ("ppo", "Breakout-v5", dict(network="nature", hiddens=[16])),
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


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("format", ["onnx", "stablehlo"])
def test_every_algorithm_and_network_is_exported(case, format, tmp_path):
    algorithm, env_id, flags = CASES[case]
    agent = agent_of(algorithm, env_id, **flags)
    written = agent.export(tmp_path / f"agent.{format}")
    assert written.observations == 1000 and set(written.differences) == {port.name for port in written.outputs}
    assert max(written.differences.values()) <= 1e-5 and written.differences["action"] <= 1e-5
