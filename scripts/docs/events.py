"""Table of the events of a run, from their classes."""

from __future__ import annotations

from dataclasses import fields

from markup import code, table, text

from paceline import events
from paceline.config.help import field_helps


def events_table() -> str:
    """Return every event with its keys."""
    return table(("event", "when", "keys"), [_row(kind) for kind in events.Event.__subclasses__()])


def _row(kind: type[events.Event]) -> list[str]:
    helps = field_helps(kind)
    names = [item.name for item in fields(kind) if item.name != "time_s"]
    keys = [f"{code(name)}{_about(helps.get(name, ''))}" for name in names]
    return [code(kind.__name__), text(kind.__doc__ or ""), ", ".join(keys)]


def _about(help_text: str) -> str:
    return f" ({text(help_text.rstrip('.'))})" if help_text else ""
