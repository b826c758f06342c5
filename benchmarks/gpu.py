"""How fast do this machine's GPUs train, and are the bits the same?  Nine minutes a call, main parts first.

    python benchmarks/gpu.py                       # results in benchmarks/results/gpu.json and gpu.md, after each part
    python benchmarks/gpu.py --out runs/gpu                   # elsewhere
    python benchmarks/gpu.py --out runs/gpu --rest            # again, for the parts without results
    python benchmarks/gpu.py --out runs/gpu --only digests    # parts whose names begin with this
    JAX_NUM_CPU_DEVICES=4 python benchmarks/gpu.py --tiny    # the same parts on a CPU, small, to see that they run

Each part is a process of its own, since XLA's flags must be set before JAX starts.  It has a time limit; what it has
measured until then is kept.  Parts that no longer fit into `--minutes` are left out and named.  A part on speed
measures EnvPool, inference and learning alone, placed as in the whole; the whole; the kernels of one update; the
difference between the probabilities of acting and of learning before the first update; and peak memory.  Digests are
those of short runs, each of which compiles anew.
"""

import collections
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import machine
import tyro

RESULT = "RESULT "  # begins the line on which a part's process says what it found
CACHE = "JAX_COMPILATION_CACHE_DIR"
RESNET, NATURE = {"network": "impala"}, {"network": "nature", "hiddens": (512,)}
TINY: dict[str, Any] = dict(
    env_id="Catch-v0", network="mlp", hiddens=(8,), num_envs=48, num_steps=4, num_minibatches=2, env_epoch=0
)


@dataclass(frozen=True)
class Args:
    """How much is measured."""

    minutes: float = 9.0
    """time limit in all"""
    seconds: float = 3.0
    """for each figure"""
    only: tuple[str, ...] = ()
    """only parts whose names begin with one of these (default: all); figures of other parts stay"""
    rest: bool = False
    """only parts that have no figures yet, or failed"""
    out: Path = machine.RESULTS
    """folder of the results; with --tiny runs/gpu_tiny"""
    tiny: bool = False
    """small games and networks, to see that all parts run"""
    part: str = ""
    """used by the benchmark itself: the part to measure in this process, as JSON"""


@dataclass(frozen=True)
class Part:
    """One process's work."""

    name: str
    kind: str  # "look", "speed" or "digests": a function below
    algorithm: str = "ppo"
    fields: dict[str, Any] = field(default_factory=dict)  # of the experiment
    actors: tuple[int, ...] = (0,)
    learners: tuple[int, ...] = (0,)
    expected: float = 60.0  # seconds; the part is begun only if as many are left
    seconds: float = 3.0  # for each figure
    without: str = ""  # "batch": SCHED_BATCH; "all": the cores are divided among the actors' emulators


