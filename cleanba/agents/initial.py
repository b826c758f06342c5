"""Parameters of another run to start from (`--init-from`): found, named by their digest, and put into a new state."""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np

from cleanba.agents.policy import load_policy
from cleanba.algorithm import AnyAlgorithm
from cleanba.config import require
from cleanba.environments.backends import env_spec
from cleanba.errors import Failure, UsageError, warn
from cleanba.files import expanded
from cleanba.resolution import read_recipe, recorded
from cleanba.rollout import PyTree, named_leaves
from cleanba.runs.log import read_result
from cleanba.runs.remote import find_run
from cleanba.runtime import checkpoint as ckpt
from cleanba.runtime.digests import tree_digest
from cleanba.trust import source_of

DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
# The parts of a learner's state that always start anew: optimisers, and counters of updates and steps.
FRESH = re.compile(r"\.(optimiser|updates|since_\w+)\b")
# The parts that start anew if the other run's parameters lack them, as parameters that only act do.
OPTIONAL = (".log_alpha", ".statistics.discounted_return")


class Initial(NamedTuple):
    """Parameters to start from."""

    digest: str
    place: str
    """where they were found"""
    arrays: Mapping[str, np.ndarray]
    """by their names in the learner's state"""
    algorithm: str
    """of the run that they were found in"""


def find_initial(place: str, platform: str, trust_remote_code: bool = False) -> Initial:
    """The parameters that `--init-from` names: RUN, RUN:best, RUN:UPDATE, or a checkpoint's own directory.

    A checkpoint holds all networks, including target networks.  The best parameters, a saved model and a model from the
    Hub hold only the parameters that act, and target networks start as copies of them.

    Raises:
        UsageError: there is no such run or checkpoint.
        Failure: the checkpoint is damaged.
    """
    run, checkpoint = place, "last"
    if (expanded(place) / "config.json").exists():
        pass  # a run, even if its name ends like RUN:best or RUN:UPDATE
    elif (found := re.fullmatch(r"(.+):(best|last|\d+)", place)) is not None:
        run, checkpoint = found[1], found[2]
    elif re.fullmatch(r"hf://[^/]+/best", place):
        pass  # a repository of that name
    elif (found := re.fullmatch(r"(.+)/(?:checkpoints/(\d+)|(best))/?", place)) is not None:
        run, checkpoint = found[1], found[2] or found[3]
    run_dir = find_run(run)
    recipe, e = read_recipe(run_dir, trust_remote_code)
    there = ckpt.updates_to_read(run_dir)
    state = None
    with naming_a_run():
        if checkpoint != "best" and source_of(run_dir) is None and there:
            require(
                checkpoint == "last" or int(checkpoint) in there,
                f"{run_dir} keeps no checkpoint of update {checkpoint}; it has {', '.join(map(str, there))}",
            )
            state = read_state(run_dir, checkpoint, there, recipe.make(e, env_spec(e), platform))
        policy = load_policy(run_dir, checkpoint, platform, trust_remote_code) if state is None else None
    if policy is not None:
        arrays = of_acting(policy.algorithm, policy.params)
    else:
        arrays = {name: np.asarray(x) for name, x in named_leaves(state).items() if not FRESH.search(name)}
    return Initial(f"sha256:{tree_digest(arrays).removeprefix('sha256:')}", place, arrays, recipe.name)


FLAG = "; try another --checkpoint"  # a remedy of errors, which training cannot follow


@contextmanager
def naming_a_run() -> Iterator[None]:
    """Errors that name --checkpoint name what --init-from takes instead."""
    try:
        yield
    except Failure as error:
        if not str(error).endswith(FLAG):
            raise
        why = str(error).removesuffix(FLAG)
        raise Failure(f"{why}; name another run, or one of its updates as RUN:UPDATE") from error
    except UsageError as error:
        words = re.sub("leave --checkpoint out$|try --checkpoint last$", "name the run alone", str(error))
        raise UsageError(words) from error


