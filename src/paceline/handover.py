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


def graceful_stop_mark(meeting: Path, rank: int) -> Path:
    """Return the file by which a rank says that it saves before it stops, and is to be waited for."""
    return meeting.with_name(f"heeds-{rank:04d}")


def progress_file(meeting: Path) -> Path:
    """Return the file that holds the step of the newest checkpoint, for the launcher's count of failures."""
    return meeting.with_name("progress")


def read_progress(file: Path) -> int:
    """Return the step of the newest checkpoint that the ranks spoke of; -1 if they spoke of none."""
    try:
        return int(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return -1


def run_file(meeting: Path) -> Path:
    """Return the file that names the folder of the run, for the page about a failure."""
    return meeting.with_name("run")


def read_run(file: Path) -> str:
    """Return the folder of the run that the ranks spoke of; empty if they spoke of none."""
    try:
        return file.read_text(encoding="utf-8", errors="surrogateescape")
    except OSError:
        return ""


FAILURE = "PACELINE_FAILURE"
"""The file in which a rank says why it failed; the launcher shows the first one."""

LAUNCHER = "PACELINE_LAUNCHER"
"""The process id of the launcher; a rank whose parent is another has lost it."""

DEADLINE = "PACELINE_DEADLINE"
"""The moment by which the run must have saved and left, in seconds since 1970."""

STOP_MARK = "PACELINE_STOPPED"
"""The file by which a rank says that it has saved and stopped; it then leaves with exit code 0, as a launcher that ends
all ranks at the first other code demands."""

PROGRESS = "PACELINE_PROGRESS"
"""The file in which rank 0 writes the step of its newest checkpoint, for whoever decides about starting again."""

ATTEMPT = "PACELINE_ATTEMPT"
"""How often the launcher has started these ranks before; only the first start may start a run over."""

INCARNATION = "PACELINE_INCARNATION"
"""Which start of a submitted run this is, as FAMILY:NUMBER; a later start of one family takes the run over."""

HOST_SUFFIX = "PACELINE_HOST_SUFFIX"
"""What to append to a node's name to get its name on the fast network."""

INTERFACE = "PACELINE_INTERFACE"
"""The network interface that carries the traffic between nodes; unset: the one that leads to the peers."""

DOCTOR = "PACELINE_DOCTOR"
"""What a rank of `paceline doctor` is told, as JSON: where to report, and the secret by which it is known."""

ADDRESS = "PACELINE_ADDRESS"
"""The HOST:PORT at which the ranks of several hosts meet, without a scheduler."""

TERMINAL = "PACELINE_TERMINAL"
"""Set when a person looks on: ranks themselves write into a pipe."""

DATA = "PACELINE_DATA"
"""The folder of data files, set by the user."""
