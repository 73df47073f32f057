"""How text reaches a terminal: wrapped at its width, in colour where that is wanted, and never as a control sequence."""

from __future__ import annotations

import contextlib
import io
import os
import re
import stat
import sys
import unicodedata
from collections.abc import Iterable, Sequence
from typing import IO, TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.table import Table
    from rich.text import Text

_UNLIMITED = 1 << 15
"""Columns of output that is not a terminal: a pipe or a file gets its lines in one piece."""

# ESC [ ... letter; ESC ] ... BEL and the other strings that run to a terminator; ESC and one more.
# C1 controls are the same in one character.
_CONTROL_SEQUENCES = re.compile(
    r"(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]"
    r"|(?:\x1b[\]PX^_]|[\x9d\x90\x98\x9e\x9f])[^\x07\x1b\x9c]*(?:\x07|\x1b\\|\x9c)?"
    r"|\x1b[ -/]*[0-~]"
)
_INVISIBLE = {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"}
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


def plain(text: str) -> str:
    r"""Return one printable line: no escape sequence, no control character, no change of direction.

    >>> plain("loss \x1b[31m0.5\x1b[0m\ttoo\x07 high"), plain("\x1b]0;title\x07ok\x9b2J")
    ('loss 0.5 too� high', 'ok')
    >>> plain("a\u202eb\nc")
    'a�b c'
    """
    visible = []
    for letter in _CONTROL_SEQUENCES.sub("", text):
        if is_printable(letter):
            visible.append(letter)
        else:
            visible.append(" " if letter in "\t\n\r\v\f" else _REPLACEMENT)
    return "".join(visible)


def is_printable(letter: str) -> bool:
    """Return whether a character only shows something, and changes nothing."""
    if letter.isascii():
        return letter.isprintable()
    return unicodedata.category(letter) not in _INVISIBLE


def console(stream: IO[str] | None = None) -> Console:
    """Return rich's console on a stream (standard output by default).

    It honours NO_COLOR and FORCE_COLOR. Only a terminal has a width at which lines are wrapped.
    """
    from rich.console import Console  # slow to import: only when something is drawn

    stream = stream or sys.stdout
    width = None if stream.isatty() else _UNLIMITED
    return Console(
        file=stream,
        width=width,
        highlight=False,
        markup=False,
        emoji=False,
        force_jupyter=False,  # rich would display HTML in a notebook instead of writing to the stream
    )


def say(text: str | Text = "", stream: IO[str] | None = None) -> None:
    """Print text, wrapped at words on a terminal; a plain string loses its control sequences."""
    stream = stream or sys.stdout
    if isinstance(text, str):
        text = "\n".join(plain(line) for line in text.split("\n"))
        if not stream.isatty():
            print(text, file=stream, flush=True)  # a pipe needs no rich
            return
    console(stream).print(text)
    stream.flush()


class _Outliving(io.FileIO):
    """A pipe that takes what nobody reads any more."""

    def write(self, content: Any) -> int:
        try:
            return super().write(content)
        except BrokenPipeError:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self.fileno())
            os.close(nowhere)
            error("the reader of the output has gone: the training continues without printing")
            return len(content)


def outlive_reader() -> None:
    """Let a training go on after `python train.py | head`, where the next line that anybody prints would end it."""
    out = sys.stdout
    if out is not sys.__stdout__ or not isinstance(out, io.TextIOWrapper):
        return  # somebody shows it elsewhere: a notebook, a test
    with contextlib.suppress(OSError, ValueError):  # closed
        if stat.S_ISFIFO(os.fstat(out.fileno()).st_mode):
            out.flush()
            raw = _Outliving(out.fileno(), "wb", closefd=False)
            sys.stdout = io.TextIOWrapper(
                io.BufferedWriter(raw),
                out.encoding,
                out.errors,
                line_buffering=out.line_buffering,
                write_through=out.write_through,
            )


def error_text(message: str) -> Text:
    r"""Return a message in colour: `error:` in red, `fix:` in cyan.

    >>> error_text("error: no such file\n  fix: check the path").plain
    'error: no such file\n  fix: check the path'
    """
    from rich.text import Text

    text = Text("\n".join(plain(line) for line in message.split("\n")))
    text.highlight_regex(r"(?m)^error:", "bold red")
    text.highlight_regex(r"(?m)^\s*fix:", "bold cyan")
    return text


def error(message: str) -> None:
    """Print an error message with its fix on standard error."""
    coloured = sys.stderr.isatty() or os.environ.get("FORCE_COLOR")
    say(error_text(message) if coloured else message, sys.stderr)


def table(
    head: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    droppable: Sequence[str] = (),
    numeric: Sequence[str] = (),
) -> None:
    """Print columns, the numeric ones aligned to the right.

    A terminal that is too narrow loses the droppable columns, first named first.
    """
    out = console()
    kept, cells = list(head), [[plain(cell) for cell in row] for row in rows]
    for name in droppable:
        if _width(out, _aligned(kept, cells, numeric)) <= out.width:
            break
        column = kept.index(name)
        del kept[column]
        for row in cells:
            del row[column]
    if out.is_terminal:
        out.print(_aligned(kept, cells, numeric))
        return
    for line in drawn(_aligned(kept, cells, numeric)):
        print(line, file=out.file)


def _width(out: Console, aligned: Table) -> int:
    """Return the columns that a table takes if nothing is wrapped."""
    return out.measure(aligned, options=out.options.update(max_width=_UNLIMITED)).maximum


def _aligned(
    head: Sequence[str], rows: Iterable[Sequence[str]], numeric: Sequence[str] = ()
) -> Table:
    from rich.table import Table

    aligned = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for name in head:
        justify: Literal["left", "right"] = "right" if name in numeric else "left"
        aligned.add_column(name, overflow="fold", justify=justify)
    for row in rows:
        aligned.add_row(*row)
    return aligned


def fit(text: str, width: int) -> str:
    """Return as much of a line as fits into a width, without control sequences.

    >>> fit("abcdef", 4), fit("日本語", 4), fit("ok", 4)
    ('abc…', '日…', 'ok')
    """
    line = plain(text)
    if line.isascii() and len(line) <= width:
        return line
    from rich.cells import cell_len, set_cell_size

    if cell_len(line) <= width:
        return line
    return set_cell_size(line, width - 1).rstrip() + "…" if width > 0 else ""


def drawn(picture: RenderableType, width: int = _UNLIMITED) -> list[str]:
    """Return what rich draws within a width, as lines of plain text."""
    from rich.console import Console

    out = Console(file=io.StringIO(), width=width, color_system=None, markup=False, emoji=False)
    lines = out.render_lines(picture, pad=False)
    return ["".join(segment.text for segment in line).rstrip() for line in lines]
