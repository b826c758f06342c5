"""A rollout: `num_steps` steps of one actor's environments, recorded on the actor's device."""

import threading
import time
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import SingleDeviceSharding

from cleanba.algorithm import Algorithm
from cleanba.environments import native
from cleanba.environments.kinds import Envs
from cleanba.environments.specs import Compilable, EnvStep
from cleanba.errors import NotFinite
from cleanba.rollout import Episode, EpisodeTracker, PyTree, Rollout, heed
from cleanba.runtime.channels import Stop
from cleanba.runtime.playback import play_back
from cleanba.runtime.records import Ending, Standing, Told, action_dtype, restored
from cleanba.seeds import action_key
from cleanba.shards import network_options
from cleanba.specs import ActionSpec


@dataclass
class Times:
    """Seconds that one rollout spent on what."""

    emulators: float = 0.0
    inference: float = 0.0  # copying observations to the device, the policy, and copying actions back
    scan: float = 0.0  # both of these, where they run in one scan
    transfer: float = 0.0  # handing the rollout to the learner devices
    params_wait: float = 0.0  # waiting for parameters
    rollout: float = 0.0  # all of it


class Collected(NamedTuple):
    rollout: Rollout  # on the actor's device
    steps: int  # executed: ignored actions do not count
    episodes: list[Episode]
    told: Told
    ending: Ending


@jax.jit
def _all_finite(obs: PyTree) -> jax.Array:
    """Whether all real numbers among the leaves are finite.  -> [] bool."""
    real = [x for x in jax.tree.leaves(obs) if jnp.issubdtype(x.dtype, jnp.floating)]
    return jnp.stack([jnp.isfinite(x).all() for x in real]).all() if real else jnp.bool(True)


class Inspection(NamedTuple):
    """Sees that an actor's environments deliver finite numbers, in each rollout once it is collected.

    Apart from what collects it, whose bits it must not change: one number comes from the device, and only where that
    says so are observations fetched and the place found.
    """

    env_id: str
    first_env: int
    """the number of the actor's first environment"""

    def check(self, rollout: int, obs: PyTree, raw_reward: np.ndarray, valid: np.ndarray) -> None:
        """Obs [T+1, B, ...] on a device, raw_reward and valid [T, B] on the host, of the rollout of that number.

        Raises:
            NotFinite: naming environment, step and field.
        """
        obs_are = _all_finite(obs)
        wrong = ~np.isfinite(raw_reward) & valid
        if wrong.any():
            t, env = np.argwhere(wrong)[0].tolist()
            raise self._found(env, f"the reward of step {t + 1} of rollout {rollout}", raw_reward[t, env])
        if obs_are:
            return
        places = []
        for path, x in jax.tree_util.tree_leaves_with_path(jax.device_get(obs)):
            if np.issubdtype(x.dtype, np.floating) and not np.isfinite(x).all():
                t, env, *part = np.argwhere(~np.isfinite(x))[0].tolist()
                places.append((t, env, "".join(map(str, path)) + (str(part) if part else ""), x[(t, env, *part)]))
        t, env, part, value = min(places, key=lambda place: place[0])  # where it began
        when = f"after step {t} of rollout {rollout}" if t else f"before the first step of rollout {rollout}"
        raise self._found(env, f"the observation{part} {when}", value)

    def _found(self, env: int, what: str, value: object) -> NotFinite:
        return NotFinite(
            f"environment {self.first_env + env} of {self.env_id}: {what} is {value}, which is not a finite number; "
            "mend the environment, have a wrapper replace such numbers, or go on regardless with --on-nonfinite ignore"
        )


class Collector(Protocol):
    """Both collectors look like this: construct, then call once per rollout."""

    def __call__(self, params: PyTree, numbers: np.ndarray, times: Times) -> Collected:
        """Collect with these parameters; actions are drawn from `seeds.action_numbers`."""
        ...

    def restart(self, envs: Envs) -> None:
        """Go on with fresh environments, all at the first step of an episode."""
        ...

    def resume(self, envs: Envs, standing: Standing, who: str, played: Callable[[int], None]) -> None:
        """Go on from where a checkpoint has it, with fresh environments that are brought there.

        `who` they are for messages; `played` hears how many recorded steps were played.

        Raises:
            Failure: the environments do not repeat themselves.
        """
        ...

    def close(self) -> None: ...


class Recording(NamedTuple):
    """What the device remembers of acting while a rollout is being collected; written in place, step by step."""

    obs: PyTree  # [T+1, B, ...]
    first: jax.Array  # [T+1, B]
    action: jax.Array  # [T, B]
    extras: PyTree  # [T, B, ...]


