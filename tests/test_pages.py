"""The commands and the Python code in README and documentation: each is run at a small size, or says why it is not."""

import re
import shlex
import shutil
from pathlib import Path
from typing import NamedTuple

import pytest
from launch import ROOT, command, finish, python

from cleanba.config import fields_of, flag
from cleanba.recipes import RECIPES

WRITTEN = sorted(page for page in ROOT.glob("docs/**/*.md") if not page.is_symlink())  # links stand where pages were
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *WRITTEN]
PLACEMENT = "docs/guides/placement.md"  # compares placements: tests/test_placement.py runs it
BLOCK = re.compile(r"^```(bash|python)\n(.*?)^```\n(?:\n?<!-- not run: (.+?) -->)?", re.M | re.S)

# Appended to every command that trains, as far as it has such a flag; the last of two flags holds.
SMALL = {
    **{"num_envs": 12, "num_steps": 4, "total_timesteps": 288, "num_minibatches": 1, "update_epochs": 1},
    **{"hiddens": 8, "channels": 4, "lstm_size": 8, "log_frequency": 1, "env_epoch": 400},
    **{"learning_starts": 48, "batch_size": 12, "buffer_size": 480, "train_frequency": 12},
    **{"collector": "stepped", "target_network_frequency": 12, "burn_in": 1, "sequence_length": 3},
    "env_workers": 0,
}


class Block(NamedTuple):
    """A fenced block of a page."""

    language: str
    text: str
    why_not: str
    """why it is not run; empty where it is"""


def blocks(page: Path) -> list[Block]:
    return [Block(*found) for found in BLOCK.findall(page.read_text())]


def runs(page: Path, language: str) -> list[Block]:
    return [block for block in blocks(page) if block.language == language and not block.why_not]


def having(language: str) -> list[pytest.param]:
    """The pages that have such blocks, which are run."""
    return [pytest.param(page, id=str(page.relative_to(ROOT))) for page in PAGES if runs(page, language)]


def lines(text: str, known: dict[str, str]) -> list[list[str]]:
    """The words of each command of a block; `known` are its variables, which it may set."""
    found = []
    for line in text.replace("\\\n", " ").splitlines():
        words = shlex.split(re.sub(r"\$(\w+)", lambda name: known[name[1]], line), comments=True)
        if words[:1] == ["export"]:
            continue  # the tests have devices enough
        if len(words) == 1 and (assigned := re.fullmatch(r"(\w+)=(.*)", words[0])):
            known[assigned[1]] = assigned[2]
        elif words:
            found.append(words)
    return found


def small(words: list[str]) -> list[str]:
    """A command's words after `cleanba`, with the flags that make it small."""
    name = words[0]
    if name == "sweep" and "--" in words:
        at = words.index("--")
        return [*words[:at], "--num-seeds", "1", "--", *small(words[at + 1 :])]
    if name == "eval":
        return [*words, "--episodes", "2", "--max-steps", "40"]
    if name not in RECIPES or "--experiment" in words:  # which takes nothing that differs
        return words
    own = {n for n, f in fields_of(RECIPES[name].experiment).items() if f.offered} | {"log_frequency", "env_workers"}
    return [*words, *(str(word) for n, value in SMALL.items() if n in own for word in (flag(n), value))]


def test_no_page_hides_a_command_from_this_test():
    hidden = [f"{page.relative_to(ROOT)}: {line}" for page in PAGES for line in page.read_text().splitlines()
              if re.match(r"(    |\t)(\$ )?(cleanba|make|pip|python|slurm/submit) ", line)]  # fmt: skip
    fenced = {line for page in PAGES for block in blocks(page) for line in block.text.splitlines()}
    assert [line for line in hidden if line.partition(": ")[2] not in fenced] == []


def test_what_is_not_run_says_why():
    for page in PAGES:
        for block in blocks(page):
            other = [words for words in lines(block.text, {}) if words[0] != "cleanba"] if not block.why_not else []
            assert block.language == "python" or other == [], f"{page.relative_to(ROOT)}: mark it, or run it"
            assert block.why_not == "" or len(block.why_not.split()) >= 3


