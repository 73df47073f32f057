"""Which rank is stuck, why, and who waits for it: one sentence from what all ranks wrote down."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from paceline.hang.flight import Collective
from paceline.hang.process import GONE
from paceline.hang.record import Record
from paceline.hang.verdict import Cause, Verdict
from paceline.hang.words import ranks_words

_ENDING = {"saving", "ending"}
_FRESH_S = 8.0  # ranks that are stuck ask again every 2 s; clocks may differ


def judge(records: Sequence[Record]) -> Verdict:
    """Return what holds a run up. What explains the rest is asked for first."""
    if not any(record.state in {"stuck", "failed"} for record in records):
        return Verdict("none", (), (), "no rank has said that it is stuck")
    for question in (_batches, _mismatch, _failed, _silent, _late, _saving, _left, _link):
        if verdict := question(records):
            return verdict
    return _somewhere(records)


def still_moving(records: Sequence[Record], now_s: float) -> list[int]:
    """Return the ranks that have just said that they move: others wait for them, and nothing is wrong."""
    return [record.rank for record in records if moves(record, now_s)]


def moves(record: Record, now_s: float) -> bool:
    """Return whether a rank has just said that it moves. One that was stopped after it had said so does not say it again."""
    return record.state == "moving" and now_s - record.time_s < _FRESH_S


def _batches(records: Sequence[Record]) -> Verdict | None:
    """Return that some have ended while others are in one more step: those are at fault who are fewer; of as many, the latter."""
    ended = [record for record in records if record.doing == "ending" and record.state != "failed"]
    more = [record for record in records if record.doing == "step" and _pending(record)]
    if not ended or not more or len(ended) + len(more) < len(records):
        return None
    if min(record.step for record in more) < max(record.step for record in ended):
        return None
    ended_words = f"ended after step {ended[0].step}"
    step, (early, late) = f"in step {more[0].step + 1}", (_others(records, more), _others(records, ended))
    if len(ended) < len(more):
        words = f"{_who(ended)} {ended_words}; {ranks_words(late)} {_are(late)} {step}, and wait for a batch of it"
        return Verdict("one batch less", early, late, words)
    words = f"{_who(more)} has a batch more than the others: it is {step}; {ranks_words(early)} {ended_words}"
    return Verdict("one batch more", late, early, words)


def _mismatch(records: Sequence[Record]) -> Verdict | None:
    """Return that ranks have begun different things as the same collective. Some may have got through with it."""
    for group in _groups(records):
        mine = {record: [entry for entry in record.collectives if entry.group == group] for record in records}
        pending = [entry.number for entries in mine.values() for entry in entries if not entry.done]
        first = min(pending, default=0)
        entered = {record: entry for record, entries in mine.items() for entry in entries if entry.number == first}
        if odd := _odd_ones(entered):
            return _of_mismatch(entered, odd)
    return None


def _odd_ones(entered: dict[Record, Collective]) -> list[Record]:
    """Return the ranks that do not do what most do. Of as many, those that the user's own code sent there; else all."""
    kinds = {record: _kind(entry) for record, entry in entered.items()}
    names = {entry.name for entry in entered.values()}
    if len(set(kinds.values())) < 2 or (len(names) == 1 and names <= _MAY_DIFFER):
        return []
    (usual, most), (_, next_most), *_ = Counter(kinds.values()).most_common()
    if most > next_most:
        return [record for record, kind in kinds.items() if kind != usual]
    sent = [record for record in entered if record.place and record.place.kind == "user"]
    return sent if 0 < len(sent) < len(entered) else list(entered)


def _kind(entry: Collective) -> tuple[object, ...]:
    return entry.name, entry.sizes, entry.types


_MAY_DIFFER = {"all-to-all", "alltoall", "gather", "scatter", "broadcast", "barrier", "alltoallv"}
"""Here ranks may give different sizes, and nothing is wrong."""


def _of_mismatch(entered: dict[Record, Collective], odd: list[Record]) -> Verdict:
    mine, one = odd[0], entered[odd[0]]
    others = [record for record, entry in entered.items() if _kind(entry) != _kind(one)]
    other = entered[others[0]]
    theirs = [record.rank for record, entry in entered.items() if _kind(entry) == _kind(other)]
    cause: Cause = "another shape" if one.name == other.name else "another collective"
    what = (one.called, other.called) if one.name != other.name else (_with_size(one), _with_size(other))
    came = "are" if len(theirs) > 1 else "is"
    words = f"{_who([mine])} is in {what[0]}, but {ranks_words(theirs)} {came if not other.done else 'had'} {'in ' if not other.done else ''}{what[1]}"
    return Verdict(cause, tuple(record.rank for record in odd), _others(list(entered), odd), f"{words}{_at(mine)}")


