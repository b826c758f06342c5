"""Runs from elsewhere: what they may choose, and that nothing else of theirs is imported, called or allocated."""

import io
import json
import pickle
import tarfile
import zipfile
from pathlib import Path

import flax.serialization
import jax
import numpy as np
import pytest
from fake_hub import fake_hub, log_in
from launch import command

from cleanba.agents.agent import load
from cleanba.algorithms.dqn import DQN
from cleanba.algorithms.ppo import PPO
from cleanba.checks.recompute import open_rerun
from cleanba.config import Placement, to_json
from cleanba.environments.backends import env_spec
from cleanba.errors import Failure, UsageError
from cleanba.resolution import read_recipe
from cleanba.runs import remote
from cleanba.runtime.checkpoint import read_model
from cleanba.trust import check_size, mark_downloaded, source_of

SMALL = {"env_id": "CartPole-v1", "hiddens": [8], "network": "mlp", "num_actors": 1, "num_shards": 1}


def foreign(folder: Path, algorithm: str = "ppo", **changed) -> Path:
    """A run directory that was downloaded, with these settings."""
    folder.mkdir(parents=True, exist_ok=True)
    experiment = {"algorithm": algorithm, **to_json({"ppo": PPO, "dqn": DQN}[algorithm]()), **SMALL, **changed}
    (folder / "config.json").write_text(json.dumps({"experiment": experiment}))
    mark_downloaded(folder, "hf://somebody/something")
    return folder


def parameters(folder: Path) -> bytes:
    """Parameters of the network of a run like that, all zero, as model.msgpack holds them."""
    recipe, e = read_recipe(folder)
    algorithm = recipe.make(e, env_spec(e), "cpu")
    params = jax.eval_shape(algorithm.actor_params, jax.eval_shape(algorithm.init, jax.random.key(0)))
    return flax.serialization.to_bytes(jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), params))


# --------------------------------------------------------------------------------------------- code


def attack(evidence: Path) -> dict:
    return {"env_id": "jax:subprocess:getoutput", "env_options": [f"cmd=touch {evidence}"]}


@pytest.fixture
def uploaded(monkeypatch, tmp_path):
    """uploaded(folder) -> the reference by which a run like that is downloaded from a Hub on this machine."""
    with fake_hub() as server:
        log_in(monkeypatch, server, tmp_path / "cache")
        monkeypatch.chdir(tmp_path)

        def upload(folder: Path, model: bytes = b"parameters") -> str:
            config = (folder / "config.json").read_bytes()
            server.repos["somebody/something"] = {"config.json": config, "model.msgpack": model}
            return "hf://somebody/something"

        yield upload


def zipped(folder: Path, model: bytes = b"parameters") -> Path:
    path = folder.with_suffix(".zip")
    with zipfile.ZipFile(path, "w") as file:
        file.write(folder / "config.json", "run/config.json")
        file.writestr("run/model.msgpack", model)
    return path


