"""Shard a model over ranks with torch's `fully_shard` (FSDP2).

Weights, gradients and optimizer state are sharded. A unit's weights are gathered for its forward and its backward.
`fsdp_reduction` adds the gradients of the lanes.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from paceline.config import RunConfig
from paceline.errors import ConfigError
from paceline.exact.precision import BF16, FP32_NORMS
from paceline.exact.sharded_tensor import SHARD_DIM
from paceline.exact.strategy import Strategy
from paceline.world.world import World

Wrap = tuple[type[nn.Module], ...]


def shard(
    model: nn.Module, world: World, config: RunConfig, strategy: Strategy, wrap: Wrap | None
) -> nn.Module:
    """Shard a model unit by unit, in place."""
    units = list(units_of(model, wrap))
    _refuse_shared_weights(model, units)
    groups = make_shard_mesh(model, world, config)
    mesh = groups.mesh(world.device, adds_shards=strategy.adds_shards)
    bf16, fp32 = (BF16, torch.float32) if strategy.gathers_bf16 else (None, None)
    if bf16:
        norm_policy = MixedPrecisionPolicy(fp32, fp32, output_dtype=bf16)
        for module in list(model.modules()):
            if isinstance(module, FP32_NORMS):
                fully_shard(module, mesh=mesh, mp_policy=norm_policy)
    # With bf16-master, inputs are the same as in a model that is not sharded.
    casts_inputs = config.precision != "bf16-master"
    unit_policy = MixedPrecisionPolicy(bf16, fp32, cast_forward_inputs=casts_inputs)
    for unit in reversed(units):  # inner units first
        if not isinstance(unit, FSDPModule):
            fully_shard(unit, mesh=mesh, mp_policy=unit_policy)
    # The loss is computed in fp32.
    fully_shard(model, mesh=mesh, mp_policy=MixedPrecisionPolicy(bf16, fp32, output_dtype=fp32))
    return model.to(world.device)


def units_of(model: nn.Module, wrap: Wrap | None) -> Iterator[nn.Module]:
    """Yield the modules that are gathered as a whole, outer ones first: those of the classes in `wrap`.

    Without `wrap` they are the members of every ModuleList, because a stack of layers usually is one.
    """
    members = set(_list_members(model))
    units = []
    for module in model.modules():
        is_unit = module in members if wrap is None else isinstance(module, wrap)
        if is_unit and module is not model:
            units.append(module)
    if wrap and not units:
        raise ConfigError(
            f"the model has no module of {', '.join(kind.__name__ for kind in wrap)}",
            fix="pass the class of its layers in wrap=, or remove wrap=",
        )
    yield from (module for module in units if any(True for _ in module.parameters()))


def _list_members(model: nn.Module) -> Iterator[nn.Module]:
    for layers in model.modules():
        if isinstance(layers, nn.ModuleList):
            for child in layers:
                if not isinstance(child, nn.ModuleList | nn.ModuleDict):
                    yield child


def reshard(model: nn.Module) -> nn.Module:
    """Make the shards the parameters again, where a forward without backward has left gathered ones."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    return model


def _refuse_shared_weights(model: nn.Module, units: list[nn.Module]) -> None:
    """Refuse weights that two units share, and weights without dimensions."""
    unit_of: dict[nn.Module, nn.Module] = {}
    for unit in units:
        for module in unit.modules():
            unit_of[module] = unit  # inner units come later
    owner: dict[nn.Parameter, nn.Module] = {}
    for path, module in model.named_modules():
        for name, value in module.named_parameters(prefix=path, recurse=False):
            unit = unit_of.get(module, model)
            if owner.setdefault(value, unit) is not unit:
                raise ConfigError(
                    f"two units of parallel=fsdp share the weight {name}",
                    fix="pass run.model a wrap= with classes that share no weights, or set parallel=ddp",
                )
            if not value.dim():
                raise ConfigError(
                    f"parallel=fsdp cannot shard {name}: it is a scalar",
                    fix="make it a vector of one element, or set parallel=ddp",
                )


# Which ranks shard one copy of the model (shard group), and which hold the same shard (replicate group).


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
