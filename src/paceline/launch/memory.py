"""Whether the kernel has ended processes of ours for lack of memory."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path

_GROUPS = Path("/sys/fs/cgroup")


def killed_for_memory() -> int:
    """Return how many processes of this control group, and of those in it, the kernel has ended so; 0 if it does not tell."""
    with contextlib.suppress(OSError, ValueError):
        own = Path("/proc/self/cgroup").read_text(encoding="utf-8")
        found = re.search(r"^0::/?(.*)$", own, re.MULTILINE)
        events = (_GROUPS / (found[1] if found else "") / "memory.events").read_text(encoding="utf-8")
        count = re.search(r"^oom_kill (\d+)$", events, re.MULTILINE)
        return int(count[1]) if count else 0
    return 0
