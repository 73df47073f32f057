"""On a GPU: slices and bf16 weights have the bits of a whole model, also when several ranks share one card."""

from pathlib import Path

import pytest
import torch

from paceline.config import config_from_words
from paceline.exact.graph import CapturedUpdates
from paceline.recipes.gpt import build_optimizer, token_loss
from paceline.recipes.gpt_config import GptConfig, design_of
from paceline.recipes.gpt_model import GPT, Block
from paceline.world.process_group import join
from support.loops import Fitted, fit
from support.processes import run_on_processes

pytestmark = pytest.mark.gpu

FIXED = [
    "device=cuda",
    "size=nano",
    "context_length=32",
    "vocab_size=64",
    "batch.global_size=12",
    "steps=5",
    "dropout=0.1",
]


def learned(world, config, text: torch.Tensor) -> Fitted:
    """What a small GPT learns."""
    torch.manual_seed(0)
    model = GPT(design_of(config))
    data, engines = (text[:, :-1].contiguous(), text[:, 1:].contiguous()), []
    rule = lambda _: build_optimizer(model, config)  # noqa: E731
    keep = lambda run: engines.append(run._loop.updates)  # noqa: E731
    how = {"loss": token_loss, "optimizer": rule, "wrap": (Block,), "before": keep}
    fitted = fit(world, config, model, data, **how)
    assert isinstance(engines[0], CapturedUpdates) == (config.capture == "true")
    if config.capture == "true":
        assert engines[0]._captured
    return fitted


def on_gpu(cases: list[list[str]], backend: str = "gloo") -> list[str]:
    """What is learned in each case. The world is met once for all: the settings that differ do not enter into it."""
    fixed = [*FIXED, f"backend={backend}"]
    configs = [config_from_words(GptConfig, [*fixed, *words]) for words in cases]
    with join(configs[0]) as world:
        text = torch.randint(0, 64, (24, 33), generator=torch.Generator().manual_seed(3))
        return [learned(world, config, text).digest for config in configs]


PRECISIONS = ["fp32", "bf16", "bf16-master"]


def test_slices_on_a_shared_gpu_have_the_bits_of_a_whole_model(tmp_path: Path) -> None:
    whole = [["parallel=ddp", f"precision={precision}"] for precision in PRECISIONS]
    cases = [["parallel=fsdp", f"precision={precision}"] for precision in PRECISIONS]
    alone = run_on_processes(on_gpu, 1, tmp_path, {}, {"cases": whole})[0]
    assert len(set(alone)) == len(PRECISIONS)
    for size, backend in [(1, "gloo"), (2, "gloo"), (2, "nccl"), (4, "nccl")]:
        given = {"cases": cases, "backend": backend}
        assert run_on_processes(on_gpu, size, tmp_path, {}, given) == [alone] * size, given


@pytest.mark.parametrize("precision", PRECISIONS)
def test_compiled_slices_on_a_shared_gpu_have_the_bits_of_one_rank_alone(precision, tmp_path):
    # Units are compiled one by one. A whole model is compiled as a whole, so its bits are others.
    cases = [["parallel=fsdp", "compile=true", f"precision={precision}"]]
    alone = run_on_processes(on_gpu, 1, tmp_path, {}, {"cases": cases})
    for backend in ("gloo", "nccl"):
        given = {"cases": cases, "backend": backend}
        assert run_on_processes(on_gpu, 2, tmp_path, {}, given) == alone * 2, backend


def test_copies_of_slices_on_a_shared_gpu_have_the_bits_of_one_rank_alone(tmp_path: Path) -> None:
    cases = [
        ["parallel=fsdp", "shard_over=2", f"precision={precision}"]
        for precision in ("fp32", "bf16-master")
    ]
    alone = run_on_processes(on_gpu, 1, tmp_path, {}, {"cases": cases})[0]
    for backend in ("gloo", "nccl"):
        given = {"cases": cases, "backend": backend}
        assert run_on_processes(on_gpu, 4, tmp_path, {}, given) == [alone] * 4, backend


def test_blocks_that_are_computed_again_have_the_bits_of_those_that_are_kept(tmp_path):
    cases = [
        [f"parallel={parallel}", f"recompute={again}", f"precision={precision}"]
        for precision in PRECISIONS
        for parallel, again in (("ddp", "false"), ("fsdp", "true"))
    ]
    found = run_on_processes(on_gpu, 1, tmp_path, {}, {"cases": cases})[0]
    assert found[::2] == found[1::2]


@pytest.mark.parametrize("optimizer", ["optimizer=adamw", "optimizer=muon"])
@pytest.mark.parametrize("compiles", ["compile=false", "compile=true"])
def test_captured_steps_with_masters_have_the_bits_of_eager_ones(optimizer, compiles, tmp_path):
    words = [optimizer, compiles]
    words += ["precision=bf16-master", "clip_norm=0.5", "dropout=0"]
    cases = [[*words, "capture=false"], [*words, "capture=true"]]
    eager, captured = run_on_processes(on_gpu, 1, tmp_path, {}, {"cases": cases})[0]
    assert eager == captured
    for backend in ("gloo", "nccl"):
        given = {"cases": [[*words, "capture=true"]], "backend": backend}
        assert run_on_processes(on_gpu, 2, tmp_path, {}, given) == [[eager]] * 2, backend
