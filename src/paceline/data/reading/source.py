"""Sources of samples: tensors in memory, or any map-style dataset."""

from __future__ import annotations

import random
import types
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any, Protocol, TypeAlias, runtime_checkable

import numpy
import torch
from torch import Tensor, nn
from torch.utils.data import ConcatDataset, DataLoader, Dataset, StackDataset, Subset, TensorDataset

from paceline.data.order import Places
from paceline.data.reading.batch_buffer import BatchBuffer
from paceline.data.reading.collate import Collate, stack
from paceline.data.reading.dataloader import LoaderSettings
from paceline.data.reading.nest import Nest
from paceline.data.sampling import SampleOrder
from paceline.errors import ConfigError
from paceline.world.randomness import mix, seed_everything

Batch: TypeAlias = Nest
"""What a lane trains on: a tuple of tensors from memory or files, or what collate made."""

_MOST_OBJECTS = 100
"""A ConcatDataset of a thousand parts would take a millisecond per step."""
_INNER = {"dataset", "datasets"}
"""Attributes in which torch's wrappers hold datasets."""
_CODE = (type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType, types.MethodType)
_GENERATORS = (numpy.random.Generator, numpy.random.RandomState, torch.Generator, random.Random)
_COLLATE = 1 << 63  # keeps the randomness of collate apart from that of a sample
_EPOCH = 1 << 62  # and that of set_epoch


class Source(Protocol):
    """Numbered samples that are read many at a time."""

    bytes_per_sample: int
    """Host memory that one prefetched sample takes."""
    block: int
    """Consecutive samples that are stored and read together; 0: samples are separate."""
    window: int
    """Blocks that are shuffled together. Samples of at most two windows are requested at a time."""

    def __len__(self) -> int:
        """Return the number of samples."""

    def gather(self, samples: Places, key: tuple[int, int]) -> Batch:
        """Return samples, stacked. `key` is (seed, epoch), for sources that draw random numbers."""


@runtime_checkable
class SupportsGatherInto(Source, Protocol):
    """A source that can fill a buffer of the caller."""

    def new_buffer(self, count: int, *, pinned: bool = False) -> BatchBuffer:
        """Allocate a buffer for `count` samples."""

    def gather_into(self, samples: Places, buffer: BatchBuffer) -> Batch:
        """Copy samples into a buffer that is large enough; return the part that was filled."""


@runtime_checkable
class ReadsLanes(Protocol):
    """A source that must be asked for one lane at a time."""

    per_lane: bool

    def gather(self, samples: Places, key: tuple[int, int], draws: Places | None) -> Batch:
        """Return the samples of one lane.

        `draws` numbers the draws of an epoch that has a sample more than once, so that each
        is augmented in its own way; None: by sample.
        """


@runtime_checkable
class SupportsPrefetch(Protocol):
    """A source that can fetch blocks before they are needed."""

    def expect(self, blocks: Sequence[int]) -> None:
        """Start to fetch the blocks of the next window."""


@runtime_checkable
class SupportsDigest(Protocol):
    """A source that knows a digest of all its samples without reading them."""

    @property
    def digest(self) -> str:
        """The digest of the stored samples."""


class TensorSource:
    """Samples that are rows of tensors; the last tensor is the target."""

    block = window = 0

    def __init__(self, *tensors: Tensor) -> None:
        lengths = [len(tensor) for tensor in tensors]
        if len(set(lengths)) != 1:
            raise ConfigError(
                f"all tensors of a dataset must have the same number of rows, got {lengths}",
                fix="pass tensors of equal length",
            )
        self.tensors = tensors
        row_sizes = [tensor[:1].numel() * tensor.element_size() for tensor in tensors]
        self.bytes_per_sample = sum(row_sizes)

    def __len__(self) -> int:
        return len(self.tensors[0])

    def gather(self, samples: Places, key: tuple[int, int]) -> Batch:
        """Return rows of every tensor."""
        rows = torch.from_numpy(samples)
        return tuple(tensor.index_select(0, rows.to(tensor.device)) for tensor in self.tensors)


