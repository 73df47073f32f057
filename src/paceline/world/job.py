"""Which start of which job this process belongs to, and when the job ends: from the variables of its launcher, or squeue."""

from __future__ import annotations

import math
import re
import subprocess
import time
from collections.abc import Mapping

from paceline import handover

Env = Mapping[str, str]

_ANSWERS_WITHIN_S = 5.0


def launch_name(env: Env) -> str:
    """Return the name of the launch or job, equal for all its starts.

    >>> launch_name({"SLURM_JOB_ID": "17", "SLURM_RESTART_COUNT": "2"}), launch_name({"PACELINE_LAUNCHER": "123"})
    ('17', '123')
    """
    return (
        incarnation_of(env).rpartition(":")[0]
        or env.get(handover.LAUNCHER)
        or env.get("TORCHELASTIC_RUN_ID", "")
    )


def is_restart(env: Env) -> bool:
    """Return whether the launch or job was started before.

    >>> is_restart({"SLURM_JOB_ID": "17"}), is_restart({"SLURM_JOB_ID": "17", "SLURM_RESTART_COUNT": "2"})
    (False, True)
    """
    counts = (
        incarnation_of(env).rpartition(":")[2],
        env.get(handover.ATTEMPT),
        env.get("TORCHELASTIC_RESTART_COUNT"),
    )
    return any(count not in {"", "0", None} for count in counts)


def deadline_of(env: Env) -> float:
    """Return the earliest known end of the job.

    >>> deadline_of({"SLURM_JOB_END_TIME": "1790000000"}), deadline_of({})
    (1790000000.0, inf)
    """
    names = (handover.DEADLINE, "SLURM_JOB_END_TIME")
    return min(
        (float(env[name]) for name in names if env.get(name, "").replace(".", "").isdecimal()),
        default=math.inf,
    )


def incarnation_of(env: Env) -> str:
    """Return the start of the job as FAMILY:NUMBER: from our variable for a chain of jobs, else from Slurm.

    >>> incarnation_of({"SLURM_JOB_ID": "17", "SLURM_RESTART_COUNT": "2"}), incarnation_of({})
    ('17:2', '')
    """
    job = env.get("SLURM_JOB_ID", "")
    from_slurm = f"{job}:{env.get('SLURM_RESTART_COUNT', '0')}" if job else ""
    return env.get(handover.INCARNATION) or from_slurm


def job_end(env: Env) -> float:
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
