"""Compile every algorithm for H200s ahead of time and inspect the programs.  Needs neither a GPU nor a driver.

    VERSION=$(python -c "import jax; print(jax.__version__)")
    pip install --no-deps jax-cuda12-pjrt==$VERSION jax-cuda12-plugin==$VERSION nvidia-cuda-nvcc-cu12
    python benchmarks/aot.py              # one to three minutes a program; results/aot_h200.json and .md after each
    python benchmarks/aot.py --only ppo-resnet --devices 1 8      # the names are those of the first column

With `--only` the rows of other programs stay unchanged; each row names its commit.

The packages take 550 MB; install them into a virtual environment of their own, so that other runs do not use them.
With the flags of --deterministic it compiles, for Atari,

* each algorithm's update, step of acting and scanned rollout at its defaults, but in one shard;
* PPO's and IMPALA's updates in the default number of shards;
* all updates in eight shards on 1, 2 and 8 devices, and compares the branches that compute a shard.

Memory and instructions are those that would run on H200s.  Autotuning needs a device, so no kernel is chosen or timed.
"""

import collections
import hashlib
import math
import os
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax
import machine
import numpy as np
import programs
import tyro
from jax.sharding import Mesh

from cleanba.errors import UsageError
from cleanba.recipes import RECIPES
from cleanba.runtime.devices import MESH_AXIS, Devices
from cleanba.runtime.process_setup import make_deterministic, set_precision

SHARDED = {"num_envs": 128, "num_shards": 8}  # eight shards of 16 environments, for any number of devices
BY_DEFAULT: dict[str, Any] = {"num_actors": None, "num_shards": None}  # what a user gets without these flags
ACTOR_CRITICS = ("ppo", "impala")


@dataclass(frozen=True)
class Args:
    """What is compiled."""

    only: tuple[str, ...] = ()
    """only programs whose names begin with one of these (default: all)"""
    variants: tuple[str, ...] = tuple(programs.VARIANTS)
    """networks and formats"""
    devices: tuple[int, ...] = (1, 2, 8)
    """numbers of devices to distribute eight shards over"""
    text: Path | None = None
    """folder for the text of the compiled programs"""


# ------------------------------------------------------------------------------------------------ reading a program

INSTRUCTION = re.compile(r"^(?:ROOT )?%?([\w.\-]+) = (.*?) ([a-z][a-z0-9\-]*)\((.*)$")
CALLED = re.compile(
    r"(calls|body|to_apply|branch_computations|true_computation|false_computation)=\{?([^},]*(?:, %[^},]*)*)"
)
SHAPE = re.compile(r"\[(\d[\d,]*)\]")
# Instructions that are not kernels of their own, and instructions that only move data.
NO_WORK = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "while", "conditional", "call"}
NO_WORK |= {"partition-id", "replica-id", "after-all", "opt-barrier", "add-dependency"}
MOVES = {"copy", "transpose", "reshape", "bitcast", "slice", "dynamic-slice", "dynamic-update-slice", "concatenate"}
MOVES |= {"broadcast"}
COLLECTIVES = ("all-gather", "all-to-all", "all-reduce", "reduce-scatter", "collective-permute")


class Instruction(NamedTuple):
    """One line of a compiled program."""

    opcode: str
    shape: str
    line: str

    @property
    def called(self) -> list[str]:
        """The computations that it calls, in order."""
        found = [names for _, names in CALLED.findall(self.line)]
        return [name.strip().lstrip("%") for names in found for name in names.split(",") if name.strip()]


def computations(hlo: str) -> dict[str, list[Instruction]]:
    """A program's computations by name; the one that runs is "ENTRY"."""
    found: dict[str, list[Instruction]] = {}
    name = None
    for line in hlo.splitlines():
        if head := re.match(r"^(ENTRY )?%?([\w.\-]+) \(.*\) -> .*\{$", line):
            found[name := "ENTRY" if head[1] else head[2]] = []
        elif line.startswith("}"):
            name = None
        elif name is not None and (parts := INSTRUCTION.match(line.strip())):
            found[name].append(Instruction(parts[3], parts[2], line.strip()))
    return found


