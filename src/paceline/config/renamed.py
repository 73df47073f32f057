"""Which settings had another name in an earlier version, and what to say about files that use it."""

from __future__ import annotations

from collections.abc import Iterable

from paceline.errors import ConfigError

RENAMED = {
    "timeout.stuck": "timeout.hang_steps",
    "read.ahead": "read.prefetch_steps",
    "local.steps": "local_sgd.steps",
    "local.replicas": "local_sgd.replicas",
    "local.outer_lr": "local_sgd.outer_lr",
    "local.outer_momentum": "local_sgd.outer_momentum",
}
"""New names by old names. Formats keep their version, so files with old names are still met."""


def refuse_old_names(names: Iterable[str], where: str, *, fix: str) -> None:
    """Raise ConfigError if a file was written with old setting names; the message gives the new ones."""
    changes = [f"{name} is now {RENAMED[name]}" for name in names if name in RENAMED]
    if changes:
        raise ConfigError(
            f"{where} was written by an older version of Paceline: {', '.join(changes)}", fix=fix
        )
