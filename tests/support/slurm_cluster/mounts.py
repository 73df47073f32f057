"""The file systems of a host: the machine's, with some folders replaced."""

from __future__ import annotations

import os
from pathlib import Path

from support.slurm_cluster import cgroups, linux
from support.slurm_cluster.place import Place
from support.slurm_cluster.settings import Settings

_STASH = Path("/run/stash")  # where folders that are about to be covered stay in reach
_NVIDIA = 195


def build(place: Place, host: str, settings: Settings) -> None:
    """Mount everything, in the host's own namespaces; the order matters."""
    linux.keep_mounts_to_ourselves()
    linux.mount("proc", "/proc")
    _mount_run()
    _mount_sys()
    if settings.cgroup:
        cgroups.show_own_part(place, host)
    linux.mount("tmpfs", "/dev/shm", "mode=1777")
    _lay_over_system(place, settings)
    _make_gpus(settings.gpus)
    _mount_local_folders(place, host, settings)


def _mount_run() -> None:
    linux.mount("tmpfs", "/run", "mode=755")
    for name in ("stash", "munge", "slurmd", "gpu", "lock"):
        Path("/run", name).mkdir()
    Path("/run/munge").chmod(0o755)


def _mount_sys() -> None:
    """Mount a new sysfs for this host's network devices, and keep the cgroups, which it lacks."""
    kept = _STASH / "cgroup"
    kept.mkdir()
    linux.bind("/sys/fs/cgroup", kept, recursive=True)
    linux.mount("sysfs", "/sys")
    linux.bind(kept, "/sys/fs/cgroup", recursive=True)


def _lay_over_system(place: Place, settings: Settings) -> None:
    programs = settings.packages() / "usr"
    if settings.slurm and programs.is_dir():
        linux.mount("overlay", "/usr", f"lowerdir={programs}:/usr")
    linux.mount("overlay", "/etc", f"lowerdir={place.etc}:/etc")
    if settings.slurm:
        linux.bind(place.etc / "slurm", "/etc/slurm")


def _make_gpus(count: int) -> None:
    """Make device files without a driver, which Slurm needs for GPUs; opening one fails with ENXIO."""
    for number in range(count):
        os.mknod(f"/run/gpu/nvidia{number}", 0o20666, os.makedev(_NVIDIA, number))


def _mount_local_folders(place: Place, host: str, settings: Settings) -> None:
    local = [Path(folder) for folder in settings.node_local]
    ours = [folder for folder in (place.folder, settings.packages()) if folder.exists()]
    needed = [folder for folder in ours if set(local) & set(folder.parents)]
    kept = {
        folder: _STASH / str(i) for i, folder in enumerate([*map(Path, settings.shared), *needed])
    }
    for folder, stash in kept.items():
        stash.mkdir()
        linux.bind(folder, stash)
    for folder in local:
        linux.bind(_own(place, host, folder), folder)
    for folder, stash in kept.items():
        folder.mkdir(parents=True, exist_ok=True)
        linux.bind(stash, folder)


def _own(place: Place, host: str, folder: Path) -> Path:
    """Return the host's replacement of a folder."""
    own = place.nodes / host / str(folder).strip("/").replace("/", "_")
    own.mkdir(parents=True, exist_ok=True)
    own.chmod(0o1777)
    return own
