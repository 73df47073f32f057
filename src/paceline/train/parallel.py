"""How a model is parallelized (DDP, FSDP, local SGD). The model's own code does not change.

No postponed annotations here: DDP checks the types of a hook's parameters.
"""

import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket, Work
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from paceline.config import RunConfig
from paceline.train.ddp_reduction import DDP_OPTIONS, TreeDDP
from paceline.train.lane_sum import FreeSum, LaneSum, LocalTree
from paceline.train.reduce_after_backward import ReduceAfterBackward
from paceline.world.collectives import broadcast_from_main
from paceline.world.world import World


def parallelize(
    model: nn.Module,
    world: World,
    config: RunConfig,
    wrap: tuple[type[nn.Module], ...] | None = None,
) -> nn.Module:
    """Return the model on this rank's device, parallelized by `config.parallel`; in a world of one it is unchanged.

    With parallel=fsdp every module of a class in `wrap` is a unit, and the rest is another; without `wrap` the units
    are the members of every ModuleList.
    """
    uses_ddp = not captures(world, config) and not config.local_sgd.steps
    prepare(model, world, config, wrap, copies=not uses_ddp)
    if world.size == 1 or not uses_ddp or shards(world, config):
        return model
    if config.exact:
        return TreeDDP(model, config.batch.lanes, world)
    ddp = DistributedDataParallel(model, **DDP_OPTIONS, **_buckets(model, config))
    _compress(ddp, config)
    return ddp


def prepare(
    model: nn.Module,
    world: World,
    config: RunConfig,
    wrap: tuple[type[nn.Module], ...] | None = None,
    *,
    copies: bool = True,
) -> None:
    """Compile, move or shard a model in place; with `copies`, all ranks get the weights and buffers of rank 0."""
    if config.parallel == "fsdp" and config.compile:
        _compile_units(model, wrap)
    if shards(world, config):
        from paceline.train.fsdp import shard

        copy_from_main(model)
        shard(model, world, config, wrap)
        return
    model.to(world.device)
    if config.compile and config.parallel != "fsdp":
        from torch._dynamo import config as compiling

        # It would split the model at DDP's buckets, which changes the bits.
        compiling.optimize_ddp = False
        model.compile(dynamic=False)  # in place: names of weights do not change
    if world.size > 1 and copies:
        copy_from_main(model)


def copy_from_main(model: nn.Module) -> None:
    """Start all ranks with the weights and buffers of rank 0, as DDP does: each may have a different random init."""
    broadcast_from_main(value for value in (*model.parameters(), *model.buffers()) if value.numel())


def lane_sum(model: nn.Module, world: World, config: RunConfig) -> LaneSum:
    """Return the object that adds the lane gradients of a parallelized model."""
    if isinstance(model, TreeDDP):
        return model.reduction
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if shards(world, config):
        from paceline.train.fsdp_reduction import ShardedFree, ShardedTree, sums_along_tree

        kind = ShardedTree if sums_along_tree(world, config) else ShardedFree
        return kind(model, trainable, config.batch.lanes, world)
    if config.local_sgd.steps:
        return LocalTree(trainable, config.batch.lanes // config.local_sgd.replicas)
    if world.size > 1 and captures(world, config):
        return ReduceAfterBackward(trainable, config.batch.lanes, world)
    return LocalTree(trainable, config.batch.lanes) if config.exact else FreeSum(trainable, world)


def captures(world: World, config: RunConfig) -> bool:
    """Return whether to use CUDA graphs: then gradients are reduced after backward, not during it."""
    return (
        config.capture != "false"
        and world.device != "cpu"
        and config.parallel != "fsdp"
        and not config.local_sgd.steps
    )


def shards(world: World, config: RunConfig) -> bool:
    """Return whether the model is sharded over ranks."""
    return config.parallel == "fsdp" and world.size > 1


def inner(model: nn.Module) -> nn.Module:
    """Return the user's module, without DDP around it."""
    return model.module if isinstance(model, DistributedDataParallel) else model


def settled(model: nn.Module) -> nn.Module:
    """Return the user's module with the parameters that the optimizer holds: under FSDP, the shards."""
    module = inner(model)
    # Slow to import; while nobody has imported it, nothing is sharded.
    if fsdp := sys.modules.get("paceline.train.fsdp"):
        fsdp.settle(module)
    return module


def _compile_units(model: nn.Module, wrap: tuple[type[nn.Module], ...] | None) -> None:
    """Compile each unit alone, in any world: a graph over two units has other bits, and FSDP would split it anyway."""
    from paceline.train.fsdp import units_of

    for unit in list(units_of(model, wrap)) or [model]:
        unit.compile(dynamic=False)


def _buckets(model: nn.Module, config: RunConfig) -> dict[str, Any]:
    """Return DDP's bucket size: for PowerSGD as large as the model.

    PowerSGD sends each message of a bucket after the previous one has arrived. With several buckets the order of
    messages would differ between ranks, and gloo aborts.
    """
    if config.compression != "powersgd":
        return {}
    size_bytes = sum(value.nbytes for value in model.parameters())
    return {"bucket_cap_mb": 1 + (size_bytes >> 20)}


def _compress(ddp: DistributedDataParallel, config: RunConfig) -> None:
    """Register the communication hook for `config.compression`."""
    if config.compression == "powersgd":
        state = powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=10)
        ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    elif config.compression == "fp16":
        ddp.register_comm_hook(None, default_hooks.fp16_compress_hook)
    elif config.compression == "bf16":
        ddp.register_comm_hook(None, _bf16_hook)


def _bf16_hook(state: object, bucket: GradBucket) -> Future[Tensor]:
    """Average gradients as bf16. Torch's own hook requires NCCL, but gloo supports bf16, too."""
    small = bucket.buffer().to(torch.bfloat16).div_(dist.get_world_size())
    work: Work = dist.all_reduce(small, async_op=True)
    averaged: Future[Tensor] = work.get_future().then(
        lambda done: bucket.buffer().copy_(done.value()[0])
    )
    return averaged