def parts(gpus: int) -> list[Part]:
    """What is measured, the most important first."""
    speed = lambda name, algorithm, *fields, **rest: Part(
        name, "speed", algorithm, {k: v for f in fields for k, v in f.items()}, **rest
    )
    size = {"num_envs": 64, "num_steps": 16, "num_actors": 4}
    short = lambda algorithm, shards: Part(
        f"digests {algorithm} {shards} shards",
        "digests",
        algorithm,
        RESNET | size | {"num_shards": shards},
        expected=80,
    )
    tf32, bf16 = {"dtype": "tensorfloat32"}, {"dtype": "bfloat16"}
    four = {"num_actors": 4}
    small = {"num_envs": 32, "num_steps": 32, "num_shards": 1}  # small batches, limited by the time of an acting step
    shards = {"num_shards": 6}  # the default on Atari: acting gets its turn between the shorter launches
    first = [
        speed("ppo resnet tf32 6 shards", "ppo", RESNET, tf32, shards),
        speed("ppo nature tf32 6 shards", "ppo", NATURE, tf32, shards),
        short("ppo", 4),
        speed("impala resnet tf32 6 shards", "impala", RESNET, tf32, shards),
        speed("ppo resnet tf32", "ppo", RESNET, tf32),
        speed("impala resnet tf32", "impala", RESNET, tf32),
        speed("ppo resnet float32", "ppo", RESNET),
        speed("ppo resnet bfloat16", "ppo", RESNET, bf16),
        speed("impala resnet bfloat16", "impala", RESNET, bf16),
        speed("ppo resnet tf32 not deterministic", "ppo", RESNET, tf32, {"deterministic": False}, expected=80),
    ]
    # The README's placements, in order of how many devices they take.
    placements = [((0,), (1,)), ((0,), (0, 1)), ((0,), (1, 2)), ((0,), (1, 2, 3)), ((0,), (1, 2, 3, 4)),
                  ((0,), (1, 2, 3, 4, 5, 6))]  # fmt: skip
    placed = []
    for actors, learners in placements:
        if max(*actors, *learners) < gpus:
            name = f"a{','.join(map(str, actors))}-l{','.join(map(str, learners))}"
            placed.append(speed(f"ppo {name}", "ppo", RESNET, tf32, actors=actors, learners=learners))
    rest = [
        speed("impala resnet tf32 not deterministic", "impala", RESNET, tf32, {"deterministic": False}, expected=80),
        speed("ppo resnet tf32 4 actors 240 envs", "ppo", RESNET, tf32, {"num_envs": 240} | four),
        speed("ppo nature tf32 32 envs, all cores", "ppo", NATURE, tf32, small),
        speed("ppo nature tf32 32 envs, all cores, no SCHED_BATCH", "ppo", NATURE, tf32, small, without="batch"),
        speed("ppo nature tf32 32 envs, cores divided among actors", "ppo", NATURE, tf32, small, without="all"),
        speed("ppo nature tf32", "ppo", NATURE, tf32),
        speed("impala nature tf32", "impala", NATURE, tf32),
        speed("ppo resnet tf32 1 actor", "ppo", RESNET, tf32, {"num_actors": 1}),
        speed("impala resnet tf32 6 shards 3 actors", "impala", RESNET, tf32, shards, {"num_actors": 3}),
        speed("ppo resnet tf32 4 shards", "ppo", RESNET, tf32, {"num_shards": 4}),
        speed("ppo resnet tf32 480 envs", "ppo", RESNET, tf32, {"num_envs": 480}),
        speed("ppo resnet tf32 60 envs", "ppo", RESNET, tf32, {"num_envs": 60}),
        speed("impala resnet float32", "impala", RESNET),
        speed("ppo resnet tf32 scanned", "ppo", RESNET, tf32, {"collector": "scanned"}),
        speed("impala resnet tf32 scanned", "impala", RESNET, tf32, {"collector": "scanned"}),
        speed("ppo lstm tf32", "ppo", RESNET, tf32, {"core": "lstm"}),
        short("impala", 4),
        short("ppo", 1),
        short("ppo", 2),
    ]
    return first + placed + rest


# --------------------------------------------------------------------------------------- in a process for each part


def look(part: Part) -> Iterator[dict[str, Any]]:
    """The machine."""
    import jax

    yield {"machine": machine.describe(), "devices": len(jax.local_devices()), "platform": jax.default_backend()}


