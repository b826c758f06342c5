"""Ports for what tests start."""

import random
import socket
from collections.abc import Iterator


def _ports() -> Iterator[int]:
    """Free ports of this host, none twice.

    The kernel gives those from 32768 on to whoever asks for one.  Below, nobody takes a port before its owner comes.
    """
    candidates = list(range(20000, 32768))
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
