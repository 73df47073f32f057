"""What of a foreign text may reach a terminal: letters, which move nothing and fit on their line."""

from __future__ import annotations

import os
import re
import unicodedata
from pathlib import Path

# What a terminal obeys: ESC [ ... letter; ESC ] ... BEL, and its kin that run to a string's end; ESC and one more.
# C1 controls are the same in one character.
_ORDERS = re.compile(
    r"(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]"
    r"|(?:\x1b[\]PX^_]|[\x9d\x90\x98\x9e\x9f])[^\x07\x1b\x9c]*(?:\x07|\x1b\\|\x9c)?"
    r"|\x1b[ -/]*[0-~]"
)
_TAIL_BYTES = 1 << 16
_MARK = "\N{REPLACEMENT CHARACTER}"


def harmless(text: str) -> str:
    r"""Return one line that shows the same and orders nothing: no escape, no control, no change of direction.

    >>> harmless("loss \x1b[31m0.5\x1b[0m\ttoo\x07 high"), harmless("\x1b]0;title\x07ok\x9b2J"), harmless("a\u202eb\nc")
    ('loss 0.5 too� high', 'ok', 'a�b c')
    """
    plain = _ORDERS.sub("", text)
    return "".join(
        letter if _shows(letter) else " " if letter in "\t\n\r\v\f" else _MARK for letter in plain
    )


def _shows(letter: str) -> bool:
    """Return whether a letter only shows: no control, formatting, surrogate, private use, line or paragraph end."""
    return (letter.isascii() and letter.isprintable()) or unicodedata.category(
        letter
    ) not in _OBEYED


_OBEYED = {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"}


def fit(text: str, width: int) -> str:
    """Return as much of a line as fits, harmless; wide letters take two places.

    >>> fit("abcdef", 4), fit("日本語", 4), fit("ok", 4)
    ('abc…', '日…', 'ok')
    """
    line = harmless(text)
    if line.isascii() and len(line) <= width:
        return line
    places = [_places(letter) for letter in line]
    if sum(places) <= width:
        return line
    kept, room = 0, max(0, width - 1)
    while kept < len(places) and places[kept] <= room:
        room -= places[kept]
        kept += 1
    return line[:kept] + "…" if width > 0 else ""


def _places(letter: str) -> int:
    if unicodedata.combining(letter):
        return 0
    return 2 if unicodedata.east_asian_width(letter) in "WF" else 1


def tail(path: Path, count: int) -> list[str]:
    """Return the last lines of a log, harmless, as a terminal would have left them; none if it cannot be read."""
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            file.seek(max(0, size - _TAIL_BYTES))
            data = file.read(_TAIL_BYTES)
    except OSError:
        return []
    lines = data.decode(errors="replace").split("\n")
    if size > _TAIL_BYTES:
        lines = lines[1:] or lines  # the first is cut
    if lines and not lines[-1]:
        lines.pop()
    return (
        [harmless(line.rstrip("\r").rpartition("\r")[2]) for line in lines[-count:]]
        if count > 0
        else []
    )
