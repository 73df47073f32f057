"""The values that a score returns, as sums per batch: on the device until the end of an evaluation."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from paceline.errors import ConfigError
from paceline.world.collectives import all_gather_texts, sum_across
from paceline.world.world import World

_FIX = 'return {"name": one value per sample, or (sum, count)}'


class ScoreSums:
    """Sum and count of every named value, one row per batch."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.names: list[str] | None = None
        """The names of all values; None before the first batch."""
        self._rows: dict[int, Tensor] = {}

    def row(self, where: str, found: Mapping[str, Any], samples: int) -> Tensor | None:
        """Return sum and count of every value of a batch. The host does not wait for the device."""
        names = list(found)
        if self.names is None:
            self.names = names
        if names != self.names:
            raise _other_names(self.names, where, names)
        pairs: list[Tensor] = []
        for name, value in found.items():
            pairs += self._sum_and_count(name, value, samples)
        return torch.stack(pairs) if pairs else None

    def put(self, number: int, row: Tensor | None) -> None:
        """Keep the row of a batch."""
        if row is not None:
            self._rows[number] = row

    def _sum_and_count(self, name: str, value: Any, samples: int) -> tuple[Tensor, Tensor]:
        if isinstance(value, tuple) and len(value) == 2:
            return self._number(name, value[0]), self._number(name, value[1])
        if isinstance(value, Tensor) and value.shape[:1] == (samples,):
            return value.detach().double().sum(), self._number(name, value.numel())
        shape = f"shape {list(value.shape)}" if isinstance(value, Tensor) else repr(value)
        raise ConfigError(
            f"the value {name!r} of run.evaluate is {shape} for {samples} samples: its mean over the dataset is unknown",
            fix="return one value per sample, or (sum, count)",
        )

    def _number(self, name: str, value: Any) -> Tensor:
        """Return a number as float64 on the device."""
        device = self._world.device
        if not isinstance(value, Tensor):
            return torch.full((), float(value), dtype=torch.float64, device=device)
        if value.numel() == 1:
            return value.detach().reshape(()).to(device, torch.float64)
        raise ConfigError(
            f"the value {name!r} of run.evaluate is a pair with shape {list(value.shape)}, not (sum, count)",
            fix=f"return one value per sample, or (sum, count); for a metric object pass metrics={{{name!r}: ...}}",
        )

    def means(self, batches: int) -> dict[str, float]:
        """Return the mean of every value over all batches of all ranks. Every rank must call this."""
        names = _common_names(self._world, self.names)
        shape = batches, 2 * len(names)
        table = torch.zeros(shape, dtype=torch.float64, device=self._world.device)
        if self._rows:
            table[list(self._rows)] = torch.stack(list(self._rows.values()))
        # Ranks fill different rows of zeros, so this sum has no rounding; every rank then adds the
        # same rows.
        totals = sum_across(self._world, table).cpu().numpy().sum(axis=0).tolist()
        means = {}
        for position, name in enumerate(names):
            total, count = totals[2 * position : 2 * position + 2]
            means[name] = total / count if count else math.nan
        return means


def check_mapping(found: Any) -> Mapping[str, Any]:
    """Return what a score returned; raise unless it is a dict."""
    if not isinstance(found, Mapping):
        raise ConfigError(
            f"the function of run.evaluate returned {type(found).__name__}, not a dict", fix=_FIX
        )
    return found


def _common_names(world: World, names: list[str] | None) -> list[str]:
    """Return the names of all ranks; a rank without batches has none."""
    every = [json.loads(text) for text in all_gather_texts(world, json.dumps(names))]
    known = [each for each in every if each is not None]
    for rank, each in enumerate(every):
        if each is not None and each != known[0]:
            raise _other_names(known[0], f"rank {rank}", each)
    return list(known[0]) if known else []


def _other_names(first: list[str], where: str, names: list[str]) -> ConfigError:
    return ConfigError(
        f"the function of run.evaluate returned {', '.join(names) or 'nothing'} in {where}, "
        f"but {', '.join(first) or 'nothing'} before",
        fix="return the same names for every batch",
    )
