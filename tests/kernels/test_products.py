"""Linear layers by tuned products: the right numbers, the same bits whichever algorithm is fastest, choices that are kept."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from paceline.kernels import products
from paceline.kernels.cublaslt import Algorithm, Epilogue, Operands, Problem
from paceline.kernels.linear import (
    Linear,
    gelu_mlp,
    hidden_gradient,
    input_gradient,
    linear,
    mlp,
    product,
)
from support.kernel_checks import relative, with_gradients
from support.processes import run_on_processes

PROBLEM = Problem(4096, 96, 64, True, Epilogue.BIAS)


@pytest.fixture(autouse=True)
def _card(monkeypatch: pytest.MonkeyPatch) -> None:
    if not torch.cuda.is_available():
        monkeypatch.setattr(products, "card", lambda: "H200 sm90")


def drawn(*size: int) -> Tensor:
    return torch.randn(size, requires_grad=True)


def algorithms(count: int) -> list[Algorithm]:
    return [Algorithm(None, (number,)) for number in range(count)]  # type: ignore[arg-type]


def plain_mlp(inputs, up, up_bias, down, down_bias) -> Tensor:
    inside = functional.gelu(functional.linear(inputs, up, up_bias), approximate="tanh")
    return functional.linear(inside, down, down_bias)


@pytest.mark.parametrize("has_bias", [False, True])
def test_operators_are_right_for_autograd_and_the_compiler(has_bias: bool) -> None:
    biases = [drawn(32) if has_bias else None, drawn(8) if has_bias else None]
    torch.library.opcheck(product, (drawn(6, 8), drawn(32, 8), biases[0]))
    torch.library.opcheck(input_gradient, (torch.randn(6, 8), torch.randn(8, 16)))
    inputs = drawn(6, 8), drawn(32, 8), biases[0], drawn(8, 32), biases[1]
    torch.library.opcheck(mlp, inputs)
    matrices = torch.randn(6, 8), torch.randn(8, 32), torch.randn(6, 32)
    torch.library.opcheck(hidden_gradient, matrices)
    given = [one for one in inputs if one is not None]
    found = torch.autograd.grad(mlp(*inputs)[0].square().sum(), given)
    right = torch.autograd.grad(plain_mlp(*inputs).square().sum(), given)
    assert all(torch.equal(one, other) for one, other in zip(found, right, strict=True))


def test_frozen_weights_get_no_gradient() -> None:
    inputs, up, down = drawn(6, 8), torch.randn(32, 8), drawn(8, 32)
    mlp(inputs, up, None, down, None)[0].sum().backward()
    assert up.grad is None
    assert inputs.grad is not None
    assert down.grad is not None


def test_on_a_cpu_they_are_those_of_torch() -> None:
    inputs, up, down = torch.randn(2, 5, 8), Linear(8, 32), Linear(32, 8)
    plain = functional.linear(inputs, up.weight, up.bias)
    assert torch.equal(linear(inputs, up.weight, up.bias), plain)
    right = plain_mlp(inputs, up.weight, up.bias, down.weight, down.bias)
    assert torch.equal(gelu_mlp(inputs, up, down), right)


def test_a_hook_on_a_layer_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.kernels.linear._is_tuned", lambda *_: True)
    inputs = torch.randn(6, 8).bfloat16()
    up, down, called = Linear(8, 32).bfloat16(), Linear(32, 8).bfloat16(), []
    without = gelu_mlp(inputs, up, down)
    up.register_forward_hook(lambda *_: called.append("up"))
    assert torch.equal(gelu_mlp(inputs, up, down), without)
    assert called == ["up"]


def test_an_algorithm_with_other_bits_is_not_chosen_however_fast() -> None:
    proposed = algorithms(4)
    results = [torch.tensor([1.0]), torch.tensor([1.0]), torch.tensor([1.0 + 2**-20])]

    def result_of(algorithm: Algorithm) -> list[Tensor]:
        if algorithm.settings == (3,):
            raise RuntimeError("status 15")
        return [results[algorithm.settings[0]]]

    same = products.with_bits_of_first(proposed, result_of)
    assert same == proposed[:2]
    times = {0: iter([5.0, 5.0, 5.0, 5.0, 5.0]), 1: iter([4.0, 90.0, 4.0, 90.0, 4.0])}
    fastest = products.fastest(same, lambda one: next(times[one.settings[0]]))
    assert fastest == proposed[1], "that of the median"


def added_in_blocks(operands: Operands, size: int) -> Tensor:
    """Return the product in bf16, with sums in fp32 of blocks of this length."""
    sums = torch.zeros(operands.result.shape)
    inputs, weight = operands.inputs.float(), operands.weight.float()
    for begin in range(0, inputs.shape[1], size):
        block = slice(begin, begin + size)
        sums += inputs[:, block] @ weight[:, block].t()
    return sums.bfloat16()


@pytest.mark.parametrize(("outputs", "inner"), [(48, 48), (144, 48), (48, 192)])
def test_another_order_of_addition_is_seen_in_small_products_too(outputs: int, inner: int) -> None:
    problem = Problem(1024, outputs, inner, True, Epilogue.GELU_BIAS)
    inputs, weight = torch.empty(1024, inner).bfloat16(), torch.empty(outputs, inner).bfloat16()
    empty = inputs.new_empty(1024, outputs)
    given = Operands(inputs, weight, empty, inputs.new_empty(outputs), empty)
    random, cancelling = products.trials(problem, given)
    exact = cancelling.inputs.double() @ cancelling.weight.double().t()
    assert exact.abs().max() < 1e-12
    assert cancelling.bias is not None
    assert cancelling.bias.count_nonzero() == 0
    assert added_in_blocks(random, 8).count_nonzero() > 0.99 * empty.numel()
    found, other = (added_in_blocks(cancelling, size) for size in (8, 16))
    assert (found != other).sum() > 0.05 * empty.numel()


def test_the_weight_of_a_gradient_cancels_along_its_other_side() -> None:
    problem = Problem(64, 32, 16, False, Epilogue.NONE)
    inputs, weight = torch.empty(64, 16).bfloat16(), torch.empty(16, 32).bfloat16()
    given = Operands(inputs, weight, inputs.new_empty(64, 32))
    cancelling = products.trials(problem, given)[1]
    assert (cancelling.inputs.double() @ cancelling.weight.double()).abs().max() < 1e-12


@pytest.mark.parametrize(
    ("inputs", "weight", "bias", "fit"),
    [
        (torch.zeros(4, 8), torch.zeros(6, 8), torch.zeros(6), True),
        (torch.zeros(4, 16), torch.zeros(6, 8), None, False),
        (torch.zeros(4, 8), torch.zeros(6, 8), torch.zeros(5), False),
        (torch.zeros(4, 8), torch.zeros(6, 8, device="meta"), None, False),
    ],
    ids=["right", "another width", "a short bias", "another device"],
)
def test_only_operands_that_fit_reach_the_library(inputs, weight, bias, fit):
    problem = Problem(4, 6, 8, True, Epilogue.NONE)
    given = [None if one is None else one.bfloat16() for one in (inputs, weight, bias)]
    assert products.fits(problem, *given, None) == fit
    assert not products.fits(problem, given[0].float(), *given[1:], None)


def test_choices_are_kept_with_compiled_code_of_one_card_and_library(tmp_path, monkeypatch):
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    products.keep_choice(PROBLEM, (1, 2))
    assert products.kept_choice(PROBLEM) is None
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    other = PROBLEM._replace(transposed=False)
    assert products.kept_choice(PROBLEM) is None
    products.keep_choice(PROBLEM, (66, 29))
    products.keep_choice(other, (66, 20))
    assert products.kept_choice(PROBLEM) == (66, 29)
    assert products.kept_choice(other) == (66, 20)
    assert [path.name for path in tmp_path.iterdir()] == ["products.json"]
    with monkeypatch.context() as patch:
        patch.setattr(products, "version", lambda: 999_999)
        assert products.kept_choice(PROBLEM) is None
    monkeypatch.setattr(products, "card", lambda: "A100 sm80")
    assert products.kept_choice(PROBLEM) is None


@pytest.mark.parametrize("text", ["", "[]", "{", '{"4096 rows": 3}', json.dumps({"x": ["y"]})])
def test_a_damaged_file_of_choices_is_as_good_as_none(text, tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    (tmp_path / "products.json").write_text(text)
    assert products.kept_choice(PROBLEM) is None
    products.keep_choice(PROBLEM, (1, 2))
    assert products.kept_choice(PROBLEM) == (1, 2)


# On a GPU


def mlp_errors(has_bias: bool) -> list[float]:
    """Return the errors of an MLP and its gradients, if eager, again and compiled have the same bits.

    The compiler adds up the gradients of biases in an order of its own.
    """
    torch.manual_seed(0)
    up, down = Linear(256, 1024, has_bias).cuda(), Linear(1024, 256, has_bias).cuda()
    inputs = torch.randn(4, 512, 256, device="cuda", requires_grad=True)
    above = torch.randn(4, 512, 256, device="cuda").bfloat16()
    parameters = [*up.parameters(), *down.parameters()]

    def function(*_: Tensor) -> Tensor:
        with torch.autocast("cuda", torch.bfloat16):
            return gelu_mlp(inputs, up, down)

    compiled = torch.compile(function, fullgraph=True)
    runs = [
        with_gradients(one, [inputs, *parameters], above) for one in (function, function, compiled)
    ]
    for run in runs[1:]:
        pairs = zip(runs[0], run, strict=True)
        assert all(torch.equal(one, other) for one, other in pairs if one.dim() > 1)
    exact = nn.ModuleList([up, down]).double()
    values = inputs.detach().double().requires_grad_()
    right = plain_mlp(values, exact[0].weight, exact[0].bias, exact[1].weight, exact[1].bias)
    wanted = torch.autograd.grad(right, [values, *exact.parameters()], above.double())
    assert len(products._chosen) == 4  # up with GELU, down, and two gradients of inputs
    return [relative(a, b) for a, b in zip(runs[0], [right, *wanted], strict=True)]


@pytest.mark.gpu
@pytest.mark.parametrize("has_bias", [False, True])
def test_an_mlp_on_a_gpu_is_right_and_the_same_twice(has_bias: bool, tmp_path: Path) -> None:
    errors = run_on_processes(mlp_errors, 1, tmp_path, {}, {"has_bias": has_bias})[0]
    assert max(errors) < 0.01


def tuned_twice(folder: str) -> tuple[list[bool], dict[str, list[int]]]:
    """Return whether two products with different algorithms have the same bits, and what was kept."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", folder)
        torch.manual_seed(0)
        inputs = torch.randn(8192, 768, device="cuda").bfloat16()
        weight = torch.randn(3072, 768, device="cuda").bfloat16()
        results = [product(inputs, weight, None)]
        kept = json.loads((Path(folder) / "products.json").read_text())
        products._chosen.clear()
        patch.setattr(products, "_tuned", None)  # the second start must not need it
        results.append(product(inputs, weight, None))
        patch.setattr(products, "_tuned", lambda _, __, proposed, ___: proposed[-1])
        patch.setattr(products, "kept_choice", lambda _: None)
        products._chosen.clear()
        results.append(product(inputs, weight, None))
        return [torch.equal(results[0], one) for one in results[1:]], kept


@pytest.mark.gpu
def test_a_kept_choice_is_used_and_every_choice_has_the_same_bits(tmp_path: Path) -> None:
    same, kept = run_on_processes(tuned_twice, 1, tmp_path, {}, {"folder": str(tmp_path)})[0]
    assert same == [True, True]
    (name,) = kept
    assert name.endswith(": 8192 rows, weight outputs x inner 3072 768, NONE")
