"""How a model is parallelized in place: moved, compiled, or sharded by FSDP. The model's own code does not change."""

from __future__ import annotations

import sys

from torch import nn

from paceline.config import RunConfig
from paceline.exact.strategy import Strategy
from paceline.world.collectives import broadcast_from_main
from paceline.world.world import World


def prepare(
    model: nn.Module,
    world: World,
    config: RunConfig,
    strategy: Strategy,
    wrap: tuple[type[nn.Module], ...] | None = None,
) -> None:
    """Compile, move or shard a model in place; all ranks get the weights and buffers of rank 0.

    With parallel=fsdp every module of a class in `wrap` is a unit, and the rest is another; without `wrap` the units
    are the members of every ModuleList.
    """
    if strategy.compiles == "units":
        _compile_units(model, wrap)
    if strategy.shards:
        from paceline.exact.fsdp import shard

        copy_from_main(model)
        shard(model, world, config, strategy, wrap)
        return
    model.to(world.device)
    if strategy.compiles == "model":
        model.compile(dynamic=False)  # in place: names of weights do not change
    if world.size > 1:
        copy_from_main(model)


def copy_from_main(model: nn.Module) -> None:
    """Start all ranks with the weights and buffers of rank 0: each may have a different random init."""
    broadcast_from_main(value for value in (*model.parameters(), *model.buffers()) if value.numel())


def resharded(model: nn.Module) -> nn.Module:
    """Return the model with the parameters that the optimizer holds: under FSDP, the shards."""
    # Slow to import; while nobody has imported it, nothing is sharded.
    if fsdp := sys.modules.get("paceline.exact.fsdp"):
        fsdp.reshard(model)
    return model


def _compile_units(model: nn.Module, wrap: tuple[type[nn.Module], ...] | None) -> None:
    """Compile each unit alone, as FSDP would split a graph over two of them anyway."""
    from paceline.exact.fsdp import units_of

    for unit in list(units_of(model, wrap)) or [model]:
        unit.compile(dynamic=False)
