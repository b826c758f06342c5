"""Benchmarks: parts for GPUs fit and run small, compiled programs are read correctly, variants compared by numbers."""

import functools
import itertools
import json
import operator
import shutil
import sys
import tarfile
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from launch import ROOT, TINY, command, finish, python

from cleanba.config import Placement
from cleanba.environments.atari_scores import SHORT, publication
from cleanba.environments.envpool import env_spec
from cleanba.recipes import RECIPES
from cleanba.resolution import fit, resolve
from cleanba.train_flags import parse

sys.path.append(str(ROOT / "benchmarks"))
import aot
import atari
import concurrency
import gpu
import keep_curves
import kept
import lag
import machine
import memory_tasks
import minatar
import mujoco
import pqn
import verifiable
from studies import Asked

IMPORT_ALL = """
import importlib.util, sys
from unittest.mock import MagicMock
for name in ("torch", "torch.distributions", "torch.nn", "torch.nn.functional", "torch.optim"):
    sys.modules[name] = MagicMock(__spec__=importlib.util.spec_from_loader(name, None))  # it is not installed
sys.path.insert(0, sys.argv[1])
for name in sys.argv[2:]:
    # Under a name of its own: tests/ has modules that are called as some benchmarks are.
    spec = importlib.util.spec_from_file_location(f"benchmark_{name}", f"{sys.argv[1]}/{name}.py")
    sys.modules[spec.name] = module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except ModuleNotFoundError as error:
        if error.name != "llvmlite":  # which is for some CPUs
            raise
"""


def test_every_benchmark_can_be_imported():
    names = sorted(path.stem for path in (ROOT / "benchmarks").glob("*.py"))
    ended = finish(python("-c", IMPORT_ALL, ROOT / "benchmarks", *names, JAX_PLATFORMS="cpu"))
    assert ended.code == 0 and len(names) > 20, ended.err


def test_sums_of_both_ways_are_equal_and_what_they_cost_is_counted():
    words = ("--here", "--devices", "2", "--networks", "nature", "--rounds", "1")
    ended = finish(python(ROOT / "benchmarks" / "sums.py", *words, JAX_PLATFORMS="cpu", JAX_NUM_CPU_DEVICES="2"))
    assert ended.code == 0, ended.err
    found = json.loads(ended.out.splitlines()[-1])["nature"]
    assert found["equal"]
    for way in ("gathered", "exchanged"):
        assert found[way]["received_bytes"] >= found["parameter_bytes"] and found[way]["seconds"]["median"] > 0


def test_concurrent_runs_are_timed_beside_those_that_take_turns(tmp_path, monkeypatch):
    monkeypatch.setattr(machine, "RESULTS", tmp_path)
    monkeypatch.setitem(concurrency.TASKS, "tiny", (" ".join(("ppo", *TINY)), 64))
    for task in ("tiny", "tiny again"):
        monkeypatch.setitem(concurrency.TASKS, task, concurrency.TASKS["tiny"])
        concurrency.main(concurrency.Args((task,), rounds=1))
    tasks = json.loads((tmp_path / "concurrency_cpu.json").read_text())["tasks"]
    assert list(tasks) == ["tiny", "tiny again"], "what was there is kept"
    for row in tasks.values():
        ratio = row["concurrent"]["median"] / row["in turns"]["median"]
        assert row["times_as_fast"]["median"] == pytest.approx(ratio)


def tiny(name: str, **fields) -> gpu.Part:
    """A part of the benchmark on one device, as --tiny makes it."""
    part = next(part for part in gpu.parts(8) if part.name == name)
    return replace(part, fields={**part.fields, **gpu.TINY, **fields}, seconds=0.02)


def figures(of_part: Iterator[dict]) -> dict:
    """All that a part finds."""
    return json.loads(json.dumps(functools.reduce(operator.or_, of_part)))


@pytest.mark.parametrize("part", gpu.parts(8), ids=lambda part: part.name)
def test_every_part_fits(part):
    recipe = RECIPES[part.algorithm]
    fields = {"num_shards": len(part.learners), **part.fields}
    fit(recipe, resolve(recipe, fields, "gpu").experiment, Placement(part.actors, part.learners))


