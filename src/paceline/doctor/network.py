"""Which interface carries the messages, and whether name and ports of this host would let others in."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from paceline import handover
from paceline.doctor.finding import Finding, passed, problem
from paceline.errors import PacelineError
from paceline.world.address import choose_address, interface_of, is_loopback, own_addresses, resolve
from paceline.world.network import GLOO, NCCL

_BRIDGES = ("docker", "virbr", "br-", "veth", "cni", "flannel", "podman")
_EPHEMERAL = "/proc/sys/net/ipv4/ip_local_port_range"


@dataclass(frozen=True)
class Interface:
    """One address of this host."""

    name: str
    address: str
    speed_mbps: int = 0
    """0: it does not say."""
    mtu: int = 0


@dataclass(frozen=True)
class NetworkFacts:
    """Who this host is for others."""

    host: str
    named: tuple[str, ...]
    """What its own name stands for."""
    interfaces: tuple[Interface, ...]
    chosen: str
    """The address that would carry the messages; empty: none can be told."""
    refusal: str = ""
    """Why none can be told."""
    ports: tuple[int, int] = (32768, 60999)
    """From which the kernel takes free ports."""
    bindable: str = ""
    """Why no free port can be had at the chosen address."""
    taken: str = ""
    """Why MASTER_PORT cannot be had, where it is set."""


def gather_network(env: Mapping[str, str], peers: tuple[str, ...] = ()) -> NetworkFacts:
    """Gather what this host is called, and by which address others would reach it."""
    host = socket.gethostname()
    chosen = refusal = ""
    try:
        chosen = choose_address("", peers, env.get(handover.INTERFACE, ""))
    except PacelineError as error:
        refusal = error.problem
    port = env.get("MASTER_PORT", "")
    return NetworkFacts(
        host=host,
        named=tuple(resolve(host)),
        interfaces=tuple(_interface(name, address) for name, address in own_addresses()),
        chosen=chosen,
        refusal=refusal,
        ports=_ports(),
        bindable=_try_to_bind(chosen, 0) if chosen else "",
        taken=_try_to_bind(chosen, int(port))
        if chosen and port.isdecimal() and int(port) < 1 << 16
        else "",
    )


def _interface(name: str, address: str) -> Interface:
    return Interface(name, address, max(0, _number(name, "speed")), _number(name, "mtu"))


def _number(name: str, what: str) -> int:
    with contextlib.suppress(OSError, ValueError):
        return int(Path(f"/sys/class/net/{name}/{what}").read_text(encoding="utf-8"))
    return 0


def _ports() -> tuple[int, int]:
    with contextlib.suppress(OSError, ValueError):
        first, last = Path(_EPHEMERAL).read_text(encoding="utf-8").split()
        return int(first), int(last)
    return 32768, 60999


def _try_to_bind(address: str, port: int) -> str:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        socket.create_server((address, port), family=family).close()
    except OSError as error:
        return error.strerror or str(error)
    return ""


def judge_network(
    network: NetworkFacts, env: Mapping[str, str], *, alone: bool
) -> Iterator[Finding]:
    """Judge interface, name and ports; a host that trains alone needs no others to reach it."""
    yield _judge_interface(network, env, alone=alone)
    yield _judge_name(network, alone=alone)
    yield _judge_ports(network, env)


def _judge_interface(network: NetworkFacts, env: Mapping[str, str], *, alone: bool) -> Finding:
    names = list(dict.fromkeys(one.name for one in network.interfaces))
    for variable in (handover.INTERFACE, GLOO, NCCL):
        wanted = [
            word.strip("=^ ")
            for word in env.get(variable, "").split(",")
            if word and not env[variable].startswith("^")
        ]
        unknown = [name for name in wanted if not any(have.startswith(name) for have in names)]
        if unknown and (variable != NCCL or len(unknown) == len(wanted)):
            return problem(
                "interface",
                f"{variable}={env[variable]}, which does not exist here",
                f"set it to one of: {', '.join(names)}, or unset it",
            )
    if not network.chosen:
        if alone:
            return passed("interface", "lo: no other host can be reached, and none is needed")
        return problem(
            "interface", network.refusal, f"set {handover.INTERFACE} to one of: {', '.join(names)}"
        )
    return _judge_chosen(network)


def _judge_chosen(network: NetworkFacts) -> Finding:
    carrier = interface_named(network, network.chosen)
    others = [one.name for one in network.interfaces if one.name not in {carrier.name, "lo"}]
    said = (
        f"{carrier.name} ({network.chosen}{_speed(carrier)}) would carry the messages between hosts"
    )
    said += f"; also here: {', '.join(dict.fromkeys(others))}" if others else ""
    if carrier.name.startswith(_BRIDGES):
        return problem(
            "interface",
            f"{said}; it is a bridge of this host alone",
            f"export {handover.INTERFACE}={others[0] if others else 'NAME'}",
        )
    faster = [
        one
        for one in network.interfaces
        if one.speed_mbps > 2 * carrier.speed_mbps > 0 and one.name != carrier.name
    ]
    if faster:
        best = max(faster, key=lambda one: one.speed_mbps)
        return problem(
            "interface",
            f"{said}, but {best.name} is faster{_speed(best)}",
            f"export {handover.INTERFACE}={best.name}, if it joins the hosts",
        )
    return passed("interface", said)


def _speed(one: Interface) -> str:
    return f", {one.speed_mbps / 1000:g} Gbit/s" if one.speed_mbps else ""


def interface_named(network: NetworkFacts, address: str) -> Interface:
    """Return the interface with an address."""
    known = next((one for one in network.interfaces if one.address == address), None)
    return known or Interface(interface_of(address), address)


def _judge_name(network: NetworkFacts, *, alone: bool) -> Finding:
    said = f"{network.host} stands for {', '.join(network.named) or 'nothing'}"
    if network.named and not all(map(is_loopback, network.named)):
        return passed("host name", said)
    if alone:
        return passed("host name", f"{said}; no other host needs it")
    why = (
        "others that are told this name look for it on themselves"
        if network.named
        else "nobody finds this host by its name"
    )
    address = network.chosen or "ADDRESS"
    return problem(
        "host name",
        f"{said}: {why}",
        f"write `{address} {network.host}` into /etc/hosts, or meet at the address: MASTER_ADDR={address} (Paceline alone needs neither)",
    )


def _judge_ports(network: NetworkFacts, env: Mapping[str, str]) -> Finding:
    first, last = network.ports
    if network.bindable:
        return problem(
            "ports",
            f"no free port can be had at {network.chosen}: {network.bindable}",
            "see `ss -tan | wc -l`, and /proc/sys/net/ipv4/ip_local_port_range",
        )
    if network.taken:
        return problem(
            "ports",
            f"MASTER_PORT={env['MASTER_PORT']} cannot be had: {network.taken}",
            "unset MASTER_PORT (rank 0 finds a free one), or derive it from the job's number",
        )
    if last - first < 1000:
        return problem(
            "ports",
            f"the kernel gives out only {first}-{last}",
            "sysctl net.ipv4.ip_local_port_range='32768 60999'",
        )
    port = env.get("MASTER_PORT", "")
    if port.isdecimal() and first <= int(port) <= last:
        return problem(
            "ports",
            f"MASTER_PORT={port} is one that the kernel gives to anybody ({first}-{last})",
            f"take one below {first}, or unset it",
        )
    return passed("ports", f"free ones can be had; the kernel gives out {first}-{last}")
