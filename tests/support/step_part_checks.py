"""Checks of the Triton kernels of benchmarks/gpu/parts, in Triton's interpreter, on a CPU.

Run as a program, with TRITON_INTERPRET=1 set before Triton is imported; prints a JSON object: what each check raised.
"""

from __future__ import annotations

import json
import sys
import traceback
from functools import partial
from pathlib import Path

import torch

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def relative(found, expected) -> float:
    """Return the norm of the difference over that of the expected values."""
    gap = (found.double() - expected.double()).norm()
    return (gap / expected.double().norm()).item()


def with_gradients(function, inputs, above=None):
    result = function(*inputs)
    return result, *torch.autograd.grad(result, inputs, above)


def logits_and_targets(dtype):
    return (3 * torch.randn(3, 2100)).to(dtype).requires_grad_(), torch.randint(2100, (3,))


def loss_has_the_bits_of_today() -> None:
    from parts import one_pass_loss

    from paceline.recipes import loss_kernel

    for dtype in (torch.float32, torch.bfloat16):
        logits, targets = logits_and_targets(dtype)
        today = with_gradients(partial(loss_kernel.mean_loss, targets=targets), [logits])
        for over in (False, True):
            copy = logits.detach().clone().requires_grad_()
            loss = partial(one_pass_loss.mean_loss, targets=targets, over_logits=over)
            found = with_gradients(loss, [copy])
            assert torch.equal(found[0], today[0])
            assert torch.equal(found[1], today[1])
            assert (found[1].data_ptr() == copy.data_ptr()) == over


def loss_handles_the_upstream_factor() -> None:
    from parts import one_pass_loss

    from paceline.recipes import loss_kernel

    logits, targets = logits_and_targets(torch.float32)
    for expected, factor, exact in ((0.25, 0.25, True), (1.0, 0.3, False), (0.5, 2.0, True)):
        above = torch.tensor(factor)
        today = with_gradients(lambda x: loss_kernel.mean_loss(x, targets), [logits], above)[1]
        loss = partial(one_pass_loss.mean_loss, targets=targets, expected=expected)
        found = with_gradients(loss, [logits], above)[1]
        assert torch.equal(found, today) if exact else relative(found, today) < 1e-6


def loss_is_the_same_in_other_blocks() -> None:
    from parts import one_pass_loss

    logits, targets = logits_and_targets(torch.float32)
    expected = with_gradients(
        lambda x: torch.nn.functional.cross_entropy(x, targets), [logits.double()]
    )
    choice = one_pass_loss.CHOICES["8192, 16 warps, 2 rows per SM"]
    found = with_gradients(lambda x: one_pass_loss.mean_loss(x, targets, choice), [logits])
    assert max(relative(a, b) for a, b in zip(found, expected, strict=True)) < 1e-6


def attention_errors(
    batch: int, length: int, heads: int, head_dim: int, dtype, forward: str
) -> list[float]:
    """Return the errors of output, dQ, dK and dV; run twice and compare the bits."""
    from parts import attention_op

    qkv = torch.randn(batch, length, 3, heads, head_dim).to(dtype).requires_grad_()
    above = torch.randn(batch, length, heads, head_dim).to(dtype)
    attend = partial(attention_op.attend, forward=forward)
    out, gradient = with_gradients(attend, [qkv], above)
    again = with_gradients(attend, [qkv], above)
    assert torch.equal(out, again[0])
    assert torch.equal(gradient, again[1])
    assert gradient.is_contiguous()
    exact = with_gradients(
        lambda x: attention_op.formula(*attention_op.parts_of(x))[0].transpose(1, 2),
        [qkv.detach().double().requires_grad_()],
        above.double(),
    )
    pairs = [(out, exact[0]), *zip(gradient.unbind(2), exact[1].unbind(2), strict=True)]
    return [relative(found, expected) for found, expected in pairs]


def cut_small() -> None:
    """Let the kernels have several blocks of a short sequence, of other sizes in each kernel."""
    from parts import attention_backward, attention_forward
    from parts.attention_forward import Blocks

    attention_forward.FORWARD |= {64: Blocks(32, 16, 4, 1), 128: Blocks(16, 32, 4, 1)}
    attention_backward.QUERIES |= {64: Blocks(16, 32, 4, 1), 128: Blocks(32, 16, 4, 1)}
    attention_backward.KEYS |= {64: Blocks(32, 16, 4, 1), 128: Blocks(16, 32, 4, 1)}


def attention_in_blocks_of_the_gpu() -> None:
    assert max(attention_errors(1, 130, 1, 64, torch.float32, "triton")) < 1e-6


def attention_of_odd_and_even_lengths() -> None:
    cut_small()
    cases = [(2, 37, 1, 64, "triton"), (1, 64, 2, 64, "formula"), (1, 33, 1, 128, "triton")]
    for batch, length, heads, head_dim, forward in cases:
        errors = attention_errors(batch, length, heads, head_dim, torch.float32, forward)
        assert max(errors) < 1e-6, (length, head_dim, errors)


