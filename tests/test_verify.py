"""A part of a run that is computed again has the same bits, wherever it is computed; and forged parts are found."""

import json
import re
import shutil
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest
from fake_hub import fake_hub, log_in
from launch import ROOT, command, read_result, read_rows

from cleanba.agents import hub
from cleanba.checks import verify
from cleanba.checks.recompute import open_rerun, read_checkpoint, recompute
from cleanba.checks.verify import Segment, Verify, choose, next_segment_differs, reasons_to_differ
from cleanba.config import Experiment, Placement
from cleanba.runs.directory import differing_machines
from cleanba.runtime import chain

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
    assert ended.code == 0 and "wrote packed.tar.gz" in ended.out and "--trust" not in ended.out, ended
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
        ((next((tmp_path / "runs").glob("unpacked/*")),), "comes from elsewhere, and only the original directory"),
        ((run_dir, "--out", "packed.zip"), "must be a file that ends in .tar.gz"),
        (
            (run_dir, "--out", "/proc/packed.tar.gz"),
            "/proc/packed.tar.gz cannot be written: No such file or directory; choose another --out",
        ),
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
        assert next_segment_differs(rerun, last, params, actors, tmp_path) == ""
        older = read_checkpoint(rerun, last - 2, with_memory=False).older_params
        assert "would be collected with other parameters" in next_segment_differs(rerun, last, older, actors, tmp_path)
        if last % 8:  # environments do not start afresh there
            swapped = {0: actors[1], 1: actors[0]}
            assert "actor 0 would continue differently" in next_segment_differs(rerun, last, params, swapped, tmp_path)


@pytest.fixture(scope="module")
def other(tmp_path_factory) -> Path:
    """The same run with another seed.  It must not be changed."""
    run_dir = tmp_path_factory.mktemp("runs") / "other"
    assert command(*KINDS["ppo"], "--seed", "2", "--keep-checkpoints", "100", "--run-dir", run_dir).code == 0
    return run_dir


@pytest.fixture
def forged(run_of, tmp_path) -> Path:
    """A copy of a run, for changes."""
    return Path(shutil.copytree(run_of("ppo"), tmp_path / "forged"))


def test_a_finished_run_is_packed_only_with_its_last_parameters(forged, tmp_path):
    result = {name: value for name, value in read_result(forged).items() if name != "global_step"}
    (forged / "result.json").write_text(json.dumps(result))
    packed = tmp_path / "packed.tar.gz"
    ended = command("pack", forged, "--out", packed)
    assert ended.code == 0 and packed.exists(), ended
    packed.unlink()
    shutil.rmtree(forged / "checkpoints/20/arrays")
    (forged / "model.msgpack").unlink(missing_ok=True)
    ended = command("pack", forged, "--out", packed)
    assert ended.code == 1 and not packed.exists(), ended
    assert f"{forged} has finished with update 20, but its last parameters cannot be read; restore" in ended.err, ended


def test_actors_that_were_put_in_place_of_others_are_found(forged, other):
    assert command("verify", forged, "--from", "2", "--to", "4").code == 0
    for file in (other / "actors/00001").glob("*.actions"):
        shutil.copy(file, forged / "actors/00001")
    shutil.copy(other / "actors/00001/4.standing", forged / "actors/00001")
    ended = command("verify", forged, "--from", "2", "--to", "4")
    assert ended.code == 1
    assert "checkpoint 4 is not what was computed here: actor 1 would continue differently (its actions)" in ended.out


def rewrite(run_dir: Path, rows: list[dict]) -> None:
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def link_again(run_dir: Path, **made_by) -> None:
    """Rewrite all links of a run's chain with these details of its origin, as if somebody forged the whole log."""
    rows, before = read_rows(run_dir), ""
    experiment = json.loads((run_dir / "config.json").read_text())["experiment"]
    for row in rows:
        if "chain" in row:
            row |= {"made_by": row["made_by"] | made_by} if "made_by" in row else {}
            before = row["chain"] = chain.link(before, row["update"], row, experiment, row.get("made_by"))
    rewrite(run_dir, rows)


def test_a_digest_that_was_changed_breaks_the_chain(forged):
    rows = read_rows(forged)
    (changed,) = [row for row in rows if row["update"] == 6 and "params_digest" in row]
    changed["params_digest"] = rows[-1]["params_digest"]
    rewrite(forged, rows)
    ended = command("verify", forged)
    says = "the chain does not hold at update 6, after update 4: its digests, the link before it or the link itself was"
    assert ended.code == 1 and ended.out == f"{forged}: {says} changed\n", ended


