"""How hosts are connected: a veth pair each, into a bridge that lives in the head's namespace."""

from __future__ import annotations

import contextlib
import os
import signal

from support.slurm_cluster.commands import output_of, pid_of
from support.slurm_cluster.errors import ClusterError
from support.slurm_cluster.place import RELAY, Place
from support.slurm_cluster.settings import HEAD, Settings, address


def ip(place: Place, host: str, commands: str) -> None:
    """Run commands of ip(8), one per line, in a host's network namespace."""
    output_of("nsenter", "-t", pid_of(place, host), "-n", "ip", "-batch", "-", given=commands)


def wire(place: Place, host: str, settings: Settings) -> None:
    """Connect a host. With a delay the relay does it."""
    if settings.delay_ms:
        return
    if host == HEAD:
        _make_switch(place)
        return
    cable = f"link add v-{host} type veth peer name eth0 netns {pid_of(place, host)}\n"
    ip(place, HEAD, cable + f"link set v-{host} master br0 up\n")
    ip(place, host, f"link set lo up\naddr add {address(host)}/24 dev eth0\nlink set eth0 up\n")
    if settings.rate:
        set_rate(place, host, settings.rate)


def _make_switch(place: Place) -> None:
    bridge = f"link add br0 type bridge\naddr add {address(HEAD)}/24 dev br0\nlink set br0 up\n"
    ip(place, HEAD, "link set lo up\n" + bridge)


def unwire(place: Place, host: str) -> None:
    """Remove the link of a dead host, which orphaned TCP sockets can keep for minutes; often it is gone."""
    with contextlib.suppress(ClusterError):
        ip(place, HEAD, f"link del v-{host}\n")


def set_rate(place: Place, host: str, rate: str) -> None:
    """Limit a host's link in both directions."""
    for end, device in _ends(host):
        limit = ("tbf", "rate", rate, "burst", "256kb", "latency", "20ms")
        _tc(place, end, "replace", device, *limit)


def clear_rate(place: Place, host: str) -> None:
    """Lift the limit of a host's link."""
    for end, device in _ends(host):
        with contextlib.suppress(ClusterError):  # there may be none
            _tc(place, end, "del", device)


def _tc(place: Place, host: str, verb: str, device: str, *limit: str) -> None:
    words = ("tc", "qdisc", verb, "dev", device, "root", *limit)
    output_of("nsenter", "-t", pid_of(place, host), "-n", *words)


def _ends(host: str) -> list[tuple[str, str]]:
    return [(host, "eth0"), (HEAD, f"v-{host}")]


def link(place: Place, host: str, verb: str, value: str | None = None) -> None:
    """Cut a host's link (`down`), restore it (`up`), limit it (`rate 1gbit`), or lift the limit (`clear`)."""
    if place.settings.delay_ms:
        _link_by_relay(place, host, verb)
    elif verb in ("down", "up"):
        ip(
            place, HEAD, f"link set v-{host} {verb}\n"
        )  # the switch's end: the node itself sees no carrier
    elif verb == "clear":
        clear_rate(place, host)
    elif value:
        set_rate(place, host, value)
    else:
        raise ClusterError("link rate needs a rate, such as 1gbit")


def _link_by_relay(place: Place, host: str, verb: str) -> None:
    if verb not in ("down", "up"):
        raise ClusterError("with --delay-ms the rate is fixed at the start")
    cut = cut_off(place)
    (place.run / "relay.cut").write_text(" ".join(cut | {host} if verb == "down" else cut - {host}))
    os.kill(pid_of(place, RELAY), signal.SIGHUP)


def cut_off(place: Place) -> set[str]:
    """Return the hosts whose packets the relay drops."""
    file = place.run / "relay.cut"
    return set(file.read_text().split()) if file.exists() else set()