def executed(
    all_of: dict[str, list[Instruction]], name: str = "ENTRY", times: int = 1
) -> Iterator[tuple[Instruction, int]]:
    """The instructions that run, and how often: each iteration of a loop, and a conditional's branch with most work."""
    for instruction in all_of[name]:
        yield instruction, times
        if instruction.opcode == "while":
            count = re.search(r"known_trip_count\D+(\d+)", instruction.line)
            body = re.search(r"body=%?([\w.\-]+)", instruction.line)
            assert body is not None
            yield from executed(all_of, body[1], times * int(count[1]) if count else times)
        elif instruction.opcode == "conditional":
            taken = max(instruction.called, key=lambda branch: sum(n for _, n in executed(all_of, branch)))
            yield from executed(all_of, taken, times)
        elif instruction.opcode in ("call", "async-start"):
            for callee in instruction.called:
                yield from executed(all_of, callee, times)


def summary(hlo: str) -> dict[str, Any]:
    """Launches, what is sorted and scattered, and library calls, as one run of the program executes them."""
    all_of = computations(hlo)
    launches, conditionals = 0, 0
    sorts: collections.Counter[int] = collections.Counter()
    scatters: collections.Counter[int] = collections.Counter()
    calls: collections.Counter[str] = collections.Counter()

    def elements(shape: str) -> int:
        """The number of elements of the first array in a shape."""
        sizes = re.search(r"\[([\d,]*)\]", shape)
        return math.prod(int(n) for n in sizes[1].split(",") if n) if sizes else 0

    for instruction, times in executed(all_of):
        opcode = instruction.opcode
        conditionals += times * (opcode == "conditional")
        if opcode in NO_WORK or opcode.endswith("-done"):
            continue
        launches += times
        if target := re.search(r'custom_call_target="([^"]+)"', instruction.line):
            calls[target[1]] += times
        if opcode.removesuffix("-start") in COLLECTIVES:
            calls[opcode.removesuffix("-start")] += times
        fused = [i for name in instruction.called for i in all_of[name]] if opcode == "fusion" else []
        for part in [instruction, *fused]:
            if part.opcode == "sort" or (part.opcode == "custom-call" and "Sort" in part.line):
                sorts[elements(part.shape)] += times
            if part.opcode in ("scatter", "select-and-scatter"):
                scatters[elements(part.shape)] += times
    by_size = lambda counts: {f"{size:,}": n for size, n in sorted(counts.items(), reverse=True)}
    open_loops = [i for i, _ in executed(all_of) if i.opcode == "while" and "known_trip_count" not in i.line]
    return {
        "launches": launches,
        "loops_counted_once": len(open_loops),  # their number of iterations is unknown
        "conditionals": conditionals,
        "sorts": by_size(sorts),
        "scatters": by_size(scatters),
        "triton_products": len(re.findall(r'"kind":"__triton\w*gemm', hlo)),
        "calls": dict(calls.most_common()),
    }


# ------------------------------------------------------------------------------------------------- comparing shards


class Branch(NamedTuple):
    """What is computed for a shard, without the names of its values."""

    whole: str  # a digest of all its instructions, layouts and fusions included
    arithmetic: str  # of those that compute: library calls and products in full, others by size, without layouts
    instructions: int


