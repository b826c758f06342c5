"""`cleanba push RUN_DIR`: uploads a trained agent to the Hugging Face Hub, with a model card."""

import hashlib
import json
import re
import shlex
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import tyro

from cleanba.agents.policy import load_policy, lost_words
from cleanba.arguments import parse_command
from cleanba.config import read_config, read_experiment, require
from cleanba.errors import Exit, Failure, UsageError, said
from cleanba.files import METRICS, Json, files_below, optional_json, write_json
from cleanba.recipes import RECIPES, Play
from cleanba.resolution import IMPLIED, read_recipe
from cleanba.runs import log
from cleanba.runs.directory import EVALUATIONS, UPLOADED, films_of
from cleanba.runs.log import parse
from cleanba.runs.remote import PARTS, REPO, require_hub
from cleanba.runtime.chain import FIRST, FIRST_STEPS
from cleanba.runtime.checkpoint import save_model, updates_kept
from cleanba.runtime.devices import default_platform
from cleanba.runtime.digests import params_digest
from cleanba.trust import REMEDY, check_environment, require_trusted

MACHINE = (
    "packages",
    "revision",
    "code",
    "python",
    "device_kind",
    "local_devices",
    "num_processes",
    "cpu",
    "processor",
    "cpu_cores",
    "cpu_products",
    "cpu_threads",
    "sources",
)


@dataclass(frozen=True)
class Flags:
    """Upload a run's trained agent to the Hugging Face Hub, with its configuration, results and a model card."""

    run_dir: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN_DIR")]
    """directory of the run; if it is unfinished, its newest checkpoint is uploaded"""
    hf_entity: str | None = None
    """user or organisation to upload to (None: the user who is logged in)"""
    repo: str | None = None
    """name of the repository (None: <env>-<exp-name>-seed<seed>)"""
    private: bool = False
    """make the repository private, if it is new"""
    checkpoints: bool = False
    """also upload the checkpoints that the run keeps, with their replay memory and actors, so that anybody can
    `cleanba verify` it; prints their size first"""


class Model(NamedTuple):
    """The parameters that are uploaded."""

    update: int | None
    global_step: int | None
    digest: str | None
    result: Json
    """the run's result.json when they were read; empty if there was none"""


def push_command(argv: Sequence[str]) -> Exit:
    """`cleanba push`."""
    flags = parse_command(Flags, argv, "push")
    say = lambda text: print(text, flush=True)
    address = push(flags.run_dir, flags.hf_entity, flags.repo, flags.private, flags.checkpoints, say)
    print(f"uploaded: {address}")
    return Exit()


def require_login() -> None:
    """Raise `UsageError` if nobody is logged in, so that a run fails before training and not at its upload."""
    require(require_hub().get_token() is not None, "nobody is logged in to the Hugging Face Hub; " + LOG_IN)


LOG_IN = "log in with `hf auth login`, or set HF_TOKEN to a token with write access"


