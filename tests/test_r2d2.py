"""R2D2's whole gradient step against numpy with finite differences, its stored states, exploration and placements."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.flatten_util import ravel_pytree
from launch import command, digests
from scripted import Scripts, spec
from slowly import finite_difference
from test_recurrent import SCRIPTS, lively

from cleanba.algorithms import r2d2
from cleanba.algorithms.ppo import PPO
from cleanba.algorithms.r2d2 import R2D2
from cleanba.config import Partition, check_values
from cleanba.errors import UsageError
from cleanba.launch import gap_words
from cleanba.networks import make_action_values
from cleanba.ops import replay
from cleanba.ops.replay.priorities import UNIT
from cleanba.recipes import RECIPES
from cleanba.rollout import Rollout
from cleanba.runtime.channels import Stop
from cleanba.runtime.collect import SteppedCollector, Times, make_steppers
from cleanba.seeds import action_numbers
from cleanba.specs import ActionSpec, EnvSpec, ObsSpec, choice

OBS, ACTIONS, T = 2, 3, 4
SPEC = EnvSpec("tiny", ObsSpec("vector", (OBS,), "float32"), choice(ACTIONS), False, False, {})
# One letter for each step of a sequence: `.` goes on, `T` terminates, `U` truncates, `x` is ignored.
LAYOUTS = (".Tx...Ux", "..Ux..Tx", "........")


def tiny(**changes) -> R2D2:
    """One environment, and one sequence of 2 + 6 steps, which is whole after the second of two rollouts."""
    sizes = dict(network="mlp", hiddens=(3,), lstm_size=2, num_envs=1, num_steps=T, burn_in=2, sequence_length=6)
    sizes |= dict(buffer_size=64, learning_starts=2 * T, batch_size=2, train_frequency=T, n_step=2, gamma=0.9)
    return R2D2(**sizes | dict(total_timesteps=2 * T, max_grad_norm=1e9, learning_rate=0.1) | changes)


def tiny_rollouts(layout: str) -> list[Rollout]:
    """Random data of that layout, of one shard: leaves [1, T(+1), 1, ...]."""
    rng = np.random.default_rng(3)
    steps = np.array(list(layout))[:, None]
    valid, steps_of = steps != "x", lambda x, i: x[None, i * T : (i + 1) * T]
    obs = rng.normal(size=(2 * T + 1, 1, OBS)).astype(np.float32)
    first = np.concatenate([np.ones((1, 1), bool), ~valid])
    reward = np.where(valid, 3 * rng.normal(size=(2 * T, 1)), 0).astype(np.float32)
    action = rng.integers(ACTIONS, size=(2 * T, 1)).astype(np.int32)
    return [
        Rollout(
            obs=obs[None, i * T : (i + 1) * T + 1],
            first=first[None, i * T : (i + 1) * T + 1],
            action=steps_of(action, i),
            reward=steps_of(reward, i),
            terminated=steps_of(steps == "T", i),
            truncated=steps_of(steps == "U", i),
            valid=steps_of(valid, i),
            extras={},
            carry=(),
        )
        for i in range(2)
    ]


def numpy_outputs(params, obs, first, carry, double=np.float64):
    """Action values [L, A] and the LSTM's state after each step: a dense layer, an LSTM, two heads (dueling)."""
    p = jax.tree.map(lambda x: np.asarray(x, double), params)["params"]
    dense = lambda x, name: x @ p[name]["Dense_0"]["kernel"] + p[name]["Dense_0"]["bias"]
    sigmoid = lambda x: 1 / (1 + np.exp(-x))
    h, c, values = *carry, []
    for x, begins in zip(obs, first, strict=True):
        h, c = (np.zeros_like(h), np.zeros_like(c)) if begins else (h, c)
        torso = p["MLP_0"]["Dense_0"]["Dense_0"]
        x = np.maximum(x @ torso["kernel"] + torso["bias"], 0)
        lstm = p["LSTM_0"]
        i, f, g, o = np.split(x @ lstm["w_x"] + h @ lstm["w_h"] + lstm["b"], 4)
        c = sigmoid(f) * c + sigmoid(i) * np.tanh(g)
        h = sigmoid(o) * np.tanh(c)
        advantage = dense(h, "action_value")
        values.append(dense(h, "value") + advantage - advantage.mean())
    return np.array(values), (h, c)


