"""The dataset of an evaluation: opened once, kept in GPU memory if it fits, read in batches."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import numpy
from torch import Tensor
from torch.utils.data import TensorDataset

from paceline.config import RunConfig
from paceline.data.reading.collate import Collate
from paceline.data.reading.nest import Nest, to_device
from paceline.data.reading.resident import cache_on_gpu
from paceline.data.reading.source import DatasetSource, as_source
from paceline.data.reading.transform import Transformed
from paceline.world.world import World

_KEPT = 8


class EvaluationSource:
    """A dataset in batches on the device of this rank."""

    def __init__(self, data: Any, collate: Collate | None, world: World, config: RunConfig) -> None:
        source = as_source(data, collate)
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
        self._kept: OrderedDict[tuple[int, ...], tuple[Any, list[int], EvaluationSource]] = (
            OrderedDict()
        )

    def of(self, data: Any, collate: Collate | None) -> EvaluationSource:
        """Return the source of a dataset: the same one while its tensors do not change."""
        tensors = _tensors_of(data)
        objects = [*(tensors or [data]), collate]
        versions = [0 if each.is_inference() else each._version for each in tensors]  # noqa: SLF001 - no public way
        key = tuple(map(id, objects))
        _, known, source = self._kept.pop(key, (None, None, None))
        if source is None or known != versions:
            source = EvaluationSource(data, collate, self._world, self._config)
        source.begin_pass()
        self._kept[key] = objects, versions, source  # the objects stay alive, so ids stay theirs
        if len(self._kept) > _KEPT:
            self._kept.popitem(last=False)
        return source


def _tensors_of(data: Any) -> list[Tensor]:
    """Return the tensors of a dataset in memory: a script may make a new tuple of them each time."""
    if isinstance(data, TensorDataset):
        return list(data.tensors)
    if isinstance(data, tuple | list) and all(isinstance(item, Tensor) for item in data):
        return list(data)
    return []
