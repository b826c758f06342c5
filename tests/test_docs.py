"""What the documentation names exists: the places in the code, and the flags."""

import ast
import dataclasses
import os
import re
import shlex
import subprocess
from collections.abc import Iterable
from fnmatch import fnmatch
from functools import cache
from pathlib import Path

import pytest
from launch import command, read_rows

from cleanba.agents import evaluate
from cleanba.cli import COMMANDS
from cleanba.config import Placement, Run, fields_of, flag
from cleanba.help import written_flag
from cleanba.recipes import RECIPES
from cleanba.runtime import training_log
from cleanba.train_flags import parse

ROOT = Path(__file__).parents[1]
WRITTEN = [page for page in ROOT.glob("docs/**/*.md") if not page.is_symlink()]  # links stand where pages were
PAGES = sorted([*WRITTEN, ROOT / "README.md", ROOT / "CONTRIBUTING.md"])
ALGORITHMS = sorted(ROOT.glob("docs/algorithms/*.md"))

# Pages that moved into folders: links stand at their old addresses.
MOVED = ["architecture", "clusters", "continuous", "details", "determinism", "dqn", "environments", "evaluation", "gpu"]
MOVED += ["performance", "plots", "policy-lag", "presets", "python", "recovery", "recurrent", "sac_td3", "trust"]

REFERENCE = re.compile(r"`([\w/]+\.py): ([\w.]+)`")
FLAG = re.compile(r"(?<![\w-])--(?!xla_)[a-z][a-z0-9_-]*")

OTHERS = {"--help", "--help-all", "--preset", "--show-config", "--version"}  # of every command
OTHERS |= {"--logdir", "--exhaustive"}  # TensorBoard's, our tests'
OTHERS |= {"--nodes", "--no-kill", "--gres", "--container-image"}  # Slurm's
OTHERS |= {"--local-num-envs", "--num-actor-threads", "--gradient-accumulation-steps"}  # the original Cleanba's
OTHERS |= {"--cuda", "--target-kl", "--torch-deterministic"}  # CleanRL's
OTHERS |= {"--env", "--restart_behavior", "--num_workers", "--num_envs_per_worker", "--with_vtrace", "--use_rnn"}
OTHERS |= {
    "--rnn_size",
    "--normalize_input",
    "--experiment",
    "--train_for_env_steps",
}  # Sample Factory's, and those of the line before


@cache
def names_in(file: Path) -> frozenset[str]:
    """Functions and classes of a file at any depth, its globals, and what its classes hold as `Class.name`."""
    names = set()
    tree = ast.parse(file.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        holder = {tree: ""}.get(node, f"{node.name}." if isinstance(node, ast.ClassDef) else None)
        for child in node.body if holder is not None else ():
            if isinstance(child, ast.FunctionDef):
                names.add(holder + child.name)
            elif isinstance(child, ast.AnnAssign) and isinstance(child.target, ast.Name):
                names.add(holder + child.target.id)
            elif isinstance(child, ast.Assign):
                names |= {holder + target.id for target in child.targets if isinstance(target, ast.Name)}
    return frozenset(names)


def references(page: Path) -> list[tuple[str, str]]:
    return sorted(set(REFERENCE.findall(page.read_text())))


@pytest.mark.parametrize("name", MOVED)
def test_the_old_address_of_a_page_still_leads_to_it(name):
    page = ROOT / "docs" / f"{name}.md"
    assert page.is_symlink() and page.resolve() in WRITTEN


def test_no_link_to_a_page_is_forgotten_here():
    assert {page.stem for page in ROOT.glob("docs/*.md") if page.is_symlink()} == set(MOVED)


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150


def test_the_details_name_many_places():
    named = {place for page in ALGORITHMS for place in references(page)}
    assert len(named) >= 40
    files = {file for file, _ in named}
    assert {f"algorithms/{name}.py" for name in ("ppo", "impala", "optimiser")} <= files
    assert {"ops/returns.py", "ops/losses.py", "environments/envpool.py"} <= files


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_place_that_is_named_exists(page):
    missing = []
    for file, name in references(page):
        path = ROOT / "cleanba" / file
        if not path.exists() or name not in names_in(path):
            missing.append(f"{file}: {name}")
    assert not missing


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_file_that_is_linked_or_named_exists(page):
    text = page.read_text()
    links = {link.partition("#")[0] for link in re.findall(r"\]\(([^)\s]+)\)", text)}
    missing = [link for link in links if not re.match("https?:", link) and not (page.parent / link).exists()]
    modules = set(re.findall(r"`([\w/]+\.py)`", text))
    beside = [*ROOT.glob("cleanba/*/")]  # a table may name a folder first, and then the files in it
    places = lambda module: [ROOT / "cleanba" / module, ROOT / module, *(folder / module for folder in beside)]
    missing += [module for module in modules if not any(place.exists() for place in places(module))]
    assert not missing


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_row_of_the_tables_has_as_many_cells_as_its_head(page):
    for table in re.findall(r"(?:^\|.*\n)+", page.read_text(), re.M):
        rows = [len(re.findall(r"(?<!\\)\|", row)) for row in table.splitlines()]
        assert len(set(rows)) == 1, table.splitlines()[rows.index(max(rows))]


@cache
def known_flags() -> frozenset[str]:
    """Flags of the commands, and those that the Makefile knows."""
    fields = {f.name: f for kind in (Placement, Run) for f in dataclasses.fields(kind)}
    for recipe in RECIPES.values():
        fields |= {f.name: f for f in dataclasses.fields(recipe.experiment)}
    flags = {f"--{name.replace('_', '-')}" for name in fields}
    flags |= {f"--no-{name.replace('_', '-')}" for name, f in fields.items() if isinstance(f.default, bool)}
    flags = flags - {"--experiment-from"} | {"--experiment"}
    flags |= flags_of(ROOT / f"{c.where.split(':')[0].replace('.', '/')}.py" for c in COMMANDS.values())
    return frozenset(flags | set(FLAG.findall((ROOT / "Makefile").read_text())) | OTHERS)


@cache
def flags_with_benchmarks() -> frozenset[str]:
    """The same, and those of the benchmarks."""
    return known_flags() | flags_of((ROOT / "benchmarks").glob("*.py"))


def flags_of(scripts: Iterable[Path]) -> set[str]:
    """The flags that are fields of classes in these files; the names of other fields, too."""
    return {written_flag(name) for path in scripts for name in re.findall(r"^    (\w+): ", path.read_text(), re.M)}


@pytest.mark.parametrize("recipe", RECIPES)
def test_known_flags_are_those_that_the_command_takes(recipe, capsys):
    with pytest.raises(SystemExit):
        parse(RECIPES[recipe], ["--help"])
    helped = set(FLAG.findall(re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out)))
    own = {flag(name) for name, f in fields_of(RECIPES[recipe].experiment).items() if f.offered}
    assert own <= helped
    assert "--experiment" in helped and helped <= known_flags()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_flag_that_is_named_exists(page):
    """Those of benchmarks in the lines that name one."""
    known = lambda line: flags_with_benchmarks() if "benchmarks/" in line else known_flags()
    lines = page.read_text().splitlines()
    assert {flag for line in lines for flag in FLAG.findall(line) if flag not in known(line)} == set()


