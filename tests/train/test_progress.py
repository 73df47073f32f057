"""The progress line: drawn by time, whatever the steps do."""

from __future__ import annotations

import io
import sys
import threading

import pytest

from paceline.config import RunConfig
from paceline.events import RunStarted, StepDone
from paceline.train.observers import progress
from paceline.train.observers.console import Console
from paceline.train.observers.progress import ProgressLine

STARTED = RunStarted(1, "cpu", "alone", 512, 32, 2, 0.1, 40, "")


class Terminal(io.StringIO):
    """Counts the lines that are drawn; tells when there are as many as a test waits for."""

    def __init__(self, wanted: int) -> None:
        super().__init__()
        self.drawn, self._wanted, self.enough = 0, wanted, threading.Event()

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        self.drawn += "step " in text
        if self.drawn >= self._wanted:
            self.enough.set()
        return super().write(text)


def test_the_line_moves_while_no_step_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", screen := Terminal(4))
    monkeypatch.setattr(progress, "_REDRAW_S", 0.01)
    with ProgressLine(lambda: 3, in_color=False) as line:
        line.start(STARTED)
        assert screen.enough.wait(60)
    assert screen.getvalue().endswith("\r\x1b[2K"), "erased at the end"


def test_a_step_draws_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", screen := Terminal(2))
    monkeypatch.setattr(progress, "_REDRAW_S", 3600.0)
    console = Console(RunConfig())
    with console.progress:
        console(STARTED)
        for step in range(1, 40):
            console(StepDone(step, 1, 32 * step, 0.5, 0.1, 100.0))
    assert screen.drawn == 1
