"""Read ahead in a thread: a bounded number of items are ready before they are needed."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Generator, Iterator
from queue import Empty, SimpleQueue
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")

_POLL_S = 0.1


class _FreeSlots:
    """Numbers of buffers that may be filled.

    The last one returned comes first: it may still be in the CPU cache.
    """

    def __init__(self, count: int) -> None:
        self._slots: list[int] = []
        self._returned: SimpleQueue[None] = SimpleQueue()  # one entry per free slot
        for slot in reversed(range(count)):
            self.put(slot)

    def put(self, slot: int) -> None:
        """Return a slot."""
        self._slots.append(slot)
        self._returned.put(None)

    def get(self) -> int | None:
        """Wait for a slot. Returns None when the main thread has ended."""
        while threading.main_thread().is_alive():
            with contextlib.suppress(Empty):
                self._returned.get(timeout=_POLL_S)
                return self._slots.pop()
        return None


class _End:
    """The last item of the queue, with the error that ended the thread, if any."""

    def __init__(self, error: BaseException | None) -> None:
        self.error = error


def prefetched(
    requests: Iterator[T], read: Callable[[T, int], R], depth: int
) -> Generator[tuple[T, R]]:
    """Yield each request with its result, in order.

    At most `depth` results wait while one more is read.

    `read(request, slot)` may fill buffer number `slot` of `depth + 2`: the caller holds one
    more result until it asks for the next.
    """
    free = _FreeSlots(depth + 2)
    ready: SimpleQueue[tuple[T, R, int] | _End] = SimpleQueue()
    stop = threading.Event()
    # Not a daemon: a daemon thread stopped in the middle of a copy crashes the interpreter.
    thread = threading.Thread(
        target=_work, args=(requests, read, free, ready, stop), name="read-ahead"
    )
    thread.start()
    try:
        while not isinstance(item := ready.get(), _End):
            request, result, slot = item
            yield request, result
            free.put(slot)
        if item.error is not None:
            raise item.error
    finally:
        stop.set()
        free.put(0)  # the thread may be waiting for a slot
        thread.join()


def _work(
    requests: Iterator[T],
    read: Callable[[T, int], R],
    free: _FreeSlots,
    ready: SimpleQueue[tuple[T, R, int] | _End],
    stop: threading.Event,
) -> None:
    caught: BaseException | None = None
    try:
        for request in requests:
            slot = free.get()
            if slot is None or stop.is_set():
                return
            ready.put((request, read(request, slot), slot))
    except BaseException as error:  # noqa: BLE001 - raised again in the thread that reads the results
        caught = error
    ready.put(_End(caught))
