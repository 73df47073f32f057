"""What the launcher writes: whole lines, and on a terminal one progress line below them."""

from __future__ import annotations

import os
import shutil
from typing import TextIO

ERASE = "\r\x1b[2K"
LAUNCHER = -1
"""The owner of a progress line that no rank has drawn."""


class Screen:
    """A terminal or a pipe that all ranks of a host share; without a stream nothing is shown."""

    def __init__(self, stream: TextIO | None) -> None:
        self._stream = stream
        self.columns = _columns_of(stream) if stream is not None and stream.isatty() else 0
        """The width of the terminal; 0: it is none."""
        self._bar, self._owner = "", LAUNCHER

    def line(self, text: str, rank: int) -> None:
        """Write a line of a rank above the progress line, which ends if this rank has drawn it."""
        erase = ERASE if self._bar else ""
        if self._owner in {rank, LAUNCHER}:
            self._bar = ""
        self._write(f"{erase}{text}\n")
        if self._bar:
            self._write(self._bar)

    def show_progress(self, text: str, rank: int = LAUNCHER) -> None:
        """Replace the progress line, as much of it as fits into the terminal."""
        if self.columns and self._stream is not None:
            self._bar, self._owner = f"{_clipped(text, self._stream)}\r", rank
            self._write(f"{ERASE}{self._bar}")

    def close(self) -> None:
        """Erase the progress line."""
        if self._bar:
            self._bar = ""
            self._write(ERASE)

    def _write(self, text: str) -> None:
        if self._stream is None:
            return
        encoding = self._stream.encoding or "utf-8"
        # The screen may not be able to show every character.
        self._stream.write(text.encode(encoding, "replace").decode(encoding))
        self._stream.flush()


def _clipped(text: str, stream: TextIO) -> str:
    """Return a line with its colours, but without any other control sequence, in one column less than there are."""
    from rich.text import Text  # slow to import: only when a progress line is drawn

    from paceline.terminal import console

    out = console(stream)
    out.width = _columns_of(stream) - 1
    with out.capture() as drawn:
        out.print(Text.from_ansi(text), no_wrap=True, overflow="ellipsis", end="")
    return drawn.get()


def _columns_of(stream: TextIO) -> int:
    try:
        return os.get_terminal_size(stream.fileno()).columns or 80
    except (OSError, ValueError):
        return shutil.get_terminal_size().columns
