"""What a run recorded after each step, and where two records first differ. Reads files only."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.errors import PacelineError
from paceline.rundir import RECORD_FILE
from paceline.safe_open import parse_json, read_text

_LARGEST_BYTES = 1 << 30  # a long run of a large model

LOSS = "the loss"
RANKS = "the weights of different ranks"
STEPS = "the number of steps"


@dataclass(frozen=True)
class RecordedStep:
    """One line of a record."""

    step: int
    loss: float
    samples: int
    ranks_agree: bool
    generators: list[int]
    """Digests of the ranks' RNG states after the step; unchanged if no random number was drawn."""
    tensors: dict[str, str]


@dataclass(frozen=True)
class Record:
    """The record of one run."""

    world: int
    exact: bool
    norms: list[str]
    epsilon: float
    """Rounding error of the coarsest dtype among the weights."""
    steps: list[RecordedStep]

    @property
    def digest(self) -> str:
        """SHA-256 of the state after the last step."""
        state = json.dumps(self.steps[-1].tensors, sort_keys=True)
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
            fix="train inside `with paceline.Run(config) as run`, with the config of "
            "`paceline.config_from_argv()`",
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
    """Return whether two runs at the same world size recorded the same losses and tensors."""
    return _compared(first) == _compared(second)


def _compared(record: Record) -> list[tuple[int, str, bool, dict[str, str]]]:
    return [(line.step, line.loss.hex(), line.ranks_agree, line.tensors) for line in record.steps]


def first_difference(reference: Record, other: Record) -> tuple[int, str] | None:
    """Return the first step that differs in two records, and the tensor or LOSS, RANKS, STEPS."""
    for expected, actual in zip(reference.steps, other.steps, strict=False):
        if difference := _difference(expected, actual):
            return expected.step, difference
    if len(reference.steps) != len(other.steps):
        return min(len(reference.steps), len(other.steps)) - 1, STEPS
    return None


def _difference(expected: RecordedStep, actual: RecordedStep) -> str:
    if not actual.ranks_agree or not expected.ranks_agree:
        return RANKS
    if expected.loss.hex() != actual.loss.hex():
        return LOSS
    added = sorted(actual.tensors.keys() - expected.tensors.keys())
    for name in [*expected.tensors, *added]:
        if actual.tensors.get(name) != expected.tensors.get(name):
            return name
    return ""
