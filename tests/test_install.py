"""What an installation has: the extras of pyproject.toml, messages where one is missing, and whole installs, by turns.

Whole installs take minutes and a package index, so each day tries one Python and one extra.  INSTALL="3.12 video" names
others, INSTALL=all tries every pair.
"""

import importlib
import json
import os
import re
import shutil
import subprocess
import sys
import textwrap
import tomllib
from itertools import product
from pathlib import Path

import pytest
from launch import ROOT, command, finish, python

from cleanba.errors import UsageError
from cleanba.runs.aggregates import by_games

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
PYTHONS = ("3.11", "3.12", "3.13")
CHECKS = {  # that an extra has brought what it is for: words for cleanba, and what they print
    "hub": (("eval", "hf://a/b/c"), "names no repository"),
    "track": None,
    "video": (("eval", "runs/cartpole", "--episodes", "1", "--video"), ".mp4"),
    "jax-envs": (("envs", "gymnax:Breakout-MinAtar"), "planes 10x10x4"),
    "box2d": (("envs", "gymnasium:LunarLander-v3"), "one of 4 actions"),
    "export": (("export", "runs/cartpole"), "the same greedy actions"),
}
MODULES = {
    "hub": ("huggingface_hub",),
    "track": ("wandb",),
    "video": ("imageio", "imageio_ffmpeg"),
    "jax-envs": ("gymnax", "craftax", "six"),
    "box2d": ("Box2D",),
    "export": ("jax2onnx", "onnx", "onnxruntime", "flatbuffers"),
}


def test_the_extra_all_has_every_extra_but_those_of_one_kind_of_gpu():
    parts = {need for name, needs in EXTRAS.items() if name not in ("all", "cuda12", "cuda13") for need in needs}
    assert set(EXTRAS["all"]) == parts
    assert set(CHECKS) == set(MODULES) == set(EXTRAS) - {"all", "cuda12", "cuda13"}


# --------------------------------------------------------------------------------------------- without an extra


def without(monkeypatch, *modules: str) -> None:
    """Imports of these fail, as where they are not installed."""
    for module in modules:
        for name in [name for name in sys.modules if name.partition(".")[0] == module]:
            monkeypatch.delitem(sys.modules, name)
        monkeypatch.setitem(sys.modules, module, None)


@pytest.mark.parametrize(
    ("absent", "extra", "words"),
    [
        ("imageio_ffmpeg", "video", ("ppo", "--env-id", "Catch-v0", "--capture-video", "--total-timesteps", "100000")),
        ("wandb", "track", ("ppo", "--env-id", "Catch-v0", "--track", "--total-timesteps", "100000")),
        ("huggingface_hub", "hub", ("eval", "hf://somebody/something")),
        ("huggingface_hub", "hub", ("ppo", "--env-id", "Catch-v0", "--upload-model", "--total-timesteps", "100000")),
        ("gymnax", "jax-envs", ("envs", "gymnax:CartPole-v1")),
        ("Box2D", "box2d", ("ppo", "--env-id", "gymnasium:LunarLander-v3")),
    ],
)
def test_what_needs_an_extra_says_so_in_one_sentence(monkeypatch, tmp_path, absent, extra, words):
    monkeypatch.chdir(tmp_path)
    without(monkeypatch, absent)
    if absent == "Box2D":
        for name in [name for name in sys.modules if name.startswith("gymnasium.envs.box2d.")]:
            monkeypatch.delitem(sys.modules, name)
    ended = command(*words)
    assert ended.code == 2 and "Traceback" not in ended.err and ended.err.count("\n") == 1, ended.err
    assert f"needs the module {absent}, which is not installed" in ended.err
    assert f"`pip install -e '.[{extra}]'` in a clone" in ended.err and f"'cleanba[{extra}] @ git+" in ended.err
    assert not list(tmp_path.rglob("config.json"))


