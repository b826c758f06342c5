"""`cleanba eval`: how well a trained agent plays, measured by the true returns of complete episodes."""

import itertools
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import jax
import numpy as np
import tyro

from cleanba.agents.agent import Agent, load, require_greedy
from cleanba.agents.film import Film
from cleanba.agents.policy import Policy
from cleanba.arguments import parse_command
from cleanba.config import read_experiment, require
from cleanba.environments.atari_scores import human_normalised, reference
from cleanba.environments.backends import Envs, open_envs, stay_here, threads_per_actor
from cleanba.environments.worker import close
from cleanba.errors import Exit, Failure, UsageError, printable, warn
from cleanba.files import Json, expanded, optional_json, write_json
from cleanba.networks.encoder import legal_actions
from cleanba.recipes import Play
from cleanba.resolution import completed
from cleanba.rollout import Episode, EpisodeTracker, Obs, step_outcome
from cleanba.runs.curves import Curve, find_runs, group, mean_interval
from cleanba.runs.directory import EVALUATIONS
from cleanba.runs.log import read_result
from cleanba.runs.plot import markdown, with_interval
from cleanba.runs.progress_line import ProgressLine
from cleanba.runs.remote import find_run
from cleanba.runtime.collect import first_carry
from cleanba.runtime.digests import params_digest
from cleanba.runtime.process_setup import pin_settings, settings_of, warnings_of_gymnasium_kept
from cleanba.seeds import MAX_EVAL_ENVS, eval_seed, evaluation_key
from cleanba.specs import EnvSpec

MAX_STEPS = 27_000  # Atari's limit, also for environments without one: a greedy policy may never end an episode


LOGGED = {
    "eval/episodic_return": "mean return of the episodes of one evaluation",
    "eval/episodic_return_std": "standard deviation of these returns",
    "eval/episodic_length": "mean length of these episodes, in steps",
    "eval/human_normalised_score": "(return - random) / (human - random); Atari only",
    "eval/truncated": "how many of these episodes the step limit cut off; left out if none",
    "eval/seconds": "how long the evaluation took",
}
"""What a periodic evaluation (`periodic_evaluation.py`) logs: name -> meaning."""


@dataclass(frozen=True)
class Eval:
    """Play complete episodes with a run's trained agent, and report the returns."""

    run_dir: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RUN_DIR")]
    """directory of the run, which may still be training; hf://user/repository for an uploaded one, or an archive; for a
    folder, such as a sweep's, all its finished runs, with the mean of each variant over its seeds"""
    episodes: int = 30
    """complete episodes to play"""
    checkpoint: str = "last"
    """which parameters: those after this update, "last", or "best" (of the evaluations made while training)"""
    seed: int = 1
    """seed of environments and actions; no training run has any of these environments"""
    max_steps: int | None = None
    """steps after which an episode is cut off and reported as truncated (None: 27,000, or the environment's own limit
    where that is longer)"""
    greedy: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """always take the best action; otherwise PPO and IMPALA draw one from the policy, and DQN, PQN and R2D2 sometimes
    take a random one"""
    epsilon: float | None = None
    """probability of a uniformly random action in place of the policy's (None: 0 with --greedy, else 0.05 for DQN and
    PQN, 0.01 for R2D2, 0 for the others)"""
    trust_remote_code: bool = False
    """for a downloaded or unpacked run: import and call what its config.json names (docs/guides/trust.md)"""
    video: bool = False
    """film the first episode of the first environment (an MP4 in the run's videos/)"""


