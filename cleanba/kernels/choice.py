"""Whether what is compiled calls kernels: by the kind of device, the user's choice, and what this machine can do."""

import functools
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import Literal, NamedTuple, ParamSpec, TypeVar

import jax

from cleanba.errors import CannotCompile, said, warn_once
from cleanba.kernels.machine import obstacle

Choice = Literal["auto", "off"]
P = ParamSpec("P")
R = TypeVar("R")


class Asked(NamedTuple):
    """What programs are to be compiled with."""

    platform: str | None = None
    """the kind of device that they are for; None: JAX's default"""
    kernels: Choice = "auto"


# JAX's own context: each thread has its value, and JAX does not take what it traced or compiled under another one.
ASKED = jax.make_user_context(Asked())


def compiling_for(platform: str | None = None, choice: Choice | None = None) -> AbstractContextManager[None]:
    """While this lasts, this thread traces programs for devices of that kind, which need not be there.

    `choice` is --cpu-kernels.  None leaves either as it is.
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
    """The same function, always traced as within `compiling_for`, whoever does that, in whatever thread.

    Should a kernel fail to compile, it is traced once more in plain JAX.
    """

    @functools.wraps(function)
    def traced(*args: P.args, **kwargs: P.kwargs) -> R:
        with compiling_for(platform, choice):
            try:
                return function(*args, **kwargs)
            except CannotCompile as error:
                Trouble.give_up(str(error))
            return function(*args, **kwargs)

    return traced


def in_use() -> bool:
    """Whether what is traced now calls kernels.  Where they are wanted but cannot be had, that is said once."""
    asked = ASKED.value
    if asked.kernels == "off" or (asked.platform or jax.default_backend()) != "cpu":
        return False
    if why := Trouble.found():
        # What was not known before JAX had devices came too late for a fixed number of threads.
        bits = "" if obstacle() else ", to bits that depend on the number of threads (--cpu-kernels off fixes it)"
        warn_once(f"the kernels for CPUs are off, as {why}; plain JAX takes their place{bits}")
    return not why


def expected() -> bool:
    """Whether CPUs will have kernels, as far as that can be known before a device is touched."""
    return ASKED.value.kernels == "auto" and not obstacle()


class Trouble:
    """Why this process cannot use kernels, found out when the first one is wanted."""

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
        """From now on no kernel is used."""
        with cls._lock:
            cls._why = why


def _tested() -> str:
    """What the self-test says, in a thread of its own: this one may be in the midst of tracing a program."""

    def run() -> str:
        from cleanba.kernels import selftest  # imports llvmlite, which may be missing

        return selftest.verdict()

    try:
        with ThreadPoolExecutor(1, "self-test of kernels") as pool:
            return pool.submit(run).result()
    except Exception as error:
        return f"their self-test did not run ({type(error).__name__}: {said(error)})"
