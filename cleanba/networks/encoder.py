"""The encoder: from observations to features by preprocessing and a torso.  [N, ...] -> [N, D]."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from cleanba.config import Experiment
from cleanba.errors import UsageError
from cleanba.kernels import Activation
from cleanba.networks import torsos
from cleanba.rollout import Obs
from cleanba.specs import EnvSpec, ObsSpec, ObsSpecs, describe


class Encoding(nn.Module):
    """A network with an encoder."""

    obs_spec: ObsSpecs
    network: str
    channels: Sequence[int]
    hiddens: Sequence[int]
    layer_norm: bool
    dtype: DTypeLike


NEEDED = {"nature": "image", "nips": "image", "impala": "image", "minatar": "planes"}
"""What the convolutional torsos see."""


def encoder_fields(spec: EnvSpec, e: Experiment) -> dict[str, Any]:
    """The fields of `Encoding` for an environment that looks like `spec`.

    Raises:
        UsageError: the torso does not fit the observations.
    """
    parts = jax.tree.leaves(spec.obs)
    needed = NEEDED.get(e.network)
    shapes = [part.shape for part in parts if part.kind == needed]
    if needed is not None and not shapes:
        raise UsageError(
            f"network={e.network} needs {needed.rstrip('s')}s, but {spec.env_id} shows {describe(spec.obs)}; use "
            "--network mlp"
        )
    least = {"nature": 36, "nips": 20}.get(e.network, 0)
    if any(least and sorted(shape)[1] < least for shape in shapes):  # the shorter of two long sides
        raise UsageError(
            f"network={e.network} needs pictures of {least} x {least} pixels or more, but {spec.env_id} shows "
            f"{describe(spec.obs)}; use --network impala"
        )
    if any(e.network == "minatar" and min(shape[:2]) < 3 for shape in shapes):
        raise UsageError(
            f"network=minatar needs boards of 3 x 3 fields or more, but {spec.env_id} shows {describe(spec.obs)}; use "
            "--network mlp"
        )
    return {
        "obs_spec": spec.obs,
        "network": e.network,
        "channels": e.channels,
        "hiddens": e.hiddens,
        "layer_norm": e.layer_norm,
        # The precision of float32 products is set by `process_setup.set_precision`.
        "dtype": jnp.bfloat16 if e.dtype == "bfloat16" else jnp.float32,
    }


def suitable_network(obs: ObsSpecs) -> str:
    """The torso for an observation.  Several parts go through an MLP by default, which gets them concatenated."""
    kind, shape = getattr(obs, "kind", ""), getattr(obs, "shape", ())
    if kind == "planes" and min(shape[:2]) < 3:  # smaller than a convolution
        return "mlp"
    return {"image": "impala", "planes": "minatar"}.get(kind, "mlp")


def encode(
    module: Encoding, obs: Obs, heads: Sequence[torsos.Dense] = (), activation: Activation = "tanh",
    action: jax.Array | None = None,
) -> list[jax.Array]:  # fmt: skip
    """Encode observations [N, ...] by the torso that a module's fields name.  Call it in the module's compact method.

    If an observation has several arrays, each picture (or board) among them gets a convolutional torso of its own.  The
    features are concatenated with the other arrays, as an MLP would get them, and one more layer follows.

    activation: the MLP's; convolutional torsos have ReLUs.
    action: [N, D], which a critic gets too.  It is concatenated to the MLP's input; after a convolutional torso, to the
        features, and one more layer follows.

    Returns the output of each head, [N, ...] float32, or the features alone if there are no heads.
    """
    mlp = lambda hiddens: torsos.MLP(hiddens, module.dtype, activation, module.layer_norm)
    torsos_by_name: dict[str, Callable[..., Any]] = {
        "nature": torsos.NatureCNN,
        "nips": torsos.NipsCNN,
        "minatar": torsos.MinAtarCNN,
        "impala": partial(torsos.ImpalaResNet, module.channels),
    }
    needed = NEEDED.get(module.network)
    torso = lambda: torsos_by_name[module.network](module.hiddens, module.dtype, module.layer_norm)
    parts = [(spec, part) for spec, part in leaves(module.obs_spec, obs) if spec.kind != "mask"]
    features = [torso()(part) if spec.kind == needed else as_vector(spec, part) for spec, part in parts]
    if needed is not None and len(features) == 1 and action is None:
        return [head(features[0].astype(jnp.float32)) for head in heads] or features
    features += [] if action is None else [action.astype(features[0].dtype)]
    hiddens = module.hiddens if needed is None else module.hiddens[-1:]
    return mlp(hiddens)(jnp.concatenate(features, axis=-1), heads)


def leaves(obs_spec: ObsSpecs, obs: Obs) -> list[tuple[ObsSpec, jax.Array]]:
    """The arrays of an observation with their specifications."""
    return list(zip(jax.tree.leaves(obs_spec), jax.tree.leaves(obs), strict=True))  # both are ordered by name


def legal_actions(obs_spec: ObsSpecs, obs: Obs) -> jax.Array | None:
    """The mask of legal actions among observations, [..., *shape] bool; None if there is none."""
    return next((part != 0 for spec, part in leaves(obs_spec, obs) if spec.kind == "mask"), None)


def as_vector(spec: ObsSpec, x: jax.Array) -> jax.Array:
    """One array of an observation as input of an MLP.  [N, ...] -> [N, D] float32.

    Codes become one-hot vectors and bytes their 8 bits, as both name categories rather than quantities.  Images are
    scaled to [0, 1].
    """
    flat = lambda x: x.reshape(x.shape[0], -1).astype(jnp.float32)
    if spec.kind in ("discrete", "codes"):
        return flat(jax.nn.one_hot(x.astype(jnp.int32) - spec.low, spec.count))
    if spec.kind == "bytes":
        return flat(x[..., None] >> jnp.arange(8, dtype=x.dtype) & 1)
    return flat(x) * {"image": 1 / 255}.get(spec.kind, 1.0)
