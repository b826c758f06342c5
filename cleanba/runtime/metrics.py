"""What the user sees of a run: the console, JSON lines, TensorBoard, Weights & Biases.  Nothing else writes metrics."""

import contextlib
import errno
import html
import json
import math
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from cleanba.errors import Failure
from cleanba.files import METRICS, Json, finite
from cleanba.interrupts import leave_closed_terminal, send_nowhere
from cleanba.runtime.tracking import Tracking

PLAIN_LINE_SECONDS = 5.0


FLUSH_SECONDS = 5.0  # until TensorBoard sees a log point


@dataclass
class Status:
    """What the console shows; the training loop fills it in."""

    title: str
    num_updates: int
    target_return: float | None = None
    phase: str = "starting"
    update: int = 0
    global_step: int = 0
    sps: float = math.nan
    sps_recent: float = math.nan
    seconds_per_update: float = math.nan  # recently, of updates with gradient steps; NaN before the first
    episodes: int = 0
    episodic_return: float = math.nan
    episodic_length: float = math.nan
    losses: dict[str, float] = field(default_factory=dict)
    actor_times: dict[str, float] = field(default_factory=dict)  # share of the actors' time, by activity
    learner_times: dict[str, float] = field(default_factory=dict)
    bottleneck: str = ""
    recomputes: bool = False  # a part of an earlier run: the returns of these updates alone are not those of the run

    @property
    def eta(self) -> float:
        """Seconds to the end at the recent speed; NaN where none is known, as before learning starts."""
        return (self.num_updates - self.update) * self.seconds_per_update


