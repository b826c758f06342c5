"""Whether a program calls kernels, decided when it is traced.

It does if it is for a CPU, --cpu-kernels is not off, this machine can run kernels (`machine.py`), and the self-test has
passed.  The first two are this module's context: set for the process by `choose`, for a stretch of one thread's tracing
by `compiling_for`, for one function by `compiled_for`.  `in_use` answers for the program being traced.
"""

import functools
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import Literal, NamedTuple, ParamSpec, TypeVar

import jax

from cleanba.errors import CannotCompile, Failure, said, warn_once
from cleanba.kernels.machine import obstacle

Choice = Literal["auto", "on", "off"]
P = ParamSpec("P")
R = TypeVar("R")


class Asked(NamedTuple):
    """What a program is traced for."""

    platform: str | None = None
    """"cpu", "gpu", ...; None: JAX's default"""
    kernels: Choice = "on"
    """--cpu-kernels"""


# A context of JAX's: each thread has its own value, which is part of the key of JAX's caches of traces and programs.
ASKED = jax.make_user_context(Asked())


def compiling_for(platform: str | None = None, choice: Choice | None = None) -> AbstractContextManager[None]:
    """Within this context, this thread traces programs for that platform, of which no device need be present.

    `choice` is --cpu-kernels.  None leaves platform or choice as it is.
    """
    before = ASKED.value
    context: AbstractContextManager[None] = ASKED(Asked(platform or before.platform, choice or before.kernels))
    return context


def choose(choice: Choice) -> None:
    """Set --cpu-kernels for all that this process traces outside `compiling_for`."""
    ASKED.set_global(Asked(kernels=choice))


def chosen() -> Choice:
    """What `choose` has set."""
    choice: Choice = ASKED.get_global().kernels
    return choice


def compiled_for(platform: str, choice: Choice | None, function: Callable[P, R]) -> Callable[P, R]:
    """The same function, traced within `compiling_for` whichever thread traces it.

    If a kernel fails to compile, what is traced from then on uses none, and the function is traced again in plain JAX.

    Raises:
        Failure: a kernel fails to compile in one of several processes, which must all compute alike.
    """

    @functools.wraps(function)
    def traced(*args: P.args, **kwargs: P.kwargs) -> R:
        with compiling_for(platform, choice):
            try:
                return function(*args, **kwargs)
            except CannotCompile as error:
                if jax.process_count() > 1:
                    raise Failure(f"{error}; give all processes of the run --cpu-kernels off") from None
                Trouble.give_up(str(error))
            return function(*args, **kwargs)

    return traced


def in_use() -> bool:
    """Whether the program being traced calls kernels.  If they are wanted but unusable, a warning says so once."""
    asked = ASKED.value
    if asked.kernels == "off" or (asked.platform or jax.default_backend()) != "cpu":
        return False
    if why := Trouble.found():
        # An obstacle is known before JAX starts, in time to fix XLA's number of threads, on which the bits of plain JAX
        # depend.  A kernel that fails its self-test or does not compile is found out too late for that.
        bits = "" if obstacle() else ", so bits depend on the number of threads (--cpu-kernels off fixes it)"
        warn_once(f"the CPU kernels are off because {why}; plain JAX is used instead{bits}")
    return not why


def expected() -> bool:
    """Whether programs for CPUs will call kernels, as far as that is known before JAX starts and the self-test runs."""
    return ASKED.value.kernels != "off" and not obstacle()


class Trouble:
    """Why this process cannot use kernels: looked for once, when the first one is wanted."""

    _lock = threading.Lock()
    _why: str | None = None

    @classmethod
    def found(cls) -> str:
        """The reason, as the second half of a sentence; "" if there is none."""
        with cls._lock:
            if cls._why is None:
                cls._why = obstacle() or _tested()
            return cls._why

    @classmethod
    def give_up(cls, why: str) -> None:
        """What is traced from now on uses no kernel; programs that JAX has already compiled keep theirs."""
        with cls._lock:
            cls._why = why


def _tested() -> str:
    """Run the self-test: why kernels cannot be used, or "" if it passes.

    It has a thread of its own, since this one may be tracing a program.
    """

    def run() -> str:
        from cleanba.kernels import selftest  # imports llvmlite, which may be missing

        return selftest.verdict()

    try:
        with ThreadPoolExecutor(1, "self-test of kernels") as pool:
            return pool.submit(run).result()
    except Exception as error:
        return f"their self-test did not run ({type(error).__name__}: {said(error)})"
