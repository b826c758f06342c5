"""`cleanba eval`: how well a trained agent plays, over complete episodes and true returns."""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import jax
import numpy as np
import tyro

from cleanba.agents.agent import Policy, load_policy
from cleanba.agents.film import Film
from cleanba.agents.hub import download
from cleanba.config import Placement, require
from cleanba.environments.atari_scores import human_normalised, reference
from cleanba.environments.kinds import Envs, open_envs, threads_per_actor
from cleanba.errors import Exit, Failure
from cleanba.files import Json, write_json
from cleanba.networks.sight import legal_actions
from cleanba.recipes import Play, read_recipe
from cleanba.rollout import Episode, EpisodeTracker, heed
from cleanba.runtime.collect import first_carry
from cleanba.runtime.compiled import prepare_process
from cleanba.runtime.digests import params_digest
from cleanba.runtime.placement import find_devices
from cleanba.seeds import eval_seed, evaluation_key

MAX_ENVS = 16  # more would mostly wait for those with the longest episodes


@dataclass(frozen=True)
class Eval:
    """Play complete episodes with a run's trained agent, and say what they returned."""

    run_dir: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RUN_DIR")]
    """directory of the run, which may still be training; or hf://user/repository for an uploaded one"""
    episodes: int = 30
    """complete episodes to play"""
    checkpoint: str = "last"
    """which parameters: those after this update, "last", or "best" (of the evaluations made while training)"""
    seed: int = 1
    """seed of environments and actions; no training run has any of these environments"""
    greedy: bool = False
    """take the likeliest action instead of drawing one from the policy; DQN always takes the best that it knows"""
    epsilon: float | None = None
    """probability of a uniformly random action in place of the policy's (None: 0.05 for DQN, else 0)"""
    video: bool = False
    """film the first episode of the first environment (an MP4 in the run's videos/)"""