def test_parts_have_names_of_their_own_and_devices_that_are_there():
    for gpus in (1, 2, 8):
        there = gpu.parts(gpus)
        assert len({part.name for part in there}) == len(there)
        assert max(max(part.actors + part.learners) for part in there) < gpus
    assert [len(gpu.parts(n)) - len(gpu.parts(1)) for n in (2, 3, 8)] == [2, 3, 6]


# One of each sort; `test_every_part_fits` looks at them all.
SPEEDS = (
    *("ppo resnet bfloat16", "ppo lstm tf32", "ppo a0-l1,2,3,4,5,6", "ppo resnet tf32 scanned"),
    *("impala resnet tf32 6 shards 3 actors",),
)


@pytest.mark.parametrize("name", SPEEDS)
def test_a_speed_has_every_figure(name, monkeypatch):
    monkeypatch.setattr("throughput.threads_per_actor", lambda *given: 1)
    found = figures(gpu.speed(tiny(name)))
    assert set(found["steps_per_second"]) == {"EnvPool alone", "inference alone", "learning alone", "whole"}
    assert min(found["steps_per_second"].values()) > 0
    assert found["params_digest"].startswith("sha256:") and found["update"]["wall"] > 0
    ratio = found["before_learning"]["ratio"]
    if "lstm" in name:
        assert ratio is None
    else:
        assert 0 <= ratio["mean"] <= ratio["max"] < (0.1 if "bfloat16" in name else 1e-5)
    rows = gpu.table({name: found, "later": {"failed": "no time"}}, ["another"]).splitlines()
    assert {row.count("|") for row in rows if row.startswith("|")} == {10}
    assert rows[-2:] == ["later: no time", "left out for want of time: another"]


def test_a_short_run_has_the_same_digest_twice_and_on_two_devices():
    found = figures(gpu.digests(tiny("digests ppo 2 shards")))
    assert found["learner_devices"] == [1, 1, 2] and len(found["digests"]) == 3
    assert found["the_same"] is True
    words = gpu.table({"digests": found}, [])
    assert words.endswith("digests, on 1, 1, 2 learner devices: the same\n")
    assert "DIFFERENT" in gpu.table({"digests": found | {"the_same": False}}, [])


def test_kernels_are_counted_and_gaps_between_them_are_no_work():
    event = lambda name, start, duration: SimpleNamespace(name=name, start_ns=start, duration_ns=duration)
    line = lambda name, *events: SimpleNamespace(name=name, events=events)
    plane = lambda name, *lines: SimpleNamespace(name=name, lines=lines)
    streams = [
        line("Stream #1", event("conv", 0, 4e9), event("add", 6e9, 1e9)),
        line("Stream #2", event("conv", 3e9, 2e9)),
        line("XLA Ops", event("sum of all", 0, 7e9)),
    ]
    found = gpu.kernels([plane("/host:CPU"), plane("/device:GPU:1"), plane("/device:GPU:0", *streams)])
    assert (found["busy"], found["launches"]) == (6.0, 3)  # from 0 to 5 s, and from 6 to 7
    assert found["kernels"] == {"conv": {"seconds": 6.0, "times": 2}, "add": {"seconds": 1.0, "times": 1}}
    assert gpu.kernels([plane("/host:CPU")]) == {"planes": ["/host:CPU"]}


def test_figures_of_a_part_are_kept_however_it_ends(tmp_path, monkeypatch):
    ends = {"breaks": "raise ValueError('no such kernel')", "hangs": "import time; time.sleep(600)", "goes on": ""}
    for name, end in ends.items():
        script = tmp_path / f"{name}.py"
        script.write_text(f"print('{gpu.RESULT}' + '{{\"first\": 1}}', flush=True)\n{end}\n")
        monkeypatch.setattr(gpu, "__file__", str(script))
        found = gpu.run(gpu.Part(name, "speed"), 10.0 if name == "hangs" else 300.0, {})
        assert found["first"] == 1 and found["wall"] > 0
        expected = {"breaks": "ValueError: no such kernel", "hangs": "not done after 10 s", "goes on": ""}[name]
        assert found.get("failed", "").endswith(expected) and ("failed" in found) == bool(expected)
    partly = {"before_learning": {"ratio": None}, "steps_per_second": {"learning alone": 7}, "failed": "no such kernel"}
    rows = gpu.table({"part": partly}, []).splitlines()
    assert rows[2] == "| part |  |  | 7 |  |  | nan |  |  |" and rows[-1] == "part: no such kernel"


