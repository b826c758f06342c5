"""A policy and its value function, over one torso and one core or each over its own."""

from collections.abc import Sequence
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from cleanba.config import PolicyGradient
from cleanba.networks import cores, torsos
from cleanba.networks.encoder import encode, encoder_fields, legal_actions
from cleanba.ops.distributions import Distribution, distribution, size
from cleanba.rollout import NetworkParams, Obs, PyTree
from cleanba.specs import ActionSpec, EnvSpec, ObsSpecs


class Output(NamedTuple):
    policy: Distribution  # [T, B, ...]  over actions
    value: jax.Array  # [T, B]  float32
    carry: PyTree  # [B, ...]  after the last step


class ActorCritic(nn.Module):
    """Torso -> core -> a policy and a value.  Heads are orthogonal, of scale 0.01 and 1.

    Where policy and value share no torso, each has a torso and a core of its own.  The standard deviations of
    real-valued actions are parameters that do not depend on what is seen (as CleanRL's); they begin at
    exp(log_std_init).
    """

    obs_spec: ObsSpecs
    action: ActionSpec
    network: str
    channels: Sequence[int]
    hiddens: Sequence[int]
    share_torso: bool
    core: str
    lstm_size: int
    forget_bias: float
    log_std_init: float
    dtype: DTypeLike

    @nn.compact
    def __call__(self, obs: Obs, first: jax.Array, carry: PyTree) -> Output:
        """Obs [T, B, ...], first [T, B] bool, carry [B, ...] -> `Output`."""
        heads = (
            torsos.Dense(size(self.action), 0.01, name="policy"),
            torsos.Dense(1, 1.0, name="value"),
        )
        if self.share_torso:
            (x, value), carry = self.look_by(heads, obs, first, carry)
        else:
            (x,), of_policy = self.look_by(heads[:1], obs, first, carry and carry[0])
            (value,), of_value = self.look_by(heads[1:], obs, first, carry and carry[1])
            carry = carry and (of_policy, of_value)
        log_std = None
        if self.action.kind == "quantities":
            log_std = self.param("log_std", nn.initializers.constant(self.log_std_init), (self.action.size,))
        policy = distribution(self.action, x, log_std, legal_actions(self.obs_spec, obs))
        return Output(policy, value[..., 0], carry)

    def look_by(
        self, heads: Sequence[torsos.Dense], obs: Obs, first: jax.Array, carry: PyTree
    ) -> tuple[list[jax.Array], PyTree]:
        """By another torso and core each time it is called: what each head makes of it [T, B, ...] float32, carry."""
        t, b = first.shape
        flat = jax.tree.map(lambda o: o.reshape(t * b, *o.shape[2:]), obs)
        if self.core == "none":
            return [x.reshape(t, b, -1) for x in encode(self, flat, heads)], carry
        (x,) = encode(self, flat)
        x, carry = cores.LSTM(self.lstm_size, self.dtype, self.forget_bias)(x.reshape(t, b, -1), first, carry)
        # The heads are small, and what they say is exponentiated and squared.
        return [head(x.astype(jnp.float32)) for head in heads], carry

    def initial_params(self, key: jax.Array) -> NetworkParams:
        """Random parameters."""
        obs = jax.tree.map(lambda o: jnp.zeros((1, 1, *o.shape), o.dtype), self.obs_spec)
        return self.init(key, obs, jnp.zeros((1, 1), bool), self.initial_carry(1))

    def initial_carry(self, batch: int) -> PyTree:
        """The core's memory before anything was seen; () without a core."""
        one = lambda: cores.initial_carry(self.core, self.lstm_size, batch)
        # Two of them, as they are donated, and must not share their memory.
        return one() if self.share_torso or self.core == "none" else (one(), one())

    def outputs(self, params: NetworkParams, obs: Obs, first: jax.Array, carry: PyTree) -> Output:
        """`__call__` with these parameters."""
        out = self.apply(params, obs, first, carry)
        assert isinstance(out, Output)
        return out

    def act(
        self, params: NetworkParams, carry: PyTree, obs: Obs, first: jax.Array, key: jax.Array, explore: bool
    ) -> tuple[jax.Array, PyTree, PyTree]:
        """One step of B environments: obs [B, ...], first [B] -> action [B, ...], carry, {"log_prob": [B]}.

        The action is a sample of the policy, or its likeliest if not `explore`.
        """
        policy, carry = self.look(params, carry, obs, first)[::2]
        action = policy.sample(key) if explore else policy.mode()
        return action, carry, {"log_prob": policy.log_prob(action)}

    def inspect(self, params: NetworkParams, carry: PyTree, obs: Obs, first: jax.Array) -> dict[str, jax.Array]:
        """Obs [B, ...], first [B] -> the value [B], and what describes the policy, such as probabilities [B, A]."""
        out = self.look(params, carry, obs, first)
        return {"value": out.value, **out.policy.describe()}

    def look(self, params: NetworkParams, carry: PyTree, obs: Obs, first: jax.Array) -> Output:
        """`outputs` of one step: obs [B, ...], first [B] -> leaves [B, ...]."""
        out = self.outputs(params, jax.tree.map(lambda o: o[None], obs), first[None], carry)
        policy, value = jax.tree.map(lambda x: x[0], (out.policy, out.value))
        return Output(policy, value, out.carry)


def make_actor_critic(spec: EnvSpec, e: PolicyGradient) -> ActorCritic:
    """The network that an experiment asks for.

    Raises:
        UsageError: the torso does not fit the observations.
    """
    return ActorCritic(
        **encoder_fields(spec, e),
        action=spec.action,
        share_torso=e.share_torso,
        core=e.core,
        lstm_size=e.lstm_size,
        forget_bias=e.forget_bias,
        log_std_init=e.log_std_init,
    )
