"""Upload to a Hub on this machine, and download: what is uploaded, what the card says, and what a failure leaves."""

import json
import os
import re
import shutil
import sys
from pathlib import Path

import huggingface_hub
import huggingface_hub.constants
import pytest
import yaml
from fake_hub import fake_hub, log_in
from launch import TINY, command, read_result

import cleanba
from cleanba.agents.hub import Model, card, repository_name
from cleanba.runs.remote import DOWNLOADS, download
from cleanba.trust import mark_downloaded

EXPERIMENT = {"algorithm": "ppo", "env_id": "Catch-v0", "seed": 7, "num_envs": 8, "env_options": []}
EXPERIMENT |= {"cpu_kernels": "on"}
DIGEST = "sha256:1234"


@pytest.fixture
def server(monkeypatch, tmp_path):
    """The Hub, with somebody logged in."""
    with fake_hub() as running:
        log_in(monkeypatch, running, tmp_path / "cache")
        monkeypatch.chdir(tmp_path)
        yield running


def write_run(folder: Path, **result) -> Path:
    """A finished run with its parameters in model.msgpack, as --save-model leaves it."""
    (folder / "videos").mkdir(parents=True)
    config = {
        "experiment": EXPERIMENT,
        "placement": {"actor_device_ids": [0], "coordinator_address": "secret-host:1234"},
        "run": {"exp_name": "my ppo", "run_dir": "/home/me/secret", "wandb_entity": "secret-team"},
        "packages": {"jax": "0.10.2"},
        "origin": {"network": "environment", "gamma": "run /home/me/secret", "seed": "typed"},
        "slurm": {"nodes": "secret-node"},
    }
    (folder / "config.json").write_text(json.dumps(config))
    finished = {"status": "finished", "update": 5, "global_step": 320, "episodic_return": 0.5, "params_digest": DIGEST}
    (folder / "result.json").write_text(json.dumps(finished | result))
    (folder / "metrics.jsonl").write_text('{"update": 1, "global_step": 64, "seconds": 1.0}\n')
    (folder / "model.msgpack").write_bytes(b"parameters" * 1000)
    return folder


def evaluate(run: Path, digest: str = DIGEST) -> None:
    evaluation = {"mean": 0.75, "std": 0.25, "episodes": 30, "seed": 1, "params_digest": digest}
    (run / "eval.json").write_text(json.dumps(evaluation))


def metadata(card: bytes) -> tuple[dict, str]:
    _, head, text = card.decode().split("---\n", 2)
    return yaml.safe_load(head), text


def test_no_test_knows_the_account_of_whoever_runs_it():
    assert huggingface_hub.get_token() is None
    home = Path(huggingface_hub.constants.HF_HOME)
    assert home.name.startswith("cleanba-tests-") and os.environ["HF_HOME"] == str(home)


def test_everything_is_uploaded_and_named_after_the_run(server, tmp_path):
    run = write_run(tmp_path / "run")
    evaluate(run)
    for name in ("update-3-seed-1.mp4", ".update-5-seed-1.tmp.mp4"):  # of another policy, and half written
        (run / "videos" / name).write_bytes(b"another")
    (run / "videos/update-5-seed-1.mp4").write_bytes(b"film")
    os.utime(run / "videos/update-5-seed-1.mp4", (1, 1))
    ended = command("push", run)
    assert (ended.code, ended.err) == (0, "")
    assert f"{server.address}/tester/Catch-v0-my-ppo-seed7" in ended.out
    files = server.repos["tester/Catch-v0-my-ppo-seed7"]
    names = {"config.json", "model.msgpack", "result.json", "eval.json", "metrics.jsonl", "replay.mp4", "README.md"}
    assert set(files) == names
    for name in ("model.msgpack", "result.json", "eval.json", "metrics.jsonl"):
        assert files[name] == (run / name).read_bytes()
    assert files["replay.mp4"] == b"film" and not server.private["tester/Catch-v0-my-ppo-seed7"]


def test_no_names_of_folders_hosts_and_accounts_are_uploaded(server, tmp_path):
    command("push", write_run(tmp_path / "run"), "--repo", "name")
    files = server.repos["tester/name"]
    assert json.loads(files["config.json"])["experiment"] == EXPERIMENT
    assert json.loads(files["config.json"])["packages"] == {"jax": "0.10.2"}
    assert json.loads(files["config.json"])["origin"] == {"network": "environment"}
    assert not [name for name, content in files.items() if b"secret" in content]


def test_the_error_of_a_failed_run_is_not_uploaded(server, tmp_path):
    error = "Failure: /home/me/secret/metrics.jsonl cannot be written"
    command("push", write_run(tmp_path / "run", error=error), "--repo", "name")
    files = server.repos["tester/name"]
    assert json.loads(files["result.json"])["params_digest"] == DIGEST
    assert not [name for name, content in files.items() if b"secret" in content or b"cannot be written" in content]


