"""What is remembered: [T, B, D] features and a carry -> [T, B, D'] features and the next carry."""

from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import lax

from cleanba.networks.torsos import orthogonal


class LSTMCarry(NamedTuple):
    h: jax.Array  # [B, units]  output
    c: jax.Array  # [B, units]  cell


def initial_carry(core: str, units: int, batch: int) -> Any:
    """Zeros for an LSTM, () for no core."""
    if core == "none":
        return ()
    return LSTMCarry(jnp.zeros((batch, units)), jnp.zeros((batch, units)))


class LSTM(nn.Module):
    """Long short-term memory (Hochreiter & Schmidhuber 1997, with forget gates: Gers et al. 2000).

        i, f, g, o = x_t W_x + h_{t-1} W_h + b;   c_t = sigm(f) c_{t-1} + sigm(i) tanh(g);   h_t = sigm(o) tanh(c_t)

    Orthogonal weights, zero biases (as CleanRL's recurrent PPO).  The carry is set to zero before a step whose
    observation is the first of its episode.  What does not depend on the past, x W_x, is one product over all steps.
    """

    units: int
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x: jax.Array, first: jax.Array, carry: LSTMCarry) -> tuple[jax.Array, LSTMCarry]:
        w_x = self.param("w_x", orthogonal(1.0), (x.shape[-1], 4 * self.units)).astype(self.dtype)
        w_h = self.param("w_h", orthogonal(1.0), (self.units, 4 * self.units)).astype(self.dtype)
        b = self.param("b", nn.initializers.zeros_init(), (4 * self.units,)).astype(self.dtype)

        def step(carry: LSTMCarry, inputs: tuple[jax.Array, jax.Array]) -> tuple[LSTMCarry, jax.Array]:
            x_gates, first_t = inputs
            h, c = jax.tree.map(lambda y: jnp.where(first_t[:, None], 0.0, y), carry)
            i, f, g, o = jnp.split((x_gates + h.astype(self.dtype) @ w_h).astype(jnp.float32), 4, axis=-1)
            c = nn.sigmoid(f) * c + nn.sigmoid(i) * nn.tanh(g)
            h = nn.sigmoid(o) * nn.tanh(c)
            return LSTMCarry(h, c), h

        carry, h = lax.scan(step, carry, (x @ w_x + b, first))
        return h, carry