def speed(part: Part) -> Iterator[dict[str, Any]]:
    """Steps per second of the parts and of the whole, the kernels of an update, and further figures.

    Figures are yielded one by one, so that earlier ones are kept if a later one fails or runs out of time.
    """
    import numpy as np
    from throughput import Parts, steps_per_second

    from cleanba.config import Placement
    from cleanba.environments.backends import threads_per_actor
    from cleanba.recipes import RECIPES

    recipe = RECIPES[part.algorithm]
    started = time.perf_counter()
    p = Parts(recipe, part.fields, Placement(part.actors, part.learners))
    metrics = p.learn()
    compiling = time.perf_counter() - started
    ratios = {"ratio": ratios_before_learning(p)}
    ratios |= {name: float(np.asarray(p.learner.local(x))) for name, x in metrics.items() if "ratio" in name}
    start = time.perf_counter()
    p.learn()
    per_update = time.perf_counter() - start
    for a in p.actors:
        p.infer(a)
    n, per_actor = len(p.actors), p.partition.envs_per_actor
    yield {
        "experiment": {**part.fields, "num_actors": n, "num_shards": p.partition.num_shards},
        "before_learning": ratios,
        "seconds": {"compiling": compiling, "update": per_update, "rollout": asdict(p.times)},
    }
    sps = {
        "EnvPool alone": steps_per_second(p.env_step, n, per_actor, part.seconds),
        "inference alone": steps_per_second(p.infer, n, per_actor, part.seconds / 2),
        "learning alone": steps_per_second(p.learn, 1, p.experiment.transitions_per_update, part.seconds),
    }
    rounded = lambda: {name: round(x) for name, x in sps.items()}
    yield {"steps_per_second": rounded()}
    whole = p.whole(part.seconds * 3, max(per_update, p.experiment.transitions_per_update / sps["EnvPool alone"]))
    sps["whole"] = float(whole["sps"])
    stats = p.devices.learners[0].memory_stats() or {}
    yield {
        "steps_per_second": rounded(),
        "whole_over_slower_part": sps["whole"] / min(sps["EnvPool alone"], sps["learning alone"]),
        "in_the_whole": {name: x for name, x in whole.items() if name.startswith("charts/") or name.endswith("_time")},
        "peak_gib": stats.get("peak_bytes_in_use", 0) / 2**30,
        "params_digest": whole["params_digest"],
    }
    p.open_pools(threads_per_actor(n))  # with the cores divided among the actors
    fewer_threads = steps_per_second(p.env_step, n, per_actor, part.seconds / 2)
    p.close()
    yield {"EnvPool alone, cores divided among actors": round(fewer_threads)}
    yield {"update": timeline(p.learn)}


