"""Faults of one bit or one key, planted into one of two computations of a run: what `cleanba bisect` must find.

`GROUPS` has the runs, `FAULTS` the faults.  The sound computation of each run is made once and recorded.  A computation
with a fault is compared with it, update by update, in the same process.
"""

import itertools
import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from launch import command

from cleanba import shards as shards_module
from cleanba.checks.parting import Finding, first_difference, first_differing_field, note_versions
from cleanba.checks.recompute import open_rerun, recompute
from cleanba.config import Placement
from cleanba.kernels import plain
from cleanba.ops.distributions import Categorical
from cleanba.runtime.learner import Learner
from cleanba.runtime.watched import WatchedUpdate
from cleanba.seeds import env_seed
from cleanba.shards import ShardAxis

SMALL = ("--num-envs", "8", "--num-actors", "2", "--num-shards", "4", "--hiddens", "8", "8", "--collector", "stepped")
SMALL += ("--checkpoint-frequency", "0", "--log-frequency", "1")
REPLAY = ("--num-steps", "8", "--learning-starts", "64", "--batch-size", "32", "--buffer-size", "1024")
REPLAY += ("--train-frequency", "16", "--total-timesteps", "192")

POLE = ("--env-id", "CartPole-v1", "--num-steps", "16")
GROUPS: dict[str, tuple[str, ...]] = {
    "ppo": (*POLE, "--num-minibatches", "2", "--update-epochs", "1", "--total-timesteps", "384"),
    "impala": (*POLE, "--num-minibatches", "1", "--no-norm-obs", "--no-norm-reward", "--total-timesteps", "256"),
    "dqn": (*POLE, "--target-network-frequency", "32", "--tau", "1.0", *REPLAY),
    "dqn --prioritised": (*POLE, *REPLAY),
    "sac": ("--env-id", "Pendulum-v1", *REPLAY),
    "td3": ("--env-id", "Pendulum-v1", *REPLAY),
    "pqn": (*POLE, "--num-minibatches", "2", "--update-epochs", "1", "--total-timesteps", "256"),
    "r2d2": (*POLE, "--lstm-size", "8", "--burn-in", "2", "--sequence-length", "6", *REPLAY),
}
"""Command -> more flags, for a run of a few updates."""


class Fault(NamedTuple):
    """A fault, and what `cleanba bisect` must say of it."""

    name: str
    run: str
    """a name in `GROUPS`"""
    plant: Callable[[], Any]
    """-> a context within which the computation has the fault"""
    source: str
    """what the difference comes from, a name in `parting.SOURCES`"""
    words: str
    """a pattern that the first line must match"""
    learners: int = 1
    """learner devices of the faulty side; the sound side has one"""


patch = mock.patch


def flip(x: jax.Array, bit: int = 0) -> jax.Array:
    """The same number with one of its bits flipped, counted from the last.  [...] float32 -> [...]."""
    return lax.bitcast_convert_type(lax.bitcast_convert_type(x, jnp.uint32) ^ jnp.uint32(1 << bit), jnp.float32)


NOT_LAST = 8  # a bit that is not lost by rounding


def in_envs(change: Callable[..., Any], actor: int = 0) -> Callable[[], Any]:
    """A fault in an actor's environments: change(step number from 0, action, the environments' step) -> a step."""

    def planted() -> Any:
        from cleanba.runtime import training

        sound = training.open_envs

        def open_envs(spec, seeds, *rest):
            envs, step = sound(spec, seeds, *rest), itertools.count()
            if seeds[0] == env_seed(1, actor * len(seeds), 0, 2 * len(seeds)):
                whole = envs.step
                envs.step = lambda action: change(next(step), action, whole)
            return envs

        return patch.object(training, "open_envs", open_envs)

    return planted


def other_seed() -> Any:
    from cleanba.runtime import training

    sound = training.env_seed
    return patch.object(training, "env_seed", lambda seed, env, *rest: sound(seed + (env == 5), env, *rest))


def edited(**fields: Callable[[int, np.ndarray], np.ndarray]) -> Callable[..., Any]:
    """A step whose fields are changed: name=function(step number, array) -> array."""

    def change(t, action, step):
        out = step(action)
        return out._replace(**{name: f(t, np.array(getattr(out, name))) for name, f in fields.items()})

    return change


