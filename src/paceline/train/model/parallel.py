"""How a model is parallelized in place: moved, compiled, or sharded by FSDP. The model's own code does not change."""

from __future__ import annotations

import sys

from torch import nn

from paceline.config import RunConfig
from paceline.world.collectives import broadcast_from_main
from paceline.world.world import World


def prepare(
    model: nn.Module,
    world: World,
    config: RunConfig,
    wrap: tuple[type[nn.Module], ...] | None = None,
) -> None:
    """Compile, move or shard a model in place; all ranks get the weights and buffers of rank 0.

    With parallel=fsdp every module of a class in `wrap` is a unit, and the rest is another; without `wrap` the units
    are the members of every ModuleList.
    """
    if config.parallel == "fsdp" and config.compile:
        _compile_units(model, wrap)
    if shards(world, config):
        from paceline.train.model.fsdp import shard

        copy_from_main(model)
        shard(model, world, config, wrap)
        return
    model.to(world.device)
    if config.compile and config.parallel != "fsdp":
        model.compile(dynamic=False)  # in place: names of weights do not change
    if world.size > 1:
        copy_from_main(model)


def copy_from_main(model: nn.Module) -> None:
    """Start all ranks with the weights and buffers of rank 0: each may have a different random init."""
    broadcast_from_main(value for value in (*model.parameters(), *model.buffers()) if value.numel())


def shards(world: World, config: RunConfig) -> bool:
    """Return whether the model is sharded over ranks."""
    return config.parallel == "fsdp" and world.size > 1


def settled(model: nn.Module) -> nn.Module:
    """Return the model with the parameters that the optimizer holds: under FSDP, the shards."""
    # Slow to import; while nobody has imported it, nothing is sharded.
    if fsdp := sys.modules.get("paceline.train.model.fsdp"):
        fsdp.settle(model)
    return model


def _compile_units(model: nn.Module, wrap: tuple[type[nn.Module], ...] | None) -> None:
    """Compile each unit alone, in any world: a graph over two units has other bits, and FSDP would split it anyway."""
    from paceline.train.model.fsdp import units_of

    for unit in list(units_of(model, wrap)) or [model]:
        unit.compile(dynamic=False)
