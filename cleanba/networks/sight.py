"""From observations to features: which torso an experiment looks through.  [N, ...] -> [N, D]."""

from collections.abc import Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from cleanba.config import Experiment
from cleanba.errors import UsageError
from cleanba.networks import torsos
from cleanba.networks.layers import ConvKind


class Sighted(Protocol):
    """What a network module has to have to look at observations."""

    obs_spec: Any  # one `ObsSpec`, or a dictionary of them, of any depth
    network: str
    channels: Sequence[int]
    hiddens: Sequence[int]
    dtype: Any
    conv: ConvKind


def sight(spec: Any, e: Experiment, platform: str) -> dict[str, Any]:
    """The fields of `Sighted` for an environment that looks like `spec`, an `EnvSpec`.

    `--network auto` takes the IMPALA ResNet for images, MinAtar's convolution for boards and an MLP otherwise.

    Raises:
        UsageError: the torso does not fit the observations.
    """
    seen = getattr(spec.obs, "kind", "")
    network: str = e.network
    if network == "auto":
        network = {"image": "impala", "planes": "minatar"}.get(seen, "mlp")
    needed = {"nature": "image", "impala": "image", "minatar": "planes"}.get(network, seen)
    if needed != seen:
        raise UsageError(
            f"network={network} needs {needed.rstrip('s')}s, but {spec.env_id} shows {spec.obs}; use --network mlp or "
            "--network auto"
        )
    return {
        "obs_spec": spec.obs,
        "network": network,
        "channels": e.channels,
        "hiddens": e.hiddens,
        # How products of float32 are taken is for `placement.set_precision` to say.
        "dtype": jnp.bfloat16 if e.dtype == "bfloat16" else jnp.float32,
        "conv": "patches" if platform == "cpu" else "xla",
    }


def see(module: Sighted, obs: Any, activation: str = "tanh") -> jax.Array:
    """Look at observations through the torso that a module's fields name, from within its compact method.

    `activation` is the MLP's; convolutional torsos have rectifiers.
    """
    if module.network == "nature":
        return torsos.NatureCNN(module.hiddens, module.dtype, module.conv)(obs)
    if module.network == "impala":
        return torsos.ImpalaResNet(module.channels, module.hiddens, module.dtype, module.conv)(obs)
    if module.network == "minatar":
        return torsos.MinAtarCNN(module.hiddens, module.dtype, module.conv)(obs)
    specs, parts = jax.tree.leaves(module.obs_spec), jax.tree.leaves(obs)  # both by name
    x = jnp.concatenate([as_vector(spec, part) for spec, part in zip(specs, parts, strict=True)], axis=-1)
    return torsos.MLP(module.hiddens, module.dtype, activation)(x)


def as_vector(spec: Any, x: jax.Array) -> jax.Array:
    """One array of an observation as numbers an MLP can take.  [N, ...] -> [N, D] float32.

    Integers become one-hot vectors; pictures are scaled to [0, 1]; grids of small codes, such as MiniGrid's, by 1/16.
    """
    if spec.kind == "discrete":
        return jax.nn.one_hot(x, spec.count).reshape(x.shape[0], -1)
    scale = {"image": 1 / 255, "grid": 1 / 16, "planes": 1.0, "vector": 1.0}[spec.kind]
    return x.reshape(x.shape[0], -1).astype(jnp.float32) * scale
