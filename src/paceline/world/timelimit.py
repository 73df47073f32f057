"""The end of the current Slurm job, asked from squeue."""

from __future__ import annotations

import math
import re
import subprocess
import time
from collections.abc import Mapping

_ANSWERS_WITHIN_S = 5.0


def job_end(env: Mapping[str, str]) -> float:
    """Return the end of this Slurm job in seconds since 1970; infinity if there is no limit or it is unknown."""
    job = env.get("SLURM_JOB_ID", "")
    if not job.isdecimal():
        return math.inf
    try:
        done = subprocess.run(
            ["squeue", "--noheader", "--jobs", job, "--format", "%L"],  # noqa: S607 - the site decides where it is
            capture_output=True,
            text=True,
            timeout=_ANSWERS_WITHIN_S,
            check=False,
        )
    except (OSError, subprocess.SubprocessError, ValueError):  # for example inside a container
        return math.inf
    return time.time() + time_left(done.stdout.strip()) if done.returncode == 0 else math.inf


def time_left(text: str) -> float:
    """Parse squeue's time left of a job to seconds; infinity for UNLIMITED and unknown texts.

    >>> [time_left(text) for text in ("1-02:03:04", "02:03:04", "3:04", "0:00", "UNLIMITED", "INVALID", "")]
    [93784.0, 7384.0, 184.0, 0.0, inf, inf, inf]
    """
    match = re.fullmatch(r"(?:(\d+)-)?(?:(\d+):)?(\d+):(\d+)", text)
    if not match:
        return math.inf
    days, hours, minutes, seconds = (int(number or 0) for number in match.groups())
    return float(((days * 24 + hours) * 60 + minutes) * 60 + seconds)
