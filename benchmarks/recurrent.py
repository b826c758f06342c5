"""Which is the fastest way to learn over sequences with resets?  Times those that CleanRL's issue 276 asks about.

    python benchmarks/recurrent.py            # results in benchmarks/results/, plot in static/
    python benchmarks/recurrent.py --quick    # under a minute, writes nothing

A learning pass is forward and backward through an LSTM over [T, B] features, from a carry, with episodes that begin
in the middle.  All ways give the same outputs and gradients, which is checked before anything is timed:

    scan      Cleanba's way: x W_x for all steps at once, then one `lax.scan` that clears the carry where `first` is 1
    split     the host cuts where episodes begin and pads to the longest piece; then one scan without resets
    unrolled  a Python loop over time, all under one jit
    stepwise  a Python loop over time whose step is compiled
    loop      a Python loop over time, operation by operation
    pytorch   the same in PyTorch, one call of nn.LSTM per step: CleanRL's way, if PyTorch is installed
"""

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from jax import lax
from machine import describe, save

from cleanba.networks.cores import LSTM, LSTMCarry

ROOT = Path(__file__).parents[1]


@dataclass(frozen=True)
class Flags:
    """What is measured: a centre, and one axis varied at a time."""

    units: int = 256
    """of the LSTM, and features that it is given"""
    steps: tuple[int, ...] = (16, 32, 64, 128, 256)
    """sequence lengths T"""
    batches: tuple[int, ...] = (2, 8, 32)
    """sequences B in a minibatch"""
    episodes: tuple[int, ...] = (4, 16, 64, 0)
    """mean lengths of an episode, whose ends are drawn independently of each other (0: none ends)"""
    centre: tuple[int, int, int] = (128, 8, 64)
    """steps, batch and episode length of what is not varied"""
    rounds: int = 5
    """how often each way takes its turn"""
    unroll_limit: int = 32
    """longest sequence that is unrolled under jit: compiling takes longer and longer"""
    quick: bool = False
    """a small part of it, in less than a minute"""


class Problem(NamedTuple):
    """Data of one learning pass; the loss is the sum of h * weight."""

    params: Any
    x: jax.Array  # [T, B, D]
    first: jax.Array  # [T, B]
    carry: LSTMCarry
    weight: jax.Array  # [T, B, units]


def make_problem(t: int, b: int, episode: int, units: int, seed: int = 0) -> Problem:
    """Random features; each step begins an episode with probability 1 / episode."""
    rng = np.random.default_rng(seed)
    normal = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)
    first = jnp.asarray(rng.random((t, b)) < (1 / episode if episode else 0.0))
    x, carry = normal(t, b, units), LSTMCarry(normal(b, units), normal(b, units))
    params = LSTM(units).init(jax.random.key(seed), x[:1], first[:1], carry)
    return Problem(params, x, first, carry, normal(t, b, units))


def scan_with_resets(params: Any, x: jax.Array, first: jax.Array, carry: LSTMCarry) -> jax.Array:
    return LSTM(params["params"]["w_h"].shape[0]).apply(params, x, first, carry)[0]  # type: ignore[return-value,index]


def cell(weights: Any, carry: LSTMCarry, x: jax.Array, first: jax.Array) -> LSTMCarry:
    """One step as a loop over time takes it, x W_x included."""
    h, c = (jnp.where(first[:, None], 0.0, y) for y in carry)
    i, f, g, o = jnp.split(x @ weights["w_x"] + h @ weights["w_h"] + weights["b"], 4, axis=-1)
    c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
    return LSTMCarry(jax.nn.sigmoid(o) * jnp.tanh(c), c)


def loop_over(step: Callable) -> Callable:
    def outputs(params: Any, x: jax.Array, first: jax.Array, carry: LSTMCarry) -> jax.Array:
        hs = []
        for t in range(x.shape[0]):
            carry = step(params["params"], carry, x[t], first[t])
            hs.append(carry.h)
        return jnp.stack(hs)

    return outputs


class Pieces(NamedTuple):
    """Where the pieces of the sequences lie: piece n is steps t[:, n] of sequence b[n], padded."""

    t: np.ndarray  # [L, N]  clipped to the sequence where padded
    b: np.ndarray  # [N]
    fresh: np.ndarray  # [N]  whether the piece begins an episode; otherwise it goes on from the carry
    row: np.ndarray  # [T, B]  where each step lies: its row in its piece ...
    column: np.ndarray  # [T, B]  ... and its piece


