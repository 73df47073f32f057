"""The user's cache folder, and whether others can write to a folder whose files are executed."""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from pathlib import Path


def user_cache(env: Mapping[str, str]) -> Path:
    """Return the folder in which Paceline keeps things for a user.

    >>> str(user_cache({"XDG_CACHE_HOME": "/scratch/me/cache"}))
    '/scratch/me/cache/paceline'
    """
    home = Path(env.get("XDG_CACHE_HOME", ""))
    base = home if home.is_absolute() else Path("~/.cache").expanduser()
    return base / "paceline"


def why_untrusted(folder: Path) -> str:
    """Return who else could write code into an existing folder; empty if nobody can."""
    real = folder.resolve()
    facts = real.stat()
    if not facts.st_mode & 0o022 and facts.st_uid == os.getuid():
        if (parent := _replaceable(real)) is None:
            return ""
        real, facts = parent, parent.stat()
    return (
        f"other users can write to {real} (mode {facts.st_mode & 0o7777:o}, owner {facts.st_uid}), "
        f"so compiled code in {folder} cannot be trusted: it would be executed"
    )


def _replaceable(folder: Path) -> Path | None:
    """Return the first parent folder that lets any user replace this one; None if all are safe."""
    for parent in folder.parents:
        mode = parent.stat().st_mode
        if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
            return parent
    return None
