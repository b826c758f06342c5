"""The processes of a distributed run: how they join (`jax.distributed`), and the one collective of the host code."""

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from hashlib import sha256

import jax
import numpy as np

from cleanba.config import Placement, require
from cleanba.errors import Failure, UsageError, said
from cleanba.waited import in_a_thread

SUSPENDED_SECONDS = 7 * 24 * 3600  # how long a job of several processes may be suspended as a whole


def initialise(p: Placement) -> None:
    """Join the other processes, if the placement is distributed.  Call it before anything touches a device.

    Raises:
        UsageError: the flags contradict each other, or no cluster was found and no address given.
        Failure: process 0 could not be reached, or its port is taken.
    """
    manual = {
        "--coordinator-address": p.coordinator_address,
        "--num-processes": p.num_processes,
        "--process-id": p.process_id,
    }
    given = [flag for flag, value in manual.items() if value is not None]
    require(
        not (p.distributed and jax.distributed.is_initialized()),
        "--distributed joins other processes once, and this process has done so already; start a new one",
    )
    if not p.distributed:
        require(not given, f"{', '.join(given)} need --distributed; add it, or leave them out")
        return
    if given:
        missing = [flag for flag, value in manual.items() if value is None]
        require(not missing, f"{', '.join(given)} were given without {', '.join(missing)}; give all three or none")
        n, i = p.num_processes or 1, p.process_id or 0
        port = (p.coordinator_address or "").rpartition(":")[2]
        require(
            ":" in (p.coordinator_address or "") and port.isdecimal() and 1 <= int(port) <= 65535,
            f"coordinator_address={p.coordinator_address!r} must be HOST:PORT, with a port from 1 to 65535; try "
            "127.0.0.1:1234",
        )
        require(0 <= i < n, f"process_id={i} must lie in [0, {n}); set --process-id")
        if i == 0:
            require_free(int(port))
        else:
            wait_for_process_0(p.coordinator_address or "", i)
    try:
        # Each process sees all devices of its host; the two id flags choose among them.
        # JAX's own heartbeat would end all processes of a job that was suspended for longer; `Peers` has another one.
        join = partial(
            jax.distributed.initialize,
            p.coordinator_address,
            p.num_processes,
            p.process_id,
            initialization_timeout=int(REACH_SECONDS) + 60,
            heartbeat_timeout_seconds=SUSPENDED_SECONDS,
        )
        with watching_for_others(p):
            in_a_thread(join, "joining processes")  # it waits in C++, where the main thread would handle no signal
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, signal.SIG_DFL)  # JAX would note it and go on
        if "JAX_LOCAL_DEVICE_IDS" not in os.environ:  # under Slurm JAX would leave each process a single GPU
            jax.config.update("jax_cuda_visible_devices", "all")
            jax.config.update("jax_rocm_visible_devices", "all")
    except ValueError as error:
        raise UsageError(
            "--distributed found no cluster (Slurm or Open MPI) to join; "
            f"add --coordinator-address, --num-processes and --process-id ({error})"
        ) from error


def require_free(port: int) -> None:
    """Raise `Failure` if another program of this host has the port; JAX would end in a crash."""
    if "JAX_COORDINATOR_BIND_ADDRESS" in os.environ:  # perhaps of one network interface alone
        return
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError as error:
            raise Failure(
                f"process 0 cannot open port {port} of its host ({error.strerror}); choose another "
                "--coordinator-address"
            ) from None


def wait_for_process_0(address: str, process: int) -> None:
    """Wait until process 0 answers at HOST:PORT.  JAX would wait in silence, and then end in a crash.

    Raises:
        Failure: it does not answer within `REACH_SECONDS`.
    """
    host, _, port = address.rpartition(":")
    began, told = time.monotonic(), False
    while True:
        try:
            with socket.create_connection((host.strip("[]"), int(port)), timeout=5) as found:
                if found.getsockname() != found.getpeername():  # a connection to itself
                    return
            why, waited = "nobody listens there", time.monotonic() - began
        except (OSError, UnicodeError) as error:  # no such host, no route, nobody listens yet
            why, waited = said(error), time.monotonic() - began
        if waited > REACH_SECONDS:
            raise Failure(
                f"process {process} cannot reach process 0 at {address} ({why}); start process 0 too, and check that "
                "its host and port can be reached from here"
            )
        if waited > TELL_SECONDS and not told:
            told = True
            print(f"cleanba: process {process} waits for process 0 at {address} ({why})", file=sys.stderr, flush=True)
        time.sleep(0.2)


REACH_SECONDS, TELL_SECONDS = 300.0, 10.0


@contextmanager
def watching_for_others(p: Placement) -> Iterator[None]:
    """Say so if the other processes are slow to join, and end this one, with 1, after `REACH_SECONDS`.

    JAX would wait in silence, and then end in a crash.
    """
    joined = threading.Event()
    here = "cleanba: " if p.process_id is None else f"cleanba: process {p.process_id}: "
    everyone = "all processes" if p.num_processes is None else f"all {p.num_processes} processes"
    remedy = "start all of them, each with the same coordinator and its own --process-id"
    if p.process_id is None:  # a scheduler has started them all
        remedy = "see that their hosts reach each other by name, and that no firewall blocks any port between them"

    def watch() -> None:
        if joined.wait(TELL_SECONDS):
            return
        print(f"{here}waiting until {everyone} have joined", file=sys.stderr, flush=True)
        if not joined.wait(REACH_SECONDS - TELL_SECONDS):
            print(
                f"{here}{everyone} should have joined within {REACH_SECONDS:.0f} s, but some have not; {remedy}",
                file=sys.stderr,
                flush=True,
            )
            os._exit(1)

    threading.Thread(target=watch, name="waiting for processes", daemon=True).start()
    try:
        yield
    finally:
        joined.set()


def processes_here() -> int:
    """The number of this run's processes on this host.  All processes must call this."""
    names = gather_over_processes(np.frombuffer(sha256(socket.gethostname().encode()).digest(), np.uint8))
    return int((names == names[jax.process_index()]).all(1).sum())


def unlike_process_0(content: bytes) -> list[str]:
    """The numbers of the processes that have other content than process 0.  All processes must call this."""
    rows = gather_over_processes(np.frombuffer(sha256(content).digest(), np.uint8))
    return [str(i) for i, row in enumerate(rows) if (row != rows[0]).any()]


def gather_over_processes(x: np.ndarray) -> np.ndarray:
    """The arrays of all P processes.  [...] -> [P, ...].  All processes must call this, in the same order."""
    if jax.process_count() == 1:
        return x[None]
    from jax.experimental import multihost_utils

    # As bytes: JAX would round float64 to float32.
    gathered = np.asarray(multihost_utils.process_allgather(np.ascontiguousarray(x).view(np.uint8)))
    return gathered.reshape(jax.process_count(), -1).view(x.dtype).reshape(jax.process_count(), *x.shape)