def ratios_before_learning(p: Any) -> dict[str, float] | None:
    """How far learning's probability of an action is from acting's, with the same parameters: |ratio - 1|.

    Acting computes with the batch size of an actor's environments, learning with that of a minibatch.  None if the
    algorithm has no such probabilities, or is recurrent.
    """
    import jax
    import jax.numpy as jnp
    import numpy as np

    rollout, device = p.rollouts[0], p.device_of(0)
    t, b = rollout.valid.shape
    n = min(t * b, p.experiment.transitions_per_update // p.experiment.num_minibatches)
    at = lambda x: x[:t].reshape(t * b, *x.shape[2:])[:n]
    if p.experiment.core != "none" or "log_prob" not in rollout.extras:
        return None

    def log_prob(params: Any, obs: Any, first: jax.Array, action: jax.Array) -> jax.Array | None:
        shown = p.algorithm.inspect(params, (), obs, first)
        if "probability" not in shown:
            return None
        return jnp.log(jnp.take_along_axis(shown["probability"], action[:, None], -1)[:, 0])

    new = jax.jit(log_prob)(p.params[device], jax.tree.map(at, rollout.obs), at(rollout.first), at(rollout.action))
    if new is None:
        return None
    off = np.abs(np.expm1(np.asarray(new) - np.asarray(at(rollout.extras["log_prob"]))))[np.asarray(at(rollout.valid))]
    return {"mean": float(off.mean()), "max": float(off.max())}


def timeline(update: Any) -> dict[str, Any]:
    """What the first device does in one update: seconds of its kernels by name, and how long none runs."""
    import jax

    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            start = time.perf_counter()
            update()
            wall = time.perf_counter() - start
        files = list(Path(folder).rglob("*.xplane.pb"))
        if not files:
            return {"wall": wall}
        return {"wall": wall, **kernels(jax.profiler.ProfileData.from_file(str(files[0])).planes)}


def kernels(planes: Iterable[Any]) -> dict[str, Any]:
    """What a profile's planes say of the first GPU; on a CPU, the planes' names."""
    by_name = {plane.name: plane for plane in planes}
    device = next((plane for name, plane in sorted(by_name.items()) if name.startswith("/device:GPU")), None)
    if device is None:
        return {"planes": sorted(by_name)}
    seconds: collections.Counter[str] = collections.Counter()
    count: collections.Counter[str] = collections.Counter()
    spans = []
    for line in device.lines:
        if not line.name.startswith("Stream"):  # the others are sums of these
            continue
        for event in line.events:
            seconds[event.name] += event.duration_ns / 1e9
            count[event.name] += 1
            spans.append((event.start_ns, event.start_ns + event.duration_ns))
    busy, end = 0.0, 0.0
    for begin, finish in sorted(spans):
        busy += max(0.0, finish - max(begin, end)) / 1e9
        end = max(end, finish)
    longest = {name: {"seconds": s, "times": count[name]} for name, s in seconds.most_common(15)}
    return {"busy": busy, "launches": len(spans), "kernels": longest}


def digests(part: Part) -> Iterator[dict[str, Any]]:
    """Digests of one short run: twice on one device, and on 2 and 4 where there are as many."""
    import jax

    from cleanba.config import Placement
    from cleanba.recipes import RECIPES
    from cleanba.resolution import fit, resolve
    from cleanba.runtime.devices import find_devices
    from cleanba.runtime.metrics import Display, Status
    from cleanba.runtime.train import run_training
    from cleanba.runtime.training import make_training

    recipe, there = RECIPES[part.algorithm], len(jax.local_devices())
    e, spec, *_ = resolve(recipe, part.fields, jax.default_backend())
    e = replace(e, total_timesteps=3 * e.transitions_per_update)
    found: list[str] = []
    counts = [n for n in (1, 1, 2, 4) if n <= min(there, e.num_shards)]
    for learners in counts:
        placement = Placement((0,), tuple(range(learners)))
        devices, partition = find_devices(placement), fit(recipe, e, placement)
        algorithm = recipe.make(e, spec, devices.platform)
        training = make_training(algorithm, e, partition, devices, spec, log_frequency=3)
        status = Status("", 3)
        outcome = run_training(training, Display(status, enabled=False), status, lambda *_: None)
        if outcome.error is not None:
            raise outcome.error
        found.append(outcome.result["params_digest"])
        yield {"digests": found, "learner_devices": counts[: len(found)], "the_same": len(set(found)) == 1}


def measure(part: Part) -> None:
    """Measure one part in this process; print a line with all results so far after each of its figures."""
    import throughput

    from cleanba.config import Experiment
    from cleanba.environments.backends import threads_per_actor
    from cleanba.runtime import process_setup, training
    from cleanba.runtime.process_setup import prepare_process

    if part.without == "batch":
        process_setup.use_batch_scheduling = lambda: None
    if part.without == "all":
        training.threads_per_actor = throughput.threads_per_actor = lambda actors, *_: threads_per_actor(actors)
    asked = {name: part.fields[name] for name in ("deterministic", "dtype") if name in part.fields}
    prepare_process(Experiment(**asked))
    found: dict[str, Any] = {}
    for figures in {"look": look, "speed": speed, "digests": digests}[part.kind](part):
        found |= figures
        print(RESULT + json.dumps(found), flush=True)


# ------------------------------------------------------------------------------------------------ one after the other


def run(part: Part, limit: float, environment: dict[str, str]) -> dict[str, Any]:
    """Run a part in a process of its own -> what it found, and why it did not find more."""
    command = [sys.executable, __file__, "--part", json.dumps(asdict(part))]
    if part.kind == "digests":  # of runs that are compiled anew
        environment = environment | {"JAX_ENABLE_COMPILATION_CACHE": "false"}
    start = time.perf_counter()
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, start_new_session=True
    )
    try:
        out, err = process.communicate(timeout=limit)
        failed = " ".join(err.strip().splitlines()[-3:])[-600:] if process.returncode else ""
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        out, _ = process.communicate()
        failed = f"not done after {limit:.0f} s"
    lines = [line for line in out.splitlines() if line.startswith(RESULT)]
    found = json.loads(lines[-1].removeprefix(RESULT)) if lines else {}
    return found | {"wall": time.perf_counter() - start} | ({"failed": failed} if failed else {})


