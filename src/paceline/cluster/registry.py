"""The user's submitted jobs and the run of each, kept as one line of JSON per job."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from paceline.errors import EnvironmentUnfit
from paceline.rundir import make_private, writing_to
from paceline.safe_open import open_to_write, parse_json, read_bytes

_LARGEST_BYTES = 1 << 28


@dataclass(frozen=True)
class Submission:
    """A job that was submitted to Slurm."""

    job: str
    run: str
    """The folder of the run; all jobs of a chain, and later jobs that resume it, share it."""
    script: str
    nodes: int
    ranks_per_node: int
    time: str
    log: str
    """The job's log file, the same through all requeues."""
    time_s: float
    """Time of submission."""
    after: str = ""
    """The previous job of the chain."""
    cluster: str = ""
    """Slurm's name of the cluster: clusters that share a home directory reuse job IDs."""


def registry_file(env: Mapping[str, str]) -> Path:
    """Return the path of the user's job list.

    >>> registry_file({"HOME": "/home/me"})
    PosixPath('/home/me/.local/state/paceline/jobs.jsonl')
    """
    state = env.get("XDG_STATE_HOME") or f"{env.get('HOME', '~')}/.local/state"
    return Path(state).expanduser() / "paceline" / "jobs.jsonl"


def register(submission: Submission) -> None:
    """Append a job to the list, in a single write."""
    file = registry_file(os.environ)
    with writing_to(file):
        make_private(file.parent)
        descriptor = open_to_write(file, os.O_WRONLY | os.O_APPEND)
        try:
            os.write(descriptor, f"{json.dumps(asdict(submission))}\n".encode())
        finally:
            os.close(descriptor)


def submissions(cluster: str = "") -> list[Submission]:
    """Return the registered jobs, oldest first; with a cluster name, only its jobs."""
    file = registry_file(os.environ)
    try:
        lines = read_bytes(file, _LARGEST_BYTES).decode(errors="replace").splitlines()
    except FileNotFoundError:
        return []
    except OSError as error:
        raise EnvironmentUnfit(
            f"cannot read {file}: {error.strerror}",
            fix=f"make it readable (`chmod u+r {file}`), or remove it",
        ) from error
    jobs = []
    for line in lines:
        job = _parse(line)
        if job and (not cluster or job.cluster in {cluster, ""}):
            jobs.append(job)
    return jobs


def _parse(line: str) -> Submission | None:
    """Return the job of a line; None for a line that a full disk truncated."""
    try:
        return Submission(**parse_json(line))
    except (ValueError, TypeError):
        return None
