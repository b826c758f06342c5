"""Plants faults of one bit or one key into runs, and checks whether `cleanba bisect` finds and names them.

python benchmarks/planted.py                 # all of tests/planted.py, some minutes on two cores
python benchmarks/planted.py --faults sum    # those whose names contain this word
"""

import os
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_NUM_CPU_DEVICES", "8")  # both are read when JAX is first imported

import machine
import tyro

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from planted import FAULTS, GROUPS, look_for, sound, train, verdict

from cleanba.checks.parting import SOURCES


@dataclass(frozen=True)
class Args:
    """Flags of the benchmark."""

    faults: str = ""
    """part of their names"""


def main(args: Args) -> None:
    """Plant, look, print, write."""
    rows: list[dict[str, Any]] = []
    load, start = [os.getloadavg()[0]], time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        for run in GROUPS:
            faults = [fault for fault in FAULTS if fault.run == run and args.faults in fault.name]
            if not faults:
                continue
            run_dir = train(run, Path(folder))
            kept = sound(run, run_dir)
            for fault in faults:
                before = time.perf_counter(), time.process_time()
                finding = look_for(fault, run_dir, kept)
                wrong = verdict(fault, finding)
                said = finding.lines() if finding else ["nothing"]
                print(f"{fault.name} ({run}): {wrong or 'found'}", *said, sep="\n  ", flush=True)
                rows.append(
                    {
                        "name": fault.name,
                        "run": run,
                        "found": not wrong,
                        "said": said[0],
                        "lines": said,
                        "source": SOURCES[finding.source] if finding else "nothing",
                        "seconds": round(time.perf_counter() - before[0], 1),
                        "processor_seconds": round(time.process_time() - before[1], 1),
                    }
                )
    found = sum(row["found"] for row in rows)
    print(f"{found} of {len(rows)} found and named rightly, in {time.perf_counter() - start:.0f} s")
    if args.faults:
        return
    load.append(os.getloadavg()[0])
    seconds = round(time.perf_counter() - start, 1)
    path = machine.save("planted", {"found": found, "load_average": load, "seconds": seconds, "faults": rows})
    print(f"written: benchmarks/results/{path.name}")


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
