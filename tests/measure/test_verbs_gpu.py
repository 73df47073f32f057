"""On a GPU: bench, profile, doctor and scale, with one rank and with two that share the card, over both backends."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from paceline.measure.bench_plan import OPERATIONS
from support.program import around, paceline

pytestmark = pytest.mark.gpu
BENCH = ("--sizes", "1KiB,1MiB", "--seconds", "0", "--device", "cuda", "--json")


@pytest.mark.parametrize(
    ("ranks", "chosen", "backend"),
    [("1", "auto", "nccl"), ("2", "auto", "gloo"), ("2", "nccl", "nccl"), ("4", "nccl", "nccl")],
)
def test_every_result_of_every_operation_is_right(
    tmp_path: Path, ranks: str, chosen: str, backend: str
) -> None:
    if torch.cuda.device_count() != 1:
        pytest.skip("needs exactly one GPU")
    done = paceline("bench", "-n", ranks, "--backend", chosen, *BENCH, folder=tmp_path)
    assert done.code == 0, done
    found = json.loads(done.out)
    assert (found["right"], found["device"], found["backend"]) == (True, "cuda", backend)
    assert found["gpu"] == torch.cuda.get_device_name()
    assert len(found["operations"]) == len(OPERATIONS) - (ranks == "1")


@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_a_profile_of_two_ranks_says_where_the_time_goes(tmp_path: Path, backend: str) -> None:
    words = ("-n", "2", "--skip", "2", "--steps", "2", "--json")
    given = around("toy", (*words, "device=cuda", f"backend={backend}"))
    done = paceline("profile", *given, folder=tmp_path)
    assert done.code == 0, done
    found = json.loads(done.out)
    assert (found["ranks"], found["steps"], found["device"]) == (2, 2, "cuda")


def test_the_doctor_knows_the_card_and_its_backends(tmp_path: Path) -> None:
    done = paceline("doctor", "--json", folder=tmp_path)
    found = {each["check"]: each["says"] for each in json.loads(done.out)["findings"]}
    assert torch.cuda.get_device_name() in found["gpus"]
    assert "nccl" in found["backends"]


def test_scaling_says_that_ranks_share_the_card(tmp_path: Path) -> None:
    words = ("--worlds", "1,2", "--rounds", "1", "--steps", "4", "--warmup", "2", "--json")
    done = paceline("scale", *around("toy", (*words, "device=cuda")), folder=tmp_path)
    assert done.code == 0, done
    sizes = json.loads(done.out)["sizes"]
    shared = "2 ranks share 1 GPU" * (torch.cuda.device_count() == 1)
    assert [size["shares"] for size in sizes] == ["", shared]
