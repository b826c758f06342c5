"""SAC and TD3 against slow versions of their equations, their schedules against arithmetic, their bits against placements."""  # noqa: E501

import signal
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from launch import ROOT, command, digests, finish, finished, python, read_result, same_arrays

from cleanba.algorithms import action_bounds, gradient_steps, sac, td3
from cleanba.algorithms.sac import SAC
from cleanba.algorithms.td3 import TD3
from cleanba.config import Partition, check_values
from cleanba.errors import UsageError
from cleanba.kernels import compiled_for
from cleanba.networks import make_critics, make_policy
from cleanba.ops import replay
from cleanba.ops.distributions import SquashedGaussian
from cleanba.recipes import RECIPES
from cleanba.resolution import resolve
from cleanba.rollout import Rollout
from cleanba.specs import ActionSpec, EnvSpec, ObsSpec, choice

T, B, FEATURES, SIZE = 12, 3, 4, 2
LOW, HIGH = (-2.0, 0.0), (2.0, 1.0)
BOX = ActionSpec("quantities", (SIZE,), "float32", (), LOW, HIGH)
SPEC = EnvSpec("Test-v0", ObsSpec("vector", (FEATURES,), "float32"), BOX, False, False, {})
KINDS = {"sac": (sac, SAC), "td3": (td3, TD3)}
CENTRE, SCALE = np.array([0.0, 0.5]), np.array([2.0, 0.5])


def experiment(name: str, **changes):
    sizes = dict(num_envs=B, num_actors=1, num_shards=1, num_steps=T, hiddens=(8, 8), total_timesteps=100 * B * T)
    learning = dict(buffer_size=120, learning_starts=0, batch_size=16, train_frequency=B * T, gamma=0.9)
    return KINDS[name][1](**sizes | learning | changes)


def random_rollout(obs=None) -> Rollout:
    """One shard's steps, with terminations, truncations and the ignored steps after them.  Leaves [T(+1), B, ...]."""
    rng = np.random.default_rng(0)
    terminated, truncated, valid = (np.zeros((T, B), bool) for _ in range(3))
    first = np.zeros((T + 1, B), bool)
    first[0] = True
    done = np.zeros(B, bool)
    for t in range(T):
        valid[t] = ~done
        first[t + 1] = done
        kind = rng.random(B)
        terminated[t], truncated[t] = (kind < 0.2) & ~done, (kind > 0.8) & ~done
        done = terminated[t] | truncated[t]
    action = rng.uniform(LOW, HIGH, (T, B, SIZE)).astype(np.float32)
    reward = np.where(valid, rng.normal(size=(T, B)), 0).astype(np.float32)
    if obs is None:
        obs = rng.normal(size=(T + 1, B, FEATURES)).astype(np.float32)
    return Rollout(obs, first, action, reward, terminated, truncated, valid, {}, ())


# ------------------------------------------------------------------------------------------ losses, gradients, targets


class Slow:
    """Networks in NumPy, of doubles, layer by layer."""

    def __init__(self, params):
        self.params = jax.tree.map(lambda x: np.array(x, np.float64), params)["params"]

    @staticmethod
    def dense(layer, x):
        inner = layer["Dense_0"]
        return x @ inner["kernel"] + inner["bias"]

    @classmethod
    def torso(cls, tree, x):
        for name in sorted(tree["MLP_0"]):
            x = np.maximum(cls.dense(tree["MLP_0"][name], x), 0)
        return x

    def heads(self, obs):
        x = self.torso(self.params, obs)
        return [self.dense(self.params[name], x) for name in sorted(k for k in self.params if k.startswith("Dense"))]

    def values(self, obs, action):
        x = np.concatenate([obs, action], -1)
        critics = [self.params[name] for name in sorted(self.params)]
        return np.array([self.dense(c["Dense_0"], self.torso(c, x))[:, 0] for c in critics])


def slow_draw(policy: Slow, obs, noise):
    """SAC's action for this noise, and log pi of it, by the change of variables."""
    mean, x = policy.heads(obs)
    log_std = -5 + 3.5 * (np.tanh(x) + 1)
    u = mean + np.exp(log_std) * noise
    density = np.exp(-0.5 * noise**2) / np.sqrt(2 * np.pi) / np.exp(log_std)
    slope = SCALE * (1 - np.tanh(u) ** 2)
    return CENTRE + SCALE * np.tanh(u), np.log(density / slope).sum(-1)


