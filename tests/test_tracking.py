"""Weights & Biases has one run for each run directory, with each row once, however often it was interrupted."""

import json
import shutil
import struct
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest
from launch import TINY, command, finish, python, read_rows

from cleanba.errors import Failure, UsageError
from cleanba.runtime.learner import Learner
from cleanba.runtime.tracking import Tracking, require_tracking

PLACE = ("project", "team", {"num_envs": 8})


def records(path: Path) -> list[bytes]:
    """What a .wandb file holds: a header of 7 bytes, then LevelDB's log format, in blocks of 32 KiB."""
    data, at, found, begun = path.read_bytes(), 7, [], b""
    while at + 7 <= len(data):
        left = 32768 - at % 32768
        if left < 7:
            at += left
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        if kind == 0:
            break
        part = data[at + 7 : at + 7 + length]
        begun = part if kind in (1, 2) else begun + part  # whole or first; middle or last
        if kind in (1, 4):
            found.append(begun)
        at += 7 + length
    return found


def read_when(path: Path, is_there: Callable[[list], bool]) -> list:
    """The records of a .wandb file.  W&B's own process writes them, on a busy machine a moment after the run's end."""
    from google.protobuf.message import DecodeError
    from wandb.proto import wandb_internal_pb2 as pb

    deadline, found = time.monotonic() + 60, []
    while not is_there(found) and time.monotonic() < deadline:
        time.sleep(0.1)
        with suppress(DecodeError):  # of a record that is not whole yet
            found = [pb.Record.FromString(data) for data in records(path)]
    return found


def history(run_dir: Path, last: int) -> tuple[str, list[int]]:
    """The id of the one offline run of a directory, and the updates of its rows, of which one is the last."""

    def updates(read: list) -> list[int]:
        rows = [{item.key or ".".join(item.nested_key): item.value_json for item in r.history.item} for r in read]
        return [json.loads(items["update"]) for items in rows if "update" in items]

    (path,) = run_dir.glob("wandb/offline-run-*/run-*.wandb")
    return path.stem.removeprefix("run-"), updates(read_when(path, lambda read: last in updates(read)))


