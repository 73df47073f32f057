"""A network with delay, for kernels without netem: a process that carries the packets between all hosts.

Each packet leaves its sender when the sender's line is free, is under way for the delay, and enters its receiver when
that line is free; what would wait too long is dropped.
"""

from __future__ import annotations

import collections
import contextlib
import fcntl
import os
import select
import signal
import struct
import time
from dataclasses import dataclass, field
from typing import NoReturn

from support.slurm_cluster import boot, linux, network
from support.slurm_cluster.commands import pid_of
from support.slurm_cluster.place import RELAY, Place
from support.slurm_cluster.settings import Settings, address

_TUNSETIFF, _TUN_WITHOUT_HEADER = 0x400454CA, 0x1001
_LONGEST_QUEUE_S = 0.05  # beyond the delay, at least
_QUEUE_PER_DELAY = 8  # a shorter one loses packets of what one connection has under way, and is slower than its rate
_PACKETS_AT_ONCE = 64
_UNITS = {"gbit": 1e9, "mbit": 1e6, "kbit": 1e3}


@dataclass(eq=False)
class Line:
    """The line of one host."""

    host: str
    device: int
    """File descriptor of its TUN device."""
    sent_at: float = 0.0
    """When it can send again."""
    received_at: float = 0.0
    """When it can receive again."""
    queue: collections.deque[tuple[float, bytes]] = field(default_factory=collections.deque)
    """Packets on their way to it, each with its due time."""


def start(place: Place) -> None:
    """Start the relay; return once all hosts are connected."""
    boot.detach(lambda tell_ready: _carry(place, tell_ready), place.log / "relay.log")


def bytes_per_second(rate: str) -> float:
    """Return what a rate in the words of tc(8) amounts to; nothing means no limit.

    >>> bytes_per_second("100mbit"), bytes_per_second("")
    (12500000.0, inf)
    """
    if not rate:
        return float("inf")
    number, unit = rate[:-4], rate[-4:].lower()
    if unit not in _UNITS:
        raise ValueError(f"rate {rate}: want a number and gbit, mbit or kbit, such as 100mbit")
    return float(number) * _UNITS[unit] / 8


def _carry(place: Place, tell_ready: boot.Tell) -> None:
    place.write_pid(RELAY, os.getpid())
    linux.set_process_name(RELAY)
    settings = place.settings
    relay = Relay([_connect(place, host, settings) for host in settings.hosts()], settings)
    signal.signal(signal.SIGHUP, lambda *_: relay.cut_off(network.cut_off(place)))
    tell_ready()
    relay.run()


def _connect(place: Place, host: str, settings: Settings) -> Line:
    device = _open_tun(pid_of(place, host))
    shape = (
        f"link set eth0 mtu {settings.mtu} txqueuelen 10000\naddr add {address(host)}/24 dev eth0\n"
    )
    network.ip(place, host, f"link set lo up\n{shape}link set eth0 up\n")
    return Line(host, device)


def _open_tun(pid: int) -> int:
    """Make the device eth0 in the network namespace of another process, and return to our own."""
    home = os.open("/proc/self/ns/net", os.O_RDONLY)
    linux.enter_namespaces(pid, "net")
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH22x", b"eth0", _TUN_WITHOUT_HEADER))
    linux.enter_namespace(home)
    os.close(home)
    return device


class Relay:
    """The packets between all hosts."""

    def __init__(self, lines: list[Line], settings: Settings) -> None:
        self._lines = {line.device: line for line in lines}
        self._by_address = {bytes(map(int, address(line.host).split("."))): line for line in lines}
        self._delay_s = settings.delay_ms / 1000
        self._queue_s = max(_LONGEST_QUEUE_S, _QUEUE_PER_DELAY * self._delay_s)
        self._rate = bytes_per_second(settings.rate)
        self._cut: set[str] = set()
        self._poll = select.epoll()
        for device in self._lines:
            self._poll.register(device, select.EPOLLIN)

    def cut_off(self, hosts: set[str]) -> None:
        """Drop all packets from or to these hosts from now on."""
        self._cut = hosts

    def run(self) -> NoReturn:
        """Forward packets until killed."""
        while True:
            self._wait()
            for device, _ in self._poll.poll(0):
                self._take_from(self._lines[device])
            self._deliver()

    def _wait(self) -> None:
        due = min((line.queue[0][0] for line in self._lines.values() if line.queue), default=None)
        wait_s = None if due is None else max(0.0, due - time.monotonic())
        select.select(
            [self._poll], [], [], wait_s
        )  # its clock is finer than the milliseconds of epoll_wait

    def _take_from(self, sender: Line) -> None:
        for _ in range(_PACKETS_AT_ONCE):
            try:
                packet = os.read(sender.device, 65536)
            except BlockingIOError:
                return
            except OSError:  # the host is gone
                self._poll.unregister(sender.device)
                return
            receiver = self._by_address.get(packet[16:20]) if packet[0] >> 4 == 4 else None
            if receiver and sender.host not in self._cut and receiver.host not in self._cut:
                self._send(packet, sender, receiver)

    def _send(self, packet: bytes, sender: Line, receiver: Line) -> None:
        now, cost_s = time.monotonic(), len(packet) / self._rate
        leaves = max(now, sender.sent_at) + cost_s
        enters = max(leaves + self._delay_s, receiver.received_at + cost_s)
        if cost_s and enters - now > self._delay_s + self._queue_s:
            return  # the queue is full: dropped
        sender.sent_at, receiver.received_at = leaves, enters
        receiver.queue.append((enters, packet))

    def _deliver(self) -> None:
        now = time.monotonic()
        for line in self._lines.values():
            while line.queue and line.queue[0][0] <= now:
                with contextlib.suppress(OSError):  # the host is gone
                    os.write(line.device, line.queue.popleft()[1])
