"""The command: what it refuses and how, what it offers, and what it does with a run that is already there."""

import dataclasses
import functools
import importlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import get_type_hints

import jax
import pytest
import tyro
from launch import ROOT, TINY, command, finish, python, read_result

from cleanba.api import Run as Run_of
from cleanba.arguments import refuse_unknown_flags
from cleanba.cli import ALIKE, COMMANDS
from cleanba.config import Placement, Run, fields_of, flag, to_json
from cleanba.errors import UsageError
from cleanba.flags import whole_number
from cleanba.help import WRITTEN, written_flag
from cleanba.launch import Job, closing_words, in_new_directory
from cleanba.recipes import RECIPES, find_recipe
from cleanba.resolution import resolve
from cleanba.runs.directory import lock
from cleanba.runtime.metrics import Display, Status, Terminal, panel, plain_line
from cleanba.train_flags import parse

COMPILED: list[str] = []
jax.monitoring.register_event_duration_secs_listener(
    lambda event, *_, **__: COMPILED.append(event) if "backend_compile" in event else None
)


@pytest.fixture(scope="module", autouse=True)
def prepared(tmp_path_factory):
    """A process's first command compiles small programs before it opens a directory: `refusal` does not count them."""
    used = tmp_path_factory.mktemp("used")
    (used / "checkpoints/1").mkdir(parents=True)
    assert command("ppo", *TINY, "--run-dir", used).code == 2


class Accepted(Exception):
    """The command has nothing against its flags and would train now."""


@pytest.fixture
def accept(monkeypatch):
    """Runs the command up to where it would train: True if it gets there."""

    def stop(*_, **__):
        raise Accepted

    monkeypatch.setattr("cleanba.launch.run_training", stop)

    def tried(*words) -> bool:
        try:
            command("ppo", *words)
        except Accepted:
            return True
        return False

    return tried


def refusal(*words) -> str:
    """The single sentence with which the command refuses before it has compiled anything."""
    COMPILED.clear()
    ended = command(*words)
    assert ended.code == 2, ended
    assert "Traceback" not in ended.err
    assert ended.out == ""
    assert ended.err.startswith("cleanba: ") and ended.err.count("\n") == 1, f"more than one line: {ended.err!r}"
    assert COMPILED == [], "refused only after compiling"
    return ended.err.removeprefix("cleanba: ").rstrip("\n")


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """A finished run."""
    run_dir = tmp_path_factory.mktemp("runs") / "done"
    COMPILED.clear()
    assert command("ppo", *TINY, "--run-dir", run_dir).code == 0
    assert COMPILED, "compilations are not counted"
    return run_dir


# ------------------------------------------------------------------------------------------------------ completion

TAB = """
source "$1"; shift
COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1))
_cleanba
printf "%s\\n" "${COMPREPLY[@]}"
complete -p cleanba >&2
"""


def test_bash_completes_commands_flags_and_values(tmp_path):
    script = tmp_path / "cleanba.bash"
    ended = command("completion", "bash")
    assert ended.code == 0, ended.err
    script.write_text(ended.out)

    def tab(line: str) -> set[str]:
        words = ["bash", "--norc", "-c", TAB, "bash", str(script), *line.split(" ")]
        done = subprocess.run(words, capture_output=True, text=True, env={"PATH": os.environ["PATH"]})
        assert "-F _cleanba cleanba" in done.stderr
        return set(done.stdout.split())

    assert tab("cleanba pp") == {"ppo"}
    assert tab("cleanba p") == {"ppo", "pqn", "plot", "pack", "push"}
    assert tab("cleanba ") == {*RECIPES, *COMMANDS}
    assert tab("cleanba ppo --env-i") == {"--env-id"}
    assert tab("cleanba ppo --env-id HalfCheetah-v") == {"HalfCheetah-v3", "HalfCheetah-v4", "HalfCheetah-v5"}
    assert tab("cleanba dqn --seed 1 --collector s") == {"stepped", "scanned"}
    assert tab("cleanba eval runs/a --ep") == {"--episodes", "--epsilon"}
    assert tab("cleanba resume --tot") == {"--total-timesteps"} and tab("cleanba resume --gam") == set()
    assert tab("cleanba sweep --num-seeds 3 -- im") == {"impala"}
    assert tab("cleanba sweep --num-seeds 3 -- impala --rho") == {"--rho-clip"}
    assert tab("cleanba completion ") == {"bash", "zsh", "fish"}
    assert tab("cleanba report ru") == set()  # names of files, which bash adds
    for name, recipe in RECIPES.items():
        flags = {
            flag(f) for kind in (recipe.experiment, Placement, Run) for f, x in fields_of(kind).items() if x.offered
        }
        assert flags - {"--experiment-from"} <= tab(f"cleanba {name} -")
        assert {"--experiment", "--no-concurrency", "--help-all", "--show-config"} <= tab(f"cleanba {name} --")


@pytest.mark.parametrize("error", [AttributeError("module 'jax' has no attribute 'x'"), RuntimeError("too old")])
def test_packages_that_do_not_fit_together_are_told_in_one_sentence(error, monkeypatch):
    def fails(module):
        raise error

    monkeypatch.setattr("cleanba.cli.import_module", fails)
    for words in (["ls"], ["ppo"]):
        ended = command(*words)
        assert ended.code == 1 and ended.err.count("\n") == 1, ended
        assert f"cannot be imported ({error}): packages are missing, or do not fit together" in ended.err


def test_scripts_for_the_other_shells_have_every_command():
    for shell, start in (("zsh", "autoload -U +X bashcompinit"), ("fish", "complete -c cleanba")):
        text = command("completion", shell).out
        assert start in text and all(name in text for name in (*RECIPES, *COMMANDS))
    assert "from eval' -l greedy -d 'always" in text and "-l no-greedy" not in text  # it takes no value
    assert "bash, zsh, fish, but was given tcsh" in refusal("completion", "tcsh")
    assert "but was given nothing" in refusal("completion")


# ------------------------------------------------------------------------------------------------------ what is refused


