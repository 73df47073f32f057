"""The Muon optimizer: orthogonalized momentum for matrices, AdamW for all other parameters."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from paceline.errors import ConfigError

# Newton-Schulz: an odd polynomial that moves singular values below 1 quickly to about 1.
_POLYNOMIAL = (3.4445, -4.7750, 2.0315)
_ITERATIONS = 5
_EPSILON = 1e-7
_UPDATE_RMS = 0.2  # about that of AdamW, so that one learning rate fits both


class Muon(torch.optim.Optimizer):
    """Two update rules by parameter group: `rule="muon"` for matrices, `rule="adamw"` for the others.

    All state is tensors on the device of the parameters, and no step synchronizes with the host,
    so a step can be captured in a CUDA graph, with the same bits. `pieces` is the number of
    matrices that are stacked in one parameter.
    """

    def __init__(
        self,
        groups: Iterable[dict[str, Any]],
        lr: float | Tensor,
        *,
        momentum: float = 0.95,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        rest = {"rule": "adamw", "pieces": 1, "capturable": False}
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
        }
        super().__init__(groups, defaults | rest)
        for group in self.param_groups:
            _check(group)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update all parameters that have gradients."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            parameters = [value for value in group["params"] if value.grad is not None]
            if not parameters:
                continue
            if group["rule"] == "muon":
                self._update_muon(group, parameters)
            else:
                self._update_adamw(group, parameters)
        return loss

    def _update_muon(self, group: dict[str, Any], parameters: list[Tensor]) -> None:
        gradients, beta = [_gradient(value) for value in parameters], group["momentum"]
        momenta = self._state_of("momentum", parameters)
        torch._foreach_lerp_(momenta, gradients, 1 - beta)
        nesterov = torch._foreach_lerp(gradients, momenta, beta)  # noqa: SLF001 - no public way
        rate = _rate(group, parameters[0])
        torch._foreach_mul_(parameters, 1 - rate * group["weight_decay"])
        for indices in _by_shape(parameters):
            rows, columns = parameters[indices[0]].shape
            stacked = torch.stack([nesterov[index] for index in indices])
            pieces = stacked.view(-1, rows // group["pieces"], columns)
            size = rate * (_UPDATE_RMS * max(pieces.shape[1:]) ** 0.5)
            updates = orthogonalize(pieces).to(momenta[0].dtype).reshape(-1, rows, columns)
            updated = [parameters[index] for index in indices]
            torch._foreach_sub_(updated, list((updates * size).unbind(0)))

    def _update_adamw(self, group: dict[str, Any], parameters: list[Tensor]) -> None:
        gradients, (first, second) = [_gradient(value) for value in parameters], group["betas"]
        means = self._state_of("exp_avg", parameters)
        squares = self._state_of("exp_avg_sq", parameters)
        counts = self._state_of("count", parameters, shape=())
        torch._foreach_add_(counts, 1)
        torch._foreach_lerp_(means, gradients, 1 - first)
        torch._foreach_mul_(squares, second)
        torch._foreach_addcmul_(squares, gradients, gradients, 1 - second)
        rate = _rate(group, parameters[0])
        torch._foreach_mul_(parameters, 1 - rate * group["weight_decay"])
        roots = torch._foreach_sqrt(squares)  # noqa: SLF001 - no public way
        torch._foreach_div_(roots, torch._foreach_sqrt(_bias_correction(second, counts)))  # noqa: SLF001
        torch._foreach_add_(roots, group["eps"])
        updates = torch._foreach_div(means, roots)  # noqa: SLF001
        torch._foreach_div_(updates, _bias_correction(first, counts))
        torch._foreach_mul_(updates, rate)
        torch._foreach_sub_(parameters, updates)

    def _state_of(
        self, kind: str, parameters: list[Tensor], shape: tuple[int, ...] | None = None
    ) -> list[Tensor]:
        """Return one state tensor per parameter, initially zeros, of its shape or of `shape`."""
        for value in parameters:
            if kind not in self.state[value]:
                if shape is None:
                    zeros = torch.zeros_like(value)
                else:
                    zeros = torch.zeros(shape, device=value.device)
                self.state[value][kind] = zeros
        return [self.state[value][kind] for value in parameters]


def orthogonalize(matrices: Tensor) -> Tensor:
    """Return approximately the nearest semi-orthogonal matrices: [count, rows, columns].

    Products are computed in bf16 on a GPU, which is accurate enough, and in fp32 on a CPU.

    >>> result = orthogonalize(torch.tensor([[[3.0, 0.0], [0.0, 0.5]]]))
    >>> bool(((result - torch.eye(2)).abs() < 0.35).all())
    True
    """
    first, third, fifth = _POLYNOMIAL
    wide = matrices.shape[1] <= matrices.shape[2]
    result = matrices if wide else matrices.mT  # so that the products have the shorter side
    result = result / result.norm(dim=(1, 2), keepdim=True).clamp(min=_EPSILON)
    result = result.to(torch.bfloat16 if result.is_cuda else torch.float32)
    for _ in range(_ITERATIONS):
        square = result @ result.mT
        factor = torch.baddbmm(square, square, square, beta=third, alpha=fifth)
        result = torch.baddbmm(result, factor, result, beta=first)
    return result if wide else result.mT


def _bias_correction(beta: float, counts: list[Tensor]) -> list[Tensor]:
    """Return 1 - beta ** count for every count."""
    result = list(torch._foreach_pow(beta, counts))  # noqa: SLF001
    torch._foreach_neg_(result)
    torch._foreach_add_(result, 1)
    return result


def _rate(group: dict[str, Any], parameter: Tensor) -> Tensor:
    """Return the learning rate as a tensor, so that a number and a tensor give the same bits."""
    rate = group["lr"]
    if isinstance(rate, Tensor):
        return rate.to(parameter.device, torch.float32)
    return torch.full((), rate, dtype=torch.float32, device=parameter.device)


def _gradient(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


def _by_shape(parameters: list[Tensor]) -> list[list[int]]:
    """Return the indices of parameters, grouped by shape."""
    groups: dict[torch.Size, list[int]] = defaultdict(list)
    for index, value in enumerate(parameters):
        groups[value.shape].append(index)
    return list(groups.values())


def _check(group: dict[str, Any]) -> None:
    from torch.distributed.tensor import DTensor  # slow to import, and rarely needed

    if group["rule"] not in {"muon", "adamw"}:
        raise ConfigError(f"there is no rule {group['rule']!r}", fix="use one of: adamw, muon")
    for value in group["params"] if group["rule"] == "muon" else ():
        if isinstance(value, DTensor):
            raise ConfigError(
                "Muon does not support sharded matrices",
                fix="set optimizer=adamw or parallel=ddp",
            )
        if value.dim() != 2 or value.shape[0] % group["pieces"]:
            raise ConfigError(
                f"Muon needs a matrix of {group['pieces']} equal pieces, got shape {list(value.shape)}",
                fix='set rule="adamw" for it',
            )
