"""What the script does in a step and did not do in the steps before: if one rank alone does it, the hang report names the line."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import FrameType

_MOST_STEPS = 10
"""Unusual steps of a start that are written down; a script that has more of them has no usual step."""

Place = tuple[str, int]
"""A file and a line."""


class UnusualCalls:
    """Writes down, before the next collective, that the script leaves the loop, finishes, or updates more or less often.

    Most of it is right, as long as every rank does it. If not, the ranks meet in different collectives, and gloo may
    end a rank at once, which then reports nothing more. A usual step costs the line of its update.
    """

    def __init__(self, write: Callable[[str], None]) -> None:
        self._write = write
        self._loop: Place = ("", 0)
        self._index, self._usual, self._before = 0, 1, 1
        self._updates: list[Place] = []
        self._found: dict[str, str] = {}
        self._left = _MOST_STEPS

    def begin_loop(self, caller: FrameType) -> None:
        """Remember where the loop is: the frame that asks for its next step."""
        self._loop = _place_of(caller)

    def begin_step(self, index: int) -> None:
        """Begin a step."""
        if self._found:
            self._found = {}
            self._left -= 1
            if not self._left:
                self._write("")
        self._index = index
        self._updates.clear()

    def update(self, name: str, caller: FrameType) -> None:
        """Note a call of `run.update` or `run.backward`, before it sums gradients."""
        self._updates.append(_place_of(caller))
        count = len(self._updates)
        if count > self._usual:
            self._note(
                "updates", f"called {name} {_times(count)}, at {_lines(self._updates, ' and ')},"
            )

    def finish(self, caller: FrameType) -> None:
        """Note a call of `run.finish`."""
        self._note("finish", f"called run.finish at {_lines([_place_of(caller)])}")

    def leave(self) -> None:
        """Note that the script has left the loop before its last step."""
        self._note("leave", f"left the loop {self._ways(ast.Break, ast.Return)}")

    def end_step(self) -> None:
        """Note that the body of the loop is over."""
        count = len(self._updates)
        if count < self._usual:
            how = f"called run.update only {_times(count)}" if count else "did not call run.update"
            self._note("updates", f"{how} {self._ways(ast.Continue)}")
        if count == self._before:  # two steps in a row
            self._usual = count
        self._before = count

    def _note(self, what: str, phrase: str) -> None:
        if self._left:
            self._found[what] = phrase
            self._write(f"{' and '.join(self._found.values())} in step {self._index + 1}")

    def _ways(self, *kinds: type[ast.stmt]) -> str:
        """Return the lines of the loop with such statements; if there is none, that of the loop."""
        file, line = self._loop
        if not (found := _statements(file, line, kinds)):
            return f"(loop at {_lines([self._loop])})"
        names = " or ".join(kind.__name__.lower() for kind in kinds)
        return f"({names} at {_lines([(file, each) for each in found])})"


def _place_of(frame: FrameType) -> Place:
    return frame.f_code.co_filename, frame.f_lineno


def _times(count: int) -> str:
    return f"{count} time{'s' if count > 1 else ''}"


def _lines(places: Iterable[Place], word: str = " or ") -> str:
    """Return places as words.

    >>> _lines([("/home/me/train.py", 20), ("/home/me/train.py", 24)])
    'train.py:20 or train.py:24'
    """
    return word.join(f"{Path(file).name}:{line}" for file, line in places)


def _statements(file: str, line: int, kinds: tuple[type[ast.stmt], ...]) -> list[int]:
    """Return the lines of the statements that leave, or go on with, the loop in a line; none if there is no source."""
    try:
        tree = ast.parse(Path(file).read_bytes())
    except (OSError, SyntaxError, ValueError):
        return []
    for node in ast.walk(tree):
        if isinstance(node, ast.For) and node.lineno <= line <= (node.iter.end_lineno or 0):
            return sorted(found.lineno for found in _inside(node.body, kinds))
    return []


def _inside(body: Iterable[ast.AST], kinds: tuple[type[ast.stmt], ...]) -> Iterator[ast.stmt]:
    """Yield such statements of a loop, but those that belong to a function or a loop within it."""
    for node in body:
        if isinstance(node, kinds):
            yield node
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)):
            continue
        inner = kinds
        if isinstance(node, (ast.For, ast.While)):
            inner = tuple(kind for kind in kinds if kind is ast.Return)
        yield from _inside(ast.iter_child_nodes(node), inner)
