"""Muon: matrices move by their momentum with all its directions made equally strong; everything else moves by AdamW."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from paceline.errors import ConfigError

# An odd polynomial of degree five that lifts every singular value below 1 to about 1, small ones as fast as can be.
_POLYNOMIAL = (3.4445, -4.7750, 2.0315)
_ROUNDS = 5
_TINY = 1e-7
_USUAL = 0.2  # about the root mean square of AdamW's updates: so that one learning rate fits both


class Muon(torch.optim.Optimizer):
    """One optimizer with two rules: `rule="muon"` for groups of matrices, `rule="adamw"` for the others.

    All it remembers are tensors beside their parameters, on their device; no number of a step ever comes to the host. So
    steps can be captured, and a captured step has the same bits. `pieces` says of how many matrices, one above the
    other, a parameter consists.
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
        """Change all parameters by their gradients."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            moving = [value for value in group["params"] if value.grad is not None]
            if moving:
                (self._by_muon if group["rule"] == "muon" else self._by_adamw)(group, moving)
        return loss

    def _by_muon(self, group: dict[str, Any], parameters: list[Tensor]) -> None:
        gradients, share = [_gradient(value) for value in parameters], group["momentum"]
        momenta = self._remembered("momentum", parameters)
        torch._foreach_lerp_(momenta, gradients, 1 - share)
        # Nesterov's look at where the momentum will be.
        ahead = torch._foreach_lerp(gradients, momenta, share)  # noqa: SLF001 - no public way
        rate = _rate(group, parameters[0])
        torch._foreach_mul_(parameters, 1 - rate * group["weight_decay"])
        for alike in _by_shape(parameters):
            rows, columns = parameters[alike[0]].shape
            pieces = torch.stack([ahead[place] for place in alike]).view(
                -1, rows // group["pieces"], columns
            )
            size = rate * (_USUAL * max(pieces.shape[1:]) ** 0.5)
            even = orthogonalize(pieces).to(momenta[0].dtype).reshape(-1, rows, columns)
            torch._foreach_sub_(
                [parameters[place] for place in alike], list((even * size).unbind(0))
            )

    def _by_adamw(self, group: dict[str, Any], parameters: list[Tensor]) -> None:
        gradients, (first, second) = [_gradient(value) for value in parameters], group["betas"]
        means, squares = (
            self._remembered("exp_avg", parameters),
            self._remembered("exp_avg_sq", parameters),
        )
        counts = self._remembered("count", parameters, shape=())
        torch._foreach_add_(counts, 1)
        torch._foreach_lerp_(means, gradients, 1 - first)
        torch._foreach_mul_(squares, second)
        torch._foreach_addcmul_(squares, gradients, gradients, 1 - second)
        rate = _rate(group, parameters[0])
        torch._foreach_mul_(parameters, 1 - rate * group["weight_decay"])
        roots = torch._foreach_sqrt(squares)  # noqa: SLF001 - no public way
        torch._foreach_div_(roots, torch._foreach_sqrt(_seen(second, counts)))  # noqa: SLF001
        torch._foreach_add_(roots, group["eps"])
        moves = torch._foreach_div(means, roots)  # noqa: SLF001
        torch._foreach_div_(moves, _seen(first, counts))
        torch._foreach_mul_(moves, rate)
        torch._foreach_sub_(parameters, moves)

    def _remembered(
        self, kind: str, parameters: list[Tensor], shape: tuple[int, ...] | None = None
    ) -> list[Tensor]:
        """Return one kind of memory of every parameter, zeros at first; of a shape of its own, if it has one."""
        for value in parameters:
            if kind not in self.state[value]:
                empty = (
                    torch.zeros_like(value)
                    if shape is None
                    else torch.zeros(shape, device=value.device)
                )
                self.state[value][kind] = empty
        return [self.state[value][kind] for value in parameters]


def orthogonalize(matrices: Tensor) -> Tensor:
    """Return the nearest matrices, roughly, whose singular values are all 1, by five Newton-Schulz iterations: [count, rows, columns].

    On a GPU the products are of bf16, which is all the accuracy this needs; on a CPU they are of fp32.

    >>> found = orthogonalize(torch.tensor([[[3.0, 0.0], [0.0, 0.5]]]))
    >>> bool(((found - torch.eye(2)).abs() < 0.35).all())
    True
    """
    first, third, fifth = _POLYNOMIAL
    wide = matrices.shape[1] <= matrices.shape[2]
    found = matrices if wide else matrices.mT  # the products are of the shorter side
    found = found / found.norm(dim=(1, 2), keepdim=True).clamp(min=_TINY)
    found = found.to(torch.bfloat16 if found.is_cuda else torch.float32)
    for _ in range(_ROUNDS):
        square = found @ found.mT
        found = torch.baddbmm(
            found, torch.baddbmm(square, square, square, beta=third, alpha=fifth), found, beta=first
        )
    return found if wide else found.mT


def _seen(beta: float, counts: list[Tensor]) -> list[Tensor]:
    """Return which share of an average that started at 0 are values that were seen."""
    found = list(torch._foreach_pow(beta, counts))  # noqa: SLF001
    torch._foreach_neg_(found)
    torch._foreach_add_(found, 1)
    return found


def _rate(group: dict[str, Any], parameter: Tensor) -> Tensor:
    """Return the learning rate as a tensor beside the parameters; so the bits are the same whoever keeps it."""
    rate = group["lr"]
    if isinstance(rate, Tensor):
        return rate.to(parameter.device, torch.float32)
    return torch.full((), rate, dtype=torch.float32, device=parameter.device)


def _gradient(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


def _by_shape(parameters: list[Tensor]) -> list[list[int]]:
    """Return the places of parameters that have the same shape, together."""
    found: dict[torch.Size, list[int]] = defaultdict(list)
    for place, value in enumerate(parameters):
        found[value.shape].append(place)
    return list(found.values())


def _check(group: dict[str, Any]) -> None:
    from torch.distributed.tensor import DTensor  # slow to import, and most trainings need it not

    if group["rule"] not in {"muon", "adamw"}:
        raise ConfigError(f"there is no rule {group['rule']!r}", fix="use one of: adamw, muon")
    for value in group["params"] if group["rule"] == "muon" else ():
        if isinstance(value, DTensor):
            raise ConfigError(
                "Muon needs matrices that are whole on every rank",
                fix="set optimizer=adamw or parallel=ddp",
            )
        if value.dim() != 2 or value.shape[0] % group["pieces"]:
            raise ConfigError(
                f"Muon moves matrices, not {list(value.shape)} as {group['pieces']} pieces",
                fix='set rule="adamw" for it',
            )
