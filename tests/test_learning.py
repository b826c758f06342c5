"""PPO and IMPALA solve small games, through the command, with the same flags for every seed.

CartPole, which takes longer, is solved with one seed here; static/small_games.png has three.
"""

import pytest
from launch import command, read_result, read_rows

# CartPole's returns reach 500, so value errors are large: a small weight keeps the policy's gradient visible.
FLAGS = {
    ("ppo", "Catch-v0"): "--total-timesteps 250000 --num-envs 64 --num-steps 16 --learning-rate 1e-3",
    ("ppo", "CartPole-v1"): "--total-timesteps 500000 --num-envs 16 --num-steps 64 --learning-rate 1e-3 --clip-coef 0.2"
    " --ent-coef 0 --vf-coef 0.05 --gamma 0.98 --gae-lambda 0.8 --target-return 480",
    ("impala", "Catch-v0"): "--total-timesteps 300000 --num-envs 64 --learning-rate 2e-3 --num-minibatches 2",
    ("impala", "CartPole-v1"): "--total-timesteps 800000 --num-envs 64 --learning-rate 3e-3 --num-minibatches 2"
    " --ent-coef 0.001 --vf-coef 0.005 --max-grad-norm 1e6 --target-return 480",
}
COMMON = "--hiddens 64 64 --collector scanned --env-epoch 0"
GOAL = {"Catch-v0": 0.95, "CartPole-v1": 475.0}  # one more update follows where a run has reached its target


@pytest.mark.slow
@pytest.mark.parametrize(
    "algorithm, env_id, seed",
    [
        (algorithm, env_id, seed)
        for algorithm, env_id in FLAGS
        for seed in ((1, 2, 3) if env_id == "Catch-v0" else (1,))
    ],
)
def test_it_solves(algorithm, env_id, seed, tmp_path):
    flags = [*FLAGS[algorithm, env_id].split(), *COMMON.split(), "--seed", str(seed)]
    ended = command(algorithm, "--env-id", env_id, *flags, "--run-dir", tmp_path / "run")
    assert ended.code == 0, ended.err
    result = read_result(tmp_path / "run")
    assert result["status"] == "finished"
    assert result["policy_lag"] == 1
    rows = [
        row for row in read_rows(tmp_path / "run") if "stats/policy_lag" in row
    ]  # a slow run also logs checkpoints by time
    assert {row["stats/policy_lag"] for row in rows[1:]} == {1}
    assert result["episodes"] >= 100
    assert result["episodic_return"] >= GOAL[env_id]
