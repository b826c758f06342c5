"""Ports for what tests start."""

import os
import random
import socket
from collections.abc import Iterator


def _ports() -> Iterator[int]:
    """Free ports of this host, none twice; each process that shares the tests has ports of its own.

    The kernel gives ports from 32768 on to anybody who asks for a free one.  These are lower, so they stay free.
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
    """An address for a coordinator."""
    return f"127.0.0.1:{free_port()}"