@pytest.mark.parametrize(
    "flags, said",
    [
        ("--env-id Pnog-v5", ["'Pnog-v5'", "Pong-v5"]),
        ("--env-id seaquest", ["'seaquest'", "Seaquest-v5"]),
        ("--env-id Go9x9-v1", ["2 players", "CartPole-v1"]),
        (
            "--env-id HalfCheetah-v5 --collector scanned --num-minibatches 1",
            ["collector=scanned", "8 bytes", "stepped"],
        ),
        ("--env-options nonsense=3", ["Catch-v0", "nonsense"]),
        ("--env-options nonsense", ["'nonsense'", "name=value"]),
        ("--env-options num_envs=3", ["num_envs"]),
        ("--env-options height=3 height=4", ["names height twice"]),
        ("--env-id Pong-v5 --env-options stack_num=0", ["stack_num=0 must be at least 1", "try 4"]),
        ("--env-id Pong-v5 --env-options noop_max=0", ["noop_max=0 must be at least 1", "try 1"]),
        (
            "--env-id Pong-v5 --max-episode-steps 100 --env-options max_episode_steps=50",
            ["env_options names max_episode_steps, which --max-episode-steps gives, too"],
        ),
        (
            "--env-id Pong-v5 --env-options repeat_action_probability=0",
            ["env_options names repeat_action_probability", "give --repeat-action-probability"],
        ),
        ("--network nature", ["network=nature", "images", "--network mlp"]),
        # devices: there are eight, 0 to 7
        ("--actor-device-ids 8", ["--actor-device-ids", "no device 8", "0 (cpu), 1 (cpu)", "7 (cpu)"]),
        ("--learner-device-ids 0 9", ["--learner-device-ids", "no device 9", "0 (cpu), 1 (cpu)", "7 (cpu)"]),
        ("--learner-device-ids -1", ["no device -1"]),
        ("--actor-device-ids 1 1", ["twice"]),
        ("--learner-device-ids", ["names no device"]),
        # numbers that do not divide
        ("--num-envs 10 --num-actors 4", ["num_envs=10", "4 actors", "--num-envs 8 or 12"]),
        ("--num-envs 10 --num-actors 1 --num-shards 4", ["num_envs=10", "4 shards", "--num-envs 8 or 12"]),
        ("--num-envs 12 --num-actors 2 --num-shards 3", ["num_actors=2", "num_shards=3", "--num-actors 1 or 3"]),
        ("--num-minibatches 5", ["num_minibatches=5", "8 environments x 8 steps", "--num-minibatches 2 or 4"]),
        ("--num-shards 2 --learner-device-ids 0 1 2", ["num_shards=2 ", "3 learner devices", "name 2 of them at most"]),
        # values out of range
        ("--total-timesteps 63", ["total_timesteps=63", "64", "--total-timesteps 64"]),
        ("--num-envs 0", ["num_envs=0", "try --num-envs 1"]),
        ("--num-steps -1", ["num_steps=-1", "--num-steps"]),
        ("--learning-rate 0", ["learning_rate=0", "--learning-rate"]),
        ("--learning-rate nan", ["learning_rate=nan", "--learning-rate"]),
        ("--gamma 1.5", ["gamma=1.5", "[0, 1]"]),
        ("--gae-lambda -0.1", ["gae_lambda=-0.1", "[0, 1]"]),
        ("--clip-coef 0", ["clip_coef=0", "--clip-coef"]),
        ("--lag-weight-cap 0.5", ["lag_weight_cap=0.5", "at least 1"]),
        ("--lag-trace-cap 0", ["lag_trace_cap=0", "at least 1"]),
        ("--update-epochs 0", ["update_epochs=0", "--update-epochs"]),
        ("--seed -3", ["seed=-3", "--seed 0"]),
        ("--anneal-lr yes", ["--anneal-lr yes", "true or false", "--no-anneal-lr"]),
        ("--seed 2147483648", ["seed=2147483648 is too large; it can be 2147483647 at most"]),
        ("--hiddens 0", ["hiddens=(0,)", "--hiddens"]),
        ("--env-epoch -1", ["env_epoch=-1"]),
        ("--checkpoint-frequency -1", ["checkpoint_frequency=-1"]),
        ("--max-episode-steps -1", ["max_episode_steps=-1"]),
        ("--log-frequency 0", ["log_frequency=0"]),
        ("--keep-checkpoints 0", ["keep_checkpoints=0", "at least 1"]),
        ("--stall-timeout -0.0", ["stall_timeout=-0.0", "at least 1"]),
        ("--stall-timeout nan", ["stall_timeout=nan", "at least 1"]),
        ("--grace-period inf", ["grace_period=inf", "lie in [0, 1e6]"]),
        # several processes
        ("--coordinator-address localhost:1", ["--coordinator-address", "--distributed"]),
        ("--num-processes 2 --process-id 0", ["--num-processes", "--process-id", "--distributed"]),
        ("--distributed --coordinator-address a --num-processes 1 --process-id 0", ["'a'", "HOST:PORT", "1 to 65535"]),
        ("--distributed --coordinator-address a:99999 --num-processes 1 --process-id 0", ["HOST:PORT", "65535"]),
        ("--num-processes -3", ["num_processes=-3", "at least 1"]),
        ("--distributed --process-id 0", ["--process-id", "without --coordinator-address, --num-processes"]),
        ("--distributed --coordinator-address a:1 --num-processes 2 --process-id 2", ["process_id=2", "[0, 2)"]),
    ],
)
def test_what_does_not_fit_is_refused_in_one_sentence(flags, said, tmp_path):
    message = refusal("ppo", *TINY, *flags.split(), "--run-dir", tmp_path / "run")
    for words in said:
        assert words in message, message
    assert not (tmp_path / "run").exists(), "a refused run leaves nothing behind"


