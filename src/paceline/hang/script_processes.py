"""What can be said of a script that reports nothing itself: its processes, where they are, and when each printed last."""

from __future__ import annotations

import socket
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from paceline.hang.collectives import find_mismatch, in_collective
from paceline.hang.missing import find_missing
from paceline.hang.proc import GONE, Process, process, refresh
from paceline.hang.rank_report import RankReport
from paceline.hang.script_dumps import LaunchedRank, RankDump, request_dumps
from paceline.hang.stacks import MAIN
from paceline.hang.verdict import (
    HangVerdict,
    format_ranks,
    other_ranks,
    plural,
    rank_numbers,
    with_nodes,
)
from paceline.rundir import RunDir
from paceline.safe_open import parse_json, read_text

_LARGEST_BYTES = 1 << 24

_APART_S = 2.0  # between two looks at ranks that wait
_ENDED = {"stopped", "gone"}
SCRIPT = "running a script"
"""What a rank does whose script reports nothing."""
_STOPPED = {"T", "t"}


def is_script_folder(folder: RunDir) -> bool:
    """Return whether the launcher keeps this folder, for a script that does not use Paceline."""
    return folder.launches.exists() and not folder.events.exists()


def diagnose_script(folder: RunDir) -> tuple[list[RankReport], HangVerdict]:
    """Return one report per rank of the last launch, and the verdict.

    Ranks that wait are a hang only if a second look finds every rank at the same line.
    """
    reports = script_reports(folder)
    verdict = judge_script(reports)
    if verdict.cause in _ENDED or not verdict.found:
        return reports, verdict
    time.sleep(_APART_S)
    later = script_reports(folder)
    moved = [report for report in later if _position(report) not in map(_position, reports)]
    if moved or len(later) != len(reports):
        ranks = format_ranks(rank_numbers(moved)) if moved else "a rank"
        sentence = f"the script makes progress: {ranks} moved within {_APART_S:.0f} s"
        return later, HangVerdict("none", (), (), sentence)
    verdict = judge_script(later)
    sentence = f"{verdict.sentence}; no rank moved within {_APART_S:.0f} s"
    return later, replace(verdict, sentence=sentence)


def _position(report: RankReport) -> tuple[object, ...]:
    main = [stack for stack in report.stacks if stack.thread == MAIN]
    return report.rank, main, report.collectives


def script_reports(folder: RunDir) -> list[RankReport]:
    """Return one report per rank of the last launch, from /proc, the logs, and what the ranks dump."""
    launch = _last_launch(folder)
    begun_s = launch.get("time_s", time.time())
    ranks = _launched_ranks(launch)
    dumps = request_dumps(ranks)
    return [
        _report(folder, rank, len(ranks), begun_s, dumps.get(rank.rank, RankDump()))
        for rank in ranks
    ]


def _launched_ranks(launch: dict[str, Any]) -> list[LaunchedRank]:
    numbers, pids = launch.get("ranks", []), launch.get("pids", [])
    born, dumps = launch.get("born", []), launch.get("dumps", [])
    ranks = []
    for index, number in enumerate(numbers):
        started = Process(pids[index], born[index], "") if born else process(pids[index])
        dump = Path(dumps[index]) if dumps else None
        ranks.append(LaunchedRank(number, refresh(started), dump))
    return ranks


def _last_launch(folder: RunDir) -> dict[str, Any]:
    """Return the last start, or nothing if its ranks have ended: their process ids may be reused."""
    newest = _newest_line(folder)
    return newest if newest.get("event") == "launched" else {}


def script_failed(folder: RunDir) -> bool:
    """Return whether a rank of the last launch ended with another exit code than 0."""
    return script_ending(folder) == "failed"


def script_ending(folder: RunDir) -> Literal["ended", "failed", "lost"]:
    """Return how the last launch ended; lost: no exit code was written down."""
    codes = _newest_line(folder).get("codes")
    if not isinstance(codes, list):
        return "lost"
    return "failed" if any(codes) else "ended"


