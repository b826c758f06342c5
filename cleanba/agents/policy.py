"""A policy with its parameters, from a run's config.json and checkpoints."""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, Protocol

import jax
import numpy as np

from cleanba.algorithm import AnyAlgorithm
from cleanba.config import Experiment, read_config, require
from cleanba.environments.backends import env_spec, with_infos
from cleanba.errors import Failure, warn
from cleanba.files import Json, read_json
from cleanba.recipes import AnyRecipe
from cleanba.resolution import read_recipe
from cleanba.rollout import Obs, PyTree
from cleanba.runs.log import read_result
from cleanba.runtime import checkpoint as ckpt
from cleanba.runtime.digests import params_digest
from cleanba.shards import network_options
from cleanba.specs import EnvSpec
from cleanba.trust import check_size, source_of

BEST = "best"  # the folder of a run with the parameters that scored best in periodic evaluations


class ActOnce(Protocol):
    """An algorithm's `act`, compiled once for all steps."""

    def __call__(
        self,
        params: PyTree,
        carry: PyTree,
        obs: Obs,
        first: np.ndarray,
        key: jax.Array,
        step: np.int32,
        explore: bool,
    ) -> tuple[jax.Array, PyTree]:
        """Obs [B, ...], first [B] bool, the number of the step -> action [B, ...], carry with leaves [B, ...]."""
        ...


class Policy(NamedTuple):
    """A policy with its parameters, and the environment that it was trained for."""

    experiment: Experiment
    spec: EnvSpec
    recipe: AnyRecipe
    algorithm: AnyAlgorithm
    act: ActOnce
    params: PyTree = None
    update: int | None = None
    """the update that made the parameters; None for a model without its run"""
    global_step: int | None = None
    run: str = ""
    """name of its run's directory"""


def new_policy(recipe: AnyRecipe, e: Experiment, spec: EnvSpec, algorithm: AnyAlgorithm, platform: str) -> Policy:
    """A policy without parameters.  `algorithm` is what the recipe made."""

    def act(
        params: PyTree, carry: PyTree, obs: Obs, first: jax.Array, key: jax.Array, t: jax.Array, explore: bool
    ) -> tuple[jax.Array, PyTree]:
        return algorithm.act(params, carry, obs, first, jax.random.fold_in(key, t), explore)[:2]

    compiled = jax.jit(act, static_argnums=6, compiler_options=network_options(platform))
    return Policy(e, spec, recipe, algorithm, compiled)


def load_policy(run_dir: Path, checkpoint: str, platform: str, trust_remote_code: bool = False) -> Policy:
    """The policy of a run: network, environment and parameters, from its config.json and checkpoints.

    Of a run from elsewhere (`trust.py`) "last" is the model in Flax's msgpack format, because checkpoints beside it may
    be of an earlier download.  Without `trust_remote_code` nothing else of it is read.

    Raises:
        UsageError: there is no such run or checkpoint, or a run from elsewhere asks for something that is not allowed.
        Failure: the checkpoint is damaged.
    """
    recipe, e = read_recipe(run_dir, trust_remote_code)
    source = source_of(run_dir)
    spec = with_infos(env_spec(e), infos_logged(run_dir))
    algorithm = recipe.make(e, spec, platform)
    like_state, like_params = algorithm.shapes()
    if source is None or (trust_remote_code and checkpoint != "last"):
        params, update, global_step = read_params(run_dir, checkpoint, algorithm.actor_params, like_state, like_params)
    else:
        if not trust_remote_code:
            check_size(like_params, source)
        params, update, global_step = read_uploaded(run_dir, checkpoint, source, like_params)
    policy = new_policy(recipe, e, spec, algorithm, platform)
    return policy._replace(params=params, update=update, global_step=global_step, run=run_dir.resolve().name)


def infos_logged(run_dir: Path) -> tuple[str, ...]:
    """The names of --log-info in a run's config.json."""
    run = read_config(run_dir).get("run")
    names = run.get("log_info") if isinstance(run, dict) else None
    return tuple(map(str, names)) if isinstance(names, list) else ()


