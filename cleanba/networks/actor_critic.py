"""A policy and its value function over one torso and one core."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from cleanba.config import Experiment
from cleanba.networks import cores, torsos
from cleanba.networks.layers import ConvKind
from cleanba.networks.sight import see, sight
from cleanba.ops.losses import log_prob_and_entropy
from cleanba.rollout import PyTree


class Output(NamedTuple):
    logits: jax.Array  # [T, B, num_actions]  float32
    value: jax.Array  # [T, B]  float32
    carry: Any  # [B, ...]  after the last step


class ActorCritic(nn.Module):
    """Torso -> core -> a categorical policy and a value.  Heads are orthogonal, of scale 0.01 and 1."""

    obs_spec: Any  # one `ObsSpec`, or a dictionary of them
    num_actions: int
    network: str
    channels: Sequence[int]
    hiddens: Sequence[int]
    core: str
    lstm_size: int
    dtype: Any
    conv: ConvKind

    @nn.compact
    def __call__(self, obs: Any, first: jax.Array, carry: Any) -> Output:
        """Obs [T, B, ...], first [T, B] bool, carry [B, ...] -> `Output`."""
        t, b = first.shape
        x = see(self, jax.tree.map(lambda o: o.reshape(t * b, *o.shape[2:]), obs)).reshape(t, b, -1)
        if self.core == "lstm":
            x, carry = cores.LSTM(self.lstm_size, self.dtype)(x, first, carry)
        x = x.astype(jnp.float32)  # the heads are small, and what they say is exponentiated and squared
        logits = torsos.Dense(self.num_actions, 0.01, name="policy")(x)
        value = torsos.Dense(1, 1.0, name="value")(x)
        return Output(logits, value[..., 0], carry)

    def initial_params(self, key: jax.Array) -> PyTree:
        """Random parameters."""
        obs = jax.tree.map(lambda o: jnp.zeros((1, 1, *o.shape), o.dtype), self.obs_spec)
        return self.init(key, obs, jnp.zeros((1, 1), bool), self.initial_carry(1))

    def initial_carry(self, batch: int) -> PyTree:
        """The core's memory before anything was seen; () without a core."""
        return cores.initial_carry(self.core, self.lstm_size, batch)

    def outputs(self, params: PyTree, obs: PyTree, first: jax.Array, carry: PyTree) -> Output:
        """`__call__` with these parameters."""
        out: Any = self.apply(params, obs, first, carry)
        return out

    def act(
        self, params: PyTree, carry: PyTree, obs: PyTree, first: jax.Array, key: jax.Array, explore: bool
    ) -> tuple[jax.Array, PyTree, PyTree]:
        """One step of B environments: obs [B, ...], first [B] -> action [B], carry, {"log_prob": [B]}.

        The action is a sample of the policy, or its likeliest if not `explore`.
        """
        out = self.outputs(params, jax.tree.map(lambda o: o[None], obs), first[None], carry)
        logits = out.logits[0]
        action = (jax.random.categorical(key, logits) if explore else logits.argmax(-1)).astype(jnp.int32)
        log_prob, _ = log_prob_and_entropy(logits, action)
        return action, out.carry, {"log_prob": log_prob}

    def inspect(self, params: PyTree, carry: PyTree, obs: PyTree, first: jax.Array) -> dict[str, jax.Array]:
        """Obs [B, ...], first [B] -> the value [B], and the probabilities of the actions [B, A]."""
        out = self.outputs(params, jax.tree.map(lambda o: o[None], obs), first[None], carry)
        return {"value": out.value[0], "probability": jax.nn.softmax(out.logits[0])}


def make_actor_critic(spec: Any, experiment: Experiment, platform: str) -> ActorCritic:
    """The network that an experiment asks for, in the form that is fast on `platform` ("cpu", "gpu" …).

    Raises:
        UsageError: the torso does not fit the observations.
    """
    e = experiment
    return ActorCritic(**sight(spec, e, platform), num_actions=spec.num_actions, core=e.core, lstm_size=e.lstm_size)
