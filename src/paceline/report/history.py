"""The events of a run, read incrementally: each call reads only what was appended since the last one."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.events import (
    LARGEST_BYTES,
    CheckpointSaved,
    EpochDone,
    Evaluated,
    RunEnded,
    RunFailed,
    RunStarted,
    RunStopped,
    StepDone,
)
from paceline.safe_open import UnsafeFile, parse_json, reading

_STEP = f'{{"event": "{StepDone.__name__}"'.encode()
_ENDINGS = {kind.__name__ for kind in (RunEnded, RunFailed, RunStopped)}
_CHUNK_BYTES = 1 << 24
LONGEST_LINE = 1 << 24
"""The most bytes of an event."""


@dataclass(frozen=True)
class Metrics:
    """Step, loss and speed of an event."""

    step: int
    loss: float
    samples_per_s: float


class History:
    """The surviving events of a run, as `events.surviving` returns them, at a cost that does not grow with their number.

    Of the many step events, only those that are needed are ever parsed.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._reset()

    def _reset(self) -> None:
        self._offset, self._file = 0, -1
        self._newest, self._past_s = b"", 0.0
        self._steps: list[bytes] = []
        self._epochs: list[dict[str, Any]] = []
        self._evaluations: list[dict[str, Any]] = []
        self._saves: list[dict[str, Any]] = []
        self.starts = 0
        """Number of starts."""
        self.started: dict[str, Any] | None = None
        """The last start."""
        self.ending: dict[str, Any] | None = None
        """The event that ended it, if any."""
        self.problem = ""
        """Why the file of events cannot be read; empty if it can, or if it does not exist yet."""

    def read(self) -> None:
        """Read new events. A replaced or truncated file is read from its beginning."""
        try:
            with reading(self._path) as file:
                facts = os.fstat(file.fileno())
                if facts.st_size > LARGEST_BYTES:
                    problem = f"it has {facts.st_size:,} bytes; the limit is {LARGEST_BYTES:,}"
                    raise UnsafeFile(self._path, problem)
                if facts.st_ino != self._file or facts.st_size < self._offset:
                    self._reset()
                    self._file = facts.st_ino
                file.seek(self._offset)
                while chunk := file.read(_CHUNK_BYTES):
                    complete = chunk[: chunk.rfind(b"\n") + 1]
                    if not complete:
                        if len(chunk) < _CHUNK_BYTES:
                            break
                        complete = chunk  # no event is as long: skip it
                    self._offset += len(complete)
                    self._add_lines(complete)
                    file.seek(self._offset)
        except FileNotFoundError:
            self._reset()
        except OSError as error:
            self._reset()
            self.problem = f"cannot read {self._path.name}: {error.strerror}"

    def _add_lines(self, data: bytes) -> None:
        for line in data.splitlines():
            if line.startswith(_STEP):
                self._steps.append(line)
            elif event := parse_event(line):
                self._add(event)
            self._newest = line

    def _add(self, event: dict[str, Any]) -> None:
        kind = event["event"]
        if kind == RunStarted.__name__:
            self._past_s = self.trained_s
            self._drop_after(as_count(event.get("from_step", 0)))
            self.starts += 1
            self.started, self.ending = event, None
        elif kind == EpochDone.__name__:
            self._epochs.append(event)
            self._evaluations.append(event)
        elif kind == Evaluated.__name__:
            self._evaluations.append(event)
        elif kind == CheckpointSaved.__name__:
            self._saves.append(event)
        elif kind in _ENDINGS:
            self.ending = event

    def _drop_after(self, step: int) -> None:
        """Drop events after a step: a later start repeats them."""
        while self._steps and not _at_most(parse_event(self._steps[-1]), step):
            self._steps.pop()
        self._epochs = [event for event in self._epochs if _at_most(event, step)]
        self._evaluations = [event for event in self._evaluations if _at_most(event, step)]
        self._saves = [event for event in self._saves if _at_most(event, step)]

    @property
    def latest(self) -> Metrics | None:
        """The newest step or epoch event."""
        step = next(
            filter(None, (_metrics_of(parse_event(line)) for line in reversed(self._steps))), None
        )
        epoch = _metrics_of(self._epochs[-1]) if self._epochs else None
        return epoch if step is None or (epoch and epoch.step > step.step) else step

    @property
    def evaluation(self) -> tuple[int, dict[str, float]]:
        """Step and metrics of the newest evaluation; step 0: there was none."""
        for event in reversed(self._evaluations):
            if metrics := metrics_in(event):
                return as_count(event.get("step")), {
                    str(name): as_number(value) for name, value in metrics.items()
                }
        return 0, {}

    @property
    def checkpoint(self) -> dict[str, Any] | None:
        """The event of the newest checkpoint."""
        return self._saves[-1] if self._saves else None

    @property
    def trained_s(self) -> float:
        """The running time over all starts, up to the newest event of each."""
        first, last = self.started or {}, parse_event(self._newest) or {}
        span_s = as_number(last.get("time_s")) - as_number(first.get("time_s"))
        return self._past_s + (span_s if 0 < span_s < math.inf else 0.0)

    def losses(self, most: int) -> list[float]:
        """Return at most `most` losses, evenly spread over the run, including the newest."""
        return [metrics.loss for metrics in self.spread(most)]

    def spread(self, most: int) -> list[Metrics]:
        """Return at most `most` step events, evenly spread over the run; of a short run, its epochs."""
        lines = self._steps
        if len(lines) < 2:
            return list(filter(None, map(_metrics_of, self._epochs[-most:] if most else ())))
        count = min(most, len(lines))
        chosen = [
            lines[len(lines) - 1 - (count - 1 - place) * len(lines) // count]
            for place in range(count)
        ]
        return list(filter(None, (_metrics_of(parse_event(line)) for line in chosen)))


def parse_event(line: bytes) -> dict[str, Any] | None:
    """Return an event, or None for an incomplete line."""
    try:
        event = parse_json(line)
    except ValueError:
        return None
    return event if isinstance(event, dict) and isinstance(event.get("event"), str) else None


def metrics_in(event: dict[str, Any]) -> dict[str, Any]:
    """Return the metrics of an event, whatever the file contains."""
    metrics = event.get("metrics")
    return metrics if isinstance(metrics, dict) else {}


def as_number(value: Any, otherwise: float = math.nan) -> float:
    """Return a float, or a default for anything that is not a number.

    >>> as_number(3), as_number("3"), as_number(10**400, 0.0), as_number(True, 1.5)
    (3.0, nan, 0.0, 1.5)
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        return otherwise
    try:
        return float(value)
    except OverflowError:
        return otherwise


def _at_most(event: dict[str, Any] | None, step: int) -> bool:
    return event is not None and as_count(event.get("step", 0)) <= step


def _metrics_of(event: dict[str, Any] | None) -> Metrics | None:
    if event is None:
        return None
    loss, rate = as_number(event.get("loss")), as_number(event.get("samples_per_s"))
    return Metrics(as_count(event.get("step")), loss, rate)


def as_count(value: Any) -> int:
    """Return a whole number from 0 to 2^53, whatever a file contains.

    >>> as_count(7), as_count("x"), as_count(float("nan")), as_count(-2)
    (7, 0, 0, 0)
    """
    number = as_number(value, 0.0)
    return max(0, int(min(number, 2.0**53))) if math.isfinite(number) else 0