def table(found: dict[str, Any], left_out: list[str]) -> str:
    """The results on one page."""
    columns = ["EnvPool alone", "inference alone", "learning alone", "whole"]
    lines = [f"| steps/s | {' | '.join(columns)} | whole / slower part | ratio - 1 | GPU busy | peak GiB |"]
    lines.append("|---" * (len(columns) + 5) + "|")
    others = []
    for name, x in found.items():
        if "steps_per_second" in x:
            ratio = (x["before_learning"]["ratio"] or {}).get("max", float("nan"))
            update = x.get("update", {})
            busy = f"{update['busy'] / update['wall']:.0%}" if "busy" in update else ""
            cells = [f"{x['steps_per_second'][c]:,}" if c in x["steps_per_second"] else "" for c in columns]
            whole = f"{x['whole_over_slower_part']:.2f} | {ratio:.1e}" if "peak_gib" in x else f" | {ratio:.1e}"
            peak = f"{x['peak_gib']:.1f}" if "peak_gib" in x else ""
            lines.append(f"| {name} | {' | '.join(cells)} | {whole} | {busy} | {peak} |")
        elif "digests" in x:
            on = ", ".join(map(str, x["learner_devices"]))
            others.append(f"{name}, on {on} learner devices: {'the same' if x['the_same'] else 'DIFFERENT'}")
        if "failed" in x:
            others.append(f"{name}: {x['failed']}")
    if left_out:
        others.append(f"left out for want of time: {', '.join(left_out)}")
    return "\n".join([*lines, "", *others]) + "\n"


def main(args: Args) -> None:
    """Measure part after part, each time writing all results so far."""
    if args.part:
        values = json.loads(args.part)
        fields = {k: tuple(v) if isinstance(v, list) else v for k, v in values.pop("fields").items()}
        values |= {"fields": fields, "actors": tuple(values["actors"]), "learners": tuple(values["learners"])}
        return measure(Part(**values))
    if args.tiny and args.out == machine.RESULTS:
        args = replace(args, out=Path("runs/gpu_tiny"))  # the kept figures are a GPU's
    commit = machine.commit()
    deadline = time.perf_counter() + 60 * args.minutes
    left = lambda: deadline - time.perf_counter()
    args.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as cache:  # the whole finds the programs that its parts have compiled
        environment = {
            **os.environ, CACHE: cache, "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.5",
            "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]),
        }  # fmt: skip
        here = run(Part("look", "look"), left(), environment)
        if "failed" in here:
            sys.exit(f"benchmarks/gpu.py: {here['failed']}")
        if here["platform"] == "cpu" and not args.tiny:
            sys.exit("benchmarks/gpu.py: JAX finds no GPU here; --tiny shows on a CPU that all parts run")
        results = args.out / "gpu.json"
        found: dict[str, Any] = {}
        if (args.only or args.rest) and results.exists():
            before = json.loads(results.read_text())
            for what in ("device", "code"):  # other code may give other figures
                then, now = (side.get("machine", {}).get(what) for side in (before, here))
                if then != now:
                    sys.exit(f"benchmarks/gpu.py: {results} is of {what} {then}, not {now}; choose another --out")
            found = before["parts"]
        left_out: list[str] = []
        for part in parts(here["devices"]):
            there = part.name in found and "failed" not in found[part.name]
            if (args.only and not part.name.startswith(args.only)) or (args.rest and there):
                continue
            fields = {**part.fields, **TINY} if args.tiny else part.fields
            part = replace(part, fields=fields, seconds=args.seconds)
            if left() < (5 if args.tiny else part.expected):
                left_out.append(part.name)
                continue
            found[part.name] = run(part, min(left(), 3 * part.expected), environment) | {"commit": commit}
            print(f"{part.name}: {found[part.name].get('steps_per_second', found[part.name])}", flush=True)
            written = {"command": machine.command(), **here, "parts": found}
            results.write_text(json.dumps(written, indent=2) + "\n")
            (args.out / "gpu.md").write_text(table(found, left_out))
        page = table(found, left_out)
        (args.out / "gpu.md").write_text(page)
    print(f"\n{page}\nwritten: gpu.json and gpu.md in {args.out}")


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
