"""Start and stop a cluster, or one of its nodes."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
import time
from dataclasses import replace

from support.slurm_cluster import (
    boot,
    cgroups,
    daemons,
    etc,
    network,
    packages,
    relay,
    requirements,
)
from support.slurm_cluster.commands import pid_of, wait_until
from support.slurm_cluster.errors import ClusterError
from support.slurm_cluster.place import Place
from support.slurm_cluster.settings import Settings


def start(place: Place, settings: Settings) -> str:
    """Start a cluster; return how long that took."""
    settings = replace(settings, pkg=str(settings.packages()))
    settings.check(place.folder)
    requirements.check(settings)
    begin = time.monotonic()
    _prepare(place, settings)
    prepared = time.monotonic()
    _boot_all(place, settings)
    times = f"{time.monotonic() - prepared:.2f} s (+ {prepared - begin:.2f} s packages and configuration)"
    return f"{settings.nodes} nodes up in {times}"


def _prepare(place: Place, settings: Settings) -> None:
    if settings.slurm:
        packages.provide(settings)
    place.clear()
    settings.save(place.settings_file)
    etc.write(place, settings)


def _boot_all(place: Place, settings: Settings) -> None:
    for host in settings.hosts():
        boot.boot(place, host)
        network.wire(place, host, settings)
    if settings.delay_ms:
        relay.start(place)
    if settings.slurm:
        daemons.start_head(place)
        daemons.start_nodes(place, settings.names())
        daemons.wait_for_idle_nodes(place)


def stop(place: Place) -> None:
    """End every process of a cluster; a host ends with its process 1."""
    for number, timeout_s in ((signal.SIGTERM, 5), (signal.SIGKILL, 10)):
        for pid in place.alive().values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        _wait_for_end(place, timeout_s)
    if alive := place.alive():
        raise ClusterError(f"still alive: {alive}")
    place.forget()
    cgroups.remove(place)


def _wait_for_end(place: Place, timeout_s: float) -> None:
    limit = time.monotonic() + timeout_s
    while place.alive() and time.monotonic() < limit:
        time.sleep(0.01)


def hold(place: Place, settings: Settings) -> None:
    """Keep a cluster until standard input ends, which it does however the process at the other end dies."""
    if place.folder.exists() and any(place.folder.iterdir()):
        raise ClusterError(f"{place.folder} is not empty, and would be removed at the end")
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with place.locked():
            print(start(place, settings), flush=True)
        sys.stdin.read()
    except KeyboardInterrupt:
        pass
    finally:
        stop(place)
        shutil.rmtree(place.folder)


def power_off(place: Place, node: str) -> None:
    """Power a node off. The link goes down first, so that no FIN or RST gets out."""
    pid = pid_of(place, node)
    network.link(place, node, "down")
    os.kill(pid, signal.SIGKILL)
    wait_until("power off", lambda: not place.pid(node))
    if not place.settings.delay_ms:
        network.unwire(place, node)


def power_on(place: Place, node: str) -> None:
    """Boot a node that is off."""
    settings = place.settings
    if place.pid(node):
        raise ClusterError(f"{node} is up")
    if settings.delay_ms:
        raise ClusterError("power-on is not possible with --delay-ms")
    boot.boot(place, node)
    network.wire(place, node, settings)
    if settings.slurm:
        daemons.start_nodes(place, [node])
