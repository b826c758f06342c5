"""Policies and critics for real-valued actions, each with a torso of its own and ReLUs throughout."""

import flax.linen as nn
import jax
import jax.numpy as jnp

from cleanba.config import Experiment
from cleanba.networks import torsos
from cleanba.networks.encoder import Encoding, encode, encoder_fields
from cleanba.rollout import NetworkParams, Obs, PyTree
from cleanba.specs import EnvSpec, ObsSpecs


class Policy(Encoding):
    """Torso -> `heads` numbers for each part of an action, near zero at the start."""

    size: int
    heads: int

    @nn.compact
    def __call__(self, obs: Obs) -> jax.Array:
        """Obs [N, ...] -> [heads, N, size] float32."""
        return jnp.stack(encode(self, obs, [torsos.Dense(self.size, 0.01) for _ in range(self.heads)], "relu"))

    def initial_params(self, key: jax.Array) -> NetworkParams:
        """Random parameters, for observations and actions of the specified shapes."""
        return self.init(key, blank(self.obs_spec))

    def outputs(self, params: NetworkParams, obs: Obs) -> jax.Array:
        """`__call__` with these parameters: obs [N, ...] -> [heads, N, size] float32."""
        out = self.apply(params, obs)
        assert isinstance(out, jax.Array)
        return out


class Critic(Encoding):
    """Q(s, a).  The action is concatenated to an MLP's input or, after a convolutional torso, to its features."""

    @nn.compact
    def __call__(self, obs: Obs, action: jax.Array) -> jax.Array:
        """Obs [N, ...], action [N, size] -> [N] float32."""
        (value,) = encode(self, obs, [torsos.Dense(1, 1.0)], "relu", action)
        return value[:, 0]


class Critics(Encoding):
    """Several critics that differ only in their parameters."""

    size: int
    count: int

    @nn.compact
    def __call__(self, obs: Obs, action: jax.Array, first: int | None = None) -> jax.Array:
        """Obs [N, ...], action [N, size] -> [count, N] float32; [first, N] for the first critics alone."""
        one = lambda: Critic(self.obs_spec, self.network, self.channels, self.hiddens, self.layer_norm, self.dtype)
        return jnp.stack([one()(obs, action) for _ in range(first or self.count)])

    def initial_params(self, key: jax.Array) -> NetworkParams:
        """Random parameters, for observations and actions of the specified shapes."""
        return self.init(key, blank(self.obs_spec), jnp.zeros((1, self.size)))

    def values(self, params: NetworkParams, obs: Obs, action: jax.Array, first: int | None = None) -> jax.Array:
        """`__call__` with these parameters: obs [N, ...], action [N, size] -> [count, N] float32."""
        out = self.apply(params, obs, action, first)
        assert isinstance(out, jax.Array)
        return out


def blank(obs_spec: ObsSpecs) -> PyTree:
    """An observation of zeros, [1, ...]."""
    return jax.tree.map(lambda o: jnp.zeros((1, *o.shape), o.dtype), obs_spec)


def make_policy(spec: EnvSpec, e: Experiment, heads: int) -> Policy:
    """The policy network that an experiment asks for.

    Raises:
        UsageError: the torso does not fit the observations.
    """
    return Policy(**encoder_fields(spec, e), size=spec.action.size, heads=heads)


def make_critics(spec: EnvSpec, e: Experiment) -> Critics:
    """Two critics (Fujimoto et al. 2018), with torsos like the policy's.  Raises `UsageError` as `make_policy` does."""
    return Critics(**encoder_fields(spec, e), size=spec.action.size, count=2)