Tree = TypeVar("Tree", bound=PyTree)


def write(buffers: Tree, t: jax.Array | int, values: Tree) -> Tree:
    """Leaves [T, B, ...] with row t replaced by leaves [B, ...]."""
    return jax.tree.map(lambda b, v: lax.dynamic_update_index_in_dim(b, v.astype(b.dtype), t, 0), buffers, values)


def blank(num_steps: int, values: Tree) -> Tree:
    """Buffers for `num_steps` rows like these: leaves [B, ...] -> leaves [T, B, ...]."""
    return jax.tree.map(lambda x: jnp.empty((num_steps, *x.shape), x.dtype), values)


def first_carry(algorithm: Algorithm, num_envs: int, device: jax.Device) -> PyTree:
    """The recurrent state before the first step, made on the actor's device: another may be busy learning."""
    with jax.default_device(device):
        return jax.device_put(algorithm.initial_carry(num_envs), device)


class Resumed(NamedTuple):
    """Where an actor stood, with the environments brought there; what is on the host goes to its device yet."""

    obs: PyTree
    done: np.ndarray
    first: np.ndarray
    carry: PyTree
    tracker: EpisodeTracker


def bring_back(
    envs: Envs,
    standing: Standing,
    takes: ActionSpec | None,
    like_carry: PyTree,
    num_steps: int,
    who: str,
    stop: Stop,
    played: Callable[[int], None],
) -> Resumed:
    """Bring fresh environments to where an actor stood: by its actions, or, those in JAX, by their state.

    Raises:
        Failure: the environments do not repeat themselves.
    """
    saved = standing.arrays
    if takes is None:
        assert isinstance(envs, native.Envs), "only environments in JAX are saved as they are"
        like = envs.reset()
        obs = restored(like, saved["obs"])
        envs.restore(restored(envs.state, saved["state"]), obs)
    else:
        obs = play_back(envs, standing, takes, num_steps, who, stop, played)
    tracker = EpisodeTracker(envs.num_envs)
    (tracker.ret,), (tracker.length,), (done,), (first,) = (saved[name] for name in ("ret", "length", "done", "first"))
    return Resumed(obs, done, first, restored(like_carry, saved["carry"]), tracker)


def on_host(tree: PyTree) -> PyTree:
    """A copy that nothing on a device can overwrite."""
    return jax.tree.map(lambda x: np.array(x), tree)


class Stepping(NamedTuple):
    """What a rollout that is being collected keeps on the device, so that a step sends nothing but observations."""

    recording: Recording
    key: jax.Array
    t: jax.Array  # the number of the next step


class Steppers(NamedTuple):
    """The compiled functions of the stepped collector, shared by all actors of a process."""

    start: Callable[[PyTree, PyTree, PyTree, jax.Array, np.ndarray], Stepping]
    step: Callable[[PyTree, Stepping, PyTree, PyTree, jax.Array], tuple[jax.Array, PyTree, Stepping]]
    finish: Callable[[Stepping, PyTree, jax.Array], Recording]


def make_steppers(algorithm: Algorithm, num_steps: int, platform: str) -> Steppers:
    """Compile acting and recording into one call per step, for devices of that kind ("cpu", "gpu" …)."""

    def start(params: PyTree, carry: PyTree, obs: PyTree, first: jax.Array, numbers: jax.Array) -> Stepping:
        key = action_key(*numbers)
        acted = jax.eval_shape(lambda: algorithm.act(params, carry, obs, first, key, True))
        recording = Recording(*blank(num_steps + 1, (obs, first)), *blank(num_steps, (acted[0], acted[2])))
        return Stepping(recording, key, jnp.int32(0))

    def step(
        params: PyTree, now: Stepping, carry: PyTree, obs: PyTree, first: jax.Array
    ) -> tuple[jax.Array, PyTree, Stepping]:
        action, carry, extras = algorithm.act(params, carry, obs, first, jax.random.fold_in(now.key, now.t), True)
        recording = write(now.recording, now.t, Recording(obs, first, action, extras))
        return action, carry, Stepping(recording, now.key, now.t + 1)

    def finish(now: Stepping, obs: PyTree, first: jax.Array) -> Recording:
        obs, first = write((now.recording.obs, now.recording.first), num_steps, (obs, first))
        return now.recording._replace(obs=obs, first=first)

    # Without its unused arguments `start` would not know the actor's device, and make its buffers on the first one.
    return Steppers(
        jax.jit(start, keep_unused=True),
        jax.jit(step, donate_argnums=1, compiler_options=network_options(platform)),
        jax.jit(finish, donate_argnums=0),
    )