def test_the_model_card_describes_the_run(server, tmp_path):
    run = write_run(tmp_path / "run")
    evaluate(run)
    command("push", run, "--hf-entity", "team", "--repo", "name", "--private")
    assert server.private["team/name"]
    head, text = metadata(server.repos["team/name"]["README.md"])
    assert head["library_name"] == "cleanba" and {"ppo", "Catch-v0", "reinforcement-learning"} <= set(head["tags"])
    (model,) = head["model-index"]
    (result,) = model["results"]
    assert result["dataset"]["name"] == "Catch-v0"
    assert result["metrics"][0]["type"] == "mean_reward" and result["metrics"][0]["value"] == "0.75 +/- 0.25"
    assert "cleanba eval hf://team/name" in text and "| `num_envs` | `8` |" in text and DIGEST in text
    assert "after update 5 and 320 environment steps" in text and "replay.mp4" not in text


def test_an_evaluation_of_other_parameters_is_not_shown(server, tmp_path):
    run = write_run(tmp_path / "run")
    evaluate(run, digest="sha256:other")
    (run / "evaluations").mkdir()
    (run / "evaluations/update-5-seed-2.json").write_text('{"mean": 0.')  # a damaged one
    command("push", run, "--repo", "name")
    head, text = metadata(server.repos["tester/name"]["README.md"])
    (metric,) = head["model-index"][0]["results"][0]["metrics"]
    assert metric["type"].startswith("training_return") and metric["value"] == "0.50"
    assert "Not evaluated apart from training" in text and "eval.json" not in server.repos["tester/name"]
    # An earlier one, which the last did not overwrite.
    (run / "evaluations/update-5-seed-1.json").write_text(
        json.dumps(json.loads((run / "eval.json").read_text()) | {"params_digest": DIGEST})
    )
    command("push", run, "--repo", "name")
    head, _ = metadata(server.repos["tester/name"]["README.md"])
    assert head["model-index"][0]["results"][0]["metrics"][0]["type"] == "mean_reward"
    assert json.loads(server.repos["tester/name"]["eval.json"])["params_digest"] == DIGEST


def test_a_second_upload_replaces_the_first(server, tmp_path):
    run = write_run(tmp_path / "run")
    evaluate(run)
    log = lambda link: (run / "metrics.jsonl").write_text(json.dumps({"update": 5, "chain": link}))
    log("one")
    (run / "checkpoints/5").mkdir(parents=True)
    (run / "checkpoints/5/data").write_bytes(b"of this run")
    assert command("push", run, "--repo", "name", "--checkpoints").code == 0
    there = server.repos["tester/name"]
    assert {"eval.json", "checkpoints/5/data"} <= set(there)
    (run / "eval.json").unlink()
    assert command("push", run, "--repo", "name").code == 0
    assert "eval.json" not in there and there["checkpoints/5/data"] == b"of this run", "the run is the same"
    log("another")
    (run / "model.msgpack").write_bytes(b"others")
    assert command("push", run, "--repo", "name").code == 0
    assert there["model.msgpack"] == b"others"
    assert "checkpoints/5/data" not in there, "checkpoints of another run under the same name"


def test_long_names_keep_their_seed_and_what_tells_them_apart(tmp_path):
    run, names = write_run(tmp_path / "run"), set()
    for exp_name in ("ppo" * 40 + "a", "ppo" * 40 + "b", "ppo"):
        (run / "config.json").write_text(json.dumps({"experiment": EXPERIMENT, "run": {"exp_name": exp_name}}))
        names |= {repository_name(run, EXPERIMENT | {"seed": seed}) for seed in (1, 2, 30)}
    assert len(names) == 9 and max(map(len, names)) <= 96 and "Catch-v0-ppo-seed30" in names
    assert all(re.search(r"-seed(1|2|30)$", name) for name in names)


def test_the_card_of_a_run_with_code_of_its_own_says_what_it_needs(tmp_path):
    run = write_run(tmp_path / "run")
    model = Model(None, None, None, {})
    text = card(run, "a/b", model, film=False)
    assert "--trust" not in text and "--experiment" in text
    own = EXPERIMENT | {"algorithm": "mine:RECIPE", "init_from": DIGEST}
    (run / "config.json").write_text(json.dumps({"experiment": own}))
    text = card(run, "a/b", model, film=False)
    assert "hf://a/b --episodes 30 --video --trust-remote-code\n" in text and "You need the modules" in text
    assert "--experiment" not in text  # the parameters that it began with are not uploaded


def test_a_failed_upload_says_how_to_repeat_it(server, tmp_path):
    run = write_run(tmp_path / "a run")
    server.broken = True
    ended = command("push", run, "--hf-entity", "team", "--private")
    assert ended.code == 1 and "Traceback" not in ended.err
    assert f"cleanba push '{run}' --hf-entity team --private`" in ended.err and "disk of the hub" in ended.err


