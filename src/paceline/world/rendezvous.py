"""The store of the rendezvous: in a private folder on one machine, at one address between machines."""

from __future__ import annotations

import contextlib
import math
import os
import secrets
import socket
import stat
import sys
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from pathlib import Path

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from paceline.errors import EnvironmentUnfit
from paceline.rundir import writing_to
from paceline.world.address import choose_address, listen_at
from paceline.world.connectivity import PATIENCE_S, reach
from paceline.world.rendezvous_file import RendezvousFile
from paceline.world.world import PublishedRendezvous, TcpRendezvous

_FIRST_POLL_S, _LAST_POLL_S = 0.05, 1.0
_OPEN = "open"  # the first key that rank 0 sets: a nonce
_CONNECT = timedelta(seconds=60)  # to a store that is known to listen

Look = Callable[[], object]
"""Raises the error of another rank, if there is one."""

Route = tuple[str, int, str]
"""Address and port of rank 0, and the own address of the connection."""


def claim_folder(folder: Path) -> None:
    """Create a private folder for the rendezvous; refuse one that other users can enter."""
    with writing_to(folder):
        folder.mkdir(mode=0o700, exist_ok=True)
        facts = folder.lstat()
    if not stat.S_ISDIR(facts.st_mode) or facts.st_uid != os.getuid() or facts.st_mode & 0o077:
        raise EnvironmentUnfit(
            f"{folder} is not a private folder of this user (mode {facts.st_mode & 0o777:o}, owner {facts.st_uid})",
            fix=f"remove {folder}, or set TMPDIR to a private folder",
        )


def open_tcp_store(
    rendezvous: TcpRendezvous,
    timeout: timedelta,
    silence_s: float = 60.0,
    *,
    look: Look = lambda: None,
    quiet: bool = False,
    first: bool = False,
) -> tuple[Store, str]:
    """Open the store of several nodes; return it and the own address of this rank on the way to it.

    Rank 0 opens it, even if torchrun's agent serves it; the others wait for that.
    """
    if rendezvous.serve:
        return serve_store(listen_at(rendezvous.host, rendezvous.port), rendezvous.prefix, timeout)

    def find() -> tuple[str, int]:
        look()
        return rendezvous.host, rendezvous.port

    def connect(left_s: float) -> Route:
        return reach(find, left_s, may_come_late=True, quiet=quiet)

    return _wait_until_open(connect, rendezvous.prefix, timeout, silence_s, look=look, first=first)


def open_published_store(
    rendezvous: PublishedRendezvous,
    interface: str,
    file: RendezvousFile,
    timeout: timedelta,
    silence_s: float = 60.0,
    *,
    quiet: bool = False,
) -> tuple[Store, str]:
    """Open the store of several nodes at a free port of rank 0, which publishes it in a file."""
    file.prepare()
    if rendezvous.serve:
        listener = listen_at(choose_address(rendezvous.host, rendezvous.peers, interface), 0)
        address, port = listener.getsockname()[:2]
        file.publish(address, port, secrets.token_hex(32))
        return serve_store(listener, rendezvous.key, timeout)
    # The file is read before each attempt: its first content may be from a start that died.
    find = partial(wait_for_address, file, timeout.total_seconds(), quiet=quiet)
    find()

    def connect(left_s: float) -> Route:
        return reach(find, left_s, may_come_late=False, quiet=quiet)

    return _wait_until_open(connect, rendezvous.key, timeout, silence_s, look=file.read)


def wait_for_address(
    file: RendezvousFile, timeout_s: float, *, quiet: bool = False
) -> tuple[str, int]:
    """Return the published address of rank 0 as soon as there is one."""
    begun, announced, pause_s = time.monotonic(), quiet, _FIRST_POLL_S
    while (address := file.read()) is None:
        waited_s = time.monotonic() - begun
        if waited_s > timeout_s:
            raise EnvironmentUnfit(
                f"rank 0 did not publish its address within {timeout_s:g} s; {socket.gethostname()} looked in {file.folder}",
                fix="put runs= on a file system that all nodes share, or set MASTER_ADDR and MASTER_PORT; or check why rank 0 did not start",
            )
        if waited_s > PATIENCE_S and not announced:
            print(
                f"{socket.gethostname()} waits for rank 0 to write its address into {file.folder}",
                file=sys.stderr,
                flush=True,
            )
            announced = True
        time.sleep(pause_s)
        pause_s = min(1.5 * pause_s, _LAST_POLL_S)
    return address