def play(
    policy: Policy,
    episodes: int,
    seed: int,
    device: jax.Device,
    *,
    plays: Play | None = None,
    epoch: int = 0,
    max_steps: int | None = None,
    film: Film | None = None,
    make_envs: Callable[[Sequence[int]], Envs] | None = None,
    check: Callable[[str], None] = lambda doing: None,
) -> list[Episode]:
    """Play that many complete episodes -> their results, by environment and in the order it played them.

    The episodes are divided among the environments beforehand, because counting those that end first would favour short
    ones.  The policy acts as `plays` says, or else as its algorithm is evaluated.  `epoch` distinguishes
    evaluations with the same seed.  `check` is called at every step with what is done next, and may raise to end
    the evaluation.

    An episode that lasts `max_steps` (None: see `step_limit`) is cut off, and its return until then counts.  A single
    environment cannot be reset, so a fresh one plays the episodes that this environment still has to play.
    """
    greedy, epsilon = plays or policy.recipe.plays
    require(
        epsilon == 0 or policy.spec.action.kind == "choice",
        f"epsilon={epsilon} needs a single discrete action, but {policy.spec.env_id} has none; leave --epsilon out",
    )
    limit = step_limit(policy.spec, max_steps)
    episodes, seed = int(episodes), int(seed)  # sums of NumPy's integers may overflow
    chance = np.random.default_rng((seed, epoch))
    n = min(episodes, MAX_EVAL_ENVS)
    quota = [episodes // n + (i < episodes % n) for i in range(n)]
    opened = lambda seeds: open_envs(policy.spec, seeds, threads_per_actor(1), render=film is not None)
    with jax.default_device(device):  # JAX's first device may be busy learning
        key, params = jax.device_put((evaluation_key(seed, epoch), policy.params), device)
    played: list[list[Episode]] = [[] for _ in range(n)]
    left = lambda i: quota[i] - len(played[i])  # episodes that environment i still has to play
    t = 0

    def play_on(envs: Envs) -> None:
        """Play until each environment has played its share of the episodes, or had an episode cut off."""
        nonlocal t
        carry = first_carry(policy.algorithm, n, device)
        obs, done, first = envs.reset(), np.zeros(n, bool), np.ones(n, bool)
        tracker, cut = EpisodeTracker(n), np.zeros(n, bool)
        while any(left(i) > 0 and not cut[i] for i in range(n)):
            if t == 0:
                check("compiling the policy")
            chosen, next_carry = policy.act(params, carry, obs, first, key, np.int32(t), not greedy)
            action = np.asarray(chosen)
            if epsilon > 0:
                anything = random_actions(policy.spec, obs, n, chance)
                action = np.where(chance.random(n) < epsilon, anything, action)
            filming = film if not played[0] and not done[0] else None
            if filming is not None:
                filming.add(envs.render(0), envs.steps_per_second, params, obs, first, carry, action, tracker.ret[0])
            counted = episodes - sum(max(left(i), 0) for i in range(n))
            check(f"playing: {counted} of {episodes} episodes have ended, step {t + 1:,}")
            step = envs.step(action)
            answer = step_outcome(done, step.reward, step.terminated, step.truncated)
            complete = tracker.add(step.raw_reward, answer.valid, step.over, step.infos)
            for i, episode in zip(tracker.ended, complete, strict=True):
                if not cut[i]:
                    played[i].append(episode)
            for i in np.flatnonzero((tracker.length >= limit) & ~cut):
                played[i].append(Episode(float(tracker.ret[i]), int(tracker.length[i]), cut=True))
                cut[i] = True
            if filming is not None and played[0]:
                filming.end(envs.render(0), envs.steps_per_second, step.obs, played[0][0].ret)
            elif film is not None and played[0]:
                film.end_unseen()
            obs, carry, first, done = step.obs, next_carry, done, answer.done
            t += 1

    for again in itertools.count():
        check("opening environments")
        with jax.default_device(device):
            envs = (make_envs or opened)([eval_seed(seed, i, epoch, MAX_EVAL_ENVS, again) for i in range(n)])
        try:
            play_on(envs)
        finally:
            close(envs, "an evaluation")
        if all(left(i) <= 0 for i in range(n)):
            break
    return [episode for mine, most in zip(played, quota, strict=True) for episode in mine[:most]]


def random_actions(spec: EnvSpec, obs: Obs, n: int, chance: np.random.Generator) -> np.ndarray:
    """A choice of each of n environments, any legal one as likely as the others.  Obs [n, ...] -> [n] int32."""
    legal = legal_actions(spec.obs, obs)
    if legal is None:
        return chance.integers(0, spec.num_actions, n, np.int32)
    legal = legal.reshape(n, -1)
    return np.where(legal, chance.random(legal.shape), 0).argmax(-1).astype(np.int32)


def name_of(update: int | None, seed: int, plays: Play) -> str:
    """The name of an evaluation's files, which tells parameters, seeds and ways to play apart."""
    name = f"update-{update}" if update is not None else "model"
    return f"{name}-seed-{seed}" + "-greedy" * plays.greedy + (f"-epsilon-{plays.epsilon:g}" if plays.epsilon else "")


def step_limit(spec: EnvSpec, asked: int | None) -> int:
    """Steps after which an evaluation cuts an episode off.

    That is `asked`, or else 27,000, or the environment's own limit if that is longer: an environment that keeps to its
    own limit is never cut off.
    """
    return max(MAX_STEPS, spec.time_limit or 0) if asked is None else asked


def film_path(run_dir: Path, policy: Policy, seed: int, plays: Play) -> Path:
    """The path of a policy's film in its run (see `name_of`)."""
    return run_dir / "videos" / f"{name_of(policy.update, seed, plays)}.mp4"


def play_and_film(
    path: Path | None,
    policy: Policy,
    episodes: int,
    seed: int,
    device: jax.Device,
    *,
    plays: Play | None = None,
    max_steps: int | None = None,
    check: Callable[[str], None] = lambda doing: None,
) -> list[Episode]:
    """`play`, with the first episode of the first environment filmed to `path`, unless that is None."""
    film = Film(path, policy) if path is not None else None
    try:
        return play(policy, episodes, seed, device, plays=plays, max_steps=max_steps, film=film, check=check)
    finally:
        if film is not None:
            film.close()


@dataclass(frozen=True)
class Evaluation:
    """How an agent played complete episodes."""

    returns: np.ndarray
    """[N] float64: sum of the rewards that the environment paid in each episode"""
    lengths: np.ndarray
    """[N] int64: steps of each episode"""
    summary: Json
    """statistics of these, named as in eval.json: mean, std, median, min, max, mean_length, truncated (how many
    episodes were cut off at `max_steps`), for Atari human_normalised_score, and for a run with `log_info` infos: the
    mean of each of these numbers at the end of the episodes"""
    film: Path | None = None
    """the film of the first episode, if one was asked for"""

    @property
    def mean(self) -> float:
        """Mean return."""
        return self.summary["mean"]

    @property
    def std(self) -> float:
        """Standard deviation of the returns over the episodes."""
        return self.summary["std"]

    def __repr__(self) -> str:
        return f"<evaluation: mean {self.mean:.6g}, std {self.std:.4g} over {len(self.returns)} episodes>"


NUMBERS = (int, float, np.integer, np.floating)


def check_games(episodes: int, seed: int, epsilon: float | None, max_steps: int | None) -> None:
    """Raise `UsageError` for numbers that no evaluation can have."""
    limit = [] if max_steps is None else [("max_steps", max_steps)]
    for name, number in (("episodes", episodes), ("seed", seed), *limit):
        whole = isinstance(number, int | np.integer) and not isinstance(number, bool)
        require(whole, f"{name}={number!r} must be a whole number")
    require(episodes >= 1, f"episodes={episodes} must be at least 1; set --episodes")
    require(epsilon is None or isinstance(epsilon, NUMBERS), f"epsilon={epsilon!r} must be a number")
    require(epsilon is None or 0 <= epsilon <= 1, f"epsilon={epsilon} must lie in [0, 1]; set --epsilon accordingly")
    require(0 <= seed < 2**31, f"seed={seed} must lie in [0, 2^31); try --seed 1")
    require(
        max_steps is None or max_steps >= 1,
        f"max_steps={max_steps} must be at least 1; set --max-steps, or leave it out",
    )


def evaluate(
    agent: Agent,
    episodes: int = 30,
    *,
    seed: int = 1,
    greedy: bool | None = None,
    epsilon: float | None = None,
    max_steps: int | None = None,
    film: str | Path | None = None,
    progress: bool = False,
) -> Evaluation:
    """Play complete episodes in fresh environments.  The agent's own recurrent state stays as it is.

    The same seed plays the same games as `cleanba eval`, none of which occurs in training.

    Args:
        agent: the agent that plays.
        episodes: how many complete episodes.
        seed: seed of environments and actions.
        greedy: whether to take the best action, or one drawn from the policy; None: as its algorithm is
            evaluated.
        epsilon: probability of a uniformly random action in place of its own; None: 0 with `greedy=True`, else 0.05
            for DQN and PQN, 0.01 for R2D2, and 0 for the others.
        max_steps: steps after which an episode is cut off and reported as truncated; None: 27,000, or the environment's
            own limit where that is longer.
        film: an .mp4 file for a film of the first episode.
        progress: whether standard error shows how many episodes have ended.

    Raises:
        UsageError: a number is out of range, or the environment cannot be rendered.
        Failure: the film cannot be written.
    """
    require(isinstance(agent, Agent), f"evaluate takes an agent, such as cleanba.load('runs/a'), not {agent!r}")
    require_greedy(greedy)
    require(isinstance(progress, bool | np.bool_), f"progress={progress!r} must be True or False")
    check_games(episodes, seed, epsilon, max_steps)
    require(film is None or isinstance(film, str | Path), f"film={film!r} must be the path of an .mp4 file")
    path = None if film is None else expanded(film)
    require(path is None or path.suffix == ".mp4", f"film={str(film)!r} must be an .mp4 file; try film.mp4")
    require(path is None or not path.is_dir(), f"film={str(film)!r} is a folder; name a file")
    stay_here()
    policy, device = agent.policy, agent.device
    plays = policy.recipe.plays.changed(greedy, epsilon)
    with settings_of(policy.experiment.dtype), warnings_of_gymnasium_kept(), ProgressLine(shown=progress) as line:
        played = play_and_film(path, policy, episodes, seed, device, plays=plays, max_steps=max_steps, check=line.show)
    r = summary(policy.spec.env_id, policy.spec.is_atari, played, policy.spec.infos)
    return Evaluation(np.array(r["returns"]), np.array(r["lengths"]), r, path)


def summary(env_id: str, is_atari: bool, episodes: Sequence[Episode], infos: Sequence[str] = ()) -> Json:
    """The numbers of an evaluation, by the names that eval.json has.

    infos: the names of the episodes' infos, whose means are under "infos"; None for one that no episode has.
    """
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
        "truncated": sum(episode.cut for episode in episodes),
        **({"infos": {name: mean_info(episodes, i) for i, name in enumerate(infos)}} if infos else {}),
        "returns": returns.tolist(),
        "lengths": lengths.tolist(),
    }


