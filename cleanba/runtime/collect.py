"""A rollout: `num_steps` steps of one actor's environments, recorded on the actor's device."""

import threading
import time
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from contextlib import nullcontext
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, Generic, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import SingleDeviceSharding

from cleanba.algorithm import Algorithm, AnyAlgorithm, C, M, P, S
from cleanba.environments import jax_envs
from cleanba.environments.backends import Envs
from cleanba.environments.common import Compilable
from cleanba.errors import NotFinite, largest_divisor
from cleanba.rollout import Episode, EpisodeTracker, Obs, PyTree, Rollout, step_outcome
from cleanba.runtime.channels import Stop
from cleanba.runtime.compilation_cache import OF_ONE_PROCESS
from cleanba.runtime.playback import play_back
from cleanba.runtime.records import ActorState, RecordedRollout, SavedActor, action_dtype, restored
from cleanba.seeds import action_key
from cleanba.shards import network_options
from cleanba.specs import ActionSpec
from cleanba.waited import compiling


@dataclass
class Times:
    """What one rollout spent its time on, in seconds."""

    emulators: float = 0.0
    inference: float = 0.0  # copying observations to the device, the policy, and copying actions back
    scan: float = 0.0  # both of the above, if they run in one scan
    transfer: float = 0.0  # handing the rollout to the learner devices
    params_wait: float = 0.0  # waiting for parameters
    rollout: float = 0.0  # all of it


class Collected(NamedTuple):
    """A rollout, and what else is kept of it."""

    rollout: Rollout  # on the actor's device
    steps: int  # executed: ignored actions do not count
    episodes: list[Episode]
    recorded: RecordedRollout
    actor_state: ActorState


@jax.jit
def _all_finite(obs: Obs) -> jax.Array:
    """Whether all real numbers among the leaves are finite.  -> [] bool."""
    real = [x for x in jax.tree.leaves(obs) if jnp.issubdtype(x.dtype, jnp.floating)]
    return jnp.stack([jnp.isfinite(x).all() for x in real]).all() if real else jnp.bool(True)


class FiniteCheck(NamedTuple):
    """Checks, after each rollout, that an actor's environments returned finite numbers only.

    The check is a program of its own, so it cannot change the collector's bits.  It fetches one number from the device.
    Observations are fetched only where that says that one is not finite, to find the place.
    """

    env_id: str
    first_env: int
    """the number of the actor's first environment"""

    def check(self, rollout: int, obs: Obs, raw_reward: np.ndarray, valid: np.ndarray) -> None:
        """Check a rollout by its number: obs [T+1, B, ...] on a device, raw_reward and valid [T, B] on the host.

        Raises:
            NotFinite: naming environment, step and field.
        """
        obs_are_finite = _all_finite(obs)
        wrong = ~np.isfinite(raw_reward) & valid
        if wrong.any():
            t, env = np.argwhere(wrong)[0].tolist()
            raise self._found(env, f"the reward of step {t + 1} of rollout {rollout}", raw_reward[t, env])
        if obs_are_finite:
            return
        places = []
        for path, x in jax.tree_util.tree_leaves_with_path(jax.device_get(obs)):
            if jnp.issubdtype(x.dtype, jnp.floating) and not np.isfinite(x).all():
                t, env, *part = np.argwhere(~np.isfinite(x))[0].tolist()
                places.append((t, env, "".join(map(str, path)) + (str(part) if part else ""), x[(t, env, *part)]))
        t, env, part, value = min(places, key=lambda place: place[0])  # where it began
        when = f"after step {t} of rollout {rollout}" if t else f"before the first step of rollout {rollout}"
        raise self._found(env, f"the observation{part} {when}", value)

    def _found(self, env: int, what: str, value: object) -> NotFinite:
        return NotFinite(
            f"environment {self.first_env + env} of {self.env_id}: {what} is {value}, which is not a finite number; "
            "fix the environment, replace such numbers in a wrapper, or continue regardless with --on-nonfinite ignore"
        )


class Recording(NamedTuple):
    """The rollout under collection, in buffers on the actor's device, which each step writes one row of."""

    obs: Obs  # [T+1, B, ...]
    first: jax.Array  # [T+1, B]
    action: jax.Array  # [T, B]
    extras: PyTree  # [T, B, ...]


Tree = TypeVar("Tree", bound=PyTree)


