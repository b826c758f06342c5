"""A text that identifies a function or class of the running program by its code, for `gymnasium.register`."""

import dis
import functools
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from enum import Enum
from hashlib import sha256
from importlib.util import find_spec
from types import CodeType, FunctionType, MethodType
from typing import Any

import gymnasium
import jax
import numpy as np

ADDRESS = r" at 0x[0-9a-fA-F]+"  # an object's address, which differs from start to start


class Seen:
    """Numbers the functions, classes and objects that a text has described, so that it describes each once."""

    def __init__(self, earlier: Sequence[Any] = ()):
        self._objects = [*earlier]  # kept, so that no other object gets the same id

    def number_of(self, x: Any) -> str:
        """Which one it is, if it has been described; else "", and it is noted."""
        for number, other in enumerate(self._objects):
            if other is x:
                return f"number {number}"
        self._objects.append(x)
        return ""

    def copy(self) -> "Seen":
        """The same, for one of several members that have no order."""
        return Seen(self._objects)


CONTAINERS = (tuple, list, set, frozenset, dict)


def _members(x: Any, of: Callable[..., str], seen: Seen) -> str:
    """The text of a container, by that `of` each member."""
    if isinstance(x, dict):
        return f"({', '.join(map(of, x.items()))})"
    # A set has no order, so no member's text may depend on another's.
    texts = sorted(of(y, seen=seen.copy()) for y in x) if isinstance(x, set | frozenset) else map(of, x)
    return f"{type(x).__name__}({', '.join(texts)})"


def argument_text(value: Any, within: tuple[int, ...] = (), seen: Seen | None = None) -> str:
    """A text that tells the arguments of two makers apart, functions by their code, and is the same at each start.

    within: ids of the objects that hold this one.
    """
    if id(value) in within:
        return "itself"
    seen = seen or Seen()
    of = functools.partial(argument_text, within=(*within, id(value)), seen=seen)
    many = lambda values: f"({', '.join(map(of, values))})"
    if isinstance(value, CONTAINERS):
        return _members(value, of, seen)
    if isinstance(value, jax.Array) and jax.numpy.issubdtype(value.dtype, jax.dtypes.prng_key):
        value = jax.random.key_data(value)
    if isinstance(value, np.ndarray | jax.Array) and value.dtype != object:
        return f"{value.dtype}{value.shape}{sha256(np.asarray(value).tobytes()).hexdigest()}"
    if isinstance(value, FunctionType | MethodType | type):
        return code_text(value, seen)
    if isinstance(value, functools.partial):
        return many([value.func, value.args, value.keywords])
    try:
        text = repr(value)
    except Exception:
        text = f"<{type(value).__qualname__} at 0x0>"
    if not re.search(ADDRESS, text):
        return text
    # An object whose `repr` does not show what it holds.
    if again := seen.number_of(value):
        return again
    slots = {name: getattr(value, name, None) for name in getattr(type(value), "__slots__", ())}
    return re.sub(ADDRESS, "", text) + of(getattr(value, "__dict__", slots))


def code_text(x: Any, seen: Seen | None = None) -> str:
    """A text that tells functions and classes of the running program apart by their code and the constants it reads.

    It leaves out what the code itself changes, and is the same at each start of the same version of Python.
    """
    seen = seen or Seen()
    of = functools.partial(code_text, seen=seen)
    many = lambda values: f"({', '.join(map(of, values))})"
    if isinstance(x, CodeType):
        # The body of a class within a function holds the number of its line, since Python 3.13.
        line = x.co_firstlineno if "__firstlineno__" in x.co_names else None
        return f"{x.co_code.hex()}{x.co_names}{many(y for y in x.co_consts if type(y) is not int or y != line)}"
    if isinstance(x, CONTAINERS):
        return _members(x, of, seen)
    if isinstance(x, MethodType):
        return many([x.__func__, x.__self__])
    if isinstance(x, staticmethod | classmethod):
        return type(x).__name__ + of(x.__func__)
    if isinstance(x, property):
        return many([x.fget, x.fset, x.fdel])
    if isinstance(x, functools.partial):
        return of(x.func) + argument_text((x.args, x.keywords), seen=seen)
    if isinstance(x, FunctionType):
        if again := seen.number_of(x):
            return again
        return f"{x.__qualname__}{many([x.__code__, x.__defaults__, x.__kwdefaults__, *_variables_read_by(x)])}"
    if isinstance(x, type):
        if again := seen.number_of(x):
            return again
        if is_importable(x):
            return repr(x)
        return f"{x.__qualname__}{many([*_attributes(vars(x), vars(x).values()), *x.__bases__])}"
    if isinstance(x, np.ndarray):
        return argument_text(x)
    if isinstance(x, CONSTANTS):
        return repr(x)
    methods = [method for name, method in vars(type(x)).items() if name != "__init__"]
    return seen.number_of(x) or of(type(x)) + many(_attributes(getattr(x, "__dict__", {}), methods))