@pytest.mark.parametrize("target", ["train", "pong"])
def test_the_makefile_trains_with_flags_that_there_are(target):
    ours = ("MAKEFLAGS", "MFLAGS", "MAKELEVEL", "MAKEOVERRIDES", "ARGS", "TRAIN_FLAGS", "PYTHON")  # of an outer make
    env = {name: value for name, value in os.environ.items() if name not in ours}
    shown = subprocess.run(["make", "-n", target], cwd=ROOT, env=env, capture_output=True, text=True)
    assert shown.returncode == 0, shown
    (line,) = [line for line in shown.stdout.splitlines() if " -m cleanba " in line]
    ended = command(*shlex.split(line.partition(" -m cleanba ")[2]), "--show-config")
    assert ended.code == 0 and "env_id" in ended.out, ended


SMALL = ("--num-envs", "4", "--num-steps", "8", "--total-timesteps", "160", "--hiddens", "8", "--log-frequency", "1")
SMALL += ("--collector", "stepped")
POLICY = (*SMALL, "--env-id", "Catch-v0", "--num-minibatches", "1")
REPLAY = (*SMALL, "--learning-starts", "32", "--batch-size", "4", "--buffer-size", "160", "--train-frequency", "16")
LOGGING = {
    "ppo": (*POLICY, "--eval-frequency", "2", "--eval-episodes", "2", "--save-model", "--update-epochs", "1"),
    "impala": POLICY,
    "dqn": (*REPLAY, "--env-id", "Catch-v0", "--prioritised"),
    "pqn": POLICY,
    "r2d2": (*REPLAY, "--env-id", "Catch-v0", "--burn-in", "2", "--sequence-length", "6", "--lstm-size", "8"),
    "sac": (
        *REPLAY,
        "--env-id",
        "Pendulum-v1",
        "--max-episode-steps",
        "9",
        "--eval-frequency",
        "2",
        "--eval-max-steps",
        "5",
    ),
    "td3": (*REPLAY, "--env-id", "Pendulum-v1", "--max-episode-steps", "9"),
}


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES)
def test_the_tables_of_metrics_and_of_files_have_what_a_run_leaves(recipe, tmp_path):
    ended = command(recipe, *LOGGING[recipe], "--run-dir", tmp_path / "run")
    assert ended.code == 0, ended.err
    logged = {name for row in read_rows(tmp_path / "run") for name in row}
    evaluated = {name for name in logged if name.startswith("eval/")}
    assert logged - evaluated == {*training_log.LOGGED, *RECIPES[recipe].logs}
    assert evaluated <= set(evaluate.LOGGED) and bool(evaluated) == ("--eval-frequency" in LOGGING[recipe])
    page = (ROOT / "docs/reference/files.md").read_text()
    listed = {
        name.rstrip("/") for row in re.findall(r"^\| (`.*?`) \|", page, re.M) for name in re.findall(r"`(.*?)`", row)
    }
    found = {path.name for path in (tmp_path / "run").iterdir()}
    assert [name for name in found if not any(fnmatch(name, pattern) for pattern in listed)] == []