@pytest.mark.parametrize("way", ["hub", "zip"])
def test_a_downloaded_config_runs_nothing(uploaded, tmp_path, monkeypatch, way):
    evidence = tmp_path / "evidence"
    run = foreign(tmp_path / "made", **attack(evidence))
    monkeypatch.chdir(tmp_path)
    where = uploaded(run) if way == "hub" else zipped(run)
    ended = command("eval", where)
    assert (ended.code, ended.out) == (2, "") and not evidence.exists(), ended.err
    assert "import the module 'subprocess' and call its 'getoutput'" in ended.err
    assert f"'cmd=touch {evidence}'" in ended.err and "--trust-remote-code" in ended.err

    # The same holds for every other command that opens the download, now or later.
    folder = source = next(path.parent for path in tmp_path.glob("runs/*/**/downloaded.json"))
    for words in (("eval", folder), ("ppo", "--experiment", source), ("resume", folder), ("push", folder)):
        ended = command(*words)
        assert ended.code == 2 and "comes from elsewhere" in ended.err, (words, ended)
    assert not evidence.exists()

    with pytest.raises(UsageError, match="call its 'getoutput'"):
        load(where)
    assert not evidence.exists()
    ended = command("eval", where, "--trust-remote-code")
    assert ended.code == 2 and evidence.exists()  # it was no environment, after all


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"env_id": "jax:os:system"}, "import the module 'os' and call its 'system'"),
        ({"env_id": "evil:Env-v0"}, "import the module 'evil', and make its environment 'Env-v0'"),
        ({"env_id": "evil.deep:Env-v0", "env_options": ["x=1"]}, "the module 'evil.deep', .* with 'x=1'"),
        ({"env_id": "gymnasium:evil:Env-v0"}, "import the module 'evil'"),
        ({"env_id": "gymnax:evil:Env-v0"}, "import the module 'evil'"),
        ({"env_id": "gymnasium:Absent-v0"}, "does not know"),
        ({"env_id": "gymnasium:GymV26Environment-v0", "env_options": ["env_id=evil"]}, "does not know"),
        ({"env_id": "Absent-v5"}, "does not know"),
        ({"env_id": "gymnax:Absent"}, "does not know"),
        ({"env_id": ""}, "does not know"),
        ({"env_id": "Pong-v5\x1b[2J"}, "Pong-v5.x1b"),
        (
            {"env_id": "gymnasium:CartPole-v1", "env_wrappers": ["evil:wrap"]},
            "the module 'evil' and call its 'wrap' with the environment",
        ),
        ({"env_options": ["base_path=/etc"]}, "may name a file"),
        ({"env_options": ["base_path=etc"]}, "may name a file"),
        ({"env_id": "gymnasium:Ant-v5", "env_options": ["xml_file=evil"]}, "may name a file"),
        ({"env_id": "gymnasium:Ant-v5", "env_options": ["x=a.b"]}, "may name a file"),
        ({"env_id": "gymnasium:Ant-v5", "env_options": ["x=['a:b']"]}, "may name a file"),
        ({"env_id": "gymnasium:Ant-v5", "env_options": ["x={1: 2}"]}, "gives its environment the option"),
        ({"env_options": ["stack_num=1000000000000"]}, "beyond"),
        ({"env_options": ["x=1e999"]}, "beyond"),
        ({"env_options": ["stack_num=4097"]}, "beyond 4,096"),
        ({"env_id": "gymnax:DeepSea-bsuite", "env_options": ["size=100000"]}, "beyond 4,096"),
        ({"env_options": ["img_height=4096", "img_width=4096"]}, "multiply to"),
        ({"env_options": ["x=" + "(" * 90]}, "may name a file"),
        ({"env_options": ["x=" + "1" * 150]}, "an env_options entry of 152 characters"),
        ({"env_options": ["x=" + "(" * 9000]}, "not a value of its type"),
        ({"env_options": ["x=1"] * 1000}, "1000 entries"),
    ],
)
def test_what_a_run_from_elsewhere_may_not_name(tmp_path, changed, says):
    with pytest.raises(UsageError, match=says) as refused:
        read_recipe(foreign(tmp_path, **changed))
    assert "hf://somebody/something comes from elsewhere" in str(refused.value)
    assert "\x1b" not in str(refused.value) and "\n" not in str(refused.value) and len(str(refused.value)) < 700


@pytest.mark.parametrize(
    "changed",
    [
        {"env_id": "Pong-v5", "env_options": ["frame_skip=2", "img_height=96", "img_width=96", "noop_max=30"]},
        {"env_id": "gymnasium:CartPole-v1"},
        {"env_id": "gymnasium:FrozenLake-v1", "env_options": ["map_name=8x8", "is_slippery=false"]},
        {"env_id": "gymnasium:LunarLander-v3", "env_options": ["gravity=-9.5"]},
        {"env_id": "gymnasium:HalfCheetah-v5", "env_options": ["ctrl_cost_weight=5000.5"]},
        {"env_id": "CoinrunHard-v0", "env_options": ["num_levels=10000", "start_level=100000"]},
        {"env_id": "gymnax:Breakout-MinAtar"},
        {"algorithm": "dqn", "max_episode_steps": 10_000},
    ],
)
def test_what_a_run_from_elsewhere_may_name(tmp_path, changed):
    recipe, e = read_recipe(foreign(tmp_path, **changed))
    assert e.env_id == changed.get("env_id", "CartPole-v1") and recipe.experiment is type(e)