def read_state(run_dir: Path, checkpoint: str, there: list[int], algorithm: AnyAlgorithm) -> PyTree | None:
    """The learner's state from the checkpoint of this update, or from the newest sound one for "last".

    None for a finished run whose last checkpoint is missing or damaged: earlier ones are not what it ended with.

    there: the updates of its checkpoints, in order.

    Raises:
        Failure: the checkpoint is damaged; for "last", all are.
    """
    like_state, like_params = algorithm.shapes()
    ended = read_result(run_dir) if checkpoint == "last" else {}
    finished = ended.get("status") == "finished"
    if finished and ended.get("update", there[-1]) != there[-1]:
        return None
    damage: Failure | None = None
    for update in ckpt.newest_first(run_dir, there) if checkpoint == "last" else [int(checkpoint)]:
        if damage is not None:
            warn(f"{str(damage).removesuffix(FLAG)}; trying the one of update {update}")
        try:
            return ckpt.read(run_dir, update, like_state, like_params).state
        except Failure as error:
            if finished:
                return None
            damage = error
    assert damage is not None  # a run has at least one checkpoint here
    raise damage


def of_acting(algorithm: AnyAlgorithm, params: PyTree) -> dict[str, np.ndarray]:
    """The parameters that act, by their names in the learner's state; target networks are copies of them."""
    like, _ = algorithm.shapes()
    names = list(named_leaves(like))
    numbered = jax.tree.unflatten(jax.tree.structure(like), range(len(names)))
    acting = zip(jax.tree.leaves(algorithm.actor_params(numbered)), jax.tree.leaves(params), strict=True)
    arrays = {names[i]: np.asarray(x) for i, x in acting if not FRESH.search(names[i])}
    for name in names:
        if (target := re.fullmatch(r"\.targets?(\.\w+)?(\[.*)", name)) is not None:
            network = target[1] or (".online" if any(n.startswith(".online.") for n in names) else ".critics")
            arrays[name] = arrays[f"{network}.params{target[2]}"]
    return arrays


def require_fit(initial: Initial, state: PyTree, algorithm: str) -> None:
    """Raise `UsageError` unless `initial` and the networks of `state` have arrays of the same names and shapes.

    algorithm: the name of the one that `state` is of.
    """
    mine = named_leaves(state)
    networks = {name for name in mine if not FRESH.search(name) and not name.startswith(OPTIONAL)}
    theirs = {name for name in initial.arrays if name in mine or not name.startswith(OPTIONAL)}
    for name in sorted(networks | theirs):
        there = initial.arrays[name].shape if name in initial.arrays else None
        here = mine[name].shape if name in mine else None
        if there != here:
            has = lambda shape: "does not exist" if shape is None else f"has the shape {shape}"
            other = f"that run is of {initial.algorithm}, this one is of {algorithm}: "
            raise UsageError(
                f"init_from={initial.place}: {other if initial.algorithm != algorithm else ''}its networks differ from "
                f"this run's: {name} {has(there)} there, and {has(here)} here; use that run's settings (`cleanba "
                "ALGORITHM --experiment DIR --show-config`, with its directory, lists them)"
            )


def started_from(state: PyTree, arrays: Mapping[str, np.ndarray]) -> PyTree:
    """`state`, with these arrays replacing its own of the same names.  A temperature that is not learnt stays."""
    leaves, structure = jax.tree.flatten(state)
    names = named_leaves(state)
    learnt = any(name.startswith(".log_alpha.optimiser") for name in names)
    taken = {name: x for name, x in arrays.items() if learnt or not name.startswith(".log_alpha")}
    return jax.tree.unflatten(structure, [taken.get(name, x) for name, x in zip(names, leaves, strict=True)])


def find_again(
    digest: str, run_dir: Path, platform: str, trust_remote_code: bool = False, whole: Path | None = None
) -> Initial:
    """The parameters with this digest, from which a run begins or began.

    `whole` is the run whose whole experiment this run repeats: its directory may also record where they are.

    Raises:
        UsageError: they are no longer where they were.
    """
    place = (recorded(run_dir) or recorded(whole)).get("from")
    why = "no place is recorded"
    if place is not None:
        try:
            initial = find_initial(place, platform, trust_remote_code)
            if initial.digest == digest:
                return initial
            why = f"{place} now has other parameters"
        except (UsageError, Failure) as error:
            why = str(error)
    raise UsageError(
        f"{run_dir} starts from the parameters {digest[:19]}…, but they cannot be found: {why}; restore them, or, to "
        "train, repeat the flags with --init-from and their new place"
    )