@pytest.mark.parametrize("only", [(), ("ppo nature", "digests")])
def test_the_gpu_benchmark_writes_after_each_part_and_names_the_parts_it_had_no_time_for(tmp_path, monkeypatch, only):
    clock, seen = [0.0], []
    results, page = tmp_path / "gpu.json", tmp_path / "gpu.md"

    def run(part, limit, environment):
        if part.kind == "look":
            return {"platform": "gpu", "devices": 1}
        if seen:
            assert list(json.loads(results.read_text())["parts"]) == seen
        assert part.expected <= limit <= 9 * 60 - clock[0]
        clock[0] += 200.0
        seen.append(part.name)
        return {"wall": 200.0} | ({"failed": "no such kernel"} if len(seen) == 2 else {})

    monkeypatch.setattr(gpu, "run", run)
    monkeypatch.setattr(gpu.time, "perf_counter", lambda: clock[0])
    gpu.main(gpu.Args(out=tmp_path, only=only))
    wanted = [part.name for part in gpu.parts(1) if not only or part.name.startswith(only)]
    first, failed, third = wanted[:3]
    assert seen == [first, failed, third]
    assert page.read_text().endswith(f"left out for want of time: {', '.join(wanted[3:])}\n")
    assert f"{failed}: no such kernel" in page.read_text()
    clock[0] = 0.0
    seen_before = seen.copy()
    seen[:] = []
    monkeypatch.setattr(gpu, "run", lambda part, *rest: seen.append(part.name) or {"platform": "gpu", "devices": 1})
    gpu.main(gpu.Args(out=tmp_path, only=only, rest=True))  # the clock stands still, so there is time for all
    assert seen == ["look", failed, *wanted[3:]]
    there = json.loads(results.read_text())["parts"]
    assert set(there) == set(wanted) and list(there)[:3] == seen_before
    assert {"wall": 200.0}.items() <= there[first].items()


@pytest.mark.slow
def test_the_command_measures_and_writes_a_page(tmp_path):
    words = ["--tiny", "--seconds", "0.05", "--out", tmp_path, "--only", "impala nature", "--rest"]
    ended = finish(python(ROOT / "benchmarks/gpu.py", *words, JAX_NUM_CPU_DEVICES="1"))
    assert ended.code == 0, ended.err
    there = json.loads((tmp_path / "gpu.json").read_text())
    assert there["platform"] == "cpu" and "machine" in there and list(there["parts"]) == ["impala nature tf32"]
    assert (tmp_path / "gpu.md").read_text() in ended.out and "failed" not in there["parts"]["impala nature tf32"]


def test_the_table_of_figures_that_can_be_verified_has_the_runs_that_are_kept():
    rows = machine.saved("verifiable")["runs"]
    assert verifiable.table(rows) in verifiable.PAGE.read_text()
    assert {path.name for path in verifiable.RUNS.iterdir()} == {f"{name}.tar.gz" for name in rows}
    for name, row in rows.items():
        with tarfile.open(verifiable.RUNS / f"{name}.tar.gz") as archive:
            result = json.load(archive.extractfile(f"{name}/result.json"))
        assert (result["params_digest"], result["status"]) == (row["params_digest"], "finished"), name


