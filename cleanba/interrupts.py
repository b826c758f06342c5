"""Ctrl-C outside of training: while a command starts, and where Python would drop its exception.  Closed terminals."""

import gc
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


def leave_at_once(signum: int, frame: FrameType | None) -> None:
    """End the process with exit code 130.  This handles SIGINT while a command starts and has nothing to save.

    An exception raised in the middle of an import may be dropped, or crash C++ code that does not expect it.
    """
    os.write(2, b"cleanba: interrupted\n")
    os._exit(128 + signum)


def raise_interrupt(signum: int, frame: FrameType | None) -> None:
    """Raise `KeyboardInterrupt`, as Python's own handler does; but a moment later if it would be lost here."""
    if would_be_lost(frame):
        main = threading.main_thread().ident or 0
        threading.Timer(0.05, signal.pthread_kill, (main, signum)).start()
        return
    raise KeyboardInterrupt


def would_be_lost(frame: FrameType | None) -> bool:
    """Whether Python drops an error raised in this frame, because it is in a callback of the garbage collector."""
    callbacks = [getattr(callback, "__code__", None) for callback in gc.callbacks]  # JAX has one
    while frame is not None:
        if frame.f_code in callbacks:
            return True
        frame = frame.f_back
    return False


@contextmanager
def after_this() -> Iterator[None]:
    """Ctrl-C waits until the end of the context: an import of compiled modules, which an error may not interrupt.

    Nothing changes in threads other than the main one, which no signal interrupts, or if Ctrl-C raises no error anyway.
    """
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGINT) is leave_at_once:
        yield
        return
    heard: list[int] = []
    before = signal.signal(signal.SIGINT, lambda signum, _: heard.append(signum))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before or signal.default_int_handler)  # None: C code's, which cannot be restored
        for signum in heard:
            signal.raise_signal(signum)


def leave_closed_terminal() -> None:
    """Print nowhere from now on what would go to a terminal that is closed, where each print raises an error."""
    for stream in (sys.stdout, sys.stderr):
        try:
            fd = stream.fileno()
        except (OSError, ValueError, AttributeError):  # a notebook's, or closed
            continue
        try:
            os.write(fd, b"")
        except OSError:
            send_nowhere(fd)


def send_nowhere(fd: int) -> None:
    """Drop what is written to a file descriptor from now on."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, fd)
    os.close(nowhere)


def handle_by(handler: Any, instead_of: Any) -> None:
    """Install a handler of SIGINT in place of `instead_of`, if that is installed and this is the main thread."""
    if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGINT) is instead_of:
        signal.signal(signal.SIGINT, handler)


def started() -> None:
    """The start is over: Ctrl-C raises `KeyboardInterrupt` from now on."""
    handle_by(raise_interrupt, leave_at_once)