@pytest.mark.parametrize(
    "flags",
    [
        "--num-envs 10 --num-actors 4",
        "--num-envs 10 --num-actors 1 --num-shards 4",
        "--num-envs 12 --num-actors 2 --num-shards 3",
        "--num-minibatches 5",
        "--num-minibatches 63",
        "--total-timesteps 63",
        "--seed -3",
        "--num-shards 3 --num-actors 3 --num-envs 12 --learner-device-ids 0 1 2 3",
    ],
)
def test_every_remedy_that_a_refusal_names_works(flags, tmp_path, accept):
    message = refusal("ppo", *TINY, *flags.split(), "--run-dir", tmp_path / "run")
    remedies = [
        f"{flag} {value}"
        for flag, values in re.findall(r"(--[a-z-]+) (\d+(?: or \d+)*)", message)
        for value in values.split(" or ")
    ]
    assert remedies, message
    for number, remedy in enumerate(remedies):
        words = [*TINY, *flags.split(), *remedy.split(), "--run-dir", tmp_path / f"run {number}"]
        assert accept(*words), f"{message}\n{remedy}: {command('ppo', *words).err}"


def test_any_number_of_learner_devices_up_to_the_shards_is_accepted(tmp_path, accept):
    words = [*TINY, "--num-shards", "4", "--num-actors", "4", "--run-dir", tmp_path / "run", "--learner-device-ids"]
    assert "name 4 of them at most" in refusal("ppo", *words, *"01234")
    for count in (1, 2, 3, 4):
        assert accept(*words, *map(str, range(count)))


def test_flags_that_fit_are_accepted(tmp_path, accept):
    assert accept(*TINY, "--run-dir", tmp_path / "run")
    assert accept("--env-id", "Catch-v0", "--run-dir", tmp_path / "defaults")  # with every default


def test_the_version_is_there_at_once():
    """JAX alone takes more than a second to import."""
    code = "import sys; from cleanba import cli; sys.exit = lambda code: None; cli.main(['--version']); "
    ended = finish(python("-c", code + "print(sorted({'jax', 'numpy', 'tyro', 'rich'} & set(sys.modules)))"))
    assert ended.out.startswith("cleanba 0") and ended.out.endswith("\n[]\n"), ended


def test_an_unknown_command_is_refused_with_the_closest_one():
    message = refusal("pppo", "--env-id", "Catch-v0")
    assert "'pppo'" in message and "did you mean ppo" in message


def test_an_algorithm_that_is_not_here_is_refused_with_the_nearest():
    assert refusal("A2C", "--env-id", "Catch-v0") == "there is no A2C here; the nearest algorithm is ppo"
    assert set(ALIKE.values()) <= set(RECIPES) and not set(ALIKE) & {*RECIPES, *COMMANDS}


def test_an_unknown_flag_is_refused_with_the_closest_one():
    COMPILED.clear()
    ended = command("ppo", *TINY, "--learning-rat", "1")
    assert ended.code == 2
    assert "ppo has no --learning-rat;" in ended.err and "--learning-rate" in ended.err
    assert "Traceback" not in ended.err
    assert COMPILED == []


@pytest.mark.parametrize(
    "words, remedy",
    [
        ("sac --learning-rate 1e-3", "set --policy-lr and --q-lr"),
        ("dqn --q_lr=1e-3", "set --learning-rate"),
        ("ppo --num-actor-threads 2", "set --num-actors"),
        ("td3 --no-cuda", "JAX_PLATFORMS"),
        ("td3 --target-network-frequency 2", "set --tau"),
        ("dqn --core lstm", "recurrence cannot be trained"),
        ("sac --lstm-size 8", "recurrence cannot be trained"),
        ("td3 --episodic-life", "Atari's actions are discrete"),
    ],
)
def test_a_flag_of_another_system_is_refused_with_ours(words, remedy):
    name, flag, *_ = words.split()
    message = refusal(name, flag, *words.split()[2:])
    assert f"{name} has no --" in message and remedy in message


@pytest.mark.parametrize("name", RECIPES)
def test_no_algorithm_is_refused_its_own_flags(name):
    groups = (RECIPES[name].experiment, Placement, Run)
    own = [field for group in groups for field, f in fields_of(group).items() if f.offered]
    words = [word for f in own for word in (f"--{f}", f"--no-{f}".replace("_", "-")) if f not in WRITTEN]
    refuse_unknown_flags(words, name, own, lambda unknown: "")


@pytest.mark.parametrize(
    "words, says",
    [
        ("ppo --total-timesteps 20k", "--total-timesteps: '20k' is not a whole number; write it as 1000000 or 1e6"),
        ("ppo --learning-rate high", "--learning-rate: 'high' is not a number; write it as 0.001 or 1e-3"),
        ("ppo --core LSTM", "--core LSTM must be one of 'none', 'lstm'"),
        ("ppo --hiddens 64,64", "--hiddens: '64,64' cannot be read; put spaces between several values"),
        ("ppo --num-processes two", "--num-processes: 'two' cannot be read"),
        ("ppo --seed", "--seed needs a value"),
        ("ppo --seed 1 2", "2: no argument and no flag before it takes this; leave it out"),
        ("ppo --policy MlpPolicy", "ppo has no --policy; set --network and --core"),
        ("eval RUN --deterministic", "eval has no --deterministic; set --greedy"),
        ("eval", "RUN_DIR is missing"),
        ("plot --metrics x RUN", "plot has no --metrics; did you mean --metric? `cleanba plot --help` lists its flags"),
        ("slurm --bogus", "slurm has no --bogus; `cleanba slurm --help` lists its flags"),
    ],
)
@pytest.mark.parametrize("width", ["40", "200"])
def test_words_that_cannot_be_read_are_told_in_one_sentence(words, says, width, monkeypatch):
    monkeypatch.setenv("COLUMNS", width)
    message = refusal(*words.split())
    assert message.startswith(says)
    assert f"`cleanba {words.split()[0]} --help` explains the flags" in message or "; set " in says or "lists" in says


def test_a_value_of_the_wrong_kind_is_refused():
    ended = command("ppo", *TINY, "--num-steps", "many")
    assert ended.code == 2
    assert "--num-steps" in ended.err and "many" in ended.err
    assert "Traceback" not in ended.err


# ------------------------------------------------------------------------------------------------------ run directories


@pytest.mark.parametrize("below", ["", "runs/x"])
def test_a_run_directory_that_cannot_be_made_is_refused(below, tmp_path, done):  # which compiles what JAX itself needs
    (tmp_path / "file").write_text("in the way")
    message = refusal("ppo", *TINY, "--run-dir", tmp_path / "file" / below)
    assert str(tmp_path / "file") in message and "--run-dir" in message
    assert (tmp_path / "file").read_text() == "in the way"


