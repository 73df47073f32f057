"""Grades an exercise by what the copy does, not by its text, so that every right solution passes."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.course.attempt import Outcome, attempt
from paceline.course.exercise import Check, Exercise

LIMIT_S = 240
"""Time limit of one run; on a busy machine a run takes half a minute."""
_RANK = re.compile(r"^\[(?:rank\d+|default\d+)\]: ?", re.MULTILINE)
_ERROR = re.compile(
    r"^([A-Za-z_][\w.]*(?:Error|Exception|Interrupt|Warning|Exit)\b.*)$", re.MULTILINE
)
_SECONDARY = re.compile(
    r"ProcessRaisedException|Broken pipe|[Cc]onnection (?:closed|reset) by peer|Timed out waiting"
)
"""Errors of ranks that waited for a rank that failed, left or never came."""
_BLOCKED = "a rank waits for the others: does every rank call every collective?"
_NO_OUTPUT = "the output lacks the lines that are checked: leave the prints of the copy as they are"


@dataclass(frozen=True)
class Grade:
    """The result of a check."""

    passed: bool
    hint: str
    """What was seen and what to look at; empty if solved."""


def grade(exercise: Exercise, file: Path, limit_s: float = LIMIT_S) -> Grade:
    """Run a copy and return whether it is solved, or a hint."""
    hint = _hint(exercise, file.name, attempt(exercise, file, limit_s), limit_s)
    return Grade(passed=not hint, hint=hint)


def _hint(exercise: Exercise, name: str, outcome: Outcome, limit_s: float) -> str:
    """Return the hint for a run; empty if it is right."""
    if not outcome.ended:
        return f"it was stopped after {limit_s:.0f} s: {exercise.stuck or _BLOCKED}"
    if outcome.code:
        known = (hint for seen, hint in exercise.errors if re.search(seen, outcome.output))
        if found := next(known, "") or crash(outcome.output, name):
            return found
        if _SECONDARY.search(outcome.output):
            return f"a rank waited for one that did not come or had exited: {exercise.stuck or _BLOCKED}"
    broken = (hint for check in exercise.checks if (hint := judge(check, outcome.output)))
    ending = f"it ended with exit code {outcome.code}" if outcome.code else ""
    found = next(broken, ending)
    absent = {_NO_OUTPUT, ending, *(check.missing for check in exercise.checks)}
    return f"{ending}: {_last_line(outcome.output)}" if ending and found in absent else found


def _last_line(output: str) -> str:
    return next(
        (line.strip() for line in reversed(output.splitlines()) if line.strip()),
        "it printed nothing",
    )


def crash(output: str, name: str) -> str:
    r"""Return the error that ended a copy, with its line; empty if it came from elsewhere.

    >>> crash('[rank1]:   File "/a/lesson_00.py", line 7, in main\n[rank1]:     dist.x()\n[rank1]: NameError: x', "lesson_00.py")
    'it fails at line 7 of lesson_00.py: NameError: x'
    """
    text = _RANK.sub("", output)
    place = re.compile(rf'^ *File "[^"\n]*{re.escape(name)}", line (\d+)', re.MULTILINE)
    for error in _ERROR.finditer(text):
        before = text[: error.start()]
        traceback = before[
            max(before.rfind("Traceback (most recent"), _end_of_last_error(before), 0) :
        ]
        if not _SECONDARY.search(error[1]) and (lines := place.findall(traceback)):
            return f"it fails at line {lines[-1]} of {name}: {error[1]}"
    return ""


def _end_of_last_error(text: str) -> int:
    return max((found.end() for found in _ERROR.finditer(text)), default=0)


def judge(check: Check, output: str) -> str:
    r"""Return the hint of a failed check; empty if it passed.

    >>> check = Check(r"rank \d: (?P<value>\S+)", "same", 0, "they differ: SEEN")
    >>> judge(check, "rank 0: 7\nrank 1: 7"), judge(check, "rank 0: 7\nrank 1: 8")
    ('', 'they differ: 7, 8')
    >>> judge(Check(check.see, "same", 0, check.hint, missing="no rank printed"), "epoch 1")
    'no rank printed'
    """
    groups: dict[str, list[str]] = {}
    for found in re.finditer(check.see, output):
        groups.setdefault(found.groupdict().get("key", ""), []).append(found["value"])
    if not groups:
        return check.missing or _NO_OUTPUT
    wrong = [values for values in groups.values() if not holds(check.rule, check.bound, values)]
    return check.hint.replace("SEEN", ", ".join(wrong[0])) if wrong else ""


def holds(rule: str, bound: object, values: Sequence[str]) -> bool:
    """Return whether the values satisfy a rule; nan is neither below nor above a bound.

    >>> holds("same", 0.02, ["1.56", "1.57"]), holds("same", 0.02, ["1.56", "nan"]), holds("same", 0.02, ["1.56"])
    (True, False, False)
    >>> holds("same", 0, ["1.5", "1.5"]), holds("same", 0, ["nan", "nan"])
    (True, False)
    >>> holds("be", ["1", "2"], ["2", "1"]), holds("differ", True, ["1", "2", "1"]), holds("below", 2000, ["1,999"])
    (True, False, True)
    >>> holds("never", "^2, 2$", ["2", "2"]), holds("never", "^2, 2$", ["2", "3"])
    (False, True)
    """
    if rule == "never":
        return not re.search(str(bound), ", ".join(values))
    if rule == "be":
        return isinstance(bound, list) and sorted(values) == sorted(bound)
    if rule == "differ":
        return len(values) > 1 and len(set(values)) == len(values)
    if rule == "same" and not bound:
        return len(values) > 1 and len(set(values)) == 1 and "nan" not in values
    assert isinstance(bound, int | float)
    numbers = [float(value.replace(",", "")) for value in values]
    if rule == "same":
        return len(values) > 1 and all(
            abs(one - other) <= bound for one in numbers for other in numbers
        )
    return all(one < bound if rule == "below" else one > bound for one in numbers)
