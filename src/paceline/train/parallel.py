"""How a model is spread over ranks. The model itself stays as it was.

No postponed annotations here: DDP looks at the types of a hook's parameters.
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
    """Return the model on this rank's device, spread as `config.parallel` says; a world of one leaves it as it is.

    With parallel=fsdp every module of a class in `wrap` is gathered as a unit, and the rest as another; without `wrap`
    these are the members of every ModuleList.
    """
    if config.parallel == "fsdp" and config.compile:
        _compile_units(model, wrap)
    if shards(world, config):
        from paceline.train.fsdp import shard

        _make_alike(model)
        return shard(model, world, config, wrap)
    model.to(world.device)
    if config.compile and config.parallel != "fsdp":
        from torch._dynamo import config as compiling

        compiling.optimize_ddp = (
            False  # it would cut the model at DDP's buckets, and so change the bits
        )
        model.compile(dynamic=False)  # in place: names of weights stay as they are
    if world.size == 1:
        return model
    if captures(world, config) or config.local_sgd.steps:
        _make_alike(model)
        return model
    if config.exact:
        return TreeDDP(model, config.batch.lanes, world)
    ddp = DistributedDataParallel(model, **DDP_OPTIONS, **_buckets(model, config))
    _compress(ddp, config)
    return ddp


def _make_alike(model: nn.Module) -> None:
    """Let all ranks begin with the weights and buffers of rank 0, as DDP does: they may have drawn others."""
    broadcast_from_main(value for value in (*model.parameters(), *model.buffers()) if value.numel())


def lane_sum(model: nn.Module, world: World, config: RunConfig) -> LaneSum:
    """Return what adds up the lane gradients of a parallelized model."""
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
    """Return whether steps are to become CUDA graphs: then gradients cross the ranks after backward, not during it."""
    return (
        config.capture != "false"
        and world.device != "cpu"
        and config.parallel != "fsdp"
        and not config.local_sgd.steps
    )


def shards(world: World, config: RunConfig) -> bool:
    """Return whether ranks hold slices of the model, and gather a unit when they need it."""
    return config.parallel == "fsdp" and world.size > 1


def inner(model: nn.Module) -> nn.Module:
    """Return the user's own module."""
    return model.module if isinstance(model, DistributedDataParallel) else model


def settled(model: nn.Module) -> nn.Module:
    """Return the user's own module with the parameters that the optimizer knows: under FSDP, the slices."""
    module = inner(model)
    if fsdp := sys.modules.get(
        "paceline.train.fsdp"
    ):  # slow to import, and nothing is in slices before it is
        fsdp.settle(module)
    return module


def _compile_units(model: nn.Module, wrap: tuple[type[nn.Module], ...] | None) -> None:
    """Compile each unit by itself, in any world: a graph that spans two would be other bits, and FSDP would cut it anyway."""
    from paceline.train.fsdp import units_of

    for unit in list(units_of(model, wrap)) or [model]:
        unit.compile(dynamic=False)


def _buckets(model: nn.Module, config: RunConfig) -> dict[str, Any]:
    """Return how large DDP's buckets may be: for PowerSGD as large as the model.

    It sends each message of a bucket when the one before has come; with several buckets the order of these would be
    chance, another on every rank, and gloo aborts.
    """
    size_bytes = sum(value.nbytes for value in model.parameters())
    return {"bucket_cap_mb": 1 + (size_bytes >> 20)} if config.compression == "powersgd" else {}


def _compress(ddp: DistributedDataParallel, config: RunConfig) -> None:
    """Send fewer bytes per gradient."""
    if config.compression == "powersgd":
        ddp.register_comm_hook(
            powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=10), powerSGD_hook.powerSGD_hook
        )
    elif config.compression == "fp16":
        ddp.register_comm_hook(None, default_hooks.fp16_compress_hook)
    elif config.compression == "bf16":
        ddp.register_comm_hook(None, _bf16_hook)


def _bf16_hook(state: object, bucket: GradBucket) -> Future[Tensor]:
    """Average gradients as bf16. Torch's own hook asks for NCCL; gloo takes bf16 as well."""
    small = bucket.buffer().to(torch.bfloat16).div_(dist.get_world_size())
    work: Work = dist.all_reduce(small, async_op=True)
    averaged: Future[Tensor] = work.get_future().then(
        lambda done: bucket.buffer().copy_(done.value()[0])
    )
    return averaged
