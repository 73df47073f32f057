"""One step of all ranks on one clock: which rank did what, and when, for the report."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from paceline.measure.trace import RankTrace
from paceline.measure.trace_intervals import Spans, difference, intersection, union
from paceline.telemetry.phases import WAIT

KINDS = ("data", "forward", "backward", "exchange", "waiting", "optimizer")
"""What a rank does. `exchange`: all ranks communicate; `waiting`: another one computes. The rest is not drawn."""

_RANKS = 32
_SPANS = 400  # of a rank and kind
_NARROW = 0.0005  # of the step: shorter gaps and spans are invisible


def strip_of(traces: Sequence[RankTrace]) -> dict[str, Any] | None:
    """Return the step with the median time: when each rank was in each phase, in seconds since its begin.

    With many ranks, only the first ones are kept.
    """
    steps = [_steps(trace) for trace in traces]
    count = min(map(len, steps))
    if not count:
        return None
    order = sorted(range(count), key=lambda number: steps[0][number][1] - steps[0][number][0])
    chosen = order[count // 2]
    begin = min(of_rank[chosen][0] for of_rank in steps)
    end = max(of_rank[chosen][1] for of_rank in steps)
    waits = [_phase(trace, WAIT, (begin, end)) for trace in traces]
    together = functools.reduce(intersection, waits) if len(waits) > 1 else []
    ranks = []
    for trace, wait in zip(traces[:_RANKS], waits, strict=False):
        spans = {kind: _phase(trace, kind, (begin, end)) for kind in KINDS}
        spans |= {"exchange": together, "waiting": difference(wait, together)}
        ranks.append({kind: _seconds(spans[kind], begin, end) for kind in KINDS})
    return {"step_s": round((end - begin) * 1e-6, 7), "of_ranks": len(traces), "ranks": ranks}


def _steps(trace: RankTrace) -> list[tuple[float, float]]:
    """Return begin and end of each step: a step begins with the request for its samples."""
    begins = [begin for phase, begin, _ in trace.phases if phase == "data"]
    return list(pairwise([*begins, trace.end]))


def _phase(trace: RankTrace, name: str, step: tuple[float, float]) -> Spans:
    spans = union((begin, end) for phase, begin, end in trace.phases if phase == name)
    return intersection(spans, [step])


def _seconds(spans: Spans, begin: float, end: float) -> list[tuple[float, float]]:
    """Return spans in seconds; those that a picture would not part are joined, the shortest left out."""
    least = _NARROW * (end - begin)
    joined: Spans = []
    for left, right in spans:
        if joined and left - joined[-1][1] < least:
            joined[-1] = joined[-1][0], right
        else:
            joined.append((left, right))
    longest = sorted(joined, key=lambda span: span[0] - span[1])[:_SPANS]
    seconds = []
    for left, right in sorted(longest):
        if right - left >= least:
            seconds.append((round((left - begin) * 1e-6, 7), round((right - begin) * 1e-6, 7)))
    return seconds