def test_a_log_that_was_linked_again_with_other_digests_is_found_where_it_is_computed(forged):
    rows = read_rows(forged)
    (changed,) = [row for row in rows if row["update"] == 6 and "params_digest" in row]
    was, changed["params_digest"] = changed["params_digest"], f"sha256:{64 * '0'}"
    rewrite(forged, rows)
    link_again(forged)
    ended = command("verify", forged, "--from", "4", "--to", "8")
    there = f"params_digest is {was} here, and {changed['params_digest']} in the log"
    says = f"the bits differ after update 6, and are the same up to update 4: {there}"
    assert ended.code == 1 and f"updates 4 to 8: {says}\n" in ended.out, ended


@pytest.mark.parametrize(
    "changes, says",
    [
        (..., "result.json has other digests than the log has after its last update, 20"),
        (
            {"status": "interrupted", "params_digest": "sha256:0"},
            "result.json has other digests than the log has after ",
        ),
        ({"update": 4, "status": "failed"}, "result.json has other digests than the log has after update 4"),
        ({"update": 18}, "result.json names update 18 as the last, but the log ends with 20"),
        ({"params_digest": None}, "result.json has other digests than the log has after its last update, 20"),
        ({"status": "done"}, "result.json is damaged: its status is not one of finished, interrupted, failed"),
        (None, "result.json is damaged: its status is not one of finished, interrupted, failed"),
    ],
    ids=["another run's", "interrupted", "failed", "update", "no digest", "status", "cut off"],
)
def test_a_result_that_is_not_the_logs_is_found(changes, says, forged, other):
    result = forged / "result.json"
    if changes is ...:
        changes = {name: value for name, value in read_result(other).items() if name.endswith("_digest")}
    result.write_text(result.read_text()[:40] if changes is None else json.dumps(read_result(forged) | changes))
    ended = command("verify", forged)
    assert ended.code == 1 and ended.out.startswith(f"{forged}: {says}") and ended.out.count("\n") == 1, ended


def test_an_unfinished_runs_result_may_lack_digests_and_its_share_is_of_what_is_logged(forged):
    result = forged / "result.json"
    was = read_result(forged)
    for changes, says in (
        ({"learner_digest": None}, ""),
        ({"update": 21}, "result.json has digests of update 21, which the log does not have, so nothing confirms them"),
    ):
        result.write_text(json.dumps(was | {"status": "interrupted"} | changes))
        ended = command("verify", forged, "--from", "2", "--to", "4")
        assert ended.code == 0 and says in ended.out and ("nothing confirms" in ended.out) == bool(says), ended
        assert "updates 2 to 4 recomputed, 10.0% of the 20 updates logged so far: the same bits" in ended.out, ended


def test_a_damaged_checkpoint_is_not_counted_as_computed_and_one_that_the_run_removed_is_left_out(forged, monkeypatch):
    shutil.rmtree(forged / "checkpoints/8/arrays")
    shutil.rmtree(forged / "checkpoints/12")
    ended = command("verify", forged, "--segments", "9")
    assert ended.code == 1
    assert "9 of 9 segments" not in ended.out and "differ" not in ended.out, ended
    counted = "8 of 9 segments recomputed, 90.0% of the run: the same bits; checkpoints that cannot be read: 1\n"
    assert f"{counted}  checkpoint 8 of {forged} cannot be read: " in ended.out, ended
    listed = verify.choose

    def choosing(*args):
        found = listed(*args)
        shutil.rmtree(forged / "checkpoints/16")
        return found

    monkeypatch.setattr(verify, "choose", choosing)
    ended = command("verify", forged, "--from", "16", "--to", "18")
    assert ended.code == 3 and "has removed the checkpoints meanwhile; try again" in ended.err, ended
    assert "updates 16 to 18: left out, as the run has removed checkpoint 16 meanwhile" in ended.out, ended


def test_a_checkpoint_that_a_run_takes_while_it_is_verified_is_not_held_against_it(forged, monkeypatch):
    (forged / "result.json").unlink()
    rewrite(forged, [row for row in read_rows(forged) if row["update"] < 20])
    part = ("verify", forged, "--from", "16", "--to", "18")
    ended = command(*part)
    assert ended.code == 1 and ended.out == f"{forged}: checkpoint 20 has no digests in the log\n"
    newest, elsewhere, read = forged / "checkpoints" / "20", forged / "20", verify.read_rows
    newest.rename(elsewhere)

    def reading(run_dir):
        rows = read(run_dir)
        elsewhere.rename(newest)
        return rows

    monkeypatch.setattr(verify, "read_rows", reading)
    ended = command(*part)
    assert ended.code == 0 and newest.exists(), ended


