"""In which control groups this process is, and whether the kernel has ended processes of ours for lack of memory."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path


def own_groups(controller: str, root: Path = Path("/")) -> Iterator[Path]:
    """Yield the folders that limit this process, each before the one above it: of cgroup v2, and of a controller of v1.

    A container may see its own group at the top, and be told a path that is not there.
    """
    with contextlib.suppress(OSError):
        for line in (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines():
            number, names, path = line.split(":", 2)
            v2 = number == "0" and not names
            if v2 or controller in names.split(","):
                for top in ("", "unified") if v2 else {controller: "", names: ""}:
                    yield from _upwards(root / "sys/fs/cgroup" / top, path)


def _upwards(top: Path, path: str) -> Iterator[Path]:
    inner = Path(path.lstrip("/"))
    below = [] if ".." in inner.parts else [top / part for part in (inner, *inner.parents)]
    yield from (folder for folder in dict.fromkeys([*below, top]) if folder.is_dir())


def killed_for_memory() -> int:
    """Return how many processes of this control group, and of those in it, the kernel has ended so; 0 if it does not tell."""
    for group in own_groups("memory"):
        with contextlib.suppress(OSError):
            count = re.search(
                r"^oom_kill (\d+)$",
                (group / "memory.events").read_text(encoding="utf-8"),
                re.MULTILINE,
            )
            return int(count[1]) if count else 0
    return 0
