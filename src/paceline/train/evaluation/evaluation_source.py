"""The dataset of an evaluation: opened once, kept in GPU memory if it fits, read in batches."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import numpy
import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from paceline.config import RunConfig
from paceline.data.reading.batches import ordered
from paceline.data.reading.collate import Collate
from paceline.data.reading.comparison import DataComparison, DataFacts, name_of, read_facts
from paceline.data.reading.nest import Nest, to_device
from paceline.data.reading.resident import cache_on_gpu
from paceline.data.reading.source import DatasetSource, as_source
from paceline.data.reading.transform import Transformed
from paceline.world.collectives import all_gather_rows
from paceline.world.world import World

_KEPT = 8


class EvaluationSource:
    """A dataset in batches on the device of this rank."""

    def __init__(self, data: Any, collate: Collate | None, world: World, config: RunConfig) -> None:
        self._given = source = as_source(data, collate)
        self._config = config
        self._transform = source if isinstance(source, Transformed) else None
        stored = self._transform.source if self._transform else source
        self._source = cache_on_gpu(stored, world.device, config.read.resident_gb)
        self._device, self._key = world.device, (config.seed, 0)

    def __len__(self) -> int:
        return len(self._source)

    def begin_pass(self) -> None:
        """Call `set_epoch(0)` of the dataset again: the training may have called it, too."""
        if isinstance(self._source, DatasetSource):
            self._source.forget_epoch()

    def read_facts(self) -> DataFacts:
        """Read what is compared of the dataset between ranks."""
        stored, order = ordered(self._given, self._config)
        return read_facts(stored, order, self._config.seed, workers=0)

    def read(self, begin: int, end: int) -> Nest:
        """Return consecutive samples on the device, transformed there."""
        samples = numpy.arange(begin, end)
        batch = to_device(self._source.gather(samples, self._key), self._device)
        if self._transform is None:
            return batch
        return self._transform.apply(batch, samples, self._key)


class EvaluationSources:
    """Sources by dataset. The newest are kept: a dataset in GPU memory is copied there once."""

    def __init__(self, world: World, config: RunConfig) -> None:
        self._world, self._config = world, config
        self._comparison = DataComparison(world)
        self._kept: OrderedDict[tuple[int, ...], tuple[Any, list[int], EvaluationSource]] = (
            OrderedDict()
        )

    def of(self, data: Any, collate: Collate | None, where: str) -> EvaluationSource:
        """Return the source of a dataset: the same one while its tensors do not change. Every rank must call this.

        A dataset that is new on some rank is compared between the ranks, for `where` in messages.
        """
        source, is_new = self._find(data, collate)
        if self._world.size > 1:
            # Each time: a dataset may have grown, or be known to some ranks only.
            own = torch.tensor([len(source), is_new])
            rows = all_gather_rows(self._world, own)
            if bool(rows[:, 1].any()) or bool((rows[:, 0] != rows[0, 0]).any()):
                kept = self._kept
                self._kept = OrderedDict()  # after a refusal all are compared again
                self._comparison.compare(source.read_facts(), name_of(data), where)
                self._kept = kept
        return source

    def _find(self, data: Any, collate: Collate | None) -> tuple[EvaluationSource, bool]:
        """Return the source of a dataset, and whether it was opened now."""
        tensors = _tensors_of(data)
        objects = [*(tensors or [data]), collate]
        versions = [0 if each.is_inference() else each._version for each in tensors]  # noqa: SLF001 - no public way
        key = tuple(map(id, objects))
        _, known, source = self._kept.pop(key, (None, None, None))
        is_new = source is None or known != versions
        if source is None or is_new:
            source = EvaluationSource(data, collate, self._world, self._config)
        source.begin_pass()
        self._kept[key] = objects, versions, source  # the objects stay alive, so ids stay theirs
        if len(self._kept) > _KEPT:
            self._kept.popitem(last=False)
        return source, is_new


def _tensors_of(data: Any) -> list[Tensor]:
    """Return the tensors of a dataset in memory: a script may make a new tuple of them each time."""
    if isinstance(data, TensorDataset):
        return list(data.tensors)
    if isinstance(data, tuple | list) and all(isinstance(item, Tensor) for item in data):
        return list(data)
    return []
