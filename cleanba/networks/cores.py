"""Recurrent cores: [T, B, D] features and a carry -> [T, B, D'] features and the next carry."""

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias, cast

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from cleanba.config import Experiment, Recurrent
from cleanba.kernels import Activation, affine, multiply
from cleanba.networks.encoder import Encoding, encode
from cleanba.networks.torsos import Dense, orthogonal
from cleanba.rollout import Obs


class LSTMCarry(NamedTuple):
    """The state of an LSTM."""

    h: jax.Array  # [B, units]  output
    c: jax.Array  # [B, units]  cell


Carry: TypeAlias = tuple[()] | LSTMCarry | tuple[LSTMCarry, LSTMCarry]
"""A network's carry: () without a core; with two torsos, one for the policy and one for the value."""


def initial_carry(core: str, units: int, batch: int) -> LSTMCarry | tuple[()]:
    """Zeros [B, units] for an LSTM, with B = `batch`; () without a core."""
    if core == "none":
        return ()
    return LSTMCarry(jnp.zeros((batch, units)), jnp.zeros((batch, units)))


def cell(gates: jax.Array, c: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Pre-activations [B, 4 units] and the cell before [B, units] -> output and cell after, [B, units] each."""
    i, f, g, o = jnp.split(gates, 4, axis=-1)
    c = nn.sigmoid(f) * c + nn.sigmoid(i) * nn.tanh(g)
    return nn.sigmoid(o) * nn.tanh(c), c


@jax.custom_vjp
def recur(x_gates: jax.Array, first: jax.Array, carry: LSTMCarry, w_h: jax.Array) -> tuple[jax.Array, LSTMCarry]:
    """The part of an LSTM that depends on the past: x W_x + b [T, B, 4 units], first [T, B] -> h [T, B, units], carry.

    Its gradient is written by hand so that the gradient of w_h is a single product over all steps, after the backward
    scan.  Automatic differentiation would add up one product for each step.
    """
    return _forward(x_gates, first, carry, w_h)[0]


def _forward(
    x_gates: jax.Array, first: jax.Array, carry: LSTMCarry, w_h: jax.Array
) -> tuple[tuple[jax.Array, LSTMCarry], tuple[jax.Array, ...]]:
    def step(carry: LSTMCarry, inputs: tuple[jax.Array, jax.Array]) -> tuple[LSTMCarry, tuple[jax.Array, ...]]:
        x_t, first_t = inputs
        h, c = jax.tree.map(lambda y: jnp.where(first_t[:, None], 0.0, y), carry)
        gates = (x_t + multiply(h.astype(w_h.dtype), w_h)).astype(jnp.float32)
        after = LSTMCarry(*cell(gates, c))
        return after, (after.h, gates, h, c)

    last, (out, *saved) = lax.scan(step, carry, (x_gates, first))
    return (out, last), (*saved, first, w_h)


def _backward(
    saved: tuple[jax.Array, ...], cotangent: tuple[jax.Array, LSTMCarry]
) -> tuple[jax.Array, None, LSTMCarry, jax.Array]:
    gates, h, c, first, w_h = saved
    d_out, d_last = cotangent
    transposed = w_h.T

    def step(d_carry: LSTMCarry, inputs: tuple[jax.Array, ...]) -> tuple[LSTMCarry, jax.Array]:
        d_out_t, gates_t, c_t, first_t = inputs
        _, pull = jax.vjp(cell, gates_t, c_t)
        d_gates, d_c = pull((d_carry.h + d_out_t, d_carry.c))
        d_gates = d_gates.astype(w_h.dtype)
        d_h = multiply(d_gates, transposed).astype(jnp.float32)
        return jax.tree.map(lambda d: jnp.where(first_t[:, None], 0.0, d), LSTMCarry(d_h, d_c)), d_gates

    d_carry, d_gates = lax.scan(step, d_last, (d_out, gates, c, first), reverse=True)
    rows = lambda x: x.reshape(-1, x.shape[-1])
    return d_gates, None, d_carry, multiply(rows(h.astype(w_h.dtype)), rows(d_gates), transposed=True)


recur.defvjp(_forward, _backward)


class LSTM(nn.Module):
    """Long short-term memory (Hochreiter & Schmidhuber 1997, with forget gates: Gers et al. 2000).

        i, f, g, o = x_t W_x + h_{t-1} W_h + b;   c_t = sigm(f) c_{t-1} + sigm(i) tanh(g);   h_t = sigm(o) tanh(c_t)

    Weights are orthogonal and biases zero (as in CleanRL's recurrent PPO), except for the forget gate's bias.  With 0
    an untrained cell loses about half of its content in every step, with 2 an eighth.  The carry is set to zero before
    the first observation of an episode.  x W_x, which does not depend on the past, is one product over all steps.
    """

    units: int
    dtype: DTypeLike = jnp.float32
    forget_bias: float = 0.0

    @nn.compact
    def __call__(self, x: jax.Array, first: jax.Array, carry: LSTMCarry) -> tuple[jax.Array, LSTMCarry]:
        w_x = self.param("w_x", orthogonal(1.0), (x.shape[-1], 4 * self.units)).astype(self.dtype)
        w_h = self.param("w_h", orthogonal(1.0), (self.units, 4 * self.units)).astype(self.dtype)
        b = self.param("b", lambda key, shape: jnp.zeros(shape).at[1].set(self.forget_bias).ravel(), (4, self.units))
        b = b.astype(self.dtype)

        h, carry = recur(affine(x, w_x, b), first, carry, w_h)
        return h, carry


class EncodingAndCore(Encoding):
    """A network with an encoder and perhaps a core."""

    core: str
    lstm_size: int
    forget_bias: float


def core_fields(e: Experiment) -> dict[str, Any]:
    """The fields that `EncodingAndCore` adds to `Encoding`."""
    if not isinstance(e, Recurrent):
        return {"core": "none", "lstm_size": 0, "forget_bias": 0.0}
    return {"core": e.core, "lstm_size": e.lstm_size, "forget_bias": e.forget_bias}


def apply_heads(
    module: EncodingAndCore,
    heads: Sequence[Dense],
    obs: Obs,
    first: jax.Array,
    carry: Carry,
    activation: Activation = "tanh",
) -> tuple[list[jax.Array], Carry]:
    """A new torso and core, as a module's fields say -> the outputs of these heads, [T, B, ...] float32, and the carry.

    obs [T, B, ...], first [T, B] bool, carry [B, ...].  Call it in the module's compact method.
    """
    t, b = first.shape
    flat = jax.tree.map(lambda o: o.reshape(t * b, *o.shape[2:]), obs)
    if module.core == "none":
        return [x.reshape(t, b, -1) for x in encode(module, flat, heads, activation)], carry
    (x,) = encode(module, flat, (), activation)
    x, carry = LSTM(module.lstm_size, module.dtype, module.forget_bias)(
        x.reshape(t, b, -1), first, cast(LSTMCarry, carry)
    )
    # In float32: the heads are small, and their outputs are exponentiated and squared.
    return [head(x.astype(jnp.float32)) for head in heads], carry
