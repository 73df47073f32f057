"""What a run's events say, read once: each look reads only what was appended since the one before."""

from __future__ import annotations

import json
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.events import (
    CheckpointSaved,
    EpochDone,
    Evaluated,
    RunEnded,
    RunFailed,
    RunStarted,
    RunStopped,
    StepDone,
)

_STEP = f'{{"event": "{StepDone.__name__}"'.encode()
_ENDINGS = {kind.__name__ for kind in (RunEnded, RunFailed, RunStopped)}
_CHUNK_BYTES = 1 << 24


@dataclass(frozen=True)
class Metrics:
    """How far and how well it went."""

    step: int
    loss: float
    samples_per_s: float


class History:
    """The surviving line of a run's history, as `events.surviving` has it, at a cost that does not grow with its length.

    Of the many lines that tell of steps only those that are asked for are ever taken apart.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._forget()

    def _forget(self) -> None:
        self._offset, self._file = 0, -1
        self._steps: list[bytes] = []
        self._epochs: list[dict[str, Any]] = []
        self._evaluations: list[dict[str, Any]] = []
        self._saves: list[dict[str, Any]] = []
        self.starts = 0
        """How often the run was started."""
        self.started: dict[str, Any] | None = None
        """The last start."""
        self.ending: dict[str, Any] | None = None
        """How it came to an end since."""

    def read(self) -> None:
        """Read what is new. A file that is another one, or shorter than it was, is read from its beginning."""
        try:
            with self._path.open("rb") as file:
                facts = os.fstat(file.fileno())
                if facts.st_ino != self._file or facts.st_size < self._offset:
                    self._forget()
                    self._file = facts.st_ino
                file.seek(self._offset)
                while chunk := file.read(_CHUNK_BYTES):
                    whole = chunk[: chunk.rfind(b"\n") + 1]
                    if not whole:
                        break
                    self._offset += len(whole)
                    self._take(whole)
                    file.seek(self._offset)
        except OSError:
            self._forget()

    def _take(self, data: bytes) -> None:
        for line in data.splitlines():
            if line.startswith(_STEP):
                self._steps.append(line)
            elif event := parse_event(line):
                self._fold(event)

    def _fold(self, event: dict[str, Any]) -> None:
        kind = event["event"]
        if kind == RunStarted.__name__:
            self._go_back(int(event.get("from_step", 0)))
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

    def _go_back(self, step: int) -> None:
        """Leave out what was done after a step and lost."""
        while self._steps and not _at_most(parse_event(self._steps[-1]), step):
            self._steps.pop()
        self._epochs = [event for event in self._epochs if _at_most(event, step)]
        self._evaluations = [event for event in self._evaluations if _at_most(event, step)]
        self._saves = [event for event in self._saves if _at_most(event, step)]

    @property
    def latest(self) -> Metrics | None:
        """The newest figures of a step or an epoch."""
        step = next(
            filter(None, (_figures(parse_event(line)) for line in reversed(self._steps))), None
        )
        epoch = _figures(self._epochs[-1]) if self._epochs else None
        return epoch if step is None or (epoch and epoch.step > step.step) else step

    @property
    def evaluation(self) -> tuple[int, dict[str, float]]:
        """The step and the metrics of the newest evaluation, at the end of an epoch or within it; 0: there was none."""
        for event in reversed(self._evaluations):
            if metrics := metrics_in(event):
                return int(event["step"]), {
                    str(name): as_number(value) for name, value in metrics.items()
                }
        return 0, {}

    @property
    def checkpoint(self) -> dict[str, Any] | None:
        """The newest checkpoint that was saved."""
        return self._saves[-1] if self._saves else None

    def losses(self, most: int) -> list[float]:
        """Return at most so many losses, evenly spread over the run, the newest among them."""
        lines = self._steps
        if len(lines) < 2:
            return [figures.loss for event in self._epochs[-most:] if (figures := _figures(event))]
        count = min(most, len(lines))
        chosen = [
            lines[len(lines) - 1 - (count - 1 - place) * len(lines) // count]
            for place in range(count)
        ]
        return [figures.loss for line in chosen if (figures := _figures(parse_event(line)))]


def parse_event(line: bytes) -> dict[str, Any] | None:
    """Return an event; nothing for a line torn by a power cut."""
    try:
        event = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return event if isinstance(event, dict) and "event" in event else None


def metrics_in(event: dict[str, Any]) -> dict[str, Any]:
    """Return the metrics that an event tells of."""
    found = event.get("metrics")
    return found if isinstance(found, dict) else {}


def as_number(value: Any, otherwise: float = math.nan) -> float:
    """Return a number, whatever a file says.

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
    return event is not None and event.get("step", 0) <= step


def _figures(event: dict[str, Any] | None) -> Metrics | None:
    if event is None:
        return None
    return Metrics(int(event["step"]), float(event["loss"]), float(event["samples_per_s"]))
