"""How the output of many ranks becomes one readable stream: whole lines, each with its rank."""

from __future__ import annotations

from collections import deque
from typing import TextIO

_TAIL_LINES = 20


class RankOutput:
    """Cuts what one rank writes into whole lines and passes them on with its number."""

    def __init__(self, rank: int, ranks: int, screen: TextIO | None) -> None:
        self.tail: deque[str] = deque(maxlen=_TAIL_LINES)
        self._prefix = f"[{rank}] " if ranks > 1 else ""
        self._screen = screen
        self._watched = screen is not None and screen.isatty()
        self._rest = b""

    def feed(self, data: bytes) -> None:
        """Take bytes as they come."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            self._show(line)
        if self._rest.endswith(b"\r"):  # a progress bar: shown in place, never kept
            self._show_bar(self._rest)
            self._rest = b""

    def close(self) -> None:
        """Pass on a last line that has no end."""
        if self._rest:
            self._show(self._rest)
            self._rest = b""

    def _show(self, line: bytes) -> None:
        text = line.decode(errors="replace").rstrip("\r").rpartition("\r")[2]
        self.tail.append(text)
        if self._screen is not None:
            self._screen.write(f"{self._prefix}{text}\n")
            self._screen.flush()

    def _show_bar(self, line: bytes) -> None:
        if self._watched and self._screen is not None:
            text = line.decode(errors="replace").rstrip("\r").rpartition("\r")[2]
            self._screen.write(f"{text}\r")
            self._screen.flush()
