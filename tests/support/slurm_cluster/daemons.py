"""Slurm's daemons on the hosts, the states of the nodes, and the end of a job."""

from __future__ import annotations

import subprocess
import time

from support.slurm_cluster.commands import inside, output_inside, wait_until
from support.slurm_cluster.errors import ClusterError
from support.slurm_cluster.place import Place
from support.slurm_cluster.settings import HEAD

_UNFINISHED = {
    "PENDING", "RUNNING", "COMPLETING", "CONFIGURING", "SUSPENDED", "REQUEUED", "PREEMPTED", "SIGNALING",
}  # fmt: skip


def start_head(place: Place) -> None:
    """Start the head's daemons and wait: a slurmd that finds no slurmctld retries only after a second."""
    output_inside(place, HEAD, "sh", "-c", _munged(place, HEAD))
    output_inside(place, HEAD, "slurmctld")
    wait_until("slurmctld", lambda: " UP" in output_inside(place, HEAD, "scontrol", "ping"))


def start_nodes(place: Place, names: list[str]) -> None:
    """Start the daemons of some nodes, all at once."""
    commands = {
        name: [*inside(place, name), "sh", "-c", f"{_munged(place, name)} && slurmd -N {name}"]
        for name in names
    }
    starting = {name: _start(command) for name, command in commands.items()}
    said = {name: process.communicate()[0].strip() for name, process in starting.items()}
    for name, process in starting.items():
        if process.returncode:
            raise ClusterError(f"{name}: {said[name]}")


def _start(command: list[str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def _munged(place: Place, host: str) -> str:
    files = "--key-file=/etc/munge/munge.key --pid-file=/run/munge/pid --seed-file=/run/munge/seed"
    return f"munged --force {files} --log-file={place.log}/munged-{host}.log"


def node_states(place: Place) -> dict[str, str]:
    """Return slurmctld's state of each node: idle, mixed, down* and so on."""
    lines = output_inside(place, HEAD, "sinfo", "-h", "-N", "-o", "%N %T").splitlines()
    return dict(line.split() for line in lines)


def wait_for_idle_nodes(place: Place) -> None:
    """Wait until jobs can start everywhere."""
    wait_until("nodes", lambda: set(node_states(place).values()) == {"idle"})


def slurmd(place: Place, node: str, verb: str) -> None:
    """Start a node's slurmd, or kill it without its jobs, until its port is free again."""
    if verb == "start":
        output_inside(place, node, "slurmd", "-N", node)
    else:
        gone = "while kill -0 $pid 2>/dev/null; do sleep 0.02; done"
        kill = f"pid=$(cat /run/slurmd.pid) && kill -KILL $pid && {gone}"
        output_inside(place, node, "sh", "-c", kill)


def facts_of_job(place: Place, jobid: str) -> dict[str, str]:
    """Return scontrol's facts of a job; it forgets them minutes after the end."""
    text = output_inside(place, HEAD, "scontrol", "-o", "show", "job", jobid)
    return dict(word.split("=", 1) for word in text.split() if "=" in word)


def wait_for_job(place: Place, jobid: str, timeout_s: float) -> dict[str, str]:
    """Return the facts of a job at its end; cancel it at the timeout. (`sbatch --wait` polls ever more rarely.)"""
    limit = time.monotonic() + timeout_s
    while (job := facts_of_job(place, jobid))["JobState"] in _UNFINISHED:
        if time.monotonic() > limit:
            output_inside(place, HEAD, "scancel", jobid)
            raise ClusterError(
                f"job {jobid} still {job['JobState']} after {timeout_s} s: cancelled"
            )
        time.sleep(0.2)
    return job


def jobid_in(text: str) -> str:
    """Return the job ID from the output of `sbatch --parsable`.

    >>> jobid_in("12;sim")
    '12'
    """
    return text.strip().split(";")[0]