def test_a_run_directory_of_another_experiment_is_refused_with_the_fields_that_differ(done):
    before = {path.name: path.read_bytes() for path in done.iterdir() if path.is_file()}
    message = refusal("ppo", *TINY, "--run-dir", done, "--seed", "7", "--gamma", "0.5")
    assert str(done) in message and "--run-dir" in message
    assert "seed: 1, now 7" in message and "gamma: 0.99, now 0.5" in message
    assert "num_envs" not in message and "--init-from" not in message
    message = refusal("ppo", *TINY, "--run-dir", done, "--total-timesteps", "9600")
    assert message.endswith(f"to train it further, start a new run with --init-from {done}")
    assert {path.name: path.read_bytes() for path in done.iterdir() if path.is_file()} == before


def test_a_run_directory_of_another_algorithm_is_refused_without_a_list_of_all_that_differs(done):
    message = refusal("impala", "--env-id", "Catch-v0", "--run-dir", done)
    assert "another experiment (algorithm: ppo, now impala; " in message and " more)" in message
    assert "gae_lambda" not in message
    changes = "--seed 7 --gamma 0.5 --num-steps 4 --hiddens 3 --ent-coef 1 --vf-coef 1 --clip-coef 1 --no-norm-obs"
    message = refusal("ppo", *TINY, *changes.split(), "--no-norm-adv", "--run-dir", done)
    assert message.count(", now ") == 8 and "; 1 more)" in message


def test_a_run_directory_whose_config_is_broken_is_refused(tmp_path):
    (tmp_path / "config.json").write_text("{")
    message = refusal("ppo", *TINY, "--run-dir", tmp_path)
    assert "config.json cannot be read" in message


@pytest.mark.parametrize("placement", [[], ["--actor-device-ids", "1", "--learner-device-ids", "2"]])
def test_a_finished_run_is_left_alone(done, placement):
    before = {path.name: path.read_bytes() for path in done.iterdir() if path.is_file()}
    COMPILED.clear()
    ended = command("ppo", *TINY, "--run-dir", done, *placement)
    assert ended.code == 0
    assert f"{done} is finished" in ended.out
    assert ended.err == ""
    assert COMPILED == []
    assert {path.name: path.read_bytes() for path in done.iterdir() if path.is_file()} == before


def test_a_warning_says_when_episodes_are_longer_than_an_epoch_of_environments(tmp_path):
    flags = (*TINY, "--num-steps", "4", "--total-timesteps", "160", "--env-epoch")
    ended = command("ppo", *flags, "2", "--run-dir", tmp_path / "short")  # 8 steps; Catch's episodes have 9
    assert ended.code == 0
    assert ended.out.count("warning: no episode has ended in the 8 steps of the first epoch of environments") == 1
    assert "--env-epoch" in ended.out
    missing = command("plot", tmp_path / "short", "--out", tmp_path / "curves")
    assert missing.code == 2 and "larger --env-epoch" in missing.err
    assert "warning:" not in command("ppo", *flags, "3", "--run-dir", tmp_path / "long").out


@pytest.fixture
def jax_settings():
    """Sets JAX's own settings as variables in the environment would, and sets them back."""
    before = dict(jax.config.values)
    changed = set()

    def change(**settings) -> None:
        for name, value in settings.items():
            jax.config.update(name, value)
            changed.add(name)

    yield change
    for name in changed:
        jax.config.update(name, before[name])


def test_jaxs_settings_of_random_numbers_change_no_bit(done, tmp_path, jax_settings):
    jax_settings(jax_default_prng_impl="rbg", jax_threefry_partitionable=False, jax_random_seed_offset=3)
    assert command("ppo", *TINY, "--run-dir", tmp_path / "run").code == 0
    assert read_result(tmp_path / "run")["learner_digest"] == read_result(done)["learner_digest"]


def test_64_bit_numbers_are_refused(done, tmp_path, jax_settings):
    jax_settings(jax_enable_x64=True)
    sweep = ("sweep", "--env-ids", "Catch-v0", "--dir", tmp_path / "sweep", "--", "ppo")
    for words in (("ppo", *TINY, "--run-dir", tmp_path / "run"), ("eval", done), ("resume", done), sweep):
        assert "JAX_ENABLE_X64=0" in refusal(*words)
    assert list(tmp_path.iterdir()) == []


def test_devices_that_are_not_there_are_refused(tmp_path):
    ended = finish(python("-m", "cleanba", "ppo", *TINY, "--run-dir", tmp_path / "run", JAX_PLATFORMS="cuda"))
    assert ended.code == 2 and not (tmp_path / "run").exists()
    (said,) = [line for line in ended.err.splitlines() if line.startswith("cleanba: ")]
    assert "JAX_PLATFORMS=cuda" in said and "set JAX_PLATFORMS=cpu" in said and "Traceback" not in ended.err


@pytest.mark.parametrize(
    "word, number",
    [("1e6", 10**6), ("2.5e2", 250), ("320.0", 320), ("1_000", 1000), ("-3", -3)]
    + [(word, None) for word in ("1.5e0", "1e-3", "nan", "inf", "1e999999999", "many", "", "1e")],
)
def test_whole_numbers_may_be_written_as_powers_of_ten(word, number):
    if number is not None:
        assert whole_number(word) == number
    else:
        with pytest.raises(ValueError, match="is not a whole number"):
            whole_number(word)


def test_a_flag_that_is_a_whole_number_is_read_so(tmp_path, accept):
    assert accept(*TINY, "--total-timesteps", "1e6", "--num-actors", "2e0", "--hiddens", "1.6e1", "--run-dir", tmp_path)
    ended = command("ppo", *TINY, "--total-timesteps", "1.5e0")
    assert ended.code == 2 and "'1.5e0' is not a whole number" in ended.err


def test_the_default_run_directory_names_environment_and_seed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert command("ppo", *TINY, "--total-timesteps", "64", "--seed", "5", "--exp-name", "mine").code == 0
    (run_dir,) = (tmp_path / "runs").iterdir()
    assert re.fullmatch(r"Catch-v0__mine__5__\d+", run_dir.name)
    assert read_result(run_dir)["status"] == "finished"