def write(buffers: Tree, t: jax.Array | int, values: Tree) -> Tree:
    """Replace row t of buffers [T, B, ...] by values [B, ...]."""
    return jax.tree.map(lambda b, v: lax.dynamic_update_index_in_dim(b, v.astype(b.dtype), t, 0), buffers, values)


def blank(num_steps: int, values: Tree) -> Tree:
    """Uninitialised buffers for T = `num_steps` rows like these.  [B, ...] -> [T, B, ...]."""
    return jax.tree.map(lambda x: jnp.empty((num_steps, *x.shape), x.dtype), values)


def first_carry(algorithm: Algorithm[S, M, P, C], num_envs: int, device: jax.Device, first_env: int = 0) -> C:
    """The carry before the first step, made on the actor's device, as another one may be busy learning.

    first_env: the number of the first of these environments.
    """
    with jax.default_device(device):
        return jax.device_put(algorithm.initial_carry(num_envs, first_env), device)


def on_host(tree: PyTree) -> PyTree:
    """Copies in host memory, which no donated buffer can overwrite.  [...] -> [...]."""
    return jax.tree.map(np.array, tree)


@dataclass
class Collector(Generic[P, C]):
    """What both collectors are: after `restart` or `resume`, call it once per rollout."""

    algorithm: Algorithm[Any, Any, P, C]
    num_steps: int
    device: jax.Device
    stop: Stop
    _: KW_ONLY
    finite_check: FiniteCheck | None = None
    recorded_action: ActionSpec | None = None  # the actions to record; None: none are
    first_env: int = 0  # the number of the actor's first environment
    _envs: Envs | None = None
    _tracker: EpisodeTracker = field(default_factory=lambda: EpisodeTracker(0))

    def __call__(self, params: P, numbers: np.ndarray, times: Times) -> Collected:
        """Collect a rollout with these parameters.

        numbers: the rollout's `seeds.action_numbers`, which the keys of its actions are made from.
        times: filled with what the rollout spent its time on.
        """
        raise NotImplementedError

    def _begin(self, obs: Obs, done: np.ndarray, first: np.ndarray, carry: C) -> None:
        """Note what the next rollout begins from, [B, ...]; `_envs` is there already."""
        raise NotImplementedError

    def restart(self, envs: Envs) -> None:
        """Continue with fresh environments, all at the first step of an episode."""
        self.close()
        self._envs, n = envs, envs.num_envs
        obs, carry = envs.reset(), first_carry(self.algorithm, n, self.device, self.first_env)
        self._begin(obs, np.zeros(n, bool), np.ones(n, bool), carry)
        self._tracker = EpisodeTracker(n)

    def resume(self, envs: Envs, saved_actor: SavedActor, who: str, played: Callable[[int], None]) -> None:
        """Continue from a checkpoint with fresh environments, brought back to where the actor's were.

        Recorded actions are played in them; environments in JAX get their saved state.

        who: the environments, as messages name them.
        played: called with the number of recorded steps, each time that some were played.

        Raises:
            Failure: the environments do not reproduce what was recorded.
        """
        self.close()
        self._envs, saved = envs, saved_actor.arrays
        like_carry = first_carry(self.algorithm, envs.num_envs, self.device)  # only its structure is used
        if self.recorded_action is None:
            assert isinstance(envs, jax_envs.Envs), "only environments in JAX are saved as they are"
            obs = restored(envs.reset(), saved["obs"])
            envs.restore(restored(envs.state, saved["state"]), obs)
        else:
            obs = play_back(envs, saved_actor, self.recorded_action, self.num_steps, who, self.stop, played)
        self._tracker = tracker = EpisodeTracker(envs.num_envs)
        names = ("ret", "length", "done", "first")
        (tracker.ret,), (tracker.length,), (done,), (first,) = (saved[name] for name in names)
        self._begin(obs, done, first, restored(like_carry, saved["carry"]))

    def _actor_state(self, obs: Obs, done: Any, first: Any, carry: PyTree, state: PyTree) -> ActorState:
        """What the next rollout begins from, for a checkpoint; `state` is kept of JAX environments alone."""
        on_device = isinstance(self._envs, jax_envs.Envs)
        ret, length = self._tracker.ret.copy(), self._tracker.length.copy()
        return ActorState(obs, done, first, on_host(carry), ret, length, state if on_device else None)

    def close(self) -> None:
        envs, self._envs = self._envs, None  # so that their memory is free before new ones are made
        if envs is not None:
            envs.close()


