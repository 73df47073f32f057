"""How a run failed: the first rank, its words, the last steps, and how to go on; left as a page in the run's folder."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from paceline.checkpoint.local_storage import LocalStorage
from paceline.errors import EnvironmentUnfit
from paceline.events import (
    CheckpointSaved,
    RunEnded,
    RunFailed,
    RunStarted,
    RunStopped,
    StepDone,
    surviving,
)
from paceline.hang.judge import judge
from paceline.hang.rank_report import RankReport, read_reports
from paceline.hang.stacks import MAIN
from paceline.hang.verdict import HangVerdict, read_verdict
from paceline.launch.failure import Failure
from paceline.report.failure_page import FailurePage
from paceline.report.find_run import NamedRun
from paceline.report.job_logs import first_end
from paceline.report.jobs import jobs_of
from paceline.report.state import is_held
from paceline.rundir import RunDir, write_whole

_STEPS = 5
_SAME_WAY = "the command that started it, once more"
_EXPLAIN = {
    "another shape",
    "another collective",
}  # why gloo ended a task, which may be the one that did no wrong


def page_from_launch(failure: Failure, resume: str) -> FailurePage:
    """Return the page for a failure that the launcher saw, also where the rank itself could not say a word."""
    folder = RunDir(Path(failure.run))
    records = read_reports(folder)
    rank, how = failure.rank, failure.how or "failed"
    mine, verdict = _of_rank(records, rank), read_verdict(folder) or judge(records)
    if mine and _is_only_hit(mine) and verdict.ranks and rank not in verdict.ranks:
        rank = verdict.ranks[0]
        how = (
            "gave another size than before"
            if verdict.cause == "another shape"
            else "held the others up"
        )
    words = "\n".join([failure.details or failure.message, *(_crash_lines(mine) if mine else [])])
    return replace(_with_history(folder, rank, how, words, records), resume=resume)


def _is_only_hit(record: RankReport) -> bool:
    """Return whether a rank ended as one does that another has brought down."""
    return bool(record.crash) or (record.wrong is not None and record.wrong.lost_peer)


def _crash_lines(record: RankReport) -> list[str]:
    """Return where a rank was in Python when native code ended it, the innermost last."""
    main = (
        next((stack for stack in record.stacks if stack.thread == MAIN), None)
        if record.crash
        else None
    )
    places = (
        [f'  File "{place.file}", line {place.line}, in {place.function}' for place in main.places]
        if main
        else []
    )
    return [f"{record.crash} in native code, called from Python:", *places] if places else []


def _of_rank(records: Sequence[RankReport], rank: int) -> RankReport | None:
    return next((record for record in records if record.rank == rank), None)


def page_from_run(target: NamedRun) -> FailurePage | None:
    """Return the page of a run that failed and that nobody goes on with; nothing if it did not, or is not known to have."""
    folder = target.folder
    events = _events(folder)
    records = read_reports(folder)
    if is_held(folder.lock) or not events or not _has_failed(events, records):
        return None
    since_s = next(
        event["time_s"] for event in reversed(events) if event["event"] == RunStarted.__name__
    )
    if page := _left(folder, since_s):
        return (
            page
            if page.slurm
            else replace(page, slurm=(ended := _slurm(target)), written=not ended)
        )
    verdict = read_verdict(folder) or judge(records)
    rank, node, how = _end(folder, records, verdict, since_s)
    words = _own_words(_of_rank(records, rank)) or _reason(events)
    page = _with_history(folder, rank, how, words, records)
    return replace(page, slurm=_slurm(target), node=page.node or node)


def _end(
    folder: RunDir, records: Sequence[RankReport], verdict: HangVerdict, since_s: float
) -> tuple[int, str, str]:
    """Return the first rank that failed, its node and how it ended: in its own words, in srun's, or as the others saw it."""
    rank = verdict.ranks[0] if verdict.ranks else -1
    first, task = _of_rank(records, rank), first_end(folder, since_s)
    if (
        task is None
        or verdict.cause in _EXPLAIN
        or (first and first.wrong and not first.wrong.lost_peer)
    ):
        return rank, "", _how(first, verdict)
    its_own = _of_rank(records, task.task)
    return task.task if its_own and its_own.node == task.node else -1, task.node, task.how


