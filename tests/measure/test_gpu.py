"""On a GPU: NCCL alone, and two ranks that share the card over gloo."""

import json
from pathlib import Path

import pytest
import torch

from support.program import around, paceline

pytestmark = pytest.mark.gpu
WORDS = ("--sizes", "1KiB,1MiB", "--seconds", "0", "--device", "cuda", "--json")


@pytest.mark.parametrize(("ranks", "backend"), [("1", "nccl"), ("2", "gloo")])
def test_every_result_is_right(tmp_path: Path, ranks: str, backend: str) -> None:
    if torch.cuda.device_count() != 1:
        pytest.skip("needs exactly one GPU")
    done = paceline("bench", "-n", ranks, *WORDS, folder=tmp_path)
    assert done.code == 0, done
    found = json.loads(done.out)
    assert (found["right"], found["device"], found["backend"]) == (True, "cuda", backend)
    assert found["gpu"] == torch.cuda.get_device_name()
    assert len(found["operations"]) == 5 + (ranks == "2")


def test_scaling_says_that_ranks_share_the_card(tmp_path: Path) -> None:
    words = (
        "--worlds",
        "1,2",
        "--rounds",
        "1",
        "--steps",
        "4",
        "--warmup",
        "2",
        "--json",
        "device=cuda",
    )
    done = paceline("scale", *around("toy", words), folder=tmp_path)
    assert done.code == 0, done
    sizes = json.loads(done.out)["sizes"]
    assert [size["shares"] for size in sizes] == [
        "",
        "2 ranks share 1 GPU" * (torch.cuda.device_count() == 1),
    ]