def mean_info(episodes: Sequence[Episode], i: int) -> float | None:
    """The mean of the i-th of the episodes' infos over those that have it; None if none has."""
    told = [episode.infos[i] for episode in episodes if not episode.cut and not math.isnan(episode.infos[i])]
    return float(np.mean(told)) if told else None


def eval_command(argv: Sequence[str]) -> Exit:
    """`cleanba eval RUN_DIR …`"""
    options = parse_command(Eval, argv, "eval")
    check_games(options.episodes, options.seed, options.epsilon, options.max_steps)
    require(bool(options.run_dir), "eval needs a run's directory, but was given an empty name")
    run_dir = find_run(options.run_dir)
    pin_settings()
    if run_dir.is_dir() and not (run_dir / "config.json").exists():
        return Exit(0 if evaluate_folder(run_dir, options) else 1)
    evaluate_run(run_dir, options)
    return Exit()


def evaluate_folder(folder: Path, options: Eval) -> bool:
    """Evaluate all finished runs in a folder, such as a sweep's, and print the mean of each variant over its seeds.

    Returns whether all of them could be played.

    Raises:
        UsageError: it holds no finished run.
    """
    found = find_runs([folder])
    states = {run_dir: read_result(run_dir).get("status", "unfinished") for run_dir in found}
    finished = [run_dir for run_dir in found if states[run_dir] == "finished"]
    require(bool(finished), f"{folder} holds no finished run; `cleanba eval RUN_DIR` plays an unfinished one")
    if len(finished) < len(found):
        others = [f"{run_dir} ({state})" for run_dir, state in states.items() if state != "finished"]
        more = f" and {len(others) - 5} more" if len(others) > 5 else ""
        warn(f"left out, as they have not finished: {', '.join(others[:5])}{more}")
    curves: list[Curve] = []
    first: dict[str, Path] = {}
    failed = False
    for number, run_dir in enumerate(finished, 1):
        print(f"{run_dir} ({number} of {len(finished)})", flush=True)
        try:
            experiment = read_experiment(run_dir)
            key = json.dumps(completed(experiment), sort_keys=True)
            if key in first:  # the same bits again would not be another sample
                warn(f"{run_dir} is the same experiment and seed as {first[key]}; left out")
                continue
            r = evaluate_run(run_dir, options)
            first[key] = run_dir
        except (UsageError, Failure) as error:
            warn(f"{run_dir}: {error}; left out")
            failed = True
            continue
        step, mean = np.array([r["global_step"] or 0]), np.array([r["mean"]])
        curves.append(Curve(run_dir, experiment, step, np.zeros(1), mean))
    if not curves:
        return False
    rows = []
    for env_id, variants in group(curves).items():
        means = {name: mean_interval([c.returns[-1] for c in them]) for name, them in variants.items()}
        for name in sorted(means, key=lambda name: -means[name].value):
            rows.append([env_id, name, str(len(variants[name])), with_interval(means[name])])
    print("\nMean over seeds of the mean returns above, with its 95% bootstrap interval:\n")
    print(printable(markdown(("environment", "variant", "seeds", "return"), rows, texts=2), keep="\n"))
    return not failed


