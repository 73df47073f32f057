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
    """Open shards or an HDF5 file for `run.steps`, `run.evaluate` and `run.predict`; samples are read when they are needed.

    - `address`: the folder of the shards, an address such as s3://bucket/dataset, or an HDF5 file.
    - `config`: the settings of the run: `read.cache` and `read.cache_gb` apply here.
    - `columns`: the names of the columns to read, in this order; empty: all.
    - `transform`: `transform(batch, rng)` is applied to whole lanes, on the device of the training.
    - `each`: `each(*columns)` is applied to one sample at a time, in `read.workers` processes.

    >>> _ = paceline.pack_samples([{"image": torch.zeros(2, 2).numpy()} for _ in range(8)], "digits")
    >>> len(paceline.open_dataset("digits", config, columns=["image"]))
    8
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