@pytest.mark.parametrize(
    "studies",
    [pqn.STUDIES, memory_tasks.STUDIES, mujoco.STUDIES, atari.STUDIES, minatar.STUDIES],
    ids=lambda studies: studies.name,
)
def test_the_table_of_a_study_has_the_curves_that_are_kept(studies):
    lines = kept.read(studies.file)
    assert studies.table(lines) == studies.file.with_suffix(".md").read_text()
    first = next(iter(studies.rows()))
    asked = Asked(studies=first[:1], variants=first[1:2], env_ids=first[2:], seeds=(3, 1))
    assert [run.seed for run in studies.wanted(asked)] == [3, 1]
    assert {tuple(run[:3]) for run in studies.wanted(Asked())} == set(studies.rows())
    with pytest.raises(SystemExit, match="there is no study nothing; there are"):
        list(studies.wanted(Asked(studies=("nothing",))))


def test_a_longer_corridor_starts_from_the_shorter_ones_run():
    runs = list(memory_tasks.STUDIES.wanted(Asked(studies=("corridors",), variants=("PPO",), seeds=(2,))))
    commands = [memory_tasks.STUDIES.command(run, Path("runs")) for run in runs]
    assert [run.env_id for run in runs] == [f"MiniGrid-MemoryS{size}-v0" for size in (7, 9, 11, 13)]
    assert "--init-from" not in commands[0]
    for shorter, words in zip(runs, commands[1:], strict=False):
        assert words[words.index("--init-from") + 1] == str(Path("runs") / shorter.folder)


def test_atari_at_full_length_is_by_cleanrls_rules_and_stands_beside_its_returns():
    experiments = {}
    for run in atari.STUDIES.wanted(Asked(seeds=(1,))):
        algorithm, *flags = atari.STUDIES.command(run, Path("runs"))
        typed = parse(RECIPES[algorithm], flags).typed
        experiments[run] = resolve(RECIPES[algorithm], typed, "gpu").experiment
        found = {"algorithm": algorithm, **asdict(experiments[run])}
        assert publication([json.loads(json.dumps(found))]) is SHORT and experiments[run].total_timesteps == 10**7
        assert env_spec(experiments[run]).options["noop_max"] == 30, "EnvPool's default, as in CleanRL's script"
    run = next(run for run in experiments if run.study == "pqn" and run.env_id == "Breakout-v5")
    line = {
        "study": run.study,
        "variant": run.variant,
        "experiment": {"algorithm": "pqn", **json.loads(json.dumps(asdict(experiments[run])))},
        "returns": [1.0, 200.0],
        "seconds": [0.0, 600.0],
        "evaluated": 123.0,
    }
    row = atari.STUDIES.table([line]).splitlines()[-1]
    assert row == "| pqn | Breakout-v5 | CleanRL's | 200 | 200 | 10.0 | 123 | 384.9 (CleanRL, 10M steps) |"


def test_without_a_gpu_it_says_so_and_measures_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu, "run", lambda *_: {"platform": "cpu", "devices": 1})
    with pytest.raises(SystemExit, match="no GPU"):
        gpu.main(gpu.Args(out=tmp_path))
    assert list(tmp_path.iterdir()) == []


# ------------------------------------------------------------------------------------------ reading compiled programs

# ruff: noqa: E501
PROGRAM = """HloModule jit_f

%fused_sort (p: f32[12]) -> (f32[12], s32[12]) {
  %p.1 = f32[12]{0} parameter(0)
  ROOT %sort.1 = (f32[12]{0}, s32[12]{0}) sort(%p.1, %p.1), dimensions={0}, to_apply=%less
}

%true_branch (a: (f32[12])) -> f32[12] {
  %a.1 = (f32[12]{0}) parameter(0)
  %element.1 = f32[12]{0} get-tuple-element(%a.1), index=0
  %product.7 = (f32[12]{0}, s8[4]{0}) custom-call(%element.1), custom_call_target="__cublas$lt$matmul"
  ROOT %copy.1 = f32[12]{0} copy(%element.1)
}

%false_branch (a: (f32[12])) -> f32[12] {
  %b.1 = (f32[12]{0}) parameter(0)
  ROOT %zeros.1 = f32[12]{0} broadcast(%b.1), dimensions={}
}

%body (s: (s32[], f32[12])) -> (s32[], f32[12]) {
  %s.1 = (s32[], f32[12]{0}) parameter(0)
  %i.1 = s32[] get-tuple-element(%s.1), index=0
  %fusion.3 = (f32[12]{0}, s32[12]{0}) fusion(%i.1), kind=kCustom, calls=%fused_sort
  %conditional.1 = f32[12]{0} conditional(%i.1, %i.1, %i.1), true_computation=%true_branch, false_computation=%false_branch
  ROOT %out.1 = (s32[], f32[12]{0}) tuple(%i.1, %conditional.1)
}

%cond (s: (s32[], f32[12])) -> pred[] {
  ROOT %true.1 = pred[] constant(true)
}

ENTRY %main (x: f32[12]) -> (s32[], f32[12]) {
  %x.1 = f32[12]{0} parameter(0)
  %scattered.1 = f32[3,4]{1,0} scatter(%x.1, %x.1, %x.1), to_apply=%add
  ROOT %while.1 = (s32[], f32[12]{0}) while(%x.1), condition=%cond, body=%body, backend_config={"known_trip_count":{"n":"5"}}
}
"""