# --------------------------------------------------------------------------------------------- sizes and types


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"hiddens": [10**12]}, "outside"),
        ({"hiddens": [64] * 1000}, "1000 entries"),
        ({"hiddens": []}, "0 entries"),
        ({"hiddens": [-1]}, "outside"),
        ({"hiddens": "64"}, "not a value of its type"),
        ({"channels": [10**6]}, "outside"),
        ({"lstm_size": 10**12}, "outside"),
        ({"num_envs": 10**12}, "outside"),
        ({"num_envs": 0}, "outside"),
        ({"num_envs": 1.5}, "not a value of its type"),
        ({"num_envs": {}}, "not a value of its type"),
        ({"max_episode_steps": 10**12}, "outside"),
        ({"num_steps": 10**12}, "outside"),
        ({"algorithm": "dqn", "buffer_size": 10**15}, "outside"),
        ({"seed": -1}, "outside"),
        ({"gamma": float("nan")}, "not a value of its type"),
        ({"gamma": 1e300}, "outside"),
        ({"learning_rate": 10**400}, "outside"),
        ({"network": "evil"}, "not a value of its type"),
        ({"network": ["mlp"]}, "not a value of its type"),
        ({"env_id": "a" * 100_000}, "not a value of its type"),
        ({"anneal_lr": "yes"}, "not a value of its type"),
        ({"algorithm": ["ppo"]}, "is not of the type str"),
        ({"\x1b[2J": 1}, "not one of Cleanba's"),
        ({"unknown": 1}, "another version"),
    ],
)
def test_what_a_run_from_elsewhere_may_not_set(tmp_path, changed, says):
    folder = foreign(tmp_path, changed.get("algorithm") if changed.get("algorithm") == "dqn" else "ppo")
    config = json.loads((folder / "config.json").read_text())
    config["experiment"] |= changed
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(UsageError, match=says) as refused:
        read_recipe(folder)
    assert "\x1b" not in str(refused.value) and len(str(refused.value)) < 700


def test_a_config_of_a_thousand_brackets_is_no_traceback(tmp_path):
    folder = foreign(tmp_path)
    (folder / "config.json").write_text("[" * 100_000)
    with pytest.raises(UsageError, match="cannot be read"):
        read_recipe(folder)


def test_a_network_of_gigabytes_is_refused_before_it_is_made(tmp_path):
    folder = foreign(tmp_path / "run", hiddens=[8192] * 16)
    (folder / "model.msgpack").write_bytes(b"small")
    for words in (("ppo", "--experiment", folder, "--run-dir", tmp_path / "again"), ("eval", folder)):
        ended = command(*words)
        assert ended.code == 2 and "asks for a network of 4.0 GB" in ended.err and not (tmp_path / "again").exists()
    with pytest.raises(UsageError, match="asks for a network of 4.0 GB"), open_rerun(folder, Placement()):
        pass  # as in verify and bisect
    check_size({"w": jax.ShapeDtypeStruct((1000, 1000), "float32")}, "here")


