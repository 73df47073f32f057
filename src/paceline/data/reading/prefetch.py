"""How the next steps are read while this one is computed: by a thread, a stated number of pieces ahead."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Generator, Iterator
from queue import Empty, SimpleQueue
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")

_LOOK_S = 0.1


class _FreeSlots:
    """Places that may be filled. The one that was given back last is given out first: it may still be in the cache."""

    def __init__(self, count: int) -> None:
        self._places: list[int] = []
        self._given_back: SimpleQueue[None] = SimpleQueue()  # as many as there are places
        for place in reversed(range(count)):
            self.put(place)

    def put(self, place: int) -> None:
        """Give a place back."""
        self._places.append(place)
        self._given_back.put(None)

    def get(self) -> int | None:
        """Wait for a place; none, if the program ends meanwhile."""
        while threading.main_thread().is_alive():
            with contextlib.suppress(Empty):
                self._given_back.get(timeout=_LOOK_S)
                return self._places.pop()
        return None


class _End:
    """The last thing that comes out of a queue: nothing, or what went wrong."""

    def __init__(self, error: BaseException | None) -> None:
        self.error = error


def prefetched(
    wanted: Iterator[T], read: Callable[[T, int], R], depth: int
) -> Generator[tuple[T, R]]:
    """Yield what was wanted, and what was read for it, in order; at most `depth` pieces wait, and one is being read.

    `read` is told which of `depth + 2` places in memory it may fill: one more is in the hands of the caller, who must be
    done with it when he asks for the next.
    """
    free = _FreeSlots(depth + 2)
    ready: SimpleQueue[tuple[T, R, int] | _End] = SimpleQueue()
    stop = threading.Event()
    # Not a daemon: one that is stopped in the middle of a copy takes the interpreter with it.
    thread = threading.Thread(
        target=_work, args=(wanted, read, free, ready, stop), name="read-ahead"
    )
    thread.start()
    try:
        while not isinstance(piece := ready.get(), _End):
            want, found, place = piece
            yield want, found
            free.put(place)
        if piece.error is not None:
            raise piece.error
    finally:
        stop.set()
        free.put(0)  # the thread may be waiting for one
        thread.join()


def _work(
    wanted: Iterator[T],
    read: Callable[[T, int], R],
    free: _FreeSlots,
    ready: SimpleQueue[tuple[T, R, int] | _End],
    stop: threading.Event,
) -> None:
    error: BaseException | None = None
    try:
        for want in wanted:
            place = free.get()
            if place is None or stop.is_set():
                return
            ready.put((want, read(want, place), place))
    except BaseException as found:  # noqa: BLE001 - raised again where the piece is asked for
        error = found
    ready.put(_End(error))
