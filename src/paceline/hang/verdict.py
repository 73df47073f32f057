"""What makes a run hang: the verdict, the phrases of its sentence, and its file.

The file outlives the ranks: once they have exited, it is no longer visible which rank was stopped.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Literal, get_args

from paceline.hang.flight_recorder import Collective
from paceline.hang.rank_report import RankReport
from paceline.rundir import RunDir, write_whole
from paceline.safe_open import read_json

Cause = Literal[
    "none",
    "debugger",
    "exception",
    "another collective",
    "another way",
    "another shape",
    "one batch more",
    "one batch less",
    "stopped",
    "silent",
    "gone",
    "left",
    "reading",
    "saving",
    "own code",
    "link",
    "stuck",
]


@dataclass(frozen=True)
class HangVerdict:
    """Why a run hangs."""

    cause: Cause
    ranks: tuple[int, ...]
    """The ranks at fault."""
    waiting: tuple[int, ...]
    """The ranks that wait for them."""
    sentence: str

    @property
    def found(self) -> bool:
        """Whether anything is wrong."""
        return self.cause not in {"none", "debugger"}


def write_verdict(directory: RunDir, verdict: HangVerdict) -> None:
    """Save a verdict in the run folder."""
    write_whole(directory.hang_verdict, f"{json.dumps(asdict(verdict))}\n".encode(), durable=False)


def read_verdict(directory: RunDir) -> HangVerdict | None:
    """Return the verdict of the last launch; None if there is none, or the run made progress after it."""
    try:
        facts = read_json(directory.hang_verdict)
        ranks = tuple(map(int, facts["ranks"]))
        waiting = tuple(map(int, facts["waiting"]))
        if facts["cause"] not in get_args(Cause):
            return None
        return HangVerdict(facts["cause"], ranks, waiting, str(facts["sentence"]))
    except (OSError, ValueError, TypeError, KeyError):
        return None


def format_ranks(ranks: Sequence[int]) -> str:
    """Return rank numbers with runs of neighbours as ranges.

    >>> format_ranks([3]), format_ranks([0, 1, 2, 5]), format_ranks([0, 2])
    ('rank 3', 'ranks 0-2, 5', 'ranks 0, 2')
    """
    spans: list[list[int]] = []
    for rank in sorted(ranks):
        if spans and spans[-1][1] == rank - 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    texts = [str(first) if first == last else f"{first}-{last}" for first, last in spans]
    return f"rank{'' if len(ranks) == 1 else 's'} {', '.join(texts)}"


def rank_numbers(reports: Sequence[RankReport]) -> tuple[int, ...]:
    """Return the rank of each report."""
    return tuple(report.rank for report in reports)


def other_ranks(reports: Sequence[RankReport], excluded: Sequence[RankReport]) -> tuple[int, ...]:
    """Return the ranks of all reports except the excluded ones."""
    return tuple(report.rank for report in reports if report not in excluded)


def with_nodes(reports: Sequence[RankReport]) -> str:
    """Return ranks with their nodes: "ranks 0-1 (node a, b)"."""
    nodes = sorted({report.node for report in reports})
    return f"{format_ranks(rank_numbers(reports))} (node {', '.join(nodes)})"


def plural(subjects: Sequence[object], one: str, many: str) -> str:
    """Return the verb form that agrees with the number of subjects."""
    return one if len(subjects) == 1 else many


def waits(waiting: Sequence[int], blamed: Sequence[RankReport]) -> str:
    """Return the clause "ranks 0-2 wait for it"."""
    verb = plural(waiting, "waits", "wait")
    return f"{format_ranks(waiting)} {verb} for {plural(blamed, 'it', 'them')}"


def stalled_child(report: RankReport) -> str:
    """Return a clause about the first child process that is stopped, dead or in I/O; empty if there is none."""
    for child in report.children:
        if child.state in {"T", "t", "Z", "D"}:
            return f", and its process {child.pid} {child.description}"
    return ""


def with_shapes(entry: Collective) -> str:
    """Return a collective with its input shapes and dtypes."""
    shapes = ["x".join(map(str, shape)) or "1" for shape in entry.sizes]
    return f"{entry.label} of {', '.join(shapes)} {'/'.join(entry.types)}"