def test_runs_that_start_in_the_same_second_get_directories_of_their_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    config = parse(find_recipe("ppo"), ["--env-id", "Catch-v0", "--seed", "5", "--exp-name", "mine"])
    names = []
    for _ in range(3):  # none has seen the others' directories when it was prepared
        job = Job(None, config, None, None, SimpleNamespace(is_main=True), None, Path(), now=1000)
        names.append(in_new_directory(job).run_dir.name)
    assert names == [f"Catch-v0__mine__5__{number}" for number in (1000, 1001, 1002)]
    (tmp_path / "runs" / names[0] / "config.json").write_text("{}")  # another experiment's
    monkeypatch.setattr("cleanba.launch.time", SimpleNamespace(time=lambda: 1000.7))
    flags = (*TINY, "--total-timesteps", "64", "--seed", "5", "--exp-name", "mine")
    assert command("ppo", *flags, "--show-config").code == 0
    with monkeypatch.context() as patch:
        patch.setattr("cleanba.launch.lock", refusing)
        assert command("ppo", *flags).err == "cleanba: refused\n"
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == names
    assert command("ppo", *flags).code == 0
    assert read_result(tmp_path / "runs" / "Catch-v0__mine__5__1003")["status"] == "finished"
    monkeypatch.setenv("ENVIRONMENT", "BATCH")
    monkeypatch.setenv("SLURM_JOB_ID", "17")  # the same after a requeue
    assert in_new_directory(job) is job and len(list((tmp_path / "runs").iterdir())) == 4


def refusing(run_dir, *, mark):
    raise UsageError("refused")


# --------------------------------------------------------------------------------------------------------- --experiment


def test_a_run_that_began_with_a_limit_that_is_refused_today_goes_on(tmp_path, monkeypatch):
    words = ("ppo", *TINY, "--max-episode-steps", "5", "--run-dir", tmp_path / "run")
    with monkeypatch.context() as patch:
        patch.setattr("cleanba.resolution.check_limit", lambda e, spec: None)  # as an earlier version
        assert command(*words).code == 0
    for again in (words, ("resume", tmp_path / "run")):
        ended = command(*again)
        assert ended.code == 0 and "is finished" in ended.out, ended
    ended = command("ppo", "--experiment", tmp_path / "run", "--run-dir", tmp_path / "again", "--show-config")
    assert ended.code == 0, ended
    assert command("verify", tmp_path / "run").code == 0
    assert command(*words[:-1], tmp_path / "new").code == 2


def test_experiment_takes_everything_from_an_earlier_run(done, tmp_path):
    placement = ["--actor-device-ids", "1", "2", "--learner-device-ids", "3"]
    ended = command("ppo", "--experiment", done, "--run-dir", tmp_path / "again", *placement)
    assert ended.code == 0, ended.err
    one, two = (json.loads((run / "config.json").read_text()) for run in (done, tmp_path / "again"))
    assert one["experiment"] == two["experiment"]
    assert two["placement"]["actor_device_ids"] == [1, 2]
    assert read_result(tmp_path / "again")["params_digest"] == read_result(done)["params_digest"]


def test_a_run_of_a_whole_experiment_keeps_what_followed_from_the_environment(tmp_path):
    """`--preset` takes it from neither run."""
    words = ("--env-id", "gymnasium:CartPole-v1", *TINY[2:])
    assert command("ppo", *words, "--total-timesteps", "64", "--run-dir", tmp_path / "a").code == 0
    ended = command("ppo", "--experiment", tmp_path / "a", "--run-dir", tmp_path / "b")
    assert ended.code == 0 and f"those of the run {tmp_path / 'a'}" in " ".join(ended.out.split()), ended
    origins = [json.loads((tmp_path / name / "config.json").read_text())["origin"] for name in "ab"]
    assert origins[0]["max_episode_steps"] == origins[1]["max_episode_steps"] == "environment"
    assert origins[1]["seed"].startswith("run ") and origins[1]["env_id"].startswith("run ")
    shown = [
        command("ppo", "--preset", tmp_path / name, "--env-id", "gymnasium:MountainCar-v0", "--show-config").out
        for name in "ab"
    ]
    limits = [re.search(r"max_episode_steps +(\d+)", text) for text in shown]
    assert [found and found[1] for found in limits] == ["200", "200"], shown
    # All of it counts as typed: a run of another collector, say, is another experiment.
    ended = command("resume", tmp_path / "b")
    assert ended.code == 0 and "is finished" in ended.out
    config = json.loads((tmp_path / "a/config.json").read_text())
    config["experiment"]["max_episode_steps"] = 100
    (tmp_path / "a/config.json").write_text(json.dumps(config))
    message = refusal("ppo", "--experiment", tmp_path / "a", "--run-dir", tmp_path / "b")
    assert "holds another experiment (max_episode_steps: 500, now 100)" in message


def test_experiment_with_a_flag_that_changes_it_is_refused(done, tmp_path, accept):
    flags = ["--experiment", done, "--run-dir", tmp_path / "run"]
    message = refusal("ppo", *flags, "--learning-rate", "0.1")
    assert "learning_rate: 0.001, now 0.1" in message and str(done) in message
    assert not (tmp_path / "run").exists()
    assert accept(*flags, "--num-envs", "8"), "a flag that repeats the earlier value changes nothing"


def test_experiment_without_a_run_is_refused(tmp_path):
    assert "does not exist" in refusal("ppo", "--experiment", tmp_path / "nowhere")
    assert command("ppo", "--experiment").code == 2
    (tmp_path / "config.json").write_text("{}")
    assert "holds no experiment" in refusal("ppo", f"--experiment={tmp_path}")


def test_experiment_of_another_algorithm_is_refused(tmp_path):
    impala = {"algorithm": "impala", **to_json(RECIPES["impala"].experiment())}
    (tmp_path / "config.json").write_text(json.dumps({"experiment": impala}))
    message = refusal("ppo", "--experiment", tmp_path)
    assert "is a run of impala" in message and "`cleanba impala`" in message


