"""The files in /etc that a host has instead of the machine's."""

from __future__ import annotations

import os
import shutil

from support.slurm_cluster import slurm_conf
from support.slurm_cluster.place import Place
from support.slurm_cluster.settings import Settings, address

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
    slurm_conf.write(place, settings)


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
