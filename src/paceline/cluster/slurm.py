"""Slurm's commands as functions; every error they print is translated into a fix."""

from __future__ import annotations

import contextlib
import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass

from paceline.errors import EnvironmentUnfit

_TIMEOUT_S = 30.0
_FIELDS = ("%i", "%T", "%r", "%M", "%L", "%e", "%D", "%N", "%Z")

FINAL_STATES = frozenset({
    "BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "LAUNCH_FAILED", "NODE_FAIL", "OUT_OF_MEMORY",
    "PREEMPTED", "RECONFIG_FAIL", "TIMEOUT",
})  # fmt: skip
"""The states that a job does not leave again."""

_LIST_ASSOCIATIONS = "`sacctmgr show associations user=$USER` lists yours"
_FIXES = {
    "invalid account": "use an account of yours: --account, or `account` in the cluster profile; "
    + _LIST_ASSOCIATIONS,
    "account/partition combination": "use an account that may use this partition: "
    "--account, --partition; " + _LIST_ASSOCIATIONS,
    "invalid partition": "use an existing partition: --partition; `sinfo` lists them",
    "invalid qos": "use a qos of yours: --qos; "
    "`sacctmgr show associations user=$USER format=qos` lists them",
    "invalid feature": "use a constraint that nodes have: --constraint; `sinfo -o %f` lists them",
    "node count specification": "request fewer nodes; `sinfo` shows how many the partition has",
    "node configuration is not available": "request no more than the nodes have: "
    "--gpus-per-node, `cpus_per_rank` in the cluster profile; `sinfo -o '%n %c %G'` lists it",
    "invalid generic resource": "use this cluster's names for GPUs: "
    "`gpu_request` and `gpu_type` in the cluster profile; `sinfo -o %G` lists them",
    "time limit": "request less time: --time; `sinfo -o '%P %l'` lists the time limits",
    "invalid job id": "run `paceline jobs` to list your jobs",
    "presently disabled": "this site does not allow it; submit a job chain instead: --jobs 5",
    "unable to contact": "check that the cluster is up: `sinfo`; try again in a minute",
    "access/permission denied": "ask the cluster's support whether you may use this account, "
    "partition and qos",
}


@dataclass(frozen=True)
class QueuedJob:
    """A line of squeue. Times are in Slurm's format."""

    job: str
    state: str
    """PENDING, RUNNING, COMPLETING, REQUEUED and so on."""
    reason: str
    """Why it is pending: Priority, Resources, Dependency and so on; None if it is not."""
    used: str
    left: str
    end: str
    nodes: int
    node_list: str
    folder: str
    """The working directory at submission."""

    @property
    def live(self) -> bool:
        """Whether it is pending or running, and may still write."""
        return self.state not in FINAL_STATES

    @classmethod
    def read(cls, line: str) -> QueuedJob:
        """Parse a line of squeue.

        >>> QueuedJob.read("17|PENDING|Priority|0:00|2:00:00|N/A|2||/home/me").reason
        'Priority'
        """
        job, state, reason, used, left, end, nodes, node_list, folder = line.split(
            "|", len(_FIELDS) - 1
        )
        return cls(job, state, reason, used, left, end, int(nodes), node_list, folder)


def require(command: str) -> None:
    """Raise an error on a machine without Slurm."""
    if shutil.which(command) is None:
        raise EnvironmentUnfit(
            f"there is no Slurm on this machine: {command} not found",
            fix="run this on a login node of the cluster; "
            "without Slurm, `paceline run -n 2 SCRIPT` starts a training here",
        )


def run_command(*command: str, timeout_s: float = _TIMEOUT_S) -> str:
    """Run one of Slurm's commands and return its standard output."""
    require(command[0])
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            check=False,
            timeout=timeout_s,
            umask=0o077,  # sbatch creates the log file, which must be private
        )
    except subprocess.TimeoutExpired as error:
        raise EnvironmentUnfit(
            f"{command[0]} did not answer within {timeout_s:.0f} s",
            fix="check that the cluster is up: `sinfo`",
        ) from error
    if done.returncode:
        raise _refusal(command[0], done.stderr or done.stdout)
    return done.stdout


def queued_jobs(*jobs: str) -> list[QueuedJob]:
    """Return the named jobs, or all jobs of this user, that are still in Slurm's queue."""
    chosen = [f"--jobs={','.join(jobs)}"] if jobs else ["--me"]
    form = f"--format={'|'.join(_FIELDS)}"
    try:
        output = run_command("squeue", "--noheader", "--states=all", form, *chosen)
    except EnvironmentUnfit as error:
        if "Invalid job id" in error.problem:  # ended long ago: squeue has forgotten it
            return []
        raise
    lines = [line for line in output.splitlines() if line.count("|") >= len(_FIELDS) - 1]
    return [QueuedJob.read(line) for line in lines]


def cluster_name() -> str:
    """Return the `ClusterName` of Slurm's configuration; empty without a Slurm that answers."""
    with contextlib.suppress(EnvironmentUnfit):
        config = run_command("scontrol", "show", "config")
        if match := re.search(r"^ClusterName\s*=\s*(\S+)", config, re.MULTILINE):
            return match[1]
    return ""


def cancel(jobs: Sequence[str]) -> None:
    """Cancel pending and running jobs."""
    run_command("scancel", *jobs)


def _refusal(command: str, output: str) -> EnvironmentUnfit:
    lines = []
    for line in output.splitlines():
        message = line.strip().removeprefix(f"{command}: ").removeprefix("error: ")
        if message and message not in lines:
            lines.append(message)
    text = "; ".join(lines)
    return EnvironmentUnfit(f"{command} failed: {text or 'no message'}", fix=_fix(command, text))


def _fix(command: str, text: str) -> str:
    for sign, fix in _FIXES.items():
        if sign in text.lower():
            return fix
    return f"see `man {command}`, or ask the cluster's support"
