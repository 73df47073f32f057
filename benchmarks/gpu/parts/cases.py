"""The candidates for the loss, GELU and output layer of a GPT step."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from parts.measuring import Candidate, Part, Step
from parts.shapes import Sizes
from torch import Tensor
from torch.nn import functional

from paceline.kernels import fp8_head, loss_kernel
from paceline.kernels.gelu import fast_gelu

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


def gelu_parts(sizes: Sizes) -> list[Part]:
    """Return GELU of the MLP, forward and backward."""
    inputs = sizes.random(sizes.rows, 4 * sizes.width).requires_grad_()
    above = sizes.random(sizes.rows, 4 * sizes.width, std=0.1)

    def step(function: Callable[[Tensor], Tensor]) -> Step:
        def run() -> Sequence[Tensor]:
            result = function(inputs)
            return result, *torch.autograd.grad(result, inputs, above)

        return run

    def plain(values: Tensor) -> Tensor:
        return functional.gelu(values, approximate="tanh")

    def expected() -> Sequence[Tensor]:
        few = inputs.detach()[:_CHECKED_ROWS].double().requires_grad_()
        result = plain(few)
        return result.detach(), *torch.autograd.grad(result, few, above[:_CHECKED_ROWS].double())

    candidates = [
        Candidate("torch.compile", lambda: step(torch.compile(plain))),
        Candidate("torch", lambda: step(plain)),
        Candidate("ours", lambda: step(fast_gelu)),
    ]
    return [Part("GELU", candidates, expected)]


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
