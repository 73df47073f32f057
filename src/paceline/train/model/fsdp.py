"""Shard a model over ranks with torch's `fully_shard` (FSDP2).

Weights, gradients and optimizer state are sharded. A unit's weights are gathered for its forward and its backward.
`fsdp_reduction` adds the gradients of the lanes.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from paceline.config import RunConfig
from paceline.errors import ConfigError
from paceline.train.model.bf16_weights import BF16, FP32_NORMS
from paceline.train.model.shard_mesh import make_shard_mesh
from paceline.train.strategy import Strategy
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


def settle(model: nn.Module) -> nn.Module:
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
