"""Faults of all sorts in runs of all algorithms, each of which must end in the bits of a run without faults.

A fault comes at a random moment; then the run goes on, on a random placement:

| fault | what happens |
|---|---|
| SIGKILL, SIGTERM, SIGINT | one process receives the signal |
| SIGSTOP | one process stops, and is killed once all others have ended |
| full disk | the run's own small disk stays full until the run has ended |
| flipped byte | the run is killed, and one bit in a file of its newest checkpoint is flipped |
| removed file | the run is killed, and a file of its newest checkpoint, or of its memory, is removed |

It counts digests that changed, processes that did not end (two minutes), ends with a code that was not expected, and
processes and shared memory left behind.  Results are added to those in results/soak.json, so faults may be
tried in pieces, over days.
"""

import json
import os
import random
import shutil
import signal
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import machine
from victims import (
    COMMANDS,
    KINDS,
    LONG,
    MORE,
    SHORT,
    alive,
    logged_updates,
    start_somewhere,
    wait_for_moment,
    whole_run,
)

from cleanba.runtime.checkpoint import updates_kept

SIGNALS = {name: getattr(signal, name) for name in ("SIGKILL", "SIGTERM", "SIGINT", "SIGSTOP")}
FAULTS = (*SIGNALS, "full disk", "flipped byte", "removed file")
PER_RUN = 10  # faults, on average
DISK = "48m"
PATIENCE = 120.0  # seconds after which a process that should have ended counts as hanging
TO_THE_END = 900.0  # the same for a process that trains to the end
PROBLEMS = ("digests changed", "logs with gaps", "hangs", "other exit codes", "processes left", "shared memory left")


class Hang(Exception):
    """A process did not end."""


@dataclass
class Soak:
    """A run with faults, and what was seen of it."""

    kind: str
    disk: Path
    """a disk of its own"""
    rng: random.Random
    problems: Counter[str]
    said: list[str]
    """of problems: what was seen"""

    @property
    def run(self) -> Path:
        return self.disk / "run"

    @property
    def log(self) -> Path:
        """What its processes printed."""
        return self.disk.with_suffix(".log")

    def problem(self, sort: str, what: str) -> None:
        self.problems[sort] += 1
        tail = self.log.read_text()[-1500:] if self.log.exists() else ""
        self.said.append(f"{self.kind}: {sort}: {what}\n{tail}")
        print(self.said[-1], flush=True)

    def start(self) -> list[subprocess.Popen]:
        with open(self.log, "a") as log:
            return start_somewhere(self.kind, self.run, self.rng, ["--peer-timeout", "10", *short(self.kind)], log)

    def wait(self, processes: list[subprocess.Popen], patience: float = PATIENCE) -> list[int]:
        """The exit codes of all of them.

        Raises:
            Hang: one has not ended after so many seconds; all are killed.
        """
        until = time.monotonic() + patience
        try:
            return [process.wait(max(0.1, until - time.monotonic())) for process in processes]
        except subprocess.TimeoutExpired:
            for process in processes:
                process.kill()
                process.wait()
            raise Hang from None

    def suffer(self, fault: str, updates: int) -> bool:
        """Start or resume the run, and give it a fault; False if it has finished before."""
        processes = self.start()
        wait_for_moment(self.run, processes, updates / PER_RUN, self.rng)
        if not alive(processes):
            if any(codes := self.wait(processes)):
                self.problem("other exit codes", f"{codes} without any fault")
            return False
        if fault == "full disk":
            self.fill(processes)
        else:
            self.hit(processes, SIGNALS.get(fault, signal.SIGKILL))
        if fault in ("flipped byte", "removed file"):
            return self.damage(fault)
        return True

    def hit(self, processes: list[subprocess.Popen], signum: signal.Signals) -> None:
        """Send one of them a signal; all must end, that one with this signal's exit code, or 0 if it has finished."""
        victim = self.rng.choice(processes)
        victim.send_signal(signum)
        others = [process for process in processes if process is not victim]
        if signum == signal.SIGSTOP:
            self.wait(others) if others else time.sleep(self.rng.uniform(0.1, 2.0))
            victim.kill()
            signum = signal.SIGKILL
        code = self.wait([victim])[0]
        self.wait(others)
        if code not in (0, -signum, 128 + signum):  # 0: it has finished meanwhile
            self.problem("other exit codes", f"{signum.name} ended a process with code {code}")

    def fill(self, processes: list[subprocess.Popen]) -> None:
        """Fill the disk until the run has ended: it must finish, or fail and say that the disk is full."""
        ballast = self.disk / "ballast"
        try:
            with open(ballast, "wb", buffering=0) as file:
                while True:
                    file.write(bytes(4096))
        except OSError:
            pass
        try:
            codes = self.wait(processes)
        finally:
            ballast.unlink()
        if not set(codes) <= {0, 1} or (any(codes) and "No space left on device" not in self.log.read_text()):
            self.problem("other exit codes", f"{codes} on a full disk")

    def damage(self, fault: str) -> bool:
        """Change or remove a file of the newest checkpoint; False if there is no older one to go on from."""
        there = updates_kept(self.run)
        if len(there) < 2:
            return False
        newest = max(there)
        files = [p for p in (self.run / "checkpoints" / str(newest)).rglob("*") if p.is_file()]
        files += self.run.glob(f"memory/*/{newest}-*.pack")
        path = self.rng.choice(sorted(files))
        if fault == "removed file":
            path.unlink()
        elif data := bytearray(path.read_bytes()):
            data[self.rng.randrange(len(data))] ^= 1 << self.rng.randrange(8)
            path.write_bytes(data)
        return True

    def left_behind(self, shared_before: set[str]) -> None:
        """Note processes of the run that still live, and shared memory that was not there before."""
        time.sleep(0.2)
        words = str(self.run).encode()
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                if words in path.read_bytes() and int(path.parent.name) != os.getpid():
                    self.problem("processes left", path.parent.name)
                    os.kill(int(path.parent.name), signal.SIGKILL)
            except OSError:
                pass  # it has ended meanwhile
        if new := set(os.listdir("/dev/shm")) - shared_before:
            self.problem("shared memory left", ", ".join(sorted(new)))