def slow_targets(bootstrap, reward, layout, gamma, n):
    """Targets before h: rewards are added up to an end, a cut or n steps, whichever comes first."""
    targets = []
    for t in range(len(reward)):
        total, discount = 0.0, 1.0
        for j in range(t, len(reward)):
            total, discount = total + discount * reward[j], discount * gamma
            if layout[j] == "T":
                discount = 0.0
            if layout[j] in "TU" or j - t + 1 == n:
                break
        targets.append(total + discount * bootstrap[j + 1])
    return np.array(targets)


h = lambda x, eps=1e-3: np.sign(x) * (np.sqrt(abs(x) + 1) - 1) + eps * x
h_inverse = lambda y, eps=1e-3: np.sign(y) * (((np.sqrt(1 + 4 * eps * (abs(y) + 1 + eps)) - 1) / (2 * eps)) ** 2 - 1)


@pytest.fixture(scope="module")
def updated(on_devices):
    """updated(rollouts) -> the state before, the state after two updates, metrics, priorities."""
    algorithm = RECIPES["r2d2"].make(tiny(), SPEC, "cpu")
    rng = np.random.default_rng(7)
    drawn = lambda tree: jax.tree.map(lambda x: rng.normal(size=x.shape).astype(x.dtype), tree)
    state = algorithm.init(jax.random.key(0))
    state = state._replace(online=state.online._replace(params=drawn(state.target)), target=drawn(state.target))
    carry = jax.tree.map(lambda x: x[None], algorithm.initial_carry(1))

    def both(shards, state, first, second):
        memory = jax.tree.map(lambda x: x[None], algorithm.init_memory(jax.tree.map(lambda x: x[0], first)))
        state, memory, _ = algorithm.update(state, memory, first, shards, jax.random.key(1))
        state, memory, metrics = algorithm.update(state, memory, second, shards, jax.random.key(2))
        return state, metrics, memory.priorities.values

    compiled = on_devices(both, 1, 1, optimise=False)
    return lambda rollouts: (state, *compiled(state, *(r._replace(carry=carry) for r in rollouts)))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_gradient_step_is_the_papers_in_numpy(layout, updated):
    """Only steps after the burn-in have a gradient: finite differences keep the state before them fixed."""
    rollouts, e = tiny_rollouts(layout), tiny()
    before, after, metrics, priorities = updated(rollouts)
    joined = lambda name: np.concatenate([getattr(r, name)[0, :T, 0] for r in rollouts])
    obs = np.concatenate([joined("obs"), rollouts[1].obs[0, T:, 0]])
    first = np.concatenate([[False], joined("valid") == 0])  # the stored state is zero already
    reward, action, valid = joined("reward")[2:], joined("action")[2:], joined("valid")[2:]
    blank = (np.zeros(2), np.zeros(2))
    state_of = lambda params: numpy_outputs(params, obs[:2], first[:2], blank)[1]
    values_of = lambda params, carry: numpy_outputs(params, obs[2:], first[2:], carry)[0]

    online, targets = (values_of(p, state_of(p)) for p in (before.online.params, before.target))
    bootstrap = h_inverse(np.take_along_axis(targets, online.argmax(-1)[:, None], -1)[:, 0])
    y = h(slow_targets(bootstrap, reward, layout[2:], e.gamma, e.n_step))
    kept = state_of(before.online.params)
    leaves, structure = jax.tree.flatten(before.online.params)
    flat = np.asarray(ravel_pytree(before.online.params)[0], np.float64)

    def chosen(flat):
        parts = np.split(flat, np.cumsum([x.size for x in leaves])[:-1])
        params = jax.tree.unflatten(structure, [part.reshape(x.shape) for part, x in zip(parts, leaves, strict=True)])
        return np.take_along_axis(values_of(params, kept)[:-1], action[:, None], -1)[:, 0]

    loss = lambda flat: (0.5 * np.square(chosen(flat) - y) * valid).sum()
    gradient = finite_difference(loss, flat)
    seen = 10 * np.asarray(ravel_pytree(optax.tree_utils.tree_get(after.online.optimiser, "mu"))[0])
    np.testing.assert_allclose(seen, gradient, rtol=2e-3, atol=2e-4)
    assert abs(gradient).max() > 0.1
    size = abs(y - chosen(flat))[valid]
    expected = {
        "losses/td_loss": loss(flat) / e.sequence_length,
        "losses/q_values": (chosen(flat) * valid).mean(),
        "losses/grad_norm": np.linalg.norm(gradient),
        "losses/importance_weight": 1.0,
        "charts/importance_exponent": 0.6,
        "charts/replay_filled": 1.0,
        "charts/learning_rate": e.learning_rate,
    }
    metrics = {name: x for name, x in metrics.items() if not name.startswith("count/")}
    assert set(metrics) == set(expected) == set(r2d2.LOGGED)
    for name, value in expected.items():
        np.testing.assert_allclose(metrics[name], value, rtol=1e-3, err_msg=name)
    found = np.asarray(priorities)[priorities > 0] / UNIT
    np.testing.assert_allclose(found, [(0.9 * size.max() + 0.1 * size.mean()) ** 0.9], rtol=1e-3)


