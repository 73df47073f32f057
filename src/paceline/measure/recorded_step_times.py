"""Step times that the ranks of a run have recorded: how long a step takes, and which share of it is waiting."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from paceline.errors import ConfigError
from paceline.rundir import times_file


class RankStep(NamedTuple):
    """One step of one rank; the ranks of a node share a clock."""

    samples: int
    asked_s: float
    """When it requested the samples."""
    got_s: float
    ready_s: float
    """When its last forward was done: after that it may wait for other ranks."""
    ended_s: float
    waited_s: float
    """How long it only waited for communication."""

    @property
    def seconds(self) -> float:
        """The duration of the step."""
        return self.ended_s - self.asked_s


@dataclass(frozen=True)
class StepPace:
    """Medians and shares of one run."""

    seconds: float
    """Median step time; a step lasts as long as on its slowest rank."""
    samples: int
    """Samples per step."""
    data_share: float
    """Share of the step time in which ranks waited for samples."""
    waited_share: float | None
    """Share in which they waited for communication; None: not visible from Python."""
    uneven_share: float | None
    """Share in which they waited until a slower rank had something to send."""
    tail_s: float | None
    """Median time after the last forward: backward, communication, update; None: not visible."""


@dataclass(frozen=True)
class RecordedRun:
    """The recorded steps of one run."""

    facts: dict[str, Any]
    devices: tuple[str, ...]
    steps: list[tuple[RankStep, ...]]
    """All ranks of each step."""

    @property
    def most_samples(self) -> int:
        """Samples in the largest step."""
        return max(step[0].samples for step in self.steps)

    def whole(self, warmup: int) -> list[tuple[RankStep, ...]]:
        """Return the steps after the warm-up, without the shorter last step of an epoch."""
        return [step for step in self.steps[warmup:] if step[0].samples == self.most_samples]


def read_run(folder: Path, ranks: int, name: str) -> RecordedRun:
    """Return the recorded steps of all ranks; raise ConfigError if there are none."""
    records = []
    for rank in range(ranks):
        file = times_file(folder, rank)
        if not file.is_file():
            raise ConfigError(
                f"{name} did not record its step times",
                fix="train with `paceline.Run`, which records them on request",
            )
        records.append(json.loads(file.read_text(encoding="utf-8")))
    by_rank = []
    for record in records:
        steps = record.pop("steps")
        by_rank.append([RankStep(*step) for step in steps])
    devices = tuple(record["device"] for record in records)
    return RecordedRun(records[0], devices, list(zip(*by_rank, strict=True)))


def pace_of(run: RecordedRun, warmup: int) -> StepPace:
    """Return medians and shares of all full steps after the warm-up."""
    steps = run.whole(warmup)
    ranks = [rank for step in steps for rank in step]
    total_s = sum(rank.seconds for rank in ranks)
    waited_share = uneven_share = None
    if run.facts["sees_waits"]:
        waited_share = sum(rank.waited_s for rank in ranks) / total_s
        if run.facts["nodes"] == 1:  # one clock
            uneven_share = sum(_uneven_s(step) for step in steps) / total_s
    return StepPace(
        seconds=statistics.median(max(rank.seconds for rank in step) for step in steps),
        samples=run.most_samples,
        data_share=sum(rank.got_s - rank.asked_s for rank in ranks) / total_s,
        waited_share=waited_share,
        uneven_share=uneven_share,
        tail_s=statistics.median(map(_tail_s, steps)) if run.facts["sees_ready"] else None,
    )


def _tail_s(step: Sequence[RankStep]) -> float:
    return statistics.mean(rank.ended_s - rank.ready_s for rank in step)


def _uneven_s(step: Sequence[RankStep]) -> float:
    """Return the seconds in which the ranks of a step waited for the last one to be ready."""
    last_s = max(rank.ready_s for rank in step)
    return sum(min(rank.waited_s, last_s - rank.ready_s) for rank in step)
