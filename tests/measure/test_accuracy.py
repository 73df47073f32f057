"""The script that trains MNIST to 99 %: the same bits on any number of ranks, and a summary over seeds."""

from __future__ import annotations

import gzip
import json
import struct
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor

from support.example_trainings import check_same_bits, imported

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks/gpu/accuracy.py"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return imported(SCRIPT)


def write_idx(folder: Path, name: str, values: Tensor) -> None:
    """Write a gzipped IDX file of bytes."""
    header = struct.pack(f">I{values.ndim}I", 0x0800 + values.ndim, *values.shape)
    (folder / f"{name}.gz").write_bytes(gzip.compress(header + values.numpy().tobytes()))


@pytest.fixture
def few_digits(tmp_path: Path, script: ModuleType) -> Path:
    """Return a folder with the built-in digits, as MNIST's files."""
    folder = tmp_path / "digits"
    folder.mkdir()
    train, test = script.read_digits("")
    for name, values in zip(script.FILES, (*train, *test), strict=True):
        write_idx(folder, name, values.byte()[:256])
    return folder


@pytest.mark.heavy
def test_the_same_bits_on_any_number_of_ranks_and_through_a_killed_rank(tmp_path: Path) -> None:
    _, digests, _ = check_same_bits(SCRIPT, tmp_path)
    assert any("whitening" in name for name in digests)


@pytest.mark.heavy
def test_each_seed_trains_in_its_own_process(tmp_path: Path, few_digits: Path) -> None:
    words = ["--seeds", "2", f"data_folder={few_digits}", "steps=3", "batch.global_size=64"]
    command = [sys.executable, str(SCRIPT), *words]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=True)
    assert "of 2 seeds reached 99%" in done.stdout
    runs = [json.loads(line.partition(": ")[2]) for line in done.stderr.splitlines()]
    assert [run["after_imports_s"] > run["from_first_step_s"] > 0 for run in runs] == [True, True]
    assert not (tmp_path / "runs").exists()


def test_whitened_patches_are_uncorrelated_and_each_filter_has_a_sign(script: ModuleType) -> None:
    images = script.read_digits("")[0][0]
    filters = script.whitening_filters(images)
    assert torch.equal(filters[:9], -filters[9:])
    rows = filters[:9].flatten(1)
    assert (rows.gather(1, rows.abs().argmax(1, keepdim=True)) > 0).all()
    responses = torch.nn.functional.conv2d(images.unsqueeze(1).float(), filters[:9])
    covariance = responses.transpose(0, 1).flatten(1).cov()
    assert torch.allclose(covariance, covariance.diag().diag(), atol=1e-3)
    assert (covariance.diag() <= 1.001).all()


def test_digits_move_by_at_most_the_given_pixels(script: ModuleType) -> None:
    image = torch.zeros(1, 28, 28, dtype=torch.uint8)
    image[0, 10, 20] = 200
    moved = script.shifted(image.expand(64, 28, 28), 2)
    places = moved.nonzero()
    assert len(places) == 64
    assert set(places[:, 1].tolist()) == {8, 9, 10, 11, 12}
    assert set(places[:, 2].tolist()) == {18, 19, 20, 21, 22}
    assert script.shifted(image, 0) is image
