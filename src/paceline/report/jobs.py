"""How the jobs of a run stand in the queue."""

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
"""The state of a job that Slurm has forgotten, some minutes after its end."""

UNKNOWN = "UNKNOWN"
"""The state of a job while Slurm does not answer."""


@dataclass(frozen=True)
class RunJob:
    """A job of a run, as Slurm sees it now."""

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
    """When Slurm expects to start it, where it does."""
    requeues: int = 0

    @property
    def live(self) -> bool:
        """Whether it waits or runs, as far as is known."""
        return self.state not in FINAL_STATES and self.state != GONE

    @property
    def waits(self) -> bool:
        """Whether it has yet to start, or to start again."""
        return self.state in WAITING

    @property
    def runs(self) -> bool:
        """Whether it has nodes."""
        return self.live and not self.waits and self.state != UNKNOWN


def jobs_of(submissions: Sequence[Submission]) -> list[RunJob]:
    """Ask Slurm about the jobs of a run."""
    ids = [submission.job for submission in submissions]
    return with_queue_state(submissions, queued_jobs(*ids), forecasts(ids)) if ids else []


def all_jobs(submissions: Sequence[Submission]) -> list[RunJob]:
    """Ask Slurm about all jobs of this user at once."""
    shown = queued_jobs()
    return with_queue_state(submissions, shown, forecasts([job.job for job in shown]))


def unknown_jobs(submissions: Sequence[Submission]) -> list[RunJob]:
    """Return the jobs of a run of which nothing can be known."""
    return [RunJob(submission.job, UNKNOWN, submission.log) for submission in submissions]


def with_queue_state(
    submissions: Sequence[Submission],
    shown: Sequence[QueuedJob],
    ahead: Mapping[str, tuple[str, int]],
) -> list[RunJob]:
    """Return each submitted job with what squeue shows of it.

    >>> sent = [Submission(job, "/r", "t.py", 1, 1, "1:00", "/r/log", 0.0) for job in ("17", "18")]
    >>> shown = [QueuedJob.read("18|PENDING|Priority|0:00|2:00:00|N/A|2||/home/me")]
    >>> [(job.job, job.state, job.reason, job.requeues) for job in with_queue_state(sent, shown, {"18": ("", 1)})]
    [('17', 'GONE', '', 0), ('18', 'PENDING', 'Priority', 1)]
    """
    by_id = {base_id(job.job): job for job in shown}
    found = []
    for submission in submissions:
        job = RunJob(submission.job, GONE, submission.log)
        if seen := by_id.get(base_id(submission.job)):
            reason = "" if seen.reason == "None" else seen.reason
            starts, requeues = ahead.get(base_id(seen.job), ("", 0))
            job = replace(
                job, state=seen.state, reason=reason, used=seen.used, left=seen.left, nodes=seen.nodes,
                node_list=seen.node_list, starts=starts if seen.state in WAITING else "", requeues=requeues,
            )  # fmt: skip
        found.append(job)
    return found


def forecasts(jobs: Sequence[str]) -> dict[str, tuple[str, int]]:
    """Return when Slurm expects to start each job, and how often it was requeued; what it does not tell is left out."""
    if not jobs:
        return {}
    fields = "JobID:32,StartTime:32,RestartCnt:12"
    try:
        said = run_command(
            "squeue", "--noheader", "--states=all", f"--Format={fields}", f"--jobs={','.join(jobs)}"
        )
    except EnvironmentUnfit:
        return {}
    rows = (line.split() for line in said.splitlines())
    return {
        row[0]: ("" if row[1] == "N/A" else row[1], int(row[2]))
        for row in rows
        if len(row) == 3 and row[2].isdecimal()
    }


def base_id(job: str) -> str:
    """Return the id of a job without that of its part.

    >>> base_id("17_3"), base_id("17+1"), base_id("17")
    ('17', '17', '17')
    """
    return job.partition("_")[0].partition("+")[0]