def push(
    run_dir: Path,
    entity: str | None = None,
    repo: str | None = None,
    private: bool = False,
    checkpoints: bool = False,
    say: Callable[[str], None] = lambda text: None,
) -> str:
    """Upload a run and return the address of its page.

    checkpoints: also upload all checkpoints that the run keeps, and what they need.
    say: called before the checkpoints are uploaded, with a line that states their number and size.

    Raises:
        UsageError: there is no such run, it has no parameters yet, or nobody is logged in.
        Failure: the Hub could not be reached, or refused; the message has the command that repeats the upload.
    """
    experiment = read_experiment(run_dir)
    require_trusted(run_dir, "only the original directory of a run can be uploaded")
    require_login()
    hub = require_hub()
    hub.utils.disable_progress_bars()
    api = hub.HfApi(library_name="cleanba")
    words = ["cleanba", "push", str(run_dir), *(["--hf-entity", entity] if entity else [])]
    again = shlex.join(
        [*words, *(["--repo", repo] if repo else []), *["--private"] * private, *["--checkpoints"] * checkpoints]
    )

    @contextmanager
    def attempt(what: str) -> Iterator[None]:
        """Turn any error of the Hub's library into a `Failure`."""
        try:
            yield
        except Exception as error:
            raise Failure(f"{what}; try again with `{again}` ({said(error)[:300]})") from error

    name, owner = repo or repository_name(run_dir, experiment), entity
    if not owner:
        with attempt("the Hub could not tell who is logged in"):
            owner = api.whoami()["name"]
    repo_id = f"{owner}/{name}"
    require(
        REPO.fullmatch(repo_id) is not None, f"{repo_id} is not a valid repository name; use letters, digits, . _ and -"
    )
    kept, files = [], []
    if checkpoints:  # listed before the log is read, so that the log has their digests even while the run trains
        kept = updates_kept(run_dir)
        files = kept_parts(run_dir)
    finished = log.is_finished(run_dir)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        fill(folder, run_dir, repo_id)
        with attempt(f"repository {repo_id} could not be created"):
            api.create_repo(repo_id, private=private or None, exist_ok=True)
        message = f"Upload {experiment['algorithm']} on {experiment['env_id']}, seed {experiment['seed']}"
        stale = checkpoints or not holds_this_run(api, repo_id, folder)
        gone = [*ABOUT, *(f"{part}/**" for part in PARTS if stale)]
        with attempt(f"{run_dir} could not be uploaded to {repo_id}"):
            api.upload_folder(repo_id=repo_id, folder_path=folder, commit_message=message, delete_patterns=gone)
    if checkpoints:
        there = set(updates_kept(run_dir))  # a run that is still training may have removed some
        kept, files = [update for update in kept if update in there], [path for path in files if path.exists()]
        size = sum(path.stat().st_size for path in files)
        say(f"uploading {len(kept)} checkpoints and what they need: {len(files):,} files, {size / 1e6:,.1f} MB")
        names = [path.relative_to(run_dir).as_posix() for path in files]
        message = f"Upload {len(kept)} checkpoints"
        with attempt(f"the checkpoints of {run_dir} could not be uploaded to {repo_id}"):
            api.upload_folder(repo_id=repo_id, folder_path=run_dir, allow_patterns=names, commit_message=message)
    address = f"{api.endpoint}/{repo_id}"
    with suppress(OSError):  # it is uploaded, whether or not that can be noted
        write_json(run_dir / UPLOADED, {"address": address, "finished": finished})
    return address


NAMES_ITS_FOLDER = "commit_success.txt"  # a file of Orbax's that names the run's folder and that nothing reads


def kept_parts(run_dir: Path) -> list[Path]:
    """The files of a run's checkpoints, replay memory and actors, without those that name the run's folder."""
    files = [path for part in PARTS for path in files_below(run_dir / part)]
    return [path for path in files if path.name != NAMES_ITS_FOLDER]


ABOUT = ("result.json", "eval.json", "replay.mp4")
"""files of an earlier upload that are removed if the run has none"""


def holds_this_run(api: Any, repo_id: str, folder: Path) -> bool:
    """Whether the checkpoints in a repository, if there are any, are those of the run whose files are in `folder`.

    They are if all digests in the repository's log are also in this run's log.
    """
    links = lambda path: {row["chain"] for _, row in parse(Path(path).read_bytes()) if row and "chain" in row}
    try:
        with tempfile.TemporaryDirectory() as scratch:
            theirs = links(api.hf_hub_download(repo_id, METRICS, local_dir=scratch))
        return bool(theirs) and theirs <= links(folder / METRICS)
    except Exception:  # there is no log, or it cannot be downloaded
        return False


LONGEST_NAME = 96  # which the Hub allows for a repository


def repository_name(run_dir: Path, experiment: Json) -> str:
    """A repository's name in CleanRL's form, such as CartPole-v1-ppo-seed1."""
    run = read_config(run_dir).get("run") or {}
    name = f"{experiment['env_id']}-{run.get('exp_name') or experiment['algorithm']}"
    seed = f"-seed{experiment['seed']}"
    if len(name + seed) > LONGEST_NAME:  # cut, and told apart by a hash of the whole
        mark = f"-{hashlib.sha256(name.encode()).hexdigest()[:8]}"
        name = name[: LONGEST_NAME - len(mark + seed)] + mark
    return re.sub(r"[-.]{2,}", "-", re.sub(r"[^\w.-]+", "-", name + seed, flags=re.ASCII)).strip("-.")


