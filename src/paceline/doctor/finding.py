"""The result of a check, in one line: ok, or a problem and its fix."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

_MAX_HOSTS = 4  # that a line names


@dataclass(frozen=True)
class Finding:
    """The outcome of one check; only a problem has a fix. A JSON key per field."""

    check: str
    ok: bool
    says: str
    fix: str = ""
    line: int = 0
    """Line of a batch script; 0: not about a line."""
    hosts: tuple[str, ...] = ()
    """The hosts with this finding, if several were examined."""


def passed(check: str, says: str) -> Finding:
    """Return the finding of a check without a problem."""
    return Finding(check, ok=True, says=says)


def problem(check: str, says: str, fix: str, line: int = 0) -> Finding:
    """Return the finding of a check that failed."""
    return Finding(check, ok=False, says=says, fix=fix, line=line)


def as_dict(finding: Finding) -> dict[str, Any]:
    """Return the finding as JSON values; the keys are part of the interface.

    >>> as_dict(passed("python", "3.12"))
    {'check': 'python', 'ok': True, 'says': '3.12', 'fix': '', 'line': 0, 'hosts': []}
    """
    return asdict(finding) | {"hosts": list(finding.hosts)}


def from_dict(values: dict[str, Any]) -> Finding:
    """Return a finding that another process sent."""
    return Finding(
        str(values["check"]), bool(values["ok"]), str(values["says"]), str(values["fix"])
    )


def all_ok(findings: Iterable[Finding]) -> bool:
    """Return whether no check has failed."""
    return all(finding.ok for finding in findings)


def merge_hosts(by_host: Sequence[tuple[str, Sequence[Finding]]]) -> list[Finding]:
    """Return the findings of several hosts, equal ones as one, in the order of the checks.

    >>> same = passed("python", "3.12")
    >>> [(finding.says, finding.hosts) for finding in merge_hosts([("a", [same]), ("b", [same])])]
    [('3.12', ('a', 'b'))]
    """
    hosts_of: dict[Finding, list[str]] = {}
    for host, findings in by_host:
        for finding in findings:
            hosts_of.setdefault(finding, []).append(host)
    checks = list(dict.fromkeys(finding.check for finding in hosts_of))
    merged = []
    for finding, hosts in hosts_of.items():
        merged.append(replace(finding, hosts=tuple(dict.fromkeys(hosts))))
    return sorted(merged, key=lambda finding: checks.index(finding.check))


def format_findings(findings: Sequence[Finding], hosts: int = 1) -> list[str]:
    """Return the lines to print; if hosts pass a check with different texts, only the first."""
    width = max((len(finding.check) for finding in findings), default=0)
    lines: list[str] = []
    shown: set[str] = set()
    for finding in findings:
        if finding.ok and finding.check in shown and hosts > 1:
            continue
        if finding.ok:
            shown.add(finding.check)
        status = "ok" if finding.ok else "problem"
        line = f"line {finding.line}: " if finding.line else ""
        text = f"{line}{finding.says}{_where(finding, hosts)}"
        lines.append(f"{status:<8} {finding.check:<{width}}  {text}")
        if finding.fix:
            lines.append(f"{'':<8} {'':<{width}}  fix: {finding.fix}")
    return lines


def _where(finding: Finding, hosts: int) -> str:
    """Return the hosts with the finding, unless it is all of them.

    >>> _where(Finding("x", True, "y", hosts=("a",)), 2)
    ' (a)'
    >>> _where(Finding("x", True, "y", hosts=("a", "b")), 2)
    ''
    """
    if hosts < 2 or not finding.hosts or len(finding.hosts) == hosts:
        return ""
    return f" ({name_some(finding.hosts, _MAX_HOSTS)})"


def name_some(names: Sequence[str], most: int) -> str:
    """Return the first names, and how many more there are.

    >>> name_some(["a", "b", "c"], 2)
    'a, b and 1 more'
    """
    text = ", ".join(names[:most])
    return f"{text} and {len(names) - most} more" if len(names) > most else text
