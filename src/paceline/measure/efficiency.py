"""What the times of several world sizes amount to: speed-up, efficiency, and where the time went."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from paceline.measure.recorded_step_times import StepPace

GOOD = 0.75
"""The efficiency that computing centres ask for."""


@dataclass(frozen=True)
class Size:
    """One number of ranks."""

    ranks: int
    global_batch: int
    lanes: int
    shares: str
    """What the ranks had to share, in words; empty: nothing."""
    step_s: float
    """Median over rounds of the median over steps."""
    fastest_s: float
    slowest_s: float
    rounds_s: list[float]
    samples_per_s: float
    speedup: float
    """Samples per second, over those of the smallest size."""
    efficiency: float
    """Speed-up over the ratio of the ranks: p1 T1 / (pn Tn) where a step is the same work."""
    efficiency_low: float
    efficiency_high: float
    """The same within one round each."""
    data_share: float
    """Of the time in steps, that in which ranks waited for samples."""
    exposed_share: float | None
    """That in which they waited for messages; None: it cannot be told."""
    exposed_how: str
    """waits: seen directly; estimate: what the end of a step takes longer than on one rank; none."""
    uneven_share: float | None
    """The part of it in which they waited for a slower rank; None: it cannot be told."""


@dataclass(frozen=True)
class Scaling:
    """One study."""

    name: str
    script: str
    words: list[str]
    kind: str
    """strong: the step stays the same; weak: it grows with the ranks."""
    warmup_steps: int
    steps: int
    rounds: int
    finished: str
    """Date and time."""
    facts: dict[str, Any]
    """Of the machine and of the code."""
    sizes: list[Size]

    @property
    def largest_good(self) -> Size | None:
        """The largest size whose efficiency is good."""
        return next((size for size in reversed(self.sizes) if size.efficiency >= GOOD), None)

    def as_dict(self) -> dict[str, Any]:
        """Return it as plain values; docs/scale.md says what each is."""
        good = self.largest_good
        return asdict(self) | {
            "good_efficiency": GOOD,
            "largest_good": good.ranks if good else None,
        }

    @classmethod
    def from_dict(cls, found: Mapping[str, Any]) -> Scaling:
        """Return the study of such values; others, of a later version, are left out."""
        sizes = [Size(**_known(Size, size)) for size in found["sizes"]]
        return cls(**_known(cls, found) | {"sizes": sizes})


def _known(kind: type[Size | Scaling], found: Mapping[str, Any]) -> dict[str, Any]:
    return {field.name: found[field.name] for field in fields(kind)}


@dataclass(frozen=True)
class Trial:
    """One number of ranks, and how its runs went, one a round."""

    ranks: int
    lanes: int
    shares: str
    paces: list[StepPace]

    @property
    def rates(self) -> list[float]:
        """Samples per second, by round."""
        return [pace.samples / pace.seconds for pace in self.paces]


def sizes_of(trials: Sequence[Trial]) -> list[Size]:
    """Return the figures of every size; the first one is what all are compared with."""
    return [_size(trial, trials[0]) for trial in trials]


def _size(trial: Trial, first: Trial) -> Size:
    seconds = [pace.seconds for pace in trial.paces]
    step_s, first_s = (
        statistics.median(seconds),
        statistics.median(pace.seconds for pace in first.paces),
    )
    samples = trial.paces[0].samples
    speedup = (samples / step_s) / (first.paces[0].samples / first_s)
    more = trial.ranks / first.ranks
    by_round = [mine / theirs / more for mine, theirs in zip(trial.rates, first.rates, strict=True)]
    exposed, how = _exposed(trial, first)
    return Size(
        trial.ranks,
        samples,
        trial.lanes,
        trial.shares,
        step_s,
        min(seconds),
        max(seconds),
        seconds,
        samples / step_s,
        speedup,
        speedup / more,
        min(by_round),
        max(by_round),
        statistics.median(pace.data_share for pace in trial.paces),
        exposed,
        how,
        _median([pace.uneven_share for pace in trial.paces]),
    )


def _exposed(trial: Trial, first: Trial) -> tuple[float | None, str]:
    """Return the share of exposed communication, and how it was found.

    Where the waits cannot be seen, the end of a step tells: from its last forward on, a rank runs one backward and
    the update, in every world on as many samples. What that takes longer than alone is what others cost.
    """
    seen = _median([pace.waited_share for pace in trial.paces])
    if seen is not None:
        return seen, "waits"
    alone_s = _median([pace.tail_s for pace in first.paces])
    if first.ranks > 1 or alone_s is None:
        return None, "none"
    tails = [(pace.tail_s, pace.seconds) for pace in trial.paces if pace.tail_s is not None]
    return statistics.median(
        max(0.0, tail_s - alone_s) / seconds for tail_s, seconds in tails
    ), "estimate"


def _median(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None
