"""Hangs that the collectives of the ranks explain: a mismatch, a different number of batches."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from paceline.hang.crash import ABORTED
from paceline.hang.flight_recorder import Collective
from paceline.hang.rank_report import RankReport
from paceline.hang.stacks import MAIN, Stack
from paceline.hang.verdict import (
    Cause,
    HangVerdict,
    format_ranks,
    other_ranks,
    plural,
    rank_numbers,
    with_nodes,
    with_shapes,
)

Signature = tuple[str, tuple[tuple[int, ...], ...], tuple[str, ...]]
"""Name, shapes and dtypes: equal on all ranks of a collective."""

Reports = Sequence[RankReport]

_MAY_DIFFER = {"all-to-all", "alltoall", "gather", "scatter", "broadcast", "barrier", "alltoallv"}
"""Collectives in which ranks may pass different shapes."""

_INNERMOST = 6
_COLLECTIVE_FILES = (
    "/torch/distributed/",
    "/paceline/exact/exchange.py",
    "/paceline/exact/graph.py",  # a replayed exchange, of which torch records nothing
    "/paceline/world/collectives.py",
)
_NEWEST = 5  # collectives that a rank may start before it notices that a peer was aborted


def signature_of(entry: Collective) -> Signature:
    """Return the part of a collective that must be equal on all ranks."""
    return entry.name, entry.sizes, entry.types


def pending_of(report: RankReport) -> Collective | None:
    """Return the first collective of a rank that has not completed."""
    return next((entry for entry in report.collectives if not entry.done), None)


def expected_next(history: Sequence[Collective]) -> Collective | None:
    """Return the collective that followed the longest earlier match of the newest entries: steps repeat.

    >>> entries = [Collective("0", n, name, (), (), True) for n, name in enumerate("abcabcab")]
    >>> expected_next(entries).name, expected_next(entries[:1]), expected_next(entries[:3])
    ('c', None, None)
    """
    signatures = [signature_of(entry) for entry in history]
    best_index, best_length = 0, 0
    for index in range(1, len(signatures)):
        length = _common_suffix(signatures[:index], signatures)
        if length >= best_length:
            best_index, best_length = index, length
    return history[best_index] if best_length else None


def _common_suffix(left: Sequence[Signature], right: Sequence[Signature]) -> int:
    length = 0
    for a, b in zip(reversed(left), reversed(right), strict=False):
        if a != b:
            break
        length += 1
    return length


def groups_of(reports: Iterable[RankReport]) -> list[str]:
    """Return the process groups that occur in the reports."""
    return sorted({entry.group for report in reports for entry in report.collectives})


def in_group(report: RankReport, group: str) -> list[Collective]:
    """Return the collectives of a rank in one process group."""
    return [entry for entry in report.collectives if entry.group == group]


def _has_own_error(report: RankReport) -> bool:
    """Return whether a rank failed, and not only because a collective with the others did."""
    if report.state != "failed" or report.wrong is None:
        return report.state == "failed"
    return not (report.wrong.lost_peer or "gloo" in report.wrong.text)


def find_batch_mismatch(reports: Reports) -> HangVerdict | None:
    """Return that some ranks finished while others are in one more step.

    The minority is blamed; on a tie, the others.
    """
    finished = [
        report for report in reports if report.doing == "ending" and not _has_own_error(report)
    ]
    training = [
        report for report in reports if report.doing == "step" and not _has_own_error(report)
    ]
    training = [report for report in training if pending_of(report) or report.wrong]
    others = [report for report in reports if report not in (*finished, *training)]
    # gloo ends a rank that gets a message of another size, before it can report.
    if not finished or not training or any(not report.crash for report in others):
        return None
    if min(report.step for report in training) < max(report.step for report in finished):
        return None
    early, late = rank_numbers(finished), rank_numbers(training)
    end = f"finished after step {finished[0].step}"
    step = f"in step {training[0].step + 1}"
    if len(finished) < len(training):
        sentence = (
            f"{with_nodes(finished)} {end}, one batch before the others; "
            f"{format_ranks(late)} {plural(late, 'is', 'are')} {step}"
        )
        return HangVerdict("one batch less", early, late, sentence)
    sentence = (
        f"{with_nodes(training)} {plural(late, 'has', 'have')} one batch more than the others "
        f"and {plural(late, 'is', 'are')} {step}; {format_ranks(early)} {end}"
    )
    return HangVerdict("one batch more", late, early, sentence)


def find_mismatch(reports: Reports) -> HangVerdict | None:
    """Return that ranks called different collectives under one number.

    Some ranks may have completed theirs.
    """
    for group in groups_of(reports):
        by_rank = {report: in_group(report, group) for report in reports}
        first = _first_pending(by_rank.values())
        entered: dict[RankReport, Collective] = {}
        history: list[Collective] = []
        for report, entries in by_rank.items():
            before = [entry for entry in entries if entry.number < first]
            if len(before) > len(history):
                history = before
            for entry in entries:
                if entry.number == first:
                    entered[report] = entry
        if odd := _deviating(entered, history):
            return _mismatch_verdict(entered, odd)
    return None


def _first_pending(entries_by_rank: Iterable[Sequence[Collective]]) -> int:
    pending = [entry.number for entries in entries_by_rank for entry in entries if not entry.done]
    return min(pending, default=0)


def _deviating(
    entered: dict[RankReport, Collective], history: Sequence[Collective]
) -> list[RankReport]:
    """Return the ranks in the minority; on a tie, those that deviate from earlier steps; else all."""
    signatures = {report: signature_of(entry) for report, entry in entered.items()}
    names = {entry.name for entry in entered.values()}
    if len(set(signatures.values())) < 2 or (len(names) == 1 and names <= _MAY_DIFFER):
        return []
    (frequent, count), (_, second_count), *_ = Counter(signatures.values()).most_common()
    usual = frequent if count > second_count else _as_before(set(signatures.values()), history)
    if usual:
        return [report for report, signature in signatures.items() if signature != usual]
    in_user_code = [report for report in entered if report.place and report.place.kind == "user"]
    return in_user_code if 0 < len(in_user_code) < len(entered) else list(entered)


def _as_before(signatures: set[Signature], history: Sequence[Collective]) -> Signature | None:
    """Return the signature that earlier steps had here, or else the only one that occurred before."""
    following = expected_next(history)
    if following and signature_of(following) in signatures:
        return signature_of(following)
    known = signatures & {signature_of(entry) for entry in history}
    return known.pop() if len(known) == 1 else None


def _mismatch_verdict(entered: dict[RankReport, Collective], odd: list[RankReport]) -> HangVerdict:
    blamed, called = odd[0], entered[odd[0]]
    usual = next(entry for entry in entered.values() if signature_of(entry) != signature_of(called))
    majority = [
        report.rank
        for report, entry in entered.items()
        if signature_of(entry) == signature_of(usual)
    ]
    same_name = called.name == usual.name
    cause: Cause = "another shape" if same_name else "another collective"
    left, right = called.label, usual.label
    if same_name:
        left, right = with_shapes(called), with_shapes(usual)
    completed = " and completed it" if usual.done else ""
    where = f"; {format_ranks([blamed.rank])} is in {blamed.where}" if blamed.place else ""
    sentence = (
        f"collective mismatch: {with_nodes([blamed])} called {left}, "
        f"but {format_ranks(majority)} called {right}{completed}{where}"
    )
    return HangVerdict(cause, rank_numbers(odd), other_ranks(list(entered), odd), sentence)


def find_gloo_abort(reports: Reports) -> HangVerdict | None:
    """Return which rank passed a new size when gloo aborted a rank: it aborts the rank that receives more than it expects.

    The aborted rank is blamed only if no other rank passed a new size.
    """
    aborted = [report for report in reports if report.crash == ABORTED and in_collective(report)]
    new_entries = {report: _new_signature(report) for report in reports if report.collectives}
    if not aborted or not new_entries:
        return None
    victim = aborted[0]
    abort = f"gloo aborted {with_nodes([victim])} in {victim.where}"
    changed = [report for report, (entry, usual) in new_entries.items() if entry and usual]
    if changed:
        entry, usual = new_entries[changed[0]]
        assert entry is not None
        assert usual is not None
        sentence = (
            f"collective mismatch: {with_nodes(changed[:1])} called {with_shapes(entry)}, "
            f"but {with_shapes(usual)} in earlier steps; {abort}"
        )
        ranks = rank_numbers(changed)
        return HangVerdict("another shape", ranks, other_ranks(reports, changed), sentence)
    for report, (entry, _) in new_entries.items():
        if entry:
            sentence = (
                f"collective mismatch: {abort}; {format_ranks([report.rank])} called "
                f"{with_shapes(entry)} for the first time, the aborted rank another size"
            )
            return HangVerdict(
                "another shape", tuple(sorted({report.rank, victim.rank})), (), sentence
            )
    sentence = (
        f"collective mismatch: {abort}; gloo does so if sizes differ, and the sizes of "
        f"{format_ranks(rank_numbers(list(new_entries)))} are those of earlier steps"
    )
    return HangVerdict("another shape", (victim.rank,), other_ranks(reports, [victim]), sentence)


def find_another_way(reports: Reports) -> HangVerdict | None:
    """Return the ranks whose script left the loop, finished, or updated more or less often than that of the others.

    Only if the collectives of the ranks do not match: in a hang of another kind, a rank may be one step behind.
    """
    counts = Counter(report.unusual for report in reports)
    if len(counts) < 2:
        return None
    if not any(find(reports) for find in (find_batch_mismatch, find_mismatch, find_gloo_abort)):
        return None
    usual = max(counts, key=lambda unusual: (counts[unusual], not unusual))
    odd = [report for report in reports if report.unusual != usual]
    alike = {
        unusual: [report for report in reports if report.unusual == unusual] for unusual in counts
    }
    others = alike.pop("", [])
    sentence = "; ".join(f"{with_nodes(group)} {unusual}" for unusual, group in alike.items())
    if others:
        sentence += f", unlike {format_ranks(rank_numbers(others))}"
    if waiting := next((report for report in others if report.place and not report.crash), None):
        sentence += f"; {format_ranks([waiting.rank])} is in {waiting.where}"
    return HangVerdict("another way", rank_numbers(odd), other_ranks(reports, odd), sentence)


def in_collective(report: RankReport) -> bool:
    """Return whether the main thread is inside a collective, by its stack."""
    return any(stack.thread == MAIN and _calls_collective(stack) for stack in report.stacks)


def waits_for_others(report: RankReport) -> bool:
    """Return whether a rank waits for other ranks, by its collectives or by its stack."""
    return pending_of(report) is not None or in_collective(report)


def _calls_collective(stack: Stack) -> bool:
    for place in stack.places[-_INNERMOST:]:
        if any(part in place.file for part in _COLLECTIVE_FILES):
            return True
    return False


def _new_signature(report: RankReport) -> tuple[Collective | None, Collective | None]:
    """Return the newest collective with a signature that never occurred before, and the one expected in its place."""
    entries = report.collectives
    for index in reversed(range(max(0, len(entries) - _NEWEST), len(entries))):
        entry, history = entries[index], entries[:index]
        if history and signature_of(entry) not in map(signature_of, history):
            usual = expected_next(history)
            return entry, usual if usual and usual.name == entry.name else None
    return None, None