def serve_store(listener: socket.socket, prefix: str, timeout: timedelta) -> tuple[Store, str]:
    """Serve a store on a listening socket; return it and the address."""
    # Given only a host name, TCPStore would listen on all interfaces.
    address, port = listener.getsockname()[:2]
    store = TCPStore(
        address,
        port,
        is_master=True,
        timeout=timeout,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )
    ours = PrefixStore(prefix, store)
    ours.set(_OPEN, secrets.token_hex(16))
    return ours, address


def _wait_until_open(
    connect: Callable[[float], Route],
    prefix: str,
    timeout: timedelta,
    silence_s: float,
    *,
    look: Look,
    first: bool = False,
) -> tuple[Store, str]:
    """Connect to the store once rank 0 has opened it; a store of an earlier start may still listen at that address."""
    limit, where = time.monotonic() + timeout.total_seconds(), ""
    while (left_s := limit - time.monotonic()) > 0:
        host, port, own = connect(left_s)
        store, where = _connect(host, port, prefix, timeout, silence_s), f"{host}:{port}"
        with contextlib.suppress(RuntimeError):  # it is gone: it was of an earlier start
            if first:
                store.set(_OPEN, secrets.token_hex(16))
            if _is_open_by(store, limit, look):
                return store, own
    raise EnvironmentUnfit(
        f"rank 0 did not open the rendezvous at {where} within {timeout.total_seconds():g} s",
        fix="check why rank 0 did not start, or increase timeout.start_s",
    )


def nonce_of(store: Store) -> bytes:
    """Return the nonce with which rank 0 has opened a store."""
    nonce: bytes = store.get(_OPEN)
    return nonce


def _is_open_by(store: Store, limit: float, look: Look) -> bool:
    """Wait until a store is open; return whether that was in time."""
    pause_s = _FIRST_POLL_S
    while not store.check([_OPEN]):
        look()
        if time.monotonic() > limit:
            return False
        time.sleep(pause_s)
        pause_s = min(1.5 * pause_s, _LAST_POLL_S)
    return True


def _connect(address: str, port: int, prefix: str, timeout: timedelta, silence_s: float) -> Store:
    try:
        store = TCPStore(
            address, port, is_master=False, timeout=min(timeout, _CONNECT), wait_for_workers=False
        )
    except RuntimeError as error:
        raise EnvironmentUnfit(
            f"the service at {address}:{port} is not rank 0: {str(error).splitlines()[0]}",
            fix="set MASTER_PORT to an unused port, or unset it: rank 0 then chooses one",
        ) from error
    store.set_timeout(timeout)
    _limit_silence(address, port, silence_s)
    return PrefixStore(prefix, store)


def _limit_silence(address: str, port: int, silence_s: float) -> None:
    """Make the kernel close connections to an address that no longer answers.

    The store has no timeout for a request: a rank that is cut off would wait 16 minutes for TCP to give up.
    """
    whole_s = max(1, math.ceil(silence_s / 3))
    for connection in _connections_to(address, port):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option in ("TCP_KEEPIDLE", "TCP_KEEPINTVL"):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), whole_s)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(silence_s * 1000))


def _connections_to(address: str, port: int) -> Iterator[socket.socket]:
    """Yield the sockets of this process that are connected to an address: the store does not expose its own.

    torch connects to IPv4 through an IPv6 socket, whose peer is then ::ffff:10.0.0.1.
    """
    for name in os.listdir("/dev/fd"):  # noqa: PTH208 - numbers, not paths
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(int(name))) as connection:
            peer = connection.getpeername()
            if not isinstance(peer, tuple):
                continue
            if (peer[0].removeprefix("::ffff:"), peer[1]) == (address, port):
                yield connection
