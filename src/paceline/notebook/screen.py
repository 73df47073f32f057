"""The output of ranks below a cell: lines as they come, and one line of progress that changes in place."""

from __future__ import annotations

import sys
import time
from collections import deque
from typing import TextIO, cast

from IPython.display import DisplayHandle, display

from paceline.launch.screen import ERASE

_UPDATES_PER_S = 4


class CellScreen:
    """Takes the place of a terminal: a line that ends with a carriage return replaces the progress shown before."""

    encoding = "utf-8"

    def __init__(self, text: str) -> None:
        self._handle: DisplayHandle = display(_plain(text), raw=True, display_id=True)
        self._drawn_s = deque([0.0] * _UPDATES_PER_S, maxlen=_UPDATES_PER_S)

    def isatty(self) -> bool:
        """Let the ranks draw a progress bar."""
        return True

    def write(self, text: str) -> None:
        """Show whole lines, or progress."""
        text = text.removeprefix(ERASE)  # the progress is shown elsewhere
        if text.endswith("\n"):
            sys.stdout.write(text)
        elif text and time.monotonic() > self._drawn_s[0] + 1.0:
            self._drawn_s.append(time.monotonic())
            self.show(text.rstrip("\r"))

    def show(self, text: str) -> None:
        """Replace the line of progress."""
        self._handle.update(_plain(text), raw=True)

    def flush(self) -> None:
        """Send what was written to the notebook."""
        sys.stdout.flush()

    def fileno(self) -> int:
        """Return the descriptor of standard output, which the kernel forwards: srun writes there by itself."""
        return 1


def _plain(text: str) -> dict[str, str]:
    return {"text/plain": text}


def screen_of(cell: CellScreen | None) -> TextIO:
    """Return where ranks write: below the cell, or to the terminal of IPython."""
    return sys.stdout if cell is None else cast("TextIO", cell)


def cell_screen(text: str) -> CellScreen | None:
    """Return the screen below a cell; none in a terminal, which shows progress by itself."""
    return None if sys.stdout.isatty() else CellScreen(text)
