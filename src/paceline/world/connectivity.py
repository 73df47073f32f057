"""Whether the nodes can reach each other, found out in seconds: a library that only waits would take minutes or hours."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator

from paceline.errors import EnvironmentUnfit
from paceline.world.address import interface_of, source_towards

PATIENCE_S = 10.0
_CONNECT_S = 3.0
_ANSWER_S = 15.0
_FIX = (
    "name the interface that joins the nodes in the cluster profile, PACELINE_INTERFACE or GLOO_SOCKET_IFNAME; "
    "or open the firewall between the nodes"
)
Find = Callable[[], tuple[str, int]]


def reach(
    find: Find, timeout_s: float, *, may_come_late: bool, quiet: bool = False
) -> tuple[str, int, str]:
    """Connect to rank 0 for a moment; return where it was, and the address from which it was reached.

    Where nobody can tell whether rank 0 has started, a refused connection only means that it has not yet.
    """
    begun, said = time.monotonic(), quiet
    while True:
        host, port = find()
        try:
            return _connected(host, port)
        except OSError as error:
            waited_s = time.monotonic() - begun
            late = may_come_late and isinstance(error, ConnectionRefusedError)
            if waited_s > (timeout_s if late else min(timeout_s, PATIENCE_S)):
                raise unreachable("rank 0", host, port, error) from error
            if waited_s > PATIENCE_S and not said:
                print(f"waiting for rank 0 at {host}:{port}: {error}", file=sys.stderr, flush=True)
                said = True
        time.sleep(0.2 if time.monotonic() - begun < PATIENCE_S else 1.0)


def _connected(host: str, port: int) -> tuple[str, int, str]:
    """Connect for a moment; return where the other end was, and the own address.

    Where nobody listens, a connection within a machine may be given the very port that it goes to, and meets itself.
    """
    with socket.create_connection((host, port), _CONNECT_S) as connection:
        peer, own = connection.getpeername(), connection.getsockname()
    if peer == own:
        raise ConnectionRefusedError(errno.ECONNREFUSED, os.strerror(errno.ECONNREFUSED))
    return str(peer[0]), port, str(own[0])


def unreachable(who: str, host: str, port: int, error: OSError) -> EnvironmentUnfit:
    """Return the error for a peer that cannot be reached, with both ends of the way."""
    own = source_towards(host)
    way = f"{own} on {interface_of(own)}" if own else "no route"
    return EnvironmentUnfit(
        f"{socket.gethostname()} ({way}) cannot reach {who} at {host}:{port}: {error.strerror or error}",
        fix=_FIX,
    )


@contextlib.contextmanager
def probe_listener(address: str) -> Iterator[str]:
    """Listen on an address, and answer with a word that nobody else knows; yield both, for peers to try."""
    token = secrets.token_hex(8)
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.create_server((address, 0), family=family, backlog=1024) as listener:
        answering = threading.Thread(target=_answer, args=(listener, token.encode()), daemon=True)
        answering.start()
        try:
            yield f"{address} {listener.getsockname()[1]} {token} {socket.gethostname()}"
        finally:
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)  # wakes the thread
            answering.join(1)


def _answer(listener: socket.socket, token: bytes) -> None:
    with contextlib.suppress(OSError):  # the listener is closed
        while True:
            connection, _ = listener.accept()
            with contextlib.suppress(OSError), connection:
                connection.sendall(token)


def probe_peer(door: str) -> EnvironmentUnfit | None:
    """Try a peer's door; return why it cannot be reached, if so."""
    address, port, token, host = door.split()
    try:
        with socket.create_connection((address, int(port)), _CONNECT_S) as connection:
            connection.settimeout(_ANSWER_S)
            heard = connection.makefile("rb").read().decode(errors="replace")
    except OSError as error:
        return unreachable(host, address, int(port), error)
    return (
        None
        if heard == token
        else unreachable(host, address, int(port), OSError("somebody else answers there"))
    )
