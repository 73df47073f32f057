"""Read a Python dataset in worker processes: each lane is made by one of them."""

from __future__ import annotations

import signal
from collections.abc import Callable, Generator, Iterable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader, Dataset

from paceline.data.order import Places
from paceline.data.reading.source import Batch, DatasetSource
from paceline.errors import PacelineError
from paceline.world.parent_death import die_with_parent

_FOR_THE_RANK = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP)
"""A launcher or a shell sends these to the whole process group; the rank decides when its workers stop."""

LaneRequest = tuple[Places, tuple[int, int], Places]
"""The samples of a lane, (seed, epoch), and the keys of the randomness of the samples."""


class _WorkerError(NamedTuple):
    """A Paceline error, as a worker sends it to the rank."""

    kind: type[PacelineError]
    problem: str
    fix: str


class _LaneDataset(Dataset[Any]):
    """A source whose items are whole lanes."""

    def __init__(self, source: DatasetSource) -> None:
        self._source = source

    def __getitem__(self, request: LaneRequest) -> Batch | _WorkerError:
        try:
            return self._source.gather(*request)
        except PacelineError as error:  # torch would turn it into a RuntimeError
            return _WorkerError(type(error), error.problem, error.fix)


def read_in_workers(
    source: DatasetSource, requests: Iterable[LaneRequest], workers: int, lanes_ahead: int
) -> Generator[Batch]:
    """Yield lanes in the order of the requests; about `lanes_ahead` are prepared at a time."""
    loader = DataLoader(
        _LaneDataset(source),
        batch_size=None,
        sampler=requests,
        num_workers=workers,
        prefetch_factor=max(1, -(-lanes_ahead // workers)),
        collate_fn=_unchanged,
        worker_init_fn=partial(_start_worker, source.worker_init),
        multiprocessing_context="fork",  # spawn would have to import what the user's script defines
        generator=torch.Generator(),  # else DataLoader draws from the generator of the training
    )
    lanes: Any = iter(loader)
    try:
        for lane in lanes:
            if isinstance(lane, _WorkerError):
                raise lane.kind(lane.problem, fix=lane.fix)
            yield lane
    finally:
        lanes._shutdown_workers()  # noqa: SLF001 - else they live until the iterator is collected
        for worker in lanes._workers:  # noqa: SLF001 - some hang and ignore the request to exit
            if worker.is_alive():
                worker.kill()
                worker.join()


def call_in_worker(function: Callable[[], Any], users_init: Callable[[int], None] | None) -> Any:
    """Return what a function returns in a worker process, which ends then; it cannot change the dataset of this one."""
    loader = DataLoader(
        _Once(function),
        batch_size=None,
        num_workers=1,
        collate_fn=_unchanged,
        worker_init_fn=partial(_start_worker, users_init),
        multiprocessing_context="fork",
        generator=torch.Generator(),
    )
    return next(iter(loader))


class _Once(Dataset[Any]):
    """A function as a dataset with one sample."""

    def __init__(self, function: Callable[[], Any]) -> None:
        self._function = function

    def __len__(self) -> int:
        return 1

    def __getitem__(self, _: int) -> Any:
        return self._function()


def _unchanged(batch: Any) -> Any:
    return batch


def _start_worker(users_init: Callable[[int], None] | None, number: int) -> None:
    """Ignore stop signals, which are for the rank, and exit when the rank exits."""
    for name in _FOR_THE_RANK:
        signal.signal(name, signal.SIG_IGN)
    die_with_parent()
    torch.set_num_threads(1)
    if users_init is not None:
        users_init(number)
