"""Hangs that one process explains: an exception, a crash, a stop, a blocked save, no response."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.hang.collectives import pending_of
from paceline.hang.proc import GONE
from paceline.hang.rank_report import DEBUGGED, RankReport
from paceline.hang.stacks import SAVE_THREAD, Stack
from paceline.hang.verdict import (
    Cause,
    HangVerdict,
    format_ranks,
    other_ranks,
    plural,
    rank_numbers,
    stalled_child,
    waits,
    with_nodes,
)

WAITS_FOR_PEERS = {"_hear", "_receive"}
"""Functions of checkpoint/ in which a save waits for messages of other ranks."""

_ENDED: tuple[tuple[str, Cause], ...] = (
    ("T", "stopped"),
    ("t", "stopped"),
    (GONE, "gone"),
    ("Z", "gone"),
)


def find_debugger(reports: Sequence[RankReport]) -> HangVerdict | None:
    """Return the rank that `run.breakpoint` holds: the others wait for the user."""
    held = [report for report in reports if report.state == "held" and report.doing == DEBUGGED]
    if not held:
        return None
    waiting = other_ranks(reports, held)
    sentence = (
        f"{with_nodes(held)} is held in a debugger in step {held[0].step + 1}"
        f"{f'; {waits(waiting, held)}' if waiting else ''}: type c there to continue, or q to end the run"
    )
    return HangVerdict("debugger", rank_numbers(held), waiting, sentence)


def find_exception(reports: Sequence[RankReport]) -> HangVerdict | None:
    """Return the first rank that raised an exception which is not about a lost peer."""
    failed = [report for report in reports if report.wrong and not report.wrong.lost_peer]
    if not failed:
        return None
    first = min(failed, key=lambda report: report.time_s)
    assert first.wrong is not None
    lines = first.wrong.text.strip().splitlines() or [first.wrong.what]
    sentence = f"{with_nodes([first])} failed in step {first.step + 1} with {lines[-1]}"
    return HangVerdict("exception", (first.rank,), other_ranks(reports, [first]), sentence)


def find_unresponsive(reports: Sequence[RankReport]) -> HangVerdict | None:
    """Return the ranks that wrote no report after the alarm: stopped, gone, or unable to run Python code."""
    missing = sorted(set(range(reports[0].size)) - set(rank_numbers(reports)))
    quiet = [report for report in reports if report.state in {"running", "moving"}]
    if not quiet:
        return _never_started(reports, missing) if missing else None
    for state, cause in _ENDED:
        alike = [report for report in quiet if report.process.state == state]
        if alike:
            ending = _ending(alike[-1], len(alike))
            return _unresponsive_verdict(cause, alike, reports, ending)
    description = quiet[0].process.description
    process = f"its process {description}, " if description else ""
    verb = plural(quiet, "is", "are")
    ending = f"{verb} unresponsive ({process}in native code or cut off)"
    return _unresponsive_verdict("silent", quiet, reports, ending)


def find_stopped(reports: Sequence[RankReport]) -> HangVerdict | None:
    """Return the ranks that the kernel has stopped, if no other rank is left to notice it."""
    stopped = [report for report in reports if report.process.state in {"T", "t"}]
    if not stopped:
        return None
    sentence = f"{with_nodes(stopped)} {_ending(stopped[-1], len(stopped))}"
    return HangVerdict("stopped", rank_numbers(stopped), other_ranks(reports, stopped), sentence)


def _ending(report: RankReport, count: int) -> str:
    if report.crash:
        where = f" in {report.place}" if report.place else ""
        return f"crashed in native code ({report.crash}){where}"
    description = report.process.description
    if count > 1:
        return description.replace("is ", "are ", 1).replace("has ", "have ", 1)
    return description


def _unresponsive_verdict(
    cause: Cause, quiet: list[RankReport], reports: Sequence[RankReport], ending: str
) -> HangVerdict:
    waiting = other_ranks(reports, quiet)
    step = f" since step {quiet[0].step}" if quiet[0].step else ""
    sentence = (
        f"{with_nodes(quiet)} {ending}{_unanswered_collective(quiet, reports)}{step}; "
        f"{waits(waiting, quiet)}"
    )
    return HangVerdict(cause, rank_numbers(quiet), waiting, sentence)


def _unanswered_collective(quiet: list[RankReport], reports: Sequence[RankReport]) -> str:
    responding = [report for report in reports if report not in quiet]
    pending = [entry for entry in map(pending_of, responding) if entry]
    if not pending:
        return ""
    newest = max(pending, key=lambda entry: entry.number)
    return f" and {plural(quiet, 'does', 'do')} not answer in {newest.label}"


def _never_started(reports: Sequence[RankReport], missing: list[int]) -> HangVerdict:
    waiting = rank_numbers(reports)
    it = plural(missing, "it", "they")
    sentence = (
        f"{format_ranks(missing)} {plural(missing, 'has', 'have')} written no report into this run "
        f"folder: {it} did not start, or {plural(missing, 'writes', 'write')} elsewhere; "
        f"{format_ranks(waiting)} {plural(waiting, 'waits', 'wait')}"
    )
    return HangVerdict("silent", tuple(missing), waiting, sentence)


def find_blocked_save(reports: Sequence[RankReport]) -> HangVerdict | None:
    """Return the ranks whose disk blocks a save: their save thread does not wait for other ranks."""
    if not any(report.doing in {"saving", "ending"} for report in reports):
        return None
    writers = [report for report in reports if any(map(_is_writing, report.stacks))]
    if not writers or len(writers) == len(reports) > 1:
        return None
    waiting = other_ranks(reports, writers)
    sentence = (
        f"{with_nodes(writers)} cannot finish writing the checkpoint; "
        f"{plural(writers, 'it is', 'they are')} in {writers[0].place}"
    )
    if waiting:
        sentence += f"; {waits(waiting, writers)}"
    return HangVerdict("saving", rank_numbers(writers), waiting, sentence)


def _is_writing(stack: Stack) -> bool:
    functions = {place.function for place in stack.places}
    return stack.thread == SAVE_THREAD and not functions & WAITS_FOR_PEERS


def find_early_exit(reports: Sequence[RankReport]) -> HangVerdict | None:
    """Return the ranks that finished while others still wait for them."""
    finished = [report for report in reports if report.state == "left"]
    waiting = other_ranks(reports, finished)
    if not finished or not waiting:
        return None
    first_waiting = next(report for report in reports if report.rank in waiting)
    entry = pending_of(first_waiting)
    sentence = (
        f"{with_nodes(finished)} finished after step {finished[0].step}; "
        f"{format_ranks(waiting)} still {plural(waiting, 'waits', 'wait')}"
        f"{f' in {entry.label}' if entry else ''}"
    )
    return HangVerdict("left", rank_numbers(finished), waiting, sentence)


def longest_idle(reports: Sequence[RankReport]) -> HangVerdict:
    """Return the position of the rank without progress for the longest time, if nothing else explains the hang."""
    stuck = [report for report in reports if report.state in {"stuck", "failed"}]
    first = max(stuck, key=lambda report: (not pending_of(report), report.quiet_s))
    where = f"in {first.place}" if first.place else first.doing
    waiting = other_ranks(reports, [first])
    sentence = f"{with_nodes([first])} makes no progress: it is {where}{stalled_child(first)}"
    if waiting:
        sentence += f"; {waits(waiting, [first])}"
    return HangVerdict("stuck", (first.rank,), waiting, sentence)
