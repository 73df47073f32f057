"""Submit a job, wait for it, and return its outcome."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Mapping
from pathlib import Path

from support.slurm_cluster.attend import outside_of_jobs
from support.slurm_cluster.commands import inside, output_inside
from support.slurm_cluster.errors import ClusterError
from support.slurm_cluster.place import Place
from support.slurm_cluster.settings import HEAD

_UNFINISHED = {
    "PENDING",
    "RUNNING",
    "COMPLETING",
    "CONFIGURING",
    "SUSPENDED",
    "REQUEUED",
    "PREEMPTED",
    "SIGNALING",
}
_TOOK_TOO_LONG = 124


class JobTookTooLong(ClusterError):
    """A job that was cancelled after the timeout."""


def facts(place: Place, jobid: str) -> dict[str, str]:
    """Return scontrol's facts of a job; it forgets them minutes after the end."""
    text = output_inside(place, HEAD, "scontrol", "-o", "show", "job", jobid)
    return dict(word.split("=", 1) for word in text.split() if "=" in word)


def wait(place: Place, jobid: str, timeout_s: float) -> dict[str, str]:
    """Return the facts of a job at its end; cancel it at the timeout. (`sbatch --wait` polls ever more rarely.)"""
    limit = time.monotonic() + timeout_s
    while (job := facts(place, jobid))["JobState"] in _UNFINISHED:
        if time.monotonic() > limit:
            output_inside(place, HEAD, "scancel", jobid)
            raise JobTookTooLong(
                f"job {jobid} still {job['JobState']} after {timeout_s} s: cancelled"
            )
        time.sleep(0.2)
    return job


def exit_code(job: Mapping[str, str]) -> int:
    """Return the exit status of a job as a shell would.

    >>> exit_code({"ExitCode": "3:0", "JobState": "FAILED"}), exit_code({"ExitCode": "0:15", "JobState": "CANCELLED"})
    (3, 143)
    >>> exit_code({"ExitCode": "0:0", "JobState": "NODE_FAIL"}), exit_code({"ExitCode": "0:0", "JobState": "COMPLETED"})
    (1, 0)
    """
    code, signal = map(int, job["ExitCode"].split(":"))
    if signal and not code:
        return 128 + signal
    return code or int(job["JobState"] != "COMPLETED")


def submit(place: Place, words: list[str], timeout_s: float) -> int:
    """Submit a job, wait for its end, print its outcome, and return its exit status."""
    command = [*inside(place, HEAD, Path.cwd()), "sbatch", "--parsable", *words]
    done = subprocess.run(
        command, text=True, stdout=subprocess.PIPE, env=outside_of_jobs(), check=False
    )
    if done.returncode:
        return done.returncode
    jobid, start = jobid_in(done.stdout), time.monotonic()
    try:
        job = wait(place, jobid, timeout_s)
    except JobTookTooLong as error:
        print(error)
        return _TOOK_TOO_LONG
    print(
        f"job {jobid} {_summary(job)} {time.monotonic() - start:.1f} s output={job.get('StdOut', '')}"
    )
    return exit_code(job)


def jobid_in(text: str) -> str:
    """Return the job ID from the output of `sbatch --parsable`.

    >>> jobid_in("12;sim")
    '12'
    """
    return text.strip().split(";")[0]


def _summary(job: Mapping[str, str]) -> str:
    code, signal = job["ExitCode"].split(":")
    return f"{job['JobState']} exit={code} signal={signal} restarts={job['Restarts']} reason={job['Reason']}"
