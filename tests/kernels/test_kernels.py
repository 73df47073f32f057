"""Do the Triton kernels compute what torch computes? In Triton's interpreter, where Triton is installed; and on a GPU."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.nn.functional import cross_entropy, linear, scaled_dot_product_attention

import paceline
from paceline.config import config_from_words
from paceline.errors import ConfigError
from paceline.recipes import gpt
from paceline.recipes.gpt_config import GptConfig
from paceline.recipes.gpt_model import Design, Shape
from support.kernel_checks import CHECKS, relative, with_gradients
from support.processes import run_on_processes

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def raised() -> dict[str, str]:
    """What each check raised, in Triton's interpreter, which must be chosen before Triton is imported."""
    if importlib.util.find_spec("triton") is None:
        pytest.skip("needs Triton: pip install triton")
    env = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    words = [sys.executable, "tests/support/kernel_checks.py"]
    done = subprocess.run(words, cwd=ROOT, env=env, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("name", CHECKS)
def test_a_kernel_is_right(raised: dict[str, str], name: str) -> None:
    assert raised[name] == ""


def test_attention_on_a_cpu_is_that_of_torch() -> None:
    qkv = torch.randn(2, 7, 3, 4, 8)
    query, key, value = qkv.permute(2, 0, 3, 1, 4)
    right = scaled_dot_product_attention(query, key, value, is_causal=True)
    assert torch.equal(paceline.causal_attention(qkv), right.transpose(1, 2))


def attention_errors(length: int, head_dim: int) -> list[float]:
    """Return the errors of output and gradient, if three runs have the same bits: two eager ones, and a compiled one."""
    torch.manual_seed(0)
    qkv = torch.randn(2, length, 3, 3, head_dim, device="cuda").bfloat16().requires_grad_()
    above = torch.randn(2, length, 3, head_dim, device="cuda").bfloat16()

    def plain(values: torch.Tensor) -> torch.Tensor:
        query, key, value = values.permute(2, 0, 3, 1, 4)
        mask = torch.ones(length, length, dtype=torch.bool, device="cuda").triu(1)
        scores = (query @ key.transpose(-1, -2) / head_dim**0.5).masked_fill(mask, -torch.inf)
        return (scores.softmax(-1) @ value).transpose(1, 2)

    runs = [with_gradients(paceline.causal_attention, [qkv], above) for _ in range(2)]
    compiled = torch.compile(paceline.causal_attention, fullgraph=True)
    runs.append(with_gradients(compiled, [qkv], above))
    for run in runs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(runs[0], run, strict=True))
    exact = with_gradients(plain, [qkv.detach().double().requires_grad_()], above.double())
    return [relative(found, right) for found, right in zip(runs[0], exact, strict=True)]


@pytest.mark.gpu
@pytest.mark.parametrize(("length", "head_dim"), [(1024, 64), (777, 64), (300, 128)])
def test_attention_on_a_gpu_is_right_and_the_same_twice(length, head_dim, tmp_path):
    given = {"length": length, "head_dim": head_dim}  # in a process that ends with its compilers
    assert max(run_on_processes(attention_errors, 1, tmp_path, {}, given)[0]) < 0.01


@pytest.mark.gpu
def test_an_output_layer_in_fp8_is_near_fp32() -> None:
    from paceline.kernels.fp8_head import head_loss

    torch.manual_seed(0)
    hidden = torch.randn(256, 128, device="cuda").requires_grad_()
    weight = (0.1 * torch.randn(512, 128, device="cuda")).requires_grad_()
    targets = torch.randint(512, (256,), device="cuda")
    runs = [
        with_gradients(lambda x, w: head_loss(x, w, targets), [hidden, weight]) for _ in range(2)
    ]
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))
    plain = with_gradients(lambda x, w: cross_entropy(linear(x, w), targets), [hidden, weight])
    assert max(relative(a, b) for a, b in zip(runs[0], plain, strict=True)) < 0.08
    with pytest.raises(paceline.PacelineError, match="250"):
        head_loss(hidden[:250], weight, targets[:250])


@pytest.mark.parametrize("given", ["parallel=fsdp", "precision=fp16"])
def test_an_output_layer_in_fp8_names_the_setting_that_it_does_not_go_with(given: str) -> None:
    with pytest.raises(ConfigError, match=f"fp8_head=true .*{given}"):
        config_from_words(GptConfig, ["fp8_head=true", given])


def test_an_output_layer_in_fp8_is_refused_on_a_cpu_before_the_text_is_read(tmp_path: Path) -> None:
    words = ["fp8_head=true", "device=cpu", f"runs={tmp_path}", "data_folder=/no/such/text"]
    with pytest.raises(ConfigError, match="CPU"):
        gpt.main(config_from_words(GptConfig, words))


def test_a_gpt_with_an_output_layer_in_fp8_returns_logits_in_evaluation_only() -> None:
    model = gpt.GPT(Design(Shape(1, 1, 16), 32, 8, fp8_head=True))
    tokens = torch.zeros(2, 8, dtype=torch.int64)
    hidden, weight = model(tokens)
    assert hidden.shape == (2, 8, 16)
    assert weight is model.embedding.weight
    assert torch.equal(model.eval()(tokens), linear(hidden, weight))