def test_wrong_use_is_one_sentence(server, tmp_path, monkeypatch):
    run = write_run(tmp_path / "run")
    assert command("push", tmp_path).code == 2
    mark_downloaded(write_run(tmp_path / "another"), "hf://someone/pong")
    refused = command("push", tmp_path / "another")
    assert refused.code == 2 and "only the original directory of a run can be uploaded" in refused.err
    bad = command("push", run, "--repo", "a/b c")
    assert bad.code == 2 and "is not a valid repository name" in bad.err
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr(huggingface_hub.constants, "HF_TOKEN_PATH", str(tmp_path / "none"))
    ended = command("push", run)
    assert ended.code == 2 and "hf auth login" in ended.err
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    ended = command("push", run)
    assert (
        ended.code == 2 and "needs the module huggingface_hub" in ended.err and "pip install -e '.[hub]'" in ended.err
    )
    assert server.repos == {}


@pytest.mark.parametrize("reference", ["hf://", "hf://user", "hf://a/b/c", "hf://../etc", "hf://user/.."])
def test_invalid_references_are_refused(server, reference):
    with pytest.raises(Exception, match="names no repository"):
        download(reference)


def test_missing_repositories_and_repositories_without_a_model_are_refused(server):
    with pytest.raises(Exception, match="there is no hf://tester/absent"):
        download("hf://tester/absent")
    server.repos["tester/other"] = {"config.json": b"{}"}
    with pytest.raises(Exception, match="it has no model.msgpack"):
        download("hf://tester/other")


def test_a_download_follows_the_upload(server, tmp_path):
    run = write_run(tmp_path / "run")
    evaluate(run)
    command("push", run, "--repo", "name")
    folder = download("hf://tester/name")
    assert (folder / "model.msgpack").read_bytes() == (run / "model.msgpack").read_bytes()
    assert not (folder / "eval.json").exists()  # that is somebody else's
    (run / "model.msgpack").write_bytes(b"others")
    command("push", run, "--repo", "name")
    assert download("hf://tester/name") == folder
    assert (folder / "model.msgpack").read_bytes() == b"others"


def test_a_run_uploads_itself_and_is_played_from_there(server, tmp_path):
    """Trains, uploads, downloads and plays: the same episodes as those of the run itself."""
    server.broken = True
    words = ("ppo", *TINY, "--run-dir", tmp_path / "run", "--upload-model", "--hf-entity", "team")
    ended = command(*words)
    assert ended.code == 1 and f"cleanba push {tmp_path / 'run'} --hf-entity team`" in ended.err
    assert read_result(tmp_path / "run")["status"] == "finished"
    spec = cleanba.Run(tmp_path / "run").spec
    with pytest.raises(cleanba.Failure, match="cleanba push .* --hf-entity team"):
        cleanba.train(spec, tmp_path / "run", progress=False, upload_model=True, hf_entity="team")
    again = command(*words)  # the upload is still wanted
    assert again.code == 1 and "nothing to do" in again.out and "disk of the hub" in again.err

    server.broken = False
    again = command(*words)
    assert again.code == 0 and "uploaded: " in again.out and "team/Catch-v0-ppo-seed1" in server.repos
    server.broken = True
    assert command(*words).code == 0, "it is uploaded once"

    server.broken = False
    (tmp_path / "run/model.msgpack").unlink()  # so it comes from the newest checkpoint
    assert command("push", tmp_path / "run", "--hf-entity", "team", "--repo", "catch").code == 0
    here = command("eval", tmp_path / "run", "--episodes", "4")
    there = command("eval", "hf://team/catch", "--episodes", "4")
    assert (here.code, there.code) == (0, 0), there.err
    mine = json.loads((tmp_path / "run/eval.json").read_text())
    played = json.loads((DOWNLOADS / "team/catch/eval.json").read_text())
    assert (
        played["returns"] == mine["returns"]
        and played["params_digest"] == read_result(tmp_path / "run")["params_digest"]
    )
    # `cleanba verify` downloads checkpoints, which may be older than the model.
    shutil.copytree(tmp_path / "run/checkpoints", DOWNLOADS / "team/catch/checkpoints")
    trusted = command("eval", "hf://team/catch", "--episodes", "1", "--trust-remote-code")
    assert trusted.code == 0 and json.loads((DOWNLOADS / "team/catch/eval.json").read_text())["update"] is None


def test_a_missing_login_is_reported_before_training(tmp_path, monkeypatch):
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setattr(huggingface_hub.constants, "HF_TOKEN_PATH", str(tmp_path / "none"))
    ended = command("ppo", *TINY, "--run-dir", tmp_path / "run", "--upload-model")
    assert ended.code == 2 and "hf auth login" in ended.err and not (tmp_path / "run").exists()
