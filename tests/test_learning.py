"""PPO and IMPALA solve small games, through the command, with the same flags for every seed."""

import json

import pytest
from launch import finish, python, read_rows

# CartPole's returns reach 500, so value errors are large: a small weight keeps the policy's gradient visible.
FLAGS = {
    ("ppo", "Catch-v0"): "--total-timesteps 150000 --num-envs 64 --num-steps 16 --learning-rate 1e-3",
    ("ppo", "CartPole-v1"): "--total-timesteps 400000 --num-envs 16 --num-steps 64 --learning-rate 1e-3 --clip-coef 0.2"
    " --ent-coef 0 --vf-coef 0.05 --gamma 0.98 --gae-lambda 0.8",
    ("impala", "Catch-v0"): "--total-timesteps 300000 --num-envs 64 --learning-rate 2e-3 --num-minibatches 2",
    ("impala", "CartPole-v1"): "--total-timesteps 800000 --num-envs 64 --learning-rate 3e-3 --num-minibatches 2"
    " --ent-coef 0.001 --vf-coef 0.005 --max-grad-norm 1e6",
}
COMMON = "--hiddens 64 64 --collector scanned --checkpoint-frequency 0"
GOAL = {"Catch-v0": 0.95, "CartPole-v1": 475.0}
CPU_SECONDS = {"ppo": 60, "impala": 120}

# Runs a command, then reports the processor seconds that it took.
TIMED = """
import json, os, resource, subprocess, sys
code = subprocess.run([sys.executable, "-m", "cleanba", *sys.argv[2:]]).returncode
used = resource.getrusage(resource.RUSAGE_CHILDREN)
with open(sys.argv[1], "w") as file:
    json.dump(used.ru_utime + used.ru_stime, file)
sys.exit(code)
"""


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("algorithm, env_id", FLAGS)
def test_it_solves(algorithm, env_id, seed, tmp_path):
    run_dir, seconds = tmp_path / "run", tmp_path / "seconds"
    flags = [*FLAGS[algorithm, env_id].split(), *COMMON.split(), "--seed", str(seed)]
    process = python("-c", TIMED, seconds, algorithm, "--env-id", env_id, *flags, "--run-dir", run_dir)
    ended = finish(process, 4.0 * CPU_SECONDS[algorithm])
    assert ended.code == 0, ended.err
    result = json.loads((run_dir / "result.json").read_text())
    assert result["status"] == "finished"
    assert result["policy_lag"] == 1
    assert {row["stats/policy_lag"] for row in read_rows(run_dir)[1:]} == {1}
    assert result["episodes"] >= 100
    assert result["episodic_return"] >= GOAL[env_id]
    assert json.loads(seconds.read_text()) < CPU_SECONDS[algorithm]