def test_the_message_names_the_module_that_is_missing_and_not_the_one_that_asked_for_it(monkeypatch, tmp_path):
    from cleanba.environments import jax_envs

    (tmp_path / "gymnax").mkdir()
    (tmp_path / "gymnax/__init__.py").write_text("import absent_six")
    for name in [name for name in sys.modules if name.partition(".")[0] == "gymnax"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    with pytest.raises(UsageError, match=r"gymnax needs the module absent_six, .* `pip install -e '\.\[jax-envs\]'`"):
        jax_envs.require_library("gymnax")


def test_logs_do_not_import_torch(tmp_path):
    (tmp_path / "torch.py").write_text("print('torch is imported')")
    program = """
    import pathlib, sys
    from cleanba.runtime.metrics import Writers
    writers = Writers(pathlib.Path(sys.argv[1]), False, "", None, {})
    writers.write(1, 10, 1.0, {"charts/SPS": 1.0})
    writers.close()
    import torch  # one's own environments may
    """
    ended = finish(
        python("-c", textwrap.dedent(program), tmp_path, PYTHONPATH=f"{tmp_path}{os.pathsep}{ROOT}"), seconds=120
    )
    assert ended.code == 0 and ended.out == "torch is imported\n", ended.err
    assert len(list(tmp_path.glob("events.out.tfevents.*"))) == 1


def test_aggregates_are_rliables_without_it():
    import numpy as np
    from rliable import metrics  # type: ignore[import-untyped]

    names = ("median", "iqm", "mean", "optimality_gap")
    for shape in ((1, 1), (3, 5), (2, 7), (10, 26), (5, 1)):
        scores = np.random.default_rng(shape).normal(1, 1, shape)
        wanted = [getattr(metrics, f"aggregate_{name}")(scores) for name in names]
        np.testing.assert_allclose(by_games(list(scores.T)), wanted, rtol=1e-12)


# --------------------------------------------------------------------------------------------- whole installs


def todays() -> list[tuple[str, str]]:
    """The Pythons and extras that are tried now."""
    asked, pairs = os.environ.get("INSTALL", ""), list(product(PYTHONS, CHECKS))
    if asked == "all":
        return pairs
    version, _, extra = asked.partition(" ")
    of_the_day = pairs[int(os.environ["CLEANBA_TESTS_DAY"]) % len(pairs)]
    return [(version or of_the_day[0], extra or of_the_day[1])]


def interpreter(version: str) -> str | None:
    """A Python of that version, with its venv module: pyenv's, or the system's."""
    for path in (*Path.home().glob(f".pyenv/versions/{version}.*/bin/python"), shutil.which(f"python{version}")):
        if path is not None and subprocess.run([path, "-c", "import venv, ensurepip"]).returncode == 0:
            return str(path)
    return None


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize(("version", "extra"), todays())
def test_an_install_of_the_newest_packages_trains_and_plays(tmp_path, version, extra):
    """The wheel and one extra in a bare environment, unpinned; in the end without llvmlite, which is for some CPUs."""
    base = interpreter(version)
    if base is None:
        pytest.skip(f"there is no Python {version} here, with its venv module")
    run = lambda *words: subprocess.run(
        [*map(str, words)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env={k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "JAX_NUM_CPU_DEVICES", "XLA_FLAGS")},
    )
    run(base, "-m", "venv", "env")
    inside = tmp_path / "env/bin/python"
    # Most of what is installed is never imported, so it need not be compiled.
    pip = (inside, "-m", "pip", "-q", "--disable-pip-version-check", "install", "--no-compile")
    build = run(sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", "dist", ROOT)
    if build.returncode != 0 and re.search("install(ing)? build dependencies", build.stderr):
        pytest.skip(f"no package index: {build.stderr[-300:]}")
    (wheel,) = (tmp_path / "dist").glob("cleanba-*.whl")
    installed = run(*pip, f"{wheel}[{extra}]")
    if installed.returncode != 0 and re.search(
        r"timed out|Max retries|Connection (aborted|reset)|HTTP error (429|5\d\d)", installed.stderr
    ):
        pytest.skip(f"the package index fails: {installed.stderr[-300:]}")
    assert installed.returncode == 0, installed.stderr[-3000:]
    assert run(inside, "-m", "pip", "check").returncode == 0
    found = run(inside, "-c", f"import {', '.join(MODULES[extra])}" if MODULES[extra] else "")
    assert found.returncode == 0, found.stderr[-2000:]

    def cleanba(*words: str) -> str:
        ended = run(inside, "-m", "cleanba", *words)
        assert "Traceback" not in ended.stderr and (ended.returncode == 0 or extra == "hub"), ended.stderr[-3000:]
        return ended.stdout + ended.stderr

    assert "CartPole-v1" in cleanba("envs", "cartpole")
    assert "wrote templates/submit" in cleanba("slurm", "templates")
    few = ("--num-envs", "8", "--num-steps", "16", "--num-minibatches", "1", "--total-timesteps", "256")
    assert "finished" in cleanba("ppo", "--env-id", "CartPole-v1", *few, "--run-dir", "runs/cartpole")
    assert "return: mean" in cleanba("eval", "runs/cartpole", "--episodes", "2")
    atari = ("--env-id", "Pong-v5", "--network", "nature", "--max-episode-steps", "20", *few)
    assert "finished" in cleanba("ppo", *atari, "--run-dir", "runs/pong")
    if CHECKS[extra] is not None:
        words, printed = CHECKS[extra]
        assert printed in cleanba(*words)

    assert run(inside, "-m", "pip", "uninstall", "-q", "-y", "llvmlite").returncode == 0  # as on a Mac
    told = cleanba("ppo", "--env-id", "CartPole-v1", *few, "--run-dir", "runs/plain")
    assert "finished" in told and told.count("the package llvmlite does not load") == 1
    assert json.loads((tmp_path / "runs/plain/config.json").read_text())["cpu_products"] == "xla"
    shutil.rmtree(tmp_path / "env")  # gigabytes, which pytest would keep for a while