def branches(hlo: str) -> list[Branch]:
    """What `ShardAxis.isolate` made: the branch with most work of every conditional, in order of size."""
    all_of = computations(hlo)

    def plain(instruction: Instruction) -> str:
        line = re.sub(r", (metadata|backend_config|frontend_attributes)=\{.*", "", instruction.line)
        line = re.sub(r"(calls|to_apply|condition|body)=%?[\w.\-]+", r"\1", line)
        return re.sub(r"%[\w.\-]+", "%", re.sub(r"^(ROOT )?%?[\w.\-]+ = ", "", line))

    def elements(shape: re.Match[str]) -> str:
        """The number of elements in place of a shape, as one array may be read in several shapes."""
        return f"[{math.prod(int(n) for n in shape[1].split(','))}]"

    def arithmetic(instruction: Instruction) -> str:
        """An instruction without its layout, which changes no sum.  A library may choose its kernel by the layout."""
        if instruction.opcode in ("custom-call", "convolution", "dot"):
            return plain(instruction)
        return re.sub(r"\{[\d,]*\}", "", SHAPE.sub(elements, plain(instruction)))

    def within(name: str) -> Iterator[Instruction]:
        for instruction in all_of[name]:
            yield instruction
            for callee in instruction.called:
                yield from within(callee)

    def branch(name: str) -> Branch:
        of_branch = list(within(name))
        digest = lambda lines: hashlib.sha256("\n".join(sorted(lines)).encode()).hexdigest()[:12]
        computing = [i for i in of_branch if i.opcode not in NO_WORK | MOVES | {"fusion"}]
        return Branch(digest(map(plain, of_branch)), digest(map(arithmetic, computing)), len(of_branch))

    taken = [
        max(i.called, key=lambda name: sum(1 for _ in within(name)))
        for instructions in all_of.values()
        for i in instructions
        if i.opcode == "conditional"
    ]
    return sorted({branch(name) for name in taken}, key=lambda b: -b.instructions)


def compare(of_programs: dict[str, list[Branch]]) -> list[dict[str, Any]]:
    """How many of the first program's branches the others have too, exactly or apart from how they move data."""
    names = list(of_programs)
    rows = []
    for other in names[1:]:
        a, b = of_programs[names[0]], of_programs[other]
        whole, arithmetic = {x.whole for x in b}, {x.arithmetic for x in b}
        rows.append(
            {
                "programs": [names[0], other],
                "branches": [len(a), len(b)],
                "the_same": sum(x.whole in whole for x in a),
                "the_same_but_for_moves": sum(x.whole not in whole and x.arithmetic in arithmetic for x in a),
                "different": [x.instructions for x in a if x.arithmetic not in arithmetic],
            }
        )
    return rows


# -------------------------------------------------------------------------------------------------------- compiling


def h200(count: int) -> Devices:
    """This many H200s of one host, to compile for: the first acts, all learn."""
    from jax.experimental import topologies

    figures = (Path(__file__).parent / "h200.txtpb").read_text()
    there = topologies.get_topology_desc(
        topology_name="h200", platform="cuda", target_config=figures, topology=f"1x1x{count}"
    ).devices
    return Devices(tuple(there[:1]), tuple(there), Mesh(np.array(there), (MESH_AXIS,)), 0, 1)


def cases(args: Args) -> Iterator[tuple[str, str, dict[str, Any], int, Callable[[programs.Program, Devices], Any]]]:
    """Name, algorithm, fields, devices, and how to trace it."""
    of_device = lambda trace: lambda program, devices: trace(program, devices.actors[0])
    for recipe in RECIPES:  # the most important first
        for variant in args.variants:
            yield f"{recipe}-{variant}-update", recipe, programs.VARIANTS[variant], 1, programs.trace_update
    for recipe in ACTOR_CRITICS:  # the others have one shard by default
        for variant in args.variants:
            fields = programs.VARIANTS[variant] | BY_DEFAULT
            if "env_id" not in fields:
                yield f"{recipe}-{variant}-default", recipe, fields, 1, programs.trace_update
    for recipe in RECIPES:
        for count in args.devices:
            fields = programs.VARIANTS["resnet"] | SHARDED
            yield f"{recipe}-resnet-8-shards-on-{count}", recipe, fields, count, programs.trace_update
    for trace, part in ((programs.trace_act, "act"), (programs.trace_scan, "scan")):
        for recipe in RECIPES:
            for variant in args.variants:
                yield f"{recipe}-{variant}-{part}", recipe, programs.VARIANTS[variant], 1, of_device(trace)


