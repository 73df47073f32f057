"""The files in /etc that a host has instead of the machine's, Slurm's among them."""

from __future__ import annotations

import os
import shutil

from support.slurm_cluster.place import Place
from support.slurm_cluster.settings import HEAD, Settings, address

_ALWAYS = {
    "ClusterName": "sim",
    "SlurmctldHost": f"{HEAD}({address(HEAD)})",
    "SlurmUser": "root",
    "AuthType": "auth/munge",
    # How long a requeued job must wait before it starts again (Slurm: 120 s); also the life of a launch credential.
    "AuthInfo": "cred_expire=10",
    "SlurmdSpoolDir": "/run/slurmd",  # short: Unix sockets live here
    "SlurmctldPidFile": "/run/slurmctld.pid",
    "SlurmdPidFile": "/run/slurmd.pid",
    "SlurmctldDebug": "info",
    "SlurmdDebug": "info",
    "MailProg": "/bin/true",
    "ProctrackType": "proctrack/linuxproc",
    "TaskPlugin": "task/none",
    "MpiDefault": "none",
    "PropagateResourceLimits": "NONE",
    "ReturnToService": "2",
    "SlurmdParameters": "config_overrides",  # believe CPUs and RealMemory below, not the host's hardware
    "SelectType": "select/cons_tres",
    "SelectTypeParameters": "CR_Core",
    "SchedulerType": "sched/backfill",
    "SchedulerParameters": "sched_interval=1,bf_interval=1,batch_sched_delay=0,sched_min_interval=100000",
    "PreemptType": "preempt/partition_prio",
    "PreemptMode": "REQUEUE",
    "JobRequeue": "1",
    "KillWait": "30",
    "OverTimeLimit": "0",
    "SlurmdTimeout": "15",
    "MessageTimeout": "10",
    "JobCompType": "jobcomp/filetxt",
    "JobAcctGatherType": "jobacct_gather/linux",
    "JobAcctGatherFrequency": "5",
    "GresTypes": "gpu",
}

_WITH_CGROUP = {
    "ProctrackType": "proctrack/cgroup",
    "TaskPlugin": "task/cgroup",
    "JobAcctGatherType": "jobacct_gather/cgroup",
    "SelectTypeParameters": "CR_Core_Memory",
}

_CGROUP_CONF = """\
CgroupMountpoint=/sys/fs/cgroup
CgroupPlugin=cgroup/v1
ConstrainDevices=yes
ConstrainRAMSpace=yes
ConstrainCores=no
"""

# There is no DNS inside; without this every failed look-up would ask the servers of resolv.conf.
_NSSWITCH = (
    "passwd: files\ngroup: files\nshadow: files\nhosts: files\nservices: files\nprotocols: files\n"
)


def write(place: Place, settings: Settings) -> None:
    """Write the files for the overlay of /etc; nothing of an earlier cluster may remain."""
    shutil.rmtree(place.etc, ignore_errors=True)
    place.etc.mkdir(parents=True)
    (place.etc / "hosts").write_text(hosts(settings))
    (place.etc / "nsswitch.conf").write_text(_NSSWITCH)
    _write_munge_key(place)
    _write_for_slurm(place, settings)


def hosts(settings: Settings) -> str:
    """Return /etc/hosts.

    >>> hosts(Settings(nodes=1)).splitlines()[-2:]
    ['10.77.0.1 head', '10.77.0.11 n1']
    """
    local = ["127.0.0.1 localhost", "::1 localhost ip6-localhost"]
    return "\n".join([*local, *(f"{address(host)} {host}" for host in settings.hosts())]) + "\n"


def _write_munge_key(place: Place) -> None:
    folder = place.etc / "munge"
    folder.mkdir(mode=0o700)
    key = folder / "munge.key"
    key.write_bytes(os.urandom(128))
    key.chmod(0o400)


def _write_for_slurm(place: Place, settings: Settings) -> None:
    folder = place.etc / "slurm"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "slurm.conf").write_text("\n".join(slurm_conf(place, settings)) + "\n")
    (folder / "gres.conf").write_text(gres_conf(settings))
    if settings.cgroup:
        (folder / "cgroup.conf").write_text(_CGROUP_CONF)


def slurm_conf(place: Place, settings: Settings) -> list[str]:
    """Return the lines of slurm.conf.

    >>> from pathlib import Path
    >>> lines = slurm_conf(Place(Path("/c")), Settings(nodes=1, gpus=2, set=("KillWait=5",)))
    >>> [line for line in lines if line.startswith(("KillWait", "NodeName"))]  # doctest: +NORMALIZE_WHITESPACE
    ['KillWait=5', 'NodeName=n1 NodeAddr=10.77.0.11 Sockets=1 CoresPerSocket=4 ThreadsPerCore=1 RealMemory=8000
    Gres=gpu:h100:2 State=UNKNOWN']
    """
    entries = _ALWAYS | _files(place)
    entries |= (
        (_WITH_CGROUP | {"DefMemPerCPU": str(settings.memory // settings.cpus)})
        if settings.cgroup
        else {}
    )
    entries |= dict(entry.split("=", 1) for entry in settings.set)
    nodes = [_node(name, settings) for name in settings.names()]
    return [
        *(f"{key}={value}" for key, value in entries.items()),
        *nodes,
        *_partitions(settings),
        *settings.line,
    ]


def _files(place: Place) -> dict[str, str]:
    return {
        "StateSaveLocation": str(place.state),
        "SlurmctldLogFile": str(place.log / "slurmctld.log"),
        "SlurmdLogFile": str(place.log / "slurmd-%n.log"),
        "JobCompLoc": str(place.log / "jobcomp.log"),
    }


def _node(name: str, settings: Settings) -> str:
    gres = f"Gres=gpu:{settings.gpu_type}:{settings.gpus} " if settings.gpus else ""
    size = f"Sockets=1 CoresPerSocket={settings.cpus} ThreadsPerCore=1 RealMemory={settings.memory}"
    return f"NodeName={name} NodeAddr={address(name)} {size} {gres}State=UNKNOWN"


def _partitions(settings: Settings) -> list[str]:
    """Return three partitions; jobs of `low` can be preempted, and are then requeued, by those of the other two."""
    return [
        "PartitionName=main Nodes=ALL Default=YES PriorityTier=10 PreemptMode=OFF MaxTime=INFINITE State=UP",
        "PartitionName=high Nodes=ALL PriorityTier=20 PreemptMode=OFF State=UP",
        f"PartitionName=low Nodes=ALL PriorityTier=1 PreemptMode=REQUEUE GraceTime={settings.grace} State=UP",
    ]


def gres_conf(settings: Settings) -> str:
    """Return gres.conf, which names the device files of the GPUs."""
    if not settings.gpus:
        return ""
    return f"Name=gpu Type={settings.gpu_type} File=/run/gpu/nvidia[0-{settings.gpus - 1}]\n"
