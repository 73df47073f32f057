"""What a run recorded after each step, and where two records first differ. Reads files only."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from paceline.errors import PacelineError
from paceline.safe_open import parse_json, read_text

RECORD_FILE = "record.jsonl"
"""The digests of every step, in the folder of the record."""

_LARGEST_BYTES = 1 << 30  # a long run of a large model

_OPTIONS = "the options of "
_OTHERS = (_OPTIONS, "tracked.", "buffer.")
"""What begins the names of options, tracked objects, and buffers that are not in a state_dict."""

LOSS = "the loss"
RANKS = "the state of different ranks"
STEPS = "the number of steps"


@dataclass(frozen=True)
class RecordedStep:
    """One line of a record."""

    step: int
    loss: float
    metrics: dict[str, str]
    """Results of an evaluation in this step."""
    ranks_agree: bool
    tensors: dict[str, str]
    """Digests of weights, buffers, optimizer state and options, and tracked objects."""


@dataclass(frozen=True)
class Record:
    """The record of one run."""

    world: int
    exact: bool
    lanes: int
    save_step: int
    """The step after which a run that verify resumes was saved."""
    steps: list[RecordedStep]
    compression: str = "none"
    """How gradients are rounded on their way between ranks."""
    precision: str = "fp32"
    """What numbers forward and backward compute in."""
    epoch_steps: int = 0
    """Steps to which every epoch was cut; 0: epochs were whole."""
    workers: int = -1
    """Worker processes that read the data; -1: the data are of a kind that no worker reads."""

    @property
    def weights(self) -> dict[str, str]:
        """Digests of weights and optimizer state after the last step."""
        last = self.steps[-1].tensors
        return {name: value for name, value in last.items() if not name.startswith(_OTHERS)}

    @property
    def digest(self) -> str:
        """SHA-256 of weights and optimizer state after the last step."""
        state = json.dumps(self.weights, sort_keys=True)
        return hashlib.sha256(state.encode()).hexdigest()

    def step(self, number: int) -> RecordedStep:
        """Return the line of a step."""
        return next(line for line in self.steps if line.step == number)


def read_record(folder: Path, name: str) -> Record:
    """Read the record of a run; raise an error if it has no steps."""
    path = folder / RECORD_FILE
    if not path.is_file():
        raise PacelineError(
            f"{name} left no record of its steps",
            fix="train inside of `with paceline.Run(paceline.config_from_argv()) as run`, in a loop over `run.steps(...)`, "
            "by run.update(optimizer, loss, step)",
        )
    try:
        head, *steps = map(parse_json, read_text(path, _LARGEST_BYTES).splitlines())
        record = Record(**head, steps=[_step(line) for line in steps])
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise PacelineError(
            f"{path} is not a record of steps ({error})", fix="record the run again"
        ) from error
    if len(steps) < 2:
        raise PacelineError(
            f"{name} recorded no step",
            fix="loop over `run.steps(...)` for at least one step",
        )
    return record


def _step(line: dict[str, Any]) -> RecordedStep:
    return RecordedStep(**line | {"loss": float.fromhex(line["loss"])})


def is_repeat(first: Record, second: Record) -> bool:
    """Return whether two runs at the same world size recorded the same."""
    return _without_nan(first) == _without_nan(second)


def _without_nan(record: Record) -> list[tuple[RecordedStep, str]]:
    return [(replace(line, loss=0.0), line.loss.hex()) for line in record.steps]


def without_rounding(record: Record) -> Record:
    """Return a record without what may be rounded: left are names of tensors, options, and whether the ranks agree."""
    return replace(record, steps=list(map(_without_rounding, record.steps)))


def _without_rounding(line: RecordedStep) -> RecordedStep:
    tensors = {
        name: value if name.startswith(_OPTIONS) else "" for name, value in line.tensors.items()
    }
    return replace(line, loss=0.0, metrics={}, tensors=tensors)


def first_difference(reference: Record, other: Record) -> tuple[int, str] | None:
    """Return the first step that differs in two records, and the tensor, metric or LOSS, RANKS, STEPS.

    A record of a resumed run begins with the state that it restored.
    """
    known = {line.step: line for line in reference.steps}
    first = other.steps[0].step
    for actual in other.steps:
        expected = known.get(actual.step)
        if expected is None:
            break
        has_loss = actual.step > first
        if difference := _difference(expected, actual, has_loss=has_loss):
            return actual.step, difference
    last, others = reference.steps[-1].step, other.steps[-1].step
    return (min(last, others), STEPS) if last != others else None


def _difference(expected: RecordedStep, actual: RecordedStep, *, has_loss: bool) -> str:
    if not actual.ranks_agree or not expected.ranks_agree:
        return RANKS
    if has_loss and expected.loss.hex() != actual.loss.hex():
        return LOSS
    if name := _first_name(expected.tensors, actual.tensors):
        return name
    return _first_name(expected.metrics, actual.metrics) if has_loss else ""


def _first_name(expected: Mapping[str, str], actual: Mapping[str, str]) -> str:
    """Return the first name with another value."""
    added = sorted(actual.keys() - expected.keys())
    for name in [*expected, *added]:
        if actual.get(name) != expected.get(name):
            return name
    return ""
