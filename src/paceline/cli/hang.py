"""Say which rank is stuck, where, and which ranks wait for it: of a run that goes on, or afterwards."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from paceline.cli.watch import add_run_argument, named_run
from paceline.hang.judge import judge, still_moving
from paceline.hang.rank_report import RankReport, read_reports
from paceline.hang.stacks import MAIN
from paceline.hang.verdict import HangVerdict, format_ranks, read_verdict
from paceline.report.failure import ensure_failure_page
from paceline.report.failure_page import FailurePage
from paceline.report.find_run import NamedRun, find_run
from paceline.report.state import is_held
from paceline.rundir import RunDir
from paceline.terminal import say

HELP = "which rank is stuck, where, and what the others wait for; how a run failed"

_ANSWER_S = 3.0
_LOOK_S = 0.1
_INNERMOST = 6


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verb's own arguments."""
    add_run_argument(parser)
    parser.add_argument(
        "--json", action="store_true", help="print all that is known, as JSON (docs/hang.md)"
    )
    parser.add_argument(
        "--stacks", action="store_true", help="show every thread of every rank, whole"
    )


def main(known: argparse.Namespace) -> int:
    """Show what holds a run up; exit with 1 if anything does."""
    target = find_run(named_run(known, ("--json", "--stacks", "--runs")), Path(known.runs))
    alive = is_held(target.folder.lock)
    records = _ask(target.folder) if alive else read_reports(target.folder)
    verdict = (None if alive else read_verdict(target.folder)) or _verdict(records)
    page = None if alive else ensure_failure_page(target)
    if known.json:
        print(json.dumps(_facts(target, records, verdict, page, alive=alive), indent=2))
    else:
        say(verdict.sentence)
        for record in records:
            for line in _lines(record, whole=known.stacks):
                say(line)
        if page:
            say(f"\n{page.text().rstrip()}")
    return 1 if verdict.found or page else 0


def _ask(folder: RunDir) -> list[RankReport]:
    """Have the ranks of a run that goes on say where they are; those that do not answer are named by that."""
    asked, limit = time.time(), time.monotonic() + _ANSWER_S
    with contextlib.suppress(OSError):  # the folder of another user: what is there must do
        os.close(os.open(folder.alarm, os.O_WRONLY | os.O_CREAT, 0o600))
        os.utime(folder.alarm)
        while (
            any(record.time_s < asked for record in read_reports(folder))
            and time.monotonic() < limit
        ):
            time.sleep(_LOOK_S)
    return read_reports(folder)


def _verdict(records: Sequence[RankReport]) -> HangVerdict:
    """Return what holds the run up; nothing, while a rank for which others wait still moves."""
    moving = still_moving(records, time.time())
    if not moving:
        return judge(records)
    step = max(record.step for record in records)
    return HangVerdict("none", (), (), f"the run moves: {format_ranks(moving)} at step {step}")


def _facts(
    target: NamedRun,
    records: Sequence[RankReport],
    verdict: HangVerdict,
    page: FailurePage | None,
    *,
    alive: bool,
) -> dict[str, Any]:
    return {
        "run": str(target.folder.root.absolute()),
        "alive": alive,
        "found": verdict.found,
        **asdict(verdict),
        "records": [asdict(record) | {"place": str(record.place or "")} for record in records],
        "failure": page.facts() if page else None,
    }


def _lines(record: RankReport, *, whole: bool) -> list[str]:
    """Return a rank: where it stands, its last collective, and the innermost of its stack."""
    stands = f"{record.process.description or 'not seen from here'}"
    lines = ["", f"rank {record.rank} (node {record.node}): {record.state} in step {record.step + 1}, {record.doing}, quiet for {record.quiet_s:.1f} s; process {record.process.pid} {stands}"]  # fmt: skip
    if record.collectives:
        last = record.collectives[-1]
        lines.append(f"  last collective: {last.label}, {'done' if last.done else 'not done'}")
    for stack in (
        record.stacks if whole else [stack for stack in record.stacks if stack.thread == MAIN]
    ):
        lines.append(f"  {stack.thread}")
        shown = stack.places if whole else stack.places[-_INNERMOST:]
        lines += [f"    {place.function} at {place.file}:{place.line}" for place in shown]
    return lines