def _newest_line(folder: RunDir) -> dict[str, Any]:
    try:
        lines = read_text(folder.launches, _LARGEST_BYTES).splitlines()
        newest = parse_json(lines[-1])
    except (OSError, IndexError, ValueError):
        return {}
    return newest if isinstance(newest, dict) else {}


def _report(
    folder: RunDir, launched: LaunchedRank, size: int, begun_s: float, dump: RankDump
) -> RankReport:
    """Return the report of a rank that has printed nothing since its last line, or since its start."""
    try:
        quiet_s = time.time() - folder.log(launched.rank).stat().st_mtime
    except OSError:
        quiet_s = time.time() - begun_s
    return RankReport(
        rank=launched.rank,
        size=size,
        node=socket.gethostname(),
        state="running",
        time_s=time.time(),
        step=0,
        doing=SCRIPT,
        quiet_s=round(quiet_s, 3),
        process=launched.process,
        stacks=dump.stacks,
        collectives=dump.collectives,
    )


def judge_script(reports: list[RankReport]) -> HangVerdict:
    """Name ranks that are stopped or gone, or that others wait for; the script's own progress is unknown."""
    for check in (_find_stopped, _find_gone, find_mismatch, find_missing, _find_outside):
        if verdict := check(reports):
            return verdict
    sentence = "the script does not use Paceline, so its progress is unknown"
    if reports:
        quietest = max(reports, key=lambda report: report.quiet_s)
        sentence += f"; rank {quietest.rank} has printed nothing for {quietest.quiet_s:.0f} s"
    return HangVerdict("none", (), (), sentence)


def ended_script(folder: RunDir) -> HangVerdict:
    """Return what is known of a script that does not run."""
    how = {
        "ended": "it has finished",
        "failed": "it has failed",
        "lost": "its launcher was killed, or its node went down",
    }[script_ending(folder)]
    return HangVerdict("none", (), (), f"the script does not run any more: {how}")


def _find_stopped(reports: Sequence[RankReport]) -> HangVerdict | None:
    stopped = [report for report in reports if report.process.state in _STOPPED]
    if not stopped:
        return None
    ranks = rank_numbers(stopped)
    sentence = f"{format_ranks(ranks)}: the process is stopped"
    return HangVerdict("stopped", ranks, other_ranks(reports, stopped), sentence)


def _find_gone(reports: Sequence[RankReport]) -> HangVerdict | None:
    gone = [report for report in reports if report.process.state in {GONE, "Z"}]
    if not gone or len(gone) == len(reports):
        return None
    ranks = rank_numbers(gone)
    sentence = f"{format_ranks(ranks)}: the process has exited; other ranks still run"
    return HangVerdict("gone", ranks, other_ranks(reports, gone), sentence)


def _find_outside(reports: Sequence[RankReport]) -> HangVerdict | None:
    """Return the ranks outside torch.distributed while others wait inside, by their stacks: not every wait is recorded."""
    inside = [report for report in reports if in_collective(report)]
    outside = [report for report in reports if report.stacks and report not in inside]
    if not inside or not outside:
        return None
    first, waiting = outside[0], rank_numbers(inside)
    sentence = (
        f"{with_nodes(outside)} {plural(outside, 'is', 'are')} in {first.place}; "
        f"{format_ranks(waiting)} {plural(waiting, 'waits', 'wait')} in {_call(inside[0])}"
    )
    return HangVerdict("own code", rank_numbers(outside), waiting, sentence)


def _call(report: RankReport) -> str:
    """Return the function of torch.distributed that the script called, and the line of the call."""
    places = report.stacks[0].places
    called = [each.function for each in places if "/torch/distributed/" in each.file]
    names = [name for name in called if name != "wrapper"]  # torch logs its calls by a decorator
    return f"{names[0] if names else 'torch.distributed'}, called in {report.place}"
