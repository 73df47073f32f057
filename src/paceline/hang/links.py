"""Which hosts this process is connected with, and which of them do not answer: the kernel counts what it had to send again."""

from __future__ import annotations

import contextlib
import ipaddress
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

_TABLES = (Path("/proc/self/net/tcp"), Path("/proc/self/net/tcp6"))
_ESTABLISHED, _SENDS_AGAIN = "01", "01"
_TRIES = 2  # a packet may be lost; the second try comes after 0.6 s, the fourth after 3 s


@dataclass(frozen=True)
class Links:
    """The connections of a process with other hosts."""

    addresses: tuple[str, ...] = ()
    """Its own ones."""
    unanswered: tuple[str, ...] = ()
    """Those of hosts that do not acknowledge what it sends. A process that is merely stopped does: its kernel answers."""


def own_links() -> Links:
    """Return the links of this process; none where the kernel does not tell."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        lines = [
            line
            for table in _TABLES
            if table.exists()
            for line in table.read_text().splitlines()[1:]
        ]
        return links_in(lines, _own_sockets())
    return Links()


def links_in(lines: Iterable[str], sockets: set[str]) -> Links:
    """Return the links that are among these sockets.

    >>> row = "3: 0B004D0A:9869 0C004D0A:897A 01 000002C8:00000000 01:000000A8 00000004 0 0 75"
    >>> links_in([row], {"75"}), links_in([row], {"76"})
    (Links(addresses=('10.77.0.11',), unanswered=('10.77.0.12',)), Links(addresses=(), unanswered=()))
    """
    rows = [row for row in map(str.split, lines) if row[3] == _ESTABLISHED and row[9] in sockets]
    ends = [(_address(row[1]), _address(row[2]), row) for row in rows]
    far = [
        (mine, theirs, row) for mine, theirs, row in ends if mine != theirs and not mine.is_loopback
    ]
    silent = {
        str(theirs)
        for _, theirs, row in far
        if row[5][:2] == _SENDS_AGAIN and int(row[6], 16) >= _TRIES
    }
    return Links(tuple(sorted({str(mine) for mine, _, _ in far})), tuple(sorted(silent)))


def _address(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """Return an address; the kernel writes each word of it in the order of this machine's bytes."""
    raw = bytes.fromhex(text.partition(":")[0])
    if sys.byteorder == "little":
        raw = b"".join(raw[place : place + 4][::-1] for place in range(0, len(raw), 4))
    found = ipaddress.ip_address(raw)
    return found.ipv4_mapped or found if isinstance(found, ipaddress.IPv6Address) else found


def _own_sockets() -> set[str]:
    """Return the numbers of the sockets that this process holds."""
    found = set()
    for file in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # the one by which the folder is read
            found.add(str(file.readlink()))
    return {
        name.removeprefix("socket:[").removesuffix("]")
        for name in found
        if name.startswith("socket:[")
    }
