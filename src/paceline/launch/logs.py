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
            self._rest = (
                self._rest.rstrip(b"\r").rpartition(b"\r")[2] + b"\r"
            )  # a newline may still make it a line
            self._show_bar(self._rest)

    def close(self) -> None:
        """Pass on a last line that has no end."""
        if self._rest and not self._rest.endswith(b"\r"):
            self._show(self._rest)
        self._rest = b""

    def _show(self, line: bytes) -> None:
        text = _last_text(line)
        self.tail.append(text)
        self._write(f"{self._prefix}{text}\n")

    def _show_bar(self, line: bytes) -> None:
        if self._watched:
            self._write(f"{_last_text(line)}\r")

    def _write(self, text: str) -> None:
        if self._screen is not None:
            encoding = self._screen.encoding or "utf-8"
            self._screen.write(
                text.encode(encoding, "replace").decode(encoding)
            )  # a screen may not know every letter
            self._screen.flush()


def _last_text(line: bytes) -> str:
    """Return what a terminal would show of a line that was written over with carriage returns."""
    return line.decode(errors="replace").rstrip("\r").rpartition("\r")[2]
