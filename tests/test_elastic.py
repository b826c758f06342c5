"""ELASTIC=1: a job goes on when a node is lost, and takes it back, to the same bits; on a real Slurm (cluster.py)."""

import re
import signal

import pytest
from cluster import Cluster, wait_for, why_not
from launch import ROOT, command, read_result
from test_slurm import log, own_templates, submit

from cleanba.runtime.checkpoint import updates_kept

# Some 30 updates while it is slow, the rest in a moment.
FLAGS = ["--env-id", "gated:Gated-v0", "--num-envs", "8", "--num-actors", "2", "--num-shards", "2", "--num-steps", "8"]
FLAGS += ["--hiddens", "8", "--num-minibatches", "1", "--update-epochs", "1", "--total-timesteps", "12800"]
FLAGS += ["--env-workers", "0", "--checkpoint-frequency", "10", "--log-frequency", "10"]


def quick(folder) -> None:
    """Templates that look for nodes more often than users want, and end what is left of a start sooner."""
    script = folder / "slurm" / "elastic.sh"
    text = script.read_text().replace("LOOK_SECONDS=15 ", "LOOK_SECONDS=1 ")
    script.write_text(text.replace("NOTICE_SECONDS=15 ", "NOTICE_SECONDS=5 "))


@pytest.mark.slow
def test_a_job_outlives_the_loss_of_a_node_and_takes_it_back(tmp_path, monkeypatch):
    if reason := why_not():
        pytest.skip(reason)
    gate = tmp_path / "gate"
    monkeypatch.setenv("CLEANBA_GATE", str(gate))
    monkeypatch.syspath_prepend(ROOT / "tests")
    here = own_templates(tmp_path)
    quick(here)
    with Cluster(tmp_path, 2) as cluster:
        cluster.env |= {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}", "CLEANBA_CPU": "1", "ELASTIC": "1"}
        job = submit(cluster, here, "cpu", "ppo", *FLAGS, "--run-dir", "run")
        starts = lambda: re.findall(r"start \d+, on (\d) of 2", log(here, job))
        saved_since = lambda update: max(updates_kept(here / "run"), default=0) > update
        wait_for(lambda: saved_since(0), 300, "checkpoint")
        lost = cluster.nodes[1]
        cluster.signal_node(lost, signal.SIGKILL)
        wait_for(lambda: starts() == ["2", "1"], 180, f"start without {lost}: {log(here, job)}")
        reached = max(updates_kept(here / "run"))
        cluster.start_node(lost)
        wait_for(lambda: saved_since(reached), 180, f"checkpoint without {lost}: {log(here, job)}")
        wait_for(lambda: starts() == ["2", "1", "2"], 180, f"start with {lost}: {log(here, job)}")
        gate.touch()
        assert cluster.wait(job) == "COMPLETED", log(here, job)
    assert "there are more nodes (in this allocation)" in log(here, job)
    assert command("ppo", *FLAGS, "--run-dir", tmp_path / "undisturbed").code == 0
    for digest in ("params_digest", "learner_digest"):
        assert read_result(here / "run")[digest] == read_result(tmp_path / "undisturbed")[digest]


def test_how_many_processes_fit_an_experiment(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    flags = ["--env-id", "Catch-v0", "--num-envs", "24", "--num-actors", "4", "--num-shards", "4"]
    fit = lambda *words: command("slurm", "fit", *words)
    assert fit("8", "ppo", *flags, "--run-dir", "a run").out == "1 2 4\na run\n"
    assert fit("3", "ppo", *flags, "--learner-device-ids", "0", "1").out.startswith("1 2\nruns/Catch-v0__ppo__1__")
    refused = fit("8", "ppo", *flags, "--learner-device-ids", *"01234")
    assert refused.code == 2 and "cannot occupy 5 learner devices" in refused.err
    for words in ((), ("0", "ppo"), ("x",), ("2",), ("2", "eval")):
        refused = fit(*words)
        assert refused.code == 2 and "usage: cleanba slurm fit" in refused.err, words
    assert "usage" in fit("--help").out
