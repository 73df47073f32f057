"""How long did each rank take for its own work, look after look? One short line each, in a file that stays small."""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.rundir import make_private, write_whole
from paceline.telemetry.heartbeat import Beat

_VALUES = 200_000  # in the file, of all ranks together: 1.4 MB
_FEWEST, _MOST = 48, 480  # lines
_LARGEST_BYTES = 1 << 23

Seconds = float | None


@dataclass(frozen=True)
class RankSample:
    """What the ranks said when they were looked at."""

    step: int
    own_s: tuple[Seconds, ...]
    """Mean seconds a step of each rank's own work, of late, in rank order; None: it had not said anything."""


class RankTimes:
    """Keeps what is seen of all ranks; when the file is full, neighbours become one."""

    def __init__(self, path: Path, world_size: int) -> None:
        self._path, self._size = path, world_size
        self._room = max(_FEWEST, min(_MOST, _VALUES // world_size))
        self._lines, self._last = -1, -1

    def add(self, beats: Sequence[Beat]) -> None:
        """Append a look, if anything has happened since the last one. A disk that fails harms no training."""
        told = {beat.rank: float(f"{beat.own_s:.3g}") for beat in beats if beat.steps}
        step = max((beat.step for beat in beats), default=0)
        if not told or step == self._last:
            return
        self._last = step
        with contextlib.suppress(OSError):
            if self._lines < 0:
                make_private(self._path.parent)
                self._lines = len(read_samples(self._path))
            self._append(RankSample(step, tuple(told.get(rank) for rank in range(self._size))))

    def _append(self, look: RankSample) -> None:
        if self._lines >= self._room:
            looks = downsample(read_samples(self._path), self._room // 2)
            write_whole(self._path, b"".join(map(_line, looks)), durable=False)
            self._lines = len(looks)
        file = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            os.write(file, _line(look))
        finally:
            os.close(file)
        self._lines += 1


def _line(look: RankSample) -> bytes:
    return (
        json.dumps({"step": look.step, "own_s": look.own_s}, separators=(",", ":")).encode() + b"\n"
    )


def read_samples(path: Path) -> list[RankSample]:
    """Return the looks of the surviving line of history: those after a step that was gone back to are left out.

    What cannot be read is passed over.
    """
    found: list[RankSample] = []
    try:
        with path.open("rb") as file:
            lines = file.read(_LARGEST_BYTES).splitlines()
    except OSError:
        return []
    for line in lines:
        with contextlib.suppress(ValueError, KeyError, TypeError, AttributeError, RecursionError):
            look = _parsed(json.loads(line))
            while found and found[-1].step >= look.step:
                found.pop()
            found.append(look)
    return found


def _parsed(found: Any) -> RankSample:
    values = [None if value is None else float(value) for value in found["own_s"]]
    if not values or any(value is not None and not 0 <= value < math.inf for value in values):
        raise ValueError
    return RankSample(int(found["step"]), tuple(values))


def downsample(looks: Sequence[RankSample], most: int) -> list[RankSample]:
    """Return about so many looks, evenly spread over the steps, each the mean of its neighbours; worlds of another size stay apart.

    >>> downsample([RankSample(1, (1.0, None)), RankSample(2, (3.0, 5.0)), RankSample(3, (1.0,)), RankSample(4, (2.0,))], 2)
    [Look(step=2, own_s=(2.0, 5.0)), Look(step=4, own_s=(1.5,))]
    """
    if len(looks) <= most:
        return list(looks)
    first, width = looks[0].step, (looks[-1].step - looks[0].step + 1) / most
    found: dict[tuple[int, int], list[RankSample]] = {}
    for look in looks:
        found.setdefault((int((look.step - first) / width), len(look.own_s)), []).append(look)
    return [
        RankSample(
            some[-1].step,
            tuple(mean(values) for values in zip(*(look.own_s for look in some), strict=True)),
        )
        for some in found.values()
    ]


def mean(values: Iterable[Seconds]) -> Seconds:
    """Return the mean of what is known.

    >>> mean([1.0, None, 2.0]), mean([None])
    (1.5, None)
    """
    known = [value for value in values if value is not None]
    return float(f"{sum(known) / len(known):.3g}") if known else None
