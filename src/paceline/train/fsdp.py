"""How a model is cut into slices, one for each rank that shares a copy of it (torch's `fully_shard`).

Weights, gradients and optimizer state lie in slices. A unit's weights are gathered for its forward and its backward.
How lane gradients are added is told in `slice_sum`.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from paceline.config import RunConfig
from paceline.errors import ConfigError
from paceline.train.bf16_weights import LONG_NORMS, SHORT
from paceline.train.fsdp_reduction import sums_along_tree
from paceline.train.precision import casts_weights
from paceline.train.shard_mesh import make_shard_mesh
from paceline.world.world import World

Wrap = tuple[type[nn.Module], ...]


def shard(model: nn.Module, world: World, config: RunConfig, wrap: Wrap | None) -> nn.Module:
    """Cut a model into slices, unit by unit, in place."""
    units = list(units_of(model, wrap))
    _refuse_shared_weights(model, units)
    mesh = make_shard_mesh(model, world, config).mesh(
        world.device, summed_here=sums_along_tree(world, config)
    )
    short, long = (SHORT, torch.float32) if casts_weights(config, world.size) else (None, None)
    casts = (
        config.precision != "bf16-master"
    )  # there, inputs are as they are in a model that is not cut
    for norm in (module for module in model.modules() if short and isinstance(module, LONG_NORMS)):
        fully_shard(norm, mesh=mesh, mp_policy=MixedPrecisionPolicy(long, long, output_dtype=short))
    for unit in reversed(
        [unit for unit in units if not isinstance(unit, FSDPModule)]
    ):  # inner ones first
        fully_shard(
            unit, mesh=mesh, mp_policy=MixedPrecisionPolicy(short, long, cast_forward_inputs=casts)
        )
    # What goes to the loss is long: it is no place for short numbers.
    fully_shard(model, mesh=mesh, mp_policy=MixedPrecisionPolicy(short, long, output_dtype=long))
    return model.to(world.device)


def units_of(model: nn.Module, wrap: Wrap | None) -> Iterator[nn.Module]:
    """Yield the modules that are gathered as a whole, outer ones first: those of the classes in `wrap`.

    Without it they are the members of every ModuleList, as a stack of layers is one.
    """
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    members = {
        child
        for layers in lists
        for child in layers
        if not isinstance(child, nn.ModuleList | nn.ModuleDict)
    }
    found = [
        module
        for module in model.modules()
        if module is not model and (module in members if wrap is None else isinstance(module, wrap))
    ]
    if wrap and not found:
        raise ConfigError(
            f"the model has no module of {', '.join(kind.__name__ for kind in wrap)}",
            fix="name in wrap= the class of its layers, or leave wrap= out",
        )
    yield from (module for module in found if any(True for _ in module.parameters()))


def settle(model: nn.Module) -> nn.Module:
    """Let a model have its slices as parameters again, wherever a forward without backward has left whole ones."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    return model


def _refuse_shared_weights(model: nn.Module, units: list[nn.Module]) -> None:
    """Refuse a weight of two units, which would be cut twice, and weights that cannot be cut."""
    owner = {
        module: unit for unit in units for module in unit.modules()
    }  # the innermost one comes last
    homes: dict[nn.Parameter, nn.Module] = {}
    for name, module in model.named_modules():
        for word, value in module.named_parameters(prefix=name, recurse=False):
            home = owner.get(module, model)
            if homes.setdefault(value, home) is not home:
                raise ConfigError(
                    f"{word} is a weight of two units of parallel=fsdp",
                    fix="give parallelize a wrap= of classes that share none, or set parallel=ddp",
                )
            if not value.dim():
                raise ConfigError(
                    f"{word} is a single number, which parallel=fsdp cannot cut",
                    fix="make it a vector of one, or set parallel=ddp",
                )
