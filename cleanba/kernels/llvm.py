"""From loops to machine code: written in LLVM's language, compiled in this process, called by XLA's programs.

XLA compiles for CPUs by LLVM, too; where its code is slow, rewriting the JAX does not help.  Here loops are written
out, down to single vector instructions: `Code` writes them, and `compiled` makes a function of them that
`jax.ffi.ffi_call` finds.

XLA calls a *handler* by C's conventions (xla/ffi/api/c_api.h, which lies in jaxlib).  The handler cuts the work into
*units*, which the calling thread and others of XLA's pool take one by one, as many threads as there are cores.  Which
thread takes a unit changes no bit of it, so no result depends on the number of threads.
"""

import ctypes
import os
import sys
import tempfile
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from functools import cache
from hashlib import sha256
from pathlib import Path
from threading import Lock
from typing import TypeVar

import jax
import jax.numpy as jnp
import llvmlite
import llvmlite.binding as llvm
from llvmlite import ir

from cleanba.errors import CannotCompile, said, warn_once
from cleanba.kernels.machine import API, BUFFER, EXTENSION_KIND, FRAME, MAJOR, METADATA, MINOR, VERSION
from cleanba.limits import usable_cores

INT, HALF, BYTE, FLOAT, NOTHING = ir.IntType(64), ir.IntType(32), ir.IntType(8), ir.FloatType(), ir.VoidType()
POINTER = ir.PointerType(BYTE)
WIDEST = 16  # floats of the longest vectors
# What the threads of one call share, in words: units done, and in all; threads, and those that may still read this; the
# number of items that are cut into units; XLA's future and the function that fulfils it; the addresses of the buffers;
# then for each unit whether a thread has taken it.
STATE = {"done": 0, "units": 1, "threads": 2, "looking": 3, "count": 4, "future": 5, "set_available": 6, "buffers": 7}


# The source of all kernels, read while they are imported: machine code in the cache is valid for one version of it.
SOURCES = "\n".join(path.read_text() for path in sorted(Path(__file__).parent.glob("*.py")))


def word(value: int) -> ir.Constant:
    """An integer."""
    return ir.Constant(INT, value)


def processor() -> llvm.TargetMachine:
    """LLVM's description of this processor.  A new one each time, as every engine owns the one that it is given."""
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    features = llvm.get_host_cpu_features().flatten()
    return llvm.Target.from_default_triple().create_target_machine(llvm.get_host_cpu_name(), features, opt=3)


@cache
def registers() -> tuple[int, int]:
    """How many floats a vector register holds, and how many of these there are: AVX-512, AVX, or NEON's."""
    has = llvm.get_host_cpu_features()
    return (16, 32) if has.get("avx512f") else (8, 16) if has.get("avx") else (4, 32)


def most_across() -> int:
    """The most vectors in a row of a block of sums.  Where there are few registers, more would leave too few rows."""
    return 4 if registers()[1] >= 32 else 2


def most_rows(across: int) -> int:
    """The most rows of a block of sums, if a row has `across` vectors.

    Sums stay in registers, with a row of what is multiplied and the number it is multiplied by.  With one register too
    few, sums go to memory and back at every step, which took two to six times as long.
    """
    return (registers()[1] - 1) // across - 1