def read_params(
    run_dir: Path,
    checkpoint: str,
    actor_params: Callable[[PyTree], PyTree],
    like_state: PyTree,
    like_params: PyTree,
) -> tuple[PyTree, int | None, int | None]:
    """The parameters that `--checkpoint` names, their update and their global step.

    "last" is the newest sound checkpoint; of a finished run only its last one.  Where that is missing or damaged, it is
    the model that --save-model kept.
    """
    there = ckpt.updates_to_read(run_dir)
    listed = f"it has {', '.join(map(str, there))}" if there else "it has none yet"
    if checkpoint.isdecimal():
        require(
            int(checkpoint) in there,
            f"{run_dir} keeps no checkpoint of update {checkpoint}; {listed} (--keep-checkpoints keeps more of them)",
        )
        saved = ckpt.read(run_dir, int(checkpoint), like_state, like_params)
        return actor_params(saved.state), saved.update, saved.counters["global_step"]
    if checkpoint == "best":
        best = read_best(run_dir)
        model = run_dir / BEST / f"{best['update']}.msgpack"
        return ckpt.read_model(model, like_params), best["update"], best["global_step"]
    require(checkpoint == "last", f"checkpoint={checkpoint!r} must be the number of an update, best, or last; {listed}")
    damage: Failure | None = None
    model, ended = run_dir / "model.msgpack", read_result(run_dir)
    finished, kept = ended.get("status") == "finished", None
    last = ended.get("update")
    lost = finished and bool(there) and there[-1] != last
    if lost or not there:
        kept = last_model(model, like_params, ended)  # earlier checkpoints are not what it ended with
    if lost and kept is None and last is not None:
        raise Failure(lost_words(run_dir, last))
    for update in ckpt.newest_first(run_dir, there) if kept is None else ():
        try:
            saved = ckpt.read(run_dir, update, like_state, like_params)
        except Failure as error:  # damaged, or removed by the run since we looked
            damage = damage or error
            continue
        if damage is not None and there[-1] in ckpt.updates_kept(run_dir):
            if finished:
                break
            why = str(damage).removesuffix("; try another --checkpoint")
            warn(f"{why}; taking the checkpoint of update {update} instead")
        return actor_params(saved.state), saved.update, saved.counters["global_step"]
    if damage is not None:
        kept = last_model(model, like_params, ended)
        if kept is None:
            raise damage
    if kept is not None:
        return kept, ended.get("update"), ended.get("global_step")
    require(
        model.exists(),
        f"{run_dir} has no checkpoint"
        + (
            "; its checkpoints have been removed, so choose another run"
            if ended.get("update")
            else f": it ended before the first; `cleanba resume {run_dir}` starts it again"
            if ended
            else " yet: a run without --checkpoint-frequency writes its first after ten seconds, or after the first "
            "epoch of environments that do not follow their seed; with --checkpoint-frequency 0 it writes one when it "
            "ends"
        ),
    )
    return ckpt.read_model(model, like_params), None, None


def lost_words(run_dir: Path, last: int | None) -> str:
    """The sentence for a finished run that has lost its last parameters; `last` is its last update."""
    return (
        f"{run_dir} has finished with update {last}, but its last parameters cannot be read; restore "
        f"{run_dir}/checkpoints/{last} or {run_dir}/model.msgpack"
    )


def last_model(model: Path, like_params: PyTree, ended: Json) -> PyTree | None:
    """The parameters of a model, if they are those that its run ended with; else None.

    ended: the run's result.json; {} if it has none.
    """
    try:
        params = ckpt.read_model(model, like_params)
    except Failure:  # it is damaged or missing
        return None
    return params if params_digest(params) == ended.get("params_digest") else None


def read_uploaded(
    run_dir: Path, checkpoint: str, source: str, like_params: PyTree
) -> tuple[PyTree, int | None, int | None]:
    """The parameters of a run from elsewhere: its only model, whose update and step cannot be verified (None, None)."""
    require(checkpoint == "last", f"checkpoint={checkpoint!r}: {source} has one model; leave --checkpoint out")
    model = run_dir / "model.msgpack"
    require(model.exists(), f"{source} has no model.msgpack; choose another run")
    return ckpt.read_model(model, like_params), None, None


def read_best(run_dir: Path) -> Json:
    """best/best.json: update, global_step and episodic_return of the best periodic evaluation.

    Raises:
        UsageError: there was no such evaluation.
    """
    path = run_dir / BEST / "best.json"
    require(
        path.exists(),
        f"{run_dir} has no best checkpoint, because nothing was evaluated while it trained; "
        "train with --eval-frequency, or try --checkpoint last",
    )
    return read_json(path)
