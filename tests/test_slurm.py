"""The templates of slurm/ and `cleanba sweep --slurm`, on a real Slurm with two nodes (tests/cluster.py)."""

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from unittest import mock

import pytest
from cluster import Cluster, wait_for, why_not
from compiled import ENVIRONMENT
from launch import ROOT, TINY, command, read_result, read_rows

from cleanba import errors
from cleanba.algorithms.ppo import PPO
from cleanba.config import Run
from cleanba.runs.directory import default_run_dir
from cleanba.runtime.hardware import slurm_job
from cleanba.sweeps.slurm import bash_word, job_script

TEMPLATES = ("one-gpu", "one-node", "tasks-per-node", "nodes", "cpu")
# Fits 1 to 6 learners in one or two processes.
SHORT = (*TINY, "--num-envs", "24", "--num-shards", "6", "--num-minibatches", "1", "--total-timesteps", "1920")
# A minute of training until CLEANBA_GATE exists, then a moment, with many checkpoints on the way.
LONG = (*TINY, "--env-id", "gated:Gated-v0", "--env-workers", "0", "--num-shards", "2", "--num-minibatches", "1",
        "--total-timesteps", "12800", "--checkpoint-frequency", "10", "--log-frequency", "10")  # fmt: skip
SWEPT = [w for flag, w in zip(SHORT[::2], SHORT[1::2], strict=True) if flag != "--env-id" for w in (flag, w)]


def own_templates(folder: Path) -> Path:
    """slurm/ as a user would have it after setting it up for a small cluster."""
    assert command("slurm", folder / "slurm").code == 0
    settings = folder / "slurm" / "settings.sh"
    text = settings.read_text().replace("\nCPUS= ", "\nCPUS=1 ").replace("\nPARTITION= ", "\nPARTITION=all ")
    text = text.replace("CLEANBA=(python -m cleanba)", f"CLEANBA=({sys.executable} -m cleanba)")
    assert sum(a != b for a, b in zip(text.splitlines(), settings.read_text().splitlines(), strict=True)) == 3
    # With UNCHECKED, slurm/submit checks nothing.  A job would inherit that, but has a number.
    settings.write_text(text + '[ -z "${UNCHECKED:-}" ] || [ -n "${SLURM_JOB_ID:-}" ] || CLEANBA=(true)\n')
    return folder


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    reason = why_not()
    if reason:
        pytest.skip(reason)
    with Cluster(tmp_path_factory.mktemp("cluster")) as running:
        running.env |= {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}", "CLEANBA_CPU": "1"}
        yield running


@pytest.fixture
def here(tmp_path):
    return own_templates(tmp_path)


def submit(cluster: Cluster, here: Path, template: str, *words: str) -> str:
    """Submit a template by slurm/submit -> the job's number.  Only one-node is checked first, which takes long."""
    unchecked = "" if template == "one-node" else "1"
    done = cluster.run("slurm/submit", "--parsable", f"slurm/{template}.sh", *words, cwd=here, UNCHECKED=unchecked)
    assert done.returncode == 0, done
    return done.stdout.strip()


