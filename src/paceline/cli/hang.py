"""`paceline hang`: which rank hangs, where, and which ranks wait for it."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from paceline.cli.named_run import NewestRunArguments, named_or_newest
from paceline.hang.judge import judge, still_moving
from paceline.hang.proc import GONE
from paceline.hang.processes import find_debugger
from paceline.hang.rank_report import RankReport, read_reports
from paceline.hang.script_dumps import code_of
from paceline.hang.script_processes import (
    SCRIPT,
    diagnose_script,
    ended_script,
    is_script_folder,
)
from paceline.hang.stacks import MAIN, CodeLine, Stack
from paceline.hang.verdict import HangVerdict, format_ranks, read_verdict
from paceline.report.failure import ensure_failure_page
from paceline.report.failure_page import FailurePage
from paceline.report.find_run import NamedRun
from paceline.rundir import RunDir
from paceline.runlock import is_held
from paceline.safe_open import open_to_write
from paceline.terminal import say

_ANSWER_S = 3.0
_LOOK_S = 0.1
_INNERMOST = 6
_NO_STACK = (
    "no stack: the process did not answer; with --python it needs py-spy (pip install py-spy), "
    "and a kernel that allows it to attach"
)
_STARTING = (
    "the run is starting: no rank has begun its first step, or reported anything, since this start"
)
_SYMPTOMS = {"none", "gone", "exception", "left"}  # the page knows why


@dataclass(frozen=True, kw_only=True)
class HangArguments(NewestRunArguments):
    """Asks a live run where its ranks are; explains afterwards why a run failed."""

    json: bool = False
    """Print the diagnosis and all rank reports as JSON (docs/hang.md)."""
    stacks: bool = False
    """Show the complete stack of every thread of every rank."""


def main(arguments: HangArguments) -> int:
    """Print the diagnosis; return 1 if there is a hang or a failure."""
    run = named_or_newest(arguments)
    if is_script_folder(run.folder):
        alive = is_held(run.folder.launch_lock)
        reports, verdict = diagnose_script(run.folder) if alive else ([], ended_script(run.folder))
    else:
        alive = is_held(run.folder.lock)
        reports = _request_reports(run.folder) if alive else read_reports(run.folder)
        verdict = (None if alive else read_verdict(run.folder)) or _verdict(reports)
        if alive and not reports:
            verdict = HangVerdict("none", (), (), _STARTING)
    page = None if alive else ensure_failure_page(run)
    if page and verdict.cause in _SYMPTOMS:
        verdict = page_verdict(page, reports)
    if arguments.json:
        print(json.dumps(_facts(run, reports, verdict, page, alive=alive), indent=2))
        return 1 if verdict.found or page else 0
    say(verdict.sentence)
    for report in reports:
        for line in _lines(report, whole=arguments.stacks):
            say(line)
    if page:
        say(f"\n{page.text().rstrip()}")
    return 1 if verdict.found or page else 0


def _request_reports(folder: RunDir) -> list[RankReport]:
    """Ask all ranks of a live run for a report; ranks that do not answer keep their old one."""
    requested, limit = time.time(), time.monotonic() + _ANSWER_S
    with contextlib.suppress(OSError):  # another user's folder: use the reports that exist
        if folder.alarm.parent.is_symlink():
            return _of_this_start(folder)
        os.close(open_to_write(folder.alarm, os.O_WRONLY))
        os.utime(folder.alarm)
        while time.monotonic() < limit:
            if all(report.time_s >= requested for report in _of_this_start(folder)):
                break
            time.sleep(_LOOK_S)
    return _of_this_start(folder)


def _of_this_start(folder: RunDir) -> list[RankReport]:
    """Return the reports that are newer than the lock, which each start replaces: older ones are of an earlier start."""
    begun = folder.lock.stat().st_mtime_ns
    reports = read_reports(folder)
    return [
        report for report in reports if folder.hang_record(report.rank).stat().st_mtime_ns > begun
    ]


def _verdict(reports: Sequence[RankReport]) -> HangVerdict:
    """Return the diagnosis: no hang in a debugger, or while a rank that others wait for still moves."""
    if debugger := find_debugger(reports):
        return debugger
    moving = still_moving(reports, time.time())
    if not moving:
        return judge(reports)
    step = max(report.step for report in reports)
    sentence = f"the run makes progress: {format_ranks(moving)} at step {step}"
    return HangVerdict("none", (), (), sentence)


def page_verdict(page: FailurePage, reports: Sequence[RankReport]) -> HangVerdict:
    """Return the verdict of the failure page: what the launcher or Slurm knows."""
    ranks = (page.rank,) if page.rank >= 0 else ()
    others = tuple(report.rank for report in reports if report.rank != page.rank)
    raised = any(report.rank in ranks and report.wrong for report in reports)
    return HangVerdict("exception" if raised else "gone", ranks, others, page.verdict)


def _facts(
    run: NamedRun,
    reports: Sequence[RankReport],
    verdict: HangVerdict,
    page: FailurePage | None,
    *,
    alive: bool,
) -> dict[str, Any]:
    records = [asdict(report) | {"place": str(report.place or "")} for report in reports]
    return {
        "run": str(run.folder.root.absolute()),
        "alive": alive,
        "found": verdict.found,
        **asdict(verdict),
        "records": records,
        "failure": page.facts() if page else None,
    }


def _lines(report: RankReport, *, whole: bool) -> list[str]:
    """Return a rank's state, its last collective, and the innermost frames of its stack."""
    process = f"process {report.process.pid} {report.process.description or 'on another host'}"
    rank = f"rank {report.rank} (node {report.node})"
    state = f"{report.state} in step {report.step + 1}, {report.doing}, no progress"
    if report.doing == SCRIPT:
        state = "no output"
    if report.state == "running" and report.process.state == GONE:
        return ["", f"{rank}: no report since its start; {process}"]
    lines = ["", f"{rank}: {state} for {report.quiet_s:.1f} s; {process}"]
    if report.collectives:
        last = report.collectives[-1]
        lines.append(f"  last collective: {last.label}, {'done' if last.done else 'not done'}")
    for stack in report.stacks:
        if not whole and stack.thread != MAIN:
            continue
        lines.append(f"  {stack.thread}")
        shown = stack.places if whole else _innermost(report, stack)
        lines += [f"    {_place_line(report, place)}" for place in shown]
    if report.doing == SCRIPT and not report.stacks and report.process.can_respond:
        lines.append(f"  {_NO_STACK}")
    return lines


def _innermost(report: RankReport, stack: Stack) -> tuple[CodeLine, ...]:
    """Return the innermost frames, and the one that explains most if they are all inside a library."""
    frames = stack.places[-_INNERMOST:]
    if report.place in stack.places and report.place not in frames:
        return report.place, *frames
    return frames


def _place_line(report: RankReport, place: CodeLine) -> str:
    line = f"{place.function} at {place.file}:{place.line}"
    code = code_of(report.process, place) if report.doing == SCRIPT else ""
    return f"{line}: {code}" if code else line