def attention_in_bf16() -> None:
    cut_small()
    for length, head_dim, forward in ((45, 64, "triton"), (32, 128, "formula")):
        errors = attention_errors(1, length, 1, head_dim, torch.bfloat16, forward)
        assert max(errors) < 0.01, errors


def attention_of_separate_tensors_with_other_strides() -> None:
    from parts import attention_backward, attention_forward, attention_op

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
    expected, exact_logs = attention_op.formula(*exact)
    wanted = torch.autograd.grad(expected, exact, above.double())
    pairs = [(logs, exact_logs), (out, expected), *zip(gradients, wanted, strict=True)]
    assert max(relative(found, right) for found, right in pairs) < 1e-6


def attention_stays_in_a_compiled_graph() -> None:
    from parts import attention_op

    cut_small()
    qkv = torch.randn(1, 20, 3, 1, 64, requires_grad=True)
    torch.library.opcheck(attention_op.causal_attention, (qkv, "triton"))

    def loss(values):
        return attention_op.attend(2 * values, "triton").square().sum()

    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True)
    assert torch.equal(with_gradients(compiled, [qkv])[1], with_gradients(loss, [qkv])[1])


def fp8_conversion_has_the_bits_of_torch() -> None:
    from parts import fp8_tensors

    values = torch.randn(40, 144).bfloat16()
    for dtype in (E4M3, E5M2):
        found = fp8_tensors.quantized(values, dtype, fp8_tensors.largest_of(values), both=True)
        assert found.inverse.log2() % 1 == 0
        right = (values.float() / found.inverse).to(dtype)
        assert fp8_tensors.LARGEST[dtype] / 4 < right.float().abs().max()
        flipped = right.view(torch.uint8).t()
        assert torch.equal(found.values.view(torch.uint8), right.view(torch.uint8))
        assert torch.equal(found.transposed.view(torch.uint8), flipped)
        assert torch.equal(fp8_tensors.transposed(right).view(torch.uint8), flipped)


def head_inputs():
    hidden = torch.randn(48, 32).bfloat16().requires_grad_()
    weight = (0.3 * torch.randn(160, 32)).bfloat16().requires_grad_()
    return [hidden, weight], torch.randint(160, (48,))


def rounded(values, dtype):
    """Return values as fp8 keeps them, by plain torch."""
    _, exponent = torch.frexp(values.abs().max().float())
    scale = 2.0 ** ((8 if dtype == E4M3 else 15) - exponent.item())
    return (values.float() * scale).to(dtype).float() / scale


def fp8_head_is_a_product_of_rounded_values() -> None:
    from parts import fp8_head

    inputs, _ = head_inputs()
    above = (torch.randn(48, 160) / 48).clamp(-1 / 48, 1 / 48).bfloat16()
    hidden, weight = (rounded(value.detach(), E4M3) for value in inputs)
    gradient = rounded(above, E5M2)
    expected = [hidden @ weight.t(), gradient @ weight, gradient.t() @ hidden]
    plain = above.float().t() @ inputs[0].detach().float()
    for bound in (None, 1 / 48):
        for kind, last in (("fp8", expected[2]), ("bf16", plain)):
            head = partial(fp8_head.head, bound=bound, weight_gradient=kind)
            found = with_gradients(head, inputs, above)
            wanted = [*expected[:2], last]
            assert max(relative(a, b) for a, b in zip(found, wanted, strict=True)) < 0.005


def fp8_head_with_loss_is_near_fp32() -> None:
    from parts import fp8_head

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


def gelu_is_that_of_torch() -> None:
    from parts import fast_gelu

    def plain(values):
        return torch.nn.functional.gelu(values, approximate="tanh")

    for dtype, limit in ((torch.float32, 1e-6), (torch.bfloat16, 0.01)):
        values = torch.linspace(-6, 6, 5001).to(dtype).requires_grad_()
        above = torch.randn(5001).to(dtype)
        found = with_gradients(fast_gelu.gelu, [values], above)
        exact = with_gradients(plain, [values.detach().double().requires_grad_()], above.double())
        assert max(relative(a, b) for a, b in zip(found, exact, strict=True)) < limit
    torch.library.opcheck(fast_gelu.gelu, (torch.randn(3, 50, requires_grad=True),))


CHECKS = {
    check.__name__: check
    for check in (
        loss_has_the_bits_of_today,
        loss_handles_the_upstream_factor,
        loss_is_the_same_in_other_blocks,
        attention_in_blocks_of_the_gpu,
        attention_of_odd_and_even_lengths,
        attention_in_bf16,
        attention_of_separate_tensors_with_other_strides,
        attention_stays_in_a_compiled_graph,
        fp8_conversion_has_the_bits_of_torch,
        fp8_head_is_a_product_of_rounded_values,
        fp8_head_with_loss_is_near_fp32,
        gelu_is_that_of_torch,
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
    sys.path[:0] = [str(BENCHMARKS / "gpu"), str(BENCHMARKS)]
    from parts import interpreter

    interpreter.correct()
    chosen = sys.argv[1:] or CHECKS
    print(json.dumps({name: what_it_raises(CHECKS[name]) for name in chosen}))


if __name__ == "__main__":
    main()
