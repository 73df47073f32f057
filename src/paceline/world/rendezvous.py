"""Where ranks meet: a private folder on one machine, one chosen address between machines."""

from __future__ import annotations

import contextlib
import math
import os
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
from paceline.world.rendezvous_file import Notice
from paceline.world.world import PublishedRendezvous, TcpRendezvous

_FIRST_LOOK_S, _LAST_LOOK_S = 0.05, 1.0
_OPEN = "open"  # the word that rank 0 leaves first
_GREETING = timedelta(seconds=60)  # for a store that is known to listen

Look = Callable[[], object]
"""Raises what another rank has complained of."""

Way = tuple[str, int, str]
"""Where rank 0 is, and the address from which it was reached."""


def claim_folder(folder: Path) -> None:
    """Make sure that nobody else can enter the folder in which we meet."""
    with writing_to(folder):
        folder.mkdir(mode=0o700, exist_ok=True)
        facts = folder.lstat()
    if not stat.S_ISDIR(facts.st_mode) or facts.st_uid != os.getuid() or facts.st_mode & 0o077:
        raise EnvironmentUnfit(
            f"{folder} is not a private folder of this user (mode {facts.st_mode & 0o777:o}, owner {facts.st_uid})",
            fix=f"remove {folder}, or set TMPDIR to a folder of your own",
        )


def open_tcp_store(
    meeting: TcpRendezvous,
    timeout: timedelta,
    silence_s: float = 60.0,
    *,
    look: Look = lambda: None,
    quiet: bool = False,
    first: bool = False,
) -> tuple[Store, str]:
    """Open the store of several nodes; return it and the address of this rank on the way to it.

    The first rank, even where torchrun's agent serves the store, does not wait for anybody to open it.
    """
    if meeting.serve:
        return serve_store(listen_at(meeting.host, meeting.port), meeting.prefix, timeout)

    def find() -> tuple[str, int]:
        look()
        return meeting.host, meeting.port

    def try_to_reach(left_s: float) -> Way:
        return reach(find, left_s, may_come_late=True, quiet=quiet)

    return _visit_open(try_to_reach, meeting.prefix, timeout, silence_s, look=look, first=first)


def open_published_store(
    meeting: PublishedRendezvous,
    interface: str,
    notice: Notice,
    timeout: timedelta,
    silence_s: float = 60.0,
    *,
    quiet: bool = False,
) -> tuple[Store, str]:
    """Open the store of several nodes at a free port of rank 0, which tells the others of it."""
    notice.prepare()
    if meeting.serve:
        listener = listen_at(choose_address(meeting.host, meeting.peers, interface), 0)
        notice.publish(*listener.getsockname()[:2])
        return serve_store(listener, meeting.key, timeout)
    patience_s = timeout.total_seconds()
    await_notice(notice, patience_s, quiet=quiet)
    # It is read again at each try: what was there first may be of a start that died.
    again = partial(await_notice, notice, patience_s, quiet=quiet)

    def try_to_reach(left_s: float) -> Way:
        return reach(again, left_s, may_come_late=False, quiet=quiet)

    return _visit_open(try_to_reach, meeting.key, timeout, silence_s, look=notice.read)


def await_notice(notice: Notice, timeout_s: float, *, quiet: bool = False) -> tuple[str, int]:
    """Wait until rank 0 has said where it is."""
    begun, said, pause_s = time.monotonic(), quiet, _FIRST_LOOK_S
    while (found := notice.read()) is None:
        waited_s = time.monotonic() - begun
        if waited_s > timeout_s:
            raise EnvironmentUnfit(
                f"rank 0 did not say within {timeout_s:g} s where it is; {socket.gethostname()} looked for it in {notice.folder}",
                fix="put runs= on a file system that all nodes share, or set MASTER_ADDR and MASTER_PORT; or see why rank 0 did not start",
            )
        if waited_s > PATIENCE_S and not said:
            print(
                f"{socket.gethostname()} waits for rank 0 to write its address into {notice.folder}",
                file=sys.stderr,
                flush=True,
            )
            said = True
        time.sleep(pause_s)
        pause_s = min(1.5 * pause_s, _LAST_LOOK_S)
    return found


def serve_store(listener: socket.socket, prefix: str, timeout: timedelta) -> tuple[Store, str]:
    """Serve a store at a socket that listens already; return it and the address."""
    # Without a socket of our own, TCPStore listens on all interfaces, whatever host it is given.
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
    ours.set(_OPEN, "")
    return ours, address


def _visit_open(
    try_to_reach: Callable[[float], Way],
    prefix: str,
    timeout: timedelta,
    silence_s: float,
    *,
    look: Look,
    first: bool = False,
) -> tuple[Store, str]:
    """Visit the store once it is open for this start. At the same address an earlier one may still be on its way out."""
    limit, where = time.monotonic() + timeout.total_seconds(), ""
    while (left_s := limit - time.monotonic()) > 0:
        host, port, own = try_to_reach(left_s)
        store, where = _visit(host, port, prefix, timeout, silence_s), f"{host}:{port}"
        with contextlib.suppress(RuntimeError):  # it has gone: it was an earlier one
            if first:
                store.set(_OPEN, "")
            if _is_opened(store, limit, look):
                return store, own
    raise EnvironmentUnfit(
        f"rank 0 did not come to {where} within {timeout.total_seconds():g} s",
        fix="see why it did not start; or give it longer with timeout.start_s",
    )


def _is_opened(store: Store, limit: float, look: Look) -> bool:
    """Wait until a store is open; return whether it was in time."""
    pause_s = _FIRST_LOOK_S
    while not store.check([_OPEN]):
        look()
        if time.monotonic() > limit:
            return False
        time.sleep(pause_s)
        pause_s = min(1.5 * pause_s, _LAST_LOOK_S)
    return True


def _visit(address: str, port: int, prefix: str, timeout: timedelta, silence_s: float) -> Store:
    try:
        store = TCPStore(
            address, port, is_master=False, timeout=min(timeout, _GREETING), wait_for_workers=False
        )
    except RuntimeError as error:
        raise EnvironmentUnfit(
            f"what answers at {address}:{port} is not rank 0: {str(error).splitlines()[0]}",
            fix="set MASTER_PORT to a port that nobody else uses, or leave it to rank 0 to choose one",
        ) from error
    store.set_timeout(timeout)
    _limit_silence(address, port, silence_s)
    return PrefixStore(prefix, store)


def _limit_silence(address: str, port: int, silence_s: float) -> None:
    """Let the kernel end connections to an address that no longer answers.

    The store asks without a time-out of its own: cut off from it, a rank would wait for TCP to give up, 16 minutes.
    """
    whole_s = max(1, math.ceil(silence_s / 3))
    for connection in _connections_to(address, port):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option in ("TCP_KEEPIDLE", "TCP_KEEPINTVL"):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), whole_s)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(silence_s * 1000))


def _connections_to(address: str, port: int) -> Iterator[socket.socket]:
    """Yield the sockets of this process that are connected to an address: the store does not give its own away.

    torch reaches IPv4 through a socket of IPv6, which names its peer ::ffff:10.0.0.1.
    """
    for name in os.listdir("/dev/fd"):  # noqa: PTH208 - numbers, not paths
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(int(name))) as connection:
            peer = connection.getpeername()
            if isinstance(peer, tuple) and (peer[0].removeprefix("::ffff:"), peer[1]) == (
                address,
                port,
            ):
                yield connection
