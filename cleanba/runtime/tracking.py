"""Weights & Biases: one run there for each run directory, however often it is interrupted, with each row once.

Evaluations are rows without a step of their own, drawn over `eval/global_step`.  An evaluation that a resumed run
repeats is sent again, with the same values.

W&B cannot take rows back (its rewinding is a private preview, and does not exist offline).  This is not needed, as
a resumed run repeats its rows exactly.  Online, rows that W&B has already are not sent again.
Offline W&B has nothing yet, so logs that earlier starts left in the run's wandb/ are replaced by a new one, which
begins with all valid rows.
"""

import contextlib
import netrc
import os
import secrets
import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any
from urllib.parse import urlsplit

from cleanba.config import require
from cleanba.errors import Failure, UsageError, missing, said, warn
from cleanba.files import Json, optional_json, write_json
from cleanba.waited import in_background

KEPT = "wandb.json"  # a run's file with its W&B id, project and entity
LOCAL = ("offline", "dryrun", "disabled")  # modes that need no key
WITHOUT_IT = "set WANDB_MODE=offline to log to the run's directory, or leave --track out"


def require_tracking(project: str) -> None:
    """Raise `UsageError` where --track cannot be obeyed, before the run begins."""
    wandb = _wandb()
    try:
        settings = wandb.setup().settings
        wandb.Settings(project=project)
    except (ValueError, wandb.errors.Error) as error:
        raise UsageError(
            f"--track: W&B refuses its settings ({said(error)}); correct --wandb-project-name, or correct or unset "
            "WANDB_*"
        ) from None
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
    """Whether the user's netrc has a key for this server.  A key for W&B's own server counts for all its names."""
    paths = [Path(os.environ["NETRC"])] if os.environ.get("NETRC") else []
    with contextlib.suppress(RuntimeError):  # no home
        paths = paths or [Path.home() / ".netrc", Path.home() / "_netrc"]
    for path in paths:
        with contextlib.suppress(OSError, netrc.NetrcParseError):
            hosts = netrc.netrc(path.expanduser()).hosts
            if urlsplit(base_url).netloc in hosts or "api.wandb.ai" in hosts:
                return True
    return False


Row = tuple[int, int, Mapping[str, object]]  # its update, its global step and its values


class Tracking:
    """Sends rows to Weights & Biases."""

    def __init__(self, run_dir: Path, project: str, entity: str | None, config: Json, history: Sequence[Json] = ()):
        """Begin or continue the run there.  `history` has the valid rows of metrics.jsonl.

        Raises:
            Failure: W&B refuses, or does not answer.
        """
        wandb = _wandb()
        place = {"project": project, "entity": entity}
        known = optional_json(run_dir / KEPT)
        online = wandb.setup().settings.mode not in LOCAL
        # "must": an earlier start has created it; "allow": the first start may have been killed while doing so.
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
                reinit="create_new",  # a run of the program's own stays as it is
            )  # fmt: skip
        except wandb.errors.Error as error:
            raise Failure(
                f"Weights & Biases refused the run {kept['id']} ({said(error)}); run the same command again, "
                + WITHOUT_IT
            ) from None
        if online:
            write_json(run_dir / KEPT, kept | {"online": True})
        # An evaluation is logged late, with the global step of its version, but W&B's own step cannot decrease.
        self._run.define_metric("*", step_metric="global_step")
        self._run.define_metric("eval/global_step")
        self._of_evaluations: set[str] = set()
        self._newest = 0
        self._from = self._run.starting_step
        self._held: list[Row] = []  # evaluations before that step
        self._lost = False  # whether W&B takes no more rows
        self._send_all([(row["update"], row["global_step"], row) for row in history])

    def write(self, update: int, global_step: int, values: Mapping[str, object]) -> None:
        """Send the numbers of a row, unless W&B has them already.

        An evaluation is always sent, as it may be one that the run played again after it was interrupted.  It is held
        until training has come to the first step that W&B lacks: sent before, it would count as that step.

        If W&B's own process has ended, a warning says so, and nothing more is sent.
        """
        self._newest = max(self._newest, update)
        if self._newest < self._from and _is_evaluation(values):
            self._held.append((update, global_step, values))
            return
        if self._newest >= self._from:
            self._send_held()
        self._send_all([(update, global_step, values)])

    def _send_held(self) -> None:
        held, self._held = self._held, []
        self._send_all(held)

    def _send_all(self, rows: Iterable[Row]) -> None:
        """Send these unless W&B takes no more rows; a warning says so once."""
        if self._lost:
            return
        try:
            for row in rows:
                self._send(*row)
        except Exception as error:  # whatever its library raises
            self._lost = True
            warn(f"Weights & Biases takes no more rows ({said(error)}); metrics.jsonl has them all")

    def _send(self, update: int, global_step: int, values: Mapping[str, object]) -> None:
        # W&B drops rows with a lower step than the last one; an evaluation comes later than its update.
        self._newest = max(self._newest, update)
        is_evaluation = _is_evaluation(values)
        if self._newest >= self._from:
            numbers = {name: x for name, x in values.items() if "/" in name and isinstance(x, int | float)}
            before = "eval/" if is_evaluation else ""
            if is_evaluation:  # each by its own name: of two patterns that fit, W&B may take either
                for name in numbers.keys() - self._of_evaluations:
                    self._run.define_metric(name, step_metric="eval/global_step")
                self._of_evaluations |= numbers.keys()
            place = {f"{before}global_step": global_step, f"{before}update": update}
            self._run.log({**numbers, **place}, step=self._newest)

    def close(self, failed: bool, seconds: float) -> bool:
        """Wait until all rows are sent, or written.  Returns False, after a warning, if that takes longer than this.

        Evaluations that are still held are sent, too, at W&B's next step, unless the run failed and will go on.
        """
        if not failed:
            self._newest = max(self._newest, self._from)
            self._send_held()
        try:
            in_background(lambda: self._run.finish(exit_code=int(failed)), "W&B").result(seconds)
        except TimeoutError:
            warn(f"Weights & Biases has not taken all rows within {seconds:g} s; `wandb sync` sends what is in wandb/")
            return False
        except Exception as error:  # whatever its library raises
            if not self._lost:
                warn(f"Weights & Biases has not taken all rows ({said(error)}); metrics.jsonl has them")
        return True


def _is_evaluation(values: Mapping[str, object]) -> bool:
    return any(name.startswith("eval/") for name in values)