def with_bit(when: int, *at: int) -> Callable[[int, np.ndarray], np.ndarray]:
    """Flip the last bit of the number at this index, at this step."""

    def f(t, x):
        if t == when:
            x.view(f"u{x.dtype.itemsize}")[at] ^= 1
        return x

    return f


def missed(t: int, terminated: np.ndarray) -> np.ndarray:
    return np.zeros_like(terminated)


def other_action(t: int, action: np.ndarray, step: Any) -> Any:
    action = np.array(action)
    if t == 20:
        action[1] = 1 - action[1]
    return step(action)


def key_of_actor() -> Any:
    from cleanba.runtime import collect

    sound = collect.action_key
    return patch.object(collect, "action_key", lambda seed, actor, rollout: sound(seed, actor + (actor == 1), rollout))


def other_log_prob() -> Any:
    def log_prob(self, action):
        return jnp.log(jnp.take_along_axis(jax.nn.softmax(self.logits), action[..., None], -1))[..., 0]

    return patch.object(Categorical, "log_prob", log_prob)


def stale_version() -> Any:
    from cleanba.runtime.train import Publisher

    sound = Publisher.__call__
    last: list[Any] = []

    def publish(self, version, params, *how):
        last.append(jax.tree.map(jnp.copy, params))
        return sound(self, version, last[0] if version == 2 else params, *how)

    return patch.object(Publisher, "__call__", publish)


def in_bfloat16() -> Any:
    sound = Learner.publish
    rounded = lambda x: x.astype(jnp.bfloat16).astype(x.dtype) if x.dtype == jnp.float32 else x
    return patch.object(Learner, "publish", lambda self, params: sound(self, jax.tree.map(rounded, params)))


def backwards() -> Any:
    return patch.object(shards_module, "ordered_sum", lambda x: sum(x[i] for i in reversed(range(x.shape[0]))))


def moments_backwards() -> Any:
    from cleanba.ops import moments

    sound = moments.add_batch
    return patch(
        "cleanba.algorithms.normalisation.add_batch",
        lambda shards, m, x, valid: sound(shards, m, x[:, ::-1], valid[:, ::-1]),
    )


def other_advantage() -> Any:
    from cleanba.algorithms import ppo

    sound = ppo.gae
    return patch.object(ppo, "gae", lambda *args: (lambda a: a.at[3, 1].set(flip(a[3, 1])))(sound(*args)))


def other_return() -> Any:
    from cleanba.algorithms import pqn

    sound = pqn.lambda_returns
    wrong = lambda g: g.at[3, 1].set(flip(g[3, 1]))
    return patch.object(pqn, "lambda_returns", lambda *args, **kwargs: wrong(sound(*args, **kwargs)))


def other_rescaling() -> Any:
    from cleanba.algorithms import r2d2

    sound = r2d2.rescale
    return patch.object(r2d2, "rescale", lambda x, eps: sound(x, eps=2 * eps))


def permuted() -> Any:
    from cleanba.algorithms import batches

    sound = batches.shuffled
    swap = lambda x: x.at[0].set(x[1]).at[1].set(x[0])
    return patch.object(batches, "shuffled", lambda key, size: swap(sound(key, size)))


def in_gradient(change: Callable[[jax.Array], jax.Array], shard: int = 2) -> Callable[[], Any]:
    """A fault in the first array of one shard's gradient."""

    def planted() -> Any:
        sound = ShardAxis.map_from

        def map_from(self, load, fn):
            out = sound(self, load, fn)
            if not (isinstance(out, tuple) and len(out) == 3 and "losses/" in "".join(map(str, out[1]))):
                return out  # of another call: a gradient comes with metrics and errors
            leaves, structure = jax.tree.flatten(out)
            here = (self.index == shard).reshape(-1, *(1,) * (leaves[0].ndim - 1))
            leaves[0] = jnp.where(here, change(leaves[0]), leaves[0])
            return jax.tree.unflatten(structure, leaves)

        return patch.object(ShardAxis, "map_from", map_from)

    return planted


def other_bit(gradient: jax.Array) -> jax.Array:
    return gradient.at[:, 1].set(flip(gradient[:, 1], NOT_LAST))


