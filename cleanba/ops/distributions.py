"""Distributions over actions, which stochastic policies return, behind one protocol."""

from typing import Protocol

import chex
import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from cleanba.errors import UsageError
from cleanba.ops.losses import log_prob_and_entropy
from cleanba.specs import ActionSpec


class Distribution(Protocol):
    """A distribution over actions [..., *A], for a batch of shape [...].  *A is () for one choice, [D] for D parts.

    It is a tree of arrays [..., ...], so a batch of distributions can be indexed and sliced like an array.
    """

    def sample(self, key: jax.Array) -> jax.Array:
        """A random action.  -> [..., *A]."""
        ...

    def mode(self) -> jax.Array:
        """The most likely action.  -> [..., *A]."""
        ...

    def log_prob(self, action: jax.Array) -> jax.Array:
        """Log pi(action); a log density if actions are real.  [..., *A] -> [...]."""
        ...

    def log_prob_and_entropy(self, action: jax.Array) -> tuple[jax.Array, jax.Array]:
        """`log_prob`, and -E[log pi], which does not depend on the action.  [..., *A] -> [...], [...].

        If actions are real, that is the differential entropy, which may be negative.
        """
        ...

    def entropy(self) -> jax.Array:
        """The entropy alone.  -> [...]."""
        ...

    def describe(self) -> dict[str, jax.Array]:
        """Values to show in a film, by name, one for each bar.  -> [..., number of bars]."""
        ...


@flax.struct.dataclass
class Categorical:
    """One of A actions.  logits [..., A]; actions [...] int32."""

    logits: jax.Array

    def sample(self, key: jax.Array) -> jax.Array:
        return jax.random.categorical(key, self.logits).astype(jnp.int32)

    def mode(self) -> jax.Array:
        return self.logits.argmax(-1).astype(jnp.int32)

    def log_prob(self, action: jax.Array) -> jax.Array:
        return log_prob_and_entropy(self.logits, action)[0]

    def log_prob_and_entropy(self, action: jax.Array) -> tuple[jax.Array, jax.Array]:
        return log_prob_and_entropy(self.logits, action)

    def entropy(self) -> jax.Array:
        return self.log_prob_and_entropy(self.mode())[1]

    def describe(self) -> dict[str, jax.Array]:
        return {"probability": jax.nn.softmax(self.logits)}


@flax.struct.dataclass
class Categoricals:
    """D independent choices: pi(a) = prod_d pi_d(a_d).  logits [..., sum of counts]; actions [..., D] int32."""

    logits: jax.Array
    counts: tuple[int, ...] = flax.struct.field(pytree_node=False)
    """the number of options of each choice"""

    def parts(self) -> list[Categorical]:
        return [Categorical(x) for x in jnp.split(self.logits, np.cumsum(self.counts)[:-1], axis=-1)]

    def sample(self, key: jax.Array) -> jax.Array:
        keys = jax.random.split(key, len(self.counts))
        return jnp.stack([part.sample(k) for part, k in zip(self.parts(), keys, strict=True)], -1)

    def mode(self) -> jax.Array:
        return jnp.stack([part.mode() for part in self.parts()], -1)

    def log_prob(self, action: jax.Array) -> jax.Array:
        return self.log_prob_and_entropy(action)[0]

    def log_prob_and_entropy(self, action: jax.Array) -> tuple[jax.Array, jax.Array]:
        chex.assert_axis_dimension(action, -1, len(self.counts))
        of_parts = [part.log_prob_and_entropy(action[..., d]) for d, part in enumerate(self.parts())]
        log_probs, entropies = zip(*of_parts, strict=True)
        return jnp.stack(log_probs).sum(0), jnp.stack(entropies).sum(0)

    def entropy(self) -> jax.Array:
        return self.log_prob_and_entropy(self.mode())[1]

    def describe(self) -> dict[str, jax.Array]:
        return {"probability": jnp.concatenate([jax.nn.softmax(part.logits) for part in self.parts()], -1)}


