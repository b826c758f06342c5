"""A policy and a value function, with one torso and core or one for each."""

from typing import NamedTuple, cast

import flax.linen as nn
import jax
import jax.numpy as jnp

from cleanba.config import PolicyGradient
from cleanba.networks import cores, torsos
from cleanba.networks.cores import Carry, EncodingAndCore, apply_heads, core_fields
from cleanba.networks.encoder import encoder_fields, legal_actions
from cleanba.ops.distributions import Distribution, distribution, size
from cleanba.rollout import NetworkParams, Obs, PyTree
from cleanba.specs import ActionSpec, EnvSpec


class Output(NamedTuple):
    """What an actor-critic computes."""

    policy: Distribution  # [T, B, ...]  over actions
    value: jax.Array  # [T, B]  float32
    carry: Carry  # [B, ...]  after the last step


class ActorCritic(EncodingAndCore):
    """Torso -> core -> a policy and a value.  Heads are initialised orthogonally, with scales 0.01 and 1.

    If policy and value do not share a torso, each has a torso and a core of its own.  The standard deviations of
    real-valued actions are parameters that do not depend on the observation (as CleanRL's); they begin at
    exp(log_std_init).
    """

    action: ActionSpec
    share_torso: bool
    log_std_init: float

    @nn.compact
    def __call__(self, obs: Obs, first: jax.Array, carry: Carry) -> Output:
        """Obs [T, B, ...], first [T, B] bool, carry [B, ...] -> `Output`."""
        heads = (
            torsos.Dense(size(self.action), 0.01, name="policy"),
            torsos.Dense(1, 1.0, name="value"),
        )
        if self.share_torso:
            (x, value), carry = apply_heads(self, heads, obs, first, carry)
        else:
            policy_carry, value_carry = cast(tuple[Carry, Carry], carry or ((), ()))
            (x,), policy_carry = apply_heads(self, heads[:1], obs, first, policy_carry)
            (value,), value_carry = apply_heads(self, heads[1:], obs, first, value_carry)
            carry = cast(Carry, (policy_carry, value_carry)) if carry else ()
        log_std = None
        if self.action.kind == "quantities":
            log_std = self.param("log_std", nn.initializers.constant(self.log_std_init), (self.action.size,))
        policy = distribution(self.action, x, log_std, legal_actions(self.obs_spec, obs))
        return Output(policy, value[..., 0], carry)

    def initial_params(self, key: jax.Array) -> NetworkParams:
        """Random parameters, for observations of the specified shapes."""
        obs = jax.tree.map(lambda o: jnp.zeros((1, 1, *o.shape), o.dtype), self.obs_spec)
        return self.init(key, obs, jnp.zeros((1, 1), bool), self.initial_carry(1))

    def initial_carry(self, batch: int, first_env: int = 0) -> Carry:
        """The carry before the first observation, for B = `batch` environments.  Leaves [B, units]."""
        one = lambda: cores.initial_carry(self.core, self.lstm_size, batch)
        # Two separate ones: they are donated, so they must not share a buffer.
        return cast(Carry, one() if self.share_torso or self.core == "none" else (one(), one()))

    def outputs(self, params: NetworkParams, obs: Obs, first: jax.Array, carry: Carry) -> Output:
        """`__call__` with these parameters: obs [T, B, ...], first [T, B], carry [B, ...] -> leaves [T, B, ...]."""
        out = self.apply(params, obs, first, carry)
        assert isinstance(out, Output)
        return out

    def act(
        self, params: NetworkParams, carry: Carry, obs: Obs, first: jax.Array, key: jax.Array, explore: bool
    ) -> tuple[jax.Array, Carry, PyTree]:
        """One step of B environments: obs [B, ...], first [B] -> action [B, ...], carry, {"log_prob": [B]}.

        The action is a sample of the policy, or without `explore` the most likely one.
        """
        policy, carry = self.one_step(params, carry, obs, first)[::2]
        action = policy.sample(key) if explore else policy.mode()
        return action, carry, {"log_prob": policy.log_prob(action)}

    def inspect(self, params: NetworkParams, carry: Carry, obs: Obs, first: jax.Array) -> dict[str, jax.Array]:
        """Obs [B, ...], first [B] -> the value [B], and the policy in numbers, such as probabilities [B, A]."""
        out = self.one_step(params, carry, obs, first)
        return {"value": out.value, **out.policy.describe()}

    def one_step(self, params: NetworkParams, carry: Carry, obs: Obs, first: jax.Array) -> Output:
        """`outputs` of one step: obs [B, ...], first [B] -> leaves [B, ...]."""
        out = self.outputs(params, jax.tree.map(lambda o: o[None], obs), first[None], carry)
        policy, value = jax.tree.map(lambda x: x[0], (out.policy, out.value))
        return Output(policy, value, out.carry)


def make_actor_critic(spec: EnvSpec, e: PolicyGradient, module: type[ActorCritic] = ActorCritic) -> ActorCritic:
    """The network that an experiment asks for, as an instance of `module`, which may be of the user's own.

    Raises:
        UsageError: the torso does not fit the observations.
    """
    return module(
        **encoder_fields(spec, e),
        **core_fields(e),
        action=spec.action,
        share_torso=e.share_torso,
        log_std_init=e.log_std_init,
    )