class StepperState(NamedTuple):
    """What stays on the device between steps, so that a step sends it nothing but observations."""

    recording: Recording
    key: jax.Array
    t: jax.Array  # the number of the next step


class Steppers(NamedTuple, Generic[P, C]):
    """The compiled functions of the stepped collector, shared by all actors of a process."""

    start: Callable[[P, C, PyTree, jax.Array, np.ndarray], StepperState]
    step: Callable[[P, StepperState, C, PyTree, jax.Array], tuple[jax.Array, C, StepperState]]
    finish: Callable[[StepperState, PyTree, jax.Array], Recording]


def make_steppers(algorithm: Algorithm[S, M, P, C], num_steps: int, platform: str) -> Steppers[P, C]:
    """Compile acting and recording into one call per step, for `platform` ("cpu", "gpu" …)."""

    def start(params: P, carry: C, obs: Obs, first: jax.Array, numbers: jax.Array) -> StepperState:
        key = action_key(*numbers)
        acted = jax.eval_shape(lambda: algorithm.act(params, carry, obs, first, key, True))
        recording = Recording(*blank(num_steps + 1, (obs, first)), *blank(num_steps, (acted[0], acted[2])))
        return StepperState(recording, key, jnp.int32(0))

    def step(params: P, now: StepperState, carry: C, obs: Obs, first: jax.Array) -> tuple[jax.Array, C, StepperState]:
        action, carry, extras = algorithm.act(params, carry, obs, first, jax.random.fold_in(now.key, now.t), True)
        recording = write(now.recording, now.t, Recording(obs, first, action, extras))
        return action, carry, StepperState(recording, now.key, now.t + 1)

    def finish(now: StepperState, obs: Obs, first: jax.Array) -> Recording:
        obs, first = write((now.recording.obs, now.recording.first), num_steps, (obs, first))
        return now.recording._replace(obs=obs, first=first)

    # keep_unused: `start` needs only the shapes of its inputs, but their device decides where its buffers lie.
    return Steppers(
        jax.jit(start, keep_unused=True),
        jax.jit(step, donate_argnums=1, compiler_options=network_options(platform)),
        jax.jit(finish, donate_argnums=0),
    )


@dataclass
class SteppedCollector(Collector[P, C]):
    """Steps the environments from Python; the policy and the recording are one compiled call per step."""

    steppers: Steppers[P, C]
    _: KW_ONLY
    _obs: Obs = None
    _compiled: bool = False
    _done: np.ndarray = field(default_factory=lambda: np.zeros(0, bool))
    _first: np.ndarray = field(default_factory=lambda: np.zeros(0, bool))
    _carry: PyTree = None

    def _begin(self, obs: Obs, done: np.ndarray, first: np.ndarray, carry: C) -> None:
        self._obs, self._done, self._first = obs, done, first
        self._carry = jax.device_put(carry, self.device)

    def __call__(self, params: P, numbers: np.ndarray, times: Times) -> Collected:
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
            # The only copy of an observation to a device.
            obs, first = jax.device_put((self._obs, self._first), self.device)
            with nullcontext() if self._compiled else compiling():
                if stepping is None:
                    stepping = self.steppers.start(params, self._carry, obs, first, numbers)
                action, self._carry, stepping = self.steppers.step(params, stepping, self._carry, obs, first)
            self._compiled = True
            host_action = np.asarray(action)
            then, now = now, clock()
            times.inference += now - then

            step = self._envs.step(host_action)
            answer = step_outcome(self._done, step.reward, step.terminated, step.truncated)
            reward[t], terminated[t], truncated[t], valid[t], done[t] = answer
            raw_reward[t] = step.raw_reward
            if self.recorded_action is not None:
                if actions is None:
                    actions = np.empty((self.num_steps, *host_action.shape), action_dtype(self.recorded_action))
                actions[t] = host_action
            episodes += self._tracker.add(step.raw_reward, answer.valid, step.over, step.infos)
            self._obs, self._first, self._done = step.obs, self._done, answer.done
            then, now = now, clock()
            times.emulators += now - then
        assert stepping is not None
        executed, valid_here = int(valid.sum()), valid
        last, reward, terminated, truncated, valid = jax.device_put(
            ((self._obs, self._first), reward, terminated, truncated, valid), self.device
        )
        r = self.steppers.finish(stepping, *last)
        if self.finite_check is not None:
            self.finite_check.check(int(numbers[-1]), r.obs, raw_reward, valid_here)
        rollout = Rollout(
            r.obs, r.first, r.action, reward, terminated, truncated, valid, extras=r.extras, carry=start_carry
        )
        state = getattr(self._envs, "state", None)
        actor_state = self._actor_state(self._obs, self._done, self._first, self._carry, state)
        times.inference += clock() - now
        return Collected(rollout, executed, episodes, RecordedRollout(actions, raw_reward, done), actor_state)


