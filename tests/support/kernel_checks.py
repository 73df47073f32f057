"""Checks of the Triton kernels of `paceline.kernels`, in Triton's interpreter, on a CPU.

Run as a program, with TRITON_INTERPRET=1 set before Triton is imported; prints a JSON object: what each check raised.
"""

from __future__ import annotations

import json
import sys
import traceback

import torch

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def relative(found, expected) -> float:
    """Return the norm of the difference over that of the expected values."""
    gap = (found.double() - expected.double()).norm()
    return (gap / expected.double().norm()).item()


def with_gradients(function, inputs, above=None):
    result = function(*inputs)
    return result, *torch.autograd.grad(result, inputs, above)


def loss_is_that_of_torch() -> None:
    from paceline.kernels import loss_kernel

    targets = torch.randint(2100, (3,))
    for dtype, limit in ((torch.float32, 1e-6), (torch.bfloat16, 0.01)):
        logits = (3 * torch.randn(3, 2100)).to(dtype).requires_grad_()
        above = torch.tensor(0.3)
        found = with_gradients(lambda x: loss_kernel.mean_loss(x, targets), [logits], above)
        exact = with_gradients(
            lambda x: torch.nn.functional.cross_entropy(x, targets),
            [logits.detach().double().requires_grad_()],
            above,
        )
        assert max(relative(a, b) for a, b in zip(found, exact, strict=True)) < limit


def formula(query, key, value):
    length, head_dim = query.shape[-2:]
    hidden = torch.ones(length, length, dtype=torch.bool).triu(1)
    scores = (query @ key.transpose(-1, -2) / head_dim**0.5).masked_fill(hidden, -torch.inf)
    logs = scores.logsumexp(-1)
    return (scores - logs[..., None]).exp() @ value, logs


def attention_errors(batch: int, length: int, heads: int, head_dim: int, dtype) -> list[float]:
    """Return the errors of output, dQ, dK and dV; run twice and compare the bits."""
    from paceline.kernels.attention import attend, parts_of

    qkv = torch.randn(batch, length, 3, heads, head_dim).to(dtype).requires_grad_()
    above = torch.randn(batch, length, heads, head_dim).to(dtype)
    out, gradient = with_gradients(lambda x: attend(x)[0], [qkv], above)
    again = with_gradients(lambda x: attend(x)[0], [qkv], above)
    assert torch.equal(out, again[0])
    assert torch.equal(gradient, again[1])
    assert gradient.is_contiguous()
    exact = with_gradients(
        lambda x: formula(*parts_of(x))[0].transpose(1, 2),
        [qkv.detach().double().requires_grad_()],
        above.double(),
    )
    pairs = [(out, exact[0]), *zip(gradient.unbind(2), exact[1].unbind(2), strict=True)]
    return [relative(found, expected) for found, expected in pairs]


def cut_small() -> None:
    """Let the kernels have several blocks of a short sequence, of other sizes in each kernel."""
    from paceline.kernels import attention_backward, attention_forward
    from paceline.kernels.attention_forward import Blocks

    attention_forward.FORWARD |= {64: Blocks(32, 16, 4, 1), 128: Blocks(16, 32, 4, 1)}
    attention_backward.QUERIES |= {64: Blocks(16, 32, 4, 1), 128: Blocks(32, 16, 4, 1)}
    attention_backward.KEYS |= {64: Blocks(32, 16, 4, 1), 128: Blocks(16, 32, 4, 1)}


def attention_in_blocks_of_the_gpu() -> None:
    assert max(attention_errors(1, 130, 1, 64, torch.float32)) < 1e-6


def attention_of_odd_and_even_lengths() -> None:
    cut_small()
    for batch, length, heads, head_dim in [(2, 37, 1, 64), (1, 64, 2, 64), (1, 33, 1, 128)]:
        errors = attention_errors(batch, length, heads, head_dim, torch.float32)
        assert max(errors) < 1e-6, (length, head_dim, errors)


def attention_in_bf16() -> None:
    cut_small()
    for length, head_dim in ((45, 64), (32, 128)):
        errors = attention_errors(1, length, 1, head_dim, torch.bfloat16)
        assert max(errors) < 0.01, errors


