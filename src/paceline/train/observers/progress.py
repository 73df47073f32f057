"""The progress line of a training: drawn by time, not by step, and erased before any other output."""

from __future__ import annotations

import io
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

from paceline import handover
from paceline.events import RunStarted, StepDone

_BAR_WIDTH = 24
_MIN_BAR_WIDTH = 8
_MAX_WIDTH = 140
_REDRAW_S = 0.5
_JOIN_S = 2.0


class ProgressLine:
    """Draws the state of a run from a thread. `done` returns the completed steps."""

    def __init__(self, done: Callable[[], int], *, in_color: bool) -> None:
        self._done, self._in_color = done, in_color
        self._started: RunStarted | None = None
        self._begun_s = 0.0
        self.newest: StepDone | None = None
        self.slow_rank = ""
        self.paused = False
        """Whether a debugger has the terminal."""
        self._lock, self._over = threading.RLock(), threading.Event()
        self._width, self._line_is_open = 0, False
        self._thread = threading.Thread(target=self._run, name="progress", daemon=True)
        self._before: tuple[Any, Any] | None = None

    def start(self, event: RunStarted) -> None:
        """Draw from now on."""
        self._started, self._begun_s = event, time.monotonic()
        if event.from_step < event.total_steps and not self._thread.is_alive():
            self._before = sys.stdout, sys.stderr
            sys.stdout, sys.stderr = _Above(sys.stdout, self), _Above(sys.stderr, self)
            self._draw()
            self._thread.start()

    def erase(self, text: str = "\n") -> None:
        """Make place for other output; no line is drawn behind text without a newline."""
        with self._lock:
            if self._width and self._before and handover.TERMINAL not in os.environ:
                out = self._before[0]
                out.write("\r\x1b[2K" if out.isatty() else f"\r{' ' * self._width}\r")
                out.flush()
            self._width, self._line_is_open = 0, not text.endswith("\n")

    def _run(self) -> None:
        while not self._over.wait(_REDRAW_S):
            if not self.paused:
                self._draw()

    def _draw(self) -> None:
        assert self._started is not None
        assert self._before is not None
        done, spent_s = self._done(), time.monotonic() - self._begun_s
        text = progress_text(self._started, done, spent_s, self.newest) + self.slow_rank
        width = min(_MAX_WIDTH, int(os.environ.get(handover.TERMINAL, "0")) or _columns()) - 1
        share = done / max(1, self._started.total_steps)
        line = progress_bar(share, text, width, in_color=self._in_color)
        with self._lock:
            if not self._line_is_open and not self._over.is_set():
                self._width = width
                self._before[0].write(f"{line}\r")
                self._before[0].flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._over.set()
        if self._before:
            self._thread.join(_JOIN_S)
            self.erase()
            sys.stdout, sys.stderr = self._before


class _Above:
    """A stream that erases the progress line before it is written to."""

    def __init__(self, stream: Any, line: ProgressLine) -> None:
        self._stream, self._line = stream, line

    def write(self, text: str) -> int:
        """Write text where the progress line was."""
        with self._line._lock:  # noqa: SLF001 - one thing in two classes
            if text:
                self._line.erase(text)
            return int(self._stream.write(text))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def _columns() -> int:
    return shutil.get_terminal_size().columns


def progress_text(started: RunStarted, done: int, spent_s: float, newest: StepDone | None) -> str:
    """Return the text beside the bar.

    >>> started = RunStarted(2, "cpu", "alone", 512, 32, 2, 0.1, 40, "")
    >>> progress_text(started, 20, 61.0, StepDone(20, 2, 640, 0.5, 0.1, 155.4, mfu=0.478))
    'epoch 2/3  step 20/40  loss 0.5000  155 samples/s  MFU 47.8%  1:01 elapsed, 1:01 left'
    >>> progress_text(started, 0, 4.0, None)
    'epoch 1/3  step 0/40  0:04 elapsed'
    """
    total = started.total_steps
    parts = [f"step {done:,}/{total:,}"]
    if started.samples and started.global_batch:
        per_epoch = -(-started.samples // started.global_batch)
        epochs = -(-total // per_epoch)
        parts.insert(0, f"epoch {min(done // per_epoch + 1, epochs)}/{epochs}")
    if newest is not None:
        parts += [f"loss {newest.loss:.4f}", f"{newest.samples_per_s:,.0f} samples/s"]
        parts += [f"MFU {newest.mfu:.1%}"] if newest.mfu else []
    times = f"{clock(spent_s)} elapsed"
    if done > started.from_step:
        left_s = spent_s / (done - started.from_step) * (total - done)
        times += f", {clock(left_s)} left"
    return "  ".join([*parts, times])


def clock(seconds: float) -> str:
    """Return a duration as minutes and seconds, with hours if there are any.

    >>> clock(61.4), clock(7325.0)
    ('1:01', '2:02:05')
    """
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def progress_bar(share: float, text: str, width: int, *, in_color: bool = False) -> str:
    """Return one line of exactly `width` columns: a bar, and the text as far as it fits.

    >>> progress_bar(0.5, "step 50/100", 36)
    '━━━━━━━━━━━━             step 50/100'
    >>> progress_bar(1.0, "step 50/100", 16)
    '━━━━━━━━ step 5…'
    """
    from rich.console import Console as RichConsole  # slow to import: only when a bar is drawn
    from rich.progress_bar import ProgressBar
    from rich.table import Table

    screen = RichConsole(
        file=io.StringIO(),  # not sys.stdout: whatever is written there erases the progress line
        width=width, force_terminal=in_color or None, highlight=False, markup=False,
    )  # fmt: skip
    bar_width = max(_MIN_BAR_WIDTH, min(_BAR_WIDTH, width - len(text) - 1))
    line = Table.grid(padding=(0, 1, 0, 0), expand=True, pad_edge=False)
    line.add_column(width=bar_width)
    line.add_column(no_wrap=True, overflow="ellipsis", ratio=1)
    line.add_row(ProgressBar(total=1.0, completed=share, width=bar_width), text)
    with screen.capture() as drawn:
        screen.print(line, end="")
    return drawn.get().rstrip("\n")