def no_count() -> Any:
    from cleanba import kernels

    sound = kernels.adam

    def adam(settings, shards, rate, trained, gradient):
        after, norm = sound(settings, shards, rate, trained, gradient)
        counts = lambda x, y: x if jnp.issubdtype(x.dtype, jnp.integer) else y
        return after._replace(optimiser=jax.tree.map(counts, trained.optimiser, after.optimiser)), norm

    return patch.object(kernels, "adam", adam)


def other_kernel() -> Any:
    """Dense layers that add in another order."""
    from cleanba import kernels

    backward = lambda x, w, b: plain.affine(x[:, ::-1], w[::-1], b)
    mlp = lambda activation, x, layers, heads=(): plain.mlp(activation, x, layers, heads, backward)
    return patch.object(kernels, "mlp", mlp)


def key_of_device() -> Any:
    from cleanba.algorithms import gradient_steps

    sound = gradient_steps.draw

    def draw(e, memory, shards, key, *rest):
        device = lax.axis_index("learner")
        other = jax.random.key_data(key) ^ device.astype(jnp.uint32)
        return sound(e, memory, shards, jax.random.wrap_key_data(other), *rest)

    return patch.object(gradient_steps, "draw", draw)


def other_noise() -> Any:
    from cleanba.algorithms import gradient_steps

    sound = gradient_steps.draw

    def draw(*args):
        draws = sound(*args)
        return draws._replace(noise=draws.noise.at[:, 3, 0, 5].set(flip(draws.noise[:, 3, 0, 5], NOT_LAST)))

    return patch.object(gradient_steps, "draw", draw)


def other_word() -> Any:
    from cleanba.ops import replay

    sound = replay.random_words
    return patch.object(replay, "random_words", lambda *args: sound(*args).at[0, :, 5].set(0))


def other_place() -> Any:
    from cleanba.ops import replay

    sound = replay.assign
    later = lambda drawn: drawn._replace(place=drawn.place.at[0].add(1))
    return patch.object(replay, "assign", lambda p, i, drawn, value: sound(p, i, later(drawn), value))


def late_target() -> Any:
    from cleanba.algorithms import dqn

    sound = dqn.every
    return patch.object(dqn, "every", lambda period, elapsed: sound(period + 16, elapsed))


def overwritten_row() -> Any:
    from cleanba.ops import replay

    sound = replay.write

    def write(ring, rollout, held=None):
        ring = sound(ring, rollout, held)
        rows = ring.rows._replace(reward=ring.rows.reward.at[0, 2, 1].set(7.0))
        return ring._replace(rows=rows)

    return patch.object(replay, "write", write)


def uncounted_update() -> Any:
    sound = Learner.update_on_device

    def update(self, state, memory, blocks, numbers):
        after, memory, metrics = sound(self, state, memory, blocks, numbers)
        return after._replace(updates=jnp.where(numbers[1] == 2, state.updates, after.updates)), memory, metrics

    return patch.object(Learner, "update_on_device", update)


def by_chance() -> Any:
    """A result that differs when it is computed again."""
    sound = Learner.update

    def update(self, state, memory, blocks, number):
        after, memory, metrics = sound(self, state, memory, blocks, number)
        if number == 2:
            leaves, structure = jax.tree.flatten(after)
            leaves[0] = flip(leaves[0])
            after = jax.tree.unflatten(structure, leaves)
        return after, memory, metrics

    return patch.object(Learner, "update", update)


def other_scale() -> Any:
    from cleanba.algorithms import normalisation

    sound = normalisation.inverse_std
    of_rewards = lambda moments: flip(sound(moments)) if moments.variance.ndim == 0 else sound(moments)
    return patch.object(normalisation, "inverse_std", of_rewards)


def other_coefficient() -> Any:
    from cleanba.algorithms import sac

    sound = sac.descend
    changed = lambda rule, rate, trained, gradient: sound(rule, rate, trained, flip(gradient, NOT_LAST))
    return patch.object(sac, "descend", changed)