def blocks(total: int, most: int) -> list[tuple[int, int, int]]:
    """Near-equal blocks of at most `most`: (size, number of such blocks, start) of each kind."""
    count = -(-total // most)
    small, more = divmod(total, count)
    cut = [(small + 1, more, 0), (small, count - more, more * (small + 1))]
    return [block for block in cut if block[1]]


def widened(features: int) -> int:
    """The next multiple of the longest vector."""
    return -(-features // WIDEST) * WIDEST


def widen(x: jax.Array) -> jax.Array:
    """Zeros after the last dimension, up to a multiple of the longest vector."""
    if x.shape[-1] % WIDEST == 0:
        return x
    return jnp.pad(x, ((0, 0),) * (x.ndim - 1) + ((0, widened(x.shape[-1]) - x.shape[-1]),))


class Code(ir.IRBuilder):
    """A function as it is written: LLVM's instructions, and loops, vectors and indices made of them."""

    def __init__(self, module: ir.Module, name: str, result: ir.Type, *arguments: ir.Type):
        function = ir.Function(module, ir.FunctionType(result, arguments), name)
        super().__init__(function.append_basic_block())
        self.lanes = registers()[0]
        self.vector = ir.VectorType(FLOAT, self.lanes)
        self.zeros = self.all(0.0)
        self.rooms: list[ir.Value] = []

    def repeat(
        self,
        start: int | ir.Value,
        stop: int | ir.Value,
        body: Callable[..., Sequence[ir.Value] | None],
        carried: Sequence[ir.Value] = (),
        step: int = 1,
    ) -> list[ir.Value]:
        """`for i in range(start, stop, step): carried = body(i, *carried)`.  Returns what is carried in the end."""
        start, stop = (word(x) if isinstance(x, int) else x for x in (start, stop))
        before = self.block
        head, inside, after = (self.append_basic_block() for _ in range(3))
        self.branch(head)
        self.position_at_end(head)
        old = [self.phi(x.type) for x in (start, *carried)]
        self.cbranch(self.icmp_signed("<", old[0], stop), inside, after)
        self.position_at_end(inside)
        new = [*(body(*old) or ())]
        new = [self.add(old[0], word(step)), *new]
        for phi, first, then in zip(old, (start, *carried), new, strict=True):
            phi.add_incoming(first, before)
            phi.add_incoming(then, self.block)
        self.branch(head)
        self.position_at_end(after)
        return old[1:]

    def within(self, start: int, count: int, first: ir.Value, last: ir.Value, body: Callable[[ir.Value], None]) -> None:
        """`body(i)` for each i that is in both ranges, [start, start + count) and [first, last)."""
        self.repeat(self.larger(first, word(start)), self.smaller(last, word(start + count)), body)

    def at(self, pointer: ir.Value, *terms: int | ir.Value | tuple[ir.Value, int]) -> ir.Value:
        """The address of an element.  Its index is a sum of numbers, values, and values times numbers."""
        index: ir.Value = word(sum(t for t in terms if isinstance(t, int)))
        for t in terms:
            if not isinstance(t, int):
                index = self.add(index, self.mul(t[0], word(t[1])) if isinstance(t, tuple) else t)
        return self.gep(pointer, [index])

    def get(self, pointer: ir.Value, lanes: int = 0) -> ir.Value:
        """Load a vector as floats.  It has `lanes` lanes; 0: as many as the processor has."""
        kind = ir.VectorType(pointer.type.pointee, lanes or self.lanes)
        value = self.load(self.bitcast(pointer, ir.PointerType(kind)), align=1)
        return value if kind.element == FLOAT else self.uitofp(value, ir.VectorType(FLOAT, kind.count))

    def put(self, value: ir.Value, pointer: ir.Value) -> None:
        """Store a vector."""
        self.store(value, self.bitcast(pointer, ir.PointerType(value.type)), align=4)

    def spread(self, pointer: ir.Value, lanes: int = 0) -> ir.Value:
        """Load one float into all lanes.  There are `lanes` of them; 0: as many as the processor has."""
        lanes = lanes or self.lanes
        undefined = ir.Constant(ir.VectorType(FLOAT, lanes), ir.Undefined)
        one = self.insert_element(undefined, self.load(pointer), ir.Constant(HALF, 0))
        return self.shuffle_vector(one, one, ir.Constant(ir.VectorType(HALF, lanes), [0] * lanes))

    def multiply_add(self, x: ir.Value, y: ir.Value, z: ir.Value) -> ir.Value:
        """The sum x y + z, rounded once."""
        fma = self.of_c(f"llvm.fma.v{self.lanes}f32", self.vector, *[self.vector] * 3)
        return self.call(fma, (x, y, z))

    def all(self, value: float) -> ir.Constant:
        """A vector of one number."""
        return ir.Constant(self.vector, [value] * self.lanes)

    def smaller(self, x: ir.Value, y: ir.Value) -> ir.Value:
        """The smaller of two integers."""
        return self.select(self.icmp_signed("<", x, y), x, y)

    def larger(self, x: ir.Value, y: ir.Value) -> ir.Value:
        """The larger of two integers."""
        return self.select(self.icmp_signed("<", x, y), y, x)

    def fill(self, pointer: ir.Value, count: int, value: float) -> None:
        """Store `count` floats that are all the same."""
        whole, many = count // self.lanes * self.lanes, self.all(value)
        self.repeat(0, whole, lambda i: self.put(many, self.at(pointer, i)), step=self.lanes)
        for i in range(whole, count):
            self.store(ir.Constant(FLOAT, value), self.at(pointer, i))

    def room(self, count: int) -> ir.Value:
        """Memory for floats, from a cache line's start on; on the heap, as threads' stacks are small.  See `leave`."""
        size = -(-4 * count // 64) * 64
        allocate = self.of_c("aligned_alloc", POINTER, INT, INT)
        self.rooms.append(self.call(allocate, [word(64), word(size)]))
        return self.bitcast(self.rooms[-1], ir.PointerType(FLOAT))

    def leave(self) -> None:
        """End a void function: free the memory of `room` and return."""
        for room in self.rooms:
            self.free(room)
        self.ret_void()

    def free(self, pointer: ir.Value) -> None:
        """Free memory."""
        self.call(self.of_c("free", NOTHING, POINTER), [self.bitcast(pointer, POINTER)])

    def of_c(self, name: str, result: ir.Type, *arguments: ir.Type) -> ir.Function:
        """A function of C's library, or of LLVM's own."""
        return self.module.globals.get(name) or ir.Function(self.module, ir.FunctionType(result, arguments), name)

    def words(self, value: ir.Value) -> ir.Value:
        """An integer, or another pointer, as a pointer to words."""
        return (self.inttoptr if value.type == INT else self.bitcast)(value, ir.PointerType(INT))

    def follow(self, pointer: ir.Value, *fields: int) -> ir.Value:
        """The word that words point to: pointer[field][field] ..."""
        value = self.load(self.at(pointer, fields[0]))
        return value if len(fields) == 1 else self.follow(self.words(value), *fields[1:])

    def ask(self, function: ir.Value, *fields: ir.Value) -> tuple[ir.Value, ir.Value]:
        """Call a function of XLA's that takes one structure.  Returns the error's address, or 0, and the structure."""
        structure = self.alloca(INT, 2 + len(fields))
        for i, value in enumerate((word(8 * (2 + len(fields))), word(0), *fields)):
            self.store(value, self.at(structure, i))
        kind = ir.PointerType(ir.FunctionType(INT, [structure.type]))
        return self.call(self.inttoptr(function, kind), [structure]), structure


S = TypeVar("S", bound=Hashable)
Unit = Callable[[Code, S, list[ir.Value], ir.Value, ir.Value, ir.Value], None]
KEPT: dict[str, llvm.ExecutionEngine] = {}  # what is compiled, for as long as the process lives
ONE_AT_A_TIME = Lock()


def compiled(unit: Unit[S], shape: S, kinds: Sequence[ir.Type], results: int, units: int = 0, count: int = 0) -> str:
    """Compile a function for XLA's programs on CPUs.  Returns the name by which `jax.ffi.ffi_call` finds it.

    unit: writes what is to be done for a part of the work: `unit(code, shape, pointers, number, first, last)`, where
        `number` is the unit's; from `first` to before `last` is its part of `count`.
    shape: all that the code depends on.
    kinds: what the pointers point to: of arguments, then of results.
    results: how many of them are results.
    units: how many there are at most; 0 means as many as the first dimension of the first result.
    count: what is cut into units; 0 means the first dimension of the first argument, a batch's.

    Raises:
        CannotCompile: LLVM or XLA refuses it on this machine.
    """
    name = name_of(unit, shape)
    register(name, lambda: _compile(unit, shape, kinds, results, units, count))
    return name


def register(name: str, compile_: Callable[[], llvm.ExecutionEngine]) -> None:
    """Have XLA's programs find a compiled `handler` by this name, unless they do already.

    Raises:
        CannotCompile: LLVM or XLA refuses it on this machine.
    """
    with ONE_AT_A_TIME:
        if name not in KEPT:
            try:
                engine = compile_()
                address = ctypes.CFUNCTYPE(ctypes.c_void_p)(engine.get_function_address("handler"))
                jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(address), platform="cpu")
            except Exception as error:  # of LLVM's, of XLA's: whatever it is, plain JAX does without
                raise CannotCompile(f"{name} cannot be compiled ({type(error).__name__}: {said(error)})") from error
            KEPT[name] = engine


def name_of(unit: Unit[S], shape: S) -> str:
    """A function's name in XLA's programs, and in profiles of them."""
    return f"cleanba_{unit.__name__}_{shape}"


def _compile(
    unit: Unit[S], shape: S, kinds: Sequence[ir.Type], results: int, units: int, count: int = 0
) -> llvm.ExecutionEngine:
    """The function in this process's memory.  Its machine code is kept where JAX keeps what it compiled."""
    told: list[object] = [unit.__name__, repr(shape), [str(kind) for kind in kinds], results, units, count]
    told += [registers(), usable_cores()]
    machine = processor()
    told += [machine.triple, llvm.get_host_cpu_name(), llvm.get_host_cpu_features().flatten(), llvmlite.__version__]
    told += [SOURCES]
    path = kept_at("\n".join(map(str, told)), ".o")
    code = read_kept(path)
    if not code:
        module = ir.Module()
        task = _write_task(module, _write_unit(module, unit, shape, kinds), len(kinds))
        _write_handler(module, task, len(kinds), results, units, count)
        optimised = llvm.parse_assembly(str(module))
        options = llvm.create_pipeline_tuning_options(speed_level=2)
        # The loops are unrolled and vectorised as written; LLVM must not change that.
        options.loop_unrolling = options.loop_vectorization = options.slp_vectorization = False
        passes = llvm.create_pass_builder(machine, options)
        passes.getModulePassManager().run(optimised, passes)
        code = machine.emit_object(optimised)
        keep(path, code)
    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), processor())
    engine.add_object_file(llvm.ObjectFileRef.from_data(code))
    engine.finalize_object()
    return engine


