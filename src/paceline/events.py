"""The events of a run. Sinks receive them and cannot change the training."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from paceline.rundir import writing_to
from paceline.safe_open import open_to_write, parse_json, read_bytes


@dataclass(frozen=True)
class Event:
    """Base class: every event has a time."""

    time_s: float = field(default_factory=time.time, kw_only=True)


@dataclass(frozen=True)
class RunStarted(Event):
    """All ranks have joined, and the plan of the run is fixed."""

    world_size: int
    device: str
    launcher: str
    samples: int
    global_batch: int
    lanes: int
    peak_lr: float
    total_steps: int
    summary: str
    from_step: int = 0
    """The step of the checkpoint that it resumes from; later events of earlier processes do not count."""


@dataclass(frozen=True)
class StepDone(Event):
    """Metrics of a step; the loss is the mean over all samples of all ranks since the last such event."""

    step: int
    epoch: int
    samples: int
    loss: float
    lr: float
    samples_per_s: float
    mfu: float = 0.0
    """Model FLOPs utilization: share of the GPUs' peak; 0: unknown."""


@dataclass(frozen=True)
class EpochDone(Event):
    """Metrics of an epoch and of the evaluation after it."""

    epoch: int
    epochs: int
    step: int
    loss: float
    samples_per_s: float
    metrics: Mapping[str, float]


@dataclass(frozen=True)
class Evaluated(Event):
    """Metrics of an evaluation within an epoch."""

    step: int
    metrics: Mapping[str, float]


@dataclass(frozen=True)
class CheckpointSaved(Event):
    """A checkpoint is on disk."""

    step: int
    path: str
    size_bytes: int
    held_s: float = 0.0
    """Seconds for which the training was paused."""
    total_s: float = 0.0
    """Seconds until the checkpoint was complete."""


@dataclass(frozen=True)
class FinalStateSaved(Event):
    """The script changed the model after the loop; the weights are saved apart from the checkpoints."""

    step: int
    path: str
    size_bytes: int
    changed: str
    """The first of the tensors that changed, and how many more."""


@dataclass(frozen=True)
class CheckpointFailed(Event):
    """A checkpoint could not be saved."""

    step: int
    reason: str


@dataclass(frozen=True)
class CheckpointBad(Event):
    """A checkpoint was damaged, moved aside and skipped."""

    step: int
    reason: str


@dataclass(frozen=True)
class SlowRank(Event):
    """A rank is slow, was slow once, or is no longer slow."""

    step: int
    """The step after which it was detected; for a one-off, the slow step."""
    rank: int
    node: str
    phase: str
    """data, forward, backward, optimizer, gc or other."""
    kind: str
    """chronic, one-off or over."""
    more_s: float
    """Seconds that the phase takes longer than on the other ranks: per step, or in the one step."""
    times: float
    """Its own time per step divided by that of the others."""
    sentence: str


@dataclass(frozen=True)
class ScriptChanged(Event):
    """The run resumes with another text of its script, or of a module beside it."""

    step: int
    reason: str
    """The lines that differ."""


@dataclass(frozen=True)
class SetByScript(Event):
    """The script decides what a setting would decide otherwise."""

    step: int
    setting: str
    value: str
    """What is so instead."""


TIME_LIMIT = "the time limit is near"
"""The reason of a stop that a deadline caused."""


@dataclass(frozen=True)
class RunStopped(Event):
    """The run was asked to stop, has saved a checkpoint, and can be resumed."""

    step: int
    reason: str


@dataclass(frozen=True)
class RunEnded(Event):
    """The run has finished; the digest is the SHA-256 of weights and optimizer state."""

    step: int
    seconds: float
    digest: str


@dataclass(frozen=True)
class RunFailed(Event):
    """The run has crashed."""

    step: int
    rank: int
    reason: str


LARGEST_BYTES = 1 << 30
"""The most bytes of an event log: millions of steps."""

Sink = Callable[[Event], None]


def as_json(event: Event) -> str:
    """Return an event as one line of JSON, its kind first.

    >>> as_json(CheckpointSaved(step=3, path="x", size_bytes=9, time_s=0.5))
    '{"event": "CheckpointSaved", "time_s": 0.5, "step": 3, "path": "x", "size_bytes": 9, "held_s": 0.0, "total_s": 0.0}'
    """
    return json.dumps({"event": type(event).__name__} | vars(event))


class EventLog:
    """A sink that appends every event to a file, each line in one write."""

    def __init__(self, path: Path) -> None:
        self._path = path
        with writing_to(path):
            self._file = open_to_write(path, os.O_RDWR | os.O_APPEND)
            self._end_torn_line()

    def __call__(self, event: Event) -> None:
        """Append one event."""
        with writing_to(self._path):
            os.write(self._file, f"{as_json(event)}\n".encode())

    def _end_torn_line(self) -> None:
        """Begin a new line if a power cut has left the last one incomplete."""
        size = os.lseek(self._file, 0, os.SEEK_END)
        if size and os.pread(self._file, 1, size - 1) != b"\n":
            os.write(self._file, b"\n")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        os.close(self._file)


def surviving(path: Path) -> list[dict[str, Any]]:
    """Return the events that count: without those after a checkpoint from which a later start resumed.

    Of several failures of one start the last counts: the launcher's, which knows what the ranks cannot.
    """
    events: list[dict[str, Any]] = []
    for line in read_bytes(path, LARGEST_BYTES).splitlines():
        with contextlib.suppress(ValueError):  # a line torn by a power cut
            event = parse_json(line)
            if event["event"] == RunStarted.__name__:
                events = [
                    earlier for earlier in events if earlier.get("step", 0) <= event["from_step"]
                ]
            elif events and {event["event"], events[-1]["event"]} == {RunFailed.__name__}:
                events.pop()
            events.append(event)
    return events


def is_finished(path: Path) -> bool:
    """Return whether the last start of a run has taken its last step."""
    try:
        events = [event["event"] for event in surviving(path)]
    except (OSError, KeyError, TypeError, UnicodeDecodeError):
        return False
    return events[-1:] == [RunEnded.__name__]