FAULTS = [
    Fault(
        *("an environment ignores its seed", "ppo", other_seed, "environment"),
        r"update 1: observation of environment 5 at step 0 differs \(float32\), \d of 4$",
    ),
    Fault(
        *("one bit of an observation", "ppo", in_envs(edited(obs=with_bit(20, 3, 2))), "environment"),
        r"update 2: observation of environment 3 at step 5 differs \(float32\), 1 of 4$",
    ),
    Fault(
        *("a reward off by one ulp", "ppo", in_envs(edited(reward=with_bit(18, 1)), actor=1), "environment"),
        r"update 2: reward of environment 5 at step 2 differs \(float32\), 1 of 1$",
    ),
    Fault(
        *("an end of an episode is missed", "ppo", in_envs(edited(terminated=missed)), "environment"),
        r"update \d: termination of environment \d at step \d+ differs \(flags\), 1 of 1$",
    ),
    Fault(
        *("an environment is given another action", "ppo", in_envs(other_action), "environment"),
        r"update 2: observation of environment 1 at step 5 differs \(float32\), [1-4] of 4$",
    ),
    Fault(
        *("a wrong key for one actor", "ppo", key_of_actor, "acting"),
        r"update 1: actions? of environments? [4-7].* at step 0 differs? \(int32\)",
    ),
    Fault(
        *("log-probabilities are computed otherwise", "ppo", other_log_prob, "acting"),
        r"update 1: policy outputs? \['log_prob'\] of environments? .* at step \d+ differs? \(float32\)",
    ),
    Fault(
        *("a stale policy version", "ppo", stale_version, "publishing"),
        r"update 3: the parameters that actor 0 acted with differ \(float32\)",
    ),
    Fault(
        *("parameters are copied in bfloat16", "ppo", in_bfloat16, "publishing"),
        r"update 1: the parameters that actor 0 acted with differ \(float32\)",
    ),
    Fault(
        *("moments of observations in another order", "ppo", moments_backwards, "statistics"),
        r"update [12]: the running statistics of observations and rewards differ \(float32\)",
    ),
    Fault(
        *("rewards are scaled otherwise", "ppo", other_scale, "normalised"),
        r"update 1: normalised observations and rewards of shards? .* differ \(float32\)",
    ),
    Fault(
        *("one wrong advantage", "ppo", other_advantage, "targets"),
        r"update 1: values, advantages and targets of shards 0 to 3 differ \(float32\), 1 of 32$",
    ),
    Fault(
        *("a permuted minibatch", "ppo", permuted, "minibatch"),
        r"update 1: the minibatch of shards 0 to 3 differs in gradient step 1 \(float32\)",
    ),
    Fault(
        *("one bit of a shard's gradient", "ppo", in_gradient(other_bit), "gradient"),
        r"update 1: the gradient of shard 2 differs in gradient step 1 \(float32\), 1 of 8$",
    ),
    Fault(
        *("a NaN in a gradient", "ppo", in_gradient(lambda g: g.at[:, 0].set(jnp.nan), 1), "gradient"),
        r"update 1: the gradient of shard 1 differs in gradient step 1 \(float32\), 1 of 8$",
    ),
    Fault(
        *("the optimiser forgets to count its steps", "ppo", no_count, "optimiser"),
        r"update 1: parameters and the optimiser's state after the step differ in gradient step 1 \(int32\), 1 of 1$",
    ),
    Fault(
        *("an update is not counted", "ppo", uncounted_update, "update"),
        r"update 2: the learner's state after the update differs \(int32\), 1 of 1$",
    ),
    Fault(
        *("a result that does not repeat itself", "ppo", by_chance, "chance"),
        r"update 2: B's update gave other bits when it was computed again",
    ),
    Fault(
        *("a sum in another order", "impala", backwards, "sum"),
        r"update 1: the sum of the gradients over shards differs in gradient step 1 \(float32\)",
    ),
    Fault(
        *("a kernel that adds in another order", "dqn", other_kernel, "gradient"),
        r"update 1: the gradient of shards? .* differs in gradient step 1 \(float32\)",
    ),
    Fault(
        *("a key that depends on the device", "dqn", key_of_device, "draw"),
        r"update 1: the drawn transitions of shards .* differ in gradient step 1 \(int32\)",
        2,
    ),
    Fault(
        *("a target network one step late", "dqn", late_target, "target network"),
        r"update 1: the learner's state after the step differs in gradient step 2 \(float32\)",
    ),
    Fault(
        *("a row of the replay memory is overwritten", "dqn", overwritten_row, "memory"),
        r"update 1: the memory of shard 0 after the update differs in 1 of 128 rows of \.rows\.reward, in row 2 ",
    ),
    Fault(
        *("one bit of a critic's noise", "sac", other_noise, "draw"),
        r"update 1: the drawn transitions of shard 3 differ in gradient step 1 \(float32\), 1 of 24$",
    ),
    Fault(
        *("one bit of the noise on a target's actions", "td3", other_noise, "draw"),
        r"update 1: the drawn transitions of shard 3 differ in gradient step 1 \(float32\), 1 of 8$",
    ),
    Fault(
        *("one wrong lambda-return", "pqn", other_return, "targets"),
        r"update 1: values, advantages and targets of shards 0 to 3 differ \(float32\), 1 of 32$",
    ),
    Fault(
        *("one wrong random word", "dqn --prioritised", other_word, "draw"),
        r"update 1: the drawn transitions of shards? .* differ in gradient step 1 \(int32\)",
    ),
    Fault(
        *("a priority is given to another sequence", "r2d2", other_place, "priorities"),
        r"update 1: the stored priorities of shards? .* differ in gradient step 2 \(uint32\)",
    ),
    Fault(
        *("values are rescaled otherwise", "r2d2", other_rescaling, "gradient"),
        r"update 1: the gradient of shards? .* differs in gradient step 1 \(float32\)",
    ),
    Fault(
        *("the entropy coefficient's gradient", "sac", other_coefficient, "optimiser"),
        r"update 1: parameters and the optimiser's state after the step differ in gradient step \d of the entropy "
        r"coefficient \(float32\), 1 of 1$",
    ),
]


