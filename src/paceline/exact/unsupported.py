"""Models and optimizers that cannot train the same bits on any number of ranks: refused by name, with what to use instead."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from types import TracebackType

import torch
from torch import nn
from torch.nn.utils.parametrizations import _SpectralNorm
from torch.nn.utils.spectral_norm import SpectralNorm

from paceline.config import RunConfig
from paceline.errors import ConfigError
from paceline.scale.batch import StepPlan


def refuse_modules(model: nn.Module, config: RunConfig) -> None:
    """Raise for modules whose result depends on the ranks, and for those that the settings exclude."""
    for path, module in model.named_modules():
        name = path or "the model"
        if isinstance(module, nn.SyncBatchNorm):
            raise ConfigError(
                f"{name} is a SyncBatchNorm, whose statistics depend on the number of ranks",
                fix="use BatchNorm, whose running statistics are averaged over all lanes in every world, or GroupNorm; "
                "do not call nn.SyncBatchNorm.convert_sync_batchnorm",
            )
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
            raise ConfigError(
                f"{name} is an {type(module).__name__} with sparse=True, and sparse gradients cannot be added along the tree",
                fix="remove sparse=True, and use an optimizer for dense gradients, such as Adagrad or AdamW",
            )
        if (
            config.batch.lanes > 1
            and isinstance(module, nn.Embedding | nn.EmbeddingBag)
            and module.max_norm is not None
        ):
            raise ConfigError(
                f"{name} is an {type(module).__name__} with max_norm={module.max_norm:g}: forward shrinks the rows that a lane "
                "looks up, so the weights of a rank depend on its lanes",
                fix="remove max_norm=, and shrink all rows after run.update: "
                f"with torch.no_grad(): {path + '.' if path else ''}weight.renorm_({module.norm_type:g}, 0, {module.max_norm:g}); "
                "or set batch.lanes=1 to train on one rank",
            )
        if config.precision == "bf16-master" and _is_spectral(module):
            raise ConfigError(
                f"precision=bf16-master does not support the spectral norm of {name}, whose vectors are fp32",
                fix="set precision=bf16",
            )


def _is_spectral(module: nn.Module) -> bool:
    hooks = module._forward_pre_hooks.values()  # noqa: SLF001 - torch has no public list of them
    kinds = (_SpectralNorm, SpectralNorm)
    return isinstance(module, kinds) or any(isinstance(hook, kinds) for hook in hooks)


def refuse_closures(optimizer: torch.optim.Optimizer) -> None:
    """Raise for optimizers that compute the loss again in their step, and for those of sparse gradients."""
    parameters = inspect.signature(optimizer.step).parameters
    if "closure" in parameters and parameters["closure"].default is inspect.Parameter.empty:
        raise ConfigError(
            f"{type(optimizer).__name__}.step needs a closure, which computes the loss several times per update",
            fix="use an optimizer whose step() needs none, such as AdamW, SGD with momentum, or Muon",
        )
    if isinstance(optimizer, torch.optim.SparseAdam):
        raise ConfigError(
            "SparseAdam needs sparse gradients, and these cannot be added along the tree",
            fix="use torch.optim.Adam or Adagrad, and embeddings without sparse=True",
        )


def refuse_hooks(model: nn.Module, config: RunConfig) -> None:
    """Raise for hooks of parameters that would see other gradients on another number of ranks."""
    for name, value in model.named_parameters():
        if config.parallel == "fsdp" and value._backward_hooks:  # noqa: SLF001 - torch has no public list
            raise ConfigError(
                f"{name} has a gradient hook, which parallel=fsdp does not call",
                fix="set parallel=ddp; or call run.backward, change the gradients, and then call optimizer.step()",
            )
        if config.batch.lanes > 1 and value._post_accumulate_grad_hooks:  # noqa: SLF001
            raise ConfigError(
                f"{name} has a post-accumulate-grad hook, which would see the sum of other lanes on another number of ranks",
                fix=f"use {name}.register_hook(...), which sees the gradient of one lane; or call run.backward, change "
                "the gradients of all lanes, and then call optimizer.step()",
            )


_TOO_FEW = "Expected more than 1 value per channel when training"


def refuse_lonely_sample(
    error: ValueError, models: Sequence[nn.Module], plan: StepPlan, lanes: int
) -> None:
    """Name the BatchNorm that got a single value per channel, if this is why forward failed."""
    if not str(error).startswith(_TOO_FEW):
        return
    raise ConfigError(
        f"{_module_of(error.__traceback__, models)} got one sample in step {plan.index + 1}, and BatchNorm needs two: "
        f"the step has {plan.samples} samples in {lanes} lanes",
        fix=f"set batch.lanes to {max(1, plan.samples // 2)} or less, choose a batch.global_size that leaves no short "
        "step at the end of an epoch, or use GroupNorm or LayerNorm",
    ) from error


def _module_of(trace: TracebackType | None, models: Sequence[nn.Module]) -> str:
    """Return the name of the innermost module that raised."""
    names = {module: name for model in models for name, module in model.named_modules()}
    found = "a BatchNorm"
    while trace is not None:
        module = trace.tb_frame.f_locals.get("self")
        if isinstance(module, nn.Module) and names.get(module):
            found = f"{names[module]} ({type(module).__name__})"
        trace = trace.tb_next
    return found
