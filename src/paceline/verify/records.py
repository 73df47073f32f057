"""What recorded runs hold, and where two of them part. Reads files only."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.errors import PacelineError
from paceline.rundir import RECORD_FILE

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
    """Digests of the ranks' random states after the step; equal to those before it where nothing was drawn."""
    tensors: dict[str, str]


@dataclass(frozen=True)
class Record:
    """The record of one run."""

    world: int
    exact: bool
    norms: list[str]
    epsilon: float
    """Rounding error of the coarsest type among the weights."""
    steps: list[RecordedStep]

    @property
    def digest(self) -> str:
        """One SHA-256 over the state after the last step."""
        return hashlib.sha256(
            json.dumps(self.steps[-1].tensors, sort_keys=True).encode()
        ).hexdigest()


def read_record(folder: Path, name: str) -> Record:
    """Read what a run recorded, or say that it recorded nothing."""
    path = folder / RECORD_FILE
    if not path.is_file():
        raise PacelineError(
            f"{name} left no record of its steps",
            fix="train with `paceline.Trainer`, or call `paceline.Recorder(config, world)` in your loop; give it the config of `paceline.config_from_argv()`",
        )
    head, *lines = (json.loads(line) for line in path.read_text(encoding="utf-8").splitlines())
    if len(lines) < 2:
        raise PacelineError(
            f"{name} recorded no step",
            fix="call `recorder.start` before the loop and `recorder.step` after every step",
        )
    return Record(**head, steps=[_step(line) for line in lines])


def _step(line: dict[str, Any]) -> RecordedStep:
    return RecordedStep(**line | {"loss": float.fromhex(line["loss"])})


def is_repeat(one: Record, other: Record) -> bool:
    """Return whether two runs of the same world left the same losses and tensors."""
    left, right = (
        [(line.step, line.loss.hex(), line.ranks_agree, line.tensors) for line in record.steps]
        for record in (one, other)
    )
    return left == right


def first_difference(one: Record, other: Record) -> tuple[int, str] | None:
    """Return the first step, and the first tensor or the loss in it, that differ in two records."""
    for mine, theirs in zip(one.steps, other.steps, strict=False):
        if not theirs.ranks_agree or not mine.ranks_agree:
            return mine.step, RANKS
        if mine.loss.hex() != theirs.loss.hex():
            return mine.step, LOSS
        for name in [*mine.tensors, *sorted(theirs.tensors.keys() - mine.tensors.keys())]:
            if theirs.tensors.get(name) != mine.tensors.get(name):
                return mine.step, name
    if len(one.steps) != len(other.steps):
        return min(len(one.steps), len(other.steps)) - 1, STEPS
    return None
