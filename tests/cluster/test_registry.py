"""A job is known by more than its number."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from pathlib import Path

import pytest

from paceline.cluster.registry import Submission, identify, register, submissions
from paceline.cluster.slurm import Forecast, QueuedJob
from support.run_folders import squeue_line, submission

NOW_S = time.time()
RUNNING = QueuedJob.read(squeue_line("17", "RUNNING", "digits", submitted_s=NOW_S))
SENT = replace(submission("17", Path("/runs/digits"), time_s=NOW_S + 2), user=os.getuid())


@pytest.mark.parametrize(
    ("sent", "queued", "requeues", "same"),
    [
        (SENT, RUNNING, 0, True),
        (replace(SENT, user=-1), RUNNING, 0, True),
        (SENT, replace(RUNNING, submitted_s=NOW_S + 86400), 2, True),
        (SENT, replace(RUNNING, submitted_s=NOW_S + 86400), 0, False),
        (SENT, replace(RUNNING, submitted_s=NOW_S - 86400), 2, False),
        (SENT, replace(RUNNING, name="other"), 0, False),
        (SENT, replace(RUNNING, user=os.getuid() + 1), 0, False),
        (replace(SENT, reused=True), RUNNING, 0, False),
    ],
    ids=["same", "old", "requeued", "later", "earlier", "name", "user", "reused"],
)
def test_a_number_alone_is_not_a_job(
    sent: Submission, queued: QueuedJob, requeues: int, same: bool
) -> None:
    [known] = identify([sent], [queued], {"17": Forecast("", requeues)})
    assert known.queued == (queued if same else None)


def test_of_two_jobs_of_one_number_only_the_later_can_be_in_the_queue(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    for run, cluster in (("/a/digits", "one"), ("/c/digits", "two"), ("/b/digits", "one")):
        register(replace(SENT, run=run, cluster=cluster))
    found = [(job.run, job.reused) for job in submissions("one")]
    assert found == [("/a/digits", True), ("/b/digits", False)]