class Found(Exception):
    """Ends a computation once it is known where it diverges."""


def train(name: str, folder: Path) -> Path:
    """One of the `GROUPS`, trained."""
    run_dir = folder / name.replace(" ", "")
    ended = command(*name.split(), *GROUPS[name], *SMALL, "--run-dir", str(run_dir))
    assert ended.code == 0, ended
    return run_dir


def compute(run_dir: Path, learners: int, watch: Callable[[WatchedUpdate], None], last: int) -> None:
    """Compute the first updates of a run again, watched."""
    with open_rerun(run_dir, Placement((0,), tuple(range(learners)))) as rerun:
        recompute(rerun._replace(training=replace(rerun.training, watch=watch)), 0, last, display=False)


UPDATES = {name: 3 if name == "ppo" else 1 for name in GROUPS}
"""How many updates the faults need."""


def sound(name: str, run_dir: Path) -> list[WatchedUpdate]:
    """The sound computation of a run, update by update, with all that is asked of it compiled."""
    kept: list[WatchedUpdate] = []

    def watch(update: WatchedUpdate) -> None:
        update.events()
        kept.append(update.ended_in(*jax.tree.map(jnp.copy, update._after)))  # the next update overwrites the originals

    compute(run_dir, 1, watch, UPDATES[name])
    return kept


def look_for(fault: Fault, run_dir: Path, kept: list[WatchedUpdate]) -> Finding | None:
    """Plant a fault, and compare with the sound computation until they diverge."""
    found: list[Finding | None] = []
    versions: dict[bytes, int] = {}

    def watch(update: WatchedUpdate) -> None:
        good = kept[update.number - 1]
        fingerprints = good.fingerprints()
        if first_differing_field(fingerprints, update.fingerprints()) is not None:
            found.append(first_difference(good, update, update.number, versions))
            raise Found
        note_versions(versions, update.number, fingerprints)

    with fault.plant(), suppress(Found):
        compute(run_dir, fault.learners, watch, UPDATES[fault.run])
    return found[0] if found else None


def verdict(fault: Fault, finding: Finding | None) -> str:
    """What is wrong with a finding; "" if nothing is."""
    if finding is None:
        return "nothing was found"
    line = finding.lines()[0]
    wrong = [] if finding.source == fault.source else [f"it was put down to {finding.source}, not {fault.source}"]
    wrong += [] if re.match(fault.words, line) else [f"{line!r} does not match {fault.words!r}"]
    return "; ".join(wrong)
