"""Takes nodes from a running Slurm job at random moments and gives them back, and compares the bits at the end.

python benchmarks/elastic.py              # 20 losses, half an hour on two cores; needs root, slurm-wlm and munge
python benchmarks/elastic.py --losses 4   # fewer

A cluster of four nodes is started on this machine (tests/cluster.py); the job is `slurm/cpu.sh` with ELASTIC=1.  At
each loss one, two or three nodes other than the first die (SIGKILL to all that runs there) or hang (SIGSTOP), and come
back once the run has gone on without them.  The first node holds the job's own script: the run ends if it is lost,
which is not tried here.
"""

import os
import random
import re
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import machine
import tyro

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from cluster import Cluster, wait_for, why_not
from launch import command, read_result
from test_elastic import quick
from test_slurm import log, own_templates, submit

from cleanba.runtime.checkpoint import updates_kept

TESTS = Path(__file__).parents[1] / "tests"
NODES = 4
# As many processes as there are nodes left; slow until a file exists, so that a job lasts as long as it should.
COMMON = "--env-id gated:Gated-v0 --env-workers 0 --num-envs 24 --num-actors 12 --num-shards 12 --hiddens 8"
COMMON += " --checkpoint-frequency 10 --log-frequency 10"
KINDS = {
    "PPO": f"ppo {COMMON} --num-steps 8 --num-minibatches 1 --update-epochs 1 --total-timesteps 384000",
    "DQN": f"dqn {COMMON} --num-steps 8 --learning-starts 192 --batch-size 24 --train-frequency 24 --buffer-size 4800 "
    "--total-timesteps 384000",
}


@dataclass(frozen=True)
class Args:
    """Flags of the benchmark."""

    losses: int = 20
    """losses in all, divided among the kinds of run"""
    seed: int = 0
    """seed of the moments and nodes"""


class Job:
    """A job on the cluster, whose nodes come and go."""

    def __init__(self, cluster: Cluster, home: Path, words: list[str], name: str):
        self.cluster, self.home, self.run = cluster, home, home / name
        self.number = submit(cluster, home, "cpu", *words, "--run-dir", name)

    def log(self) -> str:
        """What the job has printed."""
        try:
            return log(self.home, self.number)
        except FileNotFoundError:
            return ""

    def starts(self) -> list[int]:
        """The number of nodes of each start so far."""
        return [int(n) for n in re.findall(r"start \d+, on (\d) of", self.log())]

    def wait_for(self, what: Callable[[], bool], seconds: float, name: str) -> None:
        """Poll until `what()`; exit with the job's log when it takes too long."""
        try:
            wait_for(what, seconds, name)
        except AssertionError as late:
            raise SystemExit(f"{late}\n{self.log()}") from None

    def wait_for_progress(self) -> None:
        """Wait until a new checkpoint is written."""
        newest = lambda: max(updates_kept(self.run), default=0)
        before = newest()
        self.wait_for(lambda: newest() > before, 180, f"checkpoint after update {before}")

    def wait_for_start(self, on: int, after: int) -> None:
        """Wait until it has started on `on` nodes; the first `after` starts do not count."""
        self.wait_for(lambda: on in self.starts()[after:], 240, f"start on {on} nodes")

    def lose(self, rng: random.Random) -> dict[str, Any]:
        """Take nodes away, wait until the run goes on, give them back, and wait until the run uses them."""
        self.wait_for_progress()
        time.sleep(rng.uniform(0, 5))
        lost = rng.sample(self.cluster.nodes[1:], rng.randint(1, NODES - 1))
        signum, before = rng.choice((signal.SIGKILL, signal.SIGSTOP)), len(self.starts())
        for node in lost:
            self.cluster.signal_node(node, signum)
        gone = time.monotonic()
        self.wait_for_start(NODES - len(lost), before)
        went_on = time.monotonic() - gone
        self.wait_for_progress()
        before = len(self.starts())
        for node in lost:
            if signum == signal.SIGSTOP:  # a host that hangs is started anew
                self.cluster.signal_node(node, signal.SIGKILL)
            self.cluster.start_node(node)
        back = time.monotonic()
        self.wait_for_start(NODES, before)
        return {
            "nodes": len(lost),
            "signal": signum.name,
            "seconds_until_it_went_on": round(went_on, 1),
            "seconds_until_it_had_them_back": round(time.monotonic() - back, 1),
        }


def torment(kind: str, losses: int, rng: random.Random, folder: Path) -> dict[str, Any]:
    """A job of this kind with so many losses -> what was seen, and whether its bits are an undisturbed run's."""
    words, gate, rows = KINDS[kind].split(), folder / "gate", []
    os.environ |= {"CLEANBA_GATE": str(gate), "PYTHONPATH": f"{TESTS.parent}:{TESTS}"}
    home = own_templates(folder)
    quick(home)
    settings = home / "slurm" / "settings.sh"
    settings.write_text(settings.read_text().replace("\nNODES= ", f"\nNODES={NODES} "))
    with Cluster(folder, NODES) as cluster:
        cluster.env |= {"CLEANBA_CPU": "1", "ELASTIC": "1"}
        job = Job(cluster, home, words, "run")
        for _ in range(losses):
            rows.append(job.lose(rng))
            print(kind, rows[-1], flush=True)
        gate.touch()
        state = cluster.wait(job.number, 600)
        assert state == "COMPLETED", job.log()
        starts = len(job.starts())
    assert command(*words, "--run-dir", folder / "undisturbed").code == 0
    found, wanted = read_result(job.run), read_result(folder / "undisturbed")
    same = all(found[name] == wanted[name] for name in ("params_digest", "learner_digest"))
    return {"losses": rows, "starts": starts, "updates": found["update"], "same_bits": same}


def main(args: Args) -> None:
    """Take nodes, print, write."""
    if reason := why_not():
        raise SystemExit(reason)
    rng, results = random.Random(args.seed), {}
    for i, kind in enumerate(KINDS):
        losses = (args.losses + i) // len(KINDS)
        with tempfile.TemporaryDirectory() as folder:
            results[kind] = torment(kind, losses, rng, Path(folder))
        print(f"{kind}: {losses} losses: {'the same bits' if results[kind]['same_bits'] else 'DIFFERENT BITS'}")
        path = machine.save("elastic", {"nodes": NODES, "results": results})
    print(f"written: benchmarks/results/{path.name}")
    sys.exit(not all(row["same_bits"] for row in results.values()))


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
