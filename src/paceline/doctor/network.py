"""Which interface ranks use between hosts, and whether others can reach this host by name and port."""

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
    """A network interface with one of its addresses."""

    name: str
    address: str
    speed_mbps: int = 0
    """0: not reported."""
    mtu: int = 0


@dataclass(frozen=True)
class NetworkFacts:
    """Name, addresses and ports by which others reach this host."""

    host: str
    named: tuple[str, ...]
    """The addresses that the host name resolves to."""
    interfaces: tuple[Interface, ...]
    chosen: str
    """The address that ranks would use between hosts; empty: none was found."""
    refusal: str = ""
    """Why none was found."""
    ports: tuple[int, int] = (32768, 60999)
    """The kernel's range of ephemeral ports."""
    bindable: str = ""
    """Why binding a free port at the chosen address failed."""
    taken: str = ""
    """Why binding MASTER_PORT failed, if it is set."""


def gather_network(env: Mapping[str, str], peers: tuple[str, ...] = ()) -> NetworkFacts:
    """Resolve this host's name, choose the address for other hosts, and try to bind ports."""
    host = socket.gethostname()
    chosen = refusal = ""
    try:
        chosen = choose_address("", peers, env.get(handover.INTERFACE, ""))
    except PacelineError as error:
        refusal = error.problem
    port = env.get("MASTER_PORT", "")
    has_port = chosen and port.isdecimal() and int(port) < 1 << 16
    return NetworkFacts(
        host=host,
        named=tuple(resolve(host)),
        interfaces=tuple(_interface(name, address) for name, address in own_addresses()),
        chosen=chosen,
        refusal=refusal,
        ports=_ports(),
        bindable=_try_to_bind(chosen, 0) if chosen else "",
        taken=_try_to_bind(chosen, int(port)) if has_port else "",
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
    """Judge interface, host name and ports; a host that trains alone need not be reachable."""
    yield _judge_interface(network, env, alone=alone)
    yield _judge_name(network, alone=alone)
    yield _judge_ports(network, env)


def _judge_interface(network: NetworkFacts, env: Mapping[str, str], *, alone: bool) -> Finding:
    names = list(dict.fromkeys(interface.name for interface in network.interfaces))
    for variable in (handover.INTERFACE, GLOO, NCCL):
        wanted = _interface_names(env.get(variable, ""))
        unknown = [name for name in wanted if not any(have.startswith(name) for have in names)]
        if unknown and (variable != NCCL or len(unknown) == len(wanted)):
            return problem(
                "interface",
                f"{variable}={env[variable]}, but this host has no such interface",
                f"set it to one of: {', '.join(names)}, or unset it",
            )
    if not network.chosen:
        if alone:
            return passed("interface", "lo: no other host is reachable (fine on one host)")
        return problem(
            "interface", network.refusal, f"set {handover.INTERFACE} to one of: {', '.join(names)}"
        )
    return _judge_chosen(network)


def _interface_names(value: str) -> list[str]:
    """Return the interfaces, or their prefixes, that a variable asks for; ^ excludes instead."""
    if value.startswith("^"):
        return []
    return [name.strip("=^ ") for name in value.split(",") if name]


def _judge_chosen(network: NetworkFacts) -> Finding:
    carrier = _interface_with(network, network.chosen)
    names = [interface.name for interface in network.interfaces]
    others = [name for name in names if name not in {carrier.name, "lo"}]
    text = f"{carrier.name} ({network.chosen}{_speed(carrier)}) for messages between hosts"
    if others:
        text += f"; also available: {', '.join(dict.fromkeys(others))}"
    if carrier.name.startswith(_BRIDGES):
        return problem(
            "interface",
            f"{text}; {carrier.name} is a bridge inside this host",
            f"export {handover.INTERFACE}={others[0] if others else 'NAME'}",
        )
    best = max(network.interfaces, key=lambda interface: interface.speed_mbps, default=carrier)
    if best.speed_mbps > 2 * carrier.speed_mbps > 0:
        return problem(
            "interface",
            f"{text}, but {best.name} is faster{_speed(best)}",
            f"export {handover.INTERFACE}={best.name}, if it connects the hosts",
        )
    return passed("interface", text)


def _speed(interface: Interface) -> str:
    speed = interface.speed_mbps
    return f", {speed / 1000:g} Gbit/s" if speed else ""


def _interface_with(network: NetworkFacts, address: str) -> Interface:
    for interface in network.interfaces:
        if interface.address == address:
            return interface
    return Interface(interface_of(address), address)


def _judge_name(network: NetworkFacts, *, alone: bool) -> Finding:
    text = f"{network.host} resolves to {', '.join(network.named) or 'no address'}"
    if network.named and not all(map(is_loopback, network.named)):
        return passed("host name", text)
    if alone:
        return passed("host name", f"{text} (fine on one host)")
    why = (
        "other hosts that use this name connect to themselves"
        if network.named
        else "other hosts cannot find it by name"
    )
    address = network.chosen or "ADDRESS"
    return problem(
        "host name",
        f"{text}: {why}",
        f"add `{address} {network.host}` to /etc/hosts, or set MASTER_ADDR={address} "
        "(a script that uses only Paceline needs neither)",
    )


def _judge_ports(network: NetworkFacts, env: Mapping[str, str]) -> Finding:
    first, last = network.ports
    if network.bindable:
        return problem(
            "ports",
            f"no free port available at {network.chosen}: {network.bindable}",
            "check `ss -tan | wc -l` and /proc/sys/net/ipv4/ip_local_port_range",
        )
    if network.taken:
        return problem(
            "ports",
            f"cannot bind MASTER_PORT={env['MASTER_PORT']}: {network.taken}",
            "unset MASTER_PORT (rank 0 finds a free port), or derive it from the job ID",
        )
    if last - first < 1000:
        return problem(
            "ports",
            f"only {last - first + 1} free ports available ({first}-{last})",
            "sysctl net.ipv4.ip_local_port_range='32768 60999'",
        )
    port = env.get("MASTER_PORT", "")
    if port.isdecimal() and first <= int(port) <= last:
        return problem(
            "ports",
            f"MASTER_PORT={port} is in the range of ephemeral ports ({first}-{last}): any program may have it",
            f"use a port below {first}, or unset MASTER_PORT",
        )
    return passed("ports", f"free ports available ({first}-{last})")
