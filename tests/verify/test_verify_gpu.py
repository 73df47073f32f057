"""On a GPU, over both backends: `paceline verify` of the recipes, in ways of training that differ in how gradients are added."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from support.program import around, paceline

pytestmark = pytest.mark.gpu
TEXT = "To be, or not to be, that is the question. " * 400
GPT = ("context_length=32", "batch.global_size=16", "batch.lanes=4")
LOCAL_SGD = ("local_sgd.steps=2", "local_sgd.replicas=4", "compile=false", "capture=false")
SHARDED = (*GPT, "parallel=fsdp", "precision=bf16-master", "compile=false")
FREE = ("exact=false", "compile=false", "capture=false")
CASES = {
    "mnist, as the recipe chooses": ("mnist", "1,2,4"),
    "mnist, local SGD": ("mnist", "1,2,4", *LOCAL_SGD),
    "mnist, bf16 wire": ("mnist", "1,2", *FREE, "compression=bf16"),
    "mnist, fp16 wire": ("mnist", "1,2", *FREE, "compression=fp16"),
    "gpt, bf16, captured": ("gpt", "1,2,4", *GPT, "precision=bf16", "compile=false", "capture=true"),
    "gpt, local SGD": ("gpt", "1,2,4", *GPT, *LOCAL_SGD),
    "gpt, FSDP, bf16-master": ("gpt", "1,2,4", *SHARDED),
    "gpt, replicated FSDP shards": ("gpt", "1,4", *SHARDED, "shard_over=2"),
    "gpt, PowerSGD wire": ("gpt", "1,2", *GPT, *FREE, "compression=powersgd"),
}  # fmt: skip
"""Recipe, numbers of ranks, settings."""


@pytest.mark.parametrize("backend", ["gloo", "nccl"])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_recipe_gives_the_same_bits_on_every_number_of_ranks(
    case: tuple[str, ...], backend: str, tmp_path: Path
) -> None:
    recipe, worlds, *settings = case
    if recipe == "gpt":
        (tmp_path / "text.txt").write_text(TEXT, encoding="utf-8")
        settings += [f"data_folder={tmp_path / 'text.txt'}"]
    words = ("--worlds", worlds, "--steps", "4", "--json")
    given = (*words, *settings, "device=cuda", f"backend={backend}")
    done = paceline("verify", *around(recipe, given), folder=tmp_path)
    assert done.code == 0, done
    found = json.loads(done.out)
    is_free = "exact=false" in settings
    assert (len(set(found["digests"].values())) > 1, found["tolerance"] > 0) == (is_free, is_free)