def play(
    agent: Policy,
    episodes: int,
    seed: int,
    device: jax.Device,
    *,
    plays: Play | None = None,
    epoch: int = 0,
    film: Film | None = None,
    make_envs: Callable[[Sequence[int]], Envs] | None = None,
    check: Callable[[], None] = lambda: None,
) -> list[Episode]:
    """Play that many complete episodes -> what they returned, by environment and in the order it played them.

    Each environment has its number of episodes before anything is played.  Counting those that end first, wherever
    that is, would count too many short ones.  It acts as `plays` says, or else as its algorithm is evaluated.  `epoch`
    distinguishes evaluations with the same seed; `check` is called at every step and may raise to end the evaluation.
    """
    greedy, epsilon = plays or agent.plays
    require(
        epsilon == 0 or agent.spec.action.kind == "choice",
        f"epsilon={epsilon} needs actions to choose from, which {agent.spec.env_id} has not; leave --epsilon out",
    )
    chance = np.random.default_rng((seed, epoch))
    n = min(episodes, MAX_ENVS)
    quota = [episodes // n + (i < episodes % n) for i in range(n)]
    seeds = [eval_seed(seed, i, epoch, n) for i in range(n)]
    opened = lambda seeds: open_envs(agent.spec, seeds, threads_per_actor(1), render=film is not None)
    with jax.default_device(device):  # the first one may be busy learning
        key, params = jax.device_put((evaluation_key(seed, epoch), agent.params), device)
        envs = (make_envs or opened)(seeds)
    try:
        carry = first_carry(agent.algorithm, n, device)
        obs, done, first = envs.reset(), np.zeros(n, bool), np.ones(n, bool)
        played: list[list[Episode]] = [[] for _ in range(n)]
        tracker = EpisodeTracker(n)
        t = 0
        while any(len(mine) < most for mine, most in zip(played, quota, strict=True)):
            check()
            chosen, next_carry = agent.act(params, carry, obs, first, key, np.int32(t), not greedy)
            action = np.asarray(chosen)
            if epsilon > 0:
                legal = legal_actions(agent.spec.obs, obs)
                if legal is None:
                    anything = chance.integers(0, agent.spec.num_actions, n, np.int32)
                else:  # one of those that are
                    legal = legal.reshape(n, -1)
                    anything = np.where(legal, chance.random(legal.shape), 0).argmax(-1).astype(np.int32)
                action = np.where(chance.random(n) < epsilon, anything, action)
            filming = film if not played[0] and not done[0] else None
            if filming is not None:
                filming.add(envs.render(0), envs.steps_per_second, params, obs, first, carry, action, tracker.ret[0])
            step = envs.step(action)
            answer = heed(done, step.reward, step.terminated, step.truncated)
            ended = np.flatnonzero(step.over & answer.valid)
            for i, episode in zip(ended, tracker.add(step.raw_reward, answer.valid, step.over), strict=True):
                played[i].append(episode)
            if filming is not None and played[0]:
                filming.end(envs.render(0), envs.steps_per_second, step.obs, played[0][0].ret)
            obs, carry, first, done = step.obs, next_carry, done, answer.done
            t += 1
    finally:
        envs.close()
    return [episode for mine, most in zip(played, quota, strict=True) for episode in mine[:most]]


def record(
    run_dir: Path, agent: Policy, seed: int, episodes: int, device: jax.Device, plays: Play | None = None
) -> tuple[list[Episode], Path]:
    """As `play`, with a film of the first episode of the first environment in the run's videos/."""
    name = f"update-{agent.update}" if agent.update is not None else "model"
    greedy, epsilon = plays or agent.plays
    name += f"-seed-{seed}" + "-greedy" * greedy + (f"-epsilon-{epsilon:g}" if epsilon else "")
    film = Film(run_dir / "videos" / f"{name}.mp4", agent)
    try:
        return play(agent, episodes, seed, device, plays=plays, film=film), film.path
    finally:
        film.close()


def summary(env_id: str, is_atari: bool, episodes: Sequence[Episode]) -> Json:
    """The numbers of an evaluation, by the names that eval.json has."""
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


def eval_command(argv: Sequence[str]) -> Exit:
    """`cleanba eval RUN_DIR …`"""
    options = tyro.cli(Eval, args=argv, prog="cleanba eval")
    require(options.episodes >= 1, f"episodes={options.episodes} must be at least 1; set --episodes")
    require(
        options.epsilon is None or 0 <= options.epsilon <= 1,
        f"epsilon={options.epsilon} must lie in [0, 1]; set --epsilon accordingly",
    )
    require(0 <= options.seed < 2**31, f"seed={options.seed} must lie in [0, 2^31); try --seed 1")
    run_dir = Path(options.run_dir)
    if options.run_dir.startswith("hf://"):
        run_dir = download(options.run_dir)

    recipe, e = read_recipe(run_dir)
    prepare_process(e)
    devices = find_devices(Placement())
    agent = load_policy(run_dir, options.checkpoint, devices.platform)
    epsilon = agent.plays.epsilon if options.epsilon is None else options.epsilon
    plays = Play(options.greedy or agent.plays.greedy, epsilon)
    film = None
    if options.video:
        episodes, film = record(run_dir, agent, options.seed, options.episodes, devices.actors[0], plays)
    else:
        episodes = play(agent, options.episodes, options.seed, devices.actors[0], plays=plays)
    result = {
        "env_id": e.env_id,
        "algorithm": recipe.name,
        "update": agent.update,
        "global_step": agent.global_step,
        "seed": options.seed,
        "greedy": plays.greedy,
        "epsilon": plays.epsilon,
        "params_digest": params_digest(agent.params),
        "video": str(film.relative_to(run_dir)) if film is not None else None,
        **summary(e.env_id, agent.spec.is_atari, episodes),
    }
    try:
        write_json(run_dir / "eval.json", result)
    except OSError as error:
        raise Failure(f"{run_dir}/eval.json cannot be written: {os.strerror(error.errno or 0)}") from None
    print(in_words(run_dir, result))
    return Exit()


def in_words(run_dir: Path, r: Json) -> str:
    """An evaluation in a few lines."""
    of = "saved model" if r["update"] is None else f"checkpoint of update {r['update']} ({r['global_step']:,} steps)"
    drawn = Play(r["greedy"], r["epsilon"]).in_words()
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
