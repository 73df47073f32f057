"""Number formats of a step (autocast, bf16 weights), and the gradient scale of fp16."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from paceline.config import RunConfig
from paceline.errors import ConfigError

_AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}
_FIRST_SCALE = 2.0**16
_GROW_AFTER = 2000  # steps without an overflow
_SMALLEST_SCALE = 2.0**-24
_NO_CONTEXT = contextlib.nullcontext()


class Precision:
    """Applies `config.precision` to forward, and to the gradients after backward."""

    def __init__(self, config: RunConfig, device: str, *, gathers_bf16: bool = False) -> None:
        self._device = torch.device(device).type
        casts = not gathers_bf16  # otherwise FSDP does it
        self._dtype = _AUTOCAST.get(config.precision) if casts else None
        self._rounds_weights = config.precision == "bf16-master" and casts
        self._scales = config.precision == "fp16"
        self.scale = _FIRST_SCALE if self._scales else 1.0
        """Factor of all gradients; a power of two, so that nothing is rounded."""
        self._finite_steps = 0

    def context(self) -> contextlib.AbstractContextManager[object]:
        """Return the context (autocast or none) for forward and loss."""
        if self._dtype is None:
            return _NO_CONTEXT
        return torch.autocast(self._device, self._dtype)

    def begin(self, model: nn.Module) -> None:
        """Round the weights if necessary, until `finish`; recomputation in backward uses the same ones."""
        if self._rounds_weights:
            Bf16Weights.of(model).begin()

    def finish(self, model: nn.Module) -> None:
        """Restore the fp32 weights."""
        if self._rounds_weights:
            Bf16Weights.of(model).finish()

    def unscale(self, gradients: list[Tensor]) -> bool:
        """Divide gradients by the scale; return false if one is inf or nan, so that the step must be skipped.

        All ranks have the same gradients, so all get the same answer.
        """
        if not self._scales:
            return True
        torch._foreach_mul_(gradients, 1.0 / self.scale)
        finite = bool(torch.stack([value.isfinite().all() for value in gradients]).all())
        self._finite_steps = self._finite_steps + 1 if finite else 0
        if not finite:
            self.scale = max(self.scale / 2, _SMALLEST_SCALE)
        elif self._finite_steps == _GROW_AFTER:
            self.scale, self._finite_steps = self.scale * 2, 0
        return finite

    def state(self) -> list[float]:
        """Return scale and finite steps for a checkpoint."""
        return [self.scale, float(self._finite_steps)]

    def restore(self, state: list[float]) -> None:
        """Continue from the state in a checkpoint."""
        if self._scales and state:
            self.scale, self._finite_steps = state[0], int(state[1])


# bf16 weights for forward and backward, while the parameters stay fp32 masters for the optimizer.
#
# During a step every module finds a bf16 copy in place of its parameter, rounded from the master once per step into
# memory that is kept. The gradient of the copy reaches the master as fp32. So lanes are added in fp32, and names,
# optimizers, checkpoints, DDP and CUDA graphs only see the masters.


BF16 = torch.bfloat16
FP32_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
"""Their running statistics are fp32, and so are their weights and their arithmetic."""


class Bf16Weights:
    """The bf16 copies of a model's weights; each model has one such object."""

    def __init__(self, model: nn.Module) -> None:
        self._places = list(_places(model))
        self._masters: list[Tensor] = list(dict.fromkeys(master for _, _, master in self._places))
        self._copies = []
        for master in self._masters:
            self._copies.append(torch.empty_like(master, dtype=BF16, requires_grad=False))
        self._active = False
        model.register_forward_pre_hook(self, with_kwargs=True)
        model.register_forward_hook(self._output_to_fp32)
        for module in model.modules():
            if isinstance(module, FP32_NORMS):
                module.register_forward_pre_hook(self._inputs_to_fp32)
                module.register_forward_hook(self._output_to_bf16)

    @classmethod
    def of(cls, model: nn.Module) -> Bf16Weights:
        """Return the copies of a model, made at the first call."""
        hooks = model._forward_pre_hooks.values()  # noqa: SLF001 - the model itself holds its copies
        return next((hook for hook in hooks if isinstance(hook, cls)), None) or cls(model)

    def begin(self) -> None:
        """Round the masters, and replace them by their copies in all modules."""
        self._active = True
        with torch.no_grad():
            torch._foreach_copy_(self._copies, self._masters)
        rounded = {}
        for master, copy in zip(self._masters, self._copies, strict=True):
            rounded[master] = _Rounded.apply(master, copy)  # type: ignore[no-untyped-call]
        for module, name, master in self._places:
            vars(module)[name] = rounded[master]  # an attribute hides the parameter of its name

    def finish(self) -> None:
        """Let modules find their fp32 parameters again."""
        self._active = False
        for module, name, _ in self._places:
            vars(module).pop(name, None)

    def __call__(self, module: nn.Module, inputs: Any, named: Any) -> Any:
        """Convert the model's inputs to bf16."""
        return (_cast(inputs, BF16), _cast(named, BF16)) if self._active else None

    def _output_to_fp32(self, module: nn.Module, inputs: Any, output: Any) -> Any:
        return _cast(output, torch.float32) if self._active else None

    def _inputs_to_fp32(self, module: nn.Module, inputs: Any) -> Any:
        return _cast(inputs, torch.float32) if self._active else None

    def _output_to_bf16(self, module: nn.Module, inputs: Any, output: Any) -> Any:
        return _cast(output, BF16) if self._active else None


class _Rounded(torch.autograd.Function):
    """Replaces a master by its bf16 copy; the gradient returns as fp32."""

    @staticmethod
    def forward(ctx: Any, master: Tensor, copy: Tensor) -> Tensor:  # noqa: ARG004 - torch's signature
        return copy.view_as(copy)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:  # noqa: ARG004
        return gradients[0].float(), None


def _places(model: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Parameter]]:
    """Yield all weights to round, with their module and their name in it."""
    for path, module in model.named_modules():
        if isinstance(module, nn.RNNBase):
            raise ConfigError(
                f"precision=bf16-master does not support {path or 'the model'}, a {type(module).__name__}",
                fix="set precision=bf16",
            )
        if isinstance(module, FP32_NORMS):
            continue
        for name, value in module.named_parameters(recurse=False, remove_duplicate=False):
            if value.dtype == torch.float32:
                yield module, name, value


def _cast(values: Any, dtype: torch.dtype) -> Any:
    """Return a value with all its floating-point tensors converted."""

    def convert(value: Any) -> Any:
        is_float = isinstance(value, Tensor) and value.is_floating_point()
        return value.to(dtype) if is_float else value

    return tree_map(convert, values)