def kept_at(all_that_it_depends_on: str, ending: str) -> Path | None:
    """The file for what depends on this text, in JAX's folder of compiled programs; None if JAX keeps none."""
    chosen = jax.config.values
    folder = chosen["jax_compilation_cache_dir"] if chosen["jax_enable_compilation_cache"] else None
    if folder and "://" in folder:  # a bucket, which JAX can write to
        return None
    return Path(folder) / f"cleanba-{sha256(all_that_it_depends_on.encode()).hexdigest()}{ending}" if folder else None


def read_kept(path: Path | None) -> bytes:
    """What `keep` wrote; empty if there is no such file, or its checksum does not match."""
    with suppress(OSError):
        if path is not None:
            content = path.read_bytes()
            if sha256(content[32:]).digest() == content[:32]:
                return content[32:]
    return b""


def keep(path: Path | None, content: bytes) -> None:
    """Write a file with its checksum in front.  Where that fails, as on a full disk, say so once and go on without."""
    if path is None:
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)  # JAX makes it later
        # Other processes, even on other machines, may be writing the same file.
        handle, scratch = tempfile.mkstemp(dir=path.parent)
        try:
            with open(handle, "wb") as file:
                file.write(sha256(content).digest() + content)
            os.replace(scratch, path)
        except OSError:
            Path(scratch).unlink(missing_ok=True)
            raise
    except OSError as error:
        warn_once(
            f"compiled kernels cannot be kept in {path.parent} ({error.strerror}), so every start compiles them again; "
            "set JAX_COMPILATION_CACHE_DIR to another folder"
        )


