"""History of each rank's own time per step, memory and processors: a line per sample, in a file that stays small."""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.rundir import make_private, write_whole
from paceline.safe_open import open_to_write, parse_json, reading
from paceline.telemetry.heartbeat import Beat
from paceline.telemetry.usage import USAGE, Spread, merge_spreads, spread_over

_VALUES = 200_000  # in the file, of all ranks together: 1.4 MB
_FEWEST_LINES, _MOST_LINES = 48, 480
_LARGEST_BYTES = 1 << 23

Seconds = float | None


@dataclass(frozen=True)
class RankSample:
    """Times of all ranks at one moment."""

    step: int
    own_s: tuple[Seconds, ...]
    """Mean seconds per recent step of each rank's own work, in rank order; None: no beat yet."""
    usage: Mapping[str, Spread] = field(default_factory=dict)
    """Memory and processors in use: mean, lowest and highest value of all ranks."""


class RankTimes:
    """Appends samples to a file; when it is full, neighbouring samples are averaged."""

    def __init__(self, path: Path, world_size: int) -> None:
        self._path, self._size = path, world_size
        self._capacity = max(_FEWEST_LINES, min(_MOST_LINES, _VALUES // world_size))
        self._lines, self._last_step = -1, -1

    def add(self, beats: Sequence[Beat]) -> None:
        """Append a sample, if a step was completed since the last one.

        Errors of the disk are ignored.
        """
        times = {beat.rank: float(f"{beat.own_s:.3g}") for beat in beats if beat.steps}
        step = max((beat.step for beat in beats), default=0)
        if not times or step == self._last_step:
            return
        self._last_step = step
        with contextlib.suppress(OSError):
            if self._lines < 0:
                make_private(self._path.parent)
                self._lines = len(read_samples(self._path))
            own_s = tuple(map(times.get, range(self._size)))
            self._append(RankSample(step, own_s, spread_over(beat.usage for beat in beats)))

    def _append(self, sample: RankSample) -> None:
        if self._lines >= self._capacity:
            samples = downsample(read_samples(self._path), self._capacity // 2)
            write_whole(self._path, b"".join(map(_line, samples)), durable=False)
            self._lines = len(samples)
        file = open_to_write(self._path, os.O_WRONLY | os.O_APPEND)
        try:
            os.write(file, _line(sample))
        finally:
            os.close(file)
        self._lines += 1


def _line(sample: RankSample) -> bytes:
    facts = {"step": sample.step, "own_s": sample.own_s, "usage": sample.usage}
    return json.dumps(facts, separators=(",", ":")).encode() + b"\n"


def read_samples(path: Path) -> list[RankSample]:
    """Return the samples of a file.

    Steps that were repeated after a restart count once; damaged lines are skipped.
    """
    samples: list[RankSample] = []
    try:
        with reading(path) as file:
            lines = file.read(_LARGEST_BYTES).splitlines()
    except OSError:
        return []
    for line in lines:
        with contextlib.suppress(ValueError, KeyError, TypeError, AttributeError, OverflowError):
            sample = _parse(parse_json(line))
            while samples and samples[-1].step >= sample.step:
                samples.pop()
            samples.append(sample)
    return samples


def _parse(facts: Any) -> RankSample:
    values = [None if value is None else float(value) for value in facts["own_s"]]
    if not values or any(value is not None and not 0 <= value < math.inf for value in values):
        raise ValueError
    return RankSample(int(facts["step"]), tuple(values), _parse_usage(facts.get("usage", {})))


def _parse_usage(facts: Mapping[str, Any]) -> dict[str, Spread]:
    usage = {}
    for name in USAGE:
        if name in facts:
            mean_, low, high = map(float, facts[name])
            if 0 <= low <= mean_ <= high < math.inf:
                usage[name] = (mean_, low, high)
    return usage


def downsample(samples: Sequence[RankSample], most: int) -> list[RankSample]:
    """Return about `most` samples at even distances in steps, each a mean; different world sizes are not mixed.

    >>> downsample([RankSample(1, (1.0, None)), RankSample(2, (3.0, 5.0)), RankSample(3, (1.0,)), RankSample(4, (2.0,))], 2)
    [RankSample(step=2, own_s=(2.0, 5.0), usage={}), RankSample(step=4, own_s=(1.5,), usage={})]
    """
    if len(samples) <= most:
        return list(samples)
    first, last = samples[0].step, samples[-1].step
    width = (last - first + 1) / most
    groups: dict[tuple[int, int], list[RankSample]] = {}
    for sample in samples:
        key = int((sample.step - first) / width), len(sample.own_s)
        groups.setdefault(key, []).append(sample)
    return [_mean_sample(group) for group in groups.values()]


def _mean_sample(group: Sequence[RankSample]) -> RankSample:
    by_rank = zip(*(sample.own_s for sample in group), strict=True)
    usage = merge_spreads(sample.usage for sample in group)
    return RankSample(group[-1].step, tuple(map(mean, by_rank)), usage)


def mean(values: Iterable[Seconds]) -> Seconds:
    """Return the mean of the values that are not None, to three digits.

    >>> mean([1.0, None, 2.0]), mean([None])
    (1.5, None)
    """
    known = [value for value in values if value is not None]
    return float(f"{sum(known) / len(known):.3g}") if known else None
