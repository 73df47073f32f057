"""What the ranks of one run say of their steps: how long a step takes, and what share of it is waiting."""

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
    """One step of one rank; the times are of one clock on each node."""

    samples: int
    asked_s: float
    """When it asked for the samples."""
    got_s: float
    ready_s: float
    """When it had done its own part: from there on it also waits for others."""
    ended_s: float
    waited_s: float
    """How long it did nothing but wait for messages."""

    @property
    def seconds(self) -> float:
        """How long the step took."""
        return self.ended_s - self.asked_s


@dataclass(frozen=True)
class StepPace:
    """How one run went."""

    seconds: float
    """Median over steps of a step on its slowest rank."""
    samples: int
    """Of a step."""
    data_share: float
    """Of all time in steps, that in which ranks waited for samples."""
    waited_share: float | None
    """The same for messages; None: nobody can see it from Python."""
    uneven_share: float | None
    """Of all time, that in which ranks waited for a slower one to come so far as to send."""
    tail_s: float | None
    """Median from the last forward on: a backward, what is sent, the update; None: nobody can see that."""


@dataclass(frozen=True)
class RecordedRun:
    """One run, as its ranks wrote it down."""

    facts: dict[str, Any]
    devices: tuple[str, ...]
    steps: list[tuple[RankStep, ...]]
    """By step, the moments of all ranks."""

    @property
    def most_samples(self) -> int:
        """Samples of the largest step."""
        return max(step[0].samples for step in self.steps)

    def whole(self, warmup: int) -> list[tuple[RankStep, ...]]:
        """Return the steps after the warm-up; a short last step of an epoch does not count."""
        return [step for step in self.steps[warmup:] if step[0].samples == self.most_samples]


def read_run(folder: Path, ranks: int, name: str) -> RecordedRun:
    """Return what all ranks of a run have written down."""
    found = []
    for rank in range(ranks):
        file = times_file(folder, rank)
        if not file.is_file():
            raise ConfigError(
                f"{name} wrote no times of its steps down",
                fix="train with `paceline.Trainer`, which does when it is asked",
            )
        found.append(json.loads(file.read_text(encoding="utf-8")))
    moments = [[RankStep(*step) for step in each["steps"]] for each in found]
    facts = {key: value for key, value in found[0].items() if key != "steps"}
    return RecordedRun(
        facts, tuple(each["device"] for each in found), list(zip(*moments, strict=True))
    )


def pace_of(ran: RecordedRun, warmup: int) -> StepPace:
    """Return the medians and shares of all whole steps after the warm-up."""
    whole = ran.whole(warmup)
    total_s = sum(moment.seconds for step in whole for moment in step)
    waits, one_clock = ran.facts["sees_waits"], ran.facts["nodes"] == 1
    return StepPace(
        statistics.median(max(moment.seconds for moment in step) for step in whole),
        ran.most_samples,
        sum(moment.got_s - moment.asked_s for step in whole for moment in step) / total_s,
        sum(moment.waited_s for step in whole for moment in step) / total_s if waits else None,
        sum(_uneven(step) for step in whole) / total_s if waits and one_clock else None,
        _tail(whole) if ran.facts["sees_ready"] else None,
    )


def _tail(steps: Sequence[Sequence[RankStep]]) -> float:
    return statistics.median(
        statistics.mean(moment.ended_s - moment.ready_s for moment in step) for step in steps
    )


def _uneven(step: Sequence[RankStep]) -> float:
    """Return how long the ranks of a step waited for the last one to be ready; their clock is one."""
    last = max(moment.ready_s for moment in step)
    return sum(min(moment.waited_s, last - moment.ready_s) for moment in step)
