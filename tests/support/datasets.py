"""Small datasets of shards for tests."""

from __future__ import annotations

from pathlib import Path

import numpy

from paceline.data.shards.index import INDEX, DatasetIndex
from paceline.data.shards.shard import Rows, Varying, column_of, write_shard
from paceline.data.shards.source import ShardSource
from paceline.data.shards.store import LocalShardStore
from paceline.rundir import write_whole


def rows_of(begin: int, end: int) -> Rows:
    """Samples whose every byte follows from their number."""
    numbers = numpy.arange(begin, end)
    image = (numbers[:, None] * 7 + numpy.arange(12)).astype(numpy.uint8).reshape(-1, 3, 4)
    return {"image": image, "label": numbers}


def text_of(begin: int, end: int) -> Rows:
    """Samples of different lengths: sample k is the number k, k % 5 times."""
    numbers = numpy.arange(begin, end)
    lengths = numbers % 5
    flat = numpy.repeat(numbers, lengths).astype(numpy.uint16)
    return {"text": Varying(flat, numpy.concatenate([[0], numpy.cumsum(lengths)]))}


def make_dataset(folder: Path, samples: int, per_shard: int, rows=rows_of) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    columns = tuple(column_of(name, values) for name, values in rows(0, 1).items())
    shards = []
    for number, begin in enumerate(range(0, samples, per_shard)):
        values = rows(begin, min(begin + per_shard, samples))
        shards.append(write_shard(folder, f"{number:05d}.safetensors", columns, values))
    index = DatasetIndex(columns, per_shard, tuple(shards), {"made": "for tests"})
    write_whole(folder / INDEX, index.to_json())
    return folder


def open_folder(folder: Path, columns=()) -> ShardSource:
    return ShardSource(LocalShardStore(folder), columns)
