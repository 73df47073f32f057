"""Connection tests between nodes, in seconds: a library that only waits would take minutes or hours."""

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
    """Connect to rank 0 for a moment; return its address and port, and the own address of the connection.

    If it is unknown whether rank 0 has started, a refused connection only means that it has not started yet.
    """
    begun, announced = time.monotonic(), quiet
    while True:
        host, port = find()
        try:
            return _try_connection(host, port)
        except OSError as error:
            waited_s = time.monotonic() - begun
            not_started = may_come_late and isinstance(error, ConnectionRefusedError)
            if waited_s > (timeout_s if not_started else min(timeout_s, PATIENCE_S)):
                raise unreachable("rank 0", host, port, error) from error
            if waited_s > PATIENCE_S and not announced:
                print(f"waiting for rank 0 at {host}:{port}: {error}", file=sys.stderr, flush=True)
                announced = True
        time.sleep(0.2 if time.monotonic() - begun < PATIENCE_S else 1.0)


def _try_connection(host: str, port: int) -> tuple[str, int, str]:
    """Connect for a moment; return the remote address and port, and the own address.

    If nothing listens, the kernel may give a local connection its own destination port: it is connected to itself.
    """
    with socket.create_connection((host, port), _CONNECT_S) as connection:
        peer, own = connection.getpeername(), connection.getsockname()
    if peer == own:
        raise ConnectionRefusedError(errno.ECONNREFUSED, os.strerror(errno.ECONNREFUSED))
    return str(peer[0]), port, str(own[0])


def unreachable(who: str, host: str, port: int, error: OSError) -> EnvironmentUnfit:
    """Return the error for an unreachable peer, with both ends of the connection."""
    own = source_towards(host)
    route = f"{own} on {interface_of(own)}" if own else "no route"
    reason = error.strerror or error
    return EnvironmentUnfit(
        f"{socket.gethostname()} ({route}) cannot reach {who} at {host}:{port}: {reason}", fix=_FIX
    )


@contextlib.contextmanager
def probe_listener(address: str) -> Iterator[str]:
    """Listen on an address, and answer with a random token; yield the endpoint for the peers' `probe_peer`."""
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


def probe_peer(endpoint: str) -> EnvironmentUnfit | None:
    """Connect to the listener of a peer; return why that failed, or None."""
    address, port, token, host = endpoint.split()
    try:
        with socket.create_connection((address, int(port)), _CONNECT_S) as connection:
            connection.settimeout(_ANSWER_S)
            answer = connection.makefile("rb").read().decode(errors="replace")
    except OSError as error:
        return unreachable(host, address, int(port), error)
    if answer == token:
        return None
    return unreachable(host, address, int(port), OSError("another service answers there"))