def cut(first: np.ndarray) -> Pieces:
    """Cut [T, B] at the beginnings of episodes, on the host."""
    steps, b = first.shape
    begins = first.copy()
    begins[0] = True
    env, start = np.nonzero(begins.T)  # by sequence, then by time
    end = np.append(start[1:], steps)
    end[np.append(env[1:] != env[:-1], True)] = steps
    column = np.cumsum(begins.T.ravel()).reshape(b, steps).T - 1
    row = np.arange(steps)[:, None] - start[column]
    longest = int((end - start).max())
    t = np.minimum(start + np.arange(longest)[:, None], steps - 1)
    return Pieces(t, env, first[start, env], row, column)


def split_and_pad(params: Any, x: jax.Array, pieces: Pieces, carry: LSTMCarry) -> jax.Array:
    w = params["params"]
    start = LSTMCarry(*(jnp.where(pieces.fresh[:, None], 0.0, y[pieces.b]) for y in carry))
    gates = (x @ w["w_x"] + w["b"])[pieces.t, pieces.b]

    def step(carry: LSTMCarry, gates: jax.Array) -> tuple[LSTMCarry, jax.Array]:
        i, f, g, o = jnp.split(gates + carry.h @ w["w_h"], 4, axis=-1)
        c = jax.nn.sigmoid(f) * carry.c + jax.nn.sigmoid(i) * jnp.tanh(g)
        h = jax.nn.sigmoid(o) * jnp.tanh(c)
        return LSTMCarry(h, c), h

    return lax.scan(step, start, gates)[1][pieces.row, pieces.column]


def gradient_of(outputs: Callable) -> Callable:
    """(params, x) -> gradient of the sum of h * weight with respect to both, and h."""

    def run(params: Any, x: jax.Array, layout: Any, carry: LSTMCarry, weight: jax.Array) -> Any:
        def loss(params: Any, x: jax.Array) -> tuple[jax.Array, jax.Array]:
            h = outputs(params, x, layout, carry)
            return (h * weight).sum(), h

        return jax.grad(loss, (0, 1), has_aux=True)(params, x)

    return run


class Way(NamedTuple):
    run: Callable[[], Any]  # one learning pass
    compile_seconds: float  # 0 where nothing is compiled as a whole
    memory: int  # bytes besides arguments and results


def compiled(outputs: Callable, p: Problem, layout: Any) -> tuple[Any, float, int]:
    start = time.perf_counter()
    program = jax.jit(gradient_of(outputs)).lower(p.params, p.x, layout, p.carry, p.weight).compile()
    seconds = time.perf_counter() - start
    return program, seconds, program.memory_analysis().temp_size_in_bytes


def residuals(outputs: Callable, p: Problem) -> int:
    """Bytes that a loop keeps between its forward and its backward pass, the arguments aside."""
    _, backward = jax.vjp(lambda params, x: outputs(params, x, p.first, p.carry), p.params, p.x)
    given = {id(x) for x in jax.tree.leaves(p)}
    kept = {id(x): x for x in jax.tree.leaves(backward) if isinstance(x, jax.Array) and id(x) not in given}
    return sum(x.nbytes for x in kept.values())


def pytorch_loop(p: Problem) -> Callable[[], Any] | None:
    """One learning pass by PyTorch; None without PyTorch.  Returns what the others return."""
    try:
        import torch
    except ImportError:
        return None
    torch.set_num_threads(1)  # on matrices as small as a step's, more threads only wait for each other
    array = lambda x: torch.from_numpy(np.array(x))
    w, units = p.params["params"], p.weight.shape[-1]
    lstm = torch.nn.LSTM(p.x.shape[-1], units)
    with torch.no_grad():
        lstm.weight_ih_l0.copy_(array(w["w_x"]).T)
        lstm.weight_hh_l0.copy_(array(w["w_h"]).T)
        lstm.bias_ih_l0.copy_(array(w["b"]))
        lstm.bias_hh_l0.zero_()
    x, weight, keep = array(p.x).requires_grad_(), array(p.weight), 1 - array(p.first).float()
    start = tuple(array(y)[None] for y in p.carry)

    def run() -> Any:
        lstm.zero_grad()
        x.grad = None
        hs, carry = [], start
        for x_t, keep_t in zip(x, keep, strict=True):
            mask = keep_t.view(1, -1, 1)
            h, carry = lstm(x_t[None], (mask * carry[0], mask * carry[1]))
            hs.append(h)
        out = torch.cat(hs)
        (out * weight).sum().backward()
        grad = {"b": lstm.bias_ih_l0.grad, "w_h": lstm.weight_hh_l0.grad.T, "w_x": lstm.weight_ih_l0.grad.T}
        return ({"params": grad}, x.grad), out.detach()

    return run