def duration(seconds: float) -> str:
    """Hours, minutes and seconds, as 26:05:09; "-" if not finite."""
    if not math.isfinite(seconds):
        return "-"
    minutes, s = divmod(max(0, round(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{s:02d}"


def _number(x: float) -> str:
    if not math.isfinite(x):
        return "-"
    return f"{x:,.0f}" if abs(x) >= 1000 else f"{x:.4g}"


def return_in_words(s: Status) -> str:
    """The mean return so far, as "12.3", or "12.3 of 18" where the run has a target."""
    return _number(s.episodic_return) + ("" if s.target_return is None else f" of {_number(s.target_return)}")


def plain_line(s: Status) -> str:
    """The state of the run in one line, for logs and pipes."""
    if s.phase != "training":
        return f"{s.title} | {s.phase}"
    played = [
        f"return {return_in_words(s)}",
        f"length {_number(s.episodic_length)}",
        f"episodes {s.episodes}",
    ]
    parts = [
        f"update {s.update}/{s.num_updates}",
        f"step {s.global_step:,}",
        f"{_number(s.sps_recent)} steps/s (overall {_number(s.sps)})",
        *(() if s.recomputes else played),
        f"ETA {duration(s.eta)}",
    ]
    if s.bottleneck:
        parts.append(f"bottleneck: {s.bottleneck}")
    return " | ".join(parts)


def panel(s: Status) -> Panel:
    """The state of the run as a panel for a terminal."""
    bar = Table.grid(expand=True, padding=(0, 1))
    bar.add_column(ratio=1)
    bar.add_column(justify="right")
    done = s.update / max(1, s.num_updates)
    pulse = s.phase != "training"
    note = s.phase if pulse else f"{done:4.0%}  update {s.update}/{s.num_updates}  ETA {duration(s.eta)}"
    bar.add_row(ProgressBar(total=1.0, completed=done, pulse=pulse), note)

    figures = Table.grid(padding=(0, 2))
    for _ in range(6):
        figures.add_column(justify="left")
    figures.add_row("steps", f"{s.global_step:,}", "steps/s", _number(s.sps_recent), "overall", _number(s.sps))
    if not s.recomputes:
        length, episodes = _number(s.episodic_length), f"{s.episodes:,}"
        figures.add_row("return", return_in_words(s), "length", length, "episodes", episodes)
    losses = list(s.losses.items())
    for i in range(0, len(losses), 3):
        figures.add_row(*[cell for name, value in losses[i : i + 3] for cell in (name, _number(value))])

    rows: list[RenderableType] = [bar, figures]
    for who, times in (("actors", s.actor_times), ("learner", s.learner_times)):
        if times:
            rows.append(Text(f"{who:8}" + "   ".join(f"{what} {share:.0%}" for what, share in times.items())))
    if s.bottleneck:
        rows.append(Text(f"bottleneck: {s.bottleneck}", style="bold"))
    return Panel(Group(*rows), title=Text(s.title), title_align="left", width=min(100, Console().width))


CELL_SECONDS = 0.5  # between refreshes in a notebook


class Cell:
    """A line with a progress bar below a notebook's cell, updated in place."""

    def __init__(self, status: Status):
        from IPython.display import display

        self._status = status
        self._shown = time.monotonic()
        self._handle = display(self._bundle(), raw=True, display_id=True)

    def refresh(self, now: bool = False) -> None:
        """Show the state, if it is time to."""
        if now or time.monotonic() - self._shown >= CELL_SECONDS:
            self._shown = time.monotonic()
            self._handle.update(self._bundle(), raw=True)

    def _bundle(self) -> dict[str, str]:
        words, s = plain_line(self._status), self._status
        bar = f'<progress value="{s.update}" max="{max(1, s.num_updates)}" style="width: 12em"></progress>'
        return {"text/plain": words, "text/html": f"{bar} <code>{html.escape(words)}</code>"}


def in_notebook() -> bool:
    """Whether this thread's output goes below the cell of a notebook."""
    ipython: Any = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    return getattr(shell, "kernel", None) is not None


class Terminal(Console):
    """A console that raises `BrokenPipeError` if its pipe has no reader; Rich's own ends the process."""

    def on_broken_pipe(self) -> None:
        """Called by Rich."""
        raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))


class Display:
    """Shows progress: a live panel in a terminal, one line in a notebook, elsewhere a plain line every few seconds.

    If not `enabled`, it shows nothing, except warnings on standard error if it `warns`.  If its output cannot be
    written, it shows nothing from then on.  If that is because the pipe has no reader any more, it sends SIGTERM to its
    own process once that handles signals, so that the run ends with a checkpoint; if the disk is full, the run goes on.
    """

    def __init__(self, status: Status, enabled: bool = True, warns: bool = False):
        self._status = status
        self._console = Terminal(file=sys.stdout, markup=False, emoji=False)  # names may hold [x] or :x:
        self._lost = False  # what was printed could not be written
        self._enabled = enabled
        self._warns = warns and not enabled
        self._last_line = -math.inf
        self._last_phase = ""
        self._last_words = ""
        self._live: Live | None = None
        self._cell = Cell(status) if enabled and in_notebook() else None
        if enabled and self._cell is None and self._console.is_interactive and self._console.file.isatty():
            self._live = Live(get_renderable=lambda: panel(self._status), console=self._console, refresh_per_second=4)
            self._live.start()

    def say(self, text: str) -> None:
        """Print a line that stays."""
        if self._warns and text.startswith("warning: "):
            print(f"cleanba: {text}", file=sys.stderr)
        if self._enabled and self._cell is not None:
            print(text)
        elif self._enabled:
            try:
                self._console.print(text, highlight=False, soft_wrap=True)
            except OSError as error:
                self._lose(error)

    def _lose(self, error: OSError) -> None:
        """Stop printing: what could not be written is dropped, and so is what follows.

        If nobody reads the output any more, the run ends, too.  If a disk is full, it goes on.
        """
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        self._enabled, self._lost = False, not full
        with contextlib.suppress(OSError, ValueError):
            send_nowhere(sys.stdout.fileno())  # for others' output, and the final flush
        leave_closed_terminal()
        so = " and is dropped; the run goes on" if full else ", so the run ends"
        try:
            print(f"cleanba: output cannot be written ({error.strerror}){so}", file=sys.stderr, flush=True)
        except (OSError, ValueError):  # it goes to the same file
            with contextlib.suppress(OSError, ValueError):
                send_nowhere(sys.stderr.fileno())

    def refresh(self) -> None:
        """Show the status, if it is time to."""
        if self._lost and callable(signal.getsignal(signal.SIGTERM)):
            self._lost = False
            signal.raise_signal(signal.SIGTERM)
        if not self._enabled or self._live is not None:
            return
        if self._cell is not None:
            return self._cell.refresh()
        s, now = self._status, time.monotonic()
        phase = s.phase.partition(":")[0]  # after a colon, a phase counts what it has done
        if phase != self._last_phase or now - self._last_line >= PLAIN_LINE_SECONDS:
            self._last_phase, self._last_line = phase, now
            words = plain_line(s)
            if words != self._last_words:  # the last line printed often shows this state already
                self._last_words = words
                self.say(words)

    def close(self) -> None:
        """Leave the last state on the screen.  May be called twice."""
        live, self._live = self._live, None
        if self._cell is not None:
            self._cell.refresh(now=True)
        elif live is not None:
            try:
                live.stop()
            except OSError as error:  # the terminal has gone
                self._lose(error)
        elif self._enabled and self._status.phase == "training" and self._last_line > -math.inf:
            self._last_line = -math.inf
            self.refresh()
            self._last_line = -math.inf
        self._enabled = self._enabled and live is None


@contextlib.contextmanager
def _without_torch() -> Iterator[None]:
    """Keep tensorboardX from importing PyTorch, which takes seconds and serves to log tensors."""
    absent = "torch" not in sys.modules
    if absent:
        sys.modules["torch"] = None  # type: ignore[assignment]  # an import of it fails
    try:
        yield
    finally:
        if absent:
            del sys.modules["torch"]


class Writers:
    """The files and services that metrics go to; only the main process has any."""

    def __init__(
        self,
        run_dir: Path,
        track: bool,
        project: str,
        entity: str | None,
        config: Json,
        history: Sequence[Json] = (),
        require_ours: Callable[[], None] = lambda: None,
    ):
        """`history` has the rows that metrics.jsonl already holds, if the run continues.

        require_ours: raises `Replaced` if the directory has become another run's.
        """
        with _without_torch():
            from tensorboardX.record_writer import RecordWriter

        self._path, self._require_ours = run_dir.absolute() / METRICS, require_ours
        self._lines = open(self._path, "a", buffering=1)  # noqa: SIM115  closed by close()
        # Not SummaryWriter: a full disk kills its thread, for which it then waits for ever.
        self._events = RecordWriter(str(run_dir / f"events.out.tfevents.{time.time():.0f}.{socket.gethostname()}"))
        self._flushed = time.monotonic()
        self._add_event(0, file_version="brain.Event:2")
        self._add_config(config)
        sound = [row for row in history if "global_step" in row]  # a damaged row may lack it
        for row in sound:
            self._add_scalars(row, row["global_step"])
        self._tracking = Tracking(run_dir, project, entity, config, sound) if track else None

    def write(self, update: int, global_step: int, seconds: float, values: Mapping[str, object]) -> None:
        """Write a log point: numbers everywhere, text (digests) only to the JSON lines.

        Raises:
            Failure: the disk is full, or the run's directory has gone, or is another run's by now.
        """
        self._require_ours()
        row = {"update": update, "global_step": global_step, "seconds": round(seconds, 3), **values}
        try:
            os.stat(self._path)  # an open file can be written even after it was removed
            self._lines.write(json.dumps(finite(row)) + "\n")
            numbers = self._add_scalars(values, global_step)
        except OSError as error:
            raise Failure(
                f"{self._path} cannot be written ({error.strerror}); free disk space, or restore the directory, "
                "then run the same command again to resume"
            ) from None
        if self._tracking is not None:
            self._tracking.write(update, global_step, numbers)

    def _add_scalars(self, values: Mapping[str, object], global_step: int) -> dict[str, float]:
        from tensorboardX.proto.summary_pb2 import Summary

        named = {k: v for k, v in values.items() if "/" in k}  # charts/SPS, not update
        numbers = {k: v for k, v in named.items() if isinstance(v, int | float) and math.isfinite(v)}
        scalars = [Summary.Value(tag=name, simple_value=value) for name, value in numbers.items()]
        self._add_event(global_step, summary=Summary(value=scalars))
        return numbers

    def _add_config(self, config: Json) -> None:
        from tensorboardX.summary import text

        self._add_event(0, summary=text("config", "```json\n" + json.dumps(config, indent=2) + "\n```"))

    def _add_event(self, step: int, **what: object) -> None:
        from tensorboardX.proto.event_pb2 import Event

        self._events.write(Event(wall_time=time.time(), step=step, **what).SerializeToString())
        if time.monotonic() - self._flushed > FLUSH_SECONDS:
            self._events.flush()
            self._flushed = time.monotonic()

    def close(self) -> None:
        """Flush and close the files.  On a full disk, what was not written is lost."""
        for file in (self._lines, self._events):
            with contextlib.suppress(OSError):
                file.close()

    def finish_tracking(self, failed: bool, seconds: float) -> bool:
        """`Tracking.close`, if rows were sent to Weights & Biases."""
        return self._tracking is None or self._tracking.close(failed, seconds)
