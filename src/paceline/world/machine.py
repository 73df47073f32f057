"""What this machine is, in the words of a report."""

from __future__ import annotations

import os
import platform
import re
import socket
import subprocess
from typing import Any


def machine_facts() -> dict[str, Any]:
    """Return its names and sizes."""
    return {
        "host": socket.gethostname(),
        "cpu": cpu_name(),
        "memory_bytes": memory_bytes(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "python": platform.python_version(),
    }


def cpu_name() -> str:
    """Return what the processor is called; /proc/cpuinfo names those of ARM by numbers only."""
    try:
        said = subprocess.run(
            ["lscpu"],  # noqa: S607
            capture_output=True,
            text=True,
            check=True,
            timeout=10,
        ).stdout
    except (OSError, subprocess.SubprocessError):
        said = ""
    found = re.search(r"^Model name:\s*(.*\S)", said, re.MULTILINE)
    return found[1] if found else platform.processor() or platform.machine()


def memory_bytes() -> int:
    """Return how much memory the machine has; 0 if it does not say."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError):
        return 0
