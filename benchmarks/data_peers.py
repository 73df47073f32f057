"""How do the peers read? Each as its guide says, in the way that costs least where it leaves a choice; see data_contenders.py.

Where a peer can do without worker processes it does: on few cores they only add to the CPU time.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy
import torch
from data_formats import load_arrays
from data_task import Task, import_streaming
from torch import Tensor

Pairs = Iterator[tuple[Tensor, Tensor]]


class _Loader:
    """A loader that yields batches by name, and can say where it is."""

    _loader: Any

    def epoch(self) -> Pairs:
        """Iterate the loader."""
        for batch in self._loader:
            yield batch["image"], batch["label"]

    def state(self) -> Any:
        """Return what a checkpoint would hold."""
        return self._loader.state_dict()


class LitData(_Loader):
    """StreamingDataset and StreamingDataLoader of litdata."""

    def __init__(self, task: Task) -> None:
        import litdata

        self._task, self._library = task, litdata

    def open(self, skip: int = 0, state: Any = None) -> None:
        """Open the chunks where they are."""
        folder = str(self._task.folder / "litdata" / "set")
        dataset = self._library.StreamingDataset(
            folder, shuffle=True, drop_last=False, seed=1, batch_decode=False
        )
        self._loader = self._library.StreamingDataLoader(
            dataset, batch_size=self._task.batch, num_workers=0
        )
        if state is not None:
            self._loader.load_state_dict(state)


class HuggingFace:
    """A Dataset of Arrow files: shuffled numbers, read in batches, which come as tensors."""

    form = "torch"

    def __init__(self, task: Task) -> None:
        import datasets

        self._task, self._library = task, datasets

    def open(self, skip: int = 0, state: Any = None) -> None:
        """Map the files."""
        folder = str(self._task.folder / "arrow" / "set")
        self._set = self._library.load_from_disk(folder).with_format(self.form)
        self._seed, self._skip = 0, skip * self._task.batch

    def epoch(self) -> Pairs:
        """Shuffle, and read batch by batch; images come as int64."""
        shuffled = self._set.shuffle(seed=self._seed, keep_in_memory=True)
        if self._skip:
            shuffled = shuffled.skip(self._skip)
        self._seed, self._skip = self._seed + 1, 0
        for batch in shuffled.iter(self._task.batch):
            yield self._pair(batch)

    def _pair(self, batch: Any) -> tuple[Tensor, Tensor]:
        return batch["image"].view(-1, self._task.side, self._task.side), batch["label"]


class HuggingFaceTables(HuggingFace):
    """The same, with tables in place of tensors, whose memory is made tensors of by hand."""

    form = "arrow"

    def _pair(self, batch: Any) -> tuple[Tensor, Tensor]:
        images, labels = (batch[name].combine_chunks() for name in ("image", "label"))
        side = self._task.side
        return _tensor(images.flatten()).view(-1, side, side), _tensor(labels)


def _tensor(values: Any) -> Tensor:
    return torch.frombuffer(
        values.buffers()[1], dtype=getattr(torch, str(values.type)), count=len(values), offset=0
    )


class Grain:
    """A MapDataset of grain: ArrayRecord files, shuffled, parsed, batched."""

    def __init__(self, task: Task, threads: int = 0) -> None:
        import grain

        self._task, self._library = task, grain
        self._options = grain.ReadOptions(
            num_threads=threads, prefetch_buffer_size=500 if threads else 0
        )

    def open(self, skip: int = 0, state: Any = None) -> None:
        """Open the files."""
        self._records = self._library.MapDataset.source(self._source())
        self._seed, self._state = 0, state

    def _source(self) -> Any:
        paths = sorted(map(str, (self._task.folder / "array-record").iterdir()))
        return self._library.sources.ArrayRecordDataSource(paths)

    def epoch(self) -> Pairs:
        """Make the iterator of an epoch."""
        batches = self._records.seed(self._seed).shuffle().map(self._parse).batch(self._task.batch)
        self._iterator = iter(batches.to_iter_dataset(self._options))
        if self._state is not None:
            self._iterator.set_state(self._state)
        self._seed, self._state = self._seed + 1, None
        for image, label in self._iterator:
            yield torch.from_numpy(image), torch.from_numpy(label)

    def _parse(self, content: bytes) -> Any:
        image = numpy.frombuffer(content, dtype=numpy.uint8, offset=8).reshape(
            self._task.side, self._task.side
        )
        return image, numpy.frombuffer(content, dtype=numpy.int64, count=1)[0]

    def state(self) -> Any:
        """Return what a checkpoint would hold."""
        return self._iterator.get_state()


class GrainMemoryMap(Grain):
    """grain over memory-mapped arrays."""

    def _source(self) -> Any:
        images, labels = load_arrays(self._task.folder / "arrays")
        return _Rows(images, labels)

    def _parse(self, content: Any) -> Any:
        return content


class _Rows:
    def __init__(self, images: Any, labels: Any) -> None:
        self._images, self._labels = images, labels

    def __len__(self) -> int:
        return len(self._labels)

    def __getitem__(self, number: int) -> Any:
        return self._images[number], self._labels[number]


class Streaming(_Loader):
    """StreamingDataset and StreamingDataLoader of MosaicML."""

    def __init__(self, task: Task) -> None:
        self._task, self._library = task, import_streaming()

    def open(self, skip: int = 0, state: Any = None) -> None:
        """Open the shards where they are."""
        folder, size = str(self._task.folder / "mds" / "set"), self._task.batch
        dataset = self._library.StreamingDataset(
            local=folder, shuffle=True, batch_size=size, num_canonical_nodes=1
        )
        self._loader = self._library.StreamingDataLoader(dataset, batch_size=size, num_workers=0)
        if state is not None:
            self._loader.load_state_dict(state)


class WebDataset:
    """Tar files: their order is shuffled, then samples within a buffer of 1,000."""

    def __init__(self, task: Task) -> None:
        import webdataset

        self._task, self._library = task, webdataset

    def open(self, skip: int = 0, state: Any = None) -> None:
        """Build the pipeline."""
        paths = sorted(map(str, (self._task.folder / "tar").iterdir()))
        records = self._library.WebDataset(paths, shardshuffle=len(paths), seed=1)
        self._batches = (
            records.shuffle(1000).map(self._parse).batched(self._task.batch, partial=True)
        )

    def _parse(self, record: Any) -> Any:
        image = numpy.frombuffer(record["image.bin"], dtype=numpy.uint8).reshape(
            self._task.side, self._task.side
        )
        return image, numpy.frombuffer(record["label.bin"], dtype=numpy.int64)[0]

    def epoch(self) -> Pairs:
        """Run the pipeline; labels come as an array, images too."""
        for image, label in self._batches:
            yield torch.as_tensor(image), torch.as_tensor(label)
