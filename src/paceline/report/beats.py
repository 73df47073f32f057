"""Which rank is where, and which one holds the others up."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from paceline.scale.batch import share
from paceline.world.heartbeat import Beat

CLEARLY = 1.2
"""From this ratio on, a rank is slower than the others, rather than unlucky."""


@dataclass(frozen=True)
class Slowest:
    """The rank that holds the others up."""

    beat: Beat
    times: float
    """Its own time a step, in terms of the median of the others."""


def read_beats(folder: Path, world_size: int, since_s: float) -> list[Beat]:
    """Return the beats of a world since it was started; those of an earlier one, which may lie around, say nothing."""
    found = [_read(path) for path in sorted(folder.glob("*.beat"))]
    return [beat for beat in found if beat and beat.rank < world_size and beat.time_s >= since_s]


def _read(path: Path) -> Beat | None:
    try:
        return Beat(**json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None


def slowest(beats: Sequence[Beat], lanes: int, world_size: int) -> Slowest | None:
    """Return the rank that is clearly slower than those with as many lanes; nothing if none is.

    >>> beats = [Beat(rank, "n1", 9, 0.0, own_s, 0.0) for rank, own_s in enumerate([0.1, 0.1, 0.15, 0.11])]
    >>> slowest(beats, lanes=4, world_size=4)
    Slowest(beat=Beat(rank=2, node='n1', step=9, time_s=0.0, own_s=0.15, data_s=0.0), times=1.5)
    >>> slowest(beats[:2], lanes=4, world_size=4) is None
    True
    """
    alike: dict[int, list[Beat]] = defaultdict(list)
    for beat in beats:
        alike[len(share(lanes, beat.rank, world_size))].append(beat)
    found = [_slowest_of(group) for group in alike.values() if len(group) > 1]
    return max((slow for slow in found if slow.times > CLEARLY), key=lambda slow: slow.times, default=None)


def _slowest_of(group: Sequence[Beat]) -> Slowest:
    worst = max(group, key=lambda beat: beat.own_s)
    usual = median(beat.own_s for beat in group if beat is not worst)
    return Slowest(worst, round(worst.own_s / max(usual, 1e-9), 2))
