"""Processes, devices and cgroups that a private cluster could leave on the machine."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path

from support.slurm_cluster.cgroups import own_name
from support.slurm_cluster.place import Place


def namespaces_of(place: Place) -> set[str]:
    """Return the namespaces in which the processes of a cluster live."""
    return {link for pid in place.alive().values() for link in _links(Path(f"/proc/{pid}"))}


def _links(process: Path) -> set[str]:
    return {str((process / "ns" / kind).readlink()) for kind in ("pid", "net", "mnt")}


def processes_in(namespaces: set[str]) -> list[str]:
    """Return the processes that live in one of some namespaces."""
    return _processes(lambda process: bool(_links(process) & namespaces))


def processes_that_know(folder: Path) -> list[str]:
    """Return the processes with a folder in their mounts, open files, command or environment."""
    name = str(folder).encode()

    def knows(process: Path) -> bool:
        opened = [str(file.readlink()).encode() for file in (process / "fd").iterdir()]
        texts = [(process / file).read_bytes() for file in ("mountinfo", "cmdline", "environ")]
        return any(name in text for text in (*opened, *texts))

    return _processes(knows)


def _processes(condition: Callable[[Path], bool]) -> list[str]:
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has just ended
            if condition(process):
                found.append(f"{process.name} {(process / 'comm').read_text().strip()}")
    return found


def devices() -> set[str]:
    """Return the names of the machine's network devices."""
    return {path.name for path in Path("/sys/class/net").iterdir()}


def cgroups_of(place: Place) -> list[Path]:
    """Return the cgroups of one cluster; those of other clusters may come and go."""
    return list(Path("/sys/fs/cgroup").glob(f"*/{own_name(place)}"))
