"""What ranks of several nodes tell each other before they train: that they are here, what is wrong, what they can reach."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from typing import Protocol

from paceline.errors import EnvironmentUnfit, PacelineError
from paceline.world.rendezvous_file import problem_from, problem_text

_FIRST_LOOK_S, _LAST_LOOK_S = 0.005, 0.5
_FAREWELL_S = 5.0
_SAY_AFTER_S = 10.0
_PROBLEM, _HERE, _HEARD = "problem", "here", "heard"


class Board(Protocol):
    """What is asked of the store in which the ranks have met."""

    def set(self, key: str, value: str) -> None:
        """Leave a word."""

    def get(self, key: str) -> bytes:
        """Return a word, once it is there."""

    def multi_get(self, keys: list[str]) -> list[bytes]:
        """Return words, once all are there."""

    def add(self, key: str, amount: int) -> int:
        """Count."""

    def check(self, keys: list[str]) -> bool:
        """Return whether words are there."""


class RollCall:
    """The words of all ranks. A problem of one becomes the error of all, and the rank that serves the store leaves last."""

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
        board.add(_HERE, 1)

    @contextlib.contextmanager
    def one_fate(self) -> Iterator[None]:
        """Make an error of one the error of all: the first that is told of wins. See that the others have heard."""
        try:
            yield
        except PacelineError as error:
            raise self._told(error) from error

    def _told(self, error: PacelineError) -> PacelineError:
        try:
            if self._board.add(_PROBLEM + "s", 1) == 1:
                self._board.set(_PROBLEM, problem_text(error))
            found = problem_from(self._board.get(_PROBLEM).decode())
            self._part()
        except RuntimeError:  # the store is gone, with the rank that served it
            return error
        return found

    def come(self, word: str) -> None:
        """Say that this rank is here; it must be the only one of its number."""
        if self._board.add(f"seat-{self._rank}", 1) > 1:
            raise EnvironmentUnfit(
                f"two processes say that they are rank {self._rank}",
                fix="give every host a --node of its own, from 0 on; do not export RANK by hand",
            )
        self.tell("came", word)

    def exchange(self, topic: str, word: str) -> list[str]:
        """Tell all ranks a word; return theirs, in the order of the ranks."""
        self.tell(topic, word)
        return self.hear(topic)

    def tell(self, topic: str, word: str) -> None:
        """Leave a word for all."""
        self._board.set(f"{topic}-{self._rank}", word)
        self._board.add(topic, 1)

    def hear(self, topic: str) -> list[str]:
        """Wait for the words of all ranks."""
        begun, said, pause_s = time.monotonic(), False, _FIRST_LOOK_S
        while (count := self._board.add(topic, 0)) < self._size:
            self._raise_problem()
            waited_s = time.monotonic() - begun
            if waited_s > self._timeout_s:
                raise EnvironmentUnfit(
                    f"{self._missing(topic)} did not come within {self._timeout_s:g} s",
                    fix="see why they did not start, or how far they got; or give them longer with timeout.start_s",
                )
            if waited_s > _SAY_AFTER_S and not said and self._rank == 0:
                print(
                    f"waiting for {self._size - count} of {self._size} ranks",
                    file=sys.stderr,
                    flush=True,
                )
                said = True
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LAST_LOOK_S)
        return [
            word.decode()
            for word in self._board.multi_get([f"{topic}-{rank}" for rank in range(self._size)])
        ]

    def word_of(self, topic: str, rank: int) -> str:
        """Wait for the word of one rank."""
        limit = time.monotonic() + self._timeout_s
        while not self._board.check([f"{topic}-{rank}"]) and time.monotonic() < limit:
            self._raise_problem()
            time.sleep(_FIRST_LOOK_S)
        return self._board.get(f"{topic}-{rank}").decode()

    def _raise_problem(self) -> None:
        self._look()
        if self._board.check([_PROBLEM]):
            raise problem_from(self._board.get(_PROBLEM).decode())

    def _missing(self, topic: str) -> str:
        ranks = [
            str(rank) for rank in range(self._size) if not self._board.check([f"{topic}-{rank}"])
        ]
        more = f" and {len(ranks) - 8} more" if len(ranks) > 8 else ""
        return f"rank{'s' * (len(ranks) > 1)} {', '.join(ranks[:8])}{more}"

    def _part(self) -> None:
        """Let go of the others only when they know: with the rank that serves it, the store is gone."""
        limit = time.monotonic() + _FAREWELL_S
        heard = self._board.add(_HEARD, 1)
        while self._serve and heard < self._board.add(_HERE, 0) and time.monotonic() < limit:
            time.sleep(0.02)
            heard = self._board.add(_HEARD, 0)
