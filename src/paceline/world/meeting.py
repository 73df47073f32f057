"""Where ranks meet: a private folder on one machine, one chosen address between machines."""

from __future__ import annotations

import os
import socket
import stat
from datetime import timedelta
from pathlib import Path

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from paceline.errors import EnvironmentUnfit
from paceline.rundir import writing_to
from paceline.world.facts import TcpMeeting


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


def open_tcp_store(meeting: TcpMeeting, timeout: timedelta) -> Store:
    """Open the store of several nodes. The rank that serves listens on the meeting's address alone."""
    # Without a socket of our own, TCPStore listens on all interfaces, whatever host it is given.
    listener = listen_at(meeting.host, meeting.port) if meeting.serve else None
    store = TCPStore(
        meeting.host,
        meeting.port,
        is_master=meeting.serve,
        timeout=timeout,
        wait_for_workers=False,
        master_listen_fd=listener.detach() if listener else None,
    )
    return PrefixStore(meeting.prefix, store)


def listen_at(host: str, port: int) -> socket.socket:
    """Return a socket that listens on one address, or say why it cannot."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        return socket.create_server(address[:2], family=family, backlog=1024)
    except OSError as error:
        raise EnvironmentUnfit(
            f"rank 0 cannot listen on {host}:{port}: {error.strerror or error}",
            fix="set MASTER_ADDR to an address of the node of rank 0, and MASTER_PORT to a free port there",
        ) from error