def log(here: Path, job: str) -> str:
    return (here / f"slurm-{job}.out").read_text()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The digests of the short and the long experiment, computed in one process on one device."""
    folder = tmp_path_factory.mktemp("undisturbed")
    with mock.patch.dict(os.environ, CLEANBA_GATE=str(folder)):
        for name, flags in (("short", SHORT), ("long", LONG)):
            assert command("ppo", *flags, "--run-dir", folder / name).code == 0
    return {name: read_result(folder / name)["params_digest"] for name in ("short", "long")}


@pytest.mark.slow
def test_every_template_trains_the_same_bits_as_one_process_on_one_device(cluster, here, undisturbed):
    jobs = {t: submit(cluster, here, t, "ppo", *SHORT, "--run-dir", t) for t in TEMPLATES}
    for template, job in jobs.items():
        assert cluster.wait(job) == "COMPLETED", log(here, job)
        config = json.loads((here / template / "config.json").read_text())
        assert read_result(here / template)["params_digest"] == undisturbed["short"], template
        assert config["slurm"]["job_id"] == job and config["slurm"]["restarts"] == 0
        processes = 2 if template in ("tasks-per-node", "nodes", "cpu") else 1
        learners = {"one-node": [1, 2, 3], "nodes": [1, 2, 3], "tasks-per-node": [1]}.get(template, [0])
        assert config["num_processes"] == processes
        assert config["placement"]["learner_device_ids"] == learners
        nodes = cluster.nodes if template in ("nodes", "cpu") else cluster.nodes[:1]
        assert config["slurm"]["nodes"] == ",".join(nodes)


def saved(run_dir: Path) -> bool:
    return (run_dir / "metrics.jsonl").exists() and any("params_digest" in row for row in read_rows(run_dir))


@pytest.mark.slow
def test_a_job_that_was_requeued_or_signalled_ends_in_the_same_bits(cluster, here, undisturbed, monkeypatch):
    """One is requeued by hand; the other, on two nodes, receives SIGUSR1, as before a time limit, and is requeued."""
    gate = here / "gate"
    monkeypatch.setitem(cluster.env, "CLEANBA_GATE", str(gate))

    def disturb(job: str, run_dir: Path, *cut: str) -> None:
        wait_for(lambda: saved(run_dir), 1200, "checkpoint")
        assert cluster.run(*cut, job).returncode == 0
        wait_for(lambda: cluster.state(job).get("JobState") == "PENDING", 1200, f"requeued job: {cluster.state(job)}")
        time.sleep(2)  # within a second of its end, a node would not take the job again
        cluster.run("scontrol", "update", f"JobId={job}", "StartTime=now")  # Slurm would wait for two minutes

    by_hand = submit(cluster, here, "one-gpu", "ppo", *LONG)  # in its default directory
    run_dir = {by_hand: here / "runs" / f"gated-Gated-v0__ppo__1__job{by_hand}"}
    disturb(by_hand, run_dir[by_hand], "scontrol", "requeue")
    signalled = submit(cluster, here, "cpu", "ppo", *LONG, "--run-dir", "signalled")
    run_dir[signalled] = here / "signalled"
    disturb(signalled, run_dir[signalled], "scancel", "--signal=USR1")
    gate.touch()
    assert "goes back into the queue" in log(here, signalled)
    # Both tasks received it, and one also from the other: they end after the same update, with a checkpoint.
    said = log(here, signalled)
    assert "ending after this update, with a checkpoint" in said, said
    assert re.search(r"goes on after update \d+, nothing to repeat\n", said), said
    for job, directory in run_dir.items():
        assert cluster.wait(job) == "COMPLETED", log(here, job)
        assert cluster.state(job)["Restarts"] == "1"
        assert "resuming after update" in log(here, job)
        assert json.loads((directory / "config.json").read_text())["slurm"]["restarts"] == 1
        assert read_result(directory)["params_digest"] == undisturbed["long"]
    assert [d.name for d in (here / "runs").iterdir()] == [run_dir[by_hand].name]


@pytest.mark.slow
def test_a_sweep_is_a_job_array_that_fills_its_folders(cluster, here, monkeypatch):
    folder = "it's 5%j"  # Slurm would read a quote, a space and %j in the options of a script
    words = ["sweep", "--env-ids", "Catch-v0", "--num-seeds", "2", "--dir", folder, "--slurm"]
    words += ["slurm/one-gpu.sh", "--", "ppo", *SWEPT]
    settings = here / "slurm" / "settings.sh"
    settings.write_text(settings.read_text().replace("MORE=()", "MORE=(--hold)"))  # until both are seen in the queue
    monkeypatch.chdir(here)
    for name, value in cluster.env.items():
        monkeypatch.setenv(name, value)
    first = command(*words)
    assert first.code == 0 and "2 of 2 runs to submit" in first.out, first
    again = command(*words)
    assert "0 of 2 runs to submit, 2 in the queue" in again.out, again
    (job,) = {
        run["job"].partition("_")[0] for run in json.loads((here / folder / "sweep.json").read_text())["runs"].values()
    }
    assert cluster.run("scontrol", "release", job).returncode == 0
    for element in range(2):
        assert cluster.wait(f"{job}_{element}") == "COMPLETED", (
            here / f"{folder}/logs/{job}_{element}.log"
        ).read_text()
    for seed in (1, 2):
        run_dir = here / folder / f"Catch-v0__ppo__s{seed}"
        experiment = json.loads((run_dir / "config.json").read_text())["experiment"]
        assert (experiment["env_id"], experiment["seed"]) == ("Catch-v0", seed)
        assert read_result(run_dir)["status"] == "finished"
    rows = [line for line in command("sweep", "status", folder).out.splitlines() if "__s" in line]
    assert len(rows) == 2 and all("finished" in r and "COMPLETED" in r and "10/10" in r for r in rows), rows
    assert "0 of 2 runs to submit, 0 in the queue, 2 finished" in command(*words).out
    assert len(list((here / folder / "slurm").iterdir())) == 2


@pytest.mark.slow
def test_a_node_that_cannot_be_reached_fails_the_job_and_is_named(cluster, here):
    lost = cluster.nodes[1]
    cluster.stop_node(lost)
    try:
        job = submit(cluster, here, "nodes", "ppo", *SHORT, "--run-dir", "r")
        wait_for(lambda: (here / f"slurm-{job}.out").exists() and "failed with" in log(here, job), 1200, "message")
        said = log(here, job)
        assert f"failed on node {lost}: Communication connection failure" in said
        assert f"on {','.join(cluster.nodes)}; see the reason above" in said
    finally:
        cluster.start_node(lost)  # until then Slurm waits to hear from it that the job is over
    assert cluster.wait(job) == "FAILED"


def stand_in(here: Path, script: str) -> None:
    """A program instead of sbatch."""
    (here / "sbatch").write_text(f"#!/bin/bash\n{script}\n")
    (here / "sbatch").chmod(0o755)


def test_settings_are_asked_for_where_the_template_has_a_line_for_them(here, monkeypatch):
    """What slurm/submit would call, by a stand-in for sbatch that prints its words."""
    stand_in(here, 'echo "$@"')
    settings = (here / "slurm/settings.sh").read_text()
    filled = {"ACCOUNT": "us", "TIME": "1:00:00", "GPUS": "8", "GPU_TYPE": "a100", "NODES": "3", "MORE": "(--qos=x)"}
    filled |= {"CLEANBA": "(true)"}  # checks nothing
    for name, value in filled.items():
        settings = "\n".join(f"{name}={value}" if s.startswith(f"{name}=") else s for s in settings.splitlines())
    (here / "slurm/settings.sh").write_text(settings)

    def asked(template: str, options: Sequence[str] = ("--hold",), **env: str) -> list[str]:
        env = {"PATH": f"{here}:/usr/bin:/bin", **env}
        words = ["slurm/submit", *options, f"slurm/{template}.sh", "ppo", "--seed", "2"]
        done = subprocess.run(words, cwd=here, env=env, capture_output=True, text=True, check=True)
        return done.stdout.split()

    common = ["--partition=all", "--account=us", "--time=1:00:00", "--cpus-per-task=1"]
    rest = lambda template: ["--qos=x", "--hold", f"slurm/{template}.sh", "ppo", "--seed", "2"]
    assert asked("one-gpu") == [*common, "--gpus-per-node=a100:1", *rest("one-gpu")]
    assert asked("one-node") == [*common, "--gpus-per-node=a100:8", *rest("one-node")]
    assert asked("nodes") == [*common, "--nodes=3", "--gpus-per-node=a100:8", *rest("nodes")]
    assert asked("cpu") == [*common, "--nodes=3", *rest("cpu")]
    assert "--gpus-per-node=0" in asked("one-gpu", CLEANBA_CPU="1")
    # The last of several --nodes holds.
    assert [w for w in asked("cpu", ELASTIC="1") if w.startswith(("--nodes", "--no-"))][-2:] == [
        "--nodes=1-3",
        "--no-kill",
    ]
    assert "--no-kill" not in asked("one-gpu", ELASTIC="1")
    # The job reads its tasks per node, which --ntasks alone does not set.
    assert "--ntasks-per-node=3" in asked("nodes", options=["--nodes=2", "--ntasks=6"])
    # Options may have their values as words of their own.
    before = ["-p", "gpu", "-N", "2"]
    assert asked("cpu", options=before)[-8:] == [*before, "slurm/cpu.sh", "ppo", "--seed", "2"]
    assert "--nodes=1-2" in asked("cpu", options=before, ELASTIC="1")
    # Another option for GPUs: the template's own line is left out.
    (here / "slurm/settings.sh").write_text(settings + "\nGPU_OPTION=--gres=gpu:\n")
    stand_in(here, 'for word; do if [ -p "$word" ]; then cat "$word"; else echo "$word"; fi; done')
    words = asked("nodes")
    assert "--gres=gpu:a100:8" in words and words[-3:] == ["ppo", "--seed", "2"]
    assert "--cpus-per-task=32" in words and not any("gpus-per-node" in word for word in words), words
    wrong = subprocess.run(["slurm/submit", "slurm/cpo.sh"], cwd=here, capture_output=True, text=True)
    assert wrong.returncode == 2 and wrong.stderr.startswith("none of these is a file: slurm/cpo.sh\nusage: ")


@pytest.mark.parametrize("gpu_type, asked", [("", "a100:4"), ("h100", "h100:4")])
def test_a_template_may_name_the_type_of_its_gpus(here, gpu_type, asked):
    (here / "slurm/settings.sh").open("a").write(f"GPU_TYPE={gpu_type}\n")
    template = here / "slurm/one-node.sh"
    template.write_text(template.read_text().replace("--gpus-per-node=4", "--gpus-per-node=a100:4"))
    stand_in(here, 'echo "$@"')
    env = {"PATH": f"{here}:/usr/bin:/bin"}
    submit = lambda *words: subprocess.run(["slurm/submit", *words], cwd=here, env=env, capture_output=True, text=True)
    shown, submitted = submit("--show", "slurm/one-node.sh", "ppo"), submit("slurm/one-node.sh")
    assert (shown.stdout.split()[-3:], shown.stderr) == (["1", "2", "3"], "")
    assert f"--gpus-per-node={asked}" in submitted.stdout.split() and not submitted.stderr


@pytest.mark.parametrize(
    "words, shown",
    [
        ("slurm/cpu.sh ppo a\\ b", "2 1 ppo --distributed --actor-device-ids 0 --learner-device-ids 0 a\\ b"),
        ("-N 1-3 slurm/cpu.sh sac", "3 1 sac --distributed --actor-device-ids 0 --learner-device-ids 0"),
        ("slurm/one-node.sh ppo", "1 1 ppo --actor-device-ids 0 --learner-device-ids 1 2 3"),
        ("--gpus-per-node=a100:3 slurm/one-node.sh ppo", "1 1 ppo --actor-device-ids 0 --learner-device-ids 1 2"),
        ("--gpus=8 slurm/one-node.sh ppo", "1 1 ppo --actor-device-ids 0 --learner-device-ids 0"),
        (
            "--nodes=2 --ntasks-per-node 4 slurm/tasks-per-node.sh ppo",
            "2 4 ppo --distributed --actor-device-ids 0 --learner-device-ids 0",
        ),
        (
            "--ntasks=4 slurm/tasks-per-node.sh ppo",
            "1 4 ppo --distributed --actor-device-ids 0 --learner-device-ids 0",
        ),
    ],
)
def test_a_template_shows_what_its_tasks_will_run(words, shown, here):
    done = subprocess.run(
        ["bash", "-c", f"slurm/submit --show {words}"],
        cwd=here,
        env={"PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
    )
    assert (done.stdout.split(), done.stderr) == (shown.split(), "")
    elastic = subprocess.run(
        ["bash", "-c", f"slurm/submit --show {words}"],
        cwd=here,
        env={"PATH": "/usr/bin:/bin", "ELASTIC": "1"},
        capture_output=True,
        text=True,
    )
    assert ("--elastic" in elastic.stdout) == ("cpu.sh" in words)


def test_a_job_that_cannot_be_trained_is_refused_before_it_is_submitted(here, monkeypatch):
    stand_in(here, "echo submitted")
    python = f"CLEANBA=({sys.executable} -m cleanba)"
    settings = (here / "slurm/settings.sh").read_text()

    def submitted(*words: str, cleanba: str = python, **env: str) -> tuple[int, str, str]:
        (here / "slurm/settings.sh").write_text(settings.replace(python, cleanba))
        env = {**ENVIRONMENT, "PATH": f"{here}:/usr/bin:/bin", "PYTHONPATH": str(ROOT), **env}
        done = subprocess.run(["slurm/submit", *words], cwd=here, env=env, capture_output=True, text=True)
        return done.returncode, done.stdout, done.stderr

    code, out, err = submitted("slurm/cpu.sh", "sac", "--env-id", "Pendulum-v1")
    assert (code, out) == (2, "") and "num_actors=1 cannot be split over 2 processes" in err
    assert "--nodes=1 before the template, or NODES=1 in settings.sh" in err and err.count("\n") == 1
    # A check that cannot be made here does not keep a job from being submitted.
    for cleanba, said in (("CLEANBA=(/none/cleanba)", "could not be checked here"), ("CLEANBA=(true)", "")):
        code, out, err = submitted("slurm/cpu.sh", "sac", cleanba=cleanba)
        assert (code, out) == (0, "submitted\n") and said in err and err.count("\n") <= 2
    code, out, err = submitted("slurm/one-gpu.sh", "ppo", "--help")
    assert code == 0 and "--env-id" in out and "submitted" not in out and not err


SPLIT = ("--env-id", "Catch-v0", "--num-envs", "24", "--num-actors", "2", "--num-shards", "4", "--distributed")


@pytest.mark.parametrize(
    "words, code, said",
    [
        (("2", "1", "ppo", *SPLIT), 0, ""),
        (("4", "1", "ppo", *SPLIT), 2, "for fewer processes under Slurm: --nodes=2 before the template, or NODES=2"),
        (("1", "4", "ppo", *SPLIT), 2, "--nodes=1 --ntasks-per-node=2 before the template, or in MORE"),
        (("1", "1", "ppo", *SPLIT, "--no-distributed"), 0, ""),
        (("4", "1", "ppo", *SPLIT, "--no-distributed"), 2, "4 tasks without --distributed would each train the same"),
        (("1", "2", "ppo", *SPLIT, "--no-distributed"), 2, "ask for --nodes=1 --ntasks-per-node=1"),
        (
            ("4", "1", "--elastic", "ppo", *SPLIT),
            0,
            "warning: num_actors=2 and num_shards=4 can use at most 2 of 4 nodes; ask for --nodes=2",
        ),
        (("2", "1", "ppo", *SPLIT, "--learner-device-ids", "0", "1", "2"), 2, "cannot occupy 3 learner devices"),
        (("1", "1", "ppo", *SPLIT, "--nonsense", "3"), 2, "--nonsense"),
        (("1", "1", "ppo", *SPLIT, "--gamma", "2"), 2, "gamma=2"),
        (("1", "1", "ppo", "--env-id", "Ketch-v0"), 2, "Ketch-v0"),
        (("1", "1", "ppo", "--env-id", "gymnasium:not_there:A"), 0, "cannot be checked here, where something is not"),
        (("1", "1", "not_there:RECIPE"), 0, "cannot be checked here, where something is not"),
        (("1", "1", "eval", "runs/x"), 0, "eval is no training command"),
        (("1", "1", "resume", "--learner-device-ids", "0", "runs/x"), 2, "submit the run's own command with --run-dir"),
        (("1", "1", "pppo", *SPLIT), 2, "there is no command 'pppo'; did you mean ppo?"),
        (("1", "x", "ppo"), 2, "usage: cleanba slurm check"),
        (("1", "1"), 2, "usage: cleanba slurm check"),
    ],
)
def test_the_processes_of_a_job_are_checked(words, code, said, monkeypatch):
    monkeypatch.setattr(errors, "SAID", set())
    ended = command("slurm", "check", *words)
    assert ended.code == code and said in ended.err and bool(said) == bool(ended.err), ended


@pytest.mark.parametrize("dry", [True, False])
def test_a_sweep_whose_jobs_cannot_be_trained_is_refused(dry, here, monkeypatch):
    monkeypatch.chdir(here)
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    sweep = ["sweep", "--env-ids", "Pendulum-v1", "--dir", "s", *["--dry-run"] * dry, "--slurm"]
    ended = command(*sweep, "slurm/cpu.sh", "--", "sac")
    assert ended.code == 2 and ended.out == "" and not (here / "s" / "slurm").exists()
    assert "Pendulum-v1, sac: num_actors=1 cannot be split over 2 processes" in ended.err
    if dry:
        assert command(*sweep, "slurm/one-gpu.sh", "--", "sac").code == 0
        (here / "slurm" / "submit").write_text("#!/bin/bash\nexit 1\n")  # somebody's own, which cannot be asked
        ended = command(*sweep, "slurm/cpu.sh", "--", "sac")
        assert ended.code == 0 and "slurm/cpu.sh does not show how many processes it starts" in ended.err


def test_a_dry_run_shows_the_job_and_writes_nothing(here, monkeypatch):
    monkeypatch.chdir(here)
    before = sorted(here.rglob("*"))
    ended = command("sweep", "--env-ids", "Catch-v0", "--num-seeds", "2", "--workers", "1", "--dir", "s", "--dry-run",
                    "--slurm", "slurm/one-gpu.sh", "--", "ppo", *SWEPT)  # fmt: skip
    assert ended.code == 0, ended.err
    assert "#SBATCH --array=0-1%1" in ended.out and f"--seed 2 --run-dir {here}/s/Catch-v0__ppo__s2" in ended.out
    assert "$ slurm/submit s/slurm/array-1.sh" in ended.out
    assert sorted(here.rglob("*")) == before
    ended = command("sweep", "--env-ids", "Catch-v0", "--slurm", "slurm/none.sh", "--", "ppo", *SWEPT)
    assert ended.code == 2 and "slurm/none.sh does not exist" in ended.err


@pytest.mark.parametrize("template", TEMPLATES)
def test_an_element_of_an_array_takes_its_own_words(template, tmp_path):
    """The generated script, run without Slurm, with a `launch` that prints its words."""
    (tmp_path / "settings.sh").write_text("")
    (tmp_path / "launch.sh").write_text('LEARNERS=(1 2)\nlaunch() { printf "%s\\n" "$@"; }\n')
    words = tmp_path / "words of it"
    second = ["ppo", "--seed", "2", "--env-options", "a=b c", "x=it's\\two\nlines \u00e9\t"]
    words.write_text("".join(" ".join(map(bash_word, run)) + "\n" for run in (["ppo", "--seed", "1"], second)))
    text = job_script((ROOT / f"slurm/{template}.sh").read_text(), words, "its name", 2, None, tmp_path / "log")
    assert text.count("--job-name") == 1 and "#SBATCH --job-name='its name'\n" in text
    assert "#SBATCH --requeue\n" in text and "#SBATCH --array=0-1\n" in text
    (tmp_path / "job.sh").write_text(text)
    env = {"SLURM_ARRAY_TASK_ID": "1", "CLEANBA_SLURM": str(tmp_path), "PATH": "/usr/bin:/bin"}
    done = subprocess.run(["bash", tmp_path / "job.sh"], env=env, capture_output=True, text=True, check=True)
    assert done.stdout.startswith("ppo\n") and done.stdout.endswith("\n".join(second[1:]) + "\n")


@pytest.mark.parametrize(
    "code, shows, restarts, requeued",
    [
        *((138, "", 0, True), (138, "", 99, True), (138, "", 100, False)),
        *((143, "PreemptTime=2026-01-01T00:00:00", 0, True), (143, "PreemptTime=None", 0, False), (1, "", 0, False)),
    ],
)
@pytest.mark.parametrize("array", [{}, {"SLURM_ARRAY_JOB_ID": "12", "SLURM_ARRAY_TASK_ID": "3"}])
def test_only_what_was_cut_short_is_requeued_and_of_an_array_only_the_element(
    code, shows, restarts, requeued, array, tmp_path
):
    """Of an array whose last element has the array's own number, that number alone would requeue all elements.

    After 100 restarts, as settings.sh says, a job gives up.
    """
    for name, script in (
        ("srun", f"exit {code}"),
        ("scontrol", f'echo "$@" >> {tmp_path}/asked; [ $1 != requeue ] && echo "{shows}"'),
    ):
        (tmp_path / name).write_text(f"#!/bin/bash\n{script}\n")
        (tmp_path / name).chmod(0o755)
    env = {"PATH": f"{tmp_path}:/usr/bin:/bin", "SLURM_JOB_ID": "12", "CLEANBA_SLURM": str(ROOT / "slurm"), **array}
    env |= {"SLURM_RESTART_COUNT": str(restarts)} if restarts else {}
    words = ["bash", "-c", f"source {ROOT}/slurm/launch.sh; launch ppo"]
    done = subprocess.run(words, env=env, cwd=tmp_path, capture_output=True, text=True)
    asked = (tmp_path / "asked").read_text().splitlines() if (tmp_path / "asked").exists() else []
    assert done.returncode in (code, 138), done
    name = "12_3" if array else "12"
    assert [words for words in asked if words.startswith("requeue")] == ([f"requeue {name}"] if requeued else [])
    assert ("not requeued after 100 restarts" in done.stderr) == (restarts == 100)
    assert ("Slurm has not requeued it" in done.stderr) == requeued  # as this one does not
    assert "To resume from its last checkpoint, submit the same command with --run-dir" in done.stderr


# The loop without Slurm: the first start of the only step ends with the given code, the second with 0.
LOOP = """
source elastic.sh
CLEANBA=(fits) tasks_here=1 SLURM_JOB_NUM_NODES=1 starts=0
fits() { printf '1\\nthe_run\\n'; }
job_nodes() { echo node; }
those_that_answer() { cat; }
seconds_left() { echo 9999; }
failed_by_itself() { false; }
preempted() { PREEMPTED; }
start_steps() {
    starts=$((starts + 1))
    if [ "$starts" -eq 1 ]; then (exit CODE) & else (exit 0) & fi
    steps=($!)
}
elastic ppo >&2
echo "$? after $starts"
"""


@pytest.mark.parametrize(
    "code, preempted, ends",
    [
        *((143, "true", "143 after 1"), (143, "false", "0 after 2")),  # else one node was told to end, and so all ended
        *((137, "true", "0 after 2"), (2, "false", "2 after 1"), (0, "false", "0 after 1")),
    ],
)
def test_sigterm_ends_an_elastic_job_if_it_is_preempted(code, preempted, ends):
    script = LOOP.replace("PREEMPTED", preempted).replace("CODE", str(code))
    done = subprocess.run(["bash", "-c", script], cwd=ROOT / "slurm", capture_output=True, text=True)
    assert done.stdout == f"{ends}\n", done


@pytest.mark.parametrize(
    "left, seconds",
    [("5:00", 300), ("1:00:09", 3609), ("2-00:00:08", 172808), ("UNLIMITED", 999999999), ("", 999999999)],
)
def test_the_time_that_a_job_has_left(left, seconds, tmp_path):
    (tmp_path / "squeue").write_text(f'#!/bin/bash\necho "{left}"\n')
    (tmp_path / "squeue").chmod(0o755)
    words = ["bash", "-c", f"source {ROOT}/slurm/elastic.sh; job=1 seconds_left"]
    done = subprocess.run(words, env={"PATH": f"{tmp_path}:/usr/bin:/bin"}, capture_output=True, text=True, check=True)
    assert int(done.stdout) == seconds


def test_a_run_in_a_batch_job_has_a_name_that_survives_a_requeue(monkeypatch):
    for name in ("ENVIRONMENT", "SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_ARRAY_JOB_ID"):
        monkeypatch.delenv(name, raising=False)
    name = lambda: default_run_dir(PPO(env_id="Pong-v5", seed=4), Run(exp_name="x")).name
    assert slurm_job() is None and abs(int(name().rpartition("__")[2]) - time.time()) < 5
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    assert "job" not in name(), "two runs of an interactive job are two"
    monkeypatch.setenv("ENVIRONMENT", "BATCH")
    assert name() == "Pong-v5__x__4__job17"
    monkeypatch.setenv("SLURM_STEP_ID", "2")
    assert name() == "Pong-v5__x__4__job17.2"
    monkeypatch.setenv("SLURM_STEP_ID", "0")
    monkeypatch.setenv("SLURM_ARRAY_JOB_ID", "16")
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "3")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "2")
    assert name() == "Pong-v5__x__4__job16_3"
    assert slurm_job() == {"job_id": "17", "array_job_id": "16", "array_task_id": "3", "restarts": 2}


def test_a_process_under_slurm_keeps_all_of_its_gpus():
    """JAX alone would leave process i of a node GPU i, where --learner-device-ids may name several."""
    code = """if True:
        from jax._src import xla_bridge
        from cleanba.config import Placement
        from cleanba.runtime.processes import initialise
        initialise(Placement(distributed=True))
        print("visible:", xla_bridge.CUDA_VISIBLE_DEVICES.value)"""
    task = {"SLURM_JOB_ID": "7", "SLURM_STEP_NODELIST": "localhost", "SLURM_NTASKS": "1", "SLURM_PROCID": "0"}
    for share, visible in (({}, "all"), ({"JAX_LOCAL_DEVICE_IDS": "2,3"}, "2,3")):
        env = {**ENVIRONMENT, **task, "SLURM_LOCALID": "0", "JAX_PLATFORMS": "cpu", "PATH": "/usr/bin", **share}
        words = [sys.executable, "-c", code]
        done = subprocess.run(words, env=env, cwd=ROOT, capture_output=True, text=True, timeout=240, check=True)
        assert f"visible: {visible}\n" in done.stdout


def test_templates_are_written_out_and_never_overwritten(tmp_path):
    folder = tmp_path / "new" / "slurm"
    ended = command("slurm", folder)
    assert ended.code == 0 and f"{folder}/submit {folder}/one-gpu.sh ppo" in ended.out
    assert {path.name for path in folder.iterdir()} == {path.name for path in (ROOT / "slurm").iterdir()}
    assert {f"{template}.sh" for template in TEMPLATES} < {path.name for path in folder.iterdir()}
    assert [path.name for path in folder.iterdir() if path.stat().st_mode & 0o100] == ["submit"]
    (folder / "settings.sh").write_text("PARTITION=mine\n")
    (folder / "cpu.sh").unlink()
    ended = command("slurm", folder)
    assert ended.code == 0 and "wrote" in ended.out
    assert "settings.sh already exists and differs" in ended.out and "submit already exists\n" in ended.out
    assert (folder / "settings.sh").read_text() == "PARTITION=mine\n" and (folder / "cpu.sh").exists()
    ended = command("slurm", folder / "submit")
    assert ended.code == 2 and "is a file" in ended.err
