import sys
import time
from types import SimpleNamespace

import pytest

from cleanba.runs import progress_line
from cleanba.runs.progress_line import ProgressLine


@pytest.fixture
def often(monkeypatch):
    """Lines come at once, and the seconds stand still, however late a busy machine draws the first line."""
    monkeypatch.setattr(progress_line, "time", SimpleNamespace(monotonic=lambda: 100.0))
    for name in ("TERMINAL_SECONDS", "PLAIN_SECONDS"):
        monkeypatch.setattr(progress_line, name, 0.01)


def until(found, capsys):
    """What standard error has when this is in it."""
    text, deadline = "", time.monotonic() + 60
    while found not in text and time.monotonic() < deadline:
        text += capsys.readouterr().err
        time.sleep(0.01)
    assert found in text
    return text


def test_lines_follow_each_other_where_there_is_no_terminal(often, capsys):
    with ProgressLine() as line:
        line.show("3 of 30 episodes")
        assert until("episodes, 0 s", capsys).startswith("3 of 30 episodes, 0 s\n")
        line.show("4 of 30 episodes")
        until("\n4 of 30 episodes, ", capsys)
    assert "\033" not in capsys.readouterr().err


def test_a_terminal_has_one_line_which_is_removed_at_the_end(often, capsys, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with ProgressLine() as line:
        line.show("3 of 30 episodes")
        text = until("3 of 30 episodes, 0 s", capsys)
    text += capsys.readouterr().err
    assert "\n" not in text and text.endswith("\r\033[K")


def test_the_seconds_go_on_where_the_work_hangs(often, capsys, monkeypatch):
    now = [100.0]
    monkeypatch.setattr(progress_line, "time", SimpleNamespace(monotonic=lambda: now[0]))
    with ProgressLine() as line:
        line.show("3 of 30 episodes")
        until("3 of 30 episodes, 0 s", capsys)
        now[0] = 175.0
        until("3 of 30 episodes, 75 s", capsys)


def test_nothing_is_shown_if_it_is_not_asked_for(often, capsys):
    with ProgressLine(shown=False) as line:
        line.show("3 of 30 episodes")
        time.sleep(0.1)
    assert capsys.readouterr() == ("", "")
