"""`cleanba export RUN_DIR`: writes a trained agent as a file that runs without Cleanba (`portable.py`)."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from cleanba.agents.agent import load
from cleanba.agents.portable import FORMATS, NEEDS, Export, check_target, export
from cleanba.arguments import parse_command
from cleanba.errors import Exit
from cleanba.runs.remote import find_run
from cleanba.runtime.process_setup import pin_settings


@dataclass(frozen=True)
class Flags:
    """Write a run's trained agent as a file that runs without Cleanba, and compare both."""

    run_dir: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RUN_DIR")]
    """directory of the run; hf://user/repository for an uploaded one, or an archive"""
    format: str = "onnx"
    """onnx, or stablehlo for programs in JAX"""
    out: Path | None = None
    """file to write (None: agent.onnx or agent.stablehlo in the run's directory)"""
    checkpoint: str = "last"
    """which parameters: those after this update, "last", or "best" (of the evaluations made while training)"""
    seed: int = 1
    """seed of the environments that provide the observations for the comparison"""
    trust_remote_code: bool = False
    """for a downloaded or unpacked run: import and call what its config.json names (docs/guides/trust.md)"""


def export_command(argv: Sequence[str]) -> Exit:
    """`cleanba export RUN_DIR …`"""
    flags = parse_command(Flags, argv, "export")
    run_dir = find_run(flags.run_dir)
    path = flags.out or run_dir / f"agent{FORMATS.get(flags.format, '')}"
    if flags.out is not None or run_dir.is_dir():  # otherwise `load` says that there is no such run
        check_target(path, flags.format, flags.seed)
    if flags.format in NEEDS:
        NEEDS[flags.format]()
    pin_settings()
    policy = load(run_dir, flags.checkpoint, trust_remote_code=flags.trust_remote_code).policy
    written = export(policy, path, flags.format, flags.seed)
    print(in_words(written))
    return Exit()


def in_words(written: Export) -> str:
    """What was written, in a few lines."""
    shown = lambda port: f"{port.name} {port.dtype}[{', '.join(('batch', *map(str, port.shape)))}]"
    numbers = ", ".join(f"{name} {off:.1e}" for name, off in written.differences.items() if name != "action")
    return "\n".join(
        [
            f"inputs: {', '.join(map(shown, written.inputs))}",
            f"outputs: {', '.join(map(shown, written.outputs))}",
            f"compared with the agent's network in float32 at {written.observations:,} observations: "
            f"the same greedy actions; largest differences: {numbers}",
            f"compared with the agent as it plays here: the same action at {written.same_actions:,} of them",
            f"written: {written.path} ({written.path.stat().st_size / 1e6:.3g} MB)",
        ]
    )
