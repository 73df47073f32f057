"""Facts about this machine, for reports."""

from __future__ import annotations

import os
import platform
import re
import socket
import subprocess
from pathlib import Path
from typing import Any

_CPUINFO_CHARACTERS = 16_384  # more than the first of its processors


def machine_facts() -> dict[str, Any]:
    """Return host name, CPU, memory, operating system and Python version."""
    return {
        "host": socket.gethostname(),
        "cpu": cpu_name(),
        "memory_bytes": memory_bytes(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "python": platform.python_version(),
    }


def cpu_name() -> str:
    """Return the name of the processor from lscpu; /proc/cpuinfo has only numbers for ARM."""
    try:
        output = subprocess.run(
            ["lscpu"],  # noqa: S607
            capture_output=True,
            text=True,
            check=True,
            timeout=10,
        ).stdout
    except (OSError, subprocess.SubprocessError):
        output = ""
    match = re.search(r"^Model name:\s*(.*\S)", output, re.MULTILINE)
    return match[1] if match else platform.processor() or platform.machine()


def cpu_features() -> str:
    """Return name and instructions of the processor: code compiled for one may not run on another."""
    try:
        with Path("/proc/cpuinfo").open(encoding="utf-8", errors="replace") as file:
            first = file.read(_CPUINFO_CHARACTERS).partition("\n\n")[0]
    except OSError:
        first = platform.processor()
    names = ("model name", "flags", "features", "cpu part")
    lines = [line for line in first.splitlines() if line.lower().startswith(names)]
    return "\n".join([platform.machine(), *lines])


def memory_bytes() -> int:
    """Return the physical memory; 0 if it is unknown."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError):
        return 0