def test_a_model_holds_arrays_of_the_networks_shapes_and_types_and_nothing_else(tmp_path):
    evidence = tmp_path / "evidence"

    class Evil:
        def __reduce__(self):
            return Path.touch, (evidence,)

    like = {"w": jax.ShapeDtypeStruct((2, 3), "float32")}
    path = tmp_path / "model.msgpack"
    of = lambda **arrays: flax.serialization.to_bytes(arrays)
    for content, says in (
        (pickle.dumps(Evil()), "does not hold"),
        (of(w=np.zeros((3, 2), np.float32)), "other shapes"),
        (of(w=np.zeros((2, 3), np.float64)), "other types"),
        (of(w=np.zeros(10**6, np.float32)), "bytes"),
        (of(v=np.zeros((2, 3), np.float32)), "does not hold"),
        (b"\xdd\xff\xff\xff\xff", "does not hold"),  # the beginning of a list of 4 billion
        (b"\x91" * 5000, "does not hold"),
    ):
        path.write_bytes(content)
        with pytest.raises(Failure, match=says):
            read_model(path, like)
    path.write_bytes(of(w=np.ones((2, 3), np.float32)))
    assert read_model(path, like)["w"].sum() == 6
    assert not evidence.exists()


def test_a_file_that_is_too_large_is_not_downloaded(uploaded, tmp_path, monkeypatch):
    monkeypatch.setitem(remote.MOST_BYTES, "model.msgpack", 1000)
    ended = command("eval", uploaded(foreign(tmp_path / "made"), b"0" * 1001))
    assert ended.code == 2 and "has a model.msgpack of 0 MB, but the limit is 0 MB" in ended.err
    assert not (tmp_path / "runs").exists()


# --------------------------------------------------------------------------------------------- archives


def in_tar(path: Path, *members: tuple[tarfile.TarInfo | str, bytes]) -> Path:
    with tarfile.open(path, "w:gz") as file:
        for name, content in members:
            info = name if isinstance(name, tarfile.TarInfo) else tarfile.TarInfo(name)
            info.size = len(content)
            file.addfile(info, io.BytesIO(content))
    return path


def linked(name: str, to: str) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = tarfile.SYMTYPE, to
    return info


def test_an_archive_of_a_run_is_played_and_keeps_what_is_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = foreign(tmp_path / "run", max_episode_steps=20)
    path = zipped(run, parameters(run))
    ended = command("eval", path, "--episodes", "2")
    assert ended.code == 0, ended.err
    (folder,) = Path("runs/unpacked").iterdir()
    assert json.loads((folder / "eval.json").read_text())["episodes"] == 2
    assert source_of(folder) == str(path)


def test_nothing_in_an_archive_decides_where_anything_is_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = (foreign(tmp_path / "made") / "config.json").read_bytes()
    path = in_tar(
        tmp_path / "run.tar.gz",
        (linked("run/videos", str(tmp_path / "outside")), b""),
        ("../../escaped.txt", b"out"),
        (str(tmp_path / "absolute/escaped.txt"), b"out"),
        ("../../../run/config.json", config),
        ("../../../run/model.msgpack", b"parameters"),
        ("../../../run/result.json", b"{}"),
        ("../../../run/.cache/x.py", b"print(1)"),
    )
    folder = remote.unpack(path)
    assert {p.name for p in folder.iterdir()} == {"config.json", "model.msgpack", "result.json", "downloaded.json"}
    assert folder.parent == Path("runs/unpacked") and not list(tmp_path.rglob("escaped.txt"))


@pytest.mark.parametrize(
    ("members", "says"),
    [
        ([("run/config.json", b"{}")], "has no model.msgpack"),
        ([("run/other", b"{}")], "holds no runs"),
        ([("a/config.json", b"{}"), ("b/config.json", b"{}")], "holds 2 runs"),
        ([(linked("run/config.json", "/etc/passwd"), b""), ("run/model.msgpack", b"")], "holds no runs"),
        ([("run/config.json", b" " * (2**20 + 1)), ("run/model.msgpack", b"")], "the limit is"),
    ],
)
def test_archives_that_are_no_run(tmp_path, monkeypatch, members, says):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match=says):
        remote.unpack(in_tar(tmp_path / "run.tgz", *members))