def test_experiment_of_another_version_is_refused_with_its_fields(done, tmp_path):
    config = json.loads((done / "config.json").read_text())
    config["experiment"]["forgotten"] = 1
    (tmp_path / "config.json").write_text(json.dumps(config))
    message = refusal("ppo", "--experiment", tmp_path)
    assert "forgotten" in message and "another version" in message


# ------------------------------------------------------------------------------------------------------ what is offered

FLAGS = """
    --exp-name --seed --track --wandb-project-name --wandb-entity --save-model --log-frequency --env-id
    --total-timesteps --learning-rate --num-steps --anneal-lr --gamma --gae-lambda --num-minibatches
    --update-epochs --norm-adv --clip-coef --ent-coef --vf-coef --max-grad-norm --channels --hiddens
    --actor-device-ids --learner-device-ids --distributed --concurrency --num-envs --num-actors --num-shards
    --network --core --collector --dtype --experiment --run-dir --env-epoch --checkpoint-frequency
    --repeat-action-probability --full-action-space --episodic-life --max-episode-steps --reward-clip
    --coordinator-address --num-processes --process-id
"""


GROUPS = ["essentials", "learning", "environment", "collecting", "network", "placement", "run", "more"]


@pytest.mark.parametrize("width", [72, 100, 200])
@pytest.mark.parametrize("asked", ["--help", "--help-all", "-h"])
def test_help_explains_every_flag_essentials_first(asked, width, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(width))
    ended = command("ppo", asked)
    assert ended.code == 0 and ended.err == ""
    lines = ended.out.splitlines()
    assert max(map(len, lines)) <= width and max(map(len, lines)) <= 120
    headings = [line.partition(":")[0] for line in lines if line and line[0] != " " and line[-1] == ":"]
    logged = "what its log has (metrics.jsonl)"
    assert headings == GROUPS + [logged] * (asked == "--help-all")
    entries = re.split(r"\n  (?=--)", ended.out.partition(f"\n{logged}:")[0])[1:]
    flags = [re.match(r"--[a-z-]+", entry)[0] for entry in entries]
    assert flags[:5] == ["--env-id", "--total-timesteps", "--seed", "--learning-rate", "--num-envs"]
    groups = (RECIPES["ppo"].experiment, Placement, Run)
    every = {flag(name) for group in groups for name in fields_of(group)} - {"--experiment-from"} | {"--experiment"}
    assert set(flags) == every | {"--preset", "--help-all", "--show-config"} and len(flags) == len(set(flags))
    assert set(FLAGS.split()) <= set(flags)
    for entry in entries[:-3]:  # a flag, what it takes, what it means, and its default
        assert re.search(r"[a-z]{2,} [^[]*[a-z]+.*\[default .*\]", " ".join(entry.split())), entry
        assert all(line.startswith(" " * 32) for line in entry.split("\n\n")[0].splitlines()[1:]), "in two columns"
    assert ("[0, 1]" in ended.out) == (asked == "--help-all")  # which values are allowed
    assert ("losses/" in ended.out) == (asked == "--help-all") and "](" not in ended.out  # what is logged


def test_help_says_what_a_default_of_none_means():
    text = " ".join(command("ppo", "--help").out.split())
    for words in (
        "--checkpoint-frequency N updates between checkpoints [default none: one a minute, or fewer",
        "which also keep the best parameters [default 0: never]",
        "directory of the run [default none: runs/<env>__<exp-name>__<seed>__<time",
    ):
        assert words in text
    text = " ".join(command("dqn", "--help").out.split())
    assert "step of the target network towards the online one [default 1.0]" in text


@pytest.mark.parametrize("name", [name for name, known in COMMANDS.items() if known.flags])
def test_help_of_other_commands_explains_every_flag(name):
    form = getattr(importlib.import_module(COMMANDS[name].where.partition(":")[0]), COMMANDS[name].flags)
    ended = command(name, "--help")
    assert ended.code == 0 and ended.err == "" and ended.out.startswith(f"usage: cleanba {name} ")
    text = " ".join(ended.out.split())
    hints = get_type_hints(form, include_extras=True)
    for field, known in fields_of(form).items():
        placed = tyro.conf.Positional in getattr(hints[field], "__metadata__", ())
        assert placed or f" {written_flag(field)} " in text.replace(", --no-", " --no-"), field
        assert (f" {written_flag(field)} WORD" in text) <= ("str" in str(hints[field])), f"{field} takes no word"
        assert known.about.partition(" (")[0] in text, field
    assert "None" not in text and command(name, "-h").out == ended.out


def test_names_that_look_like_emoji_or_styles_are_printed_as_they_are(capsys):
    display = Display(Status("ppo on pic:A: [b]x[/i]", 1))
    display.say("ppo on pic:A: [b]x[/i]")
    assert capsys.readouterr().out == "ppo on pic:A: [b]x[/i]\n"
    console = Terminal(width=100, markup=False, emoji=False)
    console.print(panel(Status("ppo on pic:A: [b]x[/i]", 1)))
    assert "ppo on pic:A: [b]x[/i]" in capsys.readouterr().out


def test_a_run_that_ended_before_its_first_log_point_names_no_curves(tmp_path):
    result = {"status": "interrupted", "global_step": 64, "seconds": 2.0, "sps": None}
    result |= {"episodic_return": None, "target_return_reached": None}
    row = {"update": 1, "params_digest": "sha256:0"}
    for more, names in (({}, False), ({"charts/SPS": 1.0}, True)):
        (tmp_path / "metrics.jsonl").write_text(json.dumps(row | more) + "\n")
        words = closing_words(tmp_path, result, tmp_path / "a.mp4")
        assert ("\ncurves:  cleanba report" in words) == names and words.endswith(f"\nfilm:    {tmp_path / 'a.mp4'}")


def test_a_computation_of_earlier_updates_shows_no_returns(capsys):
    """Its returns are those of a few updates, not the run's."""
    for recomputes in (False, True):
        status = Status("updates 5 to 10", 10, update=6, global_step=6_000, episodes=7, recomputes=recomputes)
        assert plain_line(status) == "updates 5 to 10 | starting"
        status.phase = "training"
        Terminal(width=100).print(panel(status))
        for shown in (plain_line(status), capsys.readouterr().out):
            assert "6,000" in shown and "update 6/10" in shown
            assert [word in shown for word in ("return", "length", "episodes")] == [not recomputes] * 3, shown


