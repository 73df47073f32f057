"""How the next steps are read while this one is computed: by a thread, a stated number of pieces ahead."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Generator, Iterator
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")

_LOOK_S = 0.1


class _Over:
    """The last thing that comes out of a queue: nothing, or what went wrong."""

    def __init__(self, error: BaseException | None) -> None:
        self.error = error


def read_ahead(wanted: Iterator[T], read: Callable[[T, int], R], depth: int) -> Generator[tuple[T, R]]:
    """Yield what was wanted, and what was read for it, in order; at most `depth` pieces wait, and one is being read.

    `read` is told which of `depth + 2` places in memory it may fill: one more is in the hands of the caller, who must be
    done with it when he asks for the next.
    """
    ready: queue.Queue[tuple[T, R] | _Over] = queue.Queue(maxsize=depth)
    stop = threading.Event()
    thread = threading.Thread(target=_work, args=(wanted, read, depth, ready, stop), name="read-ahead", daemon=True)
    thread.start()
    try:
        while not isinstance(piece := ready.get(), _Over):
            yield piece
        if piece.error is not None:
            raise piece.error
    finally:
        stop.set()
        thread.join()


def _work(
    wanted: Iterator[T],
    read: Callable[[T, int], R],
    depth: int,
    ready: queue.Queue[tuple[T, R] | _Over],
    stop: threading.Event,
) -> None:
    error: BaseException | None = None
    try:
        for number, want in enumerate(wanted):
            _hand_over(ready, (want, read(want, number % (depth + 2))), stop)
            if stop.is_set():
                return
    except BaseException as found:  # noqa: BLE001 - raised again where the piece is asked for
        error = found
    _hand_over(ready, _Over(error), stop)


def _hand_over(ready: queue.Queue[R], piece: R, stop: threading.Event) -> None:
    while not stop.is_set():
        with contextlib.suppress(queue.Full):
            ready.put(piece, timeout=_LOOK_S)
            return