def _how(first: RankReport | None, verdict: HangVerdict) -> str:
    """Return how a rank ended, from what it left."""
    if first and first.wrong and not first.wrong.lost_peer:
        return f"failed with {first.wrong.what}"
    if first and first.crash:
        return f"was ended by native code ({first.crash})"
    return "ended without a word" if verdict.cause in {"gone", "none"} else "held the run up"


def _own_words(first: RankReport | None) -> str:
    if first is None or (first.wrong and first.wrong.lost_peer):
        return ""
    return first.wrong.text if first.wrong else "\n".join(_crash_lines(first))


def _with_history(
    folder: RunDir, rank: int, how: str, words: str, records: Sequence[RankReport]
) -> FailurePage:
    events = _events(folder)
    steps = [event for event in events if event["event"] == StepDone.__name__][-_STEPS:]
    saved_step, saved = _newest_checkpoint(folder, events)
    stuck = [record for record in records if record.state in {"stuck", "failed"}]
    verdict = read_verdict(folder) or (judge(records) if stuck else None)
    held = verdict if verdict and verdict.cause not in {"none", "exception", "gone"} else None
    step = max([0, *(record.step for record in records), *(event["step"] for event in steps)])
    mine = _of_rank(records, rank)
    return FailurePage(
        str(folder.root.absolute()), rank, mine.node if mine else "", how, words, held.cause if held else "", held.sentence if held else "", step,
        tuple({name: event[name] for name in ("step", "loss", "samples_per_s")} for event in steps),
        saved, saved_step, "", _SAME_WAY,
    )  # fmt: skip


def _newest_checkpoint(folder: RunDir, events: Sequence[dict[str, Any]]) -> tuple[int, str]:
    """Return the step and the place of the newest checkpoint; one that came to be in the last moments has no event."""
    found = [
        (event["step"], event["path"])
        for event in events
        if event["event"] == CheckpointSaved.__name__
    ][-1:]
    storage = LocalStorage(folder.checkpoints)
    with contextlib.suppress(OSError):
        found += [(step, storage.where(step)) for step in storage.steps()[:1]]
    return max(found, default=(-1, ""))


def _has_failed(events: Sequence[dict[str, Any]], records: Sequence[RankReport]) -> bool:
    """Return whether the last start neither ended nor stopped: it said that it failed, or it is gone."""
    kinds = [event["event"] for event in events]
    last = (
        kinds[len(kinds) - 1 - kinds[::-1].index(RunStarted.__name__) :]
        if RunStarted.__name__ in kinds
        else []
    )
    if not last or RunEnded.__name__ in last or RunStopped.__name__ in last:
        return False
    return RunFailed.__name__ in last or any(record.state != "left" for record in records)


def _reason(events: Sequence[dict[str, Any]]) -> str:
    return next(
        (
            str(event["reason"])
            for event in reversed(events)
            if event["event"] == RunFailed.__name__
        ),
        "",
    )


def _events(folder: RunDir) -> list[dict[str, Any]]:
    try:
        return surviving(folder.events)
    except (OSError, KeyError, TypeError, UnicodeDecodeError):
        return []


def _slurm(target: NamedRun) -> str:
    """Return how the last job ended, in Slurm's words."""
    with contextlib.suppress(EnvironmentUnfit):
        jobs = [job for job in jobs_of(target.jobs[-1:]) if not job.live]
        return f"job {jobs[-1].job} is {jobs[-1].state} {jobs[-1].reason}".strip() if jobs else ""
    return ""


def write_failure_page(page: FailurePage) -> None:
    """Write the page into the run's folder; the disk may be what failed, so it need not succeed."""
    folder = RunDir(Path(page.run))
    with contextlib.suppress(OSError):
        write_whole(folder.failure_facts, f"{json.dumps(page.facts())}\n".encode())
        write_whole(folder.failure, page.text().encode(errors="replace"))


def ensure_failure_page(target: NamedRun) -> FailurePage | None:
    """Return how a run failed, if it did, and leave the page in its folder if nobody has."""
    page = page_from_run(target)
    if page is not None and not page.written:
        write_failure_page(page)
    return page


def _left(folder: RunDir, since_s: float) -> FailurePage | None:
    """Return the page of the last start, if it is there: who was there when it failed knows best."""
    try:
        if folder.failure_facts.stat().st_mtime < since_s:
            return None
        facts = json.loads(folder.failure_facts.read_text(encoding="utf-8"))
        return FailurePage(**(facts | {"steps": tuple(facts["steps"]), "written": True}))
    except (OSError, ValueError, TypeError, KeyError):
        return None
