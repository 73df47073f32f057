"""Hangs in which a rank has not entered a collective that others wait in."""

from __future__ import annotations

from paceline.hang.collectives import Reports, groups_of, in_group, pending_of
from paceline.hang.flight_recorder import EVERYONE, Collective
from paceline.hang.rank_report import RankReport
from paceline.hang.verdict import (
    Cause,
    HangVerdict,
    other_ranks,
    plural,
    rank_numbers,
    stalled_child,
    waits,
    with_nodes,
)


def find_missing(reports: Reports) -> HangVerdict | None:
    """Return the stragglers that have not entered a collective in which other ranks wait.

    A rank that itself waits in another process group is blamed only if every group lacks a rank: a circle of waits.
    """
    all_entered = False
    circle: HangVerdict | None = None
    for group in groups_of(reports):
        entered = {report.rank: _current(report, group) for report in reports}
        pending = [entry for entry in entered.values() if entry and not entry.done]
        if not pending:
            continue
        newest = max(pending, key=lambda entry: entry.number)
        present = [report for report in reports if report.state != "left"]
        missing = [report for report in present if _is_before(entered[report.rank], newest)]
        all_entered = all_entered or not missing
        if not missing or len(missing) == len(reports):
            continue
        if idle := [report for report in missing if not pending_of(report)]:
            return _missing_verdict(reports, idle, newest)
        circle = circle or _missing_verdict(reports, missing, newest)
    return None if all_entered else circle


def _current(report: RankReport, group: str) -> Collective | None:
    """Return the first collective of a group that has not completed, else the last one."""
    entries = in_group(report, group)
    last = entries[-1] if entries else None
    return next((entry for entry in entries if not entry.done), last)


def _is_before(entry: Collective | None, newest: Collective) -> bool:
    if entry is None:  # this rank may not belong to a smaller group
        return newest.group == EVERYONE
    return entry.done and entry.number < newest.number


def _missing_verdict(
    reports: Reports, missing: list[RankReport], newest: Collective
) -> HangVerdict:
    first, waiting = missing[0], other_ranks(reports, missing)
    causes: dict[str, Cause] = {"reading": "reading", "saving": "saving"}
    activity = {"reading": " reading samples,", "saving": " saving,"}.get(first.doing, "")
    where = f"it is{activity} in {first.where}" if first.place else f"it is {first.doing}"
    sentence = (
        f"{with_nodes(missing)} {plural(missing, 'has', 'have')} not entered {newest.label}; "
        f"{where}{stalled_child(first)}; {waits(waiting, missing)}"
    )
    cause = causes.get(first.doing, "own code")
    return HangVerdict(cause, rank_numbers(missing), waiting, sentence)
