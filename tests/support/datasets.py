"""Small datasets of shards for tests."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import torch

from paceline.config import RunConfig
from paceline.data.reading.batches import Batches
from paceline.data.reading.nest import map_leaves
from paceline.data.shards.index import INDEX, DatasetIndex
from paceline.data.shards.shard import Rows, Varying, column_of, write_shard
from paceline.data.shards.source import ShardSource
from paceline.data.shards.store import LocalShardStore
from paceline.rundir import write_whole
from paceline.world.world import World

Lanes = dict[tuple[int, int], Any]
"""The batches by step and lane, with lists instead of tensors."""


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


def lanes_of(data: Any, config: RunConfig, world=World(), start=0, collate=None) -> Lanes:
    """Return what one rank reads from a step on."""
    found = {}
    for step in Batches(data, config, world, collate=collate).steps(start):
        for lane in step.lanes:
            if lane.samples:
                found[step.plan.index, lane.number] = map_leaves(
                    lambda leaf: leaf.tolist() if isinstance(leaf, torch.Tensor) else leaf,
                    lane.batch,
                )
    return found


def lanes_together(
    make: Callable[[], Any], config: RunConfig, size: int, start=0, collate=None
) -> Lanes:
    """Return what several ranks read, each from a dataset of its own."""
    worlds = [World(rank=rank, size=size) for rank in range(size)]
    found = {}
    for world in worlds:
        found |= lanes_of(make(), config, world, start, collate)
    return found


def check_worlds(
    make: Callable[[], Any], config: RunConfig, sizes=(2, 3), start=3, collate=None
) -> Lanes:
    """See that ranks together read what one rank reads, from the first step on and from a later one; return it."""
    alone = lanes_of(make(), config, collate=collate)
    later = {key: lane for key, lane in alone.items() if key[0] >= start}
    assert 0 < len(later) < len(alone)
    assert lanes_of(make(), config, start=start, collate=collate) == later
    for size in sizes:
        assert lanes_together(make, config, size, collate=collate) == alone
        assert lanes_together(make, config, size, start, collate) == later
    return alone
