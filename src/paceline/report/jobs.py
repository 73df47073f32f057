"""The jobs of a run in Slurm's queue."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from paceline.cluster.registry import KnownJob, Submission, ask_queue
from paceline.cluster.slurm import FINAL_STATES, QueuedJob
from paceline.errors import EnvironmentUnfit
from paceline.world.hostlist import expand_hostlist

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
    problem: str = ""
    """Why Slurm could not launch it, and what to do."""

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
    return [with_queue_state(known) for known in ask_queue(submissions)]


def all_jobs(submissions: Sequence[Submission]) -> list[RunJob]:
    """Return submitted jobs with their state, from one query for all jobs of the user."""
    return [with_queue_state(known) for known in ask_queue(submissions, all_mine=True)]


def jobs_or_unknown(submissions: Sequence[Submission]) -> tuple[list[RunJob], str]:
    """Return submitted jobs with their state from one query, and why it is unknown while Slurm does not answer."""
    try:
        return all_jobs(submissions), ""
    except EnvironmentUnfit as error:
        return unknown_jobs(submissions), error.problem


def unknown_jobs(submissions: Sequence[Submission]) -> list[RunJob]:
    """Return submitted jobs while Slurm does not answer."""
    return [
        RunJob(submission.job, GONE if submission.reused else UNKNOWN, submission.log)
        for submission in submissions
    ]


def with_queue_state(known: KnownJob) -> RunJob:
    """Return a submitted job with the state that squeue shows."""
    job = RunJob(known.submission.job, GONE, known.submission.log)
    queued = known.queued
    if queued is None:
        return job
    return replace(
        job,
        state=queued.state,
        reason="" if queued.reason == "None" else queued.reason,
        used=queued.used,
        left=queued.left,
        nodes=queued.nodes,
        node_list=queued.node_list,
        starts=known.forecast.starts if queued.state in WAITING else "",
        requeues=known.forecast.requeues,
        problem=_launch_problem(known.submission, queued),
    )


def _launch_problem(submission: Submission, queued: QueuedJob) -> str:
    """Explain the reasons of Slurm for a job that it could not launch."""
    if queued.reason == "JobLaunchFailure":
        folder = Path(submission.log).parent
        if not folder.is_dir():
            return f"Slurm could not open the log: {folder} does not exist; submit it again"
        nodes = expand_hostlist(queued.node_list) if queued.node_list else ["its first node"]
        return (
            f"Slurm could not launch it: {folder} is probably not on {nodes[0]}, or not writable there; "
            "put the runs on a disk that all nodes share: runs=FOLDER"
        )
    if "requeued held" in queued.reason.replace("_", " "):
        return (
            "Slurm could not launch it on its nodes (their prolog failed) and holds it; "
            f"try again: `scontrol release {queued.job}`"
        )
    return ""
