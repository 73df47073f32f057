"""What of a lesson's output is shown: the lines that teach something, without the noise of torch and torchrun."""

from __future__ import annotations

import re
from collections.abc import Iterator

_LOG = re.compile(r"^(\[(rank|default)\d+\]:)?\[?[WEIF]\d{4} \d\d:\d\d:\d\d\.\d+ |^\[Gloo\] Rank ")
_NATIVE = re.compile(
    r"^\s*(frame #\d+: |Exception raised from )|^(\[[WEIF]\d+|[A-Z]+:\d{4}-\d\d-\d\d) .*\.cpp:\d+\]"
)
_LAUNCHER_PREFIX = re.compile(r"^\[\d+\] ")
"""The rank that `paceline run` puts before a line of a rank."""
_WARNING = re.compile(r"^/\S+/site-packages/\S+:\d+: \w*Warning: ")
_RANK = re.compile(r"^\[(?:rank|default)(\d+)\]: ?")
_TRACEBACK = "Traceback (most recent call last):"
_FRAME = re.compile(r'^  File "([^"]+)", line (\d+),? in (\S+)')
_NEXT_FRAME = re.compile(r'(?<=\S)(?=  File ")')
_TORN_FRAME = re.compile(r'", line \d+|File ".*/site-packages/|/site-packages/torch/')
"""A part of a frame: two ranks wrote their stacks at the same time."""
_SOURCE_PATH = re.compile(r"\[/\S+\.(?:cc|cpp|h|hpp):\d+\] ")
_TIMER = re.compile(r"^Timeout \((\S+)\)!$")
_THREAD = re.compile(r"^(Current thread|Thread) 0x[0-9a-f]+ .*\(most recent call first\):$")
_MIXED = re.compile(r"(?<=[^\s(])(?=rank \d+(?:[,:]| of) |--- rank )")
"""Where a rank writes into the line of another: torchrun's ranks write the end of a line separately."""
_AGENT_ERROR = "ChildFailedError"
_AGENT_FRAME = "=" * 60
_ENDING = re.compile(r"(?<=\w)\. This (is|may) .*$")


class LessonOutput:
    """Chooses the lines to show, one after the other.

    Of a stack it keeps the frames of the lesson, of a traceback the error as well. Logs, native frames, warnings of
    packages, and the summary that torchrun prints after a failure are left out.
    """

    def __init__(self, file_name: str) -> None:
        self._file_name = file_name
        self._in_summary = self._in_warning = False
        self._in_traceback: set[str] = set()
        """The ranks that are printing a traceback."""
        self._outer = ""
        """The frame before one of the lesson, in a stack with the most recent call first."""
        self._keeps_source = False
        self._ends_owed = 0
        """Ends of lines that come later, because ranks wrote into one line."""

    def feed(self, line: str) -> list[str]:
        """Return what is shown of a line: nothing, the line, or a shorter one."""
        if line.startswith(_AGENT_FRAME):
            self._in_summary = not self._in_summary
            return []
        text = _LAUNCHER_PREFIX.sub("", line)
        after_warning, self._in_warning = self._in_warning, bool(_WARNING.match(text))
        if self._in_warning or (after_warning and text.startswith("  ")):
            return []
        if self._in_summary or _LOG.match(text) or _NATIVE.match(text):
            return []
        *others, line = _MIXED.split(line)
        self._ends_owed += len(others)
        if not line and self._ends_owed:
            self._ends_owed -= 1
            return []
        frames = _NEXT_FRAME.split(line)
        return [*others, *(shown for frame in frames for shown in self._stack_line(frame))]

    def _stack_line(self, line: str) -> Iterator[str]:
        rank = _RANK.match(line)
        name, text = (rank[1], line[rank.end() :]) if rank else ("", line)
        prefix = f"rank {name}: " if rank else ""
        if text == _TRACEBACK:
            self._in_traceback.add(name)
        elif frame := _FRAME.match(text):
            yield from self._frame(frame, prefix, last_first=name not in self._in_traceback)
        elif _TORN_FRAME.search(text):
            return
        elif name in self._in_traceback and text.startswith("    "):
            if self._keeps_source and not set(text) <= set(" ^~"):
                yield prefix + text
        else:
            yield from self._ending(name, prefix, text)

    def _frame(self, frame: re.Match[str], prefix: str, *, last_first: bool) -> Iterator[str]:
        is_own = frame[1].endswith(self._file_name) and frame[3] != "<module>"
        self._keeps_source = is_own
        text = f"  {frame[1].rpartition('/')[2]}, line {frame[2]}, in {frame[3]}"
        if is_own and last_first and self._outer:
            yield prefix + self._outer
        if is_own:
            yield prefix + text
        if last_first and frame[3] != "wrapper":
            self._outer = "" if is_own else text

    def _ending(self, name: str, prefix: str, text: str) -> Iterator[str]:
        self._outer = ""
        if timer := _TIMER.match(text):
            yield f"--- no step for {timer[1]}: the stack, most recent call first ---"
            return
        if name not in self._in_traceback:
            yield from [] if _THREAD.match(text) else [prefix + text]
            return
        self._in_traceback.discard(name)
        if _AGENT_ERROR not in text:
            yield prefix + _ENDING.sub("", _SOURCE_PATH.sub("", text))
