"""On a GPU: the same bits, also when several ranks share one card."""

import json
import os
from pathlib import Path

import pytest
import torch
from processes import run_on_processes

from paceline.config import config_from_words
from paceline.recipes.mnist import MnistConfig

pytestmark = pytest.mark.gpu


def digest_on_gpu(words: list[str]) -> str:
    import paceline.recipes.mnist as recipe

    recipe.main(config_from_words(MnistConfig, ["device=cuda", "steps=4", "batch.global_size=64", *words]))
    assert torch.cuda.memory_allocated() > 0
    return json.loads(Path("runs/mnist/events.jsonl").read_text().splitlines()[-1])["digest"] if os.environ["RANK"] == "0" else ""


@pytest.mark.parametrize("words", [[], ["norm=batch", "optimizer=sgd", "batch.lanes=8"]], ids=["plain", "batchnorm"])
def test_ranks_that_share_a_gpu_train_the_same_bits_as_one(words, tmp_path):
    found = {size: run_on_processes(digest_on_gpu, size, tmp_path, {}, {"words": words})[0] for size in (1, 2, 3, 4)}
    assert len(set(found.values())) == 1, found


def backend_of(config, world) -> tuple[str, str]:
    import torch.distributed as dist

    return world.device, dist.get_backend()


def test_ranks_that_share_a_gpu_talk_over_gloo(tmp_path):
    if torch.cuda.device_count() != 1:
        pytest.skip("needs exactly one GPU")
    assert run_on_processes(backend_of, 2, tmp_path, {}) == [("cuda:0", "gloo")] * 2


def test_free_summation_trains_on_a_shared_gpu_too(tmp_path):
    run_on_processes(digest_on_gpu, 2, tmp_path, {}, {"words": ["exact=false"]})
