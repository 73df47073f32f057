"""How a run failed: the first rank, its traceback, the last steps, and how to resume; kept as a page in the run's folder."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from paceline.checkpoint.local_storage import LocalStorage
from paceline.errors import ConfigError, EnvironmentUnfit
from paceline.events import (
    CheckpointSaved,
    EventLog,
    RunEnded,
    RunFailed,
    RunStarted,
    RunStopped,
    StepDone,
    is_finished,
    surviving,
)
from paceline.hang.judge import judge
from paceline.hang.rank_report import RankReport, read_reports
from paceline.hang.script_processes import is_script_folder, script_failed
from paceline.hang.stacks import MAIN, CodeLine
from paceline.hang.verdict import HangVerdict, read_verdict
from paceline.launch.failure import Failure
from paceline.report.failure_page import FailurePage
from paceline.report.find_run import NamedRun
from paceline.report.job_logs import TaskEnd, end_in, first_end
from paceline.report.jobs import jobs_of
from paceline.rundir import RunDir, write_whole
from paceline.runlock import is_held
from paceline.safe_open import read_json

_STEPS = 5
_OTHER_LAUNCHER_S = 3.0  # time for the launcher of the host on which a rank failed first
_LOOK_S = 0.1
_SAME_COMMAND = "the command that started it"
# Why gloo ended a rank, which may not be the one at fault.
_GLOO_CAUSES = {"another shape", "another collective", "another way"}
_NO_HANG = {"none", "exception", "gone"}

Events = Sequence[dict[str, Any]]


def page_from_launch(failure: Failure, resume: str, begun_s: float = 0.0) -> FailurePage:
    """Return the page of a failure that the launcher saw, even if the rank could not report it."""
    folder = RunDir(Path(failure.run))
    if not failure.how:
        return replace(_page_from_elsewhere(folder, failure, begun_s), resume=resume)
    records = read_reports(folder)
    rank, how = failure.rank, failure.how
    report, verdict = _of_rank(records, rank), read_verdict(folder) or judge(records)
    lines = [failure.details]
    if report and _is_collateral(report) and verdict.ranks and rank not in verdict.ranks:
        lines = [f"rank {rank} {how}:", failure.details]
        rank = verdict.ranks[0]
        how = "did not join the others"
        if verdict.cause == "another shape":
            how = "used another tensor size than before"
        if verdict.cause == "another way":
            how = "did not take the same step as the others"
        if own := _traceback(_of_rank(records, rank)):
            lines = [own]
    elif report:
        lines += _crash_lines(report)
    words = "\n".join(line for line in lines if line)
    page = _with_history(folder, rank, how, words, records)
    return replace(page, resume=resume, fix=failure.fix)


def _page_from_elsewhere(folder: RunDir, failure: Failure, begun_s: float) -> FailurePage:
    """Return the page of a failure on another host: by its launcher, by srun, or by the reports of the ranks."""
    limit = time.monotonic() + _OTHER_LAUNCHER_S
    while not (page := _written_page(folder, begun_s)) and time.monotonic() < limit:
        if failure.details:  # srun is the only launcher
            break
        time.sleep(_LOOK_S)
    records = read_reports(folder)
    if page:  # its launcher may have written it before the other ranks reported their step
        step = _last_step(folder, records, _events(folder))
        return page if step <= page.step else replace(page, step=step, written=False)
    verdict = read_verdict(folder) or judge(records)
    rank, node, how = _end(records, verdict, end_in(failure.details))
    page = _with_history(folder, rank, how, _traceback(_of_rank(records, rank)), records)
    return replace(page, node=page.node or node)


def was_refused(failure: Failure, since_s: float) -> bool:
    """Return whether a launch left its run as it was: it took no step, and was refused or came after the last one."""
    folder = RunDir(Path(failure.run))
    starts = [event for event in _events(folder) if event["event"] == RunStarted.__name__]
    if is_script_folder(folder) or any(event["time_s"] >= since_s for event in starts):
        return False
    return failure.exit_code == ConfigError.exit_code or is_finished(folder.events)


def _is_collateral(record: RankReport) -> bool:
    """Return whether a rank ended because another one did."""
    return bool(record.crash) or (record.wrong is not None and record.wrong.lost_peer)


def _crash_lines(record: RankReport) -> list[str]:
    """Return the Python stack of a crash in native code, innermost last."""
    for stack in record.stacks:
        if record.crash and stack.thread == MAIN and stack.places:
            head = f"{record.crash} in native code, called from Python:"
            return [head, *(_place_line(place) for place in stack.places)]
    return []


def _place_line(place: CodeLine) -> str:
    return f'  File "{place.file}", line {place.line}, in {place.function}'


def _of_rank(records: Sequence[RankReport], rank: int) -> RankReport | None:
    return next((record for record in records if record.rank == rank), None)


def page_from_run(target: NamedRun) -> FailurePage | None:
    """Return the page of a run that failed and was not restarted, else None."""
    folder = target.folder
    if is_script_folder(folder):
        return _written_page(folder, 0.0) if script_failed(folder) else None
    events = _events(folder)
    records = read_reports(folder)
    is_live = is_held(folder.lock) or is_held(folder.launch_lock)
    if is_live or not events or not _has_failed(events, records):
        return None
    starts = [event["time_s"] for event in events if event["event"] == RunStarted.__name__]
    if page := _written_page(folder, starts[-1]):
        if page.slurm:
            return page
        slurm = _slurm(target)
        return replace(page, slurm=slurm, written=not slurm)
    verdict = read_verdict(folder) or judge(records)
    rank, node, how = _end(records, verdict, first_end(folder, starts[-1]))
    words = _traceback(_of_rank(records, rank)) or _reason(events)
    page = _with_history(folder, rank, how, words, records)
    return replace(page, slurm=_slurm(target), node=page.node or node)


def _end(
    records: Sequence[RankReport], verdict: HangVerdict, task: TaskEnd | None
) -> tuple[int, str, str]:
    """Return the first rank that failed, its node and how it ended: by its own report, by srun, or by the other ranks."""
    rank = verdict.ranks[0] if verdict.ranks else -1
    first = _of_rank(records, rank)
    crashed = first and first.wrong and not first.wrong.lost_peer
    if task is None or crashed or verdict.cause in _GLOO_CAUSES:
        return rank, "", _how(first, verdict)
    report = _of_rank(records, task.task)
    return task.task if report and report.node == task.node else -1, task.node, task.how


def _how(first: RankReport | None, verdict: HangVerdict) -> str:
    """Return how a rank ended, by its report."""
    if first and first.wrong and not first.wrong.lost_peer:
        return f"crashed with {first.wrong.what}"
    if first and first.crash:
        return f"crashed in native code ({first.crash})"
    if verdict.cause == "link":  # neither side is at fault
        return "lost the network to another node"
    return "vanished without a report" if verdict.cause in {"gone", "none"} else "hung"


def _traceback(first: RankReport | None) -> str:
    if first is None or (first.wrong and first.wrong.lost_peer):
        return ""
    return first.wrong.text if first.wrong else "\n".join(_crash_lines(first))


def _with_history(
    folder: RunDir, rank: int, how: str, words: str, records: Sequence[RankReport]
) -> FailurePage:
    events = _events(folder)
    steps = [event for event in events if event["event"] == StepDone.__name__][-_STEPS:]
    saved_step, saved = _newest_checkpoint(folder, events)
    verdict = read_verdict(folder)
    if verdict is None and any(record.state in {"stuck", "failed"} for record in records):
        verdict = judge(records)
    hang = verdict if verdict and verdict.cause not in _NO_HANG else None
    report = _of_rank(records, rank)
    return FailurePage(
        run=str(folder.root.absolute()),
        rank=rank,
        node=report.node if report else "",
        how=how,
        words=words,
        cause=hang.cause if hang else "",
        hang=hang.sentence if hang else "",
        step=_last_step(folder, records, events),
        steps=tuple(_metrics(event) for event in steps),
        checkpoint=saved,
        checkpoint_step=saved_step,
        slurm="",
        resume=_SAME_COMMAND,
        time_s=_failed_s(records, events),
    )


def _failed_s(records: Sequence[RankReport], events: Events) -> float:
    """Return when a run failed: the moment of the first report of that by a rank, else now."""
    starts = [event["time_s"] for event in events if event["event"] == RunStarted.__name__]
    times = [record.time_s for record in records if record.state in {"stuck", "failed"}]
    times += [event["time_s"] for event in events if event["event"] == RunFailed.__name__]
    return min(
        (moment for moment in times if moment >= max(starts, default=0.0)), default=time.time()
    )


def _last_step(folder: RunDir, records: Sequence[RankReport], events: Events) -> int:
    """Return the newest step that anybody has reported; -1: a foreign script has none."""
    if is_script_folder(folder):
        return -1
    kinds = {StepDone.__name__, RunFailed.__name__}
    steps = [int(event["step"]) for event in events if event["event"] in kinds]
    return max([0, *(record.step for record in records), *steps[-_STEPS:]])


def _metrics(event: dict[str, Any]) -> dict[str, Any]:
    return {name: event[name] for name in ("step", "loss", "samples_per_s")}


def _newest_checkpoint(folder: RunDir, events: Events) -> tuple[int, str]:
    """Return step and path of the newest checkpoint; one from the last moments may have no event."""
    saves = [event for event in events if event["event"] == CheckpointSaved.__name__]
    checkpoints = [(event["step"], event["path"]) for event in saves[-1:]]
    storage = LocalStorage(folder.checkpoints)
    with contextlib.suppress(OSError):
        checkpoints += [(step, storage.where(step)) for step in storage.steps()[:1]]
    return max(checkpoints, default=(-1, ""))


def _has_failed(events: Events, records: Sequence[RankReport]) -> bool:
    """Return whether the last start neither finished nor stopped: it reported a failure, or it is gone."""
    since_start: list[str] = []
    for event in events:
        if event["event"] == RunStarted.__name__:
            since_start = []
        since_start.append(event["event"])
    has_started = RunStarted.__name__ in since_start
    if not has_started or RunEnded.__name__ in since_start or RunStopped.__name__ in since_start:
        return False
    return RunFailed.__name__ in since_start or any(record.state != "left" for record in records)


def _reason(events: Events) -> str:
    reasons = [str(event["reason"]) for event in events if event["event"] == RunFailed.__name__]
    return reasons[-1] if reasons else ""


def _events(folder: RunDir) -> list[dict[str, Any]]:
    try:
        return surviving(folder.events)
    except (OSError, KeyError, TypeError, UnicodeDecodeError):
        return []


def _slurm(target: NamedRun) -> str:
    """Return how the last job ended by Slurm's account."""
    with contextlib.suppress(EnvironmentUnfit):
        for job in jobs_of(target.jobs[-1:]):
            if not job.live:
                return f"job {job.job} is {job.state} {job.reason}".strip()
    return ""