class RecordedOutcomes(NamedTuple):
    """What steps of the environments returned: the scanned collector's second set of buffers.  Leaves [T, B]."""

    reward: jax.Array
    raw_reward: jax.Array
    terminated: jax.Array
    truncated: jax.Array
    valid: jax.Array
    over: jax.Array


class ScanState(NamedTuple):
    """What the scan carries from one step to the next, and from one rollout to the next."""

    handle: PyTree  # EnvPool's, which orders the steps; or the state of JAX environments
    obs: Obs  # [B, ...]
    done: jax.Array  # [B]  the last step ended an episode, so the next one is ignored
    first: jax.Array  # [B]
    carry: PyTree


SCAN_STEPS = 32  # steps per call into XLA, at most, as a collector can be stopped only between calls


Scanned = tuple[Recording, RecordedOutcomes]


class Scan(NamedTuple):
    """The functions of the scanned collector, for one `step` function of environments."""

    length: int  # steps per call
    step: Callable[[PyTree, jax.Array, ScanState, jax.Array | int], tuple[ScanState, Scanned]]  # one of them
    steps: jax.stages.Wrapped  # all of them, to be compiled


def make_scan(algorithm: Algorithm[S, M, P, C], num_steps: int, envs: Compilable) -> Scan:
    """One compiled call for several steps: acting, `envs.step(handle, action) -> handle, Step`, and recording."""
    length = largest_divisor(num_steps, SCAN_STEPS)

    def step(params: PyTree, key: jax.Array, state: ScanState, t: jax.Array | int) -> tuple[ScanState, Scanned]:
        action, carry, extras = algorithm.act(
            params, state.carry, state.obs, state.first, jax.random.fold_in(key, t), True
        )
        handle, out = envs.step(state.handle, action)
        answer = step_outcome(state.done, out.reward, out.terminated, out.truncated)
        outcome = RecordedOutcomes(
            answer.reward, out.raw_reward, answer.terminated, answer.truncated, answer.valid, out.over
        )
        recorded = Recording(state.obs, state.first, action, extras)
        return ScanState(handle, out.obs, answer.done, state.done, carry), (recorded, outcome)

    def scan_envs(
        params: PyTree, numbers: jax.Array, buffers: Scanned, state: ScanState, t: jax.Array
    ) -> tuple[ScanState, Scanned]:
        key = action_key(*numbers)

        def body(carried: tuple[ScanState, Scanned], t: jax.Array) -> tuple[tuple[ScanState, Scanned], None]:
            state, buffers = carried
            state, recorded = step(params, key, state, t)
            return (state, write(buffers, t, recorded)), None

        (state, (recording, outcome)), _ = lax.scan(body, (state, buffers), t + jnp.arange(length))
        # Row t + length is the observation after these steps.  The next call, if any, writes the same row again.
        obs, first = write((recording.obs, recording.first), t + length, (state.obs, state.first))
        return state, (recording._replace(obs=obs, first=first), outcome)

    if envs.of_one_process:
        scan_envs.__name__ = OF_ONE_PROCESS
    return Scan(length, step, jax.jit(scan_envs, donate_argnums=2))


SCANS_KEPT = 64  # compiled scans, of about a megabyte each


class CompiledScan(NamedTuple):
    """A compiled scan for environments with one `Compilable.key`.  It keeps no pool of environments alive."""

    length: int  # steps per call
    steps: jax.stages.Compiled
    new_buffers: Callable[[], Scanned]  # room for a rollout


