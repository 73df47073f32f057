"""Where the ranks of an examination report: one address, one free port, only with the secret."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Self

from paceline.doctor.rank_facts import RankFacts, facts_from_dict
from paceline.doctor.wire import ANSWER_S, Connection

_HELLO_S = 30.0
_POLL_S = 0.1
_THREADS = 64
_BAD_MESSAGE = (OSError, ValueError, KeyError, TypeError, AttributeError)


@dataclass(frozen=True)
class _ConnectedRank:
    connection: Connection
    facts: RankFacts
    door: str
    """The address at which other hosts can test the connection to this one."""


class Collector:
    """Collects the ranks' reports, compares clocks, and lets every host connect to every other."""

    def __init__(self, listener: socket.socket, secret: str, size: int) -> None:
        self._listener, self._secret, self._size = listener, secret, size
        self._ranks: dict[int, _ConnectedRank] = {}
        self._lock = threading.Lock()

    def __enter__(self) -> Self:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread
        self._listener.close()
        for rank in self._in_order():
            rank.connection.close()

    @property
    def connected(self) -> int:
        """How many ranks have reported."""
        return len(self._ranks)

    def examine(self, timeout_s: float, is_over: Callable[[], bool]) -> list[RankFacts]:
        """Wait for all ranks, or until no more can come; return the facts of those that came."""
        limit = time.monotonic() + timeout_s
        while self.connected < self._size and time.monotonic() < limit and not is_over():
            time.sleep(_POLL_S)
        ranks = self._in_order()
        with ThreadPoolExecutor(_THREADS) as pool:
            clocks = list(pool.map(_compare_clocks, ranks))
            doors = {rank.facts.node: rank.door for rank in ranks if rank.door}
            unreached = list(pool.map(lambda rank: _test_connections(rank, doors), ranks))
        facts = []
        for rank, (ahead_s, error_s), nodes in zip(ranks, clocks, unreached, strict=True):
            facts.append(
                replace(rank.facts, clock_s=ahead_s, clock_error_s=error_s, unreached=nodes)
            )
        return facts

    def dismiss(self, *, ok: bool) -> None:
        """Send the result to the ranks, which then exit."""
        for rank in self._in_order():
            with contextlib.suppress(OSError):
                rank.connection.send(ok=ok)

    def _in_order(self) -> list[_ConnectedRank]:
        """Return the ranks connected so far; more may come."""
        with self._lock:
            return [self._ranks[number] for number in sorted(self._ranks)]

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # the listener is closed
            while True:
                accepted, _ = self._listener.accept()
                threading.Thread(target=self._greet, args=(accepted,), daemon=True).start()

    def _greet(self, accepted: socket.socket) -> None:
        connection = Connection(accepted, _HELLO_S)
        try:
            hello = connection.require_proof(self._secret)
            facts = facts_from_dict(hello["facts"])
            accepted.settimeout(ANSWER_S)
            self._add(_ConnectedRank(connection, facts, str(hello["door"])), int(hello["size"]))
        except _BAD_MESSAGE:  # not one of our ranks, or a rank that has just died
            connection.close()

    def _add(self, rank: _ConnectedRank, size: int) -> None:
        """Keep a rank of this examination; refuse another world size, or a second of one number."""
        number = rank.facts.rank
        with self._lock:
            if size != self._size or not 0 <= number < size or number in self._ranks:
                raise ConnectionError(f"rank {number} of {size} is not expected")
            self._ranks[number] = rank


def _compare_clocks(rank: _ConnectedRank) -> tuple[float, float]:
    try:
        return rank.connection.compare_clocks()
    except (OSError, KeyError, ValueError, TypeError):
        return 0.0, float("inf")


def _test_connections(rank: _ConnectedRank, doors: dict[int, str]) -> dict[int, str]:
    """Return the nodes that a rank's host cannot reach, and why."""
    try:
        rank.connection.send(doors=doors)
        unreached = dict(rank.connection.receive()["unreached"])
        return {int(node): str(why) for node, why in unreached.items()}
    except (OSError, KeyError, ValueError, TypeError) as error:
        nodes = doors.keys() - {rank.facts.node}
        return dict.fromkeys(sorted(nodes), f"no answer from {rank.facts.host} ({error})")
