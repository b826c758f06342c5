"""A part of a run that is computed again has the same bits, wherever it is computed."""

import re
import shutil
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest
from launch import ROOT, command, read_result, read_rows

from cleanba.checks.recompute import open_rerun, read_checkpoint, recompute
from cleanba.checks.verify import goes_on_otherwise
from cleanba.config import Placement

sys.path.append(str(ROOT / "benchmarks"))
import verifiable

# 20 updates of 64 steps; environments start afresh after 8 and 16, and a checkpoint is taken after every second.
SIZES = [
    *("--env-id", "Catch-v0", "--num-envs", "8", "--num-actors", "2", "--num-shards", "4", "--num-steps", "8"),
    *("--hiddens", "8", "--total-timesteps", "1280", "--env-epoch", "8", "--collector", "stepped"),
    *("--checkpoint-frequency", "2", "--log-frequency", "3"),
]
KINDS = {
    "ppo": ["ppo", *SIZES, "--num-minibatches", "2", "--update-epochs", "1"],
    "dqn": [
        *("dqn", *SIZES, "--buffer-size", "240", "--learning-starts", "128", "--batch-size", "32"),
        *("--train-frequency", "16"),
    ],
}


@pytest.fixture(scope="module")
def run_of(tmp_path_factory) -> Callable[[str], Path]:
    """Kind -> a finished run that keeps its checkpoints.  It must not be changed."""
    made: dict[str, Path] = {}

    def run(kind: str) -> Path:
        if kind not in made:
            run_dir = tmp_path_factory.mktemp("runs") / kind
            ended = command(*KINDS[kind], "--run-dir", run_dir, "--keep-checkpoints", "100")
            assert ended.code == 0, ended.err
            made[kind] = run_dir
        return made[kind]

    return run


def test_a_packed_run_can_be_evaluated_drawn_compared_and_verified(run_of, tmp_path, monkeypatch):
    run_dir = run_of("ppo")
    monkeypatch.chdir(tmp_path)
    played = [command("eval", run_dir, "--episodes", "3")]
    ended = command("pack", run_dir, "--checkpoints", "--out", "packed.tar.gz")
    assert ended.code == 0 and "wrote packed.tar.gz" in ended.out, ended.err
    with tarfile.open("packed.tar.gz") as archive:
        names = archive.getnames()
        for name in names:
            member = archive.extractfile(name)
            assert name.startswith("packed/") and str(run_dir).encode() not in member.read(), name
    assert {"packed/config.json", "packed/metrics.jsonl", "packed/result.json", "packed/model.msgpack"} < {*names}
    ended = command("verify", "packed.tar.gz", "--from", "2", "--to", "4")
    assert ended.code == 0 and "the same bits" in ended.out, (ended.out, ended.err)
    played.append(command("eval", "packed.tar.gz", "--episodes", "3"))
    assert [ended.code for ended in played] == [0, 0], played
    one, two = (re.findall("return: mean.*", ended.out) for ended in played)
    assert one == two and one
    ended = command("diff", run_dir, "packed.tar.gz")
    assert ended.code == 0 and ended.out.endswith("\nidentical\n"), ended.out
    assert command("plot", "packed.tar.gz", "--out", "curves").code == command("report", "packed.tar.gz").code == 0
    ended = command("ppo", "--experiment", "packed.tar.gz", "--run-dir", "again")
    assert ended.code == 0 and command("diff", "again", "packed.tar.gz").code == 0, ended.err
    for words, said in (
        ((next((tmp_path / "runs").glob("unpacked/*")),), "comes from elsewhere, and only the run's own"),
        ((run_dir, "--out", "packed.zip"), "must be a file that ends in .tar.gz"),
        ((tmp_path / "nowhere",), "nowhere"),
    ):
        ended = command("pack", *words)
        assert ended.code == 2 and said in ended.err and "Traceback" not in ended.err, ended.err


@pytest.mark.parametrize(
    ("kind", "first", "last", "learners"),
    [("ppo", 2, 8, (0,)), ("ppo", 0, 4, (1, 2, 3)), ("ppo", 16, 20, (0, 1)), ("dqn", 6, 12, (2, 0, 1))],
)
def test_a_part_of_a_run_computed_again_has_the_same_digests(kind, first, last, learners, run_of):
    run_dir = run_of(kind)
    names = ("params_digest", "learner_digest")
    logged = {row["update"]: {n: row[n] for n in names} for row in read_rows(run_dir) if "params_digest" in row}
    before = sorted(path for path in run_dir.rglob("*"))
    with open_rerun(run_dir, Placement(learner_device_ids=learners)) as rerun:
        found = recompute(rerun, first, last, range(first + 2, last, 2), display=False)
    assert found == {update: both for update, both in logged.items() if first < update <= last}
    assert len(found) == (last - first) // 2
    assert sorted(path for path in run_dir.rglob("*")) == before  # it is only read


@pytest.mark.parametrize("kind, first, last", [("ppo", 2, 4), ("ppo", 6, 8), ("dqn", 8, 12)])
def test_what_the_next_segment_begins_with_is_computed_too(kind, first, last, run_of, tmp_path):
    ends = []
    with open_rerun(run_of(kind), Placement()) as rerun:
        recompute(rerun, first, last, display=False, ended=lambda *end: ends.append(end), actors_in=tmp_path)
        params, actors = ends[0]
        assert set(actors) == {0, 1}
        assert goes_on_otherwise(rerun, last, params, actors, tmp_path) == ""
        older = read_checkpoint(rerun, last - 2, with_memory=False).older_params
        assert "other parameters would collect" in goes_on_otherwise(rerun, last, older, actors, tmp_path)
        if last % 8:  # environments do not start afresh there
            swapped = {0: actors[1], 1: actors[0]}
            assert "actor 0 would go on otherwise" in goes_on_otherwise(rerun, last, params, swapped, tmp_path)


def test_actors_that_were_put_in_place_of_others_are_found(run_of, tmp_path):
    forged, other = tmp_path / "forged", tmp_path / "other"
    shutil.copytree(run_of("ppo"), forged)
    assert command("verify", forged, "--from", "2", "--to", "4").code == 0
    assert command(*KINDS["ppo"], "--seed", "2", "--keep-checkpoints", "100", "--run-dir", other).code == 0
    for file in (other / "actors/00001").glob("*.actions"):
        shutil.copy(file, forged / "actors/00001")
    shutil.copy(other / "actors/00001/4.standing", forged / "actors/00001")
    ended = command("verify", forged, "--from", "2", "--to", "4")
    assert ended.code == 1
    assert "checkpoint 4 is not what was computed here: actor 1 would go on otherwise (its actions)" in ended.out


def test_a_run_that_came_to_its_target_is_whole_and_one_that_says_so_falsely_is_not(tmp_path):
    assert command(*KINDS["ppo"], "--target-return", "-1", "--run-dir", tmp_path / "run").code == 0
    updates = read_result(tmp_path / "run")["update"]
    assert updates < 20
    verified = command("verify", tmp_path / "run")
    assert verified.code == 0 and "the same bits" in verified.out, verified
    result = tmp_path / "run" / "result.json"
    result.write_text(result.read_text().replace(f'"update": {updates}', '"update": 20'))
    refused = command("verify", tmp_path / "run")
    assert refused.code == 1
    assert f"the chain ends at update {updates}, but the run has finished with 20" in refused.out


def test_a_part_of_a_kept_run_is_computed_again():
    good, words = verifiable.verify("impala-CartPole-v1")
    assert good and (words.startswith("1 of ") or ", with other " in words), words  # the latter on other processors