class ScanCache:
    """Compiled scans by device and `Compilable.key`, shared by all actors of a process."""

    def __init__(self, algorithm: AnyAlgorithm, num_steps: int):
        self.algorithm = algorithm
        self.num_steps = num_steps
        self._lock = threading.Lock()
        self._compiled: dict[Hashable, Future[CompiledScan]] = {}

    def of(
        self,
        envs: Compilable,
        device: jax.Device,
        args: tuple[PyTree, np.ndarray, ScanState],
        check: Callable[[], None] = lambda: None,
    ) -> CompiledScan:
        """The scan for these environments.  `args` have the shapes of what it will be called with.

        check: called now and then while another actor compiles it; raises an error if the run ends.
        """
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
                with compiling():
                    scan.set_result(self._compile(envs, device, args))
            except BaseException as error:
                scan.set_exception(error)
        while not wait_for([scan], 0.1).done:
            check()
        return scan.result()

    def _compile(
        self, envs: Compilable, device: jax.Device, args: tuple[PyTree, np.ndarray, ScanState]
    ) -> CompiledScan:
        params, numbers, state = args
        scan = make_scan(self.algorithm, self.num_steps, envs)
        _, (r, outcome) = jax.eval_shape(lambda: scan.step(params, action_key(*numbers), state, 0))

        def new_buffers() -> Scanned:
            observed = blank(self.num_steps + 1, (r.obs, r.first))
            return Recording(*observed, *blank(self.num_steps, (r.action, r.extras))), blank(self.num_steps, outcome)

        # Committed to the device: uncommitted buffers would have the scan compiled a second time.
        room = jax.jit(new_buffers, out_shardings=SingleDeviceSharding(device))
        steps = scan.steps.lower(params, numbers, room(), state, np.int32(0)).compile(network_options(device.platform))
        return CompiledScan(scan.length, steps, room)


@dataclass
class ScannedCollector(Collector[P, C]):
    """Policy, recurrent core and environments as one `lax.scan` under `jit`: EnvPool's through its XLA interface.

    A rollout takes a few calls into XLA, so that the end of the run is noticed in time: each has the largest number of
    steps, `SCAN_STEPS` at most, that divides `num_steps` (where that is a larger prime, each step takes a call).
    The scan is compiled once.  Without our kernels for CPUs, the compiled code holds the address of EnvPool's pool.  We
    free the old pool first, so that the new one usually gets the same address; if not, the scan is compiled again.
    """

    scans: ScanCache
    _: KW_ONLY
    _compilable: Compilable | None = None
    _state: ScanState | None = None

    def _begin(self, obs: Obs, done: np.ndarray, first: np.ndarray, carry: C) -> None:
        assert self._envs is not None
        self._compilable = self._envs.xla()
        self._state = ScanState(*jax.device_put((self._compilable.handle, obs, done, first, carry), self.device))

    def close(self) -> None:
        super().close()
        self._compilable = None  # frees the pool, so that the next one gets its address

    def _scan(self, params: PyTree, numbers: np.ndarray, state: ScanState) -> tuple[ScanState, Scanned]:
        assert self._compilable is not None, "restart() comes first"
        scan = self.scans.of(self._compilable, self.device, (params, numbers, state), self.stop.check)
        buffers = scan.new_buffers()
        for t in range(0, self.num_steps, scan.length):
            self.stop.check()
            state, buffers = scan.steps(params, numbers, buffers, state, np.int32(t))
            jax.block_until_ready(state)
        return state, buffers

    def __call__(self, params: P, numbers: np.ndarray, times: Times) -> Collected:
        assert self._state is not None, "restart() comes first"
        start = time.perf_counter()
        start_carry = self._state.carry
        self._state, (r, outcome) = self._scan(params, numbers, self._state)
        raw_reward, valid, over = jax.device_get((outcome.raw_reward, outcome.valid, outcome.over))
        if self.finite_check is not None:
            self.finite_check.check(int(numbers[-1]), r.obs, raw_reward, valid)
        done = np.asarray(outcome.terminated) | np.asarray(outcome.truncated)
        action = np.array(r.action, action_dtype(self.recorded_action)) if self.recorded_action is not None else None
        episodes = [e for t in range(self.num_steps) for e in self._tracker.add(raw_reward[t], valid[t], over[t])]
        o = outcome
        rollout = Rollout(
            r.obs, r.first, r.action, o.reward, o.terminated, o.truncated, o.valid, extras=r.extras, carry=start_carry
        )
        handle, obs, ended, first, carry = self._state
        actor_state = self._actor_state(obs, ended, first, carry, handle)
        times.scan += time.perf_counter() - start
        return Collected(
            rollout, int(valid.sum()), episodes, RecordedRollout(action, raw_reward.copy(), done), actor_state
        )
