"""Where the ranks report: one address, one free port; who does not know the secret is sent away."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Self

from paceline.doctor.rank_facts import RankFacts, received
from paceline.doctor.wire import ANSWER_S, Connection

_HELLO_S = 30.0
_LOOK_S = 0.1
_AT_ONCE = 64


@dataclass(frozen=True)
class _Guest:
    talk: Connection
    facts: RankFacts
    door: str


class Collector:
    """Receives the ranks, compares their clocks with the one here, tells each of the others' doors, and hears what they reached."""

    def __init__(self, listener: socket.socket, secret: str, size: int) -> None:
        self._listener, self._secret, self._size = listener, secret, size
        self._guests: dict[int, _Guest] = {}
        self._lock = threading.Lock()

    def __enter__(self) -> Self:
        threading.Thread(target=self._receive, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread
        self._listener.close()
        for guest in self._in_order():
            guest.talk.__exit__()

    @property
    def came(self) -> int:
        """How many ranks have reported."""
        return len(self._guests)

    def examine(self, timeout_s: float, is_over: Callable[[], bool]) -> list[RankFacts]:
        """Wait for all ranks, or until no more can come; return what those that came say, in their order."""
        limit = time.monotonic() + timeout_s
        while len(self._guests) < self._size and time.monotonic() < limit and not is_over():
            time.sleep(_LOOK_S)
        guests = self._in_order()
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            clocks = list(pool.map(_clock, guests))
            doors = {guest.facts.node: guest.door for guest in guests if guest.door}
            ways = list(pool.map(lambda guest: _ways(guest, doors), guests))
        told = zip(guests, clocks, ways, strict=True)
        return [
            replace(guest.facts, clock_s=clock[0], clock_error_s=clock[1], unreached=unreached)
            for guest, clock, unreached in told
        ]

    def dismiss(self, *, ok: bool) -> None:
        """Tell the ranks what was made of it; they leave."""
        for guest in self._in_order():
            with contextlib.suppress(OSError):
                guest.talk.say(ok=ok)

    def _in_order(self) -> list[_Guest]:
        """Return those that are here by now; others may still come."""
        with self._lock:
            return [self._guests[rank] for rank in sorted(self._guests)]

    def _receive(self) -> None:
        with contextlib.suppress(OSError):  # the listener is closed
            while True:
                connection, _ = self._listener.accept()
                threading.Thread(target=self._greet, args=(connection,), daemon=True).start()

    def _greet(self, connection: socket.socket) -> None:
        talk = Connection(connection, _HELLO_S)
        try:
            said = talk.ask_proof(self._secret)
            guest = _Guest(talk, received(said["facts"]), str(said["door"]))
            connection.settimeout(ANSWER_S)
            self._take_in(guest, int(said["size"]))
        except (
            OSError,
            ValueError,
            KeyError,
            TypeError,
            AttributeError,
        ):  # a stranger, or a rank that has just died
            talk.__exit__()

    def _take_in(self, guest: _Guest, size: int) -> None:
        """Keep a rank that is one of ours; one that counts otherwise, or takes the place of another, is sent away."""
        rank = guest.facts.rank
        with self._lock:
            if size != self._size or not 0 <= rank < size or rank in self._guests:
                raise ConnectionError(f"rank {rank} of {size} is not expected")
            self._guests[rank] = guest


def _clock(guest: _Guest) -> tuple[float, float]:
    try:
        return guest.talk.compare_clocks()
    except (OSError, KeyError, ValueError, TypeError):
        return 0.0, float("inf")


def _ways(guest: _Guest, doors: dict[int, str]) -> dict[int, str]:
    try:
        guest.talk.say(doors=doors)
        unreached = dict(guest.talk.hear()["unreached"])
        return {int(node): str(why) for node, why in unreached.items()}
    except (OSError, KeyError, ValueError, TypeError) as error:
        return {
            node: f"{guest.facts.host} did not say ({error})"
            for node in doors
            if node != guest.facts.node
        }
