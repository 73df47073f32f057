"""What a reader of a study must know of the machine and the code."""

from __future__ import annotations

import os
import platform
import re
import socket
import subprocess
from collections.abc import Mapping
from typing import Any

from paceline.version import VERSION

_OF_THE_RUN = ("gpu", "backend", "torch", "cores", "nodes")
_OF_THE_CONFIG = ("exact", "parallel", "precision", "compile", "capture", "threads")


def machine_facts(run: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the facts of a study, from the ranks of its largest run, its settings, and this machine."""
    return {
        "host": socket.gethostname(),
        "cpu": cpu_name(),
        "memory_bytes": _memory(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "python": platform.python_version(),
        "paceline": VERSION,
        **{name: run[name] for name in _OF_THE_RUN},
        **{name: config[name] for name in _OF_THE_CONFIG},
    }


def cpu_name() -> str:
    """Return what the processor is called; /proc/cpuinfo names those of ARM by numbers only."""
    try:
        said = subprocess.run(["lscpu"], capture_output=True, text=True, check=True, timeout=10).stdout  # noqa: S607
    except (OSError, subprocess.SubprocessError):
        said = ""
    found = re.search(r"^Model name:\s*(.*\S)", said, re.MULTILINE)
    return found[1] if found else platform.processor() or platform.machine()


def _memory() -> int:
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError):
        return 0
