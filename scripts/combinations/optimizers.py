"""All optimizers of torch, and some that users have written."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

Make = Callable[[nn.Module], torch.optim.Optimizer]


def made(name: str, **options: Any) -> Make:
    """Return a function that makes an optimizer of torch."""
    return lambda model: getattr(torch.optim, name)(model.parameters(), **options)


OPTIMIZERS: dict[str, Make] = {
    "SGD": made("SGD", lr=0.05, weight_decay=0.1),
    "SGD momentum": made("SGD", lr=0.05, momentum=0.9, dampening=0.1),
    "SGD nesterov": made("SGD", lr=0.05, momentum=0.9, nesterov=True),
    "Adam": made("Adam", lr=0.01),
    "Adam amsgrad": made("Adam", lr=0.01, amsgrad=True),
    "AdamW": made("AdamW", lr=0.01),
    "NAdam": made("NAdam", lr=0.01),
    "RAdam": made("RAdam", lr=0.01),
    "Adamax": made("Adamax", lr=0.01),
    "Adagrad": made("Adagrad", lr=0.01, lr_decay=0.1),
    "Adadelta": made("Adadelta", lr=0.5),
    "RMSprop": made("RMSprop", lr=0.01, momentum=0.5, centered=True),
    "Rprop": made("Rprop", lr=0.01),
    "ASGD": made("ASGD", lr=0.01, t0=2),
    "Adafactor": made("Adafactor", lr=0.01),
    "LBFGS": made("LBFGS", lr=0.1),
}
MUON = made("Muon", lr=0.01)
SPARSE_ADAM = made("SparseAdam", lr=0.01)


class WithStrings(torch.optim.SGD):
    """An optimizer that keeps words beside its tensors."""

    @classmethod
    def over(cls, model: nn.Module) -> WithStrings:
        """Return the optimizer of a model."""
        return cls(model.parameters(), lr=0.05, momentum=0.9)

    def step(self, closure: Any = None) -> Any:
        """Move slowly at first."""
        for group in self.param_groups:
            for value in group["params"]:
                phase = self.state[value].get("phase", "warm-up")
                if phase == "trained" and value.grad is not None:
                    value.grad.mul_(2)
        found = super().step(closure)
        for group in self.param_groups:
            for value in group["params"]:
                self.state[value]["phase"] = "trained"
        return found


class WithLists(torch.optim.SGD):
    """An optimizer that keeps a history of tensors."""

    @classmethod
    def over(cls, model: nn.Module) -> WithLists:
        """Return the optimizer of a model."""
        return cls(model.parameters(), lr=0.05)

    def step(self, closure: Any = None) -> Any:
        """Follow the mean of the last three gradients."""
        for group in self.param_groups:
            for value in group["params"]:
                history = self.state[value].setdefault("history", [])
                history.append(value.grad.clone())
                del history[:-3]
                value.grad.copy_(torch.stack(history).mean(0))
        return super().step(closure)


class Counting(torch.optim.SGD):
    """An optimizer whose options count its steps, as schedule-free optimizers do."""

    @classmethod
    def over(cls, model: nn.Module) -> Counting:
        """Return the optimizer of a model."""
        return cls(model.parameters(), lr=0.05)

    def step(self, closure: Any = None) -> Any:
        """Become slower with every step."""
        for group in self.param_groups:
            group["k"] = group.get("k", 0) + 1
            for value in group["params"]:
                value.grad.div_(group["k"])
        return super().step(closure)


def change_options(_: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    """Change options of a group once, in the middle of the training."""
    if step == 1:
        optimizer.param_groups[0]["weight_decay"] = 0.3
        optimizer.param_groups[0]["betas"] = (0.5, 0.9)


def without_first(model: nn.Module) -> torch.optim.Optimizer:
    """Return an optimizer of all parameters but the first two."""
    return torch.optim.AdamW(list(model.parameters())[2:], lr=0.01)


def add_group(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    """Give the optimizer more parameters in the fourth step."""
    if step == 3:
        optimizer.add_param_group({"params": list(model.parameters())[:2]})
