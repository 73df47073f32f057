"""Linear layers, and the MLP of a transformer, by tuned products of cuBLASLt: in bf16 on a GPU; torch's elsewhere."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from paceline.kernels.cublaslt import Epilogue
from paceline.kernels.products import aligned, multiply

_MIN_ROWS = 1024  # fewer are computed before the fastest algorithm is found
_MULTIPLE = 8  # of both sizes of a weight: 16 bytes
_Optional = Tensor | None


class Linear(nn.Linear):
    """A linear layer whose products are tuned."""

    def forward(self, inputs: Tensor) -> Tensor:
        """Return inputs @ weight.T + bias."""
        return linear(inputs, self.weight, self.bias)


def linear(inputs: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return inputs @ weight.T + bias, as `torch.nn.functional.linear` does.

    >>> linear(torch.ones(2, 3), torch.ones(4, 3)).shape
    torch.Size([2, 4])
    """
    if not _is_tuned(inputs, weight):
        return functional.linear(inputs, weight, bias)
    flat = inputs.to(torch.bfloat16).flatten(0, -2)
    result: Tensor = product(flat, weight.to(torch.bfloat16), _rounded(bias))
    return result.view(*inputs.shape[:-1], -1)


def gelu_mlp(inputs: Tensor, up: nn.Linear, down: nn.Linear) -> Tensor:
    """Return down(GELU(up(inputs))), with the tanh approximation, which takes no pass of its own.

    >>> gelu_mlp(torch.ones(2, 3), Linear(3, 12), Linear(12, 3)).shape
    torch.Size([2, 3])
    """
    is_tuned = _is_tuned(inputs, up.weight, down.weight)
    if not (is_tuned and _is_plain(up) and _is_plain(down)):
        inside: Tensor = functional.gelu(up(inputs), approximate="tanh")
        outside: Tensor = down(inside)
        return outside
    flat = inputs.to(torch.bfloat16).flatten(0, -2)
    first, second = (layer.weight.to(torch.bfloat16) for layer in (up, down))
    result: Tensor = mlp(flat, first, _rounded(up.bias), second, _rounded(down.bias))[0]
    return result.view(*inputs.shape[:-1], -1)


def _is_tuned(inputs: Tensor, *weights: Tensor) -> bool:
    if not inputs.is_cuda:
        return False
    autocast = torch.is_autocast_enabled("cuda")
    dtype = torch.get_autocast_dtype("cuda") if autocast else inputs.dtype
    has_dtype = dtype == torch.bfloat16 and all(autocast or one.dtype == dtype for one in weights)
    rows = inputs.numel() // inputs.shape[-1]
    has_sizes = all(size % _MULTIPLE == 0 for one in weights for size in one.shape)
    return has_dtype and has_sizes and rows >= _MIN_ROWS


def _is_plain(layer: nn.Module) -> bool:
    """Return whether calling a layer does nothing but multiply and add."""
    names = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return type(layer) is Linear and not any(getattr(layer, name) for name in names)


def _rounded(bias: Tensor | None) -> Tensor | None:
    return None if bias is None else bias.to(torch.bfloat16)


# Operators that torch.compile keeps in its graph. Gradients of weights are torch's products: they are sums over many rows,
# whose algorithms differ in their bits.


@torch.library.custom_op("paceline::linear", mutates_args=())
def product(inputs: Tensor, weight: Tensor, bias: _Optional) -> Tensor:
    """Return inputs @ weight.T + bias."""
    epilogue = Epilogue.NONE if bias is None else Epilogue.BIAS
    found = multiply(inputs, weight, transposed=True, epilogue=epilogue, bias=bias)
    return functional.linear(inputs, weight, bias) if found is None else found


@product.register_fake
def _(inputs: Tensor, weight: Tensor, bias: _Optional) -> Tensor:
    return inputs.new_empty(inputs.shape[0], weight.shape[0])


@torch.library.custom_op("paceline::linear_backward", mutates_args=())
def input_gradient(grad: Tensor, weight: Tensor) -> Tensor:
    """Return grad @ weight."""
    found = multiply(grad, weight, transposed=False)
    return grad @ weight if found is None else found


@input_gradient.register_fake
def _(grad: Tensor, weight: Tensor) -> Tensor:
    return grad.new_empty(grad.shape[0], weight.shape[1])


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(inputs[0], inputs[1])


def _gradients(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    inputs, weight = ctx.saved_tensors
    needs = ctx.needs_input_grad
    return (
        input_gradient(grad, weight) if needs[0] else None,
        grad.t() @ inputs if needs[1] else None,
        grad.sum(0) if needs[2] else None,
    )


product.register_autograd(_gradients, setup_context=_save)


@torch.library.custom_op("paceline::gelu_mlp", mutates_args=())
def mlp(
    inputs: Tensor, up: Tensor, up_bias: _Optional, down: Tensor, down_bias: _Optional
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the output of an MLP, and its hidden layer after and before GELU."""
    before = inputs.new_empty(inputs.shape[0], up.shape[0])
    epilogue = Epilogue.GELU if up_bias is None else Epilogue.GELU_BIAS
    after = multiply(inputs, up, transposed=True, epilogue=epilogue, bias=up_bias, aux=before)
    if after is None:
        before = functional.linear(inputs, up, up_bias)
        after = functional.gelu(before, approximate="tanh")
    return product(after, down, down_bias), after, before


@mlp.register_fake
def _(
    inputs: Tensor, up: Tensor, up_bias: _Optional, down: Tensor, down_bias: _Optional
) -> tuple[Tensor, Tensor, Tensor]:
    rows, hidden = inputs.shape[0], up.shape[0]
    inside = inputs.new_empty(rows, hidden), inputs.new_empty(rows, hidden)
    return inputs.new_empty(rows, down.shape[0]), *inside


@torch.library.custom_op("paceline::gelu_mlp_backward", mutates_args=())
def hidden_gradient(grad: Tensor, down: Tensor, before: Tensor) -> Tensor:
    """Return the gradient of the hidden layer before GELU."""
    epilogue = Epilogue.GELU_GRADIENT
    found = multiply(grad, down, transposed=False, epilogue=epilogue, aux=aligned(before))
    if found is not None:
        return found
    plain: Tensor = torch.ops.aten.gelu_backward(grad @ down, before, approximate="tanh")
    return plain


@hidden_gradient.register_fake
def _(grad: Tensor, down: Tensor, before: Tensor) -> Tensor:
    return before.new_empty(before.shape)


def _save_mlp(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    ctx.set_materialize_grads(False)
    given, up, _, down, _ = inputs
    ctx.save_for_backward(given, up, down, *output[1:])


def _mlp_gradients(ctx: Any, grad: Tensor | None, *_: Tensor | None) -> tuple[Tensor | None, ...]:
    if grad is None:
        return (None,) * 5
    inputs, up, down, after, before = ctx.saved_tensors
    hidden, needs = hidden_gradient(grad, down, before), ctx.needs_input_grad
    return (
        input_gradient(hidden, up) if needs[0] else None,
        hidden.t() @ inputs if needs[1] else None,
        hidden.sum(0) if needs[2] else None,
        grad.t() @ after if needs[3] else None,
        grad.sum(0) if needs[4] else None,
    )


mlp.register_autograd(_mlp_gradients, setup_context=_save_mlp)