@pytest.fixture
def ending(forged):
    """Take the end of a run away, and return a function that puts it back."""
    late, log = forged.with_name("late"), (forged / "metrics.jsonl").read_bytes()
    assert command("pack", forged, "--out", forged.with_name("whole.tar.gz")).code == 0
    with tarfile.open(forged.with_name("whole.tar.gz")) as archive:
        archive.extract("whole/model.msgpack", forged.parent, filter="data")
    late.mkdir()
    (forged.parent / "whole/model.msgpack").rename(late / "model.msgpack")
    (forged / "result.json").rename(late / "result.json")
    (forged / "checkpoints/20").rename(late / "20")
    rewrite(forged, [row for row in read_rows(forged) if row["update"] < 20])

    def end() -> None:
        (forged / "metrics.jsonl").write_bytes(log)
        (late / "20").rename(forged / "checkpoints/20")
        shutil.rmtree(forged / "checkpoints/18")  # as if it kept two
        for name in ("model.msgpack", "result.json"):
            (late / name).rename(forged / name)

    return end


def test_a_run_that_ends_while_it_is_verified_is_not_accused(forged, ending, monkeypatch):
    opened = verify.open_rerun

    def opening(*args):
        ending()
        return opened(*args)

    monkeypatch.setattr(verify, "open_rerun", opening)
    ended = command("verify", forged, "--from", "2", "--to", "4")
    assert ended.code == 0 and (forged / "result.json").exists(), ended


def test_the_archive_of_a_run_that_ends_meanwhile_does_not_contradict_itself(forged, ending, monkeypatch):
    loaded = hub.load_policy

    def loading(*args):
        policy = loaded(*args)
        ending()
        return policy

    monkeypatch.setattr(hub, "load_policy", loading)
    path = forged.with_name("packed.tar.gz")
    assert command("pack", forged, "--out", path).code == 0 and (forged / "result.json").exists()
    ended = command("verify", path, "--from", "0", "--to", "2")
    assert ended.code == 0, ended
    with tarfile.open(path) as archive:
        assert "packed/result.json" not in archive.getnames()


@pytest.mark.parametrize("update, words", [(20, ()), (4, ("--from", "4", "--to", "6"))])
def test_a_checkpoint_that_was_put_in_place_of_another_is_found(update, words, forged, other):
    """The newest one is always read, others where a segment begins."""
    place = forged / "checkpoints" / str(update)
    shutil.rmtree(place)
    shutil.copytree(other / "checkpoints" / str(update), place)
    ended = command("verify", forged, *words)
    says = f"checkpoint {update} is not the one that was logged: its params_digest is sha256:"
    assert ended.code == 1 and says in ended.out, ended


def test_an_archive_of_a_run_is_verified_and_what_there_is_not_is_refused(run_of, tmp_path):
    path = tmp_path / "run.tar.gz"
    with tarfile.open(path, "w:gz") as archive:
        archive.add(run_of("ppo"), "run")
    ended = command("verify", path, "--from", "2", "--to", "4")
    assert ended.code == 0 and "updates 2 to 4 recomputed, 10.0% of the run: the same bits" in ended.out, ended
    assert "steps/s" in ended.out and "return" not in ended.out, ended
    assert [*tmp_path.iterdir()] == [path]
    for words, says in (
        (("--from", "3"), "--from 3: no checkpoint of that update is kept; the closest are 2, 4, 0"),
        (("--from", "2", "--to", "5"), "--to 5: the log has no digests after that update"),
        (("--from", "2", "--seed", "1"), "use either --from/--to or --segments"),
    ):
        ended = command("verify", path, *words)
        assert ended.code == 2 and says in ended.err, ended


def test_where_bits_need_not_agree_nothing_is_computed_unless_that_is_wanted(forged):
    (made_by,) = [row["made_by"] for row in read_rows(forged) if "made_by" in row]
    here = made_by["packages"]["jax"]
    link_again(forged, packages=made_by["packages"] | {"jax": "0.1"}, device_kind="TPU v9")
    words = ("--from", "2", "--to", "4")
    for despite in ((), ("--despite", "packages")):
        ended = command("verify", forged, *words, *despite)
        assert ended.code == 3 and "computing" not in ended.out, ended
        assert f"other packages (jax 0.1 there, {here} here); processor (TPU v9, " in ended.err
        assert "add --despite packages processor to compute anyway" in ended.err
    ended = command("verify", forged, *words, "--despite", "packages", "processor")
    assert ended.code == 0 and "warning: " in ended.out and "the same bits" in ended.out, ended
    rewrite(forged, [{k: v for k, v in row.items() if k not in ("chain", "made_by")} for row in read_rows(forged)])
    ended = command("verify", forged, *words)
    assert ended.code == 3 and "has no chain of digests" in ended.err, ended