def _with_size(entry: Collective) -> str:
    return f"{entry.called} of {', '.join('x'.join(map(str, shape)) or '1' for shape in entry.sizes)} {'/'.join(entry.types)}"


def _failed(records: Sequence[Record]) -> Verdict | None:
    """Return the first that failed for a reason of its own."""
    failed = [record for record in records if record.wrong and not record.wrong.lost_peer]
    if not failed:
        return None
    first = min(failed, key=lambda record: record.time_s)
    assert first.wrong is not None
    last_line = first.wrong.text.strip().splitlines()[-1] if first.wrong.text.strip() else first.wrong.what
    words = f"{_who([first])} failed in step {first.step + 1} with {last_line}"
    return Verdict("exception", (first.rank,), _others(records, [first]), words)


def _silent(records: Sequence[Record]) -> Verdict | None:
    """Return those that wrote nothing though others are stuck: stopped, gone, or where Python cannot speak."""
    missing = sorted(set(range(records[0].size)) - {record.rank for record in records})
    silent = [record for record in records if record.state in {"running", "moving"}]
    if not silent:
        return _never_came(records, missing) if missing else None
    by_state = {record.process.state: record for record in silent}
    for state, cause in (("T", "stopped"), ("t", "stopped"), (GONE, "gone"), ("Z", "gone")):
        if state in by_state:
            of_this = [record for record in silent if record.process.state == state]
            return _quiet(cause, of_this, records, by_state[state].process.words)  # type: ignore[arg-type]
    words = silent[0].process.words
    return _quiet(
        "silent",
        silent,
        records,
        f"says nothing{f' (its process {words})' if words else ''}: it is in native code, or cut off",
    )


def _quiet(cause: Cause, silent: list[Record], records: Sequence[Record], words: str) -> Verdict:
    others = _others(records, silent)
    plural = words if len(silent) == 1 else words.replace("is ", "are ", 1).replace("says", "say", 1)
    step = f" since step {silent[0].step}" if silent[0].step else ""
    return Verdict(
        cause, tuple(record.rank for record in silent), others,
        f"{_who(silent)} {plural}{_entered_not(silent, records)}{step}; {_wait(others, silent)}",
    )  # fmt: skip


def _entered_not(silent: list[Record], records: Sequence[Record]) -> str:
    waits = [entry for record in records if record not in silent and (entry := _pending(record))]
    return f" and does not answer in {max(waits, key=lambda entry: entry.number).called}" if waits else ""


def _never_came(records: Sequence[Record], missing: list[int]) -> Verdict:
    others = tuple(record.rank for record in records)
    return Verdict(
        "silent", tuple(missing), others,
        f"{ranks_words(missing)} has left no word in this folder: it did not begin, or writes elsewhere; "
        f"{ranks_words(others)} wait{'s' if len(others) == 1 else ''}",
    )  # fmt: skip


def _late(records: Sequence[Record]) -> Verdict | None:
    """Return those that have not entered the collective in which others wait."""
    for group in _groups(records):
        entered = {record.rank: last for record in records if (last := _last(record, group))}
        waits = [entry for entry in entered.values() if not entry.done]
        if not waits:
            continue
        newest = max(waits, key=lambda entry: entry.number)
        late = [record for record in records if record.state != "left" and _is_before(record, entered, newest)]
        if late and len(late) < len(records):
            return _of_late(records, late, newest)
    return None


def _is_before(record: Record, entered: dict[int, Collective], newest: Collective) -> bool:
    mine = entered.get(record.rank)
    return mine is None or (mine.done and mine.number < newest.number)


def _of_late(records: Sequence[Record], late: list[Record], newest: Collective) -> Verdict:
    others = _others(records, late)
    doing = {"reading": "reading", "saving": "saving"}.get(late[0].doing, "own code")
    act = {"reading": " reading samples,", "saving": " saving,"}.get(late[0].doing, "")
    where = f"it is{act} in {late[0].place}" if late[0].place else f"it is {late[0].doing}"
    return Verdict(
        doing, tuple(record.rank for record in late), others,  # type: ignore[arg-type]
        f"{_who(late)} {'has' if len(late) == 1 else 'have'} not entered {newest.called}; {where}{_workers(late[0])}; {_wait(others, late)}",
    )  # fmt: skip


