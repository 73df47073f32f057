"""Which start of which job this process belongs to, and when the job ends; from the variables of its launcher."""

from __future__ import annotations

import math
from collections.abc import Mapping

from paceline import handover

Env = Mapping[str, str]


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
