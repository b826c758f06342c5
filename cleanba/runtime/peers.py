"""Every process of a distributed run learns within seconds that another one has failed, died or stopped, and which.

When a peer is gone, collectives wait for ever, or fail with messages about sockets.  So process 0 holds a TCP
connection to each of the others, and every process sends a message each second.  A connection that closes without a
goodbye means that the process died; silence means that its host did, or that it was stopped.  Process 0 tells the rest.
"""

import contextlib
import json
import os
import secrets
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from cleanba.errors import Failure, Interrupted, NotFinite, UsageError, exit_code
from cleanba.files import Json
from cleanba.waited import Waited

PING_SECONDS = 1.0
JOIN_SECONDS = 30.0  # to connect at the start
GREETING_SECONDS = 5.0  # for a new connection to identify itself
LOOK_SECONDS = 0.2  # between looks at a milestone
LEAVE_SECONDS = 10.0  # how long process 0 waits for the others to end after a failure
KINDS = {"usage": UsageError, "not finite": NotFinite}  # errors that another process raises as what they are
KEY = "cleanba/peers"  # of process 0's port in JAX's key-value store


class Peers:
    """The other processes of this run.  A context manager: on leaving, others get a goodbye or the exception."""

    def __init__(self, timeout: float) -> None:
        """All processes must call this, after `jax.distributed.initialize` and before anything collective.

        `timeout` is in seconds: a process that is silent for longer is taken for dead.
        `on_lost` is called once, in another thread, after the loss has been printed; until it is set, the process
        ends at once.

        Raises:
            Failure: the processes cannot reach each other.
        """
        self.on_lost: Callable[[BaseException], None] = self._leave
        self.error: BaseException | None = None
        self._timeout = timeout
        self._me, self._count = _state().process_id, _state().num_processes
        self._lock = threading.Lock()
        self._lost = threading.Event()
        self._over = threading.Event()
        self._links: dict[int, socket.socket] = {}
        self._polite: set[int] = set()  # those that said goodbye
        self._listeners: dict[int, threading.Thread] = {}
        if self._count > 1:
            threading.Thread(target=self._ping, name="ping", daemon=True).start()
            self._connect()
            for peer in self._links:
                listener = threading.Thread(target=self._listen, args=(peer,), name=f"process {peer}", daemon=True)
                self._listeners[peer] = listener
                listener.start()

    def _connect(self) -> None:
        if self._me != 0:
            host = _state().coordinator_address.rsplit(":", 1)[0].strip("[]")  # process 0 runs there
            port = "unknown"
            try:
                port, token = _state().client.blocking_key_value_get(KEY, int(1000 * JOIN_SECONDS)).split()
                link = socket.create_connection((host, int(port)), timeout=JOIN_SECONDS)
                link.sendall(f"{token} {self._me}\n".encode())
            except (OSError, RuntimeError) as error:
                raise Failure(f"process {self._me} cannot reach process 0 on {host}, port {port}: {error}") from None
            with self._lock:
                self._links[0] = link
            return
        token = secrets.token_hex(16)
        both = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if both else socket.AF_INET
        with socket.create_server(("", 0), family=family, backlog=self._count, dualstack_ipv6=both) as server:
            port = server.getsockname()[1]
            _state().client.key_value_set(KEY, f"{port} {token}")
            server.settimeout(JOIN_SECONDS)
            while len(self._links) < self._count - 1:
                try:
                    link, _ = server.accept()
                except OSError:
                    missing = [str(i) for i in range(1, self._count) if i not in self._links]
                    raise Failure(
                        f"process {', '.join(missing)} did not connect to process 0 on port {port}; "
                        "check for a firewall between the hosts"
                    ) from None
                words: list[str] = []
                link.settimeout(GREETING_SECONDS)
                with contextlib.suppress(OSError, ValueError):  # without a buffer, which would take later messages, too
                    words = link.makefile("rb", buffering=0).readline(200).decode().split()
                if len(words) == 2 and words[0] == token:
                    with self._lock:
                        self._links[int(words[1])] = link
                else:
                    link.close()  # a stranger

    def _ping(self) -> None:
        while not self._over.wait(PING_SECONDS):
            self._say({"ping": True})

    def _say(self, message: Json, but: int | None = None) -> None:
        line = (json.dumps(message) + "\n").encode()
        with self._lock:
            for peer, link in self._links.items():
                if peer != but:
                    with contextlib.suppress(OSError):  # the thread that listens to it will notice
                        link.sendall(line)

    def _messages(self, peer: int) -> Iterator[Json]:
        """What a peer says, until its connection closes.

        Raises:
            TimeoutError: it has said nothing for too long, while this process itself was running.
        """
        link, waited, begun = self._links[peer], Waited(), b""
        link.settimeout(PING_SECONDS)
        while True:
            try:
                received = link.recv(1 << 16)
            except TimeoutError:
                if waited.look() > self._timeout:
                    raise
                continue
            if not received:
                return
            *lines, begun = (begun + received).split(b"\n")
            waited = Waited()
            yield from map(json.loads, lines)

    def _listen(self, peer: int) -> None:
        try:
            for message in self._messages(peer):
                if message.get("bye"):
                    self._polite.add(peer)
                if "lost" in message:
                    self._lose(message, peer)
            why = "died"
        except TimeoutError:
            why = f"said nothing for {self._timeout:g} s: it was stopped, or its host is gone"
        except (OSError, ValueError):
            why = "died"
        if peer not in self._polite:
            self._lose({"lost": peer, "why": why}, peer)

    def _lose(self, message: Json, heard_from: int) -> None:
        """Note the loss of a process.  Only the first counts; later ones are its consequences."""
        with self._lock:
            if self._lost.is_set() or self._over.is_set():
                return
            words = f"process {message['lost']} of {self._count} {message['why']}"
            signum = message.get("signal")
            error_type = KINDS.get(message.get("kind", ""), Failure)
            self.error = Interrupted(signum, f" in process {message['lost']}") if signum else error_type(words)
            self._lost.set()
        # Print it now: when process 0 dies, JAX ends the others within a moment, without naming it.
        print(f"cleanba: {self.error}", file=sys.stderr, flush=True)
        self._say(message, but=heard_from)
        self.on_lost(self.error)

    def tell(self, error: BaseException) -> None:
        """Tell the others that this process ends, and why.  Does nothing once a loss is known."""
        with self._lock:
            if self._lost.is_set() or self._over.is_set():
                return
            self._lost.set()
        if isinstance(error, KeyboardInterrupt):
            error = Interrupted(signal.SIGINT)
        known = isinstance(error, Failure | UsageError)
        why = f"failed: {error}" if known else f"failed: {type(error).__name__}: {error}"
        kind = next((kind for kind, error_type in KINDS.items() if isinstance(error, error_type)), "")
        message = {"lost": self._me, "why": why.splitlines()[0][:500], "kind": kind}
        self._say(message | {"signal": getattr(error, "signum", None)})

    def explain(self, error: BaseException, seconds: float = 3.0) -> BaseException:
        """The loss of a peer that caused this error, if one becomes known within `seconds`; else the error."""
        if self._count > 1:
            deadline = time.monotonic() + seconds
            while not self._lost.wait(0.05) and time.monotonic() < deadline:
                pass
        return self.error or error

    def _see_off(self) -> None:
        """Have process 0 end last: when it ends, JAX aborts the others, and their exit codes would be lost."""
        deadline = time.monotonic() + LEAVE_SECONDS
        for peer, listener in self._listeners.items():
            if self._me == 0 and listener is not threading.current_thread():
                # A process that said goodbye either ends now, or waits for process 0, as JAX's processes do at the end.
                listener.join(1.0 if peer in self._polite else max(0.0, deadline - time.monotonic()))

    def _leave(self, error: BaseException) -> None:
        """End this process at once, as another one is gone."""
        self._see_off()
        sys.stdout.flush()
        os._exit(exit_code(error))

    def __enter__(self) -> "Peers":
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None and not isinstance(error, SystemExit):
            self.tell(error)
        else:
            self._say({"bye": True})
            # Process 0 may have much to finish, but JAX's processes wait for each other for five minutes only.
            while 0 in self._listeners and self._listeners[0].is_alive() and 0 not in self._polite:
                time.sleep(0.02)
            if self.error is not None:
                self._leave(self.error)
        self._over.set()
        if self._lost.is_set():
            self._see_off()


def reach_milestone(milestone: str) -> None:
    """Tell the others that this process has reached a milestone."""
    if _state().num_processes > 1:
        _state().client.key_value_increment(f"cleanba/{milestone}", 1)


def all_reached_milestone(milestone: str) -> bool:
    """Whether every process has reached a milestone; this one has."""
    count = _state().num_processes
    return count == 1 or int(_state().client.key_value_try_get(f"cleanba/{milestone}")) == count


def wait_for_milestone(milestone: str, check: Callable[[], None]) -> None:
    """Reach a milestone, and wait until every process has, however long that takes.

    check: called every `LOOK_SECONDS`; an error that it raises ends the wait.
    """
    reach_milestone(milestone)
    while not all_reached_milestone(milestone):
        check()
        time.sleep(LOOK_SECONDS)


def _state() -> Any:
    """JAX's state of the processes, which it has without initialising devices."""
    from jax._src import distributed

    return distributed.global_state
