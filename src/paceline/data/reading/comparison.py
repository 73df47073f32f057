"""Whether all ranks, and all starts of a run, have the same dataset: its length, its order, and a few samples.

A dataset that each rank makes from random numbers or sets of its own would train without a message, and each rank
would train on other data. The samples are read as the training reads them: under their seeds, in a worker if there are
any. What has no digest is left out: objects of unknown classes, samples that raise an error, streams.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import hashlib
import json
import math
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy
import torch
from torch import Tensor

from paceline import terminal
from paceline.data.order import Places
from paceline.data.reading.source import (
    DatasetSource,
    Source,
    SupportsDigest,
    TensorSource,
    gather_lane,
)
from paceline.data.reading.workers import call_in_worker
from paceline.data.sampling import SampleOrder
from paceline.errors import ConfigError
from paceline.world.collectives import all_gather_texts
from paceline.world.randomness import same_generators
from paceline.world.world import World

_READ = 4
"""Samples that are read of a dataset written in Python, the first of them twice."""
_ENOUGH_S = 1.0
"""No further sample is read after this time."""
_ROWS = 64
"""Rows of tensors in memory that are compared."""
_PLACES = 256
"""Places of the order of the first epoch that are compared."""
_MOST_ELEMENTS = 1 << 16
_MOST_ITEMS = 256
_CLOSE = 1e-3
"""A relative difference that another type of hardware may cause, in spectra or decoded images."""
_WITHIN = (
    "create it inside of `with paceline.Run(config) as run`, or from generators with a seed: "
    "numpy.random.default_rng(0), random_split(..., generator=torch.Generator().manual_seed(0))"
)
_SETS = "if it comes from a set, sort it: sorted(set(words)); `paceline run` gives all ranks one PYTHONHASHSEED"
_FILES = "sort lists of files and sets: sorted(os.listdir(folder))"


class Summary(NamedTuple):
    """What two samples are compared by."""

    exact: str
    """The digest of everything in it."""
    words: str
    """The digest of all but floating-point numbers and bytes, which may differ by rounding."""
    numbers: list[list[float]]
    """Of each tensor of those, a weighted sum and the norm."""


class DataFacts(NamedTuple):
    """What is compared of a dataset."""

    length: int
    order: str
    """The digest of the first samples of the first epoch."""
    samples: list[Summary | None]
    batch: Summary | None
    """The same samples as a batch."""
    changes: bool
    """Whether a sample was another one when it was read again."""
    hashes: int
    """The hash of a word, which tells the hash seed of the process."""

    @classmethod
    def of(cls, tree: Any) -> DataFacts:
        """Return the facts that were stored as JSON; raise ValueError, TypeError or KeyError for something else."""
        facts = cls(*tree)
        samples = [_stored_summary(each) for each in facts.samples]
        return facts._replace(samples=samples, batch=_stored_summary(facts.batch))


def _stored_summary(tree: Any) -> Summary | None:
    if tree is None:
        return None
    exact, words, numbers = tree
    return Summary(str(exact), str(words), [[float(total), float(norm)] for total, norm in numbers])


def read_facts(source: Source, order: SampleOrder, seed: int, workers: int) -> DataFacts:
    """Read the first samples of an order from a source; the state of all generators is as before."""
    with same_generators():
        places = numpy.arange(min(_PLACES, order.size))
        drawn = order.at(places, seed, 0)
        read = partial(_read, source, drawn, places if order.repeats else drawn, (seed, 0))
        if isinstance(source, DatasetSource) and workers:
            samples, batch, changes = call_in_worker(read, source.worker_init)
        else:
            samples, batch, changes = read()
    digest = hashlib.blake2b(drawn.astype("<i8").tobytes(), digest_size=8).hexdigest()
    return DataFacts(order.size, digest, samples, batch, changes, hash("paceline"))


_Read = tuple[list[Summary | None], Summary | None, bool]


def _read(source: Source, drawn: Places, draws: Places, key: tuple[int, int]) -> _Read:
    """Return summaries of some samples and of their batch, and whether they change when they are read again."""
    if isinstance(source, SupportsDigest):
        return [], Summary(source.digest, source.digest, []), False
    if isinstance(source, DatasetSource):
        with _unmoved(source.dataset):
            found = _read_dataset(source, drawn[:_READ], draws[:_READ], key)
        source.forget_epoch()  # what `set_epoch` has set is as before, too
        return found
    count = _ROWS if isinstance(source, TensorSource) else _READ

    def gather() -> Summary | None:
        return summary_of(gather_lane(source, drawn[:count], key, draws[:count]))

    with contextlib.suppress(Exception):  # the training reports it
        batch = gather()
        return [], batch, not isinstance(source, TensorSource) and gather() != batch
    return [], None, False


def _read_dataset(
    source: DatasetSource, drawn: Places, draws: Places, key: tuple[int, int]
) -> _Read:
    read: list[Any] = []
    samples: list[Summary | None] = []
    begun = time.monotonic()
    with contextlib.suppress(Exception):  # the training reports it
        for sample, number in zip(drawn.tolist(), draws.tolist(), strict=True):
            read.append(source.read(sample, number, key))
            samples.append(summary_of(read[-1]))
            if time.monotonic() - begun > _ENOUGH_S:
                break
        again = summary_of(source.read(int(drawn[0]), int(draws[0]), key))
        batch = None
        with contextlib.suppress(Exception):  # some collate functions need more samples
            # A copy: some remove what they have used, and the dataset may keep its samples in memory.
            copies = copy.deepcopy(read)
            batch = summary_of(source.collated(copies, draws[: len(read)].tolist(), key))
        return samples, batch, again != samples[0]
    return samples, None, False


@contextlib.contextmanager
def _unmoved(dataset: Any) -> Iterator[None]:
    """Give a dataset its own generators, and the numbers among its attributes, as they were."""
    undo: list[Callable[[], object]] = []
    for _ in range(8):  # datasets inside of torch's wrappers and ours
        for name, value in getattr(dataset, "__dict__", {}).items():
            if isinstance(value, int | float):
                undo.append(partial(setattr, dataset, name, value))
            elif isinstance(value, random.Random):
                undo.append(partial(value.setstate, value.getstate()))
            elif isinstance(value, numpy.random.Generator):
                bits = value.bit_generator
                undo.append(partial(setattr, bits, "state", bits.state))
            elif isinstance(value, numpy.random.RandomState):
                undo.append(partial(value.set_state, value.get_state(legacy=False)))
            elif isinstance(value, torch.Generator):
                undo.append(partial(value.set_state, value.get_state()))
        dataset = getattr(dataset, "dataset", None)
    try:
        yield
    finally:
        for each in undo:
            with contextlib.suppress(AttributeError):  # of a frozen dataclass
                each()


def summary_of(nest: Any) -> Summary | None:
    """Return the summary of a sample or a batch; None if nothing in it has a digest.

    >>> summary_of({"x": torch.ones(2), "y": "a"}) == summary_of({"y": "a", "x": numpy.ones(2, "float32")})
    True
    >>> summary_of(3) == summary_of(4)
    False
    """
    sums = _Sums()
    sums.add(nest)
    return (
        Summary(sums.exact.hexdigest(), sums.words.hexdigest(), sums.numbers) if sums.any else None
    )


class _Sums:
    """The digests of what was added."""

    def __init__(self) -> None:
        self.exact, self.words = hashlib.blake2b(digest_size=8), hashlib.blake2b(digest_size=8)
        self.numbers: list[list[float]] = []
        self.any = False

    def add(self, nest: Any) -> None:
        """Add a nest; what has no digest is left out."""
        if isinstance(nest, Mapping):
            for key in sorted(nest, key=repr):
                self._text(repr(key) if isinstance(key, str | int) else "")
                self.add(nest[key])
        elif isinstance(nest, list | tuple):
            self._add_items(nest)
        elif dataclasses.is_dataclass(nest) and not isinstance(nest, type):
            self.add({each.name: getattr(nest, each.name) for each in dataclasses.fields(nest)})
        elif isinstance(nest, bytes):
            self._text(hashlib.blake2b(nest).hexdigest())
        elif isinstance(nest, str | int | None):
            self._text(repr(nest))
        elif isinstance(nest, Tensor):
            self._tensor(nest)
        elif isinstance(nest, float | numpy.ndarray | numpy.generic) or _is_image(nest):
            with contextlib.suppress(TypeError, ValueError):  # NumPy's objects and texts
                self._tensor(torch.from_numpy(numpy.array(nest)))

    def _add_items(self, items: Sequence[Any]) -> None:
        self._text(str(len(items)))
        if items and all(type(each) in {int, float} for each in items):
            self.add(numpy.array(items))
            return
        for each in items[:_MOST_ITEMS]:
            self.add(each)

    def _text(self, text: str) -> None:
        self.any = True
        for digest in (self.exact, self.words):
            digest.update(f"{len(text)} {text}".encode(errors="replace"))

    def _tensor(self, tensor: Tensor) -> None:
        if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_meta:
            return
        self._text(f"{tensor.dtype} {list(tensor.shape)}")
        flat = tensor.detach().flatten()
        part = flat[:: math.ceil(len(flat) / _MOST_ELEMENTS) or 1].cpu().contiguous()
        content = part.view(torch.uint8).numpy().tobytes() if len(part) else b""
        self.exact.update(content)
        may_round = part.is_floating_point() or part.is_complex() or part.dtype == torch.uint8
        if not may_round or len(self.numbers) >= _MOST_ITEMS:
            self.words.update(content if not may_round else b"")
            return
        real = torch.view_as_real(part).flatten() if part.is_complex() else part
        values = torch.nan_to_num(real.double(), posinf=0.0, neginf=0.0)
        weights = torch.arange(len(values), dtype=torch.float64).cos()
        found = torch.stack([values @ weights, values.norm()])
        self.numbers.append(torch.nan_to_num(found, posinf=0.0, neginf=0.0).tolist())


def _is_image(value: Any) -> bool:
    """Return whether a value is an image of PIL, which need not be installed."""
    return hasattr(value, "__array_interface__") and hasattr(value, "getbands")


def difference(own: DataFacts, other: DataFacts) -> str:
    """Return in which way two datasets differ: length, samples, order, rounding; empty if they do not."""
    if own.length != other.length:
        return "length"
    pairs = list(zip(own.samples, other.samples, strict=False))
    if len(own.samples) == len(other.samples):
        pairs.append((own.batch, other.batch))
    found = set()
    if not (own.changes or other.changes):
        found = {_compared(first, second) for first, second in pairs if first and second}
    for kind in ("samples", "rounding"):
        if kind in found and (kind == "samples" or own.order == other.order):
            return "order" if kind == "samples" and own.order != other.order else kind
    return "order" if own.order != other.order else ""


def _compared(own: Summary, other: Summary) -> str:
    if own.exact == other.exact:
        return ""
    if own.words != other.words or len(own.numbers) != len(other.numbers):
        return "samples"
    for (total, norm), (other_total, other_norm) in zip(own.numbers, other.numbers, strict=True):
        most = _CLOSE * max(norm, other_norm)
        if abs(total - other_total) > most or abs(norm - other_norm) > most:
            return "samples"
    return "rounding"


_WORDS = {
    "samples": "of the same length, but with other samples",
    "order": "of the same length, but its sampler draws other samples",
}


def describe_difference(own: DataFacts, other: DataFacts, whose: str) -> str:
    """Return how a dataset differs from another one, for a message; empty if it does not, or by rounding only.

    >>> facts = DataFacts(1037, "", [], None, False, 0)
    >>> describe_difference(facts, facts._replace(length=1000), "rank 0")
    '1,037 samples, rank 0 has 1,000'
    """
    kind = difference(own, other)
    if kind == "length":
        return f"{own.length:,} samples, {whose} has {other.length:,}"
    return f"{_WORDS[kind]} than {whose}" if kind in _WORDS else ""


def fix_of(own: DataFacts, other: DataFacts) -> str:
    """Return what to do about two datasets that differ."""
    return f"{_WITHIN}; {_SETS if own.hashes != other.hashes else _FILES}"


def name_of(data: Any) -> str:
    """Return the class of a dataset, inside of torch's DataLoader and wrappers."""
    while hasattr(data, "dataset"):
        data = data.dataset
    return type(data).__name__