def test_a_stored_state_is_the_one_that_the_sequence_before_leads_to():
    """While the parameters stay as they are: from zeros, over all that was seen, to every sequence's beginning."""
    B, steps, rollouts = len(SCRIPTS), 7, 5
    e = tiny(num_envs=B, num_steps=steps, burn_in=3, sequence_length=11, buffer_size=B * 64, hiddens=(8,), lstm_size=8)
    algorithm, network = r2d2.make(e, spec(), "cpu"), make_action_values(spec(), e, e.dueling)
    params = lively(algorithm.init(jax.random.key(0)).target)
    collector = SteppedCollector(algorithm, steps, jax.devices()[0], Stop(), make_steppers(algorithm, steps, "cpu"))
    collector.restart(Scripts(*SCRIPTS)(range(B), 0))
    seen = [collector(params, action_numbers(0, 0, k), Times()).rollout for k in range(rollouts)]
    collector.close()
    shard = lambda r: jax.tree.map(lambda x: x[None], r)
    memory = shard(algorithm.init_memory(seen[0]))
    for r in seen:
        memory = replay.write_sequences(memory, shard(r), shard(r.carry.core), 14)
    carry = network.initial_carry(B)
    for k, r in enumerate(seen[:-2]):  # those whose sequence is whole
        slot = (int(memory.starts.tail[0]) - (rollouts - 1 - k)) % memory.starts.rows.begun.shape[1]
        place = slot * B + jnp.arange(B)
        drawn = replay.Drawn(place, jnp.ones(B, jnp.uint32), jnp.ones(B, bool), None, None)
        sequences = replay.take_sequences(memory, jnp.int32(0), drawn, 14)
        expected = jax.tree.map(lambda x, r=r: jnp.where(r.first[0][:, None], 0, x), carry)
        for found, x in zip(jax.tree.leaves(sequences.carry), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(found, x, rtol=1e-5, atol=1e-6)
        assert k == 0 or any(np.asarray(x).any() for x in jax.tree.leaves(expected))
        np.testing.assert_array_equal(sequences.obs[:steps], r.obs[:-1])
        part = lambda x: jax.tree.map(lambda x: x[:-1], x)
        carry = network.outputs(params, part(r.obs), part(r.first), carry).carry


# ---------------------------------------------------------------------------------------------------- exploration


def test_exploration_is_the_papers():
    epsilons = r2d2.exploration(R2D2(num_envs=5))
    np.testing.assert_allclose(epsilons, [0.4 ** (1 + 7 * i / 4) for i in range(5)], rtol=1e-6)
    np.testing.assert_allclose(r2d2.exploration(R2D2(num_envs=1)), [0.4], rtol=1e-6)
    assert not r2d2.exploration(R2D2(num_envs=3, explore_base=0.0)).any()


def test_every_environment_explores_by_its_number_wherever_it_is():
    e = tiny(num_envs=4, explore_base=0.5, explore_power=3.0)
    algorithm = r2d2.make(e, SPEC, "cpu")
    params = algorithm.init(jax.random.key(0)).target
    carry = algorithm.initial_carry(2, first_env=1)
    assert carry.env.tolist() == [1, 2]
    many = jax.tree.map(lambda x: jnp.repeat(x, 5000, axis=0), carry)
    obs, first = jnp.ones((10_000, OBS)), jnp.zeros(10_000, bool)
    act = lambda explore: algorithm.act(params, many, obs, first, jax.random.key(2), explore)
    (best, _, _), (action, after, _) = act(False), act(True)
    differ = np.asarray(action != best).reshape(2, -1).mean(1)
    np.testing.assert_allclose(differ, np.array([0.5**2, 0.5**3]) * (ACTIONS - 1) / ACTIONS, atol=0.02)
    assert (after.env == many.env).all()


@pytest.mark.parametrize("scaled", [True, False])
def test_inspected_values_are_in_units_of_rewards(scaled):
    algorithm = r2d2.make(tiny(rescale=scaled), SPEC, "cpu")
    params = jax.tree.map(lambda x: 2 * x, algorithm.init(jax.random.key(0)).target)
    params["params"]["value"]["Dense_0"]["bias"] += 20  # returns of hundreds
    obs = np.array([[0.3, -2.0]], np.float32)
    shown = algorithm.inspect(params, algorithm.initial_carry(1), obs, np.array([True]))
    values, _ = numpy_outputs(params, obs, [True], (np.zeros(2), np.zeros(2)))
    values = h_inverse(values) if scaled else values
    assert values.min() > (300 if scaled else 10)
    np.testing.assert_allclose(shown["action value"], values, rtol=1e-4)
    np.testing.assert_allclose(shown["value"], values.max(-1), rtol=1e-4)


# ----------------------------------------------------------------------------------------------------- placements


def test_every_placement_ends_in_the_same_bits():
    """Also where observations are normalised, and whichever actor has which environments."""
    e = R2D2(
        env_id="CartPole-v1", num_envs=6, num_actors=3, num_shards=3, num_steps=8, hiddens=(8,), lstm_size=8,
        burn_in=4, sequence_length=12, buffer_size=6 * 48, learning_starts=96, batch_size=6, train_frequency=24,
        env_epoch=4, norm_obs=True, collector="stepped", total_timesteps=8 * 48, explore_base=0.9, explore_power=2.0,
    )  # fmt: skip
    one, three = (digests(e, *places, recipe=r2d2) for places in (((0,), (0,)), ((0, 1), (1, 2))))
    assert one == three and sorted(one) == [4, 8]


# ----------------------------------------------------------------------------------------------------------- flags


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"total_timesteps": 4, "learning_starts": 96}, "before the first whole sequence .*--total-timesteps 480, or"),
        ({"buffer_size": 2}, "sequences of 8 steps .* need 24; try --buffer-size 24"),
        ({"buffer_size": 16}, "sequences of 8 steps .* need 24; try --buffer-size 24"),
        ({"learning_starts": 4}, "comes before the first whole sequence, which ends after 8 steps"),
        ({"total_timesteps": 4}, "total_timesteps=4 ends before the first whole sequence .*--total-timesteps 40, or"),
        ({"total_timesteps": 20, "learning_starts": 96}, "try --learning-starts 8, or --total-timesteps 480"),
        ({"priority_max_weight": 1.5}, "--priority-max-weight"),
        ({"burn_in": -1}, "--burn-in"),
    ],
    ids=str,
)
def test_what_does_not_fit_is_refused(changes, words):
    e = tiny(**changes)
    with pytest.raises(UsageError, match=words):
        check_values(e)
        r2d2.check(e, Partition(e.num_envs, 1, e.num_shards))


