"""From the name of a run, here or on the Hugging Face Hub, to an agent that plays."""

from pathlib import Path

from cleanba.agents.agent import Agent, load_policy
from cleanba.config import Placement
from cleanba.resolution import read_recipe
from cleanba.runs.remote import find_run
from cleanba.runtime.devices import find_devices
from cleanba.runtime.process_setup import prepared


def load(run: str | Path, checkpoint: str | int = "last", *, seed: int = 1, trust_remote_code: bool = False) -> Agent:
    """The trained agent of a run, which may still be training, or one from the Hugging Face Hub.

    Args:
        run: directory of the run, hf://user/repository, or an archive of a run (.zip, .tar.gz …).
        checkpoint: which parameters: "last"; "best", in the run's periodic evaluations; or the number of an update.
        seed: seed that its actions are drawn with.
        trust_remote_code: for a run that is downloaded or unpacked, import and call what its config.json names, which
            may be any code (docs/guides/trust.md).

    Raises:
        UsageError: there is no such run or checkpoint, its environment is not installed, or a run from elsewhere
            asks for something that is not allowed.
        Failure: the checkpoint is damaged, or cannot be downloaded.
    """
    run_dir = find_run(run)
    _, e = read_recipe(run_dir, trust_remote_code)
    with prepared(e):
        devices = find_devices(Placement())
        return Agent(
            load_policy(run_dir, str(checkpoint), devices.platform, trust_remote_code), devices.actors[0], seed
        )