@dataclass
class SteppedCollector:
    """Steps the environments from Python; the policy and the recording are one compiled call per step."""

    algorithm: Algorithm
    steppers: Steppers
    num_steps: int
    device: jax.Device
    stop: Stop
    inspection: Inspection | None = None
    takes: ActionSpec | None = None  # of whom actions are recorded; None: of nobody
    keeps_state: bool = False  # of environments in JAX, in place of actions
    _envs: Envs | None = None
    _obs: PyTree = None
    _done: np.ndarray = field(default_factory=lambda: np.zeros(0, bool))
    _first: np.ndarray = field(default_factory=lambda: np.zeros(0, bool))
    _carry: PyTree = None
    _tracker: EpisodeTracker = field(default_factory=lambda: EpisodeTracker(0))

    def restart(self, envs: Envs) -> None:
        self.close()
        self._envs = envs
        n = envs.num_envs
        self._obs = envs.reset()
        self._done, self._first = np.zeros(n, bool), np.ones(n, bool)
        self._carry = first_carry(self.algorithm, n, self.device)
        self._tracker = EpisodeTracker(n)

    def resume(self, envs: Envs, standing: Standing, who: str, played: Callable[[int], None]) -> None:
        self.close()
        self._envs = envs
        carry = first_carry(self.algorithm, envs.num_envs, self.device)
        there = bring_back(envs, standing, self.takes, carry, self.num_steps, who, self.stop, played)
        self._obs, self._done, self._first, _, self._tracker = there
        self._carry = jax.device_put(there.carry, self.device)

    def close(self) -> None:
        if self._envs is not None:
            self._envs.close()

    def __call__(self, params: PyTree, numbers: np.ndarray, times: Times) -> Collected:
        assert self._envs is not None, "restart() comes first"
        clock = time.perf_counter
        n = self._envs.num_envs
        reward, raw_reward = (np.zeros((self.num_steps, n), np.float32) for _ in range(2))
        terminated, truncated, valid, done = (np.zeros((self.num_steps, n), bool) for _ in range(4))
        actions: np.ndarray | None = None
        episodes: list[Episode] = []
        start_carry = self._carry
        now = clock()
        stepping = None
        for t in range(self.num_steps):
            self.stop.check()
            # The one copy of an observation to a device.
            obs, first = jax.device_put((self._obs, self._first), self.device)
            if stepping is None:
                stepping = self.steppers.start(params, self._carry, obs, first, numbers)
            action, self._carry, stepping = self.steppers.step(params, stepping, self._carry, obs, first)
            host_action = np.asarray(action)
            then, now = now, clock()
            times.inference += now - then

            step = self._envs.step(host_action)
            answer = heed(self._done, step.reward, step.terminated, step.truncated)
            reward[t], terminated[t], truncated[t], valid[t], done[t] = answer
            raw_reward[t] = step.raw_reward
            if self.takes is not None:
                if actions is None:
                    actions = np.empty((self.num_steps, *host_action.shape), action_dtype(self.takes))
                actions[t] = host_action
            episodes += self._tracker.add(step.raw_reward, answer.valid, step.over)
            self._obs, self._first, self._done = step.obs, self._done, answer.done
            then, now = now, clock()
            times.emulators += now - then
        assert stepping is not None
        executed, valid_here = int(valid.sum()), valid
        last, reward, terminated, truncated, valid = jax.device_put(
            ((self._obs, self._first), reward, terminated, truncated, valid), self.device
        )
        r = self.steppers.finish(stepping, *last)
        if self.inspection is not None:
            self.inspection.check(int(numbers[-1]), r.obs, raw_reward, valid_here)
        rollout = Rollout(
            r.obs, r.first, r.action, reward, terminated, truncated, valid, extras=r.extras, carry=start_carry
        )
        state = self._envs.state if self.keeps_state and isinstance(self._envs, native.Envs) else None
        tracker = self._tracker
        ending = Ending(
            self._obs, self._done, self._first, on_host(self._carry), tracker.ret.copy(), tracker.length.copy(), state
        )
        times.inference += clock() - now
        return Collected(rollout, executed, episodes, Told(actions, raw_reward, done), ending)


class Outcomes(NamedTuple):
    """What the environments answered, as the scanned collector records it beside `Recording`.  Leaves [T, B]."""

    reward: jax.Array
    raw_reward: jax.Array
    terminated: jax.Array
    truncated: jax.Array
    valid: jax.Array
    over: jax.Array