def write_failure_page(page: FailurePage) -> None:
    """Write the page into the run's folder, and its verdict as an event; a full disk, perhaps the failure itself, is ignored."""
    folder = RunDir(Path(page.run))
    if not page.written:
        with contextlib.suppress(OSError):
            write_whole(folder.failure_facts, f"{json.dumps(page.facts())}\n".encode())
            write_whole(folder.failure, page.text().encode(errors="replace"))
    if folder.events.is_file() and _reason(_events(folder)[-1:]) != page.verdict:
        with contextlib.suppress(OSError, EnvironmentUnfit), EventLog(folder.events) as log:
            log(RunFailed(page.step, page.rank, page.verdict))


def ensure_failure_page(target: NamedRun) -> FailurePage | None:
    """Return the failure page of a run, if it failed, and write it unless the launcher has."""
    page = page_from_run(target)
    if page is not None and not page.written:
        write_failure_page(page)
    return page


def _written_page(folder: RunDir, since_s: float) -> FailurePage | None:
    """Return the page that the launcher wrote for the last start, if any: it knows most."""
    try:
        if folder.failure_facts.stat().st_mtime < since_s:
            return None
        facts = read_json(folder.failure_facts)
        return FailurePage(**(facts | {"steps": tuple(facts["steps"]), "written": True}))
    except (OSError, ValueError, TypeError, KeyError):
        return None
