"""How a frame replaces the one before it on a terminal, without flicker."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Self

_HOME, _CLEAR, _TO_END_OF_LINE, _BELOW = "\x1b[H", "\x1b[2J", "\x1b[K", "\x1b[J"
_HIDE, _SHOW = "\x1b[?25l", "\x1b[?25h"
_NOTICES_WITHIN_S = 0.2


class Screen:
    """The terminal that standard output is; its cursor is hidden meanwhile, and given back in any case."""

    def __init__(self) -> None:
        self._drawn_at: os.terminal_size | None = None

    @property
    def size(self) -> os.terminal_size:
        """Columns and rows now; a terminal that does not know is taken for a usual one."""
        found = os.get_terminal_size(sys.stdout.fileno())
        return os.terminal_size((found.columns or 80, found.lines or 24))

    def draw(self, lines: Sequence[str]) -> None:
        """Write a frame over the one before it, in one piece. Only a terminal of another size is wiped first."""
        size = self.size
        wipe = "" if size == self._drawn_at else _CLEAR
        self._drawn_at = size
        frame = "\n".join(f"{line}{_TO_END_OF_LINE}" for line in lines)
        _write(f"{wipe}{_HOME}{frame}{_BELOW}")

    def wait(self, seconds: float) -> None:
        """Wait, but not longer than until the terminal has another size."""
        limit = time.monotonic() + seconds
        while (left := limit - time.monotonic()) > 0 and self.size == self._drawn_at:
            time.sleep(min(left, _NOTICES_WITHIN_S))

    def __enter__(self) -> Self:
        _write(_HIDE)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        _write(f"\n{_SHOW}")


def _write(text: str) -> None:
    encoding = sys.stdout.encoding or "utf-8"
    sys.stdout.write(
        text.encode(encoding, "replace").decode(encoding)
    )  # a terminal may not know every letter
    sys.stdout.flush()


def say(lines: Sequence[str]) -> None:
    """Print lines as they are, where nobody redraws."""
    _write("".join(f"{line}\n" for line in lines))
