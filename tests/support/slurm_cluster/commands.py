"""Run a command on this host or inside a node, and poll for its effect."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from support.slurm_cluster.errors import ClusterError
from support.slurm_cluster.place import Place


def output_of(*words: object, folder: Path | None = None, given: str = "") -> str:
    """Return the output of a command; fail with its error output."""
    command = [str(word) for word in words]
    done = subprocess.run(
        command, text=True, input=given, capture_output=True, cwd=folder, check=False
    )
    if done.returncode:
        text = done.stderr.strip() or done.stdout.strip()
        raise ClusterError(f"{' '.join(command)}: exit status {done.returncode}: {text}")
    return done.stdout


def pid_of(place: Place, host: str) -> int:
    """Return the process 1 of a host that must be up."""
    pid = place.pid(host)
    if not pid:
        raise ClusterError(f"{host} is not up")
    return pid


def inside(place: Place, host: str, folder: Path = Path("/")) -> list[str]:
    """Return the command prefix that runs a command inside a host."""
    pid = str(pid_of(place, host))
    return ["nsenter", "-t", pid, "-m", "-u", "-i", "-n", "-p", f"--wd={folder}"]


def output_inside(place: Place, host: str, *words: object) -> str:
    """Return the output of a command inside a host."""
    return output_of(*inside(place, host), *words)


def wait_until(what: str, ready: Callable[[], object], timeout_s: float = 120) -> None:
    """Poll until a condition holds; a command that fails counts as not yet."""
    limit, last = time.monotonic() + timeout_s, ""
    while True:
        try:
            if ready():
                return
        except ClusterError as error:
            last = str(error)
        if time.monotonic() > limit:
            raise ClusterError(f"{what}: not ready after {timeout_s} s. {last}")
        time.sleep(0.02)