@flax.struct.dataclass
class Combination:
    """D choices of which only some combinations are legal: pi(a) ~ exp(sum_d l_d(a_d)) over the legal ones.

    logits [..., product of counts], of every combination in C order; actions [..., D] int32.
    """

    logits: jax.Array
    counts: tuple[int, ...] = flax.struct.field(pytree_node=False)

    def whole(self) -> Categorical:
        return Categorical(self.logits)

    def apart(self, number: jax.Array) -> jax.Array:
        """The numbers of combinations [...] int32 -> their parts [..., D] int32."""
        return jnp.stack(jnp.unravel_index(number, self.counts), -1).astype(jnp.int32)

    def number(self, action: jax.Array) -> jax.Array:
        """The inverse: parts [..., D] -> the number of the combination [...] int32."""
        chex.assert_axis_dimension(action, -1, len(self.counts))
        strides = np.cumprod((1, *self.counts[:0:-1]))[::-1].astype(np.int32)
        return (action * strides).sum(-1, dtype=jnp.int32)

    def sample(self, key: jax.Array) -> jax.Array:
        return self.apart(self.whole().sample(key))

    def mode(self) -> jax.Array:
        return self.apart(self.whole().mode())

    def log_prob(self, action: jax.Array) -> jax.Array:
        return self.whole().log_prob(self.number(action))

    def log_prob_and_entropy(self, action: jax.Array) -> tuple[jax.Array, jax.Array]:
        return self.whole().log_prob_and_entropy(self.number(action))

    def entropy(self) -> jax.Array:
        return self.whole().entropy()

    def describe(self) -> dict[str, jax.Array]:
        pi = jax.nn.softmax(self.logits).reshape(*self.logits.shape[:-1], *self.counts)
        axes = range(-len(self.counts), 0)
        marginals = [pi.sum([other for other in axes if other != axis]) for axis in axes]
        return {"probability": jnp.concatenate(marginals, -1)}


LOG_2 = float(np.log(2))
LOG_2PI = float(np.log(2 * np.pi))


@flax.struct.dataclass
class DiagonalGaussian:
    """D real numbers, independent of each other: log pi(a) = -1/2 sum_d [((a_d - mu_d) / sigma_d)^2 + log 2 pi sigma_d^2].

    mean [..., D]; log_std [..., D], log sigma; actions [..., D] float32, unclipped: `ActionSpec.for_environment` clips
    them to the bounds of the environment.
    """  # noqa: E501

    mean: jax.Array
    log_std: jax.Array

    def sample(self, key: jax.Array) -> jax.Array:
        return self.mean + jnp.exp(self.log_std) * jax.random.normal(key, self.mean.shape)

    def mode(self) -> jax.Array:
        return self.mean

    def log_prob(self, action: jax.Array) -> jax.Array:
        chex.assert_equal_shape([action, self.mean, self.log_std])
        z = (action - self.mean) * jnp.exp(-self.log_std)
        return -0.5 * (jnp.square(z) + 2 * self.log_std + LOG_2PI).sum(-1)

    def log_prob_and_entropy(self, action: jax.Array) -> tuple[jax.Array, jax.Array]:
        return self.log_prob(action), self.entropy()

    def entropy(self) -> jax.Array:
        return (self.log_std + 0.5 * (1 + LOG_2PI)).sum(-1)

    def describe(self) -> dict[str, jax.Array]:
        return {"mean": self.mean}


