"""`cleanba diff` on made-up runs: what it compares, and from which update on it says that they differ."""

import json
from pathlib import Path

import pytest
from launch import command

from cleanba.config import to_json
from cleanba.recipes import RECIPES
from cleanba.trust import mark_downloaded

UPDATES = (1, 2, 3, 4)


@pytest.fixture
def runs(tmp_path):
    """make(name, **lists) -> the directory of a run that logged these digests at updates 1, 2, 3 and 4; None: none."""

    def make(name: str, seed: int = 1, losses=(0.5, 0.4, 0.3, 0.2), **digests) -> Path:
        run_dir = tmp_path / name
        run_dir.mkdir()
        experiment = {"algorithm": "ppo", **to_json(RECIPES["ppo"].experiment(seed=seed))}
        (run_dir / "config.json").write_text(json.dumps({"experiment": experiment}))
        rows = [
            {"update": u, "losses/loss": loss, "seconds": u * seed} for u, loss in zip(UPDATES, losses, strict=True)
        ]
        for digest, values in digests.items():
            for row, value in zip(rows, values, strict=True):
                row |= {digest: value} if value else {}
        (run_dir / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        return run_dir

    return make


def test_runs_with_the_same_digests_and_metrics_are_identical(runs):
    digests = {"params_digest": (None, "p2", None, "p4"), "learner_digest": (None, "l2", None, "l4")}
    ended = command("diff", runs("a", **digests), runs("b", **digests))
    assert ended.code == 0 and ended.out.endswith("\nidentical\n"), ended
    assert "parameters are identical at all 2 digests, the last at update 4" in ended.out
    assert "state and memory are identical at all 2 digests, the last at update 4" in ended.out


def test_other_code_is_reported(runs):
    a, b = runs("a"), runs("b")
    for run_dir, code in ((a, "1234567890"), (b, "0987654321")):
        made = {"revision": "v1+changes", "code": f"sha256:{code}", "sources": {"mine": f"sha256:{code}", code: "x"}}
        path = run_dir / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | made))
    told = "Cleanba's code: v1+changes (12345678), now v1+changes (09876543); code of mine: 12345678, now 09876543\n"
    assert told in command("diff", a, b).out and "code" not in command("diff", a, a).out


def test_without_a_log_nothing_is_compared(runs):
    a, b = runs("a"), runs("b")
    (b / "metrics.jsonl").unlink()
    ended = command("diff", a, b)
    assert (ended.code, ended.out) == (2, "")
    assert f"{b} has no metrics.jsonl, so there are no digests to compare" in ended.err


def test_checkpoints_of_a_stranger_are_not_read_and_numbers_of_any_size_are_compared(runs, monkeypatch):
    a = runs("a", params_digest=("1", "2", "3", "4"), losses=(10**400, 1, 1, 1))
    b = runs("b", params_digest=("1", "2", "3", "5"))
    for run_dir in (a, b):
        (run_dir / "checkpoints" / "4").mkdir(parents=True)
    monkeypatch.setattr("cleanba.runtime.checkpoint.read_arrays", lambda *_: pytest.fail("a checkpoint was read"))
    mark_downloaded(a, "hf://somebody/run")
    ended = command("diff", a, b)
    assert ended.code == 1 and "checkpoints of a run from elsewhere are not read" in ended.out, ended
    assert "losses/loss: from update 1 on\n" in ended.out


def test_two_algorithms_are_reported_in_a_short_line(runs):
    a, b = runs("a"), runs("b")
    other = {"algorithm": "sac", **to_json(RECIPES["sac"].experiment())}
    (b / "config.json").write_text(json.dumps({"experiment": other}))
    (line,) = [line for line in command("diff", a, b).out.splitlines() if line.startswith("different experiments")]
    assert "algorithm: ppo and sac; " in line and line.endswith(" more") and len(line) < 80


def test_state_and_memory_may_differ_before_the_parameters_do(runs):
    """Different draws from a replay memory show in the parameters only later."""
    a = runs("a", params_digest=("p1", "p2", "p3", "p4"), learner_digest=("l1", "l2", "l3", "l4"))
    b = runs("b", params_digest=("p1", "p2", "p3", "q4"), learner_digest=("l1", "m2", "m3", "m4"))
    ended = command("diff", a, b)
    assert ended.code == 1 and ended.out.endswith("\nnot identical\n"), ended
    assert "parameters differ from update 4 on, the same at update 3\n" in ended.out
    assert "state and memory differ from update 2 on, the same at update 1\n" in ended.out
    assert ended.out.count("no checkpoint of the same update is kept by both runs") == 1


def test_runs_whose_memory_alone_differs_are_not_identical(runs):
    params = ("p1", "p2", "p3", "p4")
    a = runs("a", params_digest=params, learner_digest=("l1", "l2", "l3", "l4"))
    ended = command("diff", a, runs("b", params_digest=params, learner_digest=("l1", "l2", "l3", "m4")))
    assert ended.code == 1 and "parameters are identical at all 4 digests" in ended.out
    assert "state and memory differ from update 4 on, the same at update 3" in ended.out
    assert ended.out.endswith("\nnot identical\n")


def test_a_run_that_took_no_digest_of_its_state_is_compared_by_its_parameters(runs):
    params = ("p1", None, None, "p4")
    ended = command("diff", runs("a", params_digest=params, learner_digest=params), runs("b", params_digest=params))
    assert ended.code == 0 and "parameters are identical at all 2 digests" in ended.out
    assert "state and memory cannot be compared" in ended.out


def test_without_a_common_digest_nothing_is_identical(runs):
    a = runs("a", params_digest=("p1", None, None, None))
    ended = command("diff", a, runs("b", params_digest=(None, None, None, "p4")))
    assert ended.code == 1 and "parameters cannot be compared" in ended.out


def test_other_metrics_and_experiments_are_named(runs):
    params = ("p1", "p2", "p3", "p4")
    a, b = runs("a", params_digest=params), runs("b", seed=2, losses=(0.5, 0.4, 0.35, 0.1), params_digest=params)
    ended = command("diff", a, b)
    assert ended.code == 1 and "different experiments: seed: 1 and 2" in ended.out
    assert "losses/loss: from update 3 on, by up to 0.1" in ended.out and "seconds" not in ended.out


def test_the_first_update_with_a_digest_is_not_where_runs_began_to_differ(runs):
    a, b = (runs(name, params_digest=(None, None, name, name)) for name in "ab")
    said = command("diff", a, b).out
    assert "parameters differ from update 3 on, the first at which both runs took a digest\n" in said
