"""A run that ends with the sweep that started it: `python -m cleanba.sweeps.child SWEEP WORDS` is `cleanba WORDS`.

SWEEP is the process id of the sweep.  Nothing is imported here that takes long, so a run is unprotected only for the
blink that Python itself takes to start, and the check of the parent covers that.
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
    """Have this process killed as soon as its parent has ended, however that ended.

    Being killed costs a run no more than any other end without a checkpoint, and it cannot be ignored or delayed, so
    that the run's directory is free at once.  The kernel does it on Linux; elsewhere a thread looks for the parent.
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
    """End this process once its parent is another one."""
    while os.getppid() == parent:
        time.sleep(LOOK_SECONDS)
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    end_with(int(sys.argv[1]))
    sys.argv = ["cleanba", *sys.argv[2:]]
    runpy.run_module("cleanba", run_name="__main__", alter_sys=True)
