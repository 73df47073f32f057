"""Whether this machine can run such a cluster, and if not, why."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from support.slurm_cluster.cgroups import hierarchies
from support.slurm_cluster.errors import NotAvailable
from support.slurm_cluster.settings import Settings

_TOOLS = {"unshare": "util-linux", "nsenter": "util-linux", "ip": "iproute2"}
_TRIAL = "mount -t overlay overlay -o lowerdir=/usr:/etc /etc"


def why_no_hosts() -> str:
    """Return why this machine cannot emulate hosts; nothing if it can."""
    if not Path("/proc/self/ns").is_dir():
        return "needs Linux"
    if os.geteuid() != 0:
        return "needs root"
    lacking = {package for tool, package in _TOOLS.items() if not shutil.which(tool)}
    if lacking:
        return f"needs {' and '.join(sorted(lacking))} (Debian: apt-get install {' '.join(sorted(lacking))})"
    return _why_no_namespaces()


def _why_no_namespaces() -> str:
    words = ["unshare", "--mount", "--uts", "--ipc", "--net", "--pid", "--fork", "sh", "-c", _TRIAL]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    return f"needs namespaces and overlayfs: {done.stderr.strip()}" if done.returncode else ""


def check(settings: Settings) -> None:
    """Raise an error if this machine cannot run the cluster."""
    if reason := why_no_hosts():
        raise NotAvailable(reason)
    if settings.cgroup and not hierarchies():
        raise NotAvailable("needs cgroup v1 hierarchies below /sys/fs/cgroup")
    if settings.rate and not settings.delay_ms and not shutil.which("tc"):
        raise NotAvailable("needs tc for a rate (Debian: apt-get install iproute2)")
    if settings.delay_ms and not Path("/dev/net/tun").exists():
        raise NotAvailable("needs /dev/net/tun for a delay")