def attention_of_separate_tensors_with_other_strides() -> None:
    from paceline.kernels import attention_backward, attention_forward

    cut_small()
    shape = 2, 2, 35, 64
    query, key = torch.randn(shape), torch.randn(2, 35, 2, 64).transpose(1, 2)
    value, above = (
        torch.randn(2, 2, 35, 128)[..., 64:],
        torch.randn(35, 2, 2, 64).permute(1, 2, 0, 3),
    )
    inputs = query, key, value
    out, logs = attention_forward.forward(*inputs)
    gradients = tuple(torch.empty_like(part) for part in inputs)
    attention_backward.backward_into(inputs, out, logs, above, gradients)
    exact = [part.double().requires_grad_() for part in inputs]
    expected, exact_logs = formula(*exact)
    wanted = torch.autograd.grad(expected, exact, above.double())
    pairs = [(logs, exact_logs), (out, expected), *zip(gradients, wanted, strict=True)]
    assert max(relative(found, right) for found, right in pairs) < 1e-6


def attention_stays_in_a_compiled_graph() -> None:
    from paceline.kernels.attention import attend

    cut_small()
    qkv = torch.randn(1, 20, 3, 1, 64, requires_grad=True)
    torch.library.opcheck(attend, (qkv,))

    def loss(values):
        return attend(2 * values)[0].square().sum()

    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True)
    assert torch.equal(with_gradients(compiled, [qkv])[1], with_gradients(loss, [qkv])[1])


def fp8_conversion_has_the_bits_of_torch() -> None:
    from paceline.kernels import fp8_kernel

    values = torch.randn(40, 144).bfloat16()
    for dtype in (E4M3, E5M2):
        found = fp8_kernel.quantized(values, dtype)
        assert found.inverse.log2() % 1 == 0
        right = (values.float() / found.inverse).to(dtype)
        assert fp8_kernel.LARGEST[dtype] / 4 < right.float().abs().max()
        assert torch.equal(found.values.view(torch.uint8), right.view(torch.uint8))
        assert torch.equal(found.transposed.view(torch.uint8), right.view(torch.uint8).t())


def fp8_gradients_are_those_of_torch_rounded() -> None:
    from paceline.kernels import fp8_kernel, loss_kernel

    logits, targets = (3 * torch.randn(40, 144)).bfloat16(), torch.randint(144, (40,))
    _, logs = loss_kernel.losses_of(logits, targets)
    scale = torch.tensor(2.0**15)
    found = loss_kernel.gradients_of(logits, targets, logs, scale, E5M2)
    exact = logits.float().softmax(1) - torch.nn.functional.one_hot(targets, 144)
    assert relative(found.float() / scale, exact) < 0.06
    flipped = fp8_kernel.transposed(found).view(torch.uint8)
    assert torch.equal(flipped, found.view(torch.uint8).t())


def head_inputs():
    hidden = torch.randn(48, 32).bfloat16().requires_grad_()
    weight = (0.3 * torch.randn(160, 32)).bfloat16().requires_grad_()
    return [hidden, weight], torch.randint(160, (48,))


def fp8_head_with_loss_is_near_fp32() -> None:
    from paceline.kernels import fp8_head

    inputs, targets = head_inputs()
    plain = [value.detach().float().requires_grad_() for value in inputs]
    for factor in (1.0, 0.37):
        above = torch.tensor(factor)
        expected = with_gradients(
            lambda x, w: torch.nn.functional.cross_entropy(x @ w.t(), targets), plain, above
        )
        runs = [
            with_gradients(lambda x, w: fp8_head.head_loss(x, w, targets), inputs, above)
            for _ in range(2)
        ]
        assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))
        assert max(relative(a, b) for a, b in zip(runs[0], expected, strict=True)) < 0.08


CHECKS = {
    check.__name__: check
    for check in (
        loss_is_that_of_torch,
        attention_in_blocks_of_the_gpu,
        attention_of_odd_and_even_lengths,
        attention_in_bf16,
        attention_of_separate_tensors_with_other_strides,
        attention_stays_in_a_compiled_graph,
        fp8_conversion_has_the_bits_of_torch,
        fp8_gradients_are_those_of_torch_rounded,
        fp8_head_with_loss_is_near_fp32,
    )
}


def what_it_raises(check) -> str:
    torch.manual_seed(0)
    try:
        check()
    except Exception:
        return traceback.format_exc()
    return ""


def main() -> None:
    import triton_interpreter

    triton_interpreter.correct()
    chosen = sys.argv[1:] or CHECKS
    print(json.dumps({name: what_it_raises(CHECKS[name]) for name in chosen}))


if __name__ == "__main__":
    main()