class DatasetWrapper:
    """A wrapper with as many samples as its dataset, in the same blocks."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset
        self.block: int = getattr(dataset, "block", 0)

    @property
    def window(self) -> int:
        """Blocks that are shuffled together; the dataset may size its cache by it."""
        return getattr(self.dataset, "window", 0)

    @window.setter
    def window(self, blocks: int) -> None:
        if hasattr(self.dataset, "window"):
            self.dataset.window = blocks

    def __len__(self) -> int:
        return len(self.dataset)


class DatasetSource(DatasetWrapper):
    """Samples of a map-style dataset, read one by one and collated lane by lane.

    All generators are seeded by sample first, those that the dataset and its transforms keep, too.
    """

    bytes_per_sample = 1 << 30  # unknown: group no steps
    per_lane = True

    def __init__(
        self,
        dataset: Any,
        collate: Collate | None = None,
        worker_init: Callable[[int], None] | None = None,
    ) -> None:
        super().__init__(dataset)
        self.worker_init = worker_init
        self.collate = collate
        self._own: list[Any] = []
        self._searched: set[bool] = set()
        self._epoch = -1

    def gather(self, samples: Places, key: tuple[int, int], draws: Places | None = None) -> Batch:
        """Return the samples of one lane as a batch."""
        numbers = (samples if draws is None else draws).tolist()
        pairs = zip(samples.tolist(), numbers, strict=True)
        return self.collated([self.read(*pair, key) for pair in pairs], numbers, key)

    def read(self, sample: int, number: int, key: tuple[int, int]) -> Any:
        """Return one sample; `number` is the key of its randomness."""
        self._begin_epoch(key)
        return self._seeded(lambda: self.dataset[sample], *key, number)

    def collated(self, read: list[Any], numbers: list[int], key: tuple[int, int]) -> Batch:
        """Return samples that were read as a batch."""
        if self.collate is not None:  # it may draw, too: a masking collator does
            return self._seeded(lambda: stack(read, self.collate), *key, *numbers, _COLLATE)
        return stack(read, self.collate)

    def _seeded(self, draw: Callable[[], Any], *numbers: int) -> Any:
        """Return what a function draws after all generators were seeded by these numbers."""
        seed_everything(*numbers)
        seed_generators(self._own, *numbers)
        drawn = draw()
        of_collate = numbers[-1] == _COLLATE
        if of_collate not in self._searched:  # some make their generator when they first need it
            self._searched.add(of_collate)
            before, self._own = len(self._own), own_generators([self.dataset, self.collate])
            if len(self._own) > before:
                return self._seeded(draw, *numbers)
        return drawn

    def _begin_epoch(self, key: tuple[int, int]) -> None:
        if key[1] != self._epoch:
            set_epoch_keyed(self.dataset, key)
            set_epoch(self.collate, key[1])
            self._epoch = key[1]
            self._own = own_generators([self.dataset, self.collate])
            self._searched = set()

    def forget_epoch(self) -> None:
        """Call `set_epoch` before the next sample: an evaluation of the same dataset may have called it."""
        self._epoch = -1


class Sampled:
    """A source of which samples are drawn, or read in another order than the shuffle.

    Sample k is the k-th one drawn in the epoch.
    """

    per_lane = True
    block = 0

    def __init__(self, source: Source, order: SampleOrder, description: str) -> None:
        self.source, self.order, self.description = source, order, description
        self.bytes_per_sample = source.bytes_per_sample
        self.window = source.window

    def __len__(self) -> int:
        return self.order.size

    def gather(self, samples: Places, key: tuple[int, int], draws: Places | None = None) -> Batch:
        """Return the samples drawn at these places."""
        drawn = self.order.at(samples, *key)
        if draws is None and self.order.repeats:
            draws = samples
        return gather_lane(self.source, drawn, key, draws)


def gather_lane(
    source: Source, samples: Places, key: tuple[int, int], draws: Places | None
) -> Batch:
    """Return the samples of one lane; sources that read lane by lane also get the draws."""
    if isinstance(source, ReadsLanes):
        return source.gather(samples, key, draws)
    return source.gather(samples, key)


def set_epoch(dataset: Any, epoch: int) -> None:
    """Call `set_epoch` of a dataset, or of the datasets that it wraps."""
    for target in epoch_targets(dataset):
        target.set_epoch(epoch)


def set_epoch_keyed(dataset: Any, key: tuple[int, int]) -> None:
    """Call `set_epoch` with generators that depend on (seed, epoch) alone: it may draw the samples of the epoch."""
    if targets := epoch_targets(dataset):
        seed_everything(*key, _EPOCH)
        seed_generators(own_generators([dataset]), *key, _EPOCH)
        for target in targets:
            target.set_epoch(key[1])


def epoch_targets(dataset: Any) -> list[Any]:
    """Return the dataset if it has `set_epoch`; otherwise those that have, among the datasets that it wraps."""
    if callable(getattr(dataset, "set_epoch", None)):
        return [dataset]
    if isinstance(dataset, ConcatDataset):
        inner = list(dataset.datasets)
    elif isinstance(dataset, StackDataset):
        parts = dataset.datasets
        inner = list(parts.values() if isinstance(parts, dict) else parts)
    elif isinstance(dataset, Subset | DataLoader | DatasetWrapper):
        inner = [dataset.dataset]
    elif isinstance(dataset, Dataset):  # a wrapper that the script has written
        inner = [value for value in vars(dataset).values() if isinstance(value, Dataset)]
    else:
        return []
    return [target for each in inner for target in epoch_targets(each)]


def parts_of(roots: list[Any], without: AbstractSet[int] = frozenset()) -> list[Any]:
    """Return datasets, the datasets inside of them, and their transforms: all that have attributes of their own."""
    found: dict[int, Any] = {}
    waiting = list(roots)
    while waiting and len(found) < _MOST_OBJECTS:
        each = waiting.pop(0)
        if id(each) in found or id(each) in without or not hasattr(each, "__dict__"):
            continue
        if isinstance(each, _CODE):
            continue
        found[id(each)] = each
        for name, value in vars(each).items():
            items = [value]
            if type(value) in {list, tuple, dict} and len(value) <= _MOST_OBJECTS:
                items = list(value.values() if type(value) is dict else value)
            waiting += [item for item in items if name in _INNER or _is_part(item)]
    return list(found.values())


def _is_part(value: Any) -> bool:
    """Return whether an attribute is a dataset or a transform with attributes of its own."""
    if isinstance(value, nn.Module):  # a transform, not the model
        return not any(True for _ in value.parameters())
    return isinstance(value, Dataset) or (callable(value) and not isinstance(value, Tensor))


def own_generators(roots: list[Any]) -> list[Any]:
    """Return the generators that a dataset and its transforms keep themselves: `self.rng = numpy.random.default_rng(0)`.

    They are seeded as the global ones are: otherwise a sample depends on what the same process has read before it.
    """
    found: dict[int, Any] = {}
    for part in parts_of([each for each in roots if each is not None]):
        for value in vars(part).values():
            items = (
                value if type(value) in {list, tuple} and len(value) <= _MOST_OBJECTS else [value]
            )
            found |= {id(each): each for each in items if isinstance(each, _GENERATORS)}
    shared = (torch.default_generator, random.seed.__self__, numpy.random.mtrand._rand)  # type: ignore[attr-defined]  # noqa: SLF001 - NumPy's global one
    return [
        each
        for each in found.values()
        if not isinstance(each, random.SystemRandom) and not any(each is other for other in shared)
    ]


def seed_generators(generators: list[Any], *numbers: int) -> None:
    """Seed each generator by these numbers and its place."""
    for place, each in enumerate(generators):
        key = mix(*numbers, place)
        if isinstance(each, numpy.random.Generator):
            bits = each.bit_generator
            bits.state = type(bits)(key).state
        elif isinstance(each, numpy.random.RandomState):
            each.seed(key & 0xFFFFFFFF)
        elif isinstance(each, torch.Generator):
            each.manual_seed(key)
        else:
            each.seed(key)


def as_source(data: Any, collate: Collate | None = None) -> Source:
    """Turn a source, tensors, a DataLoader, or a dataset with `__getitem__` into a source.

    With `collate`, samples are read one by one, and `collate` makes a batch of those of a lane.
    """
    source = _find_source(data)
    if len(source) == 0:
        raise ConfigError(
            "the dataset has 0 samples", fix="check the path or the filter that made it"
        )
    return source if collate is None else _with_collate(source, collate)


def _find_source(data: Any) -> Source:
    if isinstance(data, DataLoader):
        return _loader_source(LoaderSettings.of(data))
    if isinstance(data, dict) and data:
        return _stacked(data)
    if hasattr(data, "gather") and not isinstance(data, Tensor):
        _check_source(data)
        source: Source = data
        return source
    tensors = data.tensors if isinstance(data, TensorDataset) else data
    if isinstance(tensors, tuple | list) and all(isinstance(item, Tensor) for item in tensors):
        return TensorSource(*tensors)
    if isinstance(data, tuple) and data and all(isinstance(item, numpy.ndarray) for item in data):
        raise ConfigError(
            f"a tuple of {len(data)} NumPy arrays is not a dataset",
            fix=f"pass tensors: {'(' + ', '.join(['torch.from_numpy(...)'] * len(data)) + ',)'}",
        )
    mapping = isinstance(data, Mapping)
    if not mapping and hasattr(data, "__getitem__") and hasattr(data, "__len__"):
        return DatasetSource(data)
    raise ConfigError(
        f"{type(data).__name__} is not a map-style dataset",
        fix="pass a tuple of tensors, a dataset with __len__ and __getitem__, or for an iterable "
        "paceline.Stream(factory), where factory(shard, shards) returns the samples of one lane",
    )


def _stacked(datasets: dict[Any, Any]) -> Source:
    """Return a source whose samples are dicts with one sample of each dataset."""
    for name, dataset in datasets.items():
        if not (hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")):
            raise ConfigError(
                f"{name!r} of this dict is {type(dataset).__name__}, not a dataset",
                fix='pass {"name": a tensor, or a dataset with __len__ and __getitem__}',
            )
    lengths = {str(name): len(dataset) for name, dataset in datasets.items()}
    if len(set(lengths.values())) > 1:
        raise ConfigError(
            f"the datasets of this dict have different lengths: {lengths}",
            fix="give all the same length, with torch.utils.data.Subset for example",
        )
    return DatasetSource(StackDataset(**datasets))


def _loader_source(loader: LoaderSettings) -> Source:
    source = as_source(loader.dataset, loader.collate)
    if isinstance(source, DatasetSource):
        source.worker_init = loader.worker_init
    if loader.order is None:
        return source
    return Sampled(source, loader.order, loader.sampler)


def _with_collate(source: Source, collate: Collate) -> Source:
    """Return a source that reads the same samples one by one."""
    if isinstance(source, Sampled):
        inner = _with_collate(source.source, collate)
        return Sampled(inner, source.order, source.description)
    if isinstance(source, DatasetSource):
        return DatasetSource(source.dataset, collate, source.worker_init)
    if isinstance(source, TensorSource):
        return DatasetSource(TensorDataset(*source.tensors), collate)
    if hasattr(source, "__getitem__"):
        return DatasetSource(source, collate)
    raise ConfigError(
        f"collate= needs single samples, and {type(source).__name__} has only whole batches",
        fix="leave collate= out, or pass a dataset with __getitem__ "
        "(open_dataset: each= instead of transform=)",
    )


def _check_source(data: Any) -> None:
    required = ("bytes_per_sample", "block", "window", "__len__")
    missing = [name for name in required if not hasattr(data, name)]
    if missing:
        raise ConfigError(
            f"{type(data).__name__} has gather, but not {', '.join(missing)}",
            fix="add the attributes of paceline.data.reading.source.Source (block = window = 0 if samples "
            "are stored separately)",
        )