class ScanState(NamedTuple):
    """What goes from one step of the scan to the next, and from one rollout to the next."""

    handle: PyTree  # EnvPool's, which keeps the steps in order; or the state of environments in JAX
    obs: PyTree  # [B, ...]
    done: jax.Array  # [B]  the last step ended an episode, so the next one is ignored
    first: jax.Array  # [B]
    carry: PyTree


SCAN_STEPS = 32  # at most so many steps per call into XLA: between calls the collector can be stopped


Scanned = tuple[Recording, Outcomes]


class Scan(NamedTuple):
    """The functions of the scanned collector, for environments with one `step`."""

    length: int  # steps per call
    step: Callable[[PyTree, jax.Array, ScanState, jax.Array | int], tuple[ScanState, Scanned]]  # one of them
    steps: jax.stages.Wrapped  # all of them, to be compiled


def make_scan(algorithm: Algorithm, num_steps: int, env_step: EnvStep) -> Scan:
    """Acting, `env_step(handle, action) -> handle, Step` and recording as one compiled call for a part of a rollout."""
    length = max(d for d in range(1, min(SCAN_STEPS, num_steps) + 1) if num_steps % d == 0)

    def step(params: PyTree, key: jax.Array, state: ScanState, t: jax.Array | int) -> tuple[ScanState, Scanned]:
        action, carry, extras = algorithm.act(
            params, state.carry, state.obs, state.first, jax.random.fold_in(key, t), True
        )
        handle, out = env_step(state.handle, action)
        answer = heed(state.done, out.reward, out.terminated, out.truncated)
        outcome = Outcomes(answer.reward, out.raw_reward, answer.terminated, answer.truncated, answer.valid, out.over)
        recorded = Recording(state.obs, state.first, action, extras)
        return ScanState(handle, out.obs, answer.done, state.done, carry), (recorded, outcome)

    def scan_pool(
        params: PyTree, numbers: jax.Array, buffers: Scanned, state: ScanState, t: jax.Array
    ) -> tuple[ScanState, Scanned]:
        key = action_key(*numbers)

        def body(carried: tuple[ScanState, Scanned], t: jax.Array) -> tuple[tuple[ScanState, Scanned], None]:
            state, buffers = carried
            state, recorded = step(params, key, state, t)
            return (state, write(buffers, t, recorded)), None

        (state, (recording, outcome)), _ = lax.scan(body, (state, buffers), t + jnp.arange(length))
        # The observation after these steps; the next call overwrites it with the same, the last call leaves it.
        obs, first = write((recording.obs, recording.first), t + length, (state.obs, state.first))
        return state, (recording._replace(obs=obs, first=first), outcome)

    return Scan(length, step, jax.jit(scan_pool, donate_argnums=2))


SCANS_KEPT = 64  # compiled for as many places where a pool has lain, about a megabyte each


class CompiledScan(NamedTuple):
    """A scan for environments with one key.  It holds no pool: one that lay there can go, and another come."""

    length: int  # steps per call
    steps: jax.stages.Compiled
    new_buffers: Callable[[], Scanned]  # room for a rollout


class Scans:
    """Compiled scans by device and `Compilable.key`, shared by all actors of a process."""

    def __init__(self, algorithm: Algorithm, num_steps: int):
        self.algorithm = algorithm
        self.num_steps = num_steps
        self._lock = threading.Lock()
        self._compiled: dict[Hashable, Future[CompiledScan]] = {}

    def of(self, envs: Compilable, device: jax.Device, args: tuple[PyTree, np.ndarray, ScanState]) -> CompiledScan:
        """The scan over these environments; `args` look like what it will be called with."""
        key = device, envs.key, args[2].first.shape
        with self._lock:
            scan = self._compiled.get(key)
            mine = scan is None
            if scan is None:
                if len(self._compiled) == SCANS_KEPT:
                    del self._compiled[next(iter(self._compiled))]
                scan = self._compiled[key] = Future()
        if mine:
            try:
                scan.set_result(self._compile(envs.step, device, args))
            except BaseException as error:
                scan.set_exception(error)
        return scan.result()

    def _compile(
        self, env_step: EnvStep, device: jax.Device, args: tuple[PyTree, np.ndarray, ScanState]
    ) -> CompiledScan:
        params, numbers, state = args
        scan = make_scan(self.algorithm, self.num_steps, env_step)
        _, (r, outcome) = jax.eval_shape(lambda: scan.step(params, action_key(*numbers), state, 0))

        def new_buffers() -> Scanned:
            observed = blank(self.num_steps + 1, (r.obs, r.first))
            return Recording(*observed, *blank(self.num_steps, (r.action, r.extras))), blank(self.num_steps, outcome)

        # They must be bound to the device: others make the scan's first call another one to compile for.
        room = jax.jit(new_buffers, out_shardings=SingleDeviceSharding(device))
        steps = scan.steps.lower(params, numbers, room(), state, np.int32(0)).compile(network_options(device.platform))
        return CompiledScan(scan.length, steps, room)


