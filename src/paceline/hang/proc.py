"""State, children and TCP connections of a process, from /proc."""

from __future__ import annotations

import contextlib
import ipaddress
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

_PROC = Path("/proc")
_PAGE_BYTES = 4096
GONE = "gone"
STATES = {
    "R": "is running",
    "S": "is sleeping",
    "D": "waits for I/O",
    "T": "is stopped",
    "t": "is stopped by a debugger",
    "Z": "is a zombie",
    GONE: "has exited",
}
"""Descriptions of the kernel's state letters."""

_TCP_TABLES = (Path("/proc/self/net/tcp"), Path("/proc/self/net/tcp6"))
_ESTABLISHED, _RETRANSMITS = "01", "01"
_RETRIES = 2  # one packet may be lost; the second retry comes after 0.6 s, the fourth after 3 s


@dataclass(frozen=True)
class Process:
    """State of a process."""

    pid: int
    born: int
    """Start time in clock ticks since boot: a later process may reuse the pid."""
    state: str
    """The kernel's letter, or `GONE`; empty: unknown on this machine."""
    waits_in: str = ""
    """The kernel function in which it waits, where that is readable."""
    memory_bytes: int = 0

    @property
    def description(self) -> str:
        """Its state as a verb phrase; empty: unknown."""
        return STATES.get(self.state, "")

    @property
    def can_respond(self) -> bool:
        """Whether it may still write a report; True where its state is unknown."""
        return self.state not in {"T", "t", "Z", GONE}


def process(pid: int | str) -> Process:
    """Return the current state of a process."""
    folder = _PROC / str(pid)
    try:
        # The name, in brackets, may contain anything.
        fields = (folder / "stat").read_text(errors="replace").rpartition(")")[2].split()
        memory = int((folder / "statm").read_text().split()[1]) * _PAGE_BYTES
        return Process(int(pid), int(fields[19]), fields[0], _waits_in(folder), memory)
    except (OSError, IndexError, ValueError):
        return Process(int(pid), 0, GONE)


def refresh(earlier: Process) -> Process:
    """Return the current state of the same process, `GONE` if its pid was reused."""
    now = process(earlier.pid)
    return now if now.born == earlier.born else Process(earlier.pid, earlier.born, GONE)


def catches(pid: int, signal_number: int) -> bool:
    """Return whether a process has a handler for a signal."""
    with contextlib.suppress(OSError, IndexError, ValueError):
        status = (_PROC / str(pid) / "status").read_text(errors="replace")
        mask = int(status.split("SigCgt:")[1].split()[0], 16)
        return bool(mask >> (signal_number - 1) & 1)
    return False


def has_open(pid: int, file: Path) -> bool:
    """Return whether a process of this user has a file open."""
    with contextlib.suppress(OSError):
        return any(_leads_to(link, file) for link in (_PROC / str(pid) / "fd").iterdir())
    return False


def _leads_to(link: Path, file: Path) -> bool:
    with contextlib.suppress(OSError):  # closed meanwhile
        return link.samefile(file)
    return False


def children(pid: int | str) -> list[Process]:
    """Return the direct child processes, such as data loader workers."""
    pids: list[str] = []
    for file in (_PROC / str(pid) / "task").glob("*/children"):
        with contextlib.suppress(OSError):  # the thread has just ended
            pids += file.read_text().split()
    return [process(child) for child in pids]


def _waits_in(folder: Path) -> str:
    with contextlib.suppress(OSError):  # readable by root only, on many machines
        text = (folder / "wchan").read_text().strip()
        return "" if text == "0" else text
    return ""


@dataclass(frozen=True)
class Links:
    """TCP connections of a process to other hosts."""

    addresses: tuple[str, ...] = ()
    """Local addresses."""
    unanswered: tuple[str, ...] = ()
    """Remote addresses that do not acknowledge packets. A stopped process does not count: its kernel acknowledges."""


def own_links() -> Links:
    """Return the connections of this process; empty where /proc is not readable."""
    lines: list[str] = []
    with contextlib.suppress(OSError, ValueError, IndexError):
        for table in _TCP_TABLES:
            if table.exists():
                lines += table.read_text().splitlines()[1:]
        return links_in(lines, _own_sockets())
    return Links()


def links_in(lines: Iterable[str], sockets: set[str]) -> Links:
    """Return the connections in rows of /proc/net/tcp that belong to some socket inodes.

    >>> row = "3: 0B004D0A:9869 0C004D0A:897A 01 000002C8:00000000 01:000000A8 00000004 0 0 75"
    >>> links_in([row], {"75"}), links_in([row], {"76"})
    (Links(addresses=('10.77.0.11',), unanswered=('10.77.0.12',)), Links(addresses=(), unanswered=()))
    """
    addresses: set[str] = set()
    unanswered: set[str] = set()
    for line in lines:
        row = line.split()
        if row[3] != _ESTABLISHED or row[9] not in sockets:
            continue
        local, remote = _address(row[1]), _address(row[2])
        if local == remote or local.is_loopback:
            continue
        addresses.add(str(local))
        if row[5][:2] == _RETRANSMITS and int(row[6], 16) >= _RETRIES:
            unanswered.add(str(remote))
    return Links(tuple(sorted(addresses)), tuple(sorted(unanswered)))


def _address(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """Parse an address: the kernel writes each 32-bit word in the byte order of this machine."""
    raw = bytes.fromhex(text.partition(":")[0])
    if sys.byteorder == "little":
        raw = b"".join(raw[start : start + 4][::-1] for start in range(0, len(raw), 4))
    address = ipaddress.ip_address(raw)
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped:
        return address.ipv4_mapped
    return address


def _own_sockets() -> set[str]:
    """Return the inodes of the open sockets of this process."""
    inodes = set()
    for file in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # the descriptor that lists the folder
            target = str(file.readlink())
            if target.startswith("socket:["):
                inodes.add(target.removeprefix("socket:[").removesuffix("]"))
    return inodes
