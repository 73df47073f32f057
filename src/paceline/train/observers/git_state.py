"""The commit of the repository that a script is in, and whether the tree was changed since."""

from __future__ import annotations

import subprocess
from pathlib import Path

_LIMIT_S = 3.0  # all ranks wait for this one; the run does not depend on the answer
# Reading changes nothing in the repository, and starts no program that its settings name.
_GIT = ("git", "--no-optional-locks", "-c", "core.fsmonitor=false")


def git_state(script: Path) -> dict[str, object]:
    """Return the commit of the repository that a script is in, and whether the tree was clean; empty: unknown.

    A tree is clean if no tracked file differs from the commit, and the script is one of them.
    """
    folder = str(script.absolute().parent)
    lines = _ask("-C", folder, "status", "--porcelain=v2", "--branch", "--untracked-files=no")
    heads = [line.split()[-1] for line in lines if line.startswith("# branch.oid ")]
    known = ("ls-files", "-t", "--cached", "--others", "--exclude-standard", "--", script.name)
    script_state = _ask("-C", folder, *known) if heads and heads != ["(initial)"] else []
    if not script_state:  # no repository, or it ignores the folder of the script
        return {}
    is_tracked = script_state[0].startswith("H ")
    changed = any(not line.startswith("#") for line in lines)
    return {"commit": heads[0], "clean": is_tracked and not changed}


def _ask(*words: str) -> list[str]:
    """Return the lines that git prints; none if there is no git, no repository, or no answer."""
    try:
        done = subprocess.run(
            [*_GIT, *words],
            capture_output=True,
            text=True,
            check=True,
            timeout=_LIMIT_S,
        )
    except (OSError, ValueError, subprocess.SubprocessError):
        return []
    return done.stdout.splitlines()
