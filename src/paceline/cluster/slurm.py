"""Slurm's commands as functions; every error they print is translated into a fix."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from paceline.errors import EnvironmentUnfit

_TIMEOUT_S = 30.0
_QUERY_TIMEOUT_S = 10.0
_FIELDS = ("%i", "%T", "%r", "%M", "%L", "%D", "%N", "%V", "%U", "%j")
_SEPARATOR = "\x1f"  # no job name contains it
_CONFIG_FILES = ("/etc/slurm/slurm.conf", "/run/slurm/conf/slurm.conf")
_TIMES = {"SLURM_TIME_FORMAT": "standard"}
_TIMES_IN_UTC = _TIMES | {"TZ": "UTC0"}

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
    "timed out": "check that the cluster is up: `sinfo`; try again in a minute",
    "unable to contact": "check that the cluster is up: `sinfo`; try again in a minute",
    "access/permission denied": "ask the cluster's support whether you may use this account, "
    "partition and qos",
}


@dataclass(frozen=True)
class QueuedJob:
    """A line of squeue. Durations are in Slurm's format."""

    job: str
    state: str
    """PENDING, RUNNING, COMPLETING, REQUEUED and so on."""
    reason: str
    """Why it is pending: Priority, Resources, Dependency and so on; None if it is not."""
    used: str
    left: str
    nodes: int
    node_list: str
    submitted_s: float
    """Time of submission, or of the last requeue, by the controller's clock."""
    user: int
    name: str

    @property
    def live(self) -> bool:
        """Whether it is pending or running, and may still write."""
        return self.state not in FINAL_STATES

    @classmethod
    def read(cls, line: str) -> QueuedJob:
        r"""Parse a line of squeue.

        >>> line = "17 PENDING Priority 0:00 2:00:00 2 n[1-2] 2030-01-01T10:00:00 1000 digits"
        >>> QueuedJob.read(line.replace(" ", "\x1f")).submitted_s
        1893492000.0
        """
        job, state, reason, used, left, nodes, node_list, time, user, name = line.split(_SEPARATOR)
        submitted_s = datetime.fromisoformat(time).replace(tzinfo=UTC).timestamp()
        return cls(
            job, state, reason, used, left, int(nodes), node_list, submitted_s, int(user), name
        )


@dataclass(frozen=True)
class Forecast:
    """What squeue shows only in its second format."""

    starts: str = ""
    """Slurm's expected start time, or the time of the last start."""
    requeues: int = 0


def require(command: str) -> None:
    """Raise an error on a machine without Slurm."""
    if shutil.which(command) is None:
        raise EnvironmentUnfit(
            f"there is no Slurm on this machine: {command} not found",
            fix="run this on a login node of the cluster; "
            "without Slurm, `paceline run -n 2 SCRIPT` starts a training here",
        )


def run_command(
    *command: str, timeout_s: float = _TIMEOUT_S, env: Mapping[str, str] | None = None
) -> str:
    """Run one of Slurm's commands, with these variables added, and return its standard output."""
    require(command[0])
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            check=False,
            timeout=timeout_s,
            env={**os.environ, **(env or {})},
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
    chosen = f"--jobs={','.join(jobs)}" if jobs else "--me"
    lines = _squeue(f"--format={_SEPARATOR.join(_FIELDS)}", chosen, _TIMES_IN_UTC)
    return [QueuedJob.read(line) for line in lines if line.count(_SEPARATOR) == len(_FIELDS) - 1]


def forecasts(*jobs: str) -> dict[str, Forecast]:
    """Return the expected start and the number of requeues of each job that Slurm knows."""
    form = "--Format=JobID:32,StartTime:32,RestartCnt:12"
    by_job = {}
    for line in _squeue(form, f"--jobs={','.join(jobs)}", _TIMES) if jobs else ():
        row = line.split()
        if len(row) == 3 and row[2].isdecimal():
            job, start, requeues = row
            by_job[job] = Forecast("" if start == "N/A" else start, int(requeues))
    return by_job


def _squeue(form: str, chosen: str, env: Mapping[str, str]) -> list[str]:
    try:
        output = run_command(
            "squeue",
            "--noheader",
            "--states=all",
            form,
            chosen,
            timeout_s=_QUERY_TIMEOUT_S,
            env=env,
        )
    except EnvironmentUnfit as error:
        if "Invalid job id" in error.problem:  # ended long ago: squeue has forgotten it
            return []
        raise
    return output.split("\n")


def cluster_name() -> str:
    """Return Slurm's `ClusterName`: from its file, which is there while the controller is away, else by asking."""
    for file in filter(None, (os.environ.get("SLURM_CONF"), *_CONFIG_FILES)):
        with contextlib.suppress(OSError):
            if name := _cluster_in(Path(file).read_text(encoding="utf-8", errors="replace")):
                return name
    with contextlib.suppress(EnvironmentUnfit):
        return _cluster_in(run_command("scontrol", "show", "config", timeout_s=_QUERY_TIMEOUT_S))
    return ""


def _cluster_in(config: str) -> str:
    r"""Return the cluster's name in a configuration; Slurm writes it in lower case.

    >>> _cluster_in("# ClusterName=old\nclustername = Alps # since 2024\n")
    'alps'
    """
    match = re.search(r"^\s*ClusterName\s*=\s*([^\s#]+)", config, re.MULTILINE | re.IGNORECASE)
    return match[1].lower() if match else ""


def cancel(jobs: Sequence[str], name: str) -> None:
    """Cancel pending and running jobs of this user and this name, and no others.

    scancel compares them again, because a number may belong to another job by now.
    """
    try:
        run_command("scancel", f"--user={os.getuid()}", f"--name={name}", *jobs)
    except EnvironmentUnfit as error:
        if "Invalid job id" not in error.problem:  # it has ended since squeue listed it
            raise


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
