"""One trace of all ranks on one clock, for Perfetto and chrome://tracing."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.errors import EnvironmentUnfit
from paceline.rundir import CLOCK_MARK, TENSORBOARD, profile_facts
from paceline.safe_open import UnsafeFile, parse_json, read_json, reading

_LARGEST_FACTS = 1 << 26
_LARGEST_TRACE = 1 << 32  # unpacked

Event = dict[str, Any]

_FLOWS = 10**9  # flow ids per rank: every rank counts from 0
_PROCESSES = 1000  # process ids per rank
_FLOW_KINDS = {"s", "t", "f"}


@dataclass(frozen=True)
class RankTrace:
    """The trace of a rank; times are in microseconds on rank 0's clock since its window began."""

    rank: int
    facts: Mapping[str, Any]
    events: Sequence[Event]
    phases: Sequence[tuple[str, float, float]]
    begin: float
    end: float


def read_traces(folder: Path) -> list[RankTrace]:
    """Return the traces of all ranks; raise EnvironmentUnfit if one is missing or damaged."""
    facts = [_facts(folder, 0)]
    try:
        facts += [_facts(folder, rank) for rank in range(1, int(facts[0]["ranks"]))]
        return [_on_one_clock(folder, of_rank, facts[0]) for of_rank in facts]
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
            f"the profile in {folder} is damaged: {error!r}", fix="run `paceline profile` again"
        ) from error


def _facts(folder: Path, rank: int) -> dict[str, Any]:
    try:
        facts: dict[str, Any] = read_json(profile_facts(folder, rank), _LARGEST_FACTS)
    except (OSError, ValueError) as error:
        raise EnvironmentUnfit(
            f"rank {rank} wrote no profile into {folder}",
            fix="train for more steps than --skip and --steps together, with `paceline.Run`",
        ) from error
    return facts


def _on_one_clock(folder: Path, facts: Mapping[str, Any], first: Mapping[str, Any]) -> RankTrace:
    offset = clock_offset(first, facts)
    zero = first["begin_ns"]

    def to_us(moment_ns: float) -> float:
        return float(moment_ns + offset - zero) / 1e3

    events = _events(folder / TENSORBOARD / Path(facts["trace"]).name)
    marks = [event for event in events if event.get("name") == CLOCK_MARK and "dur" in event]
    marks.sort(key=lambda event: float(event["ts"]))
    pairs = zip(marks, facts["marks_ns"], strict=False)
    # During a longer one the process was interrupted.
    mark, mark_ns = min(pairs, key=lambda pair: float(pair[0]["dur"]))
    shift = to_us(mark_ns) - float(mark["ts"])
    phases = [(str(phase), to_us(begin), to_us(end)) for phase, begin, end in facts["phases"]]
    shifted = [
        event | {"ts": float(event["ts"]) + shift} if "ts" in event else event for event in events
    ]
    return RankTrace(
        facts["rank"], facts, shifted, phases, to_us(facts["begin_ns"]), to_us(facts["end_ns"])
    )


def _events(path: Path) -> list[Event]:
    with reading(path) as packed, gzip.open(packed) as file:
        content = file.read(_LARGEST_TRACE + 1)
    if len(content) > _LARGEST_TRACE:
        raise UnsafeFile(path, f"it has more than {_LARGEST_TRACE:,} bytes, unpacked")
    events: list[Event] = parse_json(content.decode(errors="replace"))["traceEvents"]
    return events


def clock_offset(first: Mapping[str, Any], other: Mapping[str, Any]) -> float:
    """Return the nanoseconds to add to a rank's clock to get rank 0's.

    No message arrives before it was sent. So each round trip bounds the offset from both sides; return the middle.

    >>> first = {"boot": "a", "clocks": [[1000, 1100], [2000, 2050]]}
    >>> clock_offset(first, {"boot": "a", "clocks": []})
    0.0
    >>> clock_offset(first, {"boot": "b", "clocks": [[500, 610], [1500, 1560]]})
    495.0
    """
    if first["boot"] == other["boot"]:
        return 0.0
    rounds = list(zip(first["clocks"], other["clocks"], strict=True))
    least = max(sent - received for (sent, _), (_, received) in rounds)
    most = min(received - sent for (_, received), (sent, _) in rounds)
    return float(least + most) / 2


def merged(traces: Sequence[RankTrace]) -> dict[str, Any]:
    """Return one trace with the processes of all ranks, and the phases of a rank above its processes."""
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
