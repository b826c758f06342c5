"""A value for each action, over one torso."""

from collections.abc import Sequence

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from cleanba.config import Experiment
from cleanba.networks import torsos
from cleanba.networks.encoder import encode, encoder_fields
from cleanba.rollout import NetworkParams, Obs
from cleanba.specs import EnvSpec, ObsSpecs


class ActionValues(nn.Module):
    """Torso -> Q(s, a) for every action (Mnih et al. 2015), with ReLUs throughout, as CleanRL's.

    `dueling` makes it V(s) + A(s, a) - mean_a A(s, a) (Wang et al. 2016, eq. 9).
    """

    obs_spec: ObsSpecs
    num_actions: int
    network: str
    channels: Sequence[int]
    hiddens: Sequence[int]
    dueling: bool
    dtype: DTypeLike

    @nn.compact
    def __call__(self, obs: Obs) -> jax.Array:
        """Obs [N, ...] -> [N, num_actions] float32."""
        heads = [torsos.Dense(self.num_actions, 1.0, name="action_value")]
        if self.dueling:
            heads.append(torsos.Dense(1, 1.0, name="value"))
        values, *value = encode(self, obs, heads, "relu")
        return value[0] + values - values.mean(-1, keepdims=True) if self.dueling else values

    def initial_params(self, key: jax.Array) -> NetworkParams:
        """Random parameters, for observations of the specified shapes."""
        return self.init(key, jax.tree.map(lambda o: jnp.zeros((1, *o.shape), o.dtype), self.obs_spec))

    def values(self, params: NetworkParams, obs: Obs) -> jax.Array:
        """`__call__` with these parameters: obs [N, ...] -> [N, num_actions] float32."""
        out = self.apply(params, obs)
        assert isinstance(out, jax.Array)
        return out


def make_action_values(spec: EnvSpec, e: Experiment, dueling: bool) -> ActionValues:
    """The network that an experiment asks for.

    Raises:
        UsageError: the torso does not fit the observations.
    """
    return ActionValues(**encoder_fields(spec, e), num_actions=spec.num_actions, dueling=dueling)