def test_an_offline_run_that_goes_on_has_each_row_once(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    run_dir = tmp_path / "run"
    words = ("ppo", *TINY, "--env-epoch", "3", "--checkpoint-frequency", "3", "--track", "--run-dir", run_dir)
    assert command(*words).code == 0
    first = history(run_dir, 5)
    assert first[1] == [1, 2, 3, 4, 5]
    shutil.rmtree(run_dir / "checkpoints" / "5")  # as if it had been killed before it ended
    (run_dir / "result.json").unlink()
    ended = command(*words)
    assert ended.code == 0 and "resuming after update 3" in ended.out
    assert history(run_dir, 5) == first
    assert [row["update"] for row in read_rows(run_dir)] == first[1]


def test_an_evaluation_is_drawn_over_the_steps_of_its_version(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    tracking = Tracking(tmp_path, *PLACE)
    for update in range(1, 6):
        tracking.write(update, 8 * update, row(update))
    tracking.write(2, 16, {f"eval/{name}": 7.0 for name in ("episodic_return", "episodic_length", "seconds")})
    assert tracking.close(failed=False, seconds=60)
    (path,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    read = read_when(path, lambda read: any(record.HasField("exit") for record in read))
    metrics = [record.metric for record in read if record.HasField("metric")]
    over = {(metric.name or metric.glob_name): metric.step_metric for metric in metrics}
    assert {name: over[f"eval/{name}"] for name in ("episodic_return", "episodic_length", "seconds")} == {
        name: "eval/global_step" for name in ("episodic_return", "episodic_length", "seconds")
    }
    assert over["eval/global_step"] == "" and "eval/*" not in over and over["*"] == "global_step"


class Service:
    """Stands in for the module `wandb`, online, with a server that keeps rows by step."""

    def __init__(self, api_key: str | None = "key"):
        self.settings = SimpleNamespace(mode="online", api_key=api_key, identity_token_file=None, base_url="https://x")
        self.calls: list[dict] = []
        self.rows: dict[int, dict] = {}
        self.sent: list[int] = []
        self.errors = SimpleNamespace(Error=ConnectionError)
        self.down = False

    def setup(self):
        return SimpleNamespace(settings=self.settings)

    def init(self, **words):
        if self.down:
            raise ConnectionError("nobody\nanswers")
        self.calls.append(words)
        self.starting_step = max(self.rows, default=-1) + 1
        return self

    def define_metric(self, *_, **__):
        pass

    def log(self, values, step):
        self.sent.append(step)
        self.rows.setdefault(step, {}).update(values)

    def Settings(self, project):
        if "/" in project:
            raise ConnectionError("no slashes")

    def finish(self, exit_code=0):
        self.ended = exit_code


@pytest.fixture
def service(monkeypatch):
    stand_in = Service()
    monkeypatch.setitem(sys.modules, "wandb", stand_in)
    return stand_in


def row(update: int) -> dict:
    return {"update": update, "global_step": 8 * update, "charts/SPS": 1.0, "params_digest": "x"}


def test_online_it_is_one_run_which_is_sent_nothing_twice(service, tmp_path):
    rows = [row(update) for update in range(1, 9)]
    tracking = Tracking(tmp_path, *PLACE)
    for r in rows[:5]:
        tracking.write(r["update"], r["global_step"], r)
    del service.rows[5]  # the last one had not been sent when the run was killed
    tracking = Tracking(tmp_path, *PLACE, history=rows[:3])  # on from a checkpoint
    for r in rows[3:]:
        tracking.write(r["update"], r["global_step"], r)
    first, second = service.calls
    assert (first["resume"], second["resume"]) == ("allow", "must") and first["id"] == second["id"]
    assert service.sent == [1, 2, 3, 4, 5, 5, 6, 7, 8]
    assert service.rows[7] == {"charts/SPS": 1.0, "global_step": 56, "update": 7}


def test_an_evaluation_that_is_played_again_is_sent_before_training_has_passed_what_the_server_has(service, tmp_path):
    rows = [row(update) for update in range(1, 6)]
    tracking = Tracking(tmp_path, *PLACE)
    for r in rows:
        tracking.write(r["update"], r["global_step"], r)
    tracking = Tracking(tmp_path, *PLACE, history=rows[:3])  # on from a checkpoint
    tracking.write(2, 16, {"eval/episodic_return": 7.0})
    tracking.write(6, 48, row(6))
    sent = service.rows[6]
    assert (sent["eval/episodic_return"], sent["eval/global_step"], sent["global_step"]) == (7.0, 16, 48)
    assert 2 not in service.sent[5:]


def test_an_evaluation_that_is_played_again_takes_no_place_of_a_row(service, tmp_path):
    rows = [row(update) for update in range(1, 8)]
    tracking = Tracking(tmp_path, *PLACE)
    for r in rows[:5]:
        tracking.write(r["update"], r["global_step"], r)
    tracking = Tracking(tmp_path, *PLACE, history=rows[:3])  # on from a checkpoint
    tracking.write(4, 32, {"eval/episodic_return": 7.0})  # and interrupted again
    tracking = Tracking(tmp_path, *PLACE, history=rows[:4])
    for r in rows[4:]:
        tracking.write(r["update"], r["global_step"], r)
    assert sorted(service.rows) == list(range(1, 8)) and all("charts/SPS" in sent for sent in service.rows.values())


@pytest.mark.parametrize("failed, steps", [(False, [1, 2, 3, 4]), (True, [1, 2, 3])])
def test_an_evaluation_after_the_last_row_is_sent_when_the_run_ends(service, failed, steps, tmp_path):
    rows = [row(update) for update in range(1, 4)]
    tracking = Tracking(tmp_path, *PLACE)
    for r in rows:
        tracking.write(r["update"], r["global_step"], r)
    tracking = Tracking(tmp_path, *PLACE, history=rows)  # interrupted in the evaluation of the last version
    tracking.write(3, 24, {"eval/episodic_return": 7.0})
    assert tracking.close(failed, seconds=60) and sorted(service.rows) == steps
    assert failed or service.rows[4] == {"eval/episodic_return": 7.0, "eval/global_step": 24, "eval/update": 3}


def test_a_service_that_ends_costs_its_rows_and_not_the_run(service, tmp_path, monkeypatch, capfd):
    tracking = Tracking(tmp_path, *PLACE)
    assert service.calls[0]["reinit"] == "create_new"  # the program's own run stays as it is
    monkeypatch.setattr(service, "log", lambda *_, **__: (_ for _ in ()).throw(BrokenPipeError("it is gone")))
    for update in (1, 2):
        tracking.write(update, 8 * update, row(update))
    said = capfd.readouterr().err
    assert said.count("takes no more rows (it is gone); metrics.jsonl has them all") == 1
    assert tracking.close(failed=True, seconds=5) and service.ended == 1
    monkeypatch.setattr(service, "finish", lambda exit_code: time.sleep(60))
    began = time.monotonic()
    assert not tracking.close(failed=False, seconds=0.1) and time.monotonic() - began < 30
    assert "has not taken all rows within 0.1 s; `wandb sync`" in capfd.readouterr().err


def test_a_run_has_its_result_before_the_last_rows_are_sent(service, tmp_path, monkeypatch):
    there = []
    run = tmp_path / "run"
    monkeypatch.setattr(service, "finish", lambda exit_code: there.append((run / "result.json").exists()))
    ended = command("ppo", *TINY, "--track", "--run-dir", run)
    assert ended.code == 0 and there == [True], ended


@pytest.mark.parametrize("place", ["cleanba.launch.run_training", "cleanba.launch.RunWriter.finish"])
def test_a_run_that_an_exception_leaves_is_ended_there(service, place, tmp_path, monkeypatch):
    def interrupted(*_, **__):
        raise KeyboardInterrupt  # as the second Ctrl-C in a notebook does

    monkeypatch.setattr(place, interrupted)
    assert command("ppo", *TINY, "--track", "--run-dir", tmp_path / "run").code == 130
    assert service.ended == 1


def test_how_to_go_on_is_said_before_the_last_rows_are_sent(service, tmp_path, monkeypatch):
    printed = []
    monkeypatch.setattr(service, "finish", lambda exit_code: printed.append(sys.stdout.getvalue()))
    monkeypatch.setattr(Learner, "update", lambda *_: (_ for _ in ()).throw(Failure("it failed")))
    ended = command("ppo", *TINY, "--track", "--run-dir", tmp_path / "run")
    assert ended.code == 1 and "starts again from the beginning" in printed[0], ended


def test_a_project_that_cannot_be_is_refused(service, tmp_path):
    ended = command("ppo", *TINY, "--track", "--wandb-project-name", "a/b", "--run-dir", tmp_path / "run")
    assert ended.code == 2 and "W&B refuses its settings (no slashes); correct --wandb-project-name" in ended.err


def test_what_the_server_lacks_of_a_log_is_sent(service, tmp_path):
    Tracking(tmp_path, *PLACE).write(1, 8, row(1))
    service.rows.clear()
    tracking = Tracking(tmp_path, "another project", None, {}, history=[row(1), row(2)])
    tracking.write(3, 24, row(3))
    assert service.calls[1]["resume"] == "allow" and sorted(service.rows) == [1, 2, 3]


def test_a_service_that_does_not_answer_is_told_in_a_sentence(service, tmp_path):
    service.down = True
    with pytest.raises(Failure, match="nobody answers.*WANDB_MODE=offline"):
        Tracking(tmp_path, *PLACE)


def test_without_a_key_tracking_is_refused_before_anything_is_written(tmp_path):
    nobody = {"WANDB_MODE": "online", "WANDB_API_KEY": "", "HOME": str(tmp_path), "NETRC": ""}
    ended = finish(python("-m", "cleanba", "ppo", *TINY, "--track", "--run-dir", tmp_path / "run", **nobody))
    assert ended.code == 2 and ended.err.startswith("cleanba: --track needs a key") and ended.err.count("\n") == 1
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "where, found",
    [
        ({"WANDB_API_KEY": "x"}, True),
        ({"NETRC": "machine x login user password y"}, True),
        ({"NETRC": "machine api.wandb.ai login user password y"}, True),
        ({"NETRC": "machine elsewhere login user password y"}, False),
        ({"NETRC": "not a netrc"}, False),
    ],
)
def test_keys_are_looked_for_where_they_are_kept(service, where, found, tmp_path, monkeypatch):
    service.settings.api_key = None
    for name in ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in where.items():
        if name == "NETRC":
            (tmp_path / "netrc").write_text(value)
            value = str(tmp_path / "netrc")
        monkeypatch.setenv(name, value)
    if found:
        require_tracking("project")
    else:
        with pytest.raises(UsageError, match="needs a key"):
            require_tracking("project")


def test_without_the_package_tracking_is_refused(monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(UsageError, match="--track needs the module wandb, .* extra `track`"):
        require_tracking("project")