def _write_unit(module: ir.Module, unit: Unit[S], shape: S, kinds: Sequence[ir.Type]) -> ir.Function:
    """unit(state, number): what `unit` writes, for its part of the work."""
    code = Code(module, "unit", NOTHING, ir.PointerType(INT), INT)
    state, number = code.function.args
    count, units = (code.follow(state, STATE[x]) for x in ("count", "units"))
    addresses = [code.follow(state, STATE["buffers"] + i) for i in range(len(kinds))]
    pointers = [code.inttoptr(a, ir.PointerType(k)) for a, k in zip(addresses, kinds, strict=True)]
    first, last = (code.sdiv(code.mul(count, n), units) for n in (number, code.add(number, word(1))))
    unit(code, shape, pointers, number, first, last)
    code.leave()
    return code.function


def _write_task(module: ir.Module, unit: ir.Function, buffers: int) -> ir.Function:
    """task(state): do units until none is left.

    The thread that ends the last unit fulfils XLA's future; the last thread to leave frees the state.  Each core begins
    at a unit of its own, so that from call to call it has the same part of a batch in its cache.
    """
    code = Code(module, "task", NOTHING, ir.PointerType(INT))
    (state,) = code.function.args
    count_up = lambda field, by=1: code.atomic_rmw("add", code.at(state, STATE[field]), word(by), "acq_rel")
    units, threads, future = (code.follow(state, STATE[x]) for x in ("units", "threads", "future"))
    core = code.zext(code.call(code.of_c("sched_getcpu", HALF), []), INT) if sys.platform == "linux" else word(0)
    start = code.sdiv(code.mul(code.srem(core, threads), units), threads)

    def look(i: ir.Value) -> None:
        number = code.srem(code.add(start, i), units)
        flag = code.at(state, number, STATE["buffers"] + buffers)
        free = code.icmp_signed("==", code.atomic_rmw("xchg", flag, word(1), "acq_rel"), word(0))
        with code.if_then(free):
            code.call(unit, [state, number])
            is_last = code.icmp_signed("==", count_up("done"), code.sub(units, word(1)))
            with code.if_then(code.and_(is_last, code.icmp_signed("!=", future, word(0)))):
                code.ask(code.follow(state, STATE["set_available"]), future)

    code.repeat(0, units, look)
    last = code.icmp_signed("==", count_up("looking", -1), word(1))
    with code.if_then(last):
        code.free(state)
    code.ret_void()
    return code.function


