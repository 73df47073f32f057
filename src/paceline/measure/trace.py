"""One trace of all ranks on one clock: what Perfetto and chrome://tracing show."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.errors import EnvironmentUnfit
from paceline.rundir import CLOCK_MARK, TENSORBOARD, profile_facts

Event = dict[str, Any]

_FLOWS = 10**9  # ids of arrows of a rank: each rank counts its own
_PROCESSES = 1000  # numbers of processes of a rank
_FLOW_KINDS = {"s", "t", "f"}


@dataclass(frozen=True)
class RankTrace:
    """What a rank measured, with times in microseconds by the clock of rank 0 since the window began on it."""

    rank: int
    facts: Mapping[str, Any]
    events: Sequence[Event]
    phases: Sequence[tuple[str, float, float]]
    begin: float
    end: float


def read_traces(folder: Path) -> list[RankTrace]:
    """Return what all ranks measured."""
    facts = [_facts(folder, 0)]
    try:
        facts += [_facts(folder, rank) for rank in range(1, int(facts[0]["ranks"]))]
        return [_placed(folder, mine, facts[0]) for mine in facts]
    except (
        OSError,
        EOFError,
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
        StopIteration,
        zlib.error,
    ) as error:
        raise EnvironmentUnfit(
            f"the profile in {folder} is damaged: {error!r}", fix="make it again"
        ) from error


def _facts(folder: Path, rank: int) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads(profile_facts(folder, rank).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise EnvironmentUnfit(
            f"rank {rank} has left no profile in {folder}",
            fix="let the training have more steps than --skip and --steps together, and train with `paceline.Trainer`",
        ) from error
    return found


def _placed(folder: Path, mine: Mapping[str, Any], first: Mapping[str, Any]) -> RankTrace:
    offset = clock_offset(first, mine)
    zero = first["begin_ns"]

    def place(moment_ns: float) -> float:
        return float(moment_ns + offset - zero) / 1e3

    events = _events(folder / TENSORBOARD / Path(mine["trace"]).name)
    mark = next(
        float(event["ts"]) for event in events if event.get("name") == CLOCK_MARK and "ts" in event
    )
    shift = place(mine["mark_ns"]) - mark
    phases = [(str(phase), place(begin), place(end)) for phase, begin, end in mine["phases"]]
    shifted = [
        event | {"ts": float(event["ts"]) + shift} if "ts" in event else event for event in events
    ]
    return RankTrace(
        mine["rank"], mine, shifted, phases, place(mine["begin_ns"]), place(mine["end_ns"])
    )


def _events(path: Path) -> list[Event]:
    with gzip.open(path, "rt", encoding="utf-8", errors="replace") as file:
        found: list[Event] = json.load(file)["traceEvents"]
    return found


def clock_offset(first: Mapping[str, Any], mine: Mapping[str, Any]) -> float:
    """Return what must be added to a rank's clock to get rank 0's, in ns.

    Nobody hears a word before it is spoken. So each round gives a bound from either side, and the truth lies between.

    >>> first = {"boot": "a", "clocks": [[1000, 1100], [2000, 2050]]}
    >>> clock_offset(first, {"boot": "a", "clocks": []})
    0.0
    >>> clock_offset(first, {"boot": "b", "clocks": [[500, 610], [1500, 1560]]})
    495.0
    """
    if first["boot"] == mine["boot"]:
        return 0.0
    rounds = list(zip(first["clocks"], mine["clocks"], strict=True))
    least = max(spoke - heard for (spoke, _), (_, heard) in rounds)
    most = min(heard - spoke for (_, heard), (spoke, _) in rounds)
    return float(least + most) / 2


def merged(traces: Sequence[RankTrace]) -> dict[str, Any]:
    """Return one trace: the processes of every rank beside each other, and its phases above them."""
    return {
        "displayTimeUnit": "ms",
        "traceEvents": [event for trace in traces for event in _of_rank(trace)],
    }


def _of_rank(trace: RankTrace) -> Iterator[Event]:
    base = trace.rank * _PROCESSES
    numbers: dict[str, int] = {}
    yield from _named(base, f"rank {trace.rank} on {trace.facts['node']}: phases")
    for phase, begin, end in trace.phases:
        yield {
            "ph": "X",
            "cat": "phase",
            "name": phase,
            "pid": base,
            "tid": 0,
            "ts": begin,
            "dur": end - begin,
        }
    for event in trace.events:
        process = str(event.get("pid", ""))
        if process not in numbers:
            numbers[process] = base + 1 + len(numbers)
            yield from _named(numbers[process], f"rank {trace.rank}: {process or 'marks'}")
        if event.get("ph") == "M" and event.get("name") in {"process_name", "process_sort_index"}:
            continue
        own: Event = event | {"pid": numbers[process]}
        if event.get("ph") in _FLOW_KINDS and isinstance(event.get("id"), int):
            own["id"] = event["id"] + trace.rank * _FLOWS
        yield own


def _named(process: int, name: str) -> Iterator[Event]:
    yield {"ph": "M", "name": "process_name", "pid": process, "tid": 0, "args": {"name": name}}
    yield {
        "ph": "M",
        "name": "process_sort_index",
        "pid": process,
        "tid": 0,
        "args": {"sort_index": process},
    }
