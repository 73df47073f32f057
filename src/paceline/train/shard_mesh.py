"""Which ranks share one copy of the model, and which hold the same slice of other copies."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from datetime import timedelta
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from paceline.config import RunConfig
from paceline.train.sharded_tensor import COPY
from paceline.world.world import World


@dataclass(frozen=True, eq=False)
class ShardMesh:
    """The ranks as a table: a row shares one copy of the model, a column holds the same slice of every copy."""

    rows: list[range]
    row: int
    """Which of them is this rank's."""
    inside: ProcessGroup
    """The ranks of this rank's row."""
    across: ProcessGroup | None
    """The ranks of its column; None: there is one copy."""

    @property
    def mine(self) -> range:
        """The ranks that share this rank's copy."""
        return self.rows[self.row]

    def mesh(self, device: str, *, summed_here: bool) -> DeviceMesh:
        """Return what FSDP is told: where sums across the copies are made here, it is to know of this rank's copy alone."""
        kind = torch.device(device).type
        if self.across is None or summed_here:
            return DeviceMesh.from_group(self.inside, kind)
        table = [list(ranks) for ranks in self.rows]
        return DeviceMesh.from_group(
            [self.across, self.inside], kind, mesh=table, mesh_dim_names=("copies", COPY)
        )


_COPIES: WeakKeyDictionary[nn.Module, ShardMesh] = WeakKeyDictionary()


def shard_mesh_of(model: nn.Module) -> ShardMesh:
    """Return how the ranks share a model that was cut."""
    return _COPIES[model]


def make_shard_mesh(model: nn.Module, world: World, config: RunConfig) -> ShardMesh:
    """Settle how the ranks share a model, and let them meet row by row and column by column. Every rank must call this."""
    size = ranks_of_a_copy(world.size, config.shard_over)
    if world.is_main and size != (config.shard_over or size):
        print(
            f"shard_over={config.shard_over} does not divide {world.size} ranks: {size} share a copy of the model",
            file=sys.stderr,
            flush=True,
        )
    rows = [range(first, first + size) for first in range(0, world.size, size)]
    world_group = dist.group.WORLD
    assert world_group is not None
    inside, across = world_group, None
    if len(rows) > 1:
        inside = _meet([list(row) for row in rows], world, config)
        across = _meet(
            [list(range(place, world.size, size)) for place in range(size)], world, config
        )
    found = _COPIES[model] = ShardMesh(rows, world.rank // size, inside, across)
    return found


def ranks_of_a_copy(ranks: int, wanted: int) -> int:
    """Return how many ranks share a copy: what is wanted, or the next number above it that divides the ranks.

    More ranks than wanted hold less each, so it always fits; fewer might not.

    >>> [ranks_of_a_copy(8, wanted) for wanted in (0, 2, 3, 8, 16)], ranks_of_a_copy(3, 2)
    ([8, 2, 4, 8, 8], 3)
    """
    return next((size for size in range(wanted or ranks, ranks) if ranks % size == 0), ranks)


def _meet(parts: list[list[int]], world: World, config: RunConfig) -> ProcessGroup:
    """Make a group of each part of the ranks; return that of this rank."""
    timeout = timedelta(seconds=config.timeout.start_s)
    groups: list[ProcessGroup] = [dist.new_group(ranks, timeout=timeout) for ranks in parts]
    return next(group for group, ranks in zip(groups, parts, strict=True) if world.rank in ranks)