def make_ways(p: Problem, unroll_limit: int) -> dict[str, Way]:
    ways = {}
    program, seconds, memory = compiled(scan_with_resets, p, p.first)
    ways["scan"] = Way(lambda: program(p.params, p.x, p.first, p.carry, p.weight), seconds, memory)

    split, split_seconds, split_memory = compiled(split_and_pad, p, jax.tree.map(jnp.asarray, cut(np.asarray(p.first))))

    def run_split() -> Any:  # cutting is work of every batch
        return split(p.params, p.x, jax.tree.map(jnp.asarray, cut(np.asarray(p.first))), p.carry, p.weight)

    ways["split"] = Way(run_split, split_seconds, split_memory)
    if p.x.shape[0] <= unroll_limit:
        unrolled, unrolled_seconds, unrolled_memory = compiled(loop_over(cell), p, p.first)
        run_unrolled = lambda: unrolled(p.params, p.x, p.first, p.carry, p.weight)
        ways["unrolled"] = Way(run_unrolled, unrolled_seconds, unrolled_memory)
    for name, step in (("stepwise", jax.jit(cell)), ("loop", cell)):
        run = gradient_of(loop_over(step))
        bound = lambda run=run: run(p.params, p.x, p.first, p.carry, p.weight)
        ways[name] = Way(bound, 0.0, residuals(loop_over(step), p))
    run_pytorch = pytorch_loop(p)
    if run_pytorch is not None:
        ways["pytorch"] = Way(run_pytorch, 0.0, 0)
    return ways


def check_equal(ways: dict[str, Way]) -> None:
    """All ways give the gradients and outputs of the first."""
    want, *others = (jax.tree.map(np.asarray, way.run()) for way in ways.values())
    for name, got in zip(list(ways)[1:], others, strict=True):
        for x, y in zip(jax.tree.leaves(want), jax.tree.leaves(got), strict=True):
            np.testing.assert_allclose(y, x, rtol=1e-3, atol=1e-4 * np.abs(x).max(), err_msg=name)


