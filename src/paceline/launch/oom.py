"""The control groups (cgroups) of this process, and the processes that the kernel killed in them for lack of memory."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path


def own_groups(controller: str, root: Path = Path("/")) -> Iterator[Path]:
    """Yield the cgroup folders of this process, the innermost first: of v2, and of one controller of v1.

    A container may see its own group at the top, under a path that does not exist inside it.
    """
    with contextlib.suppress(OSError):
        for line in (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines():
            number, names, path = line.split(":", 2)
            is_v2 = number == "0" and not names
            if is_v2 or controller in names.split(","):
                for top in ("", "unified") if is_v2 else {controller: "", names: ""}:
                    yield from _upwards(root / "sys/fs/cgroup" / top, path)


def _upwards(top: Path, path: str) -> Iterator[Path]:
    inner = Path(path.lstrip("/"))
    below = [] if ".." in inner.parts else [top / part for part in (inner, *inner.parents)]
    yield from (folder for folder in dict.fromkeys([*below, top]) if folder.is_dir())


def killed_for_memory() -> int:
    """Return the number of processes in this cgroup and below that the kernel killed for memory; 0 if unknown."""
    for group in own_groups("memory"):
        with contextlib.suppress(OSError):
            events = (group / "memory.events").read_text(encoding="utf-8")
            count = re.search(r"^oom_kill (\d+)$", events, re.MULTILINE)
            return int(count[1]) if count else 0
    return 0
