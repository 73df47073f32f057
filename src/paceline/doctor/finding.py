"""What a check has found, in one line: it is well, or what is wrong and what to do."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

_NAMED = 4  # hosts that a line names, at most


@dataclass(frozen=True)
class Finding:
    """One check: `says` what was seen; a problem has a fix."""

    check: str
    ok: bool
    says: str
    fix: str = ""
    line: int = 0
    """Of a batch script; 0: it is not about a line."""
    hosts: tuple[str, ...] = ()
    """Where it was found, if more than one host was looked at."""


def passed(check: str, says: str) -> Finding:
    """Return that all is well."""
    return Finding(check, ok=True, says=says)


def problem(check: str, says: str, fix: str, line: int = 0) -> Finding:
    """Return that something is wrong, and the way out."""
    return Finding(check, ok=False, says=says, fix=fix, line=line)


def as_dict(found: Finding) -> dict[str, Any]:
    """Return the finding as plain values, of which the names do not change.

    >>> as_dict(passed("python", "3.12"))
    {'check': 'python', 'ok': True, 'says': '3.12', 'fix': '', 'line': 0, 'hosts': []}
    """
    return asdict(found) | {"hosts": list(found.hosts)}


def from_dict(said: dict[str, Any]) -> Finding:
    """Return a finding that another process has sent."""
    return Finding(str(said["check"]), bool(said["ok"]), str(said["says"]), str(said["fix"]))


def all_ok(found: Iterable[Finding]) -> bool:
    """Return whether no check has found a problem."""
    return all(one.ok for one in found)


def merged(by_host: Sequence[tuple[str, Sequence[Finding]]]) -> list[Finding]:
    """Return the findings of several hosts, those that say the same as one, in the order of the checks.

    >>> [(one.says, one.hosts) for one in merged([("a", [passed("python", "3.12")]), ("b", [passed("python", "3.12")])])]
    [('3.12', ('a', 'b'))]
    """
    found: dict[Finding, list[str]] = {}
    for host, findings in by_host:
        for one in findings:
            found.setdefault(one, []).append(host)
    order = {name: place for place, name in enumerate(dict.fromkeys(one.check for one in found))}
    each = [replace(one, hosts=tuple(dict.fromkeys(hosts))) for one, hosts in found.items()]
    return sorted(each, key=lambda one: order[one.check])


def format_findings(found: Sequence[Finding], hosts: int = 1) -> list[str]:
    """Return what is shown: a line for each check; where hosts are well in different words, those of the first."""
    width = max((len(one.check) for one in found), default=0)
    shown, said = [], set[str]()
    for one in found:
        if one.ok and one.check in said and hosts > 1:
            continue
        if one.ok:
            said.add(one.check)
        place = f"line {one.line}: " if one.line else ""
        shown.append(
            f"{'ok' if one.ok else 'problem':<8} {one.check:<{width}}  {place}{one.says}{_where(one, hosts)}"
        )
        if one.fix:
            shown.append(f"{'':<8} {'':<{width}}  fix: {one.fix}")
    return shown


def _where(one: Finding, hosts: int) -> str:
    """Return on which hosts, if not on all.

    >>> _where(Finding("x", True, "y", hosts=("a",)), 2), _where(Finding("x", True, "y", hosts=("a", "b")), 2)
    (' (a)', '')
    """
    if hosts < 2 or not one.hosts or len(one.hosts) == hosts:
        return ""
    more = len(one.hosts) - _NAMED
    return f" ({', '.join(one.hosts[:_NAMED])}{f' and {more} more' if more > 0 else ''})"
