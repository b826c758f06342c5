"""A run on Weights & Biases: one there for each run directory, however often it is interrupted, with each row once.

W&B cannot take rows back (its rewinding is a private preview, and there is none offline).  Bits are repeated exactly,
so none need to be: online, rows that it has already are not sent again.  Offline it has nothing yet, so what earlier
starts left in the run's wandb/ is replaced by a log of its own that begins with all rows that stand.
"""

import contextlib
import json
import netrc
import os
import secrets
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any
from urllib.parse import urlsplit

from cleanba.config import require
from cleanba.errors import Failure, missing, said
from cleanba.files import Json, write_json

KEPT = "wandb.json"  # the file of a run with its id there, and where that is known
LOCAL = ("offline", "dryrun", "disabled")  # modes that need no key
WITHOUT_IT = "set WANDB_MODE=offline to log to the run's directory, or leave --track out"


def require_tracking() -> None:
    """Raise `UsageError` where --track could not be obeyed: better before a run than within it."""
    settings = _wandb().setup().settings
    if settings.mode in LOCAL or settings.api_key or settings.identity_token_file:
        return
    variables = ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE")
    require(
        any(os.environ.get(name) for name in variables) or _in_netrc(settings.base_url),
        "--track needs a key for Weights & Biases, and there is none: log in with `wandb login`, set WANDB_API_KEY, "
        + WITHOUT_IT,
    )


def _wandb() -> ModuleType:
    try:
        import wandb
    except ImportError as error:
        raise missing("--track", error, "track") from None
    return wandb


def _in_netrc(base_url: str) -> bool:
    """Whether the user's netrc has a key for this server; one for W&B's own serves all of its names."""
    paths = [Path(os.environ["NETRC"])] if os.environ.get("NETRC") else []
    with contextlib.suppress(RuntimeError):  # no home
        paths = paths or [Path.home() / ".netrc", Path.home() / "_netrc"]
    for path in paths:
        with contextlib.suppress(OSError, netrc.NetrcParseError):
            hosts = netrc.netrc(path.expanduser()).hosts
            if urlsplit(base_url).netloc in hosts or "api.wandb.ai" in hosts:
                return True
    return False


class Tracking:
    """Rows on their way to Weights & Biases."""

    def __init__(self, run_dir: Path, project: str, entity: str | None, config: Json, history: Sequence[Json] = ()):
        """Begin there, or go on.  `history` holds the rows of metrics.jsonl that stand.

        Raises:
            Failure: W&B refuses, or does not answer.
        """
        wandb = _wandb()
        place = {"project": project, "entity": entity}
        known = _read(run_dir)
        online = wandb.setup().settings.mode not in LOCAL
        # It was there, so it must be; or it may be, as the first start may have been killed at this moment.
        resume = "must" if online and known.get("online") and known.get("place") == place else "allow"
        kept: Json = {"id": known.get("id") or secrets.token_hex(8), "place": place, "online": resume == "must"}
        write_json(run_dir / KEPT, kept)
        if not online:
            for folder in (run_dir / "wandb").glob(f"offline-run-*-{kept['id']}"):
                shutil.rmtree(folder, ignore_errors=True)
        try:
            self._run: Any = wandb.init(
                **place, id=kept["id"], resume=resume, name=run_dir.name, dir=str(run_dir), config=config,
                save_code=False,
            )  # fmt: skip
        except wandb.errors.Error as error:
            raise Failure(
                f"Weights & Biases did not take the run {kept['id']} ({said(error)}); give the same command again, "
                + WITHOUT_IT
            ) from None
        if online:
            write_json(run_dir / KEPT, kept | {"online": True})
        # An evaluation is logged late, at the steps of the version that played: its own steps cannot go backwards.
        self._run.define_metric("*", step_metric="global_step")
        self._newest = 0
        self._from = self._run.starting_step
        for row in history:
            self.write(row["update"], row["global_step"], row)

    def write(self, update: int, global_step: int, values: Mapping[str, object]) -> None:
        """One row, unless it is there already: those of `values` that are numbers and belong to a chart."""
        # W&B drops what is older than the step before; an evaluation comes after its update.
        self._newest = max(self._newest, update)
        if self._newest >= self._from:
            numbers = {name: x for name, x in values.items() if "/" in name and isinstance(x, int | float)}
            self._run.log({**numbers, "global_step": global_step, "update": update}, step=self._newest)

    def close(self) -> None:
        """Wait until all of it is sent, or written."""
        self._run.finish()


def _read(run_dir: Path) -> Json:
    try:
        known = json.loads((run_dir / KEPT).read_text())
    except (OSError, ValueError):
        return {}
    return known if isinstance(known, dict) else {}
