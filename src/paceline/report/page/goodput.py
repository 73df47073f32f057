"""What became of a run: its goodput, why it restarted, and both as one sentence."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy

from paceline.redact import without_logins
from paceline.report.history import as_count, as_number
from paceline.report.page.event_columns import EventColumns, Start
from paceline.units import human_time

_LOST = "it ended without a message: it was killed, or its node was lost"
_AGAIN = "it had finished, and was started again"
_MUCH_WAITING = 0.1  # of a step: worth a sentence
_CAUSES = 3  # in the sentence
_LONGEST_CAUSE = 160

Run = Mapping[str, Any]


def goodput_of(columns: EventColumns) -> dict[str, float] | None:
    """Return the wall time of a run and its parts in seconds; `goodput` is the share of useful steps.

    The time between a requested stop and the next start is no part of it.
    """
    per_step = _step_seconds(columns)
    if not columns.starts or not per_step:
        return None
    down_s = sum(_down_s(*pair) for pair in pairwise(columns.starts))
    wall_s = sum(_alive_s(start) for start in columns.starts) + down_s
    if not wall_s > 0:
        return None
    left_s = wall_s - down_s
    useful_s = min(left_s, _useful_s(columns, per_step))
    lost = sum(start.lost_steps for start in columns.starts)
    repeated_s = min(left_s - useful_s, lost * float(numpy.median([s for _, s in per_step])))
    return {
        "wall_s": wall_s,
        "useful_s": useful_s,
        "repeated_s": repeated_s,
        "down_s": down_s,
        "other_s": left_s - useful_s - repeated_s,
        "goodput": useful_s / wall_s,
    }


def _alive_s(start: Start) -> float:
    return (start.progress_s if start.ending == "failed" else start.last_s) - start.time_s


def _down_s(before: Start, after: Start) -> float:
    """Return the time from the last event of a start until the next one, if nobody had asked it to stop."""
    if before.ending in {"stopped", "ended"}:
        return 0.0
    return max(0.0, after.time_s - (before.time_s + _alive_s(before)))


def _step_seconds(columns: EventColumns) -> list[tuple[int, float]]:
    """Return the seconds per step up to each step or epoch event that counts."""
    batch = as_number(columns.started.get("global_batch"), 0.0)
    pairs = list(zip(columns.steps["step"], columns.steps["samples_per_s"], strict=True))
    if not pairs:
        pairs = [
            (as_number(e.get("step")), as_number(e.get("samples_per_s"))) for e in columns.epochs
        ]
    return [(as_count(step), batch / rate) for step, rate in pairs if rate > 0 and batch > 0]


def _useful_s(columns: EventColumns, per_step: Sequence[tuple[int, float]]) -> float:
    """Return the time of all steps that count; steps after the last event are assumed to be typical."""
    useful_s, before = 0.0, 0
    for step, seconds in per_step:
        useful_s += max(0, step - before) * seconds
        before = max(before, step)
    last = columns.starts[-1].step
    return useful_s + max(0, last - before) * float(numpy.median([s for _, s in per_step]))


def restarts_of(columns: EventColumns) -> list[dict[str, Any]]:
    """Return when, where and why each start after the first became necessary."""
    restarts = []
    for before, after in pairwise(columns.starts):
        causes = {"": _LOST, "ended": _AGAIN}
        restarts.append(
            {
                "time_s": after.time_s,
                "from_step": after.from_step,
                "lost_steps": before.lost_steps,
                "down_s": _down_s(before, after),
                "cause": without_logins(before.reason) or causes.get(before.ending, before.ending),
            }
        )
    return restarts


def verdict_of_run(run: Run) -> str:
    """Return how a run went in a sentence or two."""
    spent = run["goodput"]
    parts = [_progress(run, spent)]
    if run["restarts_because"]:
        parts.append(_restarts(run["restarts_because"]))
    if run["lost_steps"]:
        parts.append(f"{_count(run['lost_steps'], 'step')} repeated")
    sentence = ", ".join(parts)
    if spent:
        sentence += f"; goodput {spent['goodput']:.0%}"
    return f"{sentence}.{_waiting(run)}"


def _progress(run: Run, spent: Run | None) -> str:
    took = human_time(spent["wall_s"]) if spent else ""
    phase = run["phase"]
    if phase == "ended":
        return f"Finished {_count(run['step'], 'step')}{took and f' in {took}'}"
    if not run["starts"]:
        return "No step was reported"
    words = {
        "stopped": "Stopped after",
        "failed": "Failed after",
        "lost": "Ended without a message after",
    }
    steps = f"step {run['step']:,} of {run['total_steps']:,}{took and f' and {took}'}"
    why = f" ({brief(run['reason'])})" if phase in words and run["reason"] else ""
    return f"{words.get(phase, 'At')} {steps}{why}"


def _restarts(restarts: Sequence[Run]) -> str:
    causes = Counter(brief(restart["cause"]) for restart in restarts)
    named = [f"{n} x {cause}" if n > 1 else cause for cause, n in causes.most_common(_CAUSES)]
    more = ["..."] if len(causes) > _CAUSES else []
    return f"{_count(len(restarts), 'restart')} ({'; '.join([*named, *more])})"


def brief(cause: str) -> str:
    """Return a cause without node and step, for use within brackets.

    >>> brief("rank 1 (node vm) was killed (SIGKILL), in step 67")
    'rank 1 was killed, SIGKILL'
    """
    cause = re.sub(r" \(node [^)]*\)|, in step \d+", "", cause)
    return re.sub(r" \(([^)]*)\)", r", \1", cause)[:_LONGEST_CAUSE]


def _waiting(run: Run) -> str:
    parts = run["breakdown"]
    wait_s = parts["phases"].get("wait", parts["rest_s"]) if parts else 0.0
    total_s = (sum(parts["phases"].values()) or parts["step_s"]) if parts else 0.0
    if run["world_size"] < 2 or not total_s or wait_s < _MUCH_WAITING * total_s:
        return ""
    return f" {wait_s / total_s:.0%} of a step is communication, and waiting for other ranks."


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
