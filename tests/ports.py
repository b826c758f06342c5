"""Ports for what tests start."""

import os
import random
import socket
from collections.abc import Iterator


def _ports() -> Iterator[int]:
    """Free ports of this host, none twice; of processes that share the tests each has its own.

    The kernel gives those from 32768 on to whoever asks for one.  Below, nobody takes a port before its owner comes.
    """
    worker, workers = (os.environ.get(f"PYTEST_XDIST_WORKER{end}", "") for end in ("", "_COUNT"))
    count = int(workers or "1")
    first = int(worker[2:]) % count if worker.startswith("gw") else 0
    candidates = list(range(20000 + first, 32768, count))
    random.SystemRandom().shuffle(candidates)
    for port in candidates:
        try:
            socket.create_server(("127.0.0.1", port)).close()
        except OSError:
            continue
        yield port


_free = _ports()


def free_port() -> int:
    """A port that is free, and was not given before."""
    return next(_free)


def free_address() -> str:
    """Where a coordinator may listen."""
    return f"127.0.0.1:{free_port()}"
