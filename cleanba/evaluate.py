"""`cleanba eval`: how well a trained agent plays, over complete episodes and true returns."""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import tyro

from cleanba.config import Experiment, Placement, require
from cleanba.errors import Failure

if TYPE_CHECKING:
    import jax

    from cleanba.algorithm import Algorithm
    from cleanba.envs import Envs, EnvSpec
    from cleanba.rollout import Episode, PyTree
    from cleanba.video import Film

BEST = "best"  # the folder of a run that holds the parameters which played best
MAX_ENVS = 16  # more would mostly wait for those with the longest episodes


@dataclass(frozen=True)
class Eval:
    """Play complete episodes with a run's trained agent, and say what they returned."""

    run_dir: tyro.conf.Positional[str]
    """directory of the run, which may still be training; or hf://user/repository for an uploaded one"""
    episodes: int = 30
    """complete episodes to play"""
    checkpoint: str = "last"
    """which parameters: those after this update, "last", or "best" (of the evaluations made while training)"""
    seed: int = 1
    """seed of environments and actions; no training run has any of these environments"""
    greedy: bool = False
    """take the likeliest action instead of drawing one from the policy"""
    video: bool = False
    """film the first episode of the first environment (an MP4 in the run's videos/)"""


class Agent(NamedTuple):
    """A policy with its parameters, and the environment that it was trained for."""

    experiment: Experiment
    spec: "EnvSpec"
    algorithm: "Algorithm"
    act: Callable[..., Any]
    """params, carry, obs [B, ...], first [B], key, step, explore -> action [B], carry; compiled once"""
    outputs: Callable[..., Any]
    """params, obs [T, B, ...], first [T, B], carry -> logits and values; what `act` does not tell"""
    params: "PyTree" = None
    update: int | None = None
    """the update that made the parameters; None for a model without its run"""
    global_step: int | None = None


def new_agent(e: Experiment, spec: "EnvSpec", algorithm: "Algorithm", platform: str) -> Agent:
    """An agent that has no parameters yet."""
    import jax

    from cleanba.networks import make_actor_critic

    def act(params: Any, carry: Any, obs: Any, first: Any, key: Any, t: Any, explore: bool) -> Any:
        return algorithm.act(params, carry, obs, first, jax.random.fold_in(key, t), explore)[:2]

    return Agent(e, spec, algorithm, jax.jit(act, static_argnums=6), make_actor_critic(spec, e, platform).outputs)


def load_agent(run_dir: Path, checkpoint: str, platform: str) -> Agent:
    """Network, environment and parameters, as the run's config.json and checkpoints have them.

    Raises:
        UsageError: no such run, no such checkpoint.
        Failure: the checkpoint is damaged.
    """
    import jax

    from cleanba.cli import read_recipe
    from cleanba.envs import env_spec

    recipe, e = read_recipe(run_dir)
    spec = env_spec(e)
    algorithm = recipe.make(e, spec, platform)
    like_state = jax.eval_shape(algorithm.init, jax.random.key(0))
    like_params = jax.eval_shape(algorithm.actor_params, like_state)
    params, update, global_step = read_params(run_dir, checkpoint, algorithm.actor_params, like_state, like_params)
    return new_agent(e, spec, algorithm, platform)._replace(params=params, update=update, global_step=global_step)


def read_params(
    run_dir: Path,
    checkpoint: str,
    actor_params: Callable[["PyTree"], "PyTree"],
    like_state: "PyTree",
    like_params: "PyTree",
) -> tuple["PyTree", int | None, int | None]:
    """The parameters that `--checkpoint` names, their update and their global step.

    "last" is the newest sound checkpoint; without any, the model that --save-model kept.
    """
    from cleanba.runtime import checkpoint as ckpt

    there = ckpt.steps(run_dir)
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


def read_best(run_dir: Path) -> dict[str, Any]:
    """What best/best.json says: update, global_step and episodic_return of the best evaluation while training.

    Raises:
        UsageError: there was none.
    """
    from cleanba.runtime.rundir import read_json

    path = run_dir / BEST / "best.json"
    require(
        path.exists(),
        f"{run_dir} knows no best checkpoint, because nothing was evaluated while it trained; "
        "train with --eval-frequency, or try --checkpoint last",
    )
    return read_json(path)


