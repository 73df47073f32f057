"""Which jobs this user has submitted, and to which run each belongs: one line of JSON a job."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from paceline.errors import EnvironmentUnfit
from paceline.rundir import make_private, writing_to


@dataclass(frozen=True)
class Submission:
    """One job that was given to Slurm."""

    job: str
    run: str
    """The folder of the run; jobs of a chain and those submitted later to go on share it."""
    script: str
    nodes: int
    ranks_per_node: int
    time: str
    log: str
    """The file into which the job writes, through all its requeues."""
    time_s: float
    """When it was submitted."""
    after: str = ""
    """The job of the chain that comes before it."""
    cluster: str = ""
    """Slurm's name for the cluster: one home may be on several, and each counts its jobs from 1."""


def registry_file(env: Mapping[str, str]) -> Path:
    """Return the file that lists this user's jobs.

    >>> registry_file({"HOME": "/home/me"})
    PosixPath('/home/me/.local/state/paceline/jobs.jsonl')
    """
    state = env.get("XDG_STATE_HOME") or f"{env.get('HOME', '~')}/.local/state"
    return Path(state).expanduser() / "paceline" / "jobs.jsonl"


def register(submission: Submission) -> None:
    """Write a job down, the whole line at once."""
    file = registry_file(os.environ)
    with writing_to(file):
        make_private(file.parent)
        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            os.write(descriptor, f"{json.dumps(asdict(submission))}\n".encode())
        finally:
            os.close(descriptor)


def submissions(cluster: str = "") -> list[Submission]:
    """Return the jobs written down, the oldest first; those of one cluster, if its name is known."""
    file = registry_file(os.environ)
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return []
    except OSError as error:
        raise EnvironmentUnfit(
            f"cannot read {file}: {error.strerror}", fix="permit reading it, or remove it"
        ) from error
    found = (_read(line) for line in lines)
    return [one for one in found if one and (not cluster or one.cluster in {cluster, ""})]


def _read(line: str) -> Submission | None:
    """Return what a line says; one that a full disk has cut says nothing."""
    try:
        return Submission(**json.loads(line))
    except (json.JSONDecodeError, TypeError):
        return None
