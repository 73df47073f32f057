"""The jobs of a run in Slurm's queue."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from paceline.cluster.registry import Submission
from paceline.cluster.slurm import FINAL_STATES, QueuedJob, queued_jobs, run_command
from paceline.errors import EnvironmentUnfit

WAITING = frozenset(
    {"PENDING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT", "RESV_DEL_HOLD"}
)

GONE = "GONE"
"""The state of a job that Slurm no longer lists, some minutes after its end."""

UNKNOWN = "UNKNOWN"
"""The state of a job while Slurm does not answer."""


@dataclass(frozen=True)
class RunJob:
    """A job of a run, with its current state in Slurm."""

    job: str
    state: str
    log: str
    reason: str = ""
    """Why it waits, or why it ended."""
    used: str = ""
    left: str = ""
    nodes: int = 0
    node_list: str = ""
    starts: str = ""
    """Slurm's expected start time, if any."""
    requeues: int = 0

    @property
    def live(self) -> bool:
        """Whether it waits or runs, or its state is unknown."""
        return self.state not in FINAL_STATES and self.state != GONE

    @property
    def waits(self) -> bool:
        """Whether it is queued or requeued."""
        return self.state in WAITING

    @property
    def runs(self) -> bool:
        """Whether it has been allocated nodes."""
        return self.live and not self.waits and self.state != UNKNOWN


def jobs_of(submissions: Sequence[Submission]) -> list[RunJob]:
    """Return the jobs of a run with their state in Slurm."""
    ids = [submission.job for submission in submissions]
    return with_queue_state(submissions, queued_jobs(*ids), forecasts(ids)) if ids else []


def all_jobs(submissions: Sequence[Submission]) -> list[RunJob]:
    """Return submitted jobs with their state, from one query for all jobs of the user."""
    shown = queued_jobs()
    return with_queue_state(submissions, shown, forecasts([job.job for job in shown]))


def unknown_jobs(submissions: Sequence[Submission]) -> list[RunJob]:
    """Return the jobs of a run while Slurm does not answer."""
    return [RunJob(submission.job, UNKNOWN, submission.log) for submission in submissions]


def with_queue_state(
    submissions: Sequence[Submission],
    shown: Sequence[QueuedJob],
    ahead: Mapping[str, tuple[str, int]],
) -> list[RunJob]:
    """Return each submitted job with the state that squeue shows.

    >>> sent = [Submission(job, "/r", "t.py", 1, 1, "1:00", "/r/log", 0.0) for job in ("17", "18")]
    >>> shown = [QueuedJob.read("18|PENDING|Priority|0:00|2:00:00|N/A|2||/home/me")]
    >>> [(job.job, job.state, job.reason, job.requeues) for job in with_queue_state(sent, shown, {"18": ("", 1)})]
    [('17', 'GONE', '', 0), ('18', 'PENDING', 'Priority', 1)]
    """
    by_id = {base_id(job.job): job for job in shown}
    jobs = []
    for submission in submissions:
        job = RunJob(submission.job, GONE, submission.log)
        if queued_job := by_id.get(base_id(submission.job)):
            starts, requeues = ahead.get(base_id(queued_job.job), ("", 0))
            job = replace(
                job,
                state=queued_job.state,
                reason="" if queued_job.reason == "None" else queued_job.reason,
                used=queued_job.used,
                left=queued_job.left,
                nodes=queued_job.nodes,
                node_list=queued_job.node_list,
                starts=starts if queued_job.state in WAITING else "",
                requeues=requeues,
            )
        jobs.append(job)
    return jobs


def forecasts(jobs: Sequence[str]) -> dict[str, tuple[str, int]]:
    """Return the expected start and the number of requeues of each job that Slurm knows."""
    if not jobs:
        return {}
    fields = "JobID:32,StartTime:32,RestartCnt:12"
    try:
        output = run_command(
            "squeue", "--noheader", "--states=all", f"--Format={fields}", f"--jobs={','.join(jobs)}"
        )
    except EnvironmentUnfit:
        return {}
    by_job = {}
    for line in output.splitlines():
        row = line.split()
        if len(row) == 3 and row[2].isdecimal():
            job, start, requeues = row
            by_job[job] = "" if start == "N/A" else start, int(requeues)
    return by_job


def base_id(job: str) -> str:
    """Return a job id without the suffix of an array task or a component.

    >>> base_id("17_3"), base_id("17+1"), base_id("17")
    ('17', '17', '17')
    """
    return job.partition("_")[0].partition("+")[0]
