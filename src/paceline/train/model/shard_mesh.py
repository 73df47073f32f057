"""Which ranks shard one copy of the model (shard group), and which hold the same shard (replicate group)."""

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
from paceline.train.model.sharded_tensor import SHARD_DIM
from paceline.world.world import World


@dataclass(frozen=True, eq=False)
class ShardMesh:
    """The ranks as a table: each row is a shard group, each column holds the same shard of all copies."""

    groups: list[range]
    """The ranks of each shard group."""
    number: int
    """The number of this rank's shard group."""
    shard_group: ProcessGroup
    replicate_group: ProcessGroup | None
    """The ranks with the same shard; None with only one copy of the model."""

    @property
    def ranks(self) -> range:
        """The ranks of this rank's shard group."""
        return self.groups[self.number]

    def mesh(self, device: str, *, adds_shards: bool) -> DeviceMesh:
        """Return the mesh for FSDP: only this rank's shard group, if we add the sums between groups ourselves."""
        kind = torch.device(device).type
        if self.replicate_group is None or adds_shards:
            return DeviceMesh.from_group(self.shard_group, kind)
        return DeviceMesh.from_group(
            [self.replicate_group, self.shard_group],
            kind,
            mesh=[list(ranks) for ranks in self.groups],
            mesh_dim_names=("replicate", SHARD_DIM),
        )


_MESHES: WeakKeyDictionary[nn.Module, ShardMesh] = WeakKeyDictionary()


def shard_mesh_of(model: nn.Module) -> ShardMesh:
    """Return the mesh over which a model was sharded."""
    return _MESHES[model]


def make_shard_mesh(model: nn.Module, world: World, config: RunConfig) -> ShardMesh:
    """Create the process groups for sharding a model. Every rank must call this."""
    size = shard_group_size(world.size, config.shard_over)
    if world.is_main and size != (config.shard_over or size):
        print(
            f"shard_over={config.shard_over} does not divide {world.size} ranks: using shard_over={size}",
            file=sys.stderr,
            flush=True,
        )
    groups = [range(first, first + size) for first in range(0, world.size, size)]
    world_group = dist.group.WORLD
    assert world_group is not None
    shard_group, replicate_group = world_group, None
    if len(groups) > 1:
        columns = [range(first, world.size, size) for first in range(size)]
        shard_group = _make_groups(groups, world, config)
        replicate_group = _make_groups(columns, world, config)
    mesh = ShardMesh(groups, world.rank // size, shard_group, replicate_group)
    _MESHES[model] = mesh
    return mesh


def shard_group_size(ranks: int, wanted: int) -> int:
    """Return the smallest divisor of the number of ranks that is at least `wanted`; 0 means all ranks.

    With more ranks than wanted each holds a smaller shard, so it always fits; with fewer it might not.

    >>> [shard_group_size(8, wanted) for wanted in (0, 2, 3, 8, 16)], shard_group_size(3, 2)
    ([8, 2, 4, 8, 8], 3)
    """
    return next((size for size in range(wanted or ranks, ranks) if ranks % size == 0), ranks)


def _make_groups(parts: list[range], world: World, config: RunConfig) -> ProcessGroup:
    """Make a process group of each part; return that of this rank."""
    timeout = timedelta(seconds=config.timeout.start_s)
    groups: list[ProcessGroup] = [dist.new_group(list(ranks), timeout=timeout) for ranks in parts]
    return next(group for group, ranks in zip(groups, parts, strict=True) if world.rank in ranks)