def test_an_archive_with_an_endless_name_fills_no_memory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    long_name = tarfile.TarInfo("././@LongLink")
    long_name.type = tarfile.GNUTYPE_LONGNAME
    with pytest.raises(UsageError, match="a name in it has 2,000,000 characters"):
        remote.unpack(in_tar(tmp_path / "run.tgz", ("run/config.json", b"{}"), (long_name, b"x" * 2 * 10**6)))


@pytest.mark.parametrize("kind", ["w:gz", "w:xz", "w:bz2"])
def test_a_damaged_archive_is_refused(kind, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = foreign(tmp_path / "run")
    (run / "model.msgpack").write_bytes(np.random.default_rng(1).bytes(20_000))
    path = tmp_path / f"run.tar.{kind[2:]}"
    with tarfile.open(path, kind) as file:
        file.add(run, "run")
    remote.unpack(path)
    whole = bytearray(path.read_bytes())
    for at in np.linspace(len(whole) // 3, len(whole) - 100, 10).astype(int):
        whole[at] ^= 1
        path.write_bytes(whole)
        with pytest.raises(UsageError, match="cannot be unpacked"):
            remote.unpack(path)
        whole[at] ^= 1


def test_a_folder_within_a_run_from_elsewhere_is_from_there_too(tmp_path):
    run = foreign(tmp_path / "run")
    inside = foreign(run / "checkpoints/best")
    (inside / "downloaded.json").unlink()
    assert source_of(inside) == "hf://somebody/something"
    (tmp_path / ".cache/huggingface/hub").mkdir(parents=True)  # as in a home
    (tmp_path / "config.json").write_text('{"theme": "dark"}')
    (tmp_path / ".cache/huggingface/download/theirs").mkdir(parents=True)  # as `hf download` leaves it
    assert source_of(tmp_path / "theirs") == str(tmp_path / "theirs")
    assert source_of(tmp_path / "mine") is None


def test_an_archive_that_lies_about_its_sizes_fills_no_disk(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(remote.MOST_BYTES, "model.msgpack", 2**20)
    member = remote.Member(Path("run/model.msgpack"), 10, lambda: io.BytesIO(b"0" * 2**24))
    with pytest.raises(UsageError, match="the limit is"):
        remote._copy("here", member, tmp_path / "model.msgpack")
    assert not list(tmp_path.iterdir())
    (tmp_path / "text.tar.gz").write_text("no archive")
    with pytest.raises(UsageError, match=r"text.tar.gz cannot be unpacked \(it is no such archive, or damaged\)"):
        remote.unpack(tmp_path / "text.tar.gz")
    (tmp_path / "broken.zip").write_bytes(b"PK\x03\x04 nothing")
    with pytest.raises(UsageError, match="cannot be unpacked"):
        remote.unpack(tmp_path / "broken.zip")


def test_a_run_of_ones_own_is_as_free_as_before(tmp_path):
    folder = foreign(tmp_path, env_id="my_package:MyEnv-v0")
    (folder / "downloaded.json").unlink()
    assert read_recipe(folder)[1].env_id == "my_package:MyEnv-v0"
    (folder / ".cache/huggingface/download").mkdir(parents=True)  # what older versions downloaded has no mark
    with pytest.raises(UsageError, match="my_package"):
        read_recipe(folder)
    assert read_recipe(folder, trust_remote_code=True)[1].env_id == "my_package:MyEnv-v0"


def test_training_goes_by_a_downloaded_experiment_if_that_is_harmless(tmp_path):
    harmless = foreign(tmp_path / "harmless")
    other = foreign(tmp_path / "other", seed=2)
    (other / "downloaded.json").unlink()
    ended = command("ppo", "--experiment", harmless, "--run-dir", other)  # it gets as far as the directory of the run
    assert ended.code == 2 and f"{other} holds another experiment (seed: 2, now 1)" in ended.err
    for words in (("resume", harmless), ("ppo", "--experiment", harmless, "--run-dir", harmless)):
        ended = command(*words)
        assert ended.code == 2 and "a run can continue only in its original directory" in ended.err