# Attributes of classes that say nothing about what they do, or change with their place in the file.
IGNORED_ATTRIBUTES = {
    "__dict__",
    "__weakref__",
    "__doc__",
    "__module__",
    "__firstlineno__",
    "__static_attributes__",
    "_abc_impl",
}


def _attributes(held: Mapping[str, Any], methods: Iterable[Any]) -> list[tuple[str, Any]]:
    """The attributes that say what an object does, except those that these methods change."""
    changed = {name for method in methods for name in _names(method, "STORE_ATTR", "DELETE_ATTR")}
    return [
        (name, x) for name, x in sorted(held.items()) if name not in IGNORED_ATTRIBUTES | changed and _counts_as_code(x)
    ]


def _variables_read_by(function: FunctionType) -> list[tuple[str, Any]]:
    """The variables around a function that it, or a function within it, reads and does not change."""
    changed = _names(function, "STORE_GLOBAL", "DELETE_GLOBAL", "STORE_DEREF")
    around = {name: function.__globals__.get(name) for name in _names(function, "LOAD_GLOBAL", "LOAD_NAME")}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with suppress(ValueError):  # it has no value yet
            around[name] = cell.cell_contents
    return [(name, x) for name, x in sorted(around.items()) if name not in changed and _counts_as_code(x)]


def _names(x: Any, *operations: str) -> set[str]:
    """The names on which the code of a function or method, and of functions within it, does this."""
    x = x.__func__ if isinstance(x, staticmethod | classmethod) else x.fget if isinstance(x, property) else x
    code = x if isinstance(x, CodeType) else getattr(x, "__code__", None)
    if not isinstance(code, CodeType):
        return set()
    found = {step.argval for step in dis.get_instructions(code) if step.opname in operations}
    return found.union(*(_names(inner, *operations) for inner in code.co_consts if isinstance(inner, CodeType)))


CONSTANTS = (int, float, complex, str, bytes, type(None), range, Enum, np.generic, gymnasium.Space)
MOST_MEMBERS = 10_000  # members of a container
DEPTH = 5  # of containers within containers


def _counts_as_code(x: Any, depth: int = DEPTH) -> bool:
    """Whether a value is a part of a program's code: a constant, or a function or class that no module holds."""
    if isinstance(x, FunctionType | type):
        return not is_importable(x)
    if isinstance(x, CONTAINERS):
        members = [y for pair in x.items() for y in pair] if isinstance(x, dict) else x
        return len(members) <= MOST_MEMBERS and depth > 0 and all(_counts_as_code(y, depth - 1) for y in members)
    if isinstance(x, np.ndarray):
        return x.dtype != object
    return isinstance(x, (*CONSTANTS, staticmethod, classmethod, property, MethodType, functools.partial))


def is_importable(x: Any) -> bool:
    """Whether a function or class is an attribute of a module that another process could import."""
    module = getattr(x, "__module__", None)
    return is_module(module) and getattr(sys.modules.get(str(module)), name_of(x), None) is x


def name_of(maker: Any) -> str:
    """The name of a function or class, or that of an object's class."""
    return str(getattr(maker, "__name__", type(maker).__name__))


RUNNING = ("__main__", "__mp_main__")  # the running program, and what a process that it has spawned calls that


def is_module(name: str | None) -> bool:
    """Whether another process could import a module of that name."""
    try:
        return name is not None and name not in RUNNING and find_spec(name) is not None
    except (ValueError, ImportError):  # the module was created by code, not imported
        return False
