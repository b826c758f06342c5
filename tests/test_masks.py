"""Masks of legal actions: policies by enumeration of what is legal, action values, environments that have them."""

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from launch import finished
from scipy import stats

from cleanba.agents.evaluate import play
from cleanba.agents.policy import new_policy
from cleanba.algorithms import dqn, ppo
from cleanba.algorithms.normalisation import make_normaliser
from cleanba.config import Experiment, PolicyGradient
from cleanba.environments.envpool import Envs, env_spec
from cleanba.environments.spaces import obs_spec
from cleanba.networks import make_actor_critic
from cleanba.networks.encoder import as_vector, legal_actions
from cleanba.ops.distributions import Combination, distribution, size
from cleanba.recipes import RECIPES, Play
from cleanba.rollout import Rollout
from cleanba.specs import ActionSpec, EnvSpec, ObsSpec, choice

STEPS = 6
several = lambda *counts: ActionSpec("choices", (len(counts),), "int32", counts, (0,) * len(counts), counts)
CASES = {
    "choice": (choice(5), (5,)),
    "rows": (several(3, 3), (2, 3)),
    "one row": (several(4, 3, 2), (9,)),
    "combinations": (several(4, 3, 2), (4, 3, 2)),
}


def some_mask(shape: tuple[int, ...]) -> np.ndarray:
    """About half of the actions at each step; none at all at the last one, as after the end of a game."""
    mask = np.random.default_rng(2).random((STEPS, *shape)) < 0.5
    mask.reshape(STEPS, -1)[:, 0] = True
    if shape == (2, 3):
        mask[:, 1, 2] = True
    if shape == (9,):
        mask[:, [4, 8]] = True
    mask[-1] = False
    return mask


def slowly(action: ActionSpec, logits: np.ndarray, mask: np.ndarray) -> dict[tuple[int, ...], float]:
    """The probability of every legal action at one step."""
    shape = mask.shape
    if not mask.any():
        mask = np.ones(mask.shape, bool)
    starts = np.cumsum((0, *action.counts))
    found = {}
    for chosen in np.ndindex(*action.counts):
        bits = [start + c for start, c in zip(starts[:-1], chosen, strict=True)]
        together = shape == action.counts and len(shape) > 1
        if mask[chosen] if together else all(mask.ravel()[bits]):
            found[chosen] = np.exp(np.float64(logits[bits]).sum())
    total = sum(found.values())
    return {chosen: p / total for chosen, p in found.items()}


