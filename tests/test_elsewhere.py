"""Other machines: every locked package has a wheel for them, and training works without what only Linux has."""

import json
import re
import tomllib

import pytest
from launch import ROOT, TINY, finish, python

LOCKED = tomllib.loads((ROOT / "poetry.lock").read_text())["package"]
PLACES = {
    "macOS on ARM": r"any|macosx_\d+_\d+_(arm64|universal2)",
    "Linux on ARM": r"any|manylinux\S*_aarch64",
    "Linux on x86-64": r"any|manylinux\S*_x86_64",
}
FOR_GPUS = re.compile(r"nvidia-|jax-cuda|triton")  # of the extras cuda12 and cuda13, which are for Linux
# Packages of the extra box2d; without it all have wheels.
LACKING = {
    ("Linux on ARM", "3.11"): {"box2d"},
    ("Linux on ARM", "3.12"): {"box2d"},
    ("Linux on ARM", "3.13"): {"box2d"},
}
LACKING |= {(place, "3.14"): {"box2d", "pygame"} for place in PLACES}


def fits(wheel: str, place: str, version: str) -> bool:
    """Whether pip would take this wheel there: its file's name is NAME-VERSION-PYTHON-ABI-PLATFORM.whl."""
    *_, pythons, abi, platform = wheel.removesuffix(".whl").split("-")
    minor = int(version.removeprefix("3."))
    newest = [int(tag[3:]) for tag in pythons.split(".") if re.fullmatch(r"cp3\d+", tag)]
    stable = "abi3" in abi and any(n <= minor for n in newest)
    return any(re.fullmatch(PLACES[place], tag) for tag in platform.split(".")) and (
        "py3" in pythons.split(".") or minor in newest or stable
    )


@pytest.mark.parametrize("version", ["3.11", "3.12", "3.13", "3.14"])
@pytest.mark.parametrize("place", PLACES)
def test_every_locked_package_has_a_wheel(place, version):
    found: dict[str, bool] = {}  # by name: some are locked in several versions, each for some Pythons
    for package in LOCKED:
        if "main" in package["groups"] and not FOR_GPUS.match(package["name"]):
            wheels = [file["file"] for file in package["files"] if file["file"].endswith(".whl")]
            there = any(fits(wheel, place, version) for wheel in wheels)
            here_only = "sys_platform" in str(package.get("markers", "")) and place != "Linux on x86-64"
            found[package["name"]] = found.get(package["name"], False) or there or here_only
    assert len(found) > 50
    assert {name for name, there in found.items() if not there} == LACKING.get((place, version), set())


ELSEWHERE = """
import os, platform, sys
import jax, envpool, gymnasium  # which know where they are
for name in [n for n in dir(os) if n.lower().startswith("sched_")]:
    delattr(os, name)
platform.system, platform.machine = lambda: "Darwin", lambda: "arm64"
from pathlib import Path
read, isdir = Path.read_text, os.path.isdir
def read_text(self, *args, **kwargs):
    if str(self).startswith("/proc"):
        raise FileNotFoundError(2, "No such file or directory", str(self))
    return read(self, *args, **kwargs)
Path.read_text = read_text
os.path.isdir = lambda path: path != "/dev/shm" and isdir(path)
import pkgutil, importlib, cleanba
for module in pkgutil.walk_packages(cleanba.__path__, "cleanba."):
    if not module.name.endswith("__main__"):
        importlib.import_module(module.name)
from cleanba import cli
cli.main(sys.argv[1:])
"""


def test_training_works_without_what_only_linux_has(tmp_path):
    """Scheduling policies, /proc and /dev/shm are gone, and the processor is another one: plain JAX computes."""
    words = (*TINY, "--env-id", "gymnasium:CartPole-v1", "--env-workers", "2", "--eval-frequency", "3")
    ended = finish(python("-c", ELSEWHERE, "ppo", *words, "--eval-episodes", "1", "--run-dir", tmp_path))
    assert ended.code == 0, ended.err
    assert json.loads((tmp_path / "result.json").read_text())["status"] == "finished"
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["cpu_products"] == "xla" and config["processor"]["machine"] == "arm64"
