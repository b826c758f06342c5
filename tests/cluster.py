"""A private Slurm cluster: controller, munge and some nodes on this machine, in a folder, on free ports.

It shares nothing with a Slurm that may run here: it has its own configuration, key, socket, state and ports.
"""

import contextlib
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from ports import free_port

NEEDED = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "squeue", "scancel")

CONFIGURATION = """
ClusterName=cleanba-tests
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.sock
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
SchedulerParameters=sched_min_interval=0,batch_sched_delay=0
ReturnToService=2
SlurmdTimeout=3000
MessageTimeout=100
MinJobAge=86400
KillWait=2
PlugStackConfig={folder}/plugstack.conf
{nodes}
PartitionName=all Nodes=ALL Default=YES State=UP MaxTime=INFINITE
"""


def why_not() -> str:
    """Why no cluster can be started here; "" if one can."""
    missing = [name for name in NEEDED if shutil.which(name) is None]
    if missing:
        return f"Slurm is not installed ({', '.join(missing)} missing): apt-get install slurm-wlm munge"
    return "" if os.geteuid() == 0 else "starting slurmd needs root"


def wait_for(what: Callable[[], bool], seconds: float, name: str) -> None:
    """Poll until `what()`; an AssertionError that names it when it takes too long."""
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline, f"no {name} within {seconds} s"
        time.sleep(0.1)


class Cluster:
    """A context manager: entering it starts the cluster, leaving it ends every daemon and job."""

    def __init__(self, folder: Path, nodes: int = 2):
        self.folder = folder
        # The first node has this machine's name: JAX's processes look their coordinator up by the name of its node.
        host = socket.gethostname()
        self.nodes = [host, *(f"{host}-{i}" for i in range(2, nodes + 1))]
        self.env = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}
        for name in [n for n in self.env if n.startswith(("SLURM_", "SBATCH_", "SRUN_")) and n != "SLURM_CONF"]:
            del self.env[name]
        self._daemons: dict[str, subprocess.Popen] = {}
        ports = [free_port() for _ in range(1 + nodes)]
        lines = [
            f"NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=16 State=UNKNOWN"
            for name, port in zip(self.nodes, ports[1:], strict=True)
        ]
        for made in ("state", *(f"spool-{name}" for name in self.nodes)):
            (folder / made).mkdir()
        (folder / "plugstack.conf").write_text("")
        (folder / "munge.key").write_bytes(secrets.token_bytes(128))
        (folder / "munge.key").chmod(0o400)
        text = CONFIGURATION.format(folder=folder, host=host, ports=ports, nodes="\n".join(lines))
        (folder / "slurm.conf").write_text(text)

    def __enter__(self) -> "Cluster":
        f = self.folder
        munge = [f"--socket={f}/munge.sock", f"--key-file={f}/munge.key", f"--pid-file={f}/munged.pid"]
        try:
            self._start("munged", "munged", "--foreground", "--force", *munge, f"--log-file={f}/munged.log",
                        f"--seed-file={f}/munged.seed")  # fmt: skip
            wait_for((f / "munge.sock").exists, 60, "munge")
            self._start("slurmctld", "slurmctld", "-D", "-c", "-f", f / "slurm.conf")
            for node in self.nodes:
                self.start_node(node)
            wait_for(
                lambda: self.said("sinfo", "-h", "-o", "%D %t").split() == [str(len(self.nodes)), "idle"],
                120,
                "idle nodes",
            )
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        if "slurmctld" in self._daemons:
            subprocess.run(["scancel", "--user=root"], env=self.env, timeout=30, check=False)
            busy = lambda: self.said("squeue", "-h", "-t", "R,CG,S") != ""
            deadline = time.monotonic() + 15
            while busy() and time.monotonic() < deadline:
                time.sleep(0.2)
        for name in reversed(list(self._daemons)):
            self._stop(name)

    def _start(self, name: str, *words: object) -> None:
        log = open(self.folder / f"{name}.out", "w")  # noqa: SIM115  the daemon's own
        self._daemons[name] = subprocess.Popen(
            [*map(str, words)], env=self.env, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
        )

    def _stop(self, name: str) -> None:
        process = self._daemons.pop(name)
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def start_node(self, name: str) -> None:
        self._start(f"slurmd-{name}", "slurmd", "-D", "-N", name, "-f", self.folder / "slurm.conf")

    def stop_node(self, name: str) -> None:
        """End a node's slurmd.  The controller does not notice for a while."""
        self._stop(f"slurmd-{name}")

    def processes_of(self, node: str) -> list[int]:
        """What a node runs: its slurmd, and the tasks and batch scripts of jobs, each after the slurmstepd above it."""
        found = [self._daemons[f"slurmd-{node}"].pid] if f"slurmd-{node}" in self._daemons else []
        mine = {f"SLURMD_NODENAME={node}".encode(), f"SLURM_CONF={self.env['SLURM_CONF']}".encode()}
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if mine <= set((folder / "environ").read_bytes().split(b"\0")):
                    above = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
                    if Path(f"/proc/{above}/comm").read_text().startswith("slurmstepd") and above not in found:
                        found.append(above)
                    found.append(int(folder.name))
        return found

    def signal_node(self, node: str, signum: int) -> None:
        """Signal all that a node runs: SIGKILL simulates the loss of the node, SIGSTOP a host that hangs."""
        for pid in self.processes_of(node):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signum)
        if signum == signal.SIGKILL:
            self._daemons.pop(f"slurmd-{node}").wait()

    def run(self, *words: object, cwd: Path | None = None, **env: str) -> subprocess.CompletedProcess:
        """Run a Slurm command, or one that calls Slurm commands."""
        return subprocess.run(
            [*map(str, words)], env={**self.env, **env}, cwd=cwd, capture_output=True, text=True, timeout=600
        )

    def said(self, *words: object) -> str:
        return self.run(*words).stdout.strip()

    def state(self, job: str) -> dict[str, str]:
        """What the controller knows of a job: JobState, Restarts, ExitCode, Reason …"""
        words = self.said("scontrol", "show", "job", job).split()
        return dict(word.partition("=")[::2] for word in words if "=" in word)

    def wait(self, job: str, seconds: float = 1200) -> str:
        """Wait for a job's end -> its state."""
        over = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY")
        wait_for(lambda: self.state(job).get("JobState") in over, seconds, f"end of job {job}: {self.state(job)}")
        return self.state(job)["JobState"]


if __name__ == "__main__":  # a cluster to play with: python tests/cluster.py FOLDER
    assert not why_not(), why_not()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())
    with Cluster(Path(sys.argv[1])) as cluster:
        print(f"export SLURM_CONF={cluster.env['SLURM_CONF']}", flush=True)
        signal.pause()
