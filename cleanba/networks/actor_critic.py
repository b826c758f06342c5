"""A policy and its value function over one torso and one core."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from cleanba.errors import UsageError
from cleanba.networks import cores, torsos
from cleanba.networks.layers import ConvKind
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
        x = self._torso(jax.tree.map(lambda o: o.reshape(t * b, *o.shape[2:]), obs)).reshape(t, b, -1)
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

    def _torso(self, obs: Any) -> jax.Array:
        if self.network == "nature":
            return torsos.NatureCNN(self.hiddens, self.dtype, self.conv)(obs)
        if self.network == "impala":
            return torsos.ImpalaResNet(self.channels, self.hiddens, self.dtype, self.conv)(obs)
        specs = self.obs_spec if isinstance(self.obs_spec, Mapping) else {"": self.obs_spec}
        parts = obs if isinstance(obs, Mapping) else {"": obs}
        x = jnp.concatenate([as_vector(specs[name], parts[name]) for name in sorted(specs)], axis=-1)
        return torsos.MLP(self.hiddens, self.dtype)(x)


def as_vector(spec: Any, x: jax.Array) -> jax.Array:
    """One array of an observation as numbers an MLP can take.  [N, ...] -> [N, D] float32.

    Integers become one-hot vectors; pictures are scaled to [0, 1]; grids of small codes, such as MiniGrid's, by 1/16.
    """
    if spec.kind == "discrete":
        return jax.nn.one_hot(x, spec.count)
    scale = {"image": 1 / 255, "grid": 1 / 16, "vector": 1.0}[spec.kind]
    return x.reshape(x.shape[0], -1).astype(jnp.float32) * scale


def make_actor_critic(spec: Any, experiment: Any, platform: str) -> ActorCritic:
    """The network that an experiment asks for, in the form that is fast on `platform` ("cpu", "gpu" …).

    `--network auto` takes the IMPALA ResNet for images and an MLP otherwise.
    """
    is_image = getattr(spec.obs, "kind", None) == "image"
    network = experiment.network
    if network == "auto":
        network = "impala" if is_image else "mlp"
    if network != "mlp" and not is_image:
        raise UsageError(
            f"network={network} needs images, but {spec.env_id} shows {spec.obs}; use --network mlp or --network auto"
        )
    return ActorCritic(
        obs_spec=spec.obs,
        num_actions=spec.num_actions,
        network=network,
        channels=experiment.channels,
        hiddens=experiment.hiddens,
        core=experiment.core,
        lstm_size=experiment.lstm_size,
        # How products of float32 are taken is for `placement.set_precision` to say.
        dtype=jnp.bfloat16 if experiment.dtype == "bfloat16" else jnp.float32,
        conv="patches" if platform == "cpu" else "xla",
    )