def evaluate_run(run_dir: Path, options: Eval) -> Json:
    """Evaluate a run, print and keep the result, and return it as eval.json has it.

    Raises:
        UsageError: there is no such run, or it cannot be played as the flags say.
        Failure: the result cannot be written.
    """
    agent = load(run_dir, options.checkpoint, trust_remote_code=options.trust_remote_code)
    policy = agent.policy
    plays = policy.recipe.plays.changed(options.greedy or None, options.epsilon)
    film = film_path(run_dir, policy, options.seed, plays) if options.video else None
    played = evaluate(
        agent,
        options.episodes,
        seed=options.seed,
        greedy=plays.greedy,
        epsilon=plays.epsilon,
        max_steps=options.max_steps,
        film=film,
        progress=True,
    )
    result = {
        "env_id": policy.spec.env_id,
        "algorithm": read_experiment(run_dir)["algorithm"],
        "update": policy.update,
        "global_step": policy.global_step,
        "seed": options.seed,
        "greedy": plays.greedy,
        "epsilon": plays.epsilon,
        "max_steps": step_limit(policy.spec, options.max_steps),
        "params_digest": params_digest(policy.params),
        "video": str(film.relative_to(run_dir)) if film is not None else None,
        **played.summary,
    }
    kept = run_dir / EVALUATIONS / f"{name_of(agent.update, options.seed, plays)}.json"
    print(in_words(result), flush=True)
    try:
        kept.parent.mkdir(exist_ok=True)
        if kept.exists() and any(optional_json(kept).get(name) != result[name] for name in ("episodes", "max_steps")):
            kept = kept.with_stem(f"{kept.stem}-episodes-{result['episodes']}-steps-{result['max_steps']}")
        write_json(kept, result, shared=True)
        write_json(run_dir / "eval.json", result, shared=True)
    except OSError as error:
        raise Failure(
            f"{run_dir}/eval.json cannot be written ({error.strerror}), so only the lines above have the result"
        ) from None
    print(f"written: {run_dir / 'eval.json'}, {kept}" + (f", {film}" if film is not None else ""))
    return result


def in_words(r: Json) -> str:
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
    for name, mean in r.get("infos", {}).items():
        lines.append(f"{name}: " + ("no episode ended with it" if mean is None else f"mean {mean:.6g}"))
    if r["truncated"]:
        lines.append(
            f"truncated: {r['truncated']} of {r['episodes']} episode{plural} did not end within {r['max_steps']:,} "
            "steps (--max-steps); their returns count up to that limit"
        )
    if r["human_normalised_score"] is not None:
        scores = reference(r["env_id"]) or {}
        lines.append(
            f"human-normalised score: {r['human_normalised_score']:.4g} "
            f"(random plays {scores['random']:g}, a human {scores['human']:g})"
        )
    return "\n".join(lines)
