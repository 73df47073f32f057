"""What can be said of a script that reports nothing itself: its processes, and when each rank printed last."""

from __future__ import annotations

import json
import socket
import time
from typing import Any

from paceline.hang.proc import GONE, process
from paceline.hang.rank_report import RankReport
from paceline.hang.verdict import HangVerdict, format_ranks
from paceline.rundir import RunDir

SCRIPT = "script"
"""What a rank does whose script reports nothing."""
_STOPPED = {"T", "t"}


def is_script_folder(folder: RunDir) -> bool:
    """Return whether the launcher keeps this folder, for a script that does not use Paceline."""
    return folder.launches.exists() and not folder.events.exists()


def script_reports(folder: RunDir) -> list[RankReport]:
    """Return one report per rank of the last launch, from /proc and the logs."""
    launch = _last_launch(folder)
    ranks, pids = launch.get("ranks", []), launch.get("pids", [])
    begun_s = launch.get("time_s", time.time())
    return [
        _report(folder, rank, pid, len(ranks), begun_s)
        for rank, pid in zip(ranks, pids, strict=True)
    ]


def _last_launch(folder: RunDir) -> dict[str, Any]:
    """Return the last start, or nothing if its ranks have ended: their process ids may be reused."""
    newest = _newest_line(folder)
    return newest if newest.get("event") == "launched" else {}


def script_failed(folder: RunDir) -> bool:
    """Return whether a rank of the last launch ended with another exit code than 0."""
    return any(_newest_line(folder).get("codes", []))


def _newest_line(folder: RunDir) -> dict[str, Any]:
    try:
        lines = folder.launches.read_text(encoding="utf-8").splitlines()
        newest: dict[str, Any] = json.loads(lines[-1])
    except (OSError, IndexError, ValueError):
        return {}
    return newest


def _report(folder: RunDir, rank: int, pid: int, size: int, begun_s: float) -> RankReport:
    """Return the report of a rank that has printed nothing since its last line, or since its start."""
    try:
        quiet_s = time.time() - folder.log(rank).stat().st_mtime
    except OSError:
        quiet_s = time.time() - begun_s
    return RankReport(
        rank=rank,
        size=size,
        node=socket.gethostname(),
        state="running",
        time_s=time.time(),
        step=0,
        doing=SCRIPT,
        quiet_s=round(quiet_s, 3),
        process=process(pid),
    )


def judge_script(reports: list[RankReport]) -> HangVerdict:
    """Name ranks that are stopped or gone while others run; the script's own progress is unknown."""
    every = {report.rank for report in reports}
    stopped = tuple(each.rank for each in reports if each.process.state in _STOPPED)
    gone = tuple(each.rank for each in reports if each.process.state in {GONE, "Z"})
    if stopped:
        others = tuple(sorted(every - set(stopped)))
        sentence = f"{format_ranks(list(stopped))}: the process is stopped"
        return HangVerdict("stopped", stopped, others, sentence)
    if gone and len(gone) < len(reports):
        others = tuple(sorted(every - set(gone)))
        sentence = f"{format_ranks(list(gone))}: the process has exited; other ranks still run"
        return HangVerdict("gone", gone, others, sentence)
    sentence = "the script does not use Paceline, so its progress is unknown"
    if reports:
        quietest = max(reports, key=lambda report: report.quiet_s)
        sentence += f"; rank {quietest.rank} has printed nothing for {quietest.quiet_s:.0f} s"
    return HangVerdict("none", (), (), sentence)
