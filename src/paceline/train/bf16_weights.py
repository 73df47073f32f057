"""How a model computes in bf16 throughout, while its parameters stay the fp32 masters that the optimizer moves.

During a step every module finds, where its parameter was, a bf16 copy: rounded from the master once a step, in memory that
is kept. Its gradient goes on to the master as fp32. So lanes are added in fp32, and names, optimizers, checkpoints, DDP
and captured graphs know of masters alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from paceline.errors import ConfigError

SHORT = torch.bfloat16
LONG_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
"""Their statistics are fp32, and so are their weights and all they compute."""


class Bf16Weights:
    """The bf16 copies of a model's weights. They are one for a model, whoever asks."""

    def __init__(self, model: nn.Module) -> None:
        self._places = list(_places(model))
        self._masters: list[Tensor] = list(dict.fromkeys(master for _, _, master in self._places))
        self._copies = [
            torch.empty_like(master, dtype=SHORT, requires_grad=False) for master in self._masters
        ]
        self._active = False
        model.register_forward_pre_hook(self, with_kwargs=True)
        model.register_forward_hook(self._lengthen)
        for norm in (module for module in model.modules() if isinstance(module, LONG_NORMS)):
            norm.register_forward_pre_hook(self._lengthen_inputs)
            norm.register_forward_hook(self._shorten)

    @classmethod
    def of(cls, model: nn.Module) -> Bf16Weights:
        """Return a model's copies."""
        hooks = model._forward_pre_hooks.values()  # noqa: SLF001 - where they live: on the model itself
        return next((hook for hook in hooks if isinstance(hook, cls)), None) or cls(model)

    def begin(self) -> None:
        """Round the masters, and let modules find the copies in their place."""
        self._active = True
        with torch.no_grad():
            torch._foreach_copy_(self._copies, self._masters)
        pairs = zip(self._masters, self._copies, strict=True)
        found = {master: _Short.apply(master, copy) for master, copy in pairs}  # type: ignore[no-untyped-call]
        for module, name, master in self._places:
            vars(module)[name] = found[master]  # an attribute hides the parameter of its name

    def finish(self) -> None:
        """Let modules find their parameters again."""
        self._active = False
        for module, name, _ in self._places:
            vars(module).pop(name, None)

    def __call__(self, module: nn.Module, inputs: Any, named: Any) -> Any:
        """Shorten what comes into the model."""
        return (_cast(inputs, SHORT), _cast(named, SHORT)) if self._active else None

    def _lengthen(self, module: nn.Module, inputs: Any, output: Any) -> Any:
        """Lengthen what goes to the loss."""
        return _cast(output, torch.float32) if self._active else None

    def _lengthen_inputs(self, module: nn.Module, inputs: Any) -> Any:
        return _cast(inputs, torch.float32) if self._active else None

    def _shorten(self, module: nn.Module, inputs: Any, output: Any) -> Any:
        return _cast(output, SHORT) if self._active else None


class _Short(torch.autograd.Function):
    """A master, as its copy has it; the gradient comes back as fp32."""

    @staticmethod
    def forward(ctx: Any, master: Tensor, copy: Tensor) -> Tensor:  # noqa: ARG004 - the form is torch's
        return copy.view_as(copy)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:  # noqa: ARG004
        return gradients[0].float(), None


def _places(model: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Parameter]]:
    """Yield all weights that are shortened, with the modules that have them and the names they have there."""
    for path, module in model.named_modules():
        if isinstance(module, nn.RNNBase):
            raise ConfigError(
                f"{path or 'the model'} is a {type(module).__name__}, which keeps its weights where precision=bf16-master cannot reach",
                fix="set precision=bf16",
            )
        if not isinstance(module, LONG_NORMS):
            own = module.named_parameters(recurse=False, remove_duplicate=False)
            yield from (
                (module, name, value) for name, value in own if value.dtype == torch.float32
            )


def _cast(values: Any, dtype: torch.dtype) -> Any:
    """Return all tensors of real numbers in a value as those of another width."""
    return tree_map(
        lambda value: (
            value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value
        ),
        values,
    )