def _write_handler(
    module: ir.Module, task: ir.Function, buffers: int, results: int, most: int, all_in_all: int
) -> None:
    """handler(frame): if XLA asks, say for which version of its interface this is written; else do the work."""
    code = Code(module, "handler", INT, ir.PointerType(INT))
    (frame,) = code.function.args
    extension = code.follow(frame, FRAME["extension"])
    with code.if_then(code.icmp_signed("!=", extension, word(0))):
        extension, halves = code.words(extension), ir.PointerType(HALF)
        kind = code.load(code.at(code.bitcast(extension, halves), EXTENSION_KIND))
        with code.if_then(code.icmp_signed("==", kind, ir.Constant(HALF, 1))):
            metadata = code.bitcast(code.words(code.follow(extension, METADATA)), halves)
            for place, number in zip((MAJOR, MINOR), VERSION, strict=True):
                code.store(ir.Constant(HALF, number), code.at(metadata, place))
            code.ret(word(0))

    count = word(all_in_all) if all_in_all else code.follow(frame, FRAME["arguments"], 0, BUFFER["dims"], 0)
    units = code.smaller(count, word(most)) if most else code.follow(frame, FRAME["results"], 0, BUFFER["dims"], 0)
    flags = STATE["buffers"] + buffers
    state = code.words(code.call(code.of_c("malloc", POINTER, INT), [code.mul(code.add(units, word(flags)), word(8))]))
    share = lambda field, value, more=0: code.store(value, code.at(state, STATE[field] + more))
    inputs = buffers - results
    for i in range(buffers):
        where = (FRAME["arguments"], i) if i < inputs else (FRAME["results"], i - inputs)
        share("buffers", code.follow(frame, *where, BUFFER["data"]), i)
    api, threads = code.words(code.follow(frame, FRAME["api"])), code.smaller(units, word(usable_cores()))
    share("set_available", code.follow(api, API["set_available"]))
    for field, value in {"units": units, "count": count, "threads": threads, "looking": threads}.items():
        share(field, value)
    for field in ("done", "future"):
        share(field, word(0))

    def clear(i: ir.Value) -> None:
        code.store(word(0), code.at(state, i, flags))

    code.repeat(0, units, clear)

    with code.if_then(code.icmp_signed(">", threads, word(1))):
        error, created = code.ask(code.follow(api, API["create_future"]), word(0))
        with code.if_then(code.icmp_signed("!=", error, word(0))):
            code.free(state)
            code.ret(error)
        future = code.follow(created, 2)
        code.store(future, code.at(frame, FRAME["future"]))
        share("future", future)
        context, schedule = code.follow(frame, FRAME["context"]), code.follow(api, API["schedule"])
        job = code.ptrtoint(task, INT), code.ptrtoint(state, INT)

        def helper(_: ir.Value) -> None:
            error, _ = code.ask(schedule, context, *job)
            with code.if_then(code.icmp_signed("!=", error, word(0))):  # no thread will come
                code.call(task, [state])

        code.repeat(1, threads, helper)
    code.call(task, [state])
    code.ret(word(0))
