"""Draw samples by weight, from several datasets, or by length: `weighted`, `mixture`, `by_length`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.utils.data import ConcatDataset, TensorDataset

from paceline.data.reading.source import DatasetSource, Sampled, TensorSource, as_source
from paceline.data.sampling import (
    LengthOrder,
    MixtureOrder,
    WeightedOnceOrder,
    WeightedOrder,
    check_weights,
)
from paceline.errors import ConfigError


def weighted(
    dataset: Any, weights: Any, *, samples: int | None = None, replacement: bool = True
) -> Sampled:
    """Draw the samples of each epoch by weight, the same ones on any number of ranks.

    - `dataset`: tensors, or a map-style dataset.
    - `weights`: one number per sample; they need not sum to 1.
    - `samples`: samples per epoch; by default as many as there are weights.
    - `replacement`: whether an epoch may contain a sample more than once.

    >>> rare = paceline.weighted((torch.arange(4.0),), [1, 1, 1, 5], samples=8)
    >>> len(rare)
    8
    """
    source = as_source(dataset)
    count = len(check_weights(weights))
    if count != len(source):
        raise ConfigError(
            f"there are {count} weights for {len(source)} samples",
            fix=f"pass {len(source)} weights, one per sample",
        )
    size = _positive(count if samples is None else samples)
    order = WeightedOrder(weights, size) if replacement else WeightedOnceOrder(weights, size)
    drawn = "with" if replacement else "without"
    return Sampled(
        source, order, f"weighted: {size:,} of {count:,} samples per epoch, {drawn} replacement"
    )


def mixture(
    datasets: Mapping[str, Any], weights: Mapping[str, float], *, samples: int | None = None
) -> Sampled:
    """Mix datasets: each sample comes from one of them, drawn by weight, the same on any number of ranks.

    - `datasets`: tensors or map-style datasets, by name.
    - `weights`: the share of each, by the same names; they need not sum to 1.
    - `samples`: samples per epoch; by default as many as all datasets together.

    A dataset's samples come in shuffled order; after the last one it starts again.

    >>> books, code = (torch.zeros(100),), (torch.ones(20),)
    >>> mixed = paceline.mixture({"books": books, "code": code}, {"books": 0.7, "code": 0.3})
    >>> len(mixed)
    120
    """
    if not datasets or datasets.keys() != weights.keys():
        raise ConfigError(
            f"a mixture of the datasets {_names(datasets)} has the weights {_names(weights)}",
            fix="pass at least one dataset, and one weight for each, by the same names",
        )
    parts = {name: _map_style(name, dataset) for name, dataset in datasets.items()}
    sizes = [len(part) for part in parts.values()]
    size = _positive(sum(sizes) if samples is None else samples)
    shares = [weights[name] for name in parts]
    order = MixtureOrder(sizes, shares, size)
    shown = ", ".join(f"{name} {weights[name] / sum(shares):.1%}" for name in parts)
    joined = DatasetSource(ConcatDataset(parts.values()))
    return Sampled(joined, order, f"mixture: {size:,} samples per epoch, {shown}")


def by_length(dataset: Any, lengths: Any, *, batch: int, window: int = 50) -> Sampled:
    """Let the samples of each batch have similar lengths, so that little is padded; the same on any number of ranks.

    - `dataset`: tensors, or a map-style dataset.
    - `lengths`: one number per sample.
    - `batch`: samples of a batch over all ranks. It is the global batch of the run, unless `batch.global_size` is given,
      which must then be a multiple of it.
    - `window`: how many batches of shuffled samples are sorted together; more pad less, and mix less.

    >>> texts = [{"ids": torch.zeros(length)} for length in (7, 1, 6, 2)]
    >>> data = paceline.by_length(texts, [len(text["ids"]) for text in texts], batch=2)
    >>> len(data)
    4
    """
    source = as_source(dataset)
    count = len(lengths)
    if count != len(source):
        raise ConfigError(
            f"there are {count} lengths for {len(source)} samples",
            fix=f"pass {len(source)} lengths, one per sample",
        )
    if batch < 1 or window < 1:
        raise ConfigError(
            f"batch and window must be >= 1, got {batch} and {window}",
            fix="pass batch=config.batch.global_size and window=50",
        )
    order = LengthOrder(lengths, batch, window)
    return Sampled(source, order, f"by length: batches of {batch} from {window} sorted at a time")


def _map_style(name: str, dataset: Any) -> Any:
    """Return a dataset whose samples can be read one by one."""
    source = as_source(dataset)
    if isinstance(source, TensorSource):
        return TensorDataset(*source.tensors)
    if isinstance(source, DatasetSource):
        return source.dataset
    if hasattr(source, "__getitem__"):
        return source
    raise ConfigError(
        f"{name!r} of the mixture is a {type(dataset).__name__}, which has only whole batches",
        fix="pass a dataset with __len__ and __getitem__ (open_dataset: each= instead of transform=)",
    )


def _positive(samples: int) -> int:
    if samples < 1:
        raise ConfigError(
            f"samples must be >= 1, got {samples}", fix="leave samples= out, or set it"
        )
    return samples


def _names(mapping: Mapping[str, Any]) -> str:
    return ", ".join(map(repr, mapping)) or "none"