def test_a_run_may_begin_to_learn_as_early_as_the_message_says():
    e = tiny(total_timesteps=20, learning_starts=8)
    r2d2.check(e, Partition(e.num_envs, 1, e.num_shards))


def test_steps_that_no_sequence_learns_from_are_reported():
    assert "25% of all steps are never learnt from; use --num-steps 6 or less" in gap_words(tiny(num_steps=8))
    assert gap_words(tiny(num_steps=6)) == gap_words(PPO(num_steps=512)) == ""


def test_other_actions_than_one_of_a_few_are_refused():
    box = ActionSpec("quantities", (2,), "float32", (), (-1.0, -1.0), (1.0, 1.0))
    with pytest.raises(UsageError, match="R2D2 values each of a few actions; try `cleanba sac`"):
        r2d2.make(tiny(), SPEC._replace(action=box), "cpu")


def test_the_command_trains_plays_and_goes_on(tmp_path):
    words = "--env-id CartPole-v1 --num-envs 4 --num-steps 8 --hiddens 8 --lstm-size 8 --burn-in 4 --sequence-length 8"
    words += " --buffer-size 400 --learning-starts 64 --batch-size 4 --train-frequency 16 --total-timesteps 320"
    ended = command("r2d2", *words.split(), "--run-dir", tmp_path / "run")
    assert ended.code == 0, ended.err
    played = command("eval", tmp_path / "run", "--episodes", "3", "--video")
    assert played.code == 0 and "r2d2 on CartPole-v1" in played.out, played.err
    assert "random with probability 0.01" in played.out
    assert "is finished; nothing to do" in command("resume", tmp_path / "run").out
