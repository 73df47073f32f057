"""The candidates for the loss, for GELU and for the output layer."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from parts import fast_gelu, fp8_head, fp8_tensors, one_pass_loss
from parts.measuring import Candidate, Part, Step
from parts.shapes import Sizes
from torch import Tensor
from torch.nn import functional

from paceline.recipes import loss_kernel

_CHECKED_ROWS = 1024
_OVER_LOGITS = [
    "2048, 4 warps, 2 rows per SM",
    "2048, 4 warps, 3 rows per SM",
    "8192, 16 warps, 2 rows per SM",
]


def _fixed(step: Step) -> Callable[[], Step]:
    return lambda: step


def loss_parts(sizes: Sizes) -> list[Part]:
    """Return the loss with the gradient of the logits."""
    logits = sizes.random(sizes.rows, sizes.vocab_size, std=3.0).requires_grad_()
    original = logits.detach().clone()
    targets = sizes.targets()

    def restore() -> None:
        logits.detach().copy_(original)

    def step(function: Callable[[Tensor, Tensor], Tensor]) -> Callable[[], Step]:
        def run() -> Sequence[Tensor]:
            loss = function(logits, targets)
            return loss, *torch.autograd.grad(loss, logits)

        return _fixed(run)

    def one_pass(choice: one_pass_loss.Choice, *, over: bool) -> Callable[[Tensor, Tensor], Tensor]:
        return lambda x, y: one_pass_loss.mean_loss(x, y, choice, over_logits=over)

    candidates = [Candidate("today: two kernels", step(loss_kernel.mean_loss))]
    for name, choice in one_pass_loss.CHOICES.items():
        candidates.append(Candidate(name, step(one_pass(choice, over=False))))
    for name in _OVER_LOGITS:
        choice = one_pass_loss.CHOICES[name]
        # Every timed step but the first finds gradients instead of logits: the same work.
        candidates.append(
            Candidate(f"over the logits, {name}", step(one_pass(choice, over=True)), restore)
        )
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
        Candidate("today: torch.compile", lambda: step(torch.compile(plain))),
        Candidate("eager", lambda: step(plain)),
        Candidate("tanh instruction", lambda: step(fast_gelu.gelu)),
    ]
    return [Part("GELU", candidates, expected)]


def _hidden_and_weight(sizes: Sizes) -> tuple[Tensor, Tensor]:
    weight = sizes.random(sizes.vocab_size, sizes.width, std=0.05)
    return sizes.random(sizes.rows, sizes.width).requires_grad_(), weight.requires_grad_()


def head_parts(sizes: Sizes) -> list[Part]:
    """Return the output layer with the loss."""
    hidden, weight = _hidden_and_weight(sizes)
    targets = sizes.targets()
    bound = 1 / sizes.rows
    choice = one_pass_loss.CHOICES["2048, 4 warps, 2 rows per SM"]

    def step(function: Callable[[Tensor, Tensor], Tensor]) -> Callable[[], Step]:
        def run() -> Sequence[Tensor]:
            loss = function(hidden, weight)
            return loss, *torch.autograd.grad(loss, (hidden, weight))

        return _fixed(run)

    def then_loss(function: Callable[[Tensor, Tensor], Tensor]) -> Callable[[], Step]:
        return step(
            lambda x, w: one_pass_loss.mean_loss(function(x, w), targets, choice, over_logits=True)
        )

    def head(**options: object) -> Callable[[Tensor, Tensor], Tensor]:
        return lambda x, w: fp8_head.head(x, w, **options)

    part = Part(
        "output layer and loss",
        [
            Candidate(
                "today: bf16, two kernels",
                step(lambda x, w: loss_kernel.mean_loss(functional.linear(x, w), targets)),
            ),
            Candidate("bf16, loss in one kernel", then_loss(functional.linear)),
            Candidate("fp8, dW in bf16", then_loss(head(bound=bound, weight_gradient="bf16"))),
            Candidate("fp8, dW in fp8", then_loss(head(bound=bound))),
            Candidate("fp8, dW in fp8, scale from maximum", then_loss(head())),
            Candidate("fp8, loss inside", step(lambda x, w: fp8_head.head_loss(x, w, targets))),
            Candidate(
                "fp8, loss inside, 2 rows per SM",
                step(lambda x, w: fp8_head.head_loss(x, w, targets, choice)),
            ),
        ],
    )
    return [part]


def product_parts(sizes: Sizes) -> list[Part]:
    """Return the three products of the output layer, alone."""
    hidden, weight = (value.detach() for value in _hidden_and_weight(sizes))
    above = sizes.random(sizes.rows, sizes.vocab_size, std=1e-3)
    large = torch.full((), 0.01, device=sizes.device)
    x = fp8_tensors.quantized(hidden, fp8_head.E4M3, fp8_tensors.largest_of(hidden), both=True)
    w = fp8_tensors.quantized(weight, fp8_head.E4M3, fp8_tensors.largest_of(weight), both=True)
    g = fp8_tensors.quantized(above, fp8_head.E5M2, large, both=True)
    assert x.transposed is not None
    assert w.transposed is not None
    assert g.transposed is not None
    products = {
        "logits": (lambda: hidden @ weight.t(), x.values, w.values, x.inverse, w.inverse),
        "dX": (lambda: above @ weight, g.values, w.transposed, g.inverse, w.inverse),
        "dW": (lambda: above.t() @ hidden, g.transposed, x.transposed, g.inverse, x.inverse),
    }

    def fp8(name: str, *, fast: bool) -> Callable[[], Step]:
        _, left, right, left_scale, right_scale = products[name]
        return _fixed(lambda: [fp8_head.product(left, right, left_scale, right_scale, fast=fast)])

    def bf16(name: str) -> Callable[[], Step]:
        return _fixed(lambda: [products[name][0]()])

    return [
        Part(
            f"product: {name}",
            [
                Candidate("today: bf16", bf16(name)),
                Candidate("fp8, fast accumulation", fp8(name, fast=True)),
                Candidate("fp8", fp8(name, fast=False)),
            ],
        )
        for name in products
    ]


def conversion_parts(sizes: Sizes) -> list[Part]:
    """Return what it costs to have the gradient of the logits in fp8, and in both orders."""
    above = sizes.random(sizes.rows, sizes.vocab_size, std=1e-3)
    bound = torch.full((), 0.01, device=sizes.device)
    scale = fp8_tensors.scale_for(bound, fp8_head.E5M2)
    small = fp8_tensors.quantized(above, fp8_head.E5M2, bound, both=False).values

    def convert(*, both: bool) -> Callable[[], Step]:
        return _fixed(
            lambda: [fp8_tensors.quantized(above, fp8_head.E5M2, bound, both=both).values]
        )

    def transpose_by_torch() -> Sequence[Tensor]:
        return [small.view(torch.uint8).t().contiguous()]

    return [
        Part(
            "gradient to fp8",
            [
                Candidate("torch, eager", _fixed(lambda: [(above * scale).to(fp8_head.E5M2)])),
                Candidate("one order", convert(both=False)),
                Candidate("both orders", convert(both=True)),
            ],
        ),
        Part(
            "transpose of fp8",
            [
                Candidate("torch, eager", _fixed(transpose_by_torch)),
                Candidate(
                    "Triton", _fixed(lambda: [fp8_tensors.transposed(small).view(torch.uint8)])
                ),
            ],
        ),
    ]
