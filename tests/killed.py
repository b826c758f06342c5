"""`cleanba WORDS` in a process that kills itself, as `kill -9` would, at a chosen moment.

    python killed.py MOMENT N WORDS

It dies when it reaches MOMENT for the N-th time; see `MOMENTS`.
"""

import os
import signal
import sys
import time
from typing import Any

import remembering

from cleanba import cli, launch
from cleanba.runtime import memory
from cleanba.runtime.checkpoint import Checkpoints
from cleanba.runtime.collect import ScannedCollector, SteppedCollector
from cleanba.runtime.learner import Learner

SECONDS = 2.0  # that it sleeps before dying, in which processes that should wait for it may go on by mistake

# Where it dies, and whether once that is done or just before.
MOMENTS: dict[str, tuple[tuple[Any, ...], str, bool]] = {
    "start": ((launch,), "open_run", True),
    "restore": ((Checkpoints,), "restore", True),
    "compile": ((Learner,), "compile", False),
    "collect": ((SteppedCollector, ScannedCollector), "__call__", True),
    "update": ((Learner,), "update", True),  # the device is still busy with it
    "save": ((Checkpoints,), "save", True),  # the files are being written
    "pack": ((memory.Pack,), "add", True),  # a part of what is new in a shard's memory has been written
    "memory": ((memory,), "write", False),  # all that is new in this process's memory has been, but no list of it
    "listing": ((memory,), "write_whole", False),  # the same, for one shard after another
    "prune": ((memory,), "prune", True),  # old files have just been removed
}


def main(moment: str, n: str, *words: str) -> None:
    owners, name, done = MOMENTS[moment]
    calls = 0

    def plant(owner: Any) -> None:
        original = getattr(owner, name)

        def deadly(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            calls += 1
            mine = calls == int(n)
            if mine and not done:
                time.sleep(SECONDS)
                os.kill(os.getpid(), signal.SIGKILL)
            result = original(*args, **kwargs)
            if mine:
                os.kill(os.getpid(), signal.SIGKILL)
            return result

        setattr(owner, name, deadly)

    for owner in owners:
        plant(owner)
    if "--buffer-size" in words:
        remembering.install()
    cli.main(words)


if __name__ == "__main__":
    main(*sys.argv[1:])