@flax.struct.dataclass
class SquashedGaussian:
    """D real numbers within bounds: a = centre + scale tanh(u), where u is Gaussian (Haarnoja et al. 2018, appendix C).

        log pi(a) = log N(u; mu, sigma) - sum_d log(scale_d (1 - tanh(u_d)^2))

    mean, log_std [..., D], mu and log sigma of u; centre, scale [D] or [..., D]; actions [..., D] float32.
    """

    mean: jax.Array
    log_std: jax.Array
    centre: np.ndarray
    scale: np.ndarray

    def sample(self, key: jax.Array) -> jax.Array:
        return self.act(jax.random.normal(key, self.mean.shape))[0]

    def mode(self) -> jax.Array:
        """The action [..., D] at the mean of u, which evaluations play.  It does not maximise `log_prob`."""
        return self.centre + self.scale * jnp.tanh(self.mean)

    def act(self, noise: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The action [..., D] for standard normal noise [..., D], and its log pi(a) [...]: finite where tanh is 1."""
        u = self.mean + jnp.exp(self.log_std) * noise
        return self.centre + self.scale * jnp.tanh(u), self._density(u, noise)

    def log_prob(self, action: jax.Array) -> jax.Array:
        """Log pi(action), [..., D] -> [...].  At a bound, where it is infinite, that of the adjacent number is used."""
        chex.assert_equal_shape([action, self.mean, self.log_std])
        most = 1 - jnp.finfo(action.dtype).epsneg
        u = jnp.arctanh(((action - self.centre) / self.scale).clip(-most, most))
        return self._density(u, (u - self.mean) * jnp.exp(-self.log_std))

    def _density(self, u: jax.Array, z: jax.Array) -> jax.Array:
        """Log pi of the action tanh(u), where z = (u - mu) / sigma.  [..., D], [..., D] -> [...]."""
        # log(1 - tanh(u)^2), without the difference, which loses all digits if u is large.  (`softplus` or log1p would
        # add digits that the sum cannot hold, and XLA does not vectorise them on CPUs.)
        far = jnp.abs(u)
        log_slope = 2 * (LOG_2 - far - jnp.log(1 + jnp.exp(-2 * far))) + jnp.log(self.scale)
        return -(0.5 * (jnp.square(z) + LOG_2PI) + self.log_std + log_slope).sum(-1)

    def describe(self) -> dict[str, jax.Array]:
        return {"mean": self.mode()}


def size(action: ActionSpec) -> int:
    """The number of network outputs that parametrise the distribution over such actions."""
    return action.size if action.kind == "quantities" else sum(action.counts)


def distribution(
    action: ActionSpec, x: jax.Array, log_std: jax.Array | None = None, legal: jax.Array | None = None
) -> Distribution:
    """The distribution over actions of this specification, from a network's outputs x [..., size].

    log_std: [D], for real-valued actions; it does not depend on the observation.
    legal: a mask in one of the shapes of `ActionSpec.masked_by`.  Illegal actions have probability 0.

    Raises:
        UsageError: actions are real-valued, and log_std is missing.
    """
    chex.assert_axis_dimension(x, -1, size(action))
    if action.kind == "quantities":
        if log_std is None:
            raise UsageError(
                f"distribution was given no log_std for actions of {action.size} real numbers, which have a standard "
                'deviation each; pass log_std=self.param("log_std", nn.initializers.zeros, (self.action.size,))'
            )
        return DiagonalGaussian(x, jnp.broadcast_to(log_std, x.shape))
    if action.kind == "choice":
        return Categorical(x if legal is None else masked(x, legal.reshape(x.shape)))
    if legal is None:
        return Categoricals(x, action.counts)
    split = lambda x: jnp.split(x, np.cumsum(action.counts)[:-1], axis=-1)
    if legal.size != x.size or (len(action.counts) > 1 and legal.shape[x.ndim - 1 :] == action.counts):
        logits = combined(split(x))
        return Combination(masked(logits, legal.reshape(logits.shape)), action.counts)
    each = zip(split(x), split(legal.reshape(x.shape)), strict=True)
    return Categoricals(jnp.concatenate([masked(*part) for part in each], axis=-1), action.counts)


def masked(logits: jax.Array, legal: jax.Array) -> jax.Array:
    """Logits [..., A] with -inf where `legal` [..., A] is false.  If no action is legal, as after a game, all are."""
    chex.assert_equal_shape([logits, legal])
    return jnp.where(legal | ~legal.any(-1, keepdims=True), logits, -jnp.inf)


def combined(parts: list[jax.Array]) -> jax.Array:
    """Logits [..., A_d] of each part -> their sums for every combination, in C order, [..., prod of A_d]."""
    lead = parts[0].shape[:-1]
    total = jnp.zeros((*lead, 1))
    for part in parts:
        total = (total[..., :, None] + part[..., None, :]).reshape(*lead, -1)
    return total
