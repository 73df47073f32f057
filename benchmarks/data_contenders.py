"""Who reads the records, and how? By hand, with Paceline, or with a DataLoader; the other peers are in data_peers.py.

A reader is made (which imports what it needs, and is not measured), opened, and then read epoch by epoch. It gives pairs of
tensors, images and labels, the last batch of an epoch short. `open` takes how many batches of the first epoch to leave out;
a reader with `state` takes what that gave instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

import data_peers
import numpy
import torch
from data_formats import chunk_rows, load_arrays, spans
from data_task import Task
from torch import Tensor

Pairs = Iterator[tuple[Tensor, Tensor]]
WINDOW = 16
"""Chunks of HDF5 that are mixed, as many as Paceline mixes."""


class Reader(Protocol):
    """One contender."""

    def open(self, skip: int = 0, state: Any = None) -> None:
        """Open the set, at the beginning of an epoch or so many batches behind it."""

    def epoch(self) -> Pairs:
        """Yield what is left of this epoch; called again: the next."""


class MemoryMap:
    """The reference: numpy gathers from memory-mapped arrays, whose order is ready."""

    def __init__(self, task: Task) -> None:
        self._folder = task.folder / "arrays"
        order = numpy.random.default_rng(0).permutation(task.records)
        whole = [order[span] for span in spans(task.records, task.batch)]
        self._batches = [numpy.array_split(batch, task.world)[task.rank] for batch in whole]

    def open(self, skip: int = 0, state: Any = None) -> None:
        """Map the arrays."""
        self._images, self._labels = load_arrays(self._folder)

    def epoch(self) -> Pairs:
        """Index the arrays with a batch of numbers."""
        for batch in self._batches:
            yield torch.from_numpy(self._images[batch]), torch.from_numpy(self._labels[batch])


class MemoryMapTake(MemoryMap):
    """The same by `numpy.take` into memory that is used again: what is left if all is left out."""

    def epoch(self) -> Pairs:
        """Take a batch of rows."""
        most = len(self._batches[0])
        images = numpy.empty((most, *self._images.shape[1:]), dtype=numpy.uint8)
        labels = numpy.empty(most, dtype=numpy.int64)
        for batch in self._batches:
            count = len(batch)
            self._images.take(batch, axis=0, out=images[:count], mode="clip")
            self._labels.take(batch, axis=0, out=labels[:count], mode="clip")
            yield torch.from_numpy(images[:count]), torch.from_numpy(labels[:count])


class Paceline:
    """The batches of `Run.steps`, which a thread prefetches."""

    def __init__(self, task: Task, lanes: int = 1, form: str = "shards") -> None:
        from paceline.config import BatchConfig, RunConfig
        from paceline.data.reading.batches import Batches
        from paceline.world.world import World

        world = World(rank=task.rank, size=task.world)
        config = RunConfig(
            epochs=1_000_000, batch=BatchConfig(task.batch, lanes=max(lanes, task.world))
        )
        open_source = _source(task.folder / form)
        self._make = lambda: Batches(open_source(), config, world)

    def open(self, skip: int = 0, state: Any = None) -> None:
        """Open the set, and begin at a step."""
        batches = self._make()
        self._per_epoch, self._next = batches.plan.steps_per_epoch, skip
        self._steps = batches.steps(skip)

    def epoch(self) -> Pairs:
        """Yield lane after lane."""
        left = self._per_epoch - self._next % self._per_epoch
        self._next += left
        for step in islice(self._steps, left):
            for lane in step.lanes:
                image, label = lane.batch
                yield image, label


def _source(folder: Path) -> Callable[[], Any]:
    if folder.name == "hdf5-chunked":
        import h5py  # noqa: F401 - the source does so when it opens a file

        from paceline.data.hdf5.source import H5Source

        return lambda: H5Source(folder / "set.h5", ("image", "label"))
    from paceline.data.shards.source import ShardSource
    from paceline.data.shards.store import LocalShardStore

    return lambda: ShardSource(LocalShardStore(folder))


class Samples(torch.utils.data.Dataset[tuple[Tensor, int]]):
    """One sample at a time, as most datasets are written."""

    def __init__(self, images: Any, labels: Any) -> None:
        self._images, self._labels = images, labels

    def __len__(self) -> int:
        return len(self._labels)

    def __getitem__(self, number: int) -> tuple[Tensor, int]:
        return torch.from_numpy(self._images[number]), int(self._labels[number])


class Loader:
    """torch's DataLoader over single samples of memory-mapped arrays."""

    def __init__(self, task: Task, workers: int = 0) -> None:
        self._task, self._workers = task, workers

    def open(self, skip: int = 0, state: Any = None) -> None:
        """Make the dataset and its loader; workers live as long as it does."""
        self._loader = torch.utils.data.DataLoader(
            self._samples(),
            batch_size=self._task.batch,
            shuffle=True,
            num_workers=self._workers,
            persistent_workers=self._workers > 0,
        )

    def _samples(self) -> Samples:
        # Copy on write, though nobody writes: torch warns of tensors over memory that cannot be written.
        names = ("images", "labels")
        return Samples(
            *(
                numpy.load(self._task.folder / "arrays" / f"{name}.npy", mmap_mode="c")
                for name in names
            )
        )

    def epoch(self) -> Pairs:
        """Iterate the loader."""
        yield from self._loader


