"""The outputs of `run.predict`: columns with one row per sample, in memory or as shards in a folder."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor

from paceline.config import RunConfig
from paceline.data.pack.shard_writer import shard_name, write_rows
from paceline.data.shards.index import INDEX, LONGEST_INDEX, Column, DatasetIndex, ShardFacts
from paceline.data.shards.shard import Array, Varying, column_of
from paceline.errors import ConfigError, EnvironmentUnfit
from paceline.rundir import make_private, write_whole, writing_to
from paceline.safe_open import read_bytes
from paceline.scale.batch import share
from paceline.world.collectives import all_gather_texts
from paceline.world.process_group import wait_for_all
from paceline.world.world import World

OUTPUT = "output"
"""The name of the column if the function returns no names."""

Columns = Mapping[str, Any]
"""By name: a tensor with one row per sample, or a list with one vector per sample."""

_SHARD_SAMPLES = 8192
_SHARDS_PER_LANE = 4
_ORIGIN = "run.predict"


def columns_from(output: Any, samples: int) -> Columns:
    """Return what a function returned as named columns; raise unless each has one row per sample.

    >>> columns_from(torch.ones(2, 3), samples=2)["output"].shape
    torch.Size([2, 3])
    """
    columns = output if isinstance(output, Mapping) else {OUTPUT: output}
    found: dict[str, Tensor | list[Tensor]] = {}
    for name, value in columns.items():
        if not _has_rows(value, samples):
            shape = list(value.shape) if isinstance(value, Tensor) else type(value).__name__
            raise ConfigError(
                f"the function of run.predict returned {shape} for {samples} samples"
                + (f" in {name!r}" if isinstance(output, Mapping) else ""),
                fix="return a tensor with one row per sample, or a dict of such tensors",
            )
        rows = [row.detach() for row in value] if isinstance(value, list) else value.detach()
        found[name] = rows
    return found


def _has_rows(value: Any, samples: int) -> bool:
    if isinstance(value, list):
        vectors = all(isinstance(row, Tensor) and row.ndim == 1 for row in value)
        return vectors and len(value) == samples
    return isinstance(value, Tensor) and value.shape[:1] == (samples,)


class PredictionShards:
    """Writes columns as a dataset for `open_dataset`. Each rank writes whole shards; they do not depend on the world."""

    def __init__(
        self, folder: Path, world: World, samples: int, batch_size: int, config: RunConfig
    ) -> None:
        self._folder, self._world, self._name = folder, world, config.name
        self._samples, self._size = samples, batch_size
        batches = -(-samples // batch_size)
        even = batches // (_SHARDS_PER_LANE * config.batch.lanes)
        self._per_shard = max(1, min(even, _SHARD_SAMPLES // batch_size))
        shards = -(-batches // self._per_shard)
        mine = share(shards, world.rank, world.size)
        self.batches = self._batches_of(mine, batches)
        """The batches of this rank."""
        self.most_batches = len(self._batches_of(share(shards, 0, world.size), batches))
        """An upper bound of the batches of any rank."""
        self._last = batches - 1
        self._waiting: list[Columns] = []
        self._facts: list[ShardFacts] = []
        self._columns: tuple[Column, ...] = ()

    def _batches_of(self, shards: range, batches: int) -> range:
        stop = min(shards.stop * self._per_shard, batches)
        return range(shards.start * self._per_shard, max(stop, shards.start * self._per_shard))

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """Prepare the folder; write the index when all shards are complete. Every rank must call this."""
        self._refuse_other_dataset()
        wait_for_all(self._world)
        if self._world.is_main:
            with writing_to(self._folder, "pass another folder in to="):
                make_private(self._folder)
                (self._folder / INDEX).unlink(missing_ok=True)
        wait_for_all(self._world)
        yield
        self._complete()

    def add(self, number: int, output: Columns) -> None:
        """Take the output of a batch; write a shard when its last batch has come."""
        self._waiting.append(output)
        if list(output) != list(self._waiting[0]):
            raise ConfigError(
                f"the function of run.predict returned {', '.join(output)} in batch {number}, "
                f"but {', '.join(self._waiting[0])} before",
                fix="return the same names for every batch",
            )
        if (number + 1) % self._per_shard == 0 or number == self._last:
            rows = {name: _joined(name, self._waiting) for name in self._waiting[0]}
            columns = tuple(column_of(name, values) for name, values in rows.items())
            self._columns = self._columns or columns
            shard = number // self._per_shard
            self._facts.append(write_rows(self._folder, shard, self._columns, rows))
            self._waiting = []

    def _refuse_other_dataset(self) -> None:
        path = self._folder / INDEX
        if not path.exists():
            return
        about = DatasetIndex.from_json(read_bytes(path, LONGEST_INDEX), str(path)).about
        if about.get("from") != [_ORIGIN]:
            raise ConfigError(
                f"{self._folder} holds a dataset that run.predict has not written",
                fix="pass another folder in to=, or delete this one",
            )

    def _complete(self) -> None:
        own = {"columns": [asdict(each) for each in self._columns]}
        own["shards"] = [asdict(each) for each in self._facts]
        every = [json.loads(text) for text in all_gather_texts(self._world, json.dumps(own))]
        columns = [each["columns"] for each in every if each["columns"]]
        if any(each != columns[0] for each in columns):
            raise ConfigError(
                "the function of run.predict returned other columns on some ranks",
                fix="return the same names, types and shapes for every batch",
            )
        if self._world.is_main:
            self._write_index(columns[0], [fact for each in every for fact in each["shards"]])
        wait_for_all(self._world)

    def _write_index(self, columns: list[dict[str, Any]], facts: list[dict[str, Any]]) -> None:
        shards = tuple(ShardFacts(**each) for each in facts)
        missing = [each.name for each in shards if not (self._folder / each.name).exists()]
        if missing:
            raise EnvironmentUnfit(
                f"{missing[0]}, which another node has written, is not in {self._folder} on this one",
                fix="pass a folder in to= that all nodes share",
            )
        for number in range(len(shards), len(shards) + 10**6):  # of an earlier, longer prediction
            if not (self._folder / shard_name(number)).exists():
                break
            (self._folder / shard_name(number)).unlink()
        layout = tuple(Column(**each | {"shape": tuple(each["shape"])}) for each in columns)
        about = {"from": [_ORIGIN], "run": self._name}
        index = DatasetIndex(layout, self._per_shard * self._size, shards, about)
        with writing_to(self._folder, "pass another folder in to="):
            write_whole(self._folder / INDEX, index.to_json())


def _joined(name: str, outputs: list[Columns]) -> Array | Varying:
    """Return the rows of several batches as numpy arrays on the host."""
    values = [output[name] for output in outputs]
    if not any(isinstance(value, list) for value in values):
        return _array(name, torch.cat([value for value in values if isinstance(value, Tensor)]))
    vectors = [row for value in values for row in value]
    offsets = numpy.zeros(len(vectors) + 1, dtype=numpy.int64)
    offsets[1:] = numpy.cumsum([len(row) for row in vectors])
    return Varying(_array(name, torch.cat(vectors)), offsets)


def _array(name: str, values: Tensor) -> Array:
    try:
        found: Array = values.cpu().numpy()
    except TypeError as error:
        raise ConfigError(
            f"shards cannot hold {values.dtype}, the type of {name!r} in run.predict",
            fix=f"return {name}.float()",
        ) from error
    return found
