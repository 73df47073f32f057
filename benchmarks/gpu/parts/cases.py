"""The candidates for the loss, MLP and output layer of a GPT step."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from parts.measuring import Candidate, Part, Step
from parts.shapes import Sizes
from torch import Tensor, nn
from torch.nn import functional

from paceline.kernels import fp8_head, loss_kernel
from paceline.kernels.linear import Linear, gelu_mlp

_CHECKED_ROWS = 1024


def loss_parts(sizes: Sizes) -> list[Part]:
    """Return the loss with the gradient of the logits."""
    logits = sizes.random(sizes.rows, sizes.vocab_size, std=3.0).requires_grad_()
    targets = sizes.targets()

    def step(function: Callable[[Tensor, Tensor], Tensor]) -> Step:
        def run() -> Sequence[Tensor]:
            loss = function(logits, targets)
            return loss, *torch.autograd.grad(loss, logits)

        return run

    def plain(values: Tensor, wanted: Tensor) -> Tensor:
        return functional.cross_entropy(values.float(), wanted)

    candidates = [
        Candidate("torch.compile", lambda: step(torch.compile(plain))),
        Candidate("ours", lambda: step(loss_kernel.mean_loss)),
    ]
    return [Part("loss", candidates)]


def mlp_parts(sizes: Sizes) -> list[Part]:
    """Return the MLP of a layer, forward and backward."""
    inputs = sizes.random(sizes.rows, sizes.width).requires_grad_()
    above = sizes.random(sizes.rows, sizes.width, std=0.1)
    width, inside = sizes.width, 4 * sizes.width
    up, down = Linear(width, inside, bias=False), Linear(inside, width, bias=False)
    layers = nn.ModuleList([up, down]).to(inputs.device, inputs.dtype)

    def step(function: Callable[[Tensor], Tensor]) -> Step:
        def run() -> Sequence[Tensor]:
            result = function(inputs)
            gradients = torch.autograd.grad(result, [inputs, *layers.parameters()], above)
            return result, gradients[0]  # those of weights are sums over all rows

        return run

    def plain(values: Tensor, *weights: Tensor) -> Tensor:
        first, second = weights or (up.weight, down.weight)
        active = functional.gelu(functional.linear(values, first), approximate="tanh")
        return functional.linear(active, second)

    def expected() -> Sequence[Tensor]:
        few = inputs.detach()[:_CHECKED_ROWS].double().requires_grad_()
        result = plain(few, up.weight.double(), down.weight.double())
        return result.detach(), *torch.autograd.grad(result, few, above[:_CHECKED_ROWS].double())

    candidates = [
        Candidate("torch.compile", lambda: step(torch.compile(plain))),
        Candidate("torch", lambda: step(plain)),
        Candidate("ours", lambda: step(lambda values: gelu_mlp(values, up, down))),
    ]
    return [Part("MLP", candidates, expected)]


def head_parts(sizes: Sizes) -> list[Part]:
    """Return the output layer with the loss."""
    hidden = sizes.random(sizes.rows, sizes.width).requires_grad_()
    weight = sizes.random(sizes.vocab_size, sizes.width, std=0.05).requires_grad_()
    targets = sizes.targets()

    def step(function: Callable[[Tensor, Tensor], Tensor]) -> Step:
        def run() -> Sequence[Tensor]:
            loss = function(hidden, weight)
            return loss, *torch.autograd.grad(loss, (hidden, weight))

        return run

    def bf16(x: Tensor, w: Tensor) -> Tensor:
        return loss_kernel.mean_loss(functional.linear(x, w), targets)

    def fp8(x: Tensor, w: Tensor) -> Tensor:
        return fp8_head.head_loss(x, w, targets)

    candidates = [Candidate("bf16", lambda: step(bf16)), Candidate("fp8", lambda: step(fp8))]
    return [Part("output layer and loss", candidates)]
