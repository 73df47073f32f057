"""Does the core of `scripts/model_table.py` give the same bits on 1, 2 and 3 ranks and through two resumes, or a refusal?"""

from __future__ import annotations

import itertools
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "scripts"))

from combinations import pairs
from combinations.table import find
from combinations.verdicts import Judge

from support import processes

assert processes.CONTEXT  # its server has imported torch, and forks the ranks

SAME = [
    "text: GPT with tied weights, fsdp",
    "speech: GRU and CTC, ragged",
    "graphs: attention",
    "optimizer: strings in its state",
    "norm: batch, frozen by eval mode",
    "parameters: experts, ddp",
    "parameters: frozen in step 4, fsdp",
    "parameters: unfrozen in step 4, ddp",
    "buffer: moves in evaluation only",
    "evaluation: in train mode, with BatchNorm",
    "recomputation: reentrant",
]
REFUSED = {
    "optimizer: LBFGS": "LBFGS",
    "optimizer: Muon, fsdp": "Muon .* parallel=fsdp",
    "optimizer: Adafactor, fsdp": "Adafactor .* parallel=fsdp",
    "optimizer: lists in its state": r"history\.blocks\.0\.weight",
    "optimizer: groups that the loop adds": "AdamW .* 8 .* 6 ",
    "norm: SyncBatchNorm": "1 .* SyncBatchNorm",
    "norm: batch with lanes of one sample": r"block\.1 .*BatchNorm1d",
    "parameters: stochastic depth, fsdp": "parallel=fsdp .* lane",
    "hooks: parameter, fsdp": r"blocks\.0\.weight .* hook",
    "hooks: post-accumulate": r"blocks\.0\.weight .* hook",
    "sparse: Embedding, SparseAdam": "users .* sparse=True",
    "bf16-master: spectral norm": "precision=bf16-master .* spectral norm",
}


@pytest.fixture(scope="module")
def judge(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Judge]:
    """One group of ranks per number of ranks trains all lines."""
    made = Judge(tmp_path_factory.mktemp("table"))
    yield made
    made.close()


@pytest.mark.parametrize("name", SAME)
def test_these_train_the_same_bits_in_every_world_and_through_two_resumes(name, judge):
    assert str(judge.judge(name)) == "same"


@pytest.mark.parametrize("name", REFUSED)
def test_these_are_refused_by_name(name: str, judge: Judge) -> None:
    verdict = judge.judge(name)
    assert verdict.kind == "refused"
    assert re.search(REFUSED[name], verdict.details)


def test_every_two_choices_of_a_training_on_a_gpu_meet_in_a_line() -> None:
    lines = [name.removeprefix(pairs.PREFIX).split(", ") for name in pairs.lines("cuda")]
    met = {pair for line in lines for pair in itertools.combinations(line, 2)}
    assert {("nccl", "captured"), ("gloo", "fsdp"), ("local SGD", "fp16 wire")} <= met
    assert not {("fp16", "captured"), ("fsdp", "captured"), ("fsdp", "bf16 wire")} & met
    columns = [set(column) for column in zip(*lines, strict=True)]
    both = itertools.combinations(columns, 2)
    every = {pair for left, right in both for pair in itertools.product(left, right)}
    assert len(every - met) < 30  # those that exclude each other
    assert len(lines) < 40
    for line in lines:
        assert find(pairs.PREFIX + ", ".join(line)).settings["backend"] in {"nccl", "gloo"}


def test_a_line_without_exact_sums_only_has_to_train(judge: Judge) -> None:
    name = "pairs: gloo, ddp, fp32, eager, launched, free, bf16 wire, SGD, layers"
    assert str(judge.judge(name)) == "trained"
