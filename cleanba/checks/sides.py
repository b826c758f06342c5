"""One side of `cleanba bisect`: a process that computes a run's updates again, and stops after each for questions.

    python -m cleanba.checks.sides FILE_DESCRIPTOR PARENT

The two sides may need different devices, XLA flags and packages, so each runs in a separate process.  They
talk through a socket: after each update the side sends its fingerprints, then answers questions about it, until it is
told to go on.
"""

import os
import socket
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from cleanba.config import Placement
from cleanba.errors import Failure, UsageError, said, signal_name
from cleanba.runtime.process_setup import memory_share
from cleanba.runtime.watched import Event, Events, Fingerprints, Named
from cleanba.waited import compiling

GO_ON = "go on"


class Request(NamedTuple):
    """What a side computes."""

    run_dir: Path
    placement: Placement
    first: int
    """the update whose checkpoint it begins from; 0: the beginning"""
    last: int
    trust_remote_code: bool = False
    stall_timeout: float | None = None
    """seconds that an update may take; None: see `recompute.open_rerun`"""


class RemoteSide:
    """A side in a process of its own; between updates it answers what `parting.Side` asks."""

    def __init__(self, name: str, request: Request, variables: Mapping[str, str], log: Path):
        """Start the process, with these environment variables besides our own.  What it prints goes to `log`."""
        self.name, self._log = name, log
        ours, theirs = socket.socketpair()
        given = {**os.environ, **variables}
        command = [sys.executable, "-m", "cleanba.checks.sides", str(theirs.fileno()), str(os.getpid())]
        with log.open("w") as file, theirs:
            self._process = subprocess.Popen(
                command,
                env={**given, **memory_share(2, given)},
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
            )
        self._connection = Connection(ours.detach())
        self._connection.send(request)

    def go_on(self) -> None:
        """Let it compute the next update."""
        self._send(GO_ON)

    def next(self) -> tuple[int, Fingerprints]:
        """Wait for the next update: its number and fingerprints.

        Raises:
            UsageError: it cannot be computed as asked.
            Failure: it failed.
        """
        number, fingerprints = self._receive()
        return number, fingerprints

    def close(self) -> None:
        """End the process."""
        self._connection.close()
        self._process.kill()
        self._process.wait()

    def _send(self, what: object) -> None:
        try:
            self._connection.send(what)
        except OSError as error:
            raise self._lost() from error

    def _receive(self) -> Any:
        try:
            kind, content = self._connection.recv()
        except (EOFError, OSError) as error:
            raise self._lost() from error
        if kind == "refused":
            raise UsageError(f"{self.name}: {content}")
        if kind == "failed":
            raise Failure(f"{self.name} failed: {content}")
        return content

    def _lost(self) -> Failure:
        code = self._process.wait()
        how = f"by {signal_name(-code)}" if code < 0 else f"with exit code {code}"
        lines = [line for line in self._log.read_text(errors="replace").splitlines() if line.strip()]
        return Failure(f"{self.name} ended {how}" + (f": {lines[-1]}" if lines else ""))

    def _ask(self, method: str, *args: object) -> Any:
        self._send((method, args))
        return self._receive()

    def fingerprints(self) -> Fingerprints:
        return self._ask("fingerprints")

    def rollout(self) -> Named:
        return self._ask("rollout")

    def acted_with(self) -> list[Named]:
        return self._ask("acted_with")

    def state(self, after: bool) -> Named:
        return self._ask("state", after)

    def memory_paths(self) -> list[str]:
        return self._ask("memory_paths")

    def memory_rows(self, path: str, shard: int, after: bool) -> np.ndarray:
        return self._ask("memory_rows", path, shard, after)

    def memory_row(self, path: str, shard: int, after: bool, row: int) -> np.ndarray:
        return self._ask("memory_row", path, shard, after, row)

    def events(self, skip: int = 0) -> Events:
        return self._ask("events", skip)

    def event_values(self, event: Event, device: int = 0) -> Named:
        return self._ask("event_values", event, device)

    def recomputed_fingerprints(self) -> tuple[np.ndarray, np.ndarray]:
        return self._ask("recomputed_fingerprints")


def serve(connection: Connection) -> None:
    """Compute what the request asks for, and answer questions after each update."""
    from cleanba.checks.recompute import open_rerun, recompute  # JAX reads the environment when it is imported
    from cleanba.runtime.watched import WatchedUpdate

    request: Request = connection.recv()

    def watch(update: WatchedUpdate[Any, Any, Any, Any]) -> None:
        with compiling():  # for the time limit on an update: questions may take any time, and so may the other side
            connection.send(("update", (update.number, update.fingerprints())))
            while (question := connection.recv()) != GO_ON:
                method, args = question
                connection.send(("answer", getattr(update, method)(*args)))

    try:
        trusted, limit = request.trust_remote_code, request.stall_timeout
        with open_rerun(request.run_dir, request.placement, trusted, limit) as rerun:
            rerun = rerun._replace(training=replace(rerun.training, watch=watch))
            recompute(rerun, request.first, request.last, display=False)
    except UsageError as error:
        connection.send(("refused", str(error)))
    except Exception as error:
        kind = "" if isinstance(error, Failure) else f"{type(error).__name__}: "
        connection.send(("failed", kind + said(error)))
        raise


if __name__ == "__main__":
    from cleanba.sweeps.child import end_with

    end_with(int(sys.argv[2]))
    try:
        serve(Connection(int(sys.argv[1])))
    except (EOFError, BrokenPipeError):  # the other end has seen enough
        os._exit(0)
    sys.stdout.flush()
    os._exit(0)
