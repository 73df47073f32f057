"""On a GPU: the same bits, also when several ranks share one card."""

import math
import os
from functools import partial
from pathlib import Path

import numpy
import pytest
import torch
from torch import nn

import paceline
from paceline.config import RunConfig, config_from_words
from paceline.events import surviving
from paceline.exact.state import state_digest
from paceline.recipes.mnist import MnistConfig
from support.datasets import make_dataset
from support.loops import events_in, fit
from support.processes import run_on_processes

pytestmark = pytest.mark.gpu


def digest_on_gpu(words: list[str]) -> str:
    import paceline.recipes.mnist as recipe

    fixed = ["device=cuda", "steps=4", "batch.global_size=64"]
    config = config_from_words(MnistConfig, [*fixed, *words])
    recipe.main(config)
    assert torch.cuda.memory_allocated() > 0
    if os.environ["RANK"] != "0":
        return ""
    for event in events_in(Path(config.runs), "EpochDone", "mnist"):
        assert math.isfinite(event["metrics"]["eval_loss"])
    return surviving(Path(config.runs) / "mnist/events.jsonl")[-1]["digest"]


def in_ways(function, ways, words, folder, **more) -> set:
    """Return what the first rank returns in each way: captured or not, on some ranks, over a backend."""
    found = {}
    for capture, size, backend in ways:
        (own := folder / f"{capture}{size}{backend}").mkdir()
        given = [*words, f"backend={backend}", *([f"capture={capture}"] if capture else [])]
        found[capture, size, backend] = run_on_processes(function, size, own, {}, {"words": given})[
            0
        ]
    return set(found.values())


@pytest.mark.parametrize(
    "words", [[], ["norm=batch", "optimizer=sgd", "batch.lanes=8"]], ids=["plain", "batchnorm"]
)
def test_ranks_that_share_a_gpu_train_the_same_bits_as_one(words, tmp_path):
    ways = [("", 1, "gloo"), ("", 2, "gloo"), ("", 3, "gloo"), ("", 2, "nccl"), ("", 4, "nccl")]
    assert len(in_ways(digest_on_gpu, ways, words, tmp_path)) == 1


def backend_of(config, world) -> tuple[str, str]:
    import torch.distributed as dist

    return world.device, dist.get_backend()


def test_ranks_that_share_a_gpu_talk_over_gloo(tmp_path):
    if torch.cuda.device_count() != 1:
        pytest.skip("needs exactly one GPU")
    assert run_on_processes(backend_of, 2, tmp_path, {}) == [("cuda:0", "gloo")] * 2


def clipped(config, world) -> str:
    """A model of several buckets, clipped: norms of gradients that lie anywhere in memory."""
    model = nn.Sequential(
        nn.Linear(8, 700), nn.Tanh(), nn.Linear(700, 701), nn.Tanh(), nn.Linear(701, 1)
    )
    generator = torch.Generator().manual_seed(3)
    data = torch.randn(37, 8, generator=generator), torch.randn(37, 1, generator=generator)
    return fit(world, config, model, data, optimizer=partial(torch.optim.AdamW, lr=0.01)).digest


@pytest.mark.parametrize("clip_norm", [0.0, 0.5])
def test_several_buckets_and_clipping_keep_the_bits_on_a_shared_gpu(clip_norm, tmp_path):
    given = {"batch.lanes": 5, "batch.global_size": 20, "epochs": 2, "clip_norm": clip_norm}
    found = set()
    for size, backend in [(1, "gloo"), (2, "gloo"), (3, "gloo"), (3, "nccl"), (4, "nccl")]:
        settings = given | {"device": "cuda", "backend": backend}
        found |= set(run_on_processes(clipped, size, tmp_path, settings))
    assert len(found) == 1


MODES = {
    "fp32": [],
    "bf16": ["precision=bf16"],
    "clipped": ["clip_norm=0.5", "lr.schedule=cosine"],
    "two forms": ["steps=15", "batch.global_size=700"],
    "batch norm": ["norm=batch", "optimizer=adamw"],
    "compiled": ["compile=true"],
    "rate ends at 0": ["compile=true", "precision=bf16", "lr.schedule=cosine"],
}


WAYS = [
    ("false", 1, "gloo"),
    ("true", 1, "gloo"),
    ("true", 3, "gloo"),
    ("false", 4, "gloo"),
    ("false", 2, "nccl"),
    ("true", 2, "nccl"),
    ("true", 4, "nccl"),
]
"""Captured or not, on some ranks, over a backend."""


@pytest.mark.parametrize("words", MODES.values(), ids=MODES)
def test_captured_steps_have_the_bits_of_eager_ones_on_any_number_of_ranks(words, tmp_path):
    words = ["steps=9", "batch.global_size=60", *words]
    assert len(in_ways(digest_on_gpu, WAYS, words, tmp_path)) == 1


def gpt_digest(words: list[str]) -> str:
    import paceline.recipes.gpt as recipe
    from paceline.recipes.gpt_config import GptConfig

    fixed = "device=cuda steps=6 context_length=32 batch.global_size=12 checkpoint.every=end"
    recipe.main(config_from_words(GptConfig, [*fixed.split(), *words]))
    return events_in(Path("runs"), name="gpt")[-1]["digest"] if os.environ["RANK"] == "0" else ""


GPTS = {
    "fp32": "dropout=0.1",
    "bf16, muon": "precision=bf16 optimizer=muon norm=rms",
    "compiled": "compile=true",
    "compiled bf16": "compile=true precision=bf16",
    "own attention": "heads=1 embedding_dim=64 precision=bf16",
    "tuned products": "compile=true embedding_dim=64 heads=1 precision=bf16 context_length=512",
    "fp8 head": "compile=true embedding_dim=64 heads=1 precision=bf16 fp8_head=true",
}


