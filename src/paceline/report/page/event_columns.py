"""All events of a run for a report: numbers of steps as columns, everything else as lists."""

from __future__ import annotations

import math
import os
from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field
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
    SetByScript,
    SlowRank,
    StepDone,
)
from paceline.report.history import (
    LONGEST_LINE,
    as_count,
    as_number,
    metrics_in,
    parse_event,
)
from paceline.safe_open import reading

COLUMNS = ("step", "time_s", "samples", "loss", "lr", "samples_per_s", "mfu")
_ENDINGS = {
    RunEnded.__name__: "ended",
    RunStopped.__name__: "stopped",
    RunFailed.__name__: "failed",
}


@dataclass
class Start:
    """One start of a run, until it ended or the next one began."""

    time_s: float
    from_step: int
    world_size: int
    last_s: float
    """The time of its last event."""
    step: int
    """The last step of its events."""
    ending: str = ""
    """ended, stopped, failed; empty: it still runs, or was lost."""
    reason: str = ""
    lost_steps: int = 0
    """Steps that a later start repeated, as far as events were written for them."""
    progress_s: float = 0.0
    """The time of its last event other than its failure."""

    def extend(self, event: dict[str, Any]) -> None:
        """Move the end of the start to an event."""
        step, time_s = event.get("step"), event.get("time_s")
        if type(step) is int and step > self.step:
            self.step = step
        if type(time_s) is float and self.last_s < time_s < math.inf:
            self.last_s = time_s
            if event["event"] != RunFailed.__name__:
                self.progress_s = time_s


@dataclass
class EventColumns:
    """Everything that the events tell; of steps that were repeated, the last time counts."""

    steps: dict[str, array[float]] = field(
        default_factory=lambda: {name: array("d") for name in COLUMNS}
    )
    epochs: list[dict[str, Any]] = field(default_factory=list)
    evaluations: list[dict[str, Any]] = field(default_factory=list)
    """Within epochs and at their ends, in the order of steps."""
    slow: list[dict[str, Any]] = field(default_factory=list)
    saves: list[dict[str, Any]] = field(default_factory=list)
    starts: list[Start] = field(default_factory=list)
    problems: list[dict[str, Any]] = field(default_factory=list)
    started: dict[str, Any] = field(default_factory=dict)
    script_values: list[dict[str, Any]] = field(default_factory=list)
    """What the script decided instead of a setting, in the last start."""
    digest: str = ""

    def add(self, event: dict[str, Any]) -> None:
        """Sort an event into its column or list."""
        kind = event["event"]
        if kind == RunStarted.__name__:
            self._start(event)
            return
        if self.starts:
            self.starts[-1].extend(event)
        if kind == StepDone.__name__:
            for name, column in self.steps.items():
                value = event.get(name)
                column.append(value if type(value) is float else as_number(value))
        elif kind in {EpochDone.__name__, Evaluated.__name__}:
            self._evaluate(event)
        elif kind == SlowRank.__name__:
            self.slow.append(event)
        elif kind == CheckpointSaved.__name__:
            self.saves.append(event)
        elif kind == SetByScript.__name__:
            self.script_values.append(event)
        elif kind in _ENDINGS:
            self._end(event)
        else:
            self.problems.append(event)

    def set_by_script(self, config: Mapping[str, Any]) -> dict[str, str]:
        """Return by the names of settings what the script decided instead of them."""
        found: dict[str, str] = {}
        for event in self.script_values:
            setting, value = str(event.get("setting")), str(event.get("value"))
            if setting in config:
                found[setting] = f"{found[setting]}, {value}" if setting in found else value
        is_left = config.get("lr.schedule") == "constant" and not config.get("lr.warmup_samples")
        if is_left and len(set(filter(math.isfinite, self.steps["lr"]))) > 1:
            found.setdefault("lr.schedule", "changed by the script")
        return found

    def _evaluate(self, event: dict[str, Any]) -> None:
        if event["event"] == EpochDone.__name__:
            self.epochs.append(event)
        if metrics_in(event):
            self.evaluations.append(event)

    def _start(self, event: dict[str, Any]) -> None:
        step, time_s = as_count(event.get("from_step", 0)), as_number(event.get("time_s"), 0.0)
        if self.starts:
            self.starts[-1].lost_steps = max(0, self.starts[-1].step - step)
        steps = self.steps["step"]
        while steps and not steps[-1] <= step:
            for column in self.steps.values():
                column.pop()
        self.epochs = _up_to(step, self.epochs)
        self.evaluations = _up_to(step, self.evaluations)
        ranks = as_count(event.get("world_size", 0))
        start = Start(time_s, step, ranks, last_s=time_s, step=step, progress_s=time_s)
        self.starts.append(start)
        self.started, self.digest, self.script_values = event, "", []

    def _end(self, event: dict[str, Any]) -> None:
        if self.starts:
            self.starts[-1].ending = _ENDINGS[event["event"]]
            self.starts[-1].reason = str(event.get("reason", ""))
        self.digest = str(event.get("digest", ""))


def _up_to(step: int, events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [event for event in events if as_count(event.get("step", 0)) <= step]


def read_event_columns(path: Path) -> EventColumns:
    """Read a run's events; incomplete lines, after a power cut or while being written, are skipped.

    Of a log beyond its limit nothing is read: the state of the run says so.
    """
    columns = EventColumns()
    try:
        with reading(path) as file:
            if os.fstat(file.fileno()).st_size > LARGEST_BYTES:
                return columns
            while line := file.readline(LONGEST_LINE):
                if event := parse_event(line):
                    columns.add(event)
    except OSError:
        pass  # no event yet
    return columns
