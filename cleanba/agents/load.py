"""From the name of a run, here or on the Hugging Face Hub, to an agent that plays."""

from pathlib import Path

from cleanba.agents.agent import Agent, load_policy
from cleanba.agents.hub import download
from cleanba.config import Placement
from cleanba.recipes import read_recipe
from cleanba.runtime.compiled import prepared
from cleanba.runtime.placement import find_devices


def locate(run: str | Path) -> Path:
    """The directory of a run; hf://user/repository is downloaded.

    Raises:
        UsageError: the Hub has no such repository, or it holds no agent.
        Failure: it cannot be downloaded.
    """
    return download(str(run)) if str(run).startswith("hf://") else Path(run)


def load(run: str | Path, checkpoint: str | int = "last", *, seed: int = 1) -> Agent:
    """The trained agent of a run, which may still be training, or of the Hugging Face Hub.

    Args:
        run: directory of the run, or hf://user/repository.
        checkpoint: whose parameters: "last"; "best", of the evaluations made while it trained; or the number of an
            update.
        seed: seed that its actions are drawn with.

    Raises:
        UsageError: there is no such run or checkpoint, or its environment is not here.
        Failure: the checkpoint is damaged, or cannot be downloaded.
    """
    run_dir = locate(run)
    _, e = read_recipe(run_dir)
    with prepared(e):
        devices = find_devices(Placement())
        return Agent(load_policy(run_dir, str(checkpoint), devices.platform), devices.actors[0], seed)
