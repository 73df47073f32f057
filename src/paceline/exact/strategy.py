"""How a training is parallelized: one value, decided once from its settings and its ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Self

import torch
import torch.distributed as dist

from paceline.config import RunConfig
from paceline.world.collectives import wire_device
from paceline.world.world import World


@dataclass(frozen=True)
class Strategy:
    """What model, gradient sum, step, evaluation and observers ask before they do something in one of several ways."""

    shards: bool = False
    """Whether FSDP shards the model over ranks."""
    adds_shards: bool = False
    """Whether we add the gradients of shards: for exact bits, and if the backend cannot send from the GPU."""
    gathers_bf16: bool = False
    """Whether FSDP gathers weights as bf16 and all of forward computes in bf16, instead of autocast.

    That halves the bytes, and is the meaning of bf16-master. With precision=bf16 it gives other bits than a single
    rank, so it needs exact=false.
    """
    compiles: Literal["nothing", "model", "units"] = "nothing"
    """What torch.compile gets. With parallel=fsdp units in any world: a graph over two units has other bits."""
    replicas: int = 0
    """Replicas of local SGD; 0 without it."""
    captures: bool = False
    """Whether to try to capture updates as CUDA graphs."""
    capture_obstacle: str = ""
    """Why these settings cannot be captured; empty if they can."""
    sees_waits: bool = True
    """Whether waiting for other ranks can be measured: FSDP, PowerSGD and NCCL wait inside C++."""

    @classmethod
    def of(cls, world: World, config: RunConfig) -> Self:
        """Decide for these settings. The ranks must have joined."""
        units = config.parallel == "fsdp"
        shards = units and world.size > 1
        compiled: Literal["model", "units"] = "units" if units else "model"
        wants_bf16 = config.precision == "bf16" and not config.exact
        return cls(
            shards=shards,
            adds_shards=shards and (config.exact or _sends_from_host(world)),
            gathers_bf16=shards and (config.precision == "bf16-master" or wants_bf16),
            compiles=compiled if config.compile else "nothing",
            replicas=config.local_sgd.replicas if config.local_sgd.steps else 0,
            captures=config.capture != "false" and world.device != "cpu",
            capture_obstacle=capture_obstacle(config),
            sees_waits=world.size == 1
            or (not units and config.compression != "powersgd" and dist.get_backend() == "gloo"),
        )


def _sends_from_host(world: World) -> bool:
    return wire_device(world).type != torch.device(world.device).type


def capture_obstacle(config: RunConfig) -> str:
    """Return why these settings cannot be captured as a CUDA graph; empty if they can."""
    if config.local_sgd.steps:
        return "local SGD swaps the weights of several replicas"
    if config.parallel == "fsdp":
        return "parallel=fsdp gathers weights during forward and backward"
    return ""
