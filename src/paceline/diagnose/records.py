"""What recorded runs hold, and where two of them part. Reads files only."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.errors import PacelineError

RECORD = "record.jsonl"
DUMP = "tensors.safetensors"
LOSS = "the loss"


@dataclass(frozen=True)
class RecordedStep:
    """One line of a record."""

    step: int
    loss: float
    samples: int
    ranks_agree: bool
    drew: bool
    tensors: dict[str, str]


@dataclass(frozen=True)
class Record:
    """The record of one run."""

    world: int
    exact: bool
    norms: list[str]
    steps: list[RecordedStep]

    @property
    def digest(self) -> str:
        """One SHA-256 over the state after the last step."""
        return hashlib.sha256(json.dumps(self.steps[-1].tensors, sort_keys=True).encode()).hexdigest()


def read_record(folder: Path, name: str) -> Record:
    """Read what a run recorded, or say that it recorded nothing."""
    path = folder / RECORD
    if not path.is_file():
        raise PacelineError(
            f"{name} left no record of its steps",
            fix="train with `paceline.Trainer`, or call `paceline.Recorder(config, world)` in your loop; give it the config of `paceline.config_from_argv()`",
        )
    head, *lines = (json.loads(line) for line in path.read_text(encoding="utf-8").splitlines())
    if len(lines) < 2:
        raise PacelineError(
            f"{name} recorded no step", fix="call `recorder.start` before the loop and `recorder.step` after every step"
        )
    return Record(head["world"], head["exact"], head["norms"], [_step(line) for line in lines])


def _step(line: dict[str, Any]) -> RecordedStep:
    return RecordedStep(**line | {"loss": float.fromhex(line["loss"])})


def first_difference(one: Record, other: Record) -> tuple[int, str] | None:
    """Return the first step, and the first tensor or the loss in it, that differ in two records."""
    for mine, theirs in zip(one.steps, other.steps, strict=False):
        if not theirs.ranks_agree or not mine.ranks_agree:
            return mine.step, "the weights of different ranks"
        if mine.loss.hex() != theirs.loss.hex():
            return mine.step, LOSS
        for name, digest in mine.tensors.items():
            if theirs.tensors.get(name) != digest:
                return mine.step, name
    if len(one.steps) != len(other.steps):
        return min(len(one.steps), len(other.steps)), "the number of steps"
    return None