def _workers(record: Record) -> str:
    """Return which of the processes that it started do not move."""
    bad = [child for child in record.children if child.state in {"T", "t", "Z", "D"}]
    return f", and its process {bad[0].pid} {bad[0].words}" if bad else ""


def _saving(records: Sequence[Record]) -> Verdict | None:
    """Return whose disk holds the save up: the one whose writer does not wait for another's word."""
    if not any(record.doing in _ENDING for record in records):
        return None
    writers = [
        record for record in records
        if any(stack.thread == "paceline-save" and not _hears(stack.places) for stack in record.stacks)
    ]  # fmt: skip
    if not writers or len(writers) == len(records) > 1:
        return None
    others = _others(records, writers)
    tail = f"; {_wait(others, writers)}" if others else ""
    sentence = f"{_who(writers)} does not get its checkpoint written; it is in {writers[0].place}{tail}"
    return Verdict("saving", tuple(record.rank for record in writers), others, sentence)


def _hears(places: Sequence[object]) -> bool:
    return any(getattr(place, "function", "") == "_hear" for place in places)


def _left(records: Sequence[Record]) -> Verdict | None:
    """Return those that are done while others still wait for them."""
    left = [record for record in records if record.state == "left"]
    others = _others(records, left)
    if not left or not others:
        return None
    waiting = next(record for record in records if record.rank in others)
    entry = _pending(waiting)
    return Verdict(
        "left", tuple(record.rank for record in left), others,
        f"{_who(left)} {'has' if len(left) == 1 else 'have'} left after step {left[0].step}; "
        f"{ranks_words(others)} still wait{'s' if len(others) == 1 else ''}{f' in {entry.called}' if entry else ''}",
    )  # fmt: skip


def _link(records: Sequence[Record]) -> Verdict | None:
    """Return that all have entered a collective which does not end."""
    inside = [record for record in records if _pending(record)]
    if len(inside) < len(records):
        return None
    pending = {record.rank: entry for record in records if (entry := _pending(record))}
    first = min(pending.values(), key=lambda entry: entry.number)
    behind = [record for record in records if pending[record.rank].number == first.number]
    nodes = sorted({record.node for record in records})
    between = f"between {' and '.join(nodes)}" if len(nodes) > 1 else "between them"
    if len(behind) < len(records):
        ahead = _others(records, behind)
        return Verdict(
            "link", tuple(record.rank for record in behind), ahead,
            f"{_who(behind)} {_are(behind)} still in {first.called}, which {ranks_words(ahead)} {'has' if len(ahead) == 1 else 'have'} left: the link to it carries nothing",
        )  # fmt: skip
    return Verdict(
        "link", tuple(record.rank for record in records), (),
        f"all ranks are in {first.called}, and it does not end: the link {between} carries nothing",
    )  # fmt: skip


def _somewhere(records: Sequence[Record]) -> Verdict:
    """Return where the one is that has been quiet for longest: no collective explains it."""
    told = [record for record in records if record.state in {"stuck", "failed"}]
    first = max(told, key=lambda record: (not _pending(record), record.quiet_s))
    place = f"in {first.place}" if first.place else first.doing
    others = _others(records, [first])
    tail = f"; {_wait(others, [first])}" if others else ""
    return Verdict(
        "stuck", (first.rank,), others, f"{_who([first])} does not get on: it is {place}{_workers(first)}{tail}"
    )


def _groups(records: Iterable[Record]) -> list[str]:
    return sorted({entry.group for record in records for entry in record.collectives})


def _last(record: Record, group: str) -> Collective | None:
    """Return the first collective of a group that does not end, else the last."""
    mine = [entry for entry in record.collectives if entry.group == group]
    return next((entry for entry in mine if not entry.done), mine[-1] if mine else None)


def _pending(record: Record) -> Collective | None:
    return next((entry for entry in record.collectives if not entry.done), None)


def _others(records: Sequence[Record], some: Sequence[Record]) -> tuple[int, ...]:
    return tuple(record.rank for record in records if record not in some)


def _who(records: Sequence[Record]) -> str:
    nodes = sorted({record.node for record in records})
    return f"{ranks_words([record.rank for record in records])} (node {', '.join(nodes)})"


def _at(record: Record) -> str:
    return f"; it is in {record.place}" if record.place else ""


def _are(some: Sequence[object]) -> str:
    return "is" if len(some) == 1 else "are"


def _wait(others: Sequence[int], some: Sequence[Record]) -> str:
    return f"{ranks_words(others)} wait{'s' if len(others) == 1 else ''} for {'it' if len(some) == 1 else 'them'}"
