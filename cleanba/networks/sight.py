"""From observations to features: which torso an experiment looks through.  [N, ...] -> [N, D]."""

from collections.abc import Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from cleanba.config import Experiment
from cleanba.errors import UsageError
from cleanba.networks import torsos
from cleanba.networks.layers import Activation, ConvKind, conv_kind
from cleanba.rollout import PyTree
from cleanba.specs import EnvSpec, ObsSpec, ObsSpecs, describe


class Sighted(Protocol):
    """What a network module has to have to look at observations."""

    obs_spec: ObsSpecs
    network: str
    channels: Sequence[int]
    hiddens: Sequence[int]
    dtype: DTypeLike
    conv: ConvKind


def sight(spec: EnvSpec, e: Experiment, platform: str) -> dict[str, Any]:
    """The fields of `Sighted` for an environment that looks like `spec`.

    Raises:
        UsageError: the torso does not fit the observations.
    """
    seen = getattr(spec.obs, "kind", "")
    needed = {"nature": "image", "impala": "image", "minatar": "planes"}.get(e.network, seen)
    if needed != seen:
        raise UsageError(
            f"network={e.network} needs {needed.rstrip('s')}s, but {spec.env_id} shows {describe(spec.obs)}; use "
            "--network mlp, or leave it out"
        )
    return {
        "obs_spec": spec.obs,
        "network": e.network,
        "channels": e.channels,
        "hiddens": e.hiddens,
        # How products of float32 are taken is for `process_setup.set_precision` to say.
        "dtype": jnp.bfloat16 if e.dtype == "bfloat16" else jnp.float32,
        "conv": conv_kind(platform),
    }


def suitable_network(obs: ObsSpecs) -> str:
    """The torso that suits an observation: of several parts, an MLP, which sees them side by side."""
    return {"image": "impala", "planes": "minatar"}.get(getattr(obs, "kind", ""), "mlp")


def see(
    module: Sighted, obs: PyTree, heads: Sequence[torsos.Dense] = (), activation: Activation = "tanh",
    action: jax.Array | None = None,
) -> list[jax.Array]:  # fmt: skip
    """Look at observations through the torso that a module's fields name, from within its compact method.

    Returns what each head makes of the features, [N, ...] float32 each, or only these.  `activation` is the MLP's;
    convolutional torsos have rectifiers.  An action [N, D], if there is one, is beside what the MLP sees; beside the
    features of a convolutional torso, which one more layer then joins.
    """
    beside = lambda x: x if action is None else jnp.concatenate([x, action.astype(x.dtype)], axis=-1)
    mlp = lambda hiddens: torsos.MLP(hiddens, module.dtype, activation, module.conv)
    if module.network != "mlp":
        if module.network == "nature":
            x = torsos.NatureCNN(module.hiddens, module.dtype, module.conv)(obs)
        elif module.network == "minatar":
            x = torsos.MinAtarCNN(module.hiddens, module.dtype, module.conv)(obs)
        else:
            x = torsos.ImpalaResNet(module.channels, module.hiddens, module.dtype, module.conv)(obs)
        if action is not None:
            return mlp(module.hiddens[-1:])(beside(x), heads)
        return [head(x.astype(jnp.float32)) for head in heads] or [x]
    seen = [as_vector(spec, part) for spec, part in leaves(module.obs_spec, obs) if spec.kind != "mask"]
    return mlp(module.hiddens)(beside(jnp.concatenate(seen, axis=-1)), heads)


def leaves(obs_spec: ObsSpecs, obs: PyTree) -> list[tuple[ObsSpec, jax.Array]]:
    """The arrays of an observation with their specifications."""
    return list(zip(jax.tree.leaves(obs_spec), jax.tree.leaves(obs), strict=True))  # both by name


def legal_actions(obs_spec: ObsSpecs, obs: PyTree) -> jax.Array | None:
    """The mask among observations [..., *shape] that says which actions are legal, or None if all always are."""
    return next((part != 0 for spec, part in leaves(obs_spec, obs) if spec.kind == "mask"), None)


def as_vector(spec: ObsSpec, x: jax.Array) -> jax.Array:
    """One array of an observation as numbers an MLP can take.  [N, ...] -> [N, D] float32.

    Codes become one-hot vectors, and bytes the bits that they are made of: what only names things has no size.
    Pictures are scaled to [0, 1].
    """
    flat = lambda x: x.reshape(x.shape[0], -1).astype(jnp.float32)
    if spec.kind in ("discrete", "codes"):
        return flat(jax.nn.one_hot(x.astype(jnp.int32) - spec.low, spec.count))
    if spec.kind == "bytes":
        return flat(x[..., None] >> jnp.arange(8, dtype=jnp.uint8) & 1)
    return flat(x) * {"image": 1 / 255}.get(spec.kind, 1.0)