@dataclass
class ScannedCollector:
    """Policy, recurrent core and environments as one `lax.scan` under `jit`: EnvPool's through its XLA interface.

    A rollout is one call into XLA, or a few if it is long, so that the end of the run is noticed in time.  Environments
    in JAX are compiled for once.  Code compiled for EnvPool knows its pool by its place in memory; fresh
    pools mostly come to lie where those before them lay, which have just gone, and only somewhere new are compiled for.
    """

    algorithm: Algorithm
    num_steps: int
    device: jax.Device
    stop: Stop
    scans: Scans
    inspection: Inspection | None = None
    takes: ActionSpec | None = None  # of whom actions are recorded; None: of nobody
    keeps_state: bool = False  # of environments in JAX, in place of actions
    _envs: Envs | None = None
    _compilable: Compilable | None = None
    _state: ScanState | None = None
    _tracker: EpisodeTracker = field(default_factory=lambda: EpisodeTracker(0))

    def restart(self, envs: Envs) -> None:
        self.close()
        self._envs = envs
        n = envs.num_envs
        obs = envs.reset()
        self._begin(obs, np.zeros(n, bool), np.ones(n, bool), first_carry(self.algorithm, n, self.device))
        self._tracker = EpisodeTracker(n)

    def resume(self, envs: Envs, standing: Standing, who: str, played: Callable[[int], None]) -> None:
        self.close()
        self._envs = envs
        carry = first_carry(self.algorithm, envs.num_envs, self.device)
        *there, self._tracker = bring_back(envs, standing, self.takes, carry, self.num_steps, who, self.stop, played)
        self._begin(*there)

    def _begin(self, obs: PyTree, done: np.ndarray, first: np.ndarray, carry: PyTree) -> None:
        assert self._envs is not None
        self._compilable = self._envs.xla()
        self._state = ScanState(*jax.device_put((self._compilable.handle, obs, done, first, carry), self.device))

    def close(self) -> None:
        if self._envs is not None:
            self._envs.close()
        self._envs = self._compilable = None  # nothing may hold the pool, or its place would not become free

    def _scan(self, params: PyTree, numbers: np.ndarray, state: ScanState) -> tuple[ScanState, Scanned]:
        assert self._compilable is not None, "restart() comes first"
        scan = self.scans.of(self._compilable, self.device, (params, numbers, state))
        buffers = scan.new_buffers()
        for t in range(0, self.num_steps, scan.length):
            self.stop.check()
            state, buffers = scan.steps(params, numbers, buffers, state, np.int32(t))
            jax.block_until_ready(state)
        return state, buffers

    def __call__(self, params: PyTree, numbers: np.ndarray, times: Times) -> Collected:
        assert self._state is not None, "restart() comes first"
        start = time.perf_counter()
        start_carry = self._state.carry
        self._state, (r, outcome) = self._scan(params, numbers, self._state)
        raw_reward, valid, over = jax.device_get((outcome.raw_reward, outcome.valid, outcome.over))
        if self.inspection is not None:
            self.inspection.check(int(numbers[-1]), r.obs, raw_reward, valid)
        done = np.asarray(outcome.terminated) | np.asarray(outcome.truncated)
        action = np.array(r.action, action_dtype(self.takes)) if self.takes is not None else None
        episodes = [e for t in range(self.num_steps) for e in self._tracker.add(raw_reward[t], valid[t], over[t])]
        o = outcome
        rollout = Rollout(
            r.obs, r.first, r.action, o.reward, o.terminated, o.truncated, o.valid, extras=r.extras, carry=start_carry
        )
        handle, obs, ended, first, carry = self._state
        state = handle if self.keeps_state else None
        tracker = self._tracker
        ending = Ending(obs, ended, first, on_host(carry), tracker.ret.copy(), tracker.length.copy(), state)
        times.scan += time.perf_counter() - start
        return Collected(rollout, int(valid.sum()), episodes, Told(action, raw_reward.copy(), done), ending)
