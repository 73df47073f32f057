"""Slurm's programs: Debian packages, unpacked into a folder and never installed."""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
from collections.abc import Iterable
from pathlib import Path

from support.slurm_cluster.commands import output_of
from support.slurm_cluster.errors import ClusterError, NotAvailable
from support.slurm_cluster.settings import Settings, shared_packages

_SLURM = ("slurmctld", "slurmd", "slurm-client", "munge")
_DAEMONS = ("slurmctld", "slurmd", "slurmstepd")


def provide(settings: Settings) -> None:
    """Unpack the packages that these settings need and this machine lacks; once for all clusters."""
    folder = settings.packages()
    _claim(folder)
    with (folder / "lock").open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        _unpack(folder, _SLURM)


def _claim(folder: Path) -> None:
    """Make the folder, or refuse one of another user, whose programs would run as root."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    found = folder.lstat()
    if folder == shared_packages() and (
        found.st_uid != os.geteuid() or not stat.S_ISDIR(found.st_mode)
    ):
        raise NotAvailable(
            f"{folder} belongs to somebody else; name a folder of your own with CLUSTER_PKG"
        )


def _unpack(folder: Path, wanted: Iterable[str]) -> None:
    done = folder / "-".join(("unpacked", *wanted))
    if done.exists():
        return
    if not (shutil.which("apt-get") and shutil.which("dpkg")):
        raise NotAvailable(
            "needs Debian's packages of Slurm, and this machine has no apt-get and dpkg to get them"
        )
    try:
        _download(folder, _missing(wanted))
    except ClusterError as error:
        raise NotAvailable(
            f"Debian's packages of Slurm cannot be had (`apt-get update` may help): {error}"
        ) from error
    _link_daemons(folder / "usr/sbin")
    done.touch()


def _missing(wanted: Iterable[str]) -> list[str]:
    """Return the packages, with versions, that apt-get would install."""
    return missing_in(
        output_of("apt-get", "install", "-s", "-y", "--no-install-recommends", *wanted)
    )


def missing_in(plan: str) -> list[str]:
    """Return the packages to install from what `apt-get install -s` prints. An upgrade names the old version first.

    >>> missing_in("Inst slurmd (22.05.8-4 Debian:12 [arm64])\\nInst libc6 [2.36-9] (2.36-10 Debian:12 [arm64])")
    ['slurmd=22.05.8-4']
    """
    lines = [line.split() for line in plan.splitlines() if line.startswith("Inst ")]
    return [f"{words[1]}={words[2].lstrip('(')}" for words in lines if not words[2].startswith("[")]


def _download(folder: Path, packages: list[str]) -> None:
    debs = folder / "debs"
    debs.mkdir(exist_ok=True)
    if packages:
        output_of("apt-get", "-o", "APT::Sandbox::User=root", "download", *packages, folder=debs)
    for deb in sorted(debs.glob("*.deb")):
        output_of("dpkg", "-x", deb, folder)
        deb.unlink()


def _link_daemons(folder: Path) -> None:
    """Give the daemons their names, as update-alternatives would.

    Debian calls them slurmd-wlm and so on. Started under that name they silently ignore every Gres=: the code asks
    for the name of the program.
    """
    for daemon in _DAEMONS:
        if (folder / f"{daemon}-wlm").exists() and not (folder / daemon).exists():
            (folder / daemon).symlink_to(f"{daemon}-wlm")