def short(kind: str) -> list[str]:
    """Flags that make a run of 1,000 updates one of 200."""
    return SHORT.split() if LONG in COMMANDS[kind] else []


@contextmanager
def small_disk(place: Path) -> Iterator[Path]:
    """A disk of its own.

    Raises:
        SystemExit: only root can mount one.
    """
    place.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK}", "tmpfs", place]).returncode:
        raise SystemExit("a run needs a small disk of its own, which may become full; only root can mount one")
    try:
        yield place
    finally:
        subprocess.run(["umount", "--lazy", place], check=True)


def suffer_until_whole(soak: Soak, faults: int, whole: dict, count: Counter[str]) -> None:
    """Give the run at most `faults` faults, then let it train to its end, and compare."""
    shared = set(os.listdir("/dev/shm"))
    try:
        for fault in (soak.rng.choice(FAULTS) for _ in range(faults)):
            going = soak.suffer(fault, whole["update"])
            count[fault] += going
            soak.left_behind(shared)
            if not going and (soak.run / "result.json").exists():
                break
        if any(codes := soak.wait(soak.start(), TO_THE_END)):
            soak.problem("other exit codes", f"{codes} at the last resume")
            return
    except Hang:
        soak.problem("hangs", f"after {dict(count)}")
        return
    result = json.loads((soak.run / "result.json").read_text())
    if any(result[name] != whole[name] for name in ("params_digest", "learner_digest")):
        soak.problem("digests changed", f"after {dict(count)}")
        shutil.copytree(soak.run, Path(tempfile.mkdtemp(prefix="soak-")) / "run")  # to be looked at
    elif logged_updates(soak.run) != whole["updates"]:
        soak.problem("logs with gaps", f"after {dict(count)}")
    soak.left_behind(shared)


def add(faults: int, only: str = "") -> bool:
    """Try `faults` more faults, print and write the totals -> whether the new ones caused no problem."""
    saved = machine.saved("soak")
    counts = {kind: Counter(row) for kind, row in saved.get("faults", {}).items()}
    problems, said = Counter(saved.get("problems", {})), saved.get("said", [])
    begun, before = sum(map(Counter.total, counts.values())), problems.total()
    rng, wholes = random.Random(begun), {}
    kinds = [kind for kind in (*KINDS, *MORE) if only in kind]
    for kind in kinds:
        counts.setdefault(kind, Counter())
    with tempfile.TemporaryDirectory() as folder:
        os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", f"{folder}/compiled")
        number = 0
        while (done := sum(map(Counter.total, counts.values()))) < begun + faults:
            kind = min(kinds, key=lambda kind: (counts[kind].total(), rng.random()))
            home = Path(folder) / str(number)
            home.mkdir()
            if kind not in wholes:
                wholes[kind] = whole_run(kind, home / "whole", short(kind))
            with small_disk(home / "disk") as disk:
                soak = Soak(kind, disk, rng, problems, said)
                suffer_until_whole(soak, rng.randint(1, 2 * PER_RUN - 1), wholes[kind], counts[kind])
            number += 1
            total = sum(map(Counter.total, counts.values()))
            print(f"{kind}: {total - done} faults, {total} in all; problems: {dict(problems) or 'none'}", flush=True)
            path = machine.save(
                "soak",
                {
                    "faults": {kind: dict(row) for kind, row in counts.items() if row},
                    "problems": {sort: problems[sort] for sort in PROBLEMS},
                    "said": said,
                },
            )
    print(f"written: benchmarks/results/{path.name}")
    return problems.total() == before
