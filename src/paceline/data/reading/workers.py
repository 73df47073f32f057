"""How a dataset written in Python is read by several processes: the samples of a lane are made by one of them."""

from __future__ import annotations

import signal
from collections.abc import Generator, Iterable
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader, Dataset

from paceline.data.order import Places
from paceline.data.reading.source import Batch, Source
from paceline.errors import PacelineError
from paceline.world.parent_death import die_with_parent

_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP)

Wanted = tuple[Places, tuple[int, int]]
"""The samples of a lane, and (seed, epoch)."""


class _Failed(NamedTuple):
    """An error of ours, on its way from a worker to the rank."""

    kind: type[PacelineError]
    problem: str
    fix: str


class _Answers(Dataset[Any]):
    """A source that is asked for whole lanes."""

    def __init__(self, source: Source) -> None:
        self._source = source

    def __getitem__(self, wanted: Wanted) -> Batch | _Failed:
        try:
            return self._source.gather(*wanted)
        except PacelineError as error:  # torch would make a RuntimeError of it
            return _Failed(type(error), error.problem, error.fix)


def read_in_workers(
    source: Source, wanted: Iterable[Wanted], workers: int, lanes_ahead: int
) -> Generator[Batch]:
    """Yield lanes in the order in which they are wanted; so many are in the making at a time."""
    lanes: Any = iter(
        DataLoader(
            _Answers(source),
            batch_size=None,
            sampler=wanted,
            num_workers=workers,
            prefetch_factor=max(1, -(-lanes_ahead // workers)),
            collate_fn=_as_it_is,
            worker_init_fn=_begin,
            multiprocessing_context="fork",  # what the user's script defines need not be found again by its name
            generator=torch.Generator(),  # else it would draw from the training's own
        )
    )
    try:
        for lane in lanes:
            if isinstance(lane, _Failed):
                raise lane.kind(lane.problem, fix=lane.fix)
            yield lane
    finally:
        lanes._shutdown_workers()  # noqa: SLF001 - else they live until the iterator is collected
        for worker in lanes._workers:  # noqa: SLF001 - those that hang, and do not hear the signal that asks them to end
            if worker.is_alive():
                worker.kill()
                worker.join()


def _as_it_is(batch: Any) -> Any:
    return batch


def _begin(number: int) -> None:
    """Leave signals to the rank, and end with it."""
    for name in _STOP_SIGNALS:
        signal.signal(name, signal.SIG_IGN)
    die_with_parent()
    torch.set_num_threads(1)