# What is uploaded


def fill(folder: Path, run_dir: Path, repo_id: str) -> None:
    """Fill a folder with everything to upload."""
    model = fill_run(folder, run_dir)
    films = films_of(run_dir, model.update)
    if films:
        shutil.copyfile(films[-1], folder / "replay.mp4")  # the name that the Hub shows beside the card
    (folder / "README.md").write_text(card(run_dir, repo_id, model, film=bool(films)), encoding="utf-8")


def needs_trust(run_dir: Path) -> bool:
    """Whether a run names modules of its author, so that others must say that they trust these."""
    if read_experiment(run_dir)["algorithm"] not in RECIPES:
        return True
    try:
        check_environment(read_recipe(run_dir)[1], "")
    except UsageError as refused:  # perhaps an environment that is not installed here, where trust does not help
        return str(refused).endswith(REMEDY)
    return False


def fill_run(folder: Path, run_dir: Path) -> Model:
    """Fill a folder with a run's parameters, configuration, log, result and evaluation -> the parameters."""
    if (run_dir / "result.json").exists():  # first: a run that ends meanwhile is taken as it was before
        shutil.copyfile(run_dir / "result.json", folder / "result.json")
    result = log.read_result(folder)
    model = write_model(folder / "model.msgpack", run_dir, result)
    (folder / "config.json").write_text(json.dumps(public_config(run_dir), indent=2) + "\n", encoding="utf-8")
    if (run_dir / METRICS).exists():
        shutil.copyfile(run_dir / METRICS, folder / METRICS)
    if "error" in result:  # it may name folders and hosts
        write_json(folder / "result.json", {name: value for name, value in result.items() if name != "error"})
    if kept := evaluation_of(run_dir, model.digest):
        shutil.copyfile(kept, folder / "eval.json")
    return model


def write_model(path: Path, run_dir: Path, result: Json) -> Model:
    """Write the parameters: those that --save-model kept of a finished run, or those of the newest checkpoint.

    Raises:
        UsageError: the run has no parameters yet.
        Failure: it has finished, but its last parameters cannot be read.
    """
    kept, finished = run_dir / "model.msgpack", result.get("status") == "finished"
    if kept.exists() and finished:
        shutil.copyfile(kept, path)
        return Model(result.get("update"), result.get("global_step"), result.get("params_digest"), result)

    try:
        policy = load_policy(run_dir, "last", default_platform())
    except Failure:
        if finished:
            raise Failure(lost_words(run_dir, result.get("update"))) from None
        raise
    save_model(path, policy.params)
    return Model(policy.update, policy.global_step, params_digest(policy.params), result)


def public_config(run_dir: Path) -> Json:
    """config.json without the names of folders, hosts, jobs and accounts."""
    config = read_config(run_dir)
    placement, run = config.get("placement", {}), config.get("run", {})
    private = ("run_dir", "experiment_from", "wandb_entity", "wandb_project_name", "hf_entity")
    return {
        "experiment": config["experiment"],
        "placement": placement | ({"coordinator_address": None} if "coordinator_address" in placement else {}),
        "run": {name: None if name in private else value for name, value in run.items()},
        # What followed from environment, device or other settings: `--preset` leaves it out.
        "origin": {name: where for name, where in config.get("origin", {}).items() if where in IMPLIED},
        **{name: config[name] for name in (*MACHINE, FIRST_STEPS, FIRST) if name in config},
    }


def evaluation_of(run_dir: Path, digest: str | None) -> Path | None:
    """The newest result of `cleanba eval` for the parameters with this digest; None if they were never evaluated."""
    kept = sorted((run_dir / EVALUATIONS).glob("*.json"), key=lambda path: path.stat().st_mtime, reverse=True)
    newest = run_dir / "eval.json"
    for path in [newest] * newest.exists() + kept:
        if (found := optional_json(path)) and found.get("params_digest") == digest:
            return path
    return None