def test_a_count_alone_makes_no_line_of_its_own_where_there_is_no_terminal(capsys):
    status = Status("ppo", 1)
    display = Display(status)
    for status.phase in ("compiling", *(f"playing recorded actions: {n} of 30 steps" for n in range(30)), "training"):
        display.refresh()
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(" | ")[1] for line in lines[:2]] == ["compiling", "playing recorded actions: 0 of 30 steps"]
    assert len(lines) == 3, lines


def test_the_defaults_are_those_of_the_original_on_atari():
    expected = dict(
        total_timesteps=50_000_000, learning_rate=2.5e-4, anneal_lr=True, num_steps=128, num_minibatches=4,
        update_epochs=4, clip_coef=0.1, ent_coef=0.01, vf_coef=0.5, max_grad_norm=0.5, gamma=0.99, gae_lambda=0.95,
        norm_adv=True, network="impala", channels=(16, 32, 32), hiddens=(256,), concurrency=True, num_envs=120,
        repeat_action_probability=0.25, full_action_space=True, episodic_life=False,
    )  # fmt: skip
    values = dataclasses.asdict(resolve(RECIPES["ppo"], {}, "cpu").experiment)
    assert {name: values[name] for name in expected} == expected


def test_a_directory_in_use_for_something_else_is_no_run_directory(tmp_path, monkeypatch):
    """As of `--run-dir "$UNSET"`."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "thesis.tex").write_text("")
    for place in ("", tmp_path, ".."):
        assert "is the current directory" in refusal("ppo", *TINY, "--run-dir", place)
    assert [p.name for p in tmp_path.iterdir()] == ["thesis.tex"]


def test_the_bare_command_lists_its_commands():
    asked, bare = command("--help"), command()
    assert (asked.code, bare.code) == (0, 2)
    assert "ppo" in asked.out and asked.out == bare.out
    assert re.fullmatch(r"cleanba \d+\.\d+\.\d+\n", command("--version").out)


def test_python_m_cleanba_is_the_command(tmp_path):
    """Two processes; in the second, JAX must not have touched a device before it is told that it is one of several."""
    run_dir = tmp_path / "run"
    good = python("-m", "cleanba", "--help")
    alone = python("-m", "cleanba", "ppo", *TINY, "--distributed", "--run-dir", run_dir)
    good, alone = finish(good), finish(alone)
    assert good.code == 0 and good.out == command("--help").out
    assert alone.code == 2 and alone.err.startswith("cleanba: ")
    assert "found no cluster" in alone.err and "--coordinator-address" in alone.err and alone.err.count("\n") == 1
    assert not run_dir.exists()


def test_checkpoints_without_a_config_belong_to_no_experiment(tmp_path):
    """Otherwise another experiment would take them for its own."""
    assert command("ppo", *TINY, "--run-dir", tmp_path / "run").code == 0
    (tmp_path / "run/config.json").unlink()
    before = sorted(tmp_path.rglob("*"))
    assert "resume continues" in refusal("resume", tmp_path / "run", "--run-dir", tmp_path / "other")
    ended = command("ppo", *TINY, "--seed", "7", "--run-dir", tmp_path / "run")
    assert ended.code == 2 and "holds checkpoints, but no config.json" in ended.err
    assert [path for path in sorted(tmp_path.rglob("*")) if path.name != ".lock"] == [
        path for path in before if path.name != ".lock"
    ]


@pytest.mark.parametrize(
    "words, said",
    [
        (("ppo", "--run-dir", "x" * 300), "cannot be written: File name too long; choose another --run-dir"),
        (("eval", "~nobody-here/x"), "there is no such home directory"),
        (("eval", "odd/sweep.json"), "odd/sweep.json is a file; name the directory of a run"),
        (("ls", "x" * 300), "cannot be used: File name too long"),
        (("ppo", *TINY, "--run-dir", "a\udcff"), "has characters that cannot be shown"),
        (("plot", "--out", "", "."), "--out . names no file"),
        (("report", "--out", "", "."), "--out . names no file"),
        (("sweep", "--env-ids", "--", "ppo"), "--env-ids names no environment"),
        (("sweep", "status", "odd"), "sweep.json was not written by a sweep"),
        (
            ("sweep", "--env-ids", "Catch-v0", "--dir", "run", "--", "ppo"),
            "is a run of its own",
        ),
    ],
)
def test_invalid_names_are_refused_in_one_sentence(words, said, tmp_path, monkeypatch):
    (tmp_path / "odd").mkdir()
    (tmp_path / "odd/sweep.json").write_text("{}")
    (tmp_path / "run").mkdir()
    (tmp_path / "run/config.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    # Only a process has arguments and an stderr with this character.
    ended = finish(python("-m", "cleanba", *words)) if "a\udcff" in words else command(*words)
    assert ended.code == 2 and said in ended.err and ended.err.count("\n") == 1, ended


@pytest.mark.parametrize("number", ["abc", "0", ""])
def test_an_invalid_number_of_devices_is_refused(number, monkeypatch):
    monkeypatch.setenv("JAX_NUM_CPU_DEVICES", number)
    ended = command("ppo", "--help")
    assert ended.code == 2 and f"JAX_NUM_CPU_DEVICES='{number}' must be a whole number" in ended.err


def test_tilde_is_the_home_directory_and_printed_commands_can_be_pasted(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    ended = command("ppo", *TINY, "--run-dir=~/a run")
    run = tmp_path / "a run"
    assert ended.code == 0 and (run / "result.json").exists()
    assert f"cleanba report '{run}'" in ended.out
    assert Run_of("~/a run").run_dir == run


def test_a_run_that_another_process_trains_is_refused(done, accept, tmp_path):
    """Uses `done`, which has already compiled the few programs that find out shapes."""
    run = tmp_path / "run"
    with lock(run):
        said = refusal("ppo", *TINY, "--run-dir", run)
        assert said == f"another process is running in {run}; wait for it to end, or choose another --run-dir"
    assert accept(*TINY, "--run-dir", run)


def test_an_experiment_that_ran_with_other_packages_comes_with_a_warning(done, tmp_path):
    earlier = tmp_path / "earlier"
    shutil.copytree(done, earlier)
    config = json.loads((earlier / "config.json").read_text())
    again = lambda name: command("ppo", "--experiment", earlier, "--run-dir", tmp_path / name)
    assert "the bits may differ" not in again("same").out
    here, config["packages"]["jax"] = config["packages"]["jax"], "0.1"
    (earlier / "config.json").write_text(json.dumps(config))
    ended = again("other")
    assert ended.code == 0, ended
    assert f"the bits may differ from the earlier run's, because these differ: jax: 0.1, now {here}" in ended.out


@pytest.mark.parametrize("words", [["ppo", "--help"], ["ppo", *TINY, "--total-timesteps", "640000"]])
def test_a_closed_pipe_ends_the_command_quietly(words, tmp_path):
    """As in `cleanba ppo | head -1`."""
    trains = len(words) > 2
    process = python("-m", "cleanba", *words, *(["--run-dir", tmp_path / "run"] if trains else []))
    assert process.stdout is not None
    process.stdout.close()  # before it has anything to say
    process.stdout = None  # for `communicate`
    ended = finish(process)
    if not trains:
        assert ended.code in (1, 128 + signal.SIGPIPE) and ended.err == ""
        return
    assert ended.code == 128 + signal.SIGTERM
    said = "cleanba: output cannot be written (Broken pipe), so the run ends"
    assert ended.err.splitlines() == [said, "cleanba: interrupted by SIGTERM"]
    assert read_result(tmp_path / "run")["status"] == "interrupted"


@pytest.mark.parametrize("words", [["ls", "--help"], ["ls", "nowhere"]])
def test_short_output_that_cannot_be_written_is_no_traceback(words, tmp_path):
    with open("/dev/full", "w") as full:
        env = {**os.environ, "PYTHONPATH": str(ROOT)}
        run = functools.partial(
            subprocess.run, [sys.executable, "-m", "cleanba", *words], env=env, text=True, timeout=300
        )
        told = run(stdout=full, stderr=subprocess.PIPE, check=False)
        silent = run(stdout=full, stderr=full, check=False)
    wrong = "nowhere" in words
    assert told.returncode == (2 if wrong else 1) and "Traceback" not in told.stderr and told.stderr.count("\n") == 1
    assert silent.returncode == (1 if wrong else told.returncode)
    assert wrong or "output cannot be written" in told.stderr


def test_output_that_a_full_disk_does_not_take_is_dropped(tmp_path):
    """As in `cleanba ppo > log 2>&1`, and with a terminal beside it."""
    for name, both in (("one", False), ("both", True)):
        with open("/dev/full", "w") as full:
            env = {**os.environ, "PYTHONPATH": str(ROOT)}
            words = [sys.executable, "-m", "cleanba", "ppo", *TINY, "--run-dir", str(tmp_path / name)]
            error = full if both else subprocess.PIPE
            ended = subprocess.run(words, stdout=full, stderr=error, env=env, text=True, timeout=300, check=False)
        said = "cleanba: output cannot be written (No space left on device) and is dropped; the run goes on"
        assert ended.returncode == 0 and (ended.stderr is None if both else ended.stderr.splitlines() == [said]), ended
        assert read_result(tmp_path / name)["status"] == "finished"


@pytest.mark.parametrize("name", ["gamma", "log_frequency", "checkpoint_frequency", "keep_checkpoints"])
def test_processes_must_agree_on_what_all_of_them_do_together(name, monkeypatch, tmp_path):
    """Otherwise each would wait for the others after different updates."""

    class Noted(UsageError):
        pass

    def note(flags):
        noted.append(flags)
        raise Noted("noted")

    noted: list[dict] = []
    monkeypatch.setattr("cleanba.launch.require_same_flags", note)
    for value in ("0.5", "0.6") if name == "gamma" else ("5", "6"):
        assert command("ppo", *TINY, flag(name), value, "--run-dir", tmp_path / "run").code == 2
    assert {key for key in noted[0] if noted[0][key] != noted[1][key]} == {name}


def test_a_name_below_which_orbax_loses_checkpoints_is_refused(tmp_path):
    said = refusal("ppo", *TINY, "--run-dir", tmp_path / "a[1]" / "run")
    assert "a[1]/run has a [, and Orbax writes no whole checkpoints below such a name; choose another --run-dir" in said


def test_a_symbolic_link_to_itself_is_no_run_directory(tmp_path):
    (tmp_path / "loop").symlink_to("loop")
    assert "loop cannot be" in refusal("ppo", *TINY, "--run-dir", tmp_path / "loop")


@pytest.mark.parametrize(
    "words, says",
    [
        (["CartPole-v1"], "CartPole-v1 has no flag before it; write --env-id CartPole-v1"),
        (["--algo", "PPO"], "the algorithm is the command, as in `cleanba ppo`"),
        (["--with-wandb", "True"], "ppo has no --with-wandb; set --track"),
        (["--num_workers=4"], "ppo has no --num-workers; set --num-actors, and --num-envs"),
        (["system.rollout_length=64", "env=atari"], "system.rollout_length=64: flags are written --name value"),
        (["--seed", "3", "env=atari"], "env=atari: flags are written --name value, such as --num-steps 64;"),
        (["--batch-size", "64"], "ppo has no --batch-size; a batch has num_envs x num_steps steps"),
        (["--env-id", "PongNoFrameskip-v4"], "; it is Pong-v5 here"),
        (["--env-id", "SpaceInvadersDeterministic-v4"], "; it is SpaceInvaders-v5 here"),
        (["--env-id", "ALE/Breakout-v5"], "; it is Breakout-v5 here"),
        (["--env-id", "gymnasium:ALE/Pong-v5"], "; it is Pong-v5 here"),
        (["--env-id", "gymnasium:PongDeterministic-v4"], "; it is Pong-v5 here"),
    ],
)
def test_flags_and_environments_of_other_systems_lead_to_ours(words, says):
    assert says in refusal("ppo", *words)