def time_in_turns(ways: dict[str, Way], rounds: int) -> dict[str, list[float]]:
    """Seconds of each way's passes, taken in turns, so that a busy machine is busy for all of them."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, way in ways.items():
            start = time.perf_counter()
            jax.block_until_ready(way.run())
            seconds[name].append(time.perf_counter() - start)
    return seconds


def measure(t: int, b: int, episode: int, flags: Flags) -> list[dict[str, Any]]:
    """One row per way, for these sizes."""
    p = make_problem(t, b, episode, flags.units)
    ways = make_ways(p, flags.unroll_limit)
    check_equal(ways)  # warms everything up too
    seconds = time_in_turns(ways, flags.rounds)
    pieces = cut(np.asarray(p.first))
    rows = []
    for name, way in ways.items():
        median = float(np.median(seconds[name]))
        ratio = float(np.median(np.divide(seconds[name], seconds["scan"])))
        rows.append(
            {
                "steps": t,
                "batch": b,
                "episode": episode,
                "way": name,
                "us_per_sample": round(1e6 * median / (t * b), 3),
                "times_scan": round(ratio, 3),  # median over rounds of the time over that of the same round's scan
                "bytes_per_sample": round(way.memory / (t * b)) or None,
                "compile_seconds": round(way.compile_seconds, 2) or None,
                "padded": round(pieces.t.size / (t * b), 2) if name == "split" else 1.0,
            }
        )
    return rows


HEADER = (
    f"{'T':>4} {'B':>4} {'episode':>7}  {'way':8} {'µs/sample':>10} {'x scan':>7} {'KiB/sample':>10} {'compile s':>9}"
)


def show(row: dict[str, Any]) -> str:
    kib = f"{row['bytes_per_sample'] / 1024:.1f}" if row["bytes_per_sample"] else "-"
    return (
        f"{row['steps']:4} {row['batch']:4} {row['episode'] or 'none':>7}  {row['way']:8} {row['us_per_sample']:10.1f} "
        f"{row['times_scan']:7.2f} {kib:>10} {row['compile_seconds'] or '-':>9}"
    )


def plot(rows: list[dict[str, Any]], flags: Flags, title: str, target: Path) -> None:
    """Time above, memory below, against each axis; told apart by marker and dash as well as by colour."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.ticker import FixedLocator, NullLocator

    plt.rcParams["svg.hashsalt"] = "recurrent"
    styles = {
        "scan": ("scan with resets (ships)", "black", "-", "o"),
        "split": ("split, pad, one pass", "#0072b2", "--", "s"),
        "unrolled": ("Python loop, unrolled in jit", "#009e73", ":", "D"),
        "stepwise": ("Python loop, compiled step", "#cc79a7", "-.", "v"),
        "loop": ("Python loop, operation by operation", "#d55e00", (0, (1, 1)), "^"),
        "pytorch": ("PyTorch loop (CleanRL's way)", "#777777", (0, (5, 1, 1, 1, 1, 1)), "x"),
    }
    t, b, episode = flags.centre
    axes_of = {
        "steps": (flags.steps, "steps per sequence", f"{b} sequences, episodes of {episode}"),
        "batch": (flags.batches, "sequences per minibatch", f"{t} steps, episodes of {episode}"),
        "episode": (flags.episodes, "mean length of an episode", f"{t} steps, {b} sequences"),
    }
    axes_of = {axis: value for axis, value in axes_of.items() if len(value[0]) > 1}
    centre = dict(steps=t, batch=b, episode=episode)
    figure, grid = plt.subplots(
        2, len(axes_of), figsize=(2 + 3 * max(2, len(axes_of)), 6.2), sharey="row", layout="constrained", squeeze=False
    )
    for column, (axis, (ticks, label, subtitle)) in enumerate(axes_of.items()):
        fixed = {name: value for name, value in centre.items() if name != axis}
        some = [r for r in rows if all(r[name] == value for name, value in fixed.items())]
        for way, (name, colour, dash, marker) in styles.items():
            if way not in {r["way"] for r in rows}:
                continue
            points = sorted((ticks.index(r[axis]), r) for r in some if r["way"] == way and r[axis] in ticks)
            for line, value in ((0, "times_scan"), (1, "bytes_per_sample")):
                known = [(x, r[value] / (1 if line == 0 else 1024)) for x, r in points if r[value] is not None]
                grid[line, column].plot(
                    *np.array(known).reshape(-1, 2).T, color=colour, linestyle=dash, marker=marker, markersize=6,
                    linewidth=1.8, markerfacecolor=colour if way == "scan" else "white", label=name,
                )  # fmt: skip
        for line in (0, 1):
            ax = grid[line, column]
            ax.set_yscale("log")
            ax.xaxis.set_major_locator(FixedLocator(range(len(ticks))))
            ax.xaxis.set_minor_locator(NullLocator())
            ax.set_xticks(range(len(ticks)), [str(x) if x else "none ends" for x in ticks])
            ax.grid(alpha=0.3, which="both", axis="y")
            ax.spines[["top", "right"]].set_visible(False)
        grid[0, column].set_title(subtitle, fontsize=10)
        grid[1, column].set_xlabel(label)
    grid[0, 0].set_ylabel("time, as a multiple of the scan's")
    grid[1, 0].set_ylabel("KiB per sample")
    handles, labels = grid[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False)
    figure.suptitle(title, fontsize=11)
    target.parent.mkdir(exist_ok=True)
    figure.savefig(target.with_suffix(".png"), dpi=130)
    figure.savefig(target.with_suffix(".svg"), metadata={"Date": None})


def main(flags: Flags) -> None:
    quick = flags.quick
    if quick:
        flags = Flags(
            units=64, steps=(16, 64), batches=(8,), episodes=(16,), centre=(64, 8, 16), rounds=3, unroll_limit=16
        )
    t, b, episode = flags.centre
    settings = [(n, b, episode) for n in flags.steps]
    settings += [(t, n, episode) for n in flags.batches]
    settings += [(t, b, n) for n in flags.episodes]
    rows: list[dict[str, Any]] = []
    print(HEADER)
    for setting in dict.fromkeys(settings):
        for row in measure(*setting, flags):
            rows.append(row)
            print(show(row), flush=True)
    for way in ("loop", "pytorch"):
        ratios = [r["times_scan"] for r in rows if r["way"] == way]
        if ratios:
            print(
                f"{way}: {min(ratios):.1f} to {max(ratios):.1f} times the scan's time, median {np.median(ratios):.1f}"
            )
    if quick:
        return
    save(f"recurrent_{jax.default_backend()}", {**asdict(flags), "rows": rows})
    machine = describe()
    title = f"Forward and backward through an LSTM of {flags.units} units"
    title += f"; {machine['cpu']}, {machine['cpu_cores']} cores"
    if machine["device"] != "cpu":
        title += f", {machine['device']}"
    plot(rows, flags, title, ROOT / "static" / "recurrent")


if __name__ == "__main__":
    main(tyro.cli(Flags, description=__doc__))