def test_as_many_segments_are_chosen_as_the_flags_say():
    there = [Segment(10 * i, 10 * i + 10, (10 * i + 3, 10 * i + 10)) for i in range(10)]
    linked = dict.fromkeys(range(101))
    chosen = lambda **flags: choose(there, linked, Verify("run", seed=1, **flags))
    assert len(chosen()) == 3 and len(chosen(segments=7)) == 7 and len(chosen(segments=99)) == 10
    assert len(chosen(fraction=0.35)) == 4 and len(chosen(fraction=0.01)) == 1 and chosen(fraction=1.0) == there
    cut = chosen(segments=4, fraction=0.12)  # three updates each: up to the first digest
    assert [one.updates for one in cut] == [3] * 4 and all(one.digests == (one.last,) for one in cut)


@pytest.mark.parametrize("how", ["flag", "environment"])
def test_a_run_that_need_not_repeat_itself_is_not_computed(how, forged, monkeypatch):
    if how == "flag":
        config = json.loads((forged / "config.json").read_text())
        config["experiment"]["deterministic"] = False
        (forged / "config.json").write_text(json.dumps(config))
        (made_by,) = [row["made_by"] for row in read_rows(forged) if "made_by" in row]
        link_again(forged, packages=made_by["packages"])
    else:
        monkeypatch.setattr(verify, "repeatable", lambda spec: False)
    ended = command("verify", forged, "--from", "2", "--to", "4")
    why = "trained with --no-deterministic" if how == "flag" else "does not follow its seed"
    assert ended.code == 3 and why in ended.err and "computing" not in ended.out, ended


def test_packages_that_compute_nothing_here_do_not_count():
    cpu = {"code": "a", "device_kind": "cpu", "processor": {}, "cpu_products": "cleanba", "packages": {"jax": "1"}}
    cuda = {"jax-cuda12-plugin": "1", "nvidia-cudnn-cu12": "9", "nvidia-cublas": "13.1"}
    differ = lambda there, here: reasons_to_differ(there, here, Experiment())
    with_cuda = cpu | {"packages": {"jax": "1"} | cuda}
    assert differ(cpu, with_cuda) == differ(with_cuda, cpu) == {}
    assert "jax 2 there" in differ(cpu | {"packages": {"jax": "2"} | cuda}, cpu)["packages"]
    gpu = with_cuda | {"device_kind": "H200"}
    assert set(differ(gpu, with_cuda)) == {"processor"}
    for name in cuda:
        changed = gpu | {"packages": gpu["packages"] | {name: "0"}}
        assert f"{name} 0 there" in differ(changed, gpu)["packages"]
    before = gpu | {"packages": {name: x for name, x in gpu["packages"].items() if name != "nvidia-cublas"}}
    assert differ(before, gpu) == {}  # it was not recorded
    assert differing_machines(cpu, with_cuda) == differing_machines(with_cuda, cpu) == []
    assert "nvidia-cublas" in differing_machines(gpu | {"packages": gpu["packages"] | {"nvidia-cublas": "0"}}, gpu)[0]


def test_a_run_that_was_uploaded_with_its_checkpoints_is_verified_from_there(forged, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with fake_hub() as hub:
        log_in(monkeypatch, hub, tmp_path / "cache")
        ended = command("push", forged, "--checkpoints")
        assert ended.code == 0 and "uploading 10 checkpoints and what they need" in ended.out, ended
        ended = command("verify", "hf://tester/Catch-v0-ppo-seed1", "--segments", "1", "--seed", "3")
    assert ended.code == 0 and "1 of 10 segments recomputed, 10.0% of the run: the same bits" in ended.out, ended


def test_a_run_that_came_to_its_target_is_whole_and_one_that_says_so_falsely_is_not(tmp_path):
    assert command(*KINDS["ppo"], "--target-return", "-1", "--run-dir", tmp_path / "run").code == 0
    updates = read_result(tmp_path / "run")["update"]
    assert updates < 20
    verified = command("verify", tmp_path / "run")
    assert verified.code == 0 and "the same bits" in verified.out, verified
    result = tmp_path / "run" / "result.json"
    known = json.loads(result.read_text())
    del known["target_return_reached"]  # as in an earlier version
    result.write_text(json.dumps(known))
    assert command("verify", tmp_path / "run", "--segments", "1").code == 0
    result.write_text(result.read_text().replace(f'"update": {updates}', '"update": 20'))
    refused = command("verify", tmp_path / "run")
    assert refused.code == 1
    assert f"the chain ends at update {updates}, but the run has finished with 20" in refused.out


def test_a_part_of_a_kept_run_is_computed_again(monkeypatch):
    """The same part each time; `make verify` draws one."""
    plain = verifiable.cleanba
    monkeypatch.setattr(verifiable, "cleanba", lambda *words: plain(*words, "--seed", 1))
    good, words = verifiable.verify("impala-CartPole-v1")
    assert good, words
    bits, _, others = words.partition(", with other ")
    if "packages (" in others or "processor (" in others:
        pytest.skip(f"the kept runs were trained with other {others}")
    assert bits.startswith("1 of ") and bits.endswith(" of the run: the same bits"), words