def transitions(memory, drawn: replay.Indices, rollout: Rollout):
    """obs, action, reward, whether something follows, next obs; each of a step that was executed."""
    starts = list(zip(np.asarray(drawn.row).tolist(), np.asarray(drawn.env).tolist(), strict=True))
    assert all(rollout.valid[t, b] for t, b in starts) and len(set(starts)) > 5
    ends = [rollout.terminated[t, b] for t, b in starts]
    assert any(ends) and any(rollout.truncated[t, b] for t, b in starts)  # truncation bootstraps
    pick = lambda x: np.array([x[t, b] for t, b in starts], np.float64)
    return pick(rollout.obs), pick(rollout.action), pick(rollout.reward), ~np.array(ends), pick(rollout.obs[1:])


def numeric(loss, params, step: float = 1e-5):
    """D loss / d params, by central differences, of one number in each array."""
    leaves, structure = jax.tree.flatten(params)
    found = []
    for i, leaf in enumerate(leaves):
        at = tuple(n // 2 for n in leaf.shape)

        def moved(by, i=i, at=at):
            changed = [np.array(x, np.float64) for x in leaves]
            changed[i][at] += by
            return loss(jax.tree.unflatten(structure, changed))

        found.append((at, (moved(step) - moved(-step)) / (2 * step)))
    return found


def assert_gradient(optimiser, expected):
    """Adam's first moment after one step is a tenth of the gradient."""
    for mu, (at, slope) in zip(jax.tree.leaves(optimiser.mu), expected, strict=True):
        np.testing.assert_allclose(mu[at] / 0.1, slope, rtol=2e-3, atol=2e-5)


@pytest.mark.parametrize("name", KINDS)
def test_losses_gradients_and_targets_are_the_papers(name, on_devices):
    noise = {"policy_noise": 0.5, "noise_clip": 0.3} if name == "td3" else {}
    e = experiment(name, policy_frequency=1, tau=0.25, gamma=0.9, **noise)
    algorithm, rollout = KINDS[name][0].make(e, SPEC, "cpu"), random_rollout()
    state, other = (algorithm.init(jax.random.key(seed)) for seed in (0, 1))
    louder = lambda tree: jax.tree.map(lambda x: 3 * x, tree)  # policies that differ from place to place
    state = state._replace(policy=state.policy._replace(params=louder(state.policy.params)))
    targets = other.targets if name == "sac" else other.targets._replace(policy=louder(other.targets.policy))
    state = state._replace(targets=targets)
    memory = jax.tree.map(lambda x: x[None], algorithm.init_memory(rollout))
    one, key = jax.tree.map(lambda x: x[None], rollout), jax.random.key(7)
    run = lambda shards, state, memory, rollout: algorithm.update(state, memory, rollout, shards, key)[::2]
    after, metrics = on_devices(run, 1, 1, optimise=False)(state, memory, one)

    # The same draws.
    sample_key, later = jax.random.split(jax.random.fold_in(jax.random.fold_in(key, 0), 0))
    drawn = replay.sample_indices(replay.write(memory, one), jnp.int32(0), sample_key, e.batch_size, 1)
    obs, action, reward, goes_on, next_obs = transitions(memory, drawn, rollout)
    noise = lambda use: np.asarray(jax.random.normal(jax.random.fold_in(later, use), (e.batch_size, SIZE)), np.float64)

    critic_targets = state.targets if name == "sac" else state.targets.critics
    if name == "sac":
        next_action, log_prob = slow_draw(Slow(state.policy.params), next_obs, noise(0))
        future = Slow(critic_targets).values(next_obs, next_action).min(0) - 1.0 * log_prob
    else:
        smooth = SCALE * np.clip(0.5 * noise(0), -0.3, 0.3)
        next_action = CENTRE + SCALE * np.tanh(Slow(state.targets.policy).heads(next_obs)[0])
        future = Slow(critic_targets).values(next_obs, np.clip(next_action + smooth, LOW, HIGH)).min(0)
    y = reward + 0.9 * goes_on * future

    def q_loss(params):
        return (0.5 * (Slow(params).values(obs, action) - y) ** 2).sum(0).mean()

    def policy_loss(params):
        if name == "td3":
            return (
                -Slow(after.critics.params).values(obs, CENTRE + SCALE * np.tanh(Slow(params).heads(obs)[0]))[0].mean()
            )
        mine, log_prob = slow_draw(Slow(params), obs, noise(1))
        return (1.0 * log_prob - Slow(after.critics.params).values(obs, mine).min(0)).mean()

    np.testing.assert_allclose(metrics["losses/q_loss"], q_loss(state.critics.params), rtol=1e-4)
    np.testing.assert_allclose(metrics["losses/policy_loss"], policy_loss(state.policy.params), rtol=1e-4)
    assert_gradient(after.critics.optimiser, numeric(q_loss, state.critics.params))
    assert_gradient(after.policy.optimiser, numeric(policy_loss, state.policy.params))
    if name == "sac":
        entropy = -slow_draw(Slow(state.policy.params), obs, noise(1))[1].mean()
        np.testing.assert_allclose(metrics["losses/entropy"], entropy, rtol=1e-4)
        np.testing.assert_allclose(after.log_alpha.optimiser.mu / 0.1, 1.0 * (entropy + SIZE), rtol=1e-4)
        assert np.sign(after.log_alpha.params) == -np.sign(entropy + SIZE)  # Adam's first step is the sign

    online = after.critics.params if name == "sac" else td3.Networks(after.policy.params, after.critics.params)
    blend = jax.tree.map(lambda p, q: 0.25 * p + 0.75 * q, online, state.targets)
    for x, z in zip(jax.tree.leaves(after.targets), jax.tree.leaves(blend), strict=True):
        np.testing.assert_allclose(x, z, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("name", KINDS)
def test_two_gradient_steps_on_two_shards_are_those_of_one_batch(name, on_devices):
    """Shards draw by keys of their own, the policy learns at the second step, each of its steps by new noise."""
    often = {"target_network_frequency": 2 * 36} if name == "sac" else {}
    e = experiment(name, num_envs=2 * B, num_shards=2, train_frequency=36, policy_frequency=2, tau=0.25, **often)
    assert e.gradient_steps == 2
    algorithm, rollout, key = KINDS[name][0].make(e, SPEC, "cpu"), random_rollout(), jax.random.key(7)
    mirrored = rollout._replace(obs=rollout.obs[..., ::-1].copy(), reward=2 * rollout.reward)
    both = jax.tree.map(lambda *x: np.stack(x), rollout, mirrored)
    state, memory = algorithm.init(jax.random.key(0)), algorithm.init_memory(rollout)
    memory = jax.tree.map(lambda x: jnp.stack([x, x]), memory)
    run = lambda shards, state, memory, rollout: algorithm.update(state, memory, rollout, shards, key)[::2]
    after, metrics = on_devices(run, 2, 1, optimise=False)(state, memory, both)

    ring, adam = replay.write(memory, both), optax.scale_by_adam(eps=1e-8)
    plainly = lambda function: compiled_for("cpu", "off", function)
    outputs = plainly(make_policy(SPEC, e, 2 if name == "sac" else 1).outputs)
    values = plainly(make_critics(SPEC, e).values)
    rates = (e.policy_lr, e.q_lr) if name == "sac" else (e.learning_rate, e.learning_rate)
    policy, critics, log_alpha = ((p, adam.init(p)) for p in (state.policy.params, state.critics.params, jnp.zeros(())))
    targets = state.targets if name == "sac" else state.targets.critics
    q_losses, policy_losses, shape = [], [], (e.batch_size // 2, SIZE)

    def down(trained, gradient, rate):
        params, moments = trained
        step, moments = adam.update(gradient, moments)
        return jax.tree.map(lambda p, d: p - rate * d, params, step), moments

    def drawn(params, obs, noise):
        mean, x = outputs(params, obs)
        return SquashedGaussian(mean, -5 + 3.5 * (jnp.tanh(x) + 1), CENTRE.astype("f"), SCALE.astype("f")).act(noise)

    best = lambda params, obs: CENTRE + SCALE * jnp.tanh(outputs(params, obs)[0])
    for number in range(2):
        of_shard = [jax.random.split(jax.random.fold_in(jax.random.fold_in(key, number), k)) for k in range(2)]
        indices = [replay.sample_indices(ring, jnp.int32(k), of_shard[k][0], e.batch_size // 2, 1) for k in range(2)]
        pieces = [replay.take(ring, jnp.int32(k), indices[k], 1) for k in range(2)]
        w = jax.tree.map(lambda *x: jnp.concatenate(x), *pieces)
        noise = lambda use, keys=of_shard: jnp.concatenate(
            [jax.random.normal(jax.random.fold_in(own, use), shape) for _, own in keys]
        )
        if name == "sac":
            action, log_prob = drawn(policy[0], w.next_obs, noise(0))
            future = values(targets, w.next_obs, action).min(0) - jnp.exp(log_alpha[0]) * log_prob
        else:
            action = best(state.targets.policy, w.next_obs) + SCALE * jnp.clip(0.2 * noise(0), -0.5, 0.5)
            future = values(targets, w.next_obs, jnp.clip(action, jnp.array(LOW), jnp.array(HIGH))).min(0)
        y = w.reward[:, 0] + jnp.where(w.terminated, 0.0, 0.9) * future
        of_critics = lambda p, w=w, y=y: 0.5 * ((values(p, w.obs, w.action) - y) ** 2).sum(0).mean()
        loss, gradient = jax.value_and_grad(of_critics)(critics[0])
        q_losses.append(loss)
        critics = down(critics, gradient, rates[1])
        for use in range(1, 1 + number * (2 if name == "sac" else 1)):

            def of_policy(p, w=w, use=use, noise=noise, log_alpha=log_alpha, critics=critics):
                if name == "td3":
                    return -values(critics[0], w.obs, best(p, w.obs))[0].mean(), 0.0
                action, log_prob = drawn(p, w.obs, noise(use))
                return (
                    jnp.exp(log_alpha[0]) * log_prob - values(critics[0], w.obs, action).min(0)
                ).mean(), -log_prob.mean()

            (loss, entropy), gradient = jax.value_and_grad(of_policy, has_aux=True)(policy[0])
            policy_losses.append(loss)
            policy = down(policy, gradient, rates[0])
            if name == "sac":
                log_alpha = down(log_alpha, jnp.exp(log_alpha[0]) * (entropy + SIZE), rates[1])

    np.testing.assert_allclose(metrics["losses/q_loss"], np.mean(q_losses), rtol=1e-5)
    np.testing.assert_allclose(metrics["losses/policy_loss"], np.mean(policy_losses), rtol=1e-5)
    online = critics[0] if name == "sac" else td3.Networks(policy[0], critics[0])
    blend = jax.tree.map(lambda p, q: 0.25 * p + 0.75 * q, online, state.targets)
    found = [after.policy.params, after.critics.params, after.targets]
    expected = [policy[0], critics[0], blend]
    if name == "sac":
        found, expected = [*found, after.log_alpha.params], [*expected, log_alpha[0]]
    for x, z in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(x, z, rtol=1e-5, atol=1e-6)


# --------------------------------------------------------------------------------------------------------- schedules

PENDULUM = dict(env_id="Pendulum-v1", num_envs=4, num_actors=2, num_shards=1, num_steps=3, hiddens=(8,), seed=3)
LEARN = dict(buffer_size=600, batch_size=12, total_timesteps=120, learning_starts=36)


@pytest.mark.parametrize("name", KINDS)
def test_the_policy_learns_at_the_configured_frequency(name):
    """Ten updates of 12 steps, the first two without learning: 8 x 2 gradient steps, one for six steps.

    The policy learns at every fourth of them, so in every second update: SAC's four times, TD3's once.  In the other
    updates nothing is logged for it.
    """
    e = KINDS[name][1](**PENDULUM | LEARN, train_frequency=6, policy_frequency=4)
    record = finished(e, recipe=KINDS[name][0])
    assert record.result["policy_lag"] == 1
    assert ["losses/q_loss" in row for row in record.rows] == [False, False] + [True] * 8
    assert all(row["losses/q_loss"] > 0 for row in record.rows[2:])
    assert int(record.state.critics.optimiser.count) == 16
    assert int(record.state.policy.optimiser.count) == (16 if name == "sac" else 4)
    assert int(record.state.since_policy) == 0
    if name == "sac":
        assert int(record.state.log_alpha.optimiser.count) == 16
    assert ["losses/policy_loss" in row for row in record.rows] == [False, False] + [False, True] * 4
    assert all(row["losses/policy_grad_norm"] > 0 for row in record.rows[3::2])
    assert not any(name.startswith("count/") for row in record.rows for name in row)


@pytest.mark.parametrize("name", KINDS)
def test_actions_are_uniform_until_learning_starts_and_stay_within_bounds(name):
    e = experiment(name, learning_starts=5 * B * T)
    algorithm = KINDS[name][0].make(e, SPEC, "cpu")
    state = algorithm.init(jax.random.key(0))
    obs = np.random.default_rng(0).normal(size=(4000, FEATURES)).astype(np.float32)

    def act(updates, explore=True, key=2):
        params = algorithm.actor_params(state._replace(updates=jnp.int32(updates)))
        return np.asarray(algorithm.act(params, (), obs, None, jax.random.key(key), explore)[0])

    for updates in (0, 4):
        drawn = act(updates)
        assert (drawn >= LOW).all() and (drawn <= HIGH).all()
        unit = (drawn - LOW) / (np.array(HIGH) - LOW)
        np.testing.assert_allclose(np.quantile(unit, [0.1, 0.5, 0.9], axis=0).T, [[0.1, 0.5, 0.9]] * 2, atol=0.03)
    learnt, best = act(5), act(5, explore=False)
    assert (learnt >= LOW).all() and (learnt <= HIGH).all() and not same_arrays(learnt, act(4))
    assert same_arrays(best, act(0, explore=False, key=3))  # the same whatever the key
    loaded = KINDS[name][0].make(replace(e, init_from="runs/a"), SPEC, "cpu")  # acts from the first step
    first = loaded.act(algorithm.actor_params(state), (), obs, None, jax.random.key(2), True)[0]
    assert same_arrays(np.asarray(first), learnt)
    np.testing.assert_allclose((learnt - best).mean(0), 0, atol=0.05)
    if name == "td3":
        np.testing.assert_allclose((learnt - best).std(0) / SCALE, 0.1, rtol=0.05)
    shown = algorithm.inspect(algorithm.actor_params(state), (), obs, None)
    assert same_arrays(best, shown["mean" if name == "sac" else "action"]) and shown["value"].shape == (4000,)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_the_ends_of_tanh_are_the_bounds(dtype):
    """As the environment is given them: never outside, and at most a rounding of float32 inside."""
    low, high = (-0.4, -3.0, 0.1), (0.4, 1.0, 0.7)
    action = ActionSpec("quantities", (3,), dtype, (), low, high)
    bounds = action_bounds.action_bounds(SPEC._replace(action=action), "SAC")
    for y, end in ((-1.0, low), (1.0, high)):
        given = action.for_environment((bounds.centre + np.float32(y) * bounds.scale)[None])
        np.testing.assert_allclose(given[0], end, rtol=2e-7)
        given = action.for_environment((bounds.centre + np.float32(2 * y) * bounds.scale)[None])
        assert same_arrays(given[0], np.asarray(end, dtype))


# ------------------------------------------------------------------------------------------------------- observations


@pytest.mark.parametrize("name, what", [("sac", "pictures"), ("td3", "dictionaries")])
def test_pictures_and_dictionaries_are_seen(name, what, on_devices):
    rng = np.random.default_rng(0)
    if what == "pictures":
        spec = ObsSpec("image", (3, 36, 36), "uint8")
        obs = rng.integers(0, 256, (T + 1, B, 3, 36, 36)).astype(np.uint8)
    else:
        spec = {"a": SPEC.obs, "b": ObsSpec("discrete", (), "int32", 3)}
        numbers = rng.normal(size=(T + 1, B, FEATURES)).astype(np.float32)
        obs = {"a": numbers, "b": (numbers[..., 0] > 0).astype(np.int32)}
    fixed = {"autotune": False, "alpha": 0.3} if name == "sac" else {}
    e = experiment(name, policy_frequency=1, channels=(4,), **fixed)
    algorithm = KINDS[name][0].make(e, SPEC._replace(obs=spec), "cpu")
    rollout = random_rollout(obs)
    memory = jax.tree.map(lambda x: x[None], algorithm.init_memory(rollout))
    state, key = algorithm.init(jax.random.key(0)), jax.random.key(1)
    run = lambda shards, state, *rest: algorithm.update(state, *rest, shards, key)[::2]
    after, metrics = on_devices(run, 1, 1)(state, memory, jax.tree.map(lambda x: x[None], rollout))
    assert all(np.isfinite(x) for x in jax.tree.leaves(metrics))
    pairs = lambda a, b: zip(jax.tree.leaves(a.params), jax.tree.leaves(b.params), strict=True)
    for part in ("critics", "policy"):  # every layer learns
        assert all(not same_arrays(x, y) for x, y in pairs(getattr(after, part), getattr(state, part)))
    assert name != "sac" or metrics["losses/alpha"] == pytest.approx(0.3)  # which is not tuned
    losses = {name for name in metrics if name.startswith("losses/")}
    assert all(f"count/{name}" in metrics for name in losses), "a loss would be logged before learning starts"


# --------------------------------------------------------------------------------------------------------- randomness


@pytest.mark.parametrize("block", [1, 7, 32])
def test_steps_with_random_numbers_drawn_in_blocks_are_those_drawn_one_by_one(block):
    key = jax.random.key(0)
    draw = lambda numbers: jax.vmap(lambda n: jax.random.bits(jax.random.fold_in(key, n), (2,)))(numbers)
    # The order counts, and each step's own numbers.
    step = lambda drawn, x: (x * jnp.uint32(1664525) + drawn, {"sum": x})
    one_by_one = lambda i, x: step(draw(i[None])[0], x)
    start = jnp.zeros(2, jnp.uint32)
    slowly = jax.jit(lambda n: gradient_steps.repeat(n, one_by_one, start))
    in_blocks = jax.jit(lambda n: gradient_steps.repeat_in_blocks(n, block, draw, step, start))
    for times in (0, 1, 31, 32, 33, 65):
        expected, found = slowly(jnp.int32(times)), in_blocks(jnp.int32(times))
        assert same_arrays(found[0], expected[0]) and same_arrays(found[1]["sum"], expected[1]["sum"]), times


@pytest.mark.parametrize(
    "envs, steps, batch, block",
    [(1, 1, 256, 1), (4, 8, 256, 32), (6, 6, 256, 18), (4, 64, 8192, 2), (128, 4, 2**20, 1)],
)
def test_random_numbers_are_drawn_in_even_blocks_that_fit_into_memory(envs, steps, batch, block):
    e = experiment("sac", num_envs=envs, num_steps=steps, batch_size=batch, buffer_size=2**21, train_frequency=1)
    assert gradient_steps.block_length(e, gradient_steps.Noise(3, 17)) == block


# --------------------------------------------------------------------------------------------------------- placements


@pytest.mark.parametrize("name", KINDS)
def test_the_same_bits_on_any_devices(name, monkeypatch):
    """Also with any number of gradient steps whose random numbers are drawn at once."""
    sizes = dict(num_envs=12, num_actors=6, num_shards=6, batch_size=24, env_epoch=3, hiddens=(16,))
    e = KINDS[name][1](**PENDULUM | LEARN | sizes | {"total_timesteps": 216, "train_frequency": 4})
    reference = digests(e, recipe=KINDS[name][0])
    assert len(reference) > 1
    assert gradient_steps.block_length(e, gradient_steps.NO_NOISE) == e.gradient_steps > 4
    monkeypatch.setattr(gradient_steps, "BLOCK_STEPS", 4)
    for actors, learners in (([0, 1], [2, 3, 4, 5]), ([7], [0, 1, 2, 3, 4, 5])):
        assert digests(e, actors, learners, recipe=KINDS[name][0]) == reference


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
def test_killed_it_goes_on_to_the_same_bits(name, tmp_path):
    flags = "--env-id Pendulum-v1 --num-envs 4 --num-actors 2 --num-shards 1 --num-steps 3 --hiddens 8"
    flags += " --total-timesteps 240 --learning-starts 48 --batch-size 12 --env-epoch 9 --log-frequency 1"
    flags += " --train-frequency 4"  # 3 gradient steps: a policy that learns at every second has one behind it
    flags += " --checkpoint-frequency 6"  # amid an epoch
    words = [name, *flags.split()]
    whole, run = tmp_path / "whole", tmp_path / "run"
    assert command(*words, "--run-dir", whole).code == 0
    killing = python(ROOT / "tests" / "killed.py", "update", "15", *words, "--run-dir", run)
    assert finish(killing).code == -signal.SIGKILL
    ended = command("resume", run, "--learner-device-ids", "1")
    assert ended.code == 0 and "resuming after update" in ended.out, ended
    for key in ("params_digest", "learner_digest", "update", "episodes"):
        assert read_result(run)[key] == read_result(whole)[key]
    played = command("eval", run, "--episodes", "2")
    assert played.code == 0 and f"{name} on Pendulum-v1" in played.out, played.err


# -------------------------------------------------------------------------------------------------------------- flags


def test_defaults_are_cleanrls():
    one = resolve(RECIPES["sac"], {}, "cpu").experiment
    assert (one.gamma, one.tau, one.batch_size, one.learning_starts, one.buffer_size) == (0.99, 0.005, 256, 5000, 10**6)
    assert (one.policy_lr, one.q_lr, one.alpha, one.autotune, one.anneal_lr) == (3e-4, 1e-3, 0.2, True, False)
    assert (one.policy_frequency, one.target_network_frequency, one.train_frequency) == (2, 1, 1)
    two = resolve(RECIPES["td3"], {}, "cpu").experiment
    assert (two.gamma, two.tau, two.batch_size, two.learning_starts, two.buffer_size) == (
        0.99,
        0.005,
        256,
        25000,
        10**6,
    )
    assert (two.learning_rate, two.policy_frequency, two.policy_noise, two.exploration_noise) == (3e-4, 2, 0.2, 0.1)
    assert two.noise_clip == 0.5 and one.total_timesteps == two.total_timesteps == 10**6
    assert not hasattr(one, "learning_rate") and not hasattr(two, "target_network_frequency")


@pytest.mark.parametrize(
    "name, changes, words",
    [
        ("sac", {"train_frequency": 7}, "try --train-frequency 6 or 9"),
        ("sac", {"train_frequency": 50}, "try --train-frequency 18 or 36, or --num-steps 50 or"),
        ("td3", {"batch_size": 15, "num_shards": 2, "num_envs": 4}, "try --batch-size 14 or 16"),
        ("sac", {"tau": 0.0}, "set --tau above 0"),
        ("sac", {"alpha": -1.0}, "--alpha to 0 or more"),
        ("sac", {"alpha": 0.05}, "add --no-autotune, or leave --alpha out"),
        ("sac", {"target_network_frequency": 0}, "--target-network-frequency to 1 or more"),
        ("td3", {"policy_frequency": 0}, "--policy-frequency to 1 or more"),
        ("sac", {"policy_frequency": 1001, "total_timesteps": 10**6}, "policy_frequency=1001 must be at most 1000"),
        ("sac", {"policy_frequency": 1001}, "policy_frequency=1001 must be at most 1000"),
        ("td3", {"policy_frequency": 101}, "the run's 100 gradient steps, .* try --policy-frequency 100 or less"),
        ("td3", {"policy_noise": float("nan")}, "--policy-noise to a finite number"),
        ("td3", {"noise_clip": -0.5}, "--noise-clip to 0 or more"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_what_does_not_fit_is_refused(name, changes, words):
    e = experiment(name, **changes)
    with pytest.raises(UsageError, match=words):
        check_values(e)
        KINDS[name][0].check(e, Partition(e.num_envs, 1, e.num_shards))


@pytest.mark.parametrize(
    "action, words",
    [
        (choice(3), "one of a few actions, but SAC chooses real numbers; try `cleanba dqn` or `cleanba ppo`"),
        (replace(BOX, kind="choices", counts=(2, 2)), "several choices at once, but SAC .*; try `cleanba ppo`"),
        (replace(BOX, high=(2.0, float("inf"))), "numbers from -2 to inf, but SAC scales .*; try `cleanba ppo`"),
        (replace(BOX, high=BOX.high[:1] + BOX.low[1:]), r"both bounds of number \[1\] of an action are"),
        (replace(BOX, low=(-3.4028234663852886e38, 0.0)), "but SAC scales its actions to finite bounds"),
    ],
    ids=("choice", "choices", "unbounded", "flat", "largest"),
)
def test_other_actions_are_refused(action, words):
    with pytest.raises(UsageError, match=words):
        sac.make(experiment("sac"), SPEC._replace(action=action), "cpu")
