"""A run that ends with the sweep that started it: `python -m cleanba.sweeps.child SWEEP WORDS` is `cleanba WORDS`.

SWEEP is the process id of the sweep.  This module imports nothing slow, so a run is unprotected only while Python
itself starts, and the check of the parent covers that.
"""

import ctypes
import os
import runpy
import signal
import sys
import threading
import time

PR_SET_PDEATHSIG = 1  # of Linux's <sys/prctl.h>
LOOK_SECONDS = 0.5


def end_with(parent: int) -> None:
    """Have this process killed as soon as its parent ends, for whatever reason.

    SIGKILL costs a run no more than any other end without a checkpoint.  It cannot be ignored or delayed, so the run's
    directory is free at once.  On Linux the kernel sends it; elsewhere a thread watches the parent.
    """
    try:
        told = ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) == 0
    except (OSError, AttributeError):  # no such function
        told = False
    if os.getppid() != parent:  # it ended before the kernel was told
        os.kill(os.getpid(), signal.SIGKILL)
    if not told:
        threading.Thread(target=watch, args=(parent,), name="parent", daemon=True).start()


def watch(parent: int) -> None:
    """Kill this process once it no longer has this parent."""
    while os.getppid() == parent:
        time.sleep(LOOK_SECONDS)
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    end_with(int(sys.argv[1]))
    sys.argv = ["cleanba", *sys.argv[2:]]
    runpy.run_module("cleanba", run_name="__main__", alter_sys=True)