def card(run_dir: Path, repo_id: str, model: Model, film: bool) -> str:
    """The model card: metadata that the Hub reads, then results, usage and configuration."""
    hub = require_hub()
    e = read_experiment(run_dir)
    result = model.result
    kept = evaluation_of(run_dir, model.digest)
    evaluation = optional_json(kept) if kept else {}
    if evaluation.get("mean") is None:  # it is not finite
        evaluation = {}
    name = f"{e['algorithm']}-{e['env_id']}"
    metrics = []
    if evaluation:
        metrics.append(("mean_reward", f"{evaluation['mean']:.2f} +/- {evaluation['std']:.2f}"))
        if evaluation.get("human_normalised_score") is not None:
            metrics.append(("human_normalised_score", f"{evaluation['human_normalised_score']:.3f}"))
    elif result.get("status") == "finished" and result.get("episodic_return") is not None:
        metrics.append(("training_return_of_last_100_episodes", f"{result['episodic_return']:.2f}"))
    about = {"task_type": "reinforcement-learning", "task_name": "reinforcement-learning"}
    about |= {"dataset_type": e["env_id"], "dataset_name": e["env_id"]}
    data = hub.ModelCardData(
        model_name=name,
        library_name="cleanba",
        pipeline_tag="reinforcement-learning",
        tags=["deep-reinforcement-learning", "reinforcement-learning", "cleanba", e["algorithm"], e["env_id"]],
        eval_results=[
            hub.EvalResult(metric_type=metric, metric_name=metric, metric_value=value, **about)
            for metric, value in metrics
        ]
        or None,
    )
    after = (
        ""
        if None in (model.update, model.global_step)
        else f", after update {model.update} and {model.global_step:,} environment steps"
    )
    unfinished = result.get("status") != "finished"
    results = [f"| {metric.replace('_', ' ')} | {value} |" for metric, value in metrics]
    cut = evaluation.get("truncated") or 0
    played = f"episodes, {cut} of them cut off by a step limit" if cut else "complete episodes"
    how = (
        f"Over {evaluation['episodes']} {played}, "
        + "by "
        + Play(bool(evaluation.get("greedy")), float(evaluation.get("epsilon") or 0.0)).in_words()
        + f", seed {evaluation['seed']}."
        if evaluation
        else "Not evaluated apart from training."
    )
    trust = needs_trust(run_dir)
    again = (
        f"`cleanba {e['algorithm']} --experiment FOLDER`, where FOLDER holds that file, trains it again, bit for bit "
        "on hardware and packages of the same kind. "
    )
    if e.get("init_from"):  # the parameters that it began with are not uploaded
        again = ""
    show = lambda value: json.dumps(value).replace("|", "\\|").replace("`", "'")
    parts = [
        f"# {e['algorithm'].upper()} on {e['env_id']}\n",
        f"A policy trained with Cleanba{after}, seed {e['seed']}."
        + (" The run has not finished." if unfinished else "")
        + (f" Its parameters have the digest `{model.digest}`." if model.digest else "")
        + "\n",
        "## Results\n",
        how + "\n",
        "\n".join(["| | |", "|---|---|", *results]) + "\n" if results else "",
        "A film of it is in `replay.mp4`.\n" if film else "",
        "## Usage\n",
        "With Cleanba and its extra `hub` installed:\n",
        f"```bash\ncleanba eval hf://{repo_id} --episodes 30 --video{' --trust-remote-code' * trust}\n```\n",
        "You need the modules of its environment and algorithm, which are not uploaded.\n" * trust,
        f"`config.json` holds the whole experiment. {again}`model.msgpack` holds the parameters in Flax's format, "
        "`metrics.jsonl` the log.\n",
        "## Configuration\n",
        "\n".join(["| field | value |", "|---|---|", *(f"| `{k}` | `{show(v)}` |" for k, v in e.items())]) + "\n",
    ]
    return f"---\n{data.to_yaml()}\n---\n\n" + "\n".join(part for part in parts if part)
