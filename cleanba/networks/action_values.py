"""A value for each action, over one torso and perhaps a core."""

from typing import NamedTuple, cast

import flax.linen as nn
import jax
import jax.numpy as jnp

from cleanba.config import Experiment
from cleanba.networks import cores, torsos
from cleanba.networks.cores import Carry, EncodingAndCore, apply_heads, core_fields
from cleanba.networks.encoder import encoder_fields
from cleanba.rollout import NetworkParams, Obs
from cleanba.specs import EnvSpec


class Valued(NamedTuple):
    """What a network of action values computes."""

    values: jax.Array  # [T, B, num_actions]  float32
    carry: Carry  # [B, ...]  after the last step


class ActionValues(EncodingAndCore):
    """Torso -> core -> Q(s, a) for every action (Mnih et al. 2015), with ReLUs throughout, as CleanRL's.

    `dueling` makes it V(s) + A(s, a) - mean_a A(s, a) (Wang et al. 2016, eq. 9).
    """

    num_actions: int
    dueling: bool

    @nn.compact
    def __call__(self, obs: Obs, first: jax.Array, carry: Carry) -> Valued:
        """Obs [T, B, ...], first [T, B] bool, carry [B, ...] -> `Valued`."""
        heads = [torsos.Dense(self.num_actions, 1.0, name="action_value")]
        if self.dueling:
            heads.append(torsos.Dense(1, 1.0, name="value"))
        (values, *value), carry = apply_heads(self, heads, obs, first, carry, "relu")
        if self.dueling:
            values = value[0] + values - values.mean(-1, keepdims=True)
        return Valued(values, carry)

    def initial_params(self, key: jax.Array) -> NetworkParams:
        """Random parameters, for observations of the specified shapes."""
        obs = jax.tree.map(lambda o: jnp.zeros((1, 1, *o.shape), o.dtype), self.obs_spec)
        return self.init(key, obs, jnp.zeros((1, 1), bool), self.initial_carry(1))

    def initial_carry(self, batch: int, first_env: int = 0) -> Carry:
        """The carry before the first observation, for B = `batch` environments.  Leaves [B, units], or ()."""
        return cores.initial_carry(self.core, self.lstm_size, batch)

    def outputs(self, params: NetworkParams, obs: Obs, first: jax.Array, carry: Carry) -> Valued:
        """`__call__` with these parameters: obs [T, B, ...], first [T, B], carry [B, ...] -> leaves [T, B, ...]."""
        return cast(Valued, self.apply(params, obs, first, carry))

    def one_step(self, params: NetworkParams, carry: Carry, obs: Obs, first: jax.Array) -> Valued:
        """`outputs` of one step: obs [B, ...], first [B] -> values [B, num_actions], carry [B, ...]."""
        out = self.outputs(params, jax.tree.map(lambda o: o[None], obs), first[None], carry)
        return out._replace(values=out.values[0])

    def values(self, params: NetworkParams, obs: Obs) -> jax.Array:
        """Action values of single observations, without a core: obs [N, ...] -> [N, num_actions] float32."""
        first = jnp.zeros(jax.tree.leaves(obs)[0].shape[:1], bool)
        return self.one_step(params, (), obs, first).values


def make_action_values(spec: EnvSpec, e: Experiment, dueling: bool = False) -> ActionValues:
    """The network that an experiment asks for; with a core if the experiment has one.

    Raises:
        UsageError: the torso does not fit the observations.
    """
    return ActionValues(**encoder_fields(spec, e), **core_fields(e), num_actions=spec.num_actions, dueling=dueling)