def play(
    agent: Agent,
    episodes: int,
    seed: int,
    device: "jax.Device",
    *,
    greedy: bool = False,
    epoch: int = 0,
    film: "Film | None" = None,
    make_envs: "Callable[[Sequence[int]], Envs] | None" = None,
    check: Callable[[], None] = lambda: None,
) -> list["Episode"]:
    """Play that many complete episodes -> what they returned, by environment and in the order it played them.

    Each environment has its number of episodes before anything is played.  Counting those that end first, wherever
    that is, would count too many short ones.  `epoch` distinguishes evaluations with the same seed; `check` is called
    at every step and may raise to end the evaluation.
    """
    import jax
    import numpy as np

    from cleanba.envs import Envs, eval_seed, threads_per_actor
    from cleanba.rollout import Episode, EpisodeTracker
    from cleanba.runtime.learner import evaluation_key

    n = min(episodes, MAX_ENVS)
    quota = [episodes // n + (i < episodes % n) for i in range(n)]
    seeds = [eval_seed(seed, i, epoch, n) for i in range(n)]
    pool = lambda seeds: Envs(agent.spec, seeds, threads_per_actor(1), render=film is not None)
    key, params = jax.device_put((evaluation_key(seed, epoch), agent.params), device)
    envs = (make_envs or pool)(seeds)
    try:
        carry = jax.device_put(agent.algorithm.initial_carry(n), device)
        obs, done, first = envs.reset(), np.zeros(n, bool), np.ones(n, bool)
        played: list[list[Episode]] = [[] for _ in range(n)]
        tracker = EpisodeTracker(n)
        t = 0
        while any(len(mine) < most for mine, most in zip(played, quota, strict=True)):
            check()
            action, next_carry = agent.act(params, carry, obs, first, key, np.int32(t), not greedy)
            filming = film if not played[0] and not done[0] else None
            if filming is not None:
                filming.add(envs.render(0), envs.steps_per_second, params, obs, first, carry, action, tracker.ret[0])
            step = envs.step(np.asarray(action))
            executed = ~done  # the others only began their next episode
            ended = np.flatnonzero(step.over & executed)
            for i, episode in zip(ended, tracker.add(step.raw_reward, executed, step.over), strict=True):
                played[i].append(episode)
            if filming is not None and played[0]:
                filming.end(envs.render(0), envs.steps_per_second, step.obs, played[0][0].ret)
            obs, carry, first = step.obs, next_carry, done
            done = (step.terminated | step.truncated) & executed
            t += 1
    finally:
        envs.close()
    return [episode for mine, most in zip(played, quota, strict=True) for episode in mine[:most]]


def record(
    run_dir: Path, agent: Agent, seed: int, episodes: int, device: "jax.Device", greedy: bool = False
) -> tuple[list["Episode"], Path]:
    """As `play`, with a film of the first episode of the first environment in the run's videos/."""
    from cleanba.video import Film

    name = f"update-{agent.update}" if agent.update is not None else "model"
    film = Film(run_dir / "videos" / f"{name}-seed-{seed}{'-greedy' * greedy}.mp4", agent)
    try:
        return play(agent, episodes, seed, device, greedy=greedy, film=film), film.path
    finally:
        film.close()


def summary(env_id: str, is_atari: bool, episodes: Sequence["Episode"]) -> dict[str, Any]:
    """The numbers of an evaluation, by the names that eval.json has."""
    import numpy as np

    from cleanba.atari_scores import human_normalised

    returns = np.array([episode.ret for episode in episodes])
    lengths = np.array([episode.length for episode in episodes])
    mean = float(returns.mean())
    return {
        "episodes": len(episodes),
        "mean": mean,
        "std": float(returns.std()),
        "median": float(np.median(returns)),
        "min": float(returns.min()),
        "max": float(returns.max()),
        "mean_length": float(lengths.mean()),
        "human_normalised_score": human_normalised(env_id, mean) if is_atari else None,
        "returns": returns.tolist(),
        "lengths": lengths.tolist(),
    }


def eval_command(argv: list[str]) -> tuple[int, bool]:
    """`cleanba eval RUN_DIR …` -> exit code, and False as no thread is stuck."""
    options = tyro.cli(Eval, args=argv, prog="cleanba eval")
    require(options.episodes >= 1, f"episodes={options.episodes} must be at least 1; set --episodes")
    require(0 <= options.seed < 2**31, f"seed={options.seed} must lie in [0, 2^31); try --seed 1")
    run_dir = Path(options.run_dir)
    if options.run_dir.startswith("hf://"):
        from cleanba.hub import download

        run_dir = download(options.run_dir)

    from cleanba.cli import read_recipe
    from cleanba.runtime.metrics import write_json
    from cleanba.runtime.placement import find_devices, make_deterministic

    recipe, e = read_recipe(run_dir)
    if e.deterministic:
        make_deterministic()
    devices = find_devices(Placement())
    agent = load_agent(run_dir, options.checkpoint, devices.platform)
    from cleanba.runtime.train import params_digest

    film = None
    if options.video:
        episodes, film = record(run_dir, agent, options.seed, options.episodes, devices.actors[0], options.greedy)
    else:
        episodes = play(agent, options.episodes, options.seed, devices.actors[0], greedy=options.greedy)
    result = {
        "env_id": e.env_id,
        "algorithm": recipe.name,
        "update": agent.update,
        "global_step": agent.global_step,
        "seed": options.seed,
        "greedy": options.greedy,
        "params_digest": params_digest(agent.params),
        "video": str(film.relative_to(run_dir)) if film is not None else None,
        **summary(e.env_id, agent.spec.is_atari, episodes),
    }
    try:
        write_json(run_dir / "eval.json", result)
    except OSError as error:
        raise Failure(f"{run_dir}/eval.json cannot be written: {os.strerror(error.errno or 0)}") from None
    print(closing_words(run_dir, result))
    return 0, False


def closing_words(run_dir: Path, r: dict[str, Any]) -> str:
    """An evaluation in a few lines."""
    from cleanba.atari_scores import reference

    of = "saved model" if r["update"] is None else f"checkpoint of update {r['update']} ({r['global_step']:,} steps)"
    drawn = "likeliest actions" if r["greedy"] else "actions drawn from the policy"
    plural = "s" * (r["episodes"] != 1)
    lines = [
        f"{r['algorithm']} on {r['env_id']}, {of}: {r['episodes']} episode{plural}, {drawn}, seed {r['seed']}",
        f"return: mean {r['mean']:.6g}, std {r['std']:.4g}, median {r['median']:.6g}, "
        f"min {r['min']:.6g}, max {r['max']:.6g}",
        f"length: mean {r['mean_length']:.6g} steps",
    ]
    if r["human_normalised_score"] is not None:
        scores = reference(r["env_id"]) or {}
        lines.append(
            f"human-normalised score: {r['human_normalised_score']:.4g} "
            f"(random plays {scores['random']:g}, a human {scores['human']:g})"
        )
    lines.append(f"written: {run_dir / 'eval.json'}" + (f", {run_dir / r['video']}" if r["video"] else ""))
    return "\n".join(lines)