@pytest.fixture(scope="session")
def trained(tmp_path_factory) -> Path:
    """A run, for pages that speak of one."""
    run_dir = tmp_path_factory.mktemp("pages") / "run"
    words = small(["ppo", "--env-id", "CartPole-v1", "--eval-frequency", "2", "--eval-episodes", "1"])
    ended = command(*words, "--eval-max-steps", "20", "--run-dir", run_dir)
    assert ended.code == 0, ended.err
    return run_dir


def own_modules(folder: Path) -> None:
    """The modules that pages speak of as the reader's."""
    for file in ROOT.glob("docs/examples/*.py"):
        shutil.copy(file, folder)
    text = (ROOT / "docs/examples/corridor_gymnasium.py").read_text()
    (folder / "my_package.py").write_text(text.replace("Corridor", "MyEnv"))


@pytest.fixture(scope="session")
def earlier() -> dict[tuple[str, ...], Path]:
    """Commands that have trained, for some page -> the run's directory: several pages have the same commands."""
    return {}


def perform(words: list[str], earlier: dict[tuple[str, ...], Path], exhaustive: bool) -> None:
    """`cleanba WORDS`; the run of a training that was done before is copied.

    If nothing else on the page uses the run, only one such command per algorithm trains, or all if `exhaustive`; the
    others are checked up to the start of the run.
    """
    where = words.index("--run-dir") if "--run-dir" in words else len(words)
    run_dir, rest = Path(words[where + 1] if where < len(words) else ""), tuple(words[:where] + words[where + 2 :])
    trains = words[0] in RECIPES and "--experiment" not in words and "--show-config" not in words
    if trains and not run_dir.name and not exhaustive and words[0] in {before[0] for before in earlier}:
        words, trains = [*words, "--show-config"], False
    if trains and rest in earlier and not (run_dir.name and run_dir.exists()):
        if run_dir.name and earlier[rest].name:
            shutil.copytree(earlier[rest], run_dir)
            return
        if not run_dir.name:
            return
    ended = command(*words)
    assert ended.code == 0, f"cleanba {shlex.join(words)}\n{ended.err}"
    if trains:
        earlier[rest] = run_dir.absolute() if run_dir.name else Path()


def run_commands(page: Path, trained: Path, earlier: dict[tuple[str, ...], Path], exhaustive: bool) -> None:
    """Run the commands of a page, in this directory."""
    own_modules(Path())
    known: dict[str, str] = {}
    for block in runs(page, "bash"):
        for _, *words in lines(block.text, known):
            if words[0] not in RECIPES:
                folder = r"runs/$" if words[0] == "sweep" else r"runs/$|sweeps/"
                for named in [word for word in words if re.match(rf"runs/|{folder}", word) and not Path(word).exists()]:
                    shutil.copytree(trained, Path(named) / "a" if re.match(folder, named) else named)
            perform(small(words), earlier, exhaustive)


@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page in having("bash") if page.id != PLACEMENT])
def test_the_commands_of_a_page_run(page, tmp_path, trained, earlier, monkeypatch, request):
    monkeypatch.chdir(tmp_path)
    run_commands(page, trained, earlier, request.config.getoption("exhaustive"))


@pytest.mark.slow
@pytest.mark.parametrize("page", having("python"))
def test_the_python_of_a_page_runs_as_it_stands_and_prints_what_it_says(page, tmp_path):
    own_modules(tmp_path)
    code = "\n".join(block.text for block in runs(page, "python"))
    (tmp_path / "examples.py").write_text(f"import os; os.chdir({str(tmp_path)!r})\n{code}")
    ended = finish(python(tmp_path / "examples.py", JAX_NUM_CPU_DEVICES="8"))
    assert ended.code == 0, ended.err
    if page.name == "README.md":
        assert ended.out.splitlines() == re.findall(r"^print\(.*\)\s+# (.*)$", code, re.M)
