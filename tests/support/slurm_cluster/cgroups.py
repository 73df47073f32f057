"""The part of each cgroup v1 hierarchy that belongs to a cluster."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from support.slurm_cluster import linux
from support.slurm_cluster.place import Place

_NEEDED = ("freezer", "devices", "memory", "cpuacct")


def hierarchies() -> list[Path]:
    """Return the mounted v1 hierarchies; none if one that Slurm needs is missing."""
    found = {
        tasks.parent.resolve() for tasks in Path("/sys/fs/cgroup").glob("*/tasks")
    }  # cpu may be cpu,cpuacct's name
    names = {name for tree in found for name in tree.name.split(",")}
    return sorted(found) if names >= set(_NEEDED) else []


def own_name(place: Place) -> str:
    """Return the name of a cluster's part."""
    return "cluster-" + hashlib.sha256(str(place.folder).encode()).hexdigest()[:8]


def show_own_part(place: Place, host: str) -> None:
    """Make this host see its own part as the root of each hierarchy."""
    for tree in hierarchies():
        own = tree / own_name(place) / host
        own.mkdir(parents=True, exist_ok=True)
        for part in (own.parent, own):
            _inherit_cpus(part)
        linux.bind(own, tree)


def _inherit_cpus(part: Path) -> None:
    """Copy the parent's cpuset: a new one is empty, and accepts no process."""
    for name in ("cpuset.cpus", "cpuset.mems"):
        if (part / name).exists():
            (part / name).write_text((part.parent / name).read_text())


def remove(place: Place) -> None:
    """Remove a cluster's part, whose processes are all gone, from all hierarchies."""
    for tree in hierarchies():
        for part, _, _ in os.walk(tree / own_name(place), topdown=False):
            os.rmdir(part)
