"""The user's submitted jobs and the run of each, kept as one line of JSON per job."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from paceline.cluster.slurm import Forecast, QueuedJob, forecasts, queued_jobs
from paceline.errors import EnvironmentUnfit
from paceline.rundir import make_private, writing_to
from paceline.safe_open import open_to_write, parse_json, read_bytes

_LARGEST_BYTES = 1 << 28

_CLOCKS_DIFFER_S = 300.0  # munge accepts no more between two hosts


@dataclass(frozen=True)
class Submission:
    """A job that was submitted to Slurm. Its number alone does not identify it: Slurm may count anew."""

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
    user: int = -1
    """The user ID; -1 if it was not recorded."""
    reused: bool = False
    """Whether a later submission has the same number, so that this job cannot be in the queue."""

    @property
    def name(self) -> str:
        """The job's name in Slurm: that of the run."""
        return Path(self.run).name

    def is_job(self, queued: QueuedJob, requeues: int) -> bool:
        """Return whether a job of the same number is this one: same user, same name, submitted then.

        A requeue sets Slurm's time of submission anew.
        """
        later_s = queued.submitted_s - self.time_s
        if self.reused or queued.name != self.name or self.user not in {queued.user, -1}:
            return False
        return abs(later_s) <= _CLOCKS_DIFFER_S or (requeues > 0 and later_s > 0)


@dataclass(frozen=True)
class KnownJob:
    """A submitted job, and what Slurm shows of it."""

    submission: Submission
    queued: QueuedJob | None
    """None: it is not in the queue any more."""
    forecast: Forecast


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
    parsed = filter(None, map(_parse, lines))
    return _mark_reused([job for job in parsed if not cluster or job.cluster in {cluster, ""}])


def _mark_reused(jobs: Sequence[Submission]) -> list[Submission]:
    newest = {(job.cluster, job.job): job for job in jobs}
    return [replace(job, reused=newest[job.cluster, job.job] is not job) for job in jobs]


def ask_queue(sent: Sequence[Submission], *, all_mine: bool = False) -> list[KnownJob]:
    """Return submitted jobs as Slurm's queue shows them; with `all_mine`, asked as all jobs of the user."""
    if not sent:
        return []
    shown = queued_jobs(*(() if all_mine else (submission.job for submission in sent)))
    return identify(sent, shown, forecasts(*(job.job for job in shown)))


def identify(
    sent: Sequence[Submission], shown: Sequence[QueuedJob], ahead: Mapping[str, Forecast]
) -> list[KnownJob]:
    """Find each submitted job among the jobs that squeue shows."""
    by_id = {base_id(job.job): job for job in shown}
    known = []
    for submission in sent:
        queued = by_id.get(submission.job)
        forecast = ahead.get(submission.job, Forecast())
        if queued and not submission.is_job(queued, forecast.requeues):
            queued = None
        known.append(KnownJob(submission, queued, forecast))
    return known


def base_id(job: str) -> str:
    """Return a job id without the suffix of an array task or a component.

    >>> base_id("17_3"), base_id("17+1"), base_id("17")
    ('17', '17', '17')
    """
    return job.partition("_")[0].partition("+")[0]


def _parse(line: str) -> Submission | None:
    """Return the job of a line; None for a line that a full disk truncated."""
    try:
        return Submission(**parse_json(line))
    except (ValueError, TypeError):
        return None
