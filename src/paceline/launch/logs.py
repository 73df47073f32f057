"""The output of many ranks as one stream of whole lines, each with its rank."""

from __future__ import annotations

import contextlib
import os
import re
from collections import deque
from pathlib import Path

from paceline import handover
from paceline.launch.screen import Screen
from paceline.safe_open import open_to_write

_TAIL_LINES = 200  # a traceback may be long
# torch 2.10 prints this in every rank for every process group, where all is well.
_ALL_CONNECTED = re.compile(
    rb"\[Gloo\] Rank \d+ is connected to (\d+) peer ranks\. Expected number of connected peer ranks is : \1"
)


class RankOutput:
    """Splits the output of one rank into lines, and writes them to the screen with its number."""

    def __init__(self, rank: int, ranks: int, screen: Screen, log: Path | None = None) -> None:
        self._log = log
        self.tail: deque[str] = deque(maxlen=_TAIL_LINES)
        self._rank, self._prefix = rank, f"[{rank}] " if ranks > 1 else ""
        self._screen = screen
        self._rest = b""

    def feed(self, data: bytes) -> None:
        """Add bytes of output."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            if not _ALL_CONNECTED.fullmatch(line):
                self._show(line)
        if self._rest.endswith(b"\r"):  # a progress bar: shown in place, not kept in the tail
            # The carriage return stays: a newline may still complete the line.
            self._rest = self._rest.rstrip(b"\r").rpartition(b"\r")[2] + b"\r"
            self._show_bar(self._rest)

    def close(self) -> None:
        """Show a last line without a newline."""
        if self._rest and not self._rest.endswith(b"\r"):
            self._show(self._rest)
        self._rest = b""

    def _show(self, line: bytes) -> None:
        shown = _visible_text(line)
        text = shown.removeprefix(handover.FOR_ALL_RANKS)
        self.tail.append(text)
        if self._log is not None:
            self._keep(line)
        self._screen.line(f"{self._prefix if text == shown else ''}{text}", self._rank)

    def _keep(self, line: bytes) -> None:
        """Append a line to the log of the rank; a full disk does not end the run."""
        assert self._log is not None
        with (
            contextlib.suppress(OSError),
            os.fdopen(open_to_write(self._log, os.O_WRONLY | os.O_APPEND), "ab") as file,
        ):
            file.write(line + b"\n")

    def _show_bar(self, line: bytes) -> None:
        self._screen.show_progress(_visible_text(line), self._rank)


def _visible_text(line: bytes) -> str:
    """Return the text that a terminal shows of a line with carriage returns."""
    return line.decode(errors="replace").rstrip("\r").rpartition("\r")[2]
