"""Handwritten digits as tensors: built-in UCI digits, MNIST from IDX files, or shards."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load
from torch import Tensor

from paceline.config import RunConfig
from paceline.data.download import PUBLIC_DATASETS
from paceline.data.mnist_idx import read_idx
from paceline.data.reading.open_dataset import open_dataset
from paceline.data.reading.sample_rng import SampleRng
from paceline.data.reading.source import Batch
from paceline.errors import DataError

Digits = tuple[Tensor, Tensor]

EMBEDDED = Path(__file__).with_name("digits.safetensors")
"""The 1,797 test digits of the UCI "Optical Recognition of Handwritten Digits" set (E. Alpaydin, C. Kaynak, 1998,
CC BY 4.0): `images` [1797, 8, 8], 0 to 16; `labels` [1797]."""

_MEAN, _SPREAD = 0.1307, 0.3081  # of MNIST's pixels
_HELD_OUT = 5  # every fifth digit

_FILES = {
    "train": ("train-images-idx3-ubyte", "train-labels-idx1-ubyte"),
    "test": ("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"),
}
_SHA256 = {
    file.name.removesuffix(".gz"): file.plain_sha256 for file in PUBLIC_DATASETS["mnist"].files
}


def embedded_digits() -> tuple[Digits, Digits]:
    """Return training and held-out digits, resized to 28x28."""
    stored = load(EMBEDDED.read_bytes())
    images = torch.nn.functional.interpolate(
        stored["images"].float().unsqueeze(1) / 16, size=28, mode="bilinear"
    )
    images, labels = (images - _MEAN) / _SPREAD, stored["labels"].long()
    held_out = torch.arange(len(labels)) % _HELD_OUT == 0
    return (images[~held_out], labels[~held_out]), (images[held_out], labels[held_out])


def mnist_digits(folder: str) -> tuple[Digits, Digits]:
    """Return MNIST's training and test digits from a folder of IDX files, gzipped or not."""
    if not folder:
        raise DataError(
            "data=mnist needs the folder of the MNIST IDX files",
            fix="run `paceline data get mnist`, set data_folder= to their folder, or use data=digits",
        )
    return _part(Path(folder), "train"), _part(Path(folder), "test")


def packed_digits(address: str, config: RunConfig) -> tuple[Any, Any]:
    """Return the datasets `train` and `test`, streamed from shards that `paceline data pack` made of IDX files."""
    if not address:
        raise DataError(
            "data=shards needs the folder or address of the datasets `train` and `test`",
            fix="run `paceline data pack FOLDER --part train --to SETS/train`, the same for test, and set data_folder=SETS",
        )
    train, test = (
        open_dataset(f"{address.rstrip('/')}/{part}", config, transform=_scaled)
        for part in ("train", "test")
    )
    return train, test


def _scaled(batch: Batch, draws: SampleRng) -> Batch:
    images, labels = batch
    return _pixels(images), labels.long()


def _pixels(images: Tensor) -> Tensor:
    """Return normalized pixels with a channel dimension."""
    return images.float().div_(255).sub_(_MEAN).div_(_SPREAD).unsqueeze(1)


def _part(folder: Path, part: str) -> Digits:
    nested = folder / "mnist"
    home = nested if nested.is_dir() else folder
    images, labels = (read_idx(home, name, _SHA256[name]) for name in _FILES[part])
    if images.ndim != 3 or labels.ndim != 1 or len(images) != len(labels):
        raise DataError(
            f"{home}: images of shape {images.shape} do not match labels of shape {labels.shape}",
            fix="download the four files again",
        )
    return _pixels(torch.from_numpy(images)), torch.from_numpy(labels).long()