def test_a_program_is_counted_as_it_runs():
    found = aot.summary(PROGRAM)
    # A scatter, and five times a sort, a product and a copy.
    assert found["launches"] == 1 + 5 * 3 and found["conditionals"] == 5
    assert found["sorts"] == {"12": 5} and found["scatters"] == {"12": 1}
    assert found["calls"] == {"__cublas$lt$matmul": 5} and found["loops_counted_once"] == 0
    endless = aot.summary(PROGRAM.replace("known_trip_count", "some_count"))
    assert (endless["launches"], endless["loops_counted_once"]) == (1 + 3, 1)
    rows = {"a": found | {"temporary_gib": 0.5, "arguments_gib": 0.1}, "b": {"refused": "does not fit"}}
    page = aot.table(rows, []).splitlines()
    assert page[2] == "| a | 16 | 5 | 0.5 | 0.1 | 5 x 12 | 1 x 12 | 5 x cublas$lt$matmul |"
    assert page[-1] == "* not there: b (does not fit)"


def test_shards_are_compared_by_what_they_compute():
    of = aot.branches
    moved = PROGRAM.replace("f32[12]{0} copy(", "f32[12]{1} copy(")
    renamed = PROGRAM.replace("%product.7", "%product.8")
    other = PROGRAM.replace("__cublas$lt$matmul", "__cublas$gemm")
    laid = PROGRAM.replace("(f32[12]{0}, s8[4]{0}) custom-call", "(f32[12]{1}, s8[4]{0}) custom-call")
    programs = {"a": PROGRAM, "renamed": renamed, "moved": moved, "other": other, "laid out": laid}
    rows = aot.compare({name: of(text) for name, text in programs.items()})
    assert [row["the_same"] for row in rows] == [1, 0, 0, 0]
    assert [row["the_same_but_for_moves"] for row in rows] == [0, 1, 0, 0]
    assert [len(row["different"]) for row in rows] == [0, 0, 1, 1]


def test_cases_grow_with_the_table_of_algorithms():
    names = [name for name, *_ in aot.cases(aot.Args())]
    assert len(set(names)) == len(names)
    for recipe in RECIPES:
        assert {f"{recipe}-resnet-update", f"{recipe}-mlp-act", f"{recipe}-resnet-8-shards-on-8"} <= set(names)


# -------------------------------------------------------------------------------------- what policy lag costs