class DataComparison:
    """Compares datasets between the ranks of a run, and names those whose samples change by themselves, once each."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._named: set[str] = set()

    def compare(self, facts: DataFacts, name: str, where: str) -> None:
        """Raise ConfigError if a rank has another dataset than rank 0. Every rank must call this."""
        texts = all_gather_texts(self._world, json.dumps(facts))
        every = [DataFacts.of(json.loads(text)) for text in texts]
        first = every[0]
        for rank, other in enumerate(every):
            if found := describe_difference(other, first, "rank 0"):
                raise ConfigError(
                    f"rank {rank} has another dataset in {where} ({found})",
                    fix=fix_of(other, first),
                )
        if any(each.changes for each in every):
            self._name(
                name,
                f"the samples of {name} change whenever they are read, by a clock or a generator of its own: "
                "they depend on the number of ranks and on resuming",
                "draw from the global generators of torch, NumPy or Python in it: they are seeded for each sample",
            )
        elif any(difference(each, first) == "rounding" for each in every):
            self._name(
                name,
                f"the samples of {name} differ between the ranks by rounding, as on two types of hardware",
                "run all ranks on one type of hardware for the same bits",
            )

    def _name(self, name: str, what: str, fix: str) -> None:
        if name not in self._named and self._world.is_main:
            terminal.error(f"warning: {what}\n  fix: {fix}")
        self._named.add(name)