class Hdf5Loader(Loader):
    """torch's DataLoader over single samples of an HDF5 file."""

    def _samples(self) -> Samples:
        import h5py

        file = h5py.File(self._task.folder / "hdf5" / "set.h5")
        return Samples(file["image"], file["label"])


class Hdf5Chunks:
    """HDF5 read chunk by chunk, written by hand: chunks are permuted, then the samples of a window of them."""

    def __init__(self, task: Task) -> None:
        import h5py

        self._task, self._random = task, numpy.random.default_rng(0)
        self._open_file = lambda: h5py.File(task.folder / "hdf5-chunked" / "set.h5")

    def open(self, skip: int = 0, state: Any = None) -> None:
        """Open the file."""
        file = self._open_file()
        self._columns = file["image"], file["label"]
        rows = chunk_rows(self._columns[0])
        most = rows * WINDOW + self._task.batch
        self._room = [
            numpy.empty((most, *column.shape[1:]), dtype=column.dtype) for column in self._columns
        ]
        self._chunks = list(spans(self._task.records, rows))

    def epoch(self) -> Pairs:
        """Read window after window; what is too little for a batch goes to the front of the next."""
        kept = 0
        order = self._random.permutation(len(self._chunks))
        for window in spans(len(order), WINDOW):
            filled = self._fill(order[window], kept)
            last = window.stop == len(order)
            rows = self._random.permutation(filled)
            kept = 0 if last else filled % self._task.batch
            for span in spans(filled - kept, self._task.batch):
                images, labels = (memory[rows[span]] for memory in self._room)
                yield torch.from_numpy(images), torch.from_numpy(labels)
            for memory in self._room:
                memory[:kept] = memory[rows[filled - kept :]]

    def _fill(self, chunks: Any, at: int) -> int:
        for number in chunks:
            chunk = self._chunks[number]
            begin, at = at, at + chunk.stop - chunk.start
            for column, memory in zip(self._columns, self._room, strict=True):
                column.read_direct(memory, chunk, slice(begin, at))
        return at


READERS: dict[str, Callable[[Task], Reader]] = {
    "memory-map": MemoryMap,
    "memory-map-take": MemoryMapTake,
    "paceline": Paceline,
    "paceline-4-lanes": partial(Paceline, lanes=4),
    "paceline-windows": partial(Paceline, form="many-shards"),
    "paceline-hdf5": partial(Paceline, form="hdf5-chunked"),
    "hdf5-chunks": Hdf5Chunks,
    "loader": Loader,
    "loader-2": partial(Loader, workers=2),
    "litdata": data_peers.LitData,
    "datasets": data_peers.HuggingFace,
    "datasets-arrow": data_peers.HuggingFaceTables,
    "grain": data_peers.Grain,
    "grain-16": partial(data_peers.Grain, threads=16),
    "grain-memory-map": data_peers.GrainMemoryMap,
    "hdf5": Hdf5Loader,
    "streaming": data_peers.Streaming,
    "webdataset": data_peers.WebDataset,
}
