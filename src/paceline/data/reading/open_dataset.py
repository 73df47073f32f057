"""Open shards or an HDF5 file for training: `open_dataset`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from paceline.config import RunConfig
from paceline.data.hdf5.file import is_hdf5
from paceline.data.reading.transform import PerSample, Transform, Transformed
from paceline.data.shards.remote_store import open_store
from paceline.data.shards.source import ShardSource
from paceline.errors import ConfigError


def open_dataset(
    address: str | Path,
    config: RunConfig,
    *,
    columns: Sequence[str] = (),
    transform: Transform | None = None,
    each: Callable[..., Any] | None = None,
) -> Any:
    """Open shards (a folder, or an address such as s3://bucket/dataset) or an HDF5 file.

    The result is for `Run.steps`, `Run.evaluate` and `Trainer`.

    `transform(batch, rng)` is applied to whole lanes, on the device of the training.
    `each(*columns)` is applied to one sample at a time, in `read.workers` processes.
    """
    if isinstance(columns, str):
        raise ConfigError(
            f"columns={columns!r} is a string, not a list", fix=f"pass columns=[{columns!r}]"
        )
    source = _open(str(address), config, columns)
    if each is not None:
        source = PerSample(source, each)
    if transform is not None:
        from paceline.data.reading.source import as_source

        source = Transformed(as_source(source), transform)
    return source


def _open(address: str, config: RunConfig, columns: Sequence[str]) -> Any:
    if is_hdf5(address):
        from paceline.data.hdf5.source import H5Source

        return H5Source(Path(address), columns)
    store = open_store(address, config.read.cache, int(config.read.cache_gb * 1e9))
    return ShardSource(store, columns)
