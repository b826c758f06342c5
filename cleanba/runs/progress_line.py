"""The line that shows how far `eval` and `bisect` are."""

import sys
import threading
import time
from contextlib import suppress

TERMINAL_SECONDS = 0.5  # between two drawings of the line
PLAIN_SECONDS = 30.0  # between two lines where there is no terminal


class ProgressLine:
    """Shows on standard error how far a command is: one line on a terminal, elsewhere a line now and then.

    A thread draws it, and adds the seconds so far, so that they go on where the command's work hangs.  A context that
    removes the line at its end.  If it is not `shown`, it does nothing.
    """

    def __init__(self, *, shown: bool = True):
        self._shown, self._terminal = shown, sys.stderr.isatty()
        self._words, self._began = "", time.monotonic()
        self._drawing = threading.Lock()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._draw_again, name="progress", daemon=True)

    def __enter__(self) -> "ProgressLine":
        if self._shown:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._shown:
            self._over.set()
            self._thread.join()
            self._erase()

    def show(self, words: str) -> None:
        """Show these words from now on.  Costs next to nothing."""
        self._words = words

    def say(self, line: str) -> None:
        """Print a line that stays, to standard output."""
        self._erase()
        print(line, flush=True)

    def _draw_again(self) -> None:
        while not self._over.wait(TERMINAL_SECONDS if self._terminal else PLAIN_SECONDS):
            if self._words:
                line = f"{self._words}, {time.monotonic() - self._began:.0f} s"
                self._write(f"\r\033[K{line}" if self._terminal else f"{line}\n")

    def _erase(self) -> None:
        if self._terminal:
            self._write("\r\033[K")

    def _write(self, text: str) -> None:
        with self._drawing, suppress(OSError, ValueError):  # nobody reads it any more
            print(text, end="", file=sys.stderr, flush=True)
