"""Messages between the ranks of several nodes before training: presence, errors, results of the connection test."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator

from paceline.errors import EnvironmentUnfit, PacelineError
from paceline.world.rendezvous_file import error_from_json, error_to_json
from paceline.world.signed_store import Board

_FIRST_POLL_S, _LAST_POLL_S = 0.005, 0.5
_FAREWELL_S = 5.0
_SAY_AFTER_S = 10.0
_SHOWN_RANKS = 8
_ERROR, _CONNECTED, _INFORMED = "error", "connected", "informed"


class RollCall:
    """Messages of all ranks. An error of one becomes the error of all, and the rank that serves the store exits last."""

    def __init__(
        self,
        board: Board,
        rank: int,
        size: int,
        *,
        serve: bool,
        timeout_s: float,
        look: Callable[[], object],
    ) -> None:
        self._board, self._rank, self._size, self._serve = board, rank, size, serve
        self._timeout_s, self._look = timeout_s, look
        board.add(_CONNECTED, 1)

    @contextlib.contextmanager
    def share_errors(self) -> Iterator[None]:
        """Raise an error of any rank on all ranks: the first one wins.

        Return only when the others know it.
        """
        try:
            yield
        except PacelineError as error:
            raise self._first_error(error) from error

    def _first_error(self, error: PacelineError) -> PacelineError:
        try:
            if self._board.add(_ERROR + "s", 1) == 1:
                self._board.set(_ERROR, error_to_json(error))
            first = error_from_json(self._board.get(_ERROR).decode())
            self._wait_until_informed()
        except RuntimeError:  # the store is gone, with the rank that served it
            return error
        return first

    def check_in(self, message: str) -> None:
        """Announce this rank; raise if another process has the same number."""
        if self._board.add(f"rank-{self._rank}", 1) > 1:
            raise EnvironmentUnfit(
                f"two processes claim to be rank {self._rank}",
                fix="pass a different --node on every host, from 0 on; do not export RANK by hand",
            )
        self.post("present", message)

    def exchange(self, topic: str, message: str) -> list[str]:
        """Send a message to all ranks; return theirs, in rank order."""
        self.post(topic, message)
        return self.wait_for_all(topic)

    def post(self, topic: str, message: str) -> None:
        """Send a message to all ranks, without waiting."""
        self._board.set(f"{topic}-{self._rank}", message)
        self._board.add(topic, 1)

    def wait_for_all(self, topic: str) -> list[str]:
        """Return the messages of all ranks, in rank order."""
        begun, announced, pause_s = time.monotonic(), False, _FIRST_POLL_S
        while (count := self._board.add(topic, 0)) < self._size:
            self._raise_shared_error()
            waited_s = time.monotonic() - begun
            if waited_s > self._timeout_s:
                raise EnvironmentUnfit(
                    f"{self._missing(topic)} did not join within {self._timeout_s:g} s",
                    fix="check why they did not start or how far they got; or increase timeout.start_s",
                )
            if waited_s > _SAY_AFTER_S and not announced and self._rank == 0:
                missing = self._size - count
                print(f"waiting for {missing} of {self._size} ranks", file=sys.stderr, flush=True)
                announced = True
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LAST_POLL_S)
        keys = [f"{topic}-{rank}" for rank in range(self._size)]
        return [message.decode() for message in self._board.multi_get(keys)]

    def wait_for(self, topic: str, rank: int) -> str:
        """Return the message of one rank."""
        limit = time.monotonic() + self._timeout_s
        while not self._board.check([f"{topic}-{rank}"]) and time.monotonic() < limit:
            self._raise_shared_error()
            time.sleep(_FIRST_POLL_S)
        return self._board.get(f"{topic}-{rank}").decode()

    def _raise_shared_error(self) -> None:
        self._look()
        if self._board.check([_ERROR]):
            raise error_from_json(self._board.get(_ERROR).decode())

    def _missing(self, topic: str) -> str:
        everyone = range(self._size)
        ranks = [str(rank) for rank in everyone if not self._board.check([f"{topic}-{rank}"])]
        more = ""
        if len(ranks) > _SHOWN_RANKS:
            more = f" and {len(ranks) - _SHOWN_RANKS} more"
        return f"rank{'s' * (len(ranks) > 1)} {', '.join(ranks[:_SHOWN_RANKS])}{more}"

    def _wait_until_informed(self) -> None:
        """Wait until the others know the error: the store ends with the rank that serves it."""
        limit = time.monotonic() + _FAREWELL_S
        informed = self._board.add(_INFORMED, 1)
        while self._serve and informed < self._board.add(_CONNECTED, 0):
            if time.monotonic() > limit:
                return
            time.sleep(0.02)
            informed = self._board.add(_INFORMED, 0)