def lag_run(folder: Path, rate: float, variant: str, seed: int, last: float, env_id: str = "CartPole-v1") -> None:
    """A run as it lies on disk, whose return rises from 10 to `last`."""
    folder = folder / f"{rate}-{variant}-{seed}"
    folder.mkdir(parents=True)
    e = dict(algorithm="ppo", env_id=env_id, learning_rate=rate, update_epochs=4, seed=seed, **lag.VARIANTS[variant])
    e |= dict(total_timesteps=int(lag.given(env_id, "--total-timesteps")))
    (folder / "config.json").write_text(json.dumps({"experiment": e}))
    row = lambda i, x, kl: dict(update=i, global_step=100 * i, seconds=i) | {
        "charts/episodic_return": x, "stats/lag_kl": kl, "stats/lag_ratio_max": 2.0, "stats/lag_effective_samples": 0.9
    }  # fmt: skip
    rows = [row(1, 10.0, 0.0), row(2, (10 + last) / 2, 0.01), row(3, last, 0.03)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    (folder / "result.json").write_text(json.dumps({"status": "finished"}))


@pytest.fixture
def kept_runs(tmp_path, monkeypatch):
    """Puts runs of an environment where `lag` keeps them, and reads them back."""
    monkeypatch.setattr(lag.machine, "RESULTS", tmp_path / "results")

    def keep(*env_ids):
        for env_id in env_ids:
            lag.keep(env_id, tmp_path / env_id)
        return [lag.as_run(run) for env_id in env_ids for run in kept.read(lag.place(env_id))]

    return keep


def test_lag_compares_every_variant_with_synchronous_runs_of_the_same_cells(tmp_path, kept_runs):
    folder = tmp_path / "CartPole-v1"
    for seed, noise in ((1, -10), (2, 0), (3, 10)):
        for rate, last in ((1e-3, 110), (3e-3, 210)):
            lag_run(folder, rate, lag.SYNCHRONOUS, seed, last + noise)
            lag_run(folder, rate, "none", seed, last - 50 + noise)
        lag_run(folder, 1e-3, "decoupled", seed, 110 + noise)  # not yet at the other rate
    lag_run(folder, 1e-3, "vtrace", 1, 110)  # of which one seed is no variant yet
    cells = lag.by_cell(kept_runs("CartPole-v1"))
    assert [set(variants) for variants in cells.values()] == [
        {"synchronous", "none", "decoupled"},
        {"synchronous", "none"},
    ]
    found = json.loads(json.dumps(lag.study(cells) | {"one_seed": []}))
    assert found["scores_0_and_1_are_returns"] == {"CartPole-v1": [10.0, 210.0]}  # the better cell's
    figure = lambda what: {name: row[what] and row[what][0] for name, row in found["variants"].items()}
    assert {name: row["cells"] for name, row in found["variants"].items()} == {
        "synchronous": 2,
        "none": 2,
        "decoupled": 1,
    }
    assert figure("iqm") == pytest.approx({"synchronous": 0.75, "none": 0.5, "decoupled": 0.5}, abs=1e-3)
    gaps = {"synchronous": None, "none": -0.25, "decoupled": 0.0}  # in its own cell
    assert figure("iqm_minus_synchronous") == pytest.approx(gaps, abs=1e-3)
    assert figure("improvement_over_synchronous") == {"synchronous": None, "none": 0.0, "decoupled": 0.5}
    assert found["variants"]["decoupled"]["iqm_along_the_run"][0] == pytest.approx(0.0)
    assert found["variants"]["decoupled"]["iqm_of_synchronous_there"][-1] == pytest.approx(0.5, abs=1e-3)
    assert found["cells"][0]["distance"]["none"]["lag_kl"] == pytest.approx(0.02)  # the first rollout has no lag
    assert found["suites"]["control"]["none"]["cells"] == 2 and found["suites"]["control"]["decoupled"]["cells"] == 1
    assert found["suites"]["control"]["none"]["score_minus_synchronous"][0] == pytest.approx(-0.25, abs=1e-3)
    [alike] = found["distance"]
    assert (alike["kl_from"], alike["kl_below"], alike["cells"]) == (0.01, 0.03, 2)
    assert alike["score_minus_synchronous"][0] == pytest.approx(-0.25, abs=1e-3)
    by_env = found["environments"]["CartPole-v1"]  # of the variants that both cells have
    assert {name: round(curve[-1], 2) for name, curve in by_env.items()} == {"synchronous": 0.75, "none": 0.5}
    assert "| none" in lag.tables(found) and lag.draw(found) is not None and lag.draw_environments(found) is not None


def test_lag_groups_by_step_size_the_variants_that_all_cells_have(tmp_path, kept_runs):
    envs = ("CartPole-v1", "LunarLander-v3")  # both with a rate of 5e-4 of their own
    for env_id, rate, seed in itertools.product(envs, (5e-4, 1.5e-3), (1, 2)):
        lag_run(tmp_path / env_id, rate, lag.SYNCHRONOUS, seed, 110, env_id)
        lag_run(tmp_path / env_id, rate, "none", seed, 60, env_id)
        if env_id == "CartPole-v1" or rate == 5e-4:
            lag_run(tmp_path / env_id, rate, "vtrace", seed, 90, env_id)
    cells = lag.by_cell(kept_runs(*envs))
    found = lag.study(cells)
    small, large = found["steps"]
    assert [(row["suite"], row["times_its_own_rate"], row["cells"]) for row in (small, large)] == [
        ("control", 1, 2),
        ("control", 3, 2),
    ]
    gaps = lambda row: {name: x["score_minus_synchronous"][0] for name, x in row["variants"].items()}
    assert gaps(small) == pytest.approx({"none": -0.5, "vtrace": -0.2}, abs=1e-3)
    assert gaps(large) == pytest.approx({"none": -0.5}, abs=1e-3)
    assert large["variants"]["none"]["lag_kl"] == pytest.approx(0.02)
    assert "| -0.50 (0.020) | -0.20 (0.020) |" in lag.tables(found | {"one_seed": []})


def test_lag_computes_how_many_times_as_many_steps_a_score_takes():
    line = lag.SHARES  # score x after a share x of the steps
    late = [0.0 if x < 0.2 else 0.8 * (x - 0.2) / 0.8 for x in line]
    assert lag.times_the_steps(late, line) == pytest.approx(
        {"0.25": 0.45 / 0.25, "0.5": 0.7 / 0.5, "0.75": 0.95 / 0.75}, abs=1e-3
    )
    assert lag.times_the_steps(0.6 * line, line) == {"0.25": 1.667, "0.5": 1.667, "0.75": None}


def test_lag_lists_cells_with_a_single_seed_separately(tmp_path, kept_runs):
    for variant, last in ((lag.SYNCHRONOUS, 30.0), ("none", 20.0)):
        lag_run(tmp_path / "Breakout-v5", 5e-4, variant, 1, last, "Breakout-v5")
        for seed in (1, 2):
            lag_run(tmp_path / "CartPole-v1", 5e-4, variant, seed, last)
    runs = kept_runs("Breakout-v5", "CartPole-v1")
    cells = lag.by_cell(runs)
    assert {env_id for env_id, _, _ in cells} == {"CartPole-v1"}
    [row] = lag.one_seed(runs)
    assert row["env_id"] == "Breakout-v5" and row["returns"] == {"synchronous": 30.0, "none": 20.0}
    assert row["lag_kl"]["none"] == pytest.approx(0.02)
    assert "| Breakout-v5" in lag.tables(lag.study(cells) | {"one_seed": [row]})


def test_lag_leaves_out_environments_in_which_nothing_was_learnt(tmp_path, kept_runs, capsys):
    for env_id, last in (("CartPole-v1", 20.0), ("LunarLander-v3", 9.0)):
        for seed, variant in itertools.product((1, 2), (lag.SYNCHRONOUS, "none")):
            lag_run(tmp_path / env_id, 1e-3, variant, seed, last, env_id)
    cells = lag.learnable(lag.by_cell(kept_runs("CartPole-v1", "LunarLander-v3")))
    assert list(cells) == [("CartPole-v1", 1e-3, 4)]
    assert "LunarLander-v3 is left out" in capsys.readouterr().out


def test_lag_trains_only_runs_that_are_not_kept_yet_and_keeps_finished_ones(tmp_path, kept_runs, monkeypatch):
    args = lag.Args(seeds=2, rates=(1.0,), epochs=(4,), variants=("none",), dir=tmp_path / "runs")
    made = []

    def sweep(words, check):
        variant = lag.SYNCHRONOUS if "--no-concurrency" in words else "none"
        made.append(variant)
        for seed in (1, 2):
            lag_run(Path(words[words.index("--dir") + 1]), 5e-4, variant, seed, 100)

    monkeypatch.setattr(lag.subprocess, "run", sweep)
    lag_run(tmp_path / "CartPole-v1", 5e-4, "none", 1, 100)
    lag_run(tmp_path / "CartPole-v1", 5e-4, "none", 2, 100)
    shutil.rmtree(tmp_path / "CartPole-v1" / "0.0005-none-2")
    assert len(kept_runs("CartPole-v1")) == 1
    lag.train("CartPole-v1", args)
    assert made == [lag.SYNCHRONOUS, "none"]  # of none a seed was missing
    assert len(kept.read(lag.place("CartPole-v1"))) == 4
    lag.train("CartPole-v1", args)
    assert len(made) == 2
    lag_run(tmp_path / "CartPole-v1", 5e-4, "vtrace", 3, 100)
    (tmp_path / "CartPole-v1" / "0.0005-vtrace-3" / "result.json").unlink()  # as it is while it runs
    assert len(kept_runs("CartPole-v1")) == 4
    place = lag.place("CartPole-v1")
    stopped = kept.read(place)[0]
    kept.add(place, [stopped | {"status": "interrupted", "experiment": stopped["experiment"] | {"seed": 7}}])
    assert len(kept.read(place)) == 5 and len(lag.finished(place)) == 4


def test_lag_trains_what_it_says():
    own = {"-v4": 3e-4, "MinAtar": 1e-3}  # those of their kind; 5e-4 is the study's
    for env_id in (*lag.ENVIRONMENTS, *lag.ATARI):
        words = lag.settings(env_id)
        assert lag.own_rate(env_id) == next((rate for name, rate in own.items() if name in env_id), 5e-4), env_id
        assert words.count("--num-envs") <= 1 and "--total-timesteps" in words
    assert lag.variant({}) == "none" and lag.variant({"lag_correction": "both", "lag_trace_cap": 3.0}) is None
    for name in lag.VARIANTS:
        for env_id in ("CartPole-v1", "Hopper-v4"):
            words = ["--env-id", env_id, *lag.flags(name)]
            config = parse(RECIPES["ppo"], words)
            assert lag.variant(asdict(resolve(RECIPES["ppo"], config.typed, "cpu").experiment)) == name


def test_curves_are_kept_once_each_and_can_be_drawn_again(tmp_path, monkeypatch):
    flags = (*TINY, "--total-timesteps", "640")
    for seed in ("1", "2"):
        assert command("ppo", *flags, "--seed", seed, "--run-dir", tmp_path / "runs" / seed).code == 0
    monkeypatch.setattr(keep_curves.machine, "RESULTS", tmp_path)
    monkeypatch.setattr(keep_curves, "ROOT", tmp_path)
    (tmp_path / "static").mkdir()
    keep_curves.main(keep_curves.Args("games", (tmp_path / "runs" / "1",)))
    keep_curves.main(keep_curves.Args("games", (tmp_path / "runs",)))  # one of them again
    runs = [json.loads(line) for line in (tmp_path / "curves_games.jsonl").read_text().splitlines()]
    assert [run["experiment"]["seed"] for run in runs] == [1, 2]
    for run in runs:
        result = json.loads((tmp_path / "runs" / str(run["experiment"]["seed"]) / "result.json").read_text())
        assert run["params_digest"] == result["params_digest"]
        assert run["returns"][-1] == pytest.approx(result["episodic_return"], rel=1e-4)
        assert len(run["steps"]) == len(run["returns"]) <= kept.POINTS
    shutil.rmtree(tmp_path / "runs")
    keep_curves.main(keep_curves.Args("games"))
    assert "|     2 |" in (tmp_path / "curves_games.md").read_text() and (tmp_path / "static" / "games.png").exists()


def test_of_one_experiment_the_longer_curve_is_kept():
    short = {"experiment": {"env_id": "A", "algorithm": "ppo", "seed": 1}, "steps": [1, 2]}
    longer = {**short, "steps": [1, 2, 3]}
    assert kept.merge([longer], [short]) == [longer] == kept.merge([short], [longer])