def table(rows: dict[str, dict[str, Any]], compared: list[dict[str, Any]]) -> str:
    """The results on one page."""
    columns = ("launches", "conditionals", "temporary_gib", "arguments_gib")
    lines = [
        f"| program | {' | '.join(columns).replace('_gib', ', GiB').replace('_', ' ')} | sorts | scatters | library |",
        "|---" * (len(columns) + 4) + "|",
    ]
    times = lambda counts: ", ".join(f"{n:,} x {name}" for name, n in counts.items())
    everything = [name for name, *_ in cases(Args())]
    rows = {name: rows[name] for name in sorted(rows, key=lambda n: everything.index(n) if n in everything else -1)}
    for name, row in rows.items():
        if "refused" not in row:
            library = {target.removeprefix("__"): n for target, n in row["calls"].items()}
            cells = [f"{row[c]:,}" + " and more" * (c == "launches" and row["loops_counted_once"] > 0) for c in columns]
            cells += [times(row["sorts"]), times(row["scatters"]), times(library)]
            lines.append(f"| {name} | {' | '.join(cells)} |")
    lines.append("")
    for row in compared:
        lines.append(
            f"* {' and '.join(row['programs'])}: of {row['branches'][0]} branches {row['the_same']} are the same, "
            f"{row['the_same_but_for_moves']} but for data that is moved otherwise, {len(row['different'])} different"
        )
    refused = [f"{name} ({row['refused']})" for name, row in rows.items() if "refused" in row]
    return "\n".join(lines + [f"* not there: {', '.join(refused)}"] * bool(refused)) + "\n"


def main(args: Args) -> None:
    """Compile, print a table, write the results."""
    make_deterministic()
    os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")  # there are no libraries to check
    jax.config.update("jax_platforms", "cpu,cuda")  # the CPU first: keys and arrays are made there
    before = machine.saved("aot_h200") if args.only else {}
    rows: dict[str, dict[str, Any]] = before.get("programs", {})
    compared = before.get("shards", [])
    commit = machine.commit()
    found: dict[str, dict[str, list[Branch]]] = collections.defaultdict(dict)
    head = ("program", "seconds", "temp GiB", "args GiB", "launches", "conds")
    print("{:28} {:>7} {:>8} {:>8} {:>8} {:>6}  sorts (elements: times), scatters, calls".format(*head))
    for name, recipe, fields, count, trace in cases(args):
        if args.only and not name.startswith(args.only):
            continue
        start = time.perf_counter()
        try:
            program = programs.make(RECIPES[recipe], fields, count, "gpu")
        except UsageError as refused:
            rows[name] = {"refused": str(refused), "commit": commit}
            print(f"{name:28} {refused}", flush=True)
            continue
        set_precision(program.experiment.dtype)
        compiled = trace(program, h200(count)).lower().compile()
        hlo, memory = compiled.as_text(), compiled.memory_analysis()
        row = {
            "commit": commit,
            "seconds_to_compile": round(time.perf_counter() - start, 1),
            "temporary_gib": round(memory.temp_size_in_bytes / 2**30, 3),
            "arguments_gib": round(memory.argument_size_in_bytes / 2**30, 3),
            **summary(hlo),
        }
        rows[name] = row
        if "-shards-on-" in name:
            found[recipe][name] = branches(hlo)
        if args.text:
            args.text.mkdir(parents=True, exist_ok=True)
            (args.text / f"{name}.txt").write_text(hlo)
        print(
            f"{name:28} {row['seconds_to_compile']:7.0f} {row['temporary_gib']:8.2f} {row['arguments_gib']:8.2f} "
            f"{row['launches']:8,} {row['conditionals']:6,}  {row['sorts']}, {row['scatters']}, {row['calls']}",
            flush=True,
        )
        new = [row for of_recipe in found.values() for row in compare(of_recipe)]
        compared = [row for row in compared if row["programs"] not in [r["programs"] for r in new]] + new
        values = {"target": "NVIDIA H200", "flags": os.environ["XLA_FLAGS"], "programs": rows, "shards": compared}
        path = machine.save("aot_h200", values)
        path.with_suffix(".md").write_text(table(rows, compared))
    if any("launches" in row for row in rows.values()):
        print(f"\n{path.with_suffix('.md').read_text()}\nwritten: {path.stem}.json and .md in benchmarks/results")


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