@pytest.mark.parametrize("name", CASES)
def test_illegal_actions_have_no_probability_and_the_others_are_as_before(name):
    action, shape = CASES[name]
    assert action.masked_by(shape)
    logits = np.random.default_rng(1).normal(size=(STEPS, size(action))).astype(np.float32)
    mask = some_mask(shape)

    def everything(logits, chosen):
        return distribution(action, logits, None, jnp.asarray(mask)).log_prob_and_entropy(chosen)

    policy = distribution(action, logits, None, jnp.asarray(mask))
    keys = jax.random.split(jax.random.key(0), 200)
    drawn = np.asarray(jax.jit(jax.vmap(policy.sample))(keys)).reshape(200, STEPS, -1)
    shown = np.asarray(policy.describe()["probability"])
    for t in range(STEPS):
        legal = slowly(action, logits[t], mask[t])
        assert {tuple(a) for a in drawn[:, t].tolist()} <= set(legal)
        assert tuple(np.atleast_1d(policy.mode()[t]).tolist()) == max(legal, key=lambda a: legal[a])
        for d in range(action.size):  # what a film shows of each part
            start = sum(action.counts[:d])
            for i in range(action.counts[d]):
                expected = sum(p for a, p in legal.items() if a[d] == i)
                assert abs(shown[t, start + i] - expected) < 1e-5

    chosen = policy.sample(keys[0])
    log_prob, entropy = jax.jit(everything)(logits, chosen)
    of_step = [slowly(action, logits[t], mask[t]) for t in range(STEPS)]
    expected = [np.log(p[tuple(np.atleast_1d(a).tolist())]) for p, a in zip(of_step, chosen, strict=True)]
    np.testing.assert_allclose(log_prob, expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(entropy, [stats.entropy(list(p.values())) for p in of_step], rtol=1e-5, atol=1e-5)

    # Gradients by the definition: differences of what numpy says of the legal actions, in float64.
    def total(logits):
        of_step = [slowly(action, logits[t], mask[t]) for t in range(STEPS)]
        log_prob = [np.log(p[tuple(np.atleast_1d(a).tolist())]) for p, a in zip(of_step, chosen, strict=True)]
        return sum(log_prob) + 0.3 * sum(stats.entropy(list(p.values())) for p in of_step)

    def loss(logits):
        log_prob, entropy = everything(logits, chosen)
        return log_prob.sum() + 0.3 * entropy.sum()

    found = jax.jit(jax.grad(loss))(logits)
    assert np.isfinite(found).all()
    for t, i in np.ndindex(logits.shape):
        step = np.zeros(logits.shape)
        step[t, i] = 1e-4
        assert abs(found[t, i] - (total(logits + step) - total(logits - step)) / 2e-4) < 1e-4


def test_masks_fit_each_choice_separately_or_all_combinations():
    fits = lambda action, *shape: action.masked_by(shape)
    assert fits(choice(4), 4) and not fits(choice(4), 5) and not fits(choice(4))
    assert fits(several(5, 5, 5), 3, 5) and fits(several(40, 20), 40, 20) and not fits(several(40, 20), 40)
    assert isinstance(distribution(several(2, 3), jnp.zeros((1, 5)), None, jnp.ones((1, 2, 3), bool)), Combination)
    real = ActionSpec("quantities", (2,), "float32", (), (-1.0,) * 2, (1.0,) * 2)
    assert not fits(real, 2)


OBS = {"deep": {"action_mask": ObsSpec("mask", (3,), "int8")}, "x": ObsSpec("vector", (2,), "float32")}
SPEC = EnvSpec("Test-v0", OBS, choice(3), False, False, {})


def test_a_mask_is_no_input_of_the_network():
    net = make_actor_critic(SPEC, PolicyGradient(hiddens=(4,), norm_obs=True))
    params = net.initial_params(jax.random.key(0))
    x, first = np.ones((1, 2, 2), np.float32), np.zeros((1, 2), bool)
    masks = np.int8([[[1, 1, 0], [0, 0, 0]]])
    out = net.outputs(params, {"deep": {"action_mask": masks}, "x": x}, first, ())
    assert params["params"]["MLP_0"]["Dense_0"]["Dense_0"]["kernel"].shape == (2, 4)
    np.testing.assert_array_equal(jnp.isneginf(out.policy.logits), [[[False, False, True], [False] * 3]])
    assert out.value[0, 0] == out.value[0, 1]
    normaliser = make_normaliser(PolicyGradient(norm_obs=True), SPEC)
    assert [path for path, _ in normaliser.parts] == ["['x']"]


def test_dqn_acts_explores_and_bootstraps_within_what_is_legal():
    e = dqn.DQN(num_envs=1, num_actors=1, num_shards=1, hiddens=(4,), start_e=1.0)
    algorithm = dqn.make(e, SPEC, "cpu")
    params = dqn.ActingParams(algorithm.init(jax.random.key(0)).online.params, jnp.int32(0))
    n = 3000
    mask = np.tile(np.int8([[1, 0, 1], [0, 1, 0], [0, 0, 0]]), (n // 3, 1))
    x = np.random.default_rng(0).normal(size=(n, 2)).astype(np.float32)
    obs = {"deep": {"action_mask": mask}, "x": x}
    values = np.array(algorithm.inspect(params, (), obs, None)["action value"])
    allowed = (mask == 1) | (mask.sum(-1, keepdims=True) == 0)
    best = np.where(allowed, values, -np.inf)
    np.testing.assert_array_equal(algorithm.act(params, (), obs, None, jax.random.key(1), False)[0], best.argmax(-1))
    np.testing.assert_array_equal(algorithm.inspect(params, (), obs, None)["value"], best.max(-1))
    explored = np.asarray(algorithm.act(params, (), obs, None, jax.random.key(1), True)[0])
    assert allowed[np.arange(n), explored].all()
    shares = [np.bincount(explored[i::3], minlength=3) / (n / 3) for i in range(3)]  # all actions are random
    np.testing.assert_allclose(shares, [[0.5, 0, 0.5], [0, 1, 0], [1 / 3] * 3], atol=0.06)


@pytest.mark.parametrize("double", [False, True])
def test_the_target_is_of_the_best_legal_action(double, on_devices):
    # One step whose reward is 0 and whose next state permits but one action, which is not the best.
    sizes = dict(num_envs=1, num_actors=1, num_shards=1, num_steps=4, hiddens=(4,), buffer_size=20, batch_size=1)
    e = dqn.DQN(**sizes, learning_starts=0, train_frequency=4, double=double)
    algorithm = dqn.make(e, SPEC, "cpu")
    state = algorithm.init(jax.random.key(0))
    x = np.float32([[0.3, -0.7]])
    inspect = lambda mask: algorithm.inspect(
        dqn.ActingParams(state.online.params, 0), (), {"deep": {"action_mask": mask}, "x": x}, None
    )
    values = np.asarray(inspect(np.ones((1, 3), np.int8))["action value"][0])
    worst = int(values.argmin())
    mask = np.zeros((5, 1, 3), np.int8)
    mask[..., worst] = 1
    flag, zeros = np.zeros((4, 1), bool), np.zeros((4, 1))
    rollout = Rollout(
        {"deep": {"action_mask": mask}, "x": np.broadcast_to(x, (5, 1, 2))}, np.zeros((5, 1), bool),
        zeros.astype(np.int32) + worst, zeros.astype(np.float32), flag, flag, ~flag, {}, (),
    )  # fmt: skip
    memory, one = jax.tree.map(lambda x: x[None], (algorithm.init_memory(rollout), rollout))
    run = lambda shards, state, memory, r: algorithm.update(state, memory, r, shards, jax.random.key(7))[2]
    metrics = on_devices(run, 1, 1)(state, memory, one)
    assert values.max() - values.min() > 0.1
    expected = 0.5 * (values[worst] - e.gamma * values[worst]) ** 2
    np.testing.assert_allclose(metrics["losses/td_loss"], expected, rtol=1e-5)


@pytest.mark.parametrize("env_id, shape", [("Maze-v0", (4,)), ("Connector-v2", (10, 5)), ("BinPack-v2", (40, 20))])
def test_masks_of_environments_are_found(env_id, shape):
    assert env_spec(Experiment(env_id=env_id)).obs["action_mask"] == ObsSpec("mask", shape, "bool")


class Watched(Envs):
    """Environments that check that whatever is done is legal."""

    def reset(self):
        self.obs = super().reset()
        self.checked = 0
        return self.obs

    def step(self, action):
        legal = legal_actions(self._spec.obs, self.obs)
        allowed = legal[np.arange(len(action)), action] | ~legal.any(-1)
        assert allowed.all()
        self.checked += len(action)
        step = super().step(action)
        self.obs = step.obs
        return step


def test_training_and_evaluation_do_only_what_is_legal_and_losses_are_finite():
    pools = []

    def make_envs(seeds, epoch=0):
        pools.append(Watched(spec, seeds))
        return pools[-1]

    e = ppo.PPO(
        env_id="Snake-v1", num_envs=4, num_actors=1, num_shards=1, num_steps=16, hiddens=(8,), num_minibatches=2,
        update_epochs=1, total_timesteps=192, collector="stepped", max_episode_steps=20,
    )  # fmt: skip
    spec = env_spec(e)
    record = finished(e, spec=spec, make_envs=make_envs)
    assert all(np.isfinite(row["losses/loss"]) for row in record.rows) and pools[0].checked == 192
    algorithm = ppo.make(e, spec, "cpu")
    agent = new_policy(RECIPES["ppo"], e, spec, algorithm, "cpu")._replace(params=algorithm.actor_params(record.state))
    for plays in (Play(), Play(greedy=True), Play(epsilon=1.0)):
        assert len(play(agent, 2, 1, jax.devices()[0], plays=plays, make_envs=make_envs)) == 2
        assert pools[-1].checked > 20


def test_masks_follow_the_shape_of_a_board_and_an_ambiguous_mask_is_read_as_combinations():
    board = ActionSpec("choice", counts=(4,), low=(0,), high=(3,))
    legal = jnp.array([[[True, False], [False, True]]])  # [1, 2, 2]
    assert jnp.isneginf(distribution(board, jnp.zeros((1, 4)), legal=legal).log_prob(jnp.array([1])))
    pair = ActionSpec("choices", (2,), "int32", (2, 2), (0, 0), (1, 1))
    policy = distribution(pair, jnp.zeros((1, 4)), legal=legal)
    assert jnp.isneginf(policy.log_prob(jnp.array([[0, 1]]))) and not jnp.isneginf(policy.log_prob(jnp.array([[1, 1]])))


def test_discrete_numbers_that_start_below_zero_are_told_apart():
    space = gymnasium.spaces.Discrete(5, start=-2)
    spec = obs_spec(space, np.array([-2, 2]), choice(2, 0))
    assert (spec.count, spec.low) == (5, -2)
    assert np.asarray(as_vector(spec, jnp.array([-2, 2]))).argmax(-1).tolist() == [0, 4]
