"""How a process stands, from /proc: of this machine, without touching it."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path

_PROC = Path("/proc")
GONE = "gone"
STATES = {
    "R": "runs",
    "S": "sleeps",
    "D": "waits for a disk",
    "T": "is stopped",
    "t": "is held by a debugger",
    "Z": "has died",
    GONE: "is gone",
}
"""What the letters of the kernel mean."""


@dataclass(frozen=True)
class Process:
    """A process, as the kernel sees it."""

    pid: int
    born: int
    """When it began, in ticks since the machine started: a later process may get the same number."""
    state: str
    """The kernel's letter; empty: not known here."""
    waits_in: str = ""
    """The function of the kernel in which it waits, where that may be read."""
    memory_bytes: int = 0

    @property
    def description(self) -> str:
        """How it stands."""
        return STATES.get(self.state, "")

    @property
    def can_speak(self) -> bool:
        """Whether it may still say a word; where nothing is known of it, it may."""
        return self.state not in {"T", "t", "Z", GONE}


def process(pid: int | str) -> Process:
    """Return how a process stands now."""
    folder = _PROC / str(pid)
    try:
        # The name, in brackets, may hold anything.
        parts = (folder / "stat").read_text(errors="replace").rpartition(")")[2].split()
        memory = int((folder / "statm").read_text().split()[1]) * 4096
        return Process(int(pid), int(parts[19]), parts[0], _waits_in(folder), memory)
    except (OSError, IndexError, ValueError):
        return Process(int(pid), 0, GONE)


def again(earlier: Process) -> Process:
    """Return how the very same process stands now."""
    now = process(earlier.pid)
    return now if now.born == earlier.born else Process(earlier.pid, earlier.born, GONE)


def children(pid: int | str) -> list[Process]:
    """Return the processes that one has started, such as those that read its data."""
    found: list[str] = []
    for file in (_PROC / str(pid) / "task").glob("*/children"):
        with contextlib.suppress(OSError):  # a thread that has just ended
            found += file.read_text().split()
    return [process(child) for child in found]


def _waits_in(folder: Path) -> str:
    with contextlib.suppress(OSError):  # only root may look, on many machines
        text = (folder / "wchan").read_text().strip()
        return "" if text == "0" else text
    return ""
