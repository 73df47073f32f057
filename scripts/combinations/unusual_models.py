"""Models whose parameters, buffers, hooks or forward are not the same in every lane or step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from combinations.models import Blocks
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


class StochasticDepth(Blocks):
    """Skips each block at random, in some lanes only."""

    def forward(self, inputs: Tensor) -> Tensor:
        """Return one number per row."""
        for block in self.blocks:
            if not self.training or float(torch.rand(())) < 0.5:
                inputs = inputs + block(inputs).relu()
        found: Tensor = self.head(inputs)
        return found


class Experts(nn.Module):
    """Each row goes to one of six experts; some get no row of a lane."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(6, 6)
        self.experts = nn.ModuleList(nn.Linear(6, 6) for _ in range(6))
        self.head = nn.Linear(6, 1)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return one number per row."""
        weight, chosen = self.gate(inputs).softmax(-1).max(-1)
        hidden = torch.zeros_like(inputs)
        for number, expert in enumerate(self.experts):
            mine = chosen == number
            if mine.any():
                hidden = hidden.masked_scatter(mine[:, None], expert(inputs[mine]))
        found: Tensor = self.head(hidden * weight[:, None])
        return found


class Heads(nn.Module):
    """Two heads, of which a lane trains the one that its first row chooses, and one that nobody uses."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.never = nn.Linear(6, 6), nn.Linear(6, 1)
        self.heads = nn.ModuleList(nn.Linear(6, 1) for _ in range(2))

    def forward(self, inputs: Tensor) -> Tensor:
        """Return one number per row."""
        found: Tensor = self.heads[int(inputs[0, 0] > 0)](self.body(inputs).relu())
        return found


class SkippedNorm(nn.Module):
    """A block with BatchNorm that half of the lanes skip."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Linear(6, 6, bias=False), nn.BatchNorm1d(6), nn.ReLU())
        self.head = nn.Linear(6, 1)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return one number per row."""
        if float(torch.rand(())) < 0.5:
            inputs = inputs + self.block(inputs)
        found: Tensor = self.head(inputs)
        return found


class Watching(nn.Module):
    """A layer with a buffer that a function moves."""

    def __init__(self, move: Callable[[Any, Tensor], None], start: float, **options: bool) -> None:
        super().__init__()
        self.head, self.move, self.calls = nn.Linear(6, 1), move, 0
        self.register_buffer("seen", torch.full((6,), start), **options)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return one number per row; it depends on the buffer."""
        self.move(self, inputs)
        found: Tensor = self.head(inputs + 0.1 * self.seen.nan_to_num(neginf=0.0))
        return found


def moves_in_some_lanes(model: Any, inputs: Tensor) -> None:
    """Move the buffer if the first number is positive."""
    if model.training and float(inputs[0, 0]) > 0.5:
        model.seen.lerp_(inputs.mean(0), 0.1)


def moves_by_assignment(model: Any, inputs: Tensor) -> None:
    """Replace the buffer by another tensor."""
    if model.training:
        model.seen = 0.9 * model.seen + 0.1 * inputs.mean(0)


def moves_in_evaluation(model: Any, inputs: Tensor) -> None:
    """Move the buffer in evaluation only."""
    if not model.training:
        model.seen += inputs.mean(0)


def keeps_largest(model: Any, inputs: Tensor) -> None:
    """Keep the largest values, from -inf on."""
    if model.training:
        model.seen = torch.maximum(model.seen, inputs.amax(0))


def moves_late(model: Any, inputs: Tensor) -> None:
    """Move the buffer once the weights have moved far enough."""
    if model.training and model.late:
        model.seen += inputs.mean(0)


class LateBuffer(Watching):
    """Its buffer moves from the fourth step on."""

    late = False

    def __init__(self) -> None:
        super().__init__(moves_late, 0.0)


def begin_late(model: Any, _: Any, step: int) -> None:
    """Let the buffer of a LateBuffer move from the fourth step on."""
    model.late = step >= 3


class GrowingBuffer(nn.Module):
    """A queue that gets longer in every forward, which no mean over lanes can describe."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(6, 1)
        self.register_buffer("queue", torch.zeros(1, 6))

    def forward(self, inputs: Tensor) -> Tensor:
        """Return one number per row."""
        if self.training:
            self.queue = torch.cat([self.queue, inputs[:1]])
        found: Tensor = self.head(inputs + self.queue.mean(0))
        return found


class Recomputed(nn.Module):
    """Blocks with dropout whose activations are computed again in backward."""

    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.first, self.head, self.reentrant = nn.Linear(6, 6), nn.Linear(6, 1), reentrant
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.2), nn.ReLU()) for _ in range(2)
        )

    def forward(self, inputs: Tensor) -> Tensor:
        """Return one number per row."""
        hidden = self.first(inputs)
        for block in self.blocks:
            hidden = checkpoint(block, hidden, use_reentrant=self.reentrant)
        found: Tensor = self.head(hidden)
        return found


class RecomputedNorm(nn.Module):
    """BatchNorm in a part that is computed again in backward, so that it sees every lane twice."""

    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.first, self.head, self.reentrant = nn.Linear(6, 6), nn.Linear(6, 1), reentrant
        self.block = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.ReLU())

    def forward(self, inputs: Tensor) -> Tensor:
        """Return one number per row."""
        hidden = checkpoint(self.block, self.first(inputs), use_reentrant=self.reentrant)
        found: Tensor = self.head(hidden)
        return found


class RandomInEvaluation(Blocks):
    """Dropout that is always on, also in evaluation (Monte Carlo dropout)."""

    def forward(self, inputs: Tensor) -> Tensor:
        """Return one number per row."""
        for block in self.blocks:
            inputs = nn.functional.dropout(block(inputs).relu(), 0.3, training=True)
        found: Tensor = self.head(inputs)
        return found


def frozen_norm(model: nn.Module) -> None:
    """Put every BatchNorm into eval mode, as fine-tuning does."""
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.eval()


def freeze_first(model: nn.Module) -> None:
    """Train all but the first parameters."""
    for value in list(model.parameters())[:2]:
        value.requires_grad = False


def unfreeze_late(model: nn.Module, _: Any, step: int) -> None:
    """Train the first parameters, too, from the fourth step on."""
    for value in list(model.parameters())[:2]:
        value.requires_grad_(step >= 3)


def freeze_late(model: nn.Module, _: Any, step: int) -> None:
    """Stop to train the first parameters from the fourth step on."""
    for value in list(model.parameters())[:2]:
        value.requires_grad_(step < 3)


def parameter_hooks(model: nn.Module) -> None:
    """Clamp the gradient of every parameter, per lane."""
    for value in model.parameters():
        value.register_hook(lambda gradient: gradient.clamp(-0.02, 0.02))


def accumulated_hooks(model: nn.Module) -> None:
    """Clamp what has been accumulated."""

    def clamp(value: Tensor) -> None:
        assert value.grad is not None
        value.grad.clamp_(-0.02, 0.02)

    for value in model.parameters():
        value.register_post_accumulate_grad_hook(clamp)


def forward_hooks(model: nn.Module) -> None:
    """Scale the output of every linear layer."""
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.register_forward_hook(lambda _, __, output: 0.9 * output)


def backward_hooks(model: nn.Module) -> None:
    """Clamp the gradient of the input of every linear layer."""

    def clamp(_: Any, gradients: Any, __: Any) -> Any:
        return tuple(None if each is None else each.clamp(-0.01, 0.01) for each in gradients)

    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.register_full_backward_hook(clamp)
