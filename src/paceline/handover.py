"""What a launcher hands over to its ranks: a few environment variables, named here and nowhere else."""

from __future__ import annotations

from pathlib import Path

SETTINGS = "PACELINE_SET"
"""Settings of the verb that launched this process, as a JSON object of dotted names; they win over all others."""

MEETING = "PACELINE_MEETING"
"""The file in which the ranks meet."""


def joined_mark(meeting: Path, rank: int) -> Path:
    """Return the file by which a rank says that it has come to the meeting."""
    return meeting.with_name(f"joined-{rank:04d}")


def heeds_mark(meeting: Path, rank: int) -> Path:
    """Return the file by which a rank says that it saves before it stops, and is to be waited for."""
    return meeting.with_name(f"heeds-{rank:04d}")


def progress_file(meeting: Path) -> Path:
    """Return the file that holds the step of the newest checkpoint, for the launcher's count of failures."""
    return meeting.with_name("progress")


FAILURE = "PACELINE_FAILURE"
"""The file in which a rank says why it failed; the launcher shows the first one."""

LAUNCHER = "PACELINE_LAUNCHER"
"""The process id of the launcher; a rank whose parent is another has lost it."""

DEADLINE = "PACELINE_DEADLINE"
"""The moment by which the run must have saved and left, in seconds since 1970."""

TERMINAL = "PACELINE_TERMINAL"
"""Set when a person looks on: ranks themselves write into a pipe."""

DATA = "PACELINE_DATA"
"""The folder of data files, set by the user."""
