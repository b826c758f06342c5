"""Ctrl-C outside of training: while a command starts, and where Python would drop its exception."""

import gc
import os
import signal
import threading
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
    """Whether Python drops an error raised in this frame, as in callbacks of the garbage collector such as JAX's."""
    callbacks = [getattr(callback, "__code__", None) for callback in gc.callbacks]
    while frame is not None:
        if frame.f_code in callbacks:
            return True
        frame = frame.f_back
    return False


def handle_by(handler: Any, instead_of: Any) -> None:
    """Install a handler of SIGINT in place of `instead_of`, if that is installed and this is the main thread."""
    if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGINT) is instead_of:
        signal.signal(signal.SIGINT, handler)


def started() -> None:
    """The start is over: Ctrl-C raises `KeyboardInterrupt` from now on."""
    handle_by(raise_interrupt, leave_at_once)
