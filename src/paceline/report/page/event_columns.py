"""What a run's events say, all of it: figures as columns, the rest as lists."""

from __future__ import annotations

import math
from array import array
from dataclasses import dataclass, field
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
    SlowRank,
    StepDone,
)
from paceline.report.history import as_number, metrics_in, parse_event

COLUMNS = ("step", "time_s", "loss", "lr", "samples_per_s", "mfu")
_ENDINGS = {
    RunEnded.__name__: "ended",
    RunStopped.__name__: "stopped",
    RunFailed.__name__: "failed",
}


@dataclass
class Start:
    """One start of a run, up to its end or the next one."""

    time_s: float
    from_step: int
    world_size: int
    last_s: float
    """The last moment at which it said something."""
    step: int
    """The last step it told of."""
    ending: str = ""
    """ended, stopped, failed; empty: it goes on, or was gone without a word."""
    reason: str = ""
    lost_steps: int = 0
    """Steps that a later start had to do again, as far as they were told of."""

    def hear(self, event: dict[str, Any]) -> None:
        """Take note that it was still there, and how far it had come."""
        step, when = event.get("step"), event.get("time_s")
        if type(step) is int and step > self.step:
            self.step = step
        if type(when) is float and self.last_s < when < math.inf:
            self.last_s = when


@dataclass
class EventColumns:
    """All that was told; figures of steps that were lost and done again are those of the last time."""

    steps: dict[str, array[float]] = field(
        default_factory=lambda: {name: array("d") for name in COLUMNS}
    )
    epochs: list[dict[str, Any]] = field(default_factory=list)
    evaluations: list[dict[str, Any]] = field(default_factory=list)
    """At the ends of epochs and within them, in the order of steps."""
    slow: list[dict[str, Any]] = field(default_factory=list)
    saves: list[dict[str, Any]] = field(default_factory=list)
    starts: list[Start] = field(default_factory=list)
    troubles: list[dict[str, Any]] = field(default_factory=list)
    started: dict[str, Any] = field(default_factory=dict)
    digest: str = ""

    def take(self, event: dict[str, Any]) -> None:
        """Take one event."""
        kind = event["event"]
        if self.starts and kind != RunStarted.__name__:
            self.starts[-1].hear(event)
        if kind == StepDone.__name__:
            for name, column in self.steps.items():
                value = event.get(name)
                column.append(value if type(value) is float else as_number(value))
        elif kind == RunStarted.__name__:
            self._start(event)
        elif kind in {EpochDone.__name__, Evaluated.__name__}:
            self._evaluate(event)
        elif kind == SlowRank.__name__:
            self.slow.append(event)
        elif kind == CheckpointSaved.__name__:
            self.saves.append(event)
        elif kind in _ENDINGS:
            self._end(event)
        else:
            self.troubles.append(event)

    def _evaluate(self, event: dict[str, Any]) -> None:
        if event["event"] == EpochDone.__name__:
            self.epochs.append(event)
        if metrics_in(event):
            self.evaluations.append(event)

    def _start(self, event: dict[str, Any]) -> None:
        step, when = as_count(event.get("from_step", 0)), as_number(event.get("time_s"), 0.0)
        if self.starts:
            self.starts[-1].lost_steps = max(0, self.starts[-1].step - step)
        told = self.steps["step"]
        while told and not told[-1] <= step:
            for column in self.steps.values():
                column.pop()
        self.epochs = [event for event in self.epochs if as_count(event.get("step", 0)) <= step]
        self.evaluations = [
            event for event in self.evaluations if as_count(event.get("step", 0)) <= step
        ]
        self.starts.append(Start(when, step, as_count(event.get("world_size", 0)), when, step))
        self.started, self.digest = event, ""

    def _end(self, event: dict[str, Any]) -> None:
        if self.starts:
            self.starts[-1].ending, self.starts[-1].reason = (
                _ENDINGS[event["event"]],
                str(event.get("reason", "")),
            )
        self.digest = str(event.get("digest", ""))


def read_event_columns(path: Path) -> EventColumns:
    """Read a run's events. Lines that were cut off, by a power cut or by reading too early, are passed over."""
    account = EventColumns()
    try:
        with path.open("rb") as file:
            for line in file:
                if event := parse_event(line):
                    account.take(event)
    except OSError:
        pass  # nothing was told yet
    return account


def as_count(value: Any) -> int:
    """Return a count, whatever a file says.

    >>> as_count(7), as_count("x"), as_count(float("nan")), as_count(-2)
    (7, 0, 0, 0)
    """
    found = as_number(value, 0.0)
    return max(0, int(found)) if math.isfinite(found) else 0
