"""Speed-up, efficiency and shares of time, from the step times of several world sizes."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from paceline.measure.recorded_step_times import StepPace

GOOD = 0.75
"""The efficiency that computing centres require."""


@dataclass(frozen=True)
class Size:
    """The results of one world size."""

    ranks: int
    global_batch: int
    lanes: int
    shares: str
    """Which cores or GPUs the ranks had to share, as a phrase; empty: none."""
    step_s: float
    """Median over rounds of the median over steps."""
    fastest_s: float
    slowest_s: float
    rounds_s: list[float]
    samples_per_s: float
    speedup: float
    """Samples per second divided by those of the smallest world."""
    efficiency: float
    """Speed-up divided by the ratio of ranks: p1 T1 / (pn Tn) if a step is the same work."""
    efficiency_low: float
    efficiency_high: float
    """Lowest and highest efficiency within a round."""
    data_share: float
    """Share of the step time in which ranks waited for samples."""
    exposed_share: float | None
    """Share in which they waited for communication; None: unknown."""
    exposed_how: str
    """waits: measured; estimate: how much longer a step's end takes than on one rank; none."""
    uneven_share: float | None
    """The part of it in which they waited for a slower rank; None: unknown."""


@dataclass(frozen=True)
class Scaling:
    """One scaling study."""

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
    """Machine, versions and settings."""
    sizes: list[Size]

    @property
    def largest_good(self) -> Size | None:
        """The largest world with the required efficiency."""
        return next((size for size in reversed(self.sizes) if size.efficiency >= GOOD), None)

    def as_dict(self) -> dict[str, Any]:
        """Return the study with the keys of docs/scale.md."""
        good = self.largest_good
        return asdict(self) | {
            "good_efficiency": GOOD,
            "largest_good": good.ranks if good else None,
        }

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> Scaling:
        """Return the study; unknown keys, of a later version, are ignored."""
        sizes = [Size(**_known(Size, size)) for size in content["sizes"]]
        return cls(**_known(cls, content) | {"sizes": sizes})


def _known(kind: type[Size | Scaling], content: Mapping[str, Any]) -> dict[str, Any]:
    return {field.name: content[field.name] for field in fields(kind)}


@dataclass(frozen=True)
class Trial:
    """The runs of one world size, one per round."""

    ranks: int
    lanes: int
    shares: str
    paces: list[StepPace]

    @property
    def rates(self) -> list[float]:
        """Samples per second, by round."""
        return [pace.samples / pace.seconds for pace in self.paces]


def sizes_of(trials: Sequence[Trial]) -> list[Size]:
    """Return the results of every world size, relative to the first."""
    return [_size(trial, trials[0]) for trial in trials]


def _size(trial: Trial, first: Trial) -> Size:
    seconds = [pace.seconds for pace in trial.paces]
    step_s = statistics.median(seconds)
    first_s = statistics.median(pace.seconds for pace in first.paces)
    samples = trial.paces[0].samples
    speedup = (samples / step_s) / (first.paces[0].samples / first_s)
    ratio = trial.ranks / first.ranks
    rates = zip(trial.rates, first.rates, strict=True)
    by_round = [rate / first_rate / ratio for rate, first_rate in rates]
    exposed, how = _exposed(trial, first)
    return Size(
        ranks=trial.ranks,
        global_batch=samples,
        lanes=trial.lanes,
        shares=trial.shares,
        step_s=step_s,
        fastest_s=min(seconds),
        slowest_s=max(seconds),
        rounds_s=seconds,
        samples_per_s=samples / step_s,
        speedup=speedup,
        efficiency=speedup / ratio,
        efficiency_low=min(by_round),
        efficiency_high=max(by_round),
        data_share=statistics.median(pace.data_share for pace in trial.paces),
        exposed_share=exposed,
        exposed_how=how,
        uneven_share=_median([pace.uneven_share for pace in trial.paces]),
    )


def _exposed(trial: Trial, first: Trial) -> tuple[float | None, str]:
    """Return the share of exposed communication, and how it was found.

    If waits are not visible, the end of a step shows them: after its last forward, a rank runs one backward and
    the update, on the same number of samples in every world. Any longer time than on one rank is communication.
    """
    measured = _median([pace.waited_share for pace in trial.paces])
    if measured is not None:
        return measured, "waits"
    alone_s = _median([pace.tail_s for pace in first.paces])
    if first.ranks > 1 or alone_s is None:
        return None, "none"
    shares = []
    for pace in trial.paces:
        if pace.tail_s is not None:
            longer_s = max(0.0, pace.tail_s - alone_s)
            shares.append(longer_s / pace.seconds)
    return statistics.median(shares), "estimate"


def _median(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None
