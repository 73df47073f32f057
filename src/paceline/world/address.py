"""The address of this machine that its peers can reach, and the interface of that address."""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import re
import secrets
import socket

from paceline.errors import ConfigError, EnvironmentUnfit

_ANYWHERE = "192.0.2.1"  # reserved for documentation; no packet is sent
_DISCARD = 9
_PORTS_FROM, _PORTS_UNTIL = 10_000, 32_768  # below the ephemeral ports of Linux
_PORT_TRIALS = 1000


def choose_address(host: str, peers: tuple[str, ...], interface: str) -> str:
    """Return the address for the rendezvous: of the interface, of the host name, or of the route to the peers.

    >>> choose_address("127.0.0.1", (), "")
    '127.0.0.1'
    """
    if interface:
        return address_on(interface)
    named = resolve(host or socket.gethostname())
    if host and named and not peers:  # a person has chosen it
        refuse_loopback_name(host)
        return named[0]
    own = {address for _, address in own_addresses()}
    candidates = [address for address in named if address in own]
    candidates += map(source_towards, peers or (_ANYWHERE,))
    for address in candidates:
        # Debian resolves the name of a machine to 127.0.1.1.
        if address and not is_loopback(address):
            return address
    raise EnvironmentUnfit(
        f"{host or socket.gethostname()} has no address that other nodes can reach: "
        f"its name resolves to {', '.join(named) or 'nothing'}, and there is no route to {', '.join(peers[:4]) or 'other hosts'}",
        fix=f"set PACELINE_INTERFACE to the interface between the nodes (here: {_names()}), or MASTER_ADDR to an address of rank 0's node",
    )


def address_on(interface: str) -> str:
    """Return the address of an interface; the error lists the existing ones."""
    for name, address in own_addresses():
        if name == interface:
            return address
    state = (
        "has no address"
        if interface in {name for _, name in socket.if_nameindex()}
        else "does not exist"
    )
    raise EnvironmentUnfit(
        f"the interface {interface!r} {state} on {socket.gethostname()}",
        fix=f"set PACELINE_INTERFACE, GLOO_SOCKET_IFNAME or the cluster profile's interface to one of: {_names()}",
    )


def interface_of(address: str) -> str:
    """Return the interface of an own address; empty if there is none."""
    return next((name for name, own in own_addresses() if own == address), "")


def resolve(host: str) -> list[str]:
    """Return the addresses of a host name; empty if it is unknown."""
    with contextlib.suppress(OSError, UnicodeError):
        return list(dict.fromkeys(str(info[4][0]) for info in socket.getaddrinfo(host, None)))
    return []


def source_towards(host: str) -> str:
    """Return the own address on the route to a host; empty if there is no route."""
    for address in resolve(host):
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((address, _DISCARD))  # chooses a route; sends nothing
            return str(probe.getsockname()[0])
    return ""


def is_loopback(address: str) -> bool:
    """Return whether an address is on the loopback interface.

    >>> is_loopback("127.0.1.1"), is_loopback("::1"), is_loopback("10.0.0.1")
    (True, True, False)
    """
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def refuse_loopback_name(host: str) -> None:
    """Raise if a host name resolves to loopback, where other hosts would find themselves."""
    named = resolve(host)
    if named and host not in {*named, "localhost"} and all(map(is_loopback, named)):
        others = [address for _, address in own_addresses() if not is_loopback(address)]
        raise EnvironmentUnfit(
            f"{host} resolves to {named[0]} here, which no other host can reach",
            fix=f"set an address instead of the name, in --rendezvous or MASTER_ADDR (here: {', '.join(others) or 'none'})",
        )


def split_address(text: str) -> tuple[str, int]:
    """Parse HOST:PORT.

    >>> split_address("node1:29400"), split_address("[::1]:29400")
    (('node1', 29400), ('::1', 29400))
    """
    match = re.fullmatch(r"(?:\[([0-9A-Fa-f:.%\w]+)\]|([^\s:/\[\]]+)):(\d{1,5})", text)
    if not match or not 0 < int(match[3]) < 1 << 16:
        raise ConfigError(
            f"{text!r} is not a valid rendezvous address",
            fix="write it as HOST:PORT, for example --rendezvous node1:29400 or [::1]:29400",
        )
    return match[1] or match[2], int(match[3])


def listen_at(host: str, port: int) -> socket.socket:
    """Return a socket that listens on one address; raise if that is impossible."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        return socket.create_server(address[:2], family=family, backlog=1024)
    except OSError as error:
        raise EnvironmentUnfit(
            f"rank 0 cannot listen on {host}:{port}: {error.strerror or error}",
            fix="set MASTER_ADDR to an address of the node of rank 0, and MASTER_PORT to a free port there",
        ) from error


def free_port(host: str) -> int:
    """Return a free port of an own address, for another process to listen on.

    It is below the ephemeral ports, which the kernel might assign to a connection in between.
    """
    for _ in range(_PORT_TRIALS):
        port = _PORTS_FROM + secrets.randbelow(_PORTS_UNTIL - _PORTS_FROM)
        try:
            with listen_at(host, port):
                return port
        except EnvironmentUnfit as error:
            if getattr(error.__cause__, "errno", None) != errno.EADDRINUSE:
                raise
    raise EnvironmentUnfit(
        f"{_PORT_TRIALS} ports of {host} between {_PORTS_FROM} and {_PORTS_UNTIL} are all in use",
        fix="see who uses them: `ss -tlnp`; end what is left over from earlier runs",
    )


def own_addresses() -> list[tuple[str, str]]:
    """Return (interface, address) pairs of this machine, IPv4 first, without link-local addresses."""
    import psutil  # 20 to 30 ms, only where addresses are asked for

    pairs = [
        (name, entry.address)
        for name, entries in psutil.net_if_addrs().items()
        for entry in entries
        if entry.family in {socket.AF_INET, socket.AF_INET6}
        and not ipaddress.ip_address(entry.address).is_link_local
    ]
    return sorted(pairs, key=lambda pair: ":" in pair[1])


def _names() -> str:
    return ", ".join(dict.fromkeys(name for name, _ in own_addresses()))
