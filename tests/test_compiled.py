"""Compiled programs are found again at the next start, if they fit this machine."""

import os
import sys
import threading
import time

import jax
import pytest
from launch import ROOT, TINY, finish, python, read_result

from cleanba import kernels
from cleanba.config import Placement
from cleanba.recipes import RECIPES
from cleanba.runtime import compilation_cache
from cleanba.runtime.devices import find_devices
from cleanba.runtime.process_setup import use_batch_scheduling

sys.path.append(str(ROOT / "benchmarks"))
import programs


@pytest.fixture
def no_folder(tmp_path, monkeypatch):
    """As in a process where nobody chose a folder for JAX; the user's is in `tmp_path`."""
    names = ["jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs"]
    names.append("jax_persistent_cache_min_entry_size_bytes")
    before = {name: getattr(jax.config, name) for name in names}
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    jax.config.update(names[0], None)
    yield
    for name, value in before.items():
        jax.config.update(name, value)


def test_a_cache_folder_that_the_user_chose_is_kept():
    chosen = jax.config.jax_compilation_cache_dir
    assert chosen  # by compiled.py, beside this file
    compilation_cache.keep_compiled_programs()
    assert jax.config.jax_compilation_cache_dir == chosen


def test_the_default_is_the_users_folder_for_caches(no_folder, tmp_path):
    compilation_cache.keep_compiled_programs()
    folder = compilation_cache.cache_folder()
    assert jax.config.jax_compilation_cache_dir == str(folder)
    assert folder.is_dir() and folder.parent == tmp_path / "cleanba" / "xla"


def test_the_cache_can_be_turned_off(no_folder, tmp_path):
    jax.config.update("jax_enable_compilation_cache", False)
    try:
        compilation_cache.keep_compiled_programs()
    finally:
        jax.config.update("jax_enable_compilation_cache", True)
    assert jax.config.jax_compilation_cache_dir is None and list(tmp_path.iterdir()) == []


def test_a_run_goes_on_without_room_for_the_cache(no_folder, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    compilation_cache.keep_compiled_programs()
    assert jax.config.jax_compilation_cache_dir is None


def test_a_run_goes_on_without_a_home_directory(no_folder, monkeypatch):
    """HOME is not set, and the system knows no such user: as in a container."""
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr("os.getuid", lambda: 987654)
    compilation_cache.keep_compiled_programs()
    assert jax.config.jax_compilation_cache_dir is None


@pytest.mark.parametrize("name", ["PJRT_NPROC", "JAX_NUM_CPU_DEVICES", "XLA_FLAGS"])
def test_programs_for_other_numbers_of_threads_are_cached_elsewhere(name, monkeypatch):
    one = compilation_cache.cache_folder()
    assert one == compilation_cache.cache_folder()
    monkeypatch.setenv(name, "3")
    assert one != compilation_cache.cache_folder()


@pytest.mark.parametrize("name", ["cpu_model", "instructions"])
def test_programs_for_other_processors_are_cached_elsewhere(name, monkeypatch):
    assert compilation_cache.instructions()
    one = compilation_cache.cache_folder()
    monkeypatch.setattr(compilation_cache, name, lambda: "another")
    assert one != compilation_cache.cache_folder()


@pytest.mark.parametrize("name", RECIPES)
def test_the_update_of_every_seed_is_one_program(name):
    def lowered(**fields: object) -> str:
        sizes = {"num_envs": 8, "num_actors": 1, "hiddens": (8,), "total_timesteps": 100_000}
        program = programs.make(RECIPES[name], programs.VARIANTS["mlp"] | sizes | fields, 1, "cpu")
        return programs.trace_update(program, find_devices(Placement())).lower().as_text()

    one = lowered(seed=1)
    assert one == lowered(seed=2)
    assert name != "ppo" or one != lowered(seed=1, gamma=0.5)


def test_unused_programs_are_removed_from_the_cache(tmp_path):
    old = time.time() - (compilation_cache.UNUSED_DAYS + 1) * 86400
    now = time.time()
    useless = f"jit_{compilation_cache.OF_ONE_PROCESS}-3-cache"
    for name, used in (("jit_update-1-cache", now), ("jit_update-2-cache", old), (useless, now)):
        (tmp_path / name).touch()
        os.utime(tmp_path / name, (used, old))
    compilation_cache.clean(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["jit_update-1-cache"]


# The command, without launch.py's settings for a cache of the tests.
START = """
import os
for name in ("DIR", "MIN"):
    for variable in [v for v in os.environ if "CACHE_" + name in v]:
        del os.environ[variable]
from cleanba.cli import main
main()
"""


@pytest.mark.slow
@pytest.mark.skipif(not kernels.expected(), reason="where no kernel runs, the scan holds its pool's address")
def test_the_second_start_compiles_less_and_trains_the_same_bits(tmp_path):
    digests, files = [], []
    for number in ("one", "two"):
        words = ["-c", START, "ppo", *TINY, "--collector", "scanned", "--run-dir", tmp_path / number]
        ended = finish(python(*words, XDG_CACHE_HOME=str(tmp_path / "home"), PYTHONWARNINGS=""))
        assert ended.code == 0 and "persistent compilation cache" not in ended.err, ended.err
        digests.append(read_result(tmp_path / number)["learner_digest"])
        names = {path.name: path for path in (tmp_path / "home").glob("cleanba/xla/*/*")}
        files.append({name: path.stat().st_mtime_ns for name, path in names.items() if name.endswith("-cache")})
    assert digests[0] == digests[1]
    assert {"jit_update", "jit_scan_envs"} <= {name.partition("-")[0] for name in files[0]}
    assert files[0] == files[1], "the second start finds all that the first one compiled, the scan of EnvPool too"


@pytest.mark.skipif(not hasattr(os, "SCHED_BATCH"), reason="Linux only")
@pytest.mark.parametrize("chosen, then", [("SCHED_OTHER", "SCHED_BATCH"), ("SCHED_IDLE", "SCHED_IDLE")])
def test_threads_are_scheduled_as_batch_unless_the_user_chose_a_policy(chosen, then):
    found = []
    note = lambda: found.append(os.sched_getscheduler(0))

    def start():  # a policy is a thread's own
        os.sched_setscheduler(0, getattr(os, chosen), os.sched_param(0))
        use_batch_scheduling()
        note()
        later = threading.Thread(target=note)
        later.start()
        later.join()

    thread = threading.Thread(target=start)
    thread.start()
    thread.join()
    assert found == [getattr(os, then)] * 2
