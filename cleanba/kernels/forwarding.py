"""Handlers of other libraries that read an address from a constant of the program: here it becomes an argument.

EnvPool's handlers know their pool by the attribute "handle", a number that is compiled into the program.  So every new
pool would need the program compiled anew, and every process too.  `forwarded` registers a handler that copies XLA's
call frame, puts what its first argument holds in the attribute's place, and calls EnvPool's.
"""

import ctypes

import llvmlite.binding as llvm
from llvmlite import ir

from cleanba.errors import CannotCompile
from cleanba.kernels.llvm import INT, Code, processor, register, word
from cleanba.kernels.machine import BUFFER, FRAME, SCALAR_VALUE


def forwarded(name: str, capsule: object) -> str:
    """Have XLA call a handler whose only attribute is replaced by the word that its first argument holds.

    capsule: the handler, as `jax.ffi.register_ffi_target` takes it.  One name stands for one handler.
    Returns the name by which `jax.ffi.ffi_call` finds it.  The attribute is given as 0.

    Raises:
        CannotCompile: LLVM or XLA refuses it on this machine.
    """
    target = _address(capsule)
    if FORWARDED.setdefault(name, target) != target:
        raise CannotCompile(f"{name} already stands for another handler")
    register(name, lambda: _compile(target))
    return name


FORWARDED: dict[str, int] = {}  # name -> address of the handler that it stands for


def _address(capsule: object) -> int:
    """Where the function is that a capsule holds."""
    of_python = ctypes.pythonapi
    name_of, pointer_of = of_python.PyCapsule_GetName, of_python.PyCapsule_GetPointer
    name_of.restype, name_of.argtypes = ctypes.c_char_p, [ctypes.py_object]
    pointer_of.restype, pointer_of.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    return int(pointer_of(capsule, name_of(capsule)))


def _compile(target: int) -> llvm.ExecutionEngine:
    """handler(frame): call the target with an attribute that lies where the first argument's data do."""
    module = ir.Module()
    code = Code(module, "handler", INT, ir.PointerType(INT))
    (frame,) = code.function.args
    call = code.inttoptr(word(target), ir.PointerType(ir.FunctionType(INT, [frame.type])))
    attributes = code.load(code.at(frame, FRAME["attributes"] - 3))
    with code.if_then(code.icmp_signed("!=", attributes, word(1))):  # XLA asks for the interface's version
        code.ret(code.call(call, [frame]))
    scalar, pointers, copy = (code.alloca(INT, words) for words in (SCALAR_VALUE + 1, 1, FRAME["future"] + 1))
    old = code.words(code.follow(frame, FRAME["attributes"], 0))
    for i in range(SCALAR_VALUE):
        code.store(code.load(code.at(old, i)), code.at(scalar, i))
    code.store(code.follow(frame, FRAME["arguments"], 0, BUFFER["data"]), code.at(scalar, SCALAR_VALUE))
    code.store(code.ptrtoint(scalar, INT), pointers)
    for i in range(FRAME["future"] + 1):
        code.store(code.load(code.at(frame, i)), code.at(copy, i))
    code.store(code.ptrtoint(pointers, INT), code.at(copy, FRAME["attributes"]))
    error = code.call(call, [copy])
    code.store(code.load(code.at(copy, FRAME["future"])), code.at(frame, FRAME["future"]))
    code.ret(error)
    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(str(module)), processor())
    engine.finalize_object()
    return engine
