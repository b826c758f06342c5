"""A trained agent: its environment, its algorithm and its parameters, loaded from a run."""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, Protocol

import jax
import numpy as np

from cleanba.algorithm import Algorithm
from cleanba.config import Experiment, require
from cleanba.environments.kinds import env_spec
from cleanba.environments.specs import EnvSpec
from cleanba.errors import Failure
from cleanba.files import Json, read_json
from cleanba.recipes import Play, read_recipe
from cleanba.rollout import PyTree
from cleanba.runtime import checkpoint as ckpt
from cleanba.shards import network_options

BEST = "best"  # the folder of a run that holds the parameters which played best


class ActOnce(Protocol):
    """Acting as an agent does it: compiled once, for all steps."""

    def __call__(
        self,
        params: PyTree,
        carry: PyTree,
        obs: PyTree,
        first: np.ndarray,
        key: jax.Array,
        step: np.int32,
        explore: bool,
    ) -> tuple[jax.Array, PyTree]:
        """Obs [B, ...], first [B] -> action [B], carry."""
        ...


class Agent(NamedTuple):
    """A policy with its parameters, and the environment that it was trained for."""

    experiment: Experiment
    spec: EnvSpec
    algorithm: Algorithm
    act: ActOnce
    params: PyTree = None
    update: int | None = None
    """the update that made the parameters; None for a model without its run"""
    global_step: int | None = None
    plays: Play = Play()
    """how it acts where no flag says otherwise"""


def new_agent(e: Experiment, spec: EnvSpec, algorithm: Algorithm, platform: str, plays: Play = Play()) -> Agent:  # noqa: B008
    """An agent that has no parameters yet."""

    def act(
        params: PyTree, carry: PyTree, obs: PyTree, first: jax.Array, key: jax.Array, t: jax.Array, explore: bool
    ) -> tuple[jax.Array, PyTree]:
        return algorithm.act(params, carry, obs, first, jax.random.fold_in(key, t), explore)[:2]

    return Agent(
        e, spec, algorithm, jax.jit(act, static_argnums=6, compiler_options=network_options(platform)), plays=plays
    )


def load_agent(run_dir: Path, checkpoint: str, platform: str) -> Agent:
    """Network, environment and parameters, as the run's config.json and checkpoints have them.

    Raises:
        UsageError: no such run, no such checkpoint.
        Failure: the checkpoint is damaged.
    """
    recipe, e = read_recipe(run_dir)
    spec = env_spec(e)
    algorithm = recipe.make(e, spec, platform)
    like_state = jax.eval_shape(algorithm.init, jax.random.key(0))
    like_params = jax.eval_shape(algorithm.actor_params, like_state)
    params, update, global_step = read_params(run_dir, checkpoint, algorithm.actor_params, like_state, like_params)
    agent = new_agent(e, spec, algorithm, platform, recipe.plays)
    return agent._replace(params=params, update=update, global_step=global_step)


def read_params(
    run_dir: Path,
    checkpoint: str,
    actor_params: Callable[[PyTree], PyTree],
    like_state: PyTree,
    like_params: PyTree,
) -> tuple[PyTree, int | None, int | None]:
    """The parameters that `--checkpoint` names, their update and their global step.

    "last" is the newest sound checkpoint; without any, the model that --save-model kept.
    """
    there = ckpt.updates_kept(run_dir)
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
    for update in reversed(there):
        try:
            saved = ckpt.read(run_dir, update, like_state, like_params)
            return actor_params(saved.state), saved.update, saved.counters["global_step"]
        except Failure as error:  # damaged, or removed by the run since we looked
            damage = damage or error
    if damage is not None:
        raise damage
    model = run_dir / "model.msgpack"
    require(
        model.exists(),
        f"{run_dir} has no checkpoint yet: a run writes one every --checkpoint-frequency updates, and one at its end",
    )
    return ckpt.read_model(model, like_params), None, None


def read_best(run_dir: Path) -> Json:
    """What best/best.json says: update, global_step and episodic_return of the best evaluation while training.

    Raises:
        UsageError: there was none.
    """
    path = run_dir / BEST / "best.json"
    require(
        path.exists(),
        f"{run_dir} knows no best checkpoint, because nothing was evaluated while it trained; "
        "train with --eval-frequency, or try --checkpoint last",
    )
    return read_json(path)
