"""What Slurm is asked and told, by its own commands; every failure says what to do."""

from __future__ import annotations

import contextlib
import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass

from paceline.errors import EnvironmentUnfit

_ANSWERS_WITHIN_S = 30.0
_FIELDS = ("%i", "%T", "%r", "%M", "%L", "%e", "%D", "%N", "%Z")

FINAL_STATES = frozenset({
    "BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "LAUNCH_FAILED", "NODE_FAIL", "OUT_OF_MEMORY",
    "PREEMPTED", "RECONFIG_FAIL", "TIMEOUT",
})  # fmt: skip
"""The states out of which a job does not come back."""

_FIXES = {
    "invalid account": "name an account that you may use: --account, or `account` in the cluster profile; `sacctmgr show associations user=$USER` lists yours",
    "account/partition combination": "name an account that may use this partition: --account, --partition; `sacctmgr show associations user=$USER` lists yours",
    "invalid partition": "name a partition that exists: --partition; `sinfo` lists them",
    "invalid qos": "name a qos that you may use: --qos; `sacctmgr show associations user=$USER format=qos` lists yours",
    "invalid feature": "name a constraint that nodes have: --constraint; `sinfo -o %f` lists them",
    "node count specification": "ask for fewer nodes; `sinfo` shows how many the partition has",
    "node configuration is not available": "ask for what the nodes have: --gpus-per-node, --cpus-per-rank; `sinfo -o '%n %c %G'` lists it",
    "invalid generic resource": "ask for GPUs as this cluster names them: `gpus` and `gpu_type` in the cluster profile; `sinfo -o %G` lists them",
    "time limit": "ask for less time: --time; `sinfo -o '%P %l'` lists the limits",
    "invalid job id": "see `paceline jobs` for the jobs that are there",
    "presently disabled": "this site does not allow it; submit a chain of jobs instead: --jobs 5",
    "unable to contact": "see whether the cluster is up: `sinfo`; try again in a minute",
    "access/permission denied": "ask the cluster's support whether you may use this account, partition and qos",
}


@dataclass(frozen=True)
class QueuedJob:
    """A job as squeue shows it. Times are as Slurm writes them."""

    job: str
    state: str
    """PENDING, RUNNING, COMPLETING, REQUEUED and so on."""
    reason: str
    """Why it waits: Priority, Resources, Dependency and so on; None if it does not."""
    used: str
    left: str
    end: str
    nodes: int
    node_list: str
    folder: str
    """Where it was submitted from."""

    @property
    def live(self) -> bool:
        """Whether it waits or runs, and may still write."""
        return self.state not in FINAL_STATES

    @classmethod
    def read(cls, line: str) -> QueuedJob:
        """Read a line of squeue.

        >>> QueuedJob.read("17|PENDING|Priority|0:00|2:00:00|N/A|2||/home/me").reason
        'Priority'
        """
        job, state, reason, used, left, end, nodes, node_list, folder = line.split(
            "|", len(_FIELDS) - 1
        )
        return cls(job, state, reason, used, left, end, int(nodes), node_list, folder)


def require(command: str) -> None:
    """Refuse to go on where there is no Slurm."""
    if shutil.which(command) is None:
        raise EnvironmentUnfit(
            f"there is no Slurm on this machine: {command} is not to be found",
            fix="do this on a login node of the cluster; here, `paceline run SCRIPT -n 2` starts a training without Slurm",
        )


def run_command(*words: str, timeout_s: float = _ANSWERS_WITHIN_S) -> str:
    """Run one of Slurm's commands; return what it says."""
    require(words[0])
    try:
        done = subprocess.run(
            words,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            check=False,
            timeout=timeout_s,
            umask=0o077,  # for a log that sbatch opens is nobody else's business
        )
    except subprocess.TimeoutExpired as error:
        raise EnvironmentUnfit(
            f"{words[0]} did not answer in {timeout_s:.0f} s",
            fix="see whether the cluster is up: `sinfo`",
        ) from error
    if done.returncode:
        raise _refused(words[0], done.stderr or done.stdout)
    return done.stdout


def queued_jobs(*jobs: str) -> list[QueuedJob]:
    """Return the jobs of this user that Slurm still knows in its queue; of those named, if any are."""
    chosen = [f"--jobs={','.join(jobs)}"] if jobs else ["--me"]
    try:
        said = run_command(
            "squeue", "--noheader", "--states=all", f"--format={'|'.join(_FIELDS)}", *chosen
        )
    except EnvironmentUnfit as error:
        if "Invalid job id" in error.problem:  # long over: squeue has forgotten it
            return []
        raise
    return [
        QueuedJob.read(line) for line in said.splitlines() if line.count("|") >= len(_FIELDS) - 1
    ]


def cluster_name() -> str:
    """Return what this cluster is called; nothing where there is none, or it does not answer."""
    with contextlib.suppress(EnvironmentUnfit):
        if found := re.search(
            r"^ClusterName\s*=\s*(\S+)", run_command("scontrol", "show", "config"), re.MULTILINE
        ):
            return found[1]
    return ""


def cancel(jobs: Sequence[str]) -> None:
    """End jobs, waiting or running."""
    run_command("scancel", *jobs)


def _refused(command: str, said: str) -> EnvironmentUnfit:
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    text = "; ".join(
        dict.fromkeys(line.removeprefix(f"{command}: ").removeprefix("error: ") for line in lines)
    )
    low = text.lower()
    fix = next(
        (fix for sign, fix in _FIXES.items() if sign in low),
        f"see `man {command}`, or ask the cluster's support",
    )
    return EnvironmentUnfit(f"{command} refused: {text or 'without a word'}", fix=fix)
