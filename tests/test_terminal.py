"""Does text reach a terminal wrapped and in colour, a pipe unchanged, and neither with a control sequence?"""

from __future__ import annotations

import io
import os
import subprocess
import sys
from pathlib import Path

import pytest

from paceline import terminal
from support.terminal import program_in_terminal

HEAD, ROW = ["run", "state", "log"], ["first", "RUNNING", "/a/long/path/to/the/log.txt"]
SCRIPT = f"""
from paceline import terminal
terminal.table({HEAD!r}, [{ROW!r}], droppable=["log"])
terminal.say("one two three four five six seven")
terminal.error("error: no such file\\n  fix: check the path")
"""


def on_a_terminal(columns: int, **variables: str) -> str:
    """Return what the script shows on a pseudo-terminal of that width."""
    env = {"TERM": "xterm-256color", "COLUMNS": str(columns), **variables}
    with program_in_terminal([sys.executable, "-c", SCRIPT], folder=Path(), env=env) as screen:
        assert screen.wait() == 0
    return screen.written.replace("\r\n", "\n")


def test_a_narrow_terminal_loses_a_column_and_wraps_at_words() -> None:
    shown = on_a_terminal(20, NO_COLOR="1")
    assert "log" not in shown.splitlines()[0]
    assert "first  RUNNING" in shown
    assert "one two three four \nfive six seven" in shown


@pytest.mark.parametrize(("variables", "coloured"), [({}, True), ({"NO_COLOR": "1"}, False)])
def test_a_wide_terminal_shows_every_column_and_errors_in_colour_unless_no_color_is_set(
    variables: dict[str, str], coloured: bool
) -> None:
    shown = on_a_terminal(100, **variables)
    assert "/a/long/path/to/the/log.txt" in shown
    assert ("\x1b[1;31merror:" in shown) is coloured
    assert ("\x1b[1;36m  fix:" in shown) is coloured


def test_a_pipe_gets_whole_lines_without_colour() -> None:
    stream = io.StringIO()
    terminal.say("word " * 100, stream)
    assert stream.getvalue() == "word " * 100 + "\n"


def test_no_control_sequence_of_a_foreign_text_gets_through(
    capsys: pytest.CaptureFixture[str],
) -> None:
    terminal.say("a\x1b[2Jb\x07\nc")
    terminal.table(["x"], [["\x1b]0;title\x07cell"]])
    assert capsys.readouterr().out == "ab\N{REPLACEMENT CHARACTER}\nc\nx\ncell\n"


def test_force_color_colours_a_pipe_too() -> None:
    env = {name: value for name, value in os.environ.items() if name != "NO_COLOR"}
    env |= {"FORCE_COLOR": "1", "TERM": "xterm-256color"}
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, env=env)
    assert "\x1b[1;31merror:" in done.stderr
