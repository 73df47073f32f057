"""What was run, when and where: command, commit, date, host, CPU and GPU."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paceline.report.page.timeline import moment

_LONGEST = 600
_COMMIT = 12


def origin(run: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return names and values of what identifies a run; an unknown value is empty."""
    facts: Mapping[str, str] = run["environment"]
    started = moment(run["starts"][0]["time_s"]) + " UTC" if run["starts"] else ""
    return [
        ("command", facts.get("command", "")[:_LONGEST]),
        ("commit", _commit(facts)),
        ("started", started),
        ("host", facts.get("machine.host", "")),
        ("CPU", _counted(facts, "machine.cpu", "machine.cores", "cores")),
        ("GPU", _counted(facts, "machine.gpu", "machine.gpus", "visible")),
    ]


def _commit(facts: Mapping[str, str]) -> str:
    """Return the commit and the state of the tree.

    >>> _commit({"git.commit": "0123456789abcdef", "git.clean": "True"}), _commit({})
    ('0123456789ab (clean tree)', '')
    """
    commit = facts.get("git.commit", "")
    clean = facts.get("git.clean", "").lower() == "true"
    state = "clean tree" if clean else "with uncommitted changes"
    return f"{commit[:_COMMIT]} ({state})" if commit else ""


def _counted(facts: Mapping[str, str], name: str, count: str, noun: str) -> str:
    value = facts.get(name, "")
    return f"{value} ({facts[count]} {noun})" if value and count in facts else value