@pytest.mark.parametrize("words", GPTS.values(), ids=GPTS)
def test_a_small_gpt_has_the_same_bits_captured_or_not_on_any_number_of_ranks(words, tmp_path):
    (text := tmp_path / "text.txt").write_text("To be, or not to be, that is the question. " * 400)
    words = [*words.split(), f"data_folder={text}"]
    assert len(in_ways(gpt_digest, WAYS, words, tmp_path)) == 1


def two_optimizers(words: list[str]) -> tuple[str, list[float], int]:
    """Dict batches, two models, two updates per step that draw noise: digest, losses, captured updates."""
    config = config_from_words(
        RunConfig, ["device=cuda", "steps=7", "batch.global_size=12", "lr.schedule=cosine", *words]
    )
    rows = {"x": torch.randn(48, 6, generator=torch.Generator().manual_seed(3))}
    with paceline.Run(config) as run:
        make, judge = nn.Linear(4, 6), nn.Linear(6, 1)
        run.model(make, name="make")
        run.model(judge, name="judge")
        first = run.optimizer(torch.optim.AdamW(make.parameters(), lr=0.01), name="first")
        other = run.optimizer(torch.optim.AdamW(judge.parameters(), lr=0.01), name="other")

        def fake(batch):
            return make(torch.randn(len(batch["x"]), 4, device=batch["x"].device))

        def judged(batch):
            return (judge(batch["x"]) - judge(fake(batch).detach())).square().mean()

        def made(batch):
            return -judge(fake(batch)).mean()

        losses = []
        for step in run.steps(rows):
            losses.append(float(run.update(other, judged, step, clip=0.5)))
            losses.append(float(run.update(first, made, step)))
        captured = len(getattr(run._loop.updates, "_captured", ()))
        return state_digest(run._parts.model, run._parts.optimizer), losses, captured


def test_updates_of_two_optimizers_are_captured_with_the_bits_of_eager_ones(tmp_path):
    eager = run_on_processes(two_optimizers, 1, tmp_path, {}, {"words": ["capture=false"]})[0]
    assert eager[2] == 0
    for size, backend in [(1, "gloo"), (2, "gloo"), (2, "nccl")]:
        given = {"words": ["capture=true", f"backend={backend}"]}
        for found in run_on_processes(two_optimizers, size, tmp_path, {}, given):
            assert found == (*eager[:2], 2), (size, backend)


def lambda_in_the_loop(capture: str) -> None:
    words = ["device=cuda", "steps=40", "batch.global_size=4", f"capture={capture}"]
    with paceline.Run(config_from_words(RunConfig, words)) as run:
        model = run.model(nn.Linear(4, 1))
        optimizer = run.optimizer(torch.optim.AdamW(model.parameters()))
        for step in run.steps(torch.ones(8, 4)):
            run.update(optimizer, lambda batch: model(batch).mean(), step)


def test_a_loss_that_is_a_new_function_in_every_step_is_not_captured(tmp_path):
    run_on_processes(lambda_in_the_loop, 1, tmp_path, {}, {"capture": "auto"})
    with pytest.raises(AssertionError, match="before the loop"):
        run_on_processes(lambda_in_the_loop, 1, tmp_path, {}, {"capture": "true"})


def test_a_step_that_cannot_be_captured_says_why_or_goes_on_without(tmp_path):
    words = ["precision=fp16", "capture=true"]
    with pytest.raises(AssertionError, match="precision=bf16"):
        run_on_processes(digest_on_gpu, 1, tmp_path, {}, {"words": words})
    words = ["precision=fp16", "capture=auto", "resume=never"]
    run_on_processes(digest_on_gpu, 1, tmp_path, {}, {"words": words})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_loss_kernel_finds_torchs_loss_and_gradient(dtype):
    from paceline.kernels.loss_kernel import mean_loss

    generator = torch.Generator("cuda").manual_seed(1)
    scores = (
        torch.randn(37, 5003, device="cuda", generator=generator).mul(4).to(dtype).requires_grad_()
    )
    target = torch.randint(0, 5003, (37,), device="cuda", generator=generator)
    plain = torch.nn.functional.cross_entropy(scores.float(), target)
    (wanted,) = torch.autograd.grad(2 * plain, scores)
    found = mean_loss(scores, target)
    (gradient,) = torch.autograd.grad(2 * found, scores)
    torch.testing.assert_close(found, plain, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(gradient, wanted)


def test_what_lies_on_the_host_is_sent_by_nccl_too(tmp_path):
    import torch.distributed as dist

    from paceline.world.collectives import all_gather_flat

    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("nccl", store=store, rank=0, world_size=1)
    try:
        found = all_gather_flat(torch.arange(3))
    finally:
        dist.destroy_process_group()
    assert found.device.type == "cpu"
    assert found.tolist() == [0, 1, 2]


def test_the_bits_do_not_depend_on_the_way_that_data_take(tmp_path):
    generator = numpy.random.default_rng(3)
    images = generator.integers(0, 256, (50, 28, 28), dtype=numpy.uint8)
    labels = generator.integers(0, 10, 50)
    for part in ("train", "test"):
        make_dataset(tmp_path / part, 50, 7, lambda *at: {"image": images[slice(*at)], "label": labels[slice(*at)]})  # fmt: skip
    words = ["data=shards", f"data_folder={tmp_path}", "steps=9", "batch.global_size=20"]
    found = set()
    for resident in (4, 0):
        (folder := tmp_path / str(resident)).mkdir()
        ways = [("false", 1, "gloo"), ("true", 1, "gloo")]
        found |= in_ways(digest_on_gpu, ways, [*words, f"read.resident_gb={resident}"], folder)
    assert len(found) == 1
